"""Laws of the metrics on any rows, and the paper's theorems where they hold and where they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from paper_metrics import split_l1_by_bin, split_l1_by_confidence, true_class_ece, weighted_ece

from catto.metrics import errors, ranking
from catto.metrics.binning import reliability
from catto.metrics.catalogue import METRICS

Floats = NDArray[np.float64]

# Edges, ties and ends come up as often as points in general position.
CONFIDENCE = st.one_of(st.sampled_from([0.0, 0.05, 0.15, 0.5, 0.55, 0.95, 1.0]), st.floats(0.0, 1.0))
ROWS = st.lists(st.tuples(CONFIDENCE, st.booleans(), st.integers(0, 3)), min_size=1, max_size=60)
BINS = st.integers(1, 30)
SLACK = 1e-12

laws = settings(max_examples=60, deadline=None)


def columns(rows: list[tuple[float, bool, int]]) -> tuple[Floats, NDArray[np.bool_], NDArray[np.int64]]:
    confidence, correct, label = zip(*rows, strict=True)
    return np.array(confidence), np.array(correct), np.array(label)


@laws
@given(ROWS, BINS)
def test_ece_is_at_most_the_classwise_ece_is_at_most_the_l1_risk(rows: Any, bins: int) -> None:
    c, z, gold = columns(rows)
    middle = true_class_ece(c, z, gold, bins=bins)
    assert errors.ece(c, z, bins=bins) <= middle + SLACK
    assert middle <= errors.l1_risk(c, z) + SLACK


@laws
@given(ROWS)
def test_l1_risk_splits_exactly_over_equal_confidences(rows: Any) -> None:
    c, z, _ = columns(rows)
    split = split_l1_by_confidence(c, z)
    assert split.ece + split.noise == pytest.approx(errors.l1_risk(c, z), abs=SLACK)
    assert split.noise >= 0.0


@laws
@given(ROWS, BINS)
def test_l1_risk_splits_exactly_over_bins(rows: Any, bins: int) -> None:
    c, z, _ = columns(rows)
    split = split_l1_by_bin(c, z, bins=bins)
    assert split.ece == pytest.approx(errors.ece(c, z, bins=bins), abs=SLACK)
    assert split.ece + split.noise == pytest.approx(errors.l1_risk(c, z), abs=SLACK)
    assert split.noise >= -SLACK


def test_the_group_formula_is_not_exact_on_bins() -> None:
    """Rows (0.2, wrong), (0.8, right) in one bin: L1 is 0.2, ECE 0, and 2 min(z(1-c), c(1-z)) of the means is 0.5."""
    c, z = np.array([0.2, 0.8]), np.array([0, 1])
    assert errors.l1_risk(c, z) == pytest.approx(0.2, abs=SLACK)
    assert split_l1_by_bin(c, z, bins=1).noise == pytest.approx(0.2, abs=SLACK)
    assert 2 * min(0.5 * 0.5, 0.5 * 0.5) == 0.5


@laws
@given(ROWS, BINS, st.data())
def test_weighted_ece_is_at_most_the_largest_weight_times_ece(rows: Any, bins: int, data: st.DataObject) -> None:
    c, z, _ = columns(rows)
    w = np.array(data.draw(st.lists(st.floats(0, 10), min_size=len(c), max_size=len(c))))
    value = weighted_ece(c, z, w, bins=bins)
    assert 0.0 <= value <= w.max() * errors.ece(c, z, bins=bins) + SLACK
    assert weighted_ece(c, z, np.ones(len(c)), bins=bins) == pytest.approx(errors.ece(c, z, bins=bins), abs=SLACK)


@laws
@given(ROWS, BINS)
def test_calibration_errors_are_ordered(rows: Any, bins: int) -> None:
    """|mean confidence - accuracy| <= ECE <= RMS <= MCE (Jensen, then the mean is at most the maximum)."""
    c, z, _ = columns(rows)
    ece = errors.ece(c, z, bins=bins)
    rms = errors.rms_calibration_error(c, z, bins=bins)
    assert abs(c.mean() - z.mean()) <= ece + SLACK
    assert ece <= rms + SLACK
    assert rms <= errors.mce(c, z, bins=bins) + SLACK
    assert 0.0 <= errors.debiased_ece(c, z, bins=bins) <= ece + SLACK


@laws
@given(ROWS, BINS, st.sampled_from(["width", "mass"]))
def test_brier_parts_add_up_exactly(rows: Any, bins: int, strategy: Any) -> None:
    c, z, _ = columns(rows)
    split = errors.brier_split(c, z, bins=bins, strategy=strategy)
    assert split.total == pytest.approx(errors.brier(c, z), abs=1e-14)


@laws
@given(ROWS, st.randoms(use_true_random=False))
def test_metrics_do_not_depend_on_the_order_of_rows(rows: Any, random: Any) -> None:
    c, z, _ = columns(rows)
    order = np.array(random.sample(range(len(c)), len(c)))
    for name, metric in METRICS.items():
        assert metric(c[order], z[order]) == pytest.approx(metric(c, z), abs=1e-9, nan_ok=True), name


@laws
@given(ROWS, st.integers(2, 3))
def test_repeating_the_data_changes_no_plug_in_metric(rows: Any, times: int) -> None:
    """Debiasing, and the finite sums of AURC, do depend on N; every other metric reads the distribution only."""
    c, z, _ = columns(rows)
    for name in set(METRICS) - {"debiased_ece", "aurc", "e_aurc"}:
        repeated = METRICS[name](np.tile(c, times), np.tile(z, times))
        assert repeated == pytest.approx(METRICS[name](c, z), abs=1e-8, nan_ok=True), name


@laws
@given(st.lists(st.tuples(CONFIDENCE, st.booleans(), st.integers(0, 3)), min_size=1, max_size=25))
def test_a_weight_is_a_number_of_copies(rows: Any) -> None:
    """A row of weight 3 is three such rows; one of weight 0 is none. Every metric, with one weight and with several."""
    c, z, times = columns(rows)
    if not times.sum():
        return
    for name, metric in METRICS.items():
        wanted = metric(np.repeat(c, times), np.repeat(z, times))
        slack = 2e-9 if name == "smooth_ece" else SLACK
        assert metric(c, z, weight=times) == pytest.approx(wanted, abs=slack, nan_ok=True), name
        several = metric(c, z, weight=np.stack([times, times + 1]))
        assert several.shape == (2,)
        assert several[0] == pytest.approx(wanted, abs=slack, nan_ok=True), name
        once_more = metric(np.repeat(c, times + 1), np.repeat(z, times + 1))
        assert several[1] == pytest.approx(once_more, abs=slack, nan_ok=True), name


@laws
@given(ROWS, st.floats(0.1, 10.0))
def test_the_unit_of_weights_does_not_matter(rows: Any, unit: float) -> None:
    """AURC needs whole weights, and debiasing counts them; every other metric reads the shares only."""
    c, z, times = columns(rows)
    weight = unit * (1 + times)
    for name in set(METRICS) - {"debiased_ece", "aurc", "e_aurc", "ece_mass"}:
        slack = 2e-9 if name == "smooth_ece" else 1e-11
        wanted = METRICS[name](c, z, weight=1 + times)
        assert METRICS[name](c, z, weight=weight) == pytest.approx(wanted, abs=slack, nan_ok=True), name


@laws
@given(ROWS, BINS)
def test_weighted_bins_are_those_of_copies(rows: Any, bins: int) -> None:
    """Bins of equal mass too: their edges are the same, whatever ties the copies make."""
    c, z, times = columns(rows)
    times = 1 + times
    for strategy in ("width", "mass"):
        weighted = reliability(c, z, bins, strategy, weight=times)
        copied = reliability(np.repeat(c, times), np.repeat(z, times), bins, strategy)
        np.testing.assert_array_equal(weighted.edges, copied.edges)
        np.testing.assert_array_equal(weighted.count, copied.count)
        np.testing.assert_array_equal(weighted.correct_sum, copied.correct_sum)
        np.testing.assert_allclose(weighted.confidence_sum, copied.confidence_sum, atol=SLACK)


@laws
@given(ROWS)
def test_metrics_lie_in_their_range(rows: Any) -> None:
    c, z, _ = columns(rows)
    for name in set(METRICS) - {"nll"}:
        value = METRICS[name](c, z)
        assert np.isnan(value) if name == "auroc" and z.min() == z.max() else -SLACK <= value <= 1 + SLACK, name
    assert 0.0 <= errors.nll(c, z) <= 16.64


@laws
@given(ROWS)
def test_auroc_counts_pairs(rows: Any) -> None:
    c, z, _ = columns(rows)
    if z.min() == z.max():
        return
    above = c[z][:, None] - c[~z][None, :]
    assert ranking.auroc(c, z) == pytest.approx(np.mean((above > 0) + 0.5 * (above == 0)), abs=SLACK)


@laws
@given(ROWS)
@example([(0.5, True, 0), (0.5, False, 0)])
def test_excess_aurc_is_zero_exactly_at_a_perfect_order(rows: Any) -> None:
    c, z, _ = columns(rows)
    perfect = z.min() == z.max() or c[z].min() > c[~z].max()
    assert (ranking.e_aurc(c, z) < 1e-13) == perfect


def smooth_ece_reference(c: Floats, z: Floats, nodes: int = 1001) -> float:
    """SmoothECE from its definition: a dense kernel matrix, seven images of each point, bisection."""
    t = np.linspace(0.0, 1.0, nodes)

    def smoothed(sigma: float) -> float:
        images = [2 * k + sign * c for k in range(-3, 4) for sign in (1, -1)]
        kernel = sum(np.exp(-0.5 * ((t[:, None] - image) / sigma) ** 2) for image in images)
        density = np.abs(kernel @ (z - c)) / (len(c) * sigma * np.sqrt(2 * np.pi))
        return float(np.trapezoid(density, t))

    low, high = 1e-9, 1.0
    for _ in range(22):
        middle = (low + high) / 2
        low, high = (middle, high) if smoothed(middle) > middle else (low, middle)
    return low


@pytest.mark.parametrize(("n", "power"), [(1, 1.0), (40, 1.0), (80, 3.0), (80, 0.2)])
def test_smooth_ece_equals_its_dense_definition(n: int, power: float) -> None:
    rng = np.random.default_rng(n)
    c = np.concatenate((rng.random(n), [0.0, 1.0]))
    z = (rng.random(n + 2) < c**power).astype(float)
    z[-2:] = 1.0, 0.0  # wrong at both ends, where the kernel is reflected
    assert errors.smooth_ece(c, z) == pytest.approx(smooth_ece_reference(c, z), abs=3e-6)


@pytest.mark.parametrize(("offset", "coarse"), [(0.004, False), (0.02, True)])
def test_smooth_ece_of_a_small_error_equals_its_dense_definition(offset: float, coarse: bool) -> None:
    """Bandwidths just within the coarse grid's reach and below it: half of each confidence right, off by the offset."""
    c = 0.5009 + np.array([-offset, -offset, offset, offset])
    z = np.array([0.0, 1.0, 0.0, 1.0])
    value = errors.smooth_ece(c, z)
    assert (value >= 8 / 512) == coarse
    assert value == pytest.approx(smooth_ece_reference(c, z, 10001), abs=3e-6)


def test_smooth_ece_is_close_to_the_authors_package() -> None:
    """relplot 1.0.3 finds its bandwidth in ten bisections, hence 1e-3; the number is its smECE."""
    i = np.arange(400)
    c, z = (i + 0.5) / 400, ((i * 7) % 10 < 10 * ((i + 0.5) / 400) ** 2).astype(float)
    assert errors.smooth_ece(c, z) == pytest.approx(0.11366910, abs=1e-3)


def test_smooth_ece_of_a_constant_shift_is_the_fixed_point_of_its_mass() -> None:
    """All at 0.7, half of them right: the residual has one sign, so smoothing keeps its mass 0.2 at any bandwidth."""
    assert errors.smooth_ece(np.full(10, 0.7), np.arange(10) < 5) == pytest.approx(0.2, abs=1e-7)


@settings(max_examples=50, deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_expected_brier_is_least_at_the_true_probability(truth: float, other: float) -> None:
    """E(c - Z)^2 = (c - p)^2 + p (1 - p), from the metric itself on the two outcomes."""

    def expected(c: float) -> float:
        return truth * errors.brier([c], [1]) + (1 - truth) * errors.brier([c], [0])

    assert expected(other) - expected(truth) == pytest.approx((other - truth) ** 2, abs=1e-14)


@pytest.mark.parametrize("magnitude", [0.5, 5.0, 500.0])
def test_the_median_withstands_contamination_and_the_mean_does_not(magnitude: float) -> None:
    """Clean z + U(-0.1, 0.1) with 30 % of mass at z + M: the minimisers of E|c - S| and E(c - S)^2, found on a grid.

    Mean: z + 0.3 M. Median: 0.7 F0(d) = 1/2, so F0(d) = 5/7 and d = 0.2 * 5/7 - 0.1 = 3/70, whatever M is.
    """
    z, clean = 0.4, np.linspace(-0.1, 0.1, 7001)
    sample = np.concatenate((z + clean, np.full(3000, z + magnitude)))
    share = len(clean) / len(sample)
    c = np.linspace(z - 0.2, z + 0.2, 4001)
    l1 = np.array([np.abs(sample - value).mean() for value in c])
    assert c[l1.argmin()] - z == pytest.approx(3 / 70, abs=2e-4)
    # The quadratic's minimiser in closed form is the mean; the slope of the loss there is 0.
    assert sample.mean() - z == pytest.approx((1 - share) * magnitude, rel=1e-9)
    assert abs(np.mean(2 * (sample.mean() - sample))) < 1e-9 * magnitude


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(0, 1))
def test_the_papers_own_loss_is_affine_in_the_surrogate(surrogates: list[float], c: float) -> None:
    """l(c, s) = s (1 - c) + (1 - s) c: E[l(c, S)] = l(c, E[S]), so outliers move it as they move the mean.

    Its minimum in c lies at an end: 0 where the mean is below 1/2, else 1. The median theorem does not cover it.
    """
    s = np.array(surrogates)

    def loss(confidence: float, target: Any) -> Any:
        return target * (1 - confidence) + (1 - target) * confidence

    assert np.mean(loss(c, s)) == pytest.approx(loss(c, s.mean()), abs=1e-13)
    best = min(loss(0.0, s.mean()), loss(1.0, s.mean()))
    assert np.mean(loss(c, s)) >= best - 1e-13


def test_contamination_flips_the_minimum_of_the_papers_loss_while_the_median_stays() -> None:
    """S = 0.3 with weight 0.7, 1 with weight 0.3: the median is 0.3, the mean 0.51, and the loss now asks for c = 1."""
    s = np.repeat([0.3, 1.0], [7, 3])
    slope = np.mean(1 - 2 * s)
    assert np.median(s) == 0.3
    assert slope < 0 < np.mean(1 - 2 * s[:7])


def test_classwise_dominance_as_stated_is_false() -> None:
    """Without conditioning the outer mean on Y=k, classwise ECE can exceed the L1 risk fifty times over.

    Class a: 99 rows (c=1, right), 1 row (c=0, right). Class b: 99 rows (c=0, wrong), 1 row (c=1, wrong). L1 = 2/200.
    As stated: each class is off by 1 at one confidence, which half of *all* rows have: 2 * (1/2) * (1/2) = 0.5.
    """
    c = np.repeat([1.0, 0.0, 0.0, 1.0], [99, 1, 99, 1])
    z = np.repeat([1.0, 1.0, 0.0, 0.0], [99, 1, 99, 1])
    gold = np.repeat(["a", "b"], 100)
    stated = sum(
        np.mean(gold == k) * np.mean(c == value) * abs(z[(gold == k) & (c == value)].mean() - value)
        for k in ("a", "b")
        for value in (0.0, 1.0)
    )
    assert errors.l1_risk(c, z) == pytest.approx(0.01, abs=1e-15)
    assert stated == pytest.approx(0.5, abs=1e-15)
    assert true_class_ece(c, z, gold) <= errors.l1_risk(c, z) + SLACK


def test_classwise_order_needs_shared_edges() -> None:
    """One bin for the whole, finer ones for the classes keep the order; one bin for the classes alone can break it."""
    c, z, gold = np.array([0.2, 0.8]), np.array([1, 0]), np.array([0, 0])
    assert errors.ece(c, z, bins=2) == pytest.approx(0.8, abs=SLACK)
    assert true_class_ece(c, z, gold, bins=1) == pytest.approx(0.0, abs=SLACK)
