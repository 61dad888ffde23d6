"""Where a label stands in token ids, and which tokens the other labels would be in its place. No torch.

Characters are mapped to tokens by decoding prefixes of the ids themselves: what a model generated need not be what the
tokenizer would make of its text. `decode` shows special tokens and cleans nothing up, as the engines do.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from catto.prompts import completion, parse

_ANSWER = re.compile(r"<\s{0,8}answer\s{0,8}>", re.IGNORECASE)
_ENDING = "\n</answer>"
# A letter before a text to encode: no tokenizer merges it with a newline or a tag, and the dummy space that
# sentencepiece puts before a text goes to it.
_ANCHOR = "a"
_TAIL = 32
# Answers as models write them; the first is our own form, in which labels are trained and constrained.
_FORMS = (completion(None, None), "<answer>", "<answer> ")


@dataclass(frozen=True)
class Place:
    """A label in token ids: `index` of the token with its first character, and each label's token in that very form.

    The form is what stands with the label in its token (" A", ">A", "A.") and its case. A label that no single token
    begins in that form is not among the candidates; the one that stands there always is.
    """

    label: str
    index: int
    candidates: dict[str, int]


class Opening(NamedTuple):
    """Tokens to append so that the next one begins a label, and that token for every label."""

    ids: tuple[int, ...]
    candidates: dict[str, int]


def locate(
    tokenizer: Any, ids: Sequence[int], labels: Sequence[str], option_texts: Sequence[str] | None = None
) -> Place | None:
    """Find the label that a response answers with, by `prompts.parse`; None where it gives no answer."""
    text = decoded(tokenizer, ids)
    parsed = parse(text, labels, option_texts)
    if parsed.label is None or parsed.span is None:
        return None
    start, end = parsed.span
    index, begin = token_at(tokenizer, ids, text, start)
    reached = decoded(tokenizer, ids[: index + 1])
    form = _Form(
        head=text[[tag.start() for tag in _ANSWER.finditer(text, 0, start)][-1] : start],
        lead=text[begin:start],
        written=text[start:end],
        after=text[end : _agreed(reached, text)],
    )
    return Place(parsed.label, index, dict(_candidates(tokenizer, tuple(labels), parsed.label, ids[index], form)))


def label_place(tokenizer: Any, ids: Sequence[int], labels: Sequence[str]) -> tuple[int, tuple[int, ...]]:
    """Index of the label's token in a rendered completion's ids, and the K labels' tokens, in the order of `labels`."""
    place = locate(tokenizer, ids, labels)
    if place is None:
        raise ValueError(f"no label among {', '.join(labels)} in the completion {decoded(tokenizer, ids)[-80:]!r}")
    missing = [label for label in labels if label not in place.candidates]
    if missing:
        raise ValueError(f"label {missing[0]!r} has no token like that of {place.label!r} in {_name(tokenizer)}")
    return place.index, tuple(place.candidates[label] for label in labels)


def opening(tokenizer: Any, text: str, labels: Sequence[str]) -> Opening:
    """Encode `text`, which ends in the canonical `<answer>\\n`, up to where the labels' tokens begin.

    A newline that the tokenizer merges with the label is left to the label's token. ValueError where two labels begin
    with one token, or do not begin at the same place.
    """
    return _opening(tokenizer, text, tuple(labels))


def check_labels(tokenizer: Any, labels: Sequence[str]) -> None:
    """Raise a ValueError unless every label begins with a token of its own, in each form that answers come in."""
    opening(tokenizer, _FORMS[0], labels)
    for form in _FORMS[1:]:
        seen: dict[int, str] = {}
        for label in labels:
            _check_distinct(tokenizer, seen, _readable(tokenizer, form, label).token, label, form)


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of token ids, special tokens shown and nothing cleaned up."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_at(tokenizer: Any, ids: Sequence[int], text: str, position: int) -> tuple[int, int]:
    """Index of the token that completes character `position` of text = decoded(ids), and the character it begins at.

    Answers stand at the end, so the last tokens are searched first, which took a third of the time on 220 tokens.
    """
    for start in (len(ids) - _TAIL, 0):
        part = ids[max(start, 0) :]
        local = decoded(tokenizer, part)
        offset = len(text) - len(local)
        if start <= 0 or (text.endswith(local) and position >= offset):
            index, begin = _search(tokenizer, part, local, position - offset)
            # A tokenizer may trim the first token that it decodes, so that it counts only where it is the first of all.
            if start <= 0 or index > 0:
                return max(start, 0) + index, offset + begin
    raise AssertionError("the whole was searched")


def _search(tokenizer: Any, ids: Sequence[int], text: str, position: int) -> tuple[int, int]:
    """`token_at` by bisection over prefixes.

    A cut inside a character decodes to U+FFFD, so a prefix counts only when its text agrees up to the position.
    """
    goal = text[: position + 1]
    index = bisect_left(range(1, len(ids) + 1), True, key=lambda n: decoded(tokenizer, ids[:n]).startswith(goal))
    if index == len(ids):
        raise ValueError(f"{_name(tokenizer)}: the text of {len(ids)} tokens does not grow from its prefixes' texts")
    return index, _agreed(decoded(tokenizer, ids[:index]), goal)


def _agreed(part: str, text: str) -> int:
    """How many characters of `text` a prefix of its ids has given; a cut character, U+FFFD, is not one."""
    return len(part) if text.startswith(part) else len(part.rstrip("\ufffd"))


class _Form(NamedTuple):
    """How a label is written: the text from `<answer>` to it, its token's share of that, itself, its token's rest."""

    head: str
    lead: str
    written: str
    after: str


@lru_cache(maxsize=4096)
def _candidates(tokenizer: Any, labels: tuple[str, ...], label: str, token: int, form: _Form) -> Mapping[str, int]:
    """Each label's token in the form in which `label` was written with `token`."""
    found: dict[str, int] = {}
    dress = _case(label, form.written)
    for other in labels:
        candidate = token if other == label else _candidate(tokenizer, dress(other), token, form)
        if candidate is not None:
            _check_distinct(tokenizer, {value: key for key, value in found.items()}, candidate, other, form.head)
            found[other] = candidate
    return found


def _candidate(tokenizer: Any, other: str, token: int, form: _Form) -> int | None:
    """The token that begins `other` in the same form: as the tokenizer writes it there, else by its vocabulary."""
    written = _written(tokenizer, form.head, other, form.after)
    if written is not None and written.lead == form.lead:
        return written.token
    # The model wrote what the tokenizer would not (">" and "A" where ">A" is one token): exchange it in the piece.
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if form.written not in piece:
        return None
    exchanged = other.join(piece.rsplit(form.written, 1))
    known = tokenizer.convert_tokens_to_ids(exchanged)
    return known if known is not None and tokenizer.convert_ids_to_tokens(known) == exchanged else None


def _case(label: str, written: str) -> Callable[[str], str]:
    """The change of case that made `written` of the label."""
    styles: tuple[Callable[[str], str], ...] = (str, str.lower, str.upper, str.capitalize, str.title)
    return next((style for style in styles if style(label) == written), str)


class _Written(NamedTuple):
    """A label as the tokenizer writes it: the ids before its first token, that token, what stands in it before."""

    before: list[int]
    token: int
    lead: str


def _written(tokenizer: Any, head: str, label: str, after: str) -> _Written | None:
    """Encode head + label + after; None where the tokenizer cannot write the label."""
    ids = encoded(tokenizer, head + label + after)
    text = decoded(tokenizer, ids)
    if not text.endswith(label + after):
        return None
    start = len(text) - len(label + after)
    index, begin = token_at(tokenizer, ids, text, start)
    return _Written(ids[:index], ids[index], text[begin:start])


def _readable(tokenizer: Any, head: str, label: str) -> _Written:
    """The label as an answer is written after `head`."""
    written = _written(tokenizer, head, label, _ENDING)
    if written is None:
        raise ValueError(f"{_name(tokenizer)} does not read label {label!r} back after {head[-20:]!r}")
    return written


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that goes on from other text: no special tokens, and no dummy space of its own."""
    ids = _plain(tokenizer, _ANCHOR + text)
    whole = decoded(tokenizer, ids)
    start = len(whole) - len(text)
    if not (text and whole.endswith(text)):
        return _plain(tokenizer, text)
    index, begin = token_at(tokenizer, ids, whole, start)
    return ids[index:] if begin == start else _plain(tokenizer, text)


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=1024)
def _opening(tokenizer: Any, text: str, labels: tuple[str, ...]) -> Opening:
    prefix: list[int] | None = None
    seen: dict[int, str] = {}
    for label in labels:
        written = _readable(tokenizer, text, label)
        _check_distinct(tokenizer, seen, written.token, label, text)
        if prefix is not None and written.before != prefix:
            raise ValueError(f"labels {labels[0]!r} and {label!r} begin at different tokens in {_name(tokenizer)}")
        prefix = written.before
    return Opening(tuple(prefix or ()), {label: token for token, label in seen.items()})


def _check_distinct(tokenizer: Any, seen: dict[int, str], token: int, label: str, head: str) -> None:
    """Note the label's token in `seen`, refusing one that is there."""
    if token in seen:
        piece = tokenizer.convert_ids_to_tokens(token)
        raise ValueError(
            f"labels {seen[token]!r} and {label!r} begin with the same token {piece!r} after {head[-20:]!r} "
            f"in {_name(tokenizer)}: give labels that begin differently"
        )
    seen[token] = label


def _name(tokenizer: Any) -> str:
    return f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
