"""A small experiment from questions to report: run, run again, planned, broken and stopped."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import run
from experiment_world import ENVIRONMENT, RECIPE, Finished, catto, finished, write_recipe
from transformers import AutoTokenizer

from catto.answer.forms import VERSION
from catto.io.record_files import manifest_path, read_records
from catto.pipeline.attempts import lock_run
from catto.pipeline.stage import Stage
from catto.records import Prediction, SftRow
from catto.training.examples import make_examples

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@pytest.fixture(scope="module", name="finished")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(tmp_path_factory)


def test_the_experiment_ends_with_a_table_and_a_page(finished: Finished) -> None:
    assert finished.done.returncode == 0, finished.done.stderr
    assert "DPO + CATTO" in finished.done.stdout
    assert finished.done.stdout.rstrip().endswith("Report: runs/tiny/report.html")
    assert (finished.root / "report.html").read_text(encoding="utf-8").lstrip().lower().startswith("<!doctype html")


def test_every_method_answers_every_test_question(finished: Finished) -> None:
    for method in RECIPE["methods"]:
        (folder,) = finished.stages(f"test-{method}-witnesses-*") or finished.stages(
            f"test-{method}-matched-witnesses-*"
        )
        assert len(list(read_records(folder / "predictions.jsonl", Prediction))) == RECIPE["tasks"]["witnesses"]["test"]


def test_every_training_moved_its_model(finished: Finished) -> None:
    weights = {path.read_bytes() for path in finished.stages("*/model/model.safetensors")}
    assert len(weights) == len(RECIPE["methods"])
    for path in finished.stages("*/training.json"):
        told = json.loads(path.read_text())
        assert told["steps"] > 0
        assert [entry["step"] for entry in told["history"]][-1] == told["steps"]
        best = min(entry["val_nll"] for entry in told["history"])  # the recipe keeps by it, of equals the later
        assert told["kept_step"] == [entry["step"] for entry in told["history"] if entry["val_nll"] == best][-1]
        assert told["dropped"] in ({"rows": 0}, {"pairs": 0}, {"pairs": 0, "stream": 0})


def test_the_log_of_a_training_has_what_its_trainer_logs(finished: Finished) -> None:
    (path,) = finished.stages("dpo+catto-*/log.txt")
    found = re.findall(r"catto\.pipeline\.training_job: step (\d+) of 6: (\{.*\})$", path.read_text(), re.MULTILINE)
    told = [(int(step), json.loads(text)) for step, text in found]
    assert [step for step, logs in told if "eval_val_ece" in logs] == [2, 4, 6]
    assert any("rewards/accuracies" in logs and "loss" in logs for _, logs in told)


def test_questions_of_a_held_out_stream_are_in_no_row_that_a_model_was_trained_on(tmp_path: Path) -> None:
    outcome, methods = {"questions": 16, "held_out": True}, ["sft", "dpo+outcome"]
    done = catto("run", write_recipe(tmp_path, methods=methods, outcome=outcome), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    stages = tmp_path / "runs" / "tiny" / "stages"
    (stream,), (teacher,) = stages.glob("stream-*/outcome.jsonl"), stages.glob("teacher-*/outcome.jsonl")
    asked, trained_on = ({row.question for row in read_records(path, SftRow)} for path in (stream, teacher))
    assert (len(asked), len(trained_on)) == (16, RECIPE["tasks"]["witnesses"]["train"])
    assert not asked & trained_on


def test_the_stream_draws_from_the_whole_of_a_sorted_file(tmp_path: Path) -> None:
    subjects = ("birds", "cats", "dogs")
    rows = [
        {"question": f"{subject} {n}?", "options": ["one", str(n)], "answer": "AB"[n % 2]}
        for subject in subjects
        for n in range(2, 42)
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"path": "own.jsonl", "fields": {"question": "question", "options": "options", "answer": "answer"}}
    teacher = {"source": "labels", "reasoning": False, "n": 10}
    blocks = {"tasks": {"own": own}, "outcome": {"questions": 24}, "methods": ["sft", "dpo+outcome"]}
    done = catto("run", write_recipe(tmp_path, teacher=teacher, **blocks), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs" / "tiny" / "stages").glob("stream-*/outcome.jsonl")
    asked = {row.prompt[-1].content for row in read_records(path, SftRow)}
    assert len(asked) == 24
    assert {subject for subject in subjects for text in asked if subject in text} == set(subjects)


def test_a_stream_is_refused_where_too_few_questions_are_left_beyond_train(tmp_path: Path) -> None:
    rows = [{"question": f"How many are {n}?", "options": ["one", str(n)], "answer": "B"} for n in range(2, 52)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {
        "path": "own.jsonl",
        "fields": {"question": "question", "options": "options", "answer": "answer"},
        "train": 9,
    }
    blocks = {"tasks": {"own": own}, "outcome": {"questions": 99, "held_out": True}}
    teacher = {"source": "labels", "reasoning": False, "n": 10}
    recipe = write_recipe(tmp_path, methods=["sft", "dpo+outcome"], teacher=teacher, **blocks)
    done = catto("run", recipe, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"outcome\.held_out: \d+ questions are left after the 9 of train, expected at least", done.stderr)


def test_tokens_count_the_stream_beside_the_pairs(finished: Finished) -> None:
    told = {}
    for method in ("dpo", "dpo+outcome"):
        (path,) = finished.stages(f"{method}-*/training.json")
        told[method] = json.loads(path.read_text())
    (folder,), (stream,) = finished.stages("dpo-*/model"), finished.stages("stream-*/outcome.jsonl")
    rows = make_examples(AutoTokenizer.from_pretrained(folder), read_records(stream, SftRow), RECIPE["context"])
    assert len(rows) == RECIPE["outcome"]["questions"]
    mean = sum(len(one.row.prompt) + one.label.at for one in rows) / len(rows)  # nothing after the label is computed
    assert told["dpo"]["rows"] == told["dpo+outcome"]["rows"] == RECIPE["small_pairs"]
    beside = round(2 * RECIPE["small_pairs"] * mean)  # two rows of the stream a pair
    assert told["dpo+outcome"]["tokens"] - told["dpo"]["tokens"] == told["dpo"]["epochs"] * beside


def test_without_a_terminal_lines_are_plain(finished: Finished) -> None:
    assert not CONTROL.search(finished.done.stderr + finished.done.stdout)
    lines = finished.done.stderr.splitlines()
    assert lines[0] == f"[1/{len(finished.stages('*'))}] questions witnesses"
    assert all(re.fullmatch(r"\[\d+/\d+\] .*|.*: done in .*", line) for line in lines)


def test_nothing_is_left_of_the_work(finished: Finished) -> None:
    assert not list(finished.root.rglob("*.part*"))
    assert not finished.stages("*/checkpoints")


def test_run_again_does_nothing(finished: Finished) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.root.rglob("*") if "stages" in path.parts}
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    again = catto("run", finished.recipe, cwd=finished.folder)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout == finished.done.stdout
    # Seconds of the processor: others may be using it too.
    assert now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime < 5
    assert before == {path: path.stat().st_mtime_ns for path in finished.root.rglob("*") if "stages" in path.parts}


def test_plan_counts_what_is_done(finished: Finished, capsys: Capture) -> None:
    stages = run(capsys, "plan", finished.recipe, "--out", finished.root, "--json").json
    assert {stage["standing"] for stage in stages} == {"done"}
    assert {stage["folder"] for stage in stages} == {path.name for path in finished.stages("*")}
    assert all(stage["seconds"] >= 0 for stage in stages)
    told = run(capsys, "plan", finished.recipe, "--out", finished.root, "--export", "make")
    assert (told.code, told.err) == (2, "catto: nothing is left to do: every stage is done\n")
    shown = run(capsys, "plan", finished.recipe, "--out", finished.root)
    assert re.search(rf"all +{len(stages)} +0 +0 ", shown.out)


def test_plan_tells_what_a_change_costs(finished: Finished, capsys: Capture) -> None:
    arguments = ("plan", finished.recipe, "--out", finished.root, "--json", "--set")
    changed = run(capsys, *arguments, "evaluation.bins=15").json
    assert [stage["name"] for stage in changed if stage["standing"] != "done"] == ["report"]
    changed = run(capsys, *arguments, "rcft.rows=12").json
    assert {s["kind"] for s in changed if s["standing"] != "done"} == {
        "train", "chosen", "generated", "predicted", "tau", "sampling", "scaled", "pair_logprobs",
        "preference_accuracy", "report",
    }  # fmt: skip


def test_train_takes_what_is_there_and_says_where(finished: Finished, capsys: Capture) -> None:
    told = run(capsys, "train", finished.recipe, "--method", "dpo+catto", "--out", finished.root)
    assert (told.code, told.err) == (0, "")
    assert Path(told.out.splitlines()[-1]).is_dir()
    assert list(Path(told.out.splitlines()[-1]).glob("model.safetensors"))


# ---- what goes wrong: the stages that make data need no torch, so `teach` shows it in a second -----------------


def two_tasks(folder: Path) -> Path:
    """The embedded world, and a file whose only row cannot be read."""
    (folder / "mine.jsonl").write_text(json.dumps({"q": "q", "o": ["x", "y"], "a": "Z"}) + "\n")
    tasks: dict[str, Any] = {"witnesses": {"train": 20}, "mine": {"path": str(folder / "mine.jsonl"), "fields": FIELDS}}
    return write_recipe(folder, tasks=tasks, methods=["sft"])  # which no held-out pairs are asked for


FIELDS = {"question": "q", "options": "o", "answer": "a"}


def test_a_failed_stage_stops_only_what_depends_on_it(tmp_path: Path, capsys: Capture) -> None:
    told = run(capsys, "teach", two_tasks(tmp_path), "--out", tmp_path / "out")
    assert told.code == 1
    named = re.search(r"catto: questions mine: DataError: .*mine.jsonl row 1: .*; its log: (.*)", told.err)
    assert named is not None
    assert "DataError" in Path(named[1]).read_text()
    assert told.err.splitlines()[-1] == "catto: stages not run because they need a failed stage: 2"
    assert list((tmp_path / "out/stages").glob("teacher-witnesses-*/done.json"))
    assert not list((tmp_path / "out/stages").glob("teacher-mine-*"))


def test_what_failed_is_run_once_it_can_be(tmp_path: Path, capsys: Capture) -> None:
    recipe = two_tasks(tmp_path)
    run(capsys, "teach", recipe, "--out", tmp_path / "out")
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps({"q": f"q{i}", "o": ["x", "y"], "a": "A"}) + "\n" for i in range(60))
    )
    told = run(capsys, "teach", recipe, "--out", tmp_path / "out")
    assert re.findall(r"^\[\d/\d\] (.*)$", told.err, re.MULTILINE) == ["questions mine", "responses mine"]
    # The embedded world's teacher cannot answer questions that name no witness, and says so.
    assert "responses mine: ValueError: question " in told.err
    assert list((tmp_path / "out/stages").glob("questions-mine-*/done.json"))


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, capsys: Capture) -> None:
    with lock_run(tmp_path / "out"):
        told = run(capsys, "teach", write_recipe(tmp_path), "--out", tmp_path / "out")
    assert told.code == 2
    assert told.err.startswith(f"catto: {tmp_path / 'out'}: another run is working in this folder")
    assert told.err.count("\n") == 1


def test_ctrl_c_is_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tasks={"witnesses": {"train": 3000}})
    # Started in a shell's background, this suite and its children would ignore Ctrl-C.
    heard = "import signal, catto.cli; signal.signal(signal.SIGINT, signal.default_int_handler); catto.cli.main()"
    command = [sys.executable, "-c", heard, "teach", str(recipe), "--out", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    parts = tmp_path / "out/stages"
    deadline = time.monotonic() + 900
    while not any(path.stat().st_size > 10_000 for path in parts.glob("responses-*.part-*/generations.part.jsonl")):
        assert process.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "catto: interrupted; the same command resumes from here"
    assert "Traceback" not in errors
    assert catto("teach", recipe, "--out", "out", cwd=tmp_path).returncode == 0
    assert [path.name for path in parts.glob("*.part*")] == []


def test_in_a_terminal_there_is_one_display(tmp_path: Path) -> None:
    """Both bars stand on the terminal, and what the command prints at its end comes after them, on stdout."""
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "catto", "teach", str(write_recipe(tmp_path, methods=["sft"])), "--out", "out"]
    environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=follower, text=True
    )
    os.close(follower)
    shown = b""
    try:
        while chunk := os.read(leader, 65536):
            shown += chunk
    except OSError:  # the other end is closed: Linux says EIO
        pass
    out, _ = process.communicate(timeout=900)
    os.close(leader)
    assert process.returncode == 0
    assert "400 responses to 40 of 40 questions" in out
    assert b"stages" in shown
    assert b"3/3" in shown
    assert b"400/400" in shown
    assert b"[1/3]" not in shown


# ---- another parser, another wording: what is run again ---------------------------------------------------------

SMALL: dict[str, Any] = {
    "methods": ["sft", "sft+ts", "sft+tl"],
    "evaluation": {**RECIPE["evaluation"], "batch_size": 16},
}


def again(recipe: Path, root: Path) -> dict[str, str]:
    """Run all but the report in this process; stage -> how it ended."""
    from catto.pipeline import run as runner
    from catto.pipeline.plan import Graph
    from catto.recipe.load import load_recipe

    ends: dict[str, str] = {}

    class Ends:
        def started(self, stage: Stage, number: int, total: int) -> None:
            pass

        def progress(self, stage: Stage, finished: int, total: int, note: str) -> None:
            pass

        def ended(self, stage: Stage, outcome: str, seconds: float) -> None:
            ends[stage.name] = outcome

    read = load_recipe(str(recipe))
    goals = [
        goal for cell in Graph(read).list_cells() for goal in (cell.predictions, cell.candidates) if goal is not None
    ]
    assert not runner.run_goals(root, goals, Ends()).failed
    return ends


def test_each_scaling_rescales_by_its_own_temperature(tmp_path: Path) -> None:
    from catto.metrics.temperature import confidence_at

    root = tmp_path / "run"
    again(write_recipe(tmp_path, **SMALL), root)
    for suffix, fitted, kind in (("+ts", "tau-sft", "raw"), ("+tl", "tau-among-labels-sft", "normalized")):
        (path,) = (root / "stages").glob(f"scaled-sft{suffix}-*/scaled.jsonl")
        (temperature,) = (root / "stages").glob(f"{fitted}-*/temperature.json")
        tau, rows = json.loads(temperature.read_text())["tau"], list(read_records(path, Prediction))
        assert [row.confidence for row in rows] == [confidence_at(row, tau, kind) for row in rows]
        assert all(row.confidence != row.confidence_raw for row in rows)


def test_another_parser_reads_again_and_nothing_is_asked_trained_or_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows come out the same, so the training and all that its model wrote are taken over as they are."""
    recipe, root = write_recipe(tmp_path, **SMALL), tmp_path / "run"
    train = "sft witnesses seed 0 lr 0.001"

    def parser(version: int) -> None:
        monkeypatch.setattr("catto.answer.forms.VERSION", version)

    assert set(again(recipe, root).values()) == {"done"}
    assert again(recipe, root) == {}
    parser(VERSION + 1)
    with monkeypatch.context() as patched:  # the labels are where they were, so no model is loaded to score them
        patched.setattr(
            "catto.pipeline.kinds.generating.open_engine", lambda *_, **__: pytest.fail("a model was loaded")
        )
        second = again(recipe, root)
    kinds = {name: name.split()[0] for name in second}
    assert "responses" not in kinds.values()  # their keys are the same
    assert {second[name] for name in second if kinds[name] == "generated" or name == train} == {"unchanged"}
    assert {kinds[name] for name in second if second[name] == "done"} == {
        "teacher",
        "traces",
        "validation",
        "test",
        "read",
    }
    for kind in ("test-sft-*/predictions.jsonl", "candidates-*/scaled.jsonl", "sft-*/model/model.safetensors"):
        old, new = (root / "stages").glob(kind)
        assert old.read_bytes() == new.read_bytes()
    # A model that was cut short is no model: it is trained again.
    for weights in (root / "stages").glob("sft-*/model/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-1])
    parser(VERSION + 2)
    assert again(recipe, root)[train] == "done"


def test_generations_without_scores_are_scored_by_the_model(finished: Finished, tmp_path: Path) -> None:
    """Those of an earlier version; of some the scores are there."""
    from catto.pipeline.kinds.reading import run_reading
    from catto.pipeline.plan import Graph
    from catto.pipeline.stage import Work, list_needed, stage_dir
    from catto.recipe.load import load_recipe

    root = tmp_path / "run"
    shutil.copytree(finished.root, root)
    stages = list_needed([Graph(load_recipe(str(finished.recipe))).plan_report()])
    stage = next(stage for stage in stages if stage.name.startswith("test dpo "))
    expected = list(read_records(stage_dir(root, stage) / "predictions.jsonl", Prediction))
    path = stage_dir(root, stage.needs["generated"]) / "generations.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "labels": []} if n % 2 else row) + "\n" for n, row in enumerate(rows)))
    manifest = manifest_path(path)
    known = json.loads(manifest.read_text())
    assert known["notes"].pop("positions") == 512
    manifest.write_text(json.dumps(known))
    work: Work = Work(stage, root, tmp_path / "out", lambda *_: None)
    work.out.mkdir()
    run_reading(work)
    predictions = list(read_records(work.out / "predictions.jsonl", Prediction))
    for number, (mine, stored) in enumerate(zip(predictions, expected, strict=True)):
        assert (mine == stored) or number % 2
        assert mine.label == stored.label
        assert mine.label_logprobs == pytest.approx(stored.label_logprobs, abs=1e-5)
    assert predictions != expected  # a pass over the whole sequence rounds differently


# ---- one stage at a time ----------------------------------------------------------------------------------------


def test_stages_run_one_by_one_in_any_order_that_respects_needs(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a scheduler would: by the keys of the plan, from the recipe that is stored in the folder."""
    from catto.pipeline.plan import Graph, store_recipe
    from catto.pipeline.stage import list_needed, stage_dir
    from catto.recipe.load import load_recipe

    recipe, root = load_recipe(str(write_recipe(tmp_path))), tmp_path / "out"
    stages = list_needed([Graph(recipe).plan_teacher_rows("witnesses")])
    told = run(capsys, "stage", root, stages[0].key)
    assert (told.code, told.err.count("no recipe is stored here")) == (2, 1)
    store_recipe(root, recipe)
    monkeypatch.setattr("catto.pipeline.run.SECONDS_TO_WAIT", 0.0)
    told = run(capsys, "stage", root, stages[1].key)
    assert (told.code, told.err.splitlines()[-1]) == (
        2,
        "catto: responses witnesses needs unfinished stages: questions witnesses",
    )
    told = run(capsys, "stage", root, "0" * 16)
    assert (told.code, told.err.count(f"{'0' * 16} is not a stage of the recipes stored here")) == (2, 1)
    for stage in stages:
        assert run(capsys, "stage", root, stage.key).out == f"{stage.name}: done\n"
        assert run(capsys, "stage", root, stage.key[:8]).out == f"{stage.name}: already done\n"
    run(capsys, "teach", tmp_path / "tiny.yaml", "--out", tmp_path / "other")
    for stage in stages:
        for path in stage_dir(tmp_path / "other", stage).glob("*.jsonl"):
            assert (stage_dir(root, stage) / path.name).read_bytes() == path.read_bytes()


def test_a_stage_that_fails_names_its_log(tmp_path: Path, capsys: Capture) -> None:
    from catto.pipeline.plan import Graph, store_recipe
    from catto.recipe.load import load_recipe

    recipe = load_recipe(str(two_tasks(tmp_path)))
    store_recipe(tmp_path / "out", recipe)
    told = run(capsys, "stage", tmp_path / "out", Graph(recipe).plan_questions("mine").key)
    assert told.code == 1
    assert re.search(r"catto: questions mine: DataError: .*mine.jsonl row 1: .*; its log: ", told.err)
