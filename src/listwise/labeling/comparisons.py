"""Compare pairs of photos by their local features on all cores, and record the results.

The record is kept on disk: a run that was interrupted, or a later run with other thresholds, does
not compare a pair again.
"""

import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from listwise.labeling.result import Progress
from listwise.labeling.store import PhotoStore
from listwise.local.compact import nearest_decoded
from listwise.local.features import Features
from listwise.local.storage import writing
from listwise.local.verification import Verification, verify
from listwise.local.workers import Workers
from listwise.progress import counted

Pairs = NDArray[np.int64]
"""Numbers of two photos, the smaller first: [m, 2]."""

TASK = 128  # maximum number of pairs per task of a worker
_DECODED = 256  # photos whose features a worker keeps in memory: about 100 MB
_CREATE = """
CREATE TABLE IF NOT EXISTS pairs (
    one INTEGER, two INTEGER, inliers INTEGER, crc INTEGER, used INTEGER, PRIMARY KEY (one, two)
) WITHOUT ROWID
"""

_TOLERANCE = 0.01  # of the diagonal, for points at the same place of the frame
_PHOTO_SHARE = 0.2  # share of the features that are at the same place in two versions of one photo
_PLACES = np.array(list(product((0.0, 0.5, 1.0), repeat=2)))  # [9, 2]


def unique_pairs(pairs: Pairs) -> Pairs:
    """Return pairs sorted and without duplicates, the smaller number first."""
    if not len(pairs):
        return np.zeros((0, 2), np.int64)
    return np.unique(np.sort(pairs, axis=1), axis=0)


class MatchRecord:
    """The number of inliers of all pairs compared so far, in a file.

    The file may contain pairs of an earlier run with other thresholds. Only those that this run
    asked for count, so its result does not depend on earlier runs.
    """

    def __init__(
        self, path: Path, store: PhotoStore, workers: Workers, on_progress: Progress
    ) -> None:
        self._store, self._workers, self._on_progress = store, workers, on_progress
        self._path = path
        with writing(path):
            self._database = _open_record(path)

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM pairs WHERE used").fetchone()[0])

    def inliers(self, pairs: Pairs) -> NDArray[np.int64]:
        """Return the number of inliers of each pair, -1 for pairs that were not compared: [m]."""
        find = "SELECT inliers FROM pairs WHERE one = ? AND two = ?"
        found = (self._database.execute(find, pair).fetchone() for pair in pairs.tolist())
        return np.array([-1 if row is None else row[0] for row in found], np.int64)

    def links(self, least: int) -> tuple[Pairs, NDArray[np.int64]]:
        """Return the pairs with at least this number of inliers [m, 2], and the numbers [m]."""
        wanted = "SELECT one, two, inliers FROM pairs WHERE used AND inliers >= ? ORDER BY one, two"
        found = self._database.execute(wanted, [least]).fetchall()
        rows = np.array(found, np.int64).reshape(-1, 3)
        return rows[:, :2], rows[:, 2]

    def compare(self, stage: str, pairs: Pairs) -> None:
        """Compare the pairs that are not in the record, and add them to it."""
        pairs = unique_pairs(pairs)
        advance = counted(stage, len(pairs), self._on_progress)
        missing = pairs[self.inliers(pairs) < 0]
        advance(len(pairs) - len(missing))
        # Every worker gets something to do, even in a small round.
        size = min(TASK, max(8, len(missing) // (4 * max(1, self._workers.count))))
        parts = [missing[start : start + size] for start in range(0, len(missing), size)]
        tasks = ((str(self._store.path), self._store.count, part) for part in parts)
        with closing(self._workers.results(_count_inliers, tasks)) as results:
            for part, inliers in zip(parts, results, strict=True):
                rows = np.column_stack([part, inliers]).tolist()
                values = [(*row, _checksum(row)) for row in rows]
                with writing(self._path), self._database:
                    self._database.executemany("INSERT INTO pairs VALUES (?, ?, ?, ?, 0)", values)
                advance(len(part))
        use = "UPDATE pairs SET used = 1 WHERE one = ? AND two = ?"
        with writing(self._path), self._database:
            self._database.executemany(use, pairs.tolist())


def _open_record(path: Path) -> sqlite3.Connection:
    """Open the file of a record; a damaged one is replaced."""
    database = sqlite3.connect(path)
    try:
        database.execute(_CREATE)
        for *row, crc in database.execute("SELECT one, two, inliers, crc FROM pairs"):
            if _checksum(row) != crc:
                raise sqlite3.DatabaseError(f"{path} is damaged")
        with database:
            database.execute("UPDATE pairs SET used = 0")
    except sqlite3.OperationalError:  # it cannot be written
        raise
    except sqlite3.DatabaseError:
        database.close()
        path.unlink()
        return _open_record(path)
    return database


def _checksum(row: Sequence[int]) -> int:
    return zlib.crc32(repr(row).encode())


@lru_cache(maxsize=1)
def _open_photos(path: str, count: int) -> Callable[[int, int], Verification]:
    """Return a function that compares two photos, and keeps the features of the latest ones."""
    store = PhotoStore(Path(path), count)
    read = lru_cache(maxsize=_DECODED)(store.read)

    def compare(one: int, two: int) -> Verification:
        features = read(one), read(two)
        pairs = nearest_decoded(*features)
        return verify(*features, pairs[~overlaid(*features, pairs, store.sizes[[one, two]])])

    return compare


def forget_photos() -> None:
    """Forget the features in memory: another run may write other ones to the same folder."""
    _open_photos.cache_clear()


def _count_inliers(task: tuple[str, int, Pairs]) -> list[int]:
    """Compare the pairs of a task; runs in a worker process."""
    path, count, pairs = task
    compare = _open_photos(path, count)
    return [compare(one, two).inliers for one, two in pairs.tolist()]


def matching_points(store: PhotoStore, pairs: Sequence[tuple[int, int]]) -> Iterator[Verification]:
    """Yield the matching points of each pair of photos."""
    compare = _open_photos(str(store.path), store.count)
    for one, two in pairs:
        # As they were compared: what is `overlaid` depends on the order of the photos.
        yield compare(one, two) if one < two else compare(two, one).inverse()


def overlaid(
    one: Features, two: Features, pairs: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which pairs of features [m, 2] are at the same place of the frame in both photos: [m].

    Watermarks and banners are at the same place in photos of different things. The place may be
    relative to the left, the middle or the right, and to the top, the middle or the bottom, of
    photos of different sizes. Two versions of one photo have many such pairs, which count.

    `sizes` [2, 2] are the widths and heights of the photos.
    """
    if not len(pairs):
        return np.zeros(0, bool)
    start = one.points[pairs[:, 0]].astype(np.float64)
    end = two.points[pairs[:, 1]].astype(np.float64)
    first, second = sizes.astype(np.float64)
    scales = np.array([1.0, *(second / first)])[:, None]
    moved = end - scales[..., None] * start  # [3, m, 2]
    shifts = (second - scales * first)[:, None] * _PLACES  # [3, 9, 2]
    distances = np.linalg.norm(moved[:, None] - shifts[:, :, None], axis=3)
    same = (distances <= _TOLERANCE * np.hypot(*second)).reshape(-1, len(pairs))
    if same.sum(axis=1).max(initial=0) >= _PHOTO_SHARE * min(len(one), len(two)):
        return np.zeros(len(pairs), bool)
    anywhere: NDArray[np.bool_] = same.any(axis=0)
    return anywhere
