"""The stage of rows: responses are read, and those that serve become training rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from catto.pipeline.kinds.responses import ResponseSettings, select_questions
from catto.pipeline.stage import StageSettings, Work, write_json
from catto.teacher import write_rows
from catto.teacher.pairing import Kind
from catto.teacher.responses import GENERATIONS


@dataclass(frozen=True)
class RowSettings(StageSettings):
    """Rows from responses. Of the kinds `outcome` and `stream` none is picked, so how others are does not count."""

    asked: ResponseSettings
    kinds: tuple[Kind, ...]
    parser: int
    grading: int | None = None  # the version of the grading; None where answers are labels

    def key_fields(self) -> dict[str, Any]:
        """Add how rows are picked."""
        unpicked = self.kinds in (("outcome",), ("stream",))
        picked = None if unpicked else self.asked.sampling.row_settings()
        return {**super().key_fields(), "picked": picked}


def run_rows(work: Work[RowSettings]) -> None:
    """Read responses and write their rows."""
    asked = work.settings.asked
    kinds = work.settings.kinds
    questions = select_questions(work, asked)
    responses = work.input("responses") / GENERATIONS
    summary = write_rows(questions, asked.sampling, responses, work.out, kinds)
    if "preferences" in kinds:  # the teacher's, which `catto teach` prints
        write_json(work.out / "yield.json", summary.model_dump(mode="json"))
