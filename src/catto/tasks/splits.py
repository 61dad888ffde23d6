"""Everything random about a task, decided by SHA-256: the same on every machine, in any row order.

Which rows are in which split: cut by seed, drawn without replacement, and kept apart by content.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from catto.records import Split

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


@dataclass(frozen=True, slots=True)
class Draft:
    """A question before its options are ordered. `gold` is an index, so equal option texts stay apart."""

    fields: dict[str, str]
    options: tuple[str, ...]
    gold: int
    id: str | None = None  # the source's own id; None where the release has none
    group: str | None = None  # rows of one group never fall into two parts cut from one file


@dataclass(frozen=True)
class Cut:
    """Cut the rows of one file into parts by seed: each share in rows, at most `most`; the rest goes to `rest`."""

    source: Split
    shares: Mapping[Split, float]
    rest: Split
    most: int | None = None

    @property
    def parts(self) -> tuple[Split, ...]:
        """The splits that come out of the file."""
        return (*self.shares, self.rest)


class Entry(NamedTuple):
    """What cutting and leak removal need of a row: its place, its id, hashes of its group and normalised content."""

    place: int
    id: str
    group: bytes
    content: bytes


def digest(*parts: object) -> bytes:
    """SHA-256 of the parts in order; no two different lists of parts share a preimage."""
    return hashlib.sha256("".join(f"{len(str(part))}:{part}" for part in parts).encode()).digest()


def permutation(key: str, count: int) -> list[int]:
    """A uniformly random order of `count` indices (Fisher-Yates on the digits of a hash), fixed by the key alone.

    >>> permutation("question 1", 4)
    [1, 0, 3, 2]
    """
    order, number = list(range(count)), int.from_bytes(digest("order", key), "big")
    for last in range(count - 1, 0, -1):
        number, other = divmod(number, last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def names_letters(options: tuple[str, ...]) -> bool:
    """Whether options refer to others by letter ("Both A and C"), or all carry theirs ("A. red"): they cannot move."""
    if all(re.match(rf"\s*\(?{letter}[.):]", option) for letter, option in zip("ABCDEFGH", options, strict=False)):
        return True
    return any(_LONE_LETTER.search(option) and _NAMES_LETTERS.search(option) for option in options)


@cache
def _characters(categories: str) -> re.Pattern[str]:
    """Runs of the characters whose Unicode category starts so; planes beyond the first hold next to none of them."""
    plane = (chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xF900)
    members = "".join(char for char in plane if re.match(categories, unicodedata.category(char)))
    return re.compile(f"[{re.escape(members)}]+")


def normalised(text: str) -> str:
    """Fold case, width, composition, white space and punctuation; a text of punctuation alone stays itself.

    Symbols stay, since `~P` and `P`, or 2 > 1 and 2 < 1, differ.

    >>> normalised("The  Cat\\nsat.")
    'the cat sat'
    """
    folded = text.casefold()
    if not text.isascii():
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
        folded = _characters("Cf").sub("", folded)
    return _characters("[PZC]").sub(" ", folded).strip() or "".join(folded.split())


def content_key(draft: Draft) -> bytes:
    """What makes two rows the same question: normalised fields and options, in any option order, whatever the gold."""
    return digest(*map(normalised, draft.fields.values()), "options", *sorted(map(normalised, draft.options)))[:16]


def assign(entries: Sequence[Entry], cut: Cut, task: str, seed: int) -> dict[bytes, Split]:
    """Give every group to one part: groups in the seed's random order fill each part up to its share of the rows."""
    sizes = Counter(entry.group for entry in entries)
    groups = iter(sorted(sizes, key=lambda group: digest(task, "cut", seed, group.hex())))
    parts: dict[bytes, Split] = {}
    for split, share in cut.shares.items():
        target = int(share * len(entries) + 0.5)
        wanted, filled = target if cut.most is None else min(target, cut.most), 0
        while filled < wanted and (group := next(groups, None)) is not None:
            parts[group] = split
            filled += sizes[group]
    parts.update(dict.fromkeys(groups, cut.rest))
    return parts


def draw(entries: Iterable[Entry], task: str, split: Split, seed: int, count: int | None) -> list[Entry]:
    """The first `count` entries in the seed's random order: a uniform draw without replacement."""
    return sorted(entries, key=lambda entry: digest(task, split, seed, entry.id))[:count]


def held_out(
    pools: Mapping[Split, Sequence[Entry]], cut: Cut | None, task: str, seeds: Iterable[int], seed: int
) -> Callable[[Entry], str | None]:
    """Collect the validation and test rows of every seed; return why a row may not be trained on, None where it may.

    pools: entries by the file they are in. Groups count where training rows are cut from the same file.
    """
    whole = [origin for origin in pools if cut is None or origin != cut.source]
    contents = {entry.content: f"content_in_{origin}" for origin in whole for entry in pools[origin]}
    groups: dict[bytes, str] = {}
    if cut is not None:
        # This seed first, so that the reason given is its own where there are several.
        for other in sorted(seeds, key=lambda each: each != seed):
            parts = assign(pools[cut.source], cut, task, other)
            for entry in pools[cut.source]:
                if (part := parts[entry.group]) != "train":
                    contents.setdefault(entry.content, f"content_in_{part}")
                    if "train" in cut.parts:
                        groups.setdefault(entry.group, f"cut_to_{part}" if other == seed else "cut_by_another_seed")
    return lambda entry: groups.get(entry.group) or contents.get(entry.content)
