"""Photos as arguments of a call: files, Pillow images, arrays, or lists of these."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from listwise.data.catalog import photos_of
from listwise.data.images import IMAGE_SUFFIXES, load_image, upright_rgb
from listwise.data.labelled import Images
from listwise.errors import InputError

Photo = str | Path | Image.Image | npt.NDArray[np.uint8]
"""One photo: an image file, a Pillow image, or pixels uint8 [height, width, 3]."""

Photos = Photo | Images | Sequence[Photo]
"""Photos: one, a list, or a folder, a table, a text list or the name of a data set."""


def open_photo(photo: Photo) -> Image.Image:
    """Return one photo as an upright RGB image."""
    if isinstance(photo, str | Path):
        return load_image(photo)
    if isinstance(photo, np.ndarray):
        if photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3 or not photo.size:
            raise InputError(
                f"a photo as an array must be uint8 [height, width, 3], not {photo.dtype} "
                f"{list(photo.shape)}"
            )
        return Image.fromarray(photo)
    if isinstance(photo, Image.Image):
        return upright_rgb(photo)
    raise InputError(
        f"a photo must be a file, a Pillow image or a uint8 array, not {type(photo).__name__}"
    )


def is_one_photo(photos: Photos) -> bool:
    """Return whether this is one photo: an image file, a Pillow image or an array of pixels."""
    if isinstance(photos, str | Path):
        path = Path(photos).expanduser()
        return path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()
    return isinstance(photos, Image.Image | np.ndarray)


def list_photos(photos: Photos) -> Images | list[Photo]:
    """Return photos one by one: those of a list, a folder, a table, a text list or a data set.

    A list that contains only files becomes `Images`; any other list stays a list.
    """
    if isinstance(photos, Images):
        return photos
    if is_one_photo(photos):
        photos = [photos]  # type: ignore[list-item]
    if isinstance(photos, str | Path):
        return photos_of(photos)
    given = list(photos)  # type: ignore[arg-type]
    if all(isinstance(photo, str | Path) for photo in given):
        return image_files(given)
    return given


def image_files(files: Sequence[str | Path]) -> Images:
    """Return image files as `Images`; their ids are the paths as given."""
    paths = tuple(str(Path(file).expanduser().absolute()) for file in files)
    return Images(paths, tuple(map(str, files)), None)
