"""What a teacher run will cost, and what it gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pydantic import Field

from catto.engines.refusals import told
from catto.prompts import messages
from catto.recipe import TeacherSettings
from catto.records import Question, Record, Refusal, Response
from catto.teacher.rows import Answered, dropped

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
