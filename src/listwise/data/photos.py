"""Read and decode the file of a photo once: pixels, size, digest and thumbnail."""

import hashlib
import io
from collections.abc import Callable
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
THUMBNAIL_BYTES = 45_000  # both stores of an index accept this much


class Decoding(NamedTuple):
    """How photos are decoded.

    Attributes:
        max_side: long side that larger photos are reduced to.
        min_side: allows a JPEG file to be decoded at a half, quarter or eighth of its size if its
            short side stays at least this long.
        thumbnail: also create a small JPEG file of each photo.
        local: also encode local features. It is called with the photo or its box as it was
            decoded, the left and top edge of the box, and the width before decoding divided by
            the width after it.
    """

    max_side: int | None = None
    min_side: int | None = None
    thumbnail: bool = False
    local: Callable[[Image.Image, tuple[int, int], float], bytes] | None = None


class DecodedPhoto(NamedTuple):
    """A decoded upright photo, or its box.

    Attributes:
        pixels: uint8 [3, H, W], reduced.
        size: width and height of the photo, or of its box, before it was reduced.
        whole: width and height of the whole photo.
        corner: left and top edge of the box in the whole photo.
        thumbnail: content of a small JPEG file, empty if not requested.
        local: encoded local features, empty if not requested.
    """

    pixels: Tensor
    size: tuple[int, int]
    whole: tuple[int, int]
    corner: tuple[int, int] = (0, 0)
    thumbnail: bytes = b""
    local: bytes = b""


class PhotoFile(NamedTuple):
    """The file of a photo, its box, and its content once it was read.

    The methods read the file if `content` is None. They raise `ImageError` for a file that cannot
    be used.
    """

    path: str
    box: Box | None = None
    content: bytes | None = None

    def read(self) -> "PhotoFile":
        """Return the same file with its content."""
        return self if self.content is not None else self._replace(content=self._bytes())

    def size(self) -> tuple[int, int]:
        """Return width and height of the whole upright photo, from the header of the file."""
        return image_size(self._stream())

    def digest(self) -> str:
        """Return a hash of the content of the file and of its box."""
        return photo_digest(self._bytes(), self.box)

    def image(self, min_side: int | None = None) -> Image.Image:
        """Return the upright photo or its box in RGB; `min_side` as in `Decoding`."""
        stream = self._stream()
        with opened(stream) as image:
            return decode_opened(image, stream, self.box, min_side)

    def decode(self, how: Decoding = Decoding()) -> DecodedPhoto:  # noqa: B008
        """Decode the photo as `how` describes."""
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
        local = how.local(photo, corner, size[0] / photo.width) if how.local else b""
        return DecodedPhoto(whole_image(photo, how.max_side), size, whole, corner, small, local)

    def _bytes(self) -> bytes:
        return read_image_file(self.path) if self.content is None else self.content

    def _stream(self) -> io.BytesIO:
        stream = io.BytesIO(self._bytes())
        stream.name = self.path
        return stream


def whole_image(image: Image.Image, max_side: int | None = None) -> Tensor:
    """Convert an RGB image, reduced if its long side exceeds `max_side`, to uint8 [3, H, W]."""
    size = reduced_size(*image.size, max_side)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    planes = np.empty((3, image.height, image.width), dtype=np.uint8)
    for plane, band in zip(planes, image.split(), strict=True):
        plane[:] = np.asarray(band)
    return torch.from_numpy(planes)


def reduced_size(width: int, height: int, max_side: int | None) -> tuple[int, int]:
    """Return width and height of a photo whose long side is reduced to `max_side`."""
    if max_side is None or max(width, height) <= max_side:
        return width, height
    scale = max_side / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def thumbnail(photo: Image.Image) -> bytes:
    """Create a small JPEG file of an RGB photo; its long side is at most `THUMBNAIL_SIDE`."""
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
    """Return a hash of the content of a photo's file, and of its box if it has one."""
    digest = hashlib.blake2b(content, digest_size=16)
    if box is not None:
        digest.update(repr(tuple(map(float, box))).encode())
    return digest.hexdigest()
