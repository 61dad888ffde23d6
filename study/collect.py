"""Add the predictions of a finished run to the files of a study.

    python -m study.collect RUN_FOLDER [--name NAME] [--command COMMAND]

The study gets the name of the recipe unless `--name` is given. Methods that the study already has for the same task
and seed are replaced; everything else is kept. Runs of earlier versions of the package can be collected too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from catto.errors import DataError
from catto.io.record_files import read_record, read_records
from catto.metrics.temperature import rescale_predictions
from catto.records import PairMargin, Prediction, Question
from catto.report.numbers import Cell, Results

from .names import variant_name
from .store import (
    DATA,
    CellRows,
    CollectedRun,
    StoredCell,
    StudyRows,
    StudySummary,
    cell_sort_key,
    list_studies,
    read_rows,
    read_summary,
    write_study,
)

# Decimals of a stored confidence. After DPO, many confidences differ from 1 by less than 1e-6.
CONFIDENCE_DECIMALS = 12
# Fields of a prediction that are not stored. Only samples keep `mean_logprob`, because some selection rules use it.
UNSTORED_FIELDS = ("confidence_raw", "label_logprobs", "logsumexp", "mean_logprob", "self_certainty", "lowest_group")


def collect_run(run: Path, name: str | None = None, *, command: str | None = None, folder: Path = DATA) -> StudySummary:
    """Add every report of a run to a study, and write the study's files.

    Args:
        run: Folder of a finished run. Nothing is written there.
        name: Name of the study; by default the name of the recipe.
        command: The command that started the run, to be stored with it.
        folder: Folder of the stored studies.

    Returns:
        The summary of the study including the run.
    """
    reports = find_reports(run)
    for report in reports:
        study_name = name or report.name
        summary = start_summary(study_name, report)
        study_rows: StudyRows = {}
        if study_name in list_studies(folder):
            summary = read_summary(study_name, folder)
            study_rows = read_rows(study_name, folder)
        summary = add_report(summary, study_rows, report=report, run=run, command=command)
        write_study(summary, study_rows, folder)
    return summary


def find_reports(run: Path) -> list[Results]:
    """Read the reports of a run, oldest first."""
    paths = sorted(run.glob("stages/*/results.json"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise DataError(run, None, "has no finished report; expected the folder of a finished run")
    return [read_record(path, Results) for path in paths]


def start_summary(name: str, report: Results) -> StudySummary:
    """Return the summary of a new study that has no runs yet."""
    return StudySummary(name=name, evaluation=report.recipe["evaluation"], baseline=report.baseline, runs=(), cells=())


def add_report(
    summary: StudySummary, study_rows: StudyRows, *, report: Results, run: Path, command: str | None
) -> StudySummary:
    """Add the cells of a report to a study.

    Args:
        summary: The study so far.
        study_rows: The rows of the study. The rows of the report are added to it in place.
        report: The report.
        run: Folder of the run that the report belongs to.
        command: The command that started the run.

    Returns:
        The summary including the report.
    """
    posteriors = read_posteriors(report, run)
    cells = {cell.key: cell for cell in summary.cells}
    for cell in (*report.cells, *find_probes(report, run)):
        stored = make_stored_cell(cell, report)
        rows = read_cell_rows(cell, run, method=stored.method)
        rows.posteriors = posteriors.get(cell.task, {})
        cells[stored.key] = stored
        study_rows[stored.key] = rows
    collected = describe_run(report, command)
    other_runs = [other for other in summary.runs if other.recipe_hash != collected.recipe_hash]
    update = {
        "evaluation": report.recipe["evaluation"],
        "runs": (*other_runs, collected),
        "cells": tuple(sorted(cells.values(), key=cell_sort_key)),
    }
    return summary.model_copy(update=update)


def describe_run(report: Results, command: str | None) -> CollectedRun:
    """Return what is stored about the run as a whole."""
    seconds = 0.0
    for cell in report.cells:
        if cell.training is not None:
            seconds += cell.training.seconds or 0.0
    return CollectedRun(
        recipe_hash=report.recipe_hash,
        commit=report.commit,
        versions=report.versions,
        command=command,
        hours=round(seconds / 3600, 2),
    )


# ---- cells


def find_probes(report: Results, run: Path) -> Iterator[Cell]:
    """Yield a cell for each DPO model that `study.probe` has fitted a linear probe on."""
    for cell in report.cells:
        if cell.method != "dpo":
            continue
        for path in run.glob(f"probe/dpo-*{cell.task}-seed-{cell.seed}/predictions.jsonl"):
            update = {
                "method": "dpo-probe",
                "predictions": str(path.relative_to(run)),
                "candidates": None,
                "preference": None,
                "training": None,
            }
            yield cell.model_copy(update=update)


def make_stored_cell(cell: Cell, report: Results) -> StoredCell:
    """Return what is stored about a cell besides its rows; its method becomes the name of the variant."""
    method = cell.method
    if method != "dpo-probe":
        method = variant_name(method, report.recipe, cell.budget)
    values = cell.model_dump(include=set(StoredCell.model_fields))
    # The name of the variant already has the paper's budget, so one table can show both budgets.
    budget = None if cell.budget is None else "matched"
    return StoredCell.model_validate(values | {"method": method, "budget": budget})


def read_cell_rows(cell: Cell, run: Path, *, method: str) -> CellRows:
    """Read the predictions, samples and margins of a cell, and shorten them for storage.

    Args:
        cell: The cell. Selection ranks samples by their confidence at the temperature `tau`, so that one is stored.
        run: Folder of the run.
        method: Name of the variant.
    """
    rows = CellRows()
    predictions = list(read_records(run / cell.predictions, Prediction))
    rows.answers = shorten_predictions(predictions, method)
    if cell.candidates is not None and cell.tau is not None:
        samples = list(read_records(run / cell.candidates, Prediction))
        logprobs = [sample.mean_logprob for sample in samples]
        rescaled = rescale_predictions(samples, cell.tau)
        rows.samples = shorten_predictions(rescaled, method, logprobs)
    if cell.preference is not None:
        for pair in read_records(run / cell.preference, PairMargin):
            rows.pairs.append(shorten_margin(pair))
    return rows


def shorten_predictions(
    predictions: Sequence[Prediction], method: str, logprobs: Sequence[float | None] | None = None
) -> list[Prediction]:
    """Drop the text and the other fields that are not stored, and round the confidence.

    Args:
        predictions: N predictions.
        method: Name of the variant that made them.
        logprobs: N mean log-probabilities to keep; None keeps none.
    """
    shortened = []
    for index, prediction in enumerate(predictions):
        update: dict[str, object] = dict.fromkeys(UNSTORED_FIELDS)
        update["text"] = ""
        update["model"] = method
        update["confidence"] = round(prediction.confidence, CONFIDENCE_DECIMALS)
        if logprobs is not None:
            update["mean_logprob"] = logprobs[index]
        shortened.append(prediction.model_copy(update=update))
    return shortened


def shorten_margin(pair: PairMargin) -> PairMargin:
    """Round a margin to six significant digits. With a fixed number of decimals, a small margin would become a tie."""
    whole = float(f"{pair.whole:.6g}")
    reasoning = pair.reasoning
    if reasoning is not None:
        reasoning = float(f"{reasoning:.6g}")
    return PairMargin(question=pair.question, whole=whole, reasoning=reasoning)


def read_posteriors(report: Results, run: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return task -> question -> exact probability of each label, for the tasks where it is known."""
    by_task: dict[str, dict[str, dict[str, float]]] = {}
    for task, paths in report.questions.items():
        for path in paths:
            for question in read_records(run / path, Question):
                if question.posterior is not None:
                    by_task.setdefault(task, {})[question.id] = question.posterior
    return by_task


def main() -> None:
    """Read the command line and collect one run."""
    parser = argparse.ArgumentParser(prog="python -m study.collect", description="Add a finished run to a study.")
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--name", help="name of the study (default: the name of the recipe)")
    parser.add_argument("--command", help="command that started the run, stored with it")
    arguments = parser.parse_args()
    try:
        summary = collect_run(arguments.run, arguments.name, command=arguments.command)
    except DataError as error:
        raise SystemExit(str(error)) from None
    cells = f"{len(summary.cells)} combinations of method, task and seed"
    print(f"{DATA / summary.name}.parquet: {cells} from {len(summary.runs)} runs")


if __name__ == "__main__":
    main()
