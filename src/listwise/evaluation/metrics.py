"""Average precision of ranked lists."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.errors import InputError

_BLOCK = 1 << 22  # scores held at a time


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
    _refuse_nan(values, "scores")
    if not relevant.any():
        raise InputError("no image is relevant, so there is no average precision")
    return float(_row_precisions(values[None], relevant[None])[0])


def mean_average_precision(descriptors: ArrayLike, labels: ArrayLike) -> float:
    """Mean AP of every image searched among all the others, by dot product.

    An image is left out of its own list, and an image with no other of its label is no query.
    Shapes: [N, C], [N] -> a number in (0, 1].
    """
    vectors = np.asarray(descriptors)
    classes = np.asarray(labels)
    if vectors.ndim != 2 or classes.shape != vectors.shape[:1]:
        raise InputError(
            f"descriptors should be [N, C] and labels [N], "
            f"found shapes {vectors.shape} and {classes.shape}"
        )
    _refuse_nan(vectors, "descriptors")
    _, inverse, counts = np.unique(classes, return_inverse=True, return_counts=True)
    queries = np.flatnonzero(counts[inverse] > 1)
    if len(queries) == 0:
        raise InputError("no label has two images, so there is nothing to find")
    step = max(1, _BLOCK // len(vectors))
    total = 0.0
    for start in range(0, len(queries), step):
        block = queries[start : start + step]
        scores = vectors[block] @ vectors.T
        relevant = inverse[block, None] == inverse[None]
        rows = np.arange(len(block))
        scores[rows, block] = -np.inf  # last in its own list, and not relevant there: left out
        relevant[rows, block] = False
        total += float(_row_precisions(scores, relevant).sum())
    return total / len(queries)


def _row_precisions(
    scores: NDArray[np.floating], relevant: NDArray[np.bool_]
) -> NDArray[np.float64]:
    order = np.argsort(-scores, axis=1, kind="stable")
    hits = np.take_along_axis(relevant, order, axis=1)
    precision = np.cumsum(hits, axis=1) / np.arange(1, scores.shape[1] + 1)
    average: NDArray[np.float64] = (precision * hits).sum(axis=1) / hits.sum(axis=1)
    return average


def _refuse_nan(values: NDArray[np.generic], what: str) -> None:
    if np.isnan(values).any():
        raise InputError(f"{what} hold NaN, which has no rank; look for a diverged training")
