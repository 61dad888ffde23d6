"""Attempts at a stage overlap, pause and die: one whole result, and nothing is left of the others."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from forked import Forked

from catto.errors import DataError
from catto.pipeline import stage as stages
from catto.pipeline.attempts import Attempt, AttemptDeletedError, attempt_folders, is_abandoned, lock_run
from catto.pipeline.stage import Stage, StageSettings, stage_dir

pytestmark = pytest.mark.slow

STAGE = Stage("questions", "questions a", StageSettings())
NAMES = ("one.json", "two.json")
JOURNAL = "generations.part.jsonl"


def begin(root: Path, inputs: str = "") -> Attempt:
    return Attempt(root, STAGE, inputs or stages.digest_inputs(root, STAGE))


def write_result(attempt: Attempt, author: str) -> None:
    for name in NAMES:
        stages.write_json(attempt.out / name, author)


def read_author(root: Path) -> str:
    """Check that there is one whole result and nothing else; return its author."""
    final = stage_dir(root, STAGE)
    assert stages.is_done(root, STAGE)
    stages.check_stage(final, contents=True)
    (author,) = {json.loads((final / name).read_text()) for name in NAMES}
    assert [path.name for path in (root / "stages").iterdir()] == [STAGE.folder]
    return str(author)


def test_of_two_attempts_the_first_to_publish_becomes_the_stage(tmp_path: Path) -> None:
    with begin(tmp_path) as first, begin(tmp_path) as second:
        write_result(first, "first")
        write_result(second, "second")
        second.publish({})
        assert first.out.exists()  # it is alive
        first.publish({})
    assert read_author(tmp_path) == "second"


def test_a_result_of_other_inputs_is_replaced(tmp_path: Path) -> None:
    with begin(tmp_path) as attempt:
        write_result(attempt, "stale")
        attempt.publish({})
    path = stage_dir(tmp_path, STAGE) / stages.DONE
    record = json.loads(path.read_text()) | {"content": "0" * 16}
    record.pop("checksum")
    stages.write_json(path, {**record, "checksum": stages.content_hash(record)})
    with begin(tmp_path) as attempt:
        write_result(attempt, "new")
        attempt.publish({})
    assert read_author(tmp_path) == "new"


def test_an_attempt_continues_from_the_one_that_came_furthest(tmp_path: Path) -> None:
    with begin(tmp_path) as first, begin(tmp_path) as second, begin(tmp_path, "0" * 16) as other:
        (first.out / JOURNAL).write_text("paid\n" * 3)
        (second.out / JOURNAL).write_text("paid\n")
        (other.out / JOURNAL).write_text("other inputs\n" * 9)
    with begin(tmp_path) as third:
        assert (third.out / JOURNAL).read_text() == "paid\n" * 3
        assert attempt_folders(tmp_path, STAGE) == [third.out]


def test_what_a_running_attempt_writes_later_is_not_shared(tmp_path: Path) -> None:
    with begin(tmp_path) as first:
        (first.out / JOURNAL).write_text("old\n")
        with begin(tmp_path) as second, (first.out / JOURNAL).open("a") as journal:
            journal.write("late\n")
            journal.flush()
            assert (second.out / JOURNAL).read_text() == "old\n"


def test_a_full_disk_does_not_cost_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with begin(tmp_path) as first:
        (first.out / JOURNAL).write_text("paid\n")
    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OSError, match="cannot copy"):
        begin(tmp_path)
    assert list((tmp_path / "stages").iterdir()) == [first.out]
    assert (first.out / JOURNAL).read_text() == "paid\n"


def test_an_attempt_whose_folder_was_deleted_does_not_publish_what_it_wrote_since(tmp_path: Path) -> None:
    with begin(tmp_path) as attempt:
        shutil.rmtree(attempt.out)
        write_result(attempt, "late")
        with pytest.raises(AttemptDeletedError):
            attempt.publish({})
        with pytest.raises(AttemptDeletedError):
            attempt.report_progress(1, 2, "")
    assert not stage_dir(tmp_path, STAGE).exists()


def work_forever(root: Path) -> None:
    with begin(root) as attempt:
        (attempt.out / JOURNAL).write_text("paid\n")
        os.write(1, b"began\n")
        time.sleep(600)


def test_a_paused_attempt_is_kept_and_a_killed_one_is_continued(tmp_path: Path) -> None:
    worker = Forked(work_forever, tmp_path)
    assert next(worker.lines()) == "began"
    pid = worker.process.pid or 0
    (folder,) = attempt_folders(tmp_path, STAGE)
    os.kill(pid, signal.SIGSTOP)
    assert not is_abandoned(folder)
    os.kill(pid, signal.SIGKILL)
    worker.wait()
    assert is_abandoned(folder)
    with begin(tmp_path) as attempt:
        assert (attempt.out / JOURNAL).read_text() == "paid\n"
        assert not folder.exists()


def test_a_second_run_is_refused_until_the_first_one_ends(tmp_path: Path) -> None:
    refusal = pytest.raises(DataError, match="another run is working in this folder")
    with lock_run(tmp_path), refusal, lock_run(tmp_path):
        pass
    with lock_run(tmp_path):
        pass
