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
from itertools import combinations
from math import comb, nan
from typing import NamedTuple

import numpy as np

from catto.metrics.binning import Bools, Floats, Ints
from catto.metrics.errors import ece
from catto.metrics.ranking import Within, auroc_within
from catto.metrics.statistics import ratio_interval
from catto.metrics.temperature import confidence_at
from catto.records import Prediction

MOST_SUBSETS = 2000
LEVEL = 0.95
ROUNDING = 1e-12
# Confidences at which sampling may stop: 0, 0.02, ..., 0.98, then 1 - 10^-2, 1 - 10^-2.25, ..., 1 - 10^-8, and 1. The
# steps shrink towards 1, where confidences pile up.
_EVEN_STOPS = [round(0.02 * step, 2) for step in range(50)]
_SHRINKING_STOPS = [1.0 - 10.0 ** -(2.0 + step / 4.0) for step in range(25)]
STOPS: tuple[float, ...] = (*_EVEN_STOPS, *_SHRINKING_STOPS, 1.0)
MOST_CONFIDENT = "most confident"
LIKELIEST = "mean log-probability"
RANDOM = "one random sample"
ORACLE = "oracle"
# Rules by numbers that a file has where its engine gave the candidates of every token -> field of a prediction.
TOKENS = {"self-certainty": "self_certainty", "lowest-group confidence": "lowest_group"}
# Tokens of a group; a shorter response is one group.
GROUP = 128


@dataclass(frozen=True)
class Candidates:
    """n samples of Q questions.

    Attributes:
        questions: Q ids.
        label: (Q, n) codes of the labels or normalised answers, -1 for none.
        confidence: (Q, n) in [0, 1].
        logprob: (Q, n) mean log-probability of a sample's tokens, nan where it is unknown.
        correct: (Q, n).
        tokens: Other numbers of each sample's tokens, (Q, n) each, by the name of the rule that takes the highest.
    """

    questions: tuple[str, ...]
    label: Ints
    confidence: Floats
    logprob: Floats
    correct: Bools
    tokens: Mapping[str, Floats] = field(default_factory=dict)

    def at(self, subset: Ints) -> Candidates:
        """Return the candidates of one subset of sample numbers: (k,) -> (Q, k)."""
        return Candidates(
            self.questions,
            label=self.label[:, subset],
            confidence=self.confidence[:, subset],
            logprob=self.logprob[:, subset],
            correct=self.correct[:, subset],
            tokens={rule: column[:, subset] for rule, column in self.tokens.items()},
        )

    def right(self, place: Ints) -> Bools:
        """Return whether the sample at each question's place is right: (Q,) -> (Q,)."""
        return self.correct[np.arange(len(place)), place]


@dataclass(frozen=True)
class Selected:
    """A rule at k: accuracy with its bootstrap interval over questions, and the ECE of its confidence (20 bins).

    Attributes:
        rule: Name of the rule.
        k: Number of samples to choose from.
        accuracy: Mean over the subsets, in [0, 1].
        low: Lower end of the interval of the accuracy.
        high: Upper end of the interval of the accuracy.
        ece: Mean over the subsets, in [0, 1]; nan for the oracle.
        questions: Number of questions.
        subsets: Number of subsets.
        exact: Whether these are all subsets.
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
    """Return a response's self-certainty and its lowest group's.

    A token's certainty is minus the mean log-probability of its candidates. The mean over all tokens is self-certainty
    (Kang et al., 2025) up to a constant, as far as the candidates go; the lowest mean over `GROUP` consecutive tokens
    is DeepConf's lowest-group confidence (Fu et al., 2025).

    Args:
        tops: For each token, the token and its candidates: text -> log-probability.

    >>> token_certainty([("a", {"a": -0.5, "b": -1.5}), ("c", {"c": -0.25, "d": -3.75})])
    (1.5, 1.5)
    """
    certainties = []
    for _, logprobs in tops:
        mean_logprob = sum(logprobs.values()) / len(logprobs)
        certainties.append(-mean_logprob)
    certainty = np.array(certainties)
    width = min(GROUP, len(certainty))
    kernel = np.full(width, 1.0 / width)
    group_means = np.convolve(certainty, kernel, "valid")
    return float(certainty.mean()), float(group_means.min())


def samples_by_question(predictions: Sequence[Prediction]) -> list[list[Prediction]]:
    """Return the samples of every question in their order.

    Raises:
        ValueError: There are none, questions differ in the number of their samples, or a question has one sample twice
            or two gold labels.
    """
    samples_of: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        samples_of.setdefault(prediction.question, []).append(prediction)
    if not samples_of:
        raise ValueError("no predictions to select from")
    rows = [sorted(samples, key=lambda prediction: prediction.sample) for samples in samples_of.values()]
    first = rows[0]
    for row in rows:
        name = row[0].question
        if len(row) != len(first):
            raise ValueError(f"question {name} has {len(row)} samples, {first[0].question} has {len(first)}")
        numbers = {prediction.sample for prediction in row}
        if len(numbers) < len(row):
            raise ValueError(f"question {name} has a sample twice")
        golds = {prediction.gold for prediction in row}
        if len(golds) > 1:
            raise ValueError(f"question {name} has two gold labels")
    return rows


def gather_candidates(predictions: Sequence[Prediction], tau: float | None = None) -> Candidates:
    """Gather predictions by question.

    Args:
        predictions: Equally many samples of every question, in any order. The temperature at which they were sampled
            does not matter.
        tau: Temperature of the confidence that ranks them; None takes the confidence they state.

    Returns:
        The columns, (Q, n) each.
    """
    rows = samples_by_question(predictions)
    shape = (len(rows), len(rows[0]))
    label = np.empty(shape, dtype=np.intp)
    confidence = np.empty(shape)
    logprob = np.full(shape, np.nan)
    correct = np.empty(shape, dtype=np.bool_)
    tokens = {rule: np.empty(shape) for rule in TOKENS}
    code_of: dict[str | None, int] = {None: -1}
    for question, row in enumerate(rows):
        for sample, prediction in enumerate(row):
            place = question, sample
            label[place] = code_of.setdefault(prediction.choice, len(code_of) - 1)
            confidence[place] = prediction.confidence if tau is None else confidence_at(prediction, tau)
            if prediction.mean_logprob is not None:
                logprob[place] = prediction.mean_logprob
            correct[place] = prediction.is_correct
            for rule, name in TOKENS.items():
                tokens[rule][place] = getattr(prediction, name)  # None becomes nan
    known = {rule: column for rule, column in tokens.items() if not np.isnan(column).all()}
    return Candidates(tuple(row[0].question for row in rows), label, confidence, logprob, correct, known)


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

    Args:
        predictions: The same questions and k samples of each at every temperature.
        tau: Temperature of the confidence that ranks them.

    Returns:
        The choice; in case of a tie, the lowest temperature.
    """
    accuracy: dict[str, float] = {}
    fallback_rate: dict[str, float] = {}
    for temperature in sorted({prediction.temperature for prediction in predictions}):
        rows = [prediction for prediction in predictions if prediction.temperature == temperature]
        given = gather_candidates(rows, tau)
        choice = RULES[MOST_CONFIDENT](given)
        accuracy[str(temperature)] = float(given.right(choice.place).mean())
        fallbacks = sum(prediction.is_forced for prediction in rows)
        fallback_rate[str(temperature)] = fallbacks / len(rows)
    questions, k = given.label.shape
    best = max(accuracy, key=lambda temperature: accuracy[temperature])
    return Sampling(float(best), tau, k, questions, accuracy, fallback_rate)


# ---- rules


class ChosenSamples(NamedTuple):
    """The chosen sample of every question and the confidence of the choice, both (Q,)."""

    place: Ints
    confidence: Floats


def _pick_highest(given: Candidates, score: Floats) -> ChosenSamples:
    """Take the sample with the highest score; one without a score comes last. score: (Q, k)."""
    place = np.where(np.isnan(score), -np.inf, score).argmax(axis=1)
    return ChosenSamples(place, given.confidence[np.arange(len(score)), place])


def _pick_most_confident(given: Candidates) -> ChosenSamples:
    return _pick_highest(given, given.confidence)


def _pick_likeliest(given: Candidates) -> ChosenSamples:
    return _pick_highest(given, given.logprob)


def _pick_by_tokens(given: Candidates, rule: str) -> ChosenSamples:
    if rule not in given.tokens:
        raise ValueError(f"{rule} needs the candidates of every token, which only servers give")
    return _pick_highest(given, given.tokens[rule])


def _share_labels(given: Candidates) -> Bools:
    """Return which samples share a label; a sample without a label has no vote. (Q, k) -> (Q, k, k)."""
    is_equal = given.label[:, :, None] == given.label[:, None, :]
    has_label = given.label >= 0
    return np.asarray(is_equal & has_label[:, None, :])


class _Support(NamedTuple):
    """The weight of each sample's label, (Q, k), and the first sample of the label with most weight, (Q,)."""

    of_samples: Floats
    winner: Ints


def _sum_votes(given: Candidates, weight: Floats) -> _Support:
    """Add up the votes. Sums within 1e-12 tie, so that equal sums in another order stay equal. weight: (Q, k)."""
    votes = (_share_labels(given) * weight[:, None, :]).sum(axis=2)
    support = np.where(given.label >= 0, votes, -1.0)  # no label: never first
    is_first = support >= support.max(axis=1, keepdims=True) - ROUNDING
    return _Support(support, is_first.argmax(axis=1))


def _pick_by_vote(given: Candidates, rule: str) -> ChosenSamples:
    """Take the label with most weight."""
    weight = VOTES[rule](given)
    support = _sum_votes(given, weight)
    winning = support.of_samples[np.arange(len(weight)), support.winner]
    total = weight.sum(axis=1)
    share = np.divide(winning, total, out=np.zeros(len(total)), where=total > 0)
    return ChosenSamples(support.winner, np.clip(share, 0.0, 1.0))


def _weigh_equally(given: Candidates) -> Floats:
    return np.ones_like(given.confidence)


def _weigh_by_confidence(given: Candidates) -> Floats:
    return given.confidence


# What a sample's vote weighs, at most 1.
VOTES: dict[str, Callable[[Candidates], Floats]] = {
    "majority vote": _weigh_equally,
    "confidence-weighted vote": _weigh_by_confidence,
}
RULES: dict[str, Callable[[Candidates], ChosenSamples]] = {
    MOST_CONFIDENT: _pick_most_confident,
    **{rule: partial(_pick_by_vote, rule=rule) for rule in VOTES},
    LIKELIEST: _pick_likeliest,
    **{rule: partial(_pick_by_tokens, rule=rule) for rule in TOKENS},
}


# ---- adaptive k


def samples_still_needed(
    given: Candidates,
    rule: str,
    k: int,
    stop: float = 1.0,
) -> Ints:
    """Return how many samples of k the choice needs at least after the first m; 0 means that it is settled.

    A vote is settled when no way to fill up the k samples changes it: its lead over every rival is larger than what is
    to come, or as large where its first sample came before the rival's. The most confident is settled when its
    confidence reaches `stop`. Other rules take all k.

    Args:
        given: (Q, m), the samples so far.
        rule: A name of RULES.
        k: Most samples per question.
        stop: Confidence in [0, 1], for the most confident.

    Returns:
        (Q,) whole numbers from 0 to k - m.
    """
    questions, taken = given.label.shape
    left = k - taken
    if rule == MOST_CONFIDENT:
        highest = given.confidence.max(axis=1, initial=-1.0)
        return np.where(highest >= stop, 0, min(left, 1))
    if rule not in VOTES:
        return np.full(questions, left)
    if not taken:
        return np.full(questions, (left + 1) // 2)
    return _votes_still_needed(given, VOTES[rule](given), left)


def _votes_still_needed(
    given: Candidates,
    weight: Floats,
    left: int,
) -> Ints:
    """Return how many more votes settle a vote at least, with so many samples left. (Q, m) -> (Q,)."""
    support, winner = _sum_votes(given, weight)
    winning_label = np.take_along_axis(given.label, winner[:, None], axis=1)
    is_rival = (given.label != winning_label) & (given.label >= 0)
    # The winner's own samples are compared with 0: a rival that is to come.
    winning_support = support.max(axis=1, keepdims=True).clip(min=0.0)
    lead = winning_support - np.where(is_rival, support, 0.0)
    first_of_label = _share_labels(given).argmax(axis=2)
    wins_ties = is_rival & (first_of_label < winner[:, None])
    # With b more votes for the winner it leads by lead + b, and left - b are to come: the lead must exceed them, or
    # reach them where the winner came first.
    to_exceed = np.floor((left - lead + ROUNDING) / 2) + 1
    to_exceed = np.where(lead > left + ROUNDING, 0.0, to_exceed)
    to_reach = np.maximum(0.0, np.ceil((left - lead - ROUNDING) / 2))
    needed = np.where(wins_ties, to_exceed, to_reach).max(axis=1)
    return np.asarray(np.minimum(needed, left), dtype=np.intp)


def choose_adaptively(
    given: Candidates,
    rule: str,
    stop: float | None = 1.0,
) -> tuple[ChosenSamples, Ints]:
    """Choose one of up to k samples, taken one after another until no more is needed.

    Args:
        given: (Q, k).
        rule: A name of RULES.
        stop: See `samples_still_needed`; None takes all k.

    Returns:
        The choice, and how many samples were taken, (Q,).
    """
    k = given.label.shape[1]
    choice = RULES[rule](given)
    taken = np.full(len(given.questions), k)
    if stop is None:
        return choice, taken
    for count in range(k - 1, 0, -1):
        part = given.at(np.arange(count))
        is_settled = samples_still_needed(part, rule, k, stop) == 0
        early = RULES[rule](part)
        choice = ChosenSamples(
            place=np.where(is_settled, early.place, choice.place),
            confidence=np.where(is_settled, early.confidence, choice.confidence),
        )
        taken = np.where(is_settled, count, taken)
    return choice, taken


def choose_stop(given: Candidates) -> float:
    """Choose where the most confident of k may stop: the lowest of STOPS from which on none is worse.

    Worse means fewer right answers than with all k samples. Choose it on validation questions.

    Args:
        given: (Q, k).

    Returns:
        A confidence in [0, 1].
    """
    all_samples = RULES[MOST_CONFIDENT](given)
    wanted = given.right(all_samples.place).sum()
    best = 1.0
    for stop in reversed(STOPS):
        choice, _ = choose_adaptively(given, MOST_CONFIDENT, stop)
        if given.right(choice.place).sum() < wanted:
            break
        best = stop
    return best


# ---- Confidence@k


def draw_subsets(n: int, k: int) -> tuple[Ints, bool]:
    """Return subsets of k of n sample numbers, each rising, and whether these are all.

    Returns:
        (S, k) sample numbers, S <= MOST_SUBSETS; and True where they are all C(n, k).

    >>> draw_subsets(3, 2)[0].tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, there are {n} samples per question")
    if comb(n, k) <= MOST_SUBSETS:
        return np.array(list(combinations(range(n), k)), dtype=np.intp), True
    rng = np.random.default_rng(0)
    drawn: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for _ in range(4 * MOST_SUBSETS):
        subset = rng.choice(n, k, replace=False).tolist()
        drawn[tuple(sorted(subset))] = None
        if len(drawn) == MOST_SUBSETS:
            break
    return np.array(list(drawn), dtype=np.intp), False


def measure_rules(
    given: Candidates,
    k: int,
    *,
    seed: int = 0,
) -> list[Selected]:
    """Measure every rule at k, one random sample and the oracle. Means over subsets come before those over questions.

    Args:
        given: (Q, n), n >= k.
        k: Number of samples to choose from.
        seed: Of the bootstrap.

    Returns:
        One row per rule; a rule whose number no sample has is left out.
    """
    chosen, exact = draw_subsets(given.label.shape[1], k)
    parts = [given.at(subset) for subset in chosen]
    rows = []
    for rule in _usable_rules(given):
        rights = []
        errors = []
        for part in parts:
            choice = RULES[rule](part)
            right = part.right(choice.place)
            rights.append(right)
            errors.append(ece(choice.confidence, right))
        rows.append(_summarise_rule(rule, k, rights, float(np.mean(errors)), exact=exact, seed=seed))
    # One random sample of a random subset is one random sample of all.
    errors = [ece(confidence, right) for confidence, right in zip(given.confidence.T, given.correct.T, strict=True)]
    rows.append(_summarise_rule(RANDOM, k, list(given.correct.T), float(np.mean(errors)), exact=True, seed=seed))
    any_right = [np.asarray(part.correct.any(axis=1)) for part in parts]
    rows.append(_summarise_rule(ORACLE, k, any_right, nan, exact=exact, seed=seed))
    return rows


def _usable_rules(given: Candidates) -> list[str]:
    """Return the rules whose number at least one sample has."""
    rules = []
    for rule in RULES:
        if rule == LIKELIEST and np.isnan(given.logprob).all():
            continue
        if rule in TOKENS and rule not in given.tokens:
            continue
        rules.append(rule)
    return rules


def _summarise_rule(
    rule: str,
    k: int,
    rights: Sequence[Bools],
    error: float,
    *,
    exact: bool,
    seed: int,
) -> Selected:
    """Average over subsets, then over questions. rights: for each subset, whether each question's choice is right."""
    right_share = np.asarray(np.mean(rights, axis=0, dtype=np.float64))
    interval = ratio_interval(right_share, np.ones_like(right_share), level=LEVEL, seed=seed)
    return Selected(
        rule,
        k,
        accuracy=float(right_share.mean()),
        low=interval.low,
        high=interval.high,
        ece=error,
        questions=len(right_share),
        subsets=len(rights),
        exact=exact,
    )


def within_questions(given: Candidates, *, seed: int = 0) -> Within:
    """Return the AUROC of the confidence among the samples of the same question; above a half, it helps to pick one.

    It is of all n samples and does not depend on k. A sample without an answer is a wrong one.

    Args:
        given: (Q, n).
        seed: Of the bootstrap.
    """
    names = np.repeat(given.questions, given.label.shape[1]).tolist()
    return auroc_within(names, given.confidence.ravel(), given.correct.ravel(), level=LEVEL, seed=seed)
