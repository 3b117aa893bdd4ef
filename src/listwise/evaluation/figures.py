"""From descriptors, scores or ranks to the figures of every protocol of a benchmark."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.blocks import Database, as_queries
from listwise.errors import InputError
from listwise.evaluation.judged import LABELS, JudgedQueries, join
from listwise.evaluation.measures import ProtocolResult, Ranks
from listwise.evaluation.ranks import rank_judged, rank_scores

Results = dict[str, ProtocolResult]
"""The figures of each protocol, by its name."""

_BLOCK = 1 << 22  # scores held at a time


def evaluate_descriptors(
    queries: ArrayLike, database: Database, judged: JudgedQueries, ks: Sequence[int] | None = None
) -> Results:
    """The figures of queries searched by dot product; equal scores rank in database order.

    Images after the N of `judged` are distractors. Shapes: queries [Q, C]; database [N + D, C], or
    blocks [n, C] of it that are read more than once, as for `rank_judged`.
    """
    vectors = as_queries(queries)
    if len(vectors) != len(judged):
        raise InputError(f"{len(vectors)} descriptors of queries, but {len(judged)} queries")
    if not isinstance(database, np.ndarray) or isinstance(database, np.memmap):
        return evaluate_ranks(rank_judged(vectors, database, judged_images(judged)), judged, ks)
    if database.ndim != 2 or database.shape[1] != vectors.shape[1]:
        raise InputError(
            f"queries are {vectors.shape}, the database is {database.shape}: extract both with "
            "one model"
        )
    numbers = database.astype(vectors.dtype, copy=False)
    ranks: list[Ranks] = []
    step = max(1, _BLOCK // max(1, len(database)))
    for start in range(0, len(vectors), step):
        scores = vectors[start : start + step] @ numbers.T
        images = [judged.images(start + row) for row in range(len(scores))]
        ranks += rank_scores(scores, images)
    return evaluate_ranks(ranks, judged, ks)


def evaluate_scores(
    scores: ArrayLike, judged: JudgedQueries, ks: Sequence[int] | None = None
) -> Results:
    """The figures of each protocol; the highest score comes first, equal ones in database order.

    Shapes: scores [Q, N], one row for each query and one column for each database image.
    """
    table = np.asarray(scores)
    expected = (len(judged), len(judged.names))
    if table.shape != expected:
        raise InputError(f"scores should be [Q, N] = {expected}, found {table.shape}")
    return evaluate_ranks(rank_scores(table, judged_images(judged)), judged, ks)


def evaluate_ranks(
    ranks: Sequence[Ranks], judged: JudgedQueries, ks: Sequence[int] | None = None
) -> Results:
    """`evaluate_scores` from the ranks of the judged images, distractors counted or not.

    Shapes: for each query the ranks, from 0, of its `judged.images` in the whole list.
    """
    found = ranks_of_positives(ranks, judged, range(len(judged)))
    return {name: judged.protocols[name].measure(found[name], ks) for name in found}


def judged_images(judged: JudgedQueries) -> list[NDArray[np.int64]]:
    """The positions of the images that have a grade, for each query."""
    return [judged.images(query) for query in range(len(judged))]


def ranks_of_positives(
    ranks: Sequence[Ranks], judged: JudgedQueries, queries: Sequence[int]
) -> dict[str, list[Ranks]]:
    """The ranks of the positives under each protocol, from 0, after junk is removed.

    Shapes: `ranks` has, for each of `queries`, the ranks of its `judged.images`.
    """
    found: dict[str, list[Ranks]] = {name: [] for name in judged.protocols}
    for query, all_ranks in zip(queries, ranks, strict=True):
        by_grade: dict[str, Ranks] = {}
        start = 0
        for grade, images in judged.grades.items():
            end = start + len(images[query])
            by_grade[grade], start = all_ranks[start:end], end
        if start != len(all_ranks):
            raise InputError("ranks should hold one rank for each of judged_images(judged)")
        for name, protocol in judged.protocols.items():
            positive, junk = (
                np.sort(join([by_grade[grade] for grade in grades]))
                for grades in (protocol.positive, protocol.junk)
            )
            found[name].append(positive - np.searchsorted(junk, positive))
    return found


def evaluate_revisited(
    scores: ArrayLike,
    easy: Sequence[ArrayLike],
    hard: Sequence[ArrayLike],
    junk: Sequence[ArrayLike],
    ks: Sequence[int] = (1, 5, 10),
) -> Results:
    """Mean AP and mP@k of the protocols "Easy", "Medium" and "Hard" of revisited Oxford and Paris.

    Shapes: scores [Q, N]; `easy`, `hard` and `junk` have positions in the database per query.
    """
    count = np.shape(scores)[1] if np.ndim(scores) == 2 else 0
    grades = {
        name: [np.asarray(places, np.int64) for places in part]
        for name, part in (("easy", easy), ("hard", hard), ("junk", junk))
    }
    blank = [""] * len(easy)
    judged = JudgedQueries.revisited([""] * count, blank, [None] * len(easy), **grades)
    return evaluate_scores(scores, judged, ks)


def evaluate_labelled(
    descriptors: ArrayLike,
    labels: ArrayLike,
    gallery: ArrayLike | None = None,
    gallery_labels: ArrayLike | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
) -> ProtocolResult:
    """Every query searched, by dot product, among all other images or in a gallery.

    Without a gallery each image is a query, and is left out of its own list. A query with nothing
    of its label to find does not count. Equal scores rank in the order of the images.

    Shapes: descriptors [Q, C], labels [Q]; gallery [N, C], gallery_labels [N].
    """
    if (gallery is None) != (gallery_labels is None):
        raise InputError("a gallery needs labels and gallery labels need descriptors: give both")
    vectors = _checked(descriptors, labels, "descriptors")
    others = vectors
    if gallery is not None and gallery_labels is not None:
        others = _checked(gallery, gallery_labels, "gallery descriptors")
        if others.shape[1] != vectors.shape[1]:
            raise InputError(
                f"queries have {vectors.shape[1]} dimensions but the gallery has "
                f"{others.shape[1]}; extract both with one model"
            )
    judged = JudgedQueries.labelled(labels, gallery_labels)
    return evaluate_descriptors(vectors, others, judged, ks)[LABELS]


def mean_average_precision(descriptors: ArrayLike, labels: ArrayLike) -> float:
    """Mean AP of every image searched among all the others, by dot product.

    An image is left out of its own list, and an image with no other of its label is not a query.
    Shapes: [N, C], [N] -> a number in (0, 1].
    """
    return evaluate_labelled(descriptors, labels).mAP


def average_precision(scores: ArrayLike, relevance: ArrayLike) -> float:
    """Mean, over the relevant images, of the precision at each one's rank.

    The highest score comes first; equal scores keep the order they are given in.
    Shapes: [N], [N] (truthy where relevant) -> a number in (0, 1].
    """
    values = np.asarray(scores)
    relevant = np.asarray(relevance).astype(bool)
    if values.ndim != 1 or values.shape != relevant.shape:
        raise InputError(
            f"scores and relevance should be two lists of one length, "
            f"found shapes {values.shape} and {relevant.shape}"
        )
    if not relevant.any():
        raise InputError("no image is relevant, so there is no average precision")
    ranks = np.sort(rank_scores(values[None], [np.flatnonzero(relevant)])[0])
    return float((np.arange(1, len(ranks) + 1) / (ranks + 1)).mean())


def _checked(descriptors: ArrayLike, labels: ArrayLike, what: str) -> NDArray[np.floating]:
    vectors = np.asarray(descriptors)
    count = np.shape(labels)
    if vectors.ndim != 2 or count != vectors.shape[:1]:
        raise InputError(f"{what} should be [N, C], labels [N]; found {vectors.shape} and {count}")
    if np.isnan(vectors).any():
        raise InputError(f"{what} hold NaN, which has no rank; look for a diverged training")
    return vectors.astype(np.result_type(vectors, np.float32), copy=False)
