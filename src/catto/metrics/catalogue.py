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
        definition: One sentence.
        better: The better direction; None if neither is better.
        percent: Whether the value is shown times 100.
        calibration: Whether a null band is printed next to the value.
        least: Smallest difference of interest, on the metric's own scale: 0.005 is 0.5 points of a metric in per cent.
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
        names: None means the headline metrics, `all` all of them.

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

    The i-th smallest of m becomes `max over j <= i of (m - j + 1) p_j`, at most 1. If each corrected p-value below
    alpha is reported as a difference, the probability that any of these differences is false is at most alpha.

    Args:
        p_values: The p-values. An undefined one (nan) stays nan and does not count.

    Returns:
        The corrected p-values, in the same order.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    defined = int(np.sum(~np.isnan(p)))
    rising = np.argsort(p, kind="stable")[:defined]  # nan sorts last
    factors = np.arange(defined, 0, -1)
    running_maximum = np.maximum.accumulate(factors * p[rising])
    corrected = np.full(len(p), np.nan)
    corrected[rising] = np.minimum(running_maximum, 1.0)
    return [float(value) for value in corrected]


@dataclass(frozen=True)
class Versus(Comparison):
    """A comparison with its p-value corrected for the number of comparisons; nan if it is not judged."""

    p_corrected: float = nan

    def mark(self, metric: str) -> Literal["", "*", "†"]:
        """Return `*` if a is better than b, a dagger if it is worse, and nothing if no difference is shown.

        A difference is shown if the corrected p-value is below ALPHA, the interval lies on the same side of 0 as the
        difference, and the difference is at least `Metric.least`. The p-value is not enough: for two nearly equal
        models, the swap test detects even a shift of every confidence by 0.001. Such a shift may have no effect on
        other questions or in practice.

        Args:
            metric: A name of METRICS, or `true_error`, a metric of the report.

        >>> Versus(0.05, 0.08, -0.03, -0.05, -0.01, 0.95, 0.002, p_corrected=0.004).mark("ece")
        '*'
        """
        if metric == "true_error":  # not in METRICS: it needs the true probabilities
            better: Literal["higher", "lower"] | None = "lower"
            least = Metric.least
        else:
            better = METRICS[metric].better
            least = METRICS[metric].least
        is_higher = self.difference > 0
        # Comparisons with nan are False: an undefined p-value or a removed interval gives no mark.
        excludes_zero = self.low > 0 if is_higher else self.high < 0
        is_large = abs(self.difference) >= least
        is_shown = excludes_zero and is_large and self.p_corrected < ALPHA
        if better is None or not is_shown:
            return ""
        is_better = is_higher == (better == "higher")
        return "*" if is_better else "†"


def correct_p_values(comparisons: Mapping[str, Comparison], judge: bool = True) -> dict[str, Versus]:
    """Correct the p-values of several metrics by Holm's method.

    Only metrics with a better direction are judged: the others get no corrected p-value and do not count as
    comparisons.

    Args:
        comparisons: Name of a metric -> comparison.
        judge: Whether to judge any metric. Use False if too many responses had no answer of their own: differences then
            do not describe the models.

    Returns:
        Name -> comparison with its corrected p-value, nan if it is not judged.

    >>> comparison = Comparison(0.05, 0.08, -0.03, -0.05, -0.01, 0.95, 0.002)
    >>> correct_p_values({"ece": comparison, "brier": comparison})["ece"].p_corrected
    0.004
    """
    judged = []
    for name in comparisons:
        if judge and METRICS[name].better is not None:
            judged.append(name)
    corrected = dict(zip(judged, holm([comparisons[name].p_value for name in judged]), strict=True))
    versus = {}
    for name, comparison in comparisons.items():
        versus[name] = Versus(**vars(comparison), p_corrected=corrected.get(name, nan))
    return versus
