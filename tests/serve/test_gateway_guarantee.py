"""The promise end to end: witnesses, an overconfident upstream, a calibrator, a threshold, the gateway."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from needs import REASONS

pytest.importorskip("fastapi", reason=REASONS["serve"])

from command import run
from gateway_world import MODEL, ask, gateway, stating
from openai_server import OpenAIServer, Reply, Seen, counted, ok

from catto.calibrate import RiskThreshold, open_fitted
from catto.engines.server import ServerEngine
from catto.io.record_files import read_record
from catto.predict import evaluate
from catto.prompts import render_messages
from catto.records import Question
from catto.tasks import load_questions

pytestmark = pytest.mark.slow

SHARP = 2.0
EACH = 250


def upstream(questions: list[Question]) -> Any:
    """Answer by the true posterior, drawn by the seed, and state probabilities that are too sharp."""
    known = {render_messages(question)[1].content: question.posterior or {} for question in questions}

    def respond(seen: Seen) -> Reply:
        posterior = known.get(seen.body["messages"][-1]["content"], {"A": 0.5, "B": 0.5})
        weights = {label: max(value, 1e-6) ** SHARP for label, value in posterior.items()}
        stated = {label: math.log(value / sum(weights.values())) for label, value in weights.items()}
        draw = random.Random(seen.body["seed"]).choices(list(posterior), list(posterior.values()))[0]
        reply = stating(draw, stated[draw], stated)
        reply["usage"]["prompt_tokens"] = counted(seen)
        return ok(reply)

    return respond


def test_the_error_rate_of_the_answers_is_below_the_promised_risk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The true error rate of an answer is 1 - its posterior, so no luck of the draw is in the number."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    every = list(load_questions("witnesses", "train", limit=3 * EACH))
    fit, held, served = every[:EACH], every[EACH : 2 * EACH], every[2 * EACH :]
    with OpenAIServer(upstream(every)) as server:
        for name, part in (("fit", fit), ("held", held)):
            engine = ServerEngine(server.url, MODEL, top_logprobs=20)
            evaluate(engine, part, temperature=1.0, out=tmp_path / f"{name}.jsonl")
        tau, final, found = (tmp_path / name for name in ("tau.json", "final.jsonl", "threshold.json"))
        run(capsys, "calibrate", "fit", tmp_path / "fit.jsonl", "--on", "labels", "--out", tau)
        rule = ("--k", "1", "--rule", "most confident", "--calibrator", tau)
        refused = run(capsys, "select", tmp_path / "held.jsonl", *rule, "--out", tau)  # the calibrator itself
        assert (refused.code, ".jsonl" in refused.err) == (2, True)
        run(capsys, "select", tmp_path / "held.jsonl", *rule, "--out", final)
        again = run(capsys, "calibrate", "fit", final, "--out", tmp_path / "twice.json")
        assert (again.code, "its confidences are already calibrated" in again.err) == (2, True)
        done = run(capsys, "calibrate", "threshold", final, "--target-risk", "0.2", "--out", found)
        assert (done.code, done.err) == (0, "")
        fitted, limit = open_fitted(tau), read_record(found, RiskThreshold)
        assert 1.6 < getattr(fitted.calibrator, "tau", 0) < 2.5
        with gateway(server, protocol=limit.protocol, fitted=fitted, limit=limit) as url:
            answers = []
            for number, question in enumerate(served):
                turns = [message.model_dump() for message in render_messages(question)]
                options = {option.label: option.text for option in question.options}
                found_here = ask(url, messages=turns, wishes={"options": options}, seed=number).catto
                assert found_here["guarantee"] is not None
                answers.append((question, found_here))
    given = [(question, found_here) for question, found_here in answers if not found_here["abstained"]]
    risk = sum(1 - (question.posterior or {})[found_here["label"]] for question, found_here in given) / len(given)
    assert risk <= 0.2
    assert abs(len(given) / len(answers) - limit.coverage) < 0.12
    forced = sum(1 - (question.posterior or {})[found_here["label"]] for question, found_here in answers) / len(answers)
    assert forced > 0.25  # without abstention the promise would be broken
