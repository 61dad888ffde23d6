"""The gate itself: the same examples in every run, one line on what was skipped, a fuzzer that stops in time."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
PROPERTY = """
import time
from hypothesis import given, strategies as st

@given(st.integers(0, 10_000))
def test_small(n):
    {}
"""

# Plugins that the settings do not use: they would be a quarter of the time that each of these runs takes to start.
UNUSED = "-p no:anyio -p no:benchmark -p no:xdist -p no:xdist.looponfail"


def project(folder: Path, source: str, grace: float = 600.0) -> Path:
    """A folder with this suite's settings and one file of tests. A busy machine needs minutes to start a process."""
    folder = folder / "tests"
    folder.mkdir()
    for name in ("conftest.py", "needs.py", "chromium.py"):
        shutil.copy(HERE / name, folder)
    fuzz = (HERE / "fuzz.py").read_text()
    (folder / "fuzz.py").write_text(fuzz.replace("GRACE = 30.0", f"GRACE = {grace}"))
    (folder / "test_one.py").write_text(source)
    return folder


def ran(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, environ = [sys.executable, *arguments], {**os.environ, "PYTEST_ADDOPTS": UNUSED, **environment}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def drawn() -> list[list[int]]:
    """The examples of one property, in order."""
    found: list[list[int]] = []

    @given(st.lists(st.integers()))
    def keep(numbers: list[int]) -> None:
        found.append(numbers)

    keep()
    return found


def test_properties_draw_the_same_examples_whatever_was_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = drawn()
    (tmp_path / "local_constants.py").write_text(f"VALUES = {list(range(70_000, 70_300))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "local_constants", importlib.import_module("local_constants"))
    assert drawn() == first
    assert len(first) == settings.default.max_examples


def test_no_example_is_remembered_and_no_clock_is_read() -> None:
    assert settings.default.derandomize
    assert settings.default.database is None
    assert settings.default.deadline is None


def test_a_failing_property_is_told_with_its_example_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = project(tmp_path, PROPERTY.format("assert n < 9_000"))
    assert "n=9000" in ran(folder, "-m", "pytest", CI="true").stdout
    assert not list(tmp_path.rglob(".hypothesis"))


def test_what_is_skipped_is_said_in_one_line(tmp_path: Path) -> None:
    source = "from needs import needs, folder\n\n@needs('browser')\ndef test_page(): pass\n"
    source += "\n@needs('browser')\ndef test_list(): pass\n\ndef test_data(): folder('mmlu')\n"
    told = ran(project(tmp_path, source), "-m", "pytest", PATH=str(tmp_path), CATTO_DATA=str(tmp_path)).stdout
    (line,) = [line for line in told.splitlines() if line.startswith("Skipped: ")]
    assert line.startswith("Skipped: 2 that need a browser (apt-get install chromium); 1 that need the releases of the")
    assert line.endswith("`make test-all` stops where a browser or the data is missing.")


def test_everything_refuses_to_start_where_something_is_missing(tmp_path: Path) -> None:
    folder = project(tmp_path, PROPERTY.format("pass"))
    told = ran(folder, "-m", "pytest", "--everything", PATH=str(tmp_path), CATTO_DATA=str(tmp_path))
    assert told.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in told.stderr.splitlines() if line.startswith("ERROR: ")]
    assert "the whole suite needs a browser (apt-get install chromium) and the releases of the benchmarks" in line


@pytest.mark.parametrize("minutes", ["5", "0.001"], ids=["with time left", "as the time runs out"])
def test_the_fuzzer_finds_what_fails_and_says_how_to_see_it_again(tmp_path: Path, minutes: str) -> None:
    folder = project(tmp_path, PROPERTY.format("assert n < 9_000"))
    told = ran(folder, "fuzz.py", minutes)
    assert told.returncode == 1, told.stdout + told.stderr
    assert "n=9000" in told.stdout
    seed = re.search(r"See it again: make fuzz SEED=(\d+)$", told.stdout, re.MULTILINE)
    assert seed is not None
    again = ran(folder, "fuzz.py", "5", seed[1])
    assert again.returncode == 1
    assert f"seed {seed[1]}: FAILED" in again.stdout


def test_the_fuzzer_takes_fresh_seeds_and_stops_when_the_time_is_up(tmp_path: Path) -> None:
    told = ran(project(tmp_path, PROPERTY.format("pass")), "fuzz.py", "0.02")
    assert told.returncode == 0, told.stdout + told.stderr
    seeds = re.findall(r"^seed (\d+): passed", told.stdout, re.MULTILINE)
    assert len(set(seeds)) == len(seeds) >= 2
    assert told.stdout.splitlines()[-1] == f"Rounds: {len(seeds)} passed"


def test_a_round_that_does_not_end_is_cut_off_and_its_seed_told(tmp_path: Path) -> None:
    told = ran(project(tmp_path, PROPERTY.format("time.sleep(3600)"), grace=3.0), "fuzz.py", "0.01")
    assert told.returncode == 0
    assert len(re.findall(r"^seed \d+: cut off: ", told.stdout, re.MULTILINE)) == 2
    assert told.stdout.splitlines()[-1] == "Rounds: 2 cut off"
