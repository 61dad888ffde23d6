"""The stages that measure: generated text and its reading, the choice of a learning rate, temperatures, candidates.

The last stage: what every cell came to, as one `Results`, and the report made of it.
"""

from __future__ import annotations

import itertools
import subprocess
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from catto.engines import Generation
from catto.experiment.graph import CellPlan, Graph
from catto.experiment.stages import Stage, Work, chosen, place, read
from catto.experiment.steps import engine_of, read_questions
from catto.files import library_versions, read_records, write_records
from catto.metrics.catalogue import ece
from catto.metrics.selection import choose_sampling
from catto.metrics.temperature import fit_tau, rescaled
from catto.predict.predictor import generate, is_correct
from catto.predict.predictor import read as read_generated
from catto.records import Prediction, Question, content_hash
from catto.report.numbers import Cell, Results, Training
from catto.teacher.responses import GENERATIONS

PREDICTIONS, SCALED = "predictions.jsonl", "scaled.jsonl"
TEMPERATURE, TEMPERATURES, TAU = "temperature.json", "temperatures.json", "tau.json"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", "scikit-learn")


def run_generated(work: Work) -> None:
    """Generate responses to the questions of a split: text and token ids, unread."""
    work.write(TEMPERATURES, _temperatures(work))
    generate(
        engine_of(work),
        _questions(work, work.stage),
        **_request_settings(work.stage, _temperatures(work)),
        out=work.out / GENERATIONS,
        progress=lambda n, total: work.progress(n, total, ""),
    )


def run_predicted(work: Work) -> None:
    """Read generated responses: their labels, and by the model that wrote them how probable those are."""
    text = work.stage.needs["generated"]
    read_generated(
        engine_of(work),
        _questions(work, text),
        list(read_records(work.input("generated") / GENERATIONS, Generation)),
        **_request_settings(text, work.read("generated", TEMPERATURES)),
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


def _request_settings(text: Stage, temperatures: list[float]) -> dict[str, Any]:
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


def run_report(work: Work) -> None:
    """Collect the cells and build tables, figures and the page."""
    from catto.report.build import build
    from catto.report.measuring import steps

    results = collect(work)
    work.write("results.json", results.model_dump(mode="json"))
    counted, total = itertools.count(1), steps(results)
    build(results, work.root, work.out, lambda: work.progress(next(counted), total, "measuring"))


def collect(work: Work) -> Results:
    """Every cell's files and how its model was trained."""
    plans, recipe = Graph(work.recipe).cells(), work.recipe.model_dump(mode="json")
    return Results(
        name=work.recipe.name,
        recipe=recipe,
        recipe_hash=content_hash(recipe),
        versions=library_versions(*LIBRARIES),
        commit=commit(),
        cells=tuple(_cell(work, plan, number) for number, plan in enumerate(plans)),
        questions={
            task: tuple(work.relative(f"held_out {task} {seed}", "test.jsonl") for seed in work.recipe.seeds)
            for task in dict.fromkeys(plan.task for plan in plans)
        },
    )


def _cell(work: Work, plan: CellPlan, number: int) -> Cell:
    """A cell from the stages that the report needs, which are those that were run, whatever a plan of now would say."""
    training = read(place(work.root, chosen(work.root, work.stage.needs[f"chosen {number}"])) / "training.json")
    scaled, sampled = plan.predictions.kind == "scaled", plan.candidates is not None
    rescaled = f"predictions {number}" if scaled else f"candidates {number}" if sampled else None
    tau = None if rescaled is None else work.read(rescaled, TAU)
    return Cell(
        task=plan.task,
        trained_on=plan.trained_on,
        method=plan.method,
        budget=plan.budget,
        seed=plan.seed,
        predictions=work.relative(f"predictions {number}", SCALED if scaled else PREDICTIONS),
        candidates=work.relative(f"candidates {number}", SCALED) if sampled else None,
        tau=tau and tau["tau"],
        sampling_temperature=tau["temperature"] if tau and sampled else None,
        candidates_fallback_rate=tau["fallback_rate"] if tau and sampled else None,
        training=None if scaled else Training.model_validate(training),
    )


def commit() -> str | None:
    """The commit of the code that runs, where it runs from a checkout."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
