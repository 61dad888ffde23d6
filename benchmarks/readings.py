"""Compare three kinds of confidence in short answers with the exact posterior, before and after `outcome` on P(True).

First `catto run readings --set seeds=[0,1,2] --out RUN` trains the models. Then `python benchmarks/readings.py RUN`
asks each of them the test questions of its seed. The first of ten samples is greedy and is the answer that is scored;
the others, at temperature 1, give the agreement. Every prompt asks for a stated confidence, so all three confidences
are about the same answers. The script prints one Markdown row per model and kind of confidence: the mean over seeds,
and the value for each seed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from catto.elicit import evaluate_kinds
from catto.engines.transformers import TransformersEngine
from catto.metrics.errors import brier, ece
from catto.metrics.ranking import auroc
from catto.metrics.statistics import null_band
from catto.records import ConfidenceKind, Prediction, Question
from catto.tasks import load_questions
from catto.tasks.readings import likeliest_sum

# Method -> start of the name of its stage folder.
METHODS = {"sft": "sft-readings", "dpo": "dpo-matched-readings", "dpo+outcome": "dpo+outcome-readings"}
KINDS: tuple[ConfidenceKind, ...] = ("agreement", "ptrue", "verbal")
EXACT = "exact posterior"
SAMPLES = 10


class Scores(NamedTuple):
    """The scores of one model with one kind of confidence, in percent except for the Brier score.

    Attributes:
        accuracy: Share of right answers.
        confidence: Mean confidence.
        ece: Expected calibration error.
        ece_by_chance: Mean ECE of a perfectly calibrated model with these confidences.
        brier: Brier score.
        auroc: AUROC.
        true_error: Mean distance of the confidence from the exact probability.
        missing: Share of the answers without a confidence.
    """

    accuracy: float
    confidence: float
    ece: float
    ece_by_chance: float
    brier: float
    auroc: float
    true_error: float
    missing: float


def find_model(run: Path, method: str, seed: int) -> Path:
    """Return the folder of the model that a run trained with a method and seed."""
    found = sorted(run.glob(f"stages/{METHODS[method]}-seed-{seed}-*/model"))
    if len(found) != 1:
        raise SystemExit(f"{run}: found {len(found)} models of {method} with seed {seed}, expected one")
    return found[0]


def score_confidences(stated: Sequence[float | None], correct: Sequence[bool], truth: Sequence[float]) -> Scores:
    """Score the confidences of one answer per question.

    Args:
        stated: The confidences, (N,). Missing ones (None) count as 0.
        correct: Whether each answer is right, (N,).
        truth: The exact probability that each answer is right, (N,).
    """
    confidence = [value or 0.0 for value in stated]
    distances = [abs(value - exact) for value, exact in zip(confidence, truth, strict=True)]
    return Scores(
        accuracy=100 * fmean(correct),
        confidence=100 * fmean(confidence),
        ece=100 * ece(confidence, correct),
        ece_by_chance=100 * null_band(ece, confidence, resamples=1000).mean,
        brier=brier(confidence, correct),
        auroc=100 * auroc(confidence, correct),
        true_error=100 * fmean(distances),
        missing=100 * stated.count(None) / len(stated),
    )


def find_truth(prediction: Prediction, question: Question) -> float:
    """Return the exact probability that an answer is right; 0 if there is no answer."""
    posterior = question.posterior or {}
    return posterior.get(prediction.choice or "", 0.0)


def measure_model(model: Path, questions: Sequence[Question], seed: int, out: Path) -> dict[str, Scores]:
    """Ask a model all questions, and score its confidences.

    Args:
        model: Folder of the model.
        questions: The test questions.
        seed: Seed of the samples.
        out: File to write the predictions to.

    Returns:
        Kind of confidence -> scores. The exact posterior is included for comparison.
    """
    engine = TransformersEngine.load(str(model), batch_size=256)
    temperatures = [0.0] + [1.0] * (SAMPLES - 1)
    predictions = evaluate_kinds(
        engine, questions, KINDS, k=SAMPLES, temperature=temperatures, seed=seed, max_tokens=64, out=out
    )
    greedy = [prediction for prediction in predictions if prediction.sample == 0]
    correct = [prediction.is_correct for prediction in greedy]
    truth = [find_truth(prediction, question) for prediction, question in zip(greedy, questions, strict=True)]
    scores = {}
    for kind in KINDS:
        stated = [(prediction.confidences or {})[kind] for prediction in greedy]
        scores[kind] = score_confidences(stated, correct, truth)
    scores[EXACT] = score_confidences(truth, correct, truth)
    return scores


def print_table(rows: dict[tuple[str, str], list[Scores]]) -> None:
    """Print the mean over seeds, with the value of each seed for ECE and true error.

    Args:
        rows: (method, kind of confidence) -> scores for each seed.
    """
    heads = ["model", "confidence", "accuracy", "mean confidence", "ECE", "by chance", "Brier", "AUROC"]
    heads += ["true error", "missing"]
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for (method, kind), by_seed in rows.items():
        mean = Scores(*(fmean(values) for values in zip(*by_seed, strict=True)))
        each_ece = ", ".join(f"{scores.ece:.1f}" for scores in by_seed)
        each_error = ", ".join(f"{scores.true_error:.1f}" for scores in by_seed)
        cells = [
            method,
            kind,
            f"{mean.accuracy:.1f}",
            f"{mean.confidence:.1f}",
            f"{mean.ece:.1f} ({each_ece})",
            f"{mean.ece_by_chance:.1f}",
            f"{mean.brier:.3f}",
            f"{mean.auroc:.1f}",
            f"{mean.true_error:.1f} ({each_error})",
            f"{mean.missing:.1f}",
        ]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Measure the models of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of `catto run readings`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--n", type=int, default=1000, help="test questions per seed")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options = parser.parse_args()
    rows: dict[tuple[str, str], list[Scores]] = {}
    for seed in options.seeds:
        questions = list(load_questions("readings", "test", seed=seed, limit=options.n))
        best_accuracy = fmean(likeliest_sum(question) == question.gold for question in questions)
        share = f"{100 * best_accuracy:.1f} % of {len(questions)} questions"
        print(f"seed {seed}: the most probable sum is right for {share}")
        for method in options.methods:
            start = time.process_time()
            model = find_model(options.run, method, seed)
            out = options.run / "kinds" / f"{method}-{seed}.jsonl"
            scores_by_kind = measure_model(model, questions, seed, out)
            print(f"  {method}: {time.process_time() - start:.0f} s", json.dumps(scores_by_kind))
            for kind, scores in scores_by_kind.items():
                rows.setdefault((method, kind), []).append(scores)
    print_table(rows)


if __name__ == "__main__":
    main()
