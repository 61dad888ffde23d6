"""CommonsenseQA: the hub's rows (`choices` as two lists) or the release's (`question.stem`).

MMLU: the hub's rows (`choices`, `answer` as a number) or the release's headerless CSV.

SNLI and ANLI: premise, hypothesis and one of three label words, listed in an order of the question's own.

RewardBench 2: the best of four replies, one chosen and three rejected.

TL;DR: which of two summaries of a post did a person prefer.

The one table of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

from catto.tasks import witnesses
from catto.tasks.rows import Cut, Raw, Row, RowError, Task, lookup, position, text, texts
from catto.tasks.splits import permutation

# ---- commonsense_qa


COMMONSENSE_QA_LABELS = ("A", "B", "C", "D", "E")


def parse_commonsense_qa(raw: Raw) -> Row:
    """Turn a row of either schema into a neutral one. Some rows repeat an option text, so the gold is an index."""
    release = isinstance(raw.get("question"), dict)
    labels, options = (
        _commonsense_qa_release(raw) if release else (texts(raw, "choices.label"), texts(raw, "choices.text"))
    )
    if tuple(labels) != COMMONSENSE_QA_LABELS or len(options) != len(COMMONSENSE_QA_LABELS):
        raise RowError(f"choices: expected the labels {', '.join(COMMONSENSE_QA_LABELS)}, got {', '.join(labels)}")
    question = text(raw, "question.stem" if release else "question")
    return Row(
        {"question": question}, tuple(options), position(raw, "answerKey", COMMONSENSE_QA_LABELS), text(raw, "id")
    )


def _commonsense_qa_release(raw: Raw) -> tuple[Sequence[str], Sequence[str]]:
    choices = lookup(raw, "question.choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise RowError("question.choices: expected a list of objects")
    return [text(choice, "label") for choice in choices], [text(choice, "text") for choice in choices]


COMMONSENSE_QA = Task(
    name="commonsense_qa",
    labels=COMMONSENSE_QA_LABELS,
    licence="MIT",
    source="Talmor et al. 2019, CommonsenseQA, random split",
    parse=parse_commonsense_qa,
    hub="tau/commonsense_qa",
    revision="94630fe30dad47192a8546eb75f094926d47e155",
    hub_splits={"train": "train", "validation": "validation"},
    patterns={"train": ("data/train*",), "validation": ("data/validation*",)},
    cut=Cut("validation", {"validation": 0.5}, rest="test"),
)


# ---- mmlu


MMLU_LABELS = ("A", "B", "C", "D")


def parse_mmlu(raw: Raw) -> Row:
    """Turn a row of either schema into a neutral one; MMLU has no ids and repeats rows."""
    options = texts(raw, "choices") if "choices" in raw else tuple(text(raw, label) for label in MMLU_LABELS)
    if len(options) != len(MMLU_LABELS):
        raise RowError(f"choices: expected {len(MMLU_LABELS)}, got {len(options)}")
    numbers = isinstance(raw.get("answer"), int)
    gold = position(raw, "answer", range(len(MMLU_LABELS)) if numbers else MMLU_LABELS)
    return Row({"question": text(raw, "question")}, options, gold)


MMLU = Task(
    name="mmlu",
    labels=MMLU_LABELS,
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
    columns=("question", *MMLU_LABELS, "answer"),
)


# ---- nli


NLI_LABELS = ("entailment", "neutral", "contradiction")
_CODES = (0, 1, 2)


def parse_snli(raw: Raw) -> Row | str:
    """Turn a row of the hub or of the release into a neutral one; without consensus there is no gold label."""
    if "gold_label" not in raw:
        if raw.get("label") == -1:
            return "no_gold_label"
        premise, hypothesis = text(raw, "premise"), text(raw, "hypothesis")
        return _nli_row(premise, hypothesis, position(raw, "label", _CODES), None, premise)
    if raw["gold_label"] == "-":
        return "no_gold_label"
    gold = position(raw, "gold_label", NLI_LABELS)
    return _nli_row(text(raw, "sentence1"), text(raw, "sentence2"), gold, text(raw, "pairID"), text(raw, "captionID"))


def parse_anli(raw: Raw) -> Row:
    """Turn a row of the hub (`premise`, 0/1/2) or of the release (`context`, e/n/c) into a neutral one."""
    premise = text(raw, "context" if "context" in raw else "premise")
    gold = position(raw, "label", ("e", "n", "c") if isinstance(raw.get("label"), str) else _CODES)
    return _nli_row(premise, text(raw, "hypothesis"), gold, text(raw, "uid"), premise)


def _nli_row(premise: str, hypothesis: str, gold: int, key: str | None, group: str) -> Row:
    return Row({"premise": premise, "hypothesis": hypothesis}, NLI_LABELS, gold, key, group)


SNLI = Task(
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
)

ANLI = Task(
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
)


# ---- reward_bench_2


REWARD_BENCH_2_LABELS = ("A", "B", "C", "D")


def parse_reward_bench_2(raw: Raw) -> Row | str:
    """Turn a row into a question with one right option.

    The Ties subset has many right replies and often many wrong ones: which one and which three are drawn by the
    row's id, so that no place in the source's lists is favoured; the other right replies are left out.
    """
    key, chosen, rejected = str(lookup(raw, "id")), texts(raw, "chosen"), texts(raw, "rejected")
    if not chosen:
        return "no_chosen"
    if len(rejected) < len(REWARD_BENCH_2_LABELS) - 1:
        return "fewer_than_three_rejected"
    right = chosen[permutation(f"chosen {key}", len(chosen))[0]]
    wrong = [
        rejected[index]
        for index in sorted(permutation(f"rejected {key}", len(rejected))[: len(REWARD_BENCH_2_LABELS) - 1])
    ]
    return Row({"prompt": text(raw, "prompt")}, (right, *wrong), 0, key)


REWARD_BENCH_2 = Task(
    name="reward_bench_2",
    labels=REWARD_BENCH_2_LABELS,
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
)


# ---- tldr


TLDR_LABELS = ("A", "B")


def parse_tldr(raw: Raw) -> Row | str:
    """Turn a row of the hub (`prompt`, `chosen`) or of the release (`info`, `summaries`) into a neutral one.

    Rows have no ids. People judged the same pair more than once and disagree: such repeats are questions of their own.
    """
    if "summaries" in raw:
        return _tldr_release(raw)
    post = text(raw, "prompt").strip().removesuffix("TL;DR:").rstrip()
    return _tldr_row(post, text(raw, "chosen"), text(raw, "rejected"))


def _tldr_release(raw: Raw) -> Row | str:
    info, summaries = lookup(raw, "info"), lookup(raw, "summaries")
    if not isinstance(info, dict) or info.get("post") is None:
        return "no_post"  # the comparisons of news articles
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise RowError("summaries: expected two")
    better = position(raw, "choice", (0, 1))
    post = f"SUBREDDIT: r/{text(info, 'subreddit')}\n\nTITLE: {text(info, 'title')}\n\nPOST: {text(info, 'post')}"
    return _tldr_row(post.strip(), text(summaries[better], "text"), text(summaries[1 - better], "text"))


def _tldr_row(post: str, chosen: str, rejected: str) -> Row:
    return Row({"post": post}, (chosen.strip(), rejected.strip()), 0, None, post)


TLDR = Task(
    name="tldr",
    labels=TLDR_LABELS,
    licence="comparisons: modified MIT; posts: CC BY 4.0",
    source="Stiennon et al. 2020, Learning to summarize from human feedback",
    parse=parse_tldr,
    hub="trl-lib/tldr-preference",
    hub_splits={"train": "train", "validation": "validation"},
    patterns={"train": ("data/train*",), "validation": ("data/validation*",)},
    order="shuffled",
    cut=Cut("validation", {"validation": 0.5}, rest="test"),
)


# ---- table


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        MMLU,
        SNLI,
        ANLI,
        TLDR,
        REWARD_BENCH_2,
        COMMONSENSE_QA,
        witnesses.TASK,
    )
}
