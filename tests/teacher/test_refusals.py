"""Requests that a server refuses for good: stored, counted, left out, asked again on demand, too many of them."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from openai_server import OpenAIServer, Reply, Seen, chat, counted, error, ok
from teacher_world import Scripted, calm, questions, scripted, serve, server_settings, teach
from typer.testing import CliRunner

from catto.engines import Generation, Key, Request
from catto.engines.replies import RefusalCap, clean_message, count_reasons
from catto.engines.server import ServerEngine, ServerError
from catto.errors import DataError
from catto.io.record_files import manifest_path, read_manifest, read_records
from catto.io.text_files import MAX_LINE_BYTES
from catto.pipeline.plan import Graph
from catto.pipeline.run import forget_refused, refused_stages
from catto.pipeline.run import run_goals as run_stages
from catto.pipeline.stage import Stage, is_done, stage_dir
from catto.predict import evaluate, read_refused_requests, refused_path
from catto.recipe.settings import Recipe, TeacherSettings
from catto.records import Prediction, Question, Refusal, Response, SftRow
from catto.tasks import Loaded, LoadReport
from catto.teacher import dry_run
from catto.teacher.responses import forget_refusals, refusals

pytestmark = pytest.mark.slow

SIX = ("q0", "q1", "q2", "q3", "q4", "q5")


@pytest.fixture(autouse=True)
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr("catto.engines.server.FIRST_DELAY_SECONDS", 0.01)


def number(seen: Seen) -> int:
    """Which question is asked; -1 for a probe."""
    found = re.search(r"number (\d+)", json.dumps(seen.body["messages"]))
    return int(found[1]) if found else -1


def refusing(*numbers: int, answer: Callable[[Seen], Reply] = calm, reply: Reply | None = None) -> Any:
    return lambda seen: (reply or error(400, "flagged")) if number(seen) in numbers else answer(seen)


# The teacher

REFUSED = {
    "400": error(400, "flagged"),
    "404 of one request": error(404, "no such thing"),
    "413": error(413, "too large"),
    "422": error(422, "bad"),
    "a content filter": ok({"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]}),
    "half of a surrogate pair": ok(json.dumps(chat("X")).replace("X", "\\ud800")),
    "no choices": ok({"choices": []}),
    "500": error(500),
}


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_question_does_not_block_the_teacher(tmp_path: Path, name: str, concurrency: int) -> None:
    """q0 is the first of all: nothing was answered before it."""
    with serve(refusing(0, reply=REFUSED[name])) as server:
        settings = server_settings(server.url, retries=1, concurrency=concurrency, n=2)
        found = teach(questions(6), None, settings, tmp_path)
        asked = len(server.seen)
        assert teach(questions(6), None, settings, tmp_path) == found
        assert len(server.seen) == asked
    assert (found.responses, found.refused, found.answered) == (10, 2, 5)
    assert found.dropped["no responses"] == 1
    assert [one.key for one in read_records(tmp_path / "refused.jsonl", Refusal)] == [("q0", 0), ("q0", 1)]
    assert {one.question for one in read_records(tmp_path / "responses.jsonl", Response)} == set(SIX[1:])
    counts = read_manifest(tmp_path / "responses.jsonl").counts
    assert (counts["responses"], counts["refused"]) == (10, 2)
    assert any(line.startswith("refused and left out: 2 requests (") for line in found.lines())
    assert "q0" not in (tmp_path / "outcome.jsonl").read_text()


def test_without_refusals_there_is_no_file_of_them(tmp_path: Path) -> None:
    with serve() as server:
        assert teach(questions(2), None, server_settings(server.url), tmp_path).refused == 0
    assert not (tmp_path / "refused.jsonl").exists()


def test_refused_requests_are_asked_again_on_demand_and_only_they(tmp_path: Path) -> None:
    """What they give is what an undisturbed run gives, byte for byte."""
    with serve(refusing(1, 3)) as server:
        teach(questions(6), None, server_settings(server.url), tmp_path / "a")
    with serve() as server:
        settings = server_settings(server.url)
        assert dry_run(questions(6), None, settings, tmp_path / "a").requests == 0
        assert dry_run(questions(6), None, settings, tmp_path / "a", retry_refused=True).requests == 12
        found = teach(questions(6), None, settings, tmp_path / "a", retry_refused=True)
        assert sorted({number(seen) for seen in server.seen}) == [1, 3]
        assert len(server.seen) == 12
        whole = teach(questions(6), None, settings, tmp_path / "b")
    assert found.model_copy(update={"examples": ()}) == whole.model_copy(update={"examples": ()})
    assert not (tmp_path / "a" / "refused.jsonl").exists()
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in set(names) - {"generations.jsonl", "responses.jsonl"}:  # which hold times
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_refused_again_they_stay_refused(tmp_path: Path) -> None:
    with serve(refusing(1)) as server:
        first = teach(questions(6), None, server_settings(server.url), tmp_path)
        before = (tmp_path / "responses.jsonl").read_bytes()
        again = teach(questions(6), None, server_settings(server.url), tmp_path, retry_refused=True)
    assert (first.refused, again.refused) == (6, 6)
    assert (tmp_path / "responses.jsonl").read_bytes() == before


def test_a_retry_that_is_killed_goes_on_without_the_flag(tmp_path: Path) -> None:
    with serve(refusing(1, 3)) as server:
        settings = server_settings(server.url)
        teach(questions(6), None, settings, tmp_path)
    forget_refusals(tmp_path)  # what a retry does first
    with serve(refusing(3, reply=error(403, "no money"))) as server, pytest.raises(ServerError):
        teach(questions(6), None, server_settings(server.url, concurrency=1), tmp_path)
    with serve() as server:
        assert teach(questions(6), None, server_settings(server.url), tmp_path).responses == 36
        assert {number(seen) for seen in server.seen} == {3}


@pytest.mark.parametrize("kept", ["generations.manifest.json", "all"])
def test_a_kill_while_refusals_are_forgotten_loses_nothing(tmp_path: Path, kept: str) -> None:
    """The part file is written first; with the manifest still there the folder is as finished as it was."""
    with serve(refusing(1)) as server:
        settings = server_settings(server.url)
        teach(questions(6), None, settings, tmp_path)
        manifests = {path: path.read_bytes() for path in tmp_path.glob("*.manifest.json")}
        forget_refusals(tmp_path)
        for path, content in manifests.items():
            if kept in ("all", path.name):
                path.write_bytes(content)
        asked = len(server.seen)
        assert teach(questions(6), None, settings, tmp_path).refused == 6
        assert len(server.seen) == asked
    with serve() as server:
        assert teach(questions(6), None, server_settings(server.url), tmp_path, retry_refused=True).responses == 36


def test_refusals_survive_a_stop_in_the_part_file(tmp_path: Path) -> None:
    def respond(seen: Seen) -> Reply:
        return error(403, "no money") if number(seen) == 4 else refusing(1)(seen)

    with serve(respond) as server, pytest.raises(ServerError):
        teach(questions(6), None, server_settings(server.url, concurrency=1), tmp_path)
    with serve() as server:
        settings = server_settings(server.url)
        assert dry_run(questions(6), None, settings, tmp_path).refused == 6
        assert dry_run(questions(6), None, settings, tmp_path, retry_refused=True).requests == 18
        assert teach(questions(6), None, settings, tmp_path).refused == 6
        assert {number(seen) for seen in server.seen} == {4, 5}


def test_a_response_too_long_to_be_read_back_is_refused(tmp_path: Path) -> None:
    """16 MB is the longest line that a restart reads."""

    class Long(Scripted):
        def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
            for found in super().generate(requests, done):
                yield found.model_copy(update={"text": "x" * MAX_LINE_BYTES} if found.sample else {})

    teach(questions(1), Long({"q0": ["A", "A"]}), TeacherSettings(n=2), tmp_path)
    assert [one.refused for one in refusals(tmp_path)] == ["the response is longer than 16 MB"]
    assert [one.key for one in read_records(tmp_path / "responses.jsonl", Response)] == [("q0", 0)]


def test_an_unfinished_run_that_stored_nothing_does_not_block_other_settings(tmp_path: Path) -> None:
    with pytest.raises(ServerError):
        teach(questions(2), Scripted({}, fail_after=0), TeacherSettings(n=4), tmp_path)
    assert dry_run(questions(2), None, TeacherSettings(n=3), tmp_path).requests == 6
    assert teach(questions(2), scripted("ABC", "ABC"), TeacherSettings(n=3), tmp_path).responses == 6


def test_an_unfinished_run_that_stored_refusals_alone_does_not_block_other_settings(tmp_path: Path) -> None:
    with serve(refusing(*range(6))) as server, pytest.raises(ServerError, match="all of the first 20 requests"):
        teach(questions(6), None, server_settings(server.url, concurrency=1), tmp_path)
    assert len(refusals(tmp_path)) == 20
    assert len(server.seen) == 20
    with serve() as server:
        assert teach(questions(6), None, server_settings(server.url, model="better"), tmp_path).responses == 36


def test_a_foreign_file_is_never_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "generations.part.jsonl").write_text('{"mine": 1}\n')
    with pytest.raises(DataError, match="has no manifest next to it: move it away"):
        teach(questions(2), scripted("ABC", "ABC"), TeacherSettings(n=3), tmp_path)
    assert (tmp_path / "generations.part.jsonl").read_text() == '{"mine": 1}\n'


def test_too_large_a_share_stops_the_teacher_and_a_larger_limit_lets_it_go_on(tmp_path: Path) -> None:
    """Every third of 30 questions is refused. The share counts from 20 questions on: the next refusal ends it."""
    bad = refusing(*range(0, 30, 3))
    with (
        serve(bad) as server,
        pytest.raises(ServerError, match=r"^8 of 22 questions were refused, max_refused is 0\.2, such as question q"),
    ):
        teach(questions(30), None, server_settings(server.url, n=1, concurrency=1), tmp_path)
    assert len(server.seen) == 22
    with serve(bad) as server:
        found = teach(questions(30), None, server_settings(server.url, n=1, max_refused=1), tmp_path)
    assert (found.responses, found.refused) == (20, 10)


def test_the_samples_of_one_filtered_question_are_one_refusal_of_the_share(tmp_path: Path) -> None:
    """Of the 22 questions one is refused, the last: its 10 samples would be more than a fifth."""
    with serve(refusing(21)) as server:
        assert teach(questions(22), None, server_settings(server.url, n=10), tmp_path).refused == 10


def test_everything_refused_is_an_error_however_little_it_is(tmp_path: Path) -> None:
    with serve(refusing(0, 1)) as server, pytest.raises(ServerError, match=r"^every request was refused .+, such as"):
        teach(questions(2), None, server_settings(server.url, n=1), tmp_path)


def test_replies_under_another_model_name_are_counted_and_said(tmp_path: Path) -> None:
    def respond(seen: Seen) -> Reply:
        reply = json.loads(calm(seen).payload)
        return ok({**reply, "model": "m" if number(seen) else "m-mini"})

    with serve(respond) as server:
        found = teach(questions(4), None, server_settings(server.url), tmp_path)
    assert found.other_models == {"m-mini": 6}
    assert "replies under a different model name than requested: 6 from m-mini" in found.lines()
    assert read_manifest(tmp_path / "responses.jsonl").counts["other_model"] == 6


def test_a_login_in_the_address_is_in_no_file_and_no_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with serve(refusing(1)) as server:
        settings = server_settings(server.url.replace("//", "//me:pw-77@"))
        teach(questions(3), None, settings, tmp_path)
        assert server.seen[0].headers["authorization"].startswith("Basic ")
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 9
    assert not any(b"pw-77" in content for content in files)
    assert "pw-77" not in repr(settings) + settings.model_dump_json() + caplog.text
    assert settings.model_dump()["base_url"] == server.url


# A teacher killed while requests are refused


def slow_and_refusing(seen: Seen) -> Reply:
    return refusing(2, 7, 11)(seen)._replace(delay=0.02)


def test_killed_while_requests_are_refused_it_ends_the_same(tmp_path: Path) -> None:
    chance, out = random.Random(7), tmp_path / "killed"
    part = out / "generations.part.jsonl"
    script = Path(__file__).with_name("teacher_world.py")
    with serve(slow_and_refusing) as server:
        command = [sys.executable, str(script), str(out), server.url, "20"]
        for goal in (15, 60):
            process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            end = time.monotonic() + 60
            while not part.exists() or part.read_bytes().count(b"\n") < goal:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.03))
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
        assert len(server.seen) <= 120 + 2 * 8
        teach(questions(20), None, server_settings(server.url), tmp_path / "calm")
    for name in ("refused.jsonl", "sft.jsonl", "preferences.jsonl", "outcome.jsonl", "responses.manifest.json"):
        assert (out / name).read_bytes() == (tmp_path / "calm" / name).read_bytes(), name


# Evaluation


def held_out(count: int) -> list[Question]:
    return [question.model_copy(update={"split": "test"}) for question in questions(count)]


def answering(seen: Seen) -> Reply:
    """An answer by the question's number with its log-probabilities; a begun message is gone on with."""
    label = "ABCD"[number(seen) % 4]
    texts = [label] if seen.body.get("continue_final_message") else ["<answer>\n", label, "\n</answer>"]
    reply = chat("".join(texts), model="m")
    reply["usage"]["prompt_tokens"] = counted(seen)
    if seen.body.get("logprobs"):
        tops = [{"token": x, "logprob": -0.5 if x == label else -2.5} for x in "ABCD"]
        tokens = [{"token": text, "logprob": -0.5, "top_logprobs": tops} for text in texts]
        reply["choices"][0]["logprobs"] = {"content": tokens}
    return ok(reply)


def evaluated(
    server: OpenAIServer, out: Path | None, count: int = 12, concurrency: int = 1, **more: Any
) -> list[Prediction]:
    settings = {"top_logprobs": 20, "concurrency": concurrency, "max_retries": 0}
    return evaluate(ServerEngine(server.url, "m", **settings), held_out(count), out=out, **more)  # type: ignore[arg-type]


def asked_questions(server: OpenAIServer, since: int = 0) -> list[int]:
    return [number(seen) for seen in server.seen[since:] if number(seen) >= 0]


@pytest.mark.parametrize("name", ["400", "a content filter", "half of a surrogate pair"])
def test_a_refused_question_does_not_block_an_evaluation(tmp_path: Path, name: str) -> None:
    out = tmp_path / "predictions.jsonl"
    with serve(refusing(0, 5, answer=answering, reply=REFUSED[name])) as server:
        found = evaluated(server, out)
        asked = len(server.seen)
        assert evaluated(server, out) == found
        assert len(server.seen) == asked
    assert [one.question for one in found] == [f"q{i}" for i in range(12) if i not in (0, 5)]
    assert list(read_records(out, Prediction)) == found
    assert [one.key for one in read_refused_requests(out)] == [("q0", 0), ("q5", 0)]
    counts = read_manifest(out).counts
    assert (counts["predictions"], counts["refused"], counts["questions"]) == (10, 2, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "predictions.jsonl",
        "predictions.manifest.json",
        "predictions.refused.jsonl",
    ]


def test_an_evaluation_asks_refused_requests_again_on_demand(tmp_path: Path) -> None:
    out, whole = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with serve(refusing(0, 5, answer=answering)) as server:
        evaluated(server, out, k=2, temperature=1.0)
    with serve(refusing(5, answer=answering)) as server:
        found = evaluated(server, out, k=2, temperature=1.0, retry_refused=True)
        assert asked_questions(server) == [0, 0, 5, 5]
    assert len(found) == 22
    assert [one.key for one in read_refused_requests(out)] == [("q5", 0), ("q5", 1)]
    with serve(answering) as server:
        evaluated(server, out, k=2, temperature=1.0, retry_refused=True)
        evaluated(server, whole, k=2, temperature=1.0)
    assert out.read_bytes() == whole.read_bytes()
    assert manifest_path(out).read_bytes() == manifest_path(whole).read_bytes()
    assert not refused_path(out).exists()


def test_an_evaluation_resumes_behind_its_refusals(tmp_path: Path) -> None:
    """What came before the stop is not asked again, refusals neither."""
    out, whole = tmp_path / "a.jsonl", tmp_path / "b.jsonl"

    def respond(seen: Seen) -> Reply:
        return error(403, "no money") if number(seen) == 9 else refusing(0, 5, answer=answering)(seen)

    with serve(respond) as server, pytest.raises(ServerError):
        evaluated(server, out)
    with serve(refusing(0, 5, answer=answering)) as server:
        evaluated(server, out)
        assert asked_questions(server) == [9, 10, 11]
        evaluated(server, whole)
    for path in (lambda x: x, manifest_path, refused_path):
        assert path(out).read_bytes() == path(whole).read_bytes()


def test_what_is_in_flight_when_an_evaluation_stops_is_stored(tmp_path: Path) -> None:
    """Four at once: question 5 stops the run, and the replies to later ones come after that."""
    out, whole = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    stopped = threading.Event()
    later_asked = threading.Event()

    def respond(seen: Seen) -> Reply:
        if number(seen) == 5:
            later_asked.wait(30)
            stopped.set()
            return error(402, "no money")
        if number(seen) > 5:
            later_asked.set()
            stopped.wait(30)
        return answering(seen)._replace(delay=0.2 if number(seen) > 5 else 0.0)

    with serve(respond) as server, pytest.raises(ServerError, match="no money"):
        evaluated(server, out, concurrency=4)
    paid = {number(seen) for seen in server.seen if number(seen) >= 0} - {5}
    assert max(paid) > 5
    stored = {json.loads(line)["question"] for line in (tmp_path / "a.part.jsonl").read_text().splitlines()}
    assert stored == {f"q{n}" for n in paid}
    with serve(answering) as server:
        evaluated(server, out, concurrency=3)
        assert sorted(asked_questions(server)) == sorted({*range(12)} - paid)
        evaluated(server, whole, concurrency=1)
    assert out.read_bytes() == whole.read_bytes()
    assert manifest_path(out).read_bytes() == manifest_path(whole).read_bytes()


def test_replies_that_are_continued_are_stored_one_by_one(tmp_path: Path) -> None:
    """Even questions have no answer and are continued; the run stops at the last of them."""
    out, part = tmp_path / "a.jsonl", tmp_path / "a.part.jsonl"

    def respond(seen: Seen) -> Reply:
        goes_on = seen.body.get("continue_final_message")
        if goes_on and number(seen) == 10:
            assert part.read_text().count("\n") == 10
            return error(402, "no money")
        reply = json.loads(answering(seen).payload)
        if number(seen) >= 0 and number(seen) % 2 == 0 and not goes_on:
            reply["choices"][0] = chat("so")["choices"][0]
        return ok(reply)

    with serve(respond) as server, pytest.raises(ServerError, match="no money"):
        evaluated(server, out)
    stored = [json.loads(line) for line in part.read_text().splitlines()]
    assert [(one["question"], one["source"]) for one in stored] == [
        (f"q{n}", "free" if n % 2 else "fallback") for n in range(10)
    ]


def test_an_evaluation_resumes_with_another_client_and_another_number_of_requests_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.jsonl"
    with serve(refusing(9, answer=answering, reply=error(402))) as server, pytest.raises(ServerError):
        evaluated(server, out)
    monkeypatch.setattr("httpx2.__version__", "99.0")
    with serve(answering) as server:
        assert len(evaluated(server, out, concurrency=40)) == 12
        assert sorted(asked_questions(server)) == [9, 10, 11]


@pytest.mark.parametrize("state", ["before the predictions", "before the manifest", "before the clean-up"])
def test_an_evaluation_killed_between_its_last_files_ends_the_same(tmp_path: Path, state: str) -> None:
    out = tmp_path / "p.jsonl"
    with serve(refusing(0, 5, answer=answering)) as server:
        found = evaluated(server, out, count=6)
        whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        rows: list[Any] = sorted([*found, *read_refused_requests(out)], key=lambda one: one.question)
        manifest_path(tmp_path / "p.part.jsonl").write_bytes(whole["p.manifest.json"])
        (tmp_path / "p.part.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
        if state != "before the clean-up":
            manifest_path(out).unlink()
        if state == "before the predictions":
            out.unlink()
        asked = len(server.seen)
        assert evaluated(server, out, count=6) == found
        assert len(server.seen) == asked
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole


def test_a_response_whose_label_has_no_log_probability_is_refused(tmp_path: Path) -> None:
    def respond(seen: Seen) -> Reply:
        reply = json.loads(answering(seen).payload)
        if number(seen) == 3:
            reply["choices"][0]["logprobs"]["content"][0]["token"] = "something else"
        return ok(reply)

    with serve(respond) as server:
        found = evaluated(server, tmp_path / "p.jsonl")
    assert "q3" not in {one.question for one in found}
    assert "do not add up to the text" in read_refused_requests(tmp_path / "p.jsonl")[0].refused


def test_a_refused_continuation_refuses_its_question_alone(tmp_path: Path) -> None:
    def respond(seen: Seen) -> Reply:
        if number(seen) == 3:
            return error(400, "too long") if seen.body.get("continue_final_message") else ok(unanswered)
        return answering(seen)

    unanswered = chat("so", model="m")
    with serve(respond) as server:
        found = evaluated(server, tmp_path / "p.jsonl")
    assert [one.question for one in found] == [f"q{i}" for i in range(12) if i != 3]
    assert read_refused_requests(tmp_path / "p.jsonl") == [
        Refusal(refused="400 in try 1: too long", question="q3", sample=0)
    ]


@pytest.mark.parametrize("value", ["-Infinity", "null"])
def test_candidates_without_a_number_are_left_out(tmp_path: Path, value: str) -> None:
    """D's log-probability is none: the labels are not all known, the answer is."""

    def respond(seen: Seen) -> Reply:
        text = answering(seen).payload.decode()
        return ok(text.replace('{"token": "D", "logprob": -2.5}', f'{{"token": "D", "logprob": {value}}}'))

    with serve(respond) as server:
        found = evaluated(server, tmp_path / "p.jsonl", count=4)
        assert evaluated(server, tmp_path / "p.jsonl", count=4) == found
    assert [one.label for one in found] == ["A", "B", "C", "D"]
    assert [one.label_logprobs is None for one in found] == [True, True, True, False]


def test_too_large_a_share_stops_an_evaluation(tmp_path: Path) -> None:
    bad = refusing(*range(0, 40, 3), answer=answering)
    with serve(bad) as server, pytest.raises(ServerError, match=r"questions were refused, max_refused is 0\.2"):
        evaluated(server, tmp_path / "p.jsonl", count=40)
    with serve(bad) as server:
        assert len(evaluated(server, tmp_path / "p.jsonl", count=40, max_refused=1.0)) == 26


@pytest.mark.parametrize(("refused", "share"), [(range(36, 40), None), ((0, 1, 2, 3, 20), "5 of 21")])
def test_the_share_of_a_resumed_evaluation_counts_what_was_stored(
    tmp_path: Path, refused: Sequence[int], share: str | None
) -> None:
    """Killed after 20 of 40 questions: 4 of the other 20 may be refused, or one beside 4 that are stored as refused."""

    def respond(seen: Seen) -> Reply:
        return error(403, "no money") if number(seen) == 20 else refusing(*refused, answer=answering)(seen)

    out = tmp_path / "p.jsonl"
    with serve(respond) as server, pytest.raises(ServerError, match="no money"):
        evaluated(server, out, count=40)
    with serve(refusing(*refused, answer=answering)) as server:
        if share is None:
            assert len(evaluated(server, out, count=40, max_refused=0.15)) == 36
        else:
            with pytest.raises(ServerError, match=f"{share} questions were refused"):
                evaluated(server, out, count=40)
        assert min(asked_questions(server)) == 20


def test_an_evaluation_that_is_refused_everything_is_an_error(tmp_path: Path) -> None:
    with (
        serve(refusing(0, 1, 2, answer=answering)) as server,
        pytest.raises(ServerError, match=r"^every request was refused .+, such as question q0 sample 0: 400 in try 1"),
    ):
        evaluated(server, tmp_path / "p.jsonl", count=3)
    assert not (tmp_path / "p.jsonl").exists()


def test_an_evaluation_without_a_file_warns_of_refusals() -> None:
    with (
        serve(refusing(2, answer=answering)) as server,
        pytest.warns(UserWarning, match="1 of 12 requests were refused: 1 x 400 in try 1: flagged"),
    ):
        assert len(evaluated(server, None)) == 11


def test_an_unfinished_evaluation_that_stored_nothing_does_not_block_another(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    with serve(refusing(0, answer=answering, reply=error(403))) as server, pytest.raises(ServerError):
        evaluated(server, out)
    assert manifest_path(tmp_path / "p.part.jsonl").exists()
    with serve(answering) as server:
        assert len(evaluated(server, out, max_tokens=5)) == 12


def test_an_unfinished_evaluation_that_stored_something_does(tmp_path: Path) -> None:
    out = tmp_path / "p.jsonl"
    with serve(refusing(5, answer=answering, reply=error(403))) as server, pytest.raises(ServerError):
        evaluated(server, out)
    before = (tmp_path / "p.part.jsonl").read_bytes()
    with serve(answering) as server, pytest.raises(DataError, match="belongs to other settings"):
        evaluated(server, out, max_tokens=5)
    assert (tmp_path / "p.part.jsonl").read_bytes() == before


def test_a_probe_that_fails_for_another_reason_is_not_taken_for_an_inability(tmp_path: Path) -> None:
    def respond(seen: Seen) -> Reply:
        return error(503, "busy") if seen.body.get("logprobs") else answering(seen)

    with serve(respond) as server, pytest.raises(ServerError, match="503 in try 1: busy"):
        evaluated(server, tmp_path / "p.jsonl")


def test_a_dead_address_ends_an_evaluation_within_five_seconds(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/v1 .*no connection"):
        evaluate(ServerEngine("http://127.0.0.1:9/v1", "m", top_logprobs=20), held_out(4), out=tmp_path / "p.jsonl")
    assert time.monotonic() - started < 5


# Commands


def invoked(command: Any, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_catto_eval_says_what_was_refused_and_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from catto.cli.evaluate import evaluate as command

    monkeypatch.setattr(
        "catto.cli.evaluate.load_questions",
        lambda *_, **__: Loaded(iter(held_out(12)), LoadReport("mmlu", "test", 0, "", "")),
    )
    options = ["m", "--task", "mmlu", "--engine", "server", "--out", str(tmp_path / "eval"), "--batch-size", "2"]
    with serve(refusing(0, 5, answer=answering)) as server:
        shown = invoked(command, *options, "--base-url", server.url)
    assert shown.exit_code == 0, shown.output
    assert "N = 10 answers" in shown.output
    assert "2 of 12 requests were refused and are not in N (2 x 400 in try 1: flagged)." in shown.output
    with serve(answering) as server:
        again = invoked(command, *options, "--base-url", server.url, "--retry-refused")
        assert sorted(asked_questions(server)) == [0, 5]  # two at a time: either may come first
    assert "N = 12 answers" in again.output
    assert "refused" not in again.output


def test_catto_eval_counts_replies_under_another_model_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from catto.cli.evaluate import evaluate as command

    monkeypatch.setattr(
        "catto.cli.evaluate.load_questions",
        lambda *_, **__: Loaded(iter(held_out(4)), LoadReport("mmlu", "test", 0, "", "")),
    )
    options = ["other", "--task", "mmlu", "--engine", "server", "--out", str(tmp_path / "eval")]
    with serve(answering) as server:
        shown = invoked(command, *options, "--base-url", server.url)
    assert "4 replies name a different model from the one requested." in shown.output


def test_catto_select_leaves_questions_with_refused_samples_out(tmp_path: Path) -> None:
    from catto.cli.select import select as command

    def respond(seen: Seen) -> Reply:
        return error(400) if number(seen) == 2 and seen.body["seed"] % 2 else answering(seen)

    out = tmp_path / "p.jsonl"
    with serve(respond) as server:
        found = evaluated(server, out, k=4, temperature=1.0)
    assert 44 < len(found) < 48
    shown = invoked(command, str(out), "--k", "2")
    assert shown.exit_code == 0, shown.output
    assert "N = 11 questions, 4 samples each" in shown.output
    assert "Left out: 1 questions with refused requests." in shown.output


# Parts


def test_reasons_are_counted_and_the_commonest_stands_first() -> None:
    reasons = ["b", "a", "a", "c", "d"]
    refusals = [Refusal(refused=reason, question="q", sample=i) for i, reason in enumerate(reasons)]
    assert count_reasons(refusals) == "2 x a; 1 x b; 1 x c; ..."


def naive(line: str, prompt: str) -> str:
    """Blot out every window of 20 characters that is in the prompt, one by one."""
    starts = {start for start in range(len(line) - 19) if line[start : start + 20] in prompt}
    quoted = [any(start in starts for start in range(at - 19, at + 1)) for at in range(len(line))]
    shown = ""
    for at, character in enumerate(line):
        if not quoted[at]:
            shown += character
        elif at == 0 or not quoted[at - 1]:
            shown += "[prompt]"
    return shown[:300]


def test_quotations_are_those_of_a_window_by_window_search() -> None:
    draws = random.Random(0)
    for _ in range(300):
        prompt = "".join(draws.choices("ab c", k=draws.randint(1, 400))).strip()
        pieces = [prompt[start : start + draws.randint(0, 60)] for start in draws.choices(range(len(prompt) + 1), k=4)]
        noise = ["".join(draws.choices("ab x", k=draws.randint(0, 30))) for _ in range(5)]
        line = "".join(part for pair in zip(noise, [*pieces, ""], strict=True) for part in pair)
        line, prompt = " ".join(line.split()), " ".join(prompt.split())
        assert clean_message(line, [], [prompt]) == naive(line, prompt)


def test_a_prompt_of_a_megabyte_is_searched_quickly() -> None:
    words = random.Random(0).choices(["maximum", "context", "length", "tokens", "is", "the"], k=160_000)
    prompt = " ".join(words)
    said = "the maximum context length is 8192 tokens, " * 6
    started = time.process_time()
    for line in (said, f"{prompt}; was refused", prompt[500_000:] + said):
        assert clean_message(line, [], [prompt])
    assert time.process_time() - started < 0.5
    assert clean_message(f"{prompt}; was refused", [], [prompt]) == "[prompt]; was refused"


def test_one_line_drops_secrets_and_quotations_and_keeps_the_rest() -> None:
    prompt = "Which of these four animals is the heaviest one?"
    assert clean_message(f"bad:\n '{prompt}'\tin k-77", ["k-77"], [prompt]) == "bad: '[prompt]' in [key]"
    assert clean_message("four animals is the", [], [prompt]) == "four animals is the"  # 19 characters
    assert clean_message("four animals is the ", [], [prompt]) == "four animals is the"
    assert len(clean_message("x" * 1000)) == 300
    assert clean_message(f"{prompt} {prompt}", [], [prompt]) == "[prompt] [prompt]"


def test_the_limit_counts_what_was_stored() -> None:
    cap = RefusalCap(0.2, [(f"a{i}", 0) for i in range(16)], [(f"r{i}", 0) for i in range(4)])
    with pytest.raises(ServerError, match="5 of 21 questions"):
        cap.count(Refusal(refused="no", question="new", sample=0))
    RefusalCap(1.0, [], [(f"r{i}", 0) for i in range(40)]).count(Refusal(refused="no", question="new", sample=0))


# An experiment


class Silent:
    """A display that shows nothing."""

    def started(self, stage: Stage, number: int, total: int) -> None: ...
    def progress(self, stage: Stage, finished: int, total: int, note: str) -> None: ...
    def ended(self, stage: Stage, outcome: str, seconds: float) -> None: ...


def world(url: str) -> tuple[Recipe, Stage]:
    """A recipe whose teacher is a server, and the stage of its responses."""
    teacher = {"source": "server", "model": "m", "base_url": url, "n": 2, "retries": 0, "concurrency": 2}
    recipe = Recipe.model_validate(
        {"name": "r", "tasks": {"witnesses": {"train": 6}}, "model": {"scratch": {}}, "teacher": teacher}
    )
    return recipe, Graph(recipe).plan_responses("witnesses")


def first_prompt_refused() -> Callable[[Seen], Reply]:
    """Refuse whichever question is asked first, for good."""
    first: list[str] = []

    def respond(seen: Seen) -> Reply:
        prompt = json.dumps(seen.body["messages"])
        first.extend([prompt] if not first else [])
        return error(400, "flagged") if prompt == first[0] else ok(chat("<answer>\nA\n</answer>", model="m"))

    return respond


def test_a_retried_teacher_makes_again_what_was_made_without_its_new_responses(tmp_path: Path) -> None:
    with serve(first_prompt_refused()) as server:
        recipe, stage = world(server.url)
        rows = Graph(recipe).plan_teacher_rows("witnesses")
        assert not run_stages(tmp_path, [rows], Silent()).failed
    assert [(one.name, len(refused)) for one, refused in refused_stages(tmp_path, [rows])] == [(stage.name, 2)]
    assert len(list(read_records(stage_dir(tmp_path, rows) / "outcome.jsonl", SftRow))) == 10
    with serve(lambda _: ok(chat("<answer>\nA\n</answer>", model="m"))) as server:
        recipe, stage = world(server.url)
        rows = Graph(recipe).plan_teacher_rows("witnesses")
        forget_refused(tmp_path, [rows])
        assert not run_stages(tmp_path, [rows], Silent()).failed
        assert len(server.seen) == 2
    assert is_done(tmp_path, stage)
    assert is_done(tmp_path, rows)
    assert refused_stages(tmp_path, [rows]) == []
    assert len(list(read_records(stage_dir(tmp_path, rows) / "outcome.jsonl", SftRow))) == 12


def test_a_retry_in_vain_leaves_what_was_made_where_it_is(tmp_path: Path) -> None:
    respond = first_prompt_refused()
    with serve(respond) as server:
        recipe, stage = world(server.url)
        rows = Graph(recipe).plan_teacher_rows("witnesses")
        run_stages(tmp_path, [rows], Silent())
        before = (stage_dir(tmp_path, rows) / "done.json").stat()
        forget_refused(tmp_path, [rows])
        outcome = run_stages(tmp_path, [rows], Silent())
        assert [one.name for one in outcome.finished] == [stage.name]
        assert len(server.seen) == 12 + 2
    after = (stage_dir(tmp_path, rows) / "done.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(refused_stages(tmp_path, [rows])[0][1]) == 2


def test_a_finished_stage_tells_what_it_was_made_of(tmp_path: Path) -> None:
    with serve(lambda _: ok(chat("<answer>\nA\n</answer>"))) as server:
        _, stage = world(server.url)
        run_stages(tmp_path, [stage], Silent())
    told = json.loads((stage_dir(tmp_path, stage) / "done.json").read_text())
    assert told["needs"] == {role: need.key for role, need in stage.needs.items()}


def test_catto_teach_says_what_was_refused_and_asks_again(tmp_path: Path) -> None:
    import yaml

    from catto.cli.teach import teach as command

    file = tmp_path / "r.yaml"
    options = [str(file), "--out", str(tmp_path / "run")]
    with serve(first_prompt_refused()) as server:
        file.write_text(yaml.safe_dump(world(server.url)[0].model_dump(mode="json")))
        shown = invoked(command, *options)
        assert shown.exit_code == 0, shown.output
        assert "refused and left out: 2 requests (2 x 400 in try 1: flagged)" in shown.output
        assert "2 requests were refused and are left out; --retry-refused asks again" in shown.stderr
        dry = invoked(command, *options, "--dry-run", "--retry-refused")
        assert "2 requests for 6 questions; 10 responses are stored" in dry.output
    with serve(lambda _: ok(chat("<answer>\nA\n</answer>"))) as server:
        file.write_text(yaml.safe_dump(world(server.url)[0].model_dump(mode="json")))
        again = invoked(command, *options, "--retry-refused")
        assert len(server.seen) == 2
    assert again.exit_code == 0, again.output
    assert "refused" not in again.output
    assert "12 responses to 6 of 6 questions" in again.output
