"""Compute the metrics of a benchmark from descriptors, scores or ranks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.blocks import Database, as_queries
from listwise.errors import InputError
from listwise.evaluation.judged import LABELS, JudgedQueries, join
from listwise.evaluation.metrics import ProtocolResult, Ranks
from listwise.evaluation.ranks import rank_judged, rank_scores

Results = dict[str, ProtocolResult]
"""The metrics of each protocol: a dictionary from its name to a `ProtocolResult`."""

_BLOCK = 1 << 22  # scores in memory at a time


def evaluate_descriptors(
    queries: ArrayLike, database: Database, judged: JudgedQueries, ks: Sequence[int] | None = None
) -> Results:
    """Rank the database by dot product for each query, and compute the metrics.

    Images with equal scores rank in database order.

    Args:
        queries: [Q, C] descriptors of the queries.
        database: [N + D, C] descriptors: first the N images of `judged`, then D distractors, which
            are negatives of every query. Or blocks [n, C] that can be read twice, as for
            `rank_judged`.
        judged: the Q queries and which of the N images are right for each.
        ks: the depths k of mP@k or Recall@k; by default those of the protocol.

    Returns:
        The metrics of each protocol, by its name.

    Examples:
        >>> judged = JudgedQueries.labelled([0, 0, 1, 1])
        >>> vectors = np.eye(2)[[0, 0, 1, 1]]
        >>> evaluate_descriptors(vectors, vectors, judged)["Labels"].mAP
        1.0
    """
    vectors = as_queries(queries)
    if len(vectors) != len(judged):
        raise InputError(
            f"found {len(vectors)} query descriptors for {len(judged)} queries: give one per query"
        )
    if not isinstance(database, np.ndarray) or isinstance(database, np.memmap):
        return evaluate_ranks(rank_judged(vectors, database, judged_images(judged)), judged, ks)
    if database.ndim != 2 or database.shape[1] != vectors.shape[1]:
        raise InputError(
            f"the queries have shape {vectors.shape} and the database {database.shape}: extract "
            "both with one model"
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
    """Compute the metrics of each protocol from a matrix of scores.

    The highest score ranks first; images with equal scores rank in database order.

    Args:
        scores: [Q, N], one row for each query and one column for each database image.
        judged: the Q queries and which of the N images are right for each.
        ks: the depths k of mP@k or Recall@k; by default those of the protocol.
    """
    table = np.asarray(scores)
    expected = (len(judged), len(judged.names))
    if table.shape != expected:
        raise InputError(f"scores should have the shape [Q, N] = {expected}, found {table.shape}")
    return evaluate_ranks(rank_scores(table, judged_images(judged)), judged, ks)


def evaluate_ranks(
    ranks: Sequence[Ranks], judged: JudgedQueries, ks: Sequence[int] | None = None
) -> Results:
    """Compute the metrics of each protocol from the ranks of the judged images.

    Args:
        ranks: for each of the Q queries, the ranks of its images `judged.images(query)` in the
            whole list, counted from 0. The list may include distractors.
        judged: the Q queries and their judged images.
        ks: the depths k of mP@k or Recall@k; by default those of the protocol.
    """
    found = ranks_of_positives(ranks, judged, range(len(judged)))
    return {name: judged.protocols[name].measure(found[name], ks) for name in found}


def judged_images(judged: JudgedQueries) -> list[NDArray[np.int64]]:
    """Return, for each query, the database positions of all images that have a grade."""
    return [judged.images(query) for query in range(len(judged))]


def ranks_of_positives(
    ranks: Sequence[Ranks], judged: JudgedQueries, queries: Sequence[int]
) -> dict[str, list[Ranks]]:
    """Return the ranks of the positives under each protocol, after junk is removed.

    Args:
        ranks: for each of `queries`, the ranks of its images `judged.images(query)` in the whole
            list, counted from 0.
        judged: all queries and their judged images.
        queries: the numbers of the queries, as positions in `judged.queries`.

    Returns:
        For each protocol, one array of sorted ranks, counted from 0, per query.
    """
    found: dict[str, list[Ranks]] = {name: [] for name in judged.protocols}
    for query, all_ranks in zip(queries, ranks, strict=True):
        by_grade: dict[str, Ranks] = {}
        start = 0
        for grade, images in judged.grades.items():
            end = start + len(images[query])
            by_grade[grade], start = all_ranks[start:end], end
        if start != len(all_ranks):
            raise InputError(
                f"query {query} has {len(all_ranks)} ranks: give one rank for each of its "
                f"{start} judged images"
            )
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
    """Compute mAP and mP@k of the revisited Oxford and Paris protocols.

    Args:
        scores: [Q, N], one row for each query and one column for each database image.
        easy: for each query, the database positions of its easy positives.
        hard: for each query, the database positions of its hard positives.
        junk: for each query, the database positions of the images that do not count.
        ks: the depths k of mP@k.

    Returns:
        The metrics of the protocols "Easy", "Medium" and "Hard".

    Examples:
        >>> scores = [[0.9, 0.1, 0.5]]
        >>> evaluate_revisited(scores, easy=[[0]], hard=[[2]], junk=[[]])["Medium"].mAP
        1.0
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
    """Compute mAP, mAP@R and Recall@k of labelled images, ranked by dot product.

    Without a gallery, every image is a query that is searched among all other images. With a
    gallery, the queries are searched in it. A query without a positive does not count. Images with
    equal scores rank in the order in which they are given.

    Args:
        descriptors: [Q, C] descriptors of the queries.
        labels: [Q] labels of the queries.
        gallery: [N, C] descriptors of the images to search in.
        gallery_labels: [N] labels of the gallery.
        ks: the depths k of Recall@k.

    Examples:
        >>> evaluate_labelled(np.eye(2)[[0, 0, 1, 1]], [5, 5, 7, 7]).figures["Recall@1"]
        1.0
    """
    if (gallery is None) != (gallery_labels is None):
        raise InputError("`gallery` and `gallery_labels` belong together: give both")
    vectors = _check_descriptors(descriptors, labels, "descriptors")
    others = vectors
    if gallery is not None and gallery_labels is not None:
        others = _check_descriptors(gallery, gallery_labels, "gallery descriptors")
        if others.shape[1] != vectors.shape[1]:
            raise InputError(
                f"queries have {vectors.shape[1]} dimensions but the gallery has "
                f"{others.shape[1]}; extract both with one model"
            )
    judged = JudgedQueries.labelled(labels, gallery_labels)
    return evaluate_descriptors(vectors, others, judged, ks)[LABELS]


def mean_average_precision(descriptors: ArrayLike, labels: ArrayLike) -> float:
    """Compute the mAP of searching each image among all others, ranked by dot product.

    An image whose label no other image has is not a query, but stays in the lists of the others.
    Shapes: descriptors [N, C], labels [N] -> a number in (0, 1].
    """
    return evaluate_labelled(descriptors, labels).mAP


def average_precision(scores: ArrayLike, relevance: ArrayLike) -> float:
    """Compute the average precision of one ranked list: the mean precision at its relevant images.

    The highest score ranks first; images with equal scores keep the order in which they are given.

    Args:
        scores: [N] scores of the images.
        relevance: [N], true where an image is relevant.

    Returns:
        A number in (0, 1].

    Examples:
        >>> average_precision([0.9, 0.8, 0.7], [True, False, True])  # (1/1 + 2/3) / 2
        0.8333333333333333
    """
    values = np.asarray(scores)
    relevant = np.asarray(relevance).astype(bool)
    if values.ndim != 1 or values.shape != relevant.shape:
        raise InputError(
            "scores and relevance should be two lists of the same length, "
            f"found shapes {values.shape} and {relevant.shape}"
        )
    if not relevant.any():
        raise InputError("no image is relevant: average precision needs at least one")
    ranks = np.sort(rank_scores(values[None], [np.flatnonzero(relevant)])[0])
    return float((np.arange(1, len(ranks) + 1) / (ranks + 1)).mean())


def _check_descriptors(
    descriptors: ArrayLike, labels: ArrayLike, what: str
) -> NDArray[np.floating]:
    vectors = np.asarray(descriptors)
    count = np.shape(labels)
    if vectors.ndim != 2 or count != vectors.shape[:1]:
        raise InputError(
            f"{what} should have the shape [N, C] and labels [N], found {vectors.shape} and {count}"
        )
    if np.isnan(vectors).any():
        raise InputError(
            f"{what} contain NaN, which cannot be ranked: check whether training diverged"
        )
    return vectors.astype(np.result_type(vectors, np.float32), copy=False)
