"""The JSON of the HTTP interface; that of entries and results is in `listwise.search.views`."""

from collections.abc import Sequence

from pydantic import BaseModel

from listwise.search.filters import Facet
from listwise.search.hits import Hit
from listwise.search.views import DuplicateView, EntryView, Key, Result


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
