"""The private parts of TRL that training leans on. A TRL upgrade that moves one fails here first, by name."""

from __future__ import annotations

import inspect
import tomllib
from dataclasses import fields
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pages import ROOT
from steps import made, step
from tiny import tiny_model
from trl import DPOConfig, DPOTrainer, __version__
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import FusedCausalLMOutput, get_config_model_id, hash_module

from catto.training.trl_compat import (
    TRL_RANGE,
    TrainerCard,
    TRLPairTrainer,
    call_copied_forward,
    check_head_device,
    check_trl_version,
    hash_weights,
    hide_padding_free,
    name_model,
    read_dpo_card,
    runs_triton_kernels,
)


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_range_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ranges = {}
    for text in project["optional-dependencies"]["train"]:
        requirement = Requirement(text)
        ranges[requirement.name] = requirement.specifier
    assert ranges["trl"] == SpecifierSet(TRL_RANGE)
    assert __version__ in ranges["trl"]


@pytest.mark.parametrize("version", ["1.14.2", "1.17.0.dev0", "1.17.0", "2.0.0"])
def test_another_version_is_refused_with_the_command_that_installs_one(version: str) -> None:
    message = f'training works with TRL >=1.15,<1.17, found {version}: pip install "trl>=1.15,<1.17"'
    with pytest.raises(ImportError) as refusal:
        check_trl_version(version)
    assert str(refusal.value) == message


def test_trl_1_15_is_refused_where_its_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not runs_triton_kernels(cpu)
    assert runs_triton_kernels(torch.device("cuda"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runs_triton_kernels(cpu)
    check_head_device("1.15.0", runs_triton=True)
    check_head_device("1.16.0", runs_triton=False)
    with pytest.raises(ValueError, match=r'^TRL 1\.15\.0 trains .* GPU only: pip install "trl==1\.16\.\*"$'):
        check_head_device("1.15.0", runs_triton=False)


def test_signatures_that_are_overridden() -> None:
    assert _parameters(DPOTrainer._compute_loss) == ["self", "model", "inputs", "return_outputs"]
    assert _parameters(DPOTrainer.compute_ref_log_probs) == ["self", "model", "inputs"]
    assert _parameters(DPOTrainer._precompute_ref_logps) == ["self", "dataset", "name", "batch_size"]
    assert _parameters(DPOTrainer._prepare_dataset) == ["self", "dataset", "processing_class", "args", "dataset_name"]
    assert _parameters(DPOTrainer._set_signature_columns_if_needed) == ["self"]
    assert _parameters(DPOTrainer._get_dataloader)[:2] == ["self", "dataset"]
    assert _parameters(DPOTrainer._load_from_checkpoint) == ["self", "resume_from_checkpoint", "model"]
    assert _parameters(DPOTrainer.__init__)[:4] == ["self", "model", "ref_model", "args"]


def test_collator_fields_and_layout() -> None:
    """Two pairs become four rows: both chosen, then both rejected, padded on the right."""
    names = [field.name for field in fields(DataCollatorForPreference)]
    assert names == ["pad_token_id", "max_length", "truncation_mode", "pad_to_multiple_of", "return_tensors"]
    batch = DataCollatorForPreference(pad_token_id=0).torch_call(
        [
            {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]},
            {"prompt_ids": [6], "chosen_ids": [7], "rejected_ids": [8]},
        ]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0], [6, 7, 0, 0], [1, 2, 4, 5], [6, 8, 0, 0]]
    assert batch["completion_mask"].tolist() == [[0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0]]
    assert set(batch) == {"input_ids", "attention_mask", "completion_mask"}


def test_output_fields_that_the_loss_reads() -> None:
    assert [field.name for field in fields(FusedCausalLMOutput)] == [
        "loss",
        "log_probs",
        "entropy",
        "log_sum_sq_probs",
        "mean_logits",
        "is_top1",
        "label_mask",
        "aux_loss",
    ]


class _Recorder:
    """Calls the model and keeps what it was called with."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls, self.outputs = model, [], []  # type: ignore[var-annotated]

    def __call__(self, **kwargs: Any) -> Any:
        self.calls.append(kwargs)
        self.outputs.append(self.model(**kwargs))
        return self.outputs[-1]


def test_the_loss_calls_the_model_once_with_labels_and_nothing_else() -> None:
    """A plain callable is enough: no attribute of the model in that place is read."""
    result = step(DPOTrainer, DPOConfig)
    policy = _Recorder(result.trainer.model)
    again = result.trainer._compute_loss(policy, result.trainer._prepare_inputs(result.batch), False)
    assert torch.equal(again.detach(), result.loss)
    (call,) = policy.calls
    assert set(call) == {"input_ids", "attention_mask", "use_cache", "labels", "fused_lm_head"}
    assert call["fused_lm_head"] is True
    mask = result.batch["completion_mask"].bool()
    assert torch.equal(call["labels"], result.batch["input_ids"].masked_fill(~mask, -100))


def test_the_output_is_shifted_by_one_and_zero_off_the_completions() -> None:
    result = step(DPOTrainer, DPOConfig)
    policy = _Recorder(result.trainer.model)
    result.trainer._compute_loss(policy, result.trainer._prepare_inputs(result.batch), False)
    output, mask = policy.outputs[0], result.batch["completion_mask"][:, 1:].bool()
    assert output.log_probs.shape == mask.shape
    assert torch.equal(output.log_probs != 0, mask)
    assert all(getattr(output, name) is not None for name in ("entropy", "mean_logits", "is_top1"))


def test_precomputed_references_are_read_from_the_inputs() -> None:
    """With the switch on for one call, `ref_*_logps` of the inputs replace the reference's forward."""
    result = step(DPOTrainer, DPOConfig)
    trainer, inputs = result.trainer, result.trainer._prepare_inputs(result.batch)
    assert trainer.precompute_ref_logps is False
    chosen, rejected = trainer.compute_ref_log_probs(trainer.ref_model, inputs)
    assert chosen.shape == rejected.shape == (4,)
    trainer.precompute_ref_logps, trainer.ref_model = True, None
    given = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    torch.testing.assert_close(trainer._compute_loss(trainer.model, given, False).detach(), result.loss)


def test_precomputation_goes_through_compute_ref_log_probs_inside_the_constructor() -> None:
    seen: list[set[str]] = []

    class Watched(DPOTrainer):  # type: ignore[misc]
        def compute_ref_log_probs(self, model: Any, inputs: dict[str, Any]) -> Any:
            seen.append(set(inputs))
            return super().compute_ref_log_probs(model, inputs)

    trainer = made(Watched, DPOConfig, precompute_ref_log_probs=True)
    assert len(seen) == 4  # 16 rows in batches of 4
    assert all({"input_ids", "completion_mask"} <= keys for keys in seen)
    assert {"ref_chosen_logps", "ref_rejected_logps"} <= set(trainer.train_dataset.column_names)
    assert isinstance(trainer._precompute_model_hash, str)  # with the data's fingerprint, the key of the cache


def test_attributes_that_are_read() -> None:
    trainer = made(DPOTrainer, DPOConfig)
    assert set(trainer._metrics) == {"train", "eval"}
    trainer._metrics["train"]["anything"].append(1.0)  # a defaultdict of lists, averaged when logged
    assert trainer.use_weighting is False
    assert trainer.ref_model is not None
    assert trainer.data_collator.pad_token_id == trainer.processing_class.pad_token_id
    trainer._set_signature_columns_if_needed()
    assert {"prompt_ids", "chosen_ids", "rejected_ids"} <= set(trainer._signature_columns)


def test_prepared_columns_are_token_ids_and_what_was_there_stays() -> None:
    columns = made(DPOTrainer, DPOConfig).train_dataset.column_names
    assert {"prompt_ids", "chosen_ids", "rejected_ids", "question", "labels", "gold"} <= set(columns)


def test_class_attributes_of_the_model_card() -> None:
    assert isinstance(DPOTrainer._tag_names, list)
    assert isinstance(DPOTrainer._name, str)
    assert set(DPOTrainer._paper) >= {"title", "citation"}


def test_base_model_and_output_embeddings_reach_the_head() -> None:
    """The head of ours runs `base_model` for the last hidden state and multiplies by the output embeddings."""
    model = tiny_model()
    ids = torch.tensor([[5, 6, 7]])
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = hidden @ model.get_output_embeddings().weight.T
    torch.testing.assert_close(logits, model(input_ids=ids).logits)


def test_losses_and_references_are_attributes_that_may_be_replaced_for_a_step() -> None:
    trainer = made(DPOTrainer, DPOConfig, loss_type=["sigmoid", "sft"], loss_weights=[0.8, 0.3])
    assert list(trainer.loss_types) == ["sigmoid", "sft"]
    assert list(trainer.loss_weights) == [0.8, 0.3]
    assert trainer.precompute_ref_logps is False


def test_a_hash_of_a_model_follows_from_its_weights() -> None:
    assert hash_module(tiny_model()) == hash_module(tiny_model())
    assert hash_module(tiny_model()) != hash_module(tiny_model(seed=1))
    assert hash_weights(tiny_model()) == hash_module(tiny_model())


def test_a_model_is_named_as_trl_names_it() -> None:
    model = tiny_model()
    assert name_model("owner/model") == "model"
    assert name_model(model) == get_config_model_id(model.config).split("/")[-1]


def test_hooks_that_are_not_overridden_change_nothing() -> None:
    theirs = step(DPOTrainer, DPOConfig)
    ours = step(TRLPairTrainer, DPOConfig)
    assert torch.equal(ours.loss, theirs.loss)
    assert ours.trainer.train_dataset.column_names == theirs.trainer.train_dataset.column_names


def test_a_loss_that_is_taken_out_comes_back() -> None:
    trainer = made(TRLPairTrainer, DPOConfig, loss_type=["sigmoid", "sft"], loss_weights=[0.8, 0.3])
    with trainer.take_out_loss("sft") as weight:
        assert weight == 0.3
        assert list(trainer.loss_types) == ["sigmoid"]
        assert list(trainer.loss_weights) == [0.8]
    assert list(trainer.loss_types) == ["sigmoid", "sft"]


def test_metrics_and_card_reach_trl() -> None:
    trainer = made(TRLPairTrainer, DPOConfig)
    trainer.model.train()
    trainer.append_metrics("train", "anything", [1.0, 2.0])
    assert trainer.read_metrics()["anything"] == [1.0, 2.0]
    trainer.set_card(TrainerCard(title="A title", paper={"citation": "none"}, tags=["a"]))
    assert trainer._name == "A title"
    assert read_dpo_card().title == DPOTrainer._name


def test_padding_free_is_hidden_and_restored() -> None:
    config = made(DPOTrainer, DPOConfig).args
    config.padding_free = True
    with hide_padding_free(config):
        assert config.padding_free is None
    assert config.padding_free is True


def test_the_forward_that_trl_wraps_computes_on_the_model_it_is_called_with() -> None:
    """A copy of a model takes TRL's wrapped forward along, bound to the original."""
    wrapped = made(DPOTrainer, DPOConfig).model
    other = tiny_model(seed=1)
    ids = torch.tensor([[5, 6, 7]])
    found = call_copied_forward(wrapped.forward, other, input_ids=ids, labels=ids, fused_lm_head=True)
    expected = other(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(found.log_probs, expected)
    plain = call_copied_forward(wrapped.forward, other, input_ids=ids)
    torch.testing.assert_close(plain.logits, other(input_ids=ids).logits)
