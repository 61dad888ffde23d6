"""`catto plan` and `catto run`: the whole experiment of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catto.cli.checks import MOST_SEED
from catto.cli.console import print_json, print_table, refuse, say, table
from catto.cli.experiment import OutOption, RecipeArgument, RepairOption, RetryOption, SetOption, folder, go, opened

if TYPE_CHECKING:
    from catto.experiment.stages import Stage
    from catto.recipe import Recipe

__all__ = ["plan", "run"]

PLAN_EXAMPLES = """
[bold]Examples[/bold]

  catto plan quickstart

  catto plan mine.yaml --set evaluation.bins=15
"""
RUN_EXAMPLES = """
[bold]Examples[/bold]

  catto run quickstart

  catto run mine.yaml --out runs/mine --set preference.learning_rates=[5e-6] --seed 0 --seed 1
"""

STANDINGS = ("done", "begun", "to do")
SeedOption = Annotated[
    list[int] | None, typer.Option("--seed", min=0, max=MOST_SEED, help="Only these seeds. May stand several times.")
]


def plan(
    recipe: RecipeArgument,
    out: OutOption = None,
    sets: SetOption = None,
    seeds: SeedOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every stage as JSON and nothing else.")] = False,
) -> None:
    """Show which stages a recipe has, which are done, and how long those took."""
    from catto.experiment import runner
    from catto.experiment.graph import Graph

    read = _read(recipe, sets, seeds)
    root = folder(read, out)
    stages = runner.plan(root, [Graph(read).report()])
    if as_json:
        print_json([_described(root, stage, standing) for stage, standing in stages])
        return
    _show_plan(root, stages)
    if _waits_for_all_seeds(read):
        say("lr_choice mean: a learning rate is chosen by its mean over the seeds, so choices wait for every seed.")


def _described(root: Path, stage: Stage, standing: str) -> dict[str, object]:
    from catto.experiment.runner import seconds_of

    told = {"kind": stage.kind, "name": stage.name, "folder": stage.folder, "standing": standing}
    return {**told, "seconds": seconds_of(root, stage)}


def _read(recipe: str, sets: list[str] | None, seeds: list[int] | None) -> Recipe:
    if seeds and len(set(seeds)) < len(seeds):
        refuse(f"--seed: one stands twice in {', '.join(map(str, seeds))}")
    return opened(recipe, [*(sets or ()), *([f"seeds={list(seeds)}"] if seeds else [])])


def _waits_for_all_seeds(recipe: Recipe) -> bool:
    from catto.experiment.graph import Graph
    from catto.methods import METHODS

    graph = Graph(recipe)
    several = [name for name in recipe.methods if name in METHODS and len(graph.rates(name)) > 1]
    return recipe.lr_choice == "mean" and len(recipe.seeds) > 1 and bool(several)


def _show_plan(root: Path, stages: list[tuple[Stage, str]]) -> None:
    """Print one line a kind of stage, trainings by method, and the sums."""
    from catto.cli.display import duration
    from catto.experiment.runner import seconds_of

    made = table(str(root), "stages", *STANDINGS, "time of the done ones")
    groups: dict[str, list[tuple[Stage, str]]] = {}
    for stage, standing in stages:
        groups.setdefault(_group(stage), []).append((stage, standing))
    for name, members in [*groups.items(), ("all", stages)]:
        counts = [sum(standing == one for _, standing in members) for one in STANDINGS]
        seconds = sum(seconds_of(root, stage) or 0.0 for stage, _ in members)
        if name == "all":
            made.add_section()
        made.add_row(name, *map(str, counts), duration(seconds) if counts[0] else "-")
    print_table(made)


def _group(stage: Stage) -> str:
    return f"train {stage.settings['method']}" if stage.kind == "train" else stage.kind.replace("_", " ")


def run(
    recipe: RecipeArgument,
    out: OutOption = None,
    sets: SetOption = None,
    seeds: SeedOption = None,
    retry_refused: RetryOption = False,
    repair: RepairOption = False,
) -> None:
    """Run what is missing of a recipe and report it; a run that was stopped or killed goes on from where it was."""
    from catto.experiment.graph import Graph
    from catto.experiment.stages import place

    read = _read(recipe, sets, seeds)
    root, goal = folder(read, out), Graph(read).report()
    go(recipe, read, root, [goal], retry_refused, repair)
    _show_results(place(root, goal))
    page = _published(place(root, goal) / "report.html", root)
    if page is not None:
        say(f"Report: {page}")


def _published(page: Path, root: Path) -> Path | None:
    """Put the page, which is one file, where a person looks first."""
    from catto.files import replacing

    if not page.exists():
        return None
    with replacing(root / page.name) as file:
        file.write(page.read_text(encoding="utf-8"))
    return root / page.name


def _show_results(report: Path) -> None:
    """Print the score tables from the numbers of the report."""
    from catto.report import numbers as store
    from catto.report.render import terminal
    from catto.report.tables import score_tables

    numbers = store.read(report / "numbers.json")
    if numbers is not None:  # None: they were deleted, the page still stands
        for made in (*score_tables(numbers, "in"), *score_tables(numbers, "out")):
            print_table(terminal(made))
