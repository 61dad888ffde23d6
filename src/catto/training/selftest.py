"""What training computes on this device, against plain references: `catto doctor --selftest`.

A reference uses none of our head, layouts or trainer: on the CPU, in fp32, one unpadded sequence at a time goes
through the model's own forward and the full log-softmax, and the losses are written out.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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

# A check passes below this relative distance, |ours - reference| / |reference|. In bf16 the head's values lose nothing
# against the rounded inputs; the bounds of a step are three times what bf16 gave on a CPU.
BOUNDS = {"fp32": dict.fromkeys(("head", "labels", "step"), (1e-4, 1e-4))}
BOUNDS["bf16"] = {"head": (1e-4, 1e-2), "labels": (1e-2, 1e-2), "step": (0.1, 0.1)}
LABELS = [8, 9, 10, 11]
Pair = Mapping[str, Sequence[int]]
Compared = tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]  # what computes ours, and the reference
# Pairs, tokens of a prompt and of a response, words, width and layers: a few seconds of work.
CPU, ACCELERATOR = (2, 80, 32, 2000, 128, 2), (4, 160, 64, 32000, 512, 4)


def selftest(bf16: bool | None = None) -> dict[str, Any]:
    """Check the head, label log-probabilities, a step and one with shared prompts; time the steps beside TRL's.

    bf16: what is computed in; None is the default of training on this device. Returns `ok`, the `checks` (name, error,
    bound, ok, problem), `milliseconds` of every kind of step, and the device, precision and attention.
    """
    cpu = not torch.accelerator.is_available()
    number, prompt, response, words, width, layers = CPU if cpu else ACCELERATOR
    tokenizer = word_tokenizer(f"w{word}" for word in range(words))
    shape = ScratchModel(layers=layers, width=width, heads=width // 64, intermediate=2 * width)
    policy, reference = (scratch_model(tokenizer, shape, seed) for seed in (0, 1))
    for parameter in (*policy.parameters(), *reference.parameters()):
        parameter.data.mul_(90 / width**0.5 if parameter.dim() > 1 else 1)  # distributions far from uniform
    draw = torch.Generator().manual_seed(0)
    lengths = {"prompt_ids": prompt, "chosen_ids": response, "rejected_ids": response}
    pairs = [
        {name: torch.randint(8, words, (n,), generator=draw).tolist() for name, n in lengths.items()}
        for _ in range(number)
    ]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"per_device_train_batch_size": number, "max_length": None, "report_to": "none"}
        options |= {"gradient_checkpointing": False, "bf16": bf16, "use_cpu": cpu}
        config = CATTOConfig(folder, **options)
        models = copy.deepcopy(policy), copy.deepcopy(reference)
        trainer = CATTOTrainer(*models, config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
        trainer.accelerator.prepare_model(trainer.model)  # its forward enters autocast, as in training
        plain = _graded(_plain_loss(policy, reference, pairs), policy.parameters())
        precision = "bf16" if config.bf16 else "fp32"
        bounds = BOUNDS[precision]
        checks = [
            *_checks("head", *_head(number * response, words, width, config, draw), bounds["head"]),
            *_checks("labels", *_labels(trainer, policy, pairs), bounds["labels"]),
            *_checks("step", lambda: _step(trainer, False)[0], plain, bounds["step"]),
            *_checks("shared prompts", lambda: _step(trainer, True)[0], plain, bounds["step"]),
        ]
        ok = all(check["ok"] for check in checks)
        arms = {"trl": None, "catto": False, "shared": True}
        rounds = [{name: _step(trainer, shared)[1] for name, shared in arms.items()} for _ in range(3 if ok else 0)]
    return {
        "ok": ok,
        "device": torch.cuda.get_device_name() if config.device.type == "cuda" else config.device.type,
        "precision": precision,
        "attention": trainer.model.config._attn_implementation,
        "checks": checks,
        "milliseconds": {name: round(1e3 * statistics.median(r[name] for r in rounds), 1) for name in arms if rounds},
    }


def _checks(
    name: str, ours: Callable[[], Sequence[Tensor]], plain: Sequence[Tensor], bounds: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """The distance of our values and gradient from the plain ones; what raises is a check that failed."""
    result = {"name": name, "error": None, "bound": bounds[0], "ok": False, "problem": None}
    try:
        pieces = list(zip(("values", "gradient"), bounds, ours(), plain, strict=False))
    except Exception as error:  # of any kind: the report names it
        yield result | {"problem": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
        return
    for kind, bound, found, expected in pieces:
        distance = float((found - expected).norm() / expected.norm())
        known = {"error": distance} if math.isfinite(distance) else {"problem": "not finite"}
        yield result | {"name": f"{name} {kind}", "bound": bound, "ok": distance < bound, **known}


def _graded(values: Tensor, parameters: Iterable[Tensor]) -> Sequence[Tensor]:
    """Values and the gradient of their mean."""
    return _vectors([values], torch.autograd.grad(values.mean(), tuple(parameters)))


def _vectors(*groups: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each group of tensors as one vector of float64 on the CPU."""
    return [torch.cat([tensor.detach().flatten().double().cpu() for tensor in group]) for group in groups]


# ---- ours, on the device ---------------------------------------------------------------------------------------------


def _step(trainer: Any, shared: bool | None) -> tuple[Sequence[Tensor], float]:
    """Loss and gradient of a step, and the seconds that they took. None is TRL's own step, without a term."""
    trainer.args.prefix_sharing, trainer._arrangement = bool(shared), None
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    start = time.perf_counter()
    if shared is None:
        theirs = {name: value for name, value in batch.items() if name != KEY}
        loss = trainer.compute_trl_loss(trainer.model, theirs, False)
    else:
        loss = trainer.compute_pair_loss(trainer.model, batch, False)
    gradients = torch.autograd.grad(loss, tuple(trainer.model.parameters()))
    loss.item()  # waits for the device
    seconds = time.perf_counter() - start
    return _vectors([loss], gradients), seconds


def _labels(trainer: Any, policy: Any, pairs: Sequence[Pair]) -> Compared:
    """Log-probabilities of the labels in the middle of the chosen responses."""
    label = Label(len(pairs[0]["chosen_ids"]) // 2, LABELS, 0)
    examples = [Example("", Row(list(pair["prompt_ids"]), list(pair["chosen_ids"])), label) for pair in pairs]
    with torch.no_grad():
        plain = [_log_softmax(policy, pair["prompt_ids"], pair["chosen_ids"]) for pair in pairs]
    expected = _vectors([row[len(row) // 2, LABELS] for row in plain])
    return lambda: _vectors([torch.from_numpy(compute_label_logprobs(trainer.model, examples, 0))]), expected


def _head(tokens: int, words: int, width: int, config: CATTOConfig, draw: torch.Generator) -> Compared:
    """The two numbers of the head on random hidden states, in the precision of training."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    inputs = [torch.randn(n, width, generator=draw).mul(size).to(dtype) for n, size in ((tokens, 1.0), (words, 0.3))]
    targets = torch.randint(words, (tokens,), generator=draw)

    def ours() -> Sequence[Tensor]:
        hidden, weight = (tensor.to(config.device).requires_grad_() for tensor in inputs)
        stats = token_stats(hidden, weight, targets.to(config.device), extras=())
        return _graded(torch.stack([stats.target, stats.rival]), (hidden, weight))

    hidden, weight = (tensor.double().requires_grad_() for tensor in inputs)
    return ours, _graded(torch.stack(_two((hidden @ weight.T).log_softmax(-1), targets)), (hidden, weight))


# ---- the references --------------------------------------------------------------------------------------------------


def _two(log_p: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the targets and of their rivals. log_p: (T, V), targets: (T,)."""
    column = targets.unsqueeze(-1)
    return log_p.gather(-1, column).squeeze(-1), log_p.scatter(-1, column, -torch.inf).amax(-1)


def _log_softmax(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Of the distributions that predict the completion: (T, V)."""
    logits: Tensor = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)


def _plain_loss(policy: Any, reference: Any, pairs: Sequence[Pair]) -> Tensor:
    """Mean over pairs of DPO's loss (beta 0.1) + 0.1 x CATTO's term, in which l(c, 1 - s) = 1 - l(c, s)."""
    losses = []
    for pair in pairs:
        gains, terms = [], []
        for side in ("chosen_ids", "rejected_ids"):
            tokens = torch.tensor(pair[side])
            log_t, log_r = _two(_log_softmax(policy, pair["prompt_ids"], pair[side]), tokens)
            with torch.no_grad():
                known, _ = _two(_log_softmax(reference, pair["prompt_ids"], pair[side]), tokens)
            p_t, p_r = log_t.exp(), log_r.exp()
            c, s = torch.maximum(p_t, p_r), (p_t - p_r).sigmoid()
            gains.append((log_t - known).sum())
            terms.append((s * (1 - c) + (1 - s) * c).mean())
        losses.append(-logsigmoid(0.1 * (gains[0] - gains[1])) + 0.1 * (terms[0] + 1 - terms[1]))
    return torch.stack(losses).mean()
