"""Build the content of a report from scores and ground truth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.data.images import ImageError, image_size
from listwise.errors import InputError
from listwise.evaluation import (
    JudgedQueries,
    Results,
    evaluate_scores,
    rank_scores,
    ranks_of_positives,
)
from listwise.results.report.content import (
    ClassResult,
    Curve,
    ListEntry,
    Mark,
    Match,
    ModelResult,
    QueryResult,
    RankedList,
)
from listwise.results.report.curves import precision_recall_curve

Indices = NDArray[np.int64]
MatchFunction = Callable[[int, int], ArrayLike | None]
"""A function of the positions of a query and an image that returns their matching points [m, 4].

A row is x, y in the query photo and x, y in the image, in pixels of the upright whole photos; the
center of the first pixel is 0. The function returns None for a pair that was not verified.
"""
_PhotoMatches = tuple[int | None, tuple[Match, ...] | None]
"""The number of matching points of two photos, and the points to draw."""

_MARKS: tuple[Mark, ...] = ("wrong", "right", "junk")
_JUNK_SHOWN = 3  # per list; under Hard, hundreds of easy photos may come first
_DRAWN = 2000  # maximum number of queries for the curves
_CHARTED = 5000  # maximum number of queries in the chart of AP
_SCORES = 1 << 22  # maximum number of scores in memory
_POINTS = 60  # points drawn for a pair of photos; more would be unreadable


@dataclass(frozen=True, eq=False)
class ModelSearch:
    """The search results of a model, or of any other search method, on a benchmark.

    Args:
        name: name of the model.
        scores: maps the positions of queries [q] to their scores [q, N].
        results: protocol -> result.
        matches: returns the matching points of a query and an image, to be drawn.
    """

    name: str
    scores: Callable[[Indices], NDArray[np.floating]]
    results: Results
    matches: MatchFunction | None = None

    @classmethod
    def of_scores(
        cls,
        name: str,
        scores: ArrayLike,
        judged: JudgedQueries,
        matches: MatchFunction | None = None,
    ) -> "ModelSearch":
        """Create a `ModelSearch` from the scores of every query with every image: [Q, N]."""
        table = np.asarray(scores)
        results = evaluate_scores(table, judged)
        return cls(name, lambda queries: table[queries], results, matches)


def report_models(
    searches: Sequence[ModelSearch],
    judged: JudgedQueries,
    query_paths: Sequence[str],
    database_paths: Sequence[str],
    *,
    k: int = 10,
    most: int = 100,
    seed: int = 0,
    classes: Sequence[str] | None = None,
) -> list[ModelResult]:
    """Build the content of a report for each search, for `write_report`.

    If a benchmark has more than `most` queries, the report shows the same queries for every model:
    half are those with the lowest AP of any model, half are drawn at random. The curves of a large
    set use two thousand queries drawn at random, and the chart of AP five thousand.

    Args:
        searches: one or two searches of the same benchmark.
        judged: the ground truth of Q queries and N images.
        query_paths: files of the Q queries.
        database_paths: files of the N images.
        k: number of photos per list, without junk.
        most: maximum number of queries shown.
        seed: seed of the random choices.
        classes: the class of each query, for a table with the mean AP of each class.

    Examples:
        >>> search = ModelSearch.of_scores("my model", scores, judged)           # doctest: +SKIP
        >>> models = report_models([search], judged, query_paths, image_paths)   # doctest: +SKIP
        >>> write_report("report.html", "My model", models)                      # doctest: +SKIP
    """
    if (len(query_paths), len(database_paths)) != (len(judged), len(judged.names)):
        raise InputError(
            f"`query_paths` and `database_paths` have {len(query_paths)} and {len(database_paths)} "
            f"paths for {len(judged)} queries and {len(judged.names)} images: give one for each"
        )
    lowest = np.min([_mean_ap(search.results) for search in searches], axis=0)
    counted = np.flatnonzero(~np.isnan(lowest))
    random = np.random.default_rng(seed)
    shown = counted[_choose(lowest[counted], most, random)]
    drawn = np.sort(random.choice(counted, min(_DRAWN, len(counted)), replace=False))
    others = random.permutation(np.setdiff1d(counted, shown))
    charted = np.sort(np.concatenate([shown, others[: max(0, _CHARTED - len(shown))]]))
    note = _sampling_note(len(shown), len(drawn), len(charted), len(counted))
    return [
        ModelResult(
            name=search.name,
            figures={name: found.figures for name, found in search.results.items()},
            curves=_curves(search, judged, drawn),
            queries=tuple(
                _query_result(search, judged, int(query), query_paths, database_paths, k)
                for query in shown
            ),
            note=note,
            names=tuple(judged.queries[query] for query in charted),
            ap={name: found.per_query_ap[charted] for name, found in search.results.items()},
            places=tuple(np.searchsorted(charted, shown).tolist()),
            classes=_class_results(search.results, counted, classes),
        )
        for search in searches
    ]


def _class_results(
    results: Results, counted: Indices, classes: Sequence[str] | None
) -> tuple[ClassResult, ...]:
    """Average the AP of the queries of each class; the classes are sorted by name."""
    if classes is None:
        return ()
    names, inverse = np.unique(np.array(classes)[counted], return_inverse=True)
    counts = np.bincount(inverse, minlength=len(names))
    means: dict[str, NDArray[np.float64]] = {}
    for protocol, found in results.items():
        ap = found.per_query_ap[counted]
        valid = ~np.isnan(ap)
        sums = np.bincount(inverse[valid], ap[valid], minlength=len(names))
        number = np.bincount(inverse[valid], minlength=len(names))
        means[protocol] = sums / np.where(number, number, np.nan)
    return tuple(
        ClassResult(name, count, {protocol: float(mean[i]) for protocol, mean in means.items()})
        for i, (name, count) in enumerate(zip(names.tolist(), counts.tolist(), strict=True))
    )


def _mean_ap(results: Results) -> NDArray[np.float64]:
    """Return the AP of each query, averaged over the protocols that count it; NaN if none does."""
    table = np.array([found.per_query_ap for found in results.values()])
    counts = (~np.isnan(table)).sum(axis=0)
    means: NDArray[np.float64] = np.nansum(table, axis=0) / np.where(counts, counts, np.nan)
    return means


def _curves(search: ModelSearch, judged: JudgedQueries, queries: Indices) -> dict[str, Curve]:
    ranks: list[Indices] = []
    step = max(1, _SCORES // len(judged.names))
    for start in range(0, len(queries), step):
        part = queries[start : start + step]
        ranks += rank_scores(search.scores(part), [judged.images(int(query)) for query in part])
    found = ranks_of_positives(ranks, judged, queries.tolist())
    return {protocol: precision_recall_curve(lists) for protocol, lists in found.items()}


def _query_result(
    search: ModelSearch,
    judged: JudgedQueries,
    query: int,
    query_paths: Sequence[str],
    database_paths: Sequence[str],
    k: int,
) -> QueryResult:
    @cache  # several protocols may show the same photo
    def shared(image: int) -> _PhotoMatches:
        points = None if search.matches is None else search.matches(query, image)
        return _photo_matches(points, query_paths[query], database_paths[image])

    def entry(image: int, mark: Mark, rank: int | None) -> ListEntry:
        inliers, points = shared(image)
        name, path = judged.names[image], database_paths[image]
        return ListEntry(name, path, float(row[image]), mark, rank, inliers, points)

    row = search.scores(np.array([query]))[0]
    order = np.argsort(-row, kind="stable")
    order = order[~np.isin(order, judged.own(query))]
    lists = {}
    for protocol, result in search.results.items():
        positives, junk = judged.positives(protocol, query), judged.junk(protocol, query)
        ap = float(result.per_query_ap[query])
        lists[protocol] = _ranked_list(order, positives, junk, ap, k, entry)
    return QueryResult(judged.queries[query], query_paths[query], judged.boxes[query], lists)


def _photo_matches(points: ArrayLike | None, query: str, image: str) -> _PhotoMatches:
    """Convert matching points [m, 4] of the photos at two paths to what a list shows."""
    if points is None:
        return None, None
    table = np.asarray(points, np.float64)
    if table.ndim != 2 or table.shape[1] != 4 or not np.isfinite(table).all():
        raise InputError(
            f"`matches` should return finite numbers [m, 4], found {table.shape} for {image}"
        )
    try:
        sizes = (*image_size(query), *image_size(image))
    except ImageError:
        return len(table), None
    kept = table[np.linspace(0, len(table) - 1, min(_POINTS, len(table))).astype(int)]
    parts = np.clip((kept + 0.5) / sizes, 0, 1)
    return len(table), tuple((x, y, u, v) for x, y, u, v in parts.tolist())


def _ranked_list(
    order: Indices,
    positives: Indices,
    junk: Indices,
    ap: float,
    k: int,
    entry: Callable[[int, Mark, int | None], ListEntry],
) -> RankedList:
    """Build the ranked list of a query; `order` has the positions of the images, best first."""
    ordered = np.where(np.isin(order, positives), 1, np.where(np.isin(order, junk), 2, 0))
    counted = ordered != 2
    rank = np.cumsum(counted)  # from 1
    head = np.flatnonzero(counted)[:k]
    seen = np.arange(head[-1] + 1 if len(head) else 0)
    passed_over = seen[~counted[seen]]
    shown = np.sort(np.concatenate([head, passed_over[:_JUNK_SHOWN]]))
    return RankedList(
        ap=None if np.isnan(ap) else ap,
        entries=tuple(
            entry(int(order[i]), _MARKS[ordered[i]], int(rank[i]) if counted[i] else None)
            for i in shown
        ),
        found=int(np.count_nonzero(ordered[head] == 1)),
        positives=len(positives),
        hidden_junk=max(0, len(passed_over) - _JUNK_SHOWN),
    )


def _choose(lowest: NDArray[np.float64], most: int, random: np.random.Generator) -> Indices:
    """Choose at most `most` queries: the lowest and random others, in ascending order."""
    if len(lowest) <= most:
        return np.arange(len(lowest))
    order = np.argsort(lowest, kind="stable")
    worst, others = np.split(order, [most // 2])
    drawn: Indices = random.choice(others, most - len(worst), replace=False)
    return np.sort(np.concatenate([worst, drawn]))


def _sampling_note(shown: int, drawn: int, charted: int, queries: int) -> str:
    notes = []
    if shown < queries:
        notes.append(
            f"Ranked lists are shown for {shown:,} of {queries:,} queries: half of them have the "
            "lowest AP, the other half are drawn at random."
        )
    if drawn < queries:
        notes.append(f"The curves are the mean of {drawn:,} queries drawn at random.")
    if charted < queries:
        notes.append(
            f"The chart shows the AP of {charted:,} queries: these, and others drawn at random."
        )
    return " ".join(notes)
