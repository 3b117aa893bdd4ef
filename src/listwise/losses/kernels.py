"""The Triton kernels of `gpu.py`.

Scores are scaled so that neighboring bin centers have a distance of 1: the first is at `center`,
the last at −`center`, where `center` is (M − 1) / 2. Most scores are near zero, where
floating-point numbers are most precise.

The tensors that the kernels pass to each other, with B images, Q queries and M bins:

- `parts` [1 or 2, B, C]: descriptors in half precision, as they are or split into high and low.
- `kinds` [2, B]: the class of each image, and how many positives it has.
- `table` [Q, 2, M]: histograms of the relevant and of all images; after them the sum of the loss
  and the number of programs that have added to it.
- `slopes` [2(M + 1), B]: the slope of each image's gaps; after them the largest slope, the factor
  of the product of weights and descriptors, and the weight of the queries that each program of
  `prepare_kernel` counted.
"""

import triton
import triton.language as tl

# Sums of shares are integers, multiples of 2⁻²², so they do not depend on the order in which
# programs add them. The sum of a tile is at most its width and fits into an int32.
SHARE_UNIT = tl.constexpr(2.0**22)
LOSS_UNIT = tl.constexpr(2.0**44)
FAR = tl.constexpr(1e6)
# Entries of unit rows are small: this factor moves them and their low parts into float16's range.
DESCRIPTOR_SCALE = tl.constexpr(1024.0)
# Largest slope after scaling; those of two images are added, and float16 ends at 65504.
SLOPE_PEAK = tl.constexpr(8192.0)


@triton.jit
def _split_rows(
    descriptors,
    parts,
    row,
    real,
    size,
    dim,
    padded,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Split some rows into high and low parts; return how far each length is from 1: [ROWS]."""
    line = row.to(tl.int64)[:, None]
    square = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, padded, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        inside = real[:, None] & (column < dim)
        value = tl.load(descriptors + line * dim + column, mask=inside, other=0.0).to(tl.float32)
        square += tl.sum(value * value, axis=1)
        if SPLIT:
            inside = real[:, None] & (column < padded)
            scaled = value * DESCRIPTOR_SCALE
            first = scaled.to(tl.float16)
            second = (scaled - first.to(tl.float32)).to(tl.float16)
            tl.store(parts + line * padded + column, first, mask=inside)
            tl.store(parts + (line + size) * padded + column, second, mask=inside)
    off = tl.abs(tl.sqrt(square) - 1.0)
    return tl.where(real, tl.where(off < FAR, off, float("inf")), 0.0)  # NaN compares as false


@triton.jit
def _find_classes(labels, row, real, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the class of each row, and the number of images with its label: [ROWS] each."""
    label = tl.load(labels + row, mask=real, other=0)[:, None]
    count = tl.zeros((ROWS,), tl.int32)
    kind = row
    for begin in range(0, size, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < size
        other = tl.load(labels + column, mask=inside, other=0)[None, :]
        same = (other == label) & inside[None, :]
        count += tl.sum(same.to(tl.int32), axis=1)
        kind = tl.minimum(kind, tl.min(tl.where(same, column[None, :], size), axis=1))
    return kind, count


@triton.jit
def prepare_kernel(
    descriptors,
    labels,
    weights,
    parts,
    kinds,
    table,
    slopes,
    found,
    size,
    dim,
    padded,
    start,
    queries,
    SPLIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    INCLUDE_SELF: tl.constexpr,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Prepare some rows: split them, and find their lengths, classes and numbers of positives.

    The class of an image is the number of the first image that has its label. Writes to `found`
    [3, programs] the largest difference of a length from 1, whether a weight is invalid, and the
    weight of the queries that have a positive. Sets the sums of later kernels to zero.
    """
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    real = row < size
    off = _split_rows(descriptors, parts, row, real, size, dim, padded, SPLIT, ROWS, BLOCK)
    kind, count = _find_classes(labels, row, real, size, ROWS, BLOCK)
    tl.store(kinds + row, kind, mask=real)
    if not INCLUDE_SELF:
        count -= 1
    tl.store(kinds + size + row, count, mask=real)
    weight = tl.where(real, 1.0, 0.0)
    if WEIGHTED:
        weight = tl.load(weights + row, mask=real, other=0.0)
    sound = (weight >= 0.0) & (weight < float("inf"))
    programs = tl.num_programs(0)
    tl.store(found + program, tl.max(off, axis=0))
    tl.store(found + programs + program, tl.max(tl.where(sound, 0.0, 1.0), axis=0))
    counted = tl.sum(tl.where(real & sound & (count > 0), weight, 0.0), axis=0)
    tl.store(found + 2 * programs + program, counted)
    behind = slopes + tl.cast(size, tl.int64) * (2 * (BINS + 1))
    tl.store(behind + 2 + program, counted)

    query = row - start
    is_query = (query >= 0) & (query < queries)
    number = tl.arange(0, SLOTS)[None, :]
    place = table + query.to(tl.int64)[:, None] * (2 * BINS) + number
    tl.store(place, tl.zeros((ROWS, SLOTS), tl.int64), mask=is_query[:, None] & (number < 2 * BINS))
    if program == 0:
        sums = table + tl.cast(queries, tl.int64) * (2 * BINS)
        tl.store(sums, 0)
        tl.store(sums + 1, 0)
        tl.store(behind, 0.0)


@triton.jit
def _scores(
    parts,
    rows,
    columns,
    size,
    dim,
    BINS: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute the scaled scores of some images with others: [ROWS, COLUMNS].

    Tensor cores round sums towards zero. In a long sum these errors add up, so exact scores are
    summed outside of the tensor cores after each block.
    """
    k = tl.arange(0, DEPTH)
    left = rows.to(tl.int64)[:, None] * dim + k[None, :]
    right = columns.to(tl.int64)[None, :] * dim + k[:, None]
    low = parts + tl.cast(size, tl.int64) * dim
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, dim, DEPTH):
        row_high = tl.load(parts + left + begin)
        column_high = tl.load(parts + right + begin)
        if EXACT:
            row_low = tl.load(low + left + begin)
            column_low = tl.load(low + right + begin)
            part = tl.dot(row_low, column_high)
            part = tl.dot(row_high, column_low, part)
            part = tl.dot(row_high, column_high, part)
            total += part
        else:
            total = tl.dot(row_high, column_high, total)
    center: tl.constexpr = (BINS - 1) * 0.5
    if EXACT:
        total *= center / (DESCRIPTOR_SCALE * DESCRIPTOR_SCALE)
    else:
        total *= center
    return tl.minimum(tl.maximum(total, -center), center)


@triton.jit
def _range(score):
    """Return the lowest and the highest score of a tile; scores of FAR do not count."""
    lowest = tl.min(tl.min(score, axis=1), axis=0)
    highest = tl.max(tl.max(tl.where(score < FAR, score, -FAR), axis=1), axis=0)
    return lowest, highest


@triton.jit
def _add_shares(
    table, score, row, column, start, stop, mirrored, KIND: tl.constexpr, BINS: tl.constexpr
):
    """Add the shares of a tile's scores to the bins of its rows and, if mirrored, its columns.

    The loop covers only the bins from the lowest to the highest score: in most tiles these are few.
    """
    center: tl.constexpr = (BINS - 1) * 0.5
    lowest, highest = _range(score)
    first = tl.maximum(tl.floor(center - highest), 0.0).to(tl.int32)
    last = tl.minimum(tl.ceil(center - lowest), BINS - 1.0).to(tl.int32)
    row_is_query = (row >= start) & (row < stop)
    column_is_query = (column >= start) & (column < stop)
    row_place = table + ((row - start).to(tl.int64) * 2 + KIND) * BINS
    column_place = table + ((column - start).to(tl.int64) * 2 + KIND) * BINS
    for number in range(first, last + 1):
        share = tl.maximum(1.0 - tl.abs(score - (center - number)), 0.0)
        by_row = (tl.sum(share, axis=1) * SHARE_UNIT).to(tl.int32).to(tl.int64)
        tl.atomic_add(row_place + number, by_row, mask=row_is_query, sem="relaxed")
        if mirrored:
            by_column = (tl.sum(share, axis=0) * SHARE_UNIT).to(tl.int32).to(tl.int64)
            tl.atomic_add(column_place + number, by_column, mask=column_is_query, sem="relaxed")


@triton.jit
def histogram_kernel(
    parts,
    kinds,
    table,
    size,
    dim,
    start,
    stop,
    BINS: tl.constexpr,
    INCLUDE_SELF: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add a tile of scores to the histograms of its rows and of its columns.

    Tiles below the diagonal have the same scores again, so their programs return immediately.
    Programs that run at the same time work in one square of GROUP × GROUP tiles of COLUMNS.
    """
    ratio: tl.constexpr = COLUMNS // ROWS
    program = tl.program_id(0)
    square = program // (GROUP * GROUP * ratio)
    inside = program % (GROUP * GROUP * ratio)
    squares = tl.cdiv(size, GROUP * COLUMNS)
    row_tile = (square // squares) * GROUP * ratio + inside % (GROUP * ratio)
    column_tile = (square % squares) * GROUP + inside // (GROUP * ratio)
    first_row = row_tile * ROWS
    first_column = column_tile * COLUMNS
    mirrored = row_tile // ratio < column_tile
    wanted = (first_row < size) & (first_column < size) & (row_tile // ratio <= column_tile)
    row_is_query = (first_row < stop) & (first_row + ROWS > start)
    column_is_query = (first_column < stop) & (first_column + COLUMNS > start) & mirrored
    if wanted & (row_is_query | column_is_query):
        row = first_row + tl.arange(0, ROWS)
        column = first_column + tl.arange(0, COLUMNS)
        # Rows past the end repeat other rows, and their scores do not count.
        score = _scores(
            parts, row % size, column % size, size, dim, BINS, EXACT, ROWS, COLUMNS, DEPTH
        )
        counts = (row < size)[:, None] & (column < size)[None, :]
        if not INCLUDE_SELF:
            counts = counts & (row[:, None] != column[None, :])
        score = tl.where(counts, score, FAR)
        _add_shares(table, score, row, column, start, stop, mirrored, 1, BINS)
        row_class = tl.load(kinds + row % size)
        column_class = tl.load(kinds + column % size)
        score = tl.where(row_class[:, None] == column_class[None, :], score, FAR)
        _add_shares(table, score, row, column, start, stop, mirrored, 0, BINS)


@triton.jit
def _precisions(table, line, real, BINS: tl.constexpr, SLOTS: tl.constexpr):
    """Compute r, P and the derivatives of N AP for some queries and all bins: [ROWS, SLOTS] each.

    The derivatives are with respect to all images and to the relevant ones; `precision_kernel`
    explains the names.
    """
    number = tl.arange(0, SLOTS)[None, :]
    inside = real[:, None] & (number < BINS)
    place = table + line.to(tl.int64)[:, None] * (2 * BINS) + number
    relevant = tl.load(place, mask=inside, other=0)
    every = tl.load(place + BINS, mask=inside, other=0)
    following = inside & (number + 1 < BINS)
    next_relevant = tl.load(place + 1, mask=following, other=0)
    next_every = tl.load(place + BINS + 1, mask=following, other=0)
    relevant_sum = tl.cumsum(relevant, axis=1)
    every_sum = tl.cumsum(every, axis=1)
    # Integers up to here; the unit of the sums cancels in ratios.
    upto = tl.where(every_sum > 0, every_sum, 1).to(tl.float32)
    # An empty list has the precision 1: that of the first relevant image to come in.
    precision = tl.where(every_sum > 0, relevant_sum.to(tl.float32) / upto, 1.0)
    next_sum = every_sum + next_every
    next_upto = tl.where(next_sum > 0, next_sum, 1).to(tl.float32)
    next_precision = (relevant_sum + next_relevant).to(tl.float32) / next_upto
    next_precision = tl.where(next_sum > 0, next_precision, 1.0)
    next_precision = tl.where(following, next_precision, 0.0)
    ratio = relevant.to(tl.float32) / upto
    by_every = ratio * precision
    by_relevant = tl.where(inside, precision - next_precision + ratio, 0.0)
    return relevant.to(tl.float32), precision, by_every, by_relevant


@triton.jit
def _sum_of(numbers, count, BLOCK: tl.constexpr):
    """Sum float32 numbers, always in the same order."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, count, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        total += tl.load(numbers + place, mask=place < count, other=0.0)
    return tl.sum(total, axis=0).to(tl.float32)


@triton.jit
def precision_kernel(
    table,
    kinds,
    weights,
    slopes,
    loss,
    size,
    start,
    queries,
    counters,
    WEIGHTED: tl.constexpr,
    BINS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute AP_Q of some queries and its slopes; the last program writes the loss.

    `counters` is the number of programs of `prepare_kernel`, which counted the total weight.
    For a query with a share w of the total weight, writes −w dAP/dscore to `slopes`, in the order
    of `histogram.gap_slopes`, and adds w (1 − AP) to the loss, as an integer.

    Let R and A be the relevant and all images up to a bin, r the relevant images in it, P = R / A,
    and N the number of positives. AP = Σ P r / N. The derivatives with respect to neighboring bins
    differ by r R / A² (all images) and P − P' + r / A (relevant images); P' is P of the next bin.
    """
    program = tl.program_id(0)
    line = program * ROWS + tl.arange(0, ROWS)
    real = line < queries
    number = tl.arange(0, SLOTS)[None, :]
    inside = real[:, None] & (number < BINS)
    relevant, precision, by_every, by_relevant = _precisions(table, line, real, BINS, SLOTS)
    row = start + line
    count = tl.load(kinds + size + row, mask=real, other=0)
    weight = tl.where(count > 0, 1.0, 0.0)
    if WEIGHTED:
        weight *= tl.load(weights + row, mask=real, other=0.0)
    behind = slopes + tl.cast(size, tl.int64) * (2 * (BINS + 1))
    weight /= _sum_of(behind + 2, counters, BLOCK)
    share = weight / tl.maximum(count, 1).to(tl.float32)
    gain = tl.sum(precision * relevant, axis=1) * (1.0 / SHARE_UNIT)
    lost = tl.sum(tl.where(real, weight - share * gain, 0.0), axis=0)

    factor = (share * ((BINS - 1) * 0.5))[:, None]
    below = factor * by_every
    below_relevant = factor * (by_every - by_relevant)
    # Past ±1 a score counts as ±1, so the gaps before the first and behind the last bin are flat.
    between = number + 1 < BINS
    below = tl.where(between, below, 0.0)
    below_relevant = tl.where(between, below_relevant, 0.0)
    flat = tl.zeros((ROWS,), tl.float32)
    target = slopes + row[:, None] + (number + 1).to(tl.int64) * size
    tl.store(target, below, mask=inside)
    tl.store(target + (BINS + 1) * size, below_relevant, mask=inside)
    tl.store(slopes + row, flat, mask=real)
    tl.store(slopes + row + (BINS + 1) * size, flat, mask=real)
    peak = tl.max(tl.maximum(tl.abs(below), tl.abs(below_relevant)), axis=1)
    tl.atomic_max(behind, tl.max(peak, axis=0))

    sums = table + tl.cast(queries, tl.int64) * (2 * BINS)
    tl.atomic_add(sums, (lost * LOSS_UNIT).to(tl.int64))
    # The program that increments the counter last sees the sums of all others.
    if tl.atomic_add(sums + 1, 1) == tl.num_programs(0) - 1:
        tl.store(loss, tl.atomic_add(sums, 0).to(tl.float32) * (1.0 / LOSS_UNIT))


@triton.jit
def _add_slopes(weight, score, slopes, row, column, size, BINS: tl.constexpr):
    """Add the slopes of both images to each pair whose score is not FAR.

    A score on a center has the mean of the slopes of the gaps on both sides.
    """
    center: tl.constexpr = (BINS - 1) * 0.5
    lowest, highest = _range(score)
    first = tl.maximum(tl.floor(center - highest), 0.0).to(tl.int32)
    last = tl.minimum(tl.floor(center - lowest) + 1.0, BINS).to(tl.int32)
    for number in range(first, last + 1):
        mine = tl.load(slopes + number * size + row)
        theirs = tl.load(slopes + number * size + column)
        distance = tl.abs(score - (center + 0.5 - number))
        share = tl.where(distance < 0.5, 1.0, tl.where(distance == 0.5, 0.5, 0.0))
        weight += share * (mine[:, None] + theirs[None, :])
    return weight


@triton.jit(do_not_specialize=["row_tile", "column_tile", "row_tiles", "column_tiles"])
def weight_kernel(
    parts,
    kinds,
    slopes,
    gradient,
    weights,
    size,
    dim,
    stride,
    row_tile,
    column_tile,
    row_tiles,
    column_tiles,
    BINS: tl.constexpr,
    INCLUDE_SELF: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute (G + Gᵀ)_ij of a tile from its scores and the slopes of both images.

    The slopes are scaled so that the largest is SLOPE_PEAK. The inverse factor, times the gradient
    of the loss, is written after the slopes. `weights` consists of whole tiles; the first one is
    tile (`row_tile`, `column_tile`) of the whole matrix.
    """
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    within = program % (GROUP * column_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    line = (group * GROUP + within % group_rows) * ROWS + tl.arange(0, ROWS)
    place = (within // group_rows) * COLUMNS + tl.arange(0, COLUMNS)
    row = (row_tile * ROWS + line) % size
    column = (column_tile * COLUMNS + place) % size
    score = _scores(parts, row, column, size, dim, BINS, EXACT, ROWS, COLUMNS, DEPTH)
    row_class = tl.load(kinds + row)
    column_class = tl.load(kinds + column)
    relevant = row_class[:, None] == column_class[None, :]
    behind = slopes + tl.cast(size, tl.int64) * (2 * (BINS + 1))
    weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    weight = _add_slopes(weight, tl.where(relevant, FAR, score), slopes, row, column, size, BINS)
    slopes += (BINS + 1) * size
    weight = _add_slopes(weight, tl.where(relevant, score, FAR), slopes, row, column, size, BINS)
    peak = tl.maximum(tl.load(behind), 1e-30)
    weight *= SLOPE_PEAK / peak
    if not INCLUDE_SELF:
        weight = tl.where(row[:, None] == column[None, :], 0.0, weight)
    tl.store(weights + line[:, None] * stride + place[None, :], weight.to(weights.dtype.element_ty))
    if program == 0:
        if EXACT:
            peak *= 1.0 / DESCRIPTOR_SCALE
        tl.store(behind + 1, tl.load(gradient) * peak * (1.0 / SLOPE_PEAK))
