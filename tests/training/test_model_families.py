"""Model families, tiny and random: `none` is TRL's DPO to the last bit, and our head times zero is it to 2e-7."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from steps import made
from tiny import tiny_tokenizer
from trl import DPOConfig, DPOTrainer

from catto.training import forward
from catto.training.batches import Row, lay_out_rows
from catto.training.config import CATTOConfig
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow


class ZeroWeight(CATTOTrainer):
    """Runs the whole of our head and the term, which then counts for nothing."""

    @property
    def calibration_weight(self) -> float:
        return 0.0


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_inner": 24}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
# The family's name in Transformers' class names, and what its config calls differently or has beyond the rest.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {"tie_word_embeddings": True},
    "Qwen3Moe": {**EXPERTS, "router_aux_loss_coef": 0.1},
    "Llama": {},
    "Gemma": {},
    "Gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 8},
    "Gemma3": {"final_logit_softcapping": 3.0, "sliding_window": 8},
    "Mistral": {"sliding_window": 8},
    "Ministral": {"sliding_window": 8},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1},
    "GPT2": GPT,
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "num_heads": 2, "window_size": 8, "num_layers": 2},
    "GPTNeoX": {},
    "GPTJ": {**GPT, "rotary_dim": 4},  # a bias on the head
    "Phi": {},  # a bias on the head
    "Phi3": {"num_key_value_heads": 2},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 8},
    "Olmoe": {**EXPERTS, "router_aux_loss_coef": 0.1},
    "Cohere": {"logit_scale": 0.4},
    "Cohere2": {"logit_scale": 0.4, "sliding_window": 8},
    "Granite": {"logits_scaling": 3.0},
    "OPT": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "Bloom": {"n_layer": 2, "n_head": 2},
    "Falcon": {"alibi": False},
    "StableLm": {},
    "Starcoder2": {},
    "SmolLM3": {},
    "Glm4": {},
    "Nemotron": {},
    "Mamba": {"state_size": 4},  # recurrent
}


@cache
def _tokens() -> Any:
    return tiny_tokenizer()


def _model(family: str, seed: int) -> Any:
    tokenizer = _tokens()
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    settings = {**SIZES, **NO_DROPOUT, **ids, "vocab_size": len(tokenizer), **FAMILIES[family]}
    if family == "Falcon":
        del settings["head_dim"]  # follows from the others
    config = getattr(transformers, f"{family}Config" if family != "Gemma3" else "Gemma3TextConfig")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return getattr(transformers, f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel")(config).eval()


def _loss_and_gradients(trainer: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of the first batch; the model's gradients are left empty again."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def _rows() -> Any:
    """Ragged pairs of short responses: a sum of 2e-7's bound has few log-probabilities to round."""
    words = ("true", "false", "not", "right wrong", "A", "B because", "option", "it is")
    pair = [{"chosen": words[n], "rejected": words[n + 1], "prompt": " ".join(words[: n + 1])} for n in range(0, 8, 2)]
    return Dataset.from_list(pair)


def _difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest difference between gradients; relative to their largest entry where that is above 1."""
    assert ours.keys() == theirs.keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    assert largest > 0.01
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / max(largest, 1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_none_is_trl_to_the_last_bit_and_our_head_times_zero_to_2e_7(family: str) -> None:
    theirs, ours = (
        made(kind, config, model=_model(family, 0), ref_model=_model(family, 1), rows=_rows(), **options)
        for kind, config, options in ((DPOTrainer, DPOConfig, {}), (ZeroWeight, CATTOConfig, {"calibration": "none"}))
    )
    loss, gradients = _loss_and_gradients(theirs)
    same_loss, same_gradients = _loss_and_gradients(ours)
    assert torch.equal(same_loss, loss)
    assert same_gradients.keys() == gradients.keys()
    assert all(torch.equal(same_gradients[name], gradient) for name, gradient in gradients.items())
    ours.args.calibration = "catto"
    head_loss, head_gradients = _loss_and_gradients(ours)
    assert "calibration/confidence" in ours._metrics["train"]  # it went through our head
    torch.testing.assert_close(head_loss, loss, rtol=0, atol=2e-7)
    assert _difference(head_gradients, gradients) < 2e-7


def test_our_head_has_the_soft_cap_under_its_other_name() -> None:
    """RecurrentGemma's is called `logits_soft_cap`. Compared with the model's own logits, since TRL ignores it."""
    sizes = {**SIZES, "num_hidden_layers": 3, "lru_width": 16, "logits_soft_cap": 3.0, "vocab_size": len(_tokens())}
    torch.manual_seed(0)
    model = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**sizes)).eval()
    ids = torch.tensor([[5, 7, 9, 4, 6]])
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0, 1:4].log_softmax(-1)
        expected = expected.gather(-1, ids[0, 2:].unsqueeze(-1)).squeeze(-1)
        forward.install_head(model)
        batch = lay_out_rows([Row([5, 7], [9, 4, 6])], [], 1, 0, shared=False, packed=False)
        found = forward.run_head(model, batch).stats.target
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_head_of_several_layers_is_refused() -> None:
    config = transformers.ModernBertDecoderConfig(**{**SIZES, "vocab_size": len(_tokens()), "pad_token_id": 0})
    with pytest.raises(ValueError, match=r"ModernBertDecoder.*the head is more than one linear layer \(lm_head"):
        forward.install_head(transformers.ModernBertDecoderForCausalLM(config))
