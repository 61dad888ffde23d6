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
from catto.evaluation.predictions import PredictionFile, Run
from catto.evaluation.scaling import confidence_at
from catto.labels import check_labels
from catto.prompts import messages
from catto.records import Prediction, Question, content_hash

__all__ = [
    "Answer",
    "Progress",
    "check_questions",
    "confidence_at",
    "evaluate",
    "evaluate_model",
    "is_correct",
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
    temperature: float = 0.0,
    seed: int = 0,
    max_tokens: int = 512,
    reasoning: bool = True,
    out: Path | None = None,
    progress: Progress | None = None,
) -> list[Prediction]:
    """Answer every question k times; the predictions come in the order of the questions, then of the samples.

    `out` is the file of predictions, its manifest beside it. It grows as `<name>.part.jsonl` by whole chunks, cut by
    the questions alone: a run that was killed goes on and ends with the same file; a finished one is only read.
    """
    asked = check_questions(list(questions), k, temperature)
    run = Run(engine.name, engine.model, k, temperature, seed, max_tokens, reasoning, _chunk(engine, k))
    if out is None:
        return _counted(_chunks(engine, asked, run, 0), [], len(asked) * k, progress)
    with PredictionFile(out, asked, run) as file:
        chunks = (file.append(chunk) for chunk in _chunks(engine, asked, run, file.whole_chunks()))
        done = _counted(chunks, file.stored(), len(asked) * k, progress)
        file.finish(done)
    return done


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


def check_questions(questions: list[Question], k: int, temperature: float) -> list[Question]:
    """Return the questions, or raise ValueError where they cannot be asked so."""
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1")
    if k > 1 and temperature == 0:
        raise ValueError(f"k is {k} at temperature 0: all samples would be the same, give a temperature above 0")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ValueError(f"question id {question.id!r} stands more than once")
        seen.add(question.id)
    if not seen:
        raise ValueError("no questions to evaluate")
    return questions


def _chunk(engine: Engine, k: int) -> int:
    """Questions a chunk: a few of the engine's batches."""
    width: int = getattr(engine, "batch_size", 0) or getattr(engine, "concurrency", 16)
    return max(1, BATCHES_A_CHUNK * width // k)


def _counted(
    chunks: Iterable[Sequence[Prediction]], stored: list[Prediction], total: int, progress: Progress | None
) -> list[Prediction]:
    done = list(stored)
    for chunk in chunks:
        done.extend(chunk)
        if progress is not None:
            progress(len(done), total, sum(map(is_correct, done)))
    return done


def _chunks(engine: Engine, questions: list[Question], run: Run, skip: int) -> Iterator[list[Prediction]]:
    """The predictions of each chunk of questions, without the first `skip` chunks."""
    starts = range(skip * run.chunk, len(questions), run.chunk)
    if not starts:
        return
    reader = _reader(engine, questions, run)
    for start in starts:
        yield _predictions(engine, reader, questions[start : start + run.chunk], run)


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
    for labels in dict.fromkeys(question.labels for question in questions):
        check_labels(tokenizer, labels)
    return TokenReader(engine, run.reasoning)


def _predictions(engine: Engine, reader: _Reader, questions: Sequence[Question], run: Run) -> list[Prediction]:
    by_id = {question.id: question for question in questions}
    requests = [_request(question, sample, run) for question in questions for sample in range(run.k)]
    found = {generation.key: generation for generation in engine.generate(requests)}
    missing = [request for request in requests if request.key not in found]
    if missing:
        raise RuntimeError(f"{engine.name}: question {missing[0].question} sample {missing[0].sample} never came")
    pairs = [(by_id[request.question], found[request.key]) for request in requests]
    answers = reader.answers(pairs)
    return [_prediction(*pair, answer, run) for pair, answer in zip(pairs, answers, strict=True)]


def _request(question: Question, sample: int, run: Run) -> Request:
    return Request(
        question=question.id,
        sample=sample,
        messages=messages(question, reasoning=run.reasoning),
        temperature=run.temperature,
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
        temperature=run.temperature,
        seed=run.seed,
        engine=run.engine,
        model=generation.model,
    )
