"""A connection to one collection of Milvus: a server's, a cluster's, or a milvus-lite file's."""

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

_CONNECT = 5.0  # seconds to wait for a server's first answer
_ANSWER = 60.0  # and for every other
_PORT = 19530
_COLLECTION = "listwise"  # the name that a file's one collection has

# milvus-lite serves a file to all clients of this process, and to no other process.
_users: Counter[str] = Counter()
_users_lock = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Where a collection is: `shown` names it to people and has no password in it."""

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
        raise InputError(f"{shown}: write milvus://host:port/name, name of letters, digits and _")
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    token = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
    return Place(f"milvus://{where}/{name}", f"http://{where}", name, token)


class Connection:
    """A client of one collection, whose errors are one line each. Safe with several threads."""

    def __init__(self, place: Place) -> None:
        self.place = place
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
                reason = "is it open in another process, or not milvus-lite's?"
                raise InputError(f"{place.shown} cannot be opened: {reason}") from error
            raise InputError(
                f"no Milvus server answers at {place.address.removeprefix('http://')}: "
                f"{_reason(error)}"
            ) from error

    def call(self, method: str, *, timeout: float | None = _ANSWER, **arguments: Any) -> Any:
        """Call a method of pymilvus's client on the collection."""
        try:
            return getattr(self._client, method)(
                collection_name=self.place.collection, timeout=timeout, **arguments
            )
        except self._errors as error:
            raise InputError(f"{self.place.shown}: {method} failed: {_reason(error)}") from error

    @property
    def version(self) -> str:
        """The version of the server."""
        try:
            return str(self._client.get_server_version(timeout=_ANSWER))
        except self._errors as error:
            raise InputError(f"{self.place.shown} does not answer: {_reason(error)}") from error

    @property
    def version_numbers(self) -> tuple[int, ...]:
        """The numbers of the server's version, for comparisons."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:3])

    def close(self) -> None:
        """Let go of the connection, and of the file when nobody in this process uses it."""
        if self._open:
            self._client.close()
            self._release_file()

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
    """The client of pymilvus, and the errors that its methods raise."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it writes of every fork
    with requires("milvus", "an index in Milvus"):
        import grpc  # type: ignore[import-untyped]
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException

        if place.file is not None:
            import milvus_lite  # type: ignore[import-untyped]  # noqa: F401
    for name in ("pymilvus", "pymilvus.milvus_client", "milvus_lite", "grpc"):
        # They write tracebacks of errors that are raised as well.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MilvusClient, (MilvusException, grpc.RpcError)


def _check_file(place: Place) -> None:
    path = Path(place.address)
    if path.exists() and not path.is_dir():
        raise InputError(f"{place.shown} is not a folder of milvus-lite 3: give another name")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} for {path.name}")


def _reason(error: Exception) -> str:
    text = getattr(error, "message", "") or getattr(error, "details", lambda: "")() or str(error)
    return " ".join(str(text).split())[:300]
