"""Generate and score with vLLM in this process (offline). It was run on a CPU, not yet on a GPU.

One engine of raw log-probabilities does both. A label is scored by a request of its own: one token after the label's
context with the log-probabilities of the whole vocabulary. They are the logits less a constant, so every tau is exact.
vLLM has the context's keys and values in its prefix cache, so that such a request runs at most one block of tokens.
The token that it draws is not used, and nothing is masked: vLLM renormalises what a mask leaves.
No reasoning parser is used, so that token ids, text and log-probabilities line up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from catto.engines.base import Context, Engine, Generation, Request, Scores, find_stop_end
from catto.engines.transformers import score_candidates
from catto.prompts import prompt_ids
from catto.records import Key
from catto.token_ids import decode_ids

# vLLM refuses more. A recipe's `decode: greedy` rescales the stored answers and samples nothing.
MOST_TEMPERATURE = 2.0
# Labels in memory at a time: a vocabulary of 152k comes as Python numbers, some 17 MB per label.
ROWS_AT_ONCE = 32
# `head_dtype`: logits of a bf16 head move a two-label confidence by up to 1.5 points.
ENGINE_OPTIONS = {"logprobs_mode": "raw_logprobs", "max_logprobs": -1, "hf_overrides": {"head_dtype": "float32"}}
# Sampling parameters of a request that scores a label.
SCORING = {"temperature": 0.0, "max_tokens": 1, "logprobs": -1, "flat_logprobs": True, "detokenize": False}


class VLLMEngine(Engine):
    """The `Engine` protocol on a model that vLLM loads.

    Args:
        model: A folder or a hub id.
        batch_size: Maximum number of responses requested at once; vLLM itself batches them.
        **options: Keyword arguments of `vllm.LLM`, such as tensor_parallel_size or dtype.
    """

    def __init__(self, model: str, *, batch_size: int = 256, **options: Any) -> None:
        import vllm

        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(model=model, **{**ENGINE_OPTIONS, **options})
        config = self._llm.llm_engine.model_config
        self.model = model
        self.tokenizer = self._llm.get_tokenizer()
        self.positions = int(config.max_model_len) - 1  # a scored context is followed by one token
        self._vocabulary = int(config.get_vocab_size())
        self.name = f"vllm {vllm.__version__} {config.dtype}".replace("torch.", "")
        self.batch_size = batch_size

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the generations whose keys are not in `done`, in the order of the requests."""
        missing = [request for request in requests if request.key not in done]
        prompts = []
        params = []
        for request in missing:
            token_ids = list(prompt_ids(self.tokenizer, request.messages))
            prompts.append({"prompt_token_ids": token_ids})
            params.append(self._params(**sampling_parameters(request)))
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        for request, output in zip(missing, outputs, strict=True):
            yield read_generation(request, output, self.tokenizer, self.model)

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order."""
        scores: list[Scores] = []
        for start in range(0, len(contexts), ROWS_AT_ONCE):
            batch = contexts[start : start + ROWS_AT_ONCE]
            prompts = []
            for context in batch:
                token_ids = [*prompt_ids(self.tokenizer, context.messages), *context.prefix]
                prompts.append({"prompt_token_ids": token_ids})
            outputs = self._llm.generate(prompts, self._params(**SCORING), use_tqdm=False)
            rows = torch.stack([read_row(output, self._vocabulary) for output in outputs])
            candidates = [context.candidates for context in batch]
            scores += score_candidates(rows, candidates)
        return scores


def sampling_parameters(request: Request) -> dict[str, Any]:
    """Return vLLM's sampling parameters of a request; `logprobs` 0 returns that of the drawn token.

    Raises:
        ValueError: vLLM refuses so high a temperature.
    """
    if request.temperature > MOST_TEMPERATURE:
        limit = f"vLLM samples at temperatures up to {MOST_TEMPERATURE:g}, got {request.temperature:g}"
        raise ValueError(f"{limit}: evaluation.decode greedy samples nothing, the engine transformers samples at any")
    return {
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "logprobs": 0,
        "stop": list(request.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }


def read_generation(request: Request, output: Any, tokenizer: Any, model: str) -> Generation:
    """Read a vLLM `RequestOutput`. Its end token is dropped, and its text is decoded here and cut after the stop text.

    Args:
        request: What was asked.
        output: The `RequestOutput`.
        tokenizer: The model's tokenizer.
        model: Name of the model in the record.
    """
    response = output.outputs[0]
    ids = list(response.token_ids)
    # `stop_reason` is the stop text, or the token if it is another of the model's end tokens.
    if ids and ids[-1] in (tokenizer.eos_token_id, response.stop_reason):
        ids.pop()
    text = decode_ids(tokenizer, ids)
    logprobs = []
    for token, candidates in zip(ids, response.logprobs or (), strict=False):
        logprobs.append(candidates[token].logprob)
    return Generation(
        question=request.question,
        sample=request.sample,
        text=text[: find_stop_end(text, request.stop)],
        token_ids=tuple(ids),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        prompt_tokens=len(output.prompt_token_ids or ()),
        tokens=len(ids),
        finish_reason=response.finish_reason,
        model=model,
    )


def read_row(output: Any, vocabulary: int) -> Tensor:
    """Read the log-probabilities of the whole vocabulary at the one position that was drawn, (V,) float64.

    vLLM's `FlatLogprobs` has the drawn token first, and again among all of them.

    Raises:
        ValueError: Tokens are missing.
    """
    flat = output.outputs[0].logprobs
    row = np.full(vocabulary, np.nan)
    if flat is not None:
        row[np.asarray(flat.token_ids, dtype=np.int64)] = flat.logprobs
    missing = int(np.isnan(row).sum())
    if missing:
        raise ValueError(f"vLLM returned no log-probability for {missing:,} of {vocabulary:,} tokens at a label")
    return torch.from_numpy(row)
