"""Calibration errors and proper scores of (confidence, correct) rows.

Every function takes the columns `confidence`, (N,) in [0, 1], and `correct`, (N,) of booleans or 0/1, and raises a
ValueError that names the first bad row. In equations, c is the confidence of a row, and z is 1 if the row is right and
0 if it is wrong. `weight` says how often each row counts: (N,) gives a float, (R, N) gives an array of R values.
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
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

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
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

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

    Unlike that of ECE, its bootstrap interval has nominal coverage even for a calibrated model, because it is a mean
    over rows.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [-1, 1]; an array of R such numbers for R weightings.

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

    c is the confidence of a row, and z is 1 if the row is right and 0 if it is wrong.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

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
    """Return the negative log-likelihood `-mean(z log c + (1 - z) log(1 - c))`.

    c is the confidence of a row, and z is 1 if the row is right and 0 if it is wrong. c is clipped to
    [EPSILON, 1 - EPSILON], so that a wrong row with confidence 1 has a finite NLL.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 16.64]; an array of R such numbers for R weightings.

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
    """Return the L1 calibration risk `mean |z - c|` of the rows (paper Eq. 1).

    c is the confidence of a row, and z is 1 if the row is right and 0 if it is wrong.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

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

    Of the N rows, bin m contains n_m; acc_m is their accuracy and conf_m their mean confidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

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
    """Return the expected calibration error, see `ece`, over bins with equally many rows.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M. Rows of equal confidence share a bin, so bins may differ in size, or be fewer than M.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once. Each
            weighting has its own bins.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

    >>> round(ece_mass([0.1, 0.2, 0.8, 0.9], [False, False, True, True], bins=2), 4)
    0.15
    """
    if weight is None or np.ndim(weight) == 1:
        sums = reliability(confidence, correct, bins, "mass", weight)
        return to_score(_mean_gap(sums))
    c, z = check_columns(confidence, correct)
    weightings = check_weight(weight, len(c))
    return np.array([ece_mass(c, z, bins=bins, weight=weighting) for weighting in weightings])


def _mean_gap(sums: Reliability) -> Floats:
    """Return `sum_m (n_m / N) |acc_m - conf_m|`, computed as `sum_m |n_m acc_m - n_m conf_m| / N`."""
    gap_sums = np.abs(sums.correct_sum - sums.confidence_sum)
    return np.asarray(gap_sums.sum(axis=-1) / sums.count.sum(axis=-1))


def mce(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    bins: int = 20,
    weight: ArrayLike | None = None,
) -> Score:
    """Return the maximum calibration error `max_m |acc_m - conf_m|` over non-empty bins of equal width.

    acc_m is the accuracy of the rows in bin m, and conf_m is their mean confidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

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
    """Return the RMS calibration error `sqrt(sum_m (n_m / N) (acc_m - conf_m)^2)` over bins of equal width.

    Of the N rows, bin m contains n_m; acc_m is their accuracy and conf_m their mean confidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

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

    Of the N rows, bin m contains n_m. Its gap is its accuracy acc_m minus its mean confidence. The measured accuracy
    is approximately normal with variance `s_m^2 = acc_m (1 - acc_m) / n_m`, so `|gap_m|` is larger on average than the
    true distance. The excess is estimated as `E|X_m| - |gap_m|`, where X_m is normal with mean gap_m and variance
    s_m^2. Subtracting it gives
        sum_m (n_m / N) (2 |gap_m| - E|X_m|).
    The result is comparable with ECE, because this correction applies to the L1 error itself. Those of Brocker and of
    Ferro and Fricker apply to its square. The correction removes up to 40 % of the bias of a calibrated model, never
    all of it. A bin whose rows are all right or all wrong has s_m = 0 and is not corrected.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M, of equal width.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once. n_m is the
            total weight of the bin.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

    >>> round(debiased_ece([0.7] * 4, [True, True, False, False]), 4)
    0.1399
    """
    sums = reliability(confidence, correct, bins, "width", weight)
    gap = np.abs(sums.gap)
    # s = sqrt(n acc (1 - acc)) / n, where n acc is `correct_sum`. An empty bin has no accuracy; with a count of 1, its
    # s is 0.
    count = np.where(sums.count > 0, sums.count, 1.0)
    variance_of_right_count = sums.correct_sum * (count - sums.correct_sum) / count
    deviation = np.sqrt(variance_of_right_count) / count
    corrected_gap = 2.0 * gap - _mean_absolute_normal(gap, deviation)
    corrected = sums.share * corrected_gap
    return to_score(np.maximum(0.0, corrected.sum(axis=-1)))


def _mean_absolute_normal(mean: Floats, deviation: Floats) -> Floats:
    """Return E|X| for normal X with this mean, at least 0, and this standard deviation. (..., M), (..., M)."""
    # If the deviation is 0, the ratio is infinite, and E|X| is the mean.
    infinite = np.full_like(mean, np.inf)
    ratio = np.divide(mean, deviation, out=infinite, where=deviation > 0)
    deviation_term = deviation * np.sqrt(2.0 / np.pi) * np.exp(-0.5 * ratio**2)
    mean_term = mean * _erf(ratio / 2.0**0.5)
    return np.asarray(deviation_term + mean_term)


_erf = np.vectorize(erf, otypes=[np.float64])  # scipy.special takes 0.3 s to import


def check_gold(gold: ArrayLike, shape: tuple[int, ...]) -> Ints:
    """Check that the gold labels are class indices, and return them as an array of integers.

    Args:
        gold: (N,) whole numbers in [0, K).
        shape: (N, K), the shape of the array with one score per row and class.

    Returns:
        (N,) indices.

    Raises:
        ValueError: `gold` does not have shape (N,), is empty, or its values are not whole numbers in [0, K).

    >>> check_gold([1, 0], (2, 3)).tolist()
    [1, 0]
    """
    index = np.asarray(gold)
    if index.shape != shape[:1]:
        raise ValueError(f"gold has shape {index.shape}, expected ({shape[0]},)")
    classes = shape[1]
    has_integers = index.dtype.kind in "iu"
    is_valid = has_integers and len(index) > 0 and index.min() >= 0 and index.max() < classes
    if not is_valid:
        raise ValueError(f"gold must be whole numbers from 0 to {classes - 1}, one per row")
    return index.astype(np.intp)


# ---- parts of the Brier score


@dataclass(frozen=True)
class BrierSplit:
    """Parts of the Brier score.

    For any bins, the score is exactly
        reliability - resolution + uncertainty + within_bin_variance - 2 within_bin_covariance.

    acc is the accuracy of all rows. acc_m and conf_m are the accuracy and the mean confidence of the bin of a row.

    Attributes:
        reliability: Mean over the rows of (acc_m - conf_m)^2.
        resolution: Mean over the rows of (acc_m - acc)^2.
        uncertainty: acc (1 - acc).
        within_bin_variance: Mean over the rows of (c - conf_m)^2, where c is the confidence of the row.
        within_bin_covariance: Mean over the rows of (c - conf_m) (z - acc_m), where z is 1 for right and 0 for wrong.
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

    The two terms for the spread are 0 if all rows of a bin have the same confidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        strategy: `width` for bins of equal width, `mass` for bins with equally many rows.

    Returns:
        The parts; `BrierSplit` has their definitions.

    >>> parts = brier_split([0.9, 0.9, 0.2, 0.2], [True, False, False, False])
    >>> round(parts.reliability, 4), round(parts.resolution, 4), round(parts.uncertainty, 4)
    (0.1, 0.0625, 0.1875)
    """
    c, z = check_columns(confidence, correct)
    sums = reliability(c, z, bins, strategy)
    bin_of_row = bin_index(c, bin_edges(c, bins, strategy))
    base_rate = float(z.mean())
    # acc_m - acc. An empty bin has no accuracy; computed from sums, its offset is 0.
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

# Numbers of cells in the grid on [0, 1], powers of two. If the bandwidth is less than MIN_CELLS_PER_BANDWIDTH cells
# wide, a finer grid is used, up to MAX_CELLS.
MIN_CELLS = 1 << 9
MAX_CELLS = 1 << 16
MIN_CELLS_PER_BANDWIDTH = 8
# Absolute tolerance of the bandwidth.
TOLERANCE = 1e-9


def smooth_ece(
    confidence: ArrayLike,
    correct: ArrayLike,
    *,
    weight: ArrayLike | None = None,
) -> Score:
    """Return smECE (Blasiok and Nakkiran, 2023): calibration error without bins.

    c_i is the confidence of row i, and z_i is 1 if it is right and 0 if it is wrong. The residuals z_i - c_i are
    smoothed by a Gaussian kernel K of bandwidth sigma, reflected at 0 and 1:
        smECE_sigma = integral over t in [0, 1] of | mean_i K_sigma(t, c_i) (z_i - c_i) |.
    This error decreases with sigma, so `smECE_sigma = sigma` has one solution. The solution is the smECE.

    For speed, residuals are spread linearly onto the nodes of a grid and smoothed in the cosine basis. In this basis,
    the reflected kernel only multiplies each frequency by a factor. With C cells, this takes O(N + C log C).

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        weight: (N,), how often each row counts, or (R, N) for R such weightings. None counts each row once.

    Returns:
        A number in [0, 1]; an array of R such numbers for R weightings.

    >>> round(smooth_ece([0.7] * 4, [True, True, False, False]), 4)
    0.2
    """
    groups = group_rows(confidence, correct, weight)
    # (R, G), (R,) and (R,), with R = 1 for a single weighting.
    residuals = np.atleast_2d(groups.right - confidence_sums(groups.count, groups.value))
    totals = np.atleast_1d(total_weight(groups.count))
    bandwidths = np.zeros(len(totals))
    for index, (residual, total) in enumerate(zip(residuals, totals, strict=True)):
        bandwidths[index] = _find_bandwidth(residual, groups.value, total)
    shape_of_weightings = groups.count.shape[:-1]
    return to_score(bandwidths.reshape(shape_of_weightings))


def _find_bandwidth(residual: Floats, value: Floats, total: float) -> float:
    """Return the smECE of one weighting, which is also its bandwidth, on a grid that is fine enough for it.

    Args:
        residual: (G,) number of right rows minus the sum of confidences, for each group of equal confidence.
        value: (G,) confidence of each group, in increasing order.
        total: Number of rows, or their total weight.
    """
    if not residual.any():  # the error is 0 at every bandwidth
        return 0.0
    cells = MIN_CELLS
    while True:
        mass = _spread_mass(residual, value, cells) / total
        sigma = _solve_bandwidth(mass, cells)
        cells_per_bandwidth = sigma * cells
        if cells_per_bandwidth >= MIN_CELLS_PER_BANDWIDTH or cells == MAX_CELLS:
            return sigma
        cells_needed = MIN_CELLS_PER_BANDWIDTH / max(sigma, TOLERANCE)  # sigma may be 0
        next_power_of_two = 2 ** ceil(log2(cells_needed))
        # Doubling guarantees that the grid grows, even if the logarithm was rounded down.
        cells = min(MAX_CELLS, max(2 * cells, next_power_of_two))


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
    """Find the cell of each confidence. `value`: (G,), in increasing order."""
    position = value * cells
    cell = np.minimum(position.astype(np.intp), cells - 1)  # confidence 1 belongs to the last cell
    starts = run_starts(cell)
    return _Cells(starts, filled=cell[starts], offset=position - cell)


def _spread_mass(
    residual: Floats,
    value: Floats,
    cells: int,
) -> Floats:
    """Spread each residual linearly onto the two nodes of its cell. (G,), (G,) -> (cells + 1,).

    A residual in the middle of a cell is halved. One at a quarter of the cell gives 3/4 to the lower node.
    """
    starts, filled, offset = _assign_cells(value, cells)
    upper_shares = np.add.reduceat(residual * offset, starts)
    mass = np.zeros(cells + 1)
    mass[filled] = np.add.reduceat(residual, starts) - upper_shares
    mass[filled + 1] += upper_shares
    return mass


class _DampingFactors(NamedTuple):
    """By which factor two kinds of smoothing multiply each frequency of the cosine basis.

    Attributes:
        spreading: (cells + 1,) factor of spreading mass linearly onto two nodes.
        log_kernel: (cells + 1,) logarithm of the factor of a Gaussian kernel of bandwidth 1.
    """

    spreading: Floats
    log_kernel: Floats


@lru_cache(maxsize=8)
def _compute_damping(cells: int) -> _DampingFactors:
    frequency = np.arange(cells + 1.0)
    return _DampingFactors(
        spreading=np.sinc(frequency / (2 * cells)) ** 2,
        log_kernel=-0.5 * (np.pi * frequency) ** 2,
    )


def _solve_bandwidth(mass: Floats, cells: int) -> float:
    """Return the sigma for which smoothing with bandwidth sigma gives an error of sigma.

    Args:
        mass: (cells + 1,) residuals divided by the number of rows, on the nodes of the grid; see `_spread_mass`.
        cells: Number of cells in the grid.
    """
    from scipy.optimize import brentq

    spectrum = _transform_mass(mass, cells)

    def excess_at(sigma: float) -> float:
        return _integrate_smoothed(spectrum, sigma, cells) - sigma

    # Smoothing keeps the total mass, so the error is at least |total mass|; it is at most 1. The solution is between.
    total_mass = abs(float(mass.sum()))
    sigma = float(brentq(excess_at, total_mass - TOLERANCE, 1.0 + TOLERANCE, xtol=TOLERANCE))
    return min(1.0, sigma)


def _transform_mass(mass: Floats, cells: int) -> Floats:
    """Return the mass in the cosine basis, one number per frequency. (cells + 1,) -> (cells + 1,)."""
    # The grid and its mirror image form a circle of length 2, on which the kernel needs no reflection. The mirror image
    # has no end nodes of its own: each end node is its own mirror image, so its mass counts twice.
    half_circle = mass.copy()
    half_circle[[0, -1]] *= 2.0
    mirror_image = half_circle[-2:0:-1]
    circle = np.concatenate((half_circle, mirror_image))
    spectrum = np.fft.rfft(circle).real  # the circle is symmetric, so the imaginary part is only rounding
    # Spreading mass onto two nodes has smoothed it. The division undoes this.
    return np.asarray(spectrum / _compute_damping(cells).spreading)


def _integrate_smoothed(spectrum: Floats, sigma: float, cells: int) -> float:
    """Smooth the mass with a kernel of bandwidth sigma, and return the integral over [0, 1] of its absolute value.

    Args:
        spectrum: (cells + 1,), see `_transform_mass`.
        sigma: The bandwidth. It may be 0 or just below, which the solver tries; then nothing is smoothed.
        cells: Number of cells in the grid.
    """
    # Frequencies with pi * sigma * frequency > 8.6 are left out: their factor is below exp(-8.6^2 / 2) < 1e-16.
    positive_sigma = max(abs(sigma), TOLERANCE)
    highest_frequency = int(8.6 / (np.pi * positive_sigma))
    kept = min(cells, highest_frequency) + 1
    log_kernel = _compute_damping(cells).log_kernel[:kept]
    kernel_factors = np.exp(sigma**2 * log_kernel)  # bandwidth sigma instead of 1 multiplies the logarithm by sigma^2
    smoothed_spectrum = np.zeros(cells + 1)
    smoothed_spectrum[:kept] = spectrum[:kept] * kernel_factors
    smoothed_circle = np.fft.irfft(smoothed_spectrum)  # the grid, followed by its mirror image
    absolute_mass = np.abs(smoothed_circle[: cells + 1])
    # By the trapezoidal rule, the end nodes count half. The mass of a node is its density times the width of a cell, so
    # the sum is the integral.
    end_nodes = absolute_mass[0] + absolute_mass[-1]
    return float(absolute_mass.sum() - 0.5 * end_nodes)
