"""The matrix on a Ray cluster of two nodes: what it ends with, and what is lost when nodes, workers and drivers are."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import run as command
from experiment_world import ENVIRONMENT, RECIPE, write_recipe
from test_experiment_kill import files

from catto.errors import DataError
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, list_finished, list_needed
from catto.recipe.load import load_recipe
from catto.recipe.settings import Recipe
from needs import needs

pytestmark = [pytest.mark.slow, needs("ray")]

# 3 methods x 2 seeds. Trainings of enough steps, and enough batches, to be killed in the middle of on a fast machine.
SMALL: dict[str, Any] = {
    "methods": ["sft", "dpo", "dpo+catto"],
    "seeds": [0, 1],
    "small_pairs": 24,
    "preference": {"learning_rates": [1e-4], "checkpoint_steps": 1},
    "evaluation": {**RECIPE["evaluation"], "batch_size": 1, "resamples": 10, "k": [4], "sampling": "fitted"},
    "tasks": {"witnesses": {"train": 40, "validation": 8, "test": 16}},
}
# Ray notices a dead node within seconds, and does not warn of what a later version will do.
FAST = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "3"}
FAST |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("ray"), **SMALL)


@pytest.fixture(scope="module")
def calm(recipe: Path) -> subprocess.Popen[str]:
    """The local runner, begun while the cluster comes up; its folder is `calm`."""
    return start(recipe, recipe.with_name("calm"))


@pytest.fixture(scope="module")
def cluster(calm: subprocess.Popen[str]) -> Iterator[Any]:
    """Two nodes of one CPU each and a head with none; their workers see this suite's sources and its environment."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in FAST.items():
            patched.setenv(name, value)
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(**NODE)
        made.wait_for_nodes()
        yield made
        made.shutdown()


def start(recipe: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    """Start `catto run`."""
    # Started in a shell's background, this suite and its children would ignore Ctrl-C.
    heard = "import signal, catto.cli; signal.signal(signal.SIGINT, signal.default_int_handler); catto.cli.main()"
    words = [sys.executable, "-c", heard, "run", str(recipe), "--out", str(out), *options]
    return subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def on(cluster: Any) -> tuple[str, ...]:
    return "--on", "ray", "--address", cluster.address


def until(what: Callable[[], Any], driver: subprocess.Popen[str]) -> Any:
    """Wait for something to be there while a run goes on."""
    deadline = time.monotonic() + 900
    while not (found := what()):
        assert driver.poll() is None, driver.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def worker(cluster: Any, out: Path, pattern: str, has: str) -> tuple[Path, int, Any] | None:
    """The folder, the process and the node of a running attempt at a stage that has got somewhere."""
    nodes = {node.all_processes["raylet"][0].process.pid: node for node in cluster.worker_nodes}
    for path in (out / "stages").glob(f"{pattern}.part-*/{has}"):
        folder = path.parents[len(Path(has).parts) - 1]
        pid = read_attempt(folder).get("pid")
        if pid is not None and (node := nodes.get(parent_of(pid))) and path.exists() and path.stat().st_size:
            return folder, int(pid), node
    return None


def read_attempt(folder: Path) -> dict[str, Any]:
    """What an attempt says of itself; nothing where it is gone."""
    try:
        return dict(json.loads((folder / "attempt.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def parent_of(pid: int) -> int:
    """The parent of a process; 0 of one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def done(out: Path) -> dict[str, str]:
    """The attempt by which every finished stage was made."""
    return {folder.name: read_attempt(folder)["token"] for folder in list_finished(out)}


def test_lost_nodes_workers_and_drivers_change_nothing(
    cluster: Any, calm: subprocess.Popen[str], recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file is that of the local runner. What was done is not run again, what had begun is resumed.

    Each moment comes for sure after the one before: what is waited for depends on what was just lost.
    """
    out = tmp_path / "out"
    driver = start(recipe, out, *on(cluster))
    # A node is killed in the middle of a training.
    steps = "checkpoints/checkpoint-1/trainer_state.json"
    training, _, node = until(lambda: worker(cluster, out, "dpo*", steps), driver)
    cluster.remove_node(node, allow_graceful=False)
    kept = done(out)
    cluster.add_node(**NODE)
    # A second run in the folder is refused.
    told = command(capsys, "run", recipe, "--out", out)
    assert told.code == 2
    assert "another run is working in this folder" in told.err
    # A worker is killed while it generates.
    _, process, _ = until(lambda: worker(cluster, out, "generated-*", "generations.part.jsonl"), driver)
    os.kill(process, signal.SIGKILL)
    # Ctrl-C stops the tasks.
    _, process, _ = until(lambda: worker(cluster, out, "[!r]*", "attempt.json"), driver)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=900)
    assert driver.returncode == 130
    kept |= done(out)
    assert errors.splitlines()[-1] == "catto: interrupted; the same command resumes from here"
    assert not [
        line for line in errors.splitlines() if not re.fullmatch(r"(catto: |\[\d+/\d+\] ).*|.*: done in .*", line)
    ]
    deadline = time.monotonic() + 60
    while parent_of(process):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # The driver is killed.
    driver = start(recipe, out, *on(cluster))
    until(lambda: len(done(out)) > len(kept), driver)
    kept |= done(out)
    driver.kill()
    driver.communicate()
    # The last one comes to the end.
    driver = start(recipe, out, *on(cluster))
    _, errors = driver.communicate(timeout=900)
    assert driver.returncode == 0, errors
    calm.communicate(timeout=900)
    expected, found = files(recipe.with_name("calm")), files(out)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert sum(name.endswith("model.safetensors") for name in expected) == 6
    assert done(out).items() >= kept.items()
    threads = {json.loads(path.read_text())["threads"] for path in out.glob("stages/*/done.json")}
    assert threads <= {1, None}
    # The training of the lost node went on from its checkpoint: what was behind it is not trained again.
    log = (out / "stages" / training.name.partition(".part-")[0] / "log.txt").read_text()
    losses = re.findall(r"step (\d+) of \d+: \{\"loss\"", log)
    assert losses.count("1") == 1
    assert {int(step) for step in losses} == set(range(1, max(map(int, losses)) + 1))
    assert not list(out.rglob("*.part*"))


class Ends:
    """A display that keeps how stages ended."""

    def __init__(self) -> None:
        self.ends: dict[str, str] = {}

    def started(self, stage: Stage, number: int, total: int) -> None: ...
    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None: ...

    def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
        self.ends[stage.name] = outcome


def test_an_error_is_not_tried_again_and_stops_only_what_depends_on_it(cluster: Any, tmp_path: Path) -> None:
    from catto.pipeline.ray import run_on_ray

    (tmp_path / "mine.jsonl").write_text(json.dumps({"q": "q", "o": ["x", "y"], "a": "Z"}) + "\n")
    fields = {"question": "q", "options": "o", "answer": "a"}
    tasks = {"witnesses": {"train": 20}, "mine": {"path": str(tmp_path / "mine.jsonl"), "fields": fields}}
    recipe, root, shown = load_recipe(str(write_recipe(tmp_path, tasks=tasks))), tmp_path / "out", Ends()
    goals = [Graph(recipe).plan_teacher_rows(name) for name in tasks]
    outcome = run_on_ray(root, recipe, goals, shown, cluster.address)
    ((problem, log),) = outcome.failed.items()
    assert problem.startswith("questions mine: DataError: ")
    assert "row 1" in log.read_text()
    assert ".part-" in str(log)
    assert shown.ends["teacher witnesses"] == "done"
    assert [stage.name for stage in outcome.blocked] == ["responses mine", "teacher mine"]


# ---- resources: no cluster is needed --------------------------------------------------------------------------------


def resources(blocks: dict[str, Any], *nodes: dict[str, float], **others: Any) -> dict[str, dict[str, float]]:
    from catto.pipeline.ray import list_ray_options

    recipe = Recipe.model_validate({**RECIPE, **others, "resources": blocks})
    return list_ray_options(recipe, list_needed([Graph(recipe).plan_report()]), nodes)


def test_stages_ask_for_what_the_recipe_gives_them() -> None:
    asked = {"train": {"gpus": 1, "cpus": 4, "memory": "40GB"}, "predict": {"gpus": 0.5}}
    node = {"CPU": 8, "GPU": 2, "memory": 64e9}
    assert resources(asked, node) == {
        "train": {"num_cpus": 4, "num_gpus": 1, "memory": 40_000_000_000},
        "predict": {"num_cpus": 1, "num_gpus": 0.5},
        "report": {"num_cpus": 1, "num_gpus": 0},
    }


@pytest.mark.parametrize(("gpus", "processes", "train", "predict"), [(0, 1, 0, 0), (1, 1, 1, 1), (8, 4, 4, 1)])
def test_without_a_word_models_get_a_gpu_where_there_are_any(
    gpus: int, processes: int, train: int, predict: int
) -> None:
    options = resources({}, {"CPU": 8, "GPU": gpus}, {"CPU": 1}, launch={"processes": processes})
    assert [options[name]["num_gpus"] for name in ("train", "predict", "report")] == [train, predict, 0]


@pytest.mark.parametrize(
    ("asked", "nodes", "problem"),
    [
        ({"gpus": 2}, [{"CPU": 8, "GPU": 1}] * 2, r"resources.train: no node has all of 1 CPU, 2 GPU .* 1 GPU and "),
        ({"cpus": 9, "gpus": 0}, [{"CPU": 8}], r"no node has all of 9 CPU, .* of each: 8 CPU, "),
        ({"memory": "4GB"}, [{"CPU": 1, "memory": 2e9}], r"4 GB of memory; .* and 2 GB of memory$"),
        ({"gpus": 1, "cpus": 4}, [{"CPU": 8}, {"CPU": 1, "GPU": 1}], r"no node has all of 4 CPU, 1 GPU and"),
        ({}, [], r"no node has all of 1 CPU, .* of each: 0 CPU, "),
    ],
)  # fmt: skip
def test_what_no_node_has_is_said_before_anything_starts(
    asked: dict[str, Any], nodes: list[dict[str, float]], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        resources({"train": asked, "predict": {"gpus": 0}, "report": {"cpus": 0.1}}, *nodes)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--address", "auto"), "--address: needs --on ray"),
        (("--on", "ray", "--address", "localhost:1"), "--address: localhost:1: [Errno 111] Connection refused"),
        (("--on", "ray", "--address", "ray://localhost:1"), "--address: ray://localhost:1: [Errno 111] Connection"),
        (("--on", "ray", "--address", "here"), "--address: here: expected auto, HOST:PORT or ray://"),
        (("--on", "ray", "--address", "ray://localhost"), "--address: ray://localhost: expected auto, HOST:PORT"),
        (("--on", "ray", "--address", "[::1]:1"), "--address: [::1]:1: [Errno "),
    ],
)
def test_an_address_without_a_cluster_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], problem: str
) -> None:
    told = command(capsys, "run", write_recipe(tmp_path), "--out", tmp_path / "out", *options)
    assert told.code == 2
    assert told.err.count("\n") == 1
    assert told.err.startswith(f"catto: {problem}")


@pytest.mark.parametrize(
    ("variable", "choice", "reports"), [(None, None, False), ("1", None, True), ("0", True, False), (None, True, True)]
)
def test_ray_reports_its_use_only_if_the_user_says_so(
    tmp_path: Path, variable: str | None, choice: bool | None, reports: bool
) -> None:
    """By Ray's own reading of the environment in which the command would start a cluster or connect to one.

    variable: RAY_USAGE_STATS_ENABLED. choice: what `ray enable-usage-stats` stores.
    """
    settings = tmp_path / "config.json"
    if choice is not None:
        settings.write_text(json.dumps({"usage_stats": choice}))
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "RAY_USAGE_STATS_ENABLED"}
    environment["RAY_USAGE_STATS_CONFIG_PATH"] = str(settings)
    if variable is not None:
        environment["RAY_USAGE_STATS_ENABLED"] = variable
    code = f"""
import catto.cli
try:
    catto.cli.main(["run", {str(write_recipe(tmp_path))!r}, "--out", {str(tmp_path / "out")!r},
                    "--on", "ray", "--address", "localhost:1"])
finally:
    from ray._common.usage.usage_lib import usage_stats_enabled
    print(usage_stats_enabled())
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "Connection refused" in done.stderr
    assert done.stdout.strip() == str(reports)
