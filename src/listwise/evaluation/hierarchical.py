"""Metrics of labels with levels: H-AP and NDCG (Ramzi et al., ECCV 2022), and mAP per level."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.errors import InputError
from listwise.evaluation.evaluate import mean_average_precision

_BLOCK = 1 << 22  # scores in memory at a time


@dataclass(frozen=True)
class HierarchicalResult:
    """The metrics of labels with levels, as means over the queries, from 0 to 1.

    Attributes:
        hierarchical_ap: H-AP: errors count less if the image shares levels with the query.
        ndcg: the normalized discounted cumulative gain, with the gain 2^l − 1 for l shared levels.
        maps: the mAP of each level alone, from the coarsest to the finest.
    """

    hierarchical_ap: float
    ndcg: float
    maps: tuple[float, ...]

    @property
    def figures(self) -> dict[str, float]:
        """The metrics by name."""
        levels = {f"mAP level {level}": value for level, value in enumerate(self.maps, 1)}
        return {"H-AP": self.hierarchical_ap, "NDCG": self.ndcg, **levels}


def evaluate_hierarchical(
    descriptors: ArrayLike, levels: ArrayLike, alpha: float = 1.0
) -> HierarchicalResult:
    """Compute the metrics of images whose labels have levels; each is searched among all others.

    With l of L levels shared by a query and an image, the relevance of the image is (l/L)^α / n,
    where n images share as many with the query. H-AP is the sum of H-rank(k) / rank(k) over the
    relevant images k, divided by the sum of their relevance; H-rank(k) is the sum of
    min(rel(k), rel(j)) over k and the images j ahead of it. A query that shares no level with any
    image does not count.

    Args:
        descriptors: [N, C] descriptors.
        levels: [N, L] integers: the groups of each image, from the coarsest level to its class.
            Images share a level if all numbers up to it are equal.
        alpha: α.

    Examples:
        >>> vectors = np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [1.0, 0.0]])
        >>> found = evaluate_hierarchical(vectors, [[0, 0], [0, 1], [1, 2], [0, 0]])
        >>> found.maps[0]
        1.0
    """
    vectors, groups = np.asarray(descriptors), np.asarray(levels)
    if vectors.ndim != 2 or groups.ndim != 2 or len(groups) != len(vectors) or not groups.size:
        raise InputError(
            f"descriptors should have the shape [N, C] and levels [N, L], found {vectors.shape} "
            f"and {groups.shape}"
        )
    rows: list[tuple[float, float]] = []
    step = max(1, _BLOCK // len(vectors))
    for start in range(0, len(vectors), step):
        scores = vectors[start : start + step] @ vectors.T
        for query, row in enumerate(scores, start):
            shared = (groups == groups[query]).cumprod(axis=1).sum(axis=1)
            order = np.argsort(-row, kind="stable")
            found = shared[order[order != query]]
            if found.any():
                rows.append((_hierarchical_ap(found, groups.shape[1], alpha), _ndcg(found)))
    if not rows:
        raise InputError("no two images share a level: give at least two images of a group")
    hap, ndcg = np.mean(rows, axis=0).tolist()
    numbers = [
        np.unique(groups[:, : n + 1], axis=0, return_inverse=True)[1]
        for n in range(groups.shape[1])
    ]
    maps = tuple(mean_average_precision(vectors, level.reshape(-1)) for level in numbers)
    return HierarchicalResult(hap, ndcg, maps)


def _hierarchical_ap(shared: NDArray[np.int64], levels: int, alpha: float) -> float:
    """Compute H-AP of one list from the number of levels that each image shares, best first."""
    counts = np.bincount(shared, minlength=levels + 1)
    by_level = (np.arange(levels + 1) / levels) ** alpha / np.maximum(counts, 1)
    by_level[0] = 0.0
    hrank = np.zeros(len(shared))
    for level in range(1, levels + 1):  # images of this level at or ahead of each place
        ahead = np.cumsum(shared == level)
        hrank += ahead * np.minimum(by_level[level], by_level[shared])
    ranks = np.arange(1, len(shared) + 1)
    return float((hrank / ranks).sum() / by_level[shared].sum())


def _ndcg(shared: NDArray[np.int64]) -> float:
    """Compute the NDCG of one list from the number of levels that each image shares."""
    discount = np.log2(np.arange(2, len(shared) + 2))
    gains = 2.0**shared - 1
    return float((gains / discount).sum() / (np.sort(gains)[::-1] / discount).sum())
