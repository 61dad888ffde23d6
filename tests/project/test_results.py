"""The study's script collects runs, and its tables show what was measured."""

from __future__ import annotations

import doctest
import gzip
import importlib.util
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from catto import load_questions
from catto.engines import TAU_GRID
from catto.io.record_files import write_records
from catto.metrics.statistics import Interval, SeedSummary
from catto.recipe.settings import ResponseFields
from catto.records import PairMargin
from catto.teacher.sources import StoredResponses

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
OUTCOME = {"score": "brier", "held_out": False, "rows_per_pair": 1}
RECIPE = {"tasks": {"snli": {}}, "teacher": {"reasoning": False}}


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with its folders copied to where it may write."""
    shutil.copytree(DOCS / "study" / "summary", tmp_path / "docs" / "study" / "summary")
    (tmp_path / "docs" / "images").mkdir()
    spec = importlib.util.spec_from_file_location("study", DOCS / "study" / "study.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "study", module)
    spec.loader.exec_module(module)
    docs = tmp_path / "docs"
    for page in module.PAGES:
        shutil.copy(DOCS / page, docs / page)
    vars(module).update({"DOCS": docs, "SUMMARY": docs / "study" / "summary"})
    return module


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_the_summary_holds_no_text_and_no_path(study: Any) -> None:
    assert {folder.name for folder in study.SUMMARY.iterdir()} == set(study.STUDIES)
    for name in study.STUDIES:
        folder, summary = study.SUMMARY / name, study._summary(name)
        named = {
            path for cell in summary.cells for path in (cell.predictions, cell.candidates, cell.preference) if path
        }
        named |= {path for paths in summary.questions.values() for path in paths}
        assert {path.name for path in folder.iterdir()} == {"results.json"} | named
        for cell in summary.cells:
            rows = [row for path in (cell.predictions, cell.candidates) if path for row in _rows(folder / path)]
            assert {(row["text"], row["task"], row["model"]) for row in rows} == {("", cell.task, cell.method)}
        assert "/" not in (folder / "results.json").read_text()
        assert summary.questions.keys() <= {"witnesses"}  # no benchmark's questions


def test_collecting_a_run_adds_its_cells_and_replaces_them(study: Any, tmp_path: Path) -> None:
    """A run that holds two cells of the summary, one with other answers."""
    first, second, *_ = study._summary().cells
    stage = tmp_path / "run" / "stages" / "report-1"
    stage.mkdir(parents=True)
    folder = study.SUMMARY / "answer_first"
    moved = [{**row, "confidence": 0.5, "text": "<answer>"} for row in _rows(folder / first.predictions)]
    (stage / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in moved))
    (stage / "b.jsonl").write_bytes(gzip.decompress((folder / second.predictions).read_bytes()))
    paths = ("stages/report-1/a.jsonl", "stages/report-1/b.jsonl")
    cells = [cell.model_copy(update={"predictions": path}) for cell, path in zip((first, second), paths, strict=True)]
    results = study._summary()
    recipe = {**RECIPE, **results.recipe, "preference": {"trl": {}}, "outcome": OUTCOME}
    results = results.model_copy(update={"cells": tuple(cells), "recipe": recipe})
    (stage / "results.json").write_text(results.model_dump_json())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    study.collect(tmp_path / "run")
    changed = {path.name for path in folder.iterdir() if path.read_bytes() != before.get(path.name)}
    assert changed == {first.predictions}
    assert {row["confidence"] for row in _rows(folder / first.predictions)} == {0.5}


def test_a_variant_of_a_term_is_a_row_of_its_own(study: Any) -> None:
    trl = {"bf16": True, "calibration_weight": 10, "calibrate_tokens": "label"}
    recipe = {**RECIPE, "preference": {"trl": trl}, "outcome": {**OUTCOME, "score": "log", "held_out": True}}
    assert study._variant("dpo", recipe) == "dpo"
    scored = study._variant("dpo+outcome+ts", recipe)
    assert scored == "dpo+outcome+ts-held_out-score-log-weight-10"
    named = "DPO + outcome + temperature scaling, held-out questions, log score, weight 10"
    assert study._title(scored) == named
    name = study._variant("dpo+catto", recipe)
    assert name == "dpo+catto-tokens-label-weight-10"
    assert study._title(name) == "DPO + CATTO, on label tokens, weight 10"
    assert study._title("dpo+outcome+tl") == "DPO + outcome + scaling among labels"
    longer = study._variant("dpo+ts", recipe, "paper")
    assert (longer, study._title(longer)) == ("dpo+ts-epochs-6", "DPO + temperature scaling, 6 epochs")
    more = {**RECIPE, "preference": {"trl": {}}, "outcome": {**OUTCOME, "rows_per_pair": 4}}
    assert study._variant("dpo+replay", more) == "dpo+replay-rows-4"
    unset = {"calibration_weight": None, "detach_surrogate": False, "outcome_score": "brier"}
    given = {**RECIPE, "preference": {"trl": unset}, "outcome": {**OUTCOME, "score": "log"}}
    assert [study._variant(name, given) for name in ("dpo+catto", "dpo+outcome")] == ["dpo+catto", "dpo+outcome"]
    given["preference"] = {"trl": {"calibration_weight": 1.0, "detach_surrogate": True}}
    assert study._variant("dpo+catto", given) == "dpo+catto-detached-weight-1"
    assert study._title("dpo+catto-detached-weight-1") == "DPO + CATTO, surrogate detached, weight 1"
    assert study._title("dpo+replay-rows-4") == "DPO + replay, 4 rows per pair"
    mixed = {**RECIPE, "preference": {"trl": {"loss_type": ["sigmoid", "sft"]}}, "outcome": {**OUTCOME, "score": "log"}}
    names = [study._variant(name, mixed) for name in ("sft", "sft+outcome", "dpo+tl", "dpo+outcome")]
    assert names == ["sft", "sft+outcome-score-log", "dpo+tl-sft_loss", "dpo+outcome-score-log-sft_loss"]
    assert study._title(names[-1]) == "DPO + outcome, log score, with sft loss"


def test_a_run_belongs_to_the_study_of_its_recipe(study: Any) -> None:
    assert study._study(RECIPE) == "answer_first"
    assert study._study({**RECIPE, "teacher": {"reasoning": True}}) == "reasoning"
    assert study._study({**RECIPE, "tasks": {"witnesses": {}}}) == "world"


def test_stored_candidates_rank_as_in_the_run(study: Any, tmp_path: Path) -> None:
    """Their confidence is stored at the cell's tau. Logits (0, ln 0.25): 0.8 at tau 1, 1 / (1 + 0.25^2) at tau 0.5."""
    logprobs = {"A": math.log(0.8), "B": math.log(0.2)}
    labels = {"label_logprobs": logprobs, "logsumexp": {str(tau): math.log1p(0.25 ** (1 / tau)) for tau in TAU_GRID}}
    row = {"question": "1", "task": "snli", "split": "test", "gold": "A", "sample": 0, "text": "t", "label": "A"}
    row |= {"source": "free", "confidence": 0.8, "temperature": 1.0, "seed": 0, "engine": "e", "model": "m"}
    row |= {**labels, "mean_logprob": -0.3, "tokens": 3}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    cell = (
        study._summary()
        .cells[0]
        .model_copy(update={"predictions": "rows.jsonl", "candidates": "rows.jsonl", "tau": 0.5})
    )
    copied = study._copied(cell, tmp_path, tmp_path)
    (greedy,), (sampled,) = (_rows(tmp_path / name) for name in (copied.predictions, copied.candidates))
    assert (greedy["confidence"], "mean_logprob" in greedy) == (0.8, False)
    assert (sampled["confidence"], sampled["mean_logprob"]) == (pytest.approx(1 / 1.0625, abs=1e-9), -0.3)
    assert not {"logsumexp", "label_logprobs"} & sampled.keys()


def test_stored_margins_order_pairs_as_in_the_run(study: Any, tmp_path: Path) -> None:
    """A margin far below the others stays on its side of 0."""
    large = PairMargin(question="1", whole=1.23456789, reasoning=None)
    small = PairMargin(question="2", whole=-1e-9, reasoning=1e-8)
    write_records(tmp_path / "margins.jsonl", [large, small])
    shutil.copytree(study.SUMMARY / "answer_first", tmp_path, dirs_exist_ok=True)
    cell = study._summary().cells[0].model_copy(update={"preference": "margins.jsonl", "candidates": None})
    copied = study._copied(cell, tmp_path, tmp_path)
    rows = _rows(tmp_path / copied.preference)
    assert [(row["whole"], row["reasoning"]) for row in rows] == [(1.23457, None), (-1e-9, 1e-8)]


def test_held_out_pairs_are_columns_where_they_were_measured(study: Any) -> None:
    numbers, _ = study._measured("answer_first", (4,))
    groups = [group for group in numbers.groups if group.method in ("sft", "dpo")]
    texts = [["sft", *study._scores(groups[0])], ["dpo", *study._scores(groups[1])]]
    without = list(study._scored("SNLI", groups, ["method"], [list(text) for text in texts]))
    spread, interval = SeedSummary(0.61, None, 1), Interval(0.61, 0.55, 0.67, 0.95)
    metrics = {**groups[1].metrics, "preference_accuracy": spread}
    intervals = {**groups[1].intervals, "preference_accuracy": interval}
    groups[1] = groups[1].model_copy(update={"metrics": metrics, "intervals": intervals})
    measured = list(study._scored("SNLI", groups, ["method"], texts))
    assert measured[2] == f"{without[2][:-2]} | held-out pairs ordered, % | by their reasoning, % |"
    assert measured[4].endswith(" | - | - |")
    assert measured[5].endswith(" | 61.0 [55.0, 67.0] | - |")


def test_built_reasoning_answers_every_question_with_every_label(tmp_path: Path) -> None:
    """The sentences quote the hypothesis, and stored responses of a recipe can be read from the file."""
    spec = importlib.util.spec_from_file_location("reasons", DOCS / "study" / "reasons.py")
    assert spec is not None
    assert spec.loader is not None
    reasons = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reasons)
    assert doctest.testmod(reasons) == (0, 5)
    rows = [
        {"pairID": f"{n}.jpg#0r1e", "captionID": f"{n}.jpg#0", "gold_label": "entailment"}
        | {"sentence1": f"A man walks past house {n}.", "sentence2": "A tall man walks."}
        for n in range(40)
    ]
    for split in ("train", "dev", "test"):
        lines = []
        for row in rows:
            named = {"pairID": f"{split}-{row['pairID']}", "sentence1": f"{row['sentence1']} {split}"}
            lines.append(json.dumps({**row, **named}))
        (tmp_path / f"snli_1.0_{split}.jsonl").write_text("\n".join(lines) + "\n")
    reasons.main(str(tmp_path), str(tmp_path / "reasons.jsonl"))
    questions = load_questions("snli", "train", data_dir=str(tmp_path))
    fields = ResponseFields(text=None, reasoning="reasoning", label="label", sample="sample")
    stored = StoredResponses(str(tmp_path / "reasons.jsonl"), fields, list(questions))
    assert stored.notes == {"rows_found": 120, "rows_of_other_questions": 120}
    held_out = load_questions("snli", "validation", data_dir=str(tmp_path), seed=2, limit=7)  # drawn by its seed
    stored = StoredResponses(str(tmp_path / "reasons.jsonl"), fields, list(held_out))
    assert stored.notes == {"rows_found": 21, "rows_of_other_questions": 219}
    texts = {json.loads(line)["reasoning"] for line in (tmp_path / "reasons.jsonl").read_text().splitlines()}
    assert {"New: tall.", "Both: man, walks.", "Both: man, walks. New: tall."} <= texts


def test_goals_are_shown_as_a_line_for_each_scaling(study: Any) -> None:
    def goals(task: str) -> list[Any]:
        found = [study.Goal(task, "DPO + outcome", "", "debiased_ece", "1.0, 8.0", "", "yes")]
        for scaling, metric in itertools.product(study.SCALINGS, ("brier", "auroc", "accuracy", "ece")):
            reached = "better, within noise ‡" if metric == "auroc" else "yes"
            found.append(study.Goal(task, "DPO + outcome", scaling, metric, f"{metric}{scaling}", "", reached))
        return found

    lines = list(study.goal_matrix([("{}", goals("SNLI")), ("{} with reasoning", goals("SNLI"))]))
    texts = "yes: brier{0} | within noise ‡: auroc{0} | yes: ece{0} | yes: accuracy{0} |"
    assert lines[2:6] == [
        f"| {task} | {method} | {quarter} | {scaled} | {texts.format(suffix)}"
        for name in ("SNLI", "SNLI with reasoning")
        for task, method, quarter, scaled, suffix in (
            (name, "DPO + outcome", "yes: 1.0, 8.0", "whole vocabulary", "+ts"),
            ("", "", "", "labels", "+tl"),
        )
    ]
    assert "| SNLI | DPO + outcome | AUROC, both scaled among labels: better than DPO's | auroc+tl |" in "".join(
        study.goal_list(goals("SNLI"))
    )


def test_controls_are_shown_as_a_line_for_each_pair_and_scaling(study: Any) -> None:
    pair = ("dpo+outcome-score-log-weight-1", "dpo+replay-weight-1")
    found = [
        study.Control(pair, scaling, "(seed 0) ‡", metric, f"{metric}{scaling}", "-1 to 1, p = 0.5", better)
        for scaling, metric, better in itertools.product(("", "+tl"), ("ece", "brier"), ("better, within noise",))
    ]
    assert list(study.control_matrix(found))[2:4] == [
        "| DPO + outcome (seed 0) ‡ | DPO + replay | - | within noise: ece | within noise: brier |",
        "|  |  | labels | within noise: ece+tl | within noise: brier+tl |",
    ]
    whole = "DPO + outcome + scaling among labels, log score, weight 1; DPO + replay + scaling among labels, weight 1"
    line = f"| {whole} (seed 0) ‡ | ECE | ece+tl | -1 to 1, p = 0.5 | better, within noise |"
    assert line in study.control_list(found)


def test_a_short_title_leaves_out_what_the_page_states_once(study: Any) -> None:
    assert study._short("dpo+outcome-score-log-sft_loss-weight-1") == "DPO + outcome, with sft loss"
    assert study._short(f"dpo+outcome{study.TUNED}") == "DPO + outcome, tuned"
    assert study._short("dpo+catto-weight-10") == "DPO + CATTO, weight 10"
