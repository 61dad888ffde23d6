"""A question and an answer to it, for tests of prompts and of the parser."""

from __future__ import annotations

from hypothesis import settings

from catto.answer.response import parse_response
from catto.records import Option, Question

LETTERS = ("A", "B", "C", "D", "E")
NLI = ("entailment", "neutral", "contradiction")
laws = settings(max_examples=150, deadline=None)


def question(labels: tuple[str, ...] = LETTERS[:4], texts: tuple[str, ...] = (), **more: object) -> Question:
    options = tuple(
        Option(label=x, text=t) for x, t in zip(labels, texts or [f"text {x}" for x in labels], strict=True)
    )
    given_fields = {"id": "q", "task": "mmlu", "split": "train", "fields": {"question": "Why?"}, "gold": labels[0]}
    return Question(**{**given_fields, "options": options, **more})  # type: ignore[arg-type]


def answer(text: str, labels: tuple[str, ...] = LETTERS[:4], texts: tuple[str, ...] | None = None) -> str | None:
    found = parse_response(f"<think>\nA or B?\n</think>\n<answer>\n{text}\n</answer>", labels, texts)
    assert found.reasoning == "A or B?"
    return found.label
