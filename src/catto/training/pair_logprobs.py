"""Compute the log-probabilities of preference pairs under a model, without training it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from catto.records import PairLogprobs, PreferenceRow
from catto.token_ids import count_common
from catto.training.batches import Row, lay_out_rows
from catto.training.examples import count_pair_tokens, find_label, preference_columns
from catto.training.forward import install_head, run_head, sharing_obstacle

# Maximum number of tokens in a batch, with padding. The configured batch size is meant for generation (some hundreds
# with vLLM) and would be too large here.
MAX_BATCH_TOKENS = 32_768


class TokenizedPair(NamedTuple):
    """The token ids of a pair, and the index of the label's token in each response; None if answers have no labels."""

    question: str
    chosen: Row
    rejected: Row
    chosen_label_at: int | None
    rejected_label_at: int | None

    @property
    def tokens(self) -> int:
        """Number of tokens of the longer of its two sequences, prompt included."""
        longer_response = max(len(self.chosen.completion), len(self.rejected.completion))
        return len(self.chosen.prompt) + longer_response


class ReasoningLogprobs(NamedTuple):
    """Sums of the log-probabilities of both responses' reasoning; None if it is the same, or there is no label."""

    chosen: float | None
    rejected: float | None


def tokenize_pairs(tokenizer: Any, rows: Sequence[PreferenceRow], max_length: int | None = None) -> list[TokenizedPair]:
    """Tokenize pairs and find their labels. As in training, pairs longer than `max_length` tokens are left out.

    Raises:
        ValueError: A question has labels, but none can be read from a response to it.
    """
    pairs = []
    for row in rows:
        columns = preference_columns(tokenizer, row)
        if max_length is not None and count_pair_tokens(columns) > max_length:
            continue
        responses = {}
        label_at: dict[str, int | None] = {"chosen": None, "rejected": None}
        for side in ("chosen", "rejected"):
            where = f"question {row.question}, {side}"
            responses[side] = Row(columns["prompt_ids"], columns[f"{side}_ids"])
            if row.labels:
                label_at[side], _ = find_label(tokenizer, responses[side].completion, row.labels, where)
        pair = TokenizedPair(
            question=row.question,
            chosen=responses["chosen"],
            rejected=responses["rejected"],
            chosen_label_at=label_at["chosen"],
            rejected_label_at=label_at["rejected"],
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
    """Sum the log-probabilities of both responses of every pair. The logits are never kept in memory.

    Args:
        model: A causal language model. `install_head` adds keyword arguments to its forward. The model is left in
            evaluation mode.
        pairs: N tokenized pairs.
        pad: Token id used to pad the rows of a batch.
        batch_size: Maximum number of responses in a batch. There are fewer if they are long, but always at least one
            pair.
        progress: Called with the number of finished pairs and the number of all pairs.

    Returns:
        N records, in the order of the pairs. Tokens are scored in float32 or better and summed in float64.
    """
    install_head(model)
    model.eval()
    can_share_prompts = sharing_obstacle(model) is None
    scored: dict[int, PairLogprobs] = {}
    for numbers in _plan_batches(pairs, batch_size):
        rows: list[Row] = []
        for number in numbers:
            rows += [pairs[number].chosen, pairs[number].rejected]
        logprobs = _score_tokens(model, rows, pad, share_prompts=can_share_prompts)
        for index, number in enumerate(numbers):
            chosen = logprobs[2 * index]
            rejected = logprobs[2 * index + 1]
            scored[number] = _sum_pair(pairs[number], chosen, rejected)
        if progress is not None:
            progress(len(scored), len(pairs))
    return [scored[number] for number in range(len(pairs))]


def _plan_batches(pairs: Sequence[TokenizedPair], batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of the pairs of each batch.

    Pairs of similar length share a batch, to avoid padding. The longest come first, so that a lack of memory shows at
    once.
    """
    order = sorted(range(len(pairs)), key=lambda number: -pairs[number].tokens)
    first = 0
    while first < len(order):
        longest = pairs[order[first]].tokens
        fitting_responses = min(batch_size, MAX_BATCH_TOKENS // longest)
        fitting_pairs = max(1, fitting_responses // 2)  # a pair is never split
        yield order[first : first + fitting_pairs]
        first += fitting_pairs


@torch.no_grad()
def _score_tokens(model: Any, rows: Sequence[Row], pad: int, *, share_prompts: bool) -> list[list[float]]:
    """Return the log-probability of every token of each row's completion."""
    batch = lay_out_rows(rows, [], scored=len(rows), pad=pad, shared=share_prompts).to(model.device)
    all_logprobs = run_head(model, batch).stats.target.tolist()  # the tokens of the first row, then of the second, ...
    logprobs_by_row = []
    start = 0
    for length in batch.lengths:
        logprobs_by_row.append(all_logprobs[start : start + length])
        start += length
    return logprobs_by_row


def _sum_pair(pair: TokenizedPair, chosen: Sequence[float], rejected: Sequence[float]) -> PairLogprobs:
    """Sum the log-probabilities of each response after the common beginning of both, see `PairLogprobs`.

    chosen, rejected: The log-probability of every token of the two responses.
    """
    common = count_common(list(pair.chosen.completion), list(pair.rejected.completion))
    reasoning = ReasoningLogprobs(None, None)
    if pair.chosen_label_at is not None and pair.rejected_label_at is not None:
        reasoning = _sum_reasoning(chosen[: pair.chosen_label_at], rejected[: pair.rejected_label_at], common=common)
    return PairLogprobs(
        question=pair.question,
        chosen=sum(chosen[common:]),
        rejected=sum(rejected[common:]),
        chosen_reasoning=reasoning.chosen,
        rejected_reasoning=reasoning.rejected,
    )


def _sum_reasoning(chosen: Sequence[float], rejected: Sequence[float], *, common: int) -> ReasoningLogprobs:
    """Sum the log-probabilities of the reasoning of two responses after its common beginning; None if it is the same.

    chosen, rejected: The log-probability of every token of the reasoning.
    common: Number of first tokens that the two responses have in common. The reasoning may be shorter.
    """
    common_reasoning = min(common, len(chosen), len(rejected))
    longer_reasoning = max(len(chosen), len(rejected))
    is_same_reasoning = common_reasoning == longer_reasoning
    if is_same_reasoning:
        return ReasoningLogprobs(None, None)
    return ReasoningLogprobs(sum(chosen[common_reasoning:]), sum(rejected[common_reasoning:]))
