"""The paper's ordering claim, as far as a small run can show it: the term leaves DPO's preferences in place."""

from __future__ import annotations

from pathlib import Path

from pairs import dataset, preference_rows, trainer

from catto.training.config import CATTOConfig
from catto.training.trainer import CATTOTrainer


def test_reward_accuracy_is_kept_with_the_term_on(tmp_path: Path) -> None:
    """After the same steps on the same 16 pairs, with the term's weight 0, 0.1 and 1: in every pair the chosen
    response gained more against the reference than the rejected one."""
    rows = dataset(preference_rows())
    for weight in (0.0, 0.1, 1.0):
        run = trainer(
            CATTOTrainer,
            CATTOConfig,
            tmp_path / str(weight),
            rows=rows,
            calibration="catto",
            calibration_weight=weight,
            max_steps=24,
            learning_rate=5e-3,
            dataloader_pin_memory=False,
        )
        before = run.evaluate(rows)["eval_rewards/accuracies"]
        run.train()
        assert before < 0.8
        assert run.evaluate(rows)["eval_rewards/accuracies"] == 1.0
