"""Read the rows of JSON lines, JSON, CSV and Parquet files, plain or gzipped, row by row where the format allows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from catto.records import MAX_LINE_BYTES, DataError, opened, read_objects

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
    with opened(path) as file:
        try:
            value = json.loads(file.read().decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(path, None, f"not UTF-8 at byte {error.start}") from None
        except ValueError as error:
            raise DataError(path, None, f"not JSON: {error}") from None
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
            try:
                yield line.decode("utf-8-sig" if line_number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(path, None, f"line {line_number}: not UTF-8 at byte {error.start}") from None


def _read_csv(path: Path, columns: tuple[str, ...] | None) -> Rows:
    number, names = 0, columns
    try:
        for values in csv.reader(_text_lines(path), strict=True):
            if names is None:
                names = tuple(values)
            elif values:
                number += 1
                yield number, _named(path, number, names, values)
    except csv.Error as error:
        raise DataError(path, number + 1, f"not CSV: {error}") from None


def _named(path: Path, number: int, names: tuple[str, ...], values: list[str]) -> dict[str, Any]:
    if len(values) != len(names):
        raise DataError(path, number, f"expected {len(names)} columns ({', '.join(names)}), got {len(values)}")
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
