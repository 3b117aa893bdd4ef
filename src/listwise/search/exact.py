"""Exact search through descriptors, and other searches measured against it."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.blocks import Database, Vectors, as_queries, blocks, each_block
from listwise.errors import InputError
from listwise.search.entries import Float32, Keys

RECALL_AT = 10
_TIMED = 20  # queries whose latency is measured
_SECONDS = 1.0  # after which no further query is measured

Search = Callable[[Float32, int], tuple[Float32, Keys]]
"""A search: queries [Q, C] and k -> scores and keys, best first, both [Q, k']."""


def exact_search(
    queries: ArrayLike, database: Database, k: int
) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """Find the k database descriptors with the highest dot product for each query.

    The database is read once. Equal scores are returned in database order.

    Args:
        queries: descriptors [Q, C].
        database: descriptors [N, C], or an iterable of blocks [n, C].
        k: the number of neighbors per query.

    Returns:
        Scores and positions in the database, best first, both [Q, min(k, N)].

    Example:
        >>> scores, positions = exact_search([[1.0, 0.0]], np.eye(2), 1)
        >>> positions
        array([[0]])
    """
    if k < 1:
        raise InputError(f"`k` must be 1 or more, not {k}")
    vectors = as_queries(queries)
    best = np.zeros((len(vectors), 0), vectors.dtype)
    places = np.zeros((len(vectors), 0), np.int64)

    def merge(block: tuple[int, Vectors]) -> None:
        nonlocal best, places
        start, scores = block
        best, places = _merged(best, places, scores, start, k)

    each_block(vectors, database, lambda start, scores: (start, scores), merge)
    return best, places


def _merged(
    best: Vectors, places: NDArray[np.int64], scores: Vectors, start: int, k: int
) -> tuple[Vectors, NDArray[np.int64]]:
    """Merge the best neighbors so far with the scores of the next block."""
    had = best.shape[1]
    width = min(k, had + scores.shape[1])
    new_best = np.empty((len(best), width), best.dtype)
    new_places = np.empty((len(best), width), np.int64)
    for query, row in enumerate(scores):
        # Once the list is full, few scores of a block are higher than its last one.
        better = np.flatnonzero(row > best[query, -1]) if had == k else np.arange(len(row))
        all_scores = np.concatenate([best[query], row[better]])
        all_places = np.concatenate([places[query], better + start])
        order = np.argsort(-all_scores, kind="stable")[:width]
        new_best[query] = all_scores[order]
        new_places[query] = all_places[order]
    return new_best, new_places


class ExactIndex:
    """Exact search as a `VectorIndex`; nothing is built in advance.

    Args:
        database: descriptors [N, C], or blocks [n, C] that can be iterated several times.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def search(self, queries: ArrayLike, k: int) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
        """Find the k nearest: [Q, C] -> scores and positions, both [Q, min(k, N)]."""
        return exact_search(queries, self.database, k)

    def vectors(self, positions: ArrayLike) -> NDArray[np.generic]:
        """Return the descriptors at the given positions: [n] -> [n, C]."""
        wanted = np.asarray(positions, dtype=np.int64)
        if isinstance(self.database, np.ndarray):
            return np.asarray(self.database[wanted])
        unique, inverse = np.unique(wanted, return_inverse=True)
        parts = []
        for start, block in blocks(self.database, 1):
            first, past = np.searchsorted(unique, (start, start + len(block)))
            if first < past:
                parts.append(np.asarray(block[unique[first:past] - start]))
            if past == len(unique):
                break
        return np.concatenate(parts)[inverse]


def search_in_parts(search: Search, queries: Float32, k: int, size: int) -> tuple[Float32, Keys]:
    """Search `size` queries at a time: [Q, C] -> scores and keys, both [Q, k]."""
    scores = np.empty((len(queries), k), np.float32)
    keys = np.empty((len(queries), k), np.int64)
    for first in range(0, len(queries) if k else 0, size):
        part = slice(first, first + size)
        scores[part], keys[part] = search(queries[part], k)
    return scores, keys


def best_of(scores: Float32, keys: Keys, k: int) -> tuple[Float32, Keys]:
    """Select the k best candidates per query, equal scores by key: [Q, n] -> [Q, k]."""
    if scores.shape[1] > k:
        kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        scores, keys = np.take_along_axis(scores, kept, 1), np.take_along_axis(keys, kept, 1)
    order = np.lexsort((keys, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(keys, order, 1)


def without_itself(
    scores: Vectors, positions: NDArray[np.int64], own: NDArray[np.int64], k: int
) -> tuple[Vectors, NDArray[np.int64]]:
    """Keep the first k neighbors other than the query itself: [Q, n], own [Q] -> [Q, k'].

    The query is not always in its own list: copies of it may come first, and a search may not be
    exact. Where it was in the list and nothing follows, there is -1.
    """
    itself = positions == own[:, None]
    order = np.argsort(itself, axis=1, kind="stable")[:, :k]
    positions = np.where(itself, -1, positions)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)


class ExactNeighbors:
    """The exact nearest neighbors of some entries, to measure another search against.

    An entry is not a neighbor of itself.

    Args:
        own: the keys of the entries [Q].
        queries: their descriptors [Q, C].
        exact: exact search.

    Attributes:
        keys: the keys of their neighbors [Q, n], n <= 10; -1 where there are fewer.
    """

    def __init__(self, own: Keys, queries: Float32, exact: Search) -> None:
        self.own = own
        self.queries = queries
        self.keys = self._neighbors(exact)

    def _neighbors(self, search: Search) -> Keys:
        """What a search finds for each entry, without the entry itself."""
        if not len(self.own):
            return np.zeros((0, 0), np.int64)
        return without_itself(*search(self.queries, RECALL_AT + 1), self.own, RECALL_AT)[1]

    def measure(self, search: Search) -> tuple[float, float]:
        """Measure recall@10 of all queries, and the median milliseconds of single queries."""
        return self.recall(self._neighbors(search)), median_milliseconds(search, self.queries)

    def recall(self, found: Keys) -> float:
        """The share of the neighbors that a search found: keys [Q, n] -> a number."""
        return float(self._shares(found).mean()) if (self.keys >= 0).any() else 1.0

    def sure_recall(self, found: Keys) -> float:
        """A recall that other queries reach too: two standard errors below the measured one."""
        shares = self._shares(found)
        if len(shares) < 2:
            return self.recall(found)
        return float(shares.mean() - 2 * shares.std(ddof=1) / np.sqrt(len(shares)))

    def _shares(self, found: Keys) -> NDArray[np.float64]:
        """The share for each query that has neighbors: keys [Q, n] -> [Q']."""
        there = (self.keys[:, :, None] == found[:, None, :]).any(axis=2)
        wanted = self.keys >= 0
        counts = wanted.sum(axis=1)
        shares: NDArray[np.float64] = (there & wanted).sum(axis=1)[counts > 0] / counts[counts > 0]
        return shares


def median_milliseconds(search: Search, queries: Float32) -> float:
    """The median latency of single queries [Q, C], in milliseconds."""
    times: list[float] = []
    search(queries[:1], RECALL_AT)  # reads what is not in memory yet
    for query in queries[:_TIMED]:
        start = time.perf_counter()
        search(query[None], RECALL_AT)
        times.append(time.perf_counter() - start)
        if sum(times) > _SECONDS:
            break
    return 1000 * float(np.median(times)) if times else 0.0
