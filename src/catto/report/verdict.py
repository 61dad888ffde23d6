"""The verdict of a report: which method has the lowest loss, and how much worse the others are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from catto.measure import MeasureSettings
from catto.metrics.catalogue import Versus
from catto.metrics.comparisons import compare_mean_scores
from catto.metrics.intervals import drop_invalid_interval
from catto.metrics.resampling import Answers, ScoredAnswers, ignore_tick
from catto.records import content_hash
from catto.report.cell_answers import CellAnswers
from catto.report.numbers import GroupNumbers, Numbers, Verdict

# Swaps of the swap test per comparison in a table. A test with s swaps has no p-value below 1 / (1 + s). Correcting for
# m comparisons multiplies the smallest p-value by m, which gives m / (1 + 50 m) < 0.02. With a fixed number of swaps,
# no difference in a large table could be significant.
SWAPS_PER_COMPARISON = 50


class _RunPlace(NamedTuple):
    task: str
    trained_on: str
    seed: int


# Method -> its runs, each with the losses of its answers. All methods have runs at the same places, in the same order.
_LossRuns = dict[str, list[ScoredAnswers]]


def decide_verdict(
    groups: Sequence[GroupNumbers],
    answers: Sequence[CellAnswers],
    settings: MeasureSettings,
    known: Numbers | None = None,
) -> Verdict | None:
    """Compare the method with the lowest loss with all others.

    The loss of an answer is |confidence - posterior| if every posterior is known, and otherwise its Brier score,
    (confidence - correct)^2. The loss of a method is a mean over questions; its ECE is not, so it cannot be used here.
    The best method is chosen after seeing the data, so p-values are multiplied by the number of all pairs of methods.

    Args:
        groups: The groups to compare.
        answers: The answers of all cells.
        settings: How runs are resampled; its metrics are not used.
        known: Numbers of an earlier build; its verdict is kept if the groups are the same.

    Returns:
        The verdict; None in the cases that `Numbers` lists.
    """
    key = content_hash([[group.input, group.sources.forced] for group in groups])
    if known is not None and known.verdict is not None and known.verdict.input == key:
        return known.verdict
    posteriors_known = all("true_error" in group.others for group in groups)
    runs = _gather_losses(groups, answers, posteriors_known=posteriors_known)
    if len(runs) < 2:
        return None
    if not posteriors_known and not _has_both_outcomes(runs):
        return None

    losses = _rank_methods(runs)
    best, *others = losses
    pairs_of_methods = len(losses) * (len(losses) - 1) // 2
    options = settings.options([run.answers for run in runs[best]], ignore_tick)
    behind = {}
    for name in others:
        compared = compare_mean_scores(runs[name], runs[best], swaps=SWAPS_PER_COMPARISON * pairs_of_methods, **options)
        difference = drop_invalid_interval(compared)
        p_corrected = min(1.0, pairs_of_methods * difference.p_value)
        behind[name] = Versus(**vars(difference), p_corrected=p_corrected)
    return Verdict(
        input=key,
        metric="true_error" if posteriors_known else "brier",
        n=min(group.n for group in groups),
        losses=losses,
        behind=behind,
    )


def _gather_losses(
    groups: Sequence[GroupNumbers], answers: Sequence[CellAnswers], *, posteriors_known: bool
) -> _LossRuns:
    """Return the losses of each method that is comparable: none of its groups has too many forced answers, and it has a
    run at every task, training set and seed at which any such method has one.
    """
    forced_methods = {group.method for group in groups if group.sources.forced}
    run_at: dict[str, dict[_RunPlace, ScoredAnswers]] = {}
    all_places: set[_RunPlace] = set()
    for group in groups:
        if group.method in forced_methods:
            continue
        for cell_answers in answers:
            if not group.holds(cell_answers.cell):
                continue
            place = _RunPlace(group.task, group.trained_on, cell_answers.cell.seed)
            run = _compute_losses(cell_answers, group.task, posteriors_known=posteriors_known)
            run_at.setdefault(group.method, {})[place] = run
            all_places.add(place)
    complete = {}
    for method, runs in run_at.items():
        if runs.keys() == all_places:
            complete[method] = [runs[place] for place in sorted(all_places)]
    return complete


def _compute_losses(answers: CellAnswers, task: str, *, posteriors_known: bool) -> ScoredAnswers:
    """Return the answers with their losses. Question ids include the task, since two tasks may share an id."""
    if posteriors_known:
        losses = np.abs(answers.confidence - answers.truth)
    else:
        losses = np.abs(answers.confidence - answers.correct) ** 2
    questions = [(task, name) for name in answers.question or ()]
    return ScoredAnswers(Answers(questions, answers.confidence, answers.correct), losses)


def _has_both_outcomes(runs: _LossRuns) -> bool:
    """Return whether some answers are right and others wrong."""
    outcomes: set[bool] = set()
    for method_runs in runs.values():
        for run in method_runs:
            outcomes.update(np.unique(run.answers.correct).tolist())
    return len(outcomes) > 1


def _rank_methods(runs: _LossRuns) -> dict[str, float]:
    """Return the mean loss of each method over its runs, lowest first."""
    mean_losses = {}
    for method, method_runs in runs.items():
        mean_losses[method] = float(np.mean([np.asarray(run.scores).mean() for run in method_runs]))
    return dict(sorted(mean_losses.items(), key=lambda item: item[1]))
