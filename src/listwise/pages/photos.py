"""Photos on a page: their thumbnails, and a page of queries with two lists of results each."""

import io
import math
from base64 import b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from listwise.data.images import ImageError, load_image
from listwise.pages import write_page

Frame = Literal["", "red", "green"]


_BUDGET = 7_500_000  # maximum number of characters of all thumbnails
_MATCHED_BUDGET = 12_000_000  # if points are drawn on some of them
_SIDES = 56, 240  # minimum and maximum long side in pixels
_LARGE = 2  # queries and photos with points are larger by this factor
_QUALITIES = 72, 50, 30  # JPEG qualities; the first that fits into the budget of a photo is used
_PER_PIXEL = 0.3  # estimated characters per pixel at the first quality


def thumbnails(
    photos: Collection[str],
    queries: Collection[str],
    matched: Collection[str] = (),
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, str | None]:
    """Create a JPEG data URI for each path; None for a photo that cannot be read.

    `queries` and the photos with points, `matched`, are larger than the others. The more photos,
    the smaller the thumbnails, so that the page stays below a few megabytes.
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


@dataclass(frozen=True)
class ShownPhoto:
    """A photo on the page: its file, its caption, and the color of its frame."""

    path: str
    caption: str
    frame: Frame = ""


@dataclass(frozen=True)
class ShownQuery:
    """A query on the page: its photo, and its lists of results by their headings."""

    photo: ShownPhoto
    note: str
    lists: Mapping[str, Sequence[ShownPhoto]]


def write_queries(
    path: str | Path,
    title: str,
    facts: Mapping[str, str],
    note: str,
    queries: Sequence[ShownQuery],
) -> Path:
    """Write an HTML page of queries and their results, without external parts.

    Args:
        path: file to write.
        title: heading of the page.
        facts: names and values to show below the heading.
        note: sentence that explains the lists and the frames.
        queries: the queries.

    Returns:
        The path of the file.
    """
    hits = {hit.path for query in queries for hits in query.lists.values() for hit in hits}
    asked = {query.photo.path for query in queries}
    photos = thumbnails(sorted(hits - {""}), sorted(asked - {""}))
    write_page(
        Path(path),
        "queries.html",
        ["style.css", "queries.css"],
        title=title,
        facts=facts,
        note=note,
        queries=queries,
        photos=photos,
    )
    return Path(path)
