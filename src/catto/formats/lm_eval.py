"""Read the logs of lm-evaluation-harness: the lines of `samples_*.jsonl`."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from math import exp, isfinite, log
from typing import Any, NamedTuple

from catto.formats.columns import ColumnNames, Fields
from catto.records import LOGPROB_NOISE


class _ScoredChoice(NamedTuple):
    text: str
    loglikelihood: float


def is_lm_eval(record: Fields) -> bool:
    """Whether lm-evaluation-harness wrote the record."""
    return {"doc_id", "filtered_resps"} <= record.keys()


def read_lm_eval(record: Fields, names: ColumnNames, _labels: Sequence[str]) -> dict[str, Any]:
    """Read a line of `samples_*.jsonl`.

    The probabilities of a multiple-choice task are the softmax over the log-likelihoods of its choices. With
    `names.length_normalised`, each log-likelihood is first divided by the number of characters of its choice, as in
    the harness's `acc_norm`.

    Args:
        record: The line.
        names: The columns the user named.

    Returns:
        catto's own fields. The label is the index of the choice, from 0. A generated text has only `question` and
        `correct`.

    Raises:
        KeyError: A field is missing.
        ValueError: A log-likelihood or the target cannot be read, or a generated text has no confidence.
    """
    # A log of several tasks repeats the number `doc_id`, but not together with `doc_hash`.
    question_keys = [key for key in ("doc_id", "doc_hash") if key in record]
    answer: dict[str, Any] = {"question": " ".join(str(record[key]) for key in question_keys)}
    loglikelihoods = _read_loglikelihoods(record)
    if loglikelihoods is None:
        return answer | _read_generation(record, names)

    choices = _list_choices(record, loglikelihoods)
    if len(choices) < 2:
        raise ValueError(f"filtered_resps: expected log-likelihoods of several choices, got {len(choices)}")
    scores = [choice.loglikelihood for choice in choices]
    if names.length_normalised:
        scores = [choice.loglikelihood / max(len(choice.text), 1) for choice in choices]
    reading = read_choice(scores)

    metric = "acc_norm" if names.length_normalised else "acc"
    grade = record.get(metric)  # None if the task has other metrics
    gold = _find_gold(record, choices, best=reading.best, grade=grade)
    answer["label"] = str(reading.best)
    answer["text"] = choices[reading.best].text
    answer["confidence"] = reading.confidence
    if grade is None:
        answer["correct"] = reading.best == gold
    else:
        answer["correct"] = grade
    # `label_logprobs` must be finite; a choice may have probability 0.
    answer["label_logprobs"] = {
        str(number): logprob for number, logprob in enumerate(reading.logprobs) if isfinite(logprob)
    }
    if gold is not None:
        answer["gold"] = str(gold)
    return answer


def _read_loglikelihoods(record: Fields) -> list[float] | None:
    """Return the log-likelihoods of the requests; None if the task generates text instead."""
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
        ValueError: The user named no confidence, and the record has no `confidence` of its own.
    """
    if names.confidence == "confidence" and "confidence" not in record:
        raise ValueError("filtered_resps has texts instead of log-likelihoods: name a confidence with --confidence")
    metrics = list(record.get("metrics") or ())
    if not metrics:
        return {}
    return {"correct": record[metrics[0]]}


def _list_choices(record: Fields, loglikelihoods: Sequence[float]) -> list[_ScoredChoice]:
    """Pair the text of each choice with its log-likelihood.

    Raises:
        ValueError: A log-likelihood is above 0, or nan.
    """
    # Newer versions of the harness write objects; older ones write lists.
    arguments = record["arguments"]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    requests = []
    for request in arguments:
        parts = request.values() if isinstance(request, dict) else request
        requests.append(tuple(parts))
    for loglikelihood in loglikelihoods:
        if not loglikelihood <= LOGPROB_NOISE:  # True for NaN, too
            raise ValueError(f"filtered_resps: expected a log-likelihood of at most 0, got {loglikelihood}")

    choices = []
    choices_in_context = []
    for number, (context, continuation) in enumerate(requests):
        choice = _ScoredChoice(continuation.removeprefix(" "), loglikelihoods[number])
        choices.append(choice)
        if context:
            choices_in_context.append(choice)
    # A request with an empty context scores the choice alone, for the metric acc_mutual_info.
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
    """Find the likeliest choice, and normalise the probabilities over the choices.

    Args:
        scores: Log-likelihood of each choice.

    Raises:
        ValueError: No score is finite.

    >>> round(read_choice([log(0.1), log(0.3)]).confidence, 4)
    0.75
    """
    best = scores.index(max(scores))
    highest = scores[best]
    if not isfinite(highest):
        raise ValueError(f"filtered_resps: expected a finite log-likelihood, got {highest}")
    log_total = log(sum(exp(score - highest) for score in scores))
    logprobs = [min(score - highest - log_total, 0.0) for score in scores]
    return ChoiceReading(best, logprobs)


def _find_gold(record: Fields, choices: Sequence[_ScoredChoice], *, best: int, grade: object) -> int | None:
    """Return the index of the gold choice; None if the target matches no choice that agrees with the grade.

    A numeric target may be the text of a choice or its index. The grade shows which one is meant.

    Args:
        record: The line.
        choices: The choices.
        best: Index of the likeliest choice.
        grade: 1 if the harness counts that choice as right; None if the line has no grade.

    Raises:
        ValueError: The line has no grade, and the target is neither a choice nor its index.
    """
    target = str(record["target"]).strip()
    candidates = [number for number, choice in enumerate(choices) if choice.text.strip() == target]
    if target.isdecimal() and int(target) < len(choices):
        candidates.append(int(target))
    if grade is None and not candidates:
        raise ValueError(f"target: expected a choice or its number, got {reprlib.repr(target)}")
    for candidate in candidates:
        best_would_be_right = candidate == best
        agrees_with_grade = best_would_be_right == (grade == 1)
        if grade is None or agrees_with_grade:
            return candidate
    return None
