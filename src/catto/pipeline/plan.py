"""Turn a recipe into stages. Each method of `Graph` plans one kind of stage, with all that determines its result.

A recipe is checked before anything runs: its tasks and seeds must be known, and the files and models it names must
exist.

One stage generates text (or asks for it) and a different one reads it. The wording of the prompts is in the key of the
first, the version of the parser in the key of the second. The contents of local files are also part of a key, so that
an edited file is read again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

# Of a larger file (weights), only some pieces are hashed, evenly spaced from its first byte to its last.
MAX_BYTES_HASHED_WHOLE = 2**28
PIECE_COUNT = 64
PIECE_BYTES = 2**20
GREEDY = (0.0,)  # one sample at temperature 0
Choice = Stage[ChoiceSettings]
# `sampling: validation` chooses among these temperatures, on at most this many validation questions.
SAMPLING_TEMPERATURES = (0.3, 0.5, 0.7, 1.0)
MAX_SAMPLING_QUESTIONS = 100
# A held-out question gives up to this many pairs, or up to `pairs_per_question` if that is more. More pairs cost no
# further responses, and the preference accuracy is less noisy.
HELD_OUT_PAIRS = 4


def _hash_teacher(teacher: TeacherSettings) -> str | None:
    """Hash the local files that the teacher's responses come from; None if there are none."""
    if teacher.source == "server":
        return None  # `model` is a name on the server, even if a local folder has the same name
    if teacher.source == "responses":
        return hash_contents(teacher.responses)
    return hash_contents(teacher.model)


def hash_contents(place: str | None) -> str | None:
    """Hash a file, or the files in a folder.

    Args:
        place: A path or a name on the Hub, or None.

    Returns:
        The hash; None if there is no such file, or no file in such a folder, as for a name on the Hub.

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
    """Hash the local files that a task's questions are read from; None if there are none."""
    files: list[Path] = []
    with suppress(ValueError):  # `check_places` and the stage that reads the files say what is missing
        files = find_rows(find_task(name, block), block.files, block.data_dir).files
    return _hash_files(files)


def _hash_files(files: Iterable[Path]) -> str | None:
    """Hash names, sizes and contents of files, but not their dates: a copy has the same hash. None for no files."""
    entries = []
    for path in sorted(set(files)):
        size = path.stat().st_size
        entries.append([path.name, size, _hash_bytes(path, size)])
    return content_hash(entries) if entries else None


def _hash_bytes(path: Path, size: int) -> str:
    """Hash the bytes of a small file, or evenly spaced pieces of a large one."""
    with open_input(path, keep_compressed=True) as file:
        if size <= MAX_BYTES_HASHED_WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        digest = hashlib.sha256()
        for number in range(PIECE_COUNT):
            file.seek((size - PIECE_BYTES) * number // (PIECE_COUNT - 1))
            digest.update(file.read(PIECE_BYTES))
        return digest.hexdigest()


class Graph:
    """Plans the stages of a recipe. A stage that is planned twice has the same key, so it runs once.

    >>> [stage.name for stage in list_needed([Graph(load_recipe("quickstart")).plan_responses("witnesses")])]
    ['questions witnesses', 'responses witnesses']
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        # Hashes of the local files that questions are read from; None if they are generated, or come from the Hub.
        self._task_hashes: dict[str, str | None] = {}
        self._without_options: set[str] = set()
        for name, block in recipe.tasks.items():
            self._task_hashes[name] = _hash_rows(name, block)
            if not _has_options(name, block):
                self._without_options.add(name)
        self._model_hash = hash_contents(recipe.model.path)
        self._teacher_hash = _hash_teacher(recipe.own_teacher)
        self._generating = Generating(recipe.evaluation, recipe.teacher.reasoning, prompts.fingerprint())
        self._choices: dict[tuple[str, int, str, Budget], Choice] = {}  # a cache: many stages need the same choice

    def _generating_for(self, task: str) -> Generating:
        """Return what determines the responses to a task. Questions without options have prompts of their own."""
        if task not in self._without_options:
            return self._generating
        both = content_hash([self._generating.prompts, prompts.open_fingerprint()])
        return replace(self._generating, prompts=both)

    def _grading_version(self, task: str) -> int | None:
        """Return the version of the grading of a task's answers; None if they are labels."""
        return grading.VERSION if task in self._without_options else None

    # ---- data -------------------------------------------------------------------------------------------------------

    def plan_questions(
        self, task: str, split: Split = "train", seed: int = 0, more: int = 0
    ) -> Stage[QuestionSettings]:
        """Plan the questions of one split.

        The training questions are the questions that no seed uses for validation or test. They are the same for every
        seed, so that the teacher has to answer them only once.

        Args:
            task: The task.
            split: The split.
            seed: The seed that the validation and test questions depend on; not used for training questions.
            more: Number of training questions beyond the task's `train`, for a stream of held-out questions.
        """
        # The sizes of the other splits are set to None, so that the key of the stage does not depend on them.
        other_splits = set(SPLITS) - {split}
        block = self.recipe.tasks[task].model_copy(update=dict.fromkeys(other_splits))
        if split == "train":
            return self._plan_training_questions(task, block, more)
        settings = QuestionSettings(task, split, seed, block, self._task_hashes[task])
        return Stage("held_out", f"{split} questions {task} seed {seed}", settings)

    def _plan_training_questions(self, task: str, block: TaskSettings, more: int) -> Stage[QuestionSettings]:
        """Plan the training questions of a task.

        Args:
            task: The task.
            block: Its settings, without the sizes of the other splits.
            more: Number of questions beyond `train` of the block; 0 for the questions that models are trained on.
        """
        name = f"questions {task}"
        if more:
            block = block.model_copy(update={"train": (block.train or 0) + more})
            name = f"stream {name}"
        seeds = None
        first_seed = 0
        # Without a file for each split, validation and test questions are cut from the user's file by seed. Training
        # leaves out those of every seed, so the stage depends on the seeds.
        is_cut_by_seeds = block.own and len(block.files or ()) < len(SPLITS)
        if is_cut_by_seeds:
            seeds = self.recipe.seeds
            first_seed = seeds[0]  # the seed that is loaded must be one of them
        settings = QuestionSettings(task, "train", first_seed, block, self._task_hashes[task], seeds)
        return Stage("questions", name, settings)

    def plan_responses(self, task: str) -> Stage[ResponseSettings]:
        """Plan the teacher's responses to the training questions. This is the stage that may cost money."""
        return self._plan_asking(task, self.plan_questions(task), self.recipe.own_teacher)

    def plan_teacher_rows(self, task: str) -> Stage:
        """Plan the training rows from the teacher's responses."""
        return self._plan_rows(f"teacher {task}", self.plan_responses(task), ("sft", "preferences", "outcome"))

    def plan_traces(self, task: str, seed: int) -> Stage:
        """Plan one teacher response to every validation question, on which SFT is monitored."""
        name = f"traces {task} seed {seed}"
        questions = self.plan_questions(task, "validation", seed)
        teacher = self.recipe.own_teacher.model_copy(update={"n": 1})
        return self._plan_rows(name, self._plan_asking(name, questions, teacher))

    def plan_held_out_pairs(self, task: str, seed: int) -> Stage | None:
        """Plan the teacher's pairs for the validation questions; None if the recipe does not ask for them."""
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
        """Plan the teacher's responses to the questions of a stage.

        Args:
            name: What the responses are for, such as the task.
            questions: The stage of the questions.
            teacher: How the teacher is asked.
        """
        settings = ResponseSettings(
            sampling=teacher,
            split=questions.settings.split,
            prompts=self._generating_for(questions.settings.task).prompts,
            contents=self._teacher_hash,
            parser=forms.VERSION if teacher.source == "responses" else None,  # only a dataset is parsed as it is read
            generating=None,  # this and `outcome` are only for samples of a trained model
            outcome=None,
        )
        return Stage("responses", f"responses {name}", settings, {"questions": questions})

    def _plan_stream(self, task: str, seed: int, method: Method) -> Stage:
        """Plan the stream of rows that a calibration term learns from: unfiltered responses to training questions.

        The responses are sampled from the start model, or are the teacher's if the recipe says that the teacher is the
        start model. There is one row per question. If votes are the target of the term, several responses are sampled,
        and the row has the share of each label among them.
        """
        outcome = self.recipe.outcome
        start = self.recipe.start
        if outcome.source == "teacher":
            return self._plan_rows(f"stream teacher {task}", self.plan_responses(task), ("stream",))
        model = self.plan_choice(task, seed, start, "matched")  # the start model is the same in both budgets
        reads_votes = method.calibration == "outcome" and outcome.target != "gold"
        if reads_votes:
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
        """Plan the responses of a trained model, and the rows made from these responses.

        Args:
            name: The name of the stage of the rows.
            model: The model.
            split: The split of the questions.
            outcome: The recipe's `outcome` block if the rows are the stream that a calibration term learns from. None
                if they are only used to monitor training; the sampling temperature is then 1.
            samples: Number of responses per question.
            kinds: The kinds of rows.

        Returns:
            The stage of the rows.
        """
        generating = self._generating_for(model.settings.task)
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
            contents=None,  # this and the parser's version are only for the teacher's responses
            parser=None,
            generating=generating,
            outcome=outcome,
        )
        questions = self.plan_questions(model.settings.task, split, model.settings.seed)
        needs: dict[str, Stage] = {"model": model, "questions": questions}
        if outcome is not None and outcome.held_out:
            # The model answers questions beyond those that it was trained on: the stage leaves out `trained_on`.
            needs["questions"] = self.plan_questions(model.settings.task, more=outcome.questions or 0)
            needs["trained_on"] = questions
        return self._plan_rows(name, Stage("sampled", f"sampled {name}", settings, needs), kinds)

    def _plan_rows(
        self, name: str, responses: Stage[ResponseSettings], kinds: tuple[Kind, ...] = ("outcome",)
    ) -> Stage:
        """Plan the rows of the given kinds from responses: for `outcome`, one for each response, right or wrong."""
        needs: dict[str, Stage] = {"responses": responses}
        for role, need in responses.needs.items():
            if role in ("questions", "trained_on"):  # which questions were asked
                needs[role] = need
        grading_version = self._grading_version(needs["questions"].settings.task)
        settings = RowSettings(responses.settings, kinds, forms.VERSION, grading_version)
        return Stage("rows", name, settings, needs)

    # ---- training ---------------------------------------------------------------------------------------------------

    def plan_base_model(self) -> Stage[BaseSettings]:
        """Plan the given model without training; it is the same for all tasks and seeds."""
        return Stage("base", "base model", BaseSettings(self.recipe.model, self._model_hash))

    def plan_training(self, task: str, seed: int, name: str, budget: Budget, rate: float) -> Stage[TrainSettings]:
        """Plan the training of a model.

        Args:
            task: The task to train on.
            seed: The seed.
            name: The name of the method.
            budget: The budget.
            rate: The learning rate.
        """
        recipe = self.recipe
        method = METHODS[name]
        block = self._resolve_block(method)
        epochs, pairs = self._resolve_effort(method, budget, block)
        is_rcft = method.stage == "rcft"
        # A setting that the method does not read is None, so that the key of the stage does not depend on it.
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
            contents=self._model_hash if method.stage == "sft" else None,  # other methods start from a stage's model
            context=recipe.context,
            keep=recipe.keep,
            prefix_sharing=recipe.prefix_sharing if method.stage == "preference" else None,
            outcome=self._resolve_outcome(method),
            answering=self._generating_for(task) if is_rcft else None,
            parser=forms.VERSION if is_rcft else None,
            # Every top-level setting that no field above covers. A new one changes the key until it is excluded here.
            others=recipe.model_dump(mode="json", exclude={*IN_STAGES, "name", "evaluation"}),
            launch=recipe.launch,
        )
        stage_name = f"{_title_of(name, budget)} {task} seed {seed} lr {rate:g}"
        return Stage("train", stage_name, settings, self._plan_training_needs(task, seed, method, budget))

    def _resolve_effort(self, method: Method, budget: Budget, block: TrainerSettings) -> tuple[int, int | None]:
        """Return the number of epochs, and the maximum number of pairs; None is no limit.

        Both depend on the budget: for some methods, one of the budgets is small and limits the number of pairs. The
        recipe's `epochs` replaces the method's number only if the method trains on all rows or pairs. The small
        budget fixes the number of epochs too.
        """
        effort = method.effort[budget]
        has_small_budget = effort.pairs is not None
        if has_small_budget:
            return effort.epochs, self.recipe.small_pairs
        return block.epochs or effort.epochs, None

    def _plan_training_needs(self, task: str, seed: int, method: Method, budget: Budget) -> dict[str, Stage]:
        """Return the stages that a training stage reads, by their role."""
        needs: dict[str, Stage] = {"teacher": self.plan_teacher_rows(task)}
        if method.stage != "sft":
            start = self.plan_choice(task, seed, start_of(method, self.recipe.start), budget)
            needs["start"] = start
            # The training is monitored on a response of the start model to every validation question.
            needs["reasoning"] = self._plan_sampled_rows(f"reasoning {start.settings.name}", start, "validation")
        elif self.recipe.teacher.source != "responses":  # stored responses may answer only the training questions
            needs["traces"] = self.plan_traces(task, seed)
        if method.stage == "rcft":
            needs["held_out"] = self.plan_questions(task, "validation", seed)
        if method.stream != "none":
            needs["stream"] = self._plan_stream(task, seed, method)
        return needs

    def _resolve_block(self, method: Method) -> TrainerSettings:
        """Return the recipe's block for a method's trainer, without the options that the method does not read.

        The key of the training then does not depend on options that are in the block for other methods.
        """
        block: TrainerSettings = getattr(self.recipe, method.stage)
        # The default weight of the calibration term is written out, so that the key changes if the default does.
        options: dict[str, Any] = {"calibration_weight": WEIGHTS[method.calibration]}
        for name, value in block.trl.items():
            means_default = name == "calibration_weight" and value is None
            if not means_default:
                options[name] = value
        options = options_read_by(method.calibration, options)
        options = without_overridden(method, options)
        return block.model_copy(update={"trl": options})

    def _resolve_outcome(self, method: Method) -> OutcomeSettings | None:
        """Return the recipe's settings of the outcome term; None for methods that do not read them."""
        if method.calibration == "outcome":
            return self.recipe.outcome
        if method.calibration == "replay":
            return self.recipe.outcome.model_copy(update={"target": "gold"})  # replay has no target to choose
        return None

    def list_learning_rates(self, name: str) -> tuple[float, ...]:
        """Return the learning rates to choose from: none for the base model, which is not trained.

        If the recipe sets `train_on`, only the first learning rate is used.
        """
        if METHODS[name].stage == "base":
            return ()
        block: TrainerSettings = getattr(self.recipe, METHODS[name].stage)
        rates = block.learning_rates or METHODS[name].learning_rates
        return rates[:1] if self.recipe.train_on is not None else rates

    def plan_choice(self, task: str, seed: int, name: str, budget: Budget) -> Choice:
        """Plan the choice of the learning rate with the lowest validation ECE, and so of a model.

        Args:
            task: The task to train on.
            seed: The seed of the model. With `lr_choice: mean`, the ECE is averaged over all seeds of the recipe.
            name: The name of the method.
            budget: The budget.
        """
        key = (task, seed, name, budget)
        if key not in self._choices:
            self._choices[key] = self._make_choice(task, seed, name, budget)
        return self._choices[key]

    def _make_choice(self, task: str, seed: int, name: str, budget: Budget) -> Choice:
        """Make the stage that `plan_choice` returns.

        It needs the model of every learning rate and seed, under a role such as `model 0 seed 7`: 0 is the position of
        the learning rate. The base model takes the place of the first learning rate. If there is a choice, the stage
        also needs the validation predictions of every model, such as `validation 0 seed 7`.
        """
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
        # The recipe's `evaluation.bins` is not in the settings: it must not change which model is chosen.
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
        """Plan a model's responses to held-out questions, and the predictions read from them.

        Two stages do this, so that the responses are not generated again when only the answer parser changes.

        Args:
            name: The end of the stages' names.
            model: The model.
            seed: The seed of the questions and of the sampling.
            task: The task of the questions.
            split: Their split.
            temperatures: One sampling temperature per sample. If a stage finds the temperature, the number of samples.
            temperature: The stage that finds the temperature of all samples; None if `temperatures` has them.
            limit: Maximum number of questions; None uses all.

        Returns:
            The stage that reads the responses.
        """
        settings = TextSettings(split, seed, self._generating_for(task), temperatures, limit)
        needs: dict[str, Stage] = {"model": model, "held_out": self.plan_questions(task, split, seed)}
        generating_needs = dict(needs)
        if temperature is not None:
            generating_needs["temperature"] = temperature
        needs["generated"] = Stage("generated", f"generated {name}", settings, generating_needs)
        # Sampled predictions are an intermediate step: the caller gives `name` to the stage that uses them.
        title = name if temperatures == GREEDY else f"read {name}"
        reading = PredictionSettings(settings, forms.VERSION, self._grading_version(task))
        return Stage("predicted", title, reading, needs)

    def _plan_validation(self, task: str, seed: int, model: Stage) -> Stage:
        """Plan greedy predictions on the validation questions."""
        # Unlike the name of a training stage, that of the base model contains neither task nor seed.
        name = f"{model.name} {task} seed {seed}" if model.kind == "base" else model.name
        return self._plan_predictions(f"validation {name}", model, seed, task, "validation", GREEDY)

    def plan_test(self, task: str, model: Choice) -> Stage:
        """Plan greedy predictions on the test questions."""
        name = f"test {model.settings.title} {task} seed {model.settings.seed}"
        return self._plan_predictions(name, model, model.settings.seed, task, "test", GREEDY)

    def plan_tau(self, model: Choice, kind: ScalingKind = "raw") -> Stage[ScalingSettings]:
        """Plan the fit of a temperature (tau) or a vector on a model's greedy validation predictions.

        These are the predictions by which the learning rate was chosen, if there was a choice.

        Args:
            model: The model.
            kind: `raw` fits a temperature for probabilities over the whole vocabulary, `normalized` one for those among
                the labels. `vector` fits a weight and a bias for each label.
        """
        validation = {role: need for role, need in model.needs.items() if role.startswith("validation")}
        if not validation:  # with a single learning rate, the choice needed no predictions, but only one model
            (trained,) = model.needs.values()
            validation = {"validation": self._plan_validation(model.settings.task, model.settings.seed, trained)}
        titles: dict[ScalingKind, str] = {"raw": "tau", "normalized": "tau among labels", "vector": "vector"}
        name = f"{titles[kind]} {model.settings.name}"
        return Stage("tau", name, ScalingSettings(kind), {"model": model, **validation})

    def plan_scaling(self, title: str, task: str, model: Choice, kind: ScalingKind) -> Stage:
        """Plan rescaled test predictions.

        In general, the confidences of the greedy answers are rescaled. With `decode: sample` in the recipe, answers are
        sampled at the fitted temperature instead. That is possible only for the kind `raw`, since a model samples from
        its whole vocabulary.

        Args:
            title: The title of the method, for the name of the stage.
            task: The task of the test questions.
            model: The model.
            kind: What is fitted, see `plan_tau`.
        """
        seed = model.settings.seed
        name = f"scaled {title} {task} seed {seed}"
        tau = self.plan_tau(model, kind)
        if self.recipe.evaluation.decode == "sample" and kind == "raw":
            # One answer per question, at the temperature that the stage `tau` finds.
            predicted = self._plan_predictions(name, model, seed, task, "test", temperatures=1, temperature=tau)
        else:
            predicted = self.plan_test(task, model)
        return Stage("scaled", name, tau.settings, {"predicted": predicted, "tau": tau})

    def plan_sampling_temperature(self, model: Choice) -> Stage:
        """Plan the choice of the temperature at which candidates are sampled.

        Confidence@k samples k candidate answers and gives the one with the largest confidence. The model samples max(k)
        answers at each temperature, to some of the validation questions. The temperature at which Confidence@k has the
        best accuracy is chosen. The confidences are rescaled by tau before, as they will be on the test questions.
        """
        name = f"sampling {model.settings.name}"
        samples = max(self.recipe.evaluation.k)
        temperatures: list[float] = []
        for temperature in SAMPLING_TEMPERATURES:
            temperatures += [temperature] * samples
        predicted = self._plan_predictions(
            name,
            model,
            model.settings.seed,
            model.settings.task,
            "validation",
            tuple(temperatures),
            limit=MAX_SAMPLING_QUESTIONS,
        )
        return Stage("sampling", name, StageSettings(), {"predicted": predicted, "tau": self.plan_tau(model)})

    def plan_candidates(self, task: str, model: Choice) -> Stage:
        """Plan the candidates of Confidence@k: max(k) sampled answers per test question.

        Confidence@k gives the candidate with the largest confidence. The confidences are computed at tau, the
        temperature that is fitted on validation predictions. It differs from the one at which answers are sampled,
        unless the recipe sets `sampling: fitted`.
        """
        evaluation = self.recipe.evaluation
        seed = model.settings.seed
        name = f"candidates {model.settings.title} {task} seed {seed}"
        tau = self.plan_tau(model)
        temperature = tau if evaluation.sampling == "fitted" else self.plan_sampling_temperature(model)
        samples = max(evaluation.k)
        predicted = self._plan_predictions(
            name, model, seed, task, "test", temperatures=samples, temperature=temperature
        )
        return Stage("scaled", name, tau.settings, {"predicted": predicted, "tau": tau})

    def plan_preference_accuracy(self, model: Choice) -> Stage | None:
        """Plan how often a model prefers the chosen response of a held-out pair, relative to its reference model.

        A pair consists of a right (chosen) and a wrong (rejected) response of the teacher to a validation question.

        Returns:
            The stage; None if the recipe asks for no such pairs, or if the model was not trained on preferences.
        """
        choice = model.settings
        pairs = self.plan_held_out_pairs(choice.task, choice.seed)
        reference = _reward_reference(model)
        if pairs is None or reference is None:
            return None
        needs = {"policy": self._plan_pair_logprobs(model, pairs), "start": self._plan_pair_logprobs(reference, pairs)}
        return Stage("preference_accuracy", f"preference accuracy {choice.name}", StageSettings(), needs)

    def _plan_pair_logprobs(self, model: Choice, pairs: Stage) -> Stage[PairSettings]:
        """Plan the log-probabilities of pairs under a model. All models that start from a model share this stage."""
        recipe = self.recipe
        settings = PairSettings(recipe.context, recipe.evaluation.batch_size, recipe.model.attention)
        needs = {"model": model, "pairs": pairs}
        return Stage("pair_logprobs", f"pair logprobs {model.settings.name}", settings, needs)

    # ---- the report -------------------------------------------------------------------------------------------------

    def list_cells(self) -> list[CellPlan]:
        """Plan every cell of the tables: one for each task, seed, method and budget.

        If the budgets give the same model, there is one cell without a budget.
        """
        recipe = self.recipe
        cells = []
        for (task, trained_on), seed, name in itertools.product(self._pair_tasks(), recipe.seeds, recipe.methods):
            method = find_method(name)
            plan_cell = self._plan_scaled_cell if method.stage == "scaling" else self._plan_trained_cell
            budgets = recipe.budgets if method.budgeted else recipe.budgets[:1]
            for budget in budgets:
                place = CellPlace(task, trained_on, name, budget if method.budgeted else None, seed)
                cells.append(plan_cell(place, budget))
        return cells

    def _pair_tasks(self) -> list[tuple[str, str]]:
        """Return the tasks to test, each with the task to train on.

        If the recipe sets `train_on`, the other tasks are tested; that task itself only if it is the only one.
        """
        train_on = self.recipe.train_on
        if train_on is None:
            return [(task, task) for task in self.recipe.tasks]
        others = [(task, train_on) for task in self.recipe.tasks if task != train_on]
        return others or [(train_on, train_on)]

    def _plan_scaled_cell(self, place: CellPlace, budget: Budget) -> CellPlan:
        """Plan the cell of a method that rescales the confidence of a different method's model."""
        kind = scaled_kind(place.method)
        model = self.plan_choice(place.trained_on, place.seed, find_method(place.method).start, budget)
        is_sampled_at_tau = kind == "raw" and self.recipe.evaluation.decode == "sample"
        validation: tuple[Stage, ...] = ()
        # The report fits a threshold on the confidence of the validation predictions, which are greedy. The threshold
        # is valid only for test predictions of the same task that are greedy too.
        if place.task == place.trained_on and not is_sampled_at_tau:
            validation = _list_validation(self.plan_tau(model, kind))
        return CellPlan(
            place=place,
            predictions=self.plan_scaling(_title_of(place.method, budget), place.task, model, kind),
            candidates=None,
            chosen=model,
            questions=self.plan_questions(place.task, "test", place.seed),
            validation=validation,
            preference=None,  # scaling does not change the order of responses
        )

    def _plan_trained_cell(self, place: CellPlace, budget: Budget) -> CellPlan:
        """Plan the cell of a method that trains a model, or of the base model."""
        model = self.plan_choice(place.trained_on, place.seed, place.method, budget)
        candidates = None
        if self.recipe.evaluation.k:
            candidates = self.plan_candidates(place.task, model)
        validation: tuple[Stage, ...] = ()
        preference = None
        if place.task == place.trained_on:  # validation questions and held-out pairs are from the training task
            # Only predictions that other stages need anyway: to fit the temperature that ranks the candidates or, if
            # there are none, to choose the learning rate.
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
        """Return the stages of the held-out pairs on which methods are measured, by seed.

        Args:
            task: The task that the methods are trained on.
        """
        pairs: dict[int, Stage] = {}
        for cell in self.list_cells():
            if cell.preference is not None and cell.place.trained_on == task:
                pairs[cell.place.seed] = cell.preference.needs["policy"].needs["pairs"]
        return pairs

    def plan_report(self) -> Stage[ReportSettings]:
        """Plan the report on all cells."""
        cells = tuple(self.list_cells())
        needs: dict[str, Stage] = {}
        for cell in cells:
            parts = (cell.predictions, cell.candidates, cell.chosen, cell.questions, *cell.validation, cell.preference)
            for stage in parts:
                if stage is not None:
                    needs[stage.name] = stage
        return Stage("report", "report", ReportSettings(VERSION, self.recipe, cells), needs)


def _list_validation(stage: Stage) -> tuple[Stage, ...]:
    """Return the validation predictions that a stage needs."""
    return tuple(need for role, need in stage.needs.items() if role.startswith("validation"))


def _reward_reference(model: Choice) -> Choice | None:
    """Return the model relative to which a model's rewards are computed; None if no training was on preferences.

    It is the model from which the last training on preferences started. For RCFT, which starts from the DPO model, this
    is the SFT model that DPO started from.
    """
    trained = model.needs[f"model 0 seed {model.settings.seed}"]  # all learning rates start from the same model
    start: Choice | None = trained.needs.get("start")
    if start is None:
        return None
    if METHODS[trained.settings.name].stage == "preference":
        return start
    return _reward_reference(start)


def _title_of(name: str, budget: Budget) -> str:
    """Return a method's name, with the budget if the two budgets give different models."""
    return f"{name} {budget}" if find_method(name).budgeted else name


# ---- checks before anything runs ------------------------------------------------------------------------------------


_SPLIT_SIZES = {"train", "validation", "test"}
# The settings of a task that are read, by the origin of its questions.
_SETTINGS_READ = {
    "own": _SPLIT_SIZES | {"path", "files", "fields", "answer", "answers", "labels", "grade", "tolerance"},
    "world": _SPLIT_SIZES | {"options", "witnesses", "reliabilities"},
    "generated": _SPLIT_SIZES,
    "benchmark": _SPLIT_SIZES | {"data_dir", "files"},
}


def open_recipe(source: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply the overrides and check its tasks.

    Args:
        source: The name of a recipe of the package, or a file.
        overrides: Settings to replace, such as `seeds=[0]`.

    Raises:
        DataError: The recipe is invalid, a task is unknown, or a setting cannot be used with a task.

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
    problem = _explain_missing_labels(recipe)
    if problem is not None:
        raise DataError(source, None, problem)
    return recipe


def _has_options(name: str, block: TaskSettings) -> bool:
    """Return whether the answers to a task are labels of options."""
    with suppress(ValueError):  # the stage that reads the task says what is wrong with it
        return bool(find_task(name, block).labels)
    return True


def _explain_missing_labels(recipe: Recipe) -> str | None:
    """Return a message if the answers to a task have no labels but a setting of the recipe needs them.

    Return None if no setting does, or if the answers to all tasks are labels.
    """
    without_options = [name for name, block in recipe.tasks.items() if not _has_options(name, block)]
    if not without_options:
        return None
    reason = f"reads the labels of answers, but answers to {without_options[0]} have none"
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
    """Return whether a method needs the label tokens of answers, for its training or for scaling its confidence."""
    if method.stage == "scaling" or method.rcft_weight > 0:
        return True
    separates_label = method.preference_tokens != "all"
    scores_labels_of_pairs = method.calibration == "outcome" and method.stream == "none"
    return separates_label or scores_labels_of_pairs


class _TaskError(ValueError):
    """A task in the recipe is invalid; `setting` is the path of the setting that is to blame."""

    def __init__(self, setting: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.setting = setting


def _check_task(name: str, recipe: Recipe) -> None:
    """Check the name and the settings of a task, and the recipe's seeds for it.

    Raises:
        _TaskError: The task is unknown, a setting of it is not read, or it has no splits for one of the seeds.
    """
    block = recipe.tasks[name]
    if name not in TASKS and not block.own:
        expected = f"neither one of {', '.join(TASKS)} nor given a path"
        raise _TaskError(("tasks", name), f"tasks.{name}: {expected}{did_you_mean(name, TASKS)}")
    origin = _origin_of_questions(name, block)
    given_settings = {setting for setting in block.model_fields_set if getattr(block, setting) is not None}
    unread = sorted(given_settings - _SETTINGS_READ[origin])
    if unread:
        problem = "not read for this task, so it would have no effect"
        raise _TaskError(("tasks", name, unread[0]), f"tasks.{name}.{unread[0]}: {problem}")
    # Users' files and the generated world of the task `witnesses` can be split with any seed. The other tasks have
    # splits only for fixed seeds.
    if origin in ("benchmark", "generated"):
        split_seeds = TASKS[name].seeds
        for seed in recipe.seeds:
            if seed not in split_seeds:
                seeds = ", ".join(map(str, split_seeds))
                raise _TaskError(("seeds",), f"seeds: {seed} is not one of {name}'s split seeds {seeds}")


def _origin_of_questions(name: str, block: TaskSettings) -> str:
    """Return where the questions of a task come from: a key of `_SETTINGS_READ`."""
    if block.own:
        return "own"
    if name == "witnesses":
        return "world"
    return "benchmark" if TASKS[name].generate is None else "generated"


def check_places(source: str, recipe: Recipe) -> None:
    """Check the paths, hub ids and addresses in a recipe before anything runs.

    Neither the Hub nor a server is contacted.

    Args:
        source: The name or file of the recipe, for errors.
        recipe: The recipe.

    Raises:
        DataError: A file or folder is missing, a hub id or an address is malformed, or a method cannot be trained with
            the `launch` block. The message names the setting.
    """
    # The functions below are called only for the errors that they raise.
    for name, block in recipe.tasks.items():
        with _errors_name_setting(source, f"tasks.{name}"):
            origin = _origin_of_questions(name, block)
            if origin == "world":
                witnesses.generate_questions("train", 0, seed=0, **block.world_options())
            elif origin in ("own", "benchmark"):
                find_rows(find_task(name, block), block.files, block.data_dir)
    with _errors_name_setting(source, "model.path"):
        if recipe.model.path is not None:
            check_model(recipe.model.path)
    _check_teacher_places(source, recipe.own_teacher)
    with _errors_name_setting(source, "launch"):
        launch.check_launch(recipe)


def _check_teacher_places(source: str, teacher: TeacherSettings) -> None:
    """Check the model, the file or the address of a teacher, whichever it has. Errors as in `check_places`."""
    if teacher.source == "transformers":
        with _errors_name_setting(source, "teacher.model"):
            check_model(teacher.model or "")
    elif teacher.source == "responses":
        with _errors_name_setting(source, "teacher.responses"):
            responses = teacher.responses or ""
            if not Path(responses).exists() and not is_hub_id(responses):
                raise DataError(responses, None, "no such file or folder, and not a hub id of the form owner/name")
    elif teacher.source == "server":
        with _errors_name_setting(source, "teacher.base_url"):
            server_address(teacher.base_url or "")


@contextmanager
def _errors_name_setting(source: str, setting: str) -> Iterator[None]:
    """Turn a ValueError, including a DataError, into a DataError that names the recipe and the setting to blame."""
    try:
        yield
    except ValueError as error:
        raise DataError(source, None, f"{setting}: {error}") from None


# ---- recipes in an experiment's folder ------------------------------------------------------------------------------


def recipe_file(root: Path, recipe: Recipe) -> Path:
    """Return the path at which a recipe is stored in the experiment's folder; the name is the recipe's hash."""
    return root / "recipes" / f"{content_hash(recipe.model_dump(mode='json'))}.json"


def store_recipe(root: Path, recipe: Recipe) -> Path:
    """Store a recipe in the experiment's folder, so that its stages can be found by key even without the user's file.

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
    os.utime(path)  # `find_stage` takes the recipe that was used last
    return path


def read_stored_recipe(path: Path) -> Any:
    """Return the settings of a stored recipe. Raise DataError if they do not match the hash in the file's name."""
    value = read_json(path)
    if content_hash(value) != path.stem:
        problem = "damaged: the recipe was changed; `catto run` with your recipe file stores it again"
        raise DataError(path, None, problem)
    return value


def find_stage(root: Path, key: str, recipe: str = "") -> Stage:
    """Return a stage of a recipe that is stored in an experiment's folder.

    Args:
        root: The experiment's folder.
        key: The key of the stage, the beginning of the key, or the name of the stage's folder.
        recipe: The hash of the recipe, or its beginning. Recipes that share a stage may differ in how it is run
            (`launch`, the teacher's address). If empty, the most recently used recipe that has the stage is chosen.

    Returns:
        The stage.

    Raises:
        DataError: There is no such recipe or stage, several keys of a recipe begin with `key`, or a stored recipe is
            damaged.
    """
    paths = (root / "recipes").glob(f"{recipe}*.json")
    newest_first = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
    if not newest_first:
        missing = f"no recipe {recipe}" if recipe else "no recipe"
        raise DataError(root, None, f"{missing} is stored here: `catto run` and `catto plan --export` store one")
    for path in newest_first:
        stored_recipe = read_stored_recipe(path)
        with data_errors_at(path, value=stored_recipe):
            graph = Graph(Recipe.model_validate(stored_recipe))
        matches = []
        for stage in list_needed([graph.plan_report()]):
            if stage.key.startswith(key) or stage.folder == key:
                matches.append(stage)
        if len(matches) > 1:
            raise DataError(root, None, f"{len(matches)} keys begin with {key!r}, among them {matches[0].key}")
        if matches:
            return matches[0]
    reason = "the settings, a file or catto's version may have changed since the plan was made"
    raise DataError(root, None, f"{key} is not a stage of the recipes stored here: {reason}")
