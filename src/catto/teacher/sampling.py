"""How responses are sampled from a trained model, and the settings that `ask` and `write_rows` accept."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from catto.recipe.settings import ROW_FIELDS, ResponseFields, Settings, TeacherSettings


class ModelSampling(Settings):
    """How responses of a trained model are sampled, and how rows are chosen from them.

    The model itself is passed to `ask` as an engine. The class variables are settings of a teacher that `ask` also
    reads; they have the same value for every trained model.
    """

    source: ClassVar[None] = None
    model: ClassVar[None] = None  # the engine has the model's name
    max_refused: ClassVar[float] = 0.2  # the default of `TeacherSettings`

    n: int = Field(ge=1)
    temperature: tuple[float, float]  # lowest and highest; each response draws its own
    max_tokens: int = Field(ge=1)
    reasoning: bool
    seed: int

    pairs_per_question: int = Field(default=1, ge=1)
    min_correct: int = Field(default=1, ge=1)
    min_wrong: int = Field(default=3, ge=1)

    def response_settings(self) -> dict[str, Any]:
        """Return the settings that determine a response: all except `ROW_FIELDS`."""
        return self._with_empty_source(exclude=ROW_FIELDS)

    def row_settings(self) -> dict[str, Any]:
        """Return the settings that determine the rows."""
        return self._with_empty_source()

    def _with_empty_source(self, exclude: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return the settings, with the constant fields of a teacher that has no source.

        In earlier runs, a sampled model was such a teacher. The fields keep their stage keys and manifests valid.
        """
        empty_source = {
            "source": None,
            "model": None,
            "extra_body": {},
            "responses": None,
            "fields": ResponseFields().model_dump(mode="json"),
        }
        return {**empty_source, **self.model_dump(mode="json", exclude=set(exclude))}


# How responses are sampled, from a teacher or from a trained model, and how rows are chosen from them.
AskSettings = TeacherSettings | ModelSampling
