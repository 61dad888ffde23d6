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
        read_cell: Takes the name of the column and the fields of a row; returns the value. It raises ValueError for a
            bad cell.
        read_column: Takes an Arrow column; returns all values, equal to those of `read_cell`. It returns None if it
            cannot read a cell. Then the file is read cell by cell, and `read_cell` reads or rejects this cell.
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
    """Return the values of a column of texts or whole numbers as texts; None if `text_of` must read a cell.

    `text_of` rejects an empty text, removes white space at both ends, and shortens 1.0 to 1.
    """
    from pyarrow import compute

    texts: list[str]
    column_type = str(column.type)
    if column_type == "int64":
        texts = column.cast("string").to_pylist()
        return texts
    if column_type != "string":
        return None
    # Matches an empty text, white space at either end, and a final point with or without zeros. The last case includes
    # texts that `text_of` leaves unchanged, such as `etc.`: reading them cell by cell is slower, but gives the same.
    needs_text_of = compute.match_substring_regex(column, r"^$|^\s|\s$|\.0*$")
    if compute.any(needs_text_of).as_py():
        return None
    texts = column.to_pylist()
    # Arrow's \s matches only ASCII white space, but `str.strip` removes all white space.
    is_ascii = compute.all(compute.string_is_ascii(column)).as_py()
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
        wanted: Key of the result -> the reader of the column, and its name in the table.

    Returns:
        Key -> all values of the column. None if the table must be read cell by cell: a column is missing or occurs
        twice, or its reader cannot read it as a whole.
    """
    columns: dict[str, Any] = {}
    for key, (reader, column_name) in wanted.items():
        if table.column_names.count(column_name) != 1:
            return None
        values = reader.read_column(table.column(column_name))
        if values is None:
            return None
        columns[key] = values
    return columns
