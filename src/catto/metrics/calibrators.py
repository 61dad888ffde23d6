"""Maps from stated to calibrated confidence, fitted on validation rows and stored as JSON.

A calibrator is an immutable value: `Temperature.fit(confidence, correct).apply(confidence)`. Its fields are the
complete fit, so a calibrator that was saved and loaded equals the fitted one to the last bit. SciPy and scikit-learn
are imported inside functions, because loading them takes up to a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field, TypeAdapter, model_validator

from catto.errors import DataError, data_errors_at, join_names, shorten_text
from catto.io.text_files import read_json
from catto.metrics.binning import Floats, Ints, bin_edges, bin_index, check_columns, check_confidence, reliability
from catto.metrics.errors import EPSILON, check_gold
from catto.records import Record

# Rows that are all right (or all wrong) push tau to 0 (or to infinity); the fit stops at these ends.
TAU_RANGE = (0.01, 100.0)
# Vector scaling's penalty: this times the sum of squares of its 2 K parameters is added to the mean NLL.
RIDGE = 1e-3
# Pads rows that have fewer labels than others. Its probability is 0 at every temperature in TAU_RANGE.
NO_LABEL = -1e6
# Largest tau, slope or intercept in a file; products of larger ones overflow.
LARGEST = 1e9

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bounded = Annotated[Number, Field(ge=-LARGEST, le=LARGEST)]
Share = Annotated[Number, Field(ge=0.0, le=1.0)]
Shares = Annotated[tuple[Share, ...], Field(min_length=1)]


class _Stored(Record):
    """The first field of every calibrator file."""

    schema_version: Literal[1] = 1


class Temperature(_Stored):
    """Divide the logit by the tau that minimises the NLL; the ranking, and thus the AUROC, stays the same.

    >>> Temperature(tau=2.0).apply([0.5, 0.9]).round(3).tolist()
    [0.5, 0.75]
    """

    kind: Literal["temperature"] = "temperature"
    tau: Annotated[Number, Field(ge=1.0 / LARGEST, le=LARGEST)]

    @classmethod
    def fit(cls, confidence: ArrayLike, correct: ArrayLike) -> Self:
        """Fit tau to the correctness of the answers: sigmoid(logit(c) / tau). (N,), (N,)."""
        c, z = check_columns(confidence, correct)
        score = _logits(c)

        def nll_slope(beta: float) -> float:
            # The derivative of the mean NLL with respect to beta = 1 / tau.
            surplus = _sigmoid(beta * score) - z
            return float(np.mean(surplus * score))

        return cls(tau=_solve_tau(nll_slope))

    def apply(self, confidence: ArrayLike) -> Floats:
        """Return sigmoid(logit(c) / tau). (N,) -> (N,)."""
        return _sigmoid(_logits(check_confidence(confidence)) / self.tau)

    @classmethod
    def fit_labels(cls, label_logprobs: ArrayLike, gold: ArrayLike) -> Self:
        """Fit tau to the gold labels: the softmax over the labels of log p / tau. (N, K), (N,) in [0, K)."""
        from scipy.special import log_softmax

        score = _check_logprobs(label_logprobs)
        gold_index = check_gold(gold, score.shape)
        gold_score = score[np.arange(len(score)), gold_index]

        def nll_slope(beta: float) -> float:
            # The derivative of the mean NLL with respect to beta = 1 / tau.
            probability = np.exp(log_softmax(beta * score, axis=1))
            mean_score = (probability * score).sum(axis=1)
            return float(np.mean(mean_score - gold_score))

        return cls(tau=_solve_tau(nll_slope))

    def apply_labels(self, label_logprobs: ArrayLike) -> Floats:
        """Return the label log-probabilities at tau, normalised over the labels. (N, K) -> (N, K)."""
        from scipy.special import log_softmax

        score = _check_logprobs(label_logprobs) / self.tau
        return np.asarray(log_softmax(score, axis=1), dtype=np.float64)


def _check_logprobs(label_logprobs: ArrayLike) -> Floats:
    """Check the log-probabilities of K labels in N rows, and return them as float64, (N, K).

    A ValueError is raised if one of them is not finite or is above 1e-6. The limit is not 0 because in float32, the
    logarithm of a probability of 1 may exceed 0 by rounding.
    """
    logprobs = np.asarray(label_logprobs, dtype=np.float64)
    if logprobs.ndim != 2 or 0 in logprobs.shape:
        raise ValueError(f"label_logprobs has shape {logprobs.shape}, expected (N, K)")
    is_valid = np.isfinite(logprobs) & (logprobs <= 1e-6)
    if not is_valid.all():
        row, label = np.argwhere(~is_valid)[0]
        value = logprobs[row, label]
        raise ValueError(f"label_logprobs[{row}, {label}] is {value}, expected a finite number <= 0")
    return logprobs


def _logits(confidence: Floats) -> Floats:
    """Return log(c / (1 - c)), with c clipped as in the NLL so that the logits of 0 and 1 are finite."""
    from scipy.special import logit

    clipped = np.clip(confidence, EPSILON, 1.0 - EPSILON)
    return np.asarray(logit(clipped), dtype=np.float64)


def _sigmoid(score: Floats) -> Floats:
    from scipy.special import expit

    return np.asarray(expit(score), dtype=np.float64)


def _solve_tau(nll_slope: Callable[[float], float]) -> float:
    """Return 1 / beta at which the slope of the NLL in beta is 0, or the end of TAU_RANGE closest to it.

    `nll_slope` is the derivative of the NLL with respect to beta = 1 / tau. The NLL is convex in beta, so the slope
    never decreases: it has one root, or none in the range.
    """
    from scipy.optimize import brentq

    smallest_tau, largest_tau = TAU_RANGE
    smallest_beta = 1.0 / largest_tau
    largest_beta = 1.0 / smallest_tau
    if nll_slope(smallest_beta) >= 0.0:  # the NLL rises with beta in the whole range
        return largest_tau
    if nll_slope(largest_beta) <= 0.0:  # the NLL falls with beta in the whole range
        return smallest_tau
    beta = float(brentq(nll_slope, smallest_beta, largest_beta, xtol=1e-14, rtol=1e-14))
    return 1.0 / beta


class Platt(_Stored):
    """Logistic regression on the logit: sigmoid(slope * logit(c) + intercept), without a penalty."""

    kind: Literal["platt"] = "platt"
    slope: Bounded
    intercept: Bounded

    @classmethod
    def fit(cls, confidence: ArrayLike, correct: ArrayLike) -> Self:
        """Fit slope and intercept; raise a ValueError if all rows are right or all are wrong. (N,), (N,)."""
        c, z = check_columns(confidence, correct)
        if z.all() or not z.any():
            raise ValueError("Platt needs right and wrong rows, got one kind only")
        from sklearn.linear_model import LogisticRegression

        regression = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000)
        regression.fit(_logits(c)[:, None], z)
        slope = float(regression.coef_[0, 0])
        intercept = float(regression.intercept_[0])
        return cls(slope=slope, intercept=intercept)

    def apply(self, confidence: ArrayLike) -> Floats:
        """Return sigmoid(slope * logit(c) + intercept). (N,) -> (N,)."""
        logits = _logits(check_confidence(confidence))
        return _sigmoid(self.slope * logits + self.intercept)


class Isotonic(_Stored):
    """The best non-decreasing map, linear between its knots and flat beyond them."""

    kind: Literal["isotonic"] = "isotonic"
    knots: Shares
    values: Shares

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if len(self.knots) != len(self.values):
            raise ValueError(f"isotonic has {len(self.knots)} knots and {len(self.values)} values")
        for numbers in (self.knots, self.values):
            for before, after in pairwise(numbers):
                if after < before:
                    raise ValueError("isotonic: knots and values must not decrease")
        return self

    @classmethod
    def fit(cls, confidence: ArrayLike, correct: ArrayLike) -> Self:
        """Fit by least squares under monotonicity. (N,), (N,)."""
        from sklearn.isotonic import IsotonicRegression

        c, z = check_columns(confidence, correct)
        regression = IsotonicRegression(y_min=0.0, y_max=1.0)
        regression.fit(c, z.astype(np.float64))
        return cls(knots=regression.X_thresholds_.tolist(), values=regression.y_thresholds_.tolist())

    def apply(self, confidence: ArrayLike) -> Floats:
        """Return the map at each confidence. (N,) -> (N,)."""
        c = check_confidence(confidence)
        return np.asarray(np.interp(c, self.knots, self.values), dtype=np.float64)


class HistogramBinning(_Stored):
    """Replace each confidence by the accuracy of its equal-width bin; for an empty bin, by its middle."""

    kind: Literal["histogram"] = "histogram"
    values: Shares

    @classmethod
    def fit(cls, confidence: ArrayLike, correct: ArrayLike, *, bins: int = 20) -> Self:
        """Measure the accuracy of each bin. (N,), (N,)."""
        measured = reliability(confidence, correct, bins)
        middle = (measured.edges[1:] + measured.edges[:-1]) / 2.0
        values = np.where(measured.count > 0, measured.accuracy, middle)
        return cls(values=values.tolist())

    def apply(self, confidence: ArrayLike) -> Floats:
        """Return the value of each confidence's bin. (N,) -> (N,)."""
        c = check_confidence(confidence)
        edges = bin_edges(c, len(self.values))
        values = np.asarray(self.values, dtype=np.float64)
        return values[bin_index(c, edges)]


class VectorScaling(_Stored):
    """A weight and a bias for each label: the softmax over the labels of weight * log p + bias.

    It reads the log-probabilities of all labels and changes which label is the most probable, so it also corrects a
    model that prefers one letter. Temperature scaling among the labels is the case of equal weights and no biases.

    >>> scaling = VectorScaling(labels=("A", "B"), weights=(1.0, 1.0), biases=(0.0, 1.0))
    >>> round(scaling.probability({"A": -0.7, "B": -0.7}, "B"), 3)
    0.731
    """

    kind: Literal["vector"] = "vector"
    labels: tuple[str, ...] = Field(min_length=2)
    weights: tuple[Bounded, ...]
    biases: tuple[Bounded, ...]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        label_count = len(self.labels)
        if len(set(self.labels)) < label_count:
            raise ValueError(f"vector: a label occurs twice in {', '.join(self.labels)}")
        if len(self.weights) != label_count or len(self.biases) != label_count:
            counts = f"{label_count} labels, {len(self.weights)} weights and {len(self.biases)} biases"
            raise ValueError(f"vector has {counts}, expected as many of each")
        return self

    @classmethod
    def fit_labels(cls, label_logprobs: ArrayLike, gold: ArrayLike, labels: Sequence[str]) -> Self:
        """Fit weights and biases to the gold labels, starting from the tau that `Temperature.fit_labels` finds.

        The weights are (1 + u) / tau and the biases are b. The fit finds the u and b, K numbers each, that minimise the
        mean NLL of the gold label plus RIDGE * (|u|^2 + |b|^2), a convex function. The fit starts at u = b = 0, which
        is temperature scaling and has no penalty. Its NLL is therefore never above that of temperature scaling. Without
        the penalty, the bias of a label that is never gold would tend to minus infinity.

        Args:
            label_logprobs: (N, K), the log-probability of each label.
            gold: (N,), the index of the gold label, in [0, K).
            labels: The K labels.

        Returns:
            The fitted calibrator.

        Raises:
            ValueError: A column is out of range, or `labels` are not K different labels.
        """
        from scipy.optimize import minimize

        logprobs = _check_logprobs(label_logprobs)
        gold_index = check_gold(gold, logprobs.shape)
        row_count, label_count = logprobs.shape
        tau = Temperature.fit_labels(logprobs, gold_index).tau
        score = logprobs / tau
        is_gold = np.zeros(logprobs.shape)
        is_gold[np.arange(row_count), gold_index] = 1.0

        start = np.zeros(2 * label_count)
        # Tight tolerances, so that the result hardly depends on the way there.
        options = {"maxiter": 10_000, "maxfun": 100_000, "ftol": 1e-15, "gtol": 1e-9}
        fit = minimize(
            _vector_loss_and_gradient, start, args=(score, is_gold), jac=True, method="L-BFGS-B", options=options
        )
        best = fit.x
        weights = (1.0 + best[:label_count]) / tau
        biases = best[label_count:]
        return cls(labels=tuple(labels), weights=weights.tolist(), biases=biases.tolist())

    def apply_labels(self, label_logprobs: ArrayLike) -> Floats:
        """Return the scaled log-probabilities, normalised over the labels. (N, K) -> (N, K)."""
        from scipy.special import log_softmax

        logprobs = _check_logprobs(label_logprobs)
        score = logprobs * np.array(self.weights) + np.array(self.biases)
        return np.asarray(log_softmax(score, axis=1), dtype=np.float64)

    def probability(self, logprobs: Mapping[str, float], label: str) -> float:
        """Return the scaled probability of one label of a row, in [0, 1].

        Args:
            logprobs: Label -> log-probability, for all labels of the fit and no others.
            label: One of these labels.

        Raises:
            ValueError: The labels are not those of the fit, or a log-probability is out of range.
        """
        if logprobs.keys() != set(self.labels):
            own_labels = ", ".join(logprobs)
            fitted_labels = ", ".join(self.labels)
            raise ValueError(f"its labels are {own_labels}, vector scaling was fitted on {fitted_labels}")
        row = [logprobs[name] for name in self.labels]
        scaled = self.apply_labels([row])
        return float(np.exp(scaled[0, self.labels.index(label)]))


def _vector_loss_and_gradient(parameters: Floats, score: Floats, is_gold: Floats) -> tuple[float, Floats]:
    """Return the objective of `VectorScaling.fit_labels`, and its gradient, (2 K,).

    Args:
        parameters: (2 K,), the changes u of the weights, followed by the biases b; see `VectorScaling.fit_labels`.
        score: (N, K), the log-probabilities divided by the best temperature.
        is_gold: (N, K), 1 at the gold label of each row and 0 elsewhere.

    Returns:
        The mean NLL plus the penalty, and its derivatives with respect to the parameters, (2 K,).
    """
    from scipy.special import log_softmax

    row_count, label_count = score.shape
    u = parameters[:label_count]
    b = parameters[label_count:]
    log_probability = log_softmax((1.0 + u) * score + b, axis=1)
    nll = -float((is_gold * log_probability).sum()) / row_count
    # The derivative of the NLL with respect to each scaled score, the argument of the softmax.
    score_slope = (np.exp(log_probability) - is_gold) / row_count
    u_slope = (score_slope * score).sum(axis=0)
    b_slope = score_slope.sum(axis=0)
    nll_gradient = np.concatenate([u_slope, b_slope])
    penalty = RIDGE * float(parameters @ parameters)
    penalty_gradient = 2.0 * RIDGE * parameters
    return nll + penalty, nll_gradient + penalty_gradient


def label_table(rows: Sequence[Mapping[str, float]]) -> tuple[tuple[str, ...], Floats]:
    """Put rows that all have the same labels into one table of log-probabilities.

    Args:
        rows: Label -> log-probability, for each row; at least one row.

    Returns:
        The K labels, in the order of the first row, and their log-probabilities in this order, (N, K).

    Raises:
        ValueError: A row does not have the labels of the first row. Their order may differ.

    >>> label_table([{"A": -1.0, "B": -2.0}, {"B": -3.0, "A": -4.0}])[1].tolist()
    [[-1.0, -2.0], [-4.0, -3.0]]
    """
    labels = tuple(rows[0])
    table = []
    for row_number, row in enumerate(rows, 1):
        if row.keys() != set(labels):
            difference = f"row 1 has {', '.join(labels)}, row {row_number} has {', '.join(row)}"
            reason = "vector scaling has a weight for each label, so all rows need the same labels"
            raise ValueError(f"{reason}: {difference}")
        table.append([row[label] for label in labels])
    return labels, np.array(table, dtype=np.float64)


def pad_label_logprobs(rows: Sequence[Mapping[str, float]], golds: Sequence[str]) -> tuple[Floats, Ints]:
    """Put rows with different labels into one table of log-probabilities, for `Temperature.fit_labels`.

    Each row keeps its own order of labels, so a column may contain different labels. The fit only needs to know the
    index of the gold label in each row.

    Args:
        rows: Label -> log-probability, for each row.
        golds: The gold label of each row, one of its labels.

    Returns:
        The log-probabilities, (N, K), where K is the largest number of labels in a row, and the indices of the gold
        labels, (N,). Rows with fewer labels are padded with NO_LABEL, whose probability is 0.

    >>> table, gold_index = pad_label_logprobs([{"A": -1.0, "B": -2.0}, {"C": -3.0}], ["B", "C"])
    >>> table.tolist(), gold_index.tolist()
    ([[-1.0, -2.0], [-3.0, -1000000.0]], [1, 0])
    """
    most_labels = max(len(row) for row in rows)
    table = np.full((len(rows), most_labels), NO_LABEL)
    gold_index = np.empty(len(rows), dtype=np.intp)
    for row_index, (row, gold) in enumerate(zip(rows, golds, strict=True)):
        labels = list(row)
        logprobs = list(row.values())
        table[row_index, : len(labels)] = logprobs
        gold_index[row_index] = labels.index(gold)
    return table, gold_index


ConfidenceCalibrator = Temperature | Platt | Isotonic | HistogramBinning  # maps one confidence to another
Calibrator = ConfidenceCalibrator | VectorScaling
CALIBRATORS: dict[str, type[ConfidenceCalibrator]] = {
    "temperature": Temperature,
    "platt": Platt,
    "isotonic": Isotonic,
    "histogram": HistogramBinning,
}
_STORED: TypeAdapter[Calibrator] = TypeAdapter(Annotated[Calibrator, Field(discriminator="kind")])


def read_calibrator(path: Path) -> Calibrator:
    """Read a calibrator that `catto calibrate fit` wrote; a bad file raises a DataError that names the field."""
    value = read_json(path)
    if isinstance(value, dict):  # the validation below rejects all other values
        if "kind" not in value:
            observed = f"has {join_names(list(value))}" if value else "is an empty object"
            expected = f"expected what catto calibrate fit writes (kind: {', '.join(CALIBRATORS)})"
            raise DataError(path, None, f"not a calibrator: it {observed}, {expected}")
        version = value.get("schema_version")
        if version != 1:  # checked before the kind, which a later version may add
            raise DataError(path, None, f"schema_version is {shorten_text(repr(version))}, this catto reads 1")
    with data_errors_at(path, value=value):
        return _STORED.validate_python(value)
