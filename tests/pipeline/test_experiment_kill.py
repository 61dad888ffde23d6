"""An experiment that was killed ten times ends with the files of one that was not."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import experiment_run
import pytest
from experiment_world import RECIPE, finished, write_recipe
from forked import Forked

from catto.pipeline.stage import check_stage

pytestmark = pytest.mark.slow

# Times, or files that hold nothing but what was drawn or printed from times.
TIMED = {"log.txt", "done.json", "attempt.json", "seconds.json", ".lock"}
OF_TIMES = ("training.", "report.html", "inputs.json")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experiment_run.import_stages()
    return write_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed: the command's own, in another interpreter."""
    experiment = finished(tmp_path_factory)
    assert experiment.done.returncode == 0, experiment.done.stderr
    return experiment.root


def start(recipe: Path, root: Path, full_from: int | None = None) -> Forked:
    return Forked(experiment_run.run, recipe, root, full_from)


def kill(recipe: Path, root: Path, stage: str, after: int, wait: float) -> None:
    """Start a run; kill it `wait` seconds after event number `after`, counted from the start of a stage."""
    run, counted, last = start(recipe, root), 0, ""
    for last in run.lines():
        counted += counted > 0 or last.startswith(f"started {stage}")
        if counted == after:
            time.sleep(wait)
            run.process.kill()
    assert run.wait() == -signal.SIGKILL, f"the run ended before it could be killed: {last}"


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


def test_killed_ten_times_equals_undisturbed(tmp_path: Path, recipe: Path, calm: Path) -> None:
    killed = tmp_path / "killed"
    chance = random.Random(11)
    # One kill inside each training after its first checkpoint, one before each but the first, among them in stages that
    # generate and that read, one inside the report: of ten moments drawn from all, too few would fall where a training
    # has to go on.
    for method, earlier in zip(
        RECIPE["methods"], (None, "", "generated test", "read ", "generated candidates"), strict=True
    ):
        if earlier is not None:
            kill(
                recipe,
                killed,
                earlier,
                chance.randint(1, 3) if earlier else chance.randint(1, 8),
                chance.uniform(0, 0.03),
            )
        kill(recipe, killed, f"{method} ", 1 + chance.randint(3, 5), chance.uniform(0, 0.03))
    kill(recipe, killed, "report", chance.randint(1, 3), chance.uniform(0, 0.3))
    assert start(recipe, killed).finished()[1] == 0
    assert_equal(killed, calm)


def test_a_disk_that_is_full_again_and_again_loses_nothing(tmp_path: Path, recipe: Path, calm: Path) -> None:
    """Each run can flush a few files and then nothing more; what it finished is whole, and the end is the same."""
    full, failed = tmp_path / "full", set[str]()
    for attempt in range(40):
        events, code = start(recipe, full, 7 + 4 * attempt).finished()
        failed |= {event.split()[1] for event in events if event.endswith(" failed")}
        for path in full.glob("stages/*/done.json"):
            check_stage(path.parent, contents=True)
        if code == 0:
            break
    assert code == 0
    assert len(failed) > 8, failed
    assert_equal(full, calm)
