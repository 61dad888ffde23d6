"""A small world for the teacher's tests: questions, and a server that answers by question and sample, with faults."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openai_server import OpenAIServer, Reply, Seen, chat, error, ok

from catto.engines import Engine, Generation, Key, Request
from catto.engines.server import ServerError
from catto.prompts import render_completion
from catto.recipe.settings import TeacherSettings
from catto.records import Option, Question
from catto.teacher import Yield, ask, write_rows
from catto.teacher.responses import GENERATIONS, forget_refusals

LABELS = ("A", "B", "C", "D")
# The last element of each: how often the fault comes before the answer does.
FAULTS: list[tuple[Reply, int]] = [
    (error(429, headers=(("Retry-After", "0.1"),)), 2),
    (error(500), 1),
    (ok(chat("x"), cut=True), 1),
    (ok('{"choices": [{'), 1),
    (ok({"model": "m", "choices": []}), 1),
    (ok({"model": "m", "choices": [{"message": {"role": "assistant"}}]}), 1),
]


def questions(count: int) -> list[Question]:
    options = tuple(Option(label=label, text=f"choice {label.lower() * 3}") for label in LABELS)
    return [
        Question(
            id=f"q{i}",
            task="mmlu",
            split="train",
            fields={"question": f"Question number {i}?"},
            options=options,
            gold=LABELS[i % 4],
        )
        for i in range(count)
    ]


def teach(
    questions: Iterable[Question],
    source: Engine | None,
    settings: TeacherSettings,
    out: Path,
    *more: Any,
    retry_refused: bool = False,
) -> Yield:
    """Ask for the responses and write the rows made of them, all in one folder."""
    asked = list(questions)
    if retry_refused:
        forget_refusals(out)
    ask(asked, source, settings, out, *more)
    return write_rows(asked, settings, out / GENERATIONS, out)


def server_settings(url: str, **more: object) -> TeacherSettings:
    given: dict[str, object] = {"source": "server", "model": "m", "base_url": url, "n": 6, "max_tokens": 64}
    given |= {"concurrency": 8, "retries": 5}
    return TeacherSettings(**{**given, **more})  # type: ignore[arg-type]


def answer(body: dict[str, object]) -> str:
    """The teacher's text, by question and sample (through the seed): right, wrong, or without a label."""
    prompt = json.dumps(body["messages"])
    number = re.search(r"number (\d+)", prompt)
    assert number is not None
    digest = int(hashlib.sha256(f"{number[1]} {body['seed']}".encode()).hexdigest()[:8], 16)
    label = [*LABELS, "none of them"][digest % 5]
    return f"<think>\nQuestion {number[1]} with seed {body['seed']}.\n</think>\n<answer>\n{label}\n</answer>"


def calm(seen: Seen) -> Reply:
    return ok(chat(answer(seen.body)))


def stormy(seen: Seen) -> Reply:
    """Slow, and for every fourth seed one of the faults first."""
    seed = int(seen.body["seed"])
    fault, times = FAULTS[seed // 4 % len(FAULTS)]
    if seed % 4 == 0 and seen.attempt < times:
        return fault
    return calm(seen)._replace(delay=0.03 + seed % 5 / 50)


def faults_of(seeds: list[int]) -> int:
    """How many faults a stormy server hands out for these seeds, each asked to the end once."""
    return sum(FAULTS[seed // 4 % len(FAULTS)][1] for seed in seeds if seed % 4 == 0)


def serve(respond: object = calm) -> OpenAIServer:
    return OpenAIServer(respond)  # type: ignore[arg-type]


class Scripted:
    """A teacher that gives the labels it was told, question by question; None is a text without a label."""

    name = model = "scripted"

    def __init__(self, labels: dict[str, list[str | None]], fail_after: int | None = None) -> None:
        self.labels, self.fail_after, self.asked = labels, fail_after, 0

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        for request in requests:
            if request.key not in done:
                if self.asked == self.fail_after:
                    raise ServerError("gone")
                self.asked += 1
                label = self.labels[request.question][request.sample]
                text = render_completion("r", label) if label else "I cannot say."
                yield Generation(
                    question=request.question, sample=request.sample, text=text, model="scripted", tokens=3
                )


def scripted(*labels: str) -> Scripted:
    """One string a question, a letter a sample; '-' has no label."""
    return Scripted({f"q{i}": [None if x == "-" else x for x in row] for i, row in enumerate(labels)})


def run(tmp_path: Path, *labels: str, **more: object) -> tuple[Path, Yield]:
    given_settings = TeacherSettings(**{"n": len(labels[0]), **more})  # type: ignore[arg-type]
    return tmp_path, teach(questions(len(labels)), scripted(*labels), given_settings, tmp_path)


if __name__ == "__main__":
    out, url, count = sys.argv[1:]
    teach(questions(int(count)), None, server_settings(url), Path(out))
