"""Questions -> predictions: generate, find the label in the generated tokens, read its probability there.

The confidence is the raw full-vocabulary probability, at temperature 1, of the label's first token in the form in which
it was written. `source` is `free` after `<answer>`, `plain` where a response without that tag states its answer. Where
there is no answer the response is closed and the most probable label taken there: `source` is `fallback`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from catto.engines import Engine, Generation, Key, Request
from catto.engines.replies import MOST_REFUSED, RefusalCap, told
from catto.labels import check_labels
from catto.metrics.temperature import confidence_at
from catto.predict.label_reader import Answer, TokenReader
from catto.predict.predictions import ChunkFile, R, Run, parted
from catto.prompts import messages
from catto.records import Prediction, Question, Refusal, content_hash

__all__ = [
    "Answer",
    "Progress",
    "check_questions",
    "confidence_at",
    "evaluate",
    "evaluate_model",
    "generate",
    "is_correct",
    "read",
    "request_seed",
]

Progress = Callable[[int, int, int], None]  # predictions done, of how many, how many of them right
Unparsed = Literal["fallback", "wrong"]
STOP = ("</answer>",)
# So many batches are generated before their predictions are written: a kill loses at most these.
BATCHES_A_CHUNK = 4
UNWRITTEN = "the request was refused when it was generated"
Asked = tuple[Question, int]  # a question and the number of a sample


def evaluate(
    engine: Engine,
    questions: Iterable[Question],
    *,
    k: int = 1,
    temperature: float | Sequence[float] = 0.0,
    seed: int = 0,
    max_tokens: int = 512,
    reasoning: bool = True,
    out: Path | None = None,
    progress: Progress | None = None,
    retry_refused: bool = False,
    max_refused: float = MOST_REFUSED,
) -> list[Prediction]:
    """Answer every question k times; the predictions come in the order of the questions, then of the samples.

    `temperature` is one number for all k samples, or k numbers. `out` is the file of predictions, its manifest beside
    it. It grows as `<name>.part.jsonl` by whole chunks, cut by the questions alone: a run that was killed goes on and
    ends with the same file; a finished one is only read.

    A request that a server refuses for good has no prediction; it stands in `<name>.refused.jsonl` with the reason, and
    `retry_refused` asks it again. More than a share `max_refused` of the questions raises ServerError.
    """
    asked, run = _prepared(engine, questions, k, temperature, seed, max_tokens, reasoning)

    def chunks(keys: Iterable[Sequence[Asked]], cap: RefusalCap) -> Iterator[list[Prediction | Refusal]]:
        reader = _reader(engine, asked, run)
        for chunk in keys:
            yield _read(reader, chunk, _generate(engine, chunk, run, cap), run, cap)

    return _grown(chunks, Prediction, asked, run, out, progress and _right(progress), max_refused, retry_refused)


def generate(
    engine: Engine,
    questions: Iterable[Question],
    *,
    k: int = 1,
    temperature: float | Sequence[float] = 0.0,
    seed: int = 0,
    max_tokens: int = 512,
    reasoning: bool = True,
    out: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    retry_refused: bool = False,
    max_refused: float = MOST_REFUSED,
) -> list[Generation]:
    """Generate what `evaluate` with the same arguments reads: the expensive half of it, resumable in the same way."""
    asked, run = _prepared(engine, questions, k, temperature, seed, max_tokens, reasoning)

    def chunks(keys: Iterable[Sequence[Asked]], cap: RefusalCap) -> Iterator[list[Generation | Refusal]]:
        _check_labels(engine, asked)
        return (_generate(engine, chunk, run, cap) for chunk in keys)

    def count(done: list[Generation], total: int) -> None:
        if progress is not None:
            progress(len(done), total)

    return _grown(chunks, Generation, asked, run, out, count, max_refused, retry_refused)


def read(
    engine: Engine,
    questions: Iterable[Question],
    generations: Iterable[Generation],
    *,
    k: int = 1,
    temperature: float | Sequence[float] = 0.0,
    seed: int = 0,
    max_tokens: int = 512,
    reasoning: bool = True,
    out: Path | None = None,
    progress: Progress | None = None,
) -> list[Prediction]:
    """Read the labels of `generate`'s generations and score them with the model that wrote them; nothing is generated.

    `read(engine, questions, generate(engine, questions, **how), **how)` is `evaluate(engine, questions, **how)`. What
    has no generation was refused and has no prediction.
    """
    asked, run = _prepared(engine, questions, k, temperature, seed, max_tokens, reasoning)
    written = {generation.key: generation for generation in generations}
    if foreign := written.keys() - {(question.id, sample) for question in asked for sample in range(run.k)}:
        raise ValueError("question {} sample {} was generated and is not asked".format(*min(foreign)))

    def chunks(keys: Iterable[Sequence[Asked]], cap: RefusalCap) -> Iterator[list[Prediction | Refusal]]:
        reader = _reader(engine, asked, run)
        for chunk in keys:
            text = [
                written.get((one.id, n)) or Refusal(refused=UNWRITTEN, question=one.id, sample=n) for one, n in chunk
            ]
            yield _read(reader, chunk, text, run, cap)

    return _grown(chunks, Prediction, asked, run, out, progress and _right(progress), 1.0, False)


def evaluate_model(
    model: Any, tokenizer: Any, questions: Iterable[Question], *, batch_size: int = 16, **options: Any
) -> list[Prediction]:
    """`evaluate` on a loaded model of Transformers, with the same options."""
    from catto.engines.transformers import TransformersEngine

    return evaluate(TransformersEngine(model, tokenizer, batch_size=batch_size), questions, **options)


def is_correct(prediction: Prediction, unparsed: Unparsed = "fallback") -> bool:
    """Whether the label is the gold one; `wrong` counts every fallback as wrong."""
    return prediction.label == prediction.gold and (unparsed == "fallback" or prediction.source != "fallback")


def request_seed(seed: int, question: str, sample: int) -> int:
    """The seed of one response, 31 bits, by hash: servers would draw k equal samples from one seed."""
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
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ValueError(f"question id {question.id!r} stands more than once")
        seen.add(question.id)
    if not seen:
        raise ValueError("no questions to evaluate")
    return each


def _prepared(
    engine: Engine,
    questions: Iterable[Question],
    k: int,
    temperature: float | Sequence[float],
    seed: int,
    max_tokens: int,
    reasoning: bool,
) -> tuple[list[Question], Run]:
    """The questions as a list and the run; what cannot be asked is refused."""
    asked = list(questions)
    each = check_questions(asked, k, temperature)
    return asked, Run(engine.name, engine.model, each, seed, max_tokens, reasoning, _chunk(engine, k))


def _chunk(engine: Engine, k: int) -> int:
    """Questions a chunk: a few of the engine's batches."""
    width: int = getattr(engine, "batch_size", 0) or getattr(engine, "concurrency", 16)
    return max(1, BATCHES_A_CHUNK * width // k)


def _cut(questions: list[Question], run: Run, skip: int) -> Iterator[list[Asked]]:
    """The chunks of questions with their samples, without the first `skip` chunks."""
    for start in range(skip * run.chunk, len(questions), run.chunk):
        yield [(question, n) for question in questions[start : start + run.chunk] for n in range(run.k)]


def _grown(
    chunks: Callable[[Iterable[Sequence[Asked]], RefusalCap], Iterator[list[R | Refusal]]],
    kind: type[R],
    asked: list[Question],
    run: Run,
    out: Path | None,
    progress: Callable[[list[R], int], None] | None,
    max_refused: float,
    retry_refused: bool,
) -> list[R]:
    """All records: from the file as far as it has them, the others from `chunks`, which are appended to it.

    `progress` gets the records so far and how many there will be: refused requests are taken off the total.
    """
    done: list[R | Refusal] = []

    def grow(some: Iterable[Sequence[R | Refusal]]) -> None:
        for chunk in some:
            done.extend(chunk)
            records, refused = parted(done)
            if progress is not None and records:
                progress(records, len(asked) * run.k - len(refused))

    if out is None:
        grow(chunks(_cut(asked, run, 0), RefusalCap(max_refused)))
        return _ended(done, warn=True)
    with ChunkFile(out, kind, asked, run) as file:
        done.extend(file.stored())
        records, refused = parted(done)
        cap = RefusalCap(max_refused, [(one.question, one.sample) for one in records], [one.key for one in refused])
        if len(done) < len(asked) * run.k:
            grow(file.append(chunk) for chunk in chunks(_cut(asked, run, file.whole_chunks()), cap))
        ended = _ended(done)
        file.finish(done)
        if retry_refused and refused:
            keys = {one.key for one in refused}
            once = [(question, n) for question in asked for n in range(run.k) if (question.id, n) in keys]
            again = {(one.question, one.sample): one for one in next(chunks([once], RefusalCap(1.0)))}
            done = [again.get((one.question, one.sample), one) for one in done]
            ended = _ended(done)
            file.amend(done)
    return ended


def _ended(outcomes: Sequence[R | Refusal], warn: bool = False) -> list[R]:
    """The records among the outcomes, of which there must be one."""
    records, refused = parted(outcomes)
    RefusalCap.check_some(len(records), refused)
    if warn and refused:
        warnings.warn(f"{len(refused)} of {len(outcomes)} requests were refused: {told(refused)}", stacklevel=4)
    return records


def _right(progress: Progress) -> Callable[[list[Prediction], int], None]:
    return lambda done, total: progress(len(done), total, sum(map(is_correct, done)))


class _Reader(Protocol):
    def answers(self, pairs: Sequence[tuple[Question, Generation]]) -> Sequence[Answer | Refusal]: ...


def _reader(engine: Engine, questions: Sequence[Question], run: Run) -> _Reader:
    """Read token ids where the engine has a tokenizer, a server's replies where not; bad labels are refused here."""
    tokenizer = getattr(engine, "tokenizer", None)
    if tokenizer is None:
        from catto.engines.server import ServerEngine
        from catto.predict.label_reader import ServerReader

        assert isinstance(engine, ServerEngine)
        return ServerReader(engine, run.reasoning)
    _check_labels(engine, questions)
    return TokenReader(engine, run.reasoning)


def _check_labels(engine: Engine, questions: Sequence[Question]) -> None:
    tokenizer = getattr(engine, "tokenizer", None)
    if tokenizer is not None:
        for labels in dict.fromkeys(question.labels for question in questions):
            check_labels(tokenizer, labels)


def _generate(engine: Engine, asked: Sequence[Asked], run: Run, cap: RefusalCap) -> list[Generation | Refusal]:
    """What the engine gives for a chunk of (question, sample), in the order in which they are given."""
    requests = [_request(question, sample, run) for question, sample in asked]
    found: dict[Key, Generation | Refusal] = {}
    for outcome in engine.generate(requests):
        found[outcome.key] = outcome
        if isinstance(outcome, Refusal):
            cap.refused(outcome)
        else:
            cap.answered(outcome.key)
    missing = [request for request in requests if request.key not in found]
    if missing:
        raise RuntimeError(f"{engine.name}: question {missing[0].question} sample {missing[0].sample} never came")
    return [found[request.key] for request in requests]


def _read(
    reader: _Reader, asked: Sequence[Asked], outcomes: Sequence[Generation | Refusal], run: Run, cap: RefusalCap
) -> list[Prediction | Refusal]:
    """The predictions of a chunk; refusals stay where they are."""
    pairs = [(one[0], out) for one, out in zip(asked, outcomes, strict=True) if isinstance(out, Generation)]
    answers = iter(reader.answers(pairs))
    return [
        outcome if isinstance(outcome, Refusal) else _prediction(question, outcome, next(answers), run, cap)
        for (question, _), outcome in zip(asked, outcomes, strict=True)
    ]


def _request(question: Question, sample: int, run: Run) -> Request:
    return Request(
        question=question.id,
        sample=sample,
        messages=messages(question, reasoning=run.reasoning),
        temperature=run.temperatures[sample],
        seed=request_seed(run.seed, question.id, sample),
        max_tokens=run.max_tokens,
        stop=STOP,
    )


def _prediction(
    question: Question, generation: Generation, answer: Answer | Refusal, run: Run, cap: RefusalCap
) -> Prediction | Refusal:
    if isinstance(answer, Refusal):  # a reply came, but its label cannot be read
        cap.refused(answer)
        return answer
    return Prediction(
        question=question.id,
        task=question.task,
        split=question.split,
        gold=question.gold,
        sample=generation.sample,
        text=generation.text,
        label=answer.label,
        source=answer.source,
        confidence=answer.confidence,
        label_logprobs=answer.label_logprobs,
        logsumexp=answer.logsumexp,
        mean_logprob=generation.mean_logprob,
        tokens=generation.tokens,
        temperature=run.temperatures[generation.sample],
        seed=run.seed,
        engine=run.engine,
        model=generation.model,
    )
