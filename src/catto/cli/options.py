"""Options shared by several commands, and the dataclasses that group them.

A command receives a group of options as one dataclass if it is decorated with `expand_options`:

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

# Titles of the boxes on help pages.
INPUT = "Input"
MODEL = "Model"
OUTPUT = "Output"
ADVANCED = "Advanced"

# NumPy and PyTorch accept seeds of up to 64 bits; 32 bits are enough.
MAX_SEED = 2**32 - 1


def check_finite(value: float | None) -> float | None:
    """Reject nan and infinity, which typer's range checks accept."""
    if value is not None and not isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def failure_probability(confidence_level: float) -> float:
    """Return 1 - confidence_level, rounded so that no floating-point error is printed or stored.

    >>> 1.0 - 0.95, failure_probability(0.95)
    (0.050000000000000044, 0.05)
    """
    return round(1.0 - confidence_level, 9)


def list_tasks() -> list[str]:
    """Return the names of tasks, for completion by the shell."""
    return list(TASKS)


# Constructors of options: for a finite real number, and for a seed.
Real = partial(Option, callback=check_finite)
Seed = partial(Option, min=0, max=MAX_SEED)

SeedOption = Annotated[int, Seed(help="Random seed of the bootstrap.", rich_help_panel=ADVANCED)]
JsonOption = Annotated[bool, Option("--json", help="Print JSON. Rates are between 0 and 1.", rich_help_panel=OUTPUT)]
RiskLevelOption = Annotated[
    float, Real(min=0.5, max=0.9999, help="Confidence level of the risk bound.", rich_help_panel=ADVANCED)
]
EquivalentOption = Annotated[
    str | None,
    Option(
        metavar="COMMAND",
        help="Program that reads pairs of answers as JSON lines and writes whether they are equivalent: true or false.",
        rich_help_panel=ADVANCED,
    ),
]
TargetRiskOption = partial(Real, min=0.0001, max=0.9999, help="Highest acceptable error rate.")

Unparsed = Literal["fallback", "wrong"]


# Constructors of options: for the name of a column, and for a file with an optional split.
Column = partial(Option, metavar="COLUMN", rich_help_panel=INPUT)
SplitFile = partial(Option, metavar="[SPLIT=]FILE")


@dataclass(frozen=True)
class ColumnOptions:
    """Options that describe the columns of a file of answers."""

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
            help="For answers that could not be parsed: keep the forced label, or count them as wrong.",
            rich_help_panel=ADVANCED,
        ),
    ] = "fallback"

    def column_names(self, *, by: str | None = None, positive: str | None = None) -> ColumnNames:
        """Return the column names for reading a file.

        Args:
            by: Column whose values divide the file into slices; None for no slices.
            positive: With two labels, the one whose probability is in the confidence column. None means that the column
                has the probability of the answer.
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
        """Whether `catto measure` reads these columns without any option."""
        names = (self.confidence, self.correct, self.prediction, self.gold)
        return names == ("confidence", "correct", None, None)


@dataclass(frozen=True)
class QuestionFileOptions:
    """Options that describe a file with the user's own questions."""

    file: Annotated[
        list[str] | None,
        SplitFile(
            help="File with your own questions: .jsonl, .json, .csv, .tsv or .parquet (also .gz).",
            rich_help_panel=INPUT,
        ),
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
        Option(help="Format of the gold answer in --file.", show_default="detected", rich_help_panel=ADVANCED),
    ] = None
    answers: Annotated[
        list[str] | None, SplitFile(help="File with one gold answer per line.", rich_help_panel=ADVANCED)
    ] = None
    grade: Annotated[
        Grade | None,
        Option(
            help="How answers are graded if --file has no answer options.",
            show_default="any-of for a list, else exact",
            rich_help_panel=ADVANCED,
        ),
    ] = None
    tolerance: Annotated[
        float | None,
        Real(
            min=0,
            max=0.99,
            help="Largest relative error that --grade number accepts.",
            show_default="0",
            rich_help_panel=ADVANCED,
        ),
    ] = None


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the dataclasses among a command's parameters into separate options, which typer understands.

    Args:
        command: A function. Each parameter is an option or argument of typer, or a dataclass whose fields are such
            options. No two parameters or fields may have the same name.

    Returns:
        A function that accepts every option by keyword, builds the dataclasses from them and calls the command.
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

    # Typer reads parameters and defaults from the signature, and types from the annotations. `wraps` has copied both
    # from the command, with the dataclasses, so both are replaced.
    expanded.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    expanded.__annotations__ = {option.name: option.annotation for option in options}
    return expanded


def _make_parameters(options_class: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as keyword-only parameters of a function."""
    hints = get_type_hints(options_class, include_extras=True)
    parameters = []
    for field in fields(options_class):
        parameter = inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        parameters.append(parameter)
    return parameters
