"""`catto data`: show the questions of a task with their prompts. Also: how all commands find a user's own questions."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from catto.cli.console import print_json, refuse, refuse_errors, say, show_table
from catto.cli.options import (
    ADVANCED,
    INPUT,
    OUTPUT,
    JsonOption,
    QuestionFileOptions,
    Seed,
    expand_options,
    list_tasks,
)
from catto.errors import DataError
from catto.prompts import render_messages
from catto.recipe.settings import TaskSettings, is_task_file
from catto.records import SPLITS, Question, Split
from catto.tasks import LoadReport, Task, load_questions
from catto.tasks.own_file import own_task, propose, suggests_numbers, task_name

SplitFiles = dict[Split, str | list[str]]
NO_FILE = QuestionFileOptions()

DataDirOption = Annotated[
    Path | None,
    Option(
        metavar="DIR",
        help="Folder with a local copy of the dataset.",
        show_default="the Hugging Face hub",
        rich_help_panel=ADVANCED,
    ),
]


@expand_options
def data(
    questions: QuestionFileOptions,
    task: Annotated[
        str | None, Argument(help="Name of a task, its YAML file, or a name for --file.", autocompletion=list_tasks)
    ] = None,
    split: Annotated[Split, Option(help="Split to show.", rich_help_panel=INPUT)] = "train",
    n: Annotated[int, Option(min=0, max=100_000, help="Number of questions to show.", rich_help_panel=OUTPUT)] = 3,
    stats: Annotated[
        bool, Option("--stats", help="Show label counts, dropped rows and leaks per split.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: JsonOption = False,
    data_dir: DataDirOption = None,
    seed: Annotated[int, Seed(help="Random seed of the splits.", rich_help_panel=ADVANCED)] = 0,
) -> None:
    """Show questions of a task, their prompts and the sizes of the splits.

    With --file but without --fields, a mapping of the file's fields is proposed.

    Examples:
    catto data witnesses
    catto data snli --data-dir data/snli --split validation --n 1
    catto data commonsense_qa --stats --json
    catto data --file mine.jsonl
    catto data --file mine.jsonl --fields question=stem,options=choices,answer=key
    catto data mine.yaml --stats
    """
    proposed: dict[str, Any] = {}
    with refuse_errors():
        if questions.file and questions.fields is None:
            proposed = _propose_fields(questions)
            questions = _accept_fields(questions, proposed)
            n = min(n, 1)  # one question is enough to check a proposal
        source = choose_source(task, questions, name="TASK")
        loaded = _load_splits(source, split, n=n, seed=seed, data_dir=data_dir)
    if as_json:
        _print_document(loaded, proposed)
        return
    report = loaded.report
    say(f"{report.task}: {report.source}; licence: {report.licence}")
    if proposed:
        proposal = f"--fields {shlex.quote(questions.fields or '')}"
        if questions.grade is not None:
            proposal += f" --grade {questions.grade}"
        say(f"Proposed from the file's first rows: {proposal}")
    if stats:
        _print_statistics(loaded.splits)
    else:
        _print_questions(loaded)


def _propose_fields(questions: QuestionFileOptions) -> dict[str, Any]:
    """Propose a mapping of fields for the user's file: name of a part of the question -> its field, or its fields."""
    files = parse_question_files(questions.file)
    answers = parse_answer_files(questions.answers, files)
    return propose(files, answers)


def _accept_fields(questions: QuestionFileOptions, fields: Mapping[str, Any]) -> QuestionFileOptions:
    """Return the options with a proposed mapping of fields, and with --grade number if all answers are numbers."""
    accepted = replace(questions, fields=_format_fields(fields))
    files = parse_question_files(questions.file)
    answers = parse_answer_files(questions.answers, files)
    has_options = "options" in fields
    if not has_options and questions.grade is None and suggests_numbers(files, fields, answers):
        accepted = replace(accepted, grade="number")
    return accepted


def _format_fields(fields: Mapping[str, Any]) -> str:
    """Format a mapping of fields as the value of --fields."""
    entries = []
    for name, column in fields.items():
        text = column if isinstance(column, str) else "+".join(column)
        entries.append(f"{name}={text}")
    return ",".join(entries)


# ---- loading


@dataclass(frozen=True)
class LoadedSplits:
    """The splits of a task.

    Attributes:
        splits: Split -> its counts, or its problem if it could not be read.
        questions: The first questions of the split to show.
        report: The report on loading the split to show.
    """

    splits: dict[Split, dict[str, Any]]
    questions: list[Question]
    report: LoadReport


def _load_splits(source: str | Task, shown: Split, *, n: int, seed: int, data_dir: Path | None) -> LoadedSplits:
    """Count the rows of every split, and keep the first questions of the split to show.

    Args:
        source: Name of a task, or the user's own task.
        shown: The split to show.
        n: Number of questions to keep.
        seed: Random seed of the splits.
        data_dir: Folder with a local copy of the dataset; None means the Hugging Face hub.

    Raises:
        DataError: The split to show cannot be read. A problem with another split is only recorded.
    """
    splits: dict[Split, dict[str, Any]] = {}
    for name in SPLITS:
        try:
            loaded = load_questions(source, name, seed=seed, data_dir=data_dir)
            first_questions = list(islice(loaded, n))
            for _ in loaded:  # the counts are complete only after all rows have been read
                pass
        except DataError as error:
            if name == shown:
                raise
            splits[name] = {"problem": str(error)}
            continue
        splits[name] = _count_split(loaded.report)
        if name == shown:
            shown_questions = first_questions
            shown_report = loaded.report
    return LoadedSplits(splits, shown_questions, shown_report)


def _count_split(report: LoadReport) -> dict[str, Any]:
    """Return the counts of a split under the names that --json prints."""
    dropped = dict(sorted(report.dropped.items()))  # reason -> number of rows
    leaks = 0
    for reason, count in dropped.items():
        if reason.startswith("content_in_"):  # the same question is in another split
            leaks += count
    return {
        "read": report.read,
        "unshuffled": report.unshuffled,
        "files": report.files,
        "notes": report.notes,
        "questions": report.kept,
        "gold": dict(sorted(report.gold.items())),
        "dropped": dropped,
        "leaks": leaks,
    }


# ---- printing


def _print_document(loaded: LoadedSplits, proposed: Mapping[str, Any]) -> None:
    report = loaded.report
    document: dict[str, Any] = {"task": report.task, "licence": report.licence, "source": report.source}
    if proposed:
        document["fields"] = proposed
    questions = []
    for question in loaded.questions:
        prompt = [dict(message) for message in render_messages(question)]
        questions.append({**question.model_dump(mode="json"), "messages": prompt})
    print_json({**document, "splits": loaded.splits, "questions": questions})


def _print_questions(loaded: LoadedSplits) -> None:
    sizes = []
    for name, counts in loaded.splits.items():
        size = "-" if "problem" in counts else f"{counts['questions']:,}"
        sizes.append(f"{name} {size}")
    say(f"questions: {', '.join(sizes)}")
    for question in loaded.questions:
        say(f"\n--- {question.id} ({question.split}), gold {question.gold}")
        for message in render_messages(question):
            say(f"[{message.role}]\n{message.content}")


def _print_statistics(splits: Mapping[Split, Mapping[str, Any]]) -> None:
    rows = []
    lines: list[str] = []
    for name, counts in splits.items():
        if "problem" in counts:
            rows.append([name, "-", "-", "-"])
            lines.append(f"{name}: {counts['problem']}")
            continue
        rows.append([name, *(f"{counts[key]:,}" for key in ("questions", "read", "leaks"))])
        for line in _describe_split(counts):
            lines.append(f"{name}: {line}")
    show_table("", ("split", "questions", "rows read", "leaks removed"), rows)
    for line in lines:
        say(line)


def _describe_split(counts: Mapping[str, Any]) -> list[str]:
    """Describe the balance of the labels, how many rows were left out and why, and add the notes on the split."""
    total = sum(counts["gold"].values())
    balance = ", ".join(f"{label} {100 * count / total:.1f} %" for label, count in counts["gold"].items())
    left_out = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts["dropped"].items())
    return [f"gold labels {balance or '-'}", f"left out {left_out or 'nothing'}", *counts["notes"]]


# ---- the user's own questions


@dataclass(frozen=True)
class OwnTask:
    """A task made from the user's own file.

    Attributes:
        name: Name of the task.
        settings: The task's settings, as in the block `tasks` of a recipe.
    """

    name: str
    settings: TaskSettings


def find_own_task(task: str | None, questions: QuestionFileOptions = NO_FILE) -> OwnTask | None:
    """Return the task made from the user's own questions: from --file, or from the YAML file of a task.

    Args:
        task: Name or YAML file of a task, or a name for the task of --file; None names the latter after its file.
        questions: Options that describe the user's file.

    Returns:
        The task; None if the command line names no file of the user.
    """
    from catto.recipe.load import load_task

    if not questions.file:
        _refuse_file_options(questions)
        if task is not None and is_task_file(task):
            return OwnTask(task_name(task), load_task(task))
        return None
    if questions.fields is None:
        refuse(f"--fields: needed with --file; catto data --file {shlex.quote(questions.file[0])} proposes it")
    columns = _parse_fields(questions.fields)
    files = parse_question_files(questions.file)
    answers = parse_answer_files(questions.answers, files) or None  # the setting is None if there are no such files
    # Without validation by pydantic: the function that makes the task, or the recipe, checks the settings.
    settings = TaskSettings.model_construct(
        files=files,
        fields=columns,
        answer=questions.answer,
        answers=answers,
        grade=questions.grade,
        tolerance=questions.tolerance,
    )
    first_file = next(iter(files.values()))[0]
    return OwnTask(task or task_name(first_file), settings)


def _refuse_file_options(questions: QuestionFileOptions) -> None:
    """Refuse options that describe the user's file if there is no --file."""
    options = {
        "--fields": questions.fields,
        "--answer": questions.answer,
        "--answers": questions.answers,
        "--grade": questions.grade,
        "--tolerance": questions.tolerance,
    }
    for option, value in options.items():
        if value is not None and value != []:
            refuse(f"{option}: needs --file")


def _parse_fields(text: str) -> dict[str, Any]:
    """Parse the value of --fields: name=column, name=column+column or name=template, separated by commas.

    >>> _parse_fields("question={passage}, {stem},options=a+b,answer=key")
    {'question': '{passage}, {stem}', 'options': ['a', 'b'], 'answer': 'key'}
    """
    columns: dict[str, Any] = {}
    # Split only at commas that are followed by `name=`: other commas belong to a template.
    for entry in re.split(r",\s*(?=\w+=)", text):
        if not entry:  # the text is empty or begins with a comma
            continue
        name, _, column = entry.partition("=")
        name = name.strip()
        if not column or name in columns:
            refuse(f"--fields: {entry}: expected name=column once, such as question=stem")
        joins_columns = "+" in column and "{" not in column  # a template may contain +
        columns[name] = column.split("+") if joins_columns else column
    return columns


def parse_question_files(values: Sequence[str] | None) -> SplitFiles:
    """Parse the values of --file, each SPLIT=FILE or FILE; None counts as no values.

    A FILE without a split counts as `train`; loading cuts the missing splits from it.

    >>> parse_question_files(["test=a.csv", "test=b.csv"]), parse_question_files(["all.csv"])
    ({'test': ['a.csv', 'b.csv']}, {'train': ['all.csv']})
    """
    files: dict[Split, list[str]] = {}
    for text in values or ():
        split = _find_split(text)
        path = text if split is None else text.removeprefix(f"{split}=")
        files.setdefault(split or "train", []).append(path)
    return {**files}


def _find_split(text: str) -> Split | None:
    """Return the split that a value of the form SPLIT=FILE names; None for a plain FILE."""
    for split in SPLITS:
        if text.startswith(f"{split}="):
            return split
    return None


def parse_answer_files(values: Sequence[str] | None, question_files: SplitFiles) -> SplitFiles:
    """Parse the values of --answers, each SPLIT=FILE or FILE; None counts as no values.

    A FILE without a split belongs to the split of the questions if they are all in one split; otherwise to `train`.
    """
    if len(question_files) != 1:
        return parse_question_files(values)
    (only_split,) = question_files
    values_with_split = []
    for text in values or ():
        has_split = _find_split(text) is not None
        values_with_split.append(text if has_split else f"{only_split}={text}")
    return parse_question_files(values_with_split)


@dataclass(frozen=True)
class RecipeTask:
    """The task of a recipe that a command line names, and the overrides of the recipe.

    Attributes:
        name: Name of the task; None if the command line names none.
        overrides: The overrides in the form of --set, including those that define the user's own task.
    """

    name: str | None
    overrides: list[str]


def override_task(sets: Sequence[str] | None, task: str | None, questions: QuestionFileOptions) -> RecipeTask:
    """Make the user's own questions, if there are any, the only task of a recipe.

    Args:
        sets: The values of --set.
        task: The value of --task.
        questions: Options that describe the user's file.

    Returns:
        The named task, and the overrides of --set followed by those that define the user's own task.
    """
    overrides = list(sets or ())
    own = find_own_task(task, questions)
    if own is None:
        return RecipeTask(task, overrides)
    block = {own.name: own.settings.model_dump(exclude_none=True)}
    overrides += [f"tasks={json.dumps(block, ensure_ascii=False)}", "train_on=null"]
    return RecipeTask(own.name, overrides)


def choose_source(task: str | None, questions: QuestionFileOptions = NO_FILE, *, name: str = "--task") -> str | Task:
    """Return what `catto.tasks.load_questions` loads: the name of a task, or the user's own task.

    The command is refused if it names no task and no file.

    Args:
        task: Name or YAML file of a task.
        questions: Options that describe the user's file.
        name: The option or argument that names the task, for the message.
    """
    own = find_own_task(task, questions)
    if own is not None:
        return own_task(own.name, own.settings)
    if task is None:
        refuse(f"{name} or --file is needed: a task's name, or a file of your own")
    return task
