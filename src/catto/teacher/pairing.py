"""Responses to rows to train on, and a summary of what the responses gave.

Every row renders its text anew, so that the label is alone on its line. A response without a label counts as wrong. It
is never the rejected response of a pair, since there is no label to compare; among the outcome rows it keeps its
reasoning, with an open answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from catto.engines import model_name
from catto.engines.replies import count_reasons
from catto.prompts import completion
from catto.recipe import TeacherSettings
from catto.records import Message, PreferenceRow, Question, Record, Refusal, Response, SftRow, content_hash

EXAMPLES = 3


class AnsweredQuestion(NamedTuple):
    """A question, the messages that ask it, and all of its responses, at least one."""

    question: Question
    prompt: tuple[Message, ...]
    responses: tuple[Response, ...]

    @property
    def correctness_rate(self) -> float:
        """Share of the responses that are right, in [0, 1]."""
        return len(self.right) / len(self.responses)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that all rows of the question share."""
        same = {"question": self.question.id, "task": self.question.task, "labels": self.question.labels}
        return {**same, "gold": self.question.gold, "prompt": self.prompt, "correctness_rate": self.correctness_rate}

    @property
    def right(self) -> tuple[Response, ...]:
        """The correct responses."""
        return tuple(response for response in self.responses if response.correct)

    @property
    def wrong(self) -> tuple[Response, ...]:
        """The others, with or without a label."""
        return tuple(response for response in self.responses if not response.correct)


def sft_rows(group: AnsweredQuestion, settings: TeacherSettings) -> Iterator[SftRow]:
    """Yield the correct responses; without reasoning only the first, since the others have the same text."""
    right = group.right if settings.reasoning else group.right[:1]
    return (_sft_row(group, response, settings) for response in right)


def outcome_rows(group: AnsweredQuestion, settings: TeacherSettings) -> Iterator[SftRow]:
    """Yield every response, right or wrong."""
    return (_sft_row(group, response, settings) for response in group.responses)


def stream_rows(group: AnsweredQuestion, settings: TeacherSettings) -> Iterator[SftRow]:
    """Yield the first response, right or wrong, with the votes of all.

    The votes are the share of each label among the responses that have one; None where none has.
    """
    readable = [response.label for response in group.responses if response.label is not None]
    votes = None
    if readable:
        votes = {label: readable.count(label) / len(readable) for label in group.question.labels}
    row = _sft_row(group, group.responses[0], settings)
    yield row.model_copy(update={"votes": votes})


def preference_rows(group: AnsweredQuestion, settings: TeacherSettings) -> Iterator[PreferenceRow]:
    """Yield `pairs_per_question` pairs of a correct and a labelled wrong response, unless the question is dropped.

    Pairs are drawn without replacement, in the order of a hash: the same on every machine and Python.
    """
    if dropped(group, settings) is not None:
        return
    labelled = [response for response in group.wrong if response.label is not None]
    pairs = [(chosen, rejected) for chosen in group.right for rejected in labelled]
    pairs.sort(key=lambda pair: content_hash([settings.seed, group.question.id, pair[0].sample, pair[1].sample]))
    for chosen, rejected in pairs[: settings.pairs_per_question]:
        turns: dict[str, Any] = {"chosen": _turn(chosen, settings), "rejected": _turn(rejected, settings)}
        yield PreferenceRow(**group.columns, **turns, chosen_label=group.question.gold, rejected_label=rejected.label)


Kind = Literal["sft", "preferences", "outcome", "stream"]
ROWS: dict[str, Callable[[AnsweredQuestion, TeacherSettings], Iterator[Record]]] = {
    "responses": lambda group, settings: iter(group.responses),
    "sft": sft_rows,
    "preferences": preference_rows,
    "outcome": outcome_rows,
    "stream": stream_rows,
}


def dropped(group: AnsweredQuestion, settings: TeacherSettings) -> str | None:
    """Say why a question gives no pair; None if it does."""
    if len(group.right) < settings.min_correct:
        return "no correct" if not group.right else f"fewer than {settings.min_correct} correct"
    if len(group.wrong) < settings.min_wrong:
        return f"fewer than {settings.min_wrong} wrong"
    if all(response.label is None for response in group.wrong):
        return "no wrong with a label"
    return None


def _sft_row(group: AnsweredQuestion, response: Response, settings: TeacherSettings) -> SftRow:
    return SftRow(**group.columns, completion=_turn(response, settings), label=response.label)


def _turn(response: Response, settings: TeacherSettings) -> tuple[Message, ...]:
    """The response in its one form, with a thinking block exactly where the prompt asks for one."""
    reasoning = (response.reasoning or "") if settings.reasoning else None
    return (Message(role="assistant", content=completion(reasoning, response.label)),)


class Yield(Record):
    """What the responses gave. rates: correctness rate, to one digit -> questions. tokens: None where not reported."""

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
        """Describe it in a few lines."""
        tokens = ["not reported" if count is None else f"{count:,}" for count in (self.prompt_tokens, self.tokens)]
        lines = [
            f"{self.responses:,} responses to {self.answered:,} of {self.questions:,} questions; "
            f"{self.correct:,} correct, {self.unparsed:,} without a label",
            f"{self.kept:,} questions give pairs; dropped: "
            + (", ".join(f"{count:,} {why}" for why, count in self.dropped.items()) or "none"),
            "questions by share of correct responses: "
            + ", ".join(f"{rate}: {count}" for rate, count in self.rates.items()),
            f"tokens: {tokens[0]} prompt, {tokens[1]} generated",
            "rows: " + ", ".join(f"{count:,} {kind}" for kind, count in self.rows.items()),
        ]
        if self.refused:
            refused = f"{self.refused:,} requests ({self.reasons}); --retry-refused asks again"
            lines.append(f"refused and left out: {refused}")
        if self.other_models:
            names = ", ".join(f"{count:,} from {name}" for name, count in self.other_models.items())
            lines.append(f"under another model name than asked: {names}")
        for response in self.examples:
            text = " ".join(response.text.split())[:200]
            lines.append(f"question {response.question} sample {response.sample}, {_verdict(response)}: {text}")
        return lines


def _verdict(response: Response) -> str:
    return "without a label" if response.label is None else "correct" if response.correct else "wrong"


def count_yield(
    questions: Sequence[Question],
    groups: Iterable[AnsweredQuestion],
    settings: TeacherSettings,
    refused: Sequence[Refusal] = (),
) -> Yield:
    """Count what the responses gave; the rows are counted by who writes them."""
    verdicts, tokens, drops, rates, names = (Counter[str]() for _ in range(5))
    examples: dict[str, Response] = {}  # one of each verdict, filled up with the first responses
    first: list[Response] = []
    for group in groups:
        drops[dropped(group, settings) or ""] += 1
        rates[f"{group.correctness_rate:.1f}"] += 1
        first.extend(group.responses[: EXAMPLES - len(first)])
        for response in group.responses:
            verdicts[_verdict(response)] += 1
            examples.setdefault(_verdict(response), response)
            names[response.model] += settings.source == "server" and response.model != model_name(settings.model or "")
            if response.tokens is not None:
                tokens.update(counted=1, generated=response.tokens, prompt=response.prompt_tokens or 0)
    answered, kept = drops.total(), drops.pop("", 0)
    unanswered = {"no responses": len(questions) - answered} if len(questions) > answered else {}
    return Yield(
        questions=len(questions),
        answered=answered,
        responses=verdicts.total(),
        correct=verdicts["correct"],
        unparsed=verdicts["without a label"],
        kept=kept,
        dropped={**dict(sorted(drops.items())), **unanswered},
        rates=dict(sorted(rates.items())),
        prompt_tokens=tokens["prompt"] if tokens["counted"] else None,
        tokens=tokens["generated"] if tokens["counted"] else None,
        rows={},
        refused=len(refused),
        reasons=count_reasons(refused),
        other_models=dict(sorted((+names).items())),
        examples=tuple([*examples.values(), *(r for r in first if r not in examples.values())][:EXAMPLES]),
    )
