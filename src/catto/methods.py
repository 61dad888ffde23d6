"""The METHODS table: what each method of the comparison is, as data.

A method starts from a model (the base model, the SFT model or the DPO model of the same budget), is trained by one
objective, and has learning rates, epochs and a number of pairs. Values are the paper's. The suffix `+ts` rescales any
of them by a temperature: `method("dpo+outcome+ts")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

Budget = Literal["paper", "matched"]
Stage = Literal["sft", "preference", "rcft", "scaling"]
Calibration = Literal["none", "catto", "bce", "l1", "brier", "outcome", "replay"]
# The third stream beside the pairs: unfiltered samples of the SFT model, or right responses to the same questions.
Stream = Literal["none", "sampled", "right"]

SCALED = "+ts"  # the suffix of a method's temperature scaling

BUDGETS: tuple[Budget, ...] = ("paper", "matched")
# Which calibration terms read which knob of `CATTOConfig`.
_SURROGATE: tuple[Calibration, ...] = ("catto", "bce", "l1", "brier")
KNOBS: MappingProxyType[str, tuple[Calibration, ...]] = MappingProxyType(
    {
        "calibration_weight": (*_SURROGATE, "outcome", "replay"),
        "reduce": _SURROGATE,
        "detach_surrogate": _SURROGATE,
        "calibrate_tokens": _SURROGATE,
        "outcome_score": ("outcome",),
        "outcome_rows_per_pair": ("outcome", "replay"),
    }
)
# The learning rates among which a preference method's is chosen, by validation ECE.
GRID = (5e-6, 5e-7)


@dataclass(frozen=True)
class Effort:
    """How much a method trains: epochs over how many pairs (None: all of them)."""

    epochs: int
    pairs: int | None = None


ALL = Effort(epochs=6)
SMALL = Effort(epochs=2, pairs=500)


@dataclass(frozen=True)
class Method:
    """One row of the comparison."""

    title: str
    start: str  # "base", or the method whose model it starts from
    stage: Stage
    effort: MappingProxyType[Budget, Effort]
    learning_rates: tuple[float, ...] = ()
    batch_size: int = 4
    label_smoothing: float = 0.0
    calibration: Calibration = "none"
    rcft_weight: float = 0.0  # of RCFT's ECE term; 0 is CFT
    stream: Stream = "none"
    preference_loss: bool = True  # False: the term alone, on as many steps

    @property
    def budgeted(self) -> bool:
        """Whether the two budgets give different models, by this method's own effort or by its start's."""
        return self.effort["paper"] != self.effort["matched"] or (self.start != "base" and METHODS[self.start].budgeted)

    @property
    def group(self) -> Literal["SFT", "DPO"]:
        """The block of the paper's tables in which the method stands."""
        if self.stage == "preference":
            return "DPO" if self.preference_loss else "SFT"
        return "SFT" if self.start == "base" else METHODS[self.start].group


def _same(effort: Effort) -> MappingProxyType[Budget, Effort]:
    return MappingProxyType({"paper": effort, "matched": effort})


def _preference(title: str, calibration: Calibration, paper: Effort = SMALL, **more: Any) -> Method:
    effort: dict[Budget, Effort] = {"paper": paper, "matched": SMALL}
    return Method(title, "sft", "preference", MappingProxyType(effort), GRID, 4, calibration=calibration, **more)


def _supervised(title: str, **more: float) -> Method:
    return Method(title, "base", "sft", _same(Effort(epochs=3)), (5e-5,), 2, **more)  # type: ignore[arg-type]


def _after_dpo(title: str, weight: float) -> Method:
    return Method(title, "dpo", "rcft", _same(Effort(epochs=5)), (5e-6,), 4, rcft_weight=weight)


METHODS: dict[str, Method] = {
    "sft": _supervised("SFT"),
    "sft+ls": _supervised("SFT + label smoothing", label_smoothing=0.1),
    "dpo": _preference("DPO", "none", paper=ALL),
    "cft": _after_dpo("CFT", 0.0),
    "rcft": _after_dpo("RCFT", 1.0),
    "dpo+bce": _preference("DPO + BCE", "bce"),
    "dpo+catto": _preference("DPO + CATTO", "catto"),
    "dpo+outcome": _preference("DPO + outcome", "outcome", stream="sampled"),
    # Controls of `dpo+outcome`: as much supervision without a proper score, the score without preferences, the score
    # without further responses.
    "dpo+replay": _preference("DPO + replay", "replay", stream="right"),
    "sft+outcome": _preference("SFT + outcome", "outcome", stream="sampled", preference_loss=False),
    "dpo+outcome-pairs": _preference("DPO + outcome on pairs", "outcome"),
}


def method(name: str) -> Method:
    """Look a method up: an entry of METHODS, or one with the suffix `+ts`.

    >>> method("dpo+outcome+ts").title
    'DPO + outcome + temperature scaling'
    """
    if name in METHODS:
        return METHODS[name]
    start = name.removesuffix(SCALED)
    if start == name or start not in METHODS:
        raise KeyError(name)
    of = METHODS[start]
    return replace(of, title=f"{of.title} + temperature scaling", start=start, stage="scaling", learning_rates=())


def known(name: str) -> bool:
    """Whether there is a method of this name."""
    return name in METHODS or (name.endswith(SCALED) and name.removesuffix(SCALED) in METHODS)


def order(name: str) -> tuple[int, bool, str]:
    """Sort methods as METHODS lists them, each before its own temperature scaling; unknown ones come last."""
    start = name.removesuffix(SCALED)
    names = list(METHODS)
    return names.index(start) if start in METHODS else len(names), name.endswith(SCALED), name


def acting(calibration: Calibration, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the knobs that this term does not read: one block of settings serves methods of different terms.

    >>> acting("none", {"beta": 0.2, "calibration_weight": 5.0})
    {'beta': 0.2}
    """
    return {name: value for name, value in settings.items() if calibration in KNOBS.get(name, (calibration,))}


def weight_of(calibration: Calibration, score: str = "brier") -> float:
    """Lambda, the weight that an objective has by default: the paper's 0.1, and ours for `outcome` and `replay`."""
    if calibration == "none":
        return 0.0
    if calibration == "replay":
        return 1.0
    if calibration == "outcome":
        return 1.0 if score == "brier" else 0.3
    return 0.1
