"""An experiment that was killed ten times ends with the files of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import experiment_run
from catto.experiment.stages import check
from experiment_world import ENVIRONMENT, RECIPE, write_recipe

# Times, or files that hold nothing but what was drawn or printed from times.
TIMED = {"log.txt", "done.json", "seconds.json", ".lock"}
OF_TIMES = ("training.", "report.html", "inputs.json")


class Runs:
    """The process that forks runs."""

    def __init__(self, recipe: Path) -> None:
        command = [sys.executable, str(Path(experiment_run.__file__)), str(recipe)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def start(self, root: Path, full_from: int | None = None) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{root}\n" if full_from is None else f"{root}|{full_from}\n")
        self.process.stdin.flush()
        return int(self._line().removeprefix("pid "))

    def events(self) -> Iterator[str]:
        """Yield the events of the run; the last one is its exit."""
        while True:
            line = self._line()
            assert line or self.process.poll() is None, "the process that forks runs has died"
            yield line
            if line.startswith("exit "):
                return

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=300)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(write_recipe(tmp_path_factory.mktemp("recipe")))
    yield started
    started.close()


@pytest.fixture(scope="module")
def calm(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    runs.start(folder)
    assert list(runs.events())[-1] == "exit 0"
    return folder


def kill(runs: Runs, root: Path, stage: str, after: int, wait: float) -> None:
    """Start a run; kill it `wait` seconds after event number `after`, counted from the start of a stage."""
    pid, counted, last = runs.start(root), 0, ""
    for last in runs.events():
        counted += counted > 0 or last.startswith(f"started {stage}")
        if counted == after and not last.startswith("exit "):
            time.sleep(wait)
            os.kill(pid, signal.SIGKILL)
    assert last == f"exit {int(signal.SIGKILL)}", f"the run ended before it could be killed: {last}"


def stripped(value: Any) -> Any:
    """A JSON value without its times and without the commit, which may change between two runs."""
    if isinstance(value, dict):
        return {name: stripped(one) for name, one in value.items() if name not in ("seconds", "commit")}
    return [stripped(one) for one in value] if isinstance(value, list) else value


def content(path: Path) -> Any:
    """A file's bytes; of JSON that holds times, what is left without them."""
    if path.name in ("generations.jsonl", "responses.jsonl"):
        return [stripped(json.loads(line)) for line in path.read_bytes().splitlines()]
    if path.name in ("training.json", "results.json"):
        return stripped(json.loads(path.read_bytes()))
    return path.read_bytes()


def files(root: Path) -> dict[str, Any]:
    """What every file of the stages holds, except those that are about times."""
    found: dict[str, Any] = {}
    for path in sorted((root / "stages").rglob("*")):
        place = path.relative_to(root)
        of_times = place.parts[1].startswith("report-") and path.name.startswith(OF_TIMES)
        if path.is_file() and path.name not in TIMED and not of_times:
            found[place.as_posix()] = content(path)
    return found


def assert_equal(disturbed: Path, calm: Path) -> None:
    expected, found = files(calm), files(disturbed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert sum(name.endswith("model.safetensors") for name in expected) == 5
    assert not list(disturbed.rglob("*.part*"))


def test_killed_ten_times_equals_undisturbed(tmp_path: Path, runs: Runs, calm: Path) -> None:
    killed = tmp_path / "killed"
    chance = random.Random(11)
    # One kill inside each training after its first checkpoint, one anywhere before each but the first, one inside the
    # report: of ten moments drawn from all, too few would fall where a training has to go on.
    for method in RECIPE["methods"]:
        if method != "sft":
            kill(runs, killed, "", chance.randint(1, 8), chance.uniform(0, 0.03))
        kill(runs, killed, f"{method} ", 1 + chance.randint(3, 5), chance.uniform(0, 0.03))
    kill(runs, killed, "report", chance.randint(1, 3), chance.uniform(0, 0.3))
    runs.start(killed)
    assert list(runs.events())[-1] == "exit 0"
    assert_equal(killed, calm)


def test_a_disk_that_is_full_again_and_again_loses_nothing(tmp_path: Path, runs: Runs, calm: Path) -> None:
    """Each run can flush a few files and then nothing more; what it finished is whole, and the end is the same."""
    full, failed = tmp_path / "full", set[str]()
    for attempt in range(40):
        runs.start(full, 7 + 4 * attempt)
        events = list(runs.events())
        failed |= {event.split()[1] for event in events if event.endswith(" failed")}
        for path in full.glob("stages/*/done.json"):
            check(path.parent, contents=True)
        if events[-1] == "exit 0":
            break
    assert events[-1] == "exit 0"
    assert len(failed) > 8, failed
    assert_equal(full, calm)
