"""Tiny random models with a real word-level tokenizer and chat template: no download, a forward takes milliseconds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# A word takes the space before it, as in most real vocabularies: `A` and ` A` are different tokens.
# Digits stand alone, so that every number can be written.
PATTERN = r"</?\w+>| ?[^\W\d]+| ?\d|\W"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")  # added but not special, as in Qwen3
SPECIAL = ("<pad>", "<eos>", "<unk>", "<turn>")
WORDS = (
    "system user assistant question answer reason choose the a of is it because right wrong option label premise "
    "hypothesis entailment neutral contradiction witness says true false not and or A B C D E 0 1 2 3 4 5 6 7 8 9"
)
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),  # a sliding window: pass sliding_window
    "gpt2": (GPT2Config, GPT2LMHeadModel),  # absolute positions: padding that moves a prompt shows
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),  # soft-capped logits: pass final_logit_softcapping
    "gpt_neo": (GPTNeoConfig, GPTNeoForCausalLM),  # windows in an ordinary cache: pass attention_types, window_size
    "mpt": (MptConfig, MptForCausalLM),  # distances instead of positions
    "mamba": (MambaConfig, MambaForCausalLM),  # recurrent, with a cache of another name
}


def tiny_tokenizer(texts: Iterable[str] = ()) -> Any:
    """A word-level tokenizer whose decoding gives the text back. `texts` add their words to the vocabulary."""
    words = [form for word in WORDS.split() for form in (word, f" {word}")]
    found = [piece for text in texts for piece in re.findall(PATTERN, text)]
    vocabulary = dict.fromkeys([*SPECIAL, *TAGS, "\n", *" .,:;?!()<>/-'\"", *words, *found])
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
        chat_template=TEMPLATE,
    )


def tiny_model(seed: int = 0, arch: str = "qwen3", **overrides: Any) -> Any:
    """A random fp32 model for `tiny_tokenizer()`; pass `vocab_size=len(tokenizer)` for a larger vocabulary.

    Wide initial weights (0.3) give distributions far from uniform.
    """
    tokenizer = tiny_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config_class, model_class = ARCHITECTURES[arch]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config_class(**settings | overrides)).eval()
