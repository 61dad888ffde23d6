"""Resamples of rows or of whole questions, and the corrections of the BCa interval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator, default_rng
from scipy.special import ndtr, ndtri

from catto.evaluation.binning import Bools, Floats, Ints

MetricFunction = Callable[[Floats, Bools], float]

# Parts of the grouped jackknife: the acceleration is a skewness, and 200 leave-one-part-out values estimate it well.
JACKKNIFE_PARTS = 200
# Questions a block of the draw; the rows of a block fit the cache.
BLOCK = 1 << 14


@dataclass(frozen=True)
class Clusters:
    """Rows in the order of their questions; question q owns `order[start[q] : start[q] + size[q]]`."""

    order: Ints | None
    start: Ints
    size: Ints

    @classmethod
    def of(cls, questions: Sequence[object] | None, rows: int) -> Clusters:
        """Group the rows by question; without questions each row stands alone."""
        if questions is None:
            return cls(None, np.arange(rows), np.ones(rows, dtype=np.intp))
        if len(questions) != rows:
            raise ValueError(f"questions has {len(questions)} rows, confidence has {rows}")
        codes: dict[object, int] = {}
        code = np.array([codes.setdefault(question, len(codes)) for question in questions], dtype=np.intp)
        size = np.bincount(code)
        return cls(np.argsort(code, kind="stable"), np.cumsum(size) - size, size)

    def rows(self, drawn: Ints) -> Ints:
        """Return the rows of the drawn questions, one after the other."""
        if self.order is None:
            return drawn
        size = self.size[drawn]
        before = np.cumsum(size) - size
        place: Ints = np.repeat(self.start[drawn] - before, size) + np.arange(size.sum())
        return self.order[place]


def resampled(clusters: Clusters, resamples: int, rng: Generator) -> Iterator[Ints]:
    """Yield the rows of each resample: as many questions as there are, drawn with replacement.

    How many draws fall into each block of questions is multinomial, and within a block they are uniform: the same
    distribution as one draw over all, in an order that reads memory block by block.
    """
    count = len(clusters.size)
    bounds = np.append(np.arange(0, count, BLOCK), count)
    share = np.diff(bounds) / count
    for _ in range(resamples):
        sizes = rng.multinomial(count, share)
        blocks = zip(bounds[:-1], bounds[1:], sizes, strict=True)
        yield clusters.rows(np.concatenate([rng.integers(low, high, size=size) for low, high, size in blocks]))


def bca_tails(tails: Floats, value: float, draws: Floats, jackknife: Floats) -> Floats:
    """Shift the tail probabilities by bias and acceleration (Efron, 1987). (2,) -> (2,)."""
    below = np.mean(draws < value) + 0.5 * np.mean(draws == value)
    # All draws on one side would make the shift infinite; one draw in B + 1 is the least that B draws can tell.
    share = np.clip(below, 1.0 / (len(draws) + 1), len(draws) / (len(draws) + 1))
    bias = ndtri(share)
    offset = jackknife.mean() - jackknife
    squares = float(np.sum(offset**2))
    acceleration = float(np.sum(offset**3)) / (6.0 * squares**1.5) if squares > 0.0 else 0.0
    shifted = bias + ndtri(tails)
    return np.asarray(ndtr(bias + shifted / (1.0 - acceleration * shifted)), dtype=np.float64)


def jackknife_values(metric: MetricFunction, c: Floats, z: Bools, clusters: Clusters) -> Floats:
    """Return the defined values with one part of the questions left out; the parts are single questions up to 200."""
    count = len(clusters.size)
    part = default_rng(0).permutation(np.arange(count) % min(count, JACKKNIFE_PARTS))
    values = []
    for left_out in range(int(part.max()) + 1 if count > 1 else 0):
        rows = clusters.rows(np.flatnonzero(part != left_out))
        values.append(metric(c[rows], z[rows]))
    found = np.array(values, dtype=np.float64)
    found = found[~np.isnan(found)]
    return found if len(found) else np.zeros(1)
