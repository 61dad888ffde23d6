"""Questions to responses to SFT, preference and outcome rows; a run that is killed at any moment resumes."""

from __future__ import annotations

from catto.teacher.pairing import AnsweredQuestion, Yield, grouped, outcome_rows, preference_rows, sft_rows
from catto.teacher.responses import Estimate, ask, dry_run, teach, write_rows
from catto.teacher.sources import LabelTeacher, StoredResponses, WitnessTeacher, open_source

__all__ = [
    "AnsweredQuestion",
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
