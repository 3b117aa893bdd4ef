"""Small copies of photos, as text that a page can hold."""

import io
import math
from base64 import b64encode
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from listwise.data.images import ImageError, load_image

_BUDGET = 7_500_000  # characters that all of them may take together
_MATCHED_BUDGET = 12_000_000  # where points are drawn on some
_SIDES = 56, 160  # shortest and longest long side
_LARGE = 2  # queries and photos with points are shown so many times larger
_QUALITIES = 72, 50, 30  # the first that keeps within a photo's share of the budget
_PER_PIXEL = 0.3  # characters that a pixel of a photo takes at the first, rather more than less


def thumbnails(
    photos: Collection[str],
    queries: Collection[str],
    matched: Collection[str],
    on_progress: Callable[[int, int], object],
) -> dict[str, str | None]:
    """A JPEG data URI for each path, None where the photo cannot be read.

    Queries and those on which points are drawn, `matched`, are larger than the others. The more
    photos, the smaller they are, so that all together stay within some megabytes.
    """
    wanted = dict.fromkeys(photos, 1) | dict.fromkeys([*queries, *matched], _LARGE)
    area = sum(scale**2 for scale in wanted.values())
    share = (_MATCHED_BUDGET if matched else _BUDGET) // max(1, area)
    side = min(max(math.isqrt(int(share / _PER_PIXEL)), _SIDES[0]), _SIDES[1])
    found: dict[str, str | None] = {}
    with ThreadPoolExecutor() as pool:
        sides = (side * scale for scale in wanted.values())
        shares = (share * scale**2 for scale in wanted.values())
        for path, uri in zip(wanted, pool.map(_data_uri, wanted, sides, shares), strict=True):
            found[path] = uri
            on_progress(len(found), len(wanted))
    return found


def _data_uri(path: str, side: int, share: int) -> str | None:
    try:
        photo = load_image(path, min_side=side)
    except ImageError:
        return None
    photo.thumbnail((side, side), Image.Resampling.LANCZOS)
    for quality in _QUALITIES:
        file = io.BytesIO()
        photo.save(file, "JPEG", quality=quality, optimize=True)
        uri = f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"
        if len(uri) <= share:
            break
    return uri
