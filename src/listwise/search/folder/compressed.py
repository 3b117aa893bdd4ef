"""Search through codes of one bit per dimension, with exact scores of the best candidates.

Descriptors are rotated, so that all dimensions matter equally, assigned to lists around centroids,
and stored as the signs of their difference from the centroid (RaBitQ in FAISS). The scores of
these codes select candidates, whose descriptors are read from disk and compared exactly.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import isqrt
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from listwise.search.entries import Float32, Keys
from listwise.search.exact import best_of, search_in_parts
from listwise.search.folder.descriptor_file import DescriptorFile
from listwise.search.folder.table import Rows

_MOST_LISTS = 4096
_ROUNDS = 8  # of k-means
_QUERIES = 32  # queries whose candidates are read together
_FEW = 10_000  # entries that match a filter and are compared exactly
_MOST_MORE = 1000  # candidates beyond the number of results
_SEED = 1


class CompressedSearch:
    """RaBitQ codes in inverted lists, with re-scored candidates. Several threads may use it.

    Args:
        index: the FAISS index, from `trained_index`.
        read: reads the rows of keys [n] from the table.

    Attributes:
        copy: a copy of the descriptors, from which they are read as long as they do not change;
            None if there is none.
    """

    def __init__(self, index: Any, read: Callable[[Keys], Iterable[Rows]]) -> None:
        self.index = index
        self._lists = faiss.extract_index_ivf(index)
        # The lists of a single query are searched on all cores, too.
        self._lists.parallel_mode = 1
        self._read = read
        self._lock = threading.Lock()
        self.candidates = 100  # re-scored for ten results
        self.copy: DescriptorFile | None = None

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def lists(self) -> int:
        """The number of lists."""
        return int(self._lists.nlist)

    @property
    def probes(self) -> int:
        """The number of lists that a query searches."""
        return int(self._lists.nprobe)

    @probes.setter
    def probes(self, count: int) -> None:
        self._lists.nprobe = count

    @property
    def memory(self) -> int:
        """Bytes in memory."""
        return compressed_memory(len(self), self.index.d)

    def put(self, keys: Keys, descriptors: Float32, known: NDArray[np.bool_]) -> None:
        """Add descriptors; those that are `known` are replaced: distinct [n], [n, C], bool [n]."""
        with self._lock:
            if known.any():
                self.index.remove_ids(keys[known])
                if self.copy is not None:
                    self.copy.forget(keys[known])
            self.index.add_with_ids(np.ascontiguousarray(descriptors, np.float32), keys)

    def remove(self, keys: Keys) -> None:
        """Remove descriptors of known keys: distinct [n]."""
        with self._lock:
            self.index.remove_ids(keys)
            if self.copy is not None:
                self.copy.forget(keys)

    def found(self, queries: Float32, count: int, among: Keys | None = None) -> Keys:
        """Find candidates by code, best first, -1 if there are fewer: [Q, C] -> [Q, count]."""
        with self._lock:
            params = None if among is None else self._params(among)
            found: Keys = self.index.search(queries, count, params=params)[1]
        return found

    def search(self, queries: Float32, k: int, among: Keys | None = None) -> tuple[Float32, Keys]:
        """Find the k nearest, best first: [Q, C] -> scores and keys, both [Q, min(k, N)].

        If fewer are found, the remaining keys are -1 and their scores -inf. With `among`, only
        descriptors with these keys [n] are searched, and N is their number; few are compared
        exactly.
        """
        if among is None:
            return search_in_parts(self._search, queries, min(k, len(self)), _QUERIES)
        few = len(among) <= max(_FEW, self._count(k))
        search = partial(self._exact if few else self._search, among=among)
        return search_in_parts(search, queries, min(k, len(among)), _QUERIES)

    def _params(self, among: Keys) -> Any:
        """Search these keys alone, in so many lists that about as many codes are compared."""
        share = max(1, len(self)) / max(1, len(among))
        probes = min(self.lists, math.ceil(self.probes * share))
        lists = faiss.SearchParametersIVF(sel=faiss.IDSelectorBatch(among), nprobe=probes)  # type: ignore[call-arg]
        return faiss.SearchParametersPreTransform(index_params=lists)  # type: ignore[call-arg]

    def _count(self, k: int) -> int:
        """The number of candidates for k results: in proportion to k, up to a limit."""
        return max(self.candidates, min(self.candidates * k // 10, k + _MOST_MORE))

    def _exact(self, queries: Float32, k: int, among: Keys) -> tuple[Float32, Keys]:
        """Compare the queries with all descriptors of these keys."""
        scores = np.full((len(queries), k), -np.inf, np.float32)
        keys = np.full((len(queries), k), -1, np.int64)
        for rows in self.rows(among):
            new = queries @ rows.descriptors.T
            all_keys = np.hstack([keys, np.broadcast_to(rows.keys, new.shape)])
            scores, keys = best_of(np.hstack([scores, new]), all_keys, k)
        return scores, keys

    def rows(self, keys: Keys) -> Iterator[Rows]:
        """Read the rows of keys [n], from the copy if they are in it."""
        if self.copy is not None:
            with self._lock:
                known, positions = self.copy.find(keys)
            sound, rows = self.copy.read(positions)
            if len(rows.keys):
                yield rows
            known[known] = sound  # what is damaged is read from the table
            keys = keys[~known]
        if len(keys):
            yield from self._read(keys)

    def _search(self, queries: Float32, k: int, among: Keys | None = None) -> tuple[Float32, Keys]:
        candidates = self.found(queries, self._count(k), among)
        wanted = np.unique(candidates[candidates >= 0])
        scores = np.full(candidates.shape, -np.inf, np.float32)
        for rows in self.rows(wanted):
            order = np.argsort(rows.keys)
            products = queries @ rows.descriptors[order].T
            places = np.searchsorted(rows.keys[order], candidates)
            places = np.minimum(places, len(order) - 1)
            there = rows.keys[order][places] == candidates
            scores[there] = np.take_along_axis(products, places, 1)[there]
        # An entry that was removed in the meantime has no row.
        candidates[np.isneginf(scores)] = -1
        return best_of(scores, candidates, k)


def trained_index(sample: Float32, entries: int) -> Any:
    """Train an empty FAISS index for about `entries` entries on a sample [n, C].

    The number of lists grows with the square root of the entries, so that a query costs as much
    for the centroids as for the codes, and training takes about a minute for a million.
    """
    lists = max(1, min(isqrt(entries), _MOST_LISTS, len(sample)))
    rotation = faiss.HadamardRotation(sample.shape[1], _SEED)
    rotated = rotation.apply(np.ascontiguousarray(sample, np.float32))
    means = faiss.Kmeans(
        rotation.d_out,
        lists,
        niter=_ROUNDS,
        spherical=True,
        seed=_SEED,
        min_points_per_centroid=1,
        max_points_per_centroid=training_size(entries) // lists + 1,
    )
    means.train(rotated)
    centers = faiss.IndexFlatIP(rotation.d_out)
    centers.add(np.asarray(means.centroids, np.float32))
    codes = faiss.IndexIVFRaBitQ(centers, rotation.d_out, lists, faiss.METRIC_INNER_PRODUCT)
    codes.train(rotated)
    return faiss.IndexPreTransform(rotation, codes)


def training_size(entries: int) -> int:
    """The number of entries to train with."""
    return min(entries, 32 * min(isqrt(entries) + 1, _MOST_LISTS))


def compressed_memory(entries: int, dim: int) -> int:
    """Memory of codes, keys, stamps and centroids of `entries` descriptors, in bytes."""
    rotated = 1 << (dim - 1).bit_length()
    return entries * (rotated // 8 + 8 + 8 + 16) + min(isqrt(entries), _MOST_LISTS) * 4 * rotated
