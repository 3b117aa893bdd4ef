"""Check which photos can be used."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from listwise.data.headers import jpeg_header_size
from listwise.data.images import MAX_PIXELS, ImageError, image_size, reading_errors
from listwise.data.labelled import Images, LabelledImages
from listwise.data.photos import PhotoFile
from listwise.errors import InputError

# Enough for the header of a JPEG file, unless it has much metadata.
HEADER_BYTES = 2**14


@dataclass(frozen=True, eq=False)
class ImageReport:
    """The result of `check_images`.

    Attributes:
        sizes: widths and heights of the N usable images or their boxes, int64 [N, 2].
        broken: an error for each unusable image.
        single: names of the classes with only one usable image.
    """

    sizes: npt.NDArray[np.int64]
    broken: tuple[ImageError, ...]
    single: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the problems, one sentence each; empty if there are none."""
        lines = []
        if count := len(self.broken):
            what = "1 photo" if count == 1 else f"{count} photos"
            named = first_names([f"{error.path} ({error.reason})" for error in self.broken], "; ")
            lines.append(f"skipped {what} that cannot be used: {named}")
        if count := len(self.single):
            what = "1 class has" if count == 1 else f"{count} classes have"
            named = first_names(self.single, ", ")
            lines.append(f"{what} only one photo, so a search cannot find another: {named}")
        return lines


ImagesT = TypeVar("ImagesT", bound=Images)


def check_images(
    images: ImagesT, strict: bool = False, workers: int | None = None
) -> tuple[ImagesT, ImageReport]:
    """Read the header of every file, and return the usable images and a report.

    Damage after the header is found only when an image is decoded.

    Args:
        images: N images, labelled or not.
        strict: raise the error of the first unusable image.
        workers: number of threads; chosen from the number of cores by default.

    Returns:
        The usable images, and an `ImageReport`.

    Raises:
        ImageError: with `strict`, an image is unusable.
        InputError: no image is usable.
    """
    usable: list[int] = []
    sizes: list[tuple[int, int]] = []
    broken: list[ImageError] = []
    with ThreadPoolExecutor(workers) as pool:
        for index, found in enumerate(pool.map(_size_or_error, images.files())):
            if isinstance(found, ImageError):
                if strict:
                    pool.shutdown(cancel_futures=True)
                    raise found
                broken.append(found)
            else:
                usable.append(index)
                sizes.append(found)
    if not usable:
        first = f"; the first: {broken[0]}" if broken else ""
        raise InputError(f"none of the {len(images)} photos can be used{first}")
    kept = images.subset(usable)
    single: tuple[str, ...] = ()
    if isinstance(kept, LabelledImages):
        single = tuple(kept.class_names[k] for k in np.flatnonzero(kept.class_sizes() == 1))
    return kept, ImageReport(np.array(sizes, dtype=np.int64), tuple(broken), single)


def _size_or_error(file: PhotoFile) -> tuple[int, int] | ImageError:
    try:
        if file.box is None and (size := _plain_size(file.path)) is not None:
            return size
        return image_size(file.path, file.box)
    except ImageError as error:
        return error


def _plain_size(path: str) -> tuple[int, int] | None:
    """Return the size of a usual JPEG file much faster than Pillow; None for all other files."""
    with reading_errors(path), open(path, "rb", buffering=0) as file:
        size = jpeg_header_size(file.read(HEADER_BYTES) or b"")
    return None if size is None or math.prod(size) > MAX_PIXELS else size


def first_names(names: Sequence[str], separator: str) -> str:
    """Join the first five names, and count the rest."""
    shown = separator.join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
