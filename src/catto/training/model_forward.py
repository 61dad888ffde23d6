"""The fused head inside the model's own forward: one call of the wrapped model returns statistics instead of logits.

DDP, FSDP and autocast act on the wrapped model's call, so the head runs inside it: `install` adds a keyword to the
base model's forward. Without that keyword the forward is unchanged.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from catto.objectives import TokenStats, label_logprobs, token_stats
from catto.training.batches import Batch, block_mask, flex_mask

# Attention implementations that accept our mask. FlashAttention's accept none; they fall back to padded rows.
SHARING_ATTENTION = ("sdpa", "eager", "flex_attention")


class Output(NamedTuple):
    """Statistics of the N scored tokens, (N,) each, and log-probabilities of the M queries' labels, (M, K)."""

    stats: TokenStats
    labels: Tensor | None
    aux_loss: Tensor | None


def install(model: Any) -> None:
    """Let `model(catto_batch=..., catto_extras=...)` run the backbone and our head; PEFT's base model too."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "_catto_head", False):
        return
    original = base.forward

    @functools.wraps(type(base).forward)
    def forward(
        self: Any, *args: Any, catto_batch: Batch | None = None, catto_extras: tuple[str, ...] = (), **kwargs: Any
    ) -> Any:
        if catto_batch is None:
            return original(*args, **kwargs)
        return _forward(self, catto_batch, catto_extras, **kwargs)

    base.forward = types.MethodType(forward, base)
    base._catto_head = True


def call(model: Any, batch: Batch, extras: tuple[str, ...], **more: Any) -> Output:
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
                position_ids=batch.position_ids if batch.shared else None,
                catto_batch=batch,
                catto_extras=extras,
                **more,
            )
        )
    finally:
        if state is not None:
            state._mp_policy = policy
    labels, aux_loss = values.pop("labels"), values.pop("aux_loss")
    return Output(TokenStats(**values), labels, aux_loss)


def _forward(
    model: Any, batch: Batch, extras: tuple[str, ...], *, attention_mask: Any, **kwargs: Any
) -> dict[str, Tensor | None]:
    """The backbone and the head. A plain dictionary: what wraps the model's forward finds the tensors in it."""
    device = batch.input_ids.device  # where the losses are computed
    if batch.shared and model.config._attn_implementation == "flex_attention":
        attention_mask = flex_mask(batch.segments)
    elif batch.shared:
        mixed = torch.is_autocast_enabled(device.type)
        attention_mask = block_mask(batch.segments, torch.get_autocast_dtype(device.type) if mixed else model.dtype)
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
    with whole_head(model) as head:
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
        "softcap": getattr(text, "final_logit_softcapping", None),
        "scale": float(next((factor for factor in factors if factor is not None), 1.0)),
    }
    if sharded and not torch.is_grad_enabled():  # else the backward pass needs it, and reshards it afterwards
        layer.reshard()


def sharing_obstacle(model: Any) -> str | None:
    """Why this model cannot compute a prompt once for several responses; None where it can."""
    config = model.config.get_text_config()
    if model.config._attn_implementation not in SHARING_ATTENTION:
        return f"attention implementation {model.config._attn_implementation!r} takes no block mask"
    if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"not all of its layers attend to the whole context ({', '.join(sorted(kinds))})"
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return f"its layers attend to a sliding window of {window} tokens, not to the whole context"
    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    if "position_ids" not in inspect.signature(backbone.forward).parameters or getattr(config, "alibi", False):
        return "it takes no position ids"  # recurrent layers, or distances in the sequence as it is laid out
    if hasattr(model, "peft_config") and any(c.is_prompt_learning for c in model.peft_config.values()):
        return "its adapter puts virtual tokens in front of the prompt"
    return None
