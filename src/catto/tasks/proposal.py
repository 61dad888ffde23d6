"""Propose which fields of a user's file are the question, the options and the answer, from their names and values."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import islice
from typing import Any

from catto.problems import DataError, listed
from catto.tasks.benchmarks import Files, Task
from catto.tasks.fields import ANSWER, LETTERS
from catto.tasks.loading import find
from catto.tasks.own_file import field_map

ROWS = 50  # that a proposal is made of
# Part of the map -> names of fields that hold it, the likeliest first; of a nested field, its last name.
_USUAL = {
    "question": ("question", "(question_)?stem", "query", "goal", "prompt", "sentence", "ctx", "premise", "text"),
    "context": ("passage", "article", "context", "support", "paragraph", "premise"),
    "answer": ("answer_?key", "answer(_idx)?", "correct_(answer|option)", "cop", "labels?", "gold", "key"),
}
_OPTIONS = re.compile("choice|option|ending|answer|candidate|distract|incorrect|sol|^op", re.IGNORECASE)
_WRONG = re.compile("distract|incorrect|wrong", re.IGNORECASE)


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
        raise DataError(source.names(source.available[0])[0], None, "has no rows")
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
        for answer in [ANSWER] if answers else usual("answer"):
            with_answer = isinstance(options, list) and _WRONG.search(options[0])
            choices = [answer, *options] if with_answer else options
            used = {answer, *([choices] if isinstance(choices, str) else choices)}
            texts = [name for name, value in values.items() if isinstance(value, str) and name not in used]
            questions = [name for name in usual("question") if name in texts] or sorted(
                texts, key=lambda name: -len(values[name])
            )
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
    state = "state which are the question, the options and the answer (--fields)"
    raise DataError(rows[0][0], None, f"no map fits its fields {listed(list(values))}: {state}")
