"""Marks, labels and suggestions: the server's work on them."""

import tempfile
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from anyio import to_thread
from fastapi import HTTPException

from listwise.data.images import Box, clip_box, image_size
from listwise.search.classes import assign_classes, find_classes, find_suggestions, labels_of
from listwise.search.entries import LABEL, Entry, entry_key
from listwise.search.filling import thumbnail_from_photo
from listwise.search.marking import read_marks, undo_marks, write_marks
from listwise.search.marks import Mark, Marks
from listwise.serving.batching import Client
from listwise.serving.engine import check_entries
from listwise.serving.feedback_views import (
    Classes,
    ClassView,
    ConflictView,
    MarksAdded,
    MarksPage,
    MarkView,
    Suggestions,
    SuggestionView,
)
from listwise.serving.fields import BadRequestError
from listwise.serving.service import Service
from listwise.serving.uploads import Upload

PICTURES = 5
"""Number of photos of a class in the list of classes."""


@dataclass(frozen=True)
class MarkRequest:
    """Marks to store: the query is a photo with a box, or the key of an entry."""

    photo: Upload | None
    box: Box | None
    entry: int | None
    same: Sequence[int]
    different: Sequence[int]
    by: str = ""
    ranks: Mapping[str | int, int] = field(default_factory=dict)


class Feedback:
    """Stores and reads marks and labels, in the queues of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._kept: tuple[tuple[Hashable, ...], Marks] | None = None

    def _marks(self) -> Marks:
        """The marks, which are read again only if the log or the entries have changed."""
        store = self._service.store
        stamps = store.mark_log.stamp(), store.stamp()  # before: changes during the read count
        kept = self._kept
        if kept is None or None in stamps or kept[0] != stamps:
            kept = self._kept = stamps, read_marks(store)
        return kept[1]

    async def mark(self, request: MarkRequest, client: Client) -> MarksAdded:
        """Store marks; once begun, this finishes even if the client disconnects."""
        service = self._service
        uploads = service.uploads
        if request.photo is not None:
            if uploads is None:
                raise BadRequestError(
                    "no folder for query photos: start listwise serve with --uploads FOLDER"
                )
            await to_thread.run_sync(service.check_photos, [request.photo])
            if request.box is not None:
                clip_box(request.photo.name, request.box, image_size(request.photo))

        def write() -> MarksAdded:
            check_entries(service.store, [*request.same, *request.different])
            photo = request.photo
            kept = nullcontext() if photo is None or uploads is None else uploads.query(photo)
            with kept as path:
                marks = write_marks(
                    service.store,
                    self._entry_to_mark(request) if path is None else path,
                    request.same,
                    request.different,
                    box=request.box,
                    by=request.by,
                    ranks=request.ranks,
                )
            return self._added(marks)

        added: MarksAdded = await service.write(write, client)
        for mark in added.marks:
            service.metrics.marked(mark.same, mark.rank)
        return added

    def _entry_to_mark(self, request: MarkRequest) -> int:
        entry = self._service.entry(request.entry or 0)
        if entry.key in request.different:
            raise BadRequestError(f"{entry.key} is the query itself: it cannot be different")
        return entry.key

    def _added(self, marks: Sequence[Mark]) -> MarksAdded:
        new = {mark.id for mark in marks}
        conflicts = [
            ConflictView.of(conflict)
            for conflict in self._marks().conflicts
            if conflict.kind != "changed" and new.intersection(mark.id for mark in conflict.marks)
        ]
        return MarksAdded(marks=list(map(MarkView.of, marks)), conflicts=conflicts)

    async def marks(self, start: int, count: int, entry: int | None, client: Client) -> MarksPage:
        """A page of the active marks, all or those of the results of an entry."""

        def read() -> MarksPage:
            marks = self._marks()
            found = list(reversed(marks.active))
            if entry is not None:
                query = self._service.entry(entry).id
                found = [mark for mark in found if mark.query.id == query]
            same = sum(mark.same for mark in found)
            return MarksPage(
                marks=list(map(MarkView.of, found[start : start + count])),
                total=len(found),
                same=same,
                different=len(found) - same,
                undone=marks.undone,
                conflicts=[
                    ConflictView.of(conflict)
                    for conflict in marks.conflicts[: self._service.limits.results]
                ],
            )

        page: MarksPage = await self._service.read(read, client)
        return page

    async def unmark(self, name: str, client: Client) -> int:
        """Undo a mark; a 404 error if it does not exist."""

        def write() -> int:
            self._find(name)
            return undo_marks(self._service.store, [name])

        undone: int = await self._service.write(write, client)
        self._service.metrics.unmarked(undone)
        return undone

    def _find(self, name: str) -> Mark:
        for mark in self._marks().history:
            if mark.id == name:
                return mark
        raise HTTPException(404, f"{name[:40]!r} is not the id of a mark")

    async def photo(self, name: str, client: Client) -> bytes:
        """A small JPEG file of the query photo of a mark."""
        mark: Mark = await self._service.read(partial(self._find, name), client)
        query = Entry(f"of the query of mark {name}", mark.query.path, 0, 0, mark.query.box)
        show = partial(thumbnail_from_photo, query)
        return await self._service.picture(show, query, client)

    async def table(self, client: Client) -> str:
        """The labels that follow from marks, as a CSV table."""

        def read() -> str:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "labels.csv"
                read_marks(self._service.store, all_labels=True).write(file)
                return file.read_text(encoding="utf-8")

        text: str = await self._service.read(read, client)
        return text

    async def label(self, name: str, keys: Sequence[int], client: Client) -> int:
        """Set the label of entries, or remove it if the name is empty."""

        def write() -> int:
            check_entries(self._service.store, keys)
            return self._service.store.set_attribute(list(keys), LABEL, name)

        labelled: int = await self._service.write(write, client)
        self._service.forget_facets()
        return labelled

    async def classes(self, start: int, count: int, client: Client) -> Classes:
        """A page of the classes, with some photos of each."""

        def read() -> Classes:
            store = self._service.store
            marks = self._marks().active
            found = find_classes(store, marks, self._service.index.calibration)
            page = found[start : start + count]
            members: dict[str, list[str]] = defaultdict(list)
            classes = assign_classes(marks, labels_of(store)).classes
            for photo, name in sorted(classes.items()):
                members[name].append(photo)
            shown = {each.name: members[each.name][:PICTURES] for each in page}
            keys = [entry_key(photo) for photos in shown.values() for photo in photos]
            entries = store.get(keys)
            views = [
                ClassView.of(
                    each, [entries[k] for k in map(entry_key, shown[each.name]) if k in entries]
                )
                for each in page
            ]
            return Classes(classes=views, total=len(found))

        answer: Classes = await self._service.read(read, client)
        return answer

    async def suggestions(self, count: int, client: Client) -> Suggestions:
        """Pairs of entries to mark next."""

        def read() -> Suggestions:
            store = self._service.store
            marks = self._marks().active
            found = find_suggestions(store, marks, self._service.index.calibration, count)
            return Suggestions(suggestions=list(map(SuggestionView.of, found)))

        answer: Suggestions = await self._service.read(read, client)
        return answer
