"""Answers without labels: what is read of a response, what counts as equal, and the agreement of samples."""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catto.answer.equivalence_process import EquivalenceProcess
from catto.answer.short_answers import is_right_answer, measure_agreement, merge_equivalent, read_short_answer
from catto.errors import DataError
from catto.records import Question


def question(*accepted: str, grade: str = "exact", tolerance: float = 0.0) -> Question:
    return Question(
        id="q",
        task="mine",
        split="test",
        fields={"question": "Which?"},
        gold=accepted[0],
        accepted=accepted,
        grade=grade,
        tolerance=tolerance,
    )


@pytest.mark.parametrize(
    ("text", "key", "source"),
    [
        ("<think>so</think><answer>The Beatles</answer>", "beatles", "free"),
        ("<answer>\nThe Beatles\n</answer>", "beatles", "free"),
        ("<think><answer>Queen</answer></think><answer>ABBA</answer>", "abba", "free"),
        ("<answer>ABBA", "abba", "free"),
        ("ABBA", "abba", "plain"),
        ("<think>so</think>\nABBA.", "abba", "plain"),
        ("It was in 1974.\nThe answer is ABBA.", "abba", "plain"),
        ("It was in 1974.\n#### ABBA", "abba", "plain"),
        ("It was in 1974.\nABBA won.", None, None),
        ("<think>ABBA", None, None),
        ("<answer></answer>", None, None),
        ("", None, None),
        (f"<answer>{'a' * 301}</answer>", None, None),
    ],
)
def test_what_a_response_answers(text: str, key: str | None, source: str | None) -> None:
    answer = read_short_answer(text)
    assert (answer.key, answer.source) == (key, source)


def test_an_answer_that_the_token_limit_cut_is_not_read() -> None:
    assert read_short_answer("<answer>New Yo", cut=True).key is None
    assert read_short_answer("New Yo", cut=True).key is None
    assert read_short_answer("<answer>New York</answer>", cut=True).key == "new york"


def test_a_number_is_read_as_one_or_not_at_all() -> None:
    assert read_short_answer("<answer>$1,500.00</answer>", "number").key == "1500"
    assert read_short_answer("<answer>10 or 12</answer>", "number").key is None


def test_grades() -> None:
    assert is_right_answer("the beatles", question("Beatles"))
    assert is_right_answer("lennon", question("John Lennon", "Lennon", grade="any-of"))
    assert not is_right_answer("mccartney", question("John Lennon", "Lennon", grade="any-of"))
    assert is_right_answer("1,515", question("1500", grade="number", tolerance=0.01))
    assert not is_right_answer("1,516", question("1500", grade="number", tolerance=0.01))


def test_agreement_by_hand() -> None:
    """3 of 5 equal: (3 + 1) / (5 + 2); 1 of 5: 2 / 7; no answer: 0, but it counts as a sample."""
    agreement = measure_agreement(["a", "b", "a", None, "a"])
    assert agreement == [4 / 7, 2 / 7, 4 / 7, 0.0, 4 / 7]


@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=12))
def test_agreement_depends_on_the_counts_alone(answers: list[str | None]) -> None:
    agreement = measure_agreement(answers)
    for answer, value in zip(answers, agreement, strict=True):
        expected = Fraction(0)
        if answer is not None:
            expected = Fraction(answers.count(answer) + 1, len(answers) + 2)
        assert value == pytest.approx(float(expected), abs=1e-15)
        assert 0.0 <= value < 1.0


def test_equivalent_answers_become_the_first_of_them() -> None:
    def same_initial(first: str, second: str) -> bool:
        return first[0] == second[0]

    merged = merge_equivalent(["new york", "boston", "nyc", None, "bos"], same_initial)
    assert merged == ["new york", "boston", "new york", None, "boston"]
    assert merge_equivalent(["a", "b"], lambda first, second: False) == ["a", "b"]


# A user's program


SAME_INITIAL = """
import json, sys
for line in sys.stdin:
    pair = json.loads(line)
    print(json.dumps(pair["first"][0] == pair["second"][0]), flush=True)
"""


def write_program(folder: Path, text: str) -> str:
    path = folder / "same.py"
    path.write_text(text)
    return f"{sys.executable} {path}"


def test_a_program_compares_pairs_and_is_asked_once_for_each(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = SAME_INITIAL.replace("    pair =", f"    open({str(log)!r}, 'a').write(line)\n    pair =")
    with EquivalenceProcess(write_program(tmp_path, program)) as same:
        assert merge_equivalent(["né", "boston", "nyc"], same) == ["né", "boston", "né"]
        assert merge_equivalent(["né", "boston", "nyc"], same) == ["né", "boston", "né"]
    assert log.read_text() == '{"first": "né", "second": "boston"}\n{"first": "né", "second": "nyc"}\n'


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("print('maybe')", "expected true or false"),
        ("raise SystemExit(1)", "no reply: the program ended or took too long"),
        ("import time; time.sleep(60)", "no reply: the program ended or took too long"),
    ],
)
def test_a_program_that_does_not_reply_is_one_line(tmp_path: Path, program: str, problem: str) -> None:
    process = EquivalenceProcess(write_program(tmp_path, program), seconds=1.0)
    with pytest.raises(DataError, match=problem), process:
        process("a", "b")


def test_a_program_that_is_not_there_is_one_line() -> None:
    with pytest.raises(DataError, match="cannot be started"):
        EquivalenceProcess("no-such-program --fast")
    with pytest.raises(ValueError, match="empty"):
        EquivalenceProcess(" ")
