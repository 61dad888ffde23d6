"""One training in many processes: the stage starts `accelerate launch`, and each process runs `train_method`.

The processes read the training's `Job` from a file. Their output goes to the stage's log, and rank 0 reports its
progress on marked lines of it. They inherit the stage's pipe as their standard input and end when it closes, since the
stage is gone then: `accelerate launch` would leave them, and the GPUs with them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from catto.errors import DataError
from catto.methods import METHODS, strip_scaling
from catto.recipe.settings import LaunchSettings, Recipe, TrainerSettings
from catto.recipe.yaml_text import parse_yaml

logger = logging.getLogger(__name__)
CONFIGS = {path.stem: path for path in sorted((Path(__file__).parent / "accelerate").glob("*.yaml"))}
MARK = "catto progress: "
# Characters of an error that a process reports: a pipe takes lines below 4 KB whole, longer ones mix.
MOST_CHARACTERS = 2000


def split_batch(arguments: Mapping[str, Any], processes: int) -> dict[str, int]:
    """Cut a step's batch over the processes, so that the step stays the same; accumulated micro-batches come first.

    >>> split_batch({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, 4)
    {'per_device_train_batch_size': 2, 'gradient_accumulation_steps': 1}
    """
    size = arguments["per_device_train_batch_size"]
    micro_batches = arguments.get("gradient_accumulation_steps", 1)
    shared_steps = math.gcd(micro_batches, processes)
    processes_per_batch = processes // shared_steps
    if size % processes_per_batch:
        raise ValueError(f"{processes} processes cannot share a batch of {size * micro_batches} equally")
    return {
        "per_device_train_batch_size": size // processes_per_batch,
        "gradient_accumulation_steps": micro_batches // shared_steps,
    }


# ---- what can be launched -------------------------------------------------------------------------------------------


def check_launch(recipe: Recipe) -> None:
    """Raise ValueError where the processes could not share a method's batch, or its head not work in their layout."""
    launch = recipe.launch
    if launch.processes == 1:
        return
    layout = _read_layout(launch)
    for name in recipe.methods:
        method = METHODS[strip_scaling(name)]
        if method.stage == "base":  # it is not trained
            continue
        block: TrainerSettings = getattr(recipe, method.stage)
        batch = {"per_device_train_batch_size": block.batch_size or method.batch_size}
        try:
            split_batch({**batch, **block.trl}, launch.processes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if method.rcft_weight and layout in ("FSDP", "ZeRO-3"):
            raise ValueError(f"{name} generates with the model that it trains, which {layout} keeps in pieces: use ddp")


def _read_layout(launch: LaunchSettings) -> str:
    """Return DDP, FSDP, ZeRO-2 or ZeRO-3; raise ValueError for a layout in which the head is not known to work."""
    path = CONFIGS.get(launch.config, Path(launch.config))
    if not path.is_file():
        raise ValueError(f"config {launch.config} is neither one of {', '.join(CONFIGS)} nor a file")
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"), launch.config)
    except (DataError, UnicodeDecodeError) as error:
        raise ValueError(f"config {launch.config} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ValueError(f"config {launch.config} is not a configuration file of Accelerate: no distributed_type")
    if not all(isinstance(_section(config, name), dict) for name in ("fsdp_config", "deepspeed_config")):
        raise ValueError(f"config {launch.config}: fsdp_config and deepspeed_config are mappings")
    problem = _find_obstacle(config)
    if problem is not None:
        raise ValueError(f"config {launch.config} asks for {problem}")
    kind = str(config["distributed_type"])
    if kind == "DEEPSPEED":
        return f"ZeRO-{_section(config, 'deepspeed_config').get('zero_stage', 2)}"
    return "FSDP" if kind == "FSDP" else "DDP"


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping within a configuration of Accelerate; an empty one where it is missing."""
    return config.get(name) or {}


def _find_obstacle(config: Mapping[str, Any]) -> str | None:
    """Return what a configuration of Accelerate asks for in which the head is not known to work."""
    kind = str(config["distributed_type"])
    if config.get("num_machines", 1) != 1:
        return "several machines: a stage starts the processes of its own"
    if config.get("parallelism_config"):
        return "tensor, context or sequence parallelism: every process must see whole rows"
    if config.get("mixed_precision") == "fp8":
        return "fp8: the head's products are in 16 or 32 bits"
    if kind == "FSDP" and str(_section(config, "fsdp_config").get("fsdp_version", 1)) != "2":
        return "FSDP 1, which flattens the head's weight: set fsdp_version: 2"
    if "deepspeed_config_file" in _section(config, "deepspeed_config"):
        return "a file of DeepSpeed's own, whose stage is not read: set zero_stage"
    if kind not in ("MULTI_GPU", "FSDP", "DEEPSPEED"):
        return f"distributed_type {kind}"
    if kind == "DEEPSPEED" and not find_spec("deepspeed"):
        return "DeepSpeed, which is not installed: pip install deepspeed"
    return None


def build_command(launch: LaunchSettings, job: Path, devices: int) -> list[str]:
    """Return the command that starts the processes; devices: the machine's GPUs, 0 for training on a CPU."""
    layout = _read_layout(launch)
    entry = ["-m", __name__, str(job)]
    if not devices and layout != "DDP":
        raise ValueError(f"{layout} needs GPUs: on a CPU Accelerate would train with DDP instead")
    if not devices:  # `accelerate launch` starts a single process on a CPU
        processes = f"--nproc_per_node={launch.processes}"
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", processes, *entry]
    if devices < launch.processes:
        raise ValueError(f"{launch.processes} processes need as many GPUs, and there are {devices}")
    file = CONFIGS.get(launch.config, Path(launch.config))
    options = [f"--config_file={file}", f"--num_processes={launch.processes}", "--num_machines=1"]
    # Port 0 is a free one: stages may train side by side.
    return [sys.executable, "-m", "accelerate.commands.launch", *options, "--main_process_port=0", *entry]


# ---- the stage and its processes ------------------------------------------------------------------------------------


def run_processes(words: list[str], progress: Callable[[int, int, str], None]) -> None:
    """Run the command, log what it prints and report its progress; RuntimeError with the reason where it fails."""
    logger.info("starting %s", " ".join(words))
    problem = ""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, text=True, errors="replace", **pipes) as launched:
        try:
            for line in launched.stdout or ():
                printed, _, message = line.partition(MARK)
                if printed.strip():
                    logger.info("%s", printed.rstrip())
                report = _parse_report(message)
                if isinstance(report, list):
                    progress(*report)
                elif report and not problem:
                    problem = report
        finally:
            launched.terminate()  # where the stage is interrupted
    if launched.returncode:
        raise RuntimeError(problem or f"a process of the training was killed (exit code {launched.returncode})")


def _parse_report(message: str) -> Any:
    """Return what a process reports: its progress as a list, an error as text; None for nothing."""
    if not message:
        return None
    try:
        return json.loads(message)
    except json.JSONDecodeError:  # mixed with another line: of an error, what arrived of it
        return message.strip()[:MOST_CHARACTERS] if message.startswith('"') else None


def _end_with_the_stage() -> None:
    """Wait until the stage's pipe closes; nothing is ever written into it."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)  # the main thread may be waiting for another process


def run_process(file: str) -> None:
    """Be one of the processes. Rank 0 alone reports, and logs more than errors."""
    from pydantic import TypeAdapter

    from catto.pipeline.kinds.train import TrainingJob
    from catto.pipeline.training_job import train_method

    def send(message: Any) -> None:
        print(f"{MARK}{json.dumps(message)}", flush=True)

    is_first = os.environ["RANK"] == "0"
    logging.basicConfig(level=logging.INFO if is_first else logging.ERROR, format="%(name)s: %(message)s")
    try:
        job = TypeAdapter(TrainingJob).validate_json(Path(file).read_bytes())
        train_method(job, lambda *progress: send(progress) if is_first else None)
    except Exception as error:
        send(f"{type(error).__name__}: {error}"[:MOST_CHARACTERS])
        raise


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_stage, daemon=True).start()
    run_process(sys.argv[1])
