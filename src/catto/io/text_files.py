"""Read text, lines and JSON with limits: plain or gzip-compressed, strictly UTF-8."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

from catto.errors import DataError, parse_json

# One record is a question or a response of a few kilobytes; a longer line is a broken or foreign file.
MAX_LINE_BYTES = 16 * 2**20
# A JSON file is kept in memory, decompressed, as a whole; larger data belong in JSON lines.
MAX_JSON_BYTES = 2**29
# Maximum number of values in such a file: an empty list takes three bytes of text but sixty of memory.
MAX_JSON_VALUES = 2**25

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def find_suffix(path: Path) -> str:
    """Return the suffix that names a file's format, ignoring `.gz`; empty if the format is not supported.

    >>> find_suffix(Path("rows.jsonl.gz")), find_suffix(Path("rows.txt"))
    ('.jsonl', '')
    """
    suffix = Path(path.name.removesuffix(".gz")).suffix.lower()
    if suffix not in SUFFIXES:
        return ""
    return suffix


@contextmanager
def open_input(path: Path, *, keep_compressed: bool = False) -> Iterator[IO[bytes]]:
    """Open a regular file, and decompress it if its name ends in `.gz`.

    Every OSError that is raised inside the `with` block counts as an error of this file. The block must therefore not
    open or write other files.

    Args:
        path: The file.
        keep_compressed: Whether to read the bytes of a gzipped file as they are.

    Yields:
        The open file.

    Raises:
        DataError: The file cannot be opened, or reading it inside the `with` block fails.
    """
    try:
        _require_regular_file(path)
        decompress = path.suffix == ".gz" and not keep_compressed
        file: Any = gzip.open(path, "rb") if decompress else path.open("rb")  # noqa: SIM115 (closed below)
    except (OSError, ValueError) as error:  # ValueError: not a regular file, or a NUL character in the path
        raise DataError(path, None, getattr(error, "strerror", None) or str(error)) from None
    with file:
        try:
            yield file
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise DataError(path, None, f"broken gzip file: {error}") from None
        except OSError as error:  # some files in /proc can be opened but not read
            raise DataError(path, None, error.strerror or str(error)) from None


def _require_regular_file(path: Path) -> None:
    """Raise ValueError for anything but a regular file: a pipe could block forever, and a device may have no end."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind == stat.S_IFREG:
        return
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    raise ValueError(f"expected a file, got {names.get(kind, 'a device')}")


def iterate_lines(path: Path, unit: Literal["row", "line"] = "row") -> Iterator[tuple[int, str]]:
    """Yield every line of a file with its number.

    Args:
        path: The file.
        unit: What an error calls the line. In JSON lines, every line is a row. In a CSV file it is not: quoted fields
            may contain line breaks.

    Yields:
        The number, counted from 1, and the text of the line, including its line break.

    Raises:
        DataError: The file cannot be read, or a line is too long or not UTF-8 text.
    """
    with open_input(path) as file:
        number = 0
        while True:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            number += 1
            try:
                text = _decode_line(line, is_first=number == 1)
            except ValueError as error:
                if unit == "row":  # a DataError names a row itself
                    raise DataError(path, number, str(error)) from None
                raise DataError(path, None, f"line {number}: {error}") from None
            yield number, text


def _decode_line(line: bytes, *, is_first: bool) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"line is longer than {MAX_LINE_BYTES // 2**20} MB")
    if b"\0" in line:
        raise ValueError("contains a NUL byte, expected UTF-8 text (this may be UTF-16, or not text)")
    try:
        return line.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start} of the line") from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (row, text) of every line that is not blank, with white space stripped; rows are counted from 1."""
    for row, line in iterate_lines(path):
        text = line.strip()
        if text:
            yield row, text


def read_text(path: Path, max_bytes: int = MAX_LINE_BYTES) -> str:
    """Return the text of a small file. Raise DataError for a file of more than `max_bytes` bytes."""
    with open_input(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DataError(path, None, f"larger than {max_bytes / 2**20:g} MB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(path, None, f"not UTF-8 at byte {error.start}") from None


def read_json(path: Path, max_bytes: int = MAX_LINE_BYTES) -> Any:
    """Return the value of a JSON file. Raise DataError if it is invalid or larger than `max_bytes` bytes."""
    return parse_json_text(path, read_text(path, max_bytes))


def parse_json_text(path: Path, text: str) -> Any:
    """Parse the text of a JSON file. Raise DataError if it is invalid or has too many values for memory."""
    check_value_count(path, None, text)
    try:
        return parse_json(text)
    except ValueError as error:
        problem = str(error)
        if "Extra data" in problem:
            problem = f"{problem}; JSON lines must be named .jsonl"
        raise DataError(path, None, problem) from None


def check_value_count(path: Path, row: int | None, text: str) -> None:
    """Refuse a JSON text with too many values for memory."""
    if len(text) <= MAX_LINE_BYTES:
        return
    # Every value follows a comma or an opening bracket.
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MAX_JSON_VALUES:
        raise DataError(path, row, f"has more than {MAX_JSON_VALUES:,} values: write JSON lines")


def parse_object(path: Path, row: int, line: str) -> dict[str, Any]:
    """Parse one line of JSON lines.

    Args:
        path: The file, for errors.
        row: The number of the line, counted from 1, for errors.
        line: The text of the line.

    Raises:
        DataError: The line is not a JSON object. For the first line, the message also says how files must be named.
    """
    try:
        value = parse_json(line)
        if isinstance(value, dict):
            return value
        problem = f"expected a JSON object, got {type(value).__name__}"
    except ValueError as error:
        problem = str(error)
    if row == 1 and not line.startswith("{"):
        names_other_format = find_suffix(path) in (".json", ".csv", ".tsv", ".parquet")
        if names_other_format:
            problem += "; only JSON lines are read here"
        else:
            problem += "; JSON lists must be named .json and CSV named .csv"
    raise DataError(path, row, problem)
