"""A model spread over several devices, on a machine that has none: tensors of the CPU carry the name of a device.

Values are real. A call that mixes tensors of two devices is refused, as CUDA would; `to` changes the name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import distance, made, step
from tiny import tiny_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdRef

from catto.training.config import CATTOConfig
from catto.training.trainer import CATTOTrainer

FIRST, SECOND, THIRD = (torch.device("cuda", index) for index in range(3))


class Devices(TorchFunctionMode):
    """Knows the device of every tensor that it has seen; a tensor of no known device goes with any."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[WeakIdRef, torch.device] = {}
        self.moves = 0

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        self.names[WeakIdRef(tensor, lambda ref: self.names.pop(ref, None))] = device
        return tensor

    def of(self, tensor: Tensor) -> torch.device | None:
        return self.names.get(WeakIdRef(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:  # made anew at every access
            return self.of(args[0]) or torch.device("cpu")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        asked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
        cpu = torch.device("cpu")
        args, kwargs = tree_map_only(torch.device, lambda _: cpu, (args, kwargs))
        if func is Tensor.to and asked:
            moved = func(*args, **kwargs)
            self.moves += asked[0] != self.of(args[0])
            return self.put(moved.view_as(moved) if moved is args[0] else moved, asked[0])
        known = {device for device in map(self.of, tensors) if device is not None}
        if len(known) > 1:
            raise RuntimeError(f"{func} takes tensors on {sorted(map(str, known))}")
        result = func(*args, **kwargs)
        place = asked[0] if asked and not tensors else next(iter(known), None)
        if place is not None and place != cpu:
            tree_map_only(Tensor, lambda tensor: self.put(tensor, place), result)
        return result


def _spread(model: Any, devices: Devices) -> None:
    """Embedding and first layer, second layer and norm, head: a device each, as Accelerate's hooks would have it."""
    parts = {FIRST: [model.model.embed_tokens, model.model.layers[0], model.model.rotary_emb]}
    parts |= {SECOND: [model.model.layers[1], model.model.norm], THIRD: [model.lm_head]}
    for device, modules in parts.items():
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                devices.put(tensor, device)

            def move(_: Any, args: Any, kwargs: Any, device: torch.device = device) -> Any:
                return tree_map_only(Tensor, lambda value: value.to(device), (args, kwargs))

            module.register_forward_pre_hook(move, with_kwargs=True)


@pytest.mark.parametrize("sharing", [False, True], ids=["padded", "shared"])
@pytest.mark.parametrize("calibration", ["catto", "outcome"])
def test_a_head_on_another_device_than_the_last_layer_gives_the_same_step(calibration: str, sharing: bool) -> None:
    options = {"calibration": calibration, "prefix_sharing": sharing}
    one = step(CATTOTrainer, CATTOConfig, model=tiny_model(), **options)
    trainer = made(CATTOTrainer, CATTOConfig, model=tiny_model(), **options)
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    trainer.model.train()
    devices = Devices()
    for model in (trainer.model, trainer.ref_model):
        _spread(model, devices)
    with devices:
        given = {
            name: devices.put(value, FIRST) if isinstance(value, Tensor) else value for name, value in inputs.items()
        }
        loss = trainer.compute_loss(trainer.model, given)
        assert loss.device == FIRST
        loss.backward()
    assert devices.moves > 4
    torch.testing.assert_close(loss.detach(), one.loss, rtol=0, atol=0)
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert distance(gradients, one.gradients) == 0
