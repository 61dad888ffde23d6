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
from typing import Annotated, Any, NoReturn, get_args, get_origin

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
    """Complete the help pages of a command, or of a group and all its commands.

    Each option gets a placeholder for its value. The lines after `Examples:` move to the end of the page; a group
    without such lines shows the examples of its commands.

    Args:
        command: The command or group of typer, which is changed in place.

    Returns:
        The examples on the help page.
    """
    subcommands = getattr(command, "commands", {})  # only a group has them
    examples_of_subcommands = []
    for subcommand in subcommands.values():
        examples_of_subcommands += _complete_help(subcommand)
    _add_placeholders(command)
    description, _, own_examples = command.help.partition("Examples:\n")
    command.help = _unwrap_paragraphs(description)
    examples = own_examples.splitlines() or examples_of_subcommands
    lines = ["[bold]Examples[/bold]"]
    for example in examples:
        lines.append(f"  {example}")
    command.epilog = "\n\n".join(lines)  # typer would join lines that are separated by a single line break
    return examples


def _add_placeholders(command: Any) -> None:
    """Give every option without a placeholder of its own a placeholder for its value."""
    for parameter in command.get_params(typer.Context(command)):
        is_option = parameter.param_type_name == "option"
        if is_option and parameter.metavar is None:
            parameter.metavar = _choose_placeholder(parameter)


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
        if isinstance(stream, TextIOWrapper):  # a test may replace the streams by objects without `reconfigure`
            stream.reconfigure(errors="backslashreplace")  # escape characters that the terminal cannot encode
    given = None if arguments is None else list(arguments)
    try:
        run_command = _build_command()
        # In its standalone mode, typer would print errors itself. Without it, they reach the handlers below, and the
        # exit code is returned: 130 after Ctrl-C, None if the command returned normally.
        exit_code = run_command(args=given, prog_name="catto", standalone_mode=False)
        sys.exit(exit_code or 0)
    except UsageError as error:
        _refuse_usage(error)
    except DataError as error:
        refuse(str(error))
    except OSError as error:
        if error.errno is None:  # raised by a library and not by the operating system, so not a problem of the input
            raise
        problem = str(error.strerror)
        if error.filename is not None:
            problem = f"{error.filename}: {problem}"
        refuse(problem)


def _refuse_usage(error: Any) -> NoReturn:
    """Refuse wrong options, arguments or commands, in one line that names the help page."""
    message = str(error.format_message()).strip().rstrip(".")
    message = message.replace("Value error, ", "")  # pydantic's prefix of messages from our validators
    if not message:  # a group without a subcommand: its help page is already printed
        sys.exit(2)
    command_path = error.ctx.command_path if error.ctx else "catto"
    refuse(f"{message}; see {command_path} --help")
