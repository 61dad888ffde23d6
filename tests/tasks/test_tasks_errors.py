"""Bad input to a task is one clear line that names the file, the row and the field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from catto.errors import DataError
from catto.tasks import from_file, load_questions

CSQA = {
    "id": "q1",
    "question": "Which?",
    "choices": {"label": list("ABCDE"), "text": ["a", "b", "c", "d", "e"]},
    "answerKey": "A",
}
MMLU = {"question": "Which?", "choices": ["1", "2", "3", "4"], "answer": 0}
SNLI = {"premise": "p", "hypothesis": "h", "label": 0}


def message(task: str, rows: list[dict[str, Any]] | bytes, folder: Path, name: str = "test.jsonl") -> str:
    """Load a file with the rows as every split of the task; return the one line it fails with."""
    path = folder / name
    path.write_bytes(rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode())
    with pytest.raises(DataError) as caught:
        list(load_questions(task, "test", files={"train": path, "validation": path, "test": path}))
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(str(path))
    return said.removeprefix(str(path)).strip()


def test_an_unknown_answer_names_file_row_field_and_labels(tmp_path: Path) -> None:
    rows = [CSQA | {"id": f"q{n}"} for n in range(16)] + [CSQA | {"id": "last", "answerKey": "F"}]
    assert message("commonsense_qa", rows, tmp_path) == "row 17: answerKey 'F' is not one of A, B, C, D, E"


@pytest.mark.parametrize(
    ("task", "row", "said"),
    [
        ("commonsense_qa", {**CSQA, "question": None}, "question: missing"),
        ("commonsense_qa", {**CSQA, "question": 7}, "question: expected text, got int"),
        (
            "commonsense_qa",
            {**CSQA, "choices": {"label": ["A"], "text": ["a"]}},
            "choices: expected 5 options, got 1",
        ),
        ("mmlu", {**MMLU, "answer": 4}, "answer 4 is not one of 0, 1, 2, 3"),
        ("mmlu", {**MMLU, "answer": True}, "answer True is not one of"),
        ("mmlu", {**MMLU, "choices": ["1", "2"]}, "choices: expected 4 options, got 2"),
        ("mmlu", {**MMLU, "choices": "1234"}, "choices: expected a list of texts, got str"),
        ("mmlu", {**MMLU, "question": "half \ud800"}, "text is not valid Unicode"),
        ("snli", {**SNLI, "label": 3}, "label 3 is not one of 0, 1, 2"),
        ("snli", {"gold_label": "maybe"}, "gold_label 'maybe' is not one of entailment, neutral, contradiction"),
        ("anli", SNLI, "uid: missing"),
        ("tldr", {"prompt": "p", "chosen": "c"}, "rejected: missing"),
        ("tldr", {"info": {"post": "p"}, "summaries": [], "choice": 0}, "summaries: expected two"),
        ("reward_bench_2", {"id": "1", "prompt": "p", "chosen": ["c"]}, "rejected: missing"),
    ],
)
def test_a_bad_row_is_one_line(task: str, row: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert message(task, [row], tmp_path).startswith(f"row 1: {said}")


def test_a_repeated_source_id_names_the_second_row(tmp_path: Path) -> None:
    rows = [CSQA, CSQA | {"id": "q2"}, CSQA | {"question": "Another?"}]
    assert message("commonsense_qa", rows, tmp_path) == "row 3: id 'q1' occurs in an earlier row too"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"question": "\xff"}\n', "row 1: not UTF-8 at byte 14 of the line"),
        ("a.jsonl", b'{"question"', "row 1: not JSON:"),
        ("a.jsonl", b"[1]", "row 1: expected a JSON object, got list"),
        ("a.jsonl", b'{"question": "' + b"x" * 50_000_000, "row 1: line is longer than 16 MB"),
        ("a.csv", b"q,1,2,3,4\n", "row 1: expected 6 columns (question, A, B, C, D, answer), got 5"),
        ("a.csv", b"q,1,2,3,\xe9,A\n", ": line 1: not UTF-8 at byte 8"),
        ("a.csv", b"x" * 50_000_000, ": line 1: line is longer than 16 MB"),
        ("a.csv", b'"q"x,1,2,3,4,A\n', "row 1: not CSV:"),
        ("a.json", b'{"rows": []}', ': expected a JSON list of rows, or {"data": [...]}'),
        ("a.json", b"[1]", "row 1: expected a JSON object, got int"),
        ("a.json", b"[\xff]", ": not UTF-8 at byte 1"),
        ("a.json", b"[", ": not JSON:"),
        ("a.parquet", b"PAR0", ": not Parquet:"),
        ("a.jsonl.gz", b"plain", ": broken gzip file:"),
        ("a.txt", b"", ": expected a file that ends in .jsonl"),
    ],
)
def test_a_broken_file_is_one_line(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    assert message("mmlu", content, tmp_path, name).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "mmul"}, "task 'mmul' is not one of mmlu, snli"),
        ({"split": "dev"}, "split 'dev' is not one of train, validation, test"),
        ({"seed": 5}, "seed 5 is not one of mmlu's split seeds 0, 1, 2, 3, 4"),
        ({"limit": 0}, "limit 0: expected at least 1"),
        ({"files": {"dev": "x"}}, "files: 'dev' is not one of train, validation, test"),
        ({"files": {"test": "nowhere*.csv"}}, "nowhere*.csv: no such file"),
        ({"data_dir": "nowhere"}, "nowhere: no such folder"),
        ({"task": "witnesses", "data_dir": "."}, "witnesses is generated"),
    ],
)
def test_a_bad_argument_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_questions(**{"task": "mmlu", "split": "test", **options})
    assert str(caught.value).startswith(said)


def test_a_missing_split_says_which_there_are(tmp_path: Path) -> None:
    (tmp_path / "dev_r1.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"^anli: no file for train, only for validation$"):
        load_questions("anli", "train", data_dir=tmp_path)


def test_an_empty_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file for mmlu here"):
        load_questions("mmlu", "test", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fields": {"question": "q", "options": "o"}}, "fields: answer is missing"),
        ({"fields": {"question": "q", "options": "o", "gold": "a"}}, "fields: 'gold' is not one of"),
        ({"fields": {"question": "q", "options": "o", "answer": ["a"]}}, "fields: answer: expected one field name"),
        ({"answer": "letter"}, "answer 'letter' is not one of label, index, index1, text, boolean"),
    ],
)
def test_a_bad_field_map_is_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_file("x.jsonl", **{"fields": {"question": "q", "options": "o", "answer": "a"}, **options})
    assert str(caught.value).startswith(said)


def test_importing_the_tasks_loads_neither_torch_nor_datasets_nor_pyarrow() -> None:
    code = "import sys, catto.tasks; print(sorted({'torch', 'datasets', 'pyarrow', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['datasets'] = None\nfrom catto.tasks import load_questions\n"
        "try: list(load_questions('mmlu', 'test'))\nexcept ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "reading the hub needs datasets: pip install 'catto[train]'" in done.stdout
