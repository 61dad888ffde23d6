"""Questions without options from files of every schema, and malformed ones with one line each."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from catto.errors import DataError
from catto.records import Question
from catto.tasks import from_file, load_questions
from catto.tasks.own_file import propose


def write_rows(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_all(path: Path, fields: Mapping[str, str], **options: Any) -> list[Question]:
    task = from_file({"test": path}, fields=fields, name="mine", **options)
    questions = list(load_questions(task, "test"))
    return sorted(questions, key=lambda question: question.fields["question"])


def test_a_solution_with_its_answer_behind_four_hashes(tmp_path: Path) -> None:
    """The schema of GSM8K."""
    solution = "A pen is <<6/2=3>>3 dollars.\n5 pens are 15.\n#### 1,500"
    path = write_rows(tmp_path / "q.jsonl", {"question": "How much?", "answer": solution})
    [question] = load_all(path, {"question": "question", "answer": "answer"}, grade="number")
    assert (question.gold, question.accepted, question.grade) == ("1,500", ("1,500",), "number")
    assert not question.has_labels


def test_a_list_of_accepted_answers_and_an_id(tmp_path: Path) -> None:
    """The schema of TriviaQA, as a list and as the object of the original release."""
    row = {"question": "Who?", "question_id": "x1", "answer": ["Ada Lovelace", "Ada", "Ada"]}
    path = write_rows(tmp_path / "q.jsonl", row)
    [question] = load_all(path, {"question": "question", "answer": "answer", "id": "question_id"})
    assert (question.id, question.accepted, question.grade) == ("x1", ("Ada Lovelace", "Ada"), "any-of")
    nested = {"question": "Who?", "answer": {"value": "Ada", "aliases": ["Ada", "A. Lovelace"]}}
    path = write_rows(tmp_path / "original.jsonl", nested)
    [question] = load_all(path, {"question": "question", "answer": "answer.aliases"})
    assert question.accepted == ("Ada", "A. Lovelace")


def test_a_csv_with_problem_and_answer(tmp_path: Path) -> None:
    """The schema of SimpleQA; a list in a cell is a list."""
    path = tmp_path / "q.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["metadata", "problem", "answer"])
        writer.writerow(["{'topic': 'Art'}", "Which year?", "1912"])
        writer.writerow(["{'topic': 'Art'}", "Who?", '["Ada", "Lovelace"]'])
    who, year = sorted(
        load_all(path, {"question": "problem", "answer": "answer"}), key=lambda question: question.accepted or ()
    )[::-1]
    assert (year.accepted, year.grade) == (("1912",), "exact")
    assert (who.accepted, who.grade) == (("Ada", "Lovelace"), "any-of")


def test_one_file_is_cut_and_questions_keep_their_ids(tmp_path: Path) -> None:
    rows = [{"question": f"{number} + 1?", "answer": number + 1} for number in range(100)]
    task = from_file(write_rows(tmp_path / "q.jsonl", *rows), fields={"question": "question", "answer": "answer"})
    ids: set[str] = set()
    for split in ("train", "validation", "test"):
        loaded = load_questions(task, split)
        ids.update(question.id for question in loaded)
        assert loaded.report.gold == {}
    assert len(ids) == 100


def test_answers_from_a_file_of_their_own(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "q.jsonl", {"question": "Red?"}, {"question": "Sum?"})
    answers = tmp_path / "answers.txt"
    answers.write_text("yes\n12\n")
    task = from_file({"test": path}, fields={"question": "question"}, answers={"test": answers})
    assert {question.gold for question in load_questions(task, "test")} == {"yes", "12"}


def test_a_map_without_options_is_proposed_where_no_field_holds_any(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "q.jsonl", {"question": "Who?", "question_id": "1", "answer": ["Ada"]})
    assert propose({"test": path}) == {"question": "question", "answer": "answer"}


GOOD = {"question": "q", "answer": "1"}
FIELDS = {"question": "question", "answer": "answer"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "q"}, "answer: missing"),
        ({"question": "q", "answer": None}, "answer: missing"),
        ({"question": "q", "answer": ""}, "answer: the answer is empty"),
        ({"question": "q", "answer": "Long. #### "}, "answer: the answer is empty"),
        ({"question": "q", "answer": []}, "answer: the list of answers is empty"),
        ({"question": "q", "answer": ["3", " "]}, "answer: the answer is empty"),
        ({"question": "q", "answer": {"value": "3"}}, "name a field inside it, such as answer.value"),
        ({"question": "q", "answer": True}, "expected a text, a number or a list of these, got bool"),
        ({"question": "q", "answer": [["3"]]}, "expected a text, a number or a list of these, got list"),
        ({"question": "q", "answer": "3 or 4"}, "answer '3 or 4': expected one number"),
        ({"question": "q", "answer": "9" * 1001}, "1,001 characters, but a short answer has at most 1,000"),
        ({"question": " ", "answer": "3"}, "question is empty"),
        ({"question": 7, "answer": "3"}, "question: expected text, got int"),
        ({"question": "q", "answer": ["1"] * 1001}, "1,001 answers, at most 1,000"),
    ],
)
def test_a_malformed_row_is_one_line_with_its_place(tmp_path: Path, row: dict[str, Any], problem: str) -> None:
    path = write_rows(tmp_path / "q.jsonl", GOOD, row)
    with pytest.raises(DataError) as raised:
        load_all(path, FIELDS, grade="number")
    assert problem in str(raised.value)
    assert "q.jsonl:2" in str(raised.value) or "row 2" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "options", "problem"),
    [
        ({"question": "question"}, {}, "fields: answer is missing"),
        (FIELDS, {"answer": "index"}, "fields: options is missing"),
        (FIELDS, {"grade": "close"}, "grade 'close' is not one of exact, number, any-of"),
        (FIELDS, {"tolerance": 0.1}, "tolerance: only for the grade number"),
        ({**FIELDS, "options": "yes|no"}, {"grade": "exact"}, "only for questions without options"),
        ({**FIELDS, "labels": "names"}, {}, "expected options too"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(
    fields: dict[str, str], options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        from_file("q.jsonl", fields=fields, **options)


def test_a_tolerance_is_not_stored_unless_there_is_one() -> None:
    question = Question(
        id="1", task="t", split="test", fields={"question": "q"}, gold="1", accepted=("1",), grade="number"
    )
    assert "tolerance" not in question.model_dump()
    with pytest.raises(ValidationError):
        Question(**question.model_dump(), tolerance=-1.0)
