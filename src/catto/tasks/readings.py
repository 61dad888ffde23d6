"""A generated task whose answers are numbers: the sum of two quantities, each read by imprecise instruments.

Both quantities are whole numbers, drawn uniformly from a scale. Each reading has a stated spread s: a reading that is
off by d is s^d times as probable as an exact one, and readings never leave the scale. The exact posterior of the sum
follows from the text by Bayes' rule, so the error of any confidence in any answer is known. Nothing is downloaded.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from catto.records import Question, Split
from catto.tasks.splits import digest, owns_generated

TASK_NAME = "readings"
QUANTITIES = ("a", "b")
SCALE = range(6)  # the values of a quantity
READINGS_PER_QUANTITY = 2
SPREADS = (0.1, 0.3, 0.6)
READING_COUNTS: dict[Split, int] = {"train": 6000, "validation": 500, "test": 1000}

_ASK = f"What is {' + '.join(QUANTITIES)}?"
_READING = re.compile(r"^([a-z]) reads ([0-9]+) spread ([0-9.]+)%$", re.MULTILINE)


class Reading(NamedTuple):
    """One reading: the quantity that is read, the value that the instrument shows, and the instrument's spread."""

    quantity: str
    value: int
    spread: float

    def __str__(self) -> str:
        return f"{self.quantity} reads {self.value} spread {100 * self.spread:g}%"


def reading_probabilities(true_value: int, spread: float) -> list[float]:
    """Return the probability of each reading that an instrument may show, given the true value.

    Args:
        true_value: The value of the quantity, on the scale.
        spread: The spread of the instrument, between 0 and 1 exclusive.

    Returns:
        P(reading = r | true value) for every r on the scale, proportional to spread^|r - true value|.

    >>> [round(63 * p, 9) for p in reading_probabilities(0, 0.5)]
    [32.0, 16.0, 8.0, 4.0, 2.0, 1.0]
    """
    weights = [spread ** abs(value - true_value) for value in SCALE]
    return _normalize(weights)


def quantity_posterior(readings: Sequence[Reading]) -> list[float]:
    """Return P(value | readings of one quantity) for every value of the scale, with a uniform prior.

    Without readings, this is the prior.

    >>> [round(p, 3) for p in quantity_posterior([Reading("a", 0, 0.1), Reading("a", 0, 0.6)])]
    [0.954, 0.043, 0.002, 0.0, 0.0, 0.0]
    """
    weights = []
    for value in SCALE:
        likelihoods = [reading_probabilities(value, reading.spread)[reading.value] for reading in readings]
        weights.append(math.prod(likelihoods))
    return _normalize(weights)


class QuantityPosteriors(NamedTuple):
    """The posterior of each quantity given its own readings; given all readings, the two are independent."""

    first: list[float]
    second: list[float]


def posterior_of_each(readings: Sequence[Reading]) -> QuantityPosteriors:
    """Return the posterior of each of the two quantities."""
    posteriors = []
    for quantity in QUANTITIES:
        own_readings = [reading for reading in readings if reading.quantity == quantity]
        posteriors.append(quantity_posterior(own_readings))
    return QuantityPosteriors(*posteriors)


def sum_posterior(readings: Sequence[Reading]) -> list[float]:
    """Return P(sum = n | readings) for n = 0, 1, ...: the convolution of the posteriors of the quantities.

    >>> precise = [Reading("a", 2, 1e-12), Reading("b", 1, 1e-12)]
    >>> [round(p, 9) for p in sum_posterior(precise)][:5]
    [0.0, 0.0, 0.0, 1.0, 0.0]
    """
    posteriors = posterior_of_each(readings)
    total = [0.0] * (2 * len(SCALE) - 1)
    for first, first_probability in enumerate(posteriors.first):
        for second, second_probability in enumerate(posteriors.second):
            total[first + second] += first_probability * second_probability
    return total


def _normalize(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


# ---- questions -------------------------------------------------------------------------------------------------------


def generate_sums(split: Split, n: int | None, *, seed: int) -> Iterator[Question]:
    """Generate questions for the sum of two quantities, given readings of both.

    With the same split and seed, the first questions are the same for every `n`.

    Args:
        split: The split; no set of readings is in two splits.
        n: Number of questions; None means 6000 for training, 500 for validation and 1000 for test.
        seed: Seed of the questions.

    Returns:
        An iterator over the questions, each with its exact posterior.

    >>> question = next(generate_sums("test", 1, seed=0))
    >>> len(question.posterior), round(sum(question.posterior.values()), 9)
    (11, 1.0)
    """
    if n is None:
        n = READING_COUNTS[split]
    prefix = f"{TASK_NAME}-{split}-{seed}"
    question_ids = (f"{prefix}-{index}" for index in range(n))
    return (_draw_sum(question_id, split) for question_id in question_ids)


def _draw_sum(question_id: str, split: Split) -> Question:
    """Draw both quantities and their readings until the text of the readings belongs to the split; make the question.

    All draws depend on the id alone.
    """
    draws = random.Random(int.from_bytes(digest(question_id), "big"))
    while True:  # ends soon: a draw belongs to the split with a probability of about a tenth or more
        # Only `random` is called: its numbers are the same in every version of Python.
        values = [SCALE[int(draws.random() * len(SCALE))] for _ in QUANTITIES]
        readings = _draw_readings(draws, values)
        text = "\n".join(str(reading) for reading in readings)
        # The split depends on the readings alone, so Bayes' rule still gives P(sum | readings).
        if owns_generated(text, split):
            break
    posterior = {}
    for total, probability in enumerate(sum_posterior(readings)):
        posterior[str(total)] = probability
    return Question(
        id=question_id,
        task=TASK_NAME,
        split=split,
        fields={"question": f"{_ASK}\n{text}"},
        gold=str(sum(values)),
        posterior=posterior,
        accepted=(str(sum(values)),),
        grade="number",
    )


def _draw_readings(draws: random.Random, values: Sequence[int]) -> list[Reading]:
    readings = []
    for quantity, true_value in zip(QUANTITIES, values, strict=True):
        for _ in range(READINGS_PER_QUANTITY):
            spread = SPREADS[int(draws.random() * len(SPREADS))]
            value = _draw_index(draws, reading_probabilities(true_value, spread))
            readings.append(Reading(quantity, value, spread))
    return readings


def _draw_index(draws: random.Random, weights: Sequence[float]) -> int:
    """Draw an index with a probability proportional to its weight.

    `random` is called once. Its numbers are the same in every version of Python.
    """
    point = draws.random() * math.fsum(weights)
    for index, weight in enumerate(weights):
        point -= weight
        if point < 0:
            return index
    # Rounding made the subtracted weights sum to slightly less than their `fsum`: return the likeliest index.
    return max(range(len(weights)), key=weights.__getitem__)


def readings_of(question: Question) -> list[Reading]:
    """Read the readings back from the text of the question; ValueError if it has none."""
    matches = _READING.findall(question.fields.get("question", ""))
    if not matches:
        raise ValueError(f"question {question.id}: no reading in its text")
    readings = []
    for quantity, value, percent in matches:
        readings.append(Reading(quantity, int(value), float(percent) / 100))
    return readings


def likeliest_sum(question: Question) -> str:
    """Return the most probable sum; in case of a tie, the smallest."""
    probabilities = sum_posterior(readings_of(question))
    return str(probabilities.index(max(probabilities)))


# ---- the teacher -----------------------------------------------------------------------------------------------------


def respond_with_sum(question: Question, temperature: float, seed: int) -> tuple[str, str]:
    """Answer a question as the built-in teacher.

    The sum is drawn from p^(1/T), normalised, where p is its posterior given the readings. The reasoning then states a
    value for each quantity. The two values are drawn from their posterior given the readings and that sum.

    Args:
        question: A question that `generate_sums` made.
        temperature: The T above; 0 always gives the most probable sum, the smallest in case of a tie.
        seed: Seed of the response.

    Returns:
        The reasoning and the sum.

    Raises:
        ValueError: The temperature is negative or not finite, or the question has no readings.
    """
    _check_temperature(temperature)
    random_key = digest("respond", question.id, repr(float(temperature)), seed)  # the same for 1 and 1.0
    draws = random.Random(int.from_bytes(random_key, "big"))
    readings = readings_of(question)
    if temperature == 0:
        total = int(likeliest_sum(question))
    else:
        total = _draw_index(draws, _sharpen(sum_posterior(readings), temperature))
    first = _draw_first(draws, readings, total)
    name_of_first, name_of_second = QUANTITIES
    return f"{name_of_first} is {first}\n{name_of_second} is {total - first}", str(total)


def _draw_first(draws: random.Random, readings: Sequence[Reading], total: int) -> int:
    """Draw the value of the first quantity from its posterior given the readings and the sum of both quantities."""
    posteriors = posterior_of_each(readings)
    weights = []
    for first in SCALE:
        second = total - first
        weight = 0.0
        if second in SCALE:
            weight = posteriors.first[first] * posteriors.second[second]
        weights.append(weight)
    return _draw_index(draws, weights)


def judge_sum(question: Question, answer: str, temperature: float, seed: int) -> bool:
    """Judge a proposed answer as the built-in teacher.

    Let p be the posterior probability that the answer is right. It is judged right with a probability proportional to
    p^(1/T), and wrong with one proportional to (1 - p)^(1/T).

    Args:
        question: A question that `generate_sums` made.
        answer: The proposed sum; an answer that is not the sum of two values of the scale is always judged wrong.
        temperature: The T above; at 0, an answer is judged right if p is at least one half.
        seed: Seed of the judgement.

    Returns:
        Whether the answer is judged right.

    Raises:
        ValueError: The temperature is negative or not finite, or the question has no readings.
    """
    _check_temperature(temperature)
    probability = _probability_of(question, answer)
    if temperature == 0:
        return probability >= 0.5
    random_key = digest("judge", question.id, answer, repr(float(temperature)), seed)
    draws = random.Random(int.from_bytes(random_key, "big"))
    wrong_or_right = _sharpen([1 - probability, probability], temperature)
    return _draw_index(draws, wrong_or_right) == 1


def state_confidence(question: Question, answer: str, temperature: float) -> str:
    """Return the confidence that the built-in teacher states: the probability with which it draws its answer.

    That is p^(1/T), normalised over all sums, where p is the posterior probability of the answer.

    Args:
        question: A question that `generate_sums` made.
        answer: The teacher's answer, a possible sum of two values of the scale.
        temperature: The T above, greater than 0: the temperature at which the answer was drawn.

    Returns:
        A number from 0.0 to 1.0 with one decimal.
    """
    probabilities = _sharpen(sum_posterior(readings_of(question)), temperature)
    return f"{probabilities[int(answer)]:.1f}"


def _probability_of(question: Question, answer: str) -> float:
    """Return the posterior probability of a sum; 0 for an answer that is not a sum of two values of the scale."""
    probabilities = sum_posterior(readings_of(question))
    possible = {str(total): probability for total, probability in enumerate(probabilities)}
    return possible.get(answer, 0.0)


def _check_temperature(temperature: float) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature {temperature}: expected a finite number, at least 0")


def _sharpen(probabilities: Sequence[float], temperature: float) -> list[float]:
    """Return p^(1/T), normalised; T is greater than 0."""
    largest = max(probabilities)
    relative = [probability / largest for probability in probabilities]  # one ratio is 1, so not all powers round to 0
    return _normalize([ratio ** (1 / temperature) for ratio in relative])
