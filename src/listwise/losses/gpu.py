"""The AP loss on a CUDA GPU, fused: scores live in registers and are read where they are made.

The work is that of `histogram.py` and, for the loss of the paper, of `precision.py`:

- *forward*: each tile of scores on or above the diagonal is made by the tensor cores and added to
  the histograms of its rows and of its columns before it leaves the registers. A small kernel
  turns the histograms of a query into its average precision and the slopes of the loss.
- *backward*: tiles of scores are made again, strip by strip; a strip of weights (G + Gᵀ), which
  takes some ten megabytes at any size of the batch, meets the descriptors in one product by cuBLAS.

**Precision.** Slopes jump at bin centers, so a score that is off by little can get quite another
slope. A float32 descriptor is therefore split into two float16 parts, high and low, and a score is
the sum of three exact products of parts: as good as float32, at a third of the speed of float16.
Half-precision descriptors take one product: that is the fast mode. The product of weights with
descriptors has no jumps and runs in half precision for both, summed in float32.

Results are the same from run to run: histograms are added up as whole numbers.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from listwise.losses.checks import refuse_lengths, refuse_no_positives, refuse_weights
from listwise.losses.histogram import blocks
from listwise.losses.kernels import (
    SHARE_UNIT,
    histogram_kernel,
    outcome_kernel,
    precision_kernel,
    prepare_kernel,
    verdict_kernel,
    weight_kernel,
)

# Weights in memory at a time.
STRIP_ROWS, STRIP_COLUMNS = 2048, 8192
# Entries of unit rows are small: this moves them and their low parts into float16's range.
DESCRIPTOR_SCALE = 1024.0
# Largest slope after scaling; up to four are added, and float16 ends at 65504.
SLOPE_PEAK = 8192.0
MAX_BINS = 128
PREPARE_ROWS, PREPARE_BLOCK = 8, 1024
PRECISION_ROWS = 32


@dataclass(frozen=True)
class Tiling:
    """Shape of a tile of scores, and how a GPU's multiprocessor works on it.

    `rows` divides `columns`; `depth` is how much of the descriptors is read at a time.
    """

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """Arguments of a launch."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "GROUP": self.group,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


# By whether scores are made of split descriptors.
HISTOGRAM_TILING = {
    True: Tiling(128, 128, 64, 8, 8, 3),
    False: Tiling(128, 128, 64, 8, 8, 4),
}
WEIGHT_TILING = {
    True: Tiling(128, 128, 64, 8, 8, 3),
    False: Tiling(128, 128, 64, 8, 8, 4),
}
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
    """The queries' share of 1 − mAP_Q of a batch whose shapes were checked: a scalar, float32.

    Args:
        descriptors: [B, C] unit rows.
        labels: [B] integers.
        weights: [B] weights of the queries; equal ones by default.
        bins: number M of bins.
        include_self: whether an image counts in its own list.
        start: first query.
        stop: end of the queries.
    """
    if weights is not None:
        weights = weights.detach().to(descriptors.device, torch.float32).contiguous()
    with _device_of(descriptors):
        loss: Tensor = _QuantizedLoss.apply(
            descriptors, labels.contiguous(), weights, bins, include_self, start, stop
        )
    return loss


class _QuantizedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        bins: int,
        include_self: bool,
        start: int,
        stop: int,
    ) -> Tensor:
        size = len(labels)
        parts, positives, verdict = _prepare(descriptors, labels, weights, include_self)
        found = _Later(verdict)
        table = _histograms(parts, bins, include_self, start, stop)
        slopes = _slopes_of_nobody(size, bins, start, stop, labels.device)
        programs = triton.cdiv(stop - start, PRECISION_ROWS)
        partial = verdict.new_empty(2, programs)
        loss, peak = verdict.new_empty(()), verdict.new_empty(())
        precision_kernel[(programs,)](
            table,
            positives,
            weights,
            slopes,
            partial,
            size,
            start,
            stop - start,
            WEIGHTED=weights is not None,
            BINS=bins,
            SLOTS=triton.next_power_of_2(bins),
            ROWS=PRECISION_ROWS,
        )
        outcome_kernel[(1,)](partial, verdict, loss, peak, programs, BLOCK=1024)
        worst, total, unsound = found.values()
        refuse_lengths(worst)
        refuse_weights(unsound == 0)
        refuse_no_positives(total)
        # Split descriptors are kept, whole ones are the argument itself.
        ctx.save_for_backward(parts.high, parts.low, parts.classes, slopes, peak)
        ctx.settings = parts.scale, descriptors.shape[1], descriptors.dtype, total
        ctx.case = bins, include_self, start, stop
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        high, low, classes, slopes, peak = ctx.saved_tensors
        scale, dim, dtype, total = ctx.settings
        parts = _Parts(high, low, classes, scale)
        result = _gradient(parts, slopes, peak, gradient / total, dim, dtype, *ctx.case)
        return result, None, None, None, None, None, None


def label_histograms(
    descriptors: Tensor, labels: Tensor, bins: int, include_self: bool, start: int, stop: int
) -> Tensor:
    """Histograms of the relevant and of all images of each query: [2, Q, M], float32."""
    with _device_of(descriptors):
        labels = labels.contiguous()
        parts = _prepare(descriptors, labels, None, include_self)[0]
        table = _histograms(parts, bins, include_self, start, stop)
    return (
        table.transpose(0, 1)
        .to(torch.float32, memory_format=torch.contiguous_format)
        .div_(SHARE_UNIT.value)
    )


def label_histograms_backward(
    slopes: Tensor,
    descriptors: Tensor,
    labels: Tensor,
    include_self: bool,
    start: int,
    stop: int,
) -> Tensor:
    """Gradient by the descriptors [B, C].

    Args:
        slopes: [Q, 2, M + 1] of each query, as `histogram.gap_slopes` makes them.
        descriptors: [B, C].
        labels: [B].
        include_self: whether an image counts in its own list.
        start: first query.
        stop: end of the queries.
    """
    bins = slopes.shape[-1] - 1
    with _device_of(descriptors):
        labels = labels.contiguous()
        parts = _prepare(descriptors, labels, None, include_self)[0]
        every = _slopes_of_nobody(len(labels), bins, start, stop, labels.device)
        every[:, start:stop] = slopes.flatten(1).T
        return _gradient(
            parts,
            every,
            slopes.abs().amax(),
            None,
            descriptors.shape[1],
            descriptors.dtype,
            bins,
            include_self,
            start,
            stop,
        )


@dataclass(frozen=True)
class _Parts:
    """Descriptors times a scale, as one or two matrices of half precision, and their classes."""

    high: Tensor
    low: Tensor | None
    classes: Tensor
    scale: float

    def launch(self, tilings: dict[bool, Tiling]) -> dict[str, int]:
        """What kernels must know at compile time."""
        exact = self.low is not None
        return {"EXACT": exact, **tilings[exact].options()}


def _prepare(
    descriptors: Tensor, labels: Tensor, weights: Tensor | None, include_self: bool
) -> tuple[_Parts, Tensor, Tensor]:
    """The descriptors' parts, the number of positives [B] and what `verdict_kernel` finds [3]."""
    descriptors = descriptors.detach().contiguous()
    size, dim = descriptors.shape
    padded = -(-dim // ALIGNMENT) * ALIGNMENT
    classes, positives = torch.empty(2, size, dtype=torch.int32, device=descriptors.device)
    if descriptors.dtype == torch.float32:
        halves = torch.empty(2, size, padded, dtype=torch.float16, device=descriptors.device)
        parts = _Parts(halves[0], halves[1], classes, DESCRIPTOR_SCALE)
    else:
        if padded > dim:
            descriptors = torch.nn.functional.pad(descriptors, (0, padded - dim))
        dim = padded
        parts = _Parts(descriptors, None, classes, 1.0)
    programs = triton.cdiv(size, PREPARE_ROWS)
    found = torch.empty(3 * (programs + 1), dtype=torch.float32, device=descriptors.device)
    partial, verdict = found[:-3], found[-3:]
    prepare_kernel[(programs,)](
        descriptors,
        labels,
        weights,
        parts.high,
        parts.low,
        classes,
        positives,
        partial,
        size,
        dim,
        padded,
        parts.scale,
        SPLIT=parts.low is not None,
        WEIGHTED=weights is not None,
        INCLUDE_SELF=include_self,
        ROWS=PREPARE_ROWS,
        BLOCK=PREPARE_BLOCK,
    )
    verdict_kernel[(1,)](partial, verdict, programs, BLOCK=1024)
    return parts, positives, verdict


def _histograms(parts: _Parts, bins: int, include_self: bool, start: int, stop: int) -> Tensor:
    """Histograms of the relevant and of all images: [Q, 2, M] whole multiples of 1/SHARE_UNIT."""
    size, dim = parts.high.shape
    options = parts.launch(HISTOGRAM_TILING)
    table = torch.zeros(stop - start, 2, bins, dtype=torch.int64, device=parts.high.device)
    squares = triton.cdiv(size, options["GROUP"] * options["COLUMNS"])
    tiles = options["GROUP"] ** 2 * options["COLUMNS"] // options["ROWS"]
    histogram_kernel[(squares * squares * tiles,)](
        parts.high,
        parts.low,
        parts.classes,
        table,
        size,
        dim,
        start,
        stop,
        1 / parts.scale**2,
        BINS=bins,
        INCLUDE_SELF=include_self,
        **options,
    )
    return table


def _slopes_of_nobody(size: int, bins: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Room for the slopes of all images, zero for those that do not ask: [2(M + 1), B]."""
    make = torch.empty if stop - start == size else torch.zeros
    return make(2 * (bins + 1), size, dtype=torch.float32, device=device)


def _gradient(
    parts: _Parts,
    slopes: Tensor,
    peak: Tensor,
    factor: Tensor | None,
    dim: int,
    dtype: torch.dtype,
    bins: int,
    include_self: bool,
    start: int,
    stop: int,
) -> Tensor:
    """(G + Gᵀ) D times a factor, from the slopes of all images [2(M + 1), B]: [B, dim]."""
    size, padded = parts.high.shape
    options = parts.launch(WEIGHT_TILING)
    restore = peak.clamp(min=1e-30) / (SLOPE_PEAK * parts.scale)
    if factor is not None:
        restore = restore * factor
    result = torch.empty(size, dim, dtype=dtype, device=slopes.device)
    stride = -(-min(size, STRIP_COLUMNS) // ALIGNMENT) * ALIGNMENT
    strip = parts.high.new_empty(min(size, STRIP_ROWS), stride)
    for rows in blocks(0, size, STRIP_ROWS):
        asks = start < rows.stop and rows.start < stop
        total: Tensor | None = None
        for columns in blocks(0, size, STRIP_COLUMNS):
            if not asks and not (start < columns.stop and columns.start < stop):
                continue
            height, width = rows.stop - rows.start, columns.stop - columns.start
            tiles = triton.cdiv(height, options["ROWS"]) * triton.cdiv(width, options["COLUMNS"])
            weight_kernel[(tiles,)](
                parts.high,
                parts.low,
                parts.classes,
                slopes,
                peak,
                strip,
                size,
                padded,
                rows.start,
                rows.stop,
                columns.start,
                columns.stop,
                stride,
                1 / parts.scale**2,
                SLOPE_PEAK,
                BINS=bins,
                INCLUDE_SELF=include_self,
                **options,
            )
            total = _product(strip[:height, :width], parts.high[columns], total)
        if total is None:
            result[rows] = 0
        else:
            torch.mul(total[:, :dim], restore, out=result[rows])
    return result


class _Later:
    """A few numbers on their way from the GPU, while it goes on working."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.event = numbers, None
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()

    def values(self) -> list[float]:
        """The numbers, once they are here."""
        if self.event is not None:
            self.event.synchronize()
        values: list[float] = self.numbers.tolist()
        return values


def _device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the one that kernels start on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _product(left: Tensor, right: Tensor, add: Tensor | None = None) -> Tensor:
    """Product left · right (+ add) of half precision, summed and returned in float32."""
    if not left.is_cuda:  # Triton's interpreter
        result = left.float() @ right.float()
        return result if add is None else result + add
    with torch.autocast("cuda", enabled=False):
        if add is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(add, left, right, out_dtype=torch.float32)
