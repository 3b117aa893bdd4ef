"""An index in a folder: SQLite holds the entries, one file their descriptors, FAISS searches them.

The database `index.sqlite` has the marks and the record of the generations. Each generation has a
database `entries-N.sqlite` and a file of descriptors, which the database names. A change appends
descriptors, waits until they are on the disk, and commits their positions in one transaction.
"""

import json
import logging
import re
import shlex
import shutil
import sqlite3
import threading
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from importlib.util import find_spec
from itertools import islice
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import ArrayLike

from listwise.errors import InputError
from listwise.files import publish, sync_folder
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
    damaged_entries,
    entry_sum,
    examine_row,
    in_parts,
    new_sums,
    possible_keys,
    with_attribute,
)
from listwise.search.exact import ExactNeighbors, best_of, median_milliseconds
from listwise.search.filters import Filter
from listwise.search.folder import filtering
from listwise.search.folder.compressed import (
    CompressedSearch,
    compressed_memory,
    trained_index,
    training_size,
)
from listwise.search.folder.database import (
    PATIENCE,
    BusyError,
    Database,
    read_settings,
    write_settings,
)
from listwise.search.folder.descriptors import Descriptors, append_rows, exact_memory
from listwise.search.folder.tuning import (
    SearchState,
    compression_note,
    exact_will_do,
    read_codes,
    save_codes,
    set_probes,
    shortcomings,
)
from listwise.search.marks import Mark, MarkLog, Undo, write_line
from listwise.search.store import (
    GenerationRecord,
    IndexHeader,
    Note,
    Rows,
    SearchIntent,
    Store,
    TuningResult,
    Values,
)

if find_spec("faiss") is None:  # it is imported when something is searched
    raise ModuleNotFoundError("No module named 'faiss'", name="faiss")

_ROOT = "index.sqlite"
_SUMS = ("thumbnail_sum", "local_sum")
_CONTENTS = {  # columns that have a table of their own
    name: f"(SELECT content FROM {name} WHERE position = entries.position)"
    for name in ("thumbnail", "local")
}
_TABLES = f"""CREATE TABLE entries (
    position INTEGER PRIMARY KEY, key INTEGER UNIQUE, id TEXT, path TEXT, width INTEGER,
    height INTEGER, box TEXT, digest TEXT, attributes TEXT, entry_sum INTEGER,
    thumbnail_sum INTEGER, local_sum INTEGER);
CREATE INDEX digests ON entries (digest);
CREATE TABLE thumbnail (position INTEGER PRIMARY KEY, content BLOB);
CREATE TABLE local (position INTEGER PRIMARY KEY, content BLOB);
CREATE TABLE batches (start INTEGER PRIMARY KEY, keys BLOB, sums BLOB);
CREATE TABLE removed (number INTEGER PRIMARY KEY, position INTEGER);
{filtering.TABLE}"""
_OF_POSITIONS = ("entries", *_CONTENTS)
_AMONG = "IN (SELECT value FROM json_each(?))"
_MARKS = "CREATE TABLE marks (number INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT NOT NULL)"
_QUERIES = "queries"  # the folder of the photos of marked queries
_UPGRADE_LOCK = "upgrade.lock"
_OURS = re.compile(
    rf"(index|entries-\d+)\.sqlite(-\w+)?|(descriptors|codes)-\d+-.*|{re.escape(_UPGRADE_LOCK)}"
)
_FILTERS = 8  # filters whose results are kept in memory
_SAMPLE = 200  # entries that are used as queries for measurements
_TOGETHER = 1000  # entries that are read together
_SLACK = 64 << 20  # bytes of removed entries that are always allowed
_PAGE = 4096  # bytes of a page of SQLite
_BATCH = 65536  # descriptors that are copied together

_log = logging.getLogger(__name__)


class MarkTable(MarkLog):
    """The table of the marks in the database of an index in the folder `root`."""

    def __init__(self, root: Path, database: Database) -> None:
        self._root = root
        self._database = database

    def append(self, records: Sequence[Mark | Undo]) -> None:
        """Write records; when it returns, they survive a kill and a power failure."""
        with self._database.writing() as connection:
            lines = [(write_line(record),) for record in records]
            connection.executemany("INSERT INTO marks (line) VALUES (?)", lines)

    def read(self) -> dict[str, str]:
        """Read all lines in the order in which they were written, by name."""
        with self._database.reading() as connection:
            found = connection.execute("SELECT number, line FROM marks ORDER BY number")
            return {f"mark {number}": line for number, line in found}

    def stamp(self) -> Hashable:
        """Return a value that changes when lines are written."""
        with self._database.reading() as connection:
            found: Hashable = connection.execute(
                "SELECT count(*), max(number) FROM marks"
            ).fetchone()
        return found

    def drop(self, names: Sequence[str]) -> None:
        """Remove damaged lines by name and keep the others."""
        with self._database.writing() as connection:
            numbers = [(int(name.removeprefix("mark ")),) for name in names]
            connection.executemany("DELETE FROM marks WHERE number = ?", numbers)

    def keep_photo(self, path: str, content: bytes | None) -> str:
        """Keep a query photo beside the index and return the path of the copy."""
        from listwise.data.photos import photo_digest

        folder = self._root / _QUERIES
        content = Path(path).read_bytes() if content is None else content
        copy = folder / f"{photo_digest(content)}{Path(path).suffix.lower()}"
        try:
            with self._database.writing():  # one process at a time
                if not copy.exists():
                    folder.mkdir(exist_ok=True)
                    partial = folder / "new.tmp"
                    partial.write_bytes(content)
                    publish(partial, copy)
                    sync_folder(self._root)
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}") from error
        return str(copy.absolute())

    def find_photo(self, path: str) -> str:
        """Return where a kept query photo is now; an index may have been moved."""
        moved = self._root / _QUERIES / Path(path).name
        return str(moved.absolute()) if not Path(path).exists() and moved.is_file() else path


class FolderStore(Store):
    """A store of entries in a folder. Several threads and processes may use it."""

    engine = "embedded"

    def __init__(self, root: Path, number: int, aside: bool = False) -> None:
        self.uri = str(root)
        self.generation = number
        self._root = root
        self._aside = aside  # may be changed although it is not the current generation
        self._records = Database(root / _ROOT, self.uri)
        self._entries = Database(_database(root, number), self.uri)
        self._following = threading.RLock()  # guards what follows from the database
        self._choosing = threading.RLock()  # guards the choice of a search method; acquired first
        self._descriptors: Descriptors | None = None  # read when they are first needed
        self._seen = 0  # the version that the rows are of
        self._compressed: CompressedSearch | None = None
        self._chosen = False  # whether the search method was read
        self._matching: dict[Filter, tuple[int, Keys]] = {}  # recent filters, by version
        self._examined = ""  # the file of descriptors when the entries were examined
        self.refresh()

    @staticmethod
    def exists(place: str) -> bool:
        """Whether a folder holds an index."""
        return _read_record(Path(place)) is not None

    @classmethod
    def open(cls, place: str) -> "FolderStore":
        """Open the index in a folder."""
        record = _read_record(Path(place))
        return cls(Path(place), 0 if record is None else record.current)

    @classmethod
    def create(cls, place: str, header: IndexHeader) -> "FolderStore":
        """Create an empty index in a new or empty folder."""
        root = Path(place)
        try:
            root.mkdir(parents=True, exist_ok=True)
            foreign = {path.name for path in root.iterdir() if not _OURS.fullmatch(path.name)}
            if foreign and not cls.exists(place):
                raise InputError(f"{root} holds other files ({min(foreign)}): give another folder")
            made = closing(Database.create(root / _ROOT, place, _MARKS))
            # Another process that creates it waits.
            with made as records, records.writing() as connection:
                if "record" in read_settings(connection, place):
                    raise InputError(f"an index at {root} exists already")
                if int(_settings_of(_database(root, 0), place).get("rows", "0")):
                    raise damage(place, f"{_ROOT} has lost its content")
                _delete_generations(root, set())  # of an unfinished attempt
                _create_generation(root, 0, header)
                # Written last: a folder without it is not an index.
                write_settings(connection, {"record": GenerationRecord().model_dump_json()})
        except OSError as error:
            raise InputError(f"cannot create an index at {root}: {error.strerror}") from error
        return cls(root, 0)

    def __len__(self) -> int:
        with self._snapshot() as (_, rows):
            return len(rows)

    def put(self, new: NewEntries) -> None:
        """Write entries in one commit; they replace entries with the same keys."""
        if not len(new.entries):
            return
        with self._commit() as (connection, settings):
            self.check_new(new)
            new = _distinct(new)
            start = int(settings["rows"])
            keys = [entry.key for entry in new.entries]
            _drop(connection, _positions(connection, keys).values())
            append_rows(self._root / settings["descriptors"], np.asarray(new.descriptors), start)
            _insert(connection, new, start)
            settings["rows"] = str(start + len(keys))

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries in one commit and return their number."""
        keys = possible_keys(keys)
        if not keys:
            return 0
        with self._commit() as (connection, settings):
            previous = None if self._aside else self.record().previous
            if previous is not None:
                # First from the generation that a rollback would return to: after a kill in
                # between, the entries are still there to be removed again.
                with self.open_generation(previous, aside=True) as earlier:
                    earlier.remove(keys)
            positions = _positions(connection, keys).values()
            _drop(connection, positions)
            used = settings["descriptors"]
            self._compact(connection, settings)
        if settings["descriptors"] != used:
            with suppress(OSError):  # Windows keeps a file that is in use
                (self._root / used).unlink()
        return len(positions)

    def set_attribute(self, keys: Sequence[int], name: str, value: str) -> int:
        """Set an attribute of entries in one commit, or remove it if the value is empty."""
        with self._commit() as (connection, _):
            positions = _positions(connection, possible_keys(keys))
            where = json.dumps([*positions.values()])
            rows = list(_select(connection, ENTRY, f"position {_AMONG}", where))
            filtering.drop_attributes(connection, where)
            for row in rows:
                changed = as_row(with_attribute(self._entry(row), name, value))
                connection.execute(
                    "UPDATE entries SET attributes = ?, entry_sum = ? WHERE key = ?",
                    (changed["attributes"], entry_sum(changed), row["key"]),
                )
            filtering.add_attributes(connection, where)
        return len(positions)

    @property
    def mark_log(self) -> MarkTable:
        """The log of the marks, which all generations share."""
        return MarkTable(self._root, self._records)

    def keys(self, where: Filter | None = None, most: int | None = None) -> Keys:
        """Return the keys of the entries that match a filter, or of all, in the order written."""
        with self._snapshot() as (connection, rows):
            if where is None:
                return rows.keys[rows.alive][:most]
            return rows.keys[self._matching_positions(connection, rows, where)][:most]

    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""
        if not self.header.local:
            with self._commit() as (_, settings):
                header = self.header.model_copy(update={"local": True})
                settings["header"] = header.model_dump_json()
            self.header = header

    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries in one commit."""
        with self._commit() as (connection, _):
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
        vectors = self.check_queries(queries, k)
        if not self._chosen:
            self._choose()
        with self._snapshot() as (connection, rows):
            method = self._compressed or rows
            among = None
            if where is not None:
                among = self._matching_positions(connection, rows, where)
        scores, positions = method.search(vectors, k, among)
        # Equal scores by key: positions depend on the order in which entries were written.
        return best_of(scores, np.append(rows.keys, -1)[positions], k)

    def descriptors(self, keys: Keys) -> Iterator[tuple[Keys, Float32]]:
        """Read descriptors by key, part by part: keys [n], rows [n, C]."""
        for part in in_parts(keys, _TOGETHER):
            with self._snapshot() as (connection, rows):
                positions = [*_positions(connection, part.tolist()).values()]
                found = rows.read(np.array(positions, np.int64))
            yield rows.keys[positions], found

    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice.

        A compressed search that was chosen for the same intent and about as many entries is kept.
        """
        with self._choosing:
            with self._snapshot() as (connection, rows):
                before = _state(read_settings(connection, self.uri))
            entries, dim = len(rows), self.header.dim
            search = None
            was_exact = before.tuned is not None and not before.codes
            if exact_will_do(intent, entries, dim, is_exact=was_exact):
                spent = median_milliseconds(rows.search, rows.read(_sample(rows, _SAMPLE)))
                tuned = TuningResult("exact", 1.0, spent, exact_memory(len(rows.keys), dim))
            else:
                search = self._kept(before, rows)
                same = before.intent == intent and entries < 2 * before.entries
                if search is not None and before.tuned is not None and same:
                    self._use(search)
                    return before.tuned
                if search is None:
                    on_note(compression_note(entries, dim))
                search, tuned = _tuned(search, intent, rows)
            self._use(search)
            self._save(SearchState(intent=intent, tuned=tuned, entries=entries), search)
            lacking = shortcomings(intent, tuned)
            if lacking:
                on_note(f"no search method meets all limits; the best one has {', '.join(lacking)}")
            return tuned

    def facts(self) -> dict[str, Any]:
        """Size on disk, search method and measurements."""
        state = _state(self._settings())
        sizes = (path.stat().st_size for path in self._root.iterdir() if path.is_file())
        unknown = {"method": "exact, not measured", "recall": None, "milliseconds": None}
        return {
            "bytes": sum(sizes),
            "intent": state.intent.model_dump(mode="json"),
            **(asdict(state.tuned) if state.tuned else {**unknown, "memory": None}),
        }

    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""
        columns = ("position", *ENTRY, *_SUMS, *_CONTENTS)
        where = "position > ? ORDER BY position LIMIT ?"
        last = -1
        while True:
            with self._snapshot() as (connection, rows):
                self._examined = rows.path.name
                found = list(_select(connection, columns, where, last, _TOGETHER))
                if not found:
                    return
                checks = _examine(rows, found)
            yield checks
            last = found[-1]["position"]

    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""
        with self._commit() as (connection, settings):
            if settings["descriptors"] != self._examined:  # entries may have other positions now
                raise InputError(f"{self.uri} was changed during the check: check it again")
            _drop(connection, places)
            filtering.rebuild_attributes(connection)

    @staticmethod
    def check_files(place: str, repair: bool = False) -> list[str]:
        """Names of the damaged files, relative to the folder; with `repair`, they are restored."""
        root = Path(place)
        found = _check_database(root / _ROOT, place, repair)
        if found and not repair:
            return found
        record = _read_record(root) or GenerationRecord()
        path = _database(root, record.current)
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
        state = _state(settings)
        if state.codes and read_codes(root, state) is None:
            found.append(state.codes)
            if repair:  # they are built again for the next search
                (root / state.codes).unlink(missing_ok=True)
        return list(dict.fromkeys(found))

    def refresh(self) -> None:
        """Read the changes of other processes."""
        where = "build the index again"
        self.header = IndexHeader.parse(self._settings()["header"], self.uri, where)

    def stamp(self) -> Hashable:
        """Return a value that changes when entries change."""
        return self.generation, self._settings()["version"]

    def _settings(self) -> dict[str, str]:
        with self._entries.reading() as connection:
            return read_settings(connection, self.uri)

    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""
        with self._records.reading() as connection:
            settings = read_settings(connection, self.uri)
        return GenerationRecord.model_validate_json(settings["record"])

    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record of the generations in one step."""
        with self._records.writing() as connection:
            write_settings(connection, {"record": record.model_dump_json()})

    def open_generation(self, number: int, *, aside: bool = False) -> "FolderStore":
        """Open another generation of the index."""
        try:
            return FolderStore(self._root, number, aside)
        except DamagedIndexError as error:
            if not aside:
                raise
            raise DamagedIndexError(
                f"an earlier or unfinished generation of {self.uri} is damaged, which listwise "
                "index check does not repair: delete it with listwise index discard "
                f"{shlex.quote(self.uri)}"
            ) from error

    def create_generation(self, number: int, header: IndexHeader) -> "FolderStore":
        """Create an empty generation; it replaces an unfinished one."""
        _create_generation(self._root, number, header)
        return FolderStore(self._root, number, aside=True)

    def drop_generations(self) -> None:
        """Delete the data of the generations that the record does not name."""
        _delete_generations(self._root, self.record().numbers)

    def free_bytes(self) -> int:
        """Free space on the disk of the folder."""
        return shutil.disk_usage(self._root).free

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        """Allow one upgrade at a time."""
        try:
            with FileLock(self._root / _UPGRADE_LOCK, timeout=0):
                yield
        except Timeout:
            raise InputError(
                f"another process upgrades {self.uri}, or rolls it back: wait until it is done"
            ) from None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch."""
        with self._entries.writing():
            if not self.is_current():
                raise self.upgraded()
            yield

    def close(self) -> None:
        """Close files and release memory; the next use opens them again."""
        with self._following:
            self._descriptors = self._compressed = None
            self._chosen = False
            self._matching.clear()
        self._entries.close()
        self._records.close()

    @contextmanager
    def _commit(self) -> Iterator[tuple[sqlite3.Connection, dict[str, str]]]:
        """A transaction of a change, and the settings, which it may change."""
        with self._entries.writing() as connection:
            # A switch holds back changes, so the generation stays the current one meanwhile.
            if not self._aside and not self.is_current():
                raise self.upgraded()
            settings = read_settings(connection, self.uri)
            try:
                yield connection, settings
            except OSError as error:
                raise InputError(f"cannot write to {self._root}: {error.strerror}") from error
            settings["version"] = str(int(settings["version"]) + 1)
            write_settings(connection, settings)

    @contextmanager
    def _snapshot(self) -> Iterator[tuple[sqlite3.Connection, Descriptors]]:
        """A connection that sees one commit, and the descriptors at this commit or a later one."""
        with ExitStack() as stack:
            with self._following:
                connection = stack.enter_context(self._entries.reading())
                rows = self._follow(connection)
            yield connection, rows

    def _follow(self, connection: sqlite3.Connection) -> Descriptors:
        """The descriptors, after the changes since the last call."""
        settings = read_settings(connection, self.uri)
        version, rows = int(settings["version"]), self._descriptors
        path = self._root / settings["descriptors"]
        if rows is None or rows.path != path:
            rows = Descriptors(path, self.header.dim, self._damaged)
            self._compressed, self._chosen = None, False  # its positions are those of another file
        elif version == self._seen:
            return rows
        _update(rows, connection)
        if self._descriptors is not rows:
            (entries,) = connection.execute("SELECT count(*) FROM entries").fetchone()
            if (len(rows.keys), len(rows)) != (int(settings["rows"]), entries):
                raise damage(self.uri, f"{_database(self._root, self.generation).name} lacks rows")
        self._descriptors, self._seen = rows, version
        if self._compressed is not None:
            self._compressed.update()
        return rows

    def _matching_positions(
        self, connection: sqlite3.Connection, rows: Descriptors, where: Filter
    ) -> Keys:
        """The positions of the entries that match a filter, sorted."""
        kept = self._matching.get(where)
        if kept is not None and kept[0] == self._seen:
            return kept[1]
        seen, alive = self._seen, rows.alive
        found = filtering.matching_positions(connection, where, alive)
        with self._following:
            while len(self._matching) >= _FILTERS:
                self._matching.pop(next(iter(self._matching)))
            self._matching[where] = seen, found
        return found

    def _rows(self, columns: Sequence[str], values: Values = None, by: str = "key") -> Rows:
        with self._entries.reading() as connection:
            if values is None:
                found = _select(connection, columns)
            else:
                found = _select(connection, columns, f"{by} {_AMONG}", json.dumps(values))
            while part := list(islice(found, _TOGETHER)):
                yield part

    def _damaged(self, keys: Keys) -> DamagedIndexError:
        """The error for damaged descriptors."""
        rows = self._all(["id"], keys.tolist())
        return damaged_entries(self.uri, sorted(row["id"] for row in rows))

    def _choose(self) -> None:
        """Read or build the search method when it is first needed."""
        with self._choosing:
            with self._snapshot() as (connection, rows):
                state = _state(read_settings(connection, self.uri))
            if self._chosen:  # another thread has read it
                return
            search = self._kept(state, rows)
            if search is not None:
                if self._use(search) > max(1000, len(rows) // 100):
                    self._save(state, search, patience=0)
                return
            if state.codes:
                _log.warning("%s: the search cache is missing or damaged: rebuilding it", self.uri)
            elif exact_will_do(state.intent, len(rows), self.header.dim, is_exact=True):
                self._use(None)
                return
            self.tune(state.intent, lambda note: _log.warning("%s: %s", self.uri, note))

    def _use(self, search: CompressedSearch | None) -> int:
        """Use a search method from now on; how many changes it had missed."""
        changes = 0 if search is None else search.update()
        with self._following:
            if search is None or search.rows is self._descriptors:
                if search is not None:
                    search.update()
                self._compressed, self._chosen = search, True
        return changes

    def _kept(self, state: SearchState, rows: Descriptors) -> CompressedSearch | None:
        """The compressed search of a state; None if its file is missing or damaged."""
        if self._compressed is not None and self._compressed.rows is rows:
            return self._compressed
        index = read_codes(self._root, state) if state.codes else None
        if index is None:
            return None
        if state.descriptors == rows.path.name:
            search = CompressedSearch(index, rows, state.added)
        else:  # other positions, but the centroids still fit
            index.reset()
            search = CompressedSearch(index, rows)
        search.probes, search.candidates = state.probes, state.candidates
        return search

    def _save(
        self, state: SearchState, search: CompressedSearch | None, patience: float = PATIENCE
    ) -> None:
        """Save the search method; if it cannot be written, it is chosen again next time."""
        try:
            with self._entries.writing(patience) as connection:
                if search is not None:
                    name, digest = save_codes(self._root, self.generation, search.index)
                    follows = {"descriptors": search.rows.path.name, "added": search.added}
                    follows |= {"probes": search.probes, "candidates": search.candidates}
                    follows |= {"codes": name, "digest": digest}
                    state = state.model_copy(update=follows)
                write_settings(connection, {"search": state.model_dump_json()})
                for path in self._root.glob(f"codes-{self.generation}-*"):
                    if path.name != state.codes:
                        path.unlink(missing_ok=True)
        except BusyError:
            return  # the saved state is older, but valid
        except (OSError, RuntimeError, InputError) as error:  # FAISS raises RuntimeError
            _log.warning("%s: the search method is not saved: %s", self.uri, error)

    def _compact(self, connection: sqlite3.Connection, settings: dict[str, str]) -> None:
        """Give back space: copy the descriptors in use if most were removed, and free pages."""
        (last,) = connection.execute("SELECT max(number) FROM removed").fetchone()
        gone, size = last or 0, 4 * self.header.dim
        left = int(settings["rows"]) - gone
        if gone * size > max(_SLACK, left * size):
            self._copy_used(connection, settings, left)
        (free,) = connection.execute("PRAGMA freelist_count").fetchone()
        for _ in range(free if free * _PAGE > _SLACK else 0):
            connection.execute("PRAGMA incremental_vacuum(1)")  # Python ends it after one page

    def _copy_used(
        self, connection: sqlite3.Connection, settings: dict[str, str], left: int
    ) -> None:
        """Copy the descriptors in use to another file, and change their positions."""
        rows = Descriptors(self._root / settings["descriptors"], self.header.dim, self._damaged)
        _update(rows, connection)
        for path in self._root.glob(f"descriptors-{self.generation}-*"):
            if path != rows.path:  # left from a process that was killed here
                path.unlink(missing_ok=True)
        settings["descriptors"] = _new_file(self._root, self.generation, int(settings["version"]))
        settings["rows"] = str(left)
        used = np.flatnonzero(rows.alive)
        connection.execute("DELETE FROM removed")
        connection.execute("DELETE FROM batches")
        start = 0
        for part in in_parts(used, _BATCH):
            append_rows(self._root / settings["descriptors"], rows.read_all(part)[0], start)
            _add_batch(connection, start, rows.keys[part], rows.sums[part])
            moves = [pair for pair in enumerate(part.tolist(), start) if pair[0] != pair[1]]
            for table in _OF_POSITIONS:
                query = f"UPDATE {table} SET position = ? WHERE position = ?"
                connection.executemany(query, moves)
            start += len(part)
        filtering.rebuild_attributes(connection)


def _database(root: Path, generation: int) -> Path:
    return root / f"entries-{generation}.sqlite"


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


def _new_file(root: Path, generation: int, version: int) -> str:
    """Create an empty file of descriptors and return its name."""
    path = root / f"descriptors-{generation}-{version}.f32"
    path.write_bytes(b"")
    sync_folder(root)
    return path.name


def _create_generation(root: Path, number: int, header: IndexHeader) -> None:
    """Create an empty generation, unless it exists."""
    made = closing(Database.create(_database(root, number), str(root), _TABLES))
    with made as database, database.writing() as connection:
        if not read_settings(connection, str(root)):
            settings = {"descriptors": _new_file(root, number, 0), "rows": "0", "version": "0"}
            write_settings(connection, {"header": header.model_dump_json(), **settings})


def _delete_generations(root: Path, kept: set[int]) -> None:
    """Delete the files of generations."""
    for path in root.iterdir():
        found = re.match(r"(entries|descriptors|codes)-(\d+)[-.]", path.name)
        if found and int(found[2]) not in kept:
            with suppress(OSError):  # Windows keeps a file that is in use
                path.unlink()


def _settings_of(path: Path, uri: str) -> dict[str, str]:
    """The settings of a database; none if it does not exist or was not finished."""
    if not path.is_file():
        return {}
    with closing(Database(path, uri)) as database, database.reading() as connection:
        made = connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        return read_settings(connection, uri) if made else {}


def _read_record(root: Path) -> GenerationRecord | None:
    """The record of the generations of an index; None if there is no index."""
    found = _settings_of(root / _ROOT, str(root)).get("record")
    return None if found is None else GenerationRecord.model_validate_json(found)


def _state(settings: dict[str, str]) -> SearchState:
    """The saved search method."""
    return SearchState.model_validate_json(settings.get("search", "{}"))


def _tuned(
    kept: CompressedSearch | None, intent: SearchIntent, rows: Descriptors
) -> tuple[CompressedSearch, TuningResult]:
    """A compressed search that meets an intent: the one that was kept if its lists still fit."""
    sample = _sample(rows, _SAMPLE)
    exact = ExactNeighbors(sample, rows.read(sample), rows.search)
    if kept is not None and isqrt(len(rows)) <= 2 * kept.lists:
        search = kept
    else:
        training = rows.read(_sample(rows, training_size(len(rows))))
        search = CompressedSearch(trained_index(training, len(rows)), rows)
    search.update()
    set_probes(search, exact, intent.recall)
    measured = exact.measure(search.search)
    lists = f"{search.probes} of {search.lists} lists, {search.candidates} candidates"
    method = f"compressed: 1 bit per dimension, {lists}"
    memory = compressed_memory(len(search), rows.dim)
    return search, TuningResult(method, *measured, memory)


def _sample(rows: Descriptors, count: int) -> Keys:
    """Random positions in use, sorted."""
    used = np.flatnonzero(rows.alive)
    chosen = np.random.default_rng(0).choice(used, min(count, len(used)), replace=False)
    return np.sort(chosen)


def _select(
    connection: sqlite3.Connection, columns: Sequence[str], where: str = "TRUE", *values: object
) -> Iterator[dict[str, Any]]:
    """The key and other columns of the entries for which a condition holds."""
    wanted = ", ".join(_CONTENTS.get(column, column) for column in ("key", *columns))
    rows = connection.execute(f"SELECT {wanted} FROM entries WHERE {where}", values)
    return (dict(zip(("key", *columns), row, strict=True)) for row in rows)


def _positions(connection: sqlite3.Connection, keys: Sequence[int]) -> dict[int, int]:
    """The positions of entries by key; unknown keys are left out."""
    query = f"SELECT key, position FROM entries WHERE key {_AMONG}"
    return dict(connection.execute(query, (json.dumps(keys),)).fetchall())


def _drop(connection: sqlite3.Connection, positions: Collection[int]) -> None:
    """Remove entries by position."""
    if positions:
        wanted = (json.dumps([*positions]),)
        filtering.drop_attributes(connection, *wanted)
        for table in _OF_POSITIONS:
            connection.execute(f"DELETE FROM {table} WHERE position {_AMONG}", wanted)
        query = "INSERT INTO removed (position) SELECT value FROM json_each(?)"
        connection.execute(query, wanted)


def _insert(connection: sqlite3.Connection, new: NewEntries, start: int) -> None:
    """Add entries from a position on."""
    sums = new_sums(new)
    positions = range(start, start + len(new.entries))
    columns = ["position", "key", *ENTRY, *_SUMS]
    query = f"INSERT INTO entries ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    parts = zip(*(sums[name] for name in ("entry_sum", *_SUMS)), strict=True)
    connection.executemany(
        query,
        [
            (position, *as_row(entry).values(), *part)
            for position, entry, part in zip(positions, new.entries, parts, strict=True)
        ],
    )
    for table, contents in (("thumbnail", new.thumbnails), ("local", new.local)):
        pairs = [pair for pair in zip(positions, contents, strict=True) if pair[1]]
        connection.executemany(f"INSERT INTO {table} VALUES (?, ?)", pairs)
    keys = np.array([entry.key for entry in new.entries], np.int64)
    _add_batch(connection, start, keys, np.array(sums["descriptor_sum"], np.int64))
    filtering.add_attributes(connection, json.dumps([*positions]))


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


def _distinct(new: NewEntries) -> NewEntries:
    """Keep the last of the entries that share a key."""
    places = list({entry.key: place for place, entry in enumerate(new.entries)}.values())
    if len(places) == len(new.entries):
        return new
    return NewEntries(
        [new.entries[place] for place in places],
        new.descriptors[places],
        [new.thumbnails[place] for place in places],
        [new.local[place] for place in places],
    )
