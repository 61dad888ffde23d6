"""The logits in tiles: how large a tile is, in which precision it is multiplied, and one pass over all of them.

On a CPU products are fp32. On a GPU they take the weight's 16-bit numbers and give fp32 results, which is exact for
each pair of numbers and an order of magnitude faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

# 4,096 columns x 1,024 tokens of fp32 are 16 MB: on a CPU larger tiles are not faster.
TILE = 4096
TOKENS = 1024
# Devices whose products of 16-bit numbers come out in fp32 (`out_dtype` of `torch.mm`). A CPU has no such product.
MIXED_PRODUCTS = {"cuda"}
Precision = Literal["auto", "fp32"]


class Head(NamedTuple):
    """How logits follow from the product y: z = softcap tanh(scale y / softcap) / temperature. And what to compute."""

    softcap: float | None
    scale: float
    temperature: float
    vocabulary: int
    rows: int  # of a tile
    tile: int  # its columns
    extras: frozenset[str]
    product: torch.dtype  # of the inputs of the products


def slices(length: int, step: int) -> Iterator[slice]:
    """Cut [0, length) into pieces; an empty range is one empty piece, so that an all-masked batch keeps its graph."""
    return (slice(start, min(start + step, length)) for start in range(0, max(length, 1), step))


def tile_shape(tokens: int, vocabulary: int, device: torch.device, tile: int | None = None) -> tuple[int, int]:
    """Rows and columns of a tile; `tile` columns if given.

    On a GPU as many as memory allows, since every tile costs its launches: all tokens, so that the weight's gradient
    is a sum of one product, and a 256th of the device's memory, but at most an eighth of the vocabulary. With its
    temporaries a tile stays below a tenth of what dense logits need.
    """
    if tile is not None or device.type not in MIXED_PRODUCTS:
        return TOKENS, TILE if tile is None else tile
    columns = min(device_memory(device) // 1024 // max(tokens, 1), vocabulary // 8)
    return max(tokens, 1), -(-max(columns, 1024) // 128) * 128


def device_memory(device: torch.device) -> int:
    """Bytes; a modest GPU's where the device does not tell."""
    known = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if known else 16 * 2**30


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """At least fp32: bf16 statistics move a two-label confidence by up to 1.5 points."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def product_dtype(hidden: Tensor, weight: Tensor | None, precision: Precision = "auto") -> torch.dtype:
    """The dtype to which hidden states, weights and the logits' gradient are rounded before they are multiplied.

    Where products of 16-bit numbers come out in fp32: the weight's, or autocast's if the weight is fp32. A product of
    bf16 numbers is exact in fp32, so a bf16 model loses nothing in the logits, at many times the speed. Elsewhere,
    and with `precision="fp32"`, that of the statistics.
    """
    full, device = statistics_dtype(hidden), hidden.device.type
    if weight is None or precision == "fp32" or device not in MIXED_PRODUCTS or full == torch.float64:
        return full
    mixed = weight.dtype == torch.float32 and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else weight.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else full


@cache
def cpu_bf16_slowdown() -> float:
    """Measure how many times as long as in fp32 a product takes in bf16 on this processor, with one thread.

    Instructions for bf16 do not make it fast: where they are AVX-512's and not AMX's it took 1.7 times as long.
    """

    def seconds(dtype: torch.dtype) -> float:
        timer = Timer("a @ a.T", globals={"a": torch.ones(576, 576, dtype=dtype)})
        return min(timer.timeit(1).mean for _ in range(20))

    return seconds(torch.bfloat16) / seconds(torch.float32)


def product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a @ b, or out += a @ b. 16-bit inputs give fp32 results that were never rounded to 16 bits."""
    options: dict[str, Any] = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, out=out, **options)
    else:
        torch.mm(a, b, out=out, **options)


def tiles(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, head: Head
) -> Iterator[tuple[slice, slice, Tensor, Tensor | None]]:
    """Yield (rows, columns, logits z (rows, columns), the weight's part (columns, H)) of every tile.

    All rows come with the first columns, then all with the next. z is overwritten by the next tile.
    """
    dtype, rounded = statistics_dtype(hidden), hidden if weight is None else hidden.to(head.product)
    # One buffer for all tiles: a fresh one each costs its page faults again, 8 % of the time of a pass on a CPU.
    buffer = hidden.new_empty(min(head.rows, len(hidden)), min(head.tile, head.vocabulary), dtype=dtype)
    factor = (head.softcap or head.scale) / head.temperature
    for columns in slices(head.vocabulary, head.tile):
        part = None if weight is None else weight[columns].to(head.product)
        for rows in slices(len(hidden), head.rows):
            z = buffer[: rows.stop - rows.start, : columns.stop - columns.start]
            if part is None:
                z.copy_(hidden[rows, columns])
            else:
                product(z, rounded[rows], part.T)
            if bias is not None:
                z.add_(bias[columns].to(dtype))
            if head.softcap is not None:
                z.mul_(head.scale / head.softcap).tanh_()
            yield rows, columns, z if factor == 1.0 else z.mul_(factor), part


def located(tokens: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Whether each token id lies in the tile, and its column there (any column of the tile where it does not)."""
    local = tokens - columns.start
    column = local.clamp(0, columns.stop - columns.start - 1)
    return local == column, column
