"""Questions -> responses -> SFT, preference and outcome rows; a run killed at any moment goes on where it was."""

from __future__ import annotations

from catto.teacher.collect import dry_run, teach
from catto.teacher.rows import Answered, grouped, outcome_rows, preference_rows, sft_rows
from catto.teacher.sources import LabelTeacher, StoredResponses, WitnessTeacher, open_source
from catto.teacher.summary import Estimate, Yield

__all__ = [
    "Answered",
    "Estimate",
    "LabelTeacher",
    "StoredResponses",
    "WitnessTeacher",
    "Yield",
    "dry_run",
    "grouped",
    "open_source",
    "outcome_rows",
    "preference_rows",
    "sft_rows",
    "teach",
]
