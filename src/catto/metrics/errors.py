"""Calibration errors and proper scores of (confidence, correct) rows, and the identities that tie them together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, erf, log2

import numpy as np
from numpy.typing import ArrayLike

from catto.metrics import binning
from catto.metrics.binning import Bools, Floats, Groups, Reliability, bin_edges, bin_index, checked, groups, tally

# Confidences come from float32 softmaxes, where 1.0 means anything above 1 - 2^-25: one wrong answer at confidence 1
# then costs 16.6 nats, not infinity.
EPSILON = 2.0**-24


@binning.mean_metric
def accuracy(c: Floats, z: Bools) -> Bools:
    """Return the share of right rows. (N,), (N,) -> [0, 1].

    >>> accuracy([0.9, 0.7], [True, False])
    0.5
    """
    return z


@binning.mean_metric
def mean_confidence(c: Floats, z: Bools) -> Floats:
    """Return the mean confidence; above accuracy it is overconfidence. (N,), (N,) -> [0, 1]."""
    return c


@binning.mean_metric
def confidence_gap(c: Floats, z: Bools) -> Floats:
    """Return mean confidence less accuracy; above 0 is overconfidence. (N,), (N,) -> [-1, 1].

    It is a mean over rows, so its bootstrap interval is nominal, also for a calibrated model; that of ECE is not.

    >>> round(confidence_gap([0.9, 0.7, 0.8], [True, False, True]), 4)
    0.1333
    """
    return c - z


@binning.mean_metric
def brier(c: Floats, z: Bools) -> Floats:
    """Return the Brier score `mean (c - z)^2`. (N,), (N,) -> [0, 1].

    >>> round(brier([0.9, 0.7], [True, False]), 4)
    0.25
    """
    distance = c - z
    distance *= distance
    return distance


@binning.mean_metric
def nll(c: Floats, z: Bools) -> Floats:
    """Return `-mean(z log c + (1 - z) log(1 - c))`, c clipped to [EPSILON, 1 - EPSILON]. (N,), (N,) -> [0, 16.64]."""
    return np.asarray(-np.log(np.clip(np.where(z, c, 1.0 - c), EPSILON, 1.0 - EPSILON)))


@binning.mean_metric
def l1_risk(c: Floats, z: Bools) -> Floats:
    """Return the population L1 calibration risk `mean |z - c|` (paper Eq. 1). (N,), (N,) -> [0, 1]."""
    return np.abs(z - c)


@binning.binned_metric
def ece(bins: Reliability) -> Floats:
    """Return the expected calibration error `sum_m (n_m / N) |acc_m - conf_m|`. (N,), (N,) -> [0, 1].

    >>> round(ece([0.9, 0.8, 0.3], [True, False, False], bins=2), 4)
    0.3333
    """
    return np.asarray(np.abs(bins.correct_sum - bins.confidence_sum).sum(axis=-1) / bins.count.sum(axis=-1))


def ece_mass(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> float:
    """Return ECE over bins of equal mass; equal confidences share a bin. (N,), (N,) -> [0, 1]."""
    return ece(confidence, correct, bins=bins, strategy="mass")


@binning.binned_metric
def mce(bins: Reliability) -> Floats:
    """Return the maximum calibration error `max_m |acc_m - conf_m|` over bins that hold rows. (N,), (N,) -> [0, 1]."""
    return np.asarray(np.abs(bins.gap).max(axis=-1))


@binning.binned_metric
def rms_calibration_error(bins: Reliability) -> Floats:
    """Return `sqrt(sum_m (n_m / N) (acc_m - conf_m)^2)`. (N,), (N,) -> [0, 1]."""
    return np.asarray(np.sqrt((bins.weight * bins.gap**2).sum(axis=-1)))


@binning.binned_metric
def debiased_ece(bins: Reliability) -> Floats:
    """Return ECE less its estimated bias (Kumar, Liang and Ma, 2019), at least 0. (N,), (N,) -> [0, 1].

    A bin's accuracy is close to normal with variance `s^2 = acc (1 - acc) / n`, so |gap| exceeds the true gap in the
    mean. The excess is estimated as `E|N(gap, s^2)| - |gap|`, in closed form, and subtracted:
        sum_m (n_m / N) (2 |gap_m| - E|N(gap_m, s_m^2)|).
    It is the published correction of the L1 error itself (the Brocker and Ferro-Fricker ones correct its square), hence
    comparable with ECE. It removes up to 40 % of the bias of a calibrated model, never all of it; a bin whose rows are
    all right or all wrong is left as it is.
    """
    gap, count = np.abs(bins.gap), np.maximum(bins.count, 1)
    deviation = np.sqrt(bins.correct_sum * (count - bins.correct_sum) / count) / count
    ratio = np.divide(gap, deviation, out=np.full_like(gap, np.inf), where=deviation > 0)
    folded_mean = deviation * np.sqrt(2.0 / np.pi) * np.exp(-0.5 * ratio**2) + gap * _erf(ratio / 2.0**0.5)
    return np.asarray(np.maximum(0.0, (bins.weight * (2.0 * gap - folded_mean)).sum(axis=-1)))


_erf = np.vectorize(erf, otypes=[np.float64])  # scipy.special takes 0.3 s to import


def weighted_ece(confidence: ArrayLike, correct: ArrayLike, weight: ArrayLike, *, bins: int = 20) -> float:
    """Return `ECE_w = sum_m (n_m / N) w_m |acc_m - conf_m|`, w_m the mean weight of the bin; <= max(weight) * ECE.

    It checks the paper's proposition on weighted calibration error; no command reports it.
    weight: (N,), the value w(confidence) >= 0 of each row.
    """
    c, z = checked(confidence, correct)
    w = np.asarray(weight, dtype=np.float64)
    if w.shape != c.shape or not (np.isfinite(w).all() and (w >= 0).all()):
        raise ValueError(f"weight must be {len(c)} finite numbers of at least 0")
    edges = bin_edges(c, bins)
    total = np.bincount(bin_index(c, edges), weights=w, minlength=bins)
    return float(total @ np.abs(tally(c, z, edges).gap)) / len(c)


def true_class_ece(confidence: ArrayLike, correct: ArrayLike, gold: ArrayLike, *, bins: int = 20) -> float:
    """Return the paper's classwise ECE: `sum_k P(Y=k) ECE(rows with Y=k)`, all classes on the same edges.

    It checks the paper's proposition on classwise dominance, ECE <= this <= L1 risk; no command reports it.
    Confidence is that of the predicted label. gold: (N,) labels of any kind.
    """
    c, z = checked(confidence, correct)
    labels = np.asarray(gold)
    if labels.shape != c.shape:
        raise ValueError(f"gold has shape {labels.shape}, expected {c.shape}")
    edges = bin_edges(c, bins)
    parts = (tally(c[labels == k], z[labels == k], edges) for k in np.unique(labels))
    return sum(float(np.abs(part.correct_sum - part.confidence_sum).sum()) for part in parts) / len(c)


def per_class_ece(probabilities: ArrayLike, gold: ArrayLike, *, bins: int = 20) -> float:
    """Return the usual classwise ECE: the mean over classes of `ECE(p_k, 1[gold = k])`.

    probabilities: (N, K) in [0, 1]; gold: (N,) whole numbers in [0, K).
    """
    p = np.asarray(probabilities)
    if p.ndim != 2:
        raise ValueError(f"probabilities has shape {p.shape}, expected (N, K)")
    index = checked_gold(gold, p.shape)
    return float(np.mean([ece(p[:, k], index == k, bins=bins) for k in range(p.shape[1])]))


def checked_gold(gold: ArrayLike, shape: tuple[int, ...]) -> binning.Ints:
    """Return (N,) class indices below the K of shape (N, K), or raise."""
    index = np.asarray(gold)
    if index.shape != shape[:1]:
        raise ValueError(f"gold has shape {index.shape}, expected ({shape[0]},)")
    if index.dtype.kind not in "iu" or len(index) == 0 or index.min() < 0 or index.max() >= shape[1]:
        raise ValueError(f"gold must be whole numbers from 0 to {shape[1] - 1}, one per row")
    return index.astype(np.intp)


@dataclass(frozen=True)
class BrierSplit:
    """Parts of the Brier score; `total` is the score itself, exactly, for any bins.

    reliability: mean of (acc_m - conf_m)^2; resolution: of (acc_m - acc)^2; uncertainty: acc (1 - acc);
    within_bin_variance: of the confidence; within_bin_covariance: of confidence and correctness (subtracted twice).
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
    confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20, strategy: binning.Strategy = "width"
) -> BrierSplit:
    """Split the Brier score; the two within-bin terms vanish where each bin holds one confidence. (N,), (N,).

    >>> parts = brier_split([0.9, 0.9, 0.2, 0.2], [True, False, False, False])
    >>> round(parts.reliability, 4), round(parts.resolution, 4), round(parts.uncertainty, 4)
    (0.1, 0.0625, 0.1875)
    """
    c, z = checked(confidence, correct)
    edges = bin_edges(c, bins, strategy)
    rows = tally(c, z, edges)
    index, base = bin_index(c, edges), float(z.mean())
    offset = c - rows.confidence[index]
    spread = (rows.correct_sum - base * rows.count) / np.maximum(rows.count, 1)
    return BrierSplit(
        reliability=float(rows.weight @ rows.gap**2),
        resolution=float(rows.weight @ spread**2),
        uncertainty=base * (1.0 - base),
        within_bin_variance=float(np.mean(offset**2)),
        within_bin_covariance=float(np.mean(offset * (z - rows.accuracy[index]))),
    )


@dataclass(frozen=True)
class L1Split:
    """`L1 risk = ece + noise`: the calibration error and the noise that no confidence could remove. Both >= 0."""

    ece: float
    noise: float


def l1_groups(confidence: ArrayLike, correct: ArrayLike) -> L1Split:
    """Split the L1 risk over groups of equal confidence: `ECE + 2 E[min(z (1 - c), c (1 - z))]`, exact."""
    rows = groups(confidence, correct)
    weight, c, z = rows.count[0] / rows.rows, rows.value, rows.right[0] / rows.count[0]
    return L1Split(float(weight @ np.abs(z - c)), float(weight @ (2.0 * np.minimum(z * (1 - c), c * (1 - z)))))


def l1_binned(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> L1Split:
    """Split the L1 risk over bins: `ECE + sum_m (n_m / N) 2 [min(acc_m, conf_m) - mean_m(z c)]`, exact."""
    c, z = checked(confidence, correct)
    rows = tally(c, z, bin_edges(c, bins))
    low = np.minimum(rows.correct_sum, rows.confidence_sum).sum() - c[z].sum()
    gap = np.abs(rows.correct_sum - rows.confidence_sum).sum()
    return L1Split(float(gap) / len(c), 2.0 * float(low) / len(c))


# Cells of [0, 1]. A grid serves bandwidths of at least FINE_ENOUGH cells; below, a finer one is taken.
FEWEST_CELLS, MOST_CELLS = 1 << 9, 1 << 16
FINE_ENOUGH = 8
TOLERANCE = 1e-9


def smooth_ece(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return smECE (Blasiok and Nakkiran, 2023): calibration error without bins. (N,), (N,) -> [0, 1].

    It is the bandwidth sigma at which the smoothed error equals the bandwidth. With the Gaussian kernel K reflected at
    0 and 1,
        smECE_sigma = integral over t in [0, 1] of | mean_i K_sigma(t, c_i) (z_i - c_i) |,
    which falls with sigma, so `smECE_sigma = sigma` has one solution. Residuals are spread linearly onto a grid and
    smoothed in the cosine basis, where the reflected kernel is diagonal: O(N + G log G).

    >>> round(smooth_ece([0.7] * 4, [True, True, False, False]), 4)
    0.2
    """
    rows = groups(confidence, correct)
    return float(_smooth_on_counts(rows.value)(rows)[0])


def _smooth_on_counts(c: Floats) -> binning.CountMetric:
    from scipy.optimize import brentq

    @cache
    def grid(cells: int) -> tuple[binning.Ints, binning.Ints, Floats, Floats, Floats]:
        """Return where the confidences of each filled cell start, these cells, and the places of all within theirs.

        Then, for each frequency: what spreading onto two nodes multiplies it by, and the log of what sigma = 1 does.
        """
        position = c * cells
        cell = np.minimum(position.astype(np.intp), cells - 1)
        starts = np.flatnonzero(np.append(True, cell[1:] != cell[:-1]))
        frequency = np.arange(cells + 1.0)
        decay: Floats = -0.5 * (np.pi * frequency) ** 2
        return starts, cell[starts], position - cell, np.sinc(frequency / (2 * cells)) ** 2, decay

    def fixed_point(residual: Floats, rows: float, cells: int) -> float:
        starts, filled, place, spread, decay = grid(cells)
        mass = np.zeros(cells + 1)
        shares = np.add.reduceat(residual * place, starts)
        mass[filled] = np.add.reduceat(residual, starts) - shares
        mass[filled + 1] += shares
        mass /= rows
        total = abs(float(mass.sum()))
        # On the circle of length 2 that unfolds [0, 1], an end node is its own mirror image and so carries both masses.
        mass[[0, -1]] *= 2.0
        spectrum = np.fft.rfft(np.concatenate((mass, mass[-2:0:-1]))).real / spread

        def excess(sigma: float) -> float:
            kept = min(cells, int(8.6 / (np.pi * max(abs(sigma), TOLERANCE)))) + 1  # beyond, the kernel is below 1e-16
            smoothed = np.zeros(cells + 1)
            smoothed[:kept] = spectrum[:kept] * np.exp(sigma**2 * decay[:kept])
            density = np.abs(np.fft.irfft(smoothed)[: cells + 1])
            return float(density.sum() - 0.5 * (density[0] + density[-1])) - sigma

        # No smoothing takes the integral of |density| below |total mass|, so the solution lies between that and 1.
        return min(1.0, float(brentq(excess, total - TOLERANCE, 1.0 + TOLERANCE, xtol=TOLERANCE)))

    def values(rows: Groups) -> Floats:
        widths = np.zeros(len(rows.rows))
        for place, residual in enumerate(rows.right - rows.confidence_sum):
            cells = FEWEST_CELLS
            while residual.any():
                sigma = widths[place] = fixed_point(residual, rows.rows[place], cells)
                if sigma * cells >= FINE_ENOUGH or cells == MOST_CELLS:
                    break
                finer = 2 ** ceil(log2(FINE_ENOUGH / max(sigma, TOLERANCE)))
                cells = min(MOST_CELLS, max(2 * cells, finer))
        return widths

    return values


binning.ON_COUNTS[smooth_ece] = _smooth_on_counts
