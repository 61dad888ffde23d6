"""The embedded world: questions whose true posterior is known, and a teacher for them. Needs no download.

A coin lies in one of K boxes, drawn uniformly. Each of n witnesses has a stated reliability r, drawn uniformly from a
few classes: with probability r it names the right box, else one of the K - 1 others at random.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import NamedTuple

from catto.records import Option, Question, Split, content_hash
from catto.tasks.splits import digest

RELIABILITIES = (0.35, 0.5, 0.75)
SIZES: dict[Split, int] = {"train": 6000, "validation": 500, "test": 1000}
# How often the teacher quotes a witness who supports the answer it is heading for, and one who does not.
QUOTE_SUPPORT, QUOTE_OTHER = 0.9, 0.3
# Of ten equal shares of all possible sets of statements, so that no set is in two splits of any seed.
_SHARES: dict[Split, range] = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
_MOST_TRIES = 10_000

_ASK = "Where is the coin?"
_STATEMENT = re.compile(r"^([0-9.]+)% says ([A-Z])$", re.MULTILINE)


class Statement(NamedTuple):
    """One witness: how often it is right, and the index of the option it names."""

    reliability: float
    option: int

    def __str__(self) -> str:
        return f"{100 * self.reliability:g}% says {ascii_uppercase[self.option]}"


def posterior(statements: Sequence[Statement], options: int) -> list[float]:
    """P(gold = k | statements), by Bayes' rule from a uniform prior: prod_w (r_w if named, else (1 - r_w)/(K - 1)).

    >>> [round(14 * p, 9) for p in posterior([Statement(0.75, 0), Statement(0.5, 1)], 4)]
    [9.0, 3.0, 1.0, 1.0]
    """
    scores = [0.0] * options
    for reliability, named in statements:
        for option in range(options):
            scores[option] += math.log(reliability if option == named else (1 - reliability) / (options - 1))
    return _softmax(scores)


def _softmax(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def generate(
    split: Split,
    n: int | None,
    *,
    seed: int,
    options: int = 4,
    witnesses: int = 4,
    reliabilities: Sequence[float] = RELIABILITIES,
) -> Iterator[Question]:
    """Yield `n` questions, None: as many as the split has; the first of a longer run are those of a shorter one.

    >>> question = next(generate("test", 1, seed=0))
    >>> question.labels, round(sum(question.posterior.values()), 9)
    (('A', 'B', 'C', 'D'), 1.0)
    """
    n = SIZES[split] if n is None else n
    if not 2 <= options <= len(ascii_uppercase):
        raise ValueError(f"options {options}: expected 2 to {len(ascii_uppercase)}")
    if witnesses < 1:
        raise ValueError(f"witnesses {witnesses}: expected at least 1")
    if not reliabilities or not all(0 < value < 1 for value in reliabilities):
        raise ValueError(f"reliabilities {tuple(reliabilities)}: expected numbers between 0 and 1, at least one")
    # The text must say exactly what the posterior uses.
    if inexact := [value for value in reliabilities if float(f"{100 * value:g}") / 100 != value]:
        raise ValueError(f"reliabilities: {inexact[0]} is not a percentage of at most six digits")
    world = content_hash([options, witnesses, list(reliabilities)], 6)
    keys = (f"witnesses-{world}-{split}-{seed}-{index}" for index in range(n))
    return (_question(key, split, options, witnesses, reliabilities) for key in keys)


def _question(key: str, split: Split, options: int, witnesses: int, reliabilities: Sequence[float]) -> Question:
    """Draw a gold option and statements about it until the statements belong to the split."""
    draws = random.Random(int.from_bytes(digest(key), "big"))
    for _ in range(_MOST_TRIES):
        gold = int(draws.random() * options)
        statements: list[Statement] = []
        for _ in range(witnesses):
            reliability, named = reliabilities[int(draws.random() * len(reliabilities))], gold
            if draws.random() >= reliability:
                other = int(draws.random() * (options - 1))
                named = other + (other >= gold)
            statements.append(Statement(reliability, named))
        text = "\n".join(map(str, statements))
        # Decided by the statements alone, so that P(gold | statements) stays what Bayes' rule says.
        if digest("share", text)[0] * 10 // 256 in _SHARES[split]:
            labels = ascii_uppercase[:options]
            return Question(
                id=key,
                task="witnesses",
                split=split,
                fields={"question": f"{_ASK}\n{text}"},
                options=tuple(Option(label=label, text=label) for label in labels),
                gold=labels[gold],
                posterior=dict(zip(labels, posterior(statements, options), strict=True)),
            )
    raise ValueError(f"witnesses {witnesses}: too few different sets of statements to give {split} its own")


def statements_of(question: Question) -> list[Statement]:
    """Read the statements back from the question's own text."""
    matches = _STATEMENT.findall(question.fields.get("question", ""))
    if not matches:
        raise ValueError(f"question {question.id}: no witness in its text")
    return [Statement(float(percent) / 100, question.labels.index(label)) for percent, label in matches]


def bayes_answer(question: Question) -> str:
    """The label of the largest posterior probability, the first in case of a tie."""
    exact = posterior(statements_of(question), len(question.labels))
    return question.labels[exact.index(max(exact))]


def respond(question: Question, temperature: float, seed: int) -> tuple[str, str]:
    """Answer as the built-in teacher; return reasoning and label.

    The label is drawn from p^(1/T), normalised. The reasoning then quotes witnesses in their order, mostly those for
    the label, without giving the answer itself.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature {temperature}: expected a finite number, at least 0")
    draws = random.Random(int.from_bytes(digest("respond", question.id, repr(float(temperature)), seed), "big"))
    label, statements = bayes_answer(question), statements_of(question)
    if temperature > 0:
        exact = posterior(statements, len(question.labels))
        weights = _softmax([math.log(value) / temperature if value > 0 else -math.inf for value in exact])
        point = draws.random()
        for candidate, weight in zip(question.labels, weights, strict=True):
            label, point = candidate, point - weight
            if point < 0:
                break
    answer = question.labels.index(label)
    chances = [QUOTE_SUPPORT if statement.option == answer else QUOTE_OTHER for statement in statements]
    quoted = [statement for statement, chance in zip(statements, chances, strict=True) if draws.random() < chance]
    if not quoted:  # no quote at all would leave the reasoning empty
        quoted = [max(statements, key=lambda statement: (statement.option == answer, statement.reliability))]
    return "\n".join(map(str, quoted)), label
