"""Rows written for the tests in the schemas of public multiple-choice sets, and the field map that reads each."""

from __future__ import annotations

from typing import Any, NamedTuple

Row = dict[str, Any]


class Schema(NamedTuple):
    """A set: its rows, the value of --fields, the text of each row's answer, and a file of answers if it has one."""

    rows: list[Row]
    fields: str
    gold: list[str]
    answers: str | None = None
    proposed: bool = True  # whether `catto data` proposes this map


def _choices(labels: str, *texts: str) -> Row:
    return {"text": list(texts), "label": list(labels)}


def _stem(text: str, labels: str, *texts: str) -> Row:
    choices = [{"text": each, "label": label} for each, label in zip(texts, labels, strict=True)]
    return {"stem": text, "choices": choices}


SCHEMAS = {
    # The answers of some rows are letters, those of others numbers: each row's labels say which.
    "arc": Schema(
        [
            {
                "id": "x1",
                "question": "What melts ice?",
                "choices": _choices("ABCD", "cold", "heat", "dark", "salt water"),
                "answerKey": "B",
            },
            {
                "id": "x2",
                "question": "What do roots take up?",
                "choices": _choices("1234", "light", "sound", "water", "wind"),
                "answerKey": "3",
            },
            {
                "id": "x3",
                "question": "Which is a star?",
                "choices": _choices("ABC", "Mars", "Moon", "Sun"),
                "answerKey": "C",
            },
        ],
        "question=question,options=choices,answer=answerKey",
        ["heat", "water", "Sun"],
    ),
    "openbookqa": Schema(
        [
            {
                "id": "o1",
                "question_stem": "A lamp gives",
                "choices": _choices("ABCD", "sound", "light", "water", "salt"),
                "answerKey": "B",
            },
            {
                "id": "o2",
                "question_stem": "Birds build",
                "choices": _choices("ABCD", "nests", "roads", "cars", "ships"),
                "answerKey": "A",
            },
        ],
        "question=question_stem,options=choices,answer=answerKey",
        ["light", "nests"],
    ),
    "qasc": Schema(
        [
            {"id": "s1", "question": _stem("What do bees make?", "ABC", "milk", "honey", "silk"), "answerKey": "B"},
            {"id": "s2", "question": _stem("What carries blood?", "ABC", "bones", "nerves", "veins"), "answerKey": "C"},
        ],
        "question=question.stem,options=question.choices,answer=answerKey",
        ["honey", "veins"],
    ),
    # The answer's own column is one of the options.
    "sciq": Schema(
        [
            {
                "question": "Which gas do plants take in?",
                "distractor1": "helium",
                "distractor2": "neon",
                "distractor3": "argon",
                "correct_answer": "carbon dioxide",
                "support": "Leaves have pores.",
            },
            {
                "question": "What boils at 100 degrees?",
                "distractor1": "iron",
                "distractor2": "oil",
                "distractor3": "lead",
                "correct_answer": "water",
                "support": "",
            },
        ],
        "question={support}\\n{question},options=correct_answer+distractor1+distractor2+distractor3,answer=correct_answer",
        ["carbon dioxide", "water"],
    ),
    "boolq": Schema(
        [
            {"question": "is the moon a planet", "passage": "The Moon circles the Earth.", "answer": False},
            {"question": "is iron a metal", "passage": "Iron is a metal.", "answer": True},
        ],
        "question={passage}\\n{question},options=yes|no,answer=answer",
        ["no", "yes"],
    ),
    "piqa": Schema(
        [
            {"goal": "Open a jar.", "sol1": "Turn the lid.", "sol2": "Paint the lid."},
            {"goal": "Dry a shirt.", "sol1": "Bury it.", "sol2": "Hang it up."},
        ],
        "question=goal,options=sol1+sol2",
        ["Turn the lid.", "Hang it up."],
        answers="0\n1\n",
    ),
    "hellaswag": Schema(
        [
            {
                "ind": 4,
                "ctx_a": "A man cuts",
                "ctx_b": "wood.",
                "ctx": "A man cuts wood. He",
                "endings": ["sings.", "stacks it.", "flies.", "melts."],
                "label": "1",
            },
            {
                "ind": 9,
                "ctx_a": "A child",
                "ctx_b": "runs.",
                "ctx": "A child runs. She",
                "endings": ["stops.", "rusts.", "boils.", "prints."],
                "label": "0",
            },
        ],
        "question=ctx,options=endings,answer=label",
        ["stacks it.", "stops."],
    ),
    "medmcqa": Schema(
        [
            {
                "id": "m1",
                "question": "Largest bone?",
                "opa": "femur",
                "opb": "ulna",
                "opc": "rib",
                "opd": "tibia",
                "cop": 1,
                "exp": None,
            },
            {
                "id": "m2",
                "question": "Pumps blood?",
                "opa": "lung",
                "opb": "liver",
                "opc": "skin",
                "opd": "heart",
                "cop": 4,
                "exp": None,
            },
        ],
        "question=question,options=opa+opb+opc+opd,answer=cop",
        ["femur", "heart"],
    ),
    "race": Schema(
        [
            {
                "article": "Tom lost his hat.",
                "question": "What did Tom lose?",
                "options": ["a cap", "a hat", "a dog", "a key"],
                "answer": "B",
            },
            {
                "article": "Ann sails.",
                "question": "Where is Ann?",
                "options": ["on a hill", "at home", "in a cave", "at sea"],
                "answer": "D",
            },
        ],
        "question={article}\\n{question},options=options,answer=answer",
        ["a hat", "at sea"],
    ),
    "social_iqa": Schema(
        [
            {
                "context": "Kim helped Lee.",
                "question": "How does Lee feel?",
                "answerA": "angry",
                "answerB": "thankful",
                "answerC": "hungry",
            },
            {
                "context": "Jo fell.",
                "question": "What does Jo need?",
                "answerA": "help",
                "answerB": "rain",
                "answerC": "a song",
            },
            {
                "context": "Al won.",
                "question": "How does Al feel?",
                "answerA": "sad",
                "answerB": "cold",
                "answerC": "proud",
            },
        ],
        "question={context}\\n{question},options=answerA+answerB+answerC",
        ["thankful", "help", "proud"],
        answers="2\n1\n3\n",
    ),
    "logiqa": Schema(
        [
            {
                "context": "All cats purr.",
                "query": "What follows?",
                "options": ["Some purr.", "None purr."],
                "correct_option": 0,
            },
            {
                "context": "No fish walk.",
                "query": "What follows?",
                "options": ["Fish walk.", "Fish do not walk."],
                "correct_option": 1,
            },
        ],
        "question={context}\\n{query},options=options,answer=correct_option",
        ["Some purr.", "Fish do not walk."],
    ),
    "winogrande": Schema(
        [
            {
                "sentence": "The cup fell off the shelf and the _ broke.",
                "option1": "cup",
                "option2": "shelf",
                "answer": "1",
            },
            {"sentence": "Al paid Bo since _ had worked.", "option1": "Al", "option2": "Bo", "answer": "2"},
        ],
        "question=sentence,options=option1+option2,answer=answer",
        ["cup", "Bo"],
    ),
    "copa": Schema(
        [
            {
                "premise": "The glass broke.",
                "question": "cause",
                "choice1": "It fell.",
                "choice2": "It shone.",
                "label": 0,
                "idx": 0,
            },
            {
                "premise": "It rained.",
                "question": "effect",
                "choice1": "The sun rose.",
                "choice2": "The road got wet.",
                "label": 1,
                "idx": 1,
            },
        ],
        "question={premise}\\n{question},options=choice1+choice2,answer=label",
        ["It fell.", "The road got wet."],
    ),
    "truthful_qa": Schema(
        [
            {
                "question": "Do cats have nine lives?",
                "mc1_targets": {"choices": ["No, one.", "Yes, nine."], "labels": [1, 0]},
            },
            {
                "question": "Is glass a liquid?",
                "mc1_targets": {"choices": ["Yes.", "No.", "At night."], "labels": [0, 1, 0]},
            },
        ],
        "question=question,options=mc1_targets.choices,answer=mc1_targets.labels",
        ["No, one.", "No."],
    ),
    "truthful_qa release": Schema(
        [
            {"question": "Do cats have nine lives?", "mc1_targets": {"No, one.": 1, "Yes, nine.": 0}},
            {"question": "Is glass a liquid?", "mc1_targets": {"Yes.": 0, "No.": 1}},
        ],
        "question=question,options=mc1_targets,answer=mc1_targets",
        ["No, one.", "No."],
    ),
    "medqa": Schema(
        [
            {
                "question": "First aid for a burn?",
                "options": {"A": "salt", "B": "cool water", "C": "oil"},
                "answer_idx": "B",
            },
            {"question": "Normal pulse?", "options": {"A": "70", "B": "7", "C": "700"}, "answer_idx": "A"},
        ],
        "question=question,options=options,answer=answer_idx",
        ["cool water", "70"],
    ),
    "own labels elsewhere": Schema(
        [
            {"q": {"text": "Which is red?"}, "o": [{"id": "x", "say": "blood"}, {"id": "y", "say": "grass"}], "a": "x"},
            {
                "q": {"text": "Which is green?"},
                "o": [{"id": "p", "say": "blood"}, {"id": "q", "say": "grass"}],
                "a": "q",
            },
        ],
        "question=q.text,options=o.say,labels=o.id,answer=a",
        ["blood", "grass"],
        proposed=False,
    ),
    "nli with numbers": Schema(
        [
            {"premise": "A dog sleeps.", "hypothesis": "An animal rests.", "label": 0},
            {"premise": "A dog sleeps.", "hypothesis": "It is brown.", "label": 1},
            {"premise": "A dog sleeps.", "hypothesis": "It runs.", "label": 2},
        ],
        "question=premise+hypothesis,options=entailment|neutral|contradiction,answer=label",
        ["entailment", "neutral", "contradiction"],
        proposed=False,
    ),
}
