"""`catto eval`: the files it writes, what it prints, what it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import typer
from command import run
from huggingface_hub import DatasetCard, ModelCard
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from catto.cli.evaluate import evaluate as command
from catto.io.record_files import read_records
from catto.prompts import render_messages
from catto.records import Prediction
from catto.tasks import load_questions


def test_the_command_writes_predictions_and_prints_the_table(tmp_path: Path) -> None:
    asked = list(load_questions("witnesses", "test", limit=12))
    words = tiny_tokenizer([message.content for question in asked for message in render_messages(question)])
    network = tiny_model(1, vocab_size=len(words))
    network.save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    app = typer.Typer()
    app.command()(command)
    options = ["--task", "witnesses", "--n", "12", "--max-tokens", "8", "--out", str(tmp_path / "eval")]
    shown = CliRunner().invoke(app, [str(tmp_path / "model"), *options], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "ECE" in shown.output
    assert "fallback 100.0 %" in shown.output
    assert shown.stdout.startswith("12 of 12 answers had to be forced")
    assert "confident by" not in shown.stdout
    assert "lies" not in shown.stdout
    assert "Answers: 0 after <answer>, 0 plain (stated without the tag), 12 forced (fallback)." in shown.output
    assert "12/12, accuracy" in shown.stderr
    found = list(read_records(tmp_path / "eval" / "predictions.jsonl", Prediction))
    assert [one.question for one in found] == [question.id for question in asked]
    assert ModelCard.load(tmp_path / "eval" / "model_card.md").data.eval_results[0].dataset_args == {"answers": 12}
    assert DatasetCard.load(tmp_path / "eval" / "README.md").data.configs[0]["data_files"][0]["split"] == "test"
    again = CliRunner().invoke(app, [str(tmp_path / "model"), *options, "--k", "2"])
    assert again.exit_code == 2
    assert "k is 2 at temperature 0" in again.stderr
    again = CliRunner().invoke(app, [str(tmp_path / "model"), *options, "--engine", "server"])
    assert "--engine server needs --base-url" in again.stderr


def test_an_interrupted_evaluation_says_that_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet: list[str | None] = []

    def opened(name: str, model: str, **options: Any) -> None:
        quiet.append(os.environ.get("TQDM_DISABLE"))  # the bars of a library, between our own lines
        raise KeyboardInterrupt

    monkeypatch.setattr("catto.cli.evaluate.open_engine", opened)
    monkeypatch.setattr("os.environ", {**os.environ})
    (tmp_path / "config.json").write_text("{}")
    stopped = run(capsys, "eval", tmp_path, "--task", "witnesses", "--n", "1", "--out", tmp_path / "eval")
    assert (stopped.code, stopped.err) == (130, "catto: interrupted; the same command resumes from here\n")
    assert quiet == ["1"]


def test_vllm_is_given_the_batch_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def opened(name: str, model: str, **options: Any) -> None:
        sizes.append(options["batch_size"])
        raise ValueError("there is no GPU")

    monkeypatch.setattr("catto.cli.evaluate.require_package", lambda *_: None)
    monkeypatch.setattr("catto.cli.evaluate.open_engine", opened)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    app = typer.Typer()
    app.command()(command)
    for more in ([], ["--batch-size", "7"]):
        options = ["--task", "witnesses", "--n", "2", "--engine", "vllm", "--out", str(tmp_path), *more]
        assert "there is no GPU" in CliRunner().invoke(app, [str(model), *options]).stderr
    assert sizes == [256, 7]
