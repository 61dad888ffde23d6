"""Turn a row into a question without options, which is answered by a short text or a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from catto.answer.grading import find_answer_key, normalize_answer
from catto.errors import parse_json
from catto.records import Grade
from catto.tasks.fields import Raw, fill_template, get_field, template_fields
from catto.tasks.splits import Draft

# GSM8K puts this between a solution and its answer.
SOLUTION_END = "####"
MAX_ACCEPTED = 1000  # accepted answers per question
MAX_ANSWER = 1000  # characters per accepted answer


@dataclass(frozen=True)
class AnswerMap:
    r"""Which field of a row is which, for questions without options; a nested field is written `outer.inner`.

    Attributes:
        question: One field; a template such as "{passage}\n{question}"; or several fields by the names that a prompt
            shows.
        answer: The field with the accepted answer or a list of accepted answers. Only the text after the last `####`
            counts.
        grade: How answers are compared; None means `any-of` for a list and `exact` otherwise.
        tolerance: For the grade `number`: the largest accepted difference, relative to the accepted value.
        id: The field with the question's id.
        group: The field with the name of a row's group; all rows of a group go to the same split.

    >>> row = {"question": "2 + 2?", "answer": "2 + 2 is 4. #### 4"}
    >>> AnswerMap("question", "answer", grade="number").parse_row(row).accepted
    ('4',)
    """

    question: str | Mapping[str, str]
    answer: str
    grade: Grade | None = None
    tolerance: float = 0.0
    id: str | None = None
    group: str | None = None

    @cached_property
    def top_level_fields(self) -> frozenset[str]:
        """The fields of a row that the map reads; for a nested field, the outermost one."""
        names: list[str | None] = [self.answer, self.id, self.group]
        for template in self._question_templates().values():
            names.extend(template_fields(template))
        return frozenset(name.split(".")[0] for name in names if name is not None)

    def _question_templates(self) -> Mapping[str, str]:
        """Return the templates for the parts of the question, by the names that a prompt shows."""
        if isinstance(self.question, str):
            return {"question": self.question}
        return self.question

    def parse_row(self, raw: Raw) -> Draft | str:
        """Turn a row into a draft.

        The return type is that of every row parser, but this one never returns a reason to leave a row out.

        Raises:
            ValueError: A field is missing, the question is empty, or an answer cannot be used.
        """
        templates = self._question_templates()
        fields = {name: fill_template(template, raw) for name, template in templates.items()}
        is_empty = not any(value.strip() for value in fields.values())
        if is_empty:
            raise ValueError(f"{' and '.join(templates.values())} is empty")
        value = self._read_value(raw)
        grade = self.grade
        if grade is None:
            grade = "any-of" if isinstance(value, list) else "exact"
        return Draft(
            fields=fields,
            options=(),
            gold=0,  # not used without options
            id=None if self.id is None else str(get_field(raw, self.id)),
            group=None if self.group is None else str(get_field(raw, self.group)),
            accepted=self._read_accepted(value, grade),
            grade=grade,
            tolerance=self.tolerance,
        )

    def _read_value(self, raw: Raw) -> object:
        """Return the value of the answer field; a text that is a JSON list, as in a cell of a table, is parsed."""
        value = get_field(raw, self.answer)
        if isinstance(value, str) and value.startswith("["):
            try:
                return parse_json(value)
            except ValueError:
                return value  # not a list: an answer may begin with a bracket
        return value

    def _read_accepted(self, value: object, grade: Grade) -> tuple[str, ...]:
        """Return the accepted answers without duplicates; ValueError if one of them cannot be used."""
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError(f"{self.answer}: the list of answers is empty")
        if len(values) > MAX_ACCEPTED:
            raise ValueError(f"{self.answer}: {len(values):,} answers, at most {MAX_ACCEPTED:,} are accepted")
        accepted = []
        for item in values:
            text = self._read_answer(item)
            if grade == "number" and find_answer_key(text, grade) is None:
                raise ValueError(f"{self.answer} {text!r}: expected one number")
            if text not in accepted:
                accepted.append(text)
        return tuple(accepted)

    def _read_answer(self, value: object) -> str:
        """Return one accepted answer as text: what follows the last `####`, or all of it if there is none.

        Raises:
            ValueError: The value is neither a text nor a number, or the answer is too long or has no visible character.
        """
        is_nan = value != value  # only NaN differs from itself
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and not is_nan  # True is an int
        if not is_number and not isinstance(value, str):
            kind = "nan" if is_nan else type(value).__name__
            hint = ""
            if isinstance(value, dict):
                first_field = next(iter(value), "value")
                hint = f": name a field inside it, such as {self.answer}.{first_field}"
            raise ValueError(f"{self.answer}: expected a text, a number or a list of these, got {kind}{hint}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a table may hold 2 as 2.0
        text = str(value).rpartition(SOLUTION_END)[2].strip()
        if not text or not normalize_answer(text):
            raise ValueError(f"{self.answer}: the answer is empty")
        if len(text) > MAX_ANSWER:
            raise ValueError(f"{self.answer}: {len(text):,} characters, but a short answer has at most {MAX_ANSWER:,}")
        return text
