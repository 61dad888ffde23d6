"""Other libraries as oracles where conventions coincide, and one test for each place where they are known to differ."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from catto.metrics import binning, errors, ranking

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # both warn on import about their own dependencies
    import torch
    from netcal.metrics import ACE, ECE, MCE
    from torchmetrics.functional.classification import binary_calibration_error

BINS = [1, 7, 10, 15, 20]


@pytest.fixture(params=["spread", "near one", "tied"])
def rows(request: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Rows away from every bin edge, where all conventions agree."""
    rng = np.random.default_rng(11)
    c = rng.random(2000)
    if request.param == "near one":
        c = 1.0 - 0.3 * c**3
    if request.param == "tied":
        c = np.round(c, 2)
    c = np.clip(c * 0.998 + 0.00137123, 0.0, 0.9999)
    return c, rng.random(2000) < c**1.5


@pytest.mark.parametrize("bins", BINS)
@pytest.mark.parametrize(("norm", "ours"), [("l1", "ece"), ("l2", "rms_calibration_error"), ("max", "mce")])
def test_binned_errors_equal_torchmetrics(rows: Any, bins: int, norm: Any, ours: str) -> None:
    c, z = rows
    theirs = binary_calibration_error(torch.from_numpy(c), torch.from_numpy(z).long(), n_bins=bins, norm=norm)
    assert getattr(errors, ours)(c, z, bins=bins) == pytest.approx(float(theirs), abs=1e-12)


@pytest.mark.parametrize("bins", BINS)
def test_binned_errors_equal_netcal(rows: Any, bins: int) -> None:
    c, z = rows
    assert errors.ece(c, z, bins=bins) == pytest.approx(ECE(bins).measure(c, z.astype(int)), abs=1e-12)
    assert errors.mce(c, z, bins=bins) == pytest.approx(MCE(bins).measure(c, z.astype(int)), abs=1e-12)


@pytest.mark.parametrize("bins", BINS)
def test_mean_gap_over_filled_bins_equals_netcal_ace(rows: Any, bins: int) -> None:
    """ACE weighs filled bins alike; it checks each bin of `reliability`, where ECE checks their weighted sum."""
    c, z = rows
    found = binning.reliability(c, z, bins=bins)
    gaps = np.abs(found.gap[found.count > 0])
    assert gaps.mean() == pytest.approx(ACE(bins).measure(c, z.astype(int)), abs=1e-12)


@pytest.mark.parametrize("bins", BINS)
def test_reliability_equals_scikit_learn_calibration_curve(rows: Any, bins: int) -> None:
    c, z = rows
    found = binning.reliability(c, z, bins=bins)
    accuracy, confidence = calibration_curve(z, c, n_bins=bins, strategy="uniform")
    np.testing.assert_allclose(found.accuracy[found.count > 0], accuracy, atol=1e-12)
    np.testing.assert_allclose(found.confidence[found.count > 0], confidence, atol=1e-12)


def test_scores_equal_scikit_learn(rows: Any) -> None:
    c, z = rows
    assert errors.brier(c, z) == pytest.approx(brier_score_loss(z, c), abs=1e-14)
    assert errors.nll(c, z) == pytest.approx(log_loss(z, c), abs=1e-12)
    assert ranking.auroc(c, z) == pytest.approx(roc_auc_score(z, c), abs=1e-13)


def test_aurc_equals_a_plain_loop_without_ties() -> None:
    rng = np.random.default_rng(0)
    c = rng.permutation(300) / 300
    z = rng.random(300) < c
    wrong = ~z[np.argsort(-c)]
    loop = sum(wrong[: i + 1].mean() for i in range(300)) / 300
    assert ranking.aurc(c, z) == pytest.approx(loop, abs=1e-14)


def test_torchmetrics_gives_confidence_one_a_bin_of_its_own() -> None:
    """(1.0, right) and (0.96, wrong): one bin here, |0.5 - 0.98| = 0.48; two bins there, (0 + 0.96) / 2 = 0.48.

    With (0.96, right) and (1.0, wrong): here |0.5 - 0.98| = 0.48; there (0.04 + 1) / 2 = 0.52.
    """
    c, z = np.array([0.96, 1.0]), np.array([1, 0])
    theirs = binary_calibration_error(torch.from_numpy(c), torch.from_numpy(z), n_bins=20)
    assert errors.ece(c, z) == pytest.approx(0.48, abs=1e-15)
    assert float(theirs) == pytest.approx(0.52, abs=1e-12)


def test_torchmetrics_closes_bins_on_the_left() -> None:
    """0.5 joins 0.46 in (0.4, 0.5] here, gap |0.5 - 0.48| = 0.02; there it opens [0.5, 0.6): (0.54 + 0.5) / 2."""
    c, z = np.array([0.46, 0.5]), np.array([1, 0])
    theirs = binary_calibration_error(torch.from_numpy(c), torch.from_numpy(z), n_bins=10)
    assert errors.ece(c, z, bins=10) == pytest.approx(0.02, abs=1e-15)
    assert float(theirs) == pytest.approx(0.52, abs=1e-12)


def test_netcal_closes_bins_on_the_left_but_keeps_one_in_the_last() -> None:
    """The inner edge differs as in torchmetrics; confidence 1 does not."""
    inner, one = (np.array([0.46, 0.5]), np.array([1, 0])), (np.array([0.96, 1.0]), np.array([1, 0]))
    assert errors.ece(*inner, bins=10) == pytest.approx(0.02, abs=1e-15)
    assert ECE(10).measure(*inner) == pytest.approx(0.52, abs=1e-12)
    assert ECE(20).measure(*one) == pytest.approx(errors.ece(*one), abs=1e-12)


def test_scikit_learn_log_loss_clips_less() -> None:
    """One wrong answer at confidence 1 costs 24 ln 2 here and 52 ln 2 there (float64's own epsilon)."""
    assert errors.nll([1.0, 0.5], [0, 1]) == pytest.approx((24 + 1) * np.log(2) / 2, abs=1e-12)
    assert log_loss([0, 1], [1.0, 0.5]) == pytest.approx((52 + 1) * np.log(2) / 2, abs=1e-9)


def test_equal_mass_bins_equal_scikit_learn_where_the_quantile_is_a_row() -> None:
    """Nine rows in two bins: the edge is the 5th value, here as the value of that order, there as the median."""
    c, z = np.arange(1, 10) / 10, np.array([0, 0, 0, 1, 0, 1, 1, 1, 1])
    found = binning.reliability(c, z, bins=2, strategy="mass")
    accuracy, _ = calibration_curve(z, c, n_bins=2, strategy="quantile")
    np.testing.assert_array_equal(found.count, [5, 4])
    np.testing.assert_allclose(found.accuracy, accuracy)
