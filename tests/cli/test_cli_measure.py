"""`catto measure`: the numbers of anybody's file."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run, write_lines
from measure_rows import CONFIDENCE, CORRECT, plain

from catto.answer_columns import read_graded
from catto.measure import HEADLINE, MeasureSettings, describe_verdict, summarise_answers
from catto.metrics.catalogue import METRICS
from catto.metrics.comparisons import compare
from catto.metrics.errors import brier_split, ece
from catto.metrics.resampling import Answers
from catto.metrics.risk import threshold_for_risk
from catto.metrics.statistics import bootstrap, null_band
from catto.records import Prediction

Capture = pytest.CaptureFixture[str]
FAST = ("--resamples", "50", "--json")


def prediction(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"question": "q0", "task": "snli", "split": "test", "gold": "A", "sample": 0, "text": ""}
    base |= {"label": "A", "source": "free", "confidence": 0.8, "temperature": 0.0, "seed": 0}
    return Prediction(**(base | {"engine": "e", "model": "m"} | changes)).model_dump()


def measured(capsys: Capture, path: Path, *options: str | Path) -> Any:
    done = run(capsys, "measure", path, *FAST, *options)
    assert done.code == 0
    assert (done.err != "") == (done.json["rows"] < 30), done.err
    return done.json


def test_numbers_are_those_of_the_library(tmp_path: Path, capsys: Capture) -> None:
    found = measured(capsys, write_lines(tmp_path / "a.jsonl", plain()), "--seed", "3")
    assert list(found["metrics"]) == list(HEADLINE)
    for name in HEADLINE:
        expected = bootstrap(METRICS[name].function, CONFIDENCE, CORRECT, resamples=50, seed=3)
        interval = found["metrics"][name]["interval"]
        assert (interval["value"], interval["low"], interval["high"]) == (expected.value, expected.low, expected.high)
    null = null_band(ece, CONFIDENCE, resamples=50, seed=3)
    assert found["metrics"]["ece"]["null"]["high"] == null.high
    assert found["metrics"]["brier"]["null"] is None


def csv_of(path: Path, words: tuple[str, str]) -> Path:
    lines = [f"q{i},{float(c)!r},{words[bool(z)]}" for i, (c, z) in enumerate(zip(CONFIDENCE, CORRECT, strict=True))]
    path.write_text("id,confidence,correct\n" + "\n".join(lines) + "\n", encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("words", [("0", "1"), ("no", "Yes"), ("False", "TRUE"), ("0.0", "1.0")])
def test_csv_words_are_the_booleans_of_json(tmp_path: Path, words: tuple[str, str]) -> None:
    table = read_graded(csv_of(tmp_path / "a.csv", words))
    np.testing.assert_array_equal(table.confidence, CONFIDENCE)
    np.testing.assert_array_equal(table.correct, CORRECT)


def test_every_format_gives_the_same_numbers(tmp_path: Path, capsys: Capture) -> None:
    lines = write_lines(tmp_path / "a.jsonl", plain())
    (tmp_path / "a.json").write_text(json.dumps(plain()), encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    csv_of(tmp_path / "a.csv", ("0", "1"))
    found = [measured(capsys, tmp_path / name)["metrics"] for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.csv")]
    assert all(one == found[0] for one in found)


def test_predictions_are_right_where_label_is_gold(tmp_path: Path, capsys: Capture) -> None:
    rows = [prediction(), prediction(question="q1", label="B"), prediction(question="q2", label=None)]
    assert measured(capsys, write_lines(tmp_path / "a.jsonl", rows))["accuracy"] == pytest.approx(1 / 3)


def test_unparsed_wrong_counts_fallbacks_as_wrong(tmp_path: Path, capsys: Capture) -> None:
    rows = [prediction(), prediction(question="q1", source="fallback"), prediction(question="q2", label="B")]
    path = write_lines(tmp_path / "a.jsonl", rows)
    kept, wrong = measured(capsys, path), measured(capsys, path, "--unparsed", "wrong")
    assert kept["fallback_rate"] == wrong["fallback_rate"] == pytest.approx(1 / 3)
    assert kept["accuracy"] == pytest.approx(2 / 3)
    assert kept["accuracy_unparsed_wrong"] == wrong["accuracy"] == pytest.approx(1 / 3)


def test_label_logprobs_give_the_top_label_and_its_raw_probability(tmp_path: Path) -> None:
    """exp(-0.5) = 0.6065 as it is, not renormalised over the two labels (0.731)."""
    rows = [
        {"label_logprobs": {"A": -0.5, "B": -1.5}, "gold": "A"},
        {"label_logprobs": {"A": -3.0, "B": -0.25}, "gold": "A"},
    ]
    table = read_graded(write_lines(tmp_path / "a.jsonl", rows))
    np.testing.assert_allclose(table.confidence, np.exp([-0.5, -0.25]), rtol=1e-15)
    assert table.correct.tolist() == [True, False]


def test_column_names_can_be_given(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"p": 0.9, "right": 1, "confidence": 0.1, "correct": 0}])
    found = measured(capsys, path, "--confidence", "p", "--correct", "right")
    assert (found["accuracy"], found["mean_confidence"]) == (1.0, 0.9)


def test_candidates_of_one_question_are_drawn_together(tmp_path: Path, capsys: Capture) -> None:
    rows = [prediction(question=f"q{i // 4}", sample=i % 4, confidence=float(CONFIDENCE[i])) for i in range(200)]
    found = measured(capsys, write_lines(tmp_path / "a.jsonl", rows), "--metrics", "mean_confidence")
    ids = [row["question"] for row in rows]
    together = bootstrap(METRICS["mean_confidence"], CONFIDENCE, [True] * 200, questions=ids, resamples=50)
    assert found["questions"] == 50
    assert found["metrics"]["mean_confidence"]["interval"]["low"] == together.low
    assert together.low != bootstrap(METRICS["mean_confidence"], CONFIDENCE, [True] * 200, resamples=50).low


@pytest.mark.parametrize(
    ("column", "options"), [("question_id", ()), ("qid", ()), ("doc_id", ()), ("item", ("--question", "item"))]
)
def test_the_column_of_the_question_is_known_or_named(
    tmp_path: Path, capsys: Capture, column: str, options: tuple[str, ...]
) -> None:
    """`id` may number the rows, so it comes last; where no column names the question, the output says so."""
    rows = [{"id": i, column: f"q{i // 4}", **row} for i, row in enumerate(plain())]
    path = write_lines(tmp_path / "a.jsonl", rows)
    found = measured(capsys, path, *options)
    assert found["questions"] == len({row[column] for row in rows})
    assert "several answers to one question" in run(capsys, "measure", path, *options, "--target-risk", "0.1").err
    assert "no column 'itm'" in run(capsys, "measure", path, "--question", "itm").err
    nameless = write_lines(tmp_path / "b.jsonl", [{"confidence": 0.9, "correct": True}] * 40)
    assert "N = 40 answers taken as independent (--question names" in run(capsys, "measure", nameless).out


def test_bins_reach_the_binned_metrics_and_their_null_band(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", plain())
    found = measured(capsys, path, "--bins", "5", "--metrics", "ece,brier")["metrics"]["ece"]
    assert found["interval"]["value"] == ece(CONFIDENCE, CORRECT, bins=5) != ece(CONFIDENCE, CORRECT)
    assert found["null"]["mean"] == null_band(partial(ece, bins=5), CONFIDENCE, resamples=50).mean


def test_slices_are_measured_apart(tmp_path: Path, capsys: Capture) -> None:
    rows = [row | {"task": ("b", "a")[i % 2]} for i, row in enumerate(plain())]
    path = write_lines(tmp_path / "a.jsonl", rows)
    found = measured(capsys, path, "--by", "task")
    assert list(found["slices"]["values"]) == ["a", "b"]
    assert found["slices"]["values"]["b"]["metrics"]["ece"]["interval"]["value"] == ece(CONFIDENCE[::2], CORRECT[::2])
    shown = run(capsys, "measure", path, "--by", "task", "--metrics", "ece", "--resamples", "20").out
    assert "a (N = 100)" in shown


def test_values_of_a_file_cannot_write_to_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"confidence": 0.5, "correct": True, "t": "\x1b[31mred\u202e"}] * 3)
    shown = run(capsys, "measure", path, "--by", "t", "--metrics", "ece", "--resamples", "20").out
    assert r"t \x1b[31mred\x202e (N = 3)" in shown
    assert all(sign.isprintable() or sign == "\n" for sign in shown)


def test_compare_pairs_by_question_whatever_the_order(tmp_path: Path, capsys: Capture) -> None:
    other = np.random.default_rng(1).random(200) < CONFIDENCE
    a = write_lines(tmp_path / "a.jsonl", plain())
    b = write_lines(tmp_path / "b.jsonl", plain(correct=other)[::-1])
    found = measured(capsys, a, "--compare", b, "--metrics", "ece")["compare"]["metrics"]["ece"]
    ids = [f"q{i}" for i in range(200)]
    expected = compare(ece, Answers(ids, CONFIDENCE, CORRECT), Answers(ids, CONFIDENCE, other), resamples=50)
    assert (found["difference"], found["low"], found["p_value"]) == pytest.approx(
        (expected.difference, expected.low, expected.p_value), abs=1e-12
    )
    assert "corrected" in run(capsys, "measure", a, "--compare", b, "--metrics", "ece", "--resamples", "20").out


def test_verdict_tells_direction_and_chance(tmp_path: Path, capsys: Capture) -> None:
    """100 answers at confidence 0.9, 70 right: ECE 20, overconfident by 20.0 points on average."""
    path = write_lines(tmp_path / "a.jsonl", plain([0.9] * 100, [True] * 70 + [False] * 30))
    done = run(capsys, "measure", path)
    assert "ECE 20.0 lies above what a perfectly calibrated model would score by chance" in done.out
    assert "overconfident by 20.0 points on average." in done.out
    assert "N = 100 answers, 20 bins, 1000 resamples." in done.out
    assert "would score by chance in 50 % of cases (" in run(capsys, "measure", path, "--level", "0.5").out


def sentence(tmp_path: Path, confidence: list[float], correct: list[bool]) -> str:
    table = read_graded(write_lines(tmp_path / "v.jsonl", plain(confidence, correct)))
    return str(describe_verdict(summarise_answers(table, MeasureSettings(metrics=("ece",), resamples=200))))


def test_verdict_within_below_under_and_mixed(tmp_path: Path) -> None:
    assert "no miscalibration shows in 20 answers" in sentence(tmp_path, [0.9] * 20, [True] * 18 + [False] * 2)
    spread = [0.1, 0.3, 0.5, 0.7, 0.9] * 40
    exact = [row // 5 < 4 * (1 + 2 * (row % 5)) for row in range(200)]
    assert "lies below" in sentence(tmp_path, spread, exact)
    assert "underconfident by 40.0 points" in sentence(tmp_path, [0.6] * 50, [True] * 50)
    mixed = sentence(tmp_path, [0.9] * 100 + [0.2] * 100, [row % 2 == 0 for row in range(200)])
    assert "too sure in some bins and not sure enough in others, +5.0 points" in mixed


def test_a_gap_that_is_certain_is_said_although_the_bins_hide_it(tmp_path: Path) -> None:
    """300 answers in 20 bins, 6 points too sure: ECE lies within its band, the interval of the mean excludes 0."""
    draw = random.Random(0)
    confidence = [draw.uniform(0.3, 0.99) for _ in range(300)]
    for shift, word in ((-0.07, "over"), (0.07, "under")):
        told = sentence(tmp_path, confidence, [random.Random(i).random() < c + shift for i, c in enumerate(confidence)])
        assert re.search(rf"lies within .*, but the answers are {word}confident by \d\.\d points on average \(", told)
    assert "no miscalibration shows" in sentence(tmp_path, [0.99] * 100, [True] * 100)


def test_undefined_metric_is_null_and_a_dash(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", plain([0.9, 0.8], [True, True]))
    assert measured(capsys, path, "--metrics", "auroc")["metrics"]["auroc"]["interval"]["value"] is None
    assert "-" in run(capsys, "measure", path, "--metrics", "auroc").out


def test_figure_is_written(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", plain())
    for name in ("f.svg", "f.png", "f.pdf"):
        assert f"Wrote {tmp_path / name}." in run(capsys, "measure", path, "--figure", tmp_path / name).out.replace(
            "\n", ""
        )
        assert (tmp_path / name).stat().st_size > 1000


def test_target_risk_prints_the_threshold_of_the_library(tmp_path: Path, capsys: Capture) -> None:
    """100 right at 1.0 and 10 wrong at 0.5: no error in the 100 above 0.5, bound 1 - (0.05 / 2)^(1/100) = 3.6 %."""
    path = write_lines(tmp_path / "a.jsonl", plain([1.0] * 100 + [0.5] * 10, [True] * 100 + [False] * 10))
    found = measured(capsys, path, "--target-risk", "0.1", "--metrics", "ece")["target_risk"]
    assert found == asdict(threshold_for_risk([1.0] * 100 + [0.5] * 10, [1] * 100 + [0] * 10, 0.1, 0.05))
    shown = run(capsys, "measure", path, "--target-risk", "0.1", "--metrics", "ece", "--resamples", "20").out
    assert f"confidence >= {found['threshold']!r} has an error rate of at most 10 % with 95 % confidence" in shown
    assert "0 of 100 wrong, error rate at most 3.6 %" in shown
    strict = measured(capsys, path, "--target-risk", "0.1", "--confidence-level", "0.99", "--metrics", "ece")
    assert strict["target_risk"]["delta"] == 0.01
    assert strict["target_risk"]["bound"] > found["bound"]


def test_a_risk_that_cannot_be_promised_is_said_to_be_so(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", plain([1.0] * 35, [True] * 35))
    found = measured(capsys, path, "--target-risk", "0.1", "--metrics", "ece")["target_risk"]
    assert (found["threshold"], found["coverage"], found["bound"]) == (None, 0.0, 1.0)
    shown = run(capsys, "measure", path, "--target-risk", "0.1", "--metrics", "ece", "--resamples", "20").out
    assert "No threshold can promise an error rate of at most 10 % with 95 % confidence from these 35 answers" in shown


def test_target_risk_needs_one_answer_per_question(tmp_path: Path, capsys: Capture) -> None:
    """Errors of candidates of one question are not independent, and the binomial bound would not hold."""
    path = write_lines(tmp_path / "a.jsonl", [*plain(), plain()[0]])
    done = run(capsys, "measure", path, "--target-risk", "0.1")
    assert (done.code, done.out) == (2, "")
    assert "--target-risk" in done.err
    assert "several answers to one question" in done.err


def test_the_brier_split_adds_up_to_the_brier_score(tmp_path: Path, capsys: Capture) -> None:
    path = write_lines(tmp_path / "a.jsonl", plain())
    document = measured(capsys, path, "--brier-split", "--bins", "7", "--metrics", "brier")
    found, wanted = document["brier_split"], brier_split(CONFIDENCE, CORRECT, bins=7)
    assert found == {**asdict(wanted), "total": wanted.total}
    assert found["total"] == pytest.approx(document["metrics"]["brier"]["interval"]["value"], abs=1e-12)
    shown = run(capsys, "measure", path, "--brier-split", "--metrics", "brier", "--resamples", "20").out
    assert f"reliability {brier_split(CONFIDENCE, CORRECT).reliability:.4f} - resolution" in shown


def test_what_no_flag_asks_for_has_no_key(tmp_path: Path, capsys: Capture) -> None:
    found = measured(capsys, write_lines(tmp_path / "a.jsonl", plain()), "--metrics", "ece")
    assert not {"brier_split", "target_risk", "compare", "slices"} & set(found)


def test_unexpected_errors_keep_their_traceback(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", plain()[:3])
    code = (
        "def broken(*a, **k): raise ValueError('a defect')\n"
        "import catto.measure as m\nm.bootstrap_table = broken\n"
        f"from catto.cli import main\nmain(['measure', {str(path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: a defect" in done.stderr


def test_brackets_in_names_are_text_not_markup(tmp_path: Path, capsys: Capture) -> None:
    rows = [row | {"task": "[bold]t[/nope]"} for row in plain()[:5]]
    done = run(capsys, "measure", write_lines(tmp_path / "a.jsonl", rows), "--by", "task", "--metrics", "ece")
    assert done.code == 0
    assert "[bold]t" in done.out


def test_foreign_source_column_is_no_fallback(tmp_path: Path) -> None:
    rows = [{"confidence": 0.5, "correct": 1, "source": "wikipedia"}]
    assert read_graded(write_lines(tmp_path / "a.jsonl", rows)).read_as is None


def test_few_resamples_where_rows_are_many() -> None:
    assert MeasureSettings().draws(200_000) == 1000
    assert MeasureSettings().draws(200_001) == 200
    assert MeasureSettings(resamples=7).draws(10**6) == 7


def test_version_and_module() -> None:
    done = subprocess.run([sys.executable, "-m", "catto", "--version"], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("catto 0.")


@pytest.mark.parametrize("command", [(), ("measure",), ("calibrate",), ("calibrate", "fit"), ("doctor",)])
def test_help_shows_examples(capsys: Capture, command: tuple[str, ...]) -> None:
    done = run(capsys, *command, "--help")
    assert done.code == 0
    assert "catto " + " ".join(command) in done.out
    assert "Example" in done.out
    assert "<bool>" not in done.out


@pytest.mark.parametrize(("count", "told"), [(1, "only 1 question; below 30"), (29, "only 29 questions"), (30, "")])
def test_few_answers_are_warned_about(tmp_path: Path, capsys: Capture, count: int, told: str) -> None:
    """One right answer is measured as 100.0 to 100.0, which nobody should believe."""
    path = write_lines(tmp_path / "a.jsonl", plain([0.9] * count, [True] * count))
    done = run(capsys, "measure", path, *FAST)
    assert done.code == 0
    assert told in done.err
    assert bool(done.err) == bool(told)


def test_a_small_slice_is_warned_about_by_its_name(tmp_path: Path, capsys: Capture) -> None:
    rows = [{**row, "task": "rare" if n < 2 else "usual"} for n, row in enumerate(plain([0.9] * 100, [True] * 100))]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert f"{path} rare: only 2 questions; below 30" in run(capsys, "measure", path, "--by", "task", *FAST).err


def test_few_questions_with_many_answers_are_warned_about(tmp_path: Path, capsys: Capture) -> None:
    rows = [{**row, "id": f"q{n % 3}"} for n, row in enumerate(plain([0.9] * 600, [True] * 600))]
    assert "only 3 questions; below 30" in run(capsys, "measure", write_lines(tmp_path / "a.jsonl", rows), *FAST).err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path, encoding: str) -> None:
    path = write_lines(tmp_path / "é†.jsonl", plain())
    done = subprocess.run(
        [sys.executable, "-m", "catto", "measure", str(path), "--compare", str(path), "--resamples", "20"],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert b"\\u2020" in done.stdout


def test_json_is_json_where_the_terminal_lacks_a_character(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "\U0001f600.jsonl", plain())
    command = [sys.executable, "-m", "catto", "measure", str(path), *FAST]
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert json.loads(done.stdout)["file"] == str(path)


def test_numbers_are_whole_in_a_narrow_terminal(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    done = run(capsys, "measure", write_lines(tmp_path / "a.jsonl", plain()), "--resamples", "20")
    assert done.code == 0
    assert "Accuracy" in done.out
    assert "…" not in done.out
