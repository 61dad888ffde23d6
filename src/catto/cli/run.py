"""`catto run`, `stage`, `verify` and `recipe`, and the parts shared by all commands that take a recipe."""

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
from typing import Annotated, Literal, NamedTuple

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

# Runs stages on other machines. Takes the experiment's folder, the recipe, the stages to finish and the display.
Execute = Callable[[Path, Recipe, Sequence[Stage], RunDisplay], runner.Outcome]


def list_recipes() -> dict[str, Path]:
    """Return the shipped recipes by name. The shell completes these names, or files if no name matches."""
    from catto.recipe.load import find_shipped_recipes

    return find_shipped_recipes()


RecipeArgument = Annotated[
    str, Argument(help="A YAML file, or the name of a shipped recipe.", autocompletion=list_recipes)
]
OutOption = Annotated[Path | None, Option(help="Folder of the experiment.", show_default="runs/<name>")]
SetOption = Annotated[
    list[str] | None, Option("--set", help="Override a setting, such as evaluation.bins=15. May be repeated.")
]
SeedsOption = Annotated[list[int] | None, Seed("--seed", help="Seed to use instead of the recipe's. May be repeated.")]
RetryOption = Annotated[
    bool, Option("--retry-refused", help="Send refused requests again, and redo the stages that depend on them.")
]

# Environment variables that turn off the libraries' own progress bars and notices, which would break the display.
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def choose_folder(recipe: Recipe, out: Path | None) -> Path:
    """Return the experiment's folder; refuse one that cannot be written to, before anything runs."""
    root = Path("runs") / recipe.name if out is None else out
    console.require_writable_folder("--out", root)
    return root


def run_missing(
    source: str,
    recipe: Recipe,
    root: Path,
    goals: Sequence[Stage],
    *,
    retry_refused: bool = False,
    repair: bool = False,
    execute: Execute | None = None,
) -> None:
    """Run the missing stages. Exit with code 1 if a stage failed, and with code 130 if the run was interrupted.

    Args:
        source: Name or path of the recipe, for messages.
        recipe: The recipe.
        root: The experiment's folder.
        goals: The stages to finish, together with the stages they need.
        retry_refused: Whether to send refused requests again.
        repair: Whether to run damaged stages again.
        execute: Runs the stages on other machines; None runs them on this one.
    """
    from catto.pipeline.plan import check_places, store_recipe

    refuse_windows()  # on Windows, checking whether another run is alive would end it
    check_places(source, recipe)  # a missing file is found before anything runs
    if repair:
        for stage in runner.set_damaged_aside(root, goals):
            console.warn(f"{stage.name}: damaged, will be run again; the damaged folder is kept and ends in .damaged")
    missing = [stage for stage in list_needed(list(goals)) if not is_done(root, stage)]
    _require_packages(source, recipe, missing)
    with show_run() as shown:
        if execute is None:  # other machines may have different devices and libraries
            _rehearse(source, missing)
        store_recipe(root, recipe)  # so that `catto stage` can find the stages by their keys
        display = RunDisplay(shown, root, goals)
        if retry_refused:
            runner.forget_refused(root, goals)
        if execute is None:
            outcome = runner.run_goals(root, goals, display)
        else:
            outcome = execute(root, recipe, goals, display)
    _report_problems(root, goals, outcome)
    if outcome.failed:
        sys.exit(1)


def _rehearse(source: str, missing: Sequence[Stage]) -> None:
    """Try the settings of the missing training stages on toy models, before a teacher is paid."""
    trainings = [stage for stage in missing if stage.kind == "train"]
    if not trainings:
        return
    with console.refuse_errors(ImportError):  # the import fails for an unsupported version of TRL
        from catto.pipeline.rehearsal import rehearse_trainings

    rehearse_trainings(source, trainings)


def _require_packages(source: str, recipe: Recipe, missing: Sequence[Stage]) -> None:
    """Refuse to run without a package that a later stage needs, before a teacher is paid."""
    kinds = {stage.kind for stage in missing}
    if "train" in kinds:
        console.require_package("torch", "train", "training")
    if recipe.evaluation.engine == "vllm" and kinds & {"generated", "sampled"}:
        console.require_package("vllm", "vllm", f"{source}: evaluation.engine vllm")


def _report_problems(root: Path, goals: Sequence[Stage], outcome: runner.Outcome) -> None:
    """Print the number of refused requests, the failed stages, and how many stages they blocked."""
    for stage, refused in runner.refused_stages(root, goals):
        console.warn(f"{stage.name}: {len(refused)} requests were refused and are left out; --retry-refused asks again")
    for problem, log in outcome.failed.items():
        console.warn(f"{problem}; its log: {log}")
    if outcome.blocked:
        console.warn(f"stages not run because they need a failed stage: {len(outcome.blocked)}")


def refuse_windows() -> None:
    """Refuse Windows, where checking whether a process is alive would end it."""
    if platform.system() == "Windows":
        console.refuse("experiments run on Linux and macOS; on Windows, use WSL")


@contextmanager
def show_run() -> Iterator[Progress]:
    """Yield the progress bars of a run, without those of libraries; exit with code 130 if it is interrupted."""
    silence_libraries()
    try:
        with show_bars() as shown:
            yield shown
    except KeyboardInterrupt:
        console.warn("interrupted; the same command resumes from here")
        sys.exit(130)


def silence_libraries() -> None:
    """Turn off the progress bars and notices of libraries, except for variables that the user has set."""
    os.environ.update(QUIET | os.environ)


# ---- run ------------------------------------------------------------------------------------------------------------


def read_recipe(recipe: str, sets: list[str] | None, seeds: list[int] | None) -> Recipe:
    """Read a recipe and override its settings with the values of --set and --seed."""
    from catto.pipeline.plan import open_recipe

    overrides = list(sets or ())
    if seeds:
        if len(set(seeds)) < len(seeds):
            console.refuse(f"--seed: {', '.join(map(str, seeds))} names a seed twice")
        overrides.append(f"seeds={list(seeds)}")
    return open_recipe(recipe, overrides)


def run(
    recipe: RecipeArgument,
    out: OutOption = None,
    sets: SetOption = None,
    seeds: SeedsOption = None,
    retry_refused: RetryOption = False,
    repair: Annotated[
        bool, Option("--repair", help="Run damaged stages again. Their old folders are renamed and kept.")
    ] = False,
    on: Annotated[
        Literal["here", "ray"], Option(help="Run one stage after another on this machine, or use a Ray cluster.")
    ] = "here",
    address: Annotated[
        str | None,
        Option(
            help="Address of the Ray cluster: auto, HOST:PORT or ray://...",
            show_default="a new cluster on this machine",
        ),
    ] = None,
) -> None:
    """Run the missing stages of a recipe and write its report.

    To resume a run that was interrupted or killed, run the same command again.

    Examples:
    catto run quickstart
    catto run mine.yaml --out runs/mine --set preference.learning_rates=[5e-6] --seed 0 --seed 1
    catto run mine.yaml --on ray --address auto
    """
    from catto.pipeline.plan import Graph

    opened = read_recipe(recipe, sets, seeds)
    if address is not None and on != "ray":
        console.refuse("--address: needs --on ray")
    root = choose_folder(opened, out)
    report_stage = Graph(opened).plan_report()
    execute: Execute | None = None
    if on == "ray":
        console.require_package("ray", "ray", "--on ray")
        from catto.pipeline import ray as ray_runner

        execute = partial(ray_runner.run_on_ray, address=address)
    run_missing(recipe, opened, root, [report_stage], retry_refused=retry_refused, repair=repair, execute=execute)
    report_folder = stage_dir(root, report_stage)
    _print_report(report_folder)
    # The page is a single file. It is copied to the experiment's folder, where it is easy to find.
    page = root / "report.html"
    write_text(page, _page_for_experiment(report_folder))
    console.say(f"Report: {page}")


def _print_report(report_folder: Path) -> None:
    """Print the headline and the summary of a report, unless another version of catto wrote it."""
    from catto.report import render, tables
    from catto.report.headline import write_headline
    from catto.report.numbers import read_numbers

    numbers = read_numbers(report_folder / "numbers.json")
    if numbers is None:
        return
    headline = write_headline(numbers)
    for line in (headline.answer, *headline.warnings):
        console.say(line)
    console.print_table(render.render_terminal(tables.build_summary(numbers)))


def _page_for_experiment(report_folder: Path) -> str:
    """Return the page of a report with its links changed to work in the experiment's folder."""
    from catto.report.page import relocate_page

    text = (report_folder / "report.html").read_text(encoding="utf-8")
    return relocate_page(text, f"stages/{report_folder.name}")


# ---- one stage ------------------------------------------------------------------------------------------------------


def stage(
    folder: Annotated[Path, Argument(metavar="RUN", help="Folder of the experiment, which contains its recipe.")],
    key: Annotated[
        str, Argument(help="Key of the stage, as in `catto plan --json`, or its start, or the name of its folder.")
    ],
    recipe: Annotated[
        str,
        Option(metavar="HASH", help="Recipe in RUN/recipes, if there are several.", show_default="the last one used"),
    ] = "",
) -> None:
    """Run one stage of an experiment, on behalf of a scheduler such as Slurm or make.

    `catto plan --export` stores the recipe in the experiment's folder and writes these commands in the right order. A
    finished stage is not run again.

    Examples:
    catto stage runs/quickstart 5f2c81d09ab34e67
    """
    from catto.pipeline.plan import find_stage

    refuse_windows()  # on Windows, checking whether another run is alive would end it
    wanted = find_stage(folder, key, recipe)
    # Another machine may have finished the needed stages a moment ago. A network file system shows this with a delay.
    missing = runner.wait_for_stages(folder, wanted.needs.values(), wanted.name)
    if missing:
        console.refuse(f"{wanted.name} needs unfinished stages: {join_names(missing)}")
    if is_done(folder, wanted):
        console.say(f"{wanted.name}: already done")
        return
    if wanted.kind == "train":
        console.require_package("torch", "train", "training")
    with show_run() as shown:
        ending = runner.run_stage(
            folder,
            wanted,
            progress=Bar(shown, wanted.name).update,
            verified_folders=set(),  # none: this process has not read the files of any stage yet
        )
    if ending.outcome == "failed":
        console.warn(f"{wanted.name}: {ending.problem}; its log: {ending.log}")
        sys.exit(1)
    console.say(f"{wanted.name}: {ending.outcome}")


# ---- verify ---------------------------------------------------------------------------------------------------------


class StageChecks(NamedTuple):
    """The result of checking finished stages.

    Attributes:
        problems: One line for each damaged stage.
        sizes: The size in bytes of each file in the intact stages.
    """

    problems: list[str]
    sizes: list[int]


def verify(folder: Annotated[Path, Argument(help="Folder of an experiment, such as runs/quickstart.")]) -> None:
    """Check the files of all finished stages for damage.

    Each file is compared with the size and SHA-256 that were recorded when it was written. Folders that belong to a
    different stage, files that no stage wrote, and changes to report.html or to a stored recipe are reported too.

    The exit code is 1 if something is damaged. `catto run --repair` runs damaged stages again.

    Examples:
    catto verify runs/quickstart
    catto run quickstart --repair
    """
    if not (folder / "stages").is_dir():
        console.refuse(f"{folder}: not an experiment's folder: it contains no stages/")
    stages = list_finished(folder)
    checks = _check_stages(stages)
    problems = [*checks.problems, *_find_damage_outside_stages(folder)]
    for problem in problems:
        console.say(problem)
    intact = len(stages) - len(checks.problems)
    megabytes = sum(checks.sizes) / 1e6
    console.say(
        f"{intact} of {len(stages)} finished stages are intact: {len(checks.sizes):,} files, {megabytes:,.1f} MB."
    )
    if problems:
        sys.exit(1)


def _check_stages(stages: Sequence[Path]) -> StageChecks:
    """Check the contents of finished stages, with a progress bar."""
    checks = StageChecks(problems=[], sizes=[])
    with show_progress("verifying", len(stages)) as step:
        for stage in stages:
            try:
                check_stage(stage, contents=True)
            except DataError as error:
                checks.problems.append(str(error))
            else:
                for size, _ in read_done(stage)["files"].values():
                    checks.sizes.append(size)
            step()
    return checks


def _find_damage_outside_stages(folder: Path) -> list[str]:
    """Return the problems of the stored recipes and of the report's page in the experiment's folder."""
    from catto.pipeline.plan import read_stored_recipe

    problems = []
    for path in sorted((folder / "recipes").glob("*.json")):
        try:
            read_stored_recipe(path)
        except DataError as error:
            problems.append(str(error))
    # The page is a copy of any report in stages/: recipes that share the folder have different reports.
    copied_page = folder / "report.html"
    original_pages = sorted((folder / "stages").glob("report-*/report.html"))
    if copied_page.is_file() and original_pages:
        text = copied_page.read_text(encoding="utf-8", errors="replace")
        expected_texts = [_page_for_experiment(page.parent) for page in original_pages]
        if text not in expected_texts:
            problems.append(
                f"{copied_page}: damaged: differs from every report in stages/; `catto run` copies it again"
            )
    return problems


# ---- recipe ---------------------------------------------------------------------------------------------------------


app = typer.Typer(no_args_is_help=True, help="List, show and copy the shipped recipes.")
NameArgument = Annotated[
    str, Argument(help="Name of a shipped recipe, as in `catto recipe list`.", autocompletion=list_recipes)
]
PathArgument = Annotated[Path | None, Argument(help="File or folder to copy it to.", show_default="NAME.yaml")]


def _find_shipped(name: str) -> Path:
    console.check_name("recipe", name, list_recipes())
    return list_recipes()[name]


@app.command("list")
def names() -> None:
    """List the shipped recipes, each with a short description.

    Examples:
    catto recipe list
    """
    for name, path in list_recipes().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        comment_lines = takewhile(lambda line: line.startswith("#"), lines)
        comment = " ".join(line.removeprefix("#").strip() for line in comment_lines)
        first_sentence = comment.partition(". ")[0].rstrip(".")
        console.say(f"{name:12s} {first_sentence}")


@app.command()
def show(name: NameArgument) -> None:
    """Print a shipped recipe.

    Examples:
    catto recipe show quickstart
    """
    console.say(_find_shipped(name).read_text(encoding="utf-8").rstrip("\n"))


@app.command()
def copy(name: NameArgument, path: PathArgument = None) -> None:
    """Copy a shipped recipe to a new file, where you can edit it.

    Examples:
    catto recipe copy quickstart mine.yaml
    """
    source = _find_shipped(name)
    target = path or Path(f"{name}.yaml")
    if target.is_dir():
        target /= source.name
    if target.exists():
        console.refuse(f"{target}: already exists")
    shutil.copyfile(source, target)
    console.say(f"Wrote {target}. Next: catto run {quote(str(target))}")
