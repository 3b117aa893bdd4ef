"""The JSON that the server speaks. Keys are text: they are larger than JavaScript's numbers."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from listwise.data.images import Box
from listwise.search.entries import Entry
from listwise.search.hits import Hit

MATCHES = 100

Key = Annotated[str, Field(description="An entry's number, as decimal text.")]


class LimitsView(BaseModel):
    """What one request may hold."""

    upload_bytes: int
    pixels: int
    photos: int
    results: int


class Info(BaseModel):
    """What is served, and what a client may do."""

    name: str
    entries: int
    dim: int
    model: str
    whitened: bool
    engine: str
    can_write: bool
    token_needed: bool
    limits: LimitsView


class EntryView(BaseModel):
    """A photo of the index."""

    model_config = ConfigDict(from_attributes=True, coerce_numbers_to_str=True)

    key: Key
    id: str
    width: int
    height: int
    box: Box | None
    attributes: dict[str, str]

    @staticmethod
    def of(entry: Entry) -> "EntryView":
        """Show an entry."""
        return EntryView.model_validate(entry)


class Page(BaseModel):
    """Some entries, and how many there are."""

    entries: list[EntryView]
    total: int


class Result(EntryView):
    """An entry that was found; matches are x, y in the example and x, y in the entry."""

    score: float
    inliers: int | None
    photo: int | None
    matches: list[tuple[float, float, float, float]] | None

    @staticmethod
    def found(hit: Hit) -> "Result":
        """Show a hit."""
        matches = (
            None if hit.matches is None else hit.matches[:MATCHES].astype(float).round(1).tolist()
        )
        return Result(
            **EntryView.of(hit.entry).model_dump(),
            score=round(hit.score, 6),
            inliers=hit.inliers,
            photo=hit.photo,
            matches=matches,
        )


class Answer(BaseModel):
    """What a search found, best first."""

    milliseconds: float
    expanded: bool
    reranked: bool
    results: list[Result]

    @staticmethod
    def of(hits: Sequence[Hit], seconds: float, expanded: bool, reranked: bool) -> "Answer":
        """Show a search's results."""
        return Answer(
            milliseconds=round(1000 * seconds, 2),
            expanded=expanded,
            reranked=reranked,
            results=[Result.found(hit) for hit in hits],
        )


class AddedView(BaseModel):
    """What became of photos: keys, and a line for each that could not be added."""

    added: list[Key]
    unchanged: list[Key]
    errors: list[str]


class Removed(BaseModel):
    """How many entries were removed."""

    removed: int


class Health(BaseModel):
    """That the server works."""

    status: str
    entries: int


class Failure(BaseModel):
    """Why a request was not answered, in one line."""

    error: str
