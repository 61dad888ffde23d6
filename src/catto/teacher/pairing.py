"""Responses -> rows to train on. Every row's text is rendered anew, so that the label stands alone on its line.

A response without a label counts as wrong. It is never the rejected one of a pair, since there is no label to compare;
among the outcome rows it stands with its reasoning and an open answer.

What a teacher run will cost, and what it gave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from pydantic import Field

from catto.engines.replies import told
from catto.prompts import completion, messages
from catto.recipe import TeacherSettings
from catto.records import Message, PreferenceRow, Question, Record, Refusal, Response, SftRow, content_hash

# ---- rows


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


# ---- summary


# English text has about four characters a token in the usual vocabularies; good to some 20 %.
CHARACTERS_A_TOKEN = 4
EXAMPLES = 3


class Estimate(Record):
    """What is still to be asked. Tokens are estimates: see `lines`."""

    questions: int
    requests: int
    stored: int
    refused: int = 0
    prompt_tokens: int
    most_tokens: int

    def lines(self) -> list[str]:
        """Say it, and how it was estimated."""
        return [
            f"{self.requests:,} requests for {self.questions:,} questions; {self.stored:,} responses are stored"
            + (f", {self.refused:,} requests were refused" if self.refused else ""),
            f"about {self.prompt_tokens:,} prompt tokens (characters / {CHARACTERS_A_TOKEN})",
            f"at most {self.most_tokens:,} generated tokens (requests x max_tokens)",
        ]


def estimate(
    questions: Sequence[Question], settings: TeacherSettings, stored: Counter[str], refused: Counter[str]
) -> Estimate:
    """Count what is left to ask; `stored`, `refused`: question -> responses at hand, requests that stay refused."""
    left = {question.id: max(0, settings.n - stored[question.id] - refused[question.id]) for question in questions}
    characters = sum(left[question.id] * _characters(question, settings) for question in questions)
    requests = sum(left.values())
    return Estimate(
        questions=len(questions),
        requests=requests,
        stored=stored.total(),
        refused=refused.total(),
        prompt_tokens=round(characters / CHARACTERS_A_TOKEN),
        most_tokens=requests * settings.max_tokens,
    )


def _characters(question: Question, settings: TeacherSettings) -> int:
    return sum(len(message.content) for message in messages(question, reasoning=settings.reasoning))


class Yield(Record):
    """What the responses gave. `rates`: correctness rate, to one digit -> questions; tokens None: not reported."""

    questions: int
    answered: int
    responses: int
    correct: int
    unparsed: int
    kept: int
    dropped: dict[str, int]
    rates: dict[str, int]
    prompt_tokens: int | None
    tokens: int | None
    rows: dict[str, int]
    examples: tuple[Response, ...]
    refused: int = 0
    reasons: str = ""  # of the refused requests, with their counts
    other_models: dict[str, int] = Field(default_factory=dict)  # replies under another name than was asked for

    def lines(self) -> list[str]:
        """Say it in a few lines."""
        rates = ", ".join(f"{rate}: {count}" for rate, count in self.rates.items())
        return [
            f"{self.responses:,} responses to {self.answered:,} of {self.questions:,} questions; "
            f"{self.correct:,} correct, {self.unparsed:,} without a label",
            f"{self.kept:,} questions give pairs; dropped: "
            + (", ".join(f"{count:,} {why}" for why, count in self.dropped.items()) or "none"),
            f"questions by share of correct responses: {rates}",
            f"tokens: {_number(self.prompt_tokens)} prompt, {_number(self.tokens)} generated",
            "rows: " + ", ".join(f"{count:,} {kind}" for kind, count in self.rows.items()),
            *self._faults(),
            *(line for response in self.examples for line in _example(response)),
        ]

    def _faults(self) -> Iterator[str]:
        if self.refused:
            yield f"refused and left out: {self.refused:,} requests ({self.reasons}); --retry-refused asks again"
        if self.other_models:
            names = ", ".join(f"{count:,} from {name}" for name, count in self.other_models.items())
            yield f"under another model name than asked: {names}"


def _number(value: int | None) -> str:
    return "not reported" if value is None else f"{value:,}"


def _example(response: Response) -> list[str]:
    verdict = "correct" if response.correct else "wrong" if response.label is not None else "without a label"
    text = " ".join(response.text.split())
    return [f"question {response.question} sample {response.sample}, {verdict}: {text[:200]}"]


def summarise(
    questions: Sequence[Question],
    answered: Iterable[Answered],
    settings: TeacherSettings,
    rows: dict[str, int],
    refused: Sequence[Refusal] = (),
) -> Yield:
    """Count what the responses gave."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    rates: Counter[str] = Counter()
    names: Counter[str] = Counter()
    examples: dict[str, Response] = {}  # one of each kind, filled up with the first ones
    first: list[Response] = []
    for group in answered:
        reasons[dropped(group, settings) or ""] += 1
        rates[f"{group.correctness_rate:.1f}"] += 1
        for response in group.responses:
            _count(response, counts)
            names[response.model] += settings.source == "server" and response.model != settings.model
            examples.setdefault(_kind(response), response)
            first.extend([response] if len(first) < EXAMPLES else [])
    without = len(questions) - reasons.total()
    kept = reasons.pop("", 0)
    return Yield(
        questions=len(questions),
        answered=len(questions) - without,
        responses=counts["responses"],
        correct=counts["correct"],
        unparsed=counts["unparsed"],
        kept=kept,
        dropped={**dict(sorted(reasons.items())), **({"no responses": without} if without else {})},
        rates=dict(sorted(rates.items())),
        prompt_tokens=counts["prompt_tokens"] if counts["counted"] else None,
        tokens=counts["tokens"] if counts["counted"] else None,
        rows=rows,
        refused=len(refused),
        reasons=told(refused),
        other_models=dict(sorted((+names).items())),
        examples=tuple([*examples.values(), *(r for r in first if r not in examples.values())][:EXAMPLES]),
    )


def _kind(response: Response) -> str:
    return "unparsed" if response.label is None else "correct" if response.correct else "wrong"


def _count(response: Response, counts: Counter[str]) -> None:
    counts["responses"] += 1
    counts[_kind(response)] += 1
    if response.tokens is not None:
        counts["counted"] += 1
        counts["tokens"] += response.tokens
        counts["prompt_tokens"] += response.prompt_tokens or 0
