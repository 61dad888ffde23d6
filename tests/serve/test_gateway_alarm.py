"""The alarm of the gateway: feedback that turns wrong, in /metrics, the log and the replies."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from needs import REASONS

pytest.importorskip("fastapi", reason=REASONS["serve"])

from gateway_world import LABELS, MODEL, ONE, always, ask, gateway, threshold
from openai_server import OpenAIServer

from catto.calibrate import Fitted
from catto.metrics.alarm import ALARM_LIMIT
from catto.metrics.calibrators import Temperature
from catto.serve.promise import ALARM


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def read_metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    numbers = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            numbers[name] = float(value)
    return numbers


def give_feedback(url: str, answer_id: str, correct: bool) -> None:
    data = json.dumps({"id": answer_id, "correct": correct}).encode()
    request = urllib.request.Request(f"{url}/v1/feedback", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert reply.status == 200


def ask_and_grade(url: str, *, correct: bool, count: int, **more: Any) -> Any:
    reply = None
    for _ in range(count):
        reply = ask(url, **more)
        give_feedback(url, reply.id, correct)
    return reply


def test_wrong_answers_raise_the_alarm_and_end_the_guarantee(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "answers.jsonl"
    with OpenAIServer(always("B")) as upstream:
        with gateway(upstream, limit=threshold(0.5), log=log) as url:
            good = ask_and_grade(url, correct=True, count=5)
            assert good.catto["guarantee"] is not None
            before = read_metrics(url)
            assert (before["catto_alarm"], before["catto_alarm_answers"]) == (0.0, 5.0)
            assert before["catto_alarm_evidence"] < 1
            ask_and_grade(url, correct=False, count=10)
            after = read_metrics(url)
            assert after["catto_alarm"] == 1.0
            assert after["catto_alarm_evidence"] >= ALARM_LIMIT
            warnings = [text for text in caplog.messages if text.startswith("ALARM")]
            assert len(warnings) == 1
            assert "of the answers are wrong" in warnings[0]
            withdrawn = ask(url).catto
            assert (withdrawn["guarantee"], withdrawn["reason"]) == (None, ALARM)
            assert withdrawn["confidence"] == good.catto["confidence"]
        with gateway(upstream, limit=threshold(0.5), log=log) as url:  # a restart finds the alarm in the log
            assert read_metrics(url)["catto_alarm"] == 1.0
            assert ask(url).catto["guarantee"] is None
        with gateway(upstream, limit=threshold(0.6), log=log) as url:  # another promise begins without evidence
            numbers = read_metrics(url)
            assert (numbers["catto_alarm"], numbers["catto_alarm_answers"]) == (0.0, 0.0)
            assert ask(url).catto["guarantee"] is not None
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert rows[0]["protocol"] == ONE.model_dump()
    assert [row["evidence"] < ALARM_LIMIT for row in rows[:6]] == [True] * 6
    covered = [row for row in rows if "evidence" in row]
    assert covered[-1]["evidence"] == after["catto_alarm_evidence"]


def test_only_answers_with_the_guarantee_count() -> None:
    """Abstentions and requests that change the protocol are not covered, so their errors are no evidence."""
    with OpenAIServer(always("B", -3.0)) as upstream, gateway(upstream, limit=threshold(0.5)) as url:
        reply = ask_and_grade(url, correct=False, count=3)
        assert reply.catto["abstained"]
        assert read_metrics(url)["catto_alarm_answers"] == 0.0
    with OpenAIServer(always("B")) as upstream, gateway(upstream, limit=threshold(0.5)) as url:
        ask_and_grade(url, correct=False, count=3, temperature=0.5)
        assert read_metrics(url)["catto_alarm_answers"] == 0.0


def test_without_a_threshold_confidences_that_are_too_high_raise_it() -> None:
    """Without a calibrator nothing is promised. A calibrator promises its confidences, up to 5 points."""
    fitted = Fitted(Temperature(tau=1.0), "confidence")
    with OpenAIServer(always("B", -0.05)) as upstream:
        with gateway(upstream) as url:
            ask_and_grade(url, correct=False, count=2)
            assert "catto_alarm" not in read_metrics(url)
        with gateway(upstream, fitted=fitted) as url:
            ask_and_grade(url, correct=True, count=20)
            assert read_metrics(url)["catto_alarm"] == 0.0
            reply = ask_and_grade(url, correct=False, count=12)
            assert read_metrics(url)["catto_alarm"] == 1.0
            assert ALARM in ask(url).catto["reason"]
    assert reply.catto["label"] in LABELS
    assert reply.model == MODEL
