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
from catto.records import ConfidenceKind, Prediction, Question
from catto.tasks import load_questions
from catto.tasks.readings import likeliest_sum

METHODS = {"sft": "sft-readings", "dpo": "dpo-matched-readings", "dpo+outcome": "dpo+outcome-readings"}
KINDS: tuple[ConfidenceKind, ...] = ("agreement", "ptrue", "verbal")
SAMPLES = 10


class Scores(NamedTuple):
    """The numbers of one model and one kind of confidence, in per cent except the Brier score."""

    accuracy: float
    confidence: float
    ece: float
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


def score_kind(kind: ConfidenceKind, predictions: Sequence[Prediction], questions: Sequence[Question]) -> Scores:
    """Score one kind of confidence in one answer per question; a missing one counts as 0."""
    stated = [(prediction.confidences or {})[kind] for prediction in predictions]
    confidence = [value or 0.0 for value in stated]
    correct = [prediction.is_correct for prediction in predictions]
    gaps = []
    for value, prediction, question in zip(confidence, predictions, questions, strict=True):
        truth = (question.posterior or {}).get(prediction.choice or "", 0.0)
        gaps.append(abs(value - truth))
    return Scores(
        accuracy=100 * fmean(correct),
        confidence=100 * fmean(confidence),
        ece=100 * ece(confidence, correct),
        brier=brier(confidence, correct),
        auroc=100 * auroc(confidence, correct),
        true_error=100 * fmean(gaps),
        missing=100 * stated.count(None) / len(stated),
    )


def measure_model(model: Path, questions: Sequence[Question], seed: int, out: Path) -> dict[str, Scores]:
    """Ask one model all questions and score the three kinds of confidence."""
    engine = TransformersEngine.load(str(model), batch_size=256)
    temperatures = [0.0] + [1.0] * (SAMPLES - 1)
    predictions = evaluate_kinds(
        engine, questions, KINDS, k=SAMPLES, temperature=temperatures, seed=seed, max_tokens=64, out=out
    )
    greedy = [prediction for prediction in predictions if prediction.sample == 0]
    return {kind: score_kind(kind, greedy, questions) for kind in KINDS}


def print_table(rows: dict[tuple[str, str], list[Scores]]) -> None:
    """Print the mean over seeds, with the value of each seed for ECE and true error."""
    print("| model | confidence | accuracy | mean confidence | ECE | Brier | AUROC | true error | missing |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (method, kind), by_seed in rows.items():
        mean = Scores(*(fmean(values) for values in zip(*by_seed, strict=True)))
        each_ece = ", ".join(f"{scores.ece:.1f}" for scores in by_seed)
        each_error = ", ".join(f"{scores.true_error:.1f}" for scores in by_seed)
        cells = [method, kind, f"{mean.accuracy:.1f}", f"{mean.confidence:.1f}", f"{mean.ece:.1f} ({each_ece})"]
        cells += [f"{mean.brier:.3f}", f"{mean.auroc:.1f}", f"{mean.true_error:.1f} ({each_error})"]
        cells.append(f"{mean.missing:.1f}")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Measure the models of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of `catto run readings`")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--n", type=int, default=1000, help="test questions per seed")
    options = parser.parse_args()
    rows: dict[tuple[str, str], list[Scores]] = {}
    for seed in options.seeds:
        questions = list(load_questions("readings", "test", seed=seed, limit=options.n))
        bayes = fmean(likeliest_sum(question) == question.gold for question in questions)
        print(f"seed {seed}: the most probable sum is right for {100 * bayes:.1f} % of {len(questions)} questions")
        for method in METHODS:
            start = time.process_time()
            out = options.run / "kinds" / f"{method}-{seed}.jsonl"
            scores = measure_model(find_model(options.run, method, seed), questions, seed, out)
            print(f"  {method}: {time.process_time() - start:.0f} s", json.dumps(scores))
            for kind in KINDS:
                rows.setdefault((method, kind), []).append(scores[kind])
    print_table(rows)


if __name__ == "__main__":
    main()
