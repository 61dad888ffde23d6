"""Rows of questions without options: responses are graded, and the rows of the stream judge their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest
from teacher_world import teach

from catto.engines import Engine, Generation, Key, Request
from catto.io.record_files import read_records
from catto.prompts import JUDGEMENT_LABELS, render_completion, render_judgement, render_messages
from catto.recipe.settings import TeacherSettings
from catto.records import PreferenceRow, Question, Response, SftRow
from catto.tasks import load_questions
from catto.tasks.readings import state_confidence
from catto.teacher.pairing import AnsweredQuestion, stream_rows
from catto.teacher.responses import answered_questions

QUESTION = Question(
    id="q0",
    task="mine",
    split="train",
    fields={"question": "How many metres are a kilometre?"},
    gold="1000",
    accepted=("1000",),
    grade="number",
)
ANSWERS = ("1,000", "1000.0", "100", None)


def generations() -> list[Generation]:
    found = []
    for sample, answer in enumerate(ANSWERS):
        text = "no idea" if answer is None else render_completion(f"thought {sample}", answer)
        found.append(Generation(question="q0", sample=sample, text=text, model="m"))
    return found


def answered() -> AnsweredQuestion:
    (group,) = answered_questions([QUESTION], generations(), TeacherSettings(n=4), drawn=False)
    return group


def test_responses_are_graded_and_keep_the_answer_as_written() -> None:
    """1,000 and 1000.0 equal 1000; 100 does not; a text without an answer tag has no answer."""
    responses = answered().responses
    assert [response.label for response in responses] == ["1,000", "1000.0", "100", None]
    assert [response.correct for response in responses] == [True, True, False, False]
    assert responses[0].reasoning == "thought 0"
    assert answered().correctness_rate == 0.5


class GivenResponses(Engine):
    """Answers with the generations above."""

    name = model = "given"

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        yield from generations()


def written(tmp_path: Path, name: str) -> list[SftRow]:
    teach([QUESTION], GivenResponses(), TeacherSettings(n=4, min_wrong=1), tmp_path)
    return list(read_records(tmp_path / f"{name}.jsonl", SftRow))


def test_every_answer_gives_a_judgement_and_no_answer_gives_none(tmp_path: Path) -> None:
    rows = written(tmp_path, "outcome")
    assert [row.label for row in rows] == ["True", "True", "False"]
    for row, answer in zip(rows, ANSWERS, strict=False):
        assert row.prompt == render_judgement(QUESTION, str(answer))
        assert row.completion[-1].content == f"<answer>\n{row.gold}\n</answer>"
        assert row.labels == JUDGEMENT_LABELS
        assert row.gold == row.label


def test_traces_have_no_labels_and_no_judgements(tmp_path: Path) -> None:
    rows = written(tmp_path, "sft")
    assert [(row.labels, row.label) for row in rows] == [((), "1,000"), ((), "1000.0")]
    assert all(row.prompt == render_messages(QUESTION) for row in rows)


def test_a_pair_has_a_right_and_a_wrong_answer(tmp_path: Path) -> None:
    written(tmp_path, "outcome")
    (pair,) = read_records(tmp_path / "preferences.jsonl", PreferenceRow)
    assert pair.chosen_label in ("1,000", "1000.0")
    assert pair.rejected_label == "100"
    assert pair.labels == ()


def test_votes_are_of_labels_alone() -> None:
    with pytest.raises(ValueError, match="question q0: votes count labels"):
        list(stream_rows(answered(), TeacherSettings(n=4)))


# The built-in teacher of the world of readings


def test_the_teacher_of_readings_also_states_confidences_and_judges(tmp_path: Path) -> None:
    questions = list(load_questions("readings", "train", limit=40))
    summary = teach(questions, None, TeacherSettings(source="readings", n=10), tmp_path)
    question_of = {question.id: question for question in questions}
    responses = list(read_records(tmp_path / "responses.jsonl", Response))
    rows = list(read_records(tmp_path / "sft.jsonl", SftRow))
    judged = [row for row in rows if row.labels]
    stated = [row for row in rows if "<confidence>" in row.completion[-1].content]
    traces = [row for row in rows if not row.labels and row not in stated]

    assert summary.rows["outcome"] == summary.responses == 400
    assert summary.unparsed == 0
    assert len(traces) == len(stated) == summary.correct
    # Only right judgements are kept, of right and of wrong answers.
    assert all(row.label == row.gold for row in judged)
    assert Counter(row.gold for row in judged)["True"] > 0
    assert Counter(row.gold for row in judged)["False"] > 0
    first = next(response for response in responses if response.correct)
    confidence = state_confidence(question_of[first.question], first.label or "", first.temperature or 1.0)
    assert stated[0].completion[-1].content.endswith(f"</answer>\n<confidence>{confidence}</confidence>")
    assert stated[0].prompt == render_messages(question_of[first.question], confidence=True)


def test_keeping_only_right_judgements_sharpens_them(tmp_path: Path) -> None:
    """Why overconfidence arises in judgements too: of p and 1 - p, p^2 and (1 - p)^2 are kept.

    Among the kept judgements of answers with p above one half, True is more frequent than p by several points.
    """
    questions = list(load_questions("readings", "train", limit=600))
    settings = TeacherSettings(source="readings", n=4, temperature=(1.0, 1.0))
    teach(questions, None, settings, tmp_path)
    posterior_of = {question.id: question.posterior or {} for question in questions}
    called_right = []
    probable = []
    for row in read_records(tmp_path / "sft.jsonl", SftRow):
        if not row.labels:
            continue
        answer = row.prompt[-2].content.split("\n")[1]
        probability = posterior_of[row.question][answer]
        if probability > 0.5:
            called_right.append(row.label == "True")
            probable.append(probability)
    assert len(probable) > 500
    assert sum(called_right) / len(probable) > sum(probable) / len(probable) + 0.05
