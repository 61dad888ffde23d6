"""The stages that measure: generated text, its reading, the choice of a learning rate, temperatures, the report."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from catto import elicit, predict
from catto.engines import ScoredGeneration
from catto.io.record_files import library_versions, manifest_path, read_records, write_records
from catto.io.text_files import read_json
from catto.metrics.calibrators import VectorScaling
from catto.metrics.errors import ece
from catto.metrics.selection import choose_sampling
from catto.metrics.temperature import fit_tau, rescale_predictions
from catto.metrics.vector import fit_vector, scale_by_vector
from catto.pipeline import stage as stages
from catto.pipeline.kinds.preference import ACCURACY, MARGINS
from catto.pipeline.kinds.steps import StoredEngine, engine_of, read_questions
from catto.pipeline.stage import Stage, Work, chosen, place, write
from catto.records import Prediction, Question, content_hash
from catto.report.numbers import Cell, Results, Training
from catto.teacher.responses import GENERATIONS

PREDICTIONS, SCALED = "predictions.jsonl", "scaled.jsonl"
TEMPERATURE, TEMPERATURES, TAU, VECTOR = "temperature.json", "temperatures.json", "tau.json", "vector.json"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "numpy", "scikit-learn")


def run_generated(work: Work[stages.TextSettings]) -> None:
    """Generate responses to the questions of a split.

    Stored are text, token ids and the scores at their labels.
    """
    settings, temperatures = work.settings, work.settings.temperatures
    if isinstance(temperatures, int):  # so many samples at the temperature that another stage found
        temperatures = (read_json(work.input("temperature") / TEMPERATURE)["temperature"],) * temperatures
    write(work.out / TEMPERATURES, temperatures)
    questions = read_questions(work.input("held_out") / f"{settings.split}.jsonl", settings.limit)
    out = work.out / GENERATIONS
    predict.generate(
        engine_of(work, settings.generating.evaluation),
        questions,
        **_options(settings, temperatures),
        out=out,
        progress=lambda n, total, _: work.progress(n, total, ""),
    )


def run_predicted(work: Work[stages.PredictionSettings]) -> None:
    """Read generated responses: their labels and how probable those are, by the scores stored with the text."""
    text, generations = work.settings.text, work.input("generated") / GENERATIONS
    questions = read_questions(work.input("held_out") / f"{text.split}.jsonl", text.limit)
    if not questions[0].has_labels:
        _read_short_answers(work, questions)
        return
    predict.read(
        StoredEngine(work, text.generating.evaluation, generations),
        questions,
        read_records(generations, ScoredGeneration),
        **_options(text, read_json(work.input("generated") / TEMPERATURES)),
        out=work.out / PREDICTIONS,
        progress=lambda n, total, right: work.progress(n, total, f"{100 * right / n:.1f} % right" if n else ""),
    )


def _read_short_answers(work: Work[stages.PredictionSettings], questions: Sequence[Question]) -> None:
    """Read and grade the answers of generated responses, and ask the model for P(True) of each."""
    text, generations = work.settings.text, work.input("generated") / GENERATIONS
    out = work.out / PREDICTIONS
    own_copy = elicit.sibling_path(out, "generations")
    shutil.copyfile(manifest_path(generations), manifest_path(own_copy))
    shutil.copyfile(generations, own_copy)
    elicit.evaluate_kinds(
        engine_of(work, text.generating.evaluation),
        questions,
        ["ptrue"],
        **_options(text, read_json(work.input("generated") / TEMPERATURES)),
        out=out,
        progress=lambda n, total, _: work.progress(n, total, "judged"),
    )


def _options(text: stages.TextSettings, temperatures: Sequence[float]) -> predict.SamplingOptions:
    """Return what generating and reading must agree on."""
    return {
        "k": len(temperatures),
        "temperature": temperatures,
        "seed": text.seed,
        "max_tokens": text.generating.evaluation.max_tokens,
        "reasoning": text.generating.reasoning,
    }


def _predictions(folder: Path) -> list[Prediction]:
    return list(read_records(folder / PREDICTIONS, Prediction))


def run_chosen(work: Work[stages.ChoiceSettings]) -> None:
    """Take the learning rate of the lowest validation ECE (20 bins); a single one, or none, is not measured."""
    rates, scores = work.settings.rates, list[float]()
    for number in range(len(rates) if len(rates) > 1 else 0):
        runs = [_predictions(work.input(f"validation {number} seed {seed}")) for seed in work.settings.seeds]
        errors = [ece([row.confidence for row in rows], [row.is_correct for row in rows]) for rows in runs]
        scores.append(fmean(errors))
    best = scores.index(min(scores)) if scores else 0
    role = f"{best} seed {work.settings.seed}"
    choice = {
        "learning_rate": rates[best] if rates else None,  # the base model has none
        "model": f"model {role}",
        "validation": f"validation {role}" if scores else None,
        "validation_ece": {f"{rate:g}": score for rate, score in zip(rates, scores, strict=False)},
    }
    write(work.out / "choice.json", choice)


def run_tau(work: Work[stages.ScalingSettings]) -> None:
    """Fit the temperature of the label token, or the vector, on the chosen model's greedy validation predictions."""
    needs, kind = work.stage.needs, work.settings.kind
    validation = needs["validation"] if "validation" in needs else chosen(work.root, needs["model"], "validation")
    predictions = _predictions(place(work.root, validation))
    if kind == "vector":
        fit = fit_vector(predictions)
        write(work.out / VECTOR, {**vars(fit), "scaling": fit.scaling.model_dump(mode="json")})
    else:
        scaling = fit_tau(predictions, kind)
        write(work.out / TEMPERATURE, {"temperature": scaling.tau, **asdict(scaling)})


def run_sampling(work: Work) -> None:
    """Choose the temperature at which candidates are sampled, by Confidence@k on validation questions."""
    tau = read_json(work.input("tau") / TEMPERATURE)["temperature"]
    write(work.out / TEMPERATURE, asdict(choose_sampling(_predictions(work.input("predicted")), tau)))


def run_scaled(work: Work[stages.ScalingSettings]) -> None:
    """Rescale the confidence of predictions: greedy answers, or samples, which are ranked by it."""
    predictions, kind = _predictions(work.input("predicted")), work.settings.kind
    fallback = fmean(prediction.source == "fallback" for prediction in predictions)
    about = {"temperature": predictions[0].temperature, "fallback_rate": fallback}
    if kind == "vector":
        vector = VectorScaling.model_validate(read_json(work.input("tau") / VECTOR)["scaling"])
        write(work.out / TAU, {"tau": None, "vector": vector.model_dump(mode="json"), **about})
        write_records(work.out / SCALED, scale_by_vector(predictions, vector))
    else:
        tau = read_json(work.input("tau") / TEMPERATURE)["temperature"]
        write(work.out / TAU, {"tau": tau, **about})
        write_records(work.out / SCALED, rescale_predictions(predictions, tau, kind))


# ---- the report -----------------------------------------------------------------------------------------------------


def run_report(work: Work[stages.ReportSettings]) -> None:
    """Collect every cell's files and how its model was trained; build tables, figures and the page of them."""
    from catto.report.build import build

    settings, recipe = work.settings, work.settings.recipe.model_dump(mode="json", exclude={"launch", "resources"})
    questions: dict[str, dict[int, str]] = {}
    for cell in settings.cells:
        questions.setdefault(cell.place.task, {})[cell.place.seed] = _path(work.root, cell.questions, "test.jsonl")
    results = Results(
        name=settings.recipe.name,
        recipe=recipe,
        recipe_hash=content_hash(recipe),
        versions=library_versions(*LIBRARIES),
        commit=commit(),
        cells=tuple(_cell(work.root, cell) for cell in settings.cells),
        questions={task: tuple(by_seed.values()) for task, by_seed in questions.items()},
    )
    write(work.out / "results.json", results.model_dump(mode="json"))
    build(results, work.root, work.out, lambda done, total: work.progress(done, total, "measuring"))


def _cell(root: Path, plan: stages.CellPlan) -> Cell:
    scaled, candidates = plan.predictions.kind == "scaled", plan.candidates
    rescaled_stage = plan.predictions if scaled else candidates
    tau = None if rescaled_stage is None else read_json(place(root, rescaled_stage) / TAU)
    model = chosen(root, plan.chosen)
    training = None
    if model.kind == "train" and not scaled:
        training = Training.model_validate(read_json(place(root, model) / "training.json"))
    several = len(plan.validation) > 1
    validation = chosen(root, plan.chosen, "validation") if several else next(iter(plan.validation), None)
    return Cell(
        **plan.place._asdict(),
        predictions=_path(root, plan.predictions, SCALED if scaled else PREDICTIONS),
        candidates=None if candidates is None else _path(root, candidates, SCALED),
        validation=None if validation is None else _path(root, validation, PREDICTIONS),
        tau=tau and tau["tau"],
        vector=tau and tau.get("vector"),
        sampling_temperature=tau["temperature"] if tau and candidates is not None else None,
        candidates_fallback_rate=tau["fallback_rate"] if tau and candidates is not None else None,
        preference=_margins(root, plan.preference),
        training=training,
    )


def _margins(root: Path, stage: Stage | None) -> str | None:
    """Return the file of the margins of held-out pairs; None where there are none, as with few stored responses."""
    if stage is None or read_json(place(root, stage) / ACCURACY)["n"] == 0:
        return None
    return _path(root, stage, MARGINS)


def _path(root: Path, stage: Stage, file: str) -> str:
    """Return a stage's file as seen from the experiment's root: such a path may be stored."""
    return (place(root, stage) / file).relative_to(root).as_posix()


def commit() -> str | None:
    """Return the commit of the code that runs, where it runs from a checkout."""
    command, here = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent
    try:
        return subprocess.run(command, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
