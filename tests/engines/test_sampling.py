"""How tokens are drawn and how a response ends."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    TOKENIZER,
    by_key,
    chat,
    dense_logits,
    log_softmax,
    ragged_contexts,
    ragged_requests,
    tokens_of,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from catto.engines import Context, Request
from catto.engines.decoding import draw_tokens, hash_uniform
from catto.engines.transformers import TransformersEngine
from catto.prompts import prompt_ids
from catto.token_ids import decode_ids


def test_uniform_is_the_documented_hash() -> None:
    """sha256("7:2:3:q") starts with 53 bits that, read as a binary fraction, are the number."""
    import hashlib

    bits = f"{int(hashlib.sha256(b'7:2:3:q').hexdigest(), 16):0256b}"[:53]
    assert hash_uniform(7, "q", 2, 3) == sum(2.0 ** -(place + 1) for place, bit in enumerate(bits) if bit == "1")
    keys = [(s, q, k, p) for s in (0, 1, 11) for q in ("a", "1:a") for k in (0, 1, 11) for p in (0, 1, 11)]
    assert len({hash_uniform(*key) for key in keys}) == len(keys)


def test_inverse_cdf_by_hand() -> None:
    """Probabilities 0, 1/4, 0, 1/4, 1/4, 1/4, 0: a boundary belongs to the upper token; an empty token is never hit."""
    none = -torch.inf
    logits = torch.tensor([[none, 0.0, none, 0.0, 0.0, 0.0, none]]).expand(7, 7)
    numbers = [0.0, 0.2499, 0.25, 0.4999, 0.5, 0.75, 1 - 2.0**-53]
    assert draw_tokens(logits, [1.0] * 7, numbers).tolist() == [1, 1, 3, 3, 4, 5, 5]


@given(st.floats(1.0, 1e6))
def test_the_largest_number_stays_below_the_total(total: float) -> None:
    assert (1 - 2.0**-53) * total < total


def test_temperature_halves_and_doubles_log_odds_by_hand() -> None:
    """Odds 4:1; at temperature 2 they are 2:1 (boundary 2/3), at 0.5 16:1 (boundary 16/17); 0 takes the argmax."""
    logits = torch.tensor([[4.0, 1.0]]).log().expand(5, 2)
    temperatures = [2.0, 2.0, 0.5, 0.5, 0.0]
    numbers = [2 / 3 - 1e-6, 2 / 3 + 1e-6, 16 / 17 - 1e-6, 16 / 17 + 1e-6, 0.999]
    assert draw_tokens(logits, temperatures, numbers).tolist() == [0, 1, 0, 1, 0]


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert draw_tokens(torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]]), [0.0], [0.9]).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_first_tokens_follow_the_softmax(temperature: float) -> None:
    """Chi-square over 4,000 questions with one prompt; ids expected fewer than 5 times are pooled."""
    model = tiny_model()
    model.generation_config.eos_token_id = None
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.eos_token = None
    engine = TransformersEngine(model, tokenizer, batch_size=1000)
    requests = [
        Request(question=f"q{n}", messages=chat("a"), max_tokens=1, temperature=temperature, seed=3)
        for n in range(4000)
    ]
    ids = [generation.token_ids[0] for generation in engine.generate(requests) if generation.token_ids]
    expected = np.exp(log_softmax(dense_logits(model, prompt_ids(TOKENIZER, chat("a"))) / temperature)) * 4000
    seen = np.bincount(ids, minlength=len(expected))
    rare = expected < 5
    pooled = [*expected[~rare], expected[rare].sum()], [*seen[~rare], seen[rare].sum()]
    assert len(pooled[0]) > 20
    assert stats.chisquare(pooled[1], pooled[0]).pvalue > 1e-3


@pytest.mark.parametrize("listed", [False, True])
def test_end_of_sequence_ends_the_response_and_is_not_part_of_it(listed: bool) -> None:
    model = tiny_model()
    requests = ragged_requests(samples=1, max_tokens=12)
    free = tokens_of(TransformersEngine(model, TOKENIZER).generate(requests))
    ids = free["q0", 0]
    assert ids is not None
    ending = ids[4]
    model.generation_config.eos_token_id = [TOKENIZER.eos_token_id, ending] if listed else ending
    found = by_key(TransformersEngine(model, TOKENIZER).generate(requests))
    for key, whole in free.items():
        assert whole is not None
        cut = whole.index(ending) if ending in whole else None
        assert found[key].token_ids == whole[:cut]
        assert found[key].finish_reason == ("length" if cut is None else "stop")
        assert found[key].tokens == len(whole[:cut])
        assert found[key].text == TOKENIZER.decode(whole[:cut])


def test_an_immediate_end_gives_an_empty_response_without_mean_logprob() -> None:
    model = tiny_model()
    request = Request(question="q", messages=chat("a"), max_tokens=4)
    first = next(TransformersEngine(model, TOKENIZER).generate([request])).token_ids
    assert first is not None
    model.generation_config.eos_token_id = first[0]
    empty = next(TransformersEngine(model, TOKENIZER).generate([request]))
    assert (empty.text, empty.token_ids, empty.tokens) == ("", (), 0)
    assert (empty.mean_logprob, empty.finish_reason) == (None, "stop")


def check_every_stop(engine: TransformersEngine, request: Request) -> int:
    """Stop at many pieces of the free text: the text ends with the first occurrence, the ids with its last token."""
    free = next(engine.generate([request]))
    ids, text, checked = free.token_ids, free.text, 0
    assert ids is not None
    for start in range(0, len(text), 5):
        for stop in {text[start : start + length] for length in (1, 2, 5, 9, 14)}:
            if "\ufffd" in stop or not stop:
                continue
            count = next(n for n in range(1, len(ids) + 1) if stop in decode_ids(engine.tokenizer, ids[:n]))
            found = next(engine.generate([request.model_copy(update={"stop": (stop, "never said")})]))
            assert found.token_ids == ids[:count]
            assert found.text == text[: text.index(stop) + len(stop)]
            assert found.finish_reason == "stop"
            checked += 1
    return checked


def test_stop_texts_may_span_tokens_and_end_inside_one() -> None:
    engine = TransformersEngine(tiny_model(), TOKENIZER)
    request = Request(question="q", messages=chat("a"), max_tokens=24, temperature=1.0)
    assert check_every_stop(engine, request) > 40


def byte_tokenizer() -> Any:
    """One token a byte, so that a character can span several tokens."""
    vocabulary = {symbol: place for place, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    return fast


def speaking_model(tokenizer: Any, text: str) -> tuple[Any, int]:
    """A model that says `text` token by token to its first request, and the number of its tokens."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = tiny_model(vocab_size=len(tokenizer), pad_token_id=None, eos_token_id=None)
    count = iter(range(10**9))

    def speak(_m: Any, _a: Any, out: torch.Tensor) -> torch.Tensor:
        return (
            torch.nn.functional.one_hot(torch.tensor(ids[next(count) % len(ids)]), out.shape[-1]).float() * 9 + 0 * out
        )

    model.lm_head.register_forward_hook(speak)
    return model, len(ids)


def test_stop_texts_work_where_a_character_spans_tokens() -> None:
    tokenizer = byte_tokenizer()
    text = "naïve 🙂🙂 réponse</answer>日本"
    model, length = speaking_model(tokenizer, text)
    engine = TransformersEngine(model, tokenizer)
    request = Request(question="q", messages=chat("é"), max_tokens=length)
    assert next(engine.generate([request])).text == text
    for stop in ("ï", "🙂", "🙂🙂", "e 🙂", "</answer>", "answer>日"):
        model, _ = speaking_model(tokenizer, text)
        found = next(TransformersEngine(model, tokenizer).generate([request.model_copy(update={"stop": (stop,)})]))
        cut = text[: text.index(stop) + len(stop)]
        assert found.text == cut
        assert found.tokens == len(cut.encode())


def test_the_earliest_of_two_stop_texts_in_one_token_wins() -> None:
    """`<answer>` is one token; of its pieces `ns` ends first, and the token is kept."""
    text = "A<answer>B"
    for stops in (("<answer>", "ns", "swer"), ("swer", "ns"), ("ns",)):
        model, length = speaking_model(TOKENIZER, text)
        request = Request(question="q", messages=chat("a"), max_tokens=length, stop=stops)
        found = next(TransformersEngine(model, TOKENIZER).generate([request]))
        assert (found.text, found.tokens, found.finish_reason) == ("A<ans", 2, "stop")


def test_tags_stay_in_the_text() -> None:
    text = "<think>\nA\n</think>\n<answer>\nB\n</answer>"
    model, length = speaking_model(TOKENIZER, text)
    found = next(
        TransformersEngine(model, TOKENIZER).generate(
            [Request(question="q", messages=chat("a"), max_tokens=length + 5, stop=("</answer>",))]
        )
    )
    assert (found.text, found.tokens, found.finish_reason) == (text, length, "stop")


def test_a_response_ends_where_the_models_positions_end() -> None:
    request = Request(question="long", messages=chat("a"), max_tokens=50)
    prompt = len(prompt_ids(TOKENIZER, request.messages))
    short = next(TransformersEngine(tiny_model(max_position_embeddings=prompt + 7), TOKENIZER).generate([request]))
    assert (short.tokens, short.finish_reason, short.prompt_tokens) == (7, "length", prompt)
    engine = TransformersEngine(tiny_model(max_position_embeddings=prompt), TOKENIZER)
    with pytest.raises(ValueError, match=f"question long: prompt and response need {prompt + 1} tokens"):
        list(engine.generate([request]))
    with pytest.raises(ValueError, match=f"context 0: prompt and prefix need {prompt + 1} tokens"):
        engine.score([Context(messages=request.messages, prefix=(5,), candidates=(1,))])


def test_bad_requests_fail_before_anything_runs() -> None:
    engine = TransformersEngine(tiny_model(), TOKENIZER)
    request = Request(question="q", messages=chat("a"))
    with pytest.raises(ValueError, match="question q sample 0 is requested twice"):
        list(engine.generate([request, request]))
    with pytest.raises(ValueError, match="question q: a stop text is empty"):
        list(engine.generate([request.model_copy(update={"stop": ("",)})]))
    with pytest.raises(ValueError, match="batch_size is 0"):
        TransformersEngine(tiny_model(), TOKENIZER, batch_size=0)


def test_logits_that_are_not_finite_are_refused() -> None:
    model = tiny_model()
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    engine = TransformersEngine(model, TOKENIZER)
    with pytest.raises(ValueError, match="logits are not finite"):
        list(engine.generate([Request(question="q", messages=chat("a"))]))
    with pytest.raises(ValueError, match="logits are not finite"):
        engine.score(ragged_contexts())
