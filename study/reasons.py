"""Write responses with one sentence of reasoning to the questions of SNLI, for a recipe with `source: responses`.

    python -m study.reasons data/snli reasons.jsonl

SmolLM2-135M cannot reason when asked to, so a rule builds the sentence. It quotes words of the hypothesis that occur in
the premise ("Both: man, wall.") and words that do not ("New: tall."). Every question gets one response per label. A
response tends to quote only words that support its label: shared words for entailment, new words for the other labels.
The sentence therefore often determines the label. A sentence with only shared words always precedes entailment, and one
with only new words never does. As after a finished chain of thought, the uncertainty is then less about the label than
about whether the sentence is right.

The file has the training questions first, then the validation questions of all seeds. Responses to the latter become
the pairs for the held-out preference accuracy.
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

# Maximum number of words of each kind, shared and new, that a sentence quotes.
MAX_QUOTED_WORDS = 2
# Probability of leaving out the words that speak against the label.
OMISSION_RATE = 0.7
# More questions than SNLI has. As a limit it selects all of them instead of a sample.
NO_LIMIT = 10**9
# Words whose first letters agree count as the same word: walk, walking.
STEM_LENGTH = 4
_COMMON = """a an the is are was be being been am has have had do does in on at of to by for from with and or but as it
its his her he she they them their there this that these those who which while not no one two some"""
COMMON_WORDS = frozenset(_COMMON.split())


def build_reasoning(question: Question, label: str, generator: random.Random) -> str:
    """Build a sentence of reasoning that tends to support the label.

    Args:
        question: A question of SNLI.
        label: The label.
        generator: Random number generator.

    >>> from catto.records import Option
    >>> fields = {"premise": "A man walks along a wall.", "hypothesis": "A tall man is walking."}
    >>> options = tuple(Option(label=name, text=name) for name in ("entailment", "neutral", "contradiction"))
    >>> question = Question(id="1", task="snli", split="train", fields=fields, options=options, gold="neutral")
    >>> build_reasoning(question, "neutral", random.Random(2))
    'Both: man, walking. New: tall.'
    """
    premise_stems = {word[:STEM_LENGTH] for word in _list_words(question.fields["premise"])}
    words_by_kind: dict[str, list[str]] = {"Both": [], "New": []}
    for word in _list_words(question.fields["hypothesis"]):
        kind = "Both" if word[:STEM_LENGTH] in premise_stems else "New"
        words_by_kind[kind].append(word)
    opposing_kind = "New" if label == "entailment" else "Both"
    if generator.random() < OMISSION_RATE:
        del words_by_kind[opposing_kind]
    sentences = []
    for kind, words in words_by_kind.items():
        quoted = generator.sample(words, min(MAX_QUOTED_WORDS, len(words)))
        sentences.append(f"{kind}: {', '.join(quoted) or 'nothing'}.")
    return " ".join(sentences)


def _list_words(text: str) -> list[str]:
    """Return the distinct words of a text in their order, without the common ones."""
    words = dict.fromkeys(re.findall(r"[a-z]+", text.lower()))
    return [word for word in words if word not in COMMON_WORDS]


def load_validation_questions(data_dir: str) -> Iterator[Question]:
    """Yield every question that some seed may draw for validation, once."""
    seen: set[str] = set()
    for seed in TASKS["snli"].seeds:
        for question in load_questions("snli", "validation", data_dir=data_dir, seed=seed, limit=NO_LIMIT):
            if question.id not in seen:
                seen.add(question.id)
                yield question


def make_response_lines(question: Question) -> Iterator[str]:
    """Yield one response per label as a JSON line."""
    for sample, label in enumerate(sorted(question.labels)):
        reasoning = build_reasoning(question, label, random.Random(f"{question.id} {label}"))
        row = {"question": question.id, "sample": sample, "reasoning": reasoning, "label": label}
        yield json.dumps(row) + "\n"


def main(data_dir: str, out: str) -> None:
    """Write one response per label, first for every training question, then for every validation question."""
    with replace_file(Path(out)) as file:
        for question in load_questions("snli", "train", data_dir=data_dir):
            file.writelines(make_response_lines(question))
        for question in load_validation_questions(data_dir):
            file.writelines(make_response_lines(question))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
