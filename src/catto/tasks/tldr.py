"""TL;DR: which of two summaries of a post did a person prefer."""

from __future__ import annotations

from catto.tasks.rows import Cut, Raw, Row, RowError, Task, lookup, position, text

LABELS = ("A", "B")


def parse(raw: Raw) -> Row | str:
    """Turn a row of the hub (`prompt`, `chosen`) or of the release (`info`, `summaries`) into a neutral one.

    Rows have no ids. People judged the same pair more than once and disagree: such repeats are questions of their own.
    """
    if "summaries" in raw:
        return _release(raw)
    post = text(raw, "prompt").strip().removesuffix("TL;DR:").rstrip()
    return _row(post, text(raw, "chosen"), text(raw, "rejected"))


def _release(raw: Raw) -> Row | str:
    info, summaries = lookup(raw, "info"), lookup(raw, "summaries")
    if not isinstance(info, dict) or info.get("post") is None:
        return "no_post"  # the comparisons of news articles
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise RowError("summaries: expected two")
    better = position(raw, "choice", (0, 1))
    post = f"SUBREDDIT: r/{text(info, 'subreddit')}\n\nTITLE: {text(info, 'title')}\n\nPOST: {text(info, 'post')}"
    return _row(post.strip(), text(summaries[better], "text"), text(summaries[1 - better], "text"))


def _row(post: str, chosen: str, rejected: str) -> Row:
    return Row({"post": post}, (chosen.strip(), rejected.strip()), 0, None, post)


TASK = Task(
    name="tldr",
    labels=LABELS,
    licence="comparisons: modified MIT; posts: CC BY 4.0",
    source="Stiennon et al. 2020, Learning to summarize from human feedback",
    parse=parse,
    hub="trl-lib/tldr-preference",
    hub_splits={"train": "train", "validation": "validation"},
    patterns={"train": ("data/train*",), "validation": ("data/validation*",)},
    order="shuffled",
    cut=Cut("validation", {"validation": 0.5}, rest="test"),
)
