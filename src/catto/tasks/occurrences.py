"""Count how often each id was met without holding the ids."""

from __future__ import annotations

import sqlite3
from types import TracebackType
from typing import Self


class Occurrences:
    """Exact counts in SQLite's unnamed temporary database: on disk beyond 2 MB, gone when closed."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = OFF")
        self._db.execute("PRAGMA cache_size = -2048")
        self._db.execute("CREATE TABLE seen (name TEXT PRIMARY KEY, times INTEGER) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._db.close()

    def count(self, name: str) -> int:
        """How often the name was counted before."""
        if self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, 1)", (name,)).rowcount == 1:
            return 0
        (times,) = self._db.execute("SELECT times FROM seen WHERE name = ?", (name,)).fetchone()
        self._db.execute("UPDATE seen SET times = times + 1 WHERE name = ?", (name,))
        return int(times)
