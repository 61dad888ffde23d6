"""Read a short answer or a number from a response to a question without options, and compare answers.

The answer is the content of the last `<answer>`, as for labels. Without that tag, it is the last line, if that is the
only line after the reasoning or states the answer ("The answer is 12", "#### 12"). Any other response has no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from catto.answer.forms import LEAD, fold_text
from catto.answer.grading import find_answer_key, grade_answer
from catto.answer.response import Source, find_answer_tag, find_answer_text, find_body, find_tags, find_turn_end
from catto.records import Grade, Question

MAX_ANSWER = 300  # maximum number of characters in a short answer
HASHES = "####"  # opens the final answer in GSM8K's solutions

# Whether two answers to one question mean the same.
Equivalent = Callable[[str, str], bool]


class ShortAnswer(NamedTuple):
    """The answer of a response to a question without options.

    Attributes:
        text: The answer as it is written; None if there is none.
        key: A text that is the same for all answers that are equal after normalisation; None without an answer.
        source: `free` for an answer in `<answer>`, `plain` for one without that tag; None without an answer.
    """

    text: str | None
    key: str | None
    source: Source | None


NO_SHORT_ANSWER = ShortAnswer(text=None, key=None, source=None)


def read_short_answer(text: str, grade: Grade = "exact", *, cut: bool = False) -> ShortAnswer:
    """Read the answer of a response to a question without options.

    Args:
        text: The response.
        grade: How answers to the question are compared: `exact`, `any-of` or `number`.
        cut: Whether the response reached its token limit. An answer without `<answer>` is then not read. Nor is one
            without `</answer>` if its last line is unfinished.

    Returns:
        The text of the answer, and a key that is the same for all equal answers. `NO_SHORT_ANSWER` if there is none, if
        it has more than 300 characters or, with the grade `number`, if it is not a single number.

    Example:
        >>> read_short_answer("<think>2 + 2</think><answer>$4.00</answer>", "number")
        ShortAnswer(text='$4.00', key='4', source='free')
        >>> read_short_answer("Two and two.\\nThe answer is 4.", "number")
        ShortAnswer(text='The answer is 4.', key='4', source='plain')
    """
    turn = text[: find_turn_end(text)]
    has_tag = find_answer_tag(turn, find_tags(turn)) is not None
    if has_tag:
        answer = find_answer_text(text, cut=cut)
    elif cut:
        answer = None
    else:
        answer = _find_plain_answer(turn)
    if answer is None or len(answer) > MAX_ANSWER:
        return NO_SHORT_ANSWER
    key = find_answer_key(answer, grade)
    if key is None:
        return NO_SHORT_ANSWER
    return ShortAnswer(answer, key, "free" if has_tag else "plain")


def _find_plain_answer(turn: str) -> str | None:
    """Find the answer of a response without `<answer>`: its last line.

    None unless that line is the only one after the reasoning or states the answer. None as well if the reasoning never
    ends, or if there is a tag after it, such as a lone `</answer>`.
    """
    tags = find_tags(turn)
    start, end = find_body(turn, tags)
    is_reasoning_unfinished = end < len(turn)  # the body ends early only at a `<think>` that is never closed
    has_other_tag = any(start <= tag.start < end for tag in tags)
    if is_reasoning_unfinished or has_other_tag:
        return None
    lines = [line.strip() for line in turn[start:end].splitlines() if line.strip()]
    if not lines:
        return None
    last = lines[-1]
    if last.startswith(HASHES):
        return last.removeprefix(HASHES).strip() or None
    lead = LEAD.match(fold_text(last).text)
    states_answer = lead is not None and lead["states_answer"] is not None
    if len(lines) == 1 or states_answer:
        return last
    return None


def is_right_answer(answer: str, question: Question) -> bool:
    """Return whether an answer is among the accepted answers of a question, or equals the gold label if it has labels.

    Example:
        >>> accepted = {"gold": "Ada", "accepted": ("Ada",), "grade": "exact"}
        >>> question = Question(id="1", task="names", split="test", fields={"question": "Who?"}, **accepted)
        >>> is_right_answer("ada.", question)
        True
    """
    if question.accepted is None:
        return answer == question.gold
    grade = question.grade or "exact"
    return grade_answer(answer, question.accepted, grade=grade, tolerance=question.tolerance)


def merge_equivalent(answers: Sequence[str | None], equivalent: Equivalent) -> list[str | None]:
    """Replace each answer by the first one that means the same; None stays None.

    Answers that mean the same form a group. Each answer is compared with the first answer of every group so far, in
    order. It joins the group of the first one that means the same, or else begins a new group. `equivalent` is not
    called for an answer that equals the first answer of a group.

    Args:
        answers: The answers to one question, in the order of the samples; None for a sample without an answer.
        equivalent: Called with the first answer of a group and a later answer; returns whether they mean the same.

    Returns:
        For each answer, the first answer of its group.

    Example:
        >>> merge_equivalent(["nyc", "boston", None, "new york city"], lambda a, b: {a, b} == {"nyc", "new york city"})
        ['nyc', 'boston', None, 'nyc']
    """
    first_answers: list[str] = []  # of every group
    merged: list[str | None] = []
    for answer in answers:
        if answer is None:
            merged.append(None)
            continue
        first = _find_equivalent(answer, first_answers, equivalent)
        if first is None:
            first = answer
            first_answers.append(answer)
        merged.append(first)
    return merged


def _find_equivalent(answer: str, first_answers: Sequence[str], equivalent: Equivalent) -> str | None:
    if answer in first_answers:
        return answer
    for first in first_answers:
        if equivalent(first, answer):
            return first
    return None


def measure_agreement(answers: Sequence[str | None]) -> list[float]:
    """Return the agreement of each answer with all answers: (s + 1) / (k + 2) if s of the k answers equal it.

    The answer itself is one of the s. The value is the posterior mean of a success rate after s successes in k trials,
    under a uniform prior (Laplace).

    Args:
        answers: The k sampled answers to one question; None for a sample without an answer. Such a sample has agreement
            0 and counts in k.

    Returns:
        k numbers in [0, 1), in the order of the answers.

    Example:
        >>> measure_agreement(["4", "4", "5", None])
        [0.5, 0.5, 0.3333333333333333, 0.0]
    """
    agreement = []
    for answer in answers:
        if answer is None:
            agreement.append(0.0)
        else:
            equal = answers.count(answer)
            agreement.append((equal + 1) / (len(answers) + 2))
    return agreement
