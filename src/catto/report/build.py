"""Results -> numbers, tables, figures and the page."""

from __future__ import annotations

import json
from pathlib import Path

from catto.files import library_versions, read_records, replacing
from catto.records import Question, content_hash
from catto.report import VERSION
from catto.report import numbers as store
from catto.report.cards import experiment_cards
from catto.report.drawing import render_figure
from catto.report.figures import pictures
from catto.report.measuring import Answered, Progress, measure_results, read_cell, silent
from catto.report.numbers import Results
from catto.report.page import Browser, page
from catto.report.render import csv_text, latex, markdown
from catto.report.tables import all_tables

__all__ = ["build", "read"]


def build(results: Results, folder: Path, out: Path, progress: Progress = silent) -> Path:
    """Write report.html, tables, figures, model cards and numbers.json into `out`; return the page's path.

    Numbers and figures of an earlier build in `out` with the same inputs are kept. `progress` is called with the
    steps of measuring that are done and their total.
    """
    answers, browser = read(results, folder)
    numbers = measure_results(results, folder, answers, store.read(out / "numbers.json"), progress)
    _write(out / "numbers.json", numbers.model_dump_json(indent=1) + "\n")
    tables = all_tables(numbers, results)
    for table in tables:
        # LaTeX is for a printed page, where the paper's columns are as many as fit.
        texts = {"md": markdown(table), "tex": latex(table.in_papers_shape()), "csv": csv_text(table)}
        for ending, text in texts.items():
            _write(out / "tables" / f"{table.name}.{ending}", text)
    made_by = [VERSION, library_versions("matplotlib")]
    inputs = [made_by, numbers.model_dump(mode="json"), [cell.model_dump(mode="json") for cell in results.cells]]
    key, note = content_hash(inputs), out / "figures" / "inputs.json"
    known = note.exists() and key in note.read_text(encoding="utf-8", errors="replace")
    drawn = []
    for picture in pictures(results, numbers, answers):
        path = out / "figures" / f"{picture.name}.svg"
        if not (known and path.exists()):
            _write(path, render_figure(picture.draw, ".svg").decode())
        drawn.append((picture, path.read_text(encoding="utf-8")))
    _write(note, json.dumps({"inputs": key}) + "\n")
    for name, card in experiment_cards(numbers):
        _write(out / "cards" / f"{name}.md", card)
    _write(out / "report.html", page(results, numbers, tables, drawn, browser))
    return out / "report.html"


def read(results: Results, folder: Path) -> tuple[list[Answered], Browser]:
    """Read an experiment's answers with their questions, and the predictions that the page shows."""
    if not results.cells:
        raise ValueError("results has no cells, expected at least one")
    questions = {
        task: {question.id: question for path in paths for question in read_records(folder / path, Question)}
        for task, paths in results.questions.items()
    }
    browser, answers = Browser(questions, expected=len(results.cells)), []
    for cell in results.cells:
        answered, predictions = read_cell(cell, folder, questions.get(cell.task, {}), results.evaluation.unparsed)
        answers.append(answered)
        browser.add(cell, predictions)
    return answers, browser


def _write(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text)
