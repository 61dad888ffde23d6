"""Ask a user's own program whether two answers mean the same."""

from __future__ import annotations

import json
import shlex
import subprocess
from contextlib import suppress
from threading import Timer
from types import TracebackType
from typing import Self

from catto.errors import DataError

MAX_REPLY_BYTES = 64  # a longer reply is invalid anyway, and may never end


class EquivalenceProcess:
    """A running program that compares answers; call it as the `equivalent` of `merge_equivalent`.

    The program reads lines such as `{"first": "nyc", "second": "new york city"}` from its standard input. It replies to
    each with a line `true` or `false`, before the next one is sent. The same pair is sent only once.

    Args:
        command: The program with its arguments. They are split as in a shell, but no shell runs them.
        seconds: Maximum number of seconds for a reply.

    Raises:
        ValueError: The command is empty.
        DataError: The program cannot be started.
    """

    def __init__(self, command: str, *, seconds: float = 120.0) -> None:
        arguments = shlex.split(command)
        if not arguments:
            raise ValueError("--equivalent: the command is empty")
        self.command = command
        self.seconds = seconds
        self._replies: dict[tuple[str, str], bool] = {}
        try:
            self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as error:
            raise DataError(arguments[0], None, f"cannot be started: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __call__(self, first: str, second: str) -> bool:
        """Return whether the program calls two answers equivalent; DataError if its reply is missing or invalid."""
        pair = (first, second)
        if pair not in self._replies:
            self._replies[pair] = self._ask(first, second)
        return self._replies[pair]

    def _ask(self, first: str, second: str) -> bool:
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        line = json.dumps({"first": first, "second": second}, ensure_ascii=False) + "\n"
        timer = Timer(self.seconds, self._process.kill)  # a killed process ends the `readline` below
        timer.start()
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
            reply = self._process.stdout.readline(MAX_REPLY_BYTES)
        except OSError:  # the program has ended
            reply = b""
        finally:
            timer.cancel()
        word = reply.decode(errors="replace").strip()
        if word not in ("true", "false"):
            shown = repr(word) if reply else "no reply: the program ended or took too long"
            raise DataError(self.command, None, f"expected true or false for {line.strip()}, got {shown}")
        return word == "true"

    def close(self) -> None:
        """End the process: close its standard input, and kill it if it does not exit within five seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # the program may have ended before it read everything
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
