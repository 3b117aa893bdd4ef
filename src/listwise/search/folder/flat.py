"""Exact search through descriptors in memory, which may be added and removed at any time."""

import threading
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
from numpy.typing import NDArray

from listwise.machine import core_count
from listwise.search.entries import Float32, Keys
from listwise.search.exact import best_of, search_in_parts
from listwise.search.folder.keymap import KeyMap

_BLOCK = 64 << 20  # bytes: memory grows by as much, and nothing is ever moved for it
_QUERIES = 256  # at a time: each gives candidates of every block
# Queries times dimensions from which on FAISS makes one matrix product of them. It waits for eight
# times as many by itself, which makes batches of 8 to 60 queries of 2048 up to four times slower.
faiss.cvar.distance_compute_blas_threshold = 8 * 2048


class FlatSearch:
    """FAISS's exact search, over blocks in all cores. Safe with several threads."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self._rows = max(1, _BLOCK // (4 * dim))
        self._blocks: list[Float32] = []
        self._keys: Keys = np.zeros(0, np.int64)  # by position, as far as there are blocks
        self._places = KeyMap()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(
            core_count(), initializer=lambda: faiss.omp_set_num_threads(1)
        )

    def __len__(self) -> int:
        return len(self._places)

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        return exact_memory(len(self), self.dim)

    def put(self, keys: Keys, descriptors: Float32, known: NDArray[np.bool_]) -> None:
        """Add descriptors, in place of those that are `known`: [n] distinct, [n, C], [n]."""
        with self._lock:
            count = len(self) + int((~known).sum())
            while len(self._blocks) * self._rows < count:
                self._blocks.append(np.empty((self._rows, self.dim), np.float32))
                self._keys = np.append(self._keys, np.full(self._rows, -1))
            positions = np.empty(len(keys), np.int64)
            positions[known] = self._places.find(keys[known])[1]
            positions[~known] = np.arange(len(self), count)
            for block in np.unique(positions // self._rows):
                inside = positions // self._rows == block
                self._blocks[block][positions[inside] % self._rows] = descriptors[inside]
            self._keys[positions] = keys
            self._places.put(keys, positions)

    def remove(self, keys: Keys) -> None:
        """Remove descriptors that are there: [n] distinct."""
        with self._lock:
            places = self._places.find(keys)[1]
            self._places.remove(keys)
            # The last ones move into the holes, so that no row that is searched is dead.
            left = len(self)
            holes = places[places < left]
            last = np.setdiff1d(np.arange(left, left + len(places)), places)
            for hole, old in zip(holes.tolist(), last.tolist(), strict=True):
                self._row(hole)[:] = self._row(old)
            self._keys[holes] = self._keys[last]
            self._places.put(self._keys[holes], holes)
            del self._blocks[-(-left // self._rows) :]
            self._keys = self._keys[: len(self._blocks) * self._rows]

    def search(self, queries: Float32, k: int) -> tuple[Float32, Keys]:
        """Scores and keys of the nearest, best first: [Q, C] -> [Q, min(k, N)], twice."""
        with self._lock:
            return search_in_parts(self._search, queries, min(k, len(self)), _QUERIES)

    def vectors(self, keys: Keys) -> tuple[NDArray[np.bool_], Float32]:
        """Which keys there are, and the descriptors of those: [n] -> [n], [found, C]."""
        with self._lock:
            known, places = self._places.find(keys)
            rows = [self._row(place) for place in places.tolist()]
            return known, np.array(rows, np.float32).reshape(len(rows), self.dim)

    def _row(self, position: int) -> Float32:
        row: Float32 = self._blocks[position // self._rows][position % self._rows]
        return row

    def _search(self, queries: Float32, k: int) -> tuple[Float32, Keys]:
        def nearest(number: int) -> tuple[Float32, Keys]:
            start = number * self._rows
            block = self._blocks[number][: len(self) - start]
            scores, places = faiss.knn(
                queries, block, min(k, len(block)), faiss.METRIC_INNER_PRODUCT
            )
            return scores, self._keys[start + places]

        found = list(self._pool.map(nearest, range(len(self._blocks))))
        return best_of(
            np.hstack([row[0] for row in found]), np.hstack([row[1] for row in found]), k
        )


def exact_memory(entries: int, dim: int) -> int:
    """Bytes that so many descriptors take."""
    return entries * (4 * dim + 24)
