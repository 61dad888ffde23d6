"""Count the files and functions of catto that run in an experiment, a training step, a measurement and a request.

To follow one question from the recipe to the page, one pair through a training step, one answer through `catto
measure`, or one request through the gateway, a reader has to visit these files and functions. Every function that runs
is counted once.

    python benchmarks/hops.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import yaml

import catto
from catto.cli import main as run_command
from serve import MODEL, make_completion

PACKAGE = str(Path(catto.__file__).parent)
RECIPE = {
    "name": "hops",
    "tasks": {"witnesses": {"train": 40, "validation": 8, "test": 10}},
    "model": {"scratch": {"layers": 1, "width": 32, "heads": 2, "intermediate": 32}},
    "methods": ["sft", "dpo", "dpo+catto"],
    "budgets": ["matched"],
    "seeds": [0],
    "small_pairs": 12,
    "keep": "last",
    "context": 256,
    "teacher": {"source": "witnesses"},
    "sft": {"learning_rates": [1e-3], "epochs": 1, "batch_size": 8, "rows": 48},
    "preference": {"learning_rates": [1e-4]},
    "evaluation": {"max_tokens": 24, "batch_size": 4, "k": [2], "resamples": 20},
}


@contextmanager
def collect_called_functions() -> Iterator[set[CodeType]]:
    """Collect the code of every function of the package that is called within the block, in all threads."""
    visited: set[CodeType] = set()

    def add_call(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_in_package = code.co_filename.startswith(PACKAGE)
        # Lambdas, comprehensions and modules have names such as <lambda>.
        has_name = not code.co_name.startswith("<")
        if event == "call" and is_in_package and has_name:
            visited.add(code)

    threading.setprofile(add_call)
    sys.setprofile(add_call)
    try:
        yield visited
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def trace_experiment(folder: Path) -> set[CodeType]:
    """Return the functions that run in `catto run`."""
    recipe = folder / "hops.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    return trace_command("run", str(recipe), "--out", str(folder / "run"))


def trace_measurement(folder: Path) -> set[CodeType]:
    """Return the functions that run in `catto measure`."""
    lines = []
    for number in range(50):
        row = {"confidence": (number % 10) / 10, "correct": number % 3 > 0}
        lines.append(json.dumps(row) + "\n")
    answers = folder / "answers.jsonl"
    answers.write_text("".join(lines))
    return trace_command("measure", str(answers))


def trace_command(*arguments: str) -> set[CodeType]:
    """Return the functions that run in a command."""
    with collect_called_functions() as visited, suppress(SystemExit):
        run_command(list(arguments))
    return visited


def trace_training_step(folder: Path) -> set[CodeType]:
    """Return the functions that run in the second training step.

    The first step is not counted, since it also builds what is built only once.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    words = ["<pad>", "<eos>", *"abcdefgh"]
    token_ids = {word: token_id for token_id, word in enumerate(words)}
    word_tokenizer = Tokenizer(models.WordLevel(token_ids, unk_token="<pad>"))
    word_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer, pad_token="<pad>", eos_token="<eos>")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    rows = Dataset.from_list([{"prompt": "a b c", "chosen": " d e f", "rejected": " g h"}] * 6)
    visited: set[CodeType] = set()

    class TraceSecondStep(TrainerCallback):
        """Collects functions from the end of the first step, so that the collator of the second step is included."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.collecting = collect_called_functions()
                self.visited = self.collecting.__enter__()
            elif state.global_step == 2:
                self.collecting.__exit__(None, None, None)
                visited.update(self.visited)

    config = catto.CATTOConfig(
        output_dir=str(folder / "out"),
        max_steps=3,
        per_device_train_batch_size=2,
        report_to=[],
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = catto.CATTOTrainer(
        model=model,
        ref_model=deepcopy(model),
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[TraceSecondStep()],
    )
    trainer.train()
    return visited


class UpstreamHandler(BaseHTTPRequestHandler):
    """Answers B to every request, like the server of a model."""

    def do_POST(self) -> None:
        """Answer one request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        payload = make_completion(body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def trace_gateway_request(_: Path) -> set[CodeType]:
    """Return the functions that run for one chat completion. The application is built before."""
    from catto.engines.server import ServerEngine
    from catto.records import Protocol
    from catto.serve.answering import Answerer
    from catto.serve.gateway import Gateway, Limits

    upstream = ThreadingHTTPServer(("127.0.0.1", 0), UpstreamHandler)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    engine = ServerEngine(f"http://127.0.0.1:{upstream.server_port}/v1", MODEL, top_logprobs=20)
    protocol = Protocol(rule="most confident", k=1, temperature=0.0, fallback="answer")
    answerer = Answerer(engine, engine.make_client(), None, None, "I do not know.")
    app = Gateway(answerer, tuple("ABCD"), protocol, Limits()).make_app()
    question = {"model": MODEL, "messages": [{"role": "user", "content": "Which of four?"}]}
    body = json.dumps(question).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not unread:
            # The client stays connected and sends nothing more, so this waits forever.
            await asyncio.Event().wait()
        return unread.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    with collect_called_functions() as visited:
        asyncio.run(app(scope, receive, send))
    upstream.shutdown()
    assert sent[0]["status"] == 200, sent
    return visited


def main() -> None:
    traces: dict[str, Callable[[Path], set[CodeType]]] = {
        "one question, from recipe to page": trace_experiment,
        "one training step": trace_training_step,
        "one `catto measure`": trace_measurement,
        "one request to the gateway": trace_gateway_request,
    }
    for title, trace in traces.items():
        with tempfile.TemporaryDirectory() as folder:
            visited = trace(Path(folder))
        files = {code.co_filename for code in visited}
        print(f"{title}: {len(files)} files, {len(visited)} functions", flush=True)


if __name__ == "__main__":
    main()
