"""Laws of the calibrators, their JSON form, and scikit-learn as oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit, log_softmax, logit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from catto.errors import DataError
from catto.io.record_files import write_record
from catto.metrics import calibrators
from catto.metrics.calibrators import (
    CALIBRATORS,
    RIDGE,
    HistogramBinning,
    Isotonic,
    Platt,
    Temperature,
    VectorScaling,
    label_table,
    read_calibrator,
)
from catto.metrics.errors import EPSILON, accuracy, ece, nll
from catto.metrics.ranking import auroc

# Both kinds are present, and no order is perfect: no fit runs to an end of its range.
ROWS = st.lists(st.tuples(st.integers(1, 99), st.booleans()), min_size=4, max_size=60).map(
    lambda rows: [*rows, (60, True), (61, False), (30, True), (31, False)]
)
laws = settings(max_examples=50, deadline=None)


def columns(rows: list[tuple[int, bool]]) -> tuple[Any, Any]:
    percent, correct = zip(*rows, strict=True)
    return np.array(percent) / 100, np.array(correct)


def overconfident(rows: int = 800, seed: int = 0) -> tuple[Any, Any]:
    """Rows whose true probability is sigmoid(logit(c) / 2): tau = 2 by construction."""
    rng = np.random.default_rng(seed)
    c = expit(3 * rng.standard_normal(rows))
    return c, rng.random(rows) < expit(logit(c) / 2)


def labels(rows: int = 400, tau: float = 1.7) -> tuple[Any, Any]:
    rng = np.random.default_rng(2)
    logprobs = log_softmax(3 * rng.standard_normal((rows, 4)), axis=1)
    true = np.exp(log_softmax(logprobs / tau, axis=1)).cumsum(axis=1)
    return logprobs, (rng.random((rows, 1)) > true).sum(axis=1).clip(max=3)


@laws
@given(ROWS)
def test_temperature_keeps_the_ranking_and_never_raises_the_loss(rows: Any) -> None:
    """The loss may rise by EPSILON where scaling passes the clip of the NLL, by no more."""
    c, z = columns(rows)
    scaled = Temperature.fit(c, z).apply(c)
    assert accuracy(scaled, z) == accuracy(c, z)
    assert auroc(scaled, z) == pytest.approx(auroc(c, z), abs=1e-15)
    assert nll(scaled, z) <= nll(c, z) + EPSILON


@laws
@given(ROWS, st.sampled_from(sorted(CALIBRATORS)))
def test_doubling_the_data_changes_nothing(rows: Any, kind: str) -> None:
    c, z = columns(rows)
    once, twice = CALIBRATORS[kind].fit(c, z), CALIBRATORS[kind].fit(np.tile(c, 2), np.tile(z, 2))
    np.testing.assert_allclose(twice.apply(c), once.apply(c), atol=1e-6 if kind == "platt" else 1e-12)


@laws
@given(ROWS, st.sampled_from(sorted(CALIBRATORS)))
def test_output_stays_in_range_at_the_ends(rows: Any, kind: str) -> None:
    out = CALIBRATORS[kind].fit(*columns(rows)).apply([0.0, 1e-300, 0.5, np.nextafter(1, 0), 1.0])
    assert np.isfinite(out).all()
    assert ((out >= 0) & (out <= 1)).all()


@laws
@given(ROWS)
def test_isotonic_never_falls_and_is_calibrated_on_its_fit(rows: Any) -> None:
    c, z = columns(rows)
    fitted = Isotonic.fit(c, z)
    assert (np.diff(fitted.apply(np.linspace(0, 1, 501))) >= 0).all()
    out = fitted.apply(c)
    for value in np.unique(out.round(12)):
        assert z[out.round(12) == value].mean() == pytest.approx(value, abs=1e-9)


@laws
@given(ROWS, st.integers(1, 30))
def test_histogram_binning_is_calibrated_on_its_fit(rows: Any, bins: int) -> None:
    c, z = columns(rows)
    out = HistogramBinning.fit(c, z, bins=bins).apply(c)
    assert nll(out, z) <= nll(np.full(len(z), z.mean()), z) + EPSILON
    for value in np.unique(out):
        assert z[out == value].mean() == pytest.approx(value, abs=1e-12)


def test_histogram_binning_closes_bins_on_the_right_and_fills_empty_ones_with_their_middle() -> None:
    fitted = HistogramBinning.fit([0.5, 0.5, 0.9], [1, 0, 1], bins=4)
    assert fitted.values == (0.125, 0.5, 0.625, 1.0)
    np.testing.assert_array_equal(fitted.apply([0.0, 0.25, 0.5, 0.75, 1.0]), [0.125, 0.125, 0.5, 0.625, 1.0])


def test_temperature_finds_the_minimum_of_the_loss() -> None:
    c, z = overconfident()
    direct = minimize_scalar(lambda tau: nll(expit(logit(c) / tau), z), bounds=(0.1, 10), options={"xatol": 1e-10})
    fitted = Temperature.fit(c, z)
    assert fitted.tau == pytest.approx(direct.x, abs=1e-6)
    assert fitted.tau == pytest.approx(2.0, abs=0.35)
    assert ece(fitted.apply(c), z) < ece(c, z)


def label_nll(logprobs: Any, gold: Any) -> float:
    return float(log_loss(gold, np.exp(logprobs), labels=range(logprobs.shape[1])))


def test_label_temperature_finds_the_minimum_of_the_gold_loss() -> None:
    logprobs, gold = labels()
    direct = minimize_scalar(
        lambda tau: label_nll(log_softmax(logprobs / tau, axis=1), gold), bounds=(0.1, 10), options={"xatol": 1e-10}
    )
    fitted = Temperature.fit_labels(logprobs, gold)
    scaled = fitted.apply_labels(logprobs)
    assert fitted.tau == pytest.approx(direct.x, abs=1e-6)
    np.testing.assert_array_equal(scaled.argmax(axis=1), logprobs.argmax(axis=1))
    np.testing.assert_allclose(np.exp(scaled).sum(axis=1), 1.0, atol=1e-12)
    assert label_nll(scaled, gold) <= label_nll(logprobs, gold)


def test_two_labels_equal_the_binary_temperature() -> None:
    """With labels (p, 1 - p) the softmax of log p / tau is the sigmoid of logit(p) / tau."""
    p, z = overconfident()
    p = p.clip(1e-6, 1 - 1e-6)
    matrix = np.log(np.stack([p, 1 - p], axis=1))
    by_labels = Temperature.fit_labels(matrix, np.where(z, 0, 1))
    binary = Temperature.fit(p, z)
    assert by_labels.tau == pytest.approx(binary.tau, rel=1e-9)
    np.testing.assert_allclose(np.exp(by_labels.apply_labels(matrix))[:, 0], binary.apply(p), atol=1e-9)


def test_label_temperature_ignores_the_mass_off_the_labels() -> None:
    logprobs, gold = labels()
    shifted = logprobs - np.linspace(0.0, 5.0, len(gold))[:, None]
    assert Temperature.fit_labels(shifted, gold).tau == pytest.approx(
        Temperature.fit_labels(logprobs, gold).tau, rel=1e-9
    )


@pytest.mark.parametrize(("correct", "tau"), [([1, 1], 0.01), ([0, 0], 100.0)])
def test_one_sided_rows_stop_at_the_ends_of_the_range(correct: list[int], tau: float) -> None:
    assert Temperature.fit([0.7, 0.9], correct).tau == tau


def test_platt_has_zero_gradient_at_its_fit() -> None:
    c, z = overconfident()
    residual = Platt.fit(c, z).apply(c) - z
    assert abs(residual.mean()) < 1e-6
    assert abs(np.mean(residual * logit(c))) < 1e-6


def test_isotonic_equals_scikit_learn() -> None:
    c, z = overconfident()
    grid = np.linspace(0, 1, 1001)
    theirs = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(c, z).predict(grid)
    np.testing.assert_allclose(Isotonic.fit(c, z).apply(grid), theirs, atol=1e-12)


@pytest.mark.parametrize("kind", CALIBRATORS)
def test_loaded_equals_fitted_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    c, z = overconfident()
    fitted = CALIBRATORS[kind].fit(c, z)
    write_record(tmp_path / "calibrator.json", fitted)
    loaded = read_calibrator(tmp_path / "calibrator.json")
    assert loaded == fitted
    np.testing.assert_array_equal(loaded.apply(c), fitted.apply(c))
    assert json.loads((tmp_path / "calibrator.json").read_text())["schema_version"] == 1


@pytest.mark.parametrize("kind", CALIBRATORS)
@pytest.mark.parametrize("bad", [[1.2], [-0.1], [np.nan], []])
def test_bad_confidence_is_refused(kind: str, bad: list[float]) -> None:
    fitted = CALIBRATORS[kind].fit(*overconfident(50))
    with pytest.raises(ValueError, match="confidence"):
        fitted.apply(bad)
    with pytest.raises(ValueError, match="confidence"):
        CALIBRATORS[kind].fit(bad, [1] * len(bad))


def test_platt_refuses_rows_of_one_kind() -> None:
    with pytest.raises(ValueError, match="right and wrong rows"):
        Platt.fit([0.2, 0.9], [1, 1])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"schema_version": 2}, "schema_version is 2, this catto reads 1"),
    ({"kind": "pickle"}, "kind: expected temperature, platt, isotonic, histogram, vector, got 'pickle'"),
    ({"extra": 1.0}, "extra: unknown key"),
    ({"tau": "1"}, "tau: expected a number, got '1'"),
    ({"tau": [1.0]}, r"tau: expected a number, got \[1.0\]"),
    ({"tau": 0.0}, "tau: expected a number of at least 1e-09, got 0.0"),
    ({"tau": float("nan")}, "tau: expected a finite number, got nan"),
    ({"tau": True}, "tau: expected a number, got True"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_file_is_one_line_that_names_it(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(Temperature(tau=1.5).model_dump() | change))
    with pytest.raises(DataError, match=rf"c\.json: {message}"):
        read_calibrator(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(DataError, match=r"c\.json"):
        read_calibrator(tmp_path / "c.json")
    with pytest.raises(DataError, match=r"absent\.json: No such file"):
        read_calibrator(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("knots", "message"), [([0.0, 1.0], "2 knots and 1 values"), (0.5, r"knots: expected a list, got 0\.5")]
)
def test_uneven_isotonic_knots_are_refused(knots: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"schema_version": 1, "kind": "isotonic", "knots": knots, "values": [0.5]}))
    with pytest.raises(DataError, match=message):
        read_calibrator(path)


# ---- vector scaling -------------------------------------------------------------------------------------------------


def lopsided(rows: int = 500, count: int = 4, seed: int = 5) -> tuple[Any, Any]:
    """Labels drawn from the softmax of weight * log p + bias, with other weights and biases for each label."""
    rng = np.random.default_rng(seed)
    logprobs = log_softmax(3 * rng.standard_normal((rows, count)), axis=1)
    weights, biases = rng.uniform(0.3, 1.2, count), rng.uniform(-1, 1, count)
    true = np.exp(log_softmax(weights * logprobs + biases, axis=1)).cumsum(axis=1)
    return logprobs, (rng.random((rows, 1)) > true).sum(axis=1).clip(max=count - 1)


def gold_nll(log_probability: Any, gold: Any) -> float:
    return -float(log_probability[np.arange(len(gold)), gold].mean())


@pytest.mark.parametrize("count", [2, 3, 5])
def test_vector_scaling_is_the_minimum_that_another_search_finds(count: int) -> None:
    """The penalised loss as its definition reads, minimised without our gradient and by another algorithm."""
    logprobs, gold = lopsided(200, count)
    tau = Temperature.fit_labels(logprobs, gold).tau

    def loss(parameters: Any) -> float:
        u, b = parameters[:count], parameters[count:]
        total = 0.0
        for row, place in zip(logprobs, gold, strict=True):
            z = (1 + u) / tau * row + b
            total += np.log(np.exp(z).sum()) - z[place]
        return float(total / len(gold) + RIDGE * (np.square(u).sum() + np.square(b).sum()))

    reference = minimize(loss, np.full(2 * count, 0.1), method="BFGS", options={"gtol": 1e-7})
    fitted = VectorScaling.fit_labels(logprobs, gold, "ABCDE"[:count])
    ours = np.concatenate([np.array(fitted.weights) * tau - 1, fitted.biases])
    assert loss(ours) <= reference.fun + 1e-10
    assert ours == pytest.approx(reference.x, abs=2e-4)


def test_vector_scaling_of_two_labels_is_logistic_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """p(B) = sigmoid(w_B log p_B - w_A log p_A + b_B - b_A): a regression on the two log-probabilities."""
    monkeypatch.setattr(calibrators, "RIDGE", 1e-9)
    logprobs, gold = lopsided(400, 2)
    fitted = VectorScaling.fit_labels(logprobs, gold, "AB")
    reference = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000).fit(logprobs, gold)
    expected = reference.predict_log_proba(logprobs)
    assert fitted.apply_labels(logprobs) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rows", [5, 40, 400])
def test_vector_scaling_never_fits_worse_than_a_temperature_among_the_labels(rows: int, seed: int) -> None:
    logprobs, gold = lopsided(rows, 3, seed)
    temperature = Temperature.fit_labels(logprobs, gold)
    vector = VectorScaling.fit_labels(logprobs, gold, "ABC")
    assert gold_nll(vector.apply_labels(logprobs), gold) <= gold_nll(temperature.apply_labels(logprobs), gold) + 1e-12


def test_equal_weights_without_biases_are_a_temperature() -> None:
    logprobs, _ = lopsided(50)
    vector = VectorScaling(labels=tuple("ABCD"), weights=(0.5,) * 4, biases=(0.0,) * 4)
    assert vector.apply_labels(logprobs) == pytest.approx(Temperature(tau=2.0).apply_labels(logprobs), abs=1e-12)


def test_vector_scaling_finds_each_label_by_its_name(tmp_path: Path) -> None:
    logprobs, gold = lopsided(60, 3)
    vector = VectorScaling.fit_labels(logprobs, gold, "ABC")
    write_record(tmp_path / "v.json", vector)
    assert read_calibrator(tmp_path / "v.json") == vector
    row = dict(zip("ABC", logprobs[0], strict=True))
    shuffled = {label: row[label] for label in "CAB"}
    assert vector.probability(shuffled, "B") == pytest.approx(
        np.exp(vector.apply_labels(logprobs[:1])[0, 1]), abs=1e-12
    )
    with pytest.raises(ValueError, match="its labels are A, B, vector scaling was fitted on A, B, C"):
        vector.probability({"A": -1.0, "B": -0.5}, "A")
    with pytest.raises(ValueError, match="row 1 has A, B, row 2 has A, C"):
        label_table([{"A": -1.0, "B": -1.0}, {"A": -1.0, "C": -1.0}])


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"labels": ["A", "A"], "weights": [1.0, 1.0], "biases": [0.0, 0.0]}, "a label occurs twice"),
        ({"labels": ["A", "B"], "weights": [1.0], "biases": [0.0, 0.0]}, "2 labels, 1 weights and 2 biases"),
    ],
)
def test_an_uneven_vector_is_refused(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    path.write_text(json.dumps({"schema_version": 1, "kind": "vector", **fields}))
    with pytest.raises(DataError, match=told):
        read_calibrator(path)
