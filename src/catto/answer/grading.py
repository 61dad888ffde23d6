r"""Decide whether a short answer or a number is right, after a fixed normalisation of both texts.

Text: formatting and leads such as "The answer is" are removed, as in `catto.answer.forms`. Case, accents on Latin
letters, one leading article, quotation marks and the dots in abbreviations are ignored. Other punctuation counts as a
space. A minus sign, a decimal point, `%`, `#` and symbols are kept.

Numbers: the text must be a single number, with at most a hedge before it and a unit after it. A range, two numbers, a
comparison or a date is not accepted. Values are compared as exact fractions. Units are compared only if both numbers
have a known one. A percentage has the value before its sign, so 10% equals 10 and not 0.1. docs/conventions.md lists
all rules.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from catto.answer.forms import LEAD, fold_text, strip_formatting
from catto.records import Grade

# Version of these rules: raise it with every change after which some answer is graded differently.
VERSION = 1

MAX_NUMBER_TEXT = 300  # maximum number of characters in a text that is read as a number
MAX_LEADS = 2
MAX_UNIT_WORDS = 6

ARTICLE = re.compile(r"(?:the|an?) (?=\S)")
# "J. K." and "J.K." are the same initials.
INITIAL = re.compile(r"(?<![^\W_])([^\W\d_])\. ?(?=[^\W\d_](?:\.|$))")
LATIN_ACCENTS = re.compile("(?<=[a-z])[\u0300-\u036f]+")
GROUPED_BY_COMMAS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
DASHES = "-\u2212\u2013\u2014"
QUOTES = "'\"`\u00b4\u2018\u2019\u201c\u201d\u2032\u2033"
CURRENCY_SIGNS = "$€£¥₹"


def normalize_answer(text: str) -> str:
    """Normalise a short answer for comparison, in time linear in its length.

    Args:
        text: An answer of any length.

    Returns:
        The normalised answer; empty only if the text has no visible character.

    Example:
        >>> normalize_answer("**The Beatles!**"), normalize_answer("beatles")
        ('beatles', 'beatles')
        >>> normalize_answer("J. K. Rowling"), normalize_answer("1,000.50")
        ('jk rowling', '1000.50')
        >>> normalize_answer("-5"), normalize_answer("C++"), normalize_answer("Beyoncé")
        ('-5', 'c++', 'beyonce')
    """
    folded = fold_text(text).text
    bare = _remove_leads(strip_formatting(folded))
    normalised = bare
    article = ARTICLE.match(bare)
    if article is not None:
        normalised = bare[article.end() :]  # "The Beatles" equals "Beatles"
    normalised = INITIAL.sub(r"\1", normalised)
    normalised = GROUPED_BY_COMMAS.sub(lambda number: number[0].replace(",", ""), normalised)  # "1,000" equals "1000"
    normalised = _remove_latin_accents(normalised)
    normalised = _replace_punctuation(normalised)
    return normalised or bare.strip()  # an answer may consist of punctuation


def _remove_leads(bare: str) -> str:
    """Remove leads such as "The answer is" if something follows them."""
    for _ in range(MAX_LEADS):
        lead = LEAD.match(bare)
        if lead is None or lead["states_answer"] is None or lead.end() == len(bare):
            break
        bare = strip_formatting(bare[lead.end() :])
    return bare


def _remove_latin_accents(folded: str) -> str:
    """Remove accents from Latin letters. In other scripts, a mark makes a different letter."""
    decomposed = unicodedata.normalize("NFD", folded)
    return unicodedata.normalize("NFC", LATIN_ACCENTS.sub("", decomposed))


def _replace_punctuation(folded: str) -> str:
    """Remove punctuation or replace it by spaces, collapse white space, and join `%` to its number."""
    parts = []
    for index, character in enumerate(folded):
        before = folded[index - 1 : index]
        after = folded[index + 1 : index + 2]
        parts.append(_replace_character(before, character, after))
    words = " ".join("".join(parts).split())
    return words.replace(" %", "%")


def _replace_character(before: str, character: str, after: str) -> str:
    """Return what replaces a character in a normalised answer, given its neighbours (empty at the ends).

    Letters, digits and symbols are kept. Most punctuation becomes a space, but quotation marks and the dots of
    abbreviations are removed, so that "U.S." equals "US". Marks that are part of a number or a name are kept.

    Returns:
        The character, a space, nothing, or " and " for "&".
    """
    if character in DASHES:
        is_minus = not before.isalnum() and (after.isdigit() or after in (*CURRENCY_SIGNS, "."))  # -5, -$5, -.5
        is_suffix = before.isalnum() and not after.strip()  # blood type A-
        return "-" if is_minus or is_suffix else " "
    is_punctuation = unicodedata.category(character).startswith("P")
    if not is_punctuation and character not in QUOTES:
        return character
    is_between_digits = before.isdigit() and after.isdigit()
    if character == ".":
        if not after.isdigit():
            return ""  # of an abbreviation, or the end of a sentence
        return " " if before.isalpha() else "."  # "no.5" has two words; 1.5 and .5 are numbers
    if character in QUOTES:
        return " " if is_between_digits else ""  # the digits of 5'11 must not be joined
    if character == "/":
        return "/" if is_between_digits else " "  # the fraction 3/4, but "and/or"
    if character == "&":
        return " and "
    if character in "%#":  # 10 and 10% differ, and so do C and C#
        return character
    return " "


# Numbers


class NumberReading(NamedTuple):
    """A number that was read from a text.

    Attributes:
        value: Its exact value.
        unit: The canonical name of its unit; None if it has no unit or an unknown one.
    """

    value: Fraction
    unit: str | None = None


SMALL_WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
    "seventeen": 17, "eighteen": 18, "nineteen": 19,
}  # fmt: skip
TENS_WORDS = {
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90,
}  # fmt: skip
SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "k": 10**3,
    "million": 10**6, "billion": 10**9, "bn": 10**9, "trillion": 10**12,
}  # fmt: skip
# Canonical unit -> its spellings. Only these units are compared, and none is converted.
UNITS = {
    "%": ("%", "percent", "pct"),
    "dollar": ("$", "us$", "usd", "dollar", "dollars"),
    "cent": ("¢", "cent", "cents"),
    "euro": ("€", "eur", "euro", "euros"),
    "pound sterling": ("£", "gbp"),
    "yen": ("¥", "jpy", "yen"),
    "rupee": ("₹", "inr", "rupee", "rupees"),
    "mm": ("mm", "millimeter", "millimeters", "millimetre", "millimetres"),
    "cm": ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
    "m": ("m", "meter", "meters", "metre", "metres"),
    "km": ("km", "kms", "kmh", "kph", "kilometer", "kilometers", "kilometre", "kilometres"),
    "inch": ("inch", "inches"),
    "foot": ("ft", "foot", "feet"),
    "yard": ("yd", "yds", "yard", "yards"),
    "mile": ("mi", "mile", "miles", "mph"),
    "mg": ("mg", "milligram", "milligrams"),
    "g": ("g", "gram", "grams"),
    "kg": ("kg", "kgs", "kilo", "kilos", "kilogram", "kilograms"),
    "ounce": ("oz", "ounce", "ounces"),
    "pound": ("lb", "lbs"),
    "ml": ("ml", "milliliter", "milliliters", "millilitre", "millilitres"),
    "l": ("l", "liter", "liters", "litre", "litres"),
    "gallon": ("gal", "gallon", "gallons"),
    "second": ("s", "sec", "secs", "second", "seconds"),
    "minute": ("min", "mins", "minute", "minutes"),
    "hour": ("h", "hr", "hrs", "hour", "hours"),
    "day": ("day", "days"),
    "week": ("week", "weeks"),
    "month": ("month", "months"),
    "year": ("yr", "yrs", "year", "years"),
    "°c": ("°c", "celsius"),
    "°f": ("°f", "fahrenheit"),
    "am": ("am",),
    "pm": ("pm",),
    "bc": ("bc", "bce"),
    "ad": ("ad", "ce"),
}
UNIT_OF = {written: unit for unit, spellings in UNITS.items() for written in spellings}
# A phrase with one of these words is not a unit: it would change the value or be a second one.
NO_UNIT_WORDS = {
    "and", "or", "to", "not", "no", "than", "more", "less", "fewer", "plus", "minus", "times", "x", "over", "under",
    "above", "below", "least", "most", "up", "between", "through", "until", "except", "but", "if", "maybe", "nor",
    "half", "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth", "fifths", "tenth",
    "tenths", "hundredth", "hundredths", "squared", "cubed", "factorial", "mod", "remainder", "r", "i", "pi", "e",
    "sqrt",
    *SMALL_WORDS, *TENS_WORDS, *SCALES,
}  # fmt: skip

_SMALL = "|".join(SMALL_WORDS)
_ONES = "|".join(list(SMALL_WORDS)[1:10])
_TENS = "|".join(TENS_WORDS)
_TO_99 = rf"(?:(?:{_TENS})(?:[- ](?:{_ONES}))?|(?:{_SMALL}))"
_IN_WORDS = rf"(?:(?:{_ONES}|an?) hundred(?: (?:and )?{_TO_99})?|{_TO_99}|an?(?= (?:{'|'.join(SCALES)})\b))"
_INTEGER = r"[1-9]\d{0,2}(?:(?P<group>[,'\u2019_])\d{3})(?:(?P=group)\d{3})*(?!\d)|\d+"
_TEN_TO_THE = r" ?[x\u00d7*·] ?10(?:\^\(?\{?(?P<power>[-\u2212+]?\d{1,3})\}?\)?|(?P<raised>⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,3}))"
NUMBER = re.compile(
    r"(?:[^\W\d_]\w{0,30} ?= ?)?"  # x =
    r"(?:(?:about|approximately|approx\.?|around|roughly|circa|exactly|only|just|[~≈]) ?)?"
    r"(?P<sign>[-\u2212\u2013+]|(?:minus|negative) )?"
    rf"(?P<currency>(?:us)?\$|[{CURRENCY_SIGNS}])? ?(?P<late_sign>[-\u2212])?"
    rf"(?:(?P<words>{_IN_WORDS})(?!\w)"
    r"|(?:(?P<whole>\d+) )?(?P<numerator>\d+) ?[/\u2044] ?(?P<denominator>\d+)"
    rf"|(?P<integer>{_INTEGER})?(?P<decimals>\.\d+)?(?:e(?P<exponent>[-+]?\d{{1,3}})(?!\w)|{_TEN_TO_THE})?)"
)
# Applied before folding, which would turn every narrow space into a plain one.
NARROW_SPACES_IN_NUMBER = re.compile("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))")
LATEX_FRACTION = re.compile(r"\\[dt]?frac ?\{ ?(\d+) ?\} ?\{ ?(\d+) ?\}")
LATEX_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")
LATEX_COMMA = re.compile(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3})")
LATEX_SPACE = re.compile(r"\\[,!; ]")
UNIT_SIGNS = ("°", "°c", "°f", "%", "¢", *CURRENCY_SIGNS)
UNIT_POWER = re.compile(r"\^?[23²³]$")
SUPERSCRIPTS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
MAX_EXPONENT = 308


def read_number(text: str) -> NumberReading | None:
    r"""Read a text that is a single number.

    Args:
        text: For example "12", "$1,000.50", "about 3/4 cup", "twelve apples", "x = -2", "1.5e3", r"\frac{1}{2}".

    Returns:
        The number with its unit; None if the text is not a single number or has more than 300 characters.

    Example:
        >>> read_number("$1,000.50")
        NumberReading(value=Fraction(2001, 2), unit='dollar')
        >>> read_number("twelve apples").value, read_number("1 1/2 hours")
        (Fraction(12, 1), NumberReading(value=Fraction(3, 2), unit='hour'))
        >>> [read_number(text) for text in ("5 to 10", "3 or 4", "more than 5", "10:30", "2020-05-01")]
        [None, None, None, None, None]
    """
    if len(text) > MAX_NUMBER_TEXT:
        return None
    folded = fold_text(_rewrite_notation(text)).text
    bare = _remove_leads(strip_formatting(folded))
    match = NUMBER.match(bare)
    if match is None:
        return None
    value = _compute_value(match)
    if value is None:
        return None
    return _apply_unit(value, match["currency"], bare[match.end() :])


def _rewrite_notation(text: str) -> str:
    """Rewrite LaTeX as plain text, and put a space before characters such as "½": folding makes "11/2" of "1½"."""
    text = LATEX_SPACE.sub(" ", LATEX_COMMA.sub(",", text))
    text = text.replace("\\$", "$").replace("\\%", "%")
    text = LATEX_FRACTION.sub(r" \1/\2", text)
    text = LATEX_TEXT.sub(r" \1", text)
    text = NARROW_SPACES_IN_NUMBER.sub(",", text)
    parts = []
    for character in text:
        is_fraction = unicodedata.decomposition(character).startswith("<fraction>")
        parts.append(f" {character}" if is_fraction else character)
    return "".join(parts)


def _compute_value(match: re.Match[str]) -> Fraction | None:
    """Compute the value of a match of `NUMBER` with its sign.

    None if there are no digits, two signs, a denominator of 0, or an exponent beyond `MAX_EXPONENT`.
    """
    size = _compute_size(match)
    if size is None:
        return None
    if match["sign"] and match["late_sign"]:  # before and after the currency: "-$-5"
        return None
    sign = match["late_sign"] or match["sign"]
    is_negative = sign is not None and sign != "+"
    return -size if is_negative else size


def _compute_size(match: re.Match[str]) -> Fraction | None:
    """Compute the value without its sign; None as for `_compute_value`."""
    if match["words"]:
        return Fraction(_count_words(match["words"]))
    if match["numerator"]:
        return _compute_fraction(match)
    if not match["integer"] and not match["decimals"]:
        return None
    integer = re.sub(r"\D", "", match["integer"] or "0")  # without thousands separators
    size = Fraction(integer + (match["decimals"] or ""))
    exponent = _read_exponent(match)
    if abs(exponent) > MAX_EXPONENT:
        return None
    return size * Fraction(10) ** exponent


def _compute_fraction(match: re.Match[str]) -> Fraction | None:
    whole = int(match["whole"] or 0)
    numerator = int(match["numerator"])
    denominator = int(match["denominator"])
    if denominator == 0:
        return None
    return whole + Fraction(numerator, denominator)


def _read_exponent(match: re.Match[str]) -> int:
    """Read the power of ten of "1e3", "10^3" or "10³"; 0 if there is none."""
    raised = (match["raised"] or "0").translate(SUPERSCRIPTS)
    written = match["exponent"] or match["power"] or raised
    return int(written.replace("\u2212", "-"))


def _count_words(words: str) -> int:
    """Add up "one hundred and twenty-one"."""
    total = 0
    for word in re.split("[- ]", words):
        if word == "hundred":
            total = max(total, 1) * 100
        else:
            total += SMALL_WORDS.get(word, 0) + TENS_WORDS.get(word, 0)
    # "a" before a scale, as in "a million", counts as one.
    return total or int(words in ("a", "an"))


def _apply_unit(value: Fraction, currency: str | None, text_after: str) -> NumberReading | None:
    """Multiply a number by a scale such as "million", and read its unit.

    Args:
        value: The number.
        currency: The currency sign before the number, or None.
        text_after: The text after the number: nothing, a scale, a unit, or a scale and a unit.

    Returns:
        The number with its unit: the currency, or else the unit that the first word names. The unit is None if there is
        no currency and the first word is not a known unit. None instead of a number if the text after it is anything
        else, or if it may be a scale or a unit, as in "$5m".
    """
    words = _split_unit_words(text_after)
    if words is None:
        return None
    if words and words[0] in SCALES:
        value *= SCALES[words.pop(0)]
    may_be_short_scale = currency is not None and words[:1] in (["m"], ["b"], ["mm"])  # "$5m" may be five million
    if may_be_short_scale or not all(_may_be_unit(word) for word in words):
        return None
    unit = None
    if currency is not None:
        unit = UNIT_OF[currency]
    elif words:
        unit = UNIT_OF.get(words[0])
    return NumberReading(value, unit)


def _split_unit_words(text_after: str) -> list[str] | None:
    """Split the text after a number into words without dots; None if it cannot be a unit."""
    is_decade = text_after.startswith("s") and not text_after[1:2].isalpha()  # "1990s"
    phrase = text_after.removeprefix("-").strip().replace("per cent", "percent")
    words = []
    if phrase:
        words = [word.replace(".", "") for word in re.split("[ /·-]+", phrase)]
    is_only_a_hyphen = bool(text_after.strip()) and not words
    if is_decade or is_only_a_hyphen or len(words) > MAX_UNIT_WORDS:
        return None
    return words


def _may_be_unit(word: str) -> bool:
    if word in NO_UNIT_WORDS:
        return False
    letters = UNIT_POWER.sub("", word).replace("'", "")
    return word in UNIT_SIGNS or letters.isalpha()


def write_number(value: Fraction) -> str:
    """Write a number in its canonical form: a terminating decimal in full, any other number as a fraction.

    Example:
        >>> write_number(Fraction(7, 2)), write_number(Fraction(-1, 3)), write_number(Fraction(1000))
        ('3.5', '-1/3', '1000')
    """
    places = _count_decimal_places(value.denominator)
    if places is None:
        return str(value)
    shifted = abs(value.numerator) * 10**places // value.denominator  # the digits without the decimal point
    digits = str(shifted).rjust(places + 1, "0")  # at least one digit before the point
    sign = "-" if value < 0 else ""
    if places == 0:
        return sign + digits
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


def _count_decimal_places(denominator: int) -> int | None:
    """Count the decimal places of a reduced fraction; None if its decimal does not terminate."""
    # A decimal terminates if the denominator has no prime factors other than 2 and 5. Multiplying by 10 for one more
    # decimal place cancels a factor of 10, 2 or 5.
    remaining = denominator
    places = 0
    while remaining % 2 == 0 or remaining % 5 == 0:
        if remaining % 10 == 0:
            remaining //= 10
        elif remaining % 2 == 0:
            remaining //= 2
        else:
            remaining //= 5
        places += 1
    is_terminating = remaining == 1
    return places if is_terminating else None


# Grading


def find_answer_key(text: str, grade: Grade) -> str | None:
    """Return a key that is the same for equal answers: the normalised text, or the value of a number without its unit.

    Args:
        text: An answer.
        grade: `number` gives the value of a number; `exact` and `any-of` give the normalised text.

    Returns:
        The key; None if the text is empty or, for `number`, is not a single number.

    Example:
        >>> find_answer_key("The Beatles", "exact"), find_answer_key("$3.50", "number"), find_answer_key("?", "number")
        ('beatles', '3.5', None)
    """
    if grade == "number":
        reading = read_number(text)
        return None if reading is None else write_number(reading.value)
    return normalize_answer(text) or None


def grade_answer(answer: str, accepted: Sequence[str], *, grade: Grade = "exact", tolerance: float = 0.0) -> bool:
    """Return whether an answer equals one of the accepted answers.

    Args:
        answer: The answer, without tags.
        accepted: The accepted answers, at least one.
        grade: `exact` and `any-of` compare normalised texts; `number` compares values.
        tolerance: For `number`: maximum difference, as a share of the accepted value. At 0, values must be equal.
            Ignored otherwise.

    Returns:
        Whether the answer is right. An empty answer is wrong; so is one that is not a number if a number is expected.

    Raises:
        ValueError: There is no accepted answer, or one of them is empty or, for `number`, not a single number.

    Example:
        >>> grade_answer("The Beatles.", ["Beatles"]), grade_answer("Lennon", ["John Lennon", "Lennon"])
        (True, True)
        >>> grade_answer("$1,000", ["1000"], grade="number"), grade_answer("10%", ["0.1"], grade="number")
        (True, False)
        >>> grade_answer("0.33", ["1/3"], grade="number", tolerance=0.02)
        True
    """
    if not accepted:
        raise ValueError("expected at least one accepted answer")
    if grade == "number":
        return _equals_any_number(answer, accepted, tolerance)
    key = normalize_answer(answer)
    keys = [normalize_answer(text) for text in accepted]
    if "" in keys:
        raise ValueError("an accepted answer is empty")
    return key in keys


def _equals_any_number(answer: str, accepted: Sequence[str], tolerance: float) -> bool:
    """Whether the answer equals an accepted number; ValueError if any accepted answer is not a single number."""
    reading = read_number(answer)
    is_right = False
    for text in accepted:  # does not stop at a match, so that every accepted answer is checked
        wanted = read_number(text)
        if wanted is None:
            raise ValueError(f"accepted answer {text!r}: expected one number")
        if reading is not None and _is_same_number(reading, wanted, tolerance):
            is_right = True
    return is_right


def _is_same_number(reading: NumberReading, wanted: NumberReading, tolerance: float) -> bool:
    both_have_units = reading.unit is not None and wanted.unit is not None
    if both_have_units and reading.unit != wanted.unit:
        return False
    exact_tolerance = Fraction(str(tolerance))  # the decimal as written: 0.1 is exactly 1/10
    return abs(reading.value - wanted.value) <= exact_tolerance * abs(wanted.value)
