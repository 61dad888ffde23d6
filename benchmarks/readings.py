"""Three kinds of confidence in short answers, before and after `outcome` on P(True), next to the exact posterior.

First `catto run readings --set seeds=[0,1,2] --out RUN` trains the models; then `python benchmarks/readings.py RUN`
asks each of them the test questions of its seed. The first of K samples is greedy and is the answer that counts; the
others, at temperature 1, give the agreement. All three confidences are of the same answers, since every prompt asks
for a stated confidence. Prints one Markdown row per kind of confidence and model: the mean over seeds, and each seed.
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

METHODS = {"sft": "sft-readings", "dpo": "dpo-matched-readings", "dpo+outcome": "dpo+outcome-readings"}
KINDS: tuple[ConfidenceKind, ...] = ("agreement", "ptrue", "verbal")
EXACT = "exact posterior"
SAMPLES = 10


class Scores(NamedTuple):
    """The numbers of one model and one confidence, in per cent except the Brier score."""

    accuracy: float
    confidence: float
    ece: float
    ece_by_chance: float  # what a perfectly calibrated model with these confidences would have, on average
    brier: float
    auroc: float
    true_error: float
    missing: float


def find_model(run: Path, method: str, seed: int) -> Path:
    """Return the folder of a trained model of the run."""
    found = sorted(run.glob(f"stages/{METHODS[method]}-seed-{seed}-*/model"))
    if len(found) != 1:
        raise SystemExit(f"{run}: {len(found)} models of {method} with seed {seed}, expected one")
    return found[0]


def score_confidences(stated: Sequence[float | None], correct: Sequence[bool], truth: Sequence[float]) -> Scores:
    """Score the confidences in one answer per question; a missing one counts as 0.

    Args:
        stated: The confidences, (N,).
        correct: Whether each answer is right, (N,).
        truth: The exact probability that each answer is right, (N,).
    """
    confidence = [value or 0.0 for value in stated]
    gaps = [abs(value - exact) for value, exact in zip(confidence, truth, strict=True)]
    return Scores(
        accuracy=100 * fmean(correct),
        confidence=100 * fmean(confidence),
        ece=100 * ece(confidence, correct),
        ece_by_chance=100 * null_band(ece, confidence, resamples=1000).mean,
        brier=brier(confidence, correct),
        auroc=100 * auroc(confidence, correct),
        true_error=100 * fmean(gaps),
        missing=100 * stated.count(None) / len(stated),
    )


def find_truth(prediction: Prediction, question: Question) -> float:
    """Return the exact probability of an answer; 0 without an answer."""
    posterior = question.posterior or {}
    return posterior.get(prediction.choice or "", 0.0)


def measure_model(model: Path, questions: Sequence[Question], seed: int, out: Path) -> dict[str, Scores]:
    """Ask one model all questions; score the three kinds of confidence and, for comparison, the exact posterior."""
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
    """Print the mean over seeds, with the value of each seed for ECE and true error."""
    print(
        "| model | confidence | accuracy | mean confidence | ECE | by chance | Brier | AUROC | true error | missing |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (method, kind), by_seed in rows.items():
        mean = Scores(*(fmean(values) for values in zip(*by_seed, strict=True)))
        each_ece = ", ".join(f"{scores.ece:.1f}" for scores in by_seed)
        each_error = ", ".join(f"{scores.true_error:.1f}" for scores in by_seed)
        cells = [method, kind, f"{mean.accuracy:.1f}", f"{mean.confidence:.1f}", f"{mean.ece:.1f} ({each_ece})"]
        cells += [
            f"{mean.ece_by_chance:.1f}",
            f"{mean.brier:.3f}",
            f"{mean.auroc:.1f}",
            f"{mean.true_error:.1f} ({each_error})",
        ]
        cells.append(f"{mean.missing:.1f}")
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
        bayes = fmean(likeliest_sum(question) == question.gold for question in questions)
        print(f"seed {seed}: the most probable sum is right for {100 * bayes:.1f} % of {len(questions)} questions")
        for method in options.methods:
            start = time.process_time()
            out = options.run / "kinds" / f"{method}-{seed}.jsonl"
            scores = measure_model(find_model(options.run, method, seed), questions, seed, out)
            print(f"  {method}: {time.process_time() - start:.0f} s", json.dumps(scores))
            for kind, numbers in scores.items():
                rows.setdefault((method, kind), []).append(numbers)
    print_table(rows)


if __name__ == "__main__":
    main()
