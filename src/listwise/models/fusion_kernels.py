"""The Triton kernel of `fusion.py`: the gradient of a ReLU and of the bias before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program reads so many positions at a time, so often, of so many channels.
ROWS, STEPS = 32, 8
COLUMNS = (128, 64)


@triton.jit
def gradient_kernel(
    gradient,
    added,
    active,
    result,
    sums,
    size,
    channels,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `relu_gradient` for some positions and channels.

    Shapes: [size, channels], except for `sums` [row tiles, channels].
    """
    column_tiles = channels // COLUMNS
    tile = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = (tile * STEPS + step) * ROWS + tl.arange(0, ROWS)
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
    tiles = triton.cdiv(size, ROWS * STEPS)
    sums = torch.empty(tiles, channels, dtype=torch.float32, device=result.device)
    columns = next(number for number in COLUMNS if channels % number == 0)
    gradient_kernel[(tiles * (channels // columns),)](
        gradient,
        added,
        active,
        result,
        sums,
        size,
        channels,
        ADD=added is not None,
        ROWS=ROWS,
        STEPS=STEPS,
        COLUMNS=columns,
    )
    return sums.sum(0)
