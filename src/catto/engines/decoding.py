"""Draw tokens so that a response depends on its own request alone.

Every token takes one uniform number, a hash of (seed, question, sample, position), and inverts the cumulative
distribution at it. No random state is shared, so which other requests stand in the batch, how large the batch is and
where a run was killed change nothing but float noise: a token can flip only where the number falls within about 1e-6 of
a boundary between two tokens.

Run a causal language model of Transformers for its next-token logits: fp32, last position only, prompts shared.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from catto.engines import Generation, Request

# ---- sampling


Decode = Callable[[Sequence[int]], str]

# A token adds at least one byte of text, except that a tokenizer may trim the first word of what it decodes and may
# spread one character over four byte tokens; the tail that is searched for a stop text is longer by this many tokens.
TAIL_MARGIN = 4


def uniform(seed: int, question: str, sample: int, position: int) -> float:
    """Hash (seed, question, sample, position) to a number in [0, 1), a multiple of 2^-53."""
    digest = hashlib.sha256(f"{seed}:{sample}:{position}:{question}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def draw(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> Tensor:
    """Pick one token a row: the argmax (lowest id on ties) at temperature 0, else `inverse_cdf`.

    logits: (B, V) fp32; temperatures: (B,) >= 0; uniforms: (B,) in [0, 1) -> (B,) token ids.
    """
    tokens = logits.argmax(dim=-1)
    hot = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if hot:
        heat = torch.tensor([temperatures[row] for row in hot], dtype=torch.float64)
        numbers = torch.tensor([uniforms[row] for row in hot], dtype=torch.float64)
        tokens[hot] = inverse_cdf(logits[hot], heat, numbers)
    return tokens


def inverse_cdf(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Find the first id j with P(id <= j) > u under softmax(logits / temperature), full vocabulary, float64.

    logits: (B, V); temperatures: (B,) > 0; uniforms: (B,) in [0, 1) -> (B,) token ids on the logits' device.
    """
    wide = as_float64(logits)
    wide.sub_(wide.amax(dim=-1, keepdim=True)).div_(temperatures.to(wide.device).unsqueeze(-1))
    cumulative = wide.exp_().cumsum_(dim=-1)
    # u <= 1 - 2^-53, so u * total is below total after rounding too: the id found exists and has probability
    targets = uniforms.to(wide.device).unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).squeeze(-1).to(logits.device)


def as_float64(logits: Tensor) -> Tensor:
    """Copy logits to float64, on the CPU where the device has no float64 (Apple's MPS)."""
    return (logits.cpu() if logits.device.type == "mps" else logits).to(torch.float64, copy=True)


def stop_end(text: str, stops: Collection[str]) -> int | None:
    """Find where the first stop text ends in `text`; None where none stands in it."""
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return min(ends, default=None)


@dataclass
class Row:
    """One response while it is being generated. `ids` never holds the end-of-sequence token."""

    request: Request
    prompt_tokens: int
    limit: int  # most tokens it may have
    ids: list[int] = field(default_factory=list)
    logprob: float = 0.0  # sum over `ids` at temperature 1
    end: int | None = None  # where the stop text ends
    finish_reason: str | None = None
    started: float = 0.0
    seconds: float = 0.0

    def next_uniform(self) -> float:
        """The number that decides this row's next token."""
        return uniform(self.request.seed, self.request.question, self.request.sample, len(self.ids))

    def take(self, token: int, logprob: float, eos: Collection[int], decode: Decode) -> None:
        """Append a token, or finish at end of sequence, stop text or the limit."""
        if token in eos:
            return self._finish("stop")
        self.ids.append(token)
        self.logprob += logprob
        self.end = self._find_stop(decode)
        if self.end is not None:
            return self._finish("stop")
        return self._finish("length") if len(self.ids) == self.limit else None

    def _find_stop(self, decode: Decode) -> int | None:
        """Search the decoded tail first; decode everything only when it holds a stop text."""
        stops = self.request.stop
        if not stops:
            return None
        tail = max(len(stop.encode()) for stop in stops) + TAIL_MARGIN
        if len(self.ids) > tail and stop_end(decode(self.ids[-tail:]), stops) is None:
            return None
        return stop_end(decode(self.ids), stops)

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.seconds = time.perf_counter() - self.started

    def generation(self, decode: Decode, model: str) -> Generation:
        """The finished response; its text ends after the stop text, its ids with the token that completed it."""
        return Generation(
            question=self.request.question,
            sample=self.request.sample,
            text=decode(self.ids)[: self.end],
            token_ids=tuple(self.ids),
            mean_logprob=self.logprob / len(self.ids) if self.ids else None,
            prompt_tokens=self.prompt_tokens,
            tokens=len(self.ids),
            finish_reason=self.finish_reason,
            model=model,
            seconds=self.seconds,
        )


# ---- decoding


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
