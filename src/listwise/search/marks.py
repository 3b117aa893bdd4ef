"""Marks of people on search results: which entries show the same thing as a query.

A `Mark` is never changed. The log of an index holds the marks and what was undone, and `Marks` is
what follows from it.
"""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from listwise.data.images import Box
from listwise.errors import InputError
from listwise.files import write_text
from listwise.search.mark_groups import QUERY, Pair, disputed_pairs, pair_of, split_into_groups


@dataclass(frozen=True)
class MarkedQuery:
    """A photo of a mark: an entry, or a photo that was searched for and is not an entry.

    Attributes:
        id: the id of the entry, or `query:` and the digest of a photo that is not an entry.
        path: the path of the file; for a photo that is not an entry, the copy that is kept.
        box: the part of the photo, x0, y0, x1, y1 in pixels; None for all.
        digest: a hash of the file and the box; empty if the file was not read.
    """

    id: str
    path: str
    box: Box | None
    digest: str


@dataclass(frozen=True)
class Mark:
    """What one person decided about one result of one query.

    Attributes:
        id: 16 random hexadecimal digits.
        query: the photo that was searched for.
        entry: the id of the entry that was marked.
        same: whether it shows the same thing as the query.
        by: the person; empty if unknown.
        time: when it was marked, in ISO 8601, UTC.
        rank: the place of the entry in the results, from 1; None if unknown.
        digest: the digest of the photo of the entry, which finds it under another id.
    """

    id: str
    query: MarkedQuery
    entry: str
    same: bool
    by: str
    time: str
    rank: int | None = None
    digest: str = ""

    @property
    def pair(self) -> Pair:
        """The ids of its two photos, sorted: it does not matter which one was the query."""
        return pair_of(self.query.id, self.entry)


@dataclass(frozen=True)
class Conflict:
    """Marks or labels that contradict each other.

    Attributes:
        kind: "changed": one person has marked a pair both ways, and the later mark counts.
            "people": people have marked a pair both ways, and none of these marks counts. "chain":
            a chain of "same" marks connects two photos that are marked "different". "labels": a
            mark contradicts the attribute `label` of entries.
        marks: the marks, in the order in which they were made.
        photos: ids of the photos that are left out of the classes; none if it is "changed".
    """

    kind: Literal["changed", "people", "chain", "labels"]
    marks: tuple[Mark, ...]
    photos: tuple[str, ...]


@dataclass(frozen=True)
class MarkedClass:
    """Photos that show the same thing.

    Attributes:
        name: the attribute `label` of its photos, or else the id of one of them.
        photos: its photos, sorted by id.
    """

    name: str
    photos: tuple[MarkedQuery, ...]


@dataclass(frozen=True)
class MarkTable:
    """What `Marks.write` wrote.

    Attributes:
        classes: the number of classes.
        photos: the number of photos, one row each.
        conflicting: the number of photos that were left out because of a conflict.
        missing: the number of marks that were left out because a photo is not in the index.
    """

    classes: int
    photos: int
    conflicting: int
    missing: int


class Marks:
    """The marks of an index; `Index.marks` reads them. Iterating yields the active ones.

    Args:
        history: all marks in the order in which they were made, those that were undone included.
        undone: ids of the marks that were undone.
        photos: the photos of the marks that are in the index, and the query photos, by id.
        labels: the attribute `label` of those entries that have it, by id.
        labelled: entries with a label whether or not they are marked, by id, for the classes.
    """

    def __init__(
        self,
        history: Sequence[Mark],
        undone: frozenset[str] = frozenset(),
        photos: Mapping[str, MarkedQuery] | None = None,
        labels: Mapping[str, str] | None = None,
        labelled: Mapping[str, MarkedQuery] | None = None,
    ) -> None:
        self.history = tuple(history)
        self.photos = dict(photos or {})
        self.labels = dict(labels or {})
        self._labelled = dict(labelled or {})
        self._undone = undone
        present = [mark for mark in self.history if self._is_present(mark)]
        self.missing = tuple(
            mark for mark in self.history if mark.id not in undone and not self._is_present(mark)
        )
        self._made: dict[tuple[Pair, str], list[Mark]] = {}  # by pair and person, not undone
        for mark in present:
            made = self._made.setdefault((mark.pair, mark.by), [])
            if made and made[-1].same == mark.same:
                made.pop()  # it was repeated, so undoing the repetition undoes both
            if mark.id not in undone:
                made.append(mark)
        latest = [made[-1] for made in self._made.values() if made]
        self._order = {mark.id: place for place, mark in enumerate(self.history)}
        self.active = tuple(sorted(latest, key=lambda mark: self._order[mark.id]))

    @property
    def undone(self) -> int:
        """The number of marks that were undone."""
        return sum(mark.id in self._undone for mark in self.history)

    def __iter__(self) -> Iterator[Mark]:
        return iter(self.active)

    def __len__(self) -> int:
        return len(self.active)

    def is_undone(self, mark: Mark) -> bool:
        """Whether a mark was undone."""
        return mark.id in self._undone

    def of(self, query: str) -> tuple[list[str], list[str]]:
        """The entries that are marked "same" and "different" for a query, without disputed ones.

        Args:
            query: the id of a `MarkedQuery`.
        """
        found: tuple[list[str], list[str]] = [], []
        for mark in self._of_photo.get(query, ()):
            if mark.pair not in self._disputed:
                other = mark.entry if mark.query.id == query else mark.query.id
                if not other.startswith(QUERY) and other not in found[not mark.same]:
                    found[not mark.same].append(other)
        return found

    @cached_property
    def _disputed(self) -> set[Pair]:
        return disputed_pairs(self.active)

    @cached_property
    def _of_photo(self) -> dict[str, list[Mark]]:
        """The active marks of each photo, by its id."""
        found: dict[str, list[Mark]] = {}
        for mark in self.active:
            for photo in set(mark.pair):
                found.setdefault(photo, []).append(mark)
        return found

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Marks that contradict each other; nothing is lost, and `Index.unmark` resolves them."""
        return self._found[1]

    @property
    def classes(self) -> tuple[MarkedClass, ...]:
        """Photos by what they show, without those in conflict.

        Photos that "same" marks connect are a class, and so are photos with the same attribute
        `label`. A photo that is only marked "different" is a class of its own.
        """
        return self._found[0]

    @property
    def left_out(self) -> tuple[str, ...]:
        """Ids of the photos that are in no class because of a conflict, sorted."""
        return tuple(sorted({photo for each in self.conflicts for photo in each.photos}))

    def write(self, path: str | Path) -> MarkTable:
        """Write the classes as a table of labels, which training reads: path, label and box.

        It has the photos of marks and all entries with a label. Photos in conflict, and marks of
        photos that are not in the index, are left out and counted.

        Example:
            >>> index.marks().write("labels.csv")            # doctest: +SKIP
            MarkTable(classes=12, photos=240, conflicting=0, missing=0)
        """
        if Path(path).is_dir():
            raise InputError(f"cannot write {path}: it is a folder")
        rows = [
            (photo.path, each.name, photo.box)
            for each in self.classes
            for photo in each.photos
            if photo.path
        ]
        boxes = any(box is not None for *_, box in rows)
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["path", "label", "box"] if boxes else ["path", "label"])
        for place, name, box in rows:
            shown = "" if box is None else ",".join(f"{edge:.12g}" for edge in box)
            table.writerow([place, name, shown] if boxes else [place, name])
        try:
            write_text(Path(path), text.getvalue())
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        names = {name for _, name, _ in rows}
        return MarkTable(len(names), len(rows), len(self.left_out), len(self.missing))

    @cached_property
    def _found(self) -> tuple[tuple[MarkedClass, ...], tuple[Conflict, ...]]:
        """The classes and the conflicts."""
        conflicts = [
            Conflict("changed", tuple(made), ()) for made in self._made.values() if len(made) > 1
        ]
        groups, found = split_into_groups(self.active, self.labels)
        for kind, pairs, photos in found:
            marks = [mark for mark in self.active if mark.pair in pairs]
            conflicts.append(Conflict(kind, tuple(marks), photos))
        conflicts.sort(key=lambda each: [self._order[mark.id] for mark in each.marks])
        left_out = {photo for each in conflicts for photo in each.photos}
        for photo in self._labelled.keys() - left_out:
            groups.setdefault(self.labels[photo], set()).add(photo)
        known = self._labelled | self.photos
        classes = [
            MarkedClass(name, tuple(known[photo] for photo in sorted(group)))
            for name, group in sorted(groups.items())
        ]
        return tuple(classes), tuple(conflicts)

    def _is_present(self, mark: Mark) -> bool:
        # The photo of an id may have been replaced by another one.
        named = (mark.query.id, mark.query.digest), (mark.entry, mark.digest)
        return all(
            photo in self.photos and digest in ("", self.photos[photo].digest)
            for photo, digest in named
        )
