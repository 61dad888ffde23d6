"""The mean over seeds: values, intervals, null bands and paired tests against their plain definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catto.metrics.catalogue import accuracy, auroc, brier, confidence_gap, ece
from catto.metrics.statistics import Answers, compare, null_band
from catto.report.seeds import Name, mean_difference, mean_interval, mean_null, scored

METRIC = {"accuracy": accuracy, "ece": ece, "brier": brier, "auroc": auroc, "gap": confidence_gap}
NAMES: tuple[Name, ...] = ("accuracy", "ece", "brier", "auroc", "gap")


def rows(seed: int, n: int = 90) -> tuple[list[str], Any, Any]:
    draws = np.random.default_rng(seed)
    c = np.round(draws.random(n), 2)
    return [f"q{i}" for i in range(n)], c, draws.random(n) < c**1.5


@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_one_seed_is_the_metric_itself(name: Name) -> None:
    question, c, z = rows(0)
    assert scored(name, question, c, z).value() == pytest.approx(METRIC[name](c, z), abs=1e-14)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.integers(0, 3)), min_size=1, max_size=25))
def test_weights_count_rows_as_often_as_they_say(answers: list[tuple[float, bool, int]]) -> None:
    """A row of weight 3 is three such rows; of weight 0, none."""
    c, z, times = (np.array(column) for column in zip(*answers, strict=True))
    question = [str(place) for place in range(len(c))]
    for name in ("auroc", "brier", "gap"):
        found = scored(name, question, c, z).values(times[None, :].astype(float))[0]
        wanted = METRIC[name](np.repeat(c, times), np.repeat(z, times)) if times.sum() else np.nan
        assert found == pytest.approx(wanted, abs=1e-12, nan_ok=True), name


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40), st.integers(1, 25))
def test_ece_as_sums_of_parts_is_ece_for_any_rows_and_bins(answers: list[tuple[float, bool]], bins: int) -> None:
    c, z = zip(*answers, strict=True)
    question = [str(place) for place in range(len(c))]
    assert scored("ece", question, c, z, bins).value() == pytest.approx(ece(c, z, bins=bins), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_p_value_of_one_seed_is_that_of_compare(name: Name) -> None:
    question, c, z = rows(0)
    _, c_b, z_b = rows(1)
    back = list(range(len(question)))[::-1]
    shuffled = scored(name, [question[i] for i in back], c_b[back], z_b[back])
    found = mean_difference([scored(name, question, c, z)], [shuffled], resamples=300)
    wanted = compare(METRIC[name], Answers(question, c, z), Answers(question, c_b, z_b), resamples=300)
    assert found.p_value == wanted.p_value
    assert found.difference == pytest.approx(wanted.difference, abs=1e-14)
    assert found.low == pytest.approx(wanted.low, abs=0.03)
    assert found.high == pytest.approx(wanted.high, abs=0.03)


def test_the_null_band_of_one_seed_is_null_band() -> None:
    _, c, _ = rows(0)
    found, wanted = mean_null([c], simulations=250), null_band(ece, c, simulations=250)
    assert (found.mean, found.low, found.high) == pytest.approx((wanted.mean, wanted.low, wanted.high), abs=1e-12)


def test_the_null_band_of_a_mean_over_seeds_is_narrower_and_has_the_mean_of_the_means() -> None:
    confidences = [rows(seed)[1] for seed in range(4)]
    single = [mean_null([c], simulations=400) for c in confidences]
    together = mean_null(confidences, simulations=400)
    assert together.mean == pytest.approx(np.mean([band.mean for band in single]), abs=0.003)
    assert together.high - together.low < 0.7 * np.mean([band.high - band.low for band in single])


def test_equal_methods_have_no_difference_and_p_value_one() -> None:
    seeds = [scored("ece", *rows(seed)) for seed in range(3)]
    found = mean_difference(seeds, seeds, resamples=100)
    assert (found.difference, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_a_question_shared_by_all_seeds_is_swapped_in_all_of_them() -> None:
    """Two questions, three seeds, a right and b wrong on both. Swapping one question gives 0, both or none +-1.

    So |difference| >= 1 for half of the swaps: p is near 1/2. Swapped seed by seed it would be near 2 / 2**6.
    """
    a = [scored("accuracy", ["x", "y"], [0.5, 0.5], [1, 1])] * 3
    b = [scored("accuracy", ["x", "y"], [0.5, 0.5], [0, 0])] * 3
    assert mean_difference(a, b, resamples=1000).p_value == pytest.approx(0.5, abs=0.05)


def test_the_interval_of_the_mean_holds_the_mean_accuracy_and_has_binomial_width() -> None:
    """100 questions, 3 seeds with the same answers: the interval is that of one seed, about 2 * 1.96 * 0.05 wide."""
    question, c = [str(i) for i in range(100)], np.full(100, 0.5)
    seeds = [scored("accuracy", question, c, np.arange(100) % 2 == 0)] * 3
    found = mean_interval(seeds, resamples=2000)
    assert found.value == 0.5
    assert found.high - found.low == pytest.approx(0.196, abs=0.02)


def test_only_a_test_that_may_show_something_is_carried_on() -> None:
    """100 swaps first. A difference of 40 points then gets 2,000; two draws of the same model stay at 100."""
    question, c, z = rows(0, 300)
    worse = scored("ece", question, np.clip(c + 0.4, 0, 1), z)
    clear = mean_difference([scored("ece", question, c, z)], [worse], resamples=100, swaps=2000)
    assert clear.p_value == 1 / 2001
    unclear = mean_difference([scored("ece", question, c, z)], [scored("ece", *rows(0, 300))], 100, swaps=2000)
    assert unclear.p_value == 1.0
    _, c_b, z_b = rows(1, 300)
    other = mean_difference([scored("ece", question, c, z)], [scored("ece", question, c_b, z_b)], 100, swaps=2000)
    assert other.p_value >= 0.05
    assert other.p_value * 101 == pytest.approx(round(other.p_value * 101))


def test_an_undefined_auroc_has_no_p_value() -> None:
    a, b = (scored("auroc", ["x", "y"], [0.5, 0.6], right) for right in ([1, 1], [1, 0]))
    assert np.isnan(mean_difference([a], [b], resamples=20).p_value)


def test_different_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="different questions"):
        mean_difference([scored("ece", ["x"], [0.5], [1])], [scored("ece", ["y"], [0.5], [1])])
