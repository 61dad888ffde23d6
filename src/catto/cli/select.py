"""`catto select`: Confidence@k from a file of sampled predictions."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from catto.cli import console
from catto.cli.console import Real, number, refuse, say, span
from catto.errors import DataError
from catto.io.record_files import read_records
from catto.recipe.settings import MOST_SAMPLES
from catto.records import FinalAnswer, Prediction, Protocol

if TYPE_CHECKING:
    from catto.metrics.selection import Selected

MOST = "most confident"


def select(
    file: Annotated[Path, Argument(help="Predictions of `catto eval --k`: several samples per question.")],
    k: Annotated[list[int], Option(min=1, max=MOST_SAMPLES, help="How many samples to choose from: `FILE --k 4 8`.")],
    more: Annotated[list[int] | None, Argument(min=1, max=MOST_SAMPLES, metavar="K", hidden=True)] = None,
    tau: Annotated[float | None, Real(min=0.01, max=100, help="Rank by the confidence at this temperature.")] = None,
    fit_tau: Annotated[Path | None, Option(help="Fit tau on these greedy validation predictions.")] = None,
    rule: Annotated[str | None, Option(help="With --out: how the final answers are chosen.")] = None,
    calibrator: Annotated[Path | None, Option(help="With --out: calibrate the confidences.")] = None,
    adaptive: Annotated[bool, Option("--adaptive", help="Stop sampling when the choice is settled.")] = False,
    stop: Annotated[float | None, Real(min=0, max=1, help="With --adaptive: stop at this confidence.")] = None,
    out: Annotated[Path | None, Option(help="Write one final answer per question: a .jsonl file.")] = None,
    seed: console.SeedOption = 0,
    as_json: console.JsonOption = False,
) -> None:
    """Choose one of k samples: by confidence, by votes, by likelihood; beside them one random sample and the oracle.

    Also printed: how well confidence orders the samples of the same question, and how many had no readable answer.
    Two temperatures: the samples were drawn at one (`catto eval --temperature`), their confidence is ranked at another.
    With --adaptive and without --stop, the most confident stops at the lowest confidence that loses no right answer of
    this file, which should be of validation questions; `catto calibrate threshold` then needs others, with --stop.

    Examples:
    catto select predictions.jsonl --k 4 8
    catto select predictions.jsonl --k 4 --fit-tau validation.jsonl
    catto select predictions.jsonl --k 4 --tau 1.3 --json
    catto select validation.jsonl --k 8 --rule "majority vote" --adaptive --out final.jsonl
    """
    from catto.calibrate import open_fitted, write_final
    from catto.measure import ParseCounts, jsonable
    from catto.metrics import selection, temperature
    from catto.predict import read_refused_requests

    sizes = [*k, *(more or ())]
    if out is None and (rule is not None or calibrator is not None):
        refuse("--rule and --calibrator: for the final answers that --out writes")
    if out is not None:
        if rule is None or len(sizes) > 1 or tau is not None or fit_tau is not None:
            refuse("--out: needs --rule and one --k, and takes a --calibrator in place of a tau")
        console.check_name("--rule", rule, selection.RULES)
        console.writable_file("--out", out, ".jsonl", source=file)
    if stop is not None and not adaptive:
        refuse("--stop: needs --adaptive")
    if tau is not None and fit_tau is not None:
        refuse("--tau and --fit-tau: give one of the two")
    refused = {refusal.question for refusal in read_refused_requests(file)}
    try:
        predictions = [row for row in read_records(file, Prediction) if row.question not in refused]
    except DataError as error:
        refuse(f"{error}; expected the predictions that catto eval writes")
    written = ""
    with console.refusing(place=f"{file}: "):
        if fit_tau is not None:
            tau = (scaling := temperature.fit_tau(list(read_records(fit_tau, Prediction)))).tau
            if scaling.at_edge:
                console.warn(f"{fit_tau}: the best tau lies beyond {tau:g}, the end of its range")
        samples = selection.gather_candidates(predictions, tau)
        rows = [row for size in sizes for row in selection.measure_rules(samples, size, seed=seed)]
        rescaled = predictions if tau is None else temperature.rescale_predictions(predictions, tau)
        saved = _adaptive_rows(rescaled, sizes, stop) if adaptive else []
        if out is not None and rule is not None:
            applied = None if calibrator is None else open_fitted(calibrator)
            ranked_by = predictions if applied is None else applied.calibrate_samples(predictions)
            protocol = _protocol(ranked_by, rule, sizes[0], adaptive, stop, applied.protocol if applied else None)
            mean = _means(write_final(out, predictions, protocol, applied, own_stop=stop is None and rule == MOST))
            taken = f"the {rule} of {sizes[0]} ({mean['samples']:.2f} samples on average)"
            written = f"Wrote {out}: {taken}, accuracy {100 * mean['accuracy']:.1f} %."
    within, counts = selection.within_questions(samples, seed=seed), ParseCounts.of(row.source for row in predictions)
    if as_json:
        known = {"fallback_rate": counts.share("fallback"), "sources": jsonable(counts), "within": jsonable(within)}
        console.print_json([{**jsonable(row), **known} for row in rows] + saved)
        return
    if counts.warning is not None:
        say(counts.warning)
    _show(str(file), rows, saved, f"{100 * counts.share('fallback'):.1f} %")
    if refused:
        say(f"Left out: {len(refused):,} questions with refused requests.")
    questions, size = samples.label.shape
    say(f"N = {questions:,} questions, {size} samples each, {counts.describe()}.")
    drawn = ", ".join(f"{value:g}" for value in sorted({row.temperature for row in predictions}))
    ranked = "the stated confidence" if tau is None else f"the confidence at tau {tau:.3g}"
    say(f"Sampled at temperature {drawn}, ranked by {ranked}.")
    if written:
        say(written)
    if not within.pairs:
        say("AUROC of confidence within questions: none has a right and a wrong sample, so no rule can win.")
        return
    value = f"{number(within.value, True)} (95 % interval {span(within, True)})"
    basis = f"{within.pairs:,} pairs of a right and a wrong sample in {within.questions:,} of {questions:,} questions"
    say(f"AUROC of confidence within questions: {value}, from {basis}; at 50 confidence cannot tell which to pick.")
    if tau is None:
        say("Next: --fit-tau validation.jsonl ranks by the confidence at a temperature fitted on validation answers.")


def _protocol(
    rows: list[Prediction], rule: str, k: int, adaptive: bool, stop: float | None = None, like: Protocol | None = None
) -> Protocol:
    """Describe how the first k samples of a file become one answer; choose where to stop if that is not given.

    like: the calibrator's. Where no response of one of the two needed a fallback, both are alike.
    """
    from catto.metrics.selection import choose_stop, gather_candidates, samples_by_question

    temperatures = {row.temperature for row in rows}
    if len(temperatures) > 1:
        raise ValueError(f"samples of {len(temperatures)} temperatures, expected one")
    if adaptive and stop is None:
        first = [sample for row in samples_by_question(rows) for sample in row[:k]]
        stop = choose_stop(gather_candidates(first)) if rule == MOST else 1.0
    forced = [row.label for row in rows if row.source == "fallback"]
    fallback: Literal["answer", "none", None] = None if not forced else "none" if None in forced else "answer"
    if like is not None and None in (fallback, like.fallback):
        fallback = like.fallback
    return Protocol(rule=rule, k=k, temperature=temperatures.pop(), fallback=fallback, stop=stop)


def _adaptive_rows(predictions: list[Prediction], sizes: list[int], stop: float | None) -> list[dict[str, Any]]:
    """Return what stopping early saves of the first k samples: mean samples, tokens and accuracy, beside all k."""
    from catto.calibrate import final_answers
    from catto.metrics.selection import VOTES

    rows: list[dict[str, Any]] = []
    for k, rule, early in product(sizes, (MOST, *VOTES), (False, True)):
        protocol = _protocol(predictions, rule, k, early, stop if early and rule == MOST else None)
        rows.append({"rule": rule, "k": k, "stop": protocol.stop, **_means(final_answers(predictions, protocol))})
    return rows


def _show(title: str, rows: list[Selected], saved: list[dict[str, Any]], fallback: str) -> None:
    """Print the rules, and what stopping early saves where it was asked for."""
    cells = []
    for row in rows:
        accuracy = f"{number(row.accuracy, True)}\n{span(row, True)}"
        subsets = f"{row.subsets:,}{'' if row.exact else ' drawn'}"
        cells.append([row.rule, str(row.k), accuracy, number(row.ece, True), subsets, fallback])
    console.show_table(title, ("rule", "k", "accuracy\n95 % interval", "ECE", "subsets", "fallback"), cells)
    cells = []
    for mean in saved:
        tokens = "-" if mean["tokens"] is None else f"{mean['tokens']:.0f}"
        ended = "-" if mean["stop"] is None else f"{mean['stop']:.4g}" if mean["rule"] == MOST else "settled"
        means = f"{mean['samples']:.2f}", tokens, number(mean["accuracy"], True)
        cells.append([mean["rule"], str(mean["k"]), ended, *means])
    if saved:
        console.show_table("Stopping early", ("rule", "k", "stop", "samples", "tokens", "accuracy"), cells)


def _means(answers: list[FinalAnswer]) -> dict[str, Any]:
    """Return the mean samples, tokens (None where an answer has no count) and accuracy of final answers."""
    tokens = [answer.tokens for answer in answers if answer.tokens is not None]
    return {
        "samples": sum(answer.samples for answer in answers) / len(answers),
        "tokens": sum(tokens) / len(answers) if len(tokens) == len(answers) else None,
        "accuracy": sum(answer.correct for answer in answers) / len(answers),
    }
