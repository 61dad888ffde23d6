"""The server engine against faults, refusals and keys thrown back."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import traceback
from typing import Any

import pytest

from catto.engines.server import ServerEngine, ServerError, back_off
from openai_server import OpenAIServer, Reply, Seen, chat, error, ok
from server_cases import by_seed, engine, request

SENTINEL = "sk-sentinel-5f2c9e"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


FAULTS = {
    "429": error(429),
    "500": error(500),
    "503": error(503),
    "dropped connection": ok(chat("x"), cut=True),
    "broken JSON": ok('{"choices": [{"mess'),
    "not UTF-8": Reply(payload=b'{"model": "\xff"}'),
    "no choices": ok({"model": "m", "choices": []}),
    "choices missing": ok({"model": "m"}),
    "an error in a 200": ok({"error": {"message": "overloaded"}}),
    "content missing": ok({"model": "m", "choices": [{"message": {"role": "assistant"}}]}),
    "content null": ok(chat(None)),
    "message missing": ok({"model": "m", "choices": [{"finish_reason": "stop"}]}),
}


def test_every_passing_fault_is_retried_and_counted() -> None:
    """Each sample meets its own fault once: one retry each, whether the client's or ours."""
    faults = list(FAULTS.values())

    def respond(seen: Seen) -> Reply:
        return faults[seen.body["seed"] - 100] if seen.attempt == 0 else by_seed(seen)

    with OpenAIServer(respond) as server:
        teacher = engine(server)
        found = list(teacher.generate([request(i) for i in range(len(faults))]))
    assert sorted(g.text for g in found) == sorted(f"text {100 + i}" for i in range(len(faults)))
    assert len(server.seen) == 2 * len(faults)
    assert teacher.retries == len(faults)


@pytest.mark.parametrize("name", ["500", "broken JSON", "dropped connection"])
def test_the_retries_of_one_request_are_bounded_by_one_budget(name: str) -> None:
    with OpenAIServer(lambda _: FAULTS[name]) as server:
        teacher = engine(server, max_retries=1)
        with pytest.raises(ServerError, match=r"question q sample 0: .*in try 2"):
            list(teacher.generate([request()]))
    assert len(server.seen) == 2
    assert teacher.retries == 1


def test_faults_of_both_kinds_draw_on_the_same_budget() -> None:
    """Broken JSON, 500, broken JSON: three retries; a budget of two allows three requests in all."""

    def respond(seen: Seen) -> Reply:
        return FAULTS["500"] if seen.attempt == 1 else FAULTS["broken JSON"]

    with OpenAIServer(respond) as server, pytest.raises(ServerError, match="unusable reply in try 3"):
        list(engine(server, max_retries=2).generate([request()]))
    assert len(server.seen) == 3


def test_retry_after_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the header the first retry comes within 0.5 s. The event loop, not the clock, tells how long it waits."""
    delays: list[float] = []
    later = asyncio.BaseEventLoop.call_later

    def call_later(
        loop: asyncio.BaseEventLoop, delay: float, call: Any, *rest: Any, **more: Any
    ) -> asyncio.TimerHandle:
        if call is asyncio.futures._set_result_unless_cancelled:  # type: ignore[attr-defined]  # a sleep
            delays.append(delay)
        return later(loop, delay, call, *rest, **more)

    def respond(seen: Seen) -> Reply:
        return error(429, headers=(("Retry-After", "1"),)) if seen.attempt == 0 else by_seed(seen)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_later", call_later)
    with OpenAIServer(respond) as server:
        list(engine(server).generate([request()]))
    first, second = server.seen
    assert second.at - first.at >= 1.0
    assert [delay for delay in delays if delay > 0.1] == [1.0]


def test_a_wait_longer_than_two_minutes_ends_the_run_and_is_told() -> None:
    with OpenAIServer(lambda _: error(429, headers=(("Retry-After", "600"),))) as server:
        teacher = engine(server)
        with pytest.raises(ServerError, match="429 in try 1, Retry-After 600"):
            list(teacher.generate([request()]))
    assert (len(server.seen), teacher.retries) == (1, 0)


def test_back_off_doubles_to_a_limit_with_jitter_below() -> None:
    for retry, longest in [(1, 0.5), (2, 1.0), (3, 2.0), (5, 8.0), (9, 8.0)]:
        delays = [back_off(retry) for _ in range(200)]
        assert 0.75 * longest <= min(delays) < max(delays) <= longest


def test_a_silent_server_times_out() -> None:
    told = threading.Event()

    def respond(seen: Seen) -> Reply:
        told.wait(60)
        return by_seed(seen)

    with OpenAIServer(respond) as server:
        with pytest.raises(ServerError, match=r"nothing came for 0\.2 s in try 1"):
            list(engine(server, timeout=0.2, max_retries=0).generate([request()]))
        told.set()


def test_no_server_is_one_line() -> None:
    with pytest.raises(ServerError, match="no connection in try 1") as caught:
        list(ServerEngine("http://127.0.0.1:9/v1", "m", max_retries=0).generate([request()]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 403, 404, 422])
def test_a_refusal_is_not_retried(status: int) -> None:
    with (
        OpenAIServer(lambda _: error(status, "bad\nthing")) as server,
        pytest.raises(ServerError, match=f"question q sample 0: {status} in try 1: .*bad.*thing") as caught,
    ):
        list(engine(server).generate([request()]))
    assert "\n" not in str(caught.value)
    assert len(server.seen) == 1


def test_what_is_in_flight_is_yielded_before_the_error_and_nothing_more_is_asked() -> None:
    all_in, refused = threading.Barrier(4), threading.Event()

    def respond(seen: Seen) -> Reply:
        all_in.wait(60)
        if seen.body["seed"] == 100:
            refused.set()
            return error(400, "cannot")
        refused.wait(60)
        return by_seed(seen)._replace(delay=1.0)  # by then the refusal has arrived

    found: list[int] = []
    with OpenAIServer(respond) as server, pytest.raises(ServerError, match="sample 0: 400 in try 1"):
        found.extend(g.sample for g in engine(server, concurrency=4).generate([request(i) for i in range(40)]))
    assert sorted(found) == [1, 2, 3]
    assert len(server.seen) == 4


def test_a_dropped_iterator_stops_the_asking() -> None:
    with OpenAIServer(lambda seen: by_seed(seen)._replace(delay=0.02)) as server:
        arriving = engine(server, concurrency=2).generate([request(i) for i in range(100)])
        next(arriving)
        arriving.close()  # type: ignore[attr-defined]
        time.sleep(0.2)
        assert len(server.seen) < 20


def test_the_key_is_sent_and_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server throws the key back; neither the error, its traceback nor any log has it."""
    monkeypatch.setenv("TEACHER_KEY", f" {SENTINEL}\n")
    caplog.set_level(logging.DEBUG)
    with (
        OpenAIServer(lambda s: error(401, f"bad key {s.headers['authorization']}")) as server,
        pytest.raises(ServerError) as caught,
    ):
        list(engine(server, api_key_env="TEACHER_KEY").generate([request()]))
    assert server.seen[0].headers["authorization"] == f"Bearer {SENTINEL}"
    assert "environment variable TEACHER_KEY was refused" in str(caught.value)
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text + "".join(capfd.readouterr())
    assert SENTINEL not in shown


def test_a_key_echoed_in_another_error_is_blotted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SENTINEL)
    with (
        OpenAIServer(lambda s: error(400, f"saw {s.headers['authorization']}")) as server,
        pytest.raises(ServerError) as caught,
    ):
        list(engine(server).generate([request()]))
    assert SENTINEL not in "".join(traceback.format_exception(caught.value))
    assert "[key]" in str(caught.value)


def test_a_missing_key_names_the_variable() -> None:
    with (
        OpenAIServer(lambda _: error(401)) as server,
        pytest.raises(ServerError, match="environment variable SOME_KEY is not set"),
    ):
        list(engine(server, api_key_env="SOME_KEY").generate([request()]))


def test_a_key_that_no_header_can_carry_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{SENTINEL}\nü")
    with pytest.raises(ServerError, match="OPENAI_API_KEY") as caught:
        list(ServerEngine("http://127.0.0.1:9/v1", "m").generate([request()]))
    assert SENTINEL not in "".join(traceback.format_exception(caught.value))
