"""Time a training step (loss and backward): TRL's DPO, our CATTO, our CATTO with shared prompts, interleaved.

Four pairs of one prompt each, fp32, no gradient checkpointing, reference precomputed. The optimizer's step is the same
in every arm and is left out. The model is SmolLM2-135M from the folder that CATTO_SMOLLM2 names, else a random Llama
of its shape. Ratios are medians over the repeats of an arm's time divided by TRL's in the same repeat. Memory is the
peak of a process of its own above the loaded model and its gradients. On a CPU TRL's head scores the prompts' positions
too (it leaves them out only where Triton runs), so the ratios here do not carry over to a GPU. The last line is one
JSON object.

    python benchmarks/step.py --repeats 7 --threads 2
    python benchmarks/step.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOTrainer

from catto.training.config import CATTOConfig
from catto.training.trainer import CATTOTrainer

PAIRS, PROMPT, RESPONSE, VOCABULARY, LAYERS = 4, 160, 64, 49152, 30
ARMS = ("dpo", "catto", "shared")


def network(vocabulary: int, layers: int) -> Any:
    """SmolLM2-135M, real where it was asked for and its shape was not changed."""
    folder = os.environ.get("CATTO_SMOLLM2")
    if folder and (vocabulary, layers) == (VOCABULARY, LAYERS):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config)


def rows(prompt: int, vocabulary: int) -> Dataset:
    draw = random.Random(0)
    lengths = {"prompt_ids": prompt, "chosen_ids": RESPONSE, "rejected_ids": RESPONSE}
    return Dataset.from_list(
        [{name: draw.choices(range(3, vocabulary), k=n) for name, n in lengths.items()} for _ in range(PAIRS)]
    )


def trainer(prompt: int, vocabulary: int, layers: int) -> Any:
    """One trainer and one model for every arm."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = CATTOConfig(
        output_dir=str(Path(tempfile.gettempdir()) / "catto-step"),
        per_device_train_batch_size=PAIRS,
        precompute_ref_log_probs=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        max_length=None,
        report_to="none",
    )
    data = rows(prompt, vocabulary)
    made = CATTOTrainer(network(vocabulary, layers), args=config, train_dataset=data, processing_class=tokenizer)
    made.model.train()
    return made


def take_step(made: Any, arm: str, batch: dict[str, Any]) -> float:
    """Seconds of one loss and its backward; `dpo` is TRL's own method on the same object."""
    made.model.zero_grad(set_to_none=False)
    start = time.perf_counter()
    if arm == "dpo":
        loss = DPOTrainer._compute_loss(made, made.model, {k: v for k, v in batch.items() if k != "catto"}, False)
    else:
        loss = made._compute_loss(made.model, batch, False)
    loss.backward()
    return time.perf_counter() - start


def batch_of(made: Any, arm: str) -> dict[str, Any]:
    """The arm's batch: the collator lays it out."""
    made.args.prefix_sharing, made._padding_free, made._arrangement = arm == "shared", arm == "packed", None
    prepared: dict[str, Any] = made._prepare_inputs(next(iter(made.get_train_dataloader())))
    return prepared


def ratios(prompt: int, vocabulary: int, layers: int, repeats: int) -> dict[str, float]:
    """Median seconds of TRL's step, and the medians of the ratios to it."""
    made = trainer(prompt, vocabulary, layers)
    batches = {arm: batch_of(made, arm) for arm in ARMS}
    for arm in ARMS:
        take_step(made, arm, batches[arm])
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for repeat in range(repeats):
        for arm in ARMS[repeat % 3 :] + ARMS[: repeat % 3]:
            seconds[arm].append(take_step(made, arm, batches[arm]))
    found = {"dpo_seconds": statistics.median(seconds["dpo"])}
    for arm in ("catto", "shared"):
        found[arm] = statistics.median(a / b for a, b in zip(seconds[arm], seconds["dpo"], strict=True))
    return found


def status(field: str) -> int:
    """A field of this process's memory in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak(arm: str, prompt: int, vocabulary: int, layers: int) -> int:
    """Bytes that two steps need above the model and its gradients."""
    made = trainer(prompt, vocabulary, layers)
    batch = batch_of(made, arm)
    for parameter in made.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loaded = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, that of loading, is forgotten
    for _ in range(2):
        take_step(made, arm, batch)
    return status("VmHWM") - loaded


def peaks(prompt: int, vocabulary: int, layers: int, threads: int) -> dict[str, int]:
    found = {}
    for arm in ARMS:
        shape = ["--prompt", str(prompt), "--vocabulary", str(vocabulary), "--layers", str(layers)]
        command = [sys.executable, __file__, "--peak", arm, "--threads", str(threads), *shape]
        found[arm] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return found


def show(name: str, found: dict[str, float]) -> None:
    print(
        f"{name:>24}  dpo {found['dpo_seconds']:6.2f} s  catto {found['catto']:.3f}x  shared {found['shared']:.3f}x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a smoke run: a small model and vocabulary, one repeat")
    parser.add_argument("--peak", choices=ARMS, help="measure one arm's memory in this process, print bytes")
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak(options.peak, options.prompt, options.vocabulary, options.layers))
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """The shape asked for, its memory, then other prompts and vocabularies with fewer repeats."""
    if options.quick:
        options.layers, options.vocabulary, options.repeats = 2, 8192, 1
    layers, repeats, fewer = options.layers, options.repeats, max(1, options.repeats // 2)
    result = ratios(options.prompt, options.vocabulary, layers, repeats)
    show(f"prompt {options.prompt}", result)
    bytes_ = peaks(options.prompt, options.vocabulary, layers, options.threads)
    print("peak above the model, MB: " + ", ".join(f"{arm} {bytes_[arm] / 1e6:.0f}" for arm in ARMS), flush=True)
    for prompt in () if options.quick else (32, 512):
        show(f"prompt {prompt}", ratios(prompt, options.vocabulary, layers, fewer))
    for vocabulary in (8192,) if options.quick else (8192, 49152, 131072):
        show(
            f"{min(layers, 4)} layers, vocabulary {vocabulary}",
            ratios(options.prompt, vocabulary, min(layers, 4), fewer),
        )
    summary = {
        "catto_vs_dpo": result["catto"],
        "shared_vs_dpo": result["shared"],
        "memory_vs_dpo": bytes_["catto"] / bytes_["dpo"],
        "shared_memory_vs_dpo": bytes_["shared"] / bytes_["dpo"],
        "dpo_seconds": result["dpo_seconds"],
        "threads": options.threads,
        "repeats": repeats,
    }
    print(json.dumps({name: round(value, 4) for name, value in summary.items()}))


if __name__ == "__main__":
    import datasets

    os.environ["TQDM_DISABLE"] = "1"
    datasets.disable_progress_bars()
    main()
