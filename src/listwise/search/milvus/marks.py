"""The marks of an index in Milvus: a small collection beside those of the entries."""

from collections.abc import Sequence
from itertools import chain

from listwise.errors import InputError
from listwise.search.entries import in_parts
from listwise.search.marks import Mark, MarkLog, Undo, write_line
from listwise.search.milvus.connection import STRONG, Connection, Field

_PART = 500  # lines per message
_TEXT = 65535  # maximum bytes of a text in Milvus
_FIELDS: list[Field] = [
    ("key", "INT64", {}),
    ("order", "VARCHAR", {"max_length": 64}),
    ("line", "VARCHAR", {"max_length": _TEXT}),
    ("unused", "FLOAT_VECTOR", {"dim": 2}),  # a collection needs a vector
]


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
