"""The server engine against faults, refusals and keys thrown back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import socket
import threading
import time
import traceback
from email.utils import formatdate
from typing import Any

import pytest
from openai_server import OpenAIServer, Reply, Seen, chat, error, ok
from server_cases import by_seed, engine, refused, request

from catto.engines import server_address
from catto.engines.replies import read_retry_after
from catto.engines.server import FaultError, ServerEngine, ServerError, retry_delay
from catto.records import Message, Refusal

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


def test_a_caller_that_stops_leaves_no_task_behind_that_shows_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Several requests fail at once with a reply that throws the key back; the caller takes one outcome."""
    monkeypatch.setenv("OPENAI_API_KEY", SENTINEL)
    together = threading.Barrier(4)

    def respond(seen: Seen) -> Reply:
        together.wait(30)
        return error(400, f"invalid: {seen.headers['authorization']}")

    with OpenAIServer(respond) as server:
        outcomes = engine(server, concurrency=4).generate([request(i) for i in range(4)])
        first = next(iter(outcomes))
        time.sleep(0.3)  # the others arrive
        outcomes.close()  # type: ignore[attr-defined]
    gc.collect()
    assert isinstance(first, Refusal)
    assert caplog.text == ""
    assert str(FaultError(SENTINEL, is_retryable=False)) == ""


def test_user_and_password_of_an_address_are_not_shown() -> None:
    with OpenAIServer(lambda _: error(400, "no access for bobuser with hunter2secret")) as server:
        address = server.url.replace("://", "://bobuser:hunter2secret@")
        (found,) = ServerEngine(address, "m").generate([request()])
    assert isinstance(found, Refusal)
    assert found.refused.endswith("no access for [key] with [key]")


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


@pytest.mark.parametrize("name", [name for name in FAULTS if name not in ("429", "503")])
def test_the_retries_of_one_request_are_bounded_by_one_budget_and_then_it_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catto.engines.server.FIRST_DELAY_SECONDS", 0.01)
    with OpenAIServer(lambda _: FAULTS[name]) as server:
        teacher = engine(server, max_retries=1)
        (found,) = teacher.generate([request()])
    assert isinstance(found, Refusal)
    assert "in try 2" in found.refused
    assert len(server.seen) == 2
    assert teacher.retries == 1


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_not_there_for_anybody_ends_the_run(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catto.engines.server.FIRST_DELAY_SECONDS", 0.01)
    with (
        OpenAIServer(lambda _: error(status)) as server,
        pytest.raises(ServerError, match=rf"question q sample 0: {status} in try 2: no"),
    ):
        list(engine(server, max_retries=1).generate([request()]))


def test_faults_of_both_kinds_draw_on_the_same_budget() -> None:
    """Broken JSON, 500, broken JSON: three retries; a budget of two allows three requests in all."""

    def respond(seen: Seen) -> Reply:
        return FAULTS["500"] if seen.attempt == 1 else FAULTS["broken JSON"]

    with OpenAIServer(respond) as server:
        assert "unusable reply in try 3" in refused(server, max_retries=2)
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
        delays = [retry_delay(retry) for _ in range(200)]
        assert 0.75 * longest <= min(delays) < max(delays) <= longest


def test_a_silent_server_times_out() -> None:
    told = threading.Event()

    def respond(seen: Seen) -> Reply:
        told.wait(60)
        return by_seed(seen)

    with OpenAIServer(respond) as server:
        assert refused(server, timeout=0.2, max_retries=0) == "nothing came for 0.2 s in try 1"
        told.set()


def test_a_dead_address_is_one_line_within_five_seconds() -> None:
    """The default settings, which allow eight retries."""
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"^http://127\.0\.0\.1:9/v1 .*: no connection in try \d: ") as caught:
        list(ServerEngine("http://127.0.0.1:9/v1", "m").generate([request(i) for i in range(20)]))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 5


def test_an_address_that_never_answers_is_told_within_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full backlog drops the handshake, as a firewall does; the wait for it is shortened here."""
    from catto.engines import server as module

    assert module.CONNECT_TIMEOUT_SECONDS < 5
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(module, "STARTUP_RETRY_SECONDS", 0.1)
    with socket.socket() as silent, contextlib.ExitStack() as stack:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(3):  # fill the backlog
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        started = time.monotonic()
        with pytest.raises(ServerError, match="no connection in try 1"):
            list(ServerEngine(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "m").generate([request()]))
        assert time.monotonic() - started < 5


def test_a_connection_lost_in_the_middle_of_a_run_is_tried_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the server has answered, all retries are used: it may be restarting."""
    monkeypatch.setattr("catto.engines.server.FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr("catto.engines.server.STARTUP_RETRY_SECONDS", 0.0)
    with OpenAIServer(by_seed) as server:
        teacher = engine(server, max_retries=3)
        list(teacher.generate([request()]))
    with pytest.raises(ServerError, match="no connection in try 4"):
        list(teacher.generate([request()]))


@pytest.mark.parametrize("status", [400, 404, 413, 418, 422, 451])
def test_a_refused_request_is_not_retried_and_leaves_the_others_alone(status: int) -> None:
    def respond(seen: Seen) -> Reply:
        return error(status, "bad\nthing") if seen.body["seed"] == 101 else by_seed(seen)

    with OpenAIServer(respond) as server:
        found = {one.sample: one for one in engine(server).generate([request(i) for i in range(4)])}
    assert found[1] == Refusal(refused=f"{status} in try 1: bad thing", question="q", sample=1)
    assert [found[i].text for i in (0, 2, 3)] == ["text 100", "text 102", "text 103"]  # type: ignore[union-attr]
    assert len(server.seen) == 4


STOPS = {
    "402": error(402, "no money"),
    "403": error(403, "your key may not do this"),
    "404 on the model": error(404, "The model `m` does not exist"),
    "404 on a deployment": error(404, "The API deployment for this resource does not exist."),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_fault_of_the_account_or_the_model_stops_at_once(name: str) -> None:
    with (
        OpenAIServer(lambda _: STOPS[name]) as server,
        pytest.raises(ServerError, match=f"question q sample 0: {name[:3]} in try 1: "),
    ):
        list(engine(server, concurrency=1).generate([request(i) for i in range(9)]))
    assert len(server.seen) == 1


def test_a_moderated_request_is_refused_although_its_status_is_403() -> None:
    with OpenAIServer(lambda _: error(403, "your input was flagged by moderation")) as server:
        assert refused(server).startswith("403 in try 1: ")


def test_what_a_filter_has_emptied_is_refused_without_a_retry() -> None:
    emptied = chat(None)
    emptied["choices"][0]["finish_reason"] = "content_filter"
    with OpenAIServer(lambda _: ok(emptied)) as server:
        assert refused(server) == "the reply was withheld: finish_reason content_filter"
    assert len(server.seen) == 1


def test_text_that_a_filter_has_cut_is_a_response() -> None:
    cut = chat("so far")
    cut["choices"][0]["finish_reason"] = "content_filter"
    with OpenAIServer(lambda _: ok(cut)) as server:
        (found,) = engine(server).generate([request()])
    assert (found.text, found.finish_reason) == ("so far", "content_filter")  # type: ignore[union-attr]


UNUSABLE = {
    "half of a surrogate pair": (ok(json.dumps(chat("X")).replace("X", "\\ud800")), "hex escape"),
    "HTML": (Reply(payload=b"<!doctype html><title>Log in</title>", content_type="text/html"), "HTML"),
    "text": (Reply(payload=b"overloaded", content_type="text/plain"), "Invalid JSON"),
    "nothing": (Reply(), "Invalid JSON"),
    "an empty list": (ok("[]"), "expected a block of names and values"),
    "null message": (ok({"model": "m", "choices": [{"message": None}]}), "choices.0.message"),
    "content in parts": (ok({"choices": [{"message": {"content": ["x"]}}]}), "choices.0.message.content"),
    "reset in the body": (ok(chat("x" * 1000), reset=True), "the connection broke in try 1"),
    "cut in the body": (ok(chat("x"), cut=True), "the connection broke in try 1"),
    "a bad gzip stream": (ok(chat("x"), headers=(("Content-Encoding", "gzip"),)), "the connection broke in try 1"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_reply_is_refused_and_told(name: str) -> None:
    reply, told = UNUSABLE[name]
    with OpenAIServer(lambda _: reply) as server:
        reason = refused(server, max_retries=0)
    assert told in reason
    assert "\n" not in reason
    assert len(reason) <= 300


def test_a_right_reply_of_a_wrong_type_is_taken() -> None:
    with OpenAIServer(lambda seen: by_seed(seen)._replace(content_type="text/html")) as server:
        (found,) = engine(server).generate([request()])
    assert found.text == "text 100"  # type: ignore[union-attr]


def test_a_reply_without_usage_is_a_reply() -> None:
    with OpenAIServer(lambda _: ok({**chat("x"), "usage": None})) as server:
        (found,) = engine(server, max_retries=0).generate([request()])
    assert (found.text, found.tokens) == ("x", None)  # type: ignore[union-attr]


def test_a_reply_beyond_the_limit_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catto.engines.server.MAX_REPLY_BYTES", 2**20)
    with OpenAIServer(lambda _: ok(chat("x" * 3 * 2**20))) as server:
        assert refused(server) == "the reply is longer than 1 MB"
    assert len(server.seen) == 1


def test_redirects_in_a_circle_end_the_run_at_once() -> None:
    circle = Reply(307, headers=(("Location", "/v1/chat/completions"),))
    with (
        OpenAIServer(lambda _: circle) as server,
        pytest.raises(ServerError, match="redirected without end in try 1"),
    ):
        list(engine(server, concurrency=1).generate([request(0), request(1)]))


def test_a_server_that_drips_for_ever_is_cut_off_at_the_deadline() -> None:
    """A byte every 0.05 s never lets the idle timeout of 5 s pass."""
    started = time.monotonic()
    with OpenAIServer(lambda _: Reply(drip=0.05)) as server:
        assert refused(server, deadline=0.5) == "no whole reply within 0.5 s, try 1"
    assert time.monotonic() - started < 30


def test_the_retries_share_the_deadline() -> None:
    started = time.monotonic()
    with OpenAIServer(lambda _: error(500)) as server:
        assert refused(server, deadline=0.8, max_retries=8) == "no whole reply within 0.8 s, try 2"
    assert time.monotonic() - started < 30


def test_twenty_requests_in_a_row_without_a_reply_end_the_run() -> None:
    with OpenAIServer(lambda _: error(500)) as server:
        teacher = engine(server, max_retries=0, concurrency=1)
        found = []
        with pytest.raises(ServerError, match="sample 19: 500 in try 1"):
            found.extend(teacher.generate([request(i) for i in range(40)]))
    assert len(found) == 19
    assert len(server.seen) == 20


def test_a_reply_between_them_starts_the_count_of_failures_again() -> None:
    with OpenAIServer(lambda seen: by_seed(seen) if seen.body["seed"] % 15 == 0 else error(500)) as server:
        found = list(engine(server, max_retries=0, concurrency=1).generate([request(i) for i in range(40)]))
    assert sum(isinstance(one, Refusal) for one in found) == 37  # seeds 100 to 139, of which 105, 120 and 135 are met


def test_what_is_thrown_back_of_the_prompt_is_not_kept() -> None:
    secret = "My mother's maiden name is Featherstonehaugh, and she was born in 1931."
    asked = request().model_copy(update={"messages": (Message(role="user", content=f"Consider:\n{secret}"),)})

    def respond(seen: Seen) -> Reply:
        return error(400, f"Invalid prompt: {json.dumps(seen.body['messages'])} was flagged")

    with OpenAIServer(respond) as server:
        (found,) = engine(server).generate([asked])
    assert isinstance(found, Refusal)
    assert "Featherstonehaugh" not in found.refused
    assert found.refused.startswith("400 in try 1: Invalid prompt:")
    assert found.refused.endswith("was flagged")


def test_the_refusal_of_an_address_shows_no_login() -> None:
    with pytest.raises(ValueError, match="expected an address such as") as refusal:
        server_address(f"http://me:{SENTINEL}@localhost:99999/v1")
    assert SENTINEL not in str(refusal.value)


def test_a_login_in_the_address_is_used_and_never_shown(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The server throws it back, encoded and plain; the HTTP client logs every address at INFO."""
    caplog.set_level(logging.DEBUG)

    def respond(seen: Seen) -> Reply:
        assert seen.headers["authorization"] == "Basic bWU6cyNjcmV0LTc3"
        said = f"saw {seen.headers['authorization']} s#cret-77"
        return error(403 if seen.body["seed"] == 101 else 400, said)

    with OpenAIServer(respond) as server:
        teacher = ServerEngine(server.url.replace("//", "//me:s%23cret-77@"), "m", max_retries=0)
        (found,) = teacher.generate([request()])
        with pytest.raises(ServerError) as caught:
            list(teacher.generate([request(1)]))
    told = "".join(traceback.format_exception(caught.value)) + repr(found) + repr(vars(teacher)["base_url"])
    shown = told + caplog.text + "".join(capfd.readouterr())
    assert "HTTP Request" in caplog.text
    assert not [secret for secret in ("cret-77", "bWU6cyNjcmV0LTc3") if secret in shown]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000/v1",
        "ftp://a/v1",
        "http://",
        "http://a:x1/v1",
        "http://u:pw-77@a:b/v1",
        "http://a/?key=pw-77",
    ],
)
def test_what_is_no_address_is_refused_at_once_without_being_shown(url: str) -> None:
    with pytest.raises(ValueError, match=r"^expected an address such as http://") as caught:
        ServerEngine(url, "m")
    assert "pw-77" not in "".join(traceback.format_exception(caught.value))


def test_what_is_in_flight_is_yielded_before_the_error_and_nothing_more_is_asked() -> None:
    all_in, refused = threading.Barrier(4), threading.Event()

    def respond(seen: Seen) -> Reply:
        all_in.wait(60)
        if seen.body["seed"] == 100:
            refused.set()
            return error(403, "cannot")
        refused.wait(60)
        return by_seed(seen)._replace(delay=1.0)  # by then the refusal has arrived

    found: list[int] = []
    with OpenAIServer(respond) as server, pytest.raises(ServerError, match="sample 0: 403 in try 1"):
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
    with OpenAIServer(lambda s: error(400, f"saw {s.headers['authorization']}")) as server:
        assert refused(server) == "400 in try 1: saw Bearer [key]"


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


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
    ],
)
def test_a_wait_is_seconds_or_milliseconds(headers: dict[str, str], expected: float) -> None:
    assert read_retry_after(headers) == expected


def test_a_wait_may_be_a_date() -> None:
    wait = read_retry_after({"retry-after": formatdate(time.time() + 600, usegmt=True)})
    assert wait is not None
    assert 300 <= wait <= 600


def test_a_date_is_compared_with_the_servers_own_clock() -> None:
    ahead = time.time() + 3600
    headers = {"retry-after": formatdate(ahead + 2, usegmt=True), "date": formatdate(ahead, usegmt=True)}
    assert read_retry_after(headers) == 2.0
    assert read_retry_after({**headers, "date": "noon"}) is None


@pytest.mark.parametrize("given", ["0", "-5", "soon", "nan", "inf", "", "Thu, 01 Jan 1970 00:00:00 GMT"])
def test_a_wait_that_is_none_leaves_the_usual_one(given: str) -> None:
    assert read_retry_after({"retry-after": given}) is None
