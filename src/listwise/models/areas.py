"""Observe the operations of a network, and keep photos in one batch apart from each other.

The photos of a batch lie in the upper left corners of canvases of one shape. An operation that
mixes positions must see padding where a photo ends, not what the operations before it left there.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from listwise.models.folding import HALF, can_use_blocks, compute_dtype, in_blocks
from listwise.models.residual import finish


class UnsupportedNetwork(Exception):
    """The network contains an operation that mixed batches do not support."""


class _Area:
    """The parts of canvases that photos cover: `sizes` [B, 2], heights and widths."""

    def __init__(self, canvas: tuple[int, int], sizes: NDArray[np.int64], device: torch.device):
        if (sizes < 1).any():
            raise UnsupportedNetwork("a photo is smaller than a kernel")
        self.canvas = canvas
        self.sizes = sizes
        self.full = bool((sizes == canvas).all())
        self._device = device
        self._sizes: Tensor | None = None
        self._outside: Tensor | None = None

    @property
    def device_sizes(self) -> Tensor | None:
        """The sizes on the device, int32; None if all photos fill their canvas."""
        if self._sizes is None and not self.full:
            sizes = torch.from_numpy(self.sizes.astype(np.int32))
            if self._device.type == "cuda":
                sizes = sizes.pin_memory()  # a copy from other memory waits for the GPU
            self._sizes = sizes.to(self._device, non_blocking=True)
        return self._sizes

    def fill_outside(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Set all values outside of the photos, in place: x [B, C, H, W]."""
        sizes = self.device_sizes
        if sizes is None:
            return x
        if self._outside is None:
            heights, widths = sizes.T[:, :, None]
            rows, columns = (torch.arange(side, device=self._device) for side in self.canvas)
            self._outside = ((rows >= heights)[:, :, None] | (columns >= widths)[:, None])[:, None]
        return x.masked_fill_(self._outside, value)

    def pixels(self, like: Tensor) -> Tensor:
        """Return the numbers of pixels in the photos: [B, 1, 1, 1]."""
        counts = torch.from_numpy(self.sizes.prod(axis=1))
        return counts.to(like.device, torch.float64, non_blocking=True).view(-1, 1, 1, 1)


Rule = Callable[[Any, int], Any]
"""Maps the sides of inputs along an axis (0: height, 1: width) to the sides of outputs."""


class OwnAreas(TorchFunctionMode):
    """Observes the operations of a network, and sets the values outside of the photos.

    All feature maps of one height and width are covered by the photos in the same way; otherwise
    `UnsupportedNetwork` is raised.

    Args:
        canvases: [B, 3, H, W].
        sizes: heights and widths of the B photos.
        poison: if given, the value outside of the photos after every operation that does not set
            it itself. The result must not depend on it.
    """

    def __init__(
        self,
        canvases: Tensor,
        sizes: Sequence[tuple[int, int]],
        poison: float | None = None,
    ) -> None:
        super().__init__()
        self._poison = poison
        self._device = canvases.device
        self._known: dict[tuple[tuple[int, int], Rule], tuple[int, int]] = {}
        self._finished: Tensor | None = None  # by the last operation; it is 0 outside of the photos
        self._areas: dict[tuple[int, int], _Area] = {}
        self._add(_shape(canvases), np.array(sizes, dtype=np.int64))
        self._rules: dict[Any, Callable[..., Any]] = {
            torch.conv2d: self._conv2d,
            finish: self._finish,
            torch.max_pool2d: self._max_pool2d,
            F.max_pool2d: self._max_pool2d,
            F.avg_pool2d: self._avg_pool2d,
            F.adaptive_avg_pool2d: self._adaptive_avg_pool2d,
            torch.mean: self._mean,
            Tensor.mean: self._mean,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = self._call(func, args, kwargs)
        if self._poison is not None and output is not self._finished:
            self._fill(output, self._poison)
        return output

    def _fill(self, output: Any, value: float) -> None:
        """Set the values outside of the photos, if an output is a feature map of all photos."""
        if isinstance(output, Tensor) and output.ndim == 4 and output.is_floating_point():
            area = self._areas.get(_shape(output))
            if area is not None and len(area.sizes) == len(output):
                with suppress(RuntimeError):  # several elements may have the same memory
                    area.fill_outside(output, value)

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        rule = self._rules.get(func)
        filled, self._finished = self._finished, None
        if rule is None or not args or not isinstance(args[0], Tensor) or args[0].ndim != 4:
            return func(*args, **(kwargs or {}))
        if args[0] is filled and func in (torch.conv2d, F.max_pool2d):
            return rule(*args, **(kwargs or {}), filled=True)
        return rule(*args, **(kwargs or {}))

    def sizes(self, features: Tensor) -> NDArray[np.int64]:
        """Return heights and widths of the photos in feature maps [B, C, h, w]: [B, 2]."""
        return self._area(features).sizes

    def _area(self, x: Tensor) -> _Area:
        area = self._areas.get(_shape(x))
        if area is None or len(area.sizes) != len(x):
            raise UnsupportedNetwork(f"unknown feature map {list(x.shape)}")
        return area

    def _add(self, canvas: tuple[int, int], sizes: NDArray[np.int64]) -> None:
        known = self._areas.get(canvas)
        if known is None:
            self._areas[canvas] = _Area(canvas, sizes, self._device)
        elif not np.array_equal(known.sizes, sizes):
            raise UnsupportedNetwork(f"feature maps {list(canvas)} of different photos")

    def _made(self, area: _Area, output: Tensor, rule: Rule) -> Tensor:
        """Note how photos cover the output of an operation."""
        if self._known.get((area.canvas, rule)) == _shape(output):
            return output
        self._known[area.canvas, rule] = _shape(output)
        self._add(_shape(output), np.stack([rule(area.sizes[:, i], i) for i in (0, 1)], axis=1))
        return output

    def _conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        filled: bool = False,
    ) -> Tensor:
        if _shape(x) == (1, 1) not in self._areas:  # channels of a whole photo, no positions
            return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        area = self._area(x)
        kernel, stride, dilation = _shape(weight), _pair(stride), _pair(dilation)
        if kernel != (1, 1) and not filled:
            area.fill_outside(x)
        padding = _pair(0 if padding == "valid" else padding)
        output = _convolve(x, weight, bias, stride, padding, dilation, groups)
        return self._made(area, output, _Strided(kernel, stride, padding, dilation))

    def _finish(self, output: Tensor, bias: Tensor, added: Tensor | None) -> Tensor:
        self._finished = finish(output, bias, added, self._area(output).device_sizes)
        return self._finished

    def _max_pool2d(
        self,
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
        filled: bool = False,
    ) -> Tensor:
        area = self._area(x)
        if return_indices:
            raise UnsupportedNetwork("positions of maxima")
        kernel, stride = _pair(kernel_size), _pair(stride or kernel_size)
        if not filled:  # zeros are the same as padding for a maximum of values of at least 0
            area.fill_outside(x, -math.inf)
        output = F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
        rule = _Strided(kernel, stride, _pair(padding), _pair(dilation), ceil_mode)
        return self._made(area, output, rule)

    def _avg_pool2d(
        self,
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        area = self._area(x)
        kernel, stride, padding = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding)
        padded = padding != (0, 0)
        if divisor_override is not None or (ceil_mode and padded and count_include_pad):
            raise UnsupportedNetwork("mean over windows that cross the border")
        area.fill_outside(x)
        output = F.avg_pool2d(x, kernel, stride, padding, ceil_mode)
        if (ceil_mode or padded) and not (padded and count_include_pad):
            # The mean is over the part of the window that lies in the photo.
            inside = area.fill_outside(x.new_ones(len(x), 1, *area.canvas))
            output = output / F.avg_pool2d(inside, kernel, stride, padding, ceil_mode)
        return self._made(area, output, _Strided(kernel, stride, padding, (1, 1), ceil_mode))

    def _adaptive_avg_pool2d(self, x: Tensor, output_size: Any) -> Tensor:
        if _pair(output_size) != (1, 1):
            raise UnsupportedNetwork(f"adaptive pooling to {output_size}")
        return self._mean(x, (2, 3), keepdim=True)

    def _mean(self, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        axes = {axis % 4 for axis in (dim if isinstance(dim, Sequence) else ())}
        if axes != {2, 3}:
            return torch.mean(x, dim, keepdim, dtype=dtype)
        area = self._area(x)
        if area.full:
            return torch.mean(x, dim, keepdim, dtype=dtype)
        total = area.fill_outside(x).sum((2, 3), keepdim=True, dtype=torch.float64)
        mean = (total / area.pixels(x)).to(dtype or x.dtype)
        return mean if keepdim else mean.flatten(1)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Tensor:
    """Compute a convolution; in half precision on a GPU, one of 1 × 1 is a product of matrices.

    The GPU prepares other convolutions for each shape, which takes longer than computing them.
    """
    if can_use_blocks(weight, stride, padding, dilation, groups):
        return F.conv2d(*in_blocks(x, weight, padding), bias)
    half = x.is_cuda and compute_dtype(weight) in HALF
    if _shape(weight) != (1, 1) or padding != (0, 0) or groups != 1 or not half:
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    maps = x[:, :, :: stride[0], :: stride[1]].permute(0, 2, 3, 1)
    # With rows of a matrix, the product adds the bias.
    rows = F.linear(maps.flatten(0, 2), weight.flatten(1), bias)
    return rows.view(*maps.shape[:3], -1).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class _Strided:
    """The rule for the output sides of a convolution or pooling."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool = False

    def __call__(self, sides: Any, i: int) -> Any:
        stride, padding = self.stride[i], self.padding[i]
        span = sides + 2 * padding - self.dilation[i] * (self.kernel[i] - 1) - 1
        if not self.ceil_mode:
            return span // stride + 1
        outputs = -(-span // stride) + 1
        # A window that would start behind the photo and its left padding is left out.
        return outputs - ((outputs - 1) * stride >= sides + padding)


def _shape(x: Tensor) -> tuple[int, int]:
    height, width = x.shape[-2:]
    return height, width


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        raise UnsupportedNetwork(f"padding {value!r}")
    first, second = (value, value) if isinstance(value, int) else tuple(value) * (3 - len(value))
    return first, second
