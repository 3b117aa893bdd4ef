"""What follows a convolution, in one pass over its output: bias, sum, ReLU and zeros outside.

PyTorch makes a pass over the activations for each of them. For a ResNet in bfloat16 on a fast GPU,
these passes move three times as many bytes as the convolutions themselves.
"""

from contextlib import nullcontext
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from listwise.losses.launches import Launch

ELEMENTS = 4096  # elements that one program computes


def finish_convolution(
    output: Tensor, bias: Tensor, other: Tensor | None, relu: bool, sizes: Tensor | None
) -> Tensor:
    """Add a bias and another tensor to the output of a convolution, in place.

    Args:
        output: [B, C, H, W] in channels-last order.
        bias: [C].
        other: [B, C, H, W] in channels-last order, or None.
        relu: replace negative sums by 0.
        sizes: int32 [B, 2], heights and widths of the photos, which lie in the upper left corners;
            other positions become 0. None if all photos fill their canvas.
    """
    count, channels, height, width = output.shape
    tensors = output, bias, output if other is None else other, output if sizes is None else sizes
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    kept = _launch if aligned else _launch.__wrapped__  # a compiled kernel expects one alignment
    kinds = output.device, output.dtype, bias.dtype, channels
    launch = kept(*kinds, other is not None, relu, sizes is not None)
    positions = count * height * width
    numbers = positions, channels, height * width, width
    with torch.cuda.device(output.device) if output.is_cuda else nullcontext():
        launch(
            triton.cdiv(positions, launch.constants["ROWS"]),
            *tensors,
            *numbers,
            columns=triton.cdiv(channels, launch.constants["BLOCK"]),
        )
    return output


@lru_cache(maxsize=1024)
def _launch(
    device: torch.device,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    channels: int,
    add: bool,
    relu: bool,
    mask: bool,
) -> Launch:
    """Return the kernel for some kinds of arguments; it is looked up by Triton only once."""
    block = min(256, triton.next_power_of_2(channels))
    rows = max(1, ELEMENTS // block)
    constants = {"ADD": add, "RELU": relu, "MASK": mask, "ROWS": rows, "BLOCK": block}
    return Launch(_finish_kernel, {}, constants)


# Specialization on divisible numbers would compile the kernel again for many photo shapes.
@triton.jit(do_not_specialize=["positions", "area", "width"])  # type: ignore[untyped-decorator]
def _finish_kernel(  # type: ignore[no-untyped-def]
    output,
    bias,
    other,
    sizes,
    positions,
    channels,
    area,
    width,
    ADD: tl.constexpr,
    RELU: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute some channels at some positions; `area` is H · W."""
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = (position < positions)[:, None] & (channel < channels)[None, :]
    place = position.to(tl.int64)[:, None] * channels + channel[None, :]
    shift = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)
    value = tl.load(output + place, mask=exists, other=0.0).to(tl.float32) + shift[None, :]
    if ADD:
        value += tl.load(other + place, mask=exists, other=0.0).to(tl.float32)
    if RELU:
        value = tl.maximum(value, 0.0)
    if MASK:
        photo = position // area
        height = tl.load(sizes + photo * 2, mask=position < positions, other=0)
        wide = tl.load(sizes + photo * 2 + 1, mask=position < positions, other=0)
        inside = ((position % area) // width < height) & (position % width < wide)
        value = tl.where(inside[:, None], value, 0.0)
    tl.store(output + place, value.to(output.dtype.element_ty), mask=exists)
