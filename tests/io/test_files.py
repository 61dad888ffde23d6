"""Files are whole or not there: atomic writes under faults, one lock, the seal of a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from catto.errors import DataError
from catto.io.atomic import (
    Seal,
    build_folder,
    find_damage,
    hold_lock,
    lock_open_file,
    replace_binary_file,
    replace_file,
    seal_folder,
)
from catto.io.record_files import manifest_path, write_records
from catto.io.text_files import MAX_LINE_BYTES
from catto.pipeline.attempts import Attempt
from catto.pipeline.stage import Stage, StageSettings, digest_inputs, is_done
from catto.records import Manifest, Message


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fail_after(write: Callable[[], object]) -> None:
    write()
    raise ZeroDivisionError


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with replace_file(path) as file:
        file.write("one\n")
    with replace_file(path) as file:
        file.write("zwei ü\r\n")
        assert path.read_bytes() == b"one\n"
    assert path.read_bytes() == "zwei ü\r\n".encode()
    assert names(path.parent) == ["a.txt"]


def test_an_error_of_the_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), replace_binary_file(path) as file:
        fail_after(lambda: file.write(b"half of the new"))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def failing(call: str, number: int) -> Callable[..., Any]:
    """`os.<call>` that raises error `number`."""

    def fail(*arguments: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_one_line_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The kernel may tell a full disk only when the data are flushed."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    monkeypatch.setattr("catto.io.atomic.os.fsync", failing("fsync", number))
    with pytest.raises(DataError) as caught, replace_file(path) as file:
        file.write("new")
    assert str(caught.value) == f"{path}: cannot be written: {os.strerror(number)}"
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_limit_of_the_system_on_the_size_of_files_is_told(tmp_path: Path) -> None:
    """A real fault: the system refuses to write beyond a size."""
    code = (
        "import resource, sys; from pathlib import Path; from catto.io.atomic import replace_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with replace_file(Path(sys.argv[1])) as file: file.write('x' * 5000)\n"
        "except ValueError as error: print(error)\n"
    )
    path = tmp_path / "a.txt"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}: cannot be written: {os.strerror(errno.EFBIG)}\n"
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed to the disk and what is renamed, in order."""
    found: list[str] = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        found.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def recorded(rename: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def renamed(self: Path, target: Path) -> Path:
            found.append("rename")
            return rename(self, target)

        return renamed

    monkeypatch.setattr("catto.io.atomic.os.fsync", synced)
    for name in ("replace", "rename"):
        monkeypatch.setattr(Path, name, recorded(getattr(Path, name)))
    return found


def test_file_and_folder_are_on_the_disk_before_and_after_the_rename(tmp_path: Path, calls: list[str]) -> None:
    """fsync of the file, rename, fsync of the folder: a power cut between any two leaves a whole file."""
    with replace_file(tmp_path / "a.txt") as file:
        file.write("x")
    assert calls == ["file", "rename", "folder"]


def test_all_of_a_built_folder_is_on_the_disk_before_its_rename(tmp_path: Path, calls: list[str]) -> None:
    """fsync of its folders and files, of itself, rename, fsync of the folder that it stands in."""
    with build_folder(tmp_path / "model") as beside:
        (beside / "sub").mkdir()
        (beside / "sub" / "a").write_text("x")
    assert calls == ["folder", "file", "folder", "rename", "folder"]


def test_a_finished_stage_is_sealed_before_its_rename_which_is_on_the_disk(tmp_path: Path, calls: list[str]) -> None:
    """done.json whole, then the stage's folder renamed: a kill or a power cut between the two leaves it unfinished."""
    stage = Stage("questions", "questions a", StageSettings())
    with Attempt(tmp_path, stage, digest_inputs(tmp_path, stage)) as attempt:
        calls.clear()
        attempt.publish({})
    # done.json; the stage.
    assert calls == ["file", "rename", "folder", "rename", "folder"]
    assert is_done(tmp_path, stage)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_the_place_is_told(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a")
    with pytest.raises(DataError, match="exists and is not a regular file"), replace_file(tmp_path / "a"):
        pass


def test_a_name_as_long_as_a_file_system_takes_can_be_written(tmp_path: Path) -> None:
    for name in ("x" * 255, "信" * 85, "🙂" * 63):
        with replace_file(tmp_path / name) as file:
            file.write("whole")
        assert (tmp_path / name).read_text() == "whole"


def test_a_file_in_the_way_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with pytest.raises(DataError, match="cannot be written"), replace_file(tmp_path / "a" / "b"):
        pass


def test_another_files_error_is_not_blamed_on_this_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), replace_file(tmp_path / "a"):
        (tmp_path / "nowhere").read_text()


def test_a_folder_is_built_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "half").write_text("of an older attempt")
    with build_folder(folder) as beside:
        (beside / "sub").mkdir()
        (beside / "sub" / "a").write_text("x")
        assert (folder / "half").exists()
    assert [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))] == ["sub", "sub/a"]
    assert names(tmp_path) == ["model"]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "large")
    with build_folder(tmp_path / "model") as beside:
        beside.mkdir(exist_ok=True)
        (beside / "a").write_text("new")
    assert (tmp_path / "model").is_symlink()
    assert (tmp_path / "large" / "a").read_text() == "new"


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), build_folder(folder) as beside:
        fail_after(lambda: (beside / "a").write_text("new"))
    assert (folder / "a").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_a_lock_that_is_held_and_one_that_cannot_be_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / ".lock"
    with hold_lock(lock), pytest.raises(DataError, match=f"{tmp_path}: another run is writing here"), hold_lock(lock):
        pass
    with hold_lock(lock):  # it was let go
        pass
    monkeypatch.setattr(fcntl, "flock", failing("flock", errno.ENOLCK))
    with pytest.raises(DataError, match=f"cannot be locked: {os.strerror(errno.ENOLCK)}"), hold_lock(lock):
        pass
    with (tmp_path / "a").open("wb") as file, pytest.raises(DataError, match="cannot be locked"):
        lock_open_file(file, tmp_path / "a")


def test_every_damage_of_a_sealed_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    files = {"a": b"abc", "sub/b": bytes(range(256)), "empty": b"", "done.json": b"{}", "sub/done.json": b"{}"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    seals = seal_folder(tmp_path, frozenset({"done.json"}))
    assert set(seals) == {"a", "sub/b", "empty", "sub/done.json"}  # only at the top does a file tell of the stage
    # SHA-256 of "abc", from the standard that defines it (FIPS 180-2, appendix B.1)
    assert seals["a"] == Seal(3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert find_damage(tmp_path, seals, contents=True) is None
    (tmp_path / "a").write_bytes(b"abb")
    assert find_damage(tmp_path, seals, contents=False) is None
    assert find_damage(tmp_path, seals, contents=True) == "a has changed since it was written"
    (tmp_path / "a").write_bytes(b"abcd")
    assert find_damage(tmp_path, seals, contents=False) == "a has 4 bytes, expected 3"
    (tmp_path / "a").unlink()
    assert find_damage(tmp_path, seals, contents=False) == "a is missing"


def test_a_record_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("old\n")
    with pytest.raises(DataError, match=r"row 2: line would be longer than 16 MB"):
        write_records(path, [Message(role="user", content=text) for text in ("x", "ä" * (MAX_LINE_BYTES // 2))])
    assert path.read_text() == "old\n"


def test_new_records_never_stand_beside_the_manifest_of_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What dies between the two, or writes no manifest, leaves none; what dies before leaves the older pair."""
    path, old = tmp_path / "a.jsonl", Manifest(kind="older", counts={})
    turn = Message(role="user", content="x")

    def broken() -> Iterator[Message]:
        yield turn
        raise ZeroDivisionError

    write_records(path, [turn], old)
    with pytest.raises(ZeroDivisionError):
        write_records(path, broken(), old)
    assert names(tmp_path) == ["a.jsonl", "a.manifest.json"]
    write_records(path, [turn, turn])
    assert names(tmp_path) == ["a.jsonl"]
    write_records(path, [turn], old)
    monkeypatch.setattr("catto.io.record_files.write_manifest", lambda *_: fail_after(lambda: None))
    with pytest.raises(ZeroDivisionError):
        write_records(path, [turn, turn], old)
    assert len(path.read_text().splitlines()) == 2
    assert not manifest_path(path).exists()
