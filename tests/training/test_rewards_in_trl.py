"""The rewards inside TRL's own trainers: they get what they ask for, and what they log arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

from catto.prompts import render_messages
from catto.recipe.settings import ScratchModel
from catto.rewards import abstention_reward, brier_reward, correctness_reward, format_reward, log_reward
from catto.tasks import load_questions
from catto.training.models import scratch_model, word_tokenizer

pytestmark = pytest.mark.slow
ROWS = 32  # completions of a step


def read_other_texts(completions: list[Any], **columns: Any) -> list[float | None]:
    """Grade texts that an untrained model cannot write: every answer is A, stated with 0.8 or without a confidence."""
    texts = ["<answer>A</answer><confidence>0.8</confidence>", "<answer>A</answer>"] * (len(completions) // 2)
    return brier_reward(texts, **columns)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_every_reward_runs_in_the_trainer_and_logs_its_metrics(kind: str, tmp_path: Path) -> None:
    """Every gold label is A: half of the texts get 1 - 0.04, the other half -1; ECE is that of 0.8 on right answers."""
    rows = []
    for question in load_questions("witnesses", "train", seed=0, limit=16):
        prompt = [message.model_dump() for message in render_messages(question, confidence=True)]
        rows.append({"prompt": prompt, "gold": "A", "labels": list(question.labels)})
    tokenizer = word_tokenizer(message["content"] for row in rows for message in row["prompt"])
    model = scratch_model(tokenizer, ScratchModel(layers=1, width=32, heads=2, intermediate=32, positions=256), seed=0)
    args = getattr(trl, f"{kind}Config")(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=ROWS,
        num_generations=4,
        max_completion_length=8,
        beta=0.0,  # no reference model
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    rewards = [correctness_reward, format_reward, log_reward, abstention_reward, read_other_texts]
    trainer = getattr(trl, f"{kind}Trainer")(
        model, reward_funcs=rewards, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    for log in trainer.state.log_history[:2]:
        assert log["rewards/read_other_texts/mean"] == pytest.approx((0.96 - 1) / 2)
        assert log["rewards/correctness_reward/mean"] == log["rewards/format_reward/mean"] == 0
        assert log["rewards/log_reward/mean"] == log["rewards/abstention_reward/mean"] == -1
        # `log_reward` logs the untrained model's own text under the same names, so these are means of both.
        assert log["stated_confidence/accuracy"] == pytest.approx((0 + 1) / 2)
        assert log["stated_confidence/missing"] == pytest.approx((1 + 0.5) / 2)
        assert log["stated_confidence/mean"] == pytest.approx(0.8)
        assert log["stated_confidence/ece"] == pytest.approx(0.2)
        assert log["abstentions"] == 0
