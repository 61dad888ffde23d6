"""`catto plan`: show the stages of a recipe, estimate their cost before anything is paid for, and export scripts."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from typer import Option

from catto.cli import console
from catto.cli.display import format_duration
from catto.cli.options import OUTPUT
from catto.cli.run import OutOption, RecipeArgument, SeedsOption, SetOption, choose_folder, read_recipe
from catto.io.atomic import write_text
from catto.methods import METHODS
from catto.pipeline import run as runner
from catto.pipeline.estimate import PlanEstimate, stage_group, stage_seconds
from catto.pipeline.plan import Graph, store_recipe
from catto.pipeline.stage import Stage
from catto.recipe.settings import Recipe

Exported = Literal["slurm", "make"]
# How far a stage is; `runner.list_states` returns one of these for every stage.
STANDINGS = ("done", "begun", "to do")


class PlannedStage(NamedTuple):
    """A stage of the plan.

    Attributes:
        stage: The stage.
        standing: One of STANDINGS.
        seconds: The time it took; None if it is not done.
    """

    stage: Stage
    standing: str
    seconds: float | None


def plan(
    recipe: RecipeArgument,
    out: OutOption = None,
    sets: SetOption = None,
    seeds: SeedsOption = None,
    export: Annotated[
        Exported | None,
        Option(help="Write scripts for the missing stages: Slurm job arrays or a Makefile.", rich_help_panel=OUTPUT),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print the stages as JSON.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Show the stages of a recipe and estimate the cost of the missing ones.

    The estimate covers training tokens, GPU hours and requests to the teacher.

    Examples:
    catto plan quickstart
    catto plan mine.yaml --set evaluation.bins=15
    catto plan paper --export slurm
    """
    opened = read_recipe(recipe, sets, seeds)
    root = choose_folder(opened, out)
    graph = Graph(opened)
    stages = []
    for stage, standing in runner.list_states(root, [graph.plan_report()]):
        stages.append(PlannedStage(stage, standing, stage_seconds(root, stage)))
    missing = [planned.stage for planned in stages if planned.standing != "done"]
    if export is not None:
        if not missing:
            console.refuse("nothing is left to do: every stage is done")
        _export_stages(root, opened, missing, export)
        return
    if as_json:
        _print_json(stages)
        return
    _print_stages(root, stages)
    for line in PlanEstimate(opened).describe_missing(missing):
        console.say(line)
    if _choices_wait_for_all_seeds(graph):
        console.say("lr_choice mean: a rate is chosen by its mean over all seeds, so choices wait for every seed.")


def _choices_wait_for_all_seeds(graph: Graph) -> bool:
    """Return whether a learning rate is chosen by the mean over several seeds."""
    recipe = graph.recipe
    if recipe.lr_choice != "mean" or len(recipe.seeds) == 1:
        return False
    # A method such as `dpo+ts` rescales the confidence of another one, is not in METHODS, and is not trained.
    trained_methods = [name for name in recipe.methods if name in METHODS]
    return any(len(graph.list_learning_rates(name)) > 1 for name in trained_methods)


def _export_stages(root: Path, recipe: Recipe, missing: list[Stage], export: Exported) -> None:
    """Write scripts that run the missing stages, store the recipe that they read, and print how to start them."""
    from catto.pipeline.export import format_makefile, format_slurm_scripts

    with console.refuse_errors(place="--export: "):
        if export == "slurm":
            command = "bash"
            main_script = "slurm/submit.sh"
            scripts = format_slurm_scripts(root, recipe, missing)
        else:
            command = "make -j 2 -k -f"
            main_script = "Makefile"
            scripts = format_makefile(root, recipe, missing)
    store_recipe(root, recipe)
    if export == "slurm":
        for old_script in (root / "slurm").glob("*.sh"):  # left by an earlier export
            old_script.unlink()
    for name, text in scripts.items():
        write_text(root / name, text)
    console.say(f"Wrote scripts for {len(missing)} stages. Run: {command} {shlex.quote(f'{root}/{main_script}')}")


def _print_json(stages: list[PlannedStage]) -> None:
    """Print one entry per stage, in the order in which they can run."""
    rows = []
    for stage, standing, seconds in stages:
        row = {
            "kind": stage.kind,
            "name": stage.name,
            "key": stage.key,
            "folder": stage.folder,
            "standing": standing,
            "seconds": seconds,
        }
        rows.append(row)
    console.print_json(rows)


def _print_stages(root: Path, stages: list[PlannedStage]) -> None:
    """Print a table with one row per group of similar stages, and a last row for all stages."""
    groups: dict[str, list[PlannedStage]] = defaultdict(list)
    for planned in stages:
        groups[stage_group(planned.stage)].append(planned)
    rows = [_count_standings(name, members) for name, members in groups.items()]
    console.show_table(str(root), ("stages", *STANDINGS, "took"), [*rows, [], _count_standings("all", stages)])


def _count_standings(name: str, members: list[PlannedStage]) -> list[str]:
    """Return a row of the table: the name, how many members have each standing, and the time of those that are done."""
    counts = Counter(planned.standing for planned in members)
    spent = "-"
    if counts["done"]:
        spent = format_duration(sum(planned.seconds or 0.0 for planned in members))
    return [name, *(str(counts[standing]) for standing in STANDINGS), spent]
