"""`catto serve` in front of llama.cpp's own server with SmolLM2, asked by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from llama_server import free_port, llama, process

from catto.prompts import render_messages
from catto.records import Option, Question
from needs import needs

pytestmark = [needs("llama"), needs("serve")]

OPTIONS = {"A": "the refrigerator", "B": "the attic", "C": "the river", "D": "the shoe"}
QUESTION = Question(
    id="jam",
    task="commonsense_qa",
    split="test",
    fields={"question": "Where do you keep an open jar of jam?"},
    options=tuple(Option(label=label, text=text) for label, text in OPTIONS.items()),
    gold="A",
)


@pytest.fixture(scope="module")
def upstream() -> Iterator[str]:
    with llama() as url:
        yield url


@contextmanager
def serving(upstream: str, *options: str) -> Iterator[openai.OpenAI]:
    port = free_port()
    arguments = ("-m", "catto", "serve", "--upstream", upstream, "--task", "commonsense_qa", "--port", str(port))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    with process(f"http://127.0.0.1:{port}/health", *arguments, *options), client:
        yield client


def ask(client: openai.OpenAI, wishes: dict[str, Any], **more: Any) -> Any:
    turns: Any = [message.model_dump() for message in render_messages(QUESTION, reasoning=False)]
    extra = {"catto": {"options": OPTIONS, **wishes}}
    model = next(iter(client.models.list())).id
    return client.chat.completions.create(model=model, messages=turns, max_tokens=24, extra_body=extra, **more)


def test_plain_four_samples_and_a_stream(upstream: str) -> None:
    with serving(upstream) as client:
        plain = ask(client, {})
        again = ask(client, {})
        four = ask(client, {"k": 4, "return_candidates": True}, temperature=1.0, seed=1)
        chunks = list(ask(client, {}, stream=True))
    for reply, k in ((plain, 1), (four, 4)):
        assert reply.choices[0].message.content
        assert reply.catto["label"] in OPTIONS
        assert 0 < reply.catto["confidence"] <= 1
        assert (reply.catto["k"], reply.catto["abstained"]) == (k, False)
    assert again.catto["confidence"] == pytest.approx(plain.catto["confidence"], abs=1e-3)
    tried = four.catto["candidates"]
    assert len({one["text"] for one in tried}) > 1
    assert four.catto["confidence"] == max(one["confidence"] for one in tried)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert (text, chunks[-1].catto["label"]) == (plain.choices[0].message.content, plain.catto["label"])


def test_it_abstains_below_a_threshold(upstream: str, tmp_path: Path) -> None:
    from gateway_world import threshold

    (tmp_path / "t.json").write_text(threshold(1.0).model_dump_json())
    with serving(upstream, "--threshold", str(tmp_path / "t.json"), "--abstention", "Pass.") as client:
        reply = ask(client, {})
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Pass.", "stop")
    assert (reply.catto["abstained"], reply.catto["threshold"]) == (True, 1.0)
    assert reply.catto["guarantee"] == {"risk": 0.05, "confidence_level": 0.95, "coverage": 0.7}
