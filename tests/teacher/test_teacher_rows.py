"""What responses give: estimates, yield, manifests and rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_world import LABELS, questions, run, scripted

from catto.answer.response import parse_response
from catto.engines import Generation
from catto.io.record_files import read_manifest
from catto.prompts import render_completion, render_messages
from catto.recipe.settings import TeacherSettings
from catto.records import Response
from catto.teacher import dry_run
from catto.teacher.pairing import AnsweredQuestion, explain_no_pair, outcome_rows, preference_rows, sft_rows
from catto.teacher.responses import answered_questions

# Estimates and yield


def test_a_dry_run_counts_requests_and_tokens_and_writes_nothing(tmp_path: Path) -> None:
    """Tokens: characters of both messages, for each of 4 samples, divided by 4; at most 4 x 2 x 1024 generated."""
    found = dry_run(questions(2), scripted("AAAA", "BBBB"), TeacherSettings(n=4), tmp_path / "none")
    characters = sum(len(m.content) for q in questions(2) for m in render_messages(q))
    assert (found.requests, found.prompt_tokens, found.most_tokens) == (8, characters, 8192)
    assert any("characters / 4" in line for line in found.lines())
    assert not (tmp_path / "none").exists()
    run(tmp_path, "AAAA", "BBBB")
    assert dry_run(questions(2), scripted("AAAA", "BBBB"), TeacherSettings(n=4), tmp_path).requests == 0


def test_the_yield_counts_questions_reasons_rates_and_tokens(tmp_path: Path) -> None:
    """Golds A, B, C, D, A: q0 1 of 4 right; q1 none; q2 2 of 4 (2 wrong); q3 1 right, 3 without a label; q4 all."""
    labels = ["ABCD", "AAAA", "CCAB", "D---", "AAAA"]
    _, found = run(tmp_path, *labels)
    assert found.model_dump(exclude={"examples"}) == {
        "questions": 5,
        "answered": 5,
        "responses": 20,
        "correct": 8,
        "unparsed": 3,
        "kept": 1,
        "dropped": {"fewer than 3 wrong": 2, "no correct": 1, "no wrong with a label": 1},
        "rates": {"0.0": 1, "0.2": 2, "0.5": 1, "1.0": 1},
        "prompt_tokens": 0,
        "tokens": 60,
        "rows": {"sft": 8, "preferences": 1, "outcome": 20},
        "refused": 0,
        "reasons": "",
        "other_models": {},
    }
    kinds = [(e.label is None, e.correct) for e in found.examples]
    assert kinds == [(False, True), (False, False), (True, False)]
    assert "1 questions give pairs" in "\n".join(found.lines())


def test_every_file_has_a_manifest_with_counts_versions_seed_and_hash(tmp_path: Path) -> None:
    run(tmp_path, "ABCD", "AAAA", seed=3)
    found = {kind: read_manifest(tmp_path / f"{kind}.jsonl") for kind in ("responses", "sft", "preferences", "outcome")}
    assert {kind: manifest.kind for kind, manifest in found.items()} == {kind: kind for kind in found}
    assert all(m.seed == 3 and m.recipe_hash and m.versions["catto"] for m in found.values())
    none = dict.fromkeys(("unparsed", "temperature_ignored", "refused", "other_model"), 0)
    assert found["responses"].counts == {"responses": 8, "correct": 1, **none}
    assert [found[kind].counts["rows"] for kind in ("sft", "preferences", "outcome")] == [1, 1, 8]


# Rows


def answered(labels: str, gold: str = "A", reasoning: bool = True) -> AnsweredQuestion:
    question = questions(1)[0].model_copy(update={"gold": gold})
    responses = tuple(
        Response(
            question="q0",
            sample=i,
            text="...",
            reasoning=f"r{i}",
            label=None if label == "-" else label,
            correct=label == gold,
            model="m",
        )
        for i, label in enumerate(labels)
    )
    return AnsweredQuestion(question, render_messages(question, reasoning=reasoning), responses)


def test_sft_rows_are_the_correct_responses_in_the_one_form() -> None:
    rows = list(sft_rows(answered("ABA-"), TeacherSettings()))
    assert [row.completion[0].content for row in rows] == [render_completion("r0", "A"), render_completion("r2", "A")]
    assert {(row.label, row.correctness_rate) for row in rows} == {("A", 0.5)}
    assert rows[0].prompt == render_messages(answered("A").question)


def test_outcome_rows_are_all_responses_and_an_unparsed_one_stays_open() -> None:
    rows = list(outcome_rows(answered("AB-"), TeacherSettings()))
    assert [row.label for row in rows] == ["A", "B", None]
    assert rows[2].completion[0].content == render_completion("r2", None)
    assert rows[2].completion[0].content.endswith("<answer>\n")


def test_answer_first_rows_have_no_reasoning_and_none_stands_twice() -> None:
    (row,) = sft_rows(answered("BAAB", reasoning=False), TeacherSettings(reasoning=False))
    assert row.completion[0].content == render_completion(None, "A")
    assert row.prompt == render_messages(answered("A").question, reasoning=False)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ("ABCD", None),
        ("AB--", None),
        ("ABC", "fewer than 3 wrong"),
        ("BBBB", "no correct"),
        ("A---", "no wrong with a label"),
    ],
)
def test_a_question_gives_a_pair_with_one_correct_and_three_wrong(labels: str, reason: str | None) -> None:
    assert explain_no_pair(answered(labels), TeacherSettings()) == reason
    assert len(list(preference_rows(answered(labels), TeacherSettings()))) == (reason is None)


@settings(max_examples=100, deadline=None)
@given(st.text("ABCD-", min_size=1, max_size=10), st.integers(1, 5), st.integers(0, 3))
def test_pairs_are_distinct_right_over_labelled_wrong_and_repeatable(labels: str, pairs: int, seed: int) -> None:
    given_settings = TeacherSettings(pairs_per_question=pairs, seed=seed, min_wrong=1)
    rows = list(preference_rows(answered(labels), given_settings))
    assert rows == list(preference_rows(answered(labels), given_settings))
    right, wrong = labels.count("A"), sum(labels.count(x) for x in "BCD")
    assert len(rows) == min(pairs, right * wrong)
    assert len({(row.chosen, row.rejected) for row in rows}) == len(rows)
    for row in rows:
        assert parse_response(row.chosen[0].content, LABELS).label == row.chosen_label == row.gold == "A"
        assert parse_response(row.rejected[0].content, LABELS).label == row.rejected_label != "A"
        assert row.correctness_rate == labels.count("A") / len(labels)


def test_the_seed_moves_the_pair() -> None:
    found = {next(preference_rows(answered("AAABBB"), TeacherSettings(seed=s))).rejected for s in range(20)}
    assert len(found) == 3


def test_each_question_draws_its_pair_by_itself() -> None:
    """Ten questions with the same nine pairs to draw from: one draw for all would favour a place among the samples."""
    group = answered("AAABBB")
    found = [
        next(preference_rows(group._replace(question=question), TeacherSettings())) for question in questions(40)[::4]
    ]
    assert len({(row.chosen, row.rejected) for row in found}) > 3


def test_a_response_to_no_question_is_an_error() -> None:
    with pytest.raises(ValueError, match="'q0', which is not among"):
        list(
            answered_questions(
                [], [Generation(question="q0", sample=0, text="A", model="m")], TeacherSettings(), drawn=True
            )
        )
