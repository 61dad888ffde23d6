"""Questions -> predictions: generate, find the label in the response, read its probability there.

The confidence is the raw full-vocabulary probability, at temperature 1, of the label's first token in the form in which
it was written. `source` is `free` after `<answer>`, `plain` where a response without that tag states its answer. A
response without an answer is closed and the most probable label taken there: `source` is `fallback`.

Predictions are stored by whole chunks, cut by the questions alone, in a journal: a killed run resumes behind the last
whole chunk, with the same batches and so the same numbers. Refused requests end up in `<name>.refused.jsonl`. For the
same reason shards are made of whole chunks, every n-th one: `merge` joins them to the file of one run, byte for byte.
A server's replies depend on no batch and may be paid for: each is stored as it arrives.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypedDict, TypeVar, Unpack

from catto.answer.confidence import Answer, AskedQuestion, Case, read_replies, read_token_answers, score_labels
from catto.answer.forms import VERSION
from catto.answer.tokens import check_labels
from catto.engines import Engine, Generation, Key, Request, ScoredGeneration
from catto.engines.replies import MOST_REFUSED, RefusalCap, count_reasons
from catto.files import library_versions, manifest_path, read_manifest, read_records
from catto.journal import Journal, read_refusals
from catto.metrics.selection import token_certainty
from catto.problems import DataError
from catto.prompts import asked_hash, check_ids, messages
from catto.records import Manifest, Prediction, Question, Refusal, Sampled, content_hash

R = TypeVar("R", ScoredGeneration, Prediction)
T = TypeVar("T")
Progress = Callable[[int, int, int], None]  # records done, of how many, how many of them are right predictions
Shard = tuple[int, int]  # its number, from 1, and how many there are
STOP = ("</answer>",)
# So many batches are generated before their predictions are written: a kill loses at most these.
BATCHES_A_CHUNK = 4
PLURALS: dict[type, str] = {ScoredGeneration: "generations", Prediction: "predictions"}
OTHER_RUN = "belongs to other settings, questions or another model: give those, or another file"


class Settings(TypedDict, total=False):
    """How questions are asked: `temperature` is one number for all k samples, or k numbers; 0 is greedy."""

    k: int  # 1
    temperature: float | Sequence[float]  # 0.0
    seed: int  # 0
    max_tokens: int  # 512
    reasoning: bool  # True


class Options(Settings, total=False):
    """The settings, and how they are run; no prediction depends on these."""

    out: Path | None  # None: no file
    progress: Progress | None
    retry_refused: bool  # False
    max_refused: float  # MOST_REFUSED
    shard: Shard | None  # None: all questions


def evaluate(engine: Engine, questions: Iterable[Question], **options: Unpack[Options]) -> list[Prediction]:
    """Answer every question k times; the predictions are in the order of the questions, then of the samples.

    options: k, temperature, seed, max_tokens and reasoning, by default one greedy response of at most 512 tokens with
    reasoning (see `Settings`). `out` is the file of predictions, its manifest beside
    it. It grows as `<name>.part.jsonl`: a killed run resumes and ends with the same file; a finished one is only read.

    A request that a server refuses for good has no prediction; it is listed in `<name>.refused.jsonl` with the reason,
    and `retry_refused` asks it again. More than a share `max_refused` of the questions raises ServerError.

    With `shard`, only that part of the questions is answered; `merge` joins the files of all shards.
    """
    job = _Job(engine, questions, **options)
    return job.collect(Prediction, lambda keys: job.predictions(job.generate(keys)))


def generate(engine: Engine, questions: Iterable[Question], **options: Unpack[Options]) -> list[ScoredGeneration]:
    """Generate what `evaluate` with the same options reads: the expensive half of it, resumable in the same way.

    The scores of the labels, as the present parser finds them, come with the text, while the engine has what makes them
    cheap.
    """
    job = _Job(engine, questions, **options)
    return job.collect(ScoredGeneration, lambda keys: job.each(partial(score_labels, engine), job.generate(keys)))


def read(
    engine: Engine,
    questions: Iterable[Question],
    generations: Iterable[Generation],
    *,
    out: Path | None = None,
    progress: Progress | None = None,
    **settings: Unpack[Settings],
) -> list[Prediction]:
    """Read the labels of `generate`'s generations from the scores stored with them; nothing is generated.

    `read(engine, questions, generate(engine, questions, **settings), **settings)` is `evaluate(engine, questions,
    **settings)`. The engine scores only labels that another parser finds elsewhere, by a pass over the whole sequence,
    equal up to float noise. What has no generation was refused and has no prediction.
    """
    job = _Job(engine, questions, out=out, progress=progress, max_refused=1.0, **settings)
    written = {generation.key: generation for generation in generations}
    if foreign := written.keys() - job.keys.keys():
        raise ValueError("question {} sample {} was generated and is not asked".format(*min(foreign)))

    def outcomes(keys: Sequence[Key]) -> Iterator[Generation | Refusal]:
        why = "the request was refused when it was generated"
        yield from (written.get(key) or Refusal(refused=why, question=key[0], sample=key[1]) for key in keys)
        if job.todo:
            yield from engine.generate(job.todo)

    return job.collect(Prediction, lambda keys: job.predictions(outcomes(keys)))


def merge(kind: type[R], questions: Iterable[Question], shards: Sequence[Path], out: Path) -> list[R]:
    """Join the files of all shards, in their order, to the one that `evaluate` or `generate` writes without shards.

    kind: Prediction or ScoredGeneration. A shard that is not finished is named by a DataError.
    """
    if missing := [f"{n}/{len(shards)}" for n, path in enumerate(shards, 1) if not manifest_path(path).exists()]:
        raise DataError(out, None, f"cannot be joined, not finished: shard {', '.join(missing)}")
    notes, listed = read_manifest(shards[0]).notes, list(questions)
    settings: Settings = {name: notes[name] for name in ("k", "seed", "max_tokens", "reasoning")}  # type: ignore[assignment]
    settings["temperature"] = tuple(notes["temperatures"])
    batch_size = -(-notes["chunk"] * notes["k"] // BATCHES_A_CHUNK)  # that gives the same chunks
    wrote = {"name": notes["engine"], "model": notes["model"], "positions": notes.get("positions")}
    engine: Any = SimpleNamespace(**wrote, batch_size=batch_size, tokenizer=None)  # it generates nothing more
    outcomes: dict[Key, R | Refusal] = {}
    for number, path in enumerate(shards, 1):
        job = _Job(engine, listed, shard=(number, len(shards)), **settings)
        if read_manifest(path).recipe_hash != job.manifest(kind).recipe_hash:
            raise DataError(path, None, OTHER_RUN)
        for stored in job.published(path, kind):
            outcomes |= {outcome.key: outcome for outcome in stored}
    whole = _Job(engine, listed, out=out, max_refused=1.0, **settings)
    return whole.collect(kind, lambda keys: [outcomes[key] for key in keys])


def shard_path(path: Path, shard: Shard) -> Path:
    """The file of a shard: `predictions.jsonl` -> `predictions.shard-1-of-3.jsonl`."""
    return path.with_name("{}.shard-{}-of-{}.jsonl".format(path.name.removesuffix(".jsonl"), *shard))


def evaluate_model(
    model: Any, tokenizer: Any, questions: Iterable[Question], *, batch_size: int = 16, **options: Any
) -> list[Prediction]:
    """`evaluate` on a loaded model of Transformers, with the same options."""
    from catto.engines.transformers import TransformersEngine

    return evaluate(TransformersEngine(model, tokenizer, batch_size=batch_size), questions, **options)


def is_correct(prediction: Prediction) -> bool:
    """Whether the label is the gold one."""
    return prediction.label == prediction.gold


def request_seed(seed: int, question: str, sample: int) -> int:
    """The seed of one response, 31 bits, by hash: servers would draw k equal samples from one seed.

    >>> request_seed(0, "q", 0) == request_seed(0, "q", 0) != request_seed(0, "q", 1)
    True
    """
    return int(content_hash([seed, question, sample]), 16) >> 33


def check_questions(questions: list[Question], k: int, temperature: float | Sequence[float]) -> tuple[float, ...]:
    """Return the temperature of each sample, or raise ValueError where the questions cannot be asked so."""
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    each = (temperature,) * k if isinstance(temperature, int | float) else tuple(temperature)
    if len(each) != k:
        raise ValueError(f"{len(each)} temperatures for k = {k} samples")
    if each.count(0) > 1:
        raise ValueError(f"k is {k} at temperature 0: all samples would be the same, give a temperature above 0")
    check_ids(questions)
    if not questions:
        raise ValueError("no questions to evaluate")
    return each


def chunk_size(batch_size: int, k: int) -> int:
    """How many questions are generated, scored and stored together."""
    return max(1, BATCHES_A_CHUNK * batch_size // k)


def check_settings(path: Path, settings: Mapping[str, object]) -> None:
    """Refuse the finished file of a run with other settings, as far as they are known before the model is loaded.

    settings: names and values of a manifest's notes; of the engine its kind, without versions.
    """
    if manifest_path(path).exists():
        notes = read_manifest(path).notes
        for name, value in settings.items():
            stored = notes.get(name, value)
            if (stored.split()[0] if name == "engine" else stored) != value:
                raise DataError(path, None, f"was made with {name} {stored!r}, not {value!r}: {OTHER_RUN}")


def refused_path(path: Path) -> Path:
    """The file of refusals: `predictions.jsonl` -> `predictions.refused.jsonl`."""
    return path.parent / (path.name.removesuffix(".jsonl") + ".refused.jsonl")


def refusals_of(path: Path) -> list[Refusal]:
    """The refused requests of a finished file of predictions."""
    return read_refusals(refused_path(path))


def prediction(
    question: Question, generation: Generation, answer: Answer, temperature: float, seed: int, engine: str
) -> Prediction:
    """The record of what was read of a response."""
    certainty, lowest = token_certainty(generation.tops) if generation.tops else (None, None)
    return Prediction(
        question=question.id,
        **question.model_dump(include={"task", "split", "gold"}),
        **generation.model_dump(include={"sample", "text", "mean_logprob", "tokens", "model"}),
        **answer._asdict(),
        self_certainty=certainty,
        lowest_group=lowest,
        temperature=temperature,
        seed=seed,
        engine=engine,
    )


class _Job:
    """One evaluation: the engine, its `Options`, and every (question, sample) with its prompt, rendered once."""

    def __init__(
        self,
        engine: Engine,
        questions: Iterable[Question],
        *,
        out: Path | None = None,
        progress: Progress | None = None,
        retry_refused: bool = False,
        max_refused: float = MOST_REFUSED,
        shard: Shard | None = None,
        k: int = 1,
        temperature: float | Sequence[float] = 0.0,
        seed: int = 0,
        max_tokens: int = 512,
        reasoning: bool = True,
    ) -> None:
        listed = list(questions)
        self.out, self.progress, self.retry_refused, self.max_refused = out, progress, retry_refused, max_refused
        self.engine, self.k, self.shard, self.seed, self.max_tokens = engine, k, shard, seed, max_tokens
        self.temperatures, self.reasoning = check_questions(listed, k, temperature), reasoning
        self.chunk = chunk_size(engine.batch_size, k)
        self.cases = {q.id: AskedQuestion(q, messages(q, reasoning=reasoning)) for q in listed}
        number, shards = shard or (1, 1)
        answered = [question for place, question in enumerate(listed) if place // self.chunk % shards == number - 1]
        keys = [(question.id, sample) for question in answered for sample in range(k)]
        self.keys = {key: place for place, key in enumerate(keys)}
        self.streams = engine.tokenizer is None  # outcomes depend on no batch, so they are stored one by one
        self.todo: deque[Request] = deque()

    @cached_property
    def reader(self) -> Callable[[Iterable[Generation | Refusal]], Iterator[tuple[Case, Answer] | Refusal]]:
        """What reads the labels of this engine's responses."""
        if self.engine.tokenizer is not None:
            return partial(self.each, lambda cases: zip(cases, read_token_answers(self.engine, cases), strict=True))
        from catto.engines.server import ServerEngine

        assert isinstance(self.engine, ServerEngine)
        if self.engine.top_logprobs == 0:
            raise ValueError("the server engine has top_logprobs 0: give up to 20, the confidence is read from them")
        self.engine.probe()
        return partial(read_replies, self.engine, self.cases, self.todo)

    def generate(self, keys: Sequence[Key]) -> Iterable[Generation | Refusal]:
        """What the engine gives for these keys, as it arrives."""
        self.todo.clear()
        for question, sample in keys:
            how: Any = {"temperature": self.temperatures[sample], "seed": request_seed(self.seed, question, sample)}
            how |= {"max_tokens": self.max_tokens, "stop": STOP, "keep_states": True}
            self.todo.append(Request(question=question, sample=sample, messages=self.cases[question][1], **how))
        return self.engine.generate(self.todo)

    def each(
        self, make: Callable[[list[Case]], Iterable[T]], outcomes: Iterable[Generation | Refusal]
    ) -> Iterator[T | Refusal]:
        """What `make` makes of the generations, as they arrive or all at once and in order, and the refusals."""
        in_order = partial(sorted, key=lambda outcome: self.keys[outcome.key])
        for group in ([outcome] for outcome in outcomes) if self.streams else [in_order(outcomes)]:
            yield from (outcome for outcome in group if isinstance(outcome, Refusal))
            yield from make([Case(*self.cases[one.question], one) for one in group if isinstance(one, Generation)])

    def predictions(self, outcomes: Iterable[Generation | Refusal]) -> Iterator[Prediction | Refusal]:
        """What is read of each response; a refusal where a reply came, but its label cannot be read.

        The reader comes first: a server whose replies cannot be read is refused before anything is generated.
        """
        for read in self.reader(outcomes):
            if isinstance(read, Refusal):
                yield read
                continue
            (question, _, generation), answer = read
            temperature = self.temperatures[generation.sample]
            yield prediction(question, generation, answer, temperature, self.seed, self.engine.name)

    def collect(self, kind: type[R], make: Callable[[Sequence[Key]], Iterable[R | Refusal]]) -> list[R]:
        """All records: from the file as far as it has them, the others from `make`, chunk by chunk or one by one.

        Refused requests are taken off the total of `progress`.
        """
        journal: Journal[R] | None = None
        if (out := self.out) is not None:
            journal = Journal(out, kind, self.manifest(kind), self.keys, refused=refused_path(out), other=OTHER_RUN)
            if journal.finished():
                published, left_out = self.published(out, kind)
                journal.remove()
                if not (self.retry_refused and left_out):
                    return published
                journal.reopen(refusals=True)
        with journal or nullcontext():
            width = (len(self.keys) or 1) if self.streams else self.chunk * self.k
            if journal is not None and not self.streams and len(journal.places) < len(self.keys):
                journal.cut(len(journal.places) // width * width)
            stored = list(journal.outcomes()) if journal is not None else []
            refused = {outcome.key: outcome for outcome in stored if isinstance(outcome, Refusal)}
            done = {outcome.key: outcome for outcome in stored if not isinstance(outcome, Refusal)}
            missing = [key for key in self.keys if key not in done and key not in refused]
            chunks = [missing[start : start + width] for start in range(0, len(missing), width)]
            again = list(refused) if self.retry_refused else []
            chunks += [again] if again else []
            if chunks and self.engine.tokenizer is not None:  # labels that tokens cannot tell apart are refused first
                for labels in dict.fromkeys(question.labels for question, _ in self.cases.values()):
                    check_labels(self.engine.tokenizer, labels)
            cap, right = RefusalCap(self.max_refused, done, refused), _right(done.values())
            for chunk in chunks:
                cap, made = RefusalCap(1.0) if chunk is again else cap, make(chunk)
                for outcomes in ([outcome] for outcome in made) if self.streams else [list(made)]:
                    for outcome in outcomes if journal is None else journal.append(*outcomes, sync=not self.streams):
                        refused.pop(outcome.key, None)
                        if isinstance(outcome, Refusal):
                            refused[outcome.key] = outcome
                        else:
                            done[outcome.key] = outcome
                            right += _right([outcome])
                        cap.count(outcome)
                    if self.progress is not None and done:
                        self.progress(len(done), len(self.keys) - len(refused), right)
            records = [done[key] for key in self.keys if key not in refused]
            refusals = [refused[key] for key in self.keys if key in refused]
            RefusalCap.check_some(len(records), refusals)
            if journal is not None:
                journal.publish(self.manifest(kind, records, refusals))
            elif refusals:
                why = count_reasons(refusals)
                warnings.warn(f"{len(refusals)} of {len(self.keys)} requests were refused: {why}", stacklevel=3)
        return records

    def published(self, out: Path, kind: type[R]) -> tuple[list[R], list[Refusal]]:
        """Records and refusals of the finished file; DataError where a row is not the expected one."""
        records = list(read_records(out, kind))
        stored = {record.key for record in records}  # a record replaces an older refusal
        refused = {refusal.key: refusal for refusal in refusals_of(out) if refusal.key not in stored}
        expected = [key for key in self.keys if key not in refused]
        for row, (record, (question, sample)) in enumerate(zip(records, expected, strict=False), 1):
            if record.key != (question, sample):
                raise DataError(out, row, f"expected question {question} sample {sample}")
        if len(records) != len(expected):
            raise DataError(out, None, f"{len(records)} {PLURALS[kind]}, expected {len(expected)}")
        return records, list(refused.values())

    def manifest(self, kind: type[R], records: Sequence[R] = (), refused: Sequence[Refusal] = ()) -> Manifest:
        """What the file holds; its hash is of the settings, the prompts and, of predictions, the parser's version."""
        parser = VERSION if kind is Prediction else None
        settings: dict[str, Any] = {"engine": self.engine.name, "model": self.engine.model}
        settings |= {"temperatures": self.temperatures, "seed": self.seed, "max_tokens": self.max_tokens}
        settings |= {"reasoning": self.reasoning, "chunk": self.chunk}
        notes = {**settings, "k": self.k}
        if self.shard is not None:
            notes["shard"] = "{}/{}".format(*self.shard)
        if len(set(self.temperatures)) == 1:
            notes["temperature"] = self.temperatures[0]
        # `read` closes generated responses within the positions
        notes |= {"positions": self.engine.positions} if parser is None else {"parser": parser}
        counts: dict[str, int] = {}
        if records:
            counts = {PLURALS[kind]: len(records), "questions": len(self.cases), "refused": len(refused)}
            counts["other_model"] = sum(record.model != self.engine.model for record in records)
        if predictions := [record for record in records if isinstance(record, Prediction)]:
            sources = Counter(prediction.source for prediction in predictions)
            counts |= {"correct": _right(predictions), "plain": sources["plain"], "fallback": sources["fallback"]}
            counts["without_label_logprobs"] = sum(prediction.label_logprobs is None for prediction in predictions)
        return Manifest(
            kind=PLURALS[kind],
            counts=counts,
            recipe_hash=content_hash([settings, asked_hash(self.cases.values()), parser, *(self.shard or ())]),
            seed=self.seed,
            versions=library_versions("transformers", "torch", "vllm", "httpx2"),
            notes=notes,
        )


def _right(records: Iterable[Sampled]) -> int:
    return sum(isinstance(record, Prediction) and is_correct(record) for record in records)
