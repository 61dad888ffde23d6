"""Small helpers for sequences of token ids; they do not need torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode token ids; special tokens are shown and white space is unchanged."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


def count_common(*sequences: Sequence[int]) -> int:
    """Return the length of the longest common prefix of all sequences; 0 without sequences.

    Example:
        >>> count_common((1, 2, 3), (1, 2, 4))
        2
    """
    count = 0
    for tokens in zip(*sequences, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count


def count_shared_beginning(prompts: Iterable[Sequence[int]]) -> int:
    """Return the length of the common prefix that can be computed once for all prompts.

    Each prompt keeps at least one token of its own, because the model must run on something to predict the next token.

    Args:
        prompts: Token ids of the prompts.

    Returns:
        The number of tokens; 0 if all prompts are equal, because they then run as one prompt anyway.

    Example:
        >>> count_shared_beginning([(1, 2, 3), (1, 2, 4, 5)])
        2
        >>> count_shared_beginning([(1, 2), (1, 2, 3)])
        1
        >>> count_shared_beginning([(1, 2)])
        0
    """
    distinct = {tuple(prompt) for prompt in prompts}
    if len(distinct) < 2:
        return 0
    shortest = min(len(prompt) for prompt in distinct)
    return min(count_common(*distinct), shortest - 1)
