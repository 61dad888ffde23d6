"""`catto data`: the questions of a task, and the prompts that a model sees; and the options of users' own questions."""

from __future__ import annotations

import json
import re
import shlex
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from catto.cli import console
from catto.cli.console import print_json, refuse, refusing, say, show_table, tasks
from catto.errors import DataError
from catto.prompts import messages
from catto.recipe.settings import TaskSettings, is_task_file
from catto.records import SPLITS, Split
from catto.tasks import Task, load
from catto.tasks.fields import Style
from catto.tasks.own_file import own_task, propose, task_name

__all__ = ["data"]

SplitFile = partial(Option, metavar="[SPLIT=]FILE")
FileOption = Annotated[
    list[str] | None, SplitFile(help="Your own questions: jsonl, json, csv, tsv, parquet; also .gz.")
]
FieldsOption = Annotated[str | None, Option(help="Its fields: question=..,options=.. (a+b+c, or yes|no),answer=..")]
AnswerOption = Annotated[Style | None, Option(help="What its answers are.", show_default="what fits all rows")]
AnswersOption = Annotated[list[str] | None, SplitFile(help="A file with its answers, one a line.")]
TaskArgument = Annotated[str | None, Argument(help="A task or its YAML file; a name for --file.", autocompletion=tasks)]
DataDirOption = Annotated[Path | None, Option(help="Folder of local copies.", show_default="the hub")]


def data(
    task: TaskArgument = None,
    data_dir: DataDirOption = None,
    split: Annotated[Split, Option(help="Which questions to show.")] = "train",
    seed: Annotated[int, console.Seed(help="Seed of the splits.")] = 0,
    n: Annotated[int, Option(min=0, max=100_000, help="How many questions to show.")] = 3,
    stats: Annotated[bool, Option("--stats", help="Count labels, dropped rows and leaks of every split.")] = False,
    file: FileOption = None,
    fields: FieldsOption = None,
    answer: AnswerOption = None,
    answers: AnswersOption = None,
    as_json: console.JsonOption = False,
) -> None:
    """Show questions of a task, their prompts and the sizes of the task's splits.

    For a file without --fields, a map of its fields is proposed.

    Examples:
    catto data witnesses
    catto data snli --data-dir data/snli --split validation --n 1
    catto data commonsense_qa --stats --json
    catto data --file mine.jsonl
    catto data --file mine.jsonl --fields question=stem,options=choices,answer=key
    catto data mine.yaml --stats
    """
    proposed: dict[str, Any] = {}
    splits: dict[Split, dict[str, Any]] = {}
    with refusing():
        if file and fields is None:
            files = by_split(file)
            proposed = propose(files, answers_by_split(answers, files))
            n = min(n, 1)
            columns = {name: value if isinstance(value, str) else "+".join(value) for name, value in proposed.items()}
            fields = ",".join(f"{name}={column}" for name, column in columns.items())
        source = source_of(task, file, fields, answer, answers, name="TASK")
        for name in SPLITS:
            try:
                loaded = load(source, name, seed=seed, data_dir=data_dir)
                first = list(islice(loaded, n))
                deque(loaded, maxlen=0)  # the counts are complete once every row was read
            except DataError as error:
                if name == split:
                    raise
                splits[name] = {"problem": str(error)}
                continue
            if name == split:
                questions, report = first, loaded.report
            splits[name] = {key: getattr(loaded.report, key) for key in ("read", "unshuffled", "files", "notes")}
            gold, dropped = (dict(sorted(counts.items())) for counts in (loaded.report.gold, loaded.report.dropped))
            leaks = sum(count for why, count in dropped.items() if why.startswith("content_in_"))
            splits[name] |= {"questions": loaded.report.kept, "gold": gold, "dropped": dropped, "leaks": leaks}
    if as_json:
        asked = [{**one.model_dump(mode="json"), "messages": [*map(dict, messages(one))]} for one in questions]
        named = {"task": report.task, "licence": report.licence, "source": report.source}
        print_json({**named, **({"fields": proposed} if proposed else {}), "splits": splits, "questions": asked})
        return
    say(f"{report.task}: {report.source}; licence: {report.licence}")
    if proposed:
        say(f"Proposed from its first rows: --fields {shlex.quote(fields or '')}")
    sizes, lines = [], []  # of each split; then label balance, what was left out and why, and notes
    for name, counts in splits.items():
        if "problem" in counts:
            sizes.append([name, "-", "-", "-"])
            lines.append(f"{name}: {counts['problem']}")
            continue
        sizes.append([name, *(f"{counts[key]:,}" for key in ("questions", "read", "leaks"))])
        total = sum(counts["gold"].values())
        balance = ", ".join(f"{label} {100 * count / total:.1f} %" for label, count in counts["gold"].items())
        left_out = ", ".join(f"{count:,} {why.replace('_', ' ')}" for why, count in counts["dropped"].items())
        details = f"gold labels {balance or '-'}", f"left out {left_out or 'nothing'}", *counts["notes"]
        lines += [f"{name}: {line}" for line in details]
    if stats:
        show_table("", ("split", "questions", "rows read", "leaks removed"), sizes)
        for line in lines:
            say(line)
        return
    say(f"questions: {', '.join(f'{name} {size}' for name, size, *_ in sizes)}")
    for question in questions:
        say(f"\n--- {question.id} ({question.split}), gold {question.gold}")
        for message in messages(question):
            say(f"[{message.role}]\n{message.content}")


def own_questions(
    task: str | None, file: list[str] | None, fields: str | None, answer: Any, answers: list[str] | None
) -> tuple[str, TaskSettings] | None:
    """Return name and settings of the user's own questions; None where the task is one of ours."""
    from catto.recipe.load import load_task

    if not file:
        for option, value in (("--fields", fields), ("--answer", answer), ("--answers", answers)):
            if value:
                refuse(f"{option}: goes with --file")
        return (task_name(task), load_task(task)) if is_task_file(task) else None
    if fields is None:
        refuse(f"--fields: needed with --file; catto data --file {shlex.quote(file[0])} proposes it")
    columns: dict[str, Any] = {}
    for part in filter(None, re.split(r",\s*(?=\w+=)", fields)):  # other commas belong to a template
        name, equals, column = part.partition("=")
        if not equals or not column or name.strip() in columns:
            refuse(f"--fields: {part}: expected name=column once, such as question=stem")
        columns[name.strip()] = column.split("+") if "+" in column and "{" not in column else column
    files = by_split(file)
    lines = answers_by_split(answers, files) or None
    block = TaskSettings.model_construct(files=files, fields=columns, answer=answer, answers=lines)
    return task or task_name(next(iter(files.values()))[0]), block


def by_split(files: list[str] | None) -> dict[Split, str | list[str]]:
    """Parse the values of --file and --answers: FILE, which is cut by seed, or SPLIT=FILE."""
    named: dict[Split, str | list[str]] = {}
    for text in files or ():
        split = next((split for split in SPLITS if text.startswith(f"{split}=")), None)
        named[split or "train"] = [*named.get(split or "train", ()), text.removeprefix(f"{split}=")]
    return named


def answers_by_split(answers: list[str] | None, files: dict[Split, str | list[str]]) -> dict[Split, str | list[str]]:
    """Parse the values of --answers. A file without a split goes with the questions, where these are of one split."""
    if len(files) != 1:
        return by_split(answers)
    (only,) = files
    named = []
    for text in answers or ():
        has_split = any(text.startswith(f"{split}=") for split in SPLITS)
        named.append(text if has_split else f"{only}={text}")
    return by_split(named)


def task_of_recipe(sets: list[str] | None, task: str | None, *options: Any) -> tuple[str | None, list[str]]:
    """Return a task's name and overrides of the recipe, of which the user's own questions become the only task."""
    overrides = list(sets or ())
    if (own := own_questions(task, *options)) is not None:
        task, block = own
        given = json.dumps({task: block.model_dump(exclude_none=True)}, ensure_ascii=False)
        overrides += [f"tasks={given}", "train_on=null"]
    return task, overrides


def source_of(task: str | None, *options: Any, name: str = "--task") -> str | Task:
    """Return what `load` takes: one of our tasks, or the one of the user's own questions."""
    if (own := own_questions(task, *options)) is not None:
        return own_task(*own)
    if task is None:
        refuse(f"{name} or --file is needed: a task's name, or a file of your own")
    return task
