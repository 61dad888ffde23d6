"""What each command prints: its help page, its results on small files and its refusals, one file per command.

`make snapshots` writes the files in `snapshots/` again; read the difference before you commit it.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from pathlib import Path

import pytest
from command import run, write_lines

SNAPSHOTS = Path(__file__).parent / "snapshots"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

# Command -> what is typed after `catto`, in a folder with the files of `_write_inputs`.
TYPED: dict[str, list[str]] = {
    "catto": ["--help", "--version", "mesure", ""],
    "measure": [
        "measure --help",
        "measure answers.jsonl",
        "measure answers.jsonl --by task --metrics accuracy,ece --resamples 100",
        "measure answers.jsonl --compare other.jsonl --resamples 100",
        "measure answers.jsonl --target-risk 0.4 --brier-split --resamples 100",
        "measure missing.jsonl",
        "measure empty.jsonl",
        "measure percentages.jsonl",
        "measure broken.jsonl",
        "measure text.txt",
        "measure answers.jsonl --confidence p",
        "measure answers.jsonl --metrics eec",
        "measure answers.jsonl --bins 0",
        "measure answers.jsonl --binz 3",
    ],
    "report": ["report --help", "report", "report missing", "report answers.jsonl --baseline other"],
    "calibrate": [
        "calibrate --help",
        "calibrate fit --help",
        "calibrate apply --help",
        "calibrate threshold --help",
        "calibrate fit answers.jsonl --out tau.json",
        "calibrate apply tau.json other.jsonl --out calibrated.jsonl",
        "calibrate fit answers.jsonl --out answers.jsonl",
        "calibrate fit answers.jsonl --method plat --out tau.json",
        "calibrate apply missing.json answers.jsonl --out calibrated.jsonl",
        "calibrate threshold answers.jsonl --target-risk 0.1 --out threshold.json",
    ],
    "lm-eval": ["lm-eval --help", "lm-eval"],
    "select": ["select --help", "select answers.jsonl", "select missing.jsonl"],
    "eval": [
        "eval --help",
        "eval no-such-model --task witnesses --out eval",
        "eval no-such-model --task witneses --out eval",
        "eval no-such-model --out eval",
        "eval model --task witnesses --engine server",
    ],
    "data": ["data --help", "data witnesses --n 1", "data witneses", "data --file missing.csv"],
    "run": ["run --help", "run quickstrt", "run broken.yaml", "run quickstart --set evaluation.bin=3"],
    "plan": ["plan --help", "plan quickstart --out runs/quickstart", "plan missing.yaml"],
    "recipe": ["recipe --help"],
    "verify": ["verify --help", "verify missing"],
    "stage": ["stage --help"],
    "teach": ["teach --help"],
    "train": ["train --help"],
    "serve": ["serve --help", "serve --task mmlu"],
    "doctor": ["doctor --help"],
}


def _is_pinned(package: str) -> bool:
    """Whether a package has the version of constraints.txt; help pages differ between versions of typer and rich."""
    return f"{package}=={importlib.metadata.version(package)}\n" in CONSTRAINTS.read_text(encoding="utf-8")


def _write_inputs(folder: Path) -> None:
    """Write small files with fixed numbers into a folder."""
    answers = []
    other = []
    for index in range(60):
        confidence = round(0.4 + 0.01 * index, 2)
        row = {"question": f"q{index}", "task": "ab"[index % 2], "confidence": confidence, "correct": index % 3 > 0}
        answers.append(row)
        other.append({**row, "confidence": round(confidence / 2, 3), "correct": index % 4 > 0})
    write_lines(folder / "answers.jsonl", answers)
    write_lines(folder / "other.jsonl", other)
    write_lines(folder / "percentages.jsonl", [{"confidence": 87, "correct": True}])
    (folder / "empty.jsonl").write_text("", encoding="utf-8")
    (folder / "broken.jsonl").write_text(json.dumps(answers[0]) + '\n{"confidence": 0.5, \n', encoding="utf-8")
    (folder / "text.txt").write_text("hello", encoding="utf-8")
    (folder / "broken.yaml").write_text("name: mine\nmethods: [dpo\n", encoding="utf-8")


@pytest.mark.parametrize("command", TYPED)
def test_command_prints_its_snapshot(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if not (_is_pinned("typer") and _is_pinned("rich")):
        pytest.skip("other versions of typer and rich print other help pages")
    _write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    printed = ""
    for typed in TYPED[command]:
        done = run(capsys, *shlex.split(typed))
        lines = [
            f"$ catto {typed}".rstrip(),
            *done.out.splitlines(),
            *done.err.splitlines(),
            f"[exit code {done.code}]",
        ]
        printed += "\n".join(line.rstrip() for line in lines) + "\n\n"
    snapshot = SNAPSHOTS / f"{command}.txt"
    if request.config.getoption("--update-snapshots"):
        snapshot.write_text(printed, encoding="utf-8")
    assert printed == snapshot.read_text(encoding="utf-8"), "run `make snapshots` and read the difference"
