"""Local features on disk: an SQLite file with a row for each photo, which is read row by row."""

import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError
from listwise.files import FileHeader, publish
from listwise.local.features import Features

NAME: Final = "file of local features"
# The features come last: SQLite then reads the other columns without them.
_COLUMNS: Final = "row, id, width, height, count, look, digest, error"
_CREATE: Final = (
    f"CREATE TABLE IF NOT EXISTS photos ({_COLUMNS}, crc, code, PRIMARY KEY (row)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS about (name PRIMARY KEY, value)",
)
_COMMIT_EVERY: Final = 64  # photos: what is lost if the process is killed, a few seconds of work


class FeatureHeader(FileHeader):
    """Header of a file of local features.

    `extractor` is the name of the extractor with its settings, `dim` the dimensions of a
    descriptor, and `unreadable` has a message for each photo that could not be read.
    """

    extractor: str
    dim: int
    unreadable: tuple[str, ...] = ()


class StoredPhoto(NamedTuple):
    """What is stored of a photo: its id, the size of the upright whole photo, and its features.

    `features` is their number, and `code` holds them. `look` and `digest` describe the appearance
    and the content of the photo; they are empty where they are not needed.
    """

    id: str
    width: int
    height: int
    features: int
    look: str
    digest: str
    code: bytes


class FeatureWriter:
    """Writes a file of local features; the file appears when the `with` block ends.

    If the block ends early, the photos written so far stay in `PATH.partial`. A writer with the
    same header and key continues there, another one discards them.

    Args:
        path: the file to write.
        header: its header; messages for unreadable photos are added.
        key: identifies the photos.
        on_note: called with a sentence if earlier work is used or discarded.
    """

    def __init__(
        self,
        path: str | Path,
        header: FeatureHeader,
        key: str = "",
        on_note: Callable[[str], object] = lambda note: None,
    ) -> None:
        self.path = Path(path)
        self.header = header
        self._partial = self.path.with_name(f"{self.path.name}.partial")
        self._key = f"{header.model_dump_json()} {key}"
        self._on_note = on_note

    def __enter__(self) -> Self:
        with writing(self._partial):
            self._database = sqlite3.connect(self._partial, timeout=0, isolation_level="EXCLUSIVE")
            try:
                self._database.execute("PRAGMA locking_mode = EXCLUSIVE")  # until it is closed
                self._database.execute("BEGIN EXCLUSIVE")
                self._start(self._database)
            except sqlite3.Error as error:
                self._database.close()
                if "locked" not in str(error):
                    raise
                reason = "another process is writing it: wait until it ends, or give another name"
                raise InputError(f"cannot write {self.path}: {reason}") from error
        return self

    def _start(self, database: sqlite3.Connection) -> None:
        """Create the tables; they are emptied unless they are those of an unfinished run."""
        for statement in _CREATE:
            database.execute(statement)
        known = dict(database.execute("SELECT * FROM about")).get("key")
        if known != self._key:
            if known:
                reason = "is from other settings or other photos: discarding it"
                self._on_note(f"{self._partial} {reason}")
            database.execute("DELETE FROM photos")
            database.execute("INSERT OR REPLACE INTO about VALUES ('key', ?)", [self._key])
        database.commit()

    def missing(self, count: int, strict: bool = False) -> list[int]:
        """Return the rows below `count` to write; with `strict` also those of unreadable photos."""
        wanted = "WHERE error = ''" if strict else ""
        done = {row for (row,) in self._database.execute(f"SELECT row FROM photos {wanted}")}
        if done:
            self._on_note(f"resuming: {len(done)} of {count} photos are already done")
        return [row for row in range(count) if row not in done]

    def write(self, row: int, photo: StoredPhoto | str) -> None:
        """Store a photo, or the reason why it cannot be read."""
        error = photo if isinstance(photo, str) else ""
        *about, code = StoredPhoto("", 0, 0, 0, "", "", b"") if isinstance(photo, str) else photo
        values = (row, *about, error, zlib.crc32(code), code)
        marks = ", ".join("?" * len(values))
        with writing(self.path):
            self._database.execute(f"INSERT OR REPLACE INTO photos VALUES ({marks})", values)
            if row % _COMMIT_EVERY == _COMMIT_EVERY - 1:
                self._database.commit()

    def errors(self) -> tuple[str, ...]:
        """Return a message for each photo that cannot be read."""
        found = self._database.execute("SELECT error FROM photos WHERE error != '' ORDER BY row")
        return tuple(message for (message,) in found)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with closing(self._database) as database, writing(self.path):
            if kind is None:
                header = self.header.model_copy(update={"unreadable": self.errors()})
                text = header.model_dump_json()
                about = {"header": text, "crc": _summed(text, database)}
                database.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", about.items())
            database.commit()
        if kind is None:
            publish(self._partial, self.path)


@dataclass(frozen=True, eq=False)
class FeatureFile:
    """The local features of N photos on disk; create it with `FeatureFile.open`.

    Several threads may read it. The features of a photo are read when they are used. A process that
    gets a file opens it once.
    """

    path: Path
    header: FeatureHeader
    table: tuple[tuple[Any, ...], ...]  # a row for each photo that can be read, with its place
    database: sqlite3.Connection
    lock: Lock

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a file, and check everything in it but the features."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no {NAME} at {path}: create one with listwise local extract")
        with _reading(path):
            address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            database = sqlite3.connect(address, uri=True, check_same_thread=False)
            about = dict(database.execute("SELECT * FROM about"))
            header = FeatureHeader.parse(str(about.get("header")), path, "extract again")
            ((pages, size),) = database.execute("SELECT * FROM pragma_page_count, pragma_page_size")
            whole = pages * size == path.stat().st_size
            if not whole or about.get("crc") != _summed(about["header"], database):
                raise sqlite3.DatabaseError("its checksum does not match")
            table = database.execute(f"SELECT {_COLUMNS} FROM photos ORDER BY row").fetchall()
        readable = tuple(row for row in table if not row[-1])
        return cls(path, header, readable, database, Lock())

    def __reduce__(self) -> tuple[Callable[[Path], "FeatureFile"], tuple[Path]]:
        return _opened, (self.path,)

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The N ids, in the order of the rows."""
        return tuple(row[1] for row in self.table)

    @cached_property
    def sizes(self) -> NDArray[np.int32]:
        """Width and height of each photo: int32 [N, 2]."""
        return np.array([row[2:4] for row in self.table], np.int32).reshape(-1, 2)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The number of features of each photo: [N]."""
        return np.array([row[4] for row in self.table], np.int64)

    @cached_property
    def positions(self) -> dict[str, int]:
        """The row number of each id."""
        return {name: row for row, name in enumerate(self.ids)}

    def code(self, row: int) -> bytes:
        """Return the encoded features of the photo in a row."""
        place = self.table[row][0]
        with _reading(self.path), self.lock:
            found = self.database.execute("SELECT code, crc FROM photos WHERE row = ?", [place])
            code, crc = found.fetchone()
            if zlib.crc32(code) != crc:
                raise sqlite3.DatabaseError("its checksum does not match")
        return bytes(code)

    def read(self, row: int) -> Features:
        """Return the features of the photo in a row."""
        return _decode(self.code(row), int(self.counts[row]), self.header.dim)

    def get(self, name: str) -> Features:
        """Return the features of the photo with an id."""
        if name not in self.positions:
            raise InputError(f"{self.path} has no features of {name}: extract them first")
        return self.read(self.positions[name])

    def __iter__(self) -> Iterator[Features]:
        return (self.read(row) for row in range(len(self)))

    def require(self, extractor: str) -> None:
        """Raise an error unless this extractor made the file, with the same settings."""
        if self.header.extractor != extractor:
            raise InputError(
                f"{self.path} holds features of {self.header.extractor}, not of {extractor}: "
                "extract them again"
            )


@lru_cache(maxsize=2)
def _opened(path: Path) -> FeatureFile:
    """Open the files of queries and database in a worker process."""
    return FeatureFile.open(path)


def is_feature_file(path: Path) -> bool:
    """Return whether a file is a file of local features."""
    try:
        FeatureFile.open(path)
    except InputError:
        return False
    return True


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn every failure to read a file into an `InputError` of one line."""
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is damaged or not a {NAME} ({error}): copy it again, or extract again"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure of SQLite to write, such as that of a full disk, into an `InputError`."""
    try:
        yield
    except sqlite3.Error as error:
        raise InputError(f"cannot write {path}: {error}") from error


def _summed(header: str, database: sqlite3.Connection) -> int:
    """Compute the checksum of the header and of all columns but the features."""
    crc = zlib.crc32(header.encode())
    for row in database.execute(f"SELECT {_COLUMNS}, crc FROM photos ORDER BY row"):
        crc = zlib.crc32(repr(row).encode(), crc)
    return crc


def store_exactly(name: str, width: int, height: int, features: Features) -> StoredPhoto:
    """Encode the features of a photo: 8 bits per value of a descriptor, the rest without loss."""
    descriptors = features.descriptors
    low = float(descriptors.min(initial=0.0))
    step = max((float(descriptors.max(initial=0.0)) - low) / 255, 1e-9)
    codes = np.rint((descriptors - low) / step).astype(np.uint8)
    frames = (np.array([low, step]), features.points, features.scales, features.shapes)
    code = b"".join(np.asarray(part, "<f4").tobytes() for part in frames) + codes.tobytes()
    return StoredPhoto(name, width, height, len(features), "", "", code)


def _decode(code: bytes, count: int, dim: int) -> Features:
    """Decode `count` features that `store_exactly` encoded; rows of descriptors have norm 1."""
    low, step, *_ = values = np.frombuffer(code, "<f4", 2 + 7 * count).astype(np.float32)
    points, scales, shapes = np.split(values[2:], [2 * count, 3 * count])
    decoded = np.frombuffer(code, np.uint8, offset=4 * len(values)).reshape(count, dim) * step + low
    norms = np.linalg.norm(decoded, axis=1, keepdims=True)
    unit = decoded / np.maximum(norms, np.float32(1e-12))
    return Features(points.reshape(-1, 2), scales, shapes.reshape(-1, 2, 2), unit)
