"""Reading a plain table at once gives what reading it row by row gives: the same answers or the same refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from catto import answer_columns
from catto.answer_columns import GradedAnswers, read_confidences
from catto.errors import DataError
from catto.formats.columns import ColumnNames
from catto.io import tables

ALWAYS, NEVER = 0, 1 << 60
NUMBERS = st.sampled_from(
    ["0.5", "1", "0", "1.0", "0.1234567890123456789", "5e-324", "1e-400", "-0", "-0.0", "0.30000000000000004"]
)
ODD_NUMBERS = st.sampled_from(["1.5", "87", "NaN", "Infinity", "1e400", "9" * 30, "9" * 400, "01", ".5", "+0.5", "1."])
TEXTS = st.sampled_from(
    [
        " ",
        "A",
        "B",
        "7",
        "007",
        "yes",
        "No",
        " true ",
        "0.5",
        " 0.5",
        "0x1p-1",
        "1_0",
        "\u0660.\u0665",
        "nan",
        "",
        "NA",
        "null",
    ]
)
DATES = st.sampled_from(
    ["2026-01-01", "2026-01-01 10:00:00", "2026-01-01T10:00:00Z", "\u2028", "a{b", "c}d", 'e":f', "\u00e9"]
)
CELLS = st.one_of(NUMBERS, st.sampled_from(["true", "false"]), TEXTS.map(json.dumps))
ODD_CELLS = st.one_of(
    ODD_NUMBERS, DATES.map(json.dumps), st.sampled_from(["null", "[]", "{}", '{"a": 1}', '"\\ud800"', "'x'"])
)
KEYS = ("confidence", "correct", "id", "label", "gold", "source", "t")
KINDS = st.sampled_from(
    [("confidence", "correct"), ("confidence", "correct", "id", "t"), ("confidence", "label", "gold", "source")]
)
LAYOUTS = st.sampled_from([(": ", ", "), (":", ","), (" : ", ", ")])


@st.composite
def json_lines(draw: st.DrawFn) -> str:
    """Lines of equal keys and mostly plain cells; now and then one line is broken in some way."""
    keys, (colon, comma) = draw(KINDS), draw(LAYOUTS)
    common = {
        "confidence": NUMBERS,
        "correct": st.sampled_from(["true", "false", "1", "0"]),
        "source": st.just('"free"'),
    }
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        cells = [draw(common.get(key, CELLS)) for key in keys]
        if draw(st.integers(0, 4)) == 0:
            cells[draw(st.integers(0, len(keys) - 1))] = draw(st.one_of(CELLS, ODD_CELLS))
        lines.append("{" + comma.join(f'"{key}"{colon}{cell}' for key, cell in zip(keys, cells, strict=True)) + "}")
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(lines) - 1))
        line = lines[place]
        broken = [
            line + line,
            line + " " + line,
            line[:-1],
            line[:-1] + ', "confidence": 0.1}',
            line.replace(",", ",\n", 1),
        ]
        broken += [
            line + " ",
            " " + line,
            "",
            "[]",
            line + ",",
            line[:-1] + ', "x": 1}',
            "{}",
            line + "\n\n",
            line + "\r",
        ]
        lines[place] = draw(st.sampled_from(broken))
    return "\n".join(lines) + draw(st.sampled_from(["\n", ""]))


@st.composite
def csv_files(draw: st.DrawFn) -> str:
    keys = draw(KINDS)
    cells = st.one_of(NUMBERS, st.sampled_from(["true", "False", "yes", "no", "1"]), TEXTS, ODD_NUMBERS, DATES)
    plain = {"confidence": NUMBERS, "correct": st.sampled_from(["true", "False", "yes", "0", " 1"])}
    rows = [",".join(keys)]
    for _ in range(draw(st.integers(0, 6))):
        row = [draw(plain.get(key, cells) if draw(st.integers(0, 5)) else cells) for key in keys]
        rows.append(",".join(row))
    if draw(st.integers(0, 3)) == 0:
        odd = ["", " ", "0.5", '"0.5",true', 'a"b,true', "0.5,true,x", "0.5;true", "\r", "0.5,\ttrue"]
        rows.insert(draw(st.integers(0, len(rows))), draw(st.sampled_from(odd)))
    return "\n".join(rows) + draw(st.sampled_from(["\n", ""]))


def outcome(path: Path, names: ColumnNames, smallest: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tables, "MIN_TABLE_BYTES", smallest)
    try:
        answers = read_confidences(path, names)
    except DataError as error:
        return str(error)
    correct = answers.correct.tolist() if isinstance(answers, GradedAnswers) else None
    return answers.confidence.tolist(), correct, answers.question, answers.by, answers.read_as


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_at_once_equals_row_by_row(form: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plain") / f"a.{form}"

    @settings(max_examples=300, deadline=None)
    @given(
        json_lines() if form == "jsonl" else csv_files(),
        st.sampled_from([ColumnNames(), ColumnNames(by="t"), ColumnNames(gold="gold")]),
    )
    @example('{"confidence": 0.5, "correct": true, "x": "2026-01-01"}\n', ColumnNames())
    def same(content: str, names: ColumnNames) -> None:
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.MonkeyPatch.context() as monkeypatch:
            fast, slow = (outcome(path, names, smallest, monkeypatch) for smallest in (ALWAYS, NEVER))
        assert fast == slow

    same()


@pytest.mark.parametrize(
    "content",
    ["confidence,correct,t\n0.5,true," + 200_000 * "x" + "\n", "\n\nconfidence,correct\n0.5,true\n"],
    ids=["a long cell", "lines before the header"],
)
def test_a_table_that_is_odd_and_whole_is_read_either_way(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.csv").write_text(content)
    for smallest in (ALWAYS, NEVER):
        assert outcome(tmp_path / "a.csv", ColumnNames(), smallest, monkeypatch)[:2] == ([0.5], [True])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"confidence": 0.25, "correct": true, "id": 7}\n{"confidence": 1, "correct": false, "id": 8}\n'),
        ("a.csv", "confidence,label,gold\n0.25,A,A\n1.0,B,C\n"),
    ],
)
def test_a_plain_table_is_read_at_once(
    name: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("read row by row")

    (tmp_path / name).write_text(content)
    monkeypatch.setattr(answer_columns, "read_answers", refused)
    found = outcome(tmp_path / name, ColumnNames(), ALWAYS, monkeypatch)
    assert found[:2] == ([0.25, 1.0], [True, False])
    assert found[2] == (["7", "8"] if name == "a.jsonl" else None)
