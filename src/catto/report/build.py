"""Write a report (numbers, tables, figures and the page), and cards in the format of the Hugging Face Hub.

A model card lists the results as `model-index`; a dataset card describes the columns of the predictions.
`huggingface_hub` writes and validates their YAML; nothing is uploaded.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from catto.answer_columns import ParseCounts, read_graded
from catto.errors import DataError, data_errors_at, shorten_text
from catto.formats.answers import read_answers
from catto.formats.columns import ColumnNames, Fields, answer_of, text_of
from catto.io.atomic import write_text
from catto.io.record_files import library_versions, read_records, write_records
from catto.measure import MeasureSettings, summarise_answers
from catto.methods import strip_scaling
from catto.metrics.binning import reliability
from catto.metrics.catalogue import METRICS
from catto.metrics.intervals import Interval, NullBand
from catto.records import Prediction, Question, Unparsed, checked_name, content_hash
from catto.report import VERSION
from catto.report.browser import Browser
from catto.report.cell_answers import CellAnswers, read_cell
from catto.report.drawing import Panel, reliability_figure, render_figure, write_figure
from catto.report.figures import Picture, choose_looks, make_pictures
from catto.report.measuring import ProgressCallback, ignore_progress, measure_results
from catto.report.numbers import Cell, Numbers, Results, read_numbers
from catto.report.page import render_page
from catto.report.render import TEMPLATES, Table, csv_text, escape_markdown, render_latex, render_markdown
from catto.report.tables import build_tables
from catto.tasks import TASKS

__all__ = ["build_report", "read_experiment", "results_of_files", "write_cards"]

REPORTED = ("accuracy", "ece", "brier")
TAGS = ["calibration", "catto"]
# The title of a dataset card begins with this; `write_cards` replaces only a README.md that has it.
TITLE = "Predictions of"
# Cards cut longer names of models, which come from a server or a file.
MAX_NAME_LENGTH = 120
# JSON schema type -> column type in `datasets`. A dict is `json`, because its keys may differ from row to row.
DTYPES = {"string": "string", "boolean": "bool", "integer": "int64", "number": "float64", "object": "json"}


def build_report(results: Results, folder: Path, out: Path, progress: ProgressCallback = ignore_progress) -> Path:
    """Write report.html, tables, figures, model cards and numbers.json.

    Args:
        results: The experiment.
        folder: Its folder.
        out: Folder of the report. Numbers and figures of an earlier build with the same inputs are kept.
        progress: Called with the number of finished measuring steps and their total.

    Returns:
        Path of the page.
    """
    experiment = read_experiment(results, folder)
    known = read_numbers(out / "numbers.json")
    numbers = measure_results(results, folder, experiment.answers, known, progress)
    write_text(out / "numbers.json", numbers.model_dump_json(indent=1) + "\n")
    tables = build_tables(numbers, results)
    _write_tables(tables, out / "tables")
    drawn = _write_figures(results, numbers, experiment.answers, out / "figures")
    for card in make_experiment_cards(numbers):
        write_text(out / "cards" / f"{card.name}.md", card.text)
    path = out / "report.html"
    write_text(path, render_page(results, numbers, tables, drawn, experiment.browser))
    return path


def _write_tables(tables: Sequence[Table], folder: Path) -> None:
    for table in tables:
        write_text(folder / f"{table.name}.md", render_markdown(table))
        write_text(folder / f"{table.name}.csv", csv_text(table))
        # A LaTeX table has to fit a printed page, which has room for the paper's columns only.
        write_text(folder / f"{table.name}.tex", render_latex(table.in_papers_shape()))


def _write_figures(
    results: Results, numbers: Numbers, answers: Sequence[CellAnswers], folder: Path
) -> list[tuple[Picture, str]]:
    """Draw the figures that an earlier build has not drawn from the same inputs; return all, each with its SVG text."""
    versions = [VERSION, library_versions("matplotlib")]
    cells = [cell.model_dump(mode="json") for cell in results.cells]
    inputs_hash = content_hash([versions, numbers.model_dump(mode="json"), cells])
    hash_file = folder / "inputs.json"
    same_inputs = hash_file.exists() and inputs_hash in hash_file.read_text(encoding="utf-8", errors="replace")
    method_looks = choose_looks(cell.method for cell in results.cells)
    drawn = []
    for picture in make_pictures(results, numbers, answers):
        path = folder / f"{picture.name}.svg"
        is_up_to_date = same_inputs and path.exists()
        if not is_up_to_date:
            svg = render_figure(partial(picture.draw, method_looks), ".svg")
            write_text(path, svg.decode())
        drawn.append((picture, path.read_text(encoding="utf-8")))
    write_text(hash_file, json.dumps({"inputs": inputs_hash}) + "\n")
    return drawn


class ExperimentAnswers(NamedTuple):
    """The answers of each cell, and the predictions for the browser on the page."""

    answers: list[CellAnswers]
    browser: Browser


def read_experiment(results: Results, folder: Path) -> ExperimentAnswers:
    """Read the answers of an experiment, with their questions.

    Args:
        results: The experiment.
        folder: Its folder.
    """
    questions: dict[str, dict[str, Question]] = {}
    for task, paths in results.questions.items():
        by_id = questions.setdefault(task, {})
        for path in paths:
            for question in read_records(folder / path, Question):
                by_id[question.id] = question
    unparsed = results.evaluation.unparsed
    browser = Browser(questions, expected_cells=len(results.cells), unparsed=unparsed)
    answers = []
    for cell in results.cells:
        cell_file = read_cell(cell, folder, questions.get(cell.task, {}), unparsed)
        answers.append(cell_file.answers)
        browser.add(cell, cell_file.predictions)
    return ExperimentAnswers(answers, browser)


# ---- files of answers

# Task -> the predictions of one model.
TaskPredictions = dict[str, list[Prediction]]


def results_of_files(
    files: Mapping[str, Path],
    names: ColumnNames,
    out: Path,
    *,
    task: str = "answers",
    unparsed: Unparsed = "fallback",
    baseline: str | None = None,
) -> Results:
    """Write the answers of each model as predictions, and return results from which a page can be built.

    Fields without a column in the file stay empty. If a row has no labels, its label is `right` or `wrong`.

    Args:
        files: Name of a model -> file with one answer per question, in any form that `catto measure` reads.
        names: Names of the columns.
        out: Folder to which the predictions are written.
        task: Task of the rows that do not name one.
        unparsed: Whether forced answers count as wrong.
        baseline: Name of the model that the others are compared with; None if nothing is compared.
    """
    by_model: dict[str, TaskPredictions] = {}
    for model, path in files.items():
        checked_name(model, "model", plus=True)
        by_model[model] = _read_model(path, names, model=model, task=task, has_other_files=len(files) > 1)
    _check_same_questions(files, by_model)
    # Files are written only now, after everything has been read and checked.
    cells = []
    for model, tasks in by_model.items():
        for name, predictions in tasks.items():
            cells.append(_write_cell(out, model, name, predictions))
    return Results(
        name=" and ".join(files),
        recipe={"evaluation": {"unparsed": unparsed}},
        recipe_hash="",
        versions=library_versions(),
        cells=tuple(cells),
        questions={},
        baseline=baseline,
    )


def _read_model(path: Path, names: ColumnNames, *, model: str, task: str, has_other_files: bool) -> TaskPredictions:
    """Read the predictions of one model by task; check the task names, and that no question repeats.

    The parameters are those of `_read_predictions`.
    """
    tasks: TaskPredictions = {}
    for prediction in _read_predictions(path, names, model=model, task=task, has_other_files=has_other_files):
        tasks.setdefault(prediction.task, []).append(prediction)
    for name, predictions in tasks.items():
        with data_errors_at(path):
            checked_name(name, "task")
        questions = {prediction.question for prediction in predictions}
        if len(questions) < len(predictions):
            problem = "expected one answer per question, got several: `catto select --out` chooses among samples"
            raise DataError(path, None, problem)
    return tasks


def _write_cell(out: Path, model: str, task: str, predictions: Sequence[Prediction]) -> Cell:
    cell = Cell(task=task, trained_on=task, method=model, budget=None, seed=0, predictions="")
    path = f"predictions/{cell.stem}-{model}.jsonl"
    write_records(out / path, predictions)
    return cell.model_copy(update={"predictions": path})


def _check_same_questions(files: Mapping[str, Path], by_model: Mapping[str, TaskPredictions]) -> None:
    """Raise DataError, naming both files, if two models did not answer the same questions of a task."""
    first_model: dict[str, str] = {}  # task -> the model that the others are compared with
    for model, tasks in by_model.items():
        for task, predictions in tasks.items():
            first = first_model.setdefault(task, model)
            questions = {prediction.question for prediction in predictions}
            first_questions = {prediction.question for prediction in by_model[first][task]}
            _refuse_missing(files[model], files[first], first_questions - questions)
            _refuse_missing(files[first], files[model], questions - first_questions)


def _refuse_missing(path: Path, other: Path, missing: set[str]) -> None:
    """Raise DataError if any questions are `missing` from the file `path` that the file `other` answers."""
    if not missing:
        return
    problem = f"does not answer {len(missing):,} of the questions in {other}, such as {min(missing)!r}"
    raise DataError(path, None, f"{problem}; models are compared on the same questions")


def _read_predictions(
    path: Path, names: ColumnNames, *, model: str, task: str, has_other_files: bool
) -> Iterator[Prediction]:
    """Yield a prediction for each row of a file of answers.

    Args:
        path: The file.
        names: Names of its columns.
        model: Name of the model.
        task: Task of the rows that do not name one.
        has_other_files: Whether questions must be named, so that rows can be paired with those of other files.
    """
    answers = read_graded(path, names)
    if answers.question is None and has_other_files:
        raise DataError(path, None, "no question column to pair the files by: name one with --question")
    # The columns have the confidences and grades; other fields, such as the text, are only in the rows.
    for index, (row, fields) in enumerate(read_answers(path, names)):
        if answers.question is None:
            question = f"row {row}"
        else:
            question = answers.question[index]
        labels = _read_labels(fields, names, is_correct=bool(answers.correct[index]))
        text = fields.get("text")
        task_of_row = fields.get("task")
        source: Any = "free" if answers.read_as is None else answers.read_as[index]
        yield Prediction(
            question=question,
            task=task_of_row if isinstance(task_of_row, str) else task,
            split="test",
            gold=labels.gold,
            sample=0,
            text=text if isinstance(text, str) else "",
            label=labels.label,
            source=source,
            confidence=float(answers.confidence[index]),
            temperature=0.0,
            seed=0,
            engine="file",
            model=model,
        )


class _LabelAndGold(NamedTuple):
    label: str | None
    gold: str


def _read_labels(fields: Fields, names: ColumnNames, *, is_correct: bool) -> _LabelAndGold:
    """Return label and gold of a row. If it lacks one or they contradict `is_correct`, use `right` and `wrong`."""
    judged = _LabelAndGold("right" if is_correct else "wrong", "right")
    try:
        label = answer_of(names.prediction or "label", fields)
        gold = text_of(names.gold or "gold", fields)
    except ValueError:
        return judged
    if (label == gold) != is_correct:
        return judged
    return _LabelAndGold(label, gold)


# ---- cards


@dataclass(frozen=True)
class CardContent:
    """The content of a model card.

    Attributes:
        model: Name of the model. It need not be trusted, because it is escaped.
        task: Name of the task. It need not be trusted, because it is escaped.
        split: Split of the questions.
        rows: Number of answers.
        metrics: Metric -> value with its interval, at least those of REPORTED.
        picture: Path of the reliability diagram, relative to the card.
        null: Null band of the ECE; None if unknown.
        sources: How the answers were parsed; None if unknown.
    """

    model: str
    task: str
    split: str
    rows: int
    metrics: Mapping[str, Interval]
    picture: str
    null: NullBand | None
    sources: ParseCounts | None


def render_model_card(content: CardContent) -> str:
    """Render a model card: results as `model-index` metadata, and as a table with the reliability diagram."""
    model_title = display_name(content.model, "a model without a name")
    task_title = display_name(content.task, "a task without a name")
    results = _make_eval_results(content, task_title)
    card = ModelCard.from_template(
        ModelCardData(model_name=model_title, tags=TAGS, eval_results=results),
        str(TEMPLATES / "model_card.md.j2"),
        model=escape_markdown(model_title),
        task=escape_markdown(task_title),
        split=content.split,
        rows=content.rows,
        metrics={name: (METRICS[name], content.metrics[name]) for name in REPORTED},
        picture=content.picture,
        null=content.null,
        sources=content.sources,
    )
    return f"{card}\n"


def _make_eval_results(content: CardContent, task_title: str) -> list[EvalResult]:
    """Return the `model-index` of a card, with the dataset of the hub if the task has one."""
    dataset = task_title
    dataset_config = None
    task = TASKS.get(content.task)
    if task is not None:
        dataset = task.hub or task_title
        dataset_config = task.config
    results = []
    for name in REPORTED:
        result = EvalResult(
            task_type="multiple-choice",
            dataset_type=dataset,
            dataset_name=task_title,
            dataset_config=dataset_config,
            dataset_split=content.split,
            dataset_args={"answers": content.rows},
            metric_type=name,
            metric_name=METRICS[name].title,
            metric_value=content.metrics[name].value,
        )
        results.append(result)
    return results


def display_name(name: str, otherwise: str) -> str:
    """Return a name on one line of at most 120 characters, without control characters.

    Args:
        name: A name, which need not be trusted.
        otherwise: Returned if the name is empty.

    >>> display_name("tiny\\nmodel", "unknown")
    'tiny model'
    """
    return shorten_text(name, MAX_NAME_LENGTH) or otherwise


class NamedCard(NamedTuple):
    """The text of a card, and its file name without the suffix."""

    name: str
    text: str


def make_experiment_cards(numbers: Numbers) -> Iterator[NamedCard]:
    """Yield a card for each model and task of the first seed; its name is also that of a reliability diagram.

    Rescaled methods get no card: their confidence is not the model's own.
    """
    first_seed = min(cell.seed for cell in numbers.cells)
    for cell in numbers.cells:
        is_scaled = strip_scaling(cell.method) != cell.method
        if is_scaled or cell.seed != first_seed:
            continue
        name = f"{cell.stem}-{cell.method}"
        if cell.budget is not None:
            name = f"{name}-{cell.budget}"
        content = CardContent(
            model=name,
            task=cell.task,
            split="test",
            rows=cell.n,
            metrics=cell.metrics,
            picture=f"../figures/reliability-{name}.svg",
            null=cell.null,
            sources=cell.sources,
        )
        yield NamedCard(name, render_model_card(content))


def write_cards(path: Path) -> list[str]:
    """Write reliability.png, model_card.md and the dataset card README.md next to a file of predictions.

    The dataset card lets `datasets.load_dataset` read the folder. A README.md that is not such a card is kept: it may
    describe a model in the same folder.

    Args:
        path: File of predictions.

    Returns:
        Names of the files written.
    """
    answers = read_graded(path)
    summary = summarise_answers(answers, MeasureSettings(REPORTED))
    null_band = summary.metrics["ece"].null
    columns = _list_columns(path)
    first = next(iter(read_records(path, Prediction)))
    model = display_name(Path(first.model).name, "a model")

    picture = path.with_name("reliability.png")
    bins = reliability(answers.confidence, answers.correct)
    panel = Panel(model, bins, null=null_band, sources=summary.sources)
    write_figure(partial(reliability_figure, [panel]), picture)

    content = CardContent(
        model=model,
        task=first.task,
        split=first.split,
        rows=summary.rows,
        metrics={name: metric.interval for name, metric in summary.metrics.items()},
        picture=picture.name,
        null=null_band,
        sources=summary.sources,
    )
    card = path.with_name("model_card.md")
    write_text(card, render_model_card(content))
    written = [picture.name, card.name]

    readme = path.with_name("README.md")
    may_write = not readme.exists() or f"# {TITLE}" in readme.read_text(encoding="utf-8", errors="replace")
    if may_write:
        task = display_name(first.task, "a task")
        title = f"{TITLE} {model} on {task}"
        write_text(readme, render_dataset_card(title, split=first.split, file=path.name, columns=columns))
        written.append(readme.name)
    return written


def _list_columns(path: Path) -> set[str]:
    """Return the fields of all predictions in a file together: a row omits its empty optional fields."""
    columns: set[str] = set()
    for row in read_records(path, Prediction):
        columns.update(row.model_dump())
    return columns


def render_dataset_card(title: str, *, split: str, file: str, columns: Collection[str]) -> str:
    """Render the dataset card of a folder with predictions.

    Args:
        title: Title of the card.
        split: Split of the questions.
        file: Name of the file of predictions.
        columns: The fields that appear in its rows.
    """
    features = []
    for name, column in Prediction.model_json_schema()["properties"].items():
        if name not in columns:
            continue
        kind = column.get("type") or column["anyOf"][0]["type"]
        features.append({"name": name, "dtype": DTYPES[kind]})
    data = DatasetCardData(
        pretty_name=title,
        task_categories=["question-answering" if "answer" in columns else "multiple-choice"],
        tags=TAGS,
        configs=[{"config_name": "default", "data_files": [{"split": split, "path": file}]}],
        dataset_info={"features": features},
    )
    template = str(TEMPLATES / "predictions_card.md.j2")
    card = DatasetCard.from_template(data, template, title=escape_markdown(title), split=split)
    return f"{card}\n"
