"""Bootstrap, null band, paired comparison and seed summaries."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from typing import Any

import numpy as np
import pytest
from scipy.stats import bootstrap as scipy_bootstrap
from scipy.stats import chisquare

from catto.metrics.catalogue import METRICS
from catto.metrics.comparisons import compare, compare_table
from catto.metrics.errors import accuracy, brier, ece, mean_confidence
from catto.metrics.ranking import auroc
from catto.metrics.resampling import Answers, draw_question_counts
from catto.metrics.statistics import bootstrap, bootstrap_table, null_band, null_table, summarise_seeds


def data(rows: int = 200, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    c = rng.random(rows)
    return c, rng.random(rows) < c


def test_the_value_is_the_metric_of_all_rows() -> None:
    c, z = data()
    for name, interval in bootstrap_table(METRICS, [Answers(None, c, z)], resamples=20).items():
        assert interval.value == METRICS[name](c, z)
        assert interval.low <= interval.high
        assert interval.undefined == 0


def test_a_table_equals_its_single_bootstraps() -> None:
    """Also with ties, and on questions of several rows: metrics share sums, and none reads those of other rows."""
    c, z = data()
    for confidence, ids in ((c, None), (np.round(c, 1), [f"q{row // 2}" for row in range(len(c))])):
        table = bootstrap_table(METRICS, [Answers(ids, confidence, z)], resamples=30, seed=4)
        for name, metric in METRICS.items():
            assert table[name] == bootstrap(metric, confidence, z, questions=ids, resamples=30, seed=4), name


def test_the_seed_decides_the_interval() -> None:
    c, z = data()
    first = bootstrap(ece, c, z, resamples=50, seed=1)
    assert first == bootstrap(ece, c, z, resamples=50, seed=1)
    assert first != bootstrap(ece, c, z, resamples=50, seed=2)


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_intervals_agree_with_scipy(method: Any) -> None:
    """Two independent sets of 20,000 draws: the ends differ by the noise of a tail quantile, 0.02 of the width."""
    c, z = data(60, seed=7)
    ours = bootstrap(lambda a, _: float(np.mean(a**4)), c, z, resamples=20_000, method=method)
    theirs = scipy_bootstrap((c**4,), np.mean, n_resamples=20_000, method=method, rng=np.random.default_rng(1))
    width = ours.high - ours.low
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.03 * width)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.03 * width)
    assert width == pytest.approx(4 * theirs.standard_error, rel=0.1)


def test_bca_shifts_the_interval_of_a_skewed_mean() -> None:
    c, z = data(60, seed=7)
    skewed = lambda a, _: float(np.mean(a**8))  # noqa: E731
    plain = bootstrap(skewed, c, z, resamples=4000)
    bca = bootstrap(skewed, c, z, resamples=4000, method="bca")
    assert bca.low > plain.low
    assert bca.high > plain.high


def test_grouped_jackknife_is_close_to_the_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    c, z = data(1000, seed=3)
    grouped = bootstrap(brier, c, z, resamples=1000, method="bca")
    monkeypatch.setattr("catto.metrics.statistics.JACKKNIFE_PARTS", 1000)
    full = bootstrap(brier, c, z, resamples=1000, method="bca")
    assert grouped.low == pytest.approx(full.low, abs=0.02 * (full.high - full.low))
    assert grouped.high == pytest.approx(full.high, abs=0.02 * (full.high - full.low))


def test_draws_are_uniform_over_rows_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 7 rows over 50: counts of 4,000 resamples pass a chi-square test, and their variance is multinomial."""
    monkeypatch.setattr("catto.metrics.resampling.BLOCK", 7)
    counts = np.concatenate(list(draw_question_counts(50, 4000, np.random.default_rng(0)))).astype(np.int64)
    assert (counts.sum(axis=1) == 50).all()
    assert chisquare(counts.sum(axis=0)).pvalue > 1e-3
    assert counts.var(axis=0).mean() == pytest.approx(50 * (1 / 50) * (49 / 50), rel=0.02)
    assert np.cov(counts[:, 0], counts[:, 49])[0, 1] == pytest.approx(-1 / 50, abs=0.06)


def test_questions_are_drawn_whole() -> None:
    """Confidences 1/2, 1/4, ... name their row, so a metric can count the rows of each resample."""
    questions = ["b", "a", "b", "c", "a", "b"]
    seen = []

    def rows_of(confidence: Any, correct: Any) -> float:
        seen.append(np.bincount(np.round(-np.log2(confidence)).astype(int), minlength=7)[1:])
        return 0.0

    bootstrap(rows_of, 0.5 ** np.arange(1, 7), np.arange(6) % 2, questions=questions, resamples=50)
    assert len({tuple(counts) for counts in seen[:50]}) > 5
    for counts in seen[:50]:
        assert counts[0] == counts[2] == counts[5]
        assert counts[1] == counts[4]
        assert counts[0] + counts[1] + counts[3] == 3


def test_copies_of_a_question_do_not_narrow_its_interval() -> None:
    """Each row ten times over: drawn by question, the interval stays; drawn by row, it shrinks by sqrt(10)."""
    c, z = data(150)
    once = bootstrap(accuracy, c, z, resamples=2000)
    c10, z10, ids = np.repeat(c, 10), np.repeat(z, 10), np.repeat(np.arange(150), 10).tolist()
    by_question = bootstrap(accuracy, c10, z10, questions=ids, resamples=2000)
    by_row = bootstrap(accuracy, c10, z10, resamples=2000)
    width = once.high - once.low
    assert by_question.high - by_question.low == pytest.approx(width, rel=0.1)
    assert by_row.high - by_row.low == pytest.approx(width / 10**0.5, rel=0.1)


def test_one_row_a_question_equals_no_questions() -> None:
    c, z = data(80)
    ids = [f"q{number}" for number in range(80)]
    assert bootstrap(ece, c, z, questions=ids, resamples=100) == bootstrap(ece, c, z, resamples=100)


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_a_single_row_has_an_interval_of_no_width(method: Any) -> None:
    found = bootstrap(ece, [0.7], [1], resamples=10, method=method)
    assert found.low == found.high == found.value == pytest.approx(0.3, abs=1e-15)


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_all_right_has_a_defined_accuracy_and_no_auroc(method: Any) -> None:
    c = np.linspace(0.5, 1, 20)
    run = Answers(None, c, np.ones(20))
    found = bootstrap_table({"accuracy": accuracy, "auroc": auroc}, [run], resamples=30, method=method)
    assert (found["accuracy"].low, found["accuracy"].high) == (1.0, 1.0)
    assert found["auroc"].undefined == 30
    assert isnan(found["auroc"].value)
    assert isnan(found["auroc"].low)
    assert isnan(found["auroc"].high)


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_undefined_resamples_are_left_out_and_counted(method: Any) -> None:
    """One wrong row in 12: a resample misses it with probability (11/12)^12 = 0.352."""
    c, z = np.arange(12) / 12, np.arange(12) > 0
    found = bootstrap(auroc, c, z, resamples=1000, method=method)
    assert 290 < found.undefined < 415
    assert found.value == 1.0
    assert (found.low, found.high) == (1.0, 1.0)


def test_bca_stays_finite_where_all_draws_lie_above_the_value() -> None:
    """A calibrated-by-hand set with ECE 0: every resample scores more."""
    c = np.repeat([0.25, 0.5, 0.75], 40)
    z = np.concatenate([np.arange(40) < 40 * level for level in (0.25, 0.5, 0.75)])
    found = bootstrap(ece, c, z, resamples=200, method="bca")
    assert found.value == 0.0
    assert 0.0 <= found.low <= found.high < 0.2


def test_null_band_of_accuracy_is_binomial() -> None:
    """50 rows at 0.8: mean 0.8, central 95 % of Binomial(50, 0.8) is 34 to 45 right."""
    band = null_band(accuracy, np.full(50, 0.8), resamples=20_000)
    assert band.mean == pytest.approx(0.8, abs=0.002)
    assert (band.low, band.high) == (34 / 50, 45 / 50)


def test_answers_to_one_question_are_right_together_in_the_null_band() -> None:
    """Four samples that always agree tell as much as one."""
    c, _ = data(60)
    four = Answers([row for row in range(60) for _ in range(4)], np.repeat(c, 4), ())
    one = null_band(ece, c, resamples=200)
    assert null_table({"ece": ece}, [four], resamples=200)["ece"] == one
    apart = null_band(ece, np.repeat(c, 4), resamples=200)
    assert apart.high < one.low
    many = Answers([row for row in range(2000) for _ in range(4)], np.repeat(data(2000)[0], 4), ())
    assert null_table({"accuracy": accuracy}, [many], resamples=50)["accuracy"].high > 0.5


def test_runs_on_the_same_questions_are_right_together_in_the_null_band() -> None:
    """Three runs that agree tell as much as one, in any order of rows; on questions of their own they tell more."""
    c, _ = data(60)
    turned = Answers(list(range(60))[::-1], c[::-1], ())
    runs = [Answers(list(range(60)), c, ()), turned, Answers(list(range(60)), c, ())]
    one = null_band(ece, c, resamples=200)
    same = null_table({"ece": ece}, runs, resamples=200)["ece"]
    assert (same.mean, same.low, same.high) == pytest.approx((one.mean, one.low, one.high), abs=1e-12)
    own = [Answers([f"{run} {row}" for row in range(60)], c, ()) for run in range(3)]
    apart = null_table({"ece": ece}, own, resamples=200)["ece"]
    assert apart.high - apart.low < 0.75 * (one.high - one.low)


def test_null_band_of_certain_rows_is_zero() -> None:
    band = null_band(ece, [0.0, 1.0, 1.0], resamples=20)
    assert (band.mean, band.low, band.high) == (0.0, 0.0, 0.0)
    assert null_band(auroc, [1.0, 1.0], resamples=20).undefined == 20
    assert isnan(null_band(auroc, [1.0, 1.0], resamples=20).mean)


def test_null_band_matches_the_known_noise_of_500_rows() -> None:
    """A calibrated model with spread confidences scores 4.6 to 7 points of ECE at N=500 and 20 bins by chance."""
    assert 0.045 < null_band(ece, np.random.default_rng(0).random(500), resamples=300).mean < 0.07


def test_comparison_is_aligned_by_question() -> None:
    c, z = data(60)
    order = np.random.default_rng(1).permutation(60)
    a = Answers(range(60), c, z)
    shuffled = Answers(order.tolist(), c[order], z[order])
    found = compare(brier, a, shuffled, resamples=100)
    assert found.difference == pytest.approx(0.0, abs=1e-15)
    assert abs(found.low) < 1e-15
    assert abs(found.high) < 1e-15
    assert found.p_value == 1.0


def test_swap_test_p_value_is_exact_for_one_discordant_kind() -> None:
    """Six questions that only a gets right: |difference| is largest when all or none swap, p = 2 / 64."""
    c = np.full(8, 0.5)
    a, b = Answers(range(8), c, np.ones(8)), Answers(range(8), c, np.arange(8) >= 6)
    found = compare(accuracy, a, b, resamples=8000)
    assert found.difference == 0.75
    assert found.p_value == pytest.approx(2 / 64, abs=0.008)
    assert found.low < 0.75 <= found.high <= 1.0


def test_p_value_is_never_zero() -> None:
    c = np.full(200, 0.5)
    a, b = Answers(range(200), c, np.ones(200)), Answers(range(200), c, np.zeros(200))
    assert compare(accuracy, a, b, resamples=99).p_value == 1 / 100


def test_p_value_is_uniform_when_methods_are_exchangeable() -> None:
    """The level holds: of 150 null comparisons 7.5 are expected at p <= 0.05, deviation 2.7; 1 to 17 pass."""
    rng, small = np.random.default_rng(0), 0
    for seed in range(150):
        c = rng.random((2, 60))
        z = rng.random((2, 60)) < c
        a, b = Answers(range(60), c[0], z[0]), Answers(range(60), c[1], z[1])
        small += compare(mean_confidence, a, b, resamples=59, seed=seed).p_value <= 0.05
    assert 1 <= small <= 17


def test_rescaling_one_method_changes_no_comparison_of_order() -> None:
    """Temperature scaling keeps the order, so the AUROC of a method and its difference to another's."""
    rng = np.random.default_rng(0)
    c, z = rng.random((2, 200)), rng.random((2, 200)) < [[0.7], [0.65]]
    a, b = Answers(range(200), c[0], z[0]), Answers(range(200), c[1], z[1])
    scaled = Answers(range(200), 0.5 + c[0] ** 3 / 4, z[0])
    metrics = {"auroc": auroc, "ece": ece, "accuracy": accuracy}
    plain, rescaled = (compare_table(metrics, [one], [b], resamples=200) for one in (a, scaled))
    assert rescaled["auroc"] == plain["auroc"]
    assert rescaled["accuracy"] == plain["accuracy"]
    assert rescaled["ece"] != plain["ece"]


def test_undefined_comparison_says_so() -> None:
    c = np.array([0.2, 0.8])
    found = compare(auroc, Answers("ab", c, [1, 1]), Answers("ab", c, [0, 1]), resamples=20)
    assert isnan(found.difference)
    assert isnan(found.p_value)
    assert found.undefined == 20


REFUSED: list[tuple[Callable[[], object], str]] = [
    (
        lambda: compare(ece, Answers("ab", [0.1, 0.2], [1, 0]), Answers("ac", [0.1, 0.2], [1, 0])),
        "b: 1 questions of a are missing, first 'b'",
    ),
    (
        lambda: compare(ece, Answers("a", [0.1], [1]), Answers("ac", [0.1, 0.2], [1, 0])),
        "a: 1 questions of b are missing, first 'c'",
    ),
    (
        lambda: compare(ece, Answers("aa", [0.1, 0.2], [1, 0]), Answers("aa", [0.1, 0.2], [1, 0])),
        "a: question 'a' is in several rows",
    ),
    (lambda: compare(ece, Answers("ab", [0.1], [1]), Answers("ab", [0.1], [1])), "a: 2 questions and 1 confidences"),
    (lambda: bootstrap(ece, [0.1], [1], questions=["a", "b"]), "questions has 2 rows and confidence has 1"),
    (lambda: bootstrap(ece, [0.1], [1], resamples=0), "resamples is 0"),
    (lambda: bootstrap(ece, [0.1], [1], level=95), "level is 95"),
    (lambda: bootstrap(ece, [0.1], [1], method="t"), "method is 't'"),  # type: ignore[arg-type]
    (lambda: bootstrap(ece, [1.5], [1]), r"confidence\[0\] is 1.5"),
    (lambda: null_band(ece, []), "confidence is empty"),
    (lambda: summarise_seeds([]), "values is empty"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_spread_over_seeds_is_the_sample_deviation() -> None:
    """1, 2, 6: mean 3, squares 4 + 1 + 9 over 2 = 7."""
    found = summarise_seeds([1.0, 2.0, 6.0])
    assert (found.mean, found.n) == (3.0, 3)
    assert found.std == pytest.approx(7**0.5, abs=1e-15)
    assert summarise_seeds([4.0]).std is None
