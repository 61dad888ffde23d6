"""lm-evaluation-harness: its log against hand-worked numbers, and the harness itself where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from command import write_lines

from catto.formats.columns import ColumnNames
from catto.formats.lm_eval import read_lm_eval
from catto.integrations import lm_eval as plugin
from catto.metrics.errors import ece
from catto.report.build import build_report, results_of_files

DATE = "2026-01-02T03-04-05.678901"
TASKS = ("arc_challenge", "commonsense_qa", "hellaswag", "openbookqa", "piqa")


def log_line(number: int, scores: Sequence[float], gold: int, **more: Any) -> dict[str, Any]:
    """A line of a file of samples of a multiple-choice task."""
    best = list(scores).index(max(scores))
    arguments = {}
    for place in range(len(scores)):
        arguments[f"gen_args_{place}"] = {"arg_0": "Q:", "arg_1": f" choice {place}"}
    return {
        "doc_id": number,
        "target": str(gold),
        "arguments": arguments,
        "filtered_resps": [[str(score), "False"] for score in scores],
        "filter": "none",
        "metrics": ["acc"],
        "acc": float(best == gold),
        **more,
    }


def write_log(folder: Path, samples: dict[str, list[dict[str, Any]]], groups: dict[str, list[str]]) -> Path:
    """Write the log of a run as the harness does, and return its file of results."""
    for task, lines in samples.items():
        write_lines(folder / f"samples_{task}_{DATE}.jsonl", lines)
    document = {"configs": {task: {} for task in samples}, "group_subtasks": groups, "model_name": "org/tiny model"}
    results = folder / f"results_{DATE}.json"
    results.write_text(json.dumps(document), encoding="utf-8")
    return results


def answers(confidence: float, grades: Sequence[bool], start: int = 0) -> list[dict[str, Any]]:
    """Lines with two choices, of which the first has this probability, right or wrong by `grades`."""
    scores = (log(confidence), log(1 - confidence))
    return [log_line(start + place, scores, 0 if right else 1) for place, right in enumerate(grades)]


def test_the_ece_of_a_group_is_that_of_its_pooled_answers(tmp_path: Path) -> None:
    """Both tasks are sure by 0.75, in one bin. One has 1/2 of 2 right, the other 4/4.

    Their ECEs are |0.5 - 0.75| = |1 - 0.75| = 0.25, so the mean is 0.25. Pooled, 5/6 are right: |5/6 - 3/4| = 1/12.
    """
    samples = {"law": answers(0.75, [True, False]), "physics": answers(0.75, [True] * 4)}
    harness = plugin.read_log(write_log(tmp_path, samples, {"mmlu": ["law", "physics"]}))
    group, law, physics = harness.parts
    assert (group.name, law.name, physics.name) == ("mmlu", "law", "physics")
    assert group.title == "mmlu (pooled, 2 tasks)"
    assert len(group.answers) == 6
    assert group.answers.questions == 6  # two documents with number 0 are two questions
    assert ece(law.answers.confidence, law.answers.correct) == pytest.approx(0.25, abs=1e-12)
    assert ece(physics.answers.confidence, physics.answers.correct) == pytest.approx(0.25, abs=1e-12)
    assert ece(group.answers.confidence, group.answers.correct) == pytest.approx(1 / 12, abs=1e-12)


def test_groups_hold_the_tasks_of_the_groups_below_them(tmp_path: Path) -> None:
    samples = {name: answers(0.75, [True, False]) for name in ("algebra", "physics", "law")}
    groups = {"mmlu": ["stem", "law"], "stem": ["algebra", "physics"], "alone": ["law"]}
    harness = plugin.read_log(write_log(tmp_path, samples, groups))
    # A group of one task would repeat its line.
    assert [part.name for part in harness.parts] == ["mmlu", "stem", "algebra", "physics", "law"]
    assert list(harness.parts[0].tasks) == ["algebra", "physics", "law"]
    assert [part.name for part in harness.outer_parts] == ["mmlu"]


def test_a_task_that_generates_text_is_left_out_with_a_reason(tmp_path: Path) -> None:
    text = [{"doc_id": 0, "target": "4", "filtered_resps": ["four"], "arguments": {}, "metrics": ["em"], "em": 0.0}]
    samples = {"gsm8k": text, "law": answers(0.75, [True, False])}
    harness = plugin.read_log(write_log(tmp_path, samples, {"both": ["gsm8k", "law"]}))
    assert [part.name for part in harness.parts] == ["law"]
    [problem] = harness.problems
    assert problem.startswith("gsm8k is left out: ")
    assert "has texts" in problem


def test_lengths_of_choices_count_if_asked(tmp_path: Path) -> None:
    line = log_line(0, [-3.0, -4.5], 0, acc_norm=0.0)
    line["arguments"]["gen_args_0"]["arg_1"] = " red"
    line["arguments"]["gen_args_1"]["arg_1"] = " dark blue"
    results = write_log(tmp_path, {"colours": [line]}, {})
    [plain] = plugin.read_log(results).parts
    [normalised] = plugin.read_log(results, length_normalised=True).parts
    assert plain.answers.correct.tolist() == [True]
    assert normalised.answers.correct.tolist() == [False]


def test_the_page_has_groups_as_tasks(tmp_path: Path) -> None:
    """Pooled, 5 of 6 are right. The mean over the tasks of the group would be 3/4."""
    samples = {"law": answers(0.75, [True, False]), "physics": answers(0.6, [True] * 4), "piqa": answers(0.7, [False])}
    harness = plugin.read_log(write_log(tmp_path, samples, {"mmlu": ["law", "physics"]}))
    rows = list(plugin.list_page_rows(harness))
    assert len(rows) == 7
    assert rows[0] == {
        "question": "law 0",
        "task": "mmlu",
        "confidence": pytest.approx(0.75),
        "correct": True,
        "label": "0",
        "gold": "0",
        "text": "choice 0",
    }
    out = tmp_path / "page"
    results = results_of_files({harness.model: write_lines(tmp_path / "rows.jsonl", rows)}, ColumnNames(), out)
    assert build_report(results, out, out).exists()
    numbers = json.loads((out / "numbers.json").read_text(encoding="utf-8"))
    accuracy = {cell["task"]: cell["metrics"]["accuracy"]["value"] for cell in numbers["cells"]}
    assert accuracy == {"mmlu": 5 / 6, "piqa": 0.0}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("mmlu_stem", "mmlu_stem"),
        ("outer::inner", "outer__inner"),
        ("a" * 66, "a" * 55 + "-a7e8f2c5"),
    ],
)
def test_names_on_a_page_are_plain_and_short(name: str, shown: str) -> None:
    made = plugin.make_page_name(name)
    assert made[:55] == shown[:55]
    assert len(made) == len(shown)
    assert plugin.make_page_name(name + "b") != made


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["--tasks", "mmlu"], None),
        (["-o", "runs", "--tasks", "mmlu"], "runs"),
        (["--tasks", "mmlu", "--output_path", "runs/a.json"], "runs/a.json"),
        (["--output_path=runs"], "runs"),
    ],
)
def test_the_users_own_output_path_is_found(arguments: list[str], folder: str | None) -> None:
    expected = None if folder is None else Path(folder)
    assert plugin.find_log_folder(arguments) == expected


# ---- the files of tasks


def test_a_document_is_graded_as_its_line_in_the_log(tmp_path: Path) -> None:
    scores = [-2.5, -0.5, -1.0, -9.0]
    line = log_line(0, scores, 1)
    read = read_lm_eval(line, ColumnNames())
    graded = plugin.grade_choices([(score, False) for score in scores], 1)
    assert graded["ece"] == (read["confidence"], True)
    assert graded["acc"] == read["correct"]
    assert graded["brier"] == pytest.approx((1 - read["confidence"]) ** 2, abs=1e-15)


def test_metrics_of_all_documents_are_those_of_catto() -> None:
    """Two answers in the bin of 0.8 with 1 right, one right in that of 0.6: ECE (2 * 0.3 + 0.4) / 3.

    The wrong answer at 0.8 ties with a right one and beats the other: AUROC (0.5 + 0) / 2.
    """
    documents = [(0.8, True), (0.8, False), (0.6, True)]
    assert plugin.aggregate_ece(documents) == pytest.approx(1 / 3, abs=1e-12)
    assert plugin.aggregate_auroc(documents) == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize("key", ["B", " B ", "2"])
def test_the_answer_key_is_one_of_the_labels(key: str) -> None:
    labels = ["1", "2", "3"] if key == "2" else ["A", "B", "C"]
    doc = {"choices": {"label": labels, "text": ["x", "y", "z"]}, "answerKey": key}
    graded = plugin.process_answer_key(doc, [(-1.0, False), (-0.5, True), (-3.0, False)])
    assert graded["acc"] == 1.0


@pytest.mark.parametrize("label", [1, "1"])
def test_the_label_is_the_number_of_a_choice(label: object) -> None:
    assert plugin.process_label({"label": label}, [(-1.0, False), (-0.5, True)])["acc"] == 1.0


class FunctionLoader(yaml.SafeLoader):
    """Reads `!function` as the harness does: the dotted name of a function."""


def find_function(loader: FunctionLoader, node: yaml.ScalarNode) -> Any:
    module, _, name = loader.construct_scalar(node).rpartition(".")
    assert module == plugin.__name__
    return getattr(plugin, name)


FunctionLoader.add_constructor("!function", find_function)


def read_task_file(task: str) -> dict[str, Any]:
    text = (plugin.TASK_FOLDER / f"{task}_ece.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.load(text, FunctionLoader)
    return loaded


def test_the_files_of_tasks_name_functions_that_exist() -> None:
    assert sorted(path.stem for path in plugin.TASK_FOLDER.glob("*.yaml")) == [f"{task}_ece" for task in TASKS]
    for task in TASKS:
        content = read_task_file(task)
        [entry] = content["task"]
        assert content["group"] == f"{task}_ece"
        assert entry["task"] == task
        assert callable(entry["process_results"])
        assert [metric["metric"] for metric in entry["metric_list"]] == ["acc", "ece", "brier", "auroc"]


# ---- the harness itself

KEYED = {"choices": {"label": ["A", "B", "C", "D", "E"], "text": ["red", "blue", "a green", "grey", "pink"]}}
# A document of each dataset, in the layout of its files; the right choice is the second.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "arc_challenge": {"question": "What colour?", **KEYED, "answerKey": "B"},
    "commonsense_qa": {"question": "What colour?", **KEYED, "answerKey": "B"},
    "openbookqa": {"question_stem": "The colour is", **KEYED, "answerKey": "B"},
    "hellaswag": {
        "activity_label": "Paint",
        "ctx_a": "A wall",
        "ctx_b": "is",
        "endings": ["red", "blue", "wet [sic]", "old"],
        "label": "1",
    },
    "piqa": {"goal": "Paint a wall", "sol1": "with a brush", "sol2": "with tea", "label": 1},
}


def write_task(folder: Path, task: str, *, own: bool) -> None:
    """Write the file of a task with local documents; `own` keeps the grading of catto's file."""
    documents = [{**DOCUMENTS[task], "number": number} for number in range(3)]
    for document in documents:
        for field in ("question", "question_stem", "goal", "ctx_a"):
            if field in document:
                document[field] += " ?" * document["number"]
    data = write_lines(folder / f"{task}.jsonl", documents)
    text = (plugin.TASK_FOLDER / f"{task}_ece.yaml").read_text(encoding="utf-8")
    head, _, grading = text.partition("    process_results")
    local = f"    dataset_path: json\n    dataset_kwargs: {{data_files: {{validation: {data}}}}}\n"
    local += "    dataset_name: null\n    training_split: null\n    test_split: null\n"
    if own:
        local += f"    process_results{grading}"
    (folder / f"{task}_ece.yaml").write_text(head + local, encoding="utf-8")


def run_command(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "catto", "lm-eval", "--out", str(folder / "page"), "--", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def read_table(stdout: str) -> dict[str, dict[str, float]]:
    """Read the harness's own table: task -> metric -> value."""
    table: dict[str, dict[str, float]] = {}
    task = ""
    for line in stdout.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) != 9 or cells[0] in ("Tasks", "Groups") or set(cells[0]) == {"-"}:
            continue
        task = cells[0].removeprefix("- ") or task
        if cells[4] and not set(cells[4]) <= set("-:"):
            table.setdefault(task, {})[cells[4]] = float(cells[6])
    return table


def measure_samples(page: Path, task: str) -> dict[str, float]:
    """Measure a file of samples without catto: softmax, ECE over 20 bins by a loop, Brier score."""
    [path] = page.glob(f"log/*/samples_{task}_*.jsonl")
    confidences = []
    grades = []
    for line in path.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        scores = np.array([float(score) for score, _ in sample["filtered_resps"]])
        shares = np.exp(scores - scores.max())
        confidences.append(float((shares / shares.sum()).max()))
        grades.append(float(sample["acc"]))
    confidence = np.array(confidences)
    grade = np.array(grades)
    number = np.minimum((confidence * 20).astype(int), 19)
    total = 0.0
    for place in range(20):
        inside = number == place
        if inside.any():
            total += inside.mean() * abs(grade[inside].mean() - confidence[inside].mean())
    return {"acc": grade.mean(), "ece": total, "brier": ((confidence - grade) ** 2).mean()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("lm_eval", reason='lm-evaluation-harness (pip install "lm_eval[hf]")')
    pytest.importorskip("transformers", reason="catto[train]")
    from tiny import tiny_model, tiny_tokenizer

    folder = tmp_path / "tiny"
    tiny_model(max_position_embeddings=512).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_harness_prints_what_its_log_says(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tables = {}
    for own in (True, False):
        folder = tmp_path / str(own)
        folder.mkdir()
        for task in TASKS:
            write_task(folder, task, own=own)
        names = ",".join(f"{task}_ece" for task in TASKS)
        arguments = f"--model_args pretrained={model},dtype=float32 --device cpu --tasks {names}".split()
        stdout = run_command("--model", "hf", *arguments, "--include_path", str(folder), folder=folder)
        tables[own] = read_table(stdout)
        if own:
            assert (folder / "page" / "report.html").exists()
            numbers = json.loads((folder / "page" / "numbers.json").read_text(encoding="utf-8"))
            cells = {cell["task"]: cell["metrics"] for cell in numbers["cells"]}
    for task in TASKS:
        expected = measure_samples(tmp_path / "True" / "page", task)
        # The harness's own grading of the same documents.
        assert tables[False][task]["acc"] == tables[True][task]["acc"]
        for metric, ours in (("acc", "accuracy"), ("ece", "ece"), ("brier", "brier")):
            assert tables[True][task][metric] == pytest.approx(expected[metric], abs=5e-5)
            assert cells[task][ours]["value"] == pytest.approx(expected[metric], abs=1e-12)
