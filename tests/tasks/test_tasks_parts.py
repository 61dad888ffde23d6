"""The parts under the loaders: hashes, normalisation, cuts, draws, file formats."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catto.io.tables import read_rows
from catto.tasks import from_file, load_questions
from catto.tasks.splits import (
    Cut,
    Draft,
    SplitEntry,
    assign_groups,
    content_key,
    draw_entries,
    draw_permutation,
    names_letters,
    normalise_text,
)


def test_permutations_are_uniform() -> None:
    """4! = 24 orders, 24,000 keys: about 1,000 each; chi-squared (23 degrees) is under its 99.9 % point, 49.7."""
    seen = Counter(tuple(draw_permutation(f"q{n}", 4)) for n in range(24_000))
    assert len(seen) == 24
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < 49.7


@pytest.mark.parametrize(
    "option",
    [
        *(
            "A and B",
            "Both A and C",
            "both b and c.",
            "(A) and (C)",
            "Neither (a) nor (b)",
            "A, B, and C",
            "either A or B",
        ),
        *("B only", "B & D", "Options A and B", "a and b", "A or C only", "All of (a), (b) and (c) will be true."),
    ],
)
def test_options_that_name_letters_are_seen(option: str) -> None:
    assert names_letters(("One", option))


@pytest.mark.parametrize(
    "option", ["A dog", "a cat and a dog", "Plan B", "Vitamin C", "both a lion and a bear", "AB", "and"]
)
def test_articles_and_single_letters_name_no_option(option: str) -> None:
    assert not names_letters(("One", option))


@pytest.mark.parametrize("form", ["({}) {}", "{}. {}", "{}) {}", "{}: {}", " {}.{}"])
def test_options_that_carry_their_letter_do_not_move(form: str) -> None:
    options = tuple(form.format(letter, text) for letter, text in zip("ABC", ("red", "blue", "green"), strict=True))
    assert names_letters(options)
    assert not names_letters((options[1], options[0], options[2]))  # not the letters of their places
    assert not names_letters(("A. Lincoln", "red", "E. coli"))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("The  cat\nsat.", "the cat sat"),
        ("Straße", "STRASSE"),
        ("ﬁsh", "fish"),
        ("\uff37\uff49\uff44\uff45", "wide"),
        ("cafe\u0301", "caf\u00e9"),
        ("“quoted”—text", '"quoted" text'),
        ("zero\u200bwidth", "zerowidth"),
    ],
)
def test_normalisation_folds(left: str, right: str) -> None:
    assert normalise_text(left) == normalise_text(right)


@pytest.mark.parametrize(
    ("left", "right"), [("P \u2227 Q", "P \u2228 Q"), ("2 < 3", "2 > 3"), ("~P", "P"), ("?", "!"), ("$5", "£5")]
)
def test_normalisation_keeps_what_carries_meaning(left: str, right: str) -> None:
    assert normalise_text(left) != normalise_text(right)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_normalisation_is_idempotent(text: str) -> None:
    assert normalise_text(normalise_text(text)) == normalise_text(text)


def test_content_ignores_option_order_and_gold_but_not_where_a_text_stands() -> None:
    row = Draft({"question": "Q"}, ("x", "y"), 0)
    assert content_key(row) == content_key(Draft({"question": "q?"}, ("Y", "x."), 1))
    assert content_key(row) != content_key(Draft({"question": "Q x"}, ("y", ""), 0))
    assert content_key(Draft({"a": "x", "b": "y"}, ("1", "2"), 0)) != content_key(
        Draft({"a": "y", "b": "x"}, ("1", "2"), 0)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=80), st.integers(0, 4), st.randoms(use_true_random=False))
def test_a_cut_keeps_groups_whole_and_meets_its_share(groups: list[int], seed: int, chance: random.Random) -> None:
    entries = [SplitEntry(n, f"id{n}", bytes([group]), bytes([n])) for n, group in enumerate(groups)]
    cut = Cut("train", {"validation": 0.25, "test": 0.25}, rest="train")
    parts = assign_groups(entries, cut, "t", seed)
    again = list(entries)
    chance.shuffle(again)
    assert assign_groups(again, cut, "t", seed) == parts
    assert set(parts) == {entry.group for entry in entries}
    rows = Counter(parts[entry.group] for entry in entries)
    target, largest = int(0.25 * len(entries) + 0.5), max(Counter(groups).values())
    assert min(target, len(entries)) <= rows["validation"] < target + largest or target == 0


def test_a_draw_is_uniform_without_replacement() -> None:
    """20 ids, 5 drawn, 4,000 seeds: each id about 1,000 times, standard deviation sqrt(4000 * 3/16) = 27."""
    entries = [SplitEntry(n, f"id{n}", b"", b"") for n in range(20)]
    seen: Counter[str] = Counter()
    for seed in range(4000):
        drawn = [entry.id for entry in draw_entries(entries, task="t", split="test", seed=seed, count=5)]
        assert len(set(drawn)) == 5
        seen.update(drawn)
    assert all(abs(count - 1000) < 5 * 27 for count in seen.values())


def test_repeated_rows_without_ids_are_numbered_by_occurrence(tmp_path: Path) -> None:
    rows = [{"q": name, "o": ["x", "y"], "a": "A"} for name in ("a", "b", "a", "a", "b", "c")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"question": "q", "options": "o", "answer": "a"}
    questions = list(load_questions(from_file({"test": path}, fields=fields), "test"))
    found = sorted((question.fields["question"], int(question.id.rpartition("-")[2])) for question in questions)
    assert found == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0)]
    assert len({question.id.rpartition("-")[0] for question in questions}) == 3


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "json", "data.json", "csv", "csv.gz", "parquet", "parquet.gz"])
def test_every_format_gives_the_same_rows(form: str, tmp_path: Path) -> None:
    rows = [{"question": 'Say "hi",\nthen?', "answer": "é"}, {"question": "Two", "answer": "B"}]
    path = tmp_path / f"rows.{form}"
    path.write_bytes(encoded(rows, form, tmp_path))
    assert list(read_rows(path)) == [(1, rows[0]), (2, rows[1])]


def encoded(rows: list[dict[str, str]], form: str, folder: Path) -> bytes:
    if form.endswith(".gz"):
        return gzip.compress(encoded(rows, form.removesuffix(".gz"), folder))
    if form == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "table")
        return (folder / "table").read_bytes()
    if form == "csv":
        quoted = ['"' + row["question"].replace('"', '""') + '",' + row["answer"] for row in rows]
        return ("question,answer\n" + "\n".join(quoted)).encode()
    if form == "jsonl":
        return "\n".join(map(json.dumps, rows)).encode()
    return json.dumps({"data": rows} if form == "data.json" else rows).encode()
