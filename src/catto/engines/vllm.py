"""Generate and score with vLLM in this process (offline). Untested on hardware: only requests and replies are tested.

Labels are scored with `logprob_token_ids`, and the one token drawn is held to them by `allowed_token_ids`: vLLM masks
those after raw log-probabilities are taken. Guided choice masks before, which would renormalise the confidence.
No reasoning parser is used, so that token ids, text and log-probabilities line up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from catto.engines import Context, Engine, Generation, Key, Request, Scores, stop_end
from catto.labels import decoded
from catto.prompts import prompt_ids
from catto.records import Message

# vLLM 0.32 takes so many `logprob_token_ids`.
MOST_CANDIDATES = 128


class VLLMEngine(Engine):
    """The `Engine` protocol on a model that vLLM loads. `options` go to `vllm.LLM` (tensor_parallel_size, dtype, ...).

    vLLM batches by itself; `batch_size` only limits how many responses are requested at once. It gives no log-sum-exp
    of the logits, so its predictions cannot be rescaled to another tau from the file.
    """

    def __init__(self, model: str, *, batch_size: int = 256, **options: Any) -> None:
        try:
            import vllm
        except ModuleNotFoundError as error:
            raise ImportError(f"this engine needs {error.name}: pip install 'catto[vllm]'", name=error.name) from None

        self._vllm = vllm
        self._llm = vllm.LLM(model=model, logprobs_mode="raw_logprobs", **options)
        config = self._llm.llm_engine.model_config
        self.model = model
        self.tokenizer = self._llm.get_tokenizer()
        self.positions = int(config.max_model_len)
        self.name = f"vllm {vllm.__version__} {config.dtype}".replace("torch.", "")
        self.batch_size = batch_size

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the generations whose keys are not in `done`, in the order of the requests."""
        todo = [request for request in requests if request.key not in done]
        prompts = [prompt_fields(self.tokenizer, request.messages) for request in todo]
        params = [self._vllm.SamplingParams(**generate_fields(request)) for request in todo]
        for request, output in zip(todo, self._llm.generate(prompts, params, use_tqdm=False), strict=True):
            yield read_generation(request, output, self.tokenizer, self.model)

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order."""
        prompts = [prompt_fields(self.tokenizer, context.messages, context.prefix) for context in contexts]
        params = [self._vllm.SamplingParams(**score_fields(context)) for context in contexts]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [read_scores(context, output) for context, output in zip(contexts, outputs, strict=True)]


def prompt_fields(tokenizer: Any, chat: Sequence[Message], prefix: Sequence[int] = ()) -> dict[str, list[int]]:
    """A prompt as token ids: the chat by its template, then the response so far."""
    return {"prompt_token_ids": [*prompt_ids(tokenizer, chat), *prefix]}


def generate_fields(request: Request) -> dict[str, Any]:
    """Sampling parameters of a request; `logprobs` 0 returns that of the drawn token."""
    drawn = {"temperature": request.temperature, "seed": request.seed, "max_tokens": request.max_tokens, "logprobs": 0}
    text = {"stop": list(request.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return drawn | text


def score_fields(context: Context) -> dict[str, Any]:
    """Sampling parameters that draw one token among the candidates and return all their raw log-probabilities."""
    tokens = list(dict.fromkeys(context.candidates))
    if not 0 < len(tokens) <= MOST_CANDIDATES:
        raise ValueError(f"{len(tokens)} candidates, vLLM scores 1 to {MOST_CANDIDATES}")
    limits = {"logprob_token_ids": tokens, "allowed_token_ids": tokens}
    return {"temperature": 0.0, "max_tokens": 1, "detokenize": False, **limits}


def read_generation(request: Request, output: Any, tokenizer: Any, model: str) -> Generation:
    """Read a vLLM `RequestOutput`: end-of-sequence token removed, text decoded here and cut after the stop text."""
    response = output.outputs[0]
    ids = list(response.token_ids)
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    text = decoded(tokenizer, ids)
    logprobs = [place[token].logprob for token, place in zip(ids, response.logprobs or (), strict=False)]
    return Generation(
        question=request.question,
        sample=request.sample,
        text=text[: stop_end(text, request.stop)],
        token_ids=tuple(ids),
        mean_logprob=sum(logprobs) / len(logprobs) if logprobs else None,
        prompt_tokens=len(output.prompt_token_ids or ()),
        tokens=len(ids),
        finish_reason=response.finish_reason,
        model=model,
    )


def read_scores(context: Context, output: Any) -> Scores:
    """Read the candidates' log-probabilities at the one position that was drawn."""
    places = output.outputs[0].logprobs
    if not places:
        raise ValueError("vLLM returned no log-probabilities for a scored context")
    if missing := [token for token in context.candidates if token not in places[0]]:
        raise ValueError(f"vLLM returned no log-probability for token {missing[0]}: logprob_token_ids was not honoured")
    return Scores(logprobs=tuple(float(places[0][token].logprob) for token in context.candidates))
