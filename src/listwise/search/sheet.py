"""Draw a search as one picture: the query photos and the hits."""

import io
from collections.abc import Sequence

from PIL import Image

from listwise.data.images import Box, load_image
from listwise.data.sheets import Tile, contact_sheet, ranked_sheet
from listwise.search.duplicates import DuplicateGroup
from listwise.search.entries import Entry
from listwise.search.filling import thumbnail_from_photo
from listwise.search.hits import Hit
from listwise.search.index import Index


def draw_sheet(
    index: Index,
    hits: Sequence[Hit],
    photos: Sequence[str] = (),
    boxes: Sequence[Box | None] = (),
    like: Sequence[str] = (),
) -> Image.Image:
    """Draw the query of a search (files with their boxes, entries by id) and its hits."""
    parts = zip(photos, boxes or [None] * len(photos), strict=True)
    queries = [load_image(photo, box) for photo, box in parts]
    examples = [_thumbnail(index, index.entry(name)) for name in like]
    found = []
    for hit in hits:
        points = "" if hit.inliers is None else f"   {hit.inliers} points"
        found.append((_thumbnail(index, hit.entry), f"{hit.score:.3f}{points}", hit.id))
    return contact_sheet([*queries, *examples], found)


def draw_duplicates(groups: Sequence[DuplicateGroup]) -> Image.Image:
    """Draw groups of duplicates, a row for each: the photo to keep in green, then the others.

    The picture has at most 100 groups and 12 photos of each.
    """
    rows = [
        [
            Tile(entry.path, "junk" if number else "right", entry.box)
            for number, entry in enumerate(group.entries[:12])
        ]
        for group in groups[:100]
    ]
    captions = [f"{n}  {'exact' if g.exact else f'{g.score:.3f}'}" for n, g in enumerate(groups, 1)]
    return ranked_sheet(rows, captions[:100])


def _thumbnail(index: Index, entry: Entry) -> Image.Image:
    content = index.store.thumbnail(entry.key) or thumbnail_from_photo(entry)
    if not content:
        return Image.new("RGB", (160, 120), "lightgray")
    return Image.open(io.BytesIO(content)).convert("RGB")
