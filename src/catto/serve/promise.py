"""What the gateway promises about its answers, and how it withdraws a promise that feedback has disproved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from catto.calibrate import Fitted, RiskThreshold
from catto.metrics.alarm import bound_error_rate
from catto.records import content_hash

# A fitted calibrator is never exact: without a threshold, confidences may be too high by this much.
TOLERANCE = 0.05
ALARM = "feedback shows more errors than the calibration answers promised: fit calibrator and threshold again"


@dataclass(frozen=True)
class ServedPromise:
    """A promise that answers do not exceed an error rate.

    Attributes:
        digest: Identifies the promise in the log.
        error_rate: The promised rate for all answers above the threshold. None without a threshold; the rate of an
            answer is then one minus its confidence, plus TOLERANCE.
    """

    digest: str
    error_rate: float | None

    def find_allowed_rate(self, confidence: float) -> float:
        """Return the promised error rate of an answer with this calibrated confidence."""
        if self.error_rate is not None:
            return self.error_rate
        return min(1.0 - confidence + TOLERANCE, 1.0)

    def covers(self, reply_fields: Mapping[str, Any]) -> bool:
        """Whether the promise is about the answer with this `catto` object."""
        if self.error_rate is None:
            return reply_fields["confidence"] is not None
        return reply_fields["guarantee"] is not None and not reply_fields["abstained"]

    @property
    def broken_text(self) -> str:
        """A clause that says what is true if the promise is broken."""
        if self.error_rate is None:
            return f"confidences are more than {100 * TOLERANCE:g} points too high"
        return f"more than {100 * self.error_rate:.1f} % of the answers are wrong"


def make_promise(fitted: Fitted | None, threshold: RiskThreshold | None) -> ServedPromise | None:
    """Return the promise of a threshold, or else that of a calibrator; None if there is neither.

    A threshold promises its risk, or the bound on the error rate from the calibration answers if that is lower.
    """
    if threshold is not None:
        error_rate = bound_error_rate(threshold.errors, threshold.answered, threshold.risk)
        return ServedPromise(content_hash(threshold.model_dump()), error_rate)
    if fitted is not None:
        return ServedPromise(fitted.digest, None)
    return None


def withdraw_promise(reply_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `catto` object of an answer without its guarantee, with the alarm added to its reason."""
    reason = ALARM
    if reply_fields["reason"] is not None:
        reason = f"{reply_fields['reason']}; {ALARM}"
    return {**reply_fields, "guarantee": None, "reason": reason}
