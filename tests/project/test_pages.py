"""The pages name only what is there: every link, command, recipe, test, function, file and key."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from pages import PAGES, ROOT, blocks, everything

from catto.cli import app
from catto.pipeline.plan import Graph
from catto.pipeline.stage import list_needed
from catto.recipe import settings as recipe_module
from catto.recipe.load import find_shipped_recipes, load_recipe
from catto.recipe.settings import ModelSettings, Recipe, Settings
from catto.records import Manifest, Prediction, PreferenceRow, Question, Refusal, Response, SftRow


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", everything(), re.MULTILINE))
    assert {"test", "quickstart"} <= named
    assert not [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def commented(recipe: str) -> str:
    """The indented lines of a recipe's comments: its commands."""
    return "".join(match[1] for match in re.finditer(r"^#   (.*\n)", recipe, re.MULTILINE))


def whole_lines(text: str) -> list[str]:
    """The lines as the shell sees them: one that ends with a backslash goes on with the next."""
    return re.sub(r" *\\\n *", " ", text).splitlines()


def catto_lines() -> list[list[str]]:
    """Every `catto ...` command in a shell block or in backticks, in all pages and shipped recipes."""
    shell = [line for page in PAGES for block in blocks((ROOT / page).read_text(encoding="utf-8"))
             if block.language.startswith("bash") for line in whole_lines(block.text)]  # fmt: skip
    inline = re.findall(r"`(catto [a-z][^`\n]*)`", everything())
    comments = [line for path in find_shipped_recipes().values() for line in whole_lines(commented(path.read_text()))]
    return [
        shlex.split(line.split("  ")[0], comments=True)
        for line in (*shell, *inline, *comments)
        if line.startswith("catto ")
    ]


def test_every_command_exists() -> None:
    click_app = typer.main.get_command(app)
    for words in catto_lines():
        place: Any = click_app
        for word in words[1:]:
            if not hasattr(place, "commands"):
                break
            assert word in place.commands or word.startswith("-"), f"{' '.join(words)}: no command {word}"
            place = place.commands.get(word, place)


def recipe_lines() -> list[tuple[str, list[str]]]:
    """The recipe and the overrides of every command that names a shipped one."""
    found = []
    for words in catto_lines():
        if words[1] in ("run", "plan", "teach", "train") and len(words) > 2 and words[2] in find_shipped_recipes():
            sets = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
            found.append((words[2], sets))
    return found


def test_named_recipes_load_and_plan_with_their_overrides() -> None:
    lines = recipe_lines()
    assert ("paper", []) in lines
    assert any("train_on=mmlu" in sets for _, sets in lines)
    for name, sets in lines:
        assert list_needed([Graph(load_recipe(name, sets)).plan_report()])


def test_seeds_that_were_run_apart_fit_into_one_folder() -> None:
    whole = {stage.folder for stage in list_needed([Graph(load_recipe("paper")).plan_report()])}
    one = [
        stage.folder
        for stage in list_needed([Graph(load_recipe("paper", ["seeds=[1]"])).plan_report()])
        if stage.kind != "report"
    ]
    assert one
    assert set(one) < whole


def test_shipped_recipes_load_and_plan() -> None:
    assert {"quickstart", "smollm2", "paper"} <= set(find_shipped_recipes())
    for name in find_shipped_recipes():
        recipe = load_recipe(name)
        assert recipe.name == name
        assert Graph(recipe).list_cells()


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        assert there.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    """What a heading is linked by: lower case, punctuation off, blanks to hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_functions_of_the_equation_table_exist() -> None:
    """Each `catto.a.b.c` in backticks, on every page, is there."""
    for dotted in set(re.findall(r"`(catto(?:\.\w+)+)", everything())):
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found: Any = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for part in parts[cut:]:
                found = getattr(found, part)
            break


def test_the_architecture_page_has_a_line_for_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.name + "/" * path.is_dir() for path in (ROOT / "src" / "catto").iterdir() if path.name[0] not in "_."}
    assert [room for room in sorted(rooms - {"py.typed"}) if f"`{room}`" not in page] == []


def settings_models() -> list[type[Settings]]:
    found = [value for value in vars(recipe_module).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, Settings) and value is not Settings]


def test_every_key_of_a_recipe_is_documented() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert {Recipe, ModelSettings} <= set(settings_models())
    missing = [f"{model.__name__}.{name}" for model in settings_models() for name in model.model_fields
               if f"`{name}`" not in page]  # fmt: skip
    assert not missing


def test_every_field_of_a_record_is_documented() -> None:
    page = (ROOT / "docs" / "conventions.md").read_text(encoding="utf-8")
    kinds = (Question, Response, Refusal, SftRow, PreferenceRow, Prediction, Manifest)
    assert not [f"{kind.__name__}.{name}" for kind in kinds for name in kind.model_fields if f"`{name}`" not in page]
