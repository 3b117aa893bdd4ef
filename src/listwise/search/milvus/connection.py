"""A connection to one collection of Milvus, on a server or cluster or in a milvus-lite file."""

import _thread
import logging
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from listwise.errors import InputError
from listwise.optional import requires

_CONNECT = 5.0  # seconds to wait for the first answer of a server
_ANSWER = 60.0  # seconds to wait for every other answer
_PORT = 19530
_COLLECTION = "listwise"  # name of the only collection in a file

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

    def __init__(self, place: Place, generation: int = 0) -> None:
        self.place = place
        self.collection = self.collection_of(generation)
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

    def collection_of(self, generation: int) -> str:
        """The name of the collection of a generation."""
        base = self.place.collection
        return f"{base}_generation_{generation}" if generation else base

    def call(
        self,
        method: str,
        *,
        timeout: float | None = _ANSWER,
        collection: str = "",
        **arguments: Any,
    ) -> Any:
        """Call a method of the pymilvus client on the collection, or on another one."""
        try:
            return getattr(self._client, method)(
                collection_name=collection or self.collection, timeout=timeout, **arguments
            )
        except self._errors as error:
            raise InputError(f"{self.place.shown}: {method} failed: {_reason(error)}") from error

    def collections(self) -> list[str]:
        """The names of all collections."""
        try:
            return list(self._client.list_collections(timeout=_ANSWER))
        except self._errors as error:
            raise InputError(f"{self.place.shown} does not answer: {_reason(error)}") from error

    @property
    def version(self) -> str:
        """The version of the server."""
        try:
            return str(self._client.get_server_version(timeout=_ANSWER))
        except self._errors as error:
            raise InputError(f"{self.place.shown} does not answer: {_reason(error)}") from error

    @property
    def version_numbers(self) -> tuple[int, ...]:
        """The version of the server as numbers, for comparisons."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:3])

    def close(self) -> None:
        """Close the connection, and release the file if no other client of this process uses it."""
        if self._open:
            self._client.close()
            self._release_file()

    def close_in_background(self) -> None:
        """Close the connection in a thread, without waiting for it; for finalizers.

        Python may run a finalizer at any moment, also inside a lock that closing needs.
        """
        if self._open:
            _thread.start_new_thread(self.close, ())

    def _release_file(self) -> None:
        self._open = False
        if self.place.file is None:
            return
        from milvus_lite.server_manager import (  # type: ignore[import-untyped]
            server_manager_instance,
        )

        with _users_lock:
            _users[self.place.address] -= 1
            if not _users[self.place.address]:
                server_manager_instance.release_server(self.place.address)


def _pymilvus(place: Place) -> tuple[Any, tuple[type[Exception], ...]]:
    """Import the client of pymilvus and the errors that its methods raise."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC logs a line for every fork
    with requires("milvus", "an index in Milvus"):
        import grpc  # type: ignore[import-untyped]
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException

        if place.file is not None:
            import milvus_lite  # type: ignore[import-untyped]  # noqa: F401
    for name in ("pymilvus", "pymilvus.milvus_client", "milvus_lite", "grpc"):
        # They log tracebacks of errors that they also raise.
        logging.getLogger(name).setLevel(logging.CRITICAL)
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
