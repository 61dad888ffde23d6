"""`catto eval`: answer a task's questions with a model and measure how honest its confidence is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from catto.cli.calibrate import warn_of_fit_questions
from catto.cli.console import (
    format_number,
    refuse,
    refuse_errors,
    require_package,
    require_writable_folder,
    say,
    show_table,
)
from catto.cli.data import DataDirOption, choose_source
from catto.cli.display import Bar
from catto.cli.measure import measure_and_print
from catto.cli.options import (
    ADVANCED,
    INPUT,
    MODEL,
    OUTPUT,
    EquivalentOption,
    QuestionFileOptions,
    Real,
    Seed,
    expand_options,
    list_tasks,
)
from catto.cli.run import show_run
from catto.engines import Engine, check_hub, check_model, model_name, open_engine, server_address
from catto.engines.replies import ServerError, count_reasons
from catto.io.record_files import read_manifest, read_records
from catto.recipe.settings import MAX_SAMPLES
from catto.records import ConfidenceKind, Prediction, Split
from catto.tasks import load_questions

if TYPE_CHECKING:
    from catto.answer.equivalence_process import EquivalenceProcess

__all__ = ["evaluate"]

EngineName = Literal["transformers", "server", "vllm"]


@dataclass(frozen=True)
class EngineOptions:
    """Options that describe the inference engine."""

    engine: Annotated[EngineName, Option(help="Inference engine.", rich_help_panel=MODEL)] = "transformers"
    base_url: Annotated[
        str | None, Option(help="Address of an OpenAI-compatible server, ending in /v1.", rich_help_panel=MODEL)
    ] = None
    api_key_env: Annotated[
        str, Option(help="Environment variable with the server's API key.", rich_help_panel=ADVANCED)
    ] = "OPENAI_API_KEY"
    batch_size: Annotated[
        int | None,
        Option(
            min=1,
            max=100_000,
            help="Number of responses generated at the same time.",
            show_default="16; 256 with vllm",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    deadline: Annotated[
        float,
        Real(min=1, max=1e6, help="Maximum seconds per server reply, with retries.", rich_help_panel=ADVANCED),
    ] = 1800.0

    @property
    def concurrency(self) -> int:
        """Number of responses generated at the same time."""
        if self.batch_size is not None:
            return self.batch_size
        return 256 if self.engine == "vllm" else 16


@expand_options
def evaluate(
    model: Annotated[
        str, Argument(help="Folder of the model, its id on the Hugging Face hub, or its name on the server.")
    ],
    questions: QuestionFileOptions,
    engine: EngineOptions,
    task: Annotated[
        str | None, Option(help="Name of a task, or its YAML file.", autocompletion=list_tasks, rich_help_panel=INPUT)
    ] = None,
    split: Annotated[Split, Option(help="Split to evaluate.", rich_help_panel=ADVANCED)] = "test",
    n: Annotated[
        int | None,
        Option(min=1, max=1_000_000, help="Number of questions.", show_default="all", rich_help_panel=INPUT),
    ] = None,
    k: Annotated[
        int, Option(min=1, max=MAX_SAMPLES, help="Number of samples per question.", rich_help_panel=MODEL)
    ] = 1,
    temperature: Annotated[
        float, Real(min=0.0, max=100.0, help="Sampling temperature; 0 means greedy decoding.", rich_help_panel=MODEL)
    ] = 0.0,
    max_tokens: Annotated[
        int, Option(min=1, max=1_000_000, help="Maximum number of tokens per response.", rich_help_panel=ADVANCED)
    ] = 512,
    reasoning: Annotated[
        bool,
        Option("--reasoning/--no-reasoning", help="Let the model reason before it answers.", rich_help_panel=ADVANCED),
    ] = True,
    kind: Annotated[
        list[str] | None,
        Option(
            "--confidence-kind",
            metavar="KIND",
            help="label, agreement, ptrue or verbal. May be repeated to compare them.",
            show_default="label; ptrue for tasks without options",
            rich_help_panel=MODEL,
        ),
    ] = None,
    equivalent: EquivalentOption = None,
    data_dir: DataDirOption = None,
    max_refused: Annotated[
        float, Real(min=0, max=1, help="Maximum share of refused requests.", rich_help_panel=ADVANCED)
    ] = 0.2,
    retry_refused: Annotated[
        bool, Option("--retry-refused", help="Send refused requests again.", rich_help_panel=ADVANCED)
    ] = False,
    seed: Annotated[int, Seed(help="Random seed of the samples.", rich_help_panel=ADVANCED)] = 0,
    split_seed: Annotated[
        int, Seed(help="Random seed of the splits (0 to 4 for benchmarks).", rich_help_panel=ADVANCED)
    ] = 0,
    out: Annotated[
        Path, Option(help="Folder for the predictions. An interrupted run resumes there.", rich_help_panel=OUTPUT)
    ] = Path("eval"),
) -> None:
    """Answer questions with a model and measure how honest its confidence is.

    The command prints the same tables as `catto measure`. It writes the predictions, a reliability diagram, and a model
    card and a dataset card for the Hugging Face hub. Requests that a server refuses are listed in
    predictions.refused.jsonl.

    Examples:
    catto eval runs/dpo --task commonsense_qa --data-dir data --n 500 --out runs/dpo/eval
    catto eval Qwen/Qwen3-4B --task snli --k 8 --temperature 0.8 --out eval
    catto eval my-model --task mmlu --engine server --base-url http://localhost:8000/v1
    catto eval my-model --file test=mine.jsonl --fields question=stem,options=choices,answer=key
    catto eval my-model --file test=sums.csv --fields question=question,answer=answer --grade number
    catto eval my-model --task mmlu --k 8 --temperature 1 --confidence-kind label --confidence-kind agreement
    """
    from catto import elicit, predict

    predictions = out / "predictions.jsonl"
    sampling = predict.SamplingOptions(
        k=k, temperature=temperature, seed=seed, max_tokens=max_tokens, reasoning=reasoning
    )
    require_writable_folder("--out", out)
    load_engine = _check_engine(model, engine)
    with refuse_errors(ServerError, ImportError):
        # Everything that can be refused is checked before the model is loaded.
        source = choose_source(task, questions)
        loaded = load_questions(source, split, seed=split_seed, data_dir=data_dir, limit=n)
        asked = list(loaded)
        predict.check_evaluation(asked, k, temperature)
        has_labels = all(question.has_labels for question in asked)
        default_kind = "label" if has_labels else "ptrue"
        kinds = elicit.check_kinds(kind or [default_kind], asked, k)
        if equivalent is not None and has_labels:
            refuse("--equivalent: only for questions without options")
        # Refuses a folder with finished predictions that were made with other settings.
        predict.check_settings(predictions, {**sampling, **_name_engine_settings(model, engine, k)})
        with show_run() as shown, _open_equivalence(equivalent) as equivalence:
            bar = Bar(shown, "answering")
            elicit.evaluate_kinds(
                load_engine(),
                asked,
                kinds,
                equivalent=equivalence,
                out=predictions,
                # With other kinds of confidence, answers are graded only once all have arrived.
                progress=partial(_show_progress, bar, has_accuracy=kinds == ["label"]),
                retry_refused=retry_refused,
                max_refused=max_refused,
                **sampling,
            )
            bar.print_line()  # the final numbers, if stderr is not a terminal with a visible bar
    for note in loaded.report.notes:
        say(f"{loaded.report.task}: {note}")
    _print_predictions(predictions)
    if engine.engine != "server":  # on a server, the model is a name and not a folder with a calibrator
        _print_calibrated(Path(model), predictions)


def _name_engine_settings(model: str, options: EngineOptions, k: int) -> dict[str, object]:
    """Return the engine's settings under the names that the manifest of the predictions uses.

    An interrupted evaluation resumes only with the same settings.

    Args:
        model: The model, as given on the command line.
        options: Options that describe the engine.
        k: Number of samples per question.
    """
    from catto.predict import chunk_size

    stored_model = model
    batch_size = options.concurrency
    if options.engine == "server":
        stored_model = model_name(model)
        # A server's replies do not depend on the batch size, so neither does the number of questions stored together.
        batch_size = Engine.batch_size
    return {"engine": options.engine, "model": stored_model, "chunk": chunk_size(batch_size, k)}


def _open_equivalence(command: str | None) -> AbstractContextManager[EquivalenceProcess | None]:
    """Return a context that starts the program of --equivalent and yields it; it yields None without a program."""
    from catto.answer.equivalence_process import EquivalenceProcess

    if command is None:
        return nullcontext()
    return EquivalenceProcess(command)


def _show_progress(bar: Bar, done: int, total: int, correct: int, *, has_accuracy: bool) -> None:
    """Show the number of responses and, if they are graded as they arrive, their accuracy so far.

    Args:
        bar: The progress bar.
        done: Number of finished responses; at least 1.
        total: Number of all responses.
        correct: Number of correct responses so far.
        has_accuracy: Whether responses are graded as they arrive. Those with several kinds of confidence are graded
            only once all have arrived.
    """
    note = f"accuracy {100 * correct / done:.1f} %" if has_accuracy else ""
    bar.update(done, total, note)


def _check_engine(model: str, options: EngineOptions) -> Callable[[], Engine]:
    """Refuse an engine that cannot be loaded.

    Returns:
        A function that loads the engine, to be called after the questions have been checked.
    """
    if options.engine == "server":
        if options.base_url is None:
            refuse("--engine server needs --base-url")
        return _check_server(model, options.base_url, options)
    if options.base_url is not None:
        refuse("--base-url needs --engine server")
    check_model(model)
    engine_name = options.engine
    if engine_name == "vllm":
        require_package("vllm", "vllm", "--engine vllm")
    else:
        require_package("torch", "train", "--engine transformers")

    def load_model() -> Engine:
        check_hub(model)  # here and not above, because it asks the hub
        return open_engine(engine_name, model, batch_size=options.concurrency)

    return load_model


def _check_server(model: str, base_url: str, options: EngineOptions) -> Callable[[], Engine]:
    """Refuse a malformed address of a server, and return a function that connects to the server."""
    from catto.engines.server import ServerEngine

    with refuse_errors(place="--base-url: "):
        server_address(base_url)
    return partial(
        ServerEngine,
        base_url,
        model,
        top_logprobs=20,  # the maximum; servers that offer fewer are asked for fewer
        concurrency=options.concurrency,
        api_key_env=options.api_key_env,
        deadline=options.deadline,
    )


def _print_kinds(path: Path, kinds: list[ConfidenceKind]) -> None:
    """Print the quality of each kind of confidence on the same answers, and the number of tokens used."""
    from catto.elicit import summarise_kinds

    rows = []
    for summary in summarise_kinds(list(read_records(path, Prediction)), kinds):
        numbers = (summary.ece, summary.brier, summary.auroc)
        rows.append([summary.kind, *(format_number(value, percent=True) for value in numbers), f"{summary.missing:,}"])
    say("The same answers, by kind of confidence:")
    show_table("", ("kind", "ECE", "Brier", "AUROC", "missing"), rows)
    counts = read_manifest(path).counts
    cost = f"Cost: {counts['generated_tokens']:,} generated tokens"
    if "ptrue" in kinds:
        cost += f", {counts['judgement_tokens']:,} read to judge {counts['judged_answers']:,} answers"
    say(f"{cost}. A missing confidence counts as 0.")


def _print_calibrated(folder: Path, predictions: Path) -> None:
    """If the model's folder contains a calibrator, apply it to the predictions, and print the results again.

    The calibrated predictions are written to `calibrated.jsonl` in the folder of the predictions. A calibrator for
    final answers, or for a different kind of confidence, is not applied; a sentence says why.

    Args:
        folder: The folder of the model. It does not exist if the model is on the Hugging Face hub.
        predictions: The file of predictions.
    """
    from catto.calibrate import apply_file
    from catto.formats.columns import ColumnNames
    from catto.model_calibration import CALIBRATOR_FILE, has_calibrator, load_calibrator

    if not has_calibrator(folder):
        return
    calibration = load_calibrator(folder)
    fitted = calibration.fitted
    calibrator_file = folder / CALIBRATOR_FILE
    is_for_final_answers = fitted.protocol is not None  # a protocol says how they were chosen among samples
    if is_for_final_answers:
        say(f"{calibrator_file} is for final answers; apply it with catto select --calibrator {calibrator_file}.")
        return
    # The first kind is the one in the column `confidence`. A manifest that lists no kinds is about label confidences.
    kind = read_manifest(predictions).notes.get("confidence_kinds", ["label"])[0]
    fitted_kind = fitted.confidence_kind or "label"
    if kind != fitted_kind:
        say(f"{calibrator_file} is for the confidence kind {fitted_kind} and was not applied.")
        return
    out = predictions.with_name("calibrated.jsonl")
    answers, calibrated = apply_file(fitted, predictions, ColumnNames(), out)
    say(f"With the calibrator of {folder}:")
    measure_and_print(out)
    warn_of_fit_questions(fitted, answers, predictions)
    risk_threshold = calibration.threshold
    if risk_threshold is not None:
        is_answered = calibrated >= risk_threshold.threshold
        say(f"{is_answered.sum():,} of {len(is_answered):,} answers reach the threshold of the model.")


def _print_predictions(path: Path) -> None:
    """Print the tables of `catto measure` and what happened to the requests, and write the two cards for the hub."""
    from catto.predict import read_refused_requests
    from catto.report.build import write_cards

    measure_and_print(path)
    cards = write_cards(path)
    manifest = read_manifest(path)
    counts = manifest.counts
    say(_describe_parsing(counts))
    if "confidence_kinds" in manifest.notes:
        _print_kinds(path, manifest.notes["confidence_kinds"])
    refused = read_refused_requests(path)
    if refused:
        total = counts["predictions"] + len(refused)
        say(f"{len(refused):,} of {total:,} requests were refused and are not in N ({count_reasons(refused)}).")
        say("--retry-refused sends them again.")
    if counts.get("other_model"):
        say(f"{counts['other_model']:,} replies name a different model from the one requested.")
    say(f"Predictions: {path}; in the same folder: {', '.join(cards)}.")


def _describe_parsing(counts: Mapping[str, int]) -> str:
    """Describe how many answers were found in which way, from the counts in the manifest of the predictions."""
    plain = counts.get("plain", 0)  # manifests of older versions lack this count
    forced = counts["fallback"]
    unanswered = counts.get("unanswered", 0)  # not counted if `label` is the only kind of confidence
    tagged = counts["predictions"] - plain - forced - unanswered
    ways = f"{tagged} after <answer>, {plain} plain (stated without the tag), {forced} forced (fallback)"
    if unanswered:
        ways += f", {unanswered} without an answer"
    return f"Answers: {ways}."
