"""CommonsenseQA: the hub's rows (`choices` as two lists) or the release's (`question.stem`)."""

from __future__ import annotations

from collections.abc import Sequence

from catto.tasks.rows import Cut, Raw, Row, RowError, Task, lookup, position, text, texts

LABELS = ("A", "B", "C", "D", "E")


def parse(raw: Raw) -> Row:
    """Turn a row of either schema into a neutral one. Some rows repeat an option text, so the gold is an index."""
    release = isinstance(raw.get("question"), dict)
    labels, options = _release(raw) if release else (texts(raw, "choices.label"), texts(raw, "choices.text"))
    if tuple(labels) != LABELS or len(options) != len(LABELS):
        raise RowError(f"choices: expected the labels {', '.join(LABELS)}, got {', '.join(labels)}")
    question = text(raw, "question.stem" if release else "question")
    return Row({"question": question}, tuple(options), position(raw, "answerKey", LABELS), text(raw, "id"))


def _release(raw: Raw) -> tuple[Sequence[str], Sequence[str]]:
    choices = lookup(raw, "question.choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise RowError("question.choices: expected a list of objects")
    return [text(choice, "label") for choice in choices], [text(choice, "text") for choice in choices]


TASK = Task(
    name="commonsense_qa",
    labels=LABELS,
    licence="MIT",
    source="Talmor et al. 2019, CommonsenseQA, random split",
    parse=parse,
    hub="tau/commonsense_qa",
    revision="94630fe30dad47192a8546eb75f094926d47e155",
    hub_splits={"train": "train", "validation": "validation"},
    patterns={"train": ("data/train*",), "validation": ("data/validation*",)},
    cut=Cut("validation", {"validation": 0.5}, rest="test"),
)
