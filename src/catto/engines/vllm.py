"""Generate and score with vLLM in this process (offline). Untested on hardware: only requests and replies are tested.

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
# A whole vocabulary of 152k comes as Python numbers, some 17 MB a label: so many labels are in memory at a time.
ROWS_AT_ONCE = 32
# `head_dtype`: logits of a bf16 head move a two-label confidence by up to 1.5 points.
ENGINE = {"logprobs_mode": "raw_logprobs", "max_logprobs": -1, "hf_overrides": {"head_dtype": "float32"}}
SCORED = {"temperature": 0.0, "max_tokens": 1, "logprobs": -1, "flat_logprobs": True, "detokenize": False}


class VLLMEngine(Engine):
    """The `Engine` protocol on a model that vLLM loads. `options` go to `vllm.LLM` (tensor_parallel_size, dtype, ...).

    vLLM batches by itself; `batch_size` only limits how many responses are requested at once.
    """

    def __init__(self, model: str, *, batch_size: int = 256, **options: Any) -> None:
        import vllm

        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(model=model, **{**ENGINE, **options})
        config = self._llm.llm_engine.model_config
        self.model = model
        self.tokenizer = self._llm.get_tokenizer()
        self.positions = int(config.max_model_len) - 1  # a scored context is followed by one token
        self._vocabulary = int(config.get_vocab_size())
        self.name = f"vllm {vllm.__version__} {config.dtype}".replace("torch.", "")
        self.batch_size = batch_size

    def generate(self, requests: Iterable[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the generations whose keys are not in `done`, in the order of the requests."""
        todo = [request for request in requests if request.key not in done]
        prompts = [{"prompt_token_ids": list(prompt_ids(self.tokenizer, request.messages))} for request in todo]
        params = [self._params(**generate_fields(request)) for request in todo]
        for request, output in zip(todo, self._llm.generate(prompts, params, use_tqdm=False), strict=True):
            yield read_generation(request, output, self.tokenizer, self.model)

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order."""
        scores: list[Scores] = []
        for start in range(0, len(contexts), ROWS_AT_ONCE):
            batch = contexts[start : start + ROWS_AT_ONCE]
            ids = [[*prompt_ids(self.tokenizer, context.messages), *context.prefix] for context in batch]
            prompts = [{"prompt_token_ids": context} for context in ids]
            outputs = self._llm.generate(prompts, self._params(**SCORED), use_tqdm=False)
            rows = torch.stack([read_row(output, self._vocabulary) for output in outputs])
            scores += score_candidates(rows, [context.candidates for context in batch])
        return scores


def generate_fields(request: Request) -> dict[str, Any]:
    """Sampling parameters of a request; `logprobs` 0 returns that of the drawn token."""
    if request.temperature > MOST_TEMPERATURE:
        limit = f"vLLM samples at temperatures up to {MOST_TEMPERATURE:g}, got {request.temperature:g}"
        raise ValueError(f"{limit}: evaluation.decode greedy samples nothing, the engine transformers samples at any")
    drawn = {"temperature": request.temperature, "seed": request.seed, "max_tokens": request.max_tokens, "logprobs": 0}
    text = {"stop": list(request.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return drawn | text


def read_generation(request: Request, output: Any, tokenizer: Any, model: str) -> Generation:
    """Read a vLLM `RequestOutput`: the token that ends it removed, text decoded here and cut after the stop text."""
    response = output.outputs[0]
    ids = list(response.token_ids)
    # `stop_reason` is the token where it is another of the model's end tokens, or the stop text
    if ids and ids[-1] in (tokenizer.eos_token_id, response.stop_reason):
        ids.pop()
    text = decode_ids(tokenizer, ids)
    logprobs = [place[token].logprob for token, place in zip(ids, response.logprobs or (), strict=False)]
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
    """
    flat = output.outputs[0].logprobs
    row = np.full(vocabulary, np.nan)
    if flat is not None:
        row[np.asarray(flat.token_ids, dtype=np.int64)] = flat.logprobs
    if unknown := int(np.isnan(row).sum()):
        raise ValueError(f"vLLM returned no log-probability for {unknown:,} of {vocabulary:,} tokens at a label")
    return torch.from_numpy(row)
