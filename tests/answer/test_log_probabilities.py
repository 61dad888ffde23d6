"""Log-probabilities that come from outside: what no log-probability can be is refused wherever it is read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command import run, write_lines
from evaluation_world import questions
from openai_server import OpenAIServer, Reply, Seen, chat, counted, ok
from predictions import prediction
from server_cases import engine, refused, request
from test_logs import completion, lm_eval, sample

from catto.answer_columns import read_graded
from catto.calibrate import fit_file
from catto.engines import Generation
from catto.errors import DataError
from catto.formats.columns import ColumnNames
from catto.io.record_files import read_records
from catto.predict import evaluate
from catto.records import Prediction

# As JSON writes them. Python's parser and pydantic's read NaN and Infinity.
IMPOSSIBLE = ["3.0", "1.1e-6", "1e300", "1e999", "Infinity", "NaN", '"-0.5"', "true", f"1{'0' * 400}"]
SPOILED = "SPOILED"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def reply_with(drawn: Any, candidate: Any = -3.0) -> dict[str, Any]:
    """A completion that answers B, with the log-probabilities of B and of its rival A."""
    body = chat("<answer>\nB\n</answer>")
    tops = [{"token": "B", "logprob": drawn}, {"token": "A", "logprob": candidate}]
    tokens = [
        {"token": "<answer>\n", "logprob": 0.0, "top_logprobs": []},
        {"token": "B", "logprob": drawn, "top_logprobs": tops},
        {"token": "\n</answer>", "logprob": 0.0, "top_logprobs": []},
    ]
    body["choices"][0]["logprobs"] = {"content": tokens}
    return body


def spoiled(body: Any, value: str) -> str:
    """The JSON text of a body, with the value in place of the mark."""
    return json.dumps(body).replace(f'"{SPOILED}"', value)


@pytest.mark.parametrize("value", IMPOSSIBLE)
@pytest.mark.parametrize("place", ["drawn", "candidate"])
def test_a_reply_with_an_impossible_log_probability_is_unusable(place: str, value: str) -> None:
    body = reply_with(SPOILED) if place == "drawn" else reply_with(-0.5, SPOILED)
    with OpenAIServer(lambda _: ok(spoiled(body, value))) as server:
        reason = refused(server, max_retries=0, top_logprobs=2)
    assert reason.startswith("unusable reply in try 1: choices.0.logprobs.content.1.")
    assert "logprob: expected a " in reason


@pytest.mark.parametrize(("value", "read"), [(1e-6, 0.0), (1e-7, 0.0), (0.0, 0.0), (-1e-7, -1e-7), (-1e300, -1e300)])
def test_rounding_noise_above_zero_counts_as_zero(value: float, read: float) -> None:
    with OpenAIServer(lambda _: ok(reply_with(value, value))) as server:
        (found,) = engine(server, top_logprobs=2).generate([request()])
    assert isinstance(found, Generation)
    assert found.tops is not None
    assert found.tops[1][1] == {"A": read, "B": read}
    assert found.mean_logprob == pytest.approx(read / 3)


@pytest.mark.parametrize("value", ["null", "-Infinity", "-1e999"])
def test_a_candidate_that_cannot_be_drawn_is_left_out(value: str) -> None:
    with OpenAIServer(lambda _: ok(spoiled(reply_with(-0.5, SPOILED), value))) as server:
        (found,) = engine(server, top_logprobs=2).generate([request()])
    assert isinstance(found, Generation)
    assert found.tops is not None
    assert found.tops[1][1] == {"B": -0.5}


def after_the_probe(value: str) -> Any:
    """An upstream that continues messages and answers well while it is probed; then B has this log-probability."""

    def respond(seen: Seen) -> Reply:
        probing = seen.body["messages"][0]["content"] == "Count."
        body = reply_with(-0.5 if probing else SPOILED)
        body["usage"] = {"prompt_tokens": counted(seen), "completion_tokens": 3}
        return ok(spoiled(body, value))

    return respond


@pytest.mark.parametrize("value", ["3.0", "1e300", '"-0.5"'])
def test_the_evaluation_of_such_a_server_ends_with_one_line(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catto.engines.server.FIRST_DELAY_SECONDS", 0.001)
    where = ["--engine", "server", "--out", str(tmp_path / "eval")]
    with OpenAIServer(after_the_probe(value)) as server:
        options = [*where, "--base-url", server.url, "--task", "witnesses", "--n", "3"]
        done = run(capsys, "eval", "m", *options)
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert "every request was refused" in last
    assert "logprob: expected a number" in last
    assert "Traceback" not in done.err


def test_what_is_stored_can_be_calibrated(tmp_path: Path) -> None:
    """Noise above zero is stored as zero, so that catto reads its own file."""

    def respond(seen: Seen) -> Reply:
        label = "ABCD"[sum(map(ord, seen.body["messages"][-1]["content"])) % 4]
        body = json.dumps(reply_with(1e-6, -9.0)).replace("\\nB\\n", f"\\n{label}\\n")
        return ok(body.replace('"B"', f'"{label}"'))

    out = tmp_path / "predictions.jsonl"
    with OpenAIServer(respond) as server, pytest.warns(UserWarning, match="cannot continue a partial message"):
        evaluate(engine(server, top_logprobs=2), questions(12), out=out)
    stored = list(read_records(out, Prediction))
    assert {one.confidence for one in stored} == {1.0}
    fitted, _ = fit_file(out, "temperature", "confidence", ColumnNames(), "wrong", tmp_path / "tau.json")
    assert fitted.rows == 12


@pytest.mark.parametrize("value", IMPOSSIBLE)
@pytest.mark.parametrize("form", ["openai", "inspect"])
@pytest.mark.parametrize("answered", [True, False])
def test_logs_with_an_impossible_log_probability_are_refused(
    form: str, value: str, answered: bool, tmp_path: Path
) -> None:
    """Also where the reply states no label: then its confidence is the probability of the whole reply."""
    text = "B" if answered else "hm"
    tokens = [{"token": text, "logprob": SPOILED, "top_logprobs": []}]
    record = {**completion(text, tokens), "gold": "B"}
    if form == "inspect":
        record = sample(0, 0.5, "C", "B" if answered else "")
        record["output"]["choices"][0] = completion(text, tokens)["choices"][0]
    path = tmp_path / "log.jsonl"
    path.write_text(spoiled(record, value) + "\n")
    with pytest.raises(DataError, match=r"log\.jsonl row 1: .*logprob: expected a log-probability"):
        read_graded(path, ColumnNames(gold="gold" if form == "openai" else None))


def test_noise_and_huge_numbers_of_logs_are_read(tmp_path: Path) -> None:
    def record(value: str) -> str:
        tokens = [{"token": "B", "logprob": SPOILED, "top_logprobs": []}]
        return spoiled({**completion("B", tokens), "gold": "B"}, value)

    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(record(value) for value in ("1e-6", "-1e300", f"-1{'0' * 400}")) + "\n")
    assert read_graded(path, ColumnNames(gold="gold")).confidence.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [3.0, 1e300, math.inf, math.nan])
def test_log_likelihoods_of_lm_eval_are_at_most_zero(value: float, tmp_path: Path) -> None:
    """The harness writes its numbers as texts, and those of every choice count, not only the best one's."""
    path = write_lines(tmp_path / "samples_x.jsonl", [lm_eval(0, [-1.0, value], 0, 1.0)])
    with pytest.raises(DataError, match="row 1: filtered_resps: expected a log-likelihood"):
        read_graded(path, ColumnNames())


@pytest.mark.parametrize("value", IMPOSSIBLE)
def test_stored_label_log_probabilities_are_checked_when_they_are_read(value: str, tmp_path: Path) -> None:
    row = prediction("q", 0, "A", 0.5).model_copy(update={"label_logprobs": {"A": -0.5, "B": SPOILED}})
    path = tmp_path / "predictions.jsonl"
    path.write_text(spoiled(row.model_dump(warnings=False), value) + "\n")
    with pytest.raises(DataError, match=r"row 1: label_logprobs\.B: expected a "):
        list(read_records(path, Prediction))
    with pytest.raises(DataError, match=r"row 1: label_logprobs\.B: expected a log-probability"):
        fit_file(path, "temperature", "labels", ColumnNames(), "wrong", tmp_path / "tau.json")
