"""A stage: what it is, what determines it, where its files lie.

The key of a stage is a hash of its kind, its settings and the keys of what it needs, and of nothing else: two recipes
that agree on a stage share it, and a changed knob reruns exactly what depends on it. A stage works in `<folder>.part`,
where a run that was killed goes on, and is renamed to `<folder>` when it is done.

A finished stage records size and hash of its files. So a stage whose needs were made again and came out the same (rows
that another parser reads alike) is not run: `content` finds the finished one, and its files are taken over.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from catto.files import replacing
from catto.recipe import Recipe
from catto.records import content_hash

# Raised when a stage's meaning changes, so that old folders are not taken for new ones.
VERSION = 2
Progress = Callable[[int, int, str], None]
# How a stage went, as against what it made.
DONE, LOG = "done.json", "log.txt"
TOLD = {DONE, LOG, ".lock", "seconds.json"}


@dataclass(frozen=True)
class Stage:
    """One node of the graph."""

    kind: str
    name: str
    settings: Mapping[str, Any]
    needs: Mapping[str, Stage] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Hash of what determines this stage."""
        inputs = {role: stage.key for role, stage in self.needs.items()}
        return content_hash([VERSION, self.kind, dict(self.settings), inputs])

    @property
    def folder(self) -> str:
        """Its folder's name: readable, and unique by the key."""
        readable = re.sub(r"[^A-Za-z0-9.+-]+", "-", self.name).strip("-")
        return f"{readable}-{self.key[:8]}"


@dataclass(frozen=True)
class Work:
    """What a stage's function gets: the stage, the experiment's root, where to write, how to tell progress.

    Of the recipe it reads only what does not determine the result, such as a server's address.
    """

    stage: Stage
    root: Path
    recipe: Recipe
    progress: Progress

    @property
    def settings(self) -> Mapping[str, Any]:
        """The stage's settings."""
        return self.stage.settings

    @property
    def out(self) -> Path:
        """Where the stage writes; what stands here after a kill is gone on from."""
        return part(self.root, self.stage)

    def input(self, role: str) -> Path:
        """The folder of what it needs."""
        return place(self.root, self.stage.needs[role])

    def relative(self, role: str, file: str) -> str:
        """A file of what it needs, as seen from the experiment's root: such paths may be written down."""
        return (self.input(role) / file).relative_to(self.root).as_posix()

    def model(self, role: str = "model") -> Path:
        """The folder of a model: a training's own, or the one that was chosen."""
        return place(self.root, chosen(self.root, self.stage.needs[role])) / "model"

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file beside and rename it."""
        write(self.out / name, value)

    def read(self, role: str, name: str) -> Any:
        """Read a JSON file of what it needs."""
        return read(self.input(role) / name)


def write(path: Path, value: Any) -> None:
    """Write a JSON file beside and rename it."""
    with replacing(path) as file:
        json.dump(value, file, indent=1, sort_keys=True)


def read(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def place(root: Path, stage: Stage) -> Path:
    """The folder of a finished stage."""
    return root / "stages" / stage.folder


def part(root: Path, stage: Stage) -> Path:
    """The folder of a stage while it works."""
    return place(root, stage).with_name(stage.folder + ".part")


def done(root: Path, stage: Stage) -> bool:
    """Whether the stage has finished."""
    return (place(root, stage) / DONE).exists()


def chosen(root: Path, stage: Stage, what: str = "model") -> Stage:
    """The training (or the `validation` predictions) that a finished choice took; any other stage is itself."""
    return stage.needs[read(place(root, stage) / "choice.json")[what]] if stage.kind == "chosen" else stage


def ordered(goals: list[Stage]) -> list[Stage]:
    """The goals and all they need, each once (by key), what is needed first."""
    found: dict[str, Stage] = {}

    def visit(stage: Stage) -> None:
        if stage.key not in found:
            for need in stage.needs.values():
                visit(need)
            found.setdefault(stage.key, stage)

    for goal in goals:
        visit(goal)
    return list(found.values())


# ---- what a stage made --------------------------------------------------------------------------------------------


def finish(root: Path, stage: Stage, told: Mapping[str, Any]) -> None:
    """Record what stands in the stage's working folder and rename it."""
    folder = part(root, stage)
    for left in folder.rglob(".*.part"):  # what a killed run was writing when it was killed
        left.unlink()
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in TOLD]
    files = {path.relative_to(folder).as_posix(): [path.stat().st_size, _digest(path)] for path in sorted(paths)}
    needs = {role: need.key for role, need in stage.needs.items()}
    named = {"name": stage.name, "key": stage.key, "needs": needs, "content": content(root, stage)}
    write(folder / DONE, {**told, **named, "files": files})
    folder.rename(place(root, stage))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content(root: Path, stage: Stage) -> str:
    """Hash what determines a stage whose needs are finished, by what those hold and not by how they came to be."""
    inputs = {role: _made(root, need) for role, need in stage.needs.items()}
    return content_hash([VERSION, stage.kind, stage.name, dict(stage.settings), inputs])


def _made(root: Path, stage: Stage) -> str:
    """Hash what a finished stage holds; a choice holds the model that it took. Manifests tell how files were made."""
    files = read(place(root, chosen(root, stage)) / DONE)["files"]
    return content_hash({name: entry for name, entry in files.items() if not name.endswith(".manifest.json")})


def finished(root: Path) -> dict[str, Path]:
    """Content -> folder of every finished stage, whatever recipe it is of."""
    paths = [path for path in sorted((root / "stages").glob(f"*/{DONE}")) if path.parent.suffix != ".part"]
    return {told["content"]: path.parent for path in paths if "content" in (told := read(path))}


def take_over(root: Path, stage: Stage, twin: Path) -> bool:
    """Make the stage of the files of a finished one with the same content, if they are whole."""
    told = read(twin / DONE)
    folder = part(root, stage)
    shutil.rmtree(folder, ignore_errors=True)
    for name, (size, _) in told["files"].items():
        if not (twin / name).is_file() or (twin / name).stat().st_size != size:
            return False
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(twin / name, folder / name)  # finished files are never written to
        except OSError:  # a file system without links
            shutil.copyfile(twin / name, folder / name)
    finish(root, stage, {name: told[name] for name in ("seconds", "versions")} | {"taken_over": twin.name})
    return True
