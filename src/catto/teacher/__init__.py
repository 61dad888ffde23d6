"""Questions -> responses -> SFT, preference and outcome rows; a run killed at any moment goes on where it was."""

from __future__ import annotations

from catto.teacher.pairing import Answered, Estimate, Yield, grouped, outcome_rows, preference_rows, sft_rows
from catto.teacher.responses import ask, dry_run, teach, write_rows
from catto.teacher.sources import LabelTeacher, StoredResponses, WitnessTeacher, open_source

__all__ = [
    "Answered",
    "Estimate",
    "LabelTeacher",
    "StoredResponses",
    "WitnessTeacher",
    "Yield",
    "ask",
    "dry_run",
    "grouped",
    "open_source",
    "outcome_rows",
    "preference_rows",
    "sft_rows",
    "teach",
    "write_rows",
]
