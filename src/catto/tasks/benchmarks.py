"""What a task is, the parsers of the benchmarks, and the one table of tasks.

A parser turns a row of the hub or of the original release into a `Draft`, or returns the reason to leave it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from catto.records import Question, Split
from catto.tasks import witnesses
from catto.tasks.splits import Cut, Draft, permutation

LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
NLI_LABELS = ("entailment", "neutral", "contradiction")
SEEDS = (0, 1, 2, 3, 4)

Raw = Mapping[str, Any]
Files = Mapping[Split, str | Path | Sequence[str | Path]]


@dataclass(frozen=True)
class Task:
    """Where the questions of one task come from. `parse` returns the draft, or the reason to leave the row out."""

    name: str
    labels: tuple[str, ...]
    licence: str
    source: str
    parse: Callable[[Raw], Draft | str] | None = None
    generate: Callable[[Split, int | None, int], Iterator[Question]] | None = None
    hub: str | None = None
    config: str | None = None
    revision: str | None = None  # None: the head of the hub's main branch
    hub_splits: Mapping[Split, str] = field(default_factory=dict)
    patterns: Mapping[Split, tuple[str, ...]] = field(default_factory=dict)  # the first that matches a file wins
    columns: tuple[str, ...] | None = None  # of a CSV file without a header
    # Where options are whole texts the gold one comes first in the source, so those are shuffled whatever they say.
    order: Literal["shuffled", "shuffled unless letters are named", "fixed"] = "shuffled unless letters are named"
    cut: Cut | None = None
    sample: int | None = 500  # questions in validation and in test; None keeps all
    seeds: tuple[int, ...] = SEEDS
    files: Files | None = None


def lookup(raw: Raw, name: str) -> Any:
    """The value of a field, `a.b` being b inside a; a missing or null one is a ValueError.

    >>> lookup({"choices": {"text": ["red"]}}, "choices.text")
    ['red']
    """
    value: Any = raw.get(name)
    if value is None and "." in name:
        value = raw
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise ValueError(f"{name} is missing")
    return value


def text(raw: Raw, name: str) -> str:
    """A field that must be text."""
    value = lookup(raw, name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected text, got {type(value).__name__}")
    return value


def texts(raw: Raw, name: str) -> tuple[str, ...]:
    """A field that must be a list of texts."""
    value = lookup(raw, name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{name}: expected a list of texts, got {type(value).__name__}")
    return tuple(value)


def position(raw: Raw, name: str, labels: Sequence[object]) -> int:
    """The index of a field's value among the labels that the source uses."""
    value = lookup(raw, name)
    for index, label in enumerate(labels):
        if value == label and type(value) is type(label):
            return index
    raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, labels))}")


def parse_commonsense_qa(raw: Raw) -> Draft:
    """CommonsenseQA: the hub's rows (`choices` as two lists) or the release's (`question.stem`).

    Some rows repeat an option text, so the gold is an index.
    """
    if isinstance(raw.get("question"), dict):
        choices = lookup(raw, "question.choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise ValueError("question.choices: expected a list of objects")
        labels, options = (tuple(text(choice, name) for choice in choices) for name in ("label", "text"))
        question = text(raw, "question.stem")
    else:
        labels, options = texts(raw, "choices.label"), texts(raw, "choices.text")
        question = text(raw, "question")
    if labels != LETTERS[:5] or len(options) != 5:
        raise ValueError(f"choices: expected the labels {', '.join(LETTERS[:5])}, got {', '.join(labels)}")
    return Draft({"question": question}, options, position(raw, "answerKey", labels), text(raw, "id"))


def parse_mmlu(raw: Raw) -> Draft:
    """MMLU: the hub's rows (`choices`, `answer` as a number) or the release's headerless CSV. No ids, repeated rows."""
    options = texts(raw, "choices") if "choices" in raw else tuple(text(raw, label) for label in LETTERS[:4])
    if len(options) != 4:
        raise ValueError(f"choices: expected 4, got {len(options)}")
    gold = position(raw, "answer", range(4) if isinstance(raw.get("answer"), int) else LETTERS[:4])
    return Draft({"question": text(raw, "question")}, options, gold)


def parse_snli(raw: Raw) -> Draft | str:
    """SNLI, of the hub or of the release; without consensus there is no gold label."""
    if raw.get("gold_label") == "-" or ("gold_label" not in raw and raw.get("label") == -1):
        return "no_gold_label"
    if "gold_label" in raw:
        gold, names = position(raw, "gold_label", NLI_LABELS), ("sentence1", "sentence2")
        key, group = text(raw, "pairID"), text(raw, "captionID")
    else:
        gold, names = position(raw, "label", range(3)), ("premise", "hypothesis")
        key, group = None, text(raw, "premise")
    return Draft({"premise": text(raw, names[0]), "hypothesis": text(raw, names[1])}, NLI_LABELS, gold, key, group)


def parse_anli(raw: Raw) -> Draft:
    """ANLI, of the hub (`premise`, 0/1/2) or of the release (`context`, e/n/c)."""
    premise = text(raw, "context" if "context" in raw else "premise")
    gold = position(raw, "label", ("e", "n", "c") if isinstance(raw.get("label"), str) else range(3))
    fields = {"premise": premise, "hypothesis": text(raw, "hypothesis")}
    return Draft(fields, NLI_LABELS, gold, text(raw, "uid"), premise)


def parse_reward_bench_2(raw: Raw) -> Draft | str:
    """RewardBench 2: the best of four replies, one chosen and three rejected.

    The Ties subset has many right replies and often many wrong ones: which one and which three are drawn by the
    row's id, so that no place in the source's lists is favoured; the other right replies are left out.
    """
    key, chosen, rejected = str(lookup(raw, "id")), texts(raw, "chosen"), texts(raw, "rejected")
    if not chosen:
        return "no_chosen"
    if len(rejected) < 3:
        return "fewer_than_three_rejected"
    right = chosen[permutation(f"chosen {key}", len(chosen))[0]]
    wrong = [rejected[index] for index in sorted(permutation(f"rejected {key}", len(rejected))[:3])]
    return Draft({"prompt": text(raw, "prompt")}, (right, *wrong), 0, key)


def parse_tldr(raw: Raw) -> Draft | str:
    """TL;DR: which of two summaries of a post did a person prefer; of the hub (`prompt`) or the release (`summaries`).

    Rows have no ids. People judged the same pair more than once and disagree: such repeats are questions of their own.
    """
    if "summaries" in raw:
        info, summaries = lookup(raw, "info"), lookup(raw, "summaries")
        if not isinstance(info, dict) or info.get("post") is None:
            return "no_post"  # the comparisons of news articles
        if not isinstance(summaries, list) or len(summaries) != 2:
            raise ValueError("summaries: expected two")
        better = position(raw, "choice", range(2))
        post = f"SUBREDDIT: r/{text(info, 'subreddit')}\n\nTITLE: {text(info, 'title')}\n\nPOST: {text(info, 'post')}"
        post, options = post.strip(), (text(summaries[better], "text"), text(summaries[1 - better], "text"))
    else:
        post = text(raw, "prompt").strip().removesuffix("TL;DR:").rstrip()
        options = (text(raw, "chosen"), text(raw, "rejected"))
    return Draft({"post": post}, tuple(option.strip() for option in options), 0, None, post)


_TABLE = (
    Task(
        name="mmlu",
        labels=LETTERS[:4],
        licence="MIT",
        source="Hendrycks et al. 2021, Measuring Massive Multitask Language Understanding",
        parse=parse_mmlu,
        hub="cais/mmlu",
        config="all",
        revision="c30699e8356da336a370243923dbaf21066bb9fe",
        hub_splits={"train": "auxiliary_train", "validation": "validation", "test": "test"},
        patterns={
            "train": ("auxiliary_train/*", "all/auxiliary_train*"),
            "validation": ("val/*_val.csv", "all/validation*"),
            "test": ("test/*_test.csv", "all/test*"),
        },
        columns=("question", *LETTERS[:4], "answer"),
    ),
    Task(
        name="snli",
        labels=NLI_LABELS,
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
    ),
    Task(
        name="anli",
        labels=NLI_LABELS,
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
    ),
    Task(
        name="tldr",
        labels=LETTERS[:2],
        licence="comparisons: modified MIT; posts: CC BY 4.0",
        source="Stiennon et al. 2020, Learning to summarize from human feedback",
        parse=parse_tldr,
        hub="trl-lib/tldr-preference",
        hub_splits={"train": "train", "validation": "validation"},
        patterns={"train": ("data/train*",), "validation": ("data/validation*",)},
        order="shuffled",
        cut=Cut("validation", {"validation": 0.5}, rest="test"),
    ),
    Task(
        name="reward_bench_2",
        labels=LETTERS[:4],
        licence="ODC-BY",
        source="Malik et al. 2025, RewardBench 2",
        parse=parse_reward_bench_2,
        hub="allenai/reward-bench-2",
        hub_splits={"test": "test"},
        patterns={"test": ("data/test*",)},
        order="shuffled",
        # A tenth of the release's 1,865 rows is 187, also where a few of them are skipped.
        cut=Cut("test", {"validation": 187 / 1865, "test": 187 / 1865}, rest="train"),
        sample=None,
    ),
    Task(
        name="commonsense_qa",
        labels=LETTERS[:5],
        licence="MIT",
        source="Talmor et al. 2019, CommonsenseQA, random split",
        parse=parse_commonsense_qa,
        hub="tau/commonsense_qa",
        revision="94630fe30dad47192a8546eb75f094926d47e155",
        hub_splits={"train": "train", "validation": "validation"},
        patterns={"train": ("data/train*",), "validation": ("data/validation*",)},
        cut=Cut("validation", {"validation": 0.5}, rest="test"),
    ),
    Task(
        name="witnesses",
        labels=LETTERS[:4],
        licence="Apache-2.0 (generated)",
        source="generated here, with the exact posterior of every question",
        generate=lambda split, n, seed: witnesses.generate(split, n, seed=seed),
        order="fixed",
        sample=None,
    ),
)
TASKS: dict[str, Task] = {task.name: task for task in _TABLE}
