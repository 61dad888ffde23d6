"""The kinds of confidence through a server, and through the gateway in front of it: the numbers of a local model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from open_world import dense_probability, engine, served, sums
from openai_server import OpenAIServer

from catto.elicit import evaluate_kinds
from catto.engines.server import ServerEngine
from catto.prompts import render_judgement, render_messages
from catto.records import Prediction, Protocol, Question
from needs import REASONS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def local_predictions(questions: list[Question]) -> list[Prediction]:
    return evaluate_kinds(engine(), questions, ("ptrue", "verbal"), max_tokens=24)


@pytest.mark.parametrize("continues", [True, False])
def test_a_server_gives_the_confidences_of_a_local_model(continues: bool) -> None:
    """A server that cannot continue a begun response writes the judgement itself, in the same form."""
    questions = sums(10)
    expected = local_predictions(questions)
    with OpenAIServer(partial(served, continues=continues)) as upstream:
        asking = ServerEngine(upstream.url, "tiny-answerer", top_logprobs=20)
        with nullcontext() if continues else pytest.warns(UserWarning, match="cannot continue"):
            found = evaluate_kinds(asking, questions, ("ptrue", "verbal"), max_tokens=24)
    compared = 0
    for row, other in zip(found, expected, strict=True):
        assert (row.text, row.answer, row.correct) == (other.text, other.answer, other.correct)
        assert row.confidences is not None
        assert other.confidences is not None
        assert row.confidences["verbal"] == other.confidences["verbal"]
        if row.confidences["ptrue"] and other.confidences["ptrue"]:
            compared += 1
            assert row.confidences["ptrue"] == pytest.approx(other.confidences["ptrue"], abs=1e-5)
    assert compared >= 5


def messages_of(question: Question, **options: Any) -> list[dict[str, str]]:
    return [message.model_dump() for message in render_messages(question, **options)]


def test_the_gateway_serves_ptrue_of_its_answer() -> None:
    pytest.importorskip("fastapi", reason=REASONS["serve"])
    from gateway_world import ask, gateway

    protocol = Protocol(rule="most confident", k=1, temperature=0.0, fallback="none", confidence_kind="ptrue")
    questions = sums(6)
    expected = evaluate_kinds(engine(), questions, ("ptrue",), max_tokens=24)
    with OpenAIServer(served) as upstream, gateway(upstream, protocol=protocol, labels=(), grade="number") as url:
        replies = [ask(url, messages=messages_of(question), max_tokens=24) for question in questions]
    for question, reply, row in zip(questions, replies, expected, strict=True):
        about = reply.catto
        assert about["label"] is None
        assert about.get("answer") == row.answer
        assert about["confidence_kind"] == "ptrue"
        if row.answer is None:
            assert about["confidence"] is None
            assert about["reason"] == "the response states no answer"
            continue
        chat = render_judgement(question, row.answer)
        assert about["confidence"] == pytest.approx(dense_probability(chat, "<answer>\n", "True"), abs=1e-5)
        assert reply.choices[0].message.content == row.text
        assert reply.usage.completion_tokens > (row.tokens or 0)  # the judgement is counted too


def test_the_gateway_counts_equal_answers_and_abstains_below_its_threshold() -> None:
    pytest.importorskip("fastapi", reason=REASONS["serve"])
    from gateway_world import ask, gateway, threshold

    protocol = Protocol(rule="most confident", k=4, temperature=1.0, fallback="none", confidence_kind="agreement")
    limit = threshold(0.8, protocol)
    settings: dict[str, Any] = {"protocol": protocol, "labels": (), "grade": "number", "limit": limit}
    abstained = 0
    with OpenAIServer(served) as upstream, gateway(upstream, **settings) as url:
        for question in sums(5):
            wishes = {"return_candidates": True}
            reply = ask(url, messages=messages_of(question), max_tokens=24, seed=0, wishes=wishes)
            about = reply.catto
            answers = [candidate.get("answer") for candidate in about["candidates"]]
            chosen = max((answers.count(answer) for answer in answers if answer is not None), default=0)
            assert about["votes"] == chosen
            if chosen:
                assert about["confidence"] == pytest.approx((chosen + 1) / 6)
            is_sure = chosen == 4
            assert about["abstained"] is not is_sure
            abstained += about["abstained"]
    assert abstained > 0


def test_the_gateway_reads_a_stated_confidence_and_refuses_options() -> None:
    pytest.importorskip("fastapi", reason=REASONS["serve"])
    import openai
    from gateway_world import ask, gateway

    protocol = Protocol(rule="most confident", k=1, temperature=0.0, fallback="none", confidence_kind="verbal")
    questions = sums(6)
    expected = evaluate_kinds(engine(), questions, ("verbal",), max_tokens=24)
    with OpenAIServer(served) as upstream, gateway(upstream, protocol=protocol, labels=(), grade="number") as url:
        for question, row in zip(questions, expected, strict=True):
            reply = ask(url, messages=messages_of(question, confidence=True), max_tokens=24)
            if row.answer is not None:
                assert reply.catto["confidence"] == row.confidence
        with pytest.raises(openai.BadRequestError, match="the served task has no options"):
            ask(url, messages=messages_of(questions[0]), wishes={"options": {"A": "", "B": ""}})


@pytest.mark.parametrize("kind", ["ptrue", "agreement", "verbal"])
def test_the_command_serves_a_file_of_sums(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason=REASONS["serve"])
    import openai
    from llama_server import free_port, process

    rows = []
    for question in sums(5):
        rows.append(json.dumps({"question": question.fields["question"], "answer": question.gold}))
    (tmp_path / "sums.jsonl").write_text("\n".join(rows) + "\n")
    task = tmp_path / "sums.yaml"
    task.write_text("path: sums.jsonl\nfields: {question: question, answer: answer}\ngrade: number\n")
    port = free_port()
    with OpenAIServer(served) as upstream:
        arguments = ["--upstream", upstream.url, "--task", str(task), "--model", "tiny-answerer", "--port", str(port)]
        arguments += ["--confidence-kind", kind, "--k", "3", "--temperature", "1"]
        url = f"http://127.0.0.1:{port}"
        with process(f"{url}/health", "-m", "catto", "serve", *arguments):
            asking = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            with asking:
                turns: Any = messages_of(sums(5)[3], confidence=kind == "verbal")
                reply = asking.chat.completions.create(model="tiny-answerer", messages=turns, max_tokens=24, seed=1)
    about = reply.model_extra["catto"] if reply.model_extra else {}
    assert about["confidence_kind"] == kind
    assert about["k"] == 3
    assert about["label"] is None
    if about.get("answer") is not None:
        assert 0 <= about["confidence"] <= 1


def test_the_command_refuses_kinds_that_a_task_does_not_have() -> None:
    pytest.importorskip("fastapi", reason=REASONS["serve"])
    from catto.cli.serve import ServedTask, _check_kind

    protocol = Protocol(rule="most confident", k=4, temperature=1.0, fallback="answer", confidence_kind="ptrue")
    with pytest.raises(SystemExit):
        _check_kind(protocol, ServedTask(("A", "B")))
    agreement = protocol.model_copy(update={"confidence_kind": "agreement", "stop": 0.9})
    with pytest.raises(SystemExit):
        _check_kind(agreement, ServedTask(()))
    plain = protocol.model_copy(update={"confidence_kind": None})
    assert _check_kind(plain, ServedTask(())) == protocol.model_copy(update={"fallback": None})
    assert _check_kind(plain, ServedTask(("A", "B"))) == plain
