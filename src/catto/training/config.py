"""`CATTOConfig`: TRL's DPO configuration with the calibration term's few knobs."""

from __future__ import annotations

import copy
import math
import numbers
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
from trl import DPOConfig

from catto.methods import KNOBS, weight_of

CALIBRATIONS = ("none", "catto", "bce", "l1", "brier", "outcome", "replay")


@dataclass
class CATTOConfig(DPOConfig):  # type: ignore[misc]
    """TRL's `DPOConfig`, defaults kept, plus the calibration term: L = L_DPO + calibration_weight * term.

    bf16 stays TRL's default where there is an accelerator and is off on a CPU.
    """

    calibration: str = field(
        default="catto", metadata={"help": "The term beside DPO's: none, catto, bce, l1, brier, outcome or replay."}
    )
    calibration_weight: float | None = field(
        default=None, metadata={"help": "Lambda. None: 0.1; replay and outcome 1.0, outcome with score log 0.3."}
    )
    reduce: str | None = field(
        default=None, metadata={"help": "Over a response's tokens: mean or sum. None: the mean, for bce the sum."}
    )
    detach_surrogate: bool = field(
        default=False, metadata={"help": "Whether the surrogate of correctness is held fixed in the gradient."}
    )
    calibrate_tokens: str = field(
        default="all", metadata={"help": "Which tokens of a response the term reads: all, or only the label."}
    )
    outcome_score: str = field(default="brier", metadata={"help": "The outcome's proper score: brier or log."})
    outcome_rows_per_pair: int = field(
        default=2, metadata={"help": "Responses of the third stream that go with every pair of the batch."}
    )
    prefix_sharing: bool = field(
        default=False, metadata={"help": "Whether a prompt is computed once for all responses to it."}
    )

    def __post_init__(self) -> None:
        if getattr(self, "bf16", None) is None and not torch.accelerator.is_available():
            self.bf16 = False
        super().__post_init__()
        _one_of("calibration", self.calibration, CALIBRATIONS)
        _one_of("reduce", self.reduce, (None, "mean", "sum"))
        _one_of("calibrate_tokens", self.calibrate_tokens, ("all", "label"))
        _one_of("outcome_score", self.outcome_score, ("brier", "log"))
        weight = self.calibration_weight
        if weight is not None and not (_number(weight) and 0 <= weight < math.inf):
            raise ValueError(f"calibration_weight is {weight!r}, expected a number of at least 0")
        if type(self.outcome_rows_per_pair) is not int or self.outcome_rows_per_pair < 1:
            raise ValueError(f"outcome_rows_per_pair is {self.outcome_rows_per_pair!r}, expected at least 1")
        self._refuse_knobs_without_effect()

    def _refuse_knobs_without_effect(self) -> None:
        """Refuse a knob that the chosen term does not read; a value equal to the default says nothing."""
        defaults = {knob.name: knob.default for knob in fields(type(self))}
        for name, terms in KNOBS.items():
            value = getattr(self, name)
            silent = value == defaults[name] or (name == "calibration_weight" and value == 0)
            if self.calibration not in terms and not silent:
                raise ValueError(
                    f"{name} is {value!r} but calibration is {self.calibration!r}: it acts with {', '.join(terms)} only"
                )

    @property
    def weight(self) -> float:
        """Lambda as it acts."""
        default = weight_of(self.calibration, self.outcome_score)  # type: ignore[arg-type]
        return default if self.calibration_weight is None else self.calibration_weight

    @classmethod
    def of(cls, config: DPOConfig) -> Self:
        """The same configuration with our knobs at their defaults, where it has none."""
        if isinstance(config, cls):
            return config
        made = copy.copy(config)
        made.__class__ = cls
        for knob in fields(cls):
            if knob.name not in vars(made):
                setattr(made, knob.name, knob.default)
        return made  # type: ignore[no-any-return]


def _number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _one_of(name: str, value: Any, expected: tuple[Any, ...]) -> None:
    if value not in expected:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(str, expected))}")
