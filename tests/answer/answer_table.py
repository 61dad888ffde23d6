"""Answers labelled by hand: what a person reads without doubt has its label, everything else None.

Each table has its labels, its option texts (None: labels alone) and its answers.
"""
# ruff: noqa: RUF001

from __future__ import annotations

from typing import NamedTuple


class Table(NamedTuple):
    labels: tuple[str, ...]
    texts: tuple[str, ...] | None
    rows: tuple[tuple[str, str | None], ...]


def _all(label: str | None, *answers: str) -> tuple[tuple[str, str | None], ...]:
    return tuple((answer, label) for answer in answers)


# fmt: off
TABLES = {
    "letters": Table(("A", "B", "C", "D"), ("the cat", "the dog", "a cow", "Both A and B"), (
        *_all("B", "B", "b", " B ", "\n\nB\n", "B.", "B,", "B;", "B!", "B:", "B)", "b)", "b.", "(B)", "( B )", "[B]"),
        *_all("B", "{B}", "((B))", "[[B]]", '"B"', "'B'"),
        *_all("B", "“B”", "‘B’", "«B»", "「B」", "`B`", "```\nB\n```", "*B*", "**B**"),
        *_all("B", "***B***", "_B_", "__B__", "**(B)**", "(**B**)", "**B.**", "**B**.", "**B)**", '"B".', "- B"),
        *_all("B", "* B", "• B", "> B", "# B", "### B", "→ B", "✅ B", "👉 B", "$B$", "$$B$$", r"\(B\)"),
        *_all("B", r"\[B\]", r"\boxed{B}", r"\boxed{ B }", r"$\boxed{B}$", r"\boxed{\text{B}}"),
        *_all("B", r"$\boxed{\textbf{(B)}}$", r"\[ \boxed{\mathrm{B}} \]", r"\text{B}", r"\textbf{B}", r"\boxed{B}."),
        *_all("B", "Ｂ", "（Ｂ）", "𝐁", "𝗕"),
        *_all("B", "Ⓑ", "B\u200b", "\ufeffB", "B\xa0", "\u200eB\u200f", "B\ufe0f", "B\x00", "B\nB", "B\n\n(B)\nB."),
        *_all("B", "Answer: B\nB", "**B**\n\nThe answer is B.", "B\nB) the dog", "Option B", "option b", "Choice (B)"),
        *_all("B", "Option B.", "Option: B", "choice: **B**", "Answer: B", "answer: b"),
        *_all("B", "ANSWER: B", "Answer:B", "Answer - B", "Answer = B", "Answer -> B", "Answer → B", "Answer\nB"),
        *_all("B", "Answer:\n\nB", "Answer (B)", "Final answer: B", "Final Answer: (B)", "My answer: B"),
        *_all("B", "**Answer:** B", "**Answer**: B", "*Answer:* **B**", "**Answer: B**", "## Final Answer\n\nB"),
        *_all("B", "__Answer:__ B", '{"answer": "B"}', "{'answer': 'B'}", '["B"]'),
        *_all("B", 'answer = "B"', "The answer is B", "The answer is B.", "the answer is b", "The answer is: B"),
        *_all("B", "The answer is (B).", "The answer is “B”.", "The answer is **B**."),
        *_all("B", r"The final answer is $\boxed{B}$.", r"The answer is \(\boxed{B}\)", "The correct answer is B."),
        *_all("B", "The correct answer is option B.", "The correct option is (B)", "The right answer is B"),
        *_all("B", "The best answer is B.", "The best choice is B", "The most likely answer is B."),
        *_all("B", "My final answer is B.", "Correct answer: B", "The answer to the question is B."),
        *_all("B", "The answer would be B", "The answer must be B.", "So the answer is B."),
        *_all("B", "Therefore, the correct answer is B.", "Thus the answer is option (B).", "Hence, B."),
        *_all("B", "In conclusion, the answer is B.", "I think the answer is B.", "I think B", "I believe it is B."),
        *_all("B", "I'd say B.", "I choose B", "I choose option B.", "I would go with B."),
        *_all("B", "I pick B.", "I select B", "It is B.", "It's B", "It’s B.", "It must be B."),
        *_all("B", "This is B", "B is correct."),
        *_all("B", "B is the correct answer.", "Option B is correct", "**B** is the best choice.", "(B) is right."),
        *_all("B", "B is the answer"),
        *_all("B", "*The answer is* B", '"The answer is B."'),
        *_all("B", "(The answer is B)", "B) the dog", "(B) the dog", "B. the dog", "B: the dog", "B - the dog"),
        *_all("B", "B — the dog", "B) The Dog.", "B) dog", "B) a dog", "B (the dog)"),
        *_all("B", 'B: "the dog"', "**B) the dog**", "**B)** the dog", "**B**: *the dog*", "[B] the dog"),
        *_all("B", "B) **the dog**", "(B) - the dog", "Option B: the dog"),
        *_all("B", "Answer: B) the dog", "The correct answer is B) the dog.", r"\boxed{B} the dog"),
        *_all("B", "__Answer__: B", "_Answer_: B", "**Verdict**: B", "Answer B", "___B___"),
        *_all("B", r"\boxed{\text{B) the dog}}", "the dog (B)", "The answer is the dog (B)."),
        *_all("B", "B) the dog is the correct answer.", "The answer is **(B) the dog**."),
        *_all("D", "D) Both A and B", "D", "The answer is D: both A and B.", "(d) both a and b"),
        *_all("A", "A", "a", "(a)", "A.", "Answer: a", "A) the cat"),
        *_all("A", "A: cat"),
        *_all("C", "C) a cow", "C) cow", "C. A cow.", "C"),
        *_all(None, "", " ", "\n", ".", "none", "E", "Z", "AB", "B2", "2B", "A.M.", "B-cells", "B-", "C++", "C#"),
        *_all(None, "A's", "A+", "-", "?", "B?", "B or not", "B...", "~B", "!B", "¬B", "~~B~~", "<s>B</s>"),
        *_all(None, "<del>B</del>", r"\cancel{B}", r"\overline{B}", "$B", "B$", "(B", "[B", '"B', "B'", "**B", "B*"),
        *_all(None, "B]", "B}", "not B", "Not B.", "no B", "B is wrong", "B is not correct", "(B) is false"),
        *_all(None, "B) is false", "B: wrong", "B: false", "B - no", "B) incorrect", "B) the cat", "B: a cow"),
        *_all(None, "B the cat", "the dog (A)", "The answer is not B", "The answer is not\nB", "Wrong answers:\nB"),
        *_all(None, "Wrong: B", "The wrong answer is B", "Not the answer: B", "The answer is B or C"),
        *_all(None, "The answer is either B", "The answer cannot be B", "The answer isn't B", "Is it B", "Maybe B"),
        *_all(None, "I would not choose B", "I cannot choose B", "Anything but B", "All except B", "Everyone says B"),
        *_all(None, "He chose B", "A and B", "A & B", "A&B", "A, B", "A/B", "A|B", "A B", "a b", "A-B", "A -C", "A+B"),
        *_all(None, "A; B", "A. B", "A: B", "A = B", "A > B", "A or B", "(A) or (B)", "(A) or <D>", "(A)(B)"),
        *_all(None, "[A][B]", "**A** **B**", "A\nB", "A\nA\nB", "A) the cat\nB) the dog", "B (c)", "B, not A"),
        *_all(None, "B. C is wrong", "B rather than C", "Answer: A B", "The answer is A\nThe answer is B"),
        *_all(None, "a cat", "It is a cat.", "The answer is a cat"),
        *_all(None, '["A", "B"]', "A dog barks", "a dog", "A small dog", 'A "dog"', "It is a", "It's a", "I am sure"),
        *_all(None, "the dog", "The answer is the dog", "Vitamin B", "vitamin b", "The blood type is B", "Plan B"),
        *_all(None, "Hepatitis B is a disease", "B vitamins", "C\x00++", "A\x00's", "B because dogs bark"),
        *_all(None, "B. Dogs bark.", "B\nA dog barks.", "B, I am sure", "Let me think about B", "1. B", "B1", "B_"),
        *_all(None, "B%", "B。。。", "B . . .", "B. . .", "B¹", "ᴮ", "answer_B", "不选项B"),
        *_all(None, "A" * 100),
        *_all(None, "A " * 100),
        *_all(None, "((((((((((((((((B))))))))))))))))", "<B or C>", "{answer}", "<answer>", "A, B, C or D"),
    )),
    "nli": Table(("entailment", "neutral", "contradiction"), ("entailment", "neutral", "contradiction"), (
        *_all("entailment", "entailment", "Entailment", "ENTAILMENT", "Entailment.", "**Entailment**", "(entailment)"),
        *_all("entailment", '"entailment"', "Label: entailment", "label: Entailment", "The label is entailment."),
        *_all("entailment", "Answer: entailment", "It is an entailment", "The relationship is entailment."),
        *_all("entailment", "Relationship: Entailment", "This is an entailment.", r"\boxed{entailment}"),
        *_all("entailment", "The relationship between the premise and the hypothesis is entailment."),
        *_all("entailment", "entailment\nentailment", "The correct label is **entailment**."),
        *_all("entailment", "- entailment"),
        *_all("neutral", "neutral", "Neutral", "neutral.", "The answer is neutral.", "The relationship is neutral."),
        *_all("neutral", "It is neutral.", "Neutral is the correct label.", "So the label is neutral"),
        *_all("neutral", "the hypothesis is neutral", "Verdict: neutral"),
        *_all("contradiction", "contradiction", "Contradiction", "It is a contradiction", "It's a contradiction."),
        *_all("contradiction", "This is a contradiction.", "The answer is contradiction"),
        *_all("contradiction", "The hypothesis is a contradiction."),
        *_all(None, "entails", "contradicts", "contradictory", "neutral tone", "not entailment", "non-entailment"),
        *_all(None, "entailment: false", "entailment or neutral", "entailment, neutral or contradiction"),
        *_all(None, "entailment/neutral", "neutral, not contradiction", "neutral\ncontradiction"),
        *_all(None, "entailment neutral", "entailment: neutral", "entailment (neutral)", "It is not neutral."),
        *_all(None, "It is no contradiction", "There is no contradiction", "No entailment", "a", "E", "entailment?"),
        *_all(None, "contradiction: it rains", "The premise is neutral on it, so entailment"),
        *_all(None, "Wrong answers:\nentailment", "The answer is not\nneutral", "yes"),
    )),
    "yes/no": Table(("yes", "no"), None, (
        *_all("yes", "yes", "Yes", "YES.", "**Yes**", "The answer is yes.", "Answer: Yes", '"yes"', "I say yes"),
        *_all("yes", "So yes.", "Yes!"),
        *_all("no", "no", "No", "No.", "The answer is no.", "Final answer: no", "(no)", "I'd say no."),
        *_all(None, "yes and no", "yes/no", "yes, no", "no yes", "not yes", "No, yes", "yes or no?", "none", "nope"),
        *_all(None, "yesterday", "no one", "There is no", "No answer", "yes but no", "I have no answer", "yes\nno"),
        *_all(None, "no answer: yes"),
    )),
    "true/false": Table(("true", "false"), None, (
        *_all("true", "True", "true.", "The statement is true.", "The answer is true", "It is true."),
        *_all("false", "False", "The statement is false.", "The correct answer is false.", "False is correct."),
        *_all("false", r"\text{False}"),
        *_all(None, "The true answer is false", "not true", "true or false", "true/false", "False is true"),
        *_all(None, "It is not false", "truely"),
    )),
    "numbers": Table(("1", "2", "3", "10"), ("3", "7", "-4", "1.5"), (
        *_all("1", "1", "1.", "(1)", "1)", "Option 1", "Answer: 1", "The answer is 1.", r"\boxed{1}", "**1**", "①"),
        *_all("1", "１", "1) 3", "1: 3"),
        *_all("3", "3", "3) -4", "3: -4"),
        *_all("10", "10", "10.", "(10)", "10) 1.5", "Option 10"),
        *_all(None, "-1", "- 1", "1.5", "1,5", "12", "$1", "1%", "1°", "+1", "1st", "#1", "1/2", "1-2", "1 2", "1, 2"),
        *_all(None, "1 or 2", "0", "1) 7", "3) 4", "1:3", "one", "1 3 2", "x = 1 or 2", "1e3", "10 1", "1\n2", "≠1"),
        *_all(None, "<1", "1²", "1⁰", "1₀", "Answer: - 1", "The answer is - 1", "Answer = – 1", "The answer: - 1"),
    )),
    "options that are labels": Table(("A", "B", "C"), ("B", "A", "AB"), (
        *_all("A", "A", "A) B", "A: B", "(A) B"),
        *_all("B", "B", "B. A"),
        *_all("C", "C", "C (AB)", "AB (C)", "Ⓒ"),
        *_all(None, "A (B)", "B (A)", "B [A]", "A (C)", "AB"),
    )),
    "raised": Table(("1", "2", "12"), ("H₂O", "m²", ""), (
        *_all("1", "1) H₂O", "①"),
        *_all("12", "12", "⑫"),
        *_all("2", "2", "2) m²"),
        *_all(None, "1²", "1₂", "(1²)", "¹", "1) H^2O"),
    )),
    "hangul": Table(("가", "나"), None, (
        *_all("가", "가", "\u1100\u1161", "(\u1100\u1161).", "Answer: \u1100\u1161"),
        *_all(None, "각", "\u1100\u1161\u11a8", "\u1100", "가나"),
    )),
    "chinese": Table(("是", "否", "不确定"), None, (
        *_all("是", "是", "是。", "（是）", "「是」", "**是**", "The answer is 是."),
        *_all("否", "否"),
        *_all("不确定", "不确定", "不确定。"),
        *_all(None, "不是", "是否", "是的", "是，否", "是或否", "不", "确定", "不确定是"),
    )),
    "cyrillic": Table(("да", "нет"), None, (
        *_all("да", "да", "Да", "ДА.", "«Да»", "**да**"),
        *_all("нет", "нет", "Нет."),
        *_all(None, "да или нет", "не да", "да, нет", "дата", "нет да"),
    )),
    "accents": Table(("été", "hiver"), None, (
        *_all("été", "été", "Été", "e\u0301te\u0301", "E\u0301TE\u0301."),
        *_all(None, "ete", "été ou hiver", "l'été"),
    )),
    "emoji": Table(("👍", "👎", "🤷"), None, (
        *_all("👍", "👍", "👍.", "**👍**", "Answer: 👍", "👍\ufe0f"),
        *_all(None, "👍👎", "👍 or 👎", "👍👍", "👌"),
    )),
    "case": Table(("b", "B"), None, (
        *_all("b", "b", "(b)", "Answer: b"),
        *_all("B", "B", "**B**"),
        *_all(None, "b B", "Ｂ or b"),
    )),
    "nested": Table(("entailment", "not entailment"), None, (
        *_all("entailment", "entailment", "It is an entailment"),
        *_all("not entailment", "not entailment", "Not  entailment.", "It is not entailment", "not\nentailment"),
        *_all(None, "not not entailment", "entailment not", "not an entailment"),
    )),
}
# fmt: on
