"""Compare the computations of training on this device with plain reference computations: `catto doctor --selftest`.

The references do not use our head, layouts or trainer. They run on the CPU in fp32: each sequence goes unpadded through
the model's own forward and the full log-softmax, and the losses are written out.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import logsigmoid

from catto.objectives import token_stats
from catto.recipe.settings import ScratchModel
from catto.training.batches import KEY, Row
from catto.training.config import CATTOConfig
from catto.training.examples import Example, Label
from catto.training.models import scratch_model, word_tokenizer
from catto.training.monitor import compute_label_logprobs
from catto.training.trainer import CATTOTrainer

Pair = Mapping[str, Sequence[int]]
# Returns the values of our computation, and the gradient if the check compares gradients too.
Computation = Callable[[], Sequence[Tensor]]


class CheckBounds(NamedTuple):
    """Maximum relative distance, |ours - reference| / |reference|, of the values and of the gradient."""

    values: float
    gradient: float


# Precision -> kind of check -> bounds. In bf16, the head's reference gets the same rounded inputs, so the values of the
# head have the same bound as in fp32. The bounds of a bf16 step are three times the distances measured on a CPU.
BOUNDS = {
    "fp32": {
        "head": CheckBounds(values=1e-4, gradient=1e-4),
        "labels": CheckBounds(values=1e-4, gradient=1e-4),
        "step": CheckBounds(values=1e-4, gradient=1e-4),
    },
    "bf16": {
        "head": CheckBounds(values=1e-4, gradient=1e-2),
        "labels": CheckBounds(values=1e-2, gradient=1e-2),
        "step": CheckBounds(values=0.1, gradient=0.1),
    },
}
FIRST_WORD = 8  # lower token ids are special tokens
LABEL_TOKENS = [8, 9, 10, 11]  # any four words
TIMED_ROUNDS = 3
# Kind of step -> whether prompts are shared; None means TRL's own step.
STEP_KINDS = {"trl": None, "catto": False, "shared": True}


class ModelSize(NamedTuple):
    """The size of the model and the batch, chosen such that the test takes a few seconds."""

    pairs: int
    prompt_tokens: int
    response_tokens: int
    words: int
    width: int
    layers: int


CPU_SIZE = ModelSize(pairs=2, prompt_tokens=80, response_tokens=32, words=2000, width=128, layers=2)
ACCELERATOR_SIZE = ModelSize(pairs=4, prompt_tokens=160, response_tokens=64, words=32000, width=512, layers=4)


def run_selftest(bf16: bool | None = None) -> dict[str, Any]:
    """Check the head, the label log-probabilities, and training steps with and without shared prompts.

    If all checks pass, both kinds of steps are timed, and so are TRL's own steps for comparison.

    Args:
        bf16: Whether to compute in bf16; None means the default of training on this device.

    Returns:
        A dictionary with the entries

        - `ok`: Whether all checks passed.
        - `device`, `precision` and `attention`: The device's name, fp32 or bf16, and the attention implementation.
        - `checks`: A dictionary for each check with its `name`, `error` (the relative distance; None if there is none),
          `bound`, `ok` and `problem` (None if the distance could be measured).
        - `milliseconds`: Kind of step in `STEP_KINDS` -> median duration. Empty if a check failed.
    """
    use_cpu = not torch.accelerator.is_available()
    size = CPU_SIZE if use_cpu else ACCELERATOR_SIZE
    tokenizer = word_tokenizer(f"w{word}" for word in range(size.words))
    policy = _make_model(tokenizer, size, seed=0)
    reference = _make_model(tokenizer, size, seed=1)
    generator = torch.Generator().manual_seed(0)
    pairs = _draw_pairs(size, generator)
    with tempfile.TemporaryDirectory() as folder:
        config = CATTOConfig(
            folder,
            per_device_train_batch_size=size.pairs,
            max_length=None,
            report_to="none",
            gradient_checkpointing=False,
            bf16=bf16,
            use_cpu=use_cpu,
        )
        trainer = _make_trainer(policy, reference, config, pairs, tokenizer)
        precision = "bf16" if config.bf16 else "fp32"
        bounds = BOUNDS[precision]
        checks = [
            *_check_head(size, config, generator, bounds["head"]),
            *_check_labels(trainer, policy, pairs, bounds["labels"]),
            *_check_steps(trainer, policy, reference, pairs, bounds["step"]),
        ]
        passed = all(check["ok"] for check in checks)
        milliseconds = _time_steps(trainer) if passed else {}
    device = config.device.type
    if device == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "ok": passed,
        "device": device,
        "precision": precision,
        "attention": trainer.model.config._attn_implementation,
        "checks": checks,
        "milliseconds": milliseconds,
    }


def _make_model(tokenizer: Any, size: ModelSize, seed: int) -> Any:
    """Make a random model. Its matrices are scaled up, so that its distributions are far from uniform."""
    shape = ScratchModel(layers=size.layers, width=size.width, heads=size.width // 64, intermediate=2 * size.width)
    model = scratch_model(tokenizer, shape, seed)
    scale = 90 / size.width**0.5  # from a standard deviation of 0.02 to 1.8 / sqrt(width), so the width does not matter
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(scale)
    return model


def _make_trainer(policy: Any, reference: Any, config: CATTOConfig, pairs: Sequence[Pair], tokenizer: Any) -> Any:
    """Make a trainer of copies of the models, ready to compute steps."""
    trainer = CATTOTrainer(
        copy.deepcopy(policy),
        copy.deepcopy(reference),
        config,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    trainer.accelerator.prepare_model(trainer.model)  # makes its forward enter autocast, as in training
    return trainer


def _draw_pairs(size: ModelSize, generator: torch.Generator) -> list[dict[str, list[int]]]:
    pairs = []
    for _ in range(size.pairs):
        pair = {}
        for column in ("prompt_ids", "chosen_ids", "rejected_ids"):
            length = size.prompt_tokens if column == "prompt_ids" else size.response_tokens
            pair[column] = torch.randint(FIRST_WORD, size.words, (length,), generator=generator).tolist()
        pairs.append(pair)
    return pairs


def _compare(
    name: str, compute_ours: Computation, expected: Sequence[Tensor], bounds: CheckBounds
) -> Iterator[dict[str, Any]]:
    """Compare our computation with its reference, and yield the results of the checks.

    Args:
        name: Name of the computation.
        compute_ours: Returns our values, and our gradient if it is checked too. If it raises an exception, a single
            failed check is yielded.
        expected: The values, and the gradient if it is checked, of the reference.
        bounds: The maximum relative distances.

    Yields:
        A check of the values and, if there is a gradient, a check of the gradient.
    """
    failed = {"name": name, "error": None, "bound": bounds.values, "ok": False, "problem": None}
    try:
        ours = compute_ours()
    except Exception as error:  # an error of any kind is reported as the problem
        first_line = str(error).strip().partition("\n")[0]
        yield {**failed, "problem": f"{type(error).__name__}: {first_line}"}
        return
    # "values" and "gradient"; not strict, since some computations have no gradient.
    for quantity, our_vector, expected_vector in zip(CheckBounds._fields, ours, expected, strict=False):
        bound = getattr(bounds, quantity)
        distance = float((our_vector - expected_vector).norm() / expected_vector.norm())
        check = {**failed, "name": f"{name} {quantity}", "bound": bound, "ok": distance < bound}
        if math.isfinite(distance):
            check["error"] = distance
        else:
            check["problem"] = "not finite"
        yield check


def _with_gradient(values: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the values and the gradient of their mean, each as a vector."""
    gradients = torch.autograd.grad(values.mean(), tuple(parameters))
    return [_flatten([values]), _flatten(gradients)]


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one vector, in float64 on the CPU."""
    return torch.cat([tensor.detach().flatten().double().cpu() for tensor in tensors])


# ---- our computations, on the device ---------------------------------------------------------------------------------


def _run_step(trainer: Any, *, shares_prompts: bool | None) -> tuple[list[Tensor], float]:
    """Return the loss and the gradient of a step, and its duration in seconds.

    shares_prompts: Whether prompts are shared; None runs TRL's own step, without a calibration term.
    """
    trainer.args.prefix_sharing = bool(shares_prompts)
    trainer._layout_options = None  # makes the trainer read `prefix_sharing` again
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    start = time.perf_counter()
    if shares_prompts is None:
        trl_batch = {name: value for name, value in batch.items() if name != KEY}
        loss = trainer.compute_trl_loss(trainer.model, trl_batch, False)
    else:
        loss = trainer.compute_pair_loss(trainer.model, batch, False)
    gradients = torch.autograd.grad(loss, tuple(trainer.model.parameters()))
    loss.item()  # waits for the device
    seconds = time.perf_counter() - start
    return [_flatten([loss]), _flatten(gradients)], seconds


def _time_steps(trainer: Any) -> dict[str, float]:
    """Return the median duration of every kind of step, in milliseconds. The kinds are timed alternately."""
    seconds: dict[str, list[float]] = {kind: [] for kind in STEP_KINDS}
    for _ in range(TIMED_ROUNDS):
        for kind, shares_prompts in STEP_KINDS.items():
            _, step_seconds = _run_step(trainer, shares_prompts=shares_prompts)
            seconds[kind].append(step_seconds)
    return {kind: round(1e3 * statistics.median(times), 1) for kind, times in seconds.items()}


def _check_labels(trainer: Any, policy: Any, pairs: Sequence[Pair], bounds: CheckBounds) -> Iterator[dict[str, Any]]:
    """Check the log-probabilities of label tokens. The labels are taken to be in the middle of the chosen responses."""
    middle = len(pairs[0]["chosen_ids"]) // 2
    label = Label(at=middle, candidates=LABEL_TOKENS, gold=0)
    examples = []
    expected = []
    for pair in pairs:
        row = Row(list(pair["prompt_ids"]), list(pair["chosen_ids"]))
        examples.append(Example(question="", row=row, label=label))
        with torch.no_grad():
            logprobs = _token_logprobs(policy, pair["prompt_ids"], pair["chosen_ids"])
        expected.append(logprobs[middle, LABEL_TOKENS])

    def compute_ours() -> Sequence[Tensor]:
        logprobs = compute_label_logprobs(trainer.model, examples, pad=0)
        return [_flatten([torch.from_numpy(logprobs)])]

    return _compare("labels", compute_ours, [_flatten(expected)], bounds)


def _check_steps(
    trainer: Any, policy: Any, reference: Any, pairs: Sequence[Pair], bounds: CheckBounds
) -> Iterator[dict[str, Any]]:
    """Check the loss and the gradient of a training step, without and with shared prompts."""
    expected = _with_gradient(_reference_loss(policy, reference, pairs), policy.parameters())

    def compute_step(shares_prompts: bool) -> Sequence[Tensor]:
        loss_and_gradient, _ = _run_step(trainer, shares_prompts=shares_prompts)
        return loss_and_gradient

    yield from _compare("step", lambda: compute_step(shares_prompts=False), expected, bounds)
    yield from _compare("shared prompts", lambda: compute_step(shares_prompts=True), expected, bounds)


def _check_head(
    size: ModelSize, config: CATTOConfig, generator: torch.Generator, bounds: CheckBounds
) -> Iterator[dict[str, Any]]:
    """Check the head's log-probabilities on random hidden states, in the precision of training.

    They are those of random target tokens and of their rivals, the most probable other tokens. The reference is
    computed in float64 on the same inputs.
    """
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    tokens = size.pairs * size.response_tokens
    hidden = torch.randn(tokens, size.width, generator=generator).to(dtype)
    # With this factor, the logits have a standard deviation of 3 to 7, so the distributions are far from uniform.
    weight = torch.randn(size.words, size.width, generator=generator).mul(0.3).to(dtype)
    targets = torch.randint(size.words, (tokens,), generator=generator)

    def compute_ours() -> Sequence[Tensor]:
        our_hidden = hidden.to(config.device).requires_grad_()
        our_weight = weight.to(config.device).requires_grad_()
        stats = token_stats(our_hidden, our_weight, targets.to(config.device), extras=())
        return _with_gradient(torch.stack([stats.target, stats.rival]), (our_hidden, our_weight))

    exact_hidden = hidden.double().requires_grad_()
    exact_weight = weight.double().requires_grad_()
    logprobs = (exact_hidden @ exact_weight.T).log_softmax(-1)
    target, rival = _target_and_rival(logprobs, targets)
    expected = _with_gradient(torch.stack([target, rival]), (exact_hidden, exact_weight))
    return _compare("head", compute_ours, expected, bounds)


# ---- the references --------------------------------------------------------------------------------------------------


def _target_and_rival(logprobs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of the targets and of their rivals, (T,) each.

    The rival of a target is the most probable other token. logprobs: (T, V), targets: (T,).
    """
    column = targets.unsqueeze(-1)
    target = logprobs.gather(-1, column).squeeze(-1)
    rival = logprobs.scatter(-1, column, -torch.inf).amax(-1)
    return target, rival


def _token_logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Return the log-probabilities at the positions that predict the completion: (T, V)."""
    input_ids = torch.tensor([[*prompt, *completion]])
    logits: Tensor = model(input_ids=input_ids).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def _reference_loss(policy: Any, reference: Any, pairs: Sequence[Pair]) -> Tensor:
    """Return the mean over pairs of DPO's loss (beta 0.1) + 0.1 x CATTO's term.

    The term is the mean of l(c, s) over the tokens of the chosen response plus the mean of l(c, 1 - s) over the tokens
    of the rejected response, with l(c, s) = s (1 - c) + (1 - s) c. Here c is a token's confidence, and s is the
    surrogate of its correctness, sigmoid(p_t - p_r).
    """
    losses = []
    for pair in pairs:
        log_ratios = []
        mean_losses = []  # mean of l(c, s) over the tokens of each response
        for side in ("chosen_ids", "rejected_ids"):
            tokens = torch.tensor(pair[side])
            log_t, log_r = _target_and_rival(_token_logprobs(policy, pair["prompt_ids"], pair[side]), tokens)
            with torch.no_grad():
                reference_logprobs = _token_logprobs(reference, pair["prompt_ids"], pair[side])
                reference_log_t, _ = _target_and_rival(reference_logprobs, tokens)
            p_t = log_t.exp()
            p_r = log_r.exp()
            c = torch.maximum(p_t, p_r)
            s = (p_t - p_r).sigmoid()
            log_ratios.append((log_t - reference_log_t).sum())
            mean_losses.append((s * (1 - c) + (1 - s) * c).mean())
        chosen_ratio, rejected_ratio = log_ratios
        preference_loss = -logsigmoid(0.1 * (chosen_ratio - rejected_ratio))
        chosen_term, rejected_loss = mean_losses
        term = chosen_term + 1 - rejected_loss  # l(c, 1 - s) = 1 - l(c, s)
        losses.append(preference_loss + 0.1 * term)
    return torch.stack(losses).mean()
