"""Cards in the format of the Hugging Face hub: a model's results as `model-index`, and the columns of its predictions.

The YAML is made and checked by `huggingface_hub`; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from catto.files import read_records, replacing
from catto.measure import MeasureSettings, read_graded, summarise
from catto.methods import unscaled
from catto.metrics.binning import reliability
from catto.metrics.catalogue import METRICS
from catto.metrics.statistics import Interval
from catto.records import Prediction
from catto.report.drawing import Panel, reliability_figure, write_figure
from catto.report.numbers import Numbers
from catto.tasks import TASKS

REPORTED = ("accuracy", "ece", "brier")
TAGS = ["calibration", "catto"]
TITLE = "Predictions of"
TEMPLATES = Path(__file__).parent / "templates"
# JSON schema -> the column's type in `datasets`. A dict whose keys differ from row to row has no fixed columns.
DTYPES = {"string": "string", "integer": "int64", "number": "float64", "object": "json"}


def model_card(
    model: str, task: str, split: str, rows: int, metrics: Mapping[str, Interval], picture: str, **chance: Any
) -> str:
    """Return a model card: the results as `model-index` metadata, and as a table with the reliability diagram.

    rows: the number of answers. picture: the diagram as seen from the card. chance: `null`, the null band of the ECE,
    and `sources`, how the answers were read; None where it is not known.
    """
    source = TASKS.get(task)
    results = [
        EvalResult(
            task_type="multiple-choice",
            dataset_type=(source.hub if source else None) or task,
            dataset_name=task,
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
    texts = {"model": model, "task": task, "split": split, "rows": rows, "metrics": shown, "picture": picture, **chance}
    data = ModelCardData(model_name=model, tags=TAGS, eval_results=results)
    return f"{ModelCard.from_template(data, str(TEMPLATES / 'model_card.md.j2'), **texts)}\n"


def predictions_card(model: str, task: str, split: str, file: str) -> str:
    """Return the dataset card of a file of predictions, with which `datasets.load_dataset` reads its folder."""
    columns = Prediction.model_json_schema()["properties"]
    kinds = {name: one.get("type") or one["anyOf"][0]["type"] for name, one in columns.items()}
    data = DatasetCardData(
        pretty_name=f"{TITLE} {model} on {task}",
        task_categories=["multiple-choice"],
        tags=TAGS,
        configs=[{"config_name": "default", "data_files": [{"split": split, "path": file}]}],
        dataset_info={"features": [{"name": name, "dtype": DTYPES[kind]} for name, kind in kinds.items()]},
    )
    return f"{DatasetCard.from_template(data, str(TEMPLATES / 'predictions_card.md.j2'), split=split)}\n"


def write_cards(path: Path) -> list[str]:
    """Write reliability.png, model_card.md and the dataset card README.md beside predictions; return their names.

    A README.md of other contents is kept: the folder may be that of the model.
    """
    answers, first = read_graded(path), next(iter(read_records(path, Prediction)))
    model, picture = Path(first.model).name, path.with_name("reliability.png")
    summary = summarise(answers, MeasureSettings(REPORTED))
    metrics = {name: one.interval for name, one in summary.metrics.items()}
    chance: Any = {"null": summary.metrics["ece"].null, "sources": summary.sources}
    panel = Panel(model, reliability(answers.confidence, answers.correct), **chance)
    write_figure(partial(reliability_figure, [panel]), picture)
    card = model_card(model, first.task, first.split, summary.rows, metrics, picture.name, **chance)
    cards, readme = {"model_card.md": card}, path.with_name("README.md")
    if not readme.exists() or f"# {TITLE}" in readme.read_text(encoding="utf-8", errors="replace"):
        cards[readme.name] = predictions_card(model, first.task, first.split, path.name)
    for name, text in cards.items():
        with replacing(path.with_name(name)) as file:
            file.write(text)
    return [picture.name, *cards]


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
