"""Soft histograms on a CUDA GPU: matrix products by cuBLAS, everything else in two kernels.

The work is that of `histogram.py`, cut so that no step waits for memory: a tile of scores stays
in the level-2 cache between the matrix product that makes it and the kernel that reads it.

**Precision.** Slopes jump at bin centers, so a score that is off by little can get quite another
slope. Scores of float32 descriptors are therefore products in float32; those of half-precision
descriptors are exact products at the speed of the tensor cores: that is the fast mode. The product
of slopes with descriptors has no jumps and runs in float16, which is exact to 2⁻¹¹, for both.
"""

import torch
import triton
from torch import Tensor

from listwise.losses.histogram import blocks, products
from listwise.losses.kernels import histogram_kernel, weight_kernel

TILE_ROWS, TILE_COLUMNS = 2048, 4096
# Entries of unit rows are small: this moves them into float16's range.
DESCRIPTOR_SCALE = 64.0
# Largest slope after scaling; two are added, and float16 ends at 65504.
SLOPE_PEAK = 8192.0
MAX_BINS = 128


def suits(descriptors: Tensor, bins: int) -> bool:
    """Whether this path takes the case: not float64, and not very many bins."""
    return descriptors.dtype != torch.float64 and bins <= MAX_BINS


def label_histograms(
    descriptors: Tensor, labels: Tensor, bins: int, include_self: bool, start: int, stop: int
) -> Tensor:
    """Histograms of the relevant and of all images of each query: [2, Q, M], float32."""
    parts = _Parts(descriptors)
    labels = labels.contiguous()  # kernels read memory in order
    size = len(descriptors)
    table = torch.zeros(2, stop - start, bins, dtype=torch.float32, device=descriptors.device)
    for rows in blocks(start, stop, TILE_ROWS):
        for columns in blocks(0, size, TILE_COLUMNS):
            scores = parts.scores(rows, columns)
            histogram_kernel[(len(scores),)](
                scores,
                labels,
                table[0],
                table[1],
                rows.start,
                start,
                columns.start,
                scores.shape[1],
                parts.unit,
                BINS=bins,
                SLOTS=triton.next_power_of_2(bins),
                BLOCK=64,
                INCLUDE_SELF=include_self,
                num_warps=1,
            )
    return table


def label_histograms_backward(
    slopes: Tensor,
    descriptors: Tensor,
    labels: Tensor,
    bins: int,
    include_self: bool,
    start: int,
    stop: int,
) -> Tensor:
    """Gradient by the descriptors [B, C].

    Args:
        slopes: [B, 2(2M − 1)] of each query, as `histogram.py` makes them; zero for other rows.
        descriptors: [B, C].
        labels: [B].
        bins: number M of bins.
        include_self: whether an image counts in its own list.
        start: first query.
        stop: end of the queries.
    """
    parts = _Parts(descriptors)
    labels = labels.contiguous()  # kernels read memory in order
    size, dim = descriptors.shape
    by_column = slopes.T.contiguous()
    peak = slopes.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    scale = SLOPE_PEAK / peak
    result = torch.empty(size, dim, dtype=torch.float32, device=descriptors.device)
    for rows in blocks(0, size, TILE_ROWS):
        asks = start < rows.stop and rows.start < stop
        total: Tensor | None = None
        for columns in blocks(0, size, TILE_COLUMNS):
            if not asks and not (start < columns.stop and columns.start < stop):
                continue
            scores = parts.scores(rows, columns)
            weights = torch.empty_like(scores, dtype=torch.float16)
            grid = (scores.shape[0], triton.cdiv(scores.shape[1], 1024))
            weight_kernel[grid](
                scores,
                labels,
                slopes,
                by_column,
                scale,
                weights,
                rows.start,
                columns.start,
                scores.shape[1],
                size,
                parts.unit,
                BINS=bins,
                BLOCK=1024,
                INCLUDE_SELF=include_self,
            )
            total = _product(weights, parts.halves[columns], total)
        if total is None:
            result[rows] = 0
        else:
            torch.mul(total, peak / (SLOPE_PEAK * DESCRIPTOR_SCALE), out=result[rows])
    return result.to(descriptors.dtype)


class _Parts:
    """Descriptors, and their halves times DESCRIPTOR_SCALE."""

    def __init__(self, descriptors: Tensor) -> None:
        self.exact = descriptors if descriptors.dtype == torch.float32 else None
        self.halves = (descriptors.float() * DESCRIPTOR_SCALE).half()
        # What a score comes multiplied with.
        self.unit = 1.0 if self.exact is not None else 1 / DESCRIPTOR_SCALE**2

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """Scores divided by `unit`: float32 [rows, columns]."""
        if self.exact is None:
            return _product(self.halves[rows], self.halves[columns].T)
        return products(self.exact[rows], self.exact[columns])


def _product(left: Tensor, right: Tensor, add: Tensor | None = None) -> Tensor:
    """Product left · right (+ add) of halves, summed and returned in float32."""
    if not left.is_cuda:  # Triton's interpreter
        result = left.float() @ right.float()
        return result if add is None else result + add
    with torch.autocast("cuda", enabled=False):
        if add is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(add, left, right, out_dtype=torch.float32)
