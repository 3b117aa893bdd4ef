"""Crops and reduced photos made on a GPU, many photos of any sizes at a time.

A sample is a sum over the photo's pixels around it, weighted by the cubic filter that Pillow uses.
Where the photo is reduced, the filter is wider by the same factor, so that no pixel is skipped.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from listwise.data.crops import GRAY, CropPlan, color_change

ROWS, COLUMNS = 8, 32  # pixels of a tile, which one program computes
BLOCK = 1024  # pixels whose colors one program changes

Place = tuple[float, float, float, float, float, float]
"""Position in the photo of the output's first pixel, and the steps per column and per row."""


def crop_photos(photos: Sequence[Tensor], plans: Sequence[CropPlan], size: int) -> Tensor:
    """Crop n photos uint8 [3, H, W] on one device as `draw_crop` planned: uint8 [n, 3, S, S]."""
    crops = _resample(photos, [_place(plan, size) for plan in plans], size, size)
    changes = [color_change(plan.colors) for plan in plans]
    matrices = np.stack([matrix for matrix, _ in changes])
    shares = np.array([share for _, share in changes])
    # Integers, because their sum does not depend on the order.
    sums = crops.view(len(photos), 3, -1).sum(2, dtype=torch.int64)
    means = sums.double() @ _table(GRAY / size**2, torch.float64, crops.device)
    offsets = means * _table(shares, torch.float64, crops.device)
    blocks = triton.cdiv(size * size, BLOCK)
    with _device_of(crops):
        _color_kernel[(len(photos) * blocks,)](
            crops,
            _table(matrices, torch.float32, crops.device),
            offsets.float(),
            size * size,
            blocks,
            BLOCK=BLOCK,
        )
    return crops


def resize_photos(photos: Sequence[Tensor], width: int, height: int) -> Tensor:
    """Resize n photos uint8 [3, H, W] of any size: uint8 [n, 3, height, width]."""
    places: list[Place] = []
    for photo in photos:
        x, y = photo.shape[2] / width, photo.shape[1] / height
        places.append((0.5 * x - 0.5, 0.5 * y - 0.5, x, 0.0, 0.0, y))
    return _resample(photos, places, width, height)


def _place(plan: CropPlan, size: int) -> Place:
    left, top, right, bottom = plan.bounds
    (across_x, across_y), (down_x, down_y) = plan.across, plan.down
    middle = 0.5 - 0.5 / size
    # The origin of a photo is the middle of its first pixel, that of bounds is its corner.
    x = (left + right) / 2 - (across_x + down_x) * middle - 0.5
    y = (top + bottom) / 2 - (across_y + down_y) * middle - 0.5
    across_x, across_y, down_x, down_y = (e / size for e in (across_x, across_y, down_x, down_y))
    if plan.flip:
        x, y = x + across_x * (size - 1), y + across_y * (size - 1)
        across_x, across_y = -across_x, -across_y
    return x, y, across_x, across_y, down_x, down_y


def _resample(photos: Sequence[Tensor], places: Sequence[Place], width: int, height: int) -> Tensor:
    """Resample each photo into an output image: uint8 [n, 3, height, width]."""
    device = photos[0].device
    made = torch.empty(len(photos), 3, height, width, dtype=torch.uint8, device=device)
    numbers, sizes = [], []
    for photo, place in zip(photos, places, strict=True):
        _, _, across_x, across_y, down_x, down_y = place
        wide = max(1.0, math.hypot(across_x, down_x))
        tall = max(1.0, math.hypot(across_y, down_y))
        numbers.append((*place, wide, tall))
        _, photo_height, photo_width = photo.shape
        channel, line, step = photo.stride()
        assert step == 1 or photo_width == 1  # one pixel has no next
        taps = math.ceil(4 * wide), math.ceil(4 * tall)
        sizes.append((photo.data_ptr(), channel, line, photo_width, photo_height, *taps))
    across, down = triton.cdiv(width, COLUMNS), triton.cdiv(height, ROWS)
    with _device_of(made):
        _resample_kernel[(len(photos) * across * down,)](
            _table(sizes, torch.int64, device),
            _table(numbers, torch.float32, device),
            made,
            width,
            height,
            across,
            across * down,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return made


def _table(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).contiguous().to(device)


def _device_of(tensor: Tensor) -> Any:
    """Launch kernels on the GPU of this tensor."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit
def _cubic(distance):  # type: ignore[no-untyped-def]
    """Return the cubic weight of a pixel at a distance in pixels."""
    t = tl.abs(distance)
    near = (1.5 * t - 2.5) * t * t + 1.0
    far = ((2.5 - 0.5 * t) * t - 4.0) * t + 2.0
    return tl.where(t < 1.0, near, tl.where(t < 2.0, far, 0.0))


@triton.jit
def _rounded(value):  # type: ignore[no-untyped-def]
    return tl.minimum(tl.maximum(value + 0.5, 0.0), 255.0).to(tl.uint8)


@triton.jit
def _seen_at(numbers, row, column):  # type: ignore[no-untyped-def]
    """Return one coordinate in the photo of output pixels, from an origin and two steps."""
    return tl.load(numbers) + column * tl.load(numbers + 2) + row * tl.load(numbers + 4)


# Specialization on divisible numbers would compile the kernel again for many photo shapes.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["width", "height", "tiles_across", "tiles"]
)
def _resample_kernel(  # type: ignore[no-untyped-def]
    sizes,
    numbers,
    made,
    width,
    height,
    tiles_across,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute one tile of one output; `sizes` [n, 7] and `numbers` [n, 8] describe the photos."""
    program = tl.program_id(0)
    picture = program // tiles
    tile = program % tiles
    row = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]

    red_plane = tl.load(sizes + picture * 7).to(tl.pointer_type(tl.uint8))
    channel = tl.load(sizes + picture * 7 + 1)
    green_plane = red_plane + channel
    blue_plane = green_plane + channel
    line = tl.load(sizes + picture * 7 + 2).to(tl.int32)
    last_x = (tl.load(sizes + picture * 7 + 3) - 1).to(tl.float32)
    last_y = (tl.load(sizes + picture * 7 + 4) - 1).to(tl.float32)
    taps_x = tl.load(sizes + picture * 7 + 5).to(tl.int32)
    taps_y = tl.load(sizes + picture * 7 + 6).to(tl.int32)
    wide = tl.load(numbers + picture * 8 + 6)
    tall = tl.load(numbers + picture * 8 + 7)
    x = _seen_at(numbers + picture * 8, row, column)
    y = _seen_at(numbers + picture * 8 + 1, row, column)

    first_x = tl.floor(x - 2.0 * wide) + 1.0
    first_y = tl.floor(y - 2.0 * tall) + 1.0
    red = tl.zeros((ROWS, COLUMNS), tl.float32)
    green = tl.zeros((ROWS, COLUMNS), tl.float32)
    blue = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for j in range(taps_y):
        at_y = first_y + j
        weight_y = _cubic((at_y - y) / tall)
        start = tl.minimum(tl.maximum(at_y, 0.0), last_y).to(tl.int32) * line
        for i in range(taps_x):
            at_x = first_x + i
            weight = weight_y * _cubic((at_x - x) / wide)
            offset = start + tl.minimum(tl.maximum(at_x, 0.0), last_x).to(tl.int32)
            red += weight * tl.load(red_plane + offset).to(tl.float32)
            green += weight * tl.load(green_plane + offset).to(tl.float32)
            blue += weight * tl.load(blue_plane + offset).to(tl.float32)
            total += weight

    inside = (row < height) & (column < width)
    area = width * height
    target = made + picture.to(tl.int64) * 3 * area + row * width + column
    tl.store(target, _rounded(red / total), mask=inside)
    tl.store(target + area, _rounded(green / total), mask=inside)
    tl.store(target + 2 * area, _rounded(blue / total), mask=inside)


@triton.jit(do_not_specialize=["area", "blocks"])  # type: ignore[untyped-decorator]
def _color_kernel(  # type: ignore[no-untyped-def]
    crops, matrices, offsets, area, blocks, BLOCK: tl.constexpr
):
    """Change some pixels of one crop in place: `matrices` [n, 3, 3] · color + `offsets`."""
    program = tl.program_id(0)
    crop = program // blocks
    pixel = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = pixel < area
    place = crops + crop.to(tl.int64) * 3 * area + pixel
    red = tl.load(place, mask=inside, other=0).to(tl.float32)
    green = tl.load(place + area, mask=inside, other=0).to(tl.float32)
    blue = tl.load(place + 2 * area, mask=inside, other=0).to(tl.float32)
    offset = tl.load(offsets + crop)
    for band in tl.static_range(3):
        line = matrices + crop * 9 + band * 3
        value = tl.load(line) * red + tl.load(line + 1) * green + tl.load(line + 2) * blue
        tl.store(place + band * area, _rounded(value + offset), mask=inside)
