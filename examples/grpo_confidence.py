"""GRPO in the embedded world: does the model's stated confidence approach the true posterior?

    python examples/grpo_confidence.py --seed 0 brier correctness

A small Qwen3 is trained from scratch to answer in the form <answer>, <confidence>. Its training rows have random
confidences, so at first the stated confidence carries no information. GRPO then trains one copy of the model with each
of the named rewards. The true probability of every answer is known here, so the script can print how far the stated
confidence is from it, before and after GRPO. A GRPO step takes a second on one CPU core; nothing is downloaded.
"""

import argparse
import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from catto import METRICS, ece, load_questions
from catto.answer.response import parse_answer
from catto.answer.verbal import read_stated_confidence
from catto.prompts import prompt_text, render_completion, render_messages
from catto.recipe.settings import ScratchModel
from catto.rewards import brier_reward, correctness_reward, log_reward
from catto.tasks.witnesses import respond
from catto.training.models import scratch_model, word_tokenizer

REWARDS = {"brier": brier_reward, "log": log_reward, "correctness": correctness_reward}
SIZE = ScratchModel(layers=3, width=96, heads=4, intermediate=256, positions=256)
CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True}


def make_prompt(question) -> list[dict]:
    return [message.model_dump() for message in render_messages(question, reasoning=False, confidence=True)]


def make_first_rows(questions, seed: int, per_question: int = 2) -> list[dict]:
    """Return training rows in the right form, with the teacher's answers and a random confidence from 0% to 100%."""
    draws = random.Random(seed)
    rows = []
    for question in questions:
        for sample in range(per_question):
            _, label = respond(question, temperature=1.0, seed=1000 * seed + sample)
            stated = 10 * draws.randrange(11)
            text = f"{render_completion(None, label)}\n<confidence>{stated}%</confidence>"
            rows.append({"prompt": make_prompt(question), "completion": [{"role": "assistant", "content": text}]})
    return rows


def train_first_model(rows: list[dict], seed: int, folder: str):
    texts = []
    for row in rows:
        texts += [message["content"] for message in row["prompt"] + row["completion"]]
    tokenizer = word_tokenizer(texts)
    model = scratch_model(tokenizer, SIZE, seed)
    args = SFTConfig(
        folder, seed=seed, num_train_epochs=1, per_device_train_batch_size=32, learning_rate=2e-3, logging_steps=100,
        max_length=None, save_strategy="no", **CPU,
    )  # fmt: skip
    SFTTrainer(model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    return model, tokenizer


def train_with_grpo(model, tokenizer, questions, reward, seed: int, steps: int, folder: str) -> None:
    rows = []
    for question in questions:
        rows.append({"prompt": make_prompt(question), "gold": question.gold, "labels": question.labels})
    args = GRPOConfig(
        folder, seed=seed, max_steps=steps, per_device_train_batch_size=256, num_generations=8, learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup", warmup_steps=5, max_completion_length=24, logging_steps=10,
        save_strategy="no", **CPU,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=reward, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()


@torch.no_grad()
def measure(model, tokenizer, questions, seed: int) -> dict[str, float]:
    """Compare stated confidences with the truth, in one response per question at temperature 1, as in GRPO.

    Returns:
        Metrics of the responses that contain a label and a confidence; `read` is their number. `true_error` is the mean
        distance between the stated confidence and the true probability of the answer.
    """
    torch.manual_seed(seed)
    model.eval()
    tokenizer.padding_side = "left"
    confidence = []
    correct = []
    true_probability = []
    for start in range(0, len(questions), 250):
        batch = questions[start : start + 250]
        prompts = [
            prompt_text(render_messages(question, reasoning=False, confidence=True), tokenizer) for question in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        ids = model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=24, do_sample=True, top_k=0
        )
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for question, text in zip(batch, texts, strict=True):
            label = parse_answer(text, question).label
            stated = read_stated_confidence(text)
            if label is None or stated is None:
                continue
            confidence.append(stated)
            correct.append(label == question.gold)
            true_probability.append(question.posterior[label])
    if not confidence:
        return {"read": 0}
    distance = np.abs(np.array(confidence) - np.array(true_probability))
    return {
        "read": len(confidence),
        "accuracy": float(np.mean(correct)),
        "mean_confidence": float(np.mean(confidence)),
        "ece": ece(confidence, correct),
        "brier": METRICS["brier"].function(confidence, correct),
        "auroc": METRICS["auroc"].function(confidence, correct),
        "true_error": float(distance.mean()),
    }


def main(rewards: list[str], seed: int, steps: int, out: Path) -> None:
    torch.set_num_threads(1)
    questions = list(load_questions("witnesses", "train", seed=seed, limit=2500))
    test = list(load_questions("witnesses", "test", seed=seed, limit=500))
    with TemporaryDirectory() as folder:
        first, tokenizer = train_first_model(make_first_rows(questions, seed), seed, folder)
        before = measure(first, tokenizer, test, seed)
        print(f"after SFT: {before}", flush=True)
        for reward in rewards:
            # A deepcopy would keep methods that a trainer has wrapped, and these belong to the first model.
            model = scratch_model(tokenizer, SIZE, seed)
            model.load_state_dict(first.state_dict())
            started = time.process_time()
            train_with_grpo(model, tokenizer, questions, REWARDS[reward], seed, steps, folder)
            seconds = round(time.process_time() - started)
            after = measure(model, tokenizer, test, seed)
            print(f"after GRPO with {reward}: {after}", flush=True)
            row = {
                "reward": reward,
                "seed": seed,
                "steps": steps,
                "before": before,
                "after": after,
                "cpu_seconds": seconds,
            }
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rewards", nargs="+", choices=REWARDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120, help="GRPO steps of 32 questions with 8 responses each")
    parser.add_argument("--out", type=Path, default=Path("grpo_confidence.jsonl"), help="file to append results to")
    main(**vars(parser.parse_args()))
