"""Rewards: hand-worked numbers, and the laws that make honesty the best policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catto.metrics.errors import ece
from catto.rewards import (
    abstention_reward,
    brier_reward,
    correctness_reward,
    format_reward,
    grade_completions,
    log_reward,
)

LABELS = ["A", "B", "C", "D"]
GRID = [step / 100 for step in range(101)]
Scored = Callable[..., list[float | None]]


def respond(answer: str, confidence: float | str | None) -> str:
    text = f"<think>\nso\n</think>\n<answer>\n{answer}\n</answer>"
    return text if confidence is None else f"{text}\n<confidence>{confidence}</confidence>"


def reward_of(reward: Scored, answer: str, confidence: float | str | None, **options: Any) -> float:
    """The reward of one answer to a question whose right label is B."""
    [value] = reward([respond(answer, confidence)], gold=["B"], labels=[LABELS], **options)
    assert value is not None
    return value


@pytest.mark.parametrize(
    ("answer", "confidence", "brier", "logarithm"),
    [
        # right: 1 - (1 - q)^2 and 1 + log q / log 100; wrong: -q^2 and log(1 - q) / log 100
        ("B", 1.0, 1.0, 1 + math.log(0.99) / math.log(100)),
        ("B", 0.8, 0.96, 1 + math.log(0.8) / math.log(100)),
        ("B", 0.1, 0.19, 0.5),
        ("B", 0.0, 0.0, 0.0),
        ("A", 0.0, 0.0, math.log(0.99) / math.log(100)),
        ("A", 0.8, -0.64, math.log(0.2) / math.log(100)),
        ("A", 0.9, -0.81, -0.5),
        ("A", 1.0, -1.0, -1.0),
        ("A or B", 0.8, -0.64, math.log(0.2) / math.log(100)),  # no answer is a wrong answer
        ("B", None, -1.0, -1.0),
        ("B", "80", -1.0, -1.0),
    ],
)
def test_scores_by_hand(answer: str, confidence: float | str | None, brier: float, logarithm: float) -> None:
    assert reward_of(brier_reward, answer, confidence) == pytest.approx(brier, abs=1e-12)
    assert reward_of(log_reward, answer, confidence) == pytest.approx(logarithm, abs=1e-12)


def test_correctness_and_format_by_hand() -> None:
    texts = [respond("B", 0.8), respond("A", 0.8), respond("B", None), respond("A or B", 0.8), "B"]
    columns = {"gold": ["B"] * 5, "labels": [LABELS] * 5}
    assert correctness_reward(texts, **columns) == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert format_reward(texts, **columns) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_short_answers_are_graded_by_their_column() -> None:
    texts = [respond("$1,000", 0.5), respond("$1,000", 0.5), respond("The Beatles", 0.5), respond("none", 0.5)]
    gold = ["1000", "1000", ["Beatles", "Fab Four"], "0"]
    grade = ["number", None, "any-of", "number"]
    assert correctness_reward(texts, gold=gold, grade=grade) == [1.0, 0.0, 1.0, 0.0]
    assert format_reward(texts, gold=gold, grade=grade) == [1.0, 1.0, 1.0, 0.0]
    assert format_reward(texts, gold=gold, labels=[None, [], None, ()], grade=grade) == [1.0, 1.0, 1.0, 0.0]


def test_tolerance_is_an_option_of_the_function() -> None:
    reward = partial(brier_reward, tolerance=0.02)
    assert reward([respond("0.33", 0.5)], gold=["1/3"], grade=["number"]) == [0.75]


def test_a_row_without_gold_gets_no_reward() -> None:
    texts = [respond("B", 0.8), respond("5", 0.8)]
    for reward in (correctness_reward, format_reward, brier_reward, log_reward, abstention_reward):
        values = reward(texts, gold=[None, "5"], labels=[LABELS, None])
        assert values[0] is None
        assert values[1] is not None


def test_conversations_are_read_at_their_last_message() -> None:
    turns = [{"role": "assistant", "content": respond("A", 0.9)}, {"role": "assistant", "content": respond("B", 0.8)}]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": respond("B", 0.8)}]}]
    empty: list[dict[str, str]] = []
    values = brier_reward([turns, parts, empty], gold=["B"] * 3, labels=[LABELS] * 3)
    assert values == pytest.approx([0.96, 0.96, -1.0])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"gold": ["B", "B"]}, r"gold: expected one row per completion \(1\), got 2"),
        ({"gold": ["B"], "labels": []}, "labels: expected one row per completion"),
        ({"gold": ["E"], "labels": [LABELS]}, "gold 'E' is not one of the labels A, B, C, D"),
        ({"gold": ["five or six"], "grade": ["number"]}, "expected one number"),
    ],
)
def test_a_column_that_does_not_fit_is_an_error(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        correctness_reward([respond("B", 0.8)], **columns)


@pytest.mark.parametrize("options", [{"clip": 0.0}, {"clip": 0.5}, {"clip": math.nan}])
def test_a_clip_that_bounds_nothing_is_an_error(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="clip"):
        reward_of(log_reward, "B", 0.5, **options)


@pytest.mark.parametrize("threshold", [-0.1, 1.0, math.nan])
def test_a_threshold_that_is_no_probability_below_one_is_an_error(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        reward_of(abstention_reward, "B", None, threshold=threshold)


# Laws


LOG_REWARDS = {clip: partial(log_reward, clip=clip) for clip in (0.001, 0.01)}


@lru_cache
def rewards_of_grid(reward: Scored, answer: str) -> np.ndarray[Any, Any]:
    return np.array(reward([respond(answer, q) for q in GRID], gold=["B"] * 101, labels=[LABELS] * 101))


def expected_rewards(reward: Scored, probability: float) -> np.ndarray[Any, Any]:
    """The expected reward of every stated confidence of GRID, for an answer that is right with a probability."""
    return probability * rewards_of_grid(reward, "B") + (1 - probability) * rewards_of_grid(reward, "A")


@pytest.mark.parametrize("probability", GRID)
def test_the_expected_brier_reward_is_largest_at_the_true_probability(probability: float) -> None:
    """p (1 - (1 - q)^2) - (1 - p) q^2 = p^2 - (q - p)^2."""
    expected = expected_rewards(brier_reward, probability)
    assert GRID[int(expected.argmax())] == probability
    np.testing.assert_allclose(expected, probability**2 - (np.array(GRID) - probability) ** 2, atol=1e-12)


@pytest.mark.parametrize("probability", GRID[1:-1])
@pytest.mark.parametrize("clip", LOG_REWARDS)
def test_the_expected_log_reward_is_largest_at_the_true_probability(probability: float, clip: float) -> None:
    expected = expected_rewards(LOG_REWARDS[clip], probability)
    assert expected[GRID.index(probability)] == expected.max()
    rivals = [
        q for q, value in zip(GRID, expected, strict=True) if abs(q - probability) > 0.011 and value == expected.max()
    ]
    assert rivals == []


@pytest.mark.parametrize("reward", [brier_reward, *LOG_REWARDS.values(), partial(log_reward, clip=0.2)])
def test_a_more_probable_answer_is_worth_more_at_its_own_confidence(reward: Scored) -> None:
    """Otherwise a model could gain by answering wrong on purpose and saying so."""
    best = [expected_rewards(reward, probability).max() for probability in GRID]
    assert (np.diff(best) > -1e-12).all()


def test_an_unbounded_log_score_would_pay_for_wrong_answers() -> None:
    """Without the division p = 0.2 gets p + p log p + (1 - p) log(1 - p) = -0.30, and p = 0 gets 0."""
    p = 0.2
    assert p + p * math.log(p) + (1 - p) * math.log(1 - p) < 0


@given(st.sampled_from(["A", "B", "A or B", ""]), st.floats(0, 1), st.floats(0.001, 0.499))
def test_scores_are_bounded_and_silence_is_never_worth_more(answer: str, confidence: float, clip: float) -> None:
    stated = f"{confidence:.6f}"
    for reward in (brier_reward, partial(log_reward, clip=clip)):
        silent = reward_of(reward, answer, None)
        assert -1 <= silent <= reward_of(reward, answer, stated) <= 1


@given(st.floats(0, 0.99), st.floats(0, 1))
def test_an_answer_pays_above_the_threshold(threshold: float, probability: float) -> None:
    """p - (1 - p) t / (1 - t) > 0 exactly if p > t."""
    right = reward_of(abstention_reward, "B", None, threshold=threshold)
    wrong = reward_of(abstention_reward, "A", None, threshold=threshold)
    abstained = reward_of(abstention_reward, "I don't know.", None, threshold=threshold)
    gain = probability * right + (1 - probability) * wrong - abstained
    assert abstained == 0
    assert gain * (1 - threshold) == pytest.approx(probability - threshold, abs=1e-9)


@pytest.mark.parametrize("said", ["I don't know", "I don\u2019t know.", "**Unknown**", "I do not know!", "abstain"])
def test_an_abstention_is_said_in_the_answer(said: str) -> None:
    assert reward_of(abstention_reward, said, None) == 0
    assert abstention_reward([said], gold=["B"], labels=[LABELS]) == [-1.0]


# Metrics


def test_logged_ece_is_that_of_the_latest_completions_and_not_a_mean_of_batches() -> None:
    """A calibrated model in batches of 4: the mean of the batches' ECEs is large, that of the window is not."""
    rng = np.random.default_rng(0)
    confidence = rng.choice([0.2, 0.5, 0.8], 1000)
    correct = rng.random(1000) < confidence
    logged: dict[str, list[float]] = {}
    state = object()
    batches = []
    for start in range(0, 1000, 4):
        rows = range(start, start + 4)
        texts = [respond("B" if correct[row] else "A", confidence[row]) for row in rows]
        brier_reward(
            texts,
            gold=["B"] * 4,
            labels=[LABELS] * 4,
            log_metric=lambda name, value: logged.setdefault(name, []).append(value),
            trainer_state=state,
        )
        batches.append(ece(confidence[start : start + 4], correct[start : start + 4]))
    assert logged["stated_confidence/ece"][-1] == ece(confidence, correct) < 0.05
    assert np.mean(batches) > 0.2
    assert np.mean(logged["stated_confidence/mean"]) == pytest.approx(confidence.mean())
    assert np.mean(logged["stated_confidence/accuracy"]) == correct.mean()
    assert set(logged["stated_confidence/missing"]) == {0.0}


def test_another_training_begins_another_window() -> None:
    logged: list[tuple[str, float]] = []

    def log_metric(name: str, value: float) -> None:
        logged.append((name, value))

    for answer in ("A", "B"):
        texts = [respond(answer, "100%"), respond(answer, None)]
        columns = {"gold": ["B"] * 2, "labels": [LABELS] * 2}
        log_reward(texts, **columns, log_metric=log_metric, trainer_state=object())
    assert [value for name, value in logged if name == "stated_confidence/ece"] == [1.0, 0.0]
    assert [value for name, value in logged if name == "stated_confidence/missing"] == [0.5, 0.5]


def test_graded_completions_say_what_was_read() -> None:
    [completion] = grade_completions([respond("B", "70%")], gold=["B"], labels=[LABELS])
    assert completion is not None
    assert completion[1:] == (True, True, 0.7)
