r"""Read the label that a short text gives, by a closed list of written forms.

A form is one of the accepted ways to write an answer, such as "(B)", "The answer is B." or "B: the dog". The whole text
must match one; otherwise it gives no label. First the text is folded: upper and lower case, variants of a character and
kinds of white space are made equal. Then formatting is removed from the outside in: markdown, quotes, brackets,
`\boxed{}`, a final full stop. So are at most two leads, such as "The correct answer is" and "option". What is left must
be a label, a label with its own option's text, or a label that "is correct". The text is never searched for a label, so
one with a second label, a negation or an extra word matches no form. docs/conventions.md lists the forms.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Version of these rules: raise it with every change after which some text is read differently.
VERSION = 7

Span = tuple[int, int]

MAX_LAYERS = 12  # layers of formatting and leads around a label
MAX_LEADS = 2
MAX_FORMATTING_AND_LEADS = 300  # characters; a text with more of them matches no form
MAX_MARKS = 30  # combining marks in a row; the rest are dropped, because normalising them takes quadratic time

PAIRS = (
    *((mark, mark) for mark in ("```", "***", "**", "*", "___", "__", "_", "`", '"', "'", "$$", "$")),
    *(("(", ")"), ("[", "]"), ("{", "}"), ("\u201c", "\u201d"), ("\u2018", "\u2019"), ("«", "»"), ("「", "」")),
    *((r"\(", r"\)"), (r"\[", r"\]")),
    *((rf"\{command}{{", "}") for command in ("boxed", "text", "textbf", "mathrm", "mathbf")),
)
# "- B" is an item of a list and "> B" a quotation, but "- 1" may be a number and "> 1" a comparison.
LINE_MARKER = re.compile(r"(?:[*•]|#{1,6}|[->](?! ?\d)|→) |[✅👉] ?")
FINAL_MARK = re.compile(r"(?<![?.。])(?<![?.] )[.,;:!。]$")  # does not match in "B?." or "B..."

THE = "(?:(?:the|my) )?"
WHICH = "(?:(?:final|correct|right|best|most (?:likely|appropriate|plausible)) )"
IS = " (?:is|would be|should be|must be)"
COLON = r" ?(?:[:=]|(?:->|→|[-\u2013](?! ?\d)|\u2014)(?= ))"  # the "-" of "Answer - B", not that of "Answer: - 1"
# Leads that state an answer.
STATING = (
    f"{THE}{WHICH}*(?:answer|label)(?: to the question)?{IS}",  # The answer is, The correct label is
    f"{THE}{WHICH}+(?:option|choice)(?:{IS})?",  # The correct option is, Best choice
    f"{THE}{WHICH}+(?:answer|label)",  # Final answer, Correct answer
    f"{THE}(?:option|choice|statement|hypothesis){IS}",  # My choice is, The statement is
    f"{THE}relationship(?: between the premise and the hypothesis)?{IS}",
    rf"""{THE}(?:answer|label|relationship|verdict|conclusion)(?=["'*_]{{0,3}}{COLON})""",  # Answer:, Label:
    "i(?: would|['\u2019]d)? (?:choose|pick|select|go with|say)",  # I choose, I would go with
)
# Leads that may also name an option without choosing it: "Option A", "Answer B", "It is A".
NAMING = ("option", "choice", "answer", "label", rf"(?:it|this|that)(?:{IS}|['\u2019]s)")
OPENER = "(?:so|thus|therefore|hence|finally|overall|in conclusion|i (?:think|believe)(?: that)?),?"
LEAD = re.compile(
    rf"""(?P<mark>\*\*|__|[*_`"'])?(?:(?:{OPENER} )?(?:(?P<states_answer>{"|".join(STATING)})|{"|".join(NAMING)})"""
    rf"|(?P<opener>{OPENER}(?= )))(?(mark)(?![^\W_])|(?!\w))"
    rf"(?P<colon>{COLON})?(?(mark)(?P=mark))(?P<colon_after>{COLON})? ?"
)
IS_CORRECT = rf"{IS} (?:(?:the )?{WHICH}*(?:answer|option|choice|label)|correct|right)"
CORRECT_AT_END = re.compile(rf"{IS_CORRECT}$")
MAX_CORRECT = 80  # maximum number of characters that CORRECT_AT_END matches
# Between a label and its option's text. A label in a group, as in "(B) blue sky", needs only white space.
SET_APART = re.compile(r"[)\]]?[.:](?= )|[)\]](?=.)")
DASH_OR_BRACKET = re.compile(r" (?:[-\u2013\u2014](?= )|(?=[(\[]))")
ARTICLE = re.compile("(?:an?|the) ")
# A claim anywhere in a text: "I think that the answer is X, because ..." and "X is correct".
CLAIM_BEFORE_LABEL = re.compile(rf"\b(?:answer|label|{WHICH}(?:option|choice))(?:{IS}| ?:)(?: option)?[^\w]{{0,6}}")
CLAIM_AFTER_LABEL = re.compile(rf"[^\w\s]{{0,4}}{IS_CORRECT}\b")


class LabelReading(NamedTuple):
    """A label that was read from a text.

    Attributes:
        label: The label.
        span: Start and end of its characters in the text.
        states_answer: Whether the text calls the label the answer: "The answer is B", "B is correct".
    """

    label: str
    span: Span
    states_answer: bool = False


class Choices(NamedTuple):
    """The labels and option texts of one question, folded for comparison.

    Attributes:
        labels: Folded label -> the labels that fold to it.
        texts: Label -> its option text, folded and without formatting.
        max_length: Maximum number of characters, before folding, of a text that is compared with the forms. A longer
            one gives no label.
    """

    labels: dict[str, tuple[str, ...]]
    texts: dict[str, str]
    max_length: int


def fold_choices(labels: Sequence[str], option_texts: Sequence[str] | None = None) -> Choices:
    """Fold the labels and option texts of a question, so that parts of a folded response can be compared with them.

    A label keeps its own formatting, such as the brackets of "(A)": each time before a layer of formatting is removed
    from a response, what is left is compared with the labels. Option texts lose their formatting here, because they are
    compared with parts of a response from which all formatting has been removed.

    Args:
        labels: The question's labels.
        option_texts: The options' texts in the order of `labels`; None if they are unknown.

    Returns:
        The folded labels and texts, and the maximum length of a text that is compared with the forms, which are the
        accepted ways to write an answer.

    Raises:
        ValueError: The number of option texts differs from the number of labels.
    """
    labels_by_folded: dict[str, tuple[str, ...]] = {}
    for label in labels:
        folded = compose_marks(fold_text(label).text.strip())
        # Labels that differ only in case have the same folded text.
        labels_by_folded[folded] = (*labels_by_folded.get(folded, ()), label)
    texts: dict[str, str] = {}
    longest = max(map(len, labels), default=0)  # length of the longest label or option text
    if option_texts:
        for label, option_text in zip(labels, option_texts, strict=True):
            texts[label] = strip_formatting(fold_text(option_text).text)
            longest = max(longest, len(option_text))
    # The longest form is a label followed by its option's text. As for a response, characters are counted before they
    # are folded. `MAX_FORMATTING_AND_LEADS` leaves room for a response that writes the same text with more characters.
    longest_form = 2 * longest
    return Choices(labels_by_folded, texts, MAX_FORMATTING_AND_LEADS + longest_form)


class FoldedText(NamedTuple):
    """A text that was folded by `fold_text`.

    Attributes:
        text: The folded text.
        origins: For each of its characters, the index of the original character from which it comes.
    """

    text: str
    origins: Sequence[int]


def fold_text(text: str) -> FoldedText:
    r"""Fold a text for comparison, and record which character of the text each folded character comes from.

    Characters are NFKC-normalised and case-folded, invisible ones are removed, and white space is collapsed.
    Superscripts and subscripts are kept: "1²" is not 12. At most `MAX_MARKS` combining marks in a row are kept. They
    stay separate from their letters, so that every character has one origin. Apply `compose_marks` before comparing
    texts. This takes linear time.

    Args:
        text: A text of any length.

    Returns:
        The folded text, and for each of its characters the index of the original character.

    Example:
        >>> fold_text("Ｂ \n (ok)")
        FoldedText(text='b (ok)', origins=[0, 1, 4, 5, 6, 7])
    """
    needs_only_lower_case = text.isascii() and text.isprintable() and "  " not in text
    if needs_only_lower_case:  # a faster path, which most texts take
        return FoldedText(text.lower(), range(len(text)))
    characters: list[str] = []
    origins: list[int] = []
    marks_in_a_row = 0
    for origin, character in enumerate(text):
        for folded in _fold_character(character):
            repeats_space = folded == " " and characters[-1:] == [" "]
            if repeats_space:
                continue
            if unicodedata.combining(folded):
                marks_in_a_row += 1
            else:
                marks_in_a_row = 0
            if marks_in_a_row <= MAX_MARKS:
                characters.append(folded)
                origins.append(origin)
    return FoldedText("".join(characters), origins)


def _fold_character(character: str) -> Iterator[str]:
    """Yield the characters that one character folds to: none for an invisible one, several for a ligature."""
    is_super_or_subscript = unicodedata.decomposition(character).startswith(("<super>", "<sub>"))
    normalised = character
    if not is_super_or_subscript:
        normalised = unicodedata.normalize("NFKC", character).casefold()
    for folded in normalised:
        is_variation_selector = "\ufe00" <= folded <= "\ufe0f"
        is_invisible = is_variation_selector or unicodedata.category(folded) in ("Cf", "Cc")
        if folded.isspace():
            yield " "
        elif folded == "\u2010":  # Unicode's own hyphen, which NFKC keeps
            yield "-"
        elif not is_invisible:
            yield folded


def compose_marks(folded: str) -> str:
    """Join combining marks with their letters, in linear time: `fold_text` limits the marks in a row."""
    return unicodedata.normalize("NFC", folded)


def read_form(text: str, zone: Span, choices: Choices) -> LabelReading | None:
    """Read the label from a part of a text that matches a written form, such as "(B)" or "The answer is B".

    Either the whole part must match a form, or every line of it must match one with the same label. This takes linear
    time.

    Args:
        text: A response.
        zone: Start and end of the part to read.
        choices: The question's labels and option texts, from `fold_choices`.

    Returns:
        The label with its span in `text`; if several lines give it, the span is in the first of them. None if the part
        is blank, a line matches no form, or two lines give different labels.

    Example:
        >>> read_form("The correct answer is (B).", (0, 26), fold_choices(("A", "B")))
        LabelReading(label='B', span=(23, 24), states_answer=True)
        >>> read_form("A or B", (0, 6), fold_choices(("A", "B")))
    """
    whole = FormReader(text, zone, choices).read()
    if whole is not None:
        return whole
    first_reading: LabelReading | None = None
    lines_read: set[str] = set()
    start, end = zone
    for line in text[start:end].split("\n"):
        # Equal lines give the same label, and a response stuck in a loop repeats a line thousands of times.
        if line.strip() and line not in lines_read:
            lines_read.add(line)
            reading = FormReader(text, (start, start + len(line)), choices).read()
            if reading is None:
                return None
            if first_reading is None:
                first_reading = reading
            elif reading.label != first_reading.label:
                return None
        start += len(line) + 1
    return first_reading


def is_lead(text: str) -> bool:
    """Whether a line is nothing but a lead, such as "Final answer:" or "### Answer".

    Example:
        >>> is_lead("**Final answer:**"), is_lead("Wrong answers:")
        (True, False)
    """
    folded = fold_text(text[:MAX_FORMATTING_AND_LEADS])
    bare = strip_formatting(folded.text)
    lead = LEAD.match(bare)
    if lead is None:
        return False
    is_opener_alone = lead["opener"] is not None  # "So" announces no answer
    return not is_opener_alone and lead.end() == len(bare)


def find_claims(text: str, choices: Choices) -> set[str]:
    """Find the labels that a text calls correct or the answer, anywhere and whatever the rest of the sentence says.

    A claim is never read as an answer; it can only contradict one.

    Args:
        text: A part of a response.
        choices: The question's labels, from `fold_choices`.

    Returns:
        The labels; empty if there is no claim. A label of one character must be written in its own case.

    Example:
        >>> find_claims("One may think that the answer is A, but dogs bark.", fold_choices(("A", "B")))
        {'A'}
    """
    folded, origins = fold_text(text)
    label_lengths = {len(label) for label in choices.labels}
    possible_spans: list[Span] = []  # where a label would be, next to a claim
    for claim in CLAIM_BEFORE_LABEL.finditer(folded):
        possible_spans += [(claim.end(), claim.end() + length) for length in label_lengths]
    for claim in CLAIM_AFTER_LABEL.finditer(folded):
        possible_spans += [(claim.start() - length, claim.start()) for length in label_lengths]
    claimed: set[str] = set()
    for start, end in possible_spans:
        is_part_of_word = continues_word(folded, start - 1) or continues_word(folded, end)
        if start < 0 or is_part_of_word:
            continue
        for label in choices.labels.get(compose_marks(folded[start:end]), ()):
            is_in_own_case = text[origins[start]] == label
            if len(label) > 1 or is_in_own_case:  # "The answer is a place" does not name label A
                claimed.add(label)
    return claimed


def continues_word(folded: str, index: int) -> bool:
    """Whether the character at an index can belong to the word next to it; False beyond the ends of the text."""
    if not 0 <= index < len(folded):
        return False
    return folded[index].isalnum() or folded[index] == "_"


class BareText(NamedTuple):
    """What is left of a text without its formatting and leads.

    Attributes:
        span: Start and end of what is left, in the folded text.
        reading: The label, if nothing else is left.
        states_answer: Whether the removed parts call the label the answer.
        has_lead: Whether a lead was removed.
        has_colon: Whether the last lead that was removed ends in a colon; True without leads.
    """

    span: Span
    reading: LabelReading | None
    states_answer: bool
    has_lead: bool
    has_colon: bool


class FormReader:
    """Reads the label of one text by removing layers from the outside in.

    In all methods, i and j are the start and end of a part of the folded text. A text that is longer than
    `choices.max_length` matches no form, so it is read as an empty text.

    Args:
        text: A response.
        zone: Start and end of the part to read.
        choices: The question's labels and option texts.
    """

    def __init__(self, text: str, zone: Span, choices: Choices) -> None:
        start, end = zone
        self.text = text
        self.offset = start
        self.choices = choices
        content = ""
        if end - start <= choices.max_length:
            content = text[start:end]
        self.folded, self.origins = fold_text(content)

    def read(self) -> LabelReading | None:
        """Read the whole text."""
        return self.read_between(0, len(self.folded))

    def read_between(self, i: int, j: int, *, inside_group: bool = False) -> LabelReading | None:
        """Remove formatting and leads such as "The answer is", and read the label that is left.

        Args:
            i: Start of the part.
            j: End of the part.
            inside_group: Whether the part is enclosed in marks before an option's text, such as the B of "(B) the dog".

        Returns:
            The label; None unless a label is left, alone or with its option's text.
        """
        bare = self.remove_formatting_and_leads(i, j)
        i, j = bare.span
        reading = bare.reading
        if reading is None and bare.has_lead:
            reading = self.read_after_article(i, j)
        if reading is None:
            reading = self.read_with_text(i, j, may_be_grouped=not inside_group)
        if reading is None:
            return None
        # "The answer is a" may be the beginning of a sentence with the article "a". "Answer: a" gives label A.
        start, end = reading.span
        written = self.text[start:end]
        may_be_word = written in ("a", "i") and written != reading.label
        if may_be_word and not bare.has_colon:
            return None
        return reading._replace(states_answer=bare.states_answer or reading.states_answer)

    def remove_formatting_and_leads(self, i: int, j: int) -> BareText:
        """Remove formatting, leads such as "The answer is" and a final "is correct", until only a label is left.

        Returns:
            What is left after at most `MAX_LAYERS` steps, and what the removed parts say about it.
        """
        states_answer = False
        has_colon = True  # a colon is missing only after a lead
        leads = 0
        reading = None
        for _ in range(MAX_LAYERS):
            reading = self.read_label(i, j)
            if reading is not None:
                break
            inner = remove_layer(self.folded, i, j)
            if inner is not None:
                i, j = inner
                continue
            # A match reaches the end and is short, so only the last characters are searched, which takes constant time.
            is_correct = CORRECT_AT_END.search(self.folded, max(i, j - MAX_CORRECT), j)
            if is_correct is not None:
                states_answer = True
                j = is_correct.start()
                continue
            lead = LEAD.match(self.folded, i, j)
            if lead is None or leads == MAX_LEADS:
                break
            leads += 1
            states_answer = states_answer or lead["states_answer"] is not None
            has_colon = lead["colon"] is not None or lead["colon_after"] is not None
            i = lead.end()
        return BareText((i, j), reading, states_answer, has_lead=leads > 0, has_colon=has_colon)

    def read_label(self, i: int, j: int) -> LabelReading | None:
        """Read the label that is the whole of folded[i:j]; None if there is none.

        Case is ignored, unless the question has labels that differ only in case.
        """
        if i >= j:
            return None
        labels = self.choices.labels.get(compose_marks(self.folded[i:j]), ())
        if not labels:
            return None
        start = self.offset + self.origins[i]
        end = self.offset + self.origins[j - 1] + 1
        label = labels[0]
        if len(labels) > 1:  # they differ only in case
            label = self.text[start:end]
            if label not in labels:
                return None
        return LabelReading(label, (start, end))

    def read_after_article(self, i: int, j: int) -> LabelReading | None:
        """Read a label after an article, such as "an entailment"; None if the label is a single character."""
        article = ARTICLE.match(self.folded, i, j)
        if article is None:
            return None
        reading = self.read_label(article.end(), j)
        if reading is None or len(reading.label) == 1:
            return None
        return reading

    def read_with_text(self, i: int, j: int, *, may_be_grouped: bool) -> LabelReading | None:
        """Read a label with its option's text, such as "B) the dog", "**Option B**: the dog" or "the dog (B)".

        A label with nothing but a bracket, "B)", is also read.

        Args:
            i: Start of the part.
            j: End of the part.
            may_be_grouped: Whether the label may be enclosed in marks of its own, as in "(B) the dog". False inside
                such marks, so that the recursion with `read_between` ends.

        Returns:
            The label; None if the rest is not its own option's text, or nothing separates the two.
        """
        label_at_end = self.read_last_label(i, j)
        if label_at_end is not None:
            return label_at_end
        group = find_group(self.folded, i, j) if may_be_grouped else None
        if group is None:
            reading, end = self.read_first_label(i, j)
        else:
            reading = self.read_between(*group.inside, inside_group=True)
            end = group.end
        if reading is None:
            return None
        is_label_with_bracket = group is None and self.folded[end:j] == ")"
        if is_label_with_bracket or self.is_followed_by_own_text(reading.label, end, j, is_grouped=group is not None):
            return reading
        return None

    def is_followed_by_own_text(self, label: str, i: int, j: int, *, is_grouped: bool) -> bool:
        """Whether folded[i:j] is a separator and then the option text of the label before it.

        Args:
            label: The label, which ends at i.
            i: Start of the part.
            j: End of the part.
            is_grouped: Whether the label is enclosed in marks of its own, which need no separator after them.
        """
        text_start = i
        separator = SET_APART.match(self.folded, i, j)
        if separator is not None:
            text_start = separator.end()
        is_set_apart = separator is not None or is_grouped
        dash = DASH_OR_BRACKET.match(self.folded, text_start, j)
        if dash is not None:
            text_start = dash.end()
        elif not is_set_apart:
            return False
        option_text = strip_formatting(self.folded[text_start:j])
        # "A - B" may name two labels, even if B is the text of option A. "A) B" names one.
        labels = self.choices.labels.get(option_text, ())
        is_other_label = bool(labels) and label not in labels
        if is_other_label and not is_set_apart:
            return False
        return self.is_own_text(label, option_text)

    def read_first_label(self, i: int, j: int) -> tuple[LabelReading | None, int]:
        """Read the longest label that folded[i:j] begins with, if something follows it.

        Returns:
            The label and the index of its end; None and i if there is none.
        """
        lengths = {len(label) for label in self.choices.labels}
        for length in sorted(lengths, reverse=True):
            end = i + length
            if end < j and not continues_word(self.folded, end):
                reading = self.read_label(i, end)
                if reading is not None:
                    return reading, end
        return None, i

    def read_last_label(self, i: int, j: int) -> LabelReading | None:
        """Read the label in parentheses at the end of folded[i:j]; None unless its option's text precedes it."""
        bracket = self.folded.rfind(" (", i, j)
        if bracket < 0 or self.folded[j - 1] != ")":
            return None
        reading = self.read_label(bracket + 2, j - 1)
        if reading is None:
            return None
        option_text = strip_formatting(self.folded[i:bracket])
        if option_text in self.choices.labels or not self.is_own_text(reading.label, option_text):
            return None
        return reading

    def is_own_text(self, label: str, text: str) -> bool:
        """Whether a text is the label's option text. An article is ignored unless the text is a different option's."""
        own_text = self.choices.texts.get(label)
        if not own_text or not text:
            return False
        if text == own_text:
            return True
        if text in self.choices.texts.values():
            return False
        return ARTICLE.sub("", text, count=1) == ARTICLE.sub("", own_text, count=1)


def strip_formatting(folded: str) -> str:
    """Remove all formatting around a folded text. A text that is nothing but formatting keeps the innermost layer.

    Example:
        >>> strip_formatting('**"the dog".**')
        'the dog'
    """
    i = 0
    j = len(folded)
    for _ in range(MAX_LAYERS):
        inner = remove_layer(folded, i, j)
        if inner is None or inner[0] >= inner[1]:
            break
        i, j = inner
    return compose_marks(folded[i:j])


def remove_layer(folded: str, i: int, j: int) -> Span | None:
    """Return the bounds of folded[i:j] without its outermost layer of formatting; None if it has no formatting.

    A layer is a space at either end, a final punctuation mark, a pair of marks around the whole text, or the mark of a
    list item, heading or quotation at its beginning.
    """
    if i >= j:
        return None
    if folded[i] == " ":
        return i + 1, j
    if folded[j - 1] == " ":
        return i, j - 1
    final = FINAL_MARK.search(folded, max(i, j - 1), j)
    if final is not None:
        return i, final.start()
    group = find_group(folded, i, j)
    if group is not None and group.end == j:  # it encloses the whole text
        return group.inside
    marker = LINE_MARKER.match(folded, i, j)
    if marker is None:
        return None
    return marker.end(), j


class Group(NamedTuple):
    """A part of a text that a pair of marks encloses.

    Attributes:
        inside: The span between the marks.
        end: The index after the closing mark.
    """

    inside: Span
    end: int


def find_group(folded: str, i: int, j: int) -> Group | None:
    """Find the group that opens at index i of folded[i:j]: markdown, quotes, brackets or a LaTeX command.

    Brackets of the same kind inside the group are skipped, up to `MAX_LAYERS`.

    Returns:
        The group; None if no mark opens at i, or its closing mark is missing.
    """
    for opening, closing in PAIRS:
        if folded.startswith(opening, i, j):
            start = i + len(opening)
            end = _find_closing_mark(folded, start, j, opening=opening, closing=closing)
            if end >= 0:
                return Group((start, end), end + len(closing))
            # Without an end, a shorter mark may still open here: "***" also begins with "**" and "*".
    return None


def _find_closing_mark(folded: str, start: int, stop: int, *, opening: str, closing: str) -> int:
    """Return the index of the mark that closes a group whose content begins at `start`; -1 if there is none."""
    # Any opening brace needs its own "}", also inside "\boxed{".
    inner_opening = "{" if closing == "}" else opening
    can_nest = inner_opening != closing
    end = folded.find(closing, start, stop)
    if not can_nest:
        return end
    for _ in range(MAX_LAYERS):
        if end < 0:
            break
        # The mark at `end` closes an inner group if more groups were opened than closed before it.
        closes_inner = folded.count(inner_opening, start, end) > folded.count(closing, start, end)
        if not closes_inner:
            break
        end = folded.find(closing, end + 1, stop)
    return end
