"""Read the probability of a label from the tokens of a reply that another tool logged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, inf
from typing import Any

from catto.answer.response import parse_response
from catto.formats.columns import Fields, logprob_of


def read_label_token(tokens: Sequence[Fields], labels: Sequence[str], graded_label: str | None) -> dict[str, Any]:
    """Read the probability of the answer at the token where the label begins.

    Some engines log the likeliest token even if a different one was sampled. The logged tokens may then spell a
    different label from the graded one. The probability of the graded label is then looked up in `top_logprobs`.

    Args:
        tokens: The tokens of the reply, each with `token`, `logprob` and optionally `top_logprobs`.
        labels: The labels of the question; a single label means an open answer.
        graded_label: The answer that the tool graded; None if it found no answer in the reply.

    Returns:
        `label`, `confidence` and `source`, and `label_logprobs` if every label has a log-probability. Without a graded
        label, `label` is None, the source is `fallback`, and the confidence is the probability of the whole reply.

    Raises:
        KeyError: A token has no `token` or `logprob`.
        ValueError: The logged tokens contain no label, the token at its beginning does not identify it, or the graded
            label has no log-probability at that token.
    """
    text = "".join(token["token"] for token in tokens)
    if graded_label is None:
        reply_logprob = sum(logprob_of(token["logprob"], "logprob") for token in tokens)
        return {"label": None, "confidence": exp(reply_logprob), "source": "fallback"}

    reading = parse_response(text, labels)
    if reading.span is None or reading.label is None:  # both are None if there is no label
        raise ValueError(f"logprobs: the graded answer {graded_label!r} is not found in the reply: name a --confidence")
    label_start, label_end = reading.span
    token, token_end = _find_token_at(tokens, label_start)
    is_open_answer = len(labels) == 1
    if is_open_answer and label_end > token_end:
        raise ValueError("logprobs: an open answer of several tokens has no token of its own: name a --confidence")

    logprobs = _read_top_logprobs(token)
    if graded_label == reading.label:
        # The token may contain only the first letters of the label.
        prefix = text[label_start : min(token_end, label_end)]
    else:
        prefix = graded_label  # it is looked up below, where only a token with the whole label is found
    _require_distinct_prefix(prefix, graded_label, labels=labels, candidates=logprobs)
    logprobs[reading.label] = logprob_of(token["logprob"], "logprob")  # even if the token is only its beginning
    if graded_label not in logprobs:
        problem = f"the tokens say {reading.label!r}, but the graded answer {graded_label!r} is not in top_logprobs"
        raise ValueError(f"logprobs: {problem}")

    answer = {"label": graded_label, "confidence": exp(logprobs[graded_label]), "source": reading.source}
    if logprobs.keys() >= set(labels):
        answer["label_logprobs"] = {label: logprobs[label] for label in labels}
    return answer


def _find_token_at(tokens: Sequence[Fields], position: int) -> tuple[Fields, int]:
    """Return the token that contains the character at `position`, and where the token ends; IndexError if none does."""
    end = 0
    for token in tokens:
        end += len(token["token"])
        if position < end:
            return token, end
    raise IndexError(f"the reply has no character {position}")


def _read_top_logprobs(token: Fields) -> dict[str, float]:
    """Return the log-probability of each candidate by its text; among equal texts, the likeliest counts."""
    logprobs: dict[str, float] = {}
    # Candidates are listed from the likeliest down. In reverse, the likeliest of equal texts overwrites the others.
    for candidate in reversed(token.get("top_logprobs") or ()):
        is_possible = candidate["logprob"] not in (None, -inf)
        if is_possible:
            logprobs[candidate["token"].strip()] = logprob_of(candidate["logprob"], "top_logprobs.logprob")
    return logprobs


def _require_distinct_prefix(prefix: str, label: str, *, labels: Sequence[str], candidates: Iterable[str]) -> None:
    """Raise ValueError if the token `prefix` does not show which of the labels begins there.

    For example, the token `1` may begin the label 1 or the label 10. If `10` is a candidate, however, the model would
    have begun the label 10 with that token, so `1` stands for the label 1. Case is ignored.

    Args:
        prefix: The token with which the label begins.
        label: The label.
        labels: All labels of the question.
        candidates: Texts of the tokens that the model could have chosen instead.
    """
    prefix = prefix.lower()
    longer_candidates = tuple(candidate.lower() for candidate in candidates if len(candidate) > len(prefix))
    for other in labels:
        shares_prefix = other != label and other.lower().startswith(prefix)
        has_own_candidate = other.lower().startswith(longer_candidates)
        if shares_prefix and not has_own_candidate:
            raise ValueError(f"logprobs: labels {label!r} and {other!r} begin with the same token {prefix!r}")
