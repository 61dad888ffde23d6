"""Processes that can be killed or spread, forked from the one that runs the tests: everything is imported in them.

A new interpreter needs seconds to import torch and what stands on it, more than most of these processes run.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm


class Forked:
    """A call in a process of its own; what it prints can be read line by line."""

    def __init__(self, function: Callable[..., object], *arguments: Any, **options: Any) -> None:
        reader, writer = os.pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=_call, args=(reader, writer, function, arguments, options)
        )
        with warnings.catch_warnings():
            # From Python 3.12 on: the threads of the test runner only wait for messages.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        os.close(writer)
        self.output = os.fdopen(reader, encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """Yield the lines that the process prints, as they come."""
        for line in self.output:
            yield line.rstrip("\n")

    def finished(self) -> tuple[list[str], int]:
        """Wait for its end; all that it printed, and the exit code."""
        return list(self.lines()), self.wait()

    def wait(self, seconds: float = 900.0) -> int:
        """Return the exit code; a signal's number is negative."""
        self.process.join(seconds)
        code = self.process.exitcode
        assert code is not None, "it did not end"
        self.output.close()
        return code


def _call(
    reader: int, writer: int, function: Callable[..., object], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """In the new process: print into the pipe, call, and leave with 0, or with 1 after a traceback."""
    # What the parent left to its collector stays there: a finaliser may reach for a thread that only the parent has.
    gc.freeze()
    # tqdm's own lock is shared by all processes: one that is killed while it holds the lock would block the others.
    tqdm.set_lock(threading.RLock())
    os.close(reader)
    os.dup2(writer, 1)
    os.close(writer)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    code = 1
    try:
        function(*arguments, **options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)  # at once: what the parent registered for its own end must not happen here
