"""Question -> chat messages; generated text -> reasoning and label. One wording and one ending for every stage.

The ending of every response that is trained on or asked for, each tag on its own line:

    <think>
    reasoning
    </think>
    <answer>
    label
    </answer>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from catto.answers import Reading, Span, find_label, find_stated
from catto.records import Message, Question


class Wording(NamedTuple):
    """How a task is put: who answers, and what is asked of `{n}` choices. `brief` leaves the format unexplained."""

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

_THINK_FORM = "<think>\nyour reasoning\n</think>\n"


def messages(question: Question, *, reasoning: bool = True) -> tuple[Message, ...]:
    """Put a question as a system and a user message; without `reasoning` only the answer block is asked for."""
    system = _system(question, reasoning)
    return Message(role="system", content=system), Message(role="user", content=_user(question))


def _system(question: Question, reasoning: bool) -> str:
    wording = WORDING.get(question.task, DEFAULT)
    task = wording.task.format(n=len(question.options))
    if wording.brief:
        return f"{task} Think, then answer." if reasoning else f"{task} Answer."
    weigh = "Weigh each choice in turn before you decide." if reasoning else "Give the answer alone, without reasoning."
    form = f"{_THINK_FORM if reasoning else ''}<answer>\n{_one_of(question.labels)}\n</answer>"
    return f"{wording.role} {task}\n{weigh} Reply in exactly this form, every tag on a line of its own:\n{form}"


def _one_of(labels: Sequence[str]) -> str:
    return f"{', '.join(labels[:-1])} or {labels[-1]}"


def _user(question: Question) -> str:
    """The question's parts, then its options; options that are their own label (NLI's words) stand on one line."""
    if list(question.fields) == ["question"]:
        parts = [question.fields["question"]]
    else:
        parts = [f"{name.replace('_', ' ').capitalize()}: {text}" for name, text in question.fields.items()]
    return "\n".join(parts) + "\n\n" + _options(question)


def _options(question: Question) -> str:
    if all(option.text in ("", option.label) for option in question.options):
        return f"Labels: {', '.join(question.labels)}"
    lines = [f"{option.label}) {option.text}" for option in question.options]
    return ("\n\n" if any("\n" in line for line in lines) else "\n").join(lines)


TAG = re.compile(r"<\s{0,8}(/?)\s{0,8}(think|answer)\s{0,8}>", re.IGNORECASE)


def completion(reasoning: str | None, label: str | None) -> str:
    """Render the one ending. Reasoning None: answer-first, no think block; label None: open after `<answer>\\n`.

    Tags inside the reasoning are taken out, so a rendered text has each tag once.
    """
    think = "" if reasoning is None else f"<think>\n{TAG.sub('', reasoning).strip()}\n</think>\n"
    return think + ("<answer>\n" if label is None else f"<answer>\n{label}\n</answer>")


Source = Literal["free", "plain"]


class Parsed(NamedTuple):
    """What a response says. `span`: where the label's characters stand in the text; None where there is no answer.

    `source`: `free` after `<answer>`, `plain` in a response without that tag. `opened`: where the answer's text begins,
    tag and all.
    """

    reasoning: str | None
    label: str | None = None
    span: Span | None = None
    source: Source | None = None
    opened: int = 0


def parse(text: str, labels: Sequence[str], option_texts: Sequence[str] | None = None, *, cut: bool = False) -> Parsed:
    """Read reasoning and label of a response. `option_texts` in the order of `labels`.

    The answer is what follows the last `<answer>`, up to `</answer>` or the end; `catto.answers` has its forms. Without
    any `<answer>`, what follows the reasoning is read: the whole of it, or a last line that states the answer. A think
    block that was never closed holds no answer. `cut`: the response ran into its limit of tokens, so a line that it
    had not ended is not read. The reasoning is what stands between the think tags; either tag may be missing, and where
    the block is empty the text between it and the answer is taken.

    >>> parse("<think>so</think><answer>(B)</answer>", ("A", "B")).label
    'B'
    """
    tags = list(TAG.finditer(text))
    opening = next((tag for tag in reversed(tags) if tag_name(tag) == "answer"), None)
    if opening is None:
        return _parse_plain(text, tags, labels, option_texts, cut)
    closings = (tag.start() for tag in tags if tag.start() >= opening.end() and tag_name(tag) == "/answer")
    end = next(closings, None)
    reasoning = _reasoning(text[: opening.start()])
    if end is None and cut and _is_torn(text[opening.end() :]):
        return Parsed(reasoning)
    found = find_label(text, (opening.end(), len(text) if end is None else end), labels, option_texts)
    return _parsed(reasoning, found, "free", opening.start())


def _parse_plain(
    text: str, tags: Sequence[re.Match[str]], labels: Sequence[str], option_texts: Sequence[str] | None, cut: bool
) -> Parsed:
    thinks = [tag for tag in tags if tag[2].lower() == "think"]
    if (thinks and tag_name(thinks[-1]) == "think") or (cut and _is_torn(text)):
        return Parsed(_reasoning(text))
    start = thinks[-1].end() if thinks else 0
    end = next((tag.start() for tag in tags if tag.start() >= start), len(text))  # `</answer>` that nothing opened
    found = find_stated(text, (start, end), labels, option_texts)
    if found is None:
        return Parsed(_reasoning(text))
    line = max(text.rfind("\n", start, found.span[0]), start)
    return _parsed(_reasoning(text[:line]), found, "plain", line)


def _parsed(reasoning: str | None, found: Reading | None, source: Source, opened: int) -> Parsed:
    return Parsed(reasoning) if found is None else Parsed(reasoning, found.label, found.span, source, opened)


def _is_torn(text: str) -> bool:
    """Whether a text that was cut ends inside a line of the answer; inside `</answer>` the answer has ended."""
    last = text.rpartition("\n")[2].strip()
    return bool(last) and not any(last.endswith("</answer>"[:length]) for length in range(2, 9))


def parse_answer(text: str, question: Question, *, cut: bool = False) -> Parsed:
    """Read a response to a question."""
    return parse(text, question.labels, [option.text for option in question.options], cut=cut)


def tag_name(tag: re.Match[str]) -> str:
    """`think`, `/think`, `answer` or `/answer`."""
    return (tag[1] + tag[2]).lower()


def _reasoning(head: str) -> str | None:
    """The reasoning in what stands before the answer."""
    tags = list(TAG.finditer(head))
    start = next((tag.end() for tag in tags if tag_name(tag) == "think"), 0)
    end = next((tag for tag in reversed(tags) if tag_name(tag) == "/think" and tag.start() >= start), None)
    inside = head[start : end.start()] if end is not None else head[start:]
    after = head[end.end() :] if end is not None else ""
    return TAG.sub("", inside).strip() or TAG.sub("", after).strip() or None


class ChatTokenizer(Protocol):
    """What is needed of a Transformers tokenizer."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> object:
        """Render a conversation by the tokenizer's own template."""
        ...


# Qwen3 with enable_thinking=False ends the prompt with an empty think block, its successors with an open `<think>`.
_THINK_START = re.compile(r"<think>\s*(</think>\s*)?\Z")


def prompt_text(chat: Sequence[Message], tokenizer: ChatTokenizer) -> str:
    """Render the prompt up to the start of the assistant's turn. Encode it with add_special_tokens=False.

    `enable_thinking` is left alone: on Qwen3 that gives the bare header of the turn. A think block that a template
    opens there by itself is taken off: our responses write their own.
    """
    turns = chat if system_supported(tokenizer) else fold_system(chat)
    return _THINK_START.sub("", _rendered(turns, tokenizer))


def system_supported(tokenizer: ChatTokenizer) -> bool:
    """Whether the template has a system role: it neither refuses a system message nor drops its text."""
    from jinja2 import TemplateError

    probe = (Message(role="system", content="catto-system-probe"), Message(role="user", content="x"))
    try:
        return "catto-system-probe" in _rendered(probe, tokenizer)
    except TemplateError:
        return False


def fold_system(chat: Sequence[Message]) -> tuple[Message, ...]:
    """Put the system text before the first user's text, for templates without a system role."""
    if not chat or chat[0].role != "system":
        return tuple(chat)
    system, user, *rest = chat
    return (Message(role="user", content=f"{system.content}\n\n{user.content}"), *rest)


def _rendered(chat: Sequence[Message], tokenizer: ChatTokenizer) -> str:
    turns = [message.model_dump() for message in chat]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
