"""Find a label in token ids, and the tokens that the other labels would have in its place. No torch.

Characters are mapped to tokens by decoding prefixes of the ids themselves: what a model generated need not be what the
tokenizer would make of its text. `decode_ids` shows special tokens and cleans nothing up, as the engines do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from catto.answer.response import parse_response
from catto.prompts import completion
from catto.token_ids import count_common, decode_ids

_ENDING = "\n</answer>"
# A letter before a text to encode: no tokenizer merges it with a newline or a tag, and sentencepiece puts its dummy
# space before it.
_ANCHOR = "a"
# Answers are at the end, so so many last tokens are searched first: a third of the time on 220 tokens.
TAIL = 32
# Answers as models write them; the first is our own form, in which labels are trained and constrained.
_FORMS = (completion(None, None), "<answer>", "<answer> ")

Path = tuple[int, ...]
Split = tuple[Path, Mapping[str, Path]]  # the tokens that all labels begin with, and each label's after them


class UnreadableLabelError(ValueError):
    """Labels that begin with the same tokens, or token ids whose text is not made of their prefixes' texts."""


Source = Literal["free", "plain", "fallback"]


class Place(NamedTuple):
    """Where a label is read: after the tokens `ids`. `label` is the one that was written there, None for the likeliest.

    `paths`: each label's tokens there, in the form in which one was written, up to the token that tells it from every
    other label. That is mostly one token, the one with the label's first character. Where that character takes several
    tokens (bytes), the place is the first of them at which labels differ, and labels that share it have longer paths.
    The form is what the label's token holds besides the label (" A", ">A", "A.") and the label's case. A label without
    a token in that form has no path; the written one always has.
    """

    ids: Path
    paths: Mapping[str, Path]
    label: str | None = None
    source: Source = "fallback"

    @property
    def length(self) -> int:
        """How many tokens of prefix the longest path needs."""
        return len(self.ids) + max(map(len, self.paths.values())) - 1

    def scored(self) -> list[tuple[Path, Path]]:
        """What is scored: the tokens before each token of a path, and the candidates there."""
        places: dict[Path, dict[int, None]] = {}
        for path in self.paths.values():
            for length, token in enumerate(path):
                places.setdefault(self.ids + path[:length], {})[token] = None
        return [(prefix, tuple(tokens)) for prefix, tokens in places.items()]


def locate(
    tokenizer: Any,
    ids: Sequence[int],
    labels: Sequence[str],
    option_texts: Sequence[str] | None = None,
    *,
    cut: bool = False,
) -> Place | None:
    """Find the label that a response answers with, by `parse_response`; None where it gives no answer.

    UnreadableLabelError where its tokens cannot tell it from another: labels that differ as they are asked for may
    begin with one token in the case in which the model wrote them.
    """
    text = decode_ids(tokenizer, ids)
    parsed = parse_response(text, labels, option_texts, cut=cut)
    if parsed.label is None or parsed.span is None or parsed.source is None:
        return None
    start, end = parsed.span
    first, last, begin = _tokens_at(tokenizer, ids, text, start)
    reached = _agreed(decode_ids(tokenizer, ids[: last + 1]), text)
    form = _Form(text[parsed.opened : start], text[begin:start], text[start:end], text[end:reached])
    shared, paths = _candidates(tokenizer, tuple(labels), parsed.label, tuple(ids[first : last + 1]), form)
    return Place((*ids[:first], *shared), paths, parsed.label, parsed.source)


def label_place(tokenizer: Any, ids: Sequence[int], labels: Sequence[str]) -> tuple[int, Path]:
    """Index of the label's token in a rendered completion's ids, and the K labels' tokens, in the order of `labels`."""
    place = locate(tokenizer, ids, labels)
    if place is None:
        raise ValueError(f"no label among {', '.join(labels)} in the completion {decode_ids(tokenizer, ids)[-80:]!r}")
    if missing := [label for label in labels if label not in place.paths]:
        raise ValueError(f"label {missing[0]!r} has no token like that of {place.label!r} in {_name(tokenizer)}")
    if alike := [label for label, path in place.paths.items() if len(path) > 1]:
        first, second = alike[:2]
        raise ValueError(
            f"labels {first!r} and {second!r} begin with the same token in {_name(tokenizer)}: evaluation reads on, "
            f"training reads one token"
        )
    return len(place.ids), tuple(place.paths[label][0] for label in labels)


@lru_cache(maxsize=1024)
def opening(tokenizer: Any, text: str, labels: tuple[str, ...]) -> Place:
    """Encode `text`, which ends in the canonical `<answer>\\n`, up to where the labels' tokens begin to differ.

    A newline that the tokenizer merges with the label is left to the label's token. ValueError where two labels begin
    alike, or do not begin at the same place.
    """
    written = {label: _written(tokenizer, text, label, _ENDING) for label in labels}
    shared, paths = _split(tokenizer, {label: path for label, (_, path, _) in written.items()}, text)
    before = written[labels[0]][0]
    if other := next((label for label in labels if written[label][0] != before), None):
        raise ValueError(f"labels {labels[0]!r} and {other!r} begin at different tokens in {_name(tokenizer)}")
    return Place((*before, *shared), paths)


def check_labels(tokenizer: Any, labels: Sequence[str]) -> None:
    """Raise a ValueError unless tokens tell the labels apart, in each form that answers come in."""
    opening(tokenizer, _FORMS[0], tuple(labels))
    for form in _FORMS[1:]:
        _split(tokenizer, {label: _written(tokenizer, form, label, _ENDING)[1] for label in labels}, form)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text that continues other text: no special tokens, and no dummy space of its own."""
    ids = list(tokenizer(_ANCHOR + text, add_special_tokens=False)["input_ids"])
    whole = decode_ids(tokenizer, ids)
    if text and whole.endswith(text):
        start = len(whole) - len(text)
        first, _, begin = _tokens_at(tokenizer, ids, whole, start)
        if begin == start:
            return ids[first:]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def token_at(tokenizer: Any, ids: Sequence[int], text: str, position: int, tail: int = TAIL) -> tuple[int, int]:
    """Index of the token that completes character `position` of text = decode_ids(ids), and the character it begins at.

    The last `tail` tokens are searched, then all: by bisection over prefixes. A cut inside a character decodes to
    U+FFFD, so a prefix counts only when its text agrees up to the position.
    """
    start = max(len(ids) - tail, 0)
    part = ids[start:]
    local = decode_ids(tokenizer, part)
    offset = len(text) - len(local)
    goal = local[: max(position - offset + 1, 0)]
    index = bisect_left(range(1, len(part) + 1), True, key=lambda n: decode_ids(tokenizer, part[:n]).startswith(goal))
    before = decode_ids(tokenizer, part[:index])
    grows = index < len(part) and local.startswith(before.rstrip("\ufffd"))
    # the first token of the tail ends before the position or holds it; a tokenizer may trim it when it decodes the tail
    if start > 0 and not (grows and index > 0 and text.endswith(local)):
        return token_at(tokenizer, ids, text, position, len(ids))
    if not grows:
        raise UnreadableLabelError(f"{_name(tokenizer)}: the text of tokens does not grow from their prefixes' texts")
    return start + index, offset + _agreed(before, goal)


def _agreed(part: str, text: str) -> int:
    """How many characters of `text` a prefix of its ids gives; a cut character, U+FFFD, is not one."""
    return len(part) if text.startswith(part) else len(part.rstrip("\ufffd"))


def _tokens_at(tokenizer: Any, ids: Sequence[int], text: str, position: int) -> tuple[int, int, int]:
    """First and last token that hold bytes of character `position`, and the character that the first begins at."""
    last, begin = token_at(tokenizer, ids, text, position)
    first = last
    while first > 0 and not text[position].isascii():  # an ASCII character is one byte
        part = decode_ids(tokenizer, ids[:first])
        begin = _agreed(part, text)
        if begin == len(part):
            break
        first -= 1
    return first, last, begin if first > 0 else 0


class _Form(NamedTuple):
    """How a label is written: the text from `<answer>` to it, its token's share of that, itself, its token's rest."""

    head: str
    lead: str
    written: str
    after: str


def restyle(labels: Sequence[str], label: str, written: str) -> dict[str, str]:
    """Every label in the case in which one was written; that one alone if in another way, such as fullwidth.

    >>> restyle(("yes", "no"), "yes", "Yes")
    {'yes': 'Yes', 'no': 'No'}
    """
    styles: tuple[Callable[[str], str], ...] = (str, str.lower, str.upper, str.capitalize, str.title)
    style = next((style for style in styles if style(label) == written), str if written.isascii() else None)
    return {label: written} if style is None else {name: style(name) for name in labels}


@lru_cache(maxsize=4096)
def _candidates(tokenizer: Any, labels: tuple[str, ...], label: str, own: Path, form: _Form) -> Split:
    """Each label's tokens in the form in which `label` was written with the tokens `own`, cut by `_split`."""
    paths = {label: own}
    for other, rival in restyle(labels, label, form.written).items():
        if other == label:
            continue
        with suppress(ValueError):
            _, path, lead = _written(tokenizer, form.head, rival, form.after)
            if lead == form.lead:
                paths[other] = path
                continue
        # The model wrote what the tokenizer would not (">" and "A" where ">A" is one token): exchange it in the piece.
        piece = str(tokenizer.convert_ids_to_tokens(own[0]))
        if len(own) == 1 and form.written in piece:
            exchanged = rival.join(piece.rsplit(form.written, 1))
            known = tokenizer.convert_tokens_to_ids(exchanged)
            if known is not None and tokenizer.convert_ids_to_tokens(known) == exchanged:
                paths[other] = (known,)
    return _split(tokenizer, {name: paths[name] for name in labels if name in paths}, form.head)


def _split(tokenizer: Any, paths: Mapping[str, Path], head: str) -> Split:
    """Cut each label's tokens, those of its first character, where they tell it from every other label's."""
    shared = count_common(*paths.values()) if len(paths) > 1 else 0
    cut = {}
    for label, path in paths.items():
        same = {other: count_common(path, rival) for other, rival in paths.items() if other != label}
        if other := next((other for other, length in same.items() if length == len(path)), None):
            first, second = (name for name in paths if name in (label, other))
            raise UnreadableLabelError(
                f"labels {first!r} and {second!r} begin with the same token "
                f"{tokenizer.convert_ids_to_tokens(path[0])!r} after {head[-20:]!r} in {_name(tokenizer)}: "
                f"give labels that begin differently"
            )
        cut[label] = path[shared : 1 + max(same.values(), default=len(path) - 1)]
    return next(iter(paths.values()))[:shared], cut


def _written(tokenizer: Any, head: str, label: str, after: str) -> tuple[list[int], Path, str]:
    """Encode head + label + after: the ids before the label, those of its first character, what precedes it in them.

    ValueError where the tokenizer cannot write the label.
    """
    ids = encoded(tokenizer, head + label + after)
    text = decode_ids(tokenizer, ids)
    if not text.endswith(label + after):
        raise ValueError(f"{_name(tokenizer)} does not read label {label!r} back after {head[-20:]!r}")
    start = len(text) - len(label + after)
    first, last, begin = _tokens_at(tokenizer, ids, text, start)
    return ids[:first], tuple(ids[first : last + 1]), text[begin:start]


def _name(tokenizer: Any) -> str:
    return f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"
