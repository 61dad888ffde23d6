"""Train in several processes: the stage starts `accelerate launch`, and each process runs `train_method`.

The processes read the `TrainingJob` from a file. Their output goes to the stage's log, and rank 0 reports progress in
lines that contain `MARK`. Their standard input is a pipe from the stage. It closes when the stage ends, and then the
processes exit. `accelerate launch` would leave them running, with the GPUs occupied.
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
# Maximum length of an error that a process reports: writes to a pipe are atomic only below 4 KB.
MAX_ERROR_CHARACTERS = 2000


def split_batch(arguments: Mapping[str, Any], processes: int) -> dict[str, int]:
    """Split the batch of an optimizer step over the processes, so that its size stays the same.

    A step may consist of several micro-batches, whose gradients are accumulated. Whole micro-batches are given to the
    processes if possible. If there are too few, several processes share each micro-batch.

    In the example, one process would compute two micro-batches of 4 rows. With four processes, each computes half of
    one micro-batch.

    Args:
        arguments: Training arguments for a single process.
        processes: Number of processes.

    Returns:
        The batch size and the number of micro-batches of each process, as training arguments.

    Raises:
        ValueError: The batch cannot be split equally.

    >>> split_batch({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, 4)
    {'per_device_train_batch_size': 2, 'gradient_accumulation_steps': 1}
    """
    size = arguments["per_device_train_batch_size"]
    micro_batches = arguments.get("gradient_accumulation_steps", 1)
    # The processes form this many groups of equal size, and each group computes the same number of micro-batches.
    parallel_micro_batches = math.gcd(micro_batches, processes)
    processes_per_micro_batch = processes // parallel_micro_batches
    if size % processes_per_micro_batch:
        raise ValueError(f"{processes} processes cannot share a batch of {size * micro_batches} equally")
    return {
        "per_device_train_batch_size": size // processes_per_micro_batch,
        "gradient_accumulation_steps": micro_batches // parallel_micro_batches,
    }


# ---- what can be launched -------------------------------------------------------------------------------------------


def check_launch(recipe: Recipe) -> None:
    """Raise ValueError if a method of the recipe cannot be trained with the recipe's `launch` block."""
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
            split_batch({**batch, **block.trl}, launch.processes)  # `trl` may set a different size, and micro-batches
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if method.rcft_weight and layout in ("FSDP", "ZeRO-3"):
            raise ValueError(f"{name} generates with the model that it trains, which {layout} splits: use ddp")


def _read_layout(launch: LaunchSettings) -> str:
    """Return how the processes share the model: DDP, FSDP, ZeRO-2 or ZeRO-3.

    Raises:
        ValueError: There is no such configuration, it is invalid, or training is not known to work with it.
    """
    path = CONFIGS.get(launch.config, Path(launch.config))
    if not path.is_file():
        raise ValueError(f"config {launch.config} is neither one of {', '.join(CONFIGS)} nor a file")
    try:
        config = parse_yaml(path.read_text(encoding="utf-8"), launch.config)
    except (DataError, UnicodeDecodeError) as error:
        raise ValueError(f"config {launch.config} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise ValueError(f"config {launch.config} is not an Accelerate configuration: it has no distributed_type")
    if not all(isinstance(_get_section(config, name), dict) for name in ("fsdp_config", "deepspeed_config")):
        raise ValueError(f"config {launch.config}: fsdp_config and deepspeed_config must be mappings")
    problem = _find_unsupported(config)
    if problem is not None:
        raise ValueError(f"config {launch.config} asks for {problem}")
    kind = str(config["distributed_type"])
    if kind == "DEEPSPEED":
        zero_stage = _get_section(config, "deepspeed_config").get("zero_stage", 2)  # 2 is Accelerate's default
        return f"ZeRO-{zero_stage}"
    return "FSDP" if kind == "FSDP" else "DDP"


def _get_section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping in an Accelerate configuration; an empty one if it is missing."""
    return config.get(name) or {}


def _find_unsupported(config: Mapping[str, Any]) -> str | None:
    """Say which setting of an Accelerate configuration training is not known to work with; None if there is none."""
    kind = str(config["distributed_type"])
    if config.get("num_machines", 1) != 1:
        return "several machines: a stage starts only the processes of its own machine"
    if config.get("parallelism_config"):
        return "tensor, context or sequence parallelism: every process must see whole rows"
    if config.get("mixed_precision") == "fp8":
        return "fp8: the head multiplies in 16 or 32 bits"
    if kind == "FSDP" and str(_get_section(config, "fsdp_config").get("fsdp_version", 1)) != "2":
        return "FSDP 1, which flattens the head's weight: set fsdp_version: 2"
    if "deepspeed_config_file" in _get_section(config, "deepspeed_config"):
        return "a DeepSpeed configuration file, whose ZeRO stage catto does not read: set zero_stage"
    if kind not in ("MULTI_GPU", "FSDP", "DEEPSPEED"):
        return f"distributed_type {kind}"
    if kind == "DEEPSPEED" and not find_spec("deepspeed"):
        return "DeepSpeed, which is not installed: pip install deepspeed"
    return None


def build_command(launch: LaunchSettings, job: Path, devices: int) -> list[str]:
    """Return the command that starts the processes of a training stage.

    Each process runs this module as a program, which calls `run_process`.

    Args:
        launch: The recipe's settings.
        job: The file with the `TrainingJob`.
        devices: Number of GPUs of this machine; 0 trains on the CPU.

    Raises:
        ValueError: The layout needs GPUs, or there are fewer GPUs than processes.
    """
    layout = _read_layout(launch)
    this_module = ["-m", __name__, str(job)]
    has_gpus = devices > 0
    if not has_gpus:
        if layout != "DDP":
            raise ValueError(f"{layout} needs GPUs: on a CPU Accelerate would train with DDP instead")
        # On a CPU, `accelerate launch` would start a single process.
        processes = f"--nproc_per_node={launch.processes}"
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", processes, *this_module]
    if devices < launch.processes:
        raise ValueError(f"{launch.processes} processes need as many GPUs, and there are {devices}")
    file = CONFIGS.get(launch.config, Path(launch.config))
    options = [
        f"--config_file={file}",
        f"--num_processes={launch.processes}",
        "--num_machines=1",
        "--main_process_port=0",  # picks a free port: several stages may train at the same time
    ]
    return [sys.executable, "-m", "accelerate.commands.launch", *options, *this_module]


# ---- the stage and its processes ------------------------------------------------------------------------------------


def run_processes(command: list[str], progress: Callable[[int, int, str], None]) -> None:
    """Run the command that starts the processes, log its output and report its progress.

    A line of the output may end in `MARK` and a report in JSON: a list with the progress, or the text of an error.

    Args:
        command: What `build_command` returns.
        progress: Called with the finished steps, all steps and a note.

    Raises:
        RuntimeError: The command failed; the message is the first error that a process reported.
    """
    logger.info("starting %s", " ".join(command))
    first_error = ""
    # Nothing is written to stdin: it closes when the stage ends, which makes the processes exit.
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, errors="replace", **pipes) as launched:
        try:
            for line in launched.stdout or ():
                printed, _, report_text = line.partition(MARK)
                if printed.strip():
                    logger.info("%s", printed.rstrip())
                report = _parse_report(report_text)
                if isinstance(report, list):
                    progress(*report)
                elif report and not first_error:  # the errors of the other processes are usually its consequences
                    first_error = report
        finally:
            launched.terminate()  # needed if the stage is interrupted
    if launched.returncode:
        raise RuntimeError(first_error or f"a training process was killed (exit code {launched.returncode})")


def _parse_report(text: str) -> Any:
    """Return what a process reported after `MARK`: a list for progress, a string for an error; None for nothing."""
    if not text:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:  # mixed with the output of another process: keep an error as far as it is readable
        is_error = text.startswith('"')
        return text.strip()[:MAX_ERROR_CHARACTERS] if is_error else None


def _exit_with_stage() -> None:
    """Exit this process when the stage ends, which closes the pipe that is the standard input."""
    os.read(sys.stdin.fileno(), 1)  # returns only then, since nothing is written to the pipe
    os._exit(1)  # not sys.exit: the main thread may be waiting for another process


def run_process(file: str) -> None:
    """Train in one of the processes that the command of `build_command` starts.

    Every process prints its errors as reports for `run_processes`. Only rank 0 also reports progress and logs messages
    below the level of errors.

    Args:
        file: The file with the `TrainingJob`.
    """
    from pydantic import TypeAdapter

    from catto.pipeline.kinds.train import TrainingJob
    from catto.pipeline.training_job import train_method

    def print_report(report: Any) -> None:
        print(f"{MARK}{json.dumps(report)}", flush=True)

    is_rank_0 = os.environ["RANK"] == "0"
    logging.basicConfig(level=logging.INFO if is_rank_0 else logging.ERROR, format="%(name)s: %(message)s")
    try:
        job = TypeAdapter(TrainingJob).validate_json(Path(file).read_bytes())
        train_method(job, lambda *progress: print_report(progress) if is_rank_0 else None)
    except Exception as error:
        print_report(f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS])
        raise


if __name__ == "__main__":
    threading.Thread(target=_exit_with_stage, daemon=True).start()
    run_process(sys.argv[1])
