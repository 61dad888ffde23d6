"""benchmarks/capacity.py: the memory formula against counted bytes, and laws of the simulated schedule."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model

from catto.pipeline.estimate import Network
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, list_needed
from catto.recipe.load import load_recipe

pytestmark = pytest.mark.slow

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
capacity: Any = importlib.import_module("capacity")
Job = capacity.Job
simulate = capacity.simulate

# ---- memory ----------------------------------------------------------------------------------------------------------

CASES = ["narrow, full, shared", "narrow, full", "deep, bf16", "untied, LoRA bf16", "wide, FSDP2 x2"]


@pytest.mark.parametrize("name", CASES)
def test_stated_memory_is_what_a_step_of_a_small_model_holds(name: str) -> None:
    """To 4 % of the bytes of the tensors of a real step; `benchmarks/memory.py` has more cases, all within 7 %."""
    steps = importlib.import_module("memory")
    case = steps.make_small_cases()[name]
    assert steps.state_memory(case).peak == pytest.approx(steps.count_peak_bytes(case), rel=0.04)


def test_adapters_are_counted_as_peft_makes_them() -> None:
    from peft import LoraConfig, get_peft_model

    shape = Network(2, 32, 48, 32, 16, len_of_tiny := tiny_model().config.vocab_size, True)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert shape.vocabulary == len_of_tiny
    assert capacity.count_adapter_parameters(shape, 4) == sum(p.numel() for p in model.parameters() if p.requires_grad)


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


def planned(*overrides: str) -> tuple[Any, dict[str, Stage]]:
    recipe = load_recipe("paper", ["tasks={snli: {train: 100, validation: 50}}", "seeds=[0]", *overrides])
    return capacity.Capacity(recipe), {stage.name: stage for stage in list_needed([Graph(recipe).plan_report()])}


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
