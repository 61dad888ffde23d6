"""`catto data`: the questions of a task, and the prompts that a model sees."""

from __future__ import annotations

from collections import deque
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from catto.cli import console
from catto.cli.console import MOST_SEED, examples, print_json, print_table, refuse, refusing, say, table

if TYPE_CHECKING:
    from catto.records import Question, Split
    from catto.tasks import LoadReport

__all__ = ["data"]

EXAMPLES = examples(
    "catto data witnesses",
    "catto data snli --data-dir data/snli --split validation --n 1",
    "catto data commonsense_qa --stats --json",
    "catto data mine --file mine.jsonl --fields question=stem,options=choices,answer=key",
)


def data(
    task: Annotated[
        str, typer.Argument(help="A task's name; with --file, a name of your own.", autocompletion=console.tasks)
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Folder of local copies.", show_default="the hub")] = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Which questions to show.")] = "train",
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the splits.")] = 0,
    n: Annotated[int, typer.Option("--n", min=0, max=100_000, help="How many questions to show.")] = 3,
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
    """Show questions of a task, their prompts and the sizes of the task's splits."""
    from catto.tasks import from_file

    if file is None and fields is not None:
        refuse("--fields: goes with --file")
    with refusing():
        source = task if file is None else from_file(file, fields=_columns(fields or ""), answer=answer, name=task)
        questions, report = _read(source, split, seed, data_dir, n)
        reports = _all_splits(source, report, seed, data_dir)
    if as_json:
        counts = {name: {"problem": it} if isinstance(it, str) else _counts(it) for name, it in reports.items()}
        named = {"task": report.task, "licence": report.licence, "source": report.source}
        print_json({**named, "splits": counts, "questions": [_prompted(question) for question in questions]})
        return
    say(f"{report.task}: {report.source}; licence: {report.licence}")
    if stats:
        _show_stats(reports)
        return
    sizes = [f"{name} {'-' if isinstance(it, str) else f'{it.kept:,}'}" for name, it in reports.items()]
    say(f"questions: {', '.join(sizes)}")
    for question in questions:
        say(f"\n--- {question.id} ({question.split}), gold {question.gold}")
        for message in _prompted(question)["messages"]:
            say(f"[{message['role']}]\n{message['content']}")


def _columns(text: str) -> dict[str, str | list[str]]:
    """Parse `question=stem,options=a+b+c,answer=key`."""
    columns: dict[str, str | list[str]] = {}
    for part in filter(None, text.split(",")):
        name, equals, column = part.partition("=")
        if not equals or not column:
            refuse(f"--fields: {part}: expected name=column, such as question=stem")
        columns[name.strip()] = column.split("+") if "+" in column else column
    return columns


def _read(task: Any, split: Split, seed: int, data_dir: Path | None, n: int) -> tuple[list[Question], LoadReport]:
    """Return the first n questions of a split and the counts of all: they are complete once every row was read."""
    from catto.tasks import load

    loaded = load(task, split, seed=seed, data_dir=data_dir)
    first = list(islice(loaded, n))
    deque(loaded, maxlen=0)
    return first, loaded.report


def _all_splits(task: Any, shown: LoadReport, seed: int, data_dir: Path | None) -> dict[Split, LoadReport | str]:
    """Return the counts of every split; the others may be absent: then the problem."""
    from catto.problems import DataError
    from catto.records import SPLITS

    reports: dict[Split, LoadReport | str] = {}
    for split in SPLITS:
        try:
            reports[split] = shown if split == shown.split else _read(task, split, seed, data_dir, 0)[1]
        except DataError as error:
            reports[split] = str(error)
    return reports


def _counts(report: LoadReport) -> dict[str, Any]:
    return {
        "questions": report.kept,
        "read": report.read,
        "gold": dict(sorted(report.gold.items())),
        "dropped": dict(sorted(report.dropped.items())),
        "leaks": _leaks(report),
        "unshuffled": report.unshuffled,
        "files": report.files,
        "notes": report.notes,
    }


def _leaks(report: LoadReport) -> int:
    """Count the rows whose content is also in a held-out split: training on them would be a leak."""
    return sum(count for reason, count in report.dropped.items() if reason.startswith("content_in_"))


def _prompted(question: Question) -> dict[str, Any]:
    from catto.prompts import messages

    return {**question.model_dump(mode="json"), "messages": [message.model_dump() for message in messages(question)]}


def _show_stats(reports: dict[Split, LoadReport | str]) -> None:
    """Print the sizes of the splits; then label balance, what was left out and why, and notes."""
    sizes = table("", "split", "questions", "rows read", "leaks removed")
    lines: list[str] = []
    for split, report in reports.items():
        if isinstance(report, str):
            sizes.add_row(split, "-", "-", "-")
            lines.append(f"{split}: {report}")
            continue
        sizes.add_row(split, *(f"{count:,}" for count in (report.kept, report.read, _leaks(report))))
        total = report.gold.total()
        gold = ", ".join(f"{label} {100 * count / total:.1f} %" for label, count in sorted(report.gold.items()))
        dropped = ", ".join(f"{count:,} {why.replace('_', ' ')}" for why, count in sorted(report.dropped.items()))
        details = f"gold labels {gold or '-'}", f"left out {dropped or 'nothing'}", *report.notes
        lines.extend(f"{split}: {line}" for line in details)
    print_table(sizes)
    for line in lines:
        say(line)
