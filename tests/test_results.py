"""docs/results.md and its figures are what the study's committed summary gives."""

from __future__ import annotations

import gzip
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
LARGEST = 5_000_000  # bytes of the summary


@pytest.fixture
def study(tmp_path: Path) -> ModuleType:
    """The script, with its folders copied to where it may write."""
    shutil.copytree(DOCS / "study" / "summary", tmp_path / "docs" / "study" / "summary")
    shutil.copy(DOCS / "results.md", tmp_path / "docs" / "results.md")
    (tmp_path / "docs" / "images").mkdir()
    spec = importlib.util.spec_from_file_location("study", DOCS / "study" / "study.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    docs = tmp_path / "docs"
    names = {"SUMMARY": docs / "study" / "summary", "PAGE": docs / "results.md", "IMAGES": docs / "images"}
    vars(module).update(names)
    return module


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_the_page_and_its_figures_are_those_of_the_summary(study: Any) -> None:
    study.write()
    assert study.PAGE.read_text() == (DOCS / "results.md").read_text(), "run make results"
    drawn = sorted(path.name for path in study.IMAGES.iterdir())
    assert drawn
    for name in drawn:
        assert (study.IMAGES / name).read_bytes() == (DOCS / "images" / name).read_bytes(), f"{name}: run make results"


def test_the_summary_is_small_and_holds_no_text_and_no_path(study: Any) -> None:
    files = list(study.SUMMARY.iterdir())
    assert sum(path.stat().st_size for path in files) < LARGEST
    cells = study._summary().cells
    assert {path.name for path in files} == {"results.json"} | {cell.predictions for cell in cells}
    for cell in cells:
        rows = _rows(study.SUMMARY / cell.predictions)
        assert {(row["text"], row["task"], row["model"]) for row in rows} == {("", cell.task, cell.method)}
    assert "/" not in (study.SUMMARY / "results.json").read_text().replace('"commit"', "")


def test_collecting_a_run_adds_its_cells_and_replaces_them(study: Any, tmp_path: Path) -> None:
    """A run that holds two cells of the summary, one with other answers."""
    first, second, *_ = study._summary().cells
    stage = tmp_path / "run" / "stages" / "report-1"
    stage.mkdir(parents=True)
    moved = [{**row, "confidence": 0.5, "text": "<answer>"} for row in _rows(study.SUMMARY / first.predictions)]
    (stage / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in moved))
    (stage / "b.jsonl").write_bytes(gzip.decompress((study.SUMMARY / second.predictions).read_bytes()))
    paths = ("stages/report-1/a.jsonl", "stages/report-1/b.jsonl")
    cells = [cell.model_copy(update={"predictions": path}) for cell, path in zip((first, second), paths, strict=True)]
    results = study._summary()
    recipe = {**results.recipe, "preference": {"trl": {}}, "outcome": {"score": "brier"}}
    results = results.model_copy(update={"cells": tuple(cells), "recipe": recipe})
    (stage / "results.json").write_text(results.model_dump_json())
    before = {path.name: path.read_bytes() for path in study.SUMMARY.iterdir()}
    study.collect([tmp_path / "run"])
    changed = {path.name for path in study.SUMMARY.iterdir() if path.read_bytes() != before.get(path.name)}
    assert changed == {first.predictions}
    assert {row["confidence"] for row in _rows(study.SUMMARY / first.predictions)} == {0.5}


def test_a_variant_of_a_term_is_a_row_of_its_own(study: Any) -> None:
    trl = {"bf16": True, "calibration_weight": 10, "calibrate_tokens": "label"}
    recipe = {"preference": {"trl": trl}, "outcome": {"score": "log", "held_out": True}}
    assert study._variant("dpo", recipe) == "dpo"
    scored = study._variant("dpo+outcome+ts", recipe)
    assert scored == "dpo+outcome+ts-calibration_weight-10-held_out-outcome_score-log"
    named = "DPO + outcome + temperature scaling, calibration weight 10, held out, outcome score log"
    assert study._title(scored) == named
    name = study._variant("dpo+catto", recipe)
    assert name == "dpo+catto-calibrate_tokens-label-calibration_weight-10"
    assert study._title(name) == "DPO + CATTO, calibrate tokens label, calibration weight 10"
    assert study._title("dpo+outcome+tl") == "DPO + outcome + scaling among labels"
    longer = study._variant("dpo+ts", recipe, "paper")
    assert (longer, study._title(longer)) == ("dpo+ts-epochs-6", "DPO + temperature scaling, epochs 6")
