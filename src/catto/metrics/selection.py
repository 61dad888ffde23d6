"""Confidence@k: choose one of k sampled answers, by confidence and by competing rules.

From n samples per question, every k is measured on all C(n, k) subsets of sample numbers, which are the same for every
question. If there are more than `MOST_SUBSETS`, that many are drawn with a fixed seed. Ties go to the answer that was
sampled first.

The confidence of the chosen answer is that of the chosen sample. For the majority vote, it is the share of votes; for
the weighted vote, the share of confidence. The oracle is right if any of the k samples is; it is an upper bound and has
no confidence.

Adaptive k draws samples one after another. A vote ends when further samples cannot change it, which loses nothing. The
most confident rule ends at the first sample that reaches a confidence chosen on validation questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from math import comb, nan
from statistics import fmean
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
# Rules that need scores from the candidates of every token, which not every engine returns -> field of a prediction.
TOKENS = {"self-certainty": "self_certainty", "lowest-group confidence": "lowest_group"}
# Number of tokens in a group; a shorter response is one group.
GROUP = 128


@dataclass(frozen=True)
class Candidates:
    """n samples of Q questions.

    Attributes:
        questions: Q ids.
        label: (Q, n) codes of the labels or normalised answers, -1 for none.
        confidence: (Q, n) in [0, 1].
        logprob: (Q, n) mean log-probability of a sample's tokens, nan if unknown.
        correct: (Q, n) whether a sample is right.
        tokens: Name of a rule in TOKENS -> the scores of which it takes the highest, (Q, n), nan if unknown.
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
        """Return whether one sample of each question is right. (Q,) sample numbers -> (Q,)."""
        return self.correct[np.arange(len(place)), place]


@dataclass(frozen=True)
class Selected:
    """Results of a rule at k: accuracy with its bootstrap interval over questions, and ECE of its confidence (20 bins).

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
    """Return a response's self-certainty, and the self-certainty of its least certain group of tokens.

    A token's certainty is minus the mean log-probability of its candidates. The mean over all tokens is self-certainty
    (Kang et al., 2025) up to a constant, restricted to the candidates. The lowest mean over `GROUP` consecutive tokens
    is DeepConf's lowest-group confidence (Fu et al., 2025).

    Args:
        tops: For each token, the token and its candidates: text -> log-probability. At least one token.

    Returns:
        The self-certainty and the lowest-group confidence.

    >>> token_certainty([("a", {"a": -0.5, "b": -1.5}), ("c", {"c": -0.25, "d": -3.75})])
    (1.5, 1.5)
    """
    certainties = []
    for _, logprobs in tops:
        mean_logprob = sum(logprobs.values()) / len(logprobs)
        certainties.append(-mean_logprob)
    certainty = np.array(certainties)
    group_size = min(GROUP, len(certainty))
    averaging = np.full(group_size, 1.0 / group_size)
    group_means = np.convolve(certainty, averaging, "valid")
    return float(certainty.mean()), float(group_means.min())


def samples_by_question(predictions: Sequence[Prediction]) -> list[list[Prediction]]:
    """Group predictions by question.

    Args:
        predictions: Equally many samples of every question, in any order.

    Returns:
        For each question, its samples in order of increasing sample number. Questions are in order of first appearance.

    Raises:
        ValueError: There are no predictions, questions differ in the number of their samples, or a question repeats a
            sample number or has two gold labels.
    """
    samples_of: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        samples_of.setdefault(prediction.question, []).append(prediction)
    if not samples_of:
        raise ValueError("no predictions to select from")
    questions = [sorted(samples, key=lambda prediction: prediction.sample) for samples in samples_of.values()]
    first = questions[0]
    for samples in questions:
        name = samples[0].question
        if len(samples) != len(first):
            raise ValueError(f"question {name} has {len(samples)} samples, {first[0].question} has {len(first)}")
        sample_numbers = {prediction.sample for prediction in samples}
        if len(sample_numbers) < len(samples):
            raise ValueError(f"question {name} has a sample twice")
        golds = {prediction.gold for prediction in samples}
        if len(golds) > 1:
            raise ValueError(f"question {name} has two gold labels")
    return questions


def gather_candidates(predictions: Sequence[Prediction], tau: float | None = None) -> Candidates:
    """Arrange predictions in columns that have one row per question.

    Args:
        predictions: Equally many samples of every question, in any order. The temperature at which they were sampled
            does not matter.
        tau: Temperature of the confidence that ranks the samples; None means the `confidence` of the prediction.

    Returns:
        The columns, (Q, n) each. A score that no sample has is left out of `tokens`.

    Raises:
        ValueError: See `samples_by_question` and `confidence_at`.
    """
    questions = samples_by_question(predictions)
    shape = (len(questions), len(questions[0]))
    label = np.empty(shape, dtype=np.intp)
    confidence = np.empty(shape)
    logprob = np.full(shape, np.nan)
    correct = np.empty(shape, dtype=np.bool_)
    tokens = {rule: np.empty(shape) for rule in TOKENS}
    # Labels are numbered from 0 in order of appearance; a missing label has the code -1.
    code_of: dict[str | None, int] = {None: -1}
    for question_index, samples in enumerate(questions):
        for sample_index, prediction in enumerate(samples):
            cell = (question_index, sample_index)
            next_code = len(code_of) - 1
            label[cell] = code_of.setdefault(prediction.choice, next_code)
            confidence[cell] = prediction.confidence if tau is None else confidence_at(prediction, tau)
            if prediction.mean_logprob is not None:
                logprob[cell] = prediction.mean_logprob
            correct[cell] = prediction.is_correct
            for rule, field_name in TOKENS.items():
                tokens[rule][cell] = getattr(prediction, field_name)  # None becomes nan
    known_tokens = {rule: column for rule, column in tokens.items() if not np.isnan(column).all()}
    return Candidates(
        questions=tuple(samples[0].question for samples in questions),
        label=label,
        confidence=confidence,
        logprob=logprob,
        correct=correct,
        tokens=known_tokens,
    )


@dataclass(frozen=True)
class Sampling:
    """The sampling temperature that was chosen, and what was measured at every one that was tried.

    Attributes:
        temperature: The chosen one.
        tau: Temperature of the confidence that ranks the samples.
        k: Number of samples of each question.
        questions: Number of questions.
        accuracy: Temperature as text -> accuracy of the most confident of k samples.
        fallback_rate: Temperature as text -> share of forced answers among all samples.
    """

    temperature: float
    tau: float
    k: int
    questions: int
    accuracy: dict[str, float]
    fallback_rate: dict[str, float]


def choose_sampling(predictions: Sequence[Prediction], tau: float) -> Sampling:
    """Choose the sampling temperature at which the most confident of k samples is right most often.

    Args:
        predictions: The same questions and k samples of each at every temperature.
        tau: Temperature of the confidence that ranks the samples.

    Returns:
        The best temperature of the predictions, in a tie the lowest one, and what was measured at every temperature.

    Raises:
        ValueError: There are no predictions, or those of one temperature cannot be gathered, see `gather_candidates`.
    """
    if not predictions:
        raise ValueError("no predictions to choose a temperature from")
    samples_at: dict[float, list[Prediction]] = {}
    for prediction in predictions:
        samples_at.setdefault(prediction.temperature, []).append(prediction)

    temperatures = sorted(samples_at)
    candidates_at: dict[float, Candidates] = {}
    accuracy: dict[str, float] = {}
    fallback_rate: dict[str, float] = {}
    for temperature in temperatures:
        samples = samples_at[temperature]
        candidates = gather_candidates(samples, tau)
        candidates_at[temperature] = candidates
        choice = RULES[MOST_CONFIDENT](candidates)
        accuracy[str(temperature)] = float(candidates.right(choice.place).mean())
        fallback_rate[str(temperature)] = fmean(prediction.is_forced for prediction in samples)

    # The lowest temperature comes first, and `max` returns the first of equals.
    best = max(temperatures, key=lambda temperature: accuracy[str(temperature)])
    questions, k = candidates_at[best].label.shape
    return Sampling(best, tau, k, questions, accuracy, fallback_rate)


# ---- rules


class ChosenSamples(NamedTuple):
    """The chosen sample of every question.

    Attributes:
        place: (Q,) index of the chosen sample among the candidates.
        confidence: (Q,) confidence of the choice.
    """

    place: Ints
    confidence: Floats


def _pick_highest(candidates: Candidates, score: Floats) -> ChosenSamples:
    """Choose the sample with the highest score; samples without a score (nan) come last. score: (Q, k)."""
    place = np.where(np.isnan(score), -np.inf, score).argmax(axis=1)
    return ChosenSamples(place, candidates.confidence[np.arange(len(score)), place])


def _pick_most_confident(candidates: Candidates) -> ChosenSamples:
    return _pick_highest(candidates, candidates.confidence)


def _pick_likeliest(candidates: Candidates) -> ChosenSamples:
    return _pick_highest(candidates, candidates.logprob)


def _pick_by_tokens(candidates: Candidates, rule: str) -> ChosenSamples:
    if rule not in candidates.tokens:
        raise ValueError(f"{rule} needs the candidates of every token, which only servers give")
    return _pick_highest(candidates, candidates.tokens[rule])


def _compare_labels(candidates: Candidates) -> Bools:
    """Return at [q, i, j] whether samples i and j of question q have the same label. (Q, k) -> (Q, k, k).

    A sample without a label is not even equal to itself, because it has no vote.
    """
    is_equal = candidates.label[:, :, None] == candidates.label[:, None, :]
    has_label = candidates.label >= 0
    return np.asarray(is_equal & has_label[:, None, :])


class _Support(NamedTuple):
    """The votes for each label.

    Attributes:
        of_samples: (Q, k) votes for the label of each sample; -1 for a sample without a label.
        winner: (Q,) index of the first sample with the winning label.
    """

    of_samples: Floats
    winner: Ints


def _sum_votes(candidates: Candidates, weight: Floats) -> _Support:
    """Add up the votes for each label; in a tie, the label that was sampled first wins.

    Sums that differ by at most 1e-12 count as equal, because the order of addition may change the last bits.

    Args:
        candidates: (Q, k).
        weight: (Q, k), the weight of each sample's vote.
    """
    votes = (_compare_labels(candidates) * weight[:, None, :]).sum(axis=2)
    support = np.where(candidates.label >= 0, votes, -1.0)  # no label: never the winner
    has_most = support >= support.max(axis=1, keepdims=True) - ROUNDING
    return _Support(support, winner=has_most.argmax(axis=1))


def _pick_by_vote(candidates: Candidates, rule: str) -> ChosenSamples:
    """Choose the label with most votes; the confidence is its share of the total weight.

    The confidence is 0 if no sample has a label or all weights are 0.
    """
    weight = VOTES[rule](candidates)
    support = _sum_votes(candidates, weight)
    winning = support.of_samples[np.arange(len(weight)), support.winner]
    total = weight.sum(axis=1)
    share = np.divide(winning, total, out=np.zeros(len(total)), where=total > 0)
    return ChosenSamples(support.winner, np.clip(share, 0.0, 1.0))


def _weigh_equally(candidates: Candidates) -> Floats:
    return np.ones_like(candidates.confidence)


def _weigh_by_confidence(candidates: Candidates) -> Floats:
    return candidates.confidence


# The weight of each sample's vote, at most 1.
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
    candidates: Candidates,
    rule: str,
    k: int,
    stop: float = 1.0,
) -> Ints:
    """Return how many more samples the choice needs at least after the first m of k; 0 means that it is settled.

    A vote is settled when the remaining samples cannot change it. Then the winner's lead over every rival exceeds the
    number of remaining samples, or equals it if the winner was sampled before the rival. The most confident sample is
    settled when its confidence reaches `stop`. Other rules need all k samples.

    Args:
        candidates: (Q, m), the samples so far; m may be 0.
        rule: A name of RULES.
        k: Maximum number of samples per question.
        stop: Confidence in [0, 1] at which the most confident sample is settled.

    Returns:
        (Q,) whole numbers from 0 to k - m.
    """
    questions, taken = candidates.label.shape
    remaining = k - taken
    if rule == MOST_CONFIDENT:
        highest = candidates.confidence.max(axis=1, initial=-1.0)  # -1 without samples: below every `stop`
        return np.where(highest >= stop, 0, min(remaining, 1))
    if rule not in VOTES:
        return np.full(questions, remaining)
    if taken == 0:
        # A label that gets the first half of the k votes, each of weight 1, cannot be overtaken, because it wins ties.
        return np.full(questions, (remaining + 1) // 2)
    return _votes_still_needed(candidates, VOTES[rule](candidates), remaining)


def _votes_still_needed(
    candidates: Candidates,
    weight: Floats,
    remaining: int,
) -> Ints:
    """Return how many of the remaining votes are needed at least to settle a vote. (Q, m) -> (Q,).

    Every remaining vote is assumed to have weight 1, the maximum.
    """
    support, winner = _sum_votes(candidates, weight)
    winning_label = np.take_along_axis(candidates.label, winner[:, None], axis=1)
    is_rival = (candidates.label != winning_label) & (candidates.label >= 0)
    # At the winner's own samples the rival is a label that has not been sampled yet: it has 0 votes.
    rival_support = np.where(is_rival, support, 0.0)
    winning_support = support.max(axis=1, keepdims=True).clip(min=0.0)  # -1 if no sample has a label
    lead = winning_support - rival_support
    first_of_label = _compare_labels(candidates).argmax(axis=2)
    rival_wins_ties = is_rival & (first_of_label < winner[:, None])
    # After b more votes for the winner, it leads by lead + b, and remaining - b votes are left. The lead must exceed
    # them, or only equal them if the winner was sampled before the rival.
    exceeds_already = lead > remaining + ROUNDING
    to_exceed = np.where(exceeds_already, 0.0, np.floor((remaining - lead + ROUNDING) / 2) + 1)
    to_reach = np.maximum(0.0, np.ceil((remaining - lead - ROUNDING) / 2))
    needed = np.where(rival_wins_ties, to_exceed, to_reach).max(axis=1)
    return np.asarray(np.minimum(needed, remaining), dtype=np.intp)


def choose_adaptively(
    candidates: Candidates,
    rule: str,
    stop: float | None = 1.0,
) -> tuple[ChosenSamples, Ints]:
    """Choose one of up to k samples, which are taken one after another until the choice is settled.

    Args:
        candidates: (Q, k).
        rule: A name of RULES.
        stop: See `samples_still_needed`; None takes all k samples.

    Returns:
        The choice, and how many samples were taken, (Q,).
    """
    k = candidates.label.shape[1]
    choice = RULES[rule](candidates)
    taken = np.full(len(candidates.questions), k)
    if stop is None:
        return choice, taken
    # Counts decrease, so that the smallest count at which a question is settled is written last.
    for count in range(k - 1, 0, -1):
        first_samples = candidates.at(np.arange(count))
        is_settled = samples_still_needed(first_samples, rule, k, stop) == 0
        early_choice = RULES[rule](first_samples)
        choice = ChosenSamples(
            place=np.where(is_settled, early_choice.place, choice.place),
            confidence=np.where(is_settled, early_choice.confidence, choice.confidence),
        )
        taken = np.where(is_settled, count, taken)
    return choice, taken


def choose_stop(candidates: Candidates) -> float:
    """Choose the confidence at which sampling may stop without fewer right answers than with all k samples.

    The rule is the most confident sample. STOPS are tried from 1 downwards, and the last one before the number of right
    answers falls is returned.

    Args:
        candidates: (Q, k) of validation questions.

    Returns:
        A confidence in [0, 1].
    """
    choice_of_all = RULES[MOST_CONFIDENT](candidates)
    right_with_all = candidates.right(choice_of_all.place).sum()
    lowest_stop = 1.0
    for stop in reversed(STOPS):
        choice, _ = choose_adaptively(candidates, MOST_CONFIDENT, stop)
        if candidates.right(choice.place).sum() < right_with_all:
            break
        lowest_stop = stop
    return lowest_stop


# ---- Confidence@k


def draw_subsets(n: int, k: int) -> tuple[Ints, bool]:
    """Return subsets of k of n sample numbers: all of them, or up to MOST_SUBSETS random ones if there are more.

    Returns:
        (S, k) sample numbers, increasing within a subset, S <= MOST_SUBSETS; and whether these are all C(n, k) subsets.

    Raises:
        ValueError: k is not in [1, n].

    >>> draw_subsets(3, 2)[0].tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, there are {n} samples per question")
    if comb(n, k) <= MOST_SUBSETS:
        return np.array(list(combinations(range(n), k)), dtype=np.intp), True
    rng = np.random.default_rng(0)  # the same subsets for every file
    drawn: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for _ in range(4 * MOST_SUBSETS):  # some draws repeat a subset
        subset = rng.choice(n, k, replace=False).tolist()
        drawn[tuple(sorted(subset))] = None
        if len(drawn) == MOST_SUBSETS:
            break
    return np.array(list(drawn), dtype=np.intp), False


def measure_rules(
    candidates: Candidates,
    k: int,
    *,
    seed: int = 0,
) -> list[Selected]:
    """Measure every rule that chooses one of k samples, and for comparison a random sample and the oracle.

    The oracle is right if any of the k samples is. A question's accuracy is its mean over subsets; the interval is over
    questions. The ECE is computed on each subset and then averaged.

    Args:
        candidates: (Q, n), n >= k.
        k: Number of samples to choose from.
        seed: Seed of the bootstrap.

    Returns:
        One row per rule, then the random sample and the oracle. A rule is left out if no sample has its score.

    Raises:
        ValueError: k is not in [1, n].
    """
    subsets, is_exhaustive = draw_subsets(candidates.label.shape[1], k)
    parts = [candidates.at(subset) for subset in subsets]
    rows = []
    for rule in _usable_rules(candidates):
        rights = []
        eces = []
        for part in parts:
            choice = RULES[rule](part)
            right = part.right(choice.place)
            rights.append(right)
            eces.append(ece(choice.confidence, right))
        rows.append(_summarise_rule(rule, k, rights, eces, exact=is_exhaustive, seed=seed))

    rows.append(_measure_random_sample(candidates, k, seed=seed))

    any_right = [np.asarray(part.correct.any(axis=1)) for part in parts]
    rows.append(_summarise_rule(ORACLE, k, any_right, [nan], exact=is_exhaustive, seed=seed))
    return rows


def _measure_random_sample(candidates: Candidates, k: int, *, seed: int) -> Selected:
    """Measure the choice of one random sample.

    A random sample of a random subset is a random one of all n samples, so each of the n counts as a subset.
    """
    rights = list(candidates.correct.T)
    eces = []
    for confidence, right in zip(candidates.confidence.T, rights, strict=True):
        eces.append(ece(confidence, right))
    return _summarise_rule(RANDOM, k, rights, eces, exact=True, seed=seed)


def _usable_rules(candidates: Candidates) -> list[str]:
    """Return the rules whose score is known for at least one sample."""
    rules = []
    for rule in RULES:
        if rule == LIKELIEST and np.isnan(candidates.logprob).all():
            continue
        if rule in TOKENS and rule not in candidates.tokens:
            continue
        rules.append(rule)
    return rules


def _summarise_rule(
    rule: str,
    k: int,
    rights: Sequence[Bools],
    eces: Sequence[float],
    *,
    exact: bool,
    seed: int,
) -> Selected:
    """Average correctness over subsets and then over questions, and average the ECEs over subsets.

    Args:
        rule: Name of the rule.
        k: Number of samples to choose from.
        rights: For each subset, whether each question's choice is right, (Q,).
        eces: The ECE of each subset; a single nan for a rule without a confidence.
        exact: Whether these are all subsets.
        seed: Seed of the bootstrap.
    """
    right_share = np.asarray(np.mean(rights, axis=0, dtype=np.float64))
    interval = ratio_interval(right_share, np.ones_like(right_share), level=LEVEL, seed=seed)
    return Selected(
        rule,
        k,
        accuracy=float(right_share.mean()),
        low=interval.low,
        high=interval.high,
        ece=float(np.mean(eces)),
        questions=len(right_share),
        subsets=len(rights),
        exact=exact,
    )


def within_questions(candidates: Candidates, *, seed: int = 0) -> Within:
    """Return the AUROC of the confidence among samples of the same question; above a half, it helps to choose one.

    It is computed from all n samples and does not depend on k. A sample without an answer counts as wrong.

    Args:
        candidates: (Q, n).
        seed: Seed of the bootstrap.
    """
    question_of_sample = np.repeat(candidates.questions, candidates.label.shape[1]).tolist()
    return auroc_within(
        question_of_sample, candidates.confidence.ravel(), candidates.correct.ravel(), level=LEVEL, seed=seed
    )
