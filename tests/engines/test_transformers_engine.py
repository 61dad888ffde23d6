"""Generating and loading: equal to one unpadded, uncached forward a token, whatever the batch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    BATCH_SIZES,
    TOKENIZER,
    by_key,
    chat,
    dense_response,
    each_architecture,
    forwards,
    ragged_contexts,
    ragged_requests,
    tokens_of,
)
from tiny import tiny_model

from catto.engines import Request
from catto.engines.decoding import ResponseInProgress
from catto.engines.transformers import TransformersEngine, pack_batches
from catto.errors import DataError
from catto.prompts import prompt_ids
from catto.token_ids import count_shared_beginning

pytestmark = pytest.mark.slow


@each_architecture
def test_responses_equal_dense_ones_at_every_batch_size_and_temperature(shape: dict[str, Any]) -> None:
    """Greedy and sampled rows, ragged prompts, k samples a prompt: all equal one request alone without a cache."""
    model = tiny_model(**shape)
    requests = ragged_requests()
    expected = {request.key: dense_response(model, request) for request in requests}
    assert len(set(expected.values())) > 10
    for batch_size in BATCH_SIZES:
        found = by_key(TransformersEngine(model, TOKENIZER, batch_size=batch_size).generate(requests))
        assert {key: g.token_ids for key, g in found.items()} == {key: ids for key, (ids, _) in expected.items()}
        for key, (_, mean_logprob) in expected.items():
            assert found[key].mean_logprob == pytest.approx(mean_logprob, abs=1e-5)


@each_architecture
def test_greedy_equals_transformers_generate(shape: dict[str, Any]) -> None:
    model = tiny_model(**shape)
    requests = ragged_requests(samples=1, max_tokens=20)
    for key, ids in tokens_of(TransformersEngine(model, TOKENIZER).generate(requests)).items():
        (request,) = [request for request in requests if request.key == key]
        prompt = torch.tensor([prompt_ids(TOKENIZER, request.messages)])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20)
        assert ids == tuple(token for token in out[0, prompt.shape[1] :].tolist() if token != TOKENIZER.eos_token_id)


def test_samples_of_one_request_list_equal_separate_calls() -> None:
    engine = TransformersEngine(tiny_model(), TOKENIZER)
    requests = ragged_requests(questions=2, samples=4, temperature=1.0)
    apart = {request.key: next(engine.generate([request])).token_ids for request in requests}
    assert tokens_of(engine.generate(requests)) == apart
    assert len(set(apart.values())) == len(apart)


def test_a_low_temperature_is_greedy_and_the_seed_moves_only_samples() -> None:
    engine = TransformersEngine(tiny_model(), TOKENIZER)
    greedy = tokens_of(engine.generate(ragged_requests(temperature=0.0)))
    assert tokens_of(engine.generate(ragged_requests(temperature=1e-4))) == greedy
    assert tokens_of(engine.generate(ragged_requests(temperature=0.0, seed=6))) == greedy
    warm = tokens_of(engine.generate(ragged_requests(temperature=1.0)))
    assert tokens_of(engine.generate(ragged_requests(temperature=1.0, seed=6))) != warm


def test_a_prompt_runs_once_for_its_samples() -> None:
    model = tiny_model()
    requests = ragged_requests(questions=2, samples=8, max_tokens=3, temperature=1.0)
    with forwards(model.model.embed_tokens) as shapes:
        list(TransformersEngine(model, TOKENIZER).generate(requests))
    prompts = {prompt_ids(TOKENIZER, request.messages) for request in requests}
    common, width = count_shared_beginning(prompts), max(map(len, prompts))
    assert 0 < common < width
    assert shapes == [(1, common, 32), (2, width - common, 32), (16, 1, 32), (16, 1, 32)]


@pytest.mark.parametrize("arch", ["qwen3", "gemma2"])
def test_what_prompts_share_runs_once_only_where_every_layer_sees_the_whole_context(arch: str) -> None:
    """A windowed layer would count the padding between the shared tokens and the rest; responses are dense ones."""
    model = tiny_model(arch=arch)
    requests = ragged_requests(questions=4, samples=1, max_tokens=4)
    with forwards(model.model.embed_tokens) as shapes:
        together = tokens_of(TransformersEngine(model, TOKENIZER).generate(requests))
    alone = [tokens_of(TransformersEngine(model, TOKENIZER).generate([request])) for request in requests]
    assert together == {key: ids for one in alone for key, ids in one.items()}
    prompts = [prompt_ids(TOKENIZER, request.messages) for request in requests]
    rest = max(map(len, prompts)) - (count_shared_beginning(prompts) if arch == "qwen3" else 0)
    assert shapes[1][:2] == (4, rest)


def test_a_finished_row_leaves_the_batch() -> None:
    model = tiny_model()
    limits = (2, 5, 3)
    requests = [Request(question=f"q{n}", messages=chat("a"), max_tokens=n) for n in limits]
    with forwards(model) as shapes:
        found = by_key(TransformersEngine(model, TOKENIZER).generate(requests))
    assert [shape[0] for shape in shapes] == [1, 3, 2, 1, 1]
    assert {g.tokens for g in found.values()} == set(limits)
    assert {g.finish_reason for g in found.values()} == {"length"}


def test_a_resumed_run_yields_the_missing_ones_with_the_same_tokens() -> None:
    model = tiny_model()
    engine = TransformersEngine(model, TOKENIZER, batch_size=4)
    requests = ragged_requests(samples=2, temperature=1.0)
    whole = by_key(engine.generate(requests))
    for count in range(len(whole) + 1):
        done = list(whole)[:count]
        rest = by_key(engine.generate(requests, done))
        assert list(rest) == list(whole)[count:]
        assert all(rest[key].token_ids == whole[key].token_ids for key in rest)
        assert all(rest[key].mean_logprob == whole[key].mean_logprob for key in rest)


def test_a_finished_batch_is_not_run_again() -> None:
    model = tiny_model()
    engine = TransformersEngine(model, TOKENIZER, batch_size=4)
    requests = ragged_requests(samples=2)
    first_batch = [generation.key for generation in engine.generate(requests)][:4]
    with forwards(model) as shapes:
        assert list(engine.generate(requests, {request.key for request in requests})) == []
        assert shapes == []
        assert len(list(engine.generate(requests, first_batch))) == 6
        assert sum(shape[0] for shape in shapes if shape[0] > 4) == 0
        # Two batches, the first of which has two prompts and runs what they share in a forward of its own.
        assert len(shapes) == 2 * requests[0].max_tokens + 1


def test_batches_hold_whole_questions_longest_first() -> None:
    request = ragged_requests()[0]
    groups = [[ResponseInProgress(request, (0,) * n, 1)] * k for n, k in ((2, 2), (9, 3), (5, 1), (4, 2))]
    packed = pack_batches(groups, 4)
    assert [[len(row.prompt) for row in batch] for batch in packed] == [[9, 9, 9, 5], [4, 4, 2, 2]]
    assert [len(batch) for batch in pack_batches([[ResponseInProgress(request, (1,), 1)] * 5], 2)] == [2, 2, 1]


def test_a_model_in_training_is_left_as_it_was() -> None:
    model = tiny_model(attention_dropout=0.5)
    requests, contexts = ragged_requests(), ragged_contexts()
    engine = TransformersEngine(model, TOKENIZER, batch_size=4)
    quiet = tokens_of(engine.generate(requests)), engine.score(contexts)
    model.train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    modes = [module.training for module in model.modules()]
    stream = engine.generate(requests)
    first = next(stream)
    assert [module.training for module in model.modules()] == modes
    assert not torch.is_inference_mode_enabled()
    assert (tokens_of(iter([first, *stream])), engine.score(contexts)) == quiet
    assert [module.training for module in model.modules()] == modes
    assert model.is_gradient_checkpointing
    assert model.config.use_cache is False
    model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_a_saved_model_loads_with_the_same_scores(tmp_path: Path) -> None:
    model = tiny_model()
    engine = TransformersEngine.load(saved(model, tmp_path), batch_size=3)
    assert engine.score(ragged_contexts()) == TransformersEngine(model, TOKENIZER, batch_size=3).score(
        ragged_contexts()
    )
    assert engine.model == str(tmp_path)
    assert engine.name.startswith("transformers 5.")
    assert " float32 torch " in engine.name
    assert "+" not in engine.name
    for dtype in (torch.bfloat16, "bfloat16"):
        assert " bfloat16 " in TransformersEngine.load(tmp_path, dtype=dtype).name


def test_an_adapter_folder_loads_on_its_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = saved(tiny_model(), tmp_path / "base")
    plain = TransformersEngine.load(base).score(ragged_contexts())
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    tuned = get_peft_model(TransformersEngine.load(base).network, lora)
    tuned.save_pretrained(tmp_path / "lora")
    expected = TransformersEngine(tuned, TOKENIZER).score(ragged_contexts())
    assert expected != plain
    engine = TransformersEngine.load(tmp_path / "lora")
    assert engine.score(ragged_contexts()) == expected
    assert engine.model == str(tmp_path / "lora")
    assert tokens_of(engine.generate(ragged_requests())) == tokens_of(
        TransformersEngine(tuned, TOKENIZER, batch_size=2).generate(ragged_requests())
    )


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_an_adapter_of_virtual_tokens_is_refused(kind: str) -> None:
    """PEFT puts them in front of every call, so of every cached token too."""
    import peft

    adapter = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="virtual tokens"):
        TransformersEngine(peft.get_peft_model(tiny_model(), adapter), TOKENIZER)


def test_a_model_without_a_cache_is_refused() -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    config = OpenAIGPTConfig(vocab_size=len(TOKENIZER), n_embd=8, n_layer=1, n_head=2, n_positions=64)
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel returns no cache to continue from"):
        next(TransformersEngine(OpenAIGPTLMHeadModel(config), TOKENIZER).generate(ragged_requests()))


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        TransformersEngine.load(tmp_path / "nothing")
    assert str(tmp_path / "nothing") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_prompt_lengths_are_ragged_in_these_tests() -> None:
    lengths = sorted({len(prompt_ids(TOKENIZER, request.messages)) for request in ragged_requests()})
    assert len(lengths) == 5
    assert all(b - a == 3 for a, b in pairwise(lengths))
