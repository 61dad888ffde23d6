"""Confidence@k: choose one of k sampled answers, by confidence and by its rivals.

From n samples per question every size is measured on all C(n, k) subsets, the same subsets of sample numbers for every
question; above `MOST_SUBSETS` on so many of them, drawn by a fixed seed. Ties go to the answer that was sampled first.

The confidence of the chosen answer is the chosen sample's own; for the majority vote it is the share of votes, for the
weighted vote the share of confidence. The oracle, right where any of the k is, is a bound and has none.

Adaptive k takes samples one after another: a vote ends when the samples to come cannot change it, which loses nothing;
the most confident ends at the first sample that reaches a confidence chosen on validation questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, groupby, islice
from math import comb
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from catto.metrics.binning import Bools, Floats, Ints
from catto.metrics.errors import ece
from catto.metrics.ranking import THRESHOLDS, Within, auroc_within
from catto.metrics.statistics import ratio_interval
from catto.metrics.temperature import confidence_at
from catto.records import Prediction

MOST_SUBSETS = 2000
LEVEL = 0.95
ROUNDING = 1e-12
# Rules by numbers that a file has where its engine gave the candidates of every token -> field of a prediction.
TOKENS = {"self-certainty": "self_certainty", "lowest-group confidence": "lowest_group"}
LIKELIEST = "mean log-probability"
# Tokens of a group; a shorter response is one group.
GROUP = 128


@dataclass(frozen=True)
class Candidates:
    """n samples of Q questions. label: codes, -1 for none; confidence, logprob (nan: unknown), correct: (Q, n).

    `tokens`: other numbers of each sample's tokens, by the name of the rule that takes the highest, (Q, n) each.
    """

    questions: tuple[str, ...]
    label: Ints
    confidence: Floats
    logprob: Floats
    correct: Bools
    tokens: Mapping[str, Floats] = field(default_factory=dict)

    def at(self, subset: Ints) -> Candidates:
        """Return the candidates of one subset of sample numbers: (Q, k)."""
        columns = {name: getattr(self, name)[:, subset] for name in ("label", "confidence", "logprob", "correct")}
        tokens = {rule: column[:, subset] for rule, column in self.tokens.items()}
        return Candidates(self.questions, **columns, tokens=tokens)

    def right(self, place: Ints) -> Bools:
        """Return whether the sample at each question's place is right: (Q,) -> (Q,)."""
        return self.correct[np.arange(len(place)), place]


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


def token_certainty(tops: Sequence[tuple[str, Mapping[str, float]]]) -> tuple[float, float]:
    """Return a response's self-certainty and its lowest group's: of each token, minus the mean candidates' logprob.

    The mean over all tokens is self-certainty (Kang et al., 2025) up to a constant, as far as the candidates go; the
    lowest mean over `GROUP` consecutive tokens is DeepConf's lowest-group confidence (Fu et al., 2025).

    >>> token_certainty([("a", {"a": -0.5, "b": -1.5}), ("c", {"c": -0.25, "d": -3.75})])
    (1.5, 1.5)
    """
    each = np.array([-sum(candidates.values()) / len(candidates) for _, candidates in tops])
    width = min(GROUP, len(each))
    return float(each.mean()), float(np.convolve(each, np.full(width, 1.0 / width), "valid").min())


def samples_by_question(predictions: Sequence[Prediction]) -> list[list[Prediction]]:
    """Return the samples of every question in their order; ValueError where questions differ in their number."""
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
    return rows


def candidates(predictions: Sequence[Prediction], tau: float | None = None) -> Candidates:
    """Gather predictions by question, with their confidence at tau, which ranks them; None: the one they state.

    The temperature at which they were sampled does not matter.
    """
    rows = samples_by_question(predictions)
    codes: dict[str | None, int] = {None: -1}

    def column(read: Callable[[Prediction], float], kind: type) -> NDArray[Any]:
        return np.array([[read(prediction) for prediction in row] for row in rows], dtype=kind)

    tokens = {rule: column(attrgetter(name), np.float64) for rule, name in TOKENS.items()}
    return Candidates(
        tuple(row[0].question for row in rows),
        label=column(lambda one: codes.setdefault(one.label, len(codes) - 1), np.intp),
        confidence=column(lambda one: one.confidence if tau is None else confidence_at(one, tau), np.float64),
        logprob=column(lambda one: np.nan if one.mean_logprob is None else one.mean_logprob, np.float64),
        correct=column(lambda one: one.label is not None and one.label == one.gold, np.bool_),
        tokens={rule: values for rule, values in tokens.items() if not np.isnan(values).all()},
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
    accuracy: dict[str, float] = {}
    fallback_rate: dict[str, float] = {}
    by_temperature = attrgetter("temperature")
    for temperature, group in groupby(sorted(predictions, key=by_temperature), by_temperature):
        rows = list(group)
        given = candidates(rows, tau)
        accuracy[str(temperature)] = float(given.right(RULES["most confident"](given).place).mean())
        fallback_rate[str(temperature)] = sum(row.source == "fallback" for row in rows) / len(rows)
    questions, k = given.label.shape
    best = max(accuracy, key=lambda temperature: accuracy[temperature])
    return Sampling(float(best), tau, k, questions, accuracy, fallback_rate)


class Choice(NamedTuple):
    """The chosen sample of every question and the confidence of the choice, both (Q,)."""

    place: Ints
    confidence: Floats


def _picked(given: Candidates, score: Floats) -> Choice:
    """Take the sample with the highest score; one without a score comes last. score: (Q, k)."""
    place = np.where(np.isnan(score), -np.inf, score).argmax(axis=1)
    return Choice(place, given.confidence[np.arange(len(score)), place])


def _picked_by_tokens(given: Candidates, rule: str) -> Choice:
    if rule not in given.tokens:
        raise ValueError(f"{rule} needs the candidates of every token, which only servers give")
    return _picked(given, given.tokens[rule])


def _same(given: Candidates) -> Bools:
    """Return which samples share a label; a sample without a label has no vote. (Q, k) -> (Q, k, k)."""
    return np.asarray((given.label[:, :, None] == given.label[:, None, :]) & (given.label >= 0)[:, None, :])


def _support(given: Candidates, weight: Floats) -> tuple[Floats, Ints]:
    """Return the weight of each sample's label, (Q, k), and the first sample of the one with most, (Q,).

    Sums within 1e-12 tie, so that equal sums in another order stay equal.
    """
    support = np.where(given.label >= 0, (_same(given) * weight[:, None, :]).sum(axis=2), -1.0)  # no label: never first
    return support, (support >= support.max(axis=1, keepdims=True) - ROUNDING).argmax(axis=1)


def _voted(given: Candidates, rule: str) -> Choice:
    """Take the label with most weight."""
    weight = VOTES[rule](given)
    support, place = _support(given, weight)
    rows, total = np.arange(len(place)), weight.sum(axis=1)
    share = np.divide(support[rows, place], total, out=np.zeros(len(place)), where=total > 0)
    return Choice(place, np.clip(share, 0.0, 1.0))


# What a sample's vote weighs, at most 1.
VOTES: dict[str, Callable[[Candidates], Floats]] = {
    "majority vote": lambda given: np.ones_like(given.confidence),
    "confidence-weighted vote": lambda given: given.confidence,
}
RULES: dict[str, Callable[[Candidates], Choice]] = {
    "most confident": lambda given: _picked(given, given.confidence),
    **{rule: partial(_voted, rule=rule) for rule in VOTES},
    # The sample whose tokens were likeliest on average; one without that number comes last.
    LIKELIEST: lambda given: _picked(given, given.logprob),
    **{rule: partial(_picked_by_tokens, rule=rule) for rule in TOKENS},
}


def further(given: Candidates, rule: str, k: int, stop: float = 1.0) -> Ints:
    """Return how many samples of k the choice needs at least after the first m; 0: it is settled. (Q, m) -> (Q,).

    A vote is settled when no way to fill up the k samples changes it: its lead over every rival is larger than what is
    to come, or as large where its first sample came before the rival's. The most confident is settled when its
    confidence reaches `stop`. Other rules take all k.
    """
    questions, taken = given.label.shape
    left = k - taken
    if rule == "most confident":
        return np.where(given.confidence.max(axis=1, initial=-1.0) >= stop, 0, min(left, 1))
    if rule not in VOTES or not taken:
        return np.full(questions, left if rule not in VOTES else (left + 1) // 2)
    support, place = _support(given, VOTES[rule](given))
    winner = np.take_along_axis(given.label, place[:, None], axis=1)
    rival = (given.label != winner) & (given.label >= 0)
    # The winner's own samples are compared with 0: a rival that is to come.
    lead = support.max(axis=1, keepdims=True).clip(min=0.0) - np.where(rival, support, 0.0)
    earlier = rival & (_same(given).argmax(axis=2) < place[:, None])
    # With b more votes for the winner it leads by lead + b, and left - b are to come.
    behind = np.where(lead > left + ROUNDING, 0.0, np.floor((left - lead + ROUNDING) / 2) + 1)
    needed = np.where(earlier, behind, np.maximum(0.0, np.ceil((left - lead - ROUNDING) / 2)))
    return np.asarray(np.minimum(needed.max(axis=1), left), dtype=np.intp)


def stopped(given: Candidates, rule: str, stop: float | None = 1.0) -> tuple[Choice, Ints]:
    """Choose one of up to k samples, taken one after another until `further` is 0; and how many were taken: (Q,).

    stop None: all k are taken.
    """
    k = given.label.shape[1]
    choice, taken = RULES[rule](given), np.full(len(given.questions), k)
    if stop is None:
        return choice, taken
    for count in range(k - 1, 0, -1):
        part = given.at(np.arange(count))
        settled, early = further(part, rule, k, stop) == 0, RULES[rule](part)
        choice = Choice(*(np.where(settled, new, old) for new, old in zip(early, choice, strict=True)))
        taken = np.where(settled, count, taken)
    return choice, taken


def choose_stop(given: Candidates) -> float:
    """Choose where the most confident of k may stop: the lowest of `ranking.THRESHOLDS` from which on none is worse.

    Worse: fewer right answers than with all k samples. Choose it on validation questions.
    """
    rule, best = "most confident", 1.0
    wanted = given.right(RULES[rule](given).place).sum()
    for stop in reversed(THRESHOLDS):
        if given.right(stopped(given, rule, stop)[0].place).sum() < wanted:
            break
        best = stop
    return best


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
    picks = {
        rule: [(choice.confidence, part.right(choice.place)) for part in parts for choice in [choose(part)]]
        for rule, choose in RULES.items()
        if rule in given.tokens or rule not in (*TOKENS, *([LIKELIEST] if np.isnan(given.logprob).all() else ()))
    }
    # One random sample of a random subset is one random sample of all.
    picks["one random sample"] = list(zip(given.confidence.T, given.correct.T, strict=True))
    no_confidence: Floats = np.full(len(given.questions), np.nan)
    picks["oracle"] = [(no_confidence, np.asarray(part.correct.any(axis=1))) for part in parts]
    rows = []
    for rule, choices in picks.items():
        right = np.asarray(np.mean([correct for _, correct in choices], axis=0, dtype=np.float64))
        interval = ratio_interval(right, np.ones_like(right), level=LEVEL, seed=seed)
        error = np.nan if rule == "oracle" else float(np.mean([ece(*choice) for choice in choices]))
        ends = (interval.low, interval.high, error, len(right), len(choices), exact or rule == "one random sample")
        rows.append(Selected(rule, k, float(right.mean()), *ends))
    return rows


def within_questions(given: Candidates, *, seed: int = 0) -> Within:
    """Return the AUROC of the confidence among the samples of the same question; above a half, it helps to pick one.

    It is of all n samples and does not depend on k. A sample without an answer is a wrong one.
    """
    names = np.repeat(given.questions, given.label.shape[1]).tolist()
    return auroc_within(names, given.confidence.ravel(), given.correct.ravel(), level=LEVEL, seed=seed)
