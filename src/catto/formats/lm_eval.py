"""Logs of lm-evaluation-harness: lines of `samples_*.jsonl`."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from math import exp, isfinite, log
from typing import Any

from catto.formats.columns import ColumnNames, Fields
from catto.records import LOGPROB_NOISE


def is_lm_eval(record: Fields) -> bool:
    """Whether lm-evaluation-harness wrote the record."""
    return {"doc_id", "filtered_resps"} <= record.keys()


def read_lm_eval(record: Fields, names: ColumnNames, _: Sequence[str]) -> dict[str, Any]:
    """A line of `samples_*.jsonl`. multiple_choice: the softmax over the choices' log-likelihoods.

    Length-normalised: each is divided by the characters of its choice first, as for the harness's `acc_norm`.
    """
    answer: dict[str, Any] = {"question": " ".join(str(record[key]) for key in ("doc_id", "doc_hash") if key in record)}
    try:  # pairs of a log-likelihood and whether it is the greedy one
        pairs = [reply if isinstance(reply, list) else [] for reply in record["filtered_resps"]]
        likelihoods = [float(score) for score, _ in pairs]
    except (TypeError, ValueError):
        if names.confidence == "confidence" and "confidence" not in record:
            raise ValueError(
                "filtered_resps holds texts, no log-likelihoods: name a confidence with --confidence"
            ) from None
        metric = next(iter(record.get("metrics") or ()), None)
        return answer | ({} if metric is None else {"correct": record[metric]})
    arguments = record["arguments"]
    requests = arguments.values() if isinstance(arguments, dict) else arguments
    requests = [tuple(request.values()) if isinstance(request, dict) else tuple(request) for request in requests]
    for likelihood in likelihoods:
        if not likelihood <= LOGPROB_NOISE:  # NaN is not at most anything
            raise ValueError(f"filtered_resps: expected a log-likelihood of at most 0, got {likelihood}")
    # An empty context asks for the choice's likelihood alone, which acc_mutual_info compares with.
    asked = [place for place, (context, _) in enumerate(requests) if context] or list(range(len(requests)))
    choices = [requests[place][1].removeprefix(" ") for place in asked]
    scores = [likelihoods[place] for place in asked]
    if names.length_normalised:
        scores = [score / max(len(choice), 1) for score, choice in zip(scores, choices, strict=True)]
    if len(scores) < 2:
        raise ValueError("filtered_resps: one log-likelihood, expected one for each of several choices")
    best = max(range(len(scores)), key=scores.__getitem__)
    if not isfinite(scores[best]):
        raise ValueError(f"filtered_resps: expected a finite log-likelihood, got {scores[best]}")
    total = log(sum(exp(score - scores[best]) for score in scores))
    logprobs = [min(score - scores[best] - total, 0.0) for score in scores]
    target, metric = str(record["target"]).strip(), "acc_norm" if names.length_normalised else "acc"
    golds = [place for place, choice in enumerate(choices) if choice.strip() == target]
    golds += [int(target)] if target.isdecimal() and int(target) < len(choices) else []
    graded = record.get(metric)
    if graded is None and not golds:
        raise ValueError(f"target: expected a choice or its number, got {reprlib.repr(target)}")
    # A number may be a choice or the place of one: the grade tells which.
    gold = next((place for place in golds if graded is None or (place == best) == (graded == 1)), None)
    answer |= {"label": str(best), "confidence": exp(logprobs[best])}
    answer["correct"] = best == gold if graded is None else graded
    answer["label_logprobs"] = {str(place): value for place, value in enumerate(logprobs) if isfinite(value)}
    return answer if gold is None else answer | {"gold": str(gold)}
