"""The Triton kernel of `fusion.py`: the gradient of a ReLU and of the bias before it."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program reads so many numbers at a time, which lie side by side if there are this many channels.
ELEMENTS, COLUMNS = 4096, 1024
PROGRAMS = 2048  # enough to keep every GPU busy; the sum of each takes memory


@triton.jit(do_not_specialize=["steps"])
def gradient_kernel(
    gradient,
    added,
    active,
    result,
    sums,
    size,
    channels,
    steps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `relu_gradient` for some positions and channels.

    Shapes: [size, channels], except for `sums` [row tiles, channels]. A tile has steps × ROWS rows.
    """
    column_tiles = channels // COLUMNS
    tile = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(steps):
        row = (tile * steps + step) * ROWS + tl.arange(0, ROWS)
        real = (row < size)[:, None]
        place = row.to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.load(gradient + place, mask=real, other=0.0).to(tl.float32)
        if ADD:
            value += tl.load(added + place, mask=real, other=0.0).to(tl.float32)
        value = tl.where(tl.load(active + place, mask=real, other=0.0) > 0, value, 0.0)
        tl.store(result + place, value.to(result.dtype.element_ty), mask=real)
        total += value
    tl.store(sums + tile * channels + column, tl.sum(total, axis=0))


def relu_gradient(gradient: Tensor, added: Tensor | None, active: Tensor, result: Tensor) -> Tensor:
    """Write gradient + added where `active` is positive, and 0 elsewhere; return its sum.

    Shapes: [n, C] each -> [C], float32. C is a multiple of 64.
    """
    size, channels = result.shape
    columns = math.gcd(channels, COLUMNS)  # a power of 2
    rows = ELEMENTS // columns
    row_blocks = triton.cdiv(size, rows)
    steps = triton.cdiv(row_blocks * (channels // columns), PROGRAMS)
    tiles = triton.cdiv(row_blocks, steps)
    sums = torch.empty(tiles, channels, dtype=torch.float32, device=result.device)
    gradient_kernel[(tiles * (channels // columns),)](
        gradient,
        added,
        active,
        result,
        sums,
        size,
        channels,
        steps,
        ADD=added is not None,
        ROWS=rows,
        COLUMNS=columns,
    )
    return sums.sum(0)
