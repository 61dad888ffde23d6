"""Names of variants, such as `dpo+catto-weight-10`, and their titles.

A variant is a method of `catto.methods.METHODS` trained with options that differ from the usual ones. Its name is the
method followed by the options in alphabetical order. If the confidence was rescaled, the name has the scaling before
the options: `dpo+catto+ts-weight-10`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from catto.methods import METHODS, TERM_OPTIONS, Budget, method_sort_key, strip_scaling
from catto.report.tables import method_title

# Option in a name -> its title; `{}` is replaced by the option's value.
OPTION_TITLES = {
    "weight": "weight {}",
    "score": "{} score",
    "held_out": "held-out questions",
    "rows": "{} rows per pair",
    "tokens": "on {} tokens",
    "reduce": "{} over tokens",
    "detached": "surrogate detached",
    "epochs": "{} epochs",
    "sft_loss": "with sft loss",
    "target": "target {}",
    "probe": "linear probe",
}
# Setting of a calibration term -> its option in a name.
SETTING_OPTIONS = {
    "calibration_weight": "weight",
    "outcome_score": "score",
    "calibrate_tokens": "tokens",
    "reduce": "reduce",
    "detach_surrogate": "detached",
    "outcome_target": "target",
}
# Options of the variant of `outcome` whose settings were chosen on seed 0.
TUNED = "-held_out-score-log-weight-5"
# Options that a page mentions once in its text, so that titles can leave them out.
STATED_OPTIONS = ("score-log", "weight-1")


def variant_name(method: str, recipe: Mapping[str, Any], budget: Budget | None = None) -> str:
    """Name a method together with the options that the recipe of its run sets.

    Args:
        method: Name of the method, including its scaling.
        recipe: The recipe. Settings that recipes of earlier versions lack have their default value.
        budget: Training budget of the model.

    >>> recipe = {"tasks": {"snli": {}}, "outcome": {"score": "log"}, "preference": {"trl": {"calibration_weight": 10}}}
    >>> variant_name("dpo+outcome+ts", recipe)
    'dpo+outcome+ts-score-log-weight-10'
    """
    trained_method = METHODS[strip_scaling(method)]
    settings = _read_term_settings(recipe)
    options = []
    for setting, option in SETTING_OPTIONS.items():
        term_reads_setting = trained_method.calibration in TERM_OPTIONS[setting]
        if term_reads_setting:
            options += _name_option(option, settings.get(setting))
    if trained_method.calibration in ("outcome", "replay"):
        options += _name_stream_options(recipe)
    if trained_method.group == "DPO" and "sft" in settings.get("loss_type", ()):
        options.append("sft_loss")
    if budget == "paper":
        options.append(f"epochs-{trained_method.effort[budget].epochs}")
    return "-".join([method, *sorted(options)])


def _read_term_settings(recipe: Mapping[str, Any]) -> dict[str, Any]:
    outcome = recipe["outcome"]
    settings = {"outcome_score": outcome["score"]}
    settings |= recipe["preference"]["trl"]
    target = outcome.get("target", "gold")
    if target != "gold":
        settings["outcome_target"] = target
    return settings


def _name_option(option: str, value: object) -> list[str]:
    """Return the option with its value, or an empty list for usual values: unset, off, or the Brier score."""
    if value in (None, False, "brier"):
        return []
    if value is True:
        return [option]
    if isinstance(value, int | float):
        return [f"{option}-{value:g}"]
    return [f"{option}-{value}"]


def _name_stream_options(recipe: Mapping[str, Any]) -> list[str]:
    """Name the options of the outcome stream that differ from the shipped recipes."""
    usual_rows = 2 if "witnesses" in recipe["tasks"] else 1
    rows = recipe["outcome"].get("rows_per_pair", usual_rows)
    options = []
    if recipe["outcome"].get("held_out", False):
        options.append("held_out")
    if rows != usual_rows:
        options.append(f"rows-{rows}")
    return options


def split_variant(name: str) -> tuple[str, list[str]]:
    """Split a name into the method and its options.

    >>> split_variant("dpo+catto-tokens-label-weight-10")
    ('dpo+catto', ['tokens-label', 'weight-10'])
    """
    method, *options = re.split("-(?=" + "|".join(OPTION_TITLES) + ")", name)
    return method, options


def is_scaled(name: str) -> bool:
    """Return whether a variant is the model of an unscaled variant with a rescaled confidence."""
    method, _ = split_variant(name)
    return strip_scaling(method) != method


def scale_variant(name: str, suffix: str) -> str:
    """Name the variant that results from rescaling the confidence of a variant.

    >>> scale_variant("dpo+outcome-score-log", "+ts")
    'dpo+outcome+ts-score-log'
    """
    method, options = split_variant(name)
    return "-".join([method + suffix, *options])


def unscale_variant(name: str) -> str:
    """Name the variant whose confidence was rescaled.

    >>> unscale_variant("dpo+outcome+ts-score-log")
    'dpo+outcome-score-log'
    """
    method, options = split_variant(name)
    return "-".join([strip_scaling(method), *options])


def variant_sort_key(name: str) -> tuple[list[str], tuple[int, int, str]]:
    """Return the sort key for the rows of a table: methods without options come first."""
    method, options = split_variant(name)
    return options, method_sort_key(method)


def variant_title(name: str) -> str:
    """Return the title of a variant with all its options.

    >>> variant_title("dpo+catto-tokens-label-weight-10")
    'DPO + CATTO, on label tokens, weight 10'
    """
    method, options = split_variant(name)
    parts = [method_title(method)]
    for option in options:
        option_name, _, value = option.partition("-")
        parts.append(OPTION_TITLES[option_name].format(value))
    return ", ".join(parts)


def short_title(name: str) -> str:
    """Return the title of a variant without the options that pages mention once.

    >>> short_title("dpo+outcome-score-log-weight-1")
    'DPO + outcome'
    """
    method, options = split_variant(name.removesuffix(TUNED))
    kept = [option for option in options if option not in STATED_OPTIONS]
    title = variant_title("-".join([method, *kept]))
    if name.endswith(TUNED):
        title += ", tuned"
    return title


def list_seeds(seeds: Sequence[int]) -> str:
    """List seeds in words.

    >>> list_seeds((0, 1)), list_seeds((4,))
    ('seeds 0, 1', 'seed 4')
    """
    word = "seed" if len(seeds) == 1 else "seeds"
    return f"{word} {', '.join(map(str, seeds))}"
