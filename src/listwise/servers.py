"""Servers that the same user runs on this machine, and searches that they answer.

A running server has its model and index in memory, so it answers in a fraction of the time that a
new process needs to load them. Nothing that takes long to import is imported here.
"""

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from listwise.client import Client, ServerError

CONNECT_SECONDS = 2.0


@dataclass(frozen=True)
class RunningServer:
    """A server of an index.

    Attributes:
        url: its address on this machine.
        instance: a random text that the server confirms, so that another program which uses the
            port now is not mistaken for it.
        pid: its process.
    """

    url: str
    instance: str
    pid: int


@contextmanager
def announce(index: str, url: str, instance: str) -> Iterator[None]:
    """Let `find_server` find a server of this process while the context lasts."""
    server = RunningServer(url, instance, os.getpid())
    folder = _folder()
    if folder is None:
        yield
        return
    file = folder / f"{_name(index)}-{server.pid}-{server.instance}.json"
    partial = file.with_suffix(".tmp")
    try:
        with suppress(OSError):
            partial.write_text(json.dumps(asdict(server)))
            partial.replace(file)
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def find_server(index: str) -> RunningServer | None:
    """Find a running server of an index; None if this user runs none on this machine."""
    folder = _folder()
    if folder is None:
        return None
    for file in sorted(folder.glob(f"{_name(index)}-*.json")):
        try:
            server = RunningServer(**json.loads(file.read_text()))
            os.kill(server.pid, 0)
        except (OSError, ValueError, TypeError):
            # Left by a server that was killed.
            with suppress(OSError):
                file.unlink()
        else:
            return server
    return None


def search_by_server(
    index: str, photos: Sequence[str], boxes: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Search by photo files with a running server of the index.

    Args:
        index: folder or address of the index.
        photos: image files.
        boxes: a box for each photo, or nothing.
        options: the options of the search by name.

    Returns:
        The answer of the server; None if no server runs, or if it refuses the search or cannot give
        the same results as a search of the index itself.
    """
    server = find_server(index)
    if server is None or len(boxes) not in (0, len(photos)):
        return None
    given = {name: value for name, value in options.items() if value not in (None, ())}
    quick, client = (Client(server.url, seconds=s, retries=0) for s in (CONNECT_SECONDS, 60.0))
    client.headers["Cache-Control"] = "no-cache"
    try:
        if quick.info().get("instance") != server.instance:
            return None
        given |= {"box": list(boxes) or None, "average": True}
        answer: dict[str, Any] = client.search(list(photos), **given)
    except ServerError:
        return None
    # Without the server there is no time limit, and the first 100 are verified. Diffusion may put
    # results ahead that are not among these 100.
    some = options["rerank"] and any(hit["inliers"] is None for hit in answer["results"][:100])
    return None if some and answer["verified"] < 100 else answer


def _folder() -> Path | None:
    """The folder of this user for running servers; None if there cannot be one."""
    if os.name == "nt":  # os.kill would end the process
        return None
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"listwise-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    # Others may write in the folder for temporary files: they could have created this one first.
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if own and not found.st_mode & 0o077 else None


def _name(index: str) -> str:
    place = index if "://" in index else str(Path(index).resolve())
    return sha256(place.encode(errors="surrogateescape")).hexdigest()[:20]
