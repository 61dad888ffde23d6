"""A stated confidence is read strictly: anything that is not one probability in one tag is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catto.answer.verbal import read_stated_confidence

ANSWER = "<think>\nso\n</think>\n<answer>\nB\n</answer>\n"


@pytest.mark.parametrize(
    ("stated", "confidence"),
    [
        ("0.8", 0.8),
        (" 0.8\n", 0.8),
        (".8", 0.8),
        ("0", 0.0),
        ("1", 1.0),
        ("1.0", 1.0),
        ("1.", 1.0),
        ("00.5", 0.5),
        ("80%", 0.8),
        ("80 %", 0.8),
        ("99.5%", 0.995),
        ("0.8%", 0.008),
        ("100%", 1.0),
        ("0%", 0.0),
        ("80", None),
        ("1.01", None),
        ("101%", None),
        ("-0.1", None),
        ("-0", None),
        ("+0.5", None),
        ("0,8", None),
        ("8/10", None),
        ("8e-1", None),
        ("~0.8", None),
        ("about 0.8", None),
        ("0.8 or 0.9", None),
        ("0.7-0.9", None),
        ("0.8.", None),
        ("**0.8**", None),
        ("high", None),
        ("eighty percent", None),
        ("nan", None),
        ("inf", None),
        (".", None),
        ("%", None),
        ("", None),
        ("0.8 0.8", None),
        ("\u0660.\u0668", None),
        ("\uff10.\uff18", None),
        ("9" * 400, None),
    ],
)
def test_one_probability_is_read_and_nothing_else(stated: str, confidence: float | None) -> None:
    assert read_stated_confidence(f"{ANSWER}<confidence>{stated}</confidence>") == confidence


@pytest.mark.parametrize(
    ("response", "confidence"),
    [
        (f"<confidence>0.8</confidence>{ANSWER}", None),  # before `</think>`, so part of the reasoning
        ("<confidence>0.8</confidence><answer>B</answer>", 0.8),
        (f"{ANSWER}<Confidence>0.8</ confidence >", 0.8),
        (f"{ANSWER}<confidence>0.8", None),
        (f"{ANSWER}<confidence>0.8</conf", None),
        (f"{ANSWER}0.8</confidence>", None),
        (f"{ANSWER}<confidence>0.8<confidence>", None),
        (f"{ANSWER}<confidence>0.8</confidence><confidence>0.8</confidence>", None),
        (f"{ANSWER}<confidence><confidence>0.8</confidence>", None),
        (f"{ANSWER}Confidence: 0.8", None),
        ("<think>say <confidence>0.1</confidence></think><answer>B</answer><confidence>0.8</confidence>", 0.8),
        ("<think><confidence>0.8</confidence>", None),
        (f"{ANSWER}<confidence>0.8</confidence>\nQuestion: and?\n<confidence>0.1</confidence>", 0.8),
        ("", None),
    ],
)
def test_the_tag_is_read_once_outside_the_reasoning(response: str, confidence: float | None) -> None:
    assert read_stated_confidence(response) == confidence


@given(st.floats(0, 1), st.integers(1, 12))
def test_probabilities_as_python_prints_them_are_read(value: float, places: int) -> None:
    printed = f"{value:.{places}f}"
    assert read_stated_confidence(f"{ANSWER}<confidence>{printed}</confidence>") == float(printed)


@given(st.text(max_size=60))
def test_what_is_read_is_a_probability(text: str) -> None:
    confidence = read_stated_confidence(f"{ANSWER}<confidence>{text}</confidence>")
    assert confidence is None or 0 <= confidence <= 1
