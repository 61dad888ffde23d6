"""The gateway through the official client, on a real uvicorn, in front of a real upstream."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from needs import REASONS

pytest.importorskip("fastapi", reason=REASONS["serve"])

from command import run
from gateway_world import FOUR, ONE, always, ask, client, gateway, stating, threshold, until
from openai_server import OpenAIServer, Reply, Seen, chat, error, ok

from catto.calibrate import Fitted
from catto.metrics.calibrators import Temperature
from catto.metrics.selection import RULES
from catto.model_calibration import ModelCalibration, store_calibration
from catto.serve.gateway import Limits

P = math.exp(-0.25)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def post(url: str, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any, dict[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    return send(request)


def get(url: str, path: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    return send(urllib.request.Request(url + path, headers=headers))


def send(request: urllib.request.Request) -> tuple[int, Any, dict[str, str]]:
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, content, headers = reply.status, reply.read(), dict(reply.headers)
    except urllib.error.HTTPError as problem:
        status, content, headers = problem.code, problem.read(), dict(problem.headers)
    is_json = headers.get("content-type", "").startswith("application/json")
    return status, json.loads(content) if is_json else content.decode(), headers


def metric(url: str, name: str) -> float:
    lines = dict(line.rsplit(" ", 1) for line in get(url, "/metrics")[1].splitlines() if line[0] != "#")
    return float(lines.get(name, "0"))


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny-answerer", "messages": [{"role": "user", "content": "Which?"}], **more}


def test_an_ordinary_completion_with_the_catto_object() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        reply = ask(url)
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == "<answer>\nB\n</answer>"
    assert (reply.choices[0].finish_reason, reply.model) == ("stop", "tiny-answerer")
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (7, 10)
    found = reply.catto
    assert reply.choices[0].logprobs.catto == found
    assert found.pop("confidence") == found.pop("confidence_raw") == pytest.approx(P, abs=1e-12)
    assert found == {
        "label": "B",
        "k": 1,
        "votes": 1,
        "rule": "most confident",
        "calibrator": None,
        "threshold": None,
        "guarantee": None,
        "abstained": False,
        "source": "free",
        "reason": None,
    }
    sent = upstream.seen[0].body
    assert sent["messages"] == [{"role": "user", "content": "Which?"}]
    assert (sent["logprobs"], sent["top_logprobs"], sent["temperature"]) == (True, 20, 0.0)


def test_a_stream_ends_with_the_catto_object() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        chunks = ask(url, stream=True)
        counted = ask(url, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "<answer>\nB\n</answer>"
    assert len(chunks) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].catto["label"] == "B"
    assert chunks[-1].choices[0].logprobs.catto == chunks[-1].catto
    assert [chunk.choices[0].logprobs for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert not any(hasattr(chunk, "catto") for chunk in chunks[:-1])
    assert (counted[-1].usage.prompt_tokens, counted[-1].catto["label"]) == (7, "B")


def test_below_the_threshold_it_abstains_and_says_so() -> None:
    with OpenAIServer(always("B")) as upstream:
        with gateway(upstream, limit=threshold(P + 0.01)) as url:
            reply, chunks = ask(url), ask(url, stream=True)
        with gateway(upstream, limit=threshold(P - 0.01)) as url:
            answered = ask(url)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("I do not know.", "stop")
    assert (reply.catto["abstained"], reply.catto["label"], reply.catto["threshold"]) == (True, "B", P + 0.01)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I do not know."
    assert chunks[-1].catto["abstained"]
    assert not answered.catto["abstained"]
    assert answered.catto["guarantee"] == {"risk": 0.05, "confidence_level": 0.95, "coverage": 0.7}


@pytest.mark.parametrize(
    ("wishes", "more", "kept"),
    [
        ({}, {}, True),
        ({"k": 4, "rule": "most confident"}, {"temperature": 1.0}, True),
        ({"k": 2}, {}, False),
        ({"rule": "majority vote"}, {}, False),
        ({}, {"temperature": 0.5}, False),
    ],
)
def test_a_request_that_changes_how_answers_are_made_has_no_guarantee(
    wishes: dict[str, Any], more: dict[str, Any], kept: bool
) -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream, protocol=FOUR, limit=threshold(0.5, FOUR)) as url:
        found = ask(url, wishes=wishes, **more).catto
    assert (found["guarantee"] is not None) == kept
    assert found["threshold"] == 0.5


def test_answers_of_another_protocol_than_the_calibrators_abstain() -> None:
    """Their confidence is not calibrated, so it cannot be compared with a threshold of calibrated ones."""
    fitted = Fitted(Temperature(tau=4.0), "confidence", protocol=ONE)
    limit = threshold(0.5, fitted=fitted)
    with OpenAIServer(always("B", -0.02)) as upstream, gateway(upstream, fitted=fitted, limit=limit) as url:
        assert not ask(url).catto["abstained"]
        other = ask(url, temperature=0.2).catto
    assert (other["confidence"], other["abstained"], other["guarantee"]) == (None, True, None)


def test_a_response_that_was_cut_has_no_guarantee() -> None:
    reply = stating("B")
    reply["choices"][0]["message"]["content"] = "<answer>\nB\n"
    reply["choices"][0]["finish_reason"] = "length"
    with OpenAIServer(lambda _: ok(reply)) as upstream, gateway(upstream, limit=threshold(0.5)) as url:
        cut = ask(url)
    found = cut.catto
    assert (found["label"], found["guarantee"], found["reason"]) == ("B", None, "a response was cut at max_tokens")
    assert cut.choices[0].finish_reason == "length"


def test_a_whole_answer_is_not_cut_by_what_the_model_wrote_after_it() -> None:
    reply = stating("B")
    choice = reply["choices"][0]
    choice["message"]["content"] += "\nThe next question"
    choice["finish_reason"] = "length"
    choice["logprobs"]["content"].append({"token": "\nThe next question", "logprob": -1.0, "top_logprobs": []})
    with OpenAIServer(lambda _: ok(reply)) as upstream, gateway(upstream, limit=threshold(0.5)) as url:
        whole = ask(url)
    assert whole.choices[0].message.content == "<answer>\nB\n</answer>"
    assert whole.choices[0].finish_reason == "stop"
    assert (whole.catto["guarantee"] is not None, whole.catto["reason"]) == (True, None)


@pytest.mark.parametrize(
    ("models", "names", "kept"),
    [
        (("tiny-answerer",), ("tiny-answerer",), True),
        (("tiny-answerer-2026",), ("tiny-answerer-2026",), True),  # the server's own name for what was asked
        (("tiny-answerer", "other"), ("other", "tiny-answerer"), True),
        (("other",), ("tiny-answerer",), False),
        (("tiny-answerer",), ("cheaper",), False),
        (("tiny-answerer",), ("tiny-answerer", "tiny-answerer", "tiny-answerer", "cheaper"), False),
        ((), ("tiny-answerer",), True),  # a threshold that names no model is of the one that is served
        ((), ("cheaper",), False),
    ],
)
def test_an_answer_of_another_model_than_the_thresholds_has_no_guarantee(
    models: tuple[str, ...], names: tuple[str, ...], kept: bool
) -> None:
    lock, turns = threading.Lock(), iter(range(100))

    def respond(_: Seen) -> Reply:
        with lock:
            turn = next(turns)
        return ok({**stating("B"), "model": names[turn % len(names)]})

    limit = threshold(0.5, FOUR).model_copy(update={"models": models})
    with OpenAIServer(respond) as upstream, gateway(upstream, protocol=FOUR, limit=limit) as url:
        found = ask(url).catto
    assert (found["guarantee"] is not None) == kept
    assert found["reason"] == (None if kept else "the threshold was fitted on answers from a different model")
    assert not found["abstained"]


def test_a_model_that_only_continues_an_answer_counts_too() -> None:
    def respond(seen: Seen) -> Reply:
        if not seen.body.get("continue_final_message"):
            return ok(chat("hmm", model="tiny-answerer"))
        reply = stating("C")
        reply["choices"][0]["logprobs"]["content"] = [{"token": "C", "logprob": -0.1, "top_logprobs": []}]
        return ok({**reply, "model": "cheaper"})

    with OpenAIServer(respond) as upstream, gateway(upstream, limit=threshold(0.5)) as url:
        found = ask(url).catto
    assert (found["label"], found["source"], found["guarantee"]) == ("C", "fallback", None)


def test_a_second_turn_takes_back_what_the_gateway_sent() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        first = ask(url).choices[0].message
        user = {"role": "user", "content": "Sure?"}
        again = ask(url, messages=[user, first.model_dump(), {**user, "name": None}])
    assert again.catto["label"] == "B"


@pytest.mark.parametrize("rule", ["mean log-probability", "self-certainty", "lowest-group confidence"])
def test_a_rule_that_reads_tokens_is_refused_where_no_sample_has_any(rule: str) -> None:
    cut = chat(None, reasoning_content="So")
    cut["choices"][0]["finish_reason"] = "length"
    with OpenAIServer(lambda _: ok(cut)) as upstream, gateway(upstream, continues=False) as url:
        status, reply, _ = post(url, body(catto={"rule": rule, "k": 2}, temperature=1.0))
    assert status == 400
    assert reply["error"]["message"].startswith(f"{rule} needs ")


def test_what_clients_send_without_asking_for_anything_is_accepted() -> None:
    parts = [{"type": "text", "text": "Which "}, {"type": "text", "text": "one?"}]
    neutral: dict[str, Any] = {"top_p": 1.0, "presence_penalty": 0, "temperature": None, "catto": None, "tools": []}
    neutral |= {"tool_choice": "none", "stop": [], "logit_bias": {}, "metadata": {}, "top_logprobs": 0}
    neutral |= {"response_format": {"type": "text"}}
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        status, reply, _ = post(url, body(messages=messages, **neutral))
    assert (status, reply["catto"]["label"]) == (200, "B")
    asked = upstream.seen[-1].body["messages"]
    assert asked[-1]["content"] == "Which one?"
    assert [one["role"] for one in asked if "Be brief." in one["content"]] == ["system"]


def by_turn(*labels: str, logprobs: tuple[float, ...] = ()) -> Any:
    """An upstream whose n-th reply has the n-th label."""
    lock, count = threading.Lock(), iter(range(10**6))

    def respond(_: Seen) -> Reply:
        with lock:
            turn = next(count)
        return ok(stating(labels[turn % len(labels)], logprobs[turn % len(labels)] if logprobs else -0.25))

    return respond


def test_k_samples_have_seeds_of_their_own_and_one_is_chosen() -> None:
    values = (-0.7, -0.2, -0.9, -0.8)
    with OpenAIServer(by_turn(*"ABAA", logprobs=values)) as upstream, gateway(upstream, protocol=FOUR) as url:
        reply = ask(url, wishes={"return_candidates": True}, seed=3)
        again = len(upstream.seen)
        vote = ask(url, wishes={"rule": "majority vote"}, seed=3).catto
    assert (reply.catto["label"], reply.catto["k"], reply.catto["votes"]) == ("B", 4, 1)
    assert reply.catto["confidence"] == pytest.approx(math.exp(-0.2))
    assert reply.choices[0].message.content == "<answer>\nB\n</answer>"
    assert reply.usage.prompt_tokens == 28
    assert sorted(one["label"] for one in reply.catto["candidates"]) == list("AAAB")
    assert (vote["label"], vote["votes"], vote["confidence"]) == ("A", 3, 0.75)
    seeds = [seen.body["seed"] for seen in upstream.seen]
    assert len(set(seeds[:again])) == 4
    assert sorted(seeds[:again]) == sorted(seeds[again:])
    assert {seen.body["temperature"] for seen in upstream.seen} == {1.0}


def test_adaptive_k_asks_no_more_than_it_needs() -> None:
    five = FOUR.model_copy(update={"k": 5, "rule": "majority vote", "stop": 1.0})
    with OpenAIServer(always("B")) as upstream, gateway(upstream, protocol=five) as url:
        found = ask(url).catto
        assert (len(upstream.seen), found["k"], found["votes"], found["label"]) == (3, 3, 3, "B")
    with OpenAIServer(by_turn(*"ABABA")) as upstream, gateway(upstream, protocol=five) as url:
        found = ask(url).catto
        assert (len(upstream.seen), found["k"], found["votes"], found["label"]) == (5, 5, 3, "A")
    best = FOUR.model_copy(update={"stop": 0.5})
    with OpenAIServer(by_turn(*"ABCD", logprobs=(-2.0, -0.1, -1.0, -1.0))) as upstream:
        with gateway(upstream, protocol=best) as url:
            found = ask(url).catto
        assert (len(upstream.seen), found["k"], found["label"]) == (2, 2, "B")


def test_calibrators_of_samples_of_labels_and_of_final_answers() -> None:
    tau = Temperature(tau=2.0)
    sigmoid = 1 / (1 + math.exp(-math.log(P / (1 - P)) / 2))
    known = {"A": -2.0, "C": -3.0, "D": -4.0}
    softmax = math.exp(-0.125) / sum(math.exp(value / 2) for value in (-0.25, -2.0, -3.0, -4.0))

    def respond(_: Seen) -> Reply:
        return ok(stating("B", -0.25, known))

    with OpenAIServer(respond) as upstream:
        with gateway(upstream, fitted=Fitted(tau, "confidence", rows=300)) as url:
            found = ask(url).catto
        assert found["confidence"] == pytest.approx(sigmoid, abs=1e-12)
        assert (found["confidence_raw"], found["calibrator"]) == (pytest.approx(P), {"name": "temperature", "n": 300})
        with gateway(upstream, fitted=Fitted(tau, "labels")) as url:
            assert ask(url).catto["confidence"] == pytest.approx(softmax, abs=1e-12)
        with gateway(upstream, fitted=Fitted(tau, "confidence", protocol=ONE)) as url:
            assert ask(url).catto["confidence"] == pytest.approx(sigmoid, abs=1e-12)
            other = ask(url, wishes={"k": 2}, temperature=1.0).catto
        assert (other["calibrator"], other["confidence"], other["confidence_raw"]) == (None, None, pytest.approx(P))
        assert "a different rule, k, temperature" in other["reason"]


def test_a_confidence_that_cannot_be_calibrated_is_null_and_abstains() -> None:
    fitted = Fitted(Temperature(tau=2.0), "labels")
    with OpenAIServer(always("B")) as upstream, gateway(upstream, fitted=fitted, limit=threshold(0.0)) as url:
        found = ask(url).catto
    assert (found["confidence"], found["abstained"]) == (None, True)
    assert found["confidence_raw"] == pytest.approx(P)
    assert "no label_logprobs" in found["reason"]


def test_labels_and_texts_of_a_request() -> None:
    with OpenAIServer(always("yes")) as upstream, gateway(upstream) as url:
        found = ask(url, wishes={"options": {"yes": "", "no": ""}}).catto
        assert (found["label"], found["confidence"]) == ("yes", pytest.approx(P))
        with pytest.raises(openai.BadRequestError, match="'yes' and 'yesterday' begin with the same token"):
            ask(url, wishes={"options": {"yes": "", "yesterday": ""}})


NOT_SURE = {"yes": "", "no": "", "not sure": ""}


@pytest.mark.parametrize("turns", [("no", "no", "yes", "no"), ("no",)])
def test_a_majority_counts_labels_whose_probability_cannot_be_read(turns: tuple[str, ...]) -> None:
    """`no` may begin `not sure`: its probability is not known, and its vote is."""
    wishes = {"k": 4, "rule": "majority vote", "options": NOT_SURE, "return_candidates": True}
    limit = threshold(0.5, FOUR.model_copy(update={"rule": "majority vote"}))
    with OpenAIServer(by_turn(*turns)) as upstream, gateway(upstream, protocol=FOUR, limit=limit) as url:
        reply = ask(url, wishes=wishes)
    found, votes = reply.catto, 4 * turns.count("no") // len(turns)
    assert reply.choices[0].message.content == "<answer>\nno\n</answer>"
    assert (found["label"], found["votes"], found["confidence"], found["source"]) == ("no", votes, votes / 4, "free")
    assert (found["confidence_raw"], found["guarantee"]) == (None, None)
    assert "'no' and 'not sure' begin with the same token" in found["reason"]
    for one in found["candidates"]:
        known = None if one["label"] == "no" else pytest.approx(P)
        assert (one["confidence"], one["confidence_raw"]) == (known, known)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "majority vote"])
def test_other_rules_refuse_where_one_label_has_no_probability(rule: str) -> None:
    """A choice among the readable samples would be `yes`, which one of four says."""
    with OpenAIServer(by_turn("no", "no", "yes", "no")) as upstream, gateway(upstream, protocol=FOUR) as url:
        status, reply, _ = post(url, body(catto={"rule": rule, "options": NOT_SURE}))
    assert status == 400
    assert reply["error"]["message"].startswith("no confidence can be read: labels 'no' and 'not sure' begin")


def test_an_unanswered_response_is_continued_where_the_upstream_can() -> None:
    def respond(seen: Seen) -> Reply:
        if seen.body.get("continue_final_message"):
            reply = stating("C")
            reply["choices"][0]["logprobs"]["content"] = [
                {"token": "C", "logprob": -0.5, "top_logprobs": [{"token": "A", "logprob": -1.5}]}
            ]
            return ok(reply)
        reply = chat("hmm", model="m")
        reply["choices"][0]["logprobs"] = {"content": [{"token": "hmm", "logprob": -1.0, "top_logprobs": []}]}
        return ok(reply)

    with OpenAIServer(respond) as upstream:
        with gateway(upstream) as url:
            found = ask(url).catto
        assert (found["label"], found["source"]) == ("C", "fallback")
        assert found["confidence"] == pytest.approx(math.exp(-0.5))
        assert upstream.seen[1].body["messages"][-1] == {"role": "assistant", "content": "hmm\n<answer>\n"}
        with gateway(upstream, continues=False, limit=threshold(0.0)) as url:
            found = ask(url).catto
        assert (found["label"], found["confidence"], found["abstained"]) == (None, None, True)
        assert "states no label" in found["reason"]


def says_another_option(seen: Seen) -> Reply:
    """A response that names none of the labels; its continuation gives A."""
    if seen.body.get("continue_final_message"):
        reply = chat("A", model="tiny-answerer")
        reply["choices"][0]["logprobs"] = {"content": [{"token": "A", "logprob": -0.1, "top_logprobs": []}]}
        return ok(reply)
    reply = chat("E) Bern", model="tiny-answerer")
    reply["choices"][0]["logprobs"] = {"content": [{"token": "E) Bern", "logprob": -1.0, "top_logprobs": []}]}
    return ok(reply)


@pytest.mark.parametrize("options", [None, {"A": "Paris", "B": "Rome"}, {"A": "Paris", "Z": "Rome"}])
def test_a_reply_never_contradicts_its_label(options: dict[str, str] | None) -> None:
    """The text is the label where the response does not state it, in a completion, a stream and the candidates."""
    wishes = {"return_candidates": True, **({"options": options} if options else {})}
    with OpenAIServer(says_another_option) as upstream, gateway(upstream, limit=threshold(0.5)) as url:
        reply = ask(url, wishes=wishes)
        chunks = ask(url, wishes=wishes, stream=True)
    assert (reply.catto["label"], reply.catto["source"], reply.catto["abstained"]) == ("A", "fallback", False)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("A", "stop")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "A"
    (candidate,) = reply.catto["candidates"]
    assert (candidate["text"], candidate["response"]) == ("A", "E) Bern")
    for found in (reply.catto, chunks[-1].catto):
        assert "the response states none of the labels" in found["reason"]
        # The labels of the task are A to D: of questions with Z the threshold promises nothing.
        assert (found["guarantee"] is None) == ("Z" in (options or ()))
        assert ("labels that the task does not have" in found["reason"]) == ("Z" in (options or ()))


def test_a_label_that_the_response_states_leaves_the_text_alone() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        reply = ask(url, wishes={"return_candidates": True})
    assert reply.choices[0].message.content == "<answer>\nB\n</answer>"
    (candidate,) = reply.catto["candidates"]
    assert (candidate["text"], candidate["response"]) == ("<answer>\nB\n</answer>", None)
    assert reply.catto["reason"] is None


def test_without_a_label_no_confidence_is_stated() -> None:
    with OpenAIServer(says_another_option) as upstream, gateway(upstream, continues=False) as url:
        reply = ask(url, wishes={"return_candidates": True})
    assert reply.choices[0].message.content == "E) Bern"
    for found in (reply.catto, reply.catto["candidates"][0]):
        assert (found["label"], found["confidence"], found["confidence_raw"]) == (None, None, None)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools: this field is not supported"),
        ({"functions": []}, "functions: this field is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format: this field is not supported"),
        ({"top_p": 0.9}, "top_p: this field is not supported"),
        ({"logprobs": True}, "logprobs: this field is not supported"),
        ({"n": 2}, "n:"),
        ({"temperature": "warm"}, "temperature:"),
        ({"temperature": 3}, "temperature:"),
        ({"messages": []}, "messages:"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role:"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content:"),
        ({"catto": {"depth": 3}}, "catto.depth: this field is not supported"),
        ({"catto": {"k": 17}, "temperature": 1}, "catto.k: at most 16"),
        ({"catto": {"k": 0}}, "catto.k:"),
        ({"catto": {"k": 2}}, "2 samples at temperature 0 are the same"),
        ({"catto": {"rule": "best"}}, "catto.rule: expected one of most confident"),
        ({"catto": {"options": {"A": "only"}}}, "catto.options:"),
        ({"catto": {"options": {"": "", "B": ""}}}, "catto.options"),
        ({"max_tokens": 5000}, "max_tokens: at most 4096"),
    ],
)
def test_what_cannot_be_served_is_a_clear_400(more: dict[str, Any], said: str) -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        status, reply, _ = post(url, body(**more))
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert said in reply["error"]["message"]
    assert not upstream.seen


def test_other_refusals() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream) as url:
        status, reply, _ = post(url, body(model="gpt-9"))
        assert (status, reply["error"]["code"]) == (404, "not_found")
        for broken in (b"{", b"\xff\xfe", b"", b"[]", b"model=tiny-answerer"):
            status, reply, _ = post(url, broken)
            assert status == 400
            assert reply["error"]["message"].startswith("expected a JSON object, with Content-Type: application/json")
        asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body()).encode())  # as curl -d sends it
        assert "with Content-Type: application/json" in send(asked)[1]["error"]["message"]
        assert post(url, b"[" * 200_000)[0] == 400
        assert post(url, json.dumps(body())[:-1].encode() + b', "catto": ' + b'{"k": ' * 100_000)[0] == 400
        assert get(url, "/nowhere")[0] == 404
        status, _, headers = get(url, "/v1/chat/completions")
        assert (status, headers["allow"]) == (405, "POST")
        assert post(url, {"id": "no", "correct": True}, "/v1/feedback")[0] == 404
        with client(url) as asking:
            assert [one.id for one in asking.models.list()] == ["tiny-answerer"]
        assert get(url, "/health")[1] == {"status": "ok", "model": "tiny-answerer"}
        assert get(url, "/openapi.json")[1]["info"]["title"] == "catto serve"
    assert not upstream.seen


@pytest.mark.parametrize(
    ("reply", "status", "said"),
    [
        (error(500, "boom"), 502, "boom"),
        (error(400, "the prompt has 9,000 tokens"), 400, "9,000 tokens"),
        (error(401), 502, "was refused|is not set"),
        (error(429, headers=(("Retry-After", "0.01"),)), 503, "429"),
        (error(503), 503, "503"),
        (ok("<html>"), 502, "unusable"),
        (ok(chat("<answer>\nB\n</answer>")), 400, "log-probabilities do not reach"),
        (ok(stating("B"), cut=True), 502, "connection broke"),
        (ok(stating("B"), delay=3.0), 504, "no whole reply within 0.5 s"),
    ],
)
def test_faults_of_the_upstream_have_statuses_of_their_own(reply: Reply, status: int, said: str) -> None:
    deadline = 0.5 if reply.delay else 30.0
    raising = pytest.raises(openai.APIStatusError, match=said)
    with OpenAIServer(lambda _: reply) as upstream, gateway(upstream, deadline=deadline) as url, raising as found:
        ask(url, "a secret question of many words")
    assert found.value.status_code == status
    assert "secret question" not in str(found.value)


@pytest.mark.parametrize("value", [3.0, 1e300, math.nan, "-0.25", True])
def test_an_impossible_log_probability_of_the_upstream_is_a_502(value: Any) -> None:
    """It is neither a confidence of 1, which passes every threshold, nor a failure of the gateway."""
    with OpenAIServer(always("B", value)) as upstream, gateway(upstream, limit=threshold(0.9)) as url:
        status, reply, _ = post(url, body())
    assert (status, reply["error"]["type"]) == (502, "upstream_error")
    assert "logprob: expected a " in reply["error"]["message"]


def test_one_failed_sample_fails_the_request_and_cancels_the_others() -> None:
    def respond(seen: Seen) -> Reply:
        with lock:
            turn = next(turns)
        return error(400, "no") if turn == 0 else Reply(drip=0.05)

    lock, turns = threading.Lock(), iter(range(100))
    with OpenAIServer(respond) as upstream, gateway(upstream, protocol=FOUR) as url:
        started = time.monotonic()
        with pytest.raises(openai.BadRequestError):
            ask(url)
        assert time.monotonic() - started < 20  # the others would go on until the deadline of 30 s


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_a_port_that_is_taken_is_refused_before_anything_is_announced(capsys: pytest.CaptureFixture[str]) -> None:
    with OpenAIServer(always("B")) as upstream, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(capsys, "serve", "--upstream", upstream.url, "--model", "m", "--task", "mmlu", "--port", str(port))
    assert (done.code, "Serving" in done.out + done.err) == (2, False)
    assert f"catto: --host 127.0.0.1 --port {port}: " in done.err
    assert "in use" in done.err


def upstream_process(port: int, label: str) -> subprocess.Popen[bytes]:
    """An upstream that can be killed with its connections."""
    code = (
        "import time\nfrom gateway_world import always\nfrom openai_server import OpenAIServer\n"
        f"with OpenAIServer(always({label!r}), {port}):\n    time.sleep(120)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})


def test_an_upstream_that_is_killed_gives_503_and_comes_back() -> None:
    port = free_port()
    first = upstream_process(port, "B")
    with gateway(f"http://127.0.0.1:{port}/v1", max_retries=0) as url:
        try:
            until(lambda: post(url, body())[0] == 200)
            assert ask(url).catto["label"] == "B"
        finally:
            first.kill()
            first.wait()
        statuses = [post(url, body())[0] for _ in range(5)]
        assert set(statuses) <= {502, 503}
        assert statuses[-1] == 503
        second = upstream_process(port, "C")
        try:
            until(lambda: post(url, body())[0] == 200)
            assert ask(url).catto["label"] == "C"
        finally:
            second.kill()
            second.wait()


def serving(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`catto serve` as a process of its own."""
    command = [sys.executable, "-m", "catto", "serve", "--task", "mmlu", *arguments]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_command_serves_until_it_is_asked_to_stop(tmp_path: Path) -> None:
    """What is in flight when the signal comes is still answered."""
    slow = threading.Event()

    def respond(seen: Seen) -> Reply:
        if seen.body["messages"][0]["content"] == "slowly":
            slow.set()
            return ok(stating("B"), delay=2.0)
        return ok(stating("B"))

    port = free_port()
    with OpenAIServer(respond) as upstream:
        arguments = ("--upstream", upstream.url, "--model", "tiny-answerer", "--port", str(port))
        process = serving(*arguments, "--log", str(tmp_path / "a.jsonl"), CATTO_API_KEY="k-1")
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, process.communicate()
            try:
                return get(url, "/health")[0] == 200
            except OSError:
                return False

        until(ready, 60)
        assert post(url, body())[0] == 401
        found: list[int] = []
        waiting = {**body(), "messages": [{"role": "user", "content": "slowly"}]}
        asking = threading.Thread(target=lambda: found.append(post(url, waiting, Authorization="Bearer k-1")[0]))
        asking.start()
        assert slow.wait(30)
        process.send_signal(signal.SIGTERM)
        asking.join()
        said, problems = process.communicate(timeout=30)
    assert found == [200]
    assert f"Serving tiny-answerer from {upstream.url}" in said
    assert "k-1" not in said + problems


@pytest.mark.slow
def test_a_model_that_is_named_after_its_folder_brings_its_calibrator(tmp_path: Path) -> None:
    """vLLM names a model after the folder it was loaded from."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    fitted = Fitted(Temperature(tau=2.0), rows=300)
    store_calibration(folder, ModelCalibration(fitted, threshold(0.5, ONE, fitted)), fitted_on="fit.jsonl")
    port = free_port()
    with OpenAIServer(always("B")) as upstream:
        process = serving("--upstream", upstream.url, "--model", str(folder), "--port", str(port))
        url = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or is_serving(url), 60)
        status, reply, _ = post(url, {**body(), "model": "my-model"})
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    assert status == 200
    assert reply["catto"]["calibrator"] == {"name": "temperature", "n": 300}
    assert reply["catto"]["threshold"] == 0.5
    assert reply["catto"]["confidence"] == pytest.approx(fitted.calibrator.apply([P])[0])  # type: ignore[union-attr]
    assert f"Using the calibrator of {folder}." in said


def is_serving(url: str) -> bool:
    try:
        return get(url, "/health")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    ("respond", "arguments", "said"),
    [
        (lambda _: ok(chat("B")), (), "no log-probabilities: the server returned none"),
        (lambda _: error(401), (), "OPENAI_API_KEY is not set"),
        (always("B"), ("--rule", "best"), "--rule: best is not one of most confident"),
        (always("B"), ("--k", "4"), "--k 4 at temperature 0"),
        (always("B"), ("--task", "mmul"), "--task: mmul is not one of"),
        (always("B"), ("--task", "none.yaml"), "none.yaml"),
        (always("B"), ("--calibrator", "none.json"), "none.json"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    respond: Any, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with OpenAIServer(respond) as upstream:
        options = ("--upstream", upstream.url, "--model", "m", "--task", "mmlu", *arguments)
        done = run(capsys, "serve", *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert len(done.err.splitlines()[-1]) < 300


def test_a_threshold_of_another_calibrator_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "t.json"
    place.write_text(threshold(0.5, fitted=Fitted(Temperature(tau=2.0), "confidence")).model_dump_json())
    done = run(capsys, "serve", "--upstream", "http://127.0.0.1:9/v1", "--task", "mmlu", "--threshold", place)
    assert done.code == 2
    assert "--calibrator" in done.err


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = run(capsys, "serve", "--upstream", "http://127.0.0.1:9/v1", "--task", "mmlu")
    assert (done.code, done.err) == (2, "catto: catto serve needs fastapi: pip install 'catto[serve]'\n")


def test_the_key_is_compared_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "catto.serve")
    limits = Limits(key="right-key")
    with OpenAIServer(always("B")) as upstream, gateway(upstream, limits=limits) as url:
        for key in ("wrong-key", "right-key-and-more", ""):
            status, reply, _ = post(url, body(), Authorization=f"Bearer {key}")
            assert (status, reply["error"]["code"]) == (401, "invalid_api_key")
        assert post(url, body())[0] == 401
        assert get(url, "/v1/models")[0] == 401
        assert get(url, "/health")[0] == 200
        assert post(url, body(), Authorization="Basic right-key")[0] == 401
        assert not upstream.seen
        assert post(url, body(), Authorization="bearer right-key")[0] == 200  # the scheme has no case
        status, _, headers = post(url, body(), Authorization="Bearer right-key", **{"X-Request-Id": "mine.1"})
        assert (status, headers["x-request-id"]) == (200, "mine.1")
        assert post(url, body(), Authorization="Bearer right-key", **{"X-Request-Id": "a b"})[2][
            "x-request-id"
        ].startswith("chatcmpl-")
    assert "mine.1 /v1/chat/completions 200" in caplog.text
    assert not [word for word in ("right-key", "wrong-key", "Which?", "<answer>") if word in caplog.text]
    assert "authorization" not in {
        name for name in upstream.seen[0].headers if "right" in upstream.seen[0].headers[name]
    }


def test_a_full_gateway_replies_429_at_once() -> None:
    release = threading.Event()

    def respond(_: Seen) -> Reply:
        release.wait(30)
        return ok(stating("B"))

    statuses: list[int] = []
    with OpenAIServer(respond) as upstream, gateway(upstream, limits=Limits(concurrency=2)) as url:
        threads = [threading.Thread(target=lambda: statuses.append(post(url, body())[0])) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: metric(url, "catto_in_flight") == 2)
        status, reply, headers = post(url, body())
        assert (status, reply["error"]["type"], headers["retry-after"]) == (429, "rate_limit_error", "1")
        until(lambda: len(upstream.seen) == 2)
        release.set()
        for thread in threads:
            thread.join()
        assert post(url, body())[0] == 200
    assert statuses == [200] * 2


def test_a_client_that_hangs_up_cancels_its_upstream_requests() -> None:
    with OpenAIServer(lambda _: Reply(drip=0.05)) as upstream, gateway(upstream, protocol=FOUR) as url:
        data = json.dumps(body()).encode()
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as line:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
            line.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
            until(lambda: upstream.flying == 0 and len(upstream.seen) == 4)
            assert metric(url, "catto_in_flight") == 1
        until(lambda: metric(url, "catto_in_flight") == 0)


def test_bodies_that_are_too_long_are_refused() -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream, limits=Limits(max_bytes=2000)) as url:
        port = int(url.rsplit(":", 1)[1])

        def talk(*parts: bytes) -> bytes:
            heard = b""
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.settimeout(30)  # a connection that is left open fails here
                try:
                    for part in parts:
                        line.sendall(part)
                    while block := line.recv(4096):
                        heard += block
                except (ConnectionError, BrokenPipeError):
                    pass
            return heard

        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        huge = talk(head + b"Content-Length: 100000000\r\n\r\n" + b"x" * 100_000)
        assert huge.startswith(b"HTTP/1.1 413")
        chunked = talk(head + b"Transfer-Encoding: chunked\r\n\r\n", *[b"3e8\r\n" + b"x" * 1000 + b"\r\n"] * 5)
        assert chunked.startswith(b"HTTP/1.1 413")
        assert post(url, body())[0] == 200
    assert len(upstream.seen) == 1


def test_a_log_that_cannot_be_written_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with OpenAIServer(always("B")) as upstream, gateway(upstream, log=tmp_path / "answers.jsonl") as url:
        (tmp_path / "answers.pending.jsonl").mkdir()
        assert ask(url).catto["label"] == "B"
    assert "answers.pending.jsonl: Is a directory" in caplog.text


def test_feedback_completes_the_log_which_measure_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "answers.jsonl"
    with OpenAIServer(always("B")) as upstream:
        with gateway(upstream, log=log) as url:
            ids = [ask(url).id for _ in range(41)]
            assert metric(url, "catto_feedback_answers") == 0
            for number, name in enumerate(ids[:40]):
                assert post(url, {"id": name, "correct": number % 4 > 0}, "/v1/feedback")[0] == 200
            assert post(url, {"id": ids[0], "correct": True}, "/v1/feedback")[0] == 404
            assert metric(url, "catto_feedback_answers") == 40
            assert metric(url, "catto_rolling_accuracy") == 0.75
            assert metric(url, "catto_rolling_confidence") == pytest.approx(P)
            assert metric(url, "catto_rolling_ece") == pytest.approx(abs(P - 0.75))
            assert metric(url, 'catto_requests_total{status="200"}') >= 81
        with gateway(upstream, log=log) as url:  # a restart knows what waits and what is graded
            assert metric(url, "catto_feedback_answers") == 40
            assert post(url, {"id": ids[40], "correct": True}, "/v1/feedback")[0] == 200
    done = run(capsys, "measure", log, "--json")
    assert (done.code, done.json["rows"], done.json["accuracy"]) == (0, 41, pytest.approx(31 / 41))
    assert done.json["mean_confidence"] == pytest.approx(P)
    assert "Which?" not in log.read_text() + (tmp_path / "answers.pending.jsonl").read_text()


def test_answers_of_one_request_id_have_ids_of_their_own(tmp_path: Path) -> None:
    """A proxy that retries sends its id twice; feedback reaches the answer that it is about."""
    log = tmp_path / "answers.jsonl"
    with OpenAIServer(by_turn(*"AB", logprobs=(-0.05, -2.0))) as upstream, gateway(upstream, log=log) as url:
        replies = [post(url, body(), **{"X-Request-Id": "r-1"}) for _ in range(2)]
        assert [headers["x-request-id"] for _, _, headers in replies] == ["r-1", "r-1"]
        first, second = (reply["id"] for _, reply, _ in replies)
        assert first != second
        assert post(url, {"id": "r-1", "correct": True}, "/v1/feedback")[0] == 404
        assert post(url, {"id": first, "correct": True}, "/v1/feedback")[0] == 200
        assert post(url, {"id": second, "correct": False}, "/v1/feedback")[0] == 200
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["label"], row["correct"]) for row in rows] == [("A", True), ("B", False)]


def test_drift_is_of_this_calibrator_and_this_model(tmp_path: Path) -> None:
    log, fitted = tmp_path / "answers.jsonl", Fitted(Temperature(tau=50.0), "confidence")
    older = {"id": "old", "confidence": 0.9, "correct": False}  # of a log that does not say what made it
    log.write_text(json.dumps(older) + "\n")
    with OpenAIServer(always("B", -0.05)) as upstream:
        with gateway(upstream, log=log) as url:
            assert metric(url, "catto_feedback_answers") == 0
            raw = [ask(url).id for _ in range(3)]
            for name in raw[:2]:
                assert post(url, {"id": name, "correct": True}, "/v1/feedback")[0] == 200
            assert metric(url, "catto_feedback_answers") == 2
        with gateway(upstream, log=log, fitted=fitted) as url:
            assert metric(url, "catto_feedback_answers") == 0
            assert post(url, {"id": raw[2], "correct": True}, "/v1/feedback")[0] == 200
            assert metric(url, "catto_feedback_answers") == 0
            found = ask(url)
            assert post(url, {"id": found.id, "correct": False}, "/v1/feedback")[0] == 200
            assert metric(url, "catto_feedback_answers") == 1
            assert metric(url, "catto_rolling_confidence") == pytest.approx(found.catto["confidence"])
        with gateway(upstream, log=log) as url:  # the late feedback was kept
            assert metric(url, "catto_feedback_answers") == 3
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row.get("calibrator") for row in rows] == [None, None, None, None, fitted.digest]
    assert [row.get("model") for row in rows] == [None, *4 * ["tiny-answerer"]]
