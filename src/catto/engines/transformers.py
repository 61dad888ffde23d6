"""Generate and score with a model of Transformers in this process.

Any causal language model that accepts `logits_to_keep` works, even in the middle of training: its weights, mode and
configuration are left unchanged. Equal prompts in a batch run once. Logits are fp32 and sampling is float64 (see
`decoding`). At most one batch of next-token logits is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor

from catto.engines.base import TAU_GRID, Context, Engine, Generation, Request, Scores
from catto.engines.decoding import (
    ResponseInProgress,
    as_float64,
    counts_padding,
    decode_responses,
    evaluation_mode,
    last_logits,
    state_logits,
)
from catto.engines.locations import check_hub, check_model
from catto.errors import DataError
from catto.prompts import prompt_ids
from catto.records import Key
from catto.token_ids import decode_ids


class TransformersEngine(Engine):
    """An engine for a loaded model and its tokenizer.

    A generation's `token_ids` are the generated tokens without the end-of-sequence token. Its `text` is their decoding
    with special tokens, cut after the stop text. `mean_logprob` is the mean over `token_ids` at temperature 1.
    `seconds` is the time from the start of the batch to the response's last token.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        batch_size: Number of responses or scored contexts that run at once.
        model_name: Name of the model in records; None for the name in its configuration.

    Raises:
        ValueError: The batch size is below 1, or an adapter puts virtual tokens in front of the prompt.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int = 16, model_name: str | None = None) -> None:
        """Prepare a loaded model for generation.

        Args:
            model: The model, possibly with an adapter of PEFT.
            tokenizer: Its tokenizer.
            batch_size: Number of responses that run at once.
            model_name: The name of the model in records; None means the name in its configuration.

        Raises:
            ValueError: The batch size is below 1, or an adapter puts virtual tokens in front of the prompt.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        for adapter in getattr(model, "peft_config", {}).values():
            if adapter.is_prompt_learning:
                raise ValueError(
                    "the adapter puts virtual tokens in front of every input, which generation does not support"
                )
        self.network = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        # `model` and `name` are stored in records: which model answered, and the software and precision that ran it.
        self.model = model_name or model.config.name_or_path or type(model).__name__
        precision = str(model.dtype).removeprefix("torch.")
        torch_version = torch.__version__.partition("+")[0]
        self.name = f"transformers {transformers.__version__} {precision} torch {torch_version}"
        self.positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._eos = _find_end_tokens(model, tokenizer)
        # Cached, because a prompt is scored soon after its responses are generated.
        self._encode_prompt = lru_cache(maxsize=1024)(partial(prompt_ids, tokenizer))
        # Request key -> tokens and hidden states of its response, for requests with `keep_states`. With the states,
        # `score` needs no further pass through the model for labels in the response; the tokens show whether a text is
        # part of it. They are dropped by the next call of `generate` or `score`.
        self._kept: dict[Key, tuple[tuple[int, ...], Tensor]] = {}

    @classmethod
    def load(cls, path: str | Path, *, dtype: torch.dtype | str | None = None, batch_size: int = 16) -> Self:
        """Load a model and its tokenizer, on the accelerator if there is one.

        An adapter is loaded onto its base model, but not merged into it: in bf16 weights, a small update would be lost
        to rounding. The base model's tokenizer is used if the folder of the adapter has none.

        Args:
            path: A checkpoint folder, the folder of a LoRA adapter, or a hub id.
            dtype: Type of the weights, such as `bfloat16`; None means bf16 on an accelerator and fp32 on the CPU.
            batch_size: Number of responses that run at once.

        Returns:
            The engine. Records name its model as `path`.

        Raises:
            DataError: The model cannot be loaded, or the adapter does not name its base model.
        """
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        if dtype is None:
            dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        base_path = path
        adapter_config = Path(path) / "adapter_config.json"
        is_adapter = adapter_config.exists()
        if is_adapter:
            from peft import PeftConfig, PeftModel

            base_path = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
            if not base_path:
                raise DataError(adapter_config, None, "base_model_name_or_path: expected the base model")
        model = _load_pretrained(transformers.AutoModelForCausalLM, base_path, dtype=dtype)
        if is_adapter:
            model = PeftModel.from_pretrained(model, str(path))
        has_own_tokenizer = (Path(path) / "tokenizer_config.json").exists()
        tokenizer_path = path if has_own_tokenizer else base_path
        tokenizer = _load_pretrained(transformers.AutoTokenizer, tokenizer_path)
        return cls(model.to(device), tokenizer, batch_size=batch_size, model_name=str(path))

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the generations whose keys are not in `done`, batch by batch, longest prompts first.

        The batches depend on all requests, done or not, and a batch that is partly done is computed again as a whole. A
        killed run therefore resumes with the same batch shapes and produces exactly the same tokens. States that an
        earlier call kept for `score` are dropped.

        Args:
            requests: The requests.
            done: Keys of the requests whose generations are not needed.

        Yields:
            One generation per request that is not done.

        Raises:
            ValueError: A request is repeated or has an empty stop text, or its prompt leaves no room for a token.
        """
        self._kept = {}
        # The responses to one prompt share a batch, so that the prompt is computed only once.
        responses_by_prompt: dict[tuple[int, ...], list[ResponseInProgress]] = {}
        seen: set[Key] = set()
        for request in requests:
            if request.key in seen:
                raise ValueError(f"{request.name} is requested twice")
            seen.add(request.key)
            response = self._begin_response(request)
            responses_by_prompt.setdefault(response.prompt, []).append(response)
        decode = partial(decode_ids, self.tokenizer)
        # Some layers cannot ignore padding, so it would change the tokens. For these, all prompts of a batch have the
        # same length, and no padding is needed.
        equal_lengths = counts_padding(self.network)
        for batch in pack_batches(responses_by_prompt.values(), self.batch_size, equal_lengths):
            missing = [response for response in batch if response.request.key not in done]
            if not missing:
                continue
            decode_responses(self.network, batch, self._eos, decode)
            for response in missing:
                if response.request.keep_states:
                    # Moved to the CPU, and dropped here: the states of several batches would fill an accelerator.
                    states = torch.stack(response.states).cpu()
                    self._kept[response.request.key] = tuple(response.ids), states
                    response.states = []
                yield self._finish_response(response, decode(response.ids)[: response.end])

    def _begin_response(self, request: Request) -> ResponseInProgress:
        """Render a request's prompt, and limit its response to the positions that are left; ValueError if none is."""
        if "" in request.stop:
            raise ValueError(f"question {request.question}: a stop text is empty")
        prompt = self._encode_prompt(request.messages)
        self._check_length(len(prompt) + 1, f"question {request.question}: prompt and response")
        limit = request.max_tokens
        if self.positions is not None:
            limit = min(limit, self.positions - len(prompt))
        return ResponseInProgress(request, prompt, limit)

    def _finish_response(self, response: ResponseInProgress, text: str) -> Generation:
        """Make the record of a finished response."""
        tokens = len(response.ids)
        return Generation(
            question=response.request.question,
            sample=response.request.sample,
            text=text,
            token_ids=tuple(response.ids),
            mean_logprob=response.logprob / tokens if tokens else None,
            prompt_tokens=len(response.prompt),
            tokens=tokens,
            finish_reason=response.finish_reason,
            model=self.model,
            seconds=response.seconds,
        )

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order.

        `generate` keeps the hidden states that entered the head, for requests with `keep_states`. For a context inside
        such a response, only the head runs, on the state that was kept there. Other contexts run in full, those of
        similar length in the same batch. The kept states are dropped afterwards.

        Args:
            contexts: The contexts.

        Returns:
            The scores of each context.

        Raises:
            ValueError: A context is longer than the model allows, or a candidate is not a token id of the model.
        """
        states: dict[int, Tensor] = {}  # index of a context -> its kept state
        sequences: dict[int, tuple[int, ...]] = {}  # index of a context without one -> its tokens
        for index, context in enumerate(contexts):
            state = self._find_kept_state(context)
            if state is not None:
                states[index] = state
                continue
            sequences[index] = (*self._encode_prompt(context.messages), *context.prefix)
            self._check_length(len(sequences[index]), f"context {index}: prompt and prefix")
        self._kept = {}

        scores: dict[int, Scores] = {}

        def add_scores(indices: list[int], logits: Tensor) -> None:
            candidates = [contexts[index].candidates for index in indices]
            batch_scores = score_candidates(logits, candidates)
            scores.update(zip(indices, batch_scores, strict=True))

        longest_first = sorted(sequences, key=lambda index: -len(sequences[index]))
        with evaluation_mode(self.network) as hook:
            for indices in self._split_batches(list(states)):
                batch_states = torch.stack([states[index] for index in indices])
                add_scores(indices, as_float64(state_logits(self.network, hook, batch_states)))
            for indices in self._split_batches(longest_first):
                batch_sequences = [sequences[index] for index in indices]
                add_scores(indices, as_float64(last_logits(self.network, hook, batch_sequences)))
        return [scores[index] for index in range(len(contexts))]

    def _split_batches(self, indices: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(indices), self.batch_size):
            yield indices[start : start + self.batch_size]

    def _find_kept_state(self, context: Context) -> Tensor | None:
        """Return the hidden state that predicts the token after a context's prefix; None if it was not kept."""
        if context.response is None or context.response not in self._kept:
            return None
        ids, states = self._kept[context.response]
        length = len(context.prefix)
        is_inside_response = length < len(states) and ids[:length] == context.prefix
        if not is_inside_response:
            return None
        return states[length]

    def _check_length(self, tokens: int, what: str) -> None:
        if self.positions is not None and tokens > self.positions:
            raise ValueError(f"{what} need {tokens} tokens, the model has {self.positions} positions")


def pack_batches(
    groups: Iterable[list[ResponseInProgress]], batch_size: int, equal_lengths: bool = False
) -> list[list[ResponseInProgress]]:
    """Pack the responses of all prompts into batches, longest prompts first.

    Prompts of similar length then share a batch and need little padding. The first batches need the most memory, so a
    batch size that is too large usually fails at the beginning. Responses to the same prompt stay together, because the
    prompt then runs once for all of them.

    Args:
        groups: The responses of each prompt. A group is split only if it is larger than a batch.
        batch_size: Maximum number of responses in a batch.
        equal_lengths: Whether all prompts in a batch must have the same length, so that they need no padding.

    Returns:
        The batches.
    """
    batches: list[list[ResponseInProgress]] = []
    for group in sorted(groups, key=lambda responses: -len(responses[0].prompt)):
        for start in range(0, len(group), batch_size):
            chunk = group[start : start + batch_size]
            # Earlier batches are not filled up: their prompts are longer, so this one would need more padding there.
            if not batches or not _fits_batch(batches[-1], chunk, batch_size, equal_lengths):
                batches.append([])
            batches[-1] += chunk
    return batches


def _fits_batch(
    batch: list[ResponseInProgress], chunk: list[ResponseInProgress], batch_size: int, equal_lengths: bool
) -> bool:
    if len(batch) + len(chunk) > batch_size:
        return False
    return not equal_lengths or len(batch[0].prompt) == len(chunk[0].prompt)


def score_candidates(logits: Tensor, candidates: Sequence[tuple[int, ...]]) -> list[Scores]:
    """Compute the log-probabilities of each row's candidates, and the row's log-sum-exp at the temperatures `TAU_GRID`.

    With the log-sum-exp, a stored confidence can be rescaled to a different temperature later.

    Args:
        logits: (B, V) in float64.
        candidates: Token ids to score in each row.

    Returns:
        The scores of each row: the log-probabilities at temperature 1 in the order of the candidates, and for every tau
        the value of `logsumexp(logits / tau) - max(logits) / tau`.

    Raises:
        ValueError: A candidate is negative or not below V.
    """
    vocabulary_size = logits.shape[-1]
    for ids in candidates:
        for token in ids:
            if not 0 <= token < vocabulary_size:
                raise ValueError(f"candidates {ids}: expected token ids below {vocabulary_size}")
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    values_by_tau = []  # (B,) for each tau
    for tau in TAU_GRID:
        values_by_tau.append((shifted / tau).exp_().sum(dim=-1).log_())  # in place, since `shifted / tau` is large
    values_by_row = torch.stack(values_by_tau, dim=-1).tolist()
    logprobs = shifted - shifted.logsumexp(dim=-1, keepdim=True)
    tau_names = [str(tau) for tau in TAU_GRID]
    scores = []
    for row_logprobs, ids, values in zip(logprobs, candidates, values_by_row, strict=True):
        candidate_logprobs = tuple(row_logprobs[list(ids)].tolist())
        logsumexp = dict(zip(tau_names, values, strict=True))
        scores.append(Scores(logprobs=candidate_logprobs, logsumexp=logsumexp))
    return scores


def _find_end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens in the model's generation settings and in the tokenizer."""
    generation_config = getattr(model, "generation_config", None)
    model_ends = getattr(generation_config, "eos_token_id", None)
    if not isinstance(model_ends, list):
        model_ends = [model_ends]
    ends = [*model_ends, tokenizer.eos_token_id]
    return frozenset(int(token) for token in ends if token is not None)


def _load_pretrained(auto_class: Any, path: str | Path, **options: Any) -> Any:
    """Call `from_pretrained` without remote code; raise a one-line DataError if it fails."""
    check_model(path)
    check_hub(path)
    try:
        return auto_class.from_pretrained(str(path), trust_remote_code=False, **options)
    except ImportError:  # its message names the package to install
        raise
    except Exception as error:  # a damaged file or an unknown architecture may raise anything
        reason = type(error).__name__
        if str(error):
            reason = str(error).splitlines()[0]
        raise DataError(path, None, f"cannot be loaded: {reason}") from None
