"""Packed rows and FlexAttention give the losses and gradients of the padded rows, without padding or masked blocks.

FlexAttention has no backward pass on a CPU. Its reference implementation, which runs where it is not compiled, has
one: `flex` lets it run. The compiled kernel is tested forward.
"""

from __future__ import annotations

from typing import Any

import pairs
import pytest
import torch
from steps import Step, distance, lora, made, step
from tiny import tiny_model, tiny_tokenizer
from torch.nn.attention import flex_attention as torch_flex
from transformers.integrations import flex_attention as transformers_flex
from trl import DPOConfig

from catto.token_ids import count_shared_beginning
from catto.training import forward
from catto.training.batches import Row, block_mask, lay_out_rows
from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.supervised import SupervisedConfig, SupervisedTrainer
from catto.training.trainer import CATTOTrainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),  # the reference is what we want
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the next two are of torch's own compiler
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]
CUDA = torch.device("cuda")
SHARING = pytest.mark.parametrize("shared", [False, True], ids=["rows", "shared"])
ROWS = [Row([1, 2, 3, 4, 5], [6, 7, 8]), Row([9, 8], [7, 6]), Row([1, 2, 3, 4, 5], [9])]


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A CPU that chooses attention as CUDA does, with FlexAttention's reference in the place of its kernel.

    The list has an entry for each time that FlexAttention ran.
    """
    choose, ran = forward.try_flex_attention, list[bool]()

    def kernel(training: bool) -> Any:
        ran.append(training)
        return lambda: torch_flex.flex_attention

    monkeypatch.setattr(forward, "try_flex_attention", lambda model, device: choose(model, CUDA))
    monkeypatch.setattr(forward, "is_triton_available", lambda: True)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(transformers_flex, "WrappedFlexAttention", kernel)
    return ran


def _assert_equal(one: Step, other: Step) -> None:
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-5, atol=1e-5)
    assert distance(one.gradients, other.gradients) < 1e-5
    for name in ("rewards/margins", "entropy", "logits/chosen", "mean_token_accuracy", "logps/chosen"):
        assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-4, abs=1e-4), name


def _both(arch: str = "qwen3", attention: str = "sdpa", *, shared: bool, **options: Any) -> tuple[Step, Step]:
    """A step of packed rows and one of padded rows."""
    steps = []
    for layout in ({"padding_free": True, "prefix_sharing": shared}, {"padding_free": False}):
        model = tiny_model(arch=arch)
        model.set_attn_implementation(attention)
        given = {name: value() if callable(value) else value for name, value in options.items()}
        steps.append(step(CATTOTrainer, CATTOConfig, model=model, **layout, **given))
    assert steps[0].trainer.layout_options() == {"shared": shared, "packed": True}
    assert steps[1].trainer.layout_options() == {"shared": False, "packed": False}
    return steps[0], steps[1]


@SHARING
@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_give_the_padded_loss_and_gradient(arch: str, attention: str, shared: bool) -> None:
    _assert_equal(*_both(arch, attention, shared=shared))


@pytest.mark.parametrize(
    "options",
    [
        {"calibration": "none"},
        {"calibration": "outcome"},
        {"calibration": "outcome", "outcome_examples": lambda: make_examples(tiny_tokenizer(), pairs.sft_rows())},
        {"peft_config": lora, "precompute_ref_log_probs": True},
    ],
    ids=["none", "outcome", "stream", "lora precomputed"],
)
def test_every_objective_and_reference_is_packed(options: dict[str, Any]) -> None:
    _assert_equal(*_both(shared=False, **options))


@SHARING
def test_no_padding_goes_through_the_layers(shared: bool) -> None:
    packed = step(CATTOTrainer, CATTOConfig, padding_free=True, prefix_sharing=shared)
    shapes: list[tuple[int, ...]] = []
    layer = packed.trainer.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape[:2])))
    packed.trainer.compute_loss(packed.trainer.model, packed.trainer._prepare_inputs(packed.batch))
    rows = [(row[mask].tolist(), int(kept.sum())) for row, mask, kept in _batch_rows(packed.batch)]
    prompts = {tuple(ids[:-kept]) for ids, kept in rows}
    tokens = sum(len(ids) for ids, _ in rows)
    if shared:  # each prompt once, and what all of them begin with once
        again = (len(prompts) - 1) * count_shared_beginning(prompts)
        tokens = sum(map(len, prompts)) - again + sum(kept for _, kept in rows)
    assert shapes == [(1, tokens)]
    assert tokens < packed.batch["input_ids"].numel()


def _batch_rows(batch: dict[str, Any]) -> Any:
    return zip(batch["input_ids"], batch["attention_mask"].bool(), batch["completion_mask"], strict=True)


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


def test_cuda_packs_by_itself_with_flex_attention_and_equal_gradients(flex: list[bool]) -> None:
    padded = step(CATTOTrainer, CATTOConfig, padding_free=False)
    assert not flex
    model = tiny_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    chosen = step(CATTOTrainer, CATTOConfig, model=model, prefix_sharing=True)
    # Two layers of the reference, two of the policy in training and the two again in its backward pass.
    assert flex == [False, False, True, True, True, True]
    for model in (chosen.trainer.model, chosen.trainer.ref_model):
        assert model.config._attn_implementation == "catto"
    assert chosen.trainer.layout_options() == {"shared": True, "packed": True}
    _assert_equal(chosen, padded)


@pytest.mark.usefixtures("flex")
def test_autocast_casts_the_inputs_of_flex_attention() -> None:
    """With fp32 weights, rotary embeddings leave queries and keys in fp32 beside values in bf16."""
    results = []
    for attention in ("sdpa", "catto"):
        model = tiny_model(initializer_range=0.05)
        forward.install_head(model)
        model.set_attn_implementation(attention)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            results.append(
                forward.run_head(model, lay_out_rows(ROWS, [], 3, 0, shared=True, packed=True), ()).stats.target
            )
    torch.testing.assert_close(*results, rtol=0, atol=5e-3)


@pytest.mark.usefixtures("flex")
def test_cuda_packs_supervised_examples_too(tmp_path: Any) -> None:
    rows = make_examples(tiny_tokenizer(), pairs.sft_rows(4))
    losses = []
    for model in (tiny_model(), tiny_model(attn_implementation="eager")):
        args = SupervisedConfig(str(tmp_path), use_cpu=True, per_device_train_batch_size=4, report_to="none")
        trainer = SupervisedTrainer(model, args, rows, tiny_tokenizer())
        batch = next(iter(trainer.get_train_dataloader()))
        losses.append(trainer.compute_loss(trainer.model, batch))
        assert batch["batch"].packed is (model.config._attn_implementation == "catto")
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


def test_flex_attention_is_chosen_in_place_of_sdpa_on_cuda_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forward.try_flex_attention(tiny_model(), torch.device("cpu")) is False
    monkeypatch.setattr(forward, "is_triton_available", lambda: True)
    assert forward.try_flex_attention(tiny_model(), CUDA) is True
    for model in (
        tiny_model(attn_implementation="eager"),
        tiny_model(attention_dropout=0.1),
        tiny_model(arch="gpt2"),  # Transformers does not run it with FlexAttention
    ):
        before = model.config._attn_implementation
        assert forward.try_flex_attention(model, CUDA) is False
        assert model.config._attn_implementation == before
    monkeypatch.setattr(forward, "is_triton_available", lambda: False)
    assert forward.try_flex_attention(tiny_model(), CUDA) is False


def test_other_calls_of_the_model_keep_sdpa() -> None:
    """Generation and padded batches: the same logits to the last bit, and a checkpoint that names no attention."""
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    model = tiny_model()
    before = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("catto")
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    assert "catto" not in model.config.to_json_string()


def test_the_compiled_kernel_does_not_touch_masked_blocks() -> None:
    """Two sequences of one block each, the keys and values of the second nan: the first stays finite.

    A masked pair that is computed gives nan: its weight is 0, and 0 x nan is nan, as SDPA shows.
    """
    batch = lay_out_rows([Row([1] * 127, [2]), Row([3] * 127, [4])], [], 2, 0, shared=False, packed=True)
    query, key, value = torch.randn(3, 1, 2, 256, 16, generator=torch.manual_seed(0)).unbind()
    broken = torch.arange(256).view(1, 1, -1, 1) >= 128
    poisoned = [tensor.masked_fill(broken, torch.nan) for tensor in (key, value)]
    with torch.no_grad():
        attended = torch.compile(torch_flex.flex_attention)(query, *poisoned, block_mask=block_mask(batch))
    seen = (torch.arange(128) <= torch.arange(128).view(-1, 1)).expand(1, 1, 128, 128)
    parts = [tensor[:, :, :128] for tensor in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen)
    torch.testing.assert_close(attended[:, :, :128], expected, rtol=1e-5, atol=1e-6)
    dense = torch.block_diag(seen[0, 0], seen[0, 0]).bool().expand(1, 1, 256, 256)
    assert torch.nn.functional.scaled_dot_product_attention(query, *poisoned, attn_mask=dense)[:, :, :128].isnan().any()


# ---- the option ------------------------------------------------------------------------------------------------------


def test_a_cpu_pads_by_itself() -> None:
    assert made(CATTOTrainer, CATTOConfig).layout_options() == {"shared": False, "packed": False}


def test_trl_does_not_warn_of_an_option_that_works_here(caplog: pytest.LogCaptureFixture) -> None:
    trainer = made(CATTOTrainer, CATTOConfig, padding_free=True)
    assert trainer.args.padding_free is True
    assert "padding_free" not in caplog.text
    assert made(CATTOTrainer, DPOConfig, padding_free=True).layout_options()["packed"] is True


def test_a_model_that_cannot_be_packed_is_padded_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(arch="mistral", sliding_window=8)
    trainer = made(CATTOTrainer, CATTOConfig, model=model, padding_free=True)
    assert trainer.layout_options()["packed"] is False
    assert "padding_free is off: its layers attend to a sliding window of 8 tokens" in caplog.text
