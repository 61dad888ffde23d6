"""Every private part of TRL that training depends on. Nothing else in the package may name one.

All of it holds for TRL 1.15 and 1.16, the range of pyproject.toml; another version is refused when this module is
imported. `tests/training/test_trl_compat.py` checks each part, so a TRL release that moves one fails there by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor
from trl import DPOConfig, DPOTrainer, __version__

from catto.objectives import TokenStats

# Versions whose private parts were read and tested.
TRL_RANGE = ">=1.15,<1.17"
# The first with a head in plain PyTorch; that of TRL 1.15 consists of Triton kernels.
FIRST_CPU_TRL = "1.16"


def check_trl_version(version: str) -> None:
    """Refuse a TRL whose private parts were not read.

    Args:
        version: The installed version.

    Raises:
        ImportError: The version is outside the range; the message says in one line what to install.

    Example:
        >>> check_trl_version("1.16.0")
        >>> check_trl_version("1.14.2")
        Traceback (most recent call last):
        ImportError: training works with TRL >=1.15,<1.17, found 1.14.2: pip install "trl>=1.15,<1.17"
    """
    if SpecifierSet(TRL_RANGE).contains(version, prereleases=True):
        return
    message = f'training works with TRL {TRL_RANGE}, found {version}: pip install "trl{TRL_RANGE}"'
    raise ImportError(message, name=__name__)


check_trl_version(__version__)

# A version that was refused may not have them.
from trl.trainer.dpo_trainer import DataCollatorForPreference  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput, get_config_model_id, hash_module  # noqa: E402

__all__ = ["DataCollatorForPreference", "TRLPairTrainer", "TrainerCard"]

# Statistics that TRL logs at every step, under the names of `TokenStats`.
TRL_EXTRAS = ("entropy", "mean_logit")


def check_head_device(version: str, *, runs_triton: bool) -> None:
    """Refuse a device on which TRL's own head cannot run; references and losses without a term of ours go through it.

    Args:
        version: The installed version of TRL.
        runs_triton: Whether Triton's kernels run on the device: it is a GPU, or Triton interprets them.

    Raises:
        ValueError: The version has no head but that of its Triton kernels, which do not run there.

    Example:
        >>> check_head_device("1.15.0", runs_triton=True)
        >>> check_head_device("1.15.0", runs_triton=False)
        Traceback (most recent call last):
        ValueError: TRL 1.15.0 trains on preferences on a GPU only: pip install "trl==1.16.*"
    """
    if runs_triton or Version(version) >= Version(FIRST_CPU_TRL):
        return
    raise ValueError(f'TRL {version} trains on preferences on a GPU only: pip install "trl=={FIRST_CPU_TRL}.*"')


def runs_triton_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels run on a device."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return is_interpreted or device.type in ("cuda", "xpu")


def name_model(model: Any) -> str:
    """Return the name that TRL gives a model in its default output folder.

    TRL takes the last part of the model's id, which `trl.trainer.utils.get_config_model_id` reads.
    """
    model_id = model
    if not isinstance(model, str):
        model_id = get_config_model_id(model.config)
    return str(model_id.split("/")[-1])


def hash_weights(model: Any) -> str:
    """Return a hash of a model's weights: `trl.trainer.utils.hash_module`."""
    return str(hash_module(model))


def make_fused_output(stats: TokenStats, mask: Tensor, aux_loss: Tensor | None) -> Any:
    """Return the output that TRL's losses read, `FusedCausalLMOutput`.

    TRL 1.16 sums the log-probabilities without looking at its mask, so they are 0 where it is False. TRL only logs
    entropy and mean logit, so they carry no gradient.

    Args:
        stats: Statistics of the 2 B responses, (2 B, L - 1) each, chosen first.
        mask: Tokens that TRL's loss reads, (2 B, L - 1).
        aux_loss: Load balancing of a mixture of experts, a scalar.
    """
    entropy = stats.entropy
    if entropy is not None:
        entropy = entropy.detach()
    mean_logit = stats.mean_logit
    if mean_logit is not None:
        mean_logit = mean_logit.detach()
    return FusedCausalLMOutput(
        log_probs=stats.target.masked_fill(~mask, 0.0),
        entropy=entropy,
        mean_logits=mean_logit,
        is_top1=stats.right & mask,
        log_sum_sq_probs=stats.log_sum_sq,
        label_mask=mask,
        aux_loss=aux_loss,
    )


def call_copied_forward(wrapped: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a forward that TRL wrapped on one model with the weights of a copy of that model.

    `add_fused_lm_head` binds a function to the instance. With `fused_lm_head=True` the function
    computes on its `self`; without it, it runs the forward of the model that it was bound to.
    """
    if kwargs.pop("fused_lm_head", False):
        return wrapped.__func__(model, *args, fused_lm_head=True, **kwargs)
    return type(model).forward(model, *args, **kwargs)


@contextmanager
def hide_padding_free(args: DPOConfig) -> Iterator[None]:
    """Unset `padding_free` while TRL's trainer is built: TRL accepts the option, warns and ignores it."""
    padding_free = args.padding_free
    args.padding_free = None
    try:
        yield
    finally:
        args.padding_free = padding_free


@dataclass(frozen=True)
class TrainerCard:
    """What TRL writes about a trainer into its model card: `_name`, `_paper` and `_tag_names` of the class."""

    title: str
    paper: dict[str, str]
    tags: list[str]


def read_dpo_card() -> TrainerCard:
    """Return what `DPOTrainer` itself writes into a model card."""
    return TrainerCard(title=str(DPOTrainer._name), paper=dict(DPOTrainer._paper), tags=list(DPOTrainer._tag_names))


class TRLPairTrainer(DPOTrainer):  # type: ignore[misc]
    """`DPOTrainer` with a public hook in place of each private method that we override.

    A subclass overrides `compute_pair_loss`, `prepare_pairs`, `prepare_collator`, `extend_reference_key` and
    `notice_inputs`, and lists its columns in `extra_columns`. Each hook does by default what TRL does.
    """

    extra_columns: Sequence[str] = ()

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, *more: Any, **kwargs: Any) -> None:
        if args is not None:
            check_head_device(__version__, runs_triton=runs_triton_kernels(args.device))
        super().__init__(model, ref_model, args, *more, **kwargs)

    # ---- data

    def prepare_pairs(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        """Prepare a dataset of pairs: by default TRL's `_prepare_dataset`, which TRL calls in its constructor.

        TRL renders and tokenizes the pairs into `prompt_ids`, `chosen_ids` and `rejected_ids` and keeps other columns.
        With `max_length` it silently drops pairs whose prompt is too long.
        """
        return super()._prepare_dataset(dataset, processing_class, args, name)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        return self.prepare_pairs(dataset, processing_class, args, dataset_name)

    def _set_signature_columns_if_needed(self) -> None:
        """Keep `extra_columns` too: TRL removes every column that is not in `_signature_columns`."""
        super()._set_signature_columns_if_needed()
        columns: list[str] = list(vars(self)["_signature_columns"])
        for column in self.extra_columns:
            if column not in columns:
                columns.append(column)
        self._signature_columns = columns

    def prepare_collator(self, dataset: Any) -> None:
        """Adapt `self.data_collator` to a dataset, before TRL makes a data loader of the dataset."""

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        self.prepare_collator(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def notice_inputs(self, inputs: dict[str, Any]) -> None:
        """Look at a batch that has just been moved to the device."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        self.notice_inputs(prepared)
        return prepared

    # ---- the reference

    def extend_reference_key(self, model_hash: Any) -> Any:
        """Return the key under which reference log-probabilities are cached, next to the dataset's fingerprint."""
        return model_hash

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Cache reference log-probabilities by our key: TRL's knows only the data and `_precompute_model_hash`.

        TRL calls this in its constructor. The log-probabilities come from `compute_ref_log_probs`.
        """
        self.prepare_collator(dataset)
        model_hash = vars(self)["_precompute_model_hash"]
        self._precompute_model_hash: Any = self.extend_reference_key(model_hash)
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            self._precompute_model_hash = model_hash

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the trained adapter too.

        TRL keeps the reference of an adapted model as a second adapter named `ref`, in a folder of that name in the
        checkpoint. Where that folder exists, Transformers loads only the adapters in folders.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        has_reference_folder = (Path(resume_from_checkpoint) / "ref").is_dir()
        has_reference_adapter = "ref" in getattr(self.model, "peft_config", {})
        if has_reference_folder and has_reference_adapter and not self.is_fsdp_enabled:
            self.model.load_adapter(resume_from_checkpoint, self.model.active_adapters[0], is_trainable=True)

    # ---- the loss

    def compute_pair_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute the loss of a batch: by default TRL's."""
        return self.compute_trl_loss(model, inputs, return_outputs)

    def compute_trl_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute TRL's own loss of a batch.

        TRL calls `model(**kwargs, labels=labels, fused_lm_head=True)` once and uses `model` for nothing else, so any
        callable that returns a `FusedCausalLMOutput` will do. With `return_outputs` a second call without labels asks
        for full logits. TRL passes unknown entries of a batch on to the model.
        """
        return super()._compute_loss(model, inputs, return_outputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        return self.compute_pair_loss(model, inputs, return_outputs)

    @contextmanager
    def read_references_from_batch(self) -> Iterator[None]:
        """Let TRL's loss read `ref_chosen_logps` and `ref_rejected_logps` of the batch, as if they were precomputed.

        TRL reads the attribute `precompute_ref_logps` at every step.
        """
        precomputed: bool = self.precompute_ref_logps
        self.precompute_ref_logps: bool = True
        try:
            yield
        finally:
            self.precompute_ref_logps = precomputed

    @contextmanager
    def take_out_loss(self, loss_type: str) -> Iterator[float]:
        """Take a loss out of TRL's sum and return its weight, 0 if it is not in the sum.

        TRL reads the lists `loss_types` and `loss_weights` at every step.
        """
        all_types = self.loss_types
        all_weights = self.loss_weights
        kept_types = []
        kept_weights = []
        removed_weight = 0.0
        for kind, weight in zip(all_types, all_weights, strict=True):
            if kind == loss_type:
                removed_weight += weight
            else:
                kept_types.append(kind)
                kept_weights.append(weight)
        self.loss_types: Any = kept_types
        self.loss_weights: Any = kept_weights
        try:
            yield removed_weight
        finally:
            self.loss_types = all_types
            self.loss_weights = all_weights

    @property
    def needs_squared_mass(self) -> bool:
        """Whether TRL's loss weights pairs by `log_sum_sq_probs`: the attribute `use_weighting` (WPO)."""
        return bool(self.use_weighting)

    # ---- logs and the model card

    def append_metrics(self, mode: str, name: str, values: Sequence[float | Tensor]) -> None:
        """Add numbers of this batch to those that TRL averages at the next log.

        `_metrics[mode]` is a `defaultdict(list)` for each of the modes `train` and `eval`.
        """
        self._metrics[mode][name].extend(values)

    def read_metrics(self) -> dict[str, list[Any]]:
        """Return the numbers that the next log averages; what is assigned there is logged."""
        mode = "eval"
        if self.model.training:
            mode = "train"
        metrics: dict[str, list[Any]] = self._metrics[mode]
        return metrics

    def set_card(self, card: TrainerCard) -> None:
        """Set what TRL writes into the model card: instance attributes hide those of the class."""
        self._name = card.title
        self._paper = card.paper
        self._tag_names = card.tags
