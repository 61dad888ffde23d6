"""The verdict of a report: the method with the lowest loss, and how far the others are behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from catto.measure import MeasureSettings, compare_runs
from catto.metrics.catalogue import Versus
from catto.metrics.resampling import Answers
from catto.records import content_hash
from catto.report.cell_answers import CellAnswers
from catto.report.numbers import (
    GroupNumbers,
    Numbers,
    Verdict,
)

# Swaps for each comparison of a table. Correcting for m comparisons multiplies the smallest p-value by m, which gives
# m / (1 + 50 m) < 0.02. With a fixed number of swaps, no difference in a large table could be significant.
SWAPS = 50


class _RunPlace(NamedTuple):
    task: str
    trained_on: str
    seed: int


# Method -> its runs. The `confidence` of such a run is the loss of each answer.
_LossRuns = dict[str, list[Answers]]


def decide_verdict(
    groups: Sequence[GroupNumbers],
    answers: Sequence[CellAnswers],
    settings: MeasureSettings,
    known: Numbers | None = None,
) -> Verdict | None:
    """Compare the method with the lowest loss with all others.

    The loss of an answer is |confidence - posterior| if every posterior is known, and the Brier score otherwise. Both
    are means over questions, which an ECE is not. The best method is known only after the fact, so p-values are
    multiplied by the number of all pairs.

    Args:
        groups: The groups to judge.
        answers: The answers of all cells.
        settings: How runs are resampled.
        known: Numbers of an earlier build; its verdict is kept if the groups are the same.

    Returns:
        None where there is no verdict, see `Numbers`.
    """
    key = content_hash([[group.input, group.sources.forced] for group in groups])
    if known is not None and known.verdict is not None and known.verdict.input == key:
        return known.verdict
    is_exact = all("true_error" in group.others for group in groups)
    runs = _gather_losses(groups, answers, is_exact)
    if len(runs) < 2:
        return None
    if not is_exact and not _has_both_outcomes(runs):
        return None

    losses = _rank_methods(runs)
    best, *others = losses
    pairs = len(losses) * (len(losses) - 1) // 2
    mean_loss = replace(settings, metrics=("mean_confidence",))  # the confidences of these runs are losses
    behind = {}
    for name in others:
        comparisons = compare_runs(runs[name], runs[best], mean_loss, swaps=SWAPS * pairs)
        difference = comparisons["mean_confidence"]
        behind[name] = Versus(**vars(difference), p_corrected=min(1.0, pairs * difference.p_value))
    return Verdict(
        input=key,
        metric="true_error" if is_exact else "brier",
        n=min(group.n for group in groups),
        losses=losses,
        behind=behind,
    )


def _gather_losses(groups: Sequence[GroupNumbers], answers: Sequence[CellAnswers], is_exact: bool) -> _LossRuns:
    """Return the losses of each method that was run everywhere and had no group of mostly forced answers."""
    forced = {group.method for group in groups if group.sources.forced}
    by_method: dict[str, dict[_RunPlace, Answers]] = {}
    for group in groups:
        if group.method in forced:
            continue
        for run in answers:
            if group.holds(run.cell):
                place = _RunPlace(group.task, group.trained_on, run.cell.seed)
                by_method.setdefault(group.method, {})[place] = _compute_losses(run, group.task, is_exact)
    all_places: set[_RunPlace] = set()
    for places in by_method.values():
        all_places |= places.keys()
    complete = {}
    for name, places in by_method.items():
        if len(places) == len(all_places):
            complete[name] = [places[place] for place in sorted(all_places)]
    return complete


def _compute_losses(run: CellAnswers, task: str, is_exact: bool) -> Answers:
    questions = [(task, name) for name in run.question or ()]
    if is_exact:
        losses = np.abs(run.confidence - run.truth)
    else:
        losses = np.abs(run.confidence - run.correct) ** 2
    return Answers(questions, losses, run.correct)


def _has_both_outcomes(runs: _LossRuns) -> bool:
    """Return whether some answers are right and some wrong."""
    outcomes: set[bool] = set()
    for method_runs in runs.values():
        for run in method_runs:
            outcomes.update(np.unique(run.correct).tolist())
    return len(outcomes) > 1


def _rank_methods(runs: _LossRuns) -> dict[str, float]:
    """Return the mean loss of each method over its runs, lowest first."""
    means = {}
    for name, method_runs in runs.items():
        means[name] = float(np.mean([np.asarray(run.confidence).mean() for run in method_runs]))
    return dict(sorted(means.items(), key=lambda item: item[1]))
