"""Draw tokens so that a response depends on its own request alone.

Every token takes one uniform number, a hash of (seed, question, sample, position), and inverts the cumulative
distribution at it. No random state is shared, so which other requests stand in the batch, how large the batch is and
where a run was killed change nothing but float noise: a token can flip only where the number falls within about 1e-6 of
a boundary between two tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from catto.engines import Generation, Request

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
