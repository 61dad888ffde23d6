"""Close a response that gave no answer, so that the next token is a label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from catto.labels import Opening, decoded, encoded, opening, token_at
from catto.prompts import TAG, completion, tag_name

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Closed(NamedTuple):
    """How much of a text is kept (characters), and what is put after it."""

    keep: int
    ending: str


def close(text: str) -> Closed:
    """Keep a response up to its last `<answer>`, close an open think block, open the answer in the canonical form.

    A tag that was cut off at the end goes, and so does the white space before the cut.
    """
    openings = [tag.start() for tag in TAG.finditer(text) if tag_name(tag) == "answer"]
    kept = text[: openings[-1] if openings else _without_torn_tag(text)].rstrip()
    thinks = [tag_name(tag) for tag in TAG.finditer(kept) if tag_name(tag).endswith("think")]
    is_open = bool(thinks) and thinks[-1] == "think"
    ending = ("\n</think>" if is_open else "") + "\n" + completion(None, None)
    return Closed(len(kept), ending if kept else ending.lstrip("\n"))


def _without_torn_tag(text: str) -> int:
    """Where the text ends without the beginning of a tag."""
    start = text.rfind("<")
    torn = start >= 0 and any(tag.startswith(text[start:].lower()) and tag != text[start:].lower() for tag in _TAGS)
    return start if torn else len(text)


def closed_ids(tokenizer: Any, ids: Sequence[int], labels: Sequence[str], room: int | None = None) -> Opening | None:
    """Tokens of a response closed by `close`, ready for a label, and every label's next token.

    `room`: most tokens that it may have; the reasoning's end is given up where it has more. None where the answer's
    opening alone has more.
    """
    kept = list(ids)
    while True:
        found = _closed(tokenizer, kept, labels)
        longest = len(found.ids) + max(map(len, found.rest.values()), default=0)
        excess = 0 if room is None else longest - room
        if excess <= 0:
            return found
        if not kept:
            return None
        kept = kept[: max(0, len(kept) - excess)]


def _closed(tokenizer: Any, ids: Sequence[int], labels: Sequence[str]) -> Opening:
    text = decoded(tokenizer, ids)
    keep, ending = close(text)
    try:
        index, begin = token_at(tokenizer, ids, text, keep) if keep < len(text) else (len(ids), keep)
        # A token that holds kept and dropped characters is dropped; what it held of the kept ones is written again.
        found = opening(tokenizer, text[begin:keep] + ending, labels)
    except ValueError:
        # Tokens whose text cannot be cut, or a torn word that changes how the labels are written: encode it all anew.
        found = opening(tokenizer, ending, labels)
        return Opening((*encoded(tokenizer, text[:keep]), *found.ids), found.candidates, found.rest)
    return Opening((*ids[:index], *found.ids), found.candidates, found.rest)
