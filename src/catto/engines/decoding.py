"""Generate with a causal language model of Transformers, so that a response depends only on its own request.

Each token is drawn with one uniform number, a hash of (seed, question, sample, position), by inverting the cumulative
distribution. No random state is shared. Other requests in the batch, the batch size and the point at which a run was
killed therefore change nothing but float noise: a token can only change if its number is within about 1e-6 of a
boundary between two tokens.

The head runs in fp32, on the last position only. Each prompt runs once for all of its samples, and the beginning that
all prompts of a batch share runs once for the batch. The hidden states that enter the head may be kept: from them, the
head alone recomputes the logits of any position.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from catto.engines.base import Request, find_stop_end
from catto.token_ids import count_shared_beginning

# Any valid id works: padding is masked (on the left) or comes after every position that is read (on the right).
PAD = 0
# Fields of a model's output with its cache: of attention layers, and of state-space layers.
CACHE_NAMES = ("past_key_values", "cache_params")


def hash_uniform(seed: int, question: str, sample: int, position: int) -> float:
    """Hash (seed, question, sample, position) to a number in [0, 1), a multiple of 2^-53."""
    key = f"{seed}:{sample}:{position}:{question}"
    digest = hashlib.sha256(key.encode()).digest()
    first_64_bits = int.from_bytes(digest[:8], "big")
    return (first_64_bits >> 11) * 2.0**-53


def draw_tokens(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> Tensor:
    """Draw one token per row: the argmax at temperature 0, otherwise by inverting the cumulative distribution.

    The inverse is the first id j with P(id <= j) > u under softmax(logits / temperature), where u is the row's uniform
    number. It is computed over the full vocabulary in float64. If the argmax is tied, the lowest id is chosen.

    Args:
        logits: (B, V) in fp32.
        temperatures: (B,), at least 0.
        uniforms: (B,), in [0, 1). Rows with temperature 0 ignore theirs.

    Returns:
        Token ids (B,).

    >>> draw_tokens(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), [0.0, 1.0], [0.9, 0.4]).tolist()
    [1, 0]
    """
    tokens = logits.argmax(dim=-1)
    sampled_rows = [row for row, temperature in enumerate(temperatures) if temperature > 0]
    if not sampled_rows:
        return tokens
    values = as_float64(logits[sampled_rows])
    divisors = values.new_tensor([[temperatures[row]] for row in sampled_rows])
    # In place, since a batch of float64 logits is large.
    values.sub_(values.amax(dim=-1, keepdim=True))
    cumulative = values.div_(divisors).exp_().cumsum_(dim=-1)  # of weights that sum to `total` instead of 1
    total = cumulative[:, -1:]
    row_uniforms = cumulative.new_tensor([[uniforms[row]] for row in sampled_rows])
    # u <= 1 - 2^-53, so u * total is below total even after rounding: the id exists and has a positive probability.
    drawn = torch.searchsorted(cumulative, row_uniforms * total, right=True).squeeze(-1)
    tokens[sampled_rows] = drawn.to(logits.device)
    return tokens


def as_float64(logits: Tensor) -> Tensor:
    """Copy logits to float64, on the CPU if the device does not support float64 (Apple's MPS)."""
    if logits.device.type == "mps":
        logits = logits.cpu()
    return logits.to(torch.float64, copy=True)


@dataclass
class HeadHook:
    """Records and changes the input of the output head inside `evaluation_mode`.

    `replacement` and `positions` apply only to the next time that the head runs. If both are set, `replacement` is
    applied first.

    Attributes:
        states: The hidden states that last entered the head, (B, T, H).
        replacement: Hidden states that replace the head's next input, set by `state_logits`; None to keep the input.
        positions: The single position of each row at which the head runs next, (B,), set by `last_logits`; None to run
            it at all positions.
    """

    states: Tensor | None = None
    replacement: Tensor | None = None
    positions: Tensor | None = None

    def choose_input(self, states: Tensor) -> Tensor:
        """Return the hidden states that enter the head, and record them. Apply and clear the two other attributes."""
        if self.replacement is not None:
            states = self.replacement.to(states.device)
            self.replacement = None
        if self.positions is not None:
            rows = torch.arange(len(states), device=states.device)
            states = states[rows, self.positions.to(states.device)].unsqueeze(1)
            self.positions = None
        self.states = states
        return states


@contextmanager
def evaluation_mode(network: Any) -> Iterator[HeadHook]:
    """Disable dropout and gradients, and run the head in fp32. Restore the mode of every module afterwards.

    bf16 logits change a two-label confidence by up to 1.5 points. Only the head's matrix product is replaced. The
    model's own code still processes the logits afterwards (soft caps, scales), in fp32.

    Autocast is disabled around the model and around its head. A model that Accelerate trains in mixed precision enables
    it again in its own forward: its layers then run as in training, but the head still runs in fp32.

    Yields:
        A hook that records the input of the head and can replace its next input.

    Raises:
        ValueError: The head is not in fp32, and its product cannot be computed from its weights alone.
    """
    module: Any = network.get_output_embeddings()
    multiply = _make_fp32_product(module)
    hook = HeadHook()

    def forward(states: Tensor) -> Tensor:
        head_input = hook.choose_input(states)
        with torch.autocast(states.device.type, enabled=False):
            return multiply(head_input.float())

    modes = [(submodule, submodule.training) for submodule in network.modules()]
    # A library such as Accelerate may have set a `forward` on the instance, which has to be restored. `module.forward`
    # would also return the forward of the class, so the attributes of the instance are read.
    instance_attributes = vars(module)
    instance_forward = instance_attributes.get("forward")
    network.eval()
    instance_attributes["forward"] = forward
    try:
        with torch.inference_mode(), torch.autocast(network.device.type, enabled=False):
            yield hook
    finally:
        del instance_attributes["forward"]
        if instance_forward is not None:
            instance_attributes["forward"] = instance_forward
        for submodule, is_training in modes:
            submodule.training = is_training


def _make_fp32_product(module: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that computes the head's matrix product in fp32.

    It is the head's own forward if the head is in fp32, otherwise a linear layer with fp32 copies of its weights.

    Raises:
        ValueError: The head is neither in fp32 nor a linear layer.
    """
    if module.weight.dtype == torch.float32:
        own_forward: Callable[[Tensor], Tensor] = module.forward
        return own_forward
    # PEFT may wrap the head to train it: `original_module` is then the model's own head, and `module.weight` has the
    # trained values. Subclasses of Linear are refused, because they may compute more than the product.
    original = getattr(module, "original_module", module)
    if type(original) is not nn.Linear:
        raise ValueError(
            f"the output head is a {type(module).__name__} in {module.weight.dtype}: load the model in float32"
        )
    bias = getattr(module, "bias", None)
    if bias is not None:
        bias = bias.float()
    return functools.partial(nn.functional.linear, weight=module.weight.float(), bias=bias)


def counts_padding(network: Any) -> bool:
    """Return whether padding affects the tokens after it, because layers count positions in the sequence themselves.

    This applies to ALiBi, to GPT-Neo's local windows, and to models without `position_ids`, such as recurrent ones.
    """
    base = network.get_base_model() if hasattr(network, "get_base_model") else network
    config = base.config.get_text_config()
    has_alibi = bool(getattr(config, "alibi", False))
    has_local_windows = "local" in getattr(config, "attention_layers", ())
    accepts_positions = "position_ids" in inspect.signature(base.base_model.forward).parameters
    return has_alibi or has_local_windows or not accepts_positions


def last_logits(network: Any, hook: HeadHook, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Compute the logits after the last token of each sequence, in one forward pass without a cache.

    Sequences are padded on the right. A causal model never attends to the right, so the padding needs no mask. The hook
    selects each row's last position, since `logits_to_keep` of Transformers 5.19 keeps the same positions in every row.

    Args:
        network: A causal language model, in `evaluation_mode`.
        hook: The hook that `evaluation_mode` yields for it.
        sequences: Token ids, at least one per sequence.

    Returns:
        The logits (B, V) in fp32.

    Raises:
        ValueError: The logits are not finite.
    """
    device = network.device
    width = max(len(sequence) for sequence in sequences)
    padded_rows = []
    last_positions = []
    for sequence in sequences:
        padding = [PAD] * (width - len(sequence))
        padded_rows.append([*sequence, *padding])
        last_positions.append(len(sequence) - 1)
    hook.positions = torch.tensor(last_positions, device=device)
    output = network(input_ids=torch.tensor(padded_rows, device=device), use_cache=False)
    return _check_finite(output.logits[:, 0])  # the head has run at one position per row


def state_logits(network: Any, hook: HeadHook, states: Tensor) -> Tensor:
    """Compute the logits of kept hidden states, without running the tokens before them.

    The network runs on one dummy token per row, and `states` replace the input of its head. In this way the model's own
    code processes the logits after the head.

    Args:
        network: A causal language model, in `evaluation_mode`.
        hook: The hook that `evaluation_mode` yields for it.
        states: Hidden states (B, H) that entered the head before, as recorded in `HeadHook.states`.

    Returns:
        The logits (B, V) in fp32.

    Raises:
        ValueError: The logits are not finite.
    """
    hook.replacement = states.unsqueeze(1)
    ids = torch.full((len(states), 1), PAD, device=network.device)
    output = network(input_ids=ids, use_cache=False, logits_to_keep=1)
    return _check_finite(output.logits[:, -1])


def _check_finite(logits: Tensor) -> Tensor:
    """Return logits in fp32; ValueError if one is NaN or the largest is infinite."""
    if not torch.isfinite(logits.amax(dim=-1)).all():
        raise ValueError("the model's logits are not finite (NaN or infinity)")
    return logits.float()


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """A cache layer that writes new tokens into preallocated buffers. `keys` and `values` are views of the filled part.

    DynamicLayer copies the whole layer for every token, which took 30 % of the decoding time (SmolLM2-135M's shape, 8
    rows, 160 tokens, two cores).
    """

    keys: Any
    values: Any

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys = layer.keys
        self.values = layer.values
        self._buffers: list[Tensor] = []  # for keys and for values; empty if there are none for the current rows

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values along the sequence; return all of them, (B, heads, T, width) each."""
        past = self.keys.shape[-2]
        length = past + key_states.shape[-2]
        if not self._buffers or self._buffers[0].shape[-2] < length:
            self._allocate_buffers(past, length)
        keys, values = self._buffers
        keys[:, :, past:length] = key_states
        values[:, :, past:length] = value_states
        self.keys = keys[:, :, :length]
        self.values = values[:, :, :length]
        return self.keys, self.values

    def _allocate_buffers(self, past: int, length: int) -> None:
        """Allocate buffers for more than `length` tokens, and copy the `past` tokens into them."""
        capacity = length + max(32, length // 4)
        self._buffers = []
        for states in (self.keys, self.values):
            buffer = states.new_empty(*states.shape[:2], capacity, states.shape[-1])
            buffer[:, :, :past] = states
            self._buffers.append(buffer)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Select rows. The buffers have the old rows, so they are dropped."""
        super().reorder_cache(beam_idx)
        self._buffers = []


class CachedBatch:
    """A batch of sequences in a model's cache.

    Attributes:
        logits: Next-token logits of each sequence, (B, V) in fp32.
        states: The hidden states that entered the head for them, (B, H).

    Args:
        network: A causal language model, in `evaluation_mode`.
        hook: The hook that `evaluation_mode` yields for it.
        prompts: Token ids of each sequence.
    """

    logits: Tensor
    states: Tensor

    def __init__(self, network: Any, hook: HeadHook, prompts: Sequence[Sequence[int]]) -> None:
        """Run the shared beginning of all prompts once, then the rest of each, padded on the left.

        The padding is between the beginning and the rest. Windowed and recurrent layers would count it as tokens, so
        with such a layer every prompt runs as a whole.
        """
        self._network = network
        self._hook = hook
        self._mask: Tensor | None = None  # 1 for a token and 0 for padding, (B, T); None without padding
        # The model's cache, under the name that the model gives it in its output; empty before the first step.
        self._past: dict[str, Any] = {}
        shared_length = self._run_shared_beginning(prompts)
        self._run_rests(prompts, shared_length)
        # Only plain layers are replaced: windowed, recurrent, quantized and shared ones store their states differently.
        layers = self._cache.layers
        for index, layer in enumerate(layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                layers[index] = RoomyLayer(layer)

    def _run_shared_beginning(self, prompts: Sequence[Sequence[int]]) -> int:
        """Run the tokens that all prompts begin with, and return how many of them are in the cache afterwards.

        The cache then has one row per prompt. If 0 is returned, it is empty: the prompts share no beginning, or a layer
        of the model would count the padding after it.
        """
        shared_length = count_shared_beginning(prompts)
        if not shared_length:
            return 0
        beginning = prompts[0][:shared_length]
        self.step(torch.tensor([beginning], device=self._network.device))
        # The type of a layer is known only now, because the model has made its cache in this step.
        can_mask_padding = all(type(layer) is DynamicLayer for layer in self._cache.layers)
        if not can_mask_padding:
            self._past = {}  # discards the cache
            return 0
        self.select([0] * len(prompts))  # repeats the single row
        return shared_length

    def _run_rests(self, prompts: Sequence[Sequence[int]], shared_length: int) -> None:
        """Run the rest of each prompt. If all have the same length, no mask is needed, which is faster."""
        device = self._network.device
        rests = [prompt[shared_length:] for prompt in prompts]
        width = max(len(rest) for rest in rests)
        ids = []
        mask = []
        for rest in rests:
            padding = width - len(rest)
            ids.append([*[PAD] * padding, *rest])
            mask.append([1] * shared_length + [0] * padding + [1] * len(rest))
        has_padding = any(len(rest) < width for rest in rests)
        mask_tensor = torch.tensor(mask, device=device) if has_padding else None
        self.step(torch.tensor(ids, device=device), mask_tensor)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. A row that is listed k times becomes k rows."""
        indices = torch.tensor(rows, device=self.logits.device)
        # Selects rows in every kind of layer; linear-attention layers have no `batch_select_indices`.
        self._cache.reorder_cache(indices)
        self.logits = self.logits[indices]
        self.states = self.states[indices]
        if self._mask is not None:
            self._mask = self._mask[indices]

    def step(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """Append tokens to every row, and set `logits` and `states` to those at the last token.

        Positions count only real tokens, so padding does not shift a prompt.

        Args:
            ids: Token ids (B, T).
            mask: 1 for a token and 0 for padding, over the earlier and the new tokens, (B, length of the sequence).
                None if the new tokens have no padding, even if earlier ones have.

        Raises:
            ValueError: The model returns no cache, or logits that are not finite.
        """
        if mask is None and self._mask is not None:  # earlier tokens have padding
            mask = torch.cat([self._mask, torch.ones_like(ids)], dim=-1)
        self._mask = mask
        mask_arguments: dict[str, Tensor] = {}  # without padding, the model's own defaults are right
        if mask is not None:
            positions = (mask.cumsum(dim=-1) - 1).clamp_(min=0)  # padding before the first token would have -1
            new_tokens = ids.shape[1]
            mask_arguments["attention_mask"] = mask
            mask_arguments["position_ids"] = positions[:, -new_tokens:]
        output = self._network(input_ids=ids, use_cache=True, logits_to_keep=1, **self._past, **mask_arguments)
        assert self._hook.states is not None  # the head has just run
        self._past = {}
        for name in CACHE_NAMES:
            if output.get(name) is not None:
                self._past[name] = output[name]
        if not self._past:
            raise ValueError(f"{type(self._network).__name__} returns no cache to continue from")
        (self._cache,) = self._past.values()  # a model returns its cache under exactly one of the names
        self.logits = _check_finite(output.logits[:, -1])
        self.states = self._hook.states[:, -1]


@dataclass
class ResponseInProgress:
    """One response while it is generated.

    Attributes:
        request: The request.
        prompt: Token ids of the prompt.
        limit: Maximum number of tokens.
        ids: The tokens so far, without the end-of-sequence token.
        states: The hidden states that entered the head for each token and for the end of sequence; empty unless the
            request asks to keep them.
        logprob: Log-probability of `ids` at temperature 1.
        end: Index in the text after the stop text; None without a stop text.
        finish_reason: `stop` or `length`; None until the response has finished.
        seconds: Time since the batch started.
    """

    request: Request
    prompt: tuple[int, ...]
    limit: int
    ids: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    logprob: float = 0.0
    end: int | None = None
    finish_reason: str | None = None
    seconds: float = 0.0


class StopTexts:
    """Finds the end of a response by its stop texts. Decodes only if the last token can complete one.

    Args:
        decode: Token ids -> text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._can_complete: dict[tuple[int, str], bool] = {}

    def find_end(self, ids: Sequence[int], stops: Collection[str]) -> int | None:
        """Return the index after the first stop text in the text of `ids`; None if there is none."""
        last_token = ids[-1]
        if not any(self._may_complete(last_token, stop) for stop in stops):
            return None
        return find_stop_end(self._decode(ids), stops)

    def _may_complete(self, token: int, stop: str) -> bool:
        """Return whether a token can complete a stop text: its own text shows the last character, or may hide it.

        A printable ASCII character is always shown. Decoding a single token may strip white space, and shows no
        character that is split over several tokens.
        """
        key = (token, stop)
        if key not in self._can_complete:
            last_character = stop[-1]
            always_shows = last_character.isascii() and not last_character.isspace()
            self._can_complete[key] = not always_shows or last_character in self._decode([token])
        return self._can_complete[key]


def decode_responses(
    network: Any,
    responses: Sequence[ResponseInProgress],
    eos: Collection[int],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Generate until every response has finished: at the end of sequence, at a stop text or at its limit.

    Each prompt runs once, and its cache is repeated for its responses. A finished response leaves the batch.

    Args:
        network: A causal language model of Transformers.
        responses: The responses to generate, at least one; filled in place.
        eos: End-of-sequence token ids.
        decode: Token ids -> text.
    """
    started = time.perf_counter()
    stop_texts = StopTexts(decode)
    distinct_prompts = list(dict.fromkeys(response.prompt for response in responses))
    row_of_prompt = {prompt: row for row, prompt in enumerate(distinct_prompts)}
    unfinished = list(responses)  # in the order of the batch's rows
    with evaluation_mode(network) as hook:
        batch = CachedBatch(network, hook, distinct_prompts)
        batch.select([row_of_prompt[response.prompt] for response in unfinished])
        while True:
            tokens, logprobs = _draw_next(batch.logits, unfinished)
            drawn_rows = zip(unfinished, tokens.tolist(), logprobs.tolist(), batch.states, strict=True)
            for response, token, logprob, state in drawn_rows:
                if response.request.keep_states:
                    response.states.append(state)  # the hidden state from which this token was drawn
                if token in eos:
                    response.finish_reason = "stop"
                else:
                    _append_token(response, token, logprob, stop_texts)
                response.seconds = time.perf_counter() - started
            rows_to_keep = [row for row, response in enumerate(unfinished) if response.finish_reason is None]
            if not rows_to_keep:
                return
            has_finished_rows = len(rows_to_keep) < len(unfinished)
            if has_finished_rows:  # otherwise nothing is selected, because that copies the whole cache
                batch.select(rows_to_keep)
                tokens = tokens[rows_to_keep]
                unfinished = [unfinished[row] for row in rows_to_keep]
            batch.step(tokens.unsqueeze(-1))


def _draw_next(logits: Tensor, responses: Sequence[ResponseInProgress]) -> tuple[Tensor, Tensor]:
    """Draw the next token of every response. Return ids (B,) and their log-probabilities (B,) at temperature 1."""
    temperatures = []
    uniforms = []
    for response in responses:
        request = response.request
        temperatures.append(request.temperature)
        uniforms.append(hash_uniform(request.seed, request.question, request.sample, len(response.ids)))
    tokens = draw_tokens(logits, temperatures, uniforms)
    drawn_logits = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return tokens, drawn_logits - logits.logsumexp(dim=-1)


def _append_token(response: ResponseInProgress, token: int, logprob: float, stop_texts: StopTexts) -> None:
    """Append a token, and finish the response if it completes a stop text or reaches the limit."""
    response.ids.append(token)
    response.logprob += logprob
    response.end = stop_texts.find_end(response.ids, response.request.stop)
    if response.end is not None:
        response.finish_reason = "stop"
    elif len(response.ids) == response.limit:
        response.finish_reason = "length"
