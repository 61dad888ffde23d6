"""Ask the teacher for every response and keep each as it arrives; then read the responses and write the rows.

Asking costs money and time, reading costs nothing. So generations are kept as they came, in `generations.jsonl`, and
another parser or another choice of pairs reads that file again. While a run lasts they are in a `Journal`: a run that
was killed asks only for what is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from catto import files
from catto.answer.forms import VERSION
from catto.answer.response import parse_answer
from catto.engines import Engine, Generation, Request
from catto.engines.replies import RefusalCap
from catto.files import locked, manifest_path, read_manifest, read_records
from catto.journal import Journal, journal_path, read_refusals
from catto.prompts import asked_hash, check_ids, messages
from catto.recipe import TeacherSettings
from catto.records import Key, Manifest, Question, Record, Refusal, Response, content_hash
from catto.teacher.pairing import ROWS, AnsweredQuestion, Kind, Yield, count_yield
from catto.teacher.sources import StoredResponses, open_source

GENERATIONS, REFUSED, LOCK = "generations.jsonl", "refused.jsonl", ".lock"
OTHER_RECIPE = "belongs to other settings or questions: give those, or use a new folder"
# English text has about four characters a token in the usual vocabularies; good to some 20 %.
CHARACTERS_A_TOKEN = 4

FREE = {
    "witnesses": "the built-in teacher writes its responses here, without a model",
    "labels": "labels are drawn here, without a model",
    "responses": "the responses are read from a file",
}

Progress = Callable[[int, int], None]


def ask(
    questions: Iterable[Question],
    source: Engine | None,
    settings: TeacherSettings,
    out: Path,
    progress: Progress | None = None,
) -> None:
    """Collect n responses to every training question, unread, into `out`/generations.jsonl with its manifest.

    A run that was killed resumes from generations.part.jsonl and asks only for what is missing; a finished one asks
    nothing. `source` None: the one that the settings name, opened only if something is to be asked.

    Requests that the server refuses for good go into refused.jsonl with the reason and are left out, until
    `forget_refusals`. Too many of them (`settings.max_refused`) raise ServerError. `progress(done, total)` counts
    responses.

    >>> import tempfile
    >>> from catto.tasks import load
    >>> settings, out = TeacherSettings(source="witnesses", n=4), Path(tempfile.mkdtemp())
    >>> questions = list(load("witnesses", "train", limit=5))
    >>> ask(questions, None, settings, out)
    >>> write_rows(questions, settings, out / GENERATIONS, out).rows["outcome"]
    20
    """
    training = training_questions(questions)
    with locked(out / LOCK):
        journal = _journal(training, source, settings, out)
        if not journal.finished():
            source, total = source or open_source(settings, training), len(journal.keys)
            with journal:
                cap = RefusalCap(settings.max_refused, journal.places.keys() - journal.refused.keys(), journal.refused)
                for outcome in source.generate(Requests(training, settings), set(journal.places)):
                    (outcome,) = journal.append(outcome)
                    cap.count(outcome)
                    if progress is not None:
                        progress(len(journal.places), total)
                answered = len(journal.places) - len(journal.refused)
                RefusalCap.check_some(answered, journal.refused.values())
                drawn = not isinstance(source, StoredResponses)  # whether each has the temperature drawn for it
                if drawn and (missing := total - len(journal.places)):
                    raise RuntimeError(f"{source.name}: {missing} requests were never answered")
                counts = {"generations": answered, "refused": len(journal.refused)}
                notes = {"source": source.name, "drawn": drawn, **getattr(source, "notes", {})}
                journal.publish(_manifest("generations", counts, settings, journal.manifest.recipe_hash, notes))
        journal.remove()


def write_rows(
    questions: Iterable[Question],
    settings: TeacherSettings,
    generations: Path,
    out: Path,
    kinds: Iterable[Kind] = ("sft", "preferences", "outcome"),
) -> Yield:
    """Read the file that `ask` wrote and write responses.jsonl and, of each kind, the rows: sft.jsonl and so on.

    All files are written in one pass over the generations, each with its manifest.
    """
    training, made, names = training_questions(questions), read_manifest(generations), ("responses", *kinds)
    paths = {name: out / f"{name}.jsonl" for name in names}
    tally: Counter[str] = Counter()  # records by file

    def written(outputs: Mapping[str, IO[str]]) -> Iterator[AnsweredQuestion]:
        """Write what each question gives into the files on the way to the summary."""
        stored = read_records(generations, Generation)
        for group in answered_questions(training, stored, settings, drawn=made.notes["drawn"]):
            for name, file in outputs.items():
                for record in ROWS[name](group, settings):
                    tally[name] += 1
                    file.write(files.json_line(record, paths[name], tally[name]))
            tally["temperature_ignored"] += sum(not response.temperature_acts for response in group.responses)
            yield group

    with locked(out / LOCK):
        with ExitStack() as stack:
            outputs = {name: stack.enter_context(files.replacing(path)) for name, path in paths.items()}
            summary = count_yield(training, written(outputs), settings, refusals(generations.parent))
        parsed = content_hash([made.recipe_hash, VERSION])
        counts = {
            **summary.model_dump(include={"responses", "correct", "unparsed"}),
            "temperature_ignored": tally["temperature_ignored"],
            "other_model": sum(summary.other_models.values()),
            "refused": made.counts["refused"],
        }
        manifest = _manifest("responses", counts, settings, parsed, {**made.notes, "parser": VERSION})
        files.write_manifest(paths["responses"], manifest)
        recipe = content_hash([parsed, settings.picked()])
        for kind in names[1:]:
            counts = {"rows": tally[kind], "questions": len(training)}
            files.write_manifest(paths[kind], _manifest(kind, counts, settings, recipe, settings.picked()))
    return summary.model_copy(update={"rows": {kind: tally[kind] for kind in names[1:]}})


def answered_questions(
    questions: Iterable[Question], generations: Iterable[Generation], settings: TeacherSettings, *, drawn: bool
) -> Iterator[AnsweredQuestion]:
    """Parse generations, sorted by question, and join them to their questions.

    Reasoning in the text goes before what the server returned apart. drawn: each has the temperature drawn for it.
    """
    by_id = {question.id: question for question in questions}
    for name, group in groupby(generations, key=lambda generation: generation.question):
        if name not in by_id:
            raise ValueError(f"response to question {name!r}, which is not among the questions")
        question, responses = by_id[name], []
        for generation in group:
            answer = parse_answer(generation.text, question, cut=generation.finish_reason == "length")
            temperature, seed = draw(settings, name, generation.sample) if drawn else (None, None)
            kept = generation.model_dump(exclude={"reasoning", "tops"}) | {"temperature": temperature, "seed": seed}
            reasoning, correct = answer.reasoning or generation.reasoning, answer.label == question.gold
            responses.append(Response(**kept, reasoning=reasoning, label=answer.label, correct=correct))
        yield AnsweredQuestion(question, messages(question, reasoning=settings.reasoning), tuple(responses))


def _manifest(
    kind: str, counts: dict[str, int], settings: TeacherSettings, recipe: str | None, notes: dict[str, Any]
) -> Manifest:
    versions = files.library_versions("httpx2", "pydantic", "transformers", "torch")
    return Manifest(kind=kind, counts=counts, recipe_hash=recipe, seed=settings.seed, versions=versions, notes=notes)


class Estimate(Record):
    """What is still to be asked. Tokens are estimates: see `lines`. free: why nothing is to be paid."""

    questions: int
    requests: int
    stored: int
    refused: int = 0
    prompt_tokens: int
    most_tokens: int
    free: str | None = None

    def lines(self) -> list[str]:
        """Describe it, and how it was estimated."""
        stored = f"{self.stored:,} responses are stored"
        stored += f", {self.refused:,} requests were refused" if self.refused else ""
        counts = f"{self.requests:,} requests for {self.questions:,} questions; {stored}"
        if self.free is not None:
            return [counts, f"free: {self.free}"]
        prompts = f"about {self.prompt_tokens:,} prompt tokens (characters / {CHARACTERS_A_TOKEN})"
        return [counts, prompts, f"at most {self.most_tokens:,} generated tokens (requests x max_tokens)"]


def dry_run(
    questions: Iterable[Question],
    source: Engine | None,
    settings: TeacherSettings,
    out: Path | None = None,
    *,
    retry_refused: bool = False,
) -> Estimate:
    """Count what `ask` would still ask, without asking or writing."""
    training = training_questions(questions)
    journal = _journal(training, source, settings, out or Path())
    stored, refused = set[Key](), set[Key]()
    if out is not None and journal.finished():
        refused = {refusal.key for refusal in refusals(out)}
        stored = journal.keys.keys() - refused
    elif out is not None:
        journal.read()
        refused = set(journal.refused)
        stored = journal.places.keys() - refused
    refused = set() if retry_refused else refused
    done = stored | refused
    left = Counter(key[0] for key in journal.keys if key not in done)
    prompts = ((question.id, messages(question, reasoning=settings.reasoning)) for question in training)
    characters = sum(left[name] * len(message.content) for name, prompt in prompts for message in prompt)
    return Estimate(
        questions=len(training),
        requests=left.total(),
        stored=len(stored),
        refused=len(refused),
        prompt_tokens=round(characters / CHARACTERS_A_TOKEN),
        most_tokens=left.total() * settings.max_tokens,
        free=FREE.get(settings.source or ""),
    )


def training_questions(questions: Iterable[Question]) -> list[Question]:
    """The questions of the train split, which alone are asked; none or a repeated id is an error."""
    training = [question for question in questions if question.split == "train"]
    check_ids(training)
    if not training:
        raise ValueError("no question of the train split")
    return training


def draw(settings: TeacherSettings, question: str, sample: int) -> tuple[float, int]:
    """Temperature, uniform in the settings' range, and seed (31 bits) of a sample, by hash: in any order."""
    digest = content_hash([settings.seed, question, sample], 64)
    low, high = settings.temperature
    return round(low + (high - low) * int(digest[:13], 16) / 16**13, 4), int(digest[13:21], 16) >> 1


@dataclass(frozen=True)
class Requests:
    """The requests of a run, question by question, made whenever they are read: a million of them take no memory."""

    training: Sequence[Question]
    settings: TeacherSettings

    def __iter__(self) -> Iterator[Request]:
        for question in self.training:
            prompt = messages(question, reasoning=self.settings.reasoning)
            same: dict[str, Any] = {"question": question.id, "messages": prompt, "max_tokens": self.settings.max_tokens}
            for sample in range(self.settings.n):
                temperature, seed = draw(self.settings, question.id, sample)
                yield Request(**same, sample=sample, temperature=temperature, seed=seed)


def _journal(
    training: Sequence[Question], source: Engine | None, settings: TeacherSettings, out: Path
) -> Journal[Generation]:
    """The journal of the generations, named by what determines them: the prompts, the model, how it is sampled."""
    prompts = asked_hash((question, messages(question, reasoning=settings.reasoning)) for question in training)
    model = settings.model or (source.model if source is not None else settings.source)
    # Stored responses are read with their given labels when they are taken in: that needs no teacher.
    parser = VERSION if settings.source == "responses" else None
    keys = ((question.id, sample) for question in training for sample in range(settings.n))
    return _opened(out, content_hash([settings.asked(), model, prompts, parser]), keys)


def _opened(folder: Path, recipe: str | None, keys: Iterable[Key] = ()) -> Journal[Generation]:
    manifest, path = Manifest(kind="generations", counts={}, recipe_hash=recipe), folder / GENERATIONS
    return Journal(path, Generation, manifest, keys, refused=folder / REFUSED, other=OTHER_RECIPE)


def refusals(folder: Path) -> list[Refusal]:
    """The requests that a folder of responses, finished or not, holds as refused."""
    finished = manifest_path(folder / GENERATIONS).exists()
    return read_refusals(folder / REFUSED if finished else journal_path(folder / GENERATIONS))


def forget_refusals(folder: Path) -> None:
    """Turn a folder of responses into one in which nothing was refused: the next run asks those requests again.

    A kill leaves the folder as it was, or a journal to resume from.
    """
    if refusals(folder):
        _opened(folder, None).reopen(refusals=False)
