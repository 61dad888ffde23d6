"""Files as other tools write them, and files that expand to far more than their size: read, or refused in one line."""

from __future__ import annotations

import bz2
import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import run, write_lines
from report_world import SMALL, measured

from catto.errors import DataError
from catto.io import parquet_rows, text_files
from catto.io.tables import read_rows
from catto.report.tables import build_tables

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
ROWS = [
    {"confidence": 0.9, "correct": True},
    {"confidence": 0.25, "correct": False},
    {"confidence": 0.5, "correct": True},
]


# ---- files that expand ----------------------------------------------------------------------------------------------


def write_log(path: Path, method: int, packed: bytes, claimed: int) -> Path:
    """Write a log of inspect_ai with one sample, whose header states `claimed` bytes."""
    name = b"samples/1_epoch_1.json"
    entry = struct.pack("<HHHHHIIIHH", 20, 0, method, 0, 0, 0, len(packed), claimed, len(name), 0)
    local = b"PK\x03\x04" + entry + name + packed
    central = b"PK\x01\x02" + struct.pack("<H", 20) + entry + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    end = struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)
    path.write_bytes(local + central + b"PK\x05\x06" + end)
    return path


def pack_zeros(method: str, megabytes: int) -> bytes:
    chunk = bytes(2**20)
    if method == "zstd":
        arrow = pytest.importorskip("pyarrow")
        sink = arrow.BufferOutputStream()
        with arrow.CompressedOutputStream(sink, "zstd") as stream:
            for _ in range(megabytes):
                stream.write(chunk)
        packed: bytes = sink.getvalue().to_pybytes()
        return packed
    packer: Any = bz2.BZ2Compressor() if method == "bz2" else zlib.compressobj(9, zlib.DEFLATED, -15)
    parts = [packer.compress(chunk) for _ in range(megabytes)]
    return b"".join([*parts, packer.flush()])


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))


def measure_within_2_gb(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "catto", "measure", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        command, preexec_fn=limit_memory, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("method", "number"), [("zstd", 93), ("deflate", 8), ("bz2", 12)])
def test_a_log_whose_header_lies_is_refused_in_bounded_memory(method: str, number: int, tmp_path: Path) -> None:
    """2.5 GB from less than 3 MB, stated as 100 bytes, in a process that may have 2 GB; no bzip2 is unpacked."""
    path = write_log(tmp_path / "log.eval", number, pack_zeros(method, 100 if method == "bz2" else 2500), claimed=100)
    assert path.stat().st_size < 3 * 2**20
    done = measure_within_2_gb(path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"catto: {path}")
    assert done.stderr.count("\n") == 1


def write_table(path: Path, **columns: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    count = len(next(iter(columns.values())))
    table = arrow.table({"confidence": [0.5] * count, "correct": [True] * count, **columns})
    parquet.write_table(table, path, compression="zstd", write_statistics=False)
    return path


def repeated_text(count: int, megabytes: int) -> Any:
    arrow = pytest.importorskip("pyarrow")
    text = arrow.array(["x" * (megabytes * 2**20)])
    return arrow.DictionaryArray.from_arrays(arrow.array([0] * count, arrow.int32()), text)


@pytest.mark.parametrize("nested", [False, True], ids=["text", "list"])
def test_a_parquet_file_of_one_text_that_every_row_repeats_is_refused(nested: bool, tmp_path: Path) -> None:
    """1,000 rows that refer to one text of 8 MB: 8 GB from less than 4 KB."""
    arrow = pytest.importorskip("pyarrow")
    texts = repeated_text(1000, megabytes=8)
    if nested:
        texts = arrow.ListArray.from_arrays(arrow.array(range(1001), arrow.int32()), texts)
    path = write_table(tmp_path / "a.parquet", text=texts)
    assert path.stat().st_size < 4096
    done = measure_within_2_gb(path)
    assert done.returncode == 2, done.stderr
    assert "a.parquet: expands to more than" in done.stderr


def test_a_parquet_row_as_large_as_no_line_of_json_may_be_is_refused(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", text=repeated_text(2, megabytes=17))
    with pytest.raises(DataError, match="row 1: row is larger than 16 MB"):
        list(read_rows(path))


def test_a_parquet_page_that_expands_is_refused_before_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "MAX_PAGE_BYTES", 2**20)
    path = write_table(tmp_path / "a.parquet", text=["x" * 2**21])
    with pytest.raises(DataError, match="pages expand to more than 1 MB"):
        list(read_rows(path))


def test_a_parquet_list_of_very_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_rows, "MAX_LIST_VALUES", 1000)
    path = write_table(tmp_path / "a.parquet", values=[[0] * 1001])
    with pytest.raises(DataError, match="values in lists"):
        list(read_rows(path))
    assert len(list(read_rows(write_table(tmp_path / "b.parquet", values=[[0] * 900])))) == 1


def test_parquet_values_of_every_kind_are_read_as_they_are(tmp_path: Path) -> None:
    """Texts are read as references first; what a row holds stays the same, also over several batches."""
    kinds: dict[str, Any] = {
        "text": ["a", None, "bb"],
        "texts": [["a", "b"], None, []],
        "lists": [[["a"], []], [], None],
        "object": [{"a": "x", "b": [1]}, {"a": None, "b": None}, None],
        "objects": [[{"label": "A", "text": "t"}], [], None],
        "bytes": [b"x", None, b"yy"],
    }
    columns = {name: values * 1000 for name, values in kinds.items()}
    rows = [fields for _, fields in read_rows(write_table(tmp_path / "a.parquet", **columns))]
    assert len(rows) == 3000
    for name, values in columns.items():
        assert [row[name] for row in rows] == values


@pytest.mark.parametrize("form", ["jsonl", "csv", "json", "parquet"])
def test_more_rows_than_the_limit_are_refused(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catto.io.tables.MAX_ROWS", 2)
    path = tmp_path / f"a.{form}"
    match form:
        case "jsonl":
            write_lines(path, ROWS)
        case "json":
            path.write_text(json.dumps(ROWS))
        case "csv":
            path.write_text("a\n1\n2\n3\n")
        case _:
            write_table(path, n=[1, 2, 3])
    with pytest.raises(DataError, match="has more than"):
        list(read_rows(path))


def test_a_json_file_of_very_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_JSON_VALUES", 1000)
    path = tmp_path / "a.json"
    path.write_text("[" + " " * text_files.MAX_LINE_BYTES + "[]," * 1000 + "[]]")
    with pytest.raises(DataError, match="has more than 1,000 values"):
        list(read_rows(path))


# ---- layouts of other tools -----------------------------------------------------------------------------------------

INDEX = {"0": ROWS[0], "4": ROWS[1], "7": ROWS[2]}
LAYOUTS: dict[str, str] = {
    "JSON lines": "\n".join(json.dumps(row) for row in ROWS),
    "orient=index": json.dumps(INDEX),
    "orient=columns": json.dumps({name: {key: row[name] for key, row in INDEX.items()} for name in ROWS[0]}),
    "orient=split": json.dumps({"columns": [*ROWS[0]], "index": [0, 4, 7], "data": [[*row.values()] for row in ROWS]}),
    "columns": json.dumps({name: [row[name] for row in ROWS] for name in ROWS[0]}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_json_file_in_a_layout_of_pandas_is_read(layout: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.json"
    path.write_text(LAYOUTS[layout])
    assert [fields for _, fields in read_rows(path)] == ROWS
    assert run(capsys, "measure", path, "--json").json["rows"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": {"b": 1}, "c": {"b": 2}}', 'orient="records"'),
        ("[[0.9, true], [0.2, false]]", "column names are needed"),
        ('{"columns": ["a", "b"], "data": [[1]]}', "row 1: expected a list of 2 cells"),
        ('{"a": 1}', "expected a JSON list of rows"),
        ('{"confidence": {"0": 0.5, "1": 0.6}, "correct": {"0": true}}', "correct: expected the same rows"),
    ],
)
def test_a_layout_that_leaves_the_rows_open_gets_a_hint(text: str, said: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    done = run(capsys, "measure", path)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("confidence;correct\n0,9;true\n", "row 1: confidence: expected a number in [0, 1], got '0,9'; decimal commas"),
        ('confidence,correct\n"0,9",true\n', "decimal commas are not read: write 0.9"),
        ("confidence,correct\n0,9,true\n", "got 3; decimal commas are not read"),
    ],
)
def test_a_decimal_comma_gets_a_hint(text: str, said: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    done = run(capsys, "measure", path)
    assert done.code == 2
    assert said in done.err


@pytest.mark.parametrize("form", ["json", "eval"])
@pytest.mark.parametrize("status", ["error", "cancelled", "started"])
def test_the_log_of_a_failed_run_says_so(form: str, status: str, tmp_path: Path, capsys: Capture) -> None:
    header = {"version": 2, "status": status, "eval": {}, "error": {"message": "the server went away"}}
    path = tmp_path / f"log.{form}"
    if form == "json":
        path.write_text(json.dumps({**header, "samples": []}))
    else:
        with zipfile.ZipFile(path, "w") as log:
            log.writestr("header.json", json.dumps(header))
    done = run(capsys, "measure", path)
    assert done.code == 2
    assert "the run failed" in done.err if status == "error" else "the run did not finish" in done.err
    assert "the server went away" in done.err


def test_the_log_of_a_run_without_its_header_did_not_finish(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "log.eval"
    with zipfile.ZipFile(path, "w") as log:
        log.writestr("_journal/start.json", "{}")
        log.writestr("samples/1_epoch_1.json", "{}")
    assert "the run did not finish" in run(capsys, "measure", path).err


def test_the_place_of_an_error_in_json_is_named_once(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "x\ty"}\n')
    assert "Invalid control character at column 9" in run(capsys, "measure", path).err


# ---- what is missing or misspelled ----------------------------------------------------------------------------------


def test_a_threshold_of_a_missing_file_says_that_it_is_missing(tmp_path: Path, capsys: Capture) -> None:
    done = run(
        capsys, "calibrate", "threshold", tmp_path / "a.jsonl", "--target-risk", "0.1", "--out", tmp_path / "t.json"
    )
    assert done.err == f"catto: {tmp_path / 'a.jsonl'}: No such file or directory\n"


def test_an_object_that_is_no_calibrator_says_what_it_has(tmp_path: Path, capsys: Capture) -> None:
    answers = write_lines(tmp_path / "a.jsonl", ROWS)
    calibrator = tmp_path / "c.json"
    for text, said in (("{}", "an empty object"), ('{"tau": 1.5}', "it has tau")):
        calibrator.write_text(text)
        done = run(capsys, "calibrate", "apply", calibrator, answers, "--out", tmp_path / "out.jsonl")
        assert done.code == 2
        assert f"not a calibrator: {said}" in done.err or said in done.err
        assert "temperature, platt, isotonic, histogram" in done.err


def test_a_misspelled_key_is_named_with_those_that_there_are(tmp_path: Path, capsys: Capture) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("nme: x\n")
    assert "nme: unknown key; did you mean name? (known: name," in run(capsys, "plan", recipe).err
    task = tmp_path / "t.yaml"
    task.write_text("path: a.jsonl\nfield: {}\n")
    assert "field: unknown key; did you mean fields? (known: " in run(capsys, "data", task).err


@pytest.mark.parametrize(
    "fields",
    [
        "question=stem,options=zz,answer=key",
        "question=zz,options=choices,answer=key",
        "question=stem,options=choices,answer=zz",
    ],
)
def test_a_field_that_is_missing_is_named_with_those_that_there_are(
    fields: str, tmp_path: Path, capsys: Capture
) -> None:
    path = write_lines(tmp_path / "q.jsonl", [{"stem": "Which?", "choices": ["red", "blue"], "key": "B"}])
    done = run(capsys, "data", "--file", path, "--fields", fields)
    assert "row 1: zz: missing (fields: stem, choices, key)" in done.err


def test_an_unknown_model_without_a_connection_is_one_line(tmp_path: Path) -> None:
    """The address is one at which nothing listens. Retries would print lines of their own."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "catto", "eval", "nobody/no-such-model", "--task", "witnesses", "--n", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("catto: nobody/no-such-model: ")
    assert done.stderr.count("\n") == 1


# ---- questions of one's own -----------------------------------------------------------------------------------------

PIQA = [{"goal": f"Goal {n}", "sol1": f"Do {n}", "sol2": f"Leave {n}"} for n in range(4)]


@pytest.mark.parametrize("stated", [(), ("--fields", "question=goal,options=sol1+sol2")], ids=["proposed", "stated"])
def test_one_file_of_answers_goes_with_the_one_file_of_questions(
    stated: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    questions = write_lines(tmp_path / "piqa.jsonl", PIQA)
    answers = tmp_path / "labels.lst"
    answers.write_text("0\n1\n1\n0\n")
    given = ("--file", f"test={questions}", "--answers", answers, "--split", "test", *stated)
    told = run(capsys, "data", *given, "--json").json
    assert told["splits"]["test"]["questions"] == 4


def test_questions_without_a_field_of_answers_are_told_of_a_file_of_answers(tmp_path: Path, capsys: Capture) -> None:
    done = run(capsys, "data", "--file", write_lines(tmp_path / "piqa.jsonl", PIQA))
    assert done.code == 2
    assert "--answers" in done.err


def test_options_that_mark_their_answer_are_proposed(tmp_path: Path, capsys: Capture) -> None:
    targets = {"Nothing happens.": 1, "You grow.": 0, "You shrink.": 0}
    rows = [{"question": f"What happens if {n}?", "mc1_targets": targets} for n in range(3)]
    told = run(
        capsys, "data", "--file", f"test={write_lines(tmp_path / 'mc.jsonl', rows)}", "--split", "test", "--json"
    )
    assert told.json["fields"] == {"question": "question", "options": "mc1_targets", "answer": "mc1_targets"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"Question": "What?", "Best Answer": "No", "Incorrect Answers": "Yes; Always", "Source": "a page"},
            "Incorrect Answers: several options in one text",
        ),
        (
            {"article": "A text.", "questions": ["A?", "B?"], "options": [["a", "b"], ["c", "d"]], "answers": "AB"},
            "a row contains several questions",
        ),
    ],
    ids=["options in one text", "several questions in a row"],
)
def test_rows_that_are_no_single_question_get_one_clear_line(
    row: dict[str, Any], said: str, tmp_path: Path, capsys: Capture
) -> None:
    done = run(capsys, "data", "--file", write_lines(tmp_path / "q.jsonl", [row]))
    assert done.code == 2
    assert said in done.err


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [(0,), (0, 1)], ids=len)
def test_a_caption_names_a_mean_only_where_there_are_several(seeds: tuple[int, ...]) -> None:
    world = measured(replace(SMALL, seeds=seeds))
    tables = {table.kind: table for table in build_tables(world.numbers, world.results)}
    several = "Mean over tasks and seeds." if len(seeds) > 1 else "Mean over tasks."
    assert several in tables.pop("summary").caption
    for table in tables.values():
        assert ("Mean over seeds." in table.caption) <= (len(seeds) > 1), table.name
        assert "tasks" not in table.caption.partition("Mean over")[2]
    assert ("Mean over seeds." in tables["in"].caption) == (len(seeds) > 1)
