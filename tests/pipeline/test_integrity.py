"""A finished experiment that was damaged: every flipped bit and cut file is noticed, named and repaired."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from experiment_world import write_recipe

from catto.cli import main
from catto.errors import DataError
from catto.io.atomic import seal_folder
from catto.pipeline.attempts import Attempt
from catto.pipeline.plan import Graph
from catto.pipeline.run import reuse_earlier_result
from catto.pipeline.stage import (
    DONE,
    UNSEALED,
    Stage,
    StageSettings,
    check_stage,
    digest_inputs,
    is_done,
    list_needed,
    stage_dir,
    write_json,
)
from catto.recipe.load import load_recipe
from catto.records import content_hash

METHODS = ["sft", "sft+ts", "dpo", "dpo+outcome"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe and a finished run of it."""
    folder = tmp_path_factory.mktemp("integrity")
    catto("run", str(write_recipe(folder, methods=METHODS)), "--out", str(folder / "run"))
    return folder


def catto(*arguments: str) -> int:
    """Run a command in this process; its exit code."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def stages(made: Path) -> list[Stage]:
    return list_needed([Graph(load_recipe(str(made / "tiny.yaml"))).plan_report()])


def stage(made: Path, kind: str, name: str = "") -> Stage:
    return next(one for one in stages(made) if one.kind == kind and name in one.name)


@contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """Put other bytes into a file for a while; its dates stay, as those of a failing disk do."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


def one_file_a_kind(made: Path) -> list[Path]:
    """Every file of one stage of each kind, the larger trainings included."""
    kinds = {one.kind: one for one in stages(made)}
    folders = [stage_dir(made / "run", one) for one in kinds.values()]
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]


def test_every_flipped_bit_and_every_cut_is_noticed(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over all kinds of stages and all their files; what a run tells of itself (logs, seconds) is not sealed."""
    files = [path for path in one_file_a_kind(made) if path.name == DONE or path.name not in UNSEALED]
    root = made / "run" / "stages"
    assert len(files) > 40
    for path in files:
        data = path.read_bytes()
        folder = root / path.relative_to(root).parts[0]
        check_stage(folder, contents=True)
        damages = [
            data[:-1],
            data + b"\n",
            data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
        ]
        for damaged in damages if data else damages[1:2]:
            with changed(path, damaged), pytest.raises(DataError, match=r"damaged: .*; --repair runs the stage again"):
                check_stage(folder, contents=True)
    assert catto("verify", str(made / "run")) == 0
    assert "finished stages are intact" in capsys.readouterr().out


def test_verify_names_the_stage_and_the_file(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stage_dir(made / "run", stage(made, "train", "dpo")) / "model" / "model.safetensors"
    data = path.read_bytes()
    with changed(path, data[:-1] + bytes([data[-1] ^ 128])):
        assert catto("verify", str(made / "run")) == 1
    told = capsys.readouterr().out
    assert f"{path.parents[1]}: damaged: model/model.safetensors has changed since it was written" in told


def test_verify_notices_swapped_folders(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is whole by itself; a run refuses them too, before it reads one in place of the other."""
    copy = copied(made, tmp_path)
    one, other = (stage_dir(copy / "run", stage(copy, "predicted", name)) for name in ("test sft", "test dpo"))
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    assert catto("verify", str(copy / "run")) == 1
    told = capsys.readouterr().out
    assert f"{one}: damaged: this is the folder of the stage {other.name}" in told
    assert f"{other}: damaged: this is the folder of the stage {one.name}" in told
    assert catto("run", str(copy / "tiny.yaml"), "--out", str(copy / "run")) == 2


def test_verify_notices_a_file_that_no_stage_wrote(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An adapter beside a model would be loaded with it. What systems leave is no damage."""
    folder = stage_dir(made / "run", stage(made, "train", "dpo"))
    for name, code in (("model/adapter_config.json", 1), ("notes.txt", 1), (".nfs0001", 0), ("model/.DS_Store", 0)):
        extra = folder / name
        assert not extra.exists()
        extra.write_text("x")
        try:
            assert catto("verify", str(made / "run")) == code
        finally:
            extra.unlink()
        told = capsys.readouterr().out
        assert (f"damaged: the stage did not write {name}" in told) == bool(code)


def test_verify_notices_a_changed_page_and_a_changed_recipe(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = made / "run" / "report.html"
    (recipe,) = (made / "run" / "recipes").glob("*.json")
    for path in (page, recipe):
        data = path.read_bytes()
        with changed(path, data.replace(b"1", b"2", 1)):
            assert catto("verify", str(made / "run")) == 1
        assert f"{path}: damaged: " in capsys.readouterr().out
    assert catto("verify", str(made / "run")) == 0


def test_the_page_names_files_that_are_there(made: Path) -> None:
    """In the experiment's folder and in the folder of its stage."""
    for page in (made / "run" / "report.html", *(made / "run" / "stages").glob("report-*/report.html")):
        named = re.findall(r"Files: (\S+), \.tex, \.csv", page.read_text(encoding="utf-8"))
        assert named
        for name in named:
            assert (page.parent / name).is_file()
            assert (page.parent / name).with_suffix(".csv").is_file()


def test_verify_of_another_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert catto("verify", str(tmp_path)) == 2
    assert "not an experiment's folder" in capsys.readouterr().err


def test_a_cut_file_stops_a_run_before_anything_runs(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut at a line's end, where a reader would take it for the whole."""
    path = stage_dir(made / "run", stage(made, "predicted", "test sft")) / "predictions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for command in ("run", "plan"):
        with changed(path, b"".join(lines[:-1])):
            assert catto(command, str(made / "tiny.yaml"), "--out", str(made / "run")) == 2
        told = capsys.readouterr().err
        assert f"damaged: predictions.jsonl has {len(b''.join(lines[:-1])):,} bytes" in told
        assert told.count("\n") == 1


def copied(made: Path, to: Path) -> Path:
    shutil.copytree(made, to / "copy")
    return to / "copy"


def contents(root: Path, kinds: Sequence[str]) -> dict[str, bytes]:
    """The files of finished stages, by stage and name, without times."""
    paths = [path for kind in kinds for path in root.glob(f"stages/{kind}*/**/*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths if path.name not in UNSEALED}


def test_a_flipped_bit_is_noticed_where_it_is_read_and_repaired(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the rows: the training that reads them fails, `--repair` makes them again and ends with the same model."""
    copy = copied(made, tmp_path)
    arguments = str(copy / "tiny.yaml"), "--out", str(copy / "run")
    before = contents(copy / "run", ["test-dpo", "rows"])
    rows = stage_dir(copy / "run", stage(copy, "rows", "witnesses")) / "preferences.jsonl"
    data = rows.read_bytes()
    rows.write_bytes(data.replace(b"A", b"B", 1))
    trained = stage_dir(copy / "run", stage(copy, "train", "dpo matched"))
    shutil.rmtree(trained)
    assert catto("run", *arguments) == 1
    assert "damaged: preferences.jsonl has changed since it was written; --repair" in capsys.readouterr().err
    assert catto("run", *arguments, "--repair") == 0
    assert "damaged, will be run again" in capsys.readouterr().err
    assert rows.read_bytes() == data
    assert rows.parent.with_name(rows.parent.name + ".damaged").is_dir()
    assert contents(copy / "run", ["test-dpo", "rows"]) | before == before | contents(
        copy / "run", ["test-dpo", "rows"]
    )
    assert catto("verify", str(copy / "run")) == 0


def test_what_depends_on_a_stage_that_came_out_otherwise_is_run_again(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stage replaced by another, whole one (a copy from elsewhere, another version) makes what read it stale."""
    copy = copied(made, tmp_path)
    predictions = stage_dir(copy / "run", stage(copy, "predicted", "test sft")) / "predictions.jsonl"
    told = json.loads((predictions.parent / DONE).read_text())
    text = predictions.read_text().replace('"confidence":', '"confidence": ')
    predictions.write_text(text)
    told.pop("checksum")
    told["files"] = {name: list(seal) for name, seal in seal_folder(predictions.parent, UNSEALED).items()}
    write_json(predictions.parent / DONE, {**told, "checksum": content_hash(told)})
    assert catto("plan", str(copy / "tiny.yaml"), "--out", str(copy / "run"), "--json") == 0
    standing = {one["name"]: one["standing"] for one in json.loads(capsys.readouterr().out)}
    stale = {name for name, one in standing.items() if one != "done"}
    assert "report" in stale
    assert all(name == "report" or "sft" in name for name in stale)
    assert catto("run", str(copy / "tiny.yaml"), "--out", str(copy / "run")) == 0
    assert catto("plan", str(copy / "tiny.yaml"), "--out", str(copy / "run"), "--json") == 0
    output = capsys.readouterr().out
    assert {one["standing"] for one in json.loads(output[output.index("[\n") :])} == {"done"}


def publish(root: Path, stage: Stage, name: str, value: object) -> None:
    """Make a stage of one file."""
    with Attempt(root, stage, digest_inputs(root, stage)) as attempt:
        write_json(attempt.out / name, value)
        attempt.publish({})


def test_another_model_behind_the_same_choice_makes_stale_what_was_generated_with_it(tmp_path: Path) -> None:
    """A choice holds a name alone; what reads it depends on the model of that name."""
    train = Stage("train", "sft", StageSettings())
    choice = Stage("chosen", "chosen sft", StageSettings(), {"model 0 seed 0": train})
    text = Stage("generated", "generated test sft", StageSettings(), {"model": choice})

    def made(stage: Stage, name: str, value: str) -> None:
        shutil.rmtree(stage_dir(tmp_path, stage), ignore_errors=True)
        publish(tmp_path, stage, name, {"model": value})

    made(train, "weights.json", "one")
    made(choice, "choice.json", "model 0 seed 0")
    made(text, "generations.json", "...")
    assert is_done(tmp_path, text)
    made(train, "weights.json", "two")
    made(choice, "choice.json", "model 0 seed 0")
    assert is_done(tmp_path, choice)
    assert not is_done(tmp_path, text)


def test_a_stage_is_made_of_its_twins_files_only_where_those_are_whole(tmp_path: Path) -> None:
    """A flipped bit leaves the size as it was: the bytes are compared."""
    twin, stage = (Stage("questions", "questions a", StageSettings()) for _ in range(2))
    vars(stage)["key"] = "f" * 16  # of another recipe, with the same content
    publish(tmp_path, twin, "train.json", 1)
    with changed(stage_dir(tmp_path, twin) / "train.json", b"3"):
        assert not reuse_earlier_result(tmp_path, stage, digest_inputs(tmp_path, stage))
        assert not stage_dir(tmp_path, stage).exists()
    assert reuse_earlier_result(tmp_path, stage, digest_inputs(tmp_path, stage))
    assert is_done(tmp_path, stage)
