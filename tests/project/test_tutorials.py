"""The tutorials do what they say: every block runs, and prints what the page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from pages import ROOT, Block, blocks
from tutorial_samples import write_samples

from catto import ece
from catto.answer_columns import read_graded
from catto.cli import app

pytestmark = pytest.mark.slow

TUTORIALS = ROOT / "docs" / "tutorials"
PICTURES = {"calibrate-a-dpo-model": "after.svg", "check-a-log": "reliability.svg", "answer-when-sure": None}
LANGUAGES = {"bash", "python", "text", "bash server", "python server"}
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "COLUMNS": "100"}


def read_blocks(name: str) -> list[Block]:
    return blocks((TUTORIALS / f"{name}.md").read_text(encoding="utf-8"))


def run_block(block: Block, folder: Path) -> str:
    """Run a bash or Python block in a process of its own; return what it printed, in one line."""
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    if block.language == "python":
        command = [sys.executable, "-c", block.text]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **QUIET, "PATH": path}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the readers own."""
    made = tmp_path_factory.mktemp("tutorials")
    write_samples(made)
    return made


@pytest.mark.parametrize("name", PICTURES)
def test_blocks_run_and_print_what_the_page_shows(name: str, folder: Path) -> None:
    printed = ""
    for block in read_blocks(name):
        if block.language in ("bash", "python"):
            printed = run_block(block, folder)
        if block.language == "text":
            check_output(block.text, printed, is_exact=name != "calibrate-a-dpo-model")
    picture = PICTURES[name]
    if picture is not None:
        assert "<svg" in (folder / picture).read_text(encoding="utf-8")
    if name == "calibrate-a-dpo-model":
        check_calibration(folder)


def check_output(shown: str, printed: str, *, is_exact: bool) -> None:
    """Compare a text block with the output. A trained model's numbers may differ between machines."""
    if is_exact:
        for paragraph in re.split(r"\n(?= |\n|N = |tau = )", shown):
            assert " ".join(paragraph.split()) in printed
        return
    for line in shown.splitlines():
        for word in re.findall(r"[A-Za-z]{3,}", line):
            assert word in printed


def check_calibration(folder: Path) -> None:
    """The first tutorial promises that the calibrated answers have a lower ECE."""
    before = read_graded(folder / "eval-test" / "predictions.jsonl")
    after = read_graded(folder / "calibrated.jsonl")
    assert ece(after.confidence, after.correct) < 0.75 * ece(before.confidence, before.correct)


def test_pages_are_short_and_use_known_blocks() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == set(PICTURES)
    for name in PICTURES:
        assert len((TUTORIALS / f"{name}.md").read_text(encoding="utf-8").splitlines()) <= 90
        assert {block.language for block in read_blocks(name)} <= LANGUAGES


def test_options_of_server_commands_exist() -> None:
    """These blocks do not run: they need a model's server."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    checked = 0
    for name in PICTURES:
        for block in read_blocks(name):
            if block.language != "bash server":
                continue
            words = shlex.split(block.text.replace("\\\n", " "))
            known = {option for parameter in commands[words[1]].params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known
            checked += 1
    assert checked
