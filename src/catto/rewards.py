"""Rewards for TRL's `GRPOTrainer` and `RLOOTrainer` that pay for right answers and honest confidences.

    from catto.rewards import brier_reward, format_reward

    trainer = GRPOTrainer(model, reward_funcs=[brier_reward, format_reward], train_dataset=dataset, args=args)

Each function has the signature that TRL expects and reads these columns of the dataset:

- `gold`: the right label, the accepted answer, or a list of accepted answers; a row with None gets no reward;
- `labels`: the labels of a multiple-choice question; without labels, the answer is a short text or a number;
- `grade`: `exact`, `number` or `any-of`, for answers without labels; `exact` if there is no such column.

Answers and confidences are read as everywhere in catto: the answer from its `<answer>` block, and the confidence from
`<confidence>0.8</confidence>`, both strictly. The prompt must ask for them, as `catto.prompts.render_messages` does
with `confidence=True`. Set the options of a function with `functools.partial`. No function needs torch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from catto.answer.grading import find_answer_key, grade_answer, normalize_answer
from catto.answer.response import find_answer_text, parse_response
from catto.answer.verbal import read_stated_confidence
from catto.metrics.errors import ece
from catto.records import Grade

Rewards = list[float | None]
LogMetric = Callable[[str, float], None]

MISSING_REWARD = -1.0  # the lowest value of `brier_reward` and `log_reward`, so leaving out the confidence never pays
# The ECE is computed over this many recent completions: TRL averages the logged values, and the mean of the ECEs of
# small batches is too large.
ECE_WINDOW = 1000
ABSTENTIONS = frozenset(
    normalize_answer(text)
    for text in ("I don't know", "I do not know", "I am not sure", "I'm not sure", "unknown", "unsure", "abstain")
)


class GradedCompletion(NamedTuple):
    """A completion with its answer graded and its stated confidence.

    Attributes:
        text: The text of the completion.
        is_answered: Whether an answer could be read.
        is_right: Whether the answer is right; an answer that cannot be read is wrong.
        confidence: The stated confidence; None if it is missing.
    """

    text: str
    is_answered: bool
    is_right: bool
    confidence: float | None


def correctness_reward(
    completions: Sequence[Any],
    gold: Sequence[Any],
    labels: Sequence[Any] | None = None,
    grade: Sequence[Any] | None = None,
    *,
    tolerance: float = 0.0,
    **columns: Any,
) -> Rewards:
    """Return 1 for a right answer, and 0 for a wrong or missing one.

    Args:
        completions: Texts, or lists of messages of which the last one is read.
        gold: The right label or the accepted answers of each row; None for a row that gets no reward.
        labels: The labels of each row; None or empty for rows whose answer is a short text or a number.
        grade: How answers without labels are compared: `exact` (the default), `number` or `any-of`.
        tolerance: The largest allowed relative difference between numbers.
        columns: Other columns and arguments that TRL passes; they are not read.

    Returns:
        One reward per completion: 1 or 0, or None for a row whose `gold` is None.

    Example:
        >>> correctness_reward(["<answer>B</answer>", "<answer>A</answer>"], gold=["B", "B"], labels=[["A", "B"]] * 2)
        [1.0, 0.0]
        >>> correctness_reward(["<answer>$1,000</answer>"], gold=["1000"], grade=["number"])
        [1.0]
    """
    graded = grade_completions(completions, gold, labels, grade, tolerance=tolerance)
    return _reward_each(graded, _score_correctness)


def format_reward(
    completions: Sequence[Any],
    gold: Sequence[Any],
    labels: Sequence[Any] | None = None,
    grade: Sequence[Any] | None = None,
    **columns: Any,
) -> Rewards:
    """Return 1 for a completion whose answer and stated confidence can both be read, else 0.

    Args:
        completions: Texts, or lists of messages of which the last one is read.
        gold: The right label or the accepted answers of each row; None for a row that gets no reward. Whether the
            answer is right does not matter here.
        labels: The labels of each row; None or empty for rows whose answer is a short text or a number.
        grade: How answers without labels are read: `exact` (the default), `any-of`, or `number`, for which the answer
            must contain one number.
        columns: Other columns and arguments that TRL passes; they are not read.

    Returns:
        One reward per completion: 1 or 0, or None for a row whose `gold` is None.

    Example:
        >>> texts = ["<answer>B</answer><confidence>0.8</confidence>", "<answer>B</answer>"]
        >>> format_reward(texts, gold=["A", "A"], labels=[["A", "B"]] * 2)
        [1.0, 0.0]
    """
    graded = grade_completions(completions, gold, labels, grade)
    return _reward_each(graded, _score_format)


def brier_reward(
    completions: Sequence[Any],
    gold: Sequence[Any],
    labels: Sequence[Any] | None = None,
    grade: Sequence[Any] | None = None,
    *,
    tolerance: float = 0.0,
    log_metric: LogMetric | None = None,
    trainer_state: Any = None,
    **columns: Any,
) -> Rewards:
    """Return z - (q - z)^2 for correctness z (1 or 0) and stated confidence q.

    This is the reward of RLCR (https://arxiv.org/abs/2507.16806).
    For an answer that is right with probability p, the expected reward is largest at q = p, where it equals p^2. This
    maximum grows with p, so the best answer is still the one most likely to be right.

    Args:
        completions: Texts, or lists of messages of which the last one is read.
        gold: The right label or the accepted answers of each row; None for a row that gets no reward.
        labels: The labels of each row; None or empty for rows whose answer is a short text or a number.
        grade: How answers without labels are compared: `exact` (the default), `number` or `any-of`.
        tolerance: The largest allowed relative difference between numbers.
        log_metric: TRL's function that logs a metric. Accuracy, mean confidence, the share of missing confidences and
            the ECE are logged; None logs nothing.
        trainer_state: TRL's state. A different object means a new training run, for which the logged ECE starts afresh.
        columns: Other columns and arguments that TRL passes; they are not read.

    Returns:
        One reward per completion, in [-1, 1]: -1 if no confidence can be read, None for a row whose `gold` is None.

    Example:
        >>> texts = ["<answer>B</answer><confidence>0.8</confidence>", "<answer>A</answer><confidence>0.8</confidence>"]
        >>> [round(reward, 2) for reward in brier_reward(texts, gold=["B", "B"], labels=[["A", "B"]] * 2)]
        [0.96, -0.64]
    """
    graded = grade_completions(completions, gold, labels, grade, tolerance=tolerance)
    log_stated_confidence("brier_reward", graded, log_metric, trainer_state)
    return _reward_each(graded, _score_brier)


def log_reward(
    completions: Sequence[Any],
    gold: Sequence[Any],
    labels: Sequence[Any] | None = None,
    grade: Sequence[Any] | None = None,
    *,
    tolerance: float = 0.0,
    clip: float = 0.01,
    log_metric: LogMetric | None = None,
    trainer_state: Any = None,
    **columns: Any,
) -> Rewards:
    """Return z + log P(z) / log(1 / clip), where P is q for a right answer and 1 - q for a wrong one.

    z is 1 for a right answer, else 0, and q is the stated confidence, clipped to [clip, 1 - clip]. The division keeps
    the second term between -1 and 0.

    Let p be the probability that the answer is right. Without the division, the expected reward at q = p would fall as
    p grows from 0 to 0.27, so a certainly wrong answer would pay more than one with p = 0.2. With it, the expected
    reward rises with p throughout.

    Args:
        completions: Texts, or lists of messages of which the last one is read.
        gold: The right label or the accepted answers of each row; None for a row that gets no reward.
        labels: The labels of each row; None or empty for rows whose answer is a short text or a number.
        grade: How answers without labels are compared: `exact` (the default), `number` or `any-of`.
        tolerance: The largest allowed relative difference between numbers.
        clip: The smallest probability, above 0 and below 0.5.
        log_metric: TRL's function that logs a metric. Accuracy, mean confidence, the share of missing confidences and
            the ECE are logged; None logs nothing.
        trainer_state: TRL's state. A different object means a new training run, for which the logged ECE starts afresh.
        columns: Other columns and arguments that TRL passes; they are not read.

    Returns:
        One reward per completion, in [-1, 1]: -1 if no confidence can be read, None for a row whose `gold` is None.

    Raises:
        ValueError: If `clip` is out of range, or for the reasons of `grade_completions`.

    Example:
        >>> texts = ["<answer>B</answer><confidence>0.1</confidence>", "<answer>A</answer><confidence>1</confidence>"]
        >>> [round(reward, 3) for reward in log_reward(texts, gold=["B", "B"], labels=[["A", "B"]] * 2)]
        [0.5, -1.0]
    """
    if not 0 < clip < 0.5:
        raise ValueError(f"clip {clip}: expected a number above 0 and below 0.5")

    def score_log(completion: GradedCompletion) -> float:
        if completion.confidence is None:
            return MISSING_REWARD
        confidence = min(max(completion.confidence, clip), 1 - clip)
        probability = confidence if completion.is_right else 1 - confidence
        score = math.log(probability) / -math.log(clip)
        return completion.is_right + max(score, -1.0)  # rounding may give a score just below -1

    graded = grade_completions(completions, gold, labels, grade, tolerance=tolerance)
    log_stated_confidence("log_reward", graded, log_metric, trainer_state)
    return _reward_each(graded, score_log)


def abstention_reward(
    completions: Sequence[Any],
    gold: Sequence[Any],
    labels: Sequence[Any] | None = None,
    grade: Sequence[Any] | None = None,
    *,
    tolerance: float = 0.0,
    threshold: float = 0.5,
    log_metric: LogMetric | None = None,
    **columns: Any,
) -> Rewards:
    """Return 1 for a right answer, 0 for an abstention, and -t / (1 - t) for a wrong or missing answer.

    An answer that is right with probability p is worth more than an abstention if p is above the threshold t. An
    abstention is an answer block with "I don't know", "unknown" or one of a few other phrases (`ABSTENTIONS`).

    Args:
        completions: Texts, or lists of messages of which the last one is read.
        gold: The right label or the accepted answers of each row; None for a row that gets no reward.
        labels: The labels of each row; None or empty for rows whose answer is a short text or a number.
        grade: How answers without labels are compared: `exact` (the default), `number` or `any-of`.
        tolerance: The largest allowed relative difference between numbers.
        threshold: The probability t above which an answer pays, at least 0 and below 1.
        log_metric: TRL's function that logs a metric, here the share of abstentions; None logs nothing.
        columns: Other columns and arguments that TRL passes; they are not read.

    Returns:
        One reward per completion: 1, 0 or -t / (1 - t), or None for a row whose `gold` is None.

    Raises:
        ValueError: If `threshold` is out of range, or for the reasons of `grade_completions`.

    Example:
        >>> texts = ["<answer>Paris</answer>", "<answer>I don't know.</answer>", "<answer>Lyon</answer>"]
        >>> abstention_reward(texts, gold=["Paris"] * 3, threshold=0.75)
        [1.0, 0.0, -3.0]
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold {threshold}: expected a number of at least 0 and below 1")
    wrong_reward = -threshold / (1 - threshold)
    graded = grade_completions(completions, gold, labels, grade, tolerance=tolerance)

    def score_abstention(completion: GradedCompletion) -> float:
        if completion.is_right:
            return 1.0
        return 0.0 if is_abstention(completion.text) else wrong_reward

    rewarded = [completion for completion in graded if completion is not None]
    if log_metric is not None and rewarded:
        abstentions = [is_abstention(completion.text) for completion in rewarded]
        log_metric("abstentions", sum(abstentions) / len(rewarded))
    return _reward_each(graded, score_abstention)


def _score_correctness(completion: GradedCompletion) -> float:
    return float(completion.is_right)


def _score_format(completion: GradedCompletion) -> float:
    return float(completion.is_answered and completion.confidence is not None)


def _score_brier(completion: GradedCompletion) -> float:
    if completion.confidence is None:
        return MISSING_REWARD
    return completion.is_right - (completion.confidence - completion.is_right) ** 2


def _reward_each(graded: Iterable[GradedCompletion | None], score: Callable[[GradedCompletion], float]) -> Rewards:
    rewards: Rewards = []
    for completion in graded:
        rewards.append(None if completion is None else score(completion))
    return rewards


# Reading completions


def grade_completions(
    completions: Sequence[Any],
    gold: Sequence[Any],
    labels: Sequence[Any] | None = None,
    grade: Sequence[Any] | None = None,
    *,
    tolerance: float = 0.0,
) -> list[GradedCompletion | None]:
    """Read the answer and the stated confidence of each completion, and grade the answer.

    Args:
        completions: Texts, or lists of messages of which the last one is read.
        gold: The right label or the accepted answers of each row; None for a row that is not graded.
        labels: The labels of each row; None or empty for rows whose answer is a short text or a number.
        grade: How answers without labels are compared: `exact` (the default), `number` or `any-of`.
        tolerance: The largest allowed relative difference between numbers.

    Returns:
        One entry per completion; None for a row whose `gold` is None.

    Raises:
        ValueError: If a column and the completions differ in length, the gold label of a row is not one of its labels,
            or an accepted answer cannot be compared.

    Example:
        >>> [completion] = grade_completions(["<answer>Paris</answer><confidence>70%</confidence>"], gold=["paris"])
        >>> completion.is_right, completion.confidence
        (True, 0.7)
    """
    size = len(completions)
    label_column: Sequence[Any] = [None] * size if labels is None else labels
    grade_column: Sequence[Any] = [None] * size if grade is None else grade
    for name, column in (("gold", gold), ("labels", label_column), ("grade", grade_column)):
        if len(column) != size:
            raise ValueError(f"{name}: expected one row per completion ({size}), got {len(column)}")
    graded: list[GradedCompletion | None] = []
    for row, completion in enumerate(completions):
        if gold[row] is None:
            graded.append(None)
            continue
        text = read_completion_text(completion)
        row_labels = label_column[row]
        if row_labels:
            graded.append(_grade_label(text, gold[row], row_labels))
        else:
            graded.append(_grade_short_answer(text, gold[row], grade_column[row] or "exact", tolerance))
    return graded


def read_completion_text(completion: Any) -> str:
    """Return the text of a completion, which is a string or a list of messages of which the last one is read.

    If the content of the message is a list of parts, their texts are joined. Without messages or content, the text is
    empty.

    Example:
        >>> read_completion_text([{"role": "assistant", "content": "<answer>B</answer>"}])
        '<answer>B</answer>'
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    parts = []
    for part in content or ():
        if isinstance(part, Mapping) and part.get("type") == "text":
            parts.append(str(part["text"]))
    return "".join(parts)


def is_abstention(text: str) -> bool:
    """Return whether a completion answers that it does not know; False if no answer can be read.

    Example:
        >>> is_abstention("<answer>I don't know.</answer>"), is_abstention("<answer>B</answer>")
        (True, False)
    """
    answer = find_answer_text(text)
    return answer is not None and normalize_answer(answer) in ABSTENTIONS


def _grade_label(text: str, gold: Any, labels: Sequence[str]) -> GradedCompletion:
    if gold not in labels:
        raise ValueError(f"gold {gold!r} is not one of the labels {', '.join(labels)}")
    label = parse_response(text, labels).label
    return GradedCompletion(
        text=text,
        is_answered=label is not None,
        is_right=label == gold,
        confidence=read_stated_confidence(text),
    )


def _grade_short_answer(text: str, gold: Any, grade: Grade, tolerance: float) -> GradedCompletion:
    accepted = [gold] if isinstance(gold, str) else list(gold)
    answer = find_answer_text(text) or ""  # an empty answer has no key and is graded as wrong
    return GradedCompletion(
        text=text,
        is_answered=find_answer_key(answer, grade) is not None,
        is_right=grade_answer(answer, accepted, grade=grade, tolerance=tolerance),
        confidence=read_stated_confidence(text),
    )


# Metrics


class RecentConfidences:
    """The latest `ECE_WINDOW` stated confidences of one training run, and whether their answers were right.

    Args:
        trainer_state: TRL's state, of which each training run has its own object.
    """

    def __init__(self, trainer_state: Any) -> None:
        self.trainer_state = trainer_state
        self.rows: deque[tuple[float, bool]] = deque(maxlen=ECE_WINDOW)  # (confidence, whether the answer was right)

    def compute_ece(self) -> float:
        """Return the ECE over the window."""
        confidence = [stated for stated, _ in self.rows]
        correct = [is_right for _, is_right in self.rows]
        return float(ece(confidence, correct))


_RECENT: dict[str, RecentConfidences] = {}  # name of a reward function -> its window


def _find_window(name: str, trainer_state: Any) -> RecentConfidences:
    """Return the window of a reward function; an empty one in the first call and when a new training run has begun."""
    window = _RECENT.get(name)
    if window is None or window.trainer_state is not trainer_state:
        window = RecentConfidences(trainer_state)
        _RECENT[name] = window
    return window


def log_stated_confidence(
    name: str,
    graded: Iterable[GradedCompletion | None],
    log_metric: LogMetric | None,
    trainer_state: Any = None,
) -> None:
    """Log accuracy, mean confidence and share of missing confidences of a batch, and the ECE of recent completions.

    The ECE is measured over a window of the latest completions with a confidence. Each reward function has its own
    window, which is kept between calls. Nothing is logged if no row of the batch has a gold answer.

    Args:
        name: The name of the reward function.
        graded: The completions of a batch; None for rows without gold.
        log_metric: TRL's function that logs a metric; None logs nothing.
        trainer_state: TRL's state. A different object is a new training run and starts a new window. All calls with
            None count as one run.
    """
    completions = [completion for completion in graded if completion is not None]
    if log_metric is None or not completions:
        return
    recent = _find_window(name, trainer_state)
    stated = []
    for completion in completions:
        if completion.confidence is not None:
            stated.append(completion.confidence)
            recent.rows.append((completion.confidence, completion.is_right))
    right_count = sum(completion.is_right for completion in completions)
    log_metric("stated_confidence/accuracy", right_count / len(completions))
    log_metric("stated_confidence/missing", 1 - len(stated) / len(completions))
    if stated:
        log_metric("stated_confidence/mean", sum(stated) / len(stated))
    if recent.rows:
        log_metric("stated_confidence/ece", recent.compute_ece())
