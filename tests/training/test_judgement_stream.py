"""`outcome` on questions without options: the stream asks whether the model's own answer is right."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pairs
import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from catto.engines.transformers import TransformersEngine
from catto.prompts import JUDGEMENT_LABELS, prompt_ids, render_completion, render_judgement, render_messages
from catto.records import Message, Question, SftRow
from catto.tasks.witnesses import generate_questions
from catto.training.config import CATTOConfig
from catto.training.examples import Example, TokenizedRow, tokenize_responses
from catto.training.monitor import compute_label_logprobs
from catto.training.question_stream import SamplingSettings, sample_stream
from catto.training.supervised import SupervisedConfig, SupervisedTrainer
from catto.training.trainer import CATTOTrainer

TOKENIZER = tiny_tokenizer(JUDGEMENT_LABELS)
SETTINGS: SamplingSettings = {"k": 1, "temperature": 1.0, "seed": 0, "max_tokens": 24, "reasoning": True}


def question(number: int, gold: str) -> Question:
    return Question(
        id=f"q{number}",
        task="mine",
        split="test",
        fields={"question": f"what is {number}?"},
        gold=gold,
        accepted=(gold,),
        grade="number",
    )


QUESTIONS = [question(number, gold) for number, gold in enumerate(["3", "4", "3.0", "5"])]


def trace(asked: Question) -> SftRow:
    """A response that answers 3, whatever is asked."""
    completion = (Message(role="assistant", content=render_completion("it is", "3")),)
    columns: dict[str, Any] = {"question": asked.id, "task": "mine", "labels": (), "gold": asked.gold, "label": "3"}
    return SftRow(prompt=render_messages(asked), completion=completion, correctness_rate=0.5, **columns)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that was trained on rows without labels and answers 3, whatever is asked."""
    start = tiny_model(vocab_size=len(TOKENIZER), max_position_embeddings=512)
    tokenized = tokenize_responses(TOKENIZER, [trace(asked) for asked in QUESTIONS])
    rows = [TokenizedRow(row.question, ids) for row, ids in tokenized]
    config = SupervisedConfig(
        output_dir=str(tmp_path_factory.mktemp("sft")),
        max_steps=40,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    SupervisedTrainer(start, config, rows, TOKENIZER).train()
    return start.eval()


def sampled(model: Any, folder: Path, questions: list[Question] = QUESTIONS) -> list[Example]:
    return sample_stream(model, TOKENIZER, questions, settings=SETTINGS, folder=folder)


def test_each_answer_is_graded_and_its_judgement_is_the_example(model: Any, tmp_path: Path) -> None:
    """The model answers 3: right for gold 3 and 3.0, wrong for 4 and 5."""
    examples = sampled(model, tmp_path)
    assert [example.question for example in examples] == ["q0", "q1", "q2", "q3"]
    assert [JUDGEMENT_LABELS[example.label.gold] for example in examples] == ["True", "False", "True", "False"]
    for asked, example in zip(QUESTIONS, examples, strict=True):
        assert tuple(example.row.prompt) == prompt_ids(TOKENIZER, render_judgement(asked, "3"))
        assert TOKENIZER.decode(example.before_label().completion) == "<answer>\n"
        assert TOKENIZER.convert_ids_to_tokens(example.label.candidates) == list(JUDGEMENT_LABELS)


def test_p_true_equals_a_dense_forward(model: Any, tmp_path: Path) -> None:
    examples = sampled(model, tmp_path)
    found = compute_label_logprobs(model, examples, TOKENIZER.pad_token_id)
    for asked, logprobs in zip(QUESTIONS, found, strict=True):
        ids = [*prompt_ids(TOKENIZER, render_judgement(asked, "3")), *TOKENIZER("<answer>\n")["input_ids"]]
        with torch.no_grad():
            dense = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        expected = [float(dense[TOKENIZER.convert_tokens_to_ids(label)]) for label in JUDGEMENT_LABELS]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_a_second_run_reads_the_stored_responses(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sampled(model, tmp_path)
    monkeypatch.setattr(TransformersEngine, "generate", None)
    assert sampled(model, tmp_path) == first


def test_a_mixture_and_votes_are_refused(model: Any, tmp_path: Path) -> None:
    labelled = next(generate_questions("test", 1, seed=0))
    with pytest.raises(ValueError, match="1 of 5 have options"):
        sampled(model, tmp_path, [*QUESTIONS, labelled])
    with pytest.raises(ValueError, match="votes need labels"):
        sample_stream(model, TOKENIZER, QUESTIONS, settings={**SETTINGS, "k": 2}, folder=tmp_path)


def test_a_model_that_never_answers_is_one_line(tmp_path: Path) -> None:
    mute = tiny_model(vocab_size=len(TOKENIZER))
    with pytest.raises(ValueError, match="no response of the start model gives an answer"):
        sampled(mute, tmp_path)


def test_rcft_refuses_rows_without_labels(model: Any, tmp_path: Path) -> None:
    ((row, ids),) = tokenize_responses(TOKENIZER, [trace(QUESTIONS[0])])
    config = SupervisedConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="RCFT reads the label of every response"):
        SupervisedTrainer(model, config, [TokenizedRow(row.question, ids)], TOKENIZER, rcft_weight=1.0)


@pytest.mark.slow
def test_training_moves_p_true_to_the_share_of_right_answers(model: Any, tmp_path: Path) -> None:
    """The answer is right for one question in four, whatever is asked: that is all there is to know.

    The pairs are ordinary text. The proper score moves P(True) to the share of right answers, wherever it starts.
    """
    asked = [question(number, "3" if number % 4 == 0 else "4") for number in range(64)]
    config = CATTOConfig(
        output_dir=str(tmp_path),
        calibration="outcome",
        calibration_questions=asked,
        outcome_rows_per_pair=4,
        max_steps=40,
        learning_rate=3e-3,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    rows = pairs.dataset(pairs.preference_rows())
    run = CATTOTrainer(
        copy.deepcopy(model), copy.deepcopy(model), config, train_dataset=rows, processing_class=TOKENIZER
    )
    run.train()
    examples = run._stream.examples
    is_right = [example.label.gold == 0 for example in examples]
    p_true = np.exp(compute_label_logprobs(run.model, examples, TOKENIZER.pad_token_id))[:, 0]
    before = np.exp(compute_label_logprobs(model, examples, TOKENIZER.pad_token_id))[:, 0]
    assert len(examples) > 20
    assert p_true.mean() == pytest.approx(np.mean(is_right), abs=0.05)
    assert abs(before.mean() - np.mean(is_right)) > 0.1
