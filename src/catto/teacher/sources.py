"""Rows of a dataset: a file, a folder of files, or a dataset of the Hugging Face hub.

Where responses come from: an engine, a teacher that needs no model, or a dataset of responses that exists.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from catto.engines import Generation, Key, Request
from catto.engines.places import is_hub_id
from catto.files import SUFFIXES, kind, read_rows
from catto.problems import DataError
from catto.prompts import completion, messages, parse_answer
from catto.recipe import ResponseFields, TeacherSettings
from catto.records import Question, Refusal

# ---- tables


class Row(NamedTuple):
    """One row, and where it stands (rows count from 1)."""

    place: str | Path
    number: int
    values: dict[str, Any]

    def error(self, message: str) -> DataError:
        """An error at this row."""
        return DataError(self.place, self.number, message)


def read_table(place: str) -> Iterator[Row]:
    """Yield the rows of a file, of a folder's files in order of name, or of a hub dataset's train split."""
    path = Path(place)
    if not path.exists() and not kind(path) and "/" in place and is_hub_id(place):
        yield from _hub(place)
        return
    files = sorted(file for file in path.iterdir() if kind(file)) if path.is_dir() else [path]
    if not files:
        raise DataError(path, None, f"no {', '.join(SUFFIXES)} file in this folder")
    for file in files:
        for number, values in read_rows(file):
            yield Row(file, number, values)


def _hub(name: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(name, None, "reading the hub needs datasets: pip install 'catto[train]'") from None
    try:
        rows = load_dataset(name, split="train")
    except Exception as error:  # the hub's errors share no class
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(name, None, f"neither a file nor a hub dataset within reach: {reason}") from None
    for number, values in enumerate(rows, 1):
        yield Row(name, number, dict(values))


# ---- sources


class Source(Protocol):
    """What `teach` needs of a teacher: the generating half of an engine."""

    name: str
    model: str

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation | Refusal]:
        """Yield one outcome for every request whose key is not in `done`, in any order, as they arrive."""
        ...


def open_source(settings: TeacherSettings, questions: Sequence[Question]) -> Source:
    """Open the source that the settings name."""
    if settings.source == "server":
        from catto.engines.server import ServerEngine

        return ServerEngine(
            settings.base_url or "",
            settings.model or "",
            api_key_env=settings.api_key_env,
            concurrency=settings.concurrency,
            timeout=settings.timeout,
            deadline=settings.deadline,
            max_retries=settings.retries,
            extra_body=settings.extra_body,
        )
    if settings.source == "transformers":
        from catto.engines.transformers import TransformersEngine

        return TransformersEngine.load(settings.model or "", batch_size=settings.concurrency)
    if settings.source == "witnesses":
        return WitnessTeacher(questions)
    if settings.source == "labels":
        return LabelTeacher(questions)
    if settings.source == "responses":
        return StoredResponses(settings.responses or "", settings.fields, questions)
    raise ValueError("source: the settings name none, and none was given")


class WitnessTeacher:
    """The embedded world's teacher: draws its label from the true posterior at the request's temperature."""

    name = model = "witnesses"

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = {question.id: question for question in questions}

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield one response a request, in order."""
        from catto.tasks.witnesses import respond

        for request in requests:
            if request.key not in done:
                question = self._questions[request.question]
                reasoning, label = respond(question, request.temperature, request.seed)
                text = completion(reasoning, label)
                yield Generation(question=request.question, sample=request.sample, text=text, model=self.model)


class LabelTeacher:
    """Draws every label with equal probability, for answer-first tasks: there a response is a label and its tags.

    n draws a question give right and wrong answers without a model, so rows and pairs cost nothing and the pairs carry
    no information beyond the gold label.
    """

    name = model = "labels"

    def __init__(self, questions: Sequence[Question]) -> None:
        # Sorted, since the order in which the options are listed must not change what is drawn.
        self._labels = {question.id: sorted(question.labels) for question in questions}

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield one response a request, in order; the label depends on the request's seed alone."""
        for request in requests:
            if request.key not in done:
                label = random.Random(request.seed).choice(self._labels[request.question])
                text = completion(None, label)
                yield Generation(question=request.question, sample=request.sample, text=text, model=self.model)


class StoredResponses:
    """An existing dataset of responses. Samples are numbered as they stand, unless a column numbers them.

    Rows of questions that are not asked, and rows beyond the n-th of a question, are left out and counted in `notes`.
    A question is found by its id or by its text. By text, letters mean nothing unless the options stand in the same
    order, so the whole user's message has to match; where the labels are words, the question's own fields suffice.
    """

    def __init__(self, place: str, fields: ResponseFields, questions: Sequence[Question]) -> None:
        self.name, self.model, self.fields = f"responses {Path(place).name}", place, fields
        self._questions = _by_text(questions) if fields.prompt else {question.id: question for question in questions}
        self._stored: dict[Key, Generation] = {}
        self._next: Counter[str] = Counter()
        self._unknown = 0
        for row in read_table(place):
            self._add(row)
        if not self._stored:
            raise DataError(place, None, f"none of its {self._unknown} rows answers a question asked here")

    @property
    def notes(self) -> dict[str, int]:
        """What was found and left out."""
        return {"rows_found": len(self._stored), "rows_of_other_questions": self._unknown}

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the stored responses that are asked for."""
        for request in requests:
            if request.key not in done and request.key in self._stored:
                yield self._stored[request.key]

    def _add(self, row: Row) -> None:
        wanted = _text(row, self.fields.question or self.fields.prompt or "")
        question = self._questions.get(_plain(wanted) if self.fields.prompt else wanted)
        if question is None:
            self._unknown += 1
            return
        sample = self._sample(row, question)
        if (question.id, sample) in self._stored:
            raise row.error(f"question {question.id} sample {sample} stands twice")
        model = _text(row, self.fields.model) if self.fields.model else self.model
        text, reasoning = self._response(row, question)
        self._stored[question.id, sample] = Generation(
            question=question.id, sample=sample, text=text, reasoning=reasoning, model=model
        )

    def _sample(self, row: Row, question: Question) -> int:
        if self.fields.sample is None:
            self._next[question.id] += 1
            return self._next[question.id] - 1
        text = _text(row, self.fields.sample)
        if not text.isdecimal():
            raise row.error(f"{self.fields.sample}: expected a number from 0, got {text[:40]!r}")
        return int(text)

    def _response(self, row: Row, question: Question) -> tuple[str, str | None]:
        """Text and reasoning; a given label is put into the one form, and must agree with the text."""
        text = _text(row, self.fields.text) if self.fields.text else ""
        reasoning = _text(row, self.fields.reasoning) if self.fields.reasoning else None
        if self.fields.label is None:
            return text, reasoning
        label = _text(row, self.fields.label).strip()
        if label not in question.labels:
            raise row.error(f"{self.fields.label} {label[:40]!r} is not one of {', '.join(question.labels)}")
        parsed = parse_answer(text, question)
        if parsed.label not in (None, label):
            raise row.error(f"{self.fields.label} is {label}, the text answers {parsed.label}")
        return completion(reasoning or parsed.reasoning, label), reasoning


def _text(row: Row, field: str) -> str:
    value: Any = row.values.get(field)
    if value is None or not isinstance(value, str | int):
        what = "missing" if value is None else f"expected text, got {type(value).__name__}"
        raise row.error(f"{field}: {what}")
    return str(value)


def _by_text(questions: Sequence[Question]) -> dict[str, Question]:
    """Normalised text -> question; a text that two questions share finds neither."""
    pairs = [(text, question) for question in questions for text in _texts(question)]
    shared = Counter(text for text, _ in pairs)
    return {text: question for text, question in pairs if shared[text] == 1}


def _texts(question: Question) -> set[str]:
    texts = {_plain(messages(question)[-1].content)}
    if all(option.text in ("", option.label) for option in question.options):
        texts.add(_plain("\n".join(question.fields.values())))
    return texts


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
