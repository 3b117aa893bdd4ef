"""Watermarks and banners, which are at the same place in photos of different things."""

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from listwise.local.features import Features
    from listwise.local.verification import Pairs, Verification

Size = tuple[float, float]
"""Width and height of a photo in pixels."""

_TOLERANCE = 0.01  # of the diagonal
_PHOTO_SHARE = 0.2  # share of the features that are at the same place in two versions of one photo
_PLACES = np.array(list(product((0.0, 0.5, 1.0), repeat=2)))  # [9, 2]


def verify_photos(one: "Features", two: "Features", sizes: tuple[Size, Size]) -> "Verification":
    """Verify two photos without the points of watermarks that both have.

    Args:
        one: features of the first photo, from `decode_features`.
        two: features of the other photo, from `decode_features`.
        sizes: sizes of the two photos.
    """
    from listwise.local.compact import nearest_decoded
    from listwise.local.verification import verify

    pairs = nearest_decoded(one, two)
    return verify(one, two, pairs[~overlaid(one, two, pairs, sizes)])


def overlaid(
    one: "Features", two: "Features", pairs: "Pairs", sizes: tuple[Size, Size]
) -> NDArray[np.bool_]:
    """Return which pairs of features [m, 2] are at the same place of the frame in both photos: [m].

    The place may be relative to the left, the middle or the right, and to the top, the middle or
    the bottom, of photos of different sizes. Two versions of one photo have many such pairs, which
    count.
    """
    if not len(pairs):
        return np.zeros(0, bool)
    start = one.points[pairs[:, 0]].astype(np.float64)
    end = two.points[pairs[:, 1]].astype(np.float64)
    first, second = (np.array(size, np.float64) for size in sizes)
    scales = np.array([1.0, *(second / first)])[:, None]
    moved = end - scales[..., None] * start  # [3, m, 2]
    shifts = (second - scales * first)[:, None] * _PLACES  # [3, 9, 2]
    distances = np.linalg.norm(moved[:, None] - shifts[:, :, None], axis=3)
    same = (distances <= _TOLERANCE * np.hypot(*second)).reshape(-1, len(pairs))
    if same.sum(axis=1).max(initial=0) >= _PHOTO_SHARE * min(len(one), len(two)):
        return np.zeros(len(pairs), bool)
    anywhere: NDArray[np.bool_] = same.any(axis=0)
    return anywhere
