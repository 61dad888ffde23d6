"""A stage: what it is, what determines it, where its files lie.

The key of a stage is a hash of its kind, its settings and the keys of what it needs, and of nothing else: two recipes
that agree on a stage share it, and a changed knob reruns exactly what depends on it. A stage works in `<folder>.part`,
where a run that was killed goes on, and is renamed to `<folder>` when it is done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from catto.recipe import Recipe
from catto.records import content_hash, replacing

# Raised when a stage's meaning changes, so that old folders are not taken for new ones.
VERSION = 1
Progress = Callable[[int, int, str], None]


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
        return place(self.root, self.stage).with_name(self.stage.folder + ".part")

    def input(self, role: str) -> Path:
        """The folder of what it needs."""
        return place(self.root, self.stage.needs[role])

    def relative(self, role: str, file: str) -> str:
        """A file of what it needs, as seen from the experiment's root: such paths may be written down."""
        return (self.input(role) / file).relative_to(self.root).as_posix()

    def model(self, role: str = "model") -> Path:
        """The folder of a model: a training's own, or the one that was chosen."""
        if self.stage.needs[role].kind == "chosen":
            return self.root / str(self.read(role, "choice.json")["model"])
        return self.input(role) / "model"

    def write(self, name: str, value: Any) -> None:
        """Write a JSON file beside and rename it."""
        with replacing(self.out / name) as file:
            json.dump(value, file, indent=1, sort_keys=True)

    def read(self, role: str, name: str) -> Any:
        """Read a JSON file of what it needs."""
        return json.loads((self.input(role) / name).read_text(encoding="utf-8"))


def place(root: Path, stage: Stage) -> Path:
    """The folder of a finished stage."""
    return root / "stages" / stage.folder


def done(root: Path, stage: Stage) -> bool:
    """Whether the stage has finished."""
    return (place(root, stage) / "done.json").exists()


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
