"""Confidence@k: choose one of k sampled answers, by confidence and by its rivals.

From n samples per question every size is measured on all C(n, k) subsets, the same subsets of sample numbers for every
question; above `MOST_SUBSETS` on so many of them, drawn by a fixed seed. Ties go to the answer that was sampled first.

The confidence of the chosen answer is the chosen sample's own; for the majority vote it is the share of votes, for the
weighted vote the share of confidence. The oracle, right where any of the k is, is a bound and has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from catto.metrics.binning import Bools, Floats, Ints
from catto.metrics.errors import ece
from catto.metrics.ranking import Within, auroc_within
from catto.metrics.statistics import ratio_interval
from catto.metrics.temperature import confidence_at
from catto.records import Prediction

MOST_SUBSETS = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Candidates:
    """n samples of Q questions. label: codes, -1 for none; confidence, logprob (nan: unknown), correct: (Q, n)."""

    questions: tuple[str, ...]
    label: Ints
    confidence: Floats
    logprob: Floats
    correct: Bools

    def at(self, subset: Ints) -> Candidates:
        """Return the candidates of one subset of sample numbers: (Q, k)."""
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

    The temperature at which they were sampled does not matter.
    """
    groups: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        groups.setdefault(prediction.question, []).append(prediction)
    if not groups:
        raise ValueError("no predictions to select from")
    rows = [sorted(group, key=lambda prediction: prediction.sample) for group in groups.values()]
    for row in rows:
        name = row[0].question
        if len(row) != len(rows[0]):
            raise ValueError(f"question {name} has {len(row)} samples, {rows[0][0].question} has {len(rows[0])}")
        if len({prediction.sample for prediction in row}) < len(row):
            raise ValueError(f"question {name} has a sample twice")
        if len({prediction.gold for prediction in row}) > 1:
            raise ValueError(f"question {name} has two gold labels")
    codes: dict[str | None, int] = {None: -1}

    def column(read: Callable[[Prediction], float], kind: type) -> NDArray[Any]:
        return np.array([[read(prediction) for prediction in row] for row in rows], dtype=kind)

    return Candidates(
        tuple(groups),
        label=column(lambda one: codes.setdefault(one.label, len(codes) - 1), np.intp),
        confidence=column(lambda one: one.confidence if tau is None else confidence_at(one, tau), np.float64),
        logprob=column(lambda one: np.nan if one.mean_logprob is None else one.mean_logprob, np.float64),
        correct=column(lambda one: one.label is not None and one.label == one.gold, np.bool_),
    )


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

    Every temperature has the same questions and k samples of each, ranked by their confidence at tau. In case of a tie
    the lowest temperature is chosen.
    """
    groups: dict[float, list[Prediction]] = {}
    for prediction in sorted(predictions, key=lambda prediction: prediction.temperature):
        groups.setdefault(prediction.temperature, []).append(prediction)
    samples = {temperature: candidates(group, tau) for temperature, group in groups.items()}
    accuracy = {temperature: float(_most_confident(given)[1].mean()) for temperature, given in samples.items()}
    questions, k = next(iter(samples.values())).label.shape
    forced = {t: sum(prediction.source == "fallback" for prediction in group) for t, group in groups.items()}
    return Sampling(
        max(accuracy, key=lambda temperature: accuracy[temperature]),
        tau,
        k,
        questions,
        {str(temperature): value for temperature, value in accuracy.items()},
        {str(temperature): count / len(groups[temperature]) for temperature, count in forced.items()},
    )


Choice = tuple[Floats, Bools]  # confidence and correctness of the chosen answers, (Q,)


def _most_confident(given: Candidates) -> Choice:
    return _picked(given, given.confidence)


def _picked(given: Candidates, score: Floats) -> Choice:
    """Take the sample with the highest score. score: (Q, k)."""
    rows, place = np.arange(len(score)), score.argmax(axis=1)
    return given.confidence[rows, place], given.correct[rows, place]


def _voted(given: Candidates, weight: Floats) -> Choice:
    """Take the label with most weight; samples without a label have no vote. Sums within 1e-12 tie."""
    same = (given.label[:, :, None] == given.label[:, None, :]) & (given.label >= 0)[:, None, :]
    support = (same * weight[:, None, :]).sum(axis=2)
    # The first sample within rounding of the best, so that equal sums in another order stay equal.
    place = (support >= support.max(axis=1, keepdims=True) - 1e-12).argmax(axis=1)
    rows, total = np.arange(len(place)), weight.sum(axis=1)
    share = np.divide(support[rows, place], total, out=np.zeros(len(place)), where=total > 0)
    return np.clip(share, 0.0, 1.0), given.correct[rows, place]


RULES: dict[str, Callable[[Candidates], Choice]] = {
    "most confident": _most_confident,
    "majority vote": lambda given: _voted(given, np.ones_like(given.confidence)),
    "confidence-weighted vote": lambda given: _voted(given, given.confidence),
    # The sample whose tokens were likeliest on average; one without that number comes last.
    "mean log-probability": lambda given: _picked(given, np.where(np.isnan(given.logprob), -np.inf, given.logprob)),
}


def subsets(n: int, k: int) -> tuple[Ints, bool]:
    """Return subsets of k of n sample numbers, each rising, and whether these are all: (S, k).

    >>> subsets(3, 2)[0].tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, there are {n} samples per question")
    if comb(n, k) <= MOST_SUBSETS:
        return np.array(list(combinations(range(n), k)), dtype=np.intp), True
    rng = np.random.default_rng(0)
    drawn = (tuple(sorted(rng.choice(n, k, replace=False).tolist())) for _ in range(4 * MOST_SUBSETS))
    return np.array(list(islice(dict.fromkeys(drawn), MOST_SUBSETS)), dtype=np.intp), False


def select(given: Candidates, k: int, *, seed: int = 0) -> list[Selected]:
    """Return every rule at k, one random sample and the oracle. Means over subsets come before those over questions."""
    chosen, exact = subsets(given.label.shape[1], k)
    parts = [given.at(subset) for subset in chosen]
    picks = {rule: [choose(part) for part in parts] for rule, choose in RULES.items()}
    # One random sample of a random subset is one random sample of all.
    picks["one random sample"] = list(zip(given.confidence.T, given.correct.T, strict=True))
    no_confidence: Floats = np.full(len(given.questions), np.nan)
    picks["oracle"] = [(no_confidence, np.asarray(part.correct.any(axis=1))) for part in parts]
    rows = []
    for rule, choices in picks.items():
        right = np.asarray(np.mean([correct for _, correct in choices], axis=0, dtype=np.float64))
        interval = ratio_interval(right, np.ones_like(right), level=LEVEL, seed=seed)
        error = np.nan if rule == "oracle" else float(np.mean([ece(*choice) for choice in choices]))
        whole = exact or rule == "one random sample"
        ends = (interval.low, interval.high, error, len(right), len(choices), whole)
        rows.append(Selected(rule, k, float(right.mean()), *ends))
    return rows


def within_questions(given: Candidates, *, seed: int = 0) -> Within:
    """Return the AUROC of the confidence among the samples of the same question; above a half, it helps to pick one.

    It is of all n samples and does not depend on k. A sample without an answer is a wrong one.
    """
    names = np.repeat(given.questions, given.label.shape[1]).tolist()
    return auroc_within(names, given.confidence.ravel(), given.correct.ravel(), level=LEVEL, seed=seed)
