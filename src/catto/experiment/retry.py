"""Ask again what a teacher's server refused, and redo the finished stages that were made without it.

A stage's key does not tell which of its requests were refused. So the finished stages that depend on such a stage are
set aside before it is asked again, and brought back if it gives nothing new.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from catto.engines import Key
from catto.experiment.runner import Display, Outcome, locked, run
from catto.experiment.stages import Stage, done, ordered, place
from catto.recipe import Recipe
from catto.records import Refusal
from catto.teacher.store import forget_refusals, refusals

ASIDE = ".aside"


def refused_stages(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, list[Refusal]]]:
    """The stages, finished or begun, some of whose requests were refused."""
    found = [(stage, refusals(_folder(root, stage))) for stage in ordered(list(goals))]
    return [(stage, refused) for stage, refused in found if refused]


def retry(recipe: Recipe, root: Path, goals: Sequence[Stage], display: Display) -> Outcome:
    """Ask refused requests again, then run what is missing of the goals."""
    before = refused_stages(root, goals)
    stages = [stage for stage, _ in before]
    with locked(root):
        aside = [folder for stage in stages for folder in _reopen(root, stage)]
    outcome = run(recipe, root, stages, display)
    if not outcome.ok:
        return outcome
    if _keys(refused_stages(root, stages)) == _keys(before):
        with locked(root):
            for folder in aside:
                folder.rename(folder.with_name(folder.name.removesuffix(ASIDE)))
    return run(recipe, root, goals, display)


def _keys(refused: Sequence[tuple[Stage, list[Refusal]]]) -> dict[str, list[Key]]:
    return {stage.key: [refusal.key for refusal in refusals] for stage, refusals in refused}


def _folder(root: Path, stage: Stage) -> Path:
    return place(root, stage) if done(root, stage) else _begun(root, stage)


def _begun(root: Path, stage: Stage) -> Path:
    return place(root, stage).with_name(stage.folder + ".part")


def _reopen(root: Path, stage: Stage) -> list[Path]:
    """Make the stage one that was begun and refused nothing; return where what depends on it was put.

    What depends on it goes first: a kill in between costs its work again, and leaves nothing stale behind.
    """
    aside = []
    if done(root, stage):
        aside = [_set_aside(folder) for folder in _dependent(root, stage.key)]
        place(root, stage).rename(_begun(root, stage))
        (_begun(root, stage) / "done.json").unlink()
    forget_refusals(_begun(root, stage))
    return aside


def _set_aside(folder: Path) -> Path:
    aside = folder.with_name(folder.name + ASIDE)
    if aside.exists():  # of an earlier retry
        shutil.rmtree(aside)
    return folder.rename(aside)


def _dependent(root: Path, key: str) -> list[Path]:
    """The folders of finished stages, of any recipe, that need a stage, directly or not; the farthest first."""
    paths = [path for path in root.glob("stages/*/done.json") if not path.parent.name.endswith(ASIDE)]
    told = {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in sorted(paths)}
    found: list[Path] = []
    keys = [key]
    for known in keys:  # grows while it is read
        new = [folder for folder, one in told.items() if known in one.get("needs", {}).values()]
        found += [folder for folder in new if folder not in found]
        keys += [told[folder]["key"] for folder in new if told[folder]["key"] not in keys]
    return found[::-1]
