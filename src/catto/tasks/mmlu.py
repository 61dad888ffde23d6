"""MMLU: the hub's rows (`choices`, `answer` as a number) or the release's headerless CSV."""

from __future__ import annotations

from catto.tasks.rows import Raw, Row, RowError, Task, position, text, texts

LABELS = ("A", "B", "C", "D")


def parse(raw: Raw) -> Row:
    """Turn a row of either schema into a neutral one; MMLU has no ids and repeats rows."""
    options = texts(raw, "choices") if "choices" in raw else tuple(text(raw, label) for label in LABELS)
    if len(options) != len(LABELS):
        raise RowError(f"choices: expected {len(LABELS)}, got {len(options)}")
    numbers = isinstance(raw.get("answer"), int)
    gold = position(raw, "answer", range(len(LABELS)) if numbers else LABELS)
    return Row({"question": text(raw, "question")}, options, gold)


TASK = Task(
    name="mmlu",
    labels=LABELS,
    licence="MIT",
    source="Hendrycks et al. 2021, Measuring Massive Multitask Language Understanding",
    parse=parse,
    hub="cais/mmlu",
    config="all",
    revision="c30699e8356da336a370243923dbaf21066bb9fe",
    hub_splits={"train": "auxiliary_train", "validation": "validation", "test": "test"},
    patterns={
        "train": ("auxiliary_train/*", "all/auxiliary_train*"),
        "validation": ("val/*_val.csv", "all/validation*"),
        "test": ("test/*_test.csv", "all/test*"),
    },
    columns=("question", *LABELS, "answer"),
)
