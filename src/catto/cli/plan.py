"""`catto plan`: the stages of a recipe, their memory and time before GPUs are rented, scripts for other schedulers."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from catto.cli import console
from catto.cli.run import OutOption, RecipeArgument, SeedOption, SetOption, folder, read_recipe

if TYPE_CHECKING:
    from catto.experiment.cost import Costs, Duration
    from catto.experiment.stages import Stage

EXAMPLES = console.examples(
    "catto plan quickstart",
    "catto plan mine.yaml --set evaluation.bins=15",
    "catto plan paper --memory",
    "catto plan paper --schedule 1,8,64 --seconds train=5400",
    "catto plan paper --export slurm",
)
STANDINGS = ("done", "begun", "to do")
# Stages of the critical path that are named.
LONGEST = 8

ExportOption = Annotated[
    Literal["slurm", "make"] | None,
    typer.Option("--export", help="Write the missing stages into the folder: Slurm job arrays, or a Makefile."),
]
MemoryOption = Annotated[
    bool, typer.Option("--memory", help="Show the GPU memory of the largest training, in several layouts.")
]
ScheduleOption = Annotated[
    str | None,
    typer.Option("--schedule", metavar="GPUS,...", help="Simulate the missing stages on so many GPUs: 1,8,64."),
]
SecondsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--seconds",
        metavar="KIND=SECONDS",
        help="How long a stage takes, by the plan's line or by kind: 'train dpo=5400', generated=600. May be repeated.",
    ),
]


def plan(
    recipe: RecipeArgument,
    out: OutOption = None,
    sets: SetOption = None,
    seeds: SeedOption = None,
    memory: MemoryOption = False,
    schedule: ScheduleOption = None,
    stated: SecondsOption = None,
    export: ExportOption = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print every stage (or the memory, or the schedule) as JSON and nothing else."),
    ] = False,
) -> None:
    """Show the stages of a recipe, which are done and how long those took, and what the others need.

    --memory, --schedule and --export each show or write something else instead.
    """
    from catto.experiment import runner
    from catto.experiment.cost import Costs, took
    from catto.experiment.graph import Graph
    from catto.experiment.stages import ordered
    from catto.methods import METHODS

    if sum((memory, schedule is not None, export is not None)) > 1:
        console.refuse("give one of --memory, --schedule and --export")
    chosen = read_recipe(recipe, sets, seeds)
    root, graph, costs = folder(chosen, out), Graph(chosen), Costs(chosen)
    if memory:
        _show_memory(costs, ordered([graph.report()]), as_json)
        return
    stages = [(stage, standing, took(root, stage)) for stage, standing in runner.plan(root, [graph.report()])]
    missing = [stage for stage, standing, _ in stages if standing != "done"]
    if not missing and (schedule or export):
        console.refuse("nothing is left to do: every stage is done")
    if schedule is not None:
        taken = [(stage, seconds) for stage, _, seconds in stages if seconds is not None]
        known = _stated(stated or [], [stage for stage, _, _ in stages])
        with console.refusing(place="--schedule: "):
            durations = costs.durations(missing, taken, known)
        _show_schedule(costs, missing, durations, schedule, as_json)
    elif export is not None:
        _write(costs, root, missing, export)
    elif as_json:
        names = ("kind", "name", "key", "folder")
        console.print_json(
            [
                {**{name: getattr(stage, name) for name in names}, "standing": standing, "seconds": seconds}
                for stage, standing, seconds in stages
            ]
        )
    else:
        _show_stages(root, stages)
        for line in costs.lines(missing):
            console.say(line)
        several_rates = any(name in METHODS and len(graph.rates(name)) > 1 for name in chosen.methods)
        if chosen.lr_choice == "mean" and len(chosen.seeds) > 1 and several_rates:
            console.say(
                "lr_choice mean: a learning rate is chosen by its mean over seeds, so choices wait for every seed."
            )


def _show_stages(root: Path, stages: Sequence[tuple[Stage, str, float | None]]) -> None:
    from catto.cli.display import duration
    from catto.experiment.cost import group

    groups = defaultdict(list)
    for stage, standing, seconds in stages:
        groups[group(stage)].append((standing, seconds or 0.0))
    rows = console.table(str(root), "stages", *STANDINGS, "took")
    for name, members in [*groups.items(), ("all", list(chain(*groups.values())))]:
        if name == "all":
            rows.add_section()
        counts = [[standing for standing, _ in members].count(standing) for standing in STANDINGS]
        rows.add_row(name, *map(str, counts), duration(sum(seconds for _, seconds in members)) if counts[0] else "-")
    console.print_table(rows)


def _show_memory(costs: Costs, stages: Sequence[Stage], as_json: bool) -> None:
    """Print the memory of the training whose step computes most tokens."""
    from catto.experiment.cost import PROMPT

    trainings = [stage.settings for stage in stages if stage.kind == "train"]
    largest = max(trainings, key=lambda settings: settings.batch_size * costs.rows(settings))
    with console.refusing(place="--memory: "):
        layouts = costs.layouts(largest)
    if as_json:
        names = ("unshared", "shared")
        console.print_json({layout: dict(zip(names, map(vars, both), strict=True)) for layout, both in layouts.items()})
        return
    rows = console.table(
        "GB on each GPU", "", "weights", "gradients", "optimizer", "activations", "peak", "shared", "peak"
    )
    for layout, (plain, shared) in layouts.items():
        values = (*vars(plain).values(), shared.activations, shared.peak)
        rows.add_row(layout, *(f"{value / 1e9:,.1f}" for value in values))
    console.print_table(rows)
    unit = "pairs" if largest.method.stage == "preference" else "rows"
    console.say(
        f"{largest.name}: {largest.batch_size} {unit} a step, rows of {largest.context:,} tokens, {PROMPT:.0%} prompt"
    )
    console.say("shared: activations and peak with prefix_sharing. A GPU also needs about 1 GB for CUDA itself.")


def _show_schedule(
    costs: Costs, missing: Sequence[Stage], durations: Mapping[str, Duration], gpus: str, as_json: bool
) -> None:
    """Print how long the missing stages take on each number of GPUs."""
    from catto.cli.display import duration
    from catto.experiment.cost import GPU
    from catto.experiment.schedule import Job, simulate

    counts = [int(count) if count.strip().isdecimal() else 0 for count in gpus.split(",")]
    if min(counts) < 1:
        console.refuse(f"--schedule: expected numbers of GPUs as in 1,8,64, got {gpus}")
    jobs, names = [], {stage.key: stage.name for stage in missing}
    for stage in missing:
        needs = tuple(dict.fromkeys(need.key for need in stage.needs.values() if need.key in names))
        jobs.append(Job(stage.key, needs, durations[stage.key].seconds, costs.resources(stage).gpus or 0))
        if jobs[-1].gpus > min(counts):
            console.refuse(f"--schedule: {stage.name} needs {jobs[-1].gpus:g} GPUs at once, more than {min(counts)}")
    schedules = {count: simulate(jobs, count) for count in counts}
    sources = Counter(known.source for known in durations.values())
    longest = schedules[counts[0]]
    path = [(names[key], durations[key].seconds) for key in longest.critical]
    if as_json:
        described = [
            {
                "gpus": count,
                "makespan_seconds": schedule.makespan,
                "utilisation": schedule.utilisation,
                "gpu_hours": schedule.busy / 3600,
                "rented_gpu_hours": count * schedule.makespan / 3600,
            }
            for count, schedule in schedules.items()
        ]
        critical = [{"name": name, "seconds": seconds} for name, seconds in path]
        console.print_json({"schedules": described, "critical_path": critical, "durations": sources})
        return
    rows = console.table(
        f"{len(jobs)} stages to do", "GPUs", "makespan", "utilisation", "GPU hours", "rented GPU hours"
    )
    for count, schedule in schedules.items():
        hours = f"{schedule.busy / 3600:,.1f}", f"{count * schedule.makespan / 3600:,.1f}"
        rows.add_row(str(count), duration(schedule.makespan), f"{schedule.utilisation:.0%}", *hours)
    console.print_table(rows)
    most = sorted(path, key=lambda step: -step[1])[:LONGEST]
    steps = ", ".join(f"{name} ({duration(seconds)})" for name, seconds in path if (name, seconds) in most)
    console.say(f"Critical path: {duration(longest.shortest)} in {len(path)} stages, the longest: {steps}")
    console.say(f"Durations: {', '.join(f'{count} {source}' for source, count in sources.items())}")
    for line in costs.left_out():
        console.say(line)
    if sources["estimated"]:
        console.say(
            f"Estimated for an {GPU.name}, with responses and rows as long as allowed; --seconds states what is known."
        )


def _stated(values: Sequence[str], known: Iterable[Stage]) -> dict[str, float]:
    """Read `KIND=SECONDS`; a kind is a line of the plan or the kind of a stage."""
    from catto.experiment.cost import group

    names = sorted({name for stage in known for name in (stage.kind, group(stage))})
    stated = {}
    for value in values:
        name, _, text = value.rpartition("=")
        console.check_name("--seconds", name, names)
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not (isfinite(seconds) and seconds >= 0):
            console.refuse(f"--seconds: expected KIND=SECONDS, got {value}")
        stated[name] = seconds
    return stated


def _write(costs: Costs, root: Path, missing: Sequence[Stage], kind: str) -> None:
    """Write the scripts and the recipe into the experiment's folder, and say how to start them."""
    from catto.experiment.export import makefile, slurm
    from catto.experiment.graph import freeze, stored
    from catto.files import replacing

    name = stored(root, costs.recipe).stem
    with console.refusing(place="--export: "):
        scripts = slurm(root, name, missing, costs.resources) if kind == "slurm" else makefile(root, name, missing)
    freeze(root, costs.recipe)
    for earlier in (root / "slurm").glob("*.sh") if kind == "slurm" else ():  # the arrays of another plan
        earlier.unlink()
    for name, text in scripts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(root / name) as file:
            file.write(text)
    start = (
        ["bash", f"{root}/slurm/submit.sh"] if kind == "slurm" else ["make", "-j", "2", "-k", "-f", f"{root}/Makefile"]
    )
    console.say(f"Wrote {len(missing)} stages: {shlex.join(start)}")
