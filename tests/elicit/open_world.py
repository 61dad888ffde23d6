"""Sums with a tiny model that has learned the form of their answers, of judgements and of stated confidences."""

from __future__ import annotations

import random
import threading
from functools import cache
from typing import Any

import torch
from openai_server import Reply, Seen, chat, ok
from tiny import tiny_model, tiny_tokenizer

from catto.engines.transformers import TransformersEngine
from catto.prompts import prompt_ids, render_completion, render_judgement, render_messages
from catto.records import GRADES, Message, Option, Question

LOCK = threading.Lock()
LETTERS = tuple("ABCD")


def sums(count: int) -> list[Question]:
    questions = []
    for number in range(count):
        first = number % 5
        second = number // 5 % 5
        question = Question(
            id=f"s{number}",
            task="readings",
            split="test",
            fields={"question": f"{first} and {second}"},
            gold=str(first + second),
            accepted=(str(first + second),),
            grade="number",
        )
        questions.append(question)
    return questions


def choices(count: int) -> list[Question]:
    return [
        Question(
            id=f"c{number}",
            task="witnesses",
            split="test",
            fields={"question": f"witness {number % 10} says {LETTERS[number % 4]}"},
            options=tuple(Option(label=label, text=label) for label in LETTERS),
            gold=LETTERS[number % 4],
        )
        for number in range(count)
    ]


Example = tuple[tuple[Message, ...], str]


def _draw_example(question: Question, draws: random.Random) -> Example:
    """A prompt with a response: often right, at times without an answer or with a wrong one.

    A quarter of the sums are asked in the words of a user's own file.
    """
    if not question.has_labels and draws.random() < 0.25:
        grade = draws.choice(GRADES)
        question = question.model_copy(update={"task": "own", "grade": grade})
    answers = LETTERS if question.has_labels else tuple("012345678")
    answer = question.gold if draws.random() < 0.6 else draws.choice(answers)
    kind = draws.choice(("answer", "judgement", "stated"))
    if kind == "judgement":
        return render_judgement(question, answer), render_completion(None, str(answer == question.gold))
    response = render_completion("because", answer)
    if kind == "answer":
        return render_messages(question), response if draws.random() < 0.9 else "because\nit is"
    stated = f"{response}\n<confidence>0.{draws.randrange(3, 9)}</confidence>" if draws.random() < 0.8 else response
    return render_messages(question, confidence=True), stated


def _examples(count: int, draws: random.Random) -> list[Example]:
    questions = [*sums(25), *choices(20)]
    return [_draw_example(draws.choice(questions), draws) for _ in range(count)]


@cache
def tokenizer() -> Any:
    texts = []
    for turns, response in _examples(400, random.Random(0)):
        texts += [message.content for message in turns]
        texts.append(response)
    return tiny_tokenizer(texts)


@cache
def model() -> Any:
    made = tiny_model(0, vocab_size=len(tokenizer()), max_position_embeddings=512)
    made.config.name_or_path = "tiny-adder"
    draws = random.Random(1)
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(80):
            _train_step(made, optimizer, _examples(16, draws))
    return made.eval()


def _train_step(made: Any, optimizer: Any, examples: list[Example]) -> None:
    encode = tokenizer()
    rows = []
    for turns, response in examples:
        ids = encode(f"{response}<eos>", add_special_tokens=False)["input_ids"]
        rows.append((list(prompt_ids(encode, turns)), list(ids)))
    width = max(len(prompt) + len(ids) for prompt, ids in rows)
    inputs = []
    targets = []
    for prompt, ids in rows:
        padding = width - len(prompt) - len(ids)
        inputs.append([*prompt, *ids] + [0] * padding)
        targets.append([-100] * len(prompt) + ids + [-100] * padding)
    loss = made(input_ids=torch.tensor(inputs), labels=torch.tensor(targets)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def engine(batch_size: int = 16) -> TransformersEngine:
    return TransformersEngine(model(), tokenizer(), batch_size=batch_size)


def served(seen: Seen, *, continues: bool = True) -> Reply:
    """Answer with the tiny model: one forward per token, token texts and the 20 best candidates beside."""
    body = seen.body
    messages = [Message(**message) for message in body["messages"]]
    begun = ""
    if body.get("continue_final_message") and continues:
        begun = messages.pop().content
    prompt = [*prompt_ids(tokenizer(), messages), *tokenizer()(begun, add_special_tokens=False)["input_ids"]]
    generator = torch.Generator().manual_seed(body.get("seed") or 0)
    text = ""
    entries: list[dict[str, Any]] = []
    with LOCK, torch.inference_mode():
        while len(entries) < body["max_tokens"] and not any(stop in text for stop in body.get("stop") or ()):
            ids = [*prompt, *tokenizer()(text, add_special_tokens=False)["input_ids"]]
            logits = model()(input_ids=torch.tensor([ids])).logits[0, -1].double()
            token = int(logits.argmax())
            if body["temperature"] > 0:
                weights = (logits / body["temperature"]).softmax(-1)
                token = int(torch.multinomial(weights, 1, generator=generator))
            if token == tokenizer().eos_token_id:
                break
            entries.append(_candidates(token, logits.log_softmax(-1)))
            text += entries[-1]["token"]
    payload = chat(text, model="tiny-answerer")
    payload["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(entries)}
    if body.get("logprobs"):
        payload["choices"][0]["logprobs"] = {"content": entries}
    return ok(payload)


def _candidates(token: int, logprobs: torch.Tensor) -> dict[str, Any]:
    texts = tokenizer().convert_ids_to_tokens
    best = logprobs.topk(20)
    tops = []
    for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        tops.append({"token": texts(place), "logprob": value})
    return {"token": texts(token), "logprob": float(logprobs[token]), "top_logprobs": tops}


def dense_probability(chat: tuple[Message, ...], text: str, token: str) -> float:
    """The probability of a token after a prompt and the beginning of a response, by one plain forward in float64."""
    ids = [*prompt_ids(tokenizer(), chat), *tokenizer()(text, add_special_tokens=False)["input_ids"]]
    with torch.inference_mode():
        logits = model()(input_ids=torch.tensor([ids])).logits[0, -1].double()
    return float(logits.softmax(0)[tokenizer().convert_tokens_to_ids(token)])
