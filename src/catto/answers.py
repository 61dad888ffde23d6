r"""Which label an answer gives, by a closed list of written forms.

The whole answer has to be one of them, or it is no answer. The text is normalised first: NFKC, case folded, invisible
characters out, white space single. Then its formatting is taken off from the outside in (brackets, quotes, markdown,
`\boxed{}`, a final full stop, special tokens), and at most two leads ("The correct answer is", "option"). What is left
has to be a label, a label with its own option's text, or a label that "is correct". Nothing is searched for, so a
second label, a negation or a word too many leaves no form. The table of forms is in docs/conventions.md.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

# The version of the reading: raise it with every change after which some text is read differently.
VERSION = 2

Span = tuple[int, int]

_LAYERS = 12  # most layers of formatting and leads around a label
_ROOM = 300  # characters for them: a line longer than this and two option texts has no form
_END_MARKS = ".,;:!。、✅✓✔☑"
_PAIRS = [
    *[(mark, mark) for mark in ("```", "***", "**", "__", "$$", "*", "_", "`", "$", '"', "'")],
    *zip("\u201c\u201e\u2018«\u2039「『【《〈([{", "\u201d\u201c\u2019»\u203a」』】》〉)]}", strict=True),
    *[(r"\(", r"\)"), (r"\[", r"\]")],
]
_OPENERS = frozenset(opening[0] for opening, _ in _PAIRS) | {"<"}
_COMMAND = re.compile(r"\\(?:boxed|fbox|text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf|tt)|emph|underline) ?(?={)")
_ELEMENT = re.compile(r"<(b|strong|i|em|u|code|p|span|div|mark|tt|label|final|option|choice|response|result)>")
_FENCED = re.compile(r"(?:text|txt|plaintext|markdown|md|json|latex|tex|xml) ")
# "- B" is an item of a list, "- 1" may be a number.
_MARKER = re.compile(r"(?:[*•>]|#{1,6}|-(?! \d)|->|=>|→) |[✅✓✔☑👉➡] ?")
_TOKEN = r"<\|[^<>|]{1,40}\|>|<(?:eos|bos|pad|turn|endoftext|end_of_turn|start_of_turn)>|\[/?inst\]"
_FIRST_TOKEN = re.compile(rf"{_TOKEN}|<s>(?!.*</s>)")
_LAST_TOKEN = re.compile(rf"(?:{_TOKEN}|<br ?/?>|</([a-z]\w{{0,20}})>)$")
_TORN = tuple("</answer"[:length] for length in range(2, 9))  # of the closing tag, where generation stopped in it

_IS = r" (?:is|would be|should be|must be|will be|has to be)"
_IS += r"(?: (?:most likely|likely|probably|clearly|definitely|certainly|obviously|therefore|thus|then|indeed))?"
_MARK = r" ?(?:[:=]|(?:->|=>|→|[-\u2013\u2014])(?= ))"
_THE = r"(?:(?:the|my|our|your) )?"
_WHICH = r"(?:final|correct|right|best|true|proper|accurate|appropriate|suitable|logical|chosen|selected|predicted"
_WHICH += r"|overall|likeliest|most (?:likely|appropriate|accurate|suitable|plausible)) "
_MATTER = r"(?:relation(?:ship)?|classification|category|class|response|solution|conclusion|verdict|judge?ment|result"
_MATTER += r"|prediction|inference|sentiment|stance|rating|score|grade|decision|selection)"
_ABOUT = r"(?: here| (?:to|for) (?:this|the) question"
_ABOUT += r"| between (?:the )?(?:premise and (?:the )?hypothesis|(?:two )?(?:statements|sentences)))?"
_CHOOSE = r"(?:choose|chose|pick|picked|select|selected|answer|say|go with|am going with|went with|opt for|vote for"
_CHOOSE += r"|settle on|have chosen)"
_OPENER = r"(?:so|thus|therefore|hence|then|ok|okay|finally|clearly|overall|in conclusion|in summary|to conclude"
_OPENER += r"|(?:i|we) (?:think|believe|conclude|would say)(?: that)?|i['\u2019]d say"
_OPENER += r"|i(?: am|['\u2019]m) (?:sure|confident)(?: that)?),?"
# Leads that state an answer, wherever they stand.
_STATING = [
    rf"{_THE}(?:{_WHICH})*(?:answer|ans|label){_ABOUT}(?:{_IS})?",
    rf"{_THE}(?:{_WHICH})+(?:option|choice|letter){_ABOUT}(?:{_IS})?",
    rf"{_THE}(?:{_WHICH})*(?:option|choice|letter|statement|claim|hypothesis|{_MATTER}){_ABOUT}{_IS}",
    rf"{_THE}(?:{_WHICH})*{_MATTER}{_ABOUT}(?={_MARK})",
    rf"(?:i|we)(?: (?:would|will|shall|must|should|have to)|['\u2019]d|['\u2019]ll)? {_CHOOSE}",
    r"antwort|réponse|respuesta|risposta|resposta|ответ",
]
# Leads that answer only where nothing else stands: in prose "it is" may speak of anything, "option" of every option.
_NAMING = [r"(?:the )?(?:option|choice|letter|number)", rf"(?:it|this|that)(?:{_IS}|['\u2019]s)", "choose|pick|select"]
_LEAD = re.compile(
    rf"""(?P<open>\*\*|__|[*_`"'])?"""
    rf"(?:(?:{_OPENER} )?(?:(?P<states>{'|'.join(_STATING)})|{'|'.join(_NAMING)})(?!\w)|{_OPENER}(?= )"
    rf"|(?P<chinese>(?:正确)?答案(?:是|为|应该是)?|我?选择?|选项))"
    rf"(?P<mark>{_MARK})?(?(open)(?P=open))(?P<after>{_MARK})? ?"
)
_NAMES_OPTION = re.compile(r"(?:option|choice|letter|number) $")
_CORRECT = re.compile(
    rf"{_IS} (?:(?:the )?(?:{_WHICH})*(?:answer|option|choice|label)|correct|right|the (?:best|correct|right) one)$"
)
# Between a label and its option's text: ") ", ". ", ": ", " - ", " "; a full stop or a dash needs white space after it.
_BETWEEN = re.compile(r"[)\]]?(?:[.,;](?= )|:(?!\d))?(?: ?(?:[-\u2013\u2014|=]|->|=>|→)(?= ))? ?")
_ARTICLE = re.compile(r"(?:an?|the) ")


class Reading(NamedTuple):
    """A label and the span of its characters in the text. `states`: its lead says that this is the answer."""

    label: str
    span: Span
    states: bool


class _Labels(NamedTuple):
    """Labels and option texts as they are compared: folded label -> labels, label -> bare option text."""

    folded: dict[str, tuple[str, ...]]
    texts: dict[str, str]
    room: int


def find_label(
    text: str, zone: Span, labels: Sequence[str], option_texts: Sequence[str] | None = None
) -> Reading | None:
    """Read the label that text[zone] gives as a whole, or every line of it alike; None: no answer.

    `option_texts` in the order of `labels`. Time is linear in the zone's length.

    >>> find_label("The correct answer is (B).", (0, 26), ("A", "B"))
    Reading(label='B', span=(23, 24), states=True)
    >>> find_label("A or B", (0, 6), ("A", "B"))
    """
    answer = text[zone[0] : zone[1]]
    if (alone := answer.strip()) in labels:  # the canonical form
        start = zone[0] + answer.index(alone)
        return Reading(alone, (start, start + len(alone)), False)
    known = _known(tuple(labels), tuple(option_texts or ()))
    if found := _read(answer, zone[0], known):
        return found
    lines: dict[str, Reading | None] = {}
    start = zone[0]
    for line in answer.split("\n"):
        if line not in lines and line.strip():
            lines[line] = _read(line, start, known)
        start += len(line) + 1
    readings = list(lines.values())
    if len({reading and reading.label for reading in readings}) != 1:
        return None
    return readings[0]


def find_stated(
    text: str, zone: Span, labels: Sequence[str], option_texts: Sequence[str] | None = None
) -> Reading | None:
    """Read prose: the whole zone by `find_label`, else its last line, where that line states the answer.

    A last line that is only a label may be the end of a list, so it needs a lead such as "The answer is"; one that
    begins in lower case may go on with the sentence of the line before.
    """
    whole = find_label(text, zone, labels, option_texts)
    if whole is not None:
        return whole
    end = zone[0] + len(text[zone[0] : zone[1]].rstrip())
    start = max(text.rfind("\n", zone[0], end) + 1, zone[0])
    if text[start:end].lstrip()[:1].islower():
        return None
    last = find_label(text, (start, end), labels, option_texts)
    return last if last is not None and last.states else None


@lru_cache(maxsize=4096)
def _known(labels: tuple[str, ...], option_texts: tuple[str, ...]) -> _Labels:
    folded: dict[str, tuple[str, ...]] = {}
    for label in labels:
        key = _Plain.of(label, 0).text
        folded[key] = (*folded.get(key, ()), label)
    texts = {label: _bare(text) for label, text in zip(labels, option_texts, strict=bool(option_texts))}
    return _Labels(folded, texts, _ROOM + 2 * max(map(len, option_texts), default=0))


def _bare(text: str) -> str:
    plain = _Plain.of(text, 0)
    return plain.text[slice(*_peeled(plain.text, 0, len(plain.text)))]


class _Plain(NamedTuple):
    """A normalised text, and where each of its characters begins and ends in the original."""

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, text: str, offset: int) -> _Plain:
        """Normalise: NFKC, fold case, drop invisible characters, make white space single spaces."""
        if text.isascii() and text.isprintable() and "  " not in text:
            return cls(text.lower(), range(offset, offset + len(text)), range(offset + 1, offset + len(text) + 1))
        found: list[tuple[str, int, int]] = []
        for begin, end in _clusters(text):
            for char in unicodedata.normalize("NFKC", text[begin:end]).casefold():
                if char.isspace():
                    if found and found[-1][0] == " ":
                        continue
                    char = " "
                if char == " " or not _invisible(char):
                    found.append((char, offset + begin, offset + end))
        return cls("".join(char for char, _, _ in found), [s for _, s, _ in found], [e for _, _, e in found])


def _clusters(text: str) -> list[Span]:
    """Each character with the combining marks after it, which NFKC may join to it."""
    begins = [place for place, char in enumerate(text) if place == 0 or not unicodedata.combining(char)]
    return list(zip(begins, [*begins[1:], len(text)], strict=True))


def _invisible(char: str) -> bool:
    """Format and control characters, and variation selectors."""
    return unicodedata.category(char) in ("Cf", "Cc") or "\ufe00" <= char <= "\ufe0f"


def _read(answer: str, offset: int, known: _Labels) -> Reading | None:
    """Match one answer, or one line of it, against the forms."""
    if len(answer) > known.room:
        return None
    plain = _Plain.of(answer, offset)
    return _Form(plain, answer, offset, known).read() if plain.text.strip() else None


class _Form:
    """One text on its way from the outside in: text[i:j] is what has not been taken off."""

    def __init__(self, plain: _Plain, answer: str, offset: int, known: _Labels) -> None:
        self.plain, self.text, self.known = plain, plain.text, known
        self.answer, self.offset = answer, offset
        self.states = False

    def read(self) -> Reading | None:
        """The label, if the whole text is a form of it."""
        i, j = 0, len(self.text)
        led, article = 0, ""
        for _ in range(_LAYERS):
            i, j = _trimmed(self.text, i, j)
            if found := self._label(i, j):
                return None if self._is_article(found, article) else found
            inner = _layer(self.text, i, j)
            if inner is None and led < 2 and (lead := _LEAD.match(self.text, i, j)) and lead.end() > i:
                if self._names_label(lead[0]):
                    return None
                led += 1
                self.states |= lead["states"] is not None or lead["chinese"] is not None
                article = "" if self.states or lead["mark"] or lead["after"] else lead[0]
                inner = lead.end(), j
            elif inner is not None:
                article = ""
            if inner is None:
                break
            i, j = inner
        return self._with_more(i, j, led > 0)

    def _is_article(self, found: Reading, lead: str) -> bool:
        """Whether a lower-case letter right after such a lead may be an English word: "It is a"."""
        written = self.answer[found.span[0] - self.offset : found.span[1] - self.offset]
        return written in ("a", "i") and written != found.label and bool(lead) and not _NAMES_OPTION.search(lead)

    def _label(self, i: int, j: int) -> Reading | None:
        """The label that text[i:j] is; labels that fold alike are told apart by the original's characters."""
        labels = self.known.folded.get(self.text[i:j], ()) if i < j else ()
        if not labels:
            return None
        span = self.plain.starts[i], self.plain.ends[j - 1]
        written = self.answer[span[0] - self.offset : span[1] - self.offset]
        if len(labels) > 1:
            labels = tuple(label for label in labels if written == label)
        return Reading(labels[0], span, self.states) if labels else None

    def _names_label(self, words: str) -> bool:
        """Whether a label stands among words that are no label here; the pronoun in "I choose" does not count."""
        return any(word in self.known.folded and word != "i" for word in re.findall(r"[\w'\u2019]+", words))

    def _with_more(self, i: int, j: int, led: bool) -> Reading | None:
        """A label with its option's text before or after it, with "is correct", or with an article before it."""
        if led and (article := _ARTICLE.match(self.text, i, j)) and not self._names_label(article[0]):
            found = self._label(article.end(), j)
            if found is not None and len(found.label) > 1:
                return found
        if (correct := _CORRECT.search(self.text, i, j)) and not self._names_label(correct[0]):
            j, self.states = correct.start(), True
            i, j = _peeled(self.text, i, j)
            if found := self._label(i, j):
                return found
        return self._label_first(i, j) or self._label_last(i, j)

    def _label_first(self, i: int, j: int) -> Reading | None:
        """ "(B) the dog", "**B**: the dog", "B - the dog", and "B)" alone."""
        head = _first_pair(self.text, i, j)
        if head is not None:
            inner, end = head
            inner = _peeled(self.text, *inner)
            found = self._label(*inner) or self._label(inner[0], inner[1] - (self.text[inner[1] - 1 : inner[1]] == ")"))
        else:
            lengths = sorted((len(label) for label in self.known.folded), reverse=True)
            ends = [i + n for n in dict.fromkeys(lengths) if i + n < j and not _within_word(self.text, i + n)]
            found, end = next(((hit, end) for end in ends if (hit := self._label(i, end))), (None, i))
        if found is None:
            return None
        if self.text[end:j] == ")" and head is None:
            return found
        between = _BETWEEN.match(self.text, end, j)
        if between is None or between.end() == end:
            return None
        return found if self._is_own_text(found.label, between.end(), j) else None

    def _label_last(self, i: int, j: int) -> Reading | None:
        """ "the dog (B)": the option's text, then its label in brackets."""
        start = max(self.text.rfind(mark, i, j) for mark in "([")
        if start <= i or self.text[j - 1 : j] not in ")]":
            return None
        found = self._label(start + 1, j - 1)
        return found if found is not None and self._is_own_text(found.label, i, start) else None

    def _is_own_text(self, label: str, i: int, j: int) -> bool:
        """Whether text[i:j] is the label's option text; an article too many does not matter, another's text does."""
        own = self.known.texts.get(label)
        said = self.text[slice(*_peeled(self.text, i, j))]
        if not own or not said:
            return False
        if said == own:
            return True
        return said not in self.known.texts.values() and _ARTICLE.sub("", said, 1) == _ARTICLE.sub("", own, 1)


def _trimmed(text: str, i: int, j: int) -> Span:
    while i < j and text[i] == " ":
        i += 1
    while i < j and text[j - 1] == " ":
        j -= 1
    return i, j


def _peeled(text: str, i: int, j: int) -> Span:
    """text[i:j] without all of its formatting."""
    for _ in range(_LAYERS):
        i, j = _trimmed(text, i, j)
        inner = _layer(text, i, j)
        if inner is None or inner[0] >= inner[1]:
            break
        i, j = inner
    return i, j


def _layer(text: str, i: int, j: int) -> Span | None:
    """text[i:j] without its outermost layer of formatting; None where it has none."""
    if i >= j:
        return None
    if text[j - 1] in _END_MARKS and text[j - 2 : j - 1] != "?" and not text.endswith("...", i, j):
        return i, j - 1
    head = _first_pair(text, i, j)
    if head is not None and head[1] == j:
        return head[0]
    if marker := _MARKER.match(text, i, j) or _FIRST_TOKEN.match(text, i, j):
        return marker.end(), j
    start = text.rfind("<" if text[j - 1] != "]" else "[", i, j)
    if start < 0:
        return None
    last = _LAST_TOKEN.match(text, start, j)
    if last is not None and (last[1] is None or f"<{last[1]}>" not in text[i:j]):
        return i, last.start()
    return (i, start) if text[start:j] in _TORN else None


def _first_pair(text: str, i: int, j: int) -> tuple[Span, int] | None:
    """Inside and end of the pair of marks that opens at i: brackets, quotes, markdown, a LaTeX command, an element."""
    if text[i : i + 1] not in _OPENERS:
        return None
    if command := _COMMAND.match(text, i, j):
        i = command.end()
    if element := _ELEMENT.match(text, i, j):
        close = text.find(f"</{element[1]}>", element.end(), j)
        return None if close < 0 else ((element.end(), close), close + len(element[1]) + 3)
    for opening, closing in _PAIRS:
        if text.startswith(opening, i, j):
            inside = i + len(opening)
            close = _closing(text, inside, j, opening, closing)
            if close < 0:
                continue
            fence = _FENCED.match(text, inside, close) if opening == "```" else None
            return (fence.end() if fence else inside, close), close + len(closing)
    return None


def _closing(text: str, i: int, j: int, opening: str, closing: str) -> int:
    """Where the pair that was opened before i closes; brackets nest."""
    if opening == closing:
        return text.find(closing, i, j)
    depth = 1
    while i < j:
        if text.startswith(closing, i):
            depth -= 1
            if depth == 0:
                return i
        elif text.startswith(opening, i):
            depth += 1
        i += 1
    return -1


def _within_word(text: str, place: int) -> bool:
    """Whether a word goes on at this place; scripts without spaces have no such words."""
    return text[place].isalnum() or text[place] == "_"
