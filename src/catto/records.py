"""The records that stages pass to each other: files with one JSON object per line, and a manifest next to each file.

`catto.io` reads and writes them. Reading validates: a bad row raises a `DataError` that names the file, row and field.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from catto.errors import shorten_text

SCHEMA_VERSION = 1

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
Unparsed = Literal["fallback", "wrong"]  # whether a forced answer counts like any other, or as wrong
Grade = Literal["exact", "number", "any-of"]  # how an answer without labels is compared with the accepted answers

# How an answer was found: inside its tags, without tags, or forced. `none` is a response without a short answer.
AnswerSource = Literal["free", "plain", "fallback", "none"]
# Where a confidence comes from. `label`: the probability of the label. `agreement`: the share of samples with the same
# answer. `ptrue`: the probability that the model calls its own answer right. `verbal`: the number that it states.
ConfidenceKind = Literal["label", "agreement", "ptrue", "verbal"]
CONFIDENCE_KINDS: tuple[ConfidenceKind, ...] = ("label", "agreement", "ptrue", "verbal")
GRADES: tuple[Grade, ...] = ("exact", "number", "any-of")

# In float32, the logarithm of a probability of 1 may be rounded up to this value.
LOGPROB_NOISE = 1e-6
# A number and not a string. NaN and values above the noise are refused; minus infinity is allowed.
LogProbability = Annotated[float, Field(strict=True, le=LOGPROB_NOISE)]


class Record(BaseModel):
    """An immutable record; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Key = tuple[str, int]  # (question id, number of the sample)


class Sampled(Record):
    """A record about one sample of one question."""

    if TYPE_CHECKING:  # each record declares both fields itself, because files keep the order of the declarations
        question: str
        sample: int

    @property
    def key(self) -> Key:
        """The pair (question, sample), which identifies the record."""
        return self.question, self.sample

    @property
    def name(self) -> str:
        """The name in error messages, such as `question q7 sample 0`."""
        return f"question {self.question} sample {self.sample}"


class Option(Record):
    """One choice of a question: its label and its text."""

    label: str
    text: str


class Question(Record):
    """A multiple-choice question, or a question without options whose answer is a short text or a number.

    Attributes:
        fields: The parts of its text by name (`question`, or `premise` and `hypothesis`).
        options: The choices; empty if the answer is a short text or a number.
        gold: The label of the right option, or the first accepted answer.
        posterior: Label -> exact probability, for tasks in which it is known.
        accepted: The accepted answers to a question without options.
        grade: How an answer is compared with the accepted ones.
        tolerance: For the grade `number`, the largest allowed difference as a share of the accepted value.

    >>> options = (Option(label="A", text="red"), Option(label="B", text="blue"))
    >>> Question(id="1", task="t", split="test", fields={"question": "Which?"}, options=options, gold="B").labels
    ('A', 'B')
    """

    id: str
    task: str
    split: Split
    fields: dict[str, str]
    options: tuple[Option, ...] = ()
    gold: str
    posterior: dict[str, float] | None = None
    # These three are stored only if set, so files of questions with options look as they did in older versions.
    accepted: tuple[str, ...] | None = Field(default=None, min_length=1, exclude_if=lambda accepted: accepted is None)
    grade: Grade | None = Field(default=None, exclude_if=lambda grade: grade is None)
    tolerance: float = Field(default=0.0, ge=0, exclude_if=lambda tolerance: tolerance == 0)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels in the order of the options."""
        return tuple(option.label for option in self.options)

    @property
    def has_labels(self) -> bool:
        """Whether the question is answered by the label of an option."""
        return len(self.options) > 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.accepted is not None:
            return self._check_accepted(self.accepted)
        labels = self.labels
        if len(labels) < 2:
            raise ValueError(f"{len(labels)} options, expected at least 2, or accepted answers")
        if len(set(labels)) != len(labels):
            raise ValueError(f"labels {', '.join(labels)} repeat")
        if self.gold not in labels:
            raise ValueError(f"gold {self.gold!r} is not one of {', '.join(labels)}")
        return self

    def _check_accepted(self, accepted: tuple[str, ...]) -> Self:
        if self.options:
            raise ValueError("accepted answers and options: expected one of them")
        if self.grade is None:
            raise ValueError("accepted answers without a grade")
        if self.gold != accepted[0]:
            raise ValueError(f"gold {self.gold!r} is not the first accepted answer {accepted[0]!r}")
        return self


class Response(Sampled):
    """A teacher's answer to a question, right or wrong, with the sampling settings."""

    question: str
    sample: int = Field(ge=0)
    text: str
    reasoning: str | None = None
    label: str | None = None
    correct: bool
    model: str
    temperature: float | None = Field(default=None, ge=0)
    temperature_acts: bool = True  # False if the server is known to ignore the temperature
    seed: int | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    mean_logprob: float | None = None
    finish_reason: str | None = None
    seconds: float | None = None


class Refusal(Sampled):
    """A request without a usable reply, which is left out.

    `refused` is the reason in one line, without the API key and the prompt. It is the first field, so that a refusal
    can be recognised by the beginning of its line.
    """

    refused: str
    question: str
    sample: int = Field(ge=0)


class Message(Record):
    """One turn of a chat, in the format of Transformers' chat templates."""

    role: Literal["system", "user", "assistant"]
    content: str


class SftRow(Record):
    """TRL's conversational prompt-completion format with our columns. `label` is the answer in the completion."""

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    question: str
    task: str
    labels: tuple[str, ...]
    gold: str
    label: str | None
    correctness_rate: float = Field(ge=0, le=1)
    # Label -> share of the question's samples; not stored if None.
    votes: dict[str, float] | None = Field(default=None, exclude_if=lambda votes: votes is None)

    @model_validator(mode="after")
    def _check_votes(self) -> Self:
        if self.votes is None:
            return self
        unknown = [label for label in self.votes if label not in self.labels]
        if unknown:
            raise ValueError(f"votes name {unknown[0]!r}, which is not one of {', '.join(self.labels)}")
        has_negative_share = min(self.votes.values(), default=0.0) < 0
        sums_to_one = abs(sum(self.votes.values()) - 1) <= 1e-6  # False for NaN
        if has_negative_share or not sums_to_one:
            raise ValueError(f"votes {self.votes} are not shares that sum to 1")
        return self


class PreferenceRow(Record):
    """TRL's conversational preference format with our columns."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    question: str
    task: str
    labels: tuple[str, ...]
    gold: str
    chosen_label: str
    rejected_label: str | None
    correctness_rate: float = Field(ge=0, le=1)


class Prediction(Sampled):
    """One sampled answer to a question; k samples are k lines. docs/conventions.md describes the fields."""

    question: str
    task: str
    split: Split
    gold: str
    sample: int = Field(ge=0)
    text: str
    label: str | None
    # The following four are not stored if None. Only confidences other than the label's own probability need them.
    answer: str | None = Field(default=None, exclude_if=lambda answer: answer is None)
    correct: bool | None = Field(default=None, exclude_if=lambda correct: correct is None)
    confidence_kind: ConfidenceKind | None = Field(default=None, exclude_if=lambda kind: kind is None)
    confidences: dict[str, Annotated[float, Field(ge=0, le=1)] | None] | None = Field(
        default=None, exclude_if=lambda confidences: confidences is None
    )
    source: AnswerSource
    confidence: float = Field(ge=0, le=1, strict=True)
    confidence_raw: float | None = None  # the confidence before calibration; None if no calibrator was applied
    label_logprobs: dict[str, LogProbability] | None = None
    logsumexp: dict[str, float] | None = None  # tau -> log-sum-exp(logits / tau) - max / tau
    mean_logprob: LogProbability | None = None
    self_certainty: float | None = None  # None unless the engine returns the candidates of every token
    lowest_group: float | None = None  # the lowest self-certainty of a group of consecutive tokens
    tokens: int | None = None
    temperature: float = Field(ge=0)
    seed: int
    engine: str
    model: str

    @property
    def is_correct(self) -> bool:
        """Whether the answer was graded as right; without a grade, whether the label is the gold label."""
        if self.correct is not None:
            return self.correct
        return self.label == self.gold

    @property
    def choice(self) -> str | None:
        """The label, or else the normalised answer, by which samples are compared; None if there is neither."""
        if self.label is not None:
            return self.label
        return self.answer

    @property
    def is_forced(self) -> bool:
        """Whether the response had no answer, so that the most probable label was taken."""
        return self.source == "fallback"

    def counts_as_correct(self, unparsed: Unparsed) -> bool:
        """Return whether the answer counts as right. With `wrong`, a forced answer never counts as right."""
        if unparsed == "wrong" and self.is_forced:
            return False
        return self.is_correct


class Protocol(Record):
    """How one answer is made from k samples. A threshold's guarantee depends on it, on the model and on the questions.

    Attributes:
        rule: How one of the samples is chosen.
        k: The number of samples.
        temperature: Their sampling temperature.
        fallback: Whether a response without an answer is continued to one (`answer`) or has no answer (`none`). None if
            every response had an answer.
        stop: The setting of adaptive k; None takes all k samples. Voting stops when the vote is settled, and `most
            confident` stops at this confidence.
        confidence_kind: The kind of the confidences; None means the labels' own probabilities.
    """

    rule: str
    k: int = Field(ge=1)
    temperature: float = Field(ge=0)
    fallback: Literal["answer", "none"] | None
    stop: float | None = None
    confidence_kind: ConfidenceKind | None = Field(default=None, exclude_if=lambda kind: kind is None)


class FinalAnswer(Record):
    """The answer chosen among a question's samples.

    Attributes:
        sample: The number of the chosen sample.
        confidence: Its confidence; calibrated if a calibrator was applied.
        confidence_raw: Its confidence before calibration.
        samples: How many samples were taken.
        votes: How many of these have the same label as the chosen one or, without labels, the same answer.
        tokens: Number of tokens of all samples that were taken; None if not known.
    """

    question: str
    sample: int
    label: str | None
    answer: str | None = Field(default=None, exclude_if=lambda answer: answer is None)
    gold: str
    correct: bool
    confidence: float = Field(ge=0, le=1, strict=True)
    confidence_raw: float = Field(ge=0, le=1)
    source: AnswerSource
    samples: int
    votes: int
    tokens: int | None

    @property
    def choice(self) -> str | None:
        """The label, or the answer if there is no label; None if there is neither."""
        return self.answer if self.label is None else self.label


class PairLogprobs(Record):
    """The log-probabilities of the two responses of a preference pair under one model: sums over tokens, in nats.

    Tokens at the beginning that both responses share are left out: they cancel in the difference of the two sums, and
    without them rounding cannot turn a tie into a difference. The reasoning is the text before the label; its sums are
    None if both responses have the same reasoning.
    """

    question: str
    chosen: float
    rejected: float
    chosen_reasoning: float | None
    rejected_reasoning: float | None


class PairMargin(Record):
    """How much a model's implicit reward prefers the chosen response of a held-out pair, in nats.

    Attributes:
        whole: The margin over the whole responses.
        reasoning: The margin over the tokens before the label; None if both responses have the same reasoning.
    """

    question: str
    whole: float
    reasoning: float | None


class Manifest(Record):
    """Describes the file of records next to it: what the records are, how they were made, and how many there are."""

    schema_version: int = SCHEMA_VERSION
    kind: str
    counts: dict[str, int]
    recipe_hash: str | None = None
    seed: int | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    notes: dict[str, Any] = Field(default_factory=dict)


_NAME = re.compile(r"(?=.*[^.])[A-Za-z0-9._+-]{1,64}", re.ASCII)


def checked_name(name: str, what: str, plus: bool = False) -> str:
    """Return the name unchanged if it is safe as a part of a path; otherwise raise ValueError.

    Args:
        name: The name.
        what: What has this name, such as `task`; used in the message.
        plus: Whether `+` is allowed, as in `dpo+catto`.

    >>> checked_name("../escaped", "task")
    Traceback (most recent call last):
    ValueError: task name '../escaped': expected letters, digits and ._-, at most 64, not dots alone
    """
    has_refused_plus = "+" in name and not plus
    if not _NAME.fullmatch(name) or has_refused_plus:
        signs = "._-+" if plus else "._-"
        shown = shorten_text(repr(name), 80)
        raise ValueError(f"{what} name {shown}: expected letters, digits and {signs}, at most 64, not dots alone")
    return name


def content_hash(value: object, length: int = 16) -> str:
    """Return the first `length` (at most 64) hex digits of a hash of any JSON value. The order of keys does not matter.

    >>> content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]
