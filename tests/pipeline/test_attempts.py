"""Attempts at a stage overlap, pause and die at every step: one whole result, and nothing is left of the others."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from command import run
from experiment_world import write_recipe
from forked import Forked

from catto.errors import DataError
from catto.pipeline import attempts
from catto.pipeline import run as runner
from catto.pipeline import stage as stages
from catto.pipeline.attempts import Attempt, LostError, Watch, folders, locked
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, StageSettings, place
from catto.recipe.load import load

pytestmark = pytest.mark.slow

STAGE = Stage("questions", "questions a", StageSettings())
NAMES = ("one.json", "two.json")
BEAT = attempts.BEAT


@pytest.fixture(autouse=True)
def _seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heartbeat beats by itself: the tests say when."""
    monkeypatch.setattr(attempts, "BEAT", 3600.0)


def run_once(root: Path, author: str) -> str:
    """Run the stage as every runner does, its function writing files of this author; how it ended."""

    def work(work: stages.Work, checked: set[Path]) -> None:
        for name in NAMES:
            stages.write(work.out / name, author)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "_work", work)
        return runner.run_stage(root, STAGE, lambda *_: None, set()).outcome


def assert_one_whole_result(root: Path) -> str:
    """Return its author."""
    final = place(root, STAGE)
    assert stages.done(root, STAGE)
    stages.check(final, contents=True)
    (author,) = {json.loads((final / name).read_text()) for name in NAMES}
    assert [path.name for path in (root / "stages").iterdir()] == [STAGE.folder]
    return str(author)


class Step:
    """Calls `then` before call number `at` of the file-system operations that the protocol is made of."""

    def __init__(self, at: int, then: Callable[[], None], last: bool = False) -> None:
        """last: nothing after it happens, also not what is cleaned up."""
        self.at, self.then, self.last, self.counted, self.reached = at, then, last, 0, False

    def operation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            self.counted += 1
            if (self.counted == self.at and not self.reached) or (self.reached and self.last):
                self.reached = True
                self.then()
            return original(*arguments, **options)

        return called

    @contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patched:
            for owner, names in (
                (Path, ("rename", "replace", "unlink", "mkdir")),
                (os, ("link",)),
                (shutil, ("rmtree",)),
            ):
                for name in names:
                    patched.setattr(owner, name, self.operation(getattr(owner, name)))
            yield


def nothing(root: Path) -> None:
    """No stage is there."""


def stale(root: Path) -> None:
    """There is a stage that was made of other inputs."""
    run_once(root, "stale")
    path = place(root, STAGE) / stages.DONE
    told = json.loads(path.read_text()) | {"content": "0" * 16}
    told.pop("checksum")
    stages.write(path, {**told, "checksum": stages.content_hash(told)})


def deleted(root: Path) -> None:
    """The stage was deleted."""
    run_once(root, "deleted")
    shutil.rmtree(place(root, STAGE))


BEFORE = [nothing, stale, deleted]


def paused(root: Path, at: int, meanwhile: Callable[[], None]) -> bool:
    """Run the stage, paused before step `at` until `meanwhile` is over; False if it has fewer steps."""
    step = Step(at, meanwhile)
    with step.watching():
        assert run_once(root, "first") == "done"
    return step.reached


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("dead", [False, True], ids=["paused", "taken for dead"])
def test_an_attempt_that_pauses_at_any_step_while_another_one_runs(
    tmp_path: Path, before: Callable[[Path], None], dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is paused before a step; the second runs from beginning to end; the first wakes up and goes on."""
    seen = set()
    for at in itertools.count(1):
        root, won = tmp_path / str(at), []
        before(root)

        def second(root: Path = root, won: list[bool] = won) -> None:
            won.append(stages.done(root, STAGE))
            with monkeypatch.context() as patched:
                if dead:
                    patched.setattr(Watch, "alive", lambda *_: False)
                assert run_once(root, "second") == "done"

        if not paused(root, at, second):
            break
        author = assert_one_whole_result(root)
        assert author == "first" or not won[0]  # what is published stays
        seen.add((author, won[0]))
    assert at > 12
    assert seen >= {("second", False)}
    assert ("first", True) in seen or before is not stale  # only then there is a step after the publishing one


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("dead", [False, True], ids=["paused", "taken for dead"])
def test_an_attempt_that_pauses_at_any_step_while_one_that_began_before_ends(
    tmp_path: Path, before: Callable[[Path], None], dead: bool
) -> None:
    """A third one may take the paused one for dead and delete it, also when that has just won."""
    seen = set()
    for at in itertools.count(1):
        root, won = tmp_path / str(at), []
        before(root)
        older = begin(root)

        def goes_on(root: Path = root, won: list[bool] = won, older: Attempt = older) -> None:
            won.append(stages.done(root, STAGE))
            if dead:
                discard(root, older.out)
            with older:
                for name in NAMES:
                    stages.write(older.out / name, "second")
                older.publish({})

        if not paused(root, at, goes_on):
            older.heart.stop()
            break
        author = assert_one_whole_result(root)
        assert author == "first" or not won[0]
        seen.add((author, won[0]))
    assert seen >= {("first", True), ("second", False)}


def discard(root: Path, kept: Path) -> None:
    """Delete the other attempts, as one that begins and takes them for dead does."""
    for folder in (root / "stages").glob(f"{STAGE.folder}{attempts.PART}*"):
        if folder != kept:
            attempts._delete(folder, place(root, STAGE))


def test_an_attempt_that_is_discarded_at_any_step_becomes_a_whole_stage_or_none(tmp_path: Path) -> None:
    """The one that takes it for dead is still at work and publishes nothing itself."""
    outcomes = set()
    for at in itertools.count(1):
        root = tmp_path / str(at)
        older = begin(root)

        step = Step(at, partial(discard, root, older.out))
        with step.watching():
            outcome = run_once(root, "first")
        older.heart.stop()
        if not step.reached:
            break
        assert stages.done(root, STAGE) == (outcome == "done")
        if outcome == "done":
            assert assert_one_whole_result(root) == "first"
        outcomes.add(outcome)
    assert outcomes == {"done", "failed"}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("before", BEFORE)
def test_an_attempt_that_is_killed_at_any_step(
    tmp_path: Path, before: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing after the step happens. The next attempt ends with one whole result, also if it is paused at any step."""
    for at in itertools.count(1):
        root = tmp_path / str(at)
        before(root)
        step = Step(at, stop, last=True)
        with step.watching(), suppress(Killed), monkeypatch.context() as patched:
            patched.setattr(Attempt, "__exit__", lambda *_: None)  # a killed process leaves no word
            run_once(root, "first")
        if not step.reached:
            break
        with monkeypatch.context() as patched:
            patched.setattr(attempts, "_started", lambda _: "later")  # its process is gone
            assert run_once(root, "second") == "done"
        assert_one_whole_result(root)


def stop() -> None:
    raise Killed


@pytest.mark.parametrize("killed", [False, True], ids=["goes on", "is killed"])
def test_one_that_saw_a_stale_stage_does_not_destroy_the_one_that_replaced_it(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pauses before it moves the stale stage aside. The second publishes its result meanwhile.

    The first moves whatever is there, at every step of the second, and goes on after that or is killed.
    """
    rename = Path.rename
    for at in itertools.count(1):
        root = tmp_path / str(at)
        stale(root)
        final, reached = place(root, STAGE), []

        def moving(
            path: Path,
            target: Path,
            root: Path = root,
            final: Path = final,
            at: int = at,
            reached: list[bool] = reached,
        ) -> Path:
            if path != final or reached:
                return rename(path, target)
            reached.append(False)
            step = Step(at, lambda: suppressed(rename, final, target))
            with step.watching():
                run_once(root, "second")
            reached[0] = step.reached
            if killed:
                raise Killed
            return target

        with monkeypatch.context() as patched, suppress(Killed):
            patched.setattr(Path, "rename", moving)
            if killed:
                patched.setattr(Attempt, "__exit__", lambda *_: None)
            assert run_once(root, "first") == "done"
        if not reached[0]:
            break
        assert run_once(root, "third") == "done"
        assert assert_one_whole_result(root) == "second"
    assert at > 3


def suppressed(call: Callable[..., Any], *arguments: Any) -> None:
    with suppress(FileNotFoundError):
        call(*arguments)


# ---- what an attempt starts from --------------------------------------------------------------------------------


def begin(root: Path, content: str = "") -> Attempt:
    return Attempt(root, STAGE, content or stages.content(root, STAGE))


def test_an_attempt_starts_from_a_copy_of_the_newest_one_of_the_same_content(tmp_path: Path) -> None:
    with begin(tmp_path) as older:
        (older.out / "a.part.jsonl").write_text("old\n")
    with begin(tmp_path) as first, begin(tmp_path, "0" * 16) as other:
        assert (first.out / "a.part.jsonl").read_text() == "old\n"
        assert list(other.out.iterdir()) == [other.out / stages.ATTEMPT]
        journal = (first.out / "a.part.jsonl").open("a")
        journal.write("new\n")
        journal.flush()
        (first.out / ".half-written.12.part").write_text("x")
        (first.out / stages.DONE).write_text("{}")
        assert not older.out.exists()  # it had ended, and what it held was copied
        with begin(tmp_path) as second, journal:
            journal.write("late\n")  # by an attempt that is alive after all
            journal.flush()
            assert (second.out / "a.part.jsonl").read_text() == "old\nnew\n"
            assert sorted(path.name for path in second.out.iterdir()) == ["a.part.jsonl", stages.ATTEMPT]
            assert first.out.exists()


def test_a_copy_that_was_not_completed_is_nobodys_start(tmp_path: Path) -> None:
    with begin(tmp_path) as first:
        (first.out / "a.part.jsonl").write_text("whole\n")
    half = first.out.with_name(f"{first.out.name[:-6]}ffffff.half")
    half.mkdir()
    (half / "a.part.jsonl").write_text("who")
    with begin(tmp_path) as second:
        assert (second.out / "a.part.jsonl").read_text() == "whole\n"


def test_an_attempt_that_lost_its_folder_stops_at_its_next_report(tmp_path: Path) -> None:
    with begin(tmp_path) as attempt:
        attempt.progress(1, 2, "")
        assert json.loads((attempt.out / stages.ATTEMPT).read_text())["progress"] is None
        attempt.heart.beat()
        assert json.loads((attempt.out / stages.ATTEMPT).read_text())["progress"] == [1, 2, ""]
        shutil.rmtree(attempt.out)
        attempt.heart.beat()
        assert not attempt.out.exists()
        with pytest.raises(LostError):
            attempt.progress(2, 2, "")


def ended(root: Path, text: str) -> Path:
    """Return the folder of an attempt that has ended with this journal, whatever came before it."""
    with begin(root) as attempt:
        (attempt.out / "generations.part.jsonl").write_text(text)
    return attempt.out


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_does_not_cost_what_was_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ended(tmp_path, "paid\n")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        with pytest.raises(OSError, match=f"cannot copy {old}: .*No space left"):
            begin(tmp_path)
        assert run_once(tmp_path, "first") == "failed"
        assert list((tmp_path / "stages").iterdir()) == [old]
        patched.setattr(Watch, "alive", lambda *_: None)  # on another machine, and not known to be dead
        with begin(tmp_path) as attempt:
            assert not (attempt.out / "generations.part.jsonl").exists()
    assert (old / "generations.part.jsonl").read_text() == "paid\n"


def test_an_attempt_starts_from_the_one_that_came_furthest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(attempts, "_inherit", lambda *_: None)
        patched.setattr(attempts, "_delete", lambda *_: None)
        far, near = ended(tmp_path, "paid\n" * 3), ended(tmp_path, "paid\n")
    with begin(tmp_path) as attempt:
        assert (attempt.out / "generations.part.jsonl").read_text() == "paid\n" * 3
        assert not far.exists()
        assert not near.exists()


def test_a_folder_that_a_discarded_attempt_created_again_is_no_attempt(tmp_path: Path) -> None:
    ended(tmp_path, "paid\n")
    ghost = attempts._new(tmp_path, STAGE, stages.content(tmp_path, STAGE))
    (ghost / "checkpoints").mkdir(parents=True)
    with begin(tmp_path) as attempt:
        assert (attempt.out / "generations.part.jsonl").read_text() == "paid\n"
        shutil.rmtree(attempt.out)
        with pytest.raises(LostError):
            attempt.publish({})
        assert not attempt.out.exists()


def test_an_attempt_that_lost_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(work: stages.Work, checked: set[Path]) -> None:
        shutil.rmtree(work.out)  # by an attempt elsewhere, which goes on working
        stages.write(work.out / "one.json", "late")

    monkeypatch.setattr(runner, "_work", work)
    assert runner.run_stage(tmp_path, STAGE, lambda *_: None, set()).outcome == "failed"
    assert list((tmp_path / "stages").iterdir()) == []


def test_a_stage_that_cannot_be_taken_over_fails_alone_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once(tmp_path, "first")
    again = replace(STAGE, needs={})
    monkeypatch.setattr(type(again), "key", "f" * 16)  # of another recipe, with the same content
    monkeypatch.setattr(shutil, "copyfile", full)
    before = sorted((tmp_path / "stages").iterdir())
    ending = runner.run_stage(tmp_path, again, lambda *_: None, set())
    assert ending.outcome == "failed"
    assert "No space left" in ending.problem
    assert sorted((tmp_path / "stages").iterdir()) == before


def test_what_a_killed_attempt_was_copying_is_deleted(tmp_path: Path) -> None:
    """By the next attempt on its machine, or by the one that is published."""
    new = partial(attempts._new, tmp_path, STAGE, stages.content(tmp_path, STAGE))
    here, other = (path.with_name(path.name + attempts.HALF) for path in (new(), new()))
    elsewhere(here / stages.ATTEMPT, host=attempts._host(), pid=os.getpid())  # a process of this number is gone
    elsewhere(other / stages.ATTEMPT)
    with begin(tmp_path) as attempt:
        assert sorted((tmp_path / "stages").iterdir()) == sorted([attempt.out, other])
        attempt.publish({})
    assert list((tmp_path / "stages").iterdir()) == [place(tmp_path, STAGE)]


def test_an_attempt_whose_copy_was_deleted_meanwhile_does_not_begin_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copying(earlier: Path, half: Path, out: Path) -> None:
        shutil.rmtree(half)  # by one that saw it stand still
        (half / "model").mkdir(parents=True)

    ended(tmp_path, "paid\n")
    monkeypatch.setattr(attempts, "_inherit", copying)
    with pytest.raises(FileNotFoundError):
        begin(tmp_path)


def test_looking_for_refusals_does_not_scan_the_folder_for_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans, glob = [], Path.glob
    (tmp_path / "stages").mkdir()
    monkeypatch.setattr(Path, "glob", lambda path, pattern: scans.append(pattern) or glob(path, pattern))
    rows = [Stage(f"rows {number}", "rows", StageSettings()) for number in range(20)]
    assert runner.refused_stages(tmp_path, rows) == []
    assert len(scans) < 5


# ---- who is alive -----------------------------------------------------------------------------------------------


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(attempts.time, "monotonic", lambda: clock[0])
    return clock


def elsewhere(path: Path, **record: Any) -> None:
    """Write the heartbeat of a process on another machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"token": "t", "host": "elsewhere", "pid": 7, "started": "1", **record}))


def test_a_heartbeat_elsewhere_is_dead_when_it_stood_still_on_the_observers_clock(
    tmp_path: Path, now: list[float]
) -> None:
    path, watch = tmp_path / "attempt.json", Watch()
    elsewhere(path, beats=1)
    os.utime(path, (0, 0))  # dates do not count: clocks of machines differ
    assert watch.alive(path) is None
    now[0] += attempts.STALE
    assert watch.alive(path) is None
    elsewhere(path, beats=2)
    assert watch.alive(path) is True
    now[0] += attempts.STALE + 1
    assert watch.alive(path) is False
    elsewhere(path, beats=2, ended=True)
    assert Watch().alive(path) is False


def test_an_observer_is_more_patient_than_nfs_caches() -> None:
    """A client may show what was true 60 s ago (acregmax), and the last beat was up to one interval before that."""
    assert attempts.STALE > 60 + 3 * BEAT


def test_a_heartbeat_here_is_as_alive_as_its_process(tmp_path: Path) -> None:
    sleeper = Forked(time.sleep, 600)
    path, mine = tmp_path / "attempt.json", {"host": attempts._host(), "pid": sleeper.process.pid}
    elsewhere(path, **mine, started=attempts._started(sleeper.process.pid or 0))
    assert Watch().alive(path) is True
    elsewhere(path, **mine, started="1")  # the number was another process's
    assert Watch().alive(path) is False
    elsewhere(path, **mine, started=attempts._started(sleeper.process.pid or 0))
    os.kill(sleeper.process.pid or 0, signal.SIGKILL)
    while attempts._started(sleeper.process.pid or 0) is not None:
        time.sleep(0.01)
    assert Watch().alive(path) is False  # not yet waited for, it is a zombie
    sleeper.wait()
    assert Watch().alive(path) is False


def test_without_proc_another_users_process_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: not str(path).startswith("/proc/") and exists(path))
    monkeypatch.setattr(os, "kill", forbidden)
    assert attempts._started(1) == ""


def test_a_heart_whose_file_is_stale_on_its_server_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heart = attempts.Heart(tmp_path / "attempt.json", "t")
    for number, lost in ((errno.ENOSPC, False), (errno.ESTALE, True)):
        monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(number, "")))
        heart.beat()
        assert heart.lost is lost


def test_a_run_on_another_machine_is_refused_while_its_heart_beats_and_replaced_afterwards(
    tmp_path: Path, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / attempts.RUNNING
    beats = itertools.count()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] < 120:
            elsewhere(path, beats=next(beats) // 5)

    monkeypatch.setattr(attempts.time, "sleep", sleep)
    elsewhere(path, beats=0)
    refused = r"another run \(process 7 on elsewhere\) is working in this folder"
    with pytest.raises(DataError, match=refused), locked(tmp_path):
        pass
    now[0] = 200.0
    with locked(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert now[0] > 200 + attempts.STALE
    assert not path.exists()


def test_two_runs_that_find_a_dead_one_do_not_both_work(tmp_path: Path) -> None:
    """The second pauses before each step of its claim; the first claims the folder meanwhile and works in it."""
    for at in itertools.count(1):
        root, inside = tmp_path / str(at), []
        elsewhere(root / attempts.RUNNING, ended=True)

        def enter(run: AbstractContextManager[None], inside: list[AbstractContextManager[None]] = inside) -> None:
            with suppress(DataError):
                run.__enter__()
                inside.append(run)

        step = Step(at, partial(enter, locked(root)))
        with step.watching():
            enter(locked(root))
        (only,) = inside
        only.__exit__(None, None, None)
        assert list(root.iterdir()) == []
        if not step.reached:
            break
    assert at > 3


def test_windows_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    told = run(capsys, "stage", tmp_path, "0" * 16)
    assert (told.code, told.err) == (2, "catto: experiments run on Linux and macOS; on Windows, use WSL\n")


# ---- processes --------------------------------------------------------------------------------------------------


def run_here(root: Path, stage: Stage) -> None:
    """Run a stage and print its progress."""
    ending = runner.run_stage(root, stage, lambda finished, *_: say(f"at {finished}"), set())
    say(ending.outcome)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # what a stage prints goes into its log


def test_a_worker_that_is_stopped_and_wakes_up_late_changes_nothing(tmp_path: Path) -> None:
    """The journal of a stopped process stays open; what it appends after the other has finished goes nowhere."""
    recipe = load(str(write_recipe(tmp_path, tasks={"witnesses": {"train": 300}})))
    responses = Graph(recipe).responses("witnesses")
    root, alone = tmp_path / "run", tmp_path / "alone"
    for folder in (root, alone):
        assert runner.run_stage(folder, responses.needs["questions"], lambda *_: None, set()).outcome == "done"
    assert runner.run_stage(alone, responses, lambda *_: None, set()).outcome == "done"
    worker = Forked(run_here, root, responses)
    lines = worker.lines()
    while not next(lines).startswith("at 1"):
        pass
    os.kill(worker.process.pid or 0, signal.SIGSTOP)
    (late,) = folders(root, responses)
    assert (late / "generations.part.jsonl").stat().st_size > 0
    assert runner.run_stage(root, responses, lambda *_: None, set()).outcome == "done"
    whole = {path.name: path.read_bytes() for path in place(root, responses).glob("*.jsonl")}
    os.kill(worker.process.pid or 0, signal.SIGCONT)
    assert list(lines)[-1] == "done"
    assert worker.wait() == 0
    assert whole == {path.name: path.read_bytes() for path in place(root, responses).glob("*.jsonl")}
    assert whole.keys() == {path.name for path in place(alone, responses).glob("*.jsonl")}
    stages.check(place(root, responses), contents=True)
    assert not list((root / "stages").glob("*.part*"))
