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
    """A preference pair as token ids.

    Attributes:
        question: Id of the question.
        chosen: The prompt and the chosen response.
        rejected: The prompt and the rejected response.
        chosen_label_at: Index of the label's token in the chosen response; None if the question has no labels.
        rejected_label_at: Index of the label's token in the rejected response; None if the question has no labels.
    """

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
    """Sums of the log-probabilities of both responses' reasoning, the tokens before the label.

    Both are None if the responses have the same reasoning, or if their question has no labels.
    """

    chosen: float | None
    rejected: float | None


def tokenize_pairs(tokenizer: Any, rows: Sequence[PreferenceRow], max_length: int | None = None) -> list[TokenizedPair]:
    """Tokenize pairs and find the labels of their responses.

    Args:
        tokenizer: The tokenizer of the model.
        rows: The pairs.
        max_length: Maximum number of tokens of the prompt and the longer response. Longer pairs are left out, as in
            training. None keeps all.

    Returns:
        The pairs that are not left out, in the order of the rows.

    Raises:
        ValueError: A question has labels, but none can be read from a response to it.
    """
    pairs = []
    for row in rows:
        columns = preference_columns(tokenizer, row)
        if max_length is not None and count_pair_tokens(columns) > max_length:
            continue
        sequences = {}
        label_at: dict[str, int | None] = {"chosen": None, "rejected": None}
        for side in ("chosen", "rejected"):
            sequences[side] = Row(columns["prompt_ids"], columns[f"{side}_ids"])
            if row.labels:
                where = f"question {row.question}, {side}"
                # Only where the label is matters here, not the tokens that other labels would have there.
                label_at[side], _ = find_label(tokenizer, sequences[side].completion, row.labels, where)
        pair = TokenizedPair(
            question=row.question,
            chosen=sequences["chosen"],
            rejected=sequences["rejected"],
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
    """Sum the log-probabilities of both responses of every pair.

    The fused head computes them without the logits of all tokens, which would need much more memory.

    Args:
        model: A causal language model. `install_head` is called on it, and it is left in evaluation mode.
        pairs: N tokenized pairs.
        pad: Token id used to pad the rows of a batch.
        batch_size: Maximum number of responses in a batch. There are fewer if they are long, but always at least one
            pair.
        progress: Called after each batch with the number of finished pairs and the number of all pairs.

    Returns:
        N records, in the order of the pairs. Tokens are scored in float32 or better and summed in float64.
    """
    install_head(model)
    model.eval()
    can_share_prompts = sharing_obstacle(model) is None
    results: dict[int, PairLogprobs] = {}  # index of a pair -> its record
    for indices in _plan_batches(pairs, batch_size):
        rows: list[Row] = []  # chosen and rejected responses alternate
        for index in indices:
            rows += [pairs[index].chosen, pairs[index].rejected]
        logprobs = _score_tokens(model, rows, pad, share_prompts=can_share_prompts)
        for index, chosen, rejected in zip(indices, logprobs[::2], logprobs[1::2], strict=True):
            results[index] = _sum_pair(pairs[index], chosen, rejected)
        if progress is not None:
            progress(len(results), len(pairs))
    return [results[index] for index in range(len(pairs))]


def _plan_batches(pairs: Sequence[TokenizedPair], batch_size: int) -> Iterator[list[int]]:
    """Yield the indices of the pairs of each batch.

    Pairs of similar length share a batch, to avoid padding. The longest come first, so that a lack of memory shows in
    the first batch.
    """
    longest_first = sorted(range(len(pairs)), key=lambda index: -pairs[index].tokens)
    start = 0
    while start < len(longest_first):
        longest = pairs[longest_first[start]].tokens
        fitting_responses = min(batch_size, MAX_BATCH_TOKENS // longest)
        fitting_pairs = max(1, fitting_responses // 2)  # a pair is never split
        yield longest_first[start : start + fitting_pairs]
        start += fitting_pairs


@torch.no_grad()
def _score_tokens(model: Any, rows: Sequence[Row], pad: int, *, share_prompts: bool) -> list[list[float]]:
    """Return the log-probability of every token of each row's completion."""
    batch = lay_out_rows(rows, [], num_scored=len(rows), pad=pad, shared=share_prompts).to(model.device)
    all_logprobs = run_head(model, batch).stats.target.tolist()  # the tokens of the first row, then of the second, ...
    logprobs_by_row = []
    start = 0
    for length in batch.lengths:
        logprobs_by_row.append(all_logprobs[start : start + length])
        start += length
    return logprobs_by_row


def _sum_pair(pair: TokenizedPair, chosen: Sequence[float], rejected: Sequence[float]) -> PairLogprobs:
    """Sum the log-probabilities of each response.

    The tokens that both responses begin with are left out. They cancel in the difference of the two sums, which is what
    the sums are used for, and rounding could turn a tie into a difference.

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
    """Sum the log-probabilities of the reasoning of two responses. The tokens that both begin with are left out.

    Args:
        chosen: The log-probability of every token of the chosen response's reasoning.
        rejected: The log-probability of every token of the rejected response's reasoning.
        common: Number of tokens that both whole responses begin with. This may be more than the tokens of a reasoning.

    Returns:
        The two sums; None for both if the responses have the same reasoning.
    """
    common_in_reasoning = min(common, len(chosen), len(rejected))
    is_same_reasoning = len(chosen) == len(rejected) == common_in_reasoning
    if is_same_reasoning:
        return ReasoningLogprobs(None, None)
    return ReasoningLogprobs(sum(chosen[common_in_reasoning:]), sum(rejected[common_in_reasoning:]))
