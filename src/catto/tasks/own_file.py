"""A user's own file as a task: a map of its fields, either stated or proposed from their names and values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from catto.errors import DataError, join_names
from catto.recipe.settings import TaskSettings
from catto.records import GRADES, SPLITS, Grade, Split, checked_name
from catto.tasks.answer_map import AnswerMap
from catto.tasks.benchmarks import TASKS, Files, OptionOrder, Task
from catto.tasks.fields import ANSWER, LETTERS, PLACEHOLDER, FieldMap, SourceRow, Style, find_single_mark
from catto.tasks.loading import RowSource, find_rows
from catto.tasks.splits import Cut

# Part of the map -> the names of its fields in the file.
Fields = Mapping[str, str | Sequence[str] | Mapping[str, str]]
# One field with all options of a row, or a list of columns with one option each.
OptionFields = str | list[str]
ProposedFields = dict[str, OptionFields]
_NEEDED = ("question", "answer")
_OPTIONAL = ("options", "labels", "id", "group")
_HELD_OUT_SHARE = 0.1

PROPOSAL_ROWS = 50  # number of first rows that a proposed map must fit
# Part of the map -> patterns of usual field names, the likeliest first. For a nested field, they match its last name.
_USUAL_NAMES = {
    "question": ("question", "(question_)?stem", "query", "goal", "prompt", "sentence", "ctx", "premise", "text"),
    "context": ("passage", "article", "context", "support", "paragraph", "premise"),
    "short answer": ("answers?", "aliases", "targets?", "solution"),
    "answer": ("answer_?key", "answer(_idx)?", "correct_(answer|option)", "cop", "labels?", "gold", "key"),
}
# In the names of fields with options, and of fields with wrong options only.
_OPTION_NAME = re.compile("choice|option|ending|answer|candidate|distract|incorrect|sol|^op", re.IGNORECASE)
_WRONG_OPTION_NAME = re.compile("distract|incorrect|wrong", re.IGNORECASE)
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
    """Make a task from a file, or from one file per split.

    If `fields` has no `options`, the questions are answered by a short text or a number.

    A single file is the training file. Validation and test are cut from it by seed, 10 % of its rows each, unless they
    have their own files. Training leaves out the questions that any of `seeds` holds out. If both splits are cut, 80 %
    of the rows are left for training with one seed, and about a third with five (0.8^5).

    Args:
        path: The file, or split -> file.
        fields: The parts `question`, `answer` and, if there are any, `options`, `labels`, `id` and `group` -> their
            field names in the file. `FieldMap` and `AnswerMap` describe the forms.
        answer: The style of the answers: whether they are labels, indices or texts of options. None infers the style
            that fits all rows.
        answers: A file with one answer per line, or one such file per split, if the answers are not in a field. Then
            `fields` has no `answer`. None if the answers are in a field.
        labels: The labels that answers use, in the order of the options, if they are not in a field; None means
            letters, or the options themselves if all rows share them.
        grade: How answers without options are compared; None means `any-of` for a list and `exact` otherwise.
        tolerance: For the grade `number`: the largest accepted difference, relative to the accepted value; None
            means 0.
        name: Name of the task.
        seeds: Seeds whose held-out questions are not trained on; empty means only the seed that is loaded.

    Returns:
        The task. The file is not read yet.

    Raises:
        ValueError: The arguments contradict each other, or `fields` has an unknown part or lacks one.

    >>> task = from_file("my.jsonl", fields={"question": "stem", "options": "choices", "answer": "key"})
    >>> task.cut.splits
    ('validation', 'test', 'train')
    """
    files = _list_paths(path)
    answer_files: Files | None = None
    if answers is not None:
        if "answer" in fields:
            raise ValueError("fields: answer: remove this field, since the answers are in a separate file")
        answer_files = _list_answer_paths(answers, files)
        fields = {**fields, "answer": ANSWER}
    row_map: FieldMap | AnswerMap
    task_labels: tuple[str, ...]
    order: OptionOrder
    if "options" in fields:
        if grade is not None or tolerance is not None:
            raise ValueError("grade and tolerance: only for questions without options; remove options from the fields")
        row_map = field_map(fields, answer, labels)
        word_labels = _word_labels(row_map)
        task_labels = word_labels or LETTERS  # the labels that a prompt shows
        order = _choose_order(row_map, word_labels)
    else:
        if answer is not None or labels:
            raise ValueError("fields: options is missing: only questions with options have labels or an answer style")
        row_map = answer_map(fields, grade, tolerance)
        task_labels = ()
        order = Task.order  # the default; it has no effect without options
    return Task(
        name=checked_name(name, "task"),
        labels=task_labels,
        licence="not stated",
        source=_join_paths(files),
        maps=(row_map,),
        order=order,
        cut=_cut_missing_splits(files),
        seeds=tuple(seeds),
        files=files,
        answers=answer_files,
    )


def _list_answer_paths(answers: str | Path | Files, files: Files) -> Files:
    """Return the answer files of each split; one answer file belongs to the only split that has questions."""
    if isinstance(answers, Mapping):
        return answers
    if len(files) > 1:
        raise ValueError("answers: expected one file for each split that has a file")
    return dict.fromkeys(files, answers)


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
    """Return how the held-out splits without a file are cut from the training file; None if both have a file."""
    shares: dict[Split, float] = {}
    for split in SPLITS:
        if split != "train" and split not in files:
            shares[split] = _HELD_OUT_SHARE
    if not shares:
        return None
    return Cut(source="train", shares=shares, rest="train")


def _word_labels(row_map: FieldMap) -> tuple[str, ...]:
    """Return the options that all rows share, such as yes and no, if each is one word and so can be its own label.

    Empty if an option has several words or if each row has its own options.
    """
    are_single_words = all(len(option.split()) == 1 for option in row_map.shared_options)
    if not are_single_words:
        return ()
    return row_map.shared_options


def _choose_order(row_map: FieldMap, word_labels: tuple[str, ...]) -> OptionOrder:
    """Return how options are ordered; `word_labels` are the options if each is its own label, else empty."""
    if word_labels:
        are_letters = word_labels == LETTERS[: len(word_labels)]
        return "fixed" if are_letters else "shuffled"
    # If one column always contains the right option, its position must not give the answer away.
    has_answer_column = isinstance(row_map.options, tuple) and row_map.answer in row_map.options
    return "shuffled" if has_answer_column else "shuffled unless letters are named"


def field_map(fields: Fields, style: Style | None = None, labels: Sequence[str] | None = None) -> FieldMap:
    """Check the parts of a map and make a `FieldMap` from them.

    Args:
        fields: Part of the map -> the names of its fields in the file.
        style: The style of the answers, as in `from_file`; None if it is still to be inferred.
        labels: The labels that answers use, in the order of the options. They are ignored if `fields` has `labels`;
            None means letters, or the options themselves if all rows share them.

    Returns:
        The map of a file with options.

    Raises:
        ValueError: A part of the map is unknown or missing, or the style is unknown.
    """
    _check_names(fields)
    known_styles = get_args(Style)
    if style is not None and style not in known_styles:
        raise ValueError(f"answer {style!r} is not one of {', '.join(known_styles)}")
    values: dict[str, Any] = {**fields, "style": style}
    values["question"] = _check_question(fields["question"])
    if labels and "labels" not in fields:
        values["labels"] = tuple(labels)
    has_option_columns = not isinstance(fields["options"], str)
    if has_option_columns:
        values["options"] = tuple(fields["options"])  # `FieldMap` recognises columns with one option each by the tuple
    return FieldMap(**values)


def answer_map(fields: Fields, grade: Grade | None = None, tolerance: float | None = None) -> AnswerMap:
    """Check the parts of a map without options and make an `AnswerMap` from them.

    Args:
        fields: Part of the map -> the names of its fields in the file.
        grade: How answers are compared; None means `any-of` for a list and `exact` otherwise.
        tolerance: For the grade `number`: the largest accepted difference, relative to the accepted value; None
            means 0.

    Returns:
        The map of a file without options.

    Raises:
        ValueError: A part of the map is unknown or missing, `fields` has labels, the grade is unknown, or there is a
            tolerance without the grade `number`.
    """
    _check_names(fields)
    if grade is not None and grade not in GRADES:
        raise ValueError(f"grade {grade!r} is not one of {', '.join(GRADES)}")
    if tolerance is not None and grade != "number":
        raise ValueError("tolerance: only for the grade number")
    if "labels" in fields:
        raise ValueError("fields: labels: expected options too")
    values: dict[str, Any] = {**fields}
    values["question"] = _check_question(fields["question"])
    return AnswerMap(**values, grade=grade, tolerance=tolerance or 0.0)


def _check_names(fields: Fields) -> None:
    """Raise ValueError for an unknown part of the map, a missing one, or several fields if one is expected."""
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
    """Return the question's template, or its fields by the names that a prompt shows; a list keeps the field names."""
    if isinstance(question, str):
        template = question.replace("\\n", "\n")  # a line break typed in a shell
        text_between_fields = re.sub(PLACEHOLDER, "", template)
        if re.search("[{}]", text_between_fields):
            raise ValueError("fields: question: a brace that belongs to no field, expected a template such as {field}")
        return template
    if isinstance(question, Mapping):
        return question
    return {name: name for name in question}


def own_task(name: str, settings: TaskSettings, seeds: Sequence[int] = ()) -> Task:
    """Make a task from the settings in a recipe or a task file.

    Args:
        name: Name of the task.
        settings: The files and their fields.
        seeds: Seeds whose held-out questions are not trained on; empty means only the seed that is loaded.

    Raises:
        ValueError: The settings name no file, or they contradict each other.
    """
    path = settings.files or settings.path
    if path is None:
        raise ValueError("path or files: the file of the questions is missing")
    options: dict[str, Any] = settings.model_dump(include={"answer", "answers", "labels", "grade", "tolerance"})
    return from_file(path, fields=settings.fields or {}, name=name, seeds=seeds, **options)


def task_name(path: str | Path) -> str:
    """Return a name for the task in a file; a file with the name of a benchmark gets the prefix `own_`.

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
    """Propose a map of fields that fits the first rows of the first split with files.

    Args:
        files: Split -> its files.
        answers: Split -> its files with one answer per line; None if the rows contain their answers.

    Returns:
        The likeliest map that fits, as `fields` of `from_file`. It has no `answer` if there are answer files, since
        `from_file` then expects none.

    Raises:
        DataError: The files have no rows, or no map fits them.

    >>> import tempfile
    >>> from pathlib import Path
    >>> path = Path(tempfile.mkdtemp()) / "mine.jsonl"
    >>> _ = path.write_text('{"stem": "Which?", "choices": ["red", "blue"], "key": "B"}')
    >>> propose({"train": path})
    {'question': 'stem', 'options': 'choices', 'answer': 'key'}
    """
    source = _find_own_rows(files, answers)
    rows = _read_first_rows(source)
    if not rows:
        first_split = source.available[0]
        raise DataError(source.row_files[first_split][0].name, None, "has no rows")
    values = _flatten_fields(rows[0].fields)
    has_answer_file = bool(answers)
    # Maps without options come last, since most files with options would fit one too.
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
    """Return whether a map without options can use the answers of the first rows as numbers.

    Args:
        files: Split -> its files.
        fields: Part of the map -> the names of its fields in the file.
        answers: Split -> its files with one answer per line; None if the rows contain their answers.

    Returns:
        Whether each of these rows fits the map and its answer is a number; True if there are no rows.
    """
    if answers:
        fields = {**fields, "answer": ANSWER}  # the field into which the lines of the answer files are read
    source = _find_own_rows(files, answers)
    try:
        number_map = answer_map(fields, "number")
        for row in _read_first_rows(source):
            number_map.parse_row(row.fields)
    except ValueError:
        return False
    return True


def _find_own_rows(files: Files, answers: Files | None) -> RowSource:
    task = Task(name="own", labels=LETTERS, licence="", source="", files=files, answers=answers)
    return find_rows(task, files=None, data_dir=None)


def _read_first_rows(source: RowSource) -> list[SourceRow]:
    """Return the first rows of the first split."""
    return list(islice(source.rows(source.available[0]), PROPOSAL_ROWS))


def _flatten_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row and, as `outer.inner`, the fields one level inside them."""
    values: dict[str, Any] = {}
    for name, value in fields.items():
        values[name] = value
        if isinstance(value, dict):
            for inner_name, inner_value in value.items():
                values[f"{name}.{inner_name}"] = inner_value
    return values


def _candidate_maps(values: Mapping[str, Any], *, has_answer_file: bool) -> Iterator[ProposedFields]:
    """Yield maps with options that the names and values of the fields suggest, the likeliest first.

    If the columns with options contain wrong options only, the column of the answer is added to them.

    Args:
        values: Field -> its value in the first row, from `_flatten_fields`.
        has_answer_file: Whether the answers are in a separate file.
    """
    for options in _candidate_options(values):
        answer_fields = [ANSWER] if has_answer_file else _candidate_answers(values, options)
        for answer in answer_fields:
            option_fields = options
            if isinstance(options, list) and _WRONG_OPTION_NAME.search(options[0]):
                option_fields = [answer, *options]
            used = {answer}
            if isinstance(option_fields, str):
                used.add(option_fields)
            else:
                used.update(option_fields)
            question = _propose_question(values, used)
            if question is not None:
                yield {"question": question, "options": option_fields, "answer": answer}


def _candidate_answers(values: Mapping[str, Any], options: OptionFields) -> list[str]:
    """Return fields that may contain the answer, the likeliest first.

    The first one is the field of the options if it marks the right option, as in {"red": 1, "blue": 0}.
    """
    fields = _usual_fields(values, "answer")
    if isinstance(options, str) and _marks_answer(values.get(options)):
        fields.insert(0, options)
    return fields


def _candidate_open_maps(values: Mapping[str, Any], *, has_answer_file: bool) -> Iterator[ProposedFields]:
    """Yield maps without options, the likeliest first, unless a row contains several questions."""
    if any(_holds_several_questions(value) for value in values.values()):
        return
    answer_fields = [ANSWER] if has_answer_file else _usual_fields(values, "short answer")
    for answer in answer_fields:
        question = _propose_question(values, {answer})
        if question is not None:
            yield {"question": question, "answer": answer}


def _candidate_options(values: Mapping[str, Any]) -> list[OptionFields]:
    """Return what may be the options: fields with lists or objects, numbered columns, and last "yes|no" for all rows.

    Fields whose names are usual for options come first.
    """
    candidates: list[OptionFields] = []
    columns_by_stem: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        if isinstance(value, list | dict):
            candidates.append(name)
        elif isinstance(value, str):
            match = _NUMBERED_COLUMN.fullmatch(name)
            if match is not None:
                stem = match[1]  # `option` for the column `option_a`
                columns_by_stem[stem].append(name)
    for columns in columns_by_stem.values():
        if len(columns) > 1:
            candidates.append(columns)
    candidates.sort(key=lambda names: not _OPTION_NAME.search("".join(names)))  # False sorts before True
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
    """Return the field of the question, or a template with its context; None if no text field is left.

    The question is the field with the most usual name, or else the one with the longest text. If another field has a
    usual name for a context, the result is a template such as "{passage}\\n{question}".

    Args:
        values: Field -> its value in the first row.
        used: The fields of the options and the answer, which are not proposed again.
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
            return f"{{{context}}}\\n{{{question}}}"  # a backslash and an n, as a user types a line break in a shell
    return question


def _fits_rows(fields: ProposedFields, rows: Sequence[SourceRow]) -> bool:
    """Return whether a map can read these rows. More than one answer style may fit: other rows may decide."""
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
    """Return the error for rows that no proposed map fits, with the likeliest cause.

    A map says which field is the question, which are the options and which is the answer. These causes are tried in
    order, the most specific first: a row contains several questions, a column joins all wrong options by semicolons,
    the answers are in a different file, or the names of the fields are unknown.

    Args:
        file: The file of the first row.
        values: Field -> its value in the first row.
        has_answer_file: Whether the answers are in a separate file.
    """
    for value in values.values():
        if _holds_several_questions(value):
            question_count = len(value)
            list_names = []  # the fields with one entry per question
            for name, other in values.items():
                if isinstance(other, list) and len(other) == question_count:
                    list_names.append(name)
            problem = f"{join_names(list_names)} are lists of {question_count}: a row contains several questions"
            return DataError(file, 1, f"{problem}; write one row for each")
    for name, value in values.items():
        is_joined_list = isinstance(value, str) and ";" in value
        if is_joined_list and _WRONG_OPTION_NAME.search(name):
            problem = f"{name}: several options in one text"
            return DataError(file, 1, f"{problem}; write a list or one column per option")
    names = join_names(list(values))
    if not has_answer_file and not _usual_fields(values, "answer"):
        problem = f"no answer field among {names}"
        remedy = "if the answers are in a separate file, one per line, name it with --answers"
    else:
        problem = f"no map fits its fields {names}"
        remedy = "state which are the question, the options and the answer (--fields)"
    return DataError(file, None, f"{problem}: {remedy}")


def _marks_answer(value: object) -> bool:
    """Return whether this is an object that maps one option to 1 and all others to 0."""
    if not isinstance(value, dict) or len(value) < 2:
        return False
    return find_single_mark(list(value.values())) is not None


def _holds_several_questions(value: object) -> bool:
    """Return whether this is a list of lists: the options of several questions about one text."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(entry, list) for entry in value)
