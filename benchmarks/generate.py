"""Time the generation of 8 samples of 32 tokens after a 128-token prompt: our engine against `model.generate`.

Both arms sample at temperature 1 from the full vocabulary, and neither can end early. They run in turn. The model is
SmolLM2-135M from the folder in CATTO_SMOLLM2 or, if it is not set, a random Llama of the same shape. The last line is a
JSON object. `vs_generate` is the median over the repeats of our time divided by theirs: below 1, ours is faster.

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

SAMPLES = 8
PROMPT_TOKENS = 128
NEW_TOKENS = 32
VOCABULARY = 49152

# Generates all samples and returns the number of generated tokens.
Arm = Callable[[], int]


def make_random_smollm2() -> TransformersEngine:
    """Return an engine with a random Llama of SmolLM2-135M's shape."""
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
    token_ids = {f"w{token_id}": token_id for token_id in range(VOCABULARY)}
    word_tokenizer = Tokenizer(models.WordLevel(token_ids, unk_token="w0"))
    word_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer, unk_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    return TransformersEngine(LlamaForCausalLM(config).eval(), tokenizer, model_name="random SmolLM2-135M shape")


def load_smollm2() -> TransformersEngine:
    """Return an engine without end-of-sequence tokens, so that both arms always generate 8 x 32 tokens."""
    folder = os.environ.get("CATTO_SMOLLM2")
    engine = TransformersEngine.load(folder, dtype=torch.float32) if folder else make_random_smollm2()
    engine.network.generation_config.eos_token_id = None
    engine.network.generation_config.pad_token_id = 0
    engine.tokenizer.eos_token = None
    return TransformersEngine(engine.network, engine.tokenizer, batch_size=SAMPLES, model_name=engine.model)


def make_chat(engine: TransformersEngine) -> tuple[Message, ...]:
    """Return a chat whose prompt has exactly 128 tokens."""
    for words in range(1, PROMPT_TOKENS + 1):
        chat = (Message(role="user", content="the" + " the" * words),)
        if len(prompt_ids(engine.tokenizer, chat)) == PROMPT_TOKENS:
            return chat
    raise ValueError(f"no chat has exactly {PROMPT_TOKENS} tokens with this chat template")


def make_our_arm(engine: TransformersEngine) -> Arm:
    """Return the arm that uses our engine."""
    chat = make_chat(engine)
    requests = []
    for sample in range(SAMPLES):
        request = Request(question="q", sample=sample, messages=chat, temperature=1.0, max_tokens=NEW_TOKENS)
        requests.append(request)

    def generate_with_engine() -> int:
        return sum(generation.tokens or 0 for generation in engine.generate(requests))

    return generate_with_engine


def make_their_arm(engine: TransformersEngine) -> Arm:
    """Return the arm that calls `generate` of the same model."""
    prompt = torch.tensor([prompt_ids(engine.tokenizer, make_chat(engine))], device=engine.network.device)
    settings: dict[str, Any] = {
        "num_return_sequences": SAMPLES,
        "do_sample": True,
        # 0 turns off the default of 50: the distribution is the same as ours, and this arm has less work.
        "top_k": 0,
        "temperature": 1.0,
        "max_new_tokens": NEW_TOKENS,
        "min_new_tokens": NEW_TOKENS,
    }

    def generate_with_model() -> int:
        token_ids = engine.network.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        return int(token_ids[:, PROMPT_TOKENS:].numel())

    return generate_with_model


def time_arm(arm: Arm) -> float:
    """Return the seconds that an arm takes, and check the number of tokens."""
    start = time.perf_counter()
    tokens = arm()
    elapsed = time.perf_counter() - start
    if tokens != SAMPLES * NEW_TOKENS:
        raise ValueError(f"{tokens} tokens were generated, expected {SAMPLES * NEW_TOKENS}")
    return elapsed


def time_interleaved(arms: dict[str, Arm], repeats: int) -> dict[str, list[float]]:
    """Time the arms in turn after one warm-up each; every other repeat runs them in reverse order."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for arm in arms.values():
        arm()
    for repeat in range(repeats):
        names = list(arms)
        if repeat % 2 == 1:
            names.reverse()
        for name in names:
            times[name].append(time_arm(arms[name]))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engine = load_smollm2()
    arms = {"catto": make_our_arm(engine), "generate": make_their_arm(engine)}
    times = time_interleaved(arms, arguments.repeats)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(times["catto"], times["generate"], strict=True))
    print(f"{engine.model}, {engine.name}, {arguments.threads} threads, {arguments.repeats} repeats")
    print(f"{'arm':<10} {'median s':>9} {'min s':>9} {'tokens/s':>9}")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:<10} {median:>9.3f} {min(seconds):>9.3f} {SAMPLES * NEW_TOKENS / median:>9.1f}")
    medians = {f"{name}_seconds": statistics.median(seconds) for name, seconds in times.items()}
    print(json.dumps({"vs_generate": ratio, **medians, "model": engine.model, "threads": arguments.threads}))


if __name__ == "__main__":
    main()
