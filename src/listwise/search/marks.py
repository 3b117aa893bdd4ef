"""Marks of people on search results: which entries show the same thing as a query.

A `Mark` is never changed. The log of an index holds the marks and what was undone, and `Marks` is
what follows from it. Photos are nodes of a graph, and "same" marks are its edges; the groups and
the conflicts depend on which marks are active, and not on their order.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from listwise.errors import InputError
from listwise.files import write_csv

if TYPE_CHECKING:
    from listwise.data.images import Box

Pair = tuple[str, str]
"""The ids of two photos, sorted."""
QUERY = "query:"
"""The ids of photos that are not entries begin with this."""
ConflictKind = Literal["changed", "people", "chain", "labels"]
_Graph = dict[str, set[str]]


def pair_of(one: str, other: str) -> Pair:
    """The pair of two photos."""
    return (one, other) if one <= other else (other, one)


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
    box: "Box | None"
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
class Undo:
    """The record that a mark was undone.

    Attributes:
        id: 16 random hexadecimal digits.
        mark: the id of the mark.
        by: the person; empty if unknown.
        time: when it was undone, in ISO 8601, UTC.
    """

    id: str
    mark: str
    by: str
    time: str


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

    kind: ConflictKind
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
        undone_ids: ids of the marks that were undone.
        photos: the photos of the marks that are in the index, the query photos, and the entries
            with a label, by id.
        labels: the attribute `label` of those entries that have it, by id.
    """

    def __init__(
        self,
        history: Sequence[Mark],
        undone_ids: frozenset[str],
        photos: Mapping[str, MarkedQuery],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.history = tuple(history)
        self.undone_ids = undone_ids
        self.photos = photos
        self.labels = labels or {}
        present = [mark for mark in self.history if self._is_present(mark)]
        self.missing = tuple(
            mark
            for mark in self.history
            if mark.id not in undone_ids and not self._is_present(mark)
        )
        # By pair and person, without those that were undone.
        self._made: dict[tuple[Pair, str], list[Mark]] = defaultdict(list)
        for mark in present:
            made = self._made[mark.pair, mark.by]
            if made and made[-1].same == mark.same:
                made.pop()  # it was repeated, so undoing the repetition undoes both
            if mark.id not in undone_ids:
                made.append(mark)
        latest = [made[-1] for made in self._made.values() if made]
        self._order = {mark.id: place for place, mark in enumerate(self.history)}
        self.active = tuple(sorted(latest, key=lambda mark: self._order[mark.id]))

    @property
    def undone(self) -> int:
        """The number of marks that were undone."""
        return sum(mark.id in self.undone_ids for mark in self.history)

    def __iter__(self) -> Iterator[Mark]:
        return iter(self.active)

    def __len__(self) -> int:
        return len(self.active)

    def of(self, query: str) -> tuple[list[str], list[str]]:
        """The entries that are marked "same" and "different" for a query, without disputed ones.

        Args:
            query: the id of a `MarkedQuery`.
        """
        found: tuple[list[str], list[str]] = [], []
        for mark in self._of_photo.get(query, ()):
            other = mark.entry if mark.query.id == query else mark.query.id
            if not other.startswith(QUERY) and other not in found[not mark.same]:
                found[not mark.same].append(other)
        return found

    @cached_property
    def _of_photo(self) -> dict[str, list[Mark]]:
        """The active marks of each photo by its id, without those of disputed pairs."""
        disputed = _disputed_pairs(self.active)
        found: dict[str, list[Mark]] = defaultdict(list)
        for mark in self.active:
            if mark.pair not in disputed:
                for photo in set(mark.pair):
                    found[photo].append(mark)
        return dict(found)

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

    @cached_property
    def class_names(self) -> dict[str, str]:
        """The name of the class of each photo in a class, by the id of the photo."""
        return {photo.id: each.name for each in self.classes for photo in each.photos}

    @property
    def left_out(self) -> tuple[str, ...]:
        """Ids of the photos that are in no class because of a conflict, sorted."""
        return tuple(sorted({photo for each in self.conflicts for photo in each.photos}))

    def write(self, path: str | Path) -> MarkTable:
        """Write the classes as a table of labels, which training reads: path, label and box.

        It has the photos of marks and all entries with a label. Photos in conflict, and marks of
        photos that are not in the index, are left out and counted.

        Example:
            >>> index.marks.read().write("labels.csv")            # doctest: +SKIP
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
        table = [["path", "label", "box"]]
        for place, name, box in rows:
            table.append([place, name, ",".join(f"{edge:.12g}" for edge in box or ())])
        try:
            write_csv(Path(path), table if boxes else [row[:2] for row in table])
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        names = {name for _, name, _ in rows}
        return MarkTable(len(names), len(rows), len(self.left_out), len(self.missing))

    @cached_property
    def _found(self) -> tuple[tuple[MarkedClass, ...], tuple[Conflict, ...]]:
        """The classes and the conflicts."""
        groups, conflicts = _split_into_groups(self.active, self.labels)
        conflicts += [
            Conflict("changed", tuple(made), ()) for made in self._made.values() if len(made) > 1
        ]
        conflicts.sort(key=lambda each: [self._order[mark.id] for mark in each.marks])
        classes = [
            MarkedClass(name, tuple(self.photos[photo] for photo in sorted(group)))
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


def _disputed_pairs(marks: Iterable[Mark]) -> set[Pair]:
    """Pairs that are marked both ways."""
    ways = {(mark.pair, mark.same) for mark in marks}
    return {pair for pair, same in ways if same and (pair, False) in ways}


def _split_into_groups(
    marks: Collection[Mark], labels: Mapping[str, str]
) -> tuple[dict[str, set[str]], list[Conflict]]:
    """Divide the photos of marks and labels into named groups, without those in conflict.

    Args:
        marks: at most one mark per pair and person. A mark of a photo with itself is left out.
        labels: the labels of photos that have one, by id.

    Returns:
        The photos of each group by its name, and the conflicts.
    """
    marks = [mark for mark in marks if mark.pair[0] != mark.pair[1]]
    disputed = _disputed_pairs(marks)
    same = {mark.pair for mark in marks if mark.same} - disputed
    different = sorted({mark.pair for mark in marks if not mark.same} - disputed)
    conflicts: list[Conflict] = []
    of_pair: dict[Pair, list[int]] = defaultdict(list)
    for number, mark in enumerate(marks):
        of_pair[mark.pair].append(number)
    same_of: dict[str, set[Pair]] = defaultdict(set)  # by the first photo
    for pair in same:
        same_of[pair[0]].add(pair)

    def add_conflict(kind: ConflictKind, pairs: Collection[Pair], photos: Iterable[str]) -> None:
        numbers = sorted(number for pair in pairs for number in of_pair[pair])
        found = tuple(marks[number] for number in numbers)
        conflicts.append(Conflict(kind, found, tuple(sorted(photos))))

    for pair in sorted(disputed):
        add_conflict("people", {pair}, pair)
    graph: _Graph = {photo: set() for mark in marks for photo in mark.pair}
    for one, other in same:
        graph[one].add(other)
        graph[other].add(one)
    for pair, chain in _cut_chains(graph, different):
        add_conflict("chain", {pair, *_edges(chain)}, chain)
    left_out = {photo for each in conflicts for photo in each.photos}
    groups: dict[str, set[str]] = defaultdict(set)
    known = set(labels.values())
    for group in _components(graph):
        names = {labels[photo] for photo in group if photo in labels}
        if len(names) > 1:
            # What each labelled photo shows is known; what the others show is not.
            inside = {pair for photo in group for pair in same_of[photo]}
            add_conflict("labels", inside, group - set(labels) - left_out)
        elif names:
            groups[names.pop()] |= group
        else:
            first = min(group)
            groups[f"photo:{first}" if first in known else first] |= group
    for photo, name in labels.items():
        groups[name].add(photo)
    name_of = {photo: name for name, group in groups.items() for photo in group}
    for one, other in different:
        if one in name_of and name_of[one] == name_of.get(other):
            add_conflict("labels", {(one, other)}, (one, other))
    left_out = {photo for each in conflicts for photo in each.photos}
    kept = {name: group - left_out for name, group in groups.items()}
    return {name: group for name, group in kept.items() if group}, conflicts


def _edges(chain: Sequence[str]) -> list[Pair]:
    return [pair_of(*edge) for edge in pairwise(chain)]


def _cut_chains(graph: _Graph, different: Collection[Pair]) -> list[tuple[Pair, list[str]]]:
    """Remove the chains of edges between photos that are marked different, the shortest first."""
    cut: list[tuple[Pair, list[str]]] = []
    while True:
        # All are looked for before any is cut, so that their order does not matter.
        group_of = {photo: i for i, group in enumerate(_components(graph)) for photo in group}
        connected = [pair for pair in different if group_of[pair[0]] == group_of[pair[1]]]
        chains = [(pair, _chain(graph, *pair)) for pair in connected]
        if not chains:
            return cut
        for one, other in (edge for _, chain in chains for edge in _edges(chain)):
            graph[one].discard(other)
            graph[other].discard(one)
        cut += chains


def _reached(graph: _Graph, start: str) -> dict[str, str]:
    """The photos that are connected to one, nearest first, each with the one before it."""
    before = {start: start}
    waiting = [start]
    for here in waiting:
        new = sorted(graph[here] - before.keys())
        before.update(dict.fromkeys(new, here))
        waiting += new
    return before


def _chain(graph: _Graph, start: str, end: str) -> list[str]:
    """A shortest path between two connected photos, the first by id."""
    before = _reached(graph, start)
    chain = [end]
    while chain[-1] != start:
        chain.append(before[chain[-1]])
    return chain


def _components(graph: _Graph) -> list[set[str]]:
    """The groups of connected photos, in the order of their first id."""
    groups: list[set[str]] = []
    seen: set[str] = set()
    for photo in sorted(graph):
        if photo not in seen:
            groups.append(set(_reached(graph, photo)))
            seen |= groups[-1]
    return groups
