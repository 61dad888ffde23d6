"""Logs of lm-evaluation-harness: lines of `samples_*.jsonl`."""

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


def read_lm_eval(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """Read a line of `samples_*.jsonl`.

    The probabilities of a multiple-choice task are the softmax over the log-likelihoods of its choices. With
    `names.length_normalised`, each is first divided by the characters of its choice, as in the harness's `acc_norm`.

    Args:
        record: The line.
        names: The columns the user named.

    Returns:
        catto's own fields. The label is the number of the choice. For a generated text they are `question` and
        `correct` alone.

    Raises:
        KeyError: A field is missing.
        ValueError: A log-likelihood or the target cannot be read, or a generated text has no confidence.
    """
    question_keys = [key for key in ("doc_id", "doc_hash") if key in record]
    answer: dict[str, Any] = {"question": " ".join(str(record[key]) for key in question_keys)}
    loglikelihoods = _read_loglikelihoods(record)
    if loglikelihoods is None:
        return answer | _read_generation(record, names)

    choices = _list_choices(record, loglikelihoods)
    scores = [choice.loglikelihood for choice in choices]
    if names.length_normalised:
        scores = [choice.loglikelihood / max(len(choice.text), 1) for choice in choices]
    if len(scores) < 2:
        raise ValueError("filtered_resps: one log-likelihood, expected one for each of several choices")
    reading = read_choice(scores)

    metric = "acc_norm" if names.length_normalised else "acc"
    grade = record.get(metric)  # None for a task with other metrics
    gold = _find_gold(record, choices, best=reading.best, grade=grade)
    answer["label"] = str(reading.best)
    answer["text"] = choices[reading.best].text
    answer["confidence"] = reading.confidence
    if grade is None:
        answer["correct"] = reading.best == gold
    else:
        answer["correct"] = grade
    logprobs = {}
    for number, logprob in enumerate(reading.logprobs):
        if isfinite(logprob):
            logprobs[str(number)] = logprob
    answer["label_logprobs"] = logprobs
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
    """Read the grade of a generated text, by the first of its metrics; empty if it has none.

    Its confidence is in a column that the user named, or in `confidence`. ValueError without one.
    """
    if names.confidence == "confidence" and "confidence" not in record:
        raise ValueError("filtered_resps holds texts, no log-likelihoods: name a confidence with --confidence")
    metrics = list(record.get("metrics") or ())
    if not metrics:
        return {}
    return {"correct": record[metrics[0]]}


def _list_choices(record: Fields, loglikelihoods: Sequence[float]) -> list[_ScoredChoice]:
    """Pair the text of each choice with its log-likelihood.

    Raises:
        ValueError: A log-likelihood is above 0, or nan.
    """
    # Newer versions of the harness write objects, older ones lists.
    arguments = record["arguments"]
    if isinstance(arguments, dict):
        arguments = arguments.values()
    requests = []
    for request in arguments:
        parts = request.values() if isinstance(request, dict) else request
        requests.append(tuple(parts))
    for loglikelihood in loglikelihoods:
        if not loglikelihood <= LOGPROB_NOISE:  # NaN is not at most anything
            raise ValueError(f"filtered_resps: expected a log-likelihood of at most 0, got {loglikelihood}")

    choices = []
    choices_in_context = []
    for number, (context, continuation) in enumerate(requests):
        choice = _ScoredChoice(continuation.removeprefix(" "), loglikelihoods[number])
        choices.append(choice)
        if context:
            choices_in_context.append(choice)
    # An empty context asks for the likelihood of the choice alone, which acc_mutual_info compares with.
    return choices_in_context or choices


class ChoiceReading(NamedTuple):
    """The likeliest choice.

    Attributes:
        best: Its number; the first of equal ones.
        logprobs: Log-probability of each choice, normalised over the choices.
    """

    best: int
    logprobs: list[float]

    @property
    def confidence(self) -> float:
        """The probability of the likeliest choice among the choices."""
        return exp(self.logprobs[self.best])


def read_choice(scores: Sequence[float]) -> ChoiceReading:
    """Find the likeliest choice and its probability among the choices.

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
    """Return the number of the gold choice; None if the target matches no choice that agrees with the grade.

    A numeric target may be the text of a choice or its number. The grade tells which.

    Args:
        record: The line.
        choices: The choices.
        best: Number of the likeliest choice.
        grade: 1 if that choice is right by the harness; None if the line has no grade.

    Raises:
        ValueError: Without a grade, the target is neither a choice nor its number.
    """
    target = str(record["target"]).strip()
    candidates = [number for number, choice in enumerate(choices) if choice.text.strip() == target]
    if target.isdecimal() and int(target) < len(choices):
        candidates.append(int(target))
    if grade is None and not candidates:
        raise ValueError(f"target: expected a choice or its number, got {reprlib.repr(target)}")
    for candidate in candidates:
        agrees_with_grade = (candidate == best) == (grade == 1)
        if grade is None or agrees_with_grade:
            return candidate
    return None
