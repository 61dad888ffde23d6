"""Write the missing stages of a plan for another scheduler: a Makefile, or job arrays for Slurm.

Both call `catto stage`, which decides by itself whether a stage is done and refuses one whose needs are not. So a
failed stage stops only what depends on it, and everything may be started again.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from catto.pipeline.estimate import stage_resources
from catto.pipeline.plan import stored
from catto.pipeline.stage import Stage
from catto.recipe.settings import Recipe

# Slurm's default limit of an array's size.
MOST = 1000


def makefile(root: Path, recipe: Recipe, stages: Sequence[Stage]) -> dict[str, str]:
    """Return the Makefile: one target a stage, by the name of its folder. stages: what is needed comes first.

    Raises ValueError for a path with a line break, which no Makefile can hold.
    """
    missing, hashed = {stage.key: stage.folder for stage in stages}, stored(root, recipe).stem
    rules = [f"all: {' '.join(missing.values())}".rstrip()]
    command = _command(root, "$(CATTO)").replace("$", "$$").replace("$$(CATTO)", "$(CATTO)")
    if "\n" in command:
        raise ValueError("a Makefile cannot name a folder with a line break in its path: use another")
    for stage in stages:
        needs = [missing[need.key] for need in stage.needs.values() if need.key in missing]
        target = f"{stage.folder}: {' '.join(dict.fromkeys(needs))}".rstrip()
        rules.append(f"{target}\n\t{command} {stage.key} --recipe {hashed}")
    head = "# make -j 2 -k -f THIS: two stages at a time; a failed one stops only what depends on it.\nCATTO ?= catto"
    return {"Makefile": "\n\n".join([head, f".PHONY: all {' '.join(missing.values())}".rstrip(), *rules]) + "\n"}


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


def slurm(root: Path, recipe: Recipe, stages: Sequence[Stage]) -> dict[str, str]:
    """Return `submit.sh` and one script for each array: the stages of one kind at one depth of the graph.

    An array starts when those with its needs have ended, whatever became of each task: a stage without its needs fails
    by itself.
    """
    depth: dict[str, int] = {}
    groups: dict[tuple[int, str], list[Stage]] = defaultdict(list)
    for stage in stages:
        depth[stage.key] = max((depth[need.key] + 1 for need in stage.needs.values() if need.key in depth), default=0)
        groups[depth[stage.key], stage.kind].append(stage)
    arrays = [groups[place][i : i + MOST] for place in sorted(groups) for i in range(0, len(groups[place]), MOST)]
    number = {stage.key: place for place, members in enumerate(arrays) for stage in members}
    scripts, jobs = {}, []
    for place, members in enumerate(arrays):
        kind, asked = members[0].kind, stage_resources(recipe, members[0])
        name = f"{place:02d}-{kind}.sh"
        needs = sorted({number[need.key] for stage in members for need in stage.needs.values() if need.key in number})
        after = f"--dependency=afterany:{':'.join(f'$job{need}' for need in needs)} " if needs else ""
        jobs.append(f"job{place}=$(submit {after}{name})")
        # Slurm has no parts of a processor or a GPU.
        options = [f"#SBATCH --cpus-per-task={ceil(asked.cpus)}"]
        options += [f"#SBATCH --gres=gpu:{ceil(asked.gpus)}"] if asked.gpus else []
        options += [f"#SBATCH --mem={ceil(asked.bytes / 2**20)}M"] if asked.bytes else []
        scripts[f"slurm/{name}"] = ARRAY.format(
            kind=kind,
            last=len(members) - 1,
            resources="\n".join(options),
            keys="\n".join(f"  {stage.key}  # {stage.name}" for stage in members),
            command=_command(root, "${CATTO:-catto}"),
            recipe=stored(root, recipe).stem,
        )
    return {"slurm/submit.sh": SUBMIT.format(jobs="\n".join(jobs)), **scripts}


def _command(root: Path, catto: str) -> str:
    """Return the shell command up to the key, run where the plan was made: paths in a recipe may be relative."""
    return f"cd {shlex.quote(str(Path.cwd()))} && {catto} stage {shlex.quote(str(root.resolve()))}"
