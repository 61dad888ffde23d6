"""A user's own file as a task, by a field map."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from catto.errors import DataError
from catto.records import SPLITS, Question
from catto.tasks import Task, from_file, load_questions

FIELDS = {"question": "q", "options": "o", "answer": "a"}


def written(folder: Path, rows: list[dict[str, Any]], name: str = "own.jsonl") -> Path:
    (folder / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder / name


def only(task: Task) -> Question:
    (question,) = load_questions(task, "train")
    return question


def chosen(question: Question) -> str:
    return next(option.text for option in question.options if option.label == question.gold)


@pytest.mark.parametrize(
    ("answer", "value", "labels"),
    [
        ("label", "C", tuple("ABC")),
        ("label", 3, ("1", "2", "3")),
        ("index", 2, ()),
        ("index", "2", ()),
        ("text", "three", ()),
    ],
)
def test_the_answer_is_a_label_an_index_or_a_text(answer: Any, value: Any, labels: Any, tmp_path: Path) -> None:
    path = written(tmp_path, [{"q": "Which?", "o": ["one", "two", "three"], "a": value}])
    question = only(from_file(path, fields=FIELDS, answer=answer, labels=labels))
    assert chosen(question) == "three"
    assert question.labels == ("A", "B", "C")


def test_options_in_columns_may_be_fewer_in_some_rows(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("q,w,x,y,a\nOne?,p,q,r,B\nTwo?,p,q,,A\n", encoding="utf-8")
    fields = {"question": "q", "options": ["w", "x", "y"], "answer": "a"}
    found = list(load_questions(from_file(tmp_path / "own.csv", fields=fields), "train"))
    assert [len(one.options) for one in found] == [3, 2]
    assert [chosen(one) for one in found] == ["q", "p"]


def test_several_question_fields_keep_their_names_and_nested_ones_are_reached(tmp_path: Path) -> None:
    path = written(tmp_path, [{"x": {"text": "T"}, "title": "U", "o": ["1", "2"], "a": "B", "key": 9}])
    fields = {"question": ["title", "x.text"], "options": "o", "answer": "a", "id": "key"}
    question = only(from_file(path, fields=fields))
    assert question.fields == {"title": "U", "x.text": "T"}
    assert (question.id, chosen(question)) == ("9", "2")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"q": "Q", "o": ["1", "2"]}, "a: missing (fields: q, o)"),
        ({"q": " ", "o": ["1", "2"], "a": "A"}, "q is empty"),
        ({"q": "Q", "o": ["1", "2"], "a": "C"}, "a 'C' is not one of A, B"),
        ({"q": "Q", "o": ["1"], "a": "A"}, "o: expected 2 to 26 options, got 1"),
    ],
)
def test_a_bad_row_names_file_row_and_field(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = written(tmp_path, [{"q": "Fine?", "o": ["1", "2"], "a": "A"}, row])
    with pytest.raises(DataError) as caught:
        list(load_questions(from_file(path, fields=FIELDS), "train"))
    assert str(caught.value) == f"{path} row 2: {said}"


def test_a_text_that_two_options_share_is_no_answer(tmp_path: Path) -> None:
    path = written(tmp_path, [{"q": "Q", "o": ["same", "same"], "a": "same"}])
    with pytest.raises(DataError, match="a 'same' is the text of more than one option"):
        only(from_file(path, fields=FIELDS, answer="text"))


def rows(count: int, tag: str = "") -> list[dict[str, Any]]:
    return [{"q": f"Question {tag} {n}?", "o": ["1", "2"], "a": "AB"[n % 2], "g": str(n // 4)} for n in range(count)]


def test_one_seed_splits_the_file(tmp_path: Path) -> None:
    task = from_file(written(tmp_path, rows(100)), fields=FIELDS, seeds=(0,))
    parts = {split: {one.id for one in load_questions(task, split)} for split in SPLITS}
    assert [len(parts[split]) for split in SPLITS] == [80, 10, 10]
    assert len(set.union(*parts.values())) == 100


def test_groups_stay_together_when_a_file_is_cut(tmp_path: Path) -> None:
    path = written(tmp_path, rows(80))
    task = from_file(path, fields={**FIELDS, "group": "g"}, seeds=(0, 1))
    groups = {raw["q"]: raw["g"] for raw in rows(80)}
    parts = [{groups[one.fields["question"]] for one in load_questions(task, split)} for split in SPLITS]
    assert not parts[0] & parts[1]
    assert not parts[0] & parts[2]
    assert not parts[1] & parts[2]


def test_a_file_a_split_is_used_as_it_is_but_for_leaks(tmp_path: Path) -> None:
    shared = rows(3, "shared")
    files = {
        "train": written(tmp_path, rows(10, "train") + shared, "train.jsonl"),
        "validation": written(tmp_path, rows(5, "validation") + shared[:1], "validation.jsonl"),
        "test": written(tmp_path, rows(4, "test") + shared, "test.jsonl"),
    }
    task = from_file(files, fields=FIELDS)  # type: ignore[arg-type]
    assert [len(list(load_questions(task, split))) for split in SPLITS] == [10, 5, 7]
    loaded = load_questions(task, "train")
    assert Counter(one.gold for one in loaded) == loaded.report.gold
    assert sum(count for reason, count in loaded.report.dropped.items() if reason.startswith("content_in")) == 3
