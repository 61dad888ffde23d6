"""Close a response that gave no answer, so that the next token is a label."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from catto.labels import Opening, decoded, opening, token_at
from catto.prompts import completion

_TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}(think|answer)\s{0,8}>", re.IGNORECASE)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Closed(NamedTuple):
    """How much of a text is kept (characters), and what is put after it."""

    keep: int
    ending: str


def close(text: str) -> Closed:
    """Keep a response up to its last `<answer>`, close an open think block, open the answer in the canonical form.

    A tag that was cut off at the end goes, and so does the white space before the cut.
    """
    openings = [tag.start() for tag in _TAG.finditer(text) if _name(tag) == "answer"]
    kept = text[: openings[-1] if openings else _without_torn_tag(text)].rstrip()
    thinks = [_name(tag) for tag in _TAG.finditer(kept) if _name(tag).endswith("think")]
    is_open = bool(thinks) and thinks[-1] == "think"
    ending = ("\n</think>" if is_open else "") + "\n" + completion(None, None)
    return Closed(len(kept), ending if kept else ending.lstrip("\n"))


def _name(tag: re.Match[str]) -> str:
    return (tag[1] + tag[2]).lower()


def _without_torn_tag(text: str) -> int:
    """Where the text ends without the beginning of a tag."""
    start = text.rfind("<")
    torn = start >= 0 and any(tag.startswith(text[start:].lower()) and tag != text[start:].lower() for tag in _TAGS)
    return start if torn else len(text)


def closed_ids(tokenizer: Any, ids: Sequence[int], labels: Sequence[str], room: int | None = None) -> Opening:
    """Tokens of a response closed by `close`, ready for a label, and every label's next token.

    `room`: most tokens that it may have; the reasoning's end is given up where it has more.
    """
    kept = list(ids)
    while True:
        found = _closed(tokenizer, kept, labels)
        excess = 0 if room is None else len(found.ids) - room
        if excess <= 0:
            return found
        if not kept:
            raise ValueError(f"the answer's opening needs {len(found.ids)} tokens, there is room for {room}")
        kept = kept[: max(0, len(kept) - excess)]


def _closed(tokenizer: Any, ids: Sequence[int], labels: Sequence[str]) -> Opening:
    text = decoded(tokenizer, ids)
    keep, ending = close(text)
    index, begin = token_at(tokenizer, ids, text, keep) if keep < len(text) else (len(ids), keep)
    # A token that holds kept and dropped characters is dropped; what it held of the kept ones is written again.
    found = opening(tokenizer, text[begin:keep] + ending, labels)
    return Opening((*ids[:index], *found.ids), found.candidates)
