"""`catto data`: the questions of a task, as they are and as they are put to a model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from catto.cli import console as completing
from catto.cli.console import MOST_SEED, print_json, print_table, refuse, say, table

if TYPE_CHECKING:
    from catto.records import Question, Split
    from catto.tasks import LoadReport, Task

__all__ = ["data"]

EXAMPLES = """
[bold]Examples[/bold]

  catto data witnesses

  catto data snli --data-dir data/snli --split validation --n 1

  catto data commonsense_qa --stats --json

  catto data mine --file mine.jsonl --fields question=stem,options=choices,answer=key
"""

# Such a reason of `dropped` says that the same content stands in a held-out split: training on it would be a leak.
LEAK = "content_in_"


def data(
    task: Annotated[
        str,
        typer.Argument(help="A task's name; with --file, a name of your own.", autocompletion=completing.tasks),
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Folder of local copies.", show_default="the hub")] = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Which questions are shown.")] = "train",
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the splits.")] = 0,
    n: Annotated[int, typer.Option("--n", min=0, max=100_000, help="How many questions are shown.")] = 3,
    stats: Annotated[
        bool, typer.Option("--stats", help="Count labels, dropped rows and leaks of every split.")
    ] = False,
    file: Annotated[Path | None, typer.Option(help="A file of your own, JSON lines, JSON or CSV.")] = None,
    fields: Annotated[
        str | None, typer.Option(help="Its columns: question=..,options=..,answer=..; a list as options=a+b+c.")
    ] = None,
    answer: Annotated[Literal["label", "index", "text"], typer.Option(help="What its answer column holds.")] = "label",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show questions of a task, the prompts made of them and the sizes of its splits."""
    from catto.problems import DataError

    try:
        found = _task(task, file, fields, answer)
        parts = _parts(found, split, seed, data_dir, n)
    except DataError:
        raise
    except ValueError as error:
        refuse(str(error))
    if as_json:
        print_json(_document(found, parts))
        return
    say(f"{found.name}: {found.source}; licence: {found.licence}")
    (_show_stats if stats else _show)(parts)


@dataclass(frozen=True)
class Part:
    """One split: its first questions, where they are wanted, and what loading counted or why it could not."""

    questions: list[Question]
    report: LoadReport | None
    problem: str = ""


def _task(name: str, file: Path | None, fields: str | None, answer: Literal["label", "index", "text"]) -> Task:
    from catto.problems import did_you_mean
    from catto.tasks import TASKS, from_file

    if file is not None:
        return from_file(file, fields=_fields(fields or ""), answer=answer, name=name)
    if fields is not None:
        refuse("--fields: goes with --file")
    if name not in TASKS:
        refuse(f"task {name} is not one of {', '.join(TASKS)}{did_you_mean(name, TASKS)}")
    return TASKS[name]


def _fields(text: str) -> dict[str, str | list[str]]:
    """Read `question=stem,options=a+b+c,answer=key`."""
    found: dict[str, str | list[str]] = {}
    for part in filter(None, text.split(",")):
        name, equals, column = part.partition("=")
        if not equals or not column:
            refuse(f"--fields: {part}: expected name=column, such as question=stem")
        found[name.strip()] = column.split("+") if "+" in column else column
    return found


def _parts(task: Task, shown: Split, seed: int, data_dir: Path | None, n: int) -> dict[Split, Part]:
    """Read every split, since its size is known only then; only the one that is shown must be there."""
    from catto.problems import DataError
    from catto.records import SPLITS

    parts = {shown: _part(task, shown, seed, data_dir, n)}
    for split in SPLITS:
        try:
            parts[split] = parts.get(split) or _part(task, split, seed, data_dir, 0)
        except DataError as error:
            parts[split] = Part([], None, str(error))
    return {split: parts[split] for split in SPLITS}


def _part(task: Task, split: Split, seed: int, data_dir: Path | None, n: int) -> Part:
    from catto.tasks import load

    loaded = load(task, split, seed=seed, data_dir=data_dir)
    first = list(islice(loaded, n))
    deque(loaded, maxlen=0)
    return Part(first, loaded.report)


def _document(task: Task, parts: dict[Split, Part]) -> dict[str, Any]:
    return {
        "task": task.name,
        "licence": task.licence,
        "source": task.source,
        "splits": {split: _counts(part) for split, part in parts.items()},
        "questions": [_put(question) for part in parts.values() for question in part.questions],
    }


def _counts(part: Part) -> dict[str, Any]:
    if part.report is None:
        return {"problem": part.problem}
    report = part.report
    return {
        "questions": report.kept,
        "read": report.read,
        "gold": dict(sorted(report.gold.items())),
        "dropped": dict(sorted(report.dropped.items())),
        "leaks": sum(count for reason, count in report.dropped.items() if reason.startswith(LEAK)),
        "unshuffled": report.unshuffled,
        "files": report.files,
        "notes": report.notes,
    }


def _put(question: Question) -> dict[str, Any]:
    from catto.prompts import messages

    return {**question.model_dump(mode="json"), "messages": [one.model_dump() for one in messages(question)]}


def _show(parts: dict[Split, Part]) -> None:
    sizes = [f"{split} {part.report.kept:,}" if part.report else f"{split} -" for split, part in parts.items()]
    say(f"questions: {', '.join(sizes)}")
    for question in (question for part in parts.values() for question in part.questions):
        say(f"\n--- {question.id} ({question.split}), gold {question.gold}")
        for message in _put(question)["messages"]:
            say(f"[{message['role']}]\n{message['content']}")


def _show_stats(parts: dict[Split, Part]) -> None:
    counts = {split: _counts(part) for split, part in parts.items()}
    names = ("questions", "read", "leaks")
    made = table("", "split", "questions", "rows read", "leaks removed")
    for split, found in counts.items():
        made.add_row(split, *(f"{found[name]:,}" if name in found else "-" for name in names))
    print_table(made)
    for split, found in counts.items():
        for line in [found["problem"]] if "problem" in found else _details(found):
            say(f"{split}: {line}")


def _details(counts: dict[str, Any]) -> list[str]:
    """Label balance, what was left out and why, notes."""
    total = sum(counts["gold"].values())
    balance = ", ".join(f"{label} {100 * count / total:.1f} %" for label, count in counts["gold"].items())
    dropped = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts["dropped"].items())
    return [f"gold labels {balance or '-'}", f"left out {dropped or 'nothing'}", *counts["notes"]]
