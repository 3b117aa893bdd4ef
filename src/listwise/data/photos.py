"""Read and decode the file of a photo once: pixels, size, digest and thumbnail."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Union

import numpy as np
import numpy.typing as npt
from PIL import Image

from listwise.data.exif import exif_attributes
from listwise.data.images import (
    MAX_PIXELS,
    Box,
    ImageError,
    UprightPhoto,
    check_original_side,
    clip_box,
    cut_out,
    decode_image,
    image_size,
    opened,
    read_image_file,
    upright_rgb,
)
from listwise.data.images import reduced_size as reduced_size
from listwise.data.memory import as_photo

if TYPE_CHECKING:
    from torch import Tensor

THUMBNAIL_SIDE = 320
THUMBNAIL_BYTES = 45_000  # both stores of an index accept this much


Photo = Union[str, Path, Image.Image, npt.NDArray[Any], "Tensor", bytes, BinaryIO]
"""One photo: an image file, a Pillow image, an array or tensor of pixels, or the content of an
image file; see `listwise.data.memory.as_photo`."""


class Decoding(NamedTuple):
    """How photos are decoded.

    Attributes:
        max_side: long side that larger photos are reduced to. A JPEG file that is much larger is
            decoded at a half, quarter or eighth of its size, whatever else is requested.
        min_side: allows a JPEG file to be decoded at a half, quarter or eighth of its size if its
            short side stays at least this long.
        refuse_large: refuse photos, or boxes, with a long side above `ORIGINAL_SIDE`.
        thumbnail: also create a small JPEG file of each photo.
        local: also encode local features. It is called with the photo or its box as it was
            decoded, the left and top edge of the box, and the width before decoding divided by
            the width after it.
    """

    max_side: int | None = None
    min_side: int | None = None
    refuse_large: bool = False
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

    pixels: "Tensor"
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

    def exif(self) -> dict[str, str]:
        """Return the date, the place and the camera, as `exif_attributes` does."""
        with opened(self._stream()) as image:
            return exif_attributes(image)

    def image(self, min_side: int | None = None, max_side: int | None = None) -> Image.Image:
        """Return the upright photo or its box in RGB; the arguments are as in `Decoding`."""
        return self.upright(min_side, max_side).reduced(max_side).image

    def decode(self, how: Decoding = Decoding()) -> DecodedPhoto:  # noqa: B008
        """Decode the photo as `how` describes."""
        if how.refuse_large:
            check_original_side(self.path, image_size(self._stream(), self.box))
        photo = self.upright(how.min_side, how.max_side)
        small = thumbnail(photo.image) if how.thumbnail else b""
        local = how.local(photo.image, photo.corner, photo.scale) if how.local else b""
        pixels = whole_image(photo.reduced(how.max_side).image)
        return DecodedPhoto(pixels, *photo[1:], small, local)

    def upright(self, min_side: int | None = None, max_side: int | None = None) -> UprightPhoto:
        """Return the upright photo or its box as it was decoded, with its place in the file."""
        return decode_image(self._stream(), self.box, min_side, max_side)

    def _bytes(self) -> bytes:
        return read_image_file(self.path) if self.content is None else self.content

    def _stream(self) -> io.BytesIO:
        stream = io.BytesIO(self._bytes())
        stream.name = self.path
        return stream


def open_photo(photo: Photo, box: Box | None = None, max_side: int | None = None) -> Image.Image:
    """Return one photo, or a box in it, as an upright RGB image.

    Its long side is reduced to `max_side` if it is longer.
    """
    return decode_photo(photo, box, max_side).reduced(max_side).image


def decode_photo(
    photo: Photo,
    box: Box | None = None,
    max_side: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> UprightPhoto:
    """Decode one photo, or a box in it, as `decode_image` does."""
    given = as_photo(photo)
    if not isinstance(given, Image.Image):
        return decode_image(given, box, max_side=max_side, max_pixels=max_pixels)
    upright = upright_rgb(given)
    if box is None:
        return UprightPhoto(upright, upright.size, upright.size)
    corner = clip_box("the photo", box, upright.size)[:2]
    part = cut_out(upright, box, "the photo")
    return UprightPhoto(part, part.size, upright.size, corner)


def decode_or_error(file: PhotoFile, how: Decoding) -> DecodedPhoto | ImageError:
    """Decode a photo; return the error if it cannot be used."""
    try:
        return file.decode(how)
    except ImageError as error:
        return error


def whole_image(image: Image.Image, max_side: int | None = None) -> "Tensor":
    """Convert an RGB image, reduced if its long side exceeds `max_side`, to uint8 [3, H, W]."""
    import torch  # slow to import, and not needed to look for photos

    size = reduced_size(*image.size, max_side)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    planes = np.empty((3, image.height, image.width), dtype=np.uint8)
    for plane, band in zip(planes, image.split(), strict=True):
        plane[:] = np.asarray(band)
    return torch.from_numpy(planes)


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
