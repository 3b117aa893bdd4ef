"""The ground truth of a benchmark: which database images are right for each query."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.errors import InputError
from listwise.evaluation.metrics import Measure, label_metrics, trapezoid_metrics

Box = tuple[float, float, float, float]
Indices = NDArray[np.int64]

ORIGINAL, LABELS = "Original", "Labels"
"""The names of the only protocol of Oxford5k and Paris6k, and of the protocol of labelled sets."""
SELF = "self"
"""The grade of a query's own image: it is junk, and no list of results shows it."""

_NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Protocol:
    """The rules of a benchmark: which images are positive, which are junk, what is measured.

    Attributes:
        positive: the grades of the images that a query should find.
        junk: the grades of the images that are removed from the list before ranks are counted.
        measure: computes the metrics from the ranks of the positives.
    """

    positive: tuple[str, ...]
    junk: tuple[str, ...] = ()
    measure: Measure = trapezoid_metrics


REVISITED = {
    "Easy": Protocol(("easy",), ("junk", "hard")),
    "Medium": Protocol(("easy", "hard"), ("junk",)),
    "Hard": Protocol(("hard",), ("junk", "easy")),
}


@dataclass(frozen=True, eq=False)
class JudgedQueries:
    """The Q queries of a benchmark, and the grades of its N database images for each query.

    A grade is a name such as "easy" or "junk"; an image without a grade is a negative. A protocol
    decides which grades are positive and which are junk.

    Attributes:
        names: the names of the N database images, without folder and extension.
        queries: the names of the Q queries.
        boxes: for each query, the box (left, top, right, bottom) in pixels that is searched for,
            or None for the whole photo.
        grades: for each grade, one array per query with the positions in `names` of its images.
        protocols: the protocols of the benchmark, by name.

    Examples:
        >>> judged = JudgedQueries.labelled(["cat", "cat", "dog"])
        >>> judged.positives("Labels", query=0)
        array([1])
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
        """Create the ground truth of a revisited benchmark, with the protocols Easy, Medium, Hard.

        `easy`, `hard` and `junk` have, for each query, the positions in `names` of its images.
        """
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
        """Create the ground truth of the original Oxford5k or Paris6k.

        `good`, `ok` and `junk` have, for each query, the positions in `names` of its images. The
        photo of a query is in the database and one of its good images, as in the benchmark.
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
        """Create the ground truth of labelled images: those with the query's label are positive.

        Without a gallery, every image is a query and is left out of its own list. Positions are
        computed on access, so a large data set needs little memory.

        Args:
            labels: [Q] labels of the queries.
            gallery_labels: [N] labels of the database; by default the queries are the database.
            names: names of the N database images; by default their positions.
            queries: names of the Q queries; by default their positions.
            boxes: boxes of the Q queries; by default whole photos.
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
        grades = {"same": _LazyPositions(len(own), same), SELF: _LazyPositions(len(own), itself)}
        protocols = {LABELS: Protocol(("same",), (SELF,), label_metrics)}
        return cls(names, queries, boxes or [None] * len(own), grades, protocols)

    def __post_init__(self) -> None:
        """Raise an `InputError` if the lists differ in length."""
        lengths = {len(part) for part in (self.queries, self.boxes, *self.grades.values())}
        if len(lengths) > 1:
            raise InputError(
                "every query needs a name, a box and a list of positions per grade: "
                f"found lists of lengths {sorted(lengths)}"
            )

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.queries)

    def positives(self, protocol: str, query: int) -> Indices:
        """Return the positions of the images that a query should find under a protocol."""
        return self._images(self.protocols[protocol].positive, query)

    def junk(self, protocol: str, query: int) -> Indices:
        """Return the positions of the images that do not count for a query under a protocol."""
        return self._images(self.protocols[protocol].junk, query)

    def own(self, query: int) -> Indices:
        """Return the position of the query's own image: [1], or [0] if it stays in its list."""
        return self._images((SELF,) if SELF in self.grades else (), query)

    def images(self, query: int) -> Indices:
        """Return the positions of all images that have a grade, in the order of `grades`."""
        return self._images(tuple(self.grades), query)

    def subset(self, queries: ArrayLike, database: ArrayLike) -> "JudgedQueries":
        """Keep some queries and some images of the database, both given by their positions."""
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
            grades={g: _LazyPositions(len(rows), moved(grade)) for g, grade in self.grades.items()},
        )

    def _images(self, grades: tuple[str, ...], query: int) -> Indices:
        return join([self.grades[grade][query] for grade in grades])


def join(parts: Sequence[Indices]) -> Indices:
    """Concatenate positions or ranks; a single part is returned without a copy."""
    return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])


class _LazyPositions(Sequence[Indices]):
    """A list with the positions of each query, computed on access."""

    def __init__(self, count: int, at: Callable[[int], Indices]) -> None:
        self._queries, self._at = range(count), at

    def __len__(self) -> int:
        return len(self._queries)

    def __getitem__(self, query: Any) -> Any:
        place = self._queries[query]
        return self._at(place) if isinstance(place, int) else [self._at(i) for i in place]


def _members(labels: NDArray[np.generic]) -> dict[object, Indices]:
    """Return the sorted positions of the images of each label."""
    names, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    parts = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return dict(zip(names.tolist(), parts, strict=True))
