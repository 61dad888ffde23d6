"""A teacher run killed with SIGKILL at five moments ends with the files of an undisturbed one."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from openai_server import Reply, Seen
from teacher_world import calm, faults_of, questions, serve, server_settings, stormy, teach

from catto.engines import Key
from catto.teacher.responses import draw_sampling

pytestmark = pytest.mark.slow

QUESTIONS, SAMPLES, CONCURRENCY, KILLS = 40, 6, 8, 5
TOTAL = QUESTIONS * SAMPLES


def start(out: Path, url: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("teacher_world.py")
    return subprocess.Popen([sys.executable, str(script), str(out), url, str(QUESTIONS)], env=env)


def stored(part: Path) -> dict[Key, str]:
    """The whole lines of a part file."""
    lines = part.read_bytes().split(b"\n")[:-1] if part.exists() else []
    rows = [json.loads(line) for line in lines]
    found = {(row["question"], row["sample"]): row["text"] for row in rows}
    assert len(found) == len(rows)
    return found


class Held:
    """The stormy server, silent while the part file holds more than `limit` lines: no run ends before it is killed."""

    def __init__(self, part: Path) -> None:
        self.part, self.limit = part, math.inf

    def respond(self, seen: Seen) -> Reply:
        while self.part.exists() and self.part.read_bytes().count(b"\n") > self.limit:
            time.sleep(0.01)
        return stormy(seen)


def kill_when_stored(process: subprocess.Popen[bytes], part: Path, goal: int, wait: float) -> None:
    """Kill the run a moment after it has stored `goal` responses."""
    deadline = time.monotonic() + 900
    while not part.exists() or part.read_bytes().count(b"\n") < goal:
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(wait)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def without_times(path: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]


def test_killed_five_times_it_loses_nothing_and_ends_the_same(tmp_path: Path) -> None:
    chance = random.Random(20)
    goals = sorted(chance.sample(range(5, TOTAL - 60), KILLS))
    out, part = tmp_path / "killed", tmp_path / "killed" / "generations.part.jsonl"
    before: dict[Key, str] = {}
    held = Held(part)
    with serve(held.respond) as server:
        for turn, goal in enumerate(goals):
            held.limit = max(goal, len(before) + 1) + 2 * CONCURRENCY
            process = start(out, server.url)
            kill_when_stored(process, part, max(goal, len(before) + 1), chance.uniform(0, 0.05))
            if turn == 2:  # as if killed inside a write
                with part.open("ab") as file:
                    file.write(b'{"question": "q1", "sam')
            now = stored(part)
            assert before.items() <= now.items()
            before = now
        held.limit = math.inf
        assert start(out, server.url).wait() == 0
        asked = len(server.seen)
    settings = server_settings(server.url)
    seeds = [draw_sampling(settings, f"q{i}", sample)[1] for i in range(QUESTIONS) for sample in range(SAMPLES)]
    assert faults_of(seeds) > 30
    assert TOTAL + faults_of(seeds) <= asked <= TOTAL + faults_of(seeds) + KILLS * CONCURRENCY
    assert not part.exists()

    with serve(calm) as server:
        teach(questions(QUESTIONS), None, server_settings(server.url), tmp_path / "calm")
    names = sorted(path.name for path in (tmp_path / "calm").iterdir())
    assert names == sorted(path.name for path in out.iterdir())
    assert {"generations.jsonl", "responses.jsonl"} <= set(names)
    for name in names:
        if name in ("generations.jsonl", "responses.jsonl"):
            assert without_times(out / name) == without_times(tmp_path / "calm" / name)
        else:
            assert (out / name).read_bytes() == (tmp_path / "calm" / name).read_bytes(), name
