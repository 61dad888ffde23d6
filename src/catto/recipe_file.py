"""Read a recipe: a YAML file or a shipped one's name, with `a.b=c` overrides; a problem is told in one line.

Which keywords a trainer's configuration takes, read from its source: importing it would import torch.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from importlib import resources
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from catto.files import read_text
from catto.problems import MOST_DEPTH, TOO_DEEP, DataError, did_you_mean, listed, shortened, validation_problem
from catto.recipe import Recipe

# ---- recipe_file


# The longest shipped recipe has 3 kB; a file beyond this is no recipe.
MOST_BYTES = 2**20
# Values of a recipe, aliases (`*name`) expanded: a few lines of them can stand for more than memory holds.
MOST_VALUES = 10_000
TOO_MANY = f"holds more than {MOST_VALUES:,} values, those that aliases stand for included"


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
        source, None, f"neither a file nor one of the recipes {', '.join(known)}{did_you_mean(source, known)}"
    )


def load(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate; a problem is one DataError with the place and, where one is close, a suggestion."""
    path = find(source)
    value = _parsed(read_text(path, MOST_BYTES), str(path))
    if not isinstance(value, dict):
        raise DataError(path, None, "expected a mapping of settings (name: value)")
    changed = value
    for override in overrides:
        changed = _set(changed, override)
    try:
        recipe = Recipe.model_validate(changed)
    except ValidationError as error:
        place, message = explain(error, Recipe, changed)
        told = f"{'.'.join(place)}: {message}" if place else message
        raise DataError(_culprit(str(path), value, overrides, place), None, told) from None
    passed = {f"{name}.trl": ("TrainingArguments", getattr(recipe, name).trl) for name in ("sft", "rcft")}
    passed["preference.trl"] = "CATTOConfig", recipe.preference.trl
    passed["model.peft"] = "LoraConfig", recipe.model.peft or {}
    for block, (config, given) in passed.items():
        for name, one in given.items():
            if (problem := _refused(config, name, one)) is not None:
                told = blamed(str(path), overrides, (*block.split("."), name))
                raise DataError(told, None, f"{block}.{name}: {problem}")
    return recipe


def _refused(config: str, name: str, value: Any) -> str | None:
    """Say what is wrong with a keyword that goes to a trainer as it is; None: nothing that can be told without it."""
    known = keywords(config)
    if known and name not in known:
        return f"not a keyword of {config}{did_you_mean(name, known)}"
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


def blamed(source: str, overrides: Sequence[str], place: Sequence[str]) -> str:
    """Who set the value at a place: an override, or the file."""
    at = tuple(place)
    for override in reversed(overrides):
        named = tuple(override.partition("=")[0].split("."))
        if at and at[: len(named)] == named[: len(at)]:
            return f"--set {override}"
    return source


def _culprit(source: str, value: dict[str, Any], overrides: Sequence[str], place: Sequence[str]) -> str:
    """Who brought the problem at a place.

    A rule that joins several settings may name none of them: then it is the override without which the recipe is
    valid, and all of them where none is so alone.
    """
    found = blamed(source, overrides, place)
    if found != source or not overrides or not _valid(value, ()):
        return found
    alone = [one for one in overrides if _valid(value, [other for other in overrides if other is not one])]
    return " ".join(f"--set {one}" for one in (alone[:1] or overrides))


def _valid(value: dict[str, Any], overrides: Sequence[str]) -> bool:
    for override in overrides:
        value = _set(value, override)
    try:
        Recipe.model_validate(value)
    except ValidationError:
        return False
    return True


def _set(value: dict[str, Any], override: str) -> dict[str, Any]:
    """Return the settings with `a.b=c` applied, c being YAML."""
    place, equals, text = override.partition("=")
    if not equals or not place:
        raise DataError(f"--set {override}", None, "expected place=value, such as evaluation.bins=15")
    return _placed(value, place.split("."), _parsed(text, f"--set {override}"))


def _placed(value: object, place: list[str], new: object) -> dict[str, Any]:
    known = value if isinstance(value, dict) else {}
    first, *rest = place
    return {**known, first: _placed(known.get(first), rest, new) if rest else new}


def _parsed(text: str, source: str) -> Any:
    """The value of a YAML text that holds plain values only; a problem is one DataError with the line."""
    try:
        value = yaml.load(text, _Strict)
        _check_values(value)
    except yaml.YAMLError as error:
        raise DataError(source, None, _yaml_problem(error)) from None
    except ValueError as error:
        raise DataError(source, None, str(error)) from None
    return value


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"not YAML: character {chr(error.character)!r} at position {error.position} is not allowed"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    said = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
    return f"line {mark.line + 1} column {mark.column + 1}: {said}" if mark is not None else str(said)


def _check_values(value: object, place: tuple[str, ...] = ()) -> None:
    """Refuse what JSON could not hold: it would fail later, far from the recipe."""
    at = f"{'.'.join(place)}: " if place else ""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{at}key {shortened(repr(key), 60)}: expected a text; quote it")
            _check_values(item, (*place, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_values(item, (*place, str(number)))
    elif isinstance(value, bool | str) or value is None:
        return
    elif not isinstance(value, int | float):
        kind = type(value).__name__
        raise ValueError(f"{at}expected a text, a number, a list or a block, got a {kind}; quote it")
    elif not -(2**63) <= value < 2**63:  # also what is not finite; a nan fails both
        raise ValueError(f"{at}expected a finite number below 2^63, got {shortened(repr(value), 40)}")


def explain(error: ValidationError, model: type[BaseModel], value: object) -> tuple[list[str], str]:
    """Say the first problem: its place, and what is wrong or was meant."""
    place, message = validation_problem(error, value)
    if message == "unknown key":
        known = _names(model, place[:-1])
        message = f"unknown key{did_you_mean(place[-1], known)} (known: {listed(known, 40)})"
    return place, message


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
    """YAML whose keys are plain and stand once, and whose nesting and aliases are bounded."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._composed = 0
        self._sizes: dict[int, tuple[int, int]] = {}  # id of a composed node -> values in it, levels in it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, counting what aliases stand for before anything is built of it."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        alias, mark = isinstance(event, yaml.AliasEvent), event.start_mark
        self._depth, self._composed = self._depth + 1, self._composed + 1
        if self._depth > MOST_DEPTH:
            raise yaml.composer.ComposerError(None, None, TOO_DEEP, mark)
        if self._composed > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, TOO_MANY, mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias refers to a value that it is part of", mark)
        if node is not None and not alias:
            self._sizes[id(node)] = self._measured(node, mark)
        return node

    def _measured(self, node: yaml.Node, mark: Any) -> tuple[int, int]:
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        sizes = [self._sizes[id(part)] for part in inner]
        values, levels = 1 + sum(size for size, _ in sizes), 1 + max((level for _, level in sizes), default=0)
        if values > MOST_VALUES:
            raise yaml.composer.ComposerError(None, None, TOO_MANY, mark)
        if levels > MOST_DEPTH:
            raise yaml.composer.ComposerError(None, None, TOO_DEEP, mark)
        return values, levels

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; an impossible date or a number of 5,000 digits is told with its line."""
        try:
            return super().construct_object(node, deep=deep)
        except ValueError:
            shown = shortened(repr(node.value), 60)
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown} cannot be read as a number or a date", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is a list or a mapping, and one that stands twice."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                what = "a list" if isinstance(key_node, yaml.SequenceNode) else "a mapping"
                raise yaml.constructor.ConstructorError(
                    None, None, f"expected a text as key, got {what}", key_node.start_mark
                )
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# ---- keywords


_TRAINING = (("transformers", "training_args.py", "TrainingArguments"),)
# Configuration -> the classes whose fields it has: package, file, class.
CONFIGS = {
    "TrainingArguments": _TRAINING,
    "CATTOConfig": (
        ("catto", "training/config.py", "CATTOConfig"),
        ("trl", "trainer/dpo_config.py", "DPOConfig"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        *_TRAINING,
    ),
    "LoraConfig": (
        ("peft", "tuners/lora/config.py", "LoraConfig"),
        ("peft", "config.py", "PeftConfig"),
        ("peft", "config.py", "PeftConfigMixin"),
    ),
}


@cache
def keywords(config: str) -> frozenset[str]:
    """The keywords of one of CONFIGS; none where a library is missing or laid out in another way.

    >>> "num_train_epochs" in keywords("TrainingArguments")
    True
    """
    found: set[str] = set()
    for package, file, name in CONFIGS[config]:
        fields = _fields(package, file, name)
        if not fields:
            return frozenset()
        found |= fields
    return frozenset(found)


def _fields(package: str, file: str, name: str) -> set[str]:
    """The annotated names in a class's body: a dataclass's fields."""
    spec = find_spec(package)
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
    if path is None or not path.exists():
        return set()
    classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {
        entry.target.id
        for one in classes
        if one.name == name
        for entry in one.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        if "ClassVar" not in ast.unparse(entry.annotation)
    }
