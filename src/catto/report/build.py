"""Results -> tables, figures, numbers and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catto.files import library_versions, replacing
from catto.problems import DataError
from catto.records import Question, content_hash
from catto.report import VERSION
from catto.report import numbers as store
from catto.report.measuring import Answered, Protocol, Tick, answered, measure, predictions_of, questions_of, row_count
from catto.report.numbers import Numbers, Results
from catto.report.page import MOST_ROWS, Browser, Drawn, page
from catto.report.plotting import Picture, svg
from catto.report.render import Table, csv_text, latex, markdown
from catto.report.tables import all_tables

__all__ = ["build"]


@dataclass(frozen=True)
class _Read:
    """Everything read from an experiment's folder."""

    cells: list[Answered]
    questions: dict[str, dict[str, Question]]
    browser: Browser


def build(results: Results, folder: Path, out: Path, tick: Tick = lambda: None) -> Path:
    """Write report.html, tables, figures and numbers.json into `out`; return the page's path.

    What stands in `out` from an earlier build and has the same inputs is taken over. `tick` is called
    `catto.report.measuring.steps(results)` times.
    """
    read = _read(results, folder)
    numbers = measure(results, folder, read.cells, read.questions, store.read(out / "numbers.json"), tick)
    store.write(numbers, out / "numbers.json")
    tables = all_tables(numbers, results)
    _write_tables(tables, out / "tables")
    drawn = _draw(_pictures(results, numbers, read.cells), out / "figures")
    path = out / "report.html"
    with replacing(path) as file:
        file.write(page(results, numbers, tables, drawn, read.browser))
    return path


def _read(results: Results, folder: Path) -> _Read:
    if not results.cells:
        raise ValueError("results has no cells, expected at least one")
    protocol, questions = Protocol.of(results), questions_of(results, folder)
    rows = sum(row_count(folder / cell.predictions) for cell in results.cells)
    quota = rows if rows <= MOST_ROWS else max(1, MOST_ROWS // len(results.cells))
    browser, cells = Browser(questions, quota), []
    for cell in results.cells:
        predictions = list(predictions_of(cell, folder))
        cells.append(answered(cell, predictions, folder, protocol.unparsed_wrong))
        browser.add(cell, predictions)
    return _Read(cells, questions, browser)


def _write_tables(tables: Sequence[Table], folder: Path) -> None:
    for table in tables:
        # LaTeX is for a printed page, where the paper's columns are as many as fit.
        texts = {"md": markdown(table), "tex": latex(table.in_papers_shape()), "csv": csv_text(table)}
        for ending, text in texts.items():
            with replacing(folder / f"{table.name}.{ending}") as file:
                file.write(text)


def _pictures(results: Results, numbers: Numbers, cells: Sequence[Answered]) -> list[Picture]:
    from catto.report.figures import answer_pictures, score_pictures, selection_pictures, training_pictures

    scores, answers = score_pictures(numbers), answer_pictures(numbers, cells)
    return [*scores, *answers, *selection_pictures(numbers), *training_pictures(results, numbers)]


def _draw(pictures: Sequence[Picture], folder: Path) -> list[Drawn]:
    """Draw what is not there yet; `inputs.json` says from which numbers each file was drawn."""
    place = folder / "inputs.json"
    known = _known_inputs(place)
    version = [VERSION, library_versions("matplotlib").get("matplotlib")]
    inputs = {one.name: content_hash([version, one.title, one.inputs]) for one in pictures}
    drawn = []
    for picture in pictures:
        path = folder / f"{picture.name}.svg"
        if known.get(picture.name) != inputs[picture.name] or not path.exists():
            with replacing(path) as file:
                file.write(svg(picture.draw()))
        drawn.append(Drawn(picture, path.read_text(encoding="utf-8")))
    with replacing(place) as file:
        file.write(json.dumps(inputs, indent=1) + "\n")
    return drawn


def _known_inputs(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(path, None, f"not JSON: {error}; delete it to draw afresh") from None
    return found if isinstance(found, dict) else {}
