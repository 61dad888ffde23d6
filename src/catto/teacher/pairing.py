"""Turn responses into training rows, and summarise the responses.

The text of every row is rendered anew, so that the label is alone on its line. A response without a label counts as
wrong. It is never the rejected response of a pair, since there is no label to compare. As an outcome row it has its
reasoning, and its text ends where the label would follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from catto.engines import model_name
from catto.engines.replies import count_reasons
from catto.prompts import JUDGEMENT_LABELS, render_completion, render_judgement, render_messages
from catto.records import Message, PreferenceRow, Question, Record, Refusal, Response, SftRow, content_hash
from catto.tasks.readings import judge_sum, state_confidence
from catto.teacher.sampling import AskSettings

EXAMPLES = 3  # responses that a summary shows


class AnsweredQuestion(NamedTuple):
    """A question, the messages that ask it, and all of its responses (at least one)."""

    question: Question
    prompt: tuple[Message, ...]
    responses: tuple[Response, ...]

    @property
    def correctness_rate(self) -> float:
        """The share of correct responses, in [0, 1]."""
        return len(self.right) / len(self.responses)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that all rows of the question share."""
        return {
            "question": self.question.id,
            "task": self.question.task,
            "labels": self.question.labels,
            "gold": self.question.gold,
            "prompt": self.prompt,
            "correctness_rate": self.correctness_rate,
        }

    @property
    def right(self) -> tuple[Response, ...]:
        """The correct responses."""
        return tuple(response for response in self.responses if response.correct)

    @property
    def wrong(self) -> tuple[Response, ...]:
        """The incorrect responses, with or without a label."""
        return tuple(response for response in self.responses if not response.correct)


def sft_rows(group: AnsweredQuestion, settings: AskSettings) -> Iterator[SftRow]:
    """Yield a row for every correct response.

    The built-in teacher of the task `readings`, whose answers are numbers, adds rows that state a confidence and rows
    that judge an answer. A model that is trained on them can do both, even if it is trained from scratch.
    """
    correct = group.right
    if not settings.reasoning:
        correct = correct[:1]  # the rows of the others would have the same text
    for response in correct:
        yield _make_sft_row(group, response, settings)
    if settings.source == "readings":
        for response in correct:
            yield _stated_confidence_row(group, response, settings)
        yield from _correct_judgements(group, settings)


def _stated_confidence_row(group: AnsweredQuestion, response: Response, settings: AskSettings) -> SftRow:
    """Return a row of the `readings` task whose prompt also asks for a confidence, and whose response states one."""
    assert response.label is not None  # a correct response has a label
    prompt = render_messages(group.question, reasoning=settings.reasoning, confidence=True)
    (turn,) = _render_turn(response, settings)
    confidence = state_confidence(group.question, response.label, _judging_temperature(response))
    stated = Message(role="assistant", content=f"{turn.content}\n<confidence>{confidence}</confidence>")
    return SftRow(**group.columns | {"prompt": prompt}, completion=(stated,), label=response.label)


def _correct_judgements(group: AnsweredQuestion, settings: AskSettings) -> Iterator[SftRow]:
    """Yield a row for every answer, right or wrong, that the teacher of the `readings` task judges correctly.

    Like the other rows for SFT, these must be correct: here, it is the judgement that must be.
    """
    for response in group.responses:
        if response.label is None:
            continue
        temperature = _judging_temperature(response)
        is_judged_right = judge_sum(group.question, response.label, temperature, response.seed or 0)
        if is_judged_right == response.correct:
            yield judgement_row(group, response, settings)


def _judging_temperature(response: Response) -> float:
    """Return the temperature at which the teacher of the `readings` task judges a response and states its confidence.

    It is the temperature of the response. If that is 0 or not known, it is 1: no confidence is defined at 0.
    """
    return response.temperature or 1.0


def outcome_rows(group: AnsweredQuestion, settings: AskSettings) -> Iterator[SftRow]:
    """Yield a row for every response, right or wrong.

    For a question without options, the row judges the answer, and a response without an answer has no row.
    """
    for response in group.responses:
        if group.question.has_labels:
            yield _make_sft_row(group, response, settings)
        elif response.label is not None:
            yield judgement_row(group, response, settings)


def judgement_row(group: AnsweredQuestion, response: Response, settings: AskSettings) -> SftRow:
    """Return a row whose prompt asks whether a response's answer is right, and whose labels are True and False.

    The response must have an answer.
    """
    assert response.label is not None
    prompt = render_judgement(group.question, response.label, reasoning=settings.reasoning)
    right_label, wrong_label = JUDGEMENT_LABELS
    label = right_label if response.correct else wrong_label
    columns = group.columns | {"prompt": prompt, "labels": JUDGEMENT_LABELS, "gold": label}
    completion = (Message(role="assistant", content=render_completion(None, label)),)
    return SftRow(**columns, completion=completion, label=label)


def stream_rows(group: AnsweredQuestion, settings: AskSettings) -> Iterator[SftRow]:
    """Yield one row with the first response, right or wrong, and the votes of all responses.

    The votes are the share of each label among the responses with a label; None if there are no such responses.

    Raises:
        ValueError: The question has no options.
    """
    if not group.question.has_labels:
        raise ValueError(f"question {group.question.id}: votes count labels, but the question has no options")
    row = _make_sft_row(group, group.responses[0], settings)
    yield row.model_copy(update={"votes": _count_votes(group)})


def _count_votes(group: AnsweredQuestion) -> dict[str, float] | None:
    labels = [response.label for response in group.responses if response.label is not None]
    if not labels:
        return None
    return {label: labels.count(label) / len(labels) for label in group.question.labels}


class ResponsePair(NamedTuple):
    """A correct response and a labelled wrong one to the same question."""

    chosen: Response
    rejected: Response


def preference_rows(group: AnsweredQuestion, settings: AskSettings) -> Iterator[PreferenceRow]:
    """Yield up to `pairs_per_question` pairs of a correct response and a wrong one with a label.

    There are none if the question has too few correct or wrong responses (`explain_no_pair`). The pairs are drawn at
    random without replacement, by sorting them by a hash, so they are the same on every machine.
    """
    if explain_no_pair(group, settings) is not None:
        return
    wrong_with_label = [response for response in group.wrong if response.label is not None]
    pairs = []
    for chosen in group.right:
        for rejected in wrong_with_label:
            pairs.append(ResponsePair(chosen, rejected))

    def random_key(pair: ResponsePair) -> str:
        return content_hash([settings.seed, group.question.id, pair.chosen.sample, pair.rejected.sample])

    pairs.sort(key=random_key)
    for pair in pairs[: settings.pairs_per_question]:
        yield PreferenceRow(
            **group.columns,
            chosen=_render_turn(pair.chosen, settings),
            rejected=_render_turn(pair.rejected, settings),
            chosen_label=pair.chosen.label or group.question.gold,  # always the first: a correct response has a label
            rejected_label=pair.rejected.label,
        )


def response_records(group: AnsweredQuestion, settings: AskSettings) -> Iterator[Response]:
    """Yield the responses unchanged."""
    return iter(group.responses)


Kind = Literal["sft", "preferences", "outcome", "stream"]
# Name of a file -> the function that yields the records of one question for it.
ROWS: dict[str, Callable[[AnsweredQuestion, AskSettings], Iterator[Record]]] = {
    "responses": response_records,
    "sft": sft_rows,
    "preferences": preference_rows,
    "outcome": outcome_rows,
    "stream": stream_rows,
}


def explain_no_pair(group: AnsweredQuestion, settings: AskSettings) -> str | None:
    """Return why a question gives no pairs; None if it gives some."""
    if not group.right:
        return "no correct"
    if len(group.right) < settings.min_correct:
        return f"fewer than {settings.min_correct} correct"
    if len(group.wrong) < settings.min_wrong:
        return f"fewer than {settings.min_wrong} wrong"
    if all(response.label is None for response in group.wrong):
        return "no wrong with a label"
    return None


def _make_sft_row(group: AnsweredQuestion, response: Response, settings: AskSettings) -> SftRow:
    return SftRow(**group.columns, completion=_render_turn(response, settings), label=response.label)


def _render_turn(response: Response, settings: AskSettings) -> tuple[Message, ...]:
    """Render the response in the canonical form, with a think block if the settings, and so the prompt, ask for one."""
    reasoning = None
    if settings.reasoning:
        reasoning = response.reasoning or ""
    return (Message(role="assistant", content=render_completion(reasoning, response.label)),)


# ---- the summary ----------------------------------------------------------------------------------------------------


class Yield(Record):
    """A summary of responses and of the rows made from them.

    Attributes:
        questions: Number of questions that were to be asked.
        answered: Number of questions with a response.
        responses: Number of responses.
        correct: Number of correct responses.
        unparsed: Number of responses without a label.
        kept: Number of questions that give pairs.
        dropped: Number of questions that give none, by reason.
        rates: Number of questions by correctness rate, rounded to one decimal.
        prompt_tokens: Number of tokens in all prompts; None if not reported.
        tokens: Number of tokens in all responses; None if not reported.
        rows: Number of rows by kind.
        examples: A few responses, with different verdicts if possible.
        refused: Number of refused requests.
        reasons: Why requests were refused, with counts.
        other_models: Number of replies by model, for replies from a different model than requested.
    """

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
    reasons: str = ""
    other_models: dict[str, int] = Field(default_factory=dict)

    def lines(self) -> list[str]:
        """Describe the summary in a few lines."""
        responses = f"{self.responses:,} responses to {self.answered:,} of {self.questions:,} questions"
        verdicts = f"{self.correct:,} correct, {self.unparsed:,} without a label"
        rates = ", ".join(f"{rate}: {count}" for rate, count in self.rates.items())
        lines = [
            f"{responses}; {verdicts}",
            f"{self.kept:,} questions give pairs; dropped: {_join_counts(self.dropped) or 'none'}",
            f"questions by share of correct responses: {rates}",
            f"tokens: {_show_count(self.prompt_tokens)} prompt, {_show_count(self.tokens)} generated",
            f"rows: {_join_counts(self.rows)}",
        ]
        if self.refused:
            refused = f"refused and left out: {self.refused:,} requests ({self.reasons})"
            lines.append(f"{refused}; --retry-refused asks again")
        if self.other_models:
            names = ", ".join(f"{count:,} from {name}" for name, count in self.other_models.items())
            lines.append(f"replies under a different model name than requested: {names}")
        for response in self.examples:
            text = " ".join(response.text.split())[:200]
            lines.append(f"question {response.question} sample {response.sample}, {_judge(response)}: {text}")
        return lines


def _join_counts(counts: Mapping[str, int]) -> str:
    """Return counts with their names, such as `51 sft, 5 preferences`; empty if there are none."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _show_count(count: int | None) -> str:
    return "not reported" if count is None else f"{count:,}"


def _judge(response: Response) -> str:
    if response.label is None:
        return "without a label"
    return "correct" if response.correct else "wrong"


class _YieldCounter:
    """Counts of the answered questions so far; `add` is called once per question."""

    def __init__(self, settings: AskSettings) -> None:
        self.settings = settings
        self.kept = 0
        self.dropped = Counter[str]()
        self.rates = Counter[str]()
        self.verdicts = Counter[str]()
        self.other_models = Counter[str]()
        self.reports_tokens = False
        self.prompt_tokens = 0
        self.tokens = 0
        self.first_responses: list[Response] = []
        self.first_of_verdict: dict[str, Response] = {}

    def add(self, group: AnsweredQuestion) -> None:
        """Count a question and its responses."""
        reason = explain_no_pair(group, self.settings)
        if reason is None:
            self.kept += 1
        else:
            self.dropped[reason] += 1
        self.rates[f"{group.correctness_rate:.1f}"] += 1
        missing_examples = EXAMPLES - len(self.first_responses)
        self.first_responses.extend(group.responses[:missing_examples])
        for response in group.responses:
            self._add_response(response)

    def _add_response(self, response: Response) -> None:
        verdict = _judge(response)
        self.verdicts[verdict] += 1
        self.first_of_verdict.setdefault(verdict, response)
        if self.settings.source == "server" and response.model != model_name(self.settings.model or ""):
            self.other_models[response.model] += 1
        if response.tokens is not None:
            self.reports_tokens = True
            self.tokens += response.tokens
            self.prompt_tokens += response.prompt_tokens or 0

    def choose_examples(self) -> tuple[Response, ...]:
        """Return the first response of each verdict, then the first of the other responses; at most `EXAMPLES`."""
        examples = list(self.first_of_verdict.values())
        for response in self.first_responses:
            if response not in self.first_of_verdict.values():
                examples.append(response)
        return tuple(examples[:EXAMPLES])


def count_yield(
    questions: Sequence[Question],
    groups: Iterable[AnsweredQuestion],
    settings: AskSettings,
    refused: Sequence[Refusal] = (),
) -> Yield:
    """Count responses, verdicts and questions that give pairs.

    Args:
        questions: All questions that were to be asked.
        groups: The questions with responses; read once, one after the other.
        settings: How the responses were sampled, and which questions give pairs.
        refused: The refused requests.

    Returns:
        The summary. Its `rows` are empty, since the function that writes the rows counts them.
    """
    counter = _YieldCounter(settings)
    for group in groups:
        counter.add(group)
    answered = counter.kept + counter.dropped.total()  # every question with responses is counted as one of the two
    dropped = dict(sorted(counter.dropped.items()))
    if len(questions) > answered:
        dropped["no responses"] = len(questions) - answered
    return Yield(
        questions=len(questions),
        answered=answered,
        responses=counter.verdicts.total(),
        correct=counter.verdicts["correct"],
        unparsed=counter.verdicts["without a label"],
        kept=counter.kept,
        dropped=dropped,
        rates=dict(sorted(counter.rates.items())),
        prompt_tokens=counter.prompt_tokens if counter.reports_tokens else None,
        tokens=counter.tokens if counter.reports_tokens else None,
        rows={},
        refused=len(refused),
        reasons=count_reasons(refused),
        other_models=dict(sorted(counter.other_models.items())),
        examples=counter.choose_examples(),
    )
