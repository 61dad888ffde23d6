"""The stages of the held-out preference accuracy: one scores pairs under a model, one compares two models' scores."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from catto.io.record_files import read_records, write_records
from catto.pipeline.stage import StageSettings, Work, write_json
from catto.records import PairLogprobs, PreferenceRow

LOGPROBS = "pair_logprobs.jsonl"
MARGINS = "margins.jsonl"
ACCURACY = "preference_accuracy.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairSettings(StageSettings):
    """Settings for scoring preference pairs under a model."""

    context: int  # pairs with more tokens are left out, as in training
    batch_size: int = field(compare=False)  # not in the key: it changes no more than float noise
    attention: str | None = field(compare=False)


def run_pair_logprobs(work: Work[PairSettings]) -> None:
    """Store the log-probabilities of both responses of every held-out pair under a model."""
    rows = list(read_records(work.input("pairs") / "preferences.jsonl", PreferenceRow))
    scored: list[PairLogprobs] = []
    if rows:  # otherwise no model is loaded
        scored = _score_pairs(work, rows)
    write_records(work.out / LOGPROBS, scored)


def _score_pairs(work: Work[PairSettings], rows: list[PreferenceRow]) -> list[PairLogprobs]:
    """Load the model and return the log-probabilities of the pairs, without pairs of more than `context` tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from catto.training.pair_logprobs import pair_logprobs, tokenize_pairs

    settings = work.settings
    model_path = work.model()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    pad_id = tokenizer.pad_token_id
    if pad_id is None:  # any token will do: no other token attends to padding, and it is not scored
        pad_id = tokenizer.eos_token_id
    pairs = tokenize_pairs(tokenizer, rows, settings.context)
    dropped = len(rows) - len(pairs)
    if dropped:
        message = "left out %d of %d pairs because they have more than %d tokens"
        logger.warning(message, dropped, len(rows), settings.context)
    # Always float32: the difference between two similar models can be smaller than the rounding of bfloat16 weights.
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation=settings.attention
    )
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return pair_logprobs(
        model.to(device),
        pairs,
        pad_id,
        batch_size=settings.batch_size,
        progress=lambda done, total: work.progress(done, total, "pairs"),
    )


def run_preference_accuracy(work: Work) -> None:
    """Store the reward margin of every pair, and the preference accuracy and mean margin of all pairs.

    The stage needs the log-probabilities of the same pairs under the model (`policy`) and its reference (`start`).
    """
    from catto.metrics.preference import margins_of, preference_accuracy, reward_margins

    policy = list(read_records(work.input("policy") / LOGPROBS, PairLogprobs))
    reference = list(read_records(work.input("start") / LOGPROBS, PairLogprobs))
    pairs = reward_margins(policy, reference)
    write_records(work.out / MARGINS, pairs)
    summary: dict[str, Any] = {"n": len(pairs)}
    for part in ("whole", "reasoning"):  # of the responses
        margins = margins_of(pairs, part)
        accuracy = None
        mean_margin = None
        if margins:
            accuracy = preference_accuracy(margins)
            mean_margin = fmean(margins)
        summary[part] = {"accuracy": accuracy, "mean_margin": mean_margin}
    write_json(work.out / ACCURACY, summary)
