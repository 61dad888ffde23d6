"""Chat completions as OpenAI's API returns them, alone or as the responses of a batch."""

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
    """Whether the record holds a chat completion."""
    return "choices" in _find_completion(record)


def read_completion(record: Fields, names: ColumnNames, labels: Sequence[str]) -> dict[str, Any]:
    """A chat completion with `logprobs`, alone or as the response of a batch: the probability of the label's token."""
    answered = record["response"] if isinstance(record.get("response"), dict) else {}
    if record.get("error") or answered.get("status_code", 200) != 200:
        raise ValueError(f"the request failed ({reprlib.repr(record.get('error') or answered)}): leave this row out")
    reply, *others = _find_completion(record)["choices"]
    if others:
        raise ValueError(f"choices: expected one, got {1 + len(others)}: write a record for each")
    name = next((name for name in ("custom_id", "question", "id") if name in record), None)
    answer = {} if name is None else {"question": str(record[name])}
    if not labels:
        raise ValueError("the right answer is not in a completion: name its field with --gold")
    answer[names.gold or "gold"] = text_of(names.gold or "gold", record)
    tokens = (reply.get("logprobs") or {}).get("content")
    if not tokens:
        raise ValueError("choices.0.logprobs.content: expected tokens with log-probabilities, got none")
    text = reply["message"].get("content") or ""
    # A reply of one token ends at its limit, and is whole if it is a label.
    cut = reply.get("finish_reason") == "length" and text.strip(" \n().") not in labels
    return answer | read_label_token(tokens, labels, parse_response(text, labels, cut=cut).label)


def _find_completion(record: Fields) -> Fields:
    """Find the completion in a record: itself, or below `response`, of a batch also below its `body`."""
    for name in ("response", "body"):
        record = record[name] if isinstance(record.get(name), dict) else record
    choices = record.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return record if isinstance(first, dict) and "message" in first else {}


def list_labels(path: Path, rows: list[tuple[int, dict[str, Any]]], gold: str) -> list[str]:
    """Return the labels that occur as right answers; of letters, those before them too."""
    labels = set()
    for row, record in rows:
        with data_errors_at(path, row):
            labels.add(text_of(gold, record))
    if all(len(label) == 1 and "A" <= label <= "Z" for label in labels):
        return [chr(code) for code in range(ord("A"), ord(max(labels)) + 1)]
    return sorted(labels)
