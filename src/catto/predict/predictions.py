"""A file of generations or predictions while it grows: whole chunks are appended, a killed run goes on behind them.

While it grows, a request that the server refused has a line in its place, a `Refusal`. At the end refusals go into
`<name>.refused.jsonl`, and the file itself holds none.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Generic, Self, TypeVar

from pydantic import ValidationError

from catto.answers import VERSION
from catto.engines import Generation
from catto.files import (
    first_problem,
    hold,
    json_line,
    library_versions,
    manifest_path,
    read_lines,
    read_manifest,
    read_records,
    write_manifest,
    write_records,
)
from catto.problems import DataError
from catto.prompts import messages
from catto.records import Manifest, Prediction, Question, Refusal, content_hash

R = TypeVar("R", Generation, Prediction)
_REFUSED = b'{"refused":'  # how a refusal's line begins; no other record's does
OTHER_RUN = "belongs to other settings, questions or another model: give those, or another file"


@dataclass(frozen=True)
class Run:
    """What determines generations besides the questions. `chunk`: questions that are generated and scored together."""

    engine: str
    model: str
    temperatures: tuple[float, ...]  # one a sample
    seed: int
    max_tokens: int
    reasoning: bool
    chunk: int

    @property
    def k(self) -> int:
        """Samples a question."""
        return len(self.temperatures)

    def hash(self, questions: Sequence[Question], kind: type[Generation] | type[Prediction]) -> str:
        """Hash the settings, the questions as they are put and, of predictions, the parser's version."""
        digest = hashlib.sha256()
        for question in questions:
            digest.update(question.model_dump_json().encode())
            digest.update(repr(messages(question, reasoning=self.reasoning)).encode())
        return content_hash([asdict(self), digest.hexdigest(), VERSION if kind is Prediction else None])


def check_settings(path: Path, settings: Mapping[str, object]) -> None:
    """Refuse the finished file of a run with other settings, as far as they are known before the model is loaded."""
    if manifest_path(path).exists():
        notes = read_manifest(path).notes
        for name, value in settings.items():
            if name in notes and notes[name] != value:
                raise DataError(path, None, f"was made with {name} {notes[name]!r}, not {value!r}: {OTHER_RUN}")


class ChunkFile(Generic[R]):
    """`predictions.jsonl` in the making, as `predictions.part.jsonl` with a manifest that names the run.

    Chunks are appended whole and in order. A chunk that a kill has torn is cut off and made again, with the same
    batches and so the same numbers. At the end the file is renamed and gets its manifest, in this order.
    """

    def __init__(self, path: Path, kind: type[R], questions: Sequence[Question], run: Run) -> None:
        self.path, self.run, self.questions = path, run, len(questions)
        self.kind: type[R] = kind
        self.part = path.with_name(path.name.removesuffix(".jsonl") + ".part.jsonl")
        self.keys = [(question.id, sample) for question in questions for sample in range(run.k)]
        self.hash = run.hash(questions, kind)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_renamed():
            return self
        self._file = self.part.open("ab")
        try:
            hold(self._file, self.part)
            if self._is_anew():
                self._file.truncate(0)
                write_manifest(self.part, self._manifest({}))
            self._file.truncate(self._whole_bytes())
        except BaseException:
            self._file.close()
            raise
        return self

    def _is_anew(self) -> bool:
        """Whether the unfinished file is new, or another run's that stored no prediction; one that did is refused."""
        if not manifest_path(self.part).exists():
            if self.part.stat().st_size:
                raise DataError(self.part, None, "has no manifest beside it: move it away")
            return True
        if read_manifest(self.part).recipe_hash == self.hash:
            return False
        with self.part.open("rb") as file:
            if any(line.endswith(b"\n") and not line.startswith(_REFUSED) for line in file):
                raise DataError(self.part, None, OTHER_RUN)
        return True

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _is_renamed(self) -> bool:
        """Whether the finished file stands; one that is not this run's is refused."""
        if manifest_path(self.path).exists():
            self._check(self.path)
            return self.path.exists()
        if self.path.exists():
            if not manifest_path(self.part).exists():
                raise DataError(self.path, None, "has no manifest beside it: move it away")
            self._check(self.part)
            return True
        return False

    def _check(self, path: Path) -> None:
        if read_manifest(path).recipe_hash != self.hash:
            raise DataError(path, None, OTHER_RUN)

    def _whole_bytes(self) -> int:
        """Length of the whole chunks that are stored."""
        with self.part.open("rb") as file:
            lines = [len(line) for line in file if line.endswith(b"\n")]
        lines_a_chunk = self.run.chunk * self.run.k
        whole = len(lines) if len(lines) == len(self.keys) else len(lines) // lines_a_chunk * lines_a_chunk
        return sum(lines[:whole])

    def stored(self) -> list[R | Refusal]:
        """The outcomes so far, each at its place."""
        source = self.path if self._file is None else self.part
        found = self._merged() if self._file is None else list(self._outcomes())
        for row, (outcome, key) in enumerate(zip(found, self.keys, strict=False), 1):
            if (outcome.question, outcome.sample) != key:
                raise DataError(source, row, f"expected question {key[0]} sample {key[1]}")
        if len(found) > len(self.keys) or (self._file is None and len(found) < len(self.keys)):
            raise DataError(source, None, f"{len(found)} {self._named}, expected {len(self.keys)}")
        return found

    def _merged(self) -> list[R | Refusal]:
        """The finished file's records with the refusals at their places; a record wins over an older refusal."""
        found: list[R | Refusal] = list(read_records(self.path, self.kind))
        have = {(one.question, one.sample) for one in found}
        refused = {one.key: one for one in refusals_of(self.path) if one.key not in have}
        rest: Iterator[R | Refusal] = iter(found)
        merged: list[R | Refusal | None] = [refused[key] if key in refused else next(rest, None) for key in self.keys]
        placed: list[R | Refusal] = [one for one in merged if one is not None]
        placed.extend(rest)
        return placed

    def whole_chunks(self) -> int:
        """How many chunks are stored."""
        return -(-len(self.stored()) // (self.run.chunk * self.run.k))

    def append(self, chunk: Sequence[R | Refusal]) -> Sequence[R | Refusal]:
        """Store a chunk; once this returns, killing the process does not lose it."""
        assert self._file is not None
        self._file.write("".join(json_line(outcome, self.part, row) for row, outcome in enumerate(chunk, 1)).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        return chunk

    def finish(self, outcomes: Sequence[R | Refusal]) -> None:
        """Rename the file, or write it without its refusals, and write its manifest."""
        records, refused = parted(outcomes)
        if self._file is not None and refused:
            write_records(refused_path(self.path), refused)
            write_records(self.path, records)
        elif self._file is not None:
            self.part.replace(self.path)
        if not manifest_path(self.path).exists():
            counts = {self._named: len(records), "questions": self.questions, "refused": len(refused)}
            write_manifest(self.path, self._manifest({**counts, **_counts(records, self.run.model)}))
        self.part.unlink(missing_ok=True)
        manifest_path(self.part).unlink(missing_ok=True)

    def amend(self, outcomes: Sequence[R | Refusal]) -> None:
        """Write the finished file anew, after refused requests were asked again."""
        records, refused = parted(outcomes)
        self._file = None
        write_manifest(self.part, self._manifest({}))  # what a kill leaves is finished from here
        manifest_path(self.path).unlink()
        write_records(self.path, records)
        if refused:
            write_records(refused_path(self.path), refused)
        else:
            refused_path(self.path).unlink(missing_ok=True)
        self.finish(outcomes)

    @property
    def _named(self) -> str:
        return f"{self.kind.__name__.lower()}s"

    def _outcomes(self) -> Iterator[R | Refusal]:
        """The lines of the unfinished file."""
        for row, line in read_lines(self.part):
            kind: type[R] | type[Refusal] = Refusal if line.encode().startswith(_REFUSED) else self.kind
            try:
                yield kind.model_validate_json(line)
            except ValidationError as error:
                raise DataError(self.part, row, first_problem(error)) from None

    def _manifest(self, counts: dict[str, int]) -> Manifest:
        versions = library_versions("transformers", "torch", "vllm", "openai")
        notes = {**asdict(self.run), "k": self.run.k}
        if len(set(self.run.temperatures)) == 1:
            notes["temperature"] = self.run.temperatures[0]
        if self.kind is Prediction:
            notes["parser"] = VERSION
        return Manifest(
            kind=self._named,
            counts=counts,
            recipe_hash=self.hash,
            seed=self.run.seed,
            versions=versions,
            notes=notes,
        )


def refused_path(path: Path) -> Path:
    """Where refusals stand: `predictions.jsonl` -> `predictions.refused.jsonl`."""
    return path.with_name(path.name.removesuffix(".jsonl") + ".refused.jsonl")


def refusals_of(path: Path) -> list[Refusal]:
    """The refused requests of a finished file of predictions."""
    return list(read_records(refused_path(path), Refusal)) if refused_path(path).exists() else []


def parted(outcomes: Iterable[R | Refusal]) -> tuple[list[R], list[Refusal]]:
    """Records and refusals, each in order."""
    records: list[R] = []
    refused: list[Refusal] = []
    for outcome in outcomes:
        if isinstance(outcome, Refusal):
            refused.append(outcome)
        else:
            records.append(outcome)
    return records, refused


def _counts(records: Sequence[R], model: str) -> dict[str, int]:
    predictions = [record for record in records if isinstance(record, Prediction)]
    counts = {"other_model": sum(record.model != model for record in records)}
    if not predictions:
        return counts
    return counts | {
        "correct": sum(prediction.label == prediction.gold for prediction in predictions),
        "plain": sum(prediction.source == "plain" for prediction in predictions),
        "fallback": sum(prediction.source == "fallback" for prediction in predictions),
        "without_label_logprobs": sum(prediction.label_logprobs is None for prediction in predictions),
    }
