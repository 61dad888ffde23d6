"""A user's own multiple-choice file as a task: a map of its fields, no code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from catto.records import SPLITS, checked_name
from catto.tasks.rows import LETTERS, SEEDS, Cut, Files, Raw, Row, RowError, Task, lookup, text, texts

Answer = Literal["label", "index", "text"]
_FIELDS = ("question", "options", "answer", "id", "group")


@dataclass(frozen=True)
class FieldMap:
    """Which field of a row is which. A list of question fields keeps their names; a list of options is columns."""

    question: str | tuple[str, ...]
    options: str | tuple[str, ...]
    answer: str
    kind: Answer
    labels: tuple[str, ...]
    id: str | None = None
    group: str | None = None

    def __call__(self, raw: Raw) -> Row:
        """Turn a row into a neutral one."""
        named = (
            {"question": self.question} if isinstance(self.question, str) else {name: name for name in self.question}
        )
        fields = {name: _filled(raw, source) for name, source in named.items()}
        options = texts(raw, self.options) if isinstance(self.options, str) else _columns(raw, self.options)
        if not 2 <= len(options) <= len(LETTERS):
            raise RowError(f"{self.options}: expected 2 to {len(LETTERS)} options, got {len(options)}")
        key = str(lookup(raw, self.id)) if self.id else None
        return Row(fields, options, self._gold(raw, options), key, str(lookup(raw, self.group)) if self.group else None)

    def _gold(self, raw: Raw, options: tuple[str, ...]) -> int:
        value = str(lookup(raw, self.answer)).strip()
        names = {"label": self.labels, "index": tuple(map(str, range(len(options)))), "text": options}[self.kind]
        names = tuple(name.strip() for name in names[: len(options)])
        if names.count(value) > 1:
            raise RowError(f"{self.answer} {value!r} is the text of more than one option")
        if value not in names:
            raise RowError(f"{self.answer} {value!r} is not one of {', '.join(names)}")
        return names.index(value)


def _filled(raw: Raw, name: str) -> str:
    value = text(raw, name)
    if not value.strip():
        raise RowError(f"{name} is empty")
    return value


def _columns(raw: Raw, names: tuple[str, ...]) -> tuple[str, ...]:
    """Options in columns; a row with fewer options leaves the last columns empty."""
    values = [raw.get(name) for name in names]
    while values and values[-1] in (None, ""):
        values.pop()
    return tuple(text(raw, name) for name in names[: len(values)])


def from_file(
    path: str | Path | Files,
    *,
    fields: Mapping[str, str | Sequence[str]],
    answer: Answer = "label",
    labels: Sequence[str] = LETTERS,
    name: str = "own",
    licence: str = "not stated",
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    seeds: tuple[int, ...] = SEEDS,
    sample: int | None = None,
    shuffle: bool = True,
) -> Task:
    """Make a task of a file, or of one file a split: `load(from_file("my.jsonl", fields={...}), "train")`.

    fields: `question`, `options`, `answer` and, where there are any, `id` and `group` -> the names in the file.
    answer: what the answer field holds: one of `labels` (in option order), a number from 0, or the option's text.
    fractions: train, validation and test, where one file is cut. Training leaves out what any of `seeds` holds out:
    with five seeds and 80/10/10 about a third stays, with one seed 80 %.
    """
    if abs(sum(fractions) - 1) > 1e-9 or min(fractions) < 0:
        raise ValueError(f"fractions {fractions}: expected three numbers from 0 to 1 that sum to 1")
    files: Files = path if isinstance(path, Mapping) else {"train": path}
    shares = {split: share for split, share in zip(SPLITS[1:], fractions[1:], strict=True) if split not in files}
    return Task(
        name=checked_name(name, "task"),
        labels=LETTERS,
        licence=licence,
        source="; ".join(map(str, files.values())),
        parse=_field_map(fields, answer, tuple(labels)),
        order="shuffled unless letters are named" if shuffle else "fixed",
        cut=Cut("train", shares, rest="train") if shares else None,
        sample=sample,
        seeds=tuple(seeds),
        files=files,
    )


def _field_map(fields: Mapping[str, str | Sequence[str]], answer: Answer, labels: tuple[str, ...]) -> FieldMap:
    if unknown := [name for name in fields if name not in _FIELDS]:
        raise ValueError(f"fields: {unknown[0]!r} is not one of {', '.join(_FIELDS)}")
    if missing := [name for name in _FIELDS[:3] if name not in fields]:
        raise ValueError(f"fields: {missing[0]} is missing")
    if answer not in ("label", "index", "text"):
        raise ValueError(f"answer {answer!r} is not one of label, index, text")
    many = {name: value if isinstance(value, str) else tuple(value) for name, value in fields.items()}
    if listed := [name for name in ("answer", "id", "group") if not isinstance(many.get(name, ""), str)]:
        raise ValueError(f"fields: {listed[0]}: expected one field name")
    return FieldMap(
        question=many["question"],
        options=many["options"],
        answer=str(many["answer"]),
        kind=answer,
        labels=labels,
        id=str(many["id"]) if "id" in many else None,
        group=str(many["group"]) if "group" in many else None,
    )
