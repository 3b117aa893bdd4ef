"""The Triton kernels of `max_pool.py`, for feature maps in channels-last order.

Output (i, j) is the maximum of the 3 × 3 inputs around input (2 i, 2 j). Its offset, 0 to 8, tells
which of them it is, row by row.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

# Positions in a row, and channels, that a program computes; the same number as in `max_pool.py`.
COLUMNS, CHANNELS = 32, 64


# Specialization on divisible numbers would compile the kernel again for many photo shapes.
@triton.jit(do_not_specialize=["height", "width", "out_height", "out_width"])
def pool_kernel(
    maps,
    values,
    offsets,
    height,
    width,
    channels,
    out_height,
    out_width,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute a part of a row of outputs, and their offsets."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    image = (row // out_height).to(tl.int64)
    top = (row % out_height) * 2 - 1
    real = column < out_width
    best = tl.full((COLUMNS, CHANNELS), float("-inf"), tl.float32)
    place = tl.zeros((COLUMNS, CHANNELS), tl.int32)
    for number in tl.static_range(9):
        y = top + number // 3 + 0 * column  # a number per column, as the masks are
        x = column * 2 - 1 + number % 3
        inside = real & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        source = maps + ((image * height + y) * width + x) * channels + channel
        value = tl.load(source, mask=inside, other=float("-inf")).to(tl.float32)
        higher = (value > best) | (value != value)
        best = tl.where(higher, value, best)
        place = tl.where(higher, number, place)
    target = (row.to(tl.int64) * out_width + column) * channels + channel
    tl.store(values + target, best.to(values.dtype.element_ty), mask=real)
    tl.store(offsets + target, place.to(tl.uint8), mask=real)


@triton.jit
def _taken(gradient, offsets, place, real, NUMBER: tl.constexpr):
    """Return the gradient of the outputs whose maximum has this offset; 0 for all others."""
    chosen = tl.load(offsets + place, mask=real, other=255).to(tl.int32) == NUMBER
    value = tl.load(gradient + place, mask=real, other=0.0).to(tl.float32)
    return tl.where(chosen, value, 0.0)


@triton.jit
def pool_gradient_kernel(
    gradient,
    offsets,
    result,
    height,
    width,
    channels,
    out_height,
    out_width,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute the gradient of blocks of 2 × 2 inputs; four outputs depend on each block."""
    row_blocks = (height + 1) // 2
    program = tl.program_id(0)
    image = (program // row_blocks).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    i = program % row_blocks + 0 * j
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    here = ((image * out_height + i) * out_width + j) * channels + channel
    below = here + out_width * channels
    real = (j < out_width) & (i < out_height)
    right = (j + 1 < out_width) & (i < out_height)
    real_below = (j < out_width) & (i + 1 < out_height)
    right_below = (j + 1 < out_width) & (i + 1 < out_height)
    first = _taken(gradient, offsets, here, real, 4)
    second = _taken(gradient, offsets, here, real, 5)
    second += _taken(gradient, offsets, here + channels, right, 3)
    third = _taken(gradient, offsets, here, real, 7)
    third += _taken(gradient, offsets, below, real_below, 1)
    fourth = _taken(gradient, offsets, here, real, 8)
    fourth += _taken(gradient, offsets, here + channels, right, 6)
    fourth += _taken(gradient, offsets, below, real_below, 2)
    fourth += _taken(gradient, offsets, below + channels, right_below, 0)
    dtype = result.dtype.element_ty
    target = result + ((image * height + 2 * i) * width + 2 * j) * channels + channel
    left, middle = 2 * j < width, 2 * j + 1 < width
    lower = 2 * i + 1 < height
    tl.store(target, first.to(dtype), mask=left)
    tl.store(target + channels, second.to(dtype), mask=middle)
    tl.store(target + width * channels, third.to(dtype), mask=left & lower)
    tl.store(target + (width + 1) * channels, fourth.to(dtype), mask=middle & lower)


def max_pool(maps: Tensor, values: Tensor, offsets: Tensor) -> None:
    """Write the maxima and their offsets: [B, C, H, W] -> [B, C, h, w], all channels-last."""
    count, channels, height, width = maps.shape
    out_height, out_width = values.shape[2:]
    grid = (count * out_height, triton.cdiv(out_width, COLUMNS), channels // CHANNELS)
    sizes = (height, width, channels, out_height, out_width)
    with _device_of(maps):
        pool_kernel[grid](maps, values, offsets, *sizes, COLUMNS, CHANNELS)


def max_pool_gradient(gradient: Tensor, offsets: Tensor, result: Tensor) -> None:
    """Write the gradient of the maps: [B, C, h, w] -> [B, C, H, W], all channels-last."""
    count, channels, height, width = result.shape
    out_height, out_width = offsets.shape[2:]
    blocks = triton.cdiv(triton.cdiv(width, 2), COLUMNS)
    grid = (count * triton.cdiv(height, 2), blocks, channels // CHANNELS)
    sizes = (height, width, channels, out_height, out_width)
    with _device_of(gradient):
        pool_gradient_kernel[grid](gradient, offsets, result, *sizes, COLUMNS, CHANNELS)


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the GPU of a tensor, which need not be the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
