"""inspect_ai: the metrics `catto/ece`, `catto/brier` and `catto/auroc`, and the scorer `choice_with_confidence`.

inspect_ai finds this module by the entry point `catto` of the group `inspect_ai`.
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
    """Read the confidence of each score from its metadata, and whether the answer is right from its value.

    Args:
        scores: Scores with `confidence` in their metadata, as `choice_with_confidence` gives them.

    Raises:
        ValueError: A score has no confidence, or is neither right nor wrong.
    """
    to_float = value_to_float()
    confidence = []
    correct = []
    for item in scores:
        stated = (item.score.metadata or {}).get("confidence")
        if stated is None:
            raise ValueError(
                f"sample {item.sample_id}: its score has no metadata.confidence; "
                "use the scorer catto/choice_with_confidence, or store one"
            )
        value = to_float(item.score.value)
        if value not in (0.0, 1.0):
            raise ValueError(
                f"sample {item.sample_id}: expected a right or a wrong answer, got {value}; "
                "with several epochs, run `catto measure` on the log"
            )
        confidence.append(float(stated))
        correct.append(value == 1.0)
    return InspectAnswers(np.array(confidence, dtype=np.float64), np.array(correct, dtype=np.bool_))


def _apply_metric(function: Callable[[Floats, Bools], Any], scores: Sequence[SampleScore]) -> float:
    """Compute a metric of the scores; 0 without scores, as inspect_ai's own metrics do."""
    if not scores:
        return 0.0
    answers = read_scores(scores)
    return float(function(answers.confidence, answers.correct))


@metric(name="ece")  # type: ignore[untyped-decorator]
def report_ece(bins: int = 20) -> Metric:
    """Report the expected calibration error of the confidences.

    Args:
        bins: Number of bins of equal width.
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
    """Report the AUROC: how well the confidence ranks right answers above wrong ones; nan without both."""

    def compute(scores: list[SampleScore]) -> float:
        return _apply_metric(auroc, scores)

    return compute


# ---- scorer


@scorer(metrics=[accuracy(), stderr(), report_ece(), report_brier(), report_auroc()])  # type: ignore[untyped-decorator]
def choice_with_confidence() -> Scorer:
    """Grade a multiple-choice answer as inspect_ai's `choice()` does, and read its confidence.

    The confidence is the probability of the token where the answer's letter begins, read as `catto measure` reads it.
    The run needs `--logprobs`; with `--top-logprobs 20` the log-probabilities of all letters are stored too. They are
    in the metadata of the score: `confidence`, `source`, and `label_logprobs` if every letter has one.
    """
    grade_choice = choice()

    async def score_answer(state: TaskState, target: Target) -> Score:
        score = await grade_choice(state, target)
        if score is None:
            raise ValueError("the scorer `choice` gave no score")
        score.metadata = {**(score.metadata or {}), **read_choice_confidence(state)}
        return score

    return score_answer


def read_choice_confidence(state: TaskState) -> dict[str, Any]:
    """Return the confidence of a multiple-choice answer, how it was read, and the log-probabilities of all letters.

    Args:
        state: A sample after `multiple_choice()` and generation with log-probabilities.
    """
    replies = state.output.choices
    logprobs = replies[0].logprobs if replies else None
    if logprobs is None or not logprobs.content:
        raise ValueError("choice_with_confidence needs log-probabilities: run with --logprobs --top-logprobs 20")
    letters = []
    chosen = []
    # The solver may have shuffled the choices; a score names the letters of the sample.
    letter_in_sample = {}
    for number, option in enumerate(state.choices):
        letter = letter_of(number)
        letters.append(letter)
        letter_in_sample[letter] = letter_of(option.original_position)
        if option.correct:
            chosen.append(letter)
    if len(chosen) > 1:
        raise ValueError("choice_with_confidence needs a single answer, the model chose several")
    tokens = [token.model_dump() for token in logprobs.content]
    graded = chosen[0] if chosen else None
    reading = read_reply_tokens(tokens, replies[0].message.text, letters, graded)

    metadata = {"confidence": reading["confidence"], "source": reading["source"]}
    if "label_logprobs" in reading:
        shown = reading["label_logprobs"]
        metadata["label_logprobs"] = {letter_in_sample[letter]: logprob for letter, logprob in shown.items()}
    return metadata
