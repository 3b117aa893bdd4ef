"""The marks of an index in Milvus: a small collection beside those of the entries."""

from collections.abc import Sequence
from typing import Any

from listwise.errors import InputError
from listwise.search.entries import in_parts
from listwise.search.mark_log import LogLine, MarkLog, line_id
from listwise.search.milvus.connection import Connection

_FIELDS = {"key", "order", "line", "unused"}
_KEYS = 1 << 63  # all keys are smaller
_MOST = 16384  # maximum rows per answer of a server
_PART = 500  # lines per message
_TEXT = 65535  # maximum bytes of a text in Milvus


class MarkRows(MarkLog):
    """The collection of the marks of an index; it is created with the first mark."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._name = f"{connection.place.collection}_marks"
        self._ready = False

    def append(self, texts: Sequence[str]) -> None:
        """Write lines; when it returns, the server has them in its log."""
        self._open(create=True)
        rows = []
        for place, text in enumerate(texts):
            time, number = line_id(text)
            if len(text) > _TEXT:
                raise InputError(f"a mark has more than {_TEXT} bytes, the maximum of Milvus")
            order = f"{time} {place:06d}"  # marks of one call have one time
            values = {"key": int(number, 16) >> 1, "order": order, "line": text}
            rows.append(values | {"unused": [0.0, 1.0]})
        for part in in_parts(rows, _PART):
            self._call("upsert", data=part)

    def read(self) -> list[LogLine]:
        """Read all lines in the order of their times."""
        if not self._open():
            return []
        found: list[Any] = []
        start, width = 0, _KEYS
        while start < _KEYS:  # window by window, because a server returns a limited number of rows
            stop = start + width
            end = f" and key < {stop}" if stop < _KEYS else ""
            rows = self._call(
                "query",
                filter=f"key >= {start}{end}",
                limit=_MOST,
                output_fields=["key", "order", "line"],
                consistency_level="Strong",
            )
            if len(rows) == _MOST:
                width //= 2
                continue
            found += rows
            start = stop
        found.sort(key=lambda row: (row["order"], row["key"]))
        return [LogLine(f"mark {row['key']}", row["line"]) for row in found]

    def drop(self, names: Sequence[str]) -> None:
        """Remove damaged lines by name and keep the others."""
        keys = [int(name.removeprefix("mark ")) for name in names]
        for part in in_parts(keys, _PART):
            self._call("delete", ids=part)

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
        if self._ready:
            return True
        if not self._call("has_collection"):
            if not create:
                return False
            self._create()
        found = self._call("describe_collection")["fields"]
        if {field["name"] for field in found} != _FIELDS:
            raise InputError(
                f"the collection {self._name}, which the marks of {self._connection.place.shown} "
                "would be stored in, belongs to another program: rename it"
            )
        if not self._call("list_indexes", field_name="unused"):
            self._build()
        if self._call("get_load_state")["state"].name != "Loaded":
            self._call("load_collection", timeout=None)
        self._ready = True
        return True

    def _create(self) -> None:
        from pymilvus import DataType, MilvusClient

        fields = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        fields.add_field("key", DataType.INT64, is_primary=True)
        fields.add_field("order", DataType.VARCHAR, max_length=64)
        fields.add_field("line", DataType.VARCHAR, max_length=_TEXT)
        fields.add_field("unused", DataType.FLOAT_VECTOR, dim=2)  # a collection needs a vector
        try:
            self._call("create_collection", schema=fields, consistency_level="Strong")
        except InputError:
            if not self._call("has_collection"):  # unless another process was faster
                raise

    def _build(self) -> None:
        from pymilvus.milvus_client.index import IndexParams

        params = IndexParams()
        params.add_index("unused", index_name="unused", metric_type="IP", index_type="FLAT")
        self._call("create_index", index_params=params, timeout=None)

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._connection.call(method, collection=self._name, **arguments)
