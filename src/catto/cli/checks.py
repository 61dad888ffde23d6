"""What can be known to fail before a model, torch or a large file is loaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import typer

from catto.cli.console import refuse, warn

if TYPE_CHECKING:
    from catto.recipe import Recipe

__all__ = ["FEW", "finite", "needs", "places", "server_url", "warn_few", "writable_file", "writable_folder"]

# Below this many answers bootstrap intervals are too narrow, and a fit follows single rows.
FEW = 30
# Seeds go to NumPy and torch, which take 64 bits at most.
MOST_SEED = 2**32 - 1


def finite(value: float | None) -> float | None:
    """Refuse nan and infinity, which pass every range."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def writable_folder(option: str, path: Path) -> None:
    """Refuse a folder that cannot be made or written to."""
    _check_parents(option, path, path)


def writable_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written."""
    if path.is_dir():
        refuse(f"{option}: {path} is a folder, expected a file")
    if path.exists() and not path.is_file():
        refuse(f"{option}: {path} is not a regular file")
    if path.exists() and not os.access(path, os.W_OK):
        refuse(f"{path}: no permission to write, needed for {option}")
    _check_parents(option, path, path.parent)


def _check_parents(option: str, path: Path, folder: Path) -> None:
    """Find the first folder that is there: what is missing below it is made there."""
    place = next(one for one in (folder, *folder.parents, Path()) if one.exists() or one.is_symlink())
    if not place.is_dir():
        refuse(f"{place}: not a folder, needed for {option} {path}")
    if not os.access(place, os.W_OK | os.X_OK):
        refuse(f"{place}: no permission to write, needed for {option} {path}")


def needs(package: str, extra: str, what: str) -> None:
    """Refuse what a package is missing for, and name the extra that brings it."""
    if find_spec(package) is None:
        refuse(f"{what} needs {package}: pip install 'catto[{extra}]'")


def server_url(option: str, url: str) -> None:
    """Refuse what is no address of a server."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        whole = False
    if not whole:
        refuse(f"{option}: expected an address such as http://localhost:8000/v1, got {url!r}")


def places(source: str, recipe: Recipe) -> None:
    """Refuse a recipe whose files, models or server cannot be there, before its first stage runs."""
    from catto.engines.places import check_model, is_hub_id
    from catto.experiment.data import task_of
    from catto.problems import DataError
    from catto.tasks.sources import find
    from catto.tasks.witnesses import generate

    teacher = recipe.teacher
    try:
        for name, block in recipe.tasks.items():
            where = f"tasks.{name}"
            if name == "witnesses" and block.path is None:
                generate("train", 0, seed=0, **block.knobs())
            else:
                find(task_of(name, block.model_dump()), block.files, block.data_dir)
        where = "model.path"
        if recipe.model.path is not None:
            check_model(recipe.model.path)
        where = "teacher.model"
        if teacher.source == "transformers":
            check_model(teacher.model or "")
        where = "teacher.responses"
        responses = teacher.responses or ""
        if teacher.source == "responses" and not Path(responses).exists() and not is_hub_id(responses):
            raise DataError(responses, None, "no such file or folder, and not a hub id, which is owner/name")
    except (DataError, ValueError) as error:
        refuse(f"{source}: {where}: {error}")
    if teacher.source == "server":
        server_url(f"{source}: teacher.base_url", teacher.base_url or "")
    if recipe.evaluation.engine == "vllm":
        needs("vllm", "vllm", f"{source}: evaluation.engine vllm")


def warn_few(rows: int, source: Path, what: str) -> None:
    """Say that numbers of so few answers tell little."""
    if rows < FEW:
        answers = "1 answer" if rows == 1 else f"{rows} answers"
        warn(f"{source}: only {answers}; below {FEW} {what}")
