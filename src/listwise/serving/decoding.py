"""Photos of requests, decoded at the size that is needed."""

from typing import NamedTuple

import numpy as np
from PIL import Image

from listwise.data.images import (
    Box,
    ImageError,
    Source,
    TooManyPixelsError,
    clip_box,
    cut_out,
    image_size,
    opened,
    upright_rgb,
    upright_size,
)
from listwise.data.photos import reduced_size
from listwise.search.entries import Float32
from listwise.serving.uploads import Upload

# A JPEG file is decoded in one pass per scan. Progressive files have about ten scans.
SCANS = 100
START_OF_JPEG = b"\xff\xd8"
START_OF_SCAN = b"\xff\xda"


class QueryPhoto(NamedTuple):
    """An upright photo or its box, reduced; `corner` and `scale` place it in the whole photo."""

    image: Image.Image
    corner: tuple[int, int]
    scale: float

    def in_whole_photo(self, points: Float32) -> Float32:
        """Points [n, 2] of the reduced image in pixels of the whole photo."""
        placed = (points + 0.5) * self.scale - 0.5 + np.array(self.corner, np.float32)
        return placed.astype(np.float32)


def check_photo(photo: Upload, max_pixels: int) -> None:
    """Refuse a file that is not a photo, or too large, from its header.

    Raises:
        TooManyPixelsError: it declares more than `max_pixels` pixels.
        ImageError: it is not a photo, or takes too many passes to decode.
    """
    check_pixels(photo, max_pixels)
    content = photo.getvalue()
    if content.startswith(START_OF_JPEG):
        scans = content.count(START_OF_SCAN)
        if scans > SCANS:
            raise ImageError(photo, f"has {scans} scans, more than the {SCANS} allowed")


def check_pixels(source: Source, max_pixels: int) -> int:
    """The number of pixels that a photo declares, if it is allowed."""
    width, height = image_size(source)
    if width * height > max_pixels:
        allowed = f"{max_pixels / 1e6:g} million"
        raise TooManyPixelsError(
            source, f"has {width} × {height} pixels, more than the {allowed} allowed"
        )
    return width * height


def decode_query(photo: Source, box: Box | None, max_side: int) -> QueryPhoto:
    """Decode a photo, cut out its box, and reduce the long side to `max_side`.

    A JPEG file that is much larger is decoded at a half, quarter or eighth of its size.

    Raises:
        ImageError: the photo is damaged, or the box is outside of it.
    """
    with opened(photo) as file:
        whole = upright_size(file)
        left, top, right, bottom = (0, 0, *whole) if box is None else clip_box(photo, box, whole)
        # Twice the size that is needed: what remains to be reduced is reduced by a better filter.
        room = max(1.0, max(right - left, bottom - top) / (2 * max_side))
        file.draft(None, (int(file.size[0] / room), int(file.size[1] / room)))
        image = upright_rgb(file)
    drafted = whole[0] / image.width
    if box is not None:
        part = (left / drafted, top / drafted, right / drafted, bottom / drafted)
        image = cut_out(image, part, photo)
    size = reduced_size(*image.size, max_side)
    scale = drafted * image.width / size[0]
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    return QueryPhoto(image, (left, top), scale)
