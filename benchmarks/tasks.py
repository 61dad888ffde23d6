"""Load and render a large training file: seconds, and peak memory above the interpreter's own.

    python benchmarks/tasks.py

Each size runs in a process of its own. Memory must not grow with the file: `memory_ratio` compares the peaks.
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


def sentence(number: int, length: int) -> str:
    return " ".join(
        WORDS[(number * 7 + place * place * 3 + number // (place + 1)) % len(WORDS)] for place in range(length)
    )


def rows(split: str, count: int) -> Iterator[str]:
    for number in range(count):
        choices = [f"{sentence(number + place, 4)} {place}" for place in range(4)]
        question = f"{split} {number}: which of these {sentence(number, 25)}?"
        yield json.dumps({"question": question, "subject": "none", "choices": choices, "answer": number % 4}) + "\n"


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: Path) -> dict[str, float]:
    from catto.prompts import render_messages
    from catto.tasks import load_questions

    files = {split: folder / f"{split}.jsonl" for split in ("train", "validation", "test")}
    list(
        load_questions("mmlu", "train", files=dict.fromkeys(files, files["test"]))
    )  # imports and caches, before the baseline
    baseline, start, characters = peak_mb(), time.perf_counter(), 0
    questions = load_questions("mmlu", "train", files=files)
    for question in questions:
        characters += sum(len(message.content) for message in render_messages(question))
    seconds = time.perf_counter() - start
    return {"rows": questions.report.kept, "seconds": seconds, "peak_mb": peak_mb() - baseline, "baseline_mb": baseline}


def run(size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        for split, count in (("train", size), ("validation", 1000), ("test", 1000)):
            with (Path(name) / f"{split}.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(rows(split, count))
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    results = [run(size) for size in SIZES]
    for result in results:
        print(
            f"{result['rows']:>8,.0f} rows  {result['seconds']:6.1f} s  "
            f"{result['peak_mb']:6.1f} MB above the {result['baseline_mb']:.0f} MB of the interpreter"
        )
    whole = [result["baseline_mb"] + result["peak_mb"] for result in results]
    summary = {
        "seconds_100k": round(results[0]["seconds"], 2),
        "memory_ratio": round(whole[1] / whole[0], 3),
        "peak_above_baseline_mb": [round(result["peak_mb"], 1) for result in results],
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(Path(sys.argv[1]))))
    else:
        main()
