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
from catto.pipeline import stage as stages
from catto.pipeline.kinds.steps import task_of
from catto.pipeline.stage import QuestionSettings, ResponseSettings, Stage
from catto.recipe.load import load_recipe, origin_of
from catto.recipe.settings import OutcomeSettings, Recipe, TaskSettings, TeacherSettings, TrainerSettings
from catto.records import SPLITS, Split, content_hash
from catto.report import VERSION
from catto.tasks import TASKS, witnesses
from catto.tasks.loading import find_rows
from catto.teacher.pairing import Kind

# Files up to this size are hashed whole, larger ones (weights) in so many pieces from the first byte to the last.
WHOLE, PIECES, PIECE = 2**28, 64, 2**20
GREEDY = (0.0,)
Choice = Stage[stages.ChoiceSettings]
# `sampling: validation` chooses among these temperatures, on at most so many validation questions.
SAMPLING, SAMPLING_QUESTIONS = (0.3, 0.5, 0.7, 1.0), 100
# Pairs of a held-out question, at least as many as training takes: responses are there, and more pairs are less noisy.
HELD_OUT_PAIRS = 4


def contents(place: str | None) -> str | None:
    """Hash a file, or the files in a folder; None where there is neither, as for a name on the hub.

    >>> contents("HuggingFaceTB/SmolLM2-135M") is None
    True
    """
    if place is None:
        return None
    path = Path(place)
    return _hash([path] if path.is_file() else filter(Path.is_file, path.glob("*")))


def _hash(files: Iterable[Path]) -> str | None:
    """Hash names, sizes and bytes; None for no files. Dates do not count: a copy elsewhere has the same key."""
    entries = []
    for path in sorted(set(files)):
        size, digest = path.stat().st_size, hashlib.sha256()
        with open_input(path, plain=True) as file:
            if size <= WHOLE:
                digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
            for number in range(PIECES if size > WHOLE else 0):
                file.seek((size - PIECE) * number // (PIECES - 1))
                digest.update(file.read(PIECE))
        entries.append([path.name, size, digest.hexdigest()])
    return content_hash(entries) if entries else None


class Graph:
    """All stages of a recipe. Equal stages are one by their key.

    >>> [stage.name for stage in stages.ordered([Graph(load_recipe("quickstart")).responses("witnesses")])]
    ['questions witnesses', 'responses witnesses']
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        # The files that questions are read from; None where they are generated, or the hub's.
        self._tasks: dict[str, str | None] = {}
        self._without_options: set[str] = set()
        for name, block in recipe.tasks.items():
            files: list[Path] = []
            with suppress(ValueError):  # the stage that reads it names what is missing
                task = task_of(name, block)
                if not task.labels:
                    self._without_options.add(name)
                files = find_rows(task, block.files, block.data_dir).files
            self._tasks[name] = _hash(files)
        self._model = contents(recipe.model.path)
        teacher = recipe.own_teacher
        self._teacher = contents(teacher.responses if teacher.source == "responses" else teacher.model)
        self._generating = stages.Generating(recipe.evaluation, recipe.teacher.reasoning, prompts.fingerprint())
        self._chosen: dict[tuple[str, int, str, Budget], Choice] = {}  # many stages need the same

    def _generating_of(self, task: str) -> stages.Generating:
        """What determines the responses to a task: questions without options have prompts of their own."""
        if task not in self._without_options:
            return self._generating
        both = content_hash([self._generating.prompts, prompts.open_fingerprint()])
        return replace(self._generating, prompts=both)

    def _grading_of(self, task: str) -> int | None:
        """The version of the grading of a task's answers; None where they are labels."""
        return grading.VERSION if task in self._without_options else None

    # ---- data -------------------------------------------------------------------------------------------------------

    def questions(self, task: str, split: Split = "train", seed: int = 0, more: int = 0) -> Stage[QuestionSettings]:
        """Questions of one split. Training questions are the same for every seed: no seed holds one of them out.

        more: so many beyond the task's `train` too, for a stream that is held out.
        """
        others = {"train", "validation", "test"} - {split}
        block = self.recipe.tasks[task].model_copy(update=dict.fromkeys(others))
        if split != "train":
            settings = QuestionSettings(task, split, seed, block, self._tasks[task])
            return Stage("held_out", f"{split} questions {task} seed {seed}", settings)
        cut = block.own and len(block.files or ()) < len(SPLITS)  # a user's file, by the seeds
        seeds = self.recipe.seeds if cut else None
        if more:
            block = block.model_copy(update={"train": (block.train or 0) + more})
        settings = QuestionSettings(task, split, (seeds or (0,))[0], block, self._tasks[task], seeds)
        return Stage("questions", f"{'stream ' if more else ''}questions {task}", settings)

    def responses(self, task: str) -> Stage[ResponseSettings]:
        """The teacher's responses to the training questions, unread: what may cost money."""
        return self._asked(task, self.questions(task), self.recipe.own_teacher)

    def teacher(self, task: str) -> Stage:
        """The rows from the teacher's responses."""
        return self._rows(f"teacher {task}", self.responses(task), ("sft", "preferences", "outcome"))

    def traces(self, task: str, seed: int) -> Stage:
        """One teacher response to every validation question: what SFT is monitored on."""
        name, questions = f"traces {task} seed {seed}", self.questions(task, "validation", seed)
        return self._rows(name, self._asked(name, questions, self.recipe.own_teacher.model_copy(update={"n": 1})))

    def held_out_pairs(self, task: str, seed: int) -> Stage | None:
        """The teacher's pairs of the validation questions; None where the recipe does not ask for them."""
        if not self.recipe.asks_held_out_pairs:
            return None
        teacher = self.recipe.own_teacher
        per_question = max(teacher.pairs_per_question, HELD_OUT_PAIRS)
        teacher = teacher.model_copy(update={"pairs_per_question": per_question})
        name = f"held-out pairs {task} seed {seed}"
        responses = self._asked(name, self.questions(task, "validation", seed), teacher)
        return self._rows(name, responses, ("preferences",))

    def _asked(
        self, name: str, questions: Stage[QuestionSettings], teacher: TeacherSettings
    ) -> Stage[ResponseSettings]:
        parser, split = forms.VERSION if teacher.source == "responses" else None, questions.settings.split
        wording = self._generating_of(questions.settings.task).prompts
        settings = ResponseSettings(teacher, split, wording, self._teacher, parser, None, None)
        return Stage("responses", f"responses {name}", settings, {"questions": questions})

    def _stream(self, task: str, seed: int, row: Method) -> Stage:
        """What `outcome` learns from: a response of the start model to each training question, unfiltered.

        Where the target is of votes, more responses are sampled and the row has the share of each label among them.
        """
        outcome, start = self.recipe.outcome, self.recipe.start
        if outcome.source == "teacher":
            return self._rows(f"stream teacher {task}", self.responses(task), ("stream",))
        model = self.chosen(task, seed, start, "matched")
        if row.calibration == "outcome" and outcome.target != "gold":
            name = f"votes {start} {task} seed {seed}"
            return self._sampled(name, model, "train", outcome, outcome.samples, ("stream",))
        return self._sampled(f"stream {start} {task} seed {seed}", model, "train", outcome)

    def _sampled(
        self,
        name: str,
        model: Choice,
        split: Split,
        outcome: OutcomeSettings | None = None,
        samples: int = 1,
        kinds: tuple[Kind, ...] = ("outcome",),
    ) -> Stage:
        """Rows of sampled responses, usually one per question: the model is asked as a teacher would be."""
        generating = self._generating_of(model.settings.task)
        temperature = 1.0 if outcome is None else outcome.temperature
        teacher = TeacherSettings(
            n=samples,
            temperature=(temperature, temperature),
            max_tokens=generating.evaluation.max_tokens,
            reasoning=generating.reasoning,
            seed=model.settings.seed,
            concurrency=generating.evaluation.batch_size,
        )
        settings = ResponseSettings(teacher, split, generating.prompts, None, None, generating, outcome)
        questions = self.questions(model.settings.task, split, model.settings.seed)
        needs: dict[str, Stage] = {"model": model, "questions": questions}
        if outcome is not None and outcome.held_out:
            more = self.questions(model.settings.task, more=outcome.questions or 0)
            needs |= {"questions": more, "trained_on": questions}
        return self._rows(name, Stage("sampled", f"sampled {name}", settings, needs), kinds)

    def _rows(self, name: str, responses: Stage[ResponseSettings], kinds: tuple[Kind, ...] = ("outcome",)) -> Stage:
        asked = {role: need for role, need in responses.needs.items() if role in ("questions", "trained_on")}
        needs = {"responses": responses, **asked}
        grading_version = self._grading_of(responses.needs["questions"].settings.task)
        settings = stages.RowSettings(responses.settings, kinds, forms.VERSION, grading_version)
        return Stage("rows", name, settings, needs)

    # ---- training ---------------------------------------------------------------------------------------------------

    def base_model(self) -> Stage[stages.BaseSettings]:
        """The given model, untouched: one for all tasks and seeds."""
        return Stage("base", "base model", stages.BaseSettings(self.recipe.model, self._model))

    def trained(self, task: str, seed: int, name: str, budget: Budget, rate: float) -> Stage[stages.TrainSettings]:
        """A trained model."""
        recipe, row = self.recipe, METHODS[name]
        block: TrainerSettings = getattr(recipe, row.stage)
        # Options of the calibration term are for the methods that have that term: others do not depend on them.
        given = {name: value for name, value in block.trl.items() if (name, value) != ("calibration_weight", None)}
        given = {"calibration_weight": WEIGHTS[row.calibration], **given}  # the default determines a training too
        given = without_overridden(row, options_read_by(row.calibration, given))
        block = block.model_copy(update={"trl": given})
        effort, rcft = row.effort[budget], row.stage == "rcft"
        needs: dict[str, Stage] = {"teacher": self.teacher(task)}
        if row.stage != "sft":
            start = needs["start"] = self.chosen(task, seed, start_of(row, recipe.start), budget)
            # What training is monitored on: one sampled response of the start model to every validation question.
            needs["reasoning"] = self._sampled(f"reasoning {start.settings.name}", start, "validation")
        elif recipe.teacher.source != "responses":  # stored responses are to training questions alone
            needs["traces"] = self.traces(task, seed)
        if rcft:
            needs["held_out"] = self.questions(task, "validation", seed)
        if row.stream != "none":
            needs["stream"] = self._stream(task, seed, row)
        outcome = None
        if row.calibration == "outcome":
            outcome = recipe.outcome
        elif row.calibration == "replay":
            outcome = recipe.outcome.model_copy(update={"target": "gold"})  # it reads no target
        settings = stages.TrainSettings(
            name=name,
            method=row,
            block=block,
            seed=seed,
            learning_rate=rate,
            batch_size=block.batch_size or row.batch_size,
            # A recipe's `epochs` is for the full effort of a method; the small budget keeps its own.
            epochs=effort.epochs if effort.pairs is not None else block.epochs or effort.epochs,
            pairs=None if effort.pairs is None else recipe.small_pairs,
            model=recipe.model,
            contents=self._model if row.stage == "sft" else None,
            context=recipe.context,
            keep=recipe.keep,
            prefix_sharing=recipe.prefix_sharing if row.stage == "preference" else None,
            outcome=outcome,
            answering=self._generating_of(task) if rcft else None,
            parser=forms.VERSION if rcft else None,
            others=recipe.model_dump(mode="json", exclude={*stages.IN_STAGES, "name", "evaluation"}),
            launch=recipe.launch,
        )
        return Stage("train", f"{_titled(name, budget)} {task} seed {seed} lr {rate:g}", settings, needs)

    def rates(self, name: str) -> tuple[float, ...]:
        """The learning rates among which one is chosen; out of distribution the first is taken."""
        if METHODS[name].stage == "base":
            return ()
        block: TrainerSettings = getattr(self.recipe, METHODS[name].stage)
        rates = block.learning_rates or METHODS[name].learning_rates
        return rates[:1] if self.recipe.train_on is not None else rates

    def chosen(self, task: str, seed: int, name: str, budget: Budget) -> Choice:
        """The model of the learning rate with the lowest validation ECE, of this seed or on average over seeds."""
        place = task, seed, name, budget
        if place not in self._chosen:
            rates, title = self.rates(name), _titled(name, budget)
            seeds = self.recipe.seeds if self.recipe.lr_choice == "mean" and len(rates) > 1 else (seed,)
            needs: dict[str, Stage] = {}
            if METHODS[name].stage == "base":
                needs[f"model 0 seed {seed}"] = self.base_model()
            for (number, rate), each in itertools.product(enumerate(rates), seeds):
                model = self.trained(task, each, name, budget, rate)
                needs[f"model {number} seed {each}"] = model
                if len(rates) > 1:
                    needs[f"validation {number} seed {each}"] = self._validated(task, each, model)
            # No `bins` here: they are the report's, and training starts from what is chosen.
            settings = stages.ChoiceSettings(title, task, seed, seeds, rates)
            self._chosen[place] = Stage("chosen", f"chosen {title} {task} seed {seed}", settings, needs)
        return self._chosen[place]

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _predicted(
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
        settings = stages.TextSettings(split, seed, self._generating_of(task), temperatures, limit)
        needs: dict[str, Stage] = {"model": model, "held_out": self.questions(task, split, seed)}
        generating_needs = dict(needs)
        if temperature is not None:
            generating_needs["temperature"] = temperature
        needs["generated"] = Stage("generated", f"generated {name}", settings, generating_needs)
        title = name if temperatures == GREEDY else f"read {name}"
        reading = stages.PredictionSettings(settings, forms.VERSION, self._grading_of(task))
        return Stage("predicted", title, reading, needs)

    def _validated(self, task: str, seed: int, model: Stage) -> Stage:
        """Greedy predictions on the validation questions; the base model's name says neither task nor seed."""
        name = f"{model.name} {task} seed {seed}" if model.kind == "base" else model.name
        return self._predicted(f"validation {name}", model, seed, task, "validation", GREEDY)

    def tested(self, task: str, model: Choice) -> Stage:
        """Greedy predictions on the test questions."""
        name = f"test {model.settings.title} {task} seed {model.settings.seed}"
        return self._predicted(name, model, model.settings.seed, task, "test", GREEDY)

    def tau(self, model: Choice, kind: ScalingKind = "raw") -> Stage[stages.ScalingSettings]:
        """The temperature of a model's label token, or its vector, fitted on its greedy validation predictions."""
        validation = {role: need for role, need in model.needs.items() if role.startswith("validation")}
        if not validation:  # a single learning rate was not measured
            (trained,) = model.needs.values()
            validation = {"validation": self._validated(model.settings.task, model.settings.seed, trained)}
        titles: dict[ScalingKind, str] = {"raw": "tau", "normalized": "tau among labels", "vector": "vector"}
        name = f"{titles[kind]} {model.settings.name}"
        return Stage("tau", name, stages.ScalingSettings(kind), {"model": model, **validation})

    def scaled(self, title: str, task: str, model: Choice, kind: ScalingKind) -> Stage:
        """Scaling: the stored greedy answers rescaled, or new ones sampled at the temperature of the vocabulary.

        What scales the labels alone is no temperature of the vocabulary, so nothing is sampled at it.
        """
        name, tau = f"scaled {title} {task} seed {model.settings.seed}", self.tau(model, kind)
        if self.recipe.evaluation.decode == "sample" and kind == "raw":
            predicted = self._predicted(name, model, model.settings.seed, task, "test", 1, tau)
        else:
            predicted = self.tested(task, model)
        return Stage("scaled", name, tau.settings, {"predicted": predicted, "tau": tau})

    def sampling(self, model: Choice) -> Stage:
        """The temperature at which candidates are sampled, chosen by Confidence@k on some validation questions."""
        name, task = f"sampling {model.settings.name}", model.settings.task
        each = tuple(temperature for temperature in SAMPLING for _ in range(max(self.recipe.evaluation.k)))
        seed = model.settings.seed
        predicted = self._predicted(name, model, seed, task, "validation", each, limit=SAMPLING_QUESTIONS)
        return Stage("sampling", name, stages.StageSettings(), {"predicted": predicted, "tau": self.tau(model)})

    def candidates(self, task: str, model: Choice) -> Stage:
        """max(k) samples a test question, with their confidence at tau, by which they are ranked."""
        name, tau = f"candidates {model.settings.title} {task} seed {model.settings.seed}", self.tau(model)
        temperature = tau if self.recipe.evaluation.sampling == "fitted" else self.sampling(model)
        seed, samples = model.settings.seed, max(self.recipe.evaluation.k)
        predicted = self._predicted(name, model, seed, task, "test", samples, temperature)
        return Stage("scaled", name, tau.settings, {"predicted": predicted, "tau": tau})

    def preference_accuracy(self, model: Choice) -> Stage | None:
        """How often a model prefers the chosen response of held-out pairs, against the reference of its training.

        None where the recipe asks for no such pairs, and for models that were not trained on preferences.
        """
        place = model.settings
        pairs = self.held_out_pairs(place.task, place.seed)
        reference = _reward_reference(model)
        if pairs is None or reference is None:
            return None
        needs = {"policy": self._pair_logprobs(model, pairs), "start": self._pair_logprobs(reference, pairs)}
        return Stage("preference_accuracy", f"preference accuracy {place.name}", stages.StageSettings(), needs)

    def _pair_logprobs(self, model: Choice, pairs: Stage) -> Stage[stages.PairSettings]:
        """The log-probabilities of pairs under a model: one pass, which all that start from the model share."""
        recipe = self.recipe
        settings = stages.PairSettings(recipe.context, recipe.evaluation.batch_size, recipe.model.attention)
        needs = {"model": model, "pairs": pairs}
        return Stage("pair_logprobs", f"pair logprobs {model.settings.name}", settings, needs)

    # ---- the whole --------------------------------------------------------------------------------------------------

    def cells(self) -> list[stages.CellPlan]:
        """Every cell of the tables."""
        recipe, train_on = self.recipe, self.recipe.train_on
        tasks = [(task, train_on or task) for task in recipe.tasks if task != train_on]
        if train_on is not None and not tasks:  # nothing else to test on
            tasks = [(train_on, train_on)]
        cells = []
        for (task, source), seed, name in itertools.product(tasks, recipe.seeds, recipe.methods):
            row = find_method(name)
            for budget in recipe.budgets if row.budgeted else recipe.budgets[:1]:
                scaling, title = row.stage == "scaling", _titled(name, budget)
                model = self.chosen(source, seed, row.start if scaling else name, budget)
                kind = scaled_kind(name)
                predictions = self.scaled(title, task, model, kind) if scaling else self.tested(task, model)
                candidates = None if scaling or not recipe.evaluation.k else self.candidates(task, model)
                # Validation predictions exist where a temperature is fitted or a learning rate chosen.
                measured = self.tau(model, kind) if scaling or candidates is not None else model
                sampled = scaling and kind == "raw" and recipe.evaluation.decode == "sample"
                alike = task == source and not sampled
                validation = [need for role, need in measured.needs.items() if alike and role.startswith("validation")]
                named = stages.CellPlace(task, source, name, budget if row.budgeted else None, seed)
                questions = self.questions(task, "test", seed)
                # Temperature scaling leaves the order of responses as it is, and there are pairs of the training task.
                preference = None if scaling or task != source else self.preference_accuracy(model)
                cells.append(
                    stages.CellPlan(named, predictions, candidates, model, questions, tuple(validation), preference)
                )
        return cells

    def measured_pairs(self, task: str) -> dict[int, Stage]:
        """The stages of the held-out pairs of a training task that some method is measured on, by their seeds."""
        pairs: dict[int, Stage] = {}
        for cell in self.cells():
            if cell.preference is not None and cell.place.trained_on == task:
                pairs[cell.place.seed] = cell.preference.needs["policy"].needs["pairs"]
        return pairs

    def report(self) -> Stage[stages.ReportSettings]:
        """The report of everything."""
        cells = tuple(self.cells())
        needs: dict[str, Stage] = {}
        for cell in cells:
            parts = (cell.predictions, cell.candidates, cell.chosen, cell.questions, *cell.validation, cell.preference)
            needs |= {stage.name: stage for stage in parts if stage is not None}
        return Stage("report", "report", stages.ReportSettings(VERSION, self.recipe, cells), needs)


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


def _titled(name: str, budget: Budget) -> str:
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
    for name, block in recipe.tasks.items():
        if name not in TASKS and not block.own:
            told = f"tasks.{name}: neither one of {', '.join(TASKS)} nor given a path{did_you_mean(name, TASKS)}"
            raise DataError(origin_of(source, overrides, ("tasks", name)), None, told)
        kind = _origin_of_questions(name, block)
        given = {setting for setting in block.model_fields_set if getattr(block, setting) is not None}
        if unread := min(given - _READ[kind], default=None):
            culprit = origin_of(source, overrides, ("tasks", name, unread))
            raise DataError(culprit, None, f"tasks.{name}.{unread}: not read for this task, so it would change nothing")
        # The world of witnesses and users' files have splits for any seed, the other tasks for a few.
        seeds = TASKS[name].seeds if kind in ("benchmark", "generated") else recipe.seeds
        for seed in recipe.seeds:
            if seed not in seeds:
                culprit, known = origin_of(source, overrides, ("seeds",)), ", ".join(map(str, seeds))
                raise DataError(culprit, None, f"seeds: {seed} is not one of {name}'s split seeds {known}")
    if problem := _find_need_of_labels(recipe):
        raise DataError(source, None, problem)
    return recipe


def _find_need_of_labels(recipe: Recipe) -> str | None:
    """Return what of a recipe reads the label of an answer, if there is a task whose answers have none."""
    without_options = []
    for name, block in recipe.tasks.items():
        with suppress(ValueError):  # the stage that reads the task names what is wrong with it
            if not task_of(name, block).labels:
                without_options.append(name)
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
                find_rows(task_of(name, block), block.files, block.data_dir)
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
        launch.check(recipe)
    except ValueError as error:
        raise DataError(source, None, f"{where}: {error}") from None


# ---- recipes in an experiment's folder ------------------------------------------------------------------------------


def stored(root: Path, recipe: Recipe) -> Path:
    """Return the place of a recipe in the experiment's folder, named by its hash."""
    return root / "recipes" / f"{content_hash(recipe.model_dump(mode='json'))}.json"


def freeze(root: Path, recipe: Recipe) -> Path:
    """Store a recipe in the experiment's folder, where its stages are found by key whatever becomes of the user's file.

    Several recipes may share the folder. A password in the teacher's address is not stored.
    """
    path = stored(root, recipe)
    value = recipe.model_dump(mode="json")
    try:
        is_stored = path.exists() and read_json(path) == value
    except DataError:  # damaged
        is_stored = False
    if not is_stored:
        stages.write(path, value)
    os.utime(path)  # the one that was used last
    return path


def read_stored(path: Path) -> Any:
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
        value = read_stored(path)
        with data_errors_at(path, value=value):
            graph = Graph(Recipe.model_validate(value))
        matches = [one for one in stages.ordered([graph.report()]) if one.key.startswith(key) or one.folder == key]
        if len(matches) > 1:
            raise DataError(root, None, f"{len(matches)} keys begin with {key!r}, among them {matches[0].key}")
        if matches:
            return matches[0]
    told = f"{key} is no stage of the recipes here: settings, a file or catto's version differ from the plan's"
    raise DataError(root, None, told)
