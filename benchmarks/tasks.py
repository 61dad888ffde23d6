"""Load and render a large training file: seconds, and peak memory above that of the interpreter.

    python benchmarks/tasks.py

Each file size has its own process. Memory must not grow with the file: `memory_ratio` compares the peaks.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SIZES = (100_000, 400_000)
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state", "family")


def make_sentence(number: int, length: int) -> str:
    """Return a sentence of `length` words that depends on the number."""
    words = []
    for position in range(length):
        index = number * 7 + position * position * 3 + number // (position + 1)
        words.append(WORDS[index % len(WORDS)])
    return " ".join(words)


def make_lines(split: str, count: int) -> Iterator[str]:
    """Yield questions in MMLU's format as JSON lines."""
    for number in range(count):
        choices = [f"{make_sentence(number + index, 4)} {index}" for index in range(4)]
        question = f"{split} {number}: which of these {make_sentence(number, 25)}?"
        yield json.dumps({"question": question, "subject": "none", "choices": choices, "answer": number % 4}) + "\n"


def read_peak_mb() -> float:
    """Return the peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_loading(folder: Path) -> dict[str, float]:
    """Load and render the training questions of a folder in this process."""
    from catto.prompts import render_messages
    from catto.tasks import load_questions

    files = {split: folder / f"{split}.jsonl" for split in ("train", "validation", "test")}
    # Load a small file first, so that imports and caches are part of the baseline.
    small_files = dict.fromkeys(files, files["test"])
    list(load_questions("mmlu", "train", files=small_files))
    baseline = read_peak_mb()
    start = time.perf_counter()
    questions = load_questions("mmlu", "train", files=files)
    for question in questions:
        render_messages(question)
    seconds = time.perf_counter() - start
    peak = read_peak_mb() - baseline
    return {"rows": questions.report.kept, "seconds": seconds, "peak_mb": peak, "baseline_mb": baseline}


def measure_in_subprocess(size: int) -> dict[str, float]:
    """Write a training file with `size` questions, and measure in a new process how it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        for split, count in (("train", size), ("validation", 1000), ("test", 1000)):
            with (Path(folder) / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(make_lines(split, count))
        done = subprocess.run([sys.executable, __file__, folder], capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    results = [measure_in_subprocess(size) for size in SIZES]
    for result in results:
        print(
            f"{result['rows']:>8,.0f} rows  {result['seconds']:6.1f} s  "
            f"{result['peak_mb']:6.1f} MB above the {result['baseline_mb']:.0f} MB of the interpreter"
        )
    small_total, large_total = (result["baseline_mb"] + result["peak_mb"] for result in results)
    summary = {
        "seconds_100k": round(results[0]["seconds"], 2),
        "memory_ratio": round(large_total / small_total, 3),
        "peak_above_baseline_mb": [round(result["peak_mb"], 1) for result in results],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure_loading(Path(sys.argv[1]))))
    else:
        main()
