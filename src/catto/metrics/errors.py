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
from catto.metrics.sharing import keep_last

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
        confidence: (N,) in [0, 1]. It is checked and not used.
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
    """Return the mean confidence; a value above the accuracy is overconfidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1. It is checked and not used.
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
    """Return mean confidence less accuracy; above 0 is overconfidence.

    It is a mean over rows, so its bootstrap interval is nominal, also for a calibrated model; that of ECE is not.

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


@keep_last
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


@keep_last
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


@keep_last
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
    """Return ECE over bins that hold equally many rows; equal confidences share a bin.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M; there are fewer where equal confidences would be split.
        weight: (N,) or (R, N), how often each row counts. The edges depend on it.

    Returns:
        A number in [0, 1]; (R,) for a weight of shape (R, N).

    >>> round(ece_mass([0.1, 0.2, 0.8, 0.9], [False, False, True, True], bins=2), 4)
    0.15
    """
    if weight is None or np.ndim(weight) == 1:
        return to_score(_mean_gap(reliability(confidence, correct, bins, "mass", weight)))
    # The edges depend on the weight, so each weighting has bins of its own.
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
    """Return the maximum calibration error `max_m |acc_m - conf_m|` over bins of equal width that hold rows.

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
    return to_score(np.abs(sums.gap).max(axis=-1))


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
    """Return ECE less its estimated bias (Kumar, Liang and Ma, 2019), at least 0.

    A bin's accuracy is close to normal with variance `s^2 = acc (1 - acc) / n`, so |gap| exceeds the true gap in the
    mean. The excess is estimated as `E|N(gap, s^2)| - |gap|`, in closed form, and subtracted:
        sum_m (n_m / N) (2 |gap_m| - E|N(gap_m, s_m^2)|).
    It is the published correction of the L1 error itself (the Brocker and Ferro-Fricker ones correct its square), hence
    comparable with ECE. It removes up to 40 % of the bias of a calibrated model, never all of it. A bin whose rows are
    all right or all wrong has s = 0 and is left as it is.

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
    # s = sqrt(n acc (1 - acc)) / n, from sums: the accuracy of an empty bin is nan, and with a count of 1 its s is 0.
    count = np.where(sums.count > 0, sums.count, 1.0)
    variance_of_right_rows = sums.correct_sum * (count - sums.correct_sum) / count
    deviation = np.sqrt(variance_of_right_rows) / count
    # The mean of |X| for X ~ N(gap, deviation^2); without deviation it is the gap.
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
        ValueError: `gold` has another shape, holds no whole numbers, or one is not in [0, K).

    >>> check_gold([1, 0], (2, 3)).tolist()
    [1, 0]
    """
    index = np.asarray(gold)
    if index.shape != shape[:1]:
        raise ValueError(f"gold has shape {index.shape}, expected ({shape[0]},)")
    has_whole_numbers = index.dtype.kind in "iu" and len(index) > 0
    if not has_whole_numbers or index.min() < 0 or index.max() >= shape[1]:
        raise ValueError(f"gold must be whole numbers from 0 to {shape[1] - 1}, one per row")
    return index.astype(np.intp)


# ---- parts of the Brier score


@dataclass(frozen=True)
class BrierSplit:
    """Parts of the Brier score; `total` is the score itself, exactly, for any bins.

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
    """Split the Brier score; the two within-bin terms vanish where each bin holds one confidence.

    Args:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans or 0/1.
        bins: Number of bins M.
        strategy: Bins of equal `width` or of equal `mass`.

    >>> parts = brier_split([0.9, 0.9, 0.2, 0.2], [True, False, False, False])
    >>> round(parts.reliability, 4), round(parts.resolution, 4), round(parts.uncertainty, 4)
    (0.1, 0.0625, 0.1875)
    """
    c, z = check_columns(confidence, correct)
    sums = reliability(c, z, bins, strategy)
    bin_of_row = bin_index(c, bin_edges(c, bins, strategy))
    base_rate = float(z.mean())
    # acc_m - acc, from sums: the accuracy of an empty bin is nan, and here it is 0.
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

# Cells of the grid on [0, 1]. A grid is fine enough for bandwidths of at least FINE_ENOUGH cells; for smaller ones, a
# finer grid is taken, up to MOST_CELLS.
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

    It is the bandwidth sigma at which the smoothed error equals the bandwidth. With the Gaussian kernel K reflected at
    0 and 1,
        smECE_sigma = integral over t in [0, 1] of | mean_i K_sigma(t, c_i) (z_i - c_i) |,
    which falls with sigma, so `smECE_sigma = sigma` has one solution. Residuals are spread linearly onto a grid and
    smoothed in the cosine basis, where the reflected kernel is diagonal: O(N + G log G).

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
        residual: (G,) number of right rows less the sum of confidences, of each group.
        value: (G,) confidence of each group, rising.
        total: Number of rows, or their weight.
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
        finer = 2 ** ceil(log2(FINE_ENOUGH / max(sigma, TOLERANCE)))
        cells = min(MOST_CELLS, max(2 * cells, finer))


class _Cells(NamedTuple):
    """Where the G groups of equal confidence lie on a grid.

    `starts` is the first group of each cell that holds any, `filled` the numbers of these cells. `offset` is each
    group's distance from the lower node of its cell, (G,) in [0, 1].
    """

    starts: Ints
    filled: Ints
    offset: Floats


@keep_last
def _assign_cells(value: Floats, cells: int) -> _Cells:
    position = value * cells
    cell = np.minimum(position.astype(np.intp), cells - 1)
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
def _frequencies(cells: int) -> tuple[Floats, Floats]:
    """Return each frequency's factor of spreading onto two nodes, and the log of its factor in a kernel of width 1.

    The log is negative: the kernel damps high frequencies.
    """
    frequency = np.arange(cells + 1.0)
    spread = np.sinc(frequency / (2 * cells)) ** 2
    decay = -0.5 * (np.pi * frequency) ** 2
    return spread, decay


def _solve_bandwidth(mass: Floats, cells: int) -> float:
    """Return the sigma at which the smoothed error of the mass on the nodes is sigma itself. mass: (cells + 1,)."""
    from scipy.optimize import brentq

    spread, decay = _frequencies(cells)
    total_mass = abs(float(mass.sum()))
    # On the circle of length 2 that unfolds [0, 1], an end node is its own mirror image and so carries both masses.
    on_circle = mass.copy()
    on_circle[[0, -1]] *= 2.0
    unfolded = np.concatenate((on_circle, on_circle[-2:0:-1]))
    # Spreading a mass onto two nodes smoothed it; dividing by the factor of that takes the smoothing back.
    spectrum = np.fft.rfft(unfolded).real / spread

    def excess_at(sigma: float) -> float:
        # Beyond these frequencies the kernel is below 1e-16. brentq may try a sigma of 0 or just below it.
        highest_kept = int(8.6 / (np.pi * max(abs(sigma), TOLERANCE)))
        kept = min(cells, highest_kept) + 1
        smoothed = np.zeros(cells + 1)
        smoothed[:kept] = spectrum[:kept] * np.exp(sigma**2 * decay[:kept])
        density = np.abs(np.fft.irfft(smoothed)[: cells + 1])
        integral = float(density.sum() - 0.5 * (density[0] + density[-1]))
        return integral - sigma

    # No smoothing takes the integral of |density| below |total mass|, so the solution lies between that and 1.
    sigma = float(brentq(excess_at, total_mass - TOLERANCE, 1.0 + TOLERANCE, xtol=TOLERANCE))
    return min(1.0, sigma)
