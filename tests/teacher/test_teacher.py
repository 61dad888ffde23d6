"""From questions to responses to rows: what is asked, kept, counted and refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import pytest
from openai_server import Reply, Seen, error
from teacher_world import (
    LABELS,
    Scripted,
    answer,
    calm,
    questions,
    run,
    scripted,
    serve,
    server_settings,
    stormy,
    teach,
)

from catto.answer.response import ParsedResponse, parse_answer, parse_response
from catto.engines import Generation, Key, Request
from catto.engines.server import ServerError
from catto.errors import DataError
from catto.io import text_files
from catto.io.atomic import hold_lock
from catto.io.record_files import read_manifest, read_records
from catto.prompts import render_messages
from catto.recipe.settings import TeacherSettings
from catto.records import PreferenceRow, Question, Response, SftRow
from catto.teacher import dry_run
from catto.teacher.responses import Requests, draw_sampling
from catto.teacher.sampling import ModelSampling


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


# Sampling


def test_temperatures_are_uniform_in_the_range_and_depend_on_seed_question_and_sample_alone() -> None:
    """4,000 draws from U(0.6, 1.2): mean 0.9 within 4 standard errors (0.6 / sqrt(12) / sqrt(4000) = 0.0027)."""
    drawn = [draw_sampling(TeacherSettings(), f"q{i}", sample) for i in range(400) for sample in range(10)]
    temperatures = [temperature for temperature, _ in drawn]
    assert 0.6 <= min(temperatures) < 0.602
    assert 1.198 < max(temperatures) <= 1.2
    assert abs(sum(temperatures) / 4000 - 0.9) < 4 * 0.0027
    assert len({seed for _, seed in drawn}) > 3990
    assert all(0 <= seed < 2**31 for _, seed in drawn)
    assert draw_sampling(TeacherSettings(), "q1", 2) == draw_sampling(TeacherSettings(n=3, concurrency=1), "q1", 2)
    assert draw_sampling(TeacherSettings(), "q1", 2) != draw_sampling(TeacherSettings(seed=1), "q1", 2)


def test_requests_are_made_on_demand_whenever_they_are_read() -> None:
    requests = Requests(questions(3), TeacherSettings(n=2))
    assert [request.key for request in requests] == [(f"q{i}", s) for i in range(3) for s in range(2)]
    assert list(requests) == list(requests)
    assert next(iter(requests)) is not next(iter(requests))


# Against the server


def test_a_stormy_server_gives_the_same_files_as_a_calm_one(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    with serve(stormy) as server:
        teach(questions(8), None, server_settings(server.url), tmp_path / "a", lambda *at: progress.append(at))
    with serve(calm) as server:
        teach(questions(8), None, server_settings(server.url, concurrency=1), tmp_path / "b")
        assert len(server.seen) == 48
    for name in ("sft", "preferences", "outcome"):
        assert (tmp_path / "a" / f"{name}.jsonl").read_bytes() == (tmp_path / "b" / f"{name}.jsonl").read_bytes()
    a, b = (list(read_records(tmp_path / x / "responses.jsonl", Response)) for x in "ab")
    assert [r.model_copy(update={"seconds": None}) for r in a] == [r.model_copy(update={"seconds": None}) for r in b]
    assert progress == [(i, 48) for i in range(1, 49)]


def test_what_is_asked_is_the_prompt_and_what_is_kept_is_the_answer(tmp_path: Path) -> None:
    with serve() as server:
        given_settings = server_settings(server.url)
        teach(questions(4), None, given_settings, tmp_path)
    bodies = {body["seed"]: body for body in (seen.body for seen in server.seen)}
    found = list(read_records(tmp_path / "responses.jsonl", Response))
    assert [(r.question, r.sample) for r in found] == [(f"q{i}", s) for i in range(4) for s in range(6)]
    for response in found:
        question = questions(4)[int(response.question[1:])]
        body = bodies[response.seed]
        assert (response.temperature, response.seed) == draw_sampling(
            given_settings, response.question, response.sample
        )
        assert body["temperature"] == response.temperature
        assert body["messages"] == [message.model_dump() for message in render_messages(question)]
        assert response.text == answer(body)
        assert response.label == parse_response(response.text, LABELS).label
        assert response.correct == (response.label == question.gold)
        assert response.reasoning == f"Question {response.question[1:]} with seed {response.seed}."
    assert any(r.label is None for r in found)


def test_a_line_that_the_limit_of_tokens_has_cut_is_no_answer(tmp_path: Path) -> None:
    """`A` may be the beginning of "A or B"."""

    class Cut(Scripted):
        def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
            for found in super().generate(requests, done):
                reason = "length" if found.sample else "stop"
                yield found.model_copy(update={"text": "<answer>\nA", "finish_reason": reason})

    teach(questions(1), Cut({"q0": ["A", "A"]}), TeacherSettings(n=2), tmp_path)
    whole, cut = read_records(tmp_path / "responses.jsonl", Response)
    assert (whole.label, whole.correct, cut.label, cut.correct) == ("A", True, None, False)


def test_a_finished_folder_asks_nothing_and_changes_nothing(tmp_path: Path) -> None:
    with serve() as server:
        first = teach(questions(4), None, server_settings(server.url), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json*")}
    asked = (tmp_path / "generations.jsonl").stat()
    # The server is gone: a single request would fail. Another port and another pace are the same recipe.
    again = teach(questions(4), None, server_settings("http://127.0.0.1:9/v1", concurrency=2), tmp_path)
    assert again == first
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json*")} == before
    assert (tmp_path / "generations.jsonl").stat() == asked
    assert len(before) == 10


def test_a_fault_of_all_keeps_what_came_and_the_next_run_asks_for_the_rest(tmp_path: Path) -> None:
    def respond(seen: Seen) -> Reply:
        return error(403, "no money") if "number 2?" in json.dumps(seen.body) else calm(seen)

    with serve(respond) as server, pytest.raises(ServerError, match=r"question q2 sample \d: 403 in try 1"):
        teach(questions(4), None, server_settings(server.url, concurrency=2), tmp_path)
    kept = len((tmp_path / "generations.part.jsonl").read_text().splitlines())
    assert kept >= 12
    with serve() as server:
        assert dry_run(questions(4), None, server_settings(server.url), tmp_path).requests == 24 - kept
        teach(questions(4), None, server_settings(server.url), tmp_path)
        assert len(server.seen) == 24 - kept


def test_the_key_is_in_no_file_log_or_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-sentinel-77")
    caplog.set_level("DEBUG")

    def respond(seen: Seen) -> Reply:
        assert seen.headers["authorization"] == "Bearer sk-sentinel-77"
        return error(401, f"{seen.headers['authorization']}") if "number 3?" in json.dumps(seen.body) else calm(seen)

    with serve(respond) as server, pytest.raises(ServerError, match="variable OPENAI_API_KEY was refused") as caught:
        teach(questions(4), None, server_settings(server.url), tmp_path)
    with serve(calm) as server:
        teach(questions(4), None, server_settings(server.url), tmp_path)
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 9
    assert not any(b"sk-sentinel" in content for content in files)
    assert "sk-sentinel" not in str(caught.value) + caplog.text


def test_an_ignored_temperature_is_recorded_and_counted(tmp_path: Path) -> None:
    from openai_server import chat, ok

    thinking = ok(chat("<answer>\nA\n</answer>", model="deepseek-reasoner", reasoning_content="since"))
    with serve(lambda _: thinking) as server, pytest.warns(UserWarning, match="temperature has no effect"):
        teach(questions(1), None, server_settings(server.url), tmp_path)
    found = list(read_records(tmp_path / "responses.jsonl", Response))
    assert {(r.temperature_acts, r.reasoning, r.label) for r in found} == {(False, "since", "A")}
    assert read_manifest(tmp_path / "responses.jsonl").counts["temperature_ignored"] == 6


# Interrupted, resumed, refused


def test_a_torn_last_line_is_cut_off_and_asked_again(tmp_path: Path) -> None:
    labels = ["ABCD", "BBBB"]
    with pytest.raises(ServerError):
        teach(questions(2), Scripted(scripted(*labels).labels, fail_after=5), TeacherSettings(n=4), tmp_path)
    part = tmp_path / "generations.part.jsonl"
    whole = part.read_bytes()
    assert whole.count(b"\n") == 5
    for cut in (1, 40, len(whole.splitlines()[-1])):
        part.write_bytes(whole[:-cut])
        assert dry_run(questions(2), scripted(*labels), TeacherSettings(n=4), tmp_path).requests == 4
    source = scripted(*labels)
    teach(questions(2), source, TeacherSettings(n=4), tmp_path)
    assert source.asked == 4
    teach(questions(2), scripted(*labels), TeacherSettings(n=4), tmp_path / "whole")
    assert (tmp_path / "responses.jsonl").read_bytes() == (tmp_path / "whole" / "responses.jsonl").read_bytes()


def test_killed_again_after_a_long_torn_line_the_part_file_is_whole(tmp_path: Path) -> None:
    labels = scripted("ABCD", "BBBB").labels
    part = tmp_path / "generations.part.jsonl"
    with pytest.raises(ServerError):
        teach(questions(2), Scripted(labels, fail_after=2), TeacherSettings(n=4), tmp_path)
    with part.open("ab") as file:
        file.write(b'{"question": "q0", "sample": 2, "text": "' + b"x" * 5000)
    with pytest.raises(ServerError):
        teach(questions(2), Scripted(labels, fail_after=1), TeacherSettings(n=4), tmp_path)
    lines = part.read_bytes().split(b"\n")
    assert [json.loads(line)["sample"] for line in lines[:-1]] == [0, 1, 2]
    assert lines[-1] == b""


@pytest.mark.parametrize(
    "missing", ["generations.manifest.json", "responses.manifest.json", "sft.jsonl", "preferences.manifest.json"]
)
def test_killed_between_the_files_it_writes_what_is_missing(tmp_path: Path, missing: str) -> None:
    """A part file that outlived its run is the state before the last step of the writing."""
    labels = ["ABCD", "BBBC"]
    with pytest.raises(ServerError):
        teach(questions(2), Scripted(scripted(*labels).labels, fail_after=7), TeacherSettings(n=4), tmp_path)
    parts = {path: path.read_bytes() for path in tmp_path.glob("generations.part.*")}
    teach(questions(2), scripted(*labels), TeacherSettings(n=4), tmp_path)
    finished = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / missing).unlink()
    for path, content in parts.items():
        path.write_bytes(content)
    source = scripted(*labels)
    teach(questions(2), source, TeacherSettings(n=4), tmp_path)
    assert source.asked == (1 if missing == "generations.manifest.json" else 0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == finished


@pytest.mark.parametrize(
    "change", [{"n": 3}, {"seed": 1}, {"temperature": (0.6, 1.0)}, {"max_tokens": 5}, {"model": "x"}]
)
def test_other_settings_are_refused_before_and_after_the_end(tmp_path: Path, change: dict[str, object]) -> None:
    base = TeacherSettings(n=4)
    other = base.model_copy(update=change)
    with pytest.raises(ServerError):
        teach(questions(2), Scripted(scripted("ABCD", "ABCD").labels, fail_after=1), base, tmp_path)
    with pytest.raises(DataError, match=r"generations\.part\.jsonl: belongs to other settings"):
        teach(questions(2), scripted("ABCD", "ABCD"), other, tmp_path)
    teach(questions(2), scripted("ABCD", "ABCD"), base, tmp_path)
    with pytest.raises(DataError, match=r"generations\.jsonl: belongs to other settings"):
        teach(questions(2), scripted("ABCD", "ABCD"), other, tmp_path)


def test_other_questions_are_refused(tmp_path: Path) -> None:
    run(tmp_path, "AAAA", "BBBB")
    with pytest.raises(DataError, match="other settings or questions"):
        teach(questions(3), scripted("AAAA", "BBBB", "AAAA"), TeacherSettings(n=4), tmp_path)


def test_responses_of_another_model_are_refused_though_the_settings_name_none(tmp_path: Path) -> None:
    teach(questions(1), scripted("AB"), TeacherSettings(n=2), tmp_path)
    other = scripted("AB")
    other.model = "another"
    with pytest.raises(DataError, match="belongs to other settings"):
        teach(questions(1), other, TeacherSettings(n=2), tmp_path)


def test_rows_alone_are_written_anew_when_only_their_settings_change(tmp_path: Path) -> None:
    run(tmp_path, "ABBBAA", "BBBBBA")
    assert len(list(read_records(tmp_path / "preferences.jsonl", PreferenceRow))) == 1
    nobody = Scripted({})
    teach(questions(2), nobody, TeacherSettings(n=6, min_wrong=1), tmp_path)
    assert len(list(read_records(tmp_path / "preferences.jsonl", PreferenceRow))) == 2


def test_another_parser_reads_again_and_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that finds an answer in 'I cannot say.': every file is read again, and nobody is asked."""
    run(tmp_path, "ABB-", "BBAA", min_wrong=1)
    kept = (tmp_path / "generations.jsonl").read_bytes()

    def generous(text: str, question: Question, *, cut: bool = False) -> ParsedResponse:
        found = parse_answer(text, question, cut=cut)
        return found if "<answer>" in text else found._replace(reasoning="r", label="C", span=(0, 1))

    monkeypatch.setattr("catto.teacher.responses.parse_answer", generous)
    nobody, settings = Scripted({}), TeacherSettings(n=4, min_wrong=1)
    told = teach(questions(2), nobody, settings, tmp_path)
    assert nobody.asked == 0
    assert [r.label for r in read_records(tmp_path / "responses.jsonl", Response)][:4] == ["A", "B", "B", "C"]
    assert [row.label for row in read_records(tmp_path / "outcome.jsonl", SftRow)][:4] == ["A", "B", "B", "C"]
    assert told.unparsed == 0
    assert (tmp_path / "generations.jsonl").read_bytes() == kept


def test_generations_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, names = text_files.open_input, list[str]()

    def counted(path: Path, **options: bool) -> AbstractContextManager[IO[bytes]]:
        names.append(path.name)
        return opened(path, **options)

    monkeypatch.setattr(text_files, "open_input", counted)
    run(tmp_path, "ABBB", "BBBA")
    assert (names.count("generations.jsonl"), names.count("responses.jsonl")) == (1, 0)


def test_two_runs_on_one_folder_are_refused(tmp_path: Path) -> None:
    with hold_lock(tmp_path / ".lock"), pytest.raises(DataError, match="another run is writing here"):
        run(tmp_path, "AAAA")
    run(tmp_path, "AAAA")


ROW = {"question": "q0", "sample": 0, "text": "t", "model": "m"}
BAD_ROWS = {
    "text: missing": json.dumps({k: v for k, v in ROW.items() if k != "text"}).encode(),
    "stored twice": json.dumps({**ROW, "sample": 1}).encode(),
    "was not asked": json.dumps({**ROW, "question": "q9"}).encode(),
    "extra: unknown key": json.dumps({**ROW, "extra": 1}).encode(),
    "Invalid JSON": b"not json",
    "nvalid": b'{"question": "\xff\xfe"}',
    "longer than 16 MB": b'{"question": "' + b"x" * 50 * 2**20 + b'"}',
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_in_the_part_file_is_one_line_and_leaves_the_file_alone(tmp_path: Path, message: str) -> None:
    with pytest.raises(ServerError):
        teach(questions(2), Scripted(scripted("AAAA", "BBBB").labels, fail_after=3), TeacherSettings(n=4), tmp_path)
    part = tmp_path / "generations.part.jsonl"
    broken = part.read_bytes() + BAD_ROWS[message] + b"\n"
    part.write_bytes(broken)
    with pytest.raises(DataError, match=rf"generations\.part\.jsonl row 4: .*{message}") as caught:
        run(tmp_path, "AAAA", "BBBB")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert part.read_bytes() == broken


def test_an_engine_that_leaves_requests_unanswered_is_an_error(tmp_path: Path) -> None:
    class Lazy(Scripted):
        def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
            return iter(())

    with pytest.raises(RuntimeError, match="8 requests were never answered"):
        teach(questions(2), Lazy({}), TeacherSettings(n=4), tmp_path)


def test_questions_of_every_split_are_asked_and_ids_are_unique(tmp_path: Path) -> None:
    train, *others = questions(3)
    held_out = [question.model_copy(update={"split": "validation"}) for question in others]
    given_yield = teach([train, *held_out], scripted("AAAA", "AAAA", "AAAA"), TeacherSettings(n=4), tmp_path / "a")
    assert given_yield.questions == 3
    with pytest.raises(ValueError, match="'q0' occurs more than once"):
        teach([train, train], scripted("AAAA"), TeacherSettings(n=4), tmp_path / "b")
    with pytest.raises(ValueError, match="no question to ask"):
        teach([], scripted("AAAA"), TeacherSettings(n=4), tmp_path / "c")


def test_files_do_not_depend_on_the_split(tmp_path: Path) -> None:
    """Validation questions were once asked as training questions, and such a run still resumes."""
    held_out = [question.model_copy(update={"split": "validation"}) for question in questions(2)]
    labels = ("AAAB", "BBBA")
    with pytest.raises(ServerError):
        teach(questions(2), Scripted(scripted(*labels).labels, fail_after=5), TeacherSettings(n=4), tmp_path / "a")
    teach(held_out, scripted(*labels), TeacherSettings(n=4), tmp_path / "a")
    teach(questions(2), scripted(*labels), TeacherSettings(n=4), tmp_path / "b")
    for path in (tmp_path / "b").glob("*.json*"):
        assert (tmp_path / "a" / path.name).read_bytes() == path.read_bytes()


def test_a_sampled_model_has_the_hashes_of_a_teacher_without_a_source() -> None:
    sampled = ModelSampling(n=2, temperature=(1.0, 1.0), max_tokens=64, reasoning=True, seed=3)
    settings = TeacherSettings(n=2, temperature=(1.0, 1.0), max_tokens=64, reasoning=True, seed=3)
    # As texts: the order of the fields is that of the manifests.
    assert json.dumps(sampled.response_settings()) == json.dumps(settings.response_settings())
    assert json.dumps(sampled.row_settings()) == json.dumps(settings.row_settings())
