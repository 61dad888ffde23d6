"""Short answers and numbers are graded as a person grades them, or more strictly."""

from __future__ import annotations

import json
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catto.answer.grading import find_answer_key, grade_answer, normalize_answer, read_number, write_number
from catto.answer.response import find_answer_text

# Each row: an answer, the accepted answers, and whether a person calls it right. `differs` says why the grader does not
# agree: `strict` refuses what a person accepts, `lenient` accepts what a person refuses.
ROWS: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "graded_answers.jsonl").read_text(encoding="utf-8").splitlines()
]


@pytest.mark.parametrize("grade", ["exact", "any-of", "number"])
def test_every_pair_is_graded_as_a_person_grades_it(grade: Any) -> None:
    rows = [row for row in ROWS if row["grade"] == grade and "differs" not in row]
    wrong = [row for row in rows if grade_answer(row["answer"], row["accepted"], grade=grade) != row["right"]]
    assert wrong == []


def test_the_known_differences_are_refusals_and_one_acceptance() -> None:
    """A grader that became more able must move its rows out of this list."""
    rows = [row for row in ROWS if "differs" in row]
    for row in rows:
        graded = grade_answer(row["answer"], row["accepted"], grade=row["grade"])
        assert graded != row["right"], row
        assert row["differs"].startswith("lenient" if graded else "strict"), row
    assert sum(row["differs"].startswith("lenient") for row in rows) == 1


def test_the_table_has_hundreds_of_pairs_of_both_kinds() -> None:
    distinct = {(row["grade"], row["answer"], *row["accepted"]) for row in ROWS}
    assert len(distinct) == len(ROWS) > 400
    assert sum(row["right"] for row in ROWS) > 200
    assert sum(not row["right"] for row in ROWS) > 130
    assert sum("differs" in row for row in ROWS) < 60


def test_the_documented_pairs_are_graded_as_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "conventions.md").read_text(encoding="utf-8")
    pairs = re.findall(r"(?m)^\| `(.+)` \| `(.+)` \| (exact|number) \| (yes|no) \|$", text)
    assert len(pairs) == 20
    for answer, accepted, grade, right in pairs:
        assert grade_answer(answer, [accepted], grade=grade) is (right == "yes"), (answer, accepted)


def test_the_documented_counts_are_those_of_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "conventions.md").read_text(encoding="utf-8")
    known = [row for row in ROWS if "differs" in row]
    assert f"has {len(ROWS)} pairs labelled by hand" in text
    assert f"agrees with the label on {len(ROWS) - len(known)} of them. It refuses {len(known) - 1} that" in text


@pytest.mark.parametrize(
    ("answer", "tolerance", "is_right"),
    [("101", 0.01, True), ("99", 0.01, True), ("101.01", 0.01, False), ("98.9", 0.01, False), ("-100", 0.5, False)],
)
def test_tolerance_is_a_share_of_the_accepted_value(answer: str, tolerance: float, is_right: bool) -> None:
    """100 with 1% accepts 99 to 101, both ends included."""
    assert grade_answer(answer, ["100"], grade="number", tolerance=tolerance) is is_right


def test_tolerance_of_zero_needs_the_value_itself() -> None:
    assert not grade_answer("0.001", ["0"], grade="number", tolerance=0.5)


@pytest.mark.parametrize(
    ("grade", "accepted", "message"),
    [
        ("number", ["5 to 10"], "'5 to 10': expected one number"),
        ("number", ["5", "none"], "'none': expected one number"),
        ("exact", [], "at least one accepted answer"),
        ("any-of", ["x", " "], "accepted answer is empty"),
    ],
)
def test_an_accepted_answer_that_nothing_can_equal_is_an_error(grade: Any, accepted: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grade_answer("5", accepted, grade=grade)


@given(st.text(max_size=80))
def test_normalising_twice_changes_nothing_but_leads_and_articles(text: str) -> None:
    once = normalize_answer(f"x{text}x")
    assert normalize_answer(once) == once


@given(st.text(max_size=80))
def test_every_visible_answer_equals_itself(text: str) -> None:
    if normalize_answer(text):
        assert grade_answer(text, [text])


@given(st.fractions(max_denominator=10**6))
def test_a_written_number_is_read_back(value: Fraction) -> None:
    reading = read_number(write_number(value))
    assert reading is not None
    assert reading.value == value


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_numbers_as_python_prints_them_are_read(number: int, places: int) -> None:
    decimal = number / 10**places
    printed = f"{decimal:,.{places}f}"
    reading = read_number(printed)
    assert reading is not None
    assert reading.value == Fraction(printed.replace(",", ""))
    assert find_answer_key(printed, "number") == write_number(reading.value)


def test_equal_numbers_share_a_key() -> None:
    keys = {find_answer_key(text, "number") for text in ("1,000", "1e3", "$1000.00", "1000 apples", "2000/2")}
    assert keys == {"1000"}


@pytest.mark.parametrize("text", ["1" * 100_000, "e\u0301" * 50_000, "$" * 50_000, "the " * 30_000, "a." * 50_000])
def test_long_answers_take_linear_time(text: str) -> None:
    """100,000 characters take less than two seconds of processor time."""
    start = time.process_time()
    normalize_answer(text)
    read_number(text)
    find_answer_text(f"<answer>{text}")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>so</think>\n<answer>\n42\n</answer>", "42"),
        ("<think>first <answer>41</answer></think><answer>42</answer>", "42"),
        ("<answer>42", "42"),
        ("<answer>42</ans", "42"),
        ("<answer>41</answer> no, <answer>42</answer>", "42"),
        ("<answer>41 <answer>42</answer>", None),
        ("<answer>42</answer>\nQuestion: more?\n<answer>43</answer>", "42"),
        ("<answer> </answer>", None),
        ("42", None),
        ("<think><answer>42</answer>", None),
    ],
)
def test_a_short_answer_is_what_its_tag_contains(response: str, answer: str | None) -> None:
    assert find_answer_text(response) == answer


def test_a_cut_answer_is_not_read() -> None:
    assert find_answer_text("<answer>4", cut=True) is None
    assert find_answer_text("<answer>42</answer>", cut=True) == "42"
