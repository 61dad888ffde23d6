"""Train tiny models with every kind of trainer and read back what the callback logged."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pairs
import pytest
import torch
from datasets import Dataset
from pages import ROOT, blocks
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

import catto
from catto.integrations.trainer_callback import find_tensorboard_folder, list_trackers
from catto.metrics.errors import brier, ece
from catto.records import Option, Question

NUMBERS = {"accuracy", "mean_confidence", "ece", "brier", "fallback_rate"}
STEPS = 2


def make_questions(n: int = 6) -> list[Question]:
    draw = random.Random(3)
    options = (Option(label="A", text="true"), Option(label="B", text="false"))
    made = []
    for number in range(n):
        fields = {"question": " ".join(draw.choice(pairs.WORDS) for _ in range(4))}
        gold = draw.choice("AB")
        made.append(Question(id=f"q{number}", task="t", split="test", fields=fields, options=options, gold=gold))
    return made


def make_callback() -> Any:
    return catto.ReliabilityCallback(make_questions(), tiny_tokenizer(), max_tokens=8, bins=5, reasoning=False)


def make_model() -> Any:
    return tiny_model(max_position_embeddings=1024)


def arguments(kind: Any, out: Path, **more: Any) -> Any:
    settings = {
        "output_dir": str(out),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": ["tensorboard"],
        "disable_tqdm": True,
    }
    return kind(**settings | more)


def as_text(messages: Any) -> list[dict[str, str]]:
    return [message.model_dump() for message in messages]


def preference_data() -> Dataset:
    rows = []
    for row in pairs.preference_rows(4):
        rows.append({name: as_text(getattr(row, name)) for name in ("prompt", "chosen", "rejected")})
    return Dataset.from_list(rows)


def plain_trainer(out: Path, callbacks: list[Any], **more: Any) -> Any:
    ids = [[5 + place, 9, 11 + place, 12] for place in range(4)]
    data = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
    return Trainer(
        model=make_model(),
        args=arguments(TrainingArguments, out, **more),
        train_dataset=data,
        eval_dataset=data,
        callbacks=callbacks,
    )


def sft_trainer(out: Path, callbacks: list[Any]) -> Any:
    rows = [{"prompt": as_text(row.prompt), "completion": as_text(row.completion)} for row in pairs.sft_rows(4)]
    data = Dataset.from_list(rows)
    return build(SFTTrainer, SFTConfig, out, callbacks, data)


def dpo_trainer(out: Path, callbacks: list[Any]) -> Any:
    return build(DPOTrainer, DPOConfig, out, callbacks, preference_data(), ref_model=make_model())


def kto_trainer(out: Path, callbacks: list[Any]) -> Any:
    rows = []
    for row in pairs.preference_rows(4):
        rows.append({"prompt": as_text(row.prompt), "completion": as_text(row.chosen), "label": True})
        rows.append({"prompt": as_text(row.prompt), "completion": as_text(row.rejected), "label": False})
    return build(KTOTrainer, KTOConfig, out, callbacks, Dataset.from_list(rows), ref_model=make_model())


def count_words(completions: list[Any], **_: Any) -> list[float]:
    return [float(len(turns[0]["content"].split())) for turns in completions]


def grpo_trainer(out: Path, callbacks: list[Any]) -> Any:
    data = Dataset.from_list([{"prompt": as_text(row.prompt)} for row in pairs.sft_rows(4)])
    more = {"num_generations": 2, "max_completion_length": 6}
    return build(GRPOTrainer, GRPOConfig, out, callbacks, data, reward_funcs=count_words, config=more)


def build(
    trainer: Any, kind: Any, out: Path, callbacks: list[Any], data: Dataset, config: Any = None, **more: Any
) -> Any:
    return trainer(
        model=make_model(),
        args=arguments(kind, out, **config or {}),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tiny_tokenizer(),
        callbacks=callbacks,
        **more,
    )


TRAINERS = {
    "transformers": plain_trainer,
    "sft": sft_trainer,
    "dpo": dpo_trainer,
    "kto": kto_trainer,
    "grpo": grpo_trainer,
}


@pytest.mark.filterwarnings("ignore")  # what TRL and TensorBoard warn about is theirs
@pytest.mark.parametrize("kind", TRAINERS)
def test_every_trainer_logs_numbers_and_an_image(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = TRAINERS[kind](tmp_path, [make_callback()])
    trainer.train()
    events = EventAccumulator(str(find_tensorboard_folder(tmp_path) / "reliability"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"eval/reliability_{name}" for name in NUMBERS}
    scalars = sorted(events.Scalars("eval/reliability_ece"), key=lambda point: point.step)
    assert [point.step for point in scalars] == [1, 2]
    assert events.Tags()["images"] == ["eval/reliability"]
    image = events.Images("eval/reliability")[-1]
    assert image.width > 200
    assert image.encoded_image_string.startswith(b"\x89PNG")
    history = [entry for entry in trainer.state.log_history if "eval_reliability_ece" in entry]
    assert [entry["step"] for entry in history] == [1, 2]
    assert [entry["eval_reliability_ece"] for entry in history] == pytest.approx([point.value for point in scalars])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "block"), [("dpo+catto", "preference"), ("cft", "rcft")])
def test_a_run_of_a_recipe_logs_what_its_trainer_measures(method: str, block: str, tmp_path: Path) -> None:
    """The trainer's own numbers, `val_ece` and so on, and those next to the diagram are of the same answers."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from train_world import made_work

    from catto.pipeline.kinds.train import run_train

    settings = {"epochs": 1, "batch_size": 2, "checkpoint_steps": 1, "trl": {"report_to": "tensorboard"}}
    work = made_work(tmp_path, method, **{block: settings})
    run_train(work)
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ
    [folder] = (tmp_path / "tensorboard").iterdir()
    own = EventAccumulator(str(folder)).Reload()
    ours = EventAccumulator(str(folder / "reliability")).Reload()
    assert ours.Tags()["images"] == ["eval/reliability"]
    for name, same in (("ece", "val_ece"), ("accuracy", "val_accuracy"), ("mean_confidence", "val_confidence")):
        # Every evaluation writes a file. Within one second their names are not in the order of the steps.
        points = sorted(ours.Scalars(f"eval/reliability_{name}"), key=lambda point: point.step)
        expected = own.Scalars(f"eval/{same}")
        assert len(points) > 1
        assert [point.step for point in points] == [point.step for point in expected]
        assert [point.value for point in points] == pytest.approx([point.value for point in expected], abs=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_numbers_equal_those_of_evaluate(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path, [make_callback()], report_to=[])
    trainer.train()
    measured = trainer.evaluate()
    predictions = catto.evaluate(trainer.model, tiny_tokenizer(), make_questions(), max_tokens=8, reasoning=False)
    confidence = np.array([prediction.confidence for prediction in predictions])
    correct = np.array([prediction.is_correct for prediction in predictions])
    assert measured["eval_reliability_ece"] == pytest.approx(ece(confidence, correct, bins=5), abs=1e-12)
    assert measured["eval_reliability_brier"] == pytest.approx(brier(confidence, correct), abs=1e-12)
    assert measured["eval_reliability_accuracy"] == correct.mean()


@pytest.mark.filterwarnings("ignore")
def test_training_is_the_same_with_and_without_the_callback(tmp_path: Path) -> None:
    weights = []
    for name, callbacks in (("with", [make_callback()]), ("without", [])):
        trainer = plain_trainer(tmp_path / name, callbacks, report_to=[], seed=1)
        trainer.train()
        weights.append(torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()]))
    assert torch.equal(weights[0], weights[1])


@pytest.mark.filterwarnings("ignore")
def test_the_best_checkpoint_can_be_chosen_by_ece(tmp_path: Path) -> None:
    trainer = plain_trainer(
        tmp_path,
        [make_callback()],
        report_to=[],
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="reliability_ece",
        greater_is_better=False,
    )
    trainer.train()
    history = [entry["eval_reliability_ece"] for entry in trainer.state.log_history if "eval_reliability_ece" in entry]
    assert trainer.state.best_metric == min(history)


@pytest.mark.filterwarnings("ignore")
def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "use-with.md").read_text(encoding="utf-8")
    [code] = [block.text for block in blocks(page) if "DPOTrainer" in block.text]
    for written, small in (
        ('"mmlu", "validation", limit=200', '"witnesses", "validation", limit=4'),
        ("eval_strategy=", "use_cpu=True, bf16=False, max_steps=1, eval_steps=1, disable_tqdm=True, eval_strategy="),
        ("(questions, tokenizer)", "(questions, tokenizer, max_tokens=8)"),
    ):
        assert code.count(written) == 1
        code = code.replace(written, small)
    data = preference_data()
    make_model().save_pretrained("start")  # TRL loads the reference from where the model came from
    model = AutoModelForCausalLM.from_pretrained("start")
    names = {"model": model, "tokenizer": tiny_tokenizer(), "train_pairs": data, "held_out_pairs": data}
    exec(code, names)
    [entry] = [entry for entry in names["trainer"].state.log_history if "eval_reliability_ece" in entry]
    assert entry["step"] == 1


def test_trackers_are_those_of_report_to() -> None:
    assert list_trackers("wandb") == ["wandb"]
    assert list_trackers(["mlflow", "trackio", "codecarbon"]) == ["mlflow", "trackio"]
    assert list_trackers([]) == []
    assert list_trackers("none") == []


def test_no_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one question"):
        catto.ReliabilityCallback([], tiny_tokenizer())


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_numbers_and_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow (pip install mlflow)")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    with mlflow.start_run() as run:
        plain_trainer(tmp_path / "out", [make_callback()], report_to=["mlflow"]).train()
    client = mlflow.MlflowClient()
    points = client.get_metric_history(run.info.run_id, "eval_reliability_ece")
    assert sorted({point.step for point in points}) == [1, 2]
    files = client.list_artifacts(run.info.run_id, "reliability")
    assert [file.path for file in files] == ["reliability/step-1.png", "reliability/step-2.png"]


@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_numbers_and_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="W&B (pip install wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with wandb.init(project="catto") as run:
        plain_trainer(tmp_path / "out", [make_callback()], report_to=["wandb"]).train()
        assert 0 <= run.summary["eval/reliability_ece"] <= 1
        assert run.summary["eval/reliability"]["_type"] == "image-file"


@pytest.mark.slow
def test_trackio_gets_numbers_and_an_image(tmp_path: Path) -> None:
    """In a process of its own: trackio reads the name of its folder when TRL imports it."""
    pytest.importorskip("trackio", reason="trackio (pip install trackio)")
    code = (
        "from pathlib import Path\n"
        "from test_trainer_callback import make_callback, plain_trainer\n"
        "plain_trainer(Path('out'), [make_callback()], report_to=['trackio'], project='catto-test').train()"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, capture_output=True)
    [database] = (tmp_path / "trackio").glob("*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics").fetchall()
    logged = [json.loads(metrics) for _, metrics in rows if "eval/reliability_ece" in str(metrics)]
    assert len(logged) == STEPS
    assert all(0 <= metrics["eval/reliability_ece"] <= 1 for metrics in logged)
    assert len(list((tmp_path / "trackio").rglob("*.png"))) == STEPS
