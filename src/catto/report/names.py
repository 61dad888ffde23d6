"""How tasks, budgets and settings are called in tables, figures and on the page."""

from __future__ import annotations

from catto import methods
from catto.methods import Budget

__all__ = ["BUDGET_TITLES", "budget_title", "method_group", "method_title", "setting", "task_title"]

TASK_TITLES = {
    "reward_bench_2": "Reward Bench 2",
    "snli": "SNLI",
    "anli": "ANLI",
    "tldr": "TL;DR",
    "commonsense_qa": "CommonsenseQA",
    "mmlu": "MMLU",
    "witnesses": "Witnesses",
}
# The paper's order of columns; other tasks follow by name.
TASK_ORDER = ("reward_bench_2", "snli", "anli", "tldr", "commonsense_qa", "mmlu", "witnesses")
BUDGET_TITLES: dict[Budget | None, str] = {"paper": "Paper's budget", "matched": "Matched budget", None: "One budget"}


def task_title(task: str) -> str:
    """A task as a column is headed."""
    return TASK_TITLES.get(task, task)


def task_order(task: str) -> tuple[int, str]:
    """Sort key of a task's column."""
    return (TASK_ORDER.index(task) if task in TASK_ORDER else len(TASK_ORDER), task)


def method_title(method: str) -> str:
    """A method as a row is headed."""
    return methods.method(method).title if methods.known(method) else method


def method_group(method: str) -> str:
    """The block of rows in which a method stands: SFT or DPO."""
    return methods.method(method).group if methods.known(method) else "Other"


def method_order(method: str) -> tuple[int, bool, str]:
    """Sort key of a method's row."""
    return methods.order(method)


def budget_title(budget: Budget | None) -> str:
    """A budget as a block is headed."""
    return BUDGET_TITLES[budget]


def setting(trained_on: str, task: str) -> str:
    """`SNLI`, or `SNLI, trained on MMLU`."""
    return task_title(task) if trained_on == task else f"{task_title(task)}, trained on {task_title(trained_on)}"
