"""What the engine's tests share: ragged requests and contexts, and dense references (no padding, no cache, float64)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_tokenizer

from catto.engines import Context, Generation, Request
from catto.engines.decoding import hash_uniform
from catto.prompts import prompt_ids
from catto.records import Message

TOKENIZER = tiny_tokenizer()
ARCHITECTURES = [
    pytest.param({"arch": "qwen3"}, id="qwen3"),
    pytest.param({"arch": "llama"}, id="llama"),
    pytest.param(
        {"arch": "gpt2"}, id="gpt2"
    ),  # rotary positions hide a prompt moved by its padding, absolute ones do not
    # a window of 6 tokens is shorter than every prompt here; soft caps act on logits of this size
    pytest.param({"arch": "mistral", "sliding_window": 6}, id="mistral-window"),
    pytest.param({"arch": "gemma2", "sliding_window": 6, "final_logit_softcapping": 3.0}, id="gemma2-softcap"),
    # these take no position ids, or count padding as tokens of their window
    pytest.param(
        {"arch": "gpt_neo", "attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 6},
        id="gpt_neo-window",
    ),
    pytest.param({"arch": "mpt"}, id="mpt-distances"),
    pytest.param({"arch": "mamba"}, id="mamba-recurrent"),
]
each_architecture = pytest.mark.parametrize("shape", ARCHITECTURES)
BATCH_SIZES = (1, 3, 16)


def chat(text: str) -> tuple[Message, ...]:
    return (Message(role="system", content="choose the right answer"), Message(role="user", content=text))


def ragged_requests(questions: int = 5, samples: int = 3, **settings: Any) -> list[Request]:
    """Prompts of different lengths, out of order, k samples each; temperatures 0, 0.7 and 1.4 within one question."""
    order = [(3 * q) % questions for q in range(questions)]
    return [
        Request(
            question=f"q{q}",
            sample=s,
            messages=chat("is it" + " A or B" * q),
            **{"temperature": 0.7 * s, "max_tokens": 9, "seed": 5} | settings,
        )
        for s in range(samples)
        for q in order
    ]


def by_key(generations: Iterator[Generation]) -> dict[tuple[str, int], Generation]:
    found = list(generations)
    assert len({generation.key for generation in found}) == len(found)
    return {generation.key: generation for generation in found}


def tokens_of(generations: Iterator[Generation]) -> dict[tuple[str, int], tuple[int, ...] | None]:
    return {key: generation.token_ids for key, generation in by_key(generations).items()}


def dense_logits(model: Any, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0, -1].double().numpy()


def log_softmax(logits: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def dense_response(model: Any, request: Request) -> tuple[tuple[int, ...], float | None]:
    """Generate one request alone without cache or padding: (ids, mean log-probability at temperature 1)."""
    prompt, ids, logprobs = list(prompt_ids(TOKENIZER, request.messages)), [], []
    for position in range(request.max_tokens):
        logits = dense_logits(model, [*prompt, *ids])
        token = int(logits.argmax())
        if request.temperature > 0:
            cdf = np.exp(log_softmax(logits / request.temperature)).cumsum()
            number = hash_uniform(request.seed, request.question, request.sample, position)
            token = int(np.searchsorted(cdf, number, side="right"))
        if token == TOKENIZER.eos_token_id:
            break
        ids.append(token)
        logprobs.append(log_softmax(logits)[token])
    return tuple(ids), float(np.mean(logprobs)) if ids else None


@contextmanager
def forwards(module: Any) -> Iterator[list[tuple[int, ...]]]:
    """Record the shape of every output of a module."""
    shapes: list[tuple[int, ...]] = []
    handle = module.register_forward_hook(lambda _m, _a, out: shapes.append(tuple(getattr(out, "logits", out).shape)))
    try:
        yield shapes
    finally:
        handle.remove()


def ragged_contexts() -> list[Context]:
    return [
        Context(messages=chat("is it" + " A" * (n % 4)), prefix=tuple(range(20, 20 + n)), candidates=(5 + n, 40, 41))
        for n in (0, 7, 3, 1, 12, 2, 5)
    ]
