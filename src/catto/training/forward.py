"""The fused head inside the model's own forward: one call of the wrapped model returns statistics instead of logits.

DDP, FSDP and autocast act on the wrapped model's call, so the head runs inside it: `install_head` adds a keyword to the
base model's forward. Without that keyword the forward is unchanged.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_triton_available

from catto.engines.decoding import counts_padding
from catto.objectives import TokenStats, label_logprobs, token_stats
from catto.objectives.tiles import Precision
from catto.training.batches import Batch, block_mask, dense_mask
from catto.training.trl_compat import call_copied_forward

# Attention implementations that accept our mask. FlashAttention's accept none; they fall back to padded rows.
DENSE, SPARSE = ("sdpa", "eager"), ("flex_attention", "catto")


class Output(NamedTuple):
    """Statistics of the N scored tokens, (N,) each, and log-probabilities of the M queries' labels, (M, K)."""

    stats: TokenStats
    labels: Tensor | None
    aux_loss: Tensor | None


def install_head(model: Any) -> None:
    """Let `model(catto_batch=..., catto_head=...)` run the backbone and our head; PEFT's base model too."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "_catto_head", False):
        return
    if hasattr(head := base.get_output_embeddings(), "base_layer"):  # `token_stats` would read the weight below it
        raise ValueError("an adapter on the LM head is not supported: take it out of target_modules")
    known = {id(weight) for part in (base.base_model, head) for weight in part.parameters()}
    if other := next((name for name, weight in base.named_parameters() if id(weight) not in known), None):
        raise ValueError(f"{type(base).__name__}: the head is more than one linear layer ({other}): not supported")
    original = vars(base).get("forward")  # set where a library has wrapped it on this instance

    @functools.wraps(type(base).forward)
    def forward(
        self: Any, *args: Any, catto_batch: Batch | None = None, catto_head: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        if catto_batch is not None:
            return _forward(self, catto_batch, **(catto_head or {}), **kwargs)
        if original is None:
            return type(self).forward(self, *args, **kwargs)
        if self is base:
            return original(*args, **kwargs)
        # A copy of the model takes this function along, and `original` would run the weights that it was copied from.
        return call_copied_forward(original, self, *args, **kwargs)

    base.forward = types.MethodType(forward, base)
    base._catto_head = True


def run_head(
    model: Any, batch: Batch, extras: tuple[str, ...] = (), precision: Precision = "auto", **more: Any
) -> Output:
    """Call the (wrapped) model exactly once and return the statistics."""
    # Keep FSDP2 from rounding the statistics: Accelerate asks it for outputs in bf16 under mixed precision, and a bf16
    # log-probability of -140 is a multiple of 1.
    state: Any = model._get_fsdp_state() if isinstance(model, FSDPModule) else None
    policy: Any = None if state is None else state._mp_policy
    if state is not None:
        state._mp_policy = replace(policy, output_dtype=None)
    try:
        values = dict(
            model(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                position_ids=batch.position_ids if batch.shared or batch.packed else None,
                catto_batch=batch,
                catto_head={"extras": extras, "precision": precision},
                **more,
            )
        )
    finally:
        if state is not None:
            state._mp_policy = policy
    labels, aux_loss = values.pop("labels"), values.pop("aux_loss")
    return Output(TokenStats(**values), labels, aux_loss)


def _forward(
    model: Any, batch: Batch, *, extras: tuple[str, ...], precision: Precision, attention_mask: Any, **kwargs: Any
) -> dict[str, Tensor | None]:
    """The backbone and the head. A plain dictionary: what wraps the model's forward finds the tensors in it."""
    device = batch.input_ids.device  # where the losses are computed
    if batch.shared or batch.packed:
        mixed = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if mixed else model.dtype
        sparse = model.config._attn_implementation in SPARSE
        attention_mask = block_mask(batch) if sparse else dense_mask(batch, dtype)
    given = {name: value for name, value in kwargs.items() if name != "labels" and value is not None}
    outputs = model.base_model(attention_mask=attention_mask, **{**given, "use_cache": False})
    hidden = outputs.last_hidden_state
    offset = hidden.shape[1] - batch.input_ids.shape[1]  # virtual tokens that prompt-learning adapters put in front

    def at(source: Tensor, device: torch.device) -> Tensor:
        """Hidden states (N, H) at (sequence, position), on the head's device: a device_map may split the two."""
        sequence, position = source.to(hidden.device).unbind(-1)
        rows: Tensor = hidden[sequence, position + offset].to(device)
        return rows

    values: dict[str, Tensor | None] = {"labels": None, "aux_loss": None}
    with whole_head(model) as whole:
        head = {**whole, "precision": precision}
        place = head["weight"].device
        targets = batch.targets.to(place)
        values |= vars(token_stats(at(batch.source, place), targets=targets, extras=extras, masked=False, **head))
        if len(batch.query_source):
            rows, ids = at(batch.query_source, place).unsqueeze(1), batch.query_labels.to(place)
            values["labels"] = label_logprobs(rows, positions=torch.zeros_like(ids[:, 0]), labels=ids, **head)
    if getattr(outputs, "router_logits", None) is not None:
        # Mixture-of-experts load balancing: TRL's, on TRL's padded rows. Each token counts as often as it is there, a
        # shared prompt's once for every response.
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        text = model.config.get_text_config()
        experts = (text.num_experts, text.num_experts_per_tok)
        loss = load_balancing_loss_func(outputs.router_logits, *experts, batch.counts)
        values["aux_loss"] = loss if isinstance(loss, Tensor) else None
    return {name: None if value is None else value.to(device) for name, value in values.items()}


@contextmanager
def whole_head(model: Any) -> Iterator[dict[str, Any]]:
    """The LM head as `token_stats` takes it: weight and bias, whole, and how the architecture scales its logits.

    The head's own forward never runs, so where FSDP2 has made it a unit of its own, its hooks do not either: it is
    unsharded here, and FSDP reduces its gradient like any other, in its own precision. (The backward of
    `DTensor.full_tensor` would not reduce it over the ranks.) A weight that is a DTensor still is one of tensor
    parallelism, of which every rank computes the same gradient. ZeRO-3's pieces are gathered by `token_stats`.
    """
    layer: Any = model.get_output_embeddings()
    sharded = isinstance(layer.weight, DTensor) and isinstance(layer, FSDPModule)
    if sharded:
        layer.unshard()
    weight, bias = layer.weight, getattr(layer, "bias", None)
    text = model.config.get_text_config()
    # Architectures use different names for the factor of their logits; one of them is a divisor in most.
    factors = [getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")]
    divisor = getattr(text, "logits_scaling", None)
    if divisor is not None:
        factors.append(float(divisor) if text.model_type == "hyperclovax" else 1 / float(divisor))
    yield {
        "weight": weight.full_tensor() if isinstance(weight, DTensor) else weight,
        "bias": bias.full_tensor() if isinstance(bias, DTensor) else bias,
        "softcap": getattr(text, "final_logit_softcapping", None) or getattr(text, "logits_soft_cap", None),
        "scale": float(next((factor for factor in factors if factor is not None), 1.0)),
    }
    if sharded and not torch.is_grad_enabled():  # else the backward pass needs it, and reshards it afterwards
        layer.reshard()


# ---- attention with a mask of blocks ---------------------------------------------------------------------------------


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """FlexAttention where the mask is one of blocks, else SDPA: a model that generates keeps what it had."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if torch.is_autocast_enabled(query.device.type):  # before torch 2.13 it casts the inputs of SDPA alone
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return flex_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("catto", _attention)
AttentionMaskInterface.register("catto", sdpa_mask)


def skips_blocks(model: Any, device: torch.device) -> bool:
    """Whether masked blocks are not computed. On CUDA, SDPA is replaced here, for batches with such a mask alone."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = base.config.get_text_config()
    usable = device.type == "cuda" and is_triton_available() and base._supports_flex_attn
    whole = len(set((getattr(base, "hf_device_map", None) or {}).values())) < 2  # the mask stays on one device
    if base.config._attn_implementation == "sdpa" and usable and whole and not getattr(config, "attention_dropout", 0):
        base.set_attn_implementation("catto")
    return base.config._attn_implementation in SPARSE


def sharing_obstacle(model: Any, args: Any = None) -> str | None:
    """Why this model cannot compute a prompt once for several responses, or packed rows; None where it can.

    args: the training's arguments, where there is a training.
    """
    config = model.config.get_text_config()
    if model.config._attn_implementation not in DENSE + SPARSE:
        return f"attention implementation {model.config._attn_implementation!r} takes no block mask"
    if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"not all of its layers attend to the whole context ({', '.join(sorted(kinds))})"
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return f"its layers attend to a sliding window of {window} tokens, not to the whole context"
    if counts_padding(model):
        return "its layers go by the sequence as it is laid out, not by position ids"
    adapters = getattr(model, "peft_config", {}).values()
    if any(adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters):
        return "its adapter goes by the tokens of a row, or puts virtual tokens in front of them"
    return "NEFTune's noise goes by the length of a row" if getattr(args, "neftune_noise_alpha", None) else None
