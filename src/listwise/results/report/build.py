"""From scores and judgements to what a report shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.data.ground_truth import GroundTruth
from listwise.data.images import Box
from listwise.data.oxford import OxfordGroundTruth
from listwise.errors import InputError
from listwise.evaluation.labelled import LabelledResult
from listwise.evaluation.oxford import evaluate_oxford
from listwise.evaluation.protocol import ProtocolResult
from listwise.evaluation.ranks import rank_scores
from listwise.evaluation.revisited import evaluate_revisited
from listwise.results.report.content import (
    ListEntry,
    Mark,
    ModelResult,
    QueryResult,
    RankedList,
)
from listwise.results.report.curves import precision_recall_curve
from listwise.results.report.matches import Matched, PointsOf, matched

Indices = NDArray[np.int64]

LABELS, ORIGINAL = "Labels", "Original"
"""The one protocol of labelled sets, and that of Oxford5k and Paris6k."""

_MARKS: tuple[Mark, ...] = ("wrong", "right", "junk")
_JUNK_SHOWN = 3  # in a list; under Hard, hundreds of easy photos may come first
_DRAWN = 2000  # queries of a labelled set that its curves are over


@dataclass(frozen=True)
class Photos:
    """Photos with their names as the data set writes them; a box is the part that is meant."""

    names: Sequence[str]
    paths: Sequence[str]
    boxes: Sequence[Box | None] | None = None

    def __post_init__(self) -> None:
        """Refuse lists of different lengths."""
        lengths = {len(part) for part in (self.names, self.paths, self.boxes) if part is not None}
        if len(lengths) > 1:
            raise InputError("photos need one name, one path and, if any, one box each")


@dataclass(frozen=True)
class Judged:
    """One protocol: for each of Q queries what is to be found and what is passed over.

    Shapes: `positives` and `junk` hold positions in the database; `ap` is [Q], NaN where a query
    does not count; `figures` maps each metric to its value.
    """

    positives: Sequence[ArrayLike]
    junk: Sequence[ArrayLike]
    ap: ArrayLike
    figures: Mapping[str, float]


def judged_result(
    name: str,
    scores: ArrayLike,
    queries: Photos,
    database: Photos,
    protocols: Mapping[str, Judged],
    *,
    k: int = 10,
    matches: PointsOf | None = None,
) -> ModelResult:
    """What a report shows of a model whose queries are judged photo by photo.

    The highest score comes first; equal scores keep the database's order. A list holds the first
    `k` photos that count and the first few junk photos among them. `matches` gives the points that
    a query and a photo of its list share, to be drawn. Shapes: scores [Q, N].
    """
    table = np.asarray(scores)
    expected = (len(queries.paths), len(database.paths))
    if table.shape != expected:
        raise InputError(f"scores should be [Q, N] = {expected}, found {table.shape}")
    if np.isnan(table).any():
        raise InputError("scores hold NaN, which has no rank; look for broken descriptors")
    aps = {protocol: np.asarray(judged.ap, np.float64) for protocol, judged in protocols.items()}
    ranks: dict[str, list[Indices]] = {protocol: [] for protocol in protocols}
    results = []
    for query, row in enumerate(table):
        order = np.argsort(-row, kind="stable")
        found_again = _found_again(matches, query, queries.paths[query], database)
        lists = {}
        for protocol, judged in protocols.items():
            positives = np.asarray(judged.positives[query], np.int64)
            junk = np.asarray(judged.junk[query], np.int64)
            lists[protocol], found = _ranked_list(
                row, order, positives, junk, aps[protocol][query], database, k, found_again
            )
            ranks[protocol].append(found)
        box = None if queries.boxes is None else queries.boxes[query]
        results.append(QueryResult(queries.names[query], queries.paths[query], box, lists))
    return ModelResult(
        name=name,
        figures={protocol: judged.figures for protocol, judged in protocols.items()},
        curves={protocol: precision_recall_curve(found) for protocol, found in ranks.items()},
        queries=tuple(results),
    )


def revisited_result(
    name: str,
    scores: ArrayLike,
    truth: GroundTruth,
    query_paths: Sequence[str],
    database_paths: Sequence[str],
    *,
    k: int = 10,
    matches: PointsOf | None = None,
) -> ModelResult:
    """What a report shows of a model on a revisited benchmark, as `judged_result`.

    Shapes: scores [Q, N].
    """
    result = evaluate_revisited(scores, truth)
    protocols = {
        "Easy": _protocol(result.easy, truth.easy, _joined(truth.junk, truth.hard)),
        "Medium": _protocol(result.medium, _joined(truth.easy, truth.hard), truth.junk),
        "Hard": _protocol(result.hard, truth.hard, _joined(truth.junk, truth.easy)),
    }
    queries = Photos(truth.queries, query_paths, truth.boxes)
    database = Photos(truth.names, database_paths)
    return judged_result(name, scores, queries, database, protocols, k=k, matches=matches)


def oxford_result(
    name: str,
    scores: ArrayLike,
    truth: OxfordGroundTruth,
    query_paths: Sequence[str],
    database_paths: Sequence[str],
    *,
    k: int = 10,
    matches: PointsOf | None = None,
) -> ModelResult:
    """What a report shows of a model on Oxford5k or Paris6k, as `judged_result`.

    Shapes: scores [Q, N].
    """
    result = evaluate_oxford(scores, truth)
    judged = _protocol(result, _joined(truth.good, truth.ok), truth.junk)
    queries = Photos(truth.queries, query_paths, truth.boxes)
    database = Photos(truth.names, database_paths)
    protocols = {ORIGINAL: judged}
    return judged_result(name, scores, queries, database, protocols, k=k, matches=matches)


@dataclass(frozen=True)
class Gallery:
    """The images that a labelled set's queries are searched in.

    Shapes: descriptors [N, C] for each model's name, labels [N], N photos.
    """

    descriptors: Mapping[str, ArrayLike]
    labels: ArrayLike
    photos: Photos


def labelled_results(
    descriptors: Mapping[str, ArrayLike],
    labels: ArrayLike,
    photos: Photos,
    results: Mapping[str, LabelledResult],
    gallery: Gallery | None = None,
    *,
    k: int = 10,
    most: int = 100,
    seed: int = 0,
) -> list[ModelResult]:
    """What a report shows of models on a labelled set.

    Without a gallery each photo is searched among all others. At most `most` queries are shown,
    the same for every model: half are those where some model's AP is lowest, half are drawn at
    random. The curves of a large set are over two thousand queries drawn at random.

    Shapes: descriptors [Q, C] for each model's name, labels [Q], Q photos; `results` is what
    `evaluate_labelled` says of each model.
    """
    lowest = np.min([results[name].per_query_ap for name in descriptors], axis=0)
    counted = np.flatnonzero(~np.isnan(lowest))
    if not len(lowest) == len(np.asarray(labels)) == len(photos.paths):
        raise InputError(
            f"{len(lowest)} results, {len(np.asarray(labels))} labels and {len(photos.paths)} "
            "photos: give one of each for every query"
        )
    random = np.random.default_rng(seed)
    shown = counted[_choose(lowest[counted], most, random)]
    drawn = np.sort(random.choice(counted, min(_DRAWN, len(counted)), replace=False))
    queries = Photos(
        [photos.names[i] for i in shown],
        [photos.paths[i] for i in shown],
        None if photos.boxes is None else [photos.boxes[i] for i in shown],
    )
    note = _sampling_note(len(shown), len(drawn), len(counted))
    models = []
    for name, vectors in descriptors.items():
        search = _Search(
            np.asarray(vectors),
            np.asarray(labels),
            None if gallery is None else np.asarray(gallery.descriptors[name]),
            np.asarray(labels if gallery is None else gallery.labels),
        )
        result = results[name]
        recall = {f"Recall@{depth}": value for depth, value in result.recall.items()}
        judged = Judged(
            [search.positives(query) for query in shown],
            [search.itself(query) for query in shown],
            result.per_query_ap[shown],
            {"mAP": result.mAP, "mAP@R": result.map_at_r, **recall},
        )
        database = photos if gallery is None else gallery.photos
        scores = search.scores(shown)
        model = judged_result(name, scores, queries, database, {LABELS: judged}, k=k)
        curves = {LABELS: precision_recall_curve(search.ranks(drawn))}
        models.append(replace(model, curves=curves, note=note))
    return models


@dataclass(frozen=True)
class _Search:
    """Queries among the images of a gallery, or among each other."""

    queries: NDArray[np.floating]
    labels: NDArray[np.generic]
    gallery: NDArray[np.floating] | None
    gallery_labels: NDArray[np.generic]

    def positives(self, query: int) -> Indices:
        same: Indices = np.flatnonzero(self.gallery_labels == self.labels[query])
        return np.setdiff1d(same, self.itself(query))

    def itself(self, query: int) -> Indices:
        """Where the query is among the images, if it is."""
        return np.array([query] if self.gallery is None else [], np.int64)

    def scores(self, queries: Indices) -> NDArray[np.floating]:
        """Scores [Q, N] with each query last in its own list, where as junk it is never seen."""
        images = self.queries if self.gallery is None else self.gallery
        scores: NDArray[np.floating] = self.queries[queries] @ images.T
        for row, query in zip(scores, queries, strict=True):
            row[self.itself(query)] = -np.inf
        return scores

    def ranks(self, queries: Indices) -> list[Indices]:
        """The ranks of each query's positives."""
        return [
            rank_scores(self.scores(np.array([query])), [self.positives(query)])[0]
            for query in queries
        ]


def _protocol(result: ProtocolResult, positives: list[Indices], junk: list[Indices]) -> Judged:
    precisions = {f"mP@{depth}": value for depth, value in result.mp.items()}
    return Judged(positives, junk, result.per_query_ap, {"mAP": result.mAP, **precisions})


def _joined(first: Sequence[Indices], second: Sequence[Indices]) -> list[Indices]:
    return [np.concatenate(pair) for pair in zip(first, second, strict=True)]


def _found_again(
    matches: PointsOf | None, query: int, path: str, database: Photos
) -> Callable[[int], Matched]:
    """Tells what the query shares with the photo at a position; several protocols may ask."""

    @cache
    def found_again(image: int) -> Matched:
        points = None if matches is None else matches(query, image)
        return matched(points, path, database.paths[image])

    return found_again


def _ranked_list(
    row: NDArray[np.floating],
    order: Indices,
    positives: Indices,
    junk: Indices,
    ap: float,
    database: Photos,
    k: int,
    found_again: Callable[[int], Matched],
) -> tuple[RankedList, Indices]:
    """The head of one list, and the ranks, from 0 and without junk, of all its positives."""
    marks: NDArray[np.int8] = np.zeros(len(row), np.int8)  # positions in _MARKS
    marks[positives] = 1
    marks[junk] = 2
    ordered = marks[order]
    counted = ordered != 2
    rank = np.cumsum(counted)  # from 1
    head = np.flatnonzero(counted)[:k]
    seen = np.arange(head[-1] + 1 if len(head) else 0)
    passed_over = seen[~counted[seen]]
    shown = np.sort(np.concatenate([head, passed_over[:_JUNK_SHOWN]]))
    entries = []
    for place in shown:
        image = int(order[place])
        inliers, points = found_again(image)
        entry = ListEntry(
            name=database.names[image],
            path=database.paths[image],
            score=float(row[image]),
            mark=_MARKS[ordered[place]],
            rank=int(rank[place]) if counted[place] else None,
            inliers=inliers,
            matches=points,
        )
        entries.append(entry)
    ranked = RankedList(
        ap=None if np.isnan(ap) else float(ap),
        entries=tuple(entries),
        found=int(np.count_nonzero(ordered[head] == 1)),
        positives=len(positives),
        hidden_junk=max(0, len(passed_over) - _JUNK_SHOWN),
    )
    return ranked, rank[ordered == 1] - 1


def _choose(lowest: NDArray[np.float64], most: int, random: np.random.Generator) -> Indices:
    """Positions of the lowest and of others drawn at random, in ascending order."""
    if len(lowest) <= most:
        return np.arange(len(lowest))
    order = np.argsort(lowest, kind="stable")
    worst, others = np.split(order, [most // 2])
    drawn: Indices = random.choice(others, most - len(worst), replace=False)
    return np.sort(np.concatenate([worst, drawn]))


def _sampling_note(shown: int, drawn: int, queries: int) -> str:
    notes = []
    if shown < queries:
        notes.append(
            f"Lists are shown for {shown:,} of {queries:,} queries: half of them have the lowest "
            "AP, the others are drawn at random."
        )
    if drawn < queries:
        notes.append(f"The curves are over {drawn:,} queries drawn at random.")
    return " ".join(notes)
