"""The kernel of `listwise.models.residual`, for feature maps in channels-last order."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # numbers that one program computes


def finish_on_gpu(output: Tensor, bias: Tensor, added: Tensor | None, sizes: Tensor | None) -> None:
    """Compute `finish` in place: [B, C, H, W] in channels-last order, as `added` is; bias [C].

    `sizes` int32 [B, 2] has the heights and widths of the photos, None if they fill their canvas.
    """
    count, channels, height, width = output.shape
    positions = count * height * width
    columns = min(256, triton.next_power_of_2(channels))
    rows = ELEMENTS // columns
    with torch.cuda.device(output.device) if output.is_cuda else nullcontext():
        grid = (triton.cdiv(positions, rows), triton.cdiv(channels, columns))
        numbers = (positions, channels, height * width, width)
        constants = {"ADD": added is not None, "MASK": sizes is not None}
        tile = {"ROWS": rows, "COLUMNS": columns}
        _finish_kernel[grid](output, bias, added, sizes, *numbers, **constants, **tile)


# Specialization on divisible numbers would compile the kernel again for many photo shapes.
@triton.jit(do_not_specialize=["positions", "area", "width"])  # type: ignore[untyped-decorator]
def _finish_kernel(  # type: ignore[no-untyped-def]
    output,
    bias,
    added,
    sizes,
    positions,
    channels,
    area,
    width,
    ADD: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute some channels at some positions; `area` is H · W."""
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (position < positions)[:, None] & (channel < channels)[None, :]
    place = position.to(tl.int64)[:, None] * channels + channel[None, :]
    shift = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    value = tl.load(output + place, mask=exists, other=0.0).to(tl.float32) + shift[None, :]
    if ADD:
        value += tl.load(added + place, mask=exists, other=0.0).to(tl.float32)
    value = tl.where(value < 0.0, 0.0, value)  # NaN stays
    if MASK:
        photo = position // area
        height = tl.load(sizes + photo * 2, mask=position < positions, other=0)
        wide = tl.load(sizes + photo * 2 + 1, mask=position < positions, other=0)
        inside = ((position % area) // width < height) & (position % width < wide)
        value = tl.where(inside[:, None], value, 0.0)
    tl.store(output + place, value.to(output.dtype.element_ty), mask=exists)
