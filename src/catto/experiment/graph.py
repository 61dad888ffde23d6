"""Recipe -> stages. One function a stage; each puts into the settings what determines the result and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from catto.experiment.contents import contents, task_contents
from catto.experiment.stages import Stage
from catto.methods import METHODS, Budget, Effort, Method
from catto.recipe import Recipe, StageSettings
from catto.records import Split
from catto.report.results import VERSION


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


class Graph:
    """All stages of a recipe. Methods of this class build stages; equal stages are one by their key."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._tasks = {name: task_contents(name, block) for name, block in recipe.tasks.items()}
        self._model = contents(recipe.model.path)
        self._teacher = contents(recipe.teacher.responses or recipe.teacher.model)
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

    def teacher(self, task: str) -> Stage:
        """Responses to the training questions and the rows made of them."""
        settings = {**self.recipe.teacher.asked(), **self.recipe.teacher.picked(), **_held(self._teacher)}
        return Stage("teacher", f"teacher {task}", settings, {"questions": self.questions(task)})

    def traces(self, task: str, seed: int) -> Stage:
        """One teacher response to every validation question: what SFT is watched on."""
        settings = {**self.recipe.teacher.asked(), "n": 1, **_held(self._teacher)}
        return Stage(
            "traces", f"traces {task} seed {seed}", settings, {"held_out": self.held_out(task, seed, "validation")}
        )

    # ---- training -----------------------------------------------------------------------------------------------

    def trained(self, task: str, seed: int, method: str, budget: Budget, rate: float) -> Stage:
        """A trained model."""
        of = METHODS[method]
        block: StageSettings = getattr(self.recipe, of.stage)
        settings = {
            "method": method,
            "seed": seed,
            "learning_rate": rate,
            "batch_size": block.batch_size or of.batch_size,
            "checkpoint_steps": block.checkpoint_steps,
            "rows": block.rows,
            "trl": block.trl,
            "model": self.recipe.model.model_dump(mode="json"),
            "context": self.recipe.context,
            "keep": self.recipe.keep,
            **self._effort(of, budget, block),
        }
        needs = {"teacher": self.teacher(task)}
        if of.stage == "sft":
            settings |= _held(self._model)
            # Stored responses are to training questions: SFT then keeps its last checkpoint.
            needs |= {} if self.recipe.teacher.source == "responses" else {"traces": self.traces(task, seed)}
        else:
            needs["start"] = self.start(task, seed, method, budget)
            needs["reasoning"] = self.reasoning(task, seed, method, budget)
        if of.stage == "preference":
            settings["prefix_sharing"] = self.recipe.prefix_sharing
        if of.stage == "rcft":
            needs["held_out"] = self.held_out(task, seed, "validation")
            settings["evaluation"] = self._generation()
        if of.calibration == "outcome":
            settings["outcome"] = self.recipe.outcome.model_dump(mode="json", include={"score", "rows_per_pair"})
            needs["stream"] = self.stream(task, seed)
        return Stage("train", f"{self._named(method, budget)} {task} seed {seed} lr {rate:g}", settings, needs)

    @staticmethod
    def _named(method: str, budget: Budget) -> str:
        """A method, with its budget where the two budgets give different models."""
        return f"{method} {budget}" if METHODS[method].budgeted else method

    def _effort(self, of: Method, budget: Budget, block: StageSettings) -> dict[str, Any]:
        effort: Effort = of.effort[budget]
        pairs = None if effort.pairs is None else self.recipe.small_pairs
        small = of.stage == "preference" and effort.pairs is not None
        # A recipe's `epochs` is for the method's own full effort; the small budget keeps its two.
        return {"epochs": effort.epochs if small or block.epochs is None else block.epochs, "pairs": pairs}

    def start(self, task: str, seed: int, method: str, budget: Budget) -> Stage:
        """The model that a method starts from."""
        return self.chosen(task, seed, METHODS[method].start, budget)

    def reasoning(self, task: str, seed: int, method: str, budget: Budget) -> Stage:
        """One sampled response of the start model to every validation question: what training is watched on."""
        settings = {"split": "validation", "temperature": 1.0, "seed": seed, **self._generation()}
        needs = {"model": self.start(task, seed, method, budget), "held_out": self.held_out(task, seed, "validation")}
        return Stage(
            "sampled", f"reasoning {self._named(METHODS[method].start, budget)} {task} seed {seed}", settings, needs
        )

    def stream(self, task: str, seed: int) -> Stage:
        """One sampled response of the SFT model to training questions, unfiltered: what `outcome` learns from."""
        outcome = self.recipe.outcome
        settings = {"split": "train", "temperature": outcome.temperature, "seed": seed, "limit": outcome.questions}
        needs = {"model": self.chosen(task, seed, "sft", "matched"), "questions": self.questions(task)}
        return Stage("sampled", f"stream sft {task} seed {seed}", {**settings, **self._generation()}, needs)

    def _generation(self) -> dict[str, Any]:
        """What determines generated text and its scores, whoever the model is."""
        names = {"engine", "max_tokens", "batch_size"}
        return self.recipe.evaluation.model_dump(mode="json", include=names) | {
            "reasoning": self.recipe.teacher.reasoning
        }

    def rates(self, task: str, method: str) -> tuple[float, ...]:
        """The learning rates among which one is chosen; out of distribution the first is taken."""
        of = METHODS[method]
        block: StageSettings = getattr(self.recipe, of.stage)
        rates = block.learning_rates or of.learning_rates
        return rates[:1] if self.recipe.train_on is not None else rates

    def chosen(self, task: str, seed: int, method: str, budget: Budget) -> Stage:
        """The model of the learning rate with the lowest validation ECE, of this seed or on average over seeds."""
        asked = task, seed, method, budget
        if asked not in self._chosen:
            self._chosen[asked] = self._choice(task, seed, method, budget)
        return self._chosen[asked]

    def _choice(self, task: str, seed: int, method: str, budget: Budget) -> Stage:
        rates = self.rates(task, method)
        seeds = self.recipe.seeds if self.recipe.lr_choice == "mean" and len(rates) > 1 else (seed,)
        needs: dict[str, Stage] = {}
        for number, rate in enumerate(rates):
            for one in seeds:
                model = self.trained(task, one, method, budget, rate)
                needs[f"model {number} seed {one}"] = model
                if len(rates) > 1:
                    needs[f"validation {number} seed {one}"] = self.validated(
                        task, one, self._named(method, budget), model
                    )
        # No `bins` here: they are the report's, and training starts from what is chosen.
        settings = {"rates": list(rates), "seeds": list(seeds), "seed": seed}
        return Stage("chosen", f"chosen {self._named(method, budget)} {task} seed {seed}", settings, needs)

    # ---- measuring ----------------------------------------------------------------------------------------------

    def validated(self, task: str, seed: int, named: str, model: Stage) -> Stage:
        """Greedy predictions of one model on the validation questions."""
        settings = {"split": "validation", "temperature": 0.0, "k": 1, "seed": seed, **self._generation()}
        needs = {"model": model, "held_out": self.held_out(task, seed, "validation")}
        return Stage("predicted", f"validation {named} {task} seed {seed}", settings, needs)

    def tested(self, task: str, seed: int, named: str, model: Stage) -> Stage:
        """Greedy predictions on the test questions."""
        settings = {"split": "test", "temperature": 0.0, "k": 1, "seed": seed, **self._generation()}
        needs = {"model": model, "held_out": self.held_out(task, seed, "test")}
        return Stage("predicted", f"test {named} {task} seed {seed}", settings, needs)

    def scaled(self, task: str, trained_on: str, seed: int, method: str, budget: Budget, model: Stage) -> Stage:
        """Temperature scaling: the stored greedy answers rescaled, or new ones sampled at tau."""
        settings = {"decode": self.recipe.evaluation.decode, "seed": seed, **self._generation()}
        needs = {"model": model, "tested": self.tested(task, seed, self._named(METHODS[method].start, budget), model)}
        needs |= self._fitted_on(trained_on, seed, METHODS[method].start, budget, model)
        if self.recipe.evaluation.decode == "sample":
            needs["held_out"] = self.held_out(task, seed, "test")
        return Stage("scaled", f"scaled {self._named(method, budget)} {task} seed {seed}", settings, needs)

    def _fitted_on(self, task: str, seed: int, method: str, budget: Budget, model: Stage) -> dict[str, Stage]:
        """What tau is fitted on: validation predictions, which the choice among several rates has already."""
        if len(self.rates(task, method)) > 1:
            return {}
        only = model.needs[f"model 0 seed {seed}"]
        return {"validation": self.validated(task, seed, self._named(method, budget), only)}

    def candidates(
        self, task: str, trained_on: str, seed: int, method: str, budget: Budget, model: Stage
    ) -> Stage | None:
        """max(k) samples a test question at the temperature of the lowest validation NLL."""
        if not self.recipe.evaluation.k or METHODS[method].stage == "scaling":
            return None
        settings = {"split": "test", "k": max(self.recipe.evaluation.k), "seed": seed, **self._generation()}
        needs = {"model": model, "held_out": self.held_out(task, seed, "test")}
        needs |= self._fitted_on(trained_on, seed, method, budget, model)
        return Stage("candidates", f"candidates {self._named(method, budget)} {task} seed {seed}", settings, needs)

    # ---- the whole ----------------------------------------------------------------------------------------------

    def cells(self) -> list[CellPlan]:
        """Every cell of the tables."""
        train_on = self.recipe.train_on
        pairs = [(task, train_on or task) for task in self.recipe.tasks if task != train_on]
        found = []
        for task, source in pairs or [(train_on or "", train_on or "")]:
            for seed in self.recipe.seeds:
                for method in self.recipe.methods:
                    found += self._cells(task, source, seed, method)
        return found

    def _cells(self, task: str, source: str, seed: int, method: str) -> list[CellPlan]:
        of = METHODS[method]
        cells = []
        for budget in self.recipe.budgets if of.budgeted else self.recipe.budgets[:1]:
            scaling = of.stage == "scaling"
            model = self.chosen(source, seed, of.start if scaling else method, budget)
            if scaling:
                predictions = self.scaled(task, source, seed, method, budget, model)
            else:
                predictions = self.tested(task, seed, self._named(method, budget), model)
            kept = budget if of.budgeted else None
            candidates = self.candidates(task, source, seed, method, budget, model)
            cells.append(CellPlan(task, source, method, kept, seed, predictions, candidates, model))
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
        names = {"bins", "resamples", "unparsed", "k"}
        settings = {
            "version": VERSION,
            "name": self.recipe.name,
            **self.recipe.evaluation.model_dump(mode="json", include=names),
        }
        return Stage("report", "report", settings, needs)
