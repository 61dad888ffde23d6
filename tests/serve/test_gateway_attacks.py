"""The gateway against hostile clients, odd upstreams and the accidents of a server's life."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from needs import REASONS

pytest.importorskip("fastapi", reason=REASONS["serve"])

from command import run
from gateway_world import MODEL, ONE, always, ask, gateway, stating, threshold, until
from openai_server import OpenAIServer, Reply, Seen, chat, ok
from predictions import prediction
from test_gateway import body, free_port, get, metric, post, serving

from catto.calibrate import Fitted
from catto.engines.server import ServerEngine
from catto.io.record_files import write_records
from catto.metrics.calibrators import Temperature
from catto.records import Message, Option
from catto.serve.answering import Answerer, AnswerRequest, GatewayAnswer, ServedQuestion
from catto.serve.gateway import Limits


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def raw(url: str, head: bytes, payload: bytes = b"") -> tuple[int, bytes]:
    """Send bytes as they are; the status and all that came back."""
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=30) as line:
        line.sendall(head + b"Connection: close\r\nHost: x\r\n\r\n" + payload)
        heard = b"".join(iter(lambda: line.recv(65536), b""))
    return int(heard.split()[1]), heard


def posted(url: str, data: bytes, *headers: bytes) -> tuple[int, bytes]:
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"Content-Type: application/json", *headers]
    return raw(url, b"\r\n".join([*lines, f"Content-Length: {len(data)}".encode(), b""]), data)


def test_a_path_cannot_forge_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "catto.serve")
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        assert get(url, "/v1/x%0Achatcmpl-1%20/v1/chat/completions%20200%20%1B%5B2J")[0] == 404
        assert get(url, f"/{'x' * 5000}")[0] == 404
    lines = [record.getMessage() for record in caplog.records if record.name == "catto.serve"]
    assert len(lines) == 2
    assert not [line for line in lines if "\n" in line or "\x1b" in line or len(line) > 200]


@pytest.mark.parametrize(
    "wished", [b"a b", b"x" * 65, "é".encode(), b"a\tb", b"", b"<script>", b"a;b", b"\xff", b"%0d%0aSet-Cookie:x"]
)
def test_a_request_id_that_is_no_name_is_replaced(wished: bytes) -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        status, heard = posted(url, json.dumps(body()).encode(), b"X-Request-Id: " + wished)
    assert status == 200
    (name,) = re.findall(rb"x-request-id: (.*?)\r\n", heard)
    assert re.fullmatch(rb"chatcmpl-[0-9a-f]{24}", name)


def test_a_key_may_have_any_letters_and_a_header_any_bytes() -> None:
    data = json.dumps(body()).encode()
    with OpenAIServer(always("B")) as upstream, gateway(upstream, limits=Limits(key="schlüssel")) as url:
        for key in ("schlüssel".encode("latin-1"), b"\xff\xfe", "ключ".encode(), b"", b"x" * 10_000):
            assert posted(url, data, b"Authorization: Bearer " + key)[0] == 401
        assert posted(url, data, "Authorization: Bearer schlüssel".encode())[0] == 200
    assert len(upstream.seen) == 1


@pytest.mark.parametrize(
    "fields",
    [
        b'"temperature": NaN',
        b'"temperature": Infinity',
        b'"temperature": -Infinity',
        b'"temperature": 1e999',
        b'"seed": NaN',
        b'"max_tokens": 1e999',
        b'"max_tokens": ' + b"9" * 5000,
        b'"max_tokens": true',
        b'"seed": -1',
        b'"n": NaN',
        b'"catto": {"options": {"\\ud800": "", "B": ""}}',
        b'"catto": 1',
        b'"catto": ' + b"[" * 100_000 + b"]" * 100_000,
        b'"stream": "yes"',
        b'"stream_options": {"include_usage": 1}',
    ],
    ids=lambda fields: fields[:24].decode(),
)
def test_numbers_and_texts_that_are_none_are_a_400(fields: bytes) -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        status, heard = posted(url, json.dumps(body()).encode()[:-1] + b", " + fields + b"}")
    assert status == 400, heard
    assert json.loads(heard.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"
    assert not upstream.seen


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 200),
        ({"user": "\ud800"}, 200),
        ({"catto": {"options": {"B": "\ud800", "C": ""}}}, 200),
        ({"catto": {"rule": "\ud800"}}, 400),
        ({"model": "\ud800"}, 404),
        ({"\ud800": 1}, 400),
    ],
)
def test_half_of_a_character_is_served_or_refused(fields: dict[str, Any], status: int) -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        assert post(url, body() | fields)[0] == status
    assert len(upstream.seen) == (status == 200)


@pytest.mark.parametrize("length", [b"1_0", b"+5", b"-1", b"x", b"", b"5, 6", "²".encode()])
def test_a_length_that_is_no_number_is_a_400(length: bytes) -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        status, _ = raw(url, b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: " + length + b"\r\n", b"{}")
        assert status == 400
        assert post(url, body())[0] == 200


def test_an_unknown_model_is_named_in_one_short_line() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        status, reply, _ = post(url, body(model="gpt\n\x1b" + "9" * 100_000))
    assert (status, reply["error"]["code"]) == (404, "not_found")
    assert len(reply["error"]["message"]) < 600
    assert "\n" not in reply["error"]["message"]


@pytest.mark.parametrize(
    ("reply", "deadline", "status", "said"),
    [
        (ok({"error": {"message": "the provider is overloaded", "code": 529}}), 30.0, 502, "provider is overloaded"),
        (ok({"error": "cuda out of memory"}), 30.0, 502, "cuda out of memory"),
        (ok({"choices": []}), 30.0, 502, "unusable reply"),
        (ok("[" * 100_000), 30.0, 502, "unusable reply"),
        (Reply(500, b"[" * 100_000), 30.0, 502, "500 in try"),
        (Reply(drip=0.05), 0.5, 504, "no whole reply within 0.5 s"),
    ],
)
def test_odd_replies_of_the_upstream_are_told(reply: Reply, deadline: float, status: int, said: str) -> None:
    raising = pytest.raises(openai.APIStatusError, match=said)
    with OpenAIServer(lambda _: reply) as upstream, gateway(upstream, deadline=deadline) as url, raising as found:
        ask(url)
    assert found.value.status_code == status


def test_continuations_are_in_the_token_counts() -> None:
    def respond(seen: Seen) -> Reply:
        return ok(stating("C") if seen.body.get("continue_final_message") else chat("hmm, well"))

    with OpenAIServer(respond) as upstream, gateway(upstream) as url:
        usage = ask(url).usage
    assert len(upstream.seen) == 2
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (14, 5, 19)


def test_families_of_metrics_are_whole_and_buckets_rise() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        assert [post(url, body(model=name))[0] for name in ("tiny-answerer", "other")] == [200, 404]
        lines = get(url, "/metrics")[1].splitlines()
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))
    family = ""
    for line in lines:
        if line.startswith("# "):  # HELP comes before TYPE
            family = line.split()[2]
        assert family in line
    buckets = [line for line in lines if "_bucket" in line]
    bounds = [float(re.findall(r'le="(.*?)"', line)[0]) for line in buckets]
    counts = [float(line.split()[1]) for line in buckets]
    assert bounds == sorted(bounds)
    assert counts == sorted(counts)
    assert (bounds[-1], counts[-1]) == (float("inf"), 2)


def graded(url: str) -> int:
    return post(url, {"id": ask(url).id, "correct": True}, "/v1/feedback")[0]


def test_a_log_that_is_rotated_goes_on_in_a_new_file(tmp_path: Path) -> None:
    log, old = tmp_path / "answers.jsonl", tmp_path / "answers.1.jsonl"
    with OpenAIServer(always("B")) as upstream, gateway(upstream, log=log) as url:
        assert graded(url) == 200
        log.rename(old)
        assert graded(url) == 200
    assert [len(path.read_text().splitlines()) for path in (log, old)] == [1, 1]


def test_a_full_disk_costs_a_row_and_never_half_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "answers.jsonl"
    with OpenAIServer(always("B")) as upstream, gateway(upstream, log=log) as url:
        assert graded(url) == 200
        before, limits = log.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, limits[1]))
        try:
            assert graded(url) == 200
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert log.read_bytes() == before
        assert "answers.jsonl: the disk is full" in caplog.text
        assert graded(url) == 200
        assert metric(url, "catto_feedback_answers") == 3
    assert log.read_bytes().count(b"\n") == 2
    done = run(capsys, "measure", log, "--json")
    assert (done.code, done.json["rows"]) == (0, 2)


def test_rows_of_a_log_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    good = {"id": "a", "confidence": 0.5, "correct": True, "model": MODEL}
    spoiled: list[Any] = [
        {**good, "confidence": "x"},
        {**good, "confidence": 7},
        {"id": "a"},
        [],
        "\xff",
        {**good, "id": 3},
    ]
    log.write_text("\n".join(json.dumps(row) for row in (good, *spoiled)) + '\n{"id": "a", "conf')
    with OpenAIServer(always("B")) as upstream, gateway(upstream, log=log) as url:
        assert metric(url, "catto_feedback_answers") == 1
        assert metric(url, "catto_rolling_ece") == 0.5


@pytest.mark.parametrize("kept", [4, 60, -20, -1])
def test_a_row_torn_by_a_power_cut_costs_no_other_row(
    kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of its last row a log keeps so many bytes; all but its line's end is a whole row."""
    log = tmp_path / "answers.jsonl"
    with OpenAIServer(always("B")) as upstream:
        with gateway(upstream, log=log) as url:
            assert [graded(url), graded(url)] == [200, 200]
        first, last = log.read_bytes().splitlines(keepends=True)
        log.write_bytes(first + last[:kept])
        with gateway(upstream, log=log) as url:
            assert graded(url) == 200
        rows = 2 + (kept == -1)
        with gateway(upstream, log=log) as url:
            assert metric(url, "catto_feedback_answers") == rows
    done = run(capsys, "measure", log, "--json")
    assert (done.code, done.json["rows"]) == (0, rows)


def test_a_last_line_of_another_file_is_left_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "answers.jsonl"
    log.write_text("my notes")
    with OpenAIServer(always("B")) as upstream, gateway(upstream, log=log) as url:
        assert graded(url) == 200
    notes, row = log.read_text().splitlines()
    assert (notes, json.loads(row)["label"]) == ("my notes", "B")


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", "", True), ("0.0.0.0", "k", False), ("::1", "", False)]
)
def test_an_open_address_without_a_key_is_warned_of(
    host: str, key: str, warned: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CATTO_API_KEY", key)
    with OpenAIServer(lambda _: ok(chat("B"))) as upstream:  # without log-probabilities: refused before it listens
        done = run(capsys, "serve", "--upstream", upstream.url, "--model", "m", "--task", "mmlu", "--host", host)
    assert done.code == 2
    assert (f"everyone who reaches {host} can use the upstream" in done.err) == warned


def test_a_stream_in_flight_outlives_the_signal_to_stop() -> None:
    slow, port = threading.Event(), free_port()

    def respond(seen: Seen) -> Reply:
        if seen.body["messages"][0]["content"] == "Which?":
            slow.set()
            return ok(stating("B"), delay=1.0)
        return ok(stating("B"))

    with OpenAIServer(respond) as upstream:
        upstream.models = ["tiny-answerer"]
        process = serving("--upstream", upstream.url, "--port", str(port))
        url, heard = f"http://127.0.0.1:{port}", []

        def ready() -> bool:
            assert process.poll() is None, process.communicate()
            try:
                return get(url, "/health")[1]["model"] == "tiny-answerer"  # the only one that the upstream lists
            except OSError:
                return False

        until(ready, 60)
        asking = threading.Thread(target=lambda: heard.extend(ask(url, stream=True)))
        asking.start()
        assert slow.wait(30)
        process.send_signal(signal.SIGTERM)
        asking.join()
        process.communicate(timeout=30)
    assert heard[-1].catto["label"] == "B"
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ([], "the server does not list its models: 404: no such path; name one"),
        (["a", "b"], "the server lists a, b; name one"),
    ],
)
def test_an_upstream_without_one_model_is_refused(
    models: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with OpenAIServer(always("B")) as upstream:
        upstream.models = models
        done = run(capsys, "serve", "--upstream", upstream.url, "--task", "mmlu")
    assert (done.code, said in done.err) == (2, True)


@pytest.mark.parametrize(("models", "warned"), [(("other",), True), (("m", "other"), False), ((), False)])
def test_a_threshold_of_another_model_is_warned_of(
    models: tuple[str, ...], warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr("catto.serve.gateway.run_gateway", lambda *_: None)
    place = tmp_path / "t.json"
    place.write_text(threshold(0.5).model_copy(update={"models": models}).model_dump_json())
    with OpenAIServer(always("B")) as upstream:
        options = ("--upstream", upstream.url, "--model", "m", "--port", "0", "--task", "mmlu", "--threshold", place)
        done = run(capsys, "serve", *options)
    assert done.code == 0
    assert ("no answer of m has the guarantee" in done.err) == warned


@pytest.mark.parametrize(("on", "requests"), [("labels", 2), ("confidence", 1), (None, 1)])
def test_other_labels_are_asked_for_only_where_the_calibrator_reads_them(on: Any, requests: int) -> None:
    async def answered(url: str) -> GatewayAnswer:
        engine = ServerEngine(url, MODEL, top_logprobs=20)
        engine.max_candidates, engine.can_continue = 1000, True  # as `probe` finds with llama.cpp
        fitted = None if on is None else Fitted(Temperature(tau=1.0), on)
        options = tuple(Option(label=label, text="") for label in "ABCD")
        question = ServedQuestion("q", options)
        chat = (Message(role="user", content="Which?"),)
        async with engine.make_client() as client:
            answerer = Answerer(engine, client, fitted, None, "")
            return await answerer.answer(AnswerRequest(question, chat, ONE, 64, 0))

    with OpenAIServer(always("B")) as upstream:
        found = asyncio.run(answered(upstream.url))
    assert (found.catto["label"], len(upstream.seen)) == ("B", requests)


@pytest.mark.parametrize("arguments", [("serve", "--upstream", "http://127.0.0.1:9/v1", "--task", "mmlu"), ("select",)])
def test_a_calibrator_without_its_manifest_is_to_be_copied_with_it(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither command has the option --on."""
    tau, rows = tmp_path / "tau.json", tmp_path / "rows.jsonl"
    tau.write_text(Temperature(tau=2.0).model_dump_json())
    write_records(rows, [prediction("q", 0, "A", 0.5)])
    if arguments == ("select",):
        arguments = ("select", str(rows), "--k", "1", "--rule", "most confident", "--out", str(tmp_path / "o.jsonl"))
    done = run(capsys, *arguments, "--calibrator", tau)
    missing = "missing: copy it next to the calibrator too (or use calibrate apply --on)"
    assert (done.code, done.err) == (2, f"catto: {tau}.manifest.json: {missing}\n")
