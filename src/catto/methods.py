"""The METHODS table, which defines each method of the comparison as data.

A method starts from a model: the base model, the SFT model or the DPO model of the same budget. It is trained with one
objective and has learning rates, epochs and a number of pairs. The values are the paper's. A suffix from SCALINGS
rescales the confidence of any method, by a temperature or by a weight and a bias for each label:
`find_method("dpo+outcome+ts")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Budget = Literal["paper", "matched"]
Stage = Literal["base", "sft", "preference", "rcft", "scaling"]
# The model that a recipe's methods start from: the SFT model, or the given base model itself.
Start = Literal["sft", "base"]
Calibration = Literal["none", "catto", "bce", "l1", "brier", "outcome", "replay"]
# Responses that are trained on in addition to the pairs: unfiltered samples of the SFT model, or right responses to the
# same questions.
Stream = Literal["none", "sampled", "right"]
# The confidence that a temperature rescales: over the whole vocabulary, or normalised over the labels.
Rescaled = Literal["raw", "normalized"]
# The tokens of a response that the preference loss reads: all of them, or those before the label.
PreferenceTokens = Literal["all", "reasoning"]

# How a method rescales: by a temperature for one of the two confidences, or by a weight and a bias for each label.
ScalingKind = Literal["raw", "normalized", "vector"]

AMONG_LABELS = "+tl"
BY_VECTOR = "+vs"
# Suffixes of methods whose confidence is rescaled. `+ts` rescales over the whole vocabulary, as in the paper, and the
# others among the labels alone.
SCALINGS: Mapping[str, str] = {
    "+ts": "temperature scaling",
    AMONG_LABELS: "scaling among labels",
    BY_VECTOR: "vector scaling",
}

BUDGETS: tuple[Budget, ...] = ("paper", "matched")
_SURROGATE: tuple[Calibration, ...] = ("catto", "bce", "l1", "brier")
# Lambda, the default weight of a calibration term: 0.1 as in the paper, and our own choice for `outcome` and `replay`.
WEIGHTS: Mapping[Calibration, float] = dict.fromkeys(_SURROGATE, 0.1) | {"none": 0.0, "outcome": 1.0, "replay": 1.0}
# Which calibration terms read which option of `CATTOConfig`.
TERM_OPTIONS: Mapping[str, tuple[Calibration, ...]] = {
    "calibration_weight": (*_SURROGATE, "outcome", "replay"),
    "reduce": _SURROGATE,
    "detach_surrogate": _SURROGATE,
    "calibrate_tokens": _SURROGATE,
    "outcome_score": ("outcome",),
    "outcome_target": ("outcome",),
    "outcome_samples": ("outcome",),
    "calibration_questions": ("outcome",),
    "outcome_rows_per_pair": ("outcome", "replay"),
}


@dataclass(frozen=True)
class Effort:
    """How much a method trains: the number of epochs, and the number of pairs (None means all)."""

    epochs: int
    pairs: int | None = None


@dataclass(frozen=True)
class Method:
    """One row of the comparison."""

    title: str
    start: str  # "base", or the method whose model this one starts from
    stage: Stage
    effort: Mapping[Budget, Effort]
    learning_rates: tuple[float, ...] = ()  # one is chosen by validation ECE
    batch_size: int = 4
    label_smoothing: float = 0.0  # for the labels in SFT; for preferences, what TRL's loss types make of it
    calibration: Calibration = "none"
    rcft_weight: float = 0.0  # weight of RCFT's ECE term; 0 means CFT
    stream: Stream = "none"
    preference_loss: bool = True  # False: the calibration term is the only loss, with the same number of steps
    loss_type: tuple[str, ...] = ()  # TRL's loss types, added with equal weights; empty: the recipe's, or TRL's default
    preference_tokens: PreferenceTokens = "all"
    only_from: Start | None = None  # recipes with a different start cannot use the method

    @property
    def budgeted(self) -> bool:
        """Whether the two budgets give different models: this method, or the one it starts from, trains differently."""
        if self.effort["paper"] != self.effort["matched"]:
            return True
        return self.start != "base" and METHODS[self.start].budgeted

    @property
    def group(self) -> Literal["Base", "SFT", "DPO"]:
        """The block of the paper's tables in which the method is listed."""
        if self.only_from == "base":
            return "Base"
        if self.stage == "preference":
            return "DPO" if self.preference_loss else "SFT"
        return "SFT" if self.start == "base" else METHODS[self.start].group


_SMALL = Effort(epochs=2, pairs=500)
_BASE = Method("Base model", "base", "base", dict.fromkeys(BUDGETS, Effort(epochs=0)), only_from="base")
_SFT = Method("SFT", "base", "sft", dict.fromkeys(BUDGETS, Effort(epochs=3)), (5e-5,), batch_size=2, only_from="sft")
_PREFERENCE = Method("DPO", "sft", "preference", dict.fromkeys(BUDGETS, _SMALL), (5e-6, 5e-7))
_OUTCOME = replace(_PREFERENCE, title="DPO + outcome", calibration="outcome", stream="sampled")
_DECOUPLED = replace(_OUTCOME, title="DPO + outcome, decoupled", preference_tokens="reasoning")
_CFT = Method("CFT", "dpo", "rcft", dict.fromkeys(BUDGETS, Effort(epochs=5)), (5e-6,))

METHODS: dict[str, Method] = {
    "base": _BASE,
    "sft": _SFT,
    "sft+ls": replace(_SFT, title="SFT + label smoothing", label_smoothing=0.1),
    "dpo": replace(_PREFERENCE, effort={"paper": Effort(epochs=6), "matched": _SMALL}),
    "cft": _CFT,
    "rcft": replace(_CFT, title="RCFT", rcft_weight=1.0),
    "dpo+bce": replace(_PREFERENCE, title="DPO + BCE", calibration="bce"),
    "dpo+catto": replace(_PREFERENCE, title="DPO + CATTO", calibration="catto"),
    "dpo+outcome": _OUTCOME,
    # Controls for `dpo+outcome`: the same amount of supervision without a proper score, the score without preferences,
    # and the score without additional responses.
    "dpo+replay": replace(_PREFERENCE, title="DPO + replay", calibration="replay", stream="right"),
    "sft+outcome": replace(_OUTCOME, title="SFT + outcome", preference_loss=False, only_from="sft"),
    "base+outcome": replace(_OUTCOME, title="Base + outcome", preference_loss=False, only_from="base"),
    "dpo+outcome-pairs": replace(_OUTCOME, title="DPO + outcome on pairs", stream="none"),
    # The preference loss on the reasoning and a proper score on the label; the control has no score.
    "dpo+decoupled": _DECOUPLED,
    "dpo+decoupled+sft": replace(_DECOUPLED, title="DPO + outcome, decoupled, + SFT", loss_type=("sigmoid", "sft")),
    "dpo+reasoning": replace(_PREFERENCE, title="DPO on the reasoning", preference_tokens="reasoning"),
    # First the score, then the preferences, so that the reference model of the preference loss is calibrated.
    # `outcome+dpo` is a control, in which training on the score stops when the preferences begin.
    "outcome+decoupled": replace(_DECOUPLED, title="Outcome, then decoupled DPO", start="sft+outcome", only_from="sft"),
    "outcome+dpo": replace(_PREFERENCE, title="Outcome, then DPO", start="sft+outcome", only_from="sft"),
    "outcome+dpo+outcome": replace(_OUTCOME, title="Outcome, then DPO + outcome", start="sft+outcome", only_from="sft"),
    # Controls for `dpo`: other losses on the same pairs. 0.1 is the assumed share of preferences that are reversed.
    "ipo": replace(_PREFERENCE, title="IPO", loss_type=("ipo",)),
    "dpo+robust": replace(_PREFERENCE, title="Robust DPO", loss_type=("robust",), label_smoothing=0.1),
    "dpo+sft": replace(_PREFERENCE, title="DPO + SFT", loss_type=("sigmoid", "sft")),
}


def find_method(name: str) -> Method:
    """Return the method with this name: an entry of METHODS, or one made for a name with a suffix from SCALINGS.

    A method with such a suffix starts from the model of the method without it, and only rescales the confidence.

    Raises:
        KeyError: There is no such method; see `is_known_method`.

    >>> find_method("dpo+outcome+ts").title, find_method("dpo+tl").title
    ('DPO + outcome + temperature scaling', 'DPO + scaling among labels')
    """
    start = strip_scaling(name)
    if start == name:
        return METHODS[name]
    title = f"{METHODS[start].title} + {SCALINGS[name.removeprefix(start)]}"
    return replace(METHODS[start], title=title, start=start, stage="scaling", learning_rates=())


def strip_scaling(name: str) -> str:
    """Return the name of a method without the suffix of its scaling.

    >>> strip_scaling("dpo+catto+ts"), strip_scaling("dpo+catto")
    ('dpo+catto', 'dpo+catto')
    """
    for suffix in SCALINGS:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def scaled_kind(name: str) -> ScalingKind:
    """Return how a method rescales: by a temperature over the whole vocabulary or among the labels, or by a vector.

    >>> scaled_kind("dpo+ts"), scaled_kind("dpo+tl"), scaled_kind("dpo+vs")
    ('raw', 'normalized', 'vector')
    """
    if name.endswith(BY_VECTOR):
        return "vector"
    return "normalized" if name.endswith(AMONG_LABELS) else "raw"


def start_of(row: Method, start: Start) -> str:
    """Return the name of the method whose model a method starts from; `base` is the given base model.

    Args:
        row: The method.
        start: Where the recipe's methods start. With `base`, a method that would start from `sft` starts from `base`.

    >>> start_of(METHODS["dpo"], "sft"), start_of(METHODS["dpo"], "base"), start_of(METHODS["cft"], "base")
    ('sft', 'base', 'dpo')
    """
    return start if row.start == "sft" else row.start


def methods_from(start: Start) -> tuple[str, ...]:
    """Return the methods that a recipe with this start can use.

    >>> methods_from("base")[:2], methods_from("sft")[:2]
    (('base', 'dpo'), ('sft', 'sft+ls'))
    """
    return tuple(name for name, row in METHODS.items() if row.only_from in (None, start))


def is_known_method(name: str) -> bool:
    """Return whether there is a method with this name.

    >>> is_known_method("dpo+ts"), is_known_method("dpo+ts+ts")
    (True, False)
    """
    return strip_scaling(name) in METHODS


def method_sort_key(name: str) -> tuple[int, int, str]:
    """Return a sort key: methods in the order of METHODS, each followed by its scalings, unknown methods last.

    >>> sorted(["dpo", "sft+tl", "sft+ts", "mine", "sft"], key=method_sort_key)
    ['sft', 'sft+ts', 'sft+tl', 'dpo', 'mine']
    """
    start = strip_scaling(name)
    names = list(METHODS)
    suffixes = ["", *SCALINGS]
    position = names.index(start) if start in METHODS else len(names)
    return position, suffixes.index(name.removeprefix(start)), name


def without_overridden(row: Method, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's options of `CATTOConfig` without those that the method sets itself.

    A method with its own loss types also ignores the recipe's weights and label smoothing, which are for the recipe's
    loss types.

    >>> without_overridden(METHODS["ipo"], {"beta": 0.2, "loss_type": "sigmoid"})
    {'beta': 0.2}
    """
    set_by_method: set[str] = set()
    if row.loss_type:
        set_by_method |= {"loss_type", "loss_weights", "label_smoothing"}
    if row.preference_tokens != "all":
        set_by_method.add("preference_tokens")
    return {name: value for name, value in settings.items() if name not in set_by_method}


def options_read_by(calibration: Calibration, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that only other calibration terms use.

    >>> options_read_by("none", {"beta": 0.2, "calibration_weight": 5.0})
    {'beta': 0.2}
    """
    options = {}
    for name, value in settings.items():
        is_term_option = name in TERM_OPTIONS
        if not is_term_option or calibration in TERM_OPTIONS[name]:
            options[name] = value
    return options
