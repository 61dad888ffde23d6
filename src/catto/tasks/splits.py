"""Everything random about a task: which rows are in which split, and the order of a question's options.

SHA-256 hashes of the content decide all of it, so it is the same on every machine and for any order of the rows. Files
are cut by seed, questions are drawn without replacement, and no question is in two splits.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter, deque
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
    r"|^\s*[a-h]\s*(?:&|and|or)\s*[a-h]\b(?:\s+only)?\W*$"  # the whole text is: a & b only
    r"|\b(?i:both|either|neither|only|options?|choices?|answers?)\s+\(?[A-H]\b"  # option (C)
    r"|(?:^|\s)\(?[A-H]\)?\s+(?i:only|alone)\b"  # A only
)
_LONE_LETTER = re.compile(r"\b[A-Ha-h]\b")


@dataclass(frozen=True, slots=True)
class Draft:
    """A question before its options are ordered.

    Attributes:
        fields: The parts of the question by the names that a prompt shows.
        options: The texts of the options; empty for a question that is answered by a short text or a number.
        gold: Index of the right option; 0 without options. It is not a text, since two options may have the same text.
        id: The source's own id; None if the source has none.
        group: Name of the row's group; None if the rows with the same content are a group. If a file is cut into
            splits, a group is never divided.
        accepted: The accepted answers of a question without options.
        grade: How an answer is compared with the accepted ones.
        tolerance: For the grade `number`: the largest accepted difference, relative to the accepted value.
    """

    fields: dict[str, str]
    options: tuple[str, ...]
    gold: int
    id: str | None = None
    group: str | None = None
    accepted: tuple[str, ...] = ()
    grade: Grade | None = None
    tolerance: float = 0.0


@dataclass(frozen=True)
class Cut:
    """How the rows of one file are cut into several splits by seed.

    Attributes:
        source: The split whose file is cut.
        shares: The share of the rows that each split gets.
        rest: The split that gets all other rows.
        max_rows: Maximum number of rows of each split in `shares`; None means no limit. Since groups are never divided,
            a split may exceed its share or this number by part of a group.
    """

    source: Split
    shares: Mapping[Split, float]
    rest: Split
    max_rows: int | None = None

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits that the file is cut into."""
        return (*self.shares, self.rest)


class SplitEntry(NamedTuple):
    """What cutting and leak removal need to know about a row.

    Attributes:
        row_index: Index of the row among all rows of its split's files.
        id: The question's id.
        group: Hash of the group that the row belongs to; a group is never divided.
        content: Hash of the normalised content.
    """

    row_index: int
    id: str
    group: bytes
    content: bytes


def digest(*parts: object) -> bytes:
    """Return the SHA-256 hash of the parts in order; two different lists of parts never hash the same text."""
    preimage = ""
    for part in parts:
        text = str(part)
        preimage += f"{len(text)}:{text}"
    return hashlib.sha256(preimage.encode()).digest()


# All possible texts of generated questions are divided into ten shares of about the same size, and each share belongs
# to one split. So no text is in two splits, whatever the seeds.
GENERATED_SHARES: dict[Split, range] = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}


def owns_generated(text: str, split: Split) -> bool:
    """Return whether a generated question with this text belongs to the split.

    >>> [split for split in GENERATED_SHARES if owns_generated("75% says A", split)]
    ['train']
    """
    first_byte = digest("share", text)[0]
    share = first_byte * 10 // 256  # 0 to 9
    return share in GENERATED_SHARES[split]


def draw_permutation(key: str, count: int) -> list[int]:
    """Return the indices from 0 to `count` - 1 in a random order that depends on the key alone.

    This is a Fisher-Yates shuffle: from the last position down to the second, the index at each position is swapped
    with the one at a random position up to there. All random positions are extracted from one hash of the key.

    >>> draw_permutation("question 1", 4)
    [1, 0, 3, 2]
    """
    order = list(range(count))
    randomness = int.from_bytes(digest("order", key), "big")
    for last in range(count - 1, 0, -1):
        randomness, other = divmod(randomness, last + 1)  # the remainder, from 0 to `last`, is the random position
        order[last], order[other] = order[other], order[last]
    return order


def names_letters(options: tuple[str, ...]) -> bool:
    """Return whether the options depend on their letters, so that they cannot be reordered.

    That is the case if an option refers to others by letter ("Both A and C"), or if each option begins with its own
    letter ("A. red").
    """
    if _all_begin_with_letter(options):
        return True
    return any(_refers_to_letter(option) for option in options)


def _all_begin_with_letter(options: tuple[str, ...]) -> bool:
    """Return whether the first option begins with "A.", "A)" or "A:", the second with "B.", and so on up to H."""
    lettered = zip("ABCDEFGH", options, strict=False)
    return all(re.match(rf"\s*\(?{letter}[.):]", option) for letter, option in lettered)


def _refers_to_letter(option: str) -> bool:
    if not _LONE_LETTER.search(option):  # rules out most options at little cost
        return False
    return bool(_NAMES_LETTERS.search(option))


@cache
def _runs_of_category(categories: str) -> re.Pattern[str]:
    """Return a pattern that matches one or more characters in a row whose Unicode category is one of `categories`.

    Surrogates and private characters never match. Neither do characters outside the Basic Multilingual Plane: almost
    none of them has a category that is asked for.

    Args:
        categories: A regular expression for the beginning of a category, such as "[PZC]".
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
    """Normalise a text, so that equal contents have equal hashes.

    Case, full and half width, composed and separate accents, white space and punctuation are ignored. Symbols are kept,
    since `~P` and `P`, or 2 > 1 and 2 < 1, differ. In a text of punctuation alone, the punctuation is kept and only the
    white space is removed.

    >>> normalise_text("The  Cat\\nsat.")
    'the cat sat'
    """
    if text.isascii():  # faster; the other branch would give the same
        folded = text.casefold()
    else:
        composed = unicodedata.normalize("NFKC", text)
        folded = unicodedata.normalize("NFKC", composed.casefold())  # folding case may decompose characters again
        invisible = _runs_of_category("Cf")  # such as a zero-width space
        folded = invisible.sub("", folded)
    punctuation_or_space = _runs_of_category("[PZC]")  # punctuation, separators, and control characters
    words = punctuation_or_space.sub(" ", folded).strip()
    if words:
        return words
    return "".join(folded.split())


def content_key(draft: Draft) -> bytes:
    """Hash what makes two rows the same question: the normalised fields and options.

    Neither the order of the options nor the gold answer counts. The first 16 bytes of the hash are kept: they are
    enough to tell rows apart, and take half the memory.
    """
    fields = [normalise_text(value) for value in draft.fields.values()]
    options = sorted(normalise_text(option) for option in draft.options)
    return digest(*fields, "options", *options)[:16]


def group_key(group: str) -> bytes:
    """Hash the name of a group of rows, normalised."""
    return digest("group", normalise_text(group))[:16]


def assign_groups(entries: Sequence[SplitEntry], cut: Cut, task: str, seed: int) -> dict[bytes, Split]:
    """Assign every group of rows to one split of the cut.

    The groups are taken in the seed's random order. They fill the splits in `cut.shares` one after the other, each up
    to its share of the rows or `cut.max_rows`, whichever is smaller. All groups that are left go to `cut.rest`. Since
    groups are never divided, a split may exceed its number of rows by part of a group.

    Args:
        entries: All rows of the file that is cut.
        cut: The splits and their shares.
        task: Name of the task; each task has its own random order.
        seed: Seed of the split.

    Returns:
        The split of each group.
    """
    row_counts = Counter(entry.group for entry in entries)
    in_random_order = sorted(row_counts, key=lambda group: digest(task, "cut", seed, group.hex()))
    remaining_groups = deque(in_random_order)
    split_of_group: dict[bytes, Split] = {}
    for split, share in cut.shares.items():
        wanted_rows = int(share * len(entries) + 0.5)  # rounded to the nearest whole number
        if cut.max_rows is not None:
            wanted_rows = min(wanted_rows, cut.max_rows)
        rows = 0
        while remaining_groups and rows < wanted_rows:
            group = remaining_groups.popleft()
            split_of_group[group] = split
            rows += row_counts[group]
    for group in remaining_groups:
        split_of_group[group] = cut.rest
    return split_of_group


def draw_entries(
    entries: Iterable[SplitEntry], *, task: str, split: Split, seed: int, count: int | None
) -> list[SplitEntry]:
    """Draw `count` entries uniformly without replacement: the first ones in the seed's random order; None draws all."""
    in_random_order = sorted(entries, key=lambda entry: digest(task, split, seed, entry.id))
    return in_random_order[:count]


@dataclass
class HeldOutRows:
    """The validation and test rows of every seed, which must not be trained on.

    The reasons are the names under which a report counts the training rows that are left out, such as
    `content_in_test`.

    Attributes:
        contents: Content hash of a held-out row -> the reason to leave out a training row with the same content.
        groups: Group hash of a held-out row -> the reason to leave out a training row of the same group. Empty unless
            the training rows are cut from the same file as the held-out rows.
    """

    contents: dict[bytes, str] = field(default_factory=dict)
    groups: dict[bytes, str] = field(default_factory=dict)

    def reason_to_drop(self, entry: SplitEntry) -> str | None:
        """Return why a row may not be trained on; None if it may."""
        return self.groups.get(entry.group) or self.contents.get(entry.content)


def collect_held_out(
    entries_of_file: Mapping[Split, Sequence[SplitEntry]],
    *,
    cut: Cut | None,
    task: str,
    loaded_seed: int,
    other_seeds: Iterable[int],
) -> HeldOutRows:
    """Collect the validation and test rows of every seed, with the reasons to leave out training rows because of them.

    A training row with the same content as a held-out row is left out. If the training rows are cut from the same file
    as the held-out rows, all rows of a held-out row's group are left out too.

    Which rows are left out does not depend on which of the seeds is loaded, only the reasons do: for a row that several
    seeds hold out, the loaded seed's reason is given.

    Args:
        entries_of_file: All entries of every file with validation or test rows, by the split whose file it is.
        cut: How one of these files is cut; None if every split has its own file.
        task: Name of the task.
        loaded_seed: The seed whose training rows are loaded.
        other_seeds: Further seeds whose held-out rows must not be trained on.

    Returns:
        The held-out rows with the reasons.
    """
    held_out = HeldOutRows()
    for split, entries in entries_of_file.items():
        is_cut_by_seed = cut is not None and split == cut.source
        if is_cut_by_seed:  # handled below, for each seed
            continue
        for entry in entries:
            held_out.contents[entry.content] = f"content_in_{split}"
    if cut is None:
        return held_out
    training_rows_are_cut_too = "train" in cut.splits
    # `setdefault` keeps the first reason, so the loaded seed comes first.
    for seed in (loaded_seed, *other_seeds):
        split_of_group = assign_groups(entries_of_file[cut.source], cut, task, seed)
        for entry in entries_of_file[cut.source]:
            split = split_of_group[entry.group]
            if split == "train":
                continue
            held_out.contents.setdefault(entry.content, f"content_in_{split}")
            if training_rows_are_cut_too:
                reason = f"cut_to_{split}" if seed == loaded_seed else "cut_by_another_seed"
                held_out.groups.setdefault(entry.group, reason)
    return held_out
