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

# Keywords of the trainers and of LoRA that the blocks `trl` and `peft` must not contain, and why. The recipe or the run
# sets them, and a second value would override the one that is reported.
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

    If the `path` of a task is a YAML file (see `load_task`), the settings in this file are added to the task.

    Args:
        source: A YAML file, or the name of a shipped recipe.
        overrides: Settings as `a.b=c`, where c is YAML; the last one wins.

    Returns:
        The recipe. No file that it names has been read, except YAML files of tasks.

    Raises:
        DataError: The recipe or the YAML file of a task is not valid. The message says where, and suggests a name for
            one that is misspelled.

    >>> load_recipe("quickstart", ["evaluation.bins=15"]).evaluation.bins
    15
    """
    path = _find_file(source)
    value = parse_yaml(read_text(path, MAX_RECIPE_BYTES), str(path))
    if not isinstance(value, dict):
        raise DataError(path, None, "expected a mapping of settings (name: value)")
    settings = _apply_overrides(value, overrides)
    recipe = _validate_recipe(settings, path, overrides)
    complete_tasks = {}
    for name, block in recipe.tasks.items():
        if is_task_file(block.path):
            complete_tasks[name] = load_task(block.path, given=block)  # settings in the recipe override the task's file
        else:
            complete_tasks[name] = block
    recipe = recipe.model_copy(update={"tasks": complete_tasks})
    _check_library_keywords(recipe, path, overrides)
    return recipe


def _find_file(source: str) -> Path:
    """Return the path of a recipe from its name or path; a file takes precedence over a shipped recipe.

    Raises:
        DataError: There is neither a shipped recipe nor a path with this name.
    """
    known = find_shipped_recipes()
    path = Path(source)
    if source in known and not path.is_file():  # there may be a folder with the name of a recipe, such as paper
        return known[source]
    if not path.exists():
        names = ", ".join(known)
        raise DataError(source, None, f"neither a file nor one of the recipes {names}{did_you_mean(source, known)}")
    return path


def _validate_recipe(settings: dict[str, Any], path: Path, overrides: Sequence[str]) -> Recipe:
    """Return the recipe with these settings.

    Raises:
        DataError: A setting is unknown or has a wrong value. The message names the setting, and the override or the
            file that it is from.
    """
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


def _check_library_keywords(recipe: Recipe, path: Path, overrides: Sequence[str]) -> None:
    """Check the keywords that a recipe passes to a trainer or to LoRA; convert whole numbers to floats in place.

    Keywords that the libraries do not know are not found here: a run rehearses all training runs before it starts the
    first one.

    Raises:
        DataError: A keyword must not be set, since the recipe has a setting for it or the run sets it.
    """
    blocks: dict[str, dict[str, Any]] = {
        "sft.trl": recipe.sft.trl,
        "rcft.trl": recipe.rcft.trl,
        "preference.trl": recipe.preference.trl,
        "model.peft": recipe.model.peft or {},
    }
    for block_name, keywords in blocks.items():
        for keyword, value in keywords.items():
            if keyword in _SET_ELSEWHERE:
                origin = origin_of(str(path), overrides, (*block_name.split("."), keyword))
                reason = _SET_ELSEWHERE[keyword]
                raise DataError(origin, None, f"{block_name}.{keyword}: cannot be set here: {reason}")
            is_whole_number = type(value) is int  # not `isinstance`, which true and false pass too
            if keyword in _FLOAT_KEYWORDS and is_whole_number:
                keywords[keyword] = float(value)  # `1` and `1.0` then give the same key of a stage


def load_task(source: str, given: TaskSettings | None = None) -> TaskSettings:
    """Read the settings of a user's own questions from a YAML file.

    Args:
        source: The file. Paths in it are relative to its folder.
        given: The block of the recipe that names the file. Its settings override those of the file. None if the file
            is read without a recipe.

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
        for name in given.model_fields_set - {"path"}:  # `path` of the recipe's block is the YAML file itself
            changes[name] = getattr(given, name)
    return block.model_copy(update=changes)


def _resolve_places(places: Any, folder: Path) -> Any:
    """Put the folder before a path, a list of paths, or the paths of each split. None stays None."""
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
    """Return what set the value of a setting: the last override that did, or else the file.

    An override sets the value if it names the setting itself, a block that contains it, or a setting inside of it.

    Args:
        source: The file of the recipe.
        overrides: The overrides as `a.b=c`.
        place: The names that lead to the setting, from the outermost block inwards; if empty, the file is returned.

    Returns:
        The override as it is given on the command line, or `source`.

    >>> origin_of("r.yaml", ["evaluation.bins=0"], ("evaluation", "bins"))
    '--set evaluation.bins=0'
    >>> origin_of("r.yaml", ["evaluation={bins: 0}"], ("evaluation", "bins"))
    '--set evaluation={bins: 0}'
    """
    wanted = tuple(place)
    if not wanted:
        return source
    for override in reversed(overrides):
        overridden = tuple(override.partition("=")[0].strip().split("."))
        length = min(len(overridden), len(wanted))
        one_contains_the_other = wanted[:length] == overridden[:length]
        if one_contains_the_other:
            return f"--set {override}"
    return source


def _apply_overrides(settings: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings with the overrides, applied in their order. Raise DataError if one is not `place=value`."""
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
