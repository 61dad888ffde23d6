"""Confidence@k: choose one of k sampled answers, by confidence and by its rivals.

From n samples a question every size is measured on all C(n, k) subsets, the same subsets of sample numbers for every
question; above `MOST_SUBSETS` on so many of them, drawn by a fixed seed. Ties go to the answer that was sampled first.

The confidence of the chosen answer is the chosen sample's own; for the majority vote it is the share of votes, for the
weighted vote the share of confidence. The oracle, right where any of the k is, is a bound and has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

import numpy as np
from numpy.typing import NDArray

from catto.metrics.errors import ece
from catto.metrics.ranking import Within, auroc_within
from catto.metrics.temperature import confidence_at
from catto.records import Prediction

__all__ = [
    "RULES",
    "Candidates",
    "Sampling",
    "Selected",
    "candidates",
    "choose_sampling",
    "select",
    "subsets",
    "within_questions",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
MOST_SUBSETS = 2000
RESAMPLES, LEVEL = 1000, 0.95


@dataclass(frozen=True)
class Candidates:
    """n samples of Q questions. label: codes, -1 for none; confidence, logprob (nan: unknown), correct: (Q, n)."""

    questions: tuple[str, ...]
    label: Ints
    confidence: Floats
    logprob: Floats
    correct: Bools

    def at(self, subset: Ints) -> Candidates:
        """The candidates of one subset of sample numbers: (Q, k)."""
        columns = (self.label, self.confidence, self.logprob, self.correct)
        return Candidates(self.questions, *(column[:, subset] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Selected:
    """A rule at k: accuracy with its bootstrap interval over questions, and the ECE of its confidence (20 bins).

    Both are means over the subsets; `ece` is nan for the oracle.
    """

    rule: str
    k: int
    accuracy: float
    low: float
    high: float
    ece: float
    questions: int
    subsets: int
    exact: bool


def candidates(predictions: Sequence[Prediction], tau: float | None = None) -> Candidates:
    """Gather predictions by question, with their confidence at tau, which ranks them; None: the one they state.

    The temperature at which they were sampled has no part in it.
    """
    groups: dict[str, list[Prediction]] = {}
    for one in predictions:
        groups.setdefault(one.question, []).append(one)
    rows = [sorted(group, key=lambda one: one.sample) for group in groups.values()]
    _check(rows)
    codes: dict[str, int] = {}
    label = [[-1 if one.label is None else codes.setdefault(one.label, len(codes)) for one in row] for row in rows]
    logprob = [[np.nan if one.mean_logprob is None else one.mean_logprob for one in row] for row in rows]
    return Candidates(
        tuple(groups),
        np.array(label, dtype=np.int64),
        np.array(
            [[one.confidence if tau is None else confidence_at(one, tau) for one in row] for row in rows],
            dtype=np.float64,
        ),
        np.array(logprob, dtype=np.float64),
        np.array([[one.label is not None and one.label == one.gold for one in row] for row in rows]),
    )


def _check(rows: Sequence[Sequence[Prediction]]) -> None:
    if not rows:
        raise ValueError("no predictions to select from")
    for row in rows:
        name = row[0].question
        if len(row) != len(rows[0]):
            raise ValueError(f"question {name} has {len(row)} samples, {rows[0][0].question} has {len(rows[0])}")
        if len({one.sample for one in row}) < len(row):
            raise ValueError(f"question {name} has a sample twice")
        if len({one.gold for one in row}) > 1:
            raise ValueError(f"question {name} has two gold labels")


@dataclass(frozen=True)
class Sampling:
    """The temperature that was chosen and, for each that was tried, accuracy of Confidence@k and rate of fallbacks."""

    temperature: float
    tau: float
    k: int
    questions: int
    accuracy: dict[str, float]
    fallback_rate: dict[str, float]


def choose_sampling(predictions: Sequence[Prediction], tau: float) -> Sampling:
    """Choose among the temperatures of the predictions the one at which the most confident of k samples is best.

    Every temperature has the same questions and k samples of each, ranked by their confidence at tau; of equals the
    lowest temperature is chosen.
    """
    groups: dict[float, list[Prediction]] = {}
    for one in sorted(predictions, key=lambda one: one.temperature):
        groups.setdefault(one.temperature, []).append(one)
    given = {temperature: candidates(group, tau) for temperature, group in groups.items()}
    accuracy = {temperature: float(_most_confident(some)[1].mean()) for temperature, some in given.items()}
    questions, k = next(iter(given.values())).label.shape
    return Sampling(
        max(accuracy, key=lambda temperature: accuracy[temperature]),
        tau,
        k,
        questions,
        {str(temperature): value for temperature, value in accuracy.items()},
        {str(t): sum(one.source == "fallback" for one in group) / len(group) for t, group in groups.items()},
    )


Choice = tuple[Floats, Bools]  # confidence and correctness of the chosen answers, (Q,)


def _chosen(given: Candidates, place: Ints) -> Choice:
    rows = np.arange(len(place))
    return given.confidence[rows, place], given.correct[rows, place]


def _most_confident(given: Candidates) -> Choice:
    return _chosen(given, given.confidence.argmax(axis=1))


def _mean_logprob(given: Candidates) -> Choice:
    """The sample whose tokens were likeliest on average; a sample without that number comes last."""
    return _chosen(given, np.where(np.isnan(given.logprob), -np.inf, given.logprob).argmax(axis=1))


def _voted(given: Candidates, weight: Floats) -> Choice:
    """The label with most weight; samples without a label have no vote. Summed in float64, ties within 1e-12."""
    same = (given.label[:, :, None] == given.label[:, None, :]) & (given.label >= 0)[:, None, :]
    support = (same * weight[:, None, :]).sum(axis=2)
    # The first sample within rounding of the best, so that equal sums in another order stay equal.
    place = (support >= support.max(axis=1, keepdims=True) - 1e-12).argmax(axis=1)
    rows = np.arange(len(place))
    total = weight.sum(axis=1)
    share = np.divide(support[rows, place], total, out=np.zeros(len(place)), where=total > 0)
    return np.clip(share, 0.0, 1.0), given.correct[rows, place]


def _majority(given: Candidates) -> Choice:
    return _voted(given, np.ones_like(given.confidence))


def _weighted(given: Candidates) -> Choice:
    return _voted(given, given.confidence)


RULES: dict[str, Callable[[Candidates], Choice]] = {
    "most confident": _most_confident,
    "majority vote": _majority,
    "confidence-weighted vote": _weighted,
    "mean log-probability": _mean_logprob,
}


def subsets(n: int, k: int) -> tuple[Ints, bool]:
    """All subsets of k of n sample numbers, each rising, and whether these are all: (S, k)."""
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, there are {n} samples a question")
    if comb(n, k) <= MOST_SUBSETS:
        return np.array(list(combinations(range(n), k)), dtype=np.int64), True
    rng = np.random.default_rng(0)
    drawn = (tuple(sorted(rng.choice(n, k, replace=False).tolist())) for _ in iter(int, 1))
    return np.array(list(islice(dict.fromkeys(islice(drawn, 4 * MOST_SUBSETS)), MOST_SUBSETS)), dtype=np.int64), False


def select(given: Candidates, k: int, *, seed: int = 0) -> list[Selected]:
    """Every rule at k, one random sample and the oracle."""
    chosen, exact = subsets(given.label.shape[1], k)
    parts = [given.at(subset) for subset in chosen]
    found = {rule: [choose(part) for part in parts] for rule, choose in RULES.items()}
    rows = [_row(rule, k, _stacked(picks), exact, seed) for rule, picks in found.items()]
    # One random sample of a random subset is one random sample of all.
    rows.append(_row("one random sample", k, (given.confidence, given.correct.astype(np.float64)), True, seed))
    oracle = np.stack([part.correct.any(axis=1) for part in parts], axis=1).astype(np.float64)
    rows.append(_row("oracle", k, (np.full(oracle.shape, np.nan), oracle), exact, seed))
    return rows


def within_questions(given: Candidates, *, seed: int = 0) -> Within:
    """AUROC of the confidence among the samples of the same question: above a half, confidence helps to pick one.

    It is of all n samples and does not depend on k. A sample without an answer is a wrong one.
    """
    names = [name for name in given.questions for _ in range(given.label.shape[1])]
    return auroc_within(
        names, given.confidence.ravel(), given.correct.ravel(), resamples=RESAMPLES, level=LEVEL, seed=seed
    )


def _stacked(picks: Sequence[Choice]) -> tuple[Floats, Floats]:
    return np.stack([c for c, _ in picks], axis=1), np.stack([z for _, z in picks], axis=1).astype(np.float64)


def _row(rule: str, k: int, picks: tuple[Floats, Floats], exact: bool, seed: int) -> Selected:
    """Average over subsets first, then over questions. picks: confidence and correctness, (Q, S)."""
    confidence, correct = picks
    accuracy = correct.mean(axis=1)
    low, high = _interval(accuracy, seed)
    errors = (
        [np.nan] if np.isnan(confidence).any() else [ece(c, z) for c, z in zip(confidence.T, correct.T, strict=True)]
    )
    value = float(accuracy.mean())
    return Selected(rule, k, value, low, high, float(np.mean(errors)), len(accuracy), correct.shape[1], exact)


def _interval(values: Floats, seed: int) -> tuple[float, float]:
    """Percentile bootstrap of the mean over questions."""
    draws = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
