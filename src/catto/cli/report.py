"""`catto report`: one page from files of answers, whichever tool wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from catto.cli import console, measure
from catto.cli.console import refuse, say
from catto.cli.display import Bar
from catto.cli.run import running
from catto.formats.columns import ColumnNames


def report(
    files: Annotated[list[str], Argument(metavar="[NAME=]FILE...", help="Answers, as `catto measure` reads them.")],
    out: Annotated[Path, Option(help="Folder for report.html, tables and figures.")] = Path("report"),
    task: Annotated[str, Option(help="What was asked, where the rows do not say it.")] = "answers",
    unparsed: measure.UnparsedOption = "fallback",
    log_format: measure.FormatOption = "auto",
    confidence: measure.ConfidenceColumn = "confidence",
    correct: measure.CorrectColumn = "correct",
    prediction: measure.PredictionColumn = None,
    gold: measure.GoldColumn = None,
    question: measure.QuestionColumn = None,
    length_normalised: measure.LengthOption = False,
) -> None:
    """Write a page that compares models by files of their answers, each with one answer to every question.

    Models are named by NAME=, else by their file, or by its folder where files have the same name. With one named `dpo`
    the others are compared to it.

    Examples:
    catto report sft.jsonl dpo.jsonl --out page
    catto report before=eval-1/predictions.jsonl after=eval-2/predictions.jsonl
    catto report a.csv b.csv --confidence p --prediction answer --gold truth --question item
    """
    from catto.report.build import build, results_of_files

    # A file whose own name holds a = is taken as it is.
    parts = [("", "", text) if "=" not in text or Path(text).exists() else text.partition("=") for text in files]
    given = [(name, Path(path)) for name, _, path in parts]
    alike = len({path.stem for _, path in given}) < len(given)
    titles = [name or (path.absolute().parent.name if alike else path.stem) for name, path in given]
    if twice := {title for title in titles if titles.count(title) > 1}:
        refuse(f"two files are named {min(twice)}: give them names, NAME=FILE")
    console.writable_folder("--out", out)
    names = ColumnNames(confidence, correct, None, prediction, gold, None, log_format, length_normalised, question)
    with console.refusing(), running() as shown:
        by_title = {title: path for title, (_, path) in zip(titles, given, strict=True)}
        results = results_of_files(by_title, names, out, task=task, unparsed=unparsed)
        bar = Bar(shown, "measuring")
        page = build(results, out, out, lambda done, total: bar.update(done, total, ""))
    say(f"Wrote {page}.")
