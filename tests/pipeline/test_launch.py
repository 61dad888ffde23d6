"""One training in several processes: the same model, the command lines, and what is refused before anything starts."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from experiment_world import ENVIRONMENT, RECIPE
from pydantic import TypeAdapter
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from train_world import made_work

from catto.errors import DataError
from catto.pipeline import launch
from catto.pipeline.kinds.train import TrainingJob, make_job, run_train
from catto.pipeline.plan import Graph, check_places, open_recipe
from catto.pipeline.stage import Work, list_needed
from catto.pipeline.training_job import load_trained, train_method
from catto.recipe.settings import LaunchSettings, Recipe

pytestmark = pytest.mark.slow

TWO = {"processes": 2}
METHODS = ["sft", "dpo+catto", "dpo+outcome"]


def _work(folder: Path, method: str, processes: int) -> Work:
    """Twelve steps of SGD, whose update is the gradient itself: Adam's first one is its sign, which rounding flips."""
    base = folder / "base"
    tiny_model().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    trl = {"max_steps": 12, "optim": "sgd", "learning_rate": 0.1}
    block = {"rows": 6, "checkpoint_steps": 3, "batch_size": 2, "trl": trl}
    blocks = {"model": {"path": str(base)}, "launch": {"processes": processes}, "sft": block, "preference": block}
    return made_work(folder / str(processes), method, **blocks)


def _weights(work: Work) -> dict[str, torch.Tensor]:
    return load_file(work.out / "model" / "model.safetensors")


def _assert_same_training(one: Work, other: Work) -> None:
    expected, start = _weights(one), tiny_model().state_dict()
    assert max(float((value - start[name]).abs().max()) for name, value in expected.items()) > 1e-2  # it has learnt
    for name, value in _weights(other).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5, msg=name)
    stories = [json.loads((work.out / "training.json").read_text()) for work in (one, other)]
    for name in ("steps", "kept_step", "epochs", "rows", "tokens", "dropped"):
        assert stories[0][name] == stories[1][name], name
    for measured, again in zip(stories[0]["history"], stories[1]["history"], strict=True):
        assert measured == pytest.approx(again, abs=1e-4)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Work]]:
    """SFT and outcome, by one process and by two of `torch.distributed.run`."""
    works = {}
    for method in ("sft", "dpo+outcome"):
        folder = tmp_path_factory.mktemp("shared")
        works[method] = [_work(folder, method, processes) for processes in (1, 2)]
        run_train(works[method][0])
    jobs = [work.out / "job.json" for _, work in works.values()]
    for (_, work), file in zip(works.values(), jobs, strict=True):
        file.write_bytes(TypeAdapter(TrainingJob).dump_json(make_job(work)))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(__file__).with_name("launch_run.py")
    done = subprocess.run([*run, script, *jobs], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return works


@pytest.mark.parametrize("method", ["sft", "dpo+outcome"])
def test_two_processes_train_the_model_of_one(shared: dict[str, list[Work]], method: str) -> None:
    _assert_same_training(*shared[method])


def _rank(number: int, job: Path) -> int:
    """The process id of a rank that works on this job."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(job) in (entry / "cmdline").read_text() and f"RANK={number}\0" in (entry / "environ").read_text():
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {number}")


# Rank 0 does not get beyond its ninth step: however late the kill comes, the stage is there to be killed.
HELD = """
import os, sys, time

def hold(event, arguments):
    if event == "os.mkdir" and "checkpoint-9" in str(arguments[0]):
        time.sleep(600)

if os.environ.get("RANK") == "0":
    sys.addaudithook(hold)
"""


def test_a_stage_launches_its_processes_and_resumes_after_a_killed_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    alone, together = (_work(tmp_path, "dpo+catto", processes) for processes in (1, 2))
    run_train(alone)
    seen: list[int] = []

    def kill(step: int, total: int, note: str) -> None:
        assert total == 12
        seen.append(step)
        if step == 5:
            os.kill(_rank(1, together.out / "job.json"), signal.SIGKILL)

    caplog.set_level(logging.INFO)
    (tmp_path / "sitecustomize.py").write_text(HELD)
    with pytest.MonkeyPatch.context() as held:
        held.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        with pytest.raises(RuntimeError):
            run_train(Work(together.stage, together.root, together.out, kill))
    assert "--nproc_per_node=2 -m catto.pipeline.launch" in caplog.text
    assert not (together.out / "training.json").exists()
    assert seen[:5] == [1, 2, 3, 4, 5]  # rank 0 alone reports
    again: list[int] = []
    run_train(Work(together.stage, together.root, together.out, lambda step, total, note: again.append(step)))
    assert again[0] in (4, 7)  # behind a checkpoint
    assert again == list(range(again[0], 13))
    _assert_same_training(alone, together)
    assert not (together.out / "checkpoints").exists()


@pytest.mark.parametrize(
    ("rows", "warned"),
    [(6, ""), (5, "5 rows are not a multiple of the batch; rows repeated at the end of each epoch: 1")],
)
def test_rows_that_fill_the_last_batch_are_logged(
    tmp_path: Path, rows: int, warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    work = _work(tmp_path, "dpo+catto", 2)
    block = work.settings.block.model_copy(update={"rows": rows})
    train_method(replace(make_job(work), settings=replace(work.settings, block=block)), lambda *_: None)
    assert warned in caplog.text
    assert bool(warned) == ("not a multiple" in caplog.text)


def test_what_a_process_refuses_is_the_stage_s_problem(tmp_path: Path) -> None:
    script = f"print('{launch.MARK}' + '[1, 2, \"half\"]'); print('{launch.MARK}\"ValueError: no pair\"'); exit(3)"
    seen: list[Any] = []
    with pytest.raises(RuntimeError, match=r"^ValueError: no pair$"):
        launch.run_processes([sys.executable, "-c", script], lambda *told: seen.append(told))
    assert seen == [(1, 2, "half")]
    with pytest.raises(RuntimeError, match="a training process was killed"):
        launch.run_processes([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], lambda *told: None)


def test_the_reason_survives_lines_that_were_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"print('{launch.MARK}[1, {launch.MARK}'); print('{launch.MARK}\"ValueError: no p'); exit(3)"
    with pytest.raises(RuntimeError, match=r'^"ValueError: no p$'):
        launch.run_processes([sys.executable, "-c", script], lambda *told: pytest.fail("no progress"))

    def train(job: Any, progress: Any) -> None:
        raise ValueError("E" * 100_000)

    monkeypatch.setitem(sys.modules, "catto.pipeline.kinds.train", SimpleNamespace(TrainingJob=dict))
    monkeypatch.setitem(sys.modules, "catto.pipeline.training_job", SimpleNamespace(train_method=train))
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(ValueError, match="EEE"):
        launch.run_process(str(tmp_path / "job.json"))
    (line,) = capsys.readouterr().out.splitlines()
    assert "ValueError: EEE" in line
    assert len(line) < 4096  # a pipe takes it whole


STUCK = """
import os, pathlib, sys, time, types

def train(job, progress):
    pathlib.Path(os.environ["PIDS"], os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)

sys.modules["catto.pipeline.kinds.train"] = types.SimpleNamespace(TrainingJob=dict)
sys.modules["catto.pipeline.training_job"] = types.SimpleNamespace(train_method=train)
"""


def test_the_processes_of_a_killed_stage_end(tmp_path: Path) -> None:
    """They print nothing, as while they load a model, and the real launcher is between them and the stage."""
    (tmp_path / "job.json").write_text("{}")
    (tmp_path / "pids").mkdir()
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    words = launch.build_command(LaunchSettings(processes=2), tmp_path / "job.json", 0)
    script = f"from catto.pipeline import launch; launch.run_processes({words!r}, print)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**ENVIRONMENT, "PYTHONPATH": paths, "PIDS": str(tmp_path / "pids")}
    stage = subprocess.Popen([sys.executable, "-c", script], env=environment)

    def pids() -> list[int]:
        return [int(text) for path in (tmp_path / "pids").iterdir() if (text := path.read_text())]

    try:
        _wait(lambda: len(pids()) == 2)
        assert all(map(_alive, pids()))
        stage.kill()
        _wait(lambda: not any(map(_alive, pids())))
    finally:
        stage.kill()
        stage.wait()
        for pid in filter(_alive, pids()):
            os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _wait(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_gathered_weights_under_other_names_are_refused() -> None:
    """Nothing would be loaded, and the model saved as it started."""
    for tied in (True, False):
        trained = {name: value + 1 for name, value in tiny_model(tie_word_embeddings=tied).state_dict().items()}
        model = tiny_model(tie_word_embeddings=tied)
        head = trained.pop("lm_head.weight")
        if tied:  # it comes once, under one of its names
            load_trained(model, trained)
        trained["lm_head.weight"] = head
        load_trained(model, trained)
        assert torch.equal(model.lm_head.weight, head)
        (gone,) = {name for name in trained if name.endswith("layers.0.mlp.up_proj.weight")}
        weight = trained.pop(gone)
        with pytest.raises(RuntimeError, match=f"match the model: 1, such as {gone}"):
            load_trained(model, trained)
        model.get_parameter(gone).requires_grad_(False)  # one that is not trained may be missing
        load_trained(model, trained)
        with pytest.raises(RuntimeError, match=f"match the model: 1, such as module.{gone}"):
            load_trained(model, {**trained, f"module.{gone}": weight})


# ---- command lines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "zero3"])
def test_accelerate_reads_the_command_as_it_is_meant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own parser and its own reading of our file."""
    monkeypatch.setattr(launch, "find_spec", lambda module: object())
    words = launch.build_command(LaunchSettings(processes=8, config=name), Path("job.json"), 8)
    assert words[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[3:]))
    assert (args.num_processes, args.num_machines, args.main_process_port) == (8, 1, 0)
    assert (args.module, args.training_script, args.training_script_args) == (True, launch.__name__, ["job.json"])
    kinds = {"ddp": "multi_gpu", "fsdp2": "use_fsdp", "zero2": "use_deepspeed", "zero3": "use_deepspeed"}
    found = [kind for kind in ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm", "tpu", "cpu") if
             getattr(args, kind)]  # fmt: skip
    assert found == [kinds[name]]
    assert args.mixed_precision == "no"  # the trainer's arguments decide
    if name == "fsdp2":
        assert str(args.fsdp_version) == "2"
        assert args.fsdp_state_dict_type == "SHARDED_STATE_DICT"  # what `newest_complete` knows
    if name.startswith("zero"):
        assert args.zero_stage == int(name[-1])


def test_without_a_gpu_torch_starts_the_processes() -> None:
    words = launch.build_command(LaunchSettings(processes=2), Path("job.json"), 0)
    expected = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", launch.__name__, "job.json"]
    assert words == [sys.executable, *expected]


@pytest.mark.parametrize(
    ("config", "devices", "problem"),
    [
        ("fsdp2", 0, "FSDP needs GPUs: on a CPU Accelerate would train with DDP instead"),
        ("ddp", 2, "4 processes need as many GPUs, and there are 2"),
    ],
)
def test_too_few_devices_are_refused(config: str, devices: int, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        launch.build_command(LaunchSettings(processes=4, config=config), Path("job.json"), devices)


# ---- refusals before anything starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"distributed_type": "FSDP"}, "FSDP 1, which flattens the head's weight: set fsdp_version: 2"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "FSDP 1"),
        ({"distributed_type": "MEGATRON_LM"}, "distributed_type MEGATRON_LM"),
        ({"distributed_type": "MULTI_CPU"}, "distributed_type MULTI_CPU"),
        ({"distributed_type": "MULTI_GPU", "num_machines": 2}, "several machines"),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "fp8"}, "fp8"),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": {"tp_size": 2}},
            "tensor, context or sequence parallelism",
        ),
        ({"distributed_type": "DEEPSPEED"}, "DeepSpeed, which is not installed: pip install deepspeed"),
        ([1], "not an Accelerate configuration"),
        ("a: [1\n", "is not YAML"),
        ({"distributed_type": "FSDP", "fsdp_config": [1]}, "fsdp_config and deepspeed_config must be mappings"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": "x.json"}, "fsdp_config and deepspeed_config must be"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "x.json"}},
            "a DeepSpeed configuration file, whose ZeRO stage catto does not read: set zero_stage",
        ),
    ],
)
def test_a_layout_that_the_head_is_not_known_to_support_is_refused(
    config: Any, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda module: None)
    path = tmp_path / "mine.yaml"
    path.write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    settings = {**RECIPE, "methods": ["sft"], "launch": {**TWO, "config": str(path)}}
    recipe = Recipe.model_validate(settings)
    with pytest.raises(DataError, match=f"launch: config .*mine.yaml.* {problem}"):
        check_places("mine", recipe)


def test_rcft_is_refused_where_the_model_is_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda module: object())
    for config, layout in {"fsdp2": "FSDP", "zero3": "ZeRO-3"}.items():
        recipe = Recipe.model_validate({**RECIPE, "launch": {**TWO, "config": config}})
        with pytest.raises(ValueError, match=f"rcft generates with the model that it trains, which {layout} splits"):
            launch.check_launch(recipe)
    for config in ("ddp", "zero2"):
        launch.check_launch(Recipe.model_validate({**RECIPE, "launch": {**TWO, "config": config}}))


def test_an_unknown_configuration_names_the_shipped_ones() -> None:
    recipe = Recipe.model_validate({**RECIPE, "launch": {**TWO, "config": "fsdp"}})
    with pytest.raises(ValueError, match="config fsdp is neither one of ddp, fsdp2, zero2, zero3 nor a file"):
        launch.check_launch(recipe)


def test_a_batch_is_cut_so_that_the_step_stays_the_same() -> None:
    for size, micro, processes, expected in [
        (8, 1, 4, (2, 1)),
        (4, 2, 4, (2, 1)),
        (2, 6, 4, (1, 3)),
        (1, 8, 8, (1, 1)),
    ]:
        given = {"per_device_train_batch_size": size, "gradient_accumulation_steps": micro}
        assert tuple(launch.split_batch(given, processes).values()) == expected
        assert expected[0] * expected[1] * processes == size * micro
    with pytest.raises(ValueError, match="3 processes cannot share a batch of 8 equally"):
        launch.split_batch({"per_device_train_batch_size": 8}, 3)


def test_a_batch_that_the_processes_cannot_share_is_refused_with_its_method() -> None:
    """The recipe's own batch, METHODS' one, and that of the `trl` block."""
    preference = {"learning_rates": [1e-4], "trl": {"per_device_train_batch_size": 1}}
    for block, problem in [({}, "dpo: 8 processes cannot share a batch of 4"), (preference, "dpo: 8 .* batch of 1")]:
        recipe = {**RECIPE, "methods": ["sft", "dpo"], "preference": block, "launch": {"processes": 8}}
        with pytest.raises(ValueError, match=problem):
            launch.check_launch(Recipe.model_validate(recipe))


def test_how_many_processes_train_is_in_no_key() -> None:
    keys = [
        [stage.key for stage in list_needed([Graph(open_recipe("quickstart", sets)).plan_report()])]
        for sets in ((), ("launch.processes=2", "launch.config=fsdp2"))
    ]
    assert keys[0] == keys[1]
