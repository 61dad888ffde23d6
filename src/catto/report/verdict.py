"""The verdict of a report: which method has the lowest loss, and how much worse the others are."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

import numpy as np

from catto.measure import MeasureSettings
from catto.metrics.catalogue import Versus
from catto.metrics.comparisons import compare_mean_scores
from catto.metrics.intervals import drop_invalid_interval
from catto.metrics.resampling import Answers, ScoredAnswers
from catto.records import content_hash
from catto.report.cell_answers import CellAnswers
from catto.report.numbers import GroupNumbers, Numbers, Verdict

# Swaps of the swap test per comparison in a table. A test with s swaps has no p-value below 1 / (1 + s). Correcting for
# m comparisons multiplies the smallest p-value by m, which gives m / (1 + 50 m) < 0.02. With a fixed number of swaps,
# no difference in a large table could be significant.
SWAPS_PER_COMPARISON = 50


class _RunPlace(NamedTuple):
    """What a run was tested on, what it was trained on, and its seed."""

    task: str
    trained_on: str
    seed: int


# Method -> the losses of its answers, one `ScoredAnswers` per run. Every method has the same number of runs, and the
# runs at one index of these lists have the same `_RunPlace`, so they answer the same questions.
_RunsOfMethod = dict[str, list[ScoredAnswers]]


def decide_verdict(
    groups: Sequence[GroupNumbers],
    answers: Sequence[CellAnswers],
    settings: MeasureSettings,
    earlier: Numbers | None = None,
) -> Verdict | None:
    """Rank the methods by their mean loss, and compare the best one with each of the others.

    The loss of an answer is |confidence - posterior| if the posterior of every question is known, and otherwise its
    Brier score, (confidence - correct)^2. The ECE cannot be used: it is not a mean of losses of single answers.

    Args:
        groups: The groups whose methods are ranked; at least one.
        answers: The answers of all cells of the experiment. Cells that belong to none of the groups are ignored.
        settings: Number of resamples, level and seed of the comparisons. Its metrics are ignored.
        earlier: The numbers of an earlier build of the report, whose verdict is returned if it was about the same
            groups; None if there is no earlier build.

    Returns:
        The verdict. Methods with too many forced answers are excluded, and so are methods that lack a run which others
        have. It is None if fewer than two methods remain, or if the loss is the Brier score and all answers are right,
        or all are wrong.
    """
    # How many forced answers are too many is a constant in the code, which the hash `group.input` does not cover.
    groups_hash = content_hash([[group.input, group.sources.has_too_many_forced] for group in groups])
    if earlier is not None and earlier.verdict is not None and earlier.verdict.input == groups_hash:
        return earlier.verdict

    # A group has a true error only if the posteriors of all its questions are known.
    posteriors_known = all("true_error" in group.others for group in groups)
    runs_of_method = _gather_losses(groups, answers, posteriors_known=posteriors_known)
    if len(runs_of_method) < 2:
        return None
    # If all answers are right, the method with the highest confidence has the lowest Brier score, whether or not it can
    # tell right from wrong answers. If all are wrong, it is the method with the lowest confidence.
    if not posteriors_known and not _has_both_outcomes(runs_of_method):
        return None

    mean_losses = _rank_methods(runs_of_method)
    return Verdict(
        input=groups_hash,
        metric="true_error" if posteriors_known else "brier",
        n=min(group.n for group in groups),
        losses=mean_losses,
        behind=_compare_with_best(runs_of_method, list(mean_losses), settings),
    )


def _gather_losses(
    groups: Sequence[GroupNumbers], answers: Sequence[CellAnswers], *, posteriors_known: bool
) -> _RunsOfMethod:
    """Compute the losses of every method that can be compared with the others.

    A method is excluded if, in any of its groups, too many responses could not be parsed, so that their answers were
    forced. The remaining methods must have the same runs: a method is also excluded if it lacks the run of a task,
    training set and seed for which another one has a run.
    """
    forced_methods = {group.method for group in groups if group.sources.has_too_many_forced}
    run_at_place: dict[str, dict[_RunPlace, ScoredAnswers]] = {}  # method -> place -> run
    all_places: set[_RunPlace] = set()
    for group in groups:
        if group.method in forced_methods:
            continue
        for cell_answers in answers:
            if not group.holds(cell_answers.cell):
                continue
            place = _RunPlace(group.task, group.trained_on, cell_answers.cell.seed)
            run = _compute_losses(cell_answers, posteriors_known=posteriors_known)
            run_at_place.setdefault(group.method, {})[place] = run
            all_places.add(place)
    runs_of_method = {}
    for method, runs in run_at_place.items():
        has_every_place = runs.keys() == all_places
        if has_every_place:
            runs_of_method[method] = [runs[place] for place in sorted(all_places)]
    return runs_of_method


def _compute_losses(answers: CellAnswers, *, posteriors_known: bool) -> ScoredAnswers:
    """Return the answers with their losses. Question ids include the task, since two tasks may share an id."""
    if posteriors_known:
        losses = np.abs(answers.confidence - answers.truth)
    else:
        losses = np.abs(answers.confidence - answers.correct) ** 2
    assert answers.question is not None  # every prediction names its question
    questions = [(answers.cell.task, name) for name in answers.question]
    return ScoredAnswers(Answers(questions, answers.confidence, answers.correct), losses)


def _has_both_outcomes(runs_of_method: _RunsOfMethod) -> bool:
    """Return whether some answers are right and others are wrong, over all runs of all methods together."""
    outcomes: set[bool] = set()
    for runs in runs_of_method.values():
        for run in runs:
            outcomes.update(np.unique(run.answers.correct).tolist())
    return len(outcomes) > 1


def _rank_methods(runs_of_method: _RunsOfMethod) -> dict[str, float]:
    """Return the mean loss of each method over its runs, lowest first; methods with equal losses keep their order."""
    mean_losses = {}
    for method, runs in runs_of_method.items():
        mean_losses[method] = float(np.mean([np.asarray(run.scores).mean() for run in runs]))
    return dict(sorted(mean_losses.items(), key=lambda item: item[1]))


def _compare_with_best(
    runs_of_method: _RunsOfMethod, ranking: Sequence[str], settings: MeasureSettings
) -> dict[str, Versus]:
    """Compare every method except the best one with the best one.

    Args:
        runs_of_method: The losses of each method.
        ranking: All methods, the best one first.
        settings: Number of resamples, level and seed of the comparisons.

    Returns:
        Method -> its mean loss minus that of the best method.
    """
    best = ranking[0]
    # Which method is the best is known only from the data, so any pair of methods might have been compared. P-values
    # are therefore corrected for all pairs (Bonferroni).
    pairs_of_methods = comb(len(ranking), 2)
    # The runs of the best method have as many rows as those of the others, which answer the same questions.
    max_rows = max(np.size(run.scores) for run in runs_of_method[best])
    behind = {}
    for method in ranking[1:]:
        comparison = compare_mean_scores(
            runs_of_method[method],
            runs_of_method[best],
            swaps=SWAPS_PER_COMPARISON * pairs_of_methods,
            resamples=settings.draws(max_rows),
            level=settings.level,
            seed=settings.seed,
        )
        difference = drop_invalid_interval(comparison)
        p_corrected = min(1.0, pairs_of_methods * difference.p_value)
        behind[method] = Versus(**vars(difference), p_corrected=p_corrected)
    return behind
