"""Generate with a causal language model of Transformers, so that a response depends on its own request alone.

Every token takes one uniform number, a hash of (seed, question, sample, position), and inverts the cumulative
distribution at it. No random state is shared, so the other requests of the batch, the batch size and the place where a
run was killed change nothing but float noise: a token can flip only where the number falls within about 1e-6 of a
boundary between two tokens.

The head runs in fp32, on the last position only. Each prompt runs once for all of its samples, and what the prompts of
a batch begin with runs once for all of them. The hidden states that go into the head may be kept: with them the head
alone gives the logits of any position again.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from catto.engines import Request, stop_end
from catto.prompts import common_tokens

# Any valid id works: a padded position is masked (left padding) or comes after all that is read (right padding).
PAD = 0


def uniform(seed: int, question: str, sample: int, position: int) -> float:
    """Hash (seed, question, sample, position) to a number in [0, 1), a multiple of 2^-53."""
    digest = hashlib.sha256(f"{seed}:{sample}:{position}:{question}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> Tensor:
    """Pick one token per row: the argmax (lowest id on ties) at temperature 0, else by inverting the distribution.

    That is the first id j with P(id <= j) > u under softmax(logits / temperature), full vocabulary, float64.
    logits: (B, V) fp32; temperatures: (B,) >= 0; uniforms: (B,) in [0, 1) -> (B,) token ids.

    >>> draw(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), [0.0, 1.0], [0.9, 0.4]).tolist()
    [1, 0]
    """
    tokens = logits.argmax(dim=-1)
    hot = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if hot:
        wide = as_float64(logits[hot])
        heat = wide.new_tensor([[temperatures[row]] for row in hot])
        cumulative = wide.sub_(wide.amax(dim=-1, keepdim=True)).div_(heat).exp_().cumsum_(dim=-1)
        # u <= 1 - 2^-53, so u * total is below total after rounding too: the id found exists and has probability
        targets = wide.new_tensor([[uniforms[row]] for row in hot]) * cumulative[:, -1:]
        tokens[hot] = torch.searchsorted(cumulative, targets, right=True).squeeze(-1).to(logits.device)
    return tokens


def as_float64(logits: Tensor) -> Tensor:
    """Copy logits to float64, on the CPU where the device has no float64 (Apple's MPS)."""
    return (logits.cpu() if logits.device.type == "mps" else logits).to(torch.float64, copy=True)


@dataclass
class Head:
    """The output head while `evaluating`: `states` went into it last, (B, T, H); `instead` replaces its next input."""

    states: Tensor | None = None
    instead: Tensor | None = None


@contextmanager
def evaluating(network: Any) -> Iterator[Head]:
    """Switch off dropout and gradients and run the head in fp32; restore every module's mode afterwards.

    bf16 logits move a two-label confidence by up to 1.5 points. Only the head's matrix product is replaced: what the
    model does to its logits afterwards (soft caps, scales) is its own code, in fp32. Autocast is off too, except inside
    a model that Accelerate trains in mixed precision: its forward enters autocast itself, so its layers run as in
    training and its head in fp32.
    """
    module: Any = network.get_output_embeddings()
    product = module.forward
    if module.weight.dtype != torch.float32:
        if type(getattr(module, "original_module", module)) is not nn.Linear:  # PEFT's `modules_to_save` wraps it
            raise ValueError(
                f"the output head is a {type(module).__name__} in {module.weight.dtype}: load the model in float32"
            )
        weight, bias = module.weight.float(), getattr(module, "bias", None)
        product = functools.partial(nn.functional.linear, weight=weight, bias=None if bias is None else bias.float())
    head = Head()

    def forward(states: Tensor) -> Tensor:
        if head.instead is not None:
            states, head.instead = head.instead.to(states.device), None
        head.states = states
        with torch.autocast(states.device.type, enabled=False):  # a model in training enters it in its own forward
            return product(states.float())  # type: ignore[no-any-return]

    modes = [(part, part.training) for part in network.modules()]
    attributes = vars(module)
    before = attributes.get("forward")  # set where a library has wrapped it on this instance
    network.eval()
    attributes["forward"] = forward
    try:
        with torch.inference_mode(), torch.autocast(network.device.type, enabled=False):
            yield head
    finally:
        del attributes["forward"]
        if before is not None:
            attributes["forward"] = before
        for part, training in modes:
            part.training = training


def counts_padding(network: Any) -> bool:
    """Whether padding moves the tokens after it: layers that go by the sequence as it is laid out, not by positions.

    These are recurrent layers, distances (ALiBi), GPT-Neo's local windows, and positions that a model counts itself.
    """
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    config = base.config.get_text_config()
    by_place = getattr(config, "alibi", False) or "local" in getattr(config, "attention_layers", ())
    return by_place or "position_ids" not in inspect.signature(base.base_model.forward).parameters


def last_logits(network: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Logits after the last token of each sequence: one forward, right padding, no cache -> (B, V) fp32.

    A causal model never looks right, so the padding needs no mask.
    """
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths)
    ids = torch.tensor([[*sequence, *[PAD] * (width - len(sequence))] for sequence in sequences], device=network.device)
    keep = torch.tensor(lengths, device=network.device).unsqueeze(-1) - 1
    return _finite(network(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[:, 0])


def state_logits(network: Any, head: Head, states: Tensor) -> Tensor:
    """Logits of kept hidden states, (B, H) -> (B, V) fp32, without running the tokens before them.

    The network runs on a single token per row and its head takes `states` instead of what comes out, so that what the
    architecture does to its logits is the model's own code.
    """
    head.instead = states.unsqueeze(1)
    ids = torch.full((len(states), 1), PAD, device=network.device)
    return _finite(network(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1])


def _finite(logits: Tensor) -> Tensor:
    """Logits in fp32; ValueError where one is NaN or the largest is infinite."""
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise ValueError("the model's logits are not finite (NaN or infinity)")
    return logits.float()


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
        self._room: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append along the sequence and return everything: (B, heads, T, width) each."""
        past = self.keys.shape[-2]
        length = past + key_states.shape[-2]
        if not self._room or self._room[0].shape[-2] < length:
            filled = (self.keys, self.values)
            spare = length + max(32, length // 4)
            self._room = [states.new_empty(*states.shape[:2], spare, states.shape[-1]) for states in filled]
            for room, states in zip(self._room, filled, strict=True):
                room[:, :, :past] = states
        keys, values = self._room
        keys[:, :, past:length] = key_states
        values[:, :, past:length] = value_states
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Any) -> None:
        """Select rows; the room belongs to the rows that it was made for."""
        super().reorder_cache(beam_idx)
        self._room = []


class Cached:
    """A batch of sequences in a model's cache, with each one's next-token logits (B, V) fp32 and state (B, H)."""

    logits: Tensor
    states: Tensor

    def __init__(self, network: Any, head: Head, prompts: Sequence[Sequence[int]]) -> None:
        """Run what all prompts begin with once, then the rest of each, padded on the left.

        Equal lengths need no mask, which is the faster path. A layer that is windowed or recurrent counts the padding
        between the beginning and the rest, so a network with such a layer runs every prompt whole.
        """
        self._network, self._head = network, head
        self._mask: Tensor | None = None
        self._past: dict[str, Any] = {}  # the cache, of the kind that the model makes, under its own name for it
        common = prompts[0][: common_tokens(prompts)]
        if common:
            self.step(torch.tensor([common], device=network.device))
            if all(type(layer) is DynamicLayer for layer in self._cache.layers):
                self.select([0] * len(prompts))
            else:
                common, self._past = (), {}
        rests = [prompt[len(common) :] for prompt in prompts]
        width = max(map(len, rests))
        pads = [width - len(rest) for rest in rests]
        seen = [[1] * len(common) + [0] * pad + [1] * (width - pad) for pad in pads]
        ids = [[*[PAD] * pad, *rest] for pad, rest in zip(pads, rests, strict=True)]
        mask = torch.tensor(seen, device=network.device) if any(pads) else None
        self.step(torch.tensor(ids, device=network.device), mask)
        # Plain layers only: windowed, recurrent, quantized and shared ones have their own ways.
        layers = self._cache.layers
        for place, layer in enumerate(layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                layers[place] = RoomyLayer(layer)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row named k times becomes k rows."""
        indices = torch.tensor(rows, device=self.logits.device)
        # index_select on every kind of layer; batch_select_indices is missing on linear-attention ones
        self._cache.reorder_cache(indices)
        self.logits, self.states = self.logits[indices], self.states[indices]
        self._mask = self._mask[indices] if self._mask is not None else None

    def step(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """Append tokens to every row: (B, T) ids. `mask`, where padding is among them: 1 for a token, (B, all so far).

        Positions count real tokens, so padding does not move a prompt.
        """
        if mask is None and self._mask is not None:
            mask = torch.cat([self._mask, torch.ones_like(ids)], dim=-1)
        self._mask, padding = mask, {}
        if mask is not None:
            positions = (mask.cumsum(dim=-1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
            padding = {"attention_mask": mask, "position_ids": positions}
        out = self._network(input_ids=ids, use_cache=True, logits_to_keep=1, **self._past, **padding)
        assert self._head.states is not None
        self._past = {name: out[name] for name in ("past_key_values", "cache_params") if out.get(name) is not None}
        if not self._past:
            raise ValueError(f"{type(self._network).__name__} returns no cache to continue from")
        (self._cache,) = self._past.values()
        self.logits, self.states = _finite(out.logits[:, -1]), self._head.states[:, -1]


@dataclass
class Row:
    """One response while it is generated. `ids` never holds the end-of-sequence token."""

    request: Request
    prompt: tuple[int, ...]
    limit: int  # most tokens it may have
    ids: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # the head's input for each token, where a request asks
    logprob: float = 0.0  # sum over `ids` at temperature 1
    end: int | None = None  # where the stop text ends
    finish_reason: str | None = None
    seconds: float = 0.0


def decode_rows(
    network: Any, rows: Sequence[Row], eos: Collection[int], decode: Callable[[Sequence[int]], str]
) -> None:
    """Generate until every row has finished: at end of sequence, a stop text or its limit.

    Each prompt runs once and its cache is repeated for its rows. A row that has finished leaves the batch.
    """

    @functools.cache
    def may_end(token: int, stop: str) -> bool:
        """Whether a token can complete a stop text. A printable ASCII character shows in its token's own text."""
        last = stop[-1]
        return last in decode([token]) or last.isspace() or not last.isascii()

    started = time.perf_counter()
    live = list(rows)
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
    with evaluating(network) as head:
        cached = Cached(network, head, list(places))
        cached.select([places[row.prompt] for row in live])
        while True:
            logits, requests = cached.logits, [row.request for row in live]
            uniforms = [
                uniform(r.seed, r.question, r.sample, len(row.ids)) for r, row in zip(requests, live, strict=True)
            ]
            tokens = draw(logits, [request.temperature for request in requests], uniforms)
            logprobs = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(dim=-1)
            drawn = zip(live, tokens.tolist(), logprobs.tolist(), cached.states, strict=True)
            for row, token, logprob, state in drawn:
                stops = row.request.stop
                if row.request.keep_states:
                    row.states.append(state)
                if token in eos:
                    row.finish_reason = "stop"
                else:
                    row.ids.append(token)
                    row.logprob += logprob
                    if any(may_end(token, stop) for stop in stops):
                        row.end = stop_end(decode(row.ids), stops)
                    if row.end is not None:
                        row.finish_reason = "stop"
                    elif len(row.ids) == row.limit:
                        row.finish_reason = "length"
                row.seconds = time.perf_counter() - started
            left = [place for place, row in enumerate(live) if row.finish_reason is None]
            if not left:
                return
            if len(left) < len(live):
                cached.select(left)
                tokens = tokens[left]
                live = [live[place] for place in left]
            cached.step(tokens.unsqueeze(-1))
