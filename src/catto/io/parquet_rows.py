"""Read the rows of a Parquet file in bounded memory.

A Parquet file of a few kilobytes can describe gigabytes: one long text that every row refers to, or one list whose
million values are a single run. The sizes in its footer are claims that nothing enforces. This module counts instead:

- the header of every page, whose sizes the decoder does enforce, before Arrow unpacks a page;
- the texts of every batch, kept as references to a dictionary, before they become Python objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from catto.errors import DataError

# The pages of all columns that are unpacked at one time. Writers aim at 1 MB per page and column.
MAX_PAGE_BYTES = 2**29
# Values in lists, which Arrow may hold at once for a single row.
MAX_LIST_VALUES = 2**26
# One row as Python objects: as much as a line of JSON lines.
MAX_ROW_BYTES = 2**24
# Rows of a file. What a command holds per row is small, and a run of equal values takes no space in the file.
MAX_ROWS = 10_000_000
# Rows that Arrow decodes together.
MAX_BATCH_BYTES = 2**26
MAX_BATCH_ROWS = 1024
# A file may expand to this many bytes, or to this many times its own size if that is more.
MAX_EXPANDED_BYTES = 2**30
MAX_EXPANSION = 1000
TOO_MANY_ROWS = f"holds more than {MAX_ROWS:,} rows"


def read_parquet(path: Path, file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row, fields) of an open Parquet file, rows counted from 1.

    Args:
        path: Its name, for errors.
        file: The open file, which must be seekable.

    Yields:
        The row's number and its fields by their names.

    Raises:
        DataError: The file is not Parquet, or holds more than can be read in bounded memory.
    """
    import pyarrow as arrow
    from pyarrow import parquet

    file_bytes = path.stat().st_size
    expanded_limit = max(MAX_EXPANDED_BYTES, MAX_EXPANSION * file_bytes)
    expanded_bytes = 0
    number = 0
    try:
        plain = parquet.ParquetFile(file)
        schema = plain.schema
        texts = []
        for place in range(len(schema)):
            column = schema.column(place)
            if column.physical_type == "BYTE_ARRAY":
                texts.append(column.path)
        table = parquet.ParquetFile(file, read_dictionary=texts, pre_buffer=False)
        _check_names(path, table.schema_arrow.names)
        if table.metadata.num_rows > MAX_ROWS:
            raise DataError(path, None, TOO_MANY_ROWS)
        _check_pages(path, file, table)
        for batch in table.iter_batches(batch_size=_batch_rows(schema)):
            for part in _split_batch(path, number, batch):
                expanded_bytes += _expanded_bytes(part)
                if expanded_bytes > expanded_limit:
                    megabytes = expanded_limit // 2**20
                    raise DataError(path, None, f"expands to more than {megabytes:,} MB from {file_bytes:,} bytes")
                for fields in _make_rows(part, plain.schema_arrow):
                    number += 1
                    yield number, fields
    except (arrow.ArrowException, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(path, None, f"not Parquet: {reason}") from None


def _check_names(path: Path, names: list[str]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise DataError(path, None, f"column {name!r} occurs twice")


def _make_rows(batch: Any, schema: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python objects. `schema` has texts in place of the references to them."""
    from pyarrow import ArrowNotImplementedError

    with suppress(ArrowNotImplementedError):  # some kinds of text cannot be the target of a cast
        batch = batch.cast(schema)  # this halves the time
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def _batch_rows(schema: Any) -> int:
    """Return the number of rows per batch; fewer where values have a fixed length that is large."""
    longest = 1
    for place in range(len(schema)):
        longest = max(longest, schema.column(place).length or 0)
    return max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // longest))


# ---- texts ----------------------------------------------------------------------------------------------------------


def _split_batch(path: Path, rows_before: int, batch: Any) -> Iterator[Any]:
    """Yield a batch, or its halves if it is too large; a row that is too large is refused."""
    size = _expanded_bytes(batch)
    if size <= MAX_ROW_BYTES:
        yield batch
        return
    if batch.num_rows == 1:
        raise DataError(path, rows_before + 1, f"row is larger than {MAX_ROW_BYTES // 2**20} MB")
    half = batch.num_rows // 2
    yield from _split_batch(path, rows_before, batch.slice(0, half))
    yield from _split_batch(path, rows_before + half, batch.slice(half))


def _expanded_bytes(batch: Any) -> int:
    """Return the bytes of a batch with every reference to a dictionary replaced by its text."""
    return sum(_array_bytes(column) for column in batch.columns)


def _array_bytes(array: Any) -> int:
    from pyarrow import compute, types

    kind = array.type
    if types.is_dictionary(kind):
        if types.is_primitive(kind.value_type):
            return 8 * len(array)
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        return compute.sum(lengths.cast("int64")).as_py() or 0
    if types.is_map(kind):
        first = array.offsets[0].as_py()
        count = array.offsets[-1].as_py() - first
        return _array_bytes(array.keys.slice(first, count)) + _array_bytes(array.items.slice(first, count))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * len(array) + _array_bytes(array.flatten())
    if types.is_struct(kind):
        return sum(_array_bytes(field) for field in array.flatten())
    return int(array.nbytes)


# ---- pages ----------------------------------------------------------------------------------------------------------


class PageHeader(NamedTuple):
    """What the header of a page says. values: how many it holds, counting the nulls and the entries of lists."""

    packed_bytes: int
    unpacked_bytes: int
    values: int


def _check_pages(path: Path, file: IO[bytes], table: Any) -> None:
    """Refuse a file whose pages would take too much memory. Nothing is unpacked for this."""
    for group_number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(group_number)
        page_bytes = 0
        list_values = 0
        for place in range(group.num_columns):
            column = group.column(place)
            start = column.data_page_offset
            if column.has_dictionary_page and column.dictionary_page_offset:
                start = min(start, column.dictionary_page_offset)
            in_lists = table.schema.column(place).max_repetition_level > 0
            largest_page = 0
            for page in _read_page_headers(path, file, start, start + column.total_compressed_size):
                largest_page = max(largest_page, page.unpacked_bytes)
                if in_lists:
                    list_values += page.values
            page_bytes += largest_page
        if page_bytes > MAX_PAGE_BYTES:
            limit = f"{MAX_PAGE_BYTES // 2**20} MB"
            raise DataError(path, None, f"its largest pages expand to more than {limit}: write smaller row groups")
        if list_values > MAX_LIST_VALUES:
            raise DataError(path, None, f"more than {MAX_LIST_VALUES:,} values in lists: write smaller row groups")


def _read_page_headers(path: Path, file: IO[bytes], start: int, end: int) -> Iterator[PageHeader]:
    """Yield the headers of the pages that lie between two places of the file."""
    position = start
    while position < end:
        file.seek(position)
        fields = _read_struct(path, file)
        unpacked_bytes = fields.get(2, -1)
        packed_bytes = fields.get(3, -1)
        if min(unpacked_bytes, packed_bytes) < 0:
            raise DataError(path, None, DAMAGED)
        values = 0
        for kind in (5, 7, 8):  # a data page, a dictionary page, a data page of version 2
            header = fields.get(kind, {})
            values = max(values, header.get(1, 0))
        yield PageHeader(packed_bytes, unpacked_bytes, values)
        position = file.tell() + packed_bytes


DAMAGED = "not Parquet: damaged header of a page"
# Page headers are written in Thrift's compact protocol. These are its types that occur in them.
_TRUE, _FALSE, _BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY = range(1, 9)
_STRUCT = 12
_MAX_DEPTH = 8


def _read_struct(path: Path, file: IO[bytes], depth: int = 0) -> dict[int, Any]:
    """Read a Thrift struct: the number of each field and its value. Texts are skipped."""
    if depth > _MAX_DEPTH:
        raise DataError(path, None, DAMAGED)
    fields: dict[int, Any] = {}
    number = 0
    while True:
        start = _read_byte(path, file)
        if start == 0:
            return fields
        step = start >> 4
        kind = start & 15
        number = number + step if step else _read_int(path, file)
        if kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        elif kind == _BYTE:
            fields[number] = _read_byte(path, file)
        elif kind in (_INT16, _INT32, _INT64):
            fields[number] = _read_int(path, file)
        elif kind == _DOUBLE:
            file.seek(8, os.SEEK_CUR)
        elif kind == _BINARY:
            file.seek(_read_varint(path, file), os.SEEK_CUR)
        elif kind == _STRUCT:
            fields[number] = _read_struct(path, file, depth + 1)
        else:
            raise DataError(path, None, DAMAGED)


def _read_byte(path: Path, file: IO[bytes]) -> int:
    byte = file.read(1)
    if not byte:
        raise DataError(path, None, DAMAGED)
    return byte[0]


def _read_varint(path: Path, file: IO[bytes]) -> int:
    """Read a number of at most 64 bits, seven bits per byte, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        byte = _read_byte(path, file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise DataError(path, None, DAMAGED)


def _read_int(path: Path, file: IO[bytes]) -> int:
    """Read a signed number: 0, -1, 1, -2 are written as 0, 1, 2, 3."""
    value = _read_varint(path, file)
    return (value >> 1) ^ -(value & 1)
