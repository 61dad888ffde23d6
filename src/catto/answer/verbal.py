"""The confidence that a response states in words: `<confidence>0.8</confidence>`, read strictly.

The tag is read outside the reasoning, in the response's own turn. A probability from 0 to 1 is read, and a percentage
with its sign: `80%` is 0.8. Anything else is missing and never guessed: no tag, a tag that is not closed, two tags, a
number out of range (`80` without a sign), a word, a fraction.
"""

from __future__ import annotations

import re

from catto.answer.response import find_body, find_tags, find_turn_end

CONFIDENCE_TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}confidence\s{0,8}>", re.IGNORECASE)
STATED = re.compile(r"\s*(?P<number>[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s?(?P<percent>%?)\s*")


def read_stated_confidence(text: str) -> float | None:
    """Read the confidence that a response states.

    Args:
        text: The response; the time is linear in it.

    Returns:
        The confidence in [0, 1]; None if none is stated, more than one is, or it is not a probability.

    Example:
        >>> read_stated_confidence("<answer>B</answer><confidence>0.8</confidence>")
        0.8
        >>> read_stated_confidence("<answer>B</answer><confidence>80%</confidence>")
        0.8
        >>> read_stated_confidence("<answer>B</answer><confidence>80</confidence>")
        >>> read_stated_confidence("<think><confidence>0.8</confidence></think><answer>B</answer>")
    """
    turn = text[: find_turn_end(text)]
    start, end = find_body(turn, find_tags(turn))
    tags = list(CONFIDENCE_TAG.finditer(turn, start, end))
    is_one_pair = len(tags) == 2 and not tags[0][1] and bool(tags[1][1])
    if not is_one_pair:
        return None
    stated = STATED.fullmatch(turn, tags[0].end(), tags[1].start())
    if stated is None:
        return None
    value = float(stated["number"])
    if stated["percent"]:
        value /= 100
    return value if value <= 1 else None
