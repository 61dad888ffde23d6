"""Results -> numbers, tables, figures, the page, and cards in the format of the Hugging Face hub.

A model card has the results as `model-index`, a dataset card the columns of predictions. Their YAML is made and checked
by `huggingface_hub`; nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from catto.files import library_versions, read_records, write_records, write_text
from catto.logs import ColumnNames, answer_of, read_answers, text_of
from catto.measure import MeasureSettings, Unparsed, read_graded, summarise
from catto.methods import unscaled
from catto.metrics.binning import reliability
from catto.metrics.catalogue import METRICS
from catto.metrics.statistics import Interval
from catto.problems import DataError, locating, shortened
from catto.records import Prediction, Question, checked_name, content_hash
from catto.report import VERSION
from catto.report import numbers as store
from catto.report.drawing import Panel, reliability_figure, render_figure, write_figure
from catto.report.figures import looks, pictures
from catto.report.measuring import CellAnswers, ProgressCallback, ignore_progress, measure_results, read_cell
from catto.report.numbers import Cell, Numbers, Results
from catto.report.page import Browser, page
from catto.report.render import TEMPLATES, csv_text, escape_markdown, latex, markdown
from catto.report.tables import all_tables
from catto.tasks import TASKS

__all__ = ["build", "read", "results_of_files", "write_cards"]

REPORTED = ("accuracy", "ece", "brier")
TAGS = ["calibration", "catto"]
TITLE = "Predictions of"
# A server or a file chose the names of models: the longest that cards show.
MOST_IN_NAME = 120
# JSON schema -> the column's type in `datasets`. A dict whose keys differ from row to row has no fixed columns.
DTYPES = {"string": "string", "integer": "int64", "number": "float64", "object": "json"}


def build(results: Results, folder: Path, out: Path, progress: ProgressCallback = ignore_progress) -> Path:
    """Write report.html, tables, figures, model cards and numbers.json into `out`; return the page's path.

    Numbers and figures of an earlier build in `out` with the same inputs are kept. `progress` is called with the
    steps of measuring that are done and their total.
    """
    answers, browser = read(results, folder)
    numbers = measure_results(results, folder, answers, store.read_numbers(out / "numbers.json"), progress)
    write_text(out / "numbers.json", numbers.model_dump_json(indent=1) + "\n")
    tables = all_tables(numbers, results)
    for table in tables:
        write_text(out / "tables" / f"{table.name}.md", markdown(table))
        write_text(out / "tables" / f"{table.name}.csv", csv_text(table))
        # LaTeX is for a printed page, where the paper's columns are as many as fit.
        write_text(out / "tables" / f"{table.name}.tex", latex(table.in_papers_shape()))
    made_by = [VERSION, library_versions("matplotlib")]
    inputs = [made_by, numbers.model_dump(mode="json"), [cell.model_dump(mode="json") for cell in results.cells]]
    key, note = content_hash(inputs), out / "figures" / "inputs.json"
    known = note.exists() and key in note.read_text(encoding="utf-8", errors="replace")
    drawn, known_looks = [], looks(cell.method for cell in results.cells)
    for picture in pictures(results, numbers, answers):
        path = out / "figures" / f"{picture.name}.svg"
        if not (known and path.exists()):
            write_text(path, render_figure(partial(picture.draw, known_looks), ".svg").decode())
        drawn.append((picture, path.read_text(encoding="utf-8")))
    write_text(note, json.dumps({"inputs": key}) + "\n")
    for name, card in experiment_cards(numbers):
        write_text(out / "cards" / f"{name}.md", card)
    write_text(out / "report.html", page(results, numbers, tables, drawn, browser))
    return out / "report.html"


def read(results: Results, folder: Path) -> tuple[list[CellAnswers], Browser]:
    """Read an experiment's answers with their questions, and the predictions that the page shows."""
    questions = {
        task: {question.id: question for path in paths for question in read_records(folder / path, Question)}
        for task, paths in results.questions.items()
    }
    unparsed = results.evaluation.unparsed
    browser, answers = Browser(questions, expected=len(results.cells), unparsed=unparsed), []
    for cell in results.cells:
        answered, predictions = read_cell(cell, folder, questions.get(cell.task, {}), unparsed)
        answers.append(answered)
        browser.add(cell, predictions)
    return answers, browser


# ---- files of answers


def results_of_files(
    files: Mapping[str, Path], names: ColumnNames, out: Path, task: str = "answers", unparsed: Unparsed = "fallback"
) -> Results:
    """Write the answers of each model as predictions into `out`, and return the results to build a page from.

    files: the name of a model -> its answers, one to each question, in any form that `catto measure` reads. task: where
    the rows name none. What rows do not hold is left empty; without labels, an answer is `right` or `wrong`.
    """
    by_model: dict[str, dict[str, list[Prediction]]] = {}
    for model, path in files.items():
        checked_name(model, "model", plus=True)
        tasks = by_model.setdefault(model, {})
        for prediction in _predictions(path, names, task, model, several=len(files) > 1):
            tasks.setdefault(prediction.task, []).append(prediction)
        for name, predictions in tasks.items():
            with locating(path):
                checked_name(name, "task")
            if len({prediction.question for prediction in predictions}) < len(predictions):
                what = "several answers to one question, expected one: `catto select --out` chooses among samples"
                raise DataError(path, None, what)
    _check_same_questions(files, by_model)
    cells = []  # everything was read and checked: files are written now
    for model, tasks in by_model.items():
        for name, predictions in tasks.items():
            cell = Cell(task=name, trained_on=name, method=model, budget=None, seed=0, predictions="")
            place = f"predictions/{cell.stem}-{model}.jsonl"
            write_records(out / place, predictions)
            cells.append(cell.model_copy(update={"predictions": place}))
    about: Any = {"recipe": {"evaluation": {"unparsed": unparsed}}, "recipe_hash": "", "versions": library_versions()}
    return Results(name=" and ".join(files), cells=tuple(cells), questions={}, **about)


def _check_same_questions(files: Mapping[str, Path], by_model: Mapping[str, Mapping[str, list[Prediction]]]) -> None:
    """Raise DataError, which names both files, where two models did not answer the same questions of a task."""
    first_model: dict[str, str] = {}  # task -> the model that the others are compared with
    for model, tasks in by_model.items():
        for task, predictions in tasks.items():
            other = first_model.setdefault(task, model)
            ours = {prediction.question for prediction in predictions}
            theirs = {prediction.question for prediction in by_model[other][task]}
            for here, there, missing in ((model, other, theirs - ours), (other, model, ours - theirs)):
                if missing:
                    what = (
                        f"does not answer {len(missing):,} of the questions in {files[there]}, such as {min(missing)!r}"
                    )
                    raise DataError(files[here], None, f"{what}; models are compared on the same questions")


def _predictions(path: Path, names: ColumnNames, task: str, model: str, several: bool) -> Iterator[Prediction]:
    answers = read_graded(path, names)
    if answers.question is None and several:
        raise DataError(path, None, "no column that names the question to pair the files by: name it with --question")
    for place, (row, fields) in enumerate(read_answers(path, names)):
        right = bool(answers.correct[place])
        graded: tuple[str | None, str] = ("right" if right else "wrong", "right")
        label, gold = graded
        with suppress(ValueError):
            label, gold = answer_of(names.prediction or "label", fields), text_of(names.gold or "gold", fields)
        if (label == gold) != right:
            label, gold = graded
        text, name = (fields.get(field) for field in ("text", "task"))
        read_as: Any = "free" if answers.read_as is None else answers.read_as[place]
        yield Prediction(
            question=f"row {row}" if answers.question is None else answers.question[place],
            task=name if isinstance(name, str) else task,
            split="test",
            gold=gold,
            sample=0,
            text=text if isinstance(text, str) else "",
            label=label,
            source=read_as,
            confidence=float(answers.confidence[place]),
            temperature=0.0,
            seed=0,
            engine="file",
            model=model,
        )


# ---- cards


def model_card(
    model: str, task: str, split: str, rows: int, metrics: Mapping[str, Interval], picture: str, **chance: Any
) -> str:
    """Return a model card: the results as `model-index` metadata, and as a table with the reliability diagram.

    model, task: names of any origin, which are escaped. rows: the number of answers. picture: the diagram as seen from
    the card. chance: `null`, the null band of the ECE, and `sources`, how the answers were read; None where it is not
    known.
    """
    model_title = display_name(model, "a model without a name")
    task_title = display_name(task, "a task without a name")
    source = TASKS.get(task)
    results = [
        EvalResult(
            task_type="multiple-choice",
            dataset_type=(source.hub if source else None) or task_title,
            dataset_name=task_title,
            dataset_config=source.config if source else None,
            dataset_split=split,
            dataset_args={"answers": rows},
            metric_type=name,
            metric_name=METRICS[name].title,
            metric_value=metrics[name].value,
        )
        for name in REPORTED
    ]
    shown = {name: (METRICS[name], metrics[name]) for name in REPORTED}
    texts = {
        "model": escape_markdown(model_title),
        "task": escape_markdown(task_title),
        "split": split,
        "rows": rows,
        "metrics": shown,
        "picture": picture,
        **chance,
    }
    data = ModelCardData(model_name=model_title, tags=TAGS, eval_results=results)
    return f"{ModelCard.from_template(data, str(TEMPLATES / 'model_card.md.j2'), **texts)}\n"


def display_name(name: str, otherwise: str) -> str:
    """Return a name on one line of at most 120 characters, without control characters; `otherwise` for an empty one.

    >>> display_name("tiny\\nmodel", "unknown")
    'tiny model'
    """
    return shortened(name, MOST_IN_NAME) or otherwise


def experiment_cards(numbers: Numbers) -> Iterator[tuple[str, str]]:
    """Yield name and text of a card for each model and task of the first seed, which has a diagram of that name.

    Temperature-scaled methods have none: their confidence is not the model's own.
    """
    first = min(cell.seed for cell in numbers.cells)
    for cell in numbers.cells:
        if cell.seed == first and unscaled(cell.method) == cell.method:
            name = "-".join(filter(None, (cell.stem, cell.method, cell.budget)))
            picture, chance = f"../figures/reliability-{name}.svg", {"null": cell.null, "sources": cell.sources}
            yield name, model_card(name, cell.task, "test", cell.n, cell.metrics, picture, **chance)


def write_cards(path: Path) -> list[str]:
    """Write reliability.png, model_card.md and the dataset card README.md beside predictions; return their names.

    With the dataset card, `datasets.load_dataset` reads the folder. A README.md of other contents is kept: the folder
    may be that of the model.
    """
    answers, first = read_graded(path), next(iter(read_records(path, Prediction)))
    model, picture = display_name(Path(first.model).name, "a model"), path.with_name("reliability.png")
    task = display_name(first.task, "a task")
    summary = summarise(answers, MeasureSettings(REPORTED))
    metrics = {name: metric.interval for name, metric in summary.metrics.items()}
    chance: Any = {"null": summary.metrics["ece"].null, "sources": summary.sources}
    panel = Panel(model, reliability(answers.confidence, answers.correct), **chance)
    write_figure(partial(reliability_figure, [panel]), picture)
    card = model_card(model, first.task, first.split, summary.rows, metrics, picture.name, **chance)
    write_text(path.with_name("model_card.md"), card)
    readme = path.with_name("README.md")
    if readme.exists() and f"# {TITLE}" not in readme.read_text(encoding="utf-8", errors="replace"):
        return [picture.name, "model_card.md"]
    columns = Prediction.model_json_schema()["properties"]
    kinds = {name: column.get("type") or column["anyOf"][0]["type"] for name, column in columns.items()}
    title = f"{TITLE} {model} on {task}"
    data = DatasetCardData(
        pretty_name=title,
        task_categories=["multiple-choice"],
        tags=TAGS,
        configs=[{"config_name": "default", "data_files": [{"split": first.split, "path": path.name}]}],
        dataset_info={"features": [{"name": name, "dtype": DTYPES[kind]} for name, kind in kinds.items()]},
    )
    template = str(TEMPLATES / "predictions_card.md.j2")
    texts = {"title": escape_markdown(title), "split": first.split}
    write_text(readme, f"{DatasetCard.from_template(data, template, **texts)}\n")
    return [picture.name, "model_card.md", readme.name]
