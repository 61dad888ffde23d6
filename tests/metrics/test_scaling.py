"""Temperatures from stored numbers: against dense logits, and against what temperature scaling must and must not do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp, softmax

from catto.engines import TAU_GRID
from catto.metrics.calibrators import Temperature
from catto.metrics.temperature import confidence_at, fit_tau, rescale_predictions
from catto.metrics.vector import fit_vector, scale_by_vector
from catto.records import Prediction

LABELS = ("A", "B", "C", "D")


def prediction(logits: np.ndarray[Any, Any], gold: str = "A", label: str | None = None, name: str = "q") -> Prediction:
    """What an evaluation stores of these logits; the labels are the first four tokens."""
    logprobs = dict(zip(LABELS, log_softmax(logits)[:4].tolist(), strict=True))
    label = label or max(logprobs, key=lambda one: logprobs[one])
    grid = logsumexp((logits - logits.max()) / np.array(TAU_GRID)[:, None], axis=1)
    return Prediction(
        question=name,
        task="t",
        split="test",
        gold=gold,
        sample=0,
        text="",
        label=label,
        source="free",
        confidence=float(np.exp(logprobs[label])),
        label_logprobs=logprobs,
        logsumexp=dict(zip(map(str, TAU_GRID), grid.tolist(), strict=True)),
        temperature=0.0,
        seed=0,
        engine="e",
        model="m",
    )


def vocabulary(rng: np.random.Generator, size: int) -> np.ndarray[Any, Any]:
    logits = rng.normal(0, rng.uniform(1, 4), size)
    logits[:8] += rng.uniform(0, 18, 8)
    return logits


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), tau=st.sampled_from(TAU_GRID))
def test_on_the_grid_the_confidence_is_exact(seed: int, tau: float) -> None:
    logits = vocabulary(np.random.default_rng(seed), 2000)
    one = prediction(logits)
    place = LABELS.index(one.label or "")
    assert confidence_at(one, tau) == pytest.approx(softmax(logits / tau)[place], abs=1e-12)
    restricted = softmax(logits[:4] / tau)[place]
    assert confidence_at(one, tau, "normalized") == pytest.approx(restricted, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), tau=st.floats(TAU_GRID[0], TAU_GRID[-1]), size=st.sampled_from([1000, 20000]))
def test_between_the_grid_points_the_error_is_below_2e_3(seed: int, tau: float, size: int) -> None:
    logits = vocabulary(np.random.default_rng(seed), size)
    one = prediction(logits)
    assert confidence_at(one, tau) == pytest.approx(softmax(logits / tau)[LABELS.index(one.label or "")], abs=2e-3)


def test_without_label_logprobs_the_answers_own_number_does() -> None:
    logits = vocabulary(np.random.default_rng(5), 3000)
    one = prediction(logits)
    bare = one.model_copy(update={"label_logprobs": None})
    place = LABELS.index(one.label or "")
    assert confidence_at(bare, 2.0) == pytest.approx(softmax(logits / 2.0)[place], abs=1e-12)
    assert confidence_at(bare, 1.3) == pytest.approx(softmax(logits / 1.3)[place], abs=2e-2)
    with pytest.raises(ValueError, match="cannot be normalized"):
        confidence_at(bare, 1.0, "normalized")


def test_what_is_not_stored_is_not_made_up() -> None:
    one = prediction(np.arange(10.0))
    served = one.model_copy(update={"logsumexp": None})
    assert confidence_at(served) == one.confidence
    with pytest.raises(ValueError, match="question q sample 0 has no logsumexp"):
        confidence_at(served, 2.0)
    with pytest.raises(ValueError, match=r"tau is 9.0, expected a number from 0.25 to 5.0"):
        confidence_at(one, 9.0)
    with pytest.raises(ValueError, match="tau cannot be fitted"):
        fit_tau([served])


def test_no_answer_has_no_confidence_at_any_tau() -> None:
    none = prediction(np.arange(10.0)).model_copy(
        update={"label": None, "confidence": 0.0, "logsumexp": None, "label_logprobs": None}
    )
    assert [confidence_at(none, tau, kind) for tau in (0.5, 2.0) for kind in ("raw", "normalized")] == [0.0] * 4


def drawn(true_tau: float, rows: int = 600) -> list[Prediction]:
    """Golds drawn from softmax(logits / true_tau) over the labels; nothing else has weight."""
    rng = np.random.default_rng(3)
    found = []
    for row in range(rows):
        logits = np.concatenate([rng.normal(0, 3, 4), np.full(50, -60.0)])
        gold = LABELS[rng.choice(4, p=softmax(logits[:4] / true_tau))]
        found.append(prediction(logits, gold, name=f"q{row}"))
    return found


@pytest.mark.parametrize("true_tau", [0.6, 1.0, 1.7, 3.3])
def test_where_only_labels_have_weight_tau_is_that_of_the_label_softmax(true_tau: float) -> None:
    """Two ways to one maximum of the likelihood: the stored curve here, the slope's root over label scores there."""
    rows = drawn(true_tau)
    scaling = fit_tau(rows)
    scores = [list((one.label_logprobs or {}).values()) for one in rows]
    exact = Temperature.fit_labels(scores, [LABELS.index(one.gold) for one in rows]).tau
    assert scaling.tau == pytest.approx(exact, rel=1e-4)
    assert scaling.tau == pytest.approx(true_tau, rel=0.25)
    assert not scaling.at_edge
    assert (scaling.rows, scaling.left_out) == (600, 0)


@pytest.mark.parametrize("true_tau", [0.6, 1.7, 12.5])
def test_among_the_labels_what_other_tokens_have_does_not_count(true_tau: float) -> None:
    """The same tau, to the root of the slope, whatever share the rest of the vocabulary takes, grid or no grid."""
    rows = drawn(true_tau)
    scores = [list((row.label_logprobs or {}).values()) for row in rows]
    exact = Temperature.fit_labels(scores, [LABELS.index(row.gold) for row in rows]).tau
    shares = np.random.default_rng(0).uniform(0.01, 1.0, len(rows))
    lost = [
        {label: logprob + np.log(share) for label, logprob in (row.label_logprobs or {}).items()}
        for row, share in zip(rows, shares, strict=True)
    ]
    elsewhere = [
        row.model_copy(update={"label_logprobs": logprobs, "logsumexp": None})
        for row, logprobs in zip(rows, lost, strict=True)
    ]
    scaling = fit_tau(elsewhere, "normalized")
    assert scaling.tau == pytest.approx(exact, rel=1e-5)
    assert not scaling.at_edge
    for row, score in zip(rescale_predictions(elsewhere, exact, "normalized"), scores, strict=True):
        assert row.confidence == pytest.approx(softmax(np.array(score) / exact).max(), abs=1e-12)


def test_among_the_labels_rows_may_have_different_labels_and_no_answer() -> None:
    rows = drawn(1.5, 40)
    two = {label: float(log_softmax([1.0, 0.0])[place]) for place, label in enumerate("AB")}
    rows[0] = rows[0].model_copy(update={"label_logprobs": two, "gold": "B", "label": "A"})
    rows[1] = rows[1].model_copy(update={"label": None, "confidence": 0.0})
    scaling = fit_tau(rows, "normalized")

    def nll(tau: float) -> float:
        known = [row.label_logprobs or {} for row in rows]
        each = [log_softmax(np.array(list(logprobs.values())) / tau) for logprobs in known]
        places = [list(logprobs).index(row.gold) for row, logprobs in zip(rows, known, strict=True)]
        return float(-np.mean([logprobs[place] for logprobs, place in zip(each, places, strict=True)]))

    assert scaling.nll == pytest.approx(nll(scaling.tau), abs=1e-12)
    assert scaling.nll_at_one == pytest.approx(nll(1.0), abs=1e-12)
    assert scaling.nll <= min(nll(tau) for tau in np.geomspace(0.1, 10.0, 60)) + 1e-9
    scaled = rescale_predictions(rows, 2.0, "normalized")
    assert scaled[0].confidence == pytest.approx(1 / (1 + np.exp(-0.5)))
    assert scaled[1].confidence == 0.0


def test_the_fit_is_the_dense_minimum() -> None:
    """On 200 vocabularies the NLL at the fitted tau is that of a fine dense search, to 1e-4."""
    rng = np.random.default_rng(8)
    rows = [vocabulary(rng, 1000) for _ in range(200)]
    golds = [int(rng.integers(4)) for _ in rows]
    scaling = fit_tau([prediction(z, LABELS[g]) for z, g in zip(rows, golds, strict=True)])

    def nll(tau: float) -> float:
        return float(-np.mean([log_softmax(z / tau)[g] for z, g in zip(rows, golds, strict=True)]))

    best = min(nll(tau) for tau in np.geomspace(0.3, 5.0, 120))
    assert scaling.nll == pytest.approx(nll(scaling.tau), abs=1e-3)
    assert nll(scaling.tau) <= best + 1e-4
    assert scaling.nll_at_one == pytest.approx(nll(1.0), abs=1e-9)
    assert scaling.nll <= scaling.nll_at_one


def test_rows_that_are_all_right_push_tau_to_the_edge() -> None:
    logits = np.array([2.0, 0.0, 0.0, 0.0])
    scaling = fit_tau([prediction(logits, "A")] * 5)
    assert scaling.at_edge
    assert scaling.tau == TAU_GRID[0]


def test_rows_without_numbers_are_left_out_and_counted() -> None:
    rows = drawn(1.5, 40)
    rows[3] = rows[3].model_copy(update={"label_logprobs": None})
    assert (fit_tau(rows).rows, fit_tau(rows).left_out) == (39, 1)


def test_scaling_keeps_the_answers_and_lowers_the_nll() -> None:
    rows = drawn(2.0)
    scaling = fit_tau(rows)
    scaled = rescale_predictions(rows, scaling.tau)
    assert [one.label for one in scaled] == [one.label for one in rows]
    assert scaling.nll < scaling.nll_at_one
    assert np.mean([one.confidence for one in scaled]) < np.mean([one.confidence for one in rows])
    right = np.mean([one.label == one.gold for one in rows])
    assert np.mean([one.confidence for one in scaled]) == pytest.approx(right, abs=0.04)


def test_rescaling_starts_from_the_stated_confidence() -> None:
    rows = drawn(2.0)
    once = rescale_predictions(rows, 3.0)
    assert [prediction.confidence_raw for prediction in once] == [prediction.confidence for prediction in rows]
    assert rescale_predictions(once, 2.0) == rescale_predictions(rows, 2.0)


# ---- vector scaling -------------------------------------------------------------------------------------------------


def test_vector_scaling_corrects_a_model_that_prefers_one_label() -> None:
    """The model adds 2 to the logit of A. One temperature cannot undo that, a bias can; the answers stay."""
    rng = np.random.default_rng(4)
    rows = []
    for number in range(400):
        true = rng.normal(0, 1.5, 4)
        gold = LABELS[rng.choice(4, p=softmax(true))]
        biased = true + np.array([2.0, 0.0, 0.0, 0.0])
        logits = np.concatenate([biased, rng.normal(-4, 1, 100)])
        rows.append(prediction(logits, gold, name=f"q{number}"))
    unread = rows[0].model_copy(update={"label": None, "label_logprobs": None, "confidence": 0.0, "question": "none"})
    fit = fit_vector([*rows, unread])
    assert (fit.rows, fit.left_out) == (400, 1)
    assert fit.nll < fit_tau(rows, "normalized").nll - 0.1
    assert fit.nll < fit.nll_unscaled
    biases = dict(zip(fit.scaling.labels, fit.scaling.biases, strict=True))
    assert biases["A"] == min(biases.values())
    scaled = scale_by_vector([*rows, unread], fit.scaling)
    assert [row.label for row in scaled] == [row.label for row in [*rows, unread]]
    assert [row.confidence_raw for row in scaled] == [row.confidence for row in [*rows, unread]]
    assert scaled[-1].confidence == 0.0
    correct = np.mean([row.label == row.gold for row in rows])
    before = abs(np.mean([row.confidence for row in rows]) - correct)
    after = abs(np.mean([row.confidence for row in scaled[:-1]]) - correct)
    assert after < before / 2


def test_vector_scaling_refuses_predictions_of_other_labels() -> None:
    one = prediction(np.arange(10.0))
    fewer = one.model_copy(update={"label_logprobs": {"A": -1.0, "B": -0.5}})
    with pytest.raises(ValueError, match="all rows need the same labels"):
        fit_vector([one, fewer])
