"""Questions -> predictions: generate, find the label in the generated tokens, read its probability there.

The confidence is the raw full-vocabulary probability, at temperature 1, of the label's first token in the form in which
it was written. `source` is `free` after `<answer>`, `plain` where a response without that tag states its answer. Where
there is no answer the response is closed and the most probable label taken there: `source` is `fallback`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from catto.engines import Engine, Generation, Key, Request
from catto.engines.refusals import MOST_REFUSED, RefusalCap, told
from catto.evaluation.answers import Answer, TokenReader
from catto.evaluation.predictions import Outcome, PredictionFile, Run, parted
from catto.evaluation.scaling import confidence_at
from catto.labels import check_labels
from catto.prompts import messages
from catto.records import Prediction, Question, Refusal, content_hash

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
    retry_refused: bool = False,
    max_refused: float = MOST_REFUSED,
) -> list[Prediction]:
    """Answer every question k times; the predictions come in the order of the questions, then of the samples.

    `out` is the file of predictions, its manifest beside it. It grows as `<name>.part.jsonl` by whole chunks, cut by
    the questions alone: a run that was killed goes on and ends with the same file; a finished one is only read.

    A request that a server refuses for good has no prediction; it stands in `<name>.refused.jsonl` with the reason, and
    `retry_refused` asks it again. More than a share `max_refused` of the questions raises ServerError.
    """
    asked = check_questions(list(questions), k, temperature)
    run = Run(engine.name, engine.model, k, temperature, seed, max_tokens, reasoning, _chunk(engine, k))
    if out is None:
        cap = RefusalCap(max_refused)
        return _ended(_counted(_chunks(engine, asked, run, 0, cap), [], len(asked) * k, progress), warn=True)
    with PredictionFile(out, asked, run) as file:
        stored = file.stored()
        predictions, refused = parted(stored)
        cap = RefusalCap(max_refused, [(one.question, one.sample) for one in predictions], [one.key for one in refused])
        chunks = (file.append(chunk) for chunk in _chunks(engine, asked, run, file.whole_chunks(), cap))
        done = _counted(chunks, stored, len(asked) * k, progress)
        answered = _ended(done)
        file.finish(done)
        if retry_refused and refused:
            again = _asked_again(engine, asked, run, {one.key for one in refused}, RefusalCap(1.0))
            done = [again.get((one.question, one.sample), one) for one in done]
            answered = _ended(done)
            file.amend(done)
    return answered


def _ended(outcomes: Sequence[Outcome], warn: bool = False) -> list[Prediction]:
    """The predictions among the outcomes, of which there must be one."""
    predictions, refused = parted(outcomes)
    RefusalCap.check_some(len(predictions), refused)
    if warn and refused:
        warnings.warn(f"{len(refused)} of {len(outcomes)} requests were refused: {told(refused)}", stacklevel=3)
    return predictions


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
    chunks: Iterable[Sequence[Outcome]], stored: list[Outcome], total: int, progress: Progress | None
) -> list[Outcome]:
    """All outcomes; refused requests are taken off the total that is shown."""
    done = list(stored)
    for chunk in chunks:
        done.extend(chunk)
        predictions, refused = parted(done)
        if progress is not None and predictions:
            progress(len(predictions), total - len(refused), sum(map(is_correct, predictions)))
    return done


def _chunks(engine: Engine, questions: list[Question], run: Run, skip: int, cap: RefusalCap) -> Iterator[list[Outcome]]:
    """The outcomes of each chunk of questions, without the first `skip` chunks."""
    starts = range(skip * run.chunk, len(questions), run.chunk)
    if not starts:
        return
    reader = _reader(engine, questions, run)
    for start in starts:
        part = questions[start : start + run.chunk]
        asked = [(question, sample) for question in part for sample in range(run.k)]
        yield _outcomes(engine, reader, asked, run, cap)


def _asked_again(
    engine: Engine, questions: Sequence[Question], run: Run, keys: Collection[Key], cap: RefusalCap
) -> dict[Key, Outcome]:
    """The outcomes of single requests of any questions."""
    reader = _reader(engine, questions, run)
    asked = [(question, sample) for question in questions for sample in range(run.k) if (question.id, sample) in keys]
    return {(one.question, one.sample): one for one in _outcomes(engine, reader, asked, run, cap)}


class _Reader(Protocol):
    def answers(self, pairs: Sequence[tuple[Question, Generation]]) -> Sequence[Answer | Refusal]: ...


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


def _outcomes(
    engine: Engine, reader: _Reader, asked: Sequence[tuple[Question, int]], run: Run, cap: RefusalCap
) -> list[Outcome]:
    """Generate and read a chunk of (question, sample); in the order in which they are given."""
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
    outcomes = [found[request.key] for request in requests]
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
        temperature=run.temperature,
        seed=request_seed(run.seed, question.id, sample),
        max_tokens=run.max_tokens,
        stop=STOP,
    )


def _prediction(
    question: Question, generation: Generation, answer: Answer | Refusal, run: Run, cap: RefusalCap
) -> Outcome:
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
        temperature=run.temperature,
        seed=run.seed,
        engine=run.engine,
        model=generation.model,
    )
