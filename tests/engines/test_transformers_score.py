"""Scoring: equal to the log-softmax of one dense forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    BATCH_SIZES,
    TOKENIZER,
    chat,
    dense_logits,
    each_architecture,
    forwards,
    log_softmax,
    ragged_contexts,
)
from tiny import tiny_model

from catto.engines import TAU_GRID, Context
from catto.engines.transformers import TransformersEngine
from catto.prompts import prompt_ids


@each_architecture
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_score_is_the_dense_log_softmax(shape: dict[str, Any], batch_size: int) -> None:
    model = tiny_model(**shape)
    contexts = ragged_contexts()
    for context, scores in zip(
        contexts, TransformersEngine(model, TOKENIZER, batch_size=batch_size).score(contexts), strict=True
    ):
        logits = dense_logits(model, [*prompt_ids(TOKENIZER, context.messages), *context.prefix])
        expected = log_softmax(logits)[list(context.candidates)]
        np.testing.assert_allclose(scores.logprobs, expected, atol=1e-5, rtol=0)
        assert scores.logsumexp is not None
        assert list(scores.logsumexp) == [str(tau) for tau in TAU_GRID]
        for tau in TAU_GRID:
            grid = np.log(np.exp(logits / tau).sum()) - logits.max() / tau
            np.testing.assert_allclose(scores.logsumexp[str(tau)], grid, atol=1e-4 if tau < 0.5 else 2e-5, rtol=0)


def test_score_of_no_contexts_and_of_no_candidates_is_empty() -> None:
    engine = TransformersEngine(tiny_model(), TOKENIZER)
    assert engine.score([]) == []
    assert engine.score([Context(messages=chat("a"), prefix=(), candidates=())])[0].logprobs == ()


def test_score_refuses_a_candidate_outside_the_vocabulary() -> None:
    engine = TransformersEngine(tiny_model(), TOKENIZER)
    with pytest.raises(ValueError, match=r"candidates \(100000,\): expected token ids below"):
        engine.score([Context(messages=chat("a"), prefix=(), candidates=(100000,))])


def test_score_never_holds_more_than_one_position_a_row() -> None:
    model = tiny_model()
    with forwards(model) as shapes:
        TransformersEngine(model, TOKENIZER, batch_size=3).score(ragged_contexts())
    assert shapes == [(3, 1, model.config.vocab_size)] * 2 + [(1, 1, model.config.vocab_size)]


@pytest.mark.parametrize("shape", [{"arch": "qwen3"}, {"arch": "gemma2", "final_logit_softcapping": 3.0}])
def test_bf16_model_gets_an_fp32_head_and_keeps_its_own_soft_cap(shape: dict[str, Any]) -> None:
    """Reference: the bf16 hidden state times the bf16 weights, both widened first; then cap * tanh(x / cap)."""
    model = tiny_model(**shape).to(torch.bfloat16)
    context = ragged_contexts()[1]
    ids = torch.tensor([[*prompt_ids(TOKENIZER, context.messages), *context.prefix]])
    with torch.no_grad():
        logits = model.model(ids).last_hidden_state[0, -1].float() @ model.lm_head.weight.float().T
    cap = shape.get("final_logit_softcapping")
    logits = cap * torch.tanh(logits / cap) if cap else logits
    found = TransformersEngine(model, TOKENIZER).score([context])[0].logprobs
    np.testing.assert_allclose(found, log_softmax(logits.double().numpy())[list(context.candidates)], atol=1e-5, rtol=0)
    assert "forward" not in vars(model.lm_head)
    assert model(ids).logits.dtype == torch.bfloat16


# PEFT 0.18 warns about the tied weights that this test is about.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("adapter", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [5, 40]}])
def test_a_bf16_head_that_peft_wraps_runs_in_fp32_too(adapter: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **adapter)
    model = get_peft_model(tiny_model(tie_word_embeddings="trainable_token_indices" in adapter).bfloat16(), settings)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and "lora" not in name:
                weight.add_(0.25)  # the trained copy of the head, not the one below it
    context = ragged_contexts()[1]
    ids = torch.tensor([[*prompt_ids(TOKENIZER, context.messages), *context.prefix]])
    base = model.get_base_model()
    with torch.no_grad():
        states = base.model(ids).last_hidden_state[0, -1]
        weight = base.lm_head(torch.eye(32, dtype=torch.bfloat16)).float()  # its columns: the head as it acts
    found = TransformersEngine(model, TOKENIZER).score([context])[0].logprobs
    expected = log_softmax((states.float() @ weight).double().numpy())[list(context.candidates)]
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_scoring_ignores_a_surrounding_autocast() -> None:
    engine = TransformersEngine(tiny_model(), TOKENIZER)
    plain = engine.score(ragged_contexts())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert engine.score(ragged_contexts()) == plain
