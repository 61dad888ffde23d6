"""Read rows from JSON lines, JSON, CSV, TSV and Parquet files, and from datasets on the Hub.

`read_rows` reads every format and names the row in its errors. `read_plain_table` reads a large, simple file as one
Arrow table, several times as fast, and leaves every other file to `read_rows`.
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
    MAX_JSON_BYTES,
    MAX_LINE_BYTES,
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
    """Yield (row, fields) for every row of a file, counted from 1.

    Args:
        path: The file; its suffix names the format.
        columns: The column names of a CSV file without a header.
    """
    for count, numbered_row in enumerate(_read_any(path, columns), 1):
        if count > MAX_ROWS:
            raise DataError(path, None, TOO_MANY_ROWS)
        yield numbered_row


def _read_any(path: Path, columns: tuple[str, ...] | None) -> Rows:
    match find_suffix(path):
        case ".jsonl" | ".ndjson":
            yield from _read_json_lines(path)
        case ".json":
            yield from _read_json_rows(path)
        case ".csv" | ".tsv":
            yield from _read_csv(path, columns)
        case ".parquet":
            with open_input(path) as file:
                yield from read_parquet(path, file)
        case _:
            with open_input(path):  # a missing file or a folder has an error of its own
                raise DataError(path, None, f"expected a file that ends in {', '.join(SUFFIXES)} (or that and .gz)")


def _read_json_lines(path: Path) -> Rows:
    for row, line in read_lines(path):
        yield row, parse_object(path, row, line)


def _read_json_rows(path: Path) -> Rows:
    """Yield the rows of a .json file: a list, JSON lines, an inspect_ai log, or a layout that pandas writes.

    Yields:
        The number of the row, counted from 1, and its fields by name.

    Raises:
        DataError: The file holds none of these, or a row is not an object.
    """
    text = read_text(path, MAX_JSON_BYTES)
    if _holds_json_lines(text):
        del text  # free the memory while the lines are read
        yield from _read_json_lines(path)
        return
    value = parse_json_text(path, text)
    rows = _find_rows(path, value)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            problem = f"expected a JSON object, got {type(row).__name__}"
            if isinstance(row, list):
                problem = f"{problem}; column names are needed: write objects"
            raise DataError(path, number, problem)
        yield number, row


def _holds_json_lines(text: str) -> bool:
    """Return whether the first line is a complete object and another object follows."""
    first, _, rest = text.strip().partition("\n")
    if not first.startswith("{") or not rest.lstrip().startswith("{"):
        return False
    try:
        return isinstance(parse_json(first), dict)
    except ValueError:
        return False


def _find_rows(path: Path, value: Any) -> list[Any]:
    """Find the rows in the value of a JSON file.

    An object has them in its field `data` or `samples`, or is itself an object of columns.

    Returns:
        The rows, which need not be objects yet.

    Raises:
        DataError: There are no rows, it is unclear where they are, or the file is the log of an unfinished run.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(path, None, EXPECTED_ROWS)
    if isinstance(value.get("samples"), list):  # this may be an inspect_ai log
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
    """Return rows as objects, given the names of the columns and the list of cells of each row."""
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
    """Return the rows of an object of columns, or of what pandas writes with orient="columns" or "index"."""
    entries = list(table.values())
    if not any(entries):
        raise DataError(path, None, EXPECTED_ROWS)
    if all(isinstance(entry, list) for entry in entries):
        return _rows_of_columns(path, table)
    if all(isinstance(entry, dict) for entry in entries):
        return _rows_of_nested_object(path, table)
    raise DataError(path, None, EXPECTED_ROWS)


def _rows_of_columns(path: Path, table: dict[str, list[Any]]) -> list[Any]:
    """Return the rows of an object of columns, each a list."""
    lengths = {len(column) for column in table.values()}
    if len(lengths) > 1:
        expected = f"expected columns of equal length, got {join_names(sorted(lengths))}"
        raise DataError(path, None, expected)
    rows = []
    for cells in zip(*table.values(), strict=True):
        rows.append(dict(zip(table, cells, strict=True)))
    return rows


def _rows_of_nested_object(path: Path, table: dict[str, dict[str, Any]]) -> list[Any]:
    """Return the rows of an object of objects, as pandas writes it with orient="columns" or orient="index".

    The keys at one level are row names, and those at the other level are column names. Row names must be numbers, as
    pandas writes them for a table without an index, and column names must not be numbers. Otherwise it is unclear which
    are which.

    Args:
        path: The file, for errors.
        table: `{"x": {"0": 1, "1": 2}}` with orient="columns", or `{"0": {"x": 1}, "1": {"x": 2}}` with orient="index".

    Returns:
        The fields of each row, such as `[{"x": 1}, {"x": 2}]` for both examples.

    Raises:
        DataError: The keys at both levels are numbers or neither are, or the columns differ in their rows.
    """
    outer_are_numbers = all(name.isdecimal() for name in table)
    inner_are_numbers = True
    for entry in table.values():
        if not all(name.isdecimal() for name in entry):
            inner_are_numbers = False
    if outer_are_numbers == inner_are_numbers:  # both or neither
        problem = "an object of objects: cannot tell whether the outer or the inner keys name the rows"
        hint = 'with pandas, write orient="records", lines=True to a .jsonl file'
        raise DataError(path, None, f"{problem}; {hint}")
    if outer_are_numbers:  # orient="index"
        return list(table.values())
    # orient="columns"
    first_column = next(iter(table))
    row_names = list(table[first_column])
    for name, column in table.items():
        if list(column) != row_names:
            raise DataError(path, None, f"{name}: expected the same rows as in {first_column}")
    rows = []
    for row_name in row_names:
        rows.append({name: column[row_name] for name, column in table.items()})
    return rows


EXPECTED_ROWS = 'expected a JSON list of rows, or {"data": [...]}, or {"samples": [...]}, or an object of columns'


def check_finished(path: Path, log: dict[str, Any]) -> None:
    """Refuse an inspect_ai log of a run that failed, was cancelled or is still running. `log` is the log's header."""
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
    """Yield the rows of a CSV file.

    Args:
        path: The file.
        names: The column names of a file without a header; None reads them from the first line.

    Yields:
        The number of the row, counted from 1 without the header and blank lines, and its cells by column.

    Raises:
        DataError: The file is not CSV, a column name is repeated, or a row has the wrong number of cells.
    """
    lines = (line for _, line in iterate_lines(path, "line"))
    first_line = next((line for line in lines if line.strip()), "")  # blank lines before it are skipped
    has_header = names is None
    if has_header and first_line.startswith(('{"', "[{")):
        raise DataError(path, None, "contains JSON, not CSV: JSON lines must be named .jsonl, a JSON list .json")
    delimiter = _find_delimiter(path, first_line, has_header=has_header)
    csv.field_size_limit(MAX_LINE_BYTES)  # the default is 128 kB, and a response may be longer
    number = 0
    try:
        for values in csv.reader(chain([first_line], lines), delimiter=delimiter, strict=True):
            if names is None:  # this is the header
                names = tuple(value.strip() for value in values)
                _refuse_duplicates(path, names)
                continue
            if not values:  # a blank line
                continue
            number += 1
            if len(values) != len(names):
                problem = f"expected {len(names)} columns ({join_names(names)}), got {len(values)}"
                raise DataError(path, number, problem + _decimal_comma_hint(values, delimiter))
            yield number, dict(zip(names, values, strict=True))
    except csv.Error as error:
        raise DataError(path, number + 1, f"not CSV: {error}") from None


def _find_delimiter(path: Path, first_line: str, *, has_header: bool) -> str:
    """Return the most frequent delimiter outside of quotes in the header; a file without a header uses commas."""
    if find_suffix(path) == ".tsv":
        return "\t"
    if not has_header:
        return ","
    unquoted = re.sub('"[^"]*"', "", first_line)
    return max(",;\t|", key=unquoted.count)


def _decimal_comma_hint(values: Sequence[str], delimiter: str) -> str:
    """Return a hint if a row may have too many cells because of decimal commas, as in 0,9."""
    if delimiter != ",":
        return ""
    for left, right in pairwise(values):
        if left.strip() in ("0", "1") and right.strip().isdecimal():
            return "; decimal commas are not read: write 0.9, not 0,9"
    return ""


def read_hub(
    error_source: str, problem: str, name: str, split: str, config: str | None = None, revision: str | None = None
) -> Any:
    """Load a split of a dataset on the Hub.

    Args:
        error_source: The file or setting that an error names.
        problem: The message of an error, in which {} is replaced by the reason.
        name: The dataset.
        split: Its split.
        config: Its configuration; None is the default one.
        revision: Its revision; None is the newest.

    Returns:
        The `datasets.Dataset`, an iterable of rows.

    Raises:
        DataError: `datasets` is not installed, or the dataset cannot be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(error_source, None, "reading the hub needs datasets: pip install 'catto[train]'") from None
    try:
        return load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # errors from the Hub, the network and the cache have no common class
        reason = type(error).__name__
        if str(error):
            reason = str(error).splitlines()[0]
        raise DataError(error_source, None, problem.format(reason)) from None


# ---- a whole table at once

# Below this size importing Arrow takes longer than reading the rows.
MIN_TABLE_BYTES = 1 << 21


def read_plain_table(path: Path) -> Any | None:
    """Read a large, simple file as one `pyarrow.Table`, several times as fast as with `read_rows`.

    A file is simple if it is CSV without quotes, or JSON lines of flat objects with the same keys and no nulls. The
    cells of a CSV file are read as texts. A file that `read_rows` would refuse or read differently is never simple.

    Args:
        path: The file; its suffix names the format.

    Returns:
        The table, without nulls. None for any file that must be read with `read_rows`, because it is small, not simple,
        too large or of a different format.
    """
    suffix = find_suffix(path)
    if suffix not in (".jsonl", ".ndjson", ".csv"):
        return None
    if not path.is_file() or path.stat().st_size < MIN_TABLE_BYTES:
        return None
    with open_input(path) as file:
        data = file.read(MAX_JSON_BYTES + 1)  # one more than allowed, to see whether the file is larger
    if len(data) > MAX_JSON_BYTES:
        return None
    # Arrow and `read_rows` may treat these differently.
    has_byte_order_mark = data.startswith(b"\xef\xbb\xbf")
    has_control_bytes = b"\0" in data or b"\r" in data
    if has_byte_order_mark or has_control_bytes:
        return None

    import pyarrow as arrow

    try:
        if not data.isascii():
            data.decode()  # raises UnicodeDecodeError if it is not UTF-8
        table = _parse_csv_table(data) if suffix == ".csv" else _parse_json_table(data)
    except (UnicodeDecodeError, arrow.ArrowException):
        return None
    if table is None or table.num_rows == 0 or table.num_rows > MAX_ROWS:
        return None
    if any(column.null_count for column in table.columns):
        return None
    return table


def _parse_json_table(data: bytes) -> Any | None:
    """Return JSON lines as a table; None unless they are flat objects with the same keys, one per line."""
    import pyarrow as arrow
    from pyarrow import compute, json

    # One flat object per line: as many opening and closing braces as lines, and at every line break an object ends and
    # the next one begins. Nested objects and texts with braces have more braces, so `read_rows` must read them.
    rows = data.count(b"{")
    lines = data.count(b"\n")
    if not data.endswith(b"\n"):  # the last line
        lines += 1
    objects_at_line_breaks = data.count(b"}\n{") + 1
    is_complete = data.startswith(b"{") and data.endswith((b"}", b"}\n"))
    one_object_per_line = rows == data.count(b"}") == lines == objects_at_line_breaks
    if not is_complete or not one_object_per_line:
        return None
    table = json.read_json(arrow.py_buffer(data), read_options=json.ReadOptions(use_threads=False))
    for column in table.columns:
        if arrow.types.is_nested(column.type):
            return None
        if arrow.types.is_floating(column.type) and not compute.all(compute.is_finite(column)).as_py():
            # Arrow reads a whole number with too many digits as infinity; `read_rows` may refuse it.
            return None
    # Every key ends in a quote and a colon. If there are as many of these as cells, no key is repeated or missing.
    cells = rows * table.num_columns
    if table.num_rows != rows or data.count(b'":') != cells:
        return None
    return table


def _parse_csv_table(data: bytes) -> Any | None:
    """Return a CSV file as a table of texts; None if it has quotes or a header that `read_rows` reads differently."""
    import pyarrow as arrow
    from pyarrow import csv as arrow_csv

    header = data.partition(b"\n")[0].decode()
    names = header.split(",")
    has_quotes = b'"' in data
    is_padded = any(name != name.strip() for name in names)
    has_other_separator = any(sign in header for sign in ";\t|")
    holds_json = header.startswith(("{", "["))
    has_repeated_name = len(set(names)) < len(names)
    if has_quotes or is_padded or has_other_separator or holds_json or has_repeated_name:
        return None
    all_texts = dict.fromkeys(names, arrow.string())
    options = arrow_csv.ConvertOptions(column_types=all_texts, strings_can_be_null=False)
    table = arrow_csv.read_csv(arrow.py_buffer(data), arrow_csv.ReadOptions(use_threads=False), convert_options=options)
    if table.column_names != names:  # blank lines before the header, for example
        return None
    return table
