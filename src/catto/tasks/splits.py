"""Which rows stand in which split: cut by seed, drawn without replacement, and kept apart by content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from catto.records import SPLITS, Split
from catto.tasks.hashing import rank
from catto.tasks.rows import Cut, Task

# Held-out questions that are cut from the training file where a release comes without a file for them.
_FROM_TRAIN = 0.1


class Entry(NamedTuple):
    """What cutting and leak removal need of a row: its place, its id, hashes of its group and normalised content."""

    place: int
    id: str
    group: bytes
    content: bytes


def plan(task: Task, available: Collection[Split]) -> Cut | None:
    """How to make the splits from what is there; None: every split there is has its own file."""
    missing = [split for split in SPLITS[1:] if split not in available]
    if task.cut and task.cut.source in available and set(task.cut.parts) - {task.cut.source} - set(available):
        return task.cut
    if "train" not in available or not missing:
        return None
    return Cut("train", dict.fromkeys(missing, _FROM_TRAIN), rest="train", most=task.sample)


def assign(entries: Sequence[Entry], cut: Cut, task: Task, seed: int) -> dict[bytes, Split]:
    """Give every group to one part: groups in the seed's random order fill each part up to its share of the rows."""
    sizes = Counter(entry.group for entry in entries)
    groups = iter(sorted(sizes, key=lambda group: rank(task.name, "cut", seed, group)))
    parts: dict[bytes, Split] = {}
    for split, share in cut.shares.items():
        target = int(share * len(entries) + 0.5)
        wanted, filled = target if cut.most is None else min(target, cut.most), 0
        while filled < wanted and (group := next(groups, None)) is not None:
            parts[group] = split
            filled += sizes[group]
    parts.update(dict.fromkeys(groups, cut.rest))
    return parts


def parted(entries: Sequence[Entry], cut: Cut, task: Task, seed: int) -> Iterator[tuple[Entry, Split]]:
    """Yield every entry of the file that is cut, with the part it falls to."""
    parts = assign(entries, cut, task, seed)
    for entry in entries:
        yield entry, parts[entry.group]


def draw(entries: Iterable[Entry], task: Task, split: Split, seed: int, count: int | None) -> list[Entry]:
    """The first `count` entries in the seed's random order: a uniform draw without replacement."""
    return sorted(entries, key=lambda entry: rank(task.name, split, seed, entry.id))[:count]


class HeldOut(NamedTuple):
    """What training rows must stay clear of: groups by the part they are cut into, contents by where they stand."""

    groups: Mapping[bytes, str]
    contents: Mapping[bytes, str]

    def reason(self, entry: Entry) -> str | None:
        """Why a row may not be trained on; None where it may."""
        return self.groups.get(entry.group) or self.contents.get(entry.content)


def held_out(pools: Mapping[Split, Sequence[Entry]], cut: Cut | None, task: Task, seed: int) -> HeldOut:
    """Collect the validation and test rows of every seed. pools: entries by the file they are in."""
    whole = [origin for origin in pools if cut is None or origin != cut.source]
    contents = {entry.content: f"content_in_{origin}" for origin in whole for entry in pools[origin]}
    groups: dict[bytes, str] = {}
    # This seed first, so that the reason given is its own where there are several.
    for other in sorted(task.seeds, key=lambda one: one != seed):
        for entry, part in parted(pools[cut.source], cut, task, other) if cut else ():
            if part != "train":
                contents.setdefault(entry.content, f"content_in_{part}")
                groups.setdefault(entry.group, f"cut_to_{part}" if other == seed else "cut_by_another_seed")
    return HeldOut(groups if cut and "train" in cut.parts else {}, contents)
