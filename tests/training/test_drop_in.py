"""In `DPOTrainer`'s place: the same rows, the same truncation, the same evaluation, and a card that tells the truth."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from datasets import Dataset
from steps import distance, facts, made, step
from test_preference_trainer import ZeroWeight
from tiny import tiny_model, tiny_tokenizer
from transformers import HfArgumentParser, IntervalStrategy, TrainerCallback
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.monitor import EvaluateAtEnd
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow

LIMIT = 60  # the rows of `pairs` have 30 to 50 tokens


def lengthened(prompts: tuple[int, ...] = (), chosen: tuple[int, ...] = (), rejected: tuple[int, ...] = ()) -> Dataset:
    """Eight pairs, some with a prompt or a response of more than `LIMIT` tokens."""
    rows = [row.model_dump(mode="json") for row in pairs.preference_rows(8)]
    for side, numbers in (("prompt", prompts), ("chosen", chosen), ("rejected", rejected)):
        for number in numbers:
            rows[number][side][0]["content"] = "because " * LIMIT + rows[number][side][0]["content"]
    return Dataset.from_list(rows)


LONG = {"prompts": (1,), "chosen": (0, 3), "rejected": (0, 2)}
DEPRECATED = pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated:FutureWarning")
MODES = pytest.mark.parametrize("mode", ["keep_start", pytest.param("keep_end", marks=DEPRECATED)])


# ---- truncation -----------------------------------------------------------------------------------------------------


CUT = [
    *((term, "keep_start", False) for term in ("none", "catto", "bce", "l1", "brier")),
    *(pytest.param(term, "keep_end", False, marks=DEPRECATED) for term in ("none", "catto")),
    *((term, "keep_start", True) for term in ("none", "catto")),
    pytest.param("none", "keep_end", True, marks=DEPRECATED),
]


@pytest.mark.parametrize(("calibration", "mode", "streamed"), CUT)
def test_long_rows_are_cut_as_trl_cuts_them(calibration: str, mode: str, streamed: bool, tmp_path: Path) -> None:
    """The same rows in the same order, and the same ids in every batch."""
    options = {"max_length": LIMIT, "truncation_mode": mode, "per_device_train_batch_size": 3}

    def batches(kind: Any, config: Any, **more: Any) -> list[dict[str, torch.Tensor]]:
        rows = lengthened(**LONG)
        given = rows.to_iterable_dataset() if streamed else rows
        trainer = pairs.trainer(kind, config, tmp_path, rows=given, **options, **more)
        return list(trainer.get_train_dataloader())

    theirs, ours = batches(DPOTrainer, DPOConfig), batches(CATTOTrainer, CATTOConfig, calibration=calibration)
    assert sum(len(batch["input_ids"]) for batch in theirs) == 2 * (7 if mode == "keep_start" else 8)
    assert max(batch["input_ids"].shape[1] for batch in theirs) == LIMIT
    for one, other in zip(ours, theirs, strict=True):
        for name, tensor in other.items():
            assert torch.equal(one[name], tensor), name


@MODES
@pytest.mark.parametrize("precompute", [False, True], ids=["online", "precomputed"])
def test_cut_rows_give_trl_loss_to_the_last_bit(mode: str, precompute: bool) -> None:
    options = {"max_length": LIMIT, "truncation_mode": mode, "precompute_ref_log_probs": precompute}
    theirs = step(DPOTrainer, DPOConfig, rows=lengthened(**LONG), **options)
    ours = step(CATTOTrainer, CATTOConfig, calibration="none", rows=lengthened(**LONG), **options)
    assert torch.equal(ours.loss, theirs.loss)
    assert all(torch.equal(ours.gradients[name], value) for name, value in theirs.gradients.items())
    for sharing in (False, True):
        through = step(ZeroWeight, CATTOConfig, rows=lengthened(**LONG), prefix_sharing=sharing, **options)
        torch.testing.assert_close(through.loss, theirs.loss, rtol=1e-5, atol=1e-5)
        assert distance(through.gradients, theirs.gradients) < 1e-5


def test_a_prompt_without_room_for_a_response_is_dropped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "catto"):
        made(CATTOTrainer, CATTOConfig, rows=lengthened(**LONG), max_length=LIMIT)
    assert f"dropped 1 of 8 train rows whose prompt alone fills {LIMIT} tokens: row 1" in caplog.text


def test_a_prompt_needs_room_for_one_token_of_a_response_as_with_trl() -> None:
    rows = lengthened(prompts=(1,))
    longest = max(len(row["prompt_ids"]) for row in made(CATTOTrainer, CATTOConfig, rows=rows).train_dataset)
    for limit, kept in ((longest, 7), (longest + 1, 8)):
        for kind, config in ((DPOTrainer, DPOConfig), (CATTOTrainer, CATTOConfig)):
            assert len(made(kind, config, rows=rows, max_length=limit).train_dataset) == kept


@pytest.mark.parametrize(
    ("first", "second"),
    [({"max_length": LIMIT}, {"max_length": LIMIT + 9}), ({"ld_alpha": None}, {"ld_alpha": 0.3})],
    ids=["limit", "discount"],
)
def test_a_reference_that_was_cached_under_another_option_is_not_read(
    first: dict[str, Any], second: dict[str, Any], tmp_path: Path
) -> None:
    """TRL caches reference log-probabilities by the dataset's fingerprint, where the rows come from a disk."""
    lengthened(chosen=(0, 3)).save_to_disk(tmp_path / "rows")
    found = []
    for options in (first, second):
        given = {"rows": Dataset.load_from_disk(tmp_path / "rows"), "precompute_ref_log_probs": True, **options}
        found.append(pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, **given).train_dataset["ref_chosen_logps"])
    differ = [row for row, (one, other) in enumerate(zip(*found, strict=True)) if abs(one - other) > 1e-3]
    assert {0, 3} <= {*differ}


LABELLED: dict[str, dict[str, Any]] = {
    "outcome": {"calibration": "outcome"},
    "label": {"calibration": "catto", "calibrate_tokens": "label"},
}


@pytest.mark.parametrize("objective", LABELLED)
@pytest.mark.parametrize("streamed", [False, True], ids=["map", "stream"])
def test_where_the_label_is_read_long_rows_are_dropped_and_told(
    objective: str, streamed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = lengthened(**LONG)
    options = {**LABELLED[objective], "max_length": LIMIT, "max_steps": 1}
    given = rows.to_iterable_dataset() if streamed else rows
    with caplog.at_level(logging.WARNING, "catto"):
        trainer = pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, rows=given, **options)
        assert [row["question"] for row in trainer.train_dataset] == ["q4", "q5", "q6", "q7"]
    told = "dropped 4 train rows so far, longer" if streamed else "dropped 4 of 8 train rows longer"
    assert f"{told} than {LIMIT} tokens" in caplog.text
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_column_that_the_term_does_not_read_may_hold_anything() -> None:
    """`correctness_rate` is read by `outcome` alone; another objective's dataset may use the name for its own."""
    options: dict[str, Any] = {"calibration": "catto", "calibrate_tokens": "label"}
    named = [{**row, "correctness_rate": "high", "rate": "low"} for row in pairs.dataset(pairs.preference_rows())]
    expected = step(CATTOTrainer, CATTOConfig, **options)
    found = step(CATTOTrainer, CATTOConfig, rows=Dataset.from_list(named), **options)
    assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("objective", [*LABELLED, "none", "catto"])
def test_a_stream_of_long_rows_alone_is_an_error(objective: str, tmp_path: Path) -> None:
    """It would end after no step at all."""
    side = "chosen" if objective in LABELLED else "prompts"
    rows = lengthened(**{side: tuple(range(8))}).to_iterable_dataset()
    options = {**LABELLED.get(objective, {"calibration": objective}), "max_length": LIMIT, "max_steps": 2}
    with pytest.raises(ValueError, match=f"every row of the train dataset is longer than max_length {LIMIT} tokens"):
        pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, rows=rows, **options)


def test_examples_of_the_stream_that_do_not_fit_are_dropped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    rows = pairs.sft_rows(6)
    long = rows[2].completion[0].model_copy(update={"content": "because " * LIMIT + rows[2].completion[0].content})
    rows[2] = rows[2].model_copy(update={"completion": (long,)})
    given = make_examples(tiny_tokenizer(), rows)
    with caplog.at_level(logging.WARNING, "catto"):
        trainer = made(CATTOTrainer, CATTOConfig, calibration="outcome", outcome_examples=given, max_length=LIMIT)
    assert f"dropped 1 of 6 rows longer than {LIMIT} tokens: s2" in caplog.text
    assert [example.question for example in trainer._stream.examples] == ["s0", "s1", "s3", "s4", "s5"]


def test_each_response_is_scored_in_the_form_in_which_it_is_written() -> None:
    """A rejected response that answers ` B` on the line of the tag has other tokens as labels than the chosen one."""
    rows = [row.model_dump(mode="json") for row in pairs.preference_rows(4)]
    for row in rows:
        row["rejected"][0]["content"] = row["rejected"][0]["content"].replace("<answer>\n", "<answer> ")
    result = step(CATTOTrainer, CATTOConfig, calibration="outcome", rows=Dataset.from_list(rows))
    token = tiny_tokenizer().convert_tokens_to_ids
    forms = {"chosen": ["A", "B", "C", "D"], "rejected": [" A", " B", " C", " D"]}
    for fact in facts(result.batch):
        for side, labels in forms.items():
            assert fact[f"{side}_candidates"] == token(labels)
    logits = tiny_model()(input_ids=result.batch["input_ids"], attention_mask=result.batch["attention_mask"]).logits
    scores = []
    for row, ids in enumerate(result.batch["input_ids"].tolist()):
        side, fact = ("chosen", "rejected")[row // 4], facts(result.batch)[row % 4]
        at = ids.index(token("<answer>")) + (1 if side == "chosen" else 0)
        p = logits[row, at].softmax(-1)[token(forms[side])]
        rate = fact["correctness_rate"] if side == "chosen" else 1 - fact["correctness_rate"]
        scores.append(-rate * p[fact["gold_index"]].log())
    assert result.metrics["calibration/outcome"] == pytest.approx(sum(scores).item() / 4, abs=1e-6)


# ---- a collator of TRL's, given by the user -------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("sharing", [False, True], ids=["padded", "shared"])
def test_a_given_collator_cuts_as_it_says(mode: str, sharing: bool) -> None:
    """Shorter than every row: prompts are cut away at one end, responses at the other."""
    collator = {"pad_token_id": 0, "max_length": 25, "truncation_mode": mode, "pad_to_multiple_of": 4}
    theirs = step(DPOTrainer, DPOConfig, data_collator=DataCollatorForPreference(**collator))
    ours = step(ZeroWeight, CATTOConfig, data_collator=DataCollatorForPreference(**collator), prefix_sharing=sharing)
    assert int(ours.batch["attention_mask"].sum(-1).max()) == 25
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    assert distance(ours.gradients, theirs.gradients) < 1e-5


@pytest.mark.parametrize("objective", LABELLED)
def test_a_given_collator_drops_the_rows_whose_label_it_would_cut(objective: str) -> None:
    collator = DataCollatorForPreference(pad_token_id=0, max_length=LIMIT)
    options = LABELLED[objective]
    trainer = made(CATTOTrainer, CATTOConfig, rows=lengthened(**LONG), data_collator=collator, max_steps=1, **options)
    assert trainer.train_dataset["question"] == ["q4", "q5", "q6", "q7"]
    trainer.train()
    trainer.data_collator = DataCollatorForPreference(pad_token_id=0, max_length=25)
    with pytest.raises(ValueError, match=r"row \d: the data collator's max_length cuts off the label"):
        trainer.train()


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_a_constructor_that_raises_leaves_the_arguments_as_they_were(tmp_path: Path) -> None:
    args = CATTOConfig(output_dir=str(tmp_path), padding_free=True, use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="`train_dataset` is required"):
        CATTOTrainer(tiny_model(), None, args, processing_class=tiny_tokenizer())
    assert args.padding_free is True


def test_a_configuration_of_a_users_own_class_is_not_turned_into_ours(tmp_path: Path) -> None:
    @dataclass
    class Mine(DPOConfig):  # type: ignore[misc]
        mine: int = 3

    @dataclass
    class Ours(CATTOConfig):
        mine: int = 3

    with pytest.raises(TypeError, match="args is a Mine, expected a DPOConfig or a subclass of CATTOConfig"):
        made(CATTOTrainer, Mine)
    assert made(CATTOTrainer, Ours).args.mine == 3


@pytest.mark.parametrize(
    ("words", "packed"), [([], None), (["--padding_free"], True), (["--padding_free", "no"], False)]
)
def test_packing_is_a_flag_of_the_command_line_as_with_trl(
    words: list[str], packed: bool | None, tmp_path: Path
) -> None:
    (args,) = HfArgumentParser(CATTOConfig).parse_args_into_dataclasses(["--output_dir", str(tmp_path), *words])
    assert args.padding_free is packed


def test_without_arguments_the_folder_is_named_after_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained(tmp_path / "models" / "tiny")
    rows = pairs.dataset(pairs.preference_rows(4))
    options: dict[str, Any] = {"train_dataset": rows, "processing_class": tiny_tokenizer()}
    assert CATTOTrainer("models/tiny", **options).args.output_dir == "tiny-CATTO"


@pytest.mark.parametrize("column", ["chosen_label_at", "gold_index", "row"])
def test_a_column_of_a_name_that_is_ours_changes_nothing(column: str) -> None:
    rows = pairs.dataset(pairs.preference_rows())
    named = rows.add_column(column, ["mine"] * len(rows))
    for options in ({}, {"calibration": "outcome"}):
        expected = step(CATTOTrainer, CATTOConfig, rows=rows, **options).loss
        assert torch.equal(step(CATTOTrainer, CATTOConfig, rows=named, **options).loss, expected)


def test_evaluate_without_a_dataset_raises_what_trl_raises() -> None:
    raised = []
    for kind, config in ((DPOTrainer, DPOConfig), (CATTOTrainer, CATTOConfig)):
        with pytest.raises(ValueError, match="eval_dataset") as error:
            made(kind, config).evaluate()
        raised.append(str(error.value))
    assert raised[0] == raised[1]


def test_evaluate_takes_its_arguments_by_position() -> None:
    held_out = pairs.dataset(pairs.preference_rows(6, seed=9))
    found = made(CATTOTrainer, CATTOConfig).evaluate(held_out, None, "test")
    assert found["test_loss"] > 0
    trainer = made(CATTOTrainer, CATTOConfig)
    trainer.validation = make_examples(tiny_tokenizer(), pairs.sft_rows(4))
    both = trainer.evaluate(held_out, None, "test")
    assert {"test_loss", "test_val_ece"} <= set(both)


def test_several_eval_datasets_measure_the_validation_examples_once() -> None:
    trainer = made(CATTOTrainer, CATTOConfig)
    trainer.eval_dataset = dict.fromkeys(("one", "two"), trainer.train_dataset)
    trainer.validation = make_examples(tiny_tokenizer(), pairs.sft_rows(4))
    found = trainer.evaluate()
    assert {"eval_one_loss", "eval_two_loss", "eval_val_ece"} <= set(found)
    assert [name for name in found if name.endswith("val_ece")] == ["eval_val_ece"]


class _Heard(TrainerCallback):  # type: ignore[misc]
    """Keeps the step and the numbers of every evaluation that callbacks hear of."""

    def __init__(self) -> None:
        self.events: list[tuple[int, set[str]]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.events.append((state.global_step, set(metrics)))


@pytest.mark.parametrize(("strategy", "steps"), [("steps", [1, 2, 3]), ("epoch", [2, 3])])
@pytest.mark.parametrize("datasets", [0, 1, 2])
def test_callbacks_hear_once_of_each_evaluation(strategy: str, steps: list[int], datasets: int) -> None:
    """So early stopping counts an evaluation once, whether it watches the loss or the calibration."""
    heard, best = _Heard(), {"metric_for_best_model": "val_ece", "greater_is_better": False}
    size = {"per_device_train_batch_size": 8, "max_steps": 3, "eval_steps": 1}
    trainer = made(CATTOTrainer, CATTOConfig, callbacks=[heard], **size, **best)
    trainer.validation = make_examples(tiny_tokenizer(), pairs.sft_rows(4))
    trainer.add_callback(EvaluateAtEnd())
    trainer.args.eval_strategy = IntervalStrategy(strategy)
    sets = dict.fromkeys(("one", "two")[:datasets], trainer.train_dataset)
    trainer.eval_dataset = trainer.train_dataset if datasets == 1 else sets or None
    trainer.train()
    assert [step for step, _ in heard.events] == [step for step in steps for _ in range(max(datasets, 1))]
    assert [step for step, names in heard.events if "eval_val_ece" in names] == steps
    assert [log["step"] for log in trainer.state.log_history if "eval_val_ece" in log] == steps
    assert datasets != 1 or all({"eval_loss", "eval_val_ece"} <= names for _, names in heard.events)


@pytest.mark.parametrize("options", [{"calibration": "catto"}, {"calibration": "outcome"}, {"calibration": "none"}])
def test_eval_loss_is_trl_and_the_total_stands_beside_it(options: dict[str, Any]) -> None:
    """On a ragged last batch too: both are weighted alike."""
    held_out = pairs.dataset(pairs.preference_rows(6, seed=9))
    size = {"per_device_eval_batch_size": 4}
    theirs = made(DPOTrainer, DPOConfig, **size).evaluate(held_out)
    trainer = made(CATTOTrainer, CATTOConfig, **size, **options)
    ours = trainer.evaluate(held_out)
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=1e-6)
    if options["calibration"] == "none":
        assert "eval_total_loss" not in ours
        return
    whole = made(CATTOTrainer, CATTOConfig, per_device_eval_batch_size=6, **options).evaluate(held_out)
    assert ours["eval_total_loss"] == pytest.approx(whole["eval_total_loss"], abs=1e-6)
    doubled = {**options, "calibration_weight": 2 * trainer.args.weight}
    twice = made(CATTOTrainer, CATTOConfig, **size, **doubled).evaluate(held_out)
    added, added_twice = (found["eval_total_loss"] - found["eval_loss"] for found in (ours, twice))
    assert added > 0
    assert added_twice == pytest.approx(2 * added, abs=1e-6)


# ---- the model card -------------------------------------------------------------------------------------------------

CARDS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "none": ({"calibration": "none"}, "trained with DPO, a method introduced in", False),
    "weight 0": ({"calibration_weight": 0.0}, "trained with DPO, a method introduced in", False),
    "catto": ({}, "trained with DPO and the `catto` calibration term (weight 0.1).", True),
    "bce": (
        {"calibration": "bce", "calibration_weight": 0.25},
        "trained with DPO and the `bce` calibration term (weight 0.25).",
        True,
    ),
    "l1": ({"calibration": "l1"}, "trained with DPO and the `l1` calibration term (weight 0.1).", True),
    "brier": ({"calibration": "brier"}, "trained with DPO and the `brier` calibration term (weight 0.1).", True),
    "outcome": (
        {"calibration": "outcome"},
        "trained with DPO and the `outcome` calibration term (weight 1, log score).",
        False,
    ),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_card_names_the_objective_and_cites_what_was_used(name: str, tmp_path: Path) -> None:
    options, sentence, cited = CARDS[name]
    trainer = made(CATTOTrainer, CATTOConfig, folder=tmp_path, **options)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert sentence in card
    assert "rafailov2023direct" in card
    assert ("parikh2026catto" in card) is cited
    assert ("- catto\n" in card) is cited
    assert ("- calibration\n" in card) is ("term" in sentence)
    assert {"dpo", "trl"} <= set(trainer.model.model_tags)


def test_the_card_without_a_term_is_the_card_of_trl(tmp_path: Path) -> None:
    cards = []
    for kind, config, options in ((DPOTrainer, DPOConfig, {}), (CATTOTrainer, CATTOConfig, {"calibration": "none"})):
        folder = tmp_path / kind.__name__
        made(kind, config, folder=folder, **options).create_model_card(model_name="tiny")
        cards.append(sorted((folder / "README.md").read_text().splitlines()))
    assert cards[0] == cards[1]


# ---- settings that contradict each other ----------------------------------------------------------------------------

SURROGATE = ("catto", "bce", "l1", "brier")
CONTRADICTIONS = [
    ("none", {"calibration_weight": 5}),
    *(("none", {name: value}) for name, value in (("reduce", "mean"), ("detach_surrogate", True))),
    *(("none", {name: value}) for name, value in (("calibrate_tokens", "label"), ("outcome_score", "brier"))),
    ("none", {"outcome_rows_per_pair": 1}),
    *(("outcome", {name: value}) for name, value in (("reduce", "sum"), ("detach_surrogate", True))),
    ("outcome", {"calibrate_tokens": "label"}),
    *((term, {"outcome_score": "brier"}) for term in SURROGATE),
    *((term, {"outcome_rows_per_pair": 4}) for term in SURROGATE),
]


@pytest.mark.parametrize(("calibration", "knob"), CONTRADICTIONS, ids=str)
def test_a_knob_that_the_term_does_not_read_is_refused(calibration: str, knob: dict[str, Any]) -> None:
    ((name, value),) = knob.items()
    told = f"^{name} is {value!r} but calibration is '{calibration}': this option is used only with "
    with pytest.raises(ValueError, match=told) as error:
        CATTOConfig(output_dir="x", bf16=False, calibration=calibration, **knob)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("calibration", ["none", *SURROGATE, "outcome"])
def test_values_equal_to_the_default_say_nothing(calibration: str) -> None:
    knobs: dict[str, Any] = {"reduce": None, "detach_surrogate": False, "calibrate_tokens": "all"}
    knobs |= {"calibration_weight": None, "outcome_score": "log", "outcome_rows_per_pair": 2}
    config = CATTOConfig(output_dir="x", bf16=False, calibration=calibration, **knobs)
    assert (config.weight == 0) is (calibration == "none")
    assert CATTOConfig(output_dir="x", bf16=False, calibration=calibration, calibration_weight=0).weight == 0


def test_a_stream_that_nothing_reads_is_refused() -> None:
    given = make_examples(tiny_tokenizer(), pairs.sft_rows(4))
    with pytest.raises(ValueError, match="outcome_examples are given but calibration is 'catto'"):
        made(CATTOTrainer, CATTOConfig, outcome_examples=given)
    with pytest.raises(ValueError, match="outcome_rows_per_pair is 3 but outcome_examples are not given"):
        made(CATTOTrainer, CATTOConfig, calibration="outcome", outcome_rows_per_pair=3)
