"""Write the missing stages of a plan for an external scheduler: as a Makefile, or as job arrays for Slurm.

Both call `catto stage` in the folder where the plan was made, since paths in a recipe may be relative. `catto stage`
skips a stage that is done and refuses a stage whose needs are not done. So a failed stage stops only what depends on
it, and everything can be started again.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from catto.pipeline.estimate import stage_resources
from catto.pipeline.plan import recipe_file
from catto.pipeline.stage import Stage
from catto.recipe.settings import Recipe, Resources

# Slurm's default limit for the size of an array.
MAX_ARRAY_SIZE = 1000

HEAD = """# make -j 2 -k -f THIS: two stages at a time; a failed one stops only what depends on it.
CATTO ?= catto"""


def format_makefile(root: Path, recipe: Recipe, stages: Sequence[Stage]) -> dict[str, str]:
    """Write a Makefile with one target per stage, named like the stage's folder.

    Args:
        root: The experiment's folder.
        recipe: The recipe.
        stages: The missing stages, each after the stages it needs.

    Returns:
        The text of the Makefile, by its name.

    Raises:
        ValueError: A path contains a line break, which a Makefile cannot represent.
    """
    folders = {stage.key: stage.folder for stage in stages}
    targets = " ".join(folders.values())
    recipe_hash = recipe_file(root, recipe).stem  # `catto stage` finds a stage in the stored recipe with this hash
    command = _make_command(root)
    if "\n" in command:
        raise ValueError("a Makefile cannot name a folder with a line break in its path: use a different folder")
    parts = [HEAD, f".PHONY: all {targets}".rstrip(), f"all: {targets}".rstrip()]
    for stage in stages:
        # Needs that are done have no target. The dictionary drops duplicates and keeps the order.
        needed_targets = dict.fromkeys(folders[need.key] for need in stage.needs.values() if need.key in folders)
        rule_head = f"{stage.folder}: {' '.join(needed_targets)}".rstrip()
        parts.append(f"{rule_head}\n\t{command} {stage.key} --recipe {recipe_hash}")
    return {"Makefile": "\n\n".join(parts) + "\n"}


def _make_command(root: Path) -> str:
    """Return the command of a Makefile's rules. Make needs a dollar sign in a path to be doubled."""
    here = shlex.quote(str(Path.cwd())).replace("$", "$$")
    folder = shlex.quote(str(root.resolve())).replace("$", "$$")
    return f"cd {here} && $(CATTO) stage {folder}"


SUBMIT = """#!/usr/bin/env bash
# Submit every job array after those that it needs.
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p logs
submit() {{ sbatch --parsable "$@" | cut -d ';' -f 1; }}
{jobs}
"""
ARRAY = """#!/usr/bin/env bash
#SBATCH --job-name=catto-{kind}
#SBATCH --array=0-{last}
#SBATCH --output=logs/%x-%A-%a.txt
#SBATCH --requeue
{resources}
set -euo pipefail
keys=(
{keys}
)
{command} "${{keys[$SLURM_ARRAY_TASK_ID]}}" --recipe {recipe}
"""


def format_slurm_scripts(root: Path, recipe: Recipe, stages: Sequence[Stage]) -> dict[str, str]:
    """Write `submit.sh`, which submits all job arrays, and one script for each array.

    An array consists of stages of one kind at one depth of the graph. It starts when the arrays of the stages that it
    needs have ended, even if some of their tasks failed: `catto stage` refuses a stage whose needs are not done.

    Args:
        root: The experiment's folder.
        recipe: The recipe.
        stages: The missing stages, each after the stages it needs.

    Returns:
        The texts of the files, by their names.
    """
    arrays = _group_into_arrays(stages)
    array_of: dict[str, int] = {}  # the number of the array with a stage, by the stage's key
    for number, members in enumerate(arrays):
        for stage in members:
            array_of[stage.key] = number
    scripts: dict[str, str] = {}
    jobs: list[str] = []
    for number, members in enumerate(arrays):
        kind = members[0].kind
        name = f"{number:02d}-{kind}.sh"
        dependency_option = _format_dependency(members, array_of)
        # `submit` is a shell function that SUBMIT defines; it prints the id of the job.
        jobs.append(f"job{number}=$(submit {dependency_option}{name})")
        scripts[f"slurm/{name}"] = ARRAY.format(
            kind=kind,
            last=len(members) - 1,
            resources=_format_resources(stage_resources(recipe, members[0])),  # the same for all stages of a kind
            keys="\n".join(f"  {stage.key}  # {stage.name}" for stage in members),
            command=_slurm_command(root),
            recipe=recipe_file(root, recipe).stem,  # its hash, by which `catto stage` finds the stored recipe
        )
    return {"slurm/submit.sh": SUBMIT.format(jobs="\n".join(jobs)), **scripts}


def _group_into_arrays(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Group the stages of one kind at one depth of the graph into arrays of limited size, in the order of depth.

    A stage that needs no missing stage has depth 0. Any other is one deeper than the deepest missing stage it needs.
    """
    depth: dict[str, int] = {}
    groups: dict[tuple[int, str], list[Stage]] = defaultdict(list)
    for stage in stages:
        depths_of_needs = [depth[need.key] for need in stage.needs.values() if need.key in depth]
        depth[stage.key] = max(depths_of_needs, default=-1) + 1
        groups[depth[stage.key], stage.kind].append(stage)
    arrays: list[list[Stage]] = []
    for key in sorted(groups):
        members = groups[key]
        for start in range(0, len(members), MAX_ARRAY_SIZE):
            arrays.append(members[start : start + MAX_ARRAY_SIZE])
    return arrays


def _format_dependency(members: Sequence[Stage], array_of: Mapping[str, int]) -> str:
    """Return the option that makes an array wait for the arrays with its needs; empty if there are none."""
    arrays: set[int] = set()
    for stage in members:
        arrays.update(array_of[need.key] for need in stage.needs.values() if need.key in array_of)
    if not arrays:
        return ""
    jobs = ":".join(f"$job{number}" for number in sorted(arrays))
    return f"--dependency=afterany:{jobs} "


def _format_resources(resources: Resources) -> str:
    """Return Slurm's options. Fractions are rounded up: Slurm does not divide a processor or a GPU."""
    options = [f"#SBATCH --cpus-per-task={ceil(resources.cpus)}"]
    if resources.gpus:
        options.append(f"#SBATCH --gres=gpu:{ceil(resources.gpus)}")
    if resources.bytes:
        options.append(f"#SBATCH --mem={ceil(resources.bytes / 2**20)}M")
    return "\n".join(options)


def _slurm_command(root: Path) -> str:
    """Return the command of a Slurm script, up to the key of the stage."""
    here = shlex.quote(str(Path.cwd()))
    folder = shlex.quote(str(root.resolve()))
    return f"cd {here} && ${{CATTO:-catto}} stage {folder}"
