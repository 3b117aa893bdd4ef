"""A copy of the descriptors of an index in one file, which is mapped into memory.

LanceDB takes more than a minute to read a million descriptors of 2048 dimensions, and milliseconds
to find a few of them by key. From this file they are searched as soon as it is opened. It can be
written again from the table at any time.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from listwise.files import publish
from listwise.machine import core_count
from listwise.search.checksums import descriptor_sums
from listwise.search.entries import Float32, Keys
from listwise.search.folder.keymap import KeyMap
from listwise.search.folder.table import Rows

_ROWS = "descriptors.f32"
_KEYS = "descriptors.npy"
_PART = 16 << 20  # bytes that are checked by a thread at one time


class SavedDescriptors(BaseModel):
    """The files of a copy: the prefix of their names, the number of rows and dimensions."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    count: int
    dim: int
    keys: str  # checksum of the file of keys, stamps and checksums of the rows


class DescriptorFile:
    """Descriptors in a file, by position; changes of the arrays do not reach the file.

    Attributes:
        saved: the names of its files.
        rows: descriptors, float32 [N, C].
        keys: their keys, int64 [N].
        stamps: their stamps in the table, int64 [N].
    """

    def __init__(self, saved: SavedDescriptors, rows: Float32, columns: Keys) -> None:
        self.saved = saved
        self.rows = rows
        self.keys, self.stamps, self._sums = columns
        self._places = KeyMap()

    @classmethod
    def open(cls, folder: Path, saved: SavedDescriptors) -> "DescriptorFile | None":
        """Map the file; None if it is missing, or not as large as it was written."""
        rows, keys = _paths(folder, saved.name)
        try:
            size = rows.stat().st_size
            if size != 4 * saved.dim * saved.count or file_digest(keys) != saved.keys:
                return None
            columns = np.load(keys, allow_pickle=False)
            # Pages that are changed are copied into memory: the file stays as it is.
            mapped = np.memmap(rows, np.float32, "c", shape=(saved.count, saved.dim))
        except (OSError, ValueError):
            return None
        return cls(saved, np.asarray(mapped), columns)

    def sound(self) -> bool:
        """Read all descriptors and compare them with their checksums."""
        count = max(1, _PART // self.rows[0].nbytes)

        def check(start: int) -> bool:
            part = slice(start, start + count)
            found = descriptor_sums(self.keys[part], self.rows[part])
            return bool(np.array_equal(found, self._sums[part]))

        with ThreadPoolExecutor(core_count()) as pool:
            return all(pool.map(check, range(0, len(self.rows), count)))

    def use(self, stamps: KeyMap) -> None:
        """Let `find` return the rows that are still those of the table, which has these stamps."""
        order = np.argsort(self.keys)  # sorted keys are found faster
        known, now = stamps.find(self.keys[order])
        order = order[known]
        order = order[self.stamps[order] == now]
        self._places = KeyMap()
        self._places.put(self.keys[order], order)

    def __len__(self) -> int:
        """The number of rows that `find` returns."""
        return len(self._places)

    def forget(self, keys: Keys) -> None:
        """Never return the rows of these keys again: they were changed or removed."""
        if self._places.find(keys)[0].any():
            self._places.remove(keys)

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], Keys]:
        """Which keys are in the file, and their positions: [n] -> bool [n], [found]."""
        return self._places.find(keys)

    def read(self, positions: Keys) -> tuple[NDArray[np.bool_], Rows]:
        """Which rows match their checksums, and those rows: [n] -> bool [n], rows."""
        keys, rows = self.keys[positions], self.rows[positions]
        sound = descriptor_sums(keys, rows) == self._sums[positions]
        return sound, Rows(keys[sound], self.stamps[positions][sound], rows[sound])


class DescriptorWriter:
    """Writes a copy of descriptors; `save` completes it.

    If the disk is full, the rest is not written, and `save` raises the error.
    """

    def __init__(self, folder: Path, dim: int) -> None:
        self._folder = folder
        self._dim = dim
        self._name = f"search-{token_hex(8)}"
        self._partial = folder / f"{self._name}.{_ROWS}.tmp"
        self._columns: list[Keys] = []
        self._failure: OSError | None = None
        try:
            self._file = self._partial.open("wb")
        except OSError as error:
            self._failure = error

    def add(self, rows: Rows) -> None:
        """Add rows; of rows with the same key, one has the stamp of the table."""
        if self._failure is not None:
            return
        descriptors = np.ascontiguousarray(rows.descriptors, np.float32)
        sums = descriptor_sums(rows.keys, descriptors)
        self._columns.append(np.stack([rows.keys, rows.stamps, sums]))
        try:
            self._file.write(descriptors.data)
        except OSError as error:
            self._fail(error)

    def save(self) -> SavedDescriptors:
        """Wait until the files are on the disk, and return their names."""
        if self._failure is not None:
            raise self._failure
        columns = np.concatenate([np.zeros((3, 0), np.int64), *self._columns], axis=1)
        rows, keys = _paths(self._folder, self._name)
        try:
            self._file.close()
            publish(self._partial, rows)
            with self._partial.open("wb") as file:
                np.save(file, columns, allow_pickle=False)
            digest = file_digest(self._partial)
            publish(self._partial, keys)
        except OSError as error:
            self._fail(error)
            raise
        count = columns.shape[1]
        return SavedDescriptors(name=self._name, count=count, dim=self._dim, keys=digest)

    def _fail(self, error: OSError) -> None:
        """Delete what was written."""
        self._failure = error
        with suppress(OSError):  # closing writes what is buffered
            self._file.close()
        for path in (self._partial, *_paths(self._folder, self._name)):
            path.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.{_ROWS}", folder / f"{name}.{_KEYS}"
