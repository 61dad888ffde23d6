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


class LogitSpec(NamedTuple):
    """How logits follow from the product y, z = softcap tanh(scale y / softcap) / temperature, and what to compute."""

    softcap: float | None
    scale: float
    temperature: float
    vocabulary: int
    rows_per_tile: int
    columns_per_tile: int
    extras: frozenset[str]
    product_dtype: torch.dtype  # of the inputs of the products


class Tile(NamedTuple):
    """A block of logits. The next tile overwrites `logits`."""

    rows: slice
    columns: slice
    logits: Tensor  # (rows, columns)
    weight: Tensor | None  # (columns, H): the part of the head that made them; None where logits were given


def split_range(length: int, step: int) -> Iterator[slice]:
    """Cut [0, length) into slices; an empty range is one empty slice, so that an all-masked batch keeps its graph."""
    for start in range(0, max(length, 1), step):
        yield slice(start, min(start + step, length))


def tile_shape(tokens: int, vocabulary: int, device: torch.device, tile: int | None = None) -> tuple[int, int]:
    """Choose the rows and columns of a tile.

    On a GPU a tile is as large as memory allows, since every tile costs its launches. It holds all tokens, so that the
    weight's gradient is a sum of one product. It takes a 256th of the device's memory, but at most an eighth of the
    vocabulary: with its temporaries it stays below a tenth of what dense logits need.

    Args:
        tokens: Number of tokens.
        vocabulary: Number of logits per token.
        device: Where the logits are computed.
        tile: Number of columns; None chooses it.

    Returns:
        Rows and columns.
    """
    if tile is not None:
        return TOKENS, tile
    if device.type not in MIXED_PRODUCTS:
        return TOKENS, TILE
    tokens = max(tokens, 1)  # all of them may be masked
    bytes_per_tile = device_memory(device) // 256
    logits_per_tile = bytes_per_tile // 4
    columns = min(logits_per_tile // tokens, vocabulary // 8)
    columns = max(columns, 1024)
    return tokens, round_up(columns, 128)


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple.

    >>> round_up(1025, 128)
    1152
    """
    return -(-number // multiple) * multiple


def device_memory(device: torch.device) -> int:
    """Return the device's memory in bytes; that of a modest GPU if it is unknown."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    return 16 * 2**30


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """Return at least fp32: bf16 statistics move a two-label confidence by up to 1.5 points."""
    if tensor.dtype == torch.float64:
        return torch.float64
    return torch.float32


def product_dtype(hidden: Tensor, weight: Tensor | None, precision: Precision = "auto") -> torch.dtype:
    """Return the dtype to which hidden states, weights and the logits' gradient are rounded before a product.

    If the device gives products of 16-bit numbers in fp32, it is the weight's dtype, or autocast's if the weight is
    fp32. A product of bf16 numbers is exact in fp32, so the logits of a bf16 model lose nothing, at many times the
    speed. On other devices, and with `precision="fp32"`, it is the dtype of the statistics.
    """
    full = statistics_dtype(hidden)
    device = hidden.device.type
    if weight is None or device not in MIXED_PRODUCTS:
        return full
    if precision == "fp32" or full == torch.float64:
        return full
    dtype = weight.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if dtype in (torch.bfloat16, torch.float16):
        return dtype
    return full


@cache
def cpu_bf16_slowdown() -> float:
    """Measure the time of a bf16 product on this processor as a multiple of the fp32 product's, with one thread.

    Having bf16 instructions does not make it fast: with AVX-512's, and without AMX's, it took 1.7 times as long.
    """

    def seconds(dtype: torch.dtype) -> float:
        timer = Timer("a @ a.T", globals={"a": torch.ones(576, 576, dtype=dtype)})
        return min(timer.timeit(1).mean for _ in range(20))

    return seconds(torch.bfloat16) / seconds(torch.float32)


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """Compute out = a @ b, or out += a @ b. 16-bit inputs give fp32 results that were never rounded to 16 bits."""
    options: dict[str, Any] = {}
    if a.dtype != out.dtype:
        options["out_dtype"] = out.dtype
    if add:
        torch.addmm(out, a, b, out=out, **options)
    else:
        torch.mm(a, b, out=out, **options)


def compute_tiles(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, spec: LogitSpec) -> Iterator[Tile]:
    """Yield every tile of the logits: all rows with the first columns, then all rows with the next columns.

    All tiles share one buffer, so a tile is valid until the next one is asked for. The consumer may overwrite it.
    """
    dtype = statistics_dtype(hidden)
    rounded = hidden if weight is None else hidden.to(spec.product_dtype)
    rows_per_tile = min(spec.rows_per_tile, len(hidden))
    columns_per_tile = min(spec.columns_per_tile, spec.vocabulary)
    # One buffer for all tiles: a fresh one each costs its page faults again, 8 % of the time of a pass on a CPU.
    buffer = hidden.new_empty(rows_per_tile, columns_per_tile, dtype=dtype)
    factor = spec.scale / spec.temperature
    if spec.softcap is not None:  # the scale is inside the tanh
        factor = spec.softcap / spec.temperature
    for columns in split_range(spec.vocabulary, spec.columns_per_tile):
        weight_part = None if weight is None else weight[columns].to(spec.product_dtype)
        for rows in split_range(len(hidden), spec.rows_per_tile):
            z = buffer[: rows.stop - rows.start, : columns.stop - columns.start]
            if weight_part is None:
                z.copy_(hidden[rows, columns])
            else:
                multiply(z, rounded[rows], weight_part.T)
            if bias is not None:
                z.add_(bias[columns].to(dtype))
            if spec.softcap is not None:
                z.mul_(spec.scale / spec.softcap).tanh_()
            if factor != 1.0:
                z.mul_(factor)
            yield Tile(rows, columns, z, weight_part)


def locate_tokens(tokens: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return whether each token id is in the tile, and its column there (any column of the tile if it is not)."""
    offset = tokens - columns.start
    column = offset.clamp(0, columns.stop - columns.start - 1)
    return offset == column, column
