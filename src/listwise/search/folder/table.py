"""The entries of a generation in its database, with the positions of their descriptors.

A change appends descriptors to their file, waits until they are on the disk, and commits their
positions in one transaction.
"""

import json
import sqlite3
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from listwise.errors import InputError
from listwise.files import sync_folder
from listwise.search.entries import (
    ENTRY,
    DamagedIndexError,
    Keys,
    NewEntries,
    damage,
    damaged_entries,
    in_parts,
    new_rows,
)
from listwise.search.folder import filtering
from listwise.search.folder.database import Database, read_settings, write_settings
from listwise.search.folder.descriptors import Descriptors, append_rows
from listwise.search.store import Generations, IndexHeader

SUMS = ("thumbnail_sum", "local_sum")
CONTENTS = {  # columns that have a table of their own
    name: f"(SELECT CAST(content AS BLOB) FROM {name} WHERE position = entries.position)"
    for name in ("thumbnail", "local")
}
TABLES = f"""CREATE TABLE entries (
    position INTEGER PRIMARY KEY, key INTEGER UNIQUE, id TEXT, path TEXT, width INTEGER,
    height INTEGER, box TEXT, digest TEXT, attributes TEXT, copies TEXT, entry_sum INTEGER,
    thumbnail_sum INTEGER, local_sum INTEGER);
CREATE INDEX digests ON entries (digest);
CREATE TABLE thumbnail (position INTEGER PRIMARY KEY, content BLOB);
CREATE TABLE local (position INTEGER PRIMARY KEY, content BLOB);
CREATE TABLE batches (start INTEGER PRIMARY KEY, keys BLOB, sums BLOB);
CREATE TABLE removed (number INTEGER PRIMARY KEY, position INTEGER);
{filtering.TABLE}"""
AMONG = "IN (SELECT value FROM json_each(?))"
_OF_POSITIONS = ("entries", *CONTENTS)
_SLACK = 64 << 20  # bytes of removed entries that are always allowed
_PAGE = 4096  # bytes of a page of SQLite
_BATCH = 65536  # descriptors that are copied together


class Table:
    """The database of a generation and its file of descriptors. Several threads may use it.

    Attributes:
        root: the folder.
        number: the generation.
        database: the database of the entries.
        dim: the dimensions C of a descriptor.
        version: the commit that the descriptors are of.
    """

    def __init__(self, root: Path, generations: Generations) -> None:
        self.uri, self.root, self.number = generations.uri, root, generations.number
        self.database = Database(database_path(self.root, self.number), self.uri)
        self.dim = self.header().dim
        self.version = 0
        self._generations = generations
        self._following = threading.Lock()  # guards the descriptors
        self._descriptors: Descriptors | None = None  # read when they are first needed

    def settings(self) -> dict[str, str]:
        """The settings at the last commit."""
        with self.database.reading() as connection:
            return read_settings(connection, self.uri)

    def header(self) -> IndexHeader:
        """The header at the last commit."""
        return IndexHeader.parse(self.settings()["header"], self.uri, "build the index again")

    @contextmanager
    def commit(self) -> Iterator[tuple[sqlite3.Connection, dict[str, str]]]:
        """A transaction of a change, and the settings, which it may change."""
        with self.database.writing() as connection:
            # A switch holds back changes, so the generation stays the current one meanwhile.
            self._generations.check_current()
            settings = read_settings(connection, self.uri)
            try:
                yield connection, settings
            except OSError as error:
                raise InputError(f"cannot write to {self.root}: {error.strerror}") from error
            settings["version"] = str(int(settings["version"]) + 1)
            write_settings(connection, settings)

    @contextmanager
    def snapshot(self) -> Iterator[tuple[sqlite3.Connection, Descriptors]]:
        """A connection that sees one commit, and the descriptors at this commit or a later one."""
        with ExitStack() as stack:
            with self._following:
                connection = stack.enter_context(self.database.reading())
                rows = self._follow(connection)
            yield connection, rows

    def close(self) -> None:
        """Close the database and release memory; the next use opens it again."""
        with self._following:
            self._descriptors = None
        self.database.close()

    def _follow(self, connection: sqlite3.Connection) -> Descriptors:
        """The descriptors, after the changes since the last call."""
        settings = read_settings(connection, self.uri)
        version, rows = int(settings["version"]), self._descriptors
        if rows is not None and rows.path.name == settings["descriptors"]:
            if version != self.version:
                _update(rows, connection)
        else:
            rows = self._read_all(connection, settings)
            (entries,) = connection.execute("SELECT count(*) FROM entries").fetchone()
            if (len(rows.keys), len(rows)) != (int(settings["rows"]), entries):
                raise damage(self.uri, f"{self.database.path.name} lacks rows")
        self._descriptors, self.version = rows, version
        return rows

    def _read_all(self, connection: sqlite3.Connection, settings: dict[str, str]) -> Descriptors:
        rows = Descriptors(self.root / settings["descriptors"], self.dim, self._damaged)
        _update(rows, connection)
        return rows

    def _damaged(self, keys: Keys) -> DamagedIndexError:
        """The error for damaged descriptors."""
        with self.database.reading() as connection:
            rows = select(connection, ["id"], f"key {AMONG}", json.dumps(keys.tolist()))
            return damaged_entries(self.uri, sorted(row["id"] for row in rows))

    def compact(self, connection: sqlite3.Connection, settings: dict[str, str]) -> None:
        """Give back space: copy the descriptors in use if most were removed, and free pages."""
        (last,) = connection.execute("SELECT max(number) FROM removed").fetchone()
        gone, size = last or 0, 4 * self.dim
        if gone * size > max(_SLACK, (int(settings["rows"]) - gone) * size):
            self._copy_used(connection, settings)
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        for _ in range(free if free * _PAGE > _SLACK else 0):
            connection.execute("PRAGMA incremental_vacuum(1)")  # Python ends it after one page

    def _copy_used(self, connection: sqlite3.Connection, settings: dict[str, str]) -> None:
        """Copy the descriptors in use to another file, and change their positions."""
        rows = self._read_all(connection, settings)
        for path in self.root.glob(f"descriptors-{self.number}-*"):
            if path != rows.path:  # left from a process that was killed here
                path.unlink(missing_ok=True)
        name = create_descriptors(self.root, self.number, int(settings["version"]))
        settings |= {"descriptors": name, "rows": str(len(rows))}
        connection.execute("DELETE FROM removed")
        connection.execute("DELETE FROM batches")
        start = 0
        for part in in_parts(np.flatnonzero(rows.alive), _BATCH):
            append_rows(self.root / name, rows.read_all(part)[0], start)
            _add_batch(connection, start, rows.keys[part], rows.sums[part])
            moves = [pair for pair in enumerate(part.tolist(), start) if pair[0] != pair[1]]
            for table in _OF_POSITIONS:
                query = f"UPDATE {table} SET position = ? WHERE position = ?"
                connection.executemany(query, moves)
            start += len(part)
        filtering.rebuild_attributes(connection)


def database_path(root: Path, generation: int) -> Path:
    """The path of the database of a generation."""
    return root / f"entries-{generation}.sqlite"


def create_descriptors(root: Path, generation: int, version: int) -> str:
    """Create an empty file of descriptors and return its name."""
    path = root / f"descriptors-{generation}-{version}.f32"
    path.write_bytes(b"")
    sync_folder(root)
    return path.name


def select(
    connection: sqlite3.Connection, columns: Sequence[str], where: str = "TRUE", *values: object
) -> Iterator[dict[str, Any]]:
    """The key and other columns of the entries for which a condition holds."""
    wanted = ", ".join(CONTENTS.get(column, column) for column in ("key", *columns))
    rows = connection.execute(f"SELECT {wanted} FROM entries WHERE {where}", values)
    return (dict(zip(("key", *columns), row, strict=True)) for row in rows)


def positions_of(connection: sqlite3.Connection, keys: Sequence[int]) -> dict[int, int]:
    """The positions of entries by key; unknown keys are left out."""
    query = f"SELECT key, position FROM entries WHERE key {AMONG}"
    return dict(connection.execute(query, (json.dumps(keys),)).fetchall())


def drop(connection: sqlite3.Connection, positions: Collection[int]) -> None:
    """Remove entries by position."""
    if positions:
        wanted = (json.dumps([*positions]),)
        filtering.drop_attributes(connection, *wanted)
        for table in _OF_POSITIONS:
            connection.execute(f"DELETE FROM {table} WHERE position {AMONG}", wanted)
        query = "INSERT INTO removed (position) SELECT value FROM json_each(?)"
        connection.execute(query, wanted)


def insert(connection: sqlite3.Connection, new: NewEntries, start: int) -> None:
    """Add entries from a position on."""
    rows = list(new_rows(new))
    for position, row in enumerate(rows, start):
        row["position"] = position
    columns = ("position", "key", *ENTRY, *SUMS)
    query = f"INSERT INTO entries ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    connection.executemany(query, map(itemgetter(*columns), rows))
    for table in CONTENTS:
        filled = [row for row in rows if row[table]]
        connection.executemany(f"INSERT INTO {table} VALUES (:position, :{table})", filled)
    names = ("key", "descriptor_sum")
    keys, sums = (np.array([row[name] for row in rows], np.int64) for name in names)
    _add_batch(connection, start, keys, sums)
    filtering.add_attributes(connection, json.dumps([row["position"] for row in rows]))


def _add_batch(connection: sqlite3.Connection, start: int, keys: Keys, sums: Keys) -> None:
    """Store the keys and the checksums of descriptors from a position on."""
    values = start, keys.astype("<i8").tobytes(), sums.astype("<i8").tobytes()
    connection.execute("INSERT INTO batches VALUES (?, ?, ?)", values)


def _update(rows: Descriptors, connection: sqlite3.Connection) -> None:
    """Read the keys and checksums of new descriptors, and which were removed."""
    batches = connection.execute(
        "SELECT keys, sums FROM batches WHERE start >= ? ORDER BY start", (len(rows.keys),)
    ).fetchall()
    removed = connection.execute(
        "SELECT position FROM removed WHERE number > ? ORDER BY number", (len(rows.removed),)
    ).fetchall()
    keys, sums = (b"".join(batch[part] for batch in batches) for part in (0, 1))
    rows.update(
        np.frombuffer(keys, "<i8"),
        np.frombuffer(sums, "<i8"),
        np.array(removed, np.int64).reshape(-1),
    )
