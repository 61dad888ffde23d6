"""Held-out preference accuracy: pairs that no training saw, ordered by the implicit reward of DPO."""

from __future__ import annotations

import json
from itertools import pairwise
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

import dense
import pytest
import torch
from experiment_world import RECIPE, Finished, catto, finished, write_recipe
from pairs import preference_rows
from tiny import tiny_model, tiny_tokenizer

from catto.io.record_files import read_records, write_records
from catto.metrics.preference import margins_of, preference_accuracy, preference_interval, reward_margins
from catto.pipeline.plan import Graph
from catto.pipeline.stage import list_needed
from catto.prompts import prompt_ids, render_completion
from catto.recipe.settings import Recipe
from catto.records import Message, PairLogprobs, PairMargin, PreferenceRow, Question, Response
from catto.report.numbers import Numbers
from catto.training.pair_logprobs import pair_logprobs, tokenize_pairs

ROWS = preference_rows(11)
# A response, its end and where its label is, without the library's own search for it.
OPEN = "<answer>\n"


def scored(model: Any, rows: list[PreferenceRow], **options: Any) -> list[PairLogprobs]:
    tokenizer = tiny_tokenizer()
    return pair_logprobs(model, tokenize_pairs(tokenizer, rows), tokenizer.pad_token_id, **options)


def dense_reward(policy: Any, start: Any, row: PreferenceRow, text: str, *, reasoning: bool) -> float:
    """log pi(y | x) - log pi_start(y | x) from full logits in float64, one response at a time."""
    tokenizer = tiny_tokenizer()
    prompt = list(prompt_ids(tokenizer, row.prompt))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    scored_tokens = [*ids, tokenizer.eos_token_id]
    if reasoning:
        before_label = text[: text.rindex(OPEN) + len(OPEN)]
        scored_tokens = tokenizer(before_label, add_special_tokens=False)["input_ids"]
    total = 0.0
    for sign, model in ((1, policy), (-1, start)):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + scored_tokens])).logits[0]
        positions = logits[len(prompt) - 1 : -1]
        total += sign * float(dense.stats(positions, torch.tensor(scored_tokens))["target"].sum())
    return total


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2", "mamba"])  # shared prompts; also absolute positions; padded
@pytest.mark.parametrize("batch_size", [1, 6, 64])
def test_margins_equal_a_dense_float64_reference(architecture: str, batch_size: int) -> None:
    policy = tiny_model(seed=1, arch=architecture)
    start = tiny_model(seed=2, arch=architecture)
    found = reward_margins(scored(policy, ROWS, batch_size=batch_size), scored(start, ROWS, batch_size=batch_size))
    policy = tiny_model(seed=1, arch=architecture).double()
    start = tiny_model(seed=2, arch=architecture).double()
    for row, margin in zip(ROWS, found, strict=True):
        assert margin.question == row.question
        for reasoning, value in ((False, margin.whole), (True, margin.reasoning)):
            chosen = dense_reward(policy, start, row, row.chosen[-1].content, reasoning=reasoning)
            rejected = dense_reward(policy, start, row, row.rejected[-1].content, reasoning=reasoning)
            assert value == pytest.approx(chosen - rejected, rel=1e-5, abs=1e-5)


def test_the_start_model_itself_gives_exactly_one_half() -> None:
    """Every margin is a tie, not nearly one."""
    margins = reward_margins(scored(tiny_model(seed=1), ROWS), scored(tiny_model(seed=1), ROWS))
    for part in ("whole", "reasoning"):
        assert margins_of(margins, part) == [0.0] * len(ROWS)
        assert preference_accuracy(margins_of(margins, part)) == 0.5
        interval = preference_interval([margins, margins], part, resamples=50)
        assert (interval.value, interval.low, interval.high) == (0.5, pytest.approx(0.5), pytest.approx(0.5))


def test_swapping_chosen_and_rejected_gives_the_complement() -> None:
    swapped = []
    for row in ROWS:
        turns = {"chosen": row.rejected, "rejected": row.chosen}
        labels = {"chosen_label": row.rejected_label, "rejected_label": row.chosen_label}
        swapped.append(row.model_copy(update={**turns, **labels}))
    accuracies = []
    for rows in (ROWS, swapped):
        margins = reward_margins(scored(tiny_model(seed=1), rows), scored(tiny_model(seed=2), rows))
        accuracies.append([preference_accuracy(margins_of(margins, part)) for part in ("whole", "reasoning")])
    whole, reasoning = zip(*accuracies, strict=True)
    assert sum(whole) == pytest.approx(1.0)
    assert sum(reasoning) == pytest.approx(1.0)
    assert whole[0] != 0.5  # else the test could not fail


def answer_first(row: PreferenceRow) -> PreferenceRow:
    chosen = (Message(role="assistant", content=render_completion(None, row.chosen_label)),)
    rejected = (Message(role="assistant", content=render_completion(None, row.rejected_label)),)
    return row.model_copy(update={"chosen": chosen, "rejected": rejected})


def test_answers_without_reasoning_have_no_accuracy_of_their_reasoning() -> None:
    rows = [answer_first(row) for row in ROWS]
    margins = reward_margins(scored(tiny_model(seed=1), rows), scored(tiny_model(seed=2), rows))
    assert {margin.reasoning for margin in margins} == {None}
    assert margins_of(margins, "reasoning") == []
    assert isnan(preference_interval([margins], "reasoning", resamples=10).value)
    assert 0 <= preference_interval([margins], "whole", resamples=10).value <= 1


def test_a_pair_with_the_same_reasoning_twice_is_a_tie_among_others() -> None:
    """Two pairs are ordered by their reasoning and one cannot be: (1 + 0 + 0.5) / 3."""
    margins = [PairMargin(question=str(n), whole=1.0, reasoning=value) for n, value in enumerate((2.0, -1.0, None))]
    assert preference_accuracy(margins_of(margins, "reasoning")) == 0.5
    assert preference_accuracy(margins_of(margins, "whole")) == 1.0


def test_every_seed_counts_the_same_and_pairs_of_a_question_are_drawn_together() -> None:
    """Seed 0: one pair, ordered. Seed 1: three pairs, none ordered. Mean over seeds 0.5, not 1 / 4."""
    one = [PairMargin(question="a", whole=1.0, reasoning=None)]
    three = [PairMargin(question=name, whole=-1.0, reasoning=None) for name in "bcd"]
    assert preference_interval([one, three], "whole", resamples=200).value == 0.5
    # The pairs of one question always agree, so a single question has no spread whatever the number of its pairs.
    alike = [PairMargin(question="a", whole=sign, reasoning=None) for sign in (1.0, -1.0) * 5]
    interval = preference_interval([alike], "whole", resamples=200)
    assert (interval.low, interval.high) == (pytest.approx(0.5), pytest.approx(0.5))


def test_the_interval_covers_what_a_normal_approximation_does() -> None:
    """400 pairs, 300 of them ordered: 0.75 +- 1.96 sqrt(0.75 * 0.25 / 400) = [0.708, 0.792]."""
    margins = [PairMargin(question=str(n), whole=1.0 if n % 4 else -1.0, reasoning=None) for n in range(400)]
    interval = preference_interval([margins], "whole", resamples=2000)
    assert interval.value == 0.75
    assert (interval.low, interval.high) == (pytest.approx(0.7076, abs=0.006), pytest.approx(0.7924, abs=0.006))


def test_pairs_longer_than_the_context_are_left_out() -> None:
    tokenizer = tiny_tokenizer()
    sizes = sorted(pair.tokens for pair in tokenize_pairs(tokenizer, ROWS))
    assert any(shorter < longer for shorter, longer in pairwise(sizes))
    kept = tokenize_pairs(tokenizer, ROWS, max_length=sizes[-1] - 1)
    assert [pair.tokens for pair in kept if pair.tokens >= sizes[-1]] == []
    assert 0 < len(kept) < len(ROWS)


def test_progress_counts_pairs() -> None:
    told: list[tuple[int, int]] = []
    scored(tiny_model(), ROWS, batch_size=8, progress=lambda *counts: told.append(counts))
    assert told == [(4, 11), (8, 11), (11, 11)]


# ---- in an experiment ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="finished")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(tmp_path_factory)


def numbers_of(root: Path) -> Numbers:
    (path,) = root.glob("stages/report-*/numbers.json")
    return Numbers.model_validate_json(path.read_text(encoding="utf-8"))


def test_no_training_has_seen_a_held_out_pair(finished: Finished) -> None:
    (held_out,) = finished.stages("held-out-pairs-*/preferences.jsonl")
    (trained,) = finished.stages("teacher-*/preferences.jsonl")
    (validation,) = finished.stages("validation-questions-*/validation.jsonl")
    pairs = {row.question for row in read_records(held_out, PreferenceRow)}
    assert pairs
    assert pairs <= {question.id for question in read_records(validation, Question)}
    assert not pairs & {row.question for row in read_records(trained, PreferenceRow)}


def test_every_trained_method_but_sft_is_measured_against_the_sft_model(finished: Finished) -> None:
    (start,) = finished.stages("pair-logprobs-sft-*/pair_logprobs.jsonl")
    before = list(read_records(start, PairLogprobs))
    measured = {cell.method: cell for cell in numbers_of(finished.root).cells}
    assert set(measured) == set(RECIPE["methods"])
    assert "preference_accuracy" not in measured["sft"].metrics
    for method in ("dpo matched", "rcft matched", "dpo+catto", "dpo+outcome"):
        name = method.replace(" ", "-")
        (policy,) = finished.stages(f"pair-logprobs-{name}-witnesses-*/pair_logprobs.jsonl")
        margins = reward_margins(list(read_records(policy, PairLogprobs)), before)
        (folder,) = finished.stages(f"preference-accuracy-{name}-witnesses-*")
        assert list(read_records(folder / "margins.jsonl", PairMargin)) == margins
        assert any(margin.whole for margin in margins)  # training has moved the model
        summary = json.loads((folder / "preference_accuracy.json").read_text(encoding="utf-8"))
        assert summary["n"] == len(before)
        cell = measured[method.split()[0]]
        assert cell.others["preference_pairs"] == len(before)
        for part, column in (("whole", "preference_accuracy"), ("reasoning", "preference_accuracy_reasoning")):
            values = margins_of(margins, part)
            assert summary[part] == {"accuracy": preference_accuracy(values), "mean_margin": fmean(values)}
            assert cell.metrics[column].value == preference_accuracy(values)
            assert cell.metrics[column].low <= cell.metrics[column].value <= cell.metrics[column].high


def test_the_tables_and_the_page_show_it(finished: Finished) -> None:
    (tables,) = finished.stages("report-*/tables")
    for name in ("summary.md", "in-distribution-matched.md"):
        text = (tables / name).read_text(encoding="utf-8")
        head = next(line for line in text.splitlines() if line.startswith("| Method"))
        assert "Pref. ↑" in head
        assert "reasoning ↑" in head
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| SFT")]
    assert [cell.strip() for cell in rows[0][-3:-1]] == ["-", "-"]
    page = (finished.root / "report.html").read_text(encoding="utf-8")
    assert 'data-metric="preference_accuracy"' in page
    assert 'data-metric="preference_accuracy_reasoning"' in page


def test_held_out_pairs_change_the_key_of_no_stage_but_the_report() -> None:
    keys = {}
    for asked in (False, True):
        evaluation = {**RECIPE["evaluation"], "preference_pairs": asked}
        recipe = Recipe.model_validate({**RECIPE, "evaluation": evaluation})
        keys[asked] = {stage.key: stage.kind for stage in list_needed([Graph(recipe).plan_report()])}
    gone = [kind for key, kind in keys[False].items() if key not in keys[True]]
    new = {kind for key, kind in keys[True].items() if key not in keys[False]}
    assert gone == ["report"]
    assert new == {"responses", "rows", "pair_logprobs", "preference_accuracy", "report"}


@pytest.mark.parametrize(
    ("source", "chosen", "asked"),
    [("witnesses", None, True), ("witnesses", False, False), ("server", None, False), ("server", True, True)],
)
def test_a_server_is_asked_for_held_out_pairs_only_by_choice(source: str, chosen: bool | None, asked: bool) -> None:
    teacher = {"source": source, "model": "m", "base_url": "http://localhost:1/v1"}
    evaluation = {**RECIPE["evaluation"], "preference_pairs": chosen}
    recipe = Recipe.model_validate({**RECIPE, "teacher": teacher, "evaluation": evaluation})
    names = [stage.name for stage in list_needed([Graph(recipe).plan_report()])]
    assert ("responses held-out pairs witnesses seed 0" in names) == asked


@pytest.mark.parametrize("held_out", [True, False])
def test_stored_responses_give_held_out_pairs_if_they_answer_validation_questions(
    finished: Finished, tmp_path: Path, held_out: bool
) -> None:
    names = ["teacher", "held-out-pairs"] if held_out else ["teacher"]
    stored: list[Response] = []
    for name in names:
        (path,) = finished.stages(f"{name}-witnesses-*/responses.jsonl")
        stored += read_records(path, Response)
    write_records(tmp_path / "stored.jsonl", stored)
    teacher = {"source": "responses", "responses": str(tmp_path / "stored.jsonl"), "n": 10}
    recipe = write_recipe(
        tmp_path, teacher=teacher, methods=["sft", "dpo"], evaluation={**RECIPE["evaluation"], "k": []}
    )
    done = catto("run", recipe, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = {cell.method: cell for cell in numbers_of(tmp_path / "runs" / "tiny").cells}
    assert ("preference_accuracy" in cells["dpo"].metrics) == held_out
    (tables,) = (tmp_path / "runs" / "tiny").glob("stages/report-*/tables")
    assert ("Pref." in (tables / "summary.md").read_text(encoding="utf-8")) == held_out
