"""The JSON of the HTTP interface.

Keys of entries are text, since they are larger than the exact numbers of JavaScript.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from listwise.data.images import Box
from listwise.search.duplicates import DuplicateGroup
from listwise.search.entries import Entry
from listwise.search.filters import Facet
from listwise.search.hits import Hit

MATCHES = 100

Key = Annotated[str, Field(description="The key of an entry, a number as text.")]
# Without `prefixItems`, which many programs that read OpenAPI documents do not know.
_FOUR_NUMBERS = WithJsonSchema(
    {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
)
BoxView = Annotated[Box, _FOUR_NUMBERS]


class LimitsView(BaseModel):
    """Limits of a request.

    `max_side` is the long side in pixels that query photos are reduced to, if they are reduced more
    than the settings of the index require.
    """

    upload_bytes: int
    pixels: int
    photos: int
    results: int
    max_side: int | None


class Info(BaseModel):
    """The index, and what a client may do."""

    name: str
    entries: int
    dim: int
    model: str
    whitened: bool
    calibrated: bool
    expands: bool
    engine: str
    can_write: bool
    can_mark: bool
    token_needed: bool
    instance: str
    limits: LimitsView


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


class Page(BaseModel):
    """A page of entries, and the total number of entries."""

    entries: list[EntryView]
    total: int


class FacetValue(BaseModel):
    """A value of an attribute, and the number of entries that have it."""

    value: str
    count: int


class FacetView(BaseModel):
    """An attribute with few distinct values, the most frequent first."""

    name: str
    values: list[FacetValue]


class Facets(BaseModel):
    """Attributes that the entries can be filtered by."""

    facets: list[FacetView]

    @staticmethod
    def of(found: Sequence[Facet]) -> "Facets":
        """The JSON of facets."""
        return Facets(
            facets=[
                FacetView(
                    name=facet.name,
                    values=[FacetValue(value=value, count=many) for value, many in facet.values],
                )
                for facet in found
            ]
        )


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


class Answer(BaseModel):
    """Results of a search, best first; `more` if a later `start` returns others.

    `verified` is the number of photos, of the first 100, that re-ranking has compared with the
    query.
    """

    milliseconds: float
    expanded: bool
    refined: bool
    reranked: bool
    verified: int
    more: bool
    results: list[Result]

    @staticmethod
    def of(
        hits: Sequence[Hit],
        seconds: float,
        *,
        expanded: bool,
        refined: bool,
        verified: int,
        more: bool,
    ) -> "Answer":
        """The JSON of the results of a search."""
        return Answer(
            milliseconds=round(1000 * seconds, 2),
            expanded=expanded,
            refined=refined,
            reranked=verified > 0,
            verified=verified,
            more=more,
            results=[Result.found(hit) for hit in hits],
        )


class AddedView(BaseModel):
    """Keys of added photos and of known ones, and a message for each photo that failed."""

    added: list[Key]
    unchanged: list[Key]
    errors: list[str]


class DuplicateView(BaseModel):
    """Entries that show the same photo; the largest photo comes first.

    `size` is the number of entries in the group; `entries` has at most as many as a search can
    have results.
    """

    exact: bool
    score: float
    size: int
    entries: list[EntryView]

    @staticmethod
    def of(group: DuplicateGroup, most: int | None = None) -> "DuplicateView":
        """The JSON of a group of duplicates, with the first `most` of its entries."""
        return DuplicateView(
            exact=group.exact,
            score=round(group.score, 6),
            size=len(group.entries),
            entries=list(map(EntryView.of, group.entries[:most])),
        )


class Duplicates(BaseModel):
    """A page of groups of duplicates, and the total number of groups."""

    groups: list[DuplicateView]
    total: int


class Removed(BaseModel):
    """The number of removed entries."""

    removed: int


class Health(BaseModel):
    """The state of the server."""

    status: str
    entries: int


class Failure(BaseModel):
    """The reason of an error, in one line."""

    error: str
