"""`catto plan`: the stages of a recipe, their memory and time before GPUs are rented, scripts for other schedulers."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from catto.cli import console
from catto.cli.display import duration
from catto.cli.run import OutOption, RecipeArgument, SeedsOption, SetOption, folder, read_recipe
from catto.io.atomic import write_text
from catto.methods import METHODS
from catto.pipeline import run as runner
from catto.pipeline.cost import GPU, PROMPT, Costs, Job, group, resources, simulate, took
from catto.pipeline.stage import Stage, ordered

Planned = Sequence[tuple[Stage, str, float | None]]  # with its standing, and the seconds it took
Exported = Literal["slurm", "make"]
STANDINGS = ("done", "begun", "to do")
# Stages of the critical path that are named.
LONGEST = 8


def plan(
    recipe: RecipeArgument,
    out: OutOption = None,
    sets: SetOption = None,
    seeds: SeedsOption = None,
    memory: Annotated[bool, Option("--memory", help="Show the GPU memory of the largest training.")] = False,
    schedule: Annotated[str | None, Option(help="Simulate the missing stages on so many GPUs: 1,8,64.")] = None,
    seconds: Annotated[list[str] | None, Option(help="How long a stage takes: 'train dpo=5400', sampled=600.")] = None,
    export: Annotated[Exported | None, Option(help="Write the missing stages for Slurm, or as a Makefile.")] = None,
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
    from catto.pipeline.export import makefile, slurm
    from catto.pipeline.plan import Graph, freeze

    if sum((memory, schedule is not None, export is not None)) > 1:
        console.refuse("give one of --memory, --schedule and --export")
    chosen = read_recipe(recipe, sets, seeds)
    root, graph, costs = folder(chosen, out), Graph(chosen), Costs(chosen)
    goal = graph.report()
    if memory:
        _show_memory(costs, ordered([goal]), as_json)
        return
    stages = [(stage, standing, took(root, stage)) for stage, standing in runner.plan(root, [goal])]
    missing = [stage for stage, standing, _ in stages if standing != "done"]
    if not missing and (schedule or export):
        console.refuse("nothing is left to do: every stage is done")
    if schedule is not None:
        _show_schedule(costs, stages, schedule, seconds or [], as_json)
    elif export is not None:
        with console.refusing(place="--export: "):
            scripts = (slurm if export == "slurm" else makefile)(root, chosen, missing)
        freeze(root, chosen)
        for earlier in (root / "slurm").glob("*.sh") if export == "slurm" else ():  # the arrays of another plan
            earlier.unlink()
        for name, text in scripts.items():
            write_text(root / name, text)
        start, script = ("bash", "slurm/submit.sh") if export == "slurm" else ("make -j 2 -k -f", "Makefile")
        console.say(f"Wrote {len(missing)} stages: {start} {shlex.quote(f'{root}/{script}')}")
    elif as_json:
        rows = []
        for stage, standing, spent in stages:
            named = {name: getattr(stage, name) for name in ("kind", "name", "key", "folder")}
            rows.append({**named, "standing": standing, "seconds": spent})
        console.print_json(rows)
    else:
        _show_stages(root, stages)
        for line in costs.lines(missing):
            console.say(line)
        several_rates = any(name in METHODS and len(graph.rates(name)) > 1 for name in chosen.methods)
        if chosen.lr_choice == "mean" and len(chosen.seeds) > 1 and several_rates:
            console.say("lr_choice mean: a rate is chosen by its mean over seeds, so choices wait for every seed.")


def _show_stages(root: Path, stages: Planned) -> None:
    groups = defaultdict(list)
    for stage, standing, seconds in stages:
        for name in (group(stage), "all"):
            groups[name].append((standing, seconds or 0.0))
    groups["all"] = groups.pop("all")  # to the end
    rows: list[list[str]] = []
    for name, members in groups.items():
        counts = Counter(standing for standing, _ in members)
        spent = duration(sum(seconds for _, seconds in members)) if counts["done"] else "-"
        rows.append([name, *(str(counts[standing]) for standing in STANDINGS), spent])
    console.show_table(str(root), ("stages", *STANDINGS, "took"), [*rows[:-1], [], rows[-1]])


def _show_memory(costs: Costs, stages: Sequence[Stage], as_json: bool) -> None:
    """Print the memory of the training whose step computes most tokens."""
    trainings = [stage.settings for stage in stages if stage.kind == "train"]
    if not trainings:
        console.refuse("--memory: the recipe trains nothing")
    largest = max(trainings, key=lambda settings: costs.batch(settings) * costs.rows(settings))
    with console.refusing(place="--memory: "):
        layouts = costs.layouts(largest)
    if as_json:
        names = ("unshared", "shared")
        console.print_json({layout: dict(zip(names, map(vars, both), strict=True)) for layout, both in layouts.items()})
        return
    held = {name: [*vars(plain).values(), shared.activations, shared.peak] for name, (plain, shared) in layouts.items()}
    rows = [[name, *(f"{size / 1e9:,.1f}" for size in sizes)] for name, sizes in held.items()]
    parts = "weights", "gradients", "optimizer", "activations", "peak", "shared", "peak"
    console.show_table("GB on each GPU", ("", *parts), rows)
    unit = "pairs" if largest.method.stage == "preference" else "rows"
    length = f"rows of {largest.context:,} tokens, {PROMPT:.0%} prompt"
    console.say(f"{largest.name}: {costs.batch(largest)} {unit} a step, {length}")
    console.say("shared: activations and peak with prefix_sharing. A GPU also needs about 1 GB for CUDA itself.")


def _show_schedule(costs: Costs, stages: Planned, gpus: str, stated: Sequence[str], as_json: bool) -> None:
    """Print how long the missing stages take on each number of GPUs.

    stated: KIND=SECONDS; a kind is a line of the plan or the kind of a stage.
    """
    kinds, known = sorted({name for stage, _, _ in stages for name in (stage.kind, group(stage))}), {}
    for value in stated:
        name, _, text = value.rpartition("=")
        console.check_name("--seconds", name, kinds)
        if not text.replace(".", "", 1).isdecimal():
            console.refuse(f"--seconds: expected KIND=SECONDS, got {value}")
        known[name] = float(text)
    missing = {stage.key: stage for stage, standing, _ in stages if standing != "done"}
    taken = [(stage, seconds) for stage, _, seconds in stages if seconds is not None]
    with console.refusing(place="--schedule: "):
        durations = costs.durations(missing.values(), taken, known)
    counts = [int(count) if count.strip().isdecimal() else 0 for count in gpus.split(",")]
    if min(counts) < 1:
        console.refuse(f"--schedule: expected numbers of GPUs as in 1,8,64, got {gpus}")
    jobs = []
    for key, stage in missing.items():
        needs = tuple(dict.fromkeys(need.key for need in stage.needs.values() if need.key in missing))
        jobs.append(Job(key, needs, durations[key].seconds, resources(costs.recipe, stage).gpus or 0))
        if jobs[-1].gpus > min(counts):
            console.refuse(f"--schedule: {stage.name} needs {jobs[-1].gpus:g} GPUs at once, more than {min(counts)}")
    schedules = {count: simulate(jobs, count) for count in counts}
    sources = Counter(length.source for length in durations.values())
    longest = schedules[counts[0]]
    path = [(missing[key].name, durations[key].seconds) for key in longest.critical]
    described = []
    for count, schedule in schedules.items():
        hours = {"gpu_hours": schedule.busy / 3600, "rented_gpu_hours": count * schedule.makespan / 3600}
        used = {"makespan_seconds": schedule.makespan, "utilisation": schedule.utilisation}
        described.append({"gpus": count, **used, **hours})
    if as_json:
        critical = [{"name": name, "seconds": seconds} for name, seconds in path]
        console.print_json({"schedules": described, "critical_path": critical, "durations": sources})
        return
    rows = []
    for number, makespan, utilisation, *spent in (one.values() for one in described):
        rows.append([str(number), duration(makespan), f"{utilisation:.0%}", *(f"{each:,.1f}" for each in spent)])
    columns = "GPUs", "makespan", "utilisation", "GPU hours", "rented GPU hours"
    console.show_table(f"{len(jobs)} stages to do", columns, rows)
    most = sorted(path, key=lambda step: -step[1])[:LONGEST]
    steps = ", ".join(f"{name} ({duration(seconds)})" for name, seconds in path if (name, seconds) in most)
    console.say(f"Critical path: {duration(longest.shortest)} in {len(path)} stages, the longest: {steps}")
    console.say(f"Durations: {', '.join(f'{count} {source}' for source, count in sources.items())}")
    for line in costs.left_out():
        console.say(line)
    if sources["estimated"]:
        told = "with the longest responses and rows; --seconds states what is known"
        console.say(f"Estimated for an {GPU.name}, {told}.")
