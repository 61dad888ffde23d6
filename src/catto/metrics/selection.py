"""Confidence@k: choose one of k sampled answers, by confidence and by competing rules.

The n samples of a question are numbered from 0. Each rule is measured on all C(n, k) subsets of k sample numbers. If
there are more than `MAX_SUBSETS`, random ones are drawn with a fixed seed. All questions use the same subsets. Ties go
to the answer that was sampled first.

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

# Maximum number of subsets on which a rule is measured.
MAX_SUBSETS = 2000
# Level of the intervals.
LEVEL = 0.95
# Sums of votes that differ by at most this count as equal, because the order of addition may change the last bits.
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
# Rules that rank samples by a score of their tokens -> the field of a prediction with this score. It is missing if the
# engine does not return the most probable tokens at each position.
TOKEN_SCORES = {"self-certainty": "self_certainty", "lowest-group confidence": "lowest_group"}
# Number of tokens in a group; a shorter response is one group.
TOKENS_PER_GROUP = 128


@dataclass(frozen=True)
class Candidates:
    """n samples of each of Q questions.

    Attributes:
        questions: Q question ids.
        label: (Q, n) labels or normalised answers, coded as whole numbers: equal numbers are equal answers. -1 is a
            sample without an answer.
        confidence: (Q, n) in [0, 1].
        logprob: (Q, n) mean log-probability of a sample's tokens, nan if unknown.
        correct: (Q, n) whether a sample is right.
        tokens: Name of a rule in TOKEN_SCORES -> its score of each sample, (Q, n), nan if unknown. The rule chooses the
            sample with the highest score.
    """

    questions: tuple[str, ...]
    label: Ints
    confidence: Floats
    logprob: Floats
    correct: Bools
    tokens: Mapping[str, Floats] = field(default_factory=dict)

    def at(self, subset: Ints) -> Candidates:
        """Return k of the samples of every question, those with the sample numbers in `subset`, (k,)."""
        return Candidates(
            self.questions,
            label=self.label[:, subset],
            confidence=self.confidence[:, subset],
            logprob=self.logprob[:, subset],
            correct=self.correct[:, subset],
            tokens={rule: column[:, subset] for rule, column in self.tokens.items()},
        )

    def right(self, place: Ints) -> Bools:
        """Return whether the sample with the number `place`, one number per question, is right. (Q,) -> (Q,)."""
        return self.correct[np.arange(len(place)), place]


@dataclass(frozen=True)
class Selected:
    """How often a rule chooses a right answer among k samples, and how well its confidence is calibrated.

    Attributes:
        rule: Name of the rule.
        k: Number of samples to choose from.
        accuracy: Mean over questions and subsets, in [0, 1].
        low: Lower end of the bootstrap interval of the accuracy over questions.
        high: Upper end of this interval.
        ece: ECE of its confidence with 20 bins, averaged over the subsets, in [0, 1]; nan for the oracle.
        questions: Number of questions.
        subsets: Number of subsets.
        exact: Whether these are all subsets of k samples.
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
    """Return a response's self-certainty, and the certainty of its least certain group of consecutive tokens.

    The engine returns the most probable tokens at each position, called its candidates. The certainty of a position is
    minus the mean log-probability of its candidates. It is high if the model concentrates its probability on few of
    them. More candidates include less probable ones and raise it, so it is comparable only among responses with equally
    many candidates.

    The mean over all positions is the self-certainty of Kang et al. (2025), with the candidates in place of all V
    tokens of the vocabulary, and without its constant term -log V. The lowest mean over TOKENS_PER_GROUP consecutive
    positions is DeepConf's lowest-group confidence (Fu et al., 2025).

    Args:
        tops: For each position, a pair as in `Generation.tops`: the generated token, which is not used, and its
            candidates, text -> log-probability. At least one position.

    Returns:
        The self-certainty and the lowest-group confidence. For a response of at most TOKENS_PER_GROUP tokens, both are
        the mean over all positions.

    >>> token_certainty([("a", {"a": -0.5, "b": -1.5}), ("c", {"c": -0.25, "d": -3.75})])
    (1.5, 1.5)
    """
    certainties = []
    for _token, candidates in tops:
        mean_logprob = sum(candidates.values()) / len(candidates)
        certainties.append(-mean_logprob)
    certainty = np.array(certainties)
    group_size = min(TOKENS_PER_GROUP, len(certainty))
    equal_weights = np.full(group_size, 1.0 / group_size)
    group_means = np.convolve(certainty, equal_weights, "valid")  # the moving average over whole groups
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
    first_samples = questions[0]
    for samples in questions:
        name = samples[0].question
        if len(samples) != len(first_samples):
            first_name = first_samples[0].question
            raise ValueError(f"question {name} has {len(samples)} samples, {first_name} has {len(first_samples)}")
        sample_numbers = {prediction.sample for prediction in samples}
        if len(sample_numbers) < len(samples):
            raise ValueError(f"question {name} has a sample twice")
        golds = {prediction.gold for prediction in samples}
        if len(golds) > 1:
            raise ValueError(f"question {name} has two gold labels")
    return questions


def gather_candidates(predictions: Sequence[Prediction], tau: float | None = None) -> Candidates:
    """Arrange predictions in arrays with one row per question and one column per sample.

    Args:
        predictions: Equally many samples of every question, in any order. The temperature at which they were sampled
            does not matter.
        tau: Temperature at which the confidence of each sample is computed, see `confidence_at`. None keeps the
            `confidence` of the prediction.

    Returns:
        The arrays, (Q, n) each. `tokens` has the scores that an engine computes from the probabilities of a response's
            tokens; one that no sample has is left out.

    Raises:
        ValueError: There are no predictions, questions differ in the number of their samples, a question repeats a
            sample number or has two gold labels, or the confidence of a prediction at tau is unknown.
    """
    questions = samples_by_question(predictions)
    shape = (len(questions), len(questions[0]))
    label = np.empty(shape, dtype=np.intp)
    confidence = np.empty(shape)
    logprob = np.full(shape, np.nan)
    correct = np.empty(shape, dtype=np.bool_)
    tokens = {rule: np.empty(shape) for rule in TOKEN_SCORES}
    # Labels are coded from 0 in order of appearance; a missing label has the code -1.
    code_of: dict[str | None, int] = {None: -1}
    for question_index, samples in enumerate(questions):
        for sample_index, prediction in enumerate(samples):
            cell = (question_index, sample_index)
            next_code = len(code_of) - 1  # the entry of a missing label is not counted
            label[cell] = code_of.setdefault(prediction.choice, next_code)
            confidence[cell] = prediction.confidence if tau is None else confidence_at(prediction, tau)
            if prediction.mean_logprob is not None:
                logprob[cell] = prediction.mean_logprob
            correct[cell] = prediction.is_correct
            for rule, field_name in TOKEN_SCORES.items():
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
    """The sampling temperature that was chosen, and what was measured at every temperature that was tried.

    Attributes:
        temperature: The chosen sampling temperature.
        tau: Temperature of the confidence by which the most confident sample was chosen.
        k: Number of samples of each question.
        questions: Number of questions.
        accuracy: Sampling temperature as text -> accuracy of the most confident of k samples.
        fallback_rate: Sampling temperature as text -> share of forced answers among all samples.
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
        predictions: Samples at one or more sampling temperatures: at each of them, k samples of the same questions.
        tau: Temperature at which the confidence of each sample is computed, see `confidence_at`. It does not depend on
            the sampling temperature.

    Returns:
        The best sampling temperature, in a tie the lowest one, and what was measured at every temperature.

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
    accuracy: dict[str, float] = {}  # the keys are texts, because the result is stored as JSON
    fallback_rate: dict[str, float] = {}
    for temperature in temperatures:
        samples = samples_at[temperature]
        candidates = gather_candidates(samples, tau)
        candidates_at[temperature] = candidates
        choice = RULES[MOST_CONFIDENT](candidates)
        is_right = candidates.right(choice.place)
        accuracy[str(temperature)] = float(is_right.mean())
        fallback_rate[str(temperature)] = fmean(prediction.is_forced for prediction in samples)

    # The lowest temperature comes first, and `max` returns the first of equals.
    best = max(temperatures, key=lambda temperature: accuracy[str(temperature)])
    questions, k = candidates_at[best].label.shape
    return Sampling(best, tau, k, questions, accuracy, fallback_rate)


# ---- rules


class ChosenSamples(NamedTuple):
    """The chosen sample of every question.

    Attributes:
        place: (Q,) index of the chosen sample, from 0 to k - 1.
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
    if rule not in candidates.tokens:  # `gather_candidates` leaves out a score that no sample has
        raise ValueError(f"{rule} needs the candidates of every token, which only servers give")
    return _pick_highest(candidates, candidates.tokens[rule])


def _compare_labels(candidates: Candidates) -> Bools:
    """Return at [q, i, j] whether samples i and j of question q have the same label. (Q, k) -> (Q, k, k).

    A sample without a label equals no sample, not even itself.
    """
    is_equal = candidates.label[:, :, None] == candidates.label[:, None, :]
    has_label = candidates.label >= 0
    return np.asarray(is_equal & has_label[:, None, :])


class _Support(NamedTuple):
    """The votes for each label.

    Attributes:
        votes_for_label: (Q, k) total weight of the votes for the label of each sample; -1 for a sample without a label.
        winner: (Q,) index of the first sample with the winning label.
    """

    votes_for_label: Floats
    winner: Ints


def _sum_votes(candidates: Candidates, weight: Floats) -> _Support:
    """Add up the votes for each label; in a tie, the label that was sampled first wins.

    Args:
        candidates: The samples, (Q, k).
        weight: (Q, k), the weight of each sample's vote.

    Returns:
        The votes, and the winner. Sums that differ by at most ROUNDING count as a tie. If no sample has a label, the
        winner is sample 0.
    """
    has_same_label = _compare_labels(candidates)
    votes = (has_same_label * weight[:, None, :]).sum(axis=2)
    # -1 is below the votes for any label, so that a sample without a label cannot win.
    votes_for_label = np.where(candidates.label >= 0, votes, -1.0)
    most_votes = votes_for_label.max(axis=1, keepdims=True)
    has_most_votes = votes_for_label >= most_votes - ROUNDING
    return _Support(votes_for_label, winner=has_most_votes.argmax(axis=1))


def _pick_by_vote(candidates: Candidates, rule: str) -> ChosenSamples:
    """Choose the label with most votes; the confidence is its share of the total weight.

    The confidence is 0 if no sample has a label or all weights are 0.
    """
    weight = VOTES[rule](candidates)
    support = _sum_votes(candidates, weight)
    winning_votes = support.votes_for_label[np.arange(len(weight)), support.winner]
    total = weight.sum(axis=1)
    share = np.divide(winning_votes, total, out=np.zeros(len(total)), where=total > 0)
    return ChosenSamples(support.winner, np.clip(share, 0.0, 1.0))  # without a label, the votes are -1


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
    **{rule: partial(_pick_by_tokens, rule=rule) for rule in TOKEN_SCORES},
}


# ---- adaptive k


def samples_still_needed(
    candidates: Candidates,
    rule: str,
    k: int,
    stop: float = 1.0,
) -> Ints:
    """Return the smallest number of further samples after which the choice may be settled; 0 if it already is.

    m of up to k samples have been taken. A vote is settled when the remaining samples cannot change it: the winner's
    lead over every other label exceeds the number of remaining samples, or equals it if the winner was sampled first.
    The most confident sample is settled when its confidence reaches `stop`. Other rules need all k samples.

    Args:
        candidates: The samples so far, (Q, m); m may be 0.
        rule: A name of RULES.
        k: Maximum number of samples per question.
        stop: Confidence in [0, 1] at which the most confident sample is settled. Other rules ignore it.

    Returns:
        (Q,) whole numbers from 0 to k - m.
    """
    questions, taken = candidates.label.shape
    remaining = k - taken
    if rule == MOST_CONFIDENT:
        highest = candidates.confidence.max(axis=1, initial=-1.0)  # -1 without samples: below every `stop`
        one_more = min(remaining, 1)
        return np.where(highest >= stop, 0, one_more)
    if rule not in VOTES:
        return np.full(questions, remaining)
    if taken == 0:
        # If the first half of the k samples agrees, other labels can at most tie, and the first label wins ties.
        half_rounded_up = (k + 1) // 2
        return np.full(questions, half_rounded_up)
    return _votes_still_needed(candidates, VOTES[rule](candidates), remaining)


def _votes_still_needed(
    candidates: Candidates,
    weight: Floats,
    remaining: int,
) -> Ints:
    """Return the smallest number of further votes after which a vote may be settled; 0 if it already is.

    This many are enough if all further votes are for the present winner. The votes that are then left must not suffice
    for any rival, which is a different label, whether or not it has been sampled yet. Every further vote counts 1, the
    maximum.

    Args:
        candidates: The samples so far, (Q, m), m >= 1.
        weight: (Q, m), the weight of each sample's vote.
        remaining: Number of samples that are left.

    Returns:
        (Q,) whole numbers from 0 to `remaining`.
    """
    support = _sum_votes(candidates, weight)
    winner = support.winner[:, None]
    winning_label = np.take_along_axis(candidates.label, winner, axis=1)
    is_for_rival = (candidates.label != winning_label) & (candidates.label >= 0)
    # Each sample stands for one rival: its own label or, for a sample of the winner or without a label, a label that
    # has not been sampled yet and has no votes.
    rival_votes = np.where(is_for_rival, support.votes_for_label, 0.0)
    winning_votes = support.votes_for_label.max(axis=1, keepdims=True).clip(min=0.0)  # -1 if no sample has a label
    lead = winning_votes - rival_votes
    first_of_label = _compare_labels(candidates).argmax(axis=2)
    rival_wins_ties = is_for_rival & (first_of_label < winner)
    # After b more votes for the winner, it leads by lead + b, and remaining - b votes are left. If the rival wins ties,
    # the lead must exceed these votes: b > (remaining - lead) / 2. Otherwise, b >= (remaining - lead) / 2 is enough.
    exceeds_already = lead > remaining + ROUNDING
    votes_to_exceed = np.where(exceeds_already, 0.0, np.floor((remaining - lead + ROUNDING) / 2) + 1)
    votes_to_reach = np.maximum(0.0, np.ceil((remaining - lead - ROUNDING) / 2))
    needed = np.where(rival_wins_ties, votes_to_exceed, votes_to_reach).max(axis=1)
    return np.asarray(np.minimum(needed, remaining), dtype=np.intp)


def choose_adaptively(
    candidates: Candidates,
    rule: str,
    stop: float | None = 1.0,
) -> tuple[ChosenSamples, Ints]:
    """Choose one of up to k samples, which are taken one after another until the choice is settled.

    At least one sample is taken. `samples_still_needed` defines when a choice is settled.

    Args:
        candidates: All samples, (Q, k), in the order in which they are taken.
        rule: A name of RULES.
        stop: Confidence in [0, 1] at which the most confident sample is settled; votes ignore it. None takes all k
            samples, whatever the rule.

    Returns:
        The choice, and how many samples were taken, (Q,).
    """
    k = candidates.label.shape[1]
    choice = RULES[rule](candidates)
    taken = np.full(len(candidates.questions), k)
    if stop is None:
        return choice, taken
    # Counts decrease, so that for each question, the smallest count at which it is settled overwrites larger ones.
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
    """Choose the confidence at which sampling may stop with as many right answers as with all k samples.

    The rule is the most confident sample. The confidences of STOPS are tried from 1 downwards, until one gives fewer
    right answers than all k samples. The one before it is returned.

    Args:
        candidates: The samples of validation questions, (Q, k).

    Returns:
        A confidence in [0, 1].
    """
    choice_of_all = RULES[MOST_CONFIDENT](candidates)
    right_with_all = candidates.right(choice_of_all.place).sum()
    lowest_stop = 1.0
    for stop in reversed(STOPS):
        choice, _taken = choose_adaptively(candidates, MOST_CONFIDENT, stop)
        right_with_stop = candidates.right(choice.place).sum()
        if right_with_stop < right_with_all:
            break
        lowest_stop = stop
    return lowest_stop


# ---- Confidence@k


def draw_subsets(n: int, k: int) -> tuple[Ints, bool]:
    """Return the subsets with k of the numbers 0 to n - 1: all, or up to MAX_SUBSETS random ones if there are more.

    Args:
        n: Number of samples per question.
        k: Number of samples in a subset.

    Returns:
        The S <= MAX_SUBSETS different subsets, (S, k), with increasing numbers in each; and whether these are all of
        the C(n, k) subsets. Random subsets are the same in every call.

    Raises:
        ValueError: k is not in [1, n].

    >>> draw_subsets(3, 2)[0].tolist()
    [[0, 1], [0, 2], [1, 2]]
    """
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, there are {n} samples per question")
    if comb(n, k) <= MAX_SUBSETS:
        return np.array(list(combinations(range(n), k)), dtype=np.intp), True
    rng = np.random.default_rng(0)
    drawn: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    # Draws may repeat a subset. If there are hardly more than MAX_SUBSETS, new subsets become rare, so the number of
    # draws is limited: of the C(14, 5) = 2002 subsets, these draws find 1964.
    max_draws = 4 * MAX_SUBSETS
    for _ in range(max_draws):
        subset = rng.choice(n, k, replace=False).tolist()
        drawn[tuple(sorted(subset))] = None
        if len(drawn) == MAX_SUBSETS:
            break
    return np.array(list(drawn), dtype=np.intp), False


def measure_rules(
    candidates: Candidates,
    k: int,
    *,
    seed: int = 0,
) -> list[Selected]:
    """Measure every rule that chooses one of k samples, and for comparison a random sample and the oracle.

    Each rule chooses a sample from every subset of k samples, see `draw_subsets`. The oracle is right if any of the k
    samples is. A question's accuracy is its mean over subsets; the interval is over questions. The ECE is computed on
    each subset and then averaged.

    Args:
        candidates: The samples, (Q, n), n >= k.
        k: Number of samples to choose from.
        seed: Seed of the bootstrap.

    Returns:
        The result of each rule, then of the random sample and of the oracle. A rule is left out if no sample has its
        score.

    Raises:
        ValueError: k is not in [1, n].
    """
    subsets, is_exhaustive = draw_subsets(candidates.label.shape[1], k)
    candidates_of_subsets = [candidates.at(subset) for subset in subsets]
    results = []
    for rule in _usable_rules(candidates):
        right_by_subset = []
        eces = []
        for samples in candidates_of_subsets:
            choice = RULES[rule](samples)
            is_right = samples.right(choice.place)
            right_by_subset.append(is_right)
            eces.append(ece(choice.confidence, is_right))
        results.append(_summarise_rule(rule, k, right_by_subset, eces, exact=is_exhaustive, seed=seed))

    results.append(_measure_random_sample(candidates, k, seed=seed))

    any_is_right = [np.asarray(samples.correct.any(axis=1)) for samples in candidates_of_subsets]
    no_confidence = [nan]  # the oracle has no confidence, so its ECE is undefined
    results.append(_summarise_rule(ORACLE, k, any_is_right, no_confidence, exact=is_exhaustive, seed=seed))
    return results


def _measure_random_sample(candidates: Candidates, k: int, *, seed: int) -> Selected:
    """Measure the choice of one random sample.

    A random sample of a random subset is a random one of all n samples. Therefore, n subsets of one sample each are
    used instead of subsets of k samples.
    """
    right_by_sample = list(candidates.correct.T)
    eces = []
    for confidence, is_right in zip(candidates.confidence.T, right_by_sample, strict=True):
        eces.append(ece(confidence, is_right))
    return _summarise_rule(RANDOM, k, right_by_sample, eces, exact=True, seed=seed)


def _usable_rules(candidates: Candidates) -> list[str]:
    """Return the rules whose score is known for at least one sample."""
    rules = []
    for rule in RULES:
        if rule == LIKELIEST and np.isnan(candidates.logprob).all():
            continue
        if rule in TOKEN_SCORES and rule not in candidates.tokens:
            continue
        rules.append(rule)
    return rules


def _summarise_rule(
    rule: str,
    k: int,
    right_by_subset: Sequence[Bools],
    eces: Sequence[float],
    *,
    exact: bool,
    seed: int,
) -> Selected:
    """Average correctness over subsets and then over questions, and average the ECEs over subsets.

    Args:
        rule: Name of the rule.
        k: Number of samples to choose from.
        right_by_subset: For each subset, whether each question's choice is right, (Q,).
        eces: The ECE of each subset; a single nan for a rule without a confidence.
        exact: Whether these are all subsets.
        seed: Seed of the bootstrap.
    """
    right_share = np.asarray(np.mean(right_by_subset, axis=0, dtype=np.float64))  # of each question, (Q,)
    ones = np.ones_like(right_share)  # the mean over questions is a ratio with these denominators
    interval = ratio_interval(right_share, ones, level=LEVEL, seed=seed)
    return Selected(
        rule,
        k,
        accuracy=float(right_share.mean()),
        low=interval.low,
        high=interval.high,
        ece=float(np.mean(eces)),
        questions=len(right_share),
        subsets=len(right_by_subset),
        exact=exact,
    )


def within_questions(candidates: Candidates, *, seed: int = 0) -> Within:
    """Return the AUROC of the confidence among samples of the same question.

    Choosing the most confident sample helps only if it is above a half. It is computed from all n samples and does not
    depend on k. A sample without an answer counts as wrong.

    Args:
        candidates: The samples, (Q, n).
        seed: Seed of the bootstrap.

    Returns:
        The AUROC with its interval over questions.
    """
    question_of_sample = np.repeat(candidates.questions, candidates.label.shape[1]).tolist()
    return auroc_within(
        question_of_sample, candidates.confidence.ravel(), candidates.correct.ravel(), level=LEVEL, seed=seed
    )
