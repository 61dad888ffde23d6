"""Run every property test with fresh seeds until the time is up: `python tests/fuzz.py MINUTES [SEED]`.

A round is one run of all property tests with one seed, in a process of its own; two rounds run at a time. With a SEED
that round alone is run. After MINUTES no test starts any more, and a round that still runs half a minute later is cut
off and its seed told. The exit status is 1 if anything failed, and the last lines say how to see it again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROUNDS_AT_A_TIME = 2
# Seconds for the test that runs when the time is up, and for Hypothesis to shrink an example that it has found.
GRACE = 30.0


class StopInTime:
    """A plugin of pytest: no test starts after `until`, in seconds of the wall clock."""

    def __init__(self, until: float) -> None:
        self.until, self.stopped, self.failed = until, False, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.time() > self.until:
            item.session.shouldstop, self.stopped = "the time is up", True

    def status(self, status: int) -> int:
        """An exit status that does not count a stop in time as a failure, nor hide one before it."""
        return int(self.failed) if self.stopped else status


def run_round(seed: int, until: float) -> int:
    """Run all property tests in this process with one seed, in the order of that seed."""
    options = ["-m", "hypothesis", "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", f"--randomly-seed={seed}"]
    stop = StopInTime(until)
    return stop.status(pytest.main([*options, "-v"], plugins=[stop]))


def supervised(seed: int, until: float) -> tuple[str, str]:
    """Run one round as a process and end it in time: `passed`, `FAILED` or `cut off`, and what it printed."""
    command = [sys.executable, str(Path(__file__)), "--round", str(seed), str(until)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(max(0.0, until - time.time()) + GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        status = process.wait()
        output.seek(0)
        shown = output.read().rstrip() or "nothing printed"
    if status == -signal.SIGKILL and " FAILED " not in shown:
        return "cut off", shown
    return "FAILED" if status else "passed", shown


def explore(minutes: float, seed: int | None) -> int:
    """Run rounds until the time is up or one has failed. Returns the exit status."""
    until = time.time() + 60 * minutes
    outcomes: Counter[str] = Counter()
    failed: dict[int, str] = {}

    def rounds() -> None:
        while not failed and time.time() < until:
            mine = random.SystemRandom().getrandbits(32) if seed is None else seed
            outcome, shown = supervised(mine, until)
            # The line and its end in one piece: two threads print at once.
            print(f"seed {mine}: {outcome}: {shown.splitlines()[-1]}\n", end="", flush=True)
            outcomes[outcome] += 1
            if outcome == "FAILED":
                failed[mine] = shown
            if seed is not None:
                return

    with ThreadPoolExecutor(ROUNDS_AT_A_TIME) as pool:
        for running in [pool.submit(rounds) for _ in range(ROUNDS_AT_A_TIME if seed is None else 1)]:
            running.result()
    for one, shown in failed.items():
        print(f"\n{shown}\n\nSee it again: make fuzz SEED={one}")
        print(f"One test alone: .venv/bin/python -m pytest --hypothesis-profile=fuzz --hypothesis-seed={one} TEST")
    print("Rounds: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--round", seed, until]:
            status = run_round(int(seed), float(until))
            sys.stdout.flush()
            os._exit(status)  # at once: taking torch apart can take longer than what is left of the time
        case [minutes]:
            return explore(float(minutes), None)
        case [minutes, seed]:
            return explore(float(minutes), int(seed))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
