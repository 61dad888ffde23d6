"""Every benchmark loader on rows in the hub's schema and in that of the original release."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catto.errors import DataError
from catto.io.tables import read_rows
from catto.prompts import render_messages
from catto.records import SPLITS, Question
from catto.tasks import TASKS, Task, load_questions
from catto.tasks.splits import draw_permutation

FIXTURES = Path(__file__).parent / "fixtures"


def questions(task: str | Task, split: str, folder: str | Path, **options: Any) -> tuple[list[Question], Any]:
    loaded = load_questions(task, split, data_dir=FIXTURES / folder, **options)  # type: ignore[arg-type]
    found = list(loaded)
    report = loaded.report
    assert report.read == report.kept + sum(report.dropped.values())
    assert sum(report.gold.values()) == report.kept == len(found)
    return found, report


def gold_text(question: Question) -> str:
    return next(option.text for option in question.options if option.label == question.gold)


def test_the_table_names_every_task_with_its_labels_and_licence() -> None:
    assert {name: task.labels for name, task in TASKS.items()} == {
        "mmlu": tuple("ABCD"),
        "snli": ("entailment", "neutral", "contradiction"),
        "anli": ("entailment", "neutral", "contradiction"),
        "tldr": tuple("AB"),
        "reward_bench_2": tuple("ABCD"),
        "commonsense_qa": tuple("ABCDE"),
        "witnesses": tuple("ABCD"),
        "readings": (),
    }
    assert all(task.licence for task in TASKS.values())
    assert "non-commercial" in load_questions("anli", "test", data_dir=FIXTURES / "anli_hub").report.licence
    assert {task.seeds for task in TASKS.values()} == {(0, 1, 2, 3, 4)}


@pytest.mark.parametrize("name", ["mmlu", "anli", "tldr", "commonsense_qa"])
@pytest.mark.parametrize("split", SPLITS)
def test_hub_and_release_schemas_give_the_same_questions(name: str, split: str) -> None:
    hub, release = questions(name, split, f"{name}_hub")[0], questions(name, split, f"{name}_release")[0]
    assert sorted(hub, key=lambda one: one.id) == sorted(release, key=lambda one: one.id)
    assert hub


@pytest.mark.parametrize("split", SPLITS)
def test_snli_hub_and_release_differ_only_in_the_id(split: str) -> None:
    def rows(folder: str) -> Counter[tuple[str, ...]]:
        return Counter((*one.fields.values(), one.gold) for one in questions("snli", split, folder)[0])

    assert rows("snli_hub") == rows("snli_release")


def test_mmlu_drops_leaks_and_numbers_repeated_rows() -> None:
    train, report = questions("mmlu", "train", "mmlu_hub")
    assert (report.read, report.dropped) == (5, {"content_in_test": 1})
    ice = sorted(one.id for one in train if "frozen" in one.fields["question"])
    assert len({key[:-2] for key in ice}) == 1
    assert [key[-2:] for key in ice] == ["-0", "-1"]
    assert {gold_text(one) for one in train} == {"Eight", "Carbon dioxide", "Ice"}


def test_mmlu_validation_rows_that_stand_in_test_go_and_letters_stay_in_place() -> None:
    validation, report = questions("mmlu", "validation", "mmlu_release")
    assert (report.dropped, report.unshuffled) == ({"content_in_test": 1}, 1)
    (green,) = [one for one in validation if "green" in one.fields["question"]]
    assert [option.text for option in green.options] == ["Blue", "Yellow", "Both A and B", "Red"]
    assert green.gold == "C"


def test_snli_drops_rows_without_consensus() -> None:
    train, report = questions("snli", "train", "snli_release")
    assert report.dropped == {"no_gold_label": 1, "content_in_test": 1}
    assert {frozenset(one.labels) for one in train} == {frozenset(WORDS)}
    assert all(option.text == option.label for one in train for option in one.options)
    assert Counter(one.gold for one in train) == {"entailment": 2, "neutral": 1, "contradiction": 2}


WORDS = ("entailment", "neutral", "contradiction")


@pytest.mark.parametrize("task", ["snli", "anli"])
def test_nli_words_are_listed_in_an_order_of_the_questions_id_and_the_gold_is_the_word(
    task: str, tmp_path: Path
) -> None:
    rows = [
        {"premise": f"p{n}", "hypothesis": "h", "label": n % 3, **({"uid": f"u{n}"} if task == "anli" else {})}
        for n in range(242)
    ]
    for split, part in (("train", rows[:240]), ("validation", rows[240:241]), ("test", rows[241:])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)), encoding="utf-8")
    found = list(load_questions(task, "train", files={split: tmp_path / f"{split}.jsonl" for split in SPLITS}))
    assert len(found) == 240
    for one in found:
        assert one.labels == tuple(WORDS[index] for index in draw_permutation(one.id, 3))
        assert one.gold == WORDS[int(one.fields["premise"][1:]) % 3]
        assert [option.text for option in one.options] == list(one.labels)
        listed = ", ".join(one.labels)
        assert render_messages(one)[1].content.endswith(f"Labels: {listed}")
    assert len({one.labels for one in found}) == 6
    # Each word stands in each place about a third of the time, and the gold too.
    for place in range(3):
        assert min(Counter(one.labels[place] for one in found).values()) > 55
    assert min(Counter(one.labels.index(one.gold) for one in found).values()) > 55


def test_tldr_repeats_that_contradict_each_other_stay_separate() -> None:
    train, _ = questions("tldr", "train", "tldr_hub")
    cat = [one for one in train if "cat hides" in one.fields["post"]]
    assert len({one.id for one in cat}) == 3
    assert Counter(gold_text(one) for one in cat) == {"Cat hides from guests.": 2, "Cats are animals.": 1}


@pytest.mark.parametrize("seed", range(5))
def test_tldr_halves_never_share_a_post(seed: int) -> None:
    halves = [questions("tldr", split, "tldr_release", seed=seed) for split in ("validation", "test")]
    posts = [{one.fields["post"] for one in found} for found, _ in halves]
    assert not posts[0] & posts[1]
    assert len(posts[0] | posts[1]) == 4
    assert all(report.dropped["no_post"] == 1 for _, report in halves)


def test_commonsense_qa_tracks_the_gold_through_equal_option_texts(tmp_path: Path) -> None:
    """ "key" stands at B and at D, the answer is D: the gold is wherever index 3 went, before or behind its double."""
    choices = {"label": list("ABCDE"), "text": ["hammer", "key", "spoon", "key", "rope"]}
    rows = [{"id": f"k{n}", "question": f"Lock {n}?", "choices": choices, "answerKey": "D"} for n in range(30)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = list(load_questions("commonsense_qa", "train", files={"train": tmp_path / "train.jsonl"}))
    orders = {one.id: draw_permutation(one.id, 5) for one in found}
    assert {order.index(3) < order.index(1) for order in orders.values()} == {True, False}
    assert all(one.gold == "ABCDE"[orders[one.id].index(3)] for one in found)
    assert {gold_text(one) for one in found} == {"key"}


def test_commonsense_qa_ignores_the_release_file_without_answers() -> None:
    loaded = load_questions("commonsense_qa", "test", data_dir=FIXTURES / "commonsense_qa_release")
    assert [Path(name).name for name in loaded.report.files] == ["dev_rand_split.jsonl"]


def test_reward_bench_2_takes_one_right_and_three_wrong_replies_of_a_tie() -> None:
    found = [one for split in SPLITS for one in questions("reward_bench_2", split, "reward_bench_2")[0]]
    raws = {raw["id"]: raw for _, raw in read_rows(FIXTURES / "reward_bench_2" / "test.jsonl")}
    for one in found:
        texts = {option.text for option in one.options}
        assert len(texts) == 4
        assert len(texts & set(raws[one.id]["chosen"])) == 1
        assert len(texts & set(raws[one.id]["rejected"])) == 3
        assert gold_text(one) in raws[one.id]["chosen"]


def test_reward_bench_2_skips_rows_with_fewer_than_three_rejected() -> None:
    for split in SPLITS:
        _, report = questions("reward_bench_2", split, "reward_bench_2")
        assert (report.read, report.dropped["fewer_than_three_rejected"]) == (22, 1)


def test_reward_bench_2_shuffles_even_where_a_reply_names_letters() -> None:
    """The chosen reply comes first in the source, so an unshuffled question would always answer A."""
    found = [
        one
        for split in ("train", "validation", "test")
        for one in questions("reward_bench_2", split, "reward_bench_2")[0]
    ]
    assert any("A or B" in option.text for one in found for option in one.options)
    assert len({one.gold for one in found}) > 1


def test_reward_bench_2_of_the_release_size_gives_187_and_187_and_about_a_third_to_train(tmp_path: Path) -> None:
    """Each seed holds out a fifth, so 0.8^5 = 32.8 % of 1,865 rows stay: 611 on average, spread about 11."""
    row = {"chosen": ["yes"], "rejected": ["no", "never", "not"]}
    lines = [json.dumps({"id": str(n), "prompt": f"Question {n}", **row}) for n in range(1865)]
    (tmp_path / "test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sizes = {split: len(list(load_questions("reward_bench_2", split, seed=3, data_dir=tmp_path))) for split in SPLITS}
    assert (sizes["validation"], sizes["test"]) == (187, 187)
    assert 570 < sizes["train"] < 650
    train = {one.id for one in load_questions("reward_bench_2", "train", seed=3, data_dir=tmp_path)}
    for seed in range(5):
        held = [
            {one.id for one in load_questions("reward_bench_2", split, seed=seed, data_dir=tmp_path)}
            for split in SPLITS[1:]
        ]
        assert not held[0] & held[1]
        assert not train & (held[0] | held[1])


def test_a_part_cut_from_snli_train_keeps_captions_whole(tmp_path: Path) -> None:
    def pair(number: int) -> dict[str, str]:
        caption = {"captionID": f"{number // 3}", "sentence1": f"Premise {number // 3}", "gold_label": "neutral"}
        return {**caption, "pairID": f"p{number}", "sentence2": f"Hypothesis {number}"}

    (tmp_path / "snli_1.0_train.jsonl").write_text("\n".join(json.dumps(pair(n)) for n in range(300)), encoding="utf-8")
    parts = {split: load_questions("snli", split, seed=1, data_dir=tmp_path) for split in SPLITS}
    captions = {split: {one.fields["premise"] for one in part} for split, part in parts.items()}
    assert len(captions["validation"]) == len(captions["test"]) == 10
    assert not captions["validation"] & captions["test"]
    assert not captions["train"] & (captions["validation"] | captions["test"])
    assert "cut from the training file" in parts["train"].report.notes[0]
    assert parts["train"].report.dropped["cut_by_another_seed"] > 0


def shuffled_copy(folder: Path, target: Path, seed: int) -> Path:
    target.mkdir()
    for path in folder.glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        random.Random(seed).shuffle(lines)
        (target / path.name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


@pytest.mark.parametrize(
    "folder", ["mmlu_hub", "snli_hub", "anli_hub", "tldr_hub", "reward_bench_2", "commonsense_qa_hub"]
)
def test_row_order_changes_nothing(folder: str, tmp_path: Path) -> None:
    name = folder.removesuffix("_hub")
    other = shuffled_copy(FIXTURES / folder, tmp_path / "shuffled", 5)
    for split in SPLITS:
        for options in ({}, {"limit": 2}):
            first, second = questions(name, split, folder, **options)[0], questions(name, split, other, **options)[0]
            if split == "train" and not options:  # streams in the order of the file
                first, second = (sorted(found, key=lambda one: one.id) for found in (first, second))
            assert first == second


def test_limit_draws_a_subset_and_counts_the_rest() -> None:
    every, _ = questions("mmlu", "train", "mmlu_hub")
    some, report = questions("mmlu", "train", "mmlu_hub", limit=2)
    assert len(some) == 2
    assert report.dropped == {"content_in_test": 1, "not_drawn": 2}
    assert {one.id for one in some} < {one.id for one in every}


def test_a_limit_comes_in_place_of_the_tasks_own_number() -> None:
    few = replace(TASKS["mmlu"], sample=1)
    folder = FIXTURES / "mmlu_hub"
    sizes = [len(list(load_questions(few, "validation", data_dir=folder, **more))) for more in ({}, {"limit": 2})]
    assert sizes == [1, 2]


def test_option_order_depends_on_the_id_only() -> None:
    first, second = (
        next(one for one in questions("mmlu", split, "mmlu_hub", seed=seed)[0] if "clock" in one.fields["question"])
        for split, seed in (("validation", 0), ("validation", 4))
    )
    assert first == second
    order = draw_permutation(first.id, 4)
    assert [option.text for option in first.options] == [["Weight", "Time", "Heat", "Sound"][index] for index in order]


@pytest.mark.parametrize("value", ["{p}/mmlu_hub/test.jsonl", "{p}/mmlu_hub/te*.jsonl", ["{p}/mmlu_hub/test.jsonl"]])
def test_files_are_a_path_a_glob_or_a_list(value: Any) -> None:
    places = value.format(p=FIXTURES) if isinstance(value, str) else [item.format(p=FIXTURES) for item in value]
    assert len(list(load_questions("mmlu", "test", files={"test": places}))) == 3


def test_the_hub_is_asked_for_where_there_is_no_file_and_its_failure_is_one_line() -> None:
    with pytest.raises(DataError) as caught:
        list(load_questions("snli", "test"))
    assert str(caught.value).startswith("stanfordnlp/snli@cdb5c3d5eed6ead6e5a341c8e56e669bb666725b:test: ")
    assert "\n" not in str(caught.value)


def test_loaded_questions_have_a_length_and_are_still_all_there() -> None:
    loaded = load_questions("witnesses", "test", limit=5)
    first = next(loaded)
    assert len(loaded) == 5
    rest = list(loaded)
    assert [first, *rest] == list(load_questions("witnesses", "test", limit=5))
    assert len(loaded) == 5
