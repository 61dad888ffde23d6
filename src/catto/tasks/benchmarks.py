"""What a task is, and the benchmarks: the table `benchmarks.toml`, with parsers for rows that no map describes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from catto.records import Question, Split
from catto.tasks import readings, witnesses
from catto.tasks.answer_map import AnswerMap
from catto.tasks.fields import FieldMap, Raw, convert_texts, get_field, get_text
from catto.tasks.splits import Cut, Draft, draw_permutation

SEEDS = (0, 1, 2, 3, 4)

Files = Mapping[Split, str | Path | Sequence[str | Path]]
# Row -> the draft of its question, or the reason to leave the row out.
RowParser = Callable[[Raw], Draft | str]
# (split, maximum number of questions, seed) -> questions
QuestionGenerator = Callable[[Split, int | None, int], Iterator[Question]]
OptionOrder = Literal["shuffled", "shuffled unless letters are named", "fixed"]


@dataclass(frozen=True)
class Task:
    """Where the questions of one task come from.

    Attributes:
        name: Name of the task.
        labels: The labels of the options, in the order in which a prompt lists them; empty for a task without options.
        licence: Licence of the data.
        source: Who published the data.
        maps: Which field of a row is which; the map that fits the first row of a file best is used.
        parse: Parses rows that no map describes; returns the draft, or the reason to leave the row out.
        generate: Generates the questions of a task without files.
        hub: Id of the hub dataset.
        config: Configuration of the hub dataset.
        revision: Revision of the hub dataset; None for the head of its main branch.
        hub_splits: Split -> its name on the hub.
        patterns: Split -> file names to look for in a folder; the first pattern that matches a file counts.
        columns: Columns of a CSV file without a header.
        order: How options are ordered. `shuffled` is for sources that always list the gold option first, so that even
            options that refer to letters are shuffled.
        cut: How one file is cut into splits.
        sample: Number of questions in validation and in test; None keeps all.
        seeds: Seeds whose held-out questions are not trained on; empty means only the seed that is loaded.
        files: The task's own files.
        answers: Files with one answer per line, in the order of `files`.
    """

    name: str
    labels: tuple[str, ...]
    licence: str
    source: str
    maps: tuple[FieldMap | AnswerMap, ...] = ()
    parse: RowParser | None = None
    generate: QuestionGenerator | None = None
    hub: str | None = None
    config: str | None = None
    revision: str | None = None
    hub_splits: Mapping[Split, str] = field(default_factory=dict)
    patterns: Mapping[Split, tuple[str, ...]] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    order: OptionOrder = "shuffled unless letters are named"
    cut: Cut | None = None
    sample: int | None = None
    seeds: tuple[int, ...] = SEEDS
    files: Files | None = None
    answers: Files | None = None

    def choose_parser(self, raw: Raw) -> RowParser:
        """Return the parser for the rows of a file: `parse`, or that of the map that fits the file's first row best.

        The map with the largest number of its fields that the row has, minus those that it lacks, fits best. In a tie,
        the first map does.

        Args:
            raw: The first row of the file.
        """
        if self.parse is not None:
            return self.parse

        def rate_fit(field_map: FieldMap | AnswerMap) -> int:
            present = field_map.top_level_fields & raw.keys()
            absent = field_map.top_level_fields - raw.keys()
            return len(present) - len(absent)

        return max(self.maps, key=rate_fit).parse_row


def parse_reward_bench_2(raw: Raw) -> Draft | str:
    """Parse a row of RewardBench 2: which is the best of four replies, one chosen and three rejected?

    Rows of the Ties subset have many chosen replies and often many rejected ones. One chosen and three rejected replies
    are drawn by the row's id, so that no position in the source's lists is favoured.

    Returns:
        The draft, with the chosen reply first (options are shuffled when the question is made), or the reason to leave
        the row out: `no_chosen` or `fewer_than_three_rejected`.

    Raises:
        ValueError: A field is missing or has a different type.
    """
    row_id = str(get_field(raw, "id"))
    chosen = convert_texts("chosen", get_field(raw, "chosen"))
    rejected = convert_texts("rejected", get_field(raw, "rejected"))
    if not chosen:
        return "no_chosen"
    if len(rejected) < 3:
        return "fewer_than_three_rejected"
    right_index = draw_permutation(f"chosen {row_id}", len(chosen))[0]
    wrong_indices = draw_permutation(f"rejected {row_id}", len(rejected))[:3]
    options = [chosen[right_index]]
    # In the order of the source, so that a row with just three rejected replies has the options of the source.
    for index in sorted(wrong_indices):
        options.append(rejected[index])
    fields = {"prompt": get_text(raw, "prompt")}
    return Draft(fields=fields, options=tuple(options), gold=0, id=row_id)


def parse_tldr(raw: Raw) -> Draft | str:
    """Parse a row of TL;DR: which of two summaries of a post did a person prefer?

    Rows from the hub have a `prompt`, rows of the original release have `summaries`; there are no ids. Some pairs were
    judged by several people, who may disagree; each judgement is a separate question.

    Returns:
        The draft, or `no_post`, the reason to leave out a row about a news article.

    Raises:
        ValueError: A field is missing or not as expected.
    """
    if "summaries" in raw:
        return _parse_tldr_release(raw)
    prompt = get_text(raw, "prompt").strip()
    post = prompt.removesuffix("TL;DR:").rstrip()
    preferred = get_text(raw, "chosen")
    other = get_text(raw, "rejected")
    return _make_tldr_draft(post, preferred=preferred, other=other)


def _parse_tldr_release(raw: Raw) -> Draft | str:
    """Parse a row of the original release. Its post is put into the hub's format, so that both have the same content.

    A row about a news article is left out: the reason `no_post` is returned.
    """
    info = get_field(raw, "info")
    summaries = get_field(raw, "summaries")
    has_post = isinstance(info, dict) and info.get("post") is not None
    if not has_post:
        return "no_post"
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise ValueError("summaries: expected two")
    choice = get_field(raw, "choice")
    if type(choice) is not int or choice not in (0, 1):  # in Python, True is equal to 1
        raise ValueError(f"choice {choice!r} is not one of 0, 1")
    subreddit = get_text(info, "subreddit")
    title = get_text(info, "title")
    post = f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {get_text(info, 'post')}"
    preferred = get_text(summaries[choice], "text")
    other = get_text(summaries[1 - choice], "text")
    return _make_tldr_draft(post.strip(), preferred=preferred, other=other)


def _make_tldr_draft(post: str, *, preferred: str, other: str) -> Draft:
    return Draft(fields={"post": post}, options=(preferred.strip(), other.strip()), gold=0, group=post)


def _generate_witnesses(split: Split, limit: int | None, seed: int) -> Iterator[Question]:
    return witnesses.generate_questions(split, limit, seed=seed)


def _generate_readings(split: Split, limit: int | None, seed: int) -> Iterator[Question]:
    return readings.generate_sums(split, limit, seed=seed)


# Task -> the functions that the table cannot contain.
_CODE: dict[str, dict[str, Any]] = {
    "reward_bench_2": {"parse": parse_reward_bench_2},
    "tldr": {"parse": parse_tldr},
    "witnesses": {"generate": _generate_witnesses},
    "readings": {"generate": _generate_readings},
}


def _load_benchmarks() -> dict[str, Task]:
    """Read the table, add the functions, and validate every task."""
    file = resources.files("catto.tasks") / "benchmarks.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    rows = {}
    for name, row in table.items():
        rows[name] = {"name": name, **row, **_CODE.get(name, {})}
    return TypeAdapter(dict[str, Task]).validate_python(rows)


TASKS: dict[str, Task] = _load_benchmarks()
