"""RewardBench 2: the best of four replies, one chosen and three rejected."""

from __future__ import annotations

from catto.tasks.hashing import permutation
from catto.tasks.rows import Cut, Raw, Row, Task, lookup, text, texts

LABELS = ("A", "B", "C", "D")


def parse(raw: Raw) -> Row | str:
    """Turn a row into a question with one right option.

    The Ties subset has many right replies and often many wrong ones: which one and which three are drawn by the
    row's id, so that no place in the source's lists is favoured; the other right replies are left out.
    """
    key, chosen, rejected = str(lookup(raw, "id")), texts(raw, "chosen"), texts(raw, "rejected")
    if not chosen:
        return "no_chosen"
    if len(rejected) < len(LABELS) - 1:
        return "fewer_than_three_rejected"
    right = chosen[permutation(f"chosen {key}", len(chosen))[0]]
    wrong = [rejected[index] for index in sorted(permutation(f"rejected {key}", len(rejected))[: len(LABELS) - 1])]
    return Row({"prompt": text(raw, "prompt")}, (right, *wrong), 0, key)


TASK = Task(
    name="reward_bench_2",
    labels=LABELS,
    licence="ODC-BY",
    source="Malik et al. 2025, RewardBench 2",
    parse=parse,
    hub="allenai/reward-bench-2",
    hub_splits={"test": "test"},
    patterns={"test": ("data/test*",)},
    order="shuffled",
    # A tenth of the release's 1,865 rows is 187, also where a few of them are skipped.
    cut=Cut("test", {"validation": 187 / 1865, "test": 187 / 1865}, rest="train"),
    sample=None,
)
