"""Everything random about a task: which rows are in which split, and the order of a question's options.

All of it is decided by SHA-256 hashes of the content, so it is the same on every machine and in any row order. Files
are cut by seed, questions are drawn without replacement, and the splits are kept apart by content.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from catto.records import Grade, Split

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
    accepted: tuple[str, ...] = ()  # the accepted answers of a question without options
    grade: Grade | None = None
    tolerance: float = 0.0


@dataclass(frozen=True)
class Cut:
    """How to cut the rows of one file into parts by seed.

    Attributes:
        source: The split whose file is cut.
        shares: The share of the rows that each split gets.
        rest: The split that gets all other rows.
        most: Maximum number of rows of each share; None for no limit.
    """

    source: Split
    shares: Mapping[Split, float]
    rest: Split
    most: int | None = None

    @property
    def parts(self) -> tuple[Split, ...]:
        """The splits that are cut from the file."""
        return (*self.shares, self.rest)


class SplitEntry(NamedTuple):
    """What cutting and leak removal need to know of a row.

    Attributes:
        row_index: Index of the row among all rows of its split's files.
        id: The question's id.
        group: Hash of the group that must not be cut apart.
        content: Hash of the normalised content.
    """

    row_index: int
    id: str
    group: bytes
    content: bytes


def digest(*parts: object) -> bytes:
    """Return the SHA-256 of the parts in order; two different lists of parts never hash the same text."""
    preimage = ""
    for part in parts:
        text = str(part)
        preimage += f"{len(text)}:{text}"
    return hashlib.sha256(preimage.encode()).digest()


# All possible texts of a generated question fall into ten equal shares, and each split has its own: no text is in two
# splits, whatever the seeds.
GENERATED_SHARES: dict[Split, range] = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}


def owns_generated(text: str, split: Split) -> bool:
    """Return whether a generated question with this text belongs to the split.

    >>> [split for split in GENERATED_SHARES if owns_generated("75% says A", split)]
    ['train']
    """
    share = digest("share", text)[0] * 10 // 256
    return share in GENERATED_SHARES[split]


def draw_permutation(key: str, count: int) -> list[int]:
    """Return a uniformly random order of `count` indices that depends on the key alone.

    It is a Fisher-Yates shuffle whose random numbers are the digits of a hash, written in a mixed radix: each
    `divmod` takes one digit.

    >>> draw_permutation("question 1", 4)
    [1, 0, 3, 2]
    """
    order = list(range(count))
    number = int.from_bytes(digest("order", key), "big")
    for last in range(count - 1, 0, -1):
        number, other = divmod(number, last + 1)
        order[last], order[other] = order[other], order[last]
    return order


def names_letters(options: tuple[str, ...]) -> bool:
    """Return whether the options depend on their letters, so that they cannot be reordered.

    That is the case if one refers to others by letter ("Both A and C"), or if each begins with its own ("A. red").
    """
    if _all_begin_with_letter(options):
        return True
    return any(_refers_to_letter(option) for option in options)


def _all_begin_with_letter(options: tuple[str, ...]) -> bool:
    """Whether the first option begins with "A." or the like, the second with "B.", and so on up to H."""
    lettered = zip("ABCDEFGH", options, strict=False)
    return all(re.match(rf"\s*\(?{letter}[.):]", option) for letter, option in lettered)


def _refers_to_letter(option: str) -> bool:
    if not _LONE_LETTER.search(option):  # rules out most options at little cost
        return False
    return bool(_NAMES_LETTERS.search(option))


@cache
def _runs_of_category(categories: str) -> re.Pattern[str]:
    """Match runs of characters whose Unicode category matches `categories`, a regular expression.

    Only the first plane is searched: the others hold next to no such characters.
    """
    members = ""
    for code in range(0x10000):
        is_surrogate_or_private = 0xD800 <= code < 0xF900
        if is_surrogate_or_private:
            continue
        char = chr(code)
        if re.match(categories, unicodedata.category(char)):
            members += char
    return re.compile(f"[{re.escape(members)}]+")


def normalise_text(text: str) -> str:
    """Fold case, width, composition, white space and punctuation; a text of nothing else is kept without spaces.

    Symbols stay, since `~P` and `P`, or 2 > 1 and 2 < 1, differ.

    >>> normalise_text("The  Cat\\nsat.")
    'the cat sat'
    """
    if text.isascii():
        folded = text.casefold()
    else:
        composed = unicodedata.normalize("NFKC", text)
        folded = unicodedata.normalize("NFKC", composed.casefold())
        folded = _runs_of_category("Cf").sub("", folded)
    words = _runs_of_category("[PZC]").sub(" ", folded).strip()
    if words:
        return words
    return "".join(folded.split())


def content_key(draft: Draft) -> bytes:
    """Hash what makes two rows the same question: the normalised fields and options.

    The order of the options and the gold answer do not count.
    """
    fields = [normalise_text(value) for value in draft.fields.values()]
    options = sorted(normalise_text(option) for option in draft.options)
    return digest(*fields, "options", *options)[:16]


def group_key(group: str) -> bytes:
    """Hash the name of a group of rows, normalised."""
    return digest("group", normalise_text(group))[:16]


def assign_groups(entries: Sequence[SplitEntry], cut: Cut, task: str, seed: int) -> dict[bytes, Split]:
    """Give every group of rows to one part of the cut.

    Groups in the seed's random order fill each part up to its share of the rows. Groups stay whole, so a part may get a
    few rows more.

    Args:
        entries: All rows of the file that is cut.
        cut: The parts and their shares.
        task: Name of the task; each task has its own random order.
        seed: Seed of the split.

    Returns:
        The split of each group.
    """
    rows_of_group = Counter(entry.group for entry in entries)
    in_random_order = sorted(rows_of_group, key=lambda group: digest(task, "cut", seed, group.hex()))
    groups = iter(in_random_order)
    split_of_group: dict[bytes, Split] = {}
    for split, share in cut.shares.items():
        wanted_rows = int(share * len(entries) + 0.5)
        if cut.most is not None:
            wanted_rows = min(wanted_rows, cut.most)
        rows = 0
        while rows < wanted_rows:
            group = next(groups, None)
            if group is None:
                break
            split_of_group[group] = split
            rows += rows_of_group[group]
    for group in groups:  # those that no part has taken
        split_of_group[group] = cut.rest
    return split_of_group


def draw_entries(
    entries: Iterable[SplitEntry], *, task: str, split: Split, seed: int, count: int | None
) -> list[SplitEntry]:
    """Draw `count` entries uniformly without replacement: the first in the seed's random order. None draws all."""
    in_random_order = sorted(entries, key=lambda entry: digest(task, split, seed, entry.id))
    return in_random_order[:count]


@dataclass
class HeldOutRows:
    """The validation and test rows of every seed, which must not be trained on.

    Attributes:
        contents: Content hash of a held-out row -> the reason to leave out a training row with the same content.
        groups: Group hash of a held-out row -> the reason to leave out a training row of the same group.
    """

    contents: dict[bytes, str] = field(default_factory=dict)
    groups: dict[bytes, str] = field(default_factory=dict)

    def reason_to_drop(self, entry: SplitEntry) -> str | None:
        """Return why a row may not be trained on; None if it may."""
        return self.groups.get(entry.group) or self.contents.get(entry.content)


def collect_held_out(
    pools: Mapping[Split, Sequence[SplitEntry]], *, cut: Cut | None, task: str, seeds: Iterable[int], seed: int
) -> HeldOutRows:
    """Collect the validation and test rows of every seed.

    A training row with the content of such a row is left out. If training rows are cut from the same file, so are all
    rows of its group.

    Args:
        pools: For each split whose file holds validation or test rows, all entries of that file.
        cut: How one of these files is cut; None if every split has its own file.
        task: Name of the task.
        seeds: All seeds whose held-out rows count.
        seed: The seed that is loaded.

    Returns:
        The rows, with the reasons that a report names.
    """
    held_out = HeldOutRows()
    for origin, entries in pools.items():
        is_cut_by_seed = cut is not None and origin == cut.source
        if is_cut_by_seed:
            continue
        reason = f"content_in_{origin}"
        for entry in entries:
            held_out.contents[entry.content] = reason
    if cut is None:
        return held_out
    # The loaded seed comes first, so that its reason is the one reported where there are several.
    for cut_seed in sorted(seeds, key=lambda each: each != seed):
        split_of_group = assign_groups(pools[cut.source], cut, task, cut_seed)
        for entry in pools[cut.source]:
            part = split_of_group[entry.group]
            if part == "train":
                continue
            held_out.contents.setdefault(entry.content, f"content_in_{part}")
            if "train" in cut.parts:
                reason = f"cut_to_{part}" if cut_seed == seed else "cut_by_another_seed"
                held_out.groups.setdefault(entry.group, reason)
    return held_out
