"""Run a causal language model of Transformers for its next-token logits: fp32, last position only, prompts shared."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from catto.engines.sampling import Decode, Row, draw

# Any valid id does: a padded position is masked (left padding) or comes after everything that is read (right padding).
PAD = 0


@contextmanager
def evaluating(network: Any) -> Iterator[None]:
    """Switch off dropout and gradients and run the head in fp32; put every module's mode back afterwards.

    Autocast is off too, except inside a model that Accelerate trains in mixed precision: its forward enters autocast
    itself, so its layers run as in training and its head in fp32.
    """
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.inference_mode(), torch.autocast(network.device.type, enabled=False), fp32_head(network):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def fp32_head(network: Any) -> Iterator[None]:
    """Compute the output head in fp32 whatever the model's precision.

    bf16 logits move a two-label confidence by up to 1.5 points. Only the head's matrix product is replaced: what the
    model does to its logits afterwards (soft caps, scales) stays its own code and follows in fp32.
    """
    head: Any = network.get_output_embeddings()
    product = head.forward
    if head.weight.dtype != torch.float32:
        if type(head) is not nn.Linear:
            raise ValueError(
                f"the output head is a {type(head).__name__} in {head.weight.dtype}: load the model in float32"
            )
        weight, bias = head.weight.float(), None if head.bias is None else head.bias.float()
        product = functools.partial(nn.functional.linear, weight=weight, bias=bias)

    def forward(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # a model in training enters it in its own forward
            return product(hidden.float())  # type: ignore[no-any-return]

    attributes = vars(head)
    before = attributes.get("forward")  # set where a library has wrapped it on this instance
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before


def last_logits(network: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Logits after the last token of each sequence: one forward, right padding, no cache -> (B, V) fp32.

    A causal model never looks right, so the padding needs no mask.
    """
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths)
    ids = torch.tensor([[*sequence, *[PAD] * (width - len(sequence))] for sequence in sequences], device=network.device)
    keep = torch.tensor(lengths, device=network.device).unsqueeze(-1) - 1
    return finite(network(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[:, 0].float())


def finite(logits: Tensor) -> Tensor:
    """Refuse logits with NaN or an infinite largest value."""
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise ValueError("the model's logits are not finite (NaN or infinity)")
    return logits


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that writes new tokens into spare room; `keys` and `values` are views of what is filled.

    DynamicLayer copies the whole layer for every token, which took 30 % of the decoding time (SmolLM2-135M's shape, 8
    rows, 160 tokens, two cores).
    """

    keys: Any
    values: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = layer.keys, layer.values
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append along the sequence and return everything: (B, heads, T, width) each."""
        past = self.keys.shape[-2]
        length = past + key_states.shape[-2]
        if self._room is None or self._room[0].shape[-2] < length:
            self._room = _with_room(self.keys, length), _with_room(self.values, length)
        keys, values = self._room
        keys[:, :, past:length] = key_states
        values[:, :, past:length] = value_states
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Any) -> None:
        """Select rows; the room goes with the rows that it was made for."""
        super().reorder_cache(beam_idx)
        self._room = None


def _with_room(states: Tensor, length: int) -> Tensor:
    """Copy states into a buffer that holds `length` tokens and about a quarter more."""
    rows, heads, past, width = states.shape
    room = states.new_empty(rows, heads, length + max(32, length // 4), width)
    room[:, :, :past] = states
    return room


class Cached:
    """A batch of sequences in a model's cache, with the logits of each one's next token: (B, V) fp32."""

    logits: Tensor

    def __init__(self, network: Any, prompts: Sequence[Sequence[int]]) -> None:
        """Run the prompts, padded on the left; equal lengths need no mask, which is the faster path."""
        self._network = network
        self._cache: Any = None  # the model makes the kind that it needs
        width = max(len(prompt) for prompt in prompts)
        pads = [width - len(prompt) for prompt in prompts]
        ids = [[*[PAD] * pad, *prompt] for pad, prompt in zip(pads, prompts, strict=True)]
        masks = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads], device=network.device)
        self._mask = masks if any(pads) else None
        self._forward(torch.tensor(ids, device=network.device))
        self._make_room()

    def _make_room(self) -> None:
        """Replace plain layers only: windowed, recurrent, quantized and shared ones keep their own ways."""
        layers = self._cache.layers
        for place, layer in enumerate(layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                layers[place] = RoomyLayer(layer)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row named k times becomes k rows."""
        indices = torch.tensor(rows, device=self.logits.device)
        # index_select on every kind of layer; batch_select_indices is missing on linear-attention ones
        self._cache.reorder_cache(indices)
        self.logits = self.logits[indices]
        self._mask = self._mask[indices] if self._mask is not None else None

    def step(self, tokens: Tensor) -> None:
        """Append one token to every row: (B,) ids."""
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=-1)
        self._forward(tokens.unsqueeze(-1))

    def _forward(self, ids: Tensor) -> None:
        padding = {} if self._mask is None else {"attention_mask": self._mask, "position_ids": self._positions(ids)}
        out = self._network(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1, **padding)
        self._cache = out.past_key_values
        self.logits = finite(out.logits[:, -1].float())

    def _positions(self, ids: Tensor) -> Tensor:
        """Count real tokens only, so that padding does not move a prompt: (B, T)."""
        assert self._mask is not None
        return (self._mask.cumsum(dim=-1) - 1).clamp_(min=0)[:, -ids.shape[1] :]


def decode_rows(network: Any, prompts: dict[tuple[int, ...], list[Row]], eos: Collection[int], decode: Decode) -> None:
    """Generate until every row has finished. Each prompt is run once, its cache repeated for its rows."""
    live = [row for rows in prompts.values() for row in rows]
    for row in live:
        row.started = time.perf_counter()
    cached = Cached(network, list(prompts))
    cached.select([place for place, rows in enumerate(prompts.values()) for _ in rows])
    while live:
        tokens = _next_tokens(cached.logits, live, eos, decode)
        left = [place for place, row in enumerate(live) if row.finish_reason is None]
        if left and len(left) < len(live):
            cached.select(left)
            tokens = tokens[left]
        live = [live[place] for place in left]
        if live:
            cached.step(tokens)


def _next_tokens(logits: Tensor, rows: Sequence[Row], eos: Collection[int], decode: Decode) -> Tensor:
    """Draw every row's next token and let the row take it: (B, V) -> (B,)."""
    tokens = draw(logits, [row.request.temperature for row in rows], [row.next_uniform() for row in rows])
    logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)
    for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
        row.take(token, logprob, eos, decode)
    return tokens
