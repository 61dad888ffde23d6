"""inspect_ai: the metrics and the scorer in its own evaluations, and `catto measure` on the log of each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import write_lines
from pages import ROOT, blocks

pytest.importorskip("inspect_ai", reason="inspect_ai (pip install inspect_ai)")

from inspect_ai import Task
from inspect_ai import eval as run_inspect
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    Logprob,
    Logprobs,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    get_model,
)
from inspect_ai.scorer import SampleScore, Score
from inspect_ai.solver import multiple_choice

from catto.answer_columns import read_graded
from catto.integrations.inspect_ai import choice_with_confidence, report_auroc, report_brier, report_ece
from catto.metrics.errors import brier, ece
from catto.metrics.ranking import auroc

pytestmark = pytest.mark.filterwarnings("ignore")  # what inspect_ai warns about is its own

LETTERS = "ABC"


def make_token(text: str, p: float, tops: dict[str, float] | None = None) -> Logprob:
    candidates = [TopLogprob(token=name, logprob=log(value)) for name, value in (tops or {}).items()]
    return Logprob(token=text, logprob=log(p), top_logprobs=candidates or None)


def make_output(text: str, tokens: Sequence[Logprob] | None) -> ModelOutput:
    logprobs = None if tokens is None else Logprobs(content=list(tokens))
    reply = ChatCompletionChoice(message=ChatMessageAssistant(content=text), logprobs=logprobs)
    usage = ModelUsage(
        input_tokens=1, output_tokens=1, total_tokens=2
    )  # else inspect_ai downloads a tokenizer to count
    return ModelOutput(model="mock", choices=[reply], usage=usage)


def answer_with(letter: str, shares: Sequence[float]) -> ModelOutput:
    """A reply that answers a letter, with the probability of each of the three letters."""
    tops = {f" {name}": share for name, share in zip(LETTERS, shares, strict=True)}
    last = make_token(f" {letter}", tops[f" {letter}"], tops)
    return make_output(f"ANSWER: {letter}", [make_token("ANSWER", 0.9), make_token(":", 0.99), last])


def run_task(outputs: Sequence[ModelOutput], targets: str, folder: Path, **options: Any) -> Any:
    """Run an evaluation of one question per output and return its log."""
    samples = []
    for number, target in enumerate(targets):
        samples.append(Sample(id=number, input=f"Question {number}?", choices=["x", "y", "z"], target=target))
    task = Task(dataset=samples, solver=multiple_choice(**options), scorer=choice_with_confidence())
    model = get_model("mockllm/model", custom_outputs=list(outputs))
    [finished] = run_inspect(task, model=model, log_dir=str(folder), display="none", max_connections=1)
    return finished


def read_metrics(finished: Any) -> dict[str, float]:
    [score] = finished.results.scores
    return {name: metric.value for name, metric in score.metrics.items()}


def test_an_evaluation_reports_what_catto_measures_in_its_log(tmp_path: Path) -> None:
    """Right at 0.7, wrong at 0.6, right at 0.5, and a reply without an answer, of probability 0.4 * 0.5 = 0.2.

    Brier: (0.3^2 + 0.6^2 + 0.5^2 + 0.2^2) / 4 = 0.185. All are in bins of their own: ECE (0.3 + 0.6 + 0.5 + 0.2) / 4.
    Of the four pairs of a right and a wrong answer, the right one has more confidence in three: AUROC 0.75.
    """
    silent = make_output("No idea", [make_token("No", 0.4), make_token(" idea", 0.5)])
    outputs = [
        answer_with("A", (0.7, 0.2, 0.05)),
        answer_with("B", (0.1, 0.6, 0.1)),
        answer_with("C", (0.2, 0.2, 0.5)),
        silent,
    ]
    finished = run_task(outputs, "ACCA", tmp_path)
    assert finished.status == "success"
    metrics = read_metrics(finished)
    assert metrics["accuracy"] == 0.5
    assert metrics["brier"] == pytest.approx(0.185, abs=1e-12)
    assert metrics["ece"] == pytest.approx(0.4, abs=1e-12)
    assert metrics["auroc"] == pytest.approx(0.75, abs=1e-12)

    answers = read_graded(Path(finished.location.removeprefix("file://")))
    assert answers.confidence.tolist() == pytest.approx([0.7, 0.6, 0.5, 0.2], abs=1e-12)
    assert answers.correct.tolist() == [True, False, True, False]
    assert answers.sources is not None
    assert answers.sources.fallback == 1
    for name, function in (("ece", ece), ("brier", brier), ("auroc", auroc)):
        assert metrics[name] == pytest.approx(function(answers.confidence, answers.correct), abs=1e-12)


def test_letters_of_shuffled_choices_are_those_of_the_sample(tmp_path: Path) -> None:
    """Shuffling by this seed asks for the choices in another order; the stored letters are those of the dataset."""
    from random import Random

    order = [0, 1, 2]
    Random(1).shuffle(order)
    assert order != [0, 1, 2]
    shares = (0.5, 0.3, 0.1)
    finished = run_task([answer_with("A", shares)], LETTERS[order[0]], tmp_path, shuffle=Random(1))
    [sample] = finished.samples
    score = sample.scores["choice_with_confidence"]
    assert score.value == "C"
    assert score.metadata["confidence"] == pytest.approx(0.5)
    expected = {LETTERS[original]: log(share) for original, share in zip(order, shares, strict=True)}
    assert score.metadata["label_logprobs"] == pytest.approx(expected)


def test_a_run_without_log_probabilities_is_an_error_that_says_so(tmp_path: Path) -> None:
    finished = run_task([make_output("ANSWER: A", None)], "A", tmp_path)
    assert finished.status == "error"
    assert "run with --logprobs --top-logprobs 20" in finished.error.message


def test_several_answers_to_one_question_are_refused(tmp_path: Path) -> None:
    tokens = [make_token("ANSWER", 0.9), make_token(":", 0.9), make_token(" A", 0.5), make_token(",B", 0.5)]
    finished = run_task([make_output("ANSWER: A,B", tokens)], "A", tmp_path, multiple_correct=True)
    assert finished.status == "error"
    assert "needs a single answer" in finished.error.message


def make_scores(*answers: tuple[float, Any]) -> list[SampleScore]:
    scores = []
    for number, (confidence, value) in enumerate(answers):
        scores.append(SampleScore(score=Score(value=value, metadata={"confidence": confidence}), sample_id=number))
    return scores


def test_metrics_read_the_confidence_of_any_scorer() -> None:
    """0.8 and 0.6 are in bins of their own: ECE (0.2 + 0.6) / 2, Brier (0.04 + 0.36) / 2."""
    scores = make_scores((0.8, "C"), (0.6, 0.0))
    assert report_ece()(scores) == pytest.approx(0.4, abs=1e-12)
    assert report_brier()(scores) == pytest.approx(0.2, abs=1e-12)
    assert report_auroc()(scores) == 1.0
    # One bin holds both: |0.5 - 0.7|.
    assert report_ece(bins=1)(scores) == pytest.approx(0.2, abs=1e-12)
    assert report_ece()([]) == 0.0


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (Score(value="C"), "sample 7: its score has no metadata.confidence"),
        (Score(value=0.5, metadata={"confidence": 0.5}), "sample 7: expected a right or a wrong answer, got 0.5"),
    ],
)
def test_a_score_that_cannot_be_measured_is_named(score: Score, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        report_ece()([SampleScore(score=score, sample_id=7)])


def test_names_are_found_by_the_entry_point() -> None:
    code = (
        "from inspect_ai._util.registry import registry_lookup as find\n"
        "kinds = [('metric', 'catto/ece'), ('metric', 'catto/brier'), ('metric', 'catto/auroc')]\n"
        "kinds.append(('scorer', 'catto/choice_with_confidence'))\n"
        "print([find(*kind) is not None for kind in kinds])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[True, True, True, True]", done.stderr


def write_page_task(folder: Path) -> None:
    """Write the task of the page to a file, and questions in the default form of inspect_ai."""
    page = (ROOT / "docs" / "use-with.md").read_text(encoding="utf-8")
    [code] = [block.text for block in blocks(page) if "inspect_ai" in block.text]
    (folder / "my_questions.py").write_text(code, encoding="utf-8")
    rows = []
    for text in ("the witness", "a label", "true or false", "reason"):
        rows.append({"input": text, "choices": ["red", "blue"], "target": "A"})
    write_lines(folder / "questions.jsonl", rows)


@pytest.mark.slow
def test_the_transformers_engine_of_inspect_ai(tmp_path: Path) -> None:
    """The task of the page. The probabilities of its replies are worked out again without a batch."""
    pytest.importorskip("transformers", reason="catto[train]")
    import torch
    from tiny import tiny_model, tiny_tokenizer

    model = tiny_model(max_position_embeddings=512)
    tokenizer = tiny_tokenizer()
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    write_page_task(tmp_path)
    command = [sys.executable, "-m", "inspect_ai", "eval", "my_questions.py", "--model", "hf/tiny", "--logprobs"]
    command += ["-M", "model_path=tiny", "-M", "device=cpu", "-M", "do_sample=false", "--max-tokens", "6"]
    command += ["--log-dir", "logs", "--log-format", "json", "--display", "plain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    [path] = (tmp_path / "logs").glob("*.json")
    answers = read_graded(path)
    logged = json.loads(path.read_text(encoding="utf-8"))
    [scorer] = logged["results"]["scores"]
    assert scorer["metrics"]["brier"]["value"] == pytest.approx(brier(answers.confidence, answers.correct), abs=1e-12)
    for confidence, sample in zip(answers.confidence, logged["samples"], strict=True):
        turns = [{"role": "user", "content": sample["messages"][0]["content"]}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        logged_tokens = sample["output"]["choices"][0]["logprobs"]["content"]
        spoken = tokenizer.convert_tokens_to_ids([token["token"] for token in logged_tokens])
        assert tokenizer.eos_token_id not in spoken
        with torch.no_grad():
            logprobs = model(torch.tensor([ids + spoken])).logits[0].float().log_softmax(-1)
        total = sum(float(logprobs[len(ids) + place - 1, token]) for place, token in enumerate(spoken))
        assert confidence == pytest.approx(exp(total), rel=1e-3)
    assert np.all(answers.confidence < 1)
