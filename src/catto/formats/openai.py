"""Read chat completions of OpenAI's API, alone or as the responses of a batch."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from catto.answer.response import parse_response
from catto.errors import data_errors_at
from catto.formats.columns import ColumnNames, Fields, text_of
from catto.formats.token_labels import read_label_token


def is_completion(record: Fields) -> bool:
    """Whether the record contains a chat completion."""
    return "choices" in _find_completion(record)


def read_completion(record: Fields, names: ColumnNames, labels: Sequence[str] = ()) -> dict[str, Any]:
    """Read the answer of a chat completion and its probability from `logprobs`.

    Args:
        record: The completion, alone or as the response of a batch.
        names: The columns the user named. `gold` must be one of them.
        labels: The labels of the questions, as `list_labels` returns them. They are required if `gold` is named.

    Returns:
        `question` if the record has an id, the right answer in the field `names.gold`, and `label`, `confidence`,
        `source` and, if known, `label_logprobs`.

    Raises:
        KeyError: A field is missing.
        ValueError: The request failed, the user named no `gold`, or there is no single choice with log-probabilities.
    """
    _require_success(record)
    reply, *others = _find_completion(record)["choices"]
    if others:
        raise ValueError(f"choices: expected one, got {1 + len(others)}; write one record per choice")
    if names.gold is None:
        raise ValueError("a completion does not contain the right answer: name its field with --gold")
    answer = _read_question(record)
    answer[names.gold] = text_of(names.gold, record)
    logprobs = reply.get("logprobs") or {}
    tokens = logprobs.get("content")
    if not tokens:
        raise ValueError("choices.0.logprobs.content: expected tokens with log-probabilities, got none")
    text = reply["message"].get("content") or ""
    # With a limit of one token, even a complete reply such as `B` or `(B)` reaches it, and is not cut.
    is_only_label = text.strip(" \n().") in labels
    reached_limit = reply.get("finish_reason") == "length"
    is_cut = reached_limit and not is_only_label
    graded_label = parse_response(text, labels, cut=is_cut).label
    return answer | read_label_token(tokens, labels, graded_label)


def _read_question(record: Fields) -> dict[str, Any]:
    """Return the id of the record as `question`; empty if it has none."""
    for name in ("custom_id", "question", "id"):
        if name in record:
            return {"question": str(record[name])}
    return {}


def _require_success(record: Fields) -> None:
    """Raise ValueError if the request of a batch failed."""
    response = record.get("response")
    if not isinstance(response, dict):
        response = {}
    error = record.get("error")
    if error or response.get("status_code", 200) != 200:
        raise ValueError(f"the request failed ({reprlib.repr(error or response)}): leave this row out")


def _find_completion(record: Fields) -> Fields:
    """Return the chat completion of a record; empty if it has none.

    In the output of a batch, the completion is nested as `response.body`.
    """
    for name in ("response", "body"):
        if isinstance(record.get(name), dict):
            record = record[name]
    choices = record.get("choices")
    if not isinstance(choices, list) or not choices:
        return {}
    first = choices[0]
    if not isinstance(first, dict) or "message" not in first:
        return {}
    return record


def list_labels(path: Path, rows: list[tuple[int, dict[str, Any]]], gold: str) -> list[str]:
    """List the labels that occur as right answers; if they are all letters, list all letters from A to the last one.

    A letter may be an option of every question without being the right answer to any.

    Args:
        path: The file, for error messages.
        rows: Pairs of row number and record; at least one.
        gold: The field with the right answer.

    Returns:
        The labels in alphabetical order.

    Raises:
        DataError: A row has no such field, or the field is empty.
    """
    labels = set()
    for row, record in rows:
        with data_errors_at(path, row):
            labels.add(text_of(gold, record))
    are_letters = all(len(label) == 1 and "A" <= label <= "Z" for label in labels)
    if not are_letters:
        return sorted(labels)
    last_letter = max(labels)
    codes = range(ord("A"), ord(last_letter) + 1)
    return [chr(code) for code in codes]
