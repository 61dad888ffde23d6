"""Real tokenizers of several kinds, trained here on a few lines: byte-level BPE, sentencepiece-like, word-level."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tiny import TAGS, TEMPLATE, tiny_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from catto.answer.tokens import LabelPosition

# One mark may lead a word, newlines never do: the split of the Qwen and Llama 3 families.
SPLIT = r"[^\r\n\w]?[^\W\d]+|\d| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+"
PROSE = "the answer is that it follows because a cat sat on the mat and the dog did not, so it is neutral or not\n"
WORDS = ("entailment", "neutral", "contradiction")


def corpus(*extra: str) -> list[str]:
    blocks = [f"<think>\n{PROSE}</think>\n<answer>\n{label}\n</answer>" for label in (*"ABCDE", *WORDS)]
    return [*blocks, PROSE, *(f" {x} ({x}) **{x}** {x}. é 猫 🐈" for x in "ABCDE"), *extra] * 8


def wrapped(tokenizer: Any, **special: str) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<turn>"],
        chat_template=TEMPLATE,
        **special,
    )


def byte_level(extra: Sequence[str] = (), *, split: str | None = SPLIT, tags: bool = False, size: int = 420) -> Any:
    """Byte-level BPE. `tags`: the think and answer tags are tokens of their own, as in Qwen3."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(split), behavior="isolated")] if split else []
    byte_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_step])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<eos>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(*extra), trainer)
    if tags:
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return wrapped(tokenizer)


def metaspace() -> Any:
    """Sentencepiece-like BPE: a dummy space before the text, bytes for what is unknown."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<pad>", "<eos>", "<turn>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", behavior="isolated")
    tokenizer.train_from_iterator(corpus(), trainer)
    return wrapped(tokenizer, unk_token="<unk>")


def unigram() -> Any:
    """Unigram with Metaspace, as T5's and Gemma's first generations."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", behavior="isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "<pad>", "<eos>", "<turn>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return wrapped(tokenizer, unk_token="<unk>")


FUSED = [f"<answer>{letter}" for letter in "ABCDE"] * 40  # makes ">A" one token
NEWLINE = [f">\n{letter}\n<" for letter in "ABCDE"] * 40  # makes "\nA" one token where nothing splits the text


@cache
def kinds() -> dict[str, Any]:
    return {
        "byte-level": byte_level(),
        "byte-level, tags added": byte_level(tags=True),
        "byte-level, >A is one token": byte_level(FUSED),
        "byte-level, newline and letter are one token": byte_level(NEWLINE, split=r"\n[A-E]|[<>/\s]|[^<>/\s]+"),
        "metaspace": metaspace(),
        "unigram": unigram(),
        "word-level": tiny_tokenizer(corpus()),
    }


def firsts(place: LabelPosition) -> dict[str, int]:
    """Each label's first token."""
    return {label: path[0] for label, path in place.paths.items()}
