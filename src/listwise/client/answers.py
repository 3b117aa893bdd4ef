"""Types of the responses of a server, written by `tools/client_types.py`."""

from typing import TypedDict


class AddedView(TypedDict):
    """Keys of added photos and of known ones, and a message for each photo that failed."""

    added: list[str]
    unchanged: list[str]
    errors: list[str]


class Answer(TypedDict):
    """Results of a search, best first; `more` if a later `start` returns others."""

    milliseconds: float
    expanded: bool
    refined: bool
    reranked: bool
    verified: int
    more: bool
    results: list["Result"]


class ClassView(TypedDict):
    """A class and its progress."""

    name: str
    photos: int
    labelled: int
    marks: int
    open: int
    entries: list["EntryView"]


class Classes(TypedDict):
    """A page of classes, the largest first, and the total number of classes."""

    classes: list["ClassView"]
    total: int


class ConflictView(TypedDict):
    """Marks that contradict each other, or the labels of entries."""

    kind: str
    marks: list["MarkView"]


class DuplicateView(TypedDict):
    """Entries that show the same photo; the largest photo comes first."""

    exact: bool
    score: float
    size: int
    entries: list["EntryView"]


class Duplicates(TypedDict):
    """A page of groups of duplicates, and the total number of groups."""

    groups: list["DuplicateView"]
    total: int


class EntryView(TypedDict):
    """A photo of the index."""

    key: str
    id: str
    width: int
    height: int
    box: list[float] | None
    attributes: dict[str, str]


class FacetValue(TypedDict):
    """A value of an attribute, and the number of entries that have it."""

    value: str
    count: int


class FacetView(TypedDict):
    """An attribute with few distinct values, the most frequent first."""

    name: str
    values: list["FacetValue"]


class Facets(TypedDict):
    """Attributes that the entries can be filtered by."""

    facets: list["FacetView"]


class Failure(TypedDict):
    """The reason of an error, in one line."""

    error: str


class Health(TypedDict):
    """The state of the server."""

    status: str
    entries: int


class Info(TypedDict):
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
    limits: "LimitsView"


class Labelled(TypedDict):
    """The number of entries that have the label now."""

    labelled: int


class LimitsView(TypedDict):
    """Limits of a request."""

    upload_bytes: int
    pixels: int
    photos: int
    results: int
    max_side: int | None


class MarkView(TypedDict):
    """Whether a result shows the same thing as a query, by whom, and when it was marked."""

    id: str
    query: "MarkedPhoto"
    entry: "MarkedEntry"
    same: bool
    by: str
    time: str
    rank: int | None


class MarkedEntry(TypedDict):
    """The entry that was marked."""

    id: str
    key: str


class MarkedPhoto(TypedDict):
    """A photo of a mark; `key` is null if it is not an entry."""

    id: str
    key: str | None
    box: list[float] | None


class MarksAdded(TypedDict):
    """Marks that were stored, and the conflicts that they are part of."""

    marks: list["MarkView"]
    conflicts: list["ConflictView"]


class MarksPage(TypedDict):
    """A page of the active marks, the latest first."""

    marks: list["MarkView"]
    total: int
    same: int
    different: int
    undone: int
    conflicts: list["ConflictView"]


class Page(TypedDict):
    """A page of entries, and the total number of entries."""

    entries: list["EntryView"]
    total: int


class Removed(TypedDict):
    """The number of removed entries."""

    removed: int


class Result(TypedDict):
    """An entry that a search found."""

    key: str
    id: str
    width: int
    height: int
    box: list[float] | None
    attributes: dict[str, str]
    score: float
    refined: float | None
    probability: float | None
    inliers: int | None
    photo: int | None
    matches: list[list[float]] | None


class SuggestionView(TypedDict):
    """Two entries for which it is unclear whether they show the same thing."""

    one: "EntryView"
    other: "EntryView"
    score: float
    probability: float | None
    name: str


class Suggestions(TypedDict):
    """Pairs to mark next, the most uncertain first."""

    suggestions: list["SuggestionView"]


class Unmarked(TypedDict):
    """The number of marks that were undone."""

    undone: int
