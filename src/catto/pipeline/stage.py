"""A stage: what determines it, where its files are, and whether they are what it wrote.

The key of a stage is a hash of its kind, its settings and the keys of what it needs, and of nothing else: two recipes
that agree on a stage share it, and a changed setting reruns exactly what depends on it.

Attempts at a stage work in folders of their own (`catto.pipeline.attempts`), and one of them becomes `<folder>`. Its
`done.json` records size and hash of every file, for two reasons. Damage is noticed: sizes whenever the stage is looked
at, bytes before another stage reads them. And a stage depends on what its needs hold, not on when they were made
(`content`): needs that were made again with the same result change nothing; another result makes the stage stale, so
that it runs again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple

from pydantic import BaseModel
from typing_extensions import TypeVar

from catto.errors import DataError
from catto.io.atomic import Seal, find_damage, seal_folder, write_text
from catto.io.text_files import read_json
from catto.methods import Budget, Method, ScalingKind
from catto.recipe.settings import (
    EvaluationSettings,
    LaunchSettings,
    ModelSettings,
    OutcomeSettings,
    Recipe,
    TaskSettings,
    TeacherSettings,
    TrainerSettings,
)
from catto.records import Split, content_hash
from catto.teacher.pairing import Kind

# Raised when the meaning of a stage changes, so that old folders are not taken for new ones.
VERSION = 3
# Files about how a stage ran are not sealed; the others are what it made.
DONE = "done.json"
LOG = "log.txt"
ATTEMPT = "attempt.json"
ATTEMPT_LOCK = "attempt.lock"
PROGRESS = "progress.json"
UNSEALED = frozenset({DONE, LOG, ATTEMPT, ATTEMPT_LOCK, PROGRESS, ".lock", "seconds.json", "job.json"})
REPAIR = "--repair runs the stage again"
_UNFINISHED = re.compile(r"\.(part(-[^.]*)?(\.half)?|stale-[^.]*|damaged)$")
# Settings at the top of the recipe that the stages before the report hold, that decide which of these there are, or
# that no result depends on.
IN_STAGES = frozenset({"tasks", "train_on", "model", "methods", "budgets", "small_pairs", "seeds", "lr_choice", "keep"})
IN_STAGES |= {"start"}
IN_STAGES |= {"context", "prefix_sharing", "teacher", "sft", "preference", "rcft", "outcome", "launch", "resources"}

# ---- what determines a stage ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageSettings:
    """What determines a stage of one kind.

    Everything counts that is not `excluded` by name, so a setting that is added to a block of the recipe changes keys
    until somebody says that it has no part in the stage. A field that has its default, or that is not compared, does
    not count. Neither does a name of a block that is `optional` and has its default there: it was added to the block
    when there were keys already, and these stay as they are.
    """

    excluded: ClassVar[Mapping[str, frozenset[str]]] = {}  # field that holds a block -> names in it that do not count
    optional: ClassVar[Mapping[str, frozenset[str]]] = {}  # -> names that do not count at their default

    def counted(self) -> dict[str, Any]:
        """Return the part of the settings that the key is a hash of."""
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            known = self.__dataclass_fields__[name]
            if value == known.default or not known.compare:
                continue
            excluded = set(self.excluded.get(name, ()))
            excluded |= self._names_at_default(name, value)
            if isinstance(value, BaseModel):
                values[name] = value.model_dump(mode="json", exclude=excluded, serialize_as_any=True)
            elif isinstance(value, Method):
                values[name] = {part: entry for part, entry in vars(value).items() if part not in excluded}
            else:
                values[name] = value.counted() if isinstance(value, StageSettings) else value
        return values

    def _names_at_default(self, field: str, block: Any) -> set[str]:
        """Return which of the optional names of a block have their default."""
        names = self.optional.get(field, frozenset()) if block is not None else frozenset()
        unset: set[str] = set()
        for name in names:
            if isinstance(block, BaseModel):
                default = type(block).model_fields[name].default
            else:
                default = block.__dataclass_fields__[name].default
            if getattr(block, name) == default:
                unset.add(name)
        return unset


@dataclass(frozen=True)
class QuestionSettings(StageSettings):
    """The questions of one split."""

    task: str
    split: Split
    seed: int
    block: TaskSettings  # without the numbers of questions of the other splits
    contents: str | None  # hash of the local files that are read
    seeds: tuple[int, ...] | None = None  # of a user's file that is cut: whose held-out questions are not trained on

    def counted(self) -> dict[str, Any]:
        """Leave out what only users' files set, so that the key of a benchmark does not depend on it."""
        values = super().counted()
        values["block"]["answer"] = "label" if self.block.answer is None else [self.block.answer]
        if self.block.answers is None:
            del values["block"]["answers"]
        return values


@dataclass(frozen=True)
class Generating(StageSettings):
    """What determines generated text and its scores, whatever the model."""

    evaluation: EvaluationSettings
    reasoning: bool
    prompts: str  # fingerprint of their wording

    excluded: ClassVar = {
        "evaluation": frozenset({"bins", "resamples", "unparsed", "decode", "k", "sampling", "preference_pairs"})
    }


@dataclass(frozen=True)
class ResponseSettings(StageSettings):
    """Responses that become rows: the teacher's or, with `generating`, samples of a trained model."""

    teacher: TeacherSettings
    split: Split
    prompts: str
    contents: str | None  # hash of the local files that are read
    parser: int | None  # where responses are stored with labels, which are compared with what is read
    generating: Generating | None
    outcome: OutcomeSettings | None  # of the stream that `outcome` learns from

    # Which questions are held out is known from the stage that gives them.
    # How many responses votes are counted of is the teacher's n.
    excluded: ClassVar = {
        "outcome": frozenset({"score", "rows_per_pair", "held_out", "target", "samples", "source"}),
    }

    def counted(self) -> dict[str, Any]:
        """Leave out how the teacher is reached and which rows are picked."""
        return {**super().counted(), "teacher": self.teacher.response_settings()}


@dataclass(frozen=True)
class RowSettings(StageSettings):
    """Rows from responses. Of the kinds `outcome` and `stream` none is picked, so how others are does not count."""

    asked: ResponseSettings
    kinds: tuple[Kind, ...]
    parser: int
    grading: int | None = None  # the version of the grading; None where answers are labels

    def counted(self) -> dict[str, Any]:
        """Add how rows are picked."""
        unpicked = self.kinds in (("outcome",), ("stream",))
        picked = None if unpicked else self.asked.teacher.row_settings()
        return {**super().counted(), "picked": picked}


@dataclass(frozen=True)
class BaseSettings(StageSettings):
    """The given model as it is, in the recipe's precision."""

    model: ModelSettings
    contents: str | None  # hash of its files

    excluded: ClassVar = {"model": frozenset({"scratch", "attention", "peft"})}


@dataclass(frozen=True)
class TrainSettings(StageSettings):
    """One training. What method and block say of epochs and the like is resolved into fields of its own."""

    name: str
    method: Method
    block: TrainerSettings
    seed: int
    learning_rate: float
    batch_size: int
    epochs: int
    pairs: int | None
    model: ModelSettings
    contents: str | None  # hash of the base model's files, where training starts from it
    context: int
    keep: str
    prefix_sharing: bool | None  # None: nothing is trained on pairs
    outcome: OutcomeSettings | None
    answering: Generating | None  # how RCFT asks the model that it trains
    parser: int | None
    others: Mapping[str, Any]  # settings at the top of the recipe that no field above holds
    launch: LaunchSettings = field(compare=False)  # how many processes share it: it is the same training

    excluded: ClassVar = {
        "method": frozenset({"title", "start", "effort", "learning_rates", "batch_size", "only_from"}),
        "block": frozenset({"epochs", "learning_rates", "batch_size"}),
        "outcome": frozenset({"questions", "temperature", "held_out", "samples", "source"}),
    }
    optional: ClassVar = {
        "method": frozenset({"loss_type", "preference_tokens"}),
        "outcome": frozenset({"target"}),
    }


@dataclass(frozen=True)
class ChoiceSettings(StageSettings):
    """The choice of a learning rate by validation ECE: for `seed`, on average over `seeds`."""

    title: str  # the method, with its budget where the two budgets give different models
    task: str
    seed: int
    seeds: tuple[int, ...]
    rates: tuple[float, ...]

    @property
    def name(self) -> str:
        """What the names of its stages end with."""
        return f"{self.title} {self.task} seed {self.seed}"


@dataclass(frozen=True)
class TextSettings(StageSettings):
    """Generated responses to the questions of a split."""

    split: Split
    seed: int
    generating: Generating
    temperatures: tuple[float, ...] | int  # of each sample, or how many are drawn at the temperature of another stage
    limit: int | None  # at most so many questions


@dataclass(frozen=True)
class PredictionSettings(StageSettings):
    """What generated responses answer."""

    text: TextSettings
    parser: int
    grading: int | None = None  # the version of the grading; None where answers are labels


@dataclass(frozen=True)
class ScalingSettings(StageSettings):
    """A temperature, of the label token in the whole vocabulary or among the labels, or vector scaling."""

    kind: ScalingKind = "raw"


@dataclass(frozen=True)
class PairSettings(StageSettings):
    """The log-probabilities of preference pairs under a model."""

    context: int  # pairs with more tokens are left out, as in training
    batch_size: int = field(compare=False)  # it changes float noise at most
    attention: str | None = field(compare=False)


class CellPlace(NamedTuple):
    """Which cell of the tables it is, as `report.numbers.Cell` names it."""

    task: str
    trained_on: str
    method: str
    budget: Budget | None
    seed: int


@dataclass(frozen=True)
class CellPlan:
    """One cell of the tables and the stages that give its numbers."""

    place: CellPlace
    predictions: Stage
    candidates: Stage | None
    chosen: Stage
    questions: Stage
    validation: tuple[Stage, ...]  # greedy predictions of the model, or of those among which it was chosen
    preference: Stage | None = None  # held-out pairs that the model orders as preferred


@dataclass(frozen=True)
class ReportSettings(StageSettings):
    """The report. Of the recipe, the needs hold all but its name and how results are measured."""

    version: int
    recipe: Recipe
    cells: tuple[CellPlan, ...]

    excluded: ClassVar = {"recipe": IN_STAGES}

    def counted(self) -> dict[str, Any]:
        """Count which cells there are, in their order; their stages are among the needs."""
        return {**super().counted(), "cells": [cell.place for cell in self.cells]}


# ---- stages and their folders ---------------------------------------------------------------------------------------

S = TypeVar("S", bound=StageSettings, default=Any)


@dataclass(frozen=True)
class Stage(Generic[S]):
    """One node of the graph.

    >>> Stage("tau", "tau sft snli seed 0", StageSettings()).folder.rpartition("-")[0]
    'tau-sft-snli-seed-0'
    """

    kind: str
    name: str
    settings: S
    needs: Mapping[str, Stage] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """Hash of what determines this stage."""
        inputs = {role: need.key for role, need in self.needs.items()}
        return content_hash([VERSION, self.kind, self.settings.counted(), inputs])

    @property
    def folder(self) -> str:
        """Name of its folder: readable, and unique by the key."""
        return folder_name(self.name, self.key)

    @property
    def method(self) -> str | None:
        """The method that a training trains."""
        return self.settings.name if isinstance(self.settings, TrainSettings) else None


def folder_name(name: str, key: str) -> str:
    """Return the name of the folder of a stage.

    >>> folder_name("tau sft snli seed 0", "5f2c81d09ab34e67")
    'tau-sft-snli-seed-0-5f2c81d0'
    """
    readable = re.sub(r"[^A-Za-z0-9.+-]+", "-", name).strip("-")
    return f"{readable}-{key[:8]}"


def ordered(goals: list[Stage]) -> list[Stage]:
    """Return the goals and all they need, each once (by key), what is needed first.

    >>> questions = Stage("questions", "questions snli", StageSettings())
    >>> [stage.kind for stage in ordered([Stage("rows", "rows snli", StageSettings(), {"questions": questions})])]
    ['questions', 'rows']
    """
    stages: dict[str, Stage] = {}

    def visit(stage: Stage) -> None:
        if stage.key not in stages:
            for need in stage.needs.values():
                visit(need)
            stages.setdefault(stage.key, stage)

    for goal in goals:
        visit(goal)
    return list(stages.values())


def place(root: Path, stage: Stage) -> Path:
    """Return the folder of a finished stage."""
    return root / "stages" / stage.folder


def chosen(root: Path, stage: Stage, role: str = "model") -> Stage:
    """Return the training (or the `validation` predictions) that a finished choice took; any other stage is itself."""
    return stage.needs[read_json(place(root, stage) / "choice.json")[role]] if stage.kind == "chosen" else stage


def sources(root: Path, need: Stage) -> Iterator[Path]:
    """Yield the folders that are read of a need: its own and, of a finished choice, the chosen model's."""
    yield place(root, need)
    if need.kind == "chosen" and place(root, need).exists():
        yield place(root, chosen(root, need))


def write(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, _json(value))


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


@dataclass(frozen=True)
class Work(Generic[S]):
    """What the function of a stage gets.

    root: the experiment's folder. out: where the stage writes, and where it resumes from.
    """

    stage: Stage[S]
    root: Path
    out: Path
    progress: Callable[[int, int, str], None]

    @property
    def settings(self) -> S:
        """The stage's settings."""
        return self.stage.settings

    def input(self, role: str) -> Path:
        """Return the folder of what it needs."""
        return place(self.root, self.stage.needs[role])

    def model(self, role: str = "model") -> Path:
        """Return the folder of a model that it needs: a training's own, or the chosen one."""
        return place(self.root, chosen(self.root, self.stage.needs[role])) / "model"


# ---- what a finished stage holds ------------------------------------------------------------------------------------


def content(root: Path, stage: Stage) -> str:
    """Hash what determines a stage whose needs are finished, by what those hold and not by how they came to be.

    A choice holds the model that it took. Manifests describe how files were made and do not count.
    """
    inputs: dict[str, str] = {}
    for role, need in stage.needs.items():
        files = account(place(root, chosen(root, need)))["files"]
        inputs[role] = content_hash({name: seal for name, seal in files.items() if not name.endswith(".manifest.json")})
    return content_hash([VERSION, stage.kind, stage.name, stage.settings.counted(), inputs])


def record(stage: Stage, folder: Path, content: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the done.json of a stage whose files are in a folder."""
    needs = {role: need.key for role, need in stage.needs.items()}
    about = {**details, "name": stage.name, "key": stage.key, "needs": needs, "content": content}
    about["files"] = {name: list(seal) for name, seal in seal_folder(folder, UNSEALED).items()}
    return {**about, "checksum": content_hash(about)}


def account(folder: Path) -> dict[str, Any]:
    """Read the done.json of a finished stage; one that is missing, unreadable or changed is a damaged stage."""
    path = folder / DONE
    if not path.is_file():
        raise DataError(folder, None, f"damaged: {DONE} is missing; {REPAIR}")
    stamp = path.stat()
    return _account(path, stamp.st_mtime_ns, stamp.st_ino)


@cache
def _account(path: Path, changed: int, number: int) -> dict[str, Any]:
    """Parse and check a done.json once: every stage that needs this one looks at it."""
    try:
        record = dict(read_json(path))
        whole = _json(record) == path.read_text(encoding="utf-8") and record.pop("checksum") == content_hash(record)
    except (DataError, KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise DataError(path, None, f"damaged: not what was written; {REPAIR}")
    return record


def check(folder: Path, *, contents: bool = False) -> None:
    """Raise DataError where a file of a finished stage is missing or has another size, or the folder is another's.

    `contents`: or where a file has other bytes, or is not one that the stage wrote. A library may read such a file: an
    adapter beside a model is loaded with it.
    """
    done_record = account(folder)
    own_name = folder_name(done_record["name"], done_record["key"])
    published_name = _UNFINISHED.sub("", folder.name)  # an attempt that could not be renamed is checked too
    if published_name != own_name:
        raise DataError(folder, None, f"damaged: the folder holds the stage {own_name}; {REPAIR}")
    seals = {name: Seal(*seal) for name, seal in done_record["files"].items()}
    if (problem := find_damage(folder, seals, contents=contents)) is not None:
        raise DataError(folder, None, f"damaged: {problem}; {REPAIR}")
    if contents:
        for extra in _files_beside(folder, seals):
            raise DataError(folder, None, f"damaged: the stage did not write {extra}: delete it, or {REPAIR}")


def _files_beside(folder: Path, seals: Mapping[str, Seal]) -> Iterator[str]:
    """Yield the files in a stage's folder that it did not write; systems leave some that begin with a dot."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_of_system = path.name.startswith((".nfs", ".DS_Store", "._"))
        if not path.is_dir() and name not in seals and name not in UNSEALED and not is_of_system:
            yield name


def done(root: Path, stage: Stage) -> bool:
    """Return whether the stage has finished with what its needs hold now. A damaged one raises DataError."""
    folder = place(root, stage)
    if not folder.exists() or not all(path.exists() for need in stage.needs.values() for path in sources(root, need)):
        return False
    check(folder)
    return bool(account(folder)["content"] == content(root, stage))


def finished(root: Path) -> list[Path]:
    """Return the folders of finished stages, of whatever recipe."""
    return [path for path in sorted((root / "stages").iterdir()) if path.is_dir() and not _UNFINISHED.search(path.name)]
