"""A connection to one collection of Milvus, on a server or cluster or in a milvus-lite file."""

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from listwise.errors import InputError
from listwise.optional import requires

_CONNECT = 5.0  # seconds to wait for the first answer of a server
_ANSWER = 60.0  # seconds to wait for every other answer
_PORT = 19530
MOST = 16384  # maximum rows per answer of a server
KEYS = 1 << 63  # all keys are smaller
_COLLECTION = "listwise"  # name of the only collection in a file
SESSION = "Session"  # a read sees the writes of this process
STRONG = "Strong"  # a read sees the writes of all processes

Field = tuple[str, str, dict[str, int]]
"""A field of a collection: its name, type and options."""

# milvus-lite serves a file to all clients of one process, and to no other process.
_users: Counter[str] = Counter()
_users_lock = threading.Lock()


@dataclass(frozen=True)
class Place:
    """The address of a collection; `shown` is its name in messages, without the password."""

    shown: str
    address: str
    collection: str
    token: str = ""
    file: Path | None = None


def parse_place(uri: str) -> Place:
    """Parse `milvus://[user:password@]host:port/name` or the name of a `.db` file."""
    if not uri.startswith("milvus://"):
        path = Path(uri).absolute()
        return Place(uri, str(path), _COLLECTION, file=path)
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        host, port = None, 0
    name = "" if host is None else parts.path.strip("/")
    if not host or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,254}", name):
        shown = re.sub(r"//.*@", "//", uri)
        raise InputError(
            f"{shown}: write milvus://host:port/name with a name of letters, digits and _"
        )
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    token = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return Place(f"milvus://{where}/{name}", f"http://{where}", name, token)


class Connection:
    """A client of one collection with one-line errors. Several threads may use it.

    Generation 0 of an index is the collection of its name, which also has the record of the
    generations. Generation N is a collection of its own.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.collection = place.collection
        client, self._errors = _pymilvus(place)
        if place.file is not None:
            _check_file(place)
            with _users_lock:
                _users[place.address] += 1
        self._open = True
        try:
            self._client = client(
                place.address, token=place.token, timeout=_CONNECT, dedicated=True
            )
        except self._errors as error:
            self._release_file()
            if place.file is not None:
                reason = "it may be open in another process, or not be a file of milvus-lite"
                raise InputError(f"{place.shown} cannot be opened: {reason}") from error
            raise InputError(
                f"no Milvus server answers at {place.address.removeprefix('http://')}: "
                f"{_reason(error)}"
            ) from error

    def beside(self, ending: str) -> "Connection":
        """This connection for the collection with the name of the index and an ending."""
        other = copy(self)
        other.collection = f"{self.place.collection}{ending}"
        return other

    def generation(self, number: int) -> "Connection":
        """This connection for the collection of a generation."""
        return self.beside(f"_generation_{number}" if number else "")

    def call(self, method: str, *, timeout: float | None = _ANSWER, **arguments: Any) -> Any:
        """Call a method of the pymilvus client on the collection."""
        try:
            return getattr(self._client, method)(
                collection_name=self.collection, timeout=timeout, **arguments
            )
        except self._errors as error:
            raise InputError(f"{self.place.shown}: {method} failed: {_reason(error)}") from error

    def properties(self) -> dict[str, str]:
        """The properties of the collection; empty if it does not exist."""
        if not self.call("has_collection"):
            return {}
        return dict(self.call("describe_collection").get("properties") or {})

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Replace properties of the collection in one step."""
        self.call("alter_collection_properties", properties=dict(properties))

    def create(self, fields: Sequence[Field]) -> None:
        """Create the collection with these fields; the first is the key."""
        from pymilvus import DataType, MilvusClient

        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        for number, (name, kind, options) in enumerate(fields):
            schema.add_field(name, DataType[kind], is_primary=number == 0, **options)
        self.call("create_collection", schema=schema, consistency_level="Session")

    def load(self, field: str, method: str, build: dict[str, int]) -> None:
        """Build the Milvus index of a field unless it has this one, and load the collection."""
        from pymilvus import MilvusClient

        wanted = {"index_type": method, **build}
        present = self.call("list_indexes", field_name=field)
        if present:
            built = self.call("describe_index", index_name=field)
            if any(str(built.get(name)) != str(value) for name, value in wanted.items()):
                self.call("release_collection")
                self.call("drop_index", index_name=field)
                present = []
        if not present:
            params = MilvusClient.prepare_index_params()
            params.add_index(
                field, index_name=field, metric_type="IP", index_type=method, params=build
            )
            self.call("create_index", index_params=params, timeout=None)
        if self.call("get_load_state")["state"].name != "Loaded":
            self.call("load_collection", timeout=None)

    def query(self, fields: list[str], level: str = SESSION, **which: Any) -> list[dict[str, Any]]:
        """Read fields of the rows that a filter or a list of ids selects."""
        return list(self.call("query", output_fields=fields, consistency_level=level, **which))

    def count(self, condition: str = "", level: str = SESSION) -> int:
        """The number of rows that match a condition, or of all."""
        return int(self.query(["count(*)"], level, filter=condition)[0]["count(*)"])

    def wait_for_writes(self) -> None:
        """Wait until reads see the writes of every process.

        Reads of this process wait for its own upserts, but not for its own deletions.
        """
        self.count(level=STRONG)

    def walk(
        self,
        fields: list[str],
        condition: str = "",
        width: int = KEYS,
        level: str = SESSION,
    ) -> Iterator[list[dict[str, Any]]]:
        """Read fields of all rows that match a condition, window by window, in order of their keys.

        A server returns a limited number of rows; keys
        are hashes and evenly spread, so the `width` of a window determines how many it holds.
        """
        start = 0
        matching = f" and ({condition})" if condition else ""
        while start < KEYS:
            stop = start + width
            # Milvus does not accept a number as large as the end.
            end = f" and key < {stop}" if stop < KEYS else ""
            rows = self.query(fields, level, filter=f"key >= {start}{end}{matching}", limit=MOST)
            if len(rows) == MOST:
                width //= 2
                continue
            yield sorted(rows, key=lambda row: row["key"])
            start = stop

    def close(self) -> None:
        """Close the connection, and release the file if no other client of this process uses it."""
        if self._open:
            self._client.close()
            self._release_file()

    def _release_file(self) -> None:
        self._open = False
        if self.place.file is None:
            return
        from milvus_lite import server_manager_instance  # type: ignore[import-untyped]

        with _users_lock:
            _users[self.place.address] -= 1
            if not _users[self.place.address]:
                server_manager_instance.release_server(self.place.address)


def _pymilvus(place: Place) -> tuple[Any, tuple[type[Exception], ...]]:
    """Import the client of pymilvus and the errors that its methods raise."""
    with requires("milvus", "an index in Milvus"):
        import grpc  # type: ignore[import-untyped]
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException

        if place.file is not None:
            import milvus_lite  # noqa: F401
    return MilvusClient, (MilvusException, grpc.RpcError)


def _check_file(place: Place) -> None:
    path = Path(place.address)
    if path.exists() and not path.is_dir():
        raise InputError(f"{place.shown} is not a folder of milvus-lite 3: give another name")
    if not path.parent.is_dir():
        raise InputError(
            f"no folder {path.parent} for {path.name}: create it, or give another name"
        )


def _reason(error: Exception) -> str:
    text = getattr(error, "message", "") or getattr(error, "details", lambda: "")() or str(error)
    return " ".join(str(text).split())[:300]
