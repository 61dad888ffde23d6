"""The files that the readers of docs/tutorials own, made with fixed seeds.

`python tests/project/tutorial_samples.py FOLDER` writes them, to follow a tutorial by hand.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from catto.prompts import render_completion, render_messages
from catto.recipe.settings import ScratchModel
from catto.records import Option, Prediction, Question, Split

REASONING = "The signs decide."
CHOICES = ("sun", "rain", "snow", "fog")
SKIES = ("clear", "grey", "white", "red", "dark", "hazy")
WINDS = ("north", "east", "south", "west", "calm", "gusty")
OWN_QUESTIONS = 800
TRAINING_QUESTIONS = 320
TRAINING_STEPS = 150
BATCH_SIZE = 32
SHARPNESS = 4.0  # multiplies the trained model's logits; preference training has the same effect


def write_samples(folder: Path) -> None:
    """Write every file that one of the tutorials starts from."""
    write_questions(folder / "questions.jsonl")
    write_model(folder / "my-dpo-model")
    write_harness_log(folder / "samples_arc_base.jsonl", sharpness=1.0)
    write_harness_log(folder / "samples_arc_tuned.jsonl", sharpness=2.2)
    write_table(folder / "graded.csv")
    write_predictions(folder / "validation-answers.jsonl", "validation", 600, seed=1)
    write_predictions(folder / "held-out-answers.jsonl", "test", 1500, seed=2)
    write_predictions(folder / "test-answers.jsonl", "test", 1500, seed=3)


def draw_questions(count: int, *, seed: int) -> list[Question]:
    """Draw questions about tomorrow's weather. Sky and wind decide how probable each answer is."""
    signs = np.random.default_rng(0)
    sky_scores = signs.normal(0.0, 2.5, size=(len(SKIES), len(CHOICES)))
    wind_scores = signs.normal(0.0, 0.5, size=(len(WINDS), len(CHOICES)))
    draws = np.random.default_rng(seed)
    questions = []
    for number in range(count):
        sky = int(draws.integers(len(SKIES)))
        wind = int(draws.integers(len(WINDS)))
        weights = np.exp(sky_scores[sky] + wind_scores[wind])
        gold = str(draws.choice(CHOICES, p=weights / weights.sum()))
        text = f"Report {seed}{number:04d}: the sky is {SKIES[sky]}, the wind is {WINDS[wind]}. What comes tomorrow?"
        options = tuple(Option(label=choice, text=choice) for choice in CHOICES)
        question = Question(
            id=str(number), task="weather", split="train", fields={"question": text}, options=options, gold=gold
        )
        questions.append(question)
    return questions


def write_questions(path: Path) -> None:
    """Write multiple-choice questions with the columns question, choices and answer."""
    rows = []
    for question in draw_questions(OWN_QUESTIONS, seed=2):
        rows.append({"question": question.fields["question"], "choices": question.labels, "answer": question.gold})
    write_rows(path, rows)


def write_model(path: Path) -> None:
    """Train a small model on questions of the same kind, and sharpen it until it is overconfident."""
    import torch

    from catto.training.models import scratch_model, word_tokenizer

    chats = [chat_of(question) for question in draw_questions(TRAINING_QUESTIONS, seed=1)]
    texts = []
    for chat in chats:
        for message in chat:
            texts.append(re.sub(r"Report \d+", "Report", message["content"]))  # numbers stay unknown words
    tokenizer = word_tokenizer(texts)
    model = scratch_model(tokenizer, ScratchModel(layers=1, width=32, heads=2, intermediate=64), seed=0)
    rows = [tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"] for chat in chats]
    tokens = torch.tensor(rows)  # all chats have the same number of words
    prompt = tokenizer.apply_chat_template(chats[0][:-1], tokenize=False, add_generation_prompt=True)
    labels = tokens.clone()
    labels[:, : len(tokenizer(prompt)["input_ids"])] = -100
    draws = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(TRAINING_STEPS):
        batch = torch.tensor(draws.integers(len(rows), size=BATCH_SIZE))
        optimizer.zero_grad()
        model(input_ids=tokens[batch], labels=labels[batch]).loss.backward()
        optimizer.step()
    with torch.no_grad():
        model.model.norm.weight *= SHARPNESS
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def chat_of(question: Question) -> list[dict[str, str]]:
    """Return the prompt of `catto eval` and the right response."""
    chat = [message.model_dump() for message in render_messages(question)]
    return [*chat, {"role": "assistant", "content": render_completion(REASONING, question.gold)}]


def write_harness_log(path: Path, *, sharpness: float) -> None:
    """Write a log of lm-evaluation-harness. Log-likelihoods are multiplied by `sharpness`, 1 is calibrated."""
    draws = np.random.default_rng(0)
    rows = []
    for number in range(800):
        scores = draws.normal(0.0, 1.5, size=4)
        probabilities = np.exp(scores) / np.exp(scores).sum()
        gold = int(draws.choice(4, p=probabilities))
        logged = sharpness * np.log(probabilities) - 20.0
        rows.append(harness_row(number, [round(float(score), 4) for score in logged], gold))
    write_rows(path, rows)


def harness_row(number: int, scores: list[float], gold: int) -> dict[str, Any]:
    """Return one line of `samples_*.jsonl`, where the harness writes scores as text."""
    choices = ["the wind", "the tide", "the sun", "the moon"]
    arguments = {}
    for place, choice in enumerate(choices):
        arguments[f"gen_args_{place}"] = {"arg_0": "Question:", "arg_1": f" {choice}"}
    return {
        "doc_id": number,
        "doc": {"id": f"arc-{number}"},
        "target": str(gold),
        "arguments": arguments,
        "resps": [[[str(score), "False"]] for score in scores],
        "filtered_resps": [[str(score), "False"] for score in scores],
        "filter": "none",
        "metrics": ["acc"],
        "acc": float(int(np.argmax(scores)) == gold),
    }


def write_table(path: Path) -> None:
    """Write a spreadsheet of graded answers with column names of its own."""
    draws = np.random.default_rng(4)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["item", "p", "graded"])
        for number in range(400):
            stated = float(draws.uniform(0.5, 1.0))
            is_correct = bool(draws.random() < stated - 0.1)
            writer.writerow([f"item-{number}", f"{stated:.3f}", int(is_correct)])


def write_predictions(path: Path, split: Split, count: int, *, seed: int) -> None:
    """Write answers as `catto eval` does, from a model that states more confidence than it has."""
    draws = np.random.default_rng(seed)
    labels = ("A", "B", "C", "D")
    rows = []
    for number in range(count):
        scores = draws.normal(0.0, 5.0, size=4)
        probabilities = np.exp(scores) / np.exp(scores).sum()
        gold = str(draws.choice(labels, p=probabilities))
        stated = probabilities**2 / (probabilities**2).sum()
        place = int(np.argmax(stated))
        rows.append(
            Prediction(
                question=f"{seed}-{number}",
                task="questions",
                split=split,
                gold=gold,
                sample=0,
                text=f"<answer>\n{labels[place]}\n</answer>",
                label=labels[place],
                source="free",
                confidence=float(stated[place]),
                temperature=0.0,
                seed=0,
                engine="server",
                model="my-model",
            ).model_dump(exclude_none=True)
        )
    write_rows(path, rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_samples(target)
