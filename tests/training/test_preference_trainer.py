"""`CATTOTrainer` beside TRL's `DPOTrainer`, and beside a dense computation from full logits."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
from peft import LoraConfig
from steps import Step, distance, facts, lora, made, step
from tiny import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import logsigmoid, one_hot
from trl import DPOConfig, DPOTrainer

from catto.training.batches import PairCollator
from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.trainer import CATTOTrainer


class ZeroWeight(CATTOTrainer):
    """Runs the whole of our head and the term, which then counts for nothing."""

    @property
    def calibration_weight(self) -> float:
        return 0.0


LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {"loss_type": ["sigmoid"]},
    "ipo": {"loss_type": ["ipo"]},
    "mixture": {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 0.3]},
}
VARIANTS: dict[str, dict[str, Any]] = {"wpo": {"use_weighting": True}, "ld": {"ld_alpha": 0.4}}
CASES = [
    (loss, adapter, precompute) for loss in LOSSES for adapter in (False, True) for precompute in (False, True)
] + [(variant, False, precompute) for variant in VARIANTS for precompute in (False, True)]


def _options(loss: str, adapter: bool, precompute: bool) -> dict[str, Any]:
    more = {"peft_config": lora()} if adapter else {}
    return {**(LOSSES | VARIANTS)[loss], "precompute_ref_log_probs": precompute, **more}


# ---- with no weight it is TRL's DPO ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "adapter", "precompute"), CASES)
def test_weight_zero_is_trl_dpo_to_the_last_bit(loss: str, adapter: bool, precompute: bool) -> None:
    options = _options(loss, adapter, precompute)
    theirs = step(DPOTrainer, DPOConfig, **options)
    ours = step(CATTOTrainer, CATTOConfig, **options, **_nothing(precompute))
    assert torch.equal(ours.loss, theirs.loss)
    assert ours.gradients.keys() == theirs.gradients.keys()
    assert theirs.gradients
    for name, gradient in theirs.gradients.items():
        assert torch.equal(ours.gradients[name], gradient), name
    through_our_head = step(ZeroWeight, CATTOConfig, calibration="catto", **options)
    assert "calibration/confidence" in through_our_head.metrics
    torch.testing.assert_close(through_our_head.loss, theirs.loss, rtol=1e-6, atol=1e-6)
    assert distance(through_our_head.gradients, theirs.gradients) < 1e-6
    for name, value in theirs.metrics.items():
        assert through_our_head.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def _nothing(precompute: bool) -> dict[str, Any]:
    """The two ways to say that there is no term."""
    return {"calibration": "none"} if precompute else {"calibration": "catto", "calibration_weight": 0.0}


@pytest.mark.parametrize("calibration", ["none", "catto"])
def test_loss_at_the_first_step_is_ln_2_where_the_reference_is_the_policy(calibration: str) -> None:
    kind, model = (CATTOTrainer, tiny_model(seed=1)) if calibration == "none" else (ZeroWeight, tiny_model(seed=1))
    first = step(kind, CATTOConfig, calibration=calibration, model=model)
    assert first.loss.item() == pytest.approx(math.log(2), abs=1e-6)


def test_adapter_on_the_lm_head_stays_refused() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"lm_head|LM head"):
        made(CATTOTrainer, CATTOConfig, peft_config=config)


def test_bf16_autocast_covers_our_head_and_gives_trl_loss() -> None:
    theirs = step(DPOTrainer, DPOConfig, bf16=True)
    ours = step(ZeroWeight, CATTOConfig, bf16=True)
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), abs=0.02)
    assert ours.gradients.keys() == theirs.gradients.keys()


# ---- with weight it is the dense computation ------------------------------------------------------------------------


class Dense:
    """Everything from full logits by plain autograd; nothing of ours is called."""

    def __init__(self, result: Step) -> None:
        batch, self.model = result.batch, tiny_model()
        ids, mask = batch["input_ids"], batch["completion_mask"][:, 1:].bool()
        self.mask, self.ids = mask, ids
        self.logits = self.model(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
        self.log_p = self.logits.log_softmax(-1)
        with torch.no_grad():
            reference = tiny_model(seed=1)(input_ids=ids, attention_mask=batch["attention_mask"]).logits[:, :-1]
        self.target = self._of_tokens(self.log_p)
        ratio = (self.target - self._of_tokens(reference.log_softmax(-1))).masked_fill(~mask, 0).sum(-1)
        chosen, rejected = ratio.chunk(2)
        self.dpo = -logsigmoid(0.1 * (chosen - rejected)).mean()
        self.facts = facts(batch)

    def _of_tokens(self, log_p: Tensor) -> Tensor:
        return log_p.gather(-1, self.ids[:, 1:, None]).squeeze(-1)

    def label_mask(self) -> Tensor:
        """The token after `<answer>` and the newline: with this tokenizer the label, in TRL's shifted layout."""
        answer, newline = tiny_tokenizer().convert_tokens_to_ids(["<answer>", "\n"])
        opened = (self.ids[:, :-2] == answer) & (self.ids[:, 1:-1] == newline)
        mask = torch.zeros_like(self.mask)
        mask[:, 1:] = opened & self.mask[:, 1:]
        assert (mask.sum(-1) == 1).all()
        return mask

    def term(self, token_loss: Any, *, label: bool = False, total: bool = False, detach: bool = False) -> Tensor:
        """token_loss(s, c) reduced over each response, y+ with s = z~ and y- with 1 - z~, mean over the pairs."""
        mask = self.label_mask() if label else self.mask
        p, c = self.target.exp(), self.log_p.exp().amax(-1)
        others = self.log_p.exp().scatter(-1, self.ids[:, 1:, None], -1.0)
        s = torch.sigmoid(p - others.amax(-1))
        s = s.detach() if detach else s
        half = len(s) // 2
        s = torch.cat([s[:half], 1 - s[half:]])
        per_response = []
        for row in range(len(s)):
            values = token_loss(s[row][mask[row]], c[row][mask[row]])
            per_response.append(values.sum() if total else values.mean())
        return torch.stack(per_response[:half]).mean() + torch.stack(per_response[half:]).mean()

    def labels(self) -> tuple[Tensor, Tensor]:
        """P of A, B, C, D where each response's label is predicted, (2 B, 4), and the gold index, (2 B,)."""
        tokens = torch.tensor(tiny_tokenizer().convert_tokens_to_ids(["A", "B", "C", "D"]))
        gold = torch.tensor([fact["gold_index"] for fact in self.facts] * 2)
        return self.log_p[self.label_mask()].exp()[:, tokens], gold

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        loss.backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


TERMS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "catto": ({"calibration": "catto"}, lambda s, c: s * (1 - c) + (1 - s) * c, {}),
    "catto detached": (
        {"calibration": "catto", "detach_surrogate": True},
        lambda s, c: s * (1 - c) + (1 - s) * c,
        {"detach": True},
    ),
    "catto at the label": (
        {"calibration": "catto", "calibrate_tokens": "label"},
        lambda s, c: s * (1 - c) + (1 - s) * c,
        {"label": True},
    ),
    "catto summed": (
        {"calibration": "catto", "reduce": "sum"},
        lambda s, c: s * (1 - c) + (1 - s) * c,
        {"total": True},
    ),
    "bce": ({"calibration": "bce"}, lambda s, c: -s * c.log() - (1 - s) * torch.log1p(-c), {"total": True}),
    "bce mean": ({"calibration": "bce", "reduce": "mean"}, lambda s, c: -s * c.log() - (1 - s) * torch.log1p(-c), {}),
    "l1": ({"calibration": "l1"}, lambda s, c: (c - s).abs(), {}),
    "brier": ({"calibration": "brier"}, lambda s, c: (c - s) ** 2, {}),
}


@pytest.mark.parametrize("name", TERMS)
def test_loss_and_gradient_are_those_of_full_logits(name: str) -> None:
    options, token_loss, how = TERMS[name]
    result = step(CATTOTrainer, CATTOConfig, **options)
    dense = Dense(result)
    expected = dense.dpo + 0.1 * dense.term(token_loss, **how)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-6, atol=1e-6)
    assert distance(result.gradients, dense.gradients(expected)) < 1e-5


@pytest.mark.parametrize("score", ["brier", "log"])
def test_outcome_on_pairs_is_the_weighted_score_of_full_logits(score: str) -> None:
    result = step(CATTOTrainer, CATTOConfig, calibration="outcome", outcome_score=score)
    dense = Dense(result)
    p, gold = dense.labels()
    rate = torch.tensor([fact["correctness_rate"] for fact in dense.facts])
    losses = _scores(p, gold, score) * torch.cat([rate, 1 - rate])
    expected = dense.dpo + losses.sum() / len(rate)  # weight 1
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-6, atol=1e-6)
    assert distance(result.gradients, dense.gradients(expected)) < 1e-5


def _scores(p: Tensor, gold: Tensor, score: str) -> Tensor:
    if score == "log":
        return -p.gather(-1, gold[:, None]).squeeze(-1).log()
    return ((p - one_hot(gold, 4)) ** 2).sum(-1)


@pytest.mark.parametrize("score", ["brier", "log"])
def test_outcome_on_the_stream_is_the_mean_score_of_full_logits(score: str) -> None:
    stream = make_examples(tiny_tokenizer(), pairs.sft_rows())
    result = step(CATTOTrainer, CATTOConfig, calibration="outcome", outcome_score=score, outcome_examples=stream)
    taken = [result.trainer._stream.example_at(n) for n in range(8)]  # 4 pairs, 2 rows a pair, from the start
    dense = Dense(result)
    tokens = torch.tensor(tiny_tokenizer().convert_tokens_to_ids(["A", "B", "C", "D"]))
    rows = []
    for example in taken:
        answer = example.row.completion.index(tiny_tokenizer().convert_tokens_to_ids("<answer>"))
        ids = torch.tensor([example.row.prompt + example.row.completion[: answer + 2]])
        rows.append(dense.model(input_ids=ids).logits[0, -1].softmax(-1)[tokens])
    gold = torch.tensor([pairs.LABELS.index(_gold(example.question)) for example in taken])
    expected = dense.dpo + _scores(torch.stack(rows), gold, score).mean()
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-6, atol=1e-6)
    assert distance(result.gradients, dense.gradients(expected)) < 1e-5


@pytest.mark.parametrize("shared", [False, True])
def test_replay_is_the_mean_cross_entropy_of_the_streams_responses(shared: bool) -> None:
    """A mean over each response's tokens, the end of sequence among them, then over responses; weight 1."""
    stream = make_examples(tiny_tokenizer(), pairs.sft_rows())
    options = {"calibration": "replay", "outcome_examples": stream, "prefix_sharing": shared}
    result = step(CATTOTrainer, CATTOConfig, **options)
    dense = Dense(result)
    losses = []
    for example in (result.trainer._stream.example_at(n) for n in range(8)):
        prompt, completion = example.row
        log_p = (
            dense.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        )
        losses.append(-log_p.gather(-1, torch.tensor(completion)[:, None]).mean())
    expected = dense.dpo + torch.stack(losses).mean()
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-6, atol=2e-6)
    assert distance(result.gradients, dense.gradients(expected)) < 1e-5
    assert result.metrics["calibration/replay"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-5)


def test_replay_without_responses_is_refused() -> None:
    with pytest.raises(ValueError, match="calibration is 'replay' but outcome_examples"):
        made(CATTOTrainer, CATTOConfig, calibration="replay")


def test_a_preference_loss_of_weight_0_leaves_the_term_alone() -> None:
    """What `sft+outcome` trains: the outcome's gradient and nothing of DPO's."""
    stream = make_examples(tiny_tokenizer(), pairs.sft_rows())
    options = {"calibration": "outcome", "outcome_examples": stream}
    both, alone = (
        step(CATTOTrainer, CATTOConfig, **options),
        step(CATTOTrainer, CATTOConfig, **options, loss_weights=[0.0]),
    )
    dense = Dense(both)
    expected = dense.gradients(dense.dpo)
    difference = {name: both.gradients[name] - alone.gradients[name] for name in expected}
    assert alone.loss.item() == pytest.approx(alone.metrics["calibration/outcome"], abs=1e-6)
    assert distance(difference, expected) < 1e-5


def _gold(question: str) -> str:
    return next(row.gold for row in pairs.sft_rows() if row.question == question)


def test_the_lora_term_is_the_term_of_the_merged_model() -> None:
    result = step(CATTOTrainer, CATTOConfig, peft_config=lora())
    plain = step(ZeroWeight, CATTOConfig, peft_config=lora())
    dense = Dense(result)
    merged = result.trainer.model.merge_and_unload()
    with torch.no_grad():
        logits = merged(input_ids=dense.ids, attention_mask=result.batch["attention_mask"]).logits[:, :-1]
        dense.log_p = logits.log_softmax(-1)
        dense.target = dense._of_tokens(dense.log_p)
        term = dense.term(lambda s, c: s * (1 - c) + (1 - s) * c)
    assert (result.loss - plain.loss).item() == pytest.approx(0.1 * term.item(), abs=1e-5)


def test_plain_dpo_config_trains_with_the_default_term() -> None:
    result = step(CATTOTrainer, DPOConfig)
    dense = Dense(result)
    expected = dense.dpo + 0.1 * dense.term(lambda s, c: s * (1 - c) + (1 - s) * c)
    torch.testing.assert_close(result.loss, expected.detach(), rtol=1e-6, atol=1e-6)
    assert result.trainer.args.calibration == "catto"


# ---- logs and evaluation -------------------------------------------------------------------------------------------


def test_every_step_logs_the_calibration_beside_the_rewards(tmp_path: Path) -> None:
    trainer = made(CATTOTrainer, CATTOConfig, folder=tmp_path, max_steps=3)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    names = ("calibration/chosen", "calibration/rejected", "calibration/confidence", "calibration/surrogate")
    for entry in steps:
        assert all(0 < entry[name] < 1 for name in names)
        assert 0 <= entry["calibration/right"] <= 1
        assert 0 <= entry["rewards/accuracies"] <= 1


def test_logged_parts_of_the_first_step_are_those_of_full_logits() -> None:
    result = step(CATTOTrainer, CATTOConfig)
    dense = Dense(result)
    c = dense.log_p.exp().amax(-1)[dense.mask]
    right = (dense.log_p.argmax(-1) == dense.ids[:, 1:])[dense.mask].float()
    assert result.metrics["calibration/confidence"] == pytest.approx(c.mean().item(), rel=1e-5)
    assert result.metrics["calibration/right"] == pytest.approx(right.mean().item(), abs=1e-6)
    both = result.metrics["calibration/chosen"] + result.metrics["calibration/rejected"]
    assert 0.1 * both == pytest.approx((result.loss - dense.dpo).item(), abs=1e-6)


def test_evaluation_reports_the_term_and_leaves_the_weights(tmp_path: Path) -> None:
    trainer = made(CATTOTrainer, CATTOConfig, folder=tmp_path)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    found = trainer.evaluate(pairs.dataset(pairs.preference_rows(6, seed=9)))
    assert 0 < found["eval_calibration/confidence"] < 1
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_parts_of_the_term_are_means_over_pairs_whatever_the_batches(tmp_path: Path) -> None:
    """Seven pairs in batches of three: the last batch has one pair, which counts as one pair and not as three."""
    held_out = pairs.dataset(pairs.preference_rows(7, seed=9))
    found = {}
    for size in (1, 3):
        options = {"per_device_eval_batch_size": size, "calibration": "bce"}
        trainer = made(CATTOTrainer, CATTOConfig, folder=tmp_path, **options)
        found[size] = trainer.evaluate(held_out)
    for name in ("calibration/chosen", "calibration/rejected"):
        assert found[3][f"eval_{name}"] == pytest.approx(found[1][f"eval_{name}"], rel=1e-5)
    weight = 0.1
    total = found[3]["eval_loss"] + weight * (
        found[3]["eval_calibration/chosen"] + found[3]["eval_calibration/rejected"]
    )
    assert found[3]["eval_total_loss"] == pytest.approx(total, rel=1e-5)


# ---- a mask of one's own -------------------------------------------------------------------------------------------

PROMPT_TOO = "prompt"
MASKS = ("holes", "first", "last", "all_of_one", PROMPT_TOO)


def change_mask(mask: Tensor, kind: str) -> Tensor:
    """Another completion mask. mask: (2 B, L)."""
    changed = mask.clone()
    for number, row in enumerate(mask):
        selected = row.nonzero().flatten()
        if kind == "holes":
            changed[number, selected[1::2]] = 0
        elif kind == "first":
            changed[number, selected[: 1 + number % 3]] = 0
        elif kind == "last":
            changed[number, selected[-1 - number % 3 :]] = 0
        elif kind == "all_of_one" and number == 1:
            changed[number] = 0
        elif kind == PROMPT_TOO:
            changed[number, [0, 1, int(selected[0]) - 1]] = 1
    return changed


def masked(kind: Any, change: str, in_place: bool = False) -> Any:
    """The trainer `kind`, in a subclass that trains on other tokens."""

    class Masked(kind):  # type: ignore[misc]
        def _other(self, inputs: dict[str, Any]) -> dict[str, Any]:
            other = change_mask(inputs["completion_mask"], change)
            if in_place:
                inputs["completion_mask"].copy_(other)
                return inputs
            return {**inputs, "completion_mask": other}

        def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
            return self._other(super()._prepare_inputs(inputs))

        def _precompute_ref_logps(self, *args: Any) -> Any:
            self.precomputing = True
            try:
                return super()._precompute_ref_logps(*args)
            finally:
                self.precomputing = False

        def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
            given = self._other(inputs) if getattr(self, "precomputing", False) else inputs
            return super().compute_ref_log_probs(model, given)

    return Masked


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "shared": {"prefix_sharing": True},
    "packed": {"padding_free": True},
    "both": {"prefix_sharing": True, "padding_free": True},
    "stream": {"calibration": "outcome"},
    "dispatched": {"accelerator_config": {"dispatch_batches": True}},
    "precomputed": {"precompute_ref_log_probs": True, "prefix_sharing": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", MASKS)
def test_any_completion_mask_is_honoured_as_trl_does(change: str, layout: str) -> None:
    more = {"precompute_ref_log_probs": True} if layout == "precomputed" else {}
    theirs = step(masked(DPOTrainer, change), DPOConfig, **more)
    options = {**LAYOUTS[layout]}
    if layout == "stream":
        options["outcome_examples"] = make_examples(tiny_tokenizer(), pairs.sft_rows())
    ours = step(masked(ZeroWeight, change), CATTOConfig, **options)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    assert distance(ours.gradients, theirs.gradients) < 1e-5
    for name in ("logps/chosen", "logps/rejected", "rewards/margins", "entropy", "mean_token_accuracy"):
        assert ours.metrics[name] == pytest.approx(theirs.metrics[name], rel=1e-5, abs=1e-5), name


def test_a_mask_changed_in_place_is_honoured() -> None:
    theirs = step(masked(DPOTrainer, "holes", in_place=True), DPOConfig)
    ours = step(masked(ZeroWeight, "holes", in_place=True), CATTOConfig)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    assert distance(ours.gradients, theirs.gradients) < 1e-5


class MaskingCollator(PairCollator):
    """A collator of one's own that leaves every other token of a response out."""

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        batch["completion_mask"] = change_mask(batch["completion_mask"], "holes")
        return batch


@pytest.mark.parametrize("sharing", [False, True])
def test_a_collator_that_masks_tokens_is_honoured(sharing: bool) -> None:
    theirs = step(masked(DPOTrainer, "holes"), DPOConfig)
    collator = MaskingCollator(pad_token_id=tiny_tokenizer().pad_token_id)
    ours = step(ZeroWeight, CATTOConfig, data_collator=collator, prefix_sharing=sharing)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-6)


def test_the_term_reads_the_tokens_of_the_changed_mask() -> None:
    """The mean over the tokens that are left, and the label's token where it is one of them."""
    result = step(masked(CATTOTrainer, "holes"), CATTOConfig)
    dense = Dense(result)
    dense.mask = change_mask(result.batch["completion_mask"], "holes")[:, 1:].bool()
    left = dense.term(lambda s, c: s * (1 - c) + (1 - s) * c)
    found = result.metrics["calibration/chosen"] + result.metrics["calibration/rejected"]
    assert found == pytest.approx(left.item(), abs=1e-5)
    at_label = step(masked(CATTOTrainer, "first"), CATTOConfig, calibrate_tokens="label")
    expected = Dense(at_label).term(lambda s, c: s * (1 - c) + (1 - s) * c, label=True)
    found = at_label.metrics["calibration/chosen"] + at_label.metrics["calibration/rejected"]
    assert found == pytest.approx(expected.item(), abs=1e-5)


# ---- a copy of the model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True])
def test_a_copy_of_the_model_runs_its_own_weights(adapter: bool) -> None:
    trainer = made(CATTOTrainer, CATTOConfig, **({"peft_config": lora()} if adapter else {}))
    ids = torch.arange(5, 15)[None]
    copied = copy.deepcopy(trainer.model)
    with torch.no_grad():
        before = trainer.model(input_ids=ids).logits
        assert torch.equal(copied(input_ids=ids).logits, before)
        for parameter in copied.parameters():
            parameter.zero_()
        labels = ids.clone()
        assert copied(input_ids=ids).logits.abs().max() == 0
        assert copied(input_ids=ids, labels=labels).loss.item() == pytest.approx(math.log(copied.config.vocab_size))
        head = copied(input_ids=ids, labels=labels, fused_lm_head=True)
        assert head.log_probs.mean().item() == pytest.approx(-math.log(copied.config.vocab_size))
        assert torch.equal(trainer.model(input_ids=ids).logits, before)
