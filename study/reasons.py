"""Write responses with one sentence of reasoning to SNLI's questions, for a recipe's `source: responses`.

    python -m study.reasons data/snli reasons.jsonl

SmolLM2-135M cannot reason when it is asked to, so the sentence is built: it quotes words of the hypothesis that the
premise has ("Both: man, wall.") and words that it does not have ("New: tall."). Every question gets one response for
each label. A response tends to quote only what supports its label: shared words alone for entailment, new words alone
for the others. So the sentence often commits itself: shared words alone lead to no other label than entailment, new
words alone never to entailment. As with a chain of thought that has come to its conclusion, what is open is less the
label than whether the sentence was right.

The training questions come first. The validation questions follow, of every seed: their responses give the pairs of the
held-out preference accuracy.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from catto import TASKS, load_questions
from catto.io.atomic import replace_file
from catto.records import Question

QUOTED = 2  # most words of a kind that a sentence quotes
TENDENCY = 0.7  # probability of leaving out the words that speak against the label
ALL = 10**9  # more questions than there are, in place of the sample that a recipe draws
STEM = 4  # words with the same first letters count as the same: walk, walking
_COMMON = """a an the is are was be being been am has have had do does in on at of to by for from with and or but as it
its his her he she they them their there this that these those who which while not no one two some"""
COMMON = frozenset(_COMMON.split())


def reason(question: Question, label: str, draw: random.Random) -> str:
    """Return a sentence of reasoning that tends to support the label.

    >>> from catto.records import Option
    >>> fields = {"premise": "A man walks along a wall.", "hypothesis": "A tall man is walking."}
    >>> options = tuple(Option(label=name, text=name) for name in ("entailment", "neutral", "contradiction"))
    >>> question = Question(id="1", task="snli", split="train", fields=fields, options=options, gold="neutral")
    >>> reason(question, "neutral", random.Random(2))
    'Both: man, walking. New: tall.'
    """
    premise = {word[:STEM] for word in _words(question.fields["premise"])}
    kinds: dict[str, list[str]] = {"Both": [], "New": []}
    for word in _words(question.fields["hypothesis"]):
        kinds["Both" if word[:STEM] in premise else "New"].append(word)
    against = "New" if label == "entailment" else "Both"
    if draw.random() < TENDENCY:
        del kinds[against]  # the other kind always stays, so one kind alone rules labels out
    quoted = {kind: draw.sample(words, min(QUOTED, len(words))) for kind, words in kinds.items()}
    return " ".join(f"{kind}: {', '.join(words) or 'nothing'}." for kind, words in quoted.items())


def _words(text: str) -> list[str]:
    """The different words of a text in their order, without the common ones."""
    return [word for word in dict.fromkeys(re.findall(r"[a-z]+", text.lower())) if word not in COMMON]


def held_out_questions(data_dir: str) -> Iterator[Question]:
    """Yield every question that some seed may draw for validation, once."""
    seen: set[str] = set()
    for seed in TASKS["snli"].seeds:
        for question in load_questions("snli", "validation", data_dir=data_dir, seed=seed, limit=ALL):
            if question.id not in seen:
                seen.add(question.id)
                yield question


def response_lines(question: Question) -> Iterator[str]:
    """Yield one response for each label, as JSON lines."""
    for sample, label in enumerate(sorted(question.labels)):
        text = reason(question, label, random.Random(f"{question.id} {label}"))
        row = {"question": question.id, "sample": sample, "reasoning": text, "label": label}
        yield json.dumps(row) + "\n"


def main(data_dir: str, out: str) -> None:
    """Write one response per label for every training question, then for every validation question."""
    with replace_file(Path(out)) as file:
        for question in load_questions("snli", "train", data_dir=data_dir):
            file.writelines(response_lines(question))
        for question in held_out_questions(data_dir):
            file.writelines(response_lines(question))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
