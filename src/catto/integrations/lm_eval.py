"""lm-evaluation-harness: run it, read the confidences from its log, and provide metrics for its task files.

The harness passes the probabilities of the choices only to metrics with certain names, and the metric of a group is an
average over its tasks. Therefore confidences are measured in the log: per task, and over all answers of a group.
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

# Folder of task files, for the harness's option `--include_path`.
TASK_FOLDER = Path(__file__).parent / "lm_eval_tasks"
# Columns that `list_page_rows` copies from a log that has them.
OPTIONAL_COLUMNS = ("label", "gold", "text")
# A page accepts names of up to this length.
MAX_NAME_LENGTH = 64

# ---- run


def find_log_folder(arguments: Sequence[str]) -> Path | None:
    """Return the `--output_path` among the harness's arguments, or None if there is none.

    >>> find_log_folder(["--model", "hf", "--output_path=runs/a"])
    PosixPath('runs/a')
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--output_path", "-o")
    known, _ = parser.parse_known_args(list(arguments))
    return None if known.output_path is None else Path(known.output_path)


def run_harness(arguments: Sequence[str], log: Path) -> int:
    """Run `lm_eval` in a separate process and let it log its samples.

    Args:
        arguments: The user's arguments for `lm_eval`.
        log: Value of the harness's `--output_path`: a folder, or a name that ends in .json.

    Returns:
        The exit code of the harness.
    """
    command = [sys.executable, "-m", "lm_eval", *arguments, "--log_samples", "--output_path", str(log)]
    return subprocess.run(command, check=False).returncode


def find_results(log: Path) -> set[Path]:
    """Return the results files that the harness has written for this `--output_path`, one per run."""
    if log.suffix == ".json":
        return set(log.parent.glob(f"{log.stem}_*.json"))
    return set(log.glob("*/results_*.json"))


# ---- read the log


@dataclass(frozen=True)
class HarnessAnswers:
    """The answers to a task, or to all tasks of a group together.

    Attributes:
        name: Name of the task or the group.
        tasks: Task -> its file of samples. A group has several tasks.
        answers: The answers.
    """

    name: str
    tasks: Mapping[str, Path]
    answers: GradedAnswers

    @property
    def title(self) -> str:
        """The name, for a group with the number of pooled tasks."""
        if len(self.tasks) == 1:
            return self.name
        return f"{self.name} (pooled, {len(self.tasks)} tasks)"


@dataclass(frozen=True)
class HarnessLog:
    """The log of one run of the harness.

    Attributes:
        model: Name of the model, in a form that a page accepts.
        names: Column names for reading the files of samples.
        parts: The groups, then the tasks.
        problems: One line for each task that could not be measured, for example because it generates text.
    """

    model: str
    names: ColumnNames
    parts: tuple[HarnessAnswers, ...]
    problems: tuple[str, ...]

    @property
    def outer_parts(self) -> list[HarnessAnswers]:
        """The parts that are not contained in a larger part: a group, but not the tasks in it."""
        kept: list[HarnessAnswers] = []
        for part in sorted(self.parts, key=lambda part: len(part.tasks), reverse=True):
            is_inside = any(part.tasks.keys() <= other.tasks.keys() for other in kept)
            if not is_inside:
                kept.append(part)
        return kept


def read_log(results: Path, *, length_normalised: bool = False) -> HarnessLog:
    """Read the log of a run: every task, and every group with the pooled answers of its tasks.

    A task that cannot be measured, because it generates text for example, is left out. A group of fewer than two
    measured tasks is left out too, because it would only repeat the task.

    Args:
        results: The file `results_DATE.json`. The files of samples are next to it.
        length_normalised: Whether log-likelihoods are divided by the length of their choice, as in `acc_norm`.

    Returns:
        The groups and the tasks, with one line for each task that is left out.
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
    subtasks = document.get("group_subtasks", {})
    groups = []
    for group in subtasks:
        members = [tasks[task] for task in list_group_tasks(subtasks, group) if task in tasks]
        if len(members) > 1:
            groups.append(pool_answers(group, members, results))
    return HarnessLog(
        model=make_model_name(document),
        names=names,
        parts=(*groups, *tasks.values()),
        problems=tuple(problems),
    )


def list_group_tasks(subtasks: Mapping[str, Sequence[str]], group: str) -> list[str]:
    """Return the tasks of a group and of its subgroups, without duplicates.

    >>> list_group_tasks({"mmlu": ["stem", "law"], "stem": ["physics", "algebra"]}, "mmlu")
    ['physics', 'algebra', 'law']
    """
    tasks: list[str] = []
    for name in subtasks[group]:
        below = list_group_tasks(subtasks, name) if name in subtasks else [name]
        tasks += [task for task in below if task not in tasks]
    return tasks


def pool_answers(group: str, members: Sequence[HarnessAnswers], source: Path) -> HarnessAnswers:
    """Pool the answers of several tasks. All answers have the same weight, so larger tasks count more.

    Args:
        group: Name of the group.
        members: The tasks of the group, at least one.
        source: The file that error messages name.

    Returns:
        The answers of the group, in the order of its tasks. Question ids start with the name of the task, because two
        tasks may use the same ids.
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
    """Return question ids that start with the task, since two tasks may use the same ids."""
    return [f"{task} {question}" for question in answers.question or ()]


def make_model_name(document: Mapping[str, Any]) -> str:
    """Return the last part of the model's path or hub name, in a form that a page accepts.

    >>> make_model_name({"model_name": "EleutherAI/pythia-14m"})
    'pythia-14m'
    """
    path = str(document.get("model_name") or "").rstrip("/")
    return make_page_name(path.rpartition("/")[2] or "model")


def make_page_name(name: str) -> str:
    """Return a name that a page accepts.

    Characters other than letters, digits and ._- become _. A name of more than 64 characters is cut and ends in a
    digest of the whole name, so that two names with the same beginning stay different.

    >>> make_page_name("mmlu::stem")
    'mmlu__stem'
    """
    page_name = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    if len(page_name) <= MAX_NAME_LENGTH:
        return page_name
    digest = sha256(name.encode()).hexdigest()[:8]
    ending = f"-{digest}"
    return page_name[: MAX_NAME_LENGTH - len(ending)] + ending


def list_page_rows(log: HarnessLog) -> Iterator[dict[str, Any]]:
    """Yield a row for each answer, in a form that `catto report` reads.

    All tasks of a group are reported as one task. Otherwise the page would show their average instead of the group.

    Args:
        log: The log of a run. Its files of samples are read again, for the texts and labels.

    Yields:
        The fields of an answer: `question`, `task`, `confidence`, `correct`, and those of `OPTIONAL_COLUMNS` that its
        file has.
    """
    for part in log.outer_parts:
        index = 0  # of the answer in the group, whose answers follow the order of its tasks
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


# ---- metrics for task files


def process_answer_key(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Grade a document whose `answerKey` is one of the labels in its `choices`.

    Task files name this function as `process_results`.

    Args:
        doc: The document.
        results: (log-likelihood, is greedy) of each choice.

    Returns:
        Metric -> its value for this document.
    """
    labels = list(doc["choices"]["label"])
    return grade_choices(results, labels.index(doc["answerKey"].strip()))


def process_label(doc: Mapping[str, Any], results: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Grade a document whose `label` is the index of the right choice.

    Task files name this function as `process_results`.

    Args:
        doc: The document.
        results: (log-likelihood, is greedy) of each choice.

    Returns:
        Metric -> its value for this document.
    """
    return grade_choices(results, int(doc["label"]))


def grade_choices(results: Sequence[tuple[float, bool]], gold: int) -> dict[str, Any]:
    """Return the metrics of one document.

    Args:
        results: (log-likelihood, is greedy) of each choice. Whether greedy decoding gives the choice is not used.
        gold: Index of the right choice.

    Returns:
        Metric -> its value for this document. `acc` and `brier` are numbers. `ece` and `auroc` are computed from all
        documents together, so their values are the pair (confidence, is correct), from which `aggregate_ece` and
        `aggregate_auroc` compute the metric.

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
    """Return the ECE with 20 bins.

    Args:
        answers: (confidence, is correct) of each document.
    """
    confidence, correct = zip(*answers, strict=True)
    return float(ece(confidence, correct))


def aggregate_auroc(answers: Iterable[tuple[float, bool]]) -> float:
    """Return the AUROC; nan if all documents are right or all are wrong.

    Args:
        answers: (confidence, is correct) of each document.
    """
    confidence, correct = zip(*answers, strict=True)
    return float(auroc(confidence, correct))
