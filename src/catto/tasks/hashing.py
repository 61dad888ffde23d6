"""Everything that decides by chance, decided by SHA-256: the same on every machine, in any row order."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from functools import cache

from catto.records import content_hash
from catto.tasks.rows import Row

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
