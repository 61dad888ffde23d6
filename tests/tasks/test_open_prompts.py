"""Prompts of questions without options, and of the judgement of an answer."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from catto.prompts import fingerprint, open_fingerprint, render_completion, render_judgement, render_messages
from catto.records import Option, Question

SUM = Question(
    id="1", task="sums", split="test", fields={"question": "2 + 2?"}, gold="4", accepted=("4",), grade="number"
)
CHOICE = Question(
    id="2",
    task="mine",
    split="test",
    fields={"question": "Which?"},
    options=(Option(label="A", text="red"), Option(label="B", text="blue")),
    gold="B",
)


def test_a_question_without_options_is_asked_for_its_answer_alone() -> None:
    system, user = render_messages(SUM)
    assert user.content == "2 + 2?"
    assert render_completion("your reasoning", "your answer") in system.content
    assert "choice" not in system.content
    assert "confidence" not in system.content


@pytest.mark.parametrize("question", [SUM, CHOICE])
def test_a_stated_confidence_is_asked_for_after_the_answer(question: Question) -> None:
    plain = render_messages(question)[0].content
    asked = render_messages(question, confidence=True)[0].content
    assert "<confidence>" not in plain
    assert asked.index("</answer>") < asked.index("<confidence>")


@pytest.mark.parametrize("question", [SUM, CHOICE])
def test_a_judgement_continues_the_conversation_with_the_answer(question: Question) -> None:
    chat = render_judgement(question, "5")
    assert chat[:2] == render_messages(question)
    assert chat[2].content == "<answer>\n5\n</answer>"
    assert "True or False" in chat[3].content


def test_a_judgement_does_not_show_the_gold_answer() -> None:
    other = SUM.model_copy(update={"gold": "7", "accepted": ("7",)})
    assert render_judgement(SUM, "5") == render_judgement(other, "5")


def test_questions_with_labels_are_stored_as_before() -> None:
    assert set(CHOICE.model_dump()) == {"id", "task", "split", "fields", "options", "gold", "posterior"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"accepted": None}, "0 options, expected at least 2"),
        ({"grade": None}, "without a grade"),
        ({"gold": "5"}, "not the first accepted answer"),
        ({"options": CHOICE.options}, "expected one of them"),
        ({"accepted": ()}, "at least 1"),
    ],
)
def test_a_question_has_options_or_accepted_answers(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Question(**{**SUM.model_dump(), **changes})


def test_the_two_fingerprints_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from catto import prompts

    labels = fingerprint()
    open_answers = open_fingerprint()
    monkeypatch.setitem(prompts.OPEN_WORDING, "mine", prompts.Wording("", "Add.", brief=True))
    assert fingerprint() == labels
    assert open_fingerprint() != open_answers
