"""Search through codes of one bit per dimension, with exact scores of the best candidates.

Descriptors are rotated, so that all dimensions matter equally, assigned to lists around centroids,
and stored as the signs of their difference from the centroid (RaBitQ in FAISS). The scores of
these codes select candidates, whose descriptors are read from the file and compared exactly.
"""

import math
import threading
from functools import partial
from math import isqrt
from typing import Any

import numpy as np

from listwise.search.entries import Float32, Keys, in_parts
from listwise.search.exact import best_of, search_in_parts
from listwise.search.folder.descriptors import Descriptors

_MOST_LISTS = 4096
_ROUNDS = 8  # of k-means
_QUERIES = 32  # queries whose candidates are read together
_FEW = 10_000  # entries that match a filter and are compared exactly
_MOST_MORE = 1000  # candidates beyond the number of results
_READ = 1000  # descriptors that are read together
_SEED = 1


class CompressedSearch:
    """RaBitQ codes in inverted lists, with re-scored candidates. Several threads may use it.

    Args:
        index: the FAISS index, from `trained_index`.
        rows: the descriptors that its codes are of.

    Attributes:
        lists: the number of lists.
        probes: the number of lists that a query searches.
        added: the positions before this one have codes, unless they were removed.
        removed: the number of removals that were followed.
    """

    def __init__(self, index: Any, rows: Descriptors, added: int = 0) -> None:
        import faiss

        self.index = index
        lists = faiss.extract_index_ivf(index)
        # The lists of a single query are searched on all cores, too.
        lists.parallel_mode = 1
        self.lists, self.probes = int(lists.nlist), 1
        self.rows = rows
        self._turn = threading.Lock()  # FAISS uses all cores for one search
        self.added, self.removed = added, 0
        self.candidates = 100  # re-scored for ten results

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def update(self) -> int:
        """Follow the changes of the descriptors; the number of them."""
        with self._turn:
            new, gone = len(self.rows.keys), self.rows.removed[self.removed :]
            if new == self.added and not len(gone):
                return 0
            changes = new - self.added + int(self.index.remove_ids(gone[gone < self.added]))
            used = self.added + np.flatnonzero(self.rows.alive[self.added : new])
            for part in in_parts(used, _READ):
                self.index.add_with_ids(self.rows.read(part), part)
            self.added, self.removed = new, self.removed + len(gone)
        return changes

    def found(self, queries: Float32, count: int, among: Keys | None = None) -> Keys:
        """Find candidates by code, best first, -1 if there are fewer: [Q, C] -> [Q, count]."""
        with self._turn:
            found: Keys = self.index.search(queries, count, params=self._params(among))[1]
        return found

    def search(self, queries: Float32, k: int, among: Keys | None = None) -> tuple[Float32, Keys]:
        """Find the k nearest, best first: [Q, C] -> scores and positions, [Q, min(k, N)].

        If fewer are found, the remaining positions are -1 and their scores -inf. With `among`,
        only these positions [n] are searched, and N is n; few are compared exactly.
        """
        self.update()
        if among is None:
            return search_in_parts(self._search, queries, min(k, len(self)), _QUERIES)
        if len(among) <= max(_FEW, self._count(k)):
            return self.rows.search(queries, k, among)
        search = partial(self._search, among=among)
        return search_in_parts(search, queries, min(k, len(among)), _QUERIES)

    def _params(self, among: Keys | None) -> Any:
        """Search some positions alone, in so many lists that about as many codes are compared."""
        import faiss

        probes, selected = self.probes, None
        if among is not None:
            share = max(1, len(self)) / max(1, len(among))
            probes, selected = math.ceil(probes * share), faiss.IDSelectorBatch(among)
        lists = faiss.SearchParametersIVF(sel=selected, nprobe=min(self.lists, probes))  # type: ignore[call-arg]
        return faiss.SearchParametersPreTransform(index_params=lists)  # type: ignore[call-arg]

    def _count(self, k: int) -> int:
        """The number of candidates for k results: in proportion to k, up to a limit."""
        return max(self.candidates, min(self.candidates * k // 10, k + _MOST_MORE))

    def _search(self, queries: Float32, k: int, among: Keys | None = None) -> tuple[Float32, Keys]:
        candidates = self.found(queries, self._count(k), among)
        wanted = np.unique(candidates[candidates >= 0])
        wanted = wanted[self.rows.alive[wanted]]
        scores = np.full(candidates.shape, -np.inf, np.float32)
        for part in in_parts(wanted, _READ):
            products = queries @ self.rows.read(part).T
            places = np.minimum(np.searchsorted(part, candidates), len(part) - 1)
            there = part[places] == candidates
            scores[there] = np.take_along_axis(products, places, 1)[there]
        candidates[np.isneginf(scores)] = -1  # they were removed meanwhile
        return best_of(scores, candidates, k)


def trained_index(sample: Float32, entries: int) -> Any:
    """Train an empty FAISS index for about `entries` entries on a sample [n, C].

    The number of lists grows with the square root of the entries, so that a query costs as much
    for the centroids as for the codes, and training takes about a minute for a million.
    """
    import faiss

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
    """Memory of codes, positions, keys, checksums and centroids, in bytes."""
    rotated = 1 << (dim - 1).bit_length()
    return entries * (rotated // 8 + 8 + 8 + 17) + min(isqrt(entries), _MOST_LISTS) * 4 * rotated
