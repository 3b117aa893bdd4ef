"""The JSON of marks, classes and suggestions."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from listwise.search.classes import ClassProgress, Suggestion
from listwise.search.entries import Entry, entry_key
from listwise.search.mark_groups import QUERY
from listwise.search.marks import Conflict, Mark, MarkedQuery
from listwise.search.views import BoxView, EntryView, Key

MarkId = Annotated[str, Field(description="The id of a mark, 16 hexadecimal digits.")]


class MarkedPhoto(BaseModel):
    """A photo of a mark; `key` is null if it is not an entry."""

    id: str
    key: Key | None
    box: BoxView | None

    @staticmethod
    def of(query: MarkedQuery) -> "MarkedPhoto":
        """The JSON of the query of a mark."""
        key = None if query.id.startswith(QUERY) else str(entry_key(query.id))
        return MarkedPhoto(id=query.id, key=key, box=query.box)


class MarkedEntry(BaseModel):
    """The entry that was marked."""

    id: str
    key: Key


class MarkView(BaseModel):
    """Whether a result shows the same thing as a query, by whom, and when it was marked.

    `rank` is the place of the entry in the results, from 1; null if it is unknown.
    """

    id: MarkId
    query: MarkedPhoto
    entry: MarkedEntry
    same: bool
    by: str
    time: str
    rank: int | None

    @staticmethod
    def of(mark: Mark) -> "MarkView":
        """The JSON of a mark."""
        return MarkView(
            id=mark.id,
            query=MarkedPhoto.of(mark.query),
            entry=MarkedEntry(id=mark.entry, key=str(entry_key(mark.entry))),
            same=mark.same,
            by=mark.by,
            time=mark.time,
            rank=mark.rank,
        )


class ConflictView(BaseModel):
    """Marks that contradict each other, or the labels of entries.

    `changed`: one person marked a pair both ways, and the later mark counts. `people`: several
    people marked a pair both ways. `chain`: photos that "same" marks connect are marked as
    different. `labels`: a mark contradicts labels.
    """

    kind: Literal["changed", "people", "chain", "labels"]
    marks: list[MarkView]

    @staticmethod
    def of(conflict: Conflict) -> "ConflictView":
        """The JSON of a conflict."""
        return ConflictView(kind=conflict.kind, marks=list(map(MarkView.of, conflict.marks)))


class MarksAdded(BaseModel):
    """Marks that were stored, and the conflicts that they are part of."""

    marks: list[MarkView]
    conflicts: list[ConflictView]


class MarksPage(BaseModel):
    """A page of the active marks, the latest first.

    `total` is their number, `same` and `different` how many are of each kind, and `undone` the
    number of marks that were undone. `conflicts` has at most as many as a search can have results.
    """

    marks: list[MarkView]
    total: int
    same: int
    different: int
    undone: int
    conflicts: list[ConflictView]


class Unmarked(BaseModel):
    """The number of marks that were undone."""

    undone: int


class Labelled(BaseModel):
    """The number of entries that have the label now."""

    labelled: int


class ClassView(BaseModel):
    """A class and its progress.

    `labelled` is the number of its photos with a label, `marks` the number of marks of its photos,
    and `open` the number of suggested pairs that are not clear yet. `entries` are some of its
    photos.
    """

    name: str
    photos: int
    labelled: int
    marks: int
    open: int
    entries: list[EntryView]

    @staticmethod
    def of(progress: ClassProgress, entries: Sequence[Entry]) -> "ClassView":
        """The JSON of a class with some of its entries."""
        return ClassView(
            name=progress.name,
            photos=progress.photos,
            labelled=progress.labelled,
            marks=progress.marks,
            open=progress.open,
            entries=list(map(EntryView.of, entries)),
        )


class Classes(BaseModel):
    """A page of classes, the largest first, and the total number of classes."""

    classes: list[ClassView]
    total: int


class SuggestionView(BaseModel):
    """Two entries for which it is unclear whether they show the same thing.

    `name` is the class of the first entry; empty if it is in none.
    """

    one: EntryView
    other: EntryView
    score: float
    probability: float | None
    name: str

    @staticmethod
    def of(found: Suggestion) -> "SuggestionView":
        """The JSON of a suggestion."""
        return SuggestionView(
            one=EntryView.of(found.one),
            other=EntryView.of(found.other),
            score=round(found.score, 6),
            probability=None if found.probability is None else round(found.probability, 4),
            name=found.name,
        )


class Suggestions(BaseModel):
    """Pairs to mark next, the most uncertain first."""

    suggestions: list[SuggestionView]
