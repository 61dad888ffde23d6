"""What a task is, and the table of the benchmarks: `benchmarks.toml`, with parsers for rows that no map describes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from catto.records import Question, Split
from catto.tasks import witnesses
from catto.tasks.fields import FieldMap, Raw, lookup, text, texts
from catto.tasks.splits import Cut, Draft, permutation

SEEDS = (0, 1, 2, 3, 4)

Files = Mapping[Split, str | Path | Sequence[str | Path]]


@dataclass(frozen=True)
class Task:
    """Where the questions of one task come from.

    `maps` say which field of a row is which: the one that fits the first row of a file best is used. `parse` reads rows
    that no map describes; it returns the draft, or the reason to leave the row out.
    """

    name: str
    labels: tuple[str, ...]
    licence: str
    source: str
    maps: tuple[FieldMap, ...] = ()
    parse: Callable[[Raw], Draft | str] | None = None
    generate: Callable[[Split, int | None, int], Iterator[Question]] | None = None
    hub: str | None = None
    config: str | None = None
    revision: str | None = None  # None: the head of the hub's main branch
    hub_splits: Mapping[Split, str] = field(default_factory=dict)
    patterns: Mapping[Split, tuple[str, ...]] = field(default_factory=dict)  # the first that matches a file wins
    columns: tuple[str, ...] | None = None  # of a CSV file without a header
    # Where options are whole texts the gold one comes first in the source, so those are shuffled whatever they say.
    order: Literal["shuffled", "shuffled unless letters are named", "fixed"] = "shuffled unless letters are named"
    cut: Cut | None = None
    sample: int | None = None  # questions in validation and in test; None keeps all
    seeds: tuple[int, ...] = SEEDS  # whose held-out questions are not trained on; empty: the seed that is asked for
    files: Files | None = None
    answers: Files | None = None  # one answer a line, file by file as in `files`

    def reader(self, raw: Raw) -> Callable[[Raw], Draft | str]:
        """What reads the rows of a file whose first row this is: the draft, or the reason to leave a row out."""
        if self.parse is not None:
            return self.parse
        return max(self.maps, key=lambda known: len(known.names & raw.keys()) - len(known.names - raw.keys()))


def parse_reward_bench_2(raw: Raw) -> Draft | str:
    """RewardBench 2: the best of four replies, one chosen and three rejected.

    The Ties subset has many right replies and often many wrong ones: which one and which three are drawn by the
    row's id, so that no place in the source's lists is favoured; the other right replies are left out.
    """
    key = str(lookup(raw, "id"))
    chosen, rejected = (texts(name, lookup(raw, name)) for name in ("chosen", "rejected"))
    if not chosen:
        return "no_chosen"
    if len(rejected) < 3:
        return "fewer_than_three_rejected"
    right = chosen[permutation(f"chosen {key}", len(chosen))[0]]
    wrong = [rejected[index] for index in sorted(permutation(f"rejected {key}", len(rejected))[:3])]
    return Draft({"prompt": text(raw, "prompt")}, (right, *wrong), 0, key)


def parse_tldr(raw: Raw) -> Draft | str:
    """TL;DR: which of two summaries of a post did a person prefer; of the hub (`prompt`) or the release (`summaries`).

    Rows have no ids. People judged the same pair more than once and disagree: such repeats are questions of their own.
    """
    if "summaries" in raw:
        info, summaries = lookup(raw, "info"), lookup(raw, "summaries")
        if not isinstance(info, dict) or info.get("post") is None:
            return "no_post"  # the comparisons of news articles
        if not isinstance(summaries, list) or len(summaries) != 2:
            raise ValueError("summaries: expected two")
        better = lookup(raw, "choice")
        if type(better) is not int or better not in (0, 1):
            raise ValueError(f"choice {better!r} is not one of 0, 1")
        post = f"SUBREDDIT: r/{text(info, 'subreddit')}\n\nTITLE: {text(info, 'title')}\n\nPOST: {text(info, 'post')}"
        post, options = post.strip(), (text(summaries[better], "text"), text(summaries[1 - better], "text"))
    else:
        post = text(raw, "prompt").strip().removesuffix("TL;DR:").rstrip()
        options = (text(raw, "chosen"), text(raw, "rejected"))
    return Draft({"post": post}, tuple(option.strip() for option in options), 0, None, post)


_CODE: dict[str, dict[str, Any]] = {
    "reward_bench_2": {"parse": parse_reward_bench_2},
    "tldr": {"parse": parse_tldr},
    "witnesses": {"generate": lambda split, n, seed: witnesses.generate(split, n, seed=seed)},
}
_TABLE = tomllib.loads((resources.files("catto.tasks") / "benchmarks.toml").read_text(encoding="utf-8"))
_ROWS = {name: {"name": name, **row, **_CODE.get(name, {})} for name, row in _TABLE.items()}
TASKS: dict[str, Task] = TypeAdapter(dict[str, Task]).validate_python(_ROWS)
