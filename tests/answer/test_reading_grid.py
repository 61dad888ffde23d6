"""No response is read wrongly: a grid of generated responses whose answers are known by how they were made.

Every response is built around the label that it answers with, or around none. The expected label comes from the builder
alone. A response may be missed, but only a canonical one never is; a wrong label is never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from catto.answer.response import parse_response


class Case(NamedTuple):
    text: str
    truth: str | None


class World(NamedTuple):
    """Labels and option texts; `right` is answered with, `other` is what must not be read."""

    labels: tuple[str, ...]
    texts: tuple[str, ...] | None
    right: str
    other: str


WORLDS = [
    World(("A", "B", "C", "D"), ("green grass", "blue sky", "a red rose", "both A and B"), "B", "A"),
    World(("entailment", "neutral", "contradiction"), None, "neutral", "entailment"),
    World(("1", "2", "3"), ("12", "7", "1.5"), "2", "1"),
    World(("I", "II", "III"), None, "II", "I"),
]
DRESSES = [
    "{}",
    "({})",
    "**{}**",
    "**({})**",
    r"\boxed{{{}}}",
    r"$\boxed{{\text{{{}}}}}$",
    '"{}"',
    "{}.",
    "`{}`",
    "### {}",
]
STATEMENTS = [
    *("The answer is {}.", "Answer: {}", "Final answer: **{}**", "**Answer:** ({})", "The correct answer is **{}**."),
    *("So the correct option is {}.", "I choose {}.", r"The final answer is $\boxed{{{}}}$.", "Option {} is correct."),
    *("Final answer:\n{}", "Answer\n\n{}", "{} is the correct answer."),
]
REASONS = ["", "Look up.\n", "Look up.\n\nThere it is, above the grass.\n\n", "- look up\n- look down\n\n"]
MARKERS = [
    "\n\nQuestion: Is it?",
    "\nQ: Is it?",
    "\n**Question 2:** Is it?",
    "\nPremise: it is.",
    "\nUser: Sure?",
    "\nHuman: Sure?",
]
TOKENS = ["<|im_end|>\n", "</s>", "<|endoftext|>", "<end_of_turn>\n"]
# Texts in which the other label is mentioned, stated or put into tags.
DISTRACTIONS = [
    *(
        "The answer is {}.",
        "{}",
        "Maybe {}?",
        "<answer>{}</answer>",
        "I must not write <answer>{}</answer> because",
        "so {}",
    ),
    *(
        "<answer>\n{}\n</answer>\nWait.",
        "Answer: {}\n\nQuestion: is it?\nNo.",
        "User: {}",
        "<answer>{}",
        "Answer\n\n{}",
    ),
]
# The other label before or after the right one: neither is the answer.
CONFLICTS = [
    *(
        "{0} or {1}",
        "{0} and {1}",
        "{0}, {1}",
        "{0}/{1}",
        "{0}\n{1}",
        "<s>{0}</s> {1}",
        "~~{0}~~ {1}",
        "<del>{0}</del> {1}",
    ),
    *(
        "not {1}",
        "Not {0}, {1}",
        "{1}?",
        "{1}, not {0}",
        "{0} -> {1}",
        "Answer: {0}\nAnswer: {1}",
        "{1} is wrong",
        "{1}...",
    ),
    *(
        "The answer is {0}.\nThe answer is {1}.",
        "({0}) ({1})",
        "**{0}** **{1}**",
        "either {0} or {1}",
        "anything but {1}",
    ),
    *(
        "The answer is not {1}",
        "The answer is not\n{1}",
        "{0}\n\nThe answer is {1}.",
        "{1} is not correct",
        "no answer: {1}",
    ),
    *(
        "The answer is {1}, or {0}",
        r"\cancel{{{1}}}",
        "Wrong: {1}",
        "Maybe {1}",
        "{1} (not {0})",
        "{0} {1}",
        "User: {1}",
    ),
]
# What takes a statement or a last line away from the one who writes it.
DENIALS = [
    *("The following is wrong:", "Some claim:", "**Wrong answers:**", "It would be wrong to say:", "Not the answer:"),
    *("My friend, whom I do not trust, said:", "Options that I ruled out:", "# Common mistakes:", "It is false that"),
]


def tagged(world: World) -> Iterator[Case]:
    """Answers in tags, after reasoning of every kind."""
    right = world.right
    others = [text.format(world.other) for text in DISTRACTIONS]
    for form in [*DRESSES, *STATEMENTS]:
        answer = form.format(right)
        for reason in REASONS:
            yield Case(f"{reason}<answer>{answer}</answer>", right)
            yield Case(f"{reason}<answer>\n{answer}\n", right)
        for other in others:
            yield Case(f"<think>\n{other}\n</think>\n<answer>\n{answer}\n</answer>", right)
            yield Case(f"{other}\n</think>\n<answer>\n{answer}\n</answer>", right)
            yield Case(f"<think>a <think>b {other}</think>\n{other}</think>\n<answer>{answer}</answer>", right)
            yield Case(f"<think>{other}</think>\n<answer>{answer}</answer> {world.other} is wrong.", right)
            yield Case(f"<think>so\n{other}\n<answer>\n{answer}\n</answer>", None)
            yield Case(f"<think>so</think>\n<think>{other}\n<answer>{answer}</answer>", None)
        yield Case(f"<answer>{world.other}</answer>\nWait.\n<answer>{answer}</answer>", right)
        yield Case(f"<think>{answer}", None)
        yield Case(f"<think>so {answer}\n", None)


def running_on(world: World) -> Iterator[Case]:
    """A next turn after the answer, and what looks like one before it."""
    right = world.right
    nexts = [
        "\n<answer>{}</answer>",
        "\n<think>so</think>\n<answer>\n{}\n</answer>",
        "\nThe answer is {}.",
        "\n{}",
        "\nAnswer: {}",
    ]
    for form, marker, following in itertools.product([*DRESSES, *STATEMENTS], [*MARKERS, *TOKENS], nexts):
        answer = form.format(right)
        turn = marker + following.format(world.other)
        yield Case(f"<think>so</think>\n<answer>\n{answer}\n</answer>{turn}", right)
        yield Case(f"<answer>{answer}</answer>{turn}", right)
        if "answer>" not in following:
            yield Case(f"Look up.\n\n{answer}{turn}", right)
            yield Case(f"<answer>\n{answer}{turn}", right)
            yield Case(f"I cannot say.{turn}", None)
    for form, marker, think in itertools.product(DRESSES, MARKERS, ["", "</think>\n"]):
        answer = form.format(right)
        for before in ("The answer is {}.", "{}", "Answer: {}"):
            head = before.format(world.other)
            yield Case(f"{head}{marker}\nNo.\n{think}<answer>\n{answer}\n</answer>", right)


def conflicting(world: World) -> Iterator[Case]:
    """Two labels, a label that is denied, a label that someone else gives: no answer."""
    right, other = world.right, world.other
    for conflict, reason in itertools.product(CONFLICTS, REASONS):
        for first, second in ((other, right), (right, other)):
            text = conflict.format(first, second)
            yield Case(f"{reason}<answer>{text}</answer>", None)
            yield Case(f"<think>so</think>\n{reason}<answer>\n{text}\n", None)
            yield Case(f"{reason}{text}", None)
            yield Case(f"<think>so</think>\n{reason}{text}", None)
    for one, two, reason in itertools.product(STATEMENTS, [*STATEMENTS, *DRESSES], REASONS[1:]):
        yield Case(f"{reason}{one.format(other)}\n\n{two.format(right)}", None)
        yield Case(f"{reason}{one.format(other)}\nWait.\n{two.format(right)}", None)
    for denial, form, reason in itertools.product(DENIALS, [*STATEMENTS, *DRESSES], REASONS):
        if "\n" not in form:
            yield Case(f"{reason}{denial}\n{form.format(right)}", None)
            yield Case(f"{reason}{denial}\n\n{form.format(right)}", None)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "/".join((*world.labels, world.right)))
def test_nothing_is_read_wrongly(world: World) -> None:
    """More than 20,000 responses over the worlds."""
    cases = list(dict.fromkeys([*tagged(world), *running_on(world), *conflicting(world)]))
    assert len(cases) * len(WORLDS) > 20_000
    wrong = []
    missed = 0
    for text, truth in cases:
        found = parse_response(text, world.labels, world.texts).label
        if found not in (truth, None):
            wrong.append((text, truth, found))
        missed += found is None and truth is not None
    assert wrong == []
    assert missed <= 0.02 * len(cases)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: "/".join((*world.labels, world.right)))
def test_a_canonical_answer_is_never_missed(world: World) -> None:
    for distraction in DISTRACTIONS:
        text = f"<think>\n{distraction.format(world.other)}\n</think>\n<answer>\n{world.right}\n</answer>"
        assert parse_response(text, world.labels, world.texts).label == world.right
