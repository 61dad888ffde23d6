r"""Which label a short text gives, by a closed list of written forms.

The whole text must be one of the forms, or it gives no label. Formatting is removed from the outside in: markdown,
quotes, brackets, `\boxed{}`, a final full stop. Then at most two leads are removed, such as "The correct answer is" and
"option". What is left must be a label, a label with its own option's text, or a label that "is correct". Nothing is
searched for, so a second label, a negation or an extra word matches no form. docs/conventions.md lists the forms.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# The version of the reading: raise it with every change after which some text is read differently.
VERSION = 7

Span = tuple[int, int]

MAX_LAYERS = 12  # layers of formatting and leads around a label
MAX_LEADS = 2
MAX_DRESSING = 300  # characters that formatting and leads may take: a longer text has no form
MAX_MARKS = 30  # combining marks in a row; more are dropped, because normalising them takes quadratic time

PAIRS = (
    *((mark, mark) for mark in ("```", "***", "**", "*", "___", "__", "_", "`", '"', "'", "$$", "$")),
    *(("(", ")"), ("[", "]"), ("{", "}"), ("\u201c", "\u201d"), ("\u2018", "\u2019"), ("«", "»"), ("「", "」")),
    *((r"\(", r"\)"), (r"\[", r"\]")),
    *((rf"\{command}{{", "}") for command in ("boxed", "text", "textbf", "mathrm", "mathbf")),
)
# "- B" is an item of a list and "> B" a quotation, but "- 1" may be a number and "> 1" a comparison.
LINE_MARKER = re.compile(r"(?:[*•]|#{1,6}|[->](?! ?\d)|→) |[✅👉] ?")
FINAL_MARK = re.compile(r"(?<![?.。])(?<![?.] )[.,;:!。]$")  # no part of "B?." or "B..."

THE = "(?:(?:the|my) )?"
WHICH = "(?:(?:final|correct|right|best|most (?:likely|appropriate|plausible)) )"
IS = " (?:is|would be|should be|must be)"
COLON = r" ?(?:[:=]|(?:->|→|[-\u2013](?! ?\d)|\u2014)(?= ))"  # "Answer - B" has a dash, "Answer: - 1" a minus sign
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
MAX_CORRECT = 80  # characters that CORRECT_AT_END may match
# Between a label and its option's text. Labels that are grouped, as in "(B) blue sky", need white space alone.
SET_APART = re.compile(r"[)\]]?[.:](?= )|[)\]](?=.)")
DASH_OR_BRACKET = re.compile(r" (?:[-\u2013\u2014](?= )|(?=[(\[]))")
ARTICLE = re.compile("(?:an?|the) ")
# A claim anywhere in a text: "I think that the answer is X, because ..." and "X is correct".
CLAIM_BEFORE_LABEL = re.compile(rf"\b(?:answer|label|{WHICH}(?:option|choice))(?:{IS}| ?:)(?: option)?[^\w]{{0,6}}")
CLAIM_AFTER_LABEL = re.compile(rf"[^\w\s]{{0,4}}{IS_CORRECT}\b")


class LabelReading(NamedTuple):
    """A label in a text.

    Attributes:
        label: The label.
        span: Where its characters are in the text.
        states_answer: Whether the text calls the label the answer: "The answer is B", "B is correct".
    """

    label: str
    span: Span
    states_answer: bool = False


class Choices(NamedTuple):
    """The labels and option texts of one question, folded for comparison.

    Attributes:
        labels: Folded label -> the labels that fold to it.
        texts: Label -> its folded option text without formatting.
        max_length: Length of the longest text that can have a form.
    """

    labels: dict[str, tuple[str, ...]]
    texts: dict[str, str]
    max_length: int


def fold_choices(labels: Sequence[str], option_texts: Sequence[str] | None = None) -> Choices:
    """Fold the labels of a question and its option texts, which come in the order of the labels.

    Raises:
        ValueError: There are not as many option texts as labels.
    """
    labels_by_folded: dict[str, tuple[str, ...]] = {}
    for label in labels:
        flat, _ = flatten_text(label)
        folded = compose_marks(flat.strip())
        labels_by_folded[folded] = (*labels_by_folded.get(folded, ()), label)
    texts: dict[str, str] = {}
    longest = max(map(len, labels), default=0)
    if option_texts:
        for label, option_text in zip(labels, option_texts, strict=True):
            flat, _ = flatten_text(option_text)
            texts[label] = strip_formatting(flat)
            longest = max(longest, len(option_text))
    label_with_text = 2 * longest  # the longest form: a label and its option's text
    return Choices(labels_by_folded, texts, MAX_DRESSING + label_with_text)


def flatten_text(text: str) -> tuple[str, Sequence[int]]:
    r"""Fold each character on its own, in linear time: NFKC, case, no invisible characters, white space single.

    Marks stay apart from their letters, so `compose_marks` follows before a comparison. Raised and lowered characters
    stay what they are: "1²" is not 12.

    Returns:
        The folded text, and for each of its characters the index of the character it comes from.

    Example:
        >>> flatten_text("Ｂ \n (ok)")
        ('b (ok)', [0, 1, 4, 5, 6, 7])
    """
    folds_to_one_each = text.isascii() and text.isprintable() and "  " not in text
    if folds_to_one_each:  # most texts: this is faster
        return text.lower(), range(len(text))
    parts: list[str] = []
    origins: list[int] = []
    marks_in_a_row = 0
    for origin, character in enumerate(text):
        for part in _fold_character(character):
            if part == " " and parts and parts[-1] == " ":
                continue
            if unicodedata.combining(part):
                marks_in_a_row += 1
            else:
                marks_in_a_row = 0
            if marks_in_a_row <= MAX_MARKS:
                parts.append(part)
                origins.append(origin)
    return "".join(parts), origins


def _fold_character(character: str) -> Iterator[str]:
    """Yield the characters that one character folds to; nothing for an invisible one."""
    is_raised = unicodedata.decomposition(character).startswith(("<super>", "<sub>"))
    folded = character
    if not is_raised:
        folded = unicodedata.normalize("NFKC", character).casefold()
    for part in folded:
        is_variation_selector = "\ufe00" <= part <= "\ufe0f"
        if part.isspace():
            yield " "
        elif part == "\u2010":  # a hyphen
            yield "-"
        elif unicodedata.category(part) not in ("Cf", "Cc") and not is_variation_selector:
            yield part


def compose_marks(flat: str) -> str:
    """Join marks with their letters. Linear, because `flatten_text` bounds the marks in a row."""
    return unicodedata.normalize("NFC", flat)


def read_form(text: str, zone: Span, choices: Choices) -> LabelReading | None:
    """Read the label that text[zone] gives as a whole, or that every line of it gives, in linear time.

    Args:
        text: A response.
        zone: Start and end of the part that is read.
        choices: The question's labels and option texts, from `fold_choices`.

    Returns:
        The label with its span in `text`, of the first line if several give it; `states_answer` is True after a lead
        such as "The answer is". None if the zone is blank, a line has no form, or two lines give different labels.

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
        # A response that runs in a loop repeats a line thousands of times, and equal lines give the same label.
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
    flat, _ = flatten_text(text[:MAX_DRESSING])
    bare = strip_formatting(flat)
    lead = LEAD.match(bare)
    if lead is None:
        return False
    is_opener_alone = lead["opener"] is not None  # "So" announces no answer
    return not is_opener_alone and lead.end() == len(bare)


def find_claims(text: str, choices: Choices) -> set[str]:
    """Find the labels that a text calls the answer or correct, anywhere and however its sentences go on.

    A claim is never read as an answer: it can only contradict one.

    Example:
        >>> find_claims("One may think that the answer is A, but dogs bark.", fold_choices(("A", "B")))
        {'A'}
    """
    flat, origins = flatten_text(text)
    label_lengths = {len(folded) for folded in choices.labels}
    possible_spans: list[Span] = []
    for claim in CLAIM_BEFORE_LABEL.finditer(flat):
        possible_spans += [(claim.end(), claim.end() + length) for length in label_lengths]
    for claim in CLAIM_AFTER_LABEL.finditer(flat):
        possible_spans += [(claim.start() - length, claim.start()) for length in label_lengths]
    claimed: set[str] = set()
    for start, end in possible_spans:
        if start < 0 or continues_word(flat, start - 1) or continues_word(flat, end):
            continue
        for label in choices.labels.get(compose_marks(flat[start:end]), ()):
            # "The answer is a place" speaks of no label A.
            if len(label) > 1 or text[origins[start]] == label:
                claimed.add(label)
    return claimed


def continues_word(flat: str, index: int) -> bool:
    """Whether the character at an index can belong to the word next to it; False beyond the ends of the text."""
    if not 0 <= index < len(flat):
        return False
    return flat[index].isalnum() or flat[index] == "_"


class FormReader:
    """Reads one text from the outside in; i and j bound what is left of its flat form.

    A text longer than `choices.max_length` has no form: it is read as an empty one.
    """

    def __init__(self, text: str, zone: Span, choices: Choices) -> None:
        start, end = zone
        self.text = text
        self.offset = start
        self.choices = choices
        content = ""
        if end - start <= choices.max_length:
            content = text[start:end]
        self.flat, self.origins = flatten_text(content)

    def read(self) -> LabelReading | None:
        """Read the whole text."""
        return self.read_between(0, len(self.flat))

    def read_between(self, i: int, j: int, *, inside_group: bool = False) -> LabelReading | None:
        """Remove formatting and leads until a label is left, or a label with its option's text.

        Args:
            i: Start of the part of the flat text.
            j: End of it.
            inside_group: Whether the part is the inside of quotes, brackets or other marks before an option's text.

        Returns:
            The label, or None if no form is left. `states_answer` is set after a lead such as "The answer is".
        """
        states_answer = False
        has_colon = True  # false after a lead without a colon, where "a" may be an article: "The answer is a"
        leads = 0
        reading = None
        for _ in range(MAX_LAYERS):
            reading = self.read_label(i, j)
            if reading is not None:
                break
            inner = remove_layer(self.flat, i, j)
            if inner is not None:
                i, j = inner
                continue
            correct = CORRECT_AT_END.search(self.flat, max(i, j - MAX_CORRECT), j)
            if correct is not None:
                states_answer = True
                j = correct.start()
                continue
            lead = LEAD.match(self.flat, i, j)
            if lead is None or leads == MAX_LEADS:
                break
            leads += 1
            states_answer = states_answer or lead["states_answer"] is not None
            has_colon = lead["colon"] is not None or lead["colon_after"] is not None
            i = lead.end()
        if reading is None and leads > 0:
            reading = self.read_after_article(i, j)
        if reading is None:
            reading = self.read_with_text(i, j, may_be_grouped=not inside_group)
        if reading is None:
            return None
        # After a lead without a colon, "a" and "i" are words and not the labels A and I: "The answer is a ...".
        written = self.text[slice(*reading.span)]
        is_word = written in ("a", "i") and written != reading.label
        if is_word and not has_colon:
            return None
        return reading._replace(states_answer=states_answer or reading.states_answer)

    def read_label(self, i: int, j: int) -> LabelReading | None:
        """Read flat[i:j] if it is a label; case decides between labels that differ only in case."""
        if i >= j:
            return None
        folded = compose_marks(self.flat[i:j])
        labels = self.choices.labels.get(folded, ())
        if not labels:
            return None
        start = self.offset + self.origins[i]
        end = self.offset + self.origins[j - 1] + 1
        label = labels[0]
        if len(labels) > 1:
            label = self.text[start:end]
            if label not in labels:
                return None
        return LabelReading(label, (start, end))

    def read_after_article(self, i: int, j: int) -> LabelReading | None:
        """Read "an entailment"; a letter has no article."""
        article = ARTICLE.match(self.flat, i, j)
        if article is None:
            return None
        reading = self.read_label(article.end(), j)
        if reading is None or len(reading.label) == 1:
            return None
        return reading

    def read_with_text(self, i: int, j: int, *, may_be_grouped: bool) -> LabelReading | None:
        """Read "B) the dog", "**Option B**: the dog", "the dog (B)", and "B)" alone.

        Args:
            i: Start of the part of the flat text.
            j: End of it.
            may_be_grouped: Whether the label may have marks of its own around it, as in "(B) the dog".

        Returns:
            The label; None if the rest is not its own option's text or is not set apart from it.
        """
        label_at_end = self.read_last_label(i, j)
        if label_at_end is not None:
            return label_at_end
        group = find_group(self.flat, i, j) if may_be_grouped else None
        if group is None:
            reading, end = self.read_first_label(i, j)
        else:
            reading = self.read_between(*group.inside, inside_group=True)
            end = group.end
        if reading is None:
            return None
        is_label_with_bracket = group is None and self.flat[end:j] == ")"
        if is_label_with_bracket:
            return reading
        separator = SET_APART.match(self.flat, end, j)
        is_set_apart = separator is not None or group is not None
        if separator is not None:
            end = separator.end()
        dash = DASH_OR_BRACKET.match(self.flat, end, j)
        if dash is not None:
            end = dash.end()
        elif not is_set_apart:
            return None
        option_text = strip_formatting(self.flat[end:j])
        # "A - B" may be two labels even if B is the text of A; "A) B" is not.
        labels = self.choices.labels.get(option_text, ())
        is_other_label = bool(labels) and reading.label not in labels
        if is_other_label and not is_set_apart:
            return None
        if not self.is_own_text(reading.label, option_text):
            return None
        return reading

    def read_first_label(self, i: int, j: int) -> tuple[LabelReading | None, int]:
        """Read the longest label that flat[i:j] begins with, and return where it ends; None and i if there is none.

        A label that is all of flat[i:j] is left to `read_label`.
        """
        lengths = {len(folded) for folded in self.choices.labels}
        for length in sorted(lengths, reverse=True):
            end = i + length
            if end < j and not continues_word(self.flat, end):
                reading = self.read_label(i, end)
                if reading is not None:
                    return reading, end
        return None, i

    def read_last_label(self, i: int, j: int) -> LabelReading | None:
        """Read the label in brackets at the end of flat[i:j] if its option's text precedes it."""
        bracket = self.flat.rfind(" (", i, j)
        if bracket < 0 or self.flat[j - 1] != ")":
            return None
        reading = self.read_label(bracket + 2, j - 1)
        if reading is None:
            return None
        option_text = strip_formatting(self.flat[i:bracket])
        if option_text in self.choices.labels or not self.is_own_text(reading.label, option_text):
            return None
        return reading

    def is_own_text(self, label: str, text: str) -> bool:
        """Whether a text is the label's option text, up to an article; another option's text never is."""
        own_text = self.choices.texts.get(label)
        if not own_text or not text:
            return False
        if text == own_text:
            return True
        if text in self.choices.texts.values():
            return False
        return ARTICLE.sub("", text, count=1) == ARTICLE.sub("", own_text, count=1)


def strip_formatting(flat: str) -> str:
    """Remove all formatting around a flat text; a text that is nothing but formatting keeps its innermost layer.

    Example:
        >>> strip_formatting('**"the dog".**')
        'the dog'
    """
    i = 0
    j = len(flat)
    for _ in range(MAX_LAYERS):
        inner = remove_layer(flat, i, j)
        if inner is None or inner[0] >= inner[1]:
            break
        i, j = inner
    return compose_marks(flat[i:j])


def remove_layer(flat: str, i: int, j: int) -> Span | None:
    """Bound flat[i:j] without its outermost layer of formatting; None where there is none."""
    if i >= j:
        return None
    if flat[i] == " ":
        return i + 1, j
    if flat[j - 1] == " ":
        return i, j - 1
    final = FINAL_MARK.search(flat, max(i, j - 1), j)
    if final is not None:
        return i, final.start()
    group = find_group(flat, i, j)
    if group is not None and group.end == j:
        return group.inside
    marker = LINE_MARKER.match(flat, i, j)
    if marker is None:
        return None
    return marker.end(), j


class Group(NamedTuple):
    """A part of a text between a pair of marks: the span inside the marks, and the end after the closing mark."""

    inside: Span
    end: int


def find_group(flat: str, i: int, j: int) -> Group | None:
    """Find the group that opens at i: in markdown, quotes, brackets, or a LaTeX command.

    Brackets inside the group are skipped with their contents. None if no mark opens at i or its closing mark is
    missing.
    """
    for opening, closing in PAIRS:
        if not flat.startswith(opening, i, j):
            continue
        inner_opening = "{" if closing == "}" else opening
        can_nest = inner_opening != closing
        start = i + len(opening)
        end = flat.find(closing, start, j)
        for _ in range(MAX_LAYERS):
            closes_inner = can_nest and flat.count(inner_opening, start, end) > flat.count(closing, start, end)
            if end < 0 or not closes_inner:
                break
            end = flat.find(closing, end + 1, j)
        if end >= 0:
            return Group((start, end), end + len(closing))
    return None
