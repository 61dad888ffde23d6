"""A stage: what it is, what determines it, where its files lie.

The key of a stage is a hash of its kind, its settings and the keys of what it needs, and of nothing else: two recipes
that agree on a stage share it, and a changed knob reruns exactly what depends on it. A stage works in `<folder>.part`,
where a run that was killed goes on, and is renamed to `<folder>` when it is done.

A finished stage records size and hash of its files in `done.json`, for two reasons. What was damaged since is noticed:
sizes whenever a stage is looked at, bytes before another stage reads them. And a stage depends on what its needs hold,
not on when they were made: needs that were made again and came out the same change nothing, needs that came out
otherwise make it stale, so that it is run again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from catto.files import Seal, damage, read_json, replacing, sealed, sync_folder
from catto.problems import DataError
from catto.recipe import Recipe
from catto.records import content_hash

# Raised when a stage's meaning changes, so that old folders are not taken for new ones.
VERSION = 2
Progress = Callable[[int, int, str], None]
# How a stage went, as against what it made.
DONE, LOG = "done.json", "log.txt"
TOLD = frozenset({DONE, LOG, ".lock", "seconds.json"})
REPAIR = "--repair runs the stage again"


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
        file.write(_json(value))


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


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
    """Whether the stage has finished, and with what its needs hold now. A damaged one raises DataError."""
    folder = place(root, stage)
    if not folder.exists() or not all(path.exists() for need in stage.needs.values() for path in sources(root, need)):
        return False
    check(folder)
    return bool(account(folder)["content"] == content(root, stage))


def chosen(root: Path, stage: Stage, what: str = "model") -> Stage:
    """The training (or the `validation` predictions) that a finished choice took; any other stage is itself."""
    return stage.needs[read(place(root, stage) / "choice.json")[what]] if stage.kind == "chosen" else stage


def sources(root: Path, need: Stage) -> Iterator[Path]:
    """The folders that a stage reads of what it needs: the need's own and, of a finished choice, the chosen model's."""
    yield place(root, need)
    if need.kind == "chosen" and place(root, need).exists():
        yield place(root, chosen(root, need))


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
    """Record what the stage's working folder holds and put it in its place; a stale one there goes away."""
    folder, final = part(root, stage), place(root, stage)
    for left in folder.rglob(".*.part"):  # what a killed run was writing when it was killed
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    needs = {role: need.key for role, need in stage.needs.items()}
    files = {name: list(seal) for name, seal in sealed(folder, TOLD).items()}
    account = {**told, "name": stage.name, "key": stage.key, "needs": needs, "content": content(root, stage)}
    account["files"] = files
    write(folder / DONE, {**account, "checksum": content_hash(account)})
    shutil.rmtree(final, ignore_errors=True)
    folder.rename(final)
    sync_folder(final.parent)


def account(folder: Path) -> dict[str, Any]:
    """Read a finished stage's done.json; one that is missing, unreadable or was changed is a damaged stage."""
    path = folder / DONE
    if not path.is_file():
        raise DataError(folder, None, f"damaged: {DONE} is missing; {REPAIR}")
    stamp = path.stat()
    return _account(path, stamp.st_mtime_ns, stamp.st_ino)


@cache
def _account(path: Path, changed: int, number: int) -> dict[str, Any]:
    """Parse and check a done.json once: every stage that needs this one looks at it."""
    try:
        told = dict(read_json(path))
        whole = _json(told) == path.read_text(encoding="utf-8") and told.pop("checksum") == content_hash(told)
    except (DataError, KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise DataError(path, None, f"damaged: not what was written; {REPAIR}")
    return told


def check(folder: Path, *, contents: bool = False) -> None:
    """Raise DataError where a file of a finished stage is missing or has another size; `contents`: or other bytes."""
    problem = damage(folder, seals(account(folder)), contents=contents)
    if problem is not None:
        raise DataError(folder, None, f"damaged: {problem}; {REPAIR}")


def seals(account: Mapping[str, Any]) -> dict[str, Seal]:
    """The seals of a stage's files, by name."""
    return {name: Seal(*entry) for name, entry in account["files"].items()}


def content(root: Path, stage: Stage) -> str:
    """Hash what determines a stage whose needs are finished, by what those hold and not by how they came to be."""
    inputs = {role: _made(root, need) for role, need in stage.needs.items()}
    return content_hash([VERSION, stage.kind, stage.name, dict(stage.settings), inputs])


def _made(root: Path, stage: Stage) -> str:
    """Hash what a finished stage holds; a choice holds the model that it took. Manifests tell how files were made."""
    files = account(place(root, chosen(root, stage)))["files"]
    return content_hash({name: entry for name, entry in files.items() if not name.endswith(".manifest.json")})


def finished(root: Path) -> dict[str, Path]:
    """Content -> folder of every finished stage, whatever recipe it is of."""
    folders = [path.parent for path in sorted((root / "stages").glob(f"*/{DONE}")) if path.parent.suffix != ".part"]
    return {account(folder)["content"]: folder for folder in folders}


def take_over(root: Path, stage: Stage, twin: Path) -> bool:
    """Make the stage of the files of a finished one with the same content, if they are whole."""
    told, folder = account(twin), part(root, stage)
    if damage(twin, seals(told), contents=True) is not None:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in told["files"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(twin / name, folder / name)  # finished files are never written to
        except OSError:  # a file system without links
            shutil.copyfile(twin / name, folder / name)
    finish(root, stage, {name: told[name] for name in ("seconds", "versions")} | {"taken_over": twin.name})
    return True
