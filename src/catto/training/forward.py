"""Run the fused head inside the model's own forward, so that one call returns statistics instead of logits.

DDP, FSDP and autocast act on calls of the model that they wrap, so the head has to run inside such a call.
`install_head` adds keyword arguments to the base model's forward. Without them the forward is unchanged.
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

# Attention implementations that accept our mask. FlashAttention accepts none, so rows are padded there.
DENSE = ("sdpa", "eager")
SPARSE = ("flex_attention", "catto")
# Names under which architectures configure the factor of their logits.
SCALE_NAMES = ("logit_scale", "output_multiplier", "lm_head_multiplier")


class ForwardOutput(NamedTuple):
    """Output of one forward pass through the fused head.

    Attributes:
        stats: Statistics of the N scored tokens, (N,) each.
        labels: Log-probabilities of the labels of the M queries, (M, K); None without queries.
        aux_loss: Load-balancing loss of a mixture of experts; None for other models.
    """

    stats: TokenStats
    labels: Tensor | None
    aux_loss: Tensor | None


def _unwrap_peft(model: Any) -> Any:
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def install_head(model: Any) -> None:
    """Let `model(catto_batch=..., catto_head=...)` run the backbone and our head.

    This replaces the forward of the base model on this instance. Calling it again has no effect.

    Args:
        model: A causal language model, or a PEFT model around one.

    Raises:
        ValueError: The head is more than one linear layer, or has an adapter.
    """
    base = _unwrap_peft(model)
    if getattr(base, "_catto_head", False):
        return
    _require_linear_head(base)
    original = vars(base).get("forward")  # not None if a library has wrapped the forward of this instance

    @functools.wraps(type(base).forward)
    def forward(
        self: Any, *args: Any, catto_batch: Batch | None = None, catto_head: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        if catto_batch is not None:
            head_options = catto_head or {}
            return _run_backbone_and_head(self, catto_batch, **head_options, **kwargs)
        if original is None:
            return type(self).forward(self, *args, **kwargs)
        if self is base:
            return original(*args, **kwargs)
        # `self` is a copy of the model, which has copied this function too. `original` would run the first model.
        return call_copied_forward(original, self, *args, **kwargs)

    base.forward = types.MethodType(forward, base)
    base._catto_head = True


def _require_linear_head(base: Any) -> None:
    """Raise ValueError if the logits come from more than one linear layer on the last hidden states."""
    head = base.get_output_embeddings()
    if hasattr(head, "base_layer"):  # `token_stats` would ignore the adapter and read only the base weight
        raise ValueError("an adapter on the LM head is not supported: take it out of target_modules")
    known = {id(weight) for weight in base.base_model.parameters()}
    known.update(id(weight) for weight in head.parameters())
    for name, weight in base.named_parameters():
        if id(weight) not in known:
            raise ValueError(f"{type(base).__name__}: the head is more than one linear layer ({name}): not supported")


def run_head(
    model: Any, batch: Batch, extras: tuple[str, ...] = (), precision: Precision = "auto", **more: Any
) -> ForwardOutput:
    """Run a batch through the model and the fused head, with exactly one call of the model.

    Args:
        model: The model after `install_head`, with any wrappers that training has added.
        batch: The batch.
        extras: Names of optional statistics, see `token_stats`.
        precision: Precision of the head.
        **more: Further keyword arguments of the model's forward.

    Returns:
        The statistics of the scored tokens, the label log-probabilities of the queries, and the load-balancing loss.
    """
    # Padded rows are numbered from 0 by the model itself, and some models do not accept position ids.
    has_own_positions = batch.shared or batch.packed
    with _keep_output_precision(model):
        outputs = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids if has_own_positions else None,
            catto_batch=batch,
            catto_head={"extras": extras, "precision": precision},
            **more,
        )
    values = dict(outputs)
    labels = values.pop("labels")
    aux_loss = values.pop("aux_loss")
    return ForwardOutput(TokenStats(**values), labels, aux_loss)


@contextmanager
def _keep_output_precision(model: Any) -> Iterator[None]:
    """Keep FSDP2 from rounding the statistics.

    Under mixed precision, Accelerate tells FSDP2 to return bf16 outputs. In bf16, values near -140 are integers.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    state: Any = model._get_fsdp_state()
    policy = state._mp_policy
    state._mp_policy = replace(policy, output_dtype=None)
    try:
        yield
    finally:
        state._mp_policy = policy


def _run_backbone_and_head(
    model: Any, batch: Batch, *, extras: tuple[str, ...], precision: Precision, attention_mask: Any, **kwargs: Any
) -> dict[str, Tensor | None]:
    """Run the backbone and our head inside the model's forward, for `run_head`.

    The fields of `TokenStats`, `labels` and `aux_loss` are returned in a plain dictionary, since wrappers of the model
    look for tensors in its output.
    """
    if batch.shared or batch.packed:  # several responses or sequences share a line and must not see each other
        attention_mask = _make_block_mask(model, batch)
    # PEFT adds `labels` and arguments that are None, which not every backbone accepts.
    backbone_options = {name: value for name, value in kwargs.items() if name != "labels" and value is not None}
    backbone_options["use_cache"] = False
    outputs = model.base_model(attention_mask=attention_mask, **backbone_options)
    values = _compute_head_values(model, outputs.last_hidden_state, batch, extras=extras, precision=precision)
    values["aux_loss"] = None
    if getattr(outputs, "router_logits", None) is not None:
        values["aux_loss"] = _compute_balancing_loss(model, outputs.router_logits, batch.counts)

    # The loss is computed on the device of the batch. A device_map may have put the head on another one.
    loss_device = batch.input_ids.device
    for name, value in values.items():
        if value is not None:
            values[name] = value.to(loss_device)
    return values


def _compute_head_values(
    model: Any, hidden: Tensor, batch: Batch, *, extras: tuple[str, ...], precision: Precision
) -> dict[str, Tensor | None]:
    """Return the fields of `TokenStats` for the scored tokens, and `labels`, the label log-probabilities."""
    virtual_tokens = hidden.shape[1] - batch.input_ids.shape[1]  # prepended by prompt-learning adapters

    def gather_hidden(source: Tensor, device: torch.device) -> Tensor:
        """Return the hidden states at each (line, column) of `source` (N, 2), moved to the device: (N, H)."""
        line, column = source.to(hidden.device).unbind(-1)
        rows: Tensor = hidden[line, column + virtual_tokens].to(device)
        return rows

    values: dict[str, Tensor | None] = {"labels": None}
    with whole_head(model) as head:
        head["precision"] = precision
        head_device = head["weight"].device  # a device_map may put it on another device than the backbone
        scored_hidden = gather_hidden(batch.source, head_device)
        targets = batch.targets.to(head_device)
        stats = token_stats(scored_hidden, targets=targets, extras=extras, masked=False, **head)
        values.update(vars(stats))
        has_queries = len(batch.query_source) > 0
        if has_queries:
            query_hidden = gather_hidden(batch.query_source, head_device).unsqueeze(1)
            label_ids = batch.query_labels.to(head_device)
            positions = torch.zeros_like(label_ids[:, 0])  # each query is passed as a sequence of one position
            values["labels"] = label_logprobs(query_hidden, positions=positions, labels=label_ids, **head)
    return values


def _make_block_mask(model: Any, batch: Batch) -> Any:
    """Make the attention mask of shared or packed rows, in the form that the model's attention accepts."""
    if model.config._attn_implementation in SPARSE:
        return block_mask(batch)
    device_type = batch.input_ids.device.type
    dtype = model.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    return dense_mask(batch, dtype)


def _compute_balancing_loss(model: Any, router_logits: Any, counts: Tensor) -> Tensor | None:
    """Compute the load-balancing loss of a mixture of experts, equal to TRL's on padded rows; None without experts.

    A token counts as often as it occurs in the padded rows: a token of a shared prompt counts once per response.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = model.config.get_text_config()
    loss = load_balancing_loss_func(router_logits, config.num_experts, config.num_experts_per_tok, counts)
    if isinstance(loss, Tensor):
        return loss
    return None


@contextmanager
def whole_head(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the LM head as keyword arguments of `token_stats`: weight, bias, softcap and scale.

    Weights that FSDP2 or tensor parallelism has split are gathered first. (`token_stats` itself gathers weights that
    ZeRO-3 has partitioned.)

    FSDP2: The head's own forward is never called. If the head is a separate FSDP unit, FSDP's hooks therefore do not
    run, and the head is unsharded here. FSDP then reduces its gradient, in the precision it is configured for. The
    backward of `DTensor.full_tensor` would not reduce it over the ranks.

    Tensor parallelism: The weight is still a DTensor after that. `full_tensor` is right here, since every rank computes
    the same gradient.
    """
    layer: Any = model.get_output_embeddings()
    is_sharded = isinstance(layer.weight, DTensor) and isinstance(layer, FSDPModule)
    if is_sharded:
        layer.unshard()
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    yield {
        "weight": _gather_tensor(layer.weight),
        "bias": _gather_tensor(getattr(layer, "bias", None)),
        "softcap": softcap,
        "scale": _find_logit_scale(config),
    }
    if is_sharded and not torch.is_grad_enabled():  # with gradients, FSDP reshards it after the backward pass
        layer.reshard()


def _gather_tensor(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def _find_logit_scale(config: Any) -> float:
    """Return the factor of the logits; 1 if the configuration contains none."""
    for name in SCALE_NAMES:
        factor = getattr(config, name, None)
        if factor is not None:
            return float(factor)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    if config.model_type == "hyperclovax":
        return float(scaling)
    return 1.0 / float(scaling)  # in all other architectures it is a divisor


# ---- attention with a mask of blocks ---------------------------------------------------------------------------------


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Run FlexAttention if the mask is a block mask, and SDPA otherwise, so that generation is unchanged."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):  # before torch 2.13, autocast casts inputs of SDPA only
        dtype = torch.get_autocast_dtype(device_type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    return flex_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("catto", _attend)
AttentionMaskInterface.register("catto", sdpa_mask)


def try_flex_attention(model: Any, device: torch.device) -> bool:
    """Switch an SDPA model on CUDA to FlexAttention if possible; return whether the model uses FlexAttention.

    FlexAttention skips blocks in which no token may attend to another. Batches without a block mask still use SDPA.
    """
    base = _unwrap_peft(model)
    if base.config._attn_implementation == "sdpa" and _can_use_flex_attention(base, device):
        base.set_attn_implementation("catto")
    return base.config._attn_implementation in SPARSE


def _can_use_flex_attention(base: Any, device: torch.device) -> bool:
    if device.type != "cuda" or not is_triton_available() or not base._supports_flex_attn:
        return False
    device_map = getattr(base, "hf_device_map", None) or {}
    is_on_one_device = len(set(device_map.values())) < 2  # a block mask is not moved between devices
    has_dropout = bool(getattr(base.config.get_text_config(), "attention_dropout", 0))
    return is_on_one_device and not has_dropout


def sharing_obstacle(model: Any, args: Any = None) -> str | None:
    """Return why the model can neither share prompts between responses nor pack rows; None if it can do both.

    Args:
        model: The model.
        args: The training arguments, which may turn on NEFTune's noise; None outside of training.
    """
    config = model.config.get_text_config()
    if model.config._attn_implementation not in DENSE + SPARSE:
        return f"attention implementation {model.config._attn_implementation!r} does not accept a block mask"
    layer_types = getattr(config, "layer_types", None) or ()
    other_types = set(layer_types) - {"full_attention"}
    if other_types:
        return f"not all of its layers attend to the whole context ({', '.join(sorted(other_types))})"
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        return f"its layers attend to a sliding window of {window} tokens, not to the whole context"
    if counts_padding(model):
        return "its layers depend on the layout of the sequence, not on position ids"
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None):
            return "its adapter depends on the tokens of a row, or prepends virtual tokens to them"
    if getattr(args, "neftune_noise_alpha", None):
        return "NEFTune's noise depends on the length of a row"
    return None
