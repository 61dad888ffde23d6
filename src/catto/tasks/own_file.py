"""A user's own multiple-choice file as a task: a map of its fields, no code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from catto.records import SPLITS, checked_name
from catto.tasks.benchmarks import LETTERS, SEEDS, Files, Raw, Task, lookup, text, texts
from catto.tasks.splits import Cut, Draft

Answer = Literal["label", "index", "text"]
_NEEDED, _OPTIONAL = ("question", "options", "answer"), ("id", "group")


@dataclass(frozen=True)
class FieldMap:
    """Which field of a row is which. A list of question fields keeps their names; a list of options is columns.

    fields: `question`, `options`, `answer`, and where there are any `id` and `group` -> names in the file.
    kind: what the answer field holds.
    """

    fields: Mapping[str, str | Sequence[str]]
    kind: Answer
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        for name, value in self.fields.items():
            if name not in _NEEDED + _OPTIONAL:
                raise ValueError(f"fields: {name!r} is not one of {', '.join(_NEEDED + _OPTIONAL)}")
            if name not in ("question", "options") and not isinstance(value, str):
                raise ValueError(f"fields: {name}: expected one field name")
        if missing := [name for name in _NEEDED if name not in self.fields]:
            raise ValueError(f"fields: {missing[0]} is missing")
        if self.kind not in get_args(Answer):
            raise ValueError(f"answer {self.kind!r} is not one of {', '.join(get_args(Answer))}")

    def __call__(self, raw: Raw) -> Draft:
        """Turn a row into a draft."""
        question, columns, answer = (self.fields[name] for name in _NEEDED)
        parts = {"question": question} if isinstance(question, str) else {name: name for name in question}
        values = {name: text(raw, column) for name, column in parts.items()}
        if empty := [parts[name] for name, value in values.items() if not value.strip()]:
            raise ValueError(f"{empty[0]} is empty")
        if isinstance(columns, str):
            options = texts(raw, columns)
        else:  # a row with fewer options leaves the last columns empty
            names = list(columns)
            while names and raw.get(names[-1]) in (None, ""):
                names.pop()
            options = tuple(text(raw, name) for name in names)
        if not 2 <= len(options) <= len(LETTERS):
            raise ValueError(f"{columns}: expected 2 to {len(LETTERS)} options, got {len(options)}")
        gold = self._gold(answer, str(lookup(raw, str(answer))).strip(), options)
        key, group = (str(lookup(raw, str(self.fields[name]))) if name in self.fields else None for name in _OPTIONAL)
        return Draft(values, options, gold, key, group)

    def _gold(self, field: object, value: str, options: tuple[str, ...]) -> int:
        """The index of the option that the answer names."""
        names = {"label": self.labels, "index": tuple(map(str, range(len(options)))), "text": options}[self.kind]
        names = tuple(name.strip() for name in names[: len(options)])
        if names.count(value) > 1:
            raise ValueError(f"{field} {value!r} is the text of more than one option")
        if value not in names:
            raise ValueError(f"{field} {value!r} is not one of {', '.join(names)}")
        return names.index(value)


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
    """Make a task of a file, or of one file a split.

    fields: `question`, `options`, `answer` and, where there are any, `id` and `group` -> the names in the file.
    answer: what the answer field holds: one of `labels` (in option order), a number from 0, or the option's text.
    fractions: train, validation and test, where one file is cut. Training leaves out what any of `seeds` holds out:
    with five seeds and 80/10/10 about a third stays, with one seed 80 %.

    >>> task = from_file("my.jsonl", fields={"question": "stem", "options": "choices", "answer": "key"})
    >>> task.cut.parts
    ('validation', 'test', 'train')
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
        parse=FieldMap(fields, answer, tuple(labels)),
        order="shuffled unless letters are named" if shuffle else "fixed",
        cut=Cut("train", shares, rest="train") if shares else None,
        sample=sample,
        seeds=tuple(seeds),
        files=files,
    )
