"""Compute logits in tiles: the shape of a tile, the precision of its matrix products, and one pass over all tiles.

On a CPU, products are computed in fp32. On a GPU, they multiply 16-bit inputs and return fp32 results. The product of
two 16-bit numbers is exact in fp32, and this is an order of magnitude faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

# Shape of a tile on a CPU, 16 MB in fp32. Larger tiles are not faster there.
DEFAULT_ROWS = 1024
DEFAULT_COLUMNS = 4096
# Device types on which `torch.mm` can multiply 16-bit matrices into an fp32 result (`out_dtype`).
MIXED_PRODUCT_DEVICES = {"cuda"}
Precision = Literal["auto", "fp32"]


class LogitSpec(NamedTuple):
    """How to compute the logits z from the products y, and which optional statistics to compute.

    z = softcap tanh(scale y / softcap) / temperature, or z = scale y / temperature without a soft cap.
    """

    softcap: float | None
    scale: float
    temperature: float
    vocabulary: int  # number of logits per token
    rows_per_tile: int
    columns_per_tile: int
    extras: frozenset[str]  # names of the optional statistics
    product_dtype: torch.dtype  # dtype of the inputs of the matrix products


class Tile(NamedTuple):
    """A block of logits. The next tile overwrites `logits`."""

    rows: slice  # the tokens
    columns: slice  # the vocabulary entries
    logits: Tensor  # (rows, columns)
    weight: Tensor | None  # (columns, H): the rows of the head that gave them; None if logits were passed in


def split_range(length: int, step: int) -> Iterator[slice]:
    """Split [0, length) into slices.

    An empty range gives one empty slice, so that a fully masked batch still has an autograd graph.
    """
    for start in range(0, max(length, 1), step):
        yield slice(start, min(start + step, length))


def tile_shape(tokens: int, vocabulary: int, device: torch.device, tile: int | None = None) -> tuple[int, int]:
    """Choose the shape of a tile: a block of logits with a row for each token and a column for each vocabulary entry.

    On a CPU, or a GPU without CUDA, the shape is fixed: 1024 rows and 4096 columns.

    On a CUDA GPU, tiles are large, since every tile costs kernel launches. A tile has all tokens as rows, so each part
    of the weight's gradient is a single product. It has as many columns as fit into a 256th of the device's memory, but
    at most an eighth of the vocabulary: with its temporaries, it then needs less than a tenth of the memory of dense
    logits. It never has fewer than 1024 columns.

    Args:
        tokens: Number of tokens.
        vocabulary: Number of logits per token.
        device: Where the logits are computed.
        tile: Number of columns, with 1024 rows on any device; None chooses the shape as above.

    Returns:
        Number of rows and number of columns.
    """
    if tile is not None:
        return DEFAULT_ROWS, tile
    is_cuda = device.type in MIXED_PRODUCT_DEVICES
    if not is_cuda:
        return DEFAULT_ROWS, DEFAULT_COLUMNS
    rows = max(tokens, 1)  # there may be no tokens
    bytes_per_tile = device_memory(device) // 256
    logits_per_tile = bytes_per_tile // 4  # a logit has four bytes in fp32
    columns = min(logits_per_tile // rows, vocabulary // 8)
    columns = max(columns, 1024)
    return rows, round_up(columns, 128)


def round_up(number: int, multiple: int) -> int:
    """Round up to a multiple.

    >>> round_up(1025, 128)
    1152
    """
    return -(-number // multiple) * multiple


def device_memory(device: torch.device) -> int:
    """Return the device's memory in bytes; 16 GiB, a modest GPU, if it is unknown."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).total_memory
    return 16 * 2**30


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for a float64 tensor, and fp32 for any other.

    Statistics in bf16 would change a two-label confidence by up to 1.5 points.
    """
    if tensor.dtype == torch.float64:
        return torch.float64
    return torch.float32


def product_dtype(hidden: Tensor, weight: Tensor | None, precision: Precision = "auto") -> torch.dtype:
    """Return the dtype to which hidden states, weights and the logits' gradient are rounded before a product.

    A device that can multiply 16-bit matrices into fp32 does so if the weight is 16-bit, or if it is fp32 and autocast
    is on. The product of two bf16 numbers is exact in fp32, so the logits of a bf16 model lose no precision.

    Args:
        hidden: Hidden states; with `weight=None`, logits.
        weight: Weight of the LM head; None if there is no product.
        precision: `fp32` never rounds to 16 bits. `auto` does so in the cases above.

    Returns:
        The 16-bit dtype of the weight or of autocast. In all other cases the dtype of the statistics: float64 if the
        hidden states are float64, and fp32 otherwise.
    """
    full_precision = statistics_dtype(hidden)
    device = hidden.device.type
    if weight is None or device not in MIXED_PRODUCT_DEVICES:
        return full_precision
    if precision == "fp32" or full_precision == torch.float64:
        return full_precision
    dtype = weight.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    if dtype in (torch.bfloat16, torch.float16):
        return dtype
    return full_precision


@cache
def cpu_bf16_slowdown() -> float:
    """Measure how many times as long a bf16 product takes on this processor as an fp32 product, with one thread.

    A processor with bf16 instructions is not always faster: with AVX-512's but without AMX's, it took 1.7 times as
    long.
    """

    def measure_seconds(dtype: torch.dtype) -> float:
        timer = Timer("a @ a.T", globals={"a": torch.ones(576, 576, dtype=dtype)})
        return min(timer.timeit(1).mean for _ in range(20))  # the run that other processes disturbed least

    return measure_seconds(torch.bfloat16) / measure_seconds(torch.float32)


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """Compute out = a @ b, or out += a @ b if `add`. Results of 16-bit inputs are never rounded to 16 bits."""
    options: dict[str, Any] = {}
    if a.dtype != out.dtype:
        options["out_dtype"] = out.dtype
    if add:
        torch.addmm(out, a, b, out=out, **options)
    else:
        torch.mm(a, b, out=out, **options)


def compute_tiles(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, spec: LogitSpec) -> Iterator[Tile]:
    """Yield every tile of the logits: all rows with the first columns, then all rows with the next columns.

    All tiles share one buffer, so a tile is valid only until the next one is requested. The caller may overwrite it.

    Args:
        hidden: Hidden states (N, H); with `weight=None`, logits y (N, V) to which bias, scale, soft cap and temperature
            are still applied.
        weight: Weight of the LM head (V, H), or None.
        bias: Bias of the LM head (V,), or None.
        spec: How to compute the logits.
    """
    dtype = statistics_dtype(hidden)
    rounded_hidden = hidden if weight is None else hidden.to(spec.product_dtype)
    rows_per_tile = min(spec.rows_per_tile, len(hidden))
    columns_per_tile = min(spec.columns_per_tile, spec.vocabulary)
    # A new buffer for every tile would cost page faults: 8 % of the time of a pass on a CPU.
    buffer = hidden.new_empty(rows_per_tile, columns_per_tile, dtype=dtype)
    if spec.softcap is None:
        factor = spec.scale / spec.temperature
    else:
        factor = spec.softcap / spec.temperature  # the scale is applied inside the tanh
    for columns in split_range(spec.vocabulary, spec.columns_per_tile):
        weight_part = None if weight is None else weight[columns].to(spec.product_dtype)
        for rows in split_range(len(hidden), spec.rows_per_tile):
            z = buffer[: rows.stop - rows.start, : columns.stop - columns.start]
            if weight_part is None:
                z.copy_(hidden[rows, columns])
            else:
                multiply(z, rounded_hidden[rows], weight_part.T)
            if bias is not None:
                z.add_(bias[columns].to(dtype))
            if spec.softcap is not None:
                z.mul_(spec.scale / spec.softcap).tanh_()
            if factor != 1.0:
                z.mul_(factor)
            yield Tile(rows, columns, z, weight_part)


def locate_tokens(tokens: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Locate token ids in the columns of a tile.

    Returns:
        Whether each token is in the tile, and its column there; an arbitrary valid column if it is not.
    """
    offset = tokens - columns.start
    last_column = columns.stop - columns.start - 1
    column = offset.clamp(0, last_column)
    is_inside = offset == column  # clamping changes every other offset
    return is_inside, column
