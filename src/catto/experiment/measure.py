"""The stages that measure: predictions, the choice of a learning rate, temperature scaling, candidates."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from catto.evaluation.confidence import evaluate, is_correct
from catto.evaluation.metrics import ece
from catto.evaluation.scaling import fit_tau, rescaled
from catto.experiment.data import read_questions
from catto.experiment.stages import Work
from catto.records import Prediction, read_records, write_records

PREDICTIONS, SCALED = "predictions.jsonl", "scaled.jsonl"


def engine_of(work: Work, role: str = "model") -> Any:
    """The engine that a stage generates with, on the model that it needs."""
    if work.settings["engine"] == "vllm":
        from catto.engines.vllm import VLLMEngine

        return VLLMEngine(str(work.model(role)), batch_size=work.settings["batch_size"])
    from catto.engines.transformers import TransformersEngine

    engine = TransformersEngine.load(work.model(role), batch_size=work.settings["batch_size"])
    engine.model = work.stage.needs[role].name  # predictions name the model, not the folder it happens to be in
    return engine


def run_predicted(work: Work) -> None:
    """Answer the questions of a split."""
    predict(work, temperature=work.settings["temperature"], k=work.settings["k"])


def predict(work: Work, *, temperature: float, k: int) -> list[Prediction]:
    """Predictions of the needed model on the split's questions, resumable."""
    of = work.settings
    questions = read_questions(work.input("held_out") / f"{of.get('split', 'test')}.jsonl")
    return evaluate(
        engine_of(work),
        questions,
        k=k,
        temperature=temperature,
        seed=of["seed"],
        max_tokens=of["max_tokens"],
        reasoning=of["reasoning"],
        out=work.out / PREDICTIONS,
        progress=lambda n, total, right: work.progress(n, total, f"{100 * right / n:.1f} % right" if n else ""),
    )


def read_predictions(path: Path) -> list[Prediction]:
    """All predictions of a file."""
    return list(read_records(path, Prediction))


def validation_ece(path: Path) -> float:
    """ECE of stored predictions, 20 bins as everywhere a model is chosen."""
    found = read_predictions(path)
    return ece([one.confidence for one in found], [is_correct(one) for one in found])


def run_chosen(work: Work) -> None:
    """Take the learning rate of the lowest validation ECE; with one rate there is nothing to choose."""
    rates = work.settings["rates"]
    scores = [_mean_ece(work, number) for number in range(len(rates))] if len(rates) > 1 else []
    best = scores.index(min(scores)) if scores else 0
    seat = f"{best} seed {work.settings['seed']}"
    work.write(
        "choice.json",
        {
            "learning_rate": rates[best],
            "model": work.relative(f"model {seat}", "model"),
            "training": work.relative(f"model {seat}", "training.json"),
            "validation": work.relative(f"validation {seat}", PREDICTIONS) if scores else None,
            "validation_ece": {f"{rate:g}": score for rate, score in zip(rates, scores, strict=False)},
        },
    )


def _mean_ece(work: Work, number: int) -> float:
    """Mean validation ECE of one learning rate over the seeds that the choice looks at."""
    roles = [f"validation {number} seed {seed}" for seed in work.settings["seeds"]]
    return fmean(validation_ece(work.input(role) / PREDICTIONS) for role in roles)


def best_tau(work: Work) -> float:
    """The temperature of the lowest validation NLL of the chosen model."""
    if "validation" in work.stage.needs:
        path = work.input("validation") / PREDICTIONS
    else:
        path = work.root / work.read("model", "choice.json")["validation"]
    return fit_tau(read_predictions(path)).tau


def run_scaled(work: Work) -> None:
    """Temperature scaling: keep the greedy answers and rescale their confidence, or sample at tau."""
    tau = best_tau(work)
    if work.settings["decode"] == "sample":
        found = predict(work, temperature=tau, k=1)
    else:
        found = read_predictions(work.input("tested") / PREDICTIONS)
    rescale(work, found, tau)


def run_candidates(work: Work) -> None:
    """k samples a question at tau, ranked by their confidence at tau."""
    tau = best_tau(work)
    rescale(work, predict(work, temperature=tau, k=work.settings["k"]), tau)


def rescale(work: Work, predictions: list[Prediction], tau: float) -> None:
    """Write the predictions with their confidence at tau."""
    work.write("tau.json", {"tau": tau})
    write_records(work.out / SCALED, rescaled(predictions, tau))
