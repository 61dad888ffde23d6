"""The world of readings: an exact posterior of the sum, calibrated by construction, and a teacher that also judges."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catto.records import SPLITS, Question
from catto.tasks import load_questions
from catto.tasks.readings import (
    SCALE,
    SPREADS,
    Reading,
    generate_sums,
    judge_sum,
    likeliest_sum,
    quantity_posterior,
    reading_probabilities,
    readings_of,
    respond_with_sum,
    sum_posterior,
)

SUMS = [str(total) for total in range(11)]


@pytest.fixture(scope="module")
def many() -> list[Question]:
    return list(generate_sums("train", 8000, seed=0))


def enumerate_posterior(readings: list[Reading]) -> list[Fraction]:
    """Return P(sum | readings) by enumerating all 36 pairs of values with exact fractions."""
    scores = [Fraction(0)] * len(SUMS)
    for first, second in itertools.product(range(6), repeat=2):
        likelihood = Fraction(1)
        for reading in readings:
            spread = Fraction(round(100 * reading.spread), 100)
            true_value = first if reading.quantity == "a" else second
            total = sum(spread ** abs(shown - true_value) for shown in range(6))
            likelihood *= spread ** abs(reading.value - true_value) / total
        scores[first + second] += likelihood
    return [score / sum(scores) for score in scores]


def test_a_reading_by_hand() -> None:
    """Spread 1/2 around 2: weights 1/4, 1/2, 1, 1/2, 1/4, 1/8 sum to 21/8, so in 21sts 2, 4, 8, 4, 2, 1."""
    assert reading_probabilities(2, 0.5) == pytest.approx([n / 21 for n in (2, 4, 8, 4, 2, 1)], abs=1e-15)


def test_a_quantity_without_readings_is_uniform() -> None:
    assert quantity_posterior([]) == pytest.approx([1 / 6] * 6, abs=1e-15)


def test_a_sum_without_readings_is_that_of_two_dice() -> None:
    """Two uniform values 0 to 5: 1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1 of 36."""
    assert sum_posterior([]) == pytest.approx([n / 36 for n in (1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1)], abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(1, 99)),
        max_size=5,
    )
)
def test_the_posterior_is_that_of_exact_enumeration(drawn: list[tuple[str, int, int]]) -> None:
    readings = [Reading(quantity, value, percent / 100) for quantity, value, percent in drawn]
    expected = [float(probability) for probability in enumerate_posterior(readings)]
    assert sum_posterior(readings) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_the_posterior_is_calibrated(many: list[Question]) -> None:
    """Within each tenth, the share of golds differs from the mean probability by sampling noise alone (4 sigma)."""
    probabilities = []
    hits = []
    for question in many:
        for answer, probability in (question.posterior or {}).items():
            probabilities.append(probability)
            hits.append(answer == question.gold)
    p = np.array(probabilities)
    hit = np.array(hits)
    for low in np.arange(0, 1, 0.1):
        inside = (p > low) & (p <= low + 0.1)
        noise = math.sqrt(float(np.sum(p[inside] * (1 - p[inside])))) / inside.sum()
        assert abs(hit[inside].mean() - p[inside].mean()) < 4 * noise


def test_the_likeliest_sum_is_right_as_often_as_its_probability(many: list[Question]) -> None:
    """On 8,000 questions the standard deviation is at most 0.56 points."""
    right = np.mean([likeliest_sum(question) == question.gold for question in many])
    expected = np.mean([max((question.posterior or {}).values()) for question in many])
    assert right == pytest.approx(expected, abs=4 * 0.0056)


def test_questions_are_open_and_carry_all_that_the_posterior_needs(many: list[Question]) -> None:
    for question in many[:500]:
        posterior = question.posterior or {}
        assert question.options == ()
        assert question.labels == ()
        assert list(posterior) == SUMS
        assert list(posterior.values()) == sum_posterior(readings_of(question))
        assert math.fsum(posterior.values()) == pytest.approx(1, abs=1e-12)
    spreads = Counter(reading.spread for question in many for reading in readings_of(question))
    assert set(spreads) == set(SPREADS)


def test_a_question_by_its_text() -> None:
    question = next(generate_sums("test", 1, seed=0))
    asked, *lines = question.fields["question"].split("\n")
    assert asked == "What is a + b?"
    assert lines == [str(reading) for reading in readings_of(question)]
    assert [line.split()[0] for line in lines] == ["a", "a", "b", "b"]


def test_a_text_without_readings_is_one_line() -> None:
    question = next(generate_sums("test", 1, seed=0)).model_copy(update={"fields": {"question": "What is a + b?"}})
    with pytest.raises(ValueError, match="no reading in its text"):
        readings_of(question)


def test_splits_share_neither_ids_nor_readings() -> None:
    ids: list[str] = []
    texts: dict[str, set[str]] = {}
    for split in SPLITS:
        questions = [question for seed in (0, 1) for question in generate_sums(split, 400, seed=seed)]
        ids += [question.id for question in questions]
        texts[split] = {question.fields["question"] for question in questions}
    assert len(set(ids)) == len(ids)
    for first, second in itertools.combinations(SPLITS, 2):
        assert not texts[first] & texts[second]


def test_a_longer_run_starts_with_the_shorter_one_and_seeds_differ() -> None:
    assert list(generate_sums("test", 50, seed=1))[:20] == list(generate_sums("test", 20, seed=1))
    assert list(generate_sums("test", 20, seed=1)) != list(generate_sums("test", 20, seed=2))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_teacher_draws_from_the_posterior_at_its_temperature(many: list[Question], temperature: float) -> None:
    """p^(1/T) over 4,000 seeds: within four standard deviations of at most 0.8 points."""
    question = many[0]
    weights = np.array(list((question.posterior or {}).values())) ** (1 / temperature)
    drawn = Counter(respond_with_sum(question, temperature, seed)[1] for seed in range(4000))
    for answer, expected in zip(SUMS, weights / weights.sum(), strict=True):
        assert drawn[answer] / 4000 == pytest.approx(expected, abs=4 * 0.008)


def test_the_teacher_gives_values_that_have_its_sum_and_their_own_posterior(many: list[Question]) -> None:
    """At T = 1 the values are a draw from their joint posterior, so the first has its own marginal one."""
    question = many[0]
    drawn: Counter[int] = Counter()
    for seed in range(4000):
        reasoning, answer = respond_with_sum(question, 1.0, seed)
        first, second = (int(line.split(" is ")[1]) for line in reasoning.split("\n"))
        assert first in SCALE
        assert second in SCALE
        assert first + second == int(answer)
        drawn[first] += 1
    own = [reading for reading in readings_of(question) if reading.quantity == "a"]
    for value, expected in enumerate(quantity_posterior(own)):
        assert drawn[value] / 4000 == pytest.approx(expected, abs=4 * 0.008)


def test_temperature_zero_gives_the_likeliest_sum(many: list[Question]) -> None:
    for question in many[:200]:
        posterior = question.posterior or {}
        answer = respond_with_sum(question, 0, 3)[1]
        assert answer == likeliest_sum(question)
        assert posterior[answer] == max(posterior.values())


def test_a_response_is_fixed_by_question_temperature_and_seed(many: list[Question]) -> None:
    copy = Question.model_validate_json(many[0].model_dump_json()).model_copy(update={"posterior": None})
    assert respond_with_sum(many[0], 0.8, 5) == respond_with_sum(copy, 0.8, 5)
    assert len({respond_with_sum(many[0], 0.8, seed) for seed in range(30)}) > 1


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_teacher_judges_by_the_posterior_at_its_temperature(many: list[Question], temperature: float) -> None:
    """p^(1/T) / (p^(1/T) + (1 - p)^(1/T)) over 4,000 seeds."""
    question = many[1]
    answer = likeliest_sum(question)
    probability = (question.posterior or {})[answer]
    odds = (probability / (1 - probability)) ** (1 / temperature)
    called_right = sum(judge_sum(question, answer, temperature, seed) for seed in range(4000))
    assert called_right / 4000 == pytest.approx(odds / (1 + odds), abs=4 * 0.008)


def test_judging_at_temperature_zero_asks_for_one_half(many: list[Question]) -> None:
    for question in many[:100]:
        for answer, probability in (question.posterior or {}).items():
            assert judge_sum(question, answer, 0, 0) == (probability >= 0.5)


@pytest.mark.parametrize("answer", ["11", "-1", "4.5", "four", ""])
def test_what_is_no_sum_is_never_called_right(many: list[Question], answer: str) -> None:
    assert not judge_sum(many[0], answer, 0, 0)
    assert not any(judge_sum(many[0], answer, 1.0, seed) for seed in range(200))


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_a_bad_temperature_is_refused(many: list[Question], temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        respond_with_sum(many[0], temperature, 0)
    with pytest.raises(ValueError, match="temperature"):
        judge_sum(many[0], "3", temperature, 0)


def test_the_table_entry_generates(many: list[Question]) -> None:
    loaded = load_questions("readings", "train", seed=0, limit=30)
    assert list(loaded) == many[:30]
    assert (loaded.report.read, loaded.report.kept) == (30, 30)
