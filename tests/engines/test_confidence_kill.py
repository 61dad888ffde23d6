"""Killed with SIGKILL and continued, an evaluation ends with the file of an undisturbed run."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from evaluation_world import killable, model, tokenizer
from forked import Forked

from catto.io.record_files import manifest_path

QUESTIONS, SAMPLES, KILLS = 48, 2, 1


def start(folder: Path, out: Path, chunks: int | None = None) -> Forked:
    return Forked(killable, str(folder), str(out), str(QUESTIONS), chunks=chunks)


def lines(part: Path) -> int:
    return part.read_bytes().count(b"\n") if part.exists() else 0


def kill_after(process: Forked, part: Path, goal: int, wait: float) -> None:
    deadline = time.monotonic() + 900
    while lines(part) < goal:
        assert process.process.is_alive(), "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(wait)
    process.process.kill()
    assert process.wait() == -signal.SIGKILL


def test_killed_and_continued_equals_undisturbed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    out, part = tmp_path / "killed.jsonl", tmp_path / "killed.part.jsonl"
    chance = random.Random(7)
    for turn in range(KILLS):
        process = start(folder, out, chunks=4)
        kill_after(process, part, lines(part) + 1, chance.uniform(0, 0.05))
        assert not out.exists()
        if turn == 0:  # as if killed inside a write
            with part.open("ab") as file:
                file.write(b'{"question":"q1","ta')
    assert 0 < lines(part) < QUESTIONS * SAMPLES
    assert start(folder, out).wait() == 0
    calm = tmp_path / "calm.jsonl"
    killable(str(folder), str(calm), str(QUESTIONS))
    assert calm.read_bytes().count(b"\n") == QUESTIONS * SAMPLES
    assert out.read_bytes() == calm.read_bytes()
    assert manifest_path(out).read_bytes() == manifest_path(calm).read_bytes()
    assert not part.exists()
