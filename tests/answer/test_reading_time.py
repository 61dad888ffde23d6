"""Reading takes linear time whatever the characters, and keeps nothing of what it read."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest

from catto.answer.forms import fold_text
from catto.answer.response import parse_response

LETTERS = ("A", "B", "C", "D")
# Marks that keep joining, in and out of their canonical order; compositions of letters; one character that becomes 18.
WORST_CHARACTERS = [
    "\u0301\uff9e",
    "\u0301\u0316",
    "\u0316\u0301\u0327",
    "\u1100\u1161\u11a8",
    "\u1161",
    "\u0bbe",
    "\u0344",
    "\ufdfa",
    "\u200b",
]
WORST_TEXTS = [
    *("A ", "A\n", "(", "((B))", "**", "** ", "\\boxed{", "{", "}", '"', "<", "_a", "> " * 4, "\n", "- ", "..", ". "),
    *("The answer is ", "The answer is A. ", "the best ", " is correct", "final final ", "A is the right answer, "),
    *("<think>", "</think>", "<answer>", "</answer>", "<answer>A", "<answer>A\nQuestion: x\n", "<think></think>"),
    *("Question: A\n", "Q: A", "</s>", "<s></s>", "<|im_end|>", "user\n", "# Question\n", "Answer\n", "Answer: A\n"),
]
TIMES = 4  # how much longer the longer text is
ALLOWED = 9  # how many times as long it may take: linear time is 4, quadratic 16
SHORTEST = 0.004  # seconds; below this the clock is noise


def processor_seconds(action: Callable[[], object]) -> float:
    spent = []
    for _ in range(2):
        began = time.process_time()
        action()
        spent.append(time.process_time() - began)
    return max(min(spent), SHORTEST)


def assert_linear(read: Callable[[int], object], length: int) -> None:
    short = processor_seconds(lambda: read(length))
    long = processor_seconds(lambda: read(TIMES * length))
    assert long < ALLOWED * short, f"{TIMES} times the text took {long / short:.1f} times as long"


@pytest.mark.parametrize("piece", WORST_CHARACTERS, ids=ascii)
def test_an_option_text_of_the_worst_characters_is_read_in_linear_time(piece: str) -> None:
    def read(length: int) -> object:
        option = "x" + piece * (length // len(piece))
        return parse_response(f"B) {option}", LETTERS, ["one", option, "three", "four"])

    assert read(400).label == "B"  # type: ignore[attr-defined]
    assert_linear(read, 1_500)


@pytest.mark.parametrize("piece", [*WORST_CHARACTERS, *WORST_TEXTS], ids=ascii)
@pytest.mark.parametrize("frame", ["{}", "<answer>{}", "<answer>{}</answer>", "Dogs bark.\n{}\nThe answer is B."])
def test_a_response_is_read_in_linear_time(frame: str, piece: str) -> None:
    def read(length: int) -> object:
        text = frame.format(piece * (length // len(piece)))
        return parse_response(text, LETTERS, ["a cat", "y" * length, "a cow", "z"])

    assert_linear(read, 1_500)


def test_lines_that_all_differ_are_read_in_linear_time() -> None:
    def read(length: int) -> object:
        lines = "".join(f"Line {number}\n" for number in range(length))
        return parse_response(f"{lines}The answer is B.", LETTERS)

    assert_linear(read, 200)


def test_marks_in_a_row_are_bounded() -> None:
    """Unicode's stream-safe format allows 30 of them; the rest is dropped before anything normalises the text."""
    flat, places = fold_text("x" + "\u0301\uff9e" * 2_000 + "y")
    assert len(flat) == len(places) == 32
    assert (flat[0], flat[-1]) == ("x", "y")


def test_no_text_of_a_question_is_kept() -> None:
    """An option's text and a label of 1 MB each are gone with the call that read them."""

    class Text(str):
        """A string whose end can be watched."""

        alive = 0

        def __init__(self, _: str) -> None:
            Text.alive += 1

        def __del__(self) -> None:
            Text.alive -= 1

    for number in range(3):
        options = [Text(f"{number}" * 2**20), Text("the dog")]
        parse_response(Text("B) the dog"), [Text("A"), Text("B")], options)
    del options
    gc.collect()
    assert Text.alive == 0
