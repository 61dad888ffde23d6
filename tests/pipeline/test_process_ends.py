"""A process that asks a server ends within seconds, whatever stops it and however many requests are in flight."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from openai_server import OpenAIServer, Reply, Seen, counted, ok
from test_log_probabilities import reply_with

# Far more than an interpreter needs to start, ask and end.
SECONDS = 60
TESTS = Path(__file__).parent


def slow_after_the_first(seen: Seen) -> Reply:
    """Answer the probe and sample 0 at once; all other requests stay in flight."""
    body = reply_with(-0.5)
    body["usage"] = {"prompt_tokens": counted(seen), "completion_tokens": 3}
    if seen.body["messages"][0]["content"] == "Count." or seen.body.get("seed") == FIRST_SEED:
        return ok(body)
    return Reply(drip=0.2)


FIRST_SEED = 100
PARTS = """
    import sys
    from pathlib import Path
    from server_cases import request
    from catto.engines.server import ServerEngine
    engine = ServerEngine(sys.argv[1], "m", top_logprobs=2, concurrency=4)
"""
# What stops the loop over the replies, while others are in flight.
PROGRAMS = {
    "an exception of the caller": """
        for reply in engine.generate([request(i) for i in range(8)]):
            raise RuntimeError("a bug")
    """,
    "an iterator that is never closed": """
        replies = engine.generate([request(i) for i in range(8)])
        next(iter(replies))
        raise RuntimeError("a bug")
    """,
    "an iterator that a module keeps": """
        import json
        json.kept = iter(engine.generate([request(i) for i in range(8)]))
        next(json.kept)
        raise RuntimeError("a bug")
    """,
    "sys.exit": """
        replies = iter(engine.generate([request(i) for i in range(8)]))
        next(replies)
        sys.exit("a bug")
    """,
    "the end of the program": """
        replies = iter(engine.generate([request(i) for i in range(8)]))
        next(replies)
        print("a bug", file=sys.stderr)
    """,
}


def start(*command: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NO_PROXY": "127.0.0.1"}
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A suite that runs in the background ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end(process: subprocess.Popen[str]) -> str:
    """Wait for the process; what it wrote to stderr."""
    try:
        _, problems = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        pytest.fail(f"the process did not end within {SECONDS} s")
    return problems


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_fails_between_two_replies_ends(name: str) -> None:
    with OpenAIServer(slow_after_the_first) as server:
        problems = end(start("-c", textwrap.dedent(PARTS) + textwrap.dedent(PROGRAMS[name]), server.url))
    assert "a bug" in problems


EVALUATION = """
    import sys
    from pathlib import Path
    from catto.engines.server import ServerEngine
    from catto.predict import evaluate
    from teacher_world import questions

    def stop(*_):
        raise RuntimeError("a bug")

    engine = ServerEngine(sys.argv[1], "m", top_logprobs=20, concurrency=4)
    evaluate(engine, questions(8), out=Path(sys.argv[2]), progress=stop)
"""
TEACHING = """
    import sys
    from pathlib import Path
    from catto.teacher import ask
    from teacher_world import questions, server_settings

    def stop(*_):
        raise RuntimeError("a bug")

    ask(questions(8), None, server_settings(sys.argv[1]), Path(sys.argv[2]), stop)
"""


def first_at_once() -> object:
    """A server that answers the probe and one more request, and leaves the others waiting."""
    answered: list[int] = []

    def respond(seen: Seen) -> Reply:
        body = reply_with(-0.5)
        body["usage"] = {"prompt_tokens": counted(seen), "completion_tokens": 3}
        if seen.body["messages"][0]["content"] == "Count.":
            return ok(body)
        answered.append(1)
        return ok(body) if len(answered) == 1 else Reply(drip=0.2)

    return respond


@pytest.mark.parametrize("program", [EVALUATION, TEACHING], ids=["evaluate", "teach"])
def test_a_run_that_fails_unexpectedly_ends(program: str, tmp_path: Path) -> None:
    with OpenAIServer(first_at_once()) as server:  # type: ignore[arg-type]
        problems = end(start("-c", textwrap.dedent(program), server.url, str(tmp_path / "out")))
    assert "RuntimeError: a bug" in problems


def test_an_interrupted_evaluation_ends(tmp_path: Path) -> None:
    with OpenAIServer(first_at_once()) as server:  # type: ignore[arg-type]
        options = ["--engine", "server", "--base-url", server.url, "--task", "witnesses", "--n", "8"]
        process = start("-m", "catto", "eval", "m", *options, "--out", str(tmp_path / "eval"))

        def has_asked() -> bool:
            assert process.poll() is None, process.communicate()
            asked = [seen for seen in server.seen if seen.body["messages"][0]["content"] != "Count."]
            return len(asked) > 2

        end_of_waiting = time.monotonic() + 120
        while not has_asked():
            assert time.monotonic() < end_of_waiting
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        problems = end(process)
    assert process.returncode == 130
    assert "interrupted; the same command resumes from here" in problems
