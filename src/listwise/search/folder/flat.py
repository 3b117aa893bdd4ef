"""Exact search through descriptors in memory, which can be added and removed."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import faiss
import numpy as np
from numpy.typing import NDArray

from listwise.machine import core_count
from listwise.search.entries import Float32, Keys
from listwise.search.exact import best_of, search_in_parts
from listwise.search.folder.keymap import KeyMap

_BLOCK = 64 << 20  # bytes: memory grows by whole blocks, without copying
_QUERIES = 256  # per step: each query has candidates in every block
# FAISS computes a matrix product from this number of queries times dimensions. Its own default is
# eight times larger, which makes batches of 8 to 60 queries of 2048 up to four times slower.
faiss.cvar.distance_compute_blas_threshold = 8 * 2048


class FlatSearch:
    """Exact search of FAISS over blocks, on all cores. Several threads may use it."""

    def __init__(self, dim: int, rows: Float32 | None = None, keys: Keys | None = None) -> None:
        """Search through `rows` [N, C] with distinct keys [N], which are not copied."""
        self.dim = dim
        self._rows = max(1, _BLOCK // (4 * dim))
        self._blocks: list[Float32] = []
        self._keys: Keys = np.zeros(0, np.int64)  # by position, for all rows of all blocks
        self._places = KeyMap()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(
            core_count(), initializer=lambda: faiss.omp_set_num_threads(1)
        )
        if rows is not None and keys is not None:
            self._start_with(rows, keys)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        return exact_memory(len(self), self.dim)

    def put(self, keys: Keys, descriptors: Float32, known: NDArray[np.bool_]) -> None:
        """Add descriptors; those that are `known` are replaced: distinct [n], [n, C], bool [n]."""
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
        """Remove descriptors of known keys: distinct [n]."""
        with self._lock:
            places = self._places.find(keys)[1]
            self._places.remove(keys)
            # The last rows move into the gaps, so that all rows that are searched are in use.
            left = len(self)
            holes = places[places < left]
            last = np.setdiff1d(np.arange(left, left + len(places)), places)
            for hole, old in zip(holes.tolist(), last.tolist(), strict=True):
                self._row(hole)[:] = self._row(old)
            self._keys[holes] = self._keys[last]
            self._places.put(self._keys[holes], holes)
            del self._blocks[-(-left // self._rows) :]
            self._keys = self._keys[: len(self._blocks) * self._rows]

    def parts(self) -> Iterator[tuple[Keys, Float32]]:
        """Keys [n] and descriptors [n, C], block by block; they must not change meanwhile."""
        for number, block in enumerate(self._blocks):
            start = number * self._rows
            count = min(self._rows, len(self) - start)
            yield self._keys[start : start + count], block[:count]

    def _start_with(self, rows: Float32, keys: Keys) -> None:
        whole = len(rows) // self._rows * self._rows
        self._blocks = [rows[start : start + self._rows] for start in range(0, whole, self._rows)]
        if whole < len(rows):
            last = np.empty((self._rows, self.dim), np.float32)
            last[: len(rows) - whole] = rows[whole:]
            self._blocks.append(last)
        self._keys = np.full(len(self._blocks) * self._rows, -1)
        self._keys[: len(keys)] = keys
        self._places.put(keys, np.arange(len(keys)))

    def search(self, queries: Float32, k: int, among: Keys | None = None) -> tuple[Float32, Keys]:
        """Find the k nearest, best first: [Q, C] -> scores and keys, both [Q, min(k, N)].

        With `among`, only descriptors with these keys [n] are searched, and N is their number.
        """
        with self._lock:
            places = None if among is None else np.sort(self._places.find(among)[1])
            count = len(self) if places is None else len(places)
            search = partial(self._search, places=places)
            return search_in_parts(search, queries, min(k, count), _QUERIES)

    def vectors(self, keys: Keys) -> tuple[NDArray[np.bool_], Float32]:
        """Which keys are known, and their descriptors: [n] -> bool [n], [found, C]."""
        with self._lock:
            known, places = self._places.find(keys)
            rows = [self._row(place) for place in places.tolist()]
            return known, np.array(rows, np.float32).reshape(len(rows), self.dim)

    def _row(self, position: int) -> Float32:
        row: Float32 = self._blocks[position // self._rows][position % self._rows]
        return row

    def _search(self, queries: Float32, k: int, places: Keys | None) -> tuple[Float32, Keys]:
        def nearest(number: int) -> tuple[Float32, Keys]:
            start = number * self._rows
            block, keys = self._blocks[number], self._keys[start : start + self._rows]
            if places is None:
                block = block[: len(self) - start]
            else:
                first, past = np.searchsorted(places, (start, start + self._rows))
                chosen = places[first:past] - start
                block, keys = block[chosen], keys[chosen]
            scores, found = faiss.knn(
                queries, block, min(k, len(block)), faiss.METRIC_INNER_PRODUCT
            )
            return scores, keys[found]

        blocks = range(len(self._blocks)) if places is None else np.unique(places // self._rows)
        found = list(self._pool.map(nearest, blocks))
        return best_of(
            np.hstack([row[0] for row in found]), np.hstack([row[1] for row in found]), k
        )


def exact_memory(entries: int, dim: int) -> int:
    """Memory of exact search through `entries` descriptors, in bytes."""
    return entries * (4 * dim + 24)
