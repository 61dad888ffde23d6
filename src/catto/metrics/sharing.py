"""Intermediate results that several metrics of the same rows share.

The bootstrap calls one metric after another with the same arrays. Within `share_results()`, a function under
`@keep_last` returns its last result when it is called with the very same arguments. With a million rows and nine
metrics it halves the CPU time of `catto measure`. Outside of `share_results()` nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
T = TypeVar("T")


class _Call(NamedTuple):
    """The arrays that a function was called with, and its result."""

    arrays: list[Any]
    result: Any


# (function, arguments that are no arrays) -> the last such call.
_KEPT: ContextVar[dict[tuple[Any, ...], _Call] | None] = ContextVar("_KEPT", default=None)


@contextmanager
def share_results() -> Iterator[None]:
    """Keep the last results of functions under `@keep_last` until the block ends. Arrays must not change in it."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def keep_last(function: Callable[P, T]) -> Callable[P, T]:
    """Return the last result again when a function is called with the same array objects, within `share_results()`.

    The objects are compared, not their values, so arrays must not be changed in place inside the block.
    """

    @wraps(function)
    def call_or_repeat(*args: P.args, **kwargs: P.kwargs) -> T:
        kept = _KEPT.get()
        if kept is None or kwargs:
            return function(*args, **kwargs)
        arrays = [argument for argument in args if isinstance(argument, np.ndarray)]
        options = [argument for argument in args if isinstance(argument, int | str | None)]
        if len(arrays) + len(options) < len(args):  # a list, which may have changed
            return function(*args, **kwargs)
        key = (function, *options)
        last = kept.get(key)
        if last is not None and _are_same(arrays, last.arrays):
            result: T = last.result
            return result
        result = function(*args, **kwargs)
        kept[key] = _Call(arrays, result)
        return result

    return call_or_repeat


def _are_same(arrays: list[Any], others: list[Any]) -> bool:
    if len(arrays) != len(others):
        return False
    return all(array is other for array, other in zip(arrays, others, strict=True))
