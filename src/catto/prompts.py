"""Question -> chat messages -> token ids. Every stage uses one wording and form.

A response that is trained on or asked for has this form, each tag on its own line:

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
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from catto.records import Message, Option, Question, content_hash


class Wording(NamedTuple):
    """A task's wording: who answers, and what to do with `{n}` choices. `brief` leaves the format unexplained."""

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


def messages(question: Question, *, reasoning: bool = True) -> tuple[Message, ...]:
    """Render a question as a system and a user message; without `reasoning` it asks for the answer block alone.

    >>> options = (Option(label="yes", text="yes"), Option(label="no", text="no"))
    >>> fields = {"question": "Do cats purr?"}
    >>> question = Question(id="1", task="mine", split="test", fields=fields, options=options, gold="yes")
    >>> print(messages(question)[1].content)
    Do cats purr?
    <BLANKLINE>
    Labels: yes, no
    """
    wording, labels = WORDING.get(question.task, DEFAULT), question.labels
    task = wording.task.format(n=len(labels))
    if wording.brief:
        system = f"{task} Think, then answer." if reasoning else f"{task} Answer."
    else:
        form = completion("your reasoning" if reasoning else None, f"{', '.join(labels[:-1])} or {labels[-1]}")
        weigh = "Weigh each choice in turn before you decide."
        weigh = weigh if reasoning else "Give the answer alone, without reasoning."
        system = f"{wording.role} {task}\n{weigh} Reply in exactly this form, every tag on a line of its own:\n{form}"
    if list(question.fields) == ["question"]:
        parts = [question.fields["question"]]
    else:
        parts = [f"{name.replace('_', ' ').capitalize()}: {text}" for name, text in question.fields.items()]
    if all(option.text in ("", option.label) for option in question.options):  # NLI's words are their own labels
        options = f"Labels: {', '.join(labels)}"
    else:
        lines = [f"{option.label}) {option.text}" for option in question.options]
        options = ("\n\n" if any("\n" in line for line in lines) else "\n").join(lines)
    user = "\n".join(parts) + "\n\n" + options
    return Message(role="system", content=system), Message(role="user", content=user)


def check_ids(questions: Iterable[Question]) -> None:
    """Raise ValueError where two questions share an id."""
    if repeated := [name for name, count in Counter(question.id for question in questions).items() if count > 1]:
        raise ValueError(f"question id {repeated[0]!r} occurs more than once")


def asked_hash(asked: Iterable[tuple[Question, tuple[Message, ...]]]) -> str:
    """Hash questions with the messages that ask them: what responses depend on beside the model."""
    digest = hashlib.sha256()
    for question, chat in asked:
        digest.update(question.model_dump_json().encode())
        digest.update(repr(chat).encode())
    return digest.hexdigest()


TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# A tag as models write it: in any case, with white space inside.
TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}(think|answer)\s{0,8}>", re.IGNORECASE)


def completion(reasoning: str | None, label: str | None) -> str:
    r"""Render a response. Reasoning None: no think block; label None: the text ends after `<answer>\n`.

    Tags inside the reasoning are removed, so a rendered text has each tag once.

    >>> completion("so", "B")
    '<think>\nso\n</think>\n<answer>\nB\n</answer>'
    """
    think = "" if reasoning is None else f"<think>\n{TAG.sub('', reasoning).strip()}\n</think>\n"
    return think + ("<answer>\n" if label is None else f"<answer>\n{label}\n</answer>")


# Qwen3 with enable_thinking=False ends the prompt with an empty think block, its successors with an open `<think>`.
_THINK_START = re.compile(r"<think>\s*(</think>\s*)?\Z")
_TEMPLATE = "chat_template"  # apart from what is rendered, each text of which is part of the fingerprint


def prompt_text(chat: Sequence[Message], tokenizer: Any) -> str:
    """Render the prompt up to the start of the assistant's turn. Encode it with add_special_tokens=False.

    `enable_thinking` is not set: on Qwen3 that gives the bare header of the turn. A think block that a template opens
    there is removed, since responses write their own.
    """
    turns = chat if _has_system_role(tokenizer, str(getattr(tokenizer, _TEMPLATE, None))) else fold_system(chat)
    return _THINK_START.sub("", _rendered(turns, tokenizer))


def prompt_ids(tokenizer: Any, chat: Sequence[Message]) -> tuple[int, ...]:
    """Render a chat with the tokenizer's template, ready for the response, and tokenize it."""
    ids = tuple(tokenizer(prompt_text(chat, tokenizer), add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError("the chat template renders an empty prompt")
    return ids


def fold_system(chat: Sequence[Message]) -> tuple[Message, ...]:
    """Put the system text before the first user's text, for templates without a system role."""
    if not chat or chat[0].role != "system":
        return tuple(chat)
    system, user, *rest = chat
    return (Message(role="user", content=f"{system.content}\n\n{user.content}"), *rest)


@lru_cache(maxsize=16)
def _has_system_role(tokenizer: Any, template: str) -> bool:
    """Whether the template neither refuses a system message nor drops its text; rendered once per template."""
    from jinja2 import TemplateError

    probe = (Message(role="system", content="catto-system-probe"), Message(role="user", content="x"))
    try:
        return "catto-system-probe" in _rendered(probe, tokenizer)
    except TemplateError:
        return False


def _rendered(chat: Sequence[Message], tokenizer: Any) -> str:
    turns = [message.model_dump() for message in chat]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def fingerprint() -> str:
    """Hash what this module renders for a fixed set of questions: another wording, form or tag gives another hash.

    The set has every task of WORDING and one that is not there, with letters, lines and words as options, with and
    without reasoning; the endings; and the prompt's text for templates with and without a system role.
    """
    rendered: list[object] = [completion(reasoning, label) for reasoning in ("r", None) for label in ("A", None)]
    single, double = {"question": "q"}, {"premise": "p", "given_hypothesis": "h"}
    forms = [(single, ("x", "y", "z", "w")), (double, ("x", "y\nz")), (single, ("", ""))]
    for task in (*WORDING, "none of these"):
        for fields, texts in forms:
            options = tuple(Option(label=label, text=text) for label, text in zip("ABCD", texts, strict=False))
            question = Question(id="probe", task=task, split="test", fields=fields, options=options, gold="A")
            for reasoning in (True, False):
                chat = messages(question, reasoning=reasoning)
                rendered += [task, [message.model_dump() for message in chat], prompt_text(chat, _Template(True))]
    rendered.append(prompt_text(chat, _Template(False)))
    return content_hash(rendered)


class _Template(NamedTuple):
    """A chat template with or without a system role that opens a think block."""

    system: bool

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str:
        """Join the turns; a template without a system role drops the system message."""
        turns = [turn for turn in conversation if self.system or turn["role"] != "system"]
        return "".join(f"[{turn['role']}]{turn['content']}" for turn in turns) + "[assistant]<think>\n"
