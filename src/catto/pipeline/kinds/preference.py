"""The stages of the held-out preference accuracy: pairs scored under a model, and two such scores compared."""

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
    """The log-probabilities of preference pairs under a model."""

    context: int  # pairs with more tokens are left out, as in training
    batch_size: int = field(compare=False)  # it changes float noise at most
    attention: str | None = field(compare=False)


def run_pair_logprobs(work: Work[PairSettings]) -> None:
    """Score the responses of held-out pairs under a model.

    The weights are float32 whatever the recipe's dtype: rounding them would order pairs between two similar models.
    """
    rows = list(read_records(work.input("pairs") / "preferences.jsonl", PreferenceRow))
    scored: list[PairLogprobs] = []
    if rows:
        scored = _score_rows(work, rows)
    write_records(work.out / LOGPROBS, scored)


def _score_rows(work: Work[PairSettings], rows: list[PreferenceRow]) -> list[PairLogprobs]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from catto.training.pair_logprobs import pair_logprobs, tokenize_pairs

    settings = work.settings
    path = work.model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = tokenizer.eos_token_id
    pairs = tokenize_pairs(tokenizer, rows, settings.context)
    dropped = len(rows) - len(pairs)
    if dropped:
        logger.warning("left out %d of %d pairs longer than %d tokens", dropped, len(rows), settings.context)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=settings.attention)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return pair_logprobs(
        model.to(device),
        pairs,
        pad,
        batch_size=settings.batch_size,
        progress=lambda done, total: work.progress(done, total, "pairs"),
    )


def run_preference_accuracy(work: Work) -> None:
    """Compare how a model and its start score the same pairs; store every margin and their summary."""
    from catto.metrics.preference import margins_of, preference_accuracy, reward_margins

    policy = list(read_records(work.input("policy") / LOGPROBS, PairLogprobs))
    start = list(read_records(work.input("start") / LOGPROBS, PairLogprobs))
    pairs = reward_margins(policy, start)
    write_records(work.out / MARGINS, pairs)
    summary: dict[str, Any] = {"n": len(pairs)}
    for part in ("whole", "reasoning"):
        margins = margins_of(pairs, part)
        accuracy = preference_accuracy(margins) if margins else None
        mean = fmean(margins) if margins else None
        summary[part] = {"accuracy": accuracy, "mean_margin": mean}
    write_json(work.out / ACCURACY, summary)
