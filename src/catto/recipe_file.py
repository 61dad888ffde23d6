"""Read a recipe: a YAML file or a shipped one's name, with `a.b=c` overrides; a problem is told in one line."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from catto.keywords import keywords
from catto.recipe import Recipe, suggestion
from catto.records import DataError


def shipped() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    folder = Path(str(resources.files("catto") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(source: str) -> Path:
    """A file's path, or the shipped recipe of that name."""
    if Path(source).exists():
        return Path(source)
    known = shipped()
    if source in known:
        return known[source]
    raise DataError(
        source, None, f"neither a file nor one of the recipes {', '.join(known)}{suggestion(source, known)}"
    )


def load(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate; a problem is one DataError with the place and, where one is close, a suggestion."""
    path = find(source)
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), _Strict)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(path, None, " ".join(str(error).split())) from None
    if not isinstance(value, dict):
        raise DataError(path, None, "expected a mapping of settings")
    for override in overrides:
        _set(value, override)
    try:
        recipe = Recipe.model_validate(value)
    except ValidationError as error:
        raise DataError(path, None, explain(error, Recipe)) from None
    passed = {f"{name}.trl": ("TrainingArguments", getattr(recipe, name).trl) for name in ("sft", "rcft")}
    passed["preference.trl"] = "CATTOConfig", recipe.preference.trl
    passed["model.peft"] = "LoraConfig", recipe.model.peft or {}
    for place, (config, given) in passed.items():
        for name, one in given.items():
            if (problem := _refused(config, name, one)) is not None:
                raise DataError(path, None, f"{place}.{name}: {problem}")
    return recipe


def _refused(config: str, name: str, value: Any) -> str | None:
    """Say what is wrong with a keyword that goes to a trainer as it is; None: nothing that can be told without it."""
    known = keywords(config)
    if known and name not in known:
        return f"not a keyword of {config}{suggestion(name, known)}"
    if (config, name) == ("LoraConfig", "task_type"):
        return "is always CAUSAL_LM: leave it out"
    if isinstance(value, str) and (number := _number(value)) is not None:
        return f"{value!r} is text in YAML; write {number:.1e}"
    if isinstance(value, float) and not isfinite(value):
        return f"expected a finite number, got {value}"
    if name == "learning_rate" and not (isinstance(value, int | float) and value > 0):
        return f"expected a number above 0, got {value!r}"
    if name in ("seed", "data_seed") and isinstance(value, int) and value < 0:
        return f"expected a number of at least 0, got {value}"
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _set(value: dict[str, Any], override: str) -> None:
    """Apply `a.b=c`, c being YAML."""
    place, equals, text = override.partition("=")
    if not equals or not place:
        raise DataError(f"--set {override}", None, "expected place=value, such as evaluation.bins=15")
    *parents, last = place.split(".")
    for name in parents:
        if not isinstance(value.get(name), dict):
            value[name] = {}
        value = value[name]
    try:
        value[last] = yaml.load(text, _Strict)
    except yaml.YAMLError as error:
        raise DataError(f"--set {override}", None, " ".join(str(error).split())) from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Say the first problem: place, what is wrong, what was meant."""
    problem = error.errors(include_url=False, include_context=False)[0]
    location = [str(part) for part in problem["loc"]]
    place = ".".join(location)
    if problem["type"] == "extra_forbidden":
        known = _names(model, location[:-1])
        return f"{place}: unknown key{suggestion(location[-1], known)} (known: {', '.join(known)})"
    message = problem["msg"].removeprefix("Value error, ")
    given = "" if problem["type"] in ("missing", "value_error") else f", got {problem['input']!r}"
    return f"{place}: {message}{given}" if place else message


def _names(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """The keys that may stand at a place."""
    place = iter(location)
    for name in place:
        annotation = model.model_fields[name].annotation
        if get_origin(annotation) is dict:
            next(place, None)  # a key of the user's own, such as a task's name
        models = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        model = next(kind for kind in models if issubclass(kind, BaseModel))
    return list(model.model_fields)


class _Strict(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error, not the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a repeated key."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)
