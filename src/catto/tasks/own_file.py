"""A user's own multiple-choice file as a task: a map of its fields, no code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from catto.records import SPLITS, checked_name
from catto.tasks.benchmarks import SEEDS, Files, Task
from catto.tasks.fields import LETTERS, FieldMap
from catto.tasks.splits import Cut

Answer = Literal["label", "index", "text"]
_NEEDED, _OPTIONAL = ("question", "options", "answer"), ("id", "group")


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
    for field, value in fields.items():
        if field not in _NEEDED + _OPTIONAL:
            raise ValueError(f"fields: {field!r} is not one of {', '.join(_NEEDED + _OPTIONAL)}")
        if field not in ("question", "options") and not isinstance(value, str):
            raise ValueError(f"fields: {field}: expected one field name")
    if missing := [field for field in _NEEDED if field not in fields]:
        raise ValueError(f"fields: {missing[0]} is missing")
    if answer not in get_args(Answer):
        raise ValueError(f"answer {answer!r} is not one of {', '.join(get_args(Answer))}")
    if abs(sum(fractions) - 1) > 1e-9 or min(fractions) < 0:
        raise ValueError(f"fractions {fractions}: expected three numbers from 0 to 1 that sum to 1")
    files: Files = path if isinstance(path, Mapping) else {"train": path}
    shares = {split: share for split, share in zip(SPLITS[1:], fractions[1:], strict=True) if split not in files}
    question, options = fields["question"], fields["options"]
    key, group, answered = (str(fields[field]) if field in fields else None for field in ("id", "group", "answer"))
    known = FieldMap(
        question if isinstance(question, str) else {part: part for part in question},
        options if isinstance(options, str) else tuple(options),
        str(answered),
        labels=tuple(labels),
        id=key,
        group=group,
        style=answer,
    )
    return Task(
        name=checked_name(name, "task"),
        labels=LETTERS,
        licence=licence,
        source="; ".join(map(str, files.values())),
        maps=(known,),
        order="shuffled unless letters are named" if shuffle else "fixed",
        cut=Cut("train", shares, rest="train") if shares else None,
        sample=sample,
        seeds=tuple(seeds),
        files=files,
    )
