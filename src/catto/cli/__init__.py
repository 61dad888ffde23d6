"""The `catto` command line: one small module per command, which parses options, calls the library and prints.

To add a command, write its function in `cli/<name>.py` (a group of commands has its own `typer.Typer`) and add it to
`COMMANDS`. The lines after `Examples:` in the function's docstring appear at the end of its help page.
Modules that load numpy, torch or YAML are imported inside functions to keep `catto --help` fast.
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

# Tracebacks are plain: typer's own would print local variables, which may contain private data.
app = typer.Typer(name="catto", no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)

# Title of a box on the page of `catto --help` -> its commands and groups of commands.
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
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


# The base class of all typer errors about options, arguments and commands. The module that defines it depends on
# typer's version, so it is found through a subclass that typer exports.
UsageError: Any = typer.BadParameter.__mro__[1]


@cache
def _build_command() -> Callable[..., int | None]:
    """Build the command line from `app`, once per process: this takes longer than most refused commands."""
    command = typer.main.get_command(app)
    _complete_help(command)
    return command


# Placeholder for the value of an option on help pages: by the option's name, otherwise by its type.
_PLACEHOLDER_BY_NAME = {
    "data_dir": "DIR",
    "sets": "KEY=VALUE",
    "fields": "NAME=FIELD,...",
    "by": "COLUMN",
    "positive": "LABEL",
}
_PLACEHOLDER_BY_TYPE: dict[object, str] = {int: "N", float: "X", Path: "PATH", bool: ""}


def _complete_help(command: Any) -> list[str]:
    """Name the values of options, append the examples to the help page, and return the examples.

    A group without examples of its own shows those of its commands.
    """
    examples_below = []
    for subcommand in getattr(command, "commands", {}).values():
        examples_below += _complete_help(subcommand)
    for parameter in command.get_params(typer.Context(command)):
        if parameter.metavar is None and parameter.param_type_name == "option":
            parameter.metavar = _choose_placeholder(parameter)
    description, _, own_examples = command.help.partition("Examples:\n")
    command.help = _unwrap_paragraphs(description)
    examples = own_examples.splitlines() or examples_below
    lines = ["[bold]Examples[/bold]"]
    for example in examples:
        lines.append(f"  {example}")
    command.epilog = "\n\n".join(lines)
    return examples


def _choose_placeholder(option: Any) -> str | None:
    """Return the placeholder for the value of an option, or None to keep typer's own."""
    descriptor = getattr(option, "type_descriptor", None)  # older versions of typer lack it
    kind = getattr(descriptor, "annotation", None)
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    if kind not in (int, float, Path, bool, str):
        return None
    if option.name in _PLACEHOLDER_BY_NAME:
        return _PLACEHOLDER_BY_NAME[option.name]
    if kind in _PLACEHOLDER_BY_TYPE:
        return _PLACEHOLDER_BY_TYPE[kind]
    last_word = str(option.name).rpartition("_")[2]
    return last_word.upper()


def _unwrap_paragraphs(text: str) -> str:
    """Join the lines of each paragraph: the terminal wraps them at its own width."""
    paragraphs = text.strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Bad input prints one line on stderr and exits with code 2; an unexpected error prints a traceback.

    Args:
        arguments: Arguments after `catto`; None reads them from `sys.argv`.
    """
    switch_off_telemetry()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # escape characters that the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    given = None if arguments is None else list(arguments)
    try:
        run_command = _build_command()
        exit_code = run_command(args=given, prog_name="catto", standalone_mode=False)
        sys.exit(exit_code or 0)
    except UsageError as error:
        message = str(error.format_message()).strip().rstrip(".").replace("Value error, ", "")
        if not message:  # a group without a subcommand: its help page is already printed
            sys.exit(2)
        command_path = error.ctx.command_path if error.ctx else "catto"
        refuse(f"{message}; see {command_path} --help")
    except DataError as error:
        refuse(str(error))
    except OSError as error:
        if error.errno is None:
            raise
        if error.filename is None:
            refuse(str(error.strerror))
        refuse(f"{error.filename}: {error.strerror}")
