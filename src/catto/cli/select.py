"""`catto select`: Confidence@k from a file of sampled predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from catto.cli.console import (
    MOST_SEED,
    examples,
    finite,
    number,
    print_json,
    print_table,
    refuse,
    refusing,
    say,
    span,
    table,
)
from catto.recipe import MOST_SAMPLES

EXAMPLES = examples(
    "catto select predictions.jsonl --k 4 8",
    "catto select predictions.jsonl --k 4 --fit-tau validation.jsonl",
    "catto select predictions.jsonl --k 4 --tau 1.3 --json",
)


def select(
    file: Annotated[Path, typer.Argument(help="Predictions with several samples per question.")],
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

    Also printed: how well confidence orders the samples of the same question, and how many had no readable answer.
    Two temperatures: the samples were drawn at one (`catto eval --temperature`), their confidence is ranked at another.
    """
    from catto.files import read_records
    from catto.measure import Sources, jsonable
    from catto.metrics.selection import candidates, within_questions
    from catto.metrics.selection import select as selected
    from catto.metrics.temperature import fit_tau as fitted
    from catto.predict.predictor import refusals_of
    from catto.records import Prediction

    if tau is not None and fit_tau is not None:
        refuse("--tau and --fit-tau: give one of the two")
    refused = {refusal.question for refusal in refusals_of(file)}
    predictions = [one for one in read_records(file, Prediction) if one.question not in refused]
    with refusing(place=f"{file}: "):
        if fit_tau is not None:
            tau = fitted(list(read_records(fit_tau, Prediction))).tau
        samples = candidates(predictions, tau)
        rows = [row for size in (*k, *(more or ())) for row in selected(samples, size, seed=seed)]
    within, counts = within_questions(samples, seed=seed), Sources.of(one.source for one in predictions)
    rate = counts.share("fallback")
    if as_json:
        known = {"fallback_rate": rate, "sources": jsonable(counts), "within": jsonable(within)}
        print_json([{**jsonable(row), **known} for row in rows])
        return
    if counts.warning is not None:
        say(counts.warning)
    made = table(str(file), "rule", "k", "accuracy\n95 % interval", "ECE", "subsets", "fallback")
    for row in rows:
        accuracy = f"{number(row.accuracy, True)}\n{span(row.low, row.high, True)}"
        subsets = f"{row.subsets:,}{'' if row.exact else ' drawn'}"
        made.add_row(row.rule, str(row.k), accuracy, number(row.ece, True), subsets, f"{100 * rate:.1f} %")
    print_table(made)
    if refused:
        say(f"Left out: {len(refused):,} questions with refused requests.")
    questions, size = samples.label.shape
    say(f"N = {questions:,} questions, {size} samples each, {counts.told()}.")
    drawn = ", ".join(f"{value:g}" for value in sorted({one.temperature for one in predictions}))
    ranked = "the stated confidence" if tau is None else f"the confidence at tau {tau:.3g}"
    say(f"Sampled at temperature {drawn}, ranked by {ranked}.")
    if not within.pairs:
        say("AUROC of confidence within questions: none has a right and a wrong sample, so no rule can win.")
        return
    value = f"{number(within.value, True)} (95 % interval {span(within.low, within.high, True)})"
    basis = f"{within.pairs:,} pairs of a right and a wrong sample in {within.questions:,} of {questions:,} questions"
    say(f"AUROC of confidence within questions: {value}, from {basis}; at 50 confidence cannot tell which to pick.")
    if tau is None:
        say("Next: --fit-tau validation.jsonl ranks by the confidence at a temperature fitted on validation answers.")
