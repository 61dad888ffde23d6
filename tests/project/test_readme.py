"""The README does what it says: every block runs.

Blocks run in order in one folder, each in a process of its own. `make` and installing are left to the gate, and the
gateway to tests of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks

from catto.recipe.settings import ScratchModel
from catto.records import Question
from catto.tasks.witnesses import generate_questions

pytestmark = pytest.mark.slow

EXTENDING, DATA = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("extending", "data"))
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "MPLBACKEND": "Agg"}


def after(diff: str) -> str:
    """The script that a diff leads to."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the README takes for granted: a chat model, pairs, questions, and graded answers."""
    from catto.cli.data import choose_source
    from catto.cli.options import QuestionFileOptions
    from catto.tasks import load_questions
    from catto.training.models import scratch_model, word_tokenizer

    made = tmp_path_factory.mktemp("readme")
    questions = list(generate_questions("train", 60, seed=0)) + list(generate_questions("test", 60, seed=0))
    (made / "questions.jsonl").write_text("".join(question_line(one) for one in questions), encoding="utf-8")
    (made / "answers.jsonl").write_text("".join(answer_lines(300)), encoding="utf-8")
    own = choose_source(
        None,
        QuestionFileOptions(
            file=[str(made / "questions.jsonl")], fields="question=question,options=choices,answer=answer"
        ),
    )
    asked = [
        text
        for split in ("train", "validation", "test")
        for one in load_questions(own, split)
        for text in prompt_texts(one)
    ]
    pairs = [pair(question) for question in questions[:8]]
    texts = [message["content"] for one in pairs for part in one.values() for message in part]
    tokenizer = word_tokenizer(texts + asked + [text for one in questions for text in prompt_texts(one)])
    model = scratch_model(tokenizer, ScratchModel(layers=1, width=16, heads=2, intermediate=16), seed=0)
    for part in (model, tokenizer):
        part.save_pretrained(made / "my-sft-model")
    (made / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs), encoding="utf-8")
    return made


def question_line(question: Question) -> str:
    """A row of a user's own file of multiple-choice questions."""
    choices = [option.text or option.label for option in question.options]
    answer = choices[list(question.labels).index(question.gold)]
    return json.dumps({"question": " ".join(question.fields.values()), "choices": choices, "answer": answer}) + "\n"


def answer_lines(count: int) -> list[str]:
    """Graded answers of an overconfident model."""
    generator = random.Random(0)
    lines = []
    for _ in range(count):
        confidence = generator.uniform(0.6, 1.0)
        is_correct = generator.random() < confidence - 0.15
        lines.append(json.dumps({"confidence": confidence, "correct": is_correct}) + "\n")
    return lines


def prompt_texts(question: Question) -> list[str]:
    from catto.prompts import render_messages

    return [message.content for message in render_messages(question)]


def pair(question: Question) -> dict[str, list[dict[str, str]]]:
    """One row in TRL's conversational preference format."""
    from catto.prompts import render_completion, render_messages

    wrong = next(label for label in question.labels if label != question.gold)
    chosen, rejected = (render_completion("so it is", label) for label in (question.gold, wrong))
    return {
        "prompt": [message.model_dump() for message in render_messages(question)],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def run(command: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **QUIET, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def runnable(block: Block) -> bool:
    return block.language in ("python", "diff") or (block.language == "bash" and "make " not in block.text)


# Importing torch takes seconds, so neighbouring blocks share an interpreter; each has names of its own.
EACH = (
    "import json, sys\n"
    "for text in json.loads(sys.argv[1]):\n"
    "    exec(compile(text, 'block', 'exec'), {'__name__': 'block'})"
)


def execute(given: list[Block], folder: Path) -> list[str]:
    """Run blocks in order; what each shell block or row of Python blocks printed."""
    said = []
    for shell, group in groupby(filter(runnable, given), key=lambda block: block.language == "bash"):
        if shell:
            said += [run(["bash", "-euo", "pipefail", "-c", block.text], folder) for block in group]
        else:
            texts = [after(block.text) if block.language == "diff" else block.text for block in group]
            said.append(run([sys.executable, "-c", EACH, json.dumps(texts)], folder))
    return said


@pytest.fixture(scope="module")
def said(folder: Path) -> list[str]:
    """What the README printed and then the worked examples, whose blocks share an interpreter with its last one."""
    own_questions = [block for block in blocks(DATA) if block.language == "python"]
    return execute([*blocks(), *blocks(EXTENDING), *own_questions], folder)


def test_every_block_is_of_a_known_kind() -> None:
    assert {block.language for block in blocks()} == {"python", "diff", "bash", "bash install", "bash server"}


def test_blocks_run_in_order(folder: Path, said: list[str]) -> None:
    """One test, since later blocks read what earlier ones wrote."""
    assert (folder / "reliability.svg").read_text(encoding="utf-8").count("<svg")
    # The recommended training writes the first model, and starts the second training run from it.
    for model in ("calibrated-model", "my-dpo-model"):
        assert (folder / model / "model.safetensors").exists()
    assert (folder / "calibrator.json").exists()


def test_the_diff_changes_one_line() -> None:
    (diff,) = [block.text for block in blocks() if block.language == "diff"]
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and line]
    assert [line[0] for line in changed] == ["-", "+"]
    before = "".join(line[1:] + "\n" for line in diff.splitlines() if not line.startswith("+"))
    compile(before, "before", "exec")


def test_worked_examples_run(said: list[str]) -> None:
    assert "test questions;" in said[-1]  # of the first
    assert "NullBand(" in said[-1]  # of the last
    assert "10 {'question': " in said[-1]  # of the page on users' own questions
