"""`catto plan`: the stages of a recipe, their memory and time before GPUs are rented, scripts for other schedulers."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from catto.cli import console
from catto.cli.run import OutOption, RecipeArgument, SeedsOption, SetOption, folder, read_recipe

if TYPE_CHECKING:
    from catto.experiment.cost import Costs, Duration
    from catto.experiment.stages import Stage

STANDINGS = ("done", "begun", "to do")
# Stages of the critical path that are named.
LONGEST = 8


def plan(
    recipe: RecipeArgument,
    out: OutOption = None,
    sets: SetOption = None,
    seeds: SeedsOption = None,
    memory: Annotated[bool, Option("--memory", help="Show the GPU memory of the largest training.")] = False,
    schedule: Annotated[
        str | None, Option(metavar="GPUS,...", help="Simulate the missing stages on so many GPUs: 1,8,64.")
    ] = None,
    stated: Annotated[
        list[str] | None,
        Option("--seconds", metavar="KIND=SECONDS", help="How long a stage takes: 'train dpo=5400', generated=600."),
    ] = None,
    export: Annotated[
        Literal["slurm", "make"] | None, Option(help="Write the missing stages as Slurm job arrays, or a Makefile.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print what is shown as JSON and nothing else.")] = False,
) -> None:
    """Show the stages of a recipe, which are done and how long those took, and what the others need.

    --memory, --schedule and --export each show or write something else instead. --seconds, which may be repeated, names
    a line of the plan or a kind of stage.

    Examples:
    catto plan quickstart
    catto plan mine.yaml --set evaluation.bins=15
    catto plan paper --memory
    catto plan paper --schedule 1,8,64 --seconds train=5400
    catto plan paper --export slurm
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
        rows = []
        for stage, standing, seconds in stages:
            named = {name: getattr(stage, name) for name in ("kind", "name", "key", "folder")}
            rows.append({**named, "standing": standing, "seconds": seconds})
        console.print_json(rows)
    else:
        _show_stages(root, stages)
        for line in costs.lines(missing):
            console.say(line)
        several_rates = any(name in METHODS and len(graph.rates(name)) > 1 for name in chosen.methods)
        if chosen.lr_choice == "mean" and len(chosen.seeds) > 1 and several_rates:
            console.say("lr_choice mean: a rate is chosen by its mean over seeds, so choices wait for every seed.")


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
    parts = "weights", "gradients", "optimizer", "activations", "peak", "shared", "peak"
    rows = console.table("GB on each GPU", "", *parts)
    for layout, (plain, shared) in layouts.items():
        values = (*vars(plain).values(), shared.activations, shared.peak)
        rows.add_row(layout, *(f"{value / 1e9:,.1f}" for value in values))
    console.print_table(rows)
    unit = "pairs" if largest.method.stage == "preference" else "rows"
    length = f"rows of {largest.context:,} tokens, {PROMPT:.0%} prompt"
    console.say(f"{largest.name}: {largest.batch_size} {unit} a step, {length}")
    console.say("shared: activations and peak with prefix_sharing. A GPU also needs about 1 GB for CUDA itself.")


def _show_schedule(
    costs: Costs, missing: Sequence[Stage], durations: Mapping[str, Duration], gpus: str, as_json: bool
) -> None:
    """Print how long the missing stages take on each number of GPUs."""
    from catto.cli.display import duration
    from catto.experiment.cost import GPU, Job, resources, simulate

    counts = [int(count) if count.strip().isdecimal() else 0 for count in gpus.split(",")]
    if min(counts) < 1:
        console.refuse(f"--schedule: expected numbers of GPUs as in 1,8,64, got {gpus}")
    jobs, names = [], {stage.key: stage.name for stage in missing}
    for stage in missing:
        needs = tuple(dict.fromkeys(need.key for need in stage.needs.values() if need.key in names))
        jobs.append(Job(stage.key, needs, durations[stage.key].seconds, resources(costs.recipe, stage).gpus or 0))
        if jobs[-1].gpus > min(counts):
            console.refuse(f"--schedule: {stage.name} needs {jobs[-1].gpus:g} GPUs at once, more than {min(counts)}")
    schedules = {count: simulate(jobs, count) for count in counts}
    sources = Counter(known.source for known in durations.values())
    longest = schedules[counts[0]]
    path = [(names[key], durations[key].seconds) for key in longest.critical]
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
    if as_json:
        critical = [{"name": name, "seconds": seconds} for name, seconds in path]
        console.print_json({"schedules": described, "critical_path": critical, "durations": sources})
        return
    columns = "GPUs", "makespan", "utilisation", "GPU hours", "rented GPU hours"
    rows = console.table(f"{len(jobs)} stages to do", *columns)
    for row in described:
        hours = f"{row['gpu_hours']:,.1f}", f"{row['rented_gpu_hours']:,.1f}"
        rows.add_row(str(row["gpus"]), duration(row["makespan_seconds"]), f"{row['utilisation']:.0%}", *hours)
    console.print_table(rows)
    most = sorted(path, key=lambda step: -step[1])[:LONGEST]
    steps = ", ".join(f"{name} ({duration(seconds)})" for name, seconds in path if (name, seconds) in most)
    console.say(f"Critical path: {duration(longest.shortest)} in {len(path)} stages, the longest: {steps}")
    console.say(f"Durations: {', '.join(f'{count} {source}' for source, count in sources.items())}")
    for line in costs.left_out():
        console.say(line)
    if sources["estimated"]:
        console.say(
            f"Estimated for an {GPU.name}, with the longest responses and rows; --seconds states what is known."
        )


def _stated(values: Sequence[str], known: Iterable[Stage]) -> dict[str, float]:
    """Read `KIND=SECONDS`; a kind is a line of the plan or the kind of a stage."""
    from catto.experiment.cost import group

    names = sorted({name for stage in known for name in (stage.kind, group(stage))})
    stated = {}
    for value in values:
        name, _, text = value.rpartition("=")
        console.check_name("--seconds", name, names)
        if not text.replace(".", "", 1).isdecimal():
            console.refuse(f"--seconds: expected KIND=SECONDS, got {value}")
        stated[name] = float(text)
    return stated


def _write(costs: Costs, root: Path, missing: Sequence[Stage], kind: str) -> None:
    """Write the scripts and the recipe into the experiment's folder, and say how to start them."""
    from catto.experiment.export import makefile, slurm
    from catto.experiment.graph import freeze
    from catto.files import replacing

    with console.refusing(place="--export: "):
        scripts = slurm(root, costs.recipe, missing) if kind == "slurm" else makefile(root, costs.recipe, missing)
    freeze(root, costs.recipe)
    for earlier in (root / "slurm").glob("*.sh") if kind == "slurm" else ():  # the arrays of another plan
        earlier.unlink()
    for name, text in scripts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(root / name) as file:
            file.write(text)
    start, script = ("bash", "slurm/submit.sh") if kind == "slurm" else ("make -j 2 -k -f", "Makefile")
    console.say(f"Wrote {len(missing)} stages: {start} {shlex.quote(f'{root}/{script}')}")
