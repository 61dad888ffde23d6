"""The stage that reads responses and turns the suitable ones into training rows."""

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
    """Settings for turning responses into rows."""

    asked: ResponseSettings
    kinds: tuple[Kind, ...]
    parser: int  # version of the answer parser
    grading: int | None = None  # version of the grading; None if answers are labels

    def key_fields(self) -> dict[str, Any]:
        """Return the fields of the key, with the settings that choose rows from responses.

        Rows of the kinds `outcome` and `stream` are made from all responses, so these settings play no role for them.
        """
        uses_all_responses = self.kinds in (("outcome",), ("stream",))
        picked = None if uses_all_responses else self.asked.sampling.row_settings()
        return {**super().key_fields(), "picked": picked}


def run_rows(work: Work[RowSettings]) -> None:
    """Read responses and write the rows of every kind."""
    asked = work.settings.asked
    kinds = work.settings.kinds
    questions = select_questions(work, asked)
    responses = work.input("responses") / GENERATIONS
    summary = write_rows(questions, asked.sampling, responses, work.out, kinds)
    if "preferences" in kinds:  # these are the teacher's rows: `catto teach` prints the summary
        write_json(work.out / "yield.json", summary.model_dump(mode="json"))
