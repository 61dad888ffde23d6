"""Count the files and functions of catto that an experiment, a training step, a measurement and a request pass through.

A reader who follows one question from the recipe to the page, one pair through a training step, one answer through
`catto measure`, or one request through the gateway has to visit these. Every function that runs is counted once,
wherever it is called from.

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
from catto.cli import main as command
from serve import MODEL, reply

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
def counted() -> Iterator[set[CodeType]]:
    """Collect the code of every function of the package that is called in the block, in all threads."""
    visited: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            visited.add(code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield visited
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def experiment(folder: Path) -> None:
    recipe = folder / "hops.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    run("run", str(recipe), "--out", str(folder / "run"))


def measurement(folder: Path) -> None:
    rows = [{"confidence": (i % 10) / 10, "correct": i % 3 > 0} for i in range(50)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("measure", str(folder / "answers.jsonl"))


def run(*arguments: str) -> None:
    with suppress(SystemExit):
        command(list(arguments))


def training_step(folder: Path) -> set[CodeType]:
    """Return what runs between the start of the second step and its end; the first builds what is built once."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    words = ["<pad>", "<eos>", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    rows = Dataset.from_list([{"prompt": "a b c", "chosen": " d e f", "rejected": " g h"}] * 6)
    visited: set[CodeType] = set()

    class Second(TrainerCallback):
        """Count from the end of the first step, so that the collator of the second is part of it."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.counting = counted()
                self.visited = self.counting.__enter__()
            elif state.global_step == 2:
                self.counting.__exit__(None, None, None)
                visited.update(self.visited)

    config = catto.CATTOConfig(
        output_dir=str(folder / "out"), max_steps=3, per_device_train_batch_size=2, report_to=[], bf16=False,
        use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    catto.CATTOTrainer(
        model=model,
        ref_model=deepcopy(model),
        args=config,
        train_dataset=rows,
        processing_class=fast,
        callbacks=[Second()],
    ).train()
    return visited


class Upstream(BaseHTTPRequestHandler):
    """A model's server that answers B to everything."""

    def do_POST(self) -> None:
        """Answer one request."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        payload = reply(body)
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def gateway_request(_: Path) -> set[CodeType]:
    """Return what runs for one chat completion; the application is built before."""
    from catto.engines.server import ServerEngine
    from catto.records import Protocol
    from catto.serve.answering import Answerer
    from catto.serve.gateway import Gateway, Limits

    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
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
    waiting = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        if not waiting:
            await asyncio.Event().wait()  # the client stays connected
        return waiting.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    with counted() as visited:
        asyncio.run(app(scope, receive, send))
    upstream.shutdown()
    assert sent[0]["status"] == 200, sent
    return visited


def main() -> None:
    def through(journey: Callable[[Path], None], folder: Path) -> set[CodeType]:
        with counted() as visited:
            journey(folder)
        return visited

    journeys: dict[str, Callable[[Path], set[CodeType]]] = {
        "one question, from recipe to page": lambda folder: through(experiment, folder),
        "one training step": training_step,
        "one `catto measure`": lambda folder: through(measurement, folder),
        "one request to the gateway": gateway_request,
    }
    for name, journey in journeys.items():
        with tempfile.TemporaryDirectory() as folder:
            visited = journey(Path(folder))
        print(f"{name}: {len({code.co_filename for code in visited})} files, {len(visited)} functions", flush=True)


if __name__ == "__main__":
    main()
