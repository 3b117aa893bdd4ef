"""A SQLite database of an index: connections for several threads, and errors of one line."""

import sqlite3
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from listwise.errors import InputError
from listwise.search.entries import damage
from listwise.search.filters import number_in

PATIENCE = 600.0  # seconds to wait for another process that writes
# The last one: the tables are not those that were created.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
SETTINGS = "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL, sum INTEGER)"


class BusyError(InputError):
    """Another thread or process writes to the database for longer than this one waits."""


class Database:
    """A database in write-ahead mode whose commits survive a power failure.

    Readers see the last commit of any process, and do not wait for writers. Of all threads and
    processes, one writes at a time, and the others wait.

    Args:
        path: the file.
        uri: the name of the index in messages.
    """

    def __init__(self, path: Path, uri: str) -> None:
        self.path = path
        self._uri = uri
        self._idle: deque[sqlite3.Connection] = deque()
        self._turn = threading.Lock()  # of the threads that write

    @classmethod
    def create(cls, path: Path, uri: str, tables: str) -> "Database":
        """Open a database, and create its file and its tables if they do not exist."""
        with _errors(path, uri), closing(sqlite3.connect(path, timeout=PATIENCE)) as made:
            made.isolation_level = None
            made.execute("PRAGMA auto_vacuum = INCREMENTAL")
            made.execute("PRAGMA journal_mode = WAL")
            made.execute("PRAGMA synchronous = FULL")
            made.execute("BEGIN IMMEDIATE")
            if not made.execute("SELECT 1 FROM sqlite_master").fetchone():
                for statement in (SETTINGS, *tables.split(";")):
                    made.execute(statement)
            made.execute("COMMIT")
        return cls(path, uri)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one commit, whatever others write meanwhile."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self, patience: float = PATIENCE) -> Iterator[sqlite3.Connection]:
        """A transaction, which is committed at the end, or rolled back after an error.

        It waits `patience` seconds for others that write.
        """
        if not self._turn.acquire(timeout=patience):
            raise BusyError(f"{self._uri} is being changed: try again later")
        try:
            with self._transaction("BEGIN IMMEDIATE", patience) as connection:
                yield connection
        finally:
            self._turn.release()

    def close(self) -> None:
        """Close the connections; the next use opens others."""
        while self._idle:
            self._idle.pop().close()

    def damage(self, repair: bool = False) -> str:
        """What SQLite finds damaged in the file, in one line; empty if nothing is.

        With `repair`, indexes are built again first.
        """
        try:
            with closing(self._connect()) as connection:
                if repair:
                    connection.execute("REINDEX")
                found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            return str(error)
        return "" if found == "ok" else " ".join(str(found).split())

    @contextmanager
    def _transaction(self, begin: str, patience: float = PATIENCE) -> Iterator[sqlite3.Connection]:
        with _errors(self.path, self._uri):
            connection = self._begin(begin, patience)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.close()  # rolls back
                raise
            self._idle.append(connection)

    def _begin(self, begin: str, patience: float) -> sqlite3.Connection:
        while True:
            try:
                connection, new = self._idle.pop(), False
            except IndexError:
                connection, new = self._connect(), True
            try:
                connection.execute(f"PRAGMA busy_timeout = {round(1000 * patience)}")
                connection.execute(begin)
                return connection
            except sqlite3.Error as error:
                connection.close()
                if new or error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                    raise
                self.close()  # those that were opened while the disk was full cannot write later

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._connect_as("mode=rw")
        except sqlite3.OperationalError:
            log = self.path.with_name(f"{self.path.name}-wal")
            if not self.path.exists() or (log.exists() and log.stat().st_size):
                raise
            # Nobody can write to a folder that is read-only, so no lock is needed either.
            return self._connect_as("immutable=1")

    def _connect_as(self, mode: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{mode}",
            timeout=PATIENCE,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA cache_size = -65536")  # KiB
            connection.execute("SELECT 1 FROM sqlite_master").fetchone()
            # A damaged text does not match its checksum, and is reported like other damage.
            connection.text_factory = lambda content: content.decode(errors="replace")
            connection.create_function("number", 1, number_in, deterministic=True)
        except BaseException:
            connection.close()
            raise
        return connection


def read_settings(connection: sqlite3.Connection, uri: str) -> dict[str, str]:
    """Read the table of settings; `DamagedIndexError` if one is not what was written."""
    found = connection.execute("SELECT name, value, sum FROM settings").fetchall()
    for name, value, total in found:
        if _sum(name, value) != total:
            raise damage(uri, f"its setting {name} changed after it was written")
    return {name: value for name, value, _ in found}


def write_settings(connection: sqlite3.Connection, values: dict[str, str]) -> None:
    """Replace settings by name."""
    connection.executemany(
        "INSERT OR REPLACE INTO settings VALUES (?, ?, ?)",
        [(name, value, _sum(name, value)) for name, value in values.items()],
    )


def _sum(name: str, value: str) -> int:
    return zlib.crc32(f"{name} {value}".encode())


@contextmanager
def _errors(path: Path, uri: str) -> Iterator[None]:
    """Report errors of SQLite in one line."""
    try:
        yield
    except UnicodeDecodeError as error:  # of a message with a damaged name
        raise damage(uri, f"{path.name} has a text that is not UTF-8") from error
    except sqlite3.Error as error:
        text = " ".join(str(error).split())
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        if code in _DAMAGED:
            raise damage(uri, f"{path.name}: {text}") from error
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise InputError(f"cannot write to {path.parent}: {text}") from error
        if code == sqlite3.SQLITE_BUSY:
            raise BusyError(f"{uri} is being changed: try again later") from error
        raise InputError(f"{path} cannot be used: {text}") from error
