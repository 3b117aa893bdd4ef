"""Query expansion and database-side augmentation."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.blocks import Database, Vectors, as_queries
from listwise.errors import InputError
from listwise.search.exact import ExactIndex

_ROWS = 1024  # database descriptors per step


@runtime_checkable
class VectorIndex(Protocol):
    """An index that returns nearest neighbors and their descriptors, as expansion needs."""

    def search(
        self, queries: ArrayLike, k: int, /
    ) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
        """Find at most k neighbors per query, best first.

        Returns:
            Scores and positions, both [Q, k'] with k' <= k. A position is -1 if fewer
            neighbors were found.
        """

    def vectors(self, positions: ArrayLike, /) -> NDArray[np.generic]:
        """Return the descriptors at the given positions: [n] -> [n, C]."""


def alpha_query_expansion(
    queries: ArrayLike, database: Database | VectorIndex, alpha: float = 2.0, k: int = 10
) -> NDArray[np.floating]:
    """Expand queries with their nearest neighbors (αQE).

    Each query q becomes L2(q + Σ simᵅ · d) over its k nearest descriptors d. A neighbor with a
    similarity of 0 or less has no weight.

    Args:
        queries: unit descriptors [Q, C].
        database: descriptors [N, C], blocks [n, C] that can be read twice, or an index.
        alpha: the power of the similarities.
        k: the number of neighbors.

    Returns:
        Unit descriptors [Q, C].
    """
    _check(alpha, k)
    vectors = as_queries(queries)
    index = database if isinstance(database, VectorIndex) else ExactIndex(database)
    scores, positions = index.search(vectors, k)
    return _expanded(vectors, index, scores, positions, alpha)


def database_augmentation(
    database: ArrayLike, k: int = 10, alpha: float = 2.0, index: VectorIndex | None = None
) -> NDArray[np.floating]:
    """Replace each database descriptor by its αQE with its k nearest others (DBA).

    The descriptor itself has the weight 1.

    Args:
        database: unit descriptors [N, C].
        k: the number of neighbors.
        alpha: the power of the similarities.
        index: an index of the same descriptors in the same order; exact search by default.

    Returns:
        Unit descriptors [N, C].
    """
    _check(alpha, k)
    vectors = np.asarray(database)
    neighbors = ExactIndex(vectors) if index is None else index
    found = np.empty(vectors.shape, np.result_type(vectors, np.float32))
    for start in range(0, len(vectors), _ROWS):
        block = as_queries(vectors[start : start + _ROWS])
        scores, positions = neighbors.search(block, k + 1)
        own = np.arange(start, start + len(block))
        scores, positions = _without_itself(scores, positions, own, k)
        found[start : start + _ROWS] = _expanded(block, neighbors, scores, positions, alpha)
    return found


def _without_itself(
    scores: Vectors, positions: NDArray[np.int64], own: NDArray[np.int64], k: int
) -> tuple[Vectors, NDArray[np.int64]]:
    """Keep the first k neighbors other than the descriptor itself.

    The descriptor is not always in its own list: copies of it may come first, and an index may
    not be exact.
    """
    itself = positions == own[:, None]
    order = np.argsort(itself, axis=1, kind="stable")[:, :k]
    positions = np.where(itself, -1, positions)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)


def _expanded(
    vectors: Vectors,
    index: VectorIndex,
    scores: Vectors,
    positions: NDArray[np.int64],
    alpha: float,
) -> NDArray[np.floating]:
    positive = (positions >= 0) & (scores > 0)
    weights = np.where(positive, np.where(positive, scores, 1) ** alpha, 0).astype(vectors.dtype)
    total = vectors.copy()
    unique, inverse = np.unique(positions[positive], return_inverse=True)
    if len(unique):
        neighbors = index.vectors(unique)
        rows = np.zeros(positions.shape, np.int64)
        rows[positive] = inverse
        for weight, row in zip(weights.T, rows.T, strict=True):
            total += weight[:, None] * neighbors[row]
    norms = np.linalg.norm(total, axis=1, keepdims=True)
    total /= np.maximum(norms, np.finfo(total.dtype).tiny)
    return total


def _check(alpha: float, k: int) -> None:
    if not alpha >= 0:
        raise InputError(f"`alpha` must be 0 or more, not {alpha}")
    if k < 1:
        raise InputError(f"`k` must be 1 or more, not {k}")
