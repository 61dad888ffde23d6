"""Time a training step (loss and backward pass): TRL's DPO, our CATTO, and our CATTO with shared prompts.

The batch has four pairs with different prompts. The model is in fp32, without gradient checkpointing and with a
precomputed reference. The optimizer's step is the same in every arm and is left out. The model is SmolLM2-135M from the
folder in CATTO_SMOLLM2 or, if it is not set, a random Llama of the same shape. The arms run in turn; a ratio is the
median over the repeats of an arm's time divided by TRL's in the same repeat. Memory is the peak of a separate process,
above the loaded model and its gradients. On a CPU, TRL's head also scores the positions of the prompts, which it leaves
out where Triton runs. The ratios here therefore do not carry over to a GPU. The last line is a JSON object.

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
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOTrainer

from catto.training.config import CATTOConfig
from catto.training.trainer import CATTOTrainer

PAIRS = 4
RESPONSE_TOKENS = 64
ARMS = ("dpo", "catto", "shared")


class Shape(NamedTuple):
    """The shape of a step: tokens per prompt, and the size of the model."""

    prompt: int = 160
    vocabulary: int = 49152
    layers: int = 30


SMOLLM2 = Shape()
# Prompt lengths, and vocabularies with at most so many layers, that are timed in addition to the requested shape.
OTHER_PROMPTS = (32, 512)
OTHER_VOCABULARIES = (8192, 49152, 131072)
MAX_LAYERS_FOR_VOCABULARIES = 4


def load_network(shape: Shape) -> Any:
    """Return SmolLM2-135M if its folder is known and the shape is its own; otherwise a random model."""
    folder = os.environ.get("CATTO_SMOLLM2")
    has_own_shape = (shape.vocabulary, shape.layers) == (SMOLLM2.vocabulary, SMOLLM2.layers)
    if folder and has_own_shape:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        num_hidden_layers=shape.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config)


def make_pairs(shape: Shape) -> Dataset:
    """Return pairs with random token ids."""
    generator = random.Random(0)
    lengths = {"prompt_ids": shape.prompt, "chosen_ids": RESPONSE_TOKENS, "rejected_ids": RESPONSE_TOKENS}
    rows = []
    for _ in range(PAIRS):
        row = {}
        for column, length in lengths.items():
            row[column] = generator.choices(range(3, shape.vocabulary), k=length)
        rows.append(row)
    return Dataset.from_list(rows)


def make_trainer(shape: Shape) -> Any:
    """Return a trainer with a model. All arms use the same one."""
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
    trainer = CATTOTrainer(
        load_network(shape), args=config, train_dataset=make_pairs(shape), processing_class=tokenizer
    )
    trainer.model.train()
    return trainer


def take_step(trainer: Any, arm: str, batch: dict[str, Any]) -> float:
    """Return the seconds of one loss and its backward pass. `dpo` calls TRL's own method on the same trainer."""
    trainer.model.zero_grad(set_to_none=False)
    start = time.perf_counter()
    if arm == "dpo":
        trl_batch = {name: value for name, value in batch.items() if name != "catto"}
        loss = DPOTrainer._compute_loss(trainer, trainer.model, trl_batch, False)
    else:
        loss = trainer._compute_loss(trainer.model, batch, False)
    loss.backward()
    return time.perf_counter() - start


def make_batch(trainer: Any, arm: str) -> dict[str, Any]:
    """Return the batch of an arm. The collator lays it out, so the trainer is set to the layout of the arm first."""
    trainer.args.prefix_sharing = arm == "shared"
    trainer._padding_free = arm == "packed"
    trainer._layout_options = None
    batch: dict[str, Any] = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return batch


def time_arms(shape: Shape, repeats: int) -> dict[str, float]:
    """Return the median seconds of TRL's step (`dpo_seconds`), and arm -> median ratio to it."""
    trainer = make_trainer(shape)
    batches = {arm: make_batch(trainer, arm) for arm in ARMS}
    for arm in ARMS:
        take_step(trainer, arm, batches[arm])
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for repeat in range(repeats):
        # Every repeat starts with a different arm.
        first = repeat % len(ARMS)
        for arm in ARMS[first:] + ARMS[:first]:
            seconds[arm].append(take_step(trainer, arm, batches[arm]))
    results = {"dpo_seconds": statistics.median(seconds["dpo"])}
    for arm in ("catto", "shared"):
        ratios = [ours / theirs for ours, theirs in zip(seconds[arm], seconds["dpo"], strict=True)]
        results[arm] = statistics.median(ratios)
    return results


def read_status_bytes(field: str) -> int:
    """Return a memory field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    kilobytes = int(line.split()[1])
    return kilobytes * 1024


def measure_peak(arm: str, shape: Shape) -> int:
    """Return the peak memory of two steps in bytes, above the model and its gradients."""
    trainer = make_trainer(shape)
    batch = make_batch(trainer, arm)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loaded = read_status_bytes("VmRSS")
    # Loading has a peak of its own; this resets the peak to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        take_step(trainer, arm, batch)
    return read_status_bytes("VmHWM") - loaded


def measure_peaks_in_subprocesses(shape: Shape, threads: int) -> dict[str, int]:
    """Return arm -> peak memory in bytes; see `measure_peak`."""
    peaks = {}
    for arm in ARMS:
        options = ["--prompt", str(shape.prompt), "--vocabulary", str(shape.vocabulary), "--layers", str(shape.layers)]
        command = [sys.executable, __file__, "--peak", arm, "--threads", str(threads), *options]
        peaks[arm] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return peaks


def print_times(title: str, results: dict[str, float]) -> None:
    """Print the results of `time_arms` in one line."""
    ratios = f"catto {results['catto']:.3f}x  shared {results['shared']:.3f}x"
    print(f"{title:>24}  dpo {results['dpo_seconds']:6.2f} s  {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a smoke test: small model and vocabulary, one repeat")
    parser.add_argument("--peak", choices=ARMS, help="only measure the memory of one arm in this process, in bytes")
    parser.add_argument("--prompt", type=int, default=SMOLLM2.prompt)
    parser.add_argument("--vocabulary", type=int, default=SMOLLM2.vocabulary)
    parser.add_argument("--layers", type=int, default=SMOLLM2.layers)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = Shape(options.prompt, options.vocabulary, options.layers)
    if options.peak:
        print(measure_peak(options.peak, shape))
    elif options.quick:
        small = shape._replace(vocabulary=8192, layers=2)
        measure(small, 1, options.threads, other_prompts=(), other_vocabularies=(8192,))
    else:
        measure(
            shape,
            options.repeats,
            options.threads,
            other_prompts=OTHER_PROMPTS,
            other_vocabularies=OTHER_VOCABULARIES,
        )


def measure(
    shape: Shape, repeats: int, threads: int, *, other_prompts: tuple[int, ...], other_vocabularies: tuple[int, ...]
) -> None:
    """Measure time and memory of a shape, then the time of other shapes with fewer repeats.

    Args:
        shape: The main shape.
        repeats: Number of repeats for the main shape.
        threads: Number of threads, for the processes that measure memory.
        other_prompts: Prompt lengths to time in addition.
        other_vocabularies: Vocabulary sizes to time in addition, with a small model.
    """
    result = time_arms(shape, repeats)
    print_times(f"prompt {shape.prompt}", result)
    peaks = measure_peaks_in_subprocesses(shape, threads)
    print("peak above the model, MB: " + ", ".join(f"{arm} {peaks[arm] / 1e6:.0f}" for arm in ARMS), flush=True)
    fewer_repeats = max(1, repeats // 2)
    for prompt in other_prompts:
        print_times(f"prompt {prompt}", time_arms(shape._replace(prompt=prompt), fewer_repeats))
    for vocabulary in other_vocabularies:
        small = shape._replace(vocabulary=vocabulary, layers=min(shape.layers, MAX_LAYERS_FOR_VOCABULARIES))
        print_times(f"{small.layers} layers, vocabulary {vocabulary}", time_arms(small, fewer_repeats))
    summary = {
        "catto_vs_dpo": result["catto"],
        "shared_vs_dpo": result["shared"],
        "memory_vs_dpo": peaks["catto"] / peaks["dpo"],
        "shared_memory_vs_dpo": peaks["shared"] / peaks["dpo"],
        "dpo_seconds": result["dpo_seconds"],
        "threads": threads,
        "repeats": repeats,
    }
    print(json.dumps({name: round(value, 4) for name, value in summary.items()}))


if __name__ == "__main__":
    import datasets

    os.environ["TQDM_DISABLE"] = "1"
    datasets.disable_progress_bars()
    main()
