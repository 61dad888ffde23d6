"""Ask the teacher for every response and store each as it arrives; then parse the responses and write the rows.

Asking costs money and time, parsing costs nothing. So generations are stored unparsed, in `generations.jsonl`. If the
parser or the choice of pairs changes, this file is only read again. During a run, generations are in a `Journal`, so
that a run that was killed asks only for what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Any, NamedTuple

from catto.answer import forms
from catto.answer.response import find_answer_text, parse_answer
from catto.answer.short_answers import is_right_answer
from catto.engines import Engine, Generation, Request
from catto.engines.replies import RefusalCap
from catto.io import atomic, record_files
from catto.io.atomic import hold_lock
from catto.io.journal import Journal, journal_path, read_refusals
from catto.io.record_files import manifest_path, read_manifest, read_records
from catto.prompts import asked_hash, check_ids, render_messages
from catto.recipe.settings import TeacherSettings
from catto.records import Key, Manifest, Question, Record, Refusal, Response, content_hash
from catto.teacher.pairing import ROWS, AnsweredQuestion, Kind, Yield, count_yield
from catto.teacher.sampling import AskSettings
from catto.teacher.sources import StoredResponses, open_source

GENERATIONS = "generations.jsonl"
REFUSED = "refused.jsonl"
LOCK = ".lock"
OTHER_RECIPE = "belongs to other settings or questions: use those, or a new folder"
# English text has about four characters per token in the usual vocabularies; accurate to about 20 %.
CHARACTERS_PER_TOKEN = 4

# Source -> why asking it costs nothing.
FREE = {
    "witnesses": "the built-in teacher writes its responses here, without a model",
    "readings": "the built-in teacher writes its responses here, without a model",
    "labels": "labels are drawn here, without a model",
    "responses": "the responses are read from a file",
}

# Called with the number of outcomes so far, which are responses and refusals, and the total.
Progress = Callable[[int, int], None]


# ---- asking ---------------------------------------------------------------------------------------------------------


def ask(
    questions: Iterable[Question],
    source: Engine | None,
    settings: AskSettings,
    out: Path,
    progress: Progress | None = None,
    *,
    may_be_empty: bool = False,
) -> None:
    """Collect `settings.n` responses to every question, unparsed, in `out`/generations.jsonl with a manifest.

    A run that was killed resumes from generations.part.jsonl and asks only for what is missing. If the run is finished,
    nothing is asked. Requests that the server refuses permanently are written to refused.jsonl with the reason, and are
    not sent again until `forget_refusals` is called.

    Args:
        questions: The questions, from any split.
        source: The engine to ask. None means the source that the settings name, which is opened only if a response is
            missing.
        settings: Settings of the teacher, or the `ModelSampling` of a trained model, which is then the `source`.
        out: The folder to write to.
        progress: Called with the number of outcomes so far, refusals included, and the total; None reports nothing.
        may_be_empty: Only for a source of stored responses: whether it is allowed to have none for these questions. For
            example, a file may have responses to the training questions only. If not allowed, this is an error.

    Raises:
        ValueError: There are no questions, two have the same id, or there is no source.
        ServerError: Too many requests are refused (`settings.max_refused`), or all of them.
        DataError: `out` contains responses for other settings or questions. Or a source of stored responses cannot be
            read, or answers none of the questions.
        RuntimeError: The engine left requests unanswered.

    >>> import tempfile
    >>> from catto.tasks import load_questions
    >>> settings = TeacherSettings(source="witnesses", n=4)
    >>> out = Path(tempfile.mkdtemp())
    >>> questions = list(load_questions("witnesses", "train", limit=5))
    >>> ask(questions, None, settings, out)
    >>> write_rows(questions, settings, out / GENERATIONS, out).rows["outcome"]
    20
    """
    asked = check_questions(questions)
    with hold_lock(out / LOCK):
        journal = _make_journal(asked, source, settings, out)
        if not journal.finished():
            if source is None:
                source = open_source(settings, asked, may_be_empty=may_be_empty)
            with journal:
                _ask_missing(journal, source, Requests(asked, settings), progress)
                _publish_generations(journal, source, settings)
        journal.remove()  # a run that was killed while publishing leaves its journal


def _ask_missing(journal: Journal[Generation], source: Engine, requests: Requests, progress: Progress | None) -> None:
    """Send the requests that are not in the journal yet, and store their outcomes: responses and refusals.

    Raises:
        ServerError: Too many requests are refused.
    """
    answered = journal.places.keys() - journal.refused.keys()
    cap = RefusalCap(requests.settings.max_refused, answered, journal.refused)
    for outcome in source.generate(requests, set(journal.places)):
        (stored,) = journal.append(outcome)  # a response that is too long is stored as a refusal
        cap.count(stored)
        if progress is not None:
            progress(len(journal.places), len(journal.keys))


def _publish_generations(journal: Journal[Generation], source: Engine, settings: AskSettings) -> None:
    """Write the generations, the refusals and the manifest.

    Raises:
        ServerError: Every request was refused.
        RuntimeError: The source left requests unanswered.
    """
    answered = len(journal.places) - len(journal.refused)
    RefusalCap.require_answers(answered, journal.refused.values())
    # Stored responses were not sampled with the temperature and seed drawn for a request, and some may be missing.
    is_drawn = not isinstance(source, StoredResponses)
    missing = len(journal.keys) - len(journal.places)
    if is_drawn and missing:
        raise RuntimeError(f"{source.name}: {missing} requests were never answered")
    manifest = _make_manifest(
        "generations",
        counts={"generations": answered, "refused": len(journal.refused)},
        settings=settings,
        recipe=journal.manifest.recipe_hash,
        # `write_rows` reads `drawn`. Only `StoredResponses` has notes of its own: which of its rows were used.
        notes={"source": source.name, "drawn": is_drawn, **getattr(source, "notes", {})},
    )
    journal.publish(manifest)


@dataclass(frozen=True)
class Requests:
    """The requests of a run, question by question. They are made during iteration, so a million need no memory."""

    questions: Sequence[Question]
    settings: AskSettings

    def __iter__(self) -> Iterator[Request]:
        for question in self.questions:
            prompt = render_messages(question, reasoning=self.settings.reasoning)
            for sample in range(self.settings.n):
                sampling = draw_sampling(self.settings, question.id, sample)
                yield Request(
                    question=question.id,
                    sample=sample,
                    messages=prompt,
                    temperature=sampling.temperature,
                    seed=sampling.seed,
                    max_tokens=self.settings.max_tokens,
                )


class DrawnSampling(NamedTuple):
    """The temperature and the seed that were drawn for one response."""

    temperature: float
    seed: int


def draw_sampling(settings: AskSettings, question: str, sample: int) -> DrawnSampling:
    """Draw the temperature and the seed of a sample.

    Both come from a hash, so they do not depend on the order of the requests.

    Args:
        settings: The range of temperatures, and the seed of the run.
        question: The id of the question.
        sample: The number of the sample.

    Returns:
        A temperature, uniform in the settings' range and rounded to four decimals, and a seed from 0 to 2^31 - 1.
    """
    digest = content_hash([settings.seed, question, sample], 64)  # hexadecimal
    temperature_digits = digest[:13]  # 52 bits, which a float represents exactly
    seed_digits = digest[13:21]
    low, high = settings.temperature
    fraction = int(temperature_digits, 16) / 16**13  # in [0, 1)
    temperature = low + (high - low) * fraction
    seed = int(seed_digits, 16) >> 1  # 32 bits to 31
    return DrawnSampling(round(temperature, 4), seed)


def check_questions(questions: Iterable[Question]) -> list[Question]:
    """Return the questions as a list; ValueError if there is none or an id repeats."""
    listed = list(questions)
    check_ids(listed)
    if not listed:
        raise ValueError("no question to ask")
    return listed


# ---- reading --------------------------------------------------------------------------------------------------------


def write_rows(
    questions: Iterable[Question],
    settings: AskSettings,
    generations: Path,
    out: Path,
    kinds: Iterable[Kind] = ("sft", "preferences", "outcome"),
) -> Yield:
    """Parse the generations that `ask` wrote; write responses.jsonl and a file of rows of each kind, such as sft.jsonl.

    All files are written in one pass over the generations, each with a manifest.

    Args:
        questions: The questions that were asked.
        settings: The settings that `ask` was called with.
        generations: The file that `ask` wrote.
        out: The folder to write to.
        kinds: The kinds of rows; responses.jsonl is always written.

    Returns:
        A summary of the responses and the rows.

    Raises:
        ValueError: There are no questions, two have the same id, or a response belongs to none of the questions.
        DataError: The file or its manifest cannot be read.
    """
    asked = check_questions(questions)
    generations_manifest = read_manifest(generations)
    row_kinds = tuple(kinds)
    paths = {name: out / f"{name}.jsonl" for name in ("responses", *row_kinds)}
    with hold_lock(out / LOCK):
        answered = answered_questions(
            asked,
            read_records(generations, Generation),
            settings,
            drawn=generations_manifest.notes["drawn"],  # whether `ask` drew the temperature and seed of each response
        )
        with ExitStack() as stack:
            outputs: dict[str, IO[str]] = {}
            for name, path in paths.items():
                outputs[name] = stack.enter_context(atomic.replace_file(path))
            writer = _RowWriter(settings, paths, outputs)
            # This is a generator: it writes the records of a question when `count_yield` asks for the question.
            written_questions = writer.write_questions(answered)
            summary = count_yield(asked, written_questions, settings, refusals(generations.parent))
        # The manifests come last: only now do the files have their final names.
        _write_manifests(generations_manifest, summary, writer, questions=len(asked))
    rows = {kind: writer.written[kind] for kind in row_kinds}
    return summary.model_copy(update={"rows": rows})


@dataclass
class _RowWriter:
    """Writes the records of each question to the open files, and counts them.

    Attributes:
        settings: How the responses were sampled, and how rows are chosen from them.
        paths: Name of a file -> its path.
        outputs: Name of a file -> the open file.
        written: Name of a file -> number of records in it.
        temperature_ignored: Number of responses from servers that are known to ignore the temperature.
    """

    settings: AskSettings
    paths: Mapping[str, Path]
    outputs: Mapping[str, IO[str]]
    written: Counter[str] = field(default_factory=Counter)
    temperature_ignored: int = 0

    def write_questions(self, answered: Iterable[AnsweredQuestion]) -> Iterator[AnsweredQuestion]:
        """Write the records of each question with its responses, then yield it."""
        for answered_question in answered:
            for name, file in self.outputs.items():
                for record in ROWS[name](answered_question, self.settings):
                    self.written[name] += 1
                    file.write(record_files.json_line(record, self.paths[name], self.written[name]))
            for response in answered_question.responses:
                if not response.temperature_acts:
                    self.temperature_ignored += 1
            yield answered_question


def _write_manifests(generations_manifest: Manifest, summary: Yield, writer: _RowWriter, *, questions: int) -> None:
    """Write a manifest for every file that the writer wrote.

    The recipe hash in a manifest covers what the file depends on: for responses the generations and the parser, for
    rows also the settings that choose them.

    Args:
        generations_manifest: The manifest of the generations.
        summary: The counts of the responses.
        writer: The writer of the files.
        questions: Number of questions that were to be asked.
    """
    settings = writer.settings
    parser_version = forms.VERSION
    responses_hash = content_hash([generations_manifest.recipe_hash, parser_version])
    rows_hash = content_hash([responses_hash, settings.row_settings()])
    for name, path in writer.paths.items():
        if name == "responses":
            manifest = _make_manifest(
                name,
                counts={
                    "responses": summary.responses,
                    "correct": summary.correct,
                    "unparsed": summary.unparsed,
                    "temperature_ignored": writer.temperature_ignored,
                    "other_model": sum(summary.other_models.values()),
                    "refused": generations_manifest.counts["refused"],
                },
                settings=settings,
                recipe=responses_hash,
                notes={**generations_manifest.notes, "parser": parser_version},
            )
        else:
            manifest = _make_manifest(
                name,
                counts={"rows": writer.written[name], "questions": questions},
                settings=settings,
                recipe=rows_hash,
                notes=settings.row_settings(),
            )
        record_files.write_manifest(path, manifest)


def _make_manifest(
    kind: str, *, counts: dict[str, int], settings: AskSettings, recipe: str | None, notes: dict[str, Any]
) -> Manifest:
    versions = record_files.library_versions("httpx2", "pydantic", "transformers", "torch")
    return Manifest(kind=kind, counts=counts, recipe_hash=recipe, seed=settings.seed, versions=versions, notes=notes)


def answered_questions(
    questions: Iterable[Question], generations: Iterable[Generation], settings: AskSettings, *, drawn: bool
) -> Iterator[AnsweredQuestion]:
    """Parse the generations and join them to their questions.

    Args:
        questions: The questions that were asked.
        generations: The generations; those of one question must be next to each other.
        settings: How the responses were sampled.
        drawn: Whether each generation was sampled with the temperature and seed that were drawn for its request. If
            not, as in an existing dataset, the temperature and seed of the responses are None.

    Yields:
        Each question that has generations, in the order of the generations.

    Raises:
        ValueError: A generation belongs to none of the questions.
    """
    question_of_id = {question.id: question for question in questions}
    for question_id, group in groupby(generations, key=lambda generation: generation.question):
        if question_id not in question_of_id:
            raise ValueError(f"response to question {question_id!r}, which is not among the questions")
        question = question_of_id[question_id]
        responses = []
        for generation in group:
            sampling = None
            if drawn:
                sampling = draw_sampling(settings, question_id, generation.sample)
            responses.append(_parse_generation(generation, question, sampling))
        prompt = render_messages(question, reasoning=settings.reasoning)
        yield AnsweredQuestion(question, prompt, tuple(responses))


def _parse_generation(generation: Generation, question: Question, sampling: DrawnSampling | None) -> Response:
    """Read the answer of a generation, and compare it with the question's.

    Reasoning in the text takes precedence over reasoning that the engine returned separately. If the answers are short
    texts, the `label` of the response is the text of its answer.

    Args:
        generation: The generation.
        question: Its question.
        sampling: The temperature and seed that it was sampled with; None if they are not known.
    """
    is_cut = generation.finish_reason == "length"  # the token limit was reached, so the last line may be incomplete
    answer = parse_answer(generation.text, question, cut=is_cut)
    has_short_answer = question.grade is not None
    if has_short_answer:
        label = find_answer_text(generation.text, cut=is_cut)
        correct = label is not None and is_right_answer(label, question)
    else:
        label = answer.label
        correct = label == question.gold
    # A `Response` has no probabilities of tokens (`tops`); its reasoning is set below.
    columns = generation.model_dump(exclude={"reasoning", "tops"})
    return Response(
        **columns,
        temperature=None if sampling is None else sampling.temperature,
        seed=None if sampling is None else sampling.seed,
        reasoning=answer.reasoning or generation.reasoning,
        label=label,
        correct=correct,
    )


# ---- estimating -----------------------------------------------------------------------------------------------------


class Estimate(Record):
    """How many requests are still to be sent, and their size.

    Attributes:
        questions: Number of questions.
        requests: Number of requests that are still to be sent.
        stored: Number of stored responses.
        refused: Number of refused requests, which are not sent again.
        prompt_tokens: Estimated number of tokens in the prompts (see `lines`).
        most_tokens: Maximum number of generated tokens.
        free: Why asking costs nothing; None if a model is asked.
    """

    questions: int
    requests: int
    stored: int
    refused: int = 0
    prompt_tokens: int
    most_tokens: int
    free: str | None = None

    def lines(self) -> list[str]:
        """Describe the estimate in a few lines, with the way it was computed."""
        stored = f"{self.stored:,} responses are stored"
        if self.refused:
            stored += f", {self.refused:,} requests were refused"
        counts = f"{self.requests:,} requests for {self.questions:,} questions; {stored}"
        if self.free is not None:
            return [counts, f"free: {self.free}"]
        prompts = f"about {self.prompt_tokens:,} prompt tokens (characters / {CHARACTERS_PER_TOKEN})"
        return [counts, prompts, f"at most {self.most_tokens:,} generated tokens (requests x max_tokens)"]


def dry_run(
    questions: Iterable[Question],
    source: Engine | None,
    settings: TeacherSettings,
    out: Path | None = None,
    *,
    retry_refused: bool = False,
) -> Estimate:
    """Count what `ask` would still ask, without asking or writing.

    Args:
        questions: The questions, from any split.
        source: The engine that would be asked; None means the source that the settings name, which is not opened.
        settings: Settings of the teacher.
        out: The folder that `ask` would write to; None means a new folder, without stored responses.
        retry_refused: Whether refused requests are sent again.

    Returns:
        The number of requests that are left, with estimates of their tokens.

    Raises:
        ValueError: There are no questions, or two have the same id.
        DataError: `out` contains responses for other settings or questions.
    """
    asked = check_questions(questions)
    journal = _make_journal(asked, source, settings, out or Path())  # without `out`, only the journal's keys are used
    stored = StoredKeys(answered=set(), refused=set())
    if out is not None:
        stored = _read_stored_keys(journal, out)
    refused = set() if retry_refused else stored.refused
    requests_left = Counter[str]()  # by question
    for key in journal.keys:
        if key not in stored.answered and key not in refused:
            question_id, _ = key
            requests_left[question_id] += 1
    characters = 0
    for question in asked:
        for message in render_messages(question, reasoning=settings.reasoning):
            characters += requests_left[question.id] * len(message.content)
    return Estimate(
        questions=len(asked),
        requests=requests_left.total(),
        stored=len(stored.answered),
        refused=len(refused),
        prompt_tokens=round(characters / CHARACTERS_PER_TOKEN),
        most_tokens=requests_left.total() * settings.max_tokens,
        free=FREE.get(settings.source or ""),
    )


class StoredKeys(NamedTuple):
    """The requests in a folder of responses: those with a response and those that were refused."""

    answered: set[Key]
    refused: set[Key]


def _read_stored_keys(journal: Journal[Generation], folder: Path) -> StoredKeys:
    """Return the requests that a folder has an outcome for, whether its run is finished or not."""
    if journal.finished():
        refused = {refusal.key for refusal in refusals(folder)}
        return StoredKeys(answered=journal.keys.keys() - refused, refused=refused)
    journal.read()
    refused = set(journal.refused)
    return StoredKeys(answered=journal.places.keys() - refused, refused=refused)


# ---- the files of a run ---------------------------------------------------------------------------------------------


def _make_journal(
    questions: Sequence[Question], source: Engine | None, settings: AskSettings, out: Path
) -> Journal[Generation]:
    """Make the journal of the generations; its recipe hash covers the prompts, the model and how it is sampled.

    Args:
        questions: The questions that are asked.
        source: The engine that is asked; None means the source that the settings name.
        settings: How responses are sampled. The model that they name takes precedence over that of `source`.
        out: The folder of the journal.
    """
    prompts_hash = _hash_prompts(questions, reasoning=settings.reasoning)
    if settings.model:
        model: str | None = settings.model
    elif source is not None:
        model = source.model
    else:
        model = settings.source
    # Responses from an existing dataset are parsed before they are stored, so they also depend on the parser. Reading
    # them again costs nothing.
    is_parsed_when_read = settings.source == "responses"
    parser_version = forms.VERSION if is_parsed_when_read else None
    recipe = content_hash([settings.response_settings(), model, prompts_hash, parser_version])
    return _journal_in(out, recipe, _request_keys(questions, settings.n))


def _hash_prompts(questions: Iterable[Question], *, reasoning: bool) -> str:
    """Hash the questions and the messages that ask them, regardless of their split.

    Every question is hashed with the split "train": no response depends on the split, and the journals and manifests of
    earlier runs contain this hash.
    """
    as_training = (question.model_copy(update={"split": "train"}) for question in questions)
    return asked_hash((question, render_messages(question, reasoning=reasoning)) for question in as_training)


def _request_keys(questions: Sequence[Question], samples: int) -> Iterator[Key]:
    for question in questions:
        for sample in range(samples):
            yield question.id, sample


def _journal_in(folder: Path, recipe: str | None, keys: Iterable[Key] = ()) -> Journal[Generation]:
    manifest = Manifest(kind="generations", counts={}, recipe_hash=recipe)
    path = folder / GENERATIONS
    return Journal(path, Generation, manifest, keys, refused=folder / REFUSED, other_run_error=OTHER_RECIPE)


def refusals(folder: Path) -> list[Refusal]:
    """Return the refused requests in a folder of responses, whether its run is finished or not."""
    is_finished = manifest_path(folder / GENERATIONS).exists()
    if is_finished:
        return read_refusals(folder / REFUSED)
    return read_refusals(journal_path(folder / GENERATIONS))


def forget_refusals(folder: Path) -> None:
    """Forget the refused requests in a folder of responses, so that the next run sends them again.

    If the process is killed meanwhile, the folder is unchanged or has a journal from which the next run resumes.
    """
    if refusals(folder):
        _journal_in(folder, None).reopen(refusals=False)
