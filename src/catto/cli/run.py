"""`catto run`, `stage`, `verify` and `recipe`; and what every command that takes a recipe shares."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

import typer
from rich.progress import Progress
from typer import Argument, Option

from catto.cli import console
from catto.cli.display import Bar, RunDisplay, show_bars, show_progress
from catto.cli.options import Seed
from catto.errors import DataError, join_names
from catto.io.atomic import write_text
from catto.pipeline import run as runner
from catto.pipeline.stage import Stage, check_stage, is_done, list_finished, list_needed, read_done, stage_dir
from catto.recipe.settings import Recipe


def list_recipes() -> dict[str, Path]:
    """Return the shipped recipes. The shell completes a recipe to their names; where none fits, it offers files."""
    from catto.recipe.load import find_shipped_recipes

    return find_shipped_recipes()


RecipeArgument = Annotated[
    str, Argument(help="A YAML file, or the name of a shipped recipe.", autocompletion=list_recipes)
]
OutOption = Annotated[Path | None, Option(help="The experiment's folder.", show_default="runs/<name>")]
SetOption = Annotated[
    list[str] | None, Option("--set", help="Override a setting: evaluation.bins=15. May be repeated.")
]
SeedsOption = Annotated[list[int] | None, Seed("--seed", help="Only these seeds. May be repeated.")]
RetryOption = Annotated[bool, Option("--retry-refused", help="Ask again what a server refused; redo what needs it.")]

# Progress bars and notices of libraries would break the display.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def choose_folder(recipe: Recipe, out: Path | None) -> Path:
    """Return the experiment's folder; refuse one that cannot be written to before anything runs."""
    root = Path("runs") / recipe.name if out is None else out
    console.writable_folder("--out", root)
    return root


def run_missing(
    source: str,
    recipe: Recipe,
    root: Path,
    goals: Sequence[Stage],
    retry_refused: bool = False,
    repair: bool = False,
    execute: Callable[..., Any] | None = None,
) -> None:
    """Run what is missing; exit with code 1 if a stage failed, with 130 if it was interrupted.

    execute: takes root, recipe, goals and display, and runs the stages elsewhere than here.
    """
    from catto.pipeline.plan import check_places, store_recipe

    refuse_windows()
    check_places(source, recipe)
    for stage in runner.set_damaged_aside(root, goals) if repair else ():
        console.warn(f"{stage.name}: damaged, will be run again; the damaged folder is kept and ends in .damaged")
    missing = [stage for stage in list_needed(list(goals)) if not is_done(root, stage)]
    training = [stage for stage in missing if stage.kind == "train"]
    if training:
        console.require_package("torch", "train", "training")  # known now, before a teacher is paid
    if recipe.evaluation.engine == "vllm" and any(stage.kind in ("generated", "sampled") for stage in missing):
        console.require_package("vllm", "vllm", f"{source}: evaluation.engine vllm")
    with show_run() as shown:
        if training and execute is None:  # elsewhere are other devices and libraries
            with console.refuse_errors(ImportError):  # such as a version of TRL that is not supported
                from catto.pipeline.rehearsal import rehearse_trainings

            rehearse_trainings(source, training)
        store_recipe(root, recipe)
        display = RunDisplay(shown, root, goals)
        if retry_refused:
            runner.forget_refused(root, goals)
        outcome = execute(root, recipe, goals, display) if execute else runner.run_goals(root, goals, display)
    for stage, refused in runner.refused_stages(root, goals):
        console.warn(f"{stage.name}: {len(refused)} requests were refused and are left out; --retry-refused asks again")
    for problem, log in outcome.failed.items():
        console.warn(f"{problem}; its log: {log}")
    if outcome.blocked:
        console.warn(f"not run, since they need what failed: {len(outcome.blocked)} stages")
    if outcome.failed:
        sys.exit(1)


def refuse_windows() -> None:
    """Refuse Windows, which cannot tell whether a process is alive without ending it."""
    if platform.system() == "Windows":
        console.refuse("experiments run on Linux and macOS; on Windows, use WSL")


@contextmanager
def show_run() -> Iterator[Progress]:
    """Yield the bars of a run that can be interrupted, with the libraries' own ones switched off."""
    os.environ.update(QUIET | os.environ)
    try:
        with show_bars() as shown:
            yield shown
    except KeyboardInterrupt:
        console.warn("interrupted; the same command resumes from here")
        sys.exit(130)


# ---- run ------------------------------------------------------------------------------------------------------------


def read_recipe(recipe: str, sets: list[str] | None, seeds: list[int] | None) -> Recipe:
    """Read a recipe with what the command line overrides."""
    from catto.pipeline.plan import open_recipe

    if seeds and len(set(seeds)) < len(seeds):
        console.refuse(f"--seed: {', '.join(map(str, seeds))} names a seed twice")
    return open_recipe(recipe, [*(sets or ()), *([f"seeds={list(seeds)}"] if seeds else [])])


def run(
    recipe: RecipeArgument,
    out: OutOption = None,
    sets: SetOption = None,
    seeds: SeedsOption = None,
    retry_refused: RetryOption = False,
    repair: Annotated[bool, Option("--repair", help="Run damaged stages again; keep their folders, renamed.")] = False,
    on: Annotated[Literal["here", "ray"], Option(help="One stage after the other here, or on a Ray cluster.")] = "here",
    address: Annotated[str | None, Option(help="Ray's: auto, HOST:PORT or ray://...; else one starts here.")] = None,
) -> None:
    """Run the missing stages of a recipe and report; a run that was interrupted or killed resumes where it was.

    Examples:
    catto run quickstart
    catto run mine.yaml --out runs/mine --set preference.learning_rates=[5e-6] --seed 0 --seed 1
    catto run mine.yaml --on ray --address auto
    """
    from catto.pipeline.plan import Graph
    from catto.report import numbers as store
    from catto.report import render, tables
    from catto.report.headline import write_headline

    read, execute = read_recipe(recipe, sets, seeds), None
    if address is not None and on != "ray":
        console.refuse("--address: needs --on ray")
    root, goal = choose_folder(read, out), Graph(read).plan_report()
    if on == "ray":
        console.require_package("ray", "ray", "--on ray")
        from catto.pipeline import ray as ray_runner

        execute = partial(ray_runner.run_on_ray, address=address)
    run_missing(recipe, read, root, [goal], retry_refused, repair, execute)
    report, first = stage_dir(root, goal), root / "report.html"
    if (numbers := store.read_numbers(report / "numbers.json")) is not None:  # None: of another version
        headline = write_headline(numbers)
        for line in (headline.answer, *headline.warnings):
            console.say(line)
        console.print_table(render.render_terminal(tables.build_summary(numbers)))
    # The one-file page is copied to where it is found first.
    write_text(first, _page_for_folder(report))
    console.say(f"Report: {first}")


def _page_for_folder(report: Path) -> str:
    """Return the page of a report's stage as it is put into the experiment's folder."""
    from catto.report.page import relocate_page

    text = (report / "report.html").read_text(encoding="utf-8")
    return relocate_page(text, f"stages/{report.name}")


# ---- one stage ------------------------------------------------------------------------------------------------------


def stage(
    folder: Annotated[Path, Argument(metavar="RUN", help="The experiment's folder, with its recipe stored in it.")],
    key: Annotated[str, Argument(help="Its key, as in `catto plan --json`, how that begins, or its folder's name.")],
    recipe: Annotated[str, Option(metavar="HASH", help="Which of several in RUN/recipes; else the last used.")] = "",
) -> None:
    """Run one stage of an experiment, for a scheduler that knows their order: Slurm, make or another.

    `catto plan --export` stores the recipe in the folder and writes these commands. A finished stage is not run again.

    Examples:
    catto stage runs/quickstart 5f2c81d09ab34e67
    """
    from catto.pipeline.plan import find_stage

    refuse_windows()
    wanted = find_stage(folder, key, recipe)
    if missing := runner.wait_for_stages(folder, wanted.needs.values(), wanted.name):
        console.refuse(f"{wanted.name} needs what is not done: {join_names(missing)}")
    if is_done(folder, wanted):
        console.say(f"{wanted.name}: done already")
        return
    if wanted.kind == "train":
        console.require_package("torch", "train", "training")
    with show_run() as shown:
        ending = runner.run_stage(folder, wanted, Bar(shown, wanted.name).update, set())
    if ending.outcome == "failed":
        console.warn(f"{wanted.name}: {ending.problem}; its log: {ending.log}")
        sys.exit(1)
    console.say(f"{wanted.name}: {ending.outcome}")


# ---- verify ---------------------------------------------------------------------------------------------------------


def verify(folder: Annotated[Path, Argument(help="An experiment's folder, such as runs/quickstart.")]) -> None:
    """Compare every file of every finished stage with the size and SHA-256 that were recorded when it was written.

    Also noticed: a folder of another stage, a file that no stage wrote, a changed report.html or stored recipe.
    Exit with code 1 if something is damaged; `catto run --repair` runs damaged stages again.

    Examples:
    catto verify runs/quickstart
    catto run quickstart --repair
    """
    if not (folder / "stages").is_dir():
        console.refuse(f"{folder}: not an experiment's folder, it has no stages/ in it")
    stages = list_finished(folder)
    damaged, sizes = list[str](), list[int]()
    with show_progress("verifying", len(stages)) as step:
        for stage in stages:
            try:
                check_stage(stage, contents=True)
            except DataError as error:
                damaged.append(str(error))
            else:
                sizes += [size for size, _ in read_done(stage)["files"].values()]
            step()
    whole_stages = len(stages) - len(damaged)
    damaged += _damage_outside_stages(folder)
    for line in damaged:
        console.say(line)
    whole = f"{whole_stages} of {len(stages)} finished stages are whole"
    console.say(f"{whole}: {len(sizes):,} files, {sum(sizes) / 1e6:,.1f} MB.")
    if damaged:
        sys.exit(1)


def _damage_outside_stages(folder: Path) -> list[str]:
    """Return what is wrong with the stored recipes and with the copy of the report's page."""
    from catto.pipeline.plan import read_stored_recipe

    problems = []
    for path in sorted((folder / "recipes").glob("*.json")):
        try:
            read_stored_recipe(path)
        except DataError as error:
            problems.append(str(error))
    copied = folder / "report.html"
    reports = sorted((folder / "stages").glob("report-*/report.html"))
    if copied.is_file() and reports:
        text = copied.read_text(encoding="utf-8", errors="replace")
        known = [_page_for_folder(report.parent) for report in reports]
        if text not in known:
            problems.append(f"{copied}: damaged: not the page of a report in stages/; `catto run` copies it again")
    return problems


# ---- recipe ---------------------------------------------------------------------------------------------------------


app = typer.Typer(no_args_is_help=True, help="List, show and copy the shipped recipes.")
NameArgument = Annotated[str, Argument(help="As in `catto recipe list`.", autocompletion=list_recipes)]
PathArgument = Annotated[Path | None, Argument(help="Where to.", show_default="NAME.yaml")]


def _find_shipped(name: str) -> Path:
    console.check_name("recipe", name, list_recipes())
    return list_recipes()[name]


@app.command("list")
def names() -> None:
    """List the shipped recipes, each with the first sentence of its own comment.

    Examples:
    catto recipe list
    """
    for name, path in list_recipes().items():
        lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
        comment = " ".join(line.removeprefix("#").strip() for line in lines)
        console.say(f"{name:12s} {comment.partition('. ')[0].rstrip('.')}")


@app.command()
def show(name: NameArgument) -> None:
    """Print a recipe as it is written.

    Examples:
    catto recipe show quickstart
    """
    console.say(_find_shipped(name).read_text(encoding="utf-8").rstrip("\n"))


@app.command()
def copy(name: NameArgument, path: PathArgument = None) -> None:
    """Copy a recipe to change it; an existing file is not overwritten.

    Examples:
    catto recipe copy quickstart mine.yaml
    """
    source, path = _find_shipped(name), path or Path(f"{name}.yaml")
    if path.is_dir():
        path /= source.name
    if path.exists():
        console.refuse(f"{path}: exists already")
    shutil.copyfile(source, path)
    console.say(f"Wrote {path}: catto run {quote(str(path))}")
