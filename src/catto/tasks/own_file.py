"""A user's own multiple-choice file as a task: a map of its fields, stated or proposed from their names and values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from catto.problems import DataError, listed
from catto.recipe import TaskSettings
from catto.records import SPLITS, checked_name
from catto.tasks.benchmarks import TASKS, Files, Task
from catto.tasks.fields import ANSWER, LETTERS, PLACE, FieldMap, Style
from catto.tasks.loading import find
from catto.tasks.splits import Cut

Fields = Mapping[str, str | Sequence[str] | Mapping[str, str]]
_NEEDED, _OPTIONAL = ("question", "options", "answer"), ("labels", "id", "group")

ROWS = 50  # that a proposal is made of
# Part of the map -> names of fields that hold it, the likeliest first; of a nested field, its last name.
_USUAL = {
    "question": ("question", "(question_)?stem", "query", "goal", "prompt", "sentence", "ctx", "premise", "text"),
    "context": ("passage", "article", "context", "support", "paragraph", "premise"),
    "answer": ("answer_?key", "answer(_idx)?", "correct_(answer|option)", "cop", "labels?", "gold", "key"),
}
_OPTIONS = re.compile("choice|option|ending|answer|candidate|distract|incorrect|sol|^op", re.IGNORECASE)
_WRONG = re.compile("distract|incorrect|wrong", re.IGNORECASE)


def from_file(
    path: str | Path | Files,
    *,
    fields: Fields,
    answer: Style | None = None,
    answers: str | Path | Files | None = None,
    labels: Sequence[str] | None = None,
    name: str = "own",
    seeds: Sequence[int] = (),
) -> Task:
    """Make a task of a file, or of one file a split.

    fields: `question`, `options`, `answer` and, where there are any, `labels`, `id` and `group` -> names in the file;
    `FieldMap` lists the forms.
    answer: what the answer is; None: what fits all rows. answers: a file with one answer a line, in place of a field.
    labels: the labels in option order that answers use, where the rows have none.
    One file is cut into 80 % training, 10 % validation and 10 % test. Training leaves out what any of `seeds` holds
    out, by default the one seed that is loaded: that leaves 80 % for training, with five seeds a third.

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
    given: Files = path if isinstance(path, Mapping) else {"train": path}
    files = {split: [places] if isinstance(places, str | Path) else places for split, places in given.items()}
    shares = {split: 0.1 for split in SPLITS[1:] if split not in files}
    words = known.constant if all(len(option.split()) == 1 for option in known.constant) else ()
    fixed = bool(words) and words == LETTERS[: len(words)]
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
        if re.search("[{}]", re.sub(PLACE, "", values["question"])):
            raise ValueError("fields: question: a brace that belongs to no field, expected a template such as {field}")
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


def propose(files: Files, answers: Files | None = None) -> dict[str, str | list[str]]:
    """Propose a map of fields that fits the first rows of the files; DataError where none is found.

    >>> import tempfile
    >>> from pathlib import Path
    >>> path = Path(tempfile.mkdtemp()) / "mine.jsonl"
    >>> _ = path.write_text('{"stem": "Which?", "choices": ["red", "blue"], "key": "B"}')
    >>> propose({"train": path})
    {'question': 'stem', 'options': 'choices', 'answer': 'key'}
    """
    source = find(Task("own", LETTERS, "", "", files=files, answers=answers), None, None)
    rows = list(islice(source.rows(source.available[0]), ROWS))
    if not rows:
        raise DataError(source.parts[source.available[0]][0][0], None, "has no rows")
    values: dict[str, Any] = {}  # of the first row, by their names
    for name, value in rows[0][2].items():
        values[name] = value
        values |= {f"{name}.{part}": inner for part, inner in value.items()} if isinstance(value, dict) else {}
    columns: defaultdict[str, list[str]] = defaultdict(list)  # name without its last sign -> the columns
    for name, value in values.items():
        if isinstance(value, str) and (match := re.fullmatch(r"(.*?)[ _]?([A-Ja-j]|\d)", name)):
            columns[match[1]].append(name)

    def usual(part: str) -> list[str]:
        last = {name: name.rpartition(".")[2].lower() for name in values}
        return [name for usual in _USUAL[part] for name in values if re.fullmatch(usual, last[name])]

    lists: list[str | list[str]] = [name for name, value in values.items() if isinstance(value, list | dict)]
    several = [names for names in columns.values() if len(names) > 1]
    likely = sorted([*lists, *several], key=lambda names: not _OPTIONS.search("".join(names)))
    for options in [*likely, "yes|no"]:
        marked = [options] if isinstance(options, str) and _marks_answer(values.get(options)) else []
        for answer in [ANSWER] if answers else [*marked, *usual("answer")]:
            with_answer = isinstance(options, list) and _WRONG.search(options[0])
            choices = [answer, *options] if with_answer else options
            used = {answer, *([choices] if isinstance(choices, str) else choices)}
            texts = [name for name, value in values.items() if isinstance(value, str) and name not in used]
            longest_first = sorted(texts, key=lambda name: -len(values[name]))
            questions = [name for name in usual("question") if name in texts] or longest_first
            if not questions:
                continue
            context = [name for name in usual("context") if name in texts and name != questions[0]]
            question = "\\n".join(f"{{{name}}}" for name in (*context[:1], questions[0])) if context else questions[0]
            fields = {"question": question, "options": choices, **({} if answers else {"answer": answer})}
            try:
                field_map({**fields, "answer": answer}).settled(rows)
            except ValueError:
                continue
            return fields
    _refuse_several_questions(rows[0][0], values)
    for name, value in values.items():
        if isinstance(value, str) and _WRONG.search(name) and ";" in value:
            message = f"{name}: several options in one text: write a list, or a column for each option"
            raise DataError(rows[0][0], 1, message)
    if not answers and not usual("answer"):
        hint = "if they are in a file of their own, one per line, give it with --answers"
        raise DataError(rows[0][0], None, f"no field of the answers among {listed(list(values))}: {hint}")
    state = "state which are the question, the options and the answer (--fields)"
    raise DataError(rows[0][0], None, f"no map fits its fields {listed(list(values))}: {state}")


def _marks_answer(value: object) -> bool:
    """Whether this is an object of options, of which one has a 1 and the others a 0."""
    if not isinstance(value, dict):
        return False
    marks = list(value.values())
    return len(marks) > 1 and marks.count(1) == 1 and marks.count(0) == len(marks) - 1


def _refuse_several_questions(file: str, values: Mapping[str, Any]) -> None:
    """Refuse rows that hold a list of questions, each with options of its own, below one text."""
    for value in values.values():
        if isinstance(value, list) and value and all(isinstance(entry, list) for entry in value):
            lists = [other for other, inner in values.items() if isinstance(inner, list) and len(inner) == len(value)]
            message = f"{listed(lists)} are lists of {len(value)}: a row holds several questions, write a row for each"
            raise DataError(file, 1, message)
