"""Read the logs of lm-evaluation-harness: the lines of `samples_*.jsonl`."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from math import exp, isfinite, log
from typing import Any, NamedTuple

from catto.formats.columns import ColumnNames, Fields
from catto.records import LOGPROB_NOISE


class _ScoredChoice(NamedTuple):
    """The text of a choice, and its log-likelihood: a sum over its tokens."""

    text: str
    loglikelihood: float


def is_lm_eval(record: Fields) -> bool:
    """Whether lm-evaluation-harness wrote the record."""
    return {"doc_id", "filtered_resps"} <= record.keys()


def read_lm_eval(record: Fields, names: ColumnNames) -> dict[str, Any]:
    """Read a line of `samples_*.jsonl`: the answer to a multiple-choice question, or a generated text.

    Args:
        record: The line.
        names: The columns the user named, and whether log-likelihoods are normalised by length.

    Returns:
        catto's own fields. A generated text has only `question` and, if the line has metrics, `correct`.

    Raises:
        KeyError: A field is missing.
        ValueError: A log-likelihood or the target cannot be read, or a generated text has no confidence.
    """
    # A log of several tasks repeats the number `doc_id`, but not together with `doc_hash`.
    question_keys = [key for key in ("doc_id", "doc_hash") if key in record]
    question = {"question": " ".join(str(record[key]) for key in question_keys)}
    loglikelihoods = _read_loglikelihoods(record)
    if loglikelihoods is None:
        return question | _read_generation(record, names)
    return question | _read_multiple_choice(record, loglikelihoods, normalise_length=names.length_normalised)


def _read_multiple_choice(record: Fields, loglikelihoods: Sequence[float], *, normalise_length: bool) -> dict[str, Any]:
    """Read the answer to a multiple-choice question: its likeliest choice, with the softmax over all choices.

    Args:
        record: The line.
        loglikelihoods: Log-likelihood of each request of the line.
        normalise_length: Whether each log-likelihood is first divided by the number of characters of its choice, as in
            the harness's `acc_norm`.

    Returns:
        `label`, the index of the choice from 0, and `text`, `confidence`, `correct`, `label_logprobs` and, if it can be
        told from the target, `gold`.
    """
    choices = _list_choices(record, loglikelihoods)
    if len(choices) < 2:
        raise ValueError(f"filtered_resps: expected log-likelihoods of several choices, got {len(choices)}")
    scores = [choice.loglikelihood for choice in choices]
    if normalise_length:
        scores = [choice.loglikelihood / max(len(choice.text), 1) for choice in choices]  # a choice may be empty
    reading = read_choice(scores)

    metric = "acc_norm" if normalise_length else "acc"
    grade = record.get(metric)  # None if the task has other metrics
    gold = _find_gold(record, choices, best=reading.best, grade=grade)
    is_correct = grade
    if grade is None:
        is_correct = reading.best == gold
    answer = {
        "label": str(reading.best),
        "text": choices[reading.best].text,
        "confidence": reading.confidence,
        "correct": is_correct,
    }
    finite_logprobs = {}
    for number, logprob in enumerate(reading.logprobs):
        if isfinite(logprob):  # choices with probability 0 are left out: readers of `label_logprobs` refuse them
            finite_logprobs[str(number)] = logprob
    answer["label_logprobs"] = finite_logprobs
    if gold is not None:
        answer["gold"] = str(gold)
    return answer


def _read_loglikelihoods(record: Fields) -> list[float] | None:
    """Return the log-likelihood of each request; None if the responses are generated texts."""
    loglikelihoods = []
    try:
        for response in record["filtered_resps"]:
            if not isinstance(response, list):
                return None
            loglikelihood, _is_greedy = response
            loglikelihoods.append(float(loglikelihood))
    except (TypeError, ValueError):
        return None
    return loglikelihoods


def _read_generation(record: Fields, names: ColumnNames) -> dict[str, Any]:
    """Read the grade of a generated text from its first metric; empty if it has no metrics.

    Raises:
        ValueError: The user named no confidence column, and the record has no field `confidence`.
    """
    if names.has_default_confidence and "confidence" not in record:
        raise ValueError("filtered_resps has texts instead of log-likelihoods: name a confidence with --confidence")
    metrics = list(record.get("metrics") or ())
    if not metrics:
        return {}
    return {"correct": record[metrics[0]]}


def _list_choices(record: Fields, loglikelihoods: Sequence[float]) -> list[_ScoredChoice]:
    """Pair the text of each choice with its log-likelihood.

    For the metric acc_mutual_info, the harness also scores every choice alone, without the question. These requests
    have an empty context and are left out, unless all contexts are empty.

    Args:
        record: The line. Its field `arguments` has the requests, each a context and a choice.
        loglikelihoods: Log-likelihood of each request.

    Raises:
        IndexError: There are fewer log-likelihoods than requests.
        ValueError: A log-likelihood is above 0 or nan, or a request does not have two parts.
    """
    # Newer versions of the harness write the list of requests and each request as an object, older ones as a list.
    arguments = record["arguments"]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    requests = []
    for request in arguments:
        context_and_choice = request.values() if isinstance(request, dict) else request
        requests.append(tuple(context_and_choice))
    for loglikelihood in loglikelihoods:
        if not loglikelihood <= LOGPROB_NOISE:  # unlike `loglikelihood > LOGPROB_NOISE`, also true for NaN
            raise ValueError(f"filtered_resps: expected a log-likelihood of at most 0, got {loglikelihood}")

    choices = []
    choices_in_context = []
    for number, (context, choice_text) in enumerate(requests):
        choice = _ScoredChoice(choice_text.removeprefix(" "), loglikelihoods[number])
        choices.append(choice)
        if context:
            choices_in_context.append(choice)
    return choices_in_context or choices


class ChoiceReading(NamedTuple):
    """The likeliest choice and the probabilities of all choices.

    Attributes:
        best: Index of the likeliest choice; in a tie, of the first one.
        logprobs: Log-probability of each choice, normalised over the choices.
    """

    best: int
    logprobs: list[float]

    @property
    def confidence(self) -> float:
        """Probability of the likeliest choice, normalised over the choices."""
        return exp(self.logprobs[self.best])


def read_choice(scores: Sequence[float]) -> ChoiceReading:
    """Find the likeliest choice, and normalise the probabilities over the choices: a softmax of the scores.

    Args:
        scores: Log-likelihood of each choice, at least one; minus infinity for a probability of 0.

    Returns:
        The likeliest choice, in a tie the first one, and the normalised log-probability of each choice, at most 0.

    Raises:
        ValueError: The highest score is not finite.

    >>> round(read_choice([log(0.1), log(0.3)]).confidence, 4)
    0.75
    """
    best = scores.index(max(scores))
    highest = scores[best]
    if not isfinite(highest):
        raise ValueError(f"filtered_resps: expected a finite log-likelihood, got {highest}")
    # Subtracting the highest score first keeps `exp` from underflowing to 0 for all choices.
    log_total = log(sum(exp(score - highest) for score in scores))
    logprobs = [min(score - highest - log_total, 0.0) for score in scores]  # rounding may lead to values above 0
    return ChoiceReading(best, logprobs)


def _find_gold(record: Fields, choices: Sequence[_ScoredChoice], *, best: int, grade: object) -> int | None:
    """Find the gold choice of the field `target`, which is the text of a choice or its index.

    Both may be possible: with the choices 1 and 0, the target 0 is the text of the second choice and the index of the
    first one. The grade shows which is meant. If it is 1, the gold choice is the likeliest one, otherwise it is not.

    Args:
        record: The line.
        choices: The choices.
        best: Index of the likeliest choice.
        grade: 1 if the harness counts that choice as right; None if the line has no grade. Without a grade, a target
            counts as a text if it can be both.

    Returns:
        The index of the gold choice; None if the line has a grade, and no choice fits both the target and the grade.

    Raises:
        ValueError: The line has no grade, and the target is neither a choice nor its index.
    """
    target = str(record["target"]).strip()
    candidates = [number for number, choice in enumerate(choices) if choice.text.strip() == target]
    if target.isdecimal() and int(target) < len(choices):
        candidates.append(int(target))
    if grade is None:
        if not candidates:
            raise ValueError(f"target: expected a choice or its number, got {reprlib.repr(target)}")
        return candidates[0]
    is_best_right = grade == 1
    for candidate in candidates:
        if (candidate == best) == is_best_right:
            return candidate
    return None
