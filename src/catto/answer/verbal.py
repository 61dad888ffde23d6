"""Read the confidence that a response states itself: `<confidence>0.8</confidence>`.

The tag must be outside the reasoning, in the response's own turn. Its content must be a probability from 0 to 1 or a
percentage with its sign: `80%` is 0.8. Anything else counts as missing, and nothing is guessed: no tag, an unclosed
tag, more than one pair of tags, a number out of range (`80` without a sign), a word or a fraction.
"""

from __future__ import annotations

import re

from catto.answer.response import find_body, find_tags, find_turn_end

CONFIDENCE_TAG = re.compile(r"<\s{0,8}(?P<slash>/?)\s{0,8}confidence\s{0,8}>", re.IGNORECASE)
PROBABILITY = re.compile(r"\s*(?P<number>[0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s?(?P<percent>%?)\s*")


def read_stated_confidence(text: str) -> float | None:
    """Read the confidence that a response states, in time linear in its length.

    Args:
        text: The response.

    Returns:
        The confidence in [0, 1]. None if the response states no confidence, more than one, or something that is not a
        probability.

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
    if len(tags) != 2:
        return None
    first, second = tags
    is_opening_and_closing = not first["slash"] and bool(second["slash"])
    if not is_opening_and_closing:
        return None
    stated = PROBABILITY.fullmatch(turn, first.end(), second.start())
    if stated is None:
        return None
    value = float(stated["number"])
    if stated["percent"]:
        value /= 100
    return value if value <= 1 else None  # "80" without its sign is not read as 80%
