"""Options that several commands share, and the dataclasses that group them.

A command takes a group of options as one dataclass and is decorated with `expand_options`:

    @expand_options
    def measure(file: FileArgument, columns: ColumnOptions) -> None: ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from math import isfinite
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer import Option

from catto.formats.columns import ColumnNames, Format
from catto.records import Grade
from catto.tasks import TASKS
from catto.tasks.fields import Style

# Titles of the boxes on a help page.
INPUT = "Input"
MODEL = "Model"
OUTPUT = "Output"
ADVANCED = "Advanced"

# NumPy and PyTorch accept seeds of up to 64 bits; 32 bits are enough.
MOST_SEED = 2**32 - 1


def check_finite(value: float | None) -> float | None:
    """Reject nan and infinity, which pass every range check."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def failure_probability(confidence_level: float) -> float:
    """Return 1 - confidence_level without the rounding error of floats, which would be printed and stored.

    >>> 1.0 - 0.95, failure_probability(0.95)
    (0.050000000000000044, 0.05)
    """
    return round(1.0 - confidence_level, 9)


def list_tasks() -> list[str]:
    """Return the task names that the shell can complete."""
    return list(TASKS)


# Constructors of options: a real number, and a seed.
Real = partial(Option, callback=check_finite)
Seed = partial(Option, min=0, max=MOST_SEED)

SeedOption = Annotated[int, Seed(help="Random seed of the bootstrap.", rich_help_panel=ADVANCED)]
JsonOption = Annotated[bool, Option("--json", help="Print JSON. Rates are between 0 and 1.", rich_help_panel=OUTPUT)]
RiskLevelOption = Annotated[
    float, Real(min=0.5, max=0.9999, help="Confidence level of the risk bound.", rich_help_panel=ADVANCED)
]
EquivalentOption = Annotated[
    str | None,
    Option(
        metavar="COMMAND",
        help="Program that reads pairs of answers as JSON lines and writes true or false for each.",
        rich_help_panel=ADVANCED,
    ),
]
TargetRiskOption = partial(Real, min=0.0001, max=0.9999, help="Highest acceptable error rate.")

Unparsed = Literal["fallback", "wrong"]


# Constructors of options: the name of a column, and a file with an optional split.
Column = partial(Option, metavar="COLUMN", rich_help_panel=INPUT)
SplitFile = partial(Option, metavar="[SPLIT=]FILE")


@dataclass(frozen=True)
class ColumnOptions:
    """Where a file holds confidence and correctness, as given on the command line."""

    confidence: Annotated[str, Column(help="Column with the confidence (0 to 1); a.b means field b of a.")] = (
        "confidence"
    )
    correct: Annotated[str, Column(help="Column that is true if the answer is correct.")] = "correct"
    prediction: Annotated[str | None, Column(help="Column with the answer, compared with --gold.")] = None
    gold: Annotated[str | None, Column(help="Column with the gold answer.")] = None
    question: Annotated[
        str | None, Column(help="Column with the question id.", show_default="question, question_id, ..., id")
    ] = None
    log_format: Annotated[Format, Option("--format", help="Tool that wrote the file.", rich_help_panel=ADVANCED)] = (
        "auto"
    )
    length_normalised: Annotated[
        bool,
        Option(
            "--length-normalised",
            help="For lm-eval logs: divide each log-likelihood by the length of its choice, as acc_norm does.",
            rich_help_panel=ADVANCED,
        ),
    ] = False
    unparsed: Annotated[
        Unparsed,
        Option(
            help="Answers without a readable label: keep the forced label, or count as wrong.", rich_help_panel=ADVANCED
        ),
    ] = "fallback"

    def column_names(self, *, by: str | None = None, positive: str | None = None) -> ColumnNames:
        """Return the names that the readers of files take.

        Args:
            by: Column that splits the file into slices.
            positive: The label of two whose probability the confidence is.
        """
        return ColumnNames(
            confidence=self.confidence,
            correct=self.correct,
            by=by,
            prediction=self.prediction,
            gold=self.gold,
            positive=positive,
            format=self.log_format,
            length_normalised=self.length_normalised,
            question=self.question,
        )

    @property
    def has_default_columns(self) -> bool:
        """Whether `catto measure` reads the same columns without any option."""
        names = (self.confidence, self.correct, self.prediction, self.gold)
        return names == ("confidence", "correct", None, None)


@dataclass(frozen=True)
class QuestionFileOptions:
    """A file with questions of the user's own, as given on the command line."""

    file: Annotated[
        list[str] | None,
        SplitFile(help="Your own questions: .jsonl, .json, .csv, .tsv or .parquet, also .gz.", rich_help_panel=INPUT),
    ] = None
    fields: Annotated[
        str | None,
        Option(
            metavar="NAME=FIELD,...",
            help="Fields of --file, such as question=stem,options=choices,answer=key. Join columns with +.",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    answer: Annotated[
        Style | None,
        Option(help="How --file writes the gold answer.", show_default="detected", rich_help_panel=ADVANCED),
    ] = None
    answers: Annotated[
        list[str] | None, SplitFile(help="File with one gold answer per line.", rich_help_panel=ADVANCED)
    ] = None
    grade: Annotated[
        Grade | None,
        Option(
            help="How answers are compared where --file has no options.",
            show_default="any-of for a list, else exact",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        Real(
            min=0,
            max=0.99,
            help="Largest difference with --grade number, as a share of the gold answer.",
            show_default="0",
            rich_help_panel=ADVANCED,
        ),
    ] = None


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Show the fields of a command's dataclasses to Typer as options of the command itself.

    Args:
        command: A function with parameters that Typer knows, or that are dataclasses of such parameters. No two fields
            or parameters have the same name.

    Returns:
        A function that takes every option by keyword, makes the dataclasses of them and calls the command.
    """
    hints = get_type_hints(command, include_extras=True)
    dataclass_by_parameter: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        annotation = hints[name]
        if is_dataclass(annotation):
            dataclass_by_parameter[name] = annotation
            options += _make_parameters(annotation)
        else:
            options.append(parameter.replace(annotation=annotation, kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(command)
    def expanded(**arguments: Any) -> None:
        for name, options_class in dataclass_by_parameter.items():
            values = {field.name: arguments.pop(field.name) for field in fields(options_class)}
            arguments[name] = options_class(**values)
        command(**arguments)

    # Typer reads parameters and defaults from the signature, and types from the annotations: `wraps` copied those of
    # the command, with its dataclasses.
    expanded.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    return expanded


def _make_parameters(options_class: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters of a function, by keyword only."""
    hints = get_type_hints(options_class, include_extras=True)
    parameters = []
    for field in fields(options_class):
        parameter = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        parameters.append(parameter)
    return parameters
