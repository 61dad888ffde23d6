"""`catto measure` refuses a bad file, option or pairing in one line, with the place."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Done, run, write_lines
from measure_rows import plain

from catto.answer_columns import read_graded
from catto.errors import DataError
from catto.formats.columns import ColumnNames

Capture = pytest.CaptureFixture[str]


BAD_ROWS: list[tuple[str, str]] = [
    ('{"confidence": 1.2, "correct": true}', "row 2: confidence: expected a number in [0, 1], got 1.2"),
    ('{"confidence": 87, "correct": true}', "divide percentages by 100"),
    ('{"confidence": NaN, "correct": true}', "row 2: confidence: expected a number in [0, 1], got nan"),
    ('{"confidence": null, "correct": true}', "row 2: confidence: expected a number in [0, 1], got None"),
    ('{"confidence": true, "correct": true}', "row 2: confidence: expected a number in [0, 1], got True"),
    ('{"confidence": "0_1", "correct": true}', "row 2: confidence: expected a number in [0, 1], got '0_1'"),
    ('{"confidence": "high", "correct": true}', "row 2: confidence: expected a number in [0, 1], got 'high'"),
    ('{"confidence": 1' + "0" * 400 + ', "correct": true}', "row 2: confidence: expected a number in [0, 1]"),
    ('{"correct": true}', "row 2: confidence: missing"),
    ('{"confidence": 0.5}', "row 2: correct: missing"),
    ('{"confidence": 0.5, "correct": "maybe"}', "row 2: correct: expected true or false"),
    ('{"confidence": 0.5, "correct": 2}', "row 2: correct: expected true or false"),
    ('{"confidence": 0.5, "correct": [1]}', "row 2: correct: expected true or false"),
    ("[0.5, true]", "row 2: expected a JSON object, got list"),
    ('{"confidence": 0.5, ', "row 2: not JSON"),
]


def refused(done: Done) -> str:
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    return done.err


@pytest.mark.parametrize(("line", "told"), BAD_ROWS)
def test_bad_row_is_one_line_with_file_row_and_field(tmp_path: Path, capsys: Capture, line: str, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"confidence": 0.5, "correct": true}\n' + line + "\n", encoding="utf-8")
    error = refused(run(capsys, "measure", path))
    assert "bad.jsonl row 2" in error
    assert told in error


@pytest.mark.parametrize("logprobs", ["null", "{}", '{"A": 0.5}', '{"A": NaN}', '{"A": "x"}', "[1]"])
def test_bad_label_logprobs_are_told(tmp_path: Path, capsys: Capture, logprobs: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"gold": "A", "label_logprobs": ' + logprobs + "}\n", encoding="utf-8")
    assert "row 1: label_logprobs" in refused(run(capsys, "measure", path))


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.jsonl", "", "has no rows"),
        ("empty.csv", "confidence,correct\n", "has no rows"),
        ("a.txt", "x", "expected a file that ends in .jsonl"),
        ("a.json", "3", "expected a JSON list"),
        ("a.csv", "confidence,correct\n0.5\n", "row 1: expected 2 columns (confidence, correct), got 1"),
        ("a.jsonl", '{"confidences": 0.5, "correct": 1}', "no column 'confidence'; did you mean confidences?"),
        ("a.jsonl", '{"confidence": 0.5, "label": "A"}', "no column 'correct', nor 'label' and 'gold'"),
        ("a.jsonl.gz", "no gzip", "broken gzip file"),
    ],
)
def test_bad_file_is_one_line(tmp_path: Path, capsys: Capture, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    error = refused(run(capsys, "measure", tmp_path / name))
    assert name in error
    assert told in error


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--metrics", "ecee"), "unknown metric 'ecee'; did you mean ece?"),
        (("--metrics", ","), "no metric named"),
        (("--by", "tusk"), "no column 'tusk'; did you mean task?"),
        (("--correct", "rigt"), "no column 'rigt'"),
        (("--unparsed", "wrong"), "no column 'source'"),
        (("--figure", "f.gif"), "must end in .svg, .png, .pdf"),
        (("--compare", "nowhere.jsonl"), "nowhere.jsonl: No such file"),
    ],
)
def test_wrong_option_is_one_line(tmp_path: Path, capsys: Capture, options: tuple[str, ...], told: str) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [{"confidence": 0.5, "correct": True, "task": "t", "right": 1, "source": "x"}]
    )
    assert told in refused(run(capsys, "measure", path, *options))


def test_missing_file_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert "none.jsonl: No such file" in refused(run(capsys, "measure", tmp_path / "none.jsonl"))


def test_compare_refuses_what_cannot_be_paired(tmp_path: Path, capsys: Capture) -> None:
    a = write_lines(tmp_path / "a.jsonl", plain()[:3])
    missing = write_lines(tmp_path / "b.jsonl", plain()[:2])
    twice = write_lines(tmp_path / "c.jsonl", [plain()[0], *plain()[:3]])
    nameless = write_lines(tmp_path / "d.jsonl", [{"confidence": 0.5, "correct": True}])
    told = {missing: "1 questions of", twice: "'q0' is in several rows", nameless: "no column 'question' or 'id'"}
    for other, message in told.items():
        error = refused(run(capsys, "measure", a, "--compare", other, "--resamples", "5"))
        assert message in error
        assert other.name in error


def test_by_must_be_there_in_every_row(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl", [{"confidence": 0.5, "correct": 1, "t": "x"}, {"confidence": 0.5, "correct": 1}]
    )
    with pytest.raises(DataError, match="row 2: t: missing"):
        read_graded(path, ColumnNames(by="t"))
