"""Find a label in token ids, and the tokens that the other labels would have in its place. Does not import torch.

Characters are mapped to tokens by decoding prefixes of the ids. Encoding the text again would not do: a model may have
generated other tokens than the tokenizer would.
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

# Answers are at the end, so this many last tokens are searched first. On 220 tokens, that takes a third of the time.
TAIL = 32
_ENDING = "\n</answer>"
# A letter that is put before a text to encode: no tokenizer merges it with a newline or a tag, and sentencepiece puts
# its dummy space before it.
_ANCHOR = "a"
# How models open an answer. The first form is canonical: it is used in training and to close responses.
_OPENINGS = (render_completion(None, None), "<answer>", "<answer> ")
# Decoding gives this for a character with missing bytes.
_TORN_CHARACTER = "\ufffd"

TokenIds = tuple[int, ...]


class UnreadableLabelError(ValueError):
    """Labels begin with the same tokens, or the text of token ids does not begin with the texts of their prefixes."""


class Branches(NamedTuple):
    """The tokens that all labels begin with, and each label's path: its tokens after those."""

    shared: TokenIds
    paths: Mapping[str, TokenIds]


class ScoringPoint(NamedTuple):
    """The tokens of a response up to a position, and the next tokens whose probability is needed there."""

    prefix: TokenIds
    candidates: TokenIds


class LabelPosition(NamedTuple):
    """The position in a response where a label is read, and the tokens of every label there.

    A path ends at the token that distinguishes its label from every other label. Usually that is a single token, the
    one with the label's first character. If that character is encoded in several tokens (bytes), the position is the
    first token at which labels differ. Labels that share this token have longer paths.

    All paths have the form in which the label was written: its case, and the text that its token contains besides the
    label (" A", ">A", "A."). A label without a token in that form has no path; the written label always has one.

    Attributes:
        ids_before: The tokens of the response before this position.
        paths: Label -> its tokens from this position on.
        label: The label that was written there; None if the most probable one should be chosen.
        source: How the label was found.
    """

    ids_before: TokenIds
    paths: Mapping[str, TokenIds]
    label: str | None = None
    source: AnswerSource = "fallback"

    @property
    def needed_length(self) -> int:
        """The number of response tokens before the last token of the longest path."""
        longest = max(len(path) for path in self.paths.values())
        return len(self.ids_before) + longest - 1

    def list_scoring_points(self) -> list[ScoringPoint]:
        """List the points at which tokens must be scored to compute the probability of every path."""
        candidates_after: dict[TokenIds, list[int]] = {}
        for path in self.paths.values():
            for length, token in enumerate(path):
                candidates = candidates_after.setdefault(self.ids_before + path[:length], [])
                if token not in candidates:
                    candidates.append(token)
        return [ScoringPoint(prefix, tuple(candidates)) for prefix, candidates in candidates_after.items()]


class LabelToken(NamedTuple):
    """The index of a label's token in a completion, and the token of every label there, in the order of the labels."""

    token_index: int
    candidates: TokenIds


class TokenStart(NamedTuple):
    """The index of a token, and the index of the character at which it begins."""

    token_index: int
    begin: int


# Locating labels


def locate_label(
    tokenizer: Any,
    ids: Sequence[int],
    labels: Sequence[str],
    option_texts: Sequence[str] | None = None,
    *,
    cut: bool = False,
) -> LabelPosition | None:
    """Find the label that a response answers with, and the tokens that each label would have at this position.

    The labels are compared at the token in which the written label begins, or, if the tokens of two labels begin alike,
    at the first token that differs.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Token ids of the response.
        labels: The question's labels.
        option_texts: The options' texts in the order of `labels`; None if they are unknown.
        cut: Whether the response reached its token limit. An unfinished last line is then not read.

    Returns:
        The position of the label that `parse_response` reads; None if the response gives no answer.

    Raises:
        UnreadableLabelError: The label's tokens do not distinguish it from a different label, or the tokens of the
            response cannot be mapped to its characters. Even labels that pass `check_labels` may share a token in
            capitals or lower case: "Toxic" and "Tolerable" may, although "toxic" and "tolerable" do not.
    """
    text = decode_ids(tokenizer, ids)
    parsed = parse_response(text, labels, option_texts, cut=cut)
    if parsed.label is None or parsed.span is None or parsed.source is None:  # a label comes with all three
        return None
    start, end = parsed.span
    # The tokens of the label's first character: usually one, which may also contain text before and after the label.
    tokens = _find_character(tokenizer, ids, text, start)
    own_path = tuple(ids[tokens.first : tokens.last + 1])
    # The index of the first character after these tokens. They may end within a character, which then decodes
    # differently, so only the characters that agree with the text are counted.
    text_through_tokens = decode_ids(tokenizer, ids[: tokens.last + 1])
    end_of_tokens = _count_agreeing(text_through_tokens, text)
    # The other labels are encoded in the form in which this one was written.
    form = _WrittenForm(
        head=text[parsed.answer_start : start],
        lead=text[tokens.begin : start],
        written=text[start:end],
        after=text[end:end_of_tokens],
    )
    branches = _find_branches(tokenizer, tuple(labels), parsed.label, own_path, form)
    return LabelPosition(
        ids_before=(*ids[: tokens.first], *branches.shared),
        paths=branches.paths,
        label=parsed.label,
        source=parsed.source,
    )


def find_label_token(tokenizer: Any, ids: Sequence[int], labels: Sequence[str]) -> LabelToken:
    """Find the single token that decides the label of a rendered completion.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Token ids of the completion.
        labels: The question's K labels.

    Returns:
        The index of the label's token, and the K labels' tokens in the order of `labels`.

    Raises:
        ValueError: The completion has no label, a label has no token in the form in which the completion's label is
            written, or a single token does not tell two labels apart.
    """
    position = locate_label(tokenizer, ids, labels)
    if position is None:
        ending = decode_ids(tokenizer, ids)[-80:]
        raise ValueError(f"no label among {', '.join(labels)} in the completion {ending!r}")
    for label in labels:
        if label not in position.paths:
            raise ValueError(f"label {label!r} has no token like that of {position.label!r} in {_name(tokenizer)}")
    # A path has several tokens only if its first token begins at least two labels. The error names two of them.
    with_longer_path = [label for label, path in position.paths.items() if len(path) > 1]
    if with_longer_path:
        shared_token = position.paths[with_longer_path[0]][0]
        with_shared_token = [label for label in with_longer_path if position.paths[label][0] == shared_token]
        first, second = with_shared_token[:2]
        raise ValueError(
            f"labels {first!r} and {second!r} begin with the same token in {_name(tokenizer)}: evaluation reads "
            f"further tokens, but training reads one token"
        )
    candidates = tuple(position.paths[label][0] for label in labels)
    return LabelToken(token_index=len(position.ids_before), candidates=candidates)


@lru_cache(maxsize=1024)
def encode_opening(tokenizer: Any, text: str, labels: tuple[str, ...]) -> LabelPosition:
    r"""Encode a text that opens an answer, and the tokens with which each label would continue it.

    Each label is encoded with the closing tag after it, as in a complete answer. If the tokenizer merges the final
    newline with a label, the newline belongs to the label's token.

    Args:
        tokenizer: The tokenizer.
        text: A text that ends in the canonical `<answer>\n`.
        labels: The question's labels.

    Returns:
        The position after the text, or after further tokens that all labels begin with. Its `label` is None, since no
        label was written there.

    Raises:
        ValueError: A label cannot be encoded, its tokens do not distinguish it from a different label, or the tokens
            before the labels differ.
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
    return LabelPosition(ids_before=ids_before[first] + branches.shared, paths=branches.paths)


def check_labels(tokenizer: Any, labels: Sequence[str]) -> None:
    """Raise a ValueError unless tokens distinguish the labels after every usual opening of an answer."""
    canonical, *other_openings = _OPENINGS
    encode_opening(tokenizer, canonical, tuple(labels))
    for text in other_openings:
        paths = {label: _encode_label(tokenizer, text, label, _ENDING).path for label in labels}
        _split_paths(tokenizer, paths, text)


# Mapping characters to tokens


def encode_continuation(tokenizer: Any, text: str) -> list[int]:
    """Encode a text that continues another text, without special tokens and without a dummy space at its beginning.

    The text is encoded after `_ANCHOR`, whose tokens are then removed. If the tokenizer merges the anchor and the text
    into one token, the text is encoded alone.
    """
    ids = _tokenize(tokenizer, _ANCHOR + text)
    anchored_text = decode_ids(tokenizer, ids)
    if text and anchored_text.endswith(text):
        start = len(anchored_text) - len(text)
        tokens = _find_character(tokenizer, ids, anchored_text, start)
        is_anchor_separate = tokens.begin == start
        if is_anchor_separate:
            return ids[tokens.first :]
    return _tokenize(tokenizer, text)


def find_token(tokenizer: Any, ids: Sequence[int], text: str, position: int, *, tail: int = TAIL) -> TokenStart:
    """Find the token that completes a character, by bisection over prefixes of the ids.

    It is the last token of the shortest prefix whose text contains the character. A prefix that ends inside the
    character decodes to U+FFFD there, so it is too short.

    Args:
        tokenizer: The tokenizer that the ids belong to.
        ids: Token ids.
        text: `decode_ids(tokenizer, ids)`.
        position: Index of the character in `text`.
        tail: Number of tokens at the end that are searched first, to save time. If the token may not be among them, all
            tokens are searched.

    Returns:
        The index of the token, and the index of the character at which it begins.

    Raises:
        UnreadableLabelError: The text of the ids does not begin with the texts of their prefixes.
    """
    tail_start = max(len(ids) - tail, 0)
    tail_ids = ids[tail_start:]
    tail_text = decode_ids(tokenizer, tail_ids)
    offset = len(text) - len(tail_text)  # index in `text` of the tail's first character
    through_character = tail_text[: max(position - offset + 1, 0)]

    def has_character(length: int) -> bool:
        return decode_ids(tokenizer, tail_ids[:length]).startswith(through_character)

    # The shortest prefix with the character has `tokens_before` + 1 tokens.
    tokens_before = bisect_left(range(1, len(tail_ids) + 1), True, key=has_character)
    text_before = decode_ids(tokenizer, tail_ids[:tokens_before])
    # Bisection is valid only if the text begins with the texts of prefixes; such a text may end in a torn character.
    was_found = tokens_before < len(tail_ids)
    begins_with_prefix = was_found and tail_text.startswith(text_before.rstrip(_TORN_CHARACTER))
    # If it is the tail's first token, its text may be wrong: some tokenizers trim the first token that they decode. It
    # is also the result if the character is before the tail.
    is_first_of_tail = tokens_before == 0
    is_certain = begins_with_prefix and not is_first_of_tail and text.endswith(tail_text)
    if tail_start > 0 and not is_certain:
        return find_token(tokenizer, ids, text, position, tail=len(ids))
    if not begins_with_prefix:
        raise UnreadableLabelError(f"{_name(tokenizer)}: the text of tokens does not begin with their prefixes' texts")
    begin = offset + _count_agreeing(text_before, through_character)
    return TokenStart(token_index=tail_start + tokens_before, begin=begin)


class _CharacterTokens(NamedTuple):
    """The first and last token with bytes of a character, and the index of the character at which the first begins."""

    first: int
    last: int
    begin: int


def _find_character(tokenizer: Any, ids: Sequence[int], text: str, position: int) -> _CharacterTokens:
    """Find all tokens of a character: one, or several if its UTF-8 bytes are in different tokens."""
    last, begin = find_token(tokenizer, ids, text, position)
    first = last
    is_one_byte = text[position].isascii()  # a single byte is in a single token
    # Step back until the text before `first` ends with a whole character.
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
    """Count the characters of `text` that a decoded prefix of its ids covers; a torn last character does not count."""
    if text.startswith(beginning):
        return len(beginning)
    return len(beginning.rstrip(_TORN_CHARACTER))


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# The tokens of the other labels


class _WrittenForm(NamedTuple):
    """A label as the model wrote it, with the text around it."""

    head: str  # the text from `<answer>` to the label
    lead: str  # the part of `head` that is in the label's token
    written: str  # the label itself
    after: str  # the text after the label that is in its token


def restyle_labels(labels: Sequence[str], label: str, written: str) -> dict[str, str]:
    """Write every label in the case in which one label was written.

    Args:
        labels: All labels.
        label: The label that was written.
        written: How it was written.

    Returns:
        Label -> its text in the same case: unchanged, lower, upper, capitalised or title case. Labels are unchanged if
        `written` is in none of these cases ("yES"). If `written` has non-ASCII characters that no change of case
        explains, such as fullwidth ones, only `label` is returned.

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
            if path is None:  # the vocabulary may still have the token
                path = _exchange_label(tokenizer, own_path, form.written, restyled[name])
            if path is not None:
                paths[name] = path
    return _split_paths(tokenizer, paths, form.head)


def _encode_rival(tokenizer: Any, rival: str, form: _WrittenForm) -> TokenIds | None:
    """Encode a different label in the same form; None if its token contains a different part of the text before it."""
    try:
        encoded = _encode_label(tokenizer, form.head, rival, form.after)
    except ValueError:
        return None
    if encoded.lead != form.lead:
        return None
    return encoded.path


def _exchange_label(tokenizer: Any, own_path: TokenIds, written: str, rival: str) -> TokenIds | None:
    """Replace the label inside its token by a different one; None if the vocabulary has no such token.

    This is needed if the model wrote tokens that the tokenizer would not: ">" and "A" although ">A" is a token.
    """
    piece = str(tokenizer.convert_ids_to_tokens(own_path[0]))
    if len(own_path) > 1 or written not in piece:
        return None
    before, _, after = piece.rpartition(written)
    exchanged = before + rival + after
    token = tokenizer.convert_tokens_to_ids(exchanged)
    # A tokenizer may return the id of its unknown token.
    if token is None or tokenizer.convert_ids_to_tokens(token) != exchanged:
        return None
    return (token,)


def _split_paths(tokenizer: Any, paths: Mapping[str, TokenIds], head: str) -> Branches:
    """Split off the tokens that all labels share, and cut each path after the token that distinguishes its label.

    For example, the paths (1, 2, 3), (1, 4, 5) and (1, 4, 6) share the token 1. They become (2,), (4, 5) and (4, 6).

    Args:
        tokenizer: The tokenizer, for its name and tokens in errors.
        paths: Label -> the tokens that contain its first character: several if the character is encoded in bytes.
        head: The text before the label, for errors.

    Returns:
        The shared tokens, and the rest of each path. A single path is returned whole.

    Raises:
        UnreadableLabelError: A different label begins with all tokens of a label.
    """
    if len(paths) == 1:  # the other labels cannot be written in this form
        return Branches(shared=(), paths=paths)
    shared = count_common(*paths.values())
    cut_paths = {}
    for label, path in paths.items():
        end = 0  # index after the token that distinguishes the label from all others
        for other, other_path in paths.items():
            if other == label:
                continue
            common = count_common(path, other_path)
            is_prefix_of_other = common == len(path)
            if is_prefix_of_other:
                first, second = (name for name in paths if name in (label, other))  # in the order of the labels
                raise UnreadableLabelError(
                    f"labels {first!r} and {second!r} begin with the same token "
                    f"{tokenizer.convert_ids_to_tokens(path[0])!r} after {head[-20:]!r} in {_name(tokenizer)}: "
                    f"use labels that begin differently"
                )
            end = max(end, common + 1)
        cut_paths[label] = path[shared:end]
    any_path = next(iter(paths.values()))
    return Branches(shared=any_path[:shared], paths=cut_paths)


class _EncodedLabel(NamedTuple):
    """A label encoded in its context."""

    before: TokenIds  # the ids before the label
    path: TokenIds  # the ids of its first character
    lead: str  # the text before the label that `path` contains


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
