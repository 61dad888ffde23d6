"""The vLLM adapter's requests and replies, as plain values; the engine itself only where vLLM is installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from catto.engines import Context, Request
from catto.engines.vllm import generate_fields, prompt_fields, read_generation, read_scores, score_fields
from catto.records import Message
from needs import needs
from tiny import tiny_tokenizer

CHAT = (Message(role="user", content="the question"),)
REQUEST = Request(question="q", sample=2, messages=CHAT, temperature=0.7, seed=9, max_tokens=33, stop=("</answer>",))


def place(logprobs: dict[int, float]) -> dict[int, Any]:
    """One position of vLLM's `logprobs`."""
    return {token: SimpleNamespace(logprob=value, rank=1, decoded_token="A") for token, value in logprobs.items()}


def recorded(ids: list[int], logprobs: list[float], reason: str = "stop") -> Any:
    """A reply with the fields of vLLM's `RequestOutput`."""
    places = [place({token: logprob}) for token, logprob in zip(ids, logprobs, strict=True)]
    response = SimpleNamespace(token_ids=tuple(ids), finish_reason=reason, logprobs=places, text="")
    return SimpleNamespace(prompt_token_ids=[1, 2, 3], outputs=[response])


def scored(*places: dict[int, float]) -> Any:
    """A reply of one scored position."""
    return SimpleNamespace(prompt_token_ids=[], outputs=[SimpleNamespace(logprobs=[place(one) for one in places])])


def test_a_request_keeps_the_stop_text_and_asks_for_the_drawn_tokens_logprob() -> None:
    assert generate_fields(REQUEST) == {
        "temperature": 0.7,
        "seed": 9,
        "max_tokens": 33,
        "stop": ["</answer>"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 0,
    }


def test_scoring_names_the_candidates_and_never_guides() -> None:
    fields = score_fields(Context(messages=CHAT, prefix=(5,), candidates=(8, 9, 8)))
    assert fields["logprob_token_ids"] == fields["allowed_token_ids"] == [8, 9]
    assert fields["max_tokens"] == 1
    assert not {"guided_decoding", "structured_outputs", "logprobs", "logit_bias"} & set(fields)
    with pytest.raises(ValueError, match="129 candidates"):
        score_fields(Context(messages=CHAT, prefix=(), candidates=tuple(range(129))))


def test_the_prompt_is_the_template_and_then_the_prefix() -> None:
    tokenizer = tiny_tokenizer(["the question"])
    ids = prompt_fields(tokenizer, CHAT, (7, 7))["prompt_token_ids"]
    assert ids[-2:] == [7, 7]
    assert tokenizer.decode(ids[:-2]) == "<turn>user\nthe question<eos>\n<turn>assistant\n"


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


def test_text_after_the_stop_text_is_cut_and_its_token_kept() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("A</answer>\n", add_special_tokens=False)["input_ids"]
    found = read_generation(REQUEST, recorded(ids, [-1.0] * len(ids)), tokenizer, "m")
    assert found.text == "A</answer>"
    assert found.token_ids == tuple(ids)


def test_a_reply_without_prompt_ids_and_logprobs_is_read() -> None:
    response = SimpleNamespace(token_ids=(4,), finish_reason="length", logprobs=None)
    found = read_generation(REQUEST, SimpleNamespace(prompt_token_ids=None, outputs=[response]), tiny_tokenizer(), "m")
    assert (found.token_ids, found.prompt_tokens, found.mean_logprob) == ((4,), 0, None)
    assert found.finish_reason == "length"


def test_scores_come_in_the_order_of_the_candidates() -> None:
    context = Context(messages=CHAT, prefix=(), candidates=(9, 8))
    scores = read_scores(context, scored({8: -1.5, 9: -0.25, 77: -3.0}))
    assert scores.logprobs == (-0.25, -1.5)
    assert scores.logsumexp is None
    with pytest.raises(ValueError, match="no log-probability for token 8"):
        read_scores(context, scored({9: -0.25}))
    with pytest.raises(ValueError, match="no log-probabilities"):
        read_scores(context, scored())


@needs("vllm")
def test_the_engine_scores_like_transformers(tmp_path: Path) -> None:
    """Heads of 64, since vLLM's kernels take none smaller; never run on a machine without a GPU."""
    from catto.engines.transformers import TransformersEngine
    from catto.engines.vllm import VLLMEngine
    from engine_cases import TOKENIZER, ragged_contexts
    from tiny import tiny_model

    model = tiny_model(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    engine = VLLMEngine(str(tmp_path), dtype="float32", enforce_eager=True, gpu_memory_utilization=0.3)
    contexts = ragged_contexts()
    for ours, theirs in zip(engine.score(contexts), TransformersEngine(model, TOKENIZER).score(contexts), strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
