"""The log of the marks of an index: lines in a table of SQLite, or in a collection of Milvus.

The log does not belong to a generation, so upgrades and rollbacks keep it. A line is a checksum and
a record as JSON: a mark, or that a mark was undone.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from listwise.errors import InputError
from listwise.files import sync_folder, write_bytes
from listwise.search.entries import in_parts
from listwise.search.folder.database import Database
from listwise.search.marks import Mark, MarkedQuery, Undo
from listwise.search.milvus.connection import STRONG, Connection, Field

MARKS = "CREATE TABLE marks (number INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT NOT NULL)"
_QUERIES = "queries"  # the folder of the photos of marked queries
_PART = 500  # lines per message
_TEXT = 65535  # maximum bytes of a text in Milvus
_FIELDS: list[Field] = [
    ("key", "INT64", {}),
    ("order", "VARCHAR", {"max_length": 64}),
    ("line", "VARCHAR", {"max_length": _TEXT}),
    ("unused", "FLOAT_VECTOR", {"dim": 2}),  # a collection needs a vector
]


class MarkLog(ABC):
    """Where the marks of an index are stored. Several threads and processes may use it."""

    @abstractmethod
    def append(self, records: Sequence[Mark | Undo]) -> None:
        """Write records; when it returns, they survive a kill and a power failure."""

    @abstractmethod
    def read(self) -> dict[str, str]:
        """Read all lines in the order in which they were written, by name."""

    @abstractmethod
    def drop(self, names: Sequence[str]) -> None:
        """Remove damaged lines by name and keep the others."""

    @abstractmethod
    def keep_photo(self, path: str, content: bytes | None) -> str:
        """Keep a query photo beside the index and return the path of the copy.

        Args:
            path: the file of the photo; its ending is that of the copy.
            content: the bytes of the photo file.
        """

    def stamp(self) -> Hashable | None:
        """Return a value that changes when lines are written; None if this cannot be known."""
        return None

    def find_photo(self, path: str) -> str:
        """Return where a kept query photo is now; an index may have been moved."""
        return path

    def damaged(self) -> list[str]:
        """Names of the lines that are not what was written."""
        return [name for name, text in self.read().items() if parse_line(text) is None]


class FolderMarks(MarkLog):
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
                    write_bytes(copy, content)
                    sync_folder(self._root)
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}") from error
        return str(copy.absolute())

    def find_photo(self, path: str) -> str:
        """Return where a kept query photo is now; an index may have been moved."""
        moved = self._root / _QUERIES / Path(path).name
        return str(moved.absolute()) if not Path(path).exists() and moved.is_file() else path


class MilvusMarks(MarkLog):
    """The collection of the marks of an index; it is created with the first mark."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection.beside("_marks")
        self._ready = False

    def append(self, records: Sequence[Mark | Undo]) -> None:
        """Write records; when it returns, the server has them in its log."""
        self._open(create=True)
        rows = []
        for place, record in enumerate(records):
            text = write_line(record)
            if len(text) > _TEXT:
                raise InputError(f"a mark has more than {_TEXT} bytes, the maximum of Milvus")
            order = f"{record.time} {place:06d}"  # marks of one call have one time
            values = {"key": int(record.id, 16) >> 1, "order": order, "line": text}
            rows.append(values | {"unused": [0.0, 1.0]})
        for part in in_parts(rows, _PART):
            self._connection.call("upsert", data=part)

    def read(self) -> dict[str, str]:
        """Read all lines in the order of their times, by name."""
        if not self._open():
            return {}
        fields = ["key", "order", "line"]
        windows = self._connection.walk(fields, level=STRONG)
        rows = list(chain.from_iterable(windows))
        rows.sort(key=lambda row: (row["order"], row["key"]))
        return {f"mark {row['key']}": row["line"] for row in rows}

    def drop(self, names: Sequence[str]) -> None:
        """Remove damaged lines by name and keep the others."""
        keys = [int(name.removeprefix("mark ")) for name in names]
        for part in in_parts(keys, _PART):
            self._connection.call("delete", ids=part)

    def keep_photo(self, path: str, content: bytes | None) -> str:
        """Return the path of the photo itself: an index in Milvus has no folder for copies."""
        if content is not None and path == "query.png":
            raise InputError(
                f"{self._connection.place.shown} keeps no photos: give `query` as a file that "
                "stays where it is"
            )
        return path

    def _open(self, create: bool = False) -> bool:
        """Load the collection; False if it does not exist and is not to be created."""
        connection = self._connection
        if self._ready:
            return True
        if not connection.call("has_collection"):
            if not create:
                return False
            try:
                connection.create(_FIELDS)
            except InputError:
                if not connection.call("has_collection"):
                    raise  # no other process was faster
        found = connection.call("describe_collection")["fields"]
        if {field["name"] for field in found} != {name for name, *_ in _FIELDS}:
            raise InputError(
                f"the collection {connection.collection}, which the marks of "
                f"{connection.place.shown} would be stored in, belongs to another program: "
                "rename it"
            )
        connection.load("unused", "FLAT", {})
        self._ready = True
        return True


def write_line(record: Mark | Undo) -> str:
    """Write a record as a line with its checksum."""
    content = json.dumps(asdict(record))
    return f"{_checksum(content)} {content}"


def parse_line(text: str) -> Mark | Undo | None:
    """Read a record from its line; None if the line is damaged."""
    checksum, _, content = text.partition(" ")
    if checksum != _checksum(content):
        return None
    values = json.loads(content)
    if "mark" in values:
        return Undo(**values)
    query = values.pop("query")
    box = None if query["box"] is None else tuple(query["box"])
    return Mark(query=MarkedQuery(**{**query, "box": box}), **values)


def _checksum(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
