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
    """Warn if training would use bf16 on a processor that computes faster in fp32."""
    on_cpu = args.use_cpu or not torch.accelerator.is_available()
    if not args.bf16 or not on_cpu:
        return
    slowdown = cpu_bf16_slowdown()
    if slowdown > 1.25:  # the measurement has some noise
        logger.warning("bf16 takes %.1f times as long as fp32 on this processor: set bf16=False", slowdown)


def option(default: Any, text: str, **more: Any) -> Any:
    """Return a dataclass field that `HfArgumentParser` turns into a command-line option.

    Args:
        default: The default of the field.
        text: The help text of the option.
        **more: Further keyword arguments of `argparse.ArgumentParser.add_argument`.
    """
    return field(default=default, metadata={"help": text, **more})


def _list_questions(value: Any) -> list[Question] | str | None:
    """Return the value of `calibration_questions` in one of its types: a path as a string, or a list of `Question`.

    The questions of a stored configuration are dictionaries.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    questions = []
    for question in value:
        if not isinstance(question, Question):
            question = Question.model_validate(question)
        questions.append(question)
    return questions


@dataclass
class CATTOConfig(DPOConfig):  # type: ignore[misc]
    """TRL's `DPOConfig` with a calibration term: L = L_DPO + calibration_weight * term.

    All defaults of TRL are kept, except that bf16 is off on a machine without an accelerator. The default
    `calibration="catto"` is the paper's term. We recommend `calibration="outcome"`, which scores the model's
    probabilities of the answers against the right answer.

    Args:
        calibration: The calibration term. `"catto"`, `"bce"`, `"l1"` and `"brier"` compare each token's confidence with
            a surrogate of correctness. `"outcome"` is a proper score of the label probabilities. `"replay"` is the
            cross-entropy of given responses. `"none"` is plain DPO.
        calibration_weight: Weight of the term, at least 0. None means 1.0 for outcome and replay, and 0.1 otherwise.
        reduce: Reduction over a response's tokens, `"mean"` or `"sum"`. None means the sum for bce, and the mean
            otherwise.
        detach_surrogate: Whether to stop the gradient through the surrogate of correctness.
        calibrate_tokens: Tokens that the term reads: `"all"`, or only the `"label"`.
        preference_tokens: Tokens that the preference loss reads: `"all"`, or only the `"reasoning"` before the label.
        outcome_score: Proper score of the outcome term, `"log"` or `"brier"`.
        outcome_target: Target of the score: the `"gold"` label, the `"votes"` of the start model's samples, or
            `"mix"`, the mean of both.
        outcome_samples: Number of samples per question that vote, if outcome_target is votes or mix.
        calibration_questions: Questions with known answers, as a list or a file. Before training, the trainer samples
            the start model's responses to them, and the outcome term reads these responses.
        outcome_rows_per_pair: Number of sampled responses that go with each pair of a batch.
        prefix_sharing: Whether to compute a prompt only once for all its responses.
        padding_free: Whether to pack rows into one line instead of padding them. None packs on CUDA if the model can
            use FlexAttention.
        head_precision: Precision of the LM head's matrix products: `"auto"` (16-bit inputs and fp32 results on a GPU)
            or `"fp32"`.

    Example:
        ```python
        config = CATTOConfig(output_dir="model", calibration="outcome", calibration_questions="questions.jsonl")
        ```
    """

    calibration: str = option(
        "catto", "Calibration term added to DPO's loss: none, catto, bce, l1, brier, outcome or replay."
    )
    calibration_weight: float | None = option(
        None, "Weight of the term. None means 1.0 for outcome and replay, and 0.1 otherwise."
    )
    reduce: str | None = option(
        None, "Reduction over a response's tokens: mean or sum. None means the sum for bce, and the mean otherwise."
    )
    detach_surrogate: bool = option(False, "Whether to stop the gradient through the surrogate of correctness.")
    calibrate_tokens: str = option("all", "Tokens that the term reads: all, or only the label.")
    preference_tokens: str = option(
        "all", "Tokens that the preference loss reads: all, or only the reasoning before the label."
    )
    outcome_score: str = option("log", "Proper score of the outcome term: log or brier.")
    outcome_target: str = option(
        "gold",
        "Target of the score: the gold label, the votes of the start model's samples, or mix, the mean of both.",
    )
    outcome_samples: int = option(8, "Number of samples per question that vote, if outcome_target is votes or mix.")
    calibration_questions: list[Question] | str | None = field(
        default=None,
        metadata={
            "help": "File of questions with known answers. The outcome term reads the start model's responses to them."
        },
    )
    outcome_rows_per_pair: int = option(2, "Number of sampled responses that go with each pair of a batch.")
    prefix_sharing: bool = option(False, "Whether to compute a prompt only once for all its responses.")
    padding_free: bool | None = option(
        None,
        "Whether to pack rows instead of padding them. None packs on CUDA if the model can use FlexAttention.",
        # Allow `--padding_free` without a value; the parser does this by itself only for options that cannot be None.
        nargs="?",
        const=True,
    )
    head_precision: str = option(
        "auto", "Precision of the LM head's matrix products: auto (16-bit inputs, fp32 results on a GPU) or fp32."
    )

    def __post_init__(self) -> None:
        if getattr(self, "bf16", None) is None and not torch.accelerator.is_available():
            self.bf16 = False  # TRL would set it to True
        super().__post_init__()
        warn_of_slow_bf16(self)
        self._check_choices()
        self._check_numbers()
        self.calibration_questions = _list_questions(self.calibration_questions)
        if self.preference_tokens == "reasoning" and set(self.loss_type) == {"sft"}:
            raise ValueError("preference_tokens is 'reasoning' but loss_type is 'sft': there is no preference loss")
        self._refuse_unread_options()

    def _check_choices(self) -> None:
        """Raise ValueError if an option of `CHOICES` has a different value."""
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                expected = ", ".join(map(str, choices))
                raise ValueError(f"{name} is {value!r}, expected one of {expected}")

    def _check_numbers(self) -> None:
        """Raise ValueError if the weight or a number of samples is out of its range, or samples have no use."""
        weight = self.calibration_weight
        if weight is not None:
            is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
            if not is_number or not 0 <= weight < math.inf:
                raise ValueError(f"calibration_weight is {weight!r}, expected a number of at least 0")
        for name in ("outcome_rows_per_pair", "outcome_samples"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}, expected at least 1")
        default_samples = CATTOConfig.outcome_samples
        if self.outcome_target == "gold" and self.outcome_samples != default_samples:
            raise ValueError(
                f"outcome_samples is {self.outcome_samples} but outcome_target is 'gold', which has no votes"
            )

    def _refuse_unread_options(self) -> None:
        """Raise ValueError if an option is set that the chosen term does not read.

        A weight of 0 is accepted with any term, and with none.
        """
        for name, terms in TERM_OPTIONS.items():
            if self.calibration in terms:
                continue
            value = getattr(self, name)
            is_default = value == _default_values(type(self))[name]
            is_zero_weight = name == "calibration_weight" and value == 0
            if is_default or is_zero_weight:
                continue
            readers = ", ".join(terms)
            raise ValueError(
                f"{name} is {value!r} but calibration is {self.calibration!r}: this option is used only with {readers}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as Transformers does, with the calibration questions as JSON values."""
        values: dict[str, Any] = super().to_dict()
        if isinstance(self.calibration_questions, list):
            records = [question.model_dump(mode="json") for question in self.calibration_questions]
            values["calibration_questions"] = records
        return values

    @property
    def weight(self) -> float:
        """The weight of the term; if it is not set, the default for the chosen term."""
        if self.calibration_weight is None:
            return WEIGHTS[self.calibration]  # type: ignore[index]
        return self.calibration_weight

    @classmethod
    def of(cls, config: DPOConfig) -> Self:
        """Return the configuration as a `CATTOConfig`.

        Args:
            config: A `CATTOConfig`, which is returned unchanged, or a plain `DPOConfig`, of which a copy with the
                defaults of our options is returned.

        Raises:
            TypeError: The configuration is of a different subclass of `DPOConfig`.
        """
        if isinstance(config, cls):
            return config
        if type(config) is not DPOConfig:
            raise TypeError(f"args is a {type(config).__name__}, expected a DPOConfig or a subclass of CATTOConfig")
        # The class of a copy is changed, because a new object would run TRL's `__post_init__` again on its own results.
        extended = copy.copy(config)
        extended.__class__ = cls
        vars(extended).update({**_default_values(cls), **vars(config)})
        return extended  # type: ignore[no-any-return]


def _default_values(config_class: type[DPOConfig]) -> dict[str, Any]:
    """Return field name -> default."""
    return {entry.name: entry.default for entry in fields(config_class)}
