"""`catto select`: Confidence@k from a file of sampled predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catto.cli.console import MOST_SEED, finite, number, print_json, print_table, refuse, say, span, table
from catto.recipe import MOST_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from catto.measure import Sources
    from catto.metrics.ranking import Within
    from catto.metrics.selection import Selected
    from catto.records import Prediction

__all__ = ["select"]

EXAMPLES = """
[bold]Examples[/bold]

  catto select predictions.jsonl --k 4 8

  catto select predictions.jsonl --k 4 --fit-tau validation.jsonl

  catto select predictions.jsonl --k 4 --tau 1.3 --json
"""


def select(
    file: Annotated[Path, typer.Argument(help="Predictions with several samples a question.")],
    k: Annotated[list[int], typer.Option(min=1, max=MOST_SAMPLES, help="How many samples to choose from: `--k 4 8`.")],
    more: Annotated[list[int] | None, typer.Argument(min=1, max=MOST_SAMPLES, metavar="", hidden=True)] = None,
    tau: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=100.0,
            callback=finite,
            help="Rank by the label's confidence at this temperature.",
            show_default="as the file states it",
        ),
    ] = None,
    fit_tau: Annotated[
        Path | None, typer.Option(help="Fit the ranking's tau on these greedy validation predictions.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the intervals' resamples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else; shares in 0 to 1.")] = False,
) -> None:
    """Choose one of k samples: by confidence, by votes, by likelihood; beside them one random sample and the oracle.

    With it stands how well confidence orders the samples of the same question, and how many had no readable answer.
    Two temperatures: the samples were drawn at one (`catto eval --temperature`), their confidence is ranked at another.
    """
    from catto.files import read_records
    from catto.measure import Sources
    from catto.metrics.selection import candidates, within_questions
    from catto.metrics.selection import select as selected
    from catto.metrics.temperature import fit_tau as fitted
    from catto.predict.predictor import refusals_of
    from catto.records import Prediction

    if tau is not None and fit_tau is not None:
        refuse("--tau and --fit-tau: give one of the two")
    refused = {refusal.question for refusal in refusals_of(file)}
    predictions = [one for one in read_records(file, Prediction) if one.question not in refused]
    try:
        if fit_tau is not None:
            tau = fitted(list(read_records(fit_tau, Prediction))).tau
        given = candidates(predictions, tau)
        found = [row for size in (*k, *(more or ())) for row in selected(given, size, seed=seed)]
    except ValueError as error:
        refuse(f"{file}: {error}")
    within, counts = within_questions(given, seed=seed), Sources.of(one.source for one in predictions)
    if as_json:
        print_json([_document(row, within, counts) for row in found])
        return
    if counts.warning is not None:
        say(counts.warning)
    _show(file, found, counts)
    if refused:
        say(f"Left out: {len(refused):,} questions with refused requests.")
    say(f"N = {found[0].questions:,} questions, {given.label.shape[1]} samples each, {counts.told()}.")
    say(_drawn_at(predictions, tau))
    say(_told(within, found[0].questions))


def _drawn_at(predictions: Sequence[Prediction], tau: float | None) -> str:
    """At which temperatures the samples were drawn, and at which tau their confidences are compared."""
    drawn = sorted({one.temperature for one in predictions})
    ranked = "the stated confidence" if tau is None else f"the confidence at tau {tau:.3g}"
    return f"Sampled at temperature {', '.join(f'{value:g}' for value in drawn)}, ranked by {ranked}."


def _told(within: Within, questions: int) -> str:
    if not within.pairs:
        return "AUROC of confidence within questions: none has a right and a wrong sample, so no rule can win."
    value = f"{number(within.value, True)} (95 % interval {span(within.low, within.high, True)})"
    resting = f"{within.pairs:,} pairs of a right and a wrong sample in {within.questions:,} of {questions:,} questions"
    return f"AUROC of confidence within questions: {value}, from {resting}; at 50 confidence cannot tell which to pick."


def _document(row: Selected, within: Within, counts: Sources) -> dict[str, object]:
    from dataclasses import asdict

    from catto.measure import jsonable

    return {
        **jsonable(row),
        "fallback_rate": counts.share("fallback"),
        "sources": asdict(counts),
        "within": jsonable(within),
    }


def _show(file: Path, found: list[Selected], counts: Sources) -> None:
    made = table(str(file), "rule", "k", "accuracy", "95 % interval", "ECE", "subsets", "fallback")
    fallback = f"{100 * counts.share('fallback'):.1f} %"
    for row in found:
        cells = (number(row.accuracy, True), span(row.low, row.high, True), number(row.ece, True))
        made.add_row(row.rule, str(row.k), *cells, f"{row.subsets:,}{'' if row.exact else ' drawn'}", fallback)
    print_table(made)
