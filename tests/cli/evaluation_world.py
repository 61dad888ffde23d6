"""Questions, a tiny model that has learned to answer in form (mostly), and a dense reference for its labels."""

from __future__ import annotations

import itertools
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny import tiny_model, tiny_tokenizer

from catto.engines.transformers import TransformersEngine
from catto.predict import evaluate
from catto.prompts import prompt_ids, render_completion, render_messages
from catto.records import Option, Prediction, Question

LETTERS = tuple("ABCD")
NLI = ("entailment", "neutral", "contradiction")
WORDS = ("the", "a", "of", "is", "it", "because", "right", "wrong", "true", "false", "not", "and", "or")
# Answers in several forms, and some that are none: the parser and the fallback both get their share.
FORMS = ("\n{}\n", "\n{}\n", " {}", "{}", "\nthe answer is {}\n", "\n{} or {}\n")


def questions(count: int, labels: tuple[str, ...] = LETTERS) -> list[Question]:
    return [
        Question(
            id=f"q{i}",
            task="witnesses",
            split="test",
            fields={"question": " ".join(WORDS[(i * j) % len(WORDS)] for j in range(3 + i % 5))},
            options=tuple(Option(label=label, text=label) for label in labels),
            gold=labels[i % len(labels)],
        )
        for i in range(count)
    ]


@cache
def tokenizer() -> Any:
    asked = [question for labels in (LETTERS, NLI) for question in questions(20, labels)]
    return tiny_tokenizer([message.content for question in asked for message in render_messages(question)])


def _text(draws: random.Random, labels: tuple[str, ...]) -> str:
    reasoning = " ".join(draws.choices(WORDS, k=draws.randrange(2, 6)))
    if draws.random() < 0.1:
        return f"<think>\n{reasoning}"
    form = draws.choice(FORMS).format(*draws.sample(labels, 2))
    return render_completion(reasoning, None).removesuffix("\n") + form + "</answer>"


@cache
def model(**shape: int) -> Any:
    """Trained for a few seconds: greedy responses parse, of those sampled at 1.3 about a third."""
    made = tiny_model(0, vocab_size=len(tokenizer()), **shape)
    made.config.name_or_path = "tiny-answerer"
    draws = random.Random(0)
    rows = [(q, labels) for labels in (LETTERS, NLI) for q in questions(20, labels)]
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(100):
            _step(made, optimizer, [draws.choice(rows) for _ in range(16)], draws)
    return made.eval()


def _step(made: Any, optimizer: Any, rows: list[Any], draws: random.Random) -> None:
    pairs = [
        (prompt_ids(tokenizer(), render_messages(q)), encode(_text(draws, labels) + "<eos>")) for q, labels in rows
    ]
    width = max(len(prompt) + len(ids) for prompt, ids in pairs)
    padded = [[*prompt, *ids] + [0] * (width - len(prompt) - len(ids)) for prompt, ids in pairs]
    targets = [[-100] * len(prompt) + list(ids) + [-100] * (width - len(prompt) - len(ids)) for prompt, ids in pairs]
    loss = made(input_ids=torch.tensor(padded), labels=torch.tensor(targets)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def encode(text: str) -> list[int]:
    return list(tokenizer()(text, add_special_tokens=False)["input_ids"])


def engine(batch_size: int = 16) -> TransformersEngine:
    return TransformersEngine(model(), tokenizer(), batch_size=batch_size)


class Recording(TransformersEngine):
    """Keeps the token ids of every generation."""

    def generate(self, requests: Any, done: Any = ()) -> Any:
        self.ids: dict[tuple[str, int], list[int]] = getattr(self, "ids", {})
        for generation in super().generate(requests, done):
            self.ids[generation.key] = list(generation.token_ids or ())
            yield generation


def before(ids: list[int], characters: int) -> list[int]:
    """The tokens that end within the first characters; this vocabulary's tokens are their own texts."""
    kept, length = [], 0
    for token, text in zip(ids, tokenizer().convert_ids_to_tokens(ids), strict=True):
        length += len(text)
        if length > characters:
            break
        kept.append(token)
    return kept


def dense_logits(question: Question, prefix: list[int]) -> torch.Tensor:
    """Logits after prompt and prefix by one plain forward over the whole text, as float64: (V,)."""
    ids = [*prompt_ids(tokenizer(), render_messages(question)), *prefix]
    with torch.inference_mode():
        return model()(input_ids=torch.tensor([ids])).logits[0, -1].double()


def killable(folder: str, out: str, count: str, chunks: int | None = None) -> list[Prediction]:
    """What the killed process runs: the model from its folder, small chunks.

    After `chunks` it waits: however late the kill comes, the run is there to be killed.
    """
    loaded = TransformersEngine.load(folder, batch_size=2)
    generate, calls = loaded.generate, itertools.count()

    def held(*arguments: Any, **options: Any) -> Any:
        if next(calls) == chunks:
            time.sleep(600)
        return generate(*arguments, **options)

    loaded.generate = held  # type: ignore[method-assign]
    options: dict[str, Any] = {"k": 2, "temperature": 1.0, "max_tokens": 24}
    return evaluate(loaded, questions(int(count)), out=Path(out), **options)
