"""Which file or hub split holds which rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catto.problems import DataError
from catto.records import SPLITS, Split
from catto.tasks.readers import kind, read_rows
from catto.tasks.rows import Files, Task

_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("*train*",),
    "validation": ("*validation*", "*dev*", "*val*"),
    "test": ("*test*",),
}

Located = Iterator[tuple[str, int, dict[str, Any]]]


@dataclass(frozen=True)
class LocalFiles:
    """Rows in files of this machine: split -> paths in order."""

    paths: Mapping[Split, tuple[Path, ...]]
    columns: tuple[str, ...] | None

    @property
    def available(self) -> tuple[Split, ...]:
        """The splits that have a file."""
        return tuple(split for split in SPLITS if self.paths.get(split))

    def names(self, split: Split) -> list[str]:
        """Where the rows of a split are read from, for the report."""
        return [str(path) for path in self.paths[split]]

    def rows(self, split: Split) -> Located:
        """Yield (file, row number, fields)."""
        for path in self.paths[split]:
            for number, raw in read_rows(path, self.columns):
                yield str(path), number, raw


@dataclass(frozen=True)
class HubSplits:
    """Rows of a dataset on the hub, read through `datasets`, which caches them on disk."""

    task: Task

    @property
    def available(self) -> tuple[Split, ...]:
        """The splits that the dataset has."""
        return tuple(split for split in SPLITS if split in self.task.hub_splits)

    def names(self, split: Split) -> list[str]:
        """Where the rows of a split are read from, for the report."""
        return [f"{self.task.hub}@{self.task.revision or 'main'}:{self.task.hub_splits[split]}"]

    def rows(self, split: Split) -> Located:
        """Yield (hub name, row number, fields)."""
        (name,) = self.names(split)
        for number, raw in enumerate(self._dataset(name, self.task.hub_splits[split]), 1):
            yield name, number, raw

    def _dataset(self, name: str, split: str) -> Any:
        try:
            import datasets
        except ImportError:
            raise DataError(name, None, "reading the hub needs datasets: pip install 'catto[train]'") from None
        try:
            return datasets.load_dataset(self.task.hub, self.task.config, split=split, revision=self.task.revision)
        except Exception as error:  # whatever the network, the cache or the hub raises is one line to the user
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(name, None, f"{reason} (files: or data_dir: read local copies)") from None


Source = LocalFiles | HubSplits


def find(task: Task, files: Files | None, data_dir: str | Path | None) -> Source:
    """Settle where the rows are: the files given, those found in the folder, else the hub."""
    files = files if files is not None else task.files
    if files is not None:
        if unknown := [split for split in files if split not in SPLITS]:
            raise ValueError(f"files: {unknown[0]!r} is not one of {', '.join(SPLITS)}")
        return LocalFiles({split: _expand(value) for split, value in files.items()}, task.columns)
    if data_dir is not None:
        return _search(task, Path(data_dir))
    if task.hub is None:
        raise ValueError(f"{task.name}: files or data_dir is needed")
    return HubSplits(task)


def _expand(value: str | Path | Sequence[str | Path]) -> tuple[Path, ...]:
    """A path, a glob, or a list of either; none may come to nothing."""
    found: list[Path] = []
    for item in [value] if isinstance(value, str | Path) else value:
        path = Path(item)
        matches = [path] if path.is_file() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        matches = [match for match in matches if match.is_file()]
        if not matches:
            raise DataError(str(item), None, "no such file")
        found.extend(matches)
    return tuple(found)


def _search(task: Task, folder: Path) -> LocalFiles:
    if not folder.is_dir():
        raise DataError(folder, None, "no such folder")
    # What a task cuts itself is not searched: CommonsenseQA's own test file has no answers.
    cut_away = set(task.cut.parts) - {task.cut.source} if task.cut else set()
    paths = {split: _matching(folder, task.patterns.get(split, ()) + _NAMES[split]) for split in SPLITS}
    paths = {split: found for split, found in paths.items() if found and split not in cut_away}
    if not paths:
        raise DataError(folder, None, f"no file of {task.name} here (looked for names such as *train*, *dev*, *test*)")
    return LocalFiles(paths, task.columns)


def _matching(folder: Path, patterns: tuple[str, ...]) -> tuple[Path, ...]:
    """The files of the first pattern that matches any, in the order of their names."""
    for pattern in patterns:
        if found := sorted(path for path in folder.glob(pattern) if path.is_file() and kind(path)):
            return tuple(found)
    return ()
