"""One process of several trainings, one after the other: what `catto.pipeline.launch` is for a single one."""

from __future__ import annotations

import sys

from catto.pipeline import launch

for file in sys.argv[1:]:
    launch.run_process(file)
