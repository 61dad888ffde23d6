"""Smooth ECE (Blasiok and Nakkiran, 2023): calibration error without bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from catto.evaluation.binning import Bools, Floats, checked

__all__ = ["smooth_ece"]

# Cells of [0, 1]. The coarse grid serves bandwidths of at least FINE_ENOUGH cells; below, the finer ones are tried.
GRIDS = (1 << 9, 1 << 12, 1 << 16)
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
    sigma = 0.0
    for cells in GRIDS:
        sigma = _fixed_point(_spectrum(c, z, cells))
        if sigma * cells >= FINE_ENOUGH:
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
    frequency = np.pi * np.arange(len(spectrum))
    density = np.abs(np.fft.irfft(spectrum * np.exp(-0.5 * (sigma * frequency) ** 2))[: len(spectrum)])
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
