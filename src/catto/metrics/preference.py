"""Held-out preference accuracy: how often a model's implicit reward prefers the chosen response of a pair.

The implicit reward of DPO (Rafailov et al., 2023) is `log pi(y | x) - log pi_start(y | x)`, up to a factor and a term
that depends only on the prompt. Neither changes the order of two responses to the same prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import nan
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from catto.errors import DataError
from catto.metrics.binning import Floats
from catto.metrics.intervals import Interval
from catto.metrics.statistics import ratio_interval
from catto.records import PairLogprobs, PairMargin

Part = Literal["whole", "reasoning"]


def reward_margins(policy: Sequence[PairLogprobs], start: Sequence[PairLogprobs]) -> list[PairMargin]:
    """Return by how much the implicit reward of the chosen response exceeds that of the rejected one, pair by pair.

    The implicit reward is the log-probability under the policy minus that under the start model.

    Args:
        policy: The log-probabilities of N pairs under the trained model.
        start: Those of the same pairs, in the same order, under the model that training started from.

    Returns:
        The margins of N pairs, over the whole responses and over their reasoning; positive if the policy prefers the
        chosen response.

    Raises:
        DataError: The two sequences are not about the same pairs.
    """
    if [pair.question for pair in policy] != [pair.question for pair in start]:
        raise DataError("pairs", None, "the policy and the start model have different pairs")
    margins = []
    for after, before in zip(policy, start, strict=True):
        whole = (after.chosen - before.chosen) - (after.rejected - before.rejected)
        reasoning = _reasoning_margin(after, before)
        margins.append(PairMargin(question=after.question, whole=whole, reasoning=reasoning))
    return margins


def _reasoning_margin(after: PairLogprobs, before: PairLogprobs) -> float | None:
    """Return the margin over the reasoning; None if both responses have the same reasoning."""
    parts = (after.chosen_reasoning, before.chosen_reasoning, after.rejected_reasoning, before.rejected_reasoning)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    chosen, chosen_before, rejected, rejected_before = known
    return (chosen - chosen_before) - (rejected - rejected_before)


def margins_of(pairs: Sequence[PairMargin], part: Part) -> list[float]:
    """Return the margins over whole responses or over their reasoning.

    A pair whose responses have the same reasoning is a tie in reasoning. If all pairs are, the list is empty.
    """
    if part == "whole":
        return [pair.whole for pair in pairs]
    if all(pair.reasoning is None for pair in pairs):
        return []
    return [pair.reasoning or 0.0 for pair in pairs]


def order_scores(margins: ArrayLike) -> Floats:
    """Score each margin: 1 if the chosen response is preferred, 0 if the rejected one is, 0.5 for a tie. (N,).

    >>> order_scores([0.3, 0.0, -2.0]).tolist()
    [1.0, 0.5, 0.0]
    """
    return (np.sign(np.asarray(margins, dtype=np.float64)) + 1.0) / 2.0


def preference_accuracy(margins: ArrayLike) -> float:
    """Return the share of pairs whose margin is positive, in [0, 1]; ties count half. nan if there are no pairs.

    >>> preference_accuracy([0.3, 0.0, -2.0, 1.0])
    0.625
    """
    scores = order_scores(margins)
    return float(scores.mean()) if len(scores) else nan


def preference_interval(
    runs: Sequence[Sequence[PairMargin]], part: Part, *, resamples: int, level: float = 0.95, seed: int = 0
) -> Interval:
    """Return the mean preference accuracy over runs, with its percentile bootstrap interval over questions.

    All pairs of a question, in one run or in several, are drawn together. Every run has the same weight, regardless of
    its number of pairs.

    Args:
        runs: The margins of each run (seed).
        part: Whole responses, or their reasoning.
        resamples: Number of bootstrap resamples.
        level: Level of the interval, in (0, 1).
        seed: Seed of the resamples.

    Returns:
        The interval. All of it is nan if a run has no pairs or, for the reasoning, if all pairs of a run have the same
        reasoning in both responses.
    """
    score_of_question: dict[str, float] = defaultdict(float)
    weight_of_question: dict[str, float] = defaultdict(float)
    for run in runs:
        scores = order_scores(margins_of(run, part))
        if len(scores) == 0:
            return Interval(nan, nan, nan, level)
        weight_of_pair = 1.0 / len(scores)
        for pair, score in zip(run, scores.tolist(), strict=True):
            score_of_question[pair.question] += weight_of_pair * score
            weight_of_question[pair.question] += weight_of_pair
    weighted_scores = np.array(list(score_of_question.values()))
    weights = np.array(list(weight_of_question.values()))
    interval = ratio_interval(weighted_scores, weights, resamples=resamples, level=level, seed=seed)
    # `interval.value` may differ from this mean in the last bit. Here, runs with nothing but ties give exactly 0.5.
    value = fmean(preference_accuracy(margins_of(run, part)) for run in runs)
    return Interval(value, interval.low, interval.high, level)
