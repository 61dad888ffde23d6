"""SFT, label smoothing, CFT and RCFT on a tiny model, and calibration measured while training."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pairs import sft_rows
from tiny import tiny_model, tiny_tokenizer
from tokenizer_kinds import kinds
from transformers import TrainerState

from catto.engines import Context
from catto.engines.transformers import TransformersEngine
from catto.metrics import errors
from catto.prompts import render_completion
from catto.records import Message
from catto.training.checkpoints import checkpoint_arguments
from catto.training.examples import Example, Label, make_examples, row_ids
from catto.training.monitor import compute_label_logprobs, label_metrics
from catto.training.supervised import RcftBins, SupervisedConfig, SupervisedTrainer

TOKENIZER = tiny_tokenizer()


def arguments(folder: Path, **options: Any) -> SupervisedConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    return SupervisedConfig(**{**settings, **options})


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def dense_loss(model: Any, batch: list[Example], epsilon: float) -> torch.Tensor:
    """Token mean of the smoothed cross-entropy over all completions, one unpadded forward a row."""
    total, tokens = torch.zeros(()), 0
    for example in batch:
        ids = torch.tensor([example.row.prompt + example.row.completion])
        logits = model(input_ids=ids).logits[0, len(example.row.prompt) - 1 : -1]
        target = torch.tensor(example.row.completion)
        total = total + torch.nn.functional.cross_entropy(logits, target, label_smoothing=epsilon, reduction="sum")
        tokens += len(target)
    return total / tokens


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize(("batch", "accumulation"), [(8, 1), (2, 4), (1, 8), (3, 3)])
def test_step_is_the_token_mean_of_the_global_batch(
    tmp_path: Path, epsilon: float, batch: int, accumulation: int
) -> None:
    """One SGD step moves the weights by the dense gradient, however the eight ragged rows are accumulated."""
    rows = make_examples(TOKENIZER, sft_rows(8))
    model = tiny_model()
    reference = copy.deepcopy(model)
    args = arguments(tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    SupervisedTrainer(model, args, rows, TOKENIZER, epsilon=epsilon).train()
    dense_loss(reference, rows, epsilon).backward()
    expected = torch.cat([(p - 1e-2 * p.grad).detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(weights(model), expected, rtol=0, atol=2e-6)


def test_experts_are_balanced_as_by_the_models_own_loss(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 1.0}
    model = tiny_model(arch="qwen3_moe", output_router_logits=True, **experts)
    reference = copy.deepcopy(model)
    (example,) = make_examples(TOKENIZER, sft_rows(1))
    SupervisedTrainer(model, arguments(tmp_path), [example], TOKENIZER).train()
    ids = torch.tensor([example.row.prompt + example.row.completion])
    labels = ids.clone()
    labels[:, : len(example.row.prompt)] = -100
    out = reference(input_ids=ids, labels=labels)
    assert out.aux_loss > 0.1
    out.loss.backward()
    moved = [p - 1e-2 * (0 if p.grad is None else p.grad) for p in reference.parameters()]
    torch.testing.assert_close(weights(model), torch.cat([p.detach().flatten() for p in moved]), rtol=0, atol=2e-6)


def test_an_adapter_on_the_head_is_refused(tmp_path: Path) -> None:
    """Its weights would not be read: the head's statistics come from the weight below it."""
    from peft import LoraConfig, get_peft_model

    rows = make_examples(TOKENIZER, sft_rows(2))
    model = get_peft_model(tiny_model(tie_word_embeddings=False), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="an adapter on the LM head is not supported"):
        SupervisedTrainer(model, arguments(tmp_path), rows, TOKENIZER)


def test_one_process_uses_one_of_several_gpus(tmp_path: Path) -> None:
    """With more, Transformers would multiply the batch and split it by DataParallel, which no batch of ours fits."""
    args = arguments(tmp_path)
    args._n_gpu = 8
    trainer = SupervisedTrainer(tiny_model(), args, make_examples(TOKENIZER, sft_rows(2)), TOKENIZER)
    assert (trainer.args.n_gpu, trainer.args.train_batch_size) == (1, 8)


def test_rcft_is_the_mean_over_the_samples_of_the_step(tmp_path: Path) -> None:
    """8 = 1 x 8 = 3 + 3 + 2, though the last of three micro-batches is smaller."""
    rows = make_examples(TOKENIZER, sft_rows(8))
    spread = [(n + 0.5) / 10 for n in range(10)]

    def moved(batch: int, weight: float) -> torch.Tensor:
        model = tiny_model()
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": -(-8 // batch)}
        bins = RcftBins(lambda model: (spread * 2, [True] * 10 + [False] * 10))
        args = arguments(tmp_path / f"{batch} {weight}", learning_rate=0.5, **options)
        SupervisedTrainer(model, args, rows, TOKENIZER, bins=bins, rcft_weight=weight).train()
        return weights(model)

    whole = moved(8, 5.0)
    assert (whole - moved(8, 1.0)).abs().max() > 1e-2
    for batch in (1, 3):
        torch.testing.assert_close(moved(batch, 5.0), whole, rtol=0, atol=1e-6)


def test_rcft_divides_by_a_processes_own_share_of_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are averaged over processes: beside one with as many samples, a process moves as it does alone."""
    rows = make_examples(TOKENIZER, sft_rows(8))
    moved = []
    for processes in (1, 2):
        model = tiny_model()
        bins = RcftBins(lambda model: ([(n + 0.5) / 10 for n in range(10)] * 2, [True] * 10 + [False] * 10))
        args = arguments(tmp_path / str(processes), learning_rate=0.5)
        trainer = SupervisedTrainer(model, args, rows, TOKENIZER, bins=bins, rcft_weight=5.0)
        with monkeypatch.context() as patch:
            patch.setattr(trainer.accelerator, "gather", lambda mine, n=processes: torch.cat([mine] * n))
            trainer.train()
        moved.append(weights(model))
    assert (moved[0] - weights(tiny_model())).abs().max() > 1e-2
    torch.testing.assert_close(moved[1], moved[0], rtol=0, atol=0)


def test_rcft_leaves_out_answers_without_a_confidence_and_counts_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bins = RcftBins(lambda model: ([0.95, None, 0.95, 0.15], [True, True, False, True]))
    with caplog.at_level("WARNING"):
        SupervisedTrainer(
            tiny_model(),
            arguments(tmp_path),
            make_examples(TOKENIZER, sft_rows(8)),
            TOKENIZER,
            bins=bins,
            rcft_weight=1.0,
        ).train()
    assert bins.accuracy == [None, 1.0, None, None, None, None, None, None, None, 0.5]
    assert "1 of 4 answers lack the probability of a label" in caplog.text
    with pytest.raises(ValueError, match="no held-out answer has them"):
        RcftBins(lambda model: ([None], [True])).on_epoch_begin(None, TrainerState(), None)


def test_monitor_equals_the_engine_and_the_metrics() -> None:
    """Label log-probabilities equal the engine's scores at the same place; ECE is over the whole set."""
    rows = make_examples(TOKENIZER, sft_rows(13))
    model = tiny_model()
    ours = compute_label_logprobs(model, rows, TOKENIZER.pad_token_id, batch_size=4)
    engine = TransformersEngine(model, TOKENIZER)
    contexts = [
        Context(messages=row.prompt, prefix=tuple(e.before_label().completion), candidates=tuple(e.label.candidates))
        for row, e in zip(sft_rows(13), rows, strict=True)
    ]
    theirs = np.array([score.logprobs for score in engine.score(contexts)])
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    gold = [e.label.gold for e in rows]
    found = label_metrics(ours, gold)
    confidence, correct = np.exp(theirs.max(1)), theirs.argmax(1) == gold
    assert found["val_ece"] == pytest.approx(errors.ece(confidence, correct), abs=1e-5)
    assert found["val_accuracy"] == pytest.approx(correct.mean())
    assert found["val_nll"] == pytest.approx(-theirs[np.arange(13), gold].mean(), abs=1e-5)


def test_a_processor_has_its_tokenizer(tmp_path: Path) -> None:
    rows = make_examples(TOKENIZER, sft_rows(4))
    trainer = SupervisedTrainer(tiny_model(), arguments(tmp_path), rows, TOKENIZER, validation=rows)
    expected = trainer.evaluate()["eval_val_ece"]
    trainer.processing_class = SimpleNamespace(tokenizer=TOKENIZER)
    assert trainer.evaluate()["eval_val_ece"] == expected


def test_best_checkpoint_is_kept_by_the_metric_asked_for(tmp_path: Path) -> None:
    rows = make_examples(TOKENIZER, sft_rows(8))
    args = arguments(
        tmp_path, max_steps=6, learning_rate=0.5, **checkpoint_arguments("val_nll", 2) | {"save_strategy": "steps"}
    )
    trainer = SupervisedTrainer(
        tiny_model(), args, rows, TOKENIZER, validation=make_examples(TOKENIZER, sft_rows(8, seed=2))
    )
    trainer.train()
    logged = [entry["eval_val_nll"] for entry in trainer.state.log_history if "eval_val_nll" in entry]
    assert len(logged) == 3
    final = label_metrics(
        compute_label_logprobs(trainer.model, trainer.validation, 0), [e.label.gold for e in trainer.validation]
    )
    assert final["val_nll"] == pytest.approx(min(logged), abs=1e-6)


def test_last_step_is_evaluated_whatever_the_interval(tmp_path: Path) -> None:
    rows = make_examples(TOKENIZER, sft_rows(8))
    args = arguments(tmp_path, max_steps=3, **checkpoint_arguments("val_accuracy", 2) | {"save_strategy": "steps"})
    trainer = SupervisedTrainer(tiny_model(), args, rows, TOKENIZER, validation=rows)
    trainer.train()
    assert [e["step"] for e in trainer.state.log_history if "eval_val_ece" in e] == [2, 3]


def confident(label_bias: float) -> tuple[Any, list[Example]]:
    """A model that puts much probability on label A after many a reasoning, and rows that all answer A."""
    model = tiny_model(tie_word_embeddings=False)
    rows = make_examples(TOKENIZER, [row for row in sft_rows(80) if row.label == "A"])
    with torch.no_grad():
        model.lm_head.weight[rows[0].label.candidates[0]] *= label_bias
    return model, rows


def normalized_top(model: Any, rows: list[Example]) -> np.ndarray:
    values = compute_label_logprobs(model, rows, TOKENIZER.pad_token_id)
    q = np.exp(values - values.max(1, keepdims=True))
    return (q / q.sum(1, keepdims=True)).max(1)


def test_rcft_lowers_the_confidence_of_an_overconfident_top_bin(tmp_path: Path) -> None:
    """Every bin, the top one too, is right half of the time. On rows that all answer A, plain training has no reason
    to lower the confidence in A; RCFT's term brings it down further than that by far."""
    moved = {}
    for weight in (0.0, 20.0):
        model, rows = confident(6.0)
        before = normalized_top(model, rows)
        bins = RcftBins(lambda model: ([(n + 0.5) / 10 for n in range(10)] * 2, [True] * 10 + [False] * 10))
        args = arguments(tmp_path / str(weight), max_steps=5, learning_rate=1e-2)
        SupervisedTrainer(model, args, rows, TOKENIZER, bins=bins if weight else None, rcft_weight=weight).train()
        top = before > 0.9
        assert top.any()
        moved[weight] = (normalized_top(model, rows) - before)[top].mean()
    assert moved[20.0] < -0.1
    assert moved[20.0] < moved[0.0] - 0.1


def test_rcft_estimates_its_bins_once_an_epoch_on_own_answers(tmp_path: Path) -> None:
    calls: list[float] = []

    def answers(model: Any) -> tuple[list[float], list[bool]]:
        calls.append(float(weights(model).sum()))
        return [0.95, 0.95, 0.15], [True, False, True]

    rows = make_examples(TOKENIZER, sft_rows(8))
    bins = RcftBins(answers)
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=3, per_device_train_batch_size=4)
    SupervisedTrainer(tiny_model(), args, rows, TOKENIZER, bins=bins, rcft_weight=1.0).train()
    assert len(calls) == 3
    assert len(set(calls)) == 3  # on the model as it then is
    assert bins.accuracy == [None, 1.0, None, None, None, None, None, None, None, 0.5]


def test_rcft_goes_on_with_the_bins_of_its_checkpoint(tmp_path: Path) -> None:
    """Stopped inside an epoch and resumed: the epoch's estimate is not made again, and the weights end equal."""
    rows = make_examples(TOKENIZER, sft_rows(16))
    made: list[int] = []

    def answers(model: Any) -> tuple[list[float], list[bool]]:
        made.append(1)
        return [0.95, 0.95, 0.35, 0.35], [True, False, True, len(made) % 2 == 0]

    def trainer(folder: str, **options: Any) -> SupervisedTrainer:
        settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8, "per_device_train_batch_size": 4}
        args = arguments(tmp_path / folder, **settings | options)
        return SupervisedTrainer(tiny_model(), args, rows, TOKENIZER, bins=RcftBins(answers), rcft_weight=1.0)

    whole = trainer("whole")
    whole.train()
    undisturbed, made[:] = list(made), []
    trainer("cut", max_steps=8).train()
    made[:] = undisturbed[:1]  # the first epoch's estimate had been made before the stop
    again = trainer("cut")
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-3"))
    assert torch.equal(weights(again.model), weights(whole.model))
    assert len(made) == len(undisturbed)


def test_not_a_number_stops_with_step_and_questions(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[:] = torch.nan
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 0 on questions s\d"):
        SupervisedTrainer(model, arguments(tmp_path), make_examples(TOKENIZER, sft_rows(8)), TOKENIZER).train()


def test_long_rows_are_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    rows = sft_rows(8)
    lengths = [len(e.row.prompt) + len(e.row.completion) for e in make_examples(TOKENIZER, rows)]
    limit = sorted(lengths)[5]
    with caplog.at_level("WARNING"):
        kept = make_examples(TOKENIZER, rows, max_length=limit)
    assert [e.question for e in kept] == [f"s{n}" for n, length in enumerate(lengths) if length <= limit]
    assert f"dropped {sum(length > limit for length in lengths)} of 8 rows longer than {limit} tokens" in caplog.text
    with pytest.raises(ValueError, match="every row is longer than max_length"):
        make_examples(TOKENIZER, rows, max_length=5)


def test_example_cuts_before_its_label_and_open_ones_stand_at_the_same_place() -> None:
    row = sft_rows(1)[0]
    closed = make_examples(TOKENIZER, [row])[0]
    text = row.completion[0].content
    opened = row.model_copy(
        update={
            "label": None,
            "completion": (row.completion[0].model_copy(update={"content": text[: text.index("<answer>\n") + 9]}),),
        }
    )
    assert make_examples(TOKENIZER, [opened])[0].before_label() == closed.before_label()
    assert TOKENIZER.decode(closed.before_label().completion).endswith("<answer>\n")
    assert closed.label.candidates == [TOKENIZER.convert_tokens_to_ids(label) for label in row.labels]


@pytest.mark.parametrize("label", ["a", "answer", "dog"])
def test_an_open_row_is_completed_with_a_label_that_occurs_in_the_tag(label: str) -> None:
    """`<answer>` contains "a" and "answer". An open row is tokenized like the row that states its first label."""
    tokenizer = kinds()["byte-level"]
    rows = []
    for written in (label, None):
        turn = (Message(role="assistant", content=render_completion("the cat sat", written)),)
        update = {"labels": (label, "the cat"), "gold": label, "label": written, "completion": turn}
        rows.append(sft_rows(1)[0].model_copy(update=update))
    closed, opened = make_examples(tokenizer, rows)
    assert opened.row.completion == closed.row.completion
    assert opened.before_label() == closed.before_label()


@pytest.mark.parametrize("labels", [("entailment", "not entailment"), ("dog", "the dog")])
@pytest.mark.parametrize("name", ["byte-level", "byte-level, newline and letter are one token", "unigram"])
def test_a_label_is_found_whose_end_is_another_one(name: str, labels: tuple[str, ...]) -> None:
    tokenizer = kinds()[name]
    for label in labels:
        turn = (Message(role="assistant", content=render_completion("the cat sat", label)),)
        update = {"labels": labels, "gold": label, "label": label, "completion": turn}
        (example,) = make_examples(tokenizer, [sft_rows(1)[0].model_copy(update=update)])
        ids = example.row.completion
        at, candidates, gold, target = example.label
        assert target is None
        assert gold == labels.index(label)
        assert candidates[gold] == ids[at]
        assert len(set(candidates)) == 2
        before, through = (tokenizer.decode(ids[: at + n], clean_up_tokenization_spaces=False) for n in (0, 1))
        assert "<answer>" in before
        assert before.rpartition("<answer>")[2].strip() == ""
        assert label.startswith(through.rpartition("<answer>")[2].strip())


def test_a_row_ends_with_the_end_of_sequence_and_reads_as_generated() -> None:
    row = sft_rows(1)[0]
    ids = row_ids(TOKENIZER, row.prompt, row.completion[0].content)
    assert ids.completion[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.decode(ids.completion[:-1]) == row.completion[0].content
    assert isinstance(make_examples(TOKENIZER, [row])[0].label, Label)


def test_a_copy_of_a_trained_model_has_its_own_weights(tmp_path: Path) -> None:
    model = tiny_model()
    tokenizer = tiny_tokenizer()
    config = SupervisedConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    SupervisedTrainer(model, config, make_examples(tokenizer, sft_rows(2)), tokenizer)
    snapshot, ids = copy.deepcopy(model), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        before = snapshot(input_ids=ids).logits
        model.lm_head.weight.mul_(0.5)
        assert torch.equal(snapshot(input_ids=ids).logits, before)
        assert torch.equal(model(input_ids=ids).logits, before / 2)


def test_no_example_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no example"):
        SupervisedTrainer(tiny_model(), arguments(tmp_path), [], TOKENIZER)
