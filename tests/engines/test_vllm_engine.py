"""The vLLM engine's requests and replies on objects of vLLM's form; `test_vllm_real.py` runs vLLM itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import TOKENIZER, ragged_contexts
from evaluation_world import engine as world_engine
from evaluation_world import model as world_model
from evaluation_world import questions, tokenizer
from tiny import tiny_model, tiny_tokenizer

from catto.engines import TAU_GRID, Request
from catto.engines.decoding import HeadHook, evaluation_mode, last_logits
from catto.engines.transformers import TransformersEngine
from catto.engines.vllm import ROWS_AT_ONCE, SCORING, VLLMEngine, read_generation, read_row, sampling_parameters
from catto.metrics.temperature import fit_tau, rescale_predictions
from catto.predict import evaluate
from catto.prompts import prompt_ids
from catto.records import Message

CHAT = (Message(role="user", content="the question"),)
REQUEST = Request(question="q", sample=2, messages=CHAT, temperature=0.7, seed=9, max_tokens=33, stop=("</answer>",))


@dataclass
class Flat:
    """What a reply with `flat_logprobs` holds: columns, here of a single position, its drawn token first."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def place(logprobs: dict[int, float]) -> dict[int, Any]:
    """One position of vLLM's `logprobs`."""
    return {token: SimpleNamespace(logprob=value, rank=1, decoded_token="A") for token, value in logprobs.items()}


def recorded(ids: Sequence[int], logprobs: Sequence[float], reason: str = "stop", stop: int | str | None = None) -> Any:
    """A reply with the fields of vLLM's `RequestOutput`; `stop` is the text or the token that ended it."""
    places = [place({token: logprob}) for token, logprob in zip(ids, logprobs, strict=True)]
    fields = {"finish_reason": reason, "stop_reason": stop, "logprobs": places, "text": ""}
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[SimpleNamespace(token_ids=tuple(ids), **fields)])


def scored(row: torch.Tensor) -> Any:
    """A reply of one position with the log-probabilities of the whole vocabulary, best first, as vLLM sorts them."""
    values, ids = row.float().log_softmax(-1).sort(descending=True)
    flat = Flat([int(ids[0]), *ids.tolist()], [float(values[0]), *values.tolist()])
    return SimpleNamespace(prompt_token_ids=[], outputs=[SimpleNamespace(logprobs=flat)])


def test_a_request_keeps_the_stop_text_and_asks_for_the_drawn_tokens_logprob() -> None:
    assert sampling_parameters(REQUEST) == {
        "temperature": 0.7,
        "seed": 9,
        "max_tokens": 33,
        "stop": ["</answer>"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }


def test_a_temperature_that_vllm_refuses_names_what_to_do() -> None:
    assert sampling_parameters(REQUEST.model_copy(update={"temperature": 2.0}))["temperature"] == 2.0
    with pytest.raises(ValueError, match=r"up to 2, got 2\.5: use evaluation\.decode greedy, which samples nothing"):
        sampling_parameters(REQUEST.model_copy(update={"temperature": 2.5}))


def test_scoring_asks_for_one_token_with_the_whole_vocabulary_and_never_masks() -> None:
    assert (SCORING["max_tokens"], SCORING["logprobs"], SCORING["flat_logprobs"]) == (1, -1, True)
    assert not {"guided_decoding", "structured_outputs", "logit_bias", "allowed_token_ids"} & set(SCORING)


def test_a_response_is_read_without_its_end_token() -> None:
    tokenizer = tiny_tokenizer()
    text = "<answer>\nA\n</answer>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    found = read_generation(
        REQUEST, recorded([*ids, tokenizer.eos_token_id], [-0.5] * len(ids) + [-9.0]), tokenizer, "m"
    )
    assert (found.question, found.sample, found.text) == ("q", 2, text)
    assert found.token_ids == tuple(ids)
    assert (found.tokens, found.prompt_tokens, found.finish_reason) == (len(ids), 3, "stop")
    assert found.mean_logprob == pytest.approx(-0.5)


def test_another_end_token_of_the_model_is_removed_too_and_a_stop_text_stays() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("<answer>\nA", add_special_tokens=False)["input_ids"]
    ended = read_generation(REQUEST, recorded(ids, [-1.0] * len(ids), stop=ids[-1]), tokenizer, "m")
    assert ended.token_ids == tuple(ids[:-1])
    stopped = read_generation(REQUEST, recorded(ids, [-1.0] * len(ids), stop="</answer>"), tokenizer, "m")
    assert stopped.token_ids == tuple(ids)


def test_text_after_the_stop_text_is_cut_and_its_token_kept() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("A</answer>\n", add_special_tokens=False)["input_ids"]
    found = read_generation(REQUEST, recorded(ids, [-1.0] * len(ids)), tokenizer, "m")
    assert found.text == "A</answer>"
    assert found.token_ids == tuple(ids)


def test_a_reply_without_prompt_ids_and_logprobs_is_read() -> None:
    response = SimpleNamespace(token_ids=(4,), finish_reason="length", stop_reason=None, logprobs=None)
    found = read_generation(REQUEST, SimpleNamespace(prompt_token_ids=None, outputs=[response]), tiny_tokenizer(), "m")
    assert (found.token_ids, found.prompt_tokens, found.mean_logprob) == ((4,), 0, None)
    assert found.finish_reason == "length"


@pytest.mark.parametrize("kind", [list, np.asarray])
def test_a_row_is_in_the_order_of_the_token_ids_whichever_columns_vllm_has(kind: Any) -> None:
    """Its columns were lists and are arrays in newer versions."""
    flat = SimpleNamespace(token_ids=kind([2, 2, 0, 1]), logprobs=kind([-0.25, -0.25, -1.75, -3.0]))
    row = read_row(SimpleNamespace(outputs=[SimpleNamespace(logprobs=flat)]), 3)
    assert row.tolist() == [-1.75, -3.0, -0.25]


def test_a_part_of_the_vocabulary_is_refused() -> None:
    short = SimpleNamespace(outputs=[SimpleNamespace(logprobs=Flat([2, 2, 0], [-0.25, -0.25, -1.75]))])
    with pytest.raises(ValueError, match="no log-probability for 1 of 3 tokens"):
        read_row(short, 3)
    with pytest.raises(ValueError, match="for 3 of 3 tokens"):
        read_row(SimpleNamespace(outputs=[SimpleNamespace(logprobs=None)]), 3)


class Model:
    """Stands for `vllm.LLM`: a model of Transformers that answers with objects of vLLM's form."""

    def __init__(self, network: Any, tokenizer: Any) -> None:
        self.network, self.tokenizer = network, tokenizer
        self.settings: dict[str, Any] = {}
        self.most = 0  # contexts that were scored in one call
        config = SimpleNamespace(
            max_model_len=network.config.max_position_embeddings,
            dtype=torch.float32,
            get_vocab_size=lambda: network.config.vocab_size,
        )
        self.llm_engine = SimpleNamespace(model_config=config)

    def __call__(self, **settings: Any) -> Model:
        self.settings = settings
        return self

    def get_tokenizer(self) -> Any:
        return self.tokenizer

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> Iterator[Any]:
        assert not use_tqdm
        each = params if isinstance(params, list) else [params] * len(prompts)
        if each and each[0].get("logprobs") == -1:
            self.most = max(self.most, len(prompts))
        with evaluation_mode(self.network) as hook:
            replies = []
            for prompt, wish in zip(prompts, each, strict=True):
                replies.append(self._reply(hook, prompt["prompt_token_ids"], wish))
        return iter(replies)

    def _reply(self, hook: HeadHook, prompt: list[int], wish: dict[str, Any]) -> Any:
        assert len(prompt) < self.network.config.max_position_embeddings
        assert wish["temperature"] == 0
        ids: list[int] = []
        logprobs: list[float] = []
        for _ in range(wish["max_tokens"]):
            row = last_logits(self.network, hook, [[*prompt, *ids]])[0]
            if wish["logprobs"] == -1:
                return scored(row)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.log_softmax(-1)[ids[-1]]))
            if ids[-1] == self.tokenizer.eos_token_id:
                return recorded(ids, logprobs)
            if any(stop in self.tokenizer.decode(ids) for stop in wish["stop"]):
                return recorded(ids, logprobs, stop=wish["stop"][0])
        return recorded(ids, logprobs, "length")


def engine_on(network: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[VLLMEngine, Model]:
    model, package = Model(network, tokenizer), ModuleType("vllm")
    vars(package).update(LLM=model, SamplingParams=dict, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", package)
    return VLLMEngine("a/model", tensor_parallel_size=2), model


def test_scores_equal_those_of_transformers_at_every_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny_model()
    engine, model = engine_on(network, TOKENIZER, monkeypatch)
    assert model.settings == {
        "model": "a/model",
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": -1,
        "hf_overrides": {"head_dtype": "float32"},
        "tensor_parallel_size": 2,
    }
    contexts = ragged_contexts() * 5
    assert len(contexts) > ROWS_AT_ONCE
    expected = TransformersEngine(network, TOKENIZER).score(contexts)
    for ours, theirs in zip(engine.score(contexts), expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-6)
        assert ours.logsumexp == pytest.approx(theirs.logsumexp, abs=1e-5)
        assert list(ours.logsumexp or ()) == list(map(str, TAU_GRID))
    assert model.most == ROWS_AT_ONCE


def test_evaluation_equals_that_with_transformers_and_can_be_rescaled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_on(world_model(), tokenizer(), monkeypatch)
    ours, theirs = (evaluate(one, questions(6), max_tokens=24) for one in (engine, world_engine()))
    assert [one.text for one in ours] == [one.text for one in theirs]
    assert [(one.label, one.source) for one in ours] == [(one.label, one.source) for one in theirs]
    assert fit_tau(ours).tau == pytest.approx(fit_tau(theirs).tau, abs=1e-3)
    for tau in (0.25, 1.7, 5.0):
        pairs = zip(rescale_predictions(ours, tau), rescale_predictions(theirs, tau), strict=True)
        assert all(one.confidence == pytest.approx(other.confidence, abs=1e-5) for one, other in pairs)


def test_a_response_that_fills_the_model_still_leaves_room_to_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes no prompt of the model's whole length: the scored token needs a place."""
    network = tiny_model(max_position_embeddings=48)
    engine, _ = engine_on(network, TOKENIZER, monkeypatch)
    chat = ragged_contexts()[0].messages
    room = 48 - len(prompt_ids(TOKENIZER, chat))
    assert engine.positions == 47
    contexts = [ragged_contexts()[0].model_copy(update={"prefix": (20,) * (room - 1)})]
    assert len(engine.score(contexts)) == 1
