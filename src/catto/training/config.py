"""`CATTOConfig`: TRL's DPO configuration with the options of the calibration term."""

from __future__ import annotations

import copy
import logging
import math
import numbers
import os
from dataclasses import dataclass, field, fields
from typing import Any, Self, get_args

import torch
from transformers import TrainingArguments
from trl import DPOConfig

from catto.methods import TERM_OPTIONS, WEIGHTS, Calibration
from catto.objectives.tiles import Precision, cpu_bf16_slowdown
from catto.records import Question

logger = logging.getLogger(__name__)
CHOICES: dict[str, tuple[Any, ...]] = {
    "calibration": get_args(Calibration),
    "reduce": (None, "mean", "sum"),
    "calibrate_tokens": ("all", "label"),
    "preference_tokens": ("all", "reasoning"),
    "outcome_score": ("log", "brier"),
    "outcome_target": ("gold", "votes", "mix"),
    "head_precision": get_args(Precision),
}


def warn_of_slow_bf16(args: TrainingArguments) -> None:
    """Warn where training would compute in bf16 on a processor that is slower in it."""
    on_cpu = args.use_cpu or not torch.accelerator.is_available()
    if args.bf16 and on_cpu and (slowdown := cpu_bf16_slowdown()) > 1.25:  # the measurement has some noise
        logger.warning("bf16 is on, and takes %.1f times as long as fp32 on this processor: set bf16=False", slowdown)


def option(default: Any, text: str, **more: Any) -> Any:
    """Return an option of a configuration with its help text, and what else `HfArgumentParser` makes of it."""
    return field(default=default, metadata={"help": text, **more})


def _listed_questions(value: Any) -> list[Question] | str | None:
    """A path as a string, questions as a list; questions of a configuration that was stored are JSON values."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    return [one if isinstance(one, Question) else Question.model_validate(one) for one in value]


@dataclass
class CATTOConfig(DPOConfig):  # type: ignore[misc]
    """TRL's `DPOConfig`, defaults kept, plus the calibration term: L = L_DPO + calibration_weight * term.

    bf16 stays TRL's default where there is an accelerator and is off on a CPU.
    """

    calibration: str = option("catto", "The term beside DPO's: none, catto, bce, l1, brier, outcome or replay.")
    calibration_weight: float | None = option(None, "Lambda. None: 0.1; replay and outcome 1.0.")
    reduce: str | None = option(None, "Over a response's tokens: mean or sum. None: the mean, for bce the sum.")
    detach_surrogate: bool = option(False, "Whether the surrogate of correctness is held fixed in the gradient.")
    calibrate_tokens: str = option("all", "Which tokens of a response the term reads: all, or only the label.")
    preference_tokens: str = option(
        "all", "Which tokens of a response the preference loss reads: all, or only the reasoning before the label."
    )
    outcome_score: str = option("log", "The outcome's proper score: log or brier.")
    outcome_target: str = option(
        "gold", "What the outcome's score aims at: the gold label, the votes of the start model, or the mean of both."
    )
    outcome_samples: int = option(8, "Samples per question that vote, with outcome_target votes or mix.")
    calibration_questions: list[Question] | str | None = field(
        default=None,
        metadata={
            "help": "File of questions with known answers; the start model's responses form the outcome's stream."
        },
    )
    outcome_rows_per_pair: int = option(2, "Responses of the third stream that go with every pair of the batch.")
    prefix_sharing: bool = option(False, "Whether a prompt is computed once for all responses to it.")
    padding_free: bool | None = option(  # as a flag too, which the parser makes by itself only of what is never None
        None, "Whether rows are packed, not padded. None: on CUDA, where FlexAttention runs.", nargs="?", const=True
    )
    head_precision: str = option("auto", "The head's products: auto (16-bit inputs and fp32 results on a GPU) or fp32.")

    def __post_init__(self) -> None:
        if getattr(self, "bf16", None) is None and not torch.accelerator.is_available():
            self.bf16 = False
        super().__post_init__()
        warn_of_slow_bf16(self)
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(map(str, choices))}")
        weight = self.calibration_weight
        number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if weight is not None and not (number and 0 <= weight < math.inf):
            raise ValueError(f"calibration_weight is {weight!r}, expected a number of at least 0")
        for name in ("outcome_rows_per_pair", "outcome_samples"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, expected at least 1")
        if self.outcome_target == "gold" and self.outcome_samples != CATTOConfig.outcome_samples:
            raise ValueError(
                f"outcome_samples is {self.outcome_samples} but outcome_target is 'gold', which has no votes"
            )
        self.calibration_questions = _listed_questions(self.calibration_questions)
        if self.preference_tokens == "reasoning" and set(self.loss_type) == {"sft"}:
            raise ValueError("preference_tokens is 'reasoning' but loss_type is 'sft': there is no preference loss")
        # Refuse an option that the chosen term does not read; a value equal to the default has no effect anyway.
        defaults = {entry.name: entry.default for entry in fields(type(self))}
        for name, terms in TERM_OPTIONS.items():
            value = getattr(self, name)
            without_effect = value == defaults[name] or (name == "calibration_weight" and value == 0)
            if self.calibration not in terms and not without_effect:
                acts = f"it acts with {', '.join(terms)} only"
                raise ValueError(f"{name} is {value!r} but calibration is {self.calibration!r}: {acts}")

    def to_dict(self) -> dict[str, Any]:
        """Transformers', with questions as JSON values."""
        values: dict[str, Any] = super().to_dict()
        if isinstance(self.calibration_questions, list):
            records = [question.model_dump(mode="json") for question in self.calibration_questions]
            values["calibration_questions"] = records
        return values

    @property
    def weight(self) -> float:
        """Lambda, its default resolved."""
        weight = self.calibration_weight
        return WEIGHTS[self.calibration] if weight is None else weight  # type: ignore[index]

    @classmethod
    def of(cls, config: DPOConfig) -> Self:
        """The same configuration, with our options at their defaults if it has none."""
        if isinstance(config, cls):
            return config
        if type(config) is not DPOConfig:
            raise TypeError(f"args is a {type(config).__name__}, whose class would be lost: inherit from CATTOConfig")
        made = copy.copy(config)
        made.__class__ = cls
        vars(made).update({entry.name: entry.default for entry in fields(cls)} | vars(made))
        return made  # type: ignore[no-any-return]
