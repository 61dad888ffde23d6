"""A plain file of rows read at once by Arrow, several times as fast as row by row, where both give the same.

Plain: JSON lines of one flat object each with the same keys and no null, or a CSV file without quotes. Anything else,
and whatever Arrow might read although the strict reader refuses it, is left to that one, which names the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from catto.formats import columns as cells
from catto.io.text_files import MOST_JSON_BYTES, find_suffix, open_input
from catto.metrics.binning import Bools, Floats

# Below this size importing Arrow takes longer than reading the rows.
SMALLEST = 1 << 21


def read_plain(path: Path) -> Any | None:
    """Return the file as an Arrow table without nulls; None where it is not plain, or small, or pyarrow is missing."""
    form = find_suffix(path)
    if form not in (".jsonl", ".ndjson", ".csv") or not path.is_file() or path.stat().st_size < SMALLEST:
        return None
    try:
        import pyarrow as arrow  # type: ignore[import-untyped]
    except ImportError:
        return None
    with open_input(path) as file:
        data = file.read(MOST_JSON_BYTES + 1)
    if len(data) > MOST_JSON_BYTES or b"\0" in data or b"\r" in data or data.startswith(b"\xef\xbb\xbf"):
        return None
    try:
        if not data.isascii():
            data.decode()
        table = _csv_table(arrow, data) if form == ".csv" else _json_table(arrow, data)
    except (UnicodeDecodeError, arrow.ArrowException):
        return None
    return table if table is not None and table.num_rows and not any(one.null_count for one in table.columns) else None


def _json_table(arrow: Any, data: bytes) -> Any | None:
    from pyarrow import json

    rows, breaks = data.count(b"{"), data.count(b"\n") + (not data.endswith(b"\n"))
    whole = data.startswith(b"{") and data.endswith((b"}", b"}\n"))
    if not (whole and rows == data.count(b"}") == breaks == data.count(b"}\n{") + 1):
        return None  # not one object a line
    table = json.read_json(arrow.py_buffer(data), read_options=json.ReadOptions(use_threads=False))
    numbers = [column for column in table.columns if arrow.types.is_floating(column.type)]
    if not all(np.isfinite(column.to_numpy()).all() for column in numbers):
        return None  # more digits than can be read
    flat = not any(arrow.types.is_nested(column.type) for column in table.columns)
    # Every key ends in a quote and a colon: as many of them as there are cells, so that no key is repeated.
    return table if flat and table.num_rows == rows and data.count(b'":') == rows * table.num_columns else None


def _csv_table(arrow: Any, data: bytes) -> Any | None:
    from pyarrow import csv

    header = data.partition(b"\n")[0].decode()
    names = header.split(",")
    padded = names != [name.strip() for name in names]
    if b'"' in data or header.startswith(("{", "[")) or any(sign in header for sign in ";\t|") or padded:
        return None
    texts = csv.ConvertOptions(column_types=dict.fromkeys(names, arrow.string()), strings_can_be_null=False)
    table = csv.read_csv(arrow.py_buffer(data), csv.ReadOptions(use_threads=False), convert_options=texts)
    return table if len(set(names)) == len(names) and table.column_names == names else None


def probabilities(column: Any) -> Floats | None:
    """Return numbers in [0, 1], also from their texts. (N,)."""
    if str(column.type) not in ("double", "int64", "string"):
        return None
    try:
        values: Floats = column.cast("double").to_numpy()
    except ValueError:  # Arrow's own error is one
        return None
    return values if ((values >= 0) & (values <= 1)).all() else None


def truths(column: Any) -> Bools | None:
    """Return booleans, also from 0, 1 and the words for them. (N,)."""
    encoded = column.combine_chunks().dictionary_encode()
    words = [cells.WORDS.get(str(value).strip().lower()) for value in encoded.dictionary.to_pylist()]
    return None if None in words else np.array(words, dtype=np.bool_)[encoded.indices.to_numpy()]


def texts(column: Any) -> list[str] | None:
    """Return texts, also from whole numbers; None where one is empty, padded, or a number such as 1.0."""
    values = list(map(str, column.to_pylist())) if str(column.type) in ("int64", "string") else [""]
    plain = all(value and value == value.strip() and not value.rstrip("0").endswith(".") for value in values)
    return values if plain else None


class Reader(NamedTuple):
    """How a field is read: a cell by its name from a row; and a whole Arrow column, None where it cannot be."""

    cell: Callable[[str, cells.Fields], Any]
    column: Callable[[Any], Any]


PROBABILITY, TRUTH = Reader(cells.probability_of, probabilities), Reader(cells.truth_of, truths)
TEXT, ANSWER = Reader(cells.text_of, texts), Reader(cells.answer_of, texts)
ANSWER_PROBABILITY = Reader(cells.answer_probability, lambda column: None)
SOURCE = Reader(lambda name, fields: str(fields.get(name)), texts)


def columns_of(table: Any, wanted: Mapping[str, tuple[Reader, str]]) -> dict[str, Any] | None:
    """Return each wanted column by (what reads it, its name in the table); None where one cannot be read at once."""
    columns: dict[str, Any] = {}
    for name, (reader, source) in wanted.items():
        columns[name] = reader.column(table.column(source)) if table.column_names.count(source) == 1 else None
        if columns[name] is None:
            return None
    return columns
