"""The one table of tasks."""

from __future__ import annotations

from catto.tasks import commonsense_qa, mmlu, nli, reward_bench_2, tldr, witnesses
from catto.tasks.rows import Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        mmlu.TASK,
        nli.SNLI,
        nli.ANLI,
        tldr.TASK,
        reward_bench_2.TASK,
        commonsense_qa.TASK,
        witnesses.TASK,
    )
}
