"""The loaders on real releases, where there is a folder with them: row counts, and no leak by an independent check."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from catto.records import SPLITS, Question
from catto.tasks import TASKS, from_file, load_questions
from catto.tasks.loading import LoadReport
from needs import folder

pytestmark = pytest.mark.slow


@cache
def loaded(name: str, split: str, seed: int = 0) -> tuple[list[Question], LoadReport]:
    found = load_questions(name, split, seed=seed, data_dir=folder(name))  # type: ignore[arg-type]
    return list(found), found.report


@cache
def carries_meaning(char: str) -> bool:
    return unicodedata.category(char)[0] in "LNSM"


def plain(question: Question) -> tuple[str, ...]:
    """Letters, digits and symbols alone, folded; another way to the same idea than the loader's own."""

    def folded(text: str) -> str:
        text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        return "".join(filter(carries_meaning, text)) or text

    return (*map(folded, question.fields.values()), *sorted(folded(option.text) for option in question.options))


@pytest.mark.parametrize(
    ("name", "split", "read", "kept", "dropped"),
    [
        ("mmlu", "train", 617 + 601, 1218, {}),
        ("mmlu", "validation", 1531, 500, {"content_in_test": 28, "not_drawn": 1003}),
        ("mmlu", "test", 14042, 500, {"not_drawn": 13542}),
        ("snli", "train", 20000, 19978, {"no_gold_label": 22}),
        ("snli", "validation", 10000, 500, {"no_gold_label": 158, "not_drawn": 9342}),
        ("snli", "test", 10000, 500, {"no_gold_label": 176, "not_drawn": 9324}),
        ("anli", "validation", 1000, 500, {"not_drawn": 500}),
        ("anli", "test", 1000, 500, {"not_drawn": 500}),
        ("commonsense_qa", "train", 9741, 9741, {}),
        ("commonsense_qa", "validation", 1221, 500, {"cut_to_another_part": 610, "not_drawn": 111}),
        ("commonsense_qa", "test", 1221, 500, {"cut_to_another_part": 611, "not_drawn": 110}),
        ("tldr", "train", 4000, 4000, {}),
    ],
)
def test_row_counts_are_those_of_the_release(
    name: str, split: str, read: int, kept: int, dropped: dict[str, int]
) -> None:
    _, report = loaded(name, split)
    assert (report.read, report.kept, report.dropped) == (read, kept, dropped)


def test_snli_train_labels_are_balanced_as_published() -> None:
    assert loaded("snli", "train")[1].gold == {"entailment": 6676, "contradiction": 6655, "neutral": 6647}


def test_shuffling_balances_the_letters() -> None:
    """9,741 questions over 5 letters: 1,948 each, standard deviation sqrt(9741 * 0.16) = 39."""
    assert all(abs(count - 9741 / 5) < 4 * 39.5 for count in loaded("commonsense_qa", "train")[1].gold.values())


def test_commonsense_qa_gold_survives_repeated_option_texts() -> None:
    raws = {}
    for line in (folder("commonsense_qa") / "train_rand_split.jsonl").read_text(encoding="utf-8").splitlines():
        raw = json.loads(line)
        raws[raw["id"]] = {choice["label"]: choice["text"] for choice in raw["question"]["choices"]}[raw["answerKey"]]
    questions = loaded("commonsense_qa", "train")[0]
    assert all({option.label: option.text for option in one.options}[one.gold] == raws[one.id] for one in questions)
    assert sum(len({option.text for option in one.options}) < 5 for one in questions) == 122


@pytest.mark.parametrize("name", ["commonsense_qa", "tldr"])
def test_no_question_of_any_seed_stands_in_two_splits(name: str) -> None:
    train = {plain(one) for one in loaded(name, "train")[0]}
    for seed in range(5):
        validation, test = ({plain(one) for one in loaded(name, split, seed)[0]} for split in SPLITS[1:])
        assert len(loaded(name, "validation", seed)[0]) == len(loaded(name, "test", seed)[0]) == 500
        assert not train & validation
        assert not train & test
        assert not validation & test


@pytest.mark.parametrize("name", ["mmlu", "snli"])
def test_no_question_of_the_whole_pools_stands_in_two_splits(name: str) -> None:
    """Where validation and test are whole files, every seed draws from the same pools: these hold all five draws."""
    whole = replace(TASKS[name], sample=None)
    train = loaded(name, "train")[0]  # training questions are not drawn
    validation, test = (list(load_questions(whole, split, data_dir=folder(name))) for split in SPLITS[1:])
    assert {one.id for one in loaded(name, "validation", 4)[0]} < {one.id for one in validation}
    contents = [{plain(one) for one in part} for part in (train, validation, test)]
    assert not contents[0] & contents[1]
    assert not contents[0] & contents[2]
    assert not contents[1] & contents[2]


def test_seeds_draw_different_questions() -> None:
    first, second = ({one.id for one in loaded("commonsense_qa", "test", seed)[0]} for seed in (0, 1))
    assert 0 < len(first & second) < 400


@pytest.mark.parametrize("seed", range(5))
def test_tldr_halves_are_even_and_share_no_post(seed: int) -> None:
    halves = [loaded("tldr", split, seed) for split in SPLITS[1:]]
    sizes = [report.kept + report.dropped["not_drawn"] for _, report in halves]
    assert sum(sizes) == 1940
    assert abs(sizes[0] - sizes[1]) < 20
    assert not {one.fields["post"] for one in halves[0][0]} & {one.fields["post"] for one in halves[1][0]}


def test_planted_leaks_are_removed_whatever_their_dress(tmp_path: Path) -> None:
    """Held-out rows in capitals, with other punctuation and option order, are put into the training file."""
    source = folder("commonsense_qa")
    held = [json.loads(line) for line in (source / "dev_rand_split.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = (source / "train_rand_split.jsonl").read_text(encoding="utf-8").splitlines()[:500]
    for raw in held[::3]:
        texts = [f" {choice['text'].upper()}." for choice in raw["question"]["choices"]][::-1]
        choices = [{"label": label, "text": text} for label, text in zip("ABCDE", texts, strict=True)]
        stem = "“" + raw["question"]["stem"].swapcase().replace(" ", "  ") + "”!"
        lines.append(
            json.dumps({"id": f"x{raw['id']}", "answerKey": "A", "question": {"stem": stem, "choices": choices}})
        )
    random.Random(1).shuffle(lines)
    (tmp_path / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = {"train": tmp_path / "train.jsonl", "validation": source / "dev_rand_split.jsonl"}
    for seed in (0, 3):
        train = load_questions("commonsense_qa", "train", seed=seed, files=files)  # type: ignore[arg-type]
        assert len(list(train)) == 500
        assert sum(train.report.dropped.values()) == len(held[::3])


def test_row_order_of_a_real_file_changes_nothing(tmp_path: Path) -> None:
    lines = (folder("tldr") / "validation_random1940.jsonl").read_text(encoding="utf-8").splitlines()
    random.Random(7).shuffle(lines)
    (tmp_path / "validation.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert list(load_questions("tldr", "test", seed=2, data_dir=tmp_path)) == loaded("tldr", "test", 2)[0]


def test_llmbar_is_a_task_by_its_field_map() -> None:
    fields = {"question": "input", "options": ["output_1", "output_2"], "answer": "label"}
    task = from_file(folder("llmbar") / "*.json", fields=fields, labels=("1", "2"), name="llmbar", seeds=(0,))
    parts = {split: list(load_questions(task, split)) for split in SPLITS}
    assert [len(part) for part in parts.values()] == [335, 42, 42]
    raws = [
        raw for path in sorted(folder("llmbar").glob("*.json")) for raw in json.loads(path.read_text(encoding="utf-8"))
    ]
    better = Counter((raw["input"], raw[f"output_{raw['label']}"]) for raw in raws)
    golds = {
        one.id: next(option.text for option in one.options if option.label == one.gold)
        for part in parts.values()
        for one in part
    }
    assert Counter((one.fields["question"], golds[one.id]) for part in parts.values() for one in part) == better
