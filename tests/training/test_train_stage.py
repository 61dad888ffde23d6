"""The training stage on hand-made inputs: which rows it trains on, which step it keeps, and what it writes down."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from experiment_world import RECIPE
from peft import get_peft_model
from safetensors.torch import load_file
from steps import lora
from tiny import tiny_model, tiny_tokenizer
from train_world import LIMIT, LONG, METHODS, made_work, pair_rows, sft_rows
from transformers import AutoModelForCausalLM

from catto.errors import DataError
from catto.io.record_files import write_records
from catto.pipeline.kinds.train import make_job, run_train
from catto.pipeline.plan import Graph, open_recipe
from catto.pipeline.prepare_training import compute_label_share, find_right_responses, make_arguments
from catto.pipeline.rehearsal import rehearse_trainings
from catto.pipeline.stage import Work
from catto.pipeline.training_job import _Clock, _load_start, save_model
from catto.prompts import render_completion
from catto.recipe.settings import Recipe
from catto.records import Message, Prediction
from catto.report.numbers import Training
from catto.training import monitor
from catto.training.checkpoints import checkpoint_arguments
from catto.training.config import CATTOConfig
from catto.training.examples import count_pair_tokens, make_examples, preference_columns
from catto.training.supervised import RcftBins, SupervisedTrainer
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow


def _trained(work: Work, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """The trainer that the stage used, and training.json."""
    made: list[Any] = []
    for kind in (CATTOTrainer, SupervisedTrainer):
        original = kind.train

        def train(self: Any, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            made.append(self)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(kind, "train", train)
    run_train(work)
    story = json.loads((work.out / "training.json").read_text())
    Training.model_validate(story)  # its fields are those of the report
    return made[0], story


# ---- rows that fit --------------------------------------------------------------------------------------------------


def test_every_arm_trains_on_the_same_pairs_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight of twelve pairs fit: six of them are drawn, not the fitting ones among six that were drawn."""
    columns = {row.question: preference_columns(tiny_tokenizer(), row) for row in pair_rows()}
    fit = {question for question, one in columns.items() if count_pair_tokens(one) <= LIMIT}
    assert len(fit) == 8
    trained = {}
    for method in ("dpo", "dpo+catto", "dpo+bce", "dpo+outcome"):
        with caplog.at_level(logging.WARNING, "catto"):
            trainer, story = _trained(made_work(tmp_path / method, method), monkeypatch)
        trained[method] = trainer.train_dataset["question"]
        assert set(trained[method]) <= fit
        assert story["rows"] == len(trained[method]) == 6
        assert story["dropped"]["pairs"] == 4
        tokens = sum(
            2 * len(columns[question]["prompt_ids"])
            + len(columns[question]["chosen_ids"])
            + len(columns[question]["rejected_ids"])
            for question in trained[method]
        )
        if method != "dpo+outcome":
            assert story["tokens"] == 2 * tokens
    assert "dropped 4 of 12 rows longer than 60 tokens: q1, q4, q5, q9" in caplog.text
    assert len(set(map(tuple, trained.values()))) == 1
    # The stream: one row too long; up to its label each of the others is computed, two beside every pair.
    kept = [one for one in make_examples(tiny_tokenizer(), sft_rows(long=(2,), seed=3)) if one.tokens <= LIMIT]
    beside = round(2 * 6 * sum(len(one.row.prompt) + one.label.at for one in kept) / len(kept))
    assert story["dropped"]["stream"] == 1
    assert story["tokens"] == 2 * (tokens + beside)


@pytest.mark.parametrize("method", ["rcft", "cft"])
def test_traces_are_drawn_among_those_that_fit(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bins = RcftBins(lambda model: ([0.3, 0.9], [True, False]))
    monkeypatch.setattr("catto.pipeline.prepare_training._make_rcft_bins", lambda job, tokenizer: bins)
    trainer, story = _trained(made_work(tmp_path, method), monkeypatch)
    assert (story["rows"], story["dropped"], story["epochs"]) == (6, {"rows": 4}, 1.0)
    assert not {f"s{number}" for number in LONG} & {example.question for example in trainer.train_dataset}
    assert story["tokens"] == sum(example.tokens for example in trainer.train_dataset)


def test_what_the_trl_block_asks_for_is_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {"preference": {"checkpoint_steps": 2, "trl": {"max_steps": 3, "per_device_train_batch_size": 2}}}
    _, whole = _trained(made_work(tmp_path / "whole", "dpo"), monkeypatch)
    _, story = _trained(made_work(tmp_path / "cut", "dpo", **blocks), monkeypatch)
    assert (story["steps"], story["epochs"]) == (3, 1.0)
    assert story["tokens"] == whole["tokens"] / 2


# ---- the step that is kept ------------------------------------------------------------------------------------------


# Validation numbers at steps 2, 4, 6, 8, 10, 12.
ACCURACY = {2: 0.5, 4: 0.75, 6: 0.75, 8: 0.5, 10: 0.75, 12: 0.25}
NLL = {2: 1.0, 4: 0.5, 6: 0.75, 8: 0.5, 10: 0.6, 12: 0.7}
ECE = {2: 0.1, 4: 0.2, 6: 0.3, 8: 0.4, 10: 0.1, 12: 0.5}
KEPT = {"last": 12, "val_accuracy": 10, "val_nll": 8, "val_ece": 10}


def _scripted(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """Script the validation numbers by step; returns a weight as it was at each evaluation."""
    seen: dict[int, torch.Tensor] = {}
    original = monitor.MonitoredTrainer.evaluate

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = self.state.global_step
        seen[step] = self.model.get_input_embeddings().weight.detach().clone()
        values = {"val_accuracy": ACCURACY[step], "val_nll": NLL[step], "val_ece": ECE[step]}
        monkeypatch.setattr(monitor, "label_metrics", lambda logprobs, gold: values)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(monitor.MonitoredTrainer, "evaluate", evaluate)
    return seen


TWELVE = {
    "preference": {"checkpoint_steps": 2, "trl": {"max_steps": 12, "per_device_train_batch_size": 2}},
    "rcft": {"rows": 6, "checkpoint_steps": 2, "trl": {"max_steps": 12, "per_device_train_batch_size": 2}},
}


@pytest.mark.parametrize(("keep", "method"), [*((keep, "dpo+catto") for keep in KEPT), ("val_accuracy", "cft")])
def test_of_equal_steps_the_later_is_kept(
    keep: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _scripted(monkeypatch)
    trainer, story = _trained(made_work(tmp_path, method, keep=keep, **TWELVE), monkeypatch)
    assert (story["steps"], story["kept_step"]) == (12, KEPT[keep])
    assert story["kept_epochs"] == pytest.approx(story["epochs"] * KEPT[keep] / 12, abs=1e-4)
    assert torch.equal(trainer.model.get_input_embeddings().weight, seen[KEPT[keep]])
    assert [entry["step"] for entry in story["history"]] == list(ACCURACY)
    logged = {log["step"]: log["rewards/margins"] for log in trainer.state.log_history if "rewards/margins" in log}
    expected = {step: logged[step] for step in ACCURACY} if method == "dpo+catto" else {}
    margins = {entry["step"]: entry["reward_margin"] for entry in story["history"] if "reward_margin" in entry}
    assert margins == expected


@pytest.mark.parametrize(
    ("keep", "stop"), [("val_accuracy", 5), ("val_accuracy", 11), ("val_accuracy", 12), ("last", 7)]
)
def test_the_kept_step_survives_a_kill(keep: str, stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _scripted(monkeypatch)
    work = made_work(tmp_path, "dpo", keep=keep, **TWELVE)
    began = _Clock.on_step_end

    def interrupted(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        began(self, args, state, control, **kwargs)
        if state.global_step == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Clock, "on_step_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_train(work)
    trainer, story = _trained(work, monkeypatch)
    assert (story["steps"], story["kept_step"]) == (12, KEPT[keep])
    assert torch.equal(trainer.model.get_input_embeddings().weight, seen[KEPT[keep]])


def test_another_metric_keeps_the_rule_of_transformers(tmp_path: Path) -> None:
    """A drop-in: of equal `eval_loss` the earliest is the best, as in TRL's trainer."""
    trainer = pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, metric_for_best_model="eval_loss")
    trainer.args.greater_is_better, trainer.args.save_strategy = False, "steps"
    for step in (1, 2):
        trainer.state.global_step = step
        trainer._determine_best_metric({"eval_loss": 0.5}, None)
    assert trainer.state.best_global_step == 1


def test_an_unknown_rule_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="keep is 'best', expected one of last, val_accuracy, val_ece, val_nll"):
        checkpoint_arguments("best", 10)


def test_without_held_out_examples_the_last_step_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SFT on stored responses has no response to a validation question."""
    stored = {"source": "responses", "responses": str(tmp_path / "none.jsonl")}
    model = {"scratch": {"layers": 1, "width": 32, "heads": 2, "intermediate": 32}}
    sft = {"rows": 8, "epochs": 1, "batch_size": 4, "checkpoint_steps": 1}
    (tmp_path / "none.jsonl").touch()
    work = made_work(tmp_path, "sft", teacher=stored, model=model, sft=sft, keep="val_accuracy")
    write_records(work.input("teacher") / "outcome.jsonl", pairs.sft_rows(12))
    with caplog.at_level(logging.WARNING, "catto"):
        _, story = _trained(work, monkeypatch)
    assert (story["steps"], story["kept_step"], story["kept_epochs"], story["history"]) == (2, 2, 1.0, [])
    assert "keep is val_accuracy, but nothing is held out to measure it on: the last step is kept" in caplog.text


# ---- settings of the recipe -----------------------------------------------------------------------------------------


def test_the_weight_of_a_recipe_acts_on_the_methods_that_have_a_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = {"calibration_weight": 0.7, "reduce": "sum", "outcome_score": "brier", "max_steps": 1}
    block = {"preference": {"checkpoint_steps": 2, "trl": trl}}
    weights = {}
    for method in ("dpo", "dpo+catto", "dpo+outcome"):
        trainer, _ = _trained(made_work(tmp_path / method, method, **block), monkeypatch)
        weights[method] = (trainer.args.weight, trainer.args.reduce, trainer.args.outcome_score)
    assert weights == {
        "dpo": (0.0, None, "log"),
        "dpo+catto": (0.7, "sum", "log"),
        "dpo+outcome": (0.7, None, "brier"),
    }


def test_the_learning_rate_that_is_reported_is_the_one_that_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = {"preference": {"checkpoint_steps": 2, "trl": {"learning_rate": 1e-3, "max_steps": 1}}}
    trainer, story = _trained(made_work(tmp_path, "dpo", **block), monkeypatch)
    assert (trainer.args.learning_rate, story["learning_rate"]) == (1e-3, 1e-3)


# ---- RCFT's own answers ---------------------------------------------------------------------------------------------


def test_an_answer_that_does_not_tell_of_every_label_has_no_share() -> None:
    logprobs = {"A": -0.5, "B": -1.5}
    known: dict[str, Any] = {"question": "q", "task": "t", "split": "validation", "gold": "A", "sample": 0, "text": ""}
    known |= {"source": "free", "confidence": 0.6, "logsumexp": None, "mean_logprob": None, "tokens": 3}
    known |= {"temperature": 0.0, "seed": 0, "engine": "e", "model": "m"}
    whole = Prediction(**known, label="A", label_logprobs=logprobs)
    assert compute_label_share(whole) == pytest.approx(1 / (1 + 2.718281828**-1.0))
    assert compute_label_share(whole.model_copy(update={"label_logprobs": None})) is None
    assert compute_label_share(whole.model_copy(update={"label": None})) is None


# ---- the controls of dpo+outcome ------------------------------------------------------------------------------------


def test_replay_takes_a_right_trace_of_each_question_of_the_stream(tmp_path: Path) -> None:
    """After reasoning: the teacher's correct trace, and none where it has none. Answer first: the gold label itself."""
    work = made_work(tmp_path, "dpo+replay")
    traces = {row.question: row for row in sft_rows()}
    answered, unknown = pairs.sft_rows(2, seed=9)
    answered = answered.model_copy(update={"question": "s1"})
    unknown = unknown.model_copy(update={"question": "nobody's"})
    wrong = next(label for label in pairs.LABELS if label != unknown.gold)
    first = unknown.model_copy(
        update={"label": wrong, "completion": (Message(role="assistant", content=render_completion(None, wrong)),)}
    )
    found = find_right_responses(make_job(work), [answered, unknown, first])
    assert found[0] == traces["s1"]
    assert [row.completion[0].content for row in found[1:]] == [render_completion(None, unknown.gold)]
    assert [row.label for row in found[1:]] == [unknown.gold]


@pytest.mark.parametrize(
    ("method", "stream", "weights"),
    [("dpo+replay", True, None), ("sft+outcome", True, [0.0]), ("dpo+outcome-pairs", False, None)],
)
def test_a_control_trains_on_what_its_name_says(
    method: str, stream: bool, weights: list[float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, story = _trained(made_work(tmp_path, method), monkeypatch)
    assert (trainer._stream is not None) == stream
    assert trainer.args.loss_weights == weights
    assert story["rows"] == 6


def test_the_term_alone_has_no_preference_loss_whatever_the_recipe_gives_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3], "max_steps": 1}
    for method, weights in (("sft+outcome", [0.0]), ("dpo+outcome", [1.0, 0.3])):
        work = made_work(tmp_path / method, method, preference={"checkpoint_steps": 2, "trl": given})
        assert _trained(work, monkeypatch)[0].args.loss_weights == weights


@pytest.mark.parametrize(
    ("method", "losses", "smoothing"),
    [
        ("dpo", ["hinge"], 0.2),
        ("ipo", ["ipo"], 0.0),
        ("dpo+robust", ["robust"], 0.1),
        ("dpo+sft", ["sigmoid", "sft"], 0.0),
    ],
)
def test_a_loss_of_the_method_wins_over_the_one_that_the_recipe_gives_the_others(
    method: str, losses: list[str], smoothing: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"loss_type": ["hinge"], "loss_weights": [0.5], "label_smoothing": 0.2, "max_steps": 1}
    work = made_work(tmp_path, method, preference={"checkpoint_steps": 2, "trl": given})
    args = _trained(work, monkeypatch)[0].args
    assert (args.loss_type, args.label_smoothing) == (losses, smoothing)
    assert args.loss_weights == ([0.5] if method == "dpo" else None)


@pytest.mark.parametrize("method", ["dpo+outcome", "dpo+decoupled", "dpo+replay"])
@pytest.mark.parametrize("target", ["gold", "votes", "mix"])
def test_the_score_aims_at_what_the_recipe_says(
    method: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question without votes is left out; replay has no score, so it reads the stream without votes."""
    blocks = {"preference": {"checkpoint_steps": 2, "trl": {"max_steps": 1}}, "outcome": {"target": target}}
    blocks["methods"] = [name for name in METHODS if name != "dpo+outcome-pairs"]
    given: list[Any] = []

    def keep(tokenizer: Any, rows: Any, limit: int) -> Any:
        found = list(rows)
        given.append(found)
        return make_examples(tokenizer, found, limit)

    monkeypatch.setattr("catto.pipeline.prepare_training.make_examples", keep)
    trainer, _ = _trained(made_work(tmp_path, method, **blocks), monkeypatch)
    reads_votes = method != "dpo+replay" and target != "gold"
    assert trainer.args.outcome_target == (target if reads_votes else "gold")
    stream = given[0]
    assert [row.votes is not None for row in stream] == [reads_votes] * len(stream)
    if method != "dpo+replay":
        assert len(stream) == (11 if reads_votes else 12)


# ---- the rehearsal --------------------------------------------------------------------------------------------------


def _rehearsed(method: str, **blocks: Any) -> None:
    recipe = Recipe.model_validate({**RECIPE, "methods": METHODS, "model": {"path": "unused"}, **blocks})
    rehearse_trainings("mine.yaml", [Graph(recipe).plan_training("witnesses", 0, method, "matched", 1e-4)])


REHEARSED = ["sft", "rcft", "dpo+catto", "dpo+outcome", "sft+outcome", "dpo+outcome-pairs", "ipo", "dpo+sft"]
REHEARSED += ["dpo+decoupled", "dpo+decoupled+sft", "dpo+reasoning"]


@pytest.mark.parametrize("method", REHEARSED)
def test_a_rehearsal_passes_what_trains_and_leaves_nothing(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever depends on the model's own parts, on its tokens or on the number of rows is not for a toy to refuse."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    trl: dict[str, Any] = {"per_device_train_batch_size": 32, "dataloader_drop_last": True, "fsdp": "full_shard"}
    pairs_alone = {"pad_token": "<|endoftext|>", "router_aux_loss_coef": 0.1, "calibration_weight": 2.0}
    blocks = {"sft": {"trl": trl}, "rcft": {"trl": trl}, "preference": {"trl": {**trl, **pairs_alone}}}
    peft = {"r": 64, "target_modules": ["c_attn"], "modules_to_save": ["wte"]}
    _rehearsed(method, **blocks, model={"path": "unused", "peft": peft}, launch={"processes": 8})
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("method", "blocks", "told"),
    [
        ("dpo", {"preference": {"trl": {"sync_ref_model": True}}}, r"preference \(dpo\): ValueError: You cannot use"),
        ("dpo+catto", {"preference": {"trl": {"reduce": "avg"}}}, r"preference \(dpo\+catto\): ValueError: reduce is"),
        ("cft", {"rcft": {"trl": {"optim": "adamw"}}}, r"rcft \(cft\): ValueError: adamw is not a valid Optimizer"),
        ("sft", {"sft": {"trl": {"report_to": "wandb"}}}, r"sft \(sft\): RuntimeError: WandbCallback requires wandb"),
        (
            "sft",
            {"sft": {"trl": {"save_strategy": "no"}}},
            r"sft \(sft\): ValueError: --load_best_model_at_end requires",
        ),
        (
            "dpo",
            {"model": {"path": "m", "peft": {"bias": "foo"}}},
            r"preference \(dpo\): NotImplementedError: Requested",
        ),
    ],
)
def test_a_rehearsal_refuses_in_the_words_of_the_library(method: str, blocks: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=f"mine.yaml: {told}"):
        _rehearsed(method, **blocks)


# ---- adapters -------------------------------------------------------------------------------------------------------


def _adapted(
    folder: Path, method: str, monkeypatch: pytest.MonkeyPatch, *, tied: bool = False, **peft: Any
) -> dict[str, torch.Tensor]:
    """The merged weights after four steps at a large learning rate."""
    trl = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    blocks = {stage: {"checkpoint_steps": 2, "trl": trl} for stage in ("preference", "rcft")}
    model = {"path": "unused", "peft": {"r": 4, "target_modules": ["q_proj", "v_proj"], **peft}}
    work = made_work(folder, method, keep="last", model=model, **blocks)
    tiny_model(tie_word_embeddings=tied).save_pretrained(work.model("start"))
    stop = _Clock.on_step_end

    def interrupted(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        stop(self, args, state, control, **kwargs)
        if state.global_step == 3 and not (folder / "killed").exists():
            (folder / "killed").touch()
            raise KeyboardInterrupt

    if "killed" in folder.name:
        monkeypatch.setattr(_Clock, "on_step_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_train(work)
    run_train(work)
    return load_file(work.out / "model" / "model.safetensors")


@pytest.mark.parametrize("method", ["dpo+catto", "cft"])
def test_an_adapter_starts_by_the_seed_and_a_killed_run_goes_on_with_it(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _adapted(tmp_path / "whole", method, monkeypatch)
    torch.rand(7)  # whatever else the process has drawn
    killed = _adapted(tmp_path / "killed", method, monkeypatch)
    start = tiny_model().state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (whole[name] - start[name]).abs().max() > 1e-4
    assert all(torch.equal(value, killed[name]) for name, value in whole.items())


def test_pairs_refuse_an_adapter_that_takes_its_start_out_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match="init_lora_weights is 'pissa', expected true or gaussian: the reference is the"
    ):
        _adapted(tmp_path / "dpo", "dpo", monkeypatch, init_lora_weights="pissa")
    _adapted(tmp_path / "cft", "cft", monkeypatch, init_lora_weights="pissa")  # it has no reference


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("method", ["dpo", "cft"])
def test_an_adapter_that_would_move_a_tied_head_is_refused_before_it_is_trained(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="merging an adapter of the input embedding would also change the head"):
        _adapted(tmp_path / "tied", method, monkeypatch, tied=True, target_modules=["q_proj", "embed_tokens"])
    tokens = _adapted(tmp_path / "tokens", method, monkeypatch, tied=True, trainable_token_indices=[3, 9])
    moved = tokens["model.embed_tokens.weight"] != tiny_model(tie_word_embeddings=True).model.embed_tokens.weight
    assert moved.any(-1).nonzero().flatten().tolist() == [3, 9]


# ---- what is saved --------------------------------------------------------------------------------------------------


def test_an_adapter_is_merged_in_fp32(tmp_path: Path) -> None:
    """W + scaling B A to seven digits: of a bf16 sum only three would be left."""
    model: Any = get_peft_model(tiny_model().to(torch.bfloat16), lora())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    update = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    expected = (layer.base_layer.weight.float() + layer.scaling["default"] * update.float()).detach()
    save_model(model, tiny_tokenizer(), tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    torch.testing.assert_close(saved.model.layers[0].self_attn.q_proj.weight.detach(), expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("dtype", "weights"), [(None, torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_an_accelerator_computes_in_bf16_whatever_the_weights(
    dtype: str | None, weights: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = made_work(tmp_path, "dpo", model={"path": "unused", "dtype": dtype})
    assert _load_start(make_job(work))[0].dtype == weights
    assert make_arguments(make_job(work))["bf16"] is False
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert make_arguments(make_job(work))["bf16"] is True


def test_the_paper_recipe_keeps_every_update() -> None:
    assert open_recipe("paper").model.dtype == "float32"
