"""Run the matrix on a Ray cluster: one task a stage, and the files on a shared file system stay the truth.

A task gets the recipe, the key of its stage and references to the tasks of what it needs, for which Ray lets it wait.
Its worker finds the stage by the key and runs it as the local runner does, so a task that Ray starts again after a lost
node or worker is another attempt, which resumes. Only how a stage ended travels back; progress is read from
the folders of the attempts.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
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

# How often Ray starts a stage again whose worker or node was lost. An error of Python is not tried again.
RETRIES = 10
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_CONNECT = 10.0
# Nothing but keys and endings is in the object store; Ray takes no less than this.
OBJECT_STORE = 80 * 2**20


def run_on_ray(
    root: Path, recipe: Recipe, goals: Sequence[Stage], display: Display, address: str | None = None
) -> Outcome:
    """Run the goals, stages of the recipe's report, and what they need on a cluster, as `run_goals` does here.

    address: of a cluster (`auto`: the one that runs on this machine); None starts one on this machine.
    """
    with attempts.lock_run(root):
        missing = [stage for stage, state in runner.list_states(root, goals) if state != "done"]
        with _connect_to_ray(address):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            options = list_ray_options(recipe, missing, nodes)
            tasks: dict[str, Any] = {}
            for stage in missing:
                needs = [tasks[need.key] for need in stage.needs.values() if need.key in tasks]
                resources = options[resource_block(recipe, stage)]
                task = ray.remote(_run_stage).options(name=stage.name, max_retries=RETRIES, **resources)
                tasks[stage.key] = task.remote(recipe, str(root.resolve()), str(Path.cwd()), stage.key, *needs)
            try:
                outcome = _follow_tasks(root, missing, tasks, display)
            except BaseException:
                for task in tasks.values():
                    ray.cancel(task, force=True)
                raise
        if not outcome.stopped:  # what the workers finished is read here next
            runner.wait_for_stages(root, goals, "this run")
        return outcome


@contextmanager
def _connect_to_ray(address: str | None) -> Iterator[None]:
    """Connect to a cluster, or start one; Ray's own messages stay in its logs."""
    switch_off_telemetry()  # Ray's processes on this machine inherit it
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a warning about a later version
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # else a stage that needs more memory runs for ever
    started: dict[str, Any] = {"address": "local", "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    where = started if address is None else {"address": address}
    try:
        if address is not None and address != "auto":  # Ray itself would try for many minutes
            place = urlsplit(f"//{address.removeprefix('ray://')}")
            if not place.hostname or not place.port:
                raise ValueError("expected auto, HOST:PORT or ray://HOST:PORT")
            socket.create_connection((place.hostname, place.port), timeout=SECONDS_TO_CONNECT).close()
        ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        problem = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError("--address", None, f"{address or 'a cluster on this machine'}: {problem}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _follow_tasks(root: Path, missing: Sequence[Stage], tasks: Mapping[str, Any], display: Display) -> Outcome:
    """Show the stages until all have ended: progress by the files of new attempts, ends by the tasks."""
    outcome = Outcome()
    began: dict[str, float] = {}
    shown: dict[str, list[Any]] = {}
    earlier = {folder for folders in attempts.attempts_by_stage(root).values() for folder in folders}
    pending = {stage.key: stage for stage in missing}

    def start(stage: Stage) -> None:
        if stage.key not in began:
            began[stage.key] = time.monotonic()
            display.started(stage, len(began), len(missing))

    while pending:
        ready, _ = ray.wait([tasks[key] for key in pending], num_returns=len(pending), timeout=SECONDS_BETWEEN_LOOKS)
        unfinished = attempts.attempts_by_stage(root)
        for stage in pending.values():
            for folder in unfinished.get(stage.folder, ()):
                if folder in earlier:
                    continue
                start(stage)
                progress = attempts.read_progress(folder)
                if progress is not None and progress != shown.get(stage.key):
                    shown[stage.key] = progress
                    display.progress(stage, *progress)
        for stage in [stage for stage in pending.values() if tasks[stage.key] in set(ready)]:
            del pending[stage.key]
            if outcome.blocks(stage):
                display.ended(stage, "blocked", 0.0)
                continue
            ending = _read_ending(root, tasks[stage.key])
            start(stage)
            outcome.add(stage, ending)
            seconds = stage_seconds(root, stage) or time.monotonic() - began[stage.key]
            display.ended(stage, ending.outcome, seconds)
    return outcome


def _read_ending(root: Path, task: Any) -> Ending:
    """Return how a stage ended, whose task is over; Ray's own errors are failures."""
    try:
        ending: Ending = ray.get(task)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        ending = Ending("failed", f"{type(cause).__name__}: {cause}".splitlines()[0], log=root)
    return ending


# ---- resources ------------------------------------------------------------------------------------------------------


def list_ray_options(
    recipe: Recipe, missing: Sequence[Stage], nodes: Sequence[Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return Ray's options for each block of the recipe's resources; DataError where no node has what one asks for.

    Ray itself would wait for such a node for ever.
    """
    has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
    stage_of_block = {resource_block(recipe, stage): stage for stage in missing}
    options: dict[str, dict[str, float]] = {}
    for name in sorted(stage_of_block):
        block = stage_resources(recipe, stage_of_block[name], gpus=has_gpus)
        needed = {"CPU": block.cpus, "GPU": block.gpus or 0, "memory": block.bytes}
        if not any(_has_all(node, needed) for node in nodes):
            most = {kind: max((node.get(kind, 0) for node in nodes), default=0) for kind in needed}
            problem = f"no node has all of {_format_amounts(needed)}"
            largest = f"the most that one has of each: {_format_amounts(most)}"
            raise DataError(f"resources.{name}", None, f"{problem}; {largest}")
        options[name] = {"num_cpus": needed["CPU"], "num_gpus": needed["GPU"]}
        if block.bytes:
            options[name]["memory"] = block.bytes
    return options


def _has_all(node: Mapping[str, float], needed: Mapping[str, float]) -> bool:
    return all(node.get(kind, 0) >= amount for kind, amount in needed.items())


def _format_amounts(amounts: Mapping[str, float]) -> str:
    return f"{amounts['CPU']:g} CPU, {amounts['GPU']:g} GPU and {amounts['memory'] / 1e9:g} GB of memory"


# ---- in a worker ----------------------------------------------------------------------------------------------------

# A worker runs many stages of one recipe: its stages by key, and the folders whose bytes were compared.
_graphs: dict[str, dict[str, Stage]] = {}
_checked: set[Path] = set()


def _run_stage(recipe: Recipe, root: str, here: str, key: str, *needs: Ending) -> Ending:
    """Run the stage of a key in a worker; paths in the recipe are seen from the folder `here`."""
    switch_off_telemetry()  # a cluster that was started elsewhere has not the environment of the command
    if any(need.outcome in ("failed", "blocked") for need in needs):
        return Ending("blocked")
    os.chdir(here)
    text = recipe.model_dump_json()
    if text not in _graphs:
        _graphs[text] = {stage.key: stage for stage in stages.list_needed([Graph(recipe).plan_report()])}
    stage = _graphs[text].get(key)
    if stage is None:
        raise DataError(root, None, f"no stage has the key {key} here: catto's version or a file differs on this node")
    missing = runner.wait_for_stages(Path(root), stage.needs.values(), stage.name)
    if missing:
        raise DataError(root, None, f"{missing[0]}, which {stage.name} needs, is not seen from this node")
    try:
        return runner.run_stage(Path(root), stage, lambda *_: None, _checked)
    finally:
        release_engine()
