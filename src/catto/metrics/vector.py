"""Vector scaling of stored predictions: a weight and a bias for each label. No model is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from catto.metrics.binning import Floats
from catto.metrics.calibrators import VectorScaling, label_table
from catto.metrics.temperature import stated_confidence
from catto.records import Prediction


@dataclass(frozen=True)
class VectorFit:
    """A fitted vector scaling.

    Attributes:
        scaling: The calibrator.
        nll_unscaled: Mean NLL of the gold label among the labels, before scaling.
        nll: Mean NLL of the gold label among the labels, after scaling.
        rows: Number of predictions used.
        left_out: Number of predictions without label log-probabilities.
    """

    scaling: VectorScaling
    nll_unscaled: float
    nll: float
    rows: int
    left_out: int


def fit_vector(predictions: Sequence[Prediction]) -> VectorFit:
    """Fit vector scaling to the gold labels of stored predictions.

    Args:
        predictions: Validation predictions. Those without `label_logprobs` are left out; the others must all have the
            same labels.

    Returns:
        The fitted scaling, and the NLL before and after it.

    Raises:
        ValueError: No prediction has `label_logprobs`, two predictions have different labels, or a gold label is not
            among the labels.
    """
    usable = []
    logprobs_of_labels = []
    for prediction in predictions:
        if prediction.label_logprobs is not None:
            usable.append(prediction)
            logprobs_of_labels.append(prediction.label_logprobs)
    if not usable:
        raise ValueError("no prediction has label_logprobs: vector scaling cannot be fitted")
    labels, logprobs = label_table(logprobs_of_labels)
    gold = []
    for prediction in usable:
        if prediction.gold not in labels:
            raise ValueError(f"{prediction.name}: gold {prediction.gold!r} is not among label_logprobs")
        gold.append(labels.index(prediction.gold))
    scaling = VectorScaling.fit_labels(logprobs, gold, labels)
    # Weights of 1 and biases of 0 only normalise the log-probabilities over the labels.
    ones = (1.0,) * len(labels)
    zeros = (0.0,) * len(labels)
    no_scaling = VectorScaling(labels=labels, weights=ones, biases=zeros)
    return VectorFit(
        scaling=scaling,
        nll_unscaled=_mean_nll(no_scaling.apply_labels(logprobs), gold),
        nll=_mean_nll(scaling.apply_labels(logprobs), gold),
        rows=len(usable),
        left_out=len(predictions) - len(usable),
    )


def _mean_nll(log_probability: Floats, gold: Sequence[int]) -> float:
    return -float(log_probability[np.arange(len(gold)), gold].mean())


def scale_by_vector(predictions: Sequence[Prediction], scaling: VectorScaling) -> list[Prediction]:
    """Return the same answers with their scaled confidence.

    Args:
        predictions: Predictions with `label_logprobs`. One without a label needs none, and keeps its stated confidence.
        scaling: The fitted calibrator.

    Returns:
        Copies of the predictions. `confidence_raw` keeps the stated confidence.

    Raises:
        ValueError: A prediction has a label but no `label_logprobs`, or its labels are not those of the fit.
    """
    scaled = []
    for prediction in predictions:
        stated = stated_confidence(prediction)
        confidence = stated
        if prediction.label is not None:
            if prediction.label_logprobs is None:
                raise ValueError(f"{prediction.name} has no label_logprobs: its confidence cannot be scaled")
            confidence = scaling.probability(prediction.label_logprobs, prediction.label)
        scaled.append(prediction.model_copy(update={"confidence": confidence, "confidence_raw": stated}))
    return scaled
