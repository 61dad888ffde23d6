"""The file of predictions while it grows: whole chunks are appended, a killed run goes on behind the last one."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Self

from catto.prompts import messages
from catto.records import (
    DataError,
    Manifest,
    Prediction,
    Question,
    content_hash,
    library_versions,
    manifest_path,
    read_manifest,
    read_records,
    write_manifest,
)

OTHER_RUN = "belongs to other settings, questions or another model: give those, or another file"


@dataclass(frozen=True)
class Run:
    """What determines predictions besides the questions. `chunk`: questions that are generated and scored together."""

    engine: str
    model: str
    k: int
    temperature: float
    seed: int
    max_tokens: int
    reasoning: bool
    chunk: int

    def hash(self, questions: Sequence[Question]) -> str:
        """Hash the settings and the questions as they are put."""
        digest = hashlib.sha256()
        for question in questions:
            digest.update(question.model_dump_json().encode())
            digest.update(repr(messages(question, reasoning=self.reasoning)).encode())
        return content_hash([asdict(self), digest.hexdigest()])


def check_settings(path: Path, settings: Mapping[str, object]) -> None:
    """Refuse the file of a run with other settings, as far as they are known before the model is loaded."""
    part = path.with_name(path.name.removesuffix(".jsonl") + ".part.jsonl")
    for file in (path, part):
        if manifest_path(file).exists():
            notes = read_manifest(file).notes
            for name, value in settings.items():
                if name in notes and notes[name] != value:
                    raise DataError(file, None, f"was made with {name} {notes[name]!r}, not {value!r}: {OTHER_RUN}")


class PredictionFile:
    """`predictions.jsonl` in the making, as `predictions.part.jsonl` with a manifest that names the run.

    Chunks are appended whole and in order. A chunk that a kill has torn is cut off and made again, with the same
    batches and so the same numbers. At the end the file is renamed and gets its manifest, in this order.
    """

    def __init__(self, path: Path, questions: Sequence[Question], run: Run) -> None:
        self.path, self.run, self.questions = path, run, len(questions)
        self.part = path.with_name(path.name.removesuffix(".jsonl") + ".part.jsonl")
        self.keys = [(question.id, sample) for question in questions for sample in range(run.k)]
        self.hash = run.hash(questions)
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_renamed():
            return self
        if manifest_path(self.part).exists():
            self._check(self.part)
        elif self.part.exists() and self.part.stat().st_size:
            raise DataError(self.part, None, "has no manifest beside it: move it away")
        else:
            write_manifest(self.part, self._manifest({}))
        self._file = self.part.open("ab")
        self._lock(self._file)
        self._file.truncate(self._whole_bytes())
        return self

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

    def _lock(self, file: IO[bytes]) -> None:
        """Hold the file for this process; the system drops the lock of a killed one."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise DataError(self.part, None, "another run is writing here") from None

    def _whole_bytes(self) -> int:
        """Length of the whole chunks that are stored."""
        with self.part.open("rb") as file:
            lines = [len(line) for line in file if line.endswith(b"\n")]
        lines_a_chunk = self.run.chunk * self.run.k
        whole = len(lines) if len(lines) == len(self.keys) else len(lines) // lines_a_chunk * lines_a_chunk
        return sum(lines[:whole])

    def stored(self) -> list[Prediction]:
        """The predictions so far, each at its place."""
        source = self.path if self._file is None else self.part
        found = list(read_records(source, Prediction))
        for row, (prediction, key) in enumerate(zip(found, self.keys, strict=False), 1):
            if (prediction.question, prediction.sample) != key:
                raise DataError(source, row, f"expected question {key[0]} sample {key[1]}")
        if len(found) > len(self.keys) or (self._file is None and len(found) < len(self.keys)):
            raise DataError(source, None, f"{len(found)} predictions, expected {len(self.keys)}")
        return found

    def whole_chunks(self) -> int:
        """How many chunks are stored."""
        return -(-len(self.stored()) // (self.run.chunk * self.run.k))

    def append(self, chunk: Sequence[Prediction]) -> Sequence[Prediction]:
        """Store a chunk; once this returns, killing the process does not lose it."""
        assert self._file is not None
        self._file.write("".join(prediction.model_dump_json() + "\n" for prediction in chunk).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        return chunk

    def finish(self, predictions: Sequence[Prediction]) -> None:
        """Rename the file and write its manifest."""
        if self._file is not None:
            self.part.replace(self.path)
        if not manifest_path(self.path).exists():
            write_manifest(self.path, self._manifest(_counts(predictions, self.questions)))
        manifest_path(self.part).unlink(missing_ok=True)

    def _manifest(self, counts: dict[str, int]) -> Manifest:
        versions = library_versions("transformers", "torch", "vllm", "openai")
        notes = asdict(self.run)
        return Manifest(
            kind="predictions",
            counts=counts,
            recipe_hash=self.hash,
            seed=self.run.seed,
            versions=versions,
            notes=notes,
        )


def _counts(predictions: Sequence[Prediction], questions: int) -> dict[str, int]:
    return {
        "predictions": len(predictions),
        "questions": questions,
        "correct": sum(prediction.label == prediction.gold for prediction in predictions),
        "fallback": sum(prediction.source == "fallback" for prediction in predictions),
        "without_label_logprobs": sum(prediction.label_logprobs is None for prediction in predictions),
    }
