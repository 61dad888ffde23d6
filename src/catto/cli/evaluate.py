"""`catto eval`: answer a task's questions with a model and measure how honest its confidence is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from catto.cli import console
from catto.cli.console import Real, Seed, needs, refuse, refusing, say, writable_folder
from catto.cli.data import AnswerOption, AnswersOption, DataDirOption, FieldsOption, FileOption, source_of
from catto.cli.display import Bar
from catto.cli.measure import measure
from catto.cli.run import running
from catto.engines import Engine, check_hub, check_model, model_name, open_engine, server_address
from catto.engines.replies import ServerError, count_reasons
from catto.io.record_files import read_manifest
from catto.recipe.settings import MOST_SAMPLES
from catto.records import Split
from catto.tasks import load

__all__ = ["evaluate"]

EngineName = Literal["transformers", "server", "vllm"]


def evaluate(
    model: Annotated[str, Argument(help="A folder, a hub id, or the server's name for its model.")],
    task: Annotated[str | None, Option(help="A task, or a YAML file of one.", autocompletion=console.tasks)] = None,
    split: Annotated[Split, Option(help="Which questions.")] = "test",
    n: Annotated[int | None, Option(min=1, max=1_000_000, help="How many questions.", show_default="all")] = None,
    k: Annotated[int, Option(min=1, max=MOST_SAMPLES, help="Samples per question; above 1 give a temperature.")] = 1,
    temperature: Annotated[float, Real(min=0.0, max=100.0, help="Of the samples; 0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, Option(min=1, max=1_000_000, help="Most tokens of a response.")] = 512,
    reasoning: Annotated[bool, Option("--reasoning/--no-reasoning", help="Reason before the answer.")] = True,
    seed: Annotated[int, Seed(help="Seed of the samples.")] = 0,
    split_seed: Annotated[int, Seed(help="Seed of the splits; of benchmarks 0 to 4.")] = 0,
    data_dir: DataDirOption = None,
    file: FileOption = None,
    fields: FieldsOption = None,
    answer: AnswerOption = None,
    answers: AnswersOption = None,
    engine: Annotated[EngineName, Option(help="Who runs the model.")] = "transformers",
    base_url: Annotated[str | None, Option(help="The server's address, ending in /v1.")] = None,
    api_key_env: Annotated[str, Option(help="Environment variable with the server's key.")] = "OPENAI_API_KEY",
    batch_size: Annotated[int | None, Option(min=1, max=100_000, help="Responses at once: 16, with vllm 256.")] = None,
    deadline: Annotated[float, Real(min=1, max=1e6, help="Server: seconds for a reply, with retries.")] = 1800.0,
    max_refused: Annotated[float, Real(min=0, max=1, help="Server: most refused questions, as a share.")] = 0.2,
    retry_refused: Annotated[bool, Option("--retry-refused", help="Ask refused requests again.")] = False,
    out: Annotated[Path, Option(help="Folder for predictions.jsonl; a killed run resumes there.")] = Path("eval"),
) -> None:
    """Answer questions, read the confidence of every answer, and measure how honest it is.

    Writes predictions.jsonl with its manifest and prints what `catto measure` prints of it. Beside it: the picture
    reliability.png, and cards for the Hugging Face hub, model_card.md and, for the predictions, README.md.
    Requests that a server refuses for good are listed in predictions.refused.jsonl.

    Examples:
    catto eval runs/dpo --task commonsense_qa --data-dir data --n 500 --out runs/dpo/eval
    catto eval Qwen/Qwen3-4B --task snli --k 8 --temperature 0.8 --out eval
    catto eval my-model --task mmlu --engine server --base-url http://localhost:8000/v1
    catto eval my-model --file test=mine.jsonl --fields question=stem,options=choices,answer=key
    """
    from catto import predict

    predictions = out / "predictions.jsonl"
    settings = predict.SamplingOptions(
        k=k, temperature=temperature, seed=seed, max_tokens=max_tokens, reasoning=reasoning
    )
    writable_folder("--out", out)
    size = batch_size or (256 if engine == "vllm" else 16)
    load_engine = _loader(engine, model, base_url, api_key_env, size, deadline)
    stored = model_name(model) if engine == "server" else model
    chunk = predict.chunk_size(Engine.batch_size if engine == "server" else size, k)
    expected = {**settings, "engine": engine, "model": stored, "chunk": chunk}
    with refusing(ServerError, ImportError):
        asked = load(source_of(task, file, fields, answer, answers), split, seed=split_seed, data_dir=data_dir, limit=n)
        questions = list(asked)
        predict.check_questions(questions, k, temperature)
        predict.check_settings(predictions, expected)
        with running() as shown:
            bar = Bar(shown, "answering")
            predict.evaluate(
                load_engine(),
                questions,
                out=predictions,
                progress=lambda n, total, right: bar.update(n, total, f"accuracy {100 * right / n:.1f} %"),
                retry_refused=retry_refused,
                max_refused=max_refused,
                **settings,
            )
            bar.print_line()
    for note in asked.report.notes:
        say(f"{asked.report.task}: {note}")
    _show(predictions)


def _loader(
    name: Any, model: str, base_url: str | None, api_key_env: str, batch_size: int, deadline: float
) -> Callable[[], Engine]:
    """Refuse an engine that cannot be loaded; return a function that loads it, once the questions are known."""
    if (base_url is None) == (name == "server"):
        refuse("--engine server needs --base-url, and no other engine takes it")
    if base_url is not None:
        with refusing(place="--base-url: "):
            server_address(base_url)
        from catto.engines.server import ServerEngine

        limits: Any = {"concurrency": batch_size, "api_key_env": api_key_env, "deadline": deadline}
        return partial(ServerEngine, base_url, model, top_logprobs=20, **limits)
    check_model(model)
    needs(*(("vllm", "vllm") if name == "vllm" else ("torch", "train")), f"--engine {name}")

    def load_model() -> Engine:
        check_hub(model)
        return open_engine(name, model, batch_size=batch_size)

    return load_model


def _show(path: Path) -> None:
    """Print the table of `catto measure`, how the answers were read, and what is not in the table."""
    from catto.predict import read_refused_requests
    from catto.report.build import write_cards

    measure(path)
    cards = write_cards(path)
    counts, refused = read_manifest(path).counts, read_refused_requests(path)
    plain, forced = counts.get("plain", 0), counts["fallback"]
    tagged = counts["predictions"] - plain - forced
    say(f"Answers: {tagged} after <answer>, {plain} plain (stated without the tag), {forced} forced (fallback).")
    if refused:
        total = counts["predictions"] + len(refused)
        say(f"{len(refused):,} of {total:,} requests were refused and are not in N ({count_reasons(refused)}).")
        say("--retry-refused asks them again.")
    if counts.get("other_model"):
        say(f"{counts['other_model']:,} replies came under another model name than the one asked for.")
    say(f"Predictions: {path}; beside them {', '.join(cards)}.")
