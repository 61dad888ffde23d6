"""Generate and score with vLLM in this process (offline). Tested on a CPU, not yet on a GPU.

A single vLLM engine that returns raw log-probabilities does both. A label is scored by a separate request: one token
after the label's context, with the log-probabilities of the whole vocabulary. They equal the logits up to a constant,
so the scores are exact at every temperature. vLLM's prefix cache has the keys and values of the context, so such a
request runs at most one block of tokens. The token that it draws is not used. Nothing is masked, because vLLM would
renormalise the rest. No reasoning parser is used, so that token ids, text and log-probabilities match.
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

# vLLM refuses higher temperatures. A recipe's `decode: greedy` rescales the stored answers and samples nothing.
MAX_TEMPERATURE = 2.0
# Number of labels scored at a time: vLLM returns a vocabulary of 152k as Python numbers, about 17 MB per label.
ROWS_AT_ONCE = 32
# `head_dtype`: the logits of a bf16 head change a two-label confidence by up to 1.5 points.
ENGINE_OPTIONS = {"logprobs_mode": "raw_logprobs", "max_logprobs": -1, "hf_overrides": {"head_dtype": "float32"}}
# Sampling parameters of a request that scores a label.
SCORING = {"temperature": 0.0, "max_tokens": 1, "logprobs": -1, "flat_logprobs": True, "detokenize": False}


class VLLMEngine(Engine):
    """An engine for a model that vLLM loads.

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
        self.positions = int(config.max_model_len) - 1  # one is left for the token that scoring generates
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
    """Return vLLM's sampling parameters for a request.

    Args:
        request: The request.

    Returns:
        Keyword arguments of `vllm.SamplingParams`.

    Raises:
        ValueError: The temperature is higher than vLLM allows.
    """
    if request.temperature > MAX_TEMPERATURE:
        limit = f"vLLM samples at temperatures up to {MAX_TEMPERATURE:g}, got {request.temperature:g}"
        remedy = "use evaluation.decode greedy, which samples nothing, or the engine transformers"
        raise ValueError(f"{limit}: {remedy}")
    return {
        "temperature": request.temperature,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "logprobs": 0,  # that of the drawn token only
        "stop": list(request.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }


def read_generation(request: Request, output: Any, tokenizer: Any, model: str) -> Generation:
    """Read a `RequestOutput` of vLLM. The end token is dropped; the text is decoded here and cut after the stop text.

    Args:
        request: The request.
        output: The `RequestOutput`.
        tokenizer: The model's tokenizer.
        model: Name of the model that is stored with the response.

    Returns:
        The generation. Its mean log-probability is None without tokens.
    """
    response = output.outputs[0]
    ids = list(response.token_ids)
    # A model may have end tokens besides the tokenizer's. If one of these was drawn, `stop_reason` is its id. If the
    # response ended at a stop text, `stop_reason` is that text, which equals no id.
    if ids and ids[-1] in (tokenizer.eos_token_id, response.stop_reason):
        ids.pop()
    text = decode_ids(tokenizer, ids)
    logprobs = []
    # Not strict: after the others, `response.logprobs` may have an entry for the end token that was dropped.
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
    """Read the log-probabilities of the whole vocabulary at the single generated position.

    Args:
        output: A `RequestOutput` of vLLM for one token, with all log-probabilities.
        vocabulary: Size V of the vocabulary.

    Returns:
        The log-probability of every token id, (V,) in float64.

    Raises:
        ValueError: The log-probability of a token is missing.
    """
    flat = output.outputs[0].logprobs
    row = np.full(vocabulary, np.nan)
    if flat is not None:
        # vLLM's `FlatLogprobs` lists the drawn token twice, with the same value: first, and again among all tokens.
        row[np.asarray(flat.token_ids, dtype=np.int64)] = flat.logprobs
    missing = int(np.isnan(row).sum())
    if missing:
        raise ValueError(f"vLLM returned no log-probability for {missing:,} of {vocabulary:,} tokens at a label")
    return torch.from_numpy(row)
