"""The store in a folder: SQLite holds the entries, one file their descriptors, FAISS searches them.

The database `index.sqlite` has the marks and the record of the generations. Each generation has a
database `entries-N.sqlite`, and a file of descriptors, which the database names. FAISS is imported
when something is searched.
"""

import json
import re
import shlex
import shutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import ArrayLike

from listwise.errors import InputError
from listwise.search.entries import (
    ENTRY,
    DamagedIndexError,
    Entry,
    EntryCheck,
    Float32,
    Keys,
    NewEntries,
    as_row,
    content_sum,
    damage,
    entry_sum,
    examine_row,
    in_parts,
    possible_keys,
    read_entry,
    with_attributes,
)
from listwise.search.exact import best_of
from listwise.search.filters import Filter
from listwise.search.folder import filtering, table
from listwise.search.folder.database import Database, read_settings, write_settings
from listwise.search.folder.descriptors import Descriptors, append_rows
from listwise.search.folder.method import FolderMethod, read_codes, read_state
from listwise.search.mark_log import MARKS, FolderMarks
from listwise.search.store import (
    GenerationRecord,
    Generations,
    IndexHeader,
    Rows,
    Store,
    Values,
    check_new,
    check_queries,
)

if find_spec("faiss") is None:
    raise ModuleNotFoundError("No module named 'faiss'", name="faiss")

_FILTERS = 8  # filters whose results are kept in memory
_TOGETHER = 1000  # entries that are read together
_ROOT = "index.sqlite"
_UPGRADE_LOCK = "upgrade.lock"
_OURS = re.compile(
    rf"(index|entries-\d+)\.sqlite(-\w+)?|(descriptors|codes)-\d+-.*|{re.escape(_UPGRADE_LOCK)}"
)


class FolderStore(Store):
    """A store of entries in a folder. Several threads and processes may use it."""

    engine = "embedded"
    generations: "FolderGenerations"
    method: FolderMethod

    def __init__(self, generations: "FolderGenerations") -> None:
        self.uri, self.generations = generations.uri, generations
        self.mark_log = FolderMarks(generations.root, generations.database)
        self._table = table.Table(generations.root, generations)
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
            table.drop(connection, table.positions_of(connection, keys).values())
            path = self.generations.root / settings["descriptors"]
            append_rows(path, np.asarray(new.descriptors), start)
            table.insert(connection, new, start)
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
            positions = table.positions_of(connection, keys).values()
            table.drop(connection, positions)
            used = settings["descriptors"]
            self._table.compact(connection, settings)
        if settings["descriptors"] != used:
            with suppress(OSError):  # Windows keeps a file that is in use
                (generations.root / used).unlink()
        return len(positions)

    def set_attributes(self, keys: Sequence[int], values: Mapping[str, str]) -> int:
        """Set attributes of entries in one commit, or remove those whose value is empty."""
        with self._table.commit() as (connection, _):
            positions = table.positions_of(connection, possible_keys(keys))
            where = json.dumps([*positions.values()])
            rows = list(table.select(connection, ENTRY, f"position {table.AMONG}", where))
            filtering.drop_attributes(connection, where)
            for row in rows:
                changed = as_row(with_attributes(read_entry(self.uri, row), values))
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

    def change_header(self, **values: Any) -> None:
        """Set fields of the header in one commit."""
        if self.header.model_copy(update=values) != self.header:
            with self._table.commit() as (_, settings):
                header = self._table.header().model_copy(update=values)
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
                positions = [*table.positions_of(connection, part.tolist()).values()]
                found = rows.read(np.array(positions, np.int64))
            yield rows.keys[positions], found

    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""
        columns = ("position", *ENTRY, *table.SUMS, *table.CONTENTS)
        where = "position > ? ORDER BY position LIMIT ?"
        last = -1
        while True:
            with self._table.snapshot() as (connection, rows):
                self._examined = rows.path.name
                found = list(table.select(connection, columns, where, last, _TOGETHER))
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
            table.drop(connection, places)
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
                found = table.select(connection, columns)
            else:
                found = table.select(connection, columns, f"{by} {table.AMONG}", json.dumps(values))
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


class FolderGenerations(Generations):
    """The generations of an index in the folder `root`, for the store of one of them."""

    def __init__(self, root: Path, number: int, aside: bool = False) -> None:
        self.uri, self.number, self.aside = str(root), number, aside
        self.root = root
        self.database = Database(root / _ROOT, self.uri)

    @staticmethod
    def exists(place: str) -> bool:
        """Whether a folder holds an index."""
        return "record" in _settings(Path(place, _ROOT), place)

    @staticmethod
    def open_index(place: str) -> FolderStore:
        """Open the current generation of the index in a folder."""
        with closing(FolderGenerations(Path(place), 0)) as generations:
            return generations.open(generations.record().current)

    @staticmethod
    def create_index(place: str, header: IndexHeader) -> FolderStore:
        """Create an empty index in a new or empty folder."""
        root = Path(place)
        try:
            root.mkdir(parents=True, exist_ok=True)
            foreign = {path.name for path in root.iterdir() if not _OURS.fullmatch(path.name)}
            if foreign and not FolderGenerations.exists(place):
                raise InputError(f"{root} holds other files ({min(foreign)}): give another folder")
            made = closing(Database.create(root / _ROOT, place, MARKS))
            # Another process that creates it waits.
            with made as database, database.writing() as connection:
                if "record" in read_settings(connection, place):
                    raise InputError(f"an index at {root} exists already")
                if int(_settings(table.database_path(root, 0), place).get("rows", "0")):
                    raise damage(place, f"{_ROOT} has lost its content")
                _delete_all_but(root, set())  # of an unfinished attempt
                _create_files(root, 0, header)
                # Written last: a folder without it is not an index.
                write_settings(connection, {"record": GenerationRecord().model_dump_json()})
        except OSError as error:
            raise InputError(f"cannot create an index at {root}: {error.strerror}") from error
        return FolderStore(FolderGenerations(root, 0))

    @staticmethod
    def check_files(place: str, repair: bool = False) -> list[str]:
        """Names of the damaged files, relative to the folder; with `repair`, they are restored."""
        root = Path(place)
        found = _check_database(root / _ROOT, place, repair)
        if found and not repair:
            return found
        with closing(FolderGenerations(root, 0)) as generations:
            path = table.database_path(root, generations.record().current)
        found += _check_database(path, place, repair)
        if found and not repair:
            return found
        with (
            closing(Database(path, place)) as database,
            database.writing() if repair else database.reading() as connection,
        ):
            settings = read_settings(connection, place)
            if not filtering.attributes_agree(connection):
                found.append(path.name)
                if repair:
                    filtering.rebuild_attributes(connection)
            descriptors = root / settings["descriptors"]
            size = 4 * json.loads(settings["header"])["dim"] * int(settings["rows"])
            if not descriptors.exists() or descriptors.stat().st_size < size:
                found.append(descriptors.name)
                if repair:  # its rows do not match their checksums: they are encoded again
                    with descriptors.open("ab") as file:
                        file.truncate(size)
        state = read_state(settings)
        if state.codes and read_codes(root, state) is None:
            found.append(state.codes)
            if repair:  # they are built again for the next search
                (root / state.codes).unlink(missing_ok=True)
        return list(dict.fromkeys(found))

    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""
        with self.database.reading() as connection:
            settings = read_settings(connection, self.uri)
        return GenerationRecord.model_validate_json(settings["record"])

    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record in one step."""
        with self.database.writing() as connection:
            write_settings(connection, {"record": record.model_dump_json()})

    def open(self, number: int, *, aside: bool = False) -> FolderStore:
        """Open another generation of the index."""
        try:
            return FolderStore(FolderGenerations(self.root, number, aside))
        except DamagedIndexError as error:
            if not aside:
                raise
            raise DamagedIndexError(
                f"an earlier or unfinished generation of {self.uri} is damaged, which listwise "
                "index check does not repair: delete it with listwise index discard "
                f"{shlex.quote(self.uri)}"
            ) from error

    def create(self, number: int, header: IndexHeader) -> FolderStore:
        """Create an empty generation; it replaces an unfinished one."""
        _create_files(self.root, number, header)
        return FolderStore(FolderGenerations(self.root, number, aside=True))

    def drop_unused(self) -> None:
        """Delete the data of the generations that the record does not name."""
        _delete_all_but(self.root, self.record().numbers)

    def free_bytes(self) -> int:
        """Free space on the disk of the folder."""
        return shutil.disk_usage(self.root).free

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        """Allow one upgrade at a time."""
        try:
            with FileLock(self.root / _UPGRADE_LOCK, timeout=0):
                self.check_current()
                yield
        except Timeout:
            raise InputError(
                f"another process upgrades {self.uri}, or rolls it back: wait until it is done"
            ) from None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch."""
        entries = Database(table.database_path(self.root, self.number), self.uri)
        with closing(entries), entries.writing():
            self.check_current()
            yield

    def close(self) -> None:
        """Close the database; the next use opens it again."""
        self.database.close()


def _settings(path: Path, uri: str) -> dict[str, str]:
    """The settings of a database; none if it does not exist or was not finished."""
    if not path.is_file():
        return {}
    with closing(Database(path, uri)) as database, database.reading() as connection:
        made = connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        return read_settings(connection, uri) if made else {}


def _check_database(path: Path, uri: str, repair: bool) -> list[str]:
    """The name of a database if it is damaged; with `repair`, its indexes are built again."""
    database = Database(path, uri)
    if path.exists() and not database.damage():
        return []
    if repair and (not path.exists() or database.damage(repair=True)):
        raise DamagedIndexError(
            f"{uri} cannot be repaired: {path.name} is damaged; restore a backup of it, or build "
            "the index again"
        )
    return [path.name]


def _create_files(root: Path, number: int, header: IndexHeader) -> None:
    """Create the files of an empty generation, unless they exist."""
    made = closing(Database.create(table.database_path(root, number), str(root), table.TABLES))
    with made as database, database.writing() as connection:
        if not read_settings(connection, str(root)):
            name = table.create_descriptors(root, number, 0)
            settings = {"descriptors": name, "rows": "0", "version": "0"}
            write_settings(connection, {"header": header.model_dump_json(), **settings})


def _delete_all_but(root: Path, kept: set[int]) -> None:
    """Delete the files of all generations but some."""
    for path in root.iterdir():
        found = re.match(r"(entries|descriptors|codes)-(\d+)[-.]", path.name)
        if found and int(found[2]) not in kept:
            with suppress(OSError):  # Windows keeps a file that is in use
                path.unlink()
