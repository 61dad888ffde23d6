"""Read columns of answers: cell by cell, or all cells at once from an Arrow table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from catto.formats.columns import (
    TRUTH_OF_WORD,
    Fields,
    answer_of,
    answer_probability,
    probability_of,
    text_of,
    truth_of,
)
from catto.metrics.binning import Bools, Floats


class ColumnReader(NamedTuple):
    """The two ways to read a column.

    Attributes:
        read_cell: (column name, fields of a row) -> value. It raises ValueError for a bad cell.
        read_column: Arrow column -> all values, the same as from `read_cell`. None if a cell needs `read_cell`.
    """

    read_cell: Callable[[str, Fields], Any]
    read_column: Callable[[Any], Any]


def _read_probabilities(column: Any) -> Floats | None:
    """Return the numbers in [0, 1] of a column of numbers or texts, (N,); None if a cell contains anything else."""
    if str(column.type) not in ("double", "int64", "string"):
        return None
    try:
        values: Floats = column.cast("double").to_numpy()
    except ValueError:  # the base class of Arrow's error for a text that is not a number
        return None
    if not ((values >= 0) & (values <= 1)).all():
        return None
    return values


def _read_truths(column: Any) -> Bools | None:
    """Return booleans, also from 0, 1 and TRUTH_OF_WORD, (N,); None if a cell contains anything else.

    The column has no nulls: `read_plain_table` rejects them.
    """
    encoded = column.combine_chunks().dictionary_encode()
    words = [str(value).strip().lower() for value in encoded.dictionary.to_pylist()]
    truths = [TRUTH_OF_WORD.get(word) for word in words]
    if None in truths:
        return None
    values: Bools = np.array(truths, dtype=np.bool_)[encoded.indices.to_numpy()]
    return values


def _read_texts(column: Any) -> list[str] | None:
    """Return texts, also from whole numbers; None if a text is empty, padded, or a number such as 1.0.

    `text_of` rejects empty texts and changes the other two, so such a column is read cell by cell.
    """
    from pyarrow import compute

    kind = str(column.type)
    if kind == "int64":
        column = column.cast("string")
    elif kind != "string":
        return None
    # Matches an empty text, white space at either end, and a final point with or without zeros.
    needs_text_of = compute.match_substring_regex(column, r"^$|^\s|\s$|\.0*$")
    is_ascii = compute.all(compute.string_is_ascii(column)).as_py()
    if compute.any(needs_text_of).as_py():
        return None
    texts: list[str] = column.to_pylist()
    # Arrow's regular expressions match only ASCII white space.
    if not is_ascii and any(text != text.strip() for text in texts):
        return None
    return texts


def _read_nothing(_: Any) -> None:
    """Return None, because every cell needs `read_cell`."""


def _read_any_text(name: str, fields: Fields) -> str:
    return str(fields.get(name))


PROBABILITY = ColumnReader(probability_of, _read_probabilities)
TRUTH = ColumnReader(truth_of, _read_truths)
TEXT = ColumnReader(text_of, _read_texts)
ANSWER = ColumnReader(answer_of, _read_texts)
ANSWER_PROBABILITY = ColumnReader(answer_probability, _read_nothing)
SOURCE = ColumnReader(_read_any_text, _read_texts)


def read_table_columns(table: Any, wanted: Mapping[str, tuple[ColumnReader, str]]) -> dict[str, Any] | None:
    """Read whole columns of an Arrow table.

    Args:
        table: A `pyarrow.Table` without nulls.
        wanted: Name of the result -> its reader and the name in the table.

    Returns:
        Name -> values. None if the table must be read cell by cell: a column is missing or occurs twice, or a cell
        needs `read_cell`.
    """
    columns: dict[str, Any] = {}
    for name, (reader, column_name) in wanted.items():
        if table.column_names.count(column_name) != 1:
            return None
        values = reader.read_column(table.column(column_name))
        if values is None:
            return None
        columns[name] = values
    return columns
