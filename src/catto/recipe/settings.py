"""The recipe: every setting of an experiment, as closed, typed models. An unknown key is an error."""

from __future__ import annotations

import os
import re
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
    Start,
    find_method,
    is_known_method,
    methods_from,
    start_of,
)
from catto.records import Split, checked_name
from catto.redaction import find_redacted, looks_like_secret, redact

# With more bins than this no two answers of any file share one, and a resample takes time for each.
MOST_BINS, MOST_RESAMPLES, MOST_SAMPLES = 10_000, 100_000, 1_024
# Below this many questions bootstrap intervals are too narrow, and a fit follows single rows.
FEW_QUESTIONS = 30


class Settings(BaseModel):
    """A closed, immutable block of settings; a number is finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true where a number is expected: YAML reads `yes` as true, which would count as 1."""
        expected = str(cls.model_fields[info.field_name or ""].annotation)
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, bool) and not re.search(r"\b(bool|Any|str|Literal)\b", expected):
                raise ValueError(f"expected a number, got {str(item).lower()}")
        return value


def expand(path: str) -> str:
    """Replace `${NAME}` and `${NAME:-default}` in a path by the environment variable's value.

    An unset variable without a default is an error: an empty path would silently name another place.

    >>> expand("${CATTO_UNSET_VARIABLE:-models}/smollm2")
    'models/smollm2'
    """

    def value(match: re.Match[str]) -> str:
        setting = os.environ.get(match["name"]) or match["default"]
        if setting is None:
            raise ValueError(f"environment variable {match['name']} is not set, or empty")
        return str(setting)

    return re.sub(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}", value, path)


def _fill_in(value: Any) -> Any:
    """Return a JSON value with the values of environment variables in its texts."""
    if isinstance(value, dict):
        return {name: _fill_in(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_fill_in(item) for item in value]
    return expand(value) if isinstance(value, str) else value


# Paths alone are expanded when a recipe is read: a variable's value in any other field could carry a secret into the
# files of a run.
Place = Annotated[str, AfterValidator(expand)]

Rate = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
# How the teacher is reached and how fast it is asked: no response depends on it.
REACHING = frozenset({"base_url", "api_key_env", "concurrency", "timeout", "deadline", "retries", "max_refused"})
# How rows are picked from responses.
PICKING = frozenset({"pairs_per_question", "min_correct", "min_wrong"})


class ResponseFields(Settings):
    """The columns of an existing dataset of responses. None: the dataset has no such column."""

    question: str | None = "question"  # the question's id
    prompt: str | None = None  # or its text as in the user's message (for word labels, its fields suffice)
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
    """How training questions become responses, and responses rows. Defaults are the paper's where it gives them."""

    source: Literal["server", "transformers", "responses", "labels", "witnesses"] | None = None  # None: given in code
    model: str | None = None  # the server's name for it, or a model folder or hub id
    base_url: str | None = Field(default=None, repr=False)  # https://api.deepseek.com, http://localhost:8000/v1, ...
    api_key_env: str = "OPENAI_API_KEY"  # the variable's name; the key itself is never stored
    # Server-specific, e.g. {thinking: {type: disabled}}. What may be a secret is stored as a digest; `${NAME}` is a
    # variable, filled in when a request is sent.
    extra_body: dict[str, Any] = Field(default_factory=dict, repr=False)
    responses: Place | None = None  # source responses: a file, a folder or a hub id
    fields: ResponseFields = ResponseFields()

    n: int = Field(default=10, ge=1)
    temperature: tuple[float, float] = (0.6, 1.2)
    max_tokens: int = Field(default=1024, ge=1)
    reasoning: bool = True
    seed: int = 0

    concurrency: int = Field(default=16, ge=1)  # requests in flight, or a local model's batch size
    timeout: float = Field(default=600, gt=0)  # seconds without a byte from the server
    deadline: float = Field(default=1800, gt=0)  # seconds for a whole reply, the retries included
    retries: int = Field(default=8, ge=0)
    max_refused: float = Field(default=0.2, ge=0, le=1)  # largest share of questions with refused requests; 1: no limit

    pairs_per_question: int = Field(default=1, ge=1)
    min_correct: int = Field(default=1, ge=1)
    min_wrong: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.temperature
        if not 0 <= low <= high:
            raise ValueError(f"temperature: expected 0 <= low <= high, got {low}, {high}")
        for name in ("model", "base_url") if self.source == "server" else ():
            if getattr(self, name) is None:
                raise ValueError(f"{name}: needed for source {self.source}")
        if self.source == "responses" and self.responses is None:
            raise ValueError("responses: name a file, a folder or a hub id")
        if self.source == "labels" and self.reasoning:
            raise ValueError("reasoning: source labels draws labels and no reasoning, so set reasoning: false")
        return self

    @field_serializer("base_url")
    def _without_login(self, value: str | None) -> str | None:
        """Leave out a user and password in the address: they are used and never stored."""
        return None if value is None else re.sub(r"//[^/?#]*@", "//", value, count=1)

    @field_serializer("extra_body")
    def _without_secrets(self, value: dict[str, Any]) -> dict[str, Any]:
        """Store digests of what may be a secret: keys change with it, and no file holds it."""
        return dict(redact(value))

    @field_validator("api_key_env")
    @classmethod
    def _is_variable_name(cls, value: str) -> str:
        """Refuse the key itself in place of the variable's name; the message does not repeat it."""
        if not re.fullmatch(r"[A-Za-z_]\w*", value) or looks_like_secret(value):
            raise ValueError("expected the name of an environment variable, such as OPENAI_API_KEY, not the key itself")
        return value

    def body_to_send(self) -> dict[str, Any]:
        """Return `extra_body` with the values of environment variables in place of `${NAME}`.

        Raises ValueError where a variable is not set, and where the settings were read from a run's folder, which
        holds a digest in place of a secret.
        """
        for place in find_redacted(self.extra_body, "teacher.extra_body"):
            told = "only a digest of this value is stored in the run's folder"
            raise ValueError(f"{place}: {told}: write ${{NAME}} in the recipe, a variable, or use `catto run`")
        return dict(_fill_in(self.extra_body))

    def asked(self) -> dict[str, Any]:
        """Return what determines a response: all settings but those of `REACHING` and `PICKING`."""
        excluded = set(REACHING | PICKING)
        if self.source == "transformers":  # it is the batch size, and float noise between batch shapes can flip a token
            excluded.remove("concurrency")
        return self.model_dump(mode="json", exclude=excluded)

    def picked(self) -> dict[str, Any]:
        """Return what determines the rows, beside the parser: all settings but those of `REACHING`."""
        return self.model_dump(mode="json", exclude=set(REACHING))


class ScratchModel(Settings):
    """A small Qwen3 that is trained from scratch, with a tokenizer of whole words."""

    layers: int = Field(default=3, ge=1)
    width: int = Field(default=96, ge=8)
    heads: int = Field(default=4, ge=1)
    intermediate: int = Field(default=256, ge=8)
    positions: int = Field(default=512, ge=16)


class ModelSettings(Settings):
    """The base model: a folder or hub id, or a new one with random weights."""

    path: Place | None = None
    scratch: ScratchModel | None = None
    dtype: Literal["float32", "bfloat16"] | None = None  # of the weights; None is float32
    attention: str | None = None  # None: Transformers' choice
    peft: dict[str, Any] | None = None  # a LoraConfig's keywords; None is full fine-tuning

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("name exactly one of path (a folder or hub id) and scratch")
        if self.scratch is not None and (self.dtype or self.attention):
            raise ValueError("dtype and attention go with a path: a model from scratch has its own")
        return self


def is_task_file(place: str | None) -> TypeGuard[str]:
    """Whether a task is given by a YAML file with its settings.

    >>> is_task_file("mine.yaml"), is_task_file("snli")
    (True, False)
    """
    return place is not None and place.endswith((".yaml", ".yml"))


class TaskSettings(Settings):
    """Where a task's questions come from and how many are used. None: the task's own number, or all."""

    data_dir: Place | None = None
    files: dict[Split, Place | list[Place]] | None = None
    train: int | None = Field(default=None, ge=1)
    validation: int | None = Field(default=None, ge=1)
    test: int | None = Field(default=None, ge=1)
    path: Place | None = None  # a user's own file (with `files`, one a split), or a YAML file with these settings
    fields: dict[str, str | list[str] | dict[str, str]] | None = None
    answer: Literal["label", "index", "index1", "text", "boolean"] | None = None  # None: what fits all rows
    answers: Place | dict[Split, Place | list[Place]] | None = None  # a file with one answer a line
    labels: list[str] | None = None
    options: int | None = None  # witnesses: how many options, witnesses, and how reliable they are
    witnesses: int | None = None
    reliabilities: list[float] | None = None

    @property
    def own(self) -> bool:
        """Whether the questions are a user's own."""
        return self.path is not None or self.fields is not None

    def knobs(self) -> dict[str, Any]:
        """Return those settings of the embedded world that are set."""
        return self.model_dump(include={"options", "witnesses", "reliabilities"}, exclude_none=True)


class TrainerSettings(Settings):
    """How a kind of training runs. None: the value in METHODS, the paper's. `trl` goes to the trainer as it is."""

    learning_rates: tuple[Rate, ...] | None = Field(default=None, min_length=1)
    epochs: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    checkpoint_steps: int = Field(default=500, ge=1)
    rows: int | None = Field(default=None, ge=1)  # at most this many rows or pairs
    trl: dict[str, Any] = Field(default_factory=dict)


class PreferenceSettings(TrainerSettings):
    """How preference training runs: with checkpoints more often, since its trainings are short."""

    checkpoint_steps: int = Field(default=100, ge=1)


class LaunchSettings(Settings):
    """How a training or an evaluation is spread. No key depends on it: results differ by float noise at most."""

    processes: int = Field(default=1, ge=1)  # share a training and each step's batch, whose size must be a multiple
    config: Place = "ddp"  # how they hold the model: ddp, fsdp2, zero2, zero3, or a configuration file of Accelerate


class OutcomeSettings(Settings):
    """The third stream of dpo+outcome: responses of the start model to training questions, unfiltered.

    The target of a question is its gold label, the share of each label among `samples` responses (`votes`), or the mean
    of the two (`mix`).
    """

    questions: int | None = Field(default=None, ge=1)  # None: every training question
    held_out: bool = False  # take them from beyond the task's `train`: neither SFT nor the pairs have seen them
    temperature: float = Field(default=1.0, ge=0)
    rows_per_pair: int = Field(default=2, ge=1)
    score: Literal["log", "brier"] = "log"
    target: Literal["gold", "votes", "mix"] = "gold"
    samples: int = Field(default=8, ge=2, le=MOST_SAMPLES)  # of a question, for its votes
    source: Literal["model", "teacher"] = "model"  # teacher: its responses, where it is the start model itself


class EvaluationSettings(Settings):
    """How models are measured."""

    engine: Literal["transformers", "vllm"] = "transformers"
    max_tokens: int = Field(default=1024, ge=1)
    batch_size: int = Field(default=16, ge=1)
    bins: int = Field(default=20, ge=1, le=MOST_BINS)
    resamples: int = Field(default=1000, ge=10, le=MOST_RESAMPLES)
    unparsed: Literal["fallback", "wrong"] = "fallback"
    decode: Literal["greedy", "sample"] = "greedy"  # temperature scaling: rescale the answer, or sample at tau
    sampling: Literal["validation", "fitted"] = "validation"  # temperature of Confidence@k's samples
    k: Annotated[tuple[Samples, ...], AfterValidator(lambda sizes: tuple(sorted(set(sizes))))] = (4, 8)  # Confidence@k
    # Ask the teacher for pairs of validation questions too, for the held-out preference accuracy. None: yes, unless the
    # teacher is a server, which may be paid.
    preference_pairs: bool | None = None


class Resources(Settings):
    """What a stage gets of a cluster's node."""

    cpus: float = Field(default=1, gt=0)
    gpus: float | None = Field(default=None, ge=0)  # None: one for each process if the cluster has any
    memory: str | None = Field(default=None, pattern=r"^\d+(\.\d+)? ?[KMGT]B$")  # 40GB; None: none is reserved

    @property
    def bytes(self) -> int:
        """The memory as a number."""
        if self.memory is None:
            return 0
        return int(float(self.memory[:-2]) * 1e3 ** " KMGT".index(self.memory[-2]))


class ClusterResources(Settings):
    """What stages get on a cluster: those that train, those that generate with a model, all others."""

    train: Resources = Resources()
    predict: Resources = Resources()
    report: Resources = Resources(gpus=0)


class Recipe(Settings):
    """One experiment: tasks, model, methods, budgets, seeds, teacher, training, evaluation."""

    name: Annotated[str, AfterValidator(partial(checked_name, what="recipe"))]
    tasks: dict[Annotated[str, AfterValidator(partial(checked_name, what="task"))], TaskSettings] = Field(min_length=1)
    train_on: str | None = None  # out of distribution: train on this task, test on the others
    model: ModelSettings
    start: Start = "sft"  # what methods start from: a model that SFT trains first, or the given model
    methods: tuple[str, ...] = Field(default=methods_from("sft"), min_length=1)
    budgets: tuple[Budget, ...] = Field(default=BUDGETS, min_length=1)
    small_pairs: int = Field(default=500, ge=1)  # the pairs of the small budget
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
        chosen = self.evaluation.preference_pairs
        if chosen is None:
            return self.teacher.source != "server"
        return chosen

    @field_validator("tasks", mode="before")
    @classmethod
    def _bare_names(cls, value: Any) -> Any:
        """Read `snli:` with nothing after it as the task with its own settings."""
        if not isinstance(value, dict):
            return value
        return {name: {} if block is None else block for name, block in value.items()}

    @model_validator(mode="before")
    @classmethod
    def _every_method(cls, value: Any) -> Any:
        """Without `methods`, compare all that the rest of the recipe allows."""
        if not isinstance(value, dict) or "methods" in value:
            return value
        teacher, outcome = value.get("teacher"), value.get("outcome")
        answers_first = isinstance(teacher, dict) and teacher.get("reasoning") is False
        voted = isinstance(outcome, dict) and outcome.get("target", "gold") != "gold"
        names = []
        for name in methods_from("base" if value.get("start") == "base" else "sft"):
            row = METHODS[name]
            lacks_reasoning = answers_first and row.preference_tokens == "reasoning"
            lacks_votes = voted and row.calibration == "outcome" and row.stream == "none"
            if not lacks_reasoning and not lacks_votes:
                names.append(name)
        return {**value, "methods": names}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.methods:
            if not is_known_method(name):
                close = did_you_mean(name, [*METHODS, *(start + suffix for start in METHODS for suffix in SCALINGS)])
                names = f"{', '.join(methods_from(self.start))}, nor one of them with {' or '.join(SCALINGS)}"
                raise ValueError(f"methods: {name!r} is not one of {names}{close}")
            row = find_method(name)
            if row.only_from not in (None, self.start):
                possible = f"with start: {self.start} there are {', '.join(methods_from(self.start))}"
                raise ValueError(f"methods: {name} needs start: {row.only_from}; {possible}")
            start = start_of(row, self.start)
            starts_from_a_row = start != "base" or (self.start == "base" and name != "base")
            if starts_from_a_row and start not in self.methods:
                raise ValueError(f"methods: {name} starts from {start}, which is not among the methods")
            if row.preference_tokens == "reasoning" and not self.teacher.reasoning:
                raise ValueError(f"methods: {name} prefers by the reasoning, and teacher.reasoning is false")
            if self.outcome.target != "gold" and row.calibration == "outcome" and row.stream == "none":
                raise ValueError(f"outcome.target: {name} scores the pairs themselves, which have no votes")
        blocks: dict[str, TrainerSettings] = {name: getattr(self, name) for name in ("sft", "preference", "rcft")}
        rates = {f"{name}.learning_rates": block.learning_rates for name, block in blocks.items()}
        for name, values in {"methods": self.methods, "budgets": self.budgets, "seeds": self.seeds, **rates}.items():
            if values is not None and len(set(values)) < len(values):
                raise ValueError(f"{name}: one value occurs twice in {', '.join(map(str, values))}")
        for name, block in blocks.items():
            if "learning_rate" in block.trl and len(block.learning_rates or ()) > 1:
                raise ValueError(f"{name}.trl.learning_rate: each of {name}.learning_rates would train at this")
        if self.train_on is not None and self.train_on not in self.tasks:
            raise ValueError(f"train_on: {self.train_on!r} is not among the tasks {', '.join(self.tasks)}")
        self._check_start()
        if self.outcome.held_out:
            if self.outcome.questions is None:
                raise ValueError("outcome.held_out: outcome.questions must say how many questions are held out")
            for name in self.tasks if self.train_on is None else [self.train_on]:
                if self.tasks[name].train is None:
                    raise ValueError(f"outcome.held_out: set tasks.{name}.train, beyond which questions are held out")
            traced = [name for name in self.methods if find_method(name).stream == "right"]
            if traced and self.teacher.reasoning:
                raise ValueError(f"outcome.held_out: {traced[0]} reads the teacher's traces, which cover `train` alone")
        return self

    def _check_start(self) -> None:
        """Raise ValueError where the start model, the teacher and the stream do not go together."""
        teacher, outcome = self.teacher, self.outcome
        if self.start == "base" and self.model.path is None:
            raise ValueError("start: base needs model.path: a model from scratch knows nothing before SFT")
        if teacher.source == "transformers" and teacher.model is None and self.start != "base":
            raise ValueError("teacher.model: needed for source transformers (with start: base it is the recipe's own)")
        if outcome.source != "teacher":
            return
        if self.start != "base":
            raise ValueError("outcome.source: teacher needs start: base, where the teacher can be the start model")
        if teacher.source not in ("server", "transformers", "responses"):
            raise ValueError(f"outcome.source: teacher {teacher.source} is no model, so not the start model")
        if teacher.source == "transformers" and teacher.model not in (None, self.model.path):
            raise ValueError(f"outcome.source: the teacher is {teacher.model}, the start model is {self.model.path}")
        for name, default in {"questions": None, "held_out": False, "temperature": 1.0}.items():
            if getattr(outcome, name) != default:
                told = "with source teacher the stream is what the teacher answered"
                raise ValueError(f"outcome.{name}: not read, {told}")
        if outcome.target != "gold" and teacher.n < 2:
            raise ValueError("outcome.target: votes need several responses to a question, and teacher.n is 1")

    @property
    def own_teacher(self) -> TeacherSettings:
        """The teacher by name: with `start: base`, a local one without a name is the recipe's own model."""
        if self.teacher.source == "transformers" and self.teacher.model is None:
            return self.teacher.model_copy(update={"model": self.model.path})
        return self.teacher
