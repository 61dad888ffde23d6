"""A stage: what determines it, where its files are, and whether they are what it wrote.

The key of a stage is a hash of its kind, its settings and the keys of what it needs, and of nothing else: two recipes
that agree on a stage share it, and a changed setting reruns exactly what depends on it.

Attempts at a stage work in folders of their own (`catto.pipeline.attempts`), and one of them becomes `<folder>`. Its
`done.json` records size and hash of every file, for two reasons. Damage is noticed: sizes whenever the stage is looked
at, bytes before another stage reads them. And a stage depends on what its needs hold, not on when they were made
(`digest_inputs`, stored as `content`): needs that were made again with the same result change nothing; another result
makes the stage stale, so that it runs again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic

from pydantic import BaseModel
from typing_extensions import TypeVar

from catto.errors import DataError
from catto.io.atomic import Seal, find_damage, seal_folder, write_text
from catto.io.text_files import read_json
from catto.methods import Method
from catto.records import content_hash

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

    def key_fields(self) -> dict[str, Any]:
        """Return the part of the settings that the key is a hash of, as JSON values."""
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            declared = self.__dataclass_fields__[name]
            if value == declared.default or not declared.compare:
                continue
            excluded = set(self.excluded.get(name, ()))
            excluded |= self._names_at_default(name, value)
            if isinstance(value, BaseModel):
                values[name] = value.model_dump(mode="json", exclude=excluded, serialize_as_any=True)
            elif isinstance(value, Method):
                values[name] = {part: entry for part, entry in vars(value).items() if part not in excluded}
            elif isinstance(value, StageSettings):
                values[name] = value.key_fields()
            else:
                values[name] = value
        return values

    def _names_at_default(self, field: str, block: Any) -> set[str]:
        """Return which `optional` names of the block in a field have their default; none where the block is None."""
        if block is None:
            return set()
        unset: set[str] = set()
        for name in self.optional.get(field, frozenset()):
            if isinstance(block, BaseModel):
                default = type(block).model_fields[name].default
            else:
                default = block.__dataclass_fields__[name].default
            if getattr(block, name) == default:
                unset.add(name)
        return unset


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
        return content_hash([VERSION, self.kind, self.settings.key_fields(), inputs])

    @property
    def folder(self) -> str:
        """Name of its folder: readable, and unique by the key."""
        return folder_name(self.name, self.key)

    @property
    def method(self) -> str | None:
        """The method that a training trains."""
        if self.kind != "train":
            return None
        settings: Any = self.settings
        return str(settings.name)


def folder_name(name: str, key: str) -> str:
    """Return the name of the folder of a stage.

    >>> folder_name("tau sft snli seed 0", "5f2c81d09ab34e67")
    'tau-sft-snli-seed-0-5f2c81d0'
    """
    readable = re.sub(r"[^A-Za-z0-9.+-]+", "-", name).strip("-")
    return f"{readable}-{key[:8]}"


def list_needed(goals: list[Stage]) -> list[Stage]:
    """Return the goals and all they need, each once (by key), what is needed first.

    >>> questions = Stage("questions", "questions snli", StageSettings())
    >>> [stage.kind for stage in list_needed([Stage("rows", "rows snli", StageSettings(), {"questions": questions})])]
    ['questions', 'rows']
    """
    stages: dict[str, Stage] = {}

    def visit(stage: Stage) -> None:
        if stage.key not in stages:
            for need in stage.needs.values():
                visit(need)
            stages[stage.key] = stage

    for goal in goals:
        visit(goal)
    return list(stages.values())


def stage_dir(root: Path, stage: Stage) -> Path:
    """Return the folder of a finished stage."""
    return root / "stages" / stage.folder


def resolve_choice(root: Path, stage: Stage, role: str = "model") -> Stage:
    """Return the training that a finished choice took, or with the role `validation` that training's predictions.

    A stage that is no choice is returned itself.
    """
    if stage.kind != "chosen":
        return stage
    choice = read_json(stage_dir(root, stage) / "choice.json")
    return stage.needs[choice[role]]


def list_folders_read(root: Path, need: Stage) -> Iterator[Path]:
    """Yield the folders that are read of a need: its own and, of a finished choice, the chosen model's."""
    yield stage_dir(root, need)
    if need.kind == "chosen" and stage_dir(root, need).exists():
        yield stage_dir(root, resolve_choice(root, need))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, _format_json(value))


def _format_json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


@dataclass(frozen=True)
class Work(Generic[S]):
    """What the function of a stage gets.

    Attributes:
        stage: The stage.
        root: The experiment's folder.
        out: Where the stage writes, and where it resumes from.
        progress: Called with the finished and total units, and a note.
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
        return stage_dir(self.root, self.stage.needs[role])

    def model(self, role: str = "model") -> Path:
        """Return the folder of a model that it needs: a training's own, or the chosen one."""
        return stage_dir(self.root, resolve_choice(self.root, self.stage.needs[role])) / "model"


# ---- what a finished stage holds ------------------------------------------------------------------------------------


def digest_inputs(root: Path, stage: Stage) -> str:
    """Hash what determines a stage: its name and settings, and the files of what it needs, however those came to be.

    For a choice the files of the model that it took count. Manifests describe how files were made and do not count.

    Raises:
        DataError: A need is not finished, or its done.json is damaged.
    """
    needed_files: dict[str, str] = {}  # by role, a hash of the files
    for role, need in stage.needs.items():
        files = read_done(stage_dir(root, resolve_choice(root, need)))["files"]
        results = {name: seal for name, seal in files.items() if not name.endswith(".manifest.json")}
        needed_files[role] = content_hash(results)
    return content_hash([VERSION, stage.kind, stage.name, stage.settings.key_fields(), needed_files])


def make_done(stage: Stage, folder: Path, inputs_digest: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the done.json of a stage whose files are in a folder.

    Args:
        stage: The stage.
        folder: The folder; its files are read and hashed.
        inputs_digest: Of `digest_inputs`.
        details: How the stage ran, such as its seconds.
    """
    needs = {role: need.key for role, need in stage.needs.items()}
    files = {name: list(seal) for name, seal in seal_folder(folder, UNSEALED).items()}
    done = {
        **details,
        "name": stage.name,
        "key": stage.key,
        "needs": needs,
        "content": inputs_digest,
        "files": files,
    }
    return {**done, "checksum": content_hash(done)}


def read_done(folder: Path) -> dict[str, Any]:
    """Read the done.json of a finished stage; one that is missing, unreadable or changed is a damaged stage."""
    path = folder / DONE
    if not path.is_file():
        raise DataError(folder, None, f"damaged: {DONE} is missing; {REPAIR}")
    status = path.stat()
    return _parse_done(path, status.st_mtime_ns, status.st_ino)


@cache
def _parse_done(path: Path, modified_ns: int, inode: int) -> dict[str, Any]:
    """Parse and check a done.json once: every stage that needs this one looks at it.

    The time and the inode only tell apart the files that were at this path one after the other.
    """
    is_whole = False
    with suppress(DataError, KeyError, TypeError, ValueError):
        record = dict(read_json(path))
        is_as_written = _format_json(record) == path.read_text(encoding="utf-8")
        checksum = record.pop("checksum")
        is_whole = is_as_written and checksum == content_hash(record)
    if not is_whole:
        raise DataError(path, None, f"damaged: not what was written; {REPAIR}")
    return record


def check_stage(folder: Path, *, contents: bool = False) -> None:
    """Raise DataError if a file of a finished stage is missing or has another size, or the folder is another stage's.

    Args:
        folder: The folder of the stage, or of an attempt that has its done.json.
        contents: Whether other bytes are an error too, and files that the stage did not write. A library may read such
            a file: an adapter next to a model is loaded with it.
    """
    done_record = read_done(folder)
    own_name = folder_name(done_record["name"], done_record["key"])
    published_name = _UNFINISHED.sub("", folder.name)  # an attempt that could not be renamed is checked too
    if published_name != own_name:
        raise DataError(folder, None, f"damaged: the folder holds the stage {own_name}; {REPAIR}")
    seals = {name: Seal(*seal) for name, seal in done_record["files"].items()}
    problem = find_damage(folder, seals, contents=contents)
    if problem is not None:
        raise DataError(folder, None, f"damaged: {problem}; {REPAIR}")
    if contents:
        unknown_file = _find_unknown_file(folder, seals)
        if unknown_file is not None:
            raise DataError(folder, None, f"damaged: the stage did not write {unknown_file}: delete it, or {REPAIR}")


def _find_unknown_file(folder: Path, seals: Mapping[str, Seal]) -> str | None:
    """Return the first file in a stage's folder that it did not write; None if there is none."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_of_system = path.name.startswith((".nfs", ".DS_Store", "._"))  # NFS and macOS leave these
        if not path.is_dir() and name not in seals and name not in UNSEALED and not is_of_system:
            return name
    return None


def is_done(root: Path, stage: Stage) -> bool:
    """Return whether the stage has finished with what its needs hold now. A damaged one raises DataError."""
    folder = stage_dir(root, stage)
    if not folder.exists():
        return False
    for need in stage.needs.values():
        if not all(path.exists() for path in list_folders_read(root, need)):
            return False
    check_stage(folder)
    return bool(read_done(folder)["content"] == digest_inputs(root, stage))


def list_finished(root: Path) -> list[Path]:
    """Return the folders of finished stages, of whatever recipe."""
    folders = sorted(path for path in (root / "stages").iterdir() if path.is_dir())
    return [folder for folder in folders if not _UNFINISHED.search(folder.name)]
