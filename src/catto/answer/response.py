"""Read the reasoning and the answer of a response from its tags, or else from its last line.

Everything up to the last `</think>` is reasoning and is not searched; a `<think>` that never closes contains no answer.
The content of the last `<answer>` after the reasoning must match one of the forms of `catto.answer.forms`. Without that
tag the last line is read, unless an earlier line contradicts it. Nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from catto.answer.forms import Choices, LabelReading, Span, find_claims, fold_choices, is_lead, read_form
from catto.prompts import TAG
from catto.records import Option

Source = Literal["free", "plain"]

# What follows the response if the model goes on writing: the end of the turn, or the next question. Repetitions are
# bounded, so that a search takes linear time.
NEXT_TURN = re.compile(
    r"(?im)(?P<token><[|\uff5c](?:im_end|endoftext|eot_id|end_of_text|end\u2581of\u2581sentence)[|\uff5c]>"
    r"|</s>|<(?:end_of_turn|eos)>)"
    r"|^[#*_> ]{0,8}(?:(?P<who>question|q|premise|user|human)(?: \d{1,4})?[*_ ]{0,4}:|(?:question|user)[*_ ]{0,4}$)"
)
# Beginnings of `</answer>`, with which a text ends if generation stopped inside that tag.
TORN_CLOSING = tuple("</answer"[:length] for length in range(2, 9))
# Lines without words: a rule, a fence, the delimiters of a LaTeX formula.
NO_WORDS = re.compile(r"[\s\\\[\]$`*_=-]*")
LIST_ITEM = re.compile(r"\s*(?:[-+•>]|\*\s)")
SPEAKS_OF_ANYTHING = re.compile(r"(?i)[\W_]*(?:\w+,? )?(?:it|this|that)\b")  # "So it is B"
QUOTATION = re.compile(r"""\s*["'\u201c\u2018«]""")
CLOSING_MARKS = "*_`)]}\"'\u201d\u2019 \t\r"
ENDS_SENTENCE = re.compile(r"(?<!\.)[.!。]$")
# A line after which a statement may be a quotation or the end of a longer sentence.
LEAVES_OPEN = re.compile(
    r"(?i)(?:[:,;(\uff1a\u2013\u2014-]|\.\.|\u2026"
    r"|\b(?:that|if|whether|unless|because|not|never|say|says|said|think|believe|claim|claims|suppose|assume|is))$"
)


class Tag(NamedTuple):
    """A tag in a text; `name` is `think`, `/think`, `answer` or `/answer`."""

    name: str
    start: int
    end: int


class ParsedResponse(NamedTuple):
    """The reasoning and the answer of a response.

    Attributes:
        reasoning: The reasoning; None if there is none.
        label: The label; None if there is no answer.
        span: Start and end of the label's characters in the text; None if there is no answer.
        source: `free` for an answer in `<answer>`, `plain` for one without that tag; None if there is no answer.
        answer_start: Where the answer begins in the text: at its tag or its line. 0 if there is no answer.
    """

    reasoning: str | None
    label: str | None = None
    span: Span | None = None
    source: Source | None = None
    answer_start: int = 0


class LabelledQuestion(Protocol):
    """The parts of a question that are needed to read an answer: its id and options, but not the gold label."""

    @property
    def id(self) -> str:
        """The id of the question."""
        ...

    @property
    def options(self) -> tuple[Option, ...]:
        """The options with their labels."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the order of the options."""
        ...


def parse_answer(text: str, question: LabelledQuestion, *, cut: bool = False) -> ParsedResponse:
    """Read a response to a question; see `parse_response`."""
    return parse_response(text, question.labels, [option.text for option in question.options], cut=cut)


def parse_response(
    text: str, labels: Sequence[str], option_texts: Sequence[str] | None = None, *, cut: bool = False
) -> ParsedResponse:
    """Read the reasoning and the label of a response, in time linear in its length.

    Args:
        text: The response.
        labels: The question's labels.
        option_texts: The options' texts in the order of `labels`; None if they are unknown.
        cut: Whether the response reached its token limit. An unfinished last line is then not read.

    Returns:
        The reasoning and the answer. Without an answer, only the reasoning is set. The reasoning is the text between
        the think tags, either of which may be missing. If there is no text between them, the reasoning is the text from
        `</think>` to the answer.

    Example:
        >>> parse_response("<think>so</think><answer>(B)</answer>", ("A", "B")).label
        'B'
        >>> parse_response("Cats purr.\\nThe answer is A.\\nThe answer is B.", ("A", "B")).label is None
        True
    """
    choices = fold_choices(labels, option_texts)
    turn = text[: find_turn_end(text, labels)]
    # If a next turn follows, the token limit cut that one, and this turn is complete.
    is_turn_cut = cut and len(turn) == len(text)
    tags = find_tags(turn)
    opening = find_answer_tag(turn, tags)
    if opening is None:
        source: Source = "plain"
        reading = None
        is_last_line_unfinished = is_turn_cut and _is_torn(turn)
        if not is_last_line_unfinished:
            reading = _read_plain(turn, tags, choices)
        answer_start = len(turn)  # without an answer, the whole turn is searched for the reasoning
        if reading is not None:
            answer_start = _find_line_start(turn, tags, reading.span[0])
    else:
        reading = _read_tagged(turn, tags, opening, choices, is_cut=is_turn_cut)
        source = "free"
        answer_start = opening.start
    reasoning = _find_reasoning(turn[:answer_start])
    if reading is None:
        return ParsedResponse(reasoning)
    return ParsedResponse(reasoning, reading.label, reading.span, source, answer_start)


def find_answer_text(text: str, *, cut: bool = False) -> str | None:
    """Find the text of a short answer: the content of the last `<answer>` block outside the reasoning.

    An answer without its tag is not read, since there are no labels to compare the last line with.

    Args:
        text: The response.
        cut: Whether the response reached its token limit. An unclosed answer with an unfinished last line is then not
            read.

    Returns:
        The text without surrounding white space. None if there is no such block, if it is empty or unfinished, or if an
        earlier block was never closed and has a different text.

    Example:
        >>> find_answer_text("<think>so</think><answer> 42 </answer>")
        '42'
        >>> find_answer_text("The answer is 42.")
    """
    turn = text[: find_turn_end(text)]
    # If a next turn follows, the token limit cut that one, and this turn is complete.
    is_turn_cut = cut and len(turn) == len(text)
    tags = find_tags(turn)
    opening = find_answer_tag(turn, tags)
    if opening is None:
        return None
    zone = _find_answer_zone(turn, tags, opening, is_cut=is_turn_cut)
    if zone is None:
        return None
    start, end = zone
    answer = turn[start:end].strip()
    for earlier_start, earlier_end in _find_open_answers(turn, tags, opening):
        earlier = turn[earlier_start:earlier_end].strip()
        is_contradiction = earlier not in ("", answer)
        if is_contradiction:
            return None
    return answer or None


# Tags


def find_tags(text: str) -> list[Tag]:
    """Find all tags in a text, in order. Case and white space inside a tag do not matter.

    Example:
        >>> find_tags("<think>so</ Think>")
        [Tag(name='think', start=0, end=7), Tag(name='/think', start=9, end=18)]
    """
    tags = []
    for match in TAG.finditer(text):
        name = (match[1] + match[2]).lower()
        tags.append(Tag(name, match.start(), match.end()))
    return tags


def find_answer_tag(text: str, tags: Sequence[Tag]) -> Tag | None:
    """Find the tag that opens the answer: the last `<answer>` outside the reasoning.

    Example:
        >>> text = "<think>in <answer> tags</think>So B."
        >>> find_answer_tag(text, find_tags(text))
    """
    start, end = find_body(text, tags)
    for tag in reversed(tags):
        if tag.name == "answer" and start <= tag.start < end:
            return tag
    return None


def find_body(text: str, tags: Sequence[Tag]) -> Span:
    """Return the bounds of the text after the reasoning: from the last `</think>` to an unclosed `<think>` or the end.

    Without `</think>`, the text begins at 0.

    Example:
        >>> text = "<think>so</think>B"
        >>> find_body(text, find_tags(text))
        (17, 18)
    """
    start = 0
    end = len(text)
    for tag in tags:
        if tag.name == "/think":
            start = tag.end
            end = len(text)  # this tag closes every `<think>` before it
        elif tag.name == "think":
            end = min(end, tag.start)
    return start, max(start, end)


class _TurnMarker(NamedTuple):
    """A possible beginning of the next turn, and its position among the tags.

    Attributes:
        match: The match of `NEXT_TURN`.
        previous_tag_end: Where the tag before the marker ends; 0 if there is none.
        is_in_reasoning: Whether the marker is inside the reasoning.
        is_in_answer: Whether the marker is inside an answer that is closed after it.
        follows_answer: Whether a closed answer precedes the marker.
    """

    match: re.Match[str]
    previous_tag_end: int
    is_in_reasoning: bool
    is_in_answer: bool
    follows_answer: bool


def find_turn_end(text: str, labels: Sequence[str] = ()) -> int:
    """Find where the response ends and the next turn begins: at the first marker that counts.

    A marker is an end-of-turn token or a line such as "Question:". Inside the reasoning or a closed answer, it never
    counts. After a closed answer, it always counts. Elsewhere it counts if the answer is not still to come (no
    `</think>` or `<answer>` follows) and the response does not just restate the question. It does so if there is no
    text between a line such as "Question:" and the tag before it, or the beginning of the response.

    Args:
        text: The response.
        labels: The question's labels. "Q: the dog" is not a marker if Q is one of them.

    Returns:
        The index of the marker; the length of the text if there is none.

    Example:
        >>> find_turn_end("<answer>B</answer>\\nQuestion: Which?\\n<answer>A</answer>")
        19
    """
    tags = find_tags(text)
    # The answer comes after the last of these tags.
    last_tag_before_answer = max((tag.start for tag in tags if tag.name in ("/think", "answer")), default=-1)
    first_strikethrough = text.find("<s>")  # a later `</s>` closes this HTML element and does not end the turn
    folded_labels = {label.casefold() for label in labels}
    for marker in _find_turn_markers(text, tags):
        start = marker.match.start()
        is_label = (marker.match["who"] or "").casefold() in folded_labels
        ends_strikethrough = marker.match[0] == "</s>" and 0 <= first_strikethrough < start
        if marker.is_in_reasoning or marker.is_in_answer or is_label or ends_strikethrough:
            continue
        if marker.follows_answer:
            return start
        is_answer_still_to_come = last_tag_before_answer > start
        is_line = marker.match["token"] is None
        restates_question = is_line and not text[marker.previous_tag_end : start].strip()
        if not is_answer_still_to_come and not restates_question:
            return start
    return len(text)


def _find_turn_markers(text: str, tags: Sequence[Tag]) -> Iterator[_TurnMarker]:
    """Find everything that may begin the next turn, and whether it is in the reasoning, in an answer or after one."""
    first_think_tag = next((tag.name for tag in tags if tag.name in ("think", "/think")), None)
    is_in_reasoning = first_think_tag == "/think"  # the chat template had already written `<think>`
    is_answer_open = False
    has_closed_answer = False
    tags_before = 0  # number of tags before the marker
    for match in NEXT_TURN.finditer(text):
        # Process the tags between the previous marker and this one. Inside the reasoning, answer tags do not count.
        while tags_before < len(tags) and tags[tags_before].start < match.start():
            name = tags[tags_before].name
            if name in ("think", "/think"):
                is_in_reasoning = name == "think"
            elif not is_in_reasoning:
                has_closed_answer = has_closed_answer or (is_answer_open and name == "/answer")
                is_answer_open = name == "answer"
            tags_before += 1
        is_next_tag_closing = tags_before < len(tags) and tags[tags_before].name == "/answer"
        yield _TurnMarker(
            match=match,
            previous_tag_end=tags[tags_before - 1].end if tags_before > 0 else 0,
            is_in_reasoning=is_in_reasoning,
            is_in_answer=is_answer_open and is_next_tag_closing,  # an answer that is never closed may end here
            follows_answer=has_closed_answer,
        )


# Answers


def _read_tagged(
    text: str, tags: Sequence[Tag], opening: Tag, choices: Choices, *, is_cut: bool
) -> LabelReading | None:
    """Read the label in the answer block that a tag opens.

    None if its content matches no form, if the block is unfinished, or if an earlier block was never closed and has a
    different label.
    """
    zone = _find_answer_zone(text, tags, opening, is_cut=is_cut)
    if zone is None:
        return None
    reading = read_form(text, zone, choices)
    if reading is None:
        return None
    for earlier_zone in _find_open_answers(text, tags, opening):
        earlier = read_form(text, earlier_zone, choices)
        if earlier is not None and earlier.label != reading.label:
            return None
    return reading


def _find_answer_zone(text: str, tags: Sequence[Tag], opening: Tag, *, is_cut: bool) -> Span | None:
    """Return the bounds of an answer block's content; None if the block is unfinished.

    A block without `</answer>` ends with the text. It is unfinished if reasoning follows it or its last line was cut.
    """
    _, body_end = find_body(text, tags)
    closing = next((tag for tag in tags if tag.name == "/answer" and tag.start >= opening.end), None)
    if closing is not None:
        return opening.end, closing.start
    is_followed_by_reasoning = body_end < len(text)
    is_last_line_unfinished = is_cut and _is_torn(text[opening.end :])
    if is_followed_by_reasoning or is_last_line_unfinished:
        return None
    return opening.end, _end_before_torn_tag(text, opening.end)


def _find_open_answers(text: str, tags: Sequence[Tag], opening: Tag) -> Iterator[Span]:
    """Yield the bounds of earlier answer blocks that were never closed: they may be the answers of an earlier turn.

    Such a block ends at the following `<answer>`, or at a marker of the next turn before that tag.
    """
    body_start, _ = find_body(text, tags)
    answer_tags = [tag for tag in tags if tag.name.endswith("answer") and body_start <= tag.start <= opening.start]
    for tag, following in pairwise(answer_tags):
        was_never_closed = tag.name == "answer" and following.name == "answer"
        if not was_never_closed:
            continue
        next_turn = NEXT_TURN.search(text, tag.end, following.start)
        end = following.start if next_turn is None else next_turn.start()
        yield tag.end, end


class _Line(NamedTuple):
    text: str
    span: Span


def _read_plain(text: str, tags: Sequence[Tag], choices: Choices) -> LabelReading | None:
    """Read a response whose body has no `<answer>`: the whole text after the reasoning, or else its last line.

    A last line that states the answer ("The answer is B") is read unless an earlier line gives a different one. A last
    line that only names a label ("B") may be the end of a list or sentence. It is read only after a complete sentence
    or below a lead, which is a line such as "Final answer:".

    Returns:
        The label. None if neither the text nor its last line gives an answer, if the reasoning never ends, or if text
        follows a lone `</answer>`.
    """
    start, end = find_body(text, tags)
    is_reasoning_unfinished = end < len(text)  # the body ends early only at a `<think>` that is never closed
    if is_reasoning_unfinished:
        return None
    # The body has no think tags, and the caller found no `<answer>` in it, so any tag in it is `</answer>`.
    lone_closing = next((tag for tag in tags if tag.start >= start), None)
    if lone_closing is not None:  # the answer is before this tag, and text after it may revise the answer
        is_followed_by_text = bool(text[lone_closing.end :].strip())
        if is_followed_by_text:
            return None
        end = lone_closing.start
    whole = read_form(text, (start, end), choices)
    if whole is not None:
        return whole
    lines = _find_lines(text, start, end)
    if len(lines) < 2:  # a single line has just been read as the whole text
        return None
    answer_line = len(lines) - 1
    reading = read_form(text, lines[answer_line].span, choices)
    if reading is None:
        return None
    is_below_lead = not reading.states_answer and is_lead(lines[answer_line - 1].text)
    if is_below_lead:  # the lead and the label below it are one statement
        answer_line -= 1
        reading = reading._replace(states_answer=True)
    if not _is_separate_answer(lines, answer_line, reading):
        return None
    if _is_contradicted(reading, text, lines[:answer_line], choices):
        return None
    return reading


def _find_lines(text: str, start: int, end: int) -> list[_Line]:
    """Find the lines of text[start:end] that contain words, with their spans."""
    lines: list[_Line] = []
    for line in text[start:end].split("\n"):
        if not NO_WORDS.fullmatch(line):
            lines.append(_Line(line, (start, start + len(line))))
        start += len(line) + 1
    return lines


def _is_separate_answer(lines: Sequence[_Line], answer_line: int, reading: LabelReading) -> bool:
    """Whether a line is an answer of its own, and not a part of a list, a quotation or the sentence before it.

    It must be the first line, or follow a complete sentence or a lead such as "Final answer:". A line that states the
    answer may also follow a line without a full stop, unless that line expects a continuation ("I doubt that"). A list
    item and a quoted statement are never answers of their own. Nor is "So it is B", where "it" may refer to anything.

    Args:
        lines: The lines of the response that contain words.
        answer_line: Index of the line at which the answer begins.
        reading: The label that was read from that line, or from the line below it if that line is a lead.
    """
    line = lines[answer_line].text
    is_list_item = LIST_ITEM.match(line) is not None
    is_quoted = reading.states_answer and QUOTATION.match(line) is not None
    is_vague = not reading.states_answer and SPEAKS_OF_ANYTHING.match(line) is not None
    if is_list_item or is_quoted or is_vague:
        return False
    if answer_line == 0:
        return True
    before = lines[answer_line - 1].text
    if is_lead(before):
        return True
    before = before.rstrip(CLOSING_MARKS)
    if ENDS_SENTENCE.search(before):
        return True
    continues_sentence = line.lstrip("*_`#( \t")[:1].islower()
    return reading.states_answer and not continues_sentence and not LEAVES_OPEN.search(before)


def _is_contradicted(reading: LabelReading, text: str, earlier: Sequence[_Line], choices: Choices) -> bool:
    """Whether an earlier line gives a different label: it claims one in a sentence, states one, or names one.

    Args:
        reading: The label that was read as the answer.
        text: The response.
        earlier: The lines before the answer.
        choices: The question's labels and option texts.
    """
    if not earlier:
        return False
    first_start, _ = earlier[0].span
    _, last_end = earlier[-1].span
    earlier_labels = find_claims(text[first_start:last_end], choices)
    named_labels: set[str] = set()  # in a line such as "B", without a lead such as "The answer is"
    distinct_lines = {line.text: line for line in earlier}  # a response stuck in a loop repeats lines
    for line in distinct_lines.values():
        earlier_reading = read_form(text, line.span, choices)
        if earlier_reading is None:
            continue
        if earlier_reading.states_answer:
            earlier_labels.add(earlier_reading.label)
        else:
            named_labels.add(earlier_reading.label)
    # Lines that name two or more labels are a list of the options, and a line that states the answer may follow it.
    follows_list_of_options = reading.states_answer and len(named_labels) >= 2
    if not follows_list_of_options:
        earlier_labels |= named_labels
    return bool(earlier_labels - {reading.label})


def _is_torn(text: str) -> bool:
    """Whether a cut text ends in an unfinished line. A torn `</answer>` does not count: the answer is complete."""
    last = text.rpartition("\n")[2].strip()
    return bool(last) and not last.endswith(TORN_CLOSING)


def _end_before_torn_tag(text: str, start: int) -> int:
    """Find where an answer without a closing tag ends: before a torn `</answer>`, or else at the end of the text."""
    bracket = text.rfind("<", start)
    if bracket >= 0 and text[bracket:].rstrip() in TORN_CLOSING:
        return bracket
    return len(text)


def _find_line_start(text: str, tags: Sequence[Tag], label_start: int) -> int:
    """Find where the line of a plain answer begins, including the line break before it."""
    start, _ = find_body(text, tags)
    return max(text.rfind("\n", start, label_start), start)


def _find_reasoning(head: str) -> str | None:
    """Find the reasoning in the text before the answer; None if there is none.

    It is the text from the first `<think>` to the last `</think>`, without tags. Without `<think>` it starts at the
    beginning, and without `</think>` it ends where the answer begins. If it is empty, the text after `</think>` is
    returned.
    """
    tags = find_tags(head)
    start = 0
    for tag in tags:
        if tag.name == "think":
            start = tag.end
            break
    last_closing = None
    for tag in tags:
        if tag.name == "/think" and tag.start >= start:
            last_closing = tag
    if last_closing is None:
        return _remove_tags(head[start:]) or None
    inside = _remove_tags(head[start : last_closing.start])
    after = _remove_tags(head[last_closing.end :])
    return inside or after or None


def _remove_tags(text: str) -> str:
    return TAG.sub("", text).strip()
