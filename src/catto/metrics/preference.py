"""Held-out preference accuracy: how often a model's implicit reward prefers the chosen response of a pair.

The implicit reward of DPO (Rafailov et al., 2023) is `log pi(y | x) - log pi_start(y | x)`, up to a factor and a term
of the prompt, neither of which changes the order of two responses to one prompt.
"""

from __future__ import annotations

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
    """Subtract the reward of the rejected response from that of the chosen one, pair by pair.

    Args:
        policy: the log-probabilities of N pairs under the trained model.
        start: those of the same pairs, in the same order, under the model that training started from.

    Returns:
        N margins: positive where the policy prefers the chosen response.
    """
    if [pair.question for pair in policy] != [pair.question for pair in start]:
        raise DataError("pairs", None, "the policy's pairs are not those of the start model")
    margins = []
    for ours, before in zip(policy, start, strict=True):
        whole = (ours.chosen - before.chosen) - (ours.rejected - before.rejected)
        reasoning = _reasoning_margin(ours, before)
        margins.append(PairMargin(question=ours.question, whole=whole, reasoning=reasoning))
    return margins


def _reasoning_margin(ours: PairLogprobs, before: PairLogprobs) -> float | None:
    parts = (ours.chosen_reasoning, before.chosen_reasoning, ours.rejected_reasoning, before.rejected_reasoning)
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    chosen, chosen_before, rejected, rejected_before = known
    return (chosen - chosen_before) - (rejected - rejected_before)


def margins_of(pairs: Sequence[PairMargin], part: Part) -> list[float]:
    """Return the margins over whole responses, or over their reasoning; empty where no two reasonings differ.

    Where some differ, a pair with the same reasoning twice is a tie.
    """
    if part == "whole":
        return [pair.whole for pair in pairs]
    if all(pair.reasoning is None for pair in pairs):
        return []
    return [pair.reasoning or 0.0 for pair in pairs]


def order_scores(margins: ArrayLike) -> Floats:
    """Score each margin: 1 where the chosen response is preferred, 0 where the rejected one is, 0.5 for a tie. (N,).

    >>> order_scores([0.3, 0.0, -2.0]).tolist()
    [1.0, 0.5, 0.0]
    """
    return (np.sign(np.asarray(margins, dtype=np.float64)) + 1.0) / 2.0


def preference_accuracy(margins: ArrayLike) -> float:
    """Return the share of pairs whose margin is positive, in [0, 1]; ties count half. nan of no pairs.

    >>> preference_accuracy([0.3, 0.0, -2.0, 1.0])
    0.625
    """
    scores = order_scores(margins)
    return float(scores.mean()) if len(scores) else nan


def preference_interval(
    runs: Sequence[Sequence[PairMargin]], part: Part, *, resamples: int, level: float = 0.95, seed: int = 0
) -> Interval:
    """Return the preference accuracy, a mean over runs, with its percentile bootstrap interval over questions.

    Pairs of one question, in one run or in several, are drawn together. Every run counts the same, whatever its number
    of pairs.

    Args:
        runs: the margins of each run (seed), at least one pair each.
        part: whole responses, or their reasoning.
        resamples: number of bootstrap resamples.
        level: of the interval, in (0, 1).
        seed: of the resamples.
    """
    numbers: dict[str, int] = {}  # of the questions
    ordered: list[float] = []  # of each question: the weighted scores of its pairs, and their weights
    weights: list[float] = []
    for run in runs:
        scores = order_scores(margins_of(run, part))
        if len(scores) == 0:
            return Interval(nan, nan, nan, level)
        weight = 1.0 / len(scores)
        for pair, score in zip(run, scores.tolist(), strict=True):
            number = numbers.setdefault(pair.question, len(numbers))
            if number == len(ordered):
                ordered.append(0.0)
                weights.append(0.0)
            ordered[number] += weight * score
            weights[number] += weight
    interval = ratio_interval(np.array(ordered), np.array(weights), resamples=resamples, level=level, seed=seed)
    # Summed by question, the value can differ from the mean over runs in its last bit: 0.5 of ties is exact here.
    value = fmean(preference_accuracy(margins_of(run, part)) for run in runs)
    return Interval(value, interval.low, interval.high, level)
