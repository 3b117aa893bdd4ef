"""Benchmark search by photo through a server with concurrent clients."""

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
from PIL import Image

from benchmarks.measure import percentiles, unit_rows
from listwise.errors import InputError
from listwise.models import RetrievalNet

BOUNDARY = "listwise-benchmark"
FILES = 200  # photos of an index that exist


@dataclass(frozen=True)
class ServerMeasurement:
    """A number of concurrent clients: answers per second, latency, and refused requests.

    `refused` counts answers with status 503, and `late` those with status 504.
    """

    clients: Annotated[int, "clients", "{:d}"]
    per_second: Annotated[float, "answers/s", "{:.1f}"]
    p50: Annotated[float, "p50 ms", "{:.0f}"]
    p99: Annotated[float, "p99 ms", "{:.0f}"]
    late: Annotated[int, "too late", "{:d}"]
    refused: Annotated[int, "refused", "{:d}"]
    refused_p50: Annotated[float | None, "refused p50 ms", "{:.1f}"]
    refused_p99: Annotated[float | None, "refused p99 ms", "{:.1f}"]


def run(
    clients: Sequence[int] = (1, 8, 64, 512),
    photos: int = 200,
    side: int = 256,
    seconds: float = 10.0,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[ServerMeasurement]:
    """Measure search by photo through a server, for each number of simultaneous clients.

    The clients run on the same cores as the server. The network is tf_efficientnet_lite0 with
    random weights, the photos are JPEG files of noise, `side` pixels on the long side. Entries
    beyond the first 200 have random descriptors, so that the index is built quickly.

    Args:
        clients: numbers of simultaneous clients.
        photos: number of photos in the index.
        side: long side of the photos, in pixels.
        seconds: time per number of clients.
        on_start: called with what is measured next.
    """
    with tempfile.TemporaryDirectory() as name:
        on_start("building an index")
        uploads = build_index(Path(name), photos, side)
        on_start("starting the server")
        with serving(Path(name) / "index") as port:
            for count in clients:
                on_start(f"{count} clients")
                yield measure_clients(port, uploads, count, seconds)


def build_index(place: Path, photos: int, side: int) -> list[bytes]:
    """Create photos and an index of them in a folder, and return the content of the photos."""
    from listwise.search import Entry, NewEntries, open_index

    rng = np.random.default_rng(0)
    (place / "photos").mkdir()
    paths = [place / "photos" / f"{number}.jpg" for number in range(min(photos, FILES))]
    for path in paths:
        pixels = rng.integers(0, 255, (12, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((side, side * 3 // 4)).save(path)
    RetrievalNet("tf_efficientnet_lite0", weights="random").save(place / "model")
    with open_index(place / "index", place / "model") as index:
        index.add(place / "photos")
        left = photos - len(paths)
        rows = unit_rows(rng.standard_normal((left, index.model.dim), dtype=np.float32))
        entries = [Entry(f"more/{number}.jpg", "", side, side) for number in range(left)]
        index.store.put(NewEntries(entries, rows, [b""] * left))
    return [path.read_bytes() for path in paths]


@contextmanager
def serving(index: Path) -> Iterator[int]:
    """Run a server of an index for the `with` block, and yield its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    command = [sys.executable, "-m", "listwise", "serve", str(index), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while not _answers(port):
            if time.monotonic() > end or server.poll() is not None:
                raise InputError("the server did not start: listwise serve shows why")
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def measure_clients(
    port: int, uploads: Sequence[bytes], count: int, seconds: float
) -> ServerMeasurement:
    """Run concurrent clients for some seconds, each with one photo after the other.

    The clients start one by one within a second. A client that is refused waits as long as the
    header `Retry-After` tells it.
    """
    # All clients run in one thread: hundreds of threads would measure how they take turns.
    found = asyncio.run(_run_clients(port, uploads, count, seconds))
    times = {status: [t for s, t in found.answers if s == status] for status in (200, 503, 504)}
    other = {status for status, _ in found.answers} - set(times)
    if other or not times[200]:
        raise InputError(f"the server answered with status {min(other, default=503)} only")
    refused = percentiles(times[503]) if times[503] else (None, None)
    per_second = len(times[200]) / (found.last - found.first)
    counts = len(times[504]), len(times[503])
    return ServerMeasurement(count, per_second, *percentiles(times[200]), *counts, *refused)


@dataclass
class _Answers:
    """Status and seconds of each answer, and the times of the first request and last answer."""

    first: float = 0.0
    last: float = 0.0
    answers: list[tuple[int, float]] = field(default_factory=list)


async def _run_clients(port: int, uploads: Sequence[bytes], count: int, seconds: float) -> _Answers:
    requests = [_request(port, content) for content in uploads]
    found = _Answers(first=time.perf_counter())
    end = found.first + seconds

    async def search(number: int) -> None:
        await asyncio.sleep(number / count)
        connection, turn = _Connection(port, number), number
        try:
            while time.perf_counter() < end:
                started = time.perf_counter()
                status, wait = await connection.send(requests[turn % len(requests)])
                found.last = time.perf_counter()
                found.answers.append((status, found.last - started))
                await asyncio.sleep(wait)
                turn += count
        finally:
            connection.close()

    await asyncio.gather(*map(search, range(count)))
    return found


def _request(port: int, content: bytes) -> bytes:
    """A whole HTTP request that searches by a photo."""
    kind = 'form-data; name="photos"; filename="photo.jpg"'
    part = f"--{BOUNDARY}\r\nContent-Disposition: {kind}\r\n\r\n".encode()
    body = part + content + f"\r\n--{BOUNDARY}--\r\n".encode()
    lines = [
        "POST /api/search HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        f"Content-Type: multipart/form-data; boundary={BOUNDARY}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


class _Connection:
    """The connection of a client, which is opened again if the server closes it.

    On Linux each client has an address of its own, because the server limits the
    requests of an address.
    """

    def __init__(self, port: int, number: int) -> None:
        self._port = port
        own = f"127.1.{number // 250}.{number % 250 + 1}"
        self._address = (own, 0) if sys.platform == "linux" else None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> tuple[int, float]:
        """Return the status of the answer, and the seconds to wait before the next request."""
        # The server closes connections that are not used for a few seconds.
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            if self._streams is not None:
                return await self._send(request)
        self.close()
        try:
            return await self._send(request)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise InputError("the server closed a connection without an answer") from error

    async def _send(self, request: bytes) -> tuple[int, float]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                "127.0.0.1", self._port, local_addr=self._address
            )
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return int(first.split()[1]), float(headers.get("retry-after", 0))

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
