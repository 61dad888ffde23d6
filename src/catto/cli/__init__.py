"""The command `catto`: one small module per command, which parses, calls and prints.

To add a command, write `cli/<name>.py` with its function (or its own `typer.Typer` for a group) and add it below. The
lines after `Examples:` in its docstring end its help page.
What loads numpy, torch or YAML is imported inside the functions, so that `catto --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from catto import __version__
from catto.cli import (
    calibrate,
    data,
    doctor,
    evaluate,
    lm_eval,
    measure,
    plan,
    report,
    run,
    select,
    serve,
    teach,
    train,
)
from catto.cli.console import refuse
from catto.errors import DataError
from catto.telemetry import switch_off_telemetry

# A plain traceback: the decorated one would print local variables, and with them whatever a file holds.
app = typer.Typer(name="catto", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)

# The boxes of `catto --help`, with their commands and groups of commands.
Command = Callable[..., None] | typer.Typer
COMMANDS: dict[str, dict[str, Command]] = {
    "Measure": {
        "measure": measure.measure,
        "report": report.report,
        "calibrate": calibrate.app,
        "select": select.select,
    },
    "Evaluate": {"eval": evaluate.evaluate, "lm-eval": lm_eval.lm_eval, "data": data.data},
    "Experiment": {
        "run": run.run,
        "plan": plan.plan,
        "teach": teach.teach,
        "train": train.train,
        "recipe": run.app,
        "verify": run.verify,
        "stage": run.stage,
    },
    "Serve": {"serve": serve.serve},
    "Check the installation": {"doctor": doctor.doctor},
}
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"catto {__version__}")
        raise typer.Exit()


@app.callback()
def catto(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Align language models on preferences and keep their confidence honest.

    Examples:
    catto run quickstart
    catto measure predictions.jsonl --figure reliability.svg
    catto calibrate fit validation.jsonl --method temperature --out tau.json
    catto calibrate apply tau.json test.jsonl --out calibrated.jsonl
    catto doctor
    """


# Typer's class of wrong options, arguments and commands; the module that holds it depends on the version.
UsageError: Any = typer.BadParameter.__mro__[1]


@cache
def _command() -> Callable[..., int | None]:
    """Build the commands from their functions, once per process: it takes longer than most refusals."""
    command = typer.main.get_command(app)
    _complete_help(command)
    return command


# What help pages call the value of an option: by the option's name, or else by its type.
_VALUE_BY_NAME = {
    "data_dir": "DIR",
    "sets": "KEY=VALUE",
    "fields": "NAME=FIELD,...",
    "by": "COLUMN",
    "positive": "LABEL",
}
_VALUE_BY_TYPE: dict[object, str] = {int: "N", float: "X", Path: "PATH", bool: ""}


def _complete_help(command: Any) -> list[str]:
    """Name the values of options, end the help page with its examples, and return the examples.

    A group without examples has those of its commands.
    """
    examples_below = []
    for subcommand in getattr(command, "commands", {}).values():
        examples_below += _complete_help(subcommand)
    for parameter in command.get_params(typer.Context(command)):
        if parameter.metavar is None and parameter.param_type_name == "option":
            parameter.metavar = _name_value(parameter)
    description, _, own_examples = command.help.partition("Examples:\n")
    command.help = _unwrap_paragraphs(description)
    examples = own_examples.splitlines() or examples_below
    lines = ["[bold]Examples[/bold]"]
    for example in examples:
        lines.append(f"  {example}")
    command.epilog = "\n\n".join(lines)
    return examples


def _name_value(option: Any) -> str | None:
    """Return what a help page calls the value of an option; None leaves it to typer."""
    descriptor = getattr(option, "type_descriptor", None)  # missing in older versions of typer
    kind = getattr(descriptor, "annotation", None)
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    if kind not in (int, float, Path, bool, str):
        return None
    if option.name in _VALUE_BY_NAME:
        return _VALUE_BY_NAME[option.name]
    if kind in _VALUE_BY_TYPE:
        return _VALUE_BY_TYPE[kind]
    last_word = str(option.name).rpartition("_")[2]
    return last_word.upper()


def _unwrap_paragraphs(text: str) -> str:
    """Join the lines of each paragraph: the terminal wraps them at its own width."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Bad input gives one line on stderr and exit code 2, anything unexpected a traceback."""
    switch_off_telemetry()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a character that the terminal lacks is escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        given = None if arguments is None else list(arguments)
        sys.exit(_command()(args=given, prog_name="catto", standalone_mode=False) or 0)
    except UsageError as error:
        message = str(error.format_message()).strip().rstrip(".").replace("Value error, ", "")
        if not message:  # a group without a command has printed its help
            sys.exit(2)
        refuse(f"{message}; see {error.ctx.command_path if error.ctx else 'catto'} --help")
    except DataError as error:
        refuse(str(error))
    except OSError as error:
        if error.errno is None:
            raise
        refuse(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror))
