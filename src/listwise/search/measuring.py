"""Measure a search: recall@10, and milliseconds per query."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from listwise.search.entries import Float32, Keys
from listwise.search.exact import best_of

RECALL_AT = 10
_TIMED = 20  # queries whose latency is measured


Search = Callable[[Float32, int], tuple[Float32, Keys]]
"""A search to measure: queries [Q, C] and k -> scores and keys, both [Q, k']."""


class ExactNeighbors:
    """The exact nearest neighbors of some entries, from one pass over all descriptors.

    An entry is not a neighbor of itself.

    Args:
        own: the keys of the entries [Q].
        queries: their descriptors [Q, C].

    Attributes:
        keys: the keys of their neighbors [Q, n], n <= 10; -1 where there are fewer.
    """

    def __init__(self, own: Keys, queries: Float32) -> None:
        self.own = own
        self.queries = queries
        self.keys: Keys = np.zeros((len(own), 0), np.int64)
        self._scores: Float32 = np.zeros((len(own), 0), np.float32)

    def add(self, keys: Keys, descriptors: Float32) -> None:
        """Compare the queries with more descriptors: keys [n], rows [n, C]."""
        scores = self.queries @ descriptors.T
        scores[self.own[:, None] == keys] = -np.inf
        scores = np.hstack([self._scores, scores])
        keys = np.hstack([self.keys, np.broadcast_to(keys, (len(self.own), len(keys)))])
        self._scores, self.keys = best_of(scores, keys, min(RECALL_AT, keys.shape[1]))
        self.keys[np.isneginf(self._scores)] = -1

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


def measure(search: Search, exact: ExactNeighbors) -> tuple[float, float]:
    """Measure recall@10 of all queries, and the median milliseconds of single queries."""
    if not len(exact.own):
        return 1.0, 0.0
    found = search(exact.queries, RECALL_AT + 1)[1]
    # The entry itself moves to the end, so that ten others are counted.
    order = np.argsort(found == exact.own[:, None], axis=1, kind="stable")[:, :RECALL_AT]
    recall = exact.recall(np.take_along_axis(found, order, 1))
    return recall, median_milliseconds(search, exact.queries)


def median_milliseconds(search: Search, queries: Float32) -> float:
    """The median latency of single queries [Q, C], in milliseconds."""
    times = []
    for query in queries[:_TIMED]:
        start = time.perf_counter()
        search(query[None], RECALL_AT)
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times)) if times else 0.0
