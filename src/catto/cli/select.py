"""`catto select`: Confidence@k from a file of sampled predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catto.cli.checks import MOST_SEED, finite
from catto.cli.console import number, print_json, print_table, refuse, say, span, table
from catto.recipe import MOST_SAMPLES

if TYPE_CHECKING:
    from catto.evaluation.selection import Selected

__all__ = ["select"]

EXAMPLES = """
[bold]Examples[/bold]

  catto select predictions.jsonl --k 4 8

  catto select predictions.jsonl --k 4 --tau 1 --json
"""


def select(
    file: Annotated[Path, typer.Argument(help="Predictions with several samples a question.")],
    k: Annotated[list[int], typer.Option(min=1, max=MOST_SAMPLES, help="How many samples to choose from: `--k 4 8`.")],
    more: Annotated[list[int] | None, typer.Argument(min=1, max=MOST_SAMPLES, metavar="", hidden=True)] = None,
    tau: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=100.0, callback=finite, help="Temperature of the confidence.", show_default="the samples'"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the intervals' resamples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else; shares in 0 to 1.")] = False,
) -> None:
    """Choose one of k samples: by confidence, by votes, by likelihood; beside them one random sample and the oracle."""
    from catto.evaluation.selection import candidates
    from catto.evaluation.selection import select as selected
    from catto.records import Prediction, read_records

    predictions = list(read_records(file, Prediction))
    try:
        given = candidates(predictions, tau)
        found = [row for size in (*k, *(more or ())) for row in selected(given, size, seed=seed)]
    except ValueError as error:
        refuse(f"{file}: {error}")
    if as_json:
        print_json([_document(row) for row in found])
        return
    _show(file, found)
    fallback = sum(one.source == "fallback" for one in predictions) / len(predictions)
    say(f"N = {found[0].questions:,} questions, {given.label.shape[1]} samples each, fallback {100 * fallback:.1f} %.")


def _document(row: Selected) -> dict[str, object]:
    from dataclasses import asdict
    from math import isnan

    return {**asdict(row), "ece": None if isnan(row.ece) else row.ece}


def _show(file: Path, found: list[Selected]) -> None:
    made = table(str(file), "rule", "k", "accuracy", "95 % interval", "ECE", "subsets")
    for row in found:
        cells = (number(row.accuracy, True), span(row.low, row.high, True), number(row.ece, True))
        made.add_row(row.rule, str(row.k), *cells, f"{row.subsets:,}{'' if row.exact else ' drawn'}")
    print_table(made)
