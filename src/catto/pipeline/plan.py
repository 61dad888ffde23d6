"""Recipe -> stages. Each method of `Graph` builds one kind of stage, with what determines its result.

A recipe is checked before anything runs: its tasks and seeds are known, and the files and models it names exist.

Text is generated (or asked for) in one stage and read in another: the wording of the prompts is in the key of the
first, the parser's version in that of the second. What local files hold is part of a key too, so that an edited file is
read again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from catto import prompts
from catto.answer import forms, grading
from catto.engines import check_model, is_hub_id, server_address
from catto.errors import DataError, data_errors_at, did_you_mean
from catto.io.text_files import open_input, read_json
from catto.methods import (
    METHODS,
    WEIGHTS,
    Budget,
    Method,
    ScalingKind,
    find_method,
    options_read_by,
    scaled_kind,
    start_of,
    without_overridden,
)
from catto.pipeline import launch
from catto.pipeline.kinds.base import BaseSettings
from catto.pipeline.kinds.choice import ChoiceSettings
from catto.pipeline.kinds.generating import Generating
from catto.pipeline.kinds.generation import TextSettings
from catto.pipeline.kinds.preference import PairSettings
from catto.pipeline.kinds.questions import QuestionSettings, find_task
from catto.pipeline.kinds.reading import PredictionSettings
from catto.pipeline.kinds.report import IN_STAGES, CellPlace, CellPlan, ReportSettings
from catto.pipeline.kinds.responses import ResponseSettings
from catto.pipeline.kinds.rows import RowSettings
from catto.pipeline.kinds.scaling import ScalingSettings
from catto.pipeline.kinds.train import TrainSettings
from catto.pipeline.stage import Stage, StageSettings, list_needed, write_json
from catto.recipe.load import load_recipe, origin_of
from catto.recipe.settings import OutcomeSettings, Recipe, TaskSettings, TeacherSettings, TrainerSettings
from catto.records import SPLITS, Split, content_hash
from catto.report import VERSION
from catto.tasks import TASKS, witnesses
from catto.tasks.loading import find_rows
from catto.teacher.pairing import Kind
from catto.teacher.sampling import ModelSampling

# Files up to this size are hashed whole, larger ones (weights) in so many pieces from the first byte to the last.
WHOLE = 2**28
PIECES = 64
PIECE = 2**20
GREEDY = (0.0,)
Choice = Stage[ChoiceSettings]
# `sampling: validation` chooses among these temperatures, on at most so many validation questions.
SAMPLING_TEMPERATURES = (0.3, 0.5, 0.7, 1.0)
SAMPLING_QUESTIONS = 100
# Pairs of a held-out question, at least as many as training takes: responses are there, and more pairs are less noisy.
HELD_OUT_PAIRS = 4


def hash_contents(place: str | None) -> str | None:
    """Hash a file, or the files in a folder; None where there is neither, as for a name on the hub.

    >>> hash_contents("HuggingFaceTB/SmolLM2-135M") is None
    True
    """
    if place is None:
        return None
    path = Path(place)
    if path.is_file():
        return _hash_files([path])
    return _hash_files(file for file in path.glob("*") if file.is_file())


def _hash_rows(name: str, block: TaskSettings) -> str | None:
    """Hash the files that a task's questions are read from."""
    files: list[Path] = []
    with suppress(ValueError):  # the stage that reads them names what is missing
        files = find_rows(find_task(name, block), block.files, block.data_dir).files
    return _hash_files(files)


def _hash_files(files: Iterable[Path]) -> str | None:
    """Hash names, sizes and bytes; None for no files. Dates do not count: a copy elsewhere has the same key."""
    entries = []
    for path in sorted(set(files)):
        size = path.stat().st_size
        entries.append([path.name, size, _hash_bytes(path, size)])
    return content_hash(entries) if entries else None


def _hash_bytes(path: Path, size: int) -> str:
    """Hash the bytes of a file, or pieces of a large one."""
    with open_input(path, plain=True) as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        digest = hashlib.sha256()
        for number in range(PIECES):
            file.seek((size - PIECE) * number // (PIECES - 1))
            digest.update(file.read(PIECE))
        return digest.hexdigest()


class Graph:
    """All stages of a recipe. Equal stages are one by their key.

    >>> [stage.name for stage in list_needed([Graph(load_recipe("quickstart")).plan_responses("witnesses")])]
    ['questions witnesses', 'responses witnesses']
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        # The files that questions are read from; None where they are generated, or the hub's.
        self._tasks: dict[str, str | None] = {}
        self._without_options: set[str] = set()
        for name, block in recipe.tasks.items():
            self._tasks[name] = _hash_rows(name, block)
            if not _has_options(name, block):
                self._without_options.add(name)
        self._model = hash_contents(recipe.model.path)
        teacher = recipe.own_teacher
        self._teacher = hash_contents(teacher.responses if teacher.source == "responses" else teacher.model)
        self._generating = Generating(recipe.evaluation, recipe.teacher.reasoning, prompts.fingerprint())
        self._choices: dict[tuple[str, int, str, Budget], Choice] = {}  # many stages need the same

    def _generating_of(self, task: str) -> Generating:
        """What determines the responses to a task: questions without options have prompts of their own."""
        if task not in self._without_options:
            return self._generating
        both = content_hash([self._generating.prompts, prompts.open_fingerprint()])
        return replace(self._generating, prompts=both)

    def _grading_of(self, task: str) -> int | None:
        """The version of the grading of a task's answers; None where they are labels."""
        return grading.VERSION if task in self._without_options else None

    # ---- data -------------------------------------------------------------------------------------------------------

    def plan_questions(
        self, task: str, split: Split = "train", seed: int = 0, more: int = 0
    ) -> Stage[QuestionSettings]:
        """Questions of one split. Training questions are the same for every seed: no seed holds one of them out.

        more: so many beyond the task's `train` too, for a stream that is held out.
        """
        other_splits = set(SPLITS) - {split}
        block = self.recipe.tasks[task].model_copy(update=dict.fromkeys(other_splits))
        if split != "train":
            settings = QuestionSettings(task, split, seed, block, self._tasks[task])
            return Stage("held_out", f"{split} questions {task} seed {seed}", settings)
        name = f"questions {task}"
        if more:
            block = block.model_copy(update={"train": (block.train or 0) + more})
            name = f"stream {name}"
        seeds = None
        first_seed = 0
        is_cut_by_seeds = block.own and len(block.files or ()) < len(SPLITS)
        if is_cut_by_seeds:
            seeds = self.recipe.seeds
            first_seed = seeds[0]
        settings = QuestionSettings(task, split, first_seed, block, self._tasks[task], seeds)
        return Stage("questions", name, settings)

    def plan_responses(self, task: str) -> Stage[ResponseSettings]:
        """The teacher's responses to the training questions, unread: what may cost money."""
        return self._plan_asking(task, self.plan_questions(task), self.recipe.own_teacher)

    def plan_teacher_rows(self, task: str) -> Stage:
        """The rows from the teacher's responses."""
        return self._plan_rows(f"teacher {task}", self.plan_responses(task), ("sft", "preferences", "outcome"))

    def plan_traces(self, task: str, seed: int) -> Stage:
        """One teacher response to every validation question: what SFT is monitored on."""
        name = f"traces {task} seed {seed}"
        questions = self.plan_questions(task, "validation", seed)
        teacher = self.recipe.own_teacher.model_copy(update={"n": 1})
        return self._plan_rows(name, self._plan_asking(name, questions, teacher))

    def plan_held_out_pairs(self, task: str, seed: int) -> Stage | None:
        """The teacher's pairs of the validation questions; None where the recipe does not ask for them."""
        if not self.recipe.asks_held_out_pairs:
            return None
        teacher = self.recipe.own_teacher
        per_question = max(teacher.pairs_per_question, HELD_OUT_PAIRS)
        teacher = teacher.model_copy(update={"pairs_per_question": per_question})
        name = f"held-out pairs {task} seed {seed}"
        responses = self._plan_asking(name, self.plan_questions(task, "validation", seed), teacher)
        return self._plan_rows(name, responses, ("preferences",))

    def _plan_asking(
        self, name: str, questions: Stage[QuestionSettings], teacher: TeacherSettings
    ) -> Stage[ResponseSettings]:
        settings = ResponseSettings(
            sampling=teacher,
            split=questions.settings.split,
            prompts=self._generating_of(questions.settings.task).prompts,
            contents=self._teacher,
            parser=forms.VERSION if teacher.source == "responses" else None,
            generating=None,
            outcome=None,
        )
        return Stage("responses", f"responses {name}", settings, {"questions": questions})

    def _plan_stream(self, task: str, seed: int, row: Method) -> Stage:
        """What `outcome` learns from: a response of the start model to each training question, unfiltered.

        Where the target is of votes, more responses are sampled and the row has the share of each label among them.
        """
        outcome = self.recipe.outcome
        start = self.recipe.start
        if outcome.source == "teacher":
            return self._plan_rows(f"stream teacher {task}", self.plan_responses(task), ("stream",))
        model = self.plan_choice(task, seed, start, "matched")
        if row.calibration == "outcome" and outcome.target != "gold":
            name = f"votes {start} {task} seed {seed}"
            return self._plan_sampled_rows(name, model, "train", outcome, outcome.samples, ("stream",))
        return self._plan_sampled_rows(f"stream {start} {task} seed {seed}", model, "train", outcome)

    def _plan_sampled_rows(
        self,
        name: str,
        model: Choice,
        split: Split,
        outcome: OutcomeSettings | None = None,
        samples: int = 1,
        kinds: tuple[Kind, ...] = ("outcome",),
    ) -> Stage:
        """Rows of responses that are sampled from a model, usually one per question.

        outcome: where the rows are the stream that `outcome` learns from; None where they monitor a training.
        """
        generating = self._generating_of(model.settings.task)
        temperature = 1.0 if outcome is None else outcome.temperature
        sampling = ModelSampling(
            n=samples,
            temperature=(temperature, temperature),
            max_tokens=generating.evaluation.max_tokens,
            reasoning=generating.reasoning,
            seed=model.settings.seed,
        )
        settings = ResponseSettings(
            sampling=sampling,
            split=split,
            prompts=generating.prompts,
            contents=None,
            parser=None,
            generating=generating,
            outcome=outcome,
        )
        questions = self.plan_questions(model.settings.task, split, model.settings.seed)
        needs: dict[str, Stage] = {"model": model, "questions": questions}
        if outcome is not None and outcome.held_out:
            needs["questions"] = self.plan_questions(model.settings.task, more=outcome.questions or 0)
            needs["trained_on"] = questions
        return self._plan_rows(name, Stage("sampled", f"sampled {name}", settings, needs), kinds)

    def _plan_rows(
        self, name: str, responses: Stage[ResponseSettings], kinds: tuple[Kind, ...] = ("outcome",)
    ) -> Stage:
        needs: dict[str, Stage] = {"responses": responses}
        for role, need in responses.needs.items():
            if role in ("questions", "trained_on"):
                needs[role] = need
        grading_version = self._grading_of(needs["questions"].settings.task)
        settings = RowSettings(responses.settings, kinds, forms.VERSION, grading_version)
        return Stage("rows", name, settings, needs)

    # ---- training ---------------------------------------------------------------------------------------------------

    def plan_base_model(self) -> Stage[BaseSettings]:
        """The given model, untouched: one for all tasks and seeds."""
        return Stage("base", "base model", BaseSettings(self.recipe.model, self._model))

    def plan_training(self, task: str, seed: int, name: str, budget: Budget, rate: float) -> Stage[TrainSettings]:
        """A trained model."""
        recipe = self.recipe
        method = METHODS[name]
        block = self._resolve_block(method)
        effort = method.effort[budget]
        epochs = effort.epochs
        pairs = None
        if effort.pairs is not None:
            pairs = recipe.small_pairs
        elif block.epochs:  # a recipe's `epochs` is for the full effort of a method; the small budget keeps its own
            epochs = block.epochs
        is_rcft = method.stage == "rcft"
        settings = TrainSettings(
            name=name,
            method=method,
            block=block,
            seed=seed,
            learning_rate=rate,
            batch_size=block.batch_size or method.batch_size,
            epochs=epochs,
            pairs=pairs,
            model=recipe.model,
            contents=self._model if method.stage == "sft" else None,
            context=recipe.context,
            keep=recipe.keep,
            prefix_sharing=recipe.prefix_sharing if method.stage == "preference" else None,
            outcome=self._resolve_outcome(method),
            answering=self._generating_of(task) if is_rcft else None,
            parser=forms.VERSION if is_rcft else None,
            others=recipe.model_dump(mode="json", exclude={*IN_STAGES, "name", "evaluation"}),
            launch=recipe.launch,
        )
        stage_name = f"{_title_of(name, budget)} {task} seed {seed} lr {rate:g}"
        return Stage("train", stage_name, settings, self._plan_training_needs(task, seed, method, budget))

    def _plan_training_needs(self, task: str, seed: int, method: Method, budget: Budget) -> dict[str, Stage]:
        """The stages that a training reads, by their role."""
        needs: dict[str, Stage] = {"teacher": self.plan_teacher_rows(task)}
        if method.stage != "sft":
            start = self.plan_choice(task, seed, start_of(method, self.recipe.start), budget)
            needs["start"] = start
            # What training is monitored on: one sampled response of the start model to every validation question.
            needs["reasoning"] = self._plan_sampled_rows(f"reasoning {start.settings.name}", start, "validation")
        elif self.recipe.teacher.source != "responses":  # stored responses are to training questions alone
            needs["traces"] = self.plan_traces(task, seed)
        if method.stage == "rcft":
            needs["held_out"] = self.plan_questions(task, "validation", seed)
        if method.stream != "none":
            needs["stream"] = self._plan_stream(task, seed, method)
        return needs

    def _resolve_block(self, method: Method) -> TrainerSettings:
        """Return the recipe's settings of a method's trainer, without the options that the method does not read."""
        block: TrainerSettings = getattr(self.recipe, method.stage)
        # The default determines a training too.
        options: dict[str, Any] = {"calibration_weight": WEIGHTS[method.calibration]}
        for name, value in block.trl.items():
            if (name, value) != ("calibration_weight", None):
                options[name] = value
        # Options of the calibration term are for the methods that have that term: others do not depend on them.
        options = without_overridden(method, options_read_by(method.calibration, options))
        return block.model_copy(update={"trl": options})

    def _resolve_outcome(self, method: Method) -> OutcomeSettings | None:
        """Return the recipe's settings of the outcome term, for the methods that read them."""
        if method.calibration == "outcome":
            return self.recipe.outcome
        if method.calibration == "replay":
            return self.recipe.outcome.model_copy(update={"target": "gold"})  # it reads no target
        return None

    def list_learning_rates(self, name: str) -> tuple[float, ...]:
        """The learning rates among which one is chosen; out of distribution the first is taken."""
        if METHODS[name].stage == "base":
            return ()
        block: TrainerSettings = getattr(self.recipe, METHODS[name].stage)
        rates = block.learning_rates or METHODS[name].learning_rates
        return rates[:1] if self.recipe.train_on is not None else rates

    def plan_choice(self, task: str, seed: int, name: str, budget: Budget) -> Choice:
        """The model of the learning rate with the lowest validation ECE, of this seed or on average over seeds."""
        key = (task, seed, name, budget)
        if key not in self._choices:
            self._choices[key] = self._make_choice(task, seed, name, budget)
        return self._choices[key]

    def _make_choice(self, task: str, seed: int, name: str, budget: Budget) -> Choice:
        title = _title_of(name, budget)
        rates = self.list_learning_rates(name)
        has_several_rates = len(rates) > 1
        seeds: tuple[int, ...] = (seed,)
        if has_several_rates and self.recipe.lr_choice == "mean":
            seeds = self.recipe.seeds
        needs: dict[str, Stage] = {}
        if METHODS[name].stage == "base":
            needs[f"model 0 seed {seed}"] = self.plan_base_model()
        for number, rate in enumerate(rates):
            for trained_seed in seeds:
                model = self.plan_training(task, trained_seed, name, budget, rate)
                role = f"{number} seed {trained_seed}"
                needs[f"model {role}"] = model
                if has_several_rates:
                    needs[f"validation {role}"] = self._plan_validation(task, trained_seed, model)
        # No `bins` here: they are the report's, and training starts from what is chosen.
        settings = ChoiceSettings(title, task, seed, seeds, rates)
        return Stage("chosen", f"chosen {title} {task} seed {seed}", settings, needs)

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _plan_predictions(
        self,
        name: str,
        model: Stage,
        seed: int,
        task: str,
        split: Split,
        temperatures: tuple[float, ...] | int,
        temperature: Stage | None = None,
        limit: int | None = None,
    ) -> Stage:
        """Responses to held-out questions, generated and then read.

        temperatures: of each sample, or how many samples are drawn at the `temperature` that another stage finds.
        """
        settings = TextSettings(split, seed, self._generating_of(task), temperatures, limit)
        needs: dict[str, Stage] = {"model": model, "held_out": self.plan_questions(task, split, seed)}
        generating_needs = dict(needs)
        if temperature is not None:
            generating_needs["temperature"] = temperature
        needs["generated"] = Stage("generated", f"generated {name}", settings, generating_needs)
        title = name if temperatures == GREEDY else f"read {name}"
        reading = PredictionSettings(settings, forms.VERSION, self._grading_of(task))
        return Stage("predicted", title, reading, needs)

    def _plan_validation(self, task: str, seed: int, model: Stage) -> Stage:
        """Greedy predictions on the validation questions; the base model's name says neither task nor seed."""
        name = f"{model.name} {task} seed {seed}" if model.kind == "base" else model.name
        return self._plan_predictions(f"validation {name}", model, seed, task, "validation", GREEDY)

    def plan_test(self, task: str, model: Choice) -> Stage:
        """Greedy predictions on the test questions."""
        name = f"test {model.settings.title} {task} seed {model.settings.seed}"
        return self._plan_predictions(name, model, model.settings.seed, task, "test", GREEDY)

    def plan_tau(self, model: Choice, kind: ScalingKind = "raw") -> Stage[ScalingSettings]:
        """The temperature of a model's label token, or its vector, fitted on its greedy validation predictions."""
        validation = {role: need for role, need in model.needs.items() if role.startswith("validation")}
        if not validation:  # a single learning rate was not measured
            (trained,) = model.needs.values()
            validation = {"validation": self._plan_validation(model.settings.task, model.settings.seed, trained)}
        titles: dict[ScalingKind, str] = {"raw": "tau", "normalized": "tau among labels", "vector": "vector"}
        name = f"{titles[kind]} {model.settings.name}"
        return Stage("tau", name, ScalingSettings(kind), {"model": model, **validation})

    def plan_scaling(self, title: str, task: str, model: Choice, kind: ScalingKind) -> Stage:
        """Scaling: the stored greedy answers rescaled, or new ones sampled at the temperature of the vocabulary.

        What scales the labels alone is no temperature of the vocabulary, so nothing is sampled at it.
        """
        seed = model.settings.seed
        name = f"scaled {title} {task} seed {seed}"
        tau = self.plan_tau(model, kind)
        if self.recipe.evaluation.decode == "sample" and kind == "raw":
            predicted = self._plan_predictions(name, model, seed, task, "test", 1, tau)
        else:
            predicted = self.plan_test(task, model)
        return Stage("scaled", name, tau.settings, {"predicted": predicted, "tau": tau})

    def plan_sampling_temperature(self, model: Choice) -> Stage:
        """The temperature at which candidates are sampled, chosen by Confidence@k on some validation questions."""
        name = f"sampling {model.settings.name}"
        temperatures: list[float] = []
        for temperature in SAMPLING_TEMPERATURES:
            temperatures += [temperature] * max(self.recipe.evaluation.k)
        predicted = self._plan_predictions(
            name,
            model,
            model.settings.seed,
            model.settings.task,
            "validation",
            tuple(temperatures),
            limit=SAMPLING_QUESTIONS,
        )
        return Stage("sampling", name, StageSettings(), {"predicted": predicted, "tau": self.plan_tau(model)})

    def plan_candidates(self, task: str, model: Choice) -> Stage:
        """max(k) samples a test question, with their confidence at tau, by which they are ranked."""
        evaluation = self.recipe.evaluation
        seed = model.settings.seed
        name = f"candidates {model.settings.title} {task} seed {seed}"
        tau = self.plan_tau(model)
        temperature = tau if evaluation.sampling == "fitted" else self.plan_sampling_temperature(model)
        samples = max(evaluation.k)
        predicted = self._plan_predictions(name, model, seed, task, "test", samples, temperature)
        return Stage("scaled", name, tau.settings, {"predicted": predicted, "tau": tau})

    def plan_preference_accuracy(self, model: Choice) -> Stage | None:
        """How often a model prefers the chosen response of held-out pairs, against the reference of its training.

        None where the recipe asks for no such pairs, and for models that were not trained on preferences.
        """
        choice = model.settings
        pairs = self.plan_held_out_pairs(choice.task, choice.seed)
        reference = _reward_reference(model)
        if pairs is None or reference is None:
            return None
        needs = {"policy": self._plan_pair_logprobs(model, pairs), "start": self._plan_pair_logprobs(reference, pairs)}
        return Stage("preference_accuracy", f"preference accuracy {choice.name}", StageSettings(), needs)

    def _plan_pair_logprobs(self, model: Choice, pairs: Stage) -> Stage[PairSettings]:
        """The log-probabilities of pairs under a model: one pass, which all that start from the model share."""
        recipe = self.recipe
        settings = PairSettings(recipe.context, recipe.evaluation.batch_size, recipe.model.attention)
        needs = {"model": model, "pairs": pairs}
        return Stage("pair_logprobs", f"pair logprobs {model.settings.name}", settings, needs)

    # ---- the whole --------------------------------------------------------------------------------------------------

    def list_cells(self) -> list[CellPlan]:
        """Every cell of the tables."""
        recipe = self.recipe
        cells = []
        for (task, trained_on), seed, name in itertools.product(self._pair_tasks(), recipe.seeds, recipe.methods):
            method = find_method(name)
            plan_cell = self._plan_scaled_cell if method.stage == "scaling" else self._plan_trained_cell
            for budget in recipe.budgets if method.budgeted else recipe.budgets[:1]:
                place = CellPlace(task, trained_on, name, budget if method.budgeted else None, seed)
                cells.append(plan_cell(place, budget))
        return cells

    def _pair_tasks(self) -> list[tuple[str, str]]:
        """Return the tasks that are tested, each with the task that is trained on."""
        train_on = self.recipe.train_on
        if train_on is None:
            return [(task, task) for task in self.recipe.tasks]
        others = [(task, train_on) for task in self.recipe.tasks if task != train_on]
        return others or [(train_on, train_on)]

    def _plan_scaled_cell(self, place: CellPlace, budget: Budget) -> CellPlan:
        """Plan the cell of a method that rescales the confidence of another."""
        kind = scaled_kind(place.method)
        model = self.plan_choice(place.trained_on, place.seed, find_method(place.method).start, budget)
        is_sampled_at_tau = kind == "raw" and self.recipe.evaluation.decode == "sample"
        validation: tuple[Stage, ...] = ()
        if place.task == place.trained_on and not is_sampled_at_tau:
            validation = _list_validation(self.plan_tau(model, kind))
        return CellPlan(
            place=place,
            predictions=self.plan_scaling(_title_of(place.method, budget), place.task, model, kind),
            candidates=None,
            chosen=model,
            questions=self.plan_questions(place.task, "test", place.seed),
            validation=validation,
            preference=None,  # scaling leaves the order of responses as it is
        )

    def _plan_trained_cell(self, place: CellPlace, budget: Budget) -> CellPlan:
        """Plan the cell of a method with a model of its own."""
        model = self.plan_choice(place.trained_on, place.seed, place.method, budget)
        candidates = None
        if self.recipe.evaluation.k:
            candidates = self.plan_candidates(place.task, model)
        validation: tuple[Stage, ...] = ()
        preference = None
        if place.task == place.trained_on:  # validation questions and held-out pairs are those of the training task
            # Validation predictions exist where a temperature is fitted or a learning rate chosen.
            validation = _list_validation(model if candidates is None else self.plan_tau(model))
            preference = self.plan_preference_accuracy(model)
        return CellPlan(
            place=place,
            predictions=self.plan_test(place.task, model),
            candidates=candidates,
            chosen=model,
            questions=self.plan_questions(place.task, "test", place.seed),
            validation=validation,
            preference=preference,
        )

    def find_measured_pairs(self, task: str) -> dict[int, Stage]:
        """The stages of the held-out pairs of a training task that some method is measured on, by their seeds."""
        pairs: dict[int, Stage] = {}
        for cell in self.list_cells():
            if cell.preference is not None and cell.place.trained_on == task:
                pairs[cell.place.seed] = cell.preference.needs["policy"].needs["pairs"]
        return pairs

    def plan_report(self) -> Stage[ReportSettings]:
        """The report of everything."""
        cells = tuple(self.list_cells())
        needs: dict[str, Stage] = {}
        for cell in cells:
            parts = (cell.predictions, cell.candidates, cell.chosen, cell.questions, *cell.validation, cell.preference)
            needs |= {stage.name: stage for stage in parts if stage is not None}
        return Stage("report", "report", ReportSettings(VERSION, self.recipe, cells), needs)


def _list_validation(stage: Stage) -> tuple[Stage, ...]:
    """Return the validation predictions that a stage needs."""
    return tuple(need for role, need in stage.needs.items() if role.startswith("validation"))


def _reward_reference(model: Choice) -> Choice | None:
    """Return the model against which rewards are measured: the start of the last training on preferences.

    Of RCFT it is not DPO, but the SFT model that DPO starts from. None where no preferences were trained on.
    """
    trained = model.needs[f"model 0 seed {model.settings.seed}"]  # all learning rates start from the same model
    start: Choice | None = trained.needs.get("start")
    if start is None:
        return None
    if METHODS[trained.settings.name].stage == "preference":
        return start
    return _reward_reference(start)


def _title_of(name: str, budget: Budget) -> str:
    """Return a method, with its budget where the two budgets give different models."""
    return f"{name} {budget}" if find_method(name).budgeted else name


# ---- checks before anything runs ------------------------------------------------------------------------------------


_SIZES = {"train", "validation", "test"}
# Which settings of a task are read, by where its questions come from.
_READ = {
    "own": _SIZES | {"path", "files", "fields", "answer", "answers", "labels", "grade", "tolerance"},
    "world": _SIZES | {"options", "witnesses", "reliabilities"},
    "generated": _SIZES,
    "benchmark": _SIZES | {"data_dir", "files"},
}


def open_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe with its overrides; raise DataError for an unknown task or a seed that a task has no splits for.

    >>> open_recipe("quickstart", ["tasks={snl: null}"])
    Traceback (most recent call last):
    catto.errors.DataError: --set tasks={snl: null}: tasks.snl: neither one of mmlu, snli, ...; did you mean snli?
    """
    recipe = load_recipe(source, overrides)
    for name in recipe.tasks:
        try:
            _check_task(name, recipe)
        except _TaskError as error:
            raise DataError(origin_of(source, overrides, error.setting), None, str(error)) from None
    problem = _find_need_of_labels(recipe)
    if problem is not None:
        raise DataError(source, None, problem)
    return recipe


def _has_options(name: str, block: TaskSettings) -> bool:
    """Whether the answers to a task are labels of options."""
    with suppress(ValueError):  # the stage that reads the task names what is wrong with it
        return bool(find_task(name, block).labels)
    return True


def _find_need_of_labels(recipe: Recipe) -> str | None:
    """Return what of a recipe reads the label of an answer, if there is a task whose answers have none."""
    without_options = [name for name, block in recipe.tasks.items() if not _has_options(name, block)]
    if not without_options:
        return None
    reason = f"reads the labels of answers, and those to {without_options[0]} have none"
    for name in recipe.methods:
        if _reads_answer_labels(find_method(name)):
            return f"methods: {name} {reason}"
    if recipe.evaluation.k:
        return f"evaluation.k: the ranking of candidates {reason}"
    if recipe.outcome.target != "gold":
        return f"outcome.target: {recipe.outcome.target} {reason}"
    if recipe.teacher.source == "labels":
        return f"teacher.source: labels {reason}"
    return None


def _reads_answer_labels(method: Method) -> bool:
    """Whether a method reads the label tokens of answers: its training, or the scaling of its confidence."""
    scores_pairs = method.calibration == "outcome" and method.stream == "none"
    return method.stage == "scaling" or method.rcft_weight > 0 or method.preference_tokens != "all" or scores_pairs


class _TaskError(ValueError):
    """A task that cannot be read as the recipe says; `setting` is the path of the setting that says so."""

    def __init__(self, setting: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.setting = setting


def _check_task(name: str, recipe: Recipe) -> None:
    """Raise _TaskError for an unknown task, a setting that it does not read, or a seed without splits."""
    block = recipe.tasks[name]
    if name not in TASKS and not block.own:
        expected = f"neither one of {', '.join(TASKS)} nor given a path"
        raise _TaskError(("tasks", name), f"tasks.{name}: {expected}{did_you_mean(name, TASKS)}")
    kind = _origin_of_questions(name, block)
    set_names = {setting for setting in block.model_fields_set if getattr(block, setting) is not None}
    unread = sorted(set_names - _READ[kind])
    if unread:
        problem = "not read for this task, so it would change nothing"
        raise _TaskError(("tasks", name, unread[0]), f"tasks.{name}.{unread[0]}: {problem}")
    # The world of witnesses and users' files have splits for any seed, the other tasks for a few.
    if kind in ("benchmark", "generated"):
        known = TASKS[name].seeds
        for seed in recipe.seeds:
            if seed not in known:
                seeds = ", ".join(map(str, known))
                raise _TaskError(("seeds",), f"seeds: {seed} is not one of {name}'s split seeds {seeds}")


def _origin_of_questions(name: str, block: TaskSettings) -> str:
    """Return where the questions of a task come from, a key of `_READ`."""
    if block.own:
        return "own"
    if name == "witnesses":
        return "world"
    return "benchmark" if TASKS[name].generate is None else "generated"


def check_places(source: str, recipe: Recipe) -> None:
    """Raise DataError for a file, model or server that the recipe names and that cannot be there."""
    teacher = recipe.own_teacher
    try:
        for name, block in recipe.tasks.items():
            where = f"tasks.{name}"
            if name == "witnesses" and not block.own:
                witnesses.generate_questions("train", 0, seed=0, **block.world_options())
            elif block.own or TASKS[name].generate is None:
                find_rows(find_task(name, block), block.files, block.data_dir)
        where = "model.path"
        if recipe.model.path is not None:
            check_model(recipe.model.path)
        where = "teacher.model"
        if teacher.source == "transformers":
            check_model(teacher.model or "")
        where = "teacher.responses"
        responses = teacher.responses or ""
        if teacher.source == "responses" and not Path(responses).exists() and not is_hub_id(responses):
            raise DataError(responses, None, "no such file or folder, and not a hub id, which is owner/name")
        where = "teacher.base_url"
        if teacher.source == "server":
            server_address(teacher.base_url or "")
        where = "launch"
        launch.check_launch(recipe)
    except ValueError as error:
        raise DataError(source, None, f"{where}: {error}") from None


# ---- recipes in an experiment's folder ------------------------------------------------------------------------------


def recipe_file(root: Path, recipe: Recipe) -> Path:
    """Return the place of a recipe in the experiment's folder, named by its hash."""
    return root / "recipes" / f"{content_hash(recipe.model_dump(mode='json'))}.json"


def store_recipe(root: Path, recipe: Recipe) -> Path:
    """Store a recipe in the experiment's folder, where its stages are found by key whatever becomes of the user's file.

    Several recipes may share the folder. A password in the teacher's address is not stored.
    """
    path = recipe_file(root, recipe)
    value = recipe.model_dump(mode="json")
    try:
        is_stored = path.exists() and read_json(path) == value
    except DataError:  # damaged
        is_stored = False
    if not is_stored:
        write_json(path, value)
    os.utime(path)  # the one that was used last
    return path


def read_stored_recipe(path: Path) -> Any:
    """Return the settings of a recipe that `freeze` stored; DataError where they are not those that its name is of."""
    value = read_json(path)
    if content_hash(value) != path.stem:
        raise DataError(
            path, None, "damaged: the recipe is not what was stored; `catto run` with your file stores it again"
        )
    return value


def find_stage(root: Path, key: str, recipe: str = "") -> Stage:
    """Return the stage with this key, the beginning of one or its folder's name, of a recipe that the folder holds.

    recipe: its hash, or the beginning of one. Recipes that agree on a stage may differ in how it is run (`launch`, the
    teacher's address); if none is given, the one that was used last counts.
    """
    recipes = sorted((root / "recipes").glob(f"{recipe}*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not recipes:
        named = f"no recipe {recipe}" if recipe else "no recipe"
        raise DataError(root, None, f"{named} is stored here: `catto run` and `catto plan --export` do that")
    for path in recipes:
        value = read_stored_recipe(path)
        with data_errors_at(path, value=value):
            graph = Graph(Recipe.model_validate(value))
        matches = []
        for stage in list_needed([graph.plan_report()]):
            if stage.key.startswith(key) or stage.folder == key:
                matches.append(stage)
        if len(matches) > 1:
            raise DataError(root, None, f"{len(matches)} keys begin with {key!r}, among them {matches[0].key}")
        if matches:
            return matches[0]
    reason = "settings, a file or catto's version differ from the plan's"
    raise DataError(root, None, f"{key} is no stage of the recipes here: {reason}")
