"""The text about the calibration term in the model card."""

from __future__ import annotations

import textwrap

from catto.training.config import CATTOConfig
from catto.training.trl_compat import TrainerCard, read_dpo_card

# Logged metric -> its name in the model card.
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
    """Return title, citations and tags for the model card. If the calibration term has weight 0, they are TRL's own.

    CATTO's paper is cited if the term is the paper's or reads the paper's surrogate of correctness.
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
    # No paper id is given, since it would make the card link to only one of the two papers.
    return TrainerCard(title=title, paper={"citation": citation}, tags=[*tags, "calibration"])
