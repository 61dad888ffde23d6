"""What the commands that run a recipe share: reading it, running stages under a display, telling what failed.

`catto plan` and `catto run`: the whole experiment of a recipe.

`catto verify`: whether the files of an experiment are still what its stages wrote.

`catto recipe`: the recipes that come with the package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from catto.cli import console as completing
from catto.cli.console import needs, places, refuse, warn, writable_folder

if TYPE_CHECKING:
    from catto.experiment.stages import Stage
    from catto.recipe import Recipe
from typing import TYPE_CHECKING

from catto.cli.console import MOST_SEED, print_json, print_table, say, table

if TYPE_CHECKING:
    from catto.experiment.stages import Stage
    from catto.recipe import Recipe
import shutil
from itertools import takewhile

# ---- experiment


RecipeArgument = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a shipped recipe.", autocompletion=completing.recipes)
]
OutOption = Annotated[Path | None, typer.Option(help="The experiment's folder.", show_default="runs/<name>")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting: evaluation.bins=15. May stand several times.")
]
RepairOption = Annotated[
    bool, typer.Option("--repair", help="Run damaged stages again; the damaged folders are kept beside.")
]
RetryOption = Annotated[
    bool,
    typer.Option("--retry-refused", help="Ask what the teacher's server refused again, and redo what depends on it."),
]

# Progress bars and notices of libraries would tear the display apart.
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def opened(source: str, overrides: Sequence[str] | None) -> Recipe:
    """Read a recipe with its overrides; a task that nobody knows or a seed without splits is told at once."""
    from catto.problems import did_you_mean
    from catto.recipe_file import blamed, load
    from catto.tasks import TASKS
    from catto.tasks.benchmarks import SEEDS

    recipe = load(source, overrides or ())
    for name, block in recipe.tasks.items():
        if name not in TASKS and block.path is None:
            known = ", ".join(TASKS)
            told = blamed(source, overrides or (), ("tasks", name))
            refuse(f"{told}: tasks.{name}: neither one of {known} nor given a path{did_you_mean(name, TASKS)}")
        # The embedded world is made from any seed; other splits are fixed by theirs.
        split_seeds = recipe.seeds if name == "witnesses" else TASKS[name].seeds if block.path is None else SEEDS
        for seed in recipe.seeds:
            if seed not in split_seeds:
                told = blamed(source, overrides or (), ("seeds",))
                refuse(f"{told}: seeds: {seed} is not one of {name}'s split seeds {', '.join(map(str, split_seeds))}")
    return recipe


def folder(recipe: Recipe, out: Path | None) -> Path:
    """Where the experiment lies; a place that cannot be written to is told before anything runs."""
    root = Path("runs") / recipe.name if out is None else out
    writable_folder("--out", root)
    return root


def one_task(recipe: Recipe, task: str | None) -> str:
    """The task that is meant: the one named, that of `train_on`, or the only one."""
    from catto.problems import did_you_mean

    if task is None:
        task = recipe.train_on or next(iter(recipe.tasks))
        if recipe.train_on is None and len(recipe.tasks) > 1:
            refuse(f"--task: the recipe has several, name one of {', '.join(recipe.tasks)}")
    if task not in recipe.tasks:
        refuse(f"--task: {task} is not one of {', '.join(recipe.tasks)}{did_you_mean(task, recipe.tasks)}")
    return task


def go(
    source: str,
    recipe: Recipe,
    root: Path,
    goals: Sequence[Stage],
    retry_refused: bool = False,
    repair: bool = False,
) -> None:
    """Run what is missing; leave with exit code 1 where a stage failed, 130 where a person stopped it."""
    from catto.cli.display import shown
    from catto.experiment.runner import refused_stages, retry, run, set_damaged_aside

    places(source, recipe)
    for stage in set_damaged_aside(root, goals) if repair else ():
        warn(f"{stage.name}: damaged, is run again; the damaged folder ends in .damaged")
    _check_torch(root, goals)
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        with shown(root, goals) as display:
            outcome = retry(root, goals, display) if retry_refused else run(root, goals, display)
    except KeyboardInterrupt:
        warn("stopped; the same command goes on from here")
        sys.exit(130)
    for stage, refused in refused_stages(root, goals):
        warn(f"{stage.name}: {len(refused)} requests were refused and are left out; --retry-refused asks again")
    if outcome.ok:
        return
    for problem, log in outcome.failed.items():
        warn(f"{problem}; its log: {log}")
    if outcome.blocked:
        warn(f"not run, since they need what failed: {len(outcome.blocked)} stages")
    sys.exit(1)


def _check_torch(root: Path, goals: Sequence[Stage]) -> None:
    """Tell at once, and not after the teacher was paid, that something is to be trained and cannot be."""
    from catto.experiment.stages import done, ordered

    trained = [stage.name for stage in ordered(list(goals)) if stage.kind == "train" and not done(root, stage)]
    if trained:
        needs("torch", "train", "training")


# ---- run


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
    return f"train {stage.method}" if stage.kind == "train" else stage.kind.replace("_", " ")


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
    from catto.report.tables import group_tables

    numbers = store.read(report / "numbers.json")
    if numbers is not None:  # None: they were deleted, the page still stands
        for made in group_tables(numbers, "in", "out"):
            print_table(terminal(made))


# ---- verify


VERIFY_EXAMPLES = """
[bold]Examples[/bold]

  catto verify runs/quickstart

  catto run quickstart --repair
"""


def verify(folder: Annotated[Path, typer.Argument(help="An experiment's folder, such as runs/quickstart.")]) -> None:
    """Compare every file of every finished stage with the size and SHA-256 that were recorded when it was written.

    Exit code 1 where a stage is damaged; `catto run --repair` runs such stages again.
    """
    from catto.cli.console import progress
    from catto.experiment.stages import account, check
    from catto.problems import DataError

    if not (folder / "stages").is_dir():
        refuse(f"{folder}: not an experiment's folder, it has no stages/ in it")
    stages = [path for path in sorted((folder / "stages").iterdir()) if path.is_dir() and not _is_unfinished(path)]
    damaged, files, size = [], 0, 0
    with progress("verifying", len(stages)) as step:
        for stage in stages:
            try:
                check(stage, contents=True)
            except DataError as error:
                damaged.append(str(error))
            else:
                recorded = account(stage)["files"].values()
                files, size = files + len(recorded), size + sum(entry[0] for entry in recorded)
            step()
    for line in damaged:
        say(line)
    whole = f"{len(stages) - len(damaged)} of {len(stages)} finished stages are whole"
    say(f"{whole}: {files:,} files, {size / 1e6:,.1f} MB.")
    if damaged:
        sys.exit(1)


def _is_unfinished(path: Path) -> bool:
    """Whether a folder is a stage at work, or one that was moved aside."""
    return path.suffix in (".part", ".damaged")


# ---- recipe


RECIPE_EXAMPLES = """
[bold]Examples[/bold]

  catto recipe list

  catto recipe show quickstart

  catto recipe copy quickstart mine.yaml
"""

app = typer.Typer(no_args_is_help=True, help="List, show and copy the shipped recipes.", epilog=RECIPE_EXAMPLES)

NameArgument = Annotated[
    str,
    typer.Argument(help="The recipe's name, as `catto recipe list` gives it.", autocompletion=completing.recipes),
]


@app.command("list", epilog="[bold]Example[/bold]\n\n  catto recipe list")
def names() -> None:
    """List the shipped recipes, each with the first sentence of its own comment."""
    from catto.recipe_file import shipped

    for name, path in shipped().items():
        say(f"{name:12s} {_about(path)}")


def _about(path: Path) -> str:
    """The first sentence of the comment at the top."""
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines).partition(". ")[0].rstrip(".")


@app.command("show", epilog="[bold]Example[/bold]\n\n  catto recipe show quickstart")
def show(name: NameArgument) -> None:
    """Print a recipe as it is written."""
    say(_shipped(name).read_text(encoding="utf-8").rstrip("\n"))


@app.command("copy", epilog="[bold]Example[/bold]\n\n  catto recipe copy quickstart mine.yaml")
def copy(
    name: NameArgument,
    path: Annotated[Path | None, typer.Argument(help="Where it goes.", show_default="NAME.yaml")] = None,
) -> None:
    """Copy a recipe to change it; a file that is there is left alone."""
    found, path = _shipped(name), path or Path(f"{name}.yaml")
    if path.is_dir():
        path /= found.name
    if path.exists():
        refuse(f"{path}: is there already")
    shutil.copyfile(found, path)
    say(f"Wrote {path}: catto run {path}")


def _shipped(name: str) -> Path:
    from catto.problems import did_you_mean
    from catto.recipe_file import shipped

    known = shipped()
    if name not in known:
        refuse(f"recipe {name}: not one of {', '.join(known)}{did_you_mean(name, known)}")
    return known[name]
