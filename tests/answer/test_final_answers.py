"""Final answers of a rule, adaptive k, and the threshold that they get: the guarantee by simulation and end to end."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run
from predictions import prediction

from catto.calibrate import Fitted, RiskThreshold, final_answers, open_fitted, write_final
from catto.io.record_files import manifest_path, read_manifest, read_record, write_manifest, write_records
from catto.metrics import selection
from catto.metrics.calibrators import Temperature
from catto.metrics.risk import threshold_for_risk
from catto.metrics.selection import (
    RULES,
    VOTES,
    Candidates,
    choose_adaptively,
    choose_stop,
    gather_candidates,
    samples_still_needed,
)
from catto.records import Prediction, Protocol
from catto.tasks import load_questions

Capture = pytest.CaptureFixture[str]
GREEDY = Protocol(rule="most confident", k=1, temperature=1.0, fallback="answer")


def every_vote(k: int, rng: np.random.Generator) -> Candidates:
    """All sequences of k answers out of A, B, C and none, with random confidences: one question each."""
    label = np.array(list(product((-1, 0, 1, 2), repeat=k)))
    confidence = np.where(label < 0, 0.0, rng.random(label.shape))
    names = tuple(map(str, range(len(label))))
    return Candidates(names, label, confidence, np.full(label.shape, np.nan), label == 0)


@pytest.mark.parametrize("rule", VOTES)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_a_vote_that_stops_early_chooses_as_all_k(rule: str, k: int) -> None:
    given = every_vote(k, np.random.default_rng(k))
    choice, taken = choose_adaptively(given, rule)
    assert np.array_equal(choice.place, RULES[rule](given).place)
    assert taken.max() == k
    if k > 2:
        assert taken.mean() < k


@pytest.mark.parametrize("rule", VOTES)
def test_a_vote_is_settled_exactly_when_no_continuation_changes_it(rule: str) -> None:
    """Over all prefixes of all sequences: none is needed where every way to complete k samples chooses the same."""
    k = 4
    rng = np.random.default_rng(0)
    for taken in (1, 2, 3):
        part = every_vote(taken, rng)
        settled = samples_still_needed(part, rule, k) == 0
        chosen = RULES[rule](part).place
        fixed = np.ones(len(settled), dtype=bool)
        for rest in product((-1, 0, 1, 2), repeat=k - taken):
            tail = np.tile(rest, (len(settled), 1))
            label = np.hstack([part.label, tail])
            confidence = np.hstack([part.confidence, np.where(tail < 0, 0.0, 1.0)])
            whole = Candidates(part.questions, label, confidence, np.full(label.shape, np.nan), label == 0)
            fixed &= RULES[rule](whole).place == chosen
        assert np.array_equal(settled, fixed)
        assert settled.any() == (taken > (1 if rule == "majority vote" else 2))


@pytest.mark.parametrize("rule", ["most confident", *VOTES])
def test_batches_of_the_least_further_samples_stop_where_single_samples_do(rule: str) -> None:
    """What the gateway does: take `samples_still_needed` at once, look again."""
    k = 5
    given = every_vote(k, np.random.default_rng(1))
    _, expected = choose_adaptively(given, rule, 0.7)
    for row in range(0, len(given.questions), 7):
        columns = (given.label, given.confidence, given.logprob, given.correct)
        one = Candidates(given.questions[:1], *(column[row : row + 1] for column in columns))  # type: ignore[arg-type]
        count = 0
        while count < k and (more := int(samples_still_needed(one.at(np.arange(count)), rule, k, 0.7)[0])):
            count += more
        assert count == expected[row]


def test_majority_by_hand() -> None:
    """Of 5: after A A one more A wins 3 to at most 2; A B needs at least two more."""

    def after(*labels: int) -> int:
        label = np.array([labels], dtype=np.intp).reshape(1, -1)
        given = Candidates(("q",), label, np.ones(label.shape), np.ones(label.shape), label == 0)
        return int(samples_still_needed(given, "majority vote", 5)[0])

    assert (after(), after(0), after(0, 0), after(0, 1), after(0, 0, 0)) == (3, 2, 1, 2, 0)
    assert (after(0, 0, 1), after(0, 0, 1, 1), after(0, 0, 1, 0), after(-1, -1, 0, 0)) == (1, 1, 0, 0)


def test_the_most_confident_stops_where_validation_loses_nothing() -> None:
    rng = np.random.default_rng(2)
    confidence = rng.random((400, 6))
    correct = rng.random((400, 6)) < confidence
    label = np.where(correct, 0, 1)
    given = Candidates(tuple(map(str, range(400))), label, confidence, np.full(label.shape, np.nan), correct)
    stop = choose_stop(given)
    choice, taken = choose_adaptively(given, "most confident", stop)
    every = given.right(RULES["most confident"](given).place).mean()
    assert given.right(choice.place).mean() >= every
    assert taken.mean() < 6
    assert stop < 1.0
    reached = (confidence >= stop).any(axis=1)
    assert np.array_equal(taken[reached], (confidence[reached] >= stop).argmax(axis=1) + 1)
    assert (taken[~reached] == 6).all()


def test_token_certainty_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of certainty 1, 3, 2: mean 2; groups of two have 2 and 2.5."""
    tops = [("a", {"a": -0.5, "b": -1.5}), ("c", {"c": -3.0}), ("d", {"d": -1.0, "e": -3.0})]
    monkeypatch.setattr(selection, "TOKENS_PER_GROUP", 2)
    assert selection.token_certainty(tops) == (2.0, 2.0)
    assert selection.token_certainty([*tops[::-1], ("f", {"f": -1.0})]) == (1.75, 1.0)
    assert selection.token_certainty(tops[:1]) == (1.0, 1.0)


def test_rules_by_tokens_take_the_highest_number_and_need_it() -> None:
    numbers = ((1.0, 0.5), (3.0, 0.1), (2.0, 0.9))
    rows = [
        prediction("q", i, label, 0.5, self_certainty=mean, lowest_group=low)
        for i, (label, (mean, low)) in enumerate(zip("ABC", numbers, strict=True))
    ]
    for rule, label in (("self-certainty", "B"), ("lowest-group confidence", "C")):
        protocol = GREEDY.model_copy(update={"rule": rule, "k": 3})
        assert final_answers(rows, protocol)[0].label == label
        with pytest.raises(ValueError, match=f"{rule} needs the candidates of every token"):
            final_answers(samples(2), GREEDY.model_copy(update={"rule": rule, "k": 2}))
    rules = {row.rule for row in selection.measure_rules(gather_candidates(rows), 2)}
    assert {"self-certainty", "lowest-group confidence"} <= rules
    assert not {"self-certainty"} & {row.rule for row in selection.measure_rules(gather_candidates(samples(2)), 2)}


def samples(count: int = 40, k: int = 4, seed: int = 0, **more: Any) -> list[Prediction]:
    rng = np.random.default_rng(seed)
    rows = []
    for question in range(count):
        for sample in range(k):
            confidence = float(rng.random())
            label = "A" if rng.random() < confidence else "B"
            rows.append(prediction(f"q{seed}-{question}", sample, label, confidence, **{"tokens": 10, **more}))
    return rows


def test_final_answers_by_hand() -> None:
    """B .6, A .4, A .3, C .5 of 5 tokens each: the majority is A with 2 of 4 votes, its first sample states .4."""
    answers = (("B", 0.6), ("A", 0.4), ("A", 0.3), ("C", 0.5))
    rows = [prediction("q", i, label, value, tokens=5) for i, (label, value) in enumerate(answers)]
    (found,) = final_answers(rows, GREEDY.model_copy(update={"rule": "majority vote", "k": 4}))
    assert (found.label, found.correct, found.confidence, found.confidence_raw) == ("A", True, 0.5, 0.4)
    assert (found.samples, found.votes, found.tokens) == (4, 2, 20)
    (first,) = final_answers(rows, GREEDY)
    assert (first.label, first.confidence, first.samples) == ("B", 0.6, 1)
    (early,) = final_answers(rows, GREEDY.model_copy(update={"k": 4, "stop": 0.55}))
    assert (early.label, early.samples, early.tokens) == ("B", 1, 5)


def test_a_calibrator_of_samples_comes_before_the_rule_and_one_of_final_answers_after_it(tmp_path: Path) -> None:
    rows = samples()
    weighted = GREEDY.model_copy(update={"rule": "confidence-weighted vote", "k": 4})
    tau = Temperature(tau=3.0)
    before = final_answers(rows, weighted, Fitted(tau, "confidence"))
    warmer = [one.model_copy(update={"confidence": float(tau.apply([one.confidence])[0])}) for one in rows]
    assert [one.confidence for one in before] == [one.confidence for one in final_answers(warmer, weighted)]
    assert {one.confidence_raw for one in before} <= {one.confidence for one in rows}
    after = final_answers(rows, weighted, Fitted(tau, "confidence", protocol=weighted))
    plain = [one.confidence for one in final_answers(rows, weighted)]
    assert [one.confidence for one in after] == tau.apply(plain).tolist()
    with pytest.raises(ValueError, match="a different rule, k, temperature"):
        write_final(tmp_path / "x.jsonl", rows, GREEDY, Fitted(tau, "confidence", protocol=weighted))


def test_a_calibrator_of_labels_needs_their_logprobs() -> None:
    rows = samples(4, 1, label_logprobs={"A": -0.5, "B": -1.0})
    found = final_answers(rows, GREEDY, Fitted(Temperature(tau=2.0), "labels"))
    expected = {"A": 1 / (1 + np.exp(-0.25)), "B": 1 / (1 + np.exp(0.25))}
    assert [one.confidence for one in found] == pytest.approx([expected[one.label or ""] for one in found])
    with pytest.raises(ValueError, match="q0-0 sample 0 has no label_logprobs"):
        final_answers(samples(4, 1), GREEDY, Fitted(Temperature(tau=2.0), "labels"))


def chain(tmp_path: Path, capsys: Capture, *more: str) -> Path:
    """Validation -> calibrator of final answers; other questions -> calibrated final answers."""
    for name, seed in (("validation", 1), ("held", 2)):
        write_records(tmp_path / f"{name}.jsonl", samples(600, seed=seed))
    rule = ("--k", "4", "--rule", "most confident", *more)
    done = run(capsys, "select", tmp_path / "validation.jsonl", *rule, "--out", tmp_path / "fit.jsonl")
    assert (done.code, done.err) == (0, "")
    run(capsys, "calibrate", "fit", tmp_path / "fit.jsonl", "--method", "platt", "--out", tmp_path / "tau.json")
    if more:
        stop = read_manifest(tmp_path / "fit.jsonl").notes["protocol"]["stop"]
        rule = (*rule, "--stop", repr(stop))
    final = tmp_path / "final.jsonl"
    done = run(capsys, "select", tmp_path / "held.jsonl", *rule, "--calibrator", tmp_path / "tau.json", "--out", final)
    assert (done.code, done.err) == (0, "")
    return final


def test_where_no_response_needed_a_fallback_any_calibrator_of_the_protocol_fits(
    tmp_path: Path, capsys: Capture
) -> None:
    """Two of the validation responses had no answer, of the held-out ones none, or the other way round."""
    whole = samples(600, seed=1)
    lost = [one.model_copy(update={"label": None, "source": "fallback", "confidence": 0.0}) for one in whole[:8]]
    for names in (("fit", "held"), ("held", "fit")):
        write_records(tmp_path / f"{names[0]}.jsonl", [*lost, *whole[8:]])
        write_records(tmp_path / f"{names[1]}.jsonl", samples(600, seed=2))
        rule = ("--k", "4", "--rule", "most confident")
        final, tau = tmp_path / "final.jsonl", tmp_path / "tau.json"
        run(capsys, "select", tmp_path / "fit.jsonl", *rule, "--out", final)
        run(capsys, "calibrate", "fit", final, "--out", tau)
        done = run(capsys, "select", tmp_path / "held.jsonl", *rule, "--calibrator", tau, "--out", final)
        assert (done.code, done.err) == (0, "")
        assert read_manifest(final).notes["protocol"]["fallback"] == ("none" if names[0] == "fit" else None)


def test_final_answers_that_no_calibrator_made_can_be_calibrated_once(tmp_path: Path, capsys: Capture) -> None:
    write_records(tmp_path / "rows.jsonl", samples(600, seed=1))
    final, tau, out = tmp_path / "final.jsonl", tmp_path / "tau.json", tmp_path / "out.jsonl"
    run(capsys, "select", tmp_path / "rows.jsonl", "--k", "4", "--rule", "most confident", "--out", final)
    run(capsys, "calibrate", "fit", final, "--out", tau)
    assert run(capsys, "calibrate", "apply", tau, final, "--out", out).code == 0
    again = run(capsys, "calibrate", "apply", tau, out, "--out", tmp_path / "twice.jsonl")
    assert (again.code, "calibrated before" in again.err) == (2, True)


def test_a_promise_cannot_be_had_from_the_answers_that_a_calibrator_was_fitted_on(
    tmp_path: Path, capsys: Capture
) -> None:
    """Neither by way of calibrated samples; where the fit questions are not known, that is said."""
    write_records(tmp_path / "rows.jsonl", samples(600, seed=1))
    tau, calibrated, final = (tmp_path / name for name in ("tau.json", "calibrated.jsonl", "final.jsonl"))
    run(capsys, "calibrate", "fit", tmp_path / "rows.jsonl", "--out", tau)
    run(capsys, "calibrate", "apply", tau, tmp_path / "rows.jsonl", "--out", calibrated)
    rule = ("--k", "4", "--rule", "most confident", "--out", final)
    refused = run(capsys, "select", calibrated, *rule)
    assert (refused.code, "the samples are already calibrated" in refused.err) == (2, True)
    again = run(capsys, "calibrate", "fit", calibrated, "--out", tmp_path / "twice.json")
    assert (again.code, "calibrated before" in again.err) == (2, True)
    unknown = read_manifest(tau)
    write_manifest(tau, unknown.model_copy(update={"notes": {**unknown.notes, "questions": None}}))
    run(capsys, "select", tmp_path / "rows.jsonl", *rule, "--calibrator", tau)
    done = run(capsys, "calibrate", "threshold", final, "--target-risk", "0.3", "--out", tmp_path / "t.json")
    assert done.code == 0
    assert f"{final}: the questions that its calibrator was fitted on are unknown" in done.err


def test_a_calibrator_of_final_answers_is_not_applied_to_others(tmp_path: Path, capsys: Capture) -> None:
    chain(tmp_path, capsys)
    for rule in ("majority vote", "most confident"):
        other = tmp_path / f"{rule}.jsonl"
        run(capsys, "select", tmp_path / "held.jsonl", "--k", "2", "--rule", rule, "--out", other)
        done = run(capsys, "calibrate", "apply", tmp_path / "tau.json", other, "--out", tmp_path / "o.jsonl")
        assert (done.code, "a different rule, k, temperature" in done.err) == (2, True)
        assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize("more", [(), ("--adaptive",)])
def test_the_chain_of_files_up_to_a_threshold(tmp_path: Path, capsys: Capture, more: tuple[str, ...]) -> None:
    final = chain(tmp_path, capsys, *more)
    done = run(capsys, "calibrate", "threshold", final, "--target-risk", "0.2", "--out", tmp_path / "t.json")
    assert (done.code, done.err) == (0, "")
    found = read_record(tmp_path / "t.json", RiskThreshold)
    rows = [json.loads(line) for line in final.read_text().splitlines()]
    expected = threshold_for_risk([row["confidence"] for row in rows], [row["correct"] for row in rows], 0.2, 0.05)
    assert (found.threshold, found.bound, found.rows) == (expected.threshold, expected.bound, 600)
    assert found.calibrator == open_fitted(tmp_path / "tau.json").digest
    protocol = found.protocol
    assert (protocol.rule, protocol.k, protocol.temperature, protocol.fallback) == ("most confident", 4, 1.0, None)
    assert (protocol.stop is not None) == bool(more)
    assert f"confidence >= {found.threshold!r} has" in done.out
    assert f"coverage {100 * found.coverage:.1f} %" in done.out


def test_answers_whose_making_is_unknown_have_no_threshold(tmp_path: Path, capsys: Capture) -> None:
    final = chain(tmp_path, capsys)
    manifest_path(final).unlink()
    done = run(capsys, "calibrate", "threshold", final, "--target-risk", "0.2", "--out", tmp_path / "t.json")
    assert done.code == 2
    assert "not a file of final answers" in done.err
    assert not (tmp_path / "t.json").exists()


def test_a_calibrator_never_stands_beside_the_manifest_of_an_older_one(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fitted on labels, then on confidences by a process that dies between the calibrator and its manifest."""
    rows, tau = tmp_path / "rows.jsonl", tmp_path / "tau.json"
    write_records(rows, samples(100, 1, label_logprobs={"A": -0.5, "B": -1.0}))
    assert run(capsys, "calibrate", "fit", rows, "--on", "labels", "--out", tau).code == 0

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("catto.io.record_files.write_manifest", die)
    assert run(capsys, "calibrate", "fit", rows, "--out", tau).code != 0
    done = run(capsys, "calibrate", "apply", tau, rows, "--out", tmp_path / "out.jsonl")
    assert (done.code, "tau.json.manifest.json: missing" in done.err) == (2, True)


def test_calibrated_answers_that_cannot_be_written_leave_the_older_pair(tmp_path: Path, capsys: Capture) -> None:
    final = chain(tmp_path, capsys)
    before = final.read_bytes(), manifest_path(final).read_bytes()
    other = tmp_path / "other.jsonl"
    run(capsys, "select", tmp_path / "held.jsonl", "--k", "2", "--rule", "majority vote", "--out", other)
    assert run(capsys, "calibrate", "apply", tmp_path / "tau.json", other, "--out", final).code == 2
    assert (final.read_bytes(), manifest_path(final).read_bytes()) == before


def test_no_threshold_is_a_refusal(tmp_path: Path, capsys: Capture) -> None:
    final = chain(tmp_path, capsys)
    done = run(capsys, "calibrate", "threshold", final, "--target-risk", "0.001", "--out", tmp_path / "t.json")
    assert done.code == 2
    assert "no threshold can promise an error rate of at most 0.1 % with 95 % confidence" in done.err
    assert not (tmp_path / "t.json").exists()


def test_questions_that_fitted_the_calibrator_are_refused(tmp_path: Path, capsys: Capture) -> None:
    chain(tmp_path, capsys)
    rule = ("--k", "4", "--rule", "most confident", "--calibrator", tmp_path / "tau.json")
    run(capsys, "select", tmp_path / "validation.jsonl", *rule, "--out", tmp_path / "again.jsonl")
    arguments = ("--target-risk", "0.2", "--out", tmp_path / "t.json")
    done = run(capsys, "calibrate", "threshold", tmp_path / "again.jsonl", *arguments)
    assert done.code == 2
    assert "the calibrator was fitted on 600 of these questions" in done.err


@pytest.mark.parametrize("rule", ["most confident", "majority vote"])
def test_questions_that_chose_the_stop_are_refused(rule: str, tmp_path: Path, capsys: Capture) -> None:
    """The stop of a vote is fixed: no gold label chooses it."""
    write_records(tmp_path / "rows.jsonl", samples(600, seed=1))
    adaptive = ("--k", "4", "--rule", rule, "--adaptive", "--out", tmp_path / "final.jsonl")
    threshold = ("threshold", tmp_path / "final.jsonl", "--target-risk", "0.6", "--out", tmp_path / "t.json")
    run(capsys, "select", tmp_path / "rows.jsonl", *adaptive)
    done = run(capsys, "calibrate", *threshold)
    if rule == "majority vote":
        assert (done.code, done.err) == (0, "")
        return
    stop = read_manifest(tmp_path / "final.jsonl").notes["protocol"]["stop"]
    assert done.code == 2
    assert f"--stop {stop} was chosen on these questions: run catto select on other questions" in done.err
    write_records(tmp_path / "others.jsonl", samples(600, seed=2))
    run(capsys, "select", tmp_path / "others.jsonl", *adaptive, "--stop", str(stop))
    done = run(capsys, "calibrate", *threshold)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("own.csv", "question,gold\n1,A\n", "own.csv row 1: not JSON: Expecting value at column 1; only JSON lines"),
        ("own.json", '[{"question": "1"}]', "own.json row 1: expected a JSON object, got list; only JSON lines"),
        ("own.jsonl", '{"question": "1", "gold": "A"}', "own.jsonl row 1: task: missing"),
    ],
)
def test_a_file_of_other_rows_is_told_what_select_reads(
    name: str, content: str, said: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / name).write_text(content)
    done = run(capsys, "select", tmp_path / name, "--k", "2")
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert said in done.err
    assert "must be named" not in done.err
    assert done.err.endswith("; expected the predictions that catto eval writes\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--rule", "majority vote"), "--rule and --calibrator: for the final answers"),
        (("--out", "x.jsonl"), "--out: needs --rule"),
        (("--out", "x.jsonl", "--rule", "most confident", "--k", "4"), "--out: needs one --k, got 2"),
        (("--out", "x.jsonl", "--rule", "most confident", "--tau", "2"), "--out: cannot be combined with --tau"),
        (("--out", "x.jsonl", "--rule", "most sure"), "--rule: most sure is not one of most confident"),
        (("--stop", "0.5"), "--stop: needs --adaptive"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: Capture, options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "a.jsonl", samples(5))
    done = run(capsys, "select", "a.jsonl", "--k", "2", *options)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not (tmp_path / "x.jsonl").exists()


def test_adaptive_numbers_are_those_of_the_final_answers(tmp_path: Path, capsys: Capture) -> None:
    write_records(tmp_path / "a.jsonl", samples(200))
    done = run(capsys, "select", tmp_path / "a.jsonl", "--k", "2", "--k", "4", "--adaptive", "--json")
    rows = [row for row in done.json if "samples" in row]
    assert len(rows) == 2 * 3 * 2
    for row in rows:
        protocol = GREEDY.model_copy(update={name: row[name] for name in ("rule", "k", "stop")})
        answers = final_answers(samples(200), protocol)
        assert row["accuracy"] == np.mean([one.correct for one in answers])
        assert row["tokens"] == np.mean([one.tokens for one in answers]) == 10 * row["samples"]
        assert row["samples"] == row["k"] if row["stop"] is None else row["samples"] <= row["k"]
    votes = {(row["k"], row["stop"]): row for row in rows if row["rule"] == "majority vote"}
    assert votes[4, 1.0]["accuracy"] == votes[4, None]["accuracy"]
    assert votes[4, 1.0]["samples"] < 4
    assert "Stopping early" in run(capsys, "select", tmp_path / "a.jsonl", "--k", "4", "--adaptive").out


def test_samples_are_taken_in_their_order_whatever_their_numbers(tmp_path: Path, capsys: Capture) -> None:
    shifted = [one.model_copy(update={"sample": one.sample + 16}) for one in samples(50)]
    for name, rows in (("a", samples(50)), ("b", shifted)):
        write_records(tmp_path / f"{name}.jsonl", rows)
    arguments = ("--k", "2", "--adaptive", "--json")
    first, second = (run(capsys, "select", tmp_path / f"{name}.jsonl", *arguments) for name in "ab")
    assert (first.code, first.json) == (0, second.json)


def test_the_guarantee_on_witnesses_whose_posterior_is_known() -> None:
    """Samples from the posterior, the most confident of 4: over 1,000 sets of 250 the true risk is rarely above 20 %.

    The sets are drawn from 2,000 questions, and the true risk of a threshold is the mean of 1 - posterior over those
    that it answers. At delta = 5 % up to 50 of 1,000 may be above it, and 3 standard deviations of that count are 21.
    """
    rng = np.random.default_rng(0)
    rows = []
    for question in load_questions("witnesses", "train", limit=2000):
        assert question.posterior is not None
        posterior = question.posterior
        for sample, label in enumerate(rng.choice(list(posterior), 4, p=list(posterior.values()))):
            rows.append(
                prediction(question.id, sample, str(label), min(1.0, posterior[str(label)]), gold=question.gold)
            )
    given = gather_candidates(rows)
    choice = RULES["most confident"](given)
    confidence = choice.confidence  # the posterior of the chosen answer: its chance of being right
    order = np.sort(confidence)[::-1]
    risk_above = np.cumsum(1 - order) / np.arange(1, len(order) + 1)
    exceeded = answered = 0
    for _ in range(1000):
        draw = rng.integers(0, len(confidence), 250)
        c = confidence[draw]
        found = threshold_for_risk(c, rng.random(250) < c, 0.2, 0.05)
        if found.threshold is not None:
            answered += 1
            count = int((order >= found.threshold).sum())
            exceeded += count > 0 and risk_above[count - 1] > 0.2
    assert answered > 500
    assert exceeded <= 71
