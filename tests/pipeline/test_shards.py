"""Evaluation in shards: whole chunks, joined to the very file of one run."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from evaluation_world import engine, killable, model, questions, tokenizer
from experiment_run import Events
from experiment_world import RECIPE
from forked import Forked
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from catto import predict
from catto.cli.evaluate import evaluate as command
from catto.engines import Generation, ScoredGeneration
from catto.errors import DataError
from catto.io.record_files import manifest_path
from catto.pipeline import run as runner
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, ordered, place
from catto.prompts import messages
from catto.recipe.settings import Recipe
from catto.records import Prediction, Refusal
from catto.tasks import load

ASKED = questions(29)  # four chunks of eight questions, the last of five
SAMPLED: dict[str, Any] = {"k": 2, "temperature": 1.3, "max_tokens": 16}


def _same_files(one: Path, other: Path) -> None:
    for path in (lambda file: file, manifest_path, predict.refused_path):
        assert path(one).exists() == path(other).exists()
        assert not path(one).exists() or path(one).read_bytes() == path(other).read_bytes()


def _untimed(path: Path) -> str:
    """A file of generations but for the seconds that each took."""
    return re.sub(r'"seconds":[^,]*,', "", path.read_text())


def _shards(out: Path, count: int) -> list[Path]:
    return [predict.shard_path(out, (number, count)) for number in range(1, count + 1)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_joined_shards_are_the_file_of_one_run(tmp_path: Path, count: int) -> None:
    """The fifth of five has no chunk."""
    whole, joined = tmp_path / "whole.jsonl", tmp_path / "joined.jsonl"
    predict.evaluate(engine(4), ASKED, out=whole, **SAMPLED)
    for number, path in reversed(list(enumerate(_shards(joined, count), 1))):
        part = predict.evaluate(engine(4), ASKED, out=path, shard=(number, count), **SAMPLED)
        assert {prediction.question for prediction in part} == {
            question.id for place, question in enumerate(ASKED) if place // 8 % count == number - 1
        }
    predictions = predict.merge(Prediction, ASKED, _shards(joined, count), joined)
    assert len(predictions) == 58
    _same_files(whole, joined)


def test_generations_are_joined_too(tmp_path: Path) -> None:
    whole, joined = tmp_path / "whole.jsonl", tmp_path / "joined.jsonl"
    predict.generate(engine(4), ASKED, out=whole, **SAMPLED)
    for number, path in enumerate(_shards(joined, 3), 1):
        predict.generate(engine(4), ASKED, out=path, shard=(number, 3), **SAMPLED)
    predict.merge(ScoredGeneration, ASKED, _shards(joined, 3), joined)
    assert _untimed(whole) == _untimed(joined)
    assert manifest_path(whole).read_bytes() == manifest_path(joined).read_bytes()


class _Choosy:
    """An engine that refuses some questions, as servers do."""

    def __init__(self) -> None:
        self.inner = engine(4)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def generate(self, requests: Any, done: Any = ()) -> Iterator[Generation | Refusal]:
        for outcome in self.inner.generate(requests, done):
            flagged = outcome.question in ("q3", "q8", "q9", "q28")
            yield Refusal(refused="flagged", question=outcome.question, sample=outcome.sample) if flagged else outcome


def test_refusals_are_joined_in_their_order(tmp_path: Path) -> None:
    whole, joined, choosy = tmp_path / "whole.jsonl", tmp_path / "joined.jsonl", _Choosy()
    predict.evaluate(choosy, ASKED, out=whole, max_refused=1.0, **SAMPLED)  # type: ignore[arg-type]
    for number, path in enumerate(_shards(joined, 3), 1):
        predict.evaluate(choosy, ASKED, out=path, shard=(number, 3), max_refused=1.0, **SAMPLED)  # type: ignore[arg-type]
    predict.merge(Prediction, ASKED, _shards(joined, 3), joined)
    assert len(predict.read_refused_requests(joined)) == 8
    _same_files(whole, joined)


def test_a_shard_that_is_missing_unfinished_or_another_run_s_is_named(tmp_path: Path) -> None:
    out = tmp_path / "joined.jsonl"
    paths = _shards(out, 3)
    predict.evaluate(engine(4), ASKED, out=paths[0], shard=(1, 3), **SAMPLED)
    with pytest.raises(DataError, match=r"joined.jsonl: cannot be joined, not finished: shard 2/3, 3/3"):
        predict.merge(Prediction, ASKED, paths, out)
    assert not out.exists()
    predict.evaluate(engine(4), ASKED, out=paths[1], shard=(2, 3), **SAMPLED)
    predict.evaluate(engine(4), ASKED, out=paths[2], shard=(3, 3), **{**SAMPLED, "seed": 1})
    with pytest.raises(DataError, match=r"shard-3-of-3.jsonl: belongs to other settings"):
        predict.merge(Prediction, ASKED, paths, out)
    shutil.copyfile(paths[0], paths[2])  # the first in the place of the third
    shutil.copyfile(manifest_path(paths[0]), manifest_path(paths[2]))
    with pytest.raises(DataError, match=r"shard-3-of-3.jsonl: belongs to other settings"):
        predict.merge(Prediction, ASKED, paths, out)
    with pytest.raises(DataError, match=r"shard-1-of-3.jsonl: belongs to other settings"):
        predict.merge(Prediction, ASKED[1:], paths, out)


def test_a_killed_shard_resumes_and_the_whole_is_the_same(tmp_path: Path) -> None:
    folder, whole, joined = tmp_path / "model", tmp_path / "whole.jsonl", tmp_path / "joined.jsonl"
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    killable(str(folder), str(whole), "29")
    for number, path in enumerate(_shards(joined, 3), 1):
        if number == 2:
            part = path.with_name(path.name.removesuffix(".jsonl") + ".part.jsonl")
            process = Forked(killable, str(folder), str(path), "29", (2, 3), chunks=2)
            while not (part.exists() and part.stat().st_size):
                assert process.process.is_alive()
                time.sleep(0.002)
            process.process.kill()
            assert process.wait() == -signal.SIGKILL
            assert 0 < part.read_bytes().count(b"\n") < 18
        killable(str(folder), str(path), "29", (number, 3))
    predict.merge(Prediction, questions(29), _shards(joined, 3), joined)
    _same_files(whole, joined)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_answers_shards_and_joins_them(tmp_path: Path) -> None:
    asked = list(load("witnesses", "test", limit=10))
    words = tiny_tokenizer([message.content for question in asked for message in messages(question)])
    tiny_model(1, vocab_size=len(words)).save_pretrained(tmp_path / "model")
    words.save_pretrained(tmp_path / "model")
    app = typer.Typer()
    app.command()(command)

    def run(out: str, *more: str, name: str = "model", size: str = "1") -> Any:
        options = ["--task", "witnesses", "--n", "10", "--max-tokens", "8", "--batch-size", size]
        return CliRunner().invoke(app, [str(tmp_path / name), *options, "--out", str(tmp_path / out), *more])

    assert run("whole").exit_code == 0
    first = run("parts", "--shard", "1/3")
    assert first.exit_code == 0, first.output
    assert "Shard 1/3 is done" in first.stdout
    early = run("parts")
    assert early.exit_code == 2
    assert "not finished: shard 2/3, 3/3" in early.stderr
    run("parts", "--shard", "2/3")
    run("parts", "--shard", "3/3")
    (tmp_path / "model" / "model.safetensors").unlink()  # joining loads no model
    other = shutil.copytree(tmp_path / "model", tmp_path / "other")
    for made, more in {
        f"model '{tmp_path / 'model'}', not '{other}'": {"name": "other"},
        "chunk 4, not 8": {"size": "2"},
    }.items():
        refused = run("parts", **more)
        assert refused.exit_code == 2
        assert f"predictions.shard-1-of-3.jsonl: was made with {made}" in refused.stderr
    served = run("parts", "--engine", "server", "--base-url", "http://localhost:1/v1")
    assert re.search(r"shard-1-of-3.jsonl: was made with engine 'transformers .*', not 'server'", served.stderr)
    joined = run("parts")
    assert joined.exit_code == 0, joined.output
    assert "Answers: " in joined.stdout
    _same_files(tmp_path / "whole" / "predictions.jsonl", tmp_path / "parts" / "predictions.jsonl")


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/3"])
def test_an_impossible_shard_is_refused(tmp_path: Path, text: str) -> None:
    app = typer.Typer()
    app.command()(command)
    shown = CliRunner().invoke(app, ["model", "--task", "witnesses", "--shard", text, "--out", str(tmp_path / "e")])
    assert shown.exit_code == 2
    assert "--shard: expected I/N with I from 1 to N" in shown.stderr


# ---- stages of a recipe ---------------------------------------------------------------------------------------------


SMALL = {"evaluation": {**RECIPE["evaluation"], "batch_size": 1}}  # chunks of four: the ten test questions are three


def _goal(shards: int) -> Stage:
    recipe = Recipe.model_validate({**RECIPE, "methods": ["sft"], "launch": {"shards": shards}, **SMALL})
    graph = Graph(recipe)
    return graph.tested("witnesses", graph.chosen("witnesses", 0, "sft", "matched"))


def test_shards_change_no_key_and_are_needed_by_what_joins_them() -> None:
    plain, cut = ({stage.name: stage for stage in ordered([_goal(shards)])} for shards in (1, 3))
    assert {name: stage.key for name, stage in plain.items()}.items() <= {n: s.key for n, s in cut.items()}.items()
    new = sorted(cut.keys() - plain.keys())
    assert [re.sub(r".* (shard . of .)", r"\1", name) for name in new] == [f"shard {n} of 3" for n in (1, 2, 3)]
    whole = next(stage for stage in cut.values() if stage.kind == "generated" and stage.whole is None)
    assert {need.name for need in whole.needs.values()} >= set(new)
    assert len({stage.key for stage in cut.values()}) == len(cut)


def test_a_run_in_shards_ends_with_the_files_of_one_without(tmp_path: Path) -> None:
    """And a run that is done needs no shard any more."""
    roots = {1: tmp_path / "plain", 3: tmp_path / "cut"}
    for shards, root in roots.items():
        outcome = runner.run(root, [_goal(shards)], Events())
        assert not outcome.failed, outcome.failed
    stages = {stage.kind: stage for stage in ordered([_goal(1)])}
    for kind, name in {"generated": "generations.jsonl", "predicted": "predictions.jsonl"}.items():
        plain, cut = (place(root, stages[kind]) / name for root in roots.values())
        assert _untimed(plain) == _untimed(cut)
        assert manifest_path(plain).read_bytes() == manifest_path(cut).read_bytes()
    assert plain.read_bytes() == cut.read_bytes()  # of predictions, to the byte
    assert len(list((roots[3] / "stages").glob("generated-*shard*"))) == 3
    again = runner.run(roots[1], [_goal(3)], Events())
    assert not again.finished
    assert not again.failed
    assert {standing for _, standing in runner.plan(roots[1], [_goal(3)])} == {"done"}
