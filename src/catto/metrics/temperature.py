"""Fit and apply a temperature to stored predictions, without running a model.

The logits z of the whole vocabulary are not stored. A prediction stores the log-probability log p_1(j) of every label j
at temperature 1 and, on a grid of tau, L(tau) = logsumexp(z / tau) - max(z) / tau. The margin of a label,
z_j - max(z), is log p_1(j) + L(1). Its log-probability among the whole vocabulary at any tau is therefore

    log p_tau(j) = (log p_1(j) + L(1)) / tau - L(tau)

Among the labels alone (`normalized`), the log-probability is log p_1(j) / tau minus the log-sum-exp of these numbers
over the labels. The probability of other tokens does not count, and no grid is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from typing import NamedTuple

import numpy as np

from catto.engines import TAU_GRID
from catto.methods import Rescaled
from catto.metrics.binning import Floats
from catto.metrics.calibrators import NO_LABEL, TAU_RANGE, Temperature, pad_label_logprobs
from catto.records import Prediction

INDEX_OF_TAU_1 = TAU_GRID.index(1.0)
# The share of a sum that float64 cannot distinguish from 0.
ROUNDING = 1e-15


def confidence_at(
    prediction: Prediction,
    tau: float = 1.0,
    kind: Rescaled = "raw",
) -> float:
    """Return the probability of the prediction's label at temperature tau, among all tokens or among the labels.

    Args:
        prediction: One prediction.
        tau: Temperature above 0. For `raw`, it must be within the range of TAU_GRID; the result is exact on the grid,
            and interpolated between its points (see `at_tau` for the accuracy).
        kind: `raw` is the probability among the whole vocabulary and needs the field `logsumexp`, except at tau 1.
            `normalized` is the probability among the labels and needs the field `label_logprobs`.

    Returns:
        A number in [0, 1]. A prediction without an answer keeps its stated confidence, whatever tau is.

    Raises:
        ValueError: A field that `kind` needs is missing, or tau is out of range.
    """
    stated = stated_confidence(prediction)
    if prediction.label is None:  # no answer
        return stated
    if kind == "normalized":
        return _normalized_confidence(prediction, prediction.label, tau)
    if tau == 1.0:
        return stated
    if prediction.logsumexp is None:
        raise ValueError(f"{prediction.name} has no logsumexp: its confidence is known at tau 1 only")
    if stated == 0.0:  # it has no logarithm, and it stays 0 at every temperature
        return stated
    margins, curve = _read_margins(prediction)
    # log p_tau = (log p_1 + L(1)) / tau - L(tau), where the curve contains L on TAU_GRID.
    own_margin = log(stated) + float(curve[INDEX_OF_TAU_1])
    log_probability = own_margin / tau - float(at_tau(margins, curve, tau))
    return min(1.0, exp(log_probability))  # rounding may give more than 1


def _normalized_confidence(
    prediction: Prediction,
    label: str,
    tau: float,
) -> float:
    """Return the label's share of the softmax over the labels at tau."""
    if prediction.label_logprobs is None:
        raise ValueError(f"{prediction.name} has no label_logprobs: its confidence cannot be normalized")
    if not (np.isfinite(tau) and tau > 0):
        raise ValueError(f"tau is {tau}, expected a number above 0")
    largest = max(prediction.label_logprobs.values())
    weight_of = {name: exp((logprob - largest) / tau) for name, logprob in prediction.label_logprobs.items()}
    return weight_of[label] / sum(weight_of.values())


def stated_confidence(prediction: Prediction) -> float:
    """Return the model's own confidence, even if a calibrator has been applied since."""
    if prediction.confidence_raw is None:
        return prediction.confidence
    return prediction.confidence_raw


class _Margins(NamedTuple):
    """What a prediction stores about its logits.

    Attributes:
        margins: (K,) known logits minus the largest logit of the vocabulary.
        curve: L at each of the G temperatures of TAU_GRID, (G,).
    """

    margins: Floats
    curve: Floats


def _read_margins(prediction: Prediction) -> _Margins:
    """Read the margins and the curve of a prediction; ValueError if the curve is incomplete.

    The known logits are those of the labels; without `label_logprobs`, only that of the answer.
    """
    stored = prediction.logsumexp or {}
    for tau in TAU_GRID:
        if str(tau) not in stored:
            raise ValueError(f"{prediction.name}: logsumexp has no entry for tau {tau}")
    curve = np.array([stored[str(tau)] for tau in TAU_GRID])
    if prediction.label_logprobs is None:
        logprobs = [log(stated_confidence(prediction))]
    else:
        logprobs = list(prediction.label_logprobs.values())
    margins = np.array(logprobs, dtype=np.float64) + float(curve[INDEX_OF_TAU_1])
    return _Margins(margins, curve)


def at_tau(
    margins: Floats,
    curve: Floats,
    tau: float,
) -> Floats:
    """Return L(tau) = log sum_j exp(margin_j / tau) over the whole vocabulary, from its values on a grid of tau.

    The margin of a token is its logit minus the largest logit of the vocabulary. K margins are known, usually those
    of the labels' tokens. On the grid, L is known as well, and with it the sum over all other tokens.

    Between grid points, the terms of the K tokens are computed, and the logarithm of the sum over the others is
    interpolated by a cubic spline in log tau. L itself is harder to interpolate. It bends sharply where the largest
    token, usually a label, stops dominating; without the labels' terms, the bend is gone.

    The error of a label's probability was measured on 200 random vocabularies of 1,000 to 50,000 logits and 400 taus.
    The largest error of all was 7e-4; the largest error of a vocabulary was 1e-4 on average. A spline of L itself was
    wrong by up to 2.2e-2.

    Args:
        margins: (..., K) known margins.
        curve: (..., G) L at each of the G temperatures of TAU_GRID.
        tau: A temperature within the range of the grid.

    Returns:
        L at tau, (...).

    Raises:
        ValueError: tau is outside the grid.

    >>> L = np.log(1.0 + np.exp(-1.0 / np.array(TAU_GRID)))
    >>> float(at_tau(np.array([0.0, -1.0]), L, 1.0)) == float(L[TAU_GRID.index(1.0)])
    True
    """
    if not TAU_GRID[0] <= tau <= TAU_GRID[-1]:
        raise ValueError(f"tau is {tau}, expected a number from {TAU_GRID[0]} to {TAU_GRID[-1]}, the stored range")
    if tau in TAU_GRID:
        return np.asarray(curve[..., TAU_GRID.index(tau)])
    grid = np.array(TAU_GRID)
    known_on_grid = np.exp(margins[..., None, :] / grid[:, None]).sum(axis=-1)
    total_on_grid = np.exp(curve)
    # If the known margins are nearly the whole sum, rounding may make the rest 0 or negative.
    rest_on_grid = np.maximum(total_on_grid - known_on_grid, ROUNDING * total_on_grid)
    log_rest = np.log(rest_on_grid) @ _spline_weights(float(tau))  # the spline's value at tau
    known = np.exp(margins / tau).sum(axis=-1)
    return np.asarray(np.log(known + np.exp(log_rest)))


@lru_cache(maxsize=1024)
def _spline_weights(tau: float) -> Floats:
    """Return weights (G,): `values @ weights` is the value at tau of the spline through values on the grid, (G,)."""
    from scipy.interpolate import CubicSpline

    # A spline is linear in its values, so the splines through the unit vectors give the weights.
    spline_of_units = CubicSpline(np.log(TAU_GRID), np.eye(len(TAU_GRID)))
    return np.asarray(spline_of_units(log(tau)))


@dataclass(frozen=True)
class Scaling:
    """A fitted temperature.

    Attributes:
        tau: The temperature.
        nll_at_one: Mean NLL of the gold label at temperature 1.
        nll: Mean NLL of the gold label at tau.
        rows: Number of predictions used.
        left_out: Number of predictions without the fields that the fit needs.
        at_edge: Whether tau is an end of the range of the search; the best tau may lie beyond it.
    """

    tau: float
    nll_at_one: float
    nll: float
    rows: int
    left_out: int
    at_edge: bool


def fit_tau(predictions: Sequence[Prediction], kind: Rescaled = "raw") -> Scaling:
    """Fit the tau that minimises the NLL of the gold label, the mean of -log p_tau(gold).

    `rescale_predictions` then applies tau to the test predictions. With `decode: sample`, as in the paper, these are
    also sampled at temperature tau. With `decode: greedy`, as in textbooks, tau changes their confidence only.

    Args:
        predictions: Validation predictions; those without the fields that `kind` needs are left out.
        kind: `raw` for probabilities among the whole vocabulary, which need the fields `label_logprobs` and
            `logsumexp`. tau is then within TAU_GRID. `normalized` for probabilities among the labels, which need
            `label_logprobs` only. tau is then that of `Temperature.fit_labels`, within TAU_RANGE.

    Returns:
        The fitted tau, the NLL at temperature 1 and at tau, and whether tau is an end of its range, beyond which the
        best one may lie.

    Raises:
        ValueError: No prediction has the fields, or a gold label is not among the labels.
    """
    from scipy.special import logsumexp

    usable = _select_usable(predictions, kind)
    scores = _gather_scores(usable, kind)

    def mean_nll(tau: float) -> float:
        # -log p_tau(gold) = logsumexp(z / tau) - z_gold / tau, where z are the scores of all tokens or of the labels.
        if scores.curves is None:  # kind is `normalized`
            log_sum = logsumexp(scores.margins / tau, axis=1)
        else:
            log_sum = at_tau(scores.margins, scores.curves, tau)
        return float(np.mean(log_sum - scores.gold / tau))

    if kind == "raw":
        ends = (TAU_GRID[0], TAU_GRID[-1])
        tau = _minimise_on_range(mean_nll, ends)
    else:
        ends = TAU_RANGE
        tau = _fit_among_labels(usable)
    return Scaling(
        tau,
        nll_at_one=mean_nll(1.0),
        nll=mean_nll(tau),
        rows=len(usable),
        left_out=len(predictions) - len(usable),
        at_edge=tau in ends,
    )


def _select_usable(predictions: Sequence[Prediction], kind: Rescaled) -> list[Prediction]:
    """Return the predictions with the fields that `kind` needs, or raise ValueError if there are none."""
    needed = ("label_logprobs", "logsumexp") if kind == "raw" else ("label_logprobs",)
    usable = []
    for prediction in predictions:
        if all(getattr(prediction, name) is not None for name in needed):
            usable.append(prediction)
    if not usable:
        raise ValueError(f"no prediction has {' and '.join(needed)}: tau cannot be fitted")
    return usable


def _fit_among_labels(predictions: Sequence[Prediction]) -> float:
    """Fit tau to label log-probabilities alone; the predictions may have different labels."""
    rows = []
    golds = []
    for prediction in predictions:
        rows.append(prediction.label_logprobs or {})  # never None here, see `_select_usable`
        golds.append(prediction.gold)
    table, gold_index = pad_label_logprobs(rows, golds)
    # A stored probability may be 0; its logarithm must be finite.
    finite = np.maximum(table, NO_LABEL)
    return Temperature.fit_labels(finite, gold_index).tau


def _minimise_on_range(mean_nll: Callable[[float], float], ends: tuple[float, float]) -> float:
    """Return the tau between two ends, or at one of them, that has the lowest NLL."""
    from scipy.optimize import minimize_scalar

    best = minimize_scalar(
        lambda log_tau: mean_nll(exp(log_tau)),
        bounds=(log(ends[0]), log(ends[1])),
        method="bounded",
        options={"xatol": 1e-7},
    )
    # The search comes close to the ends but never tries them.
    best_inside = exp(float(best.x))
    return min((best_inside, *ends), key=mean_nll)


class _GoldScores(NamedTuple):
    """The label scores of N predictions, from which the NLL at any tau is computed.

    Attributes:
        margins: (N, K) scores of the labels: margins for `raw`, log-probabilities for `normalized`. Rows with fewer
            than K labels are padded with -inf.
        gold: (N,) score of the gold label.
        curves: For `raw`, L at each of the G temperatures of TAU_GRID, (N, G); None for `normalized`.
    """

    margins: Floats
    gold: Floats
    curves: Floats | None


def _gather_scores(predictions: Sequence[Prediction], kind: Rescaled) -> _GoldScores:
    """Collect the scores of predictions with the fields that `kind` needs; ValueError if a gold label has no score."""
    most_labels = max(len(prediction.label_logprobs or ()) for prediction in predictions)
    margins = np.full((len(predictions), most_labels), -np.inf)
    gold = np.empty(len(predictions))
    curves = []
    for row, prediction in enumerate(predictions):
        logprob_of_label = prediction.label_logprobs or {}
        if prediction.gold not in logprob_of_label:
            raise ValueError(f"{prediction.name}: gold {prediction.gold!r} is not among label_logprobs")
        scores = np.array(list(logprob_of_label.values()))
        if kind == "raw":
            scores, curve = _read_margins(prediction)  # of the same labels, in the same order
            curves.append(curve)
        margins[row, : len(scores)] = scores
        gold[row] = scores[list(logprob_of_label).index(prediction.gold)]
    return _GoldScores(margins, gold, np.stack(curves) if curves else None)


def rescale_predictions(
    predictions: Sequence[Prediction],
    tau: float,
    kind: Rescaled = "raw",
) -> list[Prediction]:
    """Return the same answers with their confidence at tau.

    Args:
        predictions: Predictions with the fields that `kind` needs. A prediction without an answer needs none, and keeps
            the confidence that the model stated.
        tau: Temperature above 0; for `raw`, within the range of TAU_GRID.
        kind: `raw` for the probability among the whole vocabulary, which needs the field `logsumexp` unless tau is 1.
            `normalized` for the probability among the labels, which needs the field `label_logprobs`.

    Returns:
        Copies of the predictions. Whatever the kind is, the field `confidence_raw` has the confidence that the model
        stated, before any rescaling or calibration.

    Raises:
        ValueError: A field that `kind` needs is missing, or tau is out of range.
    """
    rescaled = []
    for prediction in predictions:
        update = {
            "confidence": confidence_at(prediction, tau, kind),
            "confidence_raw": stated_confidence(prediction),
        }
        rescaled.append(prediction.model_copy(update=update))
    return rescaled
