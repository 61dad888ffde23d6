"""Where generations are kept while they arrive: a line each, written at once, below a header that names the recipe.

A request that was refused for good has a line too, a `Refusal`, so that a restart does not ask it again. When all have
come, refusals go into a file of their own and `generations.jsonl` holds generations alone.

Ask the teacher for every response, keep each as it arrives; then read them and write the rows.

Asking costs money and time, reading nothing. So what came is kept as it came, in `generations.jsonl`, and another
parser or another way to pick pairs reads that file again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Literal, NamedTuple, Self, TypeVar

from pydantic import ValidationError

from catto import files
from catto.answers import VERSION
from catto.engines import Generation, Key, Request
from catto.engines.replies import RefusalCap
from catto.files import (
    MAX_LINE_BYTES,
    first_problem,
    library_versions,
    manifest_path,
    read_manifest,
    read_records,
    replacing,
    write_manifest,
    write_records,
)
from catto.problems import DataError
from catto.prompts import messages, parse_answer
from catto.recipe import TeacherSettings
from catto.records import SCHEMA_VERSION, Manifest, Message, Question, Record, Refusal, Response, content_hash
from catto.teacher.pairing import (
    Answered,
    Estimate,
    Yield,
    estimate,
    grouped,
    outcome_rows,
    preference_rows,
    sft_rows,
    summarise,
)
from catto.teacher.sources import Source, StoredResponses, open_source

# ---- store


GENERATIONS, REFUSED, PART = "generations.jsonl", "refused.jsonl", "generations.part.jsonl"

OTHER_RECIPE = "belongs to other settings or questions: give those, or use a new folder"
Places = dict[Key, tuple[int, int]]  # (question, sample) -> offset, length
_REFUSED = b'{"refused":'  # how a refusal's line begins; a generation's never does


R = TypeVar("R", Generation, Refusal)


class Index(NamedTuple):
    """What a part file holds: where each generation stands, the refusals, and where the last whole line ends."""

    places: Places
    refused: dict[Key, Refusal]
    end: int


def locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the folder for this process; a second run is refused."""
    return files.locked(folder / ".lock")


class PartFile:
    """The generations so far, by key, in order of arrival. The first line is a header with the recipe's hash.

    Only the places of the lines are held in memory. A last line without its newline was being written when the run
    was killed: it is cut off, its response was never stored.
    """

    def __init__(self, path: Path, recipe_hash: str, expected: Container[Key]) -> None:
        self.path = path
        path.touch()
        self.places, self.refused, self._end = index(path, recipe_hash, expected)
        self._file: IO[bytes] = path.open("r+b", buffering=0)
        self._file.truncate(self._end)
        self._file.seek(self._end)
        if self._end == 0:
            self._write(json.dumps(_header(recipe_hash)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, outcome: Generation | Refusal) -> None:
        """Store a generation or a refusal; once this returns, killing the process does not lose it."""
        key = outcome.question, outcome.sample
        if key in self.places or key in self.refused:
            raise ValueError(f"question {key[0]} sample {key[1]} is stored already")
        start, line = self._end, outcome.model_dump_json()
        if len(line.encode()) >= MAX_LINE_BYTES:  # a restart could not read it back
            why = f"the response is longer than {MAX_LINE_BYTES // 2**20} MB"
            outcome = Refusal(refused=why, question=key[0], sample=key[1])
            line = outcome.model_dump_json()
        self._write(line)
        if isinstance(outcome, Refusal):
            self.refused[key] = outcome
        else:
            self.places[key] = start, self._end - start

    @property
    def stored(self) -> int:
        """How many requests have come to an end."""
        return len(self.places) + len(self.refused)

    def generations(self, order: Iterable[Key]) -> Iterator[Generation]:
        """Yield the stored generations in the given order; keys that were never stored are left out."""
        with self.path.open("rb") as file:
            for key in order:
                if key in self.places:
                    offset, length = self.places[key]
                    file.seek(offset)
                    yield Generation.model_validate_json(file.read(length))

    def _write(self, text: str) -> None:
        line = text.encode() + b"\n"
        written = 0
        while written < len(line):
            written += self._file.write(line[written:])
        self._end += len(line)


def _header(recipe_hash: str) -> dict[str, object]:
    return {"kind": "generations", "schema_version": SCHEMA_VERSION, "recipe_hash": recipe_hash}


def index(path: Path, recipe_hash: str, expected: Container[Key]) -> Index:
    """Check a part file's whole lines and say what it holds; one of other settings without a generation is empty."""
    found = Index({}, {}, 0)
    for row, line in enumerate(_whole_lines(path), 1):
        if row == 1:
            if not _is_header(path, line, recipe_hash):
                return found
        elif line.startswith(_REFUSED):
            refusal = _checked(path, row, line, Refusal, found, expected)
            found.refused[refusal.key] = refusal
        else:
            generation = _checked(path, row, line, Generation, found, expected)
            found.places[generation.key] = found.end, len(line)
        found = found._replace(end=found.end + len(line))
    return found


def _is_header(path: Path, line: bytes, recipe_hash: str) -> bool:
    """Whether the header is this recipe's; another's is an error if there are generations below it."""
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if header == _header(recipe_hash):
        return True
    ours = isinstance(header, dict) and header.keys() == _header("").keys()
    below = (line for row, line in enumerate(_whole_lines(path), 1) if row > 1)
    if not ours or any(not line.startswith(_REFUSED) for line in below):
        raise DataError(path, 1, OTHER_RECIPE)
    return False


def _checked(path: Path, row: int, line: bytes, kind: type[R], found: Index, expected: Container[Key]) -> R:
    try:
        outcome = kind.model_validate_json(line)
    except ValidationError as error:
        raise DataError(path, row, first_problem(error)) from None
    key = outcome.question, outcome.sample
    if key in found.places or key in found.refused:
        raise DataError(path, row, f"question {key[0]} sample {key[1]} is stored twice")
    if key not in expected:
        raise DataError(path, row, f"question {key[0]} sample {key[1]} was not asked")
    return outcome


def _whole_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that end in a newline."""
    with path.open("rb") as file:
        row = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            row += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(path, row, f"line is longer than {MAX_LINE_BYTES // 2**20} MB")
            if line.endswith(b"\n"):
                yield line


def refusals(folder: Path) -> list[Refusal]:
    """The requests that a folder of responses, finished or not, holds as refused."""
    if manifest_path(folder / GENERATIONS).exists():
        return list(read_records(folder / REFUSED, Refusal)) if (folder / REFUSED).exists() else []
    lines = _whole_lines(folder / PART) if (folder / PART).exists() else ()
    return [Refusal.model_validate_json(line) for line in lines if line.startswith(_REFUSED)]


def forget_refusals(folder: Path) -> None:
    """Make a folder of responses one in which nothing was refused: the next run asks those requests again.

    A finished folder gets its part file back, and loses the manifests of what was made without the missing responses. A
    kill leaves the folder as it was, or a part file to go on from.
    """
    if not refusals(folder):
        return
    part, whole = folder / PART, folder / GENERATIONS
    finished = manifest_path(whole).exists()
    with replacing(part) as file:
        if finished:
            file.write(json.dumps(_header(read_manifest(whole).recipe_hash or "")) + "\n")
        lines = _whole_lines(whole if finished else part)
        file.writelines(line.decode() for line in lines if not line.startswith(_REFUSED))
    for path in sorted(
        folder.glob("*.manifest.json")
    ):  # the generations' own last: without it the folder is unfinished
        if path != manifest_path(whole):
            path.unlink()
    manifest_path(whole).unlink(missing_ok=True)


# ---- collect


Progress = Callable[[int, int], None]
RESPONSES = "responses.jsonl"
Kind = Literal["sft", "preferences", "outcome"]
ROWS: dict[Kind, Callable[[Iterable[Answered], TeacherSettings], Iterator[Record]]] = {
    "sft": sft_rows,
    "preferences": preference_rows,
    "outcome": outcome_rows,
}


def teach(
    questions: Iterable[Question],
    source: Source | None,
    settings: TeacherSettings,
    out: Path,
    progress: Progress | None = None,
    *,
    retry_refused: bool = False,
) -> Yield:
    """Ask for n responses to every training question and write the rows made of them, all in `out`.

    `ask`, then `write_rows`. `progress(done, total)` counts responses.
    """
    training = training_questions(questions)
    ask(training, source, settings, out, progress, retry_refused=retry_refused)
    return write_rows(training, settings, out / GENERATIONS, out)


def ask(
    questions: Iterable[Question],
    source: Source | None,
    settings: TeacherSettings,
    out: Path,
    progress: Progress | None = None,
    *,
    retry_refused: bool = False,
) -> None:
    """Collect n responses to every training question, unread, into `out`/generations.jsonl with its manifest.

    A killed run goes on from generations.part.jsonl and asks only for what is missing; a finished one asks nothing.
    `source` None: the one that the settings name, opened only if something is to be asked.

    Requests that the server refuses for good go into refused.jsonl with the reason and are left out; `retry_refused`
    asks them again. Too many of them (`settings.max_refused`) raise ServerError.
    """
    training = training_questions(questions)
    with locked(out):
        recipe = recipe_hash(training, source, settings)
        if retry_refused:
            forget_refusals(out)
        if not _finished(out / GENERATIONS, recipe):
            _collect(training, source or open_source(settings, training), settings, out, recipe, progress)
        (out / PART).unlink(missing_ok=True)


def write_rows(
    questions: Iterable[Question],
    settings: TeacherSettings,
    generations: Path,
    out: Path,
    kinds: Iterable[Kind] = tuple(ROWS),
) -> Yield:
    """Read the file that `ask` wrote and write responses.jsonl and, of each kind, the rows: sft.jsonl and so on.

    Each file has its manifest, and one that stands already and was made of the same by the same parser is left alone.
    """
    training = training_questions(questions)
    with locked(out):
        recipe = content_hash([read_manifest(generations).recipe_hash, VERSION])
        if not _same(out / RESPONSES, recipe):
            _write_responses(training, settings, generations, out / RESPONSES, recipe)
        rows: dict[str, int] = {kind: _write_rows(kind, training, settings, out, recipe) for kind in kinds}
        return summarise(training, _answered(training, out), settings, rows, refusals(generations.parent))


def dry_run(
    questions: Iterable[Question],
    source: Source | None,
    settings: TeacherSettings,
    out: Path | None = None,
    *,
    retry_refused: bool = False,
) -> Estimate:
    """Count what `ask` would still ask, without asking or writing."""
    training = training_questions(questions)
    recipe = recipe_hash(training, source, settings)
    keys: set[Key] = set()
    refused: set[Key] = set()
    if out is not None and _finished(out / GENERATIONS, recipe):
        refused = {refusal.key for refusal in refusals(out)}
        keys = set(_keys(training, settings)) - refused
    elif out is not None and (out / PART).exists():
        stored = index(out / PART, recipe, set(_keys(training, settings)))
        keys, refused = set(stored.places), set(stored.refused)
    refused = set() if retry_refused else refused
    return estimate(training, settings, *(Counter(question for question, _ in part) for part in (keys, refused)))


def training_questions(questions: Iterable[Question]) -> list[Question]:
    """The questions of the train split, which alone are asked; none or a repeated id is an error."""
    training = [question for question in questions if question.split == "train"]
    repeated = [name for name, count in Counter(question.id for question in training).items() if count > 1]
    if repeated:
        raise ValueError(f"question id {repeated[0]!r} stands more than once")
    if not training:
        raise ValueError("no question of the train split")
    return training


def recipe_hash(training: Sequence[Question], source: Source | None, settings: TeacherSettings) -> str:
    """Hash what determines the responses: the questions as they are put, the model, how it is sampled."""
    digest = hashlib.sha256()
    for question in training:
        digest.update(question.model_dump_json().encode())
        digest.update(repr(messages(question, reasoning=settings.reasoning)).encode())
    model = settings.model or (source.model if source is not None else settings.source)
    # Stored responses are read with their given labels when they are taken in: that needs no teacher.
    parser = VERSION if settings.source == "responses" else None
    return content_hash([settings.asked(), model, digest.hexdigest(), parser])


def draw(settings: TeacherSettings, question: str, sample: int) -> tuple[float, int]:
    """Temperature, uniform in the settings' range, and seed (31 bits) of a sample; by hash, so order is nothing."""
    digest = content_hash([settings.seed, question, sample], 64)
    low, high = settings.temperature
    return round(low + (high - low) * int(digest[:13], 16) / 16**13, 4), int(digest[13:21], 16) >> 1


class Requests(Sequence[Request]):
    """The requests of a run, question by question, made when they are read: a million of them take no room."""

    def __init__(self, training: Sequence[Question], settings: TeacherSettings) -> None:
        self.training, self.settings = training, settings
        self._prompt: tuple[str, tuple[Message, ...]] = ("", ())  # of the question last read: its samples share it

    def __len__(self) -> int:
        return len(self.training) * self.settings.n

    def __getitem__(self, place: int | slice) -> Request | list[Request]:  # type: ignore[override]
        if isinstance(place, slice):
            return [self.at(i) for i in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self.at(place % len(self))

    def at(self, place: int) -> Request:
        """The request at a place, 0 <= place < len."""
        question, sample = self.training[place // self.settings.n], place % self.settings.n
        if self._prompt[0] != question.id:
            self._prompt = question.id, messages(question, reasoning=self.settings.reasoning)
        temperature, seed = draw(self.settings, question.id, sample)
        return Request(
            question=question.id,
            sample=sample,
            messages=self._prompt[1],
            temperature=temperature,
            seed=seed,
            max_tokens=self.settings.max_tokens,
        )


def _keys(training: Sequence[Question], settings: TeacherSettings) -> Iterator[Key]:
    return ((question.id, sample) for question in training for sample in range(settings.n))


def _finished(path: Path, recipe: str) -> bool:
    """Whether the records and their manifest stand; those of another recipe are refused."""
    if not (path.exists() and manifest_path(path).exists()):
        return False
    if read_manifest(path).recipe_hash != recipe:
        raise DataError(path, None, OTHER_RECIPE)
    return True


def _same(path: Path, recipe: str) -> bool:
    """Whether the records stand and were made of the same."""
    return path.exists() and manifest_path(path).exists() and read_manifest(path).recipe_hash == recipe


def _collect(
    training: Sequence[Question],
    source: Source,
    settings: TeacherSettings,
    out: Path,
    recipe: str,
    progress: Progress | None,
) -> None:
    requests = Requests(training, settings)
    with PartFile(out / PART, recipe, set(_keys(training, settings))) as part:
        cap = RefusalCap(settings.max_refused, part.places, part.refused)
        for outcome in source.generate(requests, {*part.places, *part.refused}):
            part.append(outcome)
            if isinstance(outcome, Refusal):
                cap.refused(outcome)
            else:
                cap.answered(outcome.key)
            if progress is not None:
                progress(part.stored, len(requests))
        RefusalCap.check_some(len(part.places), part.refused.values())
        if part.stored < len(requests) and not isinstance(source, StoredResponses):
            raise RuntimeError(f"{source.name}: {len(requests) - part.stored} requests were never answered")
        order = list(_keys(training, settings))
        _write_refused([part.refused[key] for key in order if key in part.refused], out / REFUSED)
        counts = {
            "generations": write_records(out / GENERATIONS, part.generations(order)),
            "refused": len(part.refused),
        }
    # Whether temperature and seed of each response are those that were drawn for it.
    notes = {"source": source.name, "drawn": not isinstance(source, StoredResponses), **getattr(source, "notes", {})}
    _manifest(out / GENERATIONS, "generations", counts, settings, recipe, notes)


def _write_refused(refused: Sequence[Refusal], path: Path) -> None:
    """Write what was refused; no file is nothing refused."""
    if refused:
        write_records(path, refused)
    else:
        path.unlink(missing_ok=True)


def _response(question: Question, generation: Generation, settings: TeacherSettings, drawn: bool) -> Response:
    """Read a generation's reasoning and label. Reasoning in the text goes before what the server returned apart."""
    parsed = parse_answer(generation.text, question, cut=generation.finish_reason == "length")
    temperature, seed = draw(settings, question.id, generation.sample) if drawn else (None, None)
    return Response(
        question=question.id,
        sample=generation.sample,
        text=generation.text,
        reasoning=parsed.reasoning or generation.reasoning,
        label=parsed.label,
        correct=parsed.label == question.gold,
        model=generation.model,
        temperature=temperature,
        temperature_acts=generation.temperature_acts,
        seed=seed,
        prompt_tokens=generation.prompt_tokens,
        tokens=generation.tokens,
        token_ids=generation.token_ids,
        mean_logprob=generation.mean_logprob,
        finish_reason=generation.finish_reason,
        seconds=generation.seconds,
    )


def _write_responses(
    training: Sequence[Question], settings: TeacherSettings, generations: Path, path: Path, recipe: str
) -> None:
    by_id = {question.id: question for question in training}
    made = read_manifest(generations)
    counts: Counter[str] = Counter(responses=0, correct=0, unparsed=0, temperature_ignored=0, other_model=0)
    counts["refused"] = made.counts["refused"]

    def counted() -> Iterator[Response]:
        for generation in read_records(generations, Generation):
            response = _response(by_id[generation.question], generation, settings, made.notes["drawn"])
            counts["responses"] += 1
            counts["correct"] += response.correct
            counts["unparsed"] += response.label is None
            counts["temperature_ignored"] += not response.temperature_acts
            counts["other_model"] += settings.source == "server" and response.model != settings.model
            yield response

    write_records(path, counted())
    _manifest(path, "responses", dict(counts), settings, recipe, {**made.notes, "parser": VERSION})


def _manifest(
    path: Path, kind: str, counts: dict[str, int], settings: TeacherSettings, recipe: str, notes: dict[str, object]
) -> None:
    versions = library_versions("openai", "pydantic", "transformers", "torch")
    manifest = Manifest(
        kind=kind, counts=counts, recipe_hash=recipe, seed=settings.seed, versions=versions, notes=notes
    )
    write_manifest(path, manifest)


def _answered(training: Sequence[Question], out: Path) -> Iterator[Answered]:
    return grouped(training, read_records(out / RESPONSES, Response))


def _write_rows(kind: Kind, training: Sequence[Question], settings: TeacherSettings, out: Path, recipe: str) -> int:
    """Write one file of rows unless it stands already; return how many rows it has."""
    path, recipe = out / f"{kind}.jsonl", content_hash([recipe, settings.picked()])
    if _same(path, recipe):
        return read_manifest(path).counts["rows"]
    count = write_records(path, ROWS[kind](_answered(training, out), settings))
    _manifest(path, kind, {"rows": count, "questions": len(training)}, settings, recipe, settings.picked())
    return count
