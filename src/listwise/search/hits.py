"""Search a store for several queries together, with expansion and refinement if wanted."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from listwise.data.images import Box
from listwise.descriptors.tuned import Expansion
from listwise.errors import InputError
from listwise.models.calibration import Calibration
from listwise.search.entries import Entry, Float32, NoEntryError
from listwise.search.expansion import alpha_query_expansion
from listwise.search.filters import Filter
from listwise.search.refinement import Refinement
from listwise.search.store import Store


class ThresholdError(InputError):
    """A minimum score or probability that a search cannot use."""


@dataclass(frozen=True, eq=False)
class Hit:
    """An entry that a search found.

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

    entry: Entry
    score: float
    inliers: int | None = None
    matches: npt.NDArray[np.float32] | None = None
    photo: int | None = None
    probability: float | None = None
    refined: float | None = None

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


@dataclass(frozen=True, eq=False)
class Query:
    """A query of one or several examples, and how to search for it.

    Attributes:
        vectors: descriptors of the examples [n, C]; the search uses their mean.
        k: the maximum number of hits.
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
    """

    vectors: Float32
    k: int
    expand: bool = False
    exclude: Collection[int] = ()
    where: Filter | None = None
    min_score: float = -np.inf
    refine: Refinement | None = None
    same: Sequence[int] = ()
    different: Sequence[int] = ()

    @property
    def marked(self) -> list[int]:
        """The keys of the marked entries."""
        return [*self.same, *self.different]


@dataclass(frozen=True)
class _Found:
    """The key of an entry with its scores; `plain` is that of the query as it was given."""

    key: int
    score: float
    plain: float
    refined: float | None = None


def find_hits(
    store: Store, queries: Sequence[Query], calibration: Calibration | None = None
) -> list[list[Hit]]:
    """Find the entries nearest to each query, best first, in one search of the store.

    With a calibration, the hits have probabilities. A calibration is fitted on the scores of
    photos, so it is applied to the query before marks and expansion.
    """
    plain = calibration is not None
    found = _nearest(store, queries, plain)
    entries = _entries(store, found)
    if any(each.key not in entries for row in found for each in row):
        # Another process removed some of them after the search: search again.
        store.refresh()
        found = _nearest(store, queries, plain)
        entries = _entries(store, found)
    return [
        [_hit(entries[each.key], each, calibration) for each in row if each.key in entries]
        for row in found
    ]


def _hit(entry: Entry, found: _Found, calibration: Calibration | None) -> Hit:
    likely = None if calibration is None else float(calibration.probability(found.plain))
    return Hit(entry, found.score, probability=likely, refined=found.refined)


def lowest_score(
    calibration: Calibration | None, min_score: float | None, min_probability: float | None
) -> float:
    """The score that a hit needs to reach a minimum score and a minimum probability."""
    lowest = -np.inf
    if min_score is not None:
        if not np.isfinite(min_score):
            raise ThresholdError(f"`min_score` must be a number, not {min_score}")
        lowest = min_score
    if min_probability is not None:
        if not 0 <= min_probability <= 1:
            raise ThresholdError(f"`min_probability` must be from 0 to 1, not {min_probability:g}")
        if calibration is None:
            raise ThresholdError(
                "`min_probability` needs a calibrated model: use `Model.calibrate` or the model of "
                "a training run, or give `min_score`"
            )
        lowest = max(lowest, calibration.score(min_probability))
    return lowest


def entry_vectors(store: Store, keys: Sequence[int]) -> Float32:
    """Return the descriptors of entries: keys [n] -> [n, C]; `NoEntryError` for unknown keys."""
    known = store.get(keys)
    for key in keys:
        if key not in known:
            raise NoEntryError(f"the index has no entry {key}")
    return store.vectors(np.array(keys, np.int64))


def _nearest(store: Store, queries: Sequence[Query], plain: bool) -> list[list[_Found]]:
    """The nearest entries of each query, with the scores before expansion if they are needed."""
    try:
        return _search(store, queries, plain)
    except NoEntryError:
        # A neighbor was removed before its descriptor was read.
        store.refresh()
        return _search(store, queries, plain)


def _search(store: Store, queries: Sequence[Query], plain: bool) -> list[list[_Found]]:
    given = np.stack([_mean(query.vectors) for query in queries])
    marked = [_marked_vectors(store, query) for query in queries]
    rows = np.stack(list(map(_moved, queries, given, marked)))
    expanded = [i for i, query in enumerate(queries) if query.expand]
    if expanded and len(store):
        how = store.header.expansion or Expansion()
        rows[expanded] = alpha_query_expansion(rows[expanded], store, how.alpha, how.k)
    found: list[list[_Found]] = [[] for _ in queries]
    for where in dict.fromkeys(query.where for query in queries):
        places = [i for i, query in enumerate(queries) if query.where == where]
        most = max(_depth(queries[i]) for i in places)
        scores, keys = store.search(rows[places], most, where)
        for i, row, values in zip(places, keys, scores, strict=True):
            query = queries[i]
            hidden = {*query.exclude, *query.marked}
            near = [
                _Found(int(key), float(score), float(score))
                for key, score in zip(row, values, strict=True)
                if key >= 0 and int(key) not in hidden
            ]
            if query.refine is not None:
                near = _refined(store, query.refine, rows[i], near)
            found[i] = [each for each in near if each.score >= query.min_score][: query.k]
            if query.marked:
                found[i] = _with_marked(store, query, marked[i] @ rows[i], found[i])
            if plain and (query.expand or query.marked) and found[i]:
                found[i] = _with_plain_scores(store, given[i], found[i])
    return found


def _with_plain_scores(store: Store, row: Float32, found: list[_Found]) -> list[_Found]:
    vectors = store.vectors(np.array([each.key for each in found], np.int64))
    return [
        replace(each, plain=float(score)) for each, score in zip(found, vectors @ row, strict=True)
    ]


def _marked_vectors(store: Store, query: Query) -> Float32:
    """The descriptors of the marked entries [n, C]."""
    if not query.marked:
        return np.empty((0, store.header.dim), np.float32)
    return store.vectors(np.array(query.marked, np.int64))


def _moved(query: Query, row: Float32, marked: Float32) -> Float32:
    """The query after its marks: [C], descriptors of the marked entries [n, C] -> [C]."""
    if not query.marked:
        return row
    from listwise.search.moved_query import move_query  # searches without marks need no loss

    return move_query(row, marked[: len(query.same)], marked[len(query.same) :])


def _with_marked(store: Store, query: Query, scores: Float32, found: list[_Found]) -> list[_Found]:
    """Put the entries that are marked "same" first and those marked "different" last.

    `scores` are those of the marked entries [n].
    """
    score_of = dict(zip(query.marked, scores.tolist(), strict=True))
    keys = [key for key in score_of if key not in query.exclude]
    if query.where is not None:
        entries = store.get(keys)  # without those that were removed meanwhile
        found_keys = [key for key in keys if key in entries]
        keys = [key for key in found_keys if query.where.matches(entries[key].attributes)]
    marked = [_Found(key, score_of[key], score_of[key]) for key in keys]
    marked.sort(key=lambda each: -each.score)
    same = set(query.same)
    first = [each for each in marked if each.key in same]
    last = [each for each in marked if each.key not in same and each.score >= query.min_score]
    return [*first, *found, *last][: query.k]


def marked_order(
    hits: Sequence[Hit], same: Collection[int], different: Collection[int]
) -> list[Hit]:
    """Sort hits so that those marked "same" come first and those marked "different" last."""
    first, last = set(same), set(different)
    return sorted(hits, key=lambda hit: (hit.entry.key in last) - (hit.entry.key in first))


def _depth(query: Query) -> int:
    """The number of entries to search for."""
    wanted = query.k if query.refine is None else max(query.k, query.refine.size)
    return wanted + len(query.exclude) + len(query.marked)


def _refined(store: Store, refine: Refinement, row: Float32, near: list[_Found]) -> list[_Found]:
    """Re-rank the short list; the entries after it keep their order."""
    short, rest = near[: refine.size], near[refine.size :]
    vectors = store.vectors(np.array([each.key for each in short], np.int64))
    scores = refine.score(row, vectors)
    order = np.argsort(-scores, kind="stable")
    return [replace(short[i], refined=float(scores[i])) for i in order] + rest


def _entries(store: Store, found: list[list[_Found]]) -> dict[int, Entry]:
    return store.get(sorted({each.key for row in found for each in row}))


def _mean(vectors: Float32) -> Float32:
    if not len(vectors):
        raise InputError("nothing to search for: give a photo or an entry")
    if len(vectors) == 1:
        row: Float32 = vectors[0]
        return row
    total: Float32 = vectors.sum(axis=0)
    return total / max(float(np.linalg.norm(total)), float(np.finfo(np.float32).tiny))
