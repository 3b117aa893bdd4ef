"""The AP loss in fused kernels on a CUDA GPU: scores stay in registers and never reach memory.

The kernels compute the same as `histogram.py` and `precision.py`:

- *Forward*: tensor cores compute each tile of scores on or above the diagonal, and the kernel adds
  it to the histograms of its rows and of its columns. A small kernel turns the histograms of a
  query into its average precision and the slopes of the loss.
- *Backward*: scores are computed again, strip by strip, and give a strip of weights (G + Gᵀ). A
  strip takes about thirty megabytes, whatever the size of the batch. cuBLAS multiplies it with the
  descriptors.

**Precision.** Slopes jump at bin centers, so a small error of a score can lead to a very different
slope. A float32 descriptor is therefore split into two float16 parts, high and low, and a score is
the sum of three exact products of parts: as precise as float32, at a third of the speed of float16.
Half-precision descriptors need one product: this is the fast mode. The product of weights with
descriptors has no jumps, so it is computed in half precision and summed in float32 in both modes.

Results are reproducible: histograms and losses are summed as integers.

**Host.** Up to 4096 images a step takes six launches: three kernels forward; the weights, the
product and its scaling backward. Their constants are computed once per shape (`_Kernels`).
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from listwise.losses.checks import (
    UNIT_TOLERANCE,
    check_lengths,
    check_positives,
    check_weights,
)
from listwise.losses.kernels import (
    histogram_kernel,
    precision_kernel,
    prepare_kernel,
    weight_kernel,
)
from listwise.losses.lists import blocks

# The largest strip of weights in memory at a time.
STRIP_ROWS, STRIP_COLUMNS = 2048, 8192
PREPARE_ROWS, PREPARE_BLOCK = 8, 1024
PRECISION_ROWS = 32


def tiling(
    rows: int, columns: int, depth: int, group: int, warps: int, stages: int
) -> dict[str, int]:
    """The shape of a tile of scores, as constants of a kernel, and the launch options of Triton.

    `depth` is the number of descriptor dimensions read at a time. For histograms, `rows` must
    divide `columns`.
    """
    constants = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "GROUP": group}
    return constants | {"num_warps": warps, "num_stages": stages}


# By whether descriptors are split into high and low parts.
HISTOGRAM_TILING = {True: tiling(128, 128, 64, 8, 8, 3), False: tiling(64, 128, 64, 8, 4, 3)}
WEIGHT_TILING = {True: tiling(128, 64, 64, 8, 4, 2), False: tiling(128, 64, 64, 8, 4, 3)}
# Small batches have few tiles: smaller ones keep more of the GPU busy.
SMALL_BATCH, SMALL_TILING = 2048, tiling(64, 64, 64, 8, 4, 3)
# Descriptors are padded with zeros to a multiple of this number, which every depth divides.
ALIGNMENT = 64


def quantized_loss(
    descriptors: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    bins: int,
    include_self: bool,
    start: int,
    stop: int,
) -> Tensor:
    """Compute the share of the queries in 1 − mAP_Q, for checked shapes: a float32 scalar."""
    if weights is not None:
        weights = weights.to(descriptors.device, torch.float32)
    kinds = (descriptors.device, descriptors.dtype, labels.dtype, weights is not None)
    kernels = _cached_kernels(*kinds, *descriptors.shape, bins, include_self, start, stop)
    with _device_of(descriptors):
        loss: Tensor = _QuantizedLoss.apply(descriptors, labels, weights, kernels)
    return loss


class _QuantizedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, descriptors: Tensor, labels: Tensor, weights: Tensor | None, kernels: "_Kernels"
    ) -> Tensor:
        if weights is not None:
            weights = _aligned(weights)
        # The first kernel writes into the memory of the host.
        count, on_gpu = 3 * kernels.prepare_programs, descriptors.is_cuda
        findings = torch.empty(count, dtype=torch.float32, pin_memory=on_gpu)
        buffers = kernels.prepare(descriptors, labels, weights, findings)
        event = torch.cuda.current_stream().record_event() if descriptors.is_cuda else None
        kernels.histograms(buffers)
        loss = kernels.precision(buffers, weights)
        if event is not None:  # the other kernels run while the host checks
            event.synchronize()
        _check(findings.numpy())
        ctx.save_for_backward(buffers.parts, buffers.kinds, buffers.slopes)
        ctx.kernels = kernels
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.kernels.gradient(*ctx.saved_tensors, gradient), None, None, None


def _check(found: NDArray[np.float32]) -> None:
    """Raise an `InputError` for what `prepare_kernel` found: [3, programs], flat."""
    third = len(found) // 3
    # Both kinds of errors in one call; an invalid weight is noted as 1.
    if found[: 2 * third].max() <= UNIT_TOLERANCE and found[2 * third :].any():
        return
    worst, invalid, counted = found.reshape(3, -1)
    check_lengths(float(worst.max()))
    check_weights(not invalid.any())
    check_positives(float(counted.sum()))


class _Buffers(NamedTuple):
    """The tensors that kernels pass to each other; `kernels.py` describes their layout."""

    parts: Tensor
    kinds: Tensor
    table: Tensor
    slopes: Tensor


class _Launch:
    """Starts a kernel many times with the same constants and integers, in little time on the host.

    Triton inspects all arguments at every launch to find the compiled kernel that fits them, which
    takes longer than many kernels here. This keeps the kernel of the first launch. Later launches
    must pass tensors of the same types that start at multiples of 16 bytes, and the same integers
    except for those of `do_not_specialize`.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants
        options = ("num_warps", "num_stages")
        self._values = [value for name, value in constants.items() if name not in options]
        self._compiled: Any = None

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Start this many programs; the constants follow the arguments."""
        if self._compiled is None:  # always with Triton's interpreter, which compiles nothing
            self._compiled = self._kernel[(programs,)](*arguments, **self._constants)
        else:
            self._compiled[(programs, 1, 1)](*arguments, *self._values)


class _Kernels:
    """The kernels for batches of one shape, and the buffers that they need."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        label_dtype: torch.dtype,
        weighted: bool,
        size: int,
        dim: int,
        bins: int,
        include_self: bool,
        start: int,
        stop: int,
    ) -> None:
        self.device, self.dtype, self.size, self.dim = device, dtype, size, dim
        self.bins, self.start, self.stop = bins, start, stop
        self.exact = dtype == torch.float32
        self.padded = _round_up(dim, ALIGNMENT)
        self.prepare_programs = triton.cdiv(size, PREPARE_ROWS)
        self.slope_count = 2 * (bins + 1) * size
        prepare = {
            "SPLIT": self.exact,
            "WEIGHTED": weighted,
            "INCLUDE_SELF": include_self,
            "BINS": bins,
            "SLOTS": triton.next_power_of_2(2 * bins),
            "ROWS": PREPARE_ROWS,
            "BLOCK": PREPARE_BLOCK,
        }
        self._prepare = _Launch(prepare_kernel, prepare)
        shared = {"BINS": bins, "INCLUDE_SELF": include_self, "EXACT": self.exact}
        small = self.exact and size <= SMALL_BATCH
        tile = SMALL_TILING if small else HISTOGRAM_TILING[self.exact]
        rows, columns, group = tile["ROWS"], tile["COLUMNS"], tile["GROUP"]
        squares = triton.cdiv(size, group * columns)
        self.histogram_programs = squares**2 * group**2 * columns // rows
        self._histogram = _Launch(histogram_kernel, shared | tile)
        precision = {
            "WEIGHTED": weighted,
            "BINS": bins,
            "SLOTS": triton.next_power_of_2(bins),
            "ROWS": PRECISION_ROWS,
            "BLOCK": PREPARE_BLOCK,
        }
        self._precision = _Launch(precision_kernel, precision)
        tile = SMALL_TILING if small else WEIGHT_TILING[self.exact]
        self.tile_rows, self.tile_columns = tile["ROWS"], tile["COLUMNS"]
        self._weight = _Launch(weight_kernel, shared | tile)
        # Strips consist of whole tiles.
        self.strip_columns = _round_up(min(size, STRIP_COLUMNS), self.tile_columns)
        self.strip_rows = _round_up(min(size, STRIP_ROWS), self.tile_rows)

    def prepare(
        self, descriptors: Tensor, labels: Tensor, weights: Tensor | None, found: Tensor
    ) -> _Buffers:
        """Allocate the buffers of a batch, and fill its parts and kinds; checks go to `found`."""
        size, dim, queries = self.size, self.dim, self.stop - self.start
        if self.exact:
            parts = self._empty(torch.float16, 2, size, self.padded)
        elif self.padded > dim:
            parts = descriptors = torch.nn.functional.pad(descriptors, (0, self.padded - dim))
            dim = self.padded
        else:
            parts = _aligned(descriptors)
        kinds = self._empty(torch.int32, 2, size)
        # Each with more numbers at the end, for sums.
        table = self._empty(torch.int64, queries * 2 * self.bins + 2)
        slopes = self._empty(torch.float32, self.slope_count + 2 + self.prepare_programs)
        if queries < size:  # images that are not queries have no slopes
            slopes.zero_()
        buffers = _Buffers(parts, kinds, table, slopes)
        given = (_aligned(descriptors) if self.exact else parts, _aligned(labels), weights)
        numbers = (size, dim, self.padded, self.start, queries)
        self._prepare(self.prepare_programs, *given, *buffers, found, *numbers)
        return buffers

    def histograms(self, buffers: _Buffers) -> None:
        """Compute the histograms in the table."""
        tensors = (buffers.parts, buffers.kinds, buffers.table)
        numbers = (self.size, self.padded, self.start, self.stop)
        self._histogram(self.histogram_programs, *tensors, *numbers)

    def precision(self, buffers: _Buffers, weights: Tensor | None) -> Tensor:
        """Compute the loss, a scalar, and the slopes from the table."""
        loss = self._empty(torch.float32)
        queries = self.stop - self.start
        tensors = (buffers.table, buffers.kinds, weights, buffers.slopes, loss)
        numbers = (self.size, self.start, queries, self.prepare_programs)
        self._precision(triton.cdiv(queries, PRECISION_ROWS), *tensors, *numbers)
        return loss

    def gradient(self, parts: Tensor, kinds: Tensor, slopes: Tensor, gradient: Tensor) -> Tensor:
        """Compute (G + Gᵀ) D times the gradient of the loss, a scalar: [B, C]."""
        size, dim, tile_rows, tile_columns = self.size, self.dim, self.tile_rows, self.tile_columns
        high = parts[0] if self.exact else parts
        strip = self._empty(high.dtype, self.strip_rows, self.strip_columns)
        given = (
            parts,
            kinds,
            slopes,
            _aligned(gradient),
            strip,
            size,
            self.padded,
            self.strip_columns,
        )
        restore = slopes[self.slope_count + 1]
        result: Tensor | None = None
        with _no_autocast():
            for rows in blocks(0, size, self.strip_rows):
                total: Tensor | None = None
                for columns in blocks(0, size, self.strip_columns):
                    if not (self._has_query(rows) or self._has_query(columns)):
                        continue
                    row_tiles = triton.cdiv(rows.stop - rows.start, tile_rows)
                    column_tiles = triton.cdiv(columns.stop - columns.start, tile_columns)
                    corner = (rows.start // tile_rows, columns.start // tile_columns)
                    tiles = (*corner, row_tiles, column_tiles)
                    self._weight(row_tiles * column_tiles, *given, *tiles)
                    weights = _part(strip, rows.stop - rows.start, columns.stop - columns.start)
                    total = _product(weights, high[columns], total)
                if total is not None and total.shape == (size, dim) and self.exact:
                    return total.mul_(restore)  # one strip covers everything
                if result is None:
                    result = self._empty(self.dtype, size, dim)
                if total is None:
                    result[rows] = 0
                else:
                    torch.mul(_part(total, len(total), dim), restore, out=result[rows])
        assert result is not None
        return result

    def _has_query(self, images: slice) -> bool:
        return bool(self.start < images.stop and images.start < self.stop)

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


_cached_kernels = lru_cache(maxsize=64)(_Kernels)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _aligned(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that starts at a multiple of 16 bytes, as `_Launch` expects."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _part(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return the first rows and columns; the matrix itself if that is all of it."""
    return matrix if matrix.shape == (rows, columns) else matrix[:rows, :columns]


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which kernels start on the tensor's GPU."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def _no_autocast() -> AbstractContextManager[object]:
    if torch.is_autocast_enabled("cuda"):
        return torch.autocast("cuda", enabled=False)
    return nullcontext()


def _product(left: Tensor, right: Tensor, add: Tensor | None) -> Tensor:
    """Compute left · right (+ add) in half precision, summed and returned in float32."""
    if not left.is_cuda:  # Triton's interpreter
        result = left.float() @ right.float()
        return result if add is None else result + add
    if add is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(add, left, right, out_dtype=torch.float32)
