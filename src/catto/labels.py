"""Where a label stands in token ids, and which tokens the other labels would be in its place. No torch.

Characters are mapped to tokens by decoding prefixes of the ids themselves: what a model generated need not be what the
tokenizer would make of its text. `decode` shows special tokens and cleans nothing up, as the engines do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from catto.prompts import Source, completion, parse

_ENDING = "\n</answer>"
# A letter before a text to encode: no tokenizer merges it with a newline or a tag, and the dummy space that
# sentencepiece puts before a text goes to it.
_ANCHOR = "a"
_TAIL = 32
# Answers as models write them; the first is our own form, in which labels are trained and constrained.
_FORMS = (completion(None, None), "<answer>", "<answer> ")

Rest = Mapping[str, tuple[int, ...]]


class IndistinctLabelsError(ValueError):
    """Two labels that the tokenizer begins alike."""


class _MisalignedError(ValueError):
    """Token ids whose text is not made of their prefixes' texts."""


@dataclass(frozen=True)
class Place:
    """A label in token ids: `index` of the token that tells it apart, and each label's token in that very form.

    That is the token with the label's first character. Where that character takes several tokens (bytes), it is the
    first of them at which labels differ; labels that still share it go on in `rest`: label -> tokens after its
    candidate up to the one that sets it apart. The form is what stands with the label in its token (" A", ">A", "A.")
    and its case. A label that has no token in that form is not among the candidates; the one that stands there is.
    """

    label: str
    index: int
    candidates: dict[str, int]
    rest: Rest = field(default_factory=dict)
    source: Source = "free"


class Opening(NamedTuple):
    """Tokens to append so that the next one begins a label, that token for every label, and `rest` as in `Place`."""

    ids: tuple[int, ...]
    candidates: dict[str, int]
    rest: Rest


def locate(
    tokenizer: Any,
    ids: Sequence[int],
    labels: Sequence[str],
    option_texts: Sequence[str] | None = None,
    *,
    cut: bool = False,
) -> Place | None:
    """Find the label that a response answers with, by `prompts.parse`; None where it gives no answer.

    Nor does it where the tokens cannot tell which label it is: labels that differ as they are asked for may begin with
    one token in the case in which the model wrote them.
    """
    try:
        return _located(tokenizer, ids, labels, option_texts, cut)
    except IndistinctLabelsError:
        return None


def _located(
    tokenizer: Any, ids: Sequence[int], labels: Sequence[str], option_texts: Sequence[str] | None, cut: bool
) -> Place | None:
    text = decoded(tokenizer, ids)
    parsed = parse(text, labels, option_texts, cut=cut)
    if parsed.label is None or parsed.span is None or parsed.source is None:
        return None
    start, end = parsed.span
    try:
        tokens = _tokens_at(tokenizer, ids, text, start)
    except _MisalignedError:
        return None
    reached = decoded(tokenizer, ids[: tokens.last + 1])
    form = _Form(
        head=text[parsed.opened : start],
        lead=text[tokens.begin : start],
        written=text[start:end],
        after=text[end : _agreed(reached, text)],
    )
    own = tuple(ids[tokens.first : tokens.last + 1])
    split = _candidates(tokenizer, tuple(labels), parsed.label, own, form)
    return Place(parsed.label, tokens.first + split.shared, dict(split.candidates), split.rest, parsed.source)


def label_place(tokenizer: Any, ids: Sequence[int], labels: Sequence[str]) -> tuple[int, tuple[int, ...]]:
    """Index of the label's token in a rendered completion's ids, and the K labels' tokens, in the order of `labels`."""
    place = _located(tokenizer, ids, labels, None, False)
    if place is None:
        raise ValueError(f"no label among {', '.join(labels)} in the completion {decoded(tokenizer, ids)[-80:]!r}")
    missing = [label for label in labels if label not in place.candidates]
    if missing:
        raise ValueError(f"label {missing[0]!r} has no token like that of {place.label!r} in {_name(tokenizer)}")
    if place.rest:
        one, other = list(place.rest)[:2]
        raise ValueError(
            f"labels {one!r} and {other!r} begin with the same token in {_name(tokenizer)}: evaluation reads on, "
            f"training reads one token"
        )
    return place.index, tuple(place.candidates[label] for label in labels)


def opening(tokenizer: Any, text: str, labels: Sequence[str]) -> Opening:
    """Encode `text`, which ends in the canonical `<answer>\\n`, up to where the labels' tokens begin to differ.

    A newline that the tokenizer merges with the label is left to the label's token. ValueError where two labels begin
    alike, or do not begin at the same place.
    """
    return _opening(tokenizer, text, tuple(labels))


def check_labels(tokenizer: Any, labels: Sequence[str]) -> None:
    """Raise a ValueError unless tokens tell the labels apart, in each form that answers come in."""
    opening(tokenizer, _FORMS[0], labels)
    for form in _FORMS[1:]:
        _split(tokenizer, {label: _readable(tokenizer, form, label).path for label in labels}, form)


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
        raise _MisalignedError(
            f"{_name(tokenizer)}: the text of {len(ids)} tokens does not grow from its prefixes' texts"
        )
    before = decoded(tokenizer, ids[:index])
    if not text.startswith(before.rstrip("\ufffd")):
        raise _MisalignedError(f"{_name(tokenizer)}: token {index} of {len(ids)} changes the text before it")
    return index, _agreed(before, goal)


def _agreed(part: str, text: str) -> int:
    """How many characters of `text` a prefix of its ids has given; a cut character, U+FFFD, is not one."""
    return len(part) if text.startswith(part) else len(part.rstrip("\ufffd"))


class _Tokens(NamedTuple):
    """The tokens `first` to `last` of one character, and the character that the first of them begins at."""

    first: int
    last: int
    begin: int


def _tokens_at(tokenizer: Any, ids: Sequence[int], text: str, position: int) -> _Tokens:
    """The tokens that hold bytes of character `position` of text = decoded(ids)."""
    last, begin = token_at(tokenizer, ids, text, position)
    first = last
    while first > 0 and not text[position].isascii():  # an ASCII character is one byte
        part = decoded(tokenizer, ids[:first])
        begin = _agreed(part, text)
        if begin == len(part):
            break
        first -= 1
    return _Tokens(first, last, begin if first > 0 else 0)


class _Form(NamedTuple):
    """How a label is written: the text from `<answer>` to it, its token's share of that, itself, its token's rest."""

    head: str
    lead: str
    written: str
    after: str


class _Split(NamedTuple):
    """Labels told apart: after `shared` tokens that all begin with, each has its candidate and, in `rest`, more."""

    shared: int
    candidates: dict[str, int]
    rest: dict[str, tuple[int, ...]]


def _split(tokenizer: Any, paths: Mapping[str, tuple[int, ...]], head: str) -> _Split:
    """Cut each label's tokens, those of its first character, where they tell it from every other label's."""
    first, *others = paths.values()
    shared = min((_common(first, other) for other in others), default=0)
    needed = {label: _needed(tokenizer, label, paths, head) for label in paths}
    rest = {label: path[shared + 1 : needed[label]] for label, path in paths.items() if needed[label] > shared + 1}
    return _Split(shared, {label: path[shared] for label, path in paths.items()}, rest)


def _common(path: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two paths begin with together."""
    pairs = zip(path, other, strict=False)
    return next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(path), len(other)))


def _needed(tokenizer: Any, label: str, paths: Mapping[str, tuple[int, ...]], head: str) -> int:
    """How many of a label's tokens it takes to tell it from the others."""
    path = paths[label]
    same = {other: _common(path, rival) for other, rival in paths.items() if other != label}
    for other, length in same.items():
        if length == len(path):
            piece = tokenizer.convert_ids_to_tokens(path[0])
            one, two = (name for name in paths if name in (label, other))
            raise IndistinctLabelsError(
                f"labels {one!r} and {two!r} begin with the same token {piece!r} after {head[-20:]!r} "
                f"in {_name(tokenizer)}: give labels that begin differently"
            )
    return 1 + max(same.values(), default=len(path) - 1)


@lru_cache(maxsize=4096)
def _candidates(tokenizer: Any, labels: tuple[str, ...], label: str, own: tuple[int, ...], form: _Form) -> _Split:
    """Each label's tokens in the form in which `label` was written with the tokens `own`."""
    dress = _case(label, form.written)
    paths: dict[str, tuple[int, ...]] = {}
    for other in labels:
        path = own if other == label else dress and _candidate(tokenizer, dress(other), own, form)
        if path:
            paths[other] = path
    return _split(tokenizer, paths, form.head)


def _candidate(tokenizer: Any, other: str, own: tuple[int, ...], form: _Form) -> tuple[int, ...] | None:
    """The tokens that begin `other` in the same form: as the tokenizer writes it there, else by its vocabulary."""
    written = _written(tokenizer, form.head, other, form.after)
    if written is not None and written.lead == form.lead:
        return written.path
    # The model wrote what the tokenizer would not (">" and "A" where ">A" is one token): exchange it in the piece.
    piece = str(tokenizer.convert_ids_to_tokens(own[0]))
    if len(own) > 1 or form.written not in piece:
        return None
    exchanged = other.join(piece.rsplit(form.written, 1))
    known = tokenizer.convert_tokens_to_ids(exchanged)
    return (known,) if known is not None and tokenizer.convert_ids_to_tokens(known) == exchanged else None


def _case(label: str, written: str) -> Callable[[str], str] | None:
    """The change of case that made `written` of the label; None where it was written another way (fullwidth)."""
    styles: tuple[Callable[[str], str], ...] = (str, str.lower, str.upper, str.capitalize, str.title)
    return next((style for style in styles if style(label) == written), str if written.isascii() else None)


class _Written(NamedTuple):
    """A label as the tokenizer writes it: the ids before it, those of its first character, what precedes in them."""

    before: list[int]
    path: tuple[int, ...]
    lead: str


def _written(tokenizer: Any, head: str, label: str, after: str) -> _Written | None:
    """Encode head + label + after; None where the tokenizer cannot write the label."""
    ids = encoded(tokenizer, head + label + after)
    text = decoded(tokenizer, ids)
    if not text.endswith(label + after):
        return None
    start = len(text) - len(label + after)
    tokens = _tokens_at(tokenizer, ids, text, start)
    return _Written(ids[: tokens.first], tuple(ids[tokens.first : tokens.last + 1]), text[tokens.begin : start])


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
    tokens = _tokens_at(tokenizer, ids, whole, start)
    return ids[tokens.first :] if tokens.begin == start else _plain(tokenizer, text)


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=1024)
def _opening(tokenizer: Any, text: str, labels: tuple[str, ...]) -> Opening:
    written = {label: _readable(tokenizer, text, label) for label in labels}
    split = _split(tokenizer, {label: one.path for label, one in written.items()}, text)
    before = written[labels[0]].before
    if other := next((label for label in labels if written[label].before != before), None):
        raise ValueError(f"labels {labels[0]!r} and {other!r} begin at different tokens in {_name(tokenizer)}")
    return Opening((*before, *written[labels[0]].path[: split.shared]), split.candidates, split.rest)


def _name(tokenizer: Any) -> str:
    return f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
