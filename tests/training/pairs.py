"""Ragged preference rows over the tiny vocabulary, and trainers on a tiny model, for tests of training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer

from catto.records import Message, PreferenceRow, SftRow

KEYWORDS = ("peft_config", "outcome_examples", "callbacks", "data_collator")  # of the trainer; the rest configures it
LABELS = ("A", "B", "C", "D")
WORDS = ("the", "witness", "says", "true", "false", "not", "and", "right", "wrong", "option", "because", "it", "is")


def _text(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(low, high)))


def _completion(draw: random.Random, label: str) -> tuple[Message, ...]:
    text = f"<think>\n{_text(draw, 1, 7)}\n</think>\n<answer>\n{label}\n</answer>"
    return (Message(role="assistant", content=text),)


def preference_rows(n: int = 16, seed: int = 0) -> list[PreferenceRow]:
    draw = random.Random(seed)
    rows = []
    for number in range(n):
        gold, wrong = draw.sample(LABELS, 2)
        rows.append(
            PreferenceRow(
                prompt=(Message(role="user", content=f"question {_text(draw, 2, 12)}"),),
                chosen=_completion(draw, gold),
                rejected=_completion(draw, wrong),
                question=f"q{number}",
                task="tiny",
                labels=LABELS,
                gold=gold,
                chosen_label=gold,
                rejected_label=wrong,
                correctness_rate=draw.choice([0.2, 0.5, 0.7]),
            )
        )
    return rows


def sft_rows(n: int = 16, seed: int = 1) -> list[SftRow]:
    draw = random.Random(seed)
    rows = []
    for number in range(n):
        gold, label = draw.choice(LABELS), draw.choice(LABELS)
        rows.append(
            SftRow(
                prompt=(Message(role="user", content=f"question {_text(draw, 2, 12)}"),),
                completion=_completion(draw, label),
                question=f"s{number}",
                task="tiny",
                labels=LABELS,
                gold=gold,
                label=label,
                correctness_rate=0.5,
            )
        )
    return rows


def dataset(rows: list[PreferenceRow]) -> Dataset:
    return Dataset.from_list([row.model_dump(mode="json") for row in rows])


def trainer(kind: Any, config: Any, folder: Path, *, model: Any = None, rows: Any = None, **options: Any) -> Any:
    """A trainer of TRL's or ours on the same model, data and order."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 3,
    }
    keywords = {name: options.pop(name) for name in KEYWORDS if name in options}
    model = tiny_model() if model is None else model
    # A reference that differs from the policy, so that its log-probabilities matter.
    reference = None if "peft_config" in keywords else options.pop("ref_model", None) or tiny_model(seed=1)
    return kind(
        model=model,
        ref_model=reference,
        args=config(**{**settings, **options}),
        train_dataset=dataset(preference_rows()) if rows is None else rows,
        processing_class=tiny_tokenizer(),
        **keywords,
    )
