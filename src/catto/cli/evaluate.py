"""`catto eval`: answer a task's questions with a model and measure how honest its confidence is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from catto.cli import console as completing
from catto.cli.console import MOST_SEED, finite, needs, refuse, say, server_url, writable_folder
from catto.recipe import MOST_SAMPLES

if TYPE_CHECKING:
    from catto.engines import Engine
    from catto.records import Question, Split

__all__ = ["evaluate"]

EXAMPLES = """
[bold]Examples[/bold]

  catto eval runs/dpo --task commonsense_qa --data-dir data --n 500 --out runs/dpo/eval

  catto eval Qwen/Qwen3-4B --task snli --k 8 --temperature 0.8 --out eval

  catto eval my-model --task mmlu --engine server --base-url http://localhost:8000/v1
"""

# A line so often where there is no terminal.
SECONDS_A_LINE = 10.0
EngineName = Literal["transformers", "server", "vllm"]


def evaluate(
    model: Annotated[str, typer.Argument(help="A folder, a hub id, or the server's name for its model.")],
    task: Annotated[str, typer.Option(help="Task whose questions are asked.", autocompletion=completing.tasks)],
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Which questions.")] = "test",
    n: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="How many questions.", show_default="all of the task's")
    ] = None,
    k: Annotated[
        int, typer.Option(min=1, max=MOST_SAMPLES, help="Samples a question; above 1 give a temperature.")
    ] = 1,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=100.0, callback=finite, help="Of the samples; 0 is greedy.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most tokens of a response.")] = 512,
    reasoning: Annotated[bool, typer.Option("--reasoning/--no-reasoning", help="Reason before the answer.")] = True,
    seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the samples.")] = 0,
    split_seed: Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of the splits, 0 to 4.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the data; else the hub.")] = None,
    engine: Annotated[EngineName, typer.Option(help="Who runs the model.")] = "transformers",
    base_url: Annotated[str | None, typer.Option(help="The server's address, ending in /v1.")] = None,
    api_key_env: Annotated[str, typer.Option(help="Environment variable with the server's key.")] = "OPENAI_API_KEY",
    batch_size: Annotated[int, typer.Option(min=1, max=100_000, help="Responses at once.")] = 16,
    deadline: Annotated[
        float,
        typer.Option(min=1.0, max=1e6, callback=finite, help="Server: seconds for a whole reply, with retries."),
    ] = 1800.0,
    max_refused: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="Server: stop above this share of refused questions; 1: never."
        ),
    ] = 0.2,
    retry_refused: Annotated[bool, typer.Option("--retry-refused", help="Ask refused requests again.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for predictions.jsonl; a killed run goes on there.")] = Path("eval"),
) -> None:
    """Answer questions, read the confidence of every answer, and measure how honest it is.

    Writes predictions.jsonl with its manifest and prints what `catto measure` prints of it. Requests that a server
    refuses for good are listed in predictions.refused.jsonl.
    """
    file = out / "predictions.jsonl"
    settings = {"k": k, "temperature": temperature, "seed": seed, "max_tokens": max_tokens, "reasoning": reasoning}
    writable_folder("--out", out)
    _check_engine(engine, model, base_url)
    questions = _questions(task, split, n, split_seed, data_dir)
    refusals = {"retry_refused": retry_refused, "max_refused": max_refused}
    opened = partial(_engine, engine, model, base_url, api_key_env, batch_size, deadline)
    _answer(opened, questions, settings, refusals, file)
    _show(file)


def _answer(
    open_engine: Callable[[], Engine],
    questions: list[Question],
    settings: dict[str, Any],
    refusals: dict[str, Any],
    file: Path,
) -> None:
    from catto.engines.replies import ServerError
    from catto.predict.predictions import check_settings
    from catto.predict.predictor import check_questions
    from catto.predict.predictor import evaluate as run

    try:
        check_questions(questions, settings["k"], settings["temperature"])
        check_settings(file, settings)
        made = open_engine()
        with counting(len(questions) * settings["k"]) as progress:
            run(made, questions, **settings, **refusals, out=file, progress=progress)
    except (ValueError, ServerError, ImportError) as error:
        refuse(str(error))


def _questions(task: str, split: Split, n: int | None, seed: int, data_dir: Path | None) -> list[Question]:
    from catto.tasks import load

    try:
        return list(load(task, split, seed=seed, data_dir=data_dir, limit=n))
    except ValueError as error:
        refuse(str(error))


def _check_engine(name: EngineName, model: str, base_url: str | None) -> None:
    """Tell what is missing for the engine before it is loaded."""
    from catto.engines.places import check_model

    if (base_url is None) == (name == "server"):
        refuse("--engine server needs --base-url, and no other engine takes it")
    if base_url is not None:
        server_url("--base-url", base_url)
        return
    check_model(model)
    if name == "vllm":
        needs("vllm", "vllm", "--engine vllm")
    else:
        needs("torch", "train", "--engine transformers")


def _engine(
    name: EngineName, model: str, base_url: str | None, api_key_env: str, batch_size: int, deadline: float
) -> Engine:
    if name == "server":
        from catto.engines.server import ServerEngine

        return ServerEngine(
            str(base_url),
            model,
            api_key_env=api_key_env,
            concurrency=batch_size,
            deadline=deadline,
            top_logprobs=20,
        )
    if name == "vllm":
        from catto.engines.vllm import VLLMEngine

        return VLLMEngine(model)
    from catto.engines.transformers import TransformersEngine

    return TransformersEngine.load(model, batch_size=batch_size)


def _show(path: Path) -> None:
    """Print the table of `catto measure`, how the answers were read, and what is not in the table."""
    from catto.cli.measure import measure
    from catto.engines.replies import told
    from catto.files import read_manifest
    from catto.predict.predictions import refusals_of

    measure(path)
    counts, refused = read_manifest(path).counts, refusals_of(path)
    plain, forced = counts.get("plain", 0), counts["fallback"]
    tagged = counts["predictions"] - plain - forced
    say(f"Answers: {tagged} after <answer>, {plain} plain (stated without the tag), {forced} forced (fallback).")
    if refused:
        total = counts["predictions"] + len(refused)
        say(f"{len(refused):,} of {total:,} requests were refused and are not in N ({told(refused)}).")
        say("--retry-refused asks them again.")
    if counts.get("other_model"):
        say(f"{counts['other_model']:,} replies came under another model name than was asked for.")
    say(f"Predictions: {path}")


@contextmanager
def counting(total: int) -> Iterator[Callable[[int, int, int], None]]:
    """Yield `progress(done, total, right)`: a bar in a terminal, else a line every ten seconds and at the end."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total)

        def advance(done: int, _: int, right: int) -> None:
            bar.update(task, completed=done, description=f"accuracy {100 * right / done:.1f} %")

        yield advance


def _lines() -> Callable[[int, int, int], None]:
    last = time.monotonic()
    first: tuple[float, int] | None = None  # when the first chunk came, and how many were done by then

    def line(done: int, total: int, right: int) -> None:
        nonlocal last, first
        now = time.monotonic()
        first = first or (now, done)
        if done < total and now - last < SECONDS_A_LINE:
            return
        last = now
        pace = (now - first[0]) / (done - first[1]) if done > first[1] else None
        rest = "" if pace is None or done == total else f", {pace * (total - done):.0f} s left"
        typer.echo(f"{done}/{total}, accuracy {100 * right / done:.1f} %{rest}", err=True)

    return line
