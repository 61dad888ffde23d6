"""The server engine against llama.cpp's own server with SmolLM2: what a server of somebody else gives, and what not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llama_server import gguf, llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from catto.answer.tokens import encode_opening
from catto.engines import Context, Generation, Request, server
from catto.engines.server import ServerEngine
from catto.engines.transformers import TransformersEngine
from catto.io.record_files import read_manifest
from catto.predict import evaluate
from catto.prompts import render_completion, render_messages
from catto.records import Message, Option, Prediction, Question
from needs import needs

pytestmark = needs("llama")

# Words that a model does not think of first, so that some are not among its best 20 next tokens.
LABELS = ("entailment", "neutral", "contradiction")
PLACES = {"jam": "the refrigerator", "books": "the shelf", "a boat": "the river"}
QUESTIONS = [
    Question(
        id=thing,
        task="snli",
        split="test",
        fields={"premise": f"{thing} is in {place}", "hypothesis": f"{place} holds {thing}"},
        options=tuple(Option(label=label, text=label) for label in LABELS),
        gold="entailment",
    )
    for thing, place in PLACES.items()
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with llama() as address:
        yield address


def engine(url: str) -> ServerEngine:
    """One request at a time: llama.cpp's numbers depend a little on what it computes beside."""
    made = ServerEngine(url, "", top_logprobs=20, concurrency=1)
    made.find_model()
    return made


def answers(url: str, folder: Path) -> list[Prediction]:
    return evaluate(engine(url), QUESTIONS, reasoning=False, max_tokens=20, out=folder / "predictions.jsonl")


def test_the_probe_finds_more_candidates_and_continuation(url: str) -> None:
    asked = engine(url)
    missing: list[str] = []
    asked.probe(missing.append)
    assert (asked.can_continue, missing) == (True, [])
    assert asked.max_candidates > 900


def test_every_label_has_its_logprob_also_outside_the_best_20(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = answers(url, tmp_path / "more")
    for one in known:
        assert one.label in LABELS
        assert one.label_logprobs is not None
        assert set(one.label_logprobs) == set(LABELS)
        assert one.confidence == pytest.approx(math.exp(one.label_logprobs[one.label]))
        assert sum(map(math.exp, one.label_logprobs.values())) <= 1
    monkeypatch.setattr(server, "SINGLE_TOKEN_TOP_LOGPROBS", 20)
    few = answers(url, tmp_path / "few")
    assert any(one.label_logprobs is None for one in few)


def test_rows_and_manifest_name_the_model_and_say_no_path(url: str, tmp_path: Path) -> None:
    (row, *_) = answers(url, tmp_path)
    assert row.model == gguf().name
    assert read_manifest(tmp_path / "predictions.jsonl").counts["other_model"] == 0
    stored = "".join(path.read_text() for path in tmp_path.iterdir())
    assert str(gguf().parent) not in stored


def test_four_samples_differ_and_one_seed_repeats(url: str) -> None:
    chat = (Message(role="user", content="Name a fruit and a colour."),)
    requests = [
        Request(question="q", sample=n, messages=chat, temperature=1.0, seed=7 + n % 4, max_tokens=8) for n in range(5)
    ]
    texts = {one.sample: one.text for one in engine(url).generate(requests)}  # type: ignore[union-attr]
    assert len({texts[n] for n in range(4)}) > 1
    assert texts[4] == texts[0]


def test_a_begun_answer_is_continued_as_transformers_continues_it(url: str) -> None:
    """The same weights dequantised; llama.cpp multiplies in eight bits."""
    place = {"pretrained_model_name_or_path": gguf().parent, "gguf_file": gguf().name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    local = TransformersEngine(model, AutoTokenizer.from_pretrained(**place))
    begun = render_completion(None, None)
    path = encode_opening(local.tokenizer, begun, LABELS)
    tokens = tuple(tokens[0] for tokens in path.paths.values())
    chats = [render_messages(question, reasoning=False) for question in QUESTIONS]
    here = local.score([Context(messages=chat, prefix=path.ids_before, candidates=tokens) for chat in chats])
    remote = engine(url)
    remote.probe()
    ends = [(*chat, Message(role="assistant", content=begun)) for chat in chats]
    requests = [Request(question="q", sample=n, messages=end, max_tokens=1, begun=True) for n, end in enumerate(ends)]
    replies = {reply.sample: reply for reply in remote.generate(requests)}
    for sample, scores in enumerate(here):
        reply = replies[sample]
        assert isinstance(reply, Generation)
        assert reply.tops is not None
        tops = reply.tops[0][1]
        texts = [local.tokenizer.decode([token]) for token in tokens]
        assert [tops[text] for text in texts] == pytest.approx(scores.logprobs, abs=0.5)
