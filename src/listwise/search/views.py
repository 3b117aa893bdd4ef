"""Entries, results and duplicates as JSON for commands and the HTTP interface, and as pictures.

Keys of entries are text, since they are larger than the exact numbers of JavaScript.
"""

import io
from collections.abc import Callable, Sequence
from typing import Annotated

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from listwise.data.images import Box, load_image
from listwise.data.sheets import Tile, contact_sheet, ranked_sheet
from listwise.search.duplicates import DuplicateGroup
from listwise.search.entries import Entry
from listwise.search.filling import thumbnail_from_photo
from listwise.search.hits import Hit
from listwise.search.index import Index

MATCHES = 100

Key = Annotated[str, Field(description="The key of an entry, a number as text.")]
# Without `prefixItems`, which many programs that read OpenAPI documents do not know.
_FOUR_NUMBERS = WithJsonSchema(
    {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
)
BoxView = Annotated[Box, _FOUR_NUMBERS]


class EntryView(BaseModel):
    """A photo of the index."""

    model_config = ConfigDict(from_attributes=True, coerce_numbers_to_str=True)

    key: Key
    id: str
    width: int
    height: int
    box: BoxView | None
    attributes: dict[str, str]

    @staticmethod
    def of(entry: Entry) -> "EntryView":
        """The JSON of an entry."""
        return EntryView.model_validate(entry)


class Result(EntryView):
    """An entry that a search found.

    `refined` is the score by which `refine` sorted the first results. `matches` are x and y in the
    example photo, and x and y in the photo of the entry.
    """

    score: float
    refined: float | None
    probability: float | None
    inliers: int | None
    photo: int | None
    matches: list[Annotated[tuple[float, float, float, float], _FOUR_NUMBERS]] | None

    @staticmethod
    def found(hit: Hit) -> "Result":
        """The JSON of a hit."""
        matches = (
            None if hit.matches is None else hit.matches[:MATCHES].astype(float).round(1).tolist()
        )
        return Result(
            **EntryView.of(hit.entry).model_dump(),
            score=round(hit.score, 6),
            refined=None if hit.refined is None else float(f"{hit.refined:.6g}"),
            probability=None if hit.probability is None else round(hit.probability, 4),
            inliers=hit.inliers,
            photo=hit.photo,
            matches=matches,
        )


class DuplicateEntry(EntryView):
    """A photo of a group of duplicates.

    `copies` are the names of further files with the same content. `uploaded` tells whether the
    server deletes the file with the entry.
    """

    copies: list[str]
    uploaded: bool


class DuplicateView(BaseModel):
    """Entries that show the same photo, or one entry of several files with the same content.

    The best photo comes first, for a `reason`. `size` is the number of entries in the group;
    `entries` has at most as many as a search can have results.
    """

    exact: bool
    score: float
    reason: str
    size: int
    entries: list[DuplicateEntry]

    @staticmethod
    def of(
        group: DuplicateGroup,
        most: int | None = None,
        uploaded: Callable[[Entry], bool] = lambda entry: False,
    ) -> "DuplicateView":
        """The JSON of a group of duplicates, with the first `most` of its entries."""
        entries = [
            DuplicateEntry(
                **EntryView.of(entry).model_dump(),
                copies=entry.copy_names,
                uploaded=uploaded(entry),
            )
            for entry in group.entries[:most]
        ]
        return DuplicateView(
            exact=group.exact,
            score=round(group.score, 6),
            reason=group.reason,
            size=len(group.entries),
            entries=entries,
        )


def draw_sheet(
    index: Index,
    hits: Sequence[Hit],
    photos: Sequence[str] = (),
    boxes: Sequence[Box | None] = (),
    like: Sequence[str] = (),
) -> Image.Image:
    """Draw the query of a search (files with their boxes, entries by id) and its hits."""
    parts = zip(photos, boxes or [None] * len(photos), strict=True)
    queries = [load_image(photo, box, max_side=1024) for photo, box in parts]
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
