"""Read image files as upright 8-bit RGB."""

import math
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import (  # each registers its format; `Image.init` would import every reader of Pillow
    BmpImagePlugin,  # noqa: F401
    GifImagePlugin,  # noqa: F401
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
    WebPImagePlugin,  # noqa: F401
    features,
)

from listwise.data.headers import MAX_PARTS, has_bounded_header
from listwise.errors import InputError
from listwise.optional import MissingDependencyError, requires
from listwise.progress import count_of

with suppress(ImportError):  # since Pillow 11.3
    from PIL import AvifImagePlugin  # noqa: F401

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge in pixels of the upright image."""

Source = str | Path | BinaryIO
"""An image file: its path, or its content as a stream, whose `name` is used in messages."""

HEIF_SUFFIXES = frozenset({".heic", ".heif", ".hif"})
"""Endings of files that are read if pillow-heif is installed."""

IMAGE_SUFFIXES = HEIF_SUFFIXES | {
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".tif", ".tiff", ".gif", ".bmp")
}
"""Endings of image files in a folder, in lower or upper case."""

MAX_PIXELS = 128_000_000
"""Files that need the memory of more pixels (`decoding_pixels`) are not decoded."""

LARGE_PIXELS = 2**24
"""Files that need the memory of more pixels are decoded one at a time."""

ORIGINAL_SIDE = 2048
"""Longest side of a photo that a CPU encodes at its original size: the memory that a network takes
grows with the pixels."""

DECODED_SIDE = 1024
"""Photos with a longer long side keep at least this one when they are decoded at a part of their
size: local features and thumbnails need it."""

# The beginning of a file, all of it if the photo is small.
FIRST_BYTES = 2**17

_STRIP = 64  # lines that are converted at a time
# Enough to identify the format of a file.
_PREFIX = 64

_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP")
# Of their decoders, several times as much memory per pixel as of the others.
_MEMORY = {"WEBP": 2, "AVIF": 2, "HEIF": 2}
_HEIF_BRANDS = {*(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")}
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
    """An image file needs the memory of more pixels than `MAX_PIXELS`."""


def check_original_side(path: Source, size: tuple[int, int]) -> None:
    """Raise an `ImageError` for a photo that is too large to be encoded at its original size."""
    if max(size) > ORIGINAL_SIDE:
        raise ImageError(
            path,
            f"has a long side of {max(size)} pixels, more than the {ORIGINAL_SIDE} that are "
            "encoded at their original size on a CPU: reduce it, or choose a maximum size",
        )


class UprightPhoto(NamedTuple):
    """An upright RGB photo, or its box, which may have been decoded at a part of its size.

    Attributes:
        image: the photo or its box.
        size: width and height of the photo, or of its box, in the file.
        whole: width and height of the whole photo in the file.
        corner: left and top edge of the box in the whole photo.
    """

    image: Image.Image
    size: tuple[int, int]
    whole: tuple[int, int]
    corner: tuple[int, int] = (0, 0)

    @property
    def scale(self) -> float:
        """The width in the file divided by the width of `image`."""
        return self.size[0] / self.image.width

    def reduced(self, max_side: int | None) -> "UprightPhoto":
        """Return the same photo, with its long side reduced to `max_side` if it is longer."""
        if max_side is None or max(self.image.size) <= max_side:
            return self
        size = reduced_size(*self.size, max_side)
        image = self.image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
        return self._replace(image=image)


def reduced_size(width: int, height: int, max_side: int | None) -> tuple[int, int]:
    """Return width and height of a photo whose long side is reduced to `max_side`."""
    if max_side is None or max(width, height) <= max_side:
        return width, height
    scale = max_side / max(width, height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def load_image(
    path: Source,
    box: Box | None = None,
    min_side: int | None = None,
    max_side: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> Image.Image:
    """Decode an image file to upright RGB, on white where it is transparent.

    Args:
        path: a JPEG, PNG, WebP, AVIF, HEIC, TIFF, GIF or BMP file, or its content; the first frame
            of an animation.
        box: the part to keep, in pixels of the upright image, clipped to it.
        min_side: allows a JPEG file to be decoded at a half, quarter or eighth of its size, which
            is much faster, if its short side stays at least this long. Ignored with `box`.
        max_side: long side that a larger photo, or its box, is reduced to. A JPEG file that is much
            larger is decoded at a half, quarter or eighth of its size. The pixels depend only on
            the file, `box` and `max_side`.
        max_pixels: maximum of `decoding_pixels`.

    Raises:
        ImageError: the file is missing, broken or not an image, or needs too much memory.
    """
    return decode_image(path, box, min_side, max_side, max_pixels).reduced(max_side).image


def decoding_pixels(path: Source, box: Box | None = None, max_side: int | None = None) -> int:
    """Return how many pixels of an uncompressed image take as much memory as decoding this file.

    This reads the header only. A decoder takes about 12 bytes of memory for each of these pixels.

    Raises:
        ImageError: as `load_image`, except for damage after the header.
    """
    with opened(path) as image:
        return _draft(image, path, box, None, max_side)


def decode_image(
    path: Source,
    box: Box | None = None,
    min_side: int | None = None,
    max_side: int | None = None,
    max_pixels: int = MAX_PIXELS,
) -> UprightPhoto:
    """Decode an image file as `load_image` does.

    `max_side` only allows to decode at a part of the size; `reduced` does the rest.
    """
    with ExitStack() as stack:
        image = stack.enter_context(opened(path, max_pixels))
        whole = upright_size(image)
        declared = image.size
        pixels = _draft(image, path, box, min_side, max_side)
        advice = "reduce the photo, or give a maximum size"
        _check_pixels(path, declared, pixels, max_pixels, advice)
        if pixels > LARGE_PIXELS:
            stack.enter_context(one_large)
        image.load()
        if image.format == "PNG":
            whole = upright_size(image)  # its orientation may follow its pixels
        left, top, right, bottom = (0, 0, *whole) if box is None else clip_box(path, box, whole)
        size = right - left, bottom - top
        factor = 1
        if max_side is not None and (min_side is None or box is not None):
            long_side = max(size) * max(image.size) / max(whole)
            factor = int(long_side / max(3 * max_side, DECODED_SIDE))
        upright = upright_rgb(image, factor)
        if box is not None:
            # Outwards to whole pixels of the photo as it was decoded.
            (width, height), (wide, high) = whole, upright.size
            edges = left * wide // width, top * high // height
            ends = -(-right * wide // width), -(-bottom * high // height)
            upright = cut_out(upright, (*edges, *ends), path)
    return UprightPhoto(upright, size, whole, (left, top))


def _draft(
    image: ImageFile.ImageFile,
    path: Source,
    box: Box | None,
    min_side: int | None,
    max_side: int | None,
) -> int:
    """Choose the part of its size at which a JPEG file is decoded; return `decoding_pixels`."""
    least = _least_pixels(image)
    if not _is_jpeg(image):
        return least
    whole = upright_size(image)
    left, top, right, bottom = (0, 0, *whole) if box is None else clip_box(path, box, whole)
    room = []
    if max_side is not None:
        # Twice the size that is needed: a better filter reduces the rest.
        room += [max(right - left, bottom - top) / max(2 * max_side, DECODED_SIDE)]
    if min_side is not None and box is None:
        room += [min(whole) / min_side]
    part = max((part for part in (8, 4, 2) if part <= min(room, default=1)), default=1)
    image.draft(None, (max(1, image.width // part), max(1, image.height // part)))
    return max(least, image.width * image.height)


def _least_pixels(image: ImageFile.ImageFile) -> int:
    """Return `decoding_pixels` for an image that is decoded at the smallest part of its size."""
    declared = image.width * image.height
    if _is_jpeg(image):
        # A progressive file: its coefficients, two bytes for each value.
        return declared * len(image.getbands()) // 6
    return declared * _MEMORY.get(str(image.format), 1)


def _is_jpeg(image: Image.Image) -> bool:
    return isinstance(image, JpegImagePlugin.JpegImageFile)  # or a file of several JPEG pictures


def _check_pixels(
    path: Source, size: tuple[int, int], pixels: int, limit: int, advice: str = "reduce the photo"
) -> None:
    if pixels > limit:
        allowed = math.prod(size) * limit / pixels / 1e6
        raise TooManyPixelsError(
            path,
            f"declares {size[0]} × {size[1]} pixels, more than the {allowed:.0f} million allowed: "
            f"{advice}",
        )


one_large: AbstractContextManager[Any] = threading.Lock()
"""Held while a large photo is decoded; the workers of a pipeline share one."""


def upright_rgb(image: Image.Image, factor: int = 1) -> Image.Image:
    """Convert an image of any mode to upright RGB, on white where it is transparent.

    `factor` divides the width and height, which takes less memory than to reduce the result.
    """
    image.load()
    upright = _to_rgb(image, factor)
    # Pillow turns TIFF files while it loads them.
    turn = None if image.format == "TIFF" else _TURNS.get(exif_orientation(image))
    if turn is not None:
        return upright.transpose(turn)
    return upright.copy() if upright is image else upright


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


def image_names(folder: str | Path, ignored: Counter[str] | None = None) -> list[str]:
    """List the same files as `list_images`, by their paths inside of the folder.

    Args:
        folder: the folder.
        ignored: counts the other files by their endings, in lower case.
    """
    if not os.path.isdir(folder):
        raise InputError(f"{folder}: no such folder")
    suffixes = IMAGE_SUFFIXES if find_spec("pillow_heif") else IMAGE_SUFFIXES - HEIF_SUFFIXES
    names, others = [], Counter[str]() if ignored is None else ignored
    for name in _walk(str(folder), "", ()):
        suffix = os.path.splitext(name)[1].lower()
        if suffix in suffixes:
            names.append(name)
        else:
            others[printable(suffix)] += 1
    return names


def describe_ignored(ignored: Counter[str]) -> str:
    """Return a sentence about ignored files, such as "ignored 3 files: 2 .cr2, 1 .mov"."""
    kinds = sorted(ignored.items(), key=lambda kind: (-kind[1], kind[0]))
    named = [f"{count} {suffix or 'without an ending'}" for suffix, count in kinds[:5]]
    if len(kinds) > 5:
        named.append(f"{sum(count for _, count in kinds[5:])} others")
    heif = " and ".join(sorted(HEIF_SUFFIXES & ignored.keys()))
    hint = f"; pip install 'listwise[heic]' reads {heif}" if heif else ""
    return f"ignored {count_of(ignored.total(), 'file')}: {', '.join(named)}{hint}"


def _walk(folder: str, inside: str, above: tuple[str, ...]) -> Iterator[str]:
    """List files below `folder`; follow links unless they lead to a folder above.

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
        else:
            yield inside + entry.name


@contextmanager
def opened(path: Source, max_pixels: int = MAX_PIXELS) -> Iterator[ImageFile.ImageFile]:
    """Open an image, read its header and check its size; failures become `ImageError`.

    An image is refused if it needs the memory of more than `max_pixels` pixels at any part of its
    size.
    """
    with (
        reading_errors(path),
        open(path, "rb") if isinstance(path, str | Path) else nullcontext(path) as file,
    ):
        image = _identify(path, file)
        _check_pixels(path, image.size, _least_pixels(image), max_pixels)
        yield image


@contextmanager
def reading_errors(path: Source) -> Iterator[None]:
    """Turn every failure while an image file is read or decoded into an `ImageError`."""
    if isinstance(path, str | Path) and printable(path) != str(path):
        # Descriptor files, indexes and JSON store text, which cannot hold such a path.
        raise ImageError(path, "the path is not UTF-8: rename the file or its folder")
    try:
        _check_regular(path)
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
    factory = _plugin(path, file.read(_PREFIX))
    if not has_bounded_header(file):
        raise ImageError(path, f"has more than {MAX_PARTS} parts beside its pixels")
    file.seek(0)
    # Without the name, which would map some files into memory, where TIFF files are not turned.
    image = factory(file, "")
    if 0 in image.size:
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
    brands = _brands(prefix)
    if not brands.isdisjoint((b"avif", b"avis")):
        if "AVIF" not in Image.OPEN or not features.check("avif"):
            raise ImageError(path, "an AVIF photo needs Pillow 11.3: pip install -U pillow")
        return Image.OPEN["AVIF"][0]
    if not brands.isdisjoint(_HEIF_BRANDS):
        try:
            with requires("heic", "a HEIC photo"):
                from pillow_heif import HeifImageFile
        except MissingDependencyError as error:
            raise ImageError(path, str(error)) from None
        return HeifImageFile  # type: ignore[no-any-return]
    raise ImageError(path, "not a JPEG, PNG, WebP, AVIF, HEIC, TIFF, GIF or BMP image")


def _brands(prefix: bytes) -> set[bytes]:
    """Return the formats that a file of the ISO base media format names at its beginning."""
    if prefix[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(prefix[:4], "big"), len(prefix))
    return {prefix[start : start + 4] for start in (8, *range(16, end, 4))}


def read_image_file(path: str | Path) -> bytes:
    """Read an image file; of any other file, read only the beginning and raise an error."""
    # Without a buffer: one process reads thousands of files per second for a GPU.
    with reading_errors(path), open(path, "rb", buffering=0) as file:
        first = file.read(FIRST_BYTES) or b""
        if not first.startswith(b"\xff\xd8\xff"):
            _plugin(path, first[:_PREFIX])
        return first + file.readall()


def _check_regular(path: Source) -> None:
    """Raise an `ImageError` for a pipe, which has no end; opening it would wait for a writer."""
    if isinstance(path, str | Path):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ImageError(path, "is not a regular file")


def exif_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if the EXIF data cannot be read."""
    try:
        orientation = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:
        return 1
    return orientation if orientation in _TURNS else 1


def _to_rgb(image: Image.Image, factor: int) -> Image.Image:
    """Convert to RGB and divide the sides by `factor`; return the image itself if it is as wanted.

    Few copies are made of the image in its own size.
    """
    found = image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        found = Image.fromarray(_gray_to_8_bits(image))
    elif image.mode in ("1", "P", "PA") or "transparency" in image.info:  # not to be averaged
        found = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if factor > 1:
        found = found.reduce(factor)
    if found.has_transparency_data:
        found = found if found.mode == "RGBA" else found.convert("RGBA")
        white = Image.new("RGB", found.size, "white")
        white.paste(found, mask=found)
        return white
    return found if found.mode == "RGB" else found.convert("RGB")


def _gray_to_8_bits(image: Image.Image) -> np.ndarray:
    """Scale 16-bit, 32-bit or float gray values so that white is 255: uint8 [H, W]."""

    def strips() -> Iterator[tuple[int, np.ndarray]]:
        """Few lines at a time: all at once would take much memory."""
        for top in range(0, image.height, _STRIP):
            box = (0, top, image.width, min(top + _STRIP, image.height))
            values = np.asarray(image.crop(box)).astype(np.float32)
            values[~np.isfinite(values)] = 0.0
            yield top, values

    black, white = 0.0, 65535.0
    if image.mode.startswith("I;16"):
        white = 2.0 ** _tiff_tag(image, 258, 16) - 1.0
    elif image.format != "PNG":
        # 32-bit files do not define white: use the smallest usual range that fits the values.
        ranges = [(float(values.min()), float(values.max())) for _, values in strips()]
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        usual = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        fitting = [limit for limit in usual if low >= 0.0 and high <= limit]
        black, white = (0.0, fitting[0]) if fitting else (low, max(high, low + 1.0))
    gray = np.empty((image.height, image.width), np.uint8)
    for top, values in strips():
        scaled = (values - black) * (255.0 / (white - black))
        if _tiff_tag(image, 262, 1) == 0:  # "white is zero", which Pillow does not convert
            scaled = 255.0 - scaled
        gray[top : top + _STRIP] = np.clip(scaled + 0.5, 0.0, 255.0).astype(np.uint8)
    return gray


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
