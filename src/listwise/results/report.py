"""The metrics of an evaluation as text, and its HTML report: metrics, curves, ranked lists."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.data import LabelledImages
from listwise.data.catalog import Benchmark
from listwise.data.images import ImageError, image_size
from listwise.errors import InputError
from listwise.evaluation import (
    JudgedQueries,
    Results,
    evaluate_scores,
    rank_scores,
    ranks_of_positives,
)
from listwise.pages import percent, write_page
from listwise.pages.photos import thumbnails
from listwise.progress import aligned

Figures = Mapping[str, Mapping[str, float]]
"""Protocol -> metric -> value from 0 to 1; NaN for a missing value."""
Indices = NDArray[np.int64]
MatchFunction = Callable[[int, int], ArrayLike | None]
"""A function of the positions of a query and an image that returns their matching points [m, 4].

A row is x, y in the query photo and x, y in the image, in pixels of the upright whole photos; the
center of the first pixel is 0. The function returns None for a pair that was not verified.
"""

_MARKS = ("wrong", "right", "junk")
_JUNK_SHOWN = 3  # per list; under Hard, hundreds of easy photos may come first
_DRAWN = 2000  # maximum number of queries for the curves
_CHARTED = 5000  # maximum number of queries in the chart of AP
_CLASSES = 500  # maximum number of classes in the table
_SCORES = 1 << 22  # maximum number of scores in memory
_POINTS = 60  # points drawn for a pair of photos; more would be unreadable


def figures_of(results: Results) -> dict[str, dict[str, float]]:
    """Return the metrics of results: protocol -> metric -> value from 0 to 1."""
    return {protocol: dict(found.figures) for protocol, found in results.items()}


def format_table(title: str, rows: Mapping[str, Figures]) -> str:
    """Format a table in percent with one line per row and protocol, and aligned columns."""
    metrics = dict.fromkeys(
        metric for row in rows.values() for found in row.values() for metric in found
    )
    lines = [["", "protocol", *metrics]]
    for name, row in rows.items():
        for place, (protocol, found) in enumerate(row.items()):
            values = (percent(found.get(metric, float("nan"))) for metric in metrics)
            lines.append(["" if place else name, protocol, *values])
    texts = aligned(lines, left=2)
    return "\n".join([title, texts[0], "-" * max(map(len, texts)), *texts[1:]])


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


def write_report(
    path: str | Path,
    title: str,
    searches: Sequence[ModelSearch],
    benchmark: Benchmark,
    *,
    table: Mapping[str, Figures] | None = None,
    command: str = "",
    notes: Sequence[str] = (),
    k: int = 10,
    most: int = 100,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Write the HTML report of one model, or of two models side by side, on a benchmark.

    If a benchmark has more than `most` queries, the lists of some are shown: half are those with
    the lowest AP of any model, half are drawn at random. The curves of a large set use two thousand
    queries drawn at random, and the chart of AP five thousand.

    Args:
        path: file to write.
        title: heading of the page.
        searches: one or two searches of the benchmark.
        benchmark: queries, database and ground truth.
        table: name -> protocol -> metric -> value of each row of the table of metrics, those of the
            searches first; by default the metrics of the searches.
        command: command to show.
        notes: sentences to show below the table.
        k: number of photos per list, without junk.
        most: maximum number of queries whose lists are shown.
        on_progress: called with the number of thumbnails done and in total.

    Returns:
        The path of the file.

    Examples:
        >>> search = ModelSearch.of_scores("my model", scores, benchmark.judged)  # doctest: +SKIP
        >>> write_report("report.html", "My model", [search], benchmark)          # doctest: +SKIP
    """
    if len(searches) not in (1, 2):
        raise InputError(f"a report shows one or two models, not {len(searches)}")
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent} for the report: create it first")
    lowest = np.min([_mean_ap(search.results) for search in searches], axis=0)
    counted = np.flatnonzero(~np.isnan(lowest))
    random = np.random.default_rng(0)
    shown = counted[_choose(lowest[counted], most, random)]
    drawn = np.sort(random.choice(counted, min(_DRAWN, len(counted)), replace=False))
    others = random.permutation(np.setdiff1d(counted, shown))
    charted = np.sort(np.concatenate([shown, others[: max(0, _CHARTED - len(shown))]]))
    lists = _Lists(benchmark, k)
    queries = [lists.of_query(searches, int(query)) for query in shown]
    photos = thumbnails(
        sorted(lists.photos), sorted(lists.queries), sorted(lists.matched), on_progress
    )
    rows = {each.name: figures_of(each.results) for each in searches} if table is None else table
    protocols = list(searches[0].results)
    ap = [
        [_rounded(search.results[protocol].per_query_ap[charted]) for protocol in protocols]
        for search in searches
    ]
    names = benchmark.judged.queries
    points = ["matches.js"] if lists.points else []
    write_page(
        path,
        "report.html",
        ["style.css", *(["matches.css"] if points else [])],
        [*points, "report.js"],
        title=title,
        facts={
            "Benchmark": benchmark.name,
            "Models" if len(searches) > 1 else "Model": [search.name for search in searches],
            "Date": f"{datetime.now():%Y-%m-%d %H:%M}",
            "Command": command,
        },
        notes=notes,
        listed=len(shown),
        drawn=len(drawn),
        charted=len(charted),
        counted=len(counted),
        models=[search.name for search in searches],
        rows=rows,
        metrics=_metrics(rows),
        best=lambda values: percent(max((v for v in values if v == v), default=math.nan)),
        curves=_curves(searches, benchmark.judged, drawn),
        classes=_classes(searches, counted, benchmark),
        most_classes=_CLASSES,
        data={
            "models": [search.name for search in searches],
            "protocols": protocols,
            "photos": [photos[photo] for photo in lists.photos],
            "names": [lists.names.get(photo, "") for photo in lists.photos],
            "chart": {
                "names": [names[query] for query in charted],
                "ap": ap,
                "places": np.searchsorted(charted, shown).tolist(),
            },
            "queries": queries,
            "matches": list(lists.points),
        },
    )
    return path


def _mean_ap(results: Results) -> NDArray[np.float64]:
    """Return the AP of each query, averaged over the protocols that count it; NaN if none does."""
    table = np.array([found.per_query_ap for found in results.values()])
    counts = (~np.isnan(table)).sum(axis=0)
    means: NDArray[np.float64] = np.nansum(table, axis=0) / np.where(counts, counts, np.nan)
    return means


def _choose(lowest: NDArray[np.float64], most: int, random: np.random.Generator) -> Indices:
    """Choose at most `most` queries: the lowest and random others, in ascending order."""
    if len(lowest) <= most:
        return np.arange(len(lowest))
    order = np.argsort(lowest, kind="stable")
    worst, others = np.split(order, [most // 2])
    drawn: Indices = random.choice(others, most - len(worst), replace=False)
    return np.sort(np.concatenate([worst, drawn]))


def _metrics(rows: Mapping[str, Figures]) -> dict[str, dict[str, list[float]]]:
    """Return the values of all rows by protocol and metric; NaN where a row has none."""
    found: dict[str, dict[str, list[float]]] = {}
    pairs = (
        (protocol, name)
        for figures in rows.values()
        for protocol, values in figures.items()
        for name in values
    )
    for protocol, name in dict.fromkeys(pairs):
        values = [figures.get(protocol, {}).get(name, math.nan) for figures in rows.values()]
        found.setdefault(protocol, {})[name] = values
    return found


def _curves(
    searches: Sequence[ModelSearch], judged: JudgedQueries, queries: Indices
) -> dict[str, list[str]]:
    """Return the points of the curve of each search, in the drawing of `report.html`."""
    found: dict[str, list[str]] = {}
    step = max(1, _SCORES // len(judged.names))
    for search in searches:
        ranks: list[Indices] = []
        for start in range(0, len(queries), step):
            part = queries[start : start + step]
            ranks += rank_scores(search.scores(part), [judged.images(int(each)) for each in part])
        for protocol, lists in ranks_of_positives(ranks, judged, queries.tolist()).items():
            points = zip(*precision_recall_curve(lists), strict=True)
            line = (f"{44 + 302 * r:.1f},{226 - 216 * p:.1f}" for r, p in points if p == p)
            found.setdefault(protocol, []).append(" ".join(line))
    return found


def _classes(
    searches: Sequence[ModelSearch], counted: Indices, benchmark: Benchmark
) -> list[tuple[str, int, dict[str, list[float]]]]:
    """Return each class with its number of queries and its mean AP in each search, lowest first."""
    images = benchmark.queries
    if not benchmark.labelled or not isinstance(images, LabelledImages):
        return []
    classes, inverse, counts = np.unique(
        images.labels[counted], return_inverse=True, return_counts=True
    )
    means: dict[str, list[NDArray[np.float64]]] = {}
    for search in searches:
        for protocol, found in search.results.items():
            sums = np.bincount(inverse, found.per_query_ap[counted])
            means.setdefault(protocol, []).append(sums / counts)
    rows = [
        (
            images.class_names[label],
            int(counts[i]),
            {protocol: [float(each[i]) for each in found] for protocol, found in means.items()},
        )
        for i, label in enumerate(classes)
    ]
    return sorted(rows, key=lambda row: (sum(found[-1] for found in row[2].values()), row[0]))


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [None if math.isnan(value) else round(float(value), 4) for value in values]


@dataclass
class _Lists:
    """Builds the ranked lists of queries as JSON values, which name photos and points by number.

    Attributes:
        benchmark: queries, database and ground truth.
        k: number of photos per list, without junk.
        photos: the number of each photo shown, by path.
        names: the names of the photos in lists, by path.
        queries: the paths of the queries.
        matched: the paths of the photos with points.
        points: the number of each pair: its count of points, and those drawn, in thousandths of the
            sizes of the photos.
    """

    benchmark: Benchmark
    k: int
    photos: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    queries: set[str] = field(default_factory=set)
    matched: set[str] = field(default_factory=set)
    points: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def of_query(self, searches: Sequence[ModelSearch], query: int) -> dict[str, Any]:
        """Return a query with its lists, for each search those of all protocols."""
        path = self.benchmark.queries.paths[query]
        self.queries.add(path)
        return {
            "name": self.benchmark.judged.queries[query],
            "photo": self._photo(path),
            "box": self._box(query, path),
            "lists": [self._of_search(search, query) for search in searches],
        }

    def _photo(self, path: str) -> int:
        return self.photos.setdefault(path, len(self.photos))

    def _box(self, query: int, path: str) -> list[float] | None:
        """Return left, top, right and bottom of the query's box as fractions of the photo."""
        box = self.benchmark.judged.boxes[query]
        if box is None:
            return None
        try:
            sides = np.array(image_size(path) * 2)
        except ImageError:
            return None
        return [round(part, 4) for part in np.clip(np.array(box) / sides, 0, 1).tolist()]

    def _of_search(self, search: ModelSearch, query: int) -> list[dict[str, Any]]:
        judged = self.benchmark.judged
        scores = search.scores(np.array([query]))[0]
        order = np.argsort(-scores, kind="stable")
        order = order[~np.isin(order, judged.own(query))]

        @cache  # several protocols may show the same photo
        def photo(image: int) -> tuple[list[Any], list[int]]:
            path = self.benchmark.database.paths[image]
            self.names[path] = judged.names[image]
            score = round(float(scores[image]), 4) if math.isfinite(scores[image]) else None
            points = None if search.matches is None else search.matches(query, image)
            number = [] if points is None else [self._points(points, query, path)]
            return [self._photo(path), score], number

        lists = []
        for protocol, result in search.results.items():
            right, junk = judged.positives(protocol, query), judged.junk(protocol, query)
            marks = np.where(np.isin(order, right), 1, np.where(np.isin(order, junk), 2, 0))
            counted = marks != 2
            rank = np.cumsum(counted)  # from 1
            head = np.flatnonzero(counted)[: self.k]
            passed = np.flatnonzero(~counted[: head[-1] + 1 if len(head) else 0])
            entries = []
            for i in np.sort(np.concatenate([head, passed[:_JUNK_SHOWN]])):
                about, points = photo(int(order[i]))
                place = int(rank[i]) if counted[i] else None
                entries.append([*about, _MARKS[marks[i]], place, *points])
            ap = float(result.per_query_ap[query])
            lists.append(
                {
                    "ap": None if math.isnan(ap) else ap,
                    "found": int((marks[head] == 1).sum()),
                    "positives": len(right),
                    "hidden": max(0, len(passed) - _JUNK_SHOWN),
                    "entries": entries,
                }
            )
        return lists

    def _points(self, points: ArrayLike, query: int, image: str) -> int:
        """Return the number of the matching points [m, 4] of a query and the photo at a path."""
        table = np.asarray(points, np.float64)
        if table.ndim != 2 or table.shape[1] != 4 or not np.isfinite(table).all():
            raise InputError(
                f"`matches` should return finite numbers [m, 4], found {table.shape} for {image}"
            )
        try:
            sizes = (*image_size(self.benchmark.queries.paths[query]), *image_size(image))
        except ImageError:
            drawn = np.zeros(0)
        else:
            kept = np.linspace(0, len(table) - 1, min(_POINTS, len(table))).astype(int)
            drawn = 1000 * np.clip((table[kept] + 0.5) / sizes, 0, 1)
        if len(drawn):
            self.matched.add(image)
        shown = tuple(np.rint(drawn).astype(int).ravel().tolist())
        return self.points.setdefault((len(table), shown), len(self.points))


def precision_recall_curve(
    ranks: Sequence[ArrayLike], points: int = 101
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute the mean interpolated precision of queries at evenly spaced recalls.

    The interpolated precision of a query at recall r is its highest precision at recall r or more.

    Args:
        ranks: for each query the ranks of its positives, from 0, without junk, in any order.
        points: number P of recalls.

    Returns:
        Recall [P] and precision [P]; precision is NaN if no query has a positive.

    Examples:
        >>> recall, precision = precision_recall_curve([[0, 2], [1]], points=3)
        >>> precision.round(2).tolist()
        [0.75, 0.75, 0.58]
    """
    recall = np.linspace(0.0, 1.0, points)
    rows = []
    for found in ranks:
        order = np.sort(np.asarray(found, dtype=np.int64))
        if len(order) == 0:
            continue
        if order[0] < 0:
            raise InputError(f"`ranks` should be 0 or more, found {order[0]}")
        precision = np.arange(1, len(order) + 1) / (order + 1)
        best_from = np.maximum.accumulate(precision[::-1])[::-1]
        # The first positive at which the recall is reached; the small term absorbs rounding.
        reached = np.ceil(recall * len(order) - 1e-9).astype(np.int64)
        rows.append(best_from[np.maximum(reached, 1) - 1])
    if not rows:
        return recall, np.full(points, np.nan)
    return recall, np.mean(rows, axis=0)
