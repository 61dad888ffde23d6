"""A user's own multiple-choice file as a task: a map of its fields, no code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from catto.records import SPLITS, checked_name
from catto.tasks.benchmarks import TASKS, Files, Task
from catto.tasks.fields import ANSWER, LETTERS, FieldMap, Style
from catto.tasks.splits import Cut

if TYPE_CHECKING:
    from catto.recipe import TaskSettings

Fields = Mapping[str, str | Sequence[str] | Mapping[str, str]]
_NEEDED, _OPTIONAL = ("question", "options", "answer"), ("labels", "id", "group")


def from_file(
    path: str | Path | Files,
    *,
    fields: Fields,
    answer: Style | None = None,
    answers: str | Path | Files | None = None,
    labels: Sequence[str] | None = None,
    name: str = "own",
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    seeds: Sequence[int] = (),
    shuffle: bool = True,
) -> Task:
    """Make a task of a file, or of one file a split.

    fields: `question`, `options`, `answer` and, where there are any, `labels`, `id` and `group` -> names in the file;
    `FieldMap` lists the forms.
    answer: what the answer is; None: what fits all rows. answers: a file with one answer a line, in place of a field.
    labels: the labels in option order that answers use, where the rows have none.
    fractions: train, validation and test, where one file is cut. Training leaves out what any of `seeds` holds out, by
    default the one seed that is loaded: with 80/10/10 that leaves 80 % for training, with five seeds a third.

    >>> task = from_file("my.jsonl", fields={"question": "stem", "options": "choices", "answer": "key"})
    >>> task.cut.parts
    ('validation', 'test', 'train')
    """
    if answers is not None:
        if "answer" in fields:
            raise ValueError("fields: answer: the answers are in a file of their own, expected no field for them")
        if isinstance(path, Mapping) and len(path) > 1 and not isinstance(answers, Mapping):
            raise ValueError("answers: expected one file for each split that has a file")
        fields = {**fields, "answer": ANSWER}
    known = field_map(fields, answer, labels)
    if abs(sum(fractions) - 1) > 1e-9 or min(fractions) < 0:
        raise ValueError(f"fractions {fractions}: expected three numbers from 0 to 1 that sum to 1")
    given: Files = path if isinstance(path, Mapping) else {"train": path}
    files = {split: [places] if isinstance(places, str | Path) else places for split, places in given.items()}
    shares = {split: share for split, share in zip(SPLITS[1:], fractions[1:], strict=True) if split not in files}
    words = known.constant if all(len(option.split()) == 1 for option in known.constant) else ()
    fixed = not shuffle or (bool(words) and words == LETTERS[: len(words)])
    # Where one column is always the answer its place must not show.
    always = words or (isinstance(known.options, tuple) and known.answer in known.options)
    return Task(
        name=checked_name(name, "task"),
        labels=words or LETTERS,
        licence="not stated",
        source="; ".join(str(place) for places in files.values() for place in places),
        maps=(known,),
        order="fixed" if fixed else "shuffled" if always else "shuffled unless letters are named",
        cut=Cut("train", shares, rest="train") if shares else None,
        seeds=tuple(seeds),
        files=files,
        answers=answers if answers is None or isinstance(answers, Mapping) else dict.fromkeys(files, answers),
    )


def field_map(fields: Fields, style: Style | None = None, labels: Sequence[str] | None = None) -> FieldMap:
    """Check the names of a map and put its values into the form of `FieldMap`."""
    for field, value in fields.items():
        if field not in _NEEDED + _OPTIONAL:
            raise ValueError(f"fields: {field!r} is not one of {', '.join(_NEEDED + _OPTIONAL)}")
        if field not in ("question", "options") and not isinstance(value, str):
            raise ValueError(f"fields: {field}: expected one field name")
    if missing := [field for field in _NEEDED if field not in fields]:
        raise ValueError(f"fields: {missing[0]} is missing")
    if style is not None and style not in get_args(Style):
        raise ValueError(f"answer {style!r} is not one of {', '.join(get_args(Style))}")
    values: dict[str, Any] = {"labels": tuple(labels) if labels else None, **fields, "style": style}
    if isinstance(values["question"], str):  # a line break of a template, typed in a shell
        values["question"] = values["question"].replace("\\n", "\n")
    elif not isinstance(values["question"], Mapping):
        values["question"] = {name: name for name in values["question"]}
    if not isinstance(values["options"], str):
        values["options"] = tuple(values["options"])
    return FieldMap(**values)


def own_task(name: str, block: TaskSettings, seeds: Sequence[int] = ()) -> Task:
    """Make a task of a block of settings, as a recipe or a task file holds it."""
    path = block.files or block.path
    if path is None:
        raise ValueError("path or files: the file of the questions is missing")
    form: dict[str, Any] = block.model_dump(include={"answer", "answers", "labels"})
    return from_file(path, fields=block.fields or {}, name=name, seeds=seeds, **form)


def task_name(path: str | Path) -> str:
    """The name of a task that is given by its file alone.

    >>> task_name("data/my questions.jsonl.gz")
    'my_questions'
    """
    name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(path).name.split(".")[0])[:60]
    return f"own_{name}" if name in TASKS or not name else name
