"""lm-evaluation-harness: run it, measure the confidences in its log, and metrics for the files of its tasks.

The harness decides by the name of a metric which metrics get the probabilities of the choices, and averages the
metrics of the tasks of a group. So the confidences are measured in its log: per task, and over all answers of a group.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from catto.answer_columns import GradedAnswers, read_graded
from catto.errors import DataError
from catto.formats.answers import read_answers
from catto.formats.columns import ColumnNames
from catto.formats.lm_eval import read_choice
from catto.metrics.errors import ece
from catto.metrics.ranking import auroc

# The files of tasks for the harness's own `--include_path`.
TASK_FOLDER = Path(__file__).parent / "lm_eval_tasks"
# Columns of the rows of `list_page_rows` that a log may have.
OPTIONAL_COLUMNS = ("label", "gold", "text")
# The longest name of a task on a page.
MAX_NAME_LENGTH = 64

# ---- run


def find_log_folder(arguments: Sequence[str]) -> Path | None:
    """Return the `--output_path` among the harness's arguments; None if there is none.

    >>> find_log_folder(["--model", "hf", "--output_path=runs/a"])
    PosixPath('runs/a')
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--output_path", "-o")
    known, _ = parser.parse_known_args(list(arguments))
    return None if known.output_path is None else Path(known.output_path)


def run_harness(arguments: Sequence[str], log: Path) -> int:
    """Run `lm_eval` with the user's arguments in a process of its own, with a log of its samples.

    Args:
        arguments: Arguments of `lm_eval`.
        log: The folder of its log, or a name ending in .json, as the harness's `--output_path` takes it.

    Returns:
        The exit code of the harness.
    """
    command = [sys.executable, "-m", "lm_eval", *arguments, "--log_samples", "--output_path", str(log)]
    return subprocess.run(command, check=False).returncode


def find_results(log: Path) -> set[Path]:
    """Return the files of results that the harness has written for this `--output_path`, one per run."""
    if log.suffix == ".json":
        return set(log.parent.glob(f"{log.stem}_*.json"))
    return set(log.glob("*/results_*.json"))


# ---- read its log


@dataclass(frozen=True)
class HarnessAnswers:
    """The answers to a task, or to all tasks of a group together.

    Attributes:
        name: Name of the task or the group.
        tasks: Task -> its file of samples. A group has several.
        answers: The answers.
    """

    name: str
    tasks: Mapping[str, Path]
    answers: GradedAnswers

    @property
    def title(self) -> str:
        """The name; that of a group says how many tasks are pooled."""
        if len(self.tasks) == 1:
            return self.name
        return f"{self.name} (pooled, {len(self.tasks)} tasks)"


@dataclass(frozen=True)
class HarnessLog:
    """What a run of the harness logged.

    Attributes:
        model: Name of the model, as a page can show it.
        names: How the files of samples are read.
        parts: The groups, then the tasks.
        problems: Why a task could not be measured: it generates text, for example.
    """

    model: str
    names: ColumnNames
    parts: tuple[HarnessAnswers, ...]
    problems: tuple[str, ...]

    @property
    def outer_parts(self) -> list[HarnessAnswers]:
        """The parts whose tasks are not among those of a larger part: a group, but not its tasks."""
        kept: list[HarnessAnswers] = []
        for part in sorted(self.parts, key=lambda part: len(part.tasks), reverse=True):
            is_inside = any(part.tasks.keys() <= other.tasks.keys() for other in kept)
            if not is_inside:
                kept.append(part)
        return kept


def read_log(results: Path, *, length_normalised: bool = False) -> HarnessLog:
    """Read the log of a run: every task, and every group with the answers of all of its tasks.

    Args:
        results: The file `results_DATE.json`; the samples are next to it.
        length_normalised: Whether log-likelihoods are divided by the length of their choice, as in `acc_norm`.
    """
    names = ColumnNames(format="lm-eval", length_normalised=length_normalised)
    document = json.loads(results.read_text(encoding="utf-8"))
    date = results.stem.rpartition("_")[2]
    tasks: dict[str, HarnessAnswers] = {}
    problems = []
    for task in document["configs"]:
        path = results.with_name(f"samples_{task}_{date}.jsonl")
        try:
            tasks[task] = HarnessAnswers(task, {task: path}, read_graded(path, names))
        except DataError as error:
            problems.append(f"{task} is left out: {error}")
    parts = []
    for group in document.get("group_subtasks", {}):
        members = []
        for task in list_group_tasks(document["group_subtasks"], group):
            if task in tasks:
                members.append(tasks[task])
        if len(members) > 1:
            parts.append(pool_answers(group, members, results))
    parts += tasks.values()
    return HarnessLog(model=make_model_name(document), names=names, parts=tuple(parts), problems=tuple(problems))


def list_group_tasks(subtasks: Mapping[str, Sequence[str]], group: str) -> list[str]:
    """Return the tasks of a group and of the groups below it, each once.

    >>> list_group_tasks({"mmlu": ["stem", "law"], "stem": ["physics", "algebra"]}, "mmlu")
    ['physics', 'algebra', 'law']
    """
    tasks: list[str] = []
    for name in subtasks[group]:
        below = list_group_tasks(subtasks, name) if name in subtasks else [name]
        tasks += [task for task in below if task not in tasks]
    return tasks


def pool_answers(group: str, members: Sequence[HarnessAnswers], source: Path) -> HarnessAnswers:
    """Pool the answers of several tasks. Every answer counts once, so a large task counts for more than a small one.

    Args:
        group: Name of the group.
        members: Its tasks.
        source: The file that errors name.
    """
    questions: list[str] = []
    for member in members:
        questions += name_questions(member.name, member.answers)
    pooled = GradedAnswers(
        source=source,
        confidence=np.concatenate([member.answers.confidence for member in members]),
        question=questions,
        read_as=None,
        by=None,
        correct=np.concatenate([member.answers.correct for member in members]),
    )
    tasks = {member.name: member.answers.source for member in members}
    return HarnessAnswers(group, tasks, pooled)


def name_questions(task: str, answers: GradedAnswers) -> list[str]:
    """Return the ids of the questions with the task in front: two tasks may number their documents alike."""
    return [f"{task} {question}" for question in answers.question or ()]


def make_model_name(document: Mapping[str, Any]) -> str:
    """Return the last part of the model's path or hub name, with other characters than letters, digits and ._- as _.

    >>> make_model_name({"model_name": "EleutherAI/pythia-14m"})
    'pythia-14m'
    """
    path = str(document.get("model_name") or "").rstrip("/")
    return make_page_name(path.rpartition("/")[2] or "model")


def make_page_name(name: str) -> str:
    """Return a name that a page accepts. A longer one keeps its start, and a digest that tells it from others.

    >>> make_page_name("mmlu::stem")
    'mmlu__stem'
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    if plain == name and len(name) <= MAX_NAME_LENGTH:
        return name
    if len(plain) <= MAX_NAME_LENGTH:
        return plain
    digest = sha256(name.encode()).hexdigest()[:8]
    return f"{plain[: MAX_NAME_LENGTH - 9]}-{digest}"


def list_page_rows(log: HarnessLog) -> Iterator[dict[str, Any]]:
    """Yield a row for each answer, in the form of `catto report`.

    A group is one task: the first screen of a page averages over tasks, and would average over those of the group.
    """
    for part in log.outer_parts:
        index = 0
        for task, path in part.tasks.items():
            for _, fields in read_answers(path, log.names):
                row = {
                    "question": f"{task} {fields['question']}",
                    "task": make_page_name(part.name),
                    "confidence": float(part.answers.confidence[index]),
                    "correct": bool(part.answers.correct[index]),
                }
                row |= {name: fields[name] for name in OPTIONAL_COLUMNS if name in fields}
                yield row
                index += 1


# ---- metrics for the files of tasks


def process_answer_key(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Grade a document whose `answerKey` is one of the labels of its `choices`, as a `process_results` function.

    Args:
        doc: The document.
        results: (log-likelihood, is greedy) of each choice.

    Returns:
        Metric -> the value of this document.
    """
    labels = list(doc["choices"]["label"])
    return grade_choices(results, labels.index(doc["answerKey"].strip()))


def process_label(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Grade a document whose `label` is the number of the right choice, as a `process_results` function.

    Args:
        doc: The document.
        results: (log-likelihood, is greedy) of each choice.

    Returns:
        Metric -> the value of this document.
    """
    return grade_choices(results, int(doc["label"]))


def grade_choices(results: Sequence[tuple[float, bool]], gold: int) -> dict[str, Any]:
    """Return accuracy and Brier score of a document, and its confidence and grade for the metrics of all documents.

    Args:
        results: (log-likelihood, is greedy) of each choice.
        gold: Number of the right choice.

    >>> from math import log
    >>> graded = grade_choices([(log(0.2), False), (log(0.6), True)], gold=1)
    >>> graded["acc"], round(graded["brier"], 4), graded["ece"] == graded["auroc"]
    (1.0, 0.0625, True)
    """
    reading = read_choice([loglikelihood for loglikelihood, _ in results])
    is_correct = reading.best == gold
    answer = (reading.confidence, is_correct)
    return {
        "acc": float(is_correct),
        "brier": (reading.confidence - is_correct) ** 2,
        "ece": answer,
        "auroc": answer,
    }


def aggregate_ece(answers: Iterable[tuple[float, bool]]) -> float:
    """Return the ECE with 20 bins of (confidence, is correct), one per document."""
    confidence, correct = zip(*answers, strict=True)
    return float(ece(confidence, correct))


def aggregate_auroc(answers: Iterable[tuple[float, bool]]) -> float:
    """Return the AUROC of (confidence, is correct), one per document; nan if all are right or all are wrong."""
    confidence, correct = zip(*answers, strict=True)
    return float(auroc(confidence, correct))
