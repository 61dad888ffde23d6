"""A prompt computed once for all responses to it gives the losses and gradients of the padded rows."""

from __future__ import annotations

import logging
from typing import Any

import pairs
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig
from steps import Step, distance, lora, made, rows, step
from tiny import tiny_model, tiny_tokenizer
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM
from trl import DPOConfig, DPOTrainer

from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.forward import sharing_obstacle
from catto.training.trainer import CATTOTrainer

REFERENCES: dict[str, dict[str, Any]] = {
    "online": {},
    "precomputed": {"precompute_ref_log_probs": True},
    "lora": {"peft_config": lora},
    "lora precomputed": {"peft_config": lora, "precompute_ref_log_probs": True},
}


def _step(shared: bool, *, arch: str = "qwen3", attention: str = "sdpa", shape: Any = (), **options: Any) -> Step:
    model = tiny_model(arch=arch, **dict(shape))
    model.set_attn_implementation(attention)
    options = {name: value() if callable(value) else value for name, value in options.items()}
    return step(CATTOTrainer, CATTOConfig, model=model, prefix_sharing=shared, **options)


def _assert_equal(shared: Step, padded: Step) -> None:
    torch.testing.assert_close(shared.loss, padded.loss, rtol=1e-5, atol=1e-5)
    assert distance(shared.gradients, padded.gradients) < 1e-5
    for name in ("rewards/margins", "entropy", "logits/chosen", "mean_token_accuracy", "logps/chosen"):
        assert shared.metrics[name] == pytest.approx(padded.metrics[name], rel=1e-4, abs=1e-4), name


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_shared_prompts_give_the_padded_loss_and_gradient(arch: str, attention: str, reference: str) -> None:
    options = {"arch": arch, "attention": attention, **REFERENCES[reference]}
    shared, padded = _step(True, **options), _step(False, **options)
    assert shared.trainer.layout_options()["shared"] is True
    _assert_equal(shared, padded)


@pytest.mark.parametrize("objective", ["none", "bce", "outcome", "stream"])
def test_every_objective_shares_prompts(objective: str) -> None:
    options: dict[str, Any] = {"calibration": objective}
    if objective == "stream":  # the stream's prompts stand among the pairs' too, and are computed once with them
        rows = [
            row.model_copy(update={"prompt": pair.prompt})
            for row, pair in zip(pairs.sft_rows(), pairs.preference_rows(), strict=True)
        ]
        options = {"calibration": "outcome", "outcome_examples": make_examples(tiny_tokenizer(), rows)}
    _assert_equal(_step(True, **options), _step(False, **options))


def _experts(seed: int = 0) -> Any:
    """Two layers of experts whose balance weighs as much as the preference."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 1.0}
    return tiny_model(seed=seed, arch="qwen3_moe", **experts)


@pytest.mark.parametrize("stream", [False, True], ids=["pairs", "with a stream"])
def test_load_balancing_is_that_of_the_padded_pairs(stream: bool) -> None:
    """A shared prompt counts once for each of its responses, and the third stream's tokens not at all: TRL's number."""
    more = {"outcome_examples": make_examples(tiny_tokenizer(), pairs.sft_rows())} if stream else {}
    options: dict[str, Any] = {"calibration": "outcome" if stream else "catto", **more}
    theirs = step(DPOTrainer, DPOConfig, model=_experts())
    shared, padded = (
        step(CATTOTrainer, CATTOConfig, model=_experts(), prefix_sharing=sharing, **options)
        for sharing in (True, False)
    )
    assert shared.trainer.layout_options()["shared"] is True
    _assert_equal(shared, padded)
    for ours in (shared, padded):
        assert ours.metrics["aux_loss"] == pytest.approx(theirs.metrics["aux_loss"], abs=1e-6)


def _forwarded(result: Step) -> list[tuple[int, ...]]:
    """Shapes of what a further call of the loss sends through the policy's layers."""
    shapes: list[tuple[int, ...]] = []
    hook = result.trainer.model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple((args[0] if args else kwargs["hidden_states"]).shape[:2])),
        with_kwargs=True,
    )
    result.trainer.compute_loss(result.trainer.model, result.trainer._prepare_inputs(result.batch))
    hook.remove()
    return shapes


def test_pairs_of_one_question_share_one_prompt_and_one_forward() -> None:
    whole = [row.model_dump(mode="json") for row in pairs.preference_rows()]
    one_question = Dataset.from_list([{**row, "prompt": whole[0]["prompt"]} for row in whole])
    shared, padded = _step(True, rows=one_question), _step(False, rows=one_question)
    _assert_equal(shared, padded)
    prompt = len(rows(shared.batch)[0].prompt)
    tokens = sum(len(row.completion) for row in rows(shared.batch))
    assert _forwarded(shared) == [(1, prompt + tokens)]
    assert _forwarded(padded) == [tuple(padded.batch["input_ids"].shape)]


def test_a_sliding_window_is_refused_once_and_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    window = {"sliding_window": 8}
    with caplog.at_level(logging.WARNING, "catto"):
        shared = _step(True, arch="mistral", shape=window)
        _forwarded(shared)
    warned = [record.message for record in caplog.records if "prefix_sharing is off" in record.message]
    assert len(warned) == 1
    assert "its layers attend to a sliding window of 8 tokens, not to the whole context" in warned[0]
    padded = _step(False, arch="mistral", shape=window)
    torch.testing.assert_close(shared.loss, padded.loss, rtol=1e-6, atol=1e-6)
    assert distance(shared.gradients, padded.gradients) < 1e-6


def test_virtual_tokens_are_refused_and_fall_back(caplog: pytest.LogCaptureFixture) -> None:
    def adapter() -> PromptTuningConfig:
        return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)

    with caplog.at_level(logging.WARNING, "catto"):
        shared = _step(True, peft_config=adapter)
    assert "virtual tokens" in caplog.text
    padded = _step(False, peft_config=adapter)
    torch.testing.assert_close(shared.loss, padded.loss, rtol=1e-6, atol=1e-6)
    assert distance(shared.gradients, padded.gradients) < 1e-6


def test_an_adapter_that_goes_by_the_tokens_of_a_row_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    """Activated LoRA looks for its invocation tokens once per row; a shared line has several sequences."""
    tokens = tiny_tokenizer()("option", add_special_tokens=False)["input_ids"]

    def adapter() -> LoraConfig:
        return LoraConfig(
            task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], alora_invocation_tokens=tokens
        )

    with caplog.at_level(logging.WARNING, "catto"):
        shared = _step(True, peft_config=adapter)
    assert "prefix_sharing is off: its adapter depends on the tokens" in caplog.text
    torch.testing.assert_close(shared.loss, _step(False, peft_config=adapter).loss, rtol=1e-6, atol=1e-6)


def test_noise_that_goes_by_the_length_of_a_row_is_an_obstacle() -> None:
    model = tiny_model()
    assert (
        sharing_obstacle(model, CATTOConfig(neftune_noise_alpha=5.0))
        == "NEFTune's noise depends on the length of a row"
    )
    assert sharing_obstacle(model, CATTOConfig()) is None


def test_attention_without_a_mask_of_ours_is_an_obstacle() -> None:
    model = tiny_model()
    assert sharing_obstacle(model) is None
    model.config._attn_implementation = "flash_attention_2"
    assert "'flash_attention_2' does not accept a block mask" in str(sharing_obstacle(model))


def test_layers_with_a_window_are_an_obstacle_and_the_reason_names_them() -> None:
    every, some = (str(sharing_obstacle(tiny_model(arch=arch, sliding_window=8))) for arch in ("mistral", "gemma2"))
    assert every == "its layers attend to a sliding window of 8 tokens, not to the whole context"
    assert some == "not all of its layers attend to the whole context (sliding_attention)"


def test_mistral_without_a_window_shares() -> None:
    assert sharing_obstacle(tiny_model(arch="mistral", sliding_window=None)) is None


@pytest.mark.parametrize(
    "model",
    [
        BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)),
        MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=2)),
        tiny_model(arch="gpt_neo", attention_types=[[["global", "local"], 1]], num_layers=2, window_size=6),
    ],
    ids=["distances in the sequence", "recurrence", "windows that count tokens"],
)
def test_models_that_take_no_positions_are_an_obstacle(model: Any) -> None:
    assert sharing_obstacle(model) is not None


def test_gpt_neo_shares_where_all_of_its_layers_are_global() -> None:
    model = tiny_model(arch="gpt_neo", attention_types=[[["global"], 2]], num_layers=2)
    assert sharing_obstacle(model) is None


def test_a_reference_that_cannot_share_is_an_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    trainer = made(CATTOTrainer, CATTOConfig, prefix_sharing=True)
    trainer.ref_model = tiny_model(arch="mistral", sliding_window=8)
    assert trainer.layout_options()["shared"] is False
    assert "prefix_sharing is off" in caplog.text
