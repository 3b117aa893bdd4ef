"""Retrieval among labelled images: mAP, mAP@R and Recall@k."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.errors import InputError
from listwise.evaluation.ranks import rank_scores

_BLOCK = 1 << 22  # scores held at a time


@dataclass(frozen=True)
class LabelledResult:
    """The figures of a labelled set, from 0 to 1, over the queries that have something to find.

    Shapes: `recall` maps each k to Recall@k; `per_query_ap` is [Q], NaN where a query does not
    count.
    """

    mAP: float
    map_at_r: float
    recall: dict[int, float]
    per_query_ap: NDArray[np.float64]


def evaluate_labelled(
    descriptors: ArrayLike,
    labels: ArrayLike,
    gallery: ArrayLike | None = None,
    gallery_labels: ArrayLike | None = None,
    ks: Sequence[int] = (1, 2, 4, 8),
) -> LabelledResult:
    """Every query searched, by dot product, among all other images or in a gallery.

    Without a gallery each image is a query, and is left out of its own list. A query with nothing
    of its label to find does not count. Equal scores rank in the order of the images.

    Shapes: descriptors [Q, C], labels [Q]; gallery [N, C], gallery_labels [N].
    """
    if (gallery is None) != (gallery_labels is None):
        raise InputError("a gallery needs labels and gallery labels need descriptors: give both")
    vectors, classes = _checked(descriptors, labels, "descriptors")
    alone = gallery is None or gallery_labels is None
    others, other_classes = (
        (vectors, classes) if alone else _checked(gallery, gallery_labels, "gallery descriptors")
    )
    if others.shape[1] != vectors.shape[1]:
        raise InputError(
            f"queries have {vectors.shape[1]} dimensions but the gallery has {others.shape[1]}; "
            "extract both with one model"
        )
    members = _members(other_classes)
    step = max(1, _BLOCK // max(1, len(others)))
    ranks: list[NDArray[np.int64]] = []
    for start in range(0, len(vectors), step):
        scores = vectors[start : start + step] @ others.T
        wanted = [members.get(label, _NONE) for label in classes[start : start + step].tolist()]
        if alone:
            own = np.arange(start, start + len(scores))
            scores[np.arange(len(scores)), own] = -np.inf  # last in its own list: left out
            wanted = [places[places != i] for i, places in zip(own, wanted, strict=True)]
        ranks += rank_scores(scores, wanted)
    return _summary(ranks, ks)


def mean_average_precision(descriptors: ArrayLike, labels: ArrayLike) -> float:
    """Mean AP of every image searched among all the others, by dot product.

    An image is left out of its own list, and an image with no other of its label is no query.
    Shapes: [N, C], [N] -> a number in (0, 1].
    """
    return evaluate_labelled(descriptors, labels).mAP


_NONE = np.zeros(0, np.int64)


def _checked(
    descriptors: ArrayLike | None, labels: ArrayLike | None, what: str
) -> tuple[NDArray[np.floating], NDArray[np.generic]]:
    vectors = np.asarray(descriptors)
    classes = np.asarray(labels)
    if vectors.ndim != 2 or classes.shape != vectors.shape[:1]:
        raise InputError(
            f"{what} should be [N, C] and labels [N], "
            f"found shapes {vectors.shape} and {classes.shape}"
        )
    if np.isnan(vectors).any():
        raise InputError(f"{what} hold NaN, which has no rank; look for a diverged training")
    return vectors.astype(np.result_type(vectors, np.float32), copy=False), classes


def _members(classes: NDArray[np.generic]) -> dict[object, NDArray[np.int64]]:
    """The positions of each label's images, in order."""
    names, inverse, counts = np.unique(classes, return_inverse=True, return_counts=True)
    parts = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return dict(zip(names.tolist(), parts, strict=True))


def _summary(ranks: list[NDArray[np.int64]], ks: Sequence[int]) -> LabelledResult:
    average = np.full(len(ranks), np.nan)
    at_r = np.full(len(ranks), np.nan)
    first = np.full(len(ranks), np.nan)
    for query, found in enumerate(ranks):
        if len(found) == 0:
            continue
        places = np.sort(found) + 1
        precision = np.arange(1, len(places) + 1) / places
        average[query] = precision.mean()
        at_r[query] = precision[places <= len(places)].sum() / len(places)
        first[query] = places[0]
    counted = ~np.isnan(average)
    if not counted.any():
        raise InputError(
            "no query has another image of its label to find; give at least two of one label"
        )
    return LabelledResult(
        mAP=float(average[counted].mean()),
        map_at_r=float(at_r[counted].mean()),
        recall={k: float((first[counted] <= k).mean()) for k in ks},
        per_query_ap=average,
    )
