"""inspect_ai: the metrics `catto/ece`, `catto/brier` and `catto/auroc`, and the scorer `choice_with_confidence`.

inspect_ai finds this module through the entry point `catto` in the group `inspect_ai`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from inspect_ai.scorer import (
    Metric,
    SampleScore,
    Score,
    Scorer,
    Target,
    accuracy,
    choice,
    metric,
    scorer,
    stderr,
    value_to_float,
)
from inspect_ai.solver import TaskState

from catto.formats.inspect_ai import letter_of, read_reply_tokens
from catto.metrics.binning import Bools, Floats
from catto.metrics.errors import brier, ece
from catto.metrics.ranking import auroc

# ---- metrics


class InspectAnswers(NamedTuple):
    """The answers of an evaluation.

    Attributes:
        confidence: (N,) in [0, 1].
        correct: (N,) booleans.
    """

    confidence: Floats
    correct: Bools


def read_scores(scores: Sequence[SampleScore]) -> InspectAnswers:
    """Read the confidence of each answer from the metadata of its score, and its correctness from the value.

    Args:
        scores: Scores with `confidence` in their metadata, such as those of `choice_with_confidence`.

    Returns:
        The answers, in the order of the scores.

    Raises:
        ValueError: A score has no confidence, or its value means neither right nor wrong.
    """
    to_float = value_to_float()  # inspect_ai's conversion: "C" is 1.0 and "I" is 0.0
    confidence = []
    correct = []
    for item in scores:
        stored_confidence = (item.score.metadata or {}).get("confidence")
        if stored_confidence is None:
            raise ValueError(
                f"sample {item.sample_id}: its score has no metadata.confidence; "
                "use the scorer catto/choice_with_confidence, or store a confidence there"
            )
        value = to_float(item.score.value)
        if value not in (0.0, 1.0):  # such as the mean over several epochs
            raise ValueError(
                f"sample {item.sample_id}: expected a right or a wrong answer, got {value}; "
                "with several epochs, run `catto measure` on the log"
            )
        confidence.append(float(stored_confidence))
        correct.append(value == 1.0)
    return InspectAnswers(np.array(confidence, dtype=np.float64), np.array(correct, dtype=np.bool_))


def _apply_metric(function: Callable[[Floats, Bools], Any], scores: Sequence[SampleScore]) -> float:
    """Compute a metric of the scores. Without scores it is 0, as in inspect_ai's own metrics."""
    if not scores:
        return 0.0
    answers = read_scores(scores)
    return float(function(answers.confidence, answers.correct))


@metric(name="ece")  # type: ignore[untyped-decorator]
def report_ece(bins: int = 20) -> Metric:
    """Report the expected calibration error of the confidences.

    Args:
        bins: Number of equal-width bins.
    """

    def compute(scores: list[SampleScore]) -> float:
        return _apply_metric(lambda confidence, correct: ece(confidence, correct, bins=bins), scores)

    return compute


@metric(name="brier")  # type: ignore[untyped-decorator]
def report_brier() -> Metric:
    """Report the Brier score: the mean squared difference between confidence and correctness."""

    def compute(scores: list[SampleScore]) -> float:
        return _apply_metric(brier, scores)

    return compute


@metric(name="auroc")  # type: ignore[untyped-decorator]
def report_auroc() -> Metric:
    """Report the AUROC: how well the confidence ranks right answers above wrong ones.

    It is nan if all answers are right or all are wrong.
    """

    def compute(scores: list[SampleScore]) -> float:
        return _apply_metric(auroc, scores)

    return compute


# ---- scorer


@scorer(metrics=[accuracy(), stderr(), report_ece(), report_brier(), report_auroc()])  # type: ignore[untyped-decorator]
def choice_with_confidence() -> Scorer:
    """Grade a multiple-choice answer as inspect_ai's `choice()` does, and read its confidence.

    The confidence is the probability of the token where the answer's letter begins. `catto measure` reads the same
    value from a log. The evaluation must run with `--logprobs`; `--top-logprobs 20` makes the log-probabilities of all
    letters available.

    Returns:
        The scorer. It adds `confidence`, `source` and, if every letter has a log-probability, `label_logprobs` to the
        metadata of each score.
    """
    grade_choice = choice()

    async def score_answer(state: TaskState, target: Target) -> Score:
        score = await grade_choice(state, target)
        if score is None:
            raise ValueError("the scorer `choice` returned no score")
        score.metadata = {**(score.metadata or {}), **read_choice_confidence(state)}
        return score

    return score_answer


def read_choice_confidence(state: TaskState) -> dict[str, Any]:
    """Return the confidence of a multiple-choice answer, how it was read, and the log-probabilities of all letters.

    Args:
        state: A sample after `multiple_choice()` and generation with log-probabilities.

    Returns:
        `confidence`, `source` and, if every letter has a log-probability, `label_logprobs`.

    Raises:
        ValueError: The sample has no log-probabilities, or the model chose several letters.
    """
    replies = state.output.choices
    logprobs = replies[0].logprobs if replies else None
    if logprobs is None or not logprobs.content:
        raise ValueError("choice_with_confidence needs log-probabilities: run with --logprobs --top-logprobs 20")
    letters = _read_letters(state)
    if len(letters.chosen) > 1:
        raise ValueError("choice_with_confidence needs a single answer, but the model chose several")
    chosen_letter = letters.chosen[0] if letters.chosen else None
    tokens = [token.model_dump() for token in logprobs.content]
    reading = read_reply_tokens(tokens, replies[0].message.text, list(letters.in_sample), chosen_letter)

    metadata = {"confidence": reading["confidence"], "source": reading["source"]}
    if "label_logprobs" in reading:
        # Stored by the letters of the sample: the solver may have shuffled the options that the model saw.
        label_logprobs = {}
        for letter, logprob in reading["label_logprobs"].items():
            label_logprobs[letters.in_sample[letter]] = logprob
        metadata["label_logprobs"] = label_logprobs
    return metadata


class _Letters(NamedTuple):
    """The letters of the options of a sample.

    Attributes:
        in_sample: Letter that the model saw -> letter in the sample. They differ if the solver shuffled the options.
        chosen: The letters that the model chose, as it saw them; usually one, or none if it gave no answer.
    """

    in_sample: dict[str, str]
    chosen: list[str]


def _read_letters(state: TaskState) -> _Letters:
    letters = _Letters({}, [])
    for number, option in enumerate(state.choices):
        letter = letter_of(number)
        letters.in_sample[letter] = letter_of(option.original_position)
        if option.correct:  # despite its name, this means that the model chose the option
            letters.chosen.append(letter)
    return letters
