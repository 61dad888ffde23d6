"""All uses of TRL's private parts. No other module of the package may use them.

They are valid for TRL 1.15 and 1.16, the range in pyproject.toml. Other versions are refused when this module is
imported. `tests/training/test_trl_compat.py` checks each part, so its failures name what a new TRL release has changed.
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

# Versions whose private parts have been read and tested.
TRL_RANGE = ">=1.15,<1.17"
# The first version with a head in plain PyTorch. The head of TRL 1.15 consists of Triton kernels.
FIRST_CPU_TRL = "1.16"


def check_trl_version(version: str) -> None:
    """Refuse a version of TRL whose private parts have not been read.

    Args:
        version: The installed version.

    Raises:
        ImportError: The version is outside of `TRL_RANGE`. The message says what to install.

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

# Imported after the check, since other versions may not have these names.
from trl.trainer.dpo_trainer import DataCollatorForPreference  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput, get_config_model_id, hash_module  # noqa: E402

__all__ = ["DataCollatorForPreference", "TRLPairTrainer", "TrainerCard"]

# Statistics that TRL logs at every step, under the names of `TokenStats`.
TRL_EXTRAS = ("entropy", "mean_logit")


def check_head_device(version: str, *, runs_triton: bool) -> None:
    """Refuse a device on which TRL's own head cannot run. It may run for references and for losses without our term.

    Args:
        version: The installed version of TRL.
        runs_triton: Whether Triton kernels run on the device, see `runs_triton_kernels`.

    Raises:
        ValueError: TRL's head consists of Triton kernels in this version, and they do not run on the device.

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
    """Return whether Triton kernels run on a device: on a GPU, or on any device in Triton's interpreter."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return is_interpreted or device.type in ("cuda", "xpu")


def name_model(model: Any) -> str:
    """Return the name that TRL gives a model in its default output folder: the last part of the model's id.

    model: The id or path of the model, or the model itself.
    """
    if isinstance(model, str):
        model_id = model
    else:
        model_id = get_config_model_id(model.config)
    return str(model_id.split("/")[-1])


def hash_weights(model: Any) -> str:
    """Return a hash of a model's weights, computed by `trl.trainer.utils.hash_module`."""
    return str(hash_module(model))


def make_fused_output(stats: TokenStats, mask: Tensor, aux_loss: Tensor | None) -> Any:
    """Return a `FusedCausalLMOutput`, the model output that TRL's losses read.

    Args:
        stats: Statistics of the 2 B responses, (2 B, L - 1) each, chosen responses first. TRL only logs `entropy` and
            `mean_logit`, so they are detached.
        mask: Tokens that TRL's loss reads, (2 B, L - 1). The log-probabilities of all others are set to 0, since TRL
            1.16 sums log-probabilities without applying the mask.
        aux_loss: Load-balancing loss of a mixture of experts, a scalar; None for other models.
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
    """Run the forward of a deep copy of a model on which TRL had installed its head.

    TRL's `add_fused_lm_head` replaces the forward of a model by a function that is bound to this model. With
    `fused_lm_head=True` the function works for a copy too, which is passed as its `self`. Otherwise it would call the
    forward of the first model, so the forward of the class is called instead.

    Args:
        wrapped: The forward that TRL has bound to the first model.
        model: The copy.
        *args: The arguments of the call.
        **kwargs: The keyword arguments of the call.

    Returns:
        The output of the copy.
    """
    if kwargs.pop("fused_lm_head", False):
        return wrapped.__func__(model, *args, fused_lm_head=True, **kwargs)
    return type(model).forward(model, *args, **kwargs)


@contextmanager
def hide_padding_free(args: DPOConfig) -> Iterator[None]:
    """Set `padding_free` to None while TRL's constructor runs, since TRL would warn that it ignores the option."""
    padding_free = args.padding_free
    args.padding_free = None
    try:
        yield
    finally:
        args.padding_free = padding_free


@dataclass(frozen=True)
class TrainerCard:
    """The values that TRL writes into a trainer's model card: `_name`, `_paper` and `_tag_names` of the class."""

    title: str
    paper: dict[str, str]
    tags: list[str]


def read_dpo_card() -> TrainerCard:
    """Return the values that `DPOTrainer` itself writes into a model card."""
    return TrainerCard(title=str(DPOTrainer._name), paper=dict(DPOTrainer._paper), tags=list(DPOTrainer._tag_names))


class TRLPairTrainer(DPOTrainer):  # type: ignore[misc]
    """`DPOTrainer` with a public hook for each private method that we override.

    Subclasses override the hooks `compute_pair_loss`, `prepare_pairs`, `prepare_collator`, `extend_reference_key` and
    `notice_inputs`. By default, the hooks do what TRL does.

    Attributes:
        extra_columns: Columns of the dataset that reach the collator in addition to those that TRL keeps.
    """

    extra_columns: Sequence[str] = ()

    def __init__(self, model: Any, ref_model: Any = None, args: Any = None, *more: Any, **kwargs: Any) -> None:
        if args is not None:
            check_head_device(__version__, runs_triton=runs_triton_kernels(args.device))
        super().__init__(model, ref_model, args, *more, **kwargs)

    # ---- data

    def prepare_pairs(self, dataset: Any, processing_class: Any, args: Any, name: str) -> Any:
        """Prepare a dataset of pairs. This replaces TRL's `_prepare_dataset`, which TRL calls in its constructor.

        TRL renders and tokenizes the pairs into `prompt_ids`, `chosen_ids` and `rejected_ids`, and keeps all other
        columns. If `max_length` is set, it silently drops pairs whose prompt is too long.
        """
        return super()._prepare_dataset(dataset, processing_class, args, name)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        return self.prepare_pairs(dataset, processing_class, args, dataset_name)

    def _set_signature_columns_if_needed(self) -> None:
        """Add `extra_columns` to `_signature_columns`. TRL removes all other columns from the dataset."""
        super()._set_signature_columns_if_needed()
        columns: list[str] = list(vars(self)["_signature_columns"])
        for column in self.extra_columns:
            if column not in columns:
                columns.append(column)
        self._signature_columns = columns

    def prepare_collator(self, dataset: Any) -> None:
        """Adapt `self.data_collator` to a dataset. Called before TRL makes a data loader for the dataset."""

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        self.prepare_collator(dataset)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def notice_inputs(self, inputs: dict[str, Any]) -> None:
        """Inspect a batch that has just been moved to the device."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        self.notice_inputs(prepared)
        return prepared

    # ---- the reference

    def extend_reference_key(self, model_hash: Any) -> Any:
        """Return the key by which, with the dataset's fingerprint, reference log-probabilities are cached."""
        return model_hash

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """Precompute reference log-probabilities and cache them by our key.

        TRL's own key consists only of the dataset's fingerprint and `_precompute_model_hash`. TRL calls this method in
        its constructor, and computes the log-probabilities with `compute_ref_log_probs`.
        """
        self.prepare_collator(dataset)
        model_hash = vars(self)["_precompute_model_hash"]
        self._precompute_model_hash: Any = self.extend_reference_key(model_hash)
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            self._precompute_model_hash = model_hash

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint, including the trained adapter.

        If the policy has an adapter at the start, TRL stores a copy of it as the reference, in the folder `ref` of the
        checkpoint. If there is such a folder, Transformers loads only the adapters in folders, and not the trained
        adapter, which is at the top of the checkpoint. It is therefore loaded here.
        """
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        has_reference_folder = (Path(resume_from_checkpoint) / "ref").is_dir()
        has_reference_adapter = "ref" in getattr(self.model, "peft_config", {})
        if has_reference_folder and has_reference_adapter and not self.is_fsdp_enabled:
            self.model.load_adapter(resume_from_checkpoint, self.model.active_adapters[0], is_trainable=True)

    # ---- the loss

    def compute_pair_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute the loss of a batch, by default TRL's."""
        return self.compute_trl_loss(model, inputs, return_outputs)

    def compute_trl_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        """Compute TRL's own loss of a batch.

        TRL calls `model(**kwargs, labels=labels, fused_lm_head=True)` once and does not use `model` otherwise. Any
        callable that returns a `FusedCausalLMOutput` can therefore replace it. With `return_outputs`, a second call
        without labels asks for full logits. TRL passes unknown entries of a batch to the model.
        """
        return super()._compute_loss(model, inputs, return_outputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        return self.compute_pair_loss(model, inputs, return_outputs)

    @contextmanager
    def read_references_from_batch(self) -> Iterator[None]:
        """Let TRL's loss read `ref_chosen_logps` and `ref_rejected_logps` from the batch, as if they were precomputed.

        It does so if `precompute_ref_logps` is True, an attribute that TRL reads at every step.
        """
        precomputed: bool = self.precompute_ref_logps
        self.precompute_ref_logps: bool = True
        try:
            yield
        finally:
            self.precompute_ref_logps = precomputed

    @contextmanager
    def take_out_loss(self, loss_type: str) -> Iterator[float]:
        """Remove a loss type from TRL's sum and yield its weight, or 0 if it is not part of the sum.

        TRL reads the lists `loss_types` and `loss_weights` at every step.
        """
        all_types = self.loss_types
        all_weights = self.loss_weights
        kept_types = []
        kept_weights = []
        removed_weight = 0.0
        for other_type, weight in zip(all_types, all_weights, strict=True):
            if other_type == loss_type:
                removed_weight += weight
            else:
                kept_types.append(other_type)
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
        """Whether TRL's loss weights pairs by `log_sum_sq_probs` (WPO), which is its attribute `use_weighting`."""
        return bool(self.use_weighting)

    # ---- logs and the model card

    def append_metrics(self, mode: str, name: str, values: Sequence[float | Tensor]) -> None:
        """Add values of this batch to those that TRL averages for the next log.

        `_metrics[mode]` is a `defaultdict(list)` for each of the modes `train` and `eval`.
        """
        self._metrics[mode][name].extend(values)

    def read_metrics(self) -> dict[str, list[Any]]:
        """Return the values that TRL averages for the next log. Changes to the returned dictionary are logged."""
        mode = "eval"
        if self.model.training:
            mode = "train"
        metrics: dict[str, list[Any]] = self._metrics[mode]
        return metrics

    def set_card(self, card: TrainerCard) -> None:
        """Set the values that TRL writes into the model card. Instance attributes override those of the class."""
        self._name = card.title
        self._paper = card.paper
        self._tag_names = card.tags
