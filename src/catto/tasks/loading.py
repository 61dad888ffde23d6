"""Load one split of a task: find the rows, keep the splits apart, order the options, count what was left out."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from catto.files import Rows, kind, read_hub, read_lines, read_rows
from catto.problems import DataError, did_you_mean, locating
from catto.recipe import is_task_file
from catto.records import SPLITS, Option, Question, Split, content_hash
from catto.tasks import splits
from catto.tasks.benchmarks import TASKS, Files, Task
from catto.tasks.fields import ANSWER, Raw
from catto.tasks.splits import Cut, Draft, Entry, permutation

# Names of files in a folder, where no pattern of the task's own matches.
_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("*train*",),
    "validation": ("*validation*", "*dev*", "*val*"),
    "test": ("*test*",),
}
# Held-out questions that are cut from the training file where a release comes without a file for them.
_FROM_TRAIN = 0.1


@dataclass(frozen=True)
class RowSource:
    """Where the rows of a task are.

    parts: for each split with rows of its own, the name of every source, its file and the file of its answers; a source
    without a file is the hub's.
    """

    task: Task
    parts: Mapping[Split, Sequence[tuple[str, Path | None, Path | None]]]

    @property
    def files(self) -> list[Path]:
        """All files of this machine that are read."""
        return [path for part in self.parts.values() for _, *paths in part for path in paths if path is not None]

    @property
    def available(self) -> tuple[Split, ...]:
        """The splits that have rows of their own."""
        return tuple(split for split in SPLITS if self.parts.get(split))

    def rows(self, split: Split) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Yield (name, row number, fields)."""
        task, trouble = self.task, "{} (files: or data_dir: read local copies)"
        for name, path, answers in self.parts[split]:
            if path is None:
                hub = read_hub(name, trouble, task.hub or "", task.hub_splits[split], task.config, task.revision)
                rows: Rows = iter(enumerate(hub, 1))
            else:
                rows = read_rows(path, task.columns)
            if answers is not None:
                rows = _answered(rows, name, answers)
            yield from ((name, number, raw) for number, raw in rows)


def find(task: Task, files: Files | None, data_dir: str | Path | None) -> RowSource:
    """Settle where the rows are: the files given, those found in the folder, else the hub."""
    files = files if files is not None else task.files
    paths: dict[Split, Sequence[Path]] = {}
    answers: dict[Split, Sequence[Path]] = {}
    if files is not None:
        paths, answers = _matches(files), _matches(task.answers or {})
        for split, lines in answers.items():
            if len(lines) != len(paths.get(split, ())):
                raise ValueError(f"answers: {len(lines)} files for the {len(paths.get(split, ()))} of {split}")
    elif data_dir is None:
        if task.hub is None:
            raise ValueError(f"{task.name}: files or data_dir is needed")
        at = f"{task.hub}@{task.revision or 'main'}"
        return RowSource(task, {split: [(f"{at}:{name}", None, None)] for split, name in task.hub_splits.items()})
    else:
        folder = Path(data_dir)
        if not folder.is_dir():
            raise DataError(folder, None, "no such folder")
        # What a task cuts itself is not searched: CommonsenseQA's own test file has no answers.
        cut_away = set(task.cut.parts) - {task.cut.source} if task.cut else set()
        for split in SPLITS:
            for pattern in (*task.patterns.get(split, ()), *_NAMES[split]) if split not in cut_away else ():
                if matches := sorted(path for path in folder.glob(pattern) if path.is_file() and kind(path)):
                    paths[split] = matches
                    break
        if not paths:
            looked = "looked for names such as *train*, *dev*, *test*"
            raise DataError(folder, None, f"no file of {task.name} here ({looked})")
    pairs = {split: zip_longest(read, answers.get(split, ())) for split, read in paths.items()}
    return RowSource(task, {split: [(str(path), path, lines) for path, lines in part] for split, part in pairs.items()})


def _matches(files: Files) -> dict[Split, Sequence[Path]]:
    """The files of each split's paths and globs; each must match one."""
    by_split: dict[Split, Sequence[Path]] = {}
    for split, value in files.items():
        if split not in SPLITS:
            raise ValueError(f"files: {split!r} is not one of {', '.join(SPLITS)}")
        for item in [value] if isinstance(value, str | Path) else value:
            path = Path(item)
            matches = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not (matches := [match for match in matches if match.is_file()]):
                raise DataError(path, None, "expected a file, got a folder" if path.is_dir() else "no such file")
            by_split[split] = [*by_split.get(split, ()), *matches]
    return by_split


def _answered(rows: Rows, name: str, answers: Path) -> Rows:
    """Add to each row its line of the file of answers."""
    lines, count = [line for _, line in read_lines(answers)], 0
    for count, (number, raw) in enumerate(rows, 1):
        if count <= len(lines):
            yield number, {**raw, ANSWER: lines[count - 1]}
    if count != len(lines):
        raise DataError(answers, None, f"{len(lines)} answers, expected {count}, one for each row of {name}")


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
    unshuffled: int = 0  # options that name letters keep their order

    @property
    def counts(self) -> dict[str, int]:
        """All counts in one flat table, as a manifest holds them."""
        dropped = {f"dropped_{reason}": count for reason, count in sorted(self.dropped.items())}
        gold = {f"gold_{label}": count for label, count in sorted(self.gold.items())}
        return {"read": self.read, "kept": self.kept, "unshuffled": self.unshuffled, **dropped, **gold}


@dataclass
class Loaded:
    """An iterator over questions, with the report that fills as they are read.

    `len` gives the number of all questions, those already taken included. It reads the rest into memory.
    """

    questions: Iterator[Question]
    report: LoadReport
    _read_ahead: deque[Question] = field(default_factory=deque, repr=False)

    def __iter__(self) -> Iterator[Question]:
        return self

    def __next__(self) -> Question:
        if self._read_ahead:
            return self._read_ahead.popleft()
        return self._read_one()

    def __len__(self) -> int:
        while True:
            try:
                self._read_ahead.append(self._read_one())
            except StopIteration:
                return self.report.kept

    def _read_one(self) -> Question:
        question = next(self.questions)
        self.report.kept += 1
        self.report.gold[question.gold] += 1
        return question


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

    task: a name of TASKS, a task, or a YAML file that describes a file of one's own.

    Training rows stream in the order of the file; with `limit`, and in validation and test, questions come in the
    seed's random order. Which questions come never depends on the order of the rows.

    >>> loaded = load("witnesses", "test", limit=3)
    >>> len(list(loaded)), loaded.report.kept
    (3, 3)
    """
    if isinstance(task, str):
        if is_task_file(task):
            from catto.recipe_file import load_task  # imports YAML
            from catto.tasks.own_file import own_task, task_name  # imports this module

            task = own_task(task_name(task), load_task(task))
        elif task not in TASKS:
            raise ValueError(f"task {task!r} is not one of {', '.join(TASKS)}{did_you_mean(task, TASKS)}")
        else:
            task = TASKS[task]
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    if task.seeds and seed not in task.seeds:
        raise ValueError(f"seed {seed} is not one of {task.name}'s split seeds {', '.join(map(str, task.seeds))}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit}: expected at least 1")
    report = LoadReport(task.name, split, seed, task.licence, task.source)
    generate = task.generate
    if generate is None:
        source = find(task, files, data_dir)
        if task.maps and task.maps[0].style is None:
            known, doubt = task.maps[0].settled(chain.from_iterable(map(source.rows, source.available)))
            if doubt is not None:
                raise doubt
            task = replace(task, maps=(known,))
        loading = _Loading(task, split, seed, limit, source, report)
        return Loaded(loading.training() if split == "train" else loading.held_out(), report)
    if files is not None or data_dir is not None:
        raise ValueError(f"{task.name} is generated: it takes neither files nor data_dir")

    def generated() -> Iterator[Question]:
        for question in generate(split, limit, seed):
            report.read += 1
            yield question

    return Loaded(generated(), report)


@dataclass
class _Loading:
    """One load: what to read, how it is cut, and the report to fill."""

    task: Task
    split: Split
    seed: int
    limit: int | None
    source: RowSource
    report: LoadReport
    cut: Cut | None = None  # None: every split there is has its own file
    readers: dict[str, Callable[[Raw], Draft | str]] = field(default_factory=dict)  # by file

    def __post_init__(self) -> None:
        task, available = self.task, self.source.available
        missing = [split for split in SPLITS[1:] if split not in available]
        if task.cut and task.cut.source in available and set(task.cut.parts) - {task.cut.source} - set(available):
            self.cut = task.cut
            if task.files is not None and self.split in task.cut.shares:
                whole = f"{self.split}=FILE takes a whole file"
                self.report.notes.append(f"{self.split} is cut from the one file by seed {self.seed}; {whole}")
        elif "train" in available and missing:
            self.cut = Cut("train", dict.fromkeys(missing, _FROM_TRAIN), rest="train", most=task.sample)
            self.report.notes.append(f"no file for {', '.join(missing)}: cut from the training file by group")
        if self._origin(self.split) not in available:
            raise DataError(task.name, None, f"no file for {self.split}, only for {', '.join(available)}")
        self.report.files = [name for name, *_ in self.source.parts[self._origin(self.split)]]

    def training(self) -> Iterator[Question]:
        """Yield the training questions; with a limit the first ones in the seed's random order."""
        if self.limit is None:
            yield from self._streamed()
            return
        order = self.task.name, "train", self.seed
        drawn = heapq.nsmallest(self.limit, self._streamed(), key=lambda question: splits.digest(*order, question.id))
        self.report.dropped["not_drawn"] += self.report.read - self.report.dropped.total() - len(drawn)
        yield from drawn

    def _streamed(self) -> Iterator[Question]:
        origins = dict.fromkeys(self._origin(split) for split in SPLITS[1:])
        pools = {origin: [entry for entry, _ in self._rows(origin)] for origin in origins}
        reason_against = splits.held_out(pools, self.cut, self.task.name, self.task.seeds or (self.seed,), self.seed)
        for entry, draft in self._rows(self._origin("train"), self.report):
            if reason := reason_against(entry):
                self.report.dropped[reason] += 1
            else:
                yield self._question(entry.id, draft)

    def held_out(self) -> Iterator[Question]:
        """Yield the questions of validation or test.

        They are chosen by index in one pass and only the chosen rows are parsed in a second: the texts of the whole
        file are never held.
        """
        dropped, origin = self.report.dropped, self._origin(self.split)
        entries = [entry for entry, _ in self._rows(origin, self.report)]
        members = self._part(entries, self.split)
        dropped["cut_to_another_part"] += len(entries) - len(members)
        test_origin = self._origin("test")
        if self.split == "validation" and test_origin in self.source.available:
            others = entries if test_origin == origin else [entry for entry, _ in self._rows(test_origin)]
            test = {entry.content for entry in self._part(others, "test")}
            clean = [entry for entry in members if entry.content not in test]
            dropped["content_in_test"] += len(members) - len(clean)
            members = clean
        chosen = splits.draw(members, self.task.name, self.split, self.seed, self.limit or self.task.sample)
        dropped["not_drawn"] += len(members) - len(chosen)
        self.report.dropped = +dropped
        wanted = {entry.place: entry.id for entry in chosen}
        questions: dict[str, Question] = {}
        for place, (file, number, raw) in enumerate(self.source.rows(origin)):
            if place in wanted and isinstance(draft := self._parsed(file, number, raw), Draft):
                questions[wanted[place]] = self._question(wanted[place], draft)
        yield from (questions[entry.id] for entry in chosen)

    def _origin(self, split: Split) -> Split:
        """The split whose file holds the rows of `split`."""
        return self.cut.source if self.cut and split in self.cut.parts else split

    def _part(self, entries: list[Entry], split: Split) -> list[Entry]:
        """The entries of a file that fall to the split."""
        if self.cut is None or split not in self.cut.parts:
            return entries
        parts = splits.assign(entries, self.cut, self.task.name, self.seed)
        return [entry for entry in entries if parts[entry.group] == split]

    def _rows(self, origin: Split, report: LoadReport | None = None) -> Iterator[tuple[Entry, Draft]]:
        """Parse the rows of one file and give each its id; what is left out is counted where a report is given.

        The id is the source's, which must be its only one, else a content hash and the number of its occurrence.
        """
        seen: Counter[str] = Counter()
        for place, (file, number, raw) in enumerate(self.source.rows(origin)):
            draft = self._parsed(file, number, raw)
            if report is not None:
                report.read += 1
                report.dropped.update([draft] if isinstance(draft, str) else [])
            if isinstance(draft, str):
                continue
            name = draft.id if draft.id is not None else content_hash([draft.fields, draft.options, draft.gold])
            content = splits.content_key(draft)
            group = content if draft.group is None else splits.digest("group", splits.normalised(draft.group))[:16]
            seen[name] += 1
            if draft.id is None:
                name = f"{name}-{seen[name] - 1}"
            elif seen[name] > 1:
                raise DataError(file, number, f"id {name!r} occurs in an earlier row too")
            yield Entry(place, name, group, content), draft

    def _parsed(self, file: str, number: int, raw: dict[str, Any]) -> Draft | str:
        if file not in self.readers:
            self.readers[file] = self.task.reader(raw)
        with locating(file, number):
            return self.readers[file](raw)

    def _question(self, key: str, draft: Draft) -> Question:
        """The question with its options in their final order."""
        order = list(range(len(draft.options)))
        if self.task.order == "shuffled unless letters are named" and splits.names_letters(draft.options):
            self.report.unshuffled += 1
        elif self.task.order != "fixed":
            order = permutation(key, len(draft.options))
        labels = self.task.labels
        if draft.options == labels:  # words that are their own labels keep them wherever they are listed
            labels = tuple(labels[index] for index in order)
        options = tuple(Option(label=labels[place], text=draft.options[index]) for place, index in enumerate(order))
        gold = labels[order.index(draft.gold)]
        return Question(id=key, task=self.task.name, split=self.split, fields=draft.fields, options=options, gold=gold)
