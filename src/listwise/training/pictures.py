"""Ranked lists as pictures: a query and the photos found for it, right ones framed in green."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from listwise.data import ImageError, LabelledImages, load_image

RIGHT, WRONG, QUERY = (34, 160, 80), (214, 60, 60), (60, 90, 200)


def choose_queries(labels: npt.NDArray[np.int64], count: int) -> list[int]:
    """The same few queries every time: the first image of evenly spread classes."""
    classes, first, sizes = np.unique(labels, return_index=True, return_counts=True)
    usable = first[sizes > 1]
    picks = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
    return [int(usable[i]) for i in np.unique(picks)] if len(classes) else []


def ranked_list_picture(
    images: LabelledImages,
    descriptors: npt.NDArray[np.float32],
    queries: Sequence[int],
    count: int = 8,
    side: int = 96,
) -> Image.Image:
    """A row for each query: the query, then the first `count` photos of its list."""
    margin = 4
    tile = side + 2 * margin
    sheet = Image.new("RGB", ((count + 1) * tile + margin, len(queries) * tile), "white")
    for row, query in enumerate(queries):
        scores = descriptors @ descriptors[query]
        scores[query] = -np.inf
        found = np.argsort(-scores, kind="stable")[:count]
        sheet.paste(_framed(images, query, QUERY, side, margin), (0, row * tile))
        for column, index in enumerate(found):
            right = images.labels[index] == images.labels[query]
            frame = _framed(images, int(index), RIGHT if right else WRONG, side, margin)
            sheet.paste(frame, ((column + 1) * tile + margin, row * tile))
    return sheet


def _framed(
    images: LabelledImages, index: int, color: tuple[int, int, int], side: int, margin: int
) -> Image.Image:
    try:
        photo = load_image(images.paths[index], images.box(index), min_side=side)
    except ImageError:
        photo = Image.new("RGB", (side, side), "grey")
    photo = ImageOps.fit(photo, (side, side), Image.Resampling.BICUBIC)
    return ImageOps.expand(photo, margin, color)
