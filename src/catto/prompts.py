"""Question -> chat messages -> token ids; generated text -> reasoning and label. Every stage uses one wording and form.

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
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from catto.answers import TORN_CLOSING, Span, find_label, find_stated
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
_TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}(think|answer)\s{0,8}>", re.IGNORECASE)


class Tag(NamedTuple):
    """A tag in a text; `name` is `think`, `/think`, `answer` or `/answer`."""

    name: str
    start: int
    end: int


def find_tags(text: str) -> list[Tag]:
    """Find all tags of a text, in order. Case and white space inside a tag do not matter.

    >>> find_tags("<think>so</ Think>")
    [Tag(name='think', start=0, end=7), Tag(name='/think', start=9, end=18)]
    """
    return [Tag((match[1] + match[2]).lower(), *match.span()) for match in _TAG.finditer(text)]


def answer_tag(text: str, tags: Sequence[Tag]) -> Tag | None:
    """The tag that opens the answer: the last `<answer>`, unless the reasoning quotes it and words follow.

    >>> text = "<think>in <answer> tags</think>So B."
    >>> answer_tag(text, find_tags(text))
    """
    last = next((tag for tag in reversed(tags) if tag.name == "answer"), None)
    if last is not None:
        thinks = [tag for tag in tags if tag.name.endswith("think")]
        before = [tag.name for tag in thinks if tag.start < last.start]
        after = next((tag for tag in thinks if tag.start > last.start), None)
        if after is not None and after.name == "/think" and before[-1:] != ["/think"]:  # inside the reasoning
            return None if re.search(r"\w", re.sub("<[^<>]*>", "", text[after.end :])) else last
    return last


def completion(reasoning: str | None, label: str | None) -> str:
    r"""Render a response. Reasoning None: no think block; label None: the text ends after `<answer>\n`.

    Tags inside the reasoning are removed, so a rendered text has each tag once.

    >>> completion("so", "B")
    '<think>\nso\n</think>\n<answer>\nB\n</answer>'
    """
    think = "" if reasoning is None else f"<think>\n{_TAG.sub('', reasoning).strip()}\n</think>\n"
    return think + ("<answer>\n" if label is None else f"<answer>\n{label}\n</answer>")


Source = Literal["free", "plain"]
# What follows a response in a text that runs on: the end of the turn, or the next question. Bounded, so time is linear.
_NEXT_TURN = re.compile(
    r"(?im)<\|(?:im_end|endoftext|eot_id|end_of_text)\|>|</s>|<(?:end_of_turn|eos)>"
    r"|^[#*_> ]{0,8}(?:(?P<who>question|q|premise|user|human)(?: \d{1,4})?[*_ ]{0,4}:|(?:question|user)[*_ ]{0,4}$)"
)


class Parsed(NamedTuple):
    """What a response says. `span`: the label's characters in the text; None where there is no answer.

    `source`: `free` after `<answer>`, `plain` without a tag that counts. `opened`: where the answer's text begins,
    its tag included.
    """

    reasoning: str | None
    label: str | None = None
    span: Span | None = None
    source: Source | None = None
    opened: int = 0


def parse(text: str, labels: Sequence[str], option_texts: Sequence[str] | None = None, *, cut: bool = False) -> Parsed:
    """Read reasoning and label of a response. `option_texts` in the order of `labels`.

    The answer is what follows `answer_tag`, up to `</answer>` or the end; `catto.answers` lists its forms. Without
    that tag, the text after the reasoning is read: the whole of it, or last lines that state the answer. A think block
    that was never closed holds no answer. `cut`: the response ran into its token limit, so it is not read if its last
    line is unfinished. The reasoning is the text between the think tags; either tag may be missing, and where the
    block is empty the text between it and the answer is used. Where a text runs on to a next turn after its answer,
    that turn is not read.

    >>> parse("<think>so</think><answer>(B)</answer>", ("A", "B")).label
    'B'
    """
    turn = _NEXT_TURN.search(text, 1)
    if turn and turn["who"] not in labels and (first := parse(text[: turn.start()], labels, option_texts)).label:
        return first
    tags = find_tags(text)
    opening = answer_tag(text, tags)
    if opening is not None:
        reasoning = _reasoning(text[: opening.start])
        end = next((tag.start for tag in tags if tag.start >= opening.end and tag.name == "/answer"), None)
        if end is None and cut and _is_torn(text[opening.end :]):
            return Parsed(reasoning)
        reading = find_label(text, (opening.end, len(text) if end is None else end), labels, option_texts)
        return Parsed(reasoning, reading.label, reading.span, "free", opening.start) if reading else Parsed(reasoning)
    thinks = [tag for tag in tags if tag.name.endswith("think")]
    if (thinks and thinks[-1].name == "think") or (cut and _is_torn(text)):
        return Parsed(_reasoning(text))
    start = thinks[-1].end if thinks else 0
    end = next((tag.start for tag in tags if tag.start >= start), len(text))  # an unopened `</answer>`
    reading = find_stated(text, (start, end), labels, option_texts)
    if reading is None:
        return Parsed(_reasoning(text))
    line = max(text.rfind("\n", start, reading.span[0]), start)
    return Parsed(_reasoning(text[:line]), reading.label, reading.span, "plain", line)


def _is_torn(text: str) -> bool:
    """Whether a text that was cut ends inside a line of the answer; inside `</answer>` the answer has ended."""
    last = text.rpartition("\n")[2].strip()
    return bool(last) and not last.endswith(TORN_CLOSING)


def _reasoning(head: str) -> str | None:
    """The reasoning in the text before the answer."""
    tags = find_tags(head)
    start = next((tag.end for tag in tags if tag.name == "think"), 0)
    end = next((tag for tag in reversed(tags) if tag.name == "/think" and tag.start >= start), None)
    inside, after = (head[start:], "") if end is None else (head[start : end.start], head[end.end :])
    return _TAG.sub("", inside).strip() or _TAG.sub("", after).strip() or None


def parse_answer(text: str, question: Question, *, cut: bool = False) -> Parsed:
    """Read a response to a question."""
    return parse(text, question.labels, [option.text for option in question.options], cut=cut)


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


def common_tokens(prompts: Iterable[Sequence[int]]) -> int:
    """How many first tokens all prompts share, so that they can run once; each prompt keeps a last token of its own.

    >>> common_tokens([(1, 2, 3), (1, 2, 4, 5)]), common_tokens([(1, 2), (1, 2, 3)]), common_tokens([(1, 2)])
    (2, 1, 0)
    """
    different = {tuple(prompt) for prompt in prompts}
    return min(common(*different), *(len(prompt) - 1 for prompt in different)) if len(different) > 1 else 0


def common(*sequences: Sequence[int]) -> int:
    """How many tokens all sequences begin with together."""
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False)))


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
