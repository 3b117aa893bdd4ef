"""Read image files as upright 8-bit RGB."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import (  # each registers its format; `Image.init` would import every reader of Pillow
    GifImagePlugin,  # noqa: F401
    Image,
    ImageFile,
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
    WebPImagePlugin,  # noqa: F401
)

from listwise.errors import InputError

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge in pixels of the upright image."""

Source = str | Path | BinaryIO
"""An image file: its path, or its content as a stream, whose `name` is used in messages."""

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".gif"})
"""Endings of image files in a folder, in lower or upper case."""

MAX_PIXELS = 256_000_000
"""Files that declare more pixels are refused before they are decoded."""

# The beginning of a file, all of it if the photo is small.
FIRST_BYTES = 2**17

_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF")
ORIENTATION_TAG = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(InputError):
    """An image file cannot be used; `path` and `reason` describe the failure."""

    def __init__(self, path: Source, reason: str) -> None:
        name = path if isinstance(path, str | Path) else getattr(path, "name", "image")
        self.path = printable(name)
        super().__init__(f"{self.path}: {reason}")
        self.reason = reason

    def __reduce__(self) -> tuple[type["ImageError"], tuple[str, str]]:
        return type(self), (self.path, self.reason)


def printable(path: str | Path) -> str:
    r"""A path as text that can be printed and stored: bytes that are not UTF-8 become \\udcXX."""
    return str(path).encode(errors="backslashreplace").decode()


class TooManyPixelsError(ImageError):
    """An image file declares more pixels than `MAX_PIXELS`."""


def load_image(path: Source, box: Box | None = None, min_side: int | None = None) -> Image.Image:
    """Decode an image file to upright RGB, on white where it is transparent.

    Args:
        path: a JPEG, PNG, WebP, TIFF or GIF file, or its content; the first frame of an animation.
        box: the part to keep, clipped to the image.
        min_side: allows a JPEG file to be decoded at a half, quarter or eighth of its size, which
            is much faster, if its short side stays at least this long. Ignored with `box`.

    Raises:
        ImageError: the file is missing, broken, not an image, or larger than `MAX_PIXELS`.
    """
    with opened(path) as image:
        return decode_opened(image, path, box, min_side)


def decode_opened(
    image: ImageFile.ImageFile, path: Source, box: Box | None = None, min_side: int | None = None
) -> Image.Image:
    """Decode an image that `opened` has opened, as `load_image` does."""
    if min_side is not None and box is None:
        image.draft(None, (min_side, min_side))
    upright = upright_rgb(image)
    return upright if box is None else cut_out(upright, box, path)


def upright_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any mode to upright RGB, on white where it is transparent."""
    image.load()
    upright = _to_rgb(image)
    # Pillow turns TIFF files while it loads them.
    turn = None if image.format == "TIFF" else _TURNS.get(exif_orientation(image))
    return upright if turn is None else upright.transpose(turn)


def cut_out(photo: Image.Image, box: Box, path: Source) -> Image.Image:
    """Cut a box out of an upright photo, clipped to the photo."""
    left, top, right, bottom = clip_box(path, box, photo.size)
    # `crop` warns of large boxes, which MAX_PIXELS allows.
    return photo.transform(
        (right - left, bottom - top),
        Image.Transform.EXTENT,
        (left, top, right, bottom),
        Image.Resampling.NEAREST,
    )


def image_size(path: Source, box: Box | None = None) -> tuple[int, int]:
    """Return width and height of `load_image(path, box)`, reading only the file's header.

    Raises:
        ImageError: as `load_image`, except for damage after the header.
    """
    with opened(path) as image:
        size = upright_size(image)
        if box is None:
            return size
        left, top, right, bottom = clip_box(path, box, size)
        return right - left, bottom - top


def upright_size(image: ImageFile.ImageFile) -> tuple[int, int]:
    """Return width and height, when upright, of an image that `opened` has opened."""
    width, height = image.size
    # For a PNG file without EXIF data in its header, reading EXIF would decode all of it.
    known = image.format != "PNG" or "exif" in image.info
    orientation = exif_orientation(image) if known else 1
    if image.format == "TIFF":  # versions of Pillow differ in whether `size` is upright
        width, height = _tiff_tag(image, 256, width), _tiff_tag(image, 257, height)
    return (height, width) if orientation >= 5 else (width, height)


def list_images(folder: str | Path) -> list[Path]:
    """List all image files below a folder by their suffix, sorted, without hidden ones."""
    return [Path(folder, name) for name in image_names(folder)]


def image_names(folder: str | Path) -> list[str]:
    """List the same files as `list_images`, by their paths inside of the folder."""
    if not os.path.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    return list(_walk(str(folder), "", ()))


def _walk(folder: str, inside: str, above: tuple[str, ...]) -> Iterator[str]:
    """List image files below `folder`; follow links unless they lead to a folder above.

    Paths are text: a `Path` for each of thousands of files takes long.
    """
    real = os.path.realpath(folder)
    if real in above:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror})") from None
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _walk(entry.path, f"{inside}{entry.name}/", (*above, real))
        elif os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:
            yield inside + entry.name


@contextmanager
def opened(path: Source) -> Iterator[ImageFile.ImageFile]:
    """Open an image, read its header and check its size; failures become `ImageError`."""
    with (
        reading_errors(path),
        open(path, "rb") if isinstance(path, str | Path) else nullcontext(path) as file,
    ):
        yield _identify(path, file)


@contextmanager
def reading_errors(path: Source) -> Iterator[None]:
    """Turn every failure while an image file is read or decoded into an `ImageError`."""
    if isinstance(path, str | Path) and printable(path) != str(path):
        # Descriptor files, indexes and JSON store text, which cannot hold such a path.
        raise ImageError(path, "the path is not UTF-8: rename the file or its folder")
    try:
        yield
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(path, "no such file") from None
    except IsADirectoryError:
        raise ImageError(path, "is a folder, not an image file") from None
    except PermissionError:
        raise ImageError(path, "may not be read (permission denied)") from None
    except Exception as error:  # decoders raise many kinds of errors for damaged files
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise ImageError(path, f"broken or truncated ({said})") from error


def _identify(path: Source, file: BinaryIO) -> ImageFile.ImageFile:
    """Open an image by its content, with the allowed Pillow plugins only.

    `Image.open` has a global limit on pixels, and warns of sizes that are allowed here.
    """
    file.seek(0)
    factory = _plugin(path, file.read(16))
    file.seek(0)
    image = factory(file, os.fspath(path) if isinstance(path, str | Path) else "")
    width, height = image.size
    if width * height > MAX_PIXELS:
        limit = MAX_PIXELS // 1_000_000
        raise TooManyPixelsError(
            path, f"declares {width} × {height} pixels, more than the {limit} million allowed"
        )
    if width * height == 0:
        raise ImageError(path, "has no pixels")
    return image


def _plugin(path: Source, prefix: bytes) -> Callable[..., ImageFile.ImageFile]:
    """Return the Pillow reader for a file that begins with these bytes."""
    if not prefix:
        raise ImageError(path, "empty file (0 bytes)")
    for name in _FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is not None and accept(prefix) is True:
            return factory
    raise ImageError(path, "not a JPEG, PNG, WebP, TIFF or GIF image")


def read_image_file(path: str | Path) -> bytes:
    """Read an image file; of any other file, read only the beginning and raise an error."""
    # Without a buffer: one process reads thousands of files per second for a GPU.
    with reading_errors(path), open(path, "rb", buffering=0) as file:
        first = file.read(FIRST_BYTES) or b""
        if not first.startswith(b"\xff\xd8\xff"):
            _plugin(path, first[:16])
        return first + file.readall()


def exif_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if the EXIF data cannot be read."""
    try:
        orientation = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:
        return 1
    return orientation if orientation in _TURNS else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_gray_to_8_bits(image)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _gray_to_8_bits(image: Image.Image) -> np.ndarray:
    """Scale 16-bit, 32-bit or float gray values so that white is 255: uint8 [H, W]."""
    values = np.asarray(image).astype(np.float32)
    values[~np.isfinite(values)] = 0.0
    black, white = 0.0, 65535.0
    if image.mode.startswith("I;16"):
        white = 2.0 ** _tiff_tag(image, 258, 16) - 1.0
    elif image.format != "PNG":
        # 32-bit files do not define white: use the smallest usual range that fits the values.
        low, high = float(values.min()), float(values.max())
        usual = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        fitting = [limit for limit in usual if low >= 0.0 and high <= limit]
        black, white = (0.0, fitting[0]) if fitting else (low, max(high, low + 1.0))
    scaled = (values - black) * (255.0 / (white - black))
    if _tiff_tag(image, 262, 1) == 0:  # "white is zero", which Pillow does not convert
        scaled = 255.0 - scaled
    return np.asarray(np.clip(scaled + 0.5, 0.0, 255.0).astype(np.uint8))


def _tiff_tag(image: Image.Image, tag: int, default: int) -> int:
    value = getattr(image, "tag_v2", {}).get(tag, default)
    return int(value[0] if isinstance(value, tuple) else value)


def clip_box(path: Source, box: Box, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Round a box to whole pixels and clip it to an image; raise an error if it is empty."""
    width, height = size
    if all(math.isfinite(edge) for edge in box):
        left, top = max(0, round(box[0])), max(0, round(box[1]))
        right, bottom = min(width, round(box[2])), min(height, round(box[3]))
        if left < right and top < bottom:
            return left, top, right, bottom
    shown = ", ".join(f"{edge:g}" for edge in box)
    raise ImageError(path, f"box ({shown}) is empty or outside the image of {width} × {height}")
