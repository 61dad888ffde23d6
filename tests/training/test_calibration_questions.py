"""`calibration_questions`: an ordinary DPO run on free text keeps, or gets, calibrated label confidence."""

from __future__ import annotations

import copy
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pairs
import pytest
import torch
from datasets import Dataset
from steps import lora
from tiny import tiny_model, tiny_tokenizer
from transformers import HfArgumentParser

import catto
from catto.engines.transformers import TransformersEngine
from catto.io.record_files import write_records
from catto.records import Option, Prediction, Question
from catto.training.config import CATTOConfig
from catto.training.monitor import label_metrics
from catto.training.question_stream import load_calibration_questions
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow

LABELS = ("A", "B", "C")


def questions(n: int, seed: int) -> list[Question]:
    """Questions whose gold label is A in six of ten cases: that is all there is to know about them."""
    draw = random.Random(seed)
    made = []
    for number in range(n):
        words = " ".join(draw.choice(pairs.WORDS) for _ in range(4))
        gold = draw.choices(LABELS, weights=(6, 3, 1))[0]
        options = tuple(Option(label=label, text=label.lower() * 3) for label in LABELS)
        fields = {"question": words}
        made.append(Question(id=f"{seed}-{number}", task="t", split="train", fields=fields, options=options, gold=gold))
    return made


def free_text(n: int = 16) -> Dataset:
    """Pairs of ordinary text, with neither labels nor answers."""
    draw = random.Random(5)
    rows = []
    for _ in range(n):
        prompt, chosen, rejected = (" ".join(draw.choice(pairs.WORDS) for _ in range(6)) for _ in range(3))
        turn = {"chosen": chosen, "rejected": rejected}
        sides = {side: [{"role": "assistant", "content": text}] for side, text in turn.items()}
        rows.append({"prompt": [{"role": "user", "content": prompt}], **sides})
    return Dataset.from_list(rows)


def model(seed: int = 0) -> Any:
    return tiny_model(seed, max_position_embeddings=1024)


def trainer(folder: Path, **options: Any) -> Any:
    reference = {} if "peft_config" in options else {"ref_model": model()}
    settings = {"rows": free_text(), "model": model(), "max_length": 160, **reference, **options}
    return pairs.trainer(CATTOTrainer, CATTOConfig, folder, **settings)


def held_out_numbers(trained: Any) -> dict[str, float]:
    """ECE and NLL of the labels after the model's own reasoning, on questions that no training saw."""
    predictions: list[Prediction] = catto.evaluate(trained, tiny_tokenizer(), questions(40, seed=8), max_tokens=40)
    logprobs = []
    for prediction in predictions:
        assert prediction.label_logprobs is not None
        logprobs.append([prediction.label_logprobs[label] for label in LABELS])
    return label_metrics(np.array(logprobs), [LABELS.index(prediction.gold) for prediction in predictions])


def overconfident_model(folder: Path) -> Any:
    """A model that learned to answer B, whatever is asked."""
    wrong = [question.model_copy(update={"gold": "B"}) for question in questions(64, seed=3)]
    run = trainer(folder, calibration="outcome", calibration_questions=wrong, **STEPS)
    run.train()
    return run.model.state_dict()


STEPS = {"max_steps": 25, "learning_rate": 2e-3, "outcome_rows_per_pair": 4}


def test_training_on_free_text_improves_the_confidence_of_held_out_questions(tmp_path: Path) -> None:
    """The start model is sure of B, which is right in three of ten cases. DPO on free text leaves it so."""
    path = tmp_path / "questions.jsonl"
    write_records(path, questions(96, seed=1))
    weights = overconfident_model(tmp_path / "start")
    start, models = model(), {"model": model(), "ref_model": model()}
    for one in (start, *models.values()):
        one.load_state_dict(weights)
    before = held_out_numbers(start)
    run = trainer(tmp_path / "a", calibration="outcome", calibration_questions=str(path), **models, **STEPS)
    run.train()
    after = held_out_numbers(run.model)
    plain = {"model": copy.deepcopy(start), "ref_model": start, "max_steps": 25, "learning_rate": 2e-3}
    alone = trainer(tmp_path / "b", calibration="none", **plain)
    alone.train()
    without = held_out_numbers(alone.model)
    for worse in (before, without):
        assert after["val_nll"] < worse["val_nll"] - 0.5
        assert after["val_ece"] < worse["val_ece"] - 0.1
    rewards = [entry["rewards/accuracies"] for entry in run.state.log_history if "rewards/accuracies" in entry]
    assert rewards[-1] > 0.5  # and the preferences are learned


def test_a_table_of_questions_and_its_records_are_the_same_questions(tmp_path: Path) -> None:
    """Every row of a user's file is a question, whatever split it would be in; its fields are found by their names."""
    records = questions(30, seed=1)
    rows = []
    for question in records:
        answer = question.labels.index(question.gold)
        choices = [f"choice {option.label}" for option in question.options]
        rows.append({"question": " ".join(question.fields.values()), "choices": choices, "answer": choices[answer]})
    table = tmp_path / "own.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_records(tmp_path / "records.jsonl", records)
    own = load_calibration_questions(str(table))
    assert load_calibration_questions(str(tmp_path / "records.jsonl")) == records
    right = {
        question.fields["question"]: question.options[question.labels.index(question.gold)].text for question in own
    }
    assert right == {row["question"]: row["answer"] for row in rows}


def test_a_table_whose_fields_are_unclear_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "own.jsonl"
    table.write_text('{"a": 1, "b": 2}\n', encoding="utf-8")
    with pytest.raises(catto.DataError, match=r"own\.jsonl"):
        load_calibration_questions(str(table))


def test_responses_are_sampled_once_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"calibration": "outcome", "calibration_questions": questions(6, seed=1)}
    first = trainer(tmp_path, **options)
    calls = []
    generate = TransformersEngine.generate
    monkeypatch.setattr(TransformersEngine, "generate", lambda self, *args: calls.append(1) or generate(self, *args))
    again = trainer(tmp_path, **options)
    assert not calls
    assert again._stream.examples == first._stream.examples
    for change in (
        {"calibration_questions": questions(5, seed=1)},
        {"model": model(seed=2)},
        {"seed": 11},
        {"outcome_target": "votes", "outcome_samples": 2},
    ):
        calls.clear()
        trainer(tmp_path, **{**options, **change})
        assert calls, change


def test_every_example_ends_where_a_label_is_predicted(tmp_path: Path) -> None:
    """A random model gives no answer, so its response is closed, and the label follows the answer's opening."""
    asked = questions(6, seed=1)
    made = trainer(tmp_path, calibration="outcome", calibration_questions=asked)._stream.examples
    tokenizer = tiny_tokenizer()
    assert [example.question for example in made] == [question.id for question in asked]
    for question, example in zip(asked, made, strict=True):
        assert tokenizer.decode(example.before_label().completion).endswith("<answer>\n")
        assert tokenizer.convert_ids_to_tokens(example.label.candidates) == list(LABELS)
        assert question.labels[example.label.gold] == question.gold
        assert tokenizer.decode(example.row.prompt).endswith("<turn>assistant\n")
        assert example.tokens <= 160


def test_votes_are_shares_of_the_start_models_samples(tmp_path: Path) -> None:
    asked = questions(4, seed=1)
    options = {"calibration": "outcome", "calibration_questions": asked, "outcome_samples": 3}
    votes = trainer(tmp_path, outcome_target="votes", **options)._stream.examples
    predictions = catto.evaluate(model(), tiny_tokenizer(), asked, k=3, temperature=1.0, seed=3, max_tokens=160)
    for question, example in zip(asked, votes, strict=True):
        labels = [prediction.label for prediction in predictions if prediction.question == question.id]
        assert example.label.target == pytest.approx([labels.count(label) / 3 for label in LABELS])
    mixed = trainer(tmp_path, outcome_target="mix", **options)._stream.examples
    for example, other in zip(votes, mixed, strict=True):
        gold = [float(place == example.label.gold) for place in range(3)]
        means = [(share + one) / 2 for share, one in zip(example.label.target, gold, strict=True)]
        assert other.label.target == pytest.approx(means)


def test_an_adapted_model_and_decoupled_losses_train(tmp_path: Path) -> None:
    options = {"calibration": "outcome", "calibration_questions": questions(4, seed=1), "peft_config": lora()}
    run = trainer(tmp_path, max_steps=1, **options)
    run.train()
    assert run.state.log_history[0]["calibration/outcome"] > 0


def test_the_configuration_is_stored_and_parsed(tmp_path: Path) -> None:
    asked = questions(3, seed=1)
    config = CATTOConfig(str(tmp_path), calibration="outcome", calibration_questions=asked, bf16=False)
    stored = json.loads(config.to_json_string())["calibration_questions"]
    assert [Question.model_validate(value) for value in stored] == asked
    again = CATTOConfig(str(tmp_path), calibration="outcome", calibration_questions=stored, bf16=False)
    assert again.calibration_questions == asked
    assert config.to_sanitized_dict()
    torch.save(config, tmp_path / "args.bin")
    loaded = catto.load_questions("witnesses", "train", limit=3)
    taken = CATTOConfig(str(tmp_path), calibration="outcome", calibration_questions=loaded, bf16=False)
    assert taken.calibration_questions == list(catto.load_questions("witnesses", "train", limit=3))
    arguments = ["--output_dir", str(tmp_path), "--calibration", "outcome", "--calibration_questions", "q.jsonl"]
    (parsed,) = HfArgumentParser(CATTOConfig).parse_args_into_dataclasses([*arguments, "--bf16", "False"])
    assert parsed.calibration_questions == "q.jsonl"
    path = CATTOConfig(str(tmp_path), calibration="outcome", calibration_questions=tmp_path / "q.jsonl", bf16=False)
    assert path.calibration_questions == str(tmp_path / "q.jsonl")


def test_questions_that_nothing_reads_or_that_are_missing_are_refused(tmp_path: Path) -> None:
    asked = questions(3, seed=1)
    with pytest.raises(ValueError, match="but calibration is 'catto': this option is used only with outcome"):
        CATTOConfig(str(tmp_path), calibration_questions=asked, bf16=False)
    with pytest.raises(catto.DataError, match=r"none\.jsonl"):
        trainer(tmp_path, calibration="outcome", calibration_questions=str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="there is no question"):
        trainer(tmp_path, calibration="outcome", calibration_questions=[])


def test_questions_without_room_for_an_answer_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = questions(3, seed=1)
    fields = {"question": " ".join(["because"] * 200)}
    asked[1] = asked[1].model_copy(update={"fields": fields})
    with caplog.at_level(logging.WARNING, "catto"):
        made = trainer(tmp_path, calibration="outcome", calibration_questions=asked)._stream.examples
    assert [example.question for example in made] == ["1-0", "1-2"]
    assert "left out 1 of 3 calibration questions" in caplog.text
