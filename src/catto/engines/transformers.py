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

from catto.engines import TAU_GRID, Context, Engine, Generation, Key, Request, Scores, check_hub, check_model
from catto.engines.decoding import Row, as_float64, counts_padding, decode_rows, evaluating, last_logits, state_logits
from catto.labels import decoded
from catto.problems import DataError
from catto.prompts import prompt_ids


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
        groups: dict[tuple[int, ...], list[Row]] = {}
        seen: set[Key] = set()
        for request in requests:
            if request.key in seen:
                raise ValueError(f"{request.name} is requested twice")
            seen.add(request.key)
            if "" in request.stop:
                raise ValueError(f"question {request.question}: a stop text is empty")
            prompt, limit = self._rendered(request.messages), request.max_tokens
            self._check_length(len(prompt) + 1, f"question {request.question}: prompt and response")
            limit = limit if self.positions is None else min(limit, self.positions - len(prompt))
            groups.setdefault(prompt, []).append(Row(request, prompt, limit))
        decode = partial(decoded, self.tokenizer)
        for rows in pack(groups.values(), self.batch_size, counts_padding(self.network)):
            missing = [row for row in rows if row.request.key not in done]
            if not missing:
                continue
            decode_rows(self.network, rows, self._eos, decode)
            for row in missing:
                if row.request.keep_states:  # a large model's states of several batches are better off its device
                    self._kept[row.request.key] = tuple(row.ids), torch.stack(row.states).cpu()
                    row.states = []
                yield Generation(
                    question=row.request.question,
                    sample=row.request.sample,
                    text=decode(row.ids)[: row.end],
                    token_ids=tuple(row.ids),
                    mean_logprob=row.logprob / len(row.ids) if row.ids else None,
                    prompt_tokens=len(row.prompt),
                    tokens=len(row.ids),
                    finish_reason=row.finish_reason,
                    model=self.model,
                    seconds=row.seconds,
                )

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order.

        A context inside a response whose states were kept needs the head alone; the others run whole, and those of like
        length share a forward.
        """
        states: dict[int, Tensor] = {}
        sequences: dict[int, tuple[int, ...]] = {}
        for place, context in enumerate(contexts):
            ids, kept = self._kept.get(context.response, ((), ()))
            length = len(context.prefix)
            if length < len(kept) and ids[:length] == context.prefix:
                states[place] = kept[length]
                continue
            sequences[place] = (*self._rendered(context.messages), *context.prefix)
            self._check_length(len(sequences[place]), f"context {place}: prompt and prefix")
        self._kept = {}
        scores: dict[int, Scores] = {}
        longest_first = sorted(sequences, key=lambda place: -len(sequences[place]))
        with evaluating(self.network) as head:
            for group in (list(states), longest_first):
                for start in range(0, len(group), self.batch_size):
                    places = group[start : start + self.batch_size]
                    if group is longest_first:
                        logits = last_logits(self.network, [sequences[place] for place in places])
                    else:
                        logits = state_logits(self.network, head, torch.stack([states[place] for place in places]))
                    batch = candidate_scores(as_float64(logits), [contexts[place].candidates for place in places])
                    scores.update(zip(places, batch, strict=True))
        return [scores[place] for place in range(len(contexts))]

    def _check_length(self, tokens: int, what: str) -> None:
        if self.positions is not None and tokens > self.positions:
            raise ValueError(f"{what} need {tokens} tokens, the model has {self.positions} positions")


def pack(groups: Iterable[list[Row]], batch_size: int, even: bool = False) -> list[list[Row]]:
    """Cut each prompt's rows, longest prompt first, into batches of `batch_size` at most; only larger groups split.

    even: a batch has prompts of one length, which need no padding.
    """
    batches: list[list[Row]] = []
    for rows in sorted(groups, key=lambda rows: -len(rows[0].prompt)):
        for start in range(0, len(rows), batch_size):
            chunk = rows[start : start + batch_size]
            uneven = even and batches and len(batches[-1][0].prompt) != len(chunk[0].prompt)
            if not batches or uneven or len(batches[-1]) + len(chunk) > batch_size:
                batches.append([])
            batches[-1] += chunk
    return batches


def candidate_scores(logits: Tensor, candidates: Sequence[tuple[int, ...]]) -> list[Scores]:
    """Log-softmax at each row's candidates; `logsumexp(logits / tau) - max / tau` on the grid. logits: (B, V)."""
    for ids in candidates:
        if any(not 0 <= token < logits.shape[-1] for token in ids):
            raise ValueError(f"candidates {ids}: expected token ids below {logits.shape[-1]}")
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    grids = torch.stack([(shifted / tau).exp_().sum(dim=-1).log_() for tau in TAU_GRID], dim=-1).tolist()
    logprobs = shifted - shifted.logsumexp(dim=-1, keepdim=True)
    return [
        Scores(logprobs=tuple(row[list(ids)].tolist()), logsumexp=dict(zip(map(str, TAU_GRID), grid, strict=True)))
        for row, ids, grid in zip(logprobs, candidates, grids, strict=True)
    ]


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
