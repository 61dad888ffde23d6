"""Confidences other than the label's own probability: agreement, P(True) and the stated confidence.

They work for questions with and without labels. The responses are generated once, so all kinds describe the same
answers. Two files next to `predictions.jsonl` store what the model writes, and both resume after a kill:
`predictions.generations.jsonl` has the responses and, for P(True), `predictions.judgements.jsonl` has one judgement
(True or False) for each distinct answer to a question. The predictions are made from these files without a model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Unpack

from catto.answer.confidence import Answer
from catto.answer.short_answers import (
    Equivalent,
    is_right_answer,
    measure_agreement,
    merge_equivalent,
    read_short_answer,
)
from catto.answer.verbal import read_stated_confidence
from catto.engines import Engine, Generation, Key, ScoredGeneration
from catto.io.record_files import write_records
from catto.metrics.errors import brier, ece
from catto.metrics.ranking import auroc
from catto.predict import (
    EvaluationOptions,
    EvaluationRun,
    EvaluationRunSettings,
    SamplingOptions,
    evaluate,
    make_prediction,
    read,
    refused_path,
)
from catto.prompts import JUDGEMENT_LABELS, prompt_ids, render_judgement
from catto.records import (
    CONFIDENCE_KINDS,
    ConfidenceKind,
    Manifest,
    Message,
    Option,
    Prediction,
    Question,
    Refusal,
    content_hash,
)

RIGHT, WRONG = JUDGEMENT_LABELS
# Enough for a whole judgement: `<answer>`, a word and `</answer>`. Only a server that cannot continue a partial
# response writes all of it.
JUDGEMENT_TOKENS = 32


# Ask for confidences


def evaluate_kinds(
    engine: Engine,
    questions: Iterable[Question],
    kinds: Sequence[ConfidenceKind],
    *,
    equivalent: Equivalent | None = None,
    **options: Unpack[EvaluationOptions],
) -> list[Prediction]:
    """Answer every question k times and give each answer a confidence of every kind.

    If `label` is the only kind, this is `evaluate`: no generations are stored, and `confidences` is None.

    Args:
        engine: The engine that runs the model.
        questions: The questions.
        kinds: One or more of `label` (the probability of the label), `agreement` (with the other samples), `ptrue` (the
            probability that the model calls its own answer right) and `verbal` (the number that it states). The first
            one becomes the predictions' `confidence`; all of them are in `confidences`.
        equivalent: Decides whether two answers mean the same; None means that they do if they are equal after
            normalisation.
        **options: The fields of `EvaluationRunSettings`. With any kind other than `label`, `stated` is ignored: the
            model is asked to state its confidence if `verbal` is one of the kinds.

    Returns:
        The predictions in the order of the questions, then of the samples. A missing confidence is None in
        `confidences` and 0 in `confidence`.

    Raises:
        ValueError: The kinds cannot be used with these questions or this k; see `check_kinds`.
    """
    listed = list(questions)
    settings = EvaluationRunSettings(**options)
    check_kinds(kinds, listed, settings.k)
    if tuple(kinds) == ("label",):
        return evaluate(engine, listed, **options)
    elicitation = Elicitation(engine, listed, tuple(kinds), settings, equivalent)
    return elicitation.make_predictions()


def check_kinds(kinds: Sequence[str], questions: Sequence[Question], k: int) -> list[ConfidenceKind]:
    """Check that kinds of confidence can be used together, with these questions and with k samples of each.

    Args:
        kinds: Names of kinds.
        questions: The questions.
        k: Samples per question.

    Returns:
        The kinds, in the given order.

    Raises:
        ValueError: There are no kinds, a kind is unknown or given twice, `label` is given for questions without labels,
            or `agreement` for a single sample.
    """
    if not kinds:
        raise ValueError("no kind of confidence is given")
    known: list[ConfidenceKind] = []
    for name in kinds:
        kind = next((kind for kind in CONFIDENCE_KINDS if kind == name), None)  # `name` may be any string
        if kind is None:
            raise ValueError(f"confidence kind {name!r} is not one of {', '.join(CONFIDENCE_KINDS)}")
        if kind in known:
            raise ValueError(f"confidence kind {kind} is given twice")
        known.append(kind)
    without_options = next((question for question in questions if not question.has_labels), None)
    if "label" in known and without_options is not None:
        others = ", ".join(kind for kind in CONFIDENCE_KINDS if kind != "label")
        raise ValueError(f"confidence kind label: question {without_options.id} has no options, expected {others}")
    if "agreement" in known and k < 2:
        raise ValueError(f"confidence kind agreement compares samples: k is {k}, expected at least 2")
    return known


def sibling_path(path: Path, name: str) -> Path:
    """Return the path of a file next to the predictions, named after its content.

    >>> sibling_path(Path("predictions.jsonl"), "judgements").name
    'predictions.judgements.jsonl'
    """
    return path.parent / f"{path.name.removesuffix('.jsonl')}.{name}.jsonl"


# Judgements


class Proposal(NamedTuple):
    """An answer to judge.

    Attributes:
        id: The id of the judgement, such as `q7#0` for the first distinct answer to question `q7`.
        question: The question.
        text: The answer as the first sample wrote it.
        choice: The label or, for a question without labels, the normalised answer.
        is_right: Whether the answer is right; this is not shown to the model.
    """

    id: str
    question: Question
    text: str
    choice: str
    is_right: bool

    def as_question(self) -> Question:
        """Return the judgement as a question with the labels True and False, of which the right one is the gold label.

        The model is asked with the messages of `render_judgement`, not with these fields and options.
        """
        options = (Option(label=RIGHT, text=RIGHT), Option(label=WRONG, text=WRONG))
        return Question(
            id=self.id,
            task=self.question.task,
            split=self.question.split,
            fields={**self.question.fields, "proposed answer": self.text},
            options=options,
            gold=RIGHT if self.is_right else WRONG,
        )


class JudgementRun(EvaluationRun):
    """Asks a model whether proposed answers are right; P(True) is the probability of the label `True`.

    The model usually generates no text. Each response is empty, and reading it closes it like any response without an
    answer: `<answer>` is added, and the most probable next label is taken. Only a server that cannot continue a partial
    response writes the whole judgement.
    """

    def generate_responses(self, keys: Sequence[Key]) -> Iterable[Generation | Refusal]:
        """Return an empty response for every key, or the judgements of a server that cannot continue a response.

        The empty responses are followed by a server's replies to the requests that reading them has added to `todo`.
        """
        is_server = self.engine.tokenizer is None
        if is_server and not self._readable_server.can_continue:
            return super().generate_responses(keys)
        self.todo.clear()
        return chain(self._make_empty_responses(keys), self._continue_responses())

    def _make_empty_responses(self, keys: Sequence[Key]) -> Iterator[Generation]:
        for question, sample in keys:
            prompt_tokens = None
            if self.engine.tokenizer is not None:
                prompt_tokens = len(prompt_ids(self.engine.tokenizer, self.asked[question].chat))
            yield Generation(
                question=question,
                sample=sample,
                text="",
                token_ids=(),
                prompt_tokens=prompt_tokens,
                tokens=0,
                model=self.engine.model,
            )

    def _continue_responses(self) -> Iterator[Generation | Refusal]:
        """Yield a server's continuations of the empty responses.

        Reading an empty response puts a request to continue it into `todo`. This method runs after all of them have
        been read. The responses of a local engine are not continued, so `todo` is then empty.
        """
        if self.todo:
            yield from self.engine.generate(self.todo)


def judge_answers(
    engine: Engine, proposals: Sequence[Proposal], settings: EvaluationRunSettings
) -> dict[str, Prediction]:
    """Ask the model whether each proposed answer is right.

    A judgement is a prediction for the question that `Proposal.as_question` makes, with the label True or False.

    Args:
        engine: The engine that runs the model.
        proposals: The answers to judge, with distinct ids.
        settings: The settings with which the questions were asked, except that `out` is the file of judgements. Each
            proposal is judged once at temperature 0, whatever the settings for the questions are.

    Returns:
        The id of a proposal -> its judgement. Proposals that a server refused are left out.
    """
    if not proposals:  # a run needs at least one question
        return {}
    chats: dict[str, tuple[Message, ...]] = {}  # id of a proposal -> the messages that ask for its judgement
    for proposal in proposals:
        chats[proposal.id] = render_judgement(proposal.question, proposal.text, reasoning=settings.reasoning)
    judgement_settings = replace(settings, k=1, temperature=0.0, max_tokens=JUDGEMENT_TOKENS, stated=False)
    run = JudgementRun(engine, [proposal.as_question() for proposal in proposals], judgement_settings, chats)
    judgements = run.collect(Prediction, run.answer_keys)
    return {judgement.question: judgement for judgement in judgements}


def read_ptrue(judgement: Prediction | Answer) -> float | None:
    """Return P(True): the probability of the label True over the full vocabulary.

    Args:
        judgement: A prediction or an answer with the label True or False.

    Returns:
        The probability. A server returns only the most probable tokens: the result is 0 if the label False is among
        them but True is not, and None if neither is, because the judgement then has no label.
    """
    if judgement.label is None:
        return None
    if judgement.label == RIGHT:
        return judgement.confidence
    if judgement.label_logprobs is None:
        return 0.0
    return convert_logprob(judgement.label_logprobs[RIGHT])


def convert_logprob(logprob: float) -> float:
    """Return the probability, clipped to 1 because rounding may raise its logarithm above 0.

    >>> convert_logprob(1e-9)
    1.0
    """
    return min(1.0, math.exp(logprob))


# One evaluation


@dataclass
class Elicitation:
    """One evaluation with several kinds of confidence.

    `make_predictions` runs it. Its steps share the dict `texts`: (question, sample) -> the answer as it was written.

    Attributes:
        engine: The engine that runs the model.
        questions: The questions.
        kinds: The kinds of confidence, the main one first.
        settings: How the questions are asked. `out` is the file of predictions; None writes no files.
        equivalent: Decides whether two answers mean the same; None means that they do if they are equal after
            normalisation.
    """

    engine: Engine
    questions: list[Question]
    kinds: tuple[ConfidenceKind, ...]
    settings: EvaluationRunSettings
    equivalent: Equivalent | None = None

    def make_predictions(self) -> list[Prediction]:
        """Generate responses, read and judge the answers, and write the predictions.

        Returns:
            The predictions in the order of the questions, then of the samples.
        """
        stated = "verbal" in self.kinds
        generation_settings = replace(self.settings, stated=stated, out=self._sibling("generations"))
        run = EvaluationRun(self.engine, self.questions, generation_settings)
        generations = run.collect(ScoredGeneration, run.score_keys)
        texts: dict[Key, str] = {}
        predictions = self._read_label_answers(generations, texts, stated=stated)
        predictions += self._read_short_answers(generations, run.temperatures, texts)
        predictions.sort(key=lambda prediction: run.keys[prediction.key])
        proposals: list[Proposal] = []
        if "ptrue" in self.kinds:
            proposals = self._propose_answers(predictions, texts)
        # Answers are judged before they are merged, so the stored judgements can be used with any `equivalent`.
        ptrue = self._judge(proposals)
        predictions = self._add_confidences(self._merge_answers(predictions), ptrue)
        if self.settings.out is not None:
            self._write(self.settings.out, run, predictions, proposals)
        return predictions

    def _sibling(self, name: str) -> Path | None:
        if self.settings.out is None:
            return None
        return sibling_path(self.settings.out, name)

    def _read_label_answers(
        self, generations: Sequence[ScoredGeneration], texts: dict[Key, str], *, stated: bool
    ) -> list[Prediction]:
        """Read the responses to questions with labels, as `evaluate` does, and add their labels to `texts`."""
        labelled = [question for question in self.questions if question.has_labels]
        if not labelled:  # `read` would raise an error
            return []
        ids = {question.id for question in labelled}
        sampling = SamplingOptions(
            k=self.settings.k,
            temperature=self.settings.temperature,
            seed=self.settings.seed,
            max_tokens=self.settings.max_tokens,
            reasoning=self.settings.reasoning,
            stated=stated,
        )
        generations_with_labels = [generation for generation in generations if generation.question in ids]
        predictions = read(self.engine, labelled, generations_with_labels, **sampling)
        for prediction in predictions:
            if prediction.label is not None:
                texts[prediction.key] = prediction.label
        return predictions

    def _read_short_answers(
        self, generations: Sequence[Generation], temperatures: Sequence[float], texts: dict[Key, str]
    ) -> list[Prediction]:
        """Read and grade the responses to questions without labels, and add their answers to `texts`.

        Args:
            generations: The responses to all questions.
            temperatures: The temperature of each of the k samples.
            texts: (question, sample) -> the answer as it was written.

        Returns:
            The predictions. Their confidence is 0 until `_add_confidences` sets it.
        """
        question_of = {question.id: question for question in self.questions if not question.has_labels}
        predictions = []
        for generation in generations:
            question = question_of.get(generation.question)
            if question is None:  # the question has labels
                continue
            answer = read_short_answer(
                generation.text, question.grade or "exact", cut=generation.finish_reason == "length"
            )
            is_right = answer.text is not None and is_right_answer(answer.text, question)
            if answer.text is not None:
                texts[generation.key] = answer.text
            without_label = Answer(
                label=None, source=answer.source or "none", confidence=0.0, label_logprobs=None, logsumexp=None
            )
            prediction = make_prediction(
                question,
                generation,
                without_label,
                temperature=temperatures[generation.sample],
                seed=self.settings.seed,
                engine=self.engine.name,
            )
            predictions.append(prediction.model_copy(update={"answer": answer.key, "correct": is_right}))
        return predictions

    def _merge_answers(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """Replace each short answer to a question by the first one that means the same."""
        if self.equivalent is None:
            return list(predictions)
        return merge_predictions(predictions, self.equivalent)

    def _propose_answers(self, predictions: Sequence[Prediction], texts: Mapping[Key, str]) -> list[Proposal]:
        """Return the distinct answers to every question, each as the first sample with this answer wrote it."""
        question_of = {question.id: question for question in self.questions}
        proposals: list[Proposal] = []
        answer_counts: Counter[str] = Counter()  # question id -> number of its distinct answers so far
        seen: set[tuple[str, str]] = set()  # (question id, answer)
        for prediction in predictions:
            choice = prediction.choice
            if choice is None or (prediction.question, choice) in seen:
                continue
            seen.add((prediction.question, choice))
            proposal = Proposal(
                id=f"{prediction.question}#{answer_counts[prediction.question]}",
                question=question_of[prediction.question],
                text=texts[prediction.key],
                choice=choice,
                is_right=prediction.is_correct,
            )
            proposals.append(proposal)
            answer_counts[prediction.question] += 1
        return proposals

    def _judge(self, proposals: Sequence[Proposal]) -> dict[tuple[str, str], float | None]:
        """Judge the proposed answers.

        Returns:
            (question id, answer) -> P(True); None if the server refused the judgement or gave neither label.
        """
        settings = replace(self.settings, out=self._sibling("judgements"))
        judgements = judge_answers(self.engine, proposals, settings)
        ptrue_of: dict[tuple[str, str], float | None] = {}
        for proposal in proposals:
            judgement = judgements.get(proposal.id)
            ptrue_of[proposal.question.id, proposal.choice] = None if judgement is None else read_ptrue(judgement)
        return ptrue_of

    def _add_confidences(
        self, predictions: Sequence[Prediction], ptrue: Mapping[tuple[str, str], float | None]
    ) -> list[Prediction]:
        """Give each prediction a confidence of every kind; those that are missing are None.

        Args:
            predictions: The predictions, with equivalent answers merged.
            ptrue: (question id, answer) -> P(True).
        """
        agreement = _measure_agreements(predictions)
        finished = []
        for prediction in predictions:
            confidences: dict[str, float | None] = {}
            for kind in self.kinds:
                if kind == "label":
                    confidences[kind] = prediction.confidence
                elif kind == "agreement":
                    confidences[kind] = agreement[prediction.key]
                elif kind == "ptrue":
                    confidences[kind] = None
                    if prediction.choice is not None:
                        confidences[kind] = ptrue.get((prediction.question, prediction.choice))
                else:
                    confidences[kind] = read_stated_confidence(prediction.text)
            main = self.kinds[0]
            update = {"confidences": confidences, "confidence_kind": main, "confidence": confidences[main] or 0.0}
            finished.append(prediction.model_copy(update=update))
        return finished

    # Write

    def _write(
        self, out: Path, run: EvaluationRun, predictions: Sequence[Prediction], proposals: Sequence[Proposal]
    ) -> None:
        """Write the predictions, and to a file next to them the refused requests, which the generations' run stored."""
        refusals = run.read_published(sibling_path(out, "generations"), ScoredGeneration).refusals
        refused = refused_path(out)
        if refusals:
            write_records(refused, refusals)
        else:
            refused.unlink(missing_ok=True)  # from an earlier run, whose refused requests have been answered since
        write_records(out, predictions, self._make_manifest(run, predictions, refusals, proposals))

    def _make_manifest(
        self,
        run: EvaluationRun,
        predictions: Sequence[Prediction],
        refusals: Sequence[Refusal],
        proposals: Sequence[Proposal],
    ) -> Manifest:
        """Make the manifest of the predictions: that of an evaluation, with the kinds and what they cost added."""
        manifest = run.make_manifest(Prediction, predictions, refusals)
        counts = dict(manifest.counts)
        counts["unanswered"] = sum(prediction.source == "none" for prediction in predictions)
        counts["generated_tokens"] = sum(prediction.tokens or 0 for prediction in predictions)
        counts["judged_answers"] = len(proposals)
        counts["judgement_tokens"] = self._count_judgement_tokens(proposals)
        for kind in self.kinds:
            missing = sum((prediction.confidences or {}).get(kind) is None for prediction in predictions)
            counts[f"without_{kind}"] = missing
        notes = {**manifest.notes, "confidence_kinds": list(self.kinds)}
        identity = content_hash([manifest.recipe_hash, list(self.kinds)])  # other kinds give other confidences
        return manifest.model_copy(update={"counts": counts, "notes": notes, "recipe_hash": identity})

    def _count_judgement_tokens(self, proposals: Sequence[Proposal]) -> int:
        """Count the prompt tokens of the judgements; return 0 for an engine without a tokenizer, which cannot tell."""
        if self.engine.tokenizer is None:
            return 0
        total = 0
        for proposal in proposals:
            chat = render_judgement(proposal.question, proposal.text, reasoning=self.settings.reasoning)
            total += len(prompt_ids(self.engine.tokenizer, chat))
        return total


def merge_predictions(predictions: Sequence[Prediction], equivalent: Equivalent) -> list[Prediction]:
    """Replace each short answer to a question by the first one, in the order of the samples, that means the same.

    Labels do not change. Votes and agreement, if they are computed afterwards, count equivalent answers together.

    Args:
        predictions: Any number of samples of each question.
        equivalent: Decides whether two answers mean the same.

    Returns:
        The predictions in the given order.
    """
    by_question: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        by_question.setdefault(prediction.question, []).append(prediction)
    merged_of: dict[Key, str | None] = {}
    for samples in by_question.values():
        ordered = sorted(samples, key=lambda prediction: prediction.sample)
        answers = merge_equivalent([prediction.answer for prediction in ordered], equivalent)
        for prediction, answer in zip(ordered, answers, strict=True):
            merged_of[prediction.key] = answer
    return [prediction.model_copy(update={"answer": merged_of[prediction.key]}) for prediction in predictions]


class KindSummary(NamedTuple):
    """How good one kind of confidence is.

    Attributes:
        kind: The kind.
        ece: The expected calibration error, with 20 bins.
        brier: The mean squared error of the confidence.
        auroc: The probability that a right answer has more confidence than a wrong one; nan unless there are both.
        missing: Number of predictions without this confidence, which count as 0.
    """

    kind: ConfidenceKind
    ece: float
    brier: float
    auroc: float
    missing: int


def summarise_kinds(predictions: Sequence[Prediction], kinds: Sequence[ConfidenceKind]) -> list[KindSummary]:
    """Measure each kind of confidence on the same predictions.

    Args:
        predictions: Predictions that store every kind, as `evaluate_kinds` returns them.
        kinds: The kinds to measure.

    Returns:
        One summary per kind, in the order of the kinds.

    Raises:
        ValueError: A prediction does not store one of the kinds.
    """
    correct = [prediction.is_correct for prediction in predictions]
    summaries = []
    for kind in kinds:
        confidence = [prediction.confidence for prediction in choose_kind(predictions, kind)]
        missing = sum((prediction.confidences or {}).get(kind) is None for prediction in predictions)
        has_both = any(correct) and not all(correct)
        summary = KindSummary(
            kind=kind,
            ece=ece(confidence, correct),
            brier=brier(confidence, correct),
            auroc=auroc(confidence, correct) if has_both else math.nan,
            missing=missing,
        )
        summaries.append(summary)
    return summaries


def choose_kind(predictions: Sequence[Prediction], kind: ConfidenceKind) -> list[Prediction]:
    """Use one of the stored kinds as the confidence of every prediction.

    Args:
        predictions: Predictions with several kinds of confidence.
        kind: The kind to use.

    Returns:
        Copies of the predictions. A confidence that is missing, such as P(True) of a refused judgement, becomes 0.

    Raises:
        ValueError: A prediction does not store this kind.
    """
    chosen = []
    for prediction in predictions:
        confidences = prediction.confidences or {}
        if kind not in confidences:
            stored_kinds = ", ".join(confidences) or "label"  # a prediction of `evaluate` has only the label's own
            raise ValueError(f"confidence kind {kind}: {prediction.name} has {stored_kinds}")
        update = {"confidence": confidences[kind] or 0.0, "confidence_kind": kind}
        chosen.append(prediction.model_copy(update=update))
    return chosen


def _measure_agreements(predictions: Sequence[Prediction]) -> dict[Key, float]:
    """Return (question, sample) -> the agreement of its answer with the answers of all samples of the question."""
    by_question: dict[str, list[Prediction]] = {}
    for prediction in predictions:
        by_question.setdefault(prediction.question, []).append(prediction)
    agreement: dict[Key, float] = {}
    for samples in by_question.values():
        values = measure_agreement([prediction.choice for prediction in samples])
        for prediction, value in zip(samples, values, strict=True):
            agreement[prediction.key] = value
    return agreement
