"""Every setting of a recipe is in the keys of what it determines, or is excluded by name and here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from jinja2 import TemplateError
from pydantic import BaseModel, ValidationError

from catto import prompts
from catto.answer.forms import VERSION
from catto.methods import METHODS
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, StageSettings, list_needed
from catto.prompts import WORDING, fingerprint, open_fingerprint
from catto.recipe.load import load_recipe
from catto.recipe.settings import (
    EvaluationSettings,
    ModelSettings,
    OutcomeSettings,
    Recipe,
    TaskSettings,
    TeacherSettings,
    TrainerSettings,
)

BASE: dict[str, Any] = {
    "name": "keys",
    "tasks": {"witnesses": {"train": 40}, "snli": {"data_dir": "somewhere"}},
    "model": {"scratch": {}},
    "methods": ["sft", "sft+ls", "dpo", "dpo+ts", "rcft", "dpo+outcome"],
    "seeds": [0, 1],
    "teacher": {"source": "server", "model": "m", "base_url": "http://localhost:1/v1"},
    "preference": {"learning_rates": [1e-4, 1e-5]},
    "evaluation": {"k": [4]},
}
# Settings whose other value has to fit the rest of the recipe.
OTHER: dict[str, Any] = {
    "train_on": "snli",
    "methods": ("sft", "dpo"),
    "budgets": ("matched",),
    "seeds": (0,),
    "evaluation.k": (8,),
    "evaluation.preference_pairs": True,  # the teacher is a server, so there are none
    "model.scratch": None,
    "tasks.snli.files": {"train": "other"},
    "tasks.snli.fields": {"question": "other"},
    "tasks.snli.reliabilities": [0.5],
    "resources.train.memory": "1GB",
    "resources.predict.memory": "1GB",
    "resources.report.memory": "1GB",
}
# The kinds of stages that a setting of a block enters first; what depends on these has another key through them.
BLOCKS: dict[str, set[str]] = {
    "tasks": {"questions", "held_out"},
    "model": {"train"},
    "teacher": {"responses"},
    "sft": {"train"},
    "preference": {"train"},
    "rcft": {"train"},
    "outcome": {"sampled"},
    "evaluation": {"sampled", "generated"},
    "context": {"train"},
    "keep": {"train"},
    "prefix_sharing": {"train"},
    "small_pairs": {"train"},
    "resources": set(),
}
# Settings that enter elsewhere than the rest of their block; empty: no stage depends on it.
EXCEPTIONS: dict[str, set[str]] = {
    "tasks.snli.train": {"questions"},
    "tasks.snli.validation": {"held_out"},
    "tasks.snli.test": {"held_out"},
    "teacher.base_url": set(),
    "teacher.api_key_env": set(),
    "teacher.concurrency": set(),
    "teacher.timeout": set(),
    "teacher.retries": set(),
    "teacher.deadline": set(),
    "teacher.max_refused": set(),
    "teacher.pairs_per_question": {"rows"},
    "teacher.min_correct": {"rows"},
    "teacher.min_wrong": {"rows"},
    "outcome.score": {"train"},
    "outcome.rows_per_pair": {"train"},
    "outcome.target": {"sampled"},  # votes are of further samples
    "outcome.samples": set(),  # read where votes are the target
    "outcome.source": {"rows"},
    "start": {"base"},
    "evaluation.bins": {"report"},
    "evaluation.resamples": {"report"},
    "evaluation.unparsed": {"report"},
    "evaluation.decode": {"generated"},
    "evaluation.k": {"generated"},
    "evaluation.sampling": {"generated"},
    "evaluation.preference_pairs": {"responses"},  # new stages; all others but the report keep their keys
    "name": {"report"},
    "methods": {"report"},
    "budgets": {"report"},
    "seeds": {"report"},
    "lr_choice": {"chosen"},
    "train_on": {"chosen", "generated"},
}


def recipe_of(folder: Path) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return load_recipe(str(path))


def leaves(block: BaseModel, place: str = "") -> Iterator[tuple[str, BaseModel, str]]:
    """Every setting: its place, the block that has it, and its name there. Of the tasks, those of one."""
    for name in type(block).model_fields:
        value = getattr(block, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{place}{name}.")
            if None not in get_args(type(block).model_fields[name].annotation):
                continue
        if name == "tasks":
            yield from leaves(value["snli"], "tasks.snli.")
        else:
            yield f"{place}{name}", block, name


def other(place: str, block: BaseModel, name: str) -> Any:
    """Another value of a setting, of the same type."""
    if place in OTHER:
        return OTHER[place]
    value, annotation = getattr(block, name), type(block).model_fields[name].annotation
    kinds = [annotation, *get_args(annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return next(one for one in get_args(kind) if one != value)
    if value is None:
        kind = next(kind for kind in get_args(annotation) if kind is not type(None))
        made: dict[Any, Any] = {int: 7, str: "other", float: 0.5, dict: {"r": 4}, list: ["other"], tuple: (0.5,)}
        plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        return made[get_origin(plain) or plain]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return {**value, "x": 1} if isinstance(value, dict) else tuple(one + 1 for one in value)


def with_setting(recipe: Recipe, place: str, value: Any) -> Recipe:
    """The recipe with another value at a place, unchecked: what is combined here need not make sense."""
    first, *rest = place.split(".")
    if not rest:
        return recipe.model_copy(update={first: value})
    if first == "tasks":
        task, name = rest
        tasks = {**recipe.tasks, task: recipe.tasks[task].model_copy(update={name: value})}
        return recipe.model_copy(update={"tasks": tasks})
    block = with_setting(getattr(recipe, first), ".".join(rest), value)
    return recipe.model_copy(update={first: block})


def keys(recipe: Recipe) -> set[str]:
    return {stage.key for stage in stages(recipe)}


def first_changed(known: set[str], after: Recipe) -> set[str]:
    """Kinds of the stages with a new key of which every need has an old one."""
    fresh = [stage for stage in stages(after) if stage.key not in known]
    return {stage.kind for stage in fresh if all(need.key in known for need in stage.needs.values())}


def stages(recipe: Recipe) -> list[Stage]:
    return list_needed([Graph(recipe).plan_report()])


def test_every_setting_is_in_the_keys_of_what_it_determines(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    known = keys(recipe)
    found = {
        place: first_changed(known, with_setting(recipe, place, other(place, block, name)))
        for place, block, name in leaves(recipe)
    }
    expected = {place: EXCEPTIONS.get(place, BLOCKS.get(place.split(".")[0], set())) for place in found}
    assert {place: (found[place], expected[place]) for place in found if found[place] != expected[place]} == {}
    assert EXCEPTIONS.keys() <= found.keys()


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (TaskSettings, "tasks.snli"),
        (ModelSettings, "model"),
        (TeacherSettings, "teacher"),
        (TrainerSettings, "sft"),
        (TrainerSettings, "preference"),
        (TrainerSettings, "rcft"),
        (OutcomeSettings, "outcome"),
        (EvaluationSettings, "evaluation"),
        (Recipe, ""),
    ],
)
def test_a_new_setting_counts_by_default(tmp_path: Path, kind: type[BaseModel], place: str) -> None:
    class Grown(kind):  # type: ignore[misc, valid-type]
        new: int = 0

    recipe = recipe_of(tmp_path)
    block = recipe.tasks["snli"] if place.startswith("tasks") else getattr(recipe, place) if place else recipe

    def grown(new: int) -> Recipe:
        made = Grown.model_construct(**{**dict(block), "new": new})
        if place.startswith("tasks"):
            return recipe.model_copy(update={"tasks": {**recipe.tasks, "snli": made}})
        return recipe.model_copy(update={place: made}) if place else made

    assert first_changed(keys(grown(0)), grown(1)) == BLOCKS.get(place.split(".")[0], {"train"})


def nested(settings: StageSettings) -> Iterator[StageSettings]:
    """Settings of a stage and those within them."""
    yield settings
    for value in vars(settings).values():
        if isinstance(value, StageSettings):
            yield from nested(value)


def test_settings_of_stages_are_frozen_and_exclude_names_that_exist(tmp_path: Path) -> None:
    checked = set()
    for stage in stages(recipe_of(tmp_path)):
        for settings in nested(stage.settings):
            with pytest.raises(FrozenInstanceError):
                settings.new = 1  # type: ignore[attr-defined]
            for field, names in settings.excluded.items():
                if (block := getattr(settings, field)) is not None:
                    assert names <= vars(block).keys()
                    checked.add((type(settings).__name__, field))
    assert checked == {
        ("Generating", "evaluation"),
        ("ResponseSettings", "outcome"),
        ("TrainSettings", "method"),
        ("TrainSettings", "block"),
        ("TrainSettings", "outcome"),
        ("ReportSettings", "recipe"),
    }


def test_an_edited_method_is_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    known, original = keys(recipe), METHODS["dpo"]
    for change in ({"calibration": "l1"}, {"label_smoothing": 0.2}, {"rcft_weight": 2.0}, {"batch_size": 8}):
        monkeypatch.setitem(METHODS, "dpo", replace(original, **change))  # type: ignore[arg-type]
        fresh = [stage for stage in stages(recipe) if stage.key not in known and stage.kind == "train"]
        assert {stage.method for stage in fresh} == {"dpo", "rcft"}
    monkeypatch.setitem(METHODS, "dpo", replace(original, title="Other"))
    assert keys(recipe) == known


def test_a_loss_of_its_own_is_in_the_key_and_the_recipes_loss_is_not(tmp_path: Path) -> None:
    """A method without one has the key that it had before methods could have one."""
    recipe = recipe_of(tmp_path).model_copy(update={"methods": ("sft", "dpo", "ipo")})
    parts = {stage.method: stage.settings.key_fields()["method"] for stage in stages(recipe) if stage.kind == "train"}
    assert parts["ipo"]["loss_type"] == ("ipo",)
    assert not {"loss_type", "preference_tokens"} & parts["dpo"].keys()
    other_loss = with_setting(recipe, "preference.trl", {"loss_type": "hinge"})
    fresh = {stage.method for stage in stages(other_loss) if stage.kind == "train" and stage.key not in keys(recipe)}
    assert fresh == {"dpo"}


# ---- prompts and parser -------------------------------------------------------------------------------------------


def kinds_first_changed(monkeypatch: pytest.MonkeyPatch, folder: Path, target: str, value: object) -> set[str]:
    recipe = recipe_of(folder)
    known = keys(recipe)
    monkeypatch.setattr(target, value)
    return first_changed(known, recipe)


def test_another_parser_reads_again_and_neither_asks_nor_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kinds_first_changed(monkeypatch, tmp_path, "catto.answer.forms.VERSION", VERSION + 1) == {"rows"}


def test_whatever_reads_answers_itself_has_the_parser_among_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rows come out the same, what was made of them is taken over: RCFT's bins are read by the parser too."""
    recipe = recipe_of(tmp_path)
    before = {stage.name: stage.settings.key_fields() for stage in stages(recipe)}
    monkeypatch.setattr("catto.answer.forms.VERSION", VERSION + 1)
    changed = [stage for stage in stages(recipe) if stage.settings.key_fields() != before[stage.name]]
    assert {stage.method or stage.kind for stage in changed} == {"rows", "predicted", "rcft"}


def test_another_wording_asks_and_generates_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = {**WORDING, "snli": WORDING["snli"]._replace(role="You judge.")}
    assert kinds_first_changed(monkeypatch, tmp_path, "catto.prompts.WORDING", changed) == {"responses"}


@pytest.mark.parametrize("task", [*WORDING, None])
def test_the_fingerprint_sees_every_wording(monkeypatch: pytest.MonkeyPatch, task: str | None) -> None:
    before = fingerprint()
    assert before == fingerprint()
    if task is None:
        monkeypatch.setattr(prompts, "DEFAULT", prompts.DEFAULT._replace(task="Pick one of {n}."))
    else:
        monkeypatch.setitem(WORDING, task, WORDING[task]._replace(task="Pick one of {n}."))
    assert fingerprint() != before


# What prompts and endings are made by; the rest of the module reads responses.
RENDERING = (
    *("WORDING", "DEFAULT", "_NLI", "render_messages", "_render_system", "_render_fields", "_render_options"),
    *("OPEN", "OPEN_NUMBER", "OPEN_WORDING", "JUDGEMENT_LABELS", "render_judgement", "add_judgement"),
    *("render_completion", "prompt_text", "fold_system"),
)


def literals() -> list[str]:
    """Every text that stands in what renders, by its place; docstrings left out."""
    tree = ast.parse(Path(prompts.__file__).read_text(encoding="utf-8"))
    return [f"{node.lineno}:{node.col_offset} {node.value[:20]!r}" for node in texts(tree)]


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    for top in tree.body:
        names = {getattr(top, "name", ""), *(getattr(one, "id", "") for one in getattr(top, "targets", ()))}
        names.add(getattr(getattr(top, "target", None), "id", ""))
        if names & set(RENDERING):
            docstring = getattr(top, "body", [None])[0]
            for node in ast.walk(top):
                stands = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip(" ,")
                if stands and not (isinstance(docstring, ast.Expr) and docstring.value is node):
                    yield node  # type: ignore[misc]


def test_every_rendering_name_exists() -> None:
    assert [name for name in RENDERING if not hasattr(prompts, name)] == []


@pytest.mark.parametrize("place", range(len(literals())), ids=literals())
def test_the_fingerprint_sees_every_text_of_a_prompt(place: int) -> None:
    """One letter more in any text that prompts or endings are made of; a change that cannot run is seen too."""
    tree = ast.parse(Path(prompts.__file__).read_text(encoding="utf-8"))
    node = list(texts(tree))[place]
    node.value = f"{node.value}x"
    space: dict[str, Any] = {"__name__": "catto.prompts", "__file__": prompts.__file__}
    exec(compile(tree, "changed_prompts", "exec", dont_inherit=True), space)
    try:
        changed = (space["fingerprint"](), space["open_fingerprint"]())
        assert changed != (fingerprint(), open_fingerprint())
    except (ValidationError, KeyError, TemplateError):
        return
