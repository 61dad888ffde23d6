"""The mean over runs: values, intervals, null bands and paired tests against their plain definitions."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.stats import rankdata

from catto.metrics.comparisons import compare, compare_mean_scores, compare_table
from catto.metrics.errors import accuracy, brier, confidence_gap, ece, mean_confidence
from catto.metrics.intervals import Comparison
from catto.metrics.ranking import auroc
from catto.metrics.resampling import Answers, ScoredAnswers
from catto.metrics.statistics import bootstrap, bootstrap_table, null_band, null_table

METRIC = {"accuracy": accuracy, "ece": ece, "brier": brier, "auroc": auroc, "gap": confidence_gap}


def rows(seed: int, n: int = 90) -> Answers:
    draws = np.random.default_rng(seed)
    c = np.round(draws.random(n), 2)
    return Answers([f"q{i}" for i in range(n)], c, draws.random(n) < c**1.5)


def difference(name: str, a: list[Answers], b: list[Answers], **options: Any) -> Comparison:
    return compare_table({name: METRIC[name]}, a, b, **options)[name]


def test_a_metric_without_weights_gives_the_same_intervals() -> None:
    """The same function behind a lambda is called on rows: values, undefined resamples and bands agree."""
    run = rows(3)
    for name, metric in METRIC.items():
        plain = bootstrap(lambda c, z, metric=metric: metric(c, z), run.confidence, run.correct, resamples=80)
        fast = bootstrap(metric, run.confidence, run.correct, resamples=80)
        assert (plain.low, plain.high) == pytest.approx((fast.low, fast.high), abs=1e-12), name
        slow_band = null_band(lambda c, z, metric=metric: metric(c, z), run.confidence, resamples=80)
        band = null_band(metric, run.confidence, resamples=80)
        assert (slow_band.mean, slow_band.high) == pytest.approx((band.mean, band.high), abs=1e-12), name


@pytest.mark.parametrize("name", METRIC)
def test_the_mean_over_runs_is_the_mean_of_the_metric(name: str) -> None:
    runs = [rows(seed) for seed in range(3)]
    wanted = np.mean([METRIC[name](run.confidence, run.correct) for run in runs])
    assert bootstrap_table(METRIC, runs, resamples=5)[name].value == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("name", METRIC)
def test_one_run_in_a_table_is_compare(name: str) -> None:
    """Whatever the order in which the other method's questions are written."""
    a, b = rows(0), rows(1)
    assert b.question is not None
    back = list(range(90))[::-1]
    shuffled = Answers([b.question[i] for i in back], np.asarray(b.confidence)[back], np.asarray(b.correct)[back])
    found, wanted = difference(name, [a], [shuffled], resamples=300), compare(METRIC[name], a, b, resamples=300)
    assert found.p_value == wanted.p_value
    assert (found.difference, found.low, found.high) == pytest.approx(
        (wanted.difference, wanted.low, wanted.high), abs=1e-14
    )


@pytest.mark.parametrize("name", METRIC)
def test_the_comparison_of_one_run_is_its_plain_definition(name: str) -> None:
    """The differences of the drawn rows, and of the swapped ones, computed one by one with the metric itself.

    AUROC reads the order alone, and swaps the ranks within each method.
    """
    a, b, rng = rows(0), rows(1), np.random.default_rng(0)
    (c_a, z_a), (c_b, z_b) = ((np.asarray(run.confidence), np.asarray(run.correct)) for run in (a, b))
    draws = []
    for _ in range(200):
        drawn = rng.integers(0, 90, size=90)
        draws.append(METRIC[name](c_a[drawn], z_a[drawn]) - METRIC[name](c_b[drawn], z_b[drawn]))
    rng, observed, far = np.random.default_rng(0), METRIC[name](c_a, z_a) - METRIC[name](c_b, z_b), 0
    if name == "auroc":
        c_a, c_b = rankdata(c_a) / 90, rankdata(c_b) / 90
    for _ in range(200):
        swap = rng.random(90) < 0.5
        first = METRIC[name](np.where(swap, c_b, c_a), np.where(swap, z_b, z_a))
        second = METRIC[name](np.where(swap, c_a, c_b), np.where(swap, z_a, z_b))
        far += abs(first - second) >= abs(observed) - 1e-12
    found = compare(METRIC[name], a, b, resamples=200)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])), abs=1e-12)
    assert found.p_value == (1 + far) / 201


def test_a_mean_of_one_half_is_not_taken_for_a_property_of_the_ranks() -> None:
    """Both methods state 0.5 on average, the mean of their ranks too. Halved confidences give half the interval."""
    questions = [f"q{number}" for number in range(40)]
    correct = [0, 1] * 20
    confidence_a = np.array([0.1, 0.9] * 20)
    confidence_b = np.array([0.4, 0.5, 0.5, 0.6] * 10)
    intervals = []
    for factor in (1.0, 0.5):
        a = Answers(questions, factor * confidence_a, correct)
        b = Answers(questions, factor * confidence_b, correct)
        found = compare(mean_confidence, a, b, resamples=200)
        intervals.append((found.low / factor, found.high / factor))
    assert intervals[0] == pytest.approx(intervals[1], abs=1e-12)


def test_the_null_band_of_a_mean_over_runs_is_narrower_and_has_the_mean_of_the_means() -> None:
    runs = [rows(seed) for seed in range(4)]
    single = [null_band(ece, run.confidence, resamples=400) for run in runs]
    together = null_table({"ece": ece}, runs, resamples=400)["ece"]
    assert together.mean == pytest.approx(np.mean([band.mean for band in single]), abs=0.003)
    assert together.high - together.low < 0.7 * np.mean([band.high - band.low for band in single])


def test_equal_methods_have_no_difference_and_p_value_one() -> None:
    runs = [rows(seed) for seed in range(3)]
    found = difference("ece", runs, runs, resamples=100)
    assert (found.difference, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_a_question_shared_by_all_runs_is_swapped_in_all_of_them() -> None:
    """Two questions, three runs, a right and b wrong on both. Swapping one question gives 0, both or none +-1.

    So |difference| >= 1 for half of the swaps: p is near 1/2. Swapped run by run it would be near 2 / 2**6.
    """
    a, b = [Answers("xy", [0.5, 0.5], [1, 1])] * 3, [Answers("xy", [0.5, 0.5], [0, 0])] * 3
    assert difference("accuracy", a, b, resamples=1000).p_value == pytest.approx(0.5, abs=0.05)


def test_the_interval_of_the_mean_holds_the_mean_accuracy_and_has_binomial_width() -> None:
    """100 questions, 3 runs with the same answers: the interval is that of one run, about 2 * 1.96 * 0.05 wide."""
    runs = [Answers([str(i) for i in range(100)], np.full(100, 0.5), np.arange(100) % 2 == 0)] * 3
    found = bootstrap_table({"accuracy": accuracy}, runs, resamples=2000)["accuracy"]
    assert found.value == 0.5
    assert found.high - found.low == pytest.approx(0.196, abs=0.02)


def test_row_i_of_long_runs_without_ids_is_the_same_question() -> None:
    """20,000 rows: more than are numbered in the order of their confidence when there is a single run."""
    runs = [rows(seed, n=20_000) for seed in (0, 1)]
    without_ids = [Answers(None, run.confidence, run.correct) for run in runs]
    with_ids = bootstrap_table({"accuracy": accuracy}, runs, resamples=20)["accuracy"]
    assert bootstrap_table({"accuracy": accuracy}, without_ids, resamples=20)["accuracy"] == with_ids


def test_runs_with_and_without_ids_are_refused() -> None:
    run = rows(0)
    with pytest.raises(ValueError, match="give the ids of all runs or of none"):
        bootstrap_table({"accuracy": accuracy}, [run, Answers(None, run.confidence, run.correct)], resamples=5)


def test_only_a_test_that_may_show_something_is_carried_on() -> None:
    """100 swaps first. A difference of 40 points then gets 2,000; two draws of the same model stay at 100."""
    a, other = rows(0, 300), rows(1, 300)
    worse = Answers(a.question, np.clip(np.asarray(a.confidence) + 0.4, 0, 1), a.correct)
    both = compare_table({"ece": ece, "brier": brier}, [a], [worse], resamples=100, swaps=2000)
    assert both["ece"].p_value == both["brier"].p_value == 1 / 2001
    assert difference("ece", [a], [a], resamples=100, swaps=2000).p_value == 1.0
    unclear = difference("ece", [a], [other], resamples=100, swaps=2000)
    assert unclear.p_value >= 0.05
    assert unclear.p_value * 101 == pytest.approx(round(unclear.p_value * 101))


def with_squared_errors(run: Answers, factor: float = 1.0) -> ScoredAnswers:
    return ScoredAnswers(run, factor * (np.asarray(run.confidence) - np.asarray(run.correct)) ** 2)


def test_the_brier_score_is_the_mean_of_squared_errors() -> None:
    """Ten times the scores give ten times the difference and its interval, by the same swaps."""
    a, b = [rows(0), rows(2)], [rows(1), rows(3)]
    wanted = difference("brier", a, b, resamples=200)
    for factor in (1, 10):
        scored_a, scored_b = ([with_squared_errors(run, factor) for run in runs] for runs in (a, b))
        found = compare_mean_scores(scored_a, scored_b, resamples=200)
        assert found.p_value == wanted.p_value
        assert (found.a, found.b, found.low, found.high) == pytest.approx(
            [factor * value for value in (wanted.a, wanted.b, wanted.low, wanted.high)], abs=1e-12
        )


@pytest.mark.parametrize("scores", [[0.5], [0.5, -0.1], [0.5, np.nan], [0.5, np.inf]])
def test_scores_are_one_number_of_at_least_0_per_answer(scores: list[float]) -> None:
    answers = Answers("xy", [0.5, 0.6], [1, 0])
    bad, good = ScoredAnswers(answers, scores), ScoredAnswers(answers, [0.5, 0.1])
    with pytest.raises(ValueError, match=r"^scores "):
        compare_mean_scores([good], [bad])


def test_an_undefined_auroc_has_no_p_value() -> None:
    a, b = (Answers("xy", [0.5, 0.6], right) for right in ([1, 1], [1, 0]))
    assert np.isnan(difference("auroc", [a], [b], resamples=20).p_value)


def test_what_cannot_be_paired_is_refused() -> None:
    with pytest.raises(ValueError, match="1 questions of a are missing, first 'x'"):
        difference("ece", [Answers("x", [0.5], [1])], [Answers("y", [0.5], [1])])
    named = [Answers(ids, [0.5] * len(ids), [1] * len(ids), source="same.jsonl") for ids in ("x", "xy")]
    with pytest.raises(ValueError, match=r"same\.jsonl: 1 questions of same\.jsonl are missing, first 'y'"):
        difference("ece", [named[0]], [named[1]])
    with pytest.raises(ValueError, match="a has 1 runs and b has 0"):
        difference("ece", [Answers("x", [0.5], [1])], [])


def test_bins_reach_the_resamples() -> None:
    run = rows(2)
    wide, narrow = (bootstrap(partial(ece, bins=bins), run.confidence, run.correct, resamples=20) for bins in (2, 30))
    assert wide.high < narrow.high
