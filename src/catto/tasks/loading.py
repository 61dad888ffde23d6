"""Load one split of a task: find the rows, keep the splits disjoint, order the options, count what was left out."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from catto.errors import DataError, data_errors_at, did_you_mean
from catto.io.tables import Rows, read_hub, read_rows
from catto.io.text_files import find_suffix, read_lines
from catto.recipe.settings import is_task_file
from catto.records import SPLITS, Option, Question, Split, content_hash
from catto.tasks import splits
from catto.tasks.benchmarks import TASKS, Files, QuestionGenerator, RowParser, Task
from catto.tasks.fields import ANSWER, FieldMap, SourceRow
from catto.tasks.splits import Cut, Draft, SplitEntry

# File names to look for in a folder if none of the task's own patterns matches.
_USUAL_FILE_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("*train*",),
    "validation": ("*validation*", "*dev*", "*val*"),
    "test": ("*test*",),
}
_HELD_OUT: tuple[Split, ...] = ("validation", "test")
# Share of the training file that is held out for validation if there is no validation file; the same for test.
_HELD_OUT_SHARE = 0.1
_HUB_PROBLEM = "{} (files: or data_dir: read local copies)"


# ---- where the rows are ---------------------------------------------------------------------------------------------


class RowFile(NamedTuple):
    """One file of rows, or one split of a hub dataset.

    Attributes:
        name: Its name in reports and errors.
        path: The file; None if the rows come from the hub.
        answers: A file with one line per row, the row's answer; None if the rows contain their answers.
    """

    name: str
    path: Path | None = None
    answers: Path | None = None


@dataclass(frozen=True)
class RowSource:
    """Where the rows of a task are.

    Attributes:
        task: The task.
        row_files: The files, or hub splits, of each split that has rows of its own.
    """

    task: Task
    row_files: Mapping[Split, Sequence[RowFile]]

    @property
    def files(self) -> list[Path]:
        """All local files that are read."""
        paths = []
        for files_of_split in self.row_files.values():
            for row_file in files_of_split:
                if row_file.path is not None:
                    paths.append(row_file.path)
                if row_file.answers is not None:
                    paths.append(row_file.answers)
        return paths

    @property
    def available(self) -> tuple[Split, ...]:
        """The splits that have rows of their own."""
        return tuple(split for split in SPLITS if self.row_files.get(split))

    def rows(self, split: Split) -> Iterator[SourceRow]:
        """Yield the rows of a split, file by file."""
        for row_file in self.row_files[split]:
            if row_file.path is None:  # a split of a hub dataset
                rows = self._read_hub_rows(row_file.name, split)
            else:
                rows = read_rows(row_file.path, self.task.columns)
            if row_file.answers is not None:
                rows = _add_answers(rows, row_file.name, row_file.answers)
            for number, raw in rows:
                yield SourceRow(row_file.name, number, raw)

    def _read_hub_rows(self, name: str, split: Split) -> Rows:
        task = self.task
        rows = read_hub(name, _HUB_PROBLEM, task.hub or "", task.hub_splits[split], task.config, task.revision)
        return iter(enumerate(rows, 1))


def find_rows(task: Task, files: Files | None, data_dir: str | Path | None) -> RowSource:
    """Find the rows of a task: in `files`, else in the task's own files, else in `data_dir`, else on the hub.

    Args:
        task: The task.
        files: Split -> a path or glob, or several; None if the caller names no files.
        data_dir: A folder that is searched for files of the task; None if the caller names no folder.

    Returns:
        Where the rows of each split are. Nothing has been read yet.

    Raises:
        DataError: A path or glob matches no file, or the folder has no file for the task.
        ValueError: `files` names an unknown split, a split has more or fewer answer files than question files, or there
            is no source at all.
    """
    if files is None:
        files = task.files
    if files is not None:
        question_paths = _expand_paths(files)
        answer_paths = _expand_paths(task.answers or {})
        return RowSource(task, _pair_with_answers(question_paths, answer_paths))
    if data_dir is not None:
        return RowSource(task, _search_folder(task, Path(data_dir)))
    if task.hub is None:
        raise ValueError(f"{task.name}: files or data_dir is needed")
    dataset = f"{task.hub}@{task.revision or 'main'}"
    row_files = {}
    for split, hub_split in task.hub_splits.items():
        row_files[split] = [RowFile(f"{dataset}:{hub_split}")]
    return RowSource(task, row_files)


def _expand_paths(files: Files) -> dict[Split, list[Path]]:
    """Return the files that each split's paths and globs match; each path or glob must match at least one file."""
    paths: dict[Split, list[Path]] = {}
    for split, value in files.items():
        if split not in SPLITS:
            raise ValueError(f"files: {split!r} is not one of {', '.join(SPLITS)}")
        patterns = [value] if isinstance(value, str | Path) else value
        for pattern in patterns:
            paths.setdefault(split, []).extend(_match_files(Path(pattern)))
    return paths


def _match_files(pattern: Path) -> list[Path]:
    if pattern.exists():
        matches = [pattern]
    else:
        root = Path(pattern.anchor)  # `glob` accepts only relative patterns
        matches = sorted(root.glob(str(pattern.relative_to(pattern.anchor))))
    files = [match for match in matches if match.is_file()]
    if not files:
        problem = "expected a file, got a folder" if pattern.is_dir() else "no such file"
        raise DataError(pattern, None, problem)
    return files


def _pair_with_answers(
    question_files: Mapping[Split, Sequence[Path]], answer_files: Mapping[Split, Sequence[Path]]
) -> dict[Split, list[RowFile]]:
    """Pair the first question file of a split with its first answer file, the second with the second, and so on.

    Args:
        question_files: Split -> its question files.
        answer_files: Split -> its answer files, for splits whose rows do not contain the answers.

    Returns:
        The files of each split. In a split without answer files, `RowFile.answers` is None.

    Raises:
        ValueError: A split has answer files, but more or fewer than question files.
    """
    for split, answer_paths in answer_files.items():
        question_count = len(question_files.get(split, ()))
        if len(answer_paths) == question_count:
            continue
        found = f"{question_count} question files"
        if question_count == 0:
            found = f"no question files (only for {', '.join(question_files)})"
        raise ValueError(f"answers: {split} has {len(answer_paths)} answer files and {found}")
    row_files: dict[Split, list[RowFile]] = {}
    for split, question_paths in question_files.items():
        row_files[split] = []
        no_answers = [None] * len(question_paths)
        answer_paths_or_none: Sequence[Path | None] = answer_files.get(split) or no_answers
        for question_path, answer_path in zip(question_paths, answer_paths_or_none, strict=True):
            row_files[split].append(RowFile(str(question_path), question_path, answer_path))
    return row_files


def _search_folder(task: Task, folder: Path) -> dict[Split, list[RowFile]]:
    """Find the files of each split by the task's patterns, else by the usual names.

    For each split, the first pattern that matches any file decides, and all files that it matches are used. A split
    without a matching file is left out.

    Raises:
        DataError: There is no such folder, or no split has a file in it.
    """
    if not folder.is_dir():
        raise DataError(folder, None, "no such folder")
    # A split that the task cuts from another split's file may have a file too, which must not be used: the test file of
    # CommonsenseQA has no answers.
    cut_from_other_split: set[Split] = set()
    if task.cut is not None:
        cut_from_other_split = set(task.cut.splits) - {task.cut.source}
    row_files: dict[Split, list[RowFile]] = {}
    for split in SPLITS:
        if split in cut_from_other_split:
            continue
        for pattern in (*task.patterns.get(split, ()), *_USUAL_FILE_NAMES[split]):
            # Files in formats that cannot be read, for which `find_suffix` is empty, are skipped.
            matches = [path for path in sorted(folder.glob(pattern)) if path.is_file() and find_suffix(path)]
            if matches:
                row_files[split] = [RowFile(str(path), path) for path in matches]
                break
    if not row_files:
        looked = "looked for names such as *train*, *dev*, *test*"
        raise DataError(folder, None, f"no file for {task.name} here ({looked})")
    return row_files


def _add_answers(rows: Rows, name: str, answers: Path) -> Rows:
    """Add to each row its line of the answer file; DataError at the end unless there is one line per row."""
    lines = [line for _, line in read_lines(answers)]
    count = 0
    for number, raw in rows:
        count += 1  # also counts rows beyond the last line, for the error below
        if count <= len(lines):
            yield number, {**raw, ANSWER: lines[count - 1]}
    if count != len(lines):
        raise DataError(answers, None, f"{len(lines)} answers, expected {count}, one for each row of {name}")


# ---- what is loaded -------------------------------------------------------------------------------------------------


@dataclass
class LoadReport:
    """How many rows were read, kept and left out; complete once all questions have been read.

    `read` is the sum of `kept` and all of `dropped`.

    Attributes:
        task: Name of the task.
        split: The split that was loaded.
        seed: Seed of the split.
        licence: Licence of the data.
        source: Where the data is from.
        files: Names of the files that contain the rows.
        notes: Remarks for the user, such as how a file was cut.
        read: Number of rows read.
        kept: Number of questions.
        dropped: Number of rows left out, by reason.
        gold: Number of questions by gold label.
        unshuffled: Number of questions whose options keep their order because they refer to letters.
    """

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
    unshuffled: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """All counts in one flat dictionary, as a manifest stores them."""
        counts = {"read": self.read, "kept": self.kept, "unshuffled": self.unshuffled}
        for reason, count in sorted(self.dropped.items()):
            counts[f"dropped_{reason}"] = count
        for label, count in sorted(self.gold.items()):
            counts[f"gold_{label}"] = count
        return counts


@dataclass
class Loaded:
    """An iterator over questions, with a report that is updated as they are read.

    `len` counts all questions, including those already taken. It reads the rest into memory.
    """

    questions: Iterator[Question]
    report: LoadReport
    _read_ahead: deque[Question] = field(default_factory=deque, repr=False)

    def __iter__(self) -> Iterator[Question]:
        return self

    def __next__(self) -> Question:
        if self._read_ahead:
            return self._read_ahead.popleft()
        return self._read_next()

    def __len__(self) -> int:
        while True:
            try:
                self._read_ahead.append(self._read_next())
            except StopIteration:
                return self.report.kept

    def _read_next(self) -> Question:
        question = next(self.questions)
        self.report.kept += 1
        if question.has_labels:
            self.report.gold[question.gold] += 1
        return question


def load_questions(
    task: str | Task,
    split: Split,
    *,
    seed: int = 0,
    data_dir: str | Path | None = None,
    files: Files | None = None,
    limit: int | None = None,
) -> Loaded:
    """Load the questions of one split: from `files`, else from those found in `data_dir`, else from the hub.

    Without `limit`, training questions are streamed in the order of the file. All other questions are in the seed's
    random order. Which questions are chosen never depends on the order of the rows.

    Args:
        task: A name in TASKS, a task, or the path of a YAML file that describes the user's own questions.
        split: `train`, `validation` or `test`.
        seed: Seed of the splits.
        data_dir: A folder with local copies of the task's files; None if there is none.
        files: Split -> a path or glob, or several; None means the task's own files, if it has any.
        limit: Maximum number of questions. None means all training questions, or as many validation or test questions
            as the task's own sample size.

    Returns:
        An iterator over the questions, with a report that is updated as they are read.

    Raises:
        ValueError: The task, split, seed or limit is not valid.
        DataError: A file is missing, or its answers fit no style. A bad row raises it when that row is read.

    >>> loaded = load_questions("witnesses", "test", limit=3)
    >>> len(list(loaded)), loaded.report.kept
    (3, 3)
    """
    if isinstance(task, str):
        task = _resolve_task(task)
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is not one of {', '.join(SPLITS)}")
    # Training leaves out what these seeds hold out. A different seed could test a model on its training questions.
    if task.seeds and seed not in task.seeds:
        raise ValueError(f"seed {seed} is not one of {task.name}'s split seeds {', '.join(map(str, task.seeds))}")
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit}: expected at least 1")
    report = LoadReport(task.name, split, seed, task.licence, task.source)
    if task.generate is not None:
        if files is not None or data_dir is not None:
            raise ValueError(f"{task.name} is generated: it accepts neither files nor data_dir")
        return Loaded(_generate_questions(task.generate, limit, report), report)
    source = find_rows(task, files, data_dir)
    task = _with_answer_style(task, source)
    loader = QuestionLoader(task=task, split=split, seed=seed, limit=limit, source=source, report=report)
    if split == "train":
        return Loaded(loader.load_training(), report)
    return Loaded(loader.load_held_out(), report)


def _resolve_task(name: str) -> Task:
    if is_task_file(name):
        from catto.recipe.load import load_task  # imports YAML
        from catto.tasks.own_file import own_task, task_name  # imports this module

        return own_task(task_name(name), load_task(name))
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not one of {', '.join(TASKS)}{did_you_mean(name, TASKS)}")
    return TASKS[name]


def _generate_questions(generate: QuestionGenerator, limit: int | None, report: LoadReport) -> Iterator[Question]:
    for question in generate(report.split, limit, report.seed):
        report.read += 1
        yield question


def _with_answer_style(task: Task, source: RowSource) -> Task:
    """Return the task with the answer style of its rows, which is inferred if a user's own file has no stated style.

    Inferring reads all rows. A task that states its style or has no options is returned unchanged.

    Raises:
        DataError: No style fits all rows, or several fit but mean different options.
    """
    first_map = next(iter(task.maps), None)  # a user's own file has one map; the maps of benchmarks state a style
    if not isinstance(first_map, FieldMap) or first_map.style is not None:
        return task
    inferred = first_map.infer_style(_all_rows(source))
    if inferred.ambiguity is not None:
        raise inferred.ambiguity
    return replace(task, maps=(inferred.field_map,))


def _all_rows(source: RowSource) -> Iterator[SourceRow]:
    for split in source.available:
        yield from source.rows(split)


# ---- one load -------------------------------------------------------------------------------------------------------


class ParsedRow(NamedTuple):
    """The draft of a row's question, with the entry that decides its split."""

    entry: SplitEntry
    draft: Draft


@dataclass
class QuestionLoader:
    """Loads one split of one task, and counts the rows in a report.

    A split may have no file of its own: it is then cut, by a seed, from the file of a different split. In this class,
    `file_split` is the split whose file contains the rows: `train` for test questions that are cut from the training
    file.

    Attributes:
        task: The task.
        split: The split to load.
        seed: Seed of the splits.
        limit: Maximum number of questions; None for the default of the task and split.
        source: Where the rows of all splits are.
        report: The report to fill in.
        cut: How one file is cut into splits; None if every split has its own file. Chosen when the loader is made.
        parsers: Name of a file -> the parser for its rows; filled as files are read.
    """

    task: Task
    split: Split
    seed: int
    limit: int | None
    source: RowSource
    report: LoadReport
    cut: Cut | None = None
    parsers: dict[str, RowParser] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._choose_cut()
        available = self.source.available
        file_split = self._find_file_split(self.split)
        if file_split not in available:
            raise DataError(self.task.name, None, f"no file for {self.split}, only for {', '.join(available)}")
        self.report.files = [row_file.name for row_file in self.source.row_files[file_split]]

    def _choose_cut(self) -> None:
        """Set `cut` if a split has no file, and note it in the report.

        The task's own cut is used if the file that it cuts exists. Otherwise, the held-out splits without a file are
        cut from the training file. `cut` stays None if every split has a file, or if there is no file to cut.
        """
        task_cut = self.task.cut
        if task_cut is not None and self._is_needed(task_cut):
            self.cut = task_cut
            # The user of an own file may not know that only a part of it is loaded.
            is_users_file = self.task.files is not None
            if is_users_file and self.split in task_cut.shares:
                remedy = f"to use a whole file, name it with {self.split}=FILE"
                self.report.notes.append(f"{self.split} is cut from the only file by seed {self.seed}; {remedy}")
            return
        available = self.source.available
        missing = [split for split in _HELD_OUT if split not in available]
        if missing and "train" in available:
            shares = dict.fromkeys(missing, _HELD_OUT_SHARE)
            # No more rows are held out than the task's sample size, so that the others can be trained on.
            self.cut = Cut(source="train", shares=shares, rest="train", max_rows=self.task.sample)
            self.report.notes.append(f"no file for {', '.join(missing)}: cut from the training file by group")

    def _is_needed(self, cut: Cut) -> bool:
        """Return whether the file that is cut exists, and one of the splits that it is cut into has no file."""
        available = self.source.available
        splits_without_file = set(cut.splits) - set(available)
        return cut.source in available and len(splits_without_file) > 0

    def load_training(self) -> Iterator[Question]:
        """Yield the training questions; with a limit, only the first ones in the seed's random order."""
        if self.limit is None:
            yield from self._stream_training()
            return

        def random_key(question: Question) -> bytes:
            return splits.digest(self.task.name, "train", self.seed, question.id)

        drawn = heapq.nsmallest(self.limit, self._stream_training(), key=random_key)
        # `nsmallest` has read all rows. So only the usable questions that it did not draw are not counted yet.
        usable = self.report.read - self.report.dropped.total()
        self.report.dropped["not_drawn"] += usable - len(drawn)
        yield from drawn

    def _stream_training(self) -> Iterator[Question]:
        """Yield the training questions in the order of the file, without those that are held out.

        A question is held out if it is a validation or test question for any of the task's seeds, not only for the
        loaded one. The training questions are then the same for every seed, so that the teacher has to answer them only
        once, and no seed tests a model on questions that it was trained on.

        The files with validation and test rows are read before the first question is yielded.
        """
        entries_of_file: dict[Split, list[SplitEntry]] = {}
        for split in _HELD_OUT:
            file_split = self._find_file_split(split)
            if file_split not in entries_of_file:  # both splits may be cut from the same file
                # Read without the report, which counts only the rows of the split that is loaded.
                entries_of_file[file_split] = self._read_entries(file_split)
        held_out = splits.collect_held_out(
            entries_of_file,
            cut=self.cut,
            task=self.task.name,
            loaded_seed=self.seed,
            other_seeds=[seed for seed in self.task.seeds if seed != self.seed],
        )
        for entry, draft in self._parse_rows(self._find_file_split("train"), self.report):
            reason = held_out.reason_to_drop(entry)
            if reason is None:
                yield self._make_question(entry.id, draft)
            else:
                self.report.dropped[reason] += 1

    def load_held_out(self) -> Iterator[Question]:
        """Yield the questions of validation or test in the seed's random order.

        A first pass over the file collects an entry for each row, without its texts. The questions are drawn from these
        entries. A second pass reads the texts of the drawn rows, which are then put into the order of the draw. So the
        texts of the whole file are never in memory at once.
        """
        file_split = self._find_file_split(self.split)
        all_entries = self._read_entries(file_split, self.report)
        candidates = self._entries_of_split(all_entries, self.split)
        self._count_dropped("cut_to_another_part", len(all_entries) - len(candidates))
        if self.split == "validation":  # some sources have a question in both splits; it stays in test
            test_contents = self._test_contents(file_split, all_entries)
            not_in_test = [entry for entry in candidates if entry.content not in test_contents]
            self._count_dropped("content_in_test", len(candidates) - len(not_in_test))
            candidates = not_in_test
        drawn = splits.draw_entries(
            candidates,
            task=self.task.name,
            split=self.split,
            seed=self.seed,
            count=self.limit or self.task.sample,
        )
        self._count_dropped("not_drawn", len(candidates) - len(drawn))
        yield from self._read_in_order(file_split, drawn)

    def _count_dropped(self, reason: str, rows: int) -> None:
        """Count rows that are left out for a reason. A reason without rows is not added to the report."""
        if rows > 0:
            self.report.dropped[reason] += rows

    def _test_contents(self, validation_file: Split, validation_entries: list[SplitEntry]) -> set[bytes]:
        """Return the content hashes of all test rows; empty if there is no file with test rows.

        Args:
            validation_file: The split whose file contains the validation rows.
            validation_entries: All entries of that file, which may also contain the test rows.
        """
        file_split = self._find_file_split("test")
        if file_split not in self.source.available:
            return set()
        entries = validation_entries if file_split == validation_file else self._read_entries(file_split)
        return {entry.content for entry in self._entries_of_split(entries, "test")}

    def _read_in_order(self, file_split: Split, drawn: Sequence[SplitEntry]) -> Iterator[Question]:
        """Parse the drawn rows of a file, and yield their questions in the order of `drawn` instead of the file's."""
        id_of_row = {entry.row_index: entry.id for entry in drawn}
        questions: dict[str, Question] = {}
        for row_index, row in enumerate(self.source.rows(file_split)):
            if row_index not in id_of_row:
                continue
            draft = self._parse_row(row)
            if isinstance(draft, Draft):  # always true, for the type checker: rows that are left out have no entry
                question_id = id_of_row[row_index]
                questions[question_id] = self._make_question(question_id, draft)
        for entry in drawn:
            yield questions[entry.id]

    def _find_file_split(self, split: Split) -> Split:
        """Return the split whose files contain the rows of `split`: itself, or the split from whose file it is cut."""
        if self.cut is not None and split in self.cut.splits:
            return self.cut.source
        return split

    def _entries_of_split(self, entries: list[SplitEntry], split: Split) -> list[SplitEntry]:
        """Return the entries of a file that belong to the split."""
        if self.cut is None or split not in self.cut.splits:
            return entries
        split_of_group = splits.assign_groups(entries, self.cut, self.task.name, self.seed)
        members = []
        for entry in entries:
            if split_of_group[entry.group] == split:
                members.append(entry)
        return members

    def _read_entries(self, file_split: Split, report: LoadReport | None = None) -> list[SplitEntry]:
        """Return the entry of every row that `_parse_rows` yields, without its texts."""
        return [parsed.entry for parsed in self._parse_rows(file_split, report)]

    def _parse_rows(self, file_split: Split, report: LoadReport | None = None) -> Iterator[ParsedRow]:
        """Parse the rows of a split's files, and give each row an id. Rows that the parser leaves out are not yielded.

        Args:
            file_split: The split whose files are read.
            report: Counts the rows that are read and those that are left out; None counts nothing.

        Raises:
            DataError: A row cannot be parsed, or the source gives it the id of an earlier row.
        """
        times_seen: Counter[str] = Counter()  # by a row's own id or the hash of its content; `_choose_id` updates it
        # `row_index` counts the rows that are left out too: `_read_in_order` finds a row by its index in the files.
        for row_index, row in enumerate(self.source.rows(file_split)):
            draft = self._parse_row(row)
            if report is not None:
                report.read += 1
            if isinstance(draft, str):  # the reason to leave the row out
                if report is not None:
                    report.dropped[draft] += 1
                continue
            with data_errors_at(row.file, row.number):
                question_id = _choose_id(draft, times_seen)
            # Training leaves out rows with the content of a held-out row, even from a different file. A file is cut
            # between groups only. Rows without a stated group form one with the rows of the same content.
            content = splits.content_key(draft)
            group = content if draft.group is None else splits.group_key(draft.group)
            yield ParsedRow(SplitEntry(row_index, question_id, group, content), draft)

    def _parse_row(self, row: SourceRow) -> Draft | str:
        """Return the row's draft, or the reason to leave it out. The parser of a file is chosen by its first row."""
        if row.file not in self.parsers:
            self.parsers[row.file] = self.task.choose_parser(row.fields)
        with data_errors_at(row.file, row.number):
            return self.parsers[row.file](row.fields)

    def _make_question(self, question_id: str, draft: Draft) -> Question:
        """Make the question, with its options in their final order."""
        has_short_answer = bool(draft.accepted)
        if has_short_answer:
            return Question(
                id=question_id,
                task=self.task.name,
                split=self.split,
                fields=draft.fields,
                gold=draft.accepted[0],  # shown as the right answer; all accepted ones are graded as right
                accepted=draft.accepted,
                grade=draft.grade,
                tolerance=draft.tolerance,
            )
        order = self._option_order(question_id, draft)
        labels = self.task.labels
        are_their_own_labels = draft.options == labels
        if are_their_own_labels:  # options such as yes and no take their labels with them when they are reordered
            labels = tuple(labels[index] for index in order)
        options = []
        for position, index in enumerate(order):
            options.append(Option(label=labels[position], text=draft.options[index]))
        return Question(
            id=question_id,
            task=self.task.name,
            split=self.split,
            fields=draft.fields,
            options=tuple(options),
            gold=labels[order.index(draft.gold)],
        )

    def _option_order(self, question_id: str, draft: Draft) -> list[int]:
        """Return the indices of the draft's options in their final order.

        Options that refer to letters keep their order, and the question is counted as `unshuffled` in the report.
        """
        count = len(draft.options)
        if self.task.order == "fixed":
            return list(range(count))
        if self.task.order == "shuffled unless letters are named" and splits.names_letters(draft.options):
            self.report.unshuffled += 1
            return list(range(count))
        return splits.draw_permutation(question_id, count)


def _choose_id(draft: Draft, times_seen: Counter[str]) -> str:
    """Return the id of a row's question, and count the row in `times_seen`.

    The id is the source's own, which must be unique. If there is none, the id is a hash of the question, its options
    and answers, followed by the number of earlier rows with the same hash, so that repeated rows have different ids.

    Args:
        draft: The draft of the question.
        times_seen: Number of earlier rows by the source's id or by hash.

    Raises:
        ValueError: The source gives an earlier row the same id.
    """
    if draft.id is not None:
        if draft.id in times_seen:
            raise ValueError(f"id {draft.id!r} occurs in an earlier row too")
        times_seen[draft.id] += 1
        return draft.id
    answers = draft.accepted or draft.gold  # the index of the right option, unless the answer is a short text
    content_id = content_hash([draft.fields, draft.options, answers])
    earlier = times_seen[content_id]
    times_seen[content_id] += 1
    return f"{content_id}-{earlier}"
