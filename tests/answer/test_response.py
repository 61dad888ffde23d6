"""What a response answers: tags, reasoning, the next turn, the last line. Nothing is guessed."""

from __future__ import annotations

import pytest
from answer_cases import LETTERS, question

from catto.answer.response import parse_answer, parse_response

# Tags


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>A</answer> wait <answer>B</answer>", "B"),
        ("<answer>A</answer> wait <answer>", None),
        ("<ANSWER>B</ANSWER>", "B"),
        ("< answer >B</ answer >", "B"),
        ("<answer>B", "B"),
        ("<answer>B</answer> C is wrong", "B"),
        ("The answer is B. <answer>", None),
        ("The answer is A.\n<answer>B</answer>\nThe answer is C.", "B"),
        ("<think>in <answer>A</answer></think><answer>B</answer>", "B"),
        # Everything up to the last `</think>` is reasoning.
        ("<think>so <answer>B</answer></think>", None),
        ("<think>so <answer>B</answer></think><|im_end|>", None),
        ("<think>so <answer>B</think>\n", None),
        ("<answer>B</answer>\n<think>because</think>\nHope this helps.", None),
        ("<think>a <think>b</think> <answer>A</answer> c</think><answer>B</answer>", "B"),
        ("<think>a\n<think>b</think>\n<answer>B</answer>", "B"),
        ("so <answer>A</answer>?</think>\n<answer>B</answer>", "B"),
        # A think block that never closes contains no answer.
        ("<think>I must not write <answer>A</answer> because", None),
        ("<think>so\n<answer>\nB\n</answer>", None),
        ("<think>so</think>\n<think>or <answer>A</answer>", None),
        ("<answer>B</answer>\n<think>or <answer>A</answer>", "B"),
        ("<answer>B <think>or", None),
        # An answer that was left open before another one may be another turn's.
        ("<answer>A\n<answer>B</answer>", None),
        ("<answer>A\n\nQuestion: Which?\n<answer>B</answer>", None),
        ("I answer in <answer> tags.\n<answer>B</answer>", "B"),
        # What is struck out, doubted or denied is no answer.
        ("<answer><s>A</s> B</answer>", None),
        ("<answer><s>A</s> B", None),
        ("<answer>~~A~~ B</answer>", None),
        ("<answer><del>A</del> B</answer>", None),
        ("<answer>A?</answer>", None),
        ("<answer>not A</answer>", None),
        ("<answer>A or B</answer>", None),
        ("<answer>Answer: A\nAnswer: B</answer>", None),
    ],
)
def test_the_last_answer_tag_counts(text: str, expected: str | None) -> None:
    assert parse_response(text, LETTERS).label == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>B</answer>\n\nQuestion: Which?\n<answer>A</answer>", "B"),
        ("<think>r</think>\n<answer>B</answer>\nQ: Which?\n<think>s</think>\n<answer>A</answer>", "B"),
        ("B\n\nQuestion 2: Which?\nAnswer: A", "B"),
        ("Dogs bark.\nThe answer is B.\n\n**Question:** Which?\nAnswer: A", "B"),
        ("The answer is B.\n\nPremise: dogs\nHypothesis: cats\nThe answer is A.", "B"),
        ("Premise: dogs\nThe answer is B.\n\nPremise: cats\nThe answer is A.", "B"),
        ("The answer is B.\nuser\nSure?\nassistant\nThe answer is A.", "B"),
        ("The answer is B.<|im_end|>\n<|im_start|>user\nSure?\nThe answer is A.", "B"),
        ("The answer is B.</s> Sure?\nThe answer is A.", "B"),
        # A question that the response restates first has no answer before it.
        ("Question: Which?\nThe answer is A.", "A"),
        ("<think>so</think>\nQuestion: Which?\nThe answer is A.", "A"),
        ("I cannot say.\nQuestion: Which?\nThe answer is A.", None),
        ("I cannot say.<|im_end|>\nThe answer is A.", None),
        ("<|im_end|>\nThe answer is A.", None),
        # Tags come first.
        *(
            (f"The answer is A.\n{marker} wait, is it?\nNo.\n{think}<answer>\nB\n</answer>", "B")
            for marker in ("Question:", "Q:", "Premise:", "User:", "Human:")
            for think in ("", "</think>\n")
        ),
        ("<answer>B\n\nQuestion: Which?\nWhy not?", "B"),
        ("<answer>A\nUser: B</answer>", None),
        ("<think>So <answer>A</answer>?\nQuestion: is it?\nNo.</think>\n<answer>B</answer>", "B"),
        ("So <answer>A</answer>?\nQuestion: is it?\nNo.</think>\n<answer>B</answer>", "B"),
        ("<answer>A or B</answer>\nQuestion: Which?\n<answer>A</answer>", None),
        ("<think>The answer is B.\nQuestion: sure?</think>\nThe answer is A.", "A"),
        # A label is no speaker.
        ("<answer>A: the cat\nQ: the dog</answer>", None),
    ],
)
def test_a_text_that_runs_on_to_the_next_turn_is_read_up_to_there(text: str, expected: str | None) -> None:
    assert parse_response(text, ("A", "B", "Q") if "\nQ: the" in text else LETTERS).label == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nr\n</think>\n<answer>B</answer>", "r"),
        ("r\n</think>\n<answer>B</answer>", "r"),
        ("<think>r <answer>B</answer>", "r B"),
        ("r <answer>B</answer>", "r"),
        ("<think>\n\n</think>\n\nr\n<answer>B</answer>", "r"),
        ("<think>r</think> so <answer>B</answer>", "r"),
        ("<think>r", "r"),
        ("<answer>B</answer>", None),
        ("", None),
    ],
)
def test_reasoning_is_found_with_or_without_its_tags(text: str, expected: str | None) -> None:
    assert parse_response(text, LETTERS).reasoning == expected


# Without tags

PLAIN = [
    ("B", "B"),
    ("(B) the dog", "B"),
    ("Answer:\nB", "B"),
    ("The correct answer is B.", "B"),
    ("Dogs bark.\n\nThe correct answer is B.", "B"),
    ("Dogs bark.\nAnswer: B\n\n", "B"),
    ("Dogs bark.\n**Final answer: (B) the dog**", "B"),
    ("<think>\nCats? No.\n</think>\nThe answer is B.", "B"),
    ("<think>\nThe answer is A.\n</think>\nB", "B"),
    ("The answer is B.</answer>", "B"),
    ("A) the cat\nB) the dog\n\nThe answer is B.", "B"),
    ("The answer is B<|im_end|>", "B"),
    ("", None),
    ("<think>\nThe answer is B.", None),  # reasoning that never ended
    ("<think>\nso\n</think>\n<think>\nThe answer is B.", None),
    ("<think>\nThe answer is B.\n</think>", None),
    ("A) the cat\nB) the dog", None),  # the options again
    ("The answer is A.\nWait.\nThe answer is B.", None),  # different statements
    ("I thought that the answer is A, but dogs bark.\nThe answer is B.", None),
    ("A is the correct answer, they say.\n\n**B**", None),
    ("The answer is A.\n\nB", None),
    ("A\n\nThe answer is B.", None),
    ("Dogs bark.\n\nA\n\nB", None),
    ("Dogs bark.\nB) the dog", "B"),  # a last line of its own
    ("Dogs bark.\nB", "B"),
    ("Dogs bark.\n\n**B**", "B"),
    ("Dogs bark.\n\n\\boxed{B}", "B"),
    ("Dogs bark.\n\nAnswer\n\nB", "B"),
    ("Dogs bark.\nOption B", "B"),
    ("- dogs bark\n\nThe answer is B.", "B"),
    ("Dogs bark.\nIt is B.", None),
    ("Dogs bark.\n- B", None),  # an item of a list
    ("Dogs bark.\n> The answer is B.", None),  # a quotation
    ('Dogs bark.\n"The answer is B."', None),
    ("The following is wrong:\nThe answer is B.", None),  # what a colon introduces
    ("**The following is wrong:**\n\nThe answer is B.", None),
    ("Some claim:\nThe answer is B.", None),
    ("Wrong answers:\nB", None),
    ("Which is wrong?\nB", None),
    ("The answer is not\nB", None),
    ("The answer is not...\nB", None),
    ("They say\nThe answer is B.", None),
    ("Dogs bark.\nFinal answer:\nThe answer is B.", "B"),
    ("~~The answer is B.~~", None),
    ("Dogs bark.\n~~The answer is B.~~", None),
    ("Answer: B?", None),
    ("Answer A: the cat\nAnswer B: the dog", None),  # as a list of options calls them
    ("Dogs bark.\n**Answer**: B", "B"),
    ("Dogs bark.\nCorrect answer B", "B"),
    ("It would be wrong to say that\nthe answer is B.", None),
    ("It would be wrong to say that\n**the answer is B.**", None),
    ("Dogs bark.\nThe answer is:\nB", "B"),  # under a heading
    ("Dogs bark.\n### Final Answer\n\n**B**", "B"),
    ("Dogs bark.\nThe answer is\n\n\\boxed{B}", "B"),
    ("Dogs bark.\n\n**Final Answer:**\n\n\\[\n\\boxed{B}\n\\]", "B"),
    ("Dogs bark.\n\nFinal answer:\n$$\n\\boxed{B}\n$$", "B"),
    ("It would be wrong to say that\nthe answer is\nB", None),
    ("The answer is:\nA) the cat\nB) the dog", None),
    ("The answer is not:\nB", None),
    ("<think>First <answer>A</answer>. But dogs bark.</think>\nThe answer is B.", "B"),
    ("<think>I answer in <answer> tags.</think>\nThe answer is B.", "B"),
    ("<think>So <answer>A</answer>.</think>\nHope that helps.", None),
    ("B's answer", None),
    ("Dogs bark.\nA's choice", None),
    ("Dogs bark. The answer is B.", None),
    ("The answer is B.\nOr is it?", None),
    ("The answer is B or C.", None),
    ("The answer is A.\nThe answer is not B.", None),
]


@pytest.mark.parametrize(("text", "expected"), PLAIN)
def test_without_tags_the_answer_is_what_the_last_line_states(text: str, expected: str | None) -> None:
    found = parse_response(text, ("A", "B", "C"), ("the cat", "the dog", "a cow"))
    assert (found.label, found.source) == (expected, "plain" if expected else None)
    if found.span is not None:
        assert text[slice(*found.span)] == "B"
        assert found.span[0] == text.rindex("B")


def test_the_reasoning_of_a_plain_answer_ends_before_it() -> None:
    assert parse_response("Dogs bark.\n\nThe answer is B.", LETTERS).reasoning == "Dogs bark."
    assert parse_response("<think>r</think>\nThe answer is B.", LETTERS).reasoning == "r"
    assert parse_response("The answer is B.", LETTERS).reasoning is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>\nB", None),  # "B" may have been going to be "Both"
        ("<answer>\nThe answer is B", None),
        ("<answer>\nB\nbeca", None),
        ("<answer>\nB\n", "B"),
        ("<answer>\nB\n</ans", "B"),
        ("<answer>B</", "B"),
        ("<answer>B</answer>", "B"),
        ("The answer is B", None),
        ("The answer is B.\nHow", None),
        ("The answer is B.\n", "B"),
    ],
)
def test_a_response_cut_by_its_limit_is_read_up_to_its_last_whole_line(text: str, expected: str | None) -> None:
    assert parse_response(text, LETTERS, cut=True).label == expected
    is_readable = "beca" not in text and "How" not in text
    assert parse_response(text, LETTERS).label == ("B" if is_readable else None)


def test_parse_answer_takes_labels_and_options_from_the_question() -> None:
    asked = question(("A", "B"), ("B", "A"))
    assert parse_answer("<answer>A) B</answer>", asked).label == "A"


def test_roman_numerals_are_two_statements() -> None:
    assert parse_response("Answer: I\nAnswer: II", ("I", "II")).label is None
    assert parse_response("I choose II", ("I", "II")).label == "II"
