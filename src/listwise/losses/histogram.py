"""Soft histograms of similarity scores, in memory linear in the batch.

Every loss of the paper's family needs two histograms per query: how many images, and how many
relevant images, fall into each of the M bins (Eq. 7). A score lies between two neighboring bin
centers, so it adds to at most two bins and costs O(1).

Scores are computed tile by tile and discarded; the backward pass computes them again. With the
descriptors D and G = dL/dS, the gradient is (G + Gᵀ) D. The score S_ij gives both G_ij and G_ji, so
each pair of images is scored once, not twice, in each pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, combinations_with_replacement, product
from typing import Any

import torch
from torch import Tensor

from listwise.losses.lists import Lists, accumulation_dtype, blocks, in_blocks

# The side of a tile of scores. A tile of 1024 × 1024 and its temporaries take about 30 MB, and the
# matrix product of such tiles already runs at full speed on CPUs and GPUs.
TILE = 1024


def list_histograms(lists: Lists, start: int, stop: int, bins: int, include_self: bool) -> Tensor:
    """Compute the soft histograms of the queries start to stop: of relevant, and of all images.

    Shapes: -> [2, Q, M].
    """
    if lists.within_batch:
        settings, rows = (bins, include_self, start, stop), (lists.descriptors, lists.labels)
        return _apply(_label_histograms, _label_histograms_backward, settings, *rows)
    dtype = accumulation_dtype(lists.descriptors.dtype)

    def histograms(block: slice) -> Tensor:
        rows = slice(start + block.start, start + block.stop)
        scores = products(lists.descriptors[rows].to(dtype), lists.references.to(dtype))
        return score_histograms(scores, lists.same(rows.start, rows.stop), bins).transpose(0, 1)

    return in_blocks(histograms, stop - start, len(lists.references)).transpose(0, 1)


def score_histograms(scores: Tensor, relevance: Tensor, bins: int) -> Tensor:
    """Compute the soft histograms of scores [Q, N] with relevance [Q, N] (bool): [2, Q, M]."""
    return _apply(_score_histograms, _score_histograms_backward, (bins,), scores, relevance)


def _apply(
    compute: Callable[..., Tensor],
    backpropagate: Callable[..., tuple[Tensor | None, ...]],
    settings: tuple[Any, ...],
    *tensors: Tensor,
) -> Tensor:
    """Compute histograms of tensors; another function computes the gradient of each tensor.

    torch.compile does not look into it: both functions choose tiles and precision themselves.
    """
    call: Callable[..., Tensor] = _Histograms.apply
    if torch.compiler.is_compiling():
        call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return call(compute, backpropagate, settings, *tensors)


class _Histograms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Any, backpropagate: Any, settings: Any, *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.backpropagate, ctx.settings = backpropagate, settings
        return compute(*tensors, *settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, None, *ctx.backpropagate(gradient, *ctx.saved_tensors, *ctx.settings)


def _label_histograms(
    descriptors: Tensor, labels: Tensor, bins: int, include_self: bool, start: int, stop: int
) -> Tensor:
    points = descriptors.to(accumulation_dtype(descriptors.dtype))
    # One table for the rows of a tile and one for its columns: both are written in the order of
    # memory.
    by_row = points.new_zeros(len(points), 2 * (bins + 1))
    by_column = points.new_zeros(2 * (bins + 1), len(points))
    for rows, columns in _tile_pairs(len(points), start, stop):
        position = _bin_position(products(points[rows], points[columns]), bins)
        cell, below = _cells(position, labels[rows, None] == labels[columns], bins)
        above = 1 - below
        if rows == columns and not include_self:
            above.fill_diagonal_(0)
            below.fill_diagonal_(0)
        by_row[rows].scatter_add_(1, cell, above)
        by_row[rows].scatter_add_(1, cell + 1, below)
        if rows != columns:
            by_column[:, columns].scatter_add_(0, cell, above)
            by_column[:, columns].scatter_add_(0, cell + 1, below)
    return _positive_and_all((by_row + by_column.T)[start:stop], bins)


def _label_histograms_backward(
    gradient: Tensor,
    descriptors: Tensor,
    labels: Tensor,
    bins: int,
    include_self: bool,
    start: int,
    stop: int,
) -> tuple[Tensor, None]:
    slopes = gradient.new_zeros(len(descriptors), 2 * (2 * bins - 1))
    slopes[start:stop] = _slopes(gradient)
    points = descriptors.to(gradient.dtype)
    slopes_by_column = slopes.T.contiguous()
    result = torch.zeros_like(points)
    for rows, columns in _tile_pairs(len(points), start, stop):
        position = _bin_position(products(points[rows], points[columns]), bins)
        slot = _slots(position, labels[rows, None] == labels[columns], bins)
        weight = slopes[rows].gather(1, slot) + slopes_by_column[:, columns].gather(0, slot)
        if rows == columns and not include_self:
            weight.fill_diagonal_(0)
        result[rows] += products(weight, points[columns].T)
        if rows != columns:
            result[columns] += products(weight.T, points[rows].T)
    return result.to(descriptors.dtype), None


def _score_histograms(scores: Tensor, relevance: Tensor, bins: int) -> Tensor:
    dtype = accumulation_dtype(scores.dtype)
    table = torch.zeros(len(scores), 2 * (bins + 1), dtype=dtype, device=scores.device)
    for rows, columns in _tiles(*scores.shape):
        position = _bin_position(scores[rows, columns].to(dtype, copy=True), bins)
        cell, below = _cells(position, relevance[rows, columns], bins)
        table[rows].scatter_add_(1, cell, 1 - below)
        table[rows].scatter_add_(1, cell + 1, below)
    return _positive_and_all(table, bins)


def _score_histograms_backward(
    gradient: Tensor, scores: Tensor, relevance: Tensor, bins: int
) -> tuple[Tensor, None]:
    slopes = _slopes(gradient)
    result = torch.empty_like(scores)
    for rows, columns in _tiles(*scores.shape):
        position = _bin_position(scores[rows, columns].to(gradient.dtype, copy=True), bins)
        slot = _slots(position, relevance[rows, columns], bins)
        result[rows, columns] = slopes[rows].gather(1, slot).to(scores.dtype)
    return result, None


def products(left: Tensor, right: Tensor) -> Tensor:
    """Compute left · rightᵀ in the precision of its arguments.

    Neither autocast nor PyTorch's settings for float32 products (TF32, bfloat16) change it.
    """
    device = left.device.type
    with torch.autocast(device, enabled=False), _full_float32(device):
        return left @ right.T


@contextmanager
def _full_float32(device: str) -> Iterator[None]:
    backends: Any = torch.backends
    # PyTorch before 2.9 has one setting for all backends.
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    backend = backends.cuda.matmul if device == "cuda" else backends.mkldnn.matmul
    before = backend.fp32_precision
    if before in ("none", "ieee"):
        yield
        return
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        # "none" inherits the more general setting; restore a value only if it differs from that.
        backend.fp32_precision = "none"
        if backend.fp32_precision != before:
            backend.fp32_precision = before


def _bin_position(scores: Tensor, bins: int) -> Tensor:
    """Where each score lies on the axis of bins: 0 at b_1 = 1, M − 1 at b_M = −1 (in place).

    A cosine similarity that rounding took past ±1 counts as ±1.
    """
    return scores.neg_().add_(1).mul_((bins - 1) / 2).clamp_(0, bins - 1)


def _cells(position: Tensor, relevance: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """The table cell of the bin above each score, and the share that goes to the next one.

    A table row holds M + 1 cells for the irrelevant images and M + 1 for the relevant ones; the
    last of each takes the empty share of a score at exactly −1.
    """
    cell = position.long()
    below = position - cell
    return cell.add_(relevance, alpha=bins + 1), below


def _positive_and_all(table: Tensor, bins: int) -> Tensor:
    irrelevant, relevant = table.view(len(table), 2, bins + 1)[..., :bins].unbind(1)
    return torch.stack((relevant, irrelevant + relevant))


def _slots(position: Tensor, relevance: Tensor, bins: int) -> Tensor:
    """Return the slot of each score in a row of `_slopes`: even on a bin center, odd between two.

    In float64 a score is on a center when only rounding parts them. In float32 it must be there
    exactly: so many scores share so few values that a margin would catch them by chance.
    """
    rounding = bins * torch.finfo(torch.float64).eps
    slot = (position + rounding).floor_().add_((position - rounding).ceil_()).long()
    return slot.add_(relevance, alpha=2 * bins - 1)


def _slopes(gradient: Tensor) -> Tensor:
    """Derivative of the loss by a score, for each slot the score may lie in.

    Between two bin centers a rising score moves mass from the lower bin to the higher one; past ±1
    a score counts as ±1, so the slope is zero. On a center the loss has a kink, and the slope is
    the mean of both sides. Shapes: the gradient by the histograms of the relevant and of all
    images [2, Q, M] -> [Q, 2(2M − 1)], slots for the irrelevant images, then for the relevant ones.
    """
    bins = gradient.shape[-1]
    relevant, every = gradient
    by_bin = torch.stack((every, every + relevant), dim=1)
    gaps = torch.nn.functional.pad(by_bin.diff() * (-(bins - 1) / 2), (1, 1))
    slots = gaps.new_empty(len(gaps), 2, 2 * bins - 1)
    slots[..., 0::2] = (gaps[..., :-1] + gaps[..., 1:]) / 2
    slots[..., 1::2] = gaps[..., 1:-1]
    return slots.flatten(1)


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    return product(blocks(0, rows, TILE), blocks(0, columns, TILE))


def _tile_pairs(size: int, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yield tiles that cover each unordered pair of images once, if one of the two is a query."""
    queries, others = blocks(start, stop, TILE), blocks(0, start, TILE) + blocks(stop, size, TILE)
    return chain(combinations_with_replacement(queries, 2), product(queries, others))
