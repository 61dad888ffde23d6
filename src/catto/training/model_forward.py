"""Our head inside the model's own forward: one call of the wrapped model returns statistics instead of logits.

DDP, FSDP and autocast live in the wrapped model's call, so the head runs inside it: `install` adds a keyword to the
base model's forward. Without that keyword the forward is what it was.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.utils.generic import ModelOutput

from catto.objectives import TokenStats, label_logprobs, token_stats
from catto.training.batches import Batch, block_mask

# Attention implementations that take our mask. FlashAttention's take none; it falls back to padded rows.
SHARING_ATTENTION = ("sdpa", "eager", "flex_attention")


@dataclass
class StatsOutput(ModelOutput):  # type: ignore[misc]
    """Statistics of the N scored tokens, (N,) each, and the label log-probabilities of the M queries, (M, K)."""

    target: Tensor | None = None
    rival: Tensor | None = None
    logsumexp: Tensor | None = None
    log_doubt: Tensor | None = None
    mean_logit: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq: Tensor | None = None
    labels: Tensor | None = None
    aux_loss: Tensor | None = None

    def stats(self) -> TokenStats:
        """The token statistics as the objectives take them."""
        names = TokenStats.__dataclass_fields__
        return TokenStats(*(getattr(self, name) for name in names))


def install(model: Any) -> None:
    """Let `model(catto_batch=..., catto_extras=...)` run the backbone and our head. Once a model; PEFT's base model."""
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


def call(model: Any, batch: Batch, extras: tuple[str, ...], **more: Any) -> StatsOutput:
    """Call the (wrapped) model exactly once and return the statistics."""
    with _outputs_as_they_are(model):
        output = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids if batch.shared else None,
            catto_batch=batch,
            catto_extras=extras,
            **more,
        )
    return output if isinstance(output, StatsOutput) else StatsOutput(**output)


@contextmanager
def _outputs_as_they_are(model: Any) -> Iterator[None]:
    """Keep FSDP2 from rounding the statistics: Accelerate asks it for outputs in bf16 under mixed precision.

    A bf16 log-probability of -140 is a multiple of 1.
    """
    state = model._get_fsdp_state() if isinstance(model, FSDPModule) else None
    if state is None or state._mp_policy.output_dtype is None:
        yield
        return
    policy = state._mp_policy
    state._mp_policy = replace(policy, output_dtype=None)
    try:
        yield
    finally:
        state._mp_policy = policy


def _forward(
    model: Any, batch: Batch, extras: tuple[str, ...], *, attention_mask: Tensor, **kwargs: Any
) -> StatsOutput:
    backbone = {name: value for name, value in kwargs.items() if name != "labels" and value is not None}
    mask = _shared_mask(model, batch) if batch.shared else attention_mask
    outputs = model.base_model(attention_mask=mask, **{**backbone, "use_cache": False})
    hidden = outputs.last_hidden_state
    offset = hidden.shape[1] - batch.input_ids.shape[1]  # virtual tokens that prompt-learning adapters put in front

    def at(source: Tensor, device: torch.device) -> Tensor:
        """Hidden states (N, H) at (sequence, position), on the head's device: a device_map may split the two."""
        sequence, position = source.to(hidden.device).unbind(-1)
        rows: Tensor = hidden[sequence, position + offset].to(device)
        return rows

    labels = None
    with whole_head(model) as head:
        place = head["weight"].device
        stats = token_stats(at(batch.source, place), targets=batch.targets.to(place), extras=extras, **head)
        if len(batch.query_source):
            rows, ids = at(batch.query_source, place).unsqueeze(1), batch.query_labels.to(place)
            labels = label_logprobs(rows, positions=torch.zeros_like(ids[:, 0]), labels=ids, **head)
    values = {**vars(stats), "labels": labels, "aux_loss": _aux_loss(model, outputs, batch)}
    back = batch.input_ids.device  # where the losses are computed
    return StatsOutput(**{name: None if value is None else value.to(back) for name, value in values.items()})


def _shared_mask(model: Any, batch: Batch) -> Any:
    device = batch.segments.device
    if model.config._attn_implementation == "flex_attention":
        return _flex_mask(batch.segments)
    mixed = torch.is_autocast_enabled(device.type)
    return block_mask(batch.segments, torch.get_autocast_dtype(device.type) if mixed else model.dtype)


def _flex_mask(segments: Tensor) -> Any:
    """The same mask for FlexAttention, which skips the blocks that no token may look at."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        prompt, own = segments[b, k] == 0, segments[b, k] == segments[b, q]
        return ((q >= k) & (prompt | own) & (segments[b, k] >= 0)) | (q == k)

    size = segments.shape[1]
    return create_block_mask(seen, segments.shape[0], None, size, size, device=segments.device)


@contextmanager
def whole_head(model: Any) -> Iterator[dict[str, Any]]:
    """The LM head as `token_stats` takes it: weight and bias, whole, and how the architecture bends its logits.

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
    yield {
        "weight": weight.full_tensor() if isinstance(weight, DTensor) else weight,
        "bias": bias.full_tensor() if isinstance(bias, DTensor) else bias,
        "softcap": getattr(text, "final_logit_softcapping", None),
        "scale": _logit_scale(text),
    }
    if sharded and not torch.is_grad_enabled():  # else the backward pass needs it, and reshards it afterwards
        layer.reshard()


def _logit_scale(config: Any) -> float:
    """What the architecture multiplies its logits by, under the name that its config uses."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)


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
        return "its positions cannot be given"  # recurrent layers, or distances in the sequence as it is laid out
    if hasattr(model, "peft_config") and any(c.is_prompt_learning for c in model.peft_config.values()):
        return "its adapter puts virtual tokens in front of the prompt"
    return None


def _aux_loss(model: Any, outputs: Any, batch: Batch) -> Tensor | None:
    """Mixture-of-experts load balancing, where the router's logits were asked for: TRL's, on TRL's padded rows.

    Each token counts as often as it stands there, a shared prompt's once for every response.
    """
    logits = getattr(outputs, "router_logits", None)
    if logits is None:
        return None
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    text = model.config.get_text_config()
    loss = load_balancing_loss_func(logits, text.num_experts, text.num_experts_per_tok, batch.counts)
    return loss if isinstance(loss, Tensor) else None
