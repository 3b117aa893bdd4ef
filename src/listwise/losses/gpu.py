"""The AP loss on a CUDA GPU, fused: scores live in registers and are read where they are made.

The work is that of `histogram.py` and, for the loss of the paper, of `precision.py`:

- *forward*: each tile of scores on or above the diagonal is made by the tensor cores and added to
  the histograms of its rows and of its columns before it leaves the registers. A small kernel
  turns the histograms of a query into its average precision and the slopes of the loss.
- *backward*: tiles of scores are made again, strip by strip; a strip of weights (G + Gᵀ), which
  takes some thirty megabytes at any size of the batch, meets the descriptors in one product by
  cuBLAS.

**Precision.** Slopes jump at bin centers, so a score that is off by little can get quite another
slope. A float32 descriptor is therefore split into two float16 parts, high and low, and a score is
the sum of three exact products of parts: as good as float32, at a third of the speed of float16.
Half-precision descriptors take one product: that is the fast mode. The product of weights with
descriptors has no jumps and runs in half precision for both, summed in float32.

Results are the same from run to run: histograms and losses are added up as whole numbers.

**Host.** A step is six launches up to 4096 images: three kernels forward; the weights, the product
and its scaling backward. What they need beside tensors is worked out once for a shape (`_Kernels`).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from listwise.losses.checks import refuse_lengths, refuse_no_positives, refuse_weights
from listwise.losses.kernels import (
    SHARE_UNIT,
    histogram_kernel,
    precision_kernel,
    prepare_kernel,
    weight_kernel,
)
from listwise.losses.launches import Launch, mailbox
from listwise.losses.tiles import blocks

# Weights in memory at a time, and the longest row of them.
STRIP_ROWS, STRIP_COLUMNS = 2048, 8192
MAX_BINS = 128
PREPARE_ROWS, PREPARE_BLOCK = 8, 1024
PRECISION_ROWS = 32


@dataclass(frozen=True)
class Tiling:
    """Shape of a tile of scores, and how a GPU's multiprocessor works on it.

    `depth` is how much of the descriptors is read at a time; histograms need `rows` that divide
    `columns`.
    """

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        """What a kernel must know at compile time."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "GROUP": self.group,
        }

    def options(self) -> dict[str, int]:
        """What Triton must know."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# By whether scores are made of split descriptors.
HISTOGRAM_TILING = {True: Tiling(128, 128, 64, 8, 8, 3), False: Tiling(64, 128, 64, 8, 4, 3)}
WEIGHT_TILING = {True: Tiling(128, 64, 64, 8, 4, 2), False: Tiling(128, 64, 64, 8, 4, 3)}
# Descriptors are filled up with zeros to a multiple of this, which every depth divides.
ALIGNMENT = 64


def suits(descriptors: Tensor, bins: int) -> bool:
    """Whether this path takes the case: not float64, and not very many bins."""
    return descriptors.dtype != torch.float64 and bins <= MAX_BINS


def quantized_loss(
    descriptors: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    bins: int,
    include_self: bool,
    start: int,
    stop: int,
) -> Tensor:
    """The queries' share of 1 − mAP_Q of a batch whose shapes were checked: a scalar, float32."""
    if weights is not None:
        weights = weights.to(descriptors.device, torch.float32)
    kernels = _kernels_for(
        descriptors, labels, weights is not None, bins, include_self, start, stop
    )
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
        box = mailbox(descriptors.device)
        room = kernels.prepare(descriptors, labels, weights, box.room(3 * kernels.prepare_programs))
        box.sent()
        kernels.histograms(room)
        # The kernels above go on while the host looks at what the first one found.
        worst, unsound, counted = box.read(3 * kernels.prepare_programs).reshape(3, -1)
        refuse_lengths(float(worst.max()))
        refuse_weights(not unsound.any())
        total = float(counted.sum(dtype="float64"))
        refuse_no_positives(total)
        loss = kernels.precision(room, weights, total)
        ctx.save_for_backward(room.parts, room.kinds, room.slopes)
        ctx.kernels = kernels
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.kernels.gradient(*ctx.saved_tensors, gradient), None, None, None


def label_histograms(
    descriptors: Tensor, labels: Tensor, bins: int, include_self: bool, start: int, stop: int
) -> Tensor:
    """Histograms of the relevant and of all images of each query: [2, Q, M], float32."""
    kernels = _kernels_for(descriptors, labels, False, bins, include_self, start, stop)
    with _device_of(descriptors):
        room = kernels.prepare(descriptors, labels, None)
        kernels.histograms(room)
    return (
        room.table[:-2]
        .view(stop - start, 2, bins)
        .transpose(0, 1)
        .to(torch.float32, memory_format=torch.contiguous_format)
        .div_(SHARE_UNIT.value)
    )


def label_histograms_backward(
    slopes: Tensor, descriptors: Tensor, labels: Tensor, include_self: bool, start: int, stop: int
) -> Tensor:
    """Gradient by the descriptors [B, C], from the slopes [Q, 2, M + 1] of `gap_slopes`."""
    bins = slopes.shape[-1] - 1
    kernels = _kernels_for(descriptors, labels, False, bins, include_self, start, stop)
    with _device_of(descriptors):
        room = kernels.prepare(descriptors, labels, None)
        room.slopes[:-2].view(-1, len(labels))[:, start:stop] = slopes.flatten(1).T
        room.slopes[-2] = slopes.abs().amax()
        return kernels.gradient(room.parts, room.kinds, room.slopes, slopes.new_ones(()))


class _Room(NamedTuple):
    """What kernels hand on to each other, laid out as `kernels.py` says."""

    parts: Tensor
    kinds: Tensor
    table: Tensor
    slopes: Tensor


class _Kernels:
    """The kernels for batches of a certain shape, and the room that they need."""

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
        self._prepare = Launch(
            prepare_kernel,
            {},
            {
                "SPLIT": self.exact,
                "WEIGHTED": weighted,
                "INCLUDE_SELF": include_self,
                "BINS": bins,
                "SLOTS": triton.next_power_of_2(2 * bins),
                "ROWS": PREPARE_ROWS,
                "BLOCK": PREPARE_BLOCK,
            },
        )
        shared = {"BINS": bins, "INCLUDE_SELF": include_self, "EXACT": self.exact}
        tiling = HISTOGRAM_TILING[self.exact]
        squares = triton.cdiv(size, tiling.group * tiling.columns)
        self.histogram_programs = squares**2 * tiling.group**2 * tiling.columns // tiling.rows
        self._histogram = Launch(histogram_kernel, tiling.options(), shared | tiling.constants())
        self._precision = Launch(
            precision_kernel,
            {},
            {
                "WEIGHTED": weighted,
                "BINS": bins,
                "SLOTS": triton.next_power_of_2(bins),
                "ROWS": PRECISION_ROWS,
            },
        )
        self.tile = tiling = WEIGHT_TILING[self.exact]
        self._weight = Launch(weight_kernel, tiling.options(), shared | tiling.constants())
        # In whole tiles.
        self.strip_columns = _round_up(min(size, STRIP_COLUMNS), tiling.columns)
        self.strip_rows = _round_up(min(size, STRIP_ROWS), tiling.rows)

    def prepare(
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        found: Tensor | None = None,
    ) -> _Room:
        """Room for a batch, its parts and its kinds; what is found on the way goes to `found`."""
        size, dim, queries = self.size, self.dim, self.stop - self.start
        if self.exact:
            parts = self._empty(torch.float16, 2, size, self.padded)
        elif self.padded > dim:
            parts = descriptors = torch.nn.functional.pad(descriptors, (0, self.padded - dim))
            dim = self.padded
        else:
            parts = _aligned(descriptors)
        kinds = self._empty(torch.int32, 2, size)
        # Behind the tables, two sums each.
        table = self._empty(torch.int64, queries * 2 * self.bins + 2)
        slopes = self._empty(torch.float32, 2 * (self.bins + 1) * size + 2)
        if queries < size:  # the others have no slopes
            slopes.zero_()
        if found is None:
            found = self._empty(torch.float32, 3 * self.prepare_programs)
        room = _Room(parts, kinds, table, slopes)
        given = (_aligned(descriptors) if self.exact else parts, _aligned(labels), weights)
        numbers = (size, dim, self.padded, self.start, queries)
        self._prepare(self.prepare_programs, *given, *room, found, *numbers)
        return room

    def histograms(self, room: _Room) -> None:
        """Fill the table."""
        numbers = (self.size, self.padded, self.start, self.stop)
        self._histogram(self.histogram_programs, room.parts, room.kinds, room.table, *numbers)

    def precision(self, room: _Room, weights: Tensor | None, total: float) -> Tensor:
        """The loss, a scalar, and the slopes, from the table and the weight of all queries."""
        loss = self._empty(torch.float32)
        queries = self.stop - self.start
        tensors = (room.table, room.kinds, weights, room.slopes, loss)
        programs = triton.cdiv(queries, PRECISION_ROWS)
        self._precision(programs, *tensors, self.size, self.start, queries, total)
        return loss

    def gradient(self, parts: Tensor, kinds: Tensor, slopes: Tensor, gradient: Tensor) -> Tensor:
        """(G + Gᵀ) D times the gradient by the loss, a scalar: [B, C]."""
        size, dim, tile = self.size, self.dim, self.tile
        high = parts[0] if self.exact else parts
        strip = self._empty(high.dtype, self.strip_rows, self.strip_columns)
        given = (parts, kinds, slopes, gradient, strip, size, self.padded, self.strip_columns)
        restore = slopes[-1]
        result: Tensor | None = None
        with _no_autocast():
            for rows in blocks(0, size, self.strip_rows):
                total: Tensor | None = None
                for columns in blocks(0, size, self.strip_columns):
                    if not (self._asks(rows) or self._asks(columns)):
                        continue
                    row_tiles = triton.cdiv(rows.stop - rows.start, tile.rows)
                    column_tiles = triton.cdiv(columns.stop - columns.start, tile.columns)
                    corner = (rows.start // tile.rows, columns.start // tile.columns)
                    self._weight(row_tiles * column_tiles, *given, *corner, row_tiles, column_tiles)
                    weights = _part(strip, rows.stop - rows.start, columns.stop - columns.start)
                    total = _product(weights, high[columns], total)
                if total is not None and total.shape == (size, dim) and self.exact:
                    return total.mul_(restore)  # all there is
                if result is None:
                    result = self._empty(self.dtype, size, dim)
                if total is None:
                    result[rows] = 0
                else:
                    torch.mul(_part(total, len(total), dim), restore, out=result[rows])
        assert result is not None
        return result

    def _asks(self, images: slice) -> bool:
        return bool(self.start < images.stop and images.start < self.stop)

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


_cached_kernels = lru_cache(maxsize=64)(_Kernels)


def _kernels_for(
    descriptors: Tensor,
    labels: Tensor,
    weighted: bool,
    bins: int,
    include_self: bool,
    start: int,
    stop: int,
) -> _Kernels:
    kinds = (descriptors.device, descriptors.dtype, labels.dtype)
    return _cached_kernels(*kinds, weighted, *descriptors.shape, bins, include_self, start, stop)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that lies side by side from a multiple of 16 bytes on."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _part(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The first rows and columns; without work where that is all."""
    return matrix if matrix.shape == (rows, columns) else matrix[:rows, :columns]


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the one that kernels start on."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def _no_autocast() -> AbstractContextManager[object]:
    if torch.is_autocast_enabled("cuda"):
        return torch.autocast("cuda", enabled=False)
    return nullcontext()


def _product(left: Tensor, right: Tensor, add: Tensor | None) -> Tensor:
    """Product left · right (+ add) of half precision, summed and returned in float32."""
    if not left.is_cuda:  # Triton's interpreter
        result = left.float() @ right.float()
        return result if add is None else result + add
    if add is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(add, left, right, out_dtype=torch.float32)
