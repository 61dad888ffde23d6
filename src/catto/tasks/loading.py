"""Count how often each id was met without holding the ids.

Which file or hub split holds which rows.

Load one split of a task: find the rows, keep the splits apart, order the options, count what was left out.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from catto.files import kind, read_rows
from catto.problems import DataError, did_you_mean
from catto.records import SPLITS, Option, Question, Split
from catto.tasks.benchmarks import TASKS
from catto.tasks.rows import Cut, Files, Raw, Row, RowError, Task
from catto.tasks.splits import (
    Entry,
    content_id,
    content_key,
    draw,
    group_key,
    held_out,
    names_letters,
    parted,
    permutation,
    plan,
    rank,
)

# ---- occurrences


class Occurrences:
    """Exact counts in SQLite's unnamed temporary database: on disk beyond 2 MB, gone when closed."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA cache_size = -2048")
        self._db.execute("CREATE TABLE seen (name TEXT PRIMARY KEY, times INTEGER) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._db.close()

    def count(self, name: str) -> int:
        """How often the name was counted before."""
        if self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, 1)", (name,)).rowcount == 1:
            return 0
        (times,) = self._db.execute("SELECT times FROM seen WHERE name = ?", (name,)).fetchone()
        self._db.execute("UPDATE seen SET times = times + 1 WHERE name = ?", (name,))
        return int(times)


# ---- sources


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


# ---- loading


@dataclass
class LoadReport:
    """What became of the rows: `read` = `kept` + all of `dropped`. Complete once the questions have been read."""

    task: str
    split: Split
    seed: int
    licence: str
    source: str
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    gold: Counter[str] = field(default_factory=Counter)
    unshuffled: int = 0  # options that name letters stay where they are

    @property
    def counts(self) -> dict[str, int]:
        """All counts in one flat table, as a manifest holds them."""
        dropped = {f"dropped_{reason}": count for reason, count in sorted(self.dropped.items())}
        gold = {f"gold_{label}": count for label, count in sorted(self.gold.items())}
        return {"read": self.read, "kept": self.kept, "unshuffled": self.unshuffled, **dropped, **gold}


@dataclass
class Loaded:
    """An iterator over questions, with the report that fills as they are read."""

    questions: Iterator[Question]
    report: LoadReport

    def __iter__(self) -> Iterator[Question]:
        return self

    def __next__(self) -> Question:
        return next(self.questions)


def load(
    task: str | Task,
    split: Split,
    *,
    seed: int = 0,
    data_dir: str | Path | None = None,
    files: Files | None = None,
    limit: int | None = None,
) -> Loaded:
    """Load the questions of one split: from `files`, else from those found in `data_dir`, else from the hub.

    Training rows stream in the order of the file; with `limit`, and in validation and test, questions come in the
    seed's random order. Which questions come never depends on the order of the rows.
    """
    found = _checked(task, split, seed, limit)
    report = LoadReport(found.name, split, seed, found.licence, found.source)
    if found.generate is not None:
        if files is not None or data_dir is not None:
            raise ValueError(f"{found.name} is generated: it takes neither files nor data_dir")
        return Loaded(_counted(found.generate(split, limit, seed), report, reading=True), report)
    loading = _Loading(found, split, seed, limit, find(found, files, data_dir), report)
    return Loaded(_counted(loading.questions(), report), report)


def _checked(task: str | Task, split: Split, seed: int, limit: int | None) -> Task:
    if isinstance(task, str):
        if task not in TASKS:
            raise ValueError(f"task {task!r} is not one of {', '.join(TASKS)}{did_you_mean(task, TASKS)}")
        task = TASKS[task]
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    if seed not in task.seeds:
        raise ValueError(f"seed {seed} is not one of {task.name}'s split seeds {', '.join(map(str, task.seeds))}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit}: expected at least 1")
    return task


def _counted(questions: Iterator[Question], report: LoadReport, reading: bool = False) -> Iterator[Question]:
    for question in questions:
        report.read += reading
        report.kept += 1
        report.gold[question.gold] += 1
        yield question


@dataclass
class _Loading:
    """One load: what to read, how it is cut, and the report to fill."""

    task: Task
    split: Split
    seed: int
    limit: int | None
    source: Source
    report: LoadReport

    def __post_init__(self) -> None:
        available = self.source.available
        self.cut: Cut | None = plan(self.task, available)
        if self._origin(self.split) not in available:
            raise DataError(self.task.name, None, f"no file for {self.split}, only for {', '.join(available)}")
        self.report.files = self.source.names(self._origin(self.split))
        if self.cut is not None and self.cut is not self.task.cut:
            self.report.notes.append(f"no file for {', '.join(self.cut.shares)}: cut from the training file by group")

    def questions(self) -> Iterator[Question]:
        """Yield the questions of the split."""
        if self.split != "train":
            yield from self._drawn()
        elif self.limit is None:
            yield from self._training()
        else:
            yield from self._limited(self.limit)

    def _training(self) -> Iterator[Question]:
        pools = self._pools("validation", "test")
        held = held_out(pools, self.cut, self.task, self.seed)
        for entry, row in self._rows(self._origin("train"), self.report):
            if reason := held.reason(entry):
                self.report.dropped[reason] += 1
            else:
                yield self._question(entry.id, row)

    def _limited(self, limit: int) -> Iterator[Question]:
        kept = Counter[str]()

        def counted() -> Iterator[Question]:
            for question in self._training():
                kept["rows"] += 1
                yield question

        drawn = heapq.nsmallest(limit, counted(), key=lambda one: rank(self.task.name, "train", self.seed, one.id))
        self.report.dropped["not_drawn"] += kept["rows"] - len(drawn)
        yield from drawn

    def _drawn(self) -> Iterator[Question]:
        """Choose by index in one pass, then parse only the chosen rows in a second: the pool's texts are never held."""
        chosen = self._chosen()
        wanted = {entry.place: entry.id for entry in chosen}
        questions: dict[str, Question] = {}
        for place, (file, number, raw) in enumerate(self.source.rows(self._origin(self.split))):
            if place in wanted and isinstance(row := _parsed(self.task, raw, file, number), Row):
                questions[wanted[place]] = self._question(wanted[place], row)
        yield from (questions[entry.id] for entry in chosen)

    def _chosen(self) -> list[Entry]:
        dropped, origin = self.report.dropped, self._origin(self.split)
        pools = {origin: [entry for entry, _ in self._rows(origin, self.report)]}
        members = self._members(pools, self.split)
        dropped["cut_to_another_part"] += len(pools[origin]) - len(members)
        if self.split == "validation" and self._origin("test") in self.source.available:
            pools = self._pools("test") | pools
            test = {entry.content for entry in self._members(pools, "test")}
            before, members = len(members), [entry for entry in members if entry.content not in test]
            dropped["content_in_test"] += before - len(members)
        counts = [count for count in (self.task.sample, self.limit) if count is not None]
        chosen = draw(members, self.task, self.split, self.seed, min(counts, default=None))
        dropped["not_drawn"] += len(members) - len(chosen)
        self.report.dropped = +dropped
        return chosen

    def _origin(self, split: Split) -> Split:
        return self.cut.source if self.cut and split in self.cut.parts else split

    def _pools(self, *splits: Split) -> dict[Split, list[Entry]]:
        origins = dict.fromkeys(self._origin(split) for split in splits)
        return {origin: [entry for entry, _ in self._rows(origin)] for origin in origins}

    def _members(self, pools: Mapping[Split, list[Entry]], split: Split) -> list[Entry]:
        entries = pools[self._origin(split)]
        if self.cut is None or split not in self.cut.parts:
            return entries
        return [entry for entry, part in parted(entries, self.cut, self.task, self.seed) if part == split]

    def _rows(self, origin: Split, report: LoadReport | None = None) -> Iterator[tuple[Entry, Row]]:
        """Parse the rows of one file and give each its id; what is left out is counted where a report is given."""
        with Occurrences() as seen:
            for place, (file, number, raw) in enumerate(self.source.rows(origin)):
                row = _parsed(self.task, raw, file, number)
                if report is not None:
                    report.read += 1
                    report.dropped.update([row] if isinstance(row, str) else [])
                if isinstance(row, Row):
                    yield _entry(row, seen, place, file, number), row

    def _question(self, key: str, row: Row) -> Question:
        order = list(range(len(row.options)))
        if self.task.order == "shuffled unless letters are named" and names_letters(row.options):
            self.report.unshuffled += 1
        elif self.task.order != "fixed":
            order = permutation(key, len(row.options))
        labels = self.task.labels
        if row.options == labels:  # words that are their own labels keep them wherever they stand
            labels = tuple(labels[index] for index in order)
        options = tuple(Option(label=labels[place], text=row.options[index]) for place, index in enumerate(order))
        gold = labels[order.index(row.gold)]
        return Question(id=key, task=self.task.name, split=self.split, fields=row.fields, options=options, gold=gold)


def _parsed(task: Task, raw: Raw, file: str, number: int) -> Row | str:
    if task.parse is None:
        raise ValueError(f"{task.name} has no rows to parse")
    try:
        return task.parse(raw)
    except RowError as error:
        raise DataError(file, number, str(error)) from None


def _entry(row: Row, seen: Occurrences, place: int, file: str, number: int) -> Entry:
    """The source's id, which must be its only one, else a content hash and its occurrence number."""
    try:
        name = row.id if row.id is not None else content_id(row)
        before, content = seen.count(name), content_key(row)
        group = group_key(row) if row.group is not None else content
    except UnicodeEncodeError:
        raise DataError(file, number, "text is not valid Unicode (half of a surrogate pair)") from None
    if row.id is None:
        return Entry(place, f"{name}-{before}", group, content)
    if before:
        raise DataError(file, number, f"id {row.id!r} stands in an earlier row too")
    return Entry(place, row.id, group, content)
