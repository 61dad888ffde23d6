"""`catto verify`: whether the files of an experiment are still what its stages wrote."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from catto.cli.console import refuse, say

__all__ = ["EXAMPLES", "verify"]

EXAMPLES = """
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
