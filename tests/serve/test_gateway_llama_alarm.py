"""The life of a promise in front of llama.cpp's own server: fit, threshold, serve, an alarm, and fit again.

SmolLM2 with 135M parameters answers about half of these questions right, so the promised error rate is 80 %.
"""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from command import run, write_lines
from llama_server import free_port, llama, process

from catto.model_calibration import load_calibrator
from catto.prompts import render_messages
from catto.records import Question
from catto.serve.promise import ALARM
from catto.tasks import load_questions
from needs import needs

pytestmark = [pytest.mark.slow, needs("llama"), needs("serve")]

GOOD = ("wonderful", "great", "excellent", "lovely", "perfect", "superb")
BAD = ("terrible", "awful", "boring", "horrible", "poor", "dull")
THINGS = ("film", "book", "meal", "hotel", "song", "game", "trip", "museum", "dinner", "room")
FORMS = ("The {} was {}.", "I found the {} {}.")
RISK = "0.8"
FIT_QUESTIONS = 100
TRUE_FEEDBACK = 12
MOST_WRONG_FEEDBACK = 60
NEW_FEEDBACK = 60


class ServedModel(NamedTuple):
    """A running gateway: its address, its client, and the model's name."""

    url: str
    client: openai.OpenAI
    model: str

    def ask(self, question: Question) -> Any:
        messages: Any = [message.model_dump() for message in render_messages(question, reasoning=False)]
        return self.client.chat.completions.create(model=self.model, messages=messages, max_tokens=64)

    def give_feedback(self, answer_id: str, correct: bool) -> None:
        self.client.post("/feedback", body={"id": answer_id, "correct": correct}, cast_to=object)

    def read_metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            for line in reply.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")


@contextmanager
def serving(upstream: str, task: Path, folder: Path, log: Path) -> Iterator[ServedModel]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ("--upstream", upstream, "--task", str(task), "--calibrator", str(folder), "--log", str(log))
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with process(f"{url}/health", "-m", "catto", "serve", *options, "--port", str(port)), client:
        yield ServedModel(url, client, next(iter(client.models.list())).id)


def write_task(folder: Path) -> Path:
    rows = []
    sides = [*((word, "positive") for word in GOOD), *((word, "negative") for word in BAD)]
    for (word, label), thing, form in itertools.product(sides, THINGS, FORMS):
        rows.append({"text": form.format(thing, word), "sentiment": label})
    write_lines(folder / "reviews.jsonl", rows)
    task = folder / "reviews.yaml"
    question = '"{text}\\nIs this positive or negative?"'
    fields = f"{{question: {question}, options: positive|negative, answer: sentiment}}"
    task.write_text(f"files: {{test: reviews.jsonl}}\nfields: {fields}\n", encoding="utf-8")
    return task


def test_a_promise_from_its_fit_to_its_alarm_and_its_next_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    task, folder, log = write_task(tmp_path), tmp_path / "smollm2", tmp_path / "answers.jsonl"
    folder.mkdir()
    served = list(load_questions(str(task), "test"))[FIT_QUESTIONS:]
    waiting = iter(served)
    with llama() as upstream:
        with openai.OpenAI(base_url=upstream, api_key="none") as client:
            name = next(iter(client.models.list())).id
        options = ("--engine", "server", "--base-url", upstream, "--task", task, "--n", str(FIT_QUESTIONS))
        made = run(capsys, "eval", name, *options, "--no-reasoning", "--max-tokens", "64", "--out", tmp_path / "fit")
        assert made.code == 0, made.err
        fitted = run(
            capsys, "calibrate", "fit", tmp_path / "fit" / "predictions.jsonl", "--model", folder, "--target-risk", RISK
        )
        assert fitted.code == 0, fitted.err
        first = load_calibrator(folder)
        assert first.threshold is not None

        with serving(upstream, task, folder, log) as gateway:
            covered = 0
            for _ in range(TRUE_FEEDBACK):
                question = next(waiting)
                reply = gateway.ask(question)
                covered += reply.catto["guarantee"] is not None and not reply.catto["abstained"]
                gateway.give_feedback(reply.id, reply.catto["label"] == question.gold)
            assert covered > 0
            assert gateway.read_metric("catto_alarm_answers") == covered
            assert gateway.read_metric("catto_alarm") == 0.0

            wrong = 0
            while gateway.read_metric("catto_alarm") == 0.0:
                assert wrong < MOST_WRONG_FEEDBACK
                gateway.give_feedback(gateway.ask(next(waiting)).id, False)
                wrong += 1
            for number in range(NEW_FEEDBACK):
                reply = gateway.ask(next(waiting))
                assert reply.catto["guarantee"] is None
                assert ALARM in reply.catto["reason"]
                gateway.give_feedback(reply.id, number % 2 == 0)

        again = run(capsys, "calibrate", "fit", log, "--model", folder, "--target-risk", RISK)
        assert again.code == 0, again.err
        second = load_calibrator(folder)
        assert second.threshold is not None
        assert (second.fitted.rows, second.threshold.rows) == (NEW_FEEDBACK // 2, NEW_FEEDBACK // 2)
        with serving(upstream, task, folder, log) as gateway:
            assert gateway.read_metric("catto_alarm") == 0.0
            assert gateway.read_metric("catto_alarm_answers") == 0.0
            assert ALARM not in (gateway.ask(served[0]).catto["reason"] or "")
    evidence = [json.loads(line).get("evidence") for line in log.read_text().splitlines()]
    print(f"alarm after {covered} answers as before and {wrong} wrong ones, evidence {max(filter(None, evidence)):.0f}")
