"""Query expansion and database-side augmentation: descriptors moved towards their neighbours."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.blocks import Database, Vectors, as_queries
from listwise.errors import InputError
from listwise.search.exact import ExactIndex

_ROWS = 1024  # database descriptors augmented at a time


@runtime_checkable
class VectorIndex(Protocol):
    """What expansion needs of an index: neighbours by dot product, and their descriptors."""

    def search(
        self, queries: ArrayLike, k: int, /
    ) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
        """Scores and positions of at most k neighbours, best first, -1 where none was found.

        Shapes: [Q, C] -> [Q, k'], [Q, k'].
        """

    def vectors(self, positions: ArrayLike, /) -> NDArray[np.generic]:
        """The descriptors at some positions: [n] -> [n, C]."""


def alpha_query_expansion(
    queries: ArrayLike, database: Database | VectorIndex, alpha: float = 2.0, k: int = 10
) -> NDArray[np.floating]:
    """αQE: each query becomes L2(q + Σ simᵅ · d) over its k nearest descriptors d.

    A neighbour whose similarity is not positive has no weight.

    Shapes: queries [Q, C], unit rows; database [N, C], blocks [n, C] that can be read twice, or
    an index -> [Q, C], unit rows.
    """
    _check(alpha, k)
    vectors = as_queries(queries)
    index = database if isinstance(database, VectorIndex) else ExactIndex(database)
    scores, positions = index.search(vectors, k)
    return _expanded(vectors, index, scores, positions, alpha)


def database_augmentation(
    database: ArrayLike, k: int = 10, alpha: float = 2.0, index: VectorIndex | None = None
) -> NDArray[np.floating]:
    """DBA: each database descriptor becomes the αQE of itself with its k nearest others.

    It counts once itself, with weight 1. `index` is where neighbours are looked up, if not by exact
    search; it holds the same descriptors in the same order.
    Shapes: [N, C] -> [N, C], unit rows.
    """
    _check(alpha, k)
    vectors = np.asarray(database)
    neighbours = ExactIndex(vectors) if index is None else index
    found = np.empty(vectors.shape, np.result_type(vectors, np.float32))
    for start in range(0, len(vectors), _ROWS):
        block = as_queries(vectors[start : start + _ROWS])
        scores, positions = neighbours.search(block, k + 1)
        own = np.arange(start, start + len(block))
        scores, positions = _without_itself(scores, positions, own, k)
        found[start : start + _ROWS] = _expanded(block, neighbours, scores, positions, alpha)
    return found


def _without_itself(
    scores: Vectors, positions: NDArray[np.int64], own: NDArray[np.int64], k: int
) -> tuple[Vectors, NDArray[np.int64]]:
    """The first k neighbours other than the descriptor itself.

    It may be missing from its own list, behind copies of it or for an index that is not exact.
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
        neighbours = index.vectors(unique)
        rows = np.zeros(positions.shape, np.int64)
        rows[positive] = inverse
        for weight, row in zip(weights.T, rows.T, strict=True):
            total += weight[:, None] * neighbours[row]
    norms = np.linalg.norm(total, axis=1, keepdims=True)
    total /= np.maximum(norms, np.finfo(total.dtype).tiny)
    return total


def _check(alpha: float, k: int) -> None:
    if not alpha >= 0:
        raise InputError(f"alpha is {alpha}; it is a power of similarities, 0 or more")
    if k < 1:
        raise InputError(f"k is {k}; ask for one neighbour at least")
