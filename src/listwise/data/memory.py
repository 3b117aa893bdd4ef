"""Photos and tables in memory, as other libraries hold them."""

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from listwise.blocks import plain_array
from listwise.errors import InputError

Table = Sequence[Mapping[str, Any]]
"""The rows of a table in memory; a DataFrame is one too."""
Cells = Iterator[tuple[str, Sequence[Any]]]
"""Where each row of a table is, and its cells; the first has the names of the columns."""


def as_photo(photo: object) -> str | Path | BytesIO | Image.Image:
    """Return a photo as a path, the content of an image file, or a Pillow image.

    Args:
        photo: one of these; the bytes of an image file, or a file opened in binary mode; or an
            array or tensor [height, width, 3] or [3, height, width], uint8 or float from 0 to 1.
    """
    if isinstance(photo, str | Path | BytesIO | Image.Image):
        return photo
    if isinstance(photo, bytes):
        return BytesIO(photo)
    photo = plain_array(photo)
    if isinstance(photo, np.ndarray):
        return Image.fromarray(_pixels(photo))
    content = photo.read() if hasattr(photo, "read") else None
    if isinstance(content, bytes):
        return BytesIO(content)
    raise InputError(
        "a photo must be a file, a Pillow image, the bytes of an image file, or an array or tensor "
        f"of pixels, not {type(photo).__name__}"
    )


def _pixels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the pixels of a photo: uint8 [height, width, 3]."""
    shape = list(array.shape)
    first, last = (array.ndim == 3 and shape[axis] == 3 for axis in (0, 2))
    if not array.size or first == last:
        reason = f"not {shape}" if not first else f"and {shape} may be both: give a Pillow image"
        raise InputError(
            f"a photo as an array must be [height, width, 3] or [3, height, width], {reason}"
        )
    if np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not -1e-3 <= low <= high <= 1.001:
            raise InputError(
                f"the pixels of a float array must be from 0 to 1, not from {low:g} to {high:g}: "
                "divide pixels up to 255 by 255, and leave out any normalization"
            )
        array = (255 * array.clip(0, 1)).round().astype(np.uint8)
    elif array.dtype != np.uint8:
        raise InputError(f"a photo as an array must be uint8 or float, not {array.dtype}")
    return np.ascontiguousarray(array.transpose(1, 2, 0) if first else array)


def is_one_in_memory(photos: object) -> bool:
    """Return whether this is one photo in memory, rather than a list or a batch of photos."""
    photos = plain_array(photos)
    if isinstance(photos, np.ndarray):
        return photos.ndim not in (1, 4)
    return isinstance(photos, bytes | Image.Image) or hasattr(photos, "read")


def is_table(given: object) -> bool:
    """Return whether this is a DataFrame or a list of dictionaries."""
    rows = isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], Mapping)
    return rows or hasattr(given, "columns")


def table_rows(given: Any) -> Table:
    """Return the rows of a DataFrame or a list of dictionaries; missing values are None."""
    if hasattr(given, "to_dicts"):  # polars
        given = given.to_dicts()
    elif hasattr(given, "to_dict"):  # pandas
        given = given.astype(object).where(given.notna(), None).to_dict("records")
    return list(given)


def table_cells(given: Any) -> Cells:
    """Yield the names of the columns, then each row with its place, as readers of files do."""
    rows = table_rows(given)
    columns = list(dict.fromkeys(str(name) for row in rows for name in row))
    yield "the columns", columns
    for number, row in enumerate(rows, start=1):
        named = {str(name): value for name, value in row.items()}
        yield f"row {number}", [named.get(name) for name in columns]


def cell_text(value: Any) -> str:
    """Return the text of a cell; empty for a missing value."""
    text = "" if value is None else str(value).strip()
    return text if isinstance(value, str) or text not in ("nan", "NaT", "<NA>") else ""
