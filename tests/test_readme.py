"""The README does what it says: every block runs, every link leads somewhere, every test and file it names is there.

Blocks run in order in one folder, each in a process of its own. `bash gpu` blocks are checked through the recipes they
name; `make` is left to the gate.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from catto import recipe as recipe_module
from catto.cli import app
from catto.experiment.graph import Graph
from catto.experiment.stages import ordered
from catto.recipe import ModelSettings, Recipe, ScratchModel, Settings
from catto.recipe_file import load, shipped
from catto.records import Manifest, Prediction, PreferenceRow, Question, Response, SftRow
from catto.tasks.witnesses import generate

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "MPLBACKEND": "Agg"}


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: str = README) -> list[Block]:
    return [Block(match[1].strip(), match[2]) for match in BLOCK.finditer(page)]


def after(diff: str) -> str:
    """The script that a diff leads to."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the README takes for granted: a small chat model and preference pairs."""
    from catto.training.scratch import scratch_model, word_tokenizer

    made = tmp_path_factory.mktemp("readme")
    questions = list(generate("train", 60, seed=0)) + list(generate("test", 60, seed=0))
    pairs = [pair(question) for question in questions[:8]]
    texts = [message["content"] for one in pairs for part in one.values() for message in part]
    tokenizer = word_tokenizer(texts + [text for one in questions for text in prompt_texts(one)])
    model = scratch_model(tokenizer, ScratchModel(layers=1, width=16, heads=2, intermediate=16), seed=0)
    for part in (model, tokenizer):
        part.save_pretrained(made / "my-sft-model")
    (made / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs), encoding="utf-8")
    return made


def prompt_texts(question: Question) -> list[str]:
    from catto.prompts import messages

    return [message.content for message in messages(question)]


def pair(question: Question) -> dict[str, list[dict[str, str]]]:
    """One row in TRL's conversational preference format."""
    from catto.prompts import completion, messages

    wrong = next(label for label in question.labels if label != question.gold)
    chosen, rejected = (completion("so it is", label) for label in (question.gold, wrong))
    return {
        "prompt": [message.model_dump() for message in messages(question)],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def run(command: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **QUIET, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def runnable(block: Block) -> bool:
    return block.language in ("python", "diff") or (block.language == "bash" and "make " not in block.text)


# Importing torch takes seconds, so neighbouring blocks share an interpreter; each has names of its own.
EACH = (
    "import json, sys\n"
    "for text in json.loads(sys.argv[1]):\n"
    "    exec(compile(text, 'block', 'exec'), {'__name__': 'block'})"
)


def execute(page: str, folder: Path) -> list[str]:
    """Run the blocks of a page in order; what each shell block or row of Python blocks printed."""
    said = []
    for shell, group in groupby(filter(runnable, blocks(page)), key=lambda block: block.language == "bash"):
        if shell:
            said += [run(["bash", "-euo", "pipefail", "-c", block.text], folder) for block in group]
        else:
            texts = [after(block.text) if block.language == "diff" else block.text for block in group]
            said.append(run([sys.executable, "-c", EACH, json.dumps(texts)], folder))
    return said


def test_every_block_is_of_a_known_kind() -> None:
    assert {block.language for block in blocks()} == {"python", "diff", "bash", "bash gpu", "text", "bibtex"}


def test_blocks_run_in_order(folder: Path) -> None:
    """One test, since later blocks read what earlier ones wrote."""
    said = execute(README, folder)
    assert len(said) >= 5
    assert (folder / "reliability.svg").read_text(encoding="utf-8").count("<svg")
    assert (folder / "my-dpo-model" / "model.safetensors").exists()
    sentence = " ".join(re.search(r"`(ECE [^`]*average\.)`", README)[1].split())  # type: ignore[index]
    assert sentence in " ".join(" ".join(said).split())


def test_the_diff_changes_one_line() -> None:
    (diff,) = [block.text for block in blocks() if block.language == "diff"]
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and line]
    assert [line[0] for line in changed] == ["-", "+"]
    before = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("+"))
    compile(before, "before", "exec")


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", everything(), re.MULTILINE))
    assert {"test", "quickstart"} <= named
    assert not [target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)]


def everything() -> str:
    return "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)


def catto_lines() -> list[list[str]]:
    """Every `catto ...` command in a shell block or in backticks, in all pages and shipped recipes."""
    shell = [line for page in PAGES for block in blocks((ROOT / page).read_text(encoding="utf-8"))
             if block.language.startswith("bash") for line in block.text.splitlines()]  # fmt: skip
    inline = re.findall(r"`(catto [a-z][^`\n]*)`", everything())
    comments = [line.lstrip("# ") for path in shipped().values() for line in path.read_text().splitlines()
                if line.startswith("#   catto")]  # fmt: skip
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
        if words[1] in ("run", "plan", "teach", "train") and len(words) > 2 and words[2] in shipped():
            sets = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
            found.append((words[2], sets))
    return found


def test_named_recipes_load_and_plan_with_their_overrides() -> None:
    lines = recipe_lines()
    assert ("paper", []) in lines
    assert any("train_on=mmlu" in sets for _, sets in lines)
    for name, sets in lines:
        assert ordered([Graph(load(name, sets)).report()])


def test_the_paper_has_as_many_trainings_as_the_readme_says() -> None:
    trainings = sum(stage.kind == "train" for stage in ordered([Graph(load("paper")).report()]))
    assert f"what would run: {trainings} trainings" in README


def test_seeds_that_were_run_apart_fit_into_one_folder() -> None:
    whole = {stage.folder for stage in ordered([Graph(load("paper")).report()])}
    one = [stage.folder for stage in ordered([Graph(load("paper", ["seeds=[1]"])).report()]) if stage.kind != "report"]
    assert one
    assert set(one) < whole


def test_shipped_recipes_load_and_plan() -> None:
    assert {"quickstart", "smollm2", "paper"} <= set(shipped())
    for name in shipped():
        recipe = load(name)
        assert recipe.name == name
        assert Graph(recipe).cells()


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


def test_tests_that_are_named_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", everything()))
    assert len(named) > 20
    for file, test in named:
        names = {
            node.name
            for node in ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
            if isinstance(node, ast.FunctionDef)
        }
        assert test in names, f"{file}::{test}"


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


def test_the_file_map_has_a_line_for_every_file() -> None:
    for folder in (
        ROOT / "src" / "catto",
        *sorted(p for p in (ROOT / "src" / "catto").iterdir() if (p / "__init__.py").exists()),
    ):
        title = f"**`{folder.relative_to(ROOT).as_posix()}`**"
        listed = re.findall(r"^(\w+\.py)  ", README.partition(title)[2].partition("```\n\n")[0], re.MULTILINE)
        assert listed == sorted(path.name for path in folder.glob("*.py")), title


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
    kinds = (Question, Response, SftRow, PreferenceRow, Prediction, Manifest)
    assert not [f"{kind.__name__}.{name}" for kind in kinds for name in kind.model_fields if f"`{name}`" not in page]


def test_worked_examples_run(folder: Path) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    assert sum(block.language == "python" for block in blocks(page)) == 6
    assert execute(page, folder)
