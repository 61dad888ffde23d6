"""Records, their files and their manifests: validated, whole, and clear about what is wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catto.errors import DataError
from catto.io.atomic import replace_file
from catto.io.record_files import (
    library_versions,
    manifest_path,
    read_manifest,
    read_records,
    write_manifest,
    write_records,
)
from catto.io.tables import read_rows
from catto.io.text_files import MAX_LINE_BYTES, read_lines
from catto.records import SCHEMA_VERSION, Manifest, Message, Option, Question, Record, Response, Sampled, content_hash

laws = settings(max_examples=50, deadline=None)


def question(**more: object) -> Question:
    options = (Option(label="A", text="a"), Option(label="B", text="b"))
    plain = {"id": "q", "task": "t", "split": "train", "fields": {"question": "?"}, "options": options, "gold": "A"}
    return Question(**{**plain, **more})  # type: ignore[arg-type]


def one_line(error: pytest.ExceptionInfo[DataError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_question_knows_its_labels_in_the_order_of_its_options() -> None:
    assert question().labels == ("A", "B")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gold": "C"}, "gold 'C' is not one of A, B"),
        ({"options": [Option(label="A", text="a")] * 2}, "labels A, A repeat"),
        ({"options": [Option(label="A", text="a")]}, "1 options, expected at least 2, or accepted answers"),
        ({"split": "dev"}, "split: expected train, validation or test, got"),
        ({"answer": "A"}, "answer: unknown key"),
    ],
)
def test_a_bad_question_names_file_row_and_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "questions.jsonl"
    bad = {**question().model_dump(), **change}
    bad["options"] = [dict(option) for option in bad["options"]]
    path.write_text(question().model_dump_json() + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(DataError) as caught:
        list(read_records(path, Question))
    assert one_line(caught).startswith(f"{path} row 3: {message}")


def test_a_record_is_closed_and_immutable() -> None:
    message = Message(role="user", content="x")
    with pytest.raises(ValueError, match="frozen"):
        message.content = "y"  # type: ignore[misc]


def test_several_problems_are_counted() -> None:
    with pytest.raises(ValueError) as caught:
        Message.model_validate({})
    from catto.errors import describe_first_problem

    assert describe_first_problem(caught.value) == "role: missing (and 1 more)"  # type: ignore[arg-type]


@laws
@given(st.lists(st.tuples(st.text(), st.integers(0, 5), st.none() | st.floats(0, 2)), max_size=5))
def test_records_read_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, rows: list[object]) -> None:
    """Any text, also with line separators that are no newline."""
    path = tmp_path_factory.mktemp("r") / "responses.jsonl"
    written = [
        Response(question=text, sample=i, text=text, correct=True, model="m", temperature=t)
        for text, i, t in rows  # type: ignore[misc]
    ]
    assert write_records(path, written) == len(written)
    assert list(read_records(path, Response)) == written


def test_gzip_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": "\xc3\xa9"}'
    (tmp_path / "x.jsonl").write_bytes(content)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(content))
    for name in ("x.jsonl", "x.jsonl.gz"):
        assert list(read_rows(tmp_path / name)) == [(1, {"a": 1}), (3, {"a": "é"})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": "\xff"}\n', "row 2: not UTF-8 at byte 7"),
        (b'{"a": 1}\n{"a": \n', "row 2: not JSON"),
        (b'{"a": 1}\n[1]\n', "row 2: expected a JSON object, got list"),
        (b'{"a": 1}\n"' + b"x" * 50 * 2**20 + b'"\n', "row 2: line is longer than 16 MB"),
    ],
)
def test_a_bad_line_names_file_and_row_after_the_good_ones(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    rows = read_rows(path)
    assert next(rows) == (1, {"a": 1})
    with pytest.raises(DataError) as caught:
        next(rows)
    assert one_line(caught).startswith(f"{path} {message}")


def test_the_longest_line_allowed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"x" * (MAX_LINE_BYTES - 1) + b"\ny\n")
    assert [(row, len(line)) for row, line in read_lines(path)] == [(1, MAX_LINE_BYTES - 1), (2, 1)]


def test_files_that_cannot_be_read_are_data_errors(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": 1}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "noise.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "bits.jsonl.gz").write_bytes(whole[:12] + b"\xff" * 20 + whole[32:])
    for name in ("absent.jsonl", "cut.jsonl.gz", "noise.jsonl.gz", "bits.jsonl.gz"):
        with pytest.raises(DataError, match=name.replace(".", r"\.")) as caught:
            list(read_lines(tmp_path / name))
        one_line(caught)


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_records(path, [Message(role="user", content="old")])

    def failing() -> object:
        yield Message(role="user", content="new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(path, failing())  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    assert [record.content for record in read_records(path, Message)] == ["old"]


def test_a_file_is_not_seen_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.txt"
    with replace_file(path) as file:
        file.write("x")
        assert not path.exists()
    assert path.read_text() == "x"


def test_a_reader_of_the_old_file_is_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_records(path, [Message(role="user", content="old")])
    with path.open() as reader:
        write_records(path, [Message(role="user", content="new")])
        assert "old" in reader.read()


def test_a_manifest_stands_beside_its_records_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    manifest = Manifest(kind="rows", counts={"rows": 1}, seed=3, notes={"a": [1, None]})
    write_records(path, [Message(role="user", content="x")], manifest)
    assert manifest_path(path) == tmp_path / "rows.manifest.json"
    assert read_manifest(path) == manifest


def test_a_missing_broken_or_foreign_manifest_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DataError, match="No such file"):
        read_manifest(path)
    manifest_path(path).write_text('{"kind": "x"}')
    with pytest.raises(DataError, match="counts: missing"):
        read_manifest(path)
    write_manifest(path, Manifest(schema_version=SCHEMA_VERSION + 1, kind="x", counts={}))
    with pytest.raises(DataError, match=f"schema_version {SCHEMA_VERSION + 1}, this catto reads {SCHEMA_VERSION}"):
        read_manifest(path)


@laws
@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=5))
def test_a_content_hash_does_not_depend_on_the_order_of_keys(value: dict[str, object]) -> None:
    assert content_hash(value) == content_hash(dict(reversed(value.items())))
    assert content_hash(value) != content_hash([value])


def test_a_content_hash_is_the_sha256_of_compact_json() -> None:
    """printf '{"a":"é","b":[1]}' | sha256sum"""
    import hashlib

    assert content_hash({"b": [1], "a": "é"}, 64) == hashlib.sha256('{"a":"é","b":[1]}'.encode()).hexdigest()


def test_versions_leave_out_what_is_not_installed() -> None:
    found = library_versions("pydantic", "no-such-distribution")
    assert set(found) == {"catto", "pydantic"}


def test_every_record_forbids_unknown_fields() -> None:
    kinds = [*Record.__subclasses__(), *Sampled.__subclasses__()]
    assert len(kinds) >= 8
    assert all(kind.model_config["extra"] == "forbid" and kind.model_config["frozen"] for kind in kinds)
