"""What is right for every query of a benchmark: one type for every kind of ground truth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.errors import InputError
from listwise.evaluation.measures import Measure, label_figures, trapezoid_figures

Box = tuple[float, float, float, float]
Indices = NDArray[np.int64]

ORIGINAL, LABELS = "Original", "Labels"
"""The one protocol of Oxford5k and Paris6k, and that of labelled sets."""
SELF = "self"
"""The grade of a query's own image, which is junk and never shown."""

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Protocol:
    """Which grades are positive, which are junk, and which figures are computed."""

    positive: tuple[str, ...]
    junk: tuple[str, ...] = ()
    measure: Measure = trapezoid_figures


REVISITED = {
    "Easy": Protocol(("easy",), ("junk", "hard")),
    "Medium": Protocol(("easy", "hard"), ("junk",)),
    "Hard": Protocol(("hard",), ("junk", "easy")),
}


@dataclass(frozen=True, eq=False)
class JudgedQueries:
    """The queries of a benchmark, and the grade of the database images for each.

    Images without a grade are negatives; junk is removed before ranks are counted.

    Shapes: `names` has the N database images (no folder, no extension); `queries` and `boxes`
    (left, top, right, bottom in pixels, None for the whole photo) have one entry for each of the Q
    queries, and so has every grade: the positions in `names` of the images of that grade.
    """

    names: Sequence[str]
    queries: Sequence[str]
    boxes: Sequence[Box | None]
    grades: Mapping[str, Sequence[Indices]]
    protocols: Mapping[str, Protocol]

    @classmethod
    def revisited(
        cls,
        names: Sequence[str],
        queries: Sequence[str],
        boxes: Sequence[Box | None],
        *,
        easy: Sequence[Indices],
        hard: Sequence[Indices],
        junk: Sequence[Indices],
    ) -> "JudgedQueries":
        """The protocols Easy, Medium and Hard of the revisited Oxford and Paris benchmarks."""
        grades = {"easy": easy, "hard": hard, "junk": junk}
        return cls(names, queries, boxes, grades, REVISITED)

    @classmethod
    def oxford(
        cls,
        names: Sequence[str],
        queries: Sequence[str],
        boxes: Sequence[Box | None],
        *,
        good: Sequence[Indices],
        ok: Sequence[Indices],
        junk: Sequence[Indices],
    ) -> "JudgedQueries":
        """The protocol of the original Oxford5k and Paris6k.

        A query's own photo is in the database and among its good images, as in the benchmark.
        """
        grades = {"good": good, "ok": ok, "junk": junk}
        protocols = {ORIGINAL: Protocol(("good", "ok"), ("junk",))}
        return cls(names, queries, boxes, grades, protocols)

    @classmethod
    def labelled(
        cls,
        labels: ArrayLike,
        gallery_labels: ArrayLike | None = None,
        *,
        names: Sequence[str] | None = None,
        queries: Sequence[str] | None = None,
        boxes: Sequence[Box | None] | None = None,
    ) -> "JudgedQueries":
        """Images of a query's label are positive, in a gallery or among the queries themselves.

        Without a gallery every image is a query and is left out of its own list. Positions are
        computed when they are used, so that a large set needs little memory.

        Shapes: labels [Q], gallery_labels [N].
        """
        own = np.asarray(labels)
        alone = gallery_labels is None
        others = own if gallery_labels is None else np.asarray(gallery_labels)
        members = _members(others)

        def same(query: int) -> Indices:
            found = members.get(own[query].item(), _NONE)
            return found[found != query] if alone else found

        def itself(query: int) -> Indices:
            return np.array([query] if alone else [], np.int64)

        queries = [str(i) for i in range(len(own))] if queries is None else queries
        if names is None:
            names = queries if alone else [str(i) for i in range(len(others))]
        grades = {"same": _Computed(len(own), same), SELF: _Computed(len(own), itself)}
        protocols = {LABELS: Protocol(("same",), (SELF,), label_figures)}
        return cls(names, queries, boxes or [None] * len(own), grades, protocols)

    def __post_init__(self) -> None:
        """Refuse lists of different lengths."""
        lengths = {len(part) for part in (self.queries, self.boxes, *self.grades.values())}
        if len(lengths) > 1:
            raise InputError("every query needs a name, a box and a list of positions per grade")

    def __len__(self) -> int:
        """Number of queries."""
        return len(self.queries)

    def positives(self, protocol: str, query: int) -> Indices:
        """Positions of the images that a query should find under a protocol."""
        return self._images(self.protocols[protocol].positive, query)

    def junk(self, protocol: str, query: int) -> Indices:
        """Positions of the images that do not count for a query under a protocol."""
        return self._images(self.protocols[protocol].junk, query)

    def own(self, query: int) -> Indices:
        """The position of the query's own image, where it is left out of its own list."""
        return self._images((SELF,) if SELF in self.grades else (), query)

    def images(self, query: int) -> Indices:
        """Positions of all images that have a grade, grade by grade in the order of `grades`."""
        return self._images(tuple(self.grades), query)

    def subset(self, queries: ArrayLike, database: ArrayLike) -> "JudgedQueries":
        """Some queries among some images of the database, both given by their positions."""
        rows, kept = np.asarray(queries, np.int64), np.asarray(database, np.int64)
        place = np.full(len(self.names), -1)
        place[kept] = np.arange(len(kept))

        def moved(grade: Sequence[Indices]) -> Callable[[int], Indices]:
            def at(query: int) -> Indices:
                found: Indices = place[grade[int(rows[query])]]
                return found[found >= 0]

            return at

        return replace(
            self,
            names=[self.names[i] for i in kept],
            queries=[self.queries[i] for i in rows],
            boxes=[self.boxes[i] for i in rows],
            grades={g: _Computed(len(rows), moved(grade)) for g, grade in self.grades.items()},
        )

    def _images(self, grades: tuple[str, ...], query: int) -> Indices:
        return join([self.grades[grade][query] for grade in grades])


def join(parts: Sequence[Indices]) -> Indices:
    """Positions or ranks one after the other; a single part is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])


class _Computed(Sequence[Indices]):
    """Positions for each query, computed when they are used."""

    def __init__(self, count: int, at: Callable[[int], Indices]) -> None:
        self._queries, self._at = range(count), at

    def __len__(self) -> int:
        return len(self._queries)

    def __getitem__(self, query: Any) -> Any:
        place = self._queries[query]
        return self._at(place) if isinstance(place, int) else [self._at(i) for i in place]


def _members(labels: NDArray[np.generic]) -> dict[object, Indices]:
    """The positions of each label's images, in order."""
    names, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    parts = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return dict(zip(names.tolist(), parts, strict=True))
