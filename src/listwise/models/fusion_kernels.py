"""The Triton kernel of `fusion.py`: a matrix product, and what follows it in the network.

A 1 × 1 convolution of feature maps in channels-last order is a product of two matrices. The rows
of the first are the positions of all images, its columns the channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Positions and channels per tile, and channels read at a time.
ROWS, DEPTH = 128, 64
# A tile covers the largest of these numbers of channels that divides their number.
COLUMNS = (256, 128, 64)


@triton.jit
def product_kernel(
    maps,
    weight,
    bias,
    added,
    active,
    result,
    sums,
    size,
    outputs,
    inputs,
    FORWARD: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute a tile of the result of `relu_convolution` or of `relu_gradient`.

    Shapes: `maps` [size, inputs]; `weight` [outputs, inputs] forward, [inputs, outputs] backward;
    `bias` [outputs]; `added`, `active` and `result` [size, outputs]; `sums` [tiles, outputs].
    """
    program = tl.program_id(0)
    column_tiles = outputs // COLUMNS
    # Neighboring programs read the same rows of the maps, so all but one find them in the cache.
    row_tile = program // column_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = (program % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    real = row < size
    line = (row % size).to(tl.int64)[:, None]
    left = maps + line * inputs + k[None, :]
    right = weight + (
        column[None, :] * inputs + k[:, None] if FORWARD else k[:, None] * outputs + column[None, :]
    )
    place = line * outputs + column[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, inputs, DEPTH):
        total = tl.dot(tl.load(left), tl.load(right), total)
        left += DEPTH
        right += DEPTH if FORWARD else DEPTH * outputs
    if FORWARD:
        total += tl.load(bias + column)[None, :].to(tl.float32)
    if ADD:
        total += tl.load(added + place).to(tl.float32)
    if FORWARD:
        total = tl.maximum(total, 0.0)
    else:
        total = tl.where((tl.load(active + place) > 0) & real[:, None], total, 0.0)
        tl.store(sums + row_tile * outputs + column, tl.sum(total, axis=0))
    tl.store(result + place, total.to(result.dtype.element_ty), mask=real[:, None])


def relu_convolution(
    maps: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None, result: Tensor
) -> None:
    """Write relu(maps · weightᵀ + bias + added): [n, K], [N, K], [N], [n, N] -> [n, N]."""
    _launch(maps, weight, bias, added, None, result, None)


def relu_gradient(
    gradient: Tensor, weight: Tensor, added: Tensor | None, active: Tensor, result: Tensor
) -> Tensor:
    """Write gradient · weight + added where `active` is positive, 0 elsewhere; return its sum.

    Shapes: [n, K], [K, N], [n, N], [n, N] -> [n, N], and the sums [N] in float32.
    """
    tiles = triton.cdiv(len(result), ROWS)
    sums = torch.empty(tiles, result.shape[1], dtype=torch.float32, device=result.device)
    _launch(gradient, weight, None, added, active, result, sums)
    return sums.sum(0)


def _launch(
    maps: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    added: Tensor | None,
    active: Tensor | None,
    result: Tensor,
    sums: Tensor | None,
) -> None:
    size, outputs = result.shape
    columns = next(number for number in COLUMNS if outputs % number == 0)
    product_kernel[(triton.cdiv(size, ROWS) * (outputs // columns),)](
        maps,
        weight,
        bias,
        added,
        active,
        result,
        sums,
        size,
        outputs,
        maps.shape[1],
        FORWARD=active is None,
        ADD=added is not None,
        ROWS=ROWS,
        COLUMNS=columns,
        DEPTH=DEPTH,
        num_warps=4 if columns == 64 else 8,
        num_stages=3,
    )
