"""Maps from stated to calibrated confidence, fitted on validation rows and kept as JSON.

A calibrator is an immutable value: `Temperature.fit(confidence, correct).apply(confidence)`. Its fields are the whole
fit, so one that was saved and loaded equals the fitted one to the last bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import expit, log_softmax, logit

from catto.files import read_json, replacing
from catto.metrics.binning import Floats, bin_edges, bin_index, checked, checked_confidence, reliability
from catto.metrics.errors import EPSILON, checked_gold, checked_logprobs
from catto.problems import DataError, shortened

__all__ = [
    "CALIBRATORS",
    "Calibrator",
    "HistogramBinning",
    "Isotonic",
    "Platt",
    "Temperature",
    "from_json",
    "load",
    "save",
    "to_json",
]

SCHEMA_VERSION = 1
# Rows that are all right (or all wrong) push tau to 0 (or to infinity); the fit stops at these ends.
TAU_RANGE = (0.01, 100.0)
# A file may hold other taus, slopes and intercepts than a fit gives; beyond this their products overflow.
LARGEST = 1e9


def _logits(confidence: Floats) -> Floats:
    """Return log(c / (1 - c)), c clipped as in the NLL so that 0 and 1 stay finite."""
    return np.asarray(logit(np.clip(confidence, EPSILON, 1.0 - EPSILON)), dtype=np.float64)


@dataclass(frozen=True)
class Temperature:
    """Divide the logit by tau, the minimiser of the NLL; the ranking, and so the AUROC, stays."""

    tau: float

    def __post_init__(self) -> None:
        if not 1.0 / LARGEST <= self.tau <= LARGEST:
            raise ValueError(f"tau is {self.tau}, expected a number above 0, from {1 / LARGEST:g} to {LARGEST:g}")

    @classmethod
    def fit(cls, confidence: ArrayLike, correct: ArrayLike) -> Self:
        """Fit tau to the correctness of the answers: sigmoid(logit(c) / tau). (N,), (N,)."""
        c, z = checked(confidence, correct)
        score = _logits(c)
        return cls(_best_tau(lambda beta: float(np.mean((expit(beta * score) - z) * score))))

    def apply(self, confidence: ArrayLike) -> Floats:
        """Return sigmoid(logit(c) / tau). (N,) -> (N,)."""
        return np.asarray(expit(_logits(checked_confidence(confidence)) / self.tau), dtype=np.float64)

    @classmethod
    def fit_labels(cls, label_logprobs: ArrayLike, gold: ArrayLike) -> Self:
        """Fit tau to the gold labels: the softmax over the labels of log p / tau. (N, K), (N,) in [0, K)."""
        score = checked_logprobs(label_logprobs)
        gold_score = score[np.arange(len(score)), checked_gold(gold, score.shape)]

        def slope(beta: float) -> float:
            probability = np.exp(log_softmax(beta * score, axis=1))
            return float(np.mean((probability * score).sum(axis=1) - gold_score))

        return cls(_best_tau(slope))

    def apply_labels(self, label_logprobs: ArrayLike) -> Floats:
        """Return the label log-probabilities at tau, normalised over the labels. (N, K) -> (N, K)."""
        return np.asarray(log_softmax(checked_logprobs(label_logprobs) / self.tau, axis=1), dtype=np.float64)


def _check_shares(name: str, values: tuple[float, ...]) -> None:
    for place, value in enumerate(values):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}.{place} is {value}, expected a number in [0, 1]")


def _best_tau(slope: Callable[[float], float]) -> float:
    """Return 1 / beta where the slope of the NLL in beta is 0; the NLL is convex in beta, so the slope only rises."""
    low, high = 1.0 / TAU_RANGE[1], 1.0 / TAU_RANGE[0]
    if slope(low) >= 0.0:
        return TAU_RANGE[1]
    if slope(high) <= 0.0:
        return TAU_RANGE[0]
    return 1.0 / float(brentq(slope, low, high, xtol=1e-14, rtol=1e-14))


@dataclass(frozen=True)
class Platt:
    """Logistic regression on the logit: sigmoid(slope * logit(c) + intercept), without a penalty."""

    slope: float
    intercept: float

    def __post_init__(self) -> None:
        for name, value in (("slope", self.slope), ("intercept", self.intercept)):
            if not abs(value) <= LARGEST:
                raise ValueError(f"{name} is {value}, expected a number from {-LARGEST:g} to {LARGEST:g}")

    @classmethod
    def fit(cls, confidence: ArrayLike, correct: ArrayLike) -> Self:
        """Fit slope and intercept; needs right and wrong rows. (N,), (N,)."""
        c, z = checked(confidence, correct)
        if z.all() or not z.any():
            raise ValueError("Platt needs right and wrong rows, got one kind only")
        from sklearn.linear_model import LogisticRegression  # a second to import, which `eval` need not wait for

        model = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000).fit(_logits(c)[:, None], z)
        return cls(float(model.coef_[0, 0]), float(model.intercept_[0]))

    def apply(self, confidence: ArrayLike) -> Floats:
        """Return sigmoid(slope * logit(c) + intercept). (N,) -> (N,)."""
        score = self.slope * _logits(checked_confidence(confidence)) + self.intercept
        return np.asarray(expit(score), dtype=np.float64)


@dataclass(frozen=True)
class Isotonic:
    """The best non-decreasing map, linear between its knots and flat beyond them."""

    knots: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.knots) != len(self.values):
            raise ValueError(f"isotonic has {len(self.knots)} knots and {len(self.values)} values")
        _check_shares("knots", self.knots)
        _check_shares("values", self.values)
        if any(after < before for column in (self.knots, self.values) for before, after in pairwise(column)):
            raise ValueError("isotonic: knots and values must rise, or stay as they are")

    @classmethod
    def fit(cls, confidence: ArrayLike, correct: ArrayLike) -> Self:
        """Fit by least squares under monotonicity. (N,), (N,)."""
        c, z = checked(confidence, correct)
        from sklearn.isotonic import IsotonicRegression

        model = IsotonicRegression(y_min=0.0, y_max=1.0).fit(c, z.astype(np.float64))
        return cls(tuple(model.X_thresholds_.tolist()), tuple(model.y_thresholds_.tolist()))

    def apply(self, confidence: ArrayLike) -> Floats:
        """Return the map at each confidence. (N,) -> (N,)."""
        return np.asarray(np.interp(checked_confidence(confidence), self.knots, self.values), dtype=np.float64)


@dataclass(frozen=True)
class HistogramBinning:
    """Accuracy of the confidence's equal-width bin; an empty bin answers with its middle."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_shares("values", self.values)

    @classmethod
    def fit(cls, confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> Self:
        """Measure the accuracy of each bin. (N,), (N,)."""
        found = reliability(confidence, correct, bins)
        middle = (found.edges[1:] + found.edges[:-1]) / 2.0
        return cls(tuple(np.where(found.count > 0, found.accuracy, middle).tolist()))

    def apply(self, confidence: ArrayLike) -> Floats:
        """Return the value of each confidence's bin. (N,) -> (N,)."""
        c = checked_confidence(confidence)
        return np.asarray(self.values, dtype=np.float64)[bin_index(c, bin_edges(c, len(self.values)))]


Calibrator = Temperature | Platt | Isotonic | HistogramBinning

CALIBRATORS: dict[str, type[Calibrator]] = {
    "temperature": Temperature,
    "platt": Platt,
    "isotonic": Isotonic,
    "histogram": HistogramBinning,
}


def to_json(calibrator: Calibrator) -> dict[str, Any]:
    """Return the calibrator as a JSON object: schema version, kind, fields."""
    kind = next(name for name, cls in CALIBRATORS.items() if type(calibrator) is cls)
    return {"schema_version": SCHEMA_VERSION, "kind": kind, **asdict(calibrator)}


def from_json(value: object) -> Calibrator:
    """Return the calibrator of a JSON object, or raise ValueError saying which field is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    if value.get("schema_version") != SCHEMA_VERSION:
        found = shortened(repr(value.get("schema_version")), 60)
        raise ValueError(f"schema_version is {found}, this catto reads {SCHEMA_VERSION}")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in CALIBRATORS:
        raise ValueError(f"kind is {shortened(repr(kind), 60)}, expected one of {', '.join(CALIBRATORS)}")
    columns = {field.name: field.type != "float" for field in fields(CALIBRATORS[kind])}
    if set(value) - {"schema_version", "kind"} != set(columns):
        raise ValueError(f"a {kind} calibrator has the fields {', '.join(columns)}")
    return CALIBRATORS[kind](**{name: _numbers(name, value[name], many) for name, many in columns.items()})


def _numbers(name: str, value: object, many: bool) -> Any:
    if many:
        if not isinstance(value, list) or not value:
            raise ValueError(f"{name} is {shortened(repr(value), 60)}, expected a list of numbers")
        return tuple(_numbers(name, item, many=False) for item in value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} is {shortened(repr(value), 60)}, expected a finite number")
    return float(value)


def save(calibrator: Calibrator, path: Path) -> None:
    """Write the calibrator as JSON, whole or not at all."""
    with replacing(path) as file:
        json.dump(to_json(calibrator), file, indent=2, allow_nan=False)
        file.write("\n")


def load(path: Path) -> Calibrator:
    """Read a calibrator that `save` wrote; a bad file is one DataError that names it."""
    value = read_json(path)
    try:
        return from_json(value)
    except ValueError as error:
        raise DataError(path, None, str(error)) from None
