"""A generated task (a "world"): questions whose true posterior is known, and their teacher. Nothing is downloaded.

A coin lies in one of K boxes, drawn uniformly. Each of n witnesses has a stated reliability r, drawn uniformly from a
few values. With probability r the witness names the right box, otherwise one of the K - 1 others at random.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import NamedTuple

from catto.records import Option, Question, Split, content_hash
from catto.tasks.splits import digest, owns_generated

RELIABILITIES = (0.35, 0.5, 0.75)
SIZES: dict[Split, int] = {"train": 6000, "validation": 500, "test": 1000}
# The probability that the teacher quotes a witness who names the teacher's answer, and one who names another option.
QUOTE_SUPPORT = 0.9
QUOTE_OTHER = 0.3
_MAX_TRIES = 10_000  # draws per question

_ASK = "Where is the coin?"
_STATEMENT = re.compile(r"^([0-9.]+)% says ([A-Z])$", re.MULTILINE)


class Statement(NamedTuple):
    """One witness: how often it is right, and the index of the option it names."""

    reliability: float
    option: int

    def __str__(self) -> str:
        return f"{100 * self.reliability:g}% says {ascii_uppercase[self.option]}"


def posterior(statements: Sequence[Statement], options: int) -> list[float]:
    """Return P(gold = k | statements) for every option k, by Bayes' rule with a uniform prior.

    The likelihood of option k is the product over all witnesses w of r_w if w names k, else (1 - r_w) / (K - 1).

    Args:
        statements: What the witnesses say.
        options: The number of options K, at least 2.

    >>> [round(14 * p, 9) for p in posterior([Statement(0.75, 0), Statement(0.5, 1)], 4)]
    [9.0, 3.0, 1.0, 1.0]
    """
    log_likelihoods = [0.0] * options
    for reliability, named in statements:
        for option in range(options):
            likelihood = reliability if option == named else (1 - reliability) / (options - 1)
            log_likelihoods[option] += math.log(likelihood)
    return _softmax(log_likelihoods)  # with a uniform prior, the posterior is the normalised likelihood


def _softmax(scores: Sequence[float]) -> list[float]:
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class WitnessWorld(NamedTuple):
    """How questions are generated: how many options and witnesses each has, and how reliable witnesses are."""

    options: int
    witnesses: int
    reliabilities: tuple[float, ...]

    def check(self) -> None:
        """Raise ValueError if no questions can be drawn."""
        if not 2 <= self.options <= len(ascii_uppercase):
            raise ValueError(f"options {self.options}: expected 2 to {len(ascii_uppercase)}")
        if self.witnesses < 1:
            raise ValueError(f"witnesses {self.witnesses}: expected at least 1")
        are_probabilities = all(0 < value < 1 for value in self.reliabilities)
        if not self.reliabilities or not are_probabilities:
            raise ValueError(f"reliabilities {self.reliabilities}: expected numbers between 0 and 1, at least one")
        for value in self.reliabilities:
            # The posterior must be exact for the percentage that the text shows, with its six digits.
            value_in_text = float(f"{100 * value:g}") / 100
            if value_in_text != value:
                raise ValueError(f"reliabilities: {value} is not a percentage of at most six digits")


def generate_questions(
    split: Split,
    n: int | None,
    *,
    seed: int,
    options: int = 4,
    witnesses: int = 4,
    reliabilities: Sequence[float] = RELIABILITIES,
) -> Iterator[Question]:
    """Generate questions about which box contains a coin, given the statements of witnesses.

    With otherwise equal arguments, the first questions are the same for every `n`.

    Args:
        split: The split; no set of statements is in two splits.
        n: Number of questions; None means 6000 for training, 500 for validation and 1000 for test.
        seed: Seed of the questions.
        options: Number of boxes, 2 to 26.
        witnesses: Number of statements in a question, at least 1.
        reliabilities: The probabilities with which a witness is right, of which each witness has one. They must be
            above 0 and below 1. The question states them in per cent, as in "72.5 %", with at most six digits.

    Returns:
        An iterator over the questions, each with its exact posterior.

    Raises:
        ValueError: An argument is out of its range. Or, while a question is drawn: there are too few different sets of
            statements to give this split its own.

    >>> question = next(generate_questions("test", 1, seed=0))
    >>> question.labels, round(sum(question.posterior.values()), 9)
    (('A', 'B', 'C', 'D'), 1.0)
    """
    world = WitnessWorld(options, witnesses, tuple(reliabilities))
    world.check()
    if n is None:
        n = SIZES[split]
    # Questions that are generated with different settings have different ids.
    world_hash = content_hash([options, witnesses, list(reliabilities)], 6)
    prefix = f"witnesses-{world_hash}-{split}-{seed}"
    question_ids = (f"{prefix}-{index}" for index in range(n))
    return (_draw_question(question_id, split, world) for question_id in question_ids)


def _draw_question(question_id: str, split: Split, world: WitnessWorld) -> Question:
    """Draw a gold option and statements about it until the statements belong to the split; make the question.

    All draws depend on the id alone.

    Raises:
        ValueError: None of `_MAX_TRIES` draws belongs to the split. A very small world may have no set of statements
            that does.
    """
    draws = random.Random(int.from_bytes(digest(question_id), "big"))
    for _ in range(_MAX_TRIES):
        gold = _draw_index(draws, world.options)
        statements = _draw_statements(draws, gold, world)
        text = _join_statements(statements)
        # The split depends on the statements alone, so Bayes' rule still gives P(gold | statements).
        if not owns_generated(text, split):
            continue
        labels = ascii_uppercase[: world.options]
        probabilities = posterior(statements, world.options)
        return Question(
            id=question_id,
            task="witnesses",
            split=split,
            fields={"question": f"{_ASK}\n{text}"},
            options=tuple(Option(label=label, text=label) for label in labels),
            gold=labels[gold],
            posterior=dict(zip(labels, probabilities, strict=True)),
        )
    raise ValueError(f"witnesses {world.witnesses}: too few different sets of statements to give {split} its own")


def _draw_statements(draws: random.Random, gold: int, world: WitnessWorld) -> list[Statement]:
    statements = []
    for _ in range(world.witnesses):
        reliability = world.reliabilities[_draw_index(draws, len(world.reliabilities))]
        named = gold
        is_wrong = draws.random() >= reliability
        if is_wrong:
            named = _draw_index(draws, world.options - 1)
            if named >= gold:  # skip the gold option
                named += 1
        statements.append(Statement(reliability, named))
    return statements


def _draw_index(draws: random.Random, count: int) -> int:
    """Draw from 0 to count - 1 with one call of `random`, whose numbers are the same in every version of Python."""
    return int(draws.random() * count)


def _join_statements(statements: Sequence[Statement]) -> str:
    return "\n".join(str(statement) for statement in statements)


def statements_of(question: Question) -> list[Statement]:
    """Read the statements back from the text of the question; ValueError if it has none."""
    matches = _STATEMENT.findall(question.fields.get("question", ""))
    if not matches:
        raise ValueError(f"question {question.id}: no witness in its text")
    statements = []
    for percent, label in matches:
        reliability = float(percent) / 100
        statements.append(Statement(reliability, question.labels.index(label)))
    return statements


def bayes_answer(question: Question) -> str:
    """Return the label with the largest posterior probability, the first in case of a tie."""
    probabilities = posterior(statements_of(question), len(question.labels))
    return question.labels[probabilities.index(max(probabilities))]


def respond(question: Question, temperature: float, seed: int) -> tuple[str, str]:
    """Answer a question as the built-in teacher.

    The label is drawn from p^(1/T), normalised, where p is its posterior given the statements. The reasoning then
    quotes witnesses in their order, mostly those who name the label, and does not state the answer itself.

    Args:
        question: A question that `generate_questions` made.
        temperature: The T above; 0 always gives the most probable label, the first in case of a tie.
        seed: Seed of the response.

    Returns:
        The reasoning and the label.

    Raises:
        ValueError: The temperature is negative or not finite, or the question has no statements.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature {temperature}: expected a finite number, at least 0")
    random_key = digest("respond", question.id, repr(float(temperature)), seed)  # the same for 1 and 1.0
    draws = random.Random(int.from_bytes(random_key, "big"))
    statements = statements_of(question)
    if temperature == 0:
        label = bayes_answer(question)
    else:
        label = _draw_label(draws, question.labels, statements, temperature)
    quoted = _draw_quotes(draws, statements, answer=question.labels.index(label))
    return _join_statements(quoted), label


def _draw_label(
    draws: random.Random, labels: Sequence[str], statements: Sequence[Statement], temperature: float
) -> str:
    """Draw a label from p^(1/T), normalised, by inverting the cumulative distribution."""
    scores = []  # log p^(1/T)
    for probability in posterior(statements, len(labels)):
        score = math.log(probability) / temperature if probability > 0 else -math.inf  # p may round to 0
        scores.append(score)
    point = draws.random()
    for label, probability in zip(labels, _softmax(scores), strict=True):
        point -= probability
        if point < 0:
            return label
    return labels[-1]  # rounding may make the probabilities sum to slightly less than 1


def _draw_quotes(draws: random.Random, statements: Sequence[Statement], answer: int) -> list[Statement]:
    """Draw which statements the reasoning quotes: at least one, mostly those that name the answer."""
    quoted = []
    for statement in statements:
        chance = QUOTE_SUPPORT if statement.option == answer else QUOTE_OTHER
        if draws.random() < chance:
            quoted.append(statement)
    if quoted:
        return quoted
    # The reasoning must not be empty: quote the most reliable witness, preferably among those who name the answer.
    best = max(statements, key=lambda statement: (statement.option == answer, statement.reliability))
    return [best]
