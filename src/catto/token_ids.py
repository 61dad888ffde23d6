"""Small helpers for sequences of token ids. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode token ids; special tokens are shown and white space is left as it is."""
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


def count_common(*sequences: Sequence[int]) -> int:
    """Count the first tokens that all sequences have in common.

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
    """Count the first tokens that can run once for all prompts; each prompt keeps a last token of its own.

    Args:
        prompts: Token ids of the prompts.

    Returns:
        The number of tokens; 0 if all prompts are equal, since they run as one prompt anyway.

    Example:
        >>> count_shared_beginning([(1, 2, 3), (1, 2, 4, 5)])
        2
        >>> count_shared_beginning([(1, 2), (1, 2, 3)])
        1
        >>> count_shared_beginning([(1, 2)])
        0
    """
    different = {tuple(prompt) for prompt in prompts}
    if len(different) < 2:
        return 0
    shortest = min(len(prompt) for prompt in different)
    return min(count_common(*different), shortest - 1)
