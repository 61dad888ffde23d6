"""Read a recipe, either a YAML file or a shipped one, with `a.b=c` overrides. Error messages are one line long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from catto.errors import DataError, data_errors_at, did_you_mean, find_first_problem, join_names
from catto.io.text_files import read_text
from catto.recipe.settings import Recipe, TaskSettings, is_task_file
from catto.recipe.yaml_text import parse_yaml

# The longest shipped recipe has 7 kB; a longer file than this is not a recipe.
MAX_RECIPE_BYTES = 2**20
SHIPPED_FOLDER = Path(__file__).parents[1] / "recipes"

# Keywords that the recipe or the run sets itself, and why. A second value would override the one that is reported.
_SET_ELSEWHERE = {
    "calibration": "the method sets it",
    "greater_is_better": "keep sets it",
    "hub_token": "models stay in the folder of the run",
    "ignore_data_skip": "a run that was killed would end with a different model",
    "label_smoothing_factor": "the method sft+ls smooths labels",
    "load_best_model_at_end": "keep sets it",
    "max_length": "context sets it",
    "metric_for_best_model": "keep sets it",
    "model_init_kwargs": "the block model sets them",
    "outcome_rows_per_pair": "outcome.rows_per_pair sets it",
    "outcome_samples": "outcome.samples sets it",
    "outcome_score": "outcome.score sets it",
    "outcome_target": "outcome.target sets it",
    "output_dir": "the run has its own",
    "prefix_sharing": "it is set at the top of the recipe",
    "push_to_hub": "models stay in the folder of the run",
    "resume_from_checkpoint": "a run resumes automatically",
    "save_only_model": "a run that was killed would end with a different model",
    "task_type": "it is always CAUSAL_LM",
}

# Keywords of the trainers and of LoRA that are floats. Whole numbers are converted: `1` and `1.0` have the same key.
_FLOAT_KEYWORDS = frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "beta",
        "calibration_weight",
        "discopop_tau",
        "eval_delay",
        "eval_steps",
        "f_alpha_divergence_coef",
        "label_smoothing",
        "ld_alpha",
        "learning_rate",
        "logging_steps",
        "lora_dropout",
        "max_grad_norm",
        "neftune_noise_alpha",
        "num_train_epochs",
        "ref_model_mixup_alpha",
        "router_aux_loss_coef",
        "save_steps",
        "warmup_steps",
        "weight_decay",
    }
)


def find_shipped_recipes() -> dict[str, Path]:
    """Return the paths of the recipes that come with the package, by name.

    >>> sorted(find_shipped_recipes())
    ['comparison', 'paper', 'quickstart', 'qwen-1.5b', 'readings', 'smollm2']
    """
    return {path.stem: path for path in sorted(SHIPPED_FOLDER.glob("*.yaml"))}


def load_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        source: A YAML file, or the name of a shipped recipe.
        overrides: Settings as `a.b=c`, where c is YAML; the last one wins.

    Raises:
        DataError: The recipe is not valid; the message names the place and, for a misspelled name, a suggestion.

    >>> load_recipe("quickstart", ["evaluation.bins=15"]).evaluation.bins
    15
    """
    path = _find_file(source)
    value = parse_yaml(read_text(path, MAX_RECIPE_BYTES), str(path))
    if not isinstance(value, dict):
        raise DataError(path, None, "expected a mapping of settings (name: value)")
    settings = _apply_overrides(value, overrides)
    recipe = _validate_recipe(settings, path, overrides)
    tasks = {}
    for name, block in recipe.tasks.items():
        if is_task_file(block.path):
            block = load_task(block.path, block)
        tasks[name] = block
    recipe = recipe.model_copy(update={"tasks": tasks})
    _check_keywords(recipe, path, overrides)
    return recipe


def _find_file(source: str) -> Path:
    known = find_shipped_recipes()
    path = Path(source)
    if source in known and not path.is_file():  # there may be a folder with the name of a recipe, such as paper
        return known[source]
    if not path.exists():
        names = ", ".join(known)
        raise DataError(source, None, f"neither a file nor one of the recipes {names}{did_you_mean(source, known)}")
    return path


def _validate_recipe(settings: dict[str, Any], path: Path, overrides: Sequence[str]) -> Recipe:
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        place, message = find_first_problem(error, settings)
    if message == "unknown key":
        message = _explain_unknown(place[-1], _keys_at(place[:-1]))
    if place:
        raise DataError(origin_of(str(path), overrides, place), None, f"{'.'.join(place)}: {message}")
    # A rule about several settings has no place, but its message begins with the setting that is wrong.
    subject = message.partition(":")[0].split(".")
    raise DataError(origin_of(str(path), overrides, subject), None, message)


def _check_keywords(recipe: Recipe, path: Path, overrides: Sequence[str]) -> None:
    """Check the blocks that are passed to a trainer or to LoRA unchanged, and convert whole numbers to floats.

    Unknown keywords are left to the libraries: a run rehearses all training runs before it starts the first one.
    """
    blocks: dict[str, dict[str, Any]] = {
        "sft.trl": recipe.sft.trl,
        "rcft.trl": recipe.rcft.trl,
        "preference.trl": recipe.preference.trl,
        "model.peft": recipe.model.peft or {},
    }
    for block, keywords in blocks.items():
        for name, value in keywords.items():
            if name in _SET_ELSEWHERE:
                origin = origin_of(str(path), overrides, (*block.split("."), name))
                raise DataError(origin, None, f"{block}.{name}: cannot be set here: {_SET_ELSEWHERE[name]}")
            if name in _FLOAT_KEYWORDS and type(value) is int:
                keywords[name] = float(value)


def load_task(source: str, given: TaskSettings | None = None) -> TaskSettings:
    """Read the settings of a user's own questions from a YAML file.

    Args:
        source: The file. Paths in it are relative to its folder.
        given: The block of the recipe that names the file; the settings in this block override the file.

    Returns:
        The settings. Paths from the file begin with its folder.

    Raises:
        DataError: The file cannot be read, or one of its settings is unknown or has a wrong value.
    """
    path = Path(source)
    value = parse_yaml(read_text(path, MAX_RECIPE_BYTES), source)
    if isinstance(value, dict):
        # pydantic refuses unknown settings too, but without a list of the known ones.
        known = list(TaskSettings.model_fields)
        for name in value:
            if name not in known:
                raise DataError(path, None, f"{name}: {_explain_unknown(name, known)}")
    with data_errors_at(path, value=value):
        block = TaskSettings.model_validate(value)
    changes = {}
    for name in ("path", "files", "answers"):
        changes[name] = _resolve_places(getattr(block, name), path.parent)
    if given is not None:
        for name in given.model_fields_set - {"path"}:  # its `path` is that of the YAML file
            changes[name] = getattr(given, name)
    return block.model_copy(update=changes)


def _resolve_places(places: Any, folder: Path) -> Any:
    """Put the folder before a path, a list of paths, or the paths of each split."""
    if isinstance(places, dict):
        return {split: _resolve_places(place, folder) for split, place in places.items()}
    if isinstance(places, list):
        return [_resolve_places(place, folder) for place in places]
    if not places:
        return places
    return str(folder / places)


def _explain_unknown(name: str, known: Sequence[str]) -> str:
    return f"unknown key{did_you_mean(name, known)} (known: {join_names(known, 40)})"


def origin_of(source: str, overrides: Sequence[str], place: Sequence[str]) -> str:
    """Return what set the value at a place: an override, or the file.

    An override of the place itself counts, as does one of a block around it or of a part of it. The last one wins.

    >>> origin_of("r.yaml", ["evaluation.bins=0"], ("evaluation", "bins"))
    '--set evaluation.bins=0'
    """
    wanted = tuple(place)
    if not wanted:
        return source
    for override in reversed(overrides):
        set_place = tuple(override.partition("=")[0].strip().split("."))
        length = min(len(set_place), len(wanted))
        one_contains_the_other = wanted[:length] == set_place[:length]
        if one_contains_the_other:
            return f"--set {override}"
    return source


def _apply_overrides(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        place, equals, text = override.partition("=")
        if not equals or not place.strip():
            raise DataError(f"--set {override}", None, "expected place=value, such as evaluation.bins=15")
        value = parse_yaml(text, f"--set {override}")
        settings = _set_at(settings, place.strip().split("."), value)
    return settings


def _set_at(block: object, place: Sequence[str], value: object) -> dict[str, Any]:
    """Return a copy of the block with the value at the place; anything on the way that is not a block becomes one."""
    settings = dict(block) if isinstance(block, dict) else {}
    name = place[0]
    if len(place) == 1:
        settings[name] = value
    else:
        settings[name] = _set_at(settings.get(name), place[1:], value)
    return settings


def _keys_at(place: Sequence[str]) -> list[str]:
    """Return the keys that the block at a place may have."""
    model: type[BaseModel] = Recipe
    names = iter(place)
    for name in names:
        annotation = model.model_fields[name].annotation
        if get_origin(annotation) is dict:
            next(names, None)  # skip a key that the user chose, such as the name of a task
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
                break
    return list(model.model_fields)
