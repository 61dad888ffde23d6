"""The numbers of a report against metrics computed straight from the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_world import SMALL, TINY, Measured, measured, write_world

from catto.answer_columns import ParseCounts
from catto.engines import TAU_GRID
from catto.errors import DataError
from catto.io.record_files import read_records, write_records
from catto.measure import HEADLINE, MeasureSettings
from catto.metrics.catalogue import METRICS
from catto.metrics.errors import brier_split
from catto.metrics.resampling import Answers
from catto.metrics.statistics import bootstrap, null_band, null_table
from catto.records import Prediction, Question
from catto.report import numbers as store
from catto.report.build import build_report
from catto.report.cell_answers import read_cell
from catto.report.measuring import measure_results, measure_risk, measure_selection
from catto.report.numbers import Cell
from catto.report.tables import build_group_tables
from catto.report.verdict import decide_verdict


@pytest.fixture(scope="module")
def world() -> Measured:
    return measured(SMALL)


def file_of(world: Measured, cell: Cell) -> tuple[Any, Any, list[Prediction]]:
    rows = list(read_records(world.folder / cell.predictions, Prediction))
    return np.array([row.confidence for row in rows]), np.array([row.label == row.gold for row in rows]), rows


def test_every_metric_of_every_cell_is_the_metric_of_its_file(world: Measured) -> None:
    for cell, found in zip(world.results.cells, world.numbers.cells, strict=True):
        c, z, rows = file_of(world, cell)
        assert set(found.metrics) == {*HEADLINE, "brier_reliability", "brier_resolution", "brier_uncertainty"}
        for name in HEADLINE:
            assert found.metrics[name].value == pytest.approx(METRICS[name](c, z), abs=1e-12), (cell.method, name)
        split = brier_split(c, z)
        for part in ("reliability", "resolution", "uncertainty"):
            assert found.metrics[f"brier_{part}"].value == getattr(split, part)
        fallback = np.array([row.source == "fallback" for row in rows])
        assert found.others["fallback_rate"] == fallback.mean()
        assert found.others["accuracy_unparsed_wrong"] == (z & ~fallback).mean()
        assert found.n == len(rows)


def test_interval_and_null_band_of_a_cell_are_those_of_the_library(world: Measured) -> None:
    c, z, _ = file_of(world, world.results.cells[0])
    found = world.numbers.cells[0]
    wanted, null = bootstrap(METRICS["ece"], c, z, resamples=50), null_band(METRICS["ece"], c, resamples=50)
    assert (found.metrics["ece"].low, found.metrics["ece"].high) == (wanted.low, wanted.high)
    assert (found.null.mean, found.null.low, found.null.high) == (null.mean, null.low, null.high)


def test_the_null_band_of_a_group_is_that_of_the_mean_over_its_seeds(world: Measured) -> None:
    for group in world.numbers.groups:
        of = group.task, group.trained_on, group.method
        cells = [
            cell
            for cell in world.results.cells
            if (cell.task, cell.trained_on, cell.method) == of and cell.budget in (None, group.budget)
        ]
        confidence = [file_of(world, cell)[0] for cell in sorted(cells, key=lambda cell: cell.seed)]
        assert len(confidence) == 2
        runs = [Answers(None, c, ()) for c in confidence]
        wanted = null_table({"ece": METRICS["ece"]}, runs, resamples=50)["ece"]
        assert (group.null.mean, group.null.low, group.null.high) == (wanted.mean, wanted.low, wanted.high)


def test_a_group_holds_mean_and_deviation_over_its_seeds(world: Measured) -> None:
    """Two seeds with values a, b: mean (a + b) / 2 and standard deviation |a - b| / sqrt(2)."""
    for group in world.numbers.groups:
        values = [
            cell.metrics["ece"].value
            for cell in world.numbers.cells
            if (cell.task, cell.trained_on, cell.method) == (group.task, group.trained_on, group.method)
            and cell.budget in (None, group.budget)
        ]
        assert len(values) == 2
        assert group.metrics["ece"].mean == pytest.approx(sum(values) / 2, abs=1e-12)
        assert group.metrics["ece"].std == pytest.approx(abs(values[0] - values[1]) / np.sqrt(2), abs=1e-12)


def test_the_difference_to_dpo_is_to_the_dpo_of_the_same_budget(world: Measured) -> None:
    of = {(g.task, g.trained_on, g.method, g.budget): g for g in world.numbers.groups}
    for (task, source, method, budget), group in of.items():
        base = of[task, source, "dpo", budget]
        if method == "dpo":
            assert group.versus == {}
            continue
        wanted = group.metrics["ece"].mean - base.metrics["ece"].mean
        assert group.versus["ece"].difference == pytest.approx(wanted, abs=1e-12)
    catto = [of["snli", "snli", "dpo+catto", budget] for budget in ("paper", "matched")]
    assert catto[0].metrics == catto[1].metrics
    assert catto[0].versus != catto[1].versus


def test_known_posteriors_give_true_error_bayes_accuracy_and_regret(world: Measured) -> None:
    cell = next(cell for cell in world.results.cells if cell.task == "witnesses")
    found = next(one for one in world.numbers.cells if one.task == "witnesses")
    questions = {one.id: one for one in read_records(world.folder / "witnesses.questions.jsonl", Question)}
    _, _, rows = file_of(world, cell)
    exact = [questions[row.question].posterior for row in rows]
    error = np.mean([abs(row.confidence - one[row.label]) for row, one in zip(rows, exact, strict=True)])
    regret = np.mean([max(one.values()) - one[row.label] for row, one in zip(rows, exact, strict=True)])
    best = np.mean([max(one, key=one.get) == row.gold for row, one in zip(rows, exact, strict=True)])
    assert (found.others["true_error"], found.others["regret"]) == pytest.approx((error, regret), abs=1e-12)
    assert found.others["bayes_accuracy"] == best
    unknown = next(one for one in world.numbers.cells if one.task == "snli").others
    assert not {"true_error", "regret", "bayes_accuracy"} & set(unknown)


def test_true_error_regret_and_bayes_accuracy_by_hand(tmp_path: Path) -> None:
    """Posterior A 0.7, B 0.3; answer B at 0.9, gold A: error |0.9 - 0.3| = 0.6, regret 0.4, the Bayes answer right."""
    options = [{"label": label, "text": label} for label in "AB"]
    base = {"task": "own", "split": "test", "gold": "A"}
    posterior = {"A": 0.7, "B": 0.3}
    question = Question(id="q", fields={"question": "?"}, options=options, posterior=posterior, **base)
    more = {"sample": 0, "text": "", "source": "free", "temperature": 0, "seed": 0, "engine": "e", "model": "m"}
    write_records(tmp_path / "q.jsonl", [question])
    write_records(tmp_path / "p.jsonl", [Prediction(question="q", label="B", confidence=0.9, **base, **more)])
    results = write_world(tmp_path / "other", TINY).model_copy(
        update={
            "cells": (Cell(task="own", trained_on="own", method="sft", budget=None, seed=0, predictions="p.jsonl"),),
            "questions": {"own": ("q.jsonl",)},
        }
    )
    (cell,) = results.cells
    answers, _ = read_cell(cell, tmp_path, {"q": question}, "fallback")
    found = measure_results(results, tmp_path, [answers])
    others = [found.cells[0].others[name] for name in ("true_error", "regret", "bayes_accuracy")]
    assert others == pytest.approx([0.6, 0.4, 1.0], abs=1e-12)
    assert found.budgets == (None,)
    assert found.groups[0].versus == {}
    assert build_group_tables(found, "in")


def test_what_was_measured_is_not_measured_again_and_a_changed_file_is(world: Measured, tmp_path: Path) -> None:
    (tmp_path / "numbers.json").write_text(world.numbers.model_dump_json(indent=1))
    known = store.read_numbers(tmp_path / "numbers.json")
    assert known.model_dump_json() == world.numbers.model_dump_json()
    # A cached number is trusted: change one, and it comes back; that of a cell whose file changed does not.
    cells = [cell.model_copy(update={"others": {"fallback_rate": 0.123}}) for cell in known.cells]
    spoiled = known.model_copy(update={"cells": tuple(cells)})
    arguments = (world.results, world.folder, world.cells)
    assert {cell.others["fallback_rate"] for cell in measure_results(*arguments, spoiled).cells} == {0.123}
    stale = spoiled.model_copy(update={"cells": tuple(cell.model_copy(update={"input": "x"}) for cell in cells)})
    afresh = measure_results(*arguments, stale)
    assert [one.model_dump_json() for one in afresh.cells] == [one.model_dump_json() for one in world.numbers.cells]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"low": ', '"lou": ', "low"),
        ('"std": ', '"std": "x", "was": ', "std"),
        ('"mean": ', '"mean": [], "was": ', "mean"),
    ],
)
def test_damaged_numbers_are_named_with_what_to_do(
    world: Measured, tmp_path: Path, old: str, new: str, field: str
) -> None:
    path = tmp_path / "numbers.json"
    path.write_text(world.numbers.model_dump_json(indent=1).replace(old, new, 1))
    with pytest.raises(DataError, match=rf"{field}.*; delete it to measure again"):
        store.read_numbers(path)


def test_numbers_of_another_version_are_measured_afresh(world: Measured, tmp_path: Path) -> None:
    old = world.numbers.model_copy(update={"version": 0})
    (tmp_path / "numbers.json").write_text(old.model_dump_json(indent=1))
    assert store.read_numbers(tmp_path / "numbers.json") is None


def test_unparsed_answers_count_wrong_where_the_recipe_says_so(world: Measured) -> None:
    cell = next(cell for cell in world.results.cells if cell.trained_on == "mmlu")
    (strict, predictions), (lenient, _) = (
        read_cell(cell, world.folder, {}, unparsed) for unparsed in ("wrong", "fallback")
    )
    read = np.array([one.source != "fallback" for one in predictions])
    assert strict.correct.tolist() == (lenient.correct & read).tolist()
    assert strict.correct.sum() < lenient.correct.sum()


def test_progress_counts_every_cell_and_group_up_to_the_announced_total(world: Measured) -> None:
    told = []
    measure_results(world.results, world.folder, world.cells, world.numbers, lambda *step: told.append(step))
    total = len(world.numbers.cells) + len(world.numbers.groups)
    assert told == [(done, total) for done in range(1, total + 1)]


def test_a_method_that_both_budgets_share_stands_in_both_blocks(world: Measured) -> None:
    assert world.numbers.budgets == ("paper", "matched")
    assert [g.budget for g in world.numbers.groups if (g.method, g.trained_on) == ("sft", "snli")] == [
        "paper",
        "matched",
    ]


def test_a_prediction_of_another_task_or_an_unknown_question_is_named(tmp_path: Path) -> None:
    results = write_world(tmp_path, TINY)
    path = tmp_path / results.cells[0].predictions
    lines = path.read_text().split("\n")
    path.write_text(lines[0].replace('"task":"snli"', '"task":"anli"') + "\n")
    with pytest.raises(DataError, match=r"row 1: task: expected 'snli', got 'anli'"):
        build_report(results, tmp_path, tmp_path / "out")
    first = json.loads(lines[0])
    path.write_text(json.dumps(first | {"question": "nobody"}) + "\n")
    with pytest.raises(DataError, match=r"row 1: question: 'nobody' is not among"):
        build_report(results, tmp_path, tmp_path / "out")
    path.write_text(lines[0] + "\n" + lines[0] + "\n")
    with pytest.raises(DataError, match=r"row 2: question: .* is answered twice"):
        build_report(results, tmp_path, tmp_path / "out")


def confident(folder: Path, name: str, rows: list[tuple[float, bool]]) -> str:
    """Write an answer to each of the questions 0, 1, ..., with a confidence, right or wrong; return the file's name."""
    more = {"task": "own", "split": "test", "gold": "A", "sample": 0, "text": "", "source": "free", "temperature": 0}
    more |= {"seed": 0, "engine": "e", "model": "m"}
    made = [
        Prediction(question=str(row), label="A" if right else "B", confidence=confidence, **more)
        for row, (confidence, right) in enumerate(rows)
    ]
    write_records(folder / name, made)
    return name


def test_the_threshold_of_a_risk_is_fitted_on_validation_and_applied_to_the_test(tmp_path: Path) -> None:
    """200 right at 0.9, 50 wrong at 0.3: the threshold lies just above the errors, bounded by 1 - (d/2)^(1/200).

    It answers 9 of 10 test questions, one of them wrongly.
    """
    validation = confident(tmp_path, "v.jsonl", [(0.9, True)] * 200 + [(0.3, False)] * 50)
    test = confident(tmp_path, "t.jsonl", [(0.9, True)] * 8 + [(0.95, False), (0.1, True)])
    place = {"task": "own", "trained_on": "own", "method": "sft", "budget": None, "seed": 0}
    cell = Cell(**place, predictions=test, validation=validation)
    answers, _ = read_cell(cell, tmp_path, {}, "fallback")
    bound = 1 - (0.05 / 2) ** (1 / 200)
    wanted = {"risk_promised": 1.0, "risk_threshold": 0.3, "risk_bound": bound, "risk_coverage": 0.9}
    assert measure_risk(answers, tmp_path, "fallback") == pytest.approx(wanted | {"risk_errors": 1 / 9}, abs=1e-12)
    confident(tmp_path, "v.jsonl", [(0.9, True)] * 30)
    assert measure_risk(answers, tmp_path, "fallback") == {"risk_promised": 0.0, "risk_coverage": 0.0}
    assert measure_risk(replace(answers, cell=cell.model_copy(update={"validation": None})), tmp_path, "fallback") == {}


def crossing(right: bool, temperature: float, sample: int) -> Prediction:
    """A right answer from tokens with logits 0, -1, or a wrong one with 0, -2, -2, -2: the lead changes with tau.

    p(right) and p(wrong): 0.807 and 0.853 at tau 0.7, 0.622 and 0.475 at tau 2.
    """
    below, count = (1.0, 1) if right else (2.0, 3)
    grid = {str(tau): float(np.log(1 + count * np.exp(-below / tau))) for tau in TAU_GRID}
    return Prediction(
        question="q", task="snli", split="test", gold="A", sample=sample, text="", label="A" if right else "B",
        source="free", confidence=1 / (1 + count * np.exp(-below)), logsumexp=grid, temperature=temperature,
        seed=0, engine="e", model="m",
    )  # fmt: skip


def test_a_rescaled_models_threshold_is_fitted_on_rescaled_answers(tmp_path: Path) -> None:
    """Right and wrong answers are at 0.731 and 0.711 for tau 1, at 0.622 and 0.475 for tau 2."""
    rows = [crossing(row < 200, 0.0, 0).model_copy(update={"question": str(row)}) for row in range(260)]
    write_records(tmp_path / "v.jsonl", rows)
    place = {"task": "snli", "trained_on": "snli", "budget": None, "seed": 0, "predictions": "v.jsonl"}
    for method, threshold in (("sft", 0.7112), ("sft+ts", 0.4753)):
        cell = Cell(method=method, tau=2.0, validation="v.jsonl", **place)
        answers, _ = read_cell(cell, tmp_path, {}, "fallback")
        assert measure_risk(answers, tmp_path, "fallback")["risk_threshold"] == pytest.approx(threshold, abs=1e-4)


def test_candidates_are_ranked_at_the_cells_tau_and_not_at_the_temperature_of_their_sampling(tmp_path: Path) -> None:
    write_records(tmp_path / "c.jsonl", [crossing(True, 0.7, 0), crossing(False, 0.7, 1)])
    cell = Cell(
        task="snli", trained_on="snli", method="dpo", budget="paper", seed=0, predictions="", candidates="c.jsonl"
    )
    for tau, accuracy in ((2.0, 1.0), (0.7, 0.0)):
        scaled = cell.model_copy(update={"tau": tau, "sampling_temperature": 0.7})
        rules, sampled = measure_selection(scaled, tmp_path, "fallback")
        assert rules[2]["most confident"].value == accuracy
        assert sampled["tau"] == tau
        assert sampled["sampling_temperature"] == 0.7
        assert (sampled["auroc_within"], sampled["questions_with_both"]) == (accuracy, 1.0)
        assert sampled["sample_fallback_rate"] == 0.0


def test_forced_samples_that_count_as_wrong_are_ranked_at_the_same_tau(tmp_path: Path) -> None:
    """At tau 2 the readable answer has 0.622 and the forced one 0.475; at tau 1 the forced one would have 0.711."""
    forced = crossing(False, 0.7, 1).model_copy(update={"source": "fallback"})
    write_records(tmp_path / "c.jsonl", [crossing(True, 0.7, 0), forced])
    place = {"task": "snli", "trained_on": "snli", "budget": None, "seed": 0, "predictions": "", "method": "dpo"}
    rules, _ = measure_selection(Cell(candidates="c.jsonl", tau=2.0, **place), tmp_path, "wrong")
    assert rules[2]["most confident"].value == 1.0


def test_k_is_measured_as_it_was_asked_for_and_forced_samples_may_count_as_wrong(tmp_path: Path) -> None:
    rows = [crossing(True, 0.7, sample) for sample in range(3)]
    rows[0] = rows[0].model_copy(update={"source": "fallback", "confidence": 0.9})
    write_records(tmp_path / "c.jsonl", rows)
    place = {"task": "snli", "trained_on": "snli", "budget": None, "seed": 0, "predictions": "", "method": "dpo"}
    cell = Cell(candidates="c.jsonl", **place)
    for unparsed, right in (("fallback", 1.0), ("wrong", 2 / 3)):
        rules, _ = measure_selection(cell, tmp_path, unparsed)  # type: ignore[arg-type]
        assert list(rules) == [1, 2, 3]
        assert rules[3]["one random sample"].value == pytest.approx(right)


def test_sources_and_gap_of_a_cell_are_those_of_its_file(world: Measured) -> None:
    for cell, found in zip(world.results.cells, world.numbers.cells, strict=True):
        c, z, rows = file_of(world, cell)
        kinds = [row.source for row in rows]
        assert found.sources == ParseCounts(kinds.count("free"), kinds.count("plain"), kinds.count("fallback"))
        assert found.gap.value == pytest.approx(c.mean() - z.mean(), abs=1e-12)
        for number in (*found.metrics.values(), found.gap):
            if not np.isnan(number.low):
                assert number.low <= number.value + 1e-12
                assert number.value <= number.high + 1e-12


def test_a_table_has_swaps_enough_for_its_number_of_comparisons(world: Measured) -> None:
    """50 resamples alone give p >= 1/51, and 32 comparisons would make that 0.63: nothing could be shown."""
    least = min(one.p_value for group in world.numbers.groups for one in group.versus.values())
    assert least < 1 / 51


def test_the_verdict_is_by_the_true_error_where_every_posterior_is_known() -> None:
    world = measured(replace(SMALL, tasks=("witnesses",)))
    verdict, groups = world.numbers.verdict, world.numbers.first_screen
    assert verdict.metric == "true_error"
    wanted = {group.method: group.others["true_error"].mean for group in groups}
    assert verdict.losses == pytest.approx(wanted, abs=1e-12)
    assert list(verdict.losses.values()) == sorted(wanted.values())
    first = next(iter(verdict.losses))
    assert set(verdict.behind) == set(wanted) - {first}
    for name, one in verdict.behind.items():
        assert one.difference == pytest.approx(wanted[name] - wanted[first], abs=1e-12)
        assert one.p_corrected == min(1.0, 10 * one.p_value)  # five methods: ten pairs


def test_the_verdict_is_by_the_brier_score_where_a_posterior_is_unknown(world: Measured) -> None:
    verdict = world.numbers.verdict
    assert (verdict.metric, verdict.n) == ("brier", 30)
    for name, loss in verdict.losses.items():
        groups = [group for group in world.numbers.first_screen if group.method == name]
        assert {(group.task, group.budget) for group in groups} == {("snli", "matched"), ("witnesses", "matched")}
        assert loss == pytest.approx(sum(group.metrics["brier"].mean for group in groups) / 2, abs=1e-12)


def test_the_verdict_judges_no_forced_answers_and_no_single_method(world: Measured) -> None:
    settings = MeasureSettings(resamples=20)
    groups, first = world.numbers.first_screen, next(iter(world.numbers.verdict.losses))
    unread = ParseCounts(free=9, fallback=51)
    forced = [g.model_copy(update={"sources": unread}) if g.method == first else g for g in groups]
    verdict = decide_verdict(forced, world.cells, settings)
    assert set(verdict.losses) == set(world.numbers.verdict.losses) - {first}
    assert decide_verdict([g for g in groups if g.method == first], world.cells, settings) is None
    twins = [group for group in groups if group.method == "dpo"]
    twins += [group.model_copy(update={"method": "twin"}) for group in twins]
    same = [
        replace(one, cell=one.cell.model_copy(update={"method": "twin"}))
        for one in world.cells
        if one.cell.method == "dpo"
    ]
    assert decide_verdict(twins, [*world.cells, *same], settings).leaders == ["dpo", "twin"]


@pytest.mark.parametrize("right", [True, False])
def test_a_brier_score_of_answers_that_are_all_alike_decides_nothing(right: bool) -> None:
    """Of right answers it is lowest for the surest method, whatever that method knows."""
    world = measured(TINY)
    alike = [replace(one, correct=np.full(len(one), right)) for one in world.cells]
    one_wrong = [*alike[:-1], replace(alike[-1], correct=world.cells[-1].correct)]
    settings, groups = MeasureSettings(resamples=50), world.numbers.first_screen
    assert decide_verdict(groups, alike, settings) is None
    assert decide_verdict(groups, one_wrong, settings) is not None
