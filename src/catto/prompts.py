"""Render questions as chat messages and token ids. Every stage uses the same wording and form.

Responses in training, and those that prompts ask for, have this form, with each tag on its own line:

    <think>
    reasoning
    </think>
    <answer>
    label
    </answer>
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from catto.records import GRADES, Message, Option, Question, content_hash


class Wording(NamedTuple):
    """A task's wording.

    Attributes:
        role: The role of the model, such as "You reason about everyday life.".
        task: The instruction; `{n}` is the number of choices.
        brief: Whether the prompt leaves out the role and does not explain the form of the answer.
    """

    role: str
    task: str
    brief: bool = False


_NLI = Wording(
    "You judge how two statements relate.",
    "Take the premise as true: does the hypothesis follow, stay open, or clash with it? Pick one of {n} labels.",
)
DEFAULT = Wording("You answer multiple-choice questions with care.", "Pick the best of {n} choices.")
WORDING: dict[str, Wording] = {
    "mmlu": Wording(
        "You are an examinee who knows every school and university subject.",
        "Exactly one of the {n} choices answers the question correctly: find it.",
    ),
    "snli": _NLI,
    "anli": _NLI,
    "tldr": Wording(
        "You compare summaries of online posts.",
        "Of {n} summaries, find the one that a careful reader of the post would prefer: faithful, complete, short.",
    ),
    "reward_bench_2": Wording(
        "You grade replies of assistants.",
        "Of {n} replies to the request, find the best one: correct, helpful, safe, and doing what was asked.",
    ),
    "commonsense_qa": Wording(
        "You reason about everyday life.",
        "All of the {n} choices may sound possible; find the one that fits the question best.",
    ),
    # A small model trained from scratch reads this prompt and learns the form of the answer from its rows.
    "witnesses": Wording("", "Which of {n}?", brief=True),
}

# Questions without options use one of the first two, according to their grade, unless their task has its own wording.
OPEN = Wording("You answer questions with care.", "Give a short answer: a name, a word or a phrase.")
OPEN_NUMBER = Wording("You answer questions with care.", "The answer is a number.")
OPEN_WORDING: dict[str, Wording] = {
    # For a small model trained from scratch, as above.
    "readings": Wording("", "What is the sum?", brief=True),
}
JUDGEMENT_LABELS = ("True", "False")


def render_messages(question: Question, *, reasoning: bool = True, confidence: bool = False) -> tuple[Message, ...]:
    """Render a question as a system and a user message.

    Args:
        question: The question.
        reasoning: Whether to ask for reasoning before the answer, or for the answer block alone.
        confidence: Whether to ask for a stated confidence after the answer.

    Returns:
        The system and the user message.

    >>> options = (Option(label="yes", text="yes"), Option(label="no", text="no"))
    >>> fields = {"question": "Do cats purr?"}
    >>> question = Question(id="1", task="mine", split="test", fields=fields, options=options, gold="yes")
    >>> print(render_messages(question)[1].content)
    Do cats purr?
    <BLANKLINE>
    Labels: yes, no
    """
    system = _render_system(question, reasoning=reasoning, confidence=confidence)
    user = _render_fields(question.fields)
    if question.has_labels:
        user += "\n\n" + _render_options(question)
    return Message(role="system", content=system), Message(role="user", content=user)


def render_judgement(question: Question, answer: str, *, reasoning: bool = True) -> tuple[Message, ...]:
    r"""Render a conversation that asks the model to judge an answer.

    The question is asked as in `render_messages`, the assistant gives the answer without reasoning, and a second user
    message asks whether it is right. The expected response is an answer block with the label `True` or `False`. P(True)
    is the probability of the label `True`.

    Args:
        question: The question.
        answer: The proposed answer: a label, or the text of an answer to a question without labels.
        reasoning: Whether the messages that ask the question ask for reasoning. The judgement is asked for without it.

    Returns:
        A system, a user, an assistant and a user message.

    >>> fields = {"question": "2 + 2?"}
    >>> question = Question(id="1", task="sums", split="test", fields=fields, gold="4", accepted=("4",), grade="number")
    >>> [message.role for message in render_judgement(question, "5")]
    ['system', 'user', 'assistant', 'user']
    """
    asked = render_messages(question, reasoning=reasoning)
    return add_judgement(asked, answer, brief=find_wording(question).brief)


def add_judgement(asked: Sequence[Message], answer: str, *, brief: bool = False) -> tuple[Message, ...]:
    """Add two messages to those that ask a question: one proposes an answer, the other asks whether it is right.

    Args:
        asked: The messages that ask the question.
        answer: The proposed answer.
        brief: Whether to leave out the explanation of the form in which the model should reply.

    Returns:
        The messages in `asked`, then an assistant and a user message.
    """
    proposed = Message(role="assistant", content=render_completion(None, answer))
    true_or_false = " or ".join(JUDGEMENT_LABELS)
    if brief:
        request = f"Is this right? {true_or_false}?"
    else:
        form = render_completion(None, true_or_false)
        request = f"Is the proposed answer right? Reply in exactly this form, every tag on a line of its own:\n{form}"
    return (*asked, proposed, Message(role="user", content=request))


def find_wording(question: Question) -> Wording:
    """Return the wording of a question's task, else the default one for its kind of answer."""
    if question.has_labels:
        return WORDING.get(question.task, DEFAULT)
    by_grade = OPEN_NUMBER if question.grade == "number" else OPEN
    return OPEN_WORDING.get(question.task, by_grade)


def _render_system(question: Question, *, reasoning: bool, confidence: bool) -> str:
    """Render the system message: the role, the task, how to answer, and the form of the response.

    A brief wording has only the task and a short request, since its readers are small models trained from scratch,
    which learn the form from their training rows.
    """
    wording = find_wording(question)
    labels = question.labels
    task = wording.task.format(n=len(labels))
    if wording.brief:
        request = "Think, then answer." if reasoning else "Answer."
        if confidence:
            request += " State your confidence."
        return f"{task} {request}"
    if labels:
        placeholder = f"{', '.join(labels[:-1])} or {labels[-1]}"
        instruction = "Weigh each choice in turn before you decide."
    else:
        placeholder = "your answer"
        instruction = "Reason step by step before you decide."
    form = render_completion("your reasoning", placeholder)
    if not reasoning:
        instruction = "Give the answer alone, without reasoning."
        form = render_completion(None, placeholder)
    if confidence:
        instruction += " After the answer, state the probability that it is right."
        form += "\n<confidence>a number from 0 to 1</confidence>"
    return f"{wording.role} {task}\n{instruction} Reply in exactly this form, every tag on a line of its own:\n{form}"


def _render_fields(fields: Mapping[str, str]) -> str:
    """Return a lone field `question` unchanged; render any other fields with their names."""
    if list(fields) == ["question"]:
        return fields["question"]
    lines = []
    for name, text in fields.items():
        shown_name = name.replace("_", " ").capitalize()
        lines.append(f"{shown_name}: {text}")
    return "\n".join(lines)


def _render_options(question: Question) -> str:
    options_are_labels = all(option.text in ("", option.label) for option in question.options)
    if options_are_labels:  # such as "entailment" in NLI
        return f"Labels: {', '.join(question.labels)}"
    lines = [f"{option.label}) {option.text}" for option in question.options]
    has_several_lines = any("\n" in line for line in lines)
    separator = "\n\n" if has_several_lines else "\n"
    return separator.join(lines)


def check_ids(questions: Iterable[Question]) -> None:
    """Raise ValueError if two questions share an id."""
    counts = Counter(question.id for question in questions)
    for question_id, count in counts.items():
        if count > 1:
            raise ValueError(f"question id {question_id!r} occurs more than once")


def asked_hash(asked: Iterable[tuple[Question, tuple[Message, ...]]]) -> str:
    """Hash questions with the messages that ask them, which determine the responses together with the model."""
    digest = hashlib.sha256()
    for question, chat in asked:
        digest.update(question.model_dump_json().encode())
        digest.update(repr(chat).encode())
    return digest.hexdigest()


TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# A tag as models write it: in upper or lower case, possibly with white space inside.
TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}(think|answer)\s{0,8}>", re.IGNORECASE)


def render_completion(reasoning: str | None, label: str | None) -> str:
    r"""Render a response in the form that prompts ask for.

    Tags inside the reasoning are removed, so that each tag occurs only once.

    Args:
        reasoning: Text of the think block; None omits the block.
        label: The answer: a label or a short text. None ends the response after `<answer>\n`.

    Returns:
        The text of the response.

    >>> render_completion("so", "B")
    '<think>\nso\n</think>\n<answer>\nB\n</answer>'
    """
    think = ""
    if reasoning is not None:
        without_tags = TAG.sub("", reasoning).strip()
        think = f"<think>\n{without_tags}\n</think>\n"
    if label is None:
        return f"{think}<answer>\n"
    return f"{think}<answer>\n{label}\n</answer>"


# Qwen3 with enable_thinking=False ends the prompt with an empty think block; its successors end it with an open one.
_THINK_START = re.compile(r"<think>\s*(</think>\s*)?\Z")
# The attribute of a tokenizer. It stays outside the rendering functions, whose texts must all change the fingerprint.
_TEMPLATE = "chat_template"


def prompt_text(chat: Sequence[Message], tokenizer: Any) -> str:
    """Render a chat with the tokenizer's template, up to the start of the assistant's turn.

    The template adds the special tokens, so the text must be encoded with add_special_tokens=False. If the template
    opens a think block in the assistant's turn, the block is removed, because responses write their own.
    `enable_thinking` is not set: Qwen3 then opens none.
    """
    template = str(getattr(tokenizer, _TEMPLATE, None))
    if not _has_system_role(tokenizer, template):
        chat = fold_system(chat)
    return _THINK_START.sub("", _apply_template(chat, tokenizer))


def prompt_ids(tokenizer: Any, chat: Sequence[Message]) -> tuple[int, ...]:
    """Render a chat with the tokenizer's template, ready for the response, and tokenize it."""
    text = prompt_text(chat, tokenizer)
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError("the chat template renders an empty prompt")
    return ids


def fold_system(chat: Sequence[Message]) -> tuple[Message, ...]:
    """Prepend the system text to the first user message, for templates without a system role."""
    if not chat or chat[0].role != "system":
        return tuple(chat)
    system, user, *rest = chat
    return (Message(role="user", content=f"{system.content}\n\n{user.content}"), *rest)


@lru_cache(maxsize=16)
def _has_system_role(tokenizer: Any, template: str) -> bool:
    """Return whether the tokenizer's chat template renders system messages, instead of refusing or dropping them.

    `template` is only a part of the key of the cache: a tokenizer whose template is replaced is tried again.
    """
    from jinja2 import TemplateError

    probe = (Message(role="system", content="catto-system-probe"), Message(role="user", content="x"))
    try:
        return "catto-system-probe" in _apply_template(probe, tokenizer)
    except TemplateError:
        return False


def _apply_template(chat: Sequence[Message], tokenizer: Any) -> str:
    turns = [message.model_dump() for message in chat]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def fingerprint() -> str:
    """Hash what this module renders for a fixed set of questions: a change to a wording, form or tag changes the hash.

    The questions cover every task in WORDING and one that is not in it, and options with one line, several lines and no
    text. Each is rendered with and without a request for reasoning. Responses with and without reasoning and label are
    hashed as well, and one prompt for a template without a system role.
    """
    rendered: list[object] = []
    for reasoning_text in ("r", None):
        for label in ("A", None):
            rendered.append(render_completion(reasoning_text, label))
    for task in (*WORDING, "none of these"):
        for question in _probe_questions(task):
            for reasoning in (True, False):
                chat = render_messages(question, reasoning=reasoning)
                rendered.append(task)
                rendered.append([message.model_dump() for message in chat])
                rendered.append(prompt_text(chat, _Template(has_system_role=True)))
    # The last chat is enough, since every system message is folded into the user message in the same way.
    rendered.append(prompt_text(chat, _Template(has_system_role=False)))
    return content_hash(rendered)


def open_fingerprint() -> str:
    """Hash what this module renders for questions without options, and for judgements of answers.

    The hash is separate from `fingerprint`, so that a change to these prompts does not change the keys of stages that
    only ask questions with labels.
    """
    rendered: list[object] = []
    for task in (*OPEN_WORDING, "none of these"):
        for grade in GRADES:
            question = Question(
                id="probe", task=task, split="test", fields={"question": "q"}, gold="1", accepted=("1",), grade=grade
            )
            rendered.append([task, *_list_open_prompts(question)])
    for task in WORDING:  # answers to questions with labels are judged too
        rendered.append(_list_open_prompts(_probe_questions(task)[0]))
    return content_hash(rendered)


def _list_open_prompts(question: Question) -> list[str]:
    """Render a question with each combination of reasoning and stated confidence, and the judgements of an answer."""
    template = _Template(has_system_role=True)
    texts = []
    for reasoning in (True, False):
        for confidence in (True, False):
            chat = render_messages(question, reasoning=reasoning, confidence=confidence)
            texts.append(prompt_text(chat, template))
        texts.append(prompt_text(render_judgement(question, "1", reasoning=reasoning), template))
    return texts


def _probe_questions(task: str) -> list[Question]:
    """Make three questions: with one and with two fields, and with single-line, multi-line and empty option texts."""
    single = {"question": "q"}
    double = {"premise": "p", "given_hypothesis": "h"}
    return [
        _probe_question(task, single, ("x", "y", "z", "w")),
        _probe_question(task, double, ("x", "y\nz")),
        _probe_question(task, single, ("", "")),
    ]


def _probe_question(task: str, fields: dict[str, str], texts: tuple[str, ...]) -> Question:
    options = tuple(Option(label=label, text=text) for label, text in zip("ABCD", texts, strict=False))
    return Question(id="probe", task=task, split="test", fields=fields, options=options, gold="A")


class _Template(NamedTuple):
    """A stand-in for a tokenizer whose chat template opens a think block; it may have a system role or not."""

    has_system_role: bool

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str:
        """Join the turns; a template without a system role drops the system message."""
        text = ""
        for turn in conversation:
            if turn["role"] == "system" and not self.has_system_role:
                continue
            text += f"[{turn['role']}]{turn['content']}"
        return text + "[assistant]<think>\n"
