"""`catto plan --memory`, `--schedule` and `--export`: formulas against counted bytes, schedules, scripts that run."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from command import run
from experiment_world import ENVIRONMENT, catto, write_recipe
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model

from catto.errors import DataError
from catto.pipeline.cost import Costs, Job, Network, network, simulate, took
from catto.pipeline.plan import Graph, find_stage, freeze, open_recipe, stored
from catto.pipeline.stage import Stage, ordered, place, record, write
from catto.recipe.load import load
from catto.recipe.settings import ModelSettings

Capture = pytest.CaptureFixture[str]
SMALLEST: dict[str, Any] = {
    "tasks": {"witnesses": {"train": 30, "validation": 4, "test": 6}},
    "methods": ["sft", "dpo+catto"],
    "evaluation": {"max_tokens": 12, "batch_size": 4, "k": [], "resamples": 20},
}

# ---- memory ----------------------------------------------------------------------------------------------------------

CASES = ["narrow, full, shared", "narrow, full", "deep, bf16", "untied, LoRA bf16", "wide, FSDP2 x2"]


@pytest.mark.parametrize("name", CASES)
def test_stated_memory_is_what_a_step_of_a_small_model_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 4 % of the bytes of the tensors of a real step; `benchmarks/memory.py` has more cases, all within 7 %."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    steps = importlib.import_module("memory")
    case = steps.small()[name]
    assert steps.stated(case).peak == pytest.approx(steps.counted(case), rel=0.04)


def test_the_shape_of_a_model_is_read_from_its_folder(tmp_path: Path) -> None:
    """Parameters by the formula are those of the model; a Qwen3 also has norms of queries and keys."""
    for arch, norms in (("llama", 0), ("mistral", 0), ("qwen3", 2 * 2 * 8)):
        for tied in (True, False):
            folder = tmp_path / f"{arch}-{tied}"
            model = tiny_model(arch=arch, tie_word_embeddings=tied)
            model.save_pretrained(folder)
            shape = network(ModelSettings(path=str(folder)))
            assert shape is not None
            assert shape.parameters == model.num_parameters() - norms
    (folder / "config.json").write_text(json.dumps({"n_embd": 8, "n_layer": 2}))
    assert network(ModelSettings(path=str(folder))) is None
    tiny_model(arch="qwen3_moe").config.save_pretrained(folder)
    assert network(ModelSettings(path=str(folder))) is None


def test_adapters_are_counted_as_peft_makes_them() -> None:
    from peft import LoraConfig, get_peft_model

    shape = Network(2, 32, 48, 32, 16, len_of_tiny := tiny_model().config.vocab_size, True)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert shape.vocabulary == len_of_tiny
    assert shape.adapters(4) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_plan_shows_the_memory_of_the_largest_training(tmp_path: Path, capsys: Capture) -> None:
    """4.02e9 parameters: 16.1 GB of fp32 weights, as many of gradients, twice as many of moments."""
    arguments = ("plan", "paper", "--out", tmp_path / "out", "--memory")
    layouts = run(capsys, *arguments, "--json").json
    assert list(layouts) == ["full", "LoRA 32", "LoRA 32, bf16", "FSDP2, 2 GPUs", "FSDP2, 4 GPUs", "FSDP2, 8 GPUs"]
    full, eighth = layouts["full"], layouts["FSDP2, 8 GPUs"]
    for name, gigabytes in {"weights": 16.1, "gradients": 16.1, "optimizer": 32.2}.items():
        assert full["shared"][name] / 1e9 == pytest.approx(gigabytes, abs=0.05)
        assert eighth["shared"][name] == full["shared"][name] / 8
    assert full["shared"]["activations"] < full["unshared"]["activations"]
    assert full["shared"]["peak"] < full["unshared"]["peak"] < sum(full["unshared"].values())
    shown = run(capsys, *arguments).out
    assert "dpo+outcome: 4 pairs a step, rows of 2,048 tokens, 50% prompt" in shown
    assert "LoRA 8 " in run(capsys, *arguments, "--set", "model.peft={r: 8}").out
    told = run(capsys, *arguments, "--set", "model.path=some/model")
    assert (told.code, told.out) == (2, "")
    assert "the shape of some/model is unknown: no config.json here or in the hub's cache" in told.err


@pytest.mark.parametrize(
    ("setting", "changed"),
    [
        ("sft.trl.num_train_epochs=30", {"sft": 10}),
        ("preference.trl.num_train_epochs=30", {"dpo+catto": 15}),
        ("preference.rows=20", {"dpo+catto": 20 / 400}),
    ],
)
def test_tokens_follow_what_overrides_the_recipe(setting: str, changed: dict[str, float]) -> None:
    """Of the quickstart: SFT has 3 epochs, the small budget 2 epochs of 400 pairs."""

    def tokens(*overrides: str) -> dict[str, int]:
        recipe = open_recipe("quickstart", ["budgets=[matched]", "methods=[sft, dpo, dpo+catto]", *overrides])
        trained = [stage for stage in ordered([Graph(recipe).report()]) if stage.kind == "train"]
        return {stage.settings.name: Costs(recipe).tokens(stage) for stage in trained}

    before, after = tokens("sft.epochs=3", "small_pairs=400"), tokens("sft.epochs=3", "small_pairs=400", setting)
    for method, factor in changed.items():
        assert after[method] == before[method] * factor
    assert after["sft"] == before["sft"] * changed.get("sft", 1)


def test_the_stream_asks_as_many_questions_as_the_recipe_says_and_memory_follows_trl(
    tmp_path: Path, capsys: Capture
) -> None:
    for more in ([], ["outcome.held_out=true"]):
        recipe = open_recipe("quickstart", ["outcome.questions=10", "methods=[sft, dpo+outcome]", *more])
        costs, every = Costs(recipe), ordered([Graph(recipe).report()])
        asked = {stage.name: costs.requests(stage) for stage in every if stage.kind == "sampled"}
        assert [count for name, count in asked.items() if "stream" in name] == [10]
    plan = ("plan", "quickstart", "--out", tmp_path / "out", "--memory", "--json", "--set")
    sizes = [
        run(capsys, *plan, f"preference.{name}=64").json for name in ("batch_size", "trl.per_device_train_batch_size")
    ]
    assert sizes[0] == sizes[1]


# ---- time ------------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Job], int]:
    """Jobs in an order that respects their needs, and a number of GPUs that each of them fits on."""
    gpus, jobs = draw(st.integers(1, 5)), []
    for number in range(draw(st.integers(0, 14))):
        needs = draw(st.sets(st.sampled_from([job.key for job in jobs]), max_size=3)) if jobs else set()
        seconds = draw(st.sampled_from([0.0, 1.0, 2.5, 7.0]))
        jobs.append(Job(f"j{number}", tuple(sorted(needs)), seconds, draw(st.integers(0, 2 * gpus)) / 2))
    return jobs, gpus


@given(plans())
def test_a_schedule_obeys_needs_and_gpus_and_leaves_none_idle(plan: tuple[list[Job], int]) -> None:
    jobs, gpus = plan
    schedule, named = simulate(jobs, gpus), {job.key: job for job in jobs}
    ends = {key: start + named[key].seconds for key, start in schedule.starts.items()}
    assert schedule.starts.keys() == named.keys()

    def free(moment: float) -> list[float]:
        """The free share of every GPU, as far as the first that is never used."""
        held: dict[int, float] = defaultdict(float)
        for job in jobs:
            if schedule.starts[job.key] <= moment < ends[job.key]:
                for number in schedule.places[job.key]:
                    held[number] += min(job.gpus, 1)
        return [1 - held[number] for number in range(gpus)]

    for job in jobs:
        start, ready = schedule.starts[job.key], max((ends[need] for need in job.needs), default=0.0)
        assert start >= ready
        assert len({*schedule.places[job.key]} & {*range(gpus)}) == ceil(job.gpus)
        assert min(free(start)) >= 0
        # Until it starts, too few GPUs have room at every moment at which one could have become free.
        waits = [ready, *(end for end in ends.values() if ready < end < start)]
        share = min(job.gpus, 1)
        assert all(sum(left >= share for left in free(moment)) < ceil(job.gpus) for moment in waits if moment < start)
    assert schedule.makespan == max(ends.values(), default=0.0)
    assert schedule.makespan >= max(schedule.shortest, schedule.busy / gpus) - 1e-9
    assert schedule.shortest == sum(named[key].seconds for key in schedule.critical)
    assert all(before in named[after].needs for before, after in pairwise(schedule.critical))
    assert simulate(jobs, 10**6).makespan == schedule.shortest


def test_shares_are_parts_of_one_gpu() -> None:
    """Of four jobs with 0.75 GPUs each, three run on three GPUs; a share goes where the least room is left."""
    three = simulate([Job(str(number), (), 1.0, 0.75) for number in range(4)], 3)
    assert three.makespan == 2
    thirds = simulate([Job(str(number), (), 1.0, 1 / 3) for number in range(6)] + [Job("whole", (), 1.0, 1)], 3)
    assert thirds.makespan == 1


def test_a_job_that_fits_on_no_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="train needs 8 GPUs at once, and there are 4"):
        simulate([Job("train", (), 1.0, 8)], 4)


def test_the_paper_is_scheduled_in_seconds(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = catto("plan", "paper", "--out", tmp_path / "out", "--schedule", "1,8,64", "--json", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 5
    told = json.loads(shown.stdout)
    one, eight, many = told["schedules"]
    assert [schedule["gpus"] for schedule in told["schedules"]] == [1, 8, 64]
    assert one["gpu_hours"] == eight["gpu_hours"] == many["gpu_hours"] > 677  # the trainings alone, as the plan states
    assert one["makespan_seconds"] / 8 <= eight["makespan_seconds"] <= one["makespan_seconds"]
    assert many["makespan_seconds"] >= sum(step["seconds"] for step in told["critical_path"])
    assert many["utilisation"] == pytest.approx(many["gpu_hours"] * 3600 / 64 / many["makespan_seconds"])
    assert told["durations"] == {"estimated": 4641}


def planned(*overrides: str) -> tuple[Costs, dict[str, Stage]]:
    recipe = load("paper", ["tasks={snli: {train: 100, validation: 50}}", "seeds=[0]", *overrides])
    return Costs(recipe), {stage.name: stage for stage in ordered([Graph(recipe).report()])}


def test_durations_are_stated_or_measured_or_estimated() -> None:
    """SFT: 1,000 rows x 3 epochs x 2,048 tokens at 0.4 x 312e12 / (6 x 4.02e9) = 5,171 tokens/s are 1,188 s.

    Validation: 50 responses of 1,024 tokens in 2 batches of 32. Each token reads 16.1 GB of weights and the cache:
    32 x (1,024 + 512) tokens of 36 layers x 1,024 keys and values x 2 bytes, 7.2 GB, at 0.8 x 2.04 TB/s: 29.3 s.
    """
    costs, stages = planned("evaluation.batch_size=32")
    sft, dpo = stages["sft snli seed 0 lr 5e-05"], stages["dpo matched snli seed 0 lr 5e-06"]
    text = stages["generated validation dpo matched snli seed 0 lr 5e-06"]
    durations = costs.durations(stages.values(), [], {})
    assert durations[sft.key] == (pytest.approx(1188, abs=1), "estimated")
    assert durations[text.key] == (pytest.approx(29.3, abs=0.1), "estimated")
    taken = [(dpo, 100.0), (dpo, 300.0), (dpo, 120.0)]
    durations = costs.durations(stages.values(), taken, {"generated": 7.0, "train sft": 11.0, "train": 9.0})
    assert durations[dpo.key] == (9.0, "stated")
    assert durations[sft.key] == (11.0, "stated")
    assert durations[text.key] == (7.0, "stated")
    assert costs.durations([dpo], taken, {})[dpo.key] == (120.0, "measured")


def test_a_training_that_was_resumed_took_all_of_its_runs(tmp_path: Path) -> None:
    _, stages = planned()
    training = stages["sft snli seed 0 lr 5e-05"]
    assert took(tmp_path, training) is None
    folder = place(tmp_path, training)
    folder.mkdir(parents=True)
    for measured, seconds in ((500.0, 500.0), (70.0, 90.0)):
        write(folder / "training.json", {"seconds": measured})
        write(folder / "done.json", record(training, folder, "", {"seconds": 90.0}))
        assert took(tmp_path, training) == seconds


def test_finished_stages_tell_how_long_the_others_take(tmp_path: Path, capsys: Capture) -> None:
    """The test questions of one seed are there; those of the other are planned with the seconds that these took."""
    recipe, root = write_recipe(tmp_path, **SMALLEST, seeds=[0, 1]), tmp_path / "out"
    plan = Graph(load(str(recipe)))
    freeze(root, plan.recipe)
    assert run(capsys, "stage", root, plan.questions("witnesses", "test", 0).key).code == 0
    arguments = ("plan", recipe, "--out", root, "--schedule", "2")
    told = run(capsys, *arguments, "--json").json
    assert told["durations"]["measured"] == 3  # test and validation questions of seed 1, validation questions of seed 0
    shown = run(capsys, *arguments, "--seconds", "train=3600").out
    assert re.search(r"^ 2 +2 h ", shown, re.MULTILINE)
    assert re.search(r"Critical path: 2 h .*sft witnesses seed 0 lr 0.001 \(60 min\)", shown)
    assert "4 stated" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--schedule", "1,x"], "--schedule: expected numbers of GPUs as in 1,8,64, got 1,x"),
        (["--schedule", "0"], "--schedule: expected numbers of GPUs as in 1,8,64, got 0"),
        (["--schedule", "1", "--seconds", "tran=3"], "did you mean train?"),
        (["--schedule", "1", "--seconds", "train=fast"], "--seconds: expected KIND=SECONDS, got train=fast"),
        (["--schedule", "1", "--seconds", "train=-1"], "--seconds: expected KIND=SECONDS, got train=-1"),
        (["--schedule", "8,1", "--set", "resources.train.gpus=2"], "seed 0 lr 0.002 needs 2 GPUs at once, more than 1"),
        (["--schedule", "1", "--memory"], "give one of --memory, --schedule and --export"),
        (["--schedule", "1", "--set", "model={path: my/model}"], "state --seconds 'train sft=...'"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: list[str], expected: str, tmp_path: Path, capsys: Capture
) -> None:
    told = run(capsys, "plan", "quickstart", "--out", tmp_path / "out", *arguments)
    assert (told.code, told.out) == (2, "")
    assert expected in told.err


# ---- other schedulers ------------------------------------------------------------------------------------------------

NAME = "it's $HOME #1 `x`"  # of a folder: whatever a shell or make could take for its own
RECORD = """
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.getcwd(), *sys.argv[1:]]) + "\\n")
"""


def recording(folder: Path) -> dict[str, str]:
    """An environment in which the command only writes down how it was called."""
    (folder / "record.py").write_text(RECORD)
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(folder / 'record.py'))}"
    return {**os.environ, "CATTO": command, "RECORD": str(folder / "calls.jsonl")}


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def exported(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> tuple[Path, dict[str, Stage]]:
    """Export the stages that are missing once the questions are there; the run's folder and these stages."""
    recipe = write_recipe(folder, **SMALLEST)
    root, plan = folder / NAME / "out", ordered([Graph(load(str(recipe))).report()])
    (folder / NAME).mkdir()
    monkeypatch.chdir(folder / NAME)
    assert run(capsys, "plan", recipe, "--out", root, "--export", kind).code == 0
    assert run(capsys, "stage", root, plan[0].key).code == 0
    told = run(capsys, "plan", recipe, "--out", root, "--export", kind).out
    assert told.startswith(f"Wrote {len(plan) - 1} stages: ")
    assert Path(shlex.split(told)[-1]).is_file()
    missing = {stage.key: stage for stage in plan[1:]}
    for key, stage in list(missing.items())[::7]:
        assert {find_stage(root, name).key for name in (key, key[:10], stage.folder)} == {stage.key}
    with pytest.raises(DataError, match=f"{len(plan)} keys begin with '', among them"):
        find_stage(root, "")
    return root, missing


def test_a_stage_exported_from_one_of_several_recipes_is_that_recipes(tmp_path: Path, capsys: Capture) -> None:
    """Recipes that differ in how stages are run share the keys; the one that was used last counts if none is named."""
    one, two = (load("quickstart", [f"launch.processes={count}"]) for count in (1, 2))
    key = next(stage.key for stage in ordered([Graph(one).report()]) if stage.kind == "train")
    for past, recipe in ((300, one), (200, two)):
        os.utime(freeze(tmp_path, recipe), (time.time() - past,) * 2)
    freeze(tmp_path, one)
    assert find_stage(tmp_path, key).settings.launch.processes == 1
    assert find_stage(tmp_path, key, stored(tmp_path, two).stem).settings.launch.processes == 2
    told = run(capsys, "stage", tmp_path, key, "--recipe", "0" * 16)
    assert (told.code, told.err.count(f"no recipe {'0' * 16} is stored here")) == (2, 1)
    stored(tmp_path, one).write_text('{"name": "old", "no_longer": 1}')
    told = run(capsys, "stage", tmp_path, key, "--recipe", stored(tmp_path, one).stem)
    assert (told.code, told.err.count(".json: damaged")) == (2, 1)


def test_make_calls_every_missing_stage_after_its_needs(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, missing = exported(tmp_path, capsys, monkeypatch, "make")
    done = subprocess.run(
        ["make", "-j2", "-f", root / "Makefile"], cwd="/", env=recording(tmp_path), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    keys = [call[3] for call in calls(tmp_path)]
    assert all(call[:3] == [str(tmp_path / NAME), "stage", str(root)] for call in calls(tmp_path))
    (recipe,) = (root / "recipes").iterdir()
    assert all(call[4:] == ["--recipe", recipe.stem] for call in calls(tmp_path))
    assert sorted(keys) == sorted(missing)
    for at, key in enumerate(keys):
        assert all(need.key in keys[:at] for need in missing[key].needs.values() if need.key in missing)


def test_make_cannot_name_a_folder_with_a_line_break(tmp_path: Path, capsys: Capture) -> None:
    told = run(capsys, "plan", "quickstart", "--out", tmp_path / "a\nb", "--export", "make")
    assert (told.code, told.out) == (2, "")
    assert "--export: a Makefile cannot name a folder with a line break" in told.err
    assert not (tmp_path / "a\nb").exists()


SBATCH = """#!/usr/bin/env bash
# Slurm without a cluster: gives a number, and writes down what was asked for.
printf '%s\\n' "$*" >> "$SUBMITTED"
wc -l < "$SUBMITTED"
"""


def test_slurm_arrays_wait_for_what_they_need(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dependencies are interpreted here; there is no Slurm."""
    root, missing = exported(tmp_path, capsys, monkeypatch, "slurm")
    scripts = sorted((root / "slurm").glob("*.sh"))
    for script in scripts:
        assert subprocess.run(["bash", "-n", script], capture_output=True, check=False).stderr == b""
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    environment = recording(tmp_path) | {"SUBMITTED": str(tmp_path / "jobs.txt")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(["bash", root / "slurm" / "submit.sh"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    finished: dict[int, set[str]] = {}  # job -> what is done once it has ended
    ran: list[str] = []
    for number, line in enumerate((tmp_path / "jobs.txt").read_text().splitlines(), start=1):
        *options, name = line.split()
        before = [
            option.partition(":")[2].split(":") for option in options if option.startswith("--dependency=afterany:")
        ]
        known = {key for job in before[0] for key in finished[int(job)]} if before else set()
        text = (root / "slurm" / name).read_text()
        last = int(text.partition("#SBATCH --array=0-")[2].partition("\n")[0])
        for task in range(last + 1):
            alone = environment | {"SLURM_ARRAY_TASK_ID": str(task)}
            assert subprocess.run(["bash", root / "slurm" / name], env=alone, check=False).returncode == 0
        new = [call[3] for call in calls(tmp_path)[len(ran) :]]
        for key in new:
            assert all(need.key in known for need in missing[key].needs.values() if need.key in missing)
        ran += new
        finished[number] = known | set(new)
    assert sorted(ran) == sorted(missing)
    assert all(call[:3] == [str(tmp_path / NAME), "stage", str(root)] for call in calls(tmp_path))
    (recipe,) = (root / "recipes").iterdir()
    assert all(call[4:] == ["--recipe", recipe.stem] for call in calls(tmp_path))
    named = {script.stem.partition("-")[2] for script in scripts if script.name != "submit.sh"}
    assert named == {stage.kind for stage in missing.values()}


def test_resources_of_the_recipe_reach_slurm(tmp_path: Path, capsys: Capture) -> None:
    blocks = {
        "train": {"gpus": 2, "cpus": 4, "memory": "40GB"},
        "predict": {"gpus": 0.5},
        "report": {"cpus": 2, "memory": "500KB"},
    }
    recipe = write_recipe(tmp_path, **SMALLEST, resources=blocks)
    assert run(capsys, "plan", recipe, "--out", tmp_path / "out", "--export", "slurm").code == 0
    asked = {}
    for script in (tmp_path / "out" / "slurm").glob("[0-9]*.sh"):
        options = re.findall(r"#SBATCH --(cpus-per-task|gres|mem)=(.*)", script.read_text())
        asked[script.stem.partition("-")[2]] = " ".join(value for _, value in options)
    assert asked["train"] == "4 gpu:2 38147M"  # 40e9 bytes in units of 2^20
    assert asked["generated"] == asked["sampled"] == "1 gpu:1"
    assert asked["questions"] == asked["report"] == "2 1M"  # 0 would be all of a node's
    jobs = (
        "plan",
        recipe,
        "--out",
        tmp_path / "out",
        "--json",
        "--seconds",
        "train=3600",
        "--seconds",
        "generated=3600",
    )
    (schedule,) = run(capsys, *jobs, "--schedule", "2").json["schedules"]
    assert schedule["gpu_hours"] == pytest.approx(2 * 2 + 2 * 0.5, abs=0.1)  # two trainings, two generations


def test_a_large_array_is_cut_and_arrays_hold_one_kind(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catto.pipeline.export.MOST", 40)
    assert run(capsys, "plan", "paper", "--out", tmp_path, "--export", "slurm").code == 0
    kinds, total = defaultdict(set), 0
    names = {stage.key: stage.kind for stage in ordered([Graph(load("paper")).report()])}
    for script in (tmp_path / "slurm").glob("[0-9]*.sh"):
        keys = [line.split()[0] for line in script.read_text().splitlines() if line.startswith("  ")]
        kinds[script.name].update(names[key] for key in keys)
        total += len(keys)
        assert len(keys) <= 40
    assert total == 4641
    assert all(len(kind) == 1 for kind in kinds.values())


def test_make_gives_the_numbers_of_the_local_runner(tmp_path: Path) -> None:
    """Two stages at a time, each in a process of its own: predictions and tables are the same bytes."""
    recipe = write_recipe(tmp_path, **SMALLEST | {"methods": ["sft"]})
    assert catto("run", recipe, "--out", "here", cwd=tmp_path).returncode == 0
    assert catto("plan", recipe, "--out", "made", "--export", "make", cwd=tmp_path).returncode == 0
    command = ["make", "-j2", "-f", "made/Makefile", f"CATTO={shlex.quote(sys.executable)} -m catto"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    here = tmp_path / "here" / "stages"
    tables = [path for path in here.glob("report-*/tables/*") if path.stem != "training"]  # which has seconds
    files = [*here.glob("*/predictions.jsonl"), *here.glob("report-*/numbers.json"), *tables]
    assert len(tables) > 2
    assert len(files) > len(tables) + 1
    for path in files:
        one, other = path.read_bytes(), (tmp_path / "made" / "stages" / path.relative_to(here)).read_bytes()
        assert re.sub(rb'"seconds": [^,}]+', b"", one) == re.sub(rb'"seconds": [^,}]+', b"", other), path.name
