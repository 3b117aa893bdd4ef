"""The max pooling of ResNets, 3 × 3 with a stride of 2, with fast kernels for training on a GPU.

In the backward pass the kernels of PyTorch and of its compiler look, for each input, at all outputs
that may have taken it. The kernel here computes blocks of 2 × 2 inputs, which depend on four
outputs, and needs a fifth of the time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from listwise.imports import call_without_compiler

CHANNELS = 64  # the kernels compute so many at a time
_LAST = torch.channels_last
_LAYOUT = (torch.Tag.needs_fixed_stride_order,)


class FastMaxPool(nn.Module):
    """Computes `F.max_pool2d(maps, 3, 2, 1)`: [B, C, H, W] -> [B, C, h, w]."""

    def forward(self, maps: Tensor) -> Tensor:  # noqa: D102
        if maps.ndim != 4 or not _can_compute(maps):
            return F.max_pool2d(maps, 3, 2, 1)
        values: Tensor
        values, _ = call_without_compiler(_max_pool, maps)
        return values


def suits_max_pool(maps: Tensor) -> bool:
    """Return whether the kernels support feature maps [B, C, H, W]."""
    return _can_compute(maps) and maps.is_contiguous(memory_format=_LAST)


def _can_compute(maps: Tensor) -> bool:
    """Return whether the kernels, which compute in float32, are exact for these maps."""
    return maps.shape[1] % CHANNELS == 0 and maps.dtype != torch.float64


def max_pool_values(maps: Tensor) -> Tensor:
    """Compute `F.max_pool2d(maps, 3, 2, 1)` on a GPU, without gradients, if `suits_max_pool`."""
    from listwise.models import max_pool_kernels

    values, offsets = _empty_outputs(maps)
    max_pool_kernels.max_pool(maps, values, offsets)
    return values


def replace_max_pools(net: nn.Module) -> None:
    """Replace the max poolings of a network that `FastMaxPool` can compute."""
    for parent in net.modules():
        for name, child in parent.named_children():
            if type(child) is nn.MaxPool2d and _is_usual(child):
                setattr(parent, name, FastMaxPool())


def _is_usual(pool: nn.MaxPool2d) -> bool:
    sizes = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    usual = all(
        size in (expected, (expected, expected))
        for size, expected in zip(sizes, (3, 2, 1, 1), strict=True)
    )
    hooks = pool._forward_hooks or pool._forward_pre_hooks or pool._backward_hooks
    return usual and not pool.ceil_mode and not pool.return_indices and not hooks


@torch.library.custom_op("listwise::max_pool", mutates_args=(), tags=_LAYOUT)
def _max_pool(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maxima and their offsets in their windows, uint8."""
    values, offsets = _empty_outputs(maps)
    if maps.is_cuda:
        from listwise.models import max_pool_kernels

        max_pool_kernels.max_pool(maps.contiguous(memory_format=_LAST), values, offsets)
        return values, offsets
    found, indices = F.max_pool2d(maps, 3, 2, 1, return_indices=True)
    height, width = found.shape[2:]
    rows = torch.div(indices, maps.shape[3], rounding_mode="floor")
    rows -= 2 * torch.arange(height)[:, None] - 1
    columns = indices % maps.shape[3] - (2 * torch.arange(width) - 1)
    return values.copy_(found), offsets.copy_(3 * rows + columns)


@_max_pool.register_fake
def _(maps: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_outputs(maps)


def _empty_outputs(maps: Tensor) -> tuple[Tensor, Tensor]:
    count, channels, height, width = maps.shape
    shape = (count, channels, (height - 1) // 2 + 1, (width - 1) // 2 + 1)
    values = torch.empty(shape, dtype=maps.dtype, device=maps.device, memory_format=_LAST)
    return values, torch.empty_like(values, dtype=torch.uint8)


@torch.library.custom_op("listwise::max_pool_gradient", mutates_args=(), tags=_LAYOUT)
def _max_pool_gradient(gradient: Tensor, offsets: Tensor, height: int, width: int) -> Tensor:
    """Return the gradient of maps [B, C, height, width] from that of the maxima."""
    result = _empty_maps(gradient, height, width)
    if gradient.is_cuda:
        from listwise.models import max_pool_kernels

        max_pool_kernels.max_pool_gradient(
            gradient.contiguous(memory_format=_LAST), offsets, result
        )
        return result
    rows = 2 * torch.arange(offsets.shape[2])[:, None] - 1 + offsets // 3
    columns = 2 * torch.arange(offsets.shape[3]) - 1 + offsets % 3
    places = (rows * width + columns).flatten(2)
    flat = torch.zeros(*result.shape[:2], height * width, dtype=result.dtype)
    return result.copy_(flat.scatter_add_(2, places, gradient.flatten(2)).view(result.shape))


@_max_pool_gradient.register_fake
def _(gradient: Tensor, offsets: Tensor, height: int, width: int) -> Tensor:
    return _empty_maps(gradient, height, width)


def _empty_maps(gradient: Tensor, height: int, width: int) -> Tensor:
    shape = (*gradient.shape[:2], height, width)
    return torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=_LAST)


def _keep_offsets(ctx: torch.autograd.function.FunctionCtx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)
    ctx.sizes = inputs[0].shape[2:]  # type: ignore[attr-defined]


def _backward(ctx, gradient: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
    (offsets,) = ctx.saved_tensors
    if gradient is None:
        return None
    return call_without_compiler(_max_pool_gradient, gradient, offsets, *ctx.sizes)


_max_pool.register_autograd(_backward, setup_context=_keep_offsets)
