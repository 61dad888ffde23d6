"""`catto lm-eval`: run lm-evaluation-harness and measure the confidences in its log."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from catto.cli import console
from catto.cli.console import format_interval, format_number, refuse, say, warn
from catto.cli.display import Bar, show_bars, show_progress
from catto.cli.options import ADVANCED, OUTPUT

if TYPE_CHECKING:
    from catto.integrations.lm_eval import HarnessAnswers, HarnessLog
    from catto.measure import Summary

METRICS_SHOWN = ("accuracy", "ece", "brier", "auroc")


def _show_task_folder(wanted: bool) -> None:
    if wanted:
        from catto.integrations.lm_eval import TASK_FOLDER

        say(str(TASK_FOLDER))
        raise typer.Exit()


def lm_eval(
    arguments: Annotated[list[str], Argument(metavar="ARGS", help="Arguments of `lm_eval`, after `--`.")],
    out: Annotated[
        Path,
        Option(help="Folder for report.html, and for the log unless ARGS have --output_path.", rich_help_panel=OUTPUT),
    ] = Path("lm-eval"),
    length_normalised: Annotated[
        bool,
        Option(
            "--length-normalised",
            help="Divide each log-likelihood by the length of its choice, as acc_norm does.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
    tasks_folder: Annotated[
        bool,
        Option(
            "--tasks-folder",
            callback=_show_task_folder,
            is_eager=True,
            help="Print the folder of tasks that report ECE, for `lm_eval --include_path`, and exit.",
            rich_help_panel=ADVANCED,
        ),
    ] = False,
) -> None:
    """Run lm-evaluation-harness and measure its confidences.

    The harness prints its own table first. A second table shows accuracy, ECE, Brier score and AUROC for every task
    and every group. A group is measured over all of its answers together: the ECE of MMLU is not the mean ECE of its
    57 subjects.

    Examples:
    catto lm-eval -- --model hf --model_args pretrained=my-model --tasks mmlu
    catto lm-eval --out page --length-normalised -- --model hf --model_args pretrained=my-model --tasks hellaswag
    lm_eval --include_path "$(catto lm-eval --tasks-folder)" --tasks arc_challenge_ece --model hf
    """
    if find_spec("lm_eval") is None:
        refuse('catto lm-eval needs lm_eval: pip install "lm_eval[hf]"')
    from catto.integrations.lm_eval import find_log_folder, find_results, read_log, run_harness

    console.require_writable_folder("--out", out)
    log_folder = find_log_folder(arguments) or out / "log"
    earlier_results = find_results(log_folder)  # the folder may have the logs of earlier runs
    exit_code = run_harness(arguments, log_folder)
    if exit_code != 0:
        refuse(f"lm_eval failed with exit code {exit_code}")
    new_results = find_results(log_folder) - earlier_results
    if not new_results and _is_helper_process():
        return  # only the first process writes a log and measures it
    if len(new_results) != 1:
        refuse(f"{log_folder}: expected one new results file, found {len(new_results)}")
    [results] = new_results
    with console.refuse_errors():
        log = read_log(results, length_normalised=length_normalised)
    for problem in log.problems:
        warn(problem)
    if not log.parts:
        refuse(f"{results}: no task has answers with probabilities")
    summaries = _measure_parts(log)
    _print_table(log, summaries)
    _print_verdicts(log.parts, summaries)
    numbers = _write_numbers(log.parts, summaries, out / "tasks.json")
    page = _write_page(log, out)
    say(f"Wrote {page} and {numbers}; the log is in {results.parent}.")


def _is_helper_process() -> bool:
    """Whether a launcher started several processes of this command, and this is not the first of them."""
    return os.environ.get("RANK", "0") != "0"


def _measure_parts(log: HarnessLog) -> list[Summary]:
    """Measure every task and group, with a progress bar."""
    from catto.measure import MeasureSettings, summarise_answers

    settings = MeasureSettings(METRICS_SHOWN)
    steps = sum(settings.steps(len(part.answers)) for part in log.parts)
    with show_progress("measuring", steps) as tick:
        return [summarise_answers(part.answers, settings, tick) for part in log.parts]


def _print_table(log: HarnessLog, summaries: Sequence[Summary]) -> None:
    """Print one row per task and group. Next to the ECE is its null band: what a calibrated model would score."""
    from catto.metrics.catalogue import METRICS

    rows = []
    for part, summary in zip(log.parts, summaries, strict=True):
        cells = [part.title, f"{summary.rows:,}"]
        for name in METRICS_SHOWN:
            result = summary.metrics[name]
            cells.append(format_number(result.interval.value, METRICS[name].percent))
            if name == "ece" and result.null is not None:  # for the ECE, it is never None
                cells.append(format_interval(result.null, METRICS[name].percent))
        rows.append(cells)
    columns = ["task", "N"]
    for name in METRICS_SHOWN:
        columns.append(METRICS[name].title)
        if name == "ece":
            columns.append("by chance,\nif calibrated")
    console.show_table(f"{log.model}: confidence among the choices", columns, rows)


def _print_verdicts(parts: Sequence[HarnessAnswers], summaries: Sequence[Summary]) -> None:
    from catto.measure import describe_verdict

    for part, summary in zip(parts, summaries, strict=True):
        say(f"{part.name}: {describe_verdict(summary)}")
        console.warn_few(summary.questions or summary.rows, part.name, "intervals are too narrow", "question")


def _write_numbers(parts: Sequence[HarnessAnswers], summaries: Sequence[Summary], path: Path) -> Path:
    """Write the results of every task and group as JSON, unlike the page, which leaves out tasks inside a group.

    Returns:
        The path.
    """
    from catto.io.atomic import write_text
    from catto.measure import describe_verdict, jsonable

    document = {}
    for part, summary in zip(parts, summaries, strict=True):
        document[part.name] = {"tasks": list(part.tasks), **jsonable(summary), "verdict": describe_verdict(summary)}
    write_text(path, json.dumps(document, indent=1) + "\n")
    return path


def _write_page(log: HarnessLog, out: Path) -> Path:
    """Write the report page of a log, and return its path."""
    from catto.formats.columns import ColumnNames
    from catto.integrations.lm_eval import list_page_rows
    from catto.report.build import build_report, results_of_files

    with console.refuse_errors(), show_bars() as shown, tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "answers.jsonl"
        with answers.open("w", encoding="utf-8") as file:
            for row in list_page_rows(log):
                file.write(json.dumps(row) + "\n")
        results = results_of_files({log.model: answers}, ColumnNames(), out)
        bar = Bar(shown, "page")
        return build_report(results, out, out, lambda done, total: bar.update(done, total, ""))
