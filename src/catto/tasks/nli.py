"""SNLI and ANLI: premise, hypothesis and one of three label words, listed in an order of the question's own."""

from __future__ import annotations

from catto.tasks.rows import Raw, Row, Task, position, text

LABELS = ("entailment", "neutral", "contradiction")
_CODES = (0, 1, 2)


def parse_snli(raw: Raw) -> Row | str:
    """Turn a row of the hub or of the release into a neutral one; without consensus there is no gold label."""
    if "gold_label" not in raw:
        if raw.get("label") == -1:
            return "no_gold_label"
        premise, hypothesis = text(raw, "premise"), text(raw, "hypothesis")
        return _row(premise, hypothesis, position(raw, "label", _CODES), None, premise)
    if raw["gold_label"] == "-":
        return "no_gold_label"
    gold = position(raw, "gold_label", LABELS)
    return _row(text(raw, "sentence1"), text(raw, "sentence2"), gold, text(raw, "pairID"), text(raw, "captionID"))


def parse_anli(raw: Raw) -> Row:
    """Turn a row of the hub (`premise`, 0/1/2) or of the release (`context`, e/n/c) into a neutral one."""
    premise = text(raw, "context" if "context" in raw else "premise")
    gold = position(raw, "label", ("e", "n", "c") if isinstance(raw.get("label"), str) else _CODES)
    return _row(premise, text(raw, "hypothesis"), gold, text(raw, "uid"), premise)


def _row(premise: str, hypothesis: str, gold: int, key: str | None, group: str) -> Row:
    return Row({"premise": premise, "hypothesis": hypothesis}, LABELS, gold, key, group)


SNLI = Task(
    name="snli",
    labels=LABELS,
    licence="CC BY-SA 4.0",
    source="Bowman et al. 2015, A large annotated corpus for learning natural language inference",
    parse=parse_snli,
    hub="stanfordnlp/snli",
    config="plain_text",
    revision="cdb5c3d5eed6ead6e5a341c8e56e669bb666725b",
    hub_splits={"train": "train", "validation": "validation", "test": "test"},
    patterns={
        "train": ("snli_1.0_train*.jsonl*", "plain_text/train*"),
        "validation": ("snli_1.0_dev.jsonl*", "plain_text/validation*"),
        "test": ("snli_1.0_test.jsonl*", "plain_text/test*"),
    },
    order="shuffled",
)

ANLI = Task(
    name="anli",
    labels=LABELS,
    licence="CC BY-NC 4.0 (non-commercial)",
    source="Nie et al. 2020, Adversarial NLI, round 1",
    parse=parse_anli,
    hub="facebook/anli",
    config="plain_text",
    revision="8e4813d81f46d313dac7892e1c28076917cfcdf9",
    hub_splits={"train": "train_r1", "validation": "dev_r1", "test": "test_r1"},
    patterns={
        "train": ("*train_r1*", "R1/train.jsonl*", "plain_text/train_r1*"),
        "validation": ("*dev_r1*", "R1/dev.jsonl*", "plain_text/dev_r1*"),
        "test": ("*test_r1*", "R1/test.jsonl*", "plain_text/test_r1*"),
    },
    order="shuffled",
)
