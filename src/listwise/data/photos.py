"""A photo's file: opened once, decoded once, and all that is wanted of it comes from that."""

import hashlib
import io
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from listwise.data.images import (
    Box,
    clip_box,
    decode_opened,
    image_size,
    opened,
    read_image_file,
    upright_size,
)

THUMBNAIL_SIDE = 320
THUMBNAIL_BYTES = 45_000  # every search engine can store this much


class Decoding(NamedTuple):
    """How photos are decoded.

    `max_side` is the long side that larger photos are reduced to. `min_side` allows a JPEG file
    to be decoded at a half, quarter or eighth of its size if its short side keeps this length.
    `thumbnail` makes a small JPEG file of each photo.
    """

    max_side: int | None = None
    min_side: int | None = None
    thumbnail: bool = False


class DecodedPhoto(NamedTuple):
    """An upright photo or its box: `pixels` uint8 [3, H, W], reduced.

    `size` is the width and height of the photo, or of its box, before it was reduced. The box
    begins at `corner` of the whole photo, whose width and height are `whole`. `thumbnail` is the
    content of a JPEG file, empty if none was wanted.
    """

    pixels: Tensor
    size: tuple[int, int]
    whole: tuple[int, int]
    corner: tuple[int, int] = (0, 0)
    thumbnail: bytes = b""


class PhotoFile(NamedTuple):
    """A photo's file and the box that is meant; `content` is there once the file was read.

    The methods read the file when its content is not there. All raise `ImageError` for a file
    that cannot be used.
    """

    path: str
    box: Box | None = None
    content: bytes | None = None

    def read(self) -> "PhotoFile":
        """The same with its content."""
        return self if self.content is not None else self._replace(content=self._bytes())

    def size(self) -> tuple[int, int]:
        """Width and height of the upright whole photo, from the file's header."""
        return image_size(self._stream())

    def digest(self) -> str:
        """Names a photo by the content of its file, and by its box."""
        return photo_digest(self._bytes(), self.box)

    def image(self, min_side: int | None = None) -> Image.Image:
        """The upright photo or its box in RGB; `min_side` as in `Decoding`."""
        stream = self._stream()
        with opened(stream) as image:
            return decode_opened(image, stream, self.box, min_side)

    def decode(self, how: Decoding = Decoding()) -> DecodedPhoto:  # noqa: B008
        """The photo's pixels and what else is wanted of it."""
        stream = self._stream()
        with opened(stream) as image:
            whole = upright_size(image)
            photo = decode_opened(image, stream, self.box, how.min_side)
        corner, size = (0, 0), photo.size
        if self.box is not None:
            corner = clip_box(self.path, self.box, whole)[:2]
        elif how.min_side is not None:
            size = whole
        small = thumbnail(photo) if how.thumbnail else b""
        return DecodedPhoto(whole_image(photo, how.max_side), size, whole, corner, small)

    def _bytes(self) -> bytes:
        return read_image_file(self.path) if self.content is None else self.content

    def _stream(self) -> io.BytesIO:
        stream = io.BytesIO(self._bytes())
        stream.name = self.path
        return stream


def whole_image(image: Image.Image, max_side: int | None = None) -> Tensor:
    """A whole RGB image, reduced if its long side exceeds `max_side`: uint8 [3, H, W]."""
    size = reduced_size(*image.size, max_side)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    planes = np.empty((3, image.height, image.width), dtype=np.uint8)
    for plane, band in zip(planes, image.split(), strict=True):
        plane[:] = np.asarray(band)
    return torch.from_numpy(planes)


def reduced_size(width: int, height: int, max_side: int | None) -> tuple[int, int]:
    """Width and height of a photo when its long side is reduced to `max_side`."""
    if max_side is None or max(width, height) <= max_side:
        return width, height
    scale = max_side / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def thumbnail(photo: Image.Image) -> bytes:
    """A small JPEG file of an RGB photo, its long side reduced to `THUMBNAIL_SIDE`."""
    size = reduced_size(*photo.size, THUMBNAIL_SIDE)
    if size != photo.size:
        photo = photo.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0)
    for quality in (82, 65, 45, 25):
        file = io.BytesIO()
        photo.save(file, "JPEG", quality=quality)
        if file.tell() <= THUMBNAIL_BYTES:
            return file.getvalue()
    return b""


def photo_digest(content: bytes, box: Box | None = None) -> str:
    """Names a photo by the content of its file, and by the part of it that is meant."""
    digest = hashlib.blake2b(content, digest_size=16)
    if box is not None:
        digest.update(repr(tuple(map(float, box))).encode())
    return digest.hexdigest()
