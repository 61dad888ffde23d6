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

# The metrics of a model card.
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
        folder: Folder of the experiment, to which its paths are relative.
        out: Folder of the report. Numbers and figures of an earlier build in this folder are reused if their inputs are
            the same.
        progress: Called with the number of cells and groups that are measured, and their total.

    Returns:
        Path of the page, report.html.
    """
    experiment = read_experiment(results, folder)
    earlier = read_numbers(out / "numbers.json")
    numbers = measure_results(results, folder, experiment.answers, earlier, progress)
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
    """Draw all figures, except those that an earlier build has drawn from the same inputs.

    Returns:
        All figures, each with the text of its SVG file.
    """
    versions = [VERSION, library_versions("matplotlib")]  # other versions may draw other figures
    cells = [cell.model_dump(mode="json") for cell in results.cells]
    # The answers themselves are not hashed: the numbers contain hashes of their files.
    inputs_hash = content_hash([versions, numbers.model_dump(mode="json"), cells])
    hash_file = folder / "inputs.json"
    # The file is searched and not parsed: a damaged one lacks the hash, and the figures are drawn again.
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
    # Written last: if drawing is interrupted, the next build draws all figures again.
    write_text(hash_file, json.dumps({"inputs": inputs_hash}) + "\n")
    return drawn


class ExperimentAnswers(NamedTuple):
    """The answers of each cell, in the order of `Results.cells`, and the predictions for the browser on the page."""

    answers: list[CellAnswers]
    browser: Browser


def read_experiment(results: Results, folder: Path) -> ExperimentAnswers:
    """Read the answers of an experiment, with their questions.

    Args:
        results: The experiment.
        folder: Folder of the experiment, to which its paths are relative.

    Returns:
        The answers of every cell, and the browser with their predictions.

    Raises:
        DataError: A file is broken, or its predictions are not one for each question of the cell's task.
    """
    questions: dict[str, dict[str, Question]] = {}  # task -> id -> question
    for task, paths in results.questions.items():
        question_of_id: dict[str, Question] = {}
        for path in paths:  # one file per seed; seeds may share questions
            for question in read_records(folder / path, Question):
                question_of_id[question.id] = question
        questions[task] = question_of_id
    unparsed = results.evaluation.unparsed
    # The browser keeps a limited number of predictions; knowing the number of cells, it gives each an equal share.
    browser = Browser(questions, expected_cells=len(results.cells), unparsed=unparsed)
    answers = []
    for cell in results.cells:
        known_questions = questions.get(cell.task, {})  # empty if the experiment has no files of questions
        cell_file = read_cell(cell, folder, known_questions, unparsed)
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
    """Convert files of answers, one per model, to an experiment from which `build_report` can build a report.

    The answers are written as predictions with one cell per model and task. If a row has no labels, its label is
    `right` or `wrong`.

    Args:
        files: Name of a model -> file with one answer per question, in any form that `catto measure` reads.
        names: Names of the columns.
        out: Folder to which the predictions are written.
        task: Task of the rows that do not name one.
        unparsed: "wrong" if forced answers count as wrong, "fallback" if they count as they are.
        baseline: Name of the model that the others are compared with; None if nothing is compared.

    Returns:
        The experiment; its paths are relative to `out`.

    Raises:
        ValueError: The name of a model cannot be part of a file name.
        DataError: A file is broken, answers a question twice, or does not answer a question that another file answers.
    """
    predictions_of_model: dict[str, TaskPredictions] = {}
    for model, path in files.items():
        checked_name(model, "model", plus=True)  # a part of file names; + occurs in methods such as dpo+catto
        predictions_of_model[model] = _read_model(
            path, names, model=model, default_task=task, has_other_files=len(files) > 1
        )
    _check_same_questions(files, predictions_of_model)
    # Nothing is written before all files are read and checked, so that a bad file leaves no partial output.
    cells = []
    for model, predictions_of_task in predictions_of_model.items():
        for task_name, predictions in predictions_of_task.items():
            cells.append(_write_cell(out, model, task_name, predictions))
    # There is no recipe, only the one setting of a recipe that the caller has chosen.
    return Results(
        name=" and ".join(files),
        recipe={"evaluation": {"unparsed": unparsed}},
        recipe_hash="",
        versions=library_versions(),
        cells=tuple(cells),
        questions={},
        baseline=baseline,
    )


def _read_model(
    path: Path, names: ColumnNames, *, model: str, default_task: str, has_other_files: bool
) -> TaskPredictions:
    """Read the predictions of one model by task; the arguments are those of `_read_predictions`.

    Raises:
        DataError: A row is bad, a task cannot be part of a file name, or a question has several answers.
    """
    predictions_of_task: TaskPredictions = {}
    for prediction in _read_predictions(
        path, names, model=model, default_task=default_task, has_other_files=has_other_files
    ):
        predictions_of_task.setdefault(prediction.task, []).append(prediction)
    for task, predictions in predictions_of_task.items():
        with data_errors_at(path):
            checked_name(task, "task")  # a part of file names
        questions = {prediction.question for prediction in predictions}
        if len(questions) < len(predictions):
            problem = "expected one answer per question, got several: `catto select --out` chooses among samples"
            raise DataError(path, None, problem)
    return predictions_of_task


def _write_cell(out: Path, model: str, task: str, predictions: Sequence[Prediction]) -> Cell:
    cell = Cell(task=task, trained_on=task, method=model, budget=None, seed=0, predictions="")
    path = f"predictions/{cell.stem}-{model}.jsonl"
    write_records(out / path, predictions)
    return cell.model_copy(update={"predictions": path})


def _check_same_questions(files: Mapping[str, Path], predictions_of_model: Mapping[str, TaskPredictions]) -> None:
    """Raise DataError, naming both files, if two models did not answer the same questions of a task.

    Every model is checked against the first one that has the task. A task may be missing from some of the files.
    """
    first_model: dict[str, str] = {}  # task -> the first model that has it
    for model, predictions_of_task in predictions_of_model.items():
        for task, predictions in predictions_of_task.items():
            first = first_model.setdefault(task, model)
            questions = {prediction.question for prediction in predictions}
            first_questions = {prediction.question for prediction in predictions_of_model[first][task]}
            _refuse_missing(files[model], files[first], first_questions - questions)
            _refuse_missing(files[first], files[model], questions - first_questions)


def _refuse_missing(path: Path, other: Path, missing: set[str]) -> None:
    """Raise DataError if there are questions that the file `other` answers and that are `missing` from `path`."""
    if not missing:
        return
    problem = f"does not answer {len(missing):,} of the questions in {other}, such as {min(missing)!r}"
    raise DataError(path, None, f"{problem}; models are compared on the same questions")


def _read_predictions(
    path: Path, names: ColumnNames, *, model: str, default_task: str, has_other_files: bool
) -> Iterator[Prediction]:
    """Yield a prediction for each row of a file of answers.

    Without a question column, each row is a question of its own. Answers count as parsed (`free`) if the file does not
    say how they were parsed.

    Args:
        path: The file.
        names: Names of its columns.
        model: Name of the model.
        default_task: Task of the rows that do not name one.
        has_other_files: Whether the rows are paired with those of other files, which needs a question column.

    Raises:
        DataError: A row is bad, or there is no question column although the rows are paired with others.
    """
    answers = read_graded(path, names)
    if answers.question is None and has_other_files:
        raise DataError(path, None, "no question column to pair the files by: name one with --question")
    # The file is read a second time: the columns in `answers` have the confidences and which answers are right, but not
    # the other fields of a row, such as the text.
    for index, (row, fields) in enumerate(read_answers(path, names)):
        if answers.question is None:
            question = f"row {row}"
        else:
            question = answers.question[index]
        labels = _read_labels(fields, names, is_correct=bool(answers.correct[index]))
        text = fields.get("text")
        task = fields.get("task")
        source: Any = "free" if answers.read_as is None else answers.read_as[index]  # the record checks the value
        # The split, sample, temperature and seed are required by the record, but they are not in the file.
        yield Prediction(
            question=question,
            task=task if isinstance(task, str) else default_task,
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
    """Return label and gold label of a row.

    If the row lacks one of them, or if they contradict `is_correct`, the label is `right` or `wrong` and the gold label
    is `right`.
    """
    substitute = _LabelAndGold("right" if is_correct else "wrong", "right")
    try:
        label = answer_of(names.prediction or "label", fields)
        gold = text_of(names.gold or "gold", fields)
    except ValueError:
        return substitute
    labels_agree = label == gold
    if labels_agree != is_correct:
        return substitute
    return _LabelAndGold(label, gold)


# ---- cards


@dataclass(frozen=True)
class CardContent:
    """The content of a model card.

    Attributes:
        model: Name of the model. It may come from an untrusted source; the card shows it escaped.
        task: Name of the task. It may come from an untrusted source; the card shows it escaped.
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
    """Render a model card: its results as `model-index` metadata for the Hub, as a table, and as a diagram.

    Returns:
        The text of the card, in Markdown.
    """
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
    """Return the `model-index` of a card: one result for each metric of REPORTED.

    The dataset of a result is that of the Hub if catto knows the task and its questions come from the Hub. Otherwise it
    is the title of the task.
    """
    dataset = task_title
    dataset_config = None
    task = TASKS.get(content.task)
    if task is not None:
        dataset = task.hub or task_title  # a task whose questions are generated or in a file has no `hub`
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
    """Return a name on one line of at most 120 characters, with control characters escaped.

    Args:
        name: A name, which may come from an untrusted source.
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
    """Yield a card for each cell of the first seed: a model on a task.

    Methods that rescale a model's confidence get no card, because a card describes the model without rescaling.

    Yields:
        The cards. The name of a card is also the end of the file name of the cell's reliability diagram.
    """
    first_seed = min(cell.seed for cell in numbers.cells)
    for cell in numbers.cells:
        is_scaled = strip_scaling(cell.method) != cell.method
        if is_scaled or cell.seed != first_seed:
            continue
        name = f"{cell.stem}-{cell.method}"
        if cell.budget is not None:
            name += f"-{cell.budget}"
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
        path: File of predictions of one model on one task.

    Returns:
        Names of the files written.

    Raises:
        DataError: The file is broken or has no rows.
    """
    answers = read_graded(path)
    summary = summarise_answers(answers, MeasureSettings(REPORTED))
    null_band = summary.metrics["ece"].null
    columns = _list_columns(path)  # before anything is written, because it checks every prediction
    # All predictions have the same model, task and split.
    first = next(iter(read_records(path, Prediction)))
    model_path = Path(first.model)  # only its last part is shown: folders of this computer mean nothing to others
    model = display_name(model_path.name, "a model")

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
    if _may_write_readme(readme):
        task = display_name(first.task, "a task")
        title = f"{TITLE} {model} on {task}"
        write_text(readme, render_dataset_card(title, split=first.split, file=path.name, columns=columns))
        written.append(readme.name)
    return written


def _may_write_readme(readme: Path) -> bool:
    """Return whether there is no README.md yet, or one that is a dataset card of catto."""
    if not readme.exists():
        return True
    return f"# {TITLE}" in readme.read_text(encoding="utf-8", errors="replace")


def _list_columns(path: Path) -> set[str]:
    """Return the fields that occur in any prediction of a file; a prediction omits its empty optional fields."""
    columns: set[str] = set()
    for row in read_records(path, Prediction):
        columns.update(row.model_dump())
    return columns


def render_dataset_card(title: str, *, split: str, file: str, columns: Collection[str]) -> str:
    """Render the dataset card of a folder with predictions.

    Args:
        title: Title of the card, as plain text.
        split: Split of the questions.
        file: Name of the file of predictions.
        columns: The fields that occur in its rows; other fields of a prediction are left out.

    Returns:
        The text of the card, in Markdown.
    """
    features = []
    for name, schema in Prediction.model_json_schema()["properties"].items():
        if name not in columns:
            continue
        json_type = schema.get("type")
        if json_type is None:  # the field may be null: its schema is `anyOf` its type and null
            json_type = schema["anyOf"][0]["type"]
        features.append({"name": name, "dtype": DTYPES[json_type]})
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
