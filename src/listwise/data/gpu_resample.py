"""Crops and reduced photos made on a GPU, many photos of any sizes at a time.

A sample is a sum over the photo's pixels around it, weighted by the cubic filter that Pillow uses.
Where the photo is reduced, the filter is wider by the same factor, so that no pixel is skipped.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from listwise.data.crops import GRAY, CropPlans, Doubles, color_changes
from listwise.data.kept_photos import PhotoBlock, as_block

ROWS, COLUMNS = 8, 32  # pixels of a tile, which one program computes
BLOCK = 1024  # pixels whose colors one program changes


def crop_into(crops: Tensor, photos: PhotoBlock, plans: CropPlans) -> None:
    """Crop n photos, as `plan_crops` planned, into `crops`, uint8 [n, 3, S, S] on their device."""
    size, device = crops.shape[2], crops.device
    _resample(photos, _places(plans, size), crops)
    matrices, shares = color_changes(plans.colors)
    # Integers, because their sum does not depend on the order.
    sums = crops.view(len(crops), 3, -1).sum(2, dtype=torch.int64)
    means = sums.double() @ _upload(GRAY / size**2, torch.float64, device)
    offsets = means * _upload(shares, torch.float64, device)
    blocks = triton.cdiv(size * size, BLOCK)
    with _device_of(crops):
        _color_kernel[(len(crops) * blocks,)](
            crops,
            _upload(matrices, torch.float32, device),
            offsets.float(),
            size * size,
            blocks,
            BLOCK=BLOCK,
        )


def resize_photos(photos: Sequence[Tensor], width: int, height: int) -> Tensor:
    """Resize n photos uint8 [3, H, W] of any size: uint8 [n, 3, height, width]."""
    shape = (len(photos), 3, height, width)
    made = torch.empty(shape, dtype=torch.uint8, device=photos[0].device)
    block = as_block(photos)
    x, y, none = block.table[:, 1] / width, block.table[:, 2] / height, np.zeros(len(photos))
    _resample(block, np.stack([0.5 * x - 0.5, 0.5 * y - 0.5, x, none, none, y], 1), made)
    return made


def _places(plans: CropPlans, size: int) -> Doubles:
    """Return the places of crops in their photos: [n, 6].

    A place is the position (x, y) of the first pixel, and the steps per column and per row.
    """
    left_top, right_bottom = plans.bounds[:, :2], plans.bounds[:, 2:]
    across, down = plans.across, plans.down
    # The origin of a photo is the middle of its first pixel, that of bounds is its corner.
    first = (left_top + right_bottom) / 2 - (across + down) * (0.5 - 0.5 / size) - 0.5
    across, down = across / size, down / size
    flip = plans.flip[:, None]
    first = np.where(flip, first + across * (size - 1), first)
    return np.concatenate([first, np.where(flip, -across, across), down], 1)


def _resample(photos: PhotoBlock, places: Doubles, made: Tensor) -> None:
    """Resample each photo into an output image of `made`, uint8 [n, 3, height, width]."""
    count, _, height, width = made.shape
    extents = np.maximum(1.0, np.hypot(places[:, 2:4], places[:, 4:6]))
    taps = np.ceil(4 * extents).astype(np.int64)
    across, down = triton.cdiv(width, COLUMNS), triton.cdiv(height, ROWS)
    with _device_of(made):
        _resample_kernel[(count * across * down,)](
            photos.pixels,
            _upload(np.concatenate([photos.table, taps], 1), torch.int64, made.device),
            _upload(np.concatenate([places, extents], 1), torch.float32, made.device),
            made,
            width,
            height,
            across,
            across * down,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )


def _upload(values: npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
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
    pixels,
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
    """Compute one tile of one output; `sizes` [n, 5] and `numbers` [n, 8] describe the photos."""
    program = tl.program_id(0)
    picture = program // tiles
    tile = program % tiles
    row = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]

    wide_photo = tl.load(sizes + picture * 5 + 1)
    tall_photo = tl.load(sizes + picture * 5 + 2)
    red_plane = pixels + tl.load(sizes + picture * 5)
    green_plane = red_plane + wide_photo * tall_photo
    blue_plane = green_plane + wide_photo * tall_photo
    line = wide_photo.to(tl.int32)
    last_x = (wide_photo - 1).to(tl.float32)
    last_y = (tall_photo - 1).to(tl.float32)
    taps_x = tl.load(sizes + picture * 5 + 3).to(tl.int32)
    taps_y = tl.load(sizes + picture * 5 + 4).to(tl.int32)
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
