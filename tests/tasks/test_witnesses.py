"""The embedded world: exact posterior, calibrated by construction, and its teacher."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from catto.records import SPLITS, Question
from catto.tasks import load_questions
from catto.tasks.splits import owns_generated
from catto.tasks.witnesses import (
    RELIABILITIES,
    Statement,
    bayes_answer,
    generate_questions,
    posterior,
    respond,
    statements_of,
)


@pytest.fixture(scope="module")
def many() -> list[Question]:
    return list(generate_questions("train", 20_000, seed=0))


def test_two_witnesses_by_hand() -> None:
    """K = 4; 0.75 says A, 0.5 says B. A: 3/4 * 1/6 = 1/8; B: 1/12 * 1/2 = 1/24; C and D: 1/12 * 1/6 = 1/72.

    In 72nds 9 : 3 : 1 : 1, so 9/14, 3/14, 1/14, 1/14.
    """
    assert posterior([Statement(0.75, 0), Statement(0.5, 1)], 4) == pytest.approx(
        [9 / 14, 3 / 14, 1 / 14, 1 / 14], abs=1e-15
    )


def test_agreeing_witnesses_of_two_options_multiply_their_odds() -> None:
    """K = 2: odds 3 : 1 and 3 : 1 for A give 9 : 1."""
    assert posterior([Statement(0.75, 0), Statement(0.75, 0)], 2) == pytest.approx([0.9, 0.1], abs=1e-15)


def test_a_witness_at_chance_says_nothing() -> None:
    assert posterior([Statement(0.25, 2)], 4) == pytest.approx([0.25] * 4, abs=1e-15)


def test_a_thousand_witnesses_do_not_underflow() -> None:
    assert posterior([Statement(0.35, 1)] * 1000, 4) == pytest.approx([0, 1, 0, 0], abs=1e-15)


def exact_bayes_accuracy() -> float:
    """Sum over all 3^4 * 4^4 sets of statements of P(classes) * max_k P(k, statements), by plain products."""
    total = 0.0
    for classes in itertools.product(RELIABILITIES, repeat=4):
        for said in itertools.product(range(4), repeat=4):
            joint = [
                math.prod(r if s == k else (1 - r) / 3 for r, s in zip(classes, said, strict=True)) / 4
                for k in range(4)
            ]
            total += max(joint) / 3**4
    return total


def test_the_bayes_answer_is_right_three_times_in_four(many: list[Question]) -> None:
    """The exact rate is 74.8 %; on 20,000 questions the standard deviation is 0.31 points."""
    assert exact_bayes_accuracy() == pytest.approx(0.7477, abs=1e-4)
    rate = np.mean([bayes_answer(one) == one.gold for one in many])
    assert rate == pytest.approx(exact_bayes_accuracy(), abs=4 * 0.0031)


def test_the_posterior_is_calibrated(many: list[Question]) -> None:
    """Within each tenth, the share of golds differs from the mean probability by sampling noise alone (4 sigma)."""
    pairs = [(p, label == one.gold) for one in many for label, p in (one.posterior or {}).items()]
    p, hit = np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])
    for low in np.arange(0, 1, 0.1):
        inside = (p > low) & (p <= low + 0.1)
        noise = math.sqrt(float(np.sum(p[inside] * (1 - p[inside])))) / inside.sum()
        assert abs(hit[inside].mean() - p[inside].mean()) < 4 * noise


def test_golds_and_classes_are_uniform(many: list[Question]) -> None:
    """20,000 golds over 4: sigma 61; 80,000 witnesses over 3 classes: sigma 133, and the split's share of the sets."""
    assert all(abs(count - 5000) < 4 * 62 for count in Counter(one.gold for one in many).values())
    classes = Counter(statement.reliability for one in many for statement in statements_of(one))
    assert set(classes) == set(RELIABILITIES)
    assert all(abs(count - 80_000 / 3) < 800 for count in classes.values())


def test_splits_share_neither_ids_nor_statements() -> None:
    parts = [[one for seed in (0, 1) for one in generate_questions(split, 500, seed=seed)] for split in SPLITS]
    ids = [one.id for part in parts for one in part]
    assert len(set(ids)) == len(ids)
    texts = [{one.fields["question"] for one in part} for part in parts]
    assert not texts[0] & texts[1]
    assert not texts[0] & texts[2]
    assert not texts[1] & texts[2]


def test_a_longer_run_starts_with_the_shorter_one_and_seeds_differ() -> None:
    assert list(generate_questions("test", 50, seed=1))[:20] == list(generate_questions("test", 20, seed=1))
    assert list(generate_questions("test", 20, seed=1)) != list(generate_questions("test", 20, seed=2))


def test_the_text_carries_all_that_the_posterior_needs(many: list[Question]) -> None:
    for one in many[:500]:
        assert list((one.posterior or {}).values()) == posterior(statements_of(one), 4)


def test_the_vocabulary_is_small(many: list[Question]) -> None:
    words = {word for one in many for word in one.fields["question"].split()}
    assert words == {"Where", "is", "the", "coin?", "says", *"ABCD", "35%", "50%", "75%"}


def share(split: Any, options: int, witnesses: int, reliabilities: list[float]) -> float:
    """The probability that a set of statements belongs to the split, summed over all sets of a small world."""
    kinds = [Statement(reliability, option) for reliability in reliabilities for option in range(options)]
    assert len(kinds) ** witnesses < 100_000, "a world of such variety has sets for every split"
    total = 0.0
    for statements in itertools.product(kinds, repeat=witnesses):
        if owns_generated("\n".join(map(str, statements)), split):
            total += math.fsum(
                math.prod(r if said == gold else (1 - r) / (options - 1) for r, said in statements)
                for gold in range(options)
            )
    return total / options / len(reliabilities) ** witnesses


@settings(max_examples=30, deadline=None)
@example(2, 3, [2], "validation")
@example(2, 3, [2], "test")
@given(
    st.integers(2, 8),
    st.integers(3, 8),
    st.lists(st.integers(1, 99), min_size=1, max_size=4, unique=True),
    st.sampled_from(SPLITS),
)
def test_every_world_sums_to_one_and_answers_its_own_labels(
    options: int, witnesses: int, percents: list[int], split: Any
) -> None:
    """A world may refuse a split, but only one that has next to none of its sets of statements."""
    reliabilities = [percent / 100 for percent in percents]
    refused = ""
    try:
        (question,) = generate_questions(
            split, 1, seed=0, options=options, witnesses=witnesses, reliabilities=reliabilities
        )
    except ValueError as error:
        refused = str(error)
    if refused:
        assert refused == f"witnesses {witnesses}: too few different sets of statements to give {split} its own"
        # Ten thousand tries miss a share of 0.003 once in 1e13 times.
        assert share(split, options, witnesses, reliabilities) < 0.003
        return
    assert math.fsum((question.posterior or {}).values()) == pytest.approx(1, abs=1e-12)
    assert len(statements_of(question)) == witnesses
    assert {one.reliability for one in statements_of(question)} <= set(reliabilities)
    assert respond(question, 1.0, 0)[1] in question.labels


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"options": 1}, "options 1: expected 2 to 26"),
        ({"witnesses": 0}, "witnesses 0: expected at least 1"),
        ({"reliabilities": ()}, "reliabilities"),
        ({"reliabilities": (0.5, 1.0)}, "reliabilities"),
        ({"reliabilities": (1 / 3,)}, "reliabilities: 0.333"),
        ({"options": 2, "witnesses": 1, "reliabilities": (0.5,)}, "witnesses 1: too few different sets of statements"),
    ],
)
def test_a_bad_knob_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        [list(generate_questions(split, **{"n": 1, "seed": 0, **options})) for split in SPLITS]
    assert str(caught.value).startswith(said)


def two_witnesses() -> Question:
    return next(
        one
        for one in generate_questions("train", 10_000, seed=0, witnesses=2)
        if sorted(statements_of(one)) == [Statement(0.5, 1), Statement(0.75, 0)]
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_teacher_draws_from_the_posterior_at_its_temperature(temperature: float) -> None:
    """9 : 3 : 1 : 1 to the power 1/T, over 4,000 seeds: within four standard deviations of 0.8 points at most."""
    question = two_witnesses()
    weights = np.array([9.0, 3.0, 1.0, 1.0]) ** (1 / temperature)
    drawn = Counter(respond(question, temperature, seed)[1] for seed in range(4000))
    for label, expected in zip("ABCD", weights / weights.sum(), strict=True):
        assert drawn[label] / 4000 == pytest.approx(expected, abs=4 * 0.008)


def test_temperature_zero_gives_the_bayes_answer(many: list[Question]) -> None:
    assert all(respond(one, 0, 3)[1] == bayes_answer(one) for one in many[:200])
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            respond(many[0], bad, 0)


def test_a_response_is_fixed_by_question_temperature_and_seed(many: list[Question]) -> None:
    copy = Question.model_validate_json(many[0].model_dump_json())
    assert respond(many[0], 0.8, 5) == respond(copy, 0.8, 5)
    assert respond(many[0], 0.8, 5) == respond(copy.model_copy(update={"posterior": None}), 0.8, 5)
    assert len({respond(many[0], 0.8, seed) for seed in range(30)}) > 1


def test_reasoning_quotes_witnesses_in_order_and_leans_to_its_answer(many: list[Question]) -> None:
    quoted, all_of = Counter[bool](), Counter[bool]()
    for one in many[:3000]:
        reasoning, label = respond(one, 1.0, 0)
        lines, said = reasoning.split("\n"), [str(statement) for statement in statements_of(one)]
        walk = iter(said)
        assert lines
        assert all(line in walk for line in lines)
        all_of.update(line.endswith(label) for line in said)
        quoted.update(line.endswith(label) for line in lines)
    assert quoted[True] / all_of[True] == pytest.approx(0.9, abs=0.03)
    assert quoted[False] / all_of[False] == pytest.approx(0.3, abs=0.03)


def test_keeping_only_right_traces_sharpens_the_labels(many: list[Question]) -> None:
    """Why overconfidence arises: among right answers the Bayes label is more frequent than its probability."""
    answers = [(one, respond(one, 1.0, 1)[1]) for one in many[:4000]]
    right = [one for one, label in answers if label == one.gold]
    share = np.mean([bayes_answer(one) == one.gold for one in right])
    honest = np.mean([max((one.posterior or {}).values()) for one in right])
    assert share > honest + 0.05


def test_the_table_entry_generates(many: list[Question]) -> None:
    loaded = load_questions("witnesses", "train", seed=0, limit=30)
    assert list(loaded) == many[:30]
    assert (loaded.report.read, loaded.report.kept) == (30, 30)
    assert len(list(load_questions("witnesses", "test", seed=4))) == 1000
