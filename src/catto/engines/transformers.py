"""Generate and score with a model of Transformers in this process.

Any causal language model that takes `logits_to_keep` will do, also one in the middle of training: its weights, mode and
configuration are left as they were. Prompts of equal messages are computed once a batch; logits and sampling are fp32
and float64 (see `decoding` and `sampling`), and no more than one batch's next-token logits exist at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor

from catto.engines import TAU_GRID, Context, Generation, Key, Request, Scores
from catto.engines.decoding import Row, as_float64, decode_rows, evaluating, last_logits
from catto.engines.places import check_model
from catto.problems import DataError
from catto.prompts import prompt_text
from catto.records import Message

Batch = dict[tuple[int, ...], list[Row]]


class TransformersEngine:
    """The `Engine` protocol on a loaded model and its tokenizer.

    `batch_size` is the number of responses (or contexts) that run at once. A generation's `token_ids` are the generated
    tokens without the end-of-sequence token; its `text` is their decoding with special tokens shown, cut after the stop
    text; `mean_logprob` is over `token_ids` at temperature 1; `seconds` run from its batch's start to its last token.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int = 16, model_name: str | None = None) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        self.network = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.model = model_name or model.config.name_or_path or type(model).__name__
        self.name = engine_name(model.dtype)
        self._eos = end_tokens(model, tokenizer)
        self._positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        adapter: str | Path | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 16,
    ) -> Self:
        """Load a checkpoint folder, a LoRA adapter's folder or a hub id; bf16 on an accelerator, fp32 on the CPU.

        An adapter stays unmerged: merged into bf16 weights, a small update would be rounded away.
        """
        place = torch.device(device) if device is not None else default_device()
        wide = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
        base, lora = (path, adapter) if adapter is not None else _split_adapter(path)
        model = _pretrained(transformers.AutoModelForCausalLM, base, dtype=wide)
        if lora is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(lora))
        source = lora if lora is not None and (Path(lora) / "tokenizer_config.json").exists() else base
        tokenizer = _pretrained(transformers.AutoTokenizer, source)
        return cls(model.to(place), tokenizer, batch_size=batch_size, model_name=str(lora or base))

    def generate(self, requests: Sequence[Request], done: Collection[Key] = ()) -> Iterator[Generation]:
        """Yield the generations whose keys are not in `done`, batch by batch, longest prompts first.

        The batches follow from the full list of requests: one that is partly done is computed whole, so that a run that
        was killed goes on with the same batch shapes and so the same tokens, to the bit.
        """
        return self._generations(self._batches(requests), frozenset(done))

    def _generations(self, batches: list[Batch], done: frozenset[Key]) -> Iterator[Generation]:
        for batch in batches:
            rows = [row for group in batch.values() for row in group]
            missing = [row for row in rows if row.request.key not in done]
            if missing:
                self._run(batch)
                yield from (row.generation(self._decode, self.model) for row in missing)

    def _run(self, batch: Batch) -> None:
        with evaluating(self.network):
            decode_rows(self.network, batch, self._eos, self._decode)

    def _batches(self, requests: Sequence[Request]) -> list[Batch]:
        """Pack requests by prompt, longest first; a prompt's requests stay together up to `batch_size`."""
        _check(requests)
        groups: dict[tuple[int, ...], list[Row]] = {}
        prompts = self._prompts([request.messages for request in requests])
        for request in requests:
            ids = prompts[request.messages]
            groups.setdefault(ids, []).append(Row(request, len(ids), self._limit(request, len(ids))))
        return pack(groups, self.batch_size)

    def _limit(self, request: Request, prompt_tokens: int) -> int:
        """Most tokens the response may have: `max_tokens`, less where the model's positions end."""
        self._check_length(prompt_tokens + 1, f"question {request.question}: prompt and response")
        return (
            request.max_tokens if self._positions is None else min(request.max_tokens, self._positions - prompt_tokens)
        )

    def _check_length(self, tokens: int, what: str) -> None:
        if self._positions is not None and tokens > self._positions:
            raise ValueError(f"{what} need {tokens} tokens, the model has {self._positions} positions")

    def score(self, contexts: Sequence[Context]) -> list[Scores]:
        """Score the candidates of every context, in order; contexts of like length share a forward."""
        prompts = self._prompts([context.messages for context in contexts])
        sequences = [(*prompts[context.messages], *context.prefix) for context in contexts]
        for place, sequence in enumerate(sequences):
            self._check_length(len(sequence), f"context {place}: prompt and prefix")
        order = sorted(range(len(contexts)), key=lambda place: -len(sequences[place]))
        scores: dict[int, Scores] = {}
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            with evaluating(self.network):
                logits = as_float64(last_logits(self.network, [sequences[place] for place in places]))
                found = candidate_scores(logits, [contexts[place].candidates for place in places])
            scores.update(zip(places, found, strict=True))
        return [scores[place] for place in range(len(contexts))]

    def _prompts(self, chats: Sequence[tuple[Message, ...]]) -> dict[tuple[Message, ...], tuple[int, ...]]:
        """Tokenize every different chat once."""
        return {chat: prompt_ids(self.tokenizer, chat) for chat in dict.fromkeys(chats)}

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


def engine_name(dtype: torch.dtype) -> str:
    """What stands in the `engine` field of a prediction: `transformers 5.22.2 float32 torch 2.13.0`."""
    precision = str(dtype).removeprefix("torch.")
    return f"transformers {transformers.__version__} {precision} torch {torch.__version__.partition('+')[0]}"


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Token ids that end a response: the generation config's and the tokenizer's."""
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(int(token) for token in (*listed, tokenizer.eos_token_id) if token is not None)


def default_device() -> torch.device:
    """The accelerator where there is one, else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def pack(groups: Batch, batch_size: int) -> list[Batch]:
    """Cut groups of rows, longest prompt first, into batches of `batch_size` rows at most; only larger groups split."""
    batches: list[Batch] = []
    room = 0
    for ids, rows in sorted(groups.items(), key=lambda group: -len(group[0])):
        for start in range(0, len(rows), batch_size):
            chunk = rows[start : start + batch_size]
            if len(chunk) > room:
                batches.append({})
                room = batch_size
            batches[-1][ids] = chunk
            room -= len(chunk)
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


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """Render a chat with the tokenizer's template, ready for the response, and tokenize it."""
    ids = tuple(tokenizer(prompt_text(messages, tokenizer), add_special_tokens=False)["input_ids"])
    if not ids:
        raise ValueError("the chat template renders an empty prompt")
    return ids


def _check(requests: Sequence[Request]) -> None:
    seen: set[Key] = set()
    for request in requests:
        if request.key in seen:
            raise ValueError(f"question {request.question} sample {request.sample} is requested twice")
        seen.add(request.key)
        if "" in request.stop:
            raise ValueError(f"question {request.question}: a stop text is empty")


def _split_adapter(path: str | Path) -> tuple[str | Path, str | Path | None]:
    """Take a folder with `adapter_config.json` apart into its base model and itself."""
    if not (Path(path) / "adapter_config.json").exists():
        return path, None
    from peft import PeftConfig

    base = PeftConfig.from_pretrained(str(path)).base_model_name_or_path
    if not base:
        raise DataError(Path(path) / "adapter_config.json", None, "base_model_name_or_path: expected the base model")
    return str(base), path


def _pretrained(kind: Any, path: str | Path, **options: Any) -> Any:
    """`from_pretrained` without remote code; what it cannot find is told in one line."""
    check_model(path)
    try:
        return kind.from_pretrained(str(path), trust_remote_code=False, **options)
    except ImportError:
        raise
    except Exception as error:  # a damaged file or an unknown architecture may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(path, None, f"cannot be loaded: {reason}") from None
