"""Compare pairs of photos by their local features on all cores, and record the results.

The record is kept on disk: a run that was interrupted, or a later run with other thresholds, does
not compare a pair again.
"""

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from listwise.labeling.overlays import verify_photos
from listwise.labeling.store import FeatureStore
from listwise.labeling.workers import Workers

if TYPE_CHECKING:
    from listwise.local.verification import Verification

Pairs = NDArray[np.int64]
"""Numbers of two photos, the smaller first: [m, 2]."""

TASK = 128  # maximum number of pairs per task of a worker
_DECODED = 256  # photos whose features a worker keeps in memory: about 100 MB
_HEAD = struct.Struct("<II")  # number of pairs, checksum
_ROW = np.dtype([("one", "<u4"), ("two", "<u4"), ("inliers", "<u2")])


def unique_pairs(pairs: Pairs) -> Pairs:
    """Return pairs sorted and without duplicates, the smaller number first."""
    if not len(pairs):
        return np.zeros((0, 2), np.int64)
    return np.unique(np.sort(pairs, axis=1), axis=0)


class MatchRecord:
    """The number of inliers of all pairs compared so far, in memory and in a file.

    The file may contain pairs of an earlier run with other thresholds. Only those that this run
    asked for count, so its result does not depend on earlier runs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = _read(path)
        self._keys = np.zeros(0, np.int64)
        self._inliers = np.zeros(0, np.int64)
        self._used = np.zeros(0, bool)
        self._add(np.stack([rows["one"], rows["two"]], 1).astype(np.int64), rows["inliers"])

    def __len__(self) -> int:
        return int(self._used.sum())

    def inliers(self, pairs: Pairs) -> NDArray[np.int64]:
        """Return the number of inliers of each pair, -1 for pairs that were not compared: [m]."""
        places, known = self._find(pairs)
        found = np.full(len(pairs), -1, np.int64)
        found[known] = self._inliers[places[known]]
        return found

    def _find(self, pairs: Pairs) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the places of pairs in the record, and whether they are in it."""
        keys = _keys(pairs)
        if not len(self._keys):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return places, self._keys[places] == keys

    def links(self, least: int) -> tuple[Pairs, NDArray[np.int64]]:
        """Return the pairs with at least this number of inliers [m, 2], and the numbers [m]."""
        chosen = self._used & (self._inliers >= least)
        keys = self._keys[chosen]
        return np.stack([keys >> 32, keys & 0xFFFFFFFF], 1), self._inliers[chosen]

    def compare(
        self,
        store: FeatureStore,
        pairs: Pairs,
        workers: Workers,
        on_progress: Callable[[int], object],
    ) -> None:
        """Compare the pairs that are not in the record, and add them to it."""
        pairs = unique_pairs(pairs)
        missing = pairs[self.inliers(pairs) < 0]
        on_progress(len(pairs) - len(missing))
        if len(missing):
            self._add(missing, self._compare(store, missing, workers, on_progress))
        self._used[self._find(pairs)[0]] = True

    def _compare(
        self,
        store: FeatureStore,
        missing: Pairs,
        workers: Workers,
        on_progress: Callable[[int], object],
    ) -> NDArray[np.int64]:
        # Every worker gets something to do, even in a small round.
        size = min(TASK, max(8, len(missing) // (4 * max(1, workers.count))))
        parts = np.array_split(missing, range(size, len(missing), size))
        tasks = ((str(store.folder), store.count, part) for part in parts)
        found = []
        with (
            self.path.open("ab") as file,
            closing(workers.results(_count_inliers, tasks)) as results,
        ):
            for part, inliers in zip(parts, results, strict=True):
                _append(file, part, inliers)
                found.append(inliers)
                on_progress(len(part))
        return np.concatenate(found)

    def _add(self, pairs: Pairs, inliers: NDArray[Any]) -> None:
        keys = np.concatenate([self._keys, _keys(pairs)])
        self._keys, first = np.unique(keys, return_index=True)
        self._inliers = np.concatenate([self._inliers, inliers.astype(np.int64)])[first]
        self._used = np.concatenate([self._used, np.zeros(len(pairs), bool)])[first]


def _keys(pairs: Pairs) -> NDArray[np.int64]:
    return (pairs[:, 0] << 32) | pairs[:, 1]


def _append(file: Any, pairs: Pairs, inliers: NDArray[np.int64]) -> None:
    rows = np.zeros(len(pairs), _ROW)
    rows["one"], rows["two"], rows["inliers"] = pairs[:, 0], pairs[:, 1], inliers
    content = rows.tobytes()
    file.write(_HEAD.pack(len(rows), zlib.crc32(content)) + content)
    file.flush()


def _read(path: Path) -> NDArray[Any]:
    """Read the complete entries of a record; an incomplete or damaged end is cut off."""
    if not path.exists():
        return np.zeros(0, _ROW)
    content = path.read_bytes()
    parts, end = [np.zeros(0, _ROW)], 0
    while len(content) - end >= _HEAD.size:
        count, checksum = _HEAD.unpack_from(content, end)
        start, past = end + _HEAD.size, end + _HEAD.size + count * _ROW.itemsize
        if past > len(content) or zlib.crc32(content[start:past]) != checksum:
            break
        parts.append(np.frombuffer(content, _ROW, count, start))
        end = past
    if end < len(content):
        os.truncate(path, end)
    return np.concatenate(parts)


@lru_cache(maxsize=1)
def _open_photos(folder: str, count: int) -> "Callable[[int, int], Verification]":
    """Return a function that compares two photos, and keeps the features of the latest ones."""
    store = FeatureStore(Path(folder), count)
    read = lru_cache(maxsize=_DECODED)(store.read)

    def compare(one: int, two: int) -> "Verification":
        return verify_photos(read(one), read(two), (store.size(one), store.size(two)))

    return compare


def forget_photos() -> None:
    """Forget the features in memory: another run may write other ones to the same folder."""
    _open_photos.cache_clear()


def _count_inliers(task: tuple[str, int, Pairs]) -> NDArray[np.int64]:
    """Compare the pairs of a task; runs in a worker process."""
    folder, count, pairs = task
    compare = _open_photos(folder, count)
    return np.minimum([compare(one, two).inliers for one, two in pairs.tolist()], 0xFFFF)


def matching_points(
    store: FeatureStore, pairs: Sequence[tuple[int, int]]
) -> "Iterator[Verification]":
    """Yield the matching points of each pair of photos."""
    compare = _open_photos(str(store.folder), store.count)
    for one, two in pairs:
        # As they were compared: the other order may give a few inliers more or less.
        found = compare(min(one, two), max(one, two))
        if one > two:
            found = replace(found, query_points=found.points, points=found.query_points)
        yield found
