"""Docstrings, comments, messages and pages are plain technical English: some phrases are rejected."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import PAGES, ROOT

TEXTS = [ROOT / page for page in PAGES]
TEXTS += [
    path for path in sorted((ROOT / "src" / "catto").rglob("*")) if path.suffix in (".py", ".yaml", ".toml", ".j2")
]
COUNTED = (
    "records?|responses?|samples?|rows?|pairs?|numbers?|modules?|folders?|files?|functions?|lines?|panels?|stages?"
)
# Phrase -> what to write instead. `stand-in` and `standard` are other words.
INSTEAD = {
    r"\bstands?\b(?!-in)|\bstood\b": "is, occurs, appears; for `stands for`: represents",
    r"\b(goes|gone|went|going) on\b(?! to\b)": "continue, resume",
    r"\b(made|trained|model) from nothing\b": "from scratch",
    r"\btolerant of dress\b": "ignores formatting",
    r"\bof equals\b": "in case of a tie",
    r"\b(nobody|anybody)('s)?\b": "no one is meant: name the thing (`any model`, `unknown task`)",
    r"\b(is|are|was|were|be) told\b(?! apart)": "is printed, reported, refused",
    r"\bmend(s|ed|ing)?\b": "fix, repair",
    r"\bmade anew\b|\bcame out (the same|otherwise)\b": "regenerated; unchanged, changed",
    r"\bas it stands\b|\bas it came\b": "unchanged, as received",
    r"\bat hand\b": "available",
    rf"\b({COUNTED}) an? (line|question|token|stage|pair|command|kind|method|step|seed|variant|request|row)\b": "per",
}


def rejected(text: str) -> list[str]:
    """Each rejected phrase with its line and what to write instead."""
    lines = text.splitlines()
    return [
        f"line {number}: {match[0]!r}; write: {better}"
        for number, line in enumerate(lines, 1)
        for phrase, better in INSTEAD.items()
        for match in [re.search(phrase, line, re.IGNORECASE)]
        if match
    ]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_text_has_no_rejected_phrase(path: Path) -> None:
    assert not rejected(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        "The label stands alone on its line.",
        "A begun message is not gone on with.",
        "A model made from nothing",
        "tolerant of dress, never guessing",
        "the first of equals",
        "A bad file is told in one line.",
        "one record a line",
    ],
)
def test_a_rejected_phrase_is_found(line: str) -> None:
    assert rejected(line)


@pytest.mark.parametrize("line", ["the standard deviation", "a finite stand-in", "labels are told apart by case"])
def test_other_words_are_allowed(line: str) -> None:
    assert not rejected(line)
