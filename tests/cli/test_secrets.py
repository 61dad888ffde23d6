"""A secret in the body that goes to the teacher's server is sent, decides on the key, and is in no file or message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import Done
from command import run as command
from experiment_world import RECIPE, write_recipe
from openai_server import OpenAIServer, Reply, Seen, chat, error, ok

from catto.pipeline.plan import Graph, store_recipe
from catto.pipeline.stage import Stage, list_needed
from catto.recipe.load import load_recipe
from catto.recipe.settings import Recipe, TeacherSettings
from catto.redaction import redact

SECRET = "5f2c81d09ab34e67"
BODY = {"thinking": {"type": "disabled"}, "metadata": {"api_key": "hunter", "tags": [f"tenant-{SECRET}"]}}
HIDDEN = ("hunter", SECRET)


def respond(seen: Seen) -> Reply:
    """Answer, or refuse one question in eight and quote the whole body, as some proxies do."""
    if int(seen.body["seed"]) % 8 == 0:
        return error(400, f"bad request: {json.dumps(seen.body)[-300:]}")
    return ok(chat("<think>\nSo.\n</think>\n<answer>\nA\n</answer>"))


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer(respond) as serving:
        yield serving


def recipe_with(folder: Path, url: str, body: dict[str, Any]) -> Path:
    teacher = {"source": "server", "model": "m", "base_url": url, "n": 2, "extra_body": body, "max_refused": 1.0}
    return write_recipe(folder, teacher=teacher, tasks={"witnesses": {"train": 8, "validation": 8, "test": 8}})


def teach(capsys: pytest.CaptureFixture[str], recipe: Path, out: Path) -> Done:
    return command(capsys, "teach", recipe, "--out", out)


def everything(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*")) if path.is_file())


def keys(recipe: Recipe) -> list[str]:
    return [stage.key for stage in list_needed([Graph(recipe).plan_report()])]


def responses_of(recipe: Path) -> Stage:
    return Graph(load_recipe(str(recipe))).plan_responses("witnesses")


def test_a_secret_is_sent_and_in_no_file_of_the_run(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = recipe_with(tmp_path, server.url, BODY), tmp_path / "out"
    told = teach(capsys, recipe, out)
    assert told.code == 0, told.err
    assert all(seen.body["metadata"] == BODY["metadata"] for seen in server.seen)
    assert any(path.stat().st_size for path in out.rglob("refused.jsonl"))
    written = everything(out)
    assert '"disabled"' in written
    assert "sha256:" in written
    for secret in HIDDEN:
        assert secret not in written
        assert secret not in told.out + told.err
    # The same command asks nothing again.
    asked = len(server.seen)
    assert teach(capsys, recipe, out).code == 0
    assert len(server.seen) == asked


def test_a_killed_run_resumes_with_its_secret(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The unfinished file is named by a hash of the body: the same secret continues it."""
    recipe, out = recipe_with(tmp_path, server.url, BODY), tmp_path / "out"

    def fail_later(seen: Seen) -> Reply:
        return respond(seen) if len(server.seen) < 8 else error(403, "no money")

    server.respond = fail_later
    assert teach(capsys, recipe, out).code == 1
    assert "</think>" in everything(out)
    server.respond = respond
    before = len(server.seen)
    assert teach(capsys, recipe, out).code == 0
    assert len(server.seen) - before < 16


def test_the_key_changes_with_the_secret_and_is_that_of_the_stored_recipe() -> None:
    def made(body: dict[str, Any]) -> Recipe:
        return Recipe.model_validate({**RECIPE, "teacher": {"source": "witnesses", "n": 10, "extra_body": body}})

    one, other = made({"api_key": "one"}), made({"api_key": "two"})
    assert keys(one) != keys(other)
    stored = Recipe.model_validate(one.model_dump(mode="json"))
    assert "one" not in stored.model_dump_json().partition("extra_body")[2].partition("}")[0]
    assert keys(stored) == keys(one)


def test_a_single_stage_takes_the_secret_from_the_environment(
    server: OpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`catto stage` has the stored recipe alone: a digest is refused, the name of a variable works."""
    monkeypatch.setenv("CATTO_TEST_SECRET", "hunter")
    for number, value in enumerate(["hunter", "Bearer ${CATTO_TEST_SECRET}"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        recipe, out = recipe_with(folder, server.url, {"auth": {"value": value}}), folder / "out"
        store_recipe(out, load_recipe(str(recipe)))
        wanted = responses_of(recipe)
        for stage in wanted.needs.values():
            assert command(capsys, "stage", out, stage.key).code == 0
        told = command(capsys, "stage", out, wanted.key)
        if number == 0:
            assert told.code == 1
            assert "teacher.extra_body.auth.value: only a digest of this value is stored" in told.err
        else:
            assert told.code == 0, told.err
            assert {seen.body["auth"]["value"] for seen in server.seen} == {"Bearer hunter"}
            assert "hunter" not in everything(out)
    monkeypatch.delenv("CATTO_TEST_SECRET")
    settings = TeacherSettings(extra_body={"auth": "${CATTO_TEST_SECRET}"})
    with pytest.raises(ValueError, match="environment variable CATTO_TEST_SECRET is not set"):
        settings.body_to_send()


@pytest.mark.parametrize(
    "harmless",
    [
        {"thinking": {"type": "disabled"}},
        {"provider": {"order": ["deepseek/deepseek-chat-v3", "Qwen3-235B-A22B-Instruct-2507"]}, "quant": "fp8"},
        {"max_tokens": 4096, "top_p": 0.95, "stop": ["</answer>"], "use_auth": True, "note": None},
        {"guided_choice": ["A", "B"], "chat_template_kwargs": {"enable_thinking": False}},
        {"system": "Answer in one word, and give no reasons for it."},
        {"auth": "${NAME}", "header": "Bearer ${OTHER}"},
    ],
)
def test_what_is_no_secret_is_stored_as_it_is(harmless: dict[str, Any]) -> None:
    assert redact(harmless) == harmless


@pytest.mark.parametrize(
    "body",
    [
        {"password": "x"},
        {"apiKey": "x"},
        {"X-Auth-Token": ["x"]},
        {"auth": {"user": "me", "pin": 1234}},
        {"value": "sk-proj-AbCdEf1234567890"},
        {"value": "550e8400-e29b-41d4-a716-446655440000"},
        {"value": "Bearer x"},
        {"value": "https://me:x@host.example"},
        {"value": "sk-AbCdEf1234567890-${NAME}"},
        {"value": "${NAME:-AbCdEf1234567890}"},
    ],
)
def test_what_may_be_a_secret_is_stored_as_a_digest(body: dict[str, Any]) -> None:
    stored = redact(body)
    texts = re.findall(r'"([^"]*)"', json.dumps(list(stored.values())))
    assert [text for text in texts if text not in ("user", "pin")] != []
    assert all(re.fullmatch("sha256:[0-9a-f]{16}|user|pin", text) for text in texts)
    assert redact(stored) == stored


def test_a_key_in_place_of_the_name_of_its_variable_is_refused_and_not_shown(tmp_path: Path) -> None:
    for key in ("sk-abc", f"hf_{SECRET}"):
        recipe = write_recipe(tmp_path, teacher={"source": "witnesses", "api_key_env": key})
        with pytest.raises(ValueError, match="expected the name of an environment variable") as caught:
            load_recipe(str(recipe))
        assert key not in str(caught.value)


def test_the_hubs_token_is_no_setting_of_a_training() -> None:
    with pytest.raises(ValueError, match=r"sft.trl.hub_token: cannot be set here"):
        load_recipe("quickstart", ["sft.trl.hub_token=hf_x"])
