"""Soft histograms of similarity scores, in memory linear in the batch.

Every loss of the paper's family needs two histograms per query: how many images, and how many
relevant images, fall into each of the M bins (Eq. 7). A score lies between two neighboring bin
centers, so it adds to at most two bins and costs O(1).

Scores are computed tile by tile and discarded; the backward pass computes them again. With the
descriptors D and G = dL/dS, the gradient is (G + Gᵀ) D. The score S_ij gives both G_ij and G_ji, so
each pair of images is scored once, not twice, in each pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from listwise.imports import call_without_compiler
from listwise.losses.checks import check_forward_mode
from listwise.losses.tiles import accumulation_dtype, blocks
from listwise.optional import runs_triton

# The side of a tile of scores. A tile of 1024 × 1024 and its temporaries take about 30 MB, and the
# matrix product of such tiles already runs at full speed on CPUs and GPUs.
TILE = 1024


def label_histograms(
    descriptors: Tensor,
    labels: Tensor,
    bins: int,
    include_self: bool = False,
    queries: tuple[int, int] | None = None,
) -> Tensor:
    """Compute the soft histograms of every query: of its relevant images, and of all images.

    `queries` are the rows (start, stop) that are queries; all rows by default.
    Shapes: descriptors [B, C] unit rows, labels [B] -> [2, Q, M].
    """
    check_forward_mode(descriptors)
    start, stop = queries or (0, len(descriptors))
    result: Tensor = call_without_compiler(
        _label_histograms, descriptors, labels, bins, include_self, start, stop
    )
    return result


def reference_histograms(
    queries: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor, bins: int
) -> Tensor:
    """Compute the soft histograms of queries over references: the relevant ones, and all.

    Shapes: queries [Q, C] and references [N, C] unit rows, labels [Q] and [N] -> [2, Q, M].
    """
    check_forward_mode(queries)
    check_forward_mode(references)
    result: Tensor = call_without_compiler(
        _reference_histograms, queries, labels, references, reference_labels, bins
    )
    return result


def score_histograms(scores: Tensor, relevance: Tensor, bins: int) -> Tensor:
    """Compute the soft histograms of scores [Q, N] with relevance [Q, N] (bool): [2, Q, M]."""
    check_forward_mode(scores)
    result: Tensor = call_without_compiler(_score_histograms, scores, relevance, bins)
    return result


# torch.compile does not look into these operators: they get real tensors, and choose tiles and
# precision themselves.


@torch.library.custom_op("listwise::label_histograms", mutates_args=())
def _label_histograms(
    descriptors: Tensor, labels: Tensor, bins: int, include_self: bool, start: int, stop: int
) -> Tensor:
    if on_gpu(descriptors, bins):
        from listwise.losses import gpu

        return gpu.label_histograms(descriptors, labels, bins, include_self, start, stop)
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
        if _inside(rows, start, stop):
            by_row[rows].scatter_add_(1, cell, above)
            by_row[rows].scatter_add_(1, cell + 1, below)
        if rows != columns and _inside(columns, start, stop):
            by_column[:, columns].scatter_add_(0, cell, above)
            by_column[:, columns].scatter_add_(0, cell + 1, below)
    return _positive_and_all((by_row + by_column.T)[start:stop], bins)


@_label_histograms.register_fake
def _(
    descriptors: Tensor, labels: Tensor, bins: int, include_self: bool, start: int, stop: int
) -> Tensor:
    dtype = accumulation_dtype(descriptors.dtype)
    return descriptors.new_empty((2, stop - start, bins), dtype=dtype)


@torch.library.custom_op("listwise::label_histograms_backward", mutates_args=())
def _label_histograms_backward(
    gradient: Tensor, descriptors: Tensor, labels: Tensor, include_self: bool, start: int, stop: int
) -> Tensor:
    bins = gradient.shape[-1]
    if on_gpu(descriptors, bins):
        from listwise.losses import gpu

        return gpu.label_histograms_backward(
            gap_slopes(gradient), descriptors, labels, include_self, start, stop
        )
    slopes = gradient.new_zeros(len(descriptors), 2 * (2 * bins - 1))
    slopes[start:stop] = _slopes(gradient)
    points = descriptors.to(gradient.dtype)
    slopes_by_column = slopes.T.contiguous()
    result = torch.zeros_like(points)
    for rows, columns in _tile_pairs(len(points), start, stop):
        position = _bin_position(products(points[rows], points[columns]), bins)
        slot = _slots(position, labels[rows, None] == labels[columns], bins)
        weight = torch.zeros_like(position)
        if _inside(rows, start, stop):
            weight += slopes[rows].gather(1, slot)
        if _inside(columns, start, stop):
            weight += slopes_by_column[:, columns].gather(0, slot)
        if rows == columns and not include_self:
            weight.fill_diagonal_(0)
        result[rows] += products(weight, points[columns].T)
        if rows != columns:
            result[columns] += products(weight.T, points[rows].T)
    return result.to(descriptors.dtype)


@_label_histograms_backward.register_fake
def _(
    gradient: Tensor, descriptors: Tensor, labels: Tensor, include_self: bool, start: int, stop: int
) -> Tensor:
    return torch.empty_like(descriptors)


def _keep_descriptors(ctx: torch.autograd.function.FunctionCtx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    descriptors, labels, _, include_self, start, stop = inputs
    ctx.save_for_backward(descriptors, labels)
    ctx.settings = (include_self, start, stop)  # type: ignore[attr-defined]


def _backward_to_descriptors(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
    descriptors, labels = ctx.saved_tensors
    result = call_without_compiler(
        _label_histograms_backward, gradient, descriptors, labels, *ctx.settings
    )
    return result, None, None, None, None, None


_label_histograms.register_autograd(_backward_to_descriptors, setup_context=_keep_descriptors)


# Queries and references are different images, so each score belongs to one query. The kernels of
# `gpu.py` do not compute this case: a GPU computes these tiles with PyTorch's operators.


@torch.library.custom_op("listwise::reference_histograms", mutates_args=())
def _reference_histograms(
    queries: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor, bins: int
) -> Tensor:
    dtype = accumulation_dtype(queries.dtype)
    table = queries.new_zeros(len(queries), 2 * (bins + 1), dtype=dtype)
    for rows, columns in _tiles(len(queries), len(references)):
        scores = products(queries[rows].to(dtype), references[columns].to(dtype))
        position = _bin_position(scores, bins)
        cell, below = _cells(position, labels[rows, None] == reference_labels[columns], bins)
        table[rows].scatter_add_(1, cell, 1 - below)
        table[rows].scatter_add_(1, cell + 1, below)
    return _positive_and_all(table, bins)


@_reference_histograms.register_fake
def _(
    queries: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor, bins: int
) -> Tensor:
    dtype = accumulation_dtype(queries.dtype)
    return queries.new_empty((2, len(queries), bins), dtype=dtype)


@torch.library.custom_op("listwise::reference_histograms_backward", mutates_args=())
def _reference_histograms_backward(
    gradient: Tensor,
    queries: Tensor,
    labels: Tensor,
    references: Tensor,
    reference_labels: Tensor,
    both: bool,
) -> tuple[Tensor, Tensor]:
    bins, dtype = gradient.shape[-1], gradient.dtype
    slopes = _slopes(gradient)
    to_queries = torch.zeros_like(queries, dtype=dtype)
    # An operator returns tensors: an empty one stands for no gradient.
    to_references = torch.zeros_like(references if both else references[:0], dtype=dtype)
    for rows, columns in _tiles(len(queries), len(references)):
        left, right = queries[rows].to(dtype), references[columns].to(dtype)
        position = _bin_position(products(left, right), bins)
        slot = _slots(position, labels[rows, None] == reference_labels[columns], bins)
        weight = slopes[rows].gather(1, slot)
        to_queries[rows] += products(weight, right.T)
        if both:
            to_references[columns] += products(weight.T, left.T)
    return to_queries.to(queries.dtype), to_references.to(references.dtype)


@_reference_histograms_backward.register_fake
def _(
    gradient: Tensor,
    queries: Tensor,
    labels: Tensor,
    references: Tensor,
    reference_labels: Tensor,
    both: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(queries), torch.empty_like(references if both else references[:0])


def _keep_references(ctx: torch.autograd.function.FunctionCtx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:4])


def _backward_to_references(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
    both = ctx.needs_input_grad[2]
    found = call_without_compiler(
        _reference_histograms_backward, gradient, *ctx.saved_tensors, both
    )
    return found[0], None, found[1] if both else None, None, None


_reference_histograms.register_autograd(_backward_to_references, setup_context=_keep_references)


@torch.library.custom_op("listwise::score_histograms", mutates_args=())
def _score_histograms(scores: Tensor, relevance: Tensor, bins: int) -> Tensor:
    dtype = accumulation_dtype(scores.dtype)
    table = torch.zeros(len(scores), 2 * (bins + 1), dtype=dtype, device=scores.device)
    for rows, columns in _tiles(*scores.shape):
        position = _bin_position(scores[rows, columns].to(dtype, copy=True), bins)
        cell, below = _cells(position, relevance[rows, columns], bins)
        table[rows].scatter_add_(1, cell, 1 - below)
        table[rows].scatter_add_(1, cell + 1, below)
    return _positive_and_all(table, bins)


@_score_histograms.register_fake
def _(scores: Tensor, relevance: Tensor, bins: int) -> Tensor:
    return scores.new_empty((2, len(scores), bins), dtype=accumulation_dtype(scores.dtype))


@torch.library.custom_op("listwise::score_histograms_backward", mutates_args=())
def _score_histograms_backward(gradient: Tensor, scores: Tensor, relevance: Tensor) -> Tensor:
    bins = gradient.shape[-1]
    slopes = _slopes(gradient)
    result = torch.empty_like(scores)
    for rows, columns in _tiles(*scores.shape):
        position = _bin_position(scores[rows, columns].to(gradient.dtype, copy=True), bins)
        slot = _slots(position, relevance[rows, columns], bins)
        result[rows, columns] = slopes[rows].gather(1, slot).to(scores.dtype)
    return result


@_score_histograms_backward.register_fake
def _(gradient: Tensor, scores: Tensor, relevance: Tensor) -> Tensor:
    return torch.empty_like(scores)


def _keep_scores(ctx: torch.autograd.function.FunctionCtx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0], inputs[1])


def _backward_to_scores(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
    scores, relevance = ctx.saved_tensors
    result = call_without_compiler(_score_histograms_backward, gradient, scores, relevance)
    return result, None, None


_score_histograms.register_autograd(_backward_to_scores, setup_context=_keep_scores)


def on_gpu(descriptors: Tensor, bins: int) -> bool:
    """Return whether the kernels of `gpu.py` can compute this case."""
    if not descriptors.is_cuda or not runs_triton(descriptors.device):
        return False
    from listwise.losses import gpu

    return gpu.suits(descriptors, bins)


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


def gap_slopes(gradient: Tensor) -> Tensor:
    """Derivative of the loss by a score, for each gap between two bin centers it may lie in.

    In a gap a rising score moves mass from the lower bin to the higher one. Past ±1 a score counts
    as ±1, so the slope is zero. Shapes: the gradient by the histograms of the relevant and of all
    images [2, Q, M] -> [Q, 2, M + 1], gaps for the irrelevant images, then for the relevant ones,
    from the one before the first bin to the one behind the last.
    """
    bins = gradient.shape[-1]
    relevant, every = gradient
    by_bin = torch.stack((every, every + relevant), dim=1)
    return torch.nn.functional.pad(by_bin.diff() * (-(bins - 1) / 2), (1, 1))


def _slopes(gradient: Tensor) -> Tensor:
    """Derivative of the loss by a score, for each slot the score may lie in.

    On a center the loss has a kink, and the slope is the mean of both sides. Shapes: as for
    `gap_slopes`, to [Q, 2(2M − 1)].
    """
    gaps = gap_slopes(gradient)
    slots = gaps.new_empty(len(gaps), 2, 2 * gradient.shape[-1] - 1)
    slots[..., 0::2] = (gaps[..., :-1] + gaps[..., 1:]) / 2
    slots[..., 1::2] = gaps[..., 1:-1]
    return slots.flatten(1)


def _tiles(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    return product(blocks(0, rows, TILE), blocks(0, columns, TILE))


def _tile_pairs(size: int, start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Yield tiles that cover each unordered pair of images once, if one of the two is a query.

    A tile never contains both query rows and other rows.
    """
    borders = ((0, start), (start, stop), (stop, size))
    parts = [part for first, last in borders for part in blocks(first, last, TILE)]
    for i, rows in enumerate(parts):
        for columns in parts[i:]:
            if _inside(rows, start, stop) or _inside(columns, start, stop):
                yield rows, columns


def _inside(block: slice, start: int, stop: int) -> bool:
    return bool(start <= block.start and block.stop <= stop)
