"""The store in a folder: SQLite holds the entries, one file their descriptors, FAISS searches them.

FAISS is imported when something is searched.
"""

import json
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from listwise.errors import InputError
from listwise.search.entries import (
    ENTRY,
    Entry,
    EntryCheck,
    Float32,
    Keys,
    NewEntries,
    as_row,
    content_sum,
    entry_sum,
    examine_row,
    in_parts,
    possible_keys,
    read_entry,
    with_attribute,
)
from listwise.search.exact import best_of
from listwise.search.filters import Filter
from listwise.search.folder import filtering
from listwise.search.folder.database import read_settings
from listwise.search.folder.descriptors import Descriptors, append_rows
from listwise.search.folder.marks import MarkTable
from listwise.search.folder.table import (
    AMONG,
    CONTENTS,
    SUMS,
    Table,
    drop,
    insert,
    positions_of,
    select,
)
from listwise.search.folder.tuning import FolderMethod
from listwise.search.store import Rows, Store, Values, check_new, check_queries

if TYPE_CHECKING:
    from listwise.search.folder.generations import FolderGenerations

if find_spec("faiss") is None:
    raise ModuleNotFoundError("No module named 'faiss'", name="faiss")

_FILTERS = 8  # filters whose results are kept in memory
_TOGETHER = 1000  # entries that are read together


class FolderStore(Store):
    """A store of entries in a folder. Several threads and processes may use it."""

    engine = "embedded"
    generations: "FolderGenerations"
    method: FolderMethod

    def __init__(self, generations: "FolderGenerations") -> None:
        self.uri, self.generations = generations.uri, generations
        self.mark_log = MarkTable(generations.root, generations.database)
        self._table = Table(generations)
        self.method = FolderMethod(self._table)
        self._matching: dict[tuple[str, Filter], Keys] = {}  # of recent filters, by version
        self._examined = ""  # the file of descriptors when the entries were examined
        self.refresh()

    def __len__(self) -> int:
        with self._table.snapshot() as (_, rows):
            return len(rows)

    def put(self, new: NewEntries) -> None:
        """Write entries in one commit; they replace entries with the same keys."""
        if not len(new.entries):
            return
        with self._table.commit() as (connection, settings):
            new = check_new(self, new)
            start = int(settings["rows"])
            keys = [entry.key for entry in new.entries]
            drop(connection, positions_of(connection, keys).values())
            path = self.generations.root / settings["descriptors"]
            append_rows(path, np.asarray(new.descriptors), start)
            insert(connection, new, start)
            settings["rows"] = str(start + len(keys))

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries in one commit and return their number."""
        keys = possible_keys(keys)
        if not keys:
            return 0
        generations = self.generations
        with self._table.commit() as (connection, settings):
            previous = None if generations.aside else generations.record().previous
            if previous is not None:
                # First from the generation that a rollback would return to: after a kill in
                # between, the entries are still there to be removed again.
                with generations.open(previous, aside=True) as earlier:
                    earlier.remove(keys)
            positions = positions_of(connection, keys).values()
            drop(connection, positions)
            used = settings["descriptors"]
            self._table.compact(connection, settings)
        if settings["descriptors"] != used:
            with suppress(OSError):  # Windows keeps a file that is in use
                (generations.root / used).unlink()
        return len(positions)

    def set_attribute(self, keys: Sequence[int], name: str, value: str) -> int:
        """Set an attribute of entries in one commit, or remove it if the value is empty."""
        with self._table.commit() as (connection, _):
            positions = positions_of(connection, possible_keys(keys))
            where = json.dumps([*positions.values()])
            rows = list(select(connection, ENTRY, f"position {AMONG}", where))
            filtering.drop_attributes(connection, where)
            for row in rows:
                changed = as_row(with_attribute(read_entry(self.uri, row), name, value))
                connection.execute(
                    "UPDATE entries SET attributes = ?, entry_sum = ? WHERE key = ?",
                    (changed["attributes"], entry_sum(changed), row["key"]),
                )
            filtering.add_attributes(connection, where)
        return len(positions)

    def keys(self, where: Filter | None = None, most: int | None = None) -> Keys:
        """Return the keys of the entries that match a filter, or of all, in the order written."""
        with self._table.snapshot() as (connection, rows):
            found = rows.alive if where is None else self._matches(connection, rows, where)
            return rows.keys[found][:most]

    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""
        if not self.header.local:
            with self._table.commit() as (_, settings):
                header = self.header.model_copy(update={"local": True})
                settings["header"] = header.model_dump_json()
            self.header = header

    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries in one commit."""
        with self._table.commit() as (connection, _):
            for entry, content in zip(entries, local, strict=True):
                query = "SELECT position FROM entries WHERE key = ? AND digest = ?"
                found = connection.execute(query, (entry.key, entry.digest)).fetchone()
                if found is not None:
                    connection.execute("REPLACE INTO local VALUES (?, ?)", (*found, content))
                    connection.execute(
                        "UPDATE entries SET local_sum = ? WHERE position = ?",
                        (content_sum(entry.key, content), *found),
                    )

    def search(
        self, queries: ArrayLike, k: int, /, where: Filter | None = None
    ) -> tuple[Float32, Keys]:
        """Find the k nearest entries, best first: [Q, C] -> scores and keys, both [Q, k']."""
        vectors = check_queries(self, queries, k)
        with self._table.snapshot() as (connection, rows):
            among = None if where is None else self._matches(connection, rows, where)
        scores, positions = self.method.of(rows).search(vectors, k, among)
        # Equal scores by key: positions depend on the order in which entries were written.
        return best_of(scores, np.append(rows.keys, -1)[positions], k)

    def descriptors(self, keys: Keys) -> Iterator[tuple[Keys, Float32]]:
        """Read descriptors by key, part by part: keys [n], rows [n, C]."""
        for part in in_parts(keys, _TOGETHER):
            with self._table.snapshot() as (connection, rows):
                positions = [*positions_of(connection, part.tolist()).values()]
                found = rows.read(np.array(positions, np.int64))
            yield rows.keys[positions], found

    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""
        columns = ("position", *ENTRY, *SUMS, *CONTENTS)
        where = "position > ? ORDER BY position LIMIT ?"
        last = -1
        while True:
            with self._table.snapshot() as (connection, rows):
                self._examined = rows.path.name
                found = list(select(connection, columns, where, last, _TOGETHER))
                if not found:
                    return
                checks = _examine(rows, found)
            yield checks
            last = found[-1]["position"]

    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""
        with self._table.commit() as (connection, settings):
            if settings["descriptors"] != self._examined:  # entries may have other positions now
                raise InputError(f"{self.uri} was changed during the check: check it again")
            drop(connection, places)
            filtering.rebuild_attributes(connection)

    def refresh(self) -> None:
        """Read the changes of other processes."""
        self.header = self._table.header()

    def stamp(self) -> Hashable:
        """Return a value that changes when entries change."""
        return self.generation, self._table.settings()["version"]

    def rows(self, columns: Sequence[str], values: Values = None, by: str = "key") -> Rows:
        """Read the key and other columns of entries, part by part, in any order."""
        with self._table.database.reading() as connection:
            if values is None:
                found = select(connection, columns)
            else:
                found = select(connection, columns, f"{by} {AMONG}", json.dumps(values))
            while part := list(islice(found, _TOGETHER)):
                yield part

    def close(self) -> None:
        """Close files and release memory; the next use opens them again."""
        self.method = FolderMethod(self._table)
        self._matching.clear()
        self._table.close()
        self.generations.close()

    def _matches(self, connection: Connection, rows: Descriptors, where: Filter) -> Keys:
        """The positions of the entries that match a filter, sorted."""
        version = read_settings(connection, self.uri)["version"]
        alive, of = rows.alive, (version, where)
        if of not in self._matching:
            while len(self._matching) >= _FILTERS:
                self._matching.pop(next(iter(self._matching)), None)
            self._matching[of] = filtering.matching_positions(connection, where, alive)
        return self._matching[of]


def _examine(rows: Descriptors, found: list[dict[str, Any]]) -> list[EntryCheck]:
    """Compare entries, as they are stored, with their checksums."""
    positions = np.array([row["position"] for row in found], np.int64)
    sound = np.zeros(len(found), bool)
    known = positions < len(rows.keys)
    sound[known] = rows.read_all(positions[known])[1] & rows.alive[positions[known]]
    keys = np.append(rows.keys, -1)[np.where(known, positions, -1)]
    return [
        examine_row(row["position"], row, bool(good) and key == row["key"])
        for row, good, key in zip(found, sound, keys.tolist(), strict=True)
    ]
