"""Every metric under one name, and METRICS: the table that the command line and the report read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from numpy.typing import ArrayLike

from catto.metrics.binning import Reliability, RowMetric, Strategy, reliability
from catto.metrics.errors import (
    EPSILON,
    BrierSplit,
    L1Split,
    accuracy,
    brier,
    brier_split,
    confidence_gap,
    debiased_ece,
    ece,
    ece_mass,
    l1_binned,
    l1_groups,
    l1_risk,
    label_nll,
    mce,
    mean_confidence,
    nll,
    per_class_ece,
    rms_calibration_error,
    smooth_ece,
    true_class_ece,
    weighted_ece,
)
from catto.metrics.ranking import (
    RiskCoverage,
    Within,
    accuracy_at_coverage,
    aurc,
    auroc,
    auroc_within,
    coverage_at_risk,
    e_aurc,
    risk_coverage,
)

__all__ = [
    "EPSILON",
    "METRICS",
    "BrierSplit",
    "L1Split",
    "Metric",
    "Reliability",
    "RiskCoverage",
    "Strategy",
    "Within",
    "accuracy",
    "accuracy_at_coverage",
    "aurc",
    "auroc",
    "auroc_within",
    "brier",
    "brier_split",
    "confidence_gap",
    "coverage_at_risk",
    "debiased_ece",
    "e_aurc",
    "ece",
    "ece_mass",
    "l1_binned",
    "l1_groups",
    "l1_risk",
    "label_nll",
    "mce",
    "mean_confidence",
    "nll",
    "per_class_ece",
    "reliability",
    "risk_coverage",
    "rms_calibration_error",
    "smooth_ece",
    "true_class_ece",
    "weighted_ece",
]


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    `better` is None where neither direction is. `calibration`: a null band is printed beside the value. `least` is the
    smallest difference of interest, on the metric's own scale: 0.005 is 0.5 points of a metric in per cent.
    """

    function: RowMetric
    title: str
    definition: str
    better: Literal["higher", "lower"] | None
    percent: bool
    calibration: bool = False
    least: float = 0.005

    def __call__(self, confidence: ArrayLike, correct: ArrayLike) -> float:
        """Compute the metric. (N,), (N,)."""
        return self.function(confidence, correct)


METRICS: dict[str, Metric] = {
    "accuracy": Metric(accuracy, "Accuracy", "Share of answers that are right.", "higher", True),
    "mean_confidence": Metric(mean_confidence, "Mean confidence", "Mean of the stated confidences.", None, True),
    "ece": Metric(
        ece, "ECE", "Mean distance of accuracy and confidence over bins of equal width.", "lower", True, True
    ),
    "debiased_ece": Metric(
        debiased_ece,
        "Debiased ECE",
        "ECE less the part that chance adds to each bin, as far as it can be estimated.",
        "lower",
        True,
        True,
    ),
    "smooth_ece": Metric(
        smooth_ece,
        "Smooth ECE",
        "Calibration error smoothed by a Gaussian kernel as wide as the error itself; it has no bins.",
        "lower",
        True,
        True,
    ),
    "ece_mass": Metric(
        ece_mass,
        "ECE, equal mass",
        "Mean distance of accuracy and confidence over bins that hold equally many answers.",
        "lower",
        True,
        True,
    ),
    "mce": Metric(
        mce, "MCE", "Largest distance of accuracy and confidence over bins of equal width.", "lower", True, True
    ),
    "rms": Metric(
        rms_calibration_error,
        "RMS calibration error",
        "Root of the mean squared distance of accuracy and confidence over bins of equal width.",
        "lower",
        True,
        True,
    ),
    "brier": Metric(brier, "Brier score", "Mean squared distance of confidence and correctness.", "lower", False),
    "nll": Metric(
        nll,
        "NLL",
        "Mean negative log-likelihood of being right or wrong under the confidence.",
        "lower",
        False,
        least=0.01,
    ),
    "auroc": Metric(
        auroc,
        "AUROC",
        "Chance that a right answer is more confident than a wrong one; ties count half.",
        "higher",
        True,
    ),
    "aurc": Metric(
        aurc, "AURC", "Error rate among the most confident answers, averaged over all coverages.", "lower", False
    ),
    "e_aurc": Metric(
        e_aurc, "Excess AURC", "AURC above that of the best possible order of the same answers.", "lower", False
    ),
    "l1": Metric(l1_risk, "L1 risk", "Mean absolute distance of confidence and correctness.", "lower", False),
}
