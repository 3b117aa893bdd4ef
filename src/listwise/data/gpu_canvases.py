"""Lay photos of different shapes into canvases of one shape, by one kernel on their GPU.

Copying the photos one by one takes the host longer than starting the network on them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from listwise.data.gpu_resample import device_of, photo_table

ROWS, COLUMNS = 8, 128  # pixels of a tile, which one program copies


def lay_photos(photos: Sequence[Tensor], count: int, height: int, width: int) -> Tensor:
    """Copy n photos into the upper left corners of canvases: uint8 [count, 3, height, width].

    The rest is zero, as are the canvases after the first n.

    Args:
        photos: uint8 [3, h, w] each, of any shapes, on one device.
        count: number of canvases, n or more.
        height: height of the canvases.
        width: width of the canvases.
    """
    device = photos[0].device
    table = torch.zeros(count, 5, dtype=torch.int64, pin_memory=device.type == "cuda")
    table[: len(photos)] = torch.from_numpy(photo_table(photos))
    made = torch.empty(count, 3, height, width, dtype=torch.uint8, device=device)
    across = triton.cdiv(width, COLUMNS)
    tiles = across * triton.cdiv(height, ROWS)
    with device_of(made):
        _lay_kernel[(count * tiles,)](
            table.to(device, non_blocking=True),  # from pinned memory: it does not wait
            made,
            height,
            width,
            across,
            tiles,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return made


# Specialization on divisible numbers would compile the kernel again for many shapes.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["height", "width", "tiles_across", "tiles"]
)
def _lay_kernel(  # type: ignore[no-untyped-def]
    table, made, height, width, tiles_across, tiles, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Copy one tile of one photo; `table` is a `gpu_resample.Table`."""
    program = tl.program_id(0)
    canvas = program // tiles
    tile = program % tiles
    row = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    photo = tl.load(table + canvas * 5).to(tl.pointer_type(tl.uint8))
    channel = tl.load(table + canvas * 5 + 1)
    line = tl.load(table + canvas * 5 + 2)
    covered = (row < tl.load(table + canvas * 5 + 4)) & (column < tl.load(table + canvas * 5 + 3))
    inside = (row < height) & (column < width)
    area = height * width
    source = photo + row * line + column
    target = made + canvas.to(tl.int64) * 3 * area + row * width + column
    for band in tl.static_range(3):
        value = tl.load(source + band * channel, mask=covered, other=0)
        tl.store(target + band * area, value, mask=inside)
