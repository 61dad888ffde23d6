"""Confidence after reasoning: equal to one dense forward over the final text, whatever the batches."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_world import LETTERS, NLI, Recording, before, dense_logits, encode, engine, model, questions, tokenizer
from tiny import tiny_model

from catto.answer.confidence import close_response, close_token_ids
from catto.answer.forms import VERSION
from catto.answer.response import parse_answer, parse_response
from catto.answer.tokens import encode_opening
from catto.engines import TAU_GRID
from catto.engines.transformers import TransformersEngine
from catto.errors import DataError
from catto.io.record_files import manifest_path, read_manifest, read_records
from catto.metrics.temperature import confidence_at
from catto.predict import evaluate, evaluate_model, generate
from catto.prompts import render_completion
from catto.records import Prediction, Question
from catto.token_ids import decode_ids

pytestmark = pytest.mark.slow

GREEDY: dict[str, Any] = {"max_tokens": 24}
SAMPLED: dict[str, Any] = {"max_tokens": 24, "k": 3, "temperature": 1.3, "seed": 4}


def place_of(text: str, ids: list[int], labels: tuple[str, ...]) -> tuple[list[int], dict[str, int]]:
    """Tokens before the label and each label's token, for this word-level vocabulary: a word may carry its space."""
    span = parse_response(text, labels, cut=len(ids) == SAMPLED["max_tokens"]).span
    if span is None:
        keep, ending = close_response(text)
        return before(ids, keep) + encode(ending), {label: encode(label)[0] for label in labels}
    prefix = before(ids, span[0])
    space = " " if len(decode_ids(tokenizer(), prefix)) < span[0] else ""
    return prefix, {label: encode(space + label)[0] for label in labels}


@pytest.mark.parametrize("batch_size", [1, 3, 16])
@pytest.mark.parametrize("labels", [LETTERS, NLI])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_label_logprobs_are_those_of_a_dense_forward(
    batch_size: int, labels: tuple[str, ...], options: dict[str, Any]
) -> None:
    asked = {question.id: question for question in questions(10, labels)}
    recording = Recording(model(), tokenizer(), batch_size=batch_size)
    predictions = evaluate(recording, asked.values(), **options)
    sources = {one.source for one in predictions}
    assert {"free", "fallback"} <= sources if options is SAMPLED else sources == {"free"}
    for one in predictions:
        prefix, candidates = place_of(one.text, recording.ids[one.question, one.sample], labels)
        logits = dense_logits(asked[one.question], prefix)
        expected = logits.log_softmax(-1)
        assert one.label_logprobs == pytest.approx(
            {label: float(expected[token]) for label, token in candidates.items()}, abs=1e-5
        )
        assert one.label is not None
        assert one.confidence == pytest.approx(float(expected[candidates[one.label]].exp()), abs=1e-5)
        assert one.logsumexp is not None
        for tau in TAU_GRID:
            exact = (logits / tau).logsumexp(-1) - logits.max() / tau
            assert one.logsumexp[str(tau)] == pytest.approx(float(exact), abs=1e-5)


def test_batch_size_changes_no_answer() -> None:
    found = [evaluate(engine(size), questions(10), **SAMPLED) for size in (1, 16)]
    for one, other in zip(*found, strict=True):
        assert (one.text, one.label, one.source) == (other.text, other.label, other.source)
        assert one.confidence == pytest.approx(other.confidence, abs=1e-6)


def test_predictions_come_by_question_then_sample() -> None:
    predictions = evaluate(engine(4), questions(7), **SAMPLED)
    assert [(one.question, one.sample) for one in predictions] == [(f"q{i}", j) for i in range(7) for j in range(3)]
    assert len({one.text for one in predictions if one.question == "q1"}) > 1


def test_parsed_and_constrained_agree_where_the_answer_parses_in_our_form() -> None:
    """Cutting a parsed canonical answer off and scoring constrained gives the very same log-probabilities."""
    asked = {question.id: question for question in questions(20)}
    recording = Recording(model(), tokenizer())
    predictions = evaluate(recording, asked.values(), k=4, temperature=0.6, max_tokens=24)
    whole = [one for one in predictions if one.source == "free" and "\n</think>\n<answer>\n" in one.text]
    form = [one for one in whole if one.text.endswith(f"<answer>\n{one.label}\n</answer>")]
    assert len(form) > 3
    for one in form:
        ids = recording.ids[one.question, one.sample][:-3]
        closed = close_token_ids(tokenizer(), ids, LETTERS)
        assert closed is not None
        if list(closed.ids_before) != ids:
            continue  # the response wrote its white space another way
        expected = dense_logits(asked[one.question], list(closed.ids_before)).log_softmax(-1)
        assert one.label_logprobs == pytest.approx(
            {x: float(expected[path[0]]) for x, path in closed.paths.items()}, abs=1e-5
        )


def test_fallback_takes_the_best_label_and_never_renormalises() -> None:
    predictions = [one for one in evaluate(engine(), questions(20), **SAMPLED) if one.source == "fallback"]
    assert len(predictions) > 5
    for one in predictions:
        assert one.label_logprobs is not None
        assert one.label == max(one.label_logprobs, key=lambda label: one.label_logprobs[label])  # type: ignore[index]
        total = sum(torch.tensor(list(one.label_logprobs.values())).exp().tolist())
        assert total < 0.99
        assert one.confidence == pytest.approx(float(torch.tensor(one.label_logprobs[one.label]).exp()), abs=1e-7)
        assert confidence_at(one, kind="normalized") == pytest.approx(one.confidence / total, rel=1e-6)


def test_the_label_is_the_parsers() -> None:
    asked = {question.id: question for question in questions(20)}
    for one in evaluate(engine(), asked.values(), **SAMPLED):
        parsed = parse_answer(one.text, asked[one.question], cut=one.tokens == SAMPLED["max_tokens"])
        assert one.source == (parsed.source or "fallback")
        assert parsed.label in (None, one.label)


OPEN = "\n<answer>\n"
CLOSING = [
    ("", (0, "<answer>\n")),
    ("<think>\nso", (10, "\n</think>" + OPEN)),
    ("<think>\nso\n\n", (10, "\n</think>" + OPEN)),
    ("<think>\nso\n</thi", (10, "\n</think>" + OPEN)),
    ("<think>\nso\n</think>", (19, OPEN)),
    ("<think>\nso\n</think>\n<answ", (19, OPEN)),
    ("<think>\nso\n</think>\n<answer>\nA or B\n</answer>", (19, OPEN)),
    ("<think>\nI write <answer>B", (25, "\n</think>" + OPEN)),
    ("<think>\nin <answer> tags\n</think>\nB", (35, OPEN)),
    ("<think>\nin <answer> tags\n</think>\n", (33, OPEN)),
    ("<think>\nso\n</think>\nHm.\nQuestion: Why?\nThe answer is B.", (23, OPEN)),
    ("just words", (10, OPEN)),
    ("<Answer>none", (0, "<answer>\n")),
    ("a <b", (4, OPEN)),
]


@pytest.mark.parametrize(("text", "closed"), CLOSING)
def test_closing_a_response_by_hand(text: str, closed: tuple[int, str]) -> None:
    assert close_response(text) == closed


def test_closing_gives_the_canonical_form() -> None:
    text = render_completion("the right", None)
    cuts = [text[:end] for end in range(len("<think>\nthe right"), len(text) + 1)]
    assert {cut[: close_response(cut)[0]] + close_response(cut)[1] for cut in cuts} == {text}


def test_closed_tokens_fit_the_room() -> None:
    ids = encode("<think>\n" + " the" * 50)
    needed = len(encode_opening(tokenizer(), "\n</think>\n<answer>\n", LETTERS).ids_before)
    closed = close_token_ids(tokenizer(), ids, LETTERS, room=20)
    assert closed is not None
    assert len(closed.ids_before) == 20
    assert decode_ids(tokenizer(), closed.ids_before).endswith(" the\n</think>\n<answer>\n")
    assert list(closed.ids_before[: 20 - needed]) == ids[: 20 - needed]
    assert close_token_ids(tokenizer(), ids, LETTERS, room=1) is None


def test_a_response_that_fills_the_models_positions_still_gets_its_fallback() -> None:
    small = tiny_model(3, vocab_size=len(tokenizer()), max_position_embeddings=64)
    predictions = evaluate(TransformersEngine(small, tokenizer()), questions(4), max_tokens=100)
    assert {one.source for one in predictions} == {"fallback"}
    assert max(one.tokens or 0 for one in predictions) > 20


def test_the_one_call_on_a_model() -> None:
    direct = evaluate_model(model(), tokenizer(), questions(3), batch_size=4, max_tokens=16)
    assert direct == evaluate(engine(4), questions(3), max_tokens=16)


def test_progress_counts_what_is_right() -> None:
    steps: list[tuple[int, int, int]] = []
    predictions = evaluate(engine(1), questions(10), max_tokens=16, progress=lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == [4, 8, 10]
    assert steps[-1] == (10, 10, sum(one.label == one.gold for one in predictions))


def test_the_file_holds_the_predictions_and_a_finished_run_is_only_read(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "predictions.jsonl"
    predictions = evaluate(engine(2), questions(9), out=out, **SAMPLED)
    assert list(read_records(out, Prediction)) == predictions
    counts = read_manifest(out).counts
    assert counts["predictions"] == 27
    for source in ("plain", "fallback"):
        assert counts[source] == sum(one.source == source for one in predictions)
    assert sorted(path.name for path in out.parent.iterdir()) == ["predictions.jsonl", "predictions.manifest.json"]

    class Deaf(TransformersEngine):
        def generate(self, *_: Any) -> Any:
            raise AssertionError("a finished run generates nothing")

    assert evaluate(Deaf(model(), tokenizer(), batch_size=2), questions(9), out=out, **SAMPLED) == predictions


@pytest.mark.parametrize("cut", [1, 400, 3000, -1, -700])
def test_a_torn_file_is_made_whole_again(tmp_path: Path, cut: int) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    evaluate(engine(1), questions(9), out=whole, **SAMPLED)
    part = tmp_path / "torn.part.jsonl"
    part.write_bytes(whole.read_bytes()[:cut])
    manifest_path(part).write_bytes(manifest_path(whole).read_bytes())
    evaluate(engine(1), questions(9), out=out, **SAMPLED)
    assert out.read_bytes() == whole.read_bytes()
    assert manifest_path(out).read_bytes() == manifest_path(whole).read_bytes()
    assert not part.exists()


def test_a_chunk_is_on_the_disk_before_the_next_is_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut loses at most the chunk that is being made."""
    part = tmp_path / "p.part.jsonl"
    synced: dict[int, int] = {}  # file -> its size when it was last flushed to the disk
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def progress(done: int, total: int, right: int) -> None:
        assert synced[part.stat().st_ino] == part.stat().st_size
        assert part.read_bytes().count(b"\n") == done

    monkeypatch.setattr(os, "fsync", recorded)
    evaluate(engine(1), questions(9), out=tmp_path / "p.jsonl", max_tokens=4, progress=progress)


def test_killed_between_rename_and_manifest(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    predictions = evaluate(engine(), questions(3), out=out)
    manifest_path(out).rename(manifest_path(tmp_path / "p.part.jsonl"))
    assert evaluate(engine(), questions(3), out=out) == predictions
    assert read_manifest(out).counts["predictions"] == 3
    assert not manifest_path(tmp_path / "p.part.jsonl").exists()


def test_another_runs_file_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    evaluate(engine(), questions(3), out=out)
    with pytest.raises(DataError, match="belongs to other settings"):
        evaluate(engine(), questions(3), out=out, seed=1, temperature=0.5)
    with pytest.raises(DataError, match="belongs to other settings"):
        evaluate(engine(), questions(4), out=out)
    manifest_path(out).unlink()
    with pytest.raises(DataError, match="has no manifest"):
        evaluate(engine(), questions(3), out=out)


def test_another_parsers_predictions_are_refused_and_generations_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictions, generations = tmp_path / "p.jsonl", tmp_path / "g.jsonl"
    evaluate(engine(), questions(3), out=predictions, **GREEDY)
    text = generate(engine(), questions(3), out=generations, **GREEDY)
    monkeypatch.setattr("catto.answer.forms.VERSION", VERSION + 1)
    with pytest.raises(DataError, match="belongs to other settings"):
        evaluate(engine(), questions(3), out=predictions, **GREEDY)
    assert generate(engine(), questions(3), out=generations, **GREEDY) == text


def test_a_stored_row_out_of_place_is_told(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    evaluate(engine(), questions(3), out=out)
    lines = out.read_text().splitlines()
    out.write_text("\n".join([lines[0], lines[2], lines[1]]) + "\n")
    with pytest.raises(DataError, match=r"row 2: expected question q1 sample 0"):
        evaluate(engine(), questions(3), out=out)


def test_two_runs_never_write_the_same_file(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"

    def again(*_: int) -> None:
        with pytest.raises(DataError, match="another run is writing here"):
            evaluate(engine(1), questions(6), out=out, max_tokens=8)

    evaluate(engine(1), questions(6), out=out, max_tokens=8, progress=again)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="k is 4 at temperature 0"):
        evaluate(engine(), questions(2), k=4)
    with pytest.raises(ValueError, match="k is 0"):
        evaluate(engine(), questions(2), k=0)
    with pytest.raises(ValueError, match="'q0' occurs more than once"):
        evaluate(engine(), [*questions(1), *questions(1)])
    with pytest.raises(ValueError, match="no questions"):
        evaluate(engine(), [])


def test_labels_are_checked_before_anything_is_generated() -> None:
    class Deaf(TransformersEngine):
        def generate(self, *_: Any) -> Any:
            raise AssertionError("nothing may be generated")

    odd: list[Question] = questions(1, ("A", "Zebra"))
    with pytest.raises(ValueError, match="does not read label 'Zebra' back"):
        evaluate(Deaf(model(), tokenizer()), odd)


def test_predictions_are_plain_json(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    evaluate(engine(), questions(2), out=out)
    row = json.loads(out.read_text().splitlines()[0])
    assert row["engine"].startswith("transformers ")
    assert row["model"] == "tiny-answerer"
    assert set(row["logsumexp"]) == set(map(str, TAU_GRID))
