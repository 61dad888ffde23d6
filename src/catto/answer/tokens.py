"""Find a label in token ids, and the tokens that the other labels would have in its place. No torch.

Characters are mapped to tokens by decoding prefixes of the ids themselves: what a model generated need not be what the
tokenizer would make of its text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from catto.answer.response import parse_response
from catto.prompts import render_completion
from catto.records import AnswerSource
from catto.token_ids import count_common, decode_ids

# Answers are at the end, so this many last tokens are searched first: a third of the time on 220 tokens.
TAIL = 32
_ENDING = "\n</answer>"
# A letter before a text to encode: no tokenizer merges it with a newline or a tag, and sentencepiece puts its dummy
# space before it.
_ANCHOR = "a"
# How models open an answer; the first is our own form, in which labels are trained and constrained.
_OPENINGS = (render_completion(None, None), "<answer>", "<answer> ")
# What decoding gives for a character of which some bytes are missing.
_TORN_CHARACTER = "\ufffd"

TokenIds = tuple[int, ...]


class UnreadableLabelError(ValueError):
    """Labels that begin with the same tokens, or token ids whose text is not made of their prefixes' texts."""


class Branches(NamedTuple):
    """The tokens that all labels begin with, and each label's tokens after them."""

    shared: TokenIds
    paths: Mapping[str, TokenIds]


class ScoringPoint(NamedTuple):
    """The tokens of a response up to a position, and the next tokens whose probability is needed there."""

    prefix: TokenIds
    candidates: TokenIds


class LabelPosition(NamedTuple):
    """Where a label is read in a response, and the tokens of every label there.

    A path ends at the token that tells its label from every other label. That is mostly one token, the one with the
    label's first character. Where that character takes several tokens (bytes), the position is the first of them at
    which labels differ, and labels that share it have longer paths.

    All paths have the form in which the label was written: what its token holds besides the label (" A", ">A", "A.")
    and the label's case. A label without a token in that form has no path; the written one always has.

    Attributes:
        ids: The tokens of the response before the label.
        paths: Label -> its tokens after `ids`.
        label: The label that was written there; None if the most probable one is to be taken.
        source: How the label was found.
    """

    ids: TokenIds
    paths: Mapping[str, TokenIds]
    label: str | None = None
    source: AnswerSource = "fallback"

    @property
    def needed_length(self) -> int:
        """Number of response tokens that come before the last token of the longest path."""
        longest = max(len(path) for path in self.paths.values())
        return len(self.ids) + longest - 1

    def list_scoring_points(self) -> list[ScoringPoint]:
        """List what must be scored to know the probability of every path."""
        candidates_after: dict[TokenIds, list[int]] = {}
        for path in self.paths.values():
            for length, token in enumerate(path):
                candidates = candidates_after.setdefault(self.ids + path[:length], [])
                if token not in candidates:
                    candidates.append(token)
        return [ScoringPoint(prefix, tuple(candidates)) for prefix, candidates in candidates_after.items()]


class LabelToken(NamedTuple):
    """Index of a label's token in a completion, and the token of every label there, in the order of the labels."""

    token_index: int
    candidates: TokenIds


class TokenStart(NamedTuple):
    """Index of a token, and the character that it begins at."""

    token_index: int
    begin: int


# Where a label is


def locate_label(
    tokenizer: Any,
    ids: Sequence[int],
    labels: Sequence[str],
    option_texts: Sequence[str] | None = None,
    *,
    cut: bool = False,
) -> LabelPosition | None:
    """Find the label that a response answers with.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Token ids of the response.
        labels: The question's labels.
        option_texts: The options' texts in the order of `labels`.
        cut: Whether the response ran into its token limit.

    Returns:
        The position of the label that `parse_response` reads; None if the response gives no answer.

    Raises:
        UnreadableLabelError: The label's tokens do not tell it from another label. Labels that differ as they are
            asked for may begin with one token in the case in which the model wrote them.
    """
    text = decode_ids(tokenizer, ids)
    parsed = parse_response(text, labels, option_texts, cut=cut)
    if parsed.label is None or parsed.span is None or parsed.source is None:  # a label comes with all three
        return None
    start, end = parsed.span
    tokens = _find_character(tokenizer, ids, text, start)
    own_path = tuple(ids[tokens.first : tokens.last + 1])
    text_up_to_label = decode_ids(tokenizer, ids[: tokens.last + 1])
    token_end = _count_agreeing(text_up_to_label, text)
    form = _WrittenForm(
        head=text[parsed.answer_start : start],
        lead=text[tokens.begin : start],
        written=text[start:end],
        after=text[end:token_end],
    )
    branches = _find_branches(tokenizer, tuple(labels), parsed.label, own_path, form)
    return LabelPosition(
        ids=(*ids[: tokens.first], *branches.shared),
        paths=branches.paths,
        label=parsed.label,
        source=parsed.source,
    )


def find_label_token(tokenizer: Any, ids: Sequence[int], labels: Sequence[str]) -> LabelToken:
    """Find the one token of a rendered completion that holds its label.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Token ids of the completion.
        labels: The question's K labels.

    Returns:
        The index of the label's token, and the K labels' tokens in the order of `labels`.

    Raises:
        ValueError: There is no label, a label has no token of the same form, or two labels share their first token.
    """
    position = locate_label(tokenizer, ids, labels)
    if position is None:
        ending = decode_ids(tokenizer, ids)[-80:]
        raise ValueError(f"no label among {', '.join(labels)} in the completion {ending!r}")
    for label in labels:
        if label not in position.paths:
            raise ValueError(f"label {label!r} has no token like that of {position.label!r} in {_name(tokenizer)}")
    with_longer_path = [label for label, path in position.paths.items() if len(path) > 1]
    if with_longer_path:
        first, second = with_longer_path[:2]
        raise ValueError(
            f"labels {first!r} and {second!r} begin with the same token in {_name(tokenizer)}: evaluation reads on, "
            f"training reads one token"
        )
    return LabelToken(token_index=len(position.ids), candidates=tuple(position.paths[label][0] for label in labels))


@lru_cache(maxsize=1024)
def encode_opening(tokenizer: Any, text: str, labels: tuple[str, ...]) -> LabelPosition:
    r"""Encode a text that opens an answer, up to where the labels' tokens begin to differ.

    A newline that the tokenizer merges with the label is left to the label's token.

    Args:
        tokenizer: The tokenizer.
        text: Ends in the canonical `<answer>\n`.
        labels: The question's labels.

    Returns:
        The position of a label that is still to be chosen.

    Raises:
        ValueError: Two labels begin alike, or do not begin at the same token.
    """
    ids_before = {}
    paths = {}
    for label in labels:
        encoded = _encode_label(tokenizer, text, label, _ENDING)
        ids_before[label] = encoded.before
        paths[label] = encoded.path
    branches = _split_paths(tokenizer, paths, text)
    first = labels[0]
    for label in labels:
        if ids_before[label] != ids_before[first]:
            raise ValueError(f"labels {first!r} and {label!r} begin at different tokens in {_name(tokenizer)}")
    return LabelPosition(ids=ids_before[first] + branches.shared, paths=branches.paths)


def check_labels(tokenizer: Any, labels: Sequence[str]) -> None:
    """Raise a ValueError unless tokens tell the labels apart, however an answer is opened."""
    canonical, *others = _OPENINGS
    encode_opening(tokenizer, canonical, tuple(labels))
    for text in others:
        paths = {label: _encode_label(tokenizer, text, label, _ENDING).path for label in labels}
        _split_paths(tokenizer, paths, text)


# Between characters and tokens


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Encode a text that continues other text: no special tokens, and no dummy space of its own.

    The text is encoded after `_ANCHOR`, whose tokens are removed; alone if the tokenizer merges the two.
    """
    ids = _tokenize(tokenizer, _ANCHOR + text)
    anchored_text = decode_ids(tokenizer, ids)
    if text and anchored_text.endswith(text):
        start = len(anchored_text) - len(text)
        tokens = _find_character(tokenizer, ids, anchored_text, start)
        is_anchor_apart = tokens.begin == start
        if is_anchor_apart:
            return ids[tokens.first :]
    return _tokenize(tokenizer, text)


def find_token(tokenizer: Any, ids: Sequence[int], text: str, position: int, *, tail: int = TAIL) -> TokenStart:
    """Find the token that completes a character, by bisection over prefixes of the ids.

    It is the last token of the shortest prefix whose text has the character. A prefix that ends inside the character
    decodes to U+FFFD there and is too short.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Token ids.
        text: `decode_ids(tokenizer, ids)`.
        position: Index of the character in `text`.
        tail: How many last tokens are searched first; all are if that does not give a sure result.

    Returns:
        The index of the token, and the character that it begins at.

    Raises:
        UnreadableLabelError: The text of the ids does not grow from their prefixes' texts.
    """
    start = max(len(ids) - tail, 0)
    tail_ids = ids[start:]
    tail_text = decode_ids(tokenizer, tail_ids)
    offset = len(text) - len(tail_text)
    through_character = tail_text[: max(position - offset + 1, 0)]

    def has_character(length: int) -> bool:
        return decode_ids(tokenizer, tail_ids[:length]).startswith(through_character)

    index = bisect_left(range(1, len(tail_ids) + 1), True, key=has_character)
    before = decode_ids(tokenizer, tail_ids[:index])
    grows = index < len(tail_ids) and tail_text.startswith(before.rstrip(_TORN_CHARACTER))
    # The first token of the tail may begin before the position, and a tokenizer may trim it when it decodes the tail.
    is_sure = grows and index > 0 and text.endswith(tail_text)
    if start > 0 and not is_sure:
        return find_token(tokenizer, ids, text, position, tail=len(ids))
    if not grows:
        raise UnreadableLabelError(f"{_name(tokenizer)}: the text of tokens does not grow from their prefixes' texts")
    return TokenStart(token_index=start + index, begin=offset + _count_agreeing(before, through_character))


class _CharacterTokens(NamedTuple):
    """The first and the last token with bytes of a character, and the character that the first one begins at."""

    first: int
    last: int
    begin: int


def _find_character(tokenizer: Any, ids: Sequence[int], text: str, position: int) -> _CharacterTokens:
    """Find all tokens of a character: one, or several if it is not ASCII and written in bytes."""
    last, begin = find_token(tokenizer, ids, text, position)
    first = last
    is_one_byte = text[position].isascii()
    while first > 0 and not is_one_byte:
        before = decode_ids(tokenizer, ids[:first])
        begin = _count_agreeing(before, text)
        ends_with_whole_character = begin == len(before)
        if ends_with_whole_character:
            break
        first -= 1
    if first == 0:
        begin = 0
    return _CharacterTokens(first, last, begin)


def _count_agreeing(beginning: str, text: str) -> int:
    """Count the characters of `text` that the text of its first ids gives; a torn last character does not count."""
    if text.startswith(beginning):
        return len(beginning)
    return len(beginning.rstrip(_TORN_CHARACTER))


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# The tokens of the other labels


class _WrittenForm(NamedTuple):
    """How a label is written."""

    head: str  # the text from `<answer>` to the label
    lead: str  # the end of `head` that is in the label's token
    written: str  # the label itself
    after: str  # what follows the label in its token


def restyle_labels(labels: Sequence[str], label: str, written: str) -> dict[str, str]:
    """Write every label in the case in which one label was written.

    Args:
        labels: All labels.
        label: The label that was written.
        written: How it was written.

    Returns:
        Label -> its written form. Only `label` itself, if it was written in another way, such as fullwidth.

    Example:
        >>> restyle_labels(("yes", "no"), "yes", "Yes")
        {'yes': 'Yes', 'no': 'No'}
    """
    styles: tuple[Callable[[str], str], ...] = (str, str.lower, str.upper, str.capitalize, str.title)
    for style in styles:
        if style(label) == written:
            return {name: style(name) for name in labels}
    if written.isascii():
        return {name: name for name in labels}
    return {label: written}


@lru_cache(maxsize=4096)
def _find_branches(
    tokenizer: Any, labels: tuple[str, ...], label: str, own_path: TokenIds, form: _WrittenForm
) -> Branches:
    """Find each label's tokens in the form in which `label` was written with the tokens `own_path`.

    A label that has no tokens in that form is left out.
    """
    restyled = restyle_labels(labels, label, form.written)
    paths: dict[str, TokenIds] = {}
    for name in labels:
        if name == label:
            paths[name] = own_path
        elif name in restyled:
            path = _encode_rival(tokenizer, restyled[name], form)
            if path is None:
                path = _exchange_label(tokenizer, own_path, form.written, restyled[name])
            if path is not None:
                paths[name] = path
    return _split_paths(tokenizer, paths, form.head)


def _encode_rival(tokenizer: Any, rival: str, form: _WrittenForm) -> TokenIds | None:
    """Encode another label in the same form; None if its tokens hold another part of the text before it."""
    try:
        encoded = _encode_label(tokenizer, form.head, rival, form.after)
    except ValueError:
        return None
    if encoded.lead != form.lead:
        return None
    return encoded.path


def _exchange_label(tokenizer: Any, own_path: TokenIds, written: str, rival: str) -> TokenIds | None:
    """Exchange the label inside its token; None if the vocabulary has no such token.

    This serves a model that wrote what the tokenizer would not: ">" and "A" where ">A" is one token.
    """
    piece = str(tokenizer.convert_ids_to_tokens(own_path[0]))
    if len(own_path) > 1 or written not in piece:
        return None
    before, _, after = piece.rpartition(written)
    exchanged = before + rival + after
    token = tokenizer.convert_tokens_to_ids(exchanged)
    # A tokenizer may give the id of its unknown token.
    if token is None or tokenizer.convert_ids_to_tokens(token) != exchanged:
        return None
    return (token,)


def _split_paths(tokenizer: Any, paths: Mapping[str, TokenIds], head: str) -> Branches:
    """Cut each label's tokens where they tell it from every other label's.

    Args:
        tokenizer: The tokenizer, for its name and tokens in errors.
        paths: Label -> the tokens of its first character. There are several where a character is written in bytes.
        head: The text before the label, for errors.

    Raises:
        UnreadableLabelError: All tokens of one label begin another label too.
    """
    if len(paths) == 1:
        return Branches(shared=(), paths=paths)
    shared = count_common(*paths.values())
    cut_paths = {}
    for label, path in paths.items():
        end = 0
        for other, other_path in paths.items():
            if other == label:
                continue
            common = count_common(path, other_path)
            is_never_told_apart = common == len(path)
            if is_never_told_apart:
                first, second = (name for name in paths if name in (label, other))
                raise UnreadableLabelError(
                    f"labels {first!r} and {second!r} begin with the same token "
                    f"{tokenizer.convert_ids_to_tokens(path[0])!r} after {head[-20:]!r} in {_name(tokenizer)}: "
                    f"give labels that begin differently"
                )
            end = max(end, common + 1)
        cut_paths[label] = path[shared:end]
    any_path = next(iter(paths.values()))
    return Branches(shared=any_path[:shared], paths=cut_paths)


class _EncodedLabel(NamedTuple):
    """A label encoded in its context."""

    before: TokenIds  # the ids before the label
    path: TokenIds  # the ids of its first character
    lead: str  # the text before the label that is in those ids


def _encode_label(tokenizer: Any, head: str, label: str, after: str) -> _EncodedLabel:
    """Encode head + label + after; raise a ValueError if the tokenizer cannot write the label."""
    ids = encode_continuation(tokenizer, head + label + after)
    text = decode_ids(tokenizer, ids)
    if not text.endswith(label + after):
        raise ValueError(f"{_name(tokenizer)} does not read label {label!r} back after {head[-20:]!r}")
    start = len(text) - len(label + after)
    tokens = _find_character(tokenizer, ids, text, start)
    return _EncodedLabel(
        before=tuple(ids[: tokens.first]),
        path=tuple(ids[tokens.first : tokens.last + 1]),
        lead=text[tokens.begin : start],
    )


def _name(tokenizer: Any) -> str:
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return f"tokenizer {name}"
