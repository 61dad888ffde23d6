"""When a verdict is withheld: forced answers, an interval that does not hold its value, a difference too small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from command import run, write_lines
from measure_rows import plain
from scipy.stats import binom
from typer.testing import CliRunner

from catto.answer_columns import ParseCounts
from catto.cli.select import select as select_command
from catto.io.record_files import write_records
from catto.metrics.binning import reliability
from catto.metrics.catalogue import METRICS, Versus, correct_p_values, holm
from catto.metrics.comparisons import compare
from catto.metrics.errors import confidence_gap, debiased_ece, ece
from catto.metrics.intervals import OUTSIDE, Comparison, Interval, drop_invalid_interval
from catto.metrics.ranking import auroc_within
from catto.metrics.resampling import Answers
from catto.metrics.selection import gather_candidates, within_questions
from catto.metrics.statistics import bootstrap, null_band
from catto.records import Prediction
from catto.report.drawing import Panel

Capture = pytest.CaptureFixture[str]
FORCED = "17 of 20 answers had to be forced: the numbers below describe the fallback, not the model."


def prediction(row: int, source: str = "free", sample: int = 0, **changes: Any) -> Prediction:
    base: dict[str, Any] = {"question": f"q{row}", "task": "t", "split": "test", "gold": "A", "sample": sample}
    base |= {"text": "", "label": "A" if row % 4 else "B", "source": source, "confidence": 0.3, "temperature": 0.0}
    return Prediction(**(base | {"seed": 0, "engine": "e", "model": "m"} | changes))


def answers(folder: Path, forced: int, plain_ones: int = 0, rows: int = 20, name: str = "p.jsonl") -> Path:
    """The first answers of the file forced, the next ones read in plain words; 75 % right at confidence 0.3."""
    kinds = ["fallback"] * forced + ["plain"] * plain_ones + ["free"] * (rows - forced - plain_ones)
    write_records(folder / name, [prediction(row, kind) for row, kind in enumerate(kinds)])
    return folder / name


def measured(capsys: Capture, *arguments: str | Path) -> Any:
    done = run(capsys, "measure", *arguments, "--resamples", "50", "--json")
    assert done.code == 0
    return done.json


def test_mostly_forced_answers_are_told_first_and_get_no_verdict(tmp_path: Path, capsys: Capture) -> None:
    path = answers(tmp_path, forced=17)
    shown = run(capsys, "measure", path, "--resamples", "50").out
    assert shown.startswith(FORCED)
    assert "confident by" not in shown
    assert "lies above" not in shown
    found = measured(capsys, path)
    assert next(iter(found)) == "warning"
    assert (found["warning"], found["verdict"]) == (FORCED, None)
    assert found["sources"] == {"free": 3, "plain": 0, "fallback": 17, "none": 0}


def test_a_fifth_of_forced_answers_is_still_judged(tmp_path: Path, capsys: Capture) -> None:
    """4 of 20 is a fifth, not above it; 5 of 20 is above."""
    assert "underconfident by 45.0 points" in run(capsys, "measure", answers(tmp_path, 4), "--resamples", "50").out
    assert "underconfident" not in run(capsys, "measure", answers(tmp_path, 5), "--resamples", "50").out


def test_a_slice_of_forced_answers_is_named(tmp_path: Path, capsys: Capture) -> None:
    rows = [prediction(row, "fallback" if row < 2 else "free", task="bad" if row < 4 else "good") for row in range(20)]
    write_records(tmp_path / "p.jsonl", rows)
    done = run(capsys, "measure", tmp_path / "p.jsonl", "--by", "task", "--resamples", "50")
    assert done.out.startswith("task bad: 2 of 4 answers had to be forced")
    found = measured(capsys, tmp_path / "p.jsonl", "--by", "task")["slices"]["values"]
    assert found["bad"]["warning"] is not None
    assert found["good"]["warning"] is None


def test_plain_answers_are_counted_beside_the_forced_ones(tmp_path: Path, capsys: Capture) -> None:
    path = answers(tmp_path, forced=2, plain_ones=3)
    shown = run(capsys, "measure", path, "--resamples", "20").out
    assert "fallback 10.0 % (accuracy 70.0 with those counted wrong), plain 15.0 %." in shown
    assert measured(capsys, path)["sources"] == {"free": 15, "plain": 3, "fallback": 2, "none": 0}


def test_calibrate_and_select_say_it_too(tmp_path: Path, capsys: Capture) -> None:
    fitted = run(capsys, "calibrate", "fit", answers(tmp_path, 17), "--out", tmp_path / "tau.json")
    assert fitted.out.startswith(FORCED)
    rows = [prediction(row, "fallback" if row < 9 else "free", sample) for row in range(10) for sample in range(2)]
    write_records(tmp_path / "k.jsonl", rows)
    app = typer.Typer()
    app.command()(select_command)
    assert CliRunner().invoke(app, [str(tmp_path / "k.jsonl"), "--k", "2"]).output.startswith("18 of 20 answers had")


def test_a_diagram_of_forced_answers_says_so_before_its_ece() -> None:
    bins = reliability([0.9, 0.8], [True, False])
    assert Panel("", bins, sources=ParseCounts(free=3, fallback=17)).note().startswith("85 % forced\nECE")
    assert Panel("", bins, sources=ParseCounts(free=17, fallback=3)).note().startswith("ECE")


# ---- intervals --------------------------------------------------------------------------------------------------


def exact() -> tuple[list[float], list[bool]]:
    """40 rows of each of five confidences, of which exactly that share is right: ECE 0."""
    return [0.1, 0.3, 0.5, 0.7, 0.9] * 40, [row // 5 < 4 * (1 + 2 * (row % 5)) for row in range(200)]


def test_an_interval_that_does_not_hold_its_value_is_withheld_with_a_reason() -> None:
    c, z = exact()
    found = bootstrap(ece, c, z, resamples=200)
    assert found.value < 1e-12 < found.low
    assert np.isnan([drop_invalid_interval(found).low, drop_invalid_interval(found).high]).all()
    assert drop_invalid_interval(found).reason == OUTSIDE
    inside = Interval(0.03, 0.02, 0.05, 0.95)
    assert drop_invalid_interval(inside) is inside


def test_rounding_is_no_reason_to_withhold_an_interval() -> None:
    """All confidences are 0.1: means of resamples differ from the mean in the last bit only."""
    for name, metric in METRICS.items():
        if not metric.calibration:
            found = bootstrap(metric.function, [0.1] * 37, [True] * 30 + [False] * 7, resamples=50)
            assert drop_invalid_interval(found).reason is None, name


def test_a_difference_outside_its_interval_is_withheld_too() -> None:
    found = drop_invalid_interval(Comparison(0.02, 0.01, 0.01, -0.02, -0.001, 0.95, 0.5))
    assert np.isnan([found.low, found.high]).all()
    assert found.reason == OUTSIDE
    assert found.difference == 0.01


def test_measure_prints_what_holds_in_place_of_the_interval(tmp_path: Path, capsys: Capture) -> None:
    c, z = exact()
    path = write_lines(tmp_path / "a.jsonl", plain(c, z))
    found = measured(capsys, path, "--metrics", "ece,mce,accuracy")
    interval = found["metrics"]["ece"]["interval"]
    assert (interval["low"], interval["high"], interval["reason"]) == (None, None, OUTSIDE)
    assert found["metrics"]["mce"]["interval"]["reason"] == OUTSIDE
    assert found["metrics"]["accuracy"]["interval"]["reason"] is None
    gap, null = bootstrap(confidence_gap, c, z, resamples=50), null_band(ece, c, resamples=50)
    shown = run(capsys, "measure", path, "--metrics", "ece", "--resamples", "50").out
    assert f"by chance {100 * null.low:.1f} to {100 * null.high:.1f}, debiased ECE 0.0, " in shown
    assert f"minus accuracy {100 * gap.value:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})." in shown
    assert found["gap"]["low"] == gap.low
    assert found["debiased_ece"] == debiased_ece(c, z)


def test_calibrate_prints_no_interval_that_does_not_hold_the_ece_it_fitted(tmp_path: Path, capsys: Capture) -> None:
    """Histogram binning fitted on these rows has ECE 0 on them, and no percentile of its resamples comes down to it."""
    rng = np.random.default_rng(0)
    c = rng.random(300)
    path = write_lines(tmp_path / "a.jsonl", plain(c, rng.random(300) < c))
    done = run(capsys, "calibrate", "fit", path, "--method", "histogram", "--out", tmp_path / "h.json")
    assert "After: ECE has no interval" in done.out


@pytest.mark.parametrize("shift", [0.0, 0.15])
def test_the_interval_of_the_gap_is_nominal_also_for_a_calibrated_model(shift: float) -> None:
    """An interval that truly covers 94 % passes 99.9 times in 100; that of ECE covers 0 % at shift 0."""
    rng, sets, inside = np.random.default_rng(round(100 * shift)), 200, 0
    for number in range(sets):
        c = 0.5 + 0.5 * rng.random(300)
        found = bootstrap(confidence_gap, c, rng.random(300) < c - shift, resamples=150, seed=number)
        inside += found.low <= shift <= found.high
    low, high = binom.ppf([0.0005, 0.9995], sets, 0.94)
    assert low <= inside <= high


# ---- comparisons ------------------------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    """Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1: 0.04, 0.06, 0.06, 0.04; never falling: 0.04, 0.06, 0.06, 0.06."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([0.02, float("nan")])[0] == 0.02
    assert np.isnan(holm([0.02, float("nan")])[1])


def test_holm_keeps_the_error_of_a_whole_table() -> None:
    """20 true nulls: some p < 0.05 in 64 % of tables, some corrected p in at most 5 % (band for 2,000 at 99.9 %)."""
    rng, tables = np.random.default_rng(0), 2000
    wrong = sum(min(holm(rng.random(20).tolist())) < 0.05 for _ in range(tables))
    assert wrong <= binom.ppf(0.9995, tables, 0.05)


def hair(rows: int = 20) -> tuple[Answers, Answers]:
    """Two models alike but that every confidence of the first is lower by 0.0008, where both are too sure."""
    ids = [f"q{row}" for row in range(rows)]
    correct = [row % 2 == 0 for row in range(rows)]
    return Answers(ids, [0.9 - 0.0008] * rows, correct), Answers(ids, [0.9] * rows, correct)


def test_a_hair_in_one_direction_is_no_difference_however_small_its_p_value() -> None:
    """0.08 points at N = 20: the swap test and the interval both notice it, and nobody cares."""
    found = compare(ece, *hair())
    assert found.difference == pytest.approx(-0.0008)
    assert found.p_value < 0.05
    assert found.high < 0
    assert correct_p_values({"ece": found})["ece"].mark("ece") == ""
    assert Versus(0.1, 0.108, -0.008, -0.012, -0.004, 0.95, 0.002, p_corrected=0.004).mark("ece") == "*"


def test_compare_prints_corrected_p_values_and_marks(tmp_path: Path, capsys: Capture) -> None:
    """Confidence 0.95 against 0.6 where 60 % are right: ECE lower by 35 points, no difference in accuracy."""
    right = [row % 5 < 3 for row in range(200)]
    a = write_lines(tmp_path / "a.jsonl", plain([0.6] * 200, right))
    b = write_lines(tmp_path / "b.jsonl", plain([0.95] * 200, right))
    found = run(capsys, "measure", a, "--compare", b, "--metrics", "ece,accuracy,mean_confidence", "--json").json
    metrics = found["compare"]["metrics"]
    assert metrics["ece"]["p_corrected"] == pytest.approx(2 * metrics["ece"]["p_value"])
    assert metrics["mean_confidence"]["p_corrected"] is None
    assert [metrics[name]["mark"] for name in ("ece", "accuracy", "mean_confidence")] == ["*", "", ""]
    shown = run(capsys, "measure", a, "--compare", b, "--metrics", "ece,accuracy").out
    assert "after Holm's correction for 2 comparisons" in " ".join(shown.split())
    back = run(capsys, "measure", b, "--compare", a, "--metrics", "ece", "--json").json
    assert back["compare"]["metrics"]["ece"]["mark"] == "†"


def test_compare_says_where_resamples_are_too_few_for_any_mark(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", plain())
    shown = run(capsys, "measure", path, "--compare", path, "--metrics", "ece,brier", "--resamples", "20").out
    assert "20 resamples are too few for any mark" in " ".join(shown.split())


def test_a_comparison_of_forced_answers_gets_no_mark(tmp_path: Path, capsys: Capture) -> None:
    def file(name: str, confidence: float, forced: int) -> Path:
        kinds = ["fallback"] * forced + ["free"] * (100 - forced)
        write_records(tmp_path / name, [prediction(row, kind, confidence=confidence) for row, kind in enumerate(kinds)])
        return tmp_path / name

    sure, free = file("sure.jsonl", 0.99, 0), file("free.jsonl", 0.75, 0)
    forced = file("forced.jsonl", 0.75, 50)
    for path, wanted in ((free, "*"), (forced, "")):
        found = run(capsys, "measure", path, "--compare", sure, "--metrics", "ece", "--json").json
        assert found["compare"]["metrics"]["ece"]["mark"] == wanted


# ---- within questions -------------------------------------------------------------------------------------------


def test_auroc_within_questions_by_hand() -> None:
    """q: right 0.9 and 0.5, wrong 0.5 and 0.2: pairs 1, 1, 0.5, 1 of 4. r: right 0.1, wrong 0.8: 0 of 1. s: no pair.

    Pooled: 3.5 of 5 pairs in 2 questions.
    """
    names = ["q", "r", "q", "s", "q", "r", "q"]
    confidence = [0.9, 0.1, 0.5, 0.7, 0.5, 0.8, 0.2]
    correct = [True, True, True, True, False, False, False]
    found = auroc_within(names, confidence, correct)
    assert (found.value, found.pairs, found.questions) == (0.7, 5, 2)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("seed", range(5))
def test_auroc_within_questions_is_the_count_of_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [f"q{number}" for number in rng.integers(0, 12, 80)]
    confidence, correct = rng.integers(0, 6, 80) / 5, rng.random(80) < 0.5
    won, pairs, mixed = 0.0, 0, set()
    for i in range(80):
        for j in range(80):
            if names[i] == names[j] and correct[i] and not correct[j]:
                won += float(confidence[i] > confidence[j]) + 0.5 * float(confidence[i] == confidence[j])
                pairs += 1
                mixed.add(names[i])
    found = auroc_within(names, confidence, correct)
    assert (found.pairs, found.questions) == (pairs, len(mixed))
    assert found.value == pytest.approx(won / pairs, abs=1e-12)


def test_easy_questions_answered_surely_help_auroc_but_not_within() -> None:
    """Confidence tells questions apart and no samples: AUROC over all is high, within questions a half."""
    names, confidence, correct = [], [], []
    for number in range(40):
        for sample in range(4):
            names.append(str(number))
            confidence.append(0.9 if number < 20 else 0.2)
            correct.append(sample < (3 if number < 20 else 1))
    assert METRICS["auroc"](confidence, correct) > 0.7
    assert auroc_within(names, confidence, correct).value == 0.5


def test_without_a_pair_auroc_within_is_undefined() -> None:
    found = auroc_within(["a", "a", "b"], [0.1, 0.2, 0.3], [True, True, False])
    assert np.isnan(found.value)
    assert (found.pairs, found.questions) == (0, 0)
    with pytest.raises(ValueError, match="question has 1 rows"):
        auroc_within(["a"], [0.1, 0.2], [True, False])


def samples(folder: Path) -> Path:
    """Two questions with two samples each: right 0.8, wrong 0.4; both wrong. One of four forced."""
    rows = [
        prediction(0, sample=0, label="A", confidence=0.8, temperature=0.7, mean_logprob=-0.1),
        prediction(0, sample=1, label="B", confidence=0.4, temperature=0.7, mean_logprob=-0.1),
        prediction(1, sample=0, label="B", confidence=0.6, temperature=0.7, mean_logprob=-0.1),
        prediction(1, "fallback", 1, label="B", confidence=0.5, temperature=0.7, mean_logprob=-0.1),
    ]
    write_records(folder / "k.jsonl", rows)
    return folder / "k.jsonl"


def test_select_shows_fallback_temperature_and_auroc_within(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(select_command)
    path = str(samples(tmp_path))
    shown = " ".join(CliRunner().invoke(app, [path, "--k", "2"], env={"COLUMNS": "160"}).output.split())
    assert "AUROC of confidence within questions: 100.0" in shown
    assert "from 1 pairs of a right and a wrong sample in 1 of 2 questions" in shown
    assert "Sampled at temperature 0.7, ranked by the stated confidence." in shown
    assert shown.count("25.0 %") >= 7  # beside each of the six rules, and once in all
    for row in json.loads(CliRunner().invoke(app, [path, "--k", "2", "--json"]).output):
        assert row["fallback_rate"] == 0.25
        assert (row["within"]["value"], row["within"]["questions"], row["within"]["pairs"]) == (1.0, 1, 1)
        assert row["sources"] == {"free": 3, "plain": 0, "fallback": 1, "none": 0}


def test_a_sample_without_an_answer_is_a_wrong_one() -> None:
    given = gather_candidates(
        [prediction(0, sample=0, label="A"), prediction(0, "fallback", 1, label=None, confidence=0.0)]
    )
    assert (within_questions(given).value, within_questions(given).pairs) == (1.0, 1)
