"""Points that were found again in another photo, made ready to be drawn."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from listwise.data.images import ImageError, image_size
from listwise.errors import InputError
from listwise.results.report.content import Match

PointsOf = Callable[[int, int], ArrayLike | None]
"""From the positions of a query and an image to the points [m, 4] that they share.

A row holds x, y in the query photo and x, y in the image, in pixels of the upright whole photos, 0
in the middle of the first pixel. None means that nobody looked.
"""

MOST = 60  # drawn for a pair of photos; more are a tangle
Matched = tuple[int | None, tuple[Match, ...] | None]
"""How many points there are, and those to draw."""


def matched(points: ArrayLike | None, query: str, image: str) -> Matched:
    """What a list shows of the points [m, 4] that the photos at two paths share."""
    if points is None:
        return None, None
    table = np.asarray(points, np.float64)
    if table.ndim != 2 or table.shape[1] != 4 or not np.isfinite(table).all():
        raise InputError(
            f"matches should be finite numbers [m, 4], found {table.shape} for {image}"
        )
    try:
        sizes = (*image_size(query), *image_size(image))
    except ImageError:
        return len(table), None
    kept = table[np.linspace(0, len(table) - 1, min(MOST, len(table))).astype(int)]
    parts = np.clip((kept + 0.5) / sizes, 0, 1)
    return len(table), tuple((x, y, u, v) for x, y, u, v in parts.tolist())
