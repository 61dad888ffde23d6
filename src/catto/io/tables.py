"""Read the rows of any file: JSON lines, JSON, CSV, TSV, Parquet or a dataset on the Hub.

`read_rows` yields the rows of every format and names the row in its errors. `read_plain_table` reads a large file of a
simple form as one Arrow table, several times as fast; whatever is not simple is left to `read_rows`.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from catto.errors import DataError, join_names, parse_json, shorten_text
from catto.io.parquet_rows import MAX_ROWS, TOO_MANY_ROWS, read_parquet
from catto.io.text_files import (
    MAX_LINE_BYTES,
    MOST_JSON_BYTES,
    SUFFIXES,
    find_suffix,
    iterate_lines,
    open_input,
    parse_json_text,
    parse_object,
    read_lines,
    read_text,
)

Rows = Iterator[tuple[int, dict[str, Any]]]


def read_rows(path: Path, columns: tuple[str, ...] | None = None) -> Rows:
    """Yield (row, fields), rows counted from 1. `columns` name the fields of a CSV file without a header."""
    for count, numbered in enumerate(_read_any(path, columns), 1):
        if count > MAX_ROWS:
            raise DataError(path, None, TOO_MANY_ROWS)
        yield numbered


def _read_any(path: Path, columns: tuple[str, ...] | None) -> Rows:
    match find_suffix(path):
        case ".jsonl" | ".ndjson":
            yield from ((row, parse_object(path, row, line)) for row, line in read_lines(path))
        case ".json":
            yield from _read_json_rows(path)
        case ".csv" | ".tsv":
            yield from _read_csv(path, columns)
        case ".parquet":
            with open_input(path) as file:
                yield from read_parquet(path, file)
        case _:
            with open_input(path):  # refuses a folder, and what is missing
                raise DataError(path, None, f"expected a file that ends in {', '.join(SUFFIXES)} (or that and .gz)")


def _read_json_rows(path: Path) -> Rows:
    """Yield the rows of a JSON file: a list, JSON lines by another name, a log, or one of the layouts of pandas."""
    text = read_text(path, MOST_JSON_BYTES)
    if _holds_json_lines(text):
        del text
        for row, line in read_lines(path):
            yield row, parse_object(path, row, line)
        return
    value = parse_json_text(path, text)
    rows = _find_rows(path, value)
    for number, value_of_row in enumerate(rows, 1):
        if not isinstance(value_of_row, dict):
            problem = f"expected a JSON object, got {type(value_of_row).__name__}"
            if isinstance(value_of_row, list):
                problem = f"{problem}; names of columns are needed: write objects"
            raise DataError(path, number, problem)
        yield number, value_of_row


def _holds_json_lines(text: str) -> bool:
    """Whether the first line is a whole object and another one follows."""
    first, _, rest = text.strip().partition("\n")
    if not first.startswith("{") or not rest.lstrip().startswith("{"):
        return False
    try:
        return isinstance(parse_json(first), dict)
    except ValueError:
        return False


def _find_rows(path: Path, value: Any) -> list[Any]:
    """Return the rows in the value of a JSON file; what has no rows, or leaves open which they are, is refused."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(path, None, EXPECTED_ROWS)
    if isinstance(value.get("samples"), list):
        check_finished(path, value)
    columns = value.get("columns")
    table = value.get("data")
    if isinstance(columns, list) and isinstance(table, list):  # pandas' orient="split"
        return _name_cells(path, columns, table)
    rows = value.get("data", value.get("samples", value))
    if isinstance(rows, dict):
        return _rows_of_object(path, rows)
    if isinstance(rows, list):
        return rows
    raise DataError(path, None, EXPECTED_ROWS)


def _name_cells(path: Path, columns: list[Any], table: list[Any]) -> list[dict[str, Any]]:
    names = [str(column) for column in columns]
    _refuse_duplicates(path, names)
    rows = []
    for number, cells in enumerate(table, 1):
        is_complete = isinstance(cells, list) and len(cells) == len(names)
        if not is_complete:
            raise DataError(path, number, f"expected a list of {len(names)} cells ({join_names(names)})")
        rows.append(dict(zip(names, cells, strict=True)))
    return rows


def _rows_of_object(path: Path, table: dict[str, Any]) -> list[Any]:
    """Return the rows of an object of columns, or of pandas' orient="columns" or "index"."""
    entries = list(table.values())
    if not any(entries):
        raise DataError(path, None, EXPECTED_ROWS)
    if all(isinstance(entry, list) for entry in entries):
        lengths = {len(column) for column in entries}
        if len(lengths) > 1:
            expected = f"expected columns of equal length, got {join_names(sorted(lengths))}"
            raise DataError(path, None, expected)
        rows = []
        for cells in zip(*entries, strict=True):
            rows.append(dict(zip(table, cells, strict=True)))
        return rows
    if not all(isinstance(entry, dict) for entry in entries):
        raise DataError(path, None, EXPECTED_ROWS)
    # pandas numbers the rows of a table without an index of its own, and columns have names.
    outer_are_numbers = all(name.isdecimal() for name in table)
    inner_are_numbers = True
    for entry in entries:
        if not all(name.isdecimal() for name in entry):
            inner_are_numbers = False
    if outer_are_numbers == inner_are_numbers:
        hint = 'either could be the rows; with pandas write orient="records", lines=True to a .jsonl file'
        raise DataError(path, None, f"an object of objects: {hint}")
    if outer_are_numbers:
        return entries
    index = list(entries[0])
    for name, entry in table.items():
        if list(entry) != index:
            raise DataError(path, None, f"{name}: expected the same rows as in {next(iter(table))}")
    rows = []
    for row_name in index:
        rows.append({name: entry[row_name] for name, entry in table.items()})
    return rows


EXPECTED_ROWS = 'expected a JSON list of rows, or {"data": [...]}, or {"samples": [...]}, or an object of columns'


def check_finished(path: Path, log: dict[str, Any]) -> None:
    """Refuse a log of inspect_ai whose run failed, was cancelled or is still running. `log` is its header."""
    status = log.get("status")
    if status is None or status == "success":
        return
    outcome = "failed" if status == "error" else "did not finish"
    details = f"status {shorten_text(str(status), 40)}"
    error = log.get("error")
    if isinstance(error, dict) and error.get("message"):
        reason = shorten_text(str(error["message"]), 200)
        details = f"{details}: {reason}"
    raise DataError(path, None, f"the run {outcome} ({details}): nothing to measure")


def _refuse_duplicates(path: Path, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(path, None, f"column {name!r} occurs twice")


def _read_csv(path: Path, names: tuple[str, ...] | None) -> Rows:
    """Yield the rows of a CSV file; names: the columns of a file without a header."""
    lines = (line for _, line in iterate_lines(path, "line"))
    first = next((line for line in lines if line.strip()), "")
    if names is None and first.startswith(('{"', "[{")):
        raise DataError(path, None, "holds JSON, not CSV: JSON lines must be named .jsonl, a JSON list .json")
    delimiter = _find_delimiter(path, first, has_header=names is None)
    csv.field_size_limit(MAX_LINE_BYTES)
    number = 0
    try:
        for values in csv.reader(chain([first], lines), delimiter=delimiter, strict=True):
            if names is None:
                names = tuple(value.strip() for value in values)
                _refuse_duplicates(path, names)
                continue
            if not values:
                continue
            number += 1
            if len(values) != len(names):
                problem = f"expected {len(names)} columns ({join_names(names)}), got {len(values)}"
                raise DataError(path, number, problem + _decimal_comma_hint(values, delimiter))
            yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DataError(path, number + 1, f"not CSV: {error}") from None


def _find_delimiter(path: Path, first_line: str, *, has_header: bool) -> str:
    """Return the most frequent delimiter in the header outside of quotes; a file without a header has commas."""
    if find_suffix(path) == ".tsv":
        return "\t"
    if not has_header:
        return ","
    unquoted = re.sub('"[^"]*"', "", first_line)
    return max(",;\t|", key=unquoted.count)


def _decimal_comma_hint(values: Sequence[str], delimiter: str) -> str:
    """Return a hint if decimal commas may have cut numbers of a comma-separated row in two: 0,9."""
    if delimiter != ",":
        return ""
    for left, right in pairwise(values):
        if left.strip() in ("0", "1") and right.strip().isdecimal():
            return "; decimal commas are not read: write 0.9, not 0,9"
    return ""


def read_hub(
    place: str, trouble: str, name: str, split: str, config: str | None = None, revision: str | None = None
) -> Any:
    """Return the rows of a dataset on the hub. An error names `place` and reads `trouble`, where {} is the reason."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(place, None, "reading the hub needs datasets: pip install 'catto[train]'") from None
    try:
        return load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # the errors of the hub, the network and the cache share no class
        reason = type(error).__name__
        if str(error):
            reason = str(error).splitlines()[0]
        raise DataError(place, None, trouble.format(reason)) from None


# ---- a whole table at once

# Below this size importing Arrow takes longer than reading the rows.
MIN_TABLE_BYTES = 1 << 21


def read_plain_table(path: Path) -> Any | None:
    """Return a large, simple file as a `pyarrow.Table` without nulls; None if `read_rows` must read it.

    Simple: JSON lines of one flat object each with the same keys and no null, or a CSV file without quotes. All cells
    of a CSV file are texts. Whatever Arrow reads although `read_rows` refuses it is not simple.
    """
    suffix = find_suffix(path)
    if suffix not in (".jsonl", ".ndjson", ".csv"):
        return None
    if not path.is_file() or path.stat().st_size < MIN_TABLE_BYTES:
        return None
    with open_input(path) as file:
        data = file.read(MOST_JSON_BYTES + 1)
    has_other_marks = b"\0" in data or b"\r" in data or data.startswith(b"\xef\xbb\xbf")
    if len(data) > MOST_JSON_BYTES or has_other_marks:
        return None

    import pyarrow as arrow

    try:
        if not data.isascii():
            data.decode()
        table = _parse_csv_table(data) if suffix == ".csv" else _parse_json_table(data)
    except (UnicodeDecodeError, arrow.ArrowException):
        return None
    if table is None or table.num_rows == 0 or table.num_rows > MAX_ROWS:
        return None
    if any(column.null_count for column in table.columns):
        return None
    return table


def _parse_json_table(data: bytes) -> Any | None:
    import pyarrow as arrow
    from pyarrow import compute, json

    rows = data.count(b"{")
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    is_whole = data.startswith(b"{") and data.endswith((b"}", b"}\n"))
    one_object_per_line = rows == data.count(b"}") == lines == data.count(b"}\n{") + 1
    if not is_whole or not one_object_per_line:
        return None
    table = json.read_json(arrow.py_buffer(data), read_options=json.ReadOptions(use_threads=False))
    for column in table.columns:
        if arrow.types.is_nested(column.type):
            return None
        if arrow.types.is_floating(column.type) and not compute.all(compute.is_finite(column)).as_py():
            return None  # more digits than can be read
    # Every key ends in a quote and a colon. If there are as many as there are cells, no key is repeated.
    if table.num_rows != rows or data.count(b'":') != rows * table.num_columns:
        return None
    return table


def _parse_csv_table(data: bytes) -> Any | None:
    import pyarrow as arrow
    from pyarrow import csv as arrow_csv

    header = data.partition(b"\n")[0].decode()
    names = header.split(",")
    is_padded = any(name != name.strip() for name in names)
    has_other_separator = any(sign in header for sign in ";\t|")
    holds_json = header.startswith(("{", "["))
    if b'"' in data or is_padded or has_other_separator or holds_json or len(set(names)) < len(names):
        return None
    options = arrow_csv.ConvertOptions(column_types=dict.fromkeys(names, arrow.string()), strings_can_be_null=False)
    table = arrow_csv.read_csv(arrow.py_buffer(data), arrow_csv.ReadOptions(use_threads=False), convert_options=options)
    if table.column_names != names:
        return None
    return table
