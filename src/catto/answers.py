"""Which label an answer gives: tolerant of dress, never guessing.

An *answer* is a label that stands where answers stand: first on its line, or after nothing but the words of a lead
("The answer is", "Option", but no label among them). It may be in any case and in any brackets, quotes or markdown, and
it ends its clause: no word follows it directly. So "B", "**b**", "(B) the dog", "Answer: B." and "\\boxed{B}" answer,
while in "A dog barks", "B is wrong", "not B" and "Vitamin C" nothing does.
A *mention* is any other label in the text that can be told from prose: a label word in any case; a one-letter label in
its own case, or in any case inside brackets or marks ("c)" too); but never "A" or "I" before a word, since both are
English words.
The text's label is the one that is answered, if no other is answered or mentioned. An option's own text, repeated on
the line after its label, is not looked into; another option's text there is a contradiction, and no answer.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

# Raised when a response may be read differently: whatever was read by another version is read again.
VERSION = 2
Span = tuple[int, int]

_LEADS = """a an answer be best boxed choice choose correct final go going hence here i is it label letter likely mathbf
mathrm most must my of option pick relation relationship right select should so text textbf the therefore thus we with
would"""
LEAD_WORDS = frozenset(_LEADS.split())
_WORD = r"[^\W_]"
# Not inside a word, a number, an abbreviation or a compound: "AB", "1.5", "A.M.", "B-cells", "A's", "C++", "$1".
_BEFORE = rf"(?<!{_WORD})(?<!{_WORD}[.'\u2019-])(?<![-+#@&])(?:(?<![$€£])|(?!\d))"
_AFTER = rf"(?!{_WORD})(?![.'\u2019-]{_WORD})(?![+#%°])"
_MARKED = re.compile(rf"[(\[{{\"'\u201c\u2018*`_]\s?{_WORD}\s?[)\]}}\"'\u201d\u2019*`_]|{_WORD}\)")
_TAGS = re.compile(r"<[^<>\n]{0,64}>")
# How far a line is looked at around a label: no lead is longer, few options are, and endless lines stay cheap.
_LEAD_REACH, _TAIL_REACH = 200, 4000


class _Place(NamedTuple):
    """A label found in the text: which, where, whether a lead is all before it, and what follows on its line."""

    label: str
    span: Span
    text: str
    before: str
    after: str
    lead: tuple[str, ...] | None  # the words before it, None where they are more than a lead


def find_label(
    text: str, zone: Span, labels: Sequence[str], option_texts: Sequence[str] | None = None
) -> tuple[str, Span] | None:
    """Find the one label that text[zone] answers with, and its characters' span in the text; None: no answer."""
    answer = text[zone[0] : zone[1]]
    if (alone := answer.strip()) in tuple(labels):  # the canonical form, which needs no search
        start = zone[0] + answer.index(alone)
        return alone, (start, start + len(alone))
    answer = _TAGS.sub(lambda tag: " " * len(tag[0]), answer)
    if option_texts is not None:
        plain = _without_options(answer, labels, option_texts)
        if plain is None:
            return None
        answer = plain
    answers, mentions = [], set()
    for place in _places(answer, labels):
        if _answers(place):
            answers.append(place)
        elif _mentions(place):
            mentions.add(place.label)
    if not answers or len({place.label for place in answers} | mentions) > 1:
        return None
    start, end = answers[0].span
    return answers[0].label, (zone[0] + start, zone[0] + end)


def _places(answer: str, labels: Sequence[str]) -> Iterator[_Place]:
    """Every standing-alone label in the text, longest first where labels contain each other."""
    folded = {_folded(label): label for label in labels}
    exact = len(folded) < len(labels)  # labels that differ by case alone are told apart by it
    known = {label: label for label in labels} if exact else folded
    choices = "|".join(r"\s+".join(map(re.escape, label.split())) for label in sorted(labels, key=len, reverse=True))
    for match in re.finditer(f"{_BEFORE}(?:{choices}){_AFTER}", answer, 0 if exact else re.IGNORECASE):
        label = known.get(match[0] if exact else _folded(match[0]))
        if label is not None:
            before = answer[max(0, match.start() - _LEAD_REACH) : match.start()].rpartition("\n")[2]
            after = answer[match.end() : match.end() + _TAIL_REACH].partition("\n")[0]
            yield _Place(label, match.span(), match[0], before, after, _lead(before, folded))


def _lead(before: str, labels: Container[str]) -> tuple[str, ...] | None:
    words = tuple(word.casefold() for word in re.findall(rf"{_WORD}+", before))
    return words if all(word in LEAD_WORDS and word not in labels for word in words) else None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _answers(place: _Place) -> bool:
    """Whether a label stands where answers stand."""
    if place.lead is None or re.match(rf"[ \t]*{_WORD}", place.after):
        return False
    if place.text in ("a", "i") and place.lead and not re.search(r"[:=({\[\"'\u201c\u2018*`]\s*$", place.before):
        return False  # "It is a" may be a sentence cut off
    return not (_is_english_word(place.text) and _bare_before_aside(place))


def _bare_before_aside(place: _Place) -> bool:
    """'A (small) dog', 'A "dog"': an unmarked letter before a bracket or a quote may be an article."""
    return re.match(rf"[ \t]+[\"'\u201c\u2018(\[*_`]+{_WORD}", place.after) is not None


def _is_english_word(text: str) -> bool:
    return text.casefold() in ("a", "i")


def _mentions(place: _Place) -> bool:
    """Whether a label that does not answer is there all the same."""
    if len(place.label) > 1:
        return True
    around = place.before[-2:] + place.text + place.after[:2]
    if _MARKED.search(around):
        return True
    if _is_english_word(place.text) and re.match(rf"[ \t]+[\"'\u201c\u2018(\[*_`]*{_WORD}", place.after):
        return False
    return place.text == place.label


def _without_options(answer: str, labels: Sequence[str], option_texts: Sequence[str]) -> str | None:
    """Blank each option's own text where it follows its label; None where another option's text follows."""
    texts = {label: _bare(text) for label, text in zip(labels, option_texts, strict=True)}
    end_of_last = -1
    for place in _places(answer, labels):
        start, end = place.span[1], place.span[1] + len(place.after)
        tail = _bare(place.after)
        if start < end_of_last or not tail or place.lead is None:
            continue
        if tail == texts[place.label]:
            answer = answer[:start] + " " * (end - start) + answer[end:]
            end_of_last = end
        elif tail in texts.values():
            return None
    return answer


def _bare(text: str) -> str:
    """A text without case, spacing and the punctuation around it."""
    return _folded(re.sub(r"^[\W_]+|[\W_]+$", "", text))
