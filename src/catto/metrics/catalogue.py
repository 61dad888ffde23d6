"""METRICS, the table of metrics for the command line and the report, and the marks of comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from catto.errors import did_you_mean
from catto.metrics import errors, ranking
from catto.metrics.binning import Score
from catto.metrics.comparisons import ALPHA
from catto.metrics.intervals import Comparison
from catto.metrics.resampling import MetricFunction


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Attributes:
        function: A function of `confidence` and `correct`, (N,) each. If it has a keyword `weight`, its bootstrap is
            fast. If it has a keyword `bins`, it receives the number of bins that the user chose.
        title: Name in tables.
        definition: What the metric measures, in one sentence.
        better: Whether a higher or a lower value is better; None if neither is.
        percent: Whether the value is shown times 100.
        calibration: Whether the metric is a calibration error, next to which a null band is printed.
        least: Smallest difference that is marked, on the metric's own scale. If values are shown times 100, 0.005 is
            half a point.
    """

    function: MetricFunction
    title: str
    definition: str
    better: Literal["higher", "lower"] | None
    percent: bool
    calibration: bool = False
    least: float = 0.005

    def __call__(self, confidence: ArrayLike, correct: ArrayLike, **options: Any) -> Score:
        """Compute the metric.

        Args:
            confidence: (N,) in [0, 1].
            correct: (N,) booleans or 0/1.
            options: Keywords of the function, such as `weight`, and `bins` for those with bins.
        """
        return self.function(confidence, correct, **options)


_error = partial(Metric, better="lower", percent=True, calibration=True)
_loss = partial(Metric, better="lower", percent=False)

METRICS: dict[str, Metric] = {
    "accuracy": Metric(errors.accuracy, "Accuracy", "Share of answers that are right.", "higher", True),
    "mean_confidence": Metric(errors.mean_confidence, "Mean confidence", "Mean of the stated confidences.", None, True),
    "ece": _error(errors.ece, "ECE", "Mean distance between accuracy and confidence over bins of equal width."),
    "debiased_ece": _error(
        errors.debiased_ece,
        "Debiased ECE",
        "ECE minus the part that chance adds to each bin, as far as it can be estimated.",
    ),
    "smooth_ece": _error(
        errors.smooth_ece,
        "Smooth ECE",
        "Calibration error smoothed by a Gaussian kernel as wide as the error itself; it has no bins.",
    ),
    "ece_mass": _error(
        errors.ece_mass,
        "ECE, equal mass",
        "Mean distance between accuracy and confidence over bins that hold equally many answers.",
    ),
    "mce": _error(errors.mce, "MCE", "Largest distance between accuracy and confidence over bins of equal width."),
    "rms": _error(
        errors.rms_calibration_error,
        "RMS calibration error",
        "Root of the mean squared distance between accuracy and confidence over bins of equal width.",
    ),
    "brier": _loss(errors.brier, "Brier score", "Mean squared distance between confidence and correctness."),
    "nll": _loss(
        errors.nll, "NLL", "Mean negative log-likelihood of being right or wrong under the confidence.", least=0.01
    ),
    "auroc": Metric(
        ranking.auroc,
        "AUROC",
        "Chance that a right answer is more confident than a wrong one; ties count half.",
        "higher",
        True,
    ),
    "aurc": _loss(ranking.aurc, "AURC", "Error rate among the most confident answers, averaged over all coverages."),
    "e_aurc": _loss(ranking.e_aurc, "Excess AURC", "AURC above that of the best possible order of the same answers."),
    "l1": _loss(errors.l1_risk, "L1 risk", "Mean absolute distance between confidence and correctness."),
}

HEADLINE = ("accuracy", "mean_confidence", "ece", "debiased_ece", "smooth_ece", "brier", "nll", "auroc", "aurc")


def parse_metrics(names: str | None) -> tuple[str, ...]:
    """Return the metrics of a comma-separated list.

    Args:
        names: Names of METRICS, separated by commas. `all` means every metric, and None means those of HEADLINE.

    Returns:
        The names in the order of the list, each once.

    Raises:
        ValueError: A name is unknown, or the list is empty.

    >>> parse_metrics("ece, brier")
    ('ece', 'brier')
    """
    if names is None:
        return HEADLINE
    if names.strip() == "all":
        return tuple(METRICS)
    listed = [name.strip() for name in names.split(",") if name.strip()]
    known = ", ".join(METRICS)
    for name in listed:
        if name not in METRICS:
            raise ValueError(f"unknown metric {name!r}{did_you_mean(name, METRICS)} (known: {known})")
    if not listed:
        raise ValueError(f"no metric named (known: {known})")
    return tuple(dict.fromkeys(listed))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for the number of comparisons (Holm, 1979).

    With p_j the j-th smallest of m p-values, p_i becomes `max over j <= i of (m - j + 1) p_j`, at most 1. If each
    corrected p-value below alpha is reported as a difference, the probability that any of these differences is false is
    at most alpha.

    Args:
        p_values: The p-values. An undefined one (nan) stays nan and is not counted in m.

    Returns:
        The corrected p-values, in the same order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    m = int(np.sum(~np.isnan(p)))
    order = np.argsort(p, kind="stable")
    increasing = order[:m]  # indices of the defined p-values; nan is last in the order
    factors = np.arange(m, 0, -1)
    running_maximum = np.maximum.accumulate(factors * p[increasing])
    corrected = np.full(len(p), np.nan)
    corrected[increasing] = np.minimum(running_maximum, 1.0)
    return [float(value) for value in corrected]


@dataclass(frozen=True)
class Versus(Comparison):
    """A comparison with its p-value corrected for the number of comparisons; nan if it is not judged."""

    p_corrected: float = nan

    def mark(self, metric: str) -> Literal["", "*", "†"]:
        """Return `*` if a is better than b, `†` if it is worse, and an empty string if the difference is not marked.

        A difference is marked if the corrected p-value is below ALPHA, the interval is on the same side of 0 as the
        difference, and the difference is at least `Metric.least`. The p-value is not enough: for two nearly equal
        models, the swap test detects even a shift of every confidence by 0.001. Such a shift may have no effect on
        other questions or in practice. A metric without a better direction is never marked.

        Args:
            metric: A name of METRICS, or `true_error`, a metric of the report.

        Returns:
            The mark.

        >>> Versus(0.05, 0.08, -0.03, -0.05, -0.01, 0.95, 0.002, p_corrected=0.004).mark("ece")
        '*'
        """
        if metric == "true_error":  # not in METRICS: it needs the true probabilities
            better: Literal["higher", "lower"] | None = "lower"
            least = Metric.least  # the default of the field
        else:
            better = METRICS[metric].better
            least = METRICS[metric].least
        is_higher = self.difference > 0
        # Comparisons with nan are False: an undefined p-value or a removed interval gives no mark.
        excludes_zero = self.low > 0 if is_higher else self.high < 0
        is_large = abs(self.difference) >= least
        is_marked = excludes_zero and is_large and self.p_corrected < ALPHA
        if better is None or not is_marked:
            return ""
        is_better = is_higher == (better == "higher")
        return "*" if is_better else "†"


def correct_p_values(comparisons: Mapping[str, Comparison], judge: bool = True) -> dict[str, Versus]:
    """Correct the p-values of several metrics by Holm's method, see `holm`.

    Only metrics of which higher or lower values are better are judged. The others, such as the mean confidence, do not
    count in the correction, and their corrected p-value is nan.

    Args:
        comparisons: Name of a metric in METRICS -> comparison.
        judge: Whether to judge any metric. Use False if too many responses had no readable answer, so that the most
            probable label was taken: differences then do not describe the models, and every corrected p-value is nan.

    Returns:
        Name -> comparison with its corrected p-value.

    >>> comparison = Comparison(0.05, 0.08, -0.03, -0.05, -0.01, 0.95, 0.002)
    >>> correct_p_values({"ece": comparison, "brier": comparison})["ece"].p_corrected
    0.004
    """
    judged = []
    for name in comparisons:
        if judge and METRICS[name].better is not None:
            judged.append(name)
    p_values = [comparisons[name].p_value for name in judged]
    corrected = dict(zip(judged, holm(p_values), strict=True))
    versus = {}
    for name, comparison in comparisons.items():
        versus[name] = Versus(**vars(comparison), p_corrected=corrected.get(name, nan))
    return versus
