"""`catto report`: write a page that compares models, from files of answers written by any supported tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from catto.cli import console
from catto.cli.console import check_name, refuse, say
from catto.cli.display import Bar
from catto.cli.options import INPUT, OUTPUT, ColumnOptions, expand_options
from catto.cli.run import show_run


@expand_options
def report(
    files: Annotated[
        list[str],
        Argument(metavar="[NAME=]FILE...", help="Answers of each model, in any format that `catto measure` reads."),
    ],
    columns: ColumnOptions,
    baseline: Annotated[
        str | None, Option(help="Name of the model that the others are compared with.", rich_help_panel=INPUT)
    ] = None,
    task: Annotated[str, Option(help="Name of the task, for rows without one.", rich_help_panel=INPUT)] = "answers",
    out: Annotated[Path, Option(help="Folder for report.html, tables and figures.", rich_help_panel=OUTPUT)] = Path(
        "report"
    ),
) -> None:
    """Compare models on one page, given one file of answers per model.

    Each file contains one answer per question. The name of a model is NAME; by default it is the name of the file, or
    of its folder if several files have the same name.

    Examples:
    catto report sft.jsonl dpo.jsonl --baseline dpo --out page
    catto report before=eval-1/predictions.jsonl after=eval-2/predictions.jsonl --baseline before
    catto report a.csv b.csv --confidence p --prediction answer --gold truth --question item
    """
    from catto.report.build import build_report, results_of_files

    models = _name_models(files)
    if baseline is not None:
        check_name("--baseline", baseline, models)
    console.require_writable_folder("--out", out)
    with console.refuse_errors(), show_run() as shown:
        results = results_of_files(
            models, columns.column_names(), out, task=task, unparsed=columns.unparsed, baseline=baseline
        )
        bar = Bar(shown, "measuring")
        # `results_of_files` has written the predictions to the folder of the report.
        page = build_report(results, folder=out, out=out, progress=lambda done, total: bar.update(done, total, note=""))
    say(f"Wrote {page}.")


def _name_models(files: Sequence[str]) -> dict[str, Path]:
    """Return the name of each model -> its file; refuse two models with the same name.

    Args:
        files: Values of the form NAME=FILE or FILE. Without a NAME, a model is named after its file or, if several
            files have the same name, after its folder.
    """
    named_files: list[tuple[str, Path]] = []  # the name is empty if none is given
    for text in files:
        name, equals, file_name = text.partition("=")
        is_existing_file = Path(text).exists()  # the name of a file may contain =
        if equals and not is_existing_file:
            named_files.append((name, Path(file_name)))
        else:
            named_files.append(("", Path(text)))
    stems = {path.stem for _, path in named_files}
    has_equal_stems = len(stems) < len(named_files)
    models: dict[str, Path] = {}
    for name, path in named_files:
        default_name = path.absolute().parent.name if has_equal_stems else path.stem
        model_name = name or default_name
        if model_name in models:
            refuse(f"two models are named {model_name}: give them different names with NAME=FILE")
        models[model_name] = path
    return models
