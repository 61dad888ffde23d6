"""A stage: what determines its result, where its files are, and whether they are unchanged.

The key of a stage is a hash of its kind, its settings and the keys of the stages it needs, and of nothing else. Two
recipes that agree on a stage share it, and a changed setting reruns exactly what depends on it.

Attempts at a stage work in folders of their own (`catto.pipeline.attempts`), and one of them becomes `<folder>`. Its
`done.json` records the size and hash of every file, for two reasons:

- To detect damage. Sizes are compared whenever the state of the stage is checked, hashes before another stage reads
  the files.
- To detect stale stages. `content` in done.json is the hash of the stage's own settings and of the files of its needs
  (`digest_inputs`). If a need is run again with the same result, nothing changes; with a different result, the stage
  is stale and runs again.
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

# Increased when the meaning of a stage changes, so that folders from before are not reused.
VERSION = 3
# Files about how a stage ran are not sealed; all others are its result.
DONE = "done.json"
LOG = "log.txt"
ATTEMPT_FILE = "attempt.json"
ATTEMPT_LOCK = "attempt.lock"
PROGRESS = "progress.json"
UNSEALED = frozenset({DONE, LOG, ATTEMPT_FILE, ATTEMPT_LOCK, PROGRESS, ".lock", "seconds.json", "job.json"})
REPAIR = "--repair runs the stage again"
_UNFINISHED = re.compile(r"\.(part(-[^.]*)?(\.half)?|stale-[^.]*|damaged)$")

# ---- what determines a stage ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageSettings:
    """The settings that determine a stage of one kind.

    A field is part of the stage's key unless it has its default value or is declared with `compare=False`. If the value
    of a field is a block of settings, such as a block of the recipe, each setting in it is part of the key unless

    - `excluded` names it;
    - `optional` names it and it has its default value. Such a setting was added after keys had been stored, which its
      default must not change.

    So a new setting in a block changes keys until `excluded` or `optional` names it.

    Attributes:
        excluded: By the name of a field, the settings in its block that are never part of the key.
        optional: By the name of a field, the settings in its block that are part of the key only if they differ from
            their default.
    """

    excluded: ClassVar[Mapping[str, frozenset[str]]] = {}
    optional: ClassVar[Mapping[str, frozenset[str]]] = {}

    def key_fields(self) -> dict[str, Any]:
        """Return the settings that are hashed into the key, by name. All values can be written as JSON."""
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            declaration = self.__dataclass_fields__[name]
            is_in_key = value != declaration.default and declaration.compare
            if not is_in_key:
                continue
            excluded = set(self.excluded.get(name, ()))
            excluded |= self._names_at_default(name, value)
            if isinstance(value, BaseModel):
                values[name] = value.model_dump(mode="json", exclude=excluded, serialize_as_any=True)
            elif isinstance(value, Method):
                values[name] = {column: entry for column, entry in vars(value).items() if column not in excluded}
            elif isinstance(value, StageSettings):
                values[name] = value.key_fields()
            else:
                values[name] = value
        return values

    def _names_at_default(self, field: str, block: Any) -> set[str]:
        """Return the `optional` settings that have their default value in the block of a field.

        If there is no block (None), there are none.
        """
        if block is None:
            return set()
        at_default: set[str] = set()
        for name in self.optional.get(field, frozenset()):
            if isinstance(block, BaseModel):
                default = type(block).model_fields[name].default
            else:
                default = block.__dataclass_fields__[name].default
            if getattr(block, name) == default:
                at_default.add(name)
        return at_default


# ---- stages and their folders ---------------------------------------------------------------------------------------

S = TypeVar("S", bound=StageSettings, default=Any)


@dataclass(frozen=True)
class Stage(Generic[S]):
    """One node of the graph.

    Attributes:
        kind: The kind of stage, a key of `STAGE_KINDS`.
        name: A readable name.
        settings: What determines the result, besides the needs.
        needs: The stages whose files this one reads, by their role.

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
        keys_of_needs = {role: need.key for role, need in self.needs.items()}
        return content_hash([VERSION, self.kind, self.settings.key_fields(), keys_of_needs])

    @property
    def folder(self) -> str:
        """Name of its folder: the readable name, made unique by the key."""
        return folder_name(self.name, self.key)

    @property
    def method(self) -> str | None:
        """The method of a training stage; None for other kinds."""
        if self.kind != "train":
            return None
        settings: Any = self.settings
        return str(settings.name)


def folder_name(name: str, key: str) -> str:
    """Return the folder name of the stage with this name and key.

    >>> folder_name("tau sft snli seed 0", "5f2c81d09ab34e67")
    'tau-sft-snli-seed-0-5f2c81d0'
    """
    readable = re.sub(r"[^A-Za-z0-9.+-]+", "-", name).strip("-")
    return f"{readable}-{key[:8]}"


def list_needed(goals: list[Stage]) -> list[Stage]:
    """Return the goals and all stages they need, directly or through other stages.

    Each stage occurs once, after the stages that it needs. Stages with the same key are the same stage.

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
    """Return the stage that a finished choice of a learning rate selected. Any other stage is returned unchanged.

    Args:
        root: The experiment's folder.
        stage: The choice, or any other stage.
        role: `model` for the selected training, `validation` for its validation predictions.
    """
    if stage.kind != "chosen":
        return stage
    choice = read_json(stage_dir(root, stage) / "choice.json")
    return stage.needs[choice[role]]


def list_folders_read(root: Path, need: Stage) -> Iterator[Path]:
    """Yield the folders to read for a need: its own and, if it is a finished choice, that of the selected model."""
    yield stage_dir(root, need)
    if need.kind == "chosen" and stage_dir(root, need).exists():
        yield stage_dir(root, resolve_choice(root, need))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, atomically."""
    write_text(path, _format_json(value))


def _format_json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True)


@dataclass(frozen=True)
class Work(Generic[S]):
    """The argument of the function that runs a stage.

    Attributes:
        stage: The stage.
        root: The experiment's folder.
        out: The folder to write to; when the stage resumes, it has the files of the earlier attempt.
        progress: Called with the finished units, the total units and a note.
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
        """Return the folder of the need with this role."""
        return stage_dir(self.root, self.stage.needs[role])

    def model(self, role: str = "model") -> Path:
        """Return the model's folder of the need with this role: a trained model, or the one that a choice selected."""
        return stage_dir(self.root, resolve_choice(self.root, self.stage.needs[role])) / "model"


# ---- the files of a finished stage ----------------------------------------------------------------------------------


def digest_inputs(root: Path, stage: Stage) -> str:
    """Hash the name and settings of a stage, and the files of its needs.

    Unlike the key, this hash does not depend on the settings of the needs, only on their files. If a need is the choice
    of a learning rate, the files of the model that it selected are hashed. Manifests are left out: they describe how
    files were made.

    Returns:
        The hash, which done.json stores as `content`.

    Raises:
        DataError: A need is not finished, or its done.json is damaged.
    """
    digests: dict[str, str] = {}  # by role, a hash of the files of a need
    for role, need in stage.needs.items():
        files = read_done(stage_dir(root, resolve_choice(root, need)))["files"]
        results = {name: seal for name, seal in files.items() if not name.endswith(".manifest.json")}
        digests[role] = content_hash(results)
    return content_hash([VERSION, stage.kind, stage.name, stage.settings.key_fields(), digests])


def make_done(stage: Stage, folder: Path, inputs_digest: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a stage that has just run.

    Args:
        stage: The stage.
        folder: The folder with the result of the stage. All its files are read and hashed, except those in `UNSEALED`.
        inputs_digest: What `digest_inputs` returned for the stage.
        details: How the stage ran, such as its seconds.

    Returns:
        The content of done.json. Its field `content` is `inputs_digest`, by which a later run sees whether an input has
        changed. `checksum` is the hash of all other fields.
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
    """Read the done.json of a finished stage; raise DataError if it is missing, unreadable or was changed."""
    path = folder / DONE
    if not path.is_file():
        raise DataError(folder, None, f"damaged: {DONE} is missing; {REPAIR}")
    status = path.stat()
    return _parse_done(path, status.st_mtime_ns, status.st_ino)


def read_inputs_digest(folder: Path) -> str:
    """Return what `digest_inputs` returned when a finished stage was run. Errors as in `read_done`."""
    return str(read_done(folder)["content"])


@cache
def _parse_done(path: Path, modified_ns: int, inode: int) -> dict[str, Any]:
    """Parse and verify a done.json. The result is cached, since every stage that needs this one reads it.

    The modification time and the inode are not used: they are in the cache's key, so that a new file is parsed anew.
    """
    is_intact = False
    with suppress(DataError, KeyError, TypeError, ValueError):
        record = dict(read_json(path))
        is_as_written = _format_json(record) == path.read_text(encoding="utf-8")
        checksum = record.pop("checksum")
        is_intact = is_as_written and checksum == content_hash(record)
    if not is_intact:
        raise DataError(path, None, f"damaged: not what was written; {REPAIR}")
    return record


def check_stage(folder: Path, *, contents: bool = False) -> None:
    """Raise DataError if a finished stage is damaged.

    A stage is damaged if done.json or a file listed in it is missing or was changed, or if the name of the folder is
    that of a different stage. Of the listed files, only the sizes are compared unless `contents` is true.

    Args:
        folder: The folder of the stage, or of an attempt that has a done.json.
        contents: Whether to compare hashes too, and to refuse files that the stage did not write. A library may read
            such files: it would load an adapter in the folder of a model together with the model.

    Raises:
        DataError: The stage is damaged; the message says how.
    """
    done_record = read_done(folder)
    expected_name = folder_name(done_record["name"], done_record["key"])
    published_name = _UNFINISHED.sub("", folder.name)  # an attempt that was not renamed can be checked too
    if published_name != expected_name:
        raise DataError(folder, None, f"damaged: this is the folder of the stage {expected_name}; {REPAIR}")
    seals = {name: Seal(*seal) for name, seal in done_record["files"].items()}
    problem = find_damage(folder, seals, contents=contents)
    if problem is not None:
        raise DataError(folder, None, f"damaged: {problem}; {REPAIR}")
    if contents:
        unknown_file = _find_unknown_file(folder, seals)
        if unknown_file is not None:
            raise DataError(folder, None, f"damaged: the stage did not write {unknown_file}: delete it, or {REPAIR}")


def _find_unknown_file(folder: Path, seals: Mapping[str, Seal]) -> str | None:
    """Return the first file in a stage's folder that the stage did not write; None if there is none."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_known = name in seals or name in UNSEALED
        is_from_system = path.name.startswith((".nfs", ".DS_Store", "._"))  # NFS and macOS create these
        if not path.is_dir() and not is_known and not is_from_system:
            return name
    return None


def is_done(root: Path, stage: Stage) -> bool:
    """Return whether the stage has a result for the current files of its needs. Raise DataError if it is damaged."""
    folder = stage_dir(root, stage)
    if not folder.exists():
        return False
    for need in stage.needs.values():
        if not all(path.exists() for path in list_folders_read(root, need)):
            return False
    check_stage(folder)
    return read_inputs_digest(folder) == digest_inputs(root, stage)


def list_finished(root: Path) -> list[Path]:
    """Return the folders of the finished stages of all recipes."""
    folders = sorted(path for path in (root / "stages").iterdir() if path.is_dir())
    return [folder for folder in folders if not _UNFINISHED.search(folder.name)]
