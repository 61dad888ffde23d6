"""Generate and score with a model of Transformers in this process.

Any causal language model that takes `logits_to_keep` works, also one in the middle of training: its weights, mode and
configuration stay as they were. Equal prompts of a batch run once; logits and sampling are fp32 and float64 (see
`decoding`), and no more than one batch's next-token logits exist at a time.
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
    HeadHook,
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
    """The `Engine` protocol on a loaded model and its tokenizer.

    `batch_size` is the number of responses (or contexts) that run at once. A generation's `token_ids` are the generated
    tokens without the end-of-sequence token; its `text` is their decoding with special tokens shown, cut after the stop
    text; `mean_logprob` is over `token_ids` at temperature 1; `seconds` run from its batch's start to its last token.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int = 16, model_name: str | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        if any(config.is_prompt_learning for config in getattr(model, "peft_config", {}).values()):
            raise ValueError("the adapter puts virtual tokens in front of every call, which generation does not expect")
        self.network = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.model = model_name or model.config.name_or_path or type(model).__name__
        precision, version = str(model.dtype).removeprefix("torch."), torch.__version__.partition("+")[0]
        self.name = f"transformers {transformers.__version__} {precision} torch {version}"
        self.positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
        self._eos = frozenset(int(token) for token in ends if token is not None)
        self._rendered = lru_cache(maxsize=1024)(partial(prompt_ids, tokenizer))  # scored just after it is generated
        # tokens and states of requests with `keep_states`, until the next call
        self._kept: dict[Key | None, tuple[tuple[int, ...], Tensor]] = {}

    @classmethod
    def load(cls, path: str | Path, *, dtype: torch.dtype | None = None, batch_size: int = 16) -> Self:
        """Load a checkpoint folder, a LoRA adapter's folder or a hub id; bf16 on an accelerator, fp32 on the CPU.

        An adapter stays unmerged: merged into bf16 weights, a small update would be rounded away.
        """
        place = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        wide = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
        base, adapter = path, Path(path) / "adapter_config.json"
        if adapter.exists():
            from peft import PeftConfig, PeftModel

            base = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
            if not base:
                raise DataError(adapter, None, "base_model_name_or_path: expected the base model")
        model = _pretrained(transformers.AutoModelForCausalLM, base, dtype=wide)
        if adapter.exists():
            model = PeftModel.from_pretrained(model, str(path))
        own = (Path(path) / "tokenizer_config.json").exists()
        tokenizer = _pretrained(transformers.AutoTokenizer, path if own else base)
        return cls(model.to(place), tokenizer, batch_size=batch_size, model_name=str(path))

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the generations whose keys are not in `done`, batch by batch, longest prompts first.

        The batches follow from the full list of requests: one that is partly done is computed whole, so that a killed
        run resumes with the same batch shapes and so the same tokens, to the bit.
        """
        self._kept = {}
        responses_by_prompt: dict[tuple[int, ...], list[ResponseInProgress]] = {}
        seen: set[Key] = set()
        for request in requests:
            if request.key in seen:
                raise ValueError(f"{request.name} is requested twice")
            seen.add(request.key)
            response = self._begin_response(request)
            responses_by_prompt.setdefault(response.prompt, []).append(response)
        decode = partial(decode_ids, self.tokenizer)
        equal_lengths = counts_padding(self.network)
        for batch in pack_batches(responses_by_prompt.values(), self.batch_size, equal_lengths):
            missing = [response for response in batch if response.request.key not in done]
            if not missing:
                continue
            decode_responses(self.network, batch, self._eos, decode)
            for response in missing:
                if response.request.keep_states:  # a large model's states of several batches are better off its device
                    states = torch.stack(response.states).cpu()
                    self._kept[response.request.key] = tuple(response.ids), states
                    response.states = []
                yield self._finish_response(response, decode(response.ids)[: response.end])

    def _begin_response(self, request: Request) -> ResponseInProgress:
        """Render a request's prompt and limit its response to the model's positions."""
        if "" in request.stop:
            raise ValueError(f"question {request.question}: a stop text is empty")
        prompt = self._rendered(request.messages)
        self._check_length(len(prompt) + 1, f"question {request.question}: prompt and response")
        limit = request.max_tokens
        if self.positions is not None:
            limit = min(limit, self.positions - len(prompt))
        return ResponseInProgress(request, prompt, limit)

    def _finish_response(self, response: ResponseInProgress, text: str) -> Generation:
        """Return the record of a finished response."""
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

        A context inside a response whose states were kept needs the head alone; the others run whole, and those of like
        length share a forward.
        """
        states: dict[int, Tensor] = {}
        sequences: dict[int, tuple[int, ...]] = {}
        for index, context in enumerate(contexts):
            state = self._kept_state(context)
            if state is not None:
                states[index] = state
                continue
            sequences[index] = (*self._rendered(context.messages), *context.prefix)
            self._check_length(len(sequences[index]), f"context {index}: prompt and prefix")
        self._kept = {}

        def logits_from_states(hook: HeadHook, indices: list[int]) -> Tensor:
            return state_logits(self.network, hook, torch.stack([states[index] for index in indices]))

        def logits_from_sequences(hook: HeadHook, indices: list[int]) -> Tensor:
            return last_logits(self.network, [sequences[index] for index in indices])

        longest_first = sorted(sequences, key=lambda index: -len(sequences[index]))
        scores: dict[int, Scores] = {}
        with evaluation_mode(self.network) as hook:
            for group, compute_logits in ((list(states), logits_from_states), (longest_first, logits_from_sequences)):
                for start in range(0, len(group), self.batch_size):
                    indices = group[start : start + self.batch_size]
                    logits = as_float64(compute_logits(hook, indices))
                    batch = score_candidates(logits, [contexts[index].candidates for index in indices])
                    scores.update(zip(indices, batch, strict=True))
        return [scores[index] for index in range(len(contexts))]

    def _kept_state(self, context: Context) -> Tensor | None:
        """Return the hidden state that predicts the token after a context's prefix, if it was kept."""
        if context.response not in self._kept:
            return None
        ids, states = self._kept[context.response]
        length = len(context.prefix)
        if length < len(states) and ids[:length] == context.prefix:
            return states[length]
        return None

    def _check_length(self, tokens: int, what: str) -> None:
        if self.positions is not None and tokens > self.positions:
            raise ValueError(f"{what} need {tokens} tokens, the model has {self.positions} positions")


def pack_batches(
    groups: Iterable[list[ResponseInProgress]], batch_size: int, equal_lengths: bool = False
) -> list[list[ResponseInProgress]]:
    """Cut each prompt's responses, longest prompt first, into batches.

    Args:
        groups: Responses by prompt. A group is split only if it is larger than a batch.
        batch_size: Maximum number of responses in a batch.
        equal_lengths: Whether a batch has prompts of one length, which need no padding.

    Returns:
        The batches.
    """
    batches: list[list[ResponseInProgress]] = []
    for responses in sorted(groups, key=lambda responses: -len(responses[0].prompt)):
        for start in range(0, len(responses), batch_size):
            chunk = responses[start : start + batch_size]
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
    """Compute the log-softmax at each row's candidates, and log-sum-exps on the grid of temperatures.

    Args:
        logits: (B, V) in float64.
        candidates: Token ids of each row.

    Returns:
        For each row the candidates' log-probabilities and `logsumexp(logits / tau) - max / tau` for every tau.
    """
    vocabulary = logits.shape[-1]
    for ids in candidates:
        if any(not 0 <= token < vocabulary for token in ids):
            raise ValueError(f"candidates {ids}: expected token ids below {vocabulary}")
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    by_tau = [(shifted / tau).exp_().sum(dim=-1).log_() for tau in TAU_GRID]
    grids = torch.stack(by_tau, dim=-1).tolist()
    logprobs = shifted - shifted.logsumexp(dim=-1, keepdim=True)
    names = [str(tau) for tau in TAU_GRID]
    scores = []
    for row, ids, grid in zip(logprobs, candidates, grids, strict=True):
        at_candidates = tuple(row[list(ids)].tolist())
        scores.append(Scores(logprobs=at_candidates, logsumexp=dict(zip(names, grid, strict=True))))
    return scores


def _pretrained(kind: Any, path: str | Path, **options: Any) -> Any:
    """`from_pretrained` without remote code; a failure is one line."""
    check_model(path)
    check_hub(path)
    try:
        return kind.from_pretrained(str(path), trust_remote_code=False, **options)
    except ImportError:
        raise
    except Exception as error:  # a damaged file or an unknown architecture may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(path, None, f"cannot be loaded: {reason}") from None
