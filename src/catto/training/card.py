"""What a model card says of preference training: the objective with its weight, what to cite, what was measured."""

from __future__ import annotations

import textwrap

from trl import DPOTrainer

from catto.training.config import CATTOConfig

_CATTO = textwrap.dedent("""\
    @article{parikh2026catto,
        title  = {{CATTO: Balancing Preferences and Confidence in Language Models}},
        author = {Nisarg Parikh and Ananya Sai and Pannaga Shivaswamy and Kunjal Panchal and Andrew Lan},
        year   = 2026
    }""")


def method_title(config: CATTOConfig) -> str:
    """Name the objective: TRL's own name without a term, else the term and its weight."""
    if not config.weight:
        return str(DPOTrainer._name)
    score = f", {config.outcome_score} score" if config.calibration == "outcome" else ""
    return f"{DPOTrainer._name} and the `{config.calibration}` calibration term (weight {config.weight:g}{score})"


def paper(config: CATTOConfig) -> dict[str, str]:
    """What to cite: DPO's paper, and CATTO's where the term is its own or reads its surrogate of correctness."""
    dpo = dict(DPOTrainer._paper)
    if not config.weight:
        return dpo
    citations = [dpo["citation"]] if config.calibration in ("outcome", "replay") else [dpo["citation"], _CATTO]
    return {"citation": "\n\n".join(citation.strip() for citation in citations)}  # no id: the card would link one paper


def tags(config: CATTOConfig) -> list[str]:
    """TRL's tags, and ours where there is a term."""
    if not config.weight:
        return list(DPOTrainer._tag_names)
    own = ["calibration"] if config.calibration in ("outcome", "replay") else ["catto", "calibration"]
    return [*DPOTrainer._tag_names, *own]


def calibration_section(entry: dict[str, float], questions: int) -> str:
    """A table of what `evaluate` measured last."""
    names = {
        "eval_val_accuracy": "Accuracy",
        "eval_val_ece": "ECE (20 bins)",
        "eval_val_brier": "Brier score",
        "eval_val_nll": "NLL of the gold label",
    }
    rows = "\n".join(f"| {title} | {entry[name]:.4f} |" for name, title in names.items() if name in entry)
    told = f"On {questions} held-out questions, at step {int(entry.get('step', 0))}."
    return f"\n## Calibration\n\n{told}\n\n| Metric | Value |\n|---|---|\n{rows}\n"
