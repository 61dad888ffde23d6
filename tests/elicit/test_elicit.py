"""Agreement, P(True) and stated confidences of the same answers, with and without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from open_world import choices, dense_probability, engine, sums

from catto.answer.verbal import read_stated_confidence
from catto.answer_columns import ParseCounts, read_graded
from catto.calibrate import final_answers, fit_file
from catto.elicit import choose_kind, evaluate_kinds, sibling_path, summarise_kinds
from catto.engines.transformers import TransformersEngine
from catto.formats.columns import ColumnNames
from catto.io.record_files import read_manifest, read_records
from catto.metrics.selection import gather_candidates, measure_rules
from catto.predict import evaluate
from catto.prompts import render_judgement
from catto.records import ConfidenceKind, Prediction, Protocol, Question

SAMPLED: dict[str, Any] = {"k": 4, "temperature": 1.0, "max_tokens": 24, "seed": 3}
OPEN_KINDS: tuple[ConfidenceKind, ...] = ("ptrue", "agreement", "verbal")


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("eval") / "predictions.jsonl"
    evaluate_kinds(engine(), sums(12), OPEN_KINDS, out=out, **SAMPLED)
    return out


def read_all(path: Path) -> list[Prediction]:
    return list(read_records(path, Prediction))


def test_ptrue_is_the_probability_of_true_in_a_dense_forward(predicted: Path) -> None:
    asked = {question.id: question for question in sums(12)}
    rows = [row for row in read_all(predicted) if row.answer is not None]
    assert len(rows) > 10
    for row in rows:
        assert row.answer is not None
        chat = render_judgement(asked[row.question], row.answer)
        expected = dense_probability(chat, "<answer>\n", "True")
        assert row.confidence == pytest.approx(expected, abs=1e-5)
        assert row.confidence_kind == "ptrue"


def test_agreement_and_stated_confidences_by_hand(predicted: Path) -> None:
    rows = read_all(predicted)
    stated = 0
    for row in rows:
        answers = [other.answer for other in rows if other.question == row.question]
        assert len(answers) == 4
        assert row.confidences is not None
        expected = 0.0 if row.answer is None else (answers.count(row.answer) + 1) / 6
        assert row.confidences["agreement"] == expected
        assert row.confidences["verbal"] == read_stated_confidence(row.text)
        stated += row.confidences["verbal"] is not None
    assert 0 < stated < len(rows)
    counts = read_manifest(predicted).counts
    assert counts["without_verbal"] == len(rows) - stated
    assert counts["generated_tokens"] == sum(row.tokens or 0 for row in rows)


def test_gold_answers_change_what_is_right_and_no_confidence(predicted: Path) -> None:
    wrong = [question.model_copy(update={"gold": "99", "accepted": ("99",)}) for question in sums(12)]
    blind = evaluate_kinds(engine(), wrong, OPEN_KINDS, **SAMPLED)
    rows = read_all(predicted)
    assert [row.confidences for row in blind] == [row.confidences for row in rows]
    assert any(row.is_correct for row in rows)
    assert not any(row.is_correct for row in blind)


def test_distinct_answers_are_judged_once(predicted: Path) -> None:
    judgements = read_all(sibling_path(predicted, "judgements"))
    distinct = {(row.question, row.answer) for row in read_all(predicted) if row.answer is not None}
    assert len(judgements) == len(distinct) == read_manifest(predicted).counts["judged_answers"]
    assert {row.gold for row in judgements} == {"True", "False"}
    assert all(set(row.label_logprobs or {}) == {"True", "False"} for row in judgements)


def test_a_finished_run_is_only_read_and_other_kinds_reuse_its_responses(
    predicted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = predicted.read_bytes()

    def forbidden(*_: object, **__: object) -> Any:
        raise AssertionError("a finished run generates nothing")

    monkeypatch.setattr(TransformersEngine, "generate", forbidden)
    monkeypatch.setattr(TransformersEngine, "score", forbidden)
    rows = evaluate_kinds(engine(), sums(12), OPEN_KINDS, out=predicted, **SAMPLED)
    assert predicted.read_bytes() == before
    swapped = evaluate_kinds(engine(), sums(12), ("verbal", "agreement"), out=predicted, **SAMPLED)
    for row, other in zip(rows, swapped, strict=True):
        assert row.confidences is not None
        assert other.confidence == (row.confidences["verbal"] or 0.0)
        assert (other.text, other.confidence_kind) == (row.text, "verbal")
    evaluate_kinds(engine(), sums(12), OPEN_KINDS, out=predicted, **SAMPLED)
    assert predicted.read_bytes() == before


def test_a_run_that_was_killed_while_judging_ends_with_the_same_files(predicted: Path, tmp_path: Path) -> None:
    """Left of it are the responses; the journal of the judgements has a torn line."""
    for name in ("predictions.generations.jsonl", "predictions.generations.manifest.json"):
        (tmp_path / name).write_bytes((predicted.parent / name).read_bytes())
    judgements = sibling_path(predicted, "judgements")
    part = tmp_path / "predictions.judgements.part.jsonl"
    part.write_bytes(judgements.read_bytes()[:500])
    manifest = judgements.with_name("predictions.judgements.manifest.json").read_bytes()
    part.with_name("predictions.judgements.part.manifest.json").write_bytes(manifest)
    out = tmp_path / "predictions.jsonl"
    evaluate_kinds(engine(), sums(12), OPEN_KINDS, out=out, **SAMPLED)
    assert out.read_bytes() == predicted.read_bytes()
    assert sibling_path(out, "judgements").read_bytes() == judgements.read_bytes()


def test_labels_take_all_four_kinds_on_the_answers_of_a_plain_evaluation() -> None:
    asked = choices(8)
    kinds: tuple[ConfidenceKind, ...] = ("label", "agreement", "ptrue")
    plain = evaluate(engine(), asked, **SAMPLED)
    rows = evaluate_kinds(engine(), asked, kinds, **SAMPLED)
    for row, expected in zip(rows, plain, strict=True):
        assert (row.text, row.label) == (expected.text, expected.label)
        assert row.confidence == pytest.approx(expected.confidence, abs=1e-6)
        labels = [other.label for other in plain if other.question == row.question]
        assert row.confidences is not None
        assert row.confidences["agreement"] == (labels.count(row.label) + 1) / 6
        assert row.label is not None
        chat = render_judgement(asked[int(row.question[1:])], row.label)
        expected_ptrue = dense_probability(chat, "<answer>\n", "True")
        assert row.confidences["ptrue"] == pytest.approx(expected_ptrue, abs=1e-5)
    verbal = evaluate_kinds(engine(), asked, ("verbal", "label"), **SAMPLED)
    assert any(row.confidence > 0 for row in verbal)


def test_a_plain_evaluation_of_labels_is_stored_as_before(tmp_path: Path) -> None:
    direct = tmp_path / "direct.jsonl"
    kinds = tmp_path / "kinds.jsonl"
    evaluate(engine(), choices(4), out=direct, max_tokens=24)
    evaluate_kinds(engine(), choices(4), ("label",), out=kinds, max_tokens=24)
    assert direct.read_bytes() == kinds.read_bytes()
    assert b"confidence_kind" not in kinds.read_bytes()


def test_measure_select_and_calibrate_read_the_predictions(predicted: Path, tmp_path: Path) -> None:
    rows = read_all(predicted)
    graded = read_graded(predicted, ColumnNames())
    assert graded.correct.tolist() == [row.is_correct for row in rows]
    other = read_graded(predicted, ColumnNames(confidence="confidences.agreement"))
    assert other.confidence.tolist() == [(row.confidences or {})["agreement"] for row in rows]
    rules = {selected.rule: selected for selected in measure_rules(gather_candidates(rows), 4)}
    assert rules["oracle"].accuracy >= rules["majority vote"].accuracy
    protocol = Protocol(rule="majority vote", k=4, temperature=1.0, fallback="none", confidence_kind="ptrue")
    for final in final_answers(rows, protocol):
        answers = [row.answer for row in rows if row.question == final.question and row.answer is not None]
        assert answers.count(final.answer) == final.votes == max(answers.count(answer) for answer in answers)
    fitted, _ = fit_file(predicted, "platt", "confidence", ColumnNames(), "fallback", tmp_path / "calibrator.json")
    assert fitted.rows == len(rows)


def test_equivalent_answers_share_their_agreement_and_their_judgement() -> None:
    rows = evaluate_kinds(engine(), sums(6), ("agreement", "ptrue"), equivalent=lambda *_: True, **SAMPLED)
    for question in {row.question for row in rows}:
        answered = [row for row in rows if row.question == question and row.answer is not None]
        assert len({(row.answer, row.confidence) for row in answered}) <= 1
        assert all(row.confidence == (len(answered) + 1) / 6 for row in answered)


def test_a_summary_of_kinds_is_that_of_the_metrics() -> None:
    columns: dict[str, Any] = {"task": "t", "split": "test", "gold": "1", "text": "", "label": None, "source": "free"}
    columns |= {"confidence": 0.9, "confidence_kind": "ptrue", "temperature": 0.0, "seed": 0}
    columns |= {"engine": "e", "model": "m"}
    right = Prediction(question="a", sample=0, correct=True, confidences={"ptrue": 0.9, "verbal": None}, **columns)
    wrong = Prediction(question="b", sample=0, correct=False, confidences={"ptrue": 0.3, "verbal": 0.5}, **columns)
    ptrue, verbal = summarise_kinds([right, wrong], ("ptrue", "verbal"))
    assert (ptrue.auroc, ptrue.missing) == (1.0, 0)
    assert ptrue.brier == pytest.approx((0.1**2 + 0.3**2) / 2)
    assert (verbal.auroc, verbal.missing) == (0.0, 1)
    assert verbal.brier == pytest.approx((1.0 + 0.25) / 2)
    with pytest.raises(ValueError, match="confidence kind agreement: question a sample 0 has ptrue, verbal"):
        choose_kind([right, wrong], "agreement")


def test_many_missing_answers_are_said_before_any_number() -> None:
    counts = ParseCounts.of(["plain"] * 3 + ["none"] * 17)
    assert counts.has_too_many_forced
    warning = "17 of 20 responses have no answer: the numbers below describe missing answers, not the model."
    assert counts.warning == warning
    assert "no answer 85.0 %" in counts.describe()


@pytest.mark.parametrize(
    ("questions", "kinds", "k", "problem"),
    [
        (sums(2), ("label",), 1, "question s0 has no options"),
        (sums(2), ("agreement",), 1, "expected at least 2"),
        (sums(2), ("sure",), 1, "'sure' is not one of label, agreement, ptrue, verbal"),
        (sums(2), ("ptrue", "ptrue"), 1, "given twice"),
        (sums(2), (), 1, "no kind"),
    ],
)
def test_kinds_that_do_not_go_with_the_questions_are_refused(
    questions: list[Question], kinds: tuple[Any, ...], k: int, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        evaluate_kinds(engine(), questions, kinds, k=k, temperature=1.0)
