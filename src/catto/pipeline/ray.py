"""Run the stages of a recipe on a Ray cluster: one task per stage, with all results in files on a shared file system.

A task gets the recipe, the key of its stage and references to the tasks of the stages that it needs. Ray starts it when
those tasks have ended. The worker finds the stage by its key and runs it as the local runner does. If Ray restarts a
task because a node or worker was lost, the new attempt resumes the work. Tasks return only how their stage ended;
progress is read from the folders of the attempts.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

from catto.errors import DataError
from catto.pipeline import attempts
from catto.pipeline import run as runner
from catto.pipeline import stage as stages
from catto.pipeline.estimate import resource_block, stage_resources, stage_seconds
from catto.pipeline.kinds.generating import release_engine
from catto.pipeline.plan import Graph
from catto.pipeline.run import Display, Ending, Outcome
from catto.pipeline.stage import Stage
from catto.recipe.settings import Recipe
from catto.telemetry import switch_off_telemetry

# How often Ray restarts a stage whose worker or node was lost. A Python exception is not retried.
RETRIES = 10
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_CONNECT = 10.0
# The smallest object store that Ray accepts, in bytes: only recipes, keys and endings are in it.
OBJECT_STORE = 80 * 2**20


def run_on_ray(
    root: Path, recipe: Recipe, goals: Sequence[Stage], display: Display, address: str | None = None
) -> Outcome:
    """Run the goals and the stages they need on a cluster, as `run_goals` does on this machine.

    Args:
        root: The experiment's folder.
        recipe: The recipe.
        goals: Stages of the recipe's report.
        display: Shows the run.
        address: The address of a cluster, or `auto` for the one that runs on this machine. None starts a new cluster
            on this machine.

    Returns:
        How the run ended.

    Raises:
        DataError: Another run works in the folder, there is no connection to the cluster, or it lacks resources.
    """
    with attempts.lock_run(root):
        missing = [stage for stage, state in runner.list_states(root, goals) if state != "done"]
        with _connect_to_ray(address):
            tasks = _submit_tasks(root, recipe, missing)
            try:
                outcome = _follow_tasks(root, missing, tasks, display)
            except BaseException:  # for example, the user interrupts the run
                for task in tasks.values():
                    ray.cancel(task, force=True)
                raise
        if not outcome.stopped:  # the caller reads the files next, and this machine may not see them yet
            runner.wait_for_stages(root, goals, "this run")
        return outcome


def _submit_tasks(root: Path, recipe: Recipe, missing: Sequence[Stage]) -> dict[str, Any]:
    """Submit a task for every missing stage; return Ray's reference to each task, by the key of its stage.

    Raises:
        DataError: The cluster lacks resources.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    options = list_ray_options(recipe, missing, nodes)
    tasks: dict[str, Any] = {}
    for stage in missing:  # each after the stages it needs, so their tasks exist already
        needed_tasks = [tasks[need.key] for need in stage.needs.values() if need.key in tasks]
        resources = options[resource_block(recipe, stage)]
        function = ray.remote(_run_stage).options(name=stage.name, max_retries=RETRIES, **resources)
        tasks[stage.key] = function.remote(recipe, str(root.resolve()), str(Path.cwd()), stage.key, *needed_tasks)
    return tasks


@contextmanager
def _connect_to_ray(address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start one; disconnect at the end. Ray's own messages stay in its logs.

    Args:
        address: The address of a cluster, or `auto` for the one that runs on this machine. None starts a new cluster.

    Raises:
        DataError: There is no connection, or no cluster can be started.
    """
    switch_off_telemetry()  # Ray's processes on this machine inherit the setting
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # avoids a warning about a future version of Ray
    # Without a limit, Ray restarts a stage that runs out of memory forever.
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))
    options: dict[str, Any] = {"address": address}
    if address is None:
        options = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        if address is not None and address != "auto":  # a host and a port
            _check_connection(address)
        ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        problem = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError("--address", None, f"{address or 'a cluster on this machine'}: {problem}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_connection(address: str) -> None:
    """Raise an error if nothing accepts connections at an address: `ray.init` would try for many minutes.

    Raises:
        ValueError: The address has no host or no port.
        OSError: There is no connection.
    """
    place = urlsplit(f"//{address.removeprefix('ray://')}")
    if not place.hostname or not place.port:
        raise ValueError("expected auto, HOST:PORT or ray://HOST:PORT")
    socket.create_connection((place.hostname, place.port), timeout=SECONDS_TO_CONNECT).close()


class _StageMonitor:
    """Tells the display when stages start and how far they are, from the folders of their attempts."""

    def __init__(self, root: Path, total: int, display: Display) -> None:
        self.root = root
        self.total = total
        self.display = display
        self.began: dict[str, float] = {}  # when each stage started, by key
        self._last_progress: dict[str, list[Any]] = {}
        self._old_folders: set[Path] = set()  # attempts of earlier runs
        for folders in attempts.attempts_by_stage(root).values():
            self._old_folders.update(folders)

    def start(self, stage: Stage) -> None:
        """Show that a stage has started, if that was not shown before."""
        if stage.key not in self.began:
            self.began[stage.key] = time.monotonic()
            self.display.started(stage, len(self.began), self.total)

    def show_progress(self, pending: Iterable[Stage]) -> None:
        """Show the new attempts at the pending stages, and their progress."""
        unfinished = attempts.attempts_by_stage(self.root)
        for stage in pending:
            for folder in unfinished.get(stage.folder, ()):
                if folder in self._old_folders:
                    continue
                self.start(stage)
                progress = attempts.read_progress(folder)
                if progress is not None and progress != self._last_progress.get(stage.key):
                    self._last_progress[stage.key] = progress
                    self.display.progress(stage, *progress)


def _follow_tasks(root: Path, missing: Sequence[Stage], tasks: Mapping[str, Any], display: Display) -> Outcome:
    """Wait until the tasks of all missing stages have ended; meanwhile, show their progress.

    Args:
        root: The experiment's folder.
        missing: The stages, each after the stages it needs.
        tasks: Ray's reference to the task of each stage, by the stage's key.
        display: Shows the progress.

    Returns:
        How the run ended.
    """
    outcome = Outcome()
    monitor = _StageMonitor(root, len(missing), display)
    pending = {stage.key: stage for stage in missing}
    while pending:
        pending_tasks = [tasks[key] for key in pending]
        # Returns after the timeout, or earlier if all tasks have ended.
        ready, _ = ray.wait(pending_tasks, num_returns=len(pending_tasks), timeout=SECONDS_BETWEEN_LOOKS)
        ended_tasks = set(ready)
        monitor.show_progress(pending.values())
        ended = [stage for stage in pending.values() if tasks[stage.key] in ended_tasks]
        for stage in ended:
            del pending[stage.key]
            if outcome.record_if_blocked(stage):  # its task has ended without running it
                display.ended(stage, "blocked", 0.0)
                continue
            ending = _read_ending(root, tasks[stage.key])
            monitor.start(stage)  # a short stage may have ended before its attempt was seen
            outcome.add(stage, ending)
            # A stage that failed has no duration on file.
            seconds = stage_seconds(root, stage) or time.monotonic() - monitor.began[stage.key]
            display.ended(stage, ending.outcome, seconds)
    return outcome


def _read_ending(root: Path, task: Any) -> Ending:
    """Return how the stage of a task ended.

    If the task raised an exception or its worker was lost too often, the stage failed.
    """
    try:
        ending: Ending = ray.get(task)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error  # the exception that the task raised, if it is known
        ending = Ending("failed", f"{type(cause).__name__}: {cause}".splitlines()[0], log=root)
    return ending


# ---- resources ------------------------------------------------------------------------------------------------------


def list_ray_options(
    recipe: Recipe, missing: Sequence[Stage], nodes: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return Ray's options for the tasks of each block of the recipe's `resources`, such as `train`.

    If the cluster has no GPU, a block that does not set `gpus` requests none.

    Args:
        recipe: The recipe.
        missing: The stages to run.
        nodes: The resources of each node of the cluster, by Ray's names.

    Returns:
        The options by the name of the block, for the blocks that the missing stages use.

    Raises:
        DataError: No node has the resources that a block requests. Ray itself would wait for such a node forever.
    """
    has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
    stage_of_block = {resource_block(recipe, stage): stage for stage in missing}  # any stage that uses the block
    options: dict[str, dict[str, float]] = {}
    for name in sorted(stage_of_block):
        block = stage_resources(recipe, stage_of_block[name], gpus=has_gpus)
        needed = {"CPU": block.cpus, "GPU": block.gpus or 0, "memory": block.bytes}
        if not any(_has_all(node, needed) for node in nodes):
            largest = {resource: max((node.get(resource, 0) for node in nodes), default=0) for resource in needed}
            problem = f"no node has all of {_format_amounts(needed)}"
            available = f"the largest amount of each: {_format_amounts(largest)}"
            raise DataError(f"resources.{name}", None, f"{problem}; {available}")
        options[name] = {"num_cpus": needed["CPU"], "num_gpus": needed["GPU"]}
        if block.bytes:
            options[name]["memory"] = block.bytes
    return options


def _has_all(node: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(node.get(resource, 0) >= amount for resource, amount in needed.items())


def _format_amounts(amounts: Mapping[str, float]) -> str:
    return f"{amounts['CPU']:g} CPU, {amounts['GPU']:g} GPU and {amounts['memory'] / 1e9:g} GB of memory"


# ---- in a worker ----------------------------------------------------------------------------------------------------

# A worker runs many stages, usually of one recipe, so these are kept from stage to stage.
_stages_by_recipe: dict[str, dict[str, Stage]] = {}  # for each recipe as JSON, its stages by key
_verified_folders: set[Path] = set()  # see `run_stage`


def _run_stage(recipe: Recipe, root: str, working_folder: str, key: str, *endings_of_needs: Ending) -> Ending:
    """Run a stage in a worker.

    Args:
        recipe: The recipe.
        root: The experiment's folder.
        working_folder: The folder that paths in the recipe are relative to.
        key: The key of the stage.
        endings_of_needs: How the stages that it needs ended; Ray passes these in place of the references to their
            tasks.

    Returns:
        How the stage ended: `blocked`, without running, if one of its needs failed or was blocked.

    Raises:
        DataError: This node cannot find the stage or the results of its needs.
    """
    switch_off_telemetry()  # a cluster that was started elsewhere does not inherit the environment of the command
    if any(ending.outcome in ("failed", "blocked") for ending in endings_of_needs):
        return Ending("blocked")
    os.chdir(working_folder)
    stage = _list_stages(recipe).get(key)
    if stage is None:
        raise DataError(root, None, f"no stage has the key {key} here: catto's version or a file differs on this node")
    missing = runner.wait_for_stages(Path(root), stage.needs.values(), stage.name)
    if missing:
        raise DataError(root, None, f"{missing[0]}, which {stage.name} needs, is not visible on this node")
    try:
        # No progress is reported from here: `_StageMonitor` reads it from the folder of the attempt.
        return runner.run_stage(Path(root), stage, lambda *_: None, _verified_folders)
    finally:
        release_engine()  # the next stage on this machine may run in a different worker


def _list_stages(recipe: Recipe) -> dict[str, Stage]:
    """Return all stages of a recipe by key. A worker plans each recipe once."""
    recipe_json = recipe.model_dump_json()
    if recipe_json not in _stages_by_recipe:
        all_stages = stages.list_needed([Graph(recipe).plan_report()])
        _stages_by_recipe[recipe_json] = {stage.key: stage for stage in all_stages}
    return _stages_by_recipe[recipe_json]
