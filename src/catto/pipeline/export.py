"""Write the missing stages of a plan for another scheduler: a Makefile, or job arrays for Slurm.

Both call `catto stage` where the plan was made: paths in a recipe may be relative. It decides by itself whether a stage
is done and refuses one whose needs are not. So a failed stage stops only what depends on it, and everything may be
started again.
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

# Slurm's default limit of an array's size.
MOST_PER_ARRAY = 1000

HEAD = """# make -j 2 -k -f THIS: two stages at a time; a failed one stops only what depends on it.
CATTO ?= catto"""


def format_makefile(root: Path, recipe: Recipe, stages: Sequence[Stage]) -> dict[str, str]:
    """Return the Makefile: one target a stage, by the name of its folder. stages: what is needed comes first.

    Raises ValueError for a path with a line break, which no Makefile can hold.
    """
    folders = {stage.key: stage.folder for stage in stages}
    targets = " ".join(folders.values())
    recipe_hash = recipe_file(root, recipe).stem
    command = _make_command(root)
    if "\n" in command:
        raise ValueError("a Makefile cannot name a folder with a line break in its path: use another")
    parts = [HEAD, f".PHONY: all {targets}".rstrip(), f"all: {targets}".rstrip()]
    for stage in stages:
        needs = dict.fromkeys(folders[need.key] for need in stage.needs.values() if need.key in folders)
        target = f"{stage.folder}: {' '.join(needs)}".rstrip()
        parts.append(f"{target}\n\t{command} {stage.key} --recipe {recipe_hash}")
    return {"Makefile": "\n\n".join(parts) + "\n"}


def _make_command(root: Path) -> str:
    """Return the command of a Makefile's rules, in which a dollar sign of a path is written twice."""
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
    """Return `submit.sh` and one script for each array: the stages of one kind at one depth of the graph.

    An array starts when those with its needs have ended, whatever became of each task: a stage without its needs fails
    by itself.
    """
    arrays = _group_into_arrays(stages)
    array_of = {stage.key: number for number, members in enumerate(arrays) for stage in members}
    scripts: dict[str, str] = {}
    jobs: list[str] = []
    for number, members in enumerate(arrays):
        kind = members[0].kind
        name = f"{number:02d}-{kind}.sh"
        after = _format_dependency(members, array_of)
        jobs.append(f"job{number}=$(submit {after}{name})")
        scripts[f"slurm/{name}"] = ARRAY.format(
            kind=kind,
            last=len(members) - 1,
            resources=_format_resources(stage_resources(recipe, members[0])),
            keys="\n".join(f"  {stage.key}  # {stage.name}" for stage in members),
            command=_slurm_command(root),
            recipe=recipe_file(root, recipe).stem,
        )
    return {"slurm/submit.sh": SUBMIT.format(jobs="\n".join(jobs)), **scripts}


def _group_into_arrays(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Group stages of one kind at one depth of the graph, what is needed first; an array has a limited size."""
    depth: dict[str, int] = {}
    groups: dict[tuple[int, str], list[Stage]] = defaultdict(list)
    for stage in stages:
        depths_of_needs = [depth[need.key] for need in stage.needs.values() if need.key in depth]
        depth[stage.key] = max(depths_of_needs, default=-1) + 1
        groups[depth[stage.key], stage.kind].append(stage)
    arrays: list[list[Stage]] = []
    for key in sorted(groups):
        members = groups[key]
        for start in range(0, len(members), MOST_PER_ARRAY):
            arrays.append(members[start : start + MOST_PER_ARRAY])
    return arrays


def _format_dependency(members: Sequence[Stage], array_of: Mapping[str, int]) -> str:
    """Return the option that makes an array wait for those with its needs."""
    arrays: set[int] = set()
    for stage in members:
        arrays.update(array_of[need.key] for need in stage.needs.values() if need.key in array_of)
    if not arrays:
        return ""
    jobs = ":".join(f"$job{number}" for number in sorted(arrays))
    return f"--dependency=afterany:{jobs} "


def _format_resources(resources: Resources) -> str:
    """Return Slurm's options; it has no parts of a processor or a GPU."""
    options = [f"#SBATCH --cpus-per-task={ceil(resources.cpus)}"]
    if resources.gpus:
        options.append(f"#SBATCH --gres=gpu:{ceil(resources.gpus)}")
    if resources.bytes:
        options.append(f"#SBATCH --mem={ceil(resources.bytes / 2**20)}M")
    return "\n".join(options)


def _slurm_command(root: Path) -> str:
    """Return the shell command up to the key."""
    here = shlex.quote(str(Path.cwd()))
    folder = shlex.quote(str(root.resolve()))
    return f"cd {here} && ${{CATTO:-catto}} stage {folder}"
