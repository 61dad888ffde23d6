"""Read the rows of a Parquet file in bounded memory.

A Parquet file of a few kilobytes can describe gigabytes: one long text that every row refers to, or a list of a million
equal values. Nothing enforces the sizes that its footer claims, so this module counts:

- the sizes in the header of every page, before Arrow unpacks a page; the decoder does enforce these;
- the texts of every batch, while they are still references to a dictionary and not yet Python objects.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from catto.errors import DataError

# Sum over the columns of a row group of their largest page: these are unpacked together. Writers aim at 1 MB per page.
MAX_PAGE_BYTES = 2**29
# Values in the lists of a row group: Arrow may keep all of them in memory for a single row.
MAX_LIST_VALUES = 2**26
# One row as Python objects: as much as a line of JSON lines.
MAX_ROW_BYTES = 2**24
# Rows of a file. Commands keep a little of each row in memory, and equal values take almost no space in a file.
MAX_ROWS = 10_000_000
# What Arrow decodes at once.
MAX_BATCH_BYTES = 2**26
MAX_BATCH_ROWS = 1024
# A file may expand to this many bytes, or to this many times its own size if that is more.
MAX_EXPANDED_BYTES = 2**30
MAX_EXPANSION = 1000
TOO_MANY_ROWS = f"has more than {MAX_ROWS:,} rows"


def read_parquet(path: Path, file: IO[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of an open Parquet file.

    Every size is checked before the memory is needed: the pages before Arrow decodes any, and the texts of a batch
    before they become Python objects.

    Args:
        path: The path of the file, for its size and for errors.
        file: The open file, which must be seekable.

    Yields:
        The number of the row, counted from 1, and its fields by name.

    Raises:
        DataError: The file is not Parquet, or it cannot be read in bounded memory.
    """
    import pyarrow as arrow
    from pyarrow import parquet

    file_bytes = path.stat().st_size
    expanded_limit = max(MAX_EXPANDED_BYTES, MAX_EXPANSION * file_bytes)
    expanded_bytes = 0
    number = 0
    try:
        plain = parquet.ParquetFile(file)  # only for its schema, in which texts are texts
        # The rows are read from `table`: its texts are references to a dictionary until `_count_expanded_bytes` has
        # counted their bytes.
        table = parquet.ParquetFile(file, read_dictionary=_list_text_columns(plain.schema), pre_buffer=False)
        _refuse_repeated_names(path, table.schema_arrow.names)
        if table.metadata.num_rows > MAX_ROWS:
            raise DataError(path, None, TOO_MANY_ROWS)
        _check_pages(path, file, table)
        for batch in table.iter_batches(batch_size=_choose_batch_rows(plain.schema)):
            for small_batch in _split_batch(path, number, batch):
                expanded_bytes += _count_expanded_bytes(small_batch)
                if expanded_bytes > expanded_limit:
                    megabytes = expanded_limit // 2**20
                    raise DataError(path, None, f"expands to more than {megabytes:,} MB from {file_bytes:,} bytes")
                for fields in _make_rows(small_batch, plain.schema_arrow):
                    number += 1
                    yield number, fields
    except (arrow.ArrowException, MemoryError) as error:  # MemoryError: a damaged file may claim any size
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(path, None, f"not Parquet: {reason}") from None


def _list_text_columns(schema: Any) -> list[str]:
    """Return the paths of the columns of text or bytes."""
    paths = []
    for index in range(len(schema)):
        column = schema.column(index)
        if column.physical_type == "BYTE_ARRAY":
            paths.append(column.path)
    return paths


def _refuse_repeated_names(path: Path, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise DataError(path, None, f"column {name!r} occurs twice")


def _make_rows(batch: Any, schema: Any) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python objects. In `schema` texts are texts, not references to a dictionary."""
    from pyarrow import ArrowNotImplementedError

    with suppress(ArrowNotImplementedError):  # Arrow cannot cast to every type of text
        batch = batch.cast(schema)  # this halves the time
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


def _choose_batch_rows(schema: Any) -> int:
    """Return the number of rows to read per batch: fewer if a column has long values of a fixed length."""
    longest_value = 1
    for index in range(len(schema)):
        longest_value = max(longest_value, schema.column(index).length or 0)  # 0 for values of any length
    return max(1, min(MAX_BATCH_ROWS, MAX_BATCH_BYTES // longest_value))


# ---- texts ----------------------------------------------------------------------------------------------------------


def _split_batch(path: Path, rows_before: int, batch: Any) -> Iterator[Any]:
    """Yield a batch, or the halves of a batch that is too large, which may be split again.

    Args:
        path: The file, for errors.
        rows_before: Number of rows of the file before the batch, for errors.
        batch: The batch.

    Raises:
        DataError: A single row is too large.
    """
    size = _count_expanded_bytes(batch)
    if size <= MAX_ROW_BYTES:
        yield batch
        return
    if batch.num_rows == 1:
        raise DataError(path, rows_before + 1, f"row is larger than {MAX_ROW_BYTES // 2**20} MB")
    half = batch.num_rows // 2
    yield from _split_batch(path, rows_before, batch.slice(0, half))
    yield from _split_batch(path, rows_before + half, batch.slice(half))


def _count_expanded_bytes(batch: Any) -> int:
    """Return the bytes of a batch with every reference to a dictionary replaced by its text."""
    return sum(_count_array_bytes(column) for column in batch.columns)


def _count_array_bytes(array: Any) -> int:
    """Return the bytes of a column with every reference to a dictionary replaced by its text.

    Lists, maps and structs are entered. A number in a dictionary and the reference to a list count as 8 bytes each.
    """
    from pyarrow import compute, types

    kind = array.type
    if types.is_dictionary(kind):
        if types.is_primitive(kind.value_type):
            return 8 * len(array)
        lengths = compute.binary_length(array.dictionary).take(array.indices)
        total = compute.sum(lengths.cast("int64")).as_py()
        return total or 0  # None if there are no texts, or only nulls
    if types.is_map(kind):
        # Unlike those of `flatten`, the keys and items of a slice are those of the whole array.
        first = array.offsets[0].as_py()
        count = array.offsets[-1].as_py() - first
        key_bytes = _count_array_bytes(array.keys.slice(first, count))
        return key_bytes + _count_array_bytes(array.items.slice(first, count))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return 8 * len(array) + _count_array_bytes(array.flatten())
    if types.is_struct(kind):
        return sum(_count_array_bytes(field) for field in array.flatten())
    return int(array.nbytes)


# ---- pages ----------------------------------------------------------------------------------------------------------


class PageHeader(NamedTuple):
    """The sizes in the header of a page.

    Attributes:
        packed_bytes: Size in the file.
        unpacked_bytes: Size after decompression.
        values: Number of values, including nulls and the entries of lists.
    """

    packed_bytes: int
    unpacked_bytes: int
    values: int


def _check_pages(path: Path, file: IO[bytes], table: Any) -> None:
    """Refuse a file whose pages would need too much memory. Only the headers of the pages are read.

    Arrow unpacks one page of every column of a row group at the same time, so the sum of the largest pages is limited.
    It may also keep all values in the lists of a row group in memory, so their number is limited too.

    Args:
        path: The path of the file, for errors.
        file: The open file.
        table: The `ParquetFile`.

    Raises:
        DataError: A limit is exceeded, or the header of a page is damaged.
    """
    for group_number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(group_number)
        page_bytes = 0
        list_values = 0
        for column_number in range(group.num_columns):
            column = group.column(column_number)
            start = column.data_page_offset  # of the first data page
            if column.has_dictionary_page and column.dictionary_page_offset:  # a dictionary page comes before it
                start = min(start, column.dictionary_page_offset)
            in_lists = table.schema.column(column_number).max_repetition_level > 0
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
    """Yield the headers of the pages between two offsets of the file.

    Raises:
        DataError: A header is damaged: it cannot be read, or a size is missing or negative.
    """
    position = start
    while position < end:
        file.seek(position)
        fields = _read_struct(path, file)
        unpacked_bytes = fields.get(_UNPACKED_BYTES, -1)
        packed_bytes = fields.get(_PACKED_BYTES, -1)
        if min(unpacked_bytes, packed_bytes) < 0:
            raise DataError(path, None, DAMAGED)
        values = 0
        for field_number in _HEADERS_BY_KIND:  # a page has one of these headers
            header = fields.get(field_number, {})
            values = max(values, header.get(_VALUE_COUNT, 0))
        yield PageHeader(packed_bytes, unpacked_bytes, values)
        position = file.tell() + packed_bytes


DAMAGED = "not Parquet: damaged page header"
# Field numbers of a page header, in Parquet's Thrift definition.
_UNPACKED_BYTES = 2
_PACKED_BYTES = 3
_HEADERS_BY_KIND = (5, 7, 8)  # data page, dictionary page, data page of version 2
_VALUE_COUNT = 1  # within each of these
# Page headers are written in Thrift's compact protocol. These of its types occur in them.
_TRUE, _FALSE, _BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY = range(1, 9)
_STRUCT = 12
# Page headers are at most three structs deep. In a damaged file, structs could nest until Python's stack overflows.
_MAX_DEPTH = 8


def _read_struct(path: Path, file: IO[bytes], depth: int = 0) -> dict[int, Any]:
    """Read a Thrift struct. Texts and doubles are skipped, because no size is one.

    The low four bits of a field's first byte are its type. The high four bits are the difference between its number and
    that of the previous field; 0 means that the number itself follows. A zero byte ends the struct.

    Args:
        path: The path of the file, for errors.
        file: The open file, at the beginning of the struct; afterwards at its end.
        depth: Number of structs that contain this one.

    Returns:
        Number of a field -> its value.

    Raises:
        DataError: The struct is damaged.
    """
    if depth > _MAX_DEPTH:
        raise DataError(path, None, DAMAGED)
    fields: dict[int, Any] = {}
    number = 0
    while True:
        first_byte = _read_byte(path, file)
        if first_byte == 0:
            return fields
        number_difference = first_byte >> 4
        kind = first_byte & 15
        if number_difference == 0:
            number = _read_int(path, file)
        else:
            number += number_difference
        if kind in (_TRUE, _FALSE):  # the type is the value
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
    """Read an unsigned number of at most 64 bits: seven bits per byte, the lowest first, the top bit if more follow."""
    value = 0
    for shift in range(0, 70, 7):
        byte = _read_byte(path, file)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise DataError(path, None, DAMAGED)


def _read_int(path: Path, file: IO[bytes]) -> int:
    """Read a zigzag-encoded signed number: 0, -1, 1, -2 are written as 0, 1, 2, 3."""
    value = _read_varint(path, file)
    return (value >> 1) ^ -(value & 1)
