"""The Triton kernels of `gpu.py`."""

import triton
import triton.language as tl


@triton.jit
def _position(product, unit, BINS: tl.constexpr):
    """Where a score lies on the axis of bins, 0 at b_1 = 1."""
    position = (1.0 - product * unit) * ((BINS - 1) * 0.5)
    return tl.minimum(tl.maximum(position, 0.0), BINS - 1.0)


@triton.jit
def histogram_kernel(
    products,
    labels,
    relevant_table,
    every_table,
    first_row,
    first_query,
    first_column,
    columns,
    unit,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    INCLUDE_SELF: tl.constexpr,
):
    """Add one row of a tile to its query's two histograms; one program a row."""
    line = tl.program_id(0)
    row = first_row + line
    label = tl.load(labels + row)
    bin_numbers = tl.arange(0, SLOTS).to(tl.float32)[:, None]
    # Each thread keeps the bins of its own columns; they are added up once, at the end.
    every = tl.zeros((SLOTS, BLOCK), tl.float32)
    relevant = tl.zeros((SLOTS,), tl.float32)
    products += line.to(tl.int64) * columns
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        product = tl.load(products + column, mask=inside, other=0.0)
        position = _position(product, unit, BINS)
        counts = inside
        if not INCLUDE_SELF:
            counts = counts & (first_column + column != row)
        # A score that does not count lies far from every bin.
        position = tl.where(counts, position, -2.0)
        share = tl.maximum(1.0 - tl.abs(position[None, :] - bin_numbers), 0.0)
        every += share
        same = tl.load(labels + first_column + column, mask=inside, other=0) == label
        same = same & counts
        if tl.max(same.to(tl.int32), axis=0) > 0:
            relevant += tl.sum(tl.where(same[None, :], share, 0.0), axis=1)
    slot = tl.arange(0, SLOTS)
    real = slot < BINS
    place = (row - first_query).to(tl.int64) * BINS + slot
    before = tl.load(relevant_table + place, mask=real)
    tl.store(relevant_table + place, before + relevant, mask=real)
    before = tl.load(every_table + place, mask=real)
    tl.store(every_table + place, before + tl.sum(every, axis=1), mask=real)


@triton.jit
def weight_kernel(
    products,
    labels,
    slopes,
    slopes_by_column,
    scale,
    weights,
    first_row,
    first_column,
    columns,
    size,
    unit,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    INCLUDE_SELF: tl.constexpr,
):
    """Make (G + Gᵀ)_ij of part of a tile's row from its scores and both images' slopes."""
    line = tl.program_id(0)
    row = first_row + line
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    other = first_column + column
    offset = line.to(tl.int64) * columns + column
    position = _position(tl.load(products + offset, mask=inside, other=0.0), unit, BINS)
    slot = (tl.floor(position) + tl.ceil(position)).to(tl.int32)
    same = tl.load(labels + other, mask=inside, other=0) == tl.load(labels + row)
    slot += tl.where(same, 2 * BINS - 1, 0)
    mine = tl.load(slopes + row.to(tl.int64) * (2 * (2 * BINS - 1)) + slot)
    theirs = tl.load(slopes_by_column + slot.to(tl.int64) * size + other, mask=inside, other=0.0)
    weight = (mine + theirs) * tl.load(scale)
    if not INCLUDE_SELF:
        weight = tl.where(other == row, 0.0, weight)
    tl.store(weights + offset, weight.to(tl.float16), mask=inside)
