"""Search a store for several queries together, with expansion and refinement if wanted."""

import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from listwise.calibration import Calibration
from listwise.data.images import Box, UprightPhoto
from listwise.data.photos import Photo
from listwise.errors import InputError
from listwise.search.entries import (
    Entry,
    Float32,
    Keys,
    Names,
    NoEntryError,
    key_of,
    list_names,
)
from listwise.search.exact import without_itself
from listwise.search.filters import Filter
from listwise.search.generation import Generation
from listwise.search.options import SearchOptions
from listwise.search.refinement import Refinement, alpha_query_expansion
from listwise.search.store import Store
from listwise.settings import Expansion

QueryPhoto = Photo | BytesIO


# Not 007 or 1e5, which may be codes.
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(\.[0-9]+)?")


class QueryError(InputError):
    """A query or an option that a search of this index cannot use."""


class StoppedError(Exception):
    """The query is finished: nobody waits for its result any more."""


class Hit(Mapping[str, Any]):
    """An entry that a search found.

    As a mapping, it is one row of a table: `DataFrame(hits)` has the columns id, path, width,
    height and score, those of the other scores that the search computed, and the attributes, of
    which texts such as 37 are numbers.

    Attributes:
        entry: the entry.
        score: the dot product of its descriptor and the query, after expansion if the search
            expands the query.
        refined: the score that `refine` computed and the hits are sorted by; None if the hit was
            not in the short list.
        inliers: after re-ranking, the number of matched points that agree on one geometry; None
            if the hit was not verified.
        matches: the matched points, float32 [m, 4]: x and y in the query photo, then x and y in
            the photo of the entry, in pixels of the upright photos.
        photo: the position of the query photo that the points are in.
        probability: the probability that the query and the entry show the same thing, computed
            from the query before expansion; None if the model is not calibrated.
    """

    # Not a dataclass: pandas would make a column of dictionaries of the entry.
    def __init__(
        self,
        entry: Entry,
        score: float,
        inliers: int | None = None,
        matches: npt.NDArray[np.float32] | None = None,
        photo: int | None = None,
        probability: float | None = None,
        refined: float | None = None,
    ) -> None:
        self.entry, self.score, self.refined, self.probability = entry, score, refined, probability
        self.inliers, self.matches, self.photo = inliers, matches, photo

    def changed(self, **values: Any) -> "Hit":
        """Return the hit with other values."""
        return Hit(**{**vars(self), **values})

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __getitem__(self, name: str) -> Any:
        return self._row()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._row())

    def __len__(self) -> int:
        return len(self._row())

    def _row(self) -> dict[str, Any]:
        entry, names = self.entry, ("score", "refined", "inliers", "probability")
        row = {name: getattr(entry, name) for name in ("id", "path", "width", "height")}
        row |= {name: value for name in names if (value := getattr(self, name)) is not None}
        for name, text in entry.attributes.items():
            number = _NUMBER.fullmatch(text)
            value = text if not number else float(text) if number[1] else int(text)
            row[f"attributes.{name}" if name in row else name] = value
        return row

    @property
    def id(self) -> str:
        """The id of the entry."""
        return self.entry.id

    @property
    def path(self) -> str:
        """The path of the photo."""
        return self.entry.path

    @property
    def box(self) -> Box | None:
        """The part of the photo that was described; None for all of it."""
        return self.entry.box

    @property
    def attributes(self) -> Mapping[str, str]:
        """The photo's other columns in its table."""
        return self.entry.attributes

    def __repr__(self) -> str:
        inliers = "" if self.inliers is None else f", inliers={self.inliers}"
        return f"Hit({self.id!r}, score={self.score:.4f}{inliers})"


class Hits(list[Hit]):
    """The hits of one query, best first; a notebook shows their photos.

    Args:
        hits: the hits.
        store: the store of their entries, which has the thumbnails.
    """

    def __init__(self, hits: Iterable[Hit], store: Store) -> None:
        super().__init__(hits)
        self._store = store

    def _repr_html_(self) -> str:
        from listwise.pages import notebook_html

        thumbnails: dict[int, bytes] = {}
        with suppress(Exception):  # the index may be closed
            thumbnails = self._store.contents("thumbnail", [hit.entry.key for hit in self])
        shown = [(thumbnails.get(hit.entry.key, b""), f"{hit.score:.3f} {hit.id}") for hit in self]
        return notebook_html("" if self else "no hits", shown)


@dataclass(frozen=True, eq=False)
class Query:
    """Examples of one thing, and how to search for it.

    Attributes:
        photos: photos, or the content of image files.
        boxes: for each photo the part to search for, or None.
        entries: ids or keys of entries that are further examples; they are not among the hits.
        vectors: descriptors [n, dim] that are further examples.
        options: the options of the search.
        finished: set when nobody waits for the result any more; work on it then stops.
    """

    photos: Sequence[QueryPhoto] = ()
    boxes: Sequence[Box | None] = ()
    entries: Sequence[str | int] = ()
    vectors: Float32 | None = None
    options: SearchOptions = field(default_factory=SearchOptions)
    finished: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise a `StoppedError` if nobody waits for the result."""
        if self.finished.is_set():
            raise StoppedError


@dataclass(frozen=True, eq=False)
class SearchResult:
    """What is searched for in a generation of an index, and the hits.

    Attributes:
        query: the query.
        photos: its decoded photos, to verify hits; none without `rerank`.
        vectors: descriptors of the examples [n, C]; the search uses their mean.
        depth: the maximum number of hits.
        expand: expand the query with its first neighbors (αQE).
        exclude: keys of entries that are not returned, and that refinement does not use.
        where: a filter that the hits match; query expansion uses all entries, refinement those
            that match.
        min_score: the minimum score of a hit.
        refine: re-rank the first hits by their global descriptors.
        same: keys of entries that are marked as the same thing. They move the query, and come
            first, without regard to `min_score`.
        different: keys of entries that are marked as something else. They move the query, and come
            after all other entries.
        hits: at least the hits up to the last one of `page`, and one more if there is one.
        matching: the number of entries that match `where`; only a server counts them.
    """

    query: Query
    generation: Generation
    photos: Sequence[UprightPhoto]
    vectors: Float32
    depth: int
    expand: bool
    exclude: Collection[int]
    where: Filter | None
    min_score: float
    refine: Refinement | None
    same: Sequence[int]
    different: Sequence[int]
    hits: list[Hit] = field(default_factory=list)
    matching: int = 0

    @property
    def page(self) -> list[Hit]:
        """The hits from `start`, at most `k`."""
        options = self.query.options
        return self.hits[options.start : options.start + options.k]

    @property
    def marked(self) -> list[int]:
        """The keys of the marked entries."""
        return [*self.same, *self.different]

    @property
    def reach(self) -> int:
        """The number of entries to search for."""
        wanted = self.depth if self.refine is None else max(self.depth, self.refine.size)
        return wanted + len(self.exclude) + len(self.marked)


class _Found(NamedTuple):
    """The key of an entry with its scores."""

    key: int
    score: float
    refined: float | None = None


def find_hits(generation: Generation, searches: Sequence[SearchResult]) -> list[list[Hit]]:
    """Find the entries nearest to each query, best first, in one search of the store.

    If the model is calibrated, the hits have probabilities. A calibration is fitted on the scores
    of photos, so it is applied to the query before marks and expansion.
    """
    try:
        return _search(generation, searches, complete=True)
    except NoEntryError:  # another process removed some of them meanwhile
        generation.store.refresh()
        return _search(generation, searches)


def expands(generation: Generation, options: SearchOptions, marked: bool) -> bool:
    """Whether a search expands its query.

    By default, if the model is tuned to it, and `refine`, `min_probability` and marked entries
    are not given. A minimum probability is that of the query as it was given, which the hits of
    an expanded or moved query are not sorted by.
    """
    for wrong, name in (options.expand, "`expand`"), (marked, "marked entries"):
        if wrong and options.min_probability is not None:
            raise QueryError(
                f"`min_probability` does not work with {name}: leave one of them out, or give "
                "`min_score`"
            )
    if options.expand is not None:
        return options.expand
    plain = options.refine is None and options.min_probability is None and not marked
    return plain and generation.header.expansion is not None


def lowest_score(calibration: Calibration | None, options: SearchOptions) -> float:
    """The score that a hit needs to reach the minimum score and probability of the options."""
    lowest = -np.inf if options.min_score is None else options.min_score
    if options.min_probability is not None:
        if calibration is None:
            raise QueryError(
                "`min_probability` needs a calibrated model: run listwise calibrate MODEL PHOTOS, "
                "or give `min_score`"
            )
        lowest = max(lowest, calibration.score(options.min_probability))
    return lowest


def find_entries(store: Store, names: Names) -> list[Entry]:
    """Find entries by ids or keys, each once; `NoEntryError` if one does not exist."""
    given = {key_of(name): name for name in list_names(names)}
    found = store.get(sorted(given)) if given else {}
    for key, name in given.items():
        if key not in found:
            raise NoEntryError(
                f"the index has no entry {name}: give an id or a key; listwise index list shows "
                "the ids"
            )
    return [found[key] for key in given]


def find_marked(store: Store, same: Names, different: Names) -> tuple[list[Entry], list[Entry]]:
    """Find the entries that are marked "same" and those marked "different" by ids or keys."""
    found = find_entries(store, same), find_entries(store, different)
    for entry in found[0]:
        if entry.id in {other.id for other in found[1]}:
            raise QueryError(f"{entry.id} is in `same` and in `different`: give it in one of them")
    return found


def nearest_others(store: Store, keys: Keys, k: int) -> Iterator[list[tuple[int, float]]]:
    """The k nearest other entries of each of these entries, best first: keys with scores."""
    scores, found = without_itself(*store.search(store.vectors(keys), k + 1), keys, k)
    for row, values in zip(found.tolist(), scores.tolist(), strict=True):
        yield [(key, score) for key, score in zip(row, values, strict=True) if key >= 0]


def _search(
    generation: Generation, searches: Sequence[SearchResult], complete: bool = False
) -> list[list[Hit]]:
    """The hits of each query; with `complete`, a `NoEntryError` if one was removed meanwhile."""
    store, calibration = generation.store, generation.calibration
    given = np.stack([_mean(each.vectors) for each in searches])
    rows = given.copy()
    marked = {i: store.vectors(each.marked) for i, each in enumerate(searches) if each.marked}
    for i, vectors in marked.items():
        rows[i] = _moved(searches[i], given[i], vectors)
    expanded = [i for i, each in enumerate(searches) if each.expand]
    if expanded and len(store):
        how = store.header.expansion or Expansion()
        rows[expanded] = alpha_query_expansion(rows[expanded], store, how.alpha, how.k)
    found: list[list[_Found]] = [[] for _ in searches]
    for where in dict.fromkeys(each.where for each in searches):
        places = [i for i, each in enumerate(searches) if each.where == where]
        scores, keys = store.search(rows[places], max(searches[i].reach for i in places), where)
        for i, row, values in zip(places, keys.tolist(), scores.tolist(), strict=True):
            hidden = {-1, *searches[i].exclude, *searches[i].marked}
            pairs = zip(row, values, strict=True)
            near = [_Found(key, score) for key, score in pairs if key not in hidden]
            found[i] = _ordered(store, searches[i], rows[i], marked.get(i, rows[:0]), near)
    entries = store.get(sorted({each.key for row in found for each in row}))
    if complete and any(each.key not in entries for row in found for each in row):
        raise NoEntryError
    hits = []
    for search, row, some in zip(searches, given, found, strict=True):
        some = [each for each in some if each.key in entries]
        plain = np.array([each.score for each in some])
        if calibration is not None and (search.expand or search.marked):
            plain = store.vectors([each.key for each in some]) @ row
        chances = [None] * len(some) if calibration is None else calibration.probability(plain)
        hits.append(
            [
                Hit(
                    entries[each.key],
                    each.score,
                    probability=None if chance is None else float(chance),
                    refined=each.refined,
                )
                for each, chance in zip(some, chances, strict=True)
            ]
        )
    return hits


def _mean(vectors: Float32) -> Float32:
    if len(vectors) == 1:
        row: Float32 = vectors[0]
        return row
    total: Float32 = vectors.sum(axis=0)
    return total / max(float(np.linalg.norm(total)), float(np.finfo(np.float32).tiny))


def _moved(search: SearchResult, row: Float32, marked: Float32) -> Float32:
    """The query after its marks: [C], descriptors of the marked entries [n, C] -> [C]."""
    from listwise.search.moved_query import move_query  # searches without marks need no loss

    return move_query(row, marked[: len(search.same)], marked[len(search.same) :])


def _ordered(
    store: Store, search: SearchResult, row: Float32, marked: Float32, near: list[_Found]
) -> list[_Found]:
    """Refine the short list, and add the marked entries: "same" first, "different" last.

    The entries after the short list keep their order.
    """
    if search.refine is not None:
        short, rest = near[: search.refine.size], near[search.refine.size :]
        refined = search.refine.score(row, store.vectors([each.key for each in short]))
        order = np.argsort(-refined, kind="stable")
        near = [short[i]._replace(refined=float(refined[i])) for i in order] + rest
    near = [each for each in near if each.score >= search.min_score]
    score_of = dict(zip(search.marked, (marked @ row).tolist(), strict=True))
    shown = [key for key in score_of if key not in search.exclude]
    if shown and search.where is not None:
        matching = set(store.keys(search.where).tolist())
        shown = [key for key in shown if key in matching]
    found = sorted((_Found(key, score_of[key]) for key in shown), key=lambda each: -each.score)
    first = [each for each in found if each.key in search.same]
    last = [each for each in found if each.key not in search.same]
    last = [each for each in last if each.score >= search.min_score]
    return [*first, *near, *last][: search.depth]


def marked_order(search: SearchResult, hits: Sequence[Hit]) -> list[Hit]:
    """Sort hits so that those marked "same" come first and those marked "different" last."""
    first, last = set(search.same), set(search.different)
    return sorted(hits, key=lambda hit: (hit.entry.key in last) - (hit.entry.key in first))
