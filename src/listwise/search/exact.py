"""Exact search through descriptors that need not fit into memory."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.blocks import Database, Vectors, as_queries, blocks, each_block
from listwise.errors import InputError
from listwise.search.entries import Float32, Keys


def exact_search(
    queries: ArrayLike, database: Database, k: int
) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """The k highest dot products of each query, best first, in one pass over the database.

    Equal scores come in database order.
    Shapes: queries [Q, C]; database [N, C], or blocks [n, C] -> scores and positions, both
    [Q, min(k, N)].
    """
    if k < 1:
        raise InputError(f"k is {k}; ask for one neighbour at least")
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
    """The best k of those found so far, which stand earlier, and of a block's scores."""
    had = best.shape[1]
    width = min(k, had + scores.shape[1])
    new_best = np.empty((len(best), width), best.dtype)
    new_places = np.empty((len(best), width), np.int64)
    for query, row in enumerate(scores):
        # Once the list is full, few of a block pass its last score.
        better = np.flatnonzero(row > best[query, -1]) if had == k else np.arange(len(row))
        all_scores = np.concatenate([best[query], row[better]])
        all_places = np.concatenate([places[query], better + start])
        order = np.argsort(-all_scores, kind="stable")[:width]
        new_best[query] = all_scores[order]
        new_places[query] = all_places[order]
    return new_best, new_places


class ExactIndex:
    """A database searched exactly: nothing is built and nothing kept.

    Shapes: database [N, C], or blocks [n, C] that can be read again for every call.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    def search(self, queries: ArrayLike, k: int) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
        """The k nearest of each query: [Q, C] -> scores and positions, both [Q, min(k, N)]."""
        return exact_search(queries, self.database, k)

    def vectors(self, positions: ArrayLike) -> NDArray[np.generic]:
        """The descriptors at some positions: [n] -> [n, C]."""
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


def search_in_parts(
    search: Callable[[Float32, int], tuple[Float32, Keys]], queries: Float32, k: int, size: int
) -> tuple[Float32, Keys]:
    """Scores and keys [Q, k] of a search for `size` queries at a time: [Q, C] -> [Q, k], twice."""
    scores = np.empty((len(queries), k), np.float32)
    keys = np.empty((len(queries), k), np.int64)
    for first in range(0, len(queries) if k else 0, size):
        part = slice(first, first + size)
        scores[part], keys[part] = search(queries[part], k)
    return scores, keys


def best_of(scores: Float32, keys: Keys, k: int) -> tuple[Float32, Keys]:
    """The k best candidates of each query, best first, equal ones by key: [Q, n] -> [Q, k]."""
    if scores.shape[1] > k:
        kept = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        scores, keys = np.take_along_axis(scores, kept, 1), np.take_along_axis(keys, kept, 1)
    order = np.lexsort((keys, -scores), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(keys, order, 1)
