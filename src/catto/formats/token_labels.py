"""The probability of a label in the tokens of a reply that another tool logged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf
from typing import Any

from catto.answer.response import parse_response
from catto.formats.columns import Fields, logprob_of


def read_label_token(tokens: Sequence[Fields], labels: Sequence[str], said: str | None) -> dict[str, Any]:
    """Return the answer `said` and its probability at the token where the reply's label begins.

    Some engines log the likeliest token where another was sampled: then `said` is looked up among `top_logprobs`. A
    reply without a label is a wrong answer of `source` fallback, with the probability of the whole reply.
    """
    texts = [token["token"] for token in tokens]
    text = "".join(texts)
    reading = parse_response(text, labels)
    if reading.span is None and said is not None:
        raise ValueError(f"logprobs: the graded answer {said!r} is not found in the reply: name a --confidence")
    if reading.span is None or reading.label is None or said is None:
        total = sum(logprob_of(token["logprob"], "logprob") for token in tokens)
        return {"label": None, "confidence": exp(total), "source": "fallback"}
    place = bisect_right(ends := list(accumulate(map(len, texts))), reading.span[0])
    token, own = tokens[place], text[reading.span[0] : min(ends[place], reading.span[1])]
    if len(labels) == 1 and reading.span[1] > ends[place]:
        raise ValueError("logprobs: an open answer of several tokens has no token of its own: name a --confidence")
    known: dict[str, float] = {}
    for top in reversed(token.get("top_logprobs") or ()):
        if top["logprob"] not in (None, -inf):  # a token that cannot be drawn
            known[top["token"].strip()] = logprob_of(top["logprob"], "top_logprobs.logprob")
    own = (own if said == reading.label else said).lower()
    # A rival that begins alike has a token of its own where a longer candidate begins it: 10 beside 1.
    longer = tuple(top.lower() for top in known if len(top) > len(own))
    rivals = (label for label in labels if label != said and label.lower().startswith(own))
    if alike := next((label for label in rivals if not label.lower().startswith(longer)), None):
        raise ValueError(f"logprobs: labels {said!r} and {alike!r} begin with the same token {own!r}")
    known[reading.label] = logprob_of(token["logprob"], "logprob")
    if said not in known:
        raise ValueError(f"logprobs: the tokens say {reading.label!r}, the answer is {said!r} and not in top_logprobs")
    answer = {"label": said, "confidence": exp(known[said]), "source": reading.source}
    whole = {"label_logprobs": {label: known[label] for label in labels}} if known.keys() >= set(labels) else {}
    return answer | whole
