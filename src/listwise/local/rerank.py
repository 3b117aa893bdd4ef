"""Re-ranking: photos that share the query's geometry come first."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from listwise.data import Box, ImageError
from listwise.local.features import Features, hessian_affine, photo_features
from listwise.local.verification import Verified, verify
from listwise.search.index import Entry

TOP = 100
MINIMUM = 6
"""Inliers from which two photos show the same thing: fewer are found by chance."""

_Key = tuple[str, Box | None, int, int]


@dataclass(frozen=True, eq=False)
class Reranked:
    """An entry in its new place.

    `position` is where it was, `inliers` how many features it shares with the query photo number
    `photo`, None if there are none; `matches` [m, 4] are their places: x, y in the query photo and
    x, y in the entry's, in pixels of the upright whole photos.
    """

    position: int
    inliers: int
    photo: int | None
    matches: NDArray[np.float32]


def rerank_by_inliers(
    order: ArrayLike, inliers: ArrayLike, minimum: int = MINIMUM
) -> NDArray[np.int64]:
    """Put what has `minimum` inliers or more first, by their number; the rest stays as it was.

    Shapes: a ranking [n] and the inliers [m] of its first m -> the new ranking [n].
    """
    ranking = np.asarray(order, dtype=np.int64)
    counts = np.zeros(len(ranking), np.int64)
    counts[: len(np.asarray(inliers))] = inliers
    counts[counts < minimum] = 0
    return ranking[np.argsort(-counts, kind="stable")]


class Reranker:
    """Re-ranks lists of entries; the features of photos seen before are kept in memory.

    One may be used by several threads.

    Args:
        cache_bytes: memory for features at most; those not used for longest go first.
        workers: threads; as many as there are cores by default.
    """

    def __init__(self, cache_bytes: int = 512 << 20, workers: int | None = None) -> None:
        self._limit = cache_bytes
        self._cache: OrderedDict[_Key, Features] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._workers = workers or os.cpu_count() or 1

    def rerank(
        self,
        queries: Sequence[Image.Image],
        entries: Sequence[Entry],
        boxes: Sequence[Box | None] | None = None,
    ) -> list[Reranked]:
        """Order entries by the inliers they share with the query photo they share most with.

        The first 100 are compared. Entries whose photo cannot be read stay where they were.

        Args:
            queries: upright photos.
            entries: what a search found, best first.
            boxes: the parts of the queries that are meant, None for all of one.
        """
        parts = boxes or [None] * len(queries)
        with ThreadPoolExecutor(self._workers) as pool:
            sought = list(pool.map(_query_features, queries, parts))
            found = list(pool.map(lambda entry: self._compare(sought, entry), entries[:TOP]))
        results = [
            found[i] if i < len(found) else None for i in range(len(entries))
        ]
        seen = [i for i, result in enumerate(results) if result is not None]
        inliers = [result.inliers for result in results if result is not None]
        places = dict(zip(seen, rerank_by_inliers(seen, inliers).tolist(), strict=True))
        return [_reranked(places.get(i, i), results[places.get(i, i)]) for i in range(len(entries))]

    def features(self, entry: Entry) -> Features:
        """Features of an entry's photo, from memory if they are there.

        Raises:
            ImageError: the photo cannot be read.
        """
        try:
            state = Path(entry.path).stat()
        except OSError as error:
            raise ImageError(entry.path, error.strerror or "cannot be read") from None
        key = (entry.path, entry.box, state.st_mtime_ns, state.st_size)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        features = photo_features(entry.path, entry.box)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = features
                self._bytes += features.nbytes
            while self._bytes > self._limit and self._cache:
                self._bytes -= self._cache.popitem(last=False)[1].nbytes
        return features

    def _compare(self, queries: Sequence[Features], entry: Entry) -> "_Compared | None":
        """The query photo that shares most with an entry; None if its photo cannot be read."""
        try:
            features = self.features(entry)
        except ImageError:
            return None
        verified = [verify(query, features) for query in queries]
        best = max(range(len(verified)), key=lambda number: verified[number].inliers)
        return _Compared(best, verified[best])
