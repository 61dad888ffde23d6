"""Read a recipe: a YAML file or the name of a shipped one, with `a.b=c` overrides. A problem is one line."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from catto import errors as problems
from catto.errors import DataError, data_errors_at, did_you_mean, join_names, shorten_text
from catto.io.text_files import read_text
from catto.recipe.settings import Recipe, TaskSettings, is_task_file

# The longest shipped recipe has 3 kB; a file beyond this is no recipe.
MOST_BYTES = 2**20
# Values of a recipe with aliases (`*name`) expanded: a few lines of them can expand to more than memory holds.
MOST_VALUES = 10_000
# YAML 1.1 reads 010 as 8 and 1:30 as 90.
_OTHER_BASE = re.compile(r"[-+]?0[\d_]+$|.*:")
TOO_MANY = f"holds more than {MOST_VALUES:,} values, with aliases expanded"

_TRAINING = ("transformers training_args.py TrainingArguments",)
_DPO = ("trl trainer/dpo_config.py DPOConfig", "trl trainer/base_config.py _BaseConfig", *_TRAINING)
_PEFT = ("peft config.py PeftConfig", "peft config.py PeftConfigMixin")
# Configuration -> the classes whose fields it has: package, file, class.
CONFIGS = {
    "SupervisedConfig": ("catto training/supervised.py SupervisedConfig", *_TRAINING),
    "CATTOConfig": ("catto training/config.py CATTOConfig", *_DPO),
    "LoraConfig": ("peft tuners/lora/config.py LoraConfig", *_PEFT),
}


def shipped() -> dict[str, Path]:
    """Return the recipes that come with the package, by name.

    >>> sorted(shipped())
    ['paper', 'quickstart', 'smollm2']
    """
    return {path.stem: path for path in sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))}


def load(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read, override and validate a recipe. A problem is one DataError with the place and, where close, a suggestion.

    >>> load("quickstart", ["evaluation.bins=15"]).evaluation.bins
    15
    """
    known, path = shipped(), Path(source)
    if source in known and not path.is_file():  # a folder of a recipe's name, such as paper, is no recipe
        path = known[source]
    elif not path.exists():
        names = ", ".join(known)
        raise DataError(source, None, f"neither a file nor one of the recipes {names}{did_you_mean(source, known)}")
    value = _parsed(read_text(path, MOST_BYTES), str(path))
    if not isinstance(value, dict):
        raise DataError(path, None, "expected a mapping of settings (name: value)")
    changed = _overridden(value, overrides)
    try:
        recipe = Recipe.model_validate(changed)
    except ValidationError as error:
        place, message = problems.validation_problem(error, changed)
        if message == "unknown key":
            message = _explain_unknown(place[-1], _keys_at(place[:-1]))
        # A rule over several settings has no place; its message begins with the setting that it is about.
        culprit = origin_of(str(path), overrides, place or message.partition(":")[0].split("."))
        raise DataError(culprit, None, ": ".join(filter(None, [".".join(place), message]))) from None
    tasks = {
        name: load_task(block.path, block) if is_task_file(block.path) else block
        for name, block in recipe.tasks.items()
    }
    recipe = recipe.model_copy(update={"tasks": tasks})
    blocks = {"sft": "SupervisedConfig", "rcft": "SupervisedConfig", "preference": "CATTOConfig"}
    passed = [(f"{name}.trl", config, getattr(recipe, name).trl) for name, config in blocks.items()]
    passed.append(("model.peft", "LoraConfig", recipe.model.peft or {}))
    for block, config, given in passed:
        for name, setting in given.items():
            if (problem := _refused(config, name, setting)) is not None:
                culprit = origin_of(str(path), overrides, (*block.split("."), name))
                raise DataError(culprit, None, f"{block}.{name}: {problem}")
            if type(setting) is int and keywords(config).get(name, "").startswith("float"):
                given[name] = float(setting)  # 1 and 1.0 are one setting with one key
    return recipe


def load_task(source: str, given: TaskSettings | None = None) -> TaskSettings:
    """Read the settings of a user's own questions from a YAML file, whose folder its paths start from.

    What is set in `given`, the block that names the file, overrides them.
    """
    path = Path(source)
    value = _parsed(read_text(path, MOST_BYTES), source)
    if isinstance(value, dict):
        known = list(TaskSettings.model_fields)
        for name in value:
            if name not in known:
                raise DataError(path, None, f"{name}: {_explain_unknown(name, known)}")
    with data_errors_at(path, value=value):
        block = TaskSettings.model_validate(value)

    def placed(item: Any) -> Any:
        if isinstance(item, dict):
            return {split: placed(place) for split, place in item.items()}
        return [placed(place) for place in item] if isinstance(item, list) else item and str(path.parent / item)

    places = {name: placed(getattr(block, name)) for name in ("path", "files", "answers")}
    more = {} if given is None else {name: getattr(given, name) for name in given.model_fields_set - {"path"}}
    return block.model_copy(update={**places, **more})


def _explain_unknown(name: str, known: Sequence[str]) -> str:
    return f"unknown key{did_you_mean(name, known)} (known: {join_names(known, 40)})"


def origin_of(source: str, overrides: Sequence[str], place: Sequence[str]) -> str:
    """Return what set the value at a place: an override, or the file.

    >>> origin_of("r.yaml", ["evaluation.bins=0"], ("evaluation", "bins"))
    '--set evaluation.bins=0'
    """
    at = tuple(place)
    for override in reversed(overrides):
        named = tuple(override.partition("=")[0].strip().split("."))
        if at and at[: len(named)] == named[: len(at)]:
            return f"--set {override}"
    return source


def _overridden(value: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings with every `a.b=c` applied, c being YAML."""

    def placed(block: object, place: list[str], new: object) -> dict[str, Any]:
        settings = block if isinstance(block, dict) else {}
        first, *rest = place
        return {**settings, first: placed(settings.get(first), rest, new) if rest else new}

    for override in overrides:
        place, equals, text = override.partition("=")
        if not equals or not place.strip():
            raise DataError(f"--set {override}", None, "expected place=value, such as evaluation.bins=15")
        value = placed(value, place.strip().split("."), _parsed(text, f"--set {override}"))
    return value


def _keys_at(place: Sequence[str]) -> list[str]:
    """Return the keys that the block at a place may have."""
    model: type[BaseModel] = Recipe
    names = iter(place)
    for name in names:
        annotation = model.model_fields[name].annotation
        if get_origin(annotation) is dict:
            next(names, None)  # a key of the user's own, such as a task's name
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        model = next(kind for kind in kinds if issubclass(kind, BaseModel))
    return list(model.model_fields)


# ---- keywords that go to a trainer as they are ----------------------------------------------------------------------


@cache
def keywords(config: str) -> dict[str, str]:
    """Return the keywords of one of CONFIGS and their types; none where a library is missing or laid out differently.

    They are the annotated names in the class's source: importing it would import torch, which takes seconds.

    >>> keywords("SupervisedConfig")["num_train_epochs"]
    'float'
    """
    names: dict[str, str] = {}
    for package, file, class_name in map(str.split, CONFIGS[config]):
        spec = find_spec(package)
        path = Path(spec.origin or "").parent / file if spec is not None else Path()
        tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
        fields = {
            entry.target.id: ast.unparse(entry.annotation)
            for node in tree.body
            for entry in (node.body if isinstance(node, ast.ClassDef) and node.name == class_name else ())
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
            if "ClassVar" not in ast.unparse(entry.annotation)
        }
        if not fields:
            return {}
        names = fields | names
    return names


# A plain type in an annotation -> the types of its values in YAML. Any other type takes every value.
_KINDS: dict[str, set[type]] = {"int": {int}, "float": {int, float}, "str": {str}, "bool": {bool}, "None": {type(None)}}


# Keywords that the recipe or the run fills itself: a second value would win over the one that is read and reported.
_GIVEN = {"calibration": "the method gives it", "max_length": "context gives it", "output_dir": "the run has its own"}
_GIVEN |= {"task_type": "it is always CAUSAL_LM", "label_smoothing_factor": "sft+ls smooths labels"}
_GIVEN |= {"outcome_score": "outcome.score gives it", "outcome_rows_per_pair": "outcome.rows_per_pair gives it"}
_GIVEN |= {"outcome_target": "outcome.target gives it", "outcome_samples": "outcome.samples gives it"}
_GIVEN |= {"prefix_sharing": "it is set at the top of the recipe", "model_init_kwargs": "the block model gives them"}
_GIVEN |= dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), "keep gives it")
_GIVEN |= {"resume_from_checkpoint": "a run resumes by itself"}
_GIVEN |= dict.fromkeys(("push_to_hub", "hub_token"), "models stay in the folder of the run")
_GIVEN |= dict.fromkeys(("save_only_model", "ignore_data_skip"), "a run that was killed would end with another model")


def _refused(config: str, name: str, value: Any) -> str | None:
    """Return what is wrong with a keyword, as far as that can be seen without the library."""
    known = keywords(config)
    kinds = known.get(name, "").split(" | ")
    if known and name not in known:
        return f"not a keyword of {config}{did_you_mean(name, known)}"
    if name in _GIVEN:
        return f"is not set here: {_GIVEN[name]}"
    if isinstance(value, str) and not any("str" in kind for kind in kinds):
        with suppress(ValueError, OverflowError):
            meant = int(float(value)) if kinds[0] == "int" else f"{float(value):.1e}"
            return f"{value!r} is text in YAML; write {meant}"
    if name in ("learning_rate", "num_train_epochs") and not (isinstance(value, int | float) and value > 0):
        return f"expected a number above 0, got {value!r}"
    if name in ("seed", "data_seed") and isinstance(value, int) and value < 0:
        return f"expected a number of at least 0, got {value}"
    # The libraries take more than they annotate for two keywords: fsdp: true, lora_alpha: 0.5.
    fits = name in ("fsdp", "lora_alpha") or any(type(value) in _KINDS.get(kind, {type(value)}) for kind in kinds)
    return None if fits else f"expected {' or '.join(kinds)}, got {value!r}"


# ---- YAML -----------------------------------------------------------------------------------------------------------


def _parsed(text: str, source: str) -> Any:
    """Return the value of a YAML text that holds plain values only; a problem is one DataError with the line."""
    try:
        value = yaml.load(text, _Strict)
        _check(value, ())
    except yaml.reader.ReaderError as error:
        problem = f"not YAML: character {chr(error.character)!r} at position {error.position} is not allowed"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1} column {mark.column + 1}: " if mark is not None else ""
        problem = f"{line}{error.problem or error.context}"
    except (yaml.YAMLError, ValueError) as error:
        problem = str(error)
    else:
        return value
    raise DataError(source, None, problem)


def _check(value: object, place: tuple[str, ...]) -> None:
    """Refuse what JSON could not hold, and levels that only aliases add up to."""
    at = f"{'.'.join(place)}: " if place else ""
    if len(place) > problems.MOST_DEPTH:
        raise ValueError(problems.TOO_DEEP)
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise ValueError(f"{at}key {shorten_text(repr(key), 60)}: expected a text; quote it")
            _check(item, (*place, str(key)))
    elif value is not None and not isinstance(value, bool | str):
        if not isinstance(value, int | float):
            kind = type(value).__name__
            raise ValueError(f"{at}expected a text, a number, a list or a block, got a {kind}; quote it")
        if not -(2**63) <= value < 2**63:  # also what is not finite: a nan fails both
            raise ValueError(f"{at}expected a finite number below 2^63, got {shorten_text(repr(value), 40)}")


class _Strict(yaml.SafeLoader):
    """YAML with a bounded number of values and levels, whose keys are scalars and occur once."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._values, self._sizes = 0, dict[str | None, int]()  # values so far, and of each anchor; aliases expanded
        self._open = list[str | None]()  # the anchors of the nodes that are not complete

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node. Too many are refused here, before all are composed, and with the line."""
        event, before = self.peek_event(), self._values  # type: ignore[no-untyped-call]
        alias = isinstance(event, yaml.AliasEvent)
        self._values += self._sizes.get(event.anchor, 1) if alias else 1
        problem = "an alias refers to a value that it is part of" if alias and event.anchor in self._open else None
        self._open.append(None if alias else event.anchor)
        if len(self._open) > problems.MOST_DEPTH or self._values > MOST_VALUES:
            problem = TOO_MANY if self._values > MOST_VALUES else problems.TOO_DEEP
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._open.pop()
        self._sizes[event.anchor] = self._values - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; refuse an impossible date, a number of 5,000 digits and a number in base 8 or 60."""
        try:
            value = super().construct_object(node, deep=deep)
            if not isinstance(value, int | float) or not _OTHER_BASE.match(node.value):
                return value
            problem = f"{shorten_text(repr(node.value), 60)} is {value} in YAML: write that, or quote it"
        except ValueError:
            problem = f"{shorten_text(repr(node.value), 60)} cannot be read as a number or a date"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; refuse a key that is a list or a mapping, and one that occurs twice."""
        seen: set[Any] = set()
        for key_node in (key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"):  # `<<` may repeat keys
            if not isinstance(key_node, yaml.ScalarNode):
                kind = "a list" if isinstance(key_node, yaml.SequenceNode) else "a mapping"
                problem = f"expected a text as key, got {kind}"
            elif (key := self.construct_object(key_node, deep=deep)) in seen:
                problem = f"key {key!r} occurs twice"
            else:
                seen.add(key)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        return super().construct_mapping(node, deep=deep)
