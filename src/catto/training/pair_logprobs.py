"""Log-probabilities of preference pairs under one model, without training it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from catto.records import PairLogprobs, PreferenceRow
from catto.token_ids import count_common
from catto.training.batches import Row, lay_out_rows
from catto.training.examples import count_pair_tokens, find_label, preference_columns
from catto.training.forward import install_head, run_head, sharing_obstacle

# Tokens of a batch, padding included: a batch size for generating, some hundreds with vLLM, would be too large here.
MOST_TOKENS = 32_768


class TokenizedPair(NamedTuple):
    """The token ids of a pair, and the index of the label's token in each response; None where answers have none."""

    question: str
    chosen: Row
    rejected: Row
    chosen_label_at: int | None
    rejected_label_at: int | None

    @property
    def tokens(self) -> int:
        """Number of tokens of the longer of its two sequences."""
        longer_response = max(len(self.chosen.completion), len(self.rejected.completion))
        return len(self.chosen.prompt) + longer_response


class ReasoningLogprobs(NamedTuple):
    """The summed log-probabilities of both reasonings; None where they are the same, or end at no label."""

    chosen: float | None
    rejected: float | None


def tokenize_pairs(tokenizer: Any, rows: Sequence[PreferenceRow], max_length: int | None = None) -> list[TokenizedPair]:
    """Tokenize pairs and find their labels; as in training, pairs with more than `max_length` tokens are left out."""
    pairs = []
    for row in rows:
        columns = preference_columns(tokenizer, row)
        if max_length is not None and count_pair_tokens(columns) > max_length:
            continue
        responses = {}
        label_places: dict[str, int | None] = {"chosen": None, "rejected": None}
        for side in ("chosen", "rejected"):
            where = f"question {row.question}, {side}"
            responses[side] = Row(columns["prompt_ids"], columns[f"{side}_ids"])
            if row.labels:
                label_places[side], _ = find_label(tokenizer, responses[side].completion, row.labels, where)
        pair = TokenizedPair(
            question=row.question,
            chosen=responses["chosen"],
            rejected=responses["rejected"],
            chosen_label_at=label_places["chosen"],
            rejected_label_at=label_places["rejected"],
        )
        pairs.append(pair)
    return pairs


def pair_logprobs(
    model: Any,
    pairs: Sequence[TokenizedPair],
    pad: int,
    *,
    batch_size: int = 16,
    progress: Callable[[int, int], object] | None = None,
) -> list[PairLogprobs]:
    """Sum the log-probabilities of both responses of every pair, with the fused head: no logits are held.

    Args:
        model: A causal language model; `install_head` adds keywords to its forward.
        pairs: N tokenized pairs.
        pad: Token id that fills up the rows of a batch.
        batch_size: Maximum number of responses in a batch; long ones make it smaller. A pair is never split.
        progress: Called with the number of finished pairs and the number of all pairs.

    Returns:
        N records, in the order of the pairs. Tokens are scored in float32 or better and summed in float64.
    """
    install_head(model)
    model.eval()
    shared = sharing_obstacle(model) is None
    scored: dict[int, PairLogprobs] = {}
    for numbers in _plan_batches(pairs, batch_size):
        rows: list[Row] = []
        for number in numbers:
            rows += [pairs[number].chosen, pairs[number].rejected]
        logprobs = _score_tokens(model, rows, pad, shared=shared)
        for index, number in enumerate(numbers):
            chosen = logprobs[2 * index]
            rejected = logprobs[2 * index + 1]
            scored[number] = _sum_pair(pairs[number], chosen, rejected)
        if progress is not None:
            progress(len(scored), len(pairs))
    return [scored[number] for number in range(len(pairs))]


def _plan_batches(pairs: Sequence[TokenizedPair], batch_size: int) -> Iterator[list[int]]:
    """Yield the numbers of the pairs of each batch.

    Pairs of similar length share a batch, so that little is padding. The longest come first, where memory may not
    suffice.
    """
    order = sorted(range(len(pairs)), key=lambda number: -pairs[number].tokens)
    first = 0
    while first < len(order):
        longest = pairs[order[first]].tokens
        fitting = min(batch_size, MOST_TOKENS // longest) // 2
        size = max(1, fitting)
        yield order[first : first + size]
        first += size


@torch.no_grad()
def _score_tokens(model: Any, rows: Sequence[Row], pad: int, *, shared: bool) -> list[list[float]]:
    """Return the log-probability of every token of each completion. `shared` computes each prompt once."""
    batch = lay_out_rows(rows, [], len(rows), pad, shared=shared).to(model.device)
    target = run_head(model, batch).stats.target.tolist()
    logprobs = []
    start = 0
    for length in batch.lengths:
        logprobs.append(target[start : start + length])
        start += length
    return logprobs


def _sum_pair(pair: TokenizedPair, chosen: Sequence[float], rejected: Sequence[float]) -> PairLogprobs:
    """Sum the tokens after the common beginning of both responses; see `PairLogprobs`."""
    same = count_common(list(pair.chosen.completion), list(pair.rejected.completion))
    reasoning = ReasoningLogprobs(None, None)
    if pair.chosen_label_at is not None and pair.rejected_label_at is not None:
        reasoning = _sum_reasoning(chosen[: pair.chosen_label_at], rejected[: pair.rejected_label_at], same=same)
    return PairLogprobs(
        question=pair.question,
        chosen=sum(chosen[same:]),
        rejected=sum(rejected[same:]),
        chosen_reasoning=reasoning.chosen,
        rejected_reasoning=reasoning.rejected,
    )


def _sum_reasoning(chosen: Sequence[float], rejected: Sequence[float], *, same: int) -> ReasoningLogprobs:
    """Sum the tokens of two reasonings after their common beginning, which is at most `same` tokens long."""
    same_reasoning = min(same, len(chosen), len(rejected))
    reasonings_differ = same_reasoning < max(len(chosen), len(rejected))
    if not reasonings_differ:
        return ReasoningLogprobs(None, None)
    return ReasoningLogprobs(sum(chosen[same_reasoning:]), sum(rejected[same_reasoning:]))
