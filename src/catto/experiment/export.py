"""Write the missing stages of a plan for another scheduler: a Makefile, or job arrays for Slurm.

Both call `catto stage`, which decides by itself whether a stage is done and refuses one whose needs are not. So a
failed stage stops only what depends on it, and everything may be started again.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from catto.experiment.stages import Stage

# Slurm's default limit of an array's size.
MOST = 1000


def makefile(root: Path, stages: Sequence[Stage]) -> dict[str, str]:
    """Return the Makefile: one target a stage, by the name of its folder. stages: what is needed comes first."""
    missing = {stage.key: stage.folder for stage in stages}
    rules = [f"all: {' '.join(missing.values())}".rstrip()]
    command = _command(root, "$(CATTO)").replace("$", "$$").replace("$$(CATTO)", "$(CATTO)")
    for stage in stages:
        needs = [missing[need.key] for need in stage.needs.values() if need.key in missing]
        rules.append(f"{stage.folder}: {' '.join(dict.fromkeys(needs))}".rstrip() + f"\n\t{command} {stage.key}")
    head = "# make -j 2 -k -f THIS: two stages at a time; a failed one stops only what depends on it.\nCATTO ?= catto"
    return {"Makefile": "\n\n".join([head, f".PHONY: all {' '.join(missing.values())}".rstrip(), *rules]) + "\n"}


def slurm(root: Path, stages: Sequence[Stage]) -> dict[str, str]:
    """Return `submit.sh` and one script for each array: the stages of one kind at one depth of the graph.

    An array starts when those with its needs have ended, whatever became of each task: a stage without its needs fails
    by itself.
    """
    depth: dict[str, int] = {}
    arrays: dict[tuple[int, str], list[Stage]] = defaultdict(list)
    for stage in stages:
        depth[stage.key] = max((depth[need.key] + 1 for need in stage.needs.values() if need.key in depth), default=0)
        arrays[depth[stage.key], stage.kind].append(stage)
    pieces = [
        members[i : i + MOST]
        for _, members in sorted(arrays.items(), key=lambda a: a[0])
        for i in range(0, len(members), MOST)
    ]
    number = {stage.key: place for place, members in enumerate(pieces) for stage in members}
    scripts, submit = (
        {},
        ["#!/usr/bin/env bash", "# Submit every job array after those that it needs.", "set -euo pipefail"],
    )
    submit += ['cd "$(dirname "$0")"', "mkdir -p logs", "submit() { sbatch --parsable \"$@\" | cut -d ';' -f 1; }"]
    for place, members in enumerate(pieces):
        name = f"{place:02d}-{members[0].kind}.sh"
        needs = sorted({number[need.key] for stage in members for need in stage.needs.values() if need.key in number})
        after = f"--dependency=afterany:{':'.join(f'$job{need}' for need in needs)} " if needs else ""
        submit.append(f"job{place}=$(submit {after}{name})")
        scripts[f"slurm/{name}"] = "\n".join(
            [
                "#!/usr/bin/env bash",
                f"#SBATCH --job-name=catto-{members[0].kind}",
                f"#SBATCH --array=0-{len(members) - 1}",
                "#SBATCH --output=logs/%x-%A-%a.txt",
                "#SBATCH --requeue",
                "set -euo pipefail",
                "keys=(",
                *(f"  {stage.key}  # {stage.name}" for stage in members),
                ")",
                f'{_command(root, "${CATTO:-catto}")} "${{keys[$SLURM_ARRAY_TASK_ID]}}"',
                "",
            ]
        )
    return {"slurm/submit.sh": "\n".join([*submit, ""]), **scripts}


def _command(root: Path, catto: str) -> str:
    """Return the shell command up to the key, run where the plan was made: paths in a recipe may be relative."""
    return f"cd {shlex.quote(str(Path.cwd()))} && {catto} stage {shlex.quote(str(root.resolve()))}"


EXPORTS = {"make": makefile, "slurm": slurm}
