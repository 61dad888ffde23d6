"""Quantities that only the paper's propositions need; no command reports them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from catto.metrics.binning import bin_edges, bin_index, check_columns, group_rows, reliability


def weighted_ece(confidence: ArrayLike, correct: ArrayLike, importance: ArrayLike, *, bins: int = 20) -> float:
    """Return `sum_m (n_m / N) w_m |acc_m - conf_m|`, where w_m is the mean importance of the bin's rows.

    importance: (N,), the value w(confidence) >= 0 of each row.
    """
    c, z = check_columns(confidence, correct)
    index = bin_index(c, bin_edges(c, bins))
    importance_of_bin = np.bincount(index, weights=np.asarray(importance, dtype=np.float64), minlength=bins)
    gap = np.abs(reliability(c, z, bins).gap)
    return float(importance_of_bin @ gap) / len(c)


def true_class_ece(confidence: ArrayLike, correct: ArrayLike, gold: ArrayLike, *, bins: int = 20) -> float:
    """Return the paper's classwise ECE: `sum_k P(Y=k) ECE(rows with Y=k)`, all classes on the same edges.

    Confidence is that of the predicted label. gold: (N,) labels of any kind.
    """
    c, z = check_columns(confidence, correct)
    labels = np.asarray(gold)
    total = 0.0
    for label in np.unique(labels):
        sums = reliability(c[labels == label], z[labels == label], bins)
        total += float(np.abs(sums.correct_sum - sums.confidence_sum).sum())
    return total / len(c)


@dataclass(frozen=True)
class L1Split:
    """`L1 risk = ece + noise`: the calibration error and the noise that no confidence could remove. Both >= 0."""

    ece: float
    noise: float


def split_l1_by_confidence(confidence: ArrayLike, correct: ArrayLike) -> L1Split:
    """Split the L1 risk over groups of equal confidence: `ECE + 2 E[min(z (1 - c), c (1 - z))]`, exact."""
    groups = group_rows(confidence, correct)
    share = groups.count / groups.count.sum()
    c = groups.value
    z = groups.right / groups.count
    noise = 2.0 * np.minimum(z * (1 - c), c * (1 - z))
    return L1Split(float(share @ np.abs(z - c)), float(share @ noise))


def split_l1_by_bin(confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> L1Split:
    """Split the L1 risk over bins: `ECE + sum_m (n_m / N) 2 [min(acc_m, conf_m) - mean_m(z c)]`, exact."""
    c, z = check_columns(confidence, correct)
    sums = reliability(c, z, bins)
    gap = np.abs(sums.correct_sum - sums.confidence_sum).sum()
    overlap = np.minimum(sums.correct_sum, sums.confidence_sum).sum() - c[z].sum()
    return L1Split(float(gap) / len(c), 2.0 * float(overlap) / len(c))
