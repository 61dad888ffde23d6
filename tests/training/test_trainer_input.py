"""What `CATTOTrainer` refuses, drops and stops at, and the card that it writes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pairs
import pytest
from datasets import Dataset
from steps import made
from transformers import TrainerCallback
from trl.trainer.dpo_trainer import DataCollatorForPreference

from catto.training.config import CATTOConfig
from catto.training.trainer import CATTOTrainer


def _rows(change: Any = None, n: int = 8) -> Dataset:
    rows = [row.model_dump(mode="json") for row in pairs.preference_rows(n)]
    for number, row in enumerate(rows):
        if change:
            change(number, row)
    return Dataset.from_list(rows)


def test_empty_dataset_is_an_error() -> None:
    with pytest.raises(ValueError, match="the dataset is empty"):
        made(CATTOTrainer, CATTOConfig, rows=_rows().select([]))


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_missing_column_is_named(column: str) -> None:
    with pytest.raises(ValueError, match=f"the train dataset has no column '{column}'; it has prompt"):
        made(CATTOTrainer, CATTOConfig, rows=_rows().remove_columns(column))


@pytest.mark.parametrize("options", [{"calibrate_tokens": "label"}, {"calibration": "outcome"}])
def test_objectives_at_the_label_ask_for_the_label_columns(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"the train dataset lacks columns that .* needs: 'labels'"):
        made(CATTOTrainer, CATTOConfig, rows=_rows().remove_columns("labels"), **options)


def test_outcome_on_pairs_asks_for_the_correctness_rate() -> None:
    with pytest.raises(ValueError, match=r"the train dataset lacks columns that .* needs: 'correctness_rate'"):
        made(CATTOTrainer, CATTOConfig, rows=_rows().remove_columns("correctness_rate"), calibration="outcome")


@pytest.mark.parametrize("streamed", [False, True])
def test_all_missing_columns_are_listed_at_once_with_a_row_that_has_them(streamed: bool, tmp_path: Path) -> None:
    rows = _rows().select_columns(["prompt", "chosen", "rejected"])
    given = rows.to_iterable_dataset() if streamed else rows
    with pytest.raises(
        ValueError, match=r"lacks columns that .* needs: 'labels', 'gold', 'correctness_rate'"
    ) as caught:
        pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, rows=given, calibration="outcome")
    example = json.loads(str(caught.value).partition("A row looks like ")[2])
    assert example.keys() == {"prompt", "chosen", "rejected", "labels", "gold", "correctness_rate"}
    trainer = pairs.trainer(
        CATTOTrainer, CATTOConfig, tmp_path, rows=Dataset.from_list([example]), calibration="outcome"
    )
    assert len(trainer.train_dataset) == 1


def test_labels_that_begin_with_one_token_are_refused() -> None:
    def collide(number: int, row: dict[str, Any]) -> None:
        row["labels"] = ["A", "A B", "C", "D"]
        row["gold"] = "A"
        for side in ("chosen", "rejected"):
            row[side][0]["content"] = "<think>\nbecause\n</think>\n<answer>\nA\n</answer>"

    with pytest.raises(ValueError, match="train dataset row 0, chosen: labels 'A' and 'A B' begin with the same token"):
        made(CATTOTrainer, CATTOConfig, rows=_rows(collide), calibrate_tokens="label")


def test_a_row_without_labels_is_named() -> None:
    def strip(number: int, row: dict[str, Any]) -> None:
        row["labels"] = None if number == 2 else row["labels"]

    with pytest.raises(ValueError, match="train dataset row 2: labels are None, expected a list"):
        made(CATTOTrainer, CATTOConfig, rows=_rows(strip), calibration="outcome")


def _lengthen(number: int, row: dict[str, Any], where: int, side: str) -> None:
    if number == where:
        row[side][0]["content"] = " ".join(["because"] * 300) + row[side][0]["content"]


@pytest.mark.parametrize("side", ["prompt", "rejected"])
def test_rows_longer_than_the_context_are_dropped_counted_and_listed(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = _rows(lambda number, row: _lengthen(number, row, 3, side))
    with caplog.at_level(logging.WARNING, "catto"):
        trainer = made(CATTOTrainer, CATTOConfig, rows=rows, max_length=200, calibration="outcome")
    assert "dropped 1 of 8 train rows longer than 200 tokens: row 3" in caplog.text
    assert trainer.train_dataset["question"] == ["q0", "q1", "q2", "q4", "q5", "q6", "q7"]


@pytest.mark.parametrize(("side", "options"), [("prompt", {}), ("chosen", {"calibrate_tokens": "label"})])
def test_all_rows_too_long_is_an_error(side: str, options: dict[str, Any]) -> None:
    rows = _rows(lambda number, row: _lengthen(number, row, number, side))
    with pytest.raises(ValueError, match="every row of the train dataset is longer than max_length 100"):
        made(CATTOTrainer, CATTOConfig, rows=rows, max_length=100, **options)


def test_a_streamed_dataset_leaves_long_rows_out_and_trains(tmp_path: Path) -> None:
    rows = _rows(lambda number, row: _lengthen(number, row, 1, "prompt")).to_iterable_dataset()
    options = {"max_length": 200, "calibration": "outcome", "max_steps": 1}
    trainer = pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, rows=rows, **options)
    assert [row["question"] for row in trainer.train_dataset] == ["q0", "q2", "q3", "q4", "q5", "q6", "q7"]
    trainer.train()
    assert trainer.state.log_history[0]["calibration/outcome"] > 0


class _Poison(TrainerCallback):
    """Makes a weight NaN before step 2, as a broken batch or a broken device would."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 2:
            model.model.norm.weight.data.fill_(math.nan)


@pytest.mark.parametrize("calibration", ["none", "catto"])
def test_nan_loss_stops_with_step_and_rows_and_keeps_the_last_checkpoint(tmp_path: Path, calibration: str) -> None:
    options = {"callbacks": [_Poison()], "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer = made(CATTOTrainer, CATTOConfig, folder=tmp_path, calibration=calibration, **options)
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 2 on rows q\d+, q\d+, q\d+, q\d+; the check"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    resumed = made(CATTOTrainer, CATTOConfig, folder=tmp_path, calibration=calibration, **options | {"callbacks": []})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4


def test_own_collator_is_refused_where_the_head_is_ours() -> None:
    class Own(DataCollatorForPreference):
        pass

    trainer = made(CATTOTrainer, CATTOConfig)
    trainer.data_collator = Own(pad_token_id=0)
    with pytest.raises(ValueError, match="leave data_collator out"):
        trainer.train()


def test_own_collator_is_used_where_the_loss_is_trl() -> None:
    class Own(DataCollatorForPreference):
        pass

    trainer = made(CATTOTrainer, CATTOConfig, calibration="none", max_steps=1)
    trainer.data_collator = Own(pad_token_id=0)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("calibration", "cato"),
        ("reduce", "max"),
        ("calibrate_tokens", "first"),
        ("outcome_score", "l2"),
        ("outcome_rows_per_pair", 0),
        ("calibration_weight", -0.1),
        ("calibration_weight", math.nan),
        ("calibration_weight", math.inf),
        ("calibration_weight", "0.1"),
        ("calibration_weight", True),
        ("outcome_rows_per_pair", 1.5),
    ],
)
def test_wrong_knob_is_named(knob: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{knob} is {value!r}, expected"):
        CATTOConfig(output_dir="x", bf16=False, **{knob: value})
