"""Which label a response gives: the forms that people write are read, nothing is guessed."""

from __future__ import annotations

import itertools
import re
import unicodedata
from pathlib import Path

import pytest
from answer_cases import LETTERS, NLI, answer, laws
from answer_table import TABLES
from hypothesis import given
from hypothesis import strategies as st

from catto.answer.forms import fold_choices, read_form
from catto.answer.response import parse_response


def read_label(text: str, labels: tuple[str, ...], texts: tuple[str, ...] | None = None) -> str | None:
    """Read a whole text by the forms."""
    reading = read_form(text, (0, len(text)), fold_choices(labels, texts))
    return None if reading is None else reading.label


CONVENTIONS = Path(__file__).parents[2] / "docs" / "conventions.md"
NOT_ANSWERS = ["", " ", "none", "E", "Z", "AB", "B2", "A.M.", "B-cells", "C++", "A's", "-", "A dog barks", "a dog"]
NOT_ANSWERS += ["A small (brown) dog", "A (small) dog", 'A "dog"', "I am sure", "It is a", "B is wrong", "not B"]
NOT_ANSWERS += ["The answer is not B", "Vitamin C", "The blood type is A", "vitamin b", "A and B", "A, B", "A/B", "A B"]
NOT_ANSWERS += [
    "a b",
    "B or C",
    "(A)(B)",
    "B\nC",
    "B\nc",
    "B (c)",
    "b) and c)",
    "A) x\nB) y",
    "B. C is wrong",
    "B, not A",
]
NOT_ANSWERS += ["The answer is A B", "A&B", "A -C", "A: wrong", "A) is false", "~~A~~", "The answer is not\nA"]
NOT_ANSWERS += ["Wrong answers:\nA", "(A) or <D>", "C\x00++", "C\u200b++", "C\x1c++", "A: the dog"]


@pytest.mark.parametrize("name", TABLES)
def test_every_answer_is_read_as_a_person_reads_it(name: str) -> None:
    labels, texts, rows = TABLES[name]
    assert {text: read_label(text, labels, texts) for text, _ in rows} == dict(rows)


def test_the_table_has_hundreds_of_answers_of_both_kinds() -> None:
    rows = [(name, *row) for name, table in TABLES.items() for row in table.rows]
    assert len({row[:2] for row in rows}) == len(rows) > 600
    assert sum(label is not None for *_, label in rows) > 300
    assert sum(label is None for *_, label in rows) > 200


@pytest.mark.parametrize("text", NOT_ANSWERS)
def test_no_label_two_labels_or_a_foreign_one_is_no_answer(text: str) -> None:
    assert answer(text) is None
    assert answer(text, texts=("a cat", "the dog", "c", "d")) is None


def test_two_leads_may_follow_each_other_and_not_three() -> None:
    assert answer("The answer is: option B") == "B"
    assert answer("Final answer: the answer is: option B") is None


def test_the_longer_of_two_labels_that_contain_each_other_is_read() -> None:
    labels = ("entailment", "not entailment")
    assert answer("Not  entailment", labels) == "not entailment"
    assert answer("entailment", labels) == "entailment"


def test_labels_that_differ_by_case_alone_are_told_apart_by_it() -> None:
    assert answer("b", ("b", "B")) == "b"
    assert answer("B", ("b", "B")) == "B"


def test_numbers_as_labels() -> None:
    assert answer("2", ("1", "2")) == "2"
    assert [answer(text, ("1", "2")) for text in ("1.5", "12", "$2", "-1", "2%")] == [None] * 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A) Both B and C", "A"),
        ("A (both b and c).", "A"),
        ("B. dog", "B"),
        ("C) A dog", "C"),
        ("A) dog", None),  # the text of B
        ("A dog", None),  # the text of C, no label
        ("dog", None),
        ("D) none at all", None),
    ],
)
def test_an_options_own_text_is_not_searched_and_anothers_contradicts(text: str, expected: str | None) -> None:
    assert answer(text, texts=("Both B and C", "dog", "A dog", "none")) == expected


BLOOD = ("B", "A", "AB", "O")  # the text of A is a label too


@pytest.mark.parametrize("text", ["A, B", "A B", "A = B", "A; B", "A - B", "A → B", "A | B"])
def test_two_labels_are_no_answer_where_one_is_the_others_text(text: str) -> None:
    assert answer(text, texts=BLOOD) is None


@pytest.mark.parametrize("text", ["A) B", "A. B", "A: B", "(A) B", "**A** B", "C - AB", "C (AB)"])
def test_a_text_that_is_a_label_is_read_where_it_is_set_apart(text: str) -> None:
    assert answer(text, texts=BLOOD) == ("C" if "C" in text else "A")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("The score is > 3", None), ("Answer: > 1", None), ("> the answer is 3", "3"), ("> (3)", "3"), ("→ 3", "3")],
)
def test_a_comparison_is_not_a_quotation(text: str, expected: str | None) -> None:
    assert answer(text, labels=("1", "2", "3", "4")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is likely.", "likely"),
        ("It is likely", "likely"),
        ("The answer is unlikely", "unlikely"),
        ("It's unlikely", "unlikely"),
        ("non\u2011toxic", "non-toxic"),
        ("Non\u2010Toxic.", "non-toxic"),
    ],
)
def test_labels_that_are_adverbs_or_have_hyphens(text: str, expected: str) -> None:
    assert answer(text, labels=("likely", "unlikely", "non-toxic")) == expected


@pytest.mark.parametrize("text", ["neutral - neutral", "Neutral: neutral", "neutral (neutral)"])
def test_a_label_that_is_its_own_text_may_be_repeated(text: str) -> None:
    assert answer(text, labels=NLI, texts=NLI) == "neutral"
    assert answer(text.lower().replace("neutral", "entailment", 1), labels=NLI, texts=NLI) is None


@pytest.mark.parametrize("text", ["It's B.", "It\u2019s B", "**Option B**: the dog", "**B)** the dog"])
def test_forms_inside_marks_and_contractions_are_read(text: str) -> None:
    assert answer(text, texts=("the cat", "the dog", "a cow", "d")) == "B"
    for more in ("**Option B** is correct.", "**Answer: B** (the dog)", "(Option B) the dog", "**(B)** is the answer"):
        assert answer(more, texts=("the cat", "the dog", "a cow", "d")) == "B"
    for other in (
        "**Option B**: the cat",
        "**Not B**: the dog",
        "**A or B** is correct",
        "**Option B** is not correct",
    ):
        assert answer(other, texts=("the cat", "the dog", "a cow", "d")) is None


def test_forms_inside_forms_have_an_end() -> None:
    texts = ("x" * 200_000, "y", "z", "w")
    for text in ("(" * 5_000 + "B" + ")" * 5_000, "B" + " is correct" * 1_000, "(B) is correct" * 500):
        assert read_label(text, LETTERS[:4], texts) is None


def test_repeated_option_texts_do_not_contradict() -> None:
    assert answer("B) dog", texts=("dog", "dog", "cat", "cow")) == "B"


wrappings = st.sampled_from(["{}", "({})", "[{}]", "**{}**", "`{}`", '"{}"', "'{}'", r"\boxed{{{}}}", "_{}_", "{}."])
innermost = st.sampled_from(["{}", "{}.", "{})", r"\text{{{}}}"])
leads = st.sampled_from(["", "Answer: ", "The answer is ", "Option ", "**Final answer:** ", "\n\n", "> ", "- "])
tails = st.sampled_from(["", "\n", " \n\n", "</answer>", "\n</answer> as said", "<|im_end|>"])
sets = st.sampled_from([LETTERS, NLI, ("yes", "no"), ("1", "2", "3")])


@laws
@given(st.data(), sets, leads, innermost, st.lists(wrappings, max_size=3, unique=True), tails, st.text(max_size=40))
def test_formatting_keeps_the_label_and_the_span_is_the_label(
    data: st.DataObject, labels: tuple[str, ...], lead: str, inner: str, wraps: list[str], tail: str, noise: str
) -> None:
    label = data.draw(st.sampled_from(labels))
    shown = data.draw(st.sampled_from([label, label.upper(), label.lower()] if lead in ("", "Answer: ") else [label]))
    lead = "" if lead in ("- ", "> ") and label.isdigit() else lead  # a negative number, a comparison
    twice = (("{})", "({})"), ("{}.", "{}."))  # brackets that do not match, and the beginning of "..."
    for wrap in [inner, *(wrap for wrap in wraps if (inner, wrap) not in twice)]:
        shown = wrap.format(shown)
    text = f"{noise}<answer>\n{lead}{shown}{tail}"
    found = parse_response(text, labels)
    assert found.label == label
    assert found.span is not None
    assert text[slice(*found.span)].lower() == label.lower()


@laws
@given(st.data(), sets, leads, wrappings, wrappings, st.sampled_from(["\n", " ", ", ", " or ", " / ", ". "]))
def test_a_second_label_takes_the_answer_away(
    data: st.DataObject, labels: tuple[str, ...], lead: str, wrap: str, other_wrap: str, between: str
) -> None:
    first, second = data.draw(st.lists(st.sampled_from(labels), min_size=2, max_size=2, unique=True))
    pair = [wrap.format(first), other_wrap.format(second)]
    text = f"<answer>{lead}{between.join(pair)}</answer>"
    assert parse_response(text, labels).label is None


pieces = st.sampled_from(
    ["<answer>", "</answer>", "<think>", "A", "b", " ", "\n", "(", "**", "is", "a", "\\boxed{", "<", "'"]
)


@laws
@given(st.one_of(st.text(max_size=200), st.lists(pieces, max_size=30).map("".join)), sets, st.booleans())
def test_arbitrary_text_never_raises_and_a_label_comes_with_its_span(
    text: str, labels: tuple[str, ...], with_options: bool
) -> None:
    found = parse_response(text, labels, [f"{label} or a" for label in labels] if with_options else None)
    assert (found.label is None) == (found.span is None)
    if found.span is not None:
        assert found.label in labels
        said = unicodedata.normalize("NFKC", text[slice(*found.span)]).casefold()
        assert found.label.casefold() in said
        assert (found.source == "free") == bool(re.search(r"<\s*answer\s*>", text, re.IGNORECASE))


# Two labels in one answer, over a grid of leads, formatting, connectors and tails.
WRAPS = ["{}", "({})", "**{}**", "{}.", "{})", r"\boxed{{{}}}", "<{}>"]
STARTS = ["", "Answer: ", "The correct answer is ", "I choose "]
BETWEEN = [
    " ",
    "\n",
    ", ",
    " or ",
    " and ",
    "/",
    "&",
    "+",
    "-",
    " - ",
    " -",
    ": ",
    "; ",
    ". ",
    "|",
    " vs ",
    "\t",
    " not ",
]
BETWEEN += [
    ", not ",
    " but not ",
    " rather than ",
    " = ",
    " > ",
    "\n\n",
    "\nor\n",
    " → ",
    "",
    "\x00",
    "\u200b",
    "\u2013",
    " (",
]
BETWEEN += [") ", "...", " is ", " is wrong, ", " is correct, ", "\nThe answer is ", " instead of ", "<", " is not "]
ENDS = ["", " is correct"]


@pytest.mark.parametrize(
    "labels", [("A", "B", "C"), ("neutral", "entailment"), ("yes", "no"), ("1", "2")], ids="/".join
)
def test_two_labels_are_never_an_answer(labels: tuple[str, ...]) -> None:
    """62,720 answers over the four sets of labels."""
    read = []
    choices = fold_choices(labels)
    for start, one, other, between, end in itertools.product(STARTS, WRAPS, WRAPS, BETWEEN, ENDS):
        text = start + one.format(labels[1]) + between + other.format(labels[0]) + end
        if between or one != "{}" or other != "{}":
            read += [text] if read_form(text, (0, len(text)), choices) else []
    assert read == []


def test_two_labels_are_no_answer_where_options_have_texts() -> None:
    labels, texts = ("A", "B"), ("the cat", "the dog")
    said = ["A", "B", "A) the cat", "B) the dog", "the cat", "the dog", "A: the dog", "B (the cat)"]
    for (one, other), between in itertools.product(itertools.permutations(said, 2), BETWEEN[:-1]):
        text = one + between + other
        if {one[0], other[0]} == {"A", "B"}:
            assert read_label(text, labels, texts) is None, text


def forms() -> list[list[str]]:
    """The rows of the table of forms in docs/conventions.md: form, example, label."""
    section = CONVENTIONS.read_text(encoding="utf-8").partition("### Forms of an answer")[2].partition("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_documented_forms_are_read_as_documented() -> None:
    rows = forms()
    assert {label for _, _, label in rows} == {"B", "none"}
    read = 0
    for form, examples, label in rows:
        for code in re.findall(r"`` .+? ``|`[^`]+`", examples):
            shown = code.strip("`").strip() if not code.startswith("`` ") else code[3:-3]
            shown = shown.replace(r"\|", "|").replace("⏎", "\n")
            found = read_label(shown, ("A", "B", "C"), ("the cat", "the dog", "a cow"))
            assert (found or "none") == label, (form, shown)
            read += 1
    assert read > 90
