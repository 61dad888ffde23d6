"""Measure a stored study with the package's own report."""

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
    """The numbers of a study or a part of it, and the answers that they were measured from."""

    numbers: Numbers
    answers: list[CellAnswers]


def measure_study(
    name: str, seeds: Collection[int] | None = None, terms: Collection[str] = ALL_TERMS, folder: Path = DATA
) -> MeasuredStudy:
    """Measure the cells of a study that have one of these seeds and one of these calibration terms.

    Args:
        name: Name of the study.
        seeds: The seeds; None means all of them.
        terms: Calibration terms as in `catto.methods.WEIGHTS`; `none` is a method without one.
        folder: Folder of the stored studies.
    """
    summary = read_summary(name, folder)
    cells = []
    for cell in summary.cells:
        has_seed = seeds is None or cell.seed in seeds
        if has_seed and calibration_of(cell.method) in terms:
            cells.append(cell)
    # The report reads a folder of files, so the rows are unpacked into one.
    with TemporaryDirectory() as unpacked:
        unpacked_cells, questions = unpack_cells(cells, _read_rows_once(name, folder), Path(unpacked))
        results = Results(
            name=name,
            recipe={"evaluation": summary.evaluation},
            recipe_hash="",
            versions={},
            cells=tuple(unpacked_cells),
            questions=questions,
            baseline=summary.baseline,
        )
        answers = read_experiment(results, Path(unpacked)).answers
        return MeasuredStudy(measure_results(results, Path(unpacked), answers), answers)


def calibration_of(name: str) -> str:
    """Return the calibration term of a variant."""
    method, _ = split_variant(name)
    return METHODS[strip_scaling(method)].calibration


@cache
def _read_rows_once(name: str, folder: Path) -> StudyRows:
    return read_rows(name, folder)


class UnpackedCells(NamedTuple):
    """Cells with the paths of their files, and task -> files of questions."""

    cells: list[Cell]
    questions: dict[str, tuple[str, ...]]


def unpack_cells(cells: Collection[StoredCell], study_rows: StudyRows, folder: Path) -> UnpackedCells:
    """Write the rows of cells as JSON lines.

    Args:
        cells: The cells.
        study_rows: The rows of the study.
        folder: An empty folder.
    """
    unpacked = []
    questions: dict[str, dict[str, Question]] = {}
    for index, cell in enumerate(cells):
        rows = study_rows[cell.key]
        unpacked.append(_unpack_cell(cell, rows, folder, stem=str(index)))
        for question in rows.make_questions():
            questions.setdefault(cell.task, {})[question.id] = question
    paths: dict[str, tuple[str, ...]] = {}
    for task, by_id in questions.items():
        path = f"{task}-questions.jsonl"
        write_records(folder / path, by_id.values())
        paths[task] = (path,)
    return UnpackedCells(unpacked, paths)


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
