"""Time 8 samples of 32 tokens after a 128-token prompt: our engine beside `model.generate`, interleaved.

Both arms sample at temperature 1 from the full vocabulary and neither can end early. The model is SmolLM2-135M from the
folder that CATTO_SMOLLM2 names, else a random Llama of its shape. The last line is one JSON object; `vs_generate` is
the median over the repeats of our time divided by theirs, so below 1 is ours ahead.

    python benchmarks/generate.py --repeats 7 --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from catto.engines import Request
from catto.engines.transformers import TransformersEngine
from catto.prompts import prompt_ids
from catto.records import Message

SAMPLES, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 8, 128, 32, 49152


def random_smollm2() -> TransformersEngine:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    words = Tokenizer(models.WordLevel({f"w{place}": place for place in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    return TransformersEngine(LlamaForCausalLM(config).eval(), tokenizer, model_name="random SmolLM2-135M shape")


def smollm2() -> TransformersEngine:
    """The model without end-of-sequence tokens, so that both arms always make 8 x 32 tokens."""
    folder = os.environ.get("CATTO_SMOLLM2")
    engine = TransformersEngine.load(folder, dtype=torch.float32) if folder else random_smollm2()
    engine.network.generation_config.eos_token_id = None
    engine.network.generation_config.pad_token_id = 0
    engine.tokenizer.eos_token = None
    return TransformersEngine(engine.network, engine.tokenizer, batch_size=SAMPLES, model_name=engine.model)


def chat_of(engine: TransformersEngine) -> tuple[Message, ...]:
    """A chat whose prompt has exactly 128 tokens."""
    for words in range(1, PROMPT_TOKENS + 1):
        chat = (Message(role="user", content="the" + " the" * words),)
        if len(prompt_ids(engine.tokenizer, chat)) == PROMPT_TOKENS:
            return chat
    raise ValueError(f"no chat renders to {PROMPT_TOKENS} tokens with this template")


def ours(engine: TransformersEngine) -> Callable[[], int]:
    requests = [
        Request(question="q", sample=sample, messages=chat_of(engine), temperature=1.0, max_tokens=NEW_TOKENS)
        for sample in range(SAMPLES)
    ]
    return lambda: sum(generation.tokens or 0 for generation in engine.generate(requests))


def theirs(engine: TransformersEngine) -> Callable[[], int]:
    prompt = torch.tensor([prompt_ids(engine.tokenizer, chat_of(engine))], device=engine.network.device)
    # top_k=0 takes the default of 50 off: the same distribution as ours, and less work for this arm
    settings: dict[str, Any] = {"num_return_sequences": SAMPLES, "do_sample": True, "top_k": 0, "temperature": 1.0}
    settings |= {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}

    def run() -> int:
        out = engine.network.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        return int(out[:, PROMPT_TOKENS:].numel())

    return run


def seconds(arm: Callable[[], int]) -> float:
    start = time.perf_counter()
    tokens = arm()
    elapsed = time.perf_counter() - start
    if tokens != SAMPLES * NEW_TOKENS:
        raise ValueError(f"{tokens} tokens were generated, expected {SAMPLES * NEW_TOKENS}")
    return elapsed


def interleaved(arms: dict[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Time the arms in turn, the order reversed every other repeat, after one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    for repeat in range(repeats):
        for name in list(arms)[:: 1 if repeat % 2 == 0 else -1]:
            times[name].append(seconds(arms[name]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engine = smollm2()
    times = interleaved({"catto": ours(engine), "generate": theirs(engine)}, arguments.repeats)
    ratio = statistics.median(a / b for a, b in zip(times["catto"], times["generate"], strict=True))
    print(f"{engine.model}, {engine.name}, {arguments.threads} threads, {arguments.repeats} repeats")
    print(f"{'arm':<10} {'median s':>9} {'min s':>9} {'tokens/s':>9}")
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:<10} {middle:>9.3f} {min(values):>9.3f} {SAMPLES * NEW_TOKENS / middle:>9.1f}")
    medians = {f"{name}_seconds": statistics.median(values) for name, values in times.items()}
    print(json.dumps({"vs_generate": ratio, **medians, "model": engine.model, "threads": arguments.threads}))


if __name__ == "__main__":
    main()
