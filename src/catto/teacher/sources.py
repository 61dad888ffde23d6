"""Where responses come from: an engine, a teacher that needs no model, or a dataset of existing responses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from catto.answer.response import parse_answer
from catto.engines import Engine, Generation, Key, Request, is_hub_id
from catto.files import SUFFIXES, kind, read_hub, read_rows
from catto.logs import text_of
from catto.problems import DataError, locating
from catto.prompts import completion, messages
from catto.recipe import ResponseFields, TeacherSettings
from catto.records import Question
from catto.tasks.witnesses import respond


def open_source(settings: TeacherSettings, questions: Sequence[Question]) -> Engine:
    """Open the source that the settings name. A source is an engine of which only `generate` is used."""
    match settings.source:
        case "server":
            from catto.engines.server import ServerEngine

            asking = settings.model_dump(include={"api_key_env", "concurrency", "timeout", "deadline", "extra_body"})
            return ServerEngine(settings.base_url or "", settings.model or "", max_retries=settings.retries, **asking)
        case "transformers":
            from catto.engines.transformers import TransformersEngine

            return TransformersEngine.load(settings.model or "", batch_size=settings.concurrency)
        case "witnesses" | "labels":
            return BuiltInTeacher(settings.source, questions)
        case "responses":
            return StoredResponses(settings.responses or "", settings.fields, questions)
    raise ValueError("source: the settings name none, and none was given")


class BuiltInTeacher(Engine):
    """A teacher that needs no model.

    `witnesses` is the embedded world's, who draws from the true posterior at the request's temperature. `labels`, for
    answer-first tasks, draws every label with equal probability: n draws a question give right and wrong answers
    without a model, so rows and pairs cost nothing and the pairs carry no information beyond the gold label.
    """

    def __init__(self, name: str, questions: Sequence[Question]) -> None:
        self.name = self.model = name
        self._questions = {question.id: question for question in questions}

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield one response per request, in order."""
        for request in requests:
            if request.key not in done:
                question = self._questions[request.question]
                if self.name == "witnesses":
                    text = completion(*respond(question, request.temperature, request.seed))
                else:  # sorted, since the order in which the options are listed must not change what is drawn
                    text = completion(None, random.Random(request.seed).choice(sorted(question.labels)))
                yield Generation(question=request.question, sample=request.sample, text=text, model=self.model)


def _text(name: str, row: Mapping[str, Any]) -> str:
    """The field as text. An id that became a float in a table, 7.0 for 7, would answer no question."""
    if isinstance(row.get(name), float):
        raise ValueError(f"{name}: expected a text or a whole number, got {row[name]}")
    return text_of(name, row)


class StoredResponses(Engine):
    """An existing dataset of responses. Samples are numbered in the order of the rows, unless a column numbers them.

    Rows of questions that are not asked, and rows beyond the n-th of a question, are left out and counted in `notes`.
    A question is found by its id or by its text. By text, letters mean nothing unless the options have the same order,
    so the whole user message has to match; where the labels are words, the question's own fields suffice.
    """

    def __init__(self, place: str, fields: ResponseFields, questions: Sequence[Question]) -> None:
        self.name, self.model, self.fields = f"responses {Path(place).name}", place, fields
        known = _by_text(questions) if fields.prompt else {question.id: question for question in questions}
        self._stored: dict[Key, Generation] = {}
        samples: Counter[str] = Counter()
        unknown = 0
        for source, number, row in read_table(place):
            with locating(source, number):
                name = _text(fields.question or fields.prompt or "", row)
                question = known.get(_folded(name) if fields.prompt else name)
                if question is None:
                    unknown += 1
                    continue
                generation = self._generation(row, question, samples[question.id])
                samples[question.id] += 1
                if generation.key in self._stored:
                    raise ValueError(f"{generation.name} occurs twice")
                self._stored[generation.key] = generation
        if not self._stored:
            raise DataError(place, None, f"none of its {unknown} rows answers a question asked here")
        self.notes = {"rows_found": len(self._stored), "rows_of_other_questions": unknown}

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the stored responses that are asked for."""
        for request in requests:
            if request.key not in done and request.key in self._stored:
                yield self._stored[request.key]

    def _generation(self, row: Mapping[str, Any], question: Question, sample: int) -> Generation:
        """Read one response; a given label is put into the one form, and must agree with the text."""
        fields = self.fields
        if fields.sample is not None:
            number = _text(fields.sample, row)
            if not number.isdecimal():
                raise ValueError(f"{fields.sample}: expected a number from 0, got {number[:40]!r}")
            sample = int(number)
        model = _text(fields.model, row) if fields.model else self.model
        text = _text(fields.text, row) if fields.text else ""
        reasoning = _text(fields.reasoning, row) if fields.reasoning else None
        if fields.label is not None:
            label = _text(fields.label, row).strip()
            if label not in question.labels:
                raise ValueError(f"{fields.label} {label[:40]!r} is not one of {', '.join(question.labels)}")
            parsed = parse_answer(text, question)
            if parsed.label not in (None, label):
                raise ValueError(f"{fields.label} is {label}, the text answers {parsed.label}")
            text = completion(reasoning or parsed.reasoning, label)
        return Generation(question=question.id, sample=sample, text=text, reasoning=reasoning, model=model)


def read_table(place: str) -> Iterator[tuple[str | Path, int, Mapping[str, Any]]]:
    """Yield (source, row number, row) of a file, of a folder's files by name, or of a hub dataset's train split."""
    path = Path(place)
    if not path.exists() and not kind(path) and "/" in place and is_hub_id(place):
        rows = read_hub(place, "neither a file nor a hub dataset within reach: {}", place, "train")
        yield from ((place, number, row) for number, row in enumerate(rows, 1))
        return
    files = sorted(file for file in path.iterdir() if kind(file)) if path.is_dir() else [path]
    if not files:
        raise DataError(path, None, f"no {', '.join(SUFFIXES)} file in this folder")
    for file in files:
        yield from ((file, number, row) for number, row in read_rows(file))


def _by_text(questions: Sequence[Question]) -> dict[str, Question]:
    """Folded text -> question; a text that two questions share finds neither."""
    pairs: set[tuple[str, str]] = set()
    for question in questions:
        pairs.add((_folded(messages(question)[-1].content), question.id))
        if all(option.text in ("", option.label) for option in question.options):
            pairs.add((_folded("\n".join(question.fields.values())), question.id))
    shared, by_id = Counter(text for text, _ in pairs), {question.id: question for question in questions}
    return {text: by_id[name] for text, name in pairs if shared[text] == 1}


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
