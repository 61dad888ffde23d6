"""Read a recipe: a YAML file or a shipped one's name, with `a.b=c` overrides; a problem is told in one line."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

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
        return Recipe.model_validate(value)
    except ValidationError as error:
        raise DataError(path, None, explain(error, Recipe)) from None


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
