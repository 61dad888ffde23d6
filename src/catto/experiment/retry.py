"""Ask again what a teacher's server refused.

A stage with refused requests becomes one that was begun and refused nothing. Run again it asks for what is missing, and
the stages that were made without it are stale if something new came: they are run again too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from catto.experiment.runner import Display, Outcome, locked, run
from catto.experiment.stages import DONE, Stage, ordered, part, place
from catto.recipe import Recipe
from catto.records import Refusal
from catto.teacher.store import forget_refusals, refusals


def refused_stages(root: Path, goals: Sequence[Stage]) -> list[tuple[Stage, list[Refusal]]]:
    """The stages, finished or begun, some of whose requests were refused."""
    folders = [(stage, place(root, stage)) for stage in ordered(list(goals))]
    found = [(stage, refusals(folder if folder.exists() else part(root, stage))) for stage, folder in folders]
    return [(stage, refused) for stage, refused in found if refused]


def retry(recipe: Recipe, root: Path, goals: Sequence[Stage], display: Display) -> Outcome:
    """Ask refused requests again, then run what is missing of the goals."""
    with locked(root):
        for stage, _ in refused_stages(root, goals):
            finished, begun = place(root, stage), part(root, stage)
            if finished.exists():
                finished.rename(begun)
                (begun / DONE).unlink()
            forget_refusals(begun)
    return run(recipe, root, goals, display)
