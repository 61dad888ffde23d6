"""Calibration errors and proper scores of (confidence, correct) rows.

Every function takes the columns `confidence`, (N,) in [0, 1], and `correct`, (N,) of booleans or 0/1, and raises a
ValueError that names the first bad row. `weight` says how often each row counts: (N,) gives a float, (R, N) gives an
array of R values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, erf, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from catto.metrics.binning import (
    Bools,
    Floats,
    Ints,
    Reliability,
    Score,
    Strategy,
    bin_edges,
    bin_index,
    check_columns,
    check_weight,
    confidence_sums,
    group_rows,
    mean_score,
    reliability,
    run_starts,
    to_score,
    total_weight,
)
from catto.metrics.sharing import reuse_last_result

# Confidences come from float32 softmaxes, where 1.0 means anything above 1 - 2^-25: one wrong answer at confidence 1
# then costs 16.6 nats, not infinity.
EPSILON = 2.0**-24


# ---- means over rows


def accuracy(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the share of right rows.

    Args:
        confidence: (N,) in [0, 1]. It is validated but not used.
        correct: (N,) booleans or 0/1.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> accuracy([0.9, 0.7], [True, False])
    0.5
    """
    _, z = check_columns(confidence, correct)
    return mean_score(z, weight)


def mean_confidence(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the mean confidence; a value above the accuracy means overconfidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1. It is validated but not used.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> mean_confidence([0.25, 0.75], [True, False])
    0.5
    """
    c, _ = check_columns(confidence, correct)
    return mean_score(c, weight)


def confidence_gap(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return mean confidence minus accuracy; a value above 0 means overconfidence.

    It is a mean over rows, so its bootstrap interval has nominal coverage even for a calibrated model, unlike the
    interval of ECE.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [-1, 1]; (R,) for a weight of shape (R, N).

    >>> round(confidence_gap([0.9, 0.7, 0.8], [True, False, True]), 4)
    0.1333
    """
    c, z = check_columns(confidence, correct)
    return mean_score(_residuals(c, z), weight)


@reuse_last_result
def _residuals(confidence: Floats, correct: Bools) -> Floats:
    return confidence - correct


def brier(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the Brier score `mean (c - z)^2`.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(brier([0.9, 0.7], [True, False]), 4)
    0.25
    """
    c, z = check_columns(confidence, correct)
    return mean_score(_squared_residuals(c, z), weight)


@reuse_last_result
def _squared_residuals(confidence: Floats, correct: Bools) -> Floats:
    distance = confidence - correct
    distance *= distance
    return distance


def nll(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return `-mean(z log c + (1 - z) log(1 - c))`, with c clipped to [EPSILON, 1 - EPSILON].

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 16.64]; (R,) for a weight of shape (R, N).

    >>> round(nll([0.5, 0.5], [True, False]), 4)
    0.6931
    """
    c, z = check_columns(confidence, correct)
    return mean_score(_negative_log_likelihood(c, z), weight)


@reuse_last_result
def _negative_log_likelihood(confidence: Floats, correct: Bools) -> Floats:
    likelihood = np.where(correct, confidence, 1.0 - confidence)
    clipped = np.clip(likelihood, EPSILON, 1.0 - EPSILON)
    return np.asarray(-np.log(clipped))


def l1_risk(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the population L1 calibration risk `mean |z - c|` (paper Eq. 1).

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(l1_risk([0.9, 0.7], [True, False]), 4)
    0.4
    """
    c, z = check_columns(confidence, correct)
    return mean_score(np.abs(z - c), weight)


# ---- errors over bins


def ece(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 20,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the expected calibration error `sum_m (n_m / N) |acc_m - conf_m|` over bins of equal width.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(ece([0.9, 0.8, 0.3], [True, False, False], bins=2), 4)
    0.3333
    """
    sums = reliability(confidence, correct, bins, "width", weight)
    return to_score(_mean_gap(sums))


def ece_mass(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 20,
    weight: ArrayLike | None = None,
) -> Score:
    """Return ECE over bins with equally many rows; equal confidences share a bin.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M; there are fewer if equal confidences would be split.
        weight: (N,) or (R, N), how often each row counts. The edges depend on it.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(ece_mass([0.1, 0.2, 0.8, 0.9], [False, False, True, True], bins=2), 4)
    0.15
    """
    if weight is None or np.ndim(weight) == 1:
        return to_score(_mean_gap(reliability(confidence, correct, bins, "mass", weight)))
    # The edges depend on the weight, so each weighting has its own bins.
    c, z = check_columns(confidence, correct)
    return np.array([ece_mass(c, z, bins=bins, weight=one_weight) for one_weight in check_weight(weight, len(c))])


def _mean_gap(sums: Reliability) -> Floats:
    gaps = np.abs(sums.correct_sum - sums.confidence_sum)
    return np.asarray(gaps.sum(axis=-1) / sums.count.sum(axis=-1))


def mce(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 20,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the maximum calibration error `max_m |acc_m - conf_m|` over non-empty bins of equal width.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(mce([0.9, 0.8, 0.3], [True, False, False], bins=2), 4)
    0.35
    """
    sums = reliability(confidence, correct, bins, "width", weight)
    largest_gap = np.abs(sums.gap).max(axis=-1)  # the gap of an empty bin is 0
    return to_score(largest_gap)


def rms_calibration_error(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 20,
    weight: ArrayLike | None = None,
) -> Score:
    """Return `sqrt(sum_m (n_m / N) (acc_m - conf_m)^2)` over bins of equal width.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(rms_calibration_error([0.9, 0.8, 0.3], [True, False, False], bins=2), 4)
    0.3342
    """
    sums = reliability(confidence, correct, bins, "width", weight)
    mean_square = (sums.share * sums.gap**2).sum(axis=-1)
    return to_score(np.sqrt(mean_square))


def debiased_ece(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 20,
    weight: ArrayLike | None = None,
) -> Score:
    """Return ECE minus its estimated bias (Kumar, Liang and Ma, 2019), at least 0.

    A bin's accuracy is close to normal with variance `s^2 = acc (1 - acc) / n`, so |gap| exceeds the true gap
    on average. The excess is estimated as `E|N(gap, s^2)| - |gap|`, in closed form, and subtracted:
        sum_m (n_m / N) (2 |gap_m| - E|N(gap_m, s_m^2)|).
    This published correction applies to the L1 error itself (those of Brocker and Ferro-Fricker apply to its square),
    so the result is comparable with ECE. It removes up to 40 % of the bias of a calibrated model, never all of it. A
    bin whose rows are all right or all wrong has s = 0 and is not corrected.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M, of equal width.
        weight: (N,) or (R, N), how often each row counts; n_m is the weight in the bin.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(debiased_ece([0.7] * 4, [True, True, False, False]), 4)
    0.1399
    """
    sums = reliability(confidence, correct, bins, "width", weight)
    gap = np.abs(sums.gap)
    # s = sqrt(n acc (1 - acc)) / n, computed from sums because the accuracy of an empty bin is nan. An empty bin gets a
    # count of 1, which makes its s 0.
    count = np.where(sums.count > 0, sums.count, 1.0)
    variance_of_right_count = sums.correct_sum * (count - sums.correct_sum) / count
    deviation = np.sqrt(variance_of_right_count) / count
    # E|X| for X ~ N(gap, deviation^2). If the deviation is 0, the ratio is infinite and the mean is the gap.
    infinite = np.full_like(gap, np.inf)
    ratio = np.divide(gap, deviation, out=infinite, where=deviation > 0)
    spread_part = deviation * np.sqrt(2.0 / np.pi) * np.exp(-0.5 * ratio**2)
    gap_part = gap * _erf(ratio / 2.0**0.5)
    mean_absolute_gap = spread_part + gap_part
    corrected = sums.share * (2.0 * gap - mean_absolute_gap)
    return to_score(np.maximum(0.0, corrected.sum(axis=-1)))


_erf = np.vectorize(erf, otypes=[np.float64])  # scipy.special takes 0.3 s to import


def check_gold(gold: ArrayLike, shape: tuple[int, ...]) -> Ints:
    """Return the gold labels as class indices.

    Args:
        gold: (N,) whole numbers in [0, K), N >= 1.
        shape: (N, K), the shape of the scores that the indices point into.

    Raises:
        ValueError: `gold` does not have shape (N,), or its values are not whole numbers in [0, K).

    >>> check_gold([1, 0], (2, 3)).tolist()
    [1, 0]
    """
    index = np.asarray(gold)
    if index.shape != shape[:1]:
        raise ValueError(f"gold has shape {index.shape}, expected ({shape[0]},)")
    classes = shape[1]
    has_whole_numbers = index.dtype.kind in "iu" and len(index) > 0
    in_range = has_whole_numbers and index.min() >= 0 and index.max() < classes
    if not in_range:
        raise ValueError(f"gold must be whole numbers from 0 to {classes - 1}, one per row")
    return index.astype(np.intp)


# ---- parts of the Brier score


@dataclass(frozen=True)
class BrierSplit:
    """Parts of the Brier score; for any bins, `total` is exactly the score.

    Attributes:
        reliability: Mean of (acc_m - conf_m)^2.
        resolution: Mean of (acc_m - acc)^2.
        uncertainty: acc (1 - acc).
        within_bin_variance: Variance of the confidence within bins.
        within_bin_covariance: Covariance of confidence and correctness within bins; it is subtracted twice.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within_bin_variance: float
    within_bin_covariance: float

    @property
    def total(self) -> float:
        """The Brier score."""
        within = self.within_bin_variance - 2.0 * self.within_bin_covariance
        return self.reliability - self.resolution + self.uncertainty + within


def brier_split(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 20,
    strategy: Strategy = "width",
) -> BrierSplit:
    """Split the Brier score into reliability, resolution, uncertainty and two terms for the spread within bins.

    The last two terms are 0 if the rows of each bin have the same confidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        strategy: Bins of equal `width` or of equal `mass`.

    Returns:
        The parts; see `BrierSplit` for their definitions and their signs.

    >>> parts = brier_split([0.9, 0.9, 0.2, 0.2], [True, False, False, False])
    >>> round(parts.reliability, 4), round(parts.resolution, 4), round(parts.uncertainty, 4)
    (0.1, 0.0625, 0.1875)
    """
    c, z = check_columns(confidence, correct)
    sums = reliability(c, z, bins, strategy)
    bin_of_row = bin_index(c, bin_edges(c, bins, strategy))
    base_rate = float(z.mean())
    # acc_m - acc, computed from sums so that it is 0 for an empty bin, whose accuracy is nan.
    accuracy_offset = (sums.correct_sum - base_rate * sums.count) / np.maximum(sums.count, 1)
    confidence_offset = c - sums.confidence[bin_of_row]
    correct_offset = z - sums.accuracy[bin_of_row]
    return BrierSplit(
        reliability=float(sums.share @ sums.gap**2),
        resolution=float(sums.share @ accuracy_offset**2),
        uncertainty=base_rate * (1.0 - base_rate),
        within_bin_variance=float(np.mean(confidence_offset**2)),
        within_bin_covariance=float(np.mean(confidence_offset * correct_offset)),
    )


# ---- smooth calibration error

# Number of cells in the grid on [0, 1]. A grid is fine enough if the bandwidth is at least FINE_ENOUGH cells wide;
# otherwise a finer grid is used, up to MOST_CELLS.
FEWEST_CELLS = 1 << 9
MOST_CELLS = 1 << 16
FINE_ENOUGH = 8
TOLERANCE = 1e-9


def smooth_ece(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return smECE (Blasiok and Nakkiran, 2023): calibration error without bins.

    The residuals z_i - c_i are smoothed by a Gaussian kernel K of bandwidth sigma, reflected at 0 and 1:
        smECE_sigma = integral over t in [0, 1] of | mean_i K_sigma(t, c_i) (z_i - c_i) |.
    This error decreases with sigma, so `smECE_sigma = sigma` has one solution. The solution is the smECE.

    For speed, residuals are spread linearly onto the nodes of a grid and smoothed in the cosine basis. In this basis,
    the reflected kernel only multiplies each frequency by a factor. With G cells, this takes O(N + G log G).

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,) or (R, N), how often each row counts.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(smooth_ece([0.7] * 4, [True, True, False, False]), 4)
    0.2
    """
    groups = group_rows(confidence, correct, weight)
    # One row for each weighting.
    residuals = np.atleast_2d(groups.right - confidence_sums(groups.count, groups.value))
    totals = np.atleast_1d(total_weight(groups.count))
    bandwidths = np.zeros(len(totals))
    for row, (residual, total) in enumerate(zip(residuals, totals, strict=True)):
        bandwidths[row] = _find_bandwidth(residual, groups.value, total)
    return to_score(bandwidths.reshape(groups.count.shape[:-1]))


def _find_bandwidth(residual: Floats, value: Floats, total: float) -> float:
    """Return the smECE of one weighting, on a grid that is fine enough for it.

    Args:
        residual: (G,) number of right rows minus the sum of confidences, for each group.
        value: (G,) confidence of each group, in increasing order.
        total: Number of rows, or their total weight.
    """
    if not residual.any():
        return 0.0
    cells = FEWEST_CELLS
    while True:
        mass = _spread_mass(residual, value, cells) / total
        sigma = _solve_bandwidth(mass, cells)
        is_fine_enough = sigma * cells >= FINE_ENOUGH
        if is_fine_enough or cells == MOST_CELLS:
            return sigma
        # The next power of two at which this bandwidth is FINE_ENOUGH cells wide.
        cells_needed = 2 ** ceil(log2(FINE_ENOUGH / max(sigma, TOLERANCE)))
        cells = min(MOST_CELLS, max(2 * cells, cells_needed))


class _Cells(NamedTuple):
    """The positions of G groups of equal confidence on a grid.

    Attributes:
        starts: Index of the first group in each non-empty cell.
        filled: Indices of the non-empty cells.
        offset: (G,) distance of each group from the lower node of its cell, in cell widths.
    """

    starts: Ints
    filled: Ints
    offset: Floats


@reuse_last_result
def _assign_cells(value: Floats, cells: int) -> _Cells:
    position = value * cells
    cell = np.minimum(position.astype(np.intp), cells - 1)  # confidence 1 belongs to the last cell
    starts = run_starts(cell)
    return _Cells(starts, filled=cell[starts], offset=position - cell)


def _spread_mass(
    residual: Floats,
    value: Floats,
    cells: int,
) -> Floats:
    """Spread each residual linearly onto the two nodes of its cell. (G,), (G,) -> (cells + 1,)."""
    starts, filled, offset = _assign_cells(value, cells)
    upper_shares = np.add.reduceat(residual * offset, starts)
    mass = np.zeros(cells + 1)
    mass[filled] = np.add.reduceat(residual, starts) - upper_shares
    mass[filled + 1] += upper_shares
    return mass


@lru_cache(maxsize=8)
def _damping_factors(cells: int) -> tuple[Floats, Floats]:
    """Return how two kinds of smoothing damp each frequency of the cosine basis.

    Returns:
        The factor of spreading mass onto two nodes, and the log of the factor of a Gaussian kernel of bandwidth 1.
    """
    frequency = np.arange(cells + 1.0)
    spread = np.sinc(frequency / (2 * cells)) ** 2
    decay = -0.5 * (np.pi * frequency) ** 2
    return spread, decay


def _solve_bandwidth(mass: Floats, cells: int) -> float:
    """Return the sigma at which the smoothed error is sigma itself.

    Args:
        mass: (cells + 1,) residuals per row, on the nodes of the grid; see `_spread_mass`.
        cells: Number of cells in the grid.
    """
    from scipy.optimize import brentq

    spreading_factors, log_kernel_factors = _damping_factors(cells)
    total_mass = abs(float(mass.sum()))
    # Reflection unfolds [0, 1] into a circle of length 2. An end node is its own mirror image: its mass counts twice.
    on_circle = mass.copy()
    on_circle[[0, -1]] *= 2.0
    unfolded = np.concatenate((on_circle, on_circle[-2:0:-1]))
    # Spreading mass onto two nodes has smoothed it. Dividing by the damping factor undoes this.
    spectrum = np.fft.rfft(unfolded).real / spreading_factors

    def excess_at(sigma: float) -> float:
        # Higher frequencies are left out: their factor is below exp(-8.6^2 / 2) < 1e-16. TOLERANCE is a lower limit
        # because brentq may try a sigma of 0 or just below.
        highest_kept = int(8.6 / (np.pi * max(abs(sigma), TOLERANCE)))
        kept = min(cells, highest_kept) + 1
        smoothed = np.zeros(cells + 1)
        smoothed[:kept] = spectrum[:kept] * np.exp(sigma**2 * log_kernel_factors[:kept])
        density = np.abs(np.fft.irfft(smoothed)[: cells + 1])
        # The trapezoidal rule: the end nodes count half.
        integral = float(density.sum() - 0.5 * (density[0] + density[-1]))
        return integral - sigma

    # Smoothing cannot reduce the integral of |density| below |total mass|, so the solution lies between that and 1.
    sigma = float(brentq(excess_at, total_mass - TOLERANCE, 1.0 + TOLERANCE, xtol=TOLERANCE))
    return min(1.0, sigma)
