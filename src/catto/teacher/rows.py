"""Responses -> rows to train on. Every row's text is rendered anew, so that the label stands alone on its line.

A response without a label counts as wrong. It is never the rejected one of a pair, since there is no label to compare;
among the outcome rows it stands with its reasoning and an open answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from catto.prompts import completion, messages
from catto.recipe import TeacherSettings
from catto.records import Message, PreferenceRow, Question, Response, SftRow, content_hash


class Answered(NamedTuple):
    """A question with all of its responses, at least one."""

    question: Question
    responses: tuple[Response, ...]

    @property
    def correctness_rate(self) -> float:
        """Share of the responses that are right, in [0, 1]."""
        return sum(response.correct for response in self.responses) / len(self.responses)

    @property
    def right(self) -> tuple[Response, ...]:
        """The correct responses."""
        return tuple(response for response in self.responses if response.correct)

    @property
    def wrong(self) -> tuple[Response, ...]:
        """The others, with or without a label."""
        return tuple(response for response in self.responses if not response.correct)


def grouped(questions: Iterable[Question], responses: Iterable[Response]) -> Iterator[Answered]:
    """Put responses, sorted by question, to their questions."""
    by_id = {question.id: question for question in questions}
    for name, group in groupby(responses, key=lambda response: response.question):
        if name not in by_id:
            raise ValueError(f"response to question {name!r}, which is not among the questions")
        yield Answered(by_id[name], tuple(group))


def sft_rows(answered: Iterable[Answered], settings: TeacherSettings) -> Iterator[SftRow]:
    """Yield the correct responses; answer first, the first one: the others of a question have the same text."""
    for group in answered:
        yield from _sft_rows(group, group.right if settings.reasoning else group.right[:1], settings)


def outcome_rows(answered: Iterable[Answered], settings: TeacherSettings) -> Iterator[SftRow]:
    """Yield every response, right or wrong, of every question."""
    for group in answered:
        yield from _sft_rows(group, group.responses, settings)


def preference_rows(answered: Iterable[Answered], settings: TeacherSettings) -> Iterator[PreferenceRow]:
    """Yield `pairs_per_question` pairs of a correct and a wrong response of every question that `dropped` keeps."""
    for group in answered:
        if dropped(group, settings) is None:
            for chosen, rejected in _pairs(group, settings):
                yield _preference_row(group, chosen, rejected, settings)


def dropped(group: Answered, settings: TeacherSettings) -> str | None:
    """Say why a question gives no pair; None if it does."""
    if len(group.right) < settings.min_correct:
        return "no correct" if not group.right else f"fewer than {settings.min_correct} correct"
    if len(group.wrong) < settings.min_wrong:
        return f"fewer than {settings.min_wrong} wrong"
    if all(response.label is None for response in group.wrong):
        return "no wrong with a label"
    return None


def _pairs(group: Answered, settings: TeacherSettings) -> list[tuple[Response, Response]]:
    """Draw pairs without replacement, by the order of a hash: the same on every machine and Python."""
    labelled = [response for response in group.wrong if response.label is not None]
    pairs = [(chosen, rejected) for chosen in group.right for rejected in labelled]

    def draw(pair: tuple[Response, Response]) -> str:
        return content_hash([settings.seed, group.question.id, pair[0].sample, pair[1].sample])

    return sorted(pairs, key=draw)[: settings.pairs_per_question]


def _sft_rows(group: Answered, responses: Iterable[Response], settings: TeacherSettings) -> Iterator[SftRow]:
    question, rate = group.question, group.correctness_rate
    prompt = messages(question, reasoning=settings.reasoning)
    for response in responses:
        yield SftRow(
            prompt=prompt,
            completion=_turn(response, settings),
            question=question.id,
            task=question.task,
            labels=question.labels,
            gold=question.gold,
            label=response.label,
            correctness_rate=rate,
        )


def _preference_row(group: Answered, chosen: Response, rejected: Response, settings: TeacherSettings) -> PreferenceRow:
    question = group.question
    return PreferenceRow(
        prompt=messages(question, reasoning=settings.reasoning),
        chosen=_turn(chosen, settings),
        rejected=_turn(rejected, settings),
        question=question.id,
        task=question.task,
        labels=question.labels,
        gold=question.gold,
        chosen_label=question.gold,
        rejected_label=rejected.label,
        correctness_rate=group.correctness_rate,
    )


def _turn(response: Response, settings: TeacherSettings) -> tuple[Message, ...]:
    """The response in its one form. A thinking block is there exactly where the prompt asks for one."""
    reasoning = (response.reasoning or "") if settings.reasoning else None
    return (Message(role="assistant", content=completion(reasoning, response.label)),)
