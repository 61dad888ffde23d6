"""The rewards inside TRL's own trainers, and the example that measures them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from catto.rewards import abstention_reward, brier_reward, correctness_reward, format_reward, log_reward
from catto.tasks import load_questions

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_confidence.py"
REWARDS = [correctness_reward, format_reward, brier_reward, log_reward, abstention_reward]
METRICS = ("accuracy", "mean", "missing", "ece")


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo_confidence", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def first_model(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model after 80 steps of SFT: it knows the form of most answers, and little of the task."""
    questions = list(load_questions("witnesses", "train", seed=0, limit=512))
    rows = example.make_first_rows(questions, seed=0)
    return example.train_first_model(rows, 0, str(tmp_path_factory.mktemp("sft")))


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_every_reward_runs_in_the_trainer_and_logs_its_metrics(
    kind: str, example: Any, first_model: Any, tmp_path: Path
) -> None:
    import trl
    from datasets import Dataset

    model, tokenizer = first_model
    questions = list(load_questions("witnesses", "train", seed=0, limit=16))
    rows = [{"prompt": example.make_prompt(q), "gold": q.gold, "labels": list(q.labels)} for q in questions]
    args = getattr(trl, f"{kind}Config")(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=32,
        num_generations=4,
        max_completion_length=48,
        logging_steps=1,
        save_strategy="no",
        **example.CPU,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model, reward_funcs=REWARDS, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    log = trainer.state.log_history[0]
    for reward in REWARDS:
        assert -1 <= log[f"rewards/{reward.__name__}/mean"] <= 1
    for name in METRICS:
        assert 0 <= log[f"stated_confidence/{name}"] <= 1
    # Correctness is the accuracy that is logged, and no abstention is in this vocabulary.
    assert log["rewards/correctness_reward/mean"] == pytest.approx(log["stated_confidence/accuracy"])
    assert log["abstentions"] == 0


def test_the_example_trains_and_measures(example: Any, first_model: Any, tmp_path: Path) -> None:
    model, tokenizer = first_model
    questions = list(load_questions("witnesses", "test", seed=0, limit=60))
    before = example.measure(model, tokenizer, questions, seed=0)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    example.train_with_grpo(model, tokenizer, questions, brier_reward, 0, 1, str(tmp_path))
    after = example.measure(model, tokenizer, questions, seed=0)
    assert set(before) == set(after)
    assert 30 < before["read"] <= 60
    assert 0 <= before["true_error"] <= 1
    assert any(not torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))
