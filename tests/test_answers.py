"""Which label a response gives: any dress is read, nothing is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from answer_cases import LETTERS, NLI, answer, laws, question
from catto.prompts import parse, parse_answer

ANSWERS = [
    "B",
    "b",
    " B ",
    "(B)",
    "[B]",
    "{B}",
    "[[B]]",
    "**B**",
    "*b*",
    "__B__",
    "`B`",
    '"B"',
    "'B'",
    "“B”",
    "B.",
    "B,",
]
ANSWERS += ["b)", "(b) the dog", "B) the dog", "B) a dog", "B. A dog", "B: the dog", "B - the dog", "B — the dog"]
ANSWERS += [
    "B (the dog)",
    "Answer: B",
    "answer: b",
    "The answer is B.",
    "**Answer:** B",
    "Option B",
    "the correct option is (B)",
]
ANSWERS += [r"\boxed{B}", r"$\boxed{\text{B}}$", "$B$", "<b>B</b>", "B<|im_end|>", "B\nB", "Answer:\nB", "- B", "### B"]
ANSWERS += ["B\nA dog barks.", "B.\nI am sure.", "I choose B"]


@pytest.mark.parametrize("text", ANSWERS)
def test_a_label_in_any_dress_is_read(text: str) -> None:
    assert answer(text) == "B"


NOTHING = ["", " ", "none", "E", "Z", "AB", "B2", "A.M.", "B-cells", "C++", "A's", "-", "the dog"]
NOTHING += [
    "A dog barks",
    "a dog",
    "A small (brown) dog",
    "A (small) dog",
    'A "dog"',
    "I am sure",
    "It is a",
    "B is wrong",
]
NOTHING += ["not B", "The answer is not B", "Vitamin C", "The blood type is A", "vitamin b"]
NOTHING += [
    "A and B",
    "A, B",
    "A/B",
    "A B",
    "a b",
    "B or C",
    "(A)(B)",
    "B\nC",
    "B\nc",
    "B (c)",
    "b) and c)",
    "A) x\nB) y",
]
NOTHING += ["B. C is wrong", "B, not A", "The answer is A B"]


@pytest.mark.parametrize("text", NOTHING)
def test_no_label_two_labels_or_a_foreign_one_is_no_answer(text: str) -> None:
    assert answer(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Entailment", "entailment"),
        ("**NEUTRAL**", "neutral"),
        ("The relationship is neutral.", "neutral"),
        ("It is a contradiction", "contradiction"),
        ("contradiction: it rains", "contradiction"),
        ("not entailment", None),
        ("neutral, not contradiction", None),
        ("entails", None),
        ("neutral tone", None),
    ],
)
def test_label_words(text: str, expected: str | None) -> None:
    assert answer(text, NLI) == expected


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
        ("B dog", "B"),
        ("C) A dog", "C"),
        ("A) dog", None),  # the text of B
        ("A dog", None),  # the text of C, no label
        ("dog", None),
        ("D) none at all", "D"),
    ],
)
def test_an_options_own_text_is_not_searched_and_anothers_contradicts(text: str, expected: str | None) -> None:
    assert answer(text, texts=("Both B and C", "dog", "A dog", "none")) == expected


def test_repeated_option_texts_do_not_contradict() -> None:
    assert answer("B) dog", texts=("dog", "dog", "cat", "cow")) == "B"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>A</answer> wait <answer>B</answer>", "B"),
        ("<answer>A</answer> wait <answer>", None),
        ("<ANSWER>B</ANSWER>", "B"),
        ("< answer >B</ answer >", "B"),
        ("<answer>B", "B"),
        ("<answer>B</answer> C is wrong", "B"),
        ("B", None),
        ("answer: B", None),
    ],
)
def test_the_last_answer_tag_counts(text: str, expected: str | None) -> None:
    assert parse(text, LETTERS).label == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nr\n</think>\n<answer>B</answer>", "r"),
        ("r\n</think>\n<answer>B</answer>", "r"),
        ("<think>r <answer>B</answer>", "r"),
        ("r <answer>B</answer>", "r"),
        ("<think>\n\n</think>\n\nr\n<answer>B</answer>", "r"),
        ("<think>r</think> so <answer>B</answer>", "r"),
        ("<think>r", "r"),
        ("<answer>B</answer>", None),
        ("", None),
    ],
)
def test_reasoning_is_found_with_or_without_its_tags(text: str, expected: str | None) -> None:
    assert parse(text, LETTERS).reasoning == expected


wrappings = st.sampled_from(
    ["{}", "({})", "[{}]", "**{}**", "`{}`", '"{}"', "'{}'", "{}.", "{})", r"\boxed{{{}}}", "_{}_"]
)
leads = st.sampled_from(["", "Answer: ", "The answer is ", "Option ", "**Final answer:** ", "\n\n", "> ", "- "])
tails = st.sampled_from(["", "\n", " \n\n", "</answer>", "\n</answer> as said", "<|im_end|>"])
sets = st.sampled_from([LETTERS, NLI, ("yes", "no"), ("1", "2", "3")])


@laws
@given(st.data(), sets, leads, st.lists(wrappings, min_size=1, max_size=3), tails, st.text(max_size=40))
def test_dress_keeps_the_label_and_the_span_is_the_label(
    data: st.DataObject, labels: tuple[str, ...], lead: str, wraps: list[str], tail: str, noise: str
) -> None:
    label = data.draw(st.sampled_from(labels))
    shown = data.draw(st.sampled_from([label, label.upper(), label.lower()] if lead in ("", "Answer: ") else [label]))
    for wrap in wraps:
        shown = wrap.format(shown)
    text = f"{noise}<answer>\n{lead}{shown}{tail}"
    found = parse(text, labels)
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
    assert parse(text, labels).label is None


pieces = st.sampled_from(
    ["<answer>", "</answer>", "<think>", "A", "b", " ", "\n", "(", "**", "is", "a", "\\boxed{", "<", "'"]
)


@laws
@given(st.one_of(st.text(max_size=200), st.lists(pieces, max_size=30).map("".join)), sets, st.booleans())
def test_arbitrary_text_never_raises_and_a_label_comes_with_its_span(
    text: str, labels: tuple[str, ...], with_options: bool
) -> None:
    found = parse(text, labels, [f"{label} or a" for label in labels] if with_options else None)
    assert (found.label is None) == (found.span is None)
    if found.span is not None:
        assert found.label in labels
        assert text[slice(*found.span)].casefold() == found.label.casefold()
        assert text[: found.span[0]].lower().replace(" ", "").rfind("<answer>") >= 0


def test_a_long_answer_is_read_in_linear_time() -> None:
    assert parse("<answer>B\n" + "so it is, " * 100_000, LETTERS).label == "B"


def test_parse_answer_takes_labels_and_options_from_the_question() -> None:
    asked = question(("A", "B"), ("B", "A"))
    assert parse_answer("<answer>A) B</answer>", asked).label == "A"
