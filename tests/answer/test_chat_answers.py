"""The answers that chat models write after a paragraph of reasoning are read."""

from __future__ import annotations

import itertools

from catto.answer.response import parse_response

LABELS = ("A", "B", "C", "D")
TEXTS = ("green grass", "blue sky", "a red rose", "none of the others")
PARAGRAPHS = [
    "Air scatters short waves more than long ones, so what is overhead looks blue.",
    "Let me think about it. Grass is green, and roses grow on the ground.\n\nOnly one of them is above us.",
    "We are asked what is above us. Option A is on the ground. Option C grows in a garden.",
    "**Reasoning**\n\n1. Grass grows on the ground.\n2. So do roses.\n3. What is left is above us.",
    "<think>\nThe answer is A? No, grass is below us.\n</think>\n\nGrass is below us, and so are roses.",
    "Step 1: look up. Step 2: name what you see!",
]
ANSWERS = [
    *(r"\boxed{B}", r"$\boxed{B}$", r"\[\boxed{B}\]", r"\(\boxed{B}\)", r"\boxed{\text{B}}", "\\[\n\\boxed{B}\n\\]"),
    *("B", "**B**", "B.", "(B)", "**(B)**", "**B.**", "*B*", "`B`", "### B", '"B"', "[B]"),
    *(
        "B) blue sky",
        "B. blue sky",
        "(B) blue sky",
        "B: blue sky",
        "**B) blue sky**",
        "**B)** blue sky",
        "B) Blue sky.",
    ),
    *("**B**: blue sky", "B - blue sky", "B (blue sky)", "**B. blue sky**", "✅ **B) blue sky**"),
    *(
        "The answer is B.",
        "The answer is (B).",
        "The answer is **B**.",
        "The answer is: B",
        "The answer is B) blue sky.",
    ),
    *("The correct answer is B.", "The correct answer is **B) blue sky**.", "The correct answer is option B."),
    *("The correct option is B.", "So the correct option is B.", "Therefore, the correct choice is (B).", "So, B."),
    *("Therefore, the answer is **B**.", "Thus, the answer is B.", "Hence, the correct answer is B: blue sky."),
    *("Answer: B", "**Answer: B**", "**Answer:** B", "Answer: (B)", "Answer: **B) blue sky**", "### Answer: B"),
    *("Answer\n\nB", "### Answer\n\n**B**", "Answer:\nB", "**Answer:**\n\nB) blue sky", "Answer - B"),
    *(
        "Final answer: B",
        "Final answer: **(B)**",
        "**Final Answer:** B",
        "**Final Answer**\n\n\\boxed{B}",
        "Final Answer: B.",
    ),
    *(
        r"The final answer is $\boxed{B}$.",
        r"The final answer is \boxed{B}.",
        "My answer is B.",
        "My final answer is B.",
    ),
    *(
        "Correct answer: B",
        "The best answer is B.",
        "The right answer is B.",
        "I would choose B.",
        "I choose option B.",
    ),
    *("Option B", "**Option B**", "Option B: blue sky", "Option B is correct.", "B is the correct answer."),
    *(
        "So B is the correct answer.",
        "Thus, option B is correct.",
        "In conclusion, the answer is B.",
        "Overall, B is right.",
    ),
    *("The correct answer is blue sky (B).", "The most likely answer is B.", "I think the answer is B."),
]
MISSED_ON_PURPOSE = ["The answer is B because it is above us.", "B, I would say.", "Surely it is the second one: B!"]


def test_nine_of_ten_plain_chat_answers_are_read_and_none_wrongly() -> None:
    read = []
    for paragraph, answer in itertools.product(PARAGRAPHS, [*ANSWERS, *MISSED_ON_PURPOSE]):
        text = f"{paragraph}\n\n{answer}"
        found = parse_response(text, LABELS, TEXTS)
        assert found.label in ("B", None), text
        if found.span is not None:
            assert text[slice(*found.span)] == "B"
        read.append(found.label == "B")
    assert len(read) >= 300
    assert sum(read) >= 0.9 * len(read)
