"""The files of a study in study/data.

- `NAME.parquet` has one row per prediction, without texts: the test answers of every method, task and seed, and the
  sampled answers of the runs that have them.
- `NAME-pairs.parquet` has one row per held-out preference pair and model. It is missing if no pairs were scored.
- `NAME.json` has the rest: the evaluation settings, the runs, and how each model was trained.

`pandas.read_parquet` can read the tables too. Numbers are stored as float64, so reading returns exactly what was
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from catto.io.atomic import replace_binary_file, write_text
from catto.io.record_files import read_record
from catto.methods import Budget, method_sort_key
from catto.metrics.calibrators import VectorScaling
from catto.records import Option, PairMargin, Prediction, Question, Record
from catto.report.numbers import CellIdentity, Training

DATA = Path(__file__).parent / "data"

CELL_COLUMNS = [
    ("trained_on", pa.string()),
    ("task", pa.string()),
    ("seed", pa.int64()),
    ("method", pa.string()),
    ("budget", pa.string()),
]
PREDICTION_COLUMNS = pa.schema(
    [
        *CELL_COLUMNS,
        ("is_sampled", pa.bool_()),
        ("question", pa.string()),
        ("split", pa.string()),
        ("gold", pa.string()),
        ("sample", pa.int64()),
        ("label", pa.string()),
        ("source", pa.string()),
        ("confidence", pa.float64()),
        ("mean_logprob", pa.float64()),
        ("tokens", pa.int64()),
        ("temperature", pa.float64()),
        ("engine", pa.string()),
        # The exact probability of each label, for tasks where it is known.
        ("posterior", pa.map_(pa.string(), pa.float64())),
    ]
)
PAIR_COLUMNS = pa.schema(
    [
        *CELL_COLUMNS,
        ("question", pa.string()),
        ("whole", pa.float64()),
        ("reasoning", pa.float64()),
    ]
)


class CellKey(NamedTuple):
    """Identifies one method on one task with one seed. Its fields are the first columns of both tables."""

    trained_on: str
    task: str
    seed: int
    method: str
    budget: Budget | None


class StoredCell(CellIdentity):
    """What is stored about a method on a task with a seed besides its rows. Fields as in `catto`'s `Cell`."""

    seed: int
    tau: float | None = None
    vector: VectorScaling | None = None
    sampling_temperature: float | None = None
    candidates_fallback_rate: float | None = None
    training: Training | None = None

    @property
    def key(self) -> CellKey:
        """The values of this cell in the first columns of both tables."""
        return CellKey(self.trained_on, self.task, self.seed, self.method, self.budget)


class CollectedRun(Record):
    """A run that was added to the study.

    Attributes:
        recipe_hash: Hash of its recipe.
        commit: Git commit of the package that ran it.
        versions: Package name -> version.
        command: The command that started it.
        hours: Training time of all its models, in hours.
    """

    recipe_hash: str
    commit: str | None = None
    versions: dict[str, str]
    command: str | None = None
    hours: float


class StudySummary(Record):
    """What is stored about a study besides the rows of its tables.

    Attributes:
        name: Name of the study and of its files.
        evaluation: Evaluation settings of the newest run.
        baseline: The method that the others are compared with.
        runs: The runs in the order in which they were collected.
        cells: Every method on every task with every seed.
    """

    name: str
    evaluation: dict[str, Any]
    baseline: str | None
    runs: tuple[CollectedRun, ...]
    cells: tuple[StoredCell, ...]


@dataclass
class CellRows:
    """The rows of one cell.

    Attributes:
        answers: One prediction per test question.
        samples: Several predictions per test question; empty if none were sampled.
        pairs: Margins of held-out preference pairs; empty if none were scored.
        posteriors: Question id -> exact probability of each label; empty if it is not known.
    """

    answers: list[Prediction] = field(default_factory=list)
    samples: list[Prediction] = field(default_factory=list)
    pairs: list[PairMargin] = field(default_factory=list)
    posteriors: dict[str, dict[str, float]] = field(default_factory=dict)

    def make_questions(self) -> list[Question]:
        """Return the test questions without their text; empty if the exact probabilities are not known."""
        questions = []
        for answer in self.answers:
            posterior = self.posteriors.get(answer.question)
            if posterior is None:
                continue
            question = Question(
                id=answer.question,
                task=answer.task,
                split=answer.split,
                fields={},
                options=tuple(Option(label=label, text=label) for label in posterior),
                gold=answer.gold,
                posterior=posterior,
            )
            questions.append(question)
        return questions


StudyRows = dict[CellKey, CellRows]


def list_studies(folder: Path = DATA) -> list[str]:
    """Return the names of the stored studies."""
    return sorted(path.stem for path in folder.glob("*.json"))


def read_summary(name: str, folder: Path = DATA) -> StudySummary:
    """Read what is stored about a study besides its tables."""
    return read_record(folder / f"{name}.json", StudySummary)


def cell_sort_key(cell: StoredCell) -> tuple[object, ...]:
    """Return the sort key for the cells of a study."""
    return cell.trained_on, cell.task, cell.seed, method_sort_key(cell.method), cell.method, cell.budget or ""


# ---- reading


def read_rows(name: str, folder: Path = DATA) -> StudyRows:
    """Read the tables of a study.

    Args:
        name: Name of the study.
        folder: Folder of the stored studies.

    Returns:
        The rows of each cell, in file order.
    """
    study_rows: StudyRows = {}
    for row in _read_table(folder / f"{name}.parquet"):
        key = _take_key(row)
        cell_rows = study_rows.setdefault(key, CellRows())
        posterior = row.pop("posterior")
        is_sampled = row.pop("is_sampled")
        prediction = Prediction(task=key.task, seed=key.seed, model=key.method, text="", **row)
        if is_sampled:
            cell_rows.samples.append(prediction)
        else:
            cell_rows.answers.append(prediction)
        if posterior is not None:
            cell_rows.posteriors[prediction.question] = dict(posterior)
    pairs_path = folder / f"{name}-pairs.parquet"
    if pairs_path.exists():
        for row in _read_table(pairs_path):
            study_rows[_take_key(row)].pairs.append(PairMargin(**row))
    return study_rows


def _read_table(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def _take_key(row: dict[str, Any]) -> CellKey:
    """Remove the columns that identify the cell from a row and return them."""
    values = [row.pop(column) for column in CellKey._fields]
    return CellKey(*values)


# ---- writing


def write_study(summary: StudySummary, study_rows: StudyRows, folder: Path = DATA) -> None:
    """Write the files of a study. Existing files are replaced.

    Args:
        summary: Everything except the rows. The order of its cells is the order of the rows.
        study_rows: The rows of each cell.
        folder: Folder of the stored studies.
    """
    predictions = []
    pairs = []
    for cell in summary.cells:
        cell_rows = study_rows[cell.key]
        for answer in cell_rows.answers:
            row = _make_row(cell.key, answer) | {"is_sampled": False}
            if answer.question in cell_rows.posteriors:
                row["posterior"] = list(cell_rows.posteriors[answer.question].items())
            predictions.append(row)
        for sample in cell_rows.samples:
            predictions.append(_make_row(cell.key, sample) | {"is_sampled": True})
        for pair in cell_rows.pairs:
            pairs.append(_make_row(cell.key, pair))
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(folder / f"{summary.name}.parquet", predictions, PREDICTION_COLUMNS)
    if pairs:
        _write_table(folder / f"{summary.name}-pairs.parquet", pairs, PAIR_COLUMNS)
    text = summary.model_dump_json(indent=1, exclude_defaults=True)
    write_text(folder / f"{summary.name}.json", text + "\n")


def _make_row(key: CellKey, record: Prediction | PairMargin) -> dict[str, Any]:
    return record.model_dump() | key._asdict()


def _write_table(path: Path, rows: Sequence[dict[str, Any]], columns: pa.Schema) -> None:
    # Fields without a column, such as the text, are dropped.
    table = pa.Table.from_pylist(rows, schema=columns)
    # Measured numbers rarely repeat: without a dictionary for them the files are a sixth smaller.
    dictionary_columns = [column.name for column in columns if column.type != pa.float64()]
    dictionary_columns += ["posterior.key_value.key", "posterior.key_value.value"]
    with replace_binary_file(path) as file:
        pq.write_table(table, file, use_dictionary=dictionary_columns, compression="zstd", compression_level=19)
