"""Marks, labels, classes and suggestions: their addresses, and the server's work on them."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, computed_field

from listwise.data.images import clip_box, image_size
from listwise.search.entries import LABEL, Entry, entry_key
from listwise.search.filling import thumbnail_from_photo
from listwise.search.hits import find_entries
from listwise.search.marks import QUERY, ConflictKind, Mark, Marks
from listwise.search.stored_marks import find_classes, find_suggestions, read_marks
from listwise.search.views import BoxView, EntryView, Key
from listwise.serving.forms import K, LabelForm, MarkForm, Start, Upload, form_body
from listwise.serving.service import JPEG, Service
from listwise.serving.upload_folder import UploadFolder

PICTURES = 5
"""Number of photos of a class in the list of classes."""
SUGGESTIONS = 20
"""Default number of suggested pairs."""
MOST_SUGGESTIONS = 200
CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {}}, "description": "A table with the columns path and label."}
}


class MarkedEntry(BaseModel):
    """The entry that was marked."""

    model_config = ConfigDict(from_attributes=True)

    id: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def key(self) -> Key | None:
        """The key of the entry; null for a photo that is not an entry."""
        return None if self.id.startswith(QUERY) else str(entry_key(self.id))


class MarkedPhoto(MarkedEntry):
    """The photo that was searched for."""

    box: BoxView | None


def _named(entry: str) -> dict[str, str]:
    return {"id": entry}


class MarkView(BaseModel):
    """Whether a result shows the same thing as a query, by whom, and when it was marked.

    `rank` is the place of the entry in the results, from 1; null if it is unknown.
    """

    model_config = ConfigDict(from_attributes=True)

    id: Annotated[str, Field(description="The id of a mark, 16 hexadecimal digits.")]
    query: MarkedPhoto
    entry: Annotated[MarkedEntry, BeforeValidator(_named)]
    same: bool
    by: str
    time: str
    rank: int | None


class ConflictView(BaseModel):
    """Marks that contradict each other, or the labels of entries.

    `changed`: one person marked a pair both ways, and the later mark counts. `people`: several
    people marked a pair both ways. `chain`: photos that "same" marks connect are marked as
    different. `labels`: a mark contradicts labels.
    """

    model_config = ConfigDict(from_attributes=True)

    kind: ConflictKind
    marks: list[MarkView]


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
    conflicts: list[ConflictView]
    total: int
    same: int
    different: int
    undone: int


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


class Classes(BaseModel):
    """A page of classes, the largest first, and the total number of classes."""

    classes: list[ClassView]
    total: int


class SuggestionView(BaseModel):
    """Two entries for which it is unclear whether they show the same thing.

    `name` is the class of the first entry; empty if it is in none.
    """

    model_config = ConfigDict(from_attributes=True)

    one: EntryView
    other: EntryView
    score: float
    probability: float | None
    name: str


class Suggestions(BaseModel):
    """Pairs to mark next, the most uncertain first."""

    suggestions: list[SuggestionView]


class Feedback:
    """Stores and reads marks and labels; the queues of a service call its methods."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._kept = lru_cache(1)(lambda *_: read_marks(service.store, all_labels=False))

    def _marks(self) -> Marks:
        """The marks, which are read again only if the log or the entries have changed."""
        store = self._service.store
        stamps = store.mark_log.stamp(), store.stamp()  # before: changes during the read count
        return read_marks(store, all_labels=False) if None in stamps else self._kept(stamps)

    def mark(
        self, fields: MarkForm, uploads: UploadFolder | None = None, photo: Upload | None = None
    ) -> MarksAdded:
        """Store marks of the results of an entry, or of a photo."""
        kept = uploads.query(photo) if uploads and photo else nullcontext(fields.entry or 0)
        with kept as query:
            marks = self._service.index.marks.add(query, **fields.model_dump(exclude={"entry"}))
        new = {mark.id for mark in marks}
        conflicts = [
            conflict
            for conflict in self._marks().conflicts
            if conflict.kind != "changed" and new.intersection(mark.id for mark in conflict.marks)
        ]
        return MarksAdded.model_validate({"marks": marks, "conflicts": conflicts})

    def marks(self, start: int, count: int, entry: int | None) -> MarksPage:
        """A page of the active marks, all or those of the results of an entry."""
        marks = self._marks()
        found = list(reversed(marks.active))
        if entry is not None:
            query = self._service.entry(entry).id
            found = [mark for mark in found if mark.query.id == query]
        same = sum(mark.same for mark in found)
        page = {
            "marks": found[start : start + count],
            "conflicts": marks.conflicts[: self._service.limits.results],
            "total": len(found),
            "same": same,
            "different": len(found) - same,
            "undone": marks.undone,
        }
        return MarksPage.model_validate(page)

    def find(self, name: str) -> Mark:
        """The mark with an id; a 404 error if it does not exist."""
        for mark in self._marks().history:
            if mark.id == name:
                return mark
        raise HTTPException(404, f"{name[:40]!r} is not the id of a mark")

    def unmark(self, name: str) -> int:
        """Undo a mark; a 404 error if it does not exist."""
        self.find(name)
        return self._service.index.marks.undo(name)

    def table(self) -> str:
        """The labels that follow from marks, as a CSV table."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "labels.csv"
            read_marks(self._service.store).write(file)
            return file.read_text(encoding="utf-8")

    def label(self, name: str, keys: Sequence[int]) -> int:
        """Set the label of entries, or remove it if the name is empty."""
        store = self._service.store
        found = [entry.key for entry in find_entries(store, keys)]
        return store.set_attributes(found, {LABEL: name})

    def classes(self, start: int, count: int) -> Classes:
        """A page of the classes, with some photos of each."""
        store = self._service.store
        marks = read_marks(store)
        found = find_classes(store, marks, self._service.index.calibration)
        members = {each.name: each.photos for each in marks.classes}
        views = []
        for each in found[start : start + count]:
            photos = members[each.name][:PICTURES]
            entries = store.get([entry_key(photo.id) for photo in photos]).values()
            views.append(ClassView(entries=list(map(EntryView.of, entries)), **asdict(each)))
        return Classes(classes=views, total=len(found))

    def suggestions(self, count: int) -> Suggestions:
        """Pairs of entries to mark next."""
        store, calibration = self._service.store, self._service.index.calibration
        found = find_suggestions(store, read_marks(store), calibration, count)
        return Suggestions.model_validate({"suggestions": found})


def add_feedback(app: FastAPI, service: Service) -> None:
    """Add the addresses to an app."""
    feedback, limits = Feedback(service), service.limits

    @app.post("/api/marks", openapi_extra=form_body(MarkForm, 1))
    async def mark(request: Request) -> MarksAdded:
        """Store which results of a query show the same thing, and which do not.

        Requires the token. The query is a photo, which is kept, or an entry.
        """
        async with service.forms.read(request, service.writes) as form:
            fields = form.read(MarkForm)
            if len(form.photos) + (fields.entry is not None) != 1:
                raise HTTPException(400, "send the query: one photo, or the key of an entry")
            uploads = await service.folder_for(form.photos) if form.photos else None
            for photo in form.photos:
                # Here, where its name is that on the machine of the client.
                if fields.box is not None:
                    clip_box(photo.name, fields.box, image_size(photo))
            mark = partial(feedback.mark, fields, uploads, *form.photos)
            added = await service.write(mark, request)
        for each in added.marks:
            service.metrics.marked(each.same, each.rank)
        return added

    @app.get("/api/marks")
    async def marks(
        request: Request,
        start: Start = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
        entry: Annotated[int | None, Query(description="Only marks of this query.")] = None,
    ) -> MarksPage:
        """List the marks, the latest first, and the conflicts."""
        return await service.read(partial(feedback.marks, start, count, entry), request)

    @app.get("/api/marks/labels", response_class=Response, responses=CSV)
    async def labels(request: Request) -> Response:
        """Return the classes of marks and labels as a table for training. Requires the token.

        The paths are those on the machine of the server.
        """
        text = await service.read(feedback.table, request)
        name = {"Content-Disposition": 'attachment; filename="labels.csv"'}
        return Response(text, media_type="text/csv", headers=name)

    @app.delete("/api/marks/{id}")
    async def unmark(request: Request, id: str) -> Unmarked:
        """Undo a mark; the history keeps it. Requires the token."""
        undone = await service.write(partial(feedback.unmark, id), request)
        service.metrics.undone_marks.inc(undone)
        return Unmarked(undone=undone)

    @app.get("/api/marks/{id}/photo", response_class=Response, responses=JPEG)
    async def query_photo(request: Request, id: str) -> Response:
        """Return a small JPEG file of the query photo of a mark."""
        query = (await service.read(partial(feedback.find, id), request)).query
        entry = Entry(f"of the query of mark {id}", query.path, 0, 0, query.box)
        show = partial(thumbnail_from_photo, entry)
        return await service.picture(show, entry, request)

    @app.post("/api/labels", openapi_extra=form_body(LabelForm, 0, required=["keys"]))
    async def label(request: Request) -> Labelled:
        """Name the class of entries in their attribute `label`. Requires the token."""
        async with service.forms.read(request, service.writes) as form:
            wanted = form.read(LabelForm)
            if form.photos or not wanted.keys:
                raise HTTPException(400, "nothing to label: send keys of entries, and no photos")
        labelled = await service.write(partial(feedback.label, wanted.name, wanted.keys), request)
        service.forget_facets()
        return Labelled(labelled=labelled)

    @app.get("/api/classes")
    async def classes(
        request: Request,
        start: Start = 0,
        count: Annotated[int, Query(ge=1, le=limits.results)] = min(K, limits.results),
    ) -> Classes:
        """List the classes of labels and marks, with their progress."""
        return await service.read(partial(feedback.classes, start, count), request)

    @app.get("/api/suggestions")
    async def suggestions(
        request: Request,
        count: Annotated[int, Query(ge=1, le=MOST_SUGGESTIONS)] = SUGGESTIONS,
    ) -> Suggestions:
        """List pairs of entries for which it is most unclear whether they show the same thing."""
        return await service.read(partial(feedback.suggestions, count), request)
