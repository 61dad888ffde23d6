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

# Attention implementations that accept a mask of our own, as a dense tensor or as a `BlockMask`. FlashAttention accepts
# neither, so rows are padded there.
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
    """Let `model(catto_batch=..., catto_head=...)` run the backbone and our head instead of the model's forward.

    `catto_batch` is a `Batch`, and `catto_head` contains the arguments `extras` and `precision` of `run_head`, which
    makes this call. Without `catto_batch`, the forward is unchanged.

    The forward of the base model is replaced on this instance. Installing the head again has no effect.

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

    @functools.wraps(type(base).forward)  # keeps the signature, which Transformers inspects
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
        # `self` is a deep copy of `base`, and this function was copied with it. `original` would run `base`.
        return call_copied_forward(original, self, *args, **kwargs)

    base.forward = types.MethodType(forward, base)
    base._catto_head = True


def _require_linear_head(base: Any) -> None:
    """Raise ValueError if the logits come from more than one linear layer on the last hidden states."""
    head = base.get_output_embeddings()
    if hasattr(head, "base_layer"):  # `token_stats` would ignore the adapter and read only the base weight
        raise ValueError("an adapter on the LM head is not supported: take it out of target_modules")
    backbone_and_head = {id(weight) for weight in base.base_model.parameters()}
    backbone_and_head.update(id(weight) for weight in head.parameters())
    for name, weight in base.named_parameters():
        if id(weight) not in backbone_and_head:
            raise ValueError(f"{type(base).__name__}: the head is more than one linear layer ({name}): not supported")


def run_head(
    model: Any, batch: Batch, extras: tuple[str, ...] = (), precision: Precision = "auto", **more: Any
) -> ForwardOutput:
    """Run a batch through the model and the fused head, with exactly one call of the model.

    Args:
        model: The model after `install_head`, with any wrappers that training has added.
        batch: The batch.
        extras: Names of the optional statistics of `TokenStats` to compute.
        precision: Precision of the head's matrix products, see `CATTOConfig.head_precision`.
        **more: Further keyword arguments of the model's forward.

    Returns:
        The statistics of the scored tokens, the label log-probabilities of the queries, and the load-balancing loss.
    """
    # In padded rows, the model itself numbers positions from 0, and some models do not accept position ids.
    position_ids = None
    if batch.shared or batch.packed:
        position_ids = batch.position_ids
    with _keep_output_precision(model):
        outputs = model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=position_ids,
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

    Under mixed precision, Accelerate tells FSDP2 to return bf16 outputs. In bf16, numbers near -140 have no decimals.
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
    """Run the backbone and our head.

    `install_head` puts this in place of the model's forward for calls by `run_head`. These calls still go through the
    model itself, so wrappers such as DDP and PEFT work as usual.

    Args:
        model: The base model.
        batch: The batch.
        extras: Names of the optional statistics of `TokenStats` to compute.
        precision: Precision of the head's matrix products.
        attention_mask: 1 on tokens, 0 on padding, for G lines of S tokens, (G, S).
        **kwargs: The other arguments of the call, such as `input_ids`, for the backbone.

    Returns:
        The fields of `TokenStats`, the log-probabilities of the batch's answer labels as `labels`, and `aux_loss`, as
        in `ForwardOutput`. It is a plain dictionary, since wrappers such as DDP look for tensors in the output.
    """
    if batch.shared or batch.packed:  # several responses or sequences share a line and must not see each other
        attention_mask = _make_attention_mask(model, batch)
    # PEFT adds `labels` and arguments that are None, which not every backbone accepts.
    backbone_options = {name: value for name, value in kwargs.items() if name != "labels" and value is not None}
    backbone_options["use_cache"] = False
    outputs = model.base_model(attention_mask=attention_mask, **backbone_options)
    values = _compute_head_values(model, outputs.last_hidden_state, batch, extras=extras, precision=precision)
    values["aux_loss"] = None
    is_mixture_of_experts = getattr(outputs, "router_logits", None) is not None
    if is_mixture_of_experts:
        values["aux_loss"] = _compute_balancing_loss(model, outputs.router_logits, batch.counts)

    # The loss is computed on the device of the batch. A device_map may have put the head on a different one.
    loss_device = batch.input_ids.device
    for name, value in values.items():
        if value is not None:
            values[name] = value.to(loss_device)
    return values


def _compute_head_values(
    model: Any, hidden: Tensor, batch: Batch, *, extras: tuple[str, ...], precision: Precision
) -> dict[str, Tensor | None]:
    """Run the LM head at the positions where it is needed.

    Args:
        model: The model.
        hidden: The last hidden states of the batch: G lines of S tokens, (G, S, H).
        batch: The batch. Its `source` lists the positions that predict a scored token. Its `query_source` lists the
            positions at which the log-probabilities of the answer labels are needed.
        extras: Optional statistics; see `token_stats`.
        precision: Precision of the head; see `token_stats`.

    Returns:
        The fields of `TokenStats` for the scored tokens. Under `labels`, the log-probabilities of the answer labels, or
        None if there are no such positions.
    """
    virtual_tokens = hidden.shape[1] - batch.input_ids.shape[1]  # prepended by prompt-learning adapters

    def gather_hidden(source: Tensor, device: torch.device) -> Tensor:
        """Return the hidden states at each (line, column) of `source` (N, 2), moved to the device: (N, H)."""
        line, column = source.to(hidden.device).unbind(-1)
        gathered: Tensor = hidden[line, column + virtual_tokens].to(device)
        return gathered

    values: dict[str, Tensor | None] = {"labels": None}
    with whole_head(model) as head:
        head["precision"] = precision
        head_device = head["weight"].device  # a device_map may have put it on a different device than the backbone
        predicting_hidden = gather_hidden(batch.source, head_device)
        targets = batch.targets.to(head_device)
        # `masked=False`: prompts and padding were left out when the hidden states were gathered.
        stats = token_stats(predicting_hidden, targets=targets, extras=extras, masked=False, **head)
        values.update(vars(stats))
        has_queries = len(batch.query_source) > 0
        if has_queries:
            # `label_logprobs` reads one position of each sequence. Each query becomes a sequence of length one.
            query_hidden = gather_hidden(batch.query_source, head_device).unsqueeze(1)
            label_ids = batch.query_labels.to(head_device)
            positions = torch.zeros_like(label_ids[:, 0])
            values["labels"] = label_logprobs(query_hidden, positions=positions, labels=label_ids, **head)
    return values


def _make_attention_mask(model: Any, batch: Batch) -> Any:
    """Make the attention mask of shared or packed rows, in the form that the model's attention accepts."""
    if model.config._attn_implementation in SPARSE:
        return block_mask(batch)
    # A dense mask is added to the attention scores, so it has their dtype.
    device_type = batch.input_ids.device.type
    dtype = model.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    return dense_mask(batch, dtype)


def _compute_balancing_loss(model: Any, router_logits: Any, counts: Tensor) -> Tensor | None:
    """Compute the load-balancing loss of a mixture of experts; None if the router's logits are not those of one.

    The loss is equal to TRL's on padded rows. The weight of each token, `counts` (G, S), is the number of padded rows
    that contain it: a token of a shared prompt counts once per response.
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

    Weights that FSDP2 or tensor parallelism has split over the ranks are gathered first. (`token_stats` itself gathers
    weights that ZeRO-3 has partitioned.)

    FSDP2 gathers the weights of a module before its forward. The forward of the head is never called, so a head that
    is an FSDP module of its own is unsharded here. FSDP then reduces the gradient over the ranks, in the precision it
    is configured for. `DTensor.full_tensor` would not be right, since its backward does not reduce the gradient.

    With tensor parallelism, `DTensor.full_tensor` is right, since every rank computes the same gradient.
    """
    layer: Any = model.get_output_embeddings()
    is_sharded_by_fsdp = isinstance(layer.weight, DTensor) and isinstance(layer, FSDPModule)
    if is_sharded_by_fsdp:
        layer.unshard()
    config = model.config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    yield {
        "weight": _gather_tensor(layer.weight),
        "bias": _gather_tensor(getattr(layer, "bias", None)),
        "softcap": softcap,
        "scale": _find_logit_scale(config),
    }
    if is_sharded_by_fsdp and not torch.is_grad_enabled():  # with gradients, FSDP reshards it after the backward pass
        layer.reshard()


def _gather_tensor(tensor: Any) -> Any:
    """Gather a tensor that is split over ranks; return any other value, such as None, unchanged."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def _find_logit_scale(config: Any) -> float:
    """Return the factor by which the logits are multiplied; 1 if the configuration contains none."""
    for name in SCALE_NAMES:
        factor = getattr(config, name, None)
        if factor is not None:
            return float(factor)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    if config.model_type == "hyperclovax":
        return float(scaling)  # only in this architecture, `logits_scaling` is a factor and not a divisor
    return 1.0 / float(scaling)


# ---- attention with a mask of blocks ---------------------------------------------------------------------------------


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Run FlexAttention if the mask is a block mask, and SDPA otherwise, so that generation is unchanged."""
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):  # before torch 2.13, autocast casts the inputs of SDPA only
        dtype = torch.get_autocast_dtype(device_type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    return flex_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("catto", _attend)
AttentionMaskInterface.register("catto", sdpa_mask)


def try_flex_attention(model: Any, device: torch.device) -> bool:
    """Switch a model from SDPA to FlexAttention if it can use it on this device.

    FlexAttention skips blocks in which no token may attend to another. After the switch, forward passes without a block
    mask, such as those of generation, still use SDPA.

    Returns:
        Whether the model uses FlexAttention now.
    """
    base = _unwrap_peft(model)
    if base.config._attn_implementation == "sdpa" and _can_use_flex_attention(base, device):
        base.set_attn_implementation("catto")
    return base.config._attn_implementation in SPARSE


def _can_use_flex_attention(base: Any, device: torch.device) -> bool:
    """Return whether the model can use FlexAttention, which runs on CUDA only and has no dropout."""
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
    uses_window = getattr(config, "use_sliding_window", True)  # architectures without this option always use the window
    if window and uses_window:
        return f"its layers attend to a sliding window of {window} tokens, not to the whole context"
    if counts_padding(model):
        return "its layers depend on the layout of the sequence, not on position ids"
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None):
            return "its adapter depends on the tokens of a row, or prepends virtual tokens to them"
    if getattr(args, "neftune_noise_alpha", None):
        return "NEFTune's noise depends on the length of a row"
    return None
