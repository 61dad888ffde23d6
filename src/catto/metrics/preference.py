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
    """Return the implicit reward of the chosen response minus that of the rejected response, for each pair.

    The implicit reward of a response is its log-probability under the trained model (the policy) minus that under the
    start model.

    Args:
        policy: The log-probabilities of N pairs under the trained model.
        start: The log-probabilities of the same pairs, in the same order, under the model that training started from.

    Returns:
        The margins of N pairs, over the whole responses and over their reasoning. They are positive if the policy
        prefers the chosen response. The margin over the reasoning is None if both responses have the same reasoning.

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
    """Return the margin over the reasoning; None if both responses have the same reasoning.

    In that case, the log-probabilities of the reasoning are None.
    """
    if after.chosen_reasoning is None or before.chosen_reasoning is None:
        return None
    if after.rejected_reasoning is None or before.rejected_reasoning is None:
        return None
    chosen_reward = after.chosen_reasoning - before.chosen_reasoning
    rejected_reward = after.rejected_reasoning - before.rejected_reasoning
    return chosen_reward - rejected_reward


def margins_of(pairs: Sequence[PairMargin], part: Part) -> list[float]:
    """Return the margins over whole responses or over their reasoning.

    If the two responses of a pair have the same reasoning, its margin over the reasoning is 0, a tie. If this is so for
    all pairs, the list is empty, because there is nothing to compare.
    """
    if part == "whole":
        return [pair.whole for pair in pairs]
    if all(pair.reasoning is None for pair in pairs):
        return []
    return [0.0 if pair.reasoning is None else pair.reasoning for pair in pairs]


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
        part: `whole` for whole responses, `reasoning` for their reasoning.
        resamples: Number of bootstrap resamples.
        level: Level of the interval, in (0, 1).
        seed: Seed of the resamples.

    Returns:
        The mean accuracy and its interval. All three are nan if a run has no pairs or, for the reasoning, if both
        responses have the same reasoning in all pairs of a run.
    """
    # The mean accuracy times the number of runs is the sum over all pairs of score / (number of pairs in their run).
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
    # The same as `interval.value`, except for the last bits: if all pairs are ties, this mean is exactly 0.5.
    value = fmean(preference_accuracy(margins_of(run, part)) for run in runs)
    return Interval(value, interval.low, interval.high, level)
