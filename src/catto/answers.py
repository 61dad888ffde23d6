r"""Which label an answer gives, by a closed list of written forms.

The whole answer has to be one of them, or it is no answer. The text is normalised first: NFKC, case folded, invisible
characters removed, white space single. Then its formatting is removed from the outside in (brackets, quotes, markdown,
`\boxed{}`, a final full stop, special tokens), and at most two leads ("The correct answer is", "option"). What is left
has to be a label, a label with its own option's text, or a label that "is correct". Nothing is searched for, so a
second label, a negation or an extra word matches no form. The table of forms is in docs/conventions.md.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

# The version of the reading: raise it with every change after which some text is read differently.
VERSION = 6

Span = tuple[int, int]

_LAYERS, _DEPTH = 12, 3  # most layers of formatting and leads around a label, and forms inside a form
_ROOM = 300  # characters for them: a line longer than this and two option texts has no form
_END_MARKS = ".,;:!。、✅✓✔☑"
_UNFINISHED = re.compile(r"(?:[.。] ?){3}$")
_PAIRS = [
    *[(mark, mark) for mark in ("```", "***", "**", "___", "__", "$$", "*", "_", "`", "$", '"', "'")],
    *zip("\u201c\u201e\u2018«\u2039「『【《〈([{", "\u201d\u201c\u2019»\u203a」』】》〉)]}", strict=True),
    *[(r"\(", r"\)"), (r"\[", r"\]")],
]
_OPENERS = frozenset(opening[0] for opening, _ in _PAIRS) | {"<"}
_MARKS = {pair: re.compile("|".join(map(re.escape, pair))) for pair in _PAIRS}
_COMMAND = re.compile(r"\\(?:boxed|fbox|text(?:bf|it|rm|sf|tt)?|math(?:bf|it|rm|sf|tt)|emph|underline) ?(?={)")
_ELEMENT = re.compile(r"<(b|strong|i|em|u|code|p|span|div|mark|tt|label|final|option|choice|response|result)>")
_FENCED = re.compile(r"(?:text|txt|plaintext|markdown|md|json|latex|tex|xml) ")
# "- B" is an item of a list and "> B" a quotation; "- 1" may be a number and "> 1" a comparison.
_MARKER = re.compile(r"(?:[*•]|#{1,6}|[->](?! \d)|->|=>|→) |[✅✓✔☑👉➡] ?")
_TOKEN = r"<\|[^<>|]{1,40}\|>|<(?:eos|bos|pad|turn|endoftext|end_of_turn|start_of_turn)>|\[/?inst\]"
_FIRST_TOKEN = re.compile(rf"{_TOKEN}|<s>(?!.*</s>)")
_LAST_TOKEN = re.compile(rf"(?:{_TOKEN}|<br ?/?>|</([a-z]\w{{0,20}})>)$")
# The beginnings of the closing tag, where generation stopped inside it.
TORN_CLOSING = tuple("</answer"[:length] for length in range(2, 9))

_BE = " (?:is|would be|should be|must be|will be|has to be)"
_SURELY = r"(?: (?:most likely|likely|probably|clearly|definitely|certainly|obviously|therefore|thus|then|indeed)"
_SURELY += r"""(?=[ :*_`"']))?"""  # at the end it may be the label
_IS = rf"(?:{_BE}|['\u2019]s){_SURELY}"
# "Answer - B" has a dash, "Answer: - 1" may have a minus sign.
_MARK = r" ?(?:[:=]|(?:->|=>|→|[-\u2013](?! \d)|\u2014)(?= ))"
_HEADS = rf"""(?=(?:\*\*|__|[*_`"'])?{_MARK})"""
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
_FOREIGN = "antwort|réponse|respuesta|risposta|resposta|ответ"
# Leads that state an answer, also in prose.
_STATING = [
    rf"{_THE}(?:{_WHICH})*(?:answer|ans|label){_ABOUT}(?:{_IS}|{_HEADS})",
    rf"{_THE}(?:{_WHICH})+(?:answer|ans|label|option|choice|letter){_ABOUT}(?:{_IS})?",
    rf"{_THE}(?:{_WHICH})*(?:option|choice|letter|statement|claim|hypothesis|{_MATTER}){_ABOUT}{_IS}",
    rf"{_THE}(?:{_WHICH})*{_MATTER}{_ABOUT}{_HEADS}",
    rf"(?:i|we)(?: (?:would|will|shall|must|should|have to)|['\u2019]d|['\u2019]ll)? {_CHOOSE}",
    rf"(?:{_FOREIGN}){_HEADS}",
]
# Leads that answer only outside prose, where "it is" may speak of anything and "option" or "answer" of every option.
_NAMING = [r"(?:the )?(?:option|choice|letter|number)", rf"(?:it|this|that){_IS}", "choose|pick|select"]
_NAMING += [rf"{_THE}(?:answer|ans|label){_ABOUT}|{_FOREIGN}"]
_LEAD = re.compile(
    rf"""(?P<open>\*\*|__|[*_`"'])?"""
    rf"(?:(?:{_OPENER} )?(?:(?P<states>{'|'.join(_STATING)})|{'|'.join(_NAMING)})(?(open)(?![^\W_])|(?!\w))"
    rf"|{_OPENER}(?= )|(?P<chinese>(?:正确)?答案(?:是|为|应该是|{_HEADS})|正确答案|我?选择?(?!项))|答案|选项)"
    rf"(?P<mark>{_MARK})?(?(open)(?P=open))(?P<after>{_MARK})? ?"
)
_NAMES_OPTION = re.compile(rf"(?:(?:option|choice|letter|number|answer|ans|label|{_FOREIGN}) |(?:答案|选项) ?)$")
_CORRECT = re.compile(
    rf"{_BE}{_SURELY} (?:(?:the )?(?:{_WHICH})*(?:answer|option|choice|label)|correct|right"
    "|the (?:best|correct|right) one)$"
)
# Between a label and its option's text: ") ", ". ", ": ", " - ", " "; a full stop or a dash needs white space after it.
_BETWEEN = re.compile(r"[)\]]?(?:[.,;](?= )|:(?!\d))?(?: ?(?:[-\u2013\u2014|=]|->|=>|→)(?= ))? ?")
_ARTICLE = re.compile(r"(?:an?|the) ")


class Reading(NamedTuple):
    """A label and the span of its characters in the text. `states`: its lead says that this is the answer."""

    label: str
    span: Span
    states: bool


def find_label(
    text: str, zone: Span, labels: Sequence[str], option_texts: Sequence[str] | None = None
) -> Reading | None:
    """Read the label that text[zone] gives as a whole, or that every line of it gives; None: no answer.

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
    if reading := _read(answer, zone[0], known):
        return reading
    lines: dict[str, Reading | None] = {}
    start = zone[0]
    for line in answer.split("\n"):
        if line not in lines and line.strip():
            lines[line] = _read(line, start, known)
        start += len(line) + 1
    readings = list(lines.values())
    return readings[0] if len({reading and reading.label for reading in readings}) == 1 else None


def find_stated(
    text: str, zone: Span, labels: Sequence[str], option_texts: Sequence[str] | None = None
) -> Reading | None:
    """Read prose: the whole zone by `find_label`, else its last line, or last two, where they state the answer.

    A last line that is only a label may be the end of a list, so it needs a lead such as "The answer is", which may be
    the line above it. Lines that begin in lower case may continue the sentence of the line before.

    >>> find_stated("Dogs bark.\\nThe answer is B.", (0, 27), ("A", "B")).label
    'B'
    """
    if whole := find_label(text, zone, labels, option_texts):
        return whole
    start = end = zone[0] + len(text[zone[0] : zone[1]].rstrip())
    for _ in range(4):  # the last line, or a heading and the label under it, which signs of LaTeX may enclose
        start = max(text.rfind("\n", zone[0], zone[0] + len(text[zone[0] : start].rstrip())) + 1, zone[0])
        if start == zone[0]:
            break  # the whole zone, which was read above
        last = find_label(text, (start, end), labels, option_texts)
        if last is not None and last.states:
            return None if text[start:end].lstrip("*_`>#\"' \t")[:1].islower() else last
    return None


class _Labels(NamedTuple):
    """Labels and option texts as they are compared: folded label -> labels, label -> bare option text."""

    folded: dict[str, tuple[str, ...]]
    texts: dict[str, str]
    room: int


@lru_cache(maxsize=4096)
def _known(labels: tuple[str, ...], option_texts: tuple[str, ...]) -> _Labels:
    folded: dict[str, tuple[str, ...]] = {}
    for label in labels:
        key = _normalised(label)[0]
        folded[key] = (*folded.get(key, ()), label)
    texts = {}
    for label, text in zip(labels, option_texts, strict=bool(option_texts)):
        plain = _normalised(text)[0]
        texts[label] = plain[slice(*_peeled(plain, 0, len(plain)))]
    return _Labels(folded, texts, _ROOM + 2 * max(map(len, option_texts), default=0))


def _normalised(text: str) -> tuple[str, Sequence[int], Sequence[int]]:
    """NFKC, case folded, without invisible characters, white space single; where each character begins and ends."""
    if text.isascii() and text.isprintable() and "  " not in text:
        return text.lower(), range(len(text)), range(1, len(text) + 1)
    nfkc, begins = partial(unicodedata.normalize, "NFKC"), [0]
    for place, char in enumerate(text[1:], 1):  # NFKC may join a character with marks or letters (Hangul) after it
        before = text[begins[-1] : place]
        if not unicodedata.combining(char) and nfkc(before + char) == nfkc(before) + nfkc(char):
            begins.append(place)
    characters: list[tuple[str, int, int]] = []
    for begin, end in pairwise([*begins, len(text)]):
        for char in nfkc(text[begin:end]).casefold().replace("\u2010", "-"):
            if char.isspace():
                if not characters or characters[-1][0] != " ":
                    characters.append((" ", begin, end))
            elif unicodedata.category(char) not in ("Cf", "Cc") and not "\ufe00" <= char <= "\ufe0f":
                characters.append((char, begin, end))
    return "".join(char for char, _, _ in characters), [s for _, s, _ in characters], [e for _, _, e in characters]


def _read(answer: str, offset: int, known: _Labels) -> Reading | None:
    """Match one answer, or one line of it, against the forms."""
    reading = _Form(answer, known).read() if len(answer) <= known.room else None
    return reading and reading._replace(span=(offset + reading.span[0], offset + reading.span[1]))


class _Form:
    """An answer that is read from the outside in: text[i:j] is what is left."""

    def __init__(self, answer: str, known: _Labels) -> None:
        self.answer, self.known, self.states = answer, known, False
        self.text, self.starts, self.ends = _normalised(answer)

    def read(self, i: int = 0, j: int | None = None, depth: int = 0) -> Reading | None:
        """Return the label if text[i:j], by default the whole text, is a form of it."""
        j, leads, may_be_word = len(self.text) if j is None else j, 0, False
        for _ in range(_LAYERS):
            i, j = _trimmed(self.text, i, j)
            if reading := self.label(i, j):
                # A lower-case letter right after such a lead may be an English word: "It is a".
                written = self.answer[slice(*reading.span)]
                return None if may_be_word and written in ("a", "i") and written != reading.label else reading
            inner = _layer(self.text, i, j)
            if inner is not None:
                may_be_word = False
            elif leads < 2 and (lead := _LEAD.match(self.text, i, j)) and lead.end() > i:
                if self.names_label(lead[0]):
                    return None
                leads += 1
                self.states |= lead["states"] is not None or lead["chinese"] is not None
                marked = lead["mark"] or lead["after"] or _NAMES_OPTION.search(lead[0])
                may_be_word = not (self.states or marked)
                inner = lead.end(), j
            else:
                break
            i, j = inner
        return self.read_with_more(i, j, leads > 0, depth + 1) if depth < _DEPTH else None

    def label(self, i: int, j: int) -> Reading | None:
        """The label that text[i:j] is; of labels that fold alike, the one with the original's characters."""
        labels = self.known.folded.get(self.text[i:j], ()) if i < j else ()
        if not labels:
            return None
        written = self.answer[slice(*(span := (self.starts[i], self.ends[j - 1])))]
        raised = any(unicodedata.decomposition(char).startswith("<su") for char in written)  # "1²" is not 12
        if len(labels) > 1 or raised:
            labels = tuple(label for label in labels if written == label)
        return Reading(labels[0], span, self.states) if labels else None

    def names_label(self, words: str) -> bool:
        """Whether a label is among words that are no label here; the pronoun in "I choose" does not count."""
        return any(word in self.known.folded and word != "i" for word in re.findall(r"[\w'\u2019]+", words))

    def is_own_text(self, label: str, i: int, j: int) -> bool:
        """Whether text[i:j] is the label's option text. Articles do not matter; another option's text does."""
        own, said = self.known.texts.get(label), self.text[slice(*_peeled(self.text, i, j))]
        if not own or not said or said == own:
            return bool(own and said)
        return said not in self.known.texts.values() and _ARTICLE.sub("", said, 1) == _ARTICLE.sub("", own, 1)

    def read_with_more(self, i: int, j: int, led: bool, depth: int) -> Reading | None:
        """A label with an article, with "is correct", or with its option's text before or after it."""
        text = self.text
        if led and (article := _ARTICLE.match(text, i, j)) and not self.names_label(article[0]):
            reading = self.label(article.end(), j)
            if reading is not None and len(reading.label) > 1:
                return reading
        if (correct := _CORRECT.search(text, i, j)) and not self.names_label(correct[0]):
            self.states = True
            return self.read(i, correct.start(), depth)
        # "(B) the dog", "**Option B**: the dog", "B - the dog", and "B)" alone
        if pair := _first_pair(text, i, j):
            states, end = self.states, pair[1]
            if (reading := self.read(*pair[0], depth)) is None:
                self.states = states
        else:
            # A word does not end before a letter, a digit or "_"; scripts without spaces have no such words.
            lengths = sorted({len(label) for label in self.known.folded}, reverse=True)
            ends = [i + n for n in lengths if i + n < j and not (text[i + n].isalnum() or text[i + n] == "_")]
            reading, end = next(((hit, end) for end in ends if (hit := self.label(i, end))), (None, i))
        if reading is not None:
            if pair is None and text[end:j] == ")":
                return reading
            between, written = _BETWEEN.match(text, end, j), self.answer[slice(*reading.span)]
            if between is None or between.end() == end or not self.is_own_text(reading.label, between.end(), j):
                reading = None
            elif between[0] == " " and written in ("a", "i") and written != reading.label:
                reading = None  # "a cat" is a text with its article
            elif not (pair or between[0][0] in ").:]" or text[between.end()] in "(["):
                # "A, B" may be two labels even where B is the text of A; "A) B", "A: B" and "A (B)" are not.
                other = self.label(*_peeled(text, between.end(), j))
                reading = reading if other is None or other.label == reading.label else None
        # "the dog (B)", where the text of B may itself be a label with that text
        start = max(text.rfind("(", i, j), text.rfind("[", i, j))
        last = self.label(start + 1, j - 1) if start > i and text[j - 1] in ")]" else None
        if last is None or not self.is_own_text(last.label, i, start):
            return reading
        return last if reading is None or reading.label == last.label else None


def _trimmed(text: str, i: int, j: int) -> Span:
    """text[i:j] without the spaces around it; a normalised text has at most one on either side."""
    i += text.startswith(" ", i, j)
    return i, j - text.endswith(" ", i, j)


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
    if text[j - 1] in _END_MARKS and text[j - 2 : j - 1] != "?" and not _UNFINISHED.search(text, max(i, j - 6), j):
        return i, j - 1
    if (pair := _first_pair(text, i, j)) and pair[1] == j:
        return pair[0]
    if marker := _MARKER.match(text, i, j) or _FIRST_TOKEN.match(text, i, j):
        return marker.end(), j
    start = text.rfind("<" if text[j - 1] != "]" else "[", i, j)
    if start < 0:
        return None
    last = _LAST_TOKEN.match(text, start, j)
    if last is not None and (last[1] is None or f"<{last[1]}>" not in text[i:j]):
        return i, last.start()
    return (i, start) if text[start:j] in TORN_CLOSING else None


def _first_pair(text: str, i: int, j: int) -> tuple[Span, int] | None:
    """Inside and end of the pair of marks that opens at i: brackets, quotes, markdown, a LaTeX command, an element."""
    if text[i : i + 1] not in _OPENERS:
        return None
    if command := _COMMAND.match(text, i, j):
        i = command.end()
    if element := _ELEMENT.match(text, i, j):
        close = text.find(f"</{element[1]}>", element.end(), j)
        return None if close < 0 else ((element.end(), close), close + len(element[1]) + 3)
    for (opening, closing), marks in _MARKS.items():
        if not text.startswith(opening, i, j):
            continue
        inside, depth = i + len(opening), 1
        for mark in marks.finditer(text, inside, j):
            depth += 1 if mark[0] != closing else -1  # brackets nest, quotes do not
            if depth == 0:
                fence = _FENCED.match(text, inside, mark.start()) if opening == "```" else None
                return (fence.end() if fence else inside, mark.start()), mark.end()
    return None
