"""Every command refuses malformed input in one short line that names the place, with exit code 2 and at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import run
from malformed import CASES, Case

Capture = pytest.CaptureFixture[str]
# The longest line: `catto: `, a path or two, a message.
LONGEST = 1250


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_there_are_enough_of_them_and_each_is_named_once() -> None:
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_malformed_input_is_one_line_and_exit_code_2(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    case.write(tmp_path)
    before, began = listing(tmp_path), time.process_time()
    done = run(capsys, *case.arguments)
    assert time.process_time() - began < 10
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("catto: ")
    assert done.err.count("\n") == 1
    assert len(done.err) <= LONGEST
    assert "Traceback" not in done.err
    for word in case.told:
        assert word in done.err, done.err
    assert listing(tmp_path) == before


# One of each kind as a process of its own: what the interpreter prints at its end counts too.
PROCESSES = (
    "eval: no such folder",
    "eval: other settings",
    "measure: deep line",
    "measure --bins 1000000000",
    "recipe: bomb",
    "gguf: garbage",
    "train --seed",
)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_process_refuses_it_before_torch_is_imported(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == name)
    case.write(tmp_path)
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('HEAVY', sorted({'torch', 'transformers', 'trl'} & set(sys.modules))))\n"
        "from catto.cli import main\nmain(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, *case.arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "HEAVY []\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in case.told)
