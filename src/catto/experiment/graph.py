"""What the local files hold that a recipe names: part of a stage's key, so that an edited file is read again.

Recipe -> stages. One function a stage; each puts into the settings what determines the result and nothing else.

A setting counts by default: what has no part in a stage is excluded by name, so that one that is added to the recipe
changes keys until somebody says that it does not. Text is generated (or asked for) in one stage and read in another:
the wording of the prompts is in the key of the first, the parser's version in that of the second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catto import answers, prompts
from catto.experiment.stages import Stage
from catto.experiment.steps import task_of
from catto.files import opened
from catto.methods import METHODS, Budget, Effort, Method, method
from catto.problems import DataError
from catto.recipe import SAMPLING, SAMPLING_QUESTIONS, Recipe, StageSettings, TaskSettings
from catto.records import Split, content_hash
from catto.report import VERSION
from catto.tasks.loading import LocalFiles, find

# ---- contents


# Files up to this size are read whole, larger ones (weights) in so many pieces from the first byte to the last.
WHOLE, PIECES, PIECE = 2**28, 64, 2**20


def task_contents(name: str, settings: TaskSettings) -> str | None:
    """Hash of the files that a task's questions are read from; None where they are generated, or the hub's."""
    try:
        source = find(task_of(name, settings.model_dump()), settings.files, settings.data_dir)
    except (DataError, ValueError):  # what is not there is told by the stage that reads it
        return None
    return _hash(path for paths in source.paths.values() for path in paths) if isinstance(source, LocalFiles) else None


def contents(place: str | None) -> str | None:
    """Hash of a file, or of the files in a folder; None where there is neither, as for a name on the hub."""
    path = Path(place or "")
    if place is None or not (path.is_file() or path.is_dir()):
        return None
    return _hash([path] if path.is_file() else (file for file in path.iterdir() if file.is_file()))


def _hash(files: Iterable[Path]) -> str | None:
    """Names, sizes and bytes. No dates: a copy on another machine has the same key."""
    found = sorted(set(files))
    return content_hash([[path.name, path.stat().st_size, _digest(path)] for path in found]) if found else None


def _digest(path: Path) -> str:
    size, digest = path.stat().st_size, hashlib.sha256()
    with opened(path, plain=True) as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        for number in range(PIECES):
            file.seek((size - PIECE) * number // (PIECES - 1))
            digest.update(file.read(PIECE))
    return digest.hexdigest()


# ---- graph


# Of the recipe, what no training reads as it is: it is in the needs, in the blocks, or in what follows from them.
NOT_TRAINING = frozenset(
    {"name", "tasks", "train_on", "methods", "budgets", "small_pairs", "seeds", "lr_choice", "teacher"}
    | {"model", "sft", "preference", "rcft", "outcome", "evaluation"}
)
NOT_SFT = NOT_TRAINING | {"prefix_sharing"}
# Of a method and of its block, what enters a training as it is resolved from both, or is its title or its start.
RESOLVED = frozenset({"title", "start", "effort", "epochs", "learning_rates", "batch_size"})
# Of `outcome`, what its responses are sampled by, and what its training reads.
STREAMED, UNSTREAMED = frozenset({"questions", "temperature"}), frozenset({"score", "rows_per_pair"})
# Of `evaluation`, what generated text and its reading do not depend on.
MEASURING = frozenset({"bins", "resamples", "unparsed", "decode", "k", "sampling"})


@dataclass(frozen=True)
class CellPlan:
    """One cell of the tables and the stages that give its numbers."""

    task: str
    trained_on: str
    method: str
    budget: Budget | None
    seed: int
    predictions: Stage
    candidates: Stage | None
    chosen: Stage


def _held(contents: str | None) -> dict[str, Any]:
    """What local files hold, as a setting; without files a key is as if there were no such setting."""
    return {} if contents is None else {"contents": contents}


def _rows(responses: Stage, named: str) -> Stage:
    """Every response of a stage as a row, right or wrong."""
    needs = {"responses": responses} | {role: need for role, need in responses.needs.items() if role != "model"}
    return Stage("rows", named, {"parser": answers.VERSION, "rows": ["outcome"]}, needs)


class Graph:
    """All stages of a recipe. Methods of this class build stages; equal stages are one by their key."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._tasks = {name: task_contents(name, block) for name, block in recipe.tasks.items()}
        self._model = contents(recipe.model.path)
        self._teacher = contents(recipe.teacher.responses or recipe.teacher.model)
        self._prompts = prompts.fingerprint()
        self._chosen: dict[tuple[str, int, str, Budget], Stage] = {}  # asked for again and again, by what starts there

    # ---- data -------------------------------------------------------------------------------------------------

    def questions(self, task: str) -> Stage:
        """Training questions: the same for every seed, since what any seed holds out is taken out."""
        settings = {"task": task, **self._task(task, "train")}
        return Stage("questions", f"questions {task}", settings)

    def held_out(self, task: str, seed: int, split: Split) -> Stage:
        """Validation or test questions of one seed; apart, since only the first matters to training."""
        settings = {"task": task, "seed": seed, "split": split, **self._task(task, split)}
        return Stage("held_out", f"{split} questions {task} seed {seed}", settings)

    def _task(self, task: str, *counts: str) -> dict[str, Any]:
        everything = self.recipe.tasks[task].model_dump(mode="json")
        sizes = {"train", "validation", "test"} - set(counts)
        settings = {name: value for name, value in everything.items() if name not in sizes}
        return settings | _held(self._tasks[task])

    def responses(self, task: str) -> Stage:
        """The teacher's responses to the training questions, unread: what may cost money."""
        return Stage("responses", f"responses {task}", self._asked(), {"questions": self.questions(task)})

    def _asked(self) -> dict[str, Any]:
        settings = {**self.recipe.teacher.asked(), "prompts": self._prompts, **_held(self._teacher)}
        # Stored responses are read with their given labels when they are taken in.
        return settings | ({"parser": answers.VERSION} if self.recipe.teacher.source == "responses" else {})

    def teacher(self, task: str) -> Stage:
        """The rows made of the teacher's responses."""
        needs = {"responses": self.responses(task), "questions": self.questions(task)}
        settings = {
            **self.recipe.teacher.picked(),
            "parser": answers.VERSION,
            "rows": ["sft", "preferences", "outcome"],
        }
        return Stage("rows", f"teacher {task}", settings, needs)

    def traces(self, task: str, seed: int) -> Stage:
        """One teacher response to every validation question: what SFT is watched on."""
        needs = {"held_out": self.held_out(task, seed, "validation")}
        named = f"traces {task} seed {seed}"
        return _rows(Stage("responses", f"responses {named}", {**self._asked(), "n": 1}, needs), named)

    # ---- training -----------------------------------------------------------------------------------------------

    def trained(self, task: str, seed: int, name: str, budget: Budget, rate: float) -> Stage:
        """A trained model."""
        of = METHODS[name]
        block: StageSettings = getattr(self.recipe, of.stage)
        shared = self.recipe.model_dump(mode="json", exclude=set(NOT_TRAINING if of.stage == "preference" else NOT_SFT))
        settings = {
            **{knob: value for knob, value in vars(of).items() if knob not in RESOLVED},
            **block.model_dump(mode="json", exclude=set(RESOLVED)),
            **shared,
            "model": self.recipe.model.model_dump(mode="json"),
            "method": name,
            "seed": seed,
            "learning_rate": rate,
            "batch_size": block.batch_size or of.batch_size,
            **self._effort(of, budget, block),
        }
        needs = {"teacher": self.teacher(task)}
        if of.stage == "sft":
            settings |= _held(self._model)
            # Stored responses are to training questions: SFT then keeps its last checkpoint.
            needs |= {} if self.recipe.teacher.source == "responses" else {"traces": self.traces(task, seed)}
        else:
            needs["start"] = self.start(task, seed, name, budget)
            needs["reasoning"] = self.reasoning(task, seed, name, budget)
        if of.stage == "rcft":
            needs["held_out"] = self.held_out(task, seed, "validation")
            settings["evaluation"] = {**self._generation(), "parser": answers.VERSION}
        if of.calibration in ("outcome", "replay"):
            settings["outcome"] = self.recipe.outcome.model_dump(mode="json", exclude=set(STREAMED))
        if of.stream != "none":
            needs["stream"] = self.stream(task, seed)
        return Stage("train", f"{self._named(name, budget)} {task} seed {seed} lr {rate:g}", settings, needs)

    @staticmethod
    def _named(name: str, budget: Budget) -> str:
        """A method, with its budget where the two budgets give different models."""
        return f"{name} {budget}" if method(name).budgeted else name

    def _effort(self, of: Method, budget: Budget, block: StageSettings) -> dict[str, Any]:
        effort: Effort = of.effort[budget]
        pairs = None if effort.pairs is None else self.recipe.small_pairs
        small = of.stage == "preference" and effort.pairs is not None
        # A recipe's `epochs` is for the method's own full effort; the small budget keeps its two.
        return {"epochs": effort.epochs if small or block.epochs is None else block.epochs, "pairs": pairs}

    def start(self, task: str, seed: int, name: str, budget: Budget) -> Stage:
        """The model that a method starts from."""
        return self.chosen(task, seed, METHODS[name].start, budget)

    def reasoning(self, task: str, seed: int, name: str, budget: Budget) -> Stage:
        """One sampled response of the start model to every validation question: what training is watched on."""
        settings = {"temperature": 1.0, "seed": seed, **self._generation()}
        needs = {"model": self.start(task, seed, name, budget), "held_out": self.held_out(task, seed, "validation")}
        named = f"reasoning {self._named(METHODS[name].start, budget)} {task} seed {seed}"
        return _rows(Stage("sampled", f"sampled {named}", settings, needs), named)

    def stream(self, task: str, seed: int) -> Stage:
        """One sampled response of the SFT model to training questions, unfiltered: what `outcome` learns from."""
        outcome = self.recipe.outcome.model_dump(mode="json", exclude={*UNSTREAMED, "questions"})
        settings = {**outcome, "limit": self.recipe.outcome.questions, "seed": seed, **self._generation()}
        needs = {"model": self.chosen(task, seed, "sft", "matched"), "questions": self.questions(task)}
        named = f"stream sft {task} seed {seed}"
        return _rows(Stage("sampled", f"sampled {named}", settings, needs), named)

    def _generation(self) -> dict[str, Any]:
        """What determines generated text and its scores, whoever the model is."""
        settings = self.recipe.evaluation.model_dump(mode="json", exclude=set(MEASURING))
        return {**settings, "reasoning": self.recipe.teacher.reasoning, "prompts": self._prompts}

    def rates(self, name: str) -> tuple[float, ...]:
        """The learning rates among which one is chosen; out of distribution the first is taken."""
        of = METHODS[name]
        block: StageSettings = getattr(self.recipe, of.stage)
        rates = block.learning_rates or of.learning_rates
        return rates[:1] if self.recipe.train_on is not None else rates

    def chosen(self, task: str, seed: int, name: str, budget: Budget) -> Stage:
        """The model of the learning rate with the lowest validation ECE, of this seed or on average over seeds."""
        asked = task, seed, name, budget
        if asked not in self._chosen:
            self._chosen[asked] = self._choice(task, seed, name, budget)
        return self._chosen[asked]

    def _choice(self, task: str, seed: int, name: str, budget: Budget) -> Stage:
        rates = self.rates(name)
        seeds = self.recipe.seeds if self.recipe.lr_choice == "mean" and len(rates) > 1 else (seed,)
        needs: dict[str, Stage] = {}
        for number, rate in enumerate(rates):
            for one in seeds:
                model = self.trained(task, one, name, budget, rate)
                needs[f"model {number} seed {one}"] = model
                if len(rates) > 1:
                    needs[f"validation {number} seed {one}"] = self.validated(
                        task, one, self._named(name, budget), model
                    )
        # No `bins` here: they are the report's, and training starts from what is chosen.
        settings = {"rates": list(rates), "seeds": list(seeds), "seed": seed}
        return Stage("chosen", f"chosen {self._named(name, budget)} {task} seed {seed}", settings, needs)

    # ---- measuring ----------------------------------------------------------------------------------------------

    def generated(self, named: str, model: Stage, held_out: Stage, **how: Any) -> Stage:
        """Responses to held-out questions, unread. `how`: one temperature a sample, or k and the stage with theirs."""
        needs = {"model": model, "held_out": held_out}
        if (temperature := how.pop("temperature", None)) is not None:
            needs["temperature"] = temperature
        settings = {name: held_out.settings[name] for name in ("split", "seed")}
        return Stage("generated", f"generated {named}", {**settings, **how, **self._generation()}, needs)

    def predicted(self, named: str, text: Stage) -> Stage:
        """What generated responses answer, and how probable the model that wrote them holds that."""
        needs = {"generated": text, **{role: text.needs[role] for role in ("model", "held_out")}}
        return Stage("predicted", named, {**self._generation(), "parser": answers.VERSION}, needs)

    def validated(self, task: str, seed: int, named: str, model: Stage) -> Stage:
        """Greedy predictions of one model on the validation questions."""
        full = f"validation {named} {task} seed {seed}"
        text = self.generated(full, model, self.held_out(task, seed, "validation"), temperatures=[0.0])
        return self.predicted(full, text)

    def tested(self, task: str, seed: int, named: str, model: Stage) -> Stage:
        """Greedy predictions on the test questions."""
        full = f"test {named} {task} seed {seed}"
        return self.predicted(full, self.generated(full, model, self.held_out(task, seed, "test"), temperatures=[0.0]))

    def tau(self, task: str, seed: int, name: str, budget: Budget) -> Stage:
        """The temperature of the label token, fitted on validation predictions, which a choice among rates has."""
        named, model = self._named(name, budget), self.chosen(task, seed, name, budget)
        if len(self.rates(name)) > 1:
            needs = {role: one for role, one in model.needs.items() if role.startswith("validation")}
        else:
            needs = {"validation": self.validated(task, seed, named, model.needs[f"model 0 seed {seed}"])}
        return Stage("tau", f"tau {named} {task} seed {seed}", {}, {"model": model, **needs})

    def scaled(self, task: str, trained_on: str, seed: int, name: str, budget: Budget) -> Stage:
        """Temperature scaling: the stored greedy answers rescaled, or new ones sampled at tau."""
        start, full = method(name).start, f"scaled {self._named(name, budget)} {task} seed {seed}"
        model, tau = self.chosen(trained_on, seed, start, budget), self.tau(trained_on, seed, start, budget)
        if self.recipe.evaluation.decode == "sample":
            text = self.generated(full, model, self.held_out(task, seed, "test"), k=1, temperature=tau)
            predicted = self.predicted(f"read {full}", text)
        else:
            predicted = self.tested(task, seed, self._named(start, budget), model)
        return Stage("scaled", full, {}, {"predicted": predicted, "tau": tau})

    def sampling(self, task: str, seed: int, name: str, budget: Budget) -> Stage:
        """The temperature at which candidates are sampled, chosen by Confidence@k on some validation questions."""
        full, k = f"sampling {self._named(name, budget)} {task} seed {seed}", max(self.recipe.evaluation.k)
        each = [temperature for temperature in SAMPLING for _ in range(k)]
        text = self.generated(
            full,
            self.chosen(task, seed, name, budget),
            self.held_out(task, seed, "validation"),
            temperatures=each,
            limit=SAMPLING_QUESTIONS,
        )
        needs = {"predicted": self.predicted(f"read {full}", text), "tau": self.tau(task, seed, name, budget)}
        return Stage("sampling", full, {}, needs)

    def candidates(self, task: str, trained_on: str, seed: int, name: str, budget: Budget) -> Stage | None:
        """max(k) samples a test question, with their confidence at tau, by which they are ranked."""
        if not self.recipe.evaluation.k or name not in METHODS:
            return None
        full, tau = (
            f"candidates {self._named(name, budget)} {task} seed {seed}",
            self.tau(trained_on, seed, name, budget),
        )
        fitted = self.recipe.evaluation.sampling == "fitted"
        text = self.generated(
            full,
            self.chosen(trained_on, seed, name, budget),
            self.held_out(task, seed, "test"),
            k=max(self.recipe.evaluation.k),
            temperature=tau if fitted else self.sampling(trained_on, seed, name, budget),
        )
        return Stage("scaled", full, {}, {"predicted": self.predicted(f"read {full}", text), "tau": tau})

    # ---- the whole ----------------------------------------------------------------------------------------------

    def cells(self) -> list[CellPlan]:
        """Every cell of the tables."""
        train_on = self.recipe.train_on
        pairs = [(task, train_on or task) for task in self.recipe.tasks if task != train_on]
        found = []
        for task, source in pairs or [(train_on or "", train_on or "")]:
            for seed in self.recipe.seeds:
                for name in self.recipe.methods:
                    found += self._cells(task, source, seed, name)
        return found

    def _cells(self, task: str, source: str, seed: int, name: str) -> list[CellPlan]:
        of = method(name)
        cells = []
        for budget in self.recipe.budgets if of.budgeted else self.recipe.budgets[:1]:
            model = self.chosen(source, seed, of.start if of.stage == "scaling" else name, budget)
            if of.stage == "scaling":
                predictions = self.scaled(task, source, seed, name, budget)
            else:
                predictions = self.tested(task, seed, self._named(name, budget), model)
            candidates = self.candidates(task, source, seed, name, budget)
            kept = budget if of.budgeted else None
            cells.append(CellPlan(task, source, name, kept, seed, predictions, candidates, model))
        return cells

    def report(self) -> Stage:
        """The report of everything."""
        needs: dict[str, Stage] = {}
        for number, cell in enumerate(self.cells()):
            needs[f"predictions {number}"] = cell.predictions
            needs[f"chosen {number}"] = cell.chosen
            if cell.candidates is not None:
                needs[f"candidates {number}"] = cell.candidates
            needs[f"held_out {cell.task} {cell.seed}"] = self.held_out(cell.task, cell.seed, "test")
        settings = {"version": VERSION, "name": self.recipe.name, **self.recipe.evaluation.model_dump(mode="json")}
        return Stage("report", "report", settings, needs)
