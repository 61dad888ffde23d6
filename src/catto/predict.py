"""Turn questions into predictions: generate a response, find the label in it, and read the label's probability there.

The confidence is the raw probability of the label's first token, in the form in which it was written, over the full
vocabulary and at temperature 1. `source` is `free` for a label after `<answer>`, and `plain` if a response without that
tag states its answer. A response without an answer is closed, and the most probable label is taken: `fallback`.

Predictions are stored in a journal in whole chunks, whose boundaries depend only on the questions. A killed run resumes
after the last whole chunk, with the same batches and so the same numbers. Refused requests are listed in
`<name>.refused.jsonl`. A server's replies do not depend on batches and may cost money, so each is stored as it arrives.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypedDict, TypeVar, Unpack

from catto.answer import forms
from catto.answer.confidence import (
    Answer,
    AnsweredCase,
    AskedQuestion,
    Case,
    read_replies,
    read_token_answers,
    score_labels,
)
from catto.answer.tokens import check_labels
from catto.engines import Engine, Generation, Key, Request, ScoredGeneration
from catto.engines.replies import MOST_REFUSED, RefusalCap, count_reasons
from catto.errors import DataError
from catto.io.journal import Journal, read_refusals
from catto.io.record_files import library_versions, manifest_path, read_manifest, read_records
from catto.metrics.selection import token_certainty
from catto.prompts import asked_hash, check_ids, render_messages
from catto.records import Manifest, Message, Prediction, Question, Refusal, Sampled, content_hash

if TYPE_CHECKING:
    from catto.engines.server import ServerEngine

R = TypeVar("R", ScoredGeneration, Prediction)
T = TypeVar("T")
EvaluationProgress = Callable[[int, int, int], None]  # (records so far, all records, correct predictions)
# Texts at which a response ends, and those for a response that also states a confidence.
STOP = ("</answer>",)
STOP_STATED = ("</confidence>",)
# Predictions are written after this many batches, so a kill loses at most these.
BATCHES_PER_CHUNK = 4
# What the records are called in manifests and messages.
PLURALS: dict[type, str] = {ScoredGeneration: "generations", Prediction: "predictions"}
OTHER_RUN = "belongs to other settings, questions or a different model: use those, or a different file"


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments that say how questions are asked; see `EvaluationRunSettings`."""

    k: int
    temperature: float | Sequence[float]
    seed: int
    max_tokens: int
    reasoning: bool
    stated: bool


class EvaluationOptions(SamplingOptions, total=False):
    """All keyword arguments of an evaluation; see `EvaluationRunSettings` for their meanings and defaults."""

    out: Path | None
    progress: EvaluationProgress | None
    retry_refused: bool
    max_refused: float


@dataclass(frozen=True)
class EvaluationRunSettings:
    """How questions are asked, and how the evaluation runs. No prediction depends on the fields from `out` on.

    Attributes:
        k: Samples per question.
        temperature: One sampling temperature for all k samples, or k of them; 0 means greedy decoding.
        seed: Seed of the samples.
        max_tokens: Maximum number of generated tokens.
        reasoning: Whether the model is asked to reason before it answers.
        stated: Whether the model is asked to state its confidence after the answer.
        out: The file of records; None writes no file.
        progress: Called with the number of records so far, of all records, and of correct predictions; None reports
            nothing.
        retry_refused: Whether the requests that an earlier run stored as refused are sent again.
        max_refused: Largest share of refused questions; a larger share raises ServerError, and 1 means no limit.
    """

    k: int = 1
    temperature: float | Sequence[float] = 0.0
    seed: int = 0
    max_tokens: int = 512
    reasoning: bool = True
    stated: bool = False
    out: Path | None = None
    progress: EvaluationProgress | None = None
    retry_refused: bool = False
    max_refused: float = MOST_REFUSED


# Ask a model


def evaluate(engine: Engine, questions: Iterable[Question], **options: Unpack[EvaluationOptions]) -> list[Prediction]:
    """Answer every question k times.

    A run with the file `out` can be killed and started again: it resumes, and gives the same file. Until the run is
    finished, its predictions are in `<name>.part.jsonl`. If the file is already finished, it is read, and nothing is
    generated. A request that a server refuses for good has no prediction and is listed in `<name>.refused.jsonl`.

    Args:
        engine: The engine that runs the model.
        questions: The questions, with distinct ids.
        **options: The fields of `EvaluationRunSettings`; by default one greedy response of at most 512 tokens with
            reasoning, and no file.

    Returns:
        The predictions in the order of the questions, then of the samples.

    Raises:
        ValueError: The questions cannot be asked with these settings; see `check_evaluation`.
        DataError: `out` was made with other settings or questions, or with a different model.
        ServerError: Too many requests were refused.
    """
    run = EvaluationRun(engine, questions, EvaluationRunSettings(**options))
    return run.collect(Prediction, run.answer_keys)


def generate(
    engine: Engine, questions: Iterable[Question], **options: Unpack[EvaluationOptions]
) -> list[ScoredGeneration]:
    """Generate the responses that `evaluate` with the same options reads; it resumes in the same way.

    The scores of the labels at the answer, as the current parser finds it, are stored with the text. Scoring is cheap
    at this point, because the engine still has the hidden states of the responses.

    Args:
        engine: The engine that runs the model.
        questions: The questions, with distinct ids.
        **options: The fields of `EvaluationRunSettings`.

    Returns:
        The generations in the order of the questions, then of the samples.
    """
    run = EvaluationRun(engine, questions, EvaluationRunSettings(**options))
    return run.collect(ScoredGeneration, run.score_keys)


def read(
    engine: Engine,
    questions: Iterable[Question],
    generations: Iterable[Generation],
    *,
    out: Path | None = None,
    progress: EvaluationProgress | None = None,
    **sampling: Unpack[SamplingOptions],
) -> list[Prediction]:
    """Read the labels of `generate`'s generations from the scores stored with them; no response is generated again.

    `read(engine, questions, generate(engine, questions, **options), **options)` equals `evaluate(engine, questions,
    **options)`. The engine is used in two cases:

    - If a different parser version finds a label elsewhere than the stored one, a local engine scores the label by a
      pass over the whole sequence, which is equal up to float noise.
    - If a server's reply is incomplete, the server is asked to continue it by one token, as in `evaluate`.

    Args:
        engine: The engine that generated the responses, or an equivalent one.
        questions: The questions that were asked.
        generations: The stored generations.
        out: The file of predictions; None writes no file.
        progress: Called with the number of predictions so far, of all predictions, and of correct ones; None reports
            nothing.
        **sampling: How the questions were asked; see `EvaluationRunSettings`.

    Returns:
        The predictions in the order of the questions, then of the samples. A sample without a generation was refused
        and has no prediction.

    Raises:
        ValueError: A generation is for a question or sample that `questions` and `sampling` do not include.
    """
    # There is no limit on refusals here: it was checked when the responses were generated.
    settings = EvaluationRunSettings(out=out, progress=progress, max_refused=1.0, **sampling)
    run = EvaluationRun(engine, questions, settings)
    generation_of = {generation.key: generation for generation in generations}
    not_asked = generation_of.keys() - run.keys.keys()
    if not_asked:
        question, sample = min(not_asked)
        raise ValueError(f"question {question} sample {sample} was generated, but is not asked for")

    def list_outcomes(keys: Sequence[Key]) -> Iterator[Generation | Refusal]:
        for key in keys:
            if key in generation_of:
                yield generation_of[key]
            else:
                reason = "the request was refused when it was generated"
                yield Refusal(refused=reason, question=key[0], sample=key[1])
        # By now all generations have been read. For a server's reply, this may have added a request to continue it.
        if run.todo:
            yield from engine.generate(run.todo)

    return run.collect(Prediction, lambda keys: run.make_predictions(list_outcomes(keys)))


def evaluate_model(
    model: Any, tokenizer: Any, questions: Iterable[Question], *, batch_size: int = 16, **options: Any
) -> list[Prediction]:
    """Run `evaluate` on a model that is already loaded with Transformers.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        questions: The questions, with distinct ids.
        batch_size: Number of responses that are generated at once.
        **options: The fields of `EvaluationRunSettings`, as for `evaluate`.

    Returns:
        The predictions in the order of the questions, then of the samples.
    """
    from catto.engines.transformers import TransformersEngine

    return evaluate(TransformersEngine(model, tokenizer, batch_size=batch_size), questions, **options)


def count_correct(records: Iterable[Sampled]) -> int:
    """Count the correct predictions among records."""
    return sum(isinstance(record, Prediction) and record.is_correct for record in records)


def make_prediction(
    question: Question, generation: Generation, answer: Answer, *, temperature: float, seed: int, engine: str
) -> Prediction:
    """Make the record of the answer that was read from a response to a question."""
    return Prediction(
        question=question.id,
        **question.model_dump(include={"task", "split", "gold"}),
        **describe_answer(generation, answer),
        temperature=temperature,
        seed=seed,
        engine=engine,
    )


def describe_answer(generation: Generation, answer: Answer) -> dict[str, Any]:
    """Return the fields of a prediction that come from the response and its answer."""
    certainty = None
    lowest_group = None
    if generation.tops:  # the most probable tokens at each position, which only servers return
        certainty, lowest_group = token_certainty(generation.tops)
    return {
        **generation.model_dump(include={"sample", "text", "mean_logprob", "tokens", "model"}),
        **answer._asdict(),
        "self_certainty": certainty,
        "lowest_group": lowest_group,
    }


# What is checked and decided before a run


def request_seed(seed: int, question: str, sample: int) -> int:
    """Return the seed of one response: 31 bits of a hash of the run's seed, the question's id and the sample's number.

    With the same seed for all requests, a server would draw the same sample k times.

    Example:
        >>> request_seed(0, "q", 0) == request_seed(0, "q", 0) != request_seed(0, "q", 1)
        True
    """
    return int(content_hash([seed, question, sample]), 16) >> 33


def check_evaluation(questions: list[Question], k: int, temperature: float | Sequence[float]) -> tuple[float, ...]:
    """Check that questions can be asked with these settings.

    Args:
        questions: The questions.
        k: Samples per question.
        temperature: One temperature for all samples, or k of them.

    Returns:
        The temperature of each of the k samples.

    Raises:
        ValueError: There are no questions, two share an id, k is below 1, the number of temperatures is not k, or
            several samples have temperature 0.
    """
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    if isinstance(temperature, int | float):
        temperatures: tuple[float, ...] = (temperature,) * k
    else:
        temperatures = tuple(temperature)
    if len(temperatures) != k:
        raise ValueError(f"{len(temperatures)} temperatures for k = {k} samples")
    if temperatures.count(0) > 1:
        raise ValueError(f"k is {k} at temperature 0: all samples would be the same; use a temperature above 0")
    check_ids(questions)
    if not questions:
        raise ValueError("no questions to evaluate")
    return temperatures


def chunk_size(batch_size: int, k: int) -> int:
    """Return how many questions are generated, scored and stored together, with k samples each."""
    return max(1, BATCHES_PER_CHUNK * batch_size // k)


def check_settings(path: Path, settings: Mapping[str, object]) -> None:
    """Raise DataError if a finished file was made with other settings; this needs no model.

    Args:
        path: The file of predictions. Without a manifest, it is not finished, and nothing is checked.
        settings: The settings that are known before the model is loaded, named as in the manifest's notes. `engine` is
            the kind of the engine, without versions. Settings that the notes do not contain are not checked.
    """
    if not manifest_path(path).exists():
        return
    notes = read_manifest(path).notes
    for name, value in settings.items():
        if name not in notes:
            continue
        stored = notes[name]
        comparable = stored
        if name == "engine":
            comparable = stored.split()[0]  # versions follow
        if comparable != value:
            raise DataError(path, None, f"was made with {name} {stored!r}, not {value!r}: {OTHER_RUN}")


# Files


def refused_path(path: Path) -> Path:
    """Return the file of refusals: `predictions.jsonl` -> `predictions.refused.jsonl`."""
    return path.parent / (path.name.removesuffix(".jsonl") + ".refused.jsonl")


def read_refused_requests(path: Path) -> list[Refusal]:
    """Read the refused requests of a finished file of predictions."""
    return read_refusals(refused_path(path))


# The run


class PublishedOutcomes(NamedTuple, Generic[R]):
    """The records of a finished file, and the refusals of the file next to it."""

    records: list[R]
    refusals: list[Refusal]


@dataclass
class RunOutcomes(Generic[R]):
    """The outcomes of a run so far: records and refusals by key, and the number of correct predictions."""

    records: dict[Key, R]
    refusals: dict[Key, Refusal]
    correct: int

    def add(self, outcome: R | Refusal) -> None:
        """Add an outcome; it replaces an older refusal with the same key."""
        self.refusals.pop(outcome.key, None)
        if isinstance(outcome, Refusal):
            self.refusals[outcome.key] = outcome
        else:
            self.records[outcome.key] = outcome
            self.correct += count_correct([outcome])


class EvaluationRun:
    """One evaluation: asks every question k times, and stores one record or refusal for each (question, sample).

    Args:
        engine: The engine that runs the model.
        questions: The questions, with distinct ids.
        settings: How they are asked, and how the run is stored.
        chats: Question id -> the messages that ask it; None means that each question is rendered as usual.

    Attributes:
        engine: The engine.
        settings: The settings.
        temperatures: The temperature of each of the k samples.
        questions_per_chunk: How many questions are generated, scored and stored together.
        asked: Question id -> the question and the messages that ask it.
        keys: Every (question id, sample) -> its position in the file.
        stores_each: Whether each outcome is stored as it arrives. This is so for a server, whose replies do not depend
            on batches.
        todo: The requests that the engine still has to send. Reading a server's reply may add one that continues it.
    """

    def __init__(
        self,
        engine: Engine,
        questions: Iterable[Question],
        settings: EvaluationRunSettings,
        chats: Mapping[str, tuple[Message, ...]] | None = None,
    ) -> None:
        listed = list(questions)
        self.engine = engine
        self.settings = settings
        self.temperatures = check_evaluation(listed, settings.k, settings.temperature)
        self.questions_per_chunk = chunk_size(engine.batch_size, settings.k)
        self.asked: dict[str, AskedQuestion] = {}
        for question in listed:
            if chats is not None:
                chat = chats[question.id]
            else:
                chat = render_messages(question, reasoning=settings.reasoning, confidence=settings.stated)
            self.asked[question.id] = AskedQuestion(question, chat)
        self.keys: dict[Key, int] = {}
        for question in listed:
            for sample in range(settings.k):
                self.keys[question.id, sample] = len(self.keys)
        is_server = engine.tokenizer is None
        self.stores_each = is_server
        self.todo: deque[Request] = deque()

    # Generate and read

    def answer_keys(self, keys: Sequence[Key]) -> Iterator[Prediction | Refusal]:
        """Generate the responses for these keys and read their answers."""
        return self.make_predictions(self.generate_responses(keys))

    def score_keys(self, keys: Sequence[Key]) -> Iterator[ScoredGeneration | Refusal]:
        """Generate the responses for these keys and score their labels."""
        return self._process_cases(lambda cases: score_labels(self.engine, cases), self.generate_responses(keys))

    def generate_responses(self, keys: Sequence[Key]) -> Iterable[Generation | Refusal]:
        """Return the engine's responses and refusals for these keys, as they arrive."""
        self.todo.clear()
        for question, sample in keys:
            request = Request(
                question=question,
                sample=sample,
                messages=self.asked[question].chat,
                temperature=self.temperatures[sample],
                seed=request_seed(self.settings.seed, question, sample),
                max_tokens=self.settings.max_tokens,
                stop=STOP_STATED if self.settings.stated else STOP,
                keep_states=self.asked[question].question.has_labels,  # from which the labels are scored later
            )
            self.todo.append(request)
        return self.engine.generate(self.todo)

    def make_predictions(self, outcomes: Iterable[Generation | Refusal]) -> Iterator[Prediction | Refusal]:
        """Read each response. Refusals are passed on, and a reply whose label cannot be read becomes one."""
        for outcome in self._read_answers(outcomes):
            if isinstance(outcome, Refusal):
                yield outcome
                continue
            generation = outcome.case.generation
            yield make_prediction(
                self.asked[generation.question].question,
                generation,
                outcome.answer,
                temperature=self.temperatures[generation.sample],
                seed=self.settings.seed,
                engine=self.engine.name,
            )

    def _read_answers(self, outcomes: Iterable[Generation | Refusal]) -> Iterator[AnsweredCase | Refusal]:
        """Read the answers from the texts and candidates of a server, or from the token ids of a local engine."""
        if self.engine.tokenizer is None:
            return read_replies(self._readable_server, self.asked, self.todo, outcomes)
        return self._process_cases(self._read_cases, outcomes)

    @cached_property
    def _readable_server(self) -> ServerEngine:
        """The engine, which is a server. The first access, before anything is generated, checks that it can be used.

        Raises:
            ValueError: The engine does not request log-probabilities.
            ServerError: The server does not answer, or returns no log-probabilities.
        """
        from catto.engines.server import ServerEngine

        assert isinstance(self.engine, ServerEngine)  # the only engine without a tokenizer
        if self.engine.top_logprobs == 0:
            raise ValueError("the server engine has top_logprobs 0: set up to 20, the confidence is read from them")
        self.engine.probe()
        return self.engine

    def _read_cases(self, cases: list[Case]) -> Iterator[AnsweredCase]:
        for case, answer in zip(cases, read_token_answers(self.engine, cases), strict=True):
            yield AnsweredCase(case, answer)

    def _process_cases(
        self, process: Callable[[list[Case]], Iterable[T]], outcomes: Iterable[Generation | Refusal]
    ) -> Iterator[T | Refusal]:
        """Yield the refusals, and the results of `process`, which is called with the generations of each group."""
        for group in self._group_outcomes(outcomes):
            cases = []
            for outcome in group:
                if isinstance(outcome, Refusal):
                    yield outcome
                else:
                    question, chat = self.asked[outcome.question]
                    cases.append(Case(question, chat, outcome))
            yield from process(cases)

    def _group_outcomes(self, outcomes: Iterable[Generation | Refusal]) -> Iterator[Sequence[Generation | Refusal]]:
        """Yield the groups that are processed together: each reply of a server alone as it arrives, or all outcomes.

        An engine may finish its responses in any order. They are sorted, so that the batches in which their labels are
        scored are always the same.
        """
        if self.stores_each:
            for outcome in outcomes:
                yield [outcome]
        else:
            yield sorted(outcomes, key=lambda outcome: self.keys[outcome.key])

    # Collect and store

    def collect(self, kind: type[R], make: Callable[[Sequence[Key]], Iterable[R | Refusal]]) -> list[R]:
        """Return all records: read those that the file or its journal has, make the others, and write the file.

        Args:
            kind: Prediction or ScoredGeneration.
            make: Yields the record or refusal of each key that it is given.

        Returns:
            The records in the order of the keys, without the refused ones.

        Raises:
            DataError: The file was made with other settings or questions, or with a different model.
            ServerError: Too many requests were refused.
        """
        out = self.settings.out
        if out is None:
            return self._complete_records(kind, make, journal=None)
        manifest = self.make_manifest(kind)
        journal = Journal(out, kind, manifest, self.keys, refused=refused_path(out), other_run_error=OTHER_RUN)
        if journal.finished():
            published = self.read_published(out, kind)
            journal.remove()  # a run that was killed while publishing leaves its journal
            asks_again = self.settings.retry_refused and len(published.refusals) > 0
            if not asks_again:
                return published.records
            journal.reopen(refusals=True)  # a refusal is kept until a new outcome replaces it
        with journal:
            return self._complete_records(kind, make, journal)

    def _complete_records(
        self, kind: type[R], make: Callable[[Sequence[Key]], Iterable[R | Refusal]], journal: Journal[R] | None
    ) -> list[R]:
        """Make the records that the journal lacks, publish all of them, and return them in the order of the keys.

        Without a journal, nothing is stored, and refusals are reported in a warning.
        """
        collected = self._read_journal(journal)
        missing = [key for key in self.keys if key not in collected.records and key not in collected.refusals]
        asked_again = list(collected.refusals) if self.settings.retry_refused else []
        if missing or asked_again:  # otherwise nothing is generated
            self._check_labels()
        # Raises an error if too many questions are refused.
        cap = RefusalCap(self.settings.max_refused, collected.records, collected.refusals)
        chunk_length = self._count_keys_per_chunk()
        for start in range(0, len(missing), chunk_length):
            chunk = missing[start : start + chunk_length]
            self._add_outcomes(make(chunk), collected, cap, journal)
        if asked_again:
            no_cap = RefusalCap(1.0)  # `cap` already includes these refusals
            self._add_outcomes(make(asked_again), collected, no_cap, journal)
        records = [collected.records[key] for key in self.keys if key not in collected.refusals]
        refusals = [collected.refusals[key] for key in self.keys if key in collected.refusals]
        RefusalCap.require_answers(len(records), refusals)
        if journal is not None:
            journal.publish(self.make_manifest(kind, records, refusals))
        elif refusals:
            reasons = count_reasons(refusals)
            # The warning points to the caller of `evaluate`.
            warnings.warn(f"{len(refusals)} of {len(self.keys)} requests were refused: {reasons}", stacklevel=4)
        return records

    def _count_keys_per_chunk(self) -> int:
        """Return how many keys are made together; a server is asked for all of them at once."""
        if self.stores_each:
            return len(self.keys)
        return self.questions_per_chunk * self.settings.k

    def _read_journal(self, journal: Journal[R] | None) -> RunOutcomes[R]:
        """Read the stored outcomes, none without a journal.

        An incomplete chunk is dropped, so that making it again uses the same batches. The last chunk of a run may be
        shorter than the others, but it is complete if all outcomes are stored. A server has no chunks.
        """
        collected: RunOutcomes[R] = RunOutcomes(records={}, refusals={}, correct=0)
        if journal is None:
            return collected
        stored = len(journal.places)
        all_are_stored = stored == len(self.keys)
        if not self.stores_each and not all_are_stored:
            chunk_length = self._count_keys_per_chunk()
            complete_chunks = stored // chunk_length
            journal.keep_first(complete_chunks * chunk_length)
        for outcome in journal.outcomes():
            collected.add(outcome)
        return collected

    def _check_labels(self) -> None:
        """Raise an error for labels that their tokens do not distinguish, before anything is generated."""
        if self.engine.tokenizer is None:
            return
        label_sets = dict.fromkeys(asked.question.labels for asked in self.asked.values() if asked.question.has_labels)
        for labels in label_sets:
            check_labels(self.engine.tokenizer, labels)

    def _add_outcomes(
        self,
        outcomes: Iterable[R | Refusal],
        collected: RunOutcomes[R],
        cap: RefusalCap,
        journal: Journal[R] | None,
    ) -> None:
        """Store the outcomes of a chunk, together or each as it arrives, and report the progress."""
        if not self.stores_each:
            self._add_group(list(outcomes), collected, cap, journal)
            return
        for outcome in outcomes:
            self._add_group([outcome], collected, cap, journal)

    def _add_group(
        self, group: list[R | Refusal], collected: RunOutcomes[R], cap: RefusalCap, journal: Journal[R] | None
    ) -> None:
        """Store outcomes together, count them and report the progress; raise ServerError for too many refusals."""
        if journal is not None:
            # Every chunk is flushed to disk. For a server, this would be a flush after every single reply.
            group = journal.append(*group, sync=not self.stores_each)
        for outcome in group:
            collected.add(outcome)
            cap.count(outcome)
        if self.settings.progress is not None and collected.records:  # an accuracy needs at least one record
            total = len(self.keys) - len(collected.refusals)
            self.settings.progress(len(collected.records), total, collected.correct)

    def read_published(self, out: Path, kind: type[R]) -> PublishedOutcomes[R]:
        """Read the records and refusals of a finished file.

        Raises:
            DataError: The records are not those of this run, in the order of its keys.
        """
        records = list(read_records(out, kind))
        stored = {record.key for record in records}
        refusals: dict[Key, Refusal] = {}
        for refusal in read_refused_requests(out):
            if refusal.key not in stored:  # a record replaces an older refusal
                refusals[refusal.key] = refusal
        expected = [key for key in self.keys if key not in refusals]
        # Not strict: rows are compared first, because the error for the first wrong row says more than the numbers.
        for row, (record, key) in enumerate(zip(records, expected, strict=False), 1):
            if record.key != key:
                question, sample = key
                raise DataError(out, row, f"expected question {question} sample {sample}")
        if len(records) != len(expected):
            raise DataError(out, None, f"{len(records)} {PLURALS[kind]}, expected {len(expected)}")
        return PublishedOutcomes(records, list(refusals.values()))

    # Manifest

    def make_manifest(self, kind: type[R], records: Sequence[R] = (), refused: Sequence[Refusal] = ()) -> Manifest:
        """Make the manifest that identifies a run and, once it has records, also counts them.

        The hash covers the settings, the prompts and, for predictions, the parser's version. Generations can be read by
        any version of the parser, so their hash does not include it.

        Args:
            kind: Prediction or ScoredGeneration.
            records: All records of the run; empty before it begins.
            refused: The refused requests.

        Returns:
            The manifest. Its hash is the same before and after the run.
        """
        hashed = self._hashed_settings()
        # `k` and `temperature` are noted for `check_settings`, which compares them with the options of a later command.
        # They are not hashed: `temperatures`, with one entry per sample, already is. The options have room for one
        # temperature only, so it is not noted if the samples have different ones.
        notes = {**hashed, "k": self.settings.k}
        if len(set(self.temperatures)) == 1:
            notes["temperature"] = self.temperatures[0]
        parser_version = None
        if kind is Prediction:
            parser_version = forms.VERSION
            notes["parser"] = parser_version
        else:
            # Stored generations are read later, usually without loading the model. A response without an answer is then
            # closed, which must not make it longer than the model allows.
            notes["positions"] = self.engine.positions
        identity = [hashed, asked_hash(self.asked.values()), parser_version]
        return Manifest(
            kind=PLURALS[kind],
            counts=self._count_outcomes(kind, records, refused),
            recipe_hash=content_hash(identity),
            seed=self.settings.seed,
            versions=library_versions("transformers", "torch", "vllm", "httpx2"),
            notes=notes,
        )

    def _hashed_settings(self) -> dict[str, Any]:
        """Return the settings on which the records depend: those of the batches as well, because of rounding."""
        hashed = {
            "engine": self.engine.name,
            "model": self.engine.model,
            "temperatures": self.temperatures,
            "seed": self.settings.seed,
            "max_tokens": self.settings.max_tokens,
            "reasoning": self.settings.reasoning,
            "chunk": self.questions_per_chunk,
        }
        if self.settings.stated:  # left out otherwise, so that older files without this setting keep their hash
            hashed["stated"] = True
        return hashed

    def _count_outcomes(self, kind: type[R], records: Sequence[R], refused: Sequence[Refusal]) -> dict[str, int]:
        """Count the records and refusals of a finished run; return no counts for a run without records.

        `other_model` is the number of responses from a model with a different name than the one that was asked for.
        """
        if not records:
            return {}
        counts = {
            PLURALS[kind]: len(records),
            "questions": len(self.asked),
            "refused": len(refused),
            "other_model": sum(record.model != self.engine.model for record in records),
        }
        predictions = [record for record in records if isinstance(record, Prediction)]
        if predictions:
            sources = Counter(prediction.source for prediction in predictions)
            counts["correct"] = count_correct(predictions)
            counts["plain"] = sources["plain"]
            counts["fallback"] = sources["fallback"]
            counts["without_label_logprobs"] = sum(prediction.label_logprobs is None for prediction in predictions)
        return counts
