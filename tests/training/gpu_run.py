"""Take training steps on a pretended device and print what was counted, one JSON object; `test_gpu_path.py` reads it.

Fake tensors have shapes, dtypes and a device, but no values: whatever would read one on the host is refused. The
device is torch's place for backends written in Python.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pairs
import torch
from steps import made
from tiny import tiny_tokenizer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from catto.objectives import tiles
from catto.training import forward
from catto.training.batches import KEY
from catto.training.config import CATTOConfig
from catto.training.examples import make_examples
from catto.training.trainer import CATTOTrainer

VOCABULARY, WIDTH, DEVICE = 4096, 32, "pretended"
STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"prefix_sharing": True},
    "packed": {"padding_free": True},
    "bce": {"calibration": "bce"},
    "labels": {"calibration": "outcome"},
    "stream": {"calibration": "outcome"},
    "shared stream": {"calibration": "outcome", "prefix_sharing": True},
}


class Backbone(torch.nn.Module):
    """Ids -> hidden states without layers between."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(VOCABULARY, WIDTH, **options)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.table(input_ids))


class Network(torch.nn.Module):
    """A backbone without layers and an LM head: of the step, only our part is left."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
        self.base_model = Backbone(**options)
        self.lm_head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False, **options)
        self.config, self.dtype = config, torch.bfloat16

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.lm_head


class Watch(TorchDispatchMode):
    """Count launches, products by the dtype of their inputs, and operations between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.products, self.copies = 0, [], []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), out))
        name = func.overloadpacket.__name__
        idle = func.is_view or name.startswith(("empty", "new_empty", "detach"))
        self.launches += not idle and any(x.numel() for x in outputs)
        if name in ("mm", "addmm"):
            self.products.append(str(args[name == "addmm"].dtype))
        if len({x.device.type for x in inputs + outputs if x.dim() or x.device.type != "cpu"}) > 1:
            self.copies.append(name)
        return out


def prepared(name: str) -> tuple[Any, Any, Any, Any]:
    """A trainer, its first batch, the stream's examples that go with it and the policy, all on the host."""
    stream = {"outcome_examples": make_examples(tiny_tokenizer(), pairs.sft_rows())} if "stream" in name else {}
    trainer = made(CATTOTrainer, CATTOConfig, **STEPS[name], **stream)
    trainer.model.train()
    inputs = next(iter(trainer.get_train_dataloader()))
    streamed = trainer._stream.take_examples(trainer, 4) if trainer._stream else []
    return trainer, inputs, streamed, trainer._make_policy(trainer.model, inputs[KEY].pop("layout"), streamed)


def counted(trainer: Any, inputs: Any, streamed: Any, policy: Any) -> dict[str, Any]:
    """One step: batch -> statistics -> term -> backward."""
    fake = FakeTensorMode()
    with fake:
        policy.model = network = Network(trainer.model.config)
        forward.install_head(network)
        moved = tree_map_only(Tensor, lambda x: fake.from_tensor(x).to(DEVICE), inputs)
        policy.batch = policy.batch.map(fake.from_tensor)
        if not streamed:  # the data loader has moved it; with a stream it is laid out in the step
            policy.batch = policy.batch.to(torch.device(DEVICE))
        with Watch() as watch:
            labels = moved["input_ids"].masked_fill(moved["completion_mask"] == 0, -100)
            loss = policy(labels=labels, fused_lm_head=True).log_probs.sum()
            loss = loss + trainer.calibration_weight * trainer._compute_term(policy, moved, streamed)
            trainer.check_nan_later(loss, str)
            loss.backward()
    assert network.lm_head.weight.grad.device.type == network.base_model.table.weight.grad.device.type == DEVICE
    return {"launches": watch.launches, "products": watch.products, "copies": watch.copies}


def main() -> None:
    steps = {name: prepared(name) for name in STEPS}  # before there is an accelerator to train on
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    getattr(torch, DEVICE).get_amp_supported_dtype = lambda: [torch.bfloat16]
    tiles.MIXED_PRODUCT_DEVICES.add(DEVICE)
    results = {}
    for name, step in steps.items():
        try:
            results[name] = counted(*step)
        except Exception as error:
            results[name] = {"error": repr(error)}
    print(json.dumps(results), flush=True)
    os._exit(0)  # at once: autograd's thread of the pretended device can outlive what an interpreter takes down first


if __name__ == "__main__":
    main()
