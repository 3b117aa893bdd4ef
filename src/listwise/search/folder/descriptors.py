"""The file of descriptors: rows that are appended, mapped into memory, and searched exactly.

A committed row never changes. Its position is its number in the file; the database knows which
positions are in use. Rows after the last committed one are left from an interrupted change, and the
next change writes over them.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from listwise.blocks import one_thread_products
from listwise.machine import core_count
from listwise.search.entries import DamagedIndexError, Float32, Keys, descriptor_sums
from listwise.search.exact import best_of, search_in_parts

_BLOCK = 16 << 20  # bytes that are searched together
_QUERIES = 256  # per step: each query has candidates in every part
_FEW = 4  # fewer queries are compared one by one
_NONE: Keys = np.zeros(0, np.int64)


def append_rows(path: Path, rows: Float32, start: int) -> None:
    """Write rows from a position, and wait until they are on the disk."""
    with path.open("r+b") as file:
        file.seek(start * rows.shape[1] * 4)
        file.write(np.ascontiguousarray(rows, np.float32).tobytes())
        file.flush()
        os.fsync(file.fileno())


def _products(queries: Float32, rows: Float32) -> Float32:
    """The inner products of queries and rows: [Q, C], [n, C] -> [Q, n]."""
    if len(queries) >= _FEW:
        return queries @ rows.T
    import faiss

    scores = np.empty((len(queries), len(rows)), np.float32)
    for query, row in zip(queries, scores, strict=True):
        pointers = map(faiss.swig_ptr, (row, query, rows))
        faiss.fvec_inner_products_ny(*pointers, rows.shape[1], len(rows))  # type: ignore[attr-defined]
    return scores


class Descriptors:
    """The committed rows of a file. Several threads may use it while one thread updates it.

    Args:
        path: the file.
        dim: the dimensions C of a row.
        damaged: returns the error for the keys of damaged rows.

    Attributes:
        keys: the keys of the entries by position, int64 [N].
        sums: the checksums of the rows, int64 [N].
        alive: which positions are in use, bool [N].
        removed: the positions that are not, in the order in which they were removed.
    """

    def __init__(self, path: Path, dim: int, damaged: Callable[[Keys], DamagedIndexError]) -> None:
        self.path = path
        self.dim = dim
        self.keys, self.sums, self.removed = _NONE, _NONE, _NONE
        self.alive = np.zeros(0, bool)
        self._damaged = damaged
        self._compared = np.zeros(0, bool)  # rows that a search compared with their checksums
        self._file: Float32 = np.zeros((0, dim), np.float32)
        self._height = max(1, _BLOCK // (4 * dim))  # rows that are read together

    def __len__(self) -> int:
        return int(self.alive.sum())

    def update(self, keys: Keys, sums: Keys, removed: Keys) -> None:
        """Follow a commit: the keys and sums of new rows [n], and positions that were removed."""
        alive = np.append(self.alive, np.ones(len(keys), bool))
        alive[removed] = False
        self.alive = alive
        self._compared = np.append(self._compared, np.zeros(len(keys), bool))
        self.sums = np.append(self.sums, sums)
        self.removed = np.append(self.removed, removed)
        self.keys = np.append(self.keys, keys)  # last: its length is the number of rows

    def read(self, positions: Keys) -> Float32:
        """Read rows [n, C]; `DamagedIndexError` if one is not what was written."""
        rows, sound = self.read_all(positions)
        if not sound.all():
            raise self._damaged(self.keys[positions[~sound]])
        return rows

    def read_all(self, positions: Keys) -> tuple[Float32, NDArray[np.bool_]]:
        """Read rows [n, C], and which of them are what was written, bool [n]."""
        rows = self._mapped()[positions]
        return rows, descriptor_sums(self.keys[positions], rows) == self.sums[positions]

    def search(self, queries: Float32, k: int, among: Keys | None = None) -> tuple[Float32, Keys]:
        """Find the k nearest, best first: [Q, C] -> scores and positions, [Q, min(k, N)].

        With `among`, only these positions [n] are searched, sorted and in use, and N is n.
        """
        positions = np.arange(len(self.keys)) if among is None else among
        alive, rows = self.alive, self._mapped()

        def nearest(queries: Float32, k: int, start: int) -> tuple[Float32, Keys]:
            """The best of the rows that are read together."""
            some = positions[start : start + self._height]
            # Not a copy; there may be more rows now, of a later commit.
            block = rows[start : start + len(some)] if among is None else rows[some]
            self._compare(some, block)
            scores = _products(queries, block)
            scores[:, ~alive[some]] = -np.inf
            left = max(0, len(block) - k)
            found = np.argpartition(scores, left, axis=1)[:, left:]
            return np.take_along_axis(scores, found, 1), np.where(alive[some], some, -1)[found]

        def search(queries: Float32, k: int) -> tuple[Float32, Keys]:
            best = np.full((len(queries), k), -np.inf, np.float32)
            found = np.full((len(queries), k), -1, np.int64)
            starts = range(0, len(positions), self._height)
            products = one_thread_products if len(queries) >= _FEW else nullcontext()
            with products, ThreadPoolExecutor(core_count()) as pool:
                for scores, places in pool.map(partial(nearest, queries, k), starts):
                    best, found = best_of(np.hstack([best, scores]), np.hstack([found, places]), k)
            return best, found

        number = int(alive[positions].sum())
        return search_in_parts(search, queries, min(k, number), _QUERIES)

    def _compare(self, positions: Keys, rows: Float32) -> None:
        """Compare rows with their checksums before they are searched for the first time."""
        if not self._compared[positions].all():
            sound = descriptor_sums(self.keys[positions], rows) == self.sums[positions]
            broken = positions[~sound & self.alive[positions]]
            if len(broken):
                raise self._damaged(self.keys[broken])
            self._compared[positions] = True

    def _mapped(self) -> Float32:
        """All rows, mapped into memory."""
        rows, keys = self._file, self.keys
        if len(rows) < len(keys):
            try:
                found = np.memmap(self.path, np.float32, "r", shape=(len(keys), self.dim))
            except (OSError, ValueError):  # the file is missing or too short
                raise self._damaged(keys) from None
            rows = self._file = found.view(np.ndarray)
        return rows


def exact_memory(entries: int, dim: int) -> int:
    """Memory of exact search through `entries` descriptors, in bytes."""
    return entries * (4 * dim + 17)
