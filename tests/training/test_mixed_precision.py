"""bf16 as a GPU trains: through `trainer.train()`, since Accelerate enters autocast in the model's forward alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from datasets import load_from_disk
from peft import LoraConfig
from steps import made
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor

from catto.engines import Context
from catto.engines.transformers import TransformersEngine
from catto.objectives import label_logprobs, token_stats
from catto.prompts import Message
from catto.training import forward, monitor
from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.supervised import RcftBins, SupervisedConfig, SupervisedTrainer
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow

LN_2 = math.log(2)


# ---- policy against reference ---------------------------------------------------------------------------------------


class _Watched(CATTOTrainer):
    """Our head and the term, times zero; remembers what every step gave before anything rounds it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        self.references = 0
        super().__init__(*args, **kwargs)

    @property
    def calibration_weight(self) -> float:
        return 0.0

    def compute_ref_log_probs(self, *args: Any) -> Any:
        self.references += 1
        return super().compute_ref_log_probs(*args)

    def _compute_loss(self, *args: Any) -> Any:
        loss = super()._compute_loss(*args)
        self.losses.append(loss.item())
        return loss

    def margins(self) -> list[float]:
        return [entry["rewards/margins"] for entry in self.state.log_history if "rewards/margins" in entry]


UNMOVED: dict[str, Any] = {"max_steps": 4, "learning_rate": 0.0}


def _mean_size(values: list[float]) -> float:
    assert len(values) == 4
    return sum(map(abs, values)) / 4


def _fresh_lora() -> LoraConfig:
    """An adapter that starts at zero: the policy is its own reference."""
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def _trained(**options: Any) -> _Watched:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    trainer: _Watched = made(_Watched, CATTOConfig, model=tiny_model(seed=1), bf16=True, **{"max_steps": 1, **options})
    trainer.train()
    return trainer


@pytest.mark.parametrize("sharing", [False, True], ids=["padded", "shared"])
@pytest.mark.parametrize("adapter", [{}, {"peft_config": _fresh_lora}], ids=["full", "lora"])
def test_bf16_starts_at_ln_2_where_the_reference_is_the_policy(adapter: dict[str, Any], sharing: bool) -> None:
    """Both passes see the same batch, so the log-ratios are 0 to the last bit."""
    trainer = _trained(prefix_sharing=sharing, **adapter)
    assert trainer.margins() == [0.0]
    assert trainer.losses == [pytest.approx(LN_2, abs=1e-7)]


def test_bf16_reference_that_follows_the_policy_keeps_every_step_at_ln_2() -> None:
    """The reference takes the policy's weights after each step, so each step starts from equal models."""
    follow = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer = _trained(max_steps=3, **follow)
    assert trainer.margins() == [0.0, 0.0, 0.0]
    assert trainer.losses == [pytest.approx(LN_2, abs=1e-7)] * 3


@pytest.mark.parametrize("sharing", [False, True], ids=["padded", "shared"])
@pytest.mark.parametrize("adapter", [{}, {"peft_config": _fresh_lora}], ids=["full", "lora"])
@pytest.mark.parametrize("shape", ["precomputed", "stream"])
def test_bf16_starts_near_ln_2_where_batch_shapes_differ(shape: str, adapter: dict[str, Any], sharing: bool) -> None:
    """Another batch shape sums in another order, which flips a bf16 rounding here and there: one batch in ten is off
    by up to 1e-3. The mean over four batches of unmoved weights stays below 3e-4; two heads are 1.3e-3 apart in each.
    """
    options: dict[str, Any] = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3}
    if shape == "stream":
        options = {"calibration": "outcome", "outcome_examples": make_examples(tiny_tokenizer(), pairs.sft_rows())}
    trainer = _trained(prefix_sharing=sharing, **UNMOVED, **options, **adapter)
    assert _mean_size(trainer.margins()) < 3e-4
    assert trainer.losses == [pytest.approx(LN_2, abs=1e-3)] * 4


def test_cached_reference_of_another_head_or_precision_is_not_taken(tmp_path: Path) -> None:
    """TRL finds cached log-probabilities by data and weights alone, and both are the same in all runs."""
    pairs.dataset(pairs.preference_rows(seed=5)).save_to_disk(tmp_path / "rows")  # only data on disk have a cache
    runs: list[dict[str, Any]] = [{"calibration": "none"}, {"bf16": False}, {}, {"prefix_sharing": True}, {}]
    computed = []
    for run in runs:
        options = {"precompute_ref_log_probs": True, "bf16": True, **UNMOVED, **run}
        rows = load_from_disk(tmp_path / "rows")
        trainer = pairs.trainer(_Watched, CATTOConfig, tmp_path, model=tiny_model(seed=1), rows=rows, **options)
        computed.append(trainer.references)
        trainer.train()
        assert _mean_size(trainer.margins()) < 3e-4, run
    assert computed == [4, 4, 4, 4, 0]  # batches; the last run finds what the third has left


# ---- statistics in fp32 whatever autocast says ----------------------------------------------------------------------


class _Seen:
    """Stands in for the head's two functions while a trainer trains, and keeps what went in and what came out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.labels: list[tuple[Tensor, Tensor, Tensor]] = []  # dense log-probabilities, ours, ids
        self.tokens: list[tuple[Tensor, Any, Tensor]] = []
        self.autocast: list[bool] = []
        monkeypatch.setattr(forward, "label_logprobs", self._label_logprobs)
        monkeypatch.setattr(forward, "token_stats", self._token_stats)

    def _dense(self, hidden: Tensor, weight: Tensor) -> Tensor:
        self.autocast.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", enabled=False):
            return (hidden.detach().float() @ weight.detach().float().T).log_softmax(-1)

    def _label_logprobs(self, hidden: Tensor, *, weight: Tensor, labels: Tensor, **rest: Any) -> Tensor:
        found = label_logprobs(hidden, weight=weight, labels=labels, **rest)
        self.labels.append((self._dense(hidden[:, 0], weight), found.detach(), labels))
        return found

    def _token_stats(self, hidden: Tensor, *, weight: Tensor, targets: Tensor, **rest: Any) -> Any:
        found = token_stats(hidden, weight=weight, targets=targets, **rest)
        self.tokens.append((self._dense(hidden, weight), found, targets))
        return found

    def check(self) -> None:
        assert self.autocast
        assert all(self.autocast)
        for dense, ours, ids in self.labels:
            assert float(ours.exp().sum(-1).max()) <= 1 + 1e-6
            torch.testing.assert_close(ours, dense.gather(-1, ids), rtol=0, atol=1e-5)
        for dense, stats, targets in (part for part in self.tokens if len(part[2])):
            torch.testing.assert_close(
                stats.target.detach(), dense.gather(-1, targets[:, None])[:, 0], rtol=0, atol=1e-5
            )
            torch.testing.assert_close(stats.confidence.detach(), dense.exp().amax(-1), rtol=0, atol=1e-5)
            assert float(stats.confidence.detach().amax(0)) <= 1


WEIGHTS = pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32 weights", "bf16 weights"])


@WEIGHTS
@pytest.mark.parametrize("objective", ["catto", "outcome", "stream"])
def test_statistics_of_preference_training_are_fp32_in_autocast(
    objective: str, weights: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"calibration": objective}
    if objective == "stream":
        options = {"calibration": "outcome", "outcome_examples": make_examples(tiny_tokenizer(), pairs.sft_rows())}
    trainer = made(CATTOTrainer, CATTOConfig, model=tiny_model().to(weights), bf16=True, max_steps=1, **options)
    seen = _Seen(monkeypatch)
    trainer.train()
    seen.check()
    assert len(seen.labels) == (objective != "catto")
    assert len(seen.tokens) == 2  # the policy's and the reference's


@WEIGHTS
def test_statistics_of_rcft_are_fp32_in_autocast(
    weights: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And so are the label confidences that `evaluate` and RCFT's E-step read from the model in training."""
    model, tokenizer = tiny_model().to(weights), tiny_tokenizer()
    held_out = make_examples(tokenizer, pairs.sft_rows())
    logits: list[tuple[Tensor, Tensor]] = []

    def answers(network: Any) -> tuple[list[float], list[bool]]:
        """Score through the engine, and keep the hidden states that its head was given."""
        taken: list[Tensor] = []
        hook = network.lm_head.register_forward_pre_hook(lambda _, args: taken.append(args[0].detach()))
        messages = (Message(role="user", content="question the witness says"),)
        label = tuple(range(5, 9))
        context = Context(messages=messages, prefix=(), candidates=label)
        (scores,) = TransformersEngine(network, tokenizer).score([context])
        hook.remove()
        with torch.inference_mode():
            dense = (taken[0][0, -1].float() @ network.lm_head.weight.float().T).log_softmax(-1)
        logits.append((dense[list(label)].clone(), torch.tensor(scores.logprobs)))
        return [0.3, 0.6, 0.9], [True, False, True]

    args = SupervisedConfig(
        str(tmp_path), bf16=True, use_cpu=True, max_steps=1, report_to="none", save_strategy="no", disable_tqdm=True
    )
    trainer = SupervisedTrainer(
        model, args, held_out, tokenizer, validation=held_out, bins=RcftBins(answers), rcft_weight=1.0
    )
    seen = _Seen(monkeypatch)
    trainer.train()
    assert len(seen.labels) == 1
    monitor.compute_label_logprobs(trainer.model, held_out, tokenizer.pad_token_id)
    assert len(seen.labels) == 2
    seen.check()
    ((dense, scored),) = logits
    torch.testing.assert_close(scored, dense, rtol=0, atol=1e-5)


# ---- small updates ---------------------------------------------------------------------------------------------------


def _moved(weights: torch.dtype, bf16: bool, folder: Path) -> Tensor:
    """How far 200 steps of AdamW at 5e-7 move every weight of deviation 0.02."""
    model = tiny_model(num_hidden_layers=1, initializer_range=0.02).to(weights)
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().float()
    args = SupervisedConfig(
        str(folder),
        bf16=bf16,
        use_cpu=True,
        max_steps=200,
        learning_rate=5e-7,
        lr_scheduler_type="constant",
        per_device_train_batch_size=4,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = tiny_tokenizer()
    SupervisedTrainer(model, args, make_examples(tokenizer, pairs.sft_rows()), tokenizer).train()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().float() - start


def test_small_updates_survive_in_fp32_weights_computed_in_bf16(tmp_path: Path) -> None:
    """Within 2 % of fp32 training, the default; bf16 weights lose nearly all of the way."""
    exact, mixed, short = (
        _moved(weights, bf16, tmp_path)
        for weights, bf16 in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True))
    )
    assert float((mixed - exact).norm() / exact.norm()) < 0.02
    assert float((short - exact).norm() / exact.norm()) > 0.9
    assert float((short != 0).float().mean()) < 0.05


@pytest.mark.parametrize("config", [CATTOConfig, SupervisedConfig])
@pytest.mark.parametrize(("slowdown", "bf16", "warned"), [(1.8, True, 1), (1.8, False, 0), (0.5, True, 0)])
def test_bf16_on_a_processor_that_is_slower_in_it_is_warned_of(
    config: Any,
    slowdown: float,
    bf16: bool,
    warned: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("catto.training.config.cpu_bf16_slowdown", lambda: slowdown)
    config(output_dir=str(tmp_path), use_cpu=True, bf16=bf16)
    assert [record.name for record in caplog.records] == ["catto.training.config"] * warned
