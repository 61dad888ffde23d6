"""Measure a stored study with the code that measures a run for its report."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from catto.io.record_files import write_records
from catto.methods import METHODS, WEIGHTS, strip_scaling
from catto.records import Question
from catto.report.build import read_experiment
from catto.report.cell_answers import CellAnswers
from catto.report.measuring import measure_results
from catto.report.numbers import Cell, Numbers, Results

from .names import split_variant
from .store import DATA, CellRows, StoredCell, StudyRows, read_rows, read_summary

ALL_TERMS = tuple(WEIGHTS)


class MeasuredStudy(NamedTuple):
    """The numbers of a study or of a part of it, and the answers from which they were measured."""

    numbers: Numbers
    answers: list[CellAnswers]


def measure_study(
    name: str, seeds: Collection[int] | None = None, terms: Collection[str] = ALL_TERMS, folder: Path = DATA
) -> MeasuredStudy:
    """Measure the cells of a study with the given seeds and calibration terms.

    Args:
        name: Name of the study.
        seeds: The seeds; None means all of them.
        terms: Calibration terms as in `catto.methods.WEIGHTS`; `none` stands for methods without one.
        folder: Folder of the stored studies.
    """
    summary = read_summary(name, folder)
    cells = []
    for cell in summary.cells:
        has_seed = seeds is None or cell.seed in seeds
        if has_seed and calibration_of(cell.method) in terms:
            cells.append(cell)
    # `measure_results` reads the files of a run, so the rows are written to a temporary folder.
    with TemporaryDirectory() as temporary:
        run = Path(temporary)
        unpacked = unpack_cells(cells, _read_rows_once(name, folder), run)
        results = Results(
            name=name,
            recipe={"evaluation": summary.evaluation},
            recipe_hash="",
            versions={},
            cells=tuple(unpacked.cells),
            questions=unpacked.questions,
            baseline=summary.baseline,
        )
        answers = read_experiment(results, run).answers
        return MeasuredStudy(measure_results(results, run, answers), answers)


def calibration_of(name: str) -> str:
    """Return the calibration term of a variant."""
    method, _ = split_variant(name)
    return METHODS[strip_scaling(method)].calibration


@cache
def _read_rows_once(name: str, folder: Path) -> StudyRows:
    return read_rows(name, folder)


class UnpackedCells(NamedTuple):
    """Cells that refer to written files.

    Attributes:
        cells: The cells with the paths of their files.
        questions: Task -> paths of the files with its questions.
    """

    cells: list[Cell]
    questions: dict[str, tuple[str, ...]]


def unpack_cells(cells: Collection[StoredCell], study_rows: StudyRows, folder: Path) -> UnpackedCells:
    """Write the rows and questions of cells as JSON lines files.

    Args:
        cells: The cells.
        study_rows: The rows of all cells of the study.
        folder: The folder to write to, which must be empty.
    """
    unpacked = []
    questions_by_task: dict[str, dict[str, Question]] = {}
    for index, cell in enumerate(cells):
        rows = study_rows[cell.key]
        unpacked.append(_unpack_cell(cell, rows, folder, stem=str(index)))
        for question in rows.make_questions():
            questions_by_task.setdefault(cell.task, {})[question.id] = question
    question_paths: dict[str, tuple[str, ...]] = {}
    for task, questions in questions_by_task.items():
        path = f"{task}-questions.jsonl"
        write_records(folder / path, questions.values())
        question_paths[task] = (path,)
    return UnpackedCells(unpacked, question_paths)


def _unpack_cell(cell: StoredCell, rows: CellRows, folder: Path, stem: str) -> Cell:
    paths = {"predictions": f"{stem}.jsonl"}
    write_records(folder / paths["predictions"], rows.answers)
    if rows.samples:
        paths["candidates"] = f"{stem}-samples.jsonl"
        write_records(folder / paths["candidates"], rows.samples)
    if rows.pairs:
        paths["preference"] = f"{stem}-pairs.jsonl"
        write_records(folder / paths["preference"], rows.pairs)
    return Cell.model_validate(cell.model_dump() | paths)
