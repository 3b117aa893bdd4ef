"""Servers that the same user runs on this machine, and searches that they answer.

A running server has its model and index in memory, so it answers in a fraction of the time that a
new process needs to load them. Only the standard library is imported here, for the same reason.
"""

import http.client
import json
import os
import secrets
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from listwise.client.requests import Upload, send

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

    def search(
        self, photos: Sequence[Path], fields: Mapping[str, str], seconds: float = 60.0
    ) -> dict[str, Any] | None:
        """Search by photo files, and return the JSON of the answer.

        Args:
            photos: image files.
            fields: the other fields of the search form, as text.
            seconds: time limit.

        Returns:
            None if the server no longer runs, would reduce one of the photos, or refuses the
            search; the index itself can then be searched.
        """
        try:
            info = self._request("GET", "/api/info", CONNECT_SECONDS)
            if info.get("instance") != self.instance:
                return None
            # An upgrade of the index may have changed it since the server started.
            limit = info["limits"]["max_side"]
            if limit is not None and any(_long_side(photo) > limit for photo in photos):
                return None
            return self._request("POST", "/api/search", seconds, Upload.of(fields, photos))
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            return None

    def _request(
        self, method: str, path: str, seconds: float, upload: Upload | None = None
    ) -> dict[str, Any]:
        headers = {"Cache-Control": "no-cache"}
        answer = send(method, self.url + path, headers=headers, upload=upload, seconds=seconds)
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        found: dict[str, Any] = json.loads(answer.content)
        return found


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
    index: str, photos: Sequence[str], boxes: Sequence[Any], how: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    """Search by photo files with a running server of the index.

    Args:
        index: folder or address of the index.
        photos: image files.
        boxes: a box for each photo, or nothing.
        how: the other arguments of `Index.search`.

    Returns:
        The results as JSON; None if no server runs, or if it cannot give the same results as a
        search of the index itself.
    """
    server = find_server(index)
    if server is None or how["where"] == "" or len(boxes) not in (0, len(photos)):
        return None
    fields = {name: str(value) for name, value in how.items() if value is not None}
    answer = server.search(list(map(Path, photos)), fields | {"boxes": json.dumps(boxes or None)})
    results: list[dict[str, Any]] | None = answer["results"] if answer else None
    # Without the server there is no time limit, and the first 100 are verified. Diffusion may put
    # results ahead that are not among these 100.
    some = results and any(hit["inliers"] is None for hit in results[:100])
    unverified = some and answer is not None and answer["verified"] < 100
    return None if how["rerank"] and unverified else results


def new_instance() -> str:
    """Return a random text that identifies a server."""
    return secrets.token_hex(8)


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


def _long_side(photo: Path) -> int:
    from PIL import Image

    try:
        with warnings.catch_warnings(action="error"), Image.open(photo) as image:
            return max(image.size)
    except (Image.DecompressionBombError, Warning):
        return sys.maxsize
