"""Everything that decides by chance, decided by SHA-256: the same on every machine, in any row order.

Which rows stand in which split: cut by seed, drawn without replacement, and kept apart by content.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from catto.records import SPLITS, Split, content_hash
from catto.tasks.rows import Cut, Row, Task

# ---- hashing


_AND = r"\)?\s*(?:,|&|/|\band\b|\bor\b|\bnor\b)+\s*\(?"
_NAMES_LETTERS = re.compile(
    rf"\b[A-H]{_AND}[A-H]\b"  # A and B; (A) or (C); A, B, and D
    rf"|\([a-h]{_AND}[a-h]\)"  # (a) and (b)
    r"|\b(?i:both|either|neither)\s+[a-h]\s+(?:and|or|nor)\s+[a-h]\b"  # both b and c
    r"|^\s*[a-h]\s*(?:&|and|or)\s*[a-h]\b(?:\s+only)?\W*$"
    r"|\b(?i:both|either|neither|only|options?|choices?|answers?)\s+\(?[A-H]\b"
    r"|(?:^|\s)\(?[A-H]\)?\s+(?i:only|alone)\b"
)


_LONE_LETTER = re.compile(r"\b[A-Ha-h]\b")


def digest(*parts: object) -> bytes:
    """SHA-256 of the parts in order; no two different lists of parts share a preimage."""
    return hashlib.sha256("".join(f"{len(str(part))}:{part}" for part in parts).encode()).digest()


def rank(task: str, purpose: str, seed: int, key: str | bytes) -> bytes:
    """Where a key stands in the random order of one task, purpose and seed; sort by it."""
    return digest(task, purpose, seed, key.hex() if isinstance(key, bytes) else key)


def permutation(key: str, count: int) -> list[int]:
    """A uniformly random order of `count` indices (Fisher-Yates on the digits of a hash), fixed by the key alone."""
    order, number = list(range(count)), int.from_bytes(digest("order", key), "big")
    for last in range(count - 1, 0, -1):
        number, other = divmod(number, last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def names_letters(options: tuple[str, ...]) -> bool:
    """Whether an option refers to others by letter ("Both A and C"), so that moving it would change its meaning."""
    return any(_LONE_LETTER.search(option) and _NAMES_LETTERS.search(option) for option in options)


@cache
def _characters(categories: str) -> re.Pattern[str]:
    """Runs of the characters whose Unicode category starts so; planes beyond the first hold next to none of them."""
    plane = (chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xF900)
    found = "".join(char for char in plane if re.match(categories, unicodedata.category(char)))
    return re.compile(f"[{re.escape(found)}]+")


def normalised(text: str) -> str:
    """Fold case, width, composition, white space and punctuation; a text of punctuation alone stays itself.

    Symbols stay, since `~P` and `P`, or 2 > 1 and 2 < 1, differ.
    """
    folded = text.casefold()
    if not text.isascii():
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        folded = _characters("Cf").sub("", folded)
    return _characters("[PZC]").sub(" ", folded).strip() or "".join(folded.split())


def content_key(row: Row) -> bytes:
    """What makes two rows the same question: normalised fields and options, in any option order, whatever the gold."""
    return digest(*map(normalised, row.fields.values()), "options", *sorted(map(normalised, row.options)))[:16]


def group_key(row: Row) -> bytes:
    """The key of the rows that stay together when a file is cut."""
    return digest("group", normalised(row.group))[:16] if row.group is not None else content_key(row)


def content_id(row: Row) -> str:
    """The id of a row whose release has none, before its occurrence number; a contradicting repeat gets its own."""
    return content_hash([row.fields, row.options, row.gold])


# ---- splits


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
