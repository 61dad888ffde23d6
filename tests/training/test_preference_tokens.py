"""`preference_tokens="reasoning"`: the preference loss reads the tokens before the label, of policy and reference."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from datasets import Dataset
from steps import Step, distance, lora, made, step
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import logsigmoid
from trl import DPOConfig, DPOTrainer

from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.trainer import CATTOTrainer

pytestmark = pytest.mark.slow

REASONING = {"preference_tokens": "reasoning"}
NO_TERM = {"calibration": "none"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "shared": {"prefix_sharing": True},
    "packed": {"padding_free": True},
    "both": {"prefix_sharing": True, "padding_free": True},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
}
LOSS_TYPES = [
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sigmoid_norm",
]


def reasoning_mask(ids: Tensor, completion_mask: Tensor) -> Tensor:
    """The tokens up to `<answer>` and its newline, by token ids: with this tokenizer the label is next. (2 B, L)."""
    answer = tiny_tokenizer().convert_tokens_to_ids("<answer>")
    mask = torch.zeros_like(completion_mask)
    for number, row in enumerate(ids):
        place = int((row == answer).nonzero()[-1])
        mask[number, : place + 2] = completion_mask[number, : place + 2]
    return mask


class Cut(DPOTrainer):  # type: ignore[misc]
    """TRL's trainer on batches whose mask ends before the label."""

    def _cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return {**inputs, "completion_mask": reasoning_mask(inputs["input_ids"], inputs["completion_mask"])}

    def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
        return super().compute_ref_log_probs(model, self._cut(inputs))

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        return super()._compute_loss(model, self._cut(inputs), return_outputs)


def _assert_equal_to_trl(ours: Step, theirs: Step) -> None:
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    assert distance(ours.gradients, theirs.gradients) < 1e-5
    for name, value in theirs.metrics.items():
        assert ours.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_is_trl_loss_of_the_tokens_before_the_label(loss_type: str) -> None:
    smoothing = {"label_smoothing": 0.1} if loss_type in ("exo_pair", "robust", "aot") else {}
    options = {"loss_type": [loss_type], **smoothing}
    theirs = step(Cut, DPOConfig, **options)
    _assert_equal_to_trl(step(CATTOTrainer, CATTOConfig, **options, **REASONING, **NO_TERM), theirs)
    shared = {"prefix_sharing": True, "padding_free": True}
    _assert_equal_to_trl(step(CATTOTrainer, CATTOConfig, **options, **REASONING, **NO_TERM, **shared), theirs)


VARIANTS: dict[str, dict[str, Any]] = {
    "length-desensitised": {"ld_alpha": 0.4},
    "weighted": {"use_weighting": True},
    "js": {"f_divergence_type": "js_divergence"},
    "precomputed": {"precompute_ref_log_probs": True},
    "precomputed-ld": {"precompute_ref_log_probs": True, "ld_alpha": 0.4},
}


CASES = [(variant, adapter, "both") for variant in VARIANTS for adapter in (False, True)]
CASES += [("precomputed", False, layout) for layout in LAYOUTS if layout != "both"]


@pytest.mark.parametrize(("variant", "adapter", "layout"), CASES)
def test_variants_layouts_and_adapters_give_trl_loss(variant: str, adapter: bool, layout: str) -> None:
    more = {"peft_config": lora()} if adapter else {}
    theirs = step(Cut, DPOConfig, **VARIANTS[variant], **more)
    ours = step(CATTOTrainer, CATTOConfig, **VARIANTS[variant], **LAYOUTS[layout], **more, **REASONING, **NO_TERM)
    _assert_equal_to_trl(ours, theirs)


# ---- the dense computation in float64 -------------------------------------------------------------------------------


class Dense:
    """Losses from full logits in float64, by plain autograd."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.model = tiny_model().double()
        self.ids, self.whole = batch["input_ids"], batch["completion_mask"][:, 1:].bool()
        self.reasoning = reasoning_mask(batch["input_ids"], batch["completion_mask"])[:, 1:].bool()
        attention = batch["attention_mask"]
        self.log_p = self.model(input_ids=self.ids, attention_mask=attention).logits[:, :-1].log_softmax(-1)
        with torch.no_grad():
            reference = tiny_model(seed=1).double()(input_ids=self.ids, attention_mask=attention).logits[:, :-1]
        self.target = self._of_tokens(self.log_p)
        self.ratio = self.target - self._of_tokens(reference.log_softmax(-1))

    def _of_tokens(self, log_p: Tensor) -> Tensor:
        return log_p.gather(-1, self.ids[:, 1:, None]).squeeze(-1)

    def margins(self) -> Tensor:
        chosen, rejected = self.ratio.masked_fill(~self.reasoning, 0).sum(-1).chunk(2)
        return chosen - rejected

    def dpo(self) -> Tensor:
        return -logsigmoid(0.1 * self.margins()).mean()

    def ipo(self) -> Tensor:
        chosen, rejected = (self.ratio.masked_fill(~self.reasoning, 0).sum(-1) / self.reasoning.sum(-1)).chunk(2)
        return ((chosen - rejected - 1 / (2 * 0.1)) ** 2).mean()

    def sft(self) -> Tensor:
        half = len(self.target) // 2
        return -self.target[:half][self.whole[:half]].mean()

    def catto(self) -> Tensor:
        """The paper's term over whole responses."""
        p, c = self.target.exp(), self.log_p.exp().amax(-1)
        rival = self.log_p.exp().scatter(-1, self.ids[:, 1:, None], -1.0).amax(-1)
        s = torch.sigmoid(p - rival)
        half = len(s) // 2
        s = torch.cat([s[:half], 1 - s[half:]])
        losses = (s * (1 - c) + (1 - s) * c).masked_fill(~self.whole, 0).sum(-1) / self.whole.sum(-1)
        return losses[:half].mean() + losses[half:].mean()

    def outcome(self, gold: list[int]) -> Tensor:
        """The mean log score at the label, over both responses with the rates of their questions as weights 1 / 2."""
        half = len(self.ids) // 2
        label = self.reasoning.int().cumsum(-1).argmax(-1) + 1  # behind the last token of the reasoning
        tokens = torch.tensor(tiny_tokenizer().convert_tokens_to_ids(["A", "B", "C", "D"]))
        golden = tokens[torch.tensor(gold * 2)]
        scores = -self.log_p[torch.arange(2 * half), label, golden]
        return (0.5 * scores).sum() / half

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        loss.backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def _even_rates() -> Dataset:
    rows = [row.model_copy(update={"correctness_rate": 0.5}) for row in pairs.preference_rows()]
    return pairs.dataset(rows)


OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": NO_TERM,
    "ipo": {**NO_TERM, "loss_type": ["ipo"]},
    "sft": {**NO_TERM, "loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.3]},
    "catto": {"calibration": "catto"},
    "outcome": {"calibration": "outcome"},
}


@pytest.mark.parametrize("layout", ["padded", "both"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_are_the_dense_computation_in_float64(objective: str, layout: str) -> None:
    models = {"model": tiny_model().double(), "ref_model": tiny_model(seed=1).double()}
    options = {**OBJECTIVES[objective], **LAYOUTS[layout], **REASONING}
    ours = step(CATTOTrainer, CATTOConfig, rows=_even_rates(), **models, **options)
    dense = Dense(ours.batch)
    if objective == "dpo":
        expected = dense.dpo()
    elif objective == "ipo":
        expected = dense.ipo()
    elif objective == "sft":
        expected = 0.8 * dense.dpo() + 0.3 * dense.sft()
    elif objective == "catto":
        expected = dense.dpo() + 0.1 * dense.catto()
    else:
        expected = dense.dpo() + dense.outcome(ours.batch["catto"]["gold_index"][: len(dense.ids) // 2].tolist())
    assert ours.loss.item() == pytest.approx(expected.item(), abs=1e-10)
    # Transformers computes rotary embeddings in fp32, and packed rows have other positions.
    assert distance(ours.gradients, dense.gradients(expected)) < (1e-8 if layout == "padded" else 1e-6)


# ---- what it means --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "both"])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_first_loss_is_ln_2_where_the_reference_is_the_policy(bf16: bool, layout: str) -> None:
    options = {"bf16": bf16, "max_steps": 1, **LAYOUTS[layout], **REASONING}
    for term in (NO_TERM, {"calibration": "outcome"}):
        trainer = made(CATTOTrainer, CATTOConfig, model=tiny_model(seed=1), **options, **term)
        trainer.train()
        first = trainer.state.log_history[0]
        loss = first["loss"] - first.get("calibration/outcome", 0.0)
        assert loss == pytest.approx(math.log(2), abs=1e-5)
        assert first["rewards/margins"] == 0


def test_the_first_loss_in_bf16_is_near_ln_2_beside_a_stream() -> None:
    """The stream makes the policy's batch longer than the reference's, and sums in bf16 depend on that a little."""
    stream = {"calibration": "outcome", "outcome_examples": make_examples(tiny_tokenizer(), pairs.sft_rows())}
    options = {"bf16": True, "max_steps": 1, **REASONING, **stream}
    trainer = made(CATTOTrainer, CATTOConfig, model=tiny_model(seed=1), **options)
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["loss"] - first["calibration/outcome"] == pytest.approx(math.log(2), abs=2e-3)


def _relabelled() -> Dataset:
    """The same reasoning with other labels at the end."""
    rows = []
    for row in pairs.preference_rows():
        turns = {}
        for side, label in (("chosen", row.rejected_label), ("rejected", row.chosen_label)):
            (turn,) = getattr(row, side)
            text = turn.content.partition("<answer>\n")[0] + f"<answer>\n{label}\n</answer>"
            turns[side] = (turn.model_copy(update={"content": text}),)
        rows.append(row.model_copy(update=turns))
    return pairs.dataset(rows)


def test_labels_do_not_matter_to_the_preference() -> None:
    ours = step(CATTOTrainer, CATTOConfig, **REASONING, **NO_TERM)
    other = step(CATTOTrainer, CATTOConfig, rows=_relabelled(), **REASONING, **NO_TERM)
    torch.testing.assert_close(other.loss, ours.loss, rtol=1e-6, atol=0)
    assert distance(other.gradients, ours.gradients) < 1e-5
    whole = [step(CATTOTrainer, CATTOConfig, rows=rows, **NO_TERM).loss for rows in (None, _relabelled())]
    assert abs(whole[0] - whole[1]) > 1e-3


def test_a_cached_reference_of_whole_responses_is_not_read(tmp_path: Path) -> None:
    rows = Dataset.from_generator(lambda: iter(pairs.dataset(pairs.preference_rows())), cache_dir=str(tmp_path))
    options = {"rows": rows, "precompute_ref_log_probs": True, "calibration": "catto"}
    found = {}
    for tokens in ("all", "reasoning", "all"):
        trainer = pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, preference_tokens=tokens, **options)
        values = trainer.train_dataset["ref_chosen_logps"]
        assert found.setdefault(tokens, values) == values
    assert all(part > whole for part, whole in zip(found["reasoning"], found["all"], strict=True))


def test_evaluation_reads_the_reasoning_too(tmp_path: Path) -> None:
    held_out = pairs.dataset(pairs.preference_rows(6, seed=9))
    theirs = made(Cut, DPOConfig, folder=tmp_path).evaluate(held_out)
    ours = made(CATTOTrainer, CATTOConfig, folder=tmp_path, **REASONING).evaluate(held_out)
    for name in ("eval_loss", "eval_rewards/margins", "eval_logps/chosen"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name


def test_a_streamed_dataset_trains(tmp_path: Path) -> None:
    rows = pairs.dataset(pairs.preference_rows()).to_iterable_dataset()
    options = {"rows": rows, "max_steps": 1, **REASONING}
    trainer = pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, **options)
    trainer.train()
    assert trainer.state.global_step == 1


# ---- data that have no reasoning ------------------------------------------------------------------------------------


def _answer_first(number_of_rows: int) -> Dataset:
    rows = []
    for number, row in enumerate(pairs.preference_rows(8)):
        turns = {}
        for side in ("chosen", "rejected"):
            (turn,) = getattr(row, side)
            text = "<answer>" + turn.content.partition("<answer>")[2]
            turns[side] = (turn.model_copy(update={"content": text}),)
        rows.append(row.model_copy(update=turns) if number < number_of_rows else row)
    return pairs.dataset(rows)


def test_it_asks_for_labels_and_for_nothing_else() -> None:
    rows = pairs.dataset(pairs.preference_rows())
    with pytest.raises(ValueError, match=r"lacks columns that preference_tokens 'reasoning' needs: 'labels'"):
        made(CATTOTrainer, CATTOConfig, rows=rows.remove_columns("labels"), **REASONING)
    made(CATTOTrainer, CATTOConfig, rows=rows.remove_columns(["gold", "correctness_rate"]), **REASONING)


@pytest.mark.parametrize("streamed", [False, True])
def test_pairs_without_reasoning_are_counted_and_refused_beyond_a_half(
    streamed: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def train_on(answer_first: int) -> Any:
        rows = _answer_first(answer_first)
        given = rows.to_iterable_dataset() if streamed else rows
        return pairs.trainer(CATTOTrainer, CATTOConfig, tmp_path, rows=given, **REASONING)

    with caplog.at_level(logging.WARNING, "catto"):
        train_on(4)
    assert "4 of 8 train pairs have nothing to prefer" in caplog.text
    with pytest.raises(ValueError, match="5 of 8 pairs of the train dataset have nothing to prefer"):
        train_on(5)


def test_a_response_without_an_answer_is_read_whole_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = [row.model_dump(mode="json") for row in pairs.preference_rows(8)]
    rows[3]["rejected"][0]["content"] = "the witness says it is not"
    with caplog.at_level(logging.WARNING, "catto"):
        trainer = made(CATTOTrainer, CATTOConfig, rows=Dataset.from_list(rows), **REASONING)
    assert "1 of 8 train pairs have a response without an answer" in caplog.text
    row = trainer.train_dataset[3]
    assert row["rejected_reasoning"] == len(row["rejected_ids"])


def test_sft_alone_has_no_preference_to_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="preference_tokens is 'reasoning' but loss_type is 'sft'"):
        CATTOConfig(str(tmp_path), loss_type=["sft"], bf16=False, **REASONING)
