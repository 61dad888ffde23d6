"""The gateway in front of the tiny model gives the numbers of `catto eval` and `catto select` for the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from needs import REASONS

pytest.importorskip("fastapi", reason=REASONS["serve"])

from evaluation_world import LETTERS, NLI, encode, engine, model, questions, tokenizer
from gateway_world import FOUR, MODEL, ask, gateway
from openai_server import OpenAIServer, Reply, Seen, chat, ok
from test_server_equals_transformers import LOCK, entry, served

from catto.calibrate import Fitted, final_answers
from catto.engines import Generation
from catto.engines.decoding import evaluation_mode, last_logits
from catto.metrics.calibrators import Temperature
from catto.metrics.selection import RULES, VOTES
from catto.predict import evaluate, read
from catto.prompts import prompt_ids, render_messages
from catto.records import Message, Prediction, Question

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def sampled(seen: Seen) -> Reply:
    """The tiny model at the request's temperature, by its seed; greedy requests and continuations as ever."""
    body = seen.body
    if body["temperature"] == 0:
        return served(seen)
    prompt = prompt_ids(tokenizer(), [Message(**message) for message in body["messages"]])
    generator = torch.Generator().manual_seed(body["seed"])
    ids: list[int] = []
    rows: list[torch.Tensor] = []
    with LOCK:
        while len(ids) < body["max_tokens"]:
            with evaluation_mode(model()) as hook:
                logits = last_logits(model(), hook, [[*prompt, *ids]])[0].double()
            token = int(torch.multinomial((logits / body["temperature"]).softmax(-1), 1, generator=generator))
            if token == tokenizer().eos_token_id:
                break
            ids.append(token)
            rows.append(logits.log_softmax(-1))
            if tokenizer().convert_ids_to_tokens(token) == "</answer>":
                break
    payload = chat("".join(tokenizer().convert_ids_to_tokens(ids)), model=MODEL)
    payload["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    entries = [entry(token, row, 20) for token, row in zip(ids, rows, strict=True)]
    payload["choices"][0]["logprobs"] = {"content": entries}
    return ok(payload)


def wishes(question: Question, **more: Any) -> dict[str, Any]:
    return {"options": {option.label: option.text for option in question.options}, **more}


def turns(question: Question) -> list[dict[str, str]]:
    return [message.model_dump() for message in render_messages(question)]


@pytest.mark.parametrize("labels", [LETTERS, NLI])
@pytest.mark.parametrize(("max_tokens", "source"), [(24, "free"), (5, "fallback")])
def test_greedy_confidences_are_those_of_evaluation(labels: tuple[str, ...], max_tokens: int, source: str) -> None:
    asked = questions(6, labels)
    expected = evaluate(engine(), asked, max_tokens=max_tokens)
    with OpenAIServer(served) as upstream, gateway(upstream) as url:
        replies = [ask(url, messages=turns(one), wishes=wishes(one), max_tokens=max_tokens) for one in asked]
    for reply, one in zip(replies, expected, strict=True):
        found = reply.catto
        shown = one.label if one.source == "fallback" else one.text
        assert reply.choices[0].message.content == shown
        assert (found["label"], found["source"]) == (one.label, one.source)
        assert found["confidence"] == pytest.approx(one.confidence, abs=1e-6)
    assert {one.source for one in expected} == {source}


def dense(question: Question, texts: list[str]) -> list[Prediction]:
    """Predictions of these texts by the local engine, which scores them by a pass over the whole."""
    prompt = len(prompt_ids(tokenizer(), render_messages(question)))
    generations = [
        Generation(
            question=question.id,
            sample=number,
            text=text,
            token_ids=tuple(encode(text)),
            prompt_tokens=prompt,
            model=MODEL,
            finish_reason="stop",
        )
        for number, text in enumerate(texts)
    ]
    return read(engine(), [question], generations, k=len(texts), temperature=1.0, max_tokens=24)


@pytest.mark.parametrize("rule", RULES)
def test_four_samples_are_chosen_and_calibrated_as_offline(rule: str) -> None:
    fitted = Fitted(Temperature(tau=1.7), "confidence", rows=500)
    protocol = FOUR.model_copy(update={"rule": rule})
    answered = 0
    with OpenAIServer(sampled) as upstream, gateway(upstream, protocol=protocol, fitted=fitted) as url:
        for seed, question in enumerate(questions(4)):
            options = wishes(question, return_candidates=True)
            reply = ask(url, messages=turns(question), wishes=options, max_tokens=24, seed=seed)
            tried = reply.catto["candidates"]
            expected = dense(question, [one["response"] or one["text"] for one in tried])
            for one, other in zip(tried, expected, strict=True):
                assert (one["label"], one["source"]) == (other.label, other.source)
                assert one["confidence_raw"] == pytest.approx(other.confidence, abs=1e-6)
            if rule not in ("most confident", *VOTES):  # a text does not tell how likely its tokens were
                assert reply.catto["confidence"] in [one["confidence"] for one in tried]
                continue
            (final,) = final_answers(expected, protocol, fitted)
            chosen = expected[final.sample]
            shown = chosen.label if chosen.source == "fallback" else chosen.text
            assert reply.choices[0].message.content == shown
            assert (reply.catto["label"], reply.catto["votes"]) == (final.label, final.votes)
            assert reply.catto["confidence"] == pytest.approx(final.confidence, abs=1e-6)
            answered += 1
    assert answered == (4 if rule in ("most confident", *VOTES) else 0)
