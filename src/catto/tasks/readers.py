"""Read the rows of JSON lines, JSON, CSV and Parquet files, plain or gzipped, row by row where the format allows."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from catto.problems import DataError, listed, parse_json
from catto.records import MAX_LINE_BYTES, decoded, opened, read_json, read_objects

# A JSON file is held whole, also when it was gzipped from nothing; more rows than this belong into JSON lines.
MOST_JSON_BYTES = 2**29
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")

Rows = Iterator[tuple[int, dict[str, Any]]]


def kind(path: Path) -> str:
    """The format by the file's name, `.gz` aside; empty where it is none that we read."""
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def read_rows(path: Path, columns: tuple[str, ...] | None = None) -> Rows:
    """Yield (row, fields), rows counted from 1. `columns` name the fields of a CSV file without a header."""
    match kind(path):
        case ".jsonl" | ".ndjson":
            return read_objects(path)
        case ".json":
            return _read_json(path)
        case ".csv":
            return _read_csv(path, columns)
        case ".parquet":
            return _read_parquet(path)
    raise DataError(path, None, f"expected a file that ends in {', '.join(SUFFIXES)} (or that and .gz)")


def _read_json(path: Path) -> Rows:
    value = read_json(path, MOST_JSON_BYTES)
    rows = value.get("data") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise DataError(path, None, 'expected a JSON list of rows, or {"data": [...]}')
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(path, number, f"expected a JSON object, got {type(row).__name__}")
        yield number, row


def _text_lines(path: Path) -> Iterator[str]:
    """Lines with their ends, since a quoted CSV field may hold line breaks."""
    with opened(path) as file:
        line_number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            line_number += 1
            if len(line) > MAX_LINE_BYTES:
                raise DataError(path, None, f"line {line_number} is longer than {MAX_LINE_BYTES // 2**20} MB")
            yield decoded(line, path, line_number, "line")


def _read_csv(path: Path, columns: tuple[str, ...] | None) -> Rows:
    number, names = 0, columns
    try:
        for values in csv.reader(_text_lines(path), strict=True):
            if names is None:
                names = _header(path, values)
            elif values:
                number += 1
                yield number, _named(path, number, names, values)
    except csv.Error as error:
        raise DataError(path, number + 1, f"not CSV: {error}") from None


def _header(path: Path, names: list[str]) -> tuple[str, ...]:
    """Check the names of the columns; what is another format, or was separated by other signs, is told so."""
    whole = ",".join(names)
    if whole.startswith(("{", "[")) and _is_json(whole):
        raise DataError(path, None, "holds JSON, not CSV: JSON lines must be named .jsonl, a JSON list .json")
    if len(names) == 1:
        for sign, word in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
            if sign in whole:
                raise DataError(path, None, f"columns are separated by {word}, expected commas (and points in numbers)")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(path, None, f"column {twice[0]!r} stands twice in the header")
    return tuple(names)


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return text.startswith('{"')
    return True


def _named(path: Path, number: int, names: tuple[str, ...], values: list[str]) -> dict[str, Any]:
    if len(values) != len(names):
        raise DataError(path, number, f"expected {len(names)} columns ({listed(names)}), got {len(values)}")
    return dict(zip(names, values, strict=True))


def _read_parquet(path: Path) -> Rows:
    try:
        import pyarrow as arrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise DataError(path, None, "reading Parquet needs pyarrow: pip install 'catto[train]'") from None
    number = 0
    with opened(path) as file:
        try:
            # One batch at a time: a batch is all that is held.
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except arrow.ArrowException as error:
            raise DataError(path, None, f"not Parquet: {str(error).splitlines()[0]}") from None
