"""The stages that measure: generated text and its reading, the choice of a learning rate, temperatures, candidates."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from catto.engines import Generation
from catto.evaluation.confidence import generate, is_correct, read
from catto.evaluation.metrics import ece
from catto.evaluation.scaling import fit_tau, rescaled
from catto.evaluation.selection import choose_sampling
from catto.experiment.data import read_questions
from catto.experiment.engine import engine_of
from catto.experiment.stages import Stage, Work, chosen, place
from catto.records import Prediction, Question, read_records, write_records

GENERATIONS, PREDICTIONS, SCALED = "generations.jsonl", "predictions.jsonl", "scaled.jsonl"
TEMPERATURE, TEMPERATURES, TAU = "temperature.json", "temperatures.json", "tau.json"


def run_generated(work: Work) -> None:
    """Generate responses to the questions of a split: text and token ids, unread."""
    work.write(TEMPERATURES, _temperatures(work))
    generate(
        engine_of(work),
        _questions(work, work.stage),
        **_asked(work.stage, _temperatures(work)),
        out=work.out / GENERATIONS,
        progress=lambda n, total: work.progress(n, total, ""),
    )


def run_predicted(work: Work) -> None:
    """Read generated responses: their labels, and by the model that wrote them how probable those are."""
    text = work.stage.needs["generated"]
    read(
        engine_of(work),
        _questions(work, text),
        list(read_records(work.input("generated") / GENERATIONS, Generation)),
        **_asked(text, work.read("generated", TEMPERATURES)),
        out=work.out / PREDICTIONS,
        progress=lambda n, total, right: work.progress(n, total, f"{100 * right / n:.1f} % right" if n else ""),
    )


def _temperatures(work: Work) -> list[float]:
    """One temperature a sample: the settings', or the one that another stage found."""
    if "temperature" in work.stage.needs:
        return [work.read("temperature", TEMPERATURE)["temperature"]] * int(work.settings["k"])
    return list(work.settings["temperatures"])


def _questions(work: Work, text: Stage) -> list[Question]:
    """The questions that a stage of generated text answers; its reading needs the same file."""
    return read_questions(work.input("held_out") / f"{text.settings['split']}.jsonl", text.settings.get("limit"))


def _asked(text: Stage, temperatures: list[float]) -> dict[str, Any]:
    """How a stage of generated text asks."""
    names = ("seed", "max_tokens", "reasoning")
    return {**{name: text.settings[name] for name in names}, "k": len(temperatures), "temperature": temperatures}


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
            "model": f"model {seat}",
            "validation": f"validation {seat}" if scores else None,
            "validation_ece": {f"{rate:g}": score for rate, score in zip(rates, scores, strict=False)},
        },
    )


def _mean_ece(work: Work, number: int) -> float:
    """Mean validation ECE of one learning rate over the seeds that the choice looks at."""
    roles = [f"validation {number} seed {seed}" for seed in work.settings["seeds"]]
    return fmean(validation_ece(work.input(role) / PREDICTIONS) for role in roles)


def run_tau(work: Work) -> None:
    """Fit the temperature of the label token on the chosen model's greedy validation predictions."""
    needs = work.stage.needs
    found = needs["validation"] if "validation" in needs else chosen(work.root, needs["model"], "validation")
    scaling = fit_tau(read_predictions(place(work.root, found) / PREDICTIONS))
    work.write(TEMPERATURE, {"temperature": scaling.tau, **asdict(scaling)})


def run_sampling(work: Work) -> None:
    """Choose the temperature at which candidates are sampled, by Confidence@k on validation questions."""
    tau = work.read("tau", TEMPERATURE)["temperature"]
    work.write(TEMPERATURE, asdict(choose_sampling(read_predictions(work.input("predicted") / PREDICTIONS), tau)))


def run_scaled(work: Work) -> None:
    """Rescale the confidence of predictions by tau: greedy answers, or samples, which it ranks."""
    tau = work.read("tau", TEMPERATURE)["temperature"]
    predictions = read_predictions(work.input("predicted") / PREDICTIONS)
    fallback = fmean(one.source == "fallback" for one in predictions)
    work.write(TAU, {"tau": tau, "temperature": predictions[0].temperature, "fallback_rate": fallback})
    write_records(work.out / SCALED, rescaled(predictions, tau))
