"""Re-ranking: photos that share the query's geometry come first."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from listwise.blocks import one_thread_products
from listwise.data import Box, ImageError
from listwise.local.compact import COUNT as STORED_COUNT
from listwise.local.compact import decode_features, encode_features, nearest_decoded
from listwise.local.features import COUNT, Features, hessian_affine, photo_features
from listwise.local.verification import nearest_pairs, verify
from listwise.machine import Machine

TOP = 100
MINIMUM = 7
"""Minimum number of inliers for a match; fewer occur by chance."""

_Key = tuple[str, Box | None, int, int]
Result = TypeVar("Result")


class PhotoPart(Protocol):
    """A photo on disk, or the part of it inside `box`; None is the whole photo."""

    @property
    def path(self) -> str: ...  # noqa: D102
    @property
    def box(self) -> Box | None: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class RerankedEntry:
    """An entry of a re-ranked list.

    Attributes:
        position: position of the entry in the list before.
        inliers: number of features that it shares with the query photo; None if the entry was
            not verified.
        photo: number of the query photo with most inliers; None if there are no inliers.
        matches: [m, 4], x, y in the query photo and x, y in the photo of the entry, in pixels of
            the upright whole photos.
    """

    position: int
    inliers: int | None = None
    photo: int | None = None
    matches: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 4), np.float32))


def rerank_by_inliers(
    order: ArrayLike, inliers: ArrayLike, minimum: int = MINIMUM
) -> NDArray[np.int64]:
    """Move images with `minimum` inliers or more to the front, by number of inliers.

    All other images keep their order.

    Shapes: a ranking [n] and the inliers [m] of its first m images -> the new ranking [n].
    """
    ranking = np.asarray(order, dtype=np.int64)
    found = np.asarray(inliers, dtype=np.int64)
    counts = np.zeros(len(ranking), np.int64)
    counts[: len(found)] = np.where(found < minimum, 0, found)
    return ranking[np.argsort(-counts, kind="stable")]


class Reranker:
    """Re-ranks lists of entries by spatial verification, with a cache of features in memory.

    Several threads may use one re-ranker.

    Args:
        cache_bytes: maximum memory of the cache; the least recently used features are removed.
        workers: number of threads; one per core by default.
    """

    def __init__(self, cache_bytes: int = 512 << 20, workers: int | None = None) -> None:
        self.cached_bytes = 0
        self._limit = cache_bytes
        self._cache: OrderedDict[_Key, Features] = OrderedDict()
        self._lock = threading.Lock()
        # Transforms are fitted to few points, in many short calls of NumPy. Two threads that do
        # this together take turns at the interpreter, and both need twice the time. The others
        # compute products of descriptors meanwhile.
        self._fitting = threading.Lock()
        # Its threads outlive a call: one that has run out of time does not wait for them.
        self._pool = ThreadPoolExecutor(workers or Machine.detect("cpu").cores, "verify")

    def close(self) -> None:
        """Stop the threads when their tasks are done, without waiting for them."""
        # The tasks are not cancelled: a call that waits for them would never return.
        self._pool.shutdown(wait=False)

    @one_thread_products
    def rerank(
        self,
        queries: Sequence[Image.Image],
        entries: Sequence[PhotoPart],
        boxes: Sequence[Box | None] | None = None,
        *,
        stored: Sequence[bytes | None] = (),
        until: float | None = None,
        finished: threading.Event | None = None,
    ) -> list[RerankedEntry]:
        """Verify the first 100 entries against the queries and order them by inliers.

        An entry gets the inliers of its best query photo. Entries that were not verified, because
        their photo cannot be read or the time was over, keep their place.

        Args:
            queries: upright photos of the same object.
            entries: the ranked list.
            boxes: part of each query photo to use; None is the whole photo.
            stored: local features of the entries that `compact_features` encoded; the features
                of entries without them are computed from their photos.
            until: time of `time.monotonic` at which to return what was verified until then.
            finished: stop verifying when this event is set.
        """
        parts = [None] * len(queries) if boxes is None else boxes
        stop = _Stop(math.inf if until is None else until, finished or threading.Event())
        only_stored = len(stored) >= len(entries[:TOP]) and all(stored[:TOP])
        count = STORED_COUNT if only_stored else COUNT
        sought = [
            self._pool.submit(_query_features, photo, box, count)
            for photo, box in zip(queries, parts, strict=True)
        ]
        # Stored features are decoded while those of the query are extracted on another core.
        decoding = [self._pool.submit(_decode, code, stop) for code in stored[:TOP]]
        features = [found for found in _results_until(sought, stop) if found is not None]
        decoded = _results_until(decoding, stop)
        # Stored features are compared with those of the query after the same encoding.
        coded = [decode_features(encode_features(found)) for found in features if any(stored)]
        compared: list[RerankedEntry | None] = [None] * len(entries)
        if len(features) == len(queries):
            tasks = [
                self._pool.submit(
                    self._compare,
                    features if known is None else coded,
                    position,
                    entry,
                    known,
                    stop,
                )
                for position, (entry, known) in enumerate(zip_longest(entries[:TOP], decoded))
            ]
            compared[: len(tasks)] = _results_until(tasks, stop)
        verified = [found for found in compared if found is not None]
        order = rerank_by_inliers(range(len(verified)), [found.inliers or 0 for found in verified])
        ordered = iter([verified[i] for i in order])
        return [
            RerankedEntry(position) if found is None else next(ordered)
            for position, found in enumerate(compared)
        ]

    def features(self, entry: PhotoPart) -> Features:
        """Return the features of an entry's photo, from the cache if possible."""
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
                self.cached_bytes += features.nbytes
            while self.cached_bytes > self._limit:
                self.cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return features

    def _compare(
        self,
        queries: Sequence[Features],
        position: int,
        entry: PhotoPart,
        known: Features | None,
        stop: "_Stop",
    ) -> RerankedEntry | None:
        """Verify an entry against all queries, keep the best; None if that is not possible.

        `known` are its stored features; without them, they are computed from its photo.
        """
        if stop.reached():
            return None
        try:
            features = self.features(entry) if known is None else known
        except ImageError:
            return None
        best = RerankedEntry(position, 0)
        for number, query in enumerate(queries):
            if stop.reached():
                return None
            if known is None:
                pairs = nearest_pairs(query.descriptors, features.descriptors)
            else:
                pairs = nearest_decoded(query, features)
            with self._fitting:
                found = verify(query, features, pairs)
            if found.inliers > (best.inliers or 0):
                matches = np.concatenate([found.query_points, found.points], axis=1)
                best = RerankedEntry(position, found.inliers, number, matches)
        return best


@dataclass(frozen=True)
class _Stop:
    """When to stop: at a time of `time.monotonic`, or when an event is set."""

    until: float
    finished: threading.Event

    def reached(self) -> bool:
        return self.finished.is_set() or time.monotonic() > self.until


def _results_until(tasks: Sequence["Future[Result]"], stop: _Stop) -> list["Result | None"]:
    """Return the results of tasks; None for those that are not done in time."""
    timeout = None if stop.until == math.inf else max(0.0, stop.until - time.monotonic())
    done = wait(tasks, timeout).done
    for task in tasks:
        task.cancel()
    return [task.result() if task in done else None for task in tasks]


def _decode(code: bytes | None, stop: _Stop) -> Features | None:
    """Decode stored features; None if there are none, or if the time is over."""
    return decode_features(code) if code and not stop.reached() else None


def _query_features(photo: Image.Image, box: Box | None, count: int) -> Features:
    """Extract the features inside a box, in pixels of the whole photo."""
    if box is None:
        return hessian_affine(photo, count)
    left, top = max(0, round(box[0])), max(0, round(box[1]))
    right, bottom = min(photo.width, round(box[2])), min(photo.height, round(box[3]))
    return hessian_affine(photo.crop((left, top, right, bottom)), count).moved(left, top)
