"""A small synthetic experiment on disk: several methods, tasks, seeds and budgets, made from hashes alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from catto import methods
from catto.io.record_files import write_records
from catto.methods import METHODS, Budget
from catto.prompts import render_completion
from catto.records import Option, Prediction, Question
from catto.report.browser import Browser
from catto.report.build import build_report, read_experiment
from catto.report.cell_answers import CellAnswers
from catto.report.measuring import measure_results
from catto.report.numbers import Cell, Numbers, Results, Training
from catto.tasks.witnesses import generate_questions

HOSTILE = "<script>alert(1)</script> and </script> & <b>bold</b> \u2028 {{ 7 * 7 }} | $x_1$ 50% \\end{tabular}"
# How far a method's stated confidence is above the truth, in logits, and how often it follows the truth.
SHARPNESS = {
    "sft": 1.1,
    "sft+ts": 0.2,
    "sft+ls": 0.5,
    "dpo": 1.9,
    "dpo+ts": 0.3,
    "cft": 0.8,
    "rcft": 0.7,
    "dpo+bce": 1.5,
    "dpo+catto": 1.6,
    "dpo+outcome": 0.0,
    "dpo+outcome+ts": 0.1,
}
HIGH_RATE = 5e-6


@dataclass(frozen=True)
class World:
    """What to make; `rows` test questions a task and `k` candidates each."""

    rows: int = 120
    seeds: tuple[int, ...] = (0, 1)
    methods: tuple[str, ...] = (*METHODS, "sft+ts", "dpo+ts")
    tasks: tuple[str, ...] = ("witnesses", "snli")
    out_of: str | None = "mmlu"
    k: int = 8
    resamples: int = 200


SMALL = World(rows=30, methods=("sft", "sft+ts", "dpo", "rcft", "dpo+catto"), resamples=50)
TINY = World(rows=20, seeds=(0,), methods=("sft", "dpo"), tasks=("snli",), out_of=None, resamples=20)


def write_world(folder: Path, world: World) -> Results:
    """Write the files of the experiment and return its results."""
    questions = {task: _questions(task, world.rows) for task in world.tasks}
    for task, asked in questions.items():
        write_records(folder / f"{task}.questions.jsonl", asked)
    cells = [cell for task in world.tasks for cell in _cells(folder, world, task, questions[task])]
    return Results(
        name="synthetic",
        recipe={
            "model": {"path": "synthetic/model"},
            "seeds": list(world.seeds),
            "evaluation": {"resamples": world.resamples, "bins": 20, "k": [4, 8]},
        },
        recipe_hash="0123456789abcdef",
        versions={"catto": "0.1.0"},
        commit="52296b8c0ffee",
        cells=tuple(cells),
        questions={task: (f"{task}.questions.jsonl",) for task in world.tasks},
    )


def _cells(folder: Path, world: World, task: str, asked: Sequence[Question]) -> list[Cell]:
    sources = [task] if world.out_of is None or task == "witnesses" else [task, world.out_of]
    return [
        _cell(folder, world, asked, Place(task, source, method, budget, seed))
        for source in sources
        for method in world.methods
        for budget in (("paper", "matched") if methods.find_method(method).budgeted else (None,))
        for seed in world.seeds
    ]


@dataclass(frozen=True)
class Measured:
    """An experiment that was read and measured, without figures."""

    results: Results
    folder: Path
    cells: list[CellAnswers]
    numbers: Numbers
    browser: Browser


@cache
def measured(world: World) -> Measured:
    """Write, read and measure a world once; its folder goes with the process."""
    folder = Path(_keep(TemporaryDirectory(prefix="catto-report-")).name)
    results = write_world(folder, world)
    answers, browser = read_experiment(results, folder)
    return Measured(results, folder, answers, measure_results(results, folder, answers), browser)


@cache
def built(world: World) -> Path:
    """Write a world and build its report once, figures and all; return the experiment's folder."""
    folder = Path(_keep(TemporaryDirectory(prefix="catto-report-")).name)
    build_report(write_world(folder, world), folder, folder / "out")
    return folder


_KEPT: list[TemporaryDirectory[str]] = []


def _keep(made: TemporaryDirectory[str]) -> TemporaryDirectory[str]:
    _KEPT.append(made)
    return made


@dataclass(frozen=True)
class Place:
    """Which cell."""

    task: str
    trained_on: str
    method: str
    budget: Budget | None
    seed: int

    @property
    def name(self) -> str:
        return f"{self.trained_on}-{self.task}-{self.method}-{self.budget or 'both'}-{self.seed}"


def _cell(folder: Path, world: World, asked: Sequence[Question], place: Place) -> Cell:
    draws = random.Random(place.name)
    predictions = f"cells/{place.name}/predictions.jsonl"
    write_records(folder / predictions, [_prediction(question, place, draws, 0, 0.0) for question in asked])
    candidates, validation = None, None
    if place.task == place.trained_on and not place.method.endswith("+ts"):
        validation, other = f"cells/{place.name}/validation.jsonl", random.Random(f"{place.name} validation")
        write_records(folder / validation, [_prediction(question, place, other, 0, 0.0) for question in asked])
    if world.k and place.task == place.trained_on:
        candidates = f"cells/{place.name}/candidates.jsonl"
        rows = [_prediction(question, place, draws, k, 1.0) for question in asked for k in range(world.k)]
        write_records(folder / candidates, rows)
    return Cell(
        task=place.task,
        trained_on=place.trained_on,
        method=place.method,
        budget=place.budget,
        seed=place.seed,
        predictions=predictions,
        candidates=candidates,
        validation=validation,
        tau=1.3 if place.method.endswith("+ts") else None,
        training=_training(place, draws),
    )


def _questions(task: str, rows: int) -> list[Question]:
    if task == "witnesses":
        return list(generate_questions("test", rows, seed=0))
    return [_nli(task, index) for index in range(rows)]


def _nli(task: str, index: int) -> Question:
    draws = random.Random(f"{task}-{index}")
    labels = ("entailment", "neutral", "contradiction")
    subject = draws.choice(["A man", "Two dogs", "A child", "The band", "A cyclist", "An old friend"])
    action = draws.choice(["crosses the street", "plays by the river", "is reading a map", "sleeps in the sun"])
    premise = HOSTILE if index == 0 else f"{subject} {action} while it is getting dark."
    return Question(
        id=f"{task}-{index}",
        task=task,
        split="test",
        fields={"premise": premise, "hypothesis": f"{subject} is outdoors."},
        options=tuple(Option(label=label, text=label) for label in labels),
        gold=draws.choice(labels),
    )


def _prediction(question: Question, place: Place, draws: random.Random, sample: int, temperature: float) -> Prediction:
    """Answer from a posterior that is right on average, then state a confidence that is too sharp."""
    truth = question.posterior or _hidden(question, place)
    label = _drawn(truth, draws) if temperature or draws.random() < 0.3 else max(truth, key=lambda name: truth[name])
    shift = SHARPNESS[place.method] * (0.55 if place.budget == "matched" else 1.0) + draws.gauss(0, 0.25)
    confidence = _moved(min(max(truth[label], 0.02), 0.98), shift)
    fallback = draws.random() < (0.12 if place.task != place.trained_on else 0.02)
    reasoning = f"Weighing {', '.join(question.labels)}: the evidence speaks for {label}." + (
        f" {HOSTILE}" if question.id.endswith("-0") else ""
    )
    return Prediction(
        question=question.id,
        task=question.task,
        split="test",
        gold=question.gold,
        sample=sample,
        text=reasoning if fallback else render_completion(reasoning, label),
        label=label,
        source="fallback" if fallback else "free",
        confidence=round(confidence, 6),
        mean_logprob=round(-0.2 - draws.random(), 6),
        tokens=40,
        temperature=temperature,
        seed=place.seed,
        engine="synthetic",
        model="synthetic/model",
    )


def _hidden(question: Question, place: Place) -> dict[str, float]:
    """A posterior that leans to the gold label as often as it says."""
    draws = random.Random(f"{question.id}-{place.trained_on}")
    top = draws.uniform(0.4, 0.95) if place.task == place.trained_on else draws.uniform(0.34, 0.6)
    others = [label for label in question.labels if label != question.gold]
    lead = question.gold if draws.random() < top else draws.choice(others)
    rest = (1 - top) / (len(question.labels) - 1)
    return {label: top if label == lead else rest for label in question.labels}


def _drawn(weights: dict[str, float], draws: random.Random) -> str:
    return draws.choices(list(weights), list(weights.values()))[0]


def _moved(probability: float, shift: float) -> float:
    return 1 / (1 + math.exp(-(math.log(probability / (1 - probability)) + shift)))


def _training(place: Place, draws: random.Random) -> Training | None:
    method = methods.find_method(place.method)
    if method.stage == "scaling":
        return None
    effort = method.effort[place.budget or "paper"]
    rows = effort.pairs or 1400
    steps = rows * effort.epochs // method.batch_size
    history = tuple(
        {
            "step": float(steps * part // 6),
            "val_accuracy": 0.55 + 0.02 * part + 0.01 * draws.random(),
            "val_ece": 0.05 + 0.02 * SHARPNESS[place.method] * part + 0.01 * draws.random(),
        }
        for part in range(1, 7)
    )
    rate = draws.choice(method.learning_rates)
    seconds = rows * effort.epochs * (0.11 if method.calibration == "none" else 0.14)
    return Training(
        learning_rate=rate,
        seconds=round(seconds, 3),
        tokens=rows * effort.epochs * 310,
        rows=rows,
        epochs=effort.epochs,
        steps=steps,
        kept_step=steps if place.method != "dpo+catto" else steps // 2,
        kept_epochs=effort.epochs if place.method != "dpo+catto" else effort.epochs / 2,
        history=history,
    )
