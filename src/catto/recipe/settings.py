"""The recipe: every setting of an experiment, in typed models. An unknown key is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from catto.errors import did_you_mean
from catto.methods import (
    BUDGETS,
    METHODS,
    SCALINGS,
    Budget,
    Method,
    Start,
    find_method,
    is_known_method,
    methods_from,
    start_of,
)
from catto.records import Split, checked_name
from catto.redaction import find_redacted, looks_like_secret, redact

MAX_BINS = 10_000  # with more, no two answers share a bin, and every resample gets slower
MAX_RESAMPLES = 100_000
MAX_SAMPLES = 1_024
# With fewer questions, bootstrap intervals are too narrow, and a fit depends on single rows.
FEW_QUESTIONS = 30


class Settings(BaseModel):
    """A frozen block of settings. Unknown keys and numbers that are not finite are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false if a number is expected: pydantic would read them as 1 and 0."""
        annotation = str(cls.model_fields[info.field_name or ""].annotation)
        expects_number = re.search(r"\b(bool|Any|str|Literal)\b", annotation) is None
        if not expects_number:
            return value
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, bool):
                raise ValueError(f"expected a number, got {str(item).lower()}")
        return value


def expand_variables(path: str) -> str:
    """Replace `${NAME}` and `${NAME:-default}` in a path by the environment variable's value.

    An empty variable counts as not set.

    Raises:
        ValueError: A variable is not set and has no default. In its place, an empty text would give a different path.

    >>> expand_variables("${CATTO_UNSET_VARIABLE:-models}/smollm2")
    'models/smollm2'
    """

    def read_variable(match: re.Match[str]) -> str:
        value = os.environ.get(match["name"]) or match["default"]
        if value is None:
            raise ValueError(f"environment variable {match['name']} is not set, or empty")
        return str(value)

    return re.sub(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}", read_variable, path)


def _expand_all(value: Any) -> Any:
    """Return a JSON value with `expand_variables` applied to all texts in it."""
    if isinstance(value, dict):
        return {name: _expand_all(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_expand_all(item) for item in value]
    if isinstance(value, str):
        return expand_variables(value)
    return value


# Only paths are expanded when a recipe is read. In any other field, a variable could put a secret into a run's files.
ExpandedPath = Annotated[str, AfterValidator(expand_variables)]

Rate = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Samples = Annotated[int, Field(ge=1, le=MAX_SAMPLES)]
# How the teacher is reached; no response depends on these settings.
CONNECTION_FIELDS = frozenset(
    {"base_url", "api_key_env", "concurrency", "timeout", "deadline", "retries", "max_refused"}
)
# How rows are chosen from responses.
ROW_FIELDS = frozenset({"pairs_per_question", "min_correct", "min_wrong"})


class ResponseFields(Settings):
    """The columns of an existing dataset of responses; None if the dataset has no such column."""

    question: str | None = "question"  # the question's id
    prompt: str | None = None  # or the user message; if the labels are words, the question's fields suffice
    text: str | None = "text"
    reasoning: str | None = None
    label: str | None = None
    sample: str | None = None
    model: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.question is None) == (self.prompt is None):
            raise ValueError("name exactly one of question (an id) and prompt (a text)")
        if self.text is None and self.label is None:
            raise ValueError("name a column for text or for label")
        return self


class TeacherSettings(Settings):
    """How responses to training questions are collected, and how rows are made from them.

    Defaults are the paper's if the paper gives a value.
    """

    # None: an engine is passed in code
    source: Literal["server", "transformers", "responses", "labels", "witnesses", "readings"] | None = None
    model: str | None = None  # the server's name of the model, or a model folder or hub id
    base_url: str | None = Field(default=None, repr=False)  # https://api.deepseek.com, http://localhost:8000/v1, ...
    api_key_env: str = "OPENAI_API_KEY"  # the name of the environment variable; the key itself is never stored
    # Further fields of a request, e.g. {thinking: {type: disabled}}. Possible secrets are stored as digests; `${NAME}`
    # is an environment variable, whose value is filled in when a request is sent.
    extra_body: dict[str, Any] = Field(default_factory=dict, repr=False)
    responses: ExpandedPath | None = None  # for source responses: a file, a folder or a hub id
    fields: ResponseFields = ResponseFields()

    n: int = Field(default=10, ge=1)  # responses per question
    temperature: tuple[float, float] = (0.6, 1.2)  # lowest and highest; each response draws its own
    max_tokens: int = Field(default=1024, ge=1)
    reasoning: bool = True
    seed: int = 0

    concurrency: int = Field(default=16, ge=1)  # requests in flight, or a local model's batch size
    timeout: float = Field(default=600, gt=0)  # seconds without a byte from the server
    deadline: float = Field(default=1800, gt=0)  # seconds for a whole reply, including retries
    retries: int = Field(default=8, ge=0)
    max_refused: float = Field(default=0.2, ge=0, le=1)  # largest share of questions with refused requests; 1: no limit

    pairs_per_question: int = Field(default=1, ge=1)
    min_correct: int = Field(default=1, ge=1)  # correct responses that a question needs to give pairs
    min_wrong: int = Field(default=3, ge=1)  # wrong responses that a question needs to give pairs

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.temperature
        if not 0 <= low <= high:
            raise ValueError(f"temperature: expected 0 <= low <= high, got {low}, {high}")
        if self.source == "server":
            for name in ("model", "base_url"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name}: needed for source {self.source}")
        if self.source == "responses" and self.responses is None:
            raise ValueError("responses: name a file, a folder or a hub id")
        if self.source == "labels" and self.reasoning:
            raise ValueError("reasoning: source labels draws labels and no reasoning, so set reasoning: false")
        return self

    @field_serializer("base_url")
    def _without_login(self, value: str | None) -> str | None:
        """Leave out a user name and a password in the address, which are never stored."""
        if value is None:
            return None
        return re.sub(r"//[^/?#]*@", "//", value, count=1)

    @field_serializer("extra_body")
    def _without_secrets(self, value: dict[str, Any]) -> dict[str, Any]:
        """Store digests of possible secrets: stage keys change with them, but no file contains them."""
        return dict(redact(value))

    @field_validator("api_key_env")
    @classmethod
    def _is_variable_name(cls, value: str) -> str:
        """Refuse a key in place of the variable's name, without repeating the key in the message."""
        is_name = re.fullmatch(r"[A-Za-z_]\w*", value) is not None
        if not is_name or looks_like_secret(value):
            raise ValueError("expected the name of an environment variable, such as OPENAI_API_KEY, not the key itself")
        return value

    def body_to_send(self) -> dict[str, Any]:
        """Return `extra_body` with every `${NAME}` replaced by the value of the environment variable.

        Raises:
            ValueError: A variable is not set, or the settings are from a run's folder, which stores only digests of
                secrets.
        """
        for place in find_redacted(self.extra_body, "teacher.extra_body"):
            reason = "only a digest of this value is stored in the run's folder"
            request = "write a variable, ${NAME}, in the recipe, or use `catto run`"
            raise ValueError(f"{place}: {reason}: {request}")
        return dict(_expand_all(self.extra_body))

    def response_settings(self) -> dict[str, Any]:
        """Return the settings that determine a response: all except `CONNECTION_FIELDS` and `ROW_FIELDS`."""
        excluded = set(CONNECTION_FIELDS | ROW_FIELDS)
        if self.source == "transformers":
            # Here it is the batch size, on which responses depend: float noise between batch shapes can change a token.
            excluded.remove("concurrency")
        return self.model_dump(mode="json", exclude=excluded)

    def row_settings(self) -> dict[str, Any]:
        """Return the settings that determine the rows: all except `CONNECTION_FIELDS`."""
        return self.model_dump(mode="json", exclude=set(CONNECTION_FIELDS))


class ScratchModel(Settings):
    """A small Qwen3 that is trained from scratch, with a word-level tokenizer."""

    layers: int = Field(default=3, ge=1)
    width: int = Field(default=96, ge=8)
    heads: int = Field(default=4, ge=1)
    intermediate: int = Field(default=256, ge=8)
    positions: int = Field(default=512, ge=16)


class ModelSettings(Settings):
    """The base model: a folder or hub id, or a new one with random weights."""

    path: ExpandedPath | None = None
    scratch: ScratchModel | None = None
    dtype: Literal["float32", "bfloat16"] | None = None  # of the weights; None is float32
    attention: str | None = None  # None: Transformers chooses
    peft: dict[str, Any] | None = None  # keywords of `LoraConfig`; None is full fine-tuning

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("name exactly one of path (a folder or hub id) and scratch")
        if self.scratch is not None and (self.dtype or self.attention):
            raise ValueError("dtype and attention need a path: a model from scratch has its own")
        return self


def is_task_file(place: str | None) -> TypeGuard[str]:
    """Return whether a task is given by a YAML file with its settings.

    >>> is_task_file("mine.yaml"), is_task_file("snli")
    (True, False)
    """
    return place is not None and place.endswith((".yaml", ".yml"))


class TaskSettings(Settings):
    """Where a task's questions come from, and how many are used."""

    data_dir: ExpandedPath | None = None  # a folder with local copies of a benchmark's files
    files: dict[Split, ExpandedPath | list[ExpandedPath]] | None = None
    # Maximum number of questions; None uses the task's own number, or all.
    train: int | None = Field(default=None, ge=1)
    validation: int | None = Field(default=None, ge=1)
    test: int | None = Field(default=None, ge=1)
    # For a user's own questions; `catto.tasks.from_file` describes these settings.
    path: ExpandedPath | None = None  # one file (`files` has one per split), or a YAML file with these settings
    fields: dict[str, str | list[str] | dict[str, str]] | None = None
    answer: Literal["label", "index", "index1", "text", "boolean"] | None = None  # None: the style that fits all rows
    # File with one gold answer per line.
    answers: ExpandedPath | dict[Split, ExpandedPath | list[ExpandedPath]] | None = None
    labels: list[str] | None = None
    # How answers without options are compared. Not part of a stage's key if None.
    grade: Literal["exact", "number", "any-of"] | None = Field(default=None, exclude_if=lambda grade: grade is None)
    tolerance: float | None = Field(default=None, ge=0, lt=1, exclude_if=lambda tolerance: tolerance is None)
    # For the task `witnesses`: the number of options and witnesses, and how reliable witnesses are.
    options: int | None = None
    witnesses: int | None = None
    reliabilities: list[float] | None = None

    @property
    def own(self) -> bool:
        """Whether the questions are a user's own."""
        return self.path is not None or self.fields is not None

    def world_options(self) -> dict[str, Any]:
        """Return the settings of the generated task `witnesses` that are set, as arguments of `generate_questions`."""
        return self.model_dump(include={"options", "witnesses", "reliabilities"}, exclude_none=True)


class TrainerSettings(Settings):
    """How one kind of training runs; None uses the paper's value in METHODS."""

    learning_rates: tuple[Rate, ...] | None = Field(default=None, min_length=1)
    epochs: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    checkpoint_steps: int = Field(default=500, ge=1)
    rows: int | None = Field(default=None, ge=1)  # maximum number of rows or pairs
    trl: dict[str, Any] = Field(default_factory=dict)  # keywords that are passed to the trainer


class PreferenceSettings(TrainerSettings):
    """How preference training runs. The runs are short, so checkpoints are written more often."""

    checkpoint_steps: int = Field(default=100, ge=1)


class LaunchSettings(Settings):
    """How a training run or an evaluation is distributed. No stage key depends on it: only float noise changes."""

    processes: int = Field(default=1, ge=1)  # they share the batch of each step, so its size must be a multiple of this
    # How the model is distributed: ddp, fsdp2, zero2, zero3, or a configuration file of Accelerate.
    config: ExpandedPath = "ddp"


class OutcomeSettings(Settings):
    """The stream of dpo+outcome: responses of the start model to training questions, right or wrong.

    A calibration term is trained on them, next to the preference loss on pairs.

    The target of a question is its gold label, the share of each label among `samples` responses (`votes`), or the mean
    of the two (`mix`).
    """

    questions: int | None = Field(default=None, ge=1)  # None: every training question
    held_out: bool = False  # use questions beyond the task's `train`, which neither SFT nor the pairs have seen
    temperature: float = Field(default=1.0, ge=0)
    rows_per_pair: int = Field(default=2, ge=1)
    score: Literal["log", "brier"] = "log"
    target: Literal["gold", "votes", "mix"] = "gold"
    samples: int = Field(default=8, ge=2, le=MAX_SAMPLES)  # responses per question that vote
    source: Literal["model", "teacher"] = "model"  # teacher: use its responses, if it is the start model itself


class EvaluationSettings(Settings):
    """How models are measured."""

    engine: Literal["transformers", "vllm"] = "transformers"
    # Type of the weights. None: bfloat16 on an accelerator, float32 on a CPU; with vLLM, what it chooses. Not part of a
    # stage's key if None.
    dtype: Literal["float32", "bfloat16"] | None = Field(default=None, exclude_if=lambda dtype: dtype is None)
    max_tokens: int = Field(default=1024, ge=1)
    batch_size: int = Field(default=16, ge=1)
    bins: int = Field(default=20, ge=1, le=MAX_BINS)
    resamples: int = Field(default=1000, ge=10, le=MAX_RESAMPLES)
    unparsed: Literal["fallback", "wrong"] = "fallback"
    # Temperature scaling: rescale the confidence of the greedy answer, or sample the answer at tau.
    decode: Literal["greedy", "sample"] = "greedy"
    # How the sampling temperature of Confidence@k is chosen: on validation questions, or the fitted tau.
    sampling: Literal["validation", "fitted"] = "validation"
    k: Annotated[tuple[Samples, ...], AfterValidator(lambda sizes: tuple(sorted(set(sizes))))] = (4, 8)  # Confidence@k
    # Ask the teacher for pairs of validation questions too, for the held-out preference accuracy. None: yes, unless the
    # teacher is a server, which may cost money.
    preference_pairs: bool | None = None


class Resources(Settings):
    """The resources of a stage on a node of a cluster."""

    cpus: float = Field(default=1, gt=0)
    gpus: float | None = Field(default=None, ge=0)  # None: one per process if the cluster has any
    memory: str | None = Field(default=None, pattern=r"^\d+(\.\d+)? ?[KMGT]B$")  # such as 40GB; None reserves none

    @property
    def bytes(self) -> int:
        """The memory in bytes; 0 if none is reserved."""
        if self.memory is None:
            return 0
        number = float(self.memory[:-2])
        prefix = self.memory[-2]
        power_of_1000 = " KMGT".index(prefix)
        return int(number * 1e3**power_of_1000)


class ClusterResources(Settings):
    """The resources on a cluster of stages that train, of stages that generate with a model, and of all others."""

    train: Resources = Resources()
    predict: Resources = Resources()
    report: Resources = Resources(gpus=0)


def _scores_pairs(method: Method) -> bool:
    """Return whether the outcome term scores the responses of the pairs, since there is no stream of others."""
    return method.calibration == "outcome" and method.stream == "none"


class Recipe(Settings):
    """One experiment: tasks, model, methods, budgets, seeds, teacher, training, evaluation."""

    name: Annotated[str, AfterValidator(partial(checked_name, what="recipe"))]
    tasks: dict[Annotated[str, AfterValidator(partial(checked_name, what="task"))], TaskSettings] = Field(min_length=1)
    train_on: str | None = None  # out of distribution: train on this task, test on the others
    model: ModelSettings
    start: Start = "sft"  # what methods start from: sft, a model that SFT trains first, or base, the given model
    methods: tuple[str, ...] = Field(default=methods_from("sft"), min_length=1)
    budgets: tuple[Budget, ...] = Field(default=BUDGETS, min_length=1)
    small_pairs: int = Field(default=500, ge=1)  # number of pairs in the small budget
    seeds: tuple[Seed, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    lr_choice: Literal["seed", "mean"] = "seed"
    keep: Literal["last", "val_accuracy", "val_nll", "val_ece"] = "val_accuracy"
    context: int = Field(default=2048, ge=16)
    prefix_sharing: bool = True
    teacher: TeacherSettings
    sft: TrainerSettings = TrainerSettings()
    preference: PreferenceSettings = PreferenceSettings()
    rcft: TrainerSettings = TrainerSettings()
    outcome: OutcomeSettings = OutcomeSettings()
    launch: LaunchSettings = LaunchSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    resources: ClusterResources = ClusterResources()

    @property
    def asks_held_out_pairs(self) -> bool:
        """Whether the teacher is asked for pairs of validation questions."""
        setting = self.evaluation.preference_pairs
        if setting is None:
            return self.teacher.source != "server"
        return setting

    @field_validator("tasks", mode="before")
    @classmethod
    def _fill_empty_blocks(cls, value: Any) -> Any:
        """Read `snli:` with nothing after it as the task with its default settings."""
        if not isinstance(value, dict):
            return value
        tasks = {}
        for name, block in value.items():
            tasks[name] = {} if block is None else block
        return tasks

    @model_validator(mode="before")
    @classmethod
    def _fill_in_methods(cls, value: Any) -> Any:
        """If there is no `methods`, compare all methods that the rest of the recipe allows.

        Methods on which `_check_method` would raise an error are left out.
        """
        if not isinstance(value, dict) or "methods" in value:
            return value
        teacher = value.get("teacher")
        outcome = value.get("outcome")
        start: Start = "base" if value.get("start") == "base" else "sft"
        has_reasoning = not (isinstance(teacher, dict) and teacher.get("reasoning") is False)
        needs_votes = isinstance(outcome, dict) and outcome.get("target", "gold") != "gold"
        names = []
        for name in methods_from(start):
            method = METHODS[name]
            lacks_reasoning = method.preference_tokens == "reasoning" and not has_reasoning
            lacks_votes = needs_votes and _scores_pairs(method)
            if not lacks_reasoning and not lacks_votes:
                names.append(name)
        return {**value, "methods": names}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.methods:
            self._check_method(name)
        self._check_duplicates()
        for name, block in self._trainer_blocks().items():
            has_several_rates = len(block.learning_rates or ()) > 1
            if "learning_rate" in block.trl and has_several_rates:
                raise ValueError(f"{name}.trl.learning_rate: would replace each of {name}.learning_rates")
        if self.train_on is not None and self.train_on not in self.tasks:
            raise ValueError(f"train_on: {self.train_on!r} is not among the tasks {', '.join(self.tasks)}")
        self._check_start()
        if self.outcome.held_out:
            self._check_held_out_stream()
        return self

    def _trainer_blocks(self) -> dict[str, TrainerSettings]:
        return {"sft": self.sft, "preference": self.preference, "rcft": self.rcft}

    def _check_method(self, name: str) -> None:
        """Raise ValueError if a method is unknown or does not fit the rest of the recipe."""
        available = ", ".join(methods_from(self.start))
        if not is_known_method(name):
            known = list(METHODS)
            for scaling in SCALINGS:
                known += [method_name + scaling for method_name in METHODS]
            expected = f"{available}, nor one of them with {' or '.join(SCALINGS)}"
            raise ValueError(f"methods: {name!r} is not one of {expected}{did_you_mean(name, known)}")
        method = find_method(name)
        if method.only_from not in (None, self.start):
            alternatives = f"with start: {self.start} there are {available}"
            raise ValueError(f"methods: {name} needs start: {method.only_from}; {alternatives}")
        self._check_trained_from(name, start_of(method, self.start))
        if method.preference_tokens == "reasoning" and not self.teacher.reasoning:
            raise ValueError(f"methods: {name} compares the reasoning of responses, but teacher.reasoning is false")
        if self.outcome.target != "gold" and _scores_pairs(method):
            raise ValueError(f"outcome.target: {name} scores the pairs themselves, which have no votes")

    def _check_trained_from(self, name: str, trained_from: str) -> None:
        """Raise ValueError if a method starts from the model of a method that is not in the recipe.

        The base model is a method only with `start: base`. Otherwise it is the model that SFT trains, and needs no
        entry among the methods.
        """
        if name == "base":  # it is not trained
            return
        starts_from_a_method = trained_from != "base" or self.start == "base"
        if starts_from_a_method and trained_from not in self.methods:
            raise ValueError(f"methods: {name} starts from {trained_from}, which is not among the methods")

    def _check_duplicates(self) -> None:
        """Raise ValueError if a list of methods, budgets, seeds or learning rates has a value twice."""
        lists: dict[str, Sequence[object] | None] = {
            "methods": self.methods,
            "budgets": self.budgets,
            "seeds": self.seeds,
        }
        for name, block in self._trainer_blocks().items():
            lists[f"{name}.learning_rates"] = block.learning_rates
        for name, values in lists.items():
            if values is not None and len(set(values)) < len(values):
                raise ValueError(f"{name}: one value occurs twice in {', '.join(map(str, values))}")

    def _check_held_out_stream(self) -> None:
        """Raise ValueError if no stream of held-out questions can be made for `outcome.held_out`."""
        if self.outcome.questions is None:
            raise ValueError("outcome.held_out: outcome.questions must say how many questions are held out")
        trained_tasks = list(self.tasks) if self.train_on is None else [self.train_on]
        for name in trained_tasks:
            if self.tasks[name].train is None:
                raise ValueError(f"outcome.held_out: set tasks.{name}.train, beyond which questions are held out")
        if not self.teacher.reasoning:  # then right responses are labels alone, and need no teacher
            return
        for name in self.methods:
            if find_method(name).stream == "right":
                raise ValueError(f"outcome.held_out: {name} reads the teacher's traces, which cover only `train`")

    def _check_start(self) -> None:
        """Raise ValueError if the start model, the teacher and the stream of outcome rows do not fit together."""
        teacher = self.teacher
        if self.start == "base" and self.model.path is None:
            raise ValueError("start: base needs model.path: a model from scratch knows nothing before SFT")
        if teacher.source == "transformers" and teacher.model is None and self.start != "base":
            raise ValueError("teacher.model: needed for source transformers (with start: base it is the recipe's own)")
        if self.outcome.source == "teacher":
            self._check_stream_of_teacher()

    def _check_stream_of_teacher(self) -> None:
        """Raise ValueError if the teacher's responses cannot be the stream, for `outcome.source: teacher`."""
        teacher = self.teacher
        outcome = self.outcome
        if self.start != "base":
            raise ValueError("outcome.source: teacher needs start: base, where the teacher can be the start model")
        if teacher.source not in ("server", "transformers", "responses"):
            raise ValueError(f"outcome.source: teacher {teacher.source} is not a model, so it is not the start model")
        if teacher.source == "transformers" and teacher.model not in (None, self.model.path):
            raise ValueError(f"outcome.source: the teacher is {teacher.model}, the start model is {self.model.path}")
        # These settings say how the stream is sampled, but here it is not: the teacher's responses are used.
        for name, default in {"questions": None, "held_out": False, "temperature": 1.0}.items():
            if getattr(outcome, name) != default:
                reason = "with source teacher, the stream is the teacher's responses"
                raise ValueError(f"outcome.{name}: has no effect: {reason}")
        if outcome.target != "gold" and teacher.n < 2:
            raise ValueError("outcome.target: votes need several responses to a question, but teacher.n is 1")

    @property
    def own_teacher(self) -> TeacherSettings:
        """The teacher; with `start: base`, a local one without a model is the recipe's own model."""
        if self.teacher.source == "transformers" and self.teacher.model is None:
            return self.teacher.model_copy(update={"model": self.model.path})
        return self.teacher
