"""`catto select`: choose one of several sampled answers by confidence, vote or likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from catto.cli import console
from catto.cli.console import format_interval, format_number, refuse, say
from catto.cli.options import ADVANCED, OUTPUT, EquivalentOption, JsonOption, Real, SeedOption
from catto.errors import DataError
from catto.io.record_files import read_records
from catto.recipe.settings import MAX_SAMPLES
from catto.records import ConfidenceKind, FinalAnswer, Prediction, Protocol

if TYPE_CHECKING:
    from catto.answer_columns import ParseCounts
    from catto.calibrate import Fitted
    from catto.metrics.ranking import Within
    from catto.metrics.selection import Selected

# As in `catto.metrics.selection`, which is imported inside functions to keep `catto --help` fast.
MOST_CONFIDENT = "most confident"


def select(
    file: Annotated[Path, Argument(help="Predictions of `catto eval --k N`, with several samples per question.")],
    k: Annotated[
        list[int],
        Option(min=1, max=MAX_SAMPLES, help="Number of samples to choose from, such as --k 8 or --k 4 8."),
    ],
    more: Annotated[list[int] | None, Argument(min=1, max=MAX_SAMPLES, metavar="K", hidden=True)] = None,
    rule: Annotated[
        str | None, Option(help="Rule that chooses the final answers for --out, such as 'majority vote'.")
    ] = None,
    adaptive: Annotated[
        bool, Option("--adaptive", help="Stop sampling once more samples are unlikely to change the choice.")
    ] = False,
    out: Annotated[
        Path | None, Option(help="File to write one final answer per question to (.jsonl).", rich_help_panel=OUTPUT)
    ] = None,
    as_json: JsonOption = False,
    tau: Annotated[
        float | None,
        Real(
            min=0.01,
            max=100,
            help="Rank by the confidence after temperature scaling with this tau.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    fit_tau: Annotated[
        Path | None, Option(help="Fit --tau to these greedy validation predictions.", rich_help_panel=ADVANCED)
    ] = None,
    calibrator: Annotated[
        Path | None, Option(help="Calibrator for the confidences of --out.", rich_help_panel=ADVANCED)
    ] = None,
    kind: Annotated[
        ConfidenceKind | None,
        Option("--confidence-kind", help="Rank by this kind of confidence in the file.", rich_help_panel=ADVANCED),
    ] = None,
    equivalent: EquivalentOption = None,
    stop: Annotated[
        float | None,
        Real(
            min=0,
            max=1,
            help="With --adaptive: stop sampling at this confidence.",
            show_default="chosen on this file",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Choose one of k samples per question, and measure how often the choice is correct.

    The most confident sample, the majority vote, the confidence-weighted vote and the most likely response are compared
    with one random sample and with the oracle.

    Samples are drawn at one temperature (`catto eval --temperature`) and can be ranked at a different one (--tau). With
    --adaptive and without --stop, the stopping confidence is chosen on this file: use validation questions, and
    different ones for `catto calibrate threshold`.

    Examples:
    catto select predictions.jsonl --k 4 8
    catto select predictions.jsonl --k 4 --fit-tau validation.jsonl
    catto select predictions.jsonl --k 4 --tau 1.3 --json
    catto select validation.jsonl --k 8 --rule "majority vote" --adaptive --out final.jsonl
    """
    from catto.answer_columns import ParseCounts
    from catto.elicit import choose_kind
    from catto.metrics import selection, temperature
    from catto.predict import read_refused_requests

    k_values = [*k, *(more or ())]  # of `--k 4 8`, typer passes 4 as the option and 8 as an argument
    _check_final_options(file, out, k_values, rule=rule, calibrator=calibrator, has_tau=bool(tau or fit_tau))
    if stop is not None and not adaptive:
        refuse("--stop: needs --adaptive")
    if tau is not None and fit_tau is not None:
        refuse("--tau and --fit-tau: give only one of the two")
    refused_questions = {refusal.question for refusal in read_refused_requests(file)}
    predictions = _read_samples(file, refused_questions)
    if equivalent is not None:
        predictions = _merge_equivalent(predictions, equivalent)
    written = ""  # a sentence about the final answers
    with console.refuse_errors(place=f"{file}: "):
        if kind is not None:
            predictions = choose_kind(predictions, kind)
        if fit_tau is not None:
            tau = _fit_temperature(fit_tau)
        candidates = selection.gather_candidates(predictions, tau)
        rule_results: list[Selected] = []
        for k_value in k_values:
            rule_results += selection.measure_rules(candidates, k_value, seed=seed)
        savings: list[dict[str, Any]] = []
        if adaptive:
            ranked = predictions if tau is None else temperature.rescale_predictions(predictions, tau)
            savings = _measure_adaptive(ranked, k_values, stop)
        if out is not None and rule is not None:
            final = FinalOptions(rule=rule, k=k_values[0], adaptive=adaptive, stop=stop)
            written = _write_final_answers(out, predictions, final, calibrator)
    within = selection.within_questions(candidates, seed=seed)
    counts = ParseCounts.of(prediction.source for prediction in predictions)
    if as_json:
        console.print_json(_make_document(rule_results, counts, within) + savings)
        return
    _print_results(file, rule_results, savings, counts)
    if refused_questions:
        say(f"Left out: {len(refused_questions):,} questions with refused requests.")
    question_count, samples_each = candidates.label.shape
    say(f"N = {question_count:,} questions, {samples_each} samples each, {counts.describe()}.")
    say(_describe_ranking(predictions, tau))
    if written:
        say(written)
    say(_describe_within(within, question_count))
    has_label_logprobs = predictions[0].label_logprobs is not None
    if within.pairs and tau is None and has_label_logprobs:
        say("Next: --fit-tau validation.jsonl ranks by the confidence at a temperature fitted on validation answers.")


@dataclass(frozen=True)
class FinalOptions:
    """How one answer is chosen from the samples of a question.

    Attributes:
        rule: One of the rules of `catto.metrics.selection`.
        k: Number of samples.
        adaptive: Whether sampling may stop early.
        stop: Confidence at which sampling stops; None chooses it on the file.
    """

    rule: str
    k: int
    adaptive: bool
    stop: float | None = None


def _check_final_options(
    file: Path, out: Path | None, k_values: Sequence[int], *, rule: str | None, calibrator: Path | None, has_tau: bool
) -> None:
    """Refuse options of --out that are missing, that contradict each other, or that are given without --out.

    Args:
        file: The file of samples, which must not be overwritten.
        out: The value of --out; None if no final answers are written.
        k_values: The values of --k. Several can be compared with each other, but final answers need a single one.
        rule: The value of --rule; None if it is not given.
        calibrator: The value of --calibrator; None if it is not given.
        has_tau: Whether --tau or --fit-tau is given.
    """
    from catto.metrics.selection import RULES

    if out is None:
        if rule is not None or calibrator is not None:
            refuse("--rule and --calibrator: for the final answers of --out, which is missing")
        return
    if rule is None:
        refuse("--out: needs --rule")
    if len(k_values) > 1:
        refuse(f"--out: needs one --k, got {len(k_values)}")
    if has_tau:
        # A threshold holds only for answers that were made in the same way. The manifest of the answers therefore names
        # the calibrator, which may be a temperature, but it has no field for a tau from the command line.
        refuse("--out: cannot be combined with --tau or --fit-tau; use a temperature as --calibrator")
    console.check_name("--rule", rule, RULES)
    console.require_writable_file("--out", out, ".jsonl", source=file)


def _read_samples(file: Path, refused_questions: set[str]) -> list[Prediction]:
    """Read the predictions for all questions without refused requests."""
    try:
        return [row for row in read_records(file, Prediction) if row.question not in refused_questions]
    except DataError as error:
        refuse(f"{error}; expected the predictions that catto eval writes")


def _merge_equivalent(predictions: list[Prediction], command: str) -> list[Prediction]:
    """Return the predictions with one text for all answers that the program of --equivalent calls equivalent."""
    from catto.answer.equivalence_process import EquivalenceProcess
    from catto.elicit import merge_predictions

    with console.refuse_errors(), EquivalenceProcess(command) as process:
        return merge_predictions(predictions, process)


def _fit_temperature(file: Path) -> float:
    """Return the temperature that calibrates the confidences of a file best; warn if the best one may lie outside."""
    from catto.metrics.temperature import fit_tau

    scaling = fit_tau(list(read_records(file, Prediction)))
    if scaling.at_edge:
        console.warn(f"{file}: the best tau lies beyond {scaling.tau:g}, the end of the searched range")
    return scaling.tau


# ---- final answers


def _write_final_answers(out: Path, predictions: list[Prediction], final: FinalOptions, calibrator: Path | None) -> str:
    """Write one answer per question, and return a sentence that describes the file."""
    from catto.calibrate import open_fitted, write_final

    fitted: Fitted | None = None
    fitted_protocol = None
    ranked = predictions  # the samples with the confidences that decide when sampling stops
    if calibrator is not None:
        fitted = open_fitted(calibrator)
        fitted_protocol = fitted.protocol
        ranked = fitted.calibrate_samples(predictions)
    protocol = _make_protocol(ranked, final, fitted_protocol)
    # Only this rule needs the gold labels of these questions to choose where sampling stops.
    own_stop = final.stop is None and final.rule == MOST_CONFIDENT
    answers = write_final(out, predictions, protocol, fitted, own_stop=own_stop)  # calibrates the predictions itself
    mean = _average_answers(answers)
    chosen = f"the {final.rule} of {final.k} ({mean['samples']:.2f} samples on average)"
    return f"Wrote {out}: {chosen}, accuracy {100 * mean['accuracy']:.1f} %."


def _make_protocol(rows: list[Prediction], final: FinalOptions, fitted_protocol: Protocol | None = None) -> Protocol:
    """Describe how one answer is chosen from the first k samples.

    If sampling may stop early and `final` has no stopping confidence, it is chosen on these samples.

    Args:
        rows: The samples.
        final: How one of them is chosen.
        fitted_protocol: Protocol of the final answers that the calibrator was fitted on; None without a calibrator, or
            if it was fitted on single samples.

    Raises:
        ValueError: The samples differ in their temperature or their kind of confidence.
    """
    temperatures = {row.temperature for row in rows}
    if len(temperatures) > 1:
        raise ValueError(f"samples with {len(temperatures)} different temperatures, expected one")
    stop = final.stop
    if final.adaptive and stop is None:
        stop = _choose_stop(rows, final)
    kinds = {row.confidence_kind for row in rows}
    if len(kinds) > 1:
        raise ValueError(f"samples with {len(kinds)} different kinds of confidence, expected one")
    kind = kinds.pop()
    fallback = _find_fallback(rows)
    if fitted_protocol is not None:
        # A calibrator is refused for a different protocol. If no response needed a fallback, either here or where the
        # calibrator was fitted, the fallbacks do not contradict each other, and the calibrator's is stored.
        fits_calibrator = fallback is None or fitted_protocol.fallback is None
        if fits_calibrator:
            fallback = fitted_protocol.fallback
    return Protocol(
        rule=final.rule,
        k=final.k,
        temperature=temperatures.pop(),
        fallback=fallback,
        stop=stop,
        confidence_kind=None if kind == "label" else kind,  # in a protocol, None stands for "label"
    )


def _choose_stop(rows: list[Prediction], final: FinalOptions) -> float:
    """Choose the stopping confidence on the first k samples.

    A vote stops when it is settled, at any confidence. For a vote, the result is 1 and only says that it may stop.
    """
    from catto.metrics.selection import choose_stop, gather_candidates, samples_by_question

    if final.rule != MOST_CONFIDENT:
        return 1.0
    first_samples: list[Prediction] = []
    for samples in samples_by_question(rows):
        first_samples += samples[: final.k]
    return choose_stop(gather_candidates(first_samples))


def _find_fallback(rows: Sequence[Prediction]) -> Literal["answer", "none"] | None:
    """Return what was done about responses without an answer.

    Returns:
        `answer` if they were forced to one of the labels, `none` if some were left without an answer, and None if all
        responses had one.
    """
    forced = [row.choice for row in rows if row.is_forced]
    if not forced:
        return None
    if None in forced:
        return "none"
    return "answer"


def _measure_adaptive(
    predictions: list[Prediction], k_values: Sequence[int], stop: float | None
) -> list[dict[str, Any]]:
    """Compare taking all k samples with stopping early, for each rule that can stop early.

    Args:
        predictions: The samples, with the confidences that rank them.
        k_values: The values of k.
        stop: Confidence at which the most confident rule stops; None chooses it on these samples.

    Returns:
        For each k, rule and way of sampling: the mean number of samples and tokens, and the accuracy.
    """
    from catto.calibrate import final_answers
    from catto.metrics.selection import VOTES

    rows: list[dict[str, Any]] = []
    for k in k_values:
        for rule in (MOST_CONFIDENT, *VOTES):
            rule_stop = stop if rule == MOST_CONFIDENT else None  # votes stop when they are settled
            all_samples = FinalOptions(rule=rule, k=k, adaptive=False)
            stopping_early = FinalOptions(rule=rule, k=k, adaptive=True, stop=rule_stop)
            for final in (all_samples, stopping_early):
                protocol = _make_protocol(predictions, final)
                mean = _average_answers(final_answers(predictions, protocol))
                rows.append({"rule": rule, "k": k, "stop": protocol.stop, **mean})
    return rows


def _average_answers(answers: Sequence[FinalAnswer]) -> dict[str, Any]:
    """Return the mean number of samples and tokens, and the accuracy; `tokens` is None if they are not always known."""
    count = len(answers)
    tokens = [answer.tokens for answer in answers if answer.tokens is not None]
    mean_tokens = None
    if len(tokens) == count:
        mean_tokens = sum(tokens) / count
    return {
        "samples": sum(answer.samples for answer in answers) / count,
        "tokens": mean_tokens,
        "accuracy": sum(answer.correct for answer in answers) / count,
    }


# ---- printing


def _make_document(rule_results: Sequence[Selected], counts: ParseCounts, within: Within) -> list[dict[str, Any]]:
    """Return the JSON document for the rules: each entry repeats what is known about the whole file."""
    from catto.measure import jsonable

    whole_file = {"fallback_rate": counts.share("fallback"), "sources": jsonable(counts), "within": jsonable(within)}
    return [{**jsonable(result), **whole_file} for result in rule_results]


def _describe_within(within: Within, questions: int) -> str:
    """Describe how well the confidence ranks the samples of the same question."""
    if not within.pairs:
        return "AUROC of confidence within questions: none has both a right and a wrong sample, so no rule can win."
    value = f"{format_number(within.value, percent=True)} (95 % interval {format_interval(within, percent=True)})"
    basis = f"{within.pairs:,} pairs of a right and a wrong sample in {within.questions:,} of {questions:,} questions"
    return f"AUROC of confidence within questions: {value}, from {basis}; at 50, confidence is no help in choosing."


def _describe_ranking(predictions: Sequence[Prediction], tau: float | None) -> str:
    temperatures = sorted({row.temperature for row in predictions})
    drawn = ", ".join(f"{value:g}" for value in temperatures)
    ranked_by = "the stated confidence" if tau is None else f"the confidence at tau {tau:.3g}"
    return f"Sampled at temperature {drawn}, ranked by {ranked_by}."


def _print_results(
    file: Path, rule_results: Sequence[Selected], savings: Sequence[dict[str, Any]], counts: ParseCounts
) -> None:
    """Print a warning if many answers are forced, the table of rules, and what stopping early saves."""
    if counts.warning is not None:
        say(counts.warning)
    _print_rules(str(file), rule_results, counts)
    if savings:
        _print_savings(savings)


def _print_rules(title: str, rule_results: Sequence[Selected], counts: ParseCounts) -> None:
    """Print a table with the accuracy and ECE of each rule; the share of forced answers is that of the whole file."""
    fallback = f"{100 * counts.share('fallback'):.1f} %"
    rows = []
    for result in rule_results:
        accuracy = f"{format_number(result.accuracy, percent=True)}\n{format_interval(result, percent=True)}"
        ece = format_number(result.ece, percent=True)
        subsets = f"{result.subsets:,}" if result.exact else f"{result.subsets:,} drawn"
        rows.append([result.rule, str(result.k), accuracy, ece, subsets, fallback])
    console.show_table(title, ("rule", "k", "accuracy\n95 % interval", "ECE", "subsets", "fallback"), rows)


def _print_savings(savings: Sequence[dict[str, Any]]) -> None:
    """Print a table of what `_measure_adaptive` measured."""
    rows = []
    for mean in savings:
        tokens = "-" if mean["tokens"] is None else f"{mean['tokens']:.0f}"
        accuracy = format_number(mean["accuracy"], percent=True)
        rows.append([mean["rule"], str(mean["k"]), _format_stop(mean), f"{mean['samples']:.2f}", tokens, accuracy])
    console.show_table("Stopping early", ("rule", "k", "stop", "samples", "tokens", "accuracy"), rows)


def _format_stop(mean: dict[str, Any]) -> str:
    """Format when sampling stops: at a confidence, when a vote is settled, or only after all samples (a dash)."""
    if mean["stop"] is None:
        return "-"
    if mean["rule"] == MOST_CONFIDENT:
        return f"{mean['stop']:.4g}"
    return "settled"
