"""The engine that stages generate and score with. The last one is kept: most stages ask the model of the one before.

The stages that make data: questions, held-out questions, the teacher's responses, a model's own samples.

The stages that measure: generated text and its reading, the choice of a learning rate, temperatures, candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from catto.engines import Generation
from catto.experiment.stages import Stage, Work, chosen, place
from catto.files import library_versions, read_records, write_records
from catto.metrics.catalogue import ece
from catto.metrics.selection import choose_sampling
from catto.metrics.temperature import fit_tau, rescaled
from catto.predict.predictor import generate, is_correct, read
from catto.recipe import TeacherSettings
from catto.records import Manifest, Prediction, Question, Split
from catto.tasks import TASKS, Task, from_file, load
from catto.tasks.witnesses import generate as witness_questions
from catto.teacher import ask, write_rows
from catto.teacher.responses import GENERATIONS

# ---- engine


_last: tuple[tuple[str, str, int], Any] | None = None


def engine_of(work: Work, role: str = "model") -> Any:
    """The engine of a stage on the model that it needs; another model than the last one's is loaded in its place."""
    global _last
    key = work.settings["engine"], str(work.model(role).resolve()), work.settings["batch_size"]
    if _last is None or _last[0] != key:
        release()
        _last = key, _loaded(*key)
    engine = _last[1]
    engine.model = work.stage.needs[role].name  # predictions name the model, not the folder it happens to be in
    return engine


def _loaded(engine: str, path: str, batch_size: int) -> Any:
    if engine == "vllm":
        from catto.engines.vllm import VLLMEngine

        return VLLMEngine(path, batch_size=batch_size)
    from catto.engines.transformers import TransformersEngine

    return TransformersEngine.load(path, batch_size=batch_size)


def release() -> None:
    """Let go of the last engine, for a stage that needs the memory."""
    global _last
    _last = None


# ---- data


WITNESS_SIZES: dict[Split, int] = {"train": 6000, "validation": 500, "test": 1000}


def questions_of(settings: Mapping[str, Any], split: Split, seed: int) -> tuple[list[Question], dict[str, Any]]:
    """The questions of one split as a recipe's task block says, and what loading counted."""
    name, limit = settings["task"], settings.get(split)
    knobs = {key: settings[key] for key in ("options", "witnesses", "reliabilities") if settings.get(key) is not None}
    if name == "witnesses":
        return list(witness_questions(split, limit or WITNESS_SIZES[split], seed=seed, **knobs)), {}
    task = task_of(name, settings)
    loaded = load(task, split, seed=seed, data_dir=settings.get("data_dir"), files=settings.get("files"), limit=limit)
    found = list(loaded)
    return found, {"read": loaded.report.read, "kept": loaded.report.kept, "gold": dict(loaded.report.gold)}


def task_of(name: str, settings: Mapping[str, Any]) -> Task:
    """The task of a recipe's block: one of the table's, or the user's own file."""
    if settings.get("path") is None:
        if name not in TASKS:
            raise ValueError(f"tasks.{name}: neither one of {', '.join(TASKS)} nor given a path")
        return TASKS[name]
    named = {key: settings[key] for key in ("answer", "labels") if settings.get(key) is not None}
    return from_file(settings["path"], fields=settings["fields"] or {}, name=name, **named)


def save(path: Path, questions: list[Question], notes: dict[str, Any], seed: int) -> None:
    """Write questions with their manifest."""
    if not questions:
        raise ValueError(f"no question for {path.stem}")
    counts = {"questions": len(questions)}
    write_records(
        path, questions, Manifest(kind="questions", counts=counts, seed=seed, notes=notes, versions=library_versions())
    )


def run_questions(work: Work) -> None:
    """Training questions. Seed 0: a sample of them is the same for every seed."""
    save(work.out / "train.jsonl", *questions_of(work.settings, "train", 0), seed=0)


def run_held_out(work: Work) -> None:
    """Validation or test questions of one seed."""
    seed, split = work.settings["seed"], work.settings["split"]
    save(work.out / f"{split}.jsonl", *questions_of(work.settings, split, seed), seed=seed)


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Questions of a file, at most `limit`."""
    return list(read_records(path, Question))[:limit]


def run_responses(work: Work) -> None:
    """Ask the teacher; what it answers is kept unread."""
    ask(_asked(work, work.stage), None, _settings(work, work.stage), work.out, _counting(work, "responses"))


def run_sampled(work: Work) -> None:
    """Sample one response of a model to every question; it is kept unread."""

    settings = _settings(work, work.stage)
    ask(_asked(work, work.stage), engine_of(work), settings, work.out, _counting(work, "samples"))


def run_rows(work: Work) -> None:
    """Read responses and write the rows made of them."""
    responses = work.stage.needs["responses"]
    file, kinds = work.input("responses") / GENERATIONS, work.settings["rows"]
    summary = write_rows(_asked(work, responses), _settings(work, responses), file, work.out, kinds)
    if "preferences" in kinds:  # the teacher's, which `catto teach` prints
        work.write("yield.json", summary.model_dump(mode="json"))


def _asked(work: Work, responses: Stage) -> list[Question]:
    """The questions that a stage of responses puts; their rows need the same file."""
    if "questions" in responses.needs:
        return read_questions(work.input("questions") / "train.jsonl", responses.settings.get("limit"))
    found = read_questions(work.input("held_out") / "validation.jsonl")
    return [question.model_copy(update={"split": "train"}) for question in found]  # the split that is asked


def _settings(work: Work, responses: Stage) -> TeacherSettings:
    """How a stage of responses asks: the recipe's teacher, or a trained model as one."""
    of = responses.settings
    if responses.kind == "responses":
        return work.recipe.teacher.model_copy(update={"n": of["n"]})
    return TeacherSettings(
        n=1,
        temperature=(of["temperature"], of["temperature"]),
        max_tokens=of["max_tokens"],
        reasoning=of["reasoning"],
        seed=of["seed"],
        concurrency=of["batch_size"],
    )


def _counting(work: Work, what: str) -> Callable[[int, int], None]:
    return lambda n, total: work.progress(n, total, what)


# ---- measure


PREDICTIONS, SCALED = "predictions.jsonl", "scaled.jsonl"
TEMPERATURE, TEMPERATURES, TAU = "temperature.json", "temperatures.json", "tau.json"


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
    read(
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
