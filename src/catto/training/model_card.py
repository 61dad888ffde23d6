"""What the model card says about the calibration term."""

from __future__ import annotations

import textwrap

from catto.training.config import CATTOConfig
from catto.training.trl_compat import (
    TrainerCard,
    read_dpo_card,
)

MEASURED = {
    "eval_val_accuracy": "Accuracy",
    "eval_val_ece": "ECE (20 bins)",
    "eval_val_brier": "Brier score",
    "eval_val_nll": "NLL of the gold label",
}


CITATION = textwrap.dedent("""\
    @article{parikh2026catto,
        title  = {{CATTO: Balancing Preferences and Confidence in Language Models}},
        author = {Nisarg Parikh and Ananya Sai and Pannaga Shivaswamy and Kunjal Panchal and Andrew Lan},
        year   = 2026
    }""")


def describe_objective(config: CATTOConfig) -> TrainerCard:
    """Return title, citations and tags for the model card: TRL's own if there is no term.

    CATTO's paper is cited where the term is its own or reads its surrogate of correctness.
    """
    card = read_dpo_card()
    if not config.weight:
        return card
    details = f"weight {config.weight:g}"
    if config.calibration == "outcome":
        details += f", {config.outcome_score} score"
    title = f"{card.title} and the `{config.calibration}` calibration term ({details})"
    citation = card.paper["citation"].strip()
    tags = list(card.tags)
    if config.calibration not in ("outcome", "replay"):
        citation = f"{citation}\n\n{CITATION}"
        tags.append("catto")
    # No paper id: the card would link one paper only.
    return TrainerCard(title=title, paper={"citation": citation}, tags=[*tags, "calibration"])
