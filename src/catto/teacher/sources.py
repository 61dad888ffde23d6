"""Where responses come from: an engine, a teacher that needs no model, or a dataset of existing responses."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from catto.answer.response import parse_answer
from catto.engines import Engine, Generation, Key, Request, is_hub_id
from catto.errors import DataError, data_errors_at
from catto.formats.columns import text_of
from catto.io.tables import read_hub, read_rows
from catto.io.text_files import SUFFIXES, find_suffix
from catto.prompts import render_completion, render_messages
from catto.recipe.settings import ResponseFields
from catto.records import Question
from catto.redaction import secret_texts
from catto.tasks.readings import respond_with_sum
from catto.tasks.witnesses import respond
from catto.teacher.sampling import AskSettings


def open_source(settings: AskSettings, questions: Sequence[Question], *, may_be_empty: bool = False) -> Engine:
    """Open the source of responses that the settings name.

    Args:
        settings: Settings of the teacher.
        questions: The questions that will be asked.
        may_be_empty: Only for stored responses: whether they are allowed to answer none of the questions.

    Returns:
        An engine, of which only `generate` is used.

    Raises:
        ValueError: The settings name no source, or source `transformers` without a model.
        DataError: Stored responses cannot be read, or answer none of the questions.
    """
    if settings.source is None:
        raise ValueError("source: neither the settings nor the caller names one")
    match settings.source:
        case "server":
            from catto.engines.server import ServerEngine

            body = settings.body_to_send()
            # The settings refuse source `server` without `base_url` and `model`; `or ""` is for the type checker.
            return ServerEngine(
                settings.base_url or "",
                settings.model or "",
                max_retries=settings.retries,
                api_key_env=settings.api_key_env,
                concurrency=settings.concurrency,
                timeout=settings.timeout,
                deadline=settings.deadline,
                extra_body=body,
                extra_secrets=tuple(secret_texts(settings.extra_body, body)),  # removed from error messages
            )
        case "transformers":
            from catto.engines.transformers import TransformersEngine

            if settings.model is None:
                raise ValueError("model: needed for source transformers")
            return TransformersEngine.load(settings.model, batch_size=settings.concurrency)
        case "witnesses" | "readings" | "labels":
            return BuiltInTeacher(settings.source, questions)
        case "responses":
            return StoredResponses(settings.responses or "", settings.fields, questions, may_be_empty=may_be_empty)


class BuiltInTeacher(Engine):
    """A teacher that needs no model.

    The teachers `witnesses` and `readings`, each for the generated task of the same name, draw answers from their true
    posterior at the request's temperature. The teacher `labels`, for training without reasoning, draws every label with
    equal probability. Several draws per question give right and wrong answers, so rows and pairs cost nothing. The
    pairs of `labels` carry no information beyond the gold label.
    """

    def __init__(self, name: str, questions: Sequence[Question]) -> None:
        self.name = name
        self.model = name
        self._questions = {question.id: question for question in questions}

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield one response per request, in order."""
        for request in requests:
            if request.key in done:
                continue
            text = self._write_response(request)
            yield Generation(question=request.question, sample=request.sample, text=text, model=self.model)

    def _write_response(self, request: Request) -> str:
        question = self._questions[request.question]
        if self.name == "witnesses":
            reasoning, label = respond(question, request.temperature, request.seed)
            return render_completion(reasoning, label)
        if self.name == "readings":
            reasoning, answer = respond_with_sum(question, request.temperature, request.seed)
            return render_completion(reasoning, answer)
        # Sorted, since what is drawn must not depend on the order in which the options are listed.
        label = random.Random(request.seed).choice(sorted(question.labels))
        return render_completion(None, label)


class StoredResponses(Engine):
    """An existing dataset of responses. Samples are numbered in the order of the rows, unless a column numbers them.

    A row is matched to its question by the question's id or text. If the labels are letters, the text must be the whole
    user message, since letters mean nothing if the options are in a different order. If the labels are words, the
    question's fields suffice. Rows for questions that are not asked are left out and counted in `notes`. A row whose
    sample is not requested is left out too: if `n` samples are requested, the sample must be below `n`.
    """

    def __init__(
        self, place: str, fields: ResponseFields, questions: Sequence[Question], *, may_be_empty: bool = False
    ) -> None:
        """Read the responses to the questions.

        Args:
            place: A file, a folder of files, or the id of a hub dataset.
            fields: The columns of the dataset.
            questions: The questions that are asked.
            may_be_empty: Whether the dataset is allowed to answer none of them.

        Raises:
            DataError: A row cannot be read, or no row answers one of the questions.
        """
        self.name = f"responses {Path(place).name}"
        self.model = place
        self.fields = fields
        if fields.prompt:
            self._questions = _index_by_text(questions)
        else:
            self._questions = {question.id: question for question in questions}
        self._stored: dict[Key, Generation] = {}
        rows_of_other_questions = self._read_responses(place)
        if not self._stored and not may_be_empty:
            message = f"none of its {rows_of_other_questions} rows answers a question that is asked"
            raise DataError(place, None, message)
        # For the manifest of the generations, in which `ask` stores these notes.
        self.notes = {"rows_found": len(self._stored), "rows_of_other_questions": rows_of_other_questions}

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the stored responses to the requests."""
        for request in requests:
            if request.key not in done and request.key in self._stored:
                yield self._stored[request.key]

    def _read_responses(self, place: str) -> int:
        """Store the responses to the questions; return the number of rows for other questions."""
        samples: Counter[str] = Counter()  # number of rows so far, by question
        rows_of_other_questions = 0
        for source, number, row in read_table(place):
            with data_errors_at(source, number):
                question = self._find_question(row)
                if question is None:
                    rows_of_other_questions += 1
                    continue
                generation = self._read_generation(row, question, samples[question.id])
                samples[question.id] += 1
                if generation.key in self._stored:
                    raise ValueError(f"{generation.name} occurs twice")
                self._stored[generation.key] = generation
        return rows_of_other_questions

    def _find_question(self, row: Mapping[str, Any]) -> Question | None:
        if self.fields.prompt:
            text = _get_text(self.fields.prompt, row)
            return self._questions.get(_fold_text(text))
        question_id = _get_text(self.fields.question or "", row)
        return self._questions.get(question_id)

    def _read_generation(self, row: Mapping[str, Any], question: Question, position: int) -> Generation:
        """Read one response; if a column contains its label, its text is rendered anew with that label.

        The text in such a dataset may be only the reasoning, or empty. The parser needs the label in its answer tag.

        Args:
            row: The row.
            question: The question that it answers.
            position: Number of earlier rows for the question; the number of the sample if no column numbers samples.

        Returns:
            The response, with the name of the dataset as its model if no column names the model.

        Raises:
            ValueError: A field is missing or not as expected, or the text answers a different label than the column.
        """
        fields = self.fields
        sample = position
        if fields.sample is not None:
            sample = self._read_sample(fields.sample, row)
        model = self.model
        if fields.model:
            model = _get_text(fields.model, row)
        text = ""  # without a column of texts, there is a column of labels
        if fields.text:
            text = _get_text(fields.text, row)
        reasoning = None
        if fields.reasoning:
            reasoning = _get_text(fields.reasoning, row)
        if fields.label is not None:
            label = self._read_label(fields.label, row, question)
            parsed = parse_answer(text, question)
            has_different_label = parsed.label is not None and parsed.label != label
            if has_different_label:
                raise ValueError(f"{fields.label} is {label}, but the text answers {parsed.label}")
            text = render_completion(reasoning or parsed.reasoning, label)
        return Generation(question=question.id, sample=sample, text=text, reasoning=reasoning, model=model)

    @staticmethod
    def _read_sample(name: str, row: Mapping[str, Any]) -> int:
        number = _get_text(name, row)
        if not number.isdecimal():
            raise ValueError(f"{name}: expected a number from 0, got {number[:40]!r}")
        return int(number)

    @staticmethod
    def _read_label(name: str, row: Mapping[str, Any], question: Question) -> str:
        label = _get_text(name, row).strip()
        if label not in question.labels:
            raise ValueError(f"{name} {label[:40]!r} is not one of {', '.join(question.labels)}")
        return label


def _get_text(name: str, row: Mapping[str, Any]) -> str:
    """Return the field as text; ValueError for a float: an id that became 7.0 in a table would match no question."""
    if isinstance(row.get(name), float):
        raise ValueError(f"{name}: expected a text or a whole number, got {row[name]}")
    return text_of(name, row)


class ResponseTableRow(NamedTuple):
    """A row of a table: the file or dataset that it is from, its number from 1, and its fields."""

    source: str | Path
    number: int
    fields: Mapping[str, Any]


def read_table(place: str) -> Iterator[ResponseTableRow]:
    """Yield the rows of a file, of the files in a folder (sorted by name), or of a hub dataset's train split.

    Args:
        place: A path or the id of a hub dataset. A path that exists or ends like a file of rows is never taken for an
            id, so a misspelled file name is not looked up on the hub.

    Raises:
        DataError: There is no such file or dataset, the folder has no file that can be read, or a row cannot be read.
    """
    path = Path(place)
    is_local = path.exists() or find_suffix(path)
    if not is_local and "/" in place and is_hub_id(place):
        rows = read_hub(place, "neither a file nor a reachable hub dataset: {}", place, "train")
        for number, row in enumerate(rows, 1):
            yield ResponseTableRow(place, number, row)
        return
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if find_suffix(file))
    if not files:
        raise DataError(path, None, f"no {', '.join(SUFFIXES)} file in this folder")
    for file in files:
        for number, fields in read_rows(file):
            yield ResponseTableRow(file, number, fields)


def _index_by_text(questions: Sequence[Question]) -> dict[str, Question]:
    """Return the questions by the texts that name them: their user messages and, for word labels, their fields.

    Case and white space of the texts are normalised (`_fold_text`). A text that several questions share is left out,
    since it names none of them.
    """
    ids_of_text: dict[str, set[str]] = defaultdict(set)
    for question in questions:
        user_message = render_messages(question)[-1].content
        ids_of_text[_fold_text(user_message)].add(question.id)
        options_are_labels = all(option.text in ("", option.label) for option in question.options)
        if options_are_labels:  # the text need not list the options; this includes questions without options
            fields = "\n".join(question.fields.values())
            ids_of_text[_fold_text(fields)].add(question.id)
    question_of_id = {question.id: question for question in questions}
    index = {}
    for text, ids in ids_of_text.items():
        if len(ids) == 1:
            (question_id,) = ids
            index[text] = question_of_id[question_id]
    return index


def _fold_text(text: str) -> str:
    """Return a text without differences in case and white space: in lower case, with single spaces between words."""
    return " ".join(text.casefold().split())
