"""Calibration errors and proper scores of (confidence, correct) rows, and the identities that tie them together.

Smooth ECE (Blasiok and Nakkiran, 2023): calibration error without bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from catto.metrics.binning import Bools, Floats, Ints, Strategy, bin_edges, bin_index, checked, reliability, tally
from catto.metrics.ranking import groups

# ---- calibration


# Confidences come from float32 softmaxes, where 1.0 stands for anything above 1 - 2^-25: one wrong answer at
# confidence 1 then costs 16.6 nats, not infinity.
EPSILON = 2.0**-24


def accuracy(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return the share of right rows. (N,), (N,) -> [0, 1]."""
    _, z = checked(confidence, correct)
    return float(z.mean())


def mean_confidence(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return the mean confidence; above accuracy it is overconfidence. (N,), (N,) -> [0, 1]."""
    c, _ = checked(confidence, correct)
    return float(c.mean())


def confidence_gap(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return mean confidence less accuracy; above 0 is overconfidence. (N,), (N,) -> [-1, 1].

    It is a mean over rows, so its bootstrap interval is nominal, also for a calibrated model; that of ECE is not.

    >>> round(confidence_gap([0.9, 0.7, 0.8], [True, False, True]), 4)
    0.1333
    """
    c, z = checked(confidence, correct)
    return float((c - z).mean())


def ece(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20, strategy: Strategy = "width") -> float:
    """Return the expected calibration error `sum_m (n_m / N) |acc_m - conf_m|`. (N,), (N,) -> [0, 1]."""
    found = reliability(confidence, correct, bins, strategy)
    return float(np.abs(found.correct_sum - found.confidence_sum).sum()) / found.rows


def ece_mass(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> float:
    """Return ECE over bins of equal mass; equal confidences share a bin. (N,), (N,) -> [0, 1]."""
    return ece(confidence, correct, bins=bins, strategy="mass")


def mce(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> float:
    """Return the maximum calibration error `max_m |acc_m - conf_m|` over bins that hold rows. (N,), (N,) -> [0, 1]."""
    return float(np.abs(reliability(confidence, correct, bins).gap).max())


def rms_calibration_error(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> float:
    """Return `sqrt(sum_m (n_m / N) (acc_m - conf_m)^2)`. (N,), (N,) -> [0, 1]."""
    found = reliability(confidence, correct, bins)
    return float(np.sqrt(found.weight @ found.gap**2))


def debiased_ece(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> float:
    """Return ECE less its estimated bias (Kumar, Liang and Ma, 2019), at least 0. (N,), (N,) -> [0, 1].

    A bin's accuracy is close to normal with variance `s^2 = acc (1 - acc) / n`, so |gap| exceeds the true gap in the
    mean. The excess is estimated as `E|N(gap, s^2)| - |gap|`, in closed form, and taken off:
        sum_m (n_m / N) (2 |gap_m| - E|N(gap_m, s_m^2)|).
    It is the published correction of the L1 error itself (the Brocker and Ferro-Fricker ones correct its square), hence
    comparable with ECE. It removes up to 40 % of the bias of a calibrated model, never all of it; a bin whose rows are
    all right or all wrong is left as it is.
    """
    found = reliability(confidence, correct, bins)
    gap, count = np.abs(found.gap), np.maximum(found.count, 1)
    deviation = np.sqrt(found.correct_sum * (count - found.correct_sum) / count) / count
    return max(0.0, float(found.weight @ (2.0 * gap - _folded_mean(gap, deviation))))


def _folded_mean(mean: Floats, deviation: Floats) -> Floats:
    """Return E|N(mean, deviation^2)|; `mean` where the deviation is 0. mean >= 0."""
    ratio = np.divide(mean, deviation, out=np.full(len(mean), np.inf), where=deviation > 0)
    inside = np.array([erf(value / 2.0**0.5) for value in ratio])
    folded: Floats = deviation * np.sqrt(2.0 / np.pi) * np.exp(-0.5 * ratio**2) + mean * inside
    return folded


def weighted_ece(confidence: ArrayLike, correct: ArrayLike, weight: ArrayLike, *, bins: int = 20) -> float:
    """Return `ECE_w = sum_m (n_m / N) w_m |acc_m - conf_m|`, w_m the mean weight of the bin; <= max(weight) * ECE.

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

    Confidence is that of the predicted label. gold: (N,) labels of any kind. ECE <= this <= L1 risk.
    """
    c, z = checked(confidence, correct)
    _, label = np.unique(_labels(gold, len(c)), return_inverse=True)
    edges = bin_edges(c, bins)
    parts = (tally(c[label == k], z[label == k], edges) for k in range(int(label.max()) + 1))
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


def _labels(gold: ArrayLike, rows: int) -> NDArray[np.generic]:
    labels = np.asarray(gold)
    if labels.shape != (rows,):
        raise ValueError(f"gold has shape {labels.shape}, expected ({rows},)")
    return labels


def checked_gold(gold: ArrayLike, shape: tuple[int, ...]) -> Ints:
    """Return (N,) class indices below the K of shape (N, K), or raise."""
    index = _labels(gold, shape[0])
    if index.dtype.kind not in "iu" or len(index) == 0 or index.min() < 0 or index.max() >= shape[1]:
        raise ValueError(f"gold must be whole numbers from 0 to {shape[1] - 1}, one a row")
    return index.astype(np.intp)


def brier(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return the Brier score `mean (c - z)^2`. (N,), (N,) -> [0, 1]."""
    c, z = checked(confidence, correct)
    distance = c - z
    distance *= distance
    return float(distance.mean())


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
    confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20, strategy: Strategy = "width"
) -> BrierSplit:
    """Split the Brier score; the two within-bin terms vanish where each bin holds one confidence. (N,), (N,)."""
    c, z = checked(confidence, correct)
    edges = bin_edges(c, bins, strategy)
    found = tally(c, z, edges)
    index, base = bin_index(c, edges), float(z.mean())
    offset = c - found.confidence[index]
    spread = (found.correct_sum - base * found.count) / np.maximum(found.count, 1)
    return BrierSplit(
        reliability=float(found.weight @ found.gap**2),
        resolution=float(found.weight @ spread**2),
        uncertainty=base * (1.0 - base),
        within_bin_variance=float(np.mean(offset**2)),
        within_bin_covariance=float(np.mean(offset * (z - found.accuracy[index]))),
    )


def nll(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return `-mean(z log c + (1 - z) log(1 - c))`, c clipped to [EPSILON, 1 - EPSILON]. (N,), (N,) -> [0, 16.64]."""
    c, z = checked(confidence, correct)
    return float(-np.log(np.clip(np.where(z, c, 1.0 - c), EPSILON, 1.0 - EPSILON)).mean())


def label_nll(label_logprobs: ArrayLike, gold: ArrayLike) -> float:
    """Return `-mean log p(gold)`. label_logprobs: (N, K) finite, <= 0; gold: (N,) whole numbers in [0, K)."""
    logprobs = checked_logprobs(label_logprobs)
    index = checked_gold(gold, logprobs.shape)
    return float(-logprobs[np.arange(len(index)), index].mean())


def checked_logprobs(label_logprobs: ArrayLike) -> Floats:
    """Return (N, K) float64, finite and at most 0 (float32 rounding of 1e-6 allowed), or raise."""
    logprobs = np.asarray(label_logprobs, dtype=np.float64)
    if logprobs.ndim != 2 or 0 in logprobs.shape:
        raise ValueError(f"label_logprobs has shape {logprobs.shape}, expected (N, K)")
    bad = ~(np.isfinite(logprobs) & (logprobs <= 1e-6))
    if bad.any():
        row, label = np.argwhere(bad)[0]
        raise ValueError(f"label_logprobs[{row}, {label}] is {logprobs[row, label]}, expected a finite number <= 0")
    return logprobs


def l1_risk(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return the population L1 calibration risk `mean |z - c|` (paper Eq. 1). (N,), (N,) -> [0, 1]."""
    c, z = checked(confidence, correct)
    return float(np.abs(z - c).mean())


@dataclass(frozen=True)
class L1Split:
    """`L1 risk = ece + noise`: the calibration error and the noise that no confidence could remove. Both >= 0."""

    ece: float
    noise: float


def l1_groups(confidence: ArrayLike, correct: ArrayLike) -> L1Split:
    """Split the L1 risk over groups of equal confidence: `ECE + 2 E[min(z (1 - c), c (1 - z))]`, exact."""
    found = groups(confidence, correct)
    weight, c, z = found.count / found.count.sum(), found.value, found.right / found.count
    return L1Split(float(weight @ np.abs(z - c)), float(weight @ (2.0 * np.minimum(z * (1 - c), c * (1 - z)))))


def l1_binned(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> L1Split:
    """Split the L1 risk over bins: `ECE + sum_m (n_m / N) 2 [min(acc_m, conf_m) - mean_m(z c)]`, exact."""
    c, z = checked(confidence, correct)
    found = tally(c, z, bin_edges(c, bins))
    low = np.minimum(found.correct_sum, found.confidence_sum).sum() - c[z].sum()
    gap = np.abs(found.correct_sum - found.confidence_sum).sum()
    return L1Split(float(gap) / len(c), 2.0 * float(low) / len(c))


# ---- smooth


# Cells of [0, 1]. A grid serves bandwidths of at least FINE_ENOUGH cells; below, a finer one is taken.
COARSEST, FINEST = 1 << 9, 1 << 16
FINE_ENOUGH = 8
TOLERANCE = 1e-9


def smooth_ece(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Return smECE: the bandwidth sigma at which the smoothed error equals the bandwidth. (N,), (N,) -> [0, 1].

    With the Gaussian kernel K reflected at 0 and 1,
        smECE_sigma = integral over t in [0, 1] of | mean_i K_sigma(t, c_i) (z_i - c_i) |,
    which falls with sigma, so `smECE_sigma = sigma` has one solution. Residuals are spread linearly onto a grid and
    smoothed in the cosine basis, where the reflected kernel is diagonal: O(N + G log G).
    """
    c, z = checked(confidence, correct)
    cells = COARSEST
    while (sigma := _fixed_point(_spectrum(c, z, cells))) * cells < FINE_ENOUGH and cells < FINEST:
        # At once to the grid that this bandwidth needs: the finest costs a hundred times the coarsest.
        while True:
            cells *= 2
            if sigma * cells >= FINE_ENOUGH or cells == FINEST:
                break
    return sigma


def _spectrum(confidence: Floats, correct: Bools, cells: int) -> Floats:
    """Return the cosine coefficients of the residual mass on the nodes `j / cells`. -> (cells + 1,)."""
    position = confidence * cells
    left = np.minimum(position.astype(np.intp), cells - 1)
    residual = (correct - confidence) / len(confidence)
    share = residual * (position - left)
    mass = np.bincount(left, residual - share, cells + 1) + np.bincount(left + 1, share, cells + 1)
    # On the circle of length 2 that unfolds [0, 1], an end node is its own mirror image and so carries both masses.
    mass[[0, -1]] += mass[[0, -1]]
    # Spreading onto two nodes is itself a smoothing, by sinc^2 in frequency, and is taken out again.
    spread = np.sinc(np.arange(cells + 1) / (2 * cells)) ** 2
    return np.asarray(np.fft.rfft(np.concatenate((mass, mass[-2:0:-1]))).real / spread, dtype=np.float64)


def _smoothed(spectrum: Floats, sigma: float) -> float:
    """Return the integral of |residual smoothed by sigma|, by the trapezoid rule on the grid."""
    # From 8.6 / sigma on, the kernel is below 1e-16: no exponential is taken there.
    kept = int(8.6 / (np.pi * sigma)) + 1 if sigma * np.pi * len(spectrum) > 8.6 else len(spectrum)
    smooth = np.zeros(len(spectrum))
    smooth[:kept] = spectrum[:kept] * np.exp(-0.5 * (sigma * np.pi * np.arange(kept)) ** 2)
    density = np.abs(np.fft.irfft(smooth)[: len(spectrum)])
    return float(density.sum() - 0.5 * (density[0] + density[-1]))


def _fixed_point(spectrum: Floats) -> float:
    """Solve `smECE_sigma = sigma` on [0, 1] by the Illinois form of regula falsi."""
    kept, moved = 1.0, 0.0
    at_kept, at_moved = _smoothed(spectrum, kept) - kept, _smoothed(spectrum, moved)
    while at_moved > TOLERANCE or at_moved < -TOLERANCE:
        sigma = (moved * at_kept - kept * at_moved) / (at_kept - at_moved)
        excess = _smoothed(spectrum, sigma) - sigma
        if excess * at_moved < 0:
            kept, at_kept = moved, at_moved
        else:
            at_kept /= 2  # the same end stayed twice: halving its value draws the next step towards it
        moved, at_moved = sigma, excess
    return moved
