"""Confidence@k and its rivals: hand-worked, against brute force, and where the right choice is known."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import typer
from command import run
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import prediction
from typer.testing import CliRunner

from catto.calibrate import final_answers
from catto.cli.select import select as command
from catto.engines import TAU_GRID
from catto.errors import DataError
from catto.io.record_files import read_records, write_records
from catto.metrics.errors import ece
from catto.metrics.selection import (
    MAX_SUBSETS,
    RULES,
    Candidates,
    Selected,
    choose_sampling,
    draw_subsets,
    gather_candidates,
    measure_rules,
)
from catto.metrics.temperature import fit_tau
from catto.records import Prediction, Protocol
from catto.tasks import load_questions


def one_question(*answers: tuple[str | None, float], logprobs: tuple[float, ...] | None = None) -> Candidates:
    given = logprobs or (-1.0,) * len(answers)
    return gather_candidates([prediction("q", i, *answer, mean_logprob=given[i]) for i, answer in enumerate(answers)])


def by_rule(rows: list[Selected]) -> dict[str, Selected]:
    return {row.rule: row for row in rows}


def test_four_answers_by_hand() -> None:
    """B .6, A .4, A .3, C .5: most confident B; majority A (2 of 4); weighted A (.7 of 1.8); likeliest C."""
    given = one_question(("B", 0.6), ("A", 0.4), ("A", 0.3), ("C", 0.5), logprobs=(-2.0, -3.0, -4.0, -1.0))
    found = by_rule(measure_rules(given, 4))
    assert {rule: row.accuracy for rule, row in found.items()} == {
        "most confident": 0.0,
        "majority vote": 1.0,
        "confidence-weighted vote": 1.0,
        "mean log-probability": 0.0,
        "one random sample": 0.5,
        "oracle": 1.0,
    }
    # One row in one bin: the ECE is |right - confidence|.
    assert found["most confident"].ece == pytest.approx(0.6)
    assert found["majority vote"].ece == pytest.approx(1 - 2 / 4)
    assert found["confidence-weighted vote"].ece == pytest.approx(1 - 0.7 / 1.8)
    assert found["mean log-probability"].ece == pytest.approx(0.5)
    assert np.isnan(found["oracle"].ece)


def test_a_sample_without_a_label_never_wins_a_vote() -> None:
    for rule in ("majority vote", "confidence-weighted vote"):
        assert RULES[rule](one_question((None, 0.5), ("A", 0.0))).place.tolist() == [1]


def test_pairs_of_three_by_hand() -> None:
    """Pairs of (A .2, B .9, A .5): AB -> B, AA -> A, BA -> B; 1/3. Votes tie to the first: A, A, B; 2/3."""
    found = by_rule(measure_rules(one_question(("A", 0.2), ("B", 0.9), ("A", 0.5)), 2))
    assert found["most confident"].accuracy == pytest.approx(1 / 3)
    assert found["majority vote"].accuracy == pytest.approx(2 / 3)
    assert found["oracle"].accuracy == 1.0
    assert (found["most confident"].subsets, found["most confident"].exact) == (3, True)


def test_ties_go_to_the_first_sample() -> None:
    for first, right in (("A", 1.0), ("B", 0.0)):
        other = "B" if first == "A" else "A"
        found = by_rule(measure_rules(one_question((first, 0.5), (other, 0.5)), 2))
        for rule in ("most confident", "majority vote", "confidence-weighted vote", "mean log-probability"):
            assert found[rule].accuracy == right


def test_equal_weights_summed_in_another_order_are_a_tie() -> None:
    """.1 + .2 + .3 of A and .3 + .2 + .1 of B differ in the last bit; the first sample's label wins all the same."""
    answers = [("B", 0.3), ("A", 0.1), ("B", 0.2), ("A", 0.2), ("B", 0.1), ("A", 0.3)]
    assert by_rule(measure_rules(one_question(*answers), 6))["confidence-weighted vote"].accuracy == 0.0
    assert by_rule(measure_rules(one_question(*answers[1:], answers[0]), 6))["confidence-weighted vote"].accuracy == 1.0


def test_samples_without_a_label_have_no_vote_and_are_wrong() -> None:
    found = by_rule(measure_rules(one_question((None, 0.0), (None, 0.0), ("A", 0.2)), 3))
    assert found["majority vote"].accuracy == 1.0
    found = by_rule(measure_rules(one_question((None, 0.0), (None, 0.0)), 2))
    assert {row.accuracy for row in found.values()} == {0.0}


def random_rows(seed: int, questions: int, n: int) -> list[Prediction]:
    rng = np.random.default_rng(seed)
    return [
        prediction(f"q{q}", i, str(rng.choice(list("ABC"))), float(rng.random()), mean_logprob=float(-rng.random()))
        for q in range(questions)
        for i in range(n)
    ]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), data=st.data())
def test_every_rule_is_the_mean_over_all_subsets(seed: int, n: int, data: st.DataObject) -> None:
    """Brute force with plain Python: pick in every subset of every question, then average."""
    k = data.draw(st.integers(1, n))
    rows = random_rows(seed, 5, n)
    groups = [rows[start : start + n] for start in range(0, len(rows), n)]

    def most_confident(some: list[Prediction]) -> str | None:
        return max(some, key=lambda one: one.confidence).label

    def majority(some: list[Prediction]) -> str | None:
        labels = [one.label for one in some]
        return max(labels, key=labels.count)

    def weighted(some: list[Prediction]) -> str | None:
        return max((one.label for one in some), key=lambda x: sum(o.confidence for o in some if o.label == x))

    def likeliest(some: list[Prediction]) -> str | None:
        return max(some, key=lambda one: one.mean_logprob or 0.0).label

    rules = (most_confident, majority, weighted, likeliest)
    found = measure_rules(gather_candidates(rows), k)
    for rule, row in zip(rules, found[:4], strict=True):
        picks = [rule(list(some)) == "A" for group in groups for some in combinations(group, k)]
        assert row.accuracy == pytest.approx(np.mean(picks), abs=1e-12)
    oracle = [any(one.label == "A" for one in some) for group in groups for some in combinations(group, k)]
    assert found[5].accuracy == pytest.approx(np.mean(oracle), abs=1e-12)


def test_confidence_at_one_is_plain_sampling() -> None:
    rows = random_rows(1, 40, 6)
    found = by_rule(measure_rules(gather_candidates(rows), 1))
    accuracy = np.mean([one.label == one.gold for one in rows])
    per_sample = [
        ece([one.confidence for one in rows[i::6]], [one.label == one.gold for one in rows[i::6]]) for i in range(6)
    ]
    for rule in ("most confident", "majority vote", "confidence-weighted vote", "mean log-probability", "oracle"):
        assert found[rule].accuracy == pytest.approx(accuracy, abs=1e-12)
    assert found["most confident"].ece == pytest.approx(np.mean(per_sample), abs=1e-12)
    assert found["one random sample"].ece == pytest.approx(np.mean(per_sample), abs=1e-12)


def test_identical_samples_are_one() -> None:
    single = random_rows(2, 30, 1)
    copies = [one.model_copy(update={"sample": i}) for one in single for i in range(8)]
    alone = by_rule(measure_rules(gather_candidates(single), 1))
    for k in (1, 2, 4, 8):
        for row in measure_rules(gather_candidates(copies), k):
            assert (row.accuracy, row.low, row.high) == pytest.approx(
                (alone[row.rule].accuracy, alone[row.rule].low, alone[row.rule].high)
            )


def test_the_oracle_bounds_every_rule_and_grows_with_k() -> None:
    given = gather_candidates(random_rows(3, 50, 8))
    oracles = []
    for k in (1, 2, 4, 8):
        found = by_rule(measure_rules(given, k))
        oracles.append(found["oracle"].accuracy)
        assert all(row.accuracy <= found["oracle"].accuracy + 1e-12 for row in found.values())
        assert all(row.low <= row.accuracy <= row.high for row in found.values())
    assert oracles == sorted(oracles)


def test_with_the_true_posterior_the_most_confident_is_the_bayes_choice() -> None:
    """Samples are drawn from the posterior; among any k the most confident is the most probable label there is."""
    rng = np.random.default_rng(0)
    rows, best = [], []
    for question in load_questions("witnesses", "test", limit=80):
        assert question.posterior is not None
        posterior = question.posterior
        drawn = [str(label) for label in rng.choice(list(posterior), 6, p=list(posterior.values()))]
        rows += [
            prediction(question.id, i, label, posterior[label], gold=question.gold) for i, label in enumerate(drawn)
        ]
        for some in combinations(drawn, 4):
            best.append(max(some, key=lambda label, p=posterior: p[label]) == question.gold)  # type: ignore[misc]
    found = by_rule(measure_rules(gather_candidates(rows), 4))
    assert found["most confident"].accuracy == pytest.approx(np.mean(best), abs=1e-12)
    assert found["most confident"].accuracy > found["one random sample"].accuracy + 0.05


def test_many_subsets_are_drawn_without_repeats() -> None:
    drawn, exact = draw_subsets(16, 8)
    assert not exact
    assert len(drawn) == MAX_SUBSETS
    assert len({tuple(row) for row in drawn.tolist()}) == MAX_SUBSETS
    assert np.array_equal(drawn, draw_subsets(16, 8)[0])
    assert (np.diff(drawn, axis=1) > 0).all()
    assert len(draw_subsets(8, 4)[0]) == 70


def test_samples_are_ranked_at_tau_and_not_at_the_temperature_they_were_sampled_at() -> None:
    """Two tokens with logits 0 and -1, at tau 2: p = 1 / (1 + e^-0.5) = 0.6225; at 1: 0.7311."""
    grid = {str(tau): float(np.log(1 + np.exp(-1 / tau))) for tau in (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)}
    grid |= {str(tau): float(np.log(1 + np.exp(-1 / tau))) for tau in (1.25, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0)}
    one = prediction("q", 0, "A", 1 / (1 + np.exp(-1)), temperature=0.3, logsumexp=grid)
    assert gather_candidates([one], 2.0).confidence[0, 0] == pytest.approx(0.6224593312018546)
    assert gather_candidates([one]).confidence[0, 0] == gather_candidates([one], 1.0).confidence[0, 0]
    assert gather_candidates([one]).confidence[0, 0] == pytest.approx(0.7310585786300049)
    calibrated = one.model_copy(update={"confidence": 0.5, "confidence_raw": one.confidence})
    assert (
        gather_candidates([calibrated]).confidence[0, 0] == 0.5
    )  # a calibrator's confidence ranks where one was applied


def tried(temperature: float, *rows: str, confident: str = "A", fallbacks: int = 0) -> list[Prediction]:
    """k answers a question at a temperature; `confident` is the label with confidence 0.9, all others have 0.5."""
    found = [
        prediction(f"q{q}", place, label, 0.9 if label == confident else 0.5, temperature=temperature)
        for q, row in enumerate(rows)
        for place, label in enumerate(row)
    ]
    return [one.model_copy(update={"source": "fallback"}) if n < fallbacks else one for n, one in enumerate(found)]


def test_the_sampling_temperature_is_that_of_the_best_confidence_at_k_and_of_equals_the_lowest() -> None:
    """Gold A. At 1.0 one of two picks is right (BB, AB), at 0.7 and 0.3 both, at 0.5 none: B is the confident one."""
    rows = [*tried(1.0, "BB", "AB", fallbacks=3), *tried(0.7, "AB", "BA"), *tried(0.5, "AB", "BA", confident="B")]
    found = choose_sampling([*rows, *tried(0.3, "AA", "AA", fallbacks=1)], 1.0)
    assert found.temperature == 0.3
    assert found.accuracy == {"0.3": 1.0, "0.5": 0.0, "0.7": 1.0, "1.0": 0.5}
    assert found.fallback_rate == {"0.3": 0.25, "0.5": 0.0, "0.7": 0.0, "1.0": 0.75}
    assert (found.k, found.questions, found.tau) == (2, 2, 1.0)
    assert choose_sampling(rows, 1.0).temperature == 0.7


def test_uneven_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="question q1 has 1 samples, q0 has 2"):
        gather_candidates([*random_rows(0, 1, 2), prediction("q1", 0, "A", 0.5)])
    with pytest.raises(ValueError, match="a sample twice"):
        gather_candidates([prediction("q", 0, "A", 0.5), prediction("q", 0, "B", 0.5)])
    with pytest.raises(ValueError, match="no predictions"):
        gather_candidates([])
    with pytest.raises(ValueError, match="k is 3, there are 2 samples"):
        measure_rules(gather_candidates(random_rows(0, 2, 2)), 3)


def test_a_rule_whose_number_no_sample_has_is_left_out_and_writes_no_answers() -> None:
    rows = [row.model_copy(update={"mean_logprob": None}) for row in random_rows(0, 3, 2)]
    rules = by_rule(measure_rules(gather_candidates(rows), 2))
    assert "mean log-probability" not in rules
    assert "most confident" in rules
    protocol = Protocol(rule="mean log-probability", k=2, temperature=1.0, fallback="answer")
    with pytest.raises(ValueError, match="mean log-probability needs mean_logprob, which no sample has"):
        final_answers(rows, protocol)
    one = [rows[0].model_copy(update={"mean_logprob": -1.0}), *rows[1:]]
    assert "mean log-probability" in by_rule(measure_rules(gather_candidates(one), 1))


@pytest.mark.parametrize("confidence", [True, "0.5"])
def test_a_confidence_is_a_number(confidence: object, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({**prediction("q", 0, "A", 0.5).model_dump(), "confidence": confidence}) + "\n")
    with pytest.raises(DataError, match=r"p\.jsonl row 1: confidence: expected a number, got"):
        list(read_records(path, Prediction))


def test_an_error_of_another_file_names_that_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(tmp_path / "p.jsonl", random_rows(0, 3, 2))
    (tmp_path / "v.jsonl").write_text("{}\n")
    done = run(capsys, "select", tmp_path / "p.jsonl", "--k", "2", "--fit-tau", tmp_path / "v.jsonl")
    assert (done.code, done.err.startswith(f"catto: {tmp_path / 'v.jsonl'} row 1: ")) == (2, True)


def test_the_command_prints_every_rule(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    write_records(path, random_rows(4, 12, 4))
    app = typer.Typer()
    app.command()(command)
    shown = CliRunner().invoke(app, [str(path), "--k", "2", "4"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("confidence-weighted vote") == 2
    assert "N = 12 questions, 4 samples each, fallback 0.0 %." in shown.output
    rows = json.loads(CliRunner().invoke(app, [str(path), "--k", "2", "--json"]).output)
    assert {row["rule"] for row in rows} >= {"oracle", "most confident"}


def test_the_command_ranks_at_a_tau_that_is_given_or_fitted(tmp_path: Path) -> None:
    """Validation at p = 0.731 and half right: tau is as large as the grid goes; ranked so, ECE is another."""
    grid = {str(tau): float(np.log(1 + np.exp(-1 / tau))) for tau in TAU_GRID}
    sure = {"logsumexp": grid, "label_logprobs": {"A": float(-np.log(1 + np.exp(-1))), "B": float(-np.log(1 + np.e))}}
    stated = 1 / (1 + np.exp(-1))
    rows = [prediction(f"q{n}", s, "A", stated, temperature=0.3, **sure) for n in range(4) for s in range(2)]
    fit = [prediction(f"v{n}", 0, "A", stated, gold="AB"[n % 2], temperature=0.0, **sure) for n in range(4)]
    write_records(tmp_path / "samples.jsonl", rows)
    write_records(tmp_path / "validation.jsonl", fit)
    app = typer.Typer()
    app.command()(command)

    def told(*more: str) -> str:
        return CliRunner().invoke(app, [str(tmp_path / "samples.jsonl"), "--k", "2", *more]).output

    assert "Sampled at temperature 0.3, ranked by the stated confidence." in told()
    assert "ranked by the confidence at tau 2." in told("--tau", "2")
    assert "the best tau lies beyond" not in told("--tau", "2")
    assert "the best tau lies beyond" in told("--fit-tau", str(tmp_path / "validation.jsonl"))
    assert f"ranked by the confidence at tau {fit_tau(fit).tau:.3g}." in told(
        "--fit-tau", str(tmp_path / "validation.jsonl")
    )
    eces = [json.loads(told("--json", *more))[0]["ece"] for more in ((), ("--tau", "2"))]
    assert eces == pytest.approx([1 - stated, 1 - 0.6224593312018546])
    both = CliRunner().invoke(app, [str(tmp_path / "samples.jsonl"), "--k", "2", "--tau", "2", "--fit-tau", "x"])
    assert both.exit_code == 2
