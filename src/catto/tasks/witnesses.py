"""The embedded world: questions whose true posterior is known, and a teacher for them. Needs no download.

A coin lies in one of K boxes, drawn uniformly. Each of n witnesses has a stated reliability r, drawn uniformly from a
few classes: with probability r it names the right box, else one of the K - 1 others at random.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from catto.records import Option, Question, Split, content_hash
from catto.tasks.rows import LETTERS, Task
from catto.tasks.splits import digest

RELIABILITIES = (0.35, 0.5, 0.75)
SIZES: dict[Split, int] = {"train": 6000, "validation": 500, "test": 1000}
# How often the teacher quotes a witness who supports the answer it is heading for, and one who does not.
QUOTE_SUPPORT, QUOTE_OTHER = 0.9, 0.3
# Of ten equal shares of all possible sets of statements, so that no set stands in two splits of any seed.
_SHARES: dict[Split, range] = {"train": range(8), "validation": range(8, 9), "test": range(9, 10)}
_MOST_TRIES = 10_000

_ASK = "Where is the coin?"
_STATEMENT = re.compile(r"^([0-9.]+)% says ([A-Z])$", re.MULTILINE)


class Statement(NamedTuple):
    """One witness: how often it is right, and the index of the option it names."""

    reliability: float
    option: int

    def __str__(self) -> str:
        return f"{100 * self.reliability:g}% says {LETTERS[self.option]}"


def posterior(statements: Sequence[Statement], options: int) -> list[float]:
    """P(gold = k | statements), by Bayes' rule from a uniform prior: prod_w (r_w if named, else (1 - r_w)/(K - 1))."""
    scores = [0.0] * options
    for reliability, named in statements:
        for option in range(options):
            scores[option] += math.log(reliability if option == named else (1 - reliability) / (options - 1))
    return _normalised(scores)


def _normalised(scores: Sequence[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def generate(
    split: Split,
    n: int,
    *,
    seed: int,
    options: int = 4,
    witnesses: int = 4,
    reliabilities: Sequence[float] = RELIABILITIES,
) -> Iterator[Question]:
    """Yield `n` questions; the first questions of a longer run are those of a shorter one."""
    _check(n, options, witnesses, reliabilities)
    world = content_hash([options, witnesses, list(reliabilities)], 6)
    return (_question(world, split, seed, index, options, witnesses, reliabilities) for index in range(n))


def _check(n: int, options: int, witnesses: int, reliabilities: Sequence[float]) -> None:
    if n < 0:
        raise ValueError(f"n {n}: expected at least 0")
    if not 2 <= options <= len(LETTERS):
        raise ValueError(f"options {options}: expected 2 to {len(LETTERS)}")
    if witnesses < 1:
        raise ValueError(f"witnesses {witnesses}: expected at least 1")
    if not reliabilities or not all(0 < value < 1 for value in reliabilities):
        raise ValueError(f"reliabilities {tuple(reliabilities)}: expected numbers between 0 and 1, at least one")
    for value in reliabilities:
        if float(f"{100 * value:g}") / 100 != value:  # the text must say exactly what the posterior uses
            raise ValueError(f"reliabilities: {value} is not a percentage of at most six digits")


def _question(
    world: str, split: Split, seed: int, index: int, options: int, witnesses: int, reliabilities: Sequence[float]
) -> Question:
    key = f"witnesses-{world}-{split}-{seed}-{index}"
    draws = _draws(key)
    for _ in range(_MOST_TRIES):
        gold = int(draws.random() * options)
        statements = [_statement(draws, gold, options, reliabilities) for _ in range(witnesses)]
        text = "\n".join(map(str, statements))
        # Decided by the statements alone, so that P(gold | statements) stays what Bayes' rule says.
        if digest("share", text)[0] * 10 // 256 in _SHARES[split]:
            return _asked(key, split, text, gold, posterior(statements, options))
    raise ValueError(f"witnesses {witnesses}: too few different sets of statements to give {split} its own")


def _draws(*key: object) -> random.Random:
    return random.Random(int.from_bytes(digest(*key), "big"))


def _statement(draws: random.Random, gold: int, options: int, reliabilities: Sequence[float]) -> Statement:
    reliability = reliabilities[int(draws.random() * len(reliabilities))]
    if draws.random() < reliability:
        return Statement(reliability, gold)
    other = int(draws.random() * (options - 1))
    return Statement(reliability, other + (other >= gold))


def _asked(key: str, split: Split, text: str, gold: int, probabilities: list[float]) -> Question:
    labels = LETTERS[: len(probabilities)]
    return Question(
        id=key,
        task="witnesses",
        split=split,
        fields={"question": f"{_ASK}\n{text}"},
        options=tuple(Option(label=label, text=label) for label in labels),
        gold=labels[gold],
        posterior=dict(zip(labels, probabilities, strict=True)),
    )


def statements_of(question: Question) -> list[Statement]:
    """Read the statements back from the question's own text."""
    found = _STATEMENT.findall(question.fields.get("question", ""))
    if not found:
        raise ValueError(f"question {question.id}: no witness in its text")
    return [Statement(float(percent) / 100, question.labels.index(label)) for percent, label in found]


def bayes_answer(question: Question) -> str:
    """The label of the largest posterior probability, the first of equals."""
    exact = _exact(question)
    return max(exact, key=lambda label: exact[label])


def _exact(question: Question) -> dict[str, float]:
    if question.posterior is not None:
        return question.posterior
    return dict(zip(question.labels, posterior(statements_of(question), len(question.labels)), strict=True))


def respond(question: Question, temperature: float, seed: int) -> tuple[str, str]:
    """Answer as the built-in teacher: the label is drawn from p^(1/T), normalised; then the reasoning leads to it."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature {temperature}: expected a finite number, at least 0")
    draws = _draws("respond", question.id, repr(float(temperature)), seed)
    label = bayes_answer(question) if temperature == 0 else _drawn_label(draws, question, temperature)
    return _reasoning(draws, statements_of(question), question.labels.index(label)), label


def _drawn_label(draws: random.Random, question: Question, temperature: float) -> str:
    exact = _exact(question)
    weights = _normalised([math.log(value) / temperature if value > 0 else -math.inf for value in exact.values()])
    point, last = draws.random(), ""
    for label, weight in zip(exact, weights, strict=True):
        last, point = label, point - weight
        if point < 0:
            break
    return last


def _reasoning(draws: random.Random, statements: list[Statement], answer: int) -> str:
    """Quote witnesses in their order, mostly those for the answer, without saying the answer itself."""
    chances = [QUOTE_SUPPORT if one.option == answer else QUOTE_OTHER for one in statements]
    quoted = [one for one, chance in zip(statements, chances, strict=True) if draws.random() < chance]
    # No quote at all would leave the reasoning empty.
    return "\n".join(map(str, quoted or [max(statements, key=lambda one: (one.option == answer, one.reliability))]))


def _default(split: Split, n: int | None, seed: int) -> Iterator[Question]:
    return generate(split, SIZES[split] if n is None else n, seed=seed)


TASK = Task(
    name="witnesses",
    labels=LETTERS[:4],
    licence="Apache-2.0 (generated)",
    source="generated here, with the exact posterior of every question",
    generate=_default,
    order="fixed",
    sample=None,
)
