"""A user's own file as a task: a map of its fields, stated or proposed from their names and values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from catto.errors import DataError, join_names
from catto.recipe.settings import TaskSettings
from catto.records import GRADES, SPLITS, Grade, Split, checked_name
from catto.tasks.answer_map import AnswerMap
from catto.tasks.benchmarks import TASKS, Files, Task
from catto.tasks.fields import ANSWER, LETTERS, PLACEHOLDER, FieldMap, SourceRow, Style, find_single_mark
from catto.tasks.loading import find_rows
from catto.tasks.splits import Cut

Fields = Mapping[str, str | Sequence[str] | Mapping[str, str]]
ProposedFields = dict[str, str | list[str]]
_NEEDED = ("question", "answer")
_OPTIONAL = ("options", "labels", "id", "group")
_HELD_OUT_SHARE = 0.1

PROPOSAL_ROWS = 50  # first rows that a proposed map must fit
# Part of the map -> names of fields that hold it, the likeliest first; of a nested field, its last name.
_USUAL_NAMES = {
    "question": ("question", "(question_)?stem", "query", "goal", "prompt", "sentence", "ctx", "premise", "text"),
    "context": ("passage", "article", "context", "support", "paragraph", "premise"),
    "short answer": ("answers?", "aliases", "targets?", "solution"),
    "answer": ("answer_?key", "answer(_idx)?", "correct_(answer|option)", "cop", "labels?", "gold", "key"),
}
_OPTIONS = re.compile("choice|option|ending|answer|candidate|distract|incorrect|sol|^op", re.IGNORECASE)
_WRONG = re.compile("distract|incorrect|wrong", re.IGNORECASE)
_NUMBERED_COLUMN = re.compile(r"(.*?)[ _]?([A-Ja-j]|\d)")  # option_a, option_b; choice1, choice2


# ---- a stated map ---------------------------------------------------------------------------------------------------


def from_file(
    path: str | Path | Files,
    *,
    fields: Fields,
    answer: Style | None = None,
    answers: str | Path | Files | None = None,
    labels: Sequence[str] | None = None,
    grade: Grade | None = None,
    tolerance: float | None = None,
    name: str = "own",
    seeds: Sequence[int] = (),
) -> Task:
    """Make a task of a file, or of one file per split.

    Without `options` in the map, the questions are answered by a short text or a number.

    One file is cut into 80 % training, 10 % validation and 10 % test. Training leaves out what any of `seeds` holds
    out, by default the one seed that is loaded: that leaves 80 % for training, with five seeds a third.

    Args:
        path: The file, or split -> file.
        fields: `question`, `options`, `answer` and, where there are any, `labels`, `id` and `group` -> names in the
            file. `FieldMap` lists the forms.
        answer: What the answer is; None infers what fits all rows.
        answers: A file with one answer per line, instead of a field.
        labels: The labels in option order that answers use, where the rows have none.
        grade: How answers without options are compared; None takes `any-of` for a list and `exact` otherwise.
        tolerance: For the grade `number`: the largest difference, as a share of the accepted value.
        name: Name of the task.
        seeds: Seeds whose held-out questions are not trained on.

    Returns:
        The task. The file is not read yet.

    Raises:
        ValueError: The arguments contradict each other, or `fields` has an unknown part or lacks one.

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
    files = _list_paths(path)
    if answers is not None and not isinstance(answers, Mapping):
        answers = dict.fromkeys(files, answers)
    if "options" not in fields:
        if answer is not None or labels:
            raise ValueError("fields: options is missing: only questions with options have labels or an answer style")
        return Task(
            name=checked_name(name, "task"),
            labels=(),
            licence="not stated",
            source=_join_paths(files),
            maps=(answer_map(fields, grade, tolerance),),
            cut=_cut_missing_splits(files),
            seeds=tuple(seeds),
            files=files,
            answers=answers,
        )
    if grade is not None or tolerance is not None:
        raise ValueError("grade and tolerance: only for questions without options, remove options from the fields")
    row_map = field_map(fields, answer, labels)
    word_labels = _word_labels(row_map)
    return Task(
        name=checked_name(name, "task"),
        labels=word_labels or LETTERS,
        licence="not stated",
        source=_join_paths(files),
        maps=(row_map,),
        order=_choose_order(row_map, word_labels),
        cut=_cut_missing_splits(files),
        seeds=tuple(seeds),
        files=files,
        answers=answers,
    )


def _list_paths(path: str | Path | Files) -> dict[Split, Sequence[str | Path]]:
    """Return the paths of each split; a single file is the training file."""
    if not isinstance(path, Mapping):
        return {"train": [path]}
    files: dict[Split, Sequence[str | Path]] = {}
    for split, paths in path.items():
        files[split] = [paths] if isinstance(paths, str | Path) else paths
    return files


def _join_paths(files: Mapping[Split, Sequence[str | Path]]) -> str:
    names: list[str] = []
    for paths in files.values():
        names.extend(str(path) for path in paths)
    return "; ".join(names)


def _cut_missing_splits(files: Mapping[Split, Sequence[str | Path]]) -> Cut | None:
    """Cut the held-out splits that have no file from the training file; None if both have one."""
    shares: dict[Split, float] = {}
    for split in SPLITS:
        if split != "train" and split not in files:
            shares[split] = _HELD_OUT_SHARE
    if not shares:
        return None
    return Cut(source="train", shares=shares, rest="train")


def _word_labels(row_map: FieldMap) -> tuple[str, ...]:
    """Return the options that all rows share if each is a single word, which then is its own label; else none.

    Empty too if each row has options of its own.
    """
    are_single_words = all(len(option.split()) == 1 for option in row_map.shared_options)
    if not are_single_words:
        return ()
    return row_map.shared_options


def _choose_order(
    row_map: FieldMap, word_labels: tuple[str, ...]
) -> Literal["shuffled", "shuffled unless letters are named", "fixed"]:
    if word_labels:
        are_letters = word_labels == LETTERS[: len(word_labels)]
        return "fixed" if are_letters else "shuffled"
    # Where the same column always holds the answer, its position must not show.
    has_answer_column = isinstance(row_map.options, tuple) and row_map.answer in row_map.options
    return "shuffled" if has_answer_column else "shuffled unless letters are named"


def field_map(fields: Fields, style: Style | None = None, labels: Sequence[str] | None = None) -> FieldMap:
    """Check the names of a map and make a `FieldMap` of it.

    Args:
        fields: Part of the map -> the names in the file.
        style: What the answer is; None if that is still to be inferred.
        labels: The labels in option order that answers use; a field of labels in `fields` comes before them.

    Raises:
        ValueError: A part of the map is unknown or missing, or the style is unknown.
    """
    _check_names(fields)
    known_styles = get_args(Style)
    if style is not None and style not in known_styles:
        raise ValueError(f"answer {style!r} is not one of {', '.join(known_styles)}")
    values: dict[str, Any] = {"labels": None}
    if labels:
        values["labels"] = tuple(labels)
    values.update(fields)
    values["style"] = style
    values["question"] = _check_question(values["question"])
    if not isinstance(values["options"], str):
        values["options"] = tuple(values["options"])
    return FieldMap(**values)


def answer_map(fields: Fields, grade: Grade | None = None, tolerance: float | None = None) -> AnswerMap:
    """Check the names of a map without options and make an `AnswerMap` of it.

    Args:
        fields: Part of the map -> the names in the file.
        grade: How answers are compared; None is decided by each row.
        tolerance: For the grade `number`: the largest difference, as a share of the accepted value.

    Raises:
        ValueError: A part of the map is unknown or missing, or the grade, the tolerance or labels do not go with it.
    """
    _check_names(fields)
    if grade is not None and grade not in GRADES:
        raise ValueError(f"grade {grade!r} is not one of {', '.join(GRADES)}")
    if tolerance is not None and grade != "number":
        raise ValueError("tolerance: only for the grade number")
    if "labels" in fields:
        raise ValueError("fields: labels: expected options too")
    values: dict[str, Any] = {**fields}
    values["question"] = _check_question(values["question"])
    return AnswerMap(**values, grade=grade, tolerance=tolerance or 0.0)


def _check_names(fields: Fields) -> None:
    """Raise ValueError for an unknown part of the map, a missing one, or several fields where one is expected."""
    known = _NEEDED + _OPTIONAL
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"fields: {name!r} is not one of {', '.join(known)}")
        may_be_several = name in ("question", "options")
        if not may_be_several and not isinstance(value, str):
            raise ValueError(f"fields: {name}: expected one field name")
    for name in _NEEDED:
        if name not in fields:
            raise ValueError(f"fields: {name} is missing")


def _check_question(question: str | Sequence[str] | Mapping[str, str]) -> str | Mapping[str, str]:
    """Return the question's template, or its fields by the names that a prompt shows; a list names each by itself."""
    if isinstance(question, str):
        template = question.replace("\\n", "\n")  # a line break typed in a shell
        if re.search("[{}]", re.sub(PLACEHOLDER, "", template)):
            raise ValueError("fields: question: a brace that belongs to no field, expected a template such as {field}")
        return template
    if isinstance(question, Mapping):
        return question
    return {name: name for name in question}


def own_task(name: str, settings: TaskSettings, seeds: Sequence[int] = ()) -> Task:
    """Make a task of the settings in a recipe or a task file; ValueError if they name no file or contradict."""
    path = settings.files or settings.path
    if path is None:
        raise ValueError("path or files: the file of the questions is missing")
    options: dict[str, Any] = settings.model_dump(include={"answer", "answers", "labels", "grade", "tolerance"})
    return from_file(path, fields=settings.fields or {}, name=name, seeds=seeds, **options)


def task_name(path: str | Path) -> str:
    """Return the name of a task that is known by its file alone; it gets `own_` before the name of a benchmark.

    >>> task_name("data/my questions.jsonl.gz")
    'my_questions'
    """
    stem = Path(path).name.split(".")[0]
    name = re.sub(r"[^A-Za-z0-9_-]", "_", stem)[:60]
    if not name or name in TASKS:
        return f"own_{name}"
    return name


# ---- a proposed map -------------------------------------------------------------------------------------------------


def propose(files: Files, answers: Files | None = None) -> ProposedFields:
    """Propose a map of fields that fits the first rows of the first split's files.

    Args:
        files: Split -> its files.
        answers: Files with one answer per line, if the rows hold no answers.

    Returns:
        The value of `fields` for `from_file`; without `answer` if there are files of answers.

    Raises:
        DataError: The files have no rows, or no map fits them.

    >>> import tempfile
    >>> from pathlib import Path
    >>> path = Path(tempfile.mkdtemp()) / "mine.jsonl"
    >>> _ = path.write_text('{"stem": "Which?", "choices": ["red", "blue"], "key": "B"}')
    >>> propose({"train": path})
    {'question': 'stem', 'options': 'choices', 'answer': 'key'}
    """
    source = find_rows(Task("own", LETTERS, "", "", files=files, answers=answers), None, None)
    first_split = source.available[0]
    rows = list(islice(source.rows(first_split), PROPOSAL_ROWS))
    if not rows:
        raise DataError(source.parts[first_split][0].name, None, "has no rows")
    values = _flatten_fields(rows[0].fields)
    has_answer_file = bool(answers)
    candidates = [
        *_candidate_maps(values, has_answer_file=has_answer_file),
        *_candidate_open_maps(values, has_answer_file=has_answer_file),
    ]
    for candidate in candidates:
        if _fits_rows(candidate, rows):
            if has_answer_file:
                del candidate["answer"]
            return candidate
    raise _explain_no_map(rows[0].file, values, has_answer_file=has_answer_file)


def suggests_numbers(files: Files, fields: Fields, answers: Files | None = None) -> bool:
    """Return whether the first rows of a map without options all have numbers as answers.

    False also if the map does not fit a row.

    Args:
        files: Split -> its files.
        fields: Part of the map -> the names in the file.
        answers: Files with one answer per line, if the rows hold no answers.
    """
    named = {**fields, "answer": ANSWER} if answers else fields
    source = find_rows(Task("own", (), "", "", files=files, answers=answers), None, None)
    try:
        number_map = answer_map(named, "number")
        for row in islice(source.rows(source.available[0]), PROPOSAL_ROWS):
            number_map.parse_row(row.fields)
    except ValueError:
        return False
    return True


def _flatten_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row, and those one level inside them as `outer.inner`."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        values[name] = value
        if isinstance(value, dict):
            for inner_name, inner_value in value.items():
                values[f"{name}.{inner_name}"] = inner_value
    return values


def _candidate_maps(values: Mapping[str, Any], *, has_answer_file: bool) -> Iterator[ProposedFields]:
    """Yield maps of the fields that their names and values suggest, the likeliest first.

    Args:
        values: Field -> its value in the first row, from `_flatten_fields`.
        has_answer_file: Whether the answers are in a file of their own.
    """
    for options in _candidate_options(values):
        if has_answer_file:
            answer_fields = [ANSWER]
        else:
            answer_fields = _usual_fields(values, "answer")
            if isinstance(options, str) and _marks_answer(values.get(options)):
                answer_fields.insert(0, options)
        for answer in answer_fields:
            option_fields = options
            if isinstance(options, list) and _WRONG.search(options[0]):  # the columns hold the wrong options only
                option_fields = [answer, *options]
            used = {answer}
            used.update([option_fields] if isinstance(option_fields, str) else option_fields)
            question = _propose_question(values, used)
            if question is not None:
                yield {"question": question, "options": option_fields, "answer": answer}


def _candidate_open_maps(values: Mapping[str, Any], *, has_answer_file: bool) -> Iterator[ProposedFields]:
    """Yield maps without options, the likeliest first, unless the rows hold several questions."""
    if any(_holds_several_questions(value) for value in values.values()):
        return
    for answer in [ANSWER] if has_answer_file else _usual_fields(values, "short answer"):
        question = _propose_question(values, {answer})
        if question is not None:
            yield {"question": question, "answer": answer}


def _candidate_options(values: Mapping[str, Any]) -> list[str | list[str]]:
    """Return fields that may hold the options: lists, objects and numbered columns; last, yes and no for all rows."""
    candidates: list[str | list[str]] = []
    columns_by_stem: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        if isinstance(value, list | dict):
            candidates.append(name)
        elif isinstance(value, str):
            match = _NUMBERED_COLUMN.fullmatch(name)
            if match is not None:
                stem = match[1]  # of option_a: option
                columns_by_stem[stem].append(name)
    for columns in columns_by_stem.values():
        if len(columns) > 1:
            candidates.append(columns)
    candidates.sort(key=lambda names: not _OPTIONS.search("".join(names)))  # those with a usual name first
    return [*candidates, "yes|no"]


def _usual_fields(values: Mapping[str, Any], part: str) -> list[str]:
    """Return the fields with a usual name of this part of the map, the likeliest first."""
    fields = []
    for usual_name in _USUAL_NAMES[part]:
        for name in values:
            last_name = name.rpartition(".")[2].lower()
            if re.fullmatch(usual_name, last_name):
                fields.append(name)
    return fields


def _propose_question(values: Mapping[str, Any], used: set[str]) -> str | None:
    """Return the field of the question, or a template with its context; None if no field of text is left.

    A field with a usual name is taken, else the one with the longest text.

    Args:
        values: Field -> its value in the first row.
        used: The fields of the options and the answer.
    """
    text_fields = []
    for name, value in values.items():
        if isinstance(value, str) and name not in used:
            text_fields.append(name)
    questions = [name for name in _usual_fields(values, "question") if name in text_fields]
    if not questions:
        questions = sorted(text_fields, key=lambda name: -len(values[name]))  # the longest first
    if not questions:
        return None
    question = questions[0]
    for context in _usual_fields(values, "context"):
        if context in text_fields and context != question:
            return f"{{{context}}}\\n{{{question}}}"
    return question


def _fits_rows(fields: ProposedFields, rows: Sequence[SourceRow]) -> bool:
    """Whether a map can read these rows; a map with options also if more than one answer style fits."""
    try:
        if "options" in fields:
            field_map(fields).infer_style(rows)
        else:
            open_map = answer_map(fields)
            for row in rows:
                open_map.parse_row(row.fields)
    except ValueError:
        return False
    return True


def _explain_no_map(file: str, values: Mapping[str, Any], *, has_answer_file: bool) -> DataError:
    """Return the error for rows that no proposed map fits, with the likeliest cause."""
    for value in values.values():
        if _holds_several_questions(value):
            lists = []
            for name, other in values.items():
                if isinstance(other, list) and len(other) == len(value):
                    lists.append(name)
            problem = f"{join_names(lists)} are lists of {len(value)}"
            return DataError(file, 1, f"{problem}: a row holds several questions, write a row for each")
    for name, value in values.items():
        is_joined_list = isinstance(value, str) and ";" in value
        if is_joined_list and _WRONG.search(name):
            message = f"{name}: several options in one text: write a list, or a column for each option"
            return DataError(file, 1, message)
    names = join_names(list(values))
    if not has_answer_file and not _usual_fields(values, "answer"):
        hint = "if they are in a file of their own, one per line, give it with --answers"
        return DataError(file, None, f"no field of the answers among {names}: {hint}")
    request = "state which are the question, the options and the answer (--fields)"
    return DataError(file, None, f"no map fits its fields {names}: {request}")


def _marks_answer(value: object) -> bool:
    """Return whether this is an object of options, of which one has a 1 and the others a 0."""
    if not isinstance(value, dict) or len(value) < 2:
        return False
    return find_single_mark(list(value.values())) is not None


def _holds_several_questions(value: object) -> bool:
    """Return whether this is a list of lists: the options of several questions about one text."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, list) for entry in value)
