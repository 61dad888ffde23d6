"""A small Qwen3 and a word-level tokenizer, to train from scratch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from catto.prompts import TAGS
from catto.recipe.settings import ScratchModel

SPECIAL = ("<pad>", "<eos>", "<unk>", "<turn>")
ROLES = ("system", "user", "assistant", "\n", " ")
# A word token includes a preceding space and a following percent sign, which halves the number of tokens.
PATTERN = r"</?\w+>| ?\w+%?|\s|[^\w\s]"
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


def word_tokenizer(texts: Iterable[str]) -> Any:
    """Make a tokenizer whose vocabulary is the words and punctuation marks of `texts`. Decoding restores the text.

    >>> tokenizer = word_tokenizer(["one in 5%"])
    >>> tokenizer.decode(tokenizer("one in 5%")["input_ids"])
    'one in 5%'
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: set[str] = set()
    for text in texts:
        words.update(re.findall(PATTERN, text))
    distinct_tokens = dict.fromkeys([*SPECIAL, *TAGS, *ROLES, *sorted(words)])  # a dict, to keep their order
    vocabulary = {token: token_id for token_id, token in enumerate(distinct_tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Added tokens are separated from the text before PATTERN splits it, and decoded unchanged.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
        chat_template=TEMPLATE,
    )


def scratch_model(tokenizer: Any, settings: ScratchModel, seed: int) -> Any:
    """Make a randomly initialised Qwen3 for the tokenizer's vocabulary. Torch's global random state is unchanged."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.width,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.width // settings.heads,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
