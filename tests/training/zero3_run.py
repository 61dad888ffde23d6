"""Two processes that share a tiny model by DeepSpeed ZeRO-3, beside one that holds it whole.

Two steps of SGD a layout, as in `fsdp_run`. Needs DeepSpeed, which the suite does not, so it is run by hand:

    pip install deepspeed && python -m torch.distributed.run --nproc_per_node=2 tests/zero3_run.py
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import fsdp_run
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": 2,
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
# It would compile an extension for faster messages between processes of one machine, for minutes.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def compare(tied: bool, shared: bool) -> float:
    """Largest difference of a gradient or of the loss in two steps, gradients relative to the largest entry."""
    rank, model, whole = dist.get_rank(), fsdp_run._whole({"tied": tied}), fsdp_run._whole({"tied": tied})
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), config=CONFIG, dist_init_required=False
    )
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    wholes, found = dict(whole.named_parameters()), 0.0
    for _ in range(2):
        with torch.no_grad():
            before = fsdp_run._loss(engine, rank, shared).item()
        ours = fsdp_run._loss(engine, rank, shared)
        assert model.lm_head.weight.numel() == 0  # in pieces again
        engine.backward(ours)
        parts = [fsdp_run._loss(whole, other, shared) for other in (0, 1)]
        (sum(parts) / 2).backward()
        scale = max(float(p.grad.abs().max()) for p in whole.parameters())
        for name, p in engine.module.named_parameters():
            found = max(found, float((safe_get_full_grad(p) - wholes[name].grad).abs().max()) / scale)
        found = max(found, abs(ours.item() - parts[rank].item()), abs(before - ours.item()))
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    found = {
        f"tied {tied}, shared {shared}": compare(tied, shared)
        for tied, shared in itertools.product((False, True), repeat=2)
    }
    print(found)
    assert max(found.values()) < 2e-6
    dist.destroy_process_group()
