"""The paper's printed tables as data, to stand beside our own numbers and be named as the paper's wherever they do.

Every value is copied from a table (text and tables differ in places). Percentages, as printed; "variance" in the
captions of the paper means standard deviation over five seeds. One row of the Confidence@k deviations is printed twice
(RCFT) and none for BCE, which is therefore missing here.

A number stands beside ours only where the setting is the paper's: its tasks, its training set and its budget. In
distribution that is training on the task itself; its out-of-distribution table is training on MMLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from catto.methods import METHODS, Budget, known, method
from catto.report.numbers import Training

__all__ = [
    "LEARNING_RATES",
    "MINUTES",
    "TASKS",
    "budget_is_the_papers",
    "confidence_at_k",
    "learning_rate",
    "minutes",
    "score",
    "setting_of",
]

Setting = Literal["in", "out"]
Row = tuple[float, ...]

# What the models of the out-of-distribution table were trained on.
OUT_OF = "mmlu"
# The order of the columns in every table of the paper.
TASKS = ("reward_bench_2", "snli", "anli", "tldr", "commonsense_qa")

# method -> accuracy and ECE of each task in turn.
IN_DISTRIBUTION: dict[str, Row] = {
    "sft": (62.94, 21.68, 72.44, 25.19, 71.16, 24.66, 62.24, 28.10, 72.35, 25.84),
    "sft+ts": (60.16, 20.49, 74.48, 24.50, 72.36, 23.98, 61.26, 27.80, 70.50, 24.25),
    "sft+ls": (63.85, 16.19, 73.24, 21.44, 71.88, 15.76, 62.81, 27.70, 70.90, 42.20),
    "dpo": (65.44, 19.41, 75.36, 26.74, 72.04, 24.72, 63.87, 28.51, 73.40, 25.86),
    "rcft": (64.58, 15.33, 72.14, 22.94, 72.12, 23.74, 63.72, 27.63, 73.45, 24.83),
    "dpo+bce": (60.20, 15.78, 76.92, 20.26, 72.24, 24.19, 64.68, 26.66, 73.39, 23.85),
    "dpo+catto": (64.11, 15.10, 78.52, 19.13, 72.45, 22.50, 64.26, 25.97, 73.09, 23.31),
}
OUT_OF_DISTRIBUTION: dict[str, Row] = {
    "sft": (10.69, 39.83, 36.25, 18.48, 30.80, 17.38, 24.70, 33.51, 37.39, 19.87),
    "sft+ts": (22.21, 32.08, 41.04, 32.14, 38.20, 33.87, 28.20, 34.49, 42.29, 27.63),
    "sft+ls": (11.12, 36.35, 36.24, 16.39, 33.03, 16.17, 23.03, 31.64, 38.32, 18.38),
    "dpo": (16.31, 40.60, 39.10, 17.67, 37.10, 23.25, 27.70, 35.06, 40.43, 23.11),
    "rcft": (16.57, 34.98, 36.39, 30.61, 36.24, 22.94, 27.40, 34.82, 39.65, 20.93),
    "dpo+bce": (16.04, 33.73, 31.20, 27.23, 35.90, 21.08, 28.70, 32.46, 39.28, 19.33),
    "dpo+catto": (16.81, 30.16, 38.70, 16.21, 37.02, 16.01, 29.60, 31.23, 39.85, 17.59),
}
IN_DISTRIBUTION_STD: dict[str, Row] = {
    "sft": (4.43, 9.11, 6.35, 6.11, 0.62, 5.77, 1.95, 1.47, 2.08, 3.67),
    "sft+ts": (4.81, 2.34, 3.31, 2.43, 4.37, 1.81, 2.12, 1.88, 2.52, 2.40),
    "sft+ls": (6.51, 3.68, 3.18, 3.51, 2.36, 1.01, 2.51, 5.05, 3.68, 4.99),
    "dpo": (1.28, 5.73, 6.72, 4.94, 1.62, 5.45, 3.33, 4.47, 1.28, 3.44),
    "rcft": (2.55, 5.25, 2.53, 5.42, 1.78, 4.35, 2.40, 3.34, 3.33, 6.97),
    "dpo+bce": (4.15, 2.76, 5.28, 2.09, 1.39, 5.65, 3.62, 3.14, 0.82, 1.86),
    "dpo+catto": (3.59, 2.74, 4.65, 0.88, 1.09, 6.73, 1.61, 2.64, 1.71, 1.58),
}
OUT_OF_DISTRIBUTION_STD: dict[str, Row] = {
    "sft": (3.29, 0.69, 4.03, 12.52, 2.26, 13.06, 13.43, 11.08, 22.76, 0.08),
    "sft+ts": (4.51, 2.83, 11.07, 0.82, 6.51, 2.04, 3.95, 5.20, 9.91, 2.84),
    "sft+ls": (1.66, 1.73, 3.83, 9.56, 0.84, 1.43, 10.04, 5.70, 24.18, 2.18),
    "dpo": (5.18, 9.36, 2.96, 10.82, 0.98, 11.07, 12.86, 17.36, 2.21, 18.24),
    "rcft": (4.07, 0.56, 0.86, 9.12, 5.93, 6.01, 10.79, 14.97, 14.42, 0.05),
    "dpo+bce": (3.02, 0.86, 1.52, 13.60, 13.33, 2.38, 1.55, 6.06, 2.54, 1.71),
    "dpo+catto": (2.74, 0.41, 1.27, 3.45, 3.25, 2.91, 3.01, 2.59, 9.37, 2.92),
}
# method -> accuracy at k = 4 and k = 8 of each task in turn.
CONFIDENCE_AT_K: dict[str, Row] = {
    "sft": (62.91, 65.31, 71.49, 72.45, 70.25, 72.38, 60.80, 63.90, 66.20, 71.38),
    "sft+ls": (65.78, 66.91, 70.42, 75.20, 71.34, 78.45, 62.20, 65.80, 55.64, 59.40),
    "dpo": (64.71, 65.43, 68.32, 68.49, 64.41, 68.51, 60.63, 62.40, 63.40, 67.47),
    "rcft": (66.10, 68.74, 69.39, 72.67, 65.80, 76.52, 64.24, 67.52, 67.75, 71.82),
    "dpo+bce": (65.16, 67.28, 74.81, 79.40, 64.76, 75.83, 63.73, 66.86, 67.48, 72.60),
    "dpo+catto": (69.53, 72.19, 77.32, 82.80, 73.51, 81.45, 65.37, 70.34, 73.67, 74.33),
}
CONFIDENCE_AT_K_STD: dict[str, Row] = {
    "sft": (3.10, 1.92, 4.45, 2.81, 0.41, 0.26, 1.22, 0.78, 1.31, 0.84),
    "sft+ls": (4.52, 2.87, 2.18, 1.42, 1.41, 0.89, 1.44, 0.93, 2.37, 1.51),
    "dpo": (0.83, 0.51, 4.58, 2.96, 0.91, 0.58, 1.84, 1.19, 0.82, 0.54),
    "rcft": (1.61, 1.02, 1.39, 0.91, 1.02, 0.66, 1.29, 0.85, 1.98, 1.27),
    "dpo+catto": (2.12, 1.34, 2.48, 1.57, 0.62, 0.40, 0.97, 0.64, 0.91, 0.59),
}
HIGH, LOW = 5e-6, 5e-7
# task -> method -> the learning rate of seeds 0 to 4.
LEARNING_RATES: dict[str, dict[str, Row]] = {
    "reward_bench_2": {
        "dpo": (HIGH, HIGH, HIGH, HIGH, HIGH),
        "dpo+bce": (HIGH, LOW, LOW, HIGH, HIGH),
        "dpo+catto": (HIGH, HIGH, HIGH, HIGH, HIGH),
    },
    "snli": {
        "dpo": (HIGH, HIGH, HIGH, HIGH, HIGH),
        "dpo+bce": (HIGH, LOW, HIGH, LOW, HIGH),
        "dpo+catto": (HIGH, LOW, HIGH, HIGH, HIGH),
    },
    "anli": {
        "dpo": (LOW, HIGH, HIGH, LOW, HIGH),
        "dpo+bce": (HIGH, LOW, LOW, LOW, LOW),
        "dpo+catto": (LOW, LOW, HIGH, HIGH, HIGH),
    },
    "tldr": {
        "dpo": (HIGH, LOW, LOW, LOW, HIGH),
        "dpo+bce": (HIGH, LOW, LOW, HIGH, HIGH),
        "dpo+catto": (HIGH, LOW, HIGH, HIGH, HIGH),
    },
    "commonsense_qa": {
        "dpo": (HIGH, HIGH, HIGH, HIGH, HIGH),
        "dpo+bce": (HIGH, HIGH, HIGH, HIGH, HIGH),
        "dpo+catto": (HIGH, HIGH, HIGH, HIGH, HIGH),
    },
}
# method -> minutes on one A100 for each task in turn (DPO: 6 epochs, RCFT: 5, CATTO: 2).
MINUTES: dict[str, Row] = {
    "dpo": (75, 70, 78, 72, 75),
    "rcft": (1410, 1807, 1606, 2095, 2909),
    "dpo+catto": (135, 76, 104, 124, 98),
}


def _at(table: dict[str, Row], method: str, task: str, place: int, width: int) -> float | None:
    row = table.get(method)
    if row is None or task not in TASKS:
        return None
    return row[width * TASKS.index(task) + place]


def budget_is_the_papers(name: str, budget: Budget | None, training: Training | None) -> bool:
    """Whether a model had the paper's training: its budget, and its epochs and pairs as far as they are recorded.

    A method that both budgets share is the same model in both. training: of the model itself, or of the one that is
    rescaled; None where nothing is recorded.
    """
    if not known(name):
        return False
    of = method(name)
    if budget == "matched" and of.budgeted:
        return False
    if training is None:
        return True
    effort = of.effort["paper"] if of.stage != "scaling" else METHODS[of.start].effort["paper"]
    pairs = training.rows is None or effort.pairs is None or training.rows == effort.pairs
    return pairs and training.epochs in (None, effort.epochs)


def setting_of(trained_on: str, task: str) -> Setting | None:
    """The table of the paper in which such a model stands, None where it has none.

    >>> setting_of("snli", "snli"), setting_of("mmlu", "snli"), setting_of("anli", "snli")
    ('in', 'out', None)
    """
    if trained_on == task:
        return "in"
    return "out" if trained_on == OUT_OF else None


def score(setting: Setting | None, method: str, task: str, quantity: str, std: bool = False) -> float | None:
    """The paper's accuracy or ECE of a method, or its deviation over seeds; None where it prints none."""
    if setting is None or quantity not in ("accuracy", "ece"):
        return None
    mean_of = {"in": IN_DISTRIBUTION, "out": OUT_OF_DISTRIBUTION}
    std_of = {"in": IN_DISTRIBUTION_STD, "out": OUT_OF_DISTRIBUTION_STD}
    return _at((std_of if std else mean_of)[setting], method, task, 0 if quantity == "accuracy" else 1, 2)


def confidence_at_k(method: str, task: str, k: int, std: bool = False) -> float | None:
    """The paper's Confidence@k accuracy, or its deviation over seeds; None where it prints none."""
    if k not in (4, 8):
        return None
    return _at(CONFIDENCE_AT_K_STD if std else CONFIDENCE_AT_K, method, task, 0 if k == 4 else 1, 2)


def learning_rate(method: str, task: str, seed: int) -> float | None:
    """The learning rate that the paper chose for a seed."""
    rates: Sequence[float] = LEARNING_RATES.get(task, {}).get(method, ())
    return rates[seed] if 0 <= seed < len(rates) else None


def minutes(method: str, task: str) -> float | None:
    """The paper's training time in minutes."""
    return _at(MINUTES, method, task, 0, 1)
