"""Read rows of answers from any tool: catto, lm-evaluation-harness, inspect_ai, HELM, chat completions, uqlm.

Each tool has a module, whose reader turns one record of a log into catto's own fields: question, confidence, label,
gold, correct, label_logprobs. Fields that a log does not contain are left out. The record's own fields stay available,
so that the user can name them as columns.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from catto.errors import DataError
from catto.formats.columns import ColumnNames, Fields
from catto.formats.helm import is_helm, read_helm
from catto.formats.inspect_ai import is_inspect, read_inspect, read_samples
from catto.formats.lm_eval import is_lm_eval, read_lm_eval
from catto.formats.openai import is_completion, list_labels, read_completion
from catto.formats.uqlm import is_uqlm, read_uqlm
from catto.io.tables import read_rows

# Takes a record and the columns that the user named; returns catto's own fields.
RecordReader = Callable[[Fields, ColumnNames], dict[str, Any]]


class LogFormat(NamedTuple):
    """How to recognise and read the logs of a tool.

    Attributes:
        is_written_by_tool: Takes the first record of a file; returns whether the tool wrote the file.
        read_record: Reads a record. If it cannot, it raises KeyError, ValueError, TypeError, AttributeError or
            IndexError.
    """

    is_written_by_tool: Callable[[Fields], bool]
    read_record: RecordReader


LOG_FORMATS = {
    "lm-eval": LogFormat(is_lm_eval, read_lm_eval),
    "inspect": LogFormat(is_inspect, read_inspect),
    "helm": LogFormat(is_helm, read_helm),
    "openai": LogFormat(is_completion, read_completion),
    "uqlm": LogFormat(is_uqlm, read_uqlm),
}


def find_format(first: Fields, names: ColumnNames) -> str:
    """Return the tool that the user named, or else the tool that wrote a file with this first row.

    A table with the column `confidence` is in catto's own format, and so is a table that matches no tool.
    """
    if names.format != "auto":
        return names.format
    if "confidence" in first:
        return "catto"
    for name, log_format in LOG_FORMATS.items():
        if log_format.is_written_by_tool(first):
            return name
    return "catto"


def read_answers(path: Path, names: ColumnNames) -> Iterator[tuple[int, Fields]]:
    """Yield the rows of a file of answers, whichever tool wrote the file.

    Args:
        path: A log of inspect_ai that ends in `.eval`, or any file that `read_rows` reads.
        names: The columns and the tool that the user named. If `names.format` is "auto", the first row determines the
            tool.

    Yields:
        (row number, fields). If a tool other than catto wrote the file, the fields are catto's own fields, followed by
        those of the tool's record in a ChainMap, so that the user can name any of these as a column.

    Raises:
        DataError: While iterating: the file cannot be read, a row is not a record of the tool, or the rows of
            lm-evaluation-harness were made by several of its filters.
    """
    is_inspect_archive = path.suffix.lower() == ".eval"
    rows = read_samples(path) if is_inspect_archive else read_rows(path)
    first_row = next(rows, None)
    if first_row is None:
        return
    _, first_record = first_row
    tool = find_format(first_record, names)
    records: Iterable[tuple[int, dict[str, Any]]] = chain([first_row], rows)
    if tool == "catto":
        yield from records
        return
    read_record = LOG_FORMATS[tool].read_record
    if tool == "openai" and names.gold is not None:
        # A completion does not list the labels of its question, so they are collected from the right answers of the
        # whole file. If the user did not name the column of right answers, `read_completion` raises.
        records = list(records)
        labels = list_labels(path, records, names.gold)
        read_record = partial(read_completion, labels=labels)
    for row, record in records:
        if tool == "lm-eval":
            # A log repeats each question once per filter (a way to extract the answer); no question may count twice.
            _require_one_filter(path, row, record, first_record)
        own_fields = _read_log_record(path, row, record, tool=tool, read_record=read_record, names=names)
        yield row, ChainMap(own_fields, record)


def _read_log_record(
    path: Path, row: int, record: Fields, *, tool: str, read_record: RecordReader, names: ColumnNames
) -> dict[str, Any]:
    """Return catto's own fields of a record; any error of the tool's reader becomes a DataError with file and row.

    A reader knows neither file nor row, so it never raises a DataError itself.
    """
    try:
        return read_record(record, names)
    except KeyError as error:
        raise DataError(path, row, f"{error.args[0]}: missing, expected a record of {tool}") from None
    except ValueError as error:
        raise DataError(path, row, str(error)) from None
    except (TypeError, AttributeError, IndexError) as error:
        raise DataError(path, row, f"expected a record of {tool}: {error}") from None


def _require_one_filter(path: Path, row: int, record: Fields, first: Fields) -> None:
    """Raise DataError if a row was made by a different filter of lm-evaluation-harness than the first row.

    The lines of a second filter repeat the questions of the first one.
    """
    first_filter = first.get("filter")
    this_filter = record.get("filter")
    if this_filter != first_filter:
        problem = f"filter: got {this_filter!r} after {first_filter!r}, expected one filter: keep the lines of one"
        raise DataError(path, row, problem)
