"""Questions -> predictions: generate, find the label in the generated tokens, read its probability there.

The confidence is the raw full-vocabulary probability, at temperature 1, of the label's first token in the form in which
it was written. A response without an answer is closed and the most probable label taken there: `source` is `fallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from catto.engines import Engine, Generation, Request
from catto.evaluation.answers import Answer, TokenReader
from catto.evaluation.predictions import ChunkFile, R, Run
from catto.evaluation.scaling import confidence_at
from catto.labels import check_labels
from catto.prompts import messages
from catto.records import Prediction, Question, content_hash

__all__ = [
    "Answer",
    "Progress",
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
) -> list[Prediction]:
    """Answer every question k times; the predictions come in the order of the questions, then of the samples.

    `temperature` is one number for all k samples, or k numbers. `out` is the file of predictions, its manifest beside
    it. It grows as `<name>.part.jsonl` by whole chunks, cut by the questions alone: a run that was killed goes on and
    ends with the same file; a finished one is only read.
    """
    asked, run = _prepared(engine, questions, k, temperature, seed, max_tokens, reasoning)

    def chunks(skip: int) -> Iterator[list[Prediction]]:
        reader = _reader(engine, asked, run)
        for chunk in _cut(asked, run, skip):
            yield _read(reader, chunk, _generate(engine, chunk, run), run)

    return _grown(
        chunks, Prediction, asked, run, out, progress and (lambda done: progress(*_standing(done, asked, run)))
    )


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
) -> list[Generation]:
    """Generate what `evaluate` with the same arguments reads: the expensive half of it, resumable in the same way."""
    asked, run = _prepared(engine, questions, k, temperature, seed, max_tokens, reasoning)

    def chunks(skip: int) -> Iterator[list[Generation]]:
        _check_labels(engine, asked)
        return (_generate(engine, chunk, run) for chunk in _cut(asked, run, skip))

    total = len(asked) * run.k
    return _grown(chunks, Generation, asked, run, out, progress and (lambda done: progress(len(done), total)))


def read(
    engine: Engine,
    questions: Iterable[Question],
    generations: Sequence[Generation],
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

    `read(engine, questions, generate(engine, questions, **how), **how)` is `evaluate(engine, questions, **how)`.
    """
    asked, run = _prepared(engine, questions, k, temperature, seed, max_tokens, reasoning)
    expected = [(question.id, sample) for question in asked for sample in range(run.k)]
    if [generation.key for generation in generations] != expected:
        raise ValueError(f"{len(generations)} generations are not the {len(expected)} of these questions, in order")

    def chunks(skip: int) -> Iterator[list[Prediction]]:
        reader, size = _reader(engine, asked, run), run.chunk * run.k
        for number, chunk in enumerate(_cut(asked, run, skip), start=skip):
            yield _read(reader, chunk, generations[number * size : (number + 1) * size], run)

    return _grown(
        chunks, Prediction, asked, run, out, progress and (lambda done: progress(*_standing(done, asked, run)))
    )


def evaluate_model(
    model: Any, tokenizer: Any, questions: Iterable[Question], *, batch_size: int = 16, **options: Any
) -> list[Prediction]:
    """`evaluate` on a loaded model of Transformers, with the same options."""
    from catto.engines.transformers import TransformersEngine

    return evaluate(TransformersEngine(model, tokenizer, batch_size=batch_size), questions, **options)


def is_correct(prediction: Prediction, unparsed: Unparsed = "fallback") -> bool:
    """Whether the label is the gold one; `wrong` counts every fallback as wrong."""
    return prediction.label == prediction.gold and (unparsed == "fallback" or prediction.source == "free")


def request_seed(seed: int, question: str, sample: int) -> int:
    """The seed of one response, 31 bits, by hash: servers would draw k equal samples from one seed."""
    return int(content_hash([seed, question, sample]), 16) >> 33


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
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    each = (temperature,) * k if isinstance(temperature, int | float) else tuple(temperature)
    if len(each) != k:
        raise ValueError(f"{len(each)} temperatures for k = {k} samples")
    if each.count(0) > 1:
        raise ValueError(f"k is {k} at temperature 0: all samples would be the same, give a temperature above 0")
    asked, seen = list(questions), set[str]()
    for question in asked:
        if question.id in seen:
            raise ValueError(f"question id {question.id!r} stands more than once")
        seen.add(question.id)
    if not seen:
        raise ValueError("no questions to evaluate")
    return asked, Run(engine.name, engine.model, each, seed, max_tokens, reasoning, _chunk(engine, k))


def _chunk(engine: Engine, k: int) -> int:
    """Questions a chunk: a few of the engine's batches."""
    width: int = getattr(engine, "batch_size", 0) or getattr(engine, "concurrency", 16)
    return max(1, BATCHES_A_CHUNK * width // k)


def _cut(questions: list[Question], run: Run, skip: int) -> Iterator[list[Question]]:
    """The chunks of questions, without the first `skip`."""
    for start in range(skip * run.chunk, len(questions), run.chunk):
        yield questions[start : start + run.chunk]


def _grown(
    chunks: Callable[[int], Iterator[list[R]]],
    kind: type[R],
    asked: list[Question],
    run: Run,
    out: Path | None,
    told: Callable[[list[R]], None] | None,
) -> list[R]:
    """All records, from the file as far as it has them and from `chunks(how many it has)`, which are appended to it."""
    done: list[R] = []

    def grow(some: Iterable[Sequence[R]]) -> None:
        for chunk in some:
            done.extend(chunk)
            if told is not None:
                told(done)

    if out is None:
        grow(chunks(0))
        return done
    with ChunkFile(out, kind, asked, run) as file:
        done.extend(file.stored())
        if len(done) < len(asked) * run.k:
            grow(file.append(chunk) for chunk in chunks(file.whole_chunks()))
        file.finish(done)
    return done


def _standing(done: Sequence[Prediction], asked: Sequence[Question], run: Run) -> tuple[int, int, int]:
    return len(done), len(asked) * run.k, sum(map(is_correct, done))


class _Reader(Protocol):
    def answers(self, pairs: Sequence[tuple[Question, Generation]]) -> list[Answer]: ...


def _reader(engine: Engine, questions: Sequence[Question], run: Run) -> _Reader:
    """Read token ids where the engine has a tokenizer, a server's replies where not; bad labels are refused here."""
    tokenizer = getattr(engine, "tokenizer", None)
    if tokenizer is None:
        from catto.engines.server import ServerEngine
        from catto.evaluation.served import ServerReader

        assert isinstance(engine, ServerEngine)
        return ServerReader(engine, run.reasoning)
    _check_labels(engine, questions)
    return TokenReader(engine, run.reasoning)


def _check_labels(engine: Engine, questions: Sequence[Question]) -> None:
    tokenizer = getattr(engine, "tokenizer", None)
    if tokenizer is not None:
        for labels in dict.fromkeys(question.labels for question in questions):
            check_labels(tokenizer, labels)


def _generate(engine: Engine, questions: Sequence[Question], run: Run) -> list[Generation]:
    """The generations of a chunk, in the order of its questions and samples."""
    requests = [_request(question, sample, run) for question in questions for sample in range(run.k)]
    found = {generation.key: generation for generation in engine.generate(requests)}
    missing = [request for request in requests if request.key not in found]
    if missing:
        raise RuntimeError(f"{engine.name}: question {missing[0].question} sample {missing[0].sample} never came")
    return [found[request.key] for request in requests]


def _read(
    reader: _Reader, questions: Sequence[Question], generations: Sequence[Generation], run: Run
) -> list[Prediction]:
    by_id = {question.id: question for question in questions}
    pairs = [(by_id[generation.question], generation) for generation in generations]
    answers = reader.answers(pairs)
    return [_prediction(*pair, answer, run) for pair, answer in zip(pairs, answers, strict=True)]


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


def _prediction(question: Question, generation: Generation, answer: Answer, run: Run) -> Prediction:
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
