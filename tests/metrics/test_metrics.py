"""Hand-worked values, bin edges, ties and refusals of the metrics."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from math import inf, log, nan, sqrt
from typing import Any

import numpy as np
import pytest
from paper_metrics import true_class_ece

from catto.metrics import binning, errors, ranking
from catto.metrics.binning import bin_edges, bin_index
from catto.metrics.calibrators import Temperature
from catto.metrics.catalogue import METRICS

# Four answers in two of 20 bins: 0.62 and 0.64 in (0.60, 0.65], 0.91 and 0.93 in (0.90, 0.95].
FOUR = np.array([0.62, 0.64, 0.91, 0.93]), np.array([1, 0, 1, 1])


def test_ece_of_four_points() -> None:
    """Bins of 2: confidence 0.63 against accuracy 0.5 (gap 0.13), 0.92 against 1 (gap 0.08): (0.13 + 0.08) / 2."""
    assert errors.ece(*FOUR) == pytest.approx(0.105, abs=1e-15)
    assert errors.mce(*FOUR) == pytest.approx(0.13, abs=1e-15)
    assert errors.rms_calibration_error(*FOUR) == pytest.approx(sqrt((0.13**2 + 0.08**2) / 2), abs=1e-15)


def test_scores_of_four_points() -> None:
    """Distances |z - c| are 0.38, 0.64, 0.09, 0.07."""
    assert errors.accuracy(*FOUR) == 0.75
    assert errors.mean_confidence(*FOUR) == pytest.approx(0.775, abs=1e-15)
    assert errors.l1_risk(*FOUR) == pytest.approx(1.18 / 4, abs=1e-15)
    assert errors.brier(*FOUR) == pytest.approx((0.1444 + 0.4096 + 0.0081 + 0.0049) / 4, abs=1e-15)
    assert errors.nll(*FOUR) == pytest.approx(-(log(0.62) + log(0.36) + log(0.91) + log(0.93)) / 4, abs=1e-15)


def test_ranking_of_four_points() -> None:
    """Falling confidence: right, right, wrong, right. Errors among the first i over i: 0, 0, 1/3, 1/4."""
    assert ranking.auroc(*FOUR) == pytest.approx(2 / 3, abs=1e-15)
    assert ranking.aurc(*FOUR) == pytest.approx((1 / 3 + 1 / 4) / 4, abs=1e-15)
    assert ranking.e_aurc(*FOUR) == pytest.approx((1 / 3 + 1 / 4 - 1 / 4) / 4, abs=1e-15)


def test_risk_coverage_curve_of_four_points() -> None:
    curve = ranking.risk_coverage(*FOUR)
    np.testing.assert_array_equal(curve.threshold, [0.93, 0.91, 0.64, 0.62])
    np.testing.assert_array_equal(curve.coverage, [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_array_equal(curve.risk, [0.0, 0.0, 1 / 3, 1 / 4])


def test_reliability_of_four_points() -> None:
    found = binning.reliability(*FOUR, bins=20)
    np.testing.assert_array_equal(np.flatnonzero(found.count), [12, 18])
    np.testing.assert_allclose(found.confidence[[12, 18]], [0.63, 0.92], atol=1e-15)
    np.testing.assert_array_equal(found.accuracy[[12, 18]], [0.5, 1.0])
    assert np.isnan(np.delete(found.accuracy, [12, 18])).all()
    assert np.isnan(np.delete(found.confidence, [12, 18])).all()
    np.testing.assert_array_equal(found.edges, np.arange(21) / 20)


def test_debiased_ece_of_one_bin() -> None:
    """100 rows at 0.55, 50 right: gap 0.05 and deviation 0.05, so E|N| = 0.05 (sqrt(2/pi) e^-0.5 + erf(1/sqrt 2))."""
    folded = 0.05 * (sqrt(2 / np.pi) * np.exp(-0.5) + 0.6826894921370859)
    value = errors.debiased_ece(np.full(100, 0.55), np.arange(100) < 50)
    assert value == pytest.approx(2 * 0.05 - folded, abs=1e-14)


def test_every_edge_lies_in_the_bin_it_closes() -> None:
    for bins in range(1, 101):
        edges = np.arange(bins + 1) / bins
        expected = np.maximum(np.arange(bins + 1) - 1, 0)
        np.testing.assert_array_equal(bin_index(edges, edges), expected, err_msg=f"{bins} bins")


def test_neighbours_of_every_edge_lie_on_their_own_side() -> None:
    for bins in range(1, 101):
        edges = np.arange(bins + 1) / bins
        inner = edges[1:-1]
        np.testing.assert_array_equal(bin_index(np.nextafter(inner, 1), edges), np.arange(1, bins))
        np.testing.assert_array_equal(bin_index(np.nextafter(inner, 0), edges), np.arange(0, bins - 1))


def test_edges_written_as_products_lie_where_the_float_does() -> None:
    """3 * 0.05 is 0.15000000000000002, one step above 3 / 20, and so belongs to the next bin; 0.15 itself does not."""
    edges = bin_edges(np.zeros(1), 20)
    np.testing.assert_array_equal(bin_index(np.array([0.15, 3 * 0.05, 0.55]), edges), [2, 3, 10])


@pytest.mark.parametrize(("confidence", "index"), [(0.0, 0), (-0.0, 0), (5e-324, 0), (1.0, 19)])
def test_confidence_zero_and_one_fall_in_the_end_bins(confidence: float, index: int) -> None:
    assert np.flatnonzero(binning.reliability([confidence], [1]).count) == [index]


def test_all_confident_and_right_is_perfect() -> None:
    """LLM confidences pile up at exactly 1: no bin of their own, no error."""
    ones = np.ones(50)
    values = {name: metric(ones, ones) for name, metric in METRICS.items()}
    assert np.isnan(values.pop("auroc"))
    assert values.pop("accuracy") == values.pop("mean_confidence") == 1.0
    assert values.pop("nll") == pytest.approx(errors.EPSILON, rel=1e-6)
    assert set(values.values()) == {0.0}


def test_confident_and_wrong_costs_a_finite_nll() -> None:
    assert errors.nll([1.0], [0]) == pytest.approx(24 * log(2), abs=1e-12)


def test_equal_mass_never_splits_ties() -> None:
    """Ten rows, six of them at 0.5: with 5 bins the tie fills three of them and becomes one."""
    confidence = np.array([0.1, 0.2, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.8, 0.9])
    found = binning.reliability(confidence, np.ones(10), bins=5, strategy="mass")
    np.testing.assert_array_equal(found.count, [2, 6, 2])
    np.testing.assert_array_equal(found.edges, [0.0, 0.2, 0.5, 1.0])


def test_equal_mass_without_ties_is_even() -> None:
    found = binning.reliability(np.random.default_rng(0).random(200), np.ones(200), bins=20, strategy="mass")
    np.testing.assert_array_equal(found.count, np.full(20, 10))


def test_equal_mass_keeps_a_pile_at_zero_and_at_one() -> None:
    found = binning.reliability([0.0, 0.0, 0.5, 0.5, 1.0, 1.0], [0, 0, 1, 0, 1, 1], bins=3, strategy="mass")
    np.testing.assert_array_equal(found.count, [2, 2, 2])
    assert errors.ece_mass([0.0, 0.0, 0.5, 0.5, 1.0, 1.0], [0, 0, 1, 0, 1, 1], bins=3) == 0.0


def test_tied_ranks_are_the_mean_over_all_orders() -> None:
    """Break the ties in every possible way by hand and average: AURC must equal that mean."""
    confidence, correct = np.array([0.9, 0.7, 0.7, 0.7, 0.2]), np.array([1, 0, 1, 1, 0])
    orders = [np.array([0, *middle, 4]) for middle in permutations((1, 2, 3))]
    errors = np.array([np.cumsum(1 - correct[order]) for order in orders])
    assert ranking.aurc(confidence, correct) == pytest.approx((errors / np.arange(1, 6)).mean(), abs=1e-15)


def test_aurc_of_one_confidence_is_the_error_rate() -> None:
    assert ranking.aurc(np.full(8, 0.3), [1, 0, 0, 1, 1, 1, 1, 1]) == pytest.approx(0.25, abs=1e-15)


def test_the_classwise_error_by_hand() -> None:
    """Gold 1 has rows (0.9, right), (0.6, wrong): 0.1 + 0.6; gold 0 has (0.9, wrong), (0.6, right): 0.9 + 0.4."""
    gold = np.array([1, 0, 0, 1])
    confidence = np.array([0.9, 0.9, 0.6, 0.6])
    predicted = np.array([1, 1, 0, 0])
    assert true_class_ece(confidence, predicted == gold, gold) == pytest.approx(2.0 / 4, abs=1e-15)


BAD: list[tuple[Any, Any, str]] = [
    ([0.5] * 17 + [nan], [1] * 18, r"confidence\[17\] is nan"),
    ([0.2, 1.0000001], [1, 1], r"confidence\[1\] is 1.0000001, expected a number in \[0, 1\]"),
    ([-1e-9], [1], r"confidence\[0\] is -1e-09"),
    ([inf], [1], r"confidence\[0\] is inf"),
    ([0.5, 0.5], [1], "confidence has 2 rows and correct has 1"),
    ([], [], "confidence is empty"),
    ([0.5], [2], r"correct\[0\] is 2, expected 0 or 1"),
    ([0.5, 0.5], [1.0, nan], r"correct\[1\] is nan, expected 0 or 1"),
    (["0.5"], [1], "confidence has dtype <U3, expected numbers"),
    ([True], [1], "confidence has dtype bool"),
    ([0.5], ["yes"], "correct has dtype <U3, expected booleans or 0/1"),
    ([[0.5]], [1], r"confidence has shape \(1, 1\), expected one dimension"),
]


@pytest.mark.parametrize(("confidence", "correct", "message"), BAD)
@pytest.mark.parametrize("name", METRICS)
def test_bad_rows_are_refused_by_every_metric(name: str, confidence: Any, correct: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        METRICS[name](confidence, correct)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: errors.ece(*FOUR, bins=0), "bins is 0"),
    (lambda: errors.ece(*FOUR, bins=2.5), "bins is 2.5"),  # type: ignore[arg-type]
    (lambda: binning.reliability(*FOUR, strategy="depth"), "strategy is 'depth'"),  # type: ignore[arg-type]
    (lambda: errors.ece(*FOUR, weight=[1, 1, -1, 1]), "weight must be finite numbers of at least 0"),
    (lambda: errors.brier(*FOUR, weight=[1, 1, nan, 1]), "weight must be finite numbers of at least 0"),
    (lambda: errors.brier(*FOUR, weight=[1, 1, inf, 1]), "weight must be finite numbers of at least 0"),
    (lambda: errors.accuracy(*FOUR, weight=[0, 0, 0, 0]), "weight is 0 in every row"),
    (lambda: errors.smooth_ece(*FOUR, weight=[[1, 1, 1, 1], [0, 0, 0, 0]]), "weight is 0 in every row"),
    (lambda: ranking.auroc(*FOUR, weight=[1, 1, 1]), r"weight has shape \(3,\), expected \(4,\) or \(R, 4\)"),
    (lambda: errors.nll(*FOUR, weight="abcd"), "weight has shape"),
    (lambda: errors.nll(*FOUR, weight=list("abcd")), "weight has dtype"),
    (lambda: ranking.aurc(*FOUR, weight=[1, 1, 0.5, 0.5]), "weight must be whole numbers"),
    (lambda: binning.reliability(*FOUR, strategy="mass", weight=np.ones((2, 4))), "bins of equal mass need a weight"),
    (lambda: Temperature.fit_labels([[-1.0, -1.0]], [2]), "whole numbers from 0 to 1"),
    (lambda: Temperature.fit_labels([[-1.0, -1.0]], [0, 1]), r"gold has shape \(2,\)"),
    (lambda: Temperature.fit_labels([[0.5, -1.0]], [0]), r"label_logprobs\[0, 0\] is 0.5"),
    (lambda: Temperature.fit_labels([[-inf, -1.0]], [0]), r"label_logprobs\[0, 0\] is -inf"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_options_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kind", [bool, int, float, np.uint8, np.float32])
@pytest.mark.parametrize("name", METRICS)
def test_the_kind_of_correct_does_not_matter(name: str, kind: type) -> None:
    rng = np.random.default_rng(3)
    confidence = rng.random(64)
    correct = rng.random(64) < confidence
    assert METRICS[name](confidence, correct.astype(kind)) == METRICS[name](confidence, correct)


def test_inputs_are_left_as_they_were() -> None:
    confidence, correct = np.array([0.3, 0.1, 0.9]), np.array([0, 1, 1])
    before = confidence.copy(), correct.copy()
    for metric in METRICS.values():
        metric(confidence, correct)
    np.testing.assert_array_equal(confidence, before[0])
    np.testing.assert_array_equal(correct, before[1])


def test_blocks_of_rows_add_up() -> None:
    """A count that is no multiple of the block length gives the sums of a plain pass."""
    rng = np.random.default_rng(0)
    confidence = rng.random(100_003)
    correct = rng.random(100_003) < confidence
    found = binning.reliability(confidence, correct)
    index = np.searchsorted(np.arange(1, 21) / 20, confidence)
    np.testing.assert_array_equal(found.count, np.bincount(index, minlength=20))
    np.testing.assert_array_equal(found.correct_sum, np.bincount(index, correct, minlength=20))
    np.testing.assert_allclose(found.confidence_sum, np.bincount(index, confidence, minlength=20), rtol=1e-12)


def test_the_table_is_in_order_and_complete() -> None:
    order = "accuracy mean_confidence ece debiased_ece smooth_ece ece_mass mce rms brier nll auroc aurc e_aurc l1"
    assert list(METRICS) == order.split()
    assert [name for name, metric in METRICS.items() if metric.calibration] == order.split()[2:8]
    assert all(metric.definition.endswith(".") and metric.title for metric in METRICS.values())
