"""Benchmark search by photo through a server with concurrent clients."""

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
from PIL import Image

from listwise.benchmarks.measure import percentiles, timed
from listwise.benchmarks.table import columns_of
from listwise.errors import InputError
from listwise.models import RetrievalNet


@dataclass(frozen=True)
class ServerMeasurement:
    """A number of concurrent clients: answers per second, latency, and refused requests."""

    clients: Annotated[int, "clients", "{:d}"]
    per_second: Annotated[float, "answers/s", "{:.1f}"]
    p50: Annotated[float, "p50 ms", "{:.0f}"]
    p99: Annotated[float, "p99 ms", "{:.0f}"]
    refused: Annotated[int, "refused", "{:d}"]


COLUMNS = columns_of(ServerMeasurement)


def run(
    clients: Sequence[int] = (1, 8, 64),
    photos: int = 200,
    side: int = 256,
    seconds: float = 10.0,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[ServerMeasurement]:
    """Measure search by photo through a server, for each number of simultaneous clients.

    The clients run on the same cores as the server. The network is tf_efficientnet_lite0 with
    random weights, the photos are JPEG files of noise, `side` pixels on the long side.
    """
    with tempfile.TemporaryDirectory() as name:
        on_start("building an index")
        uploads = build_index(Path(name), photos, side)
        on_start("starting the server")
        with serving(Path(name) / "index") as address:
            for count in clients:
                on_start(f"{count} clients")
                yield measure_clients(address, uploads, count, seconds)


def build_index(place: Path, photos: int, side: int) -> list[bytes]:
    """Create photos and an index of them in a folder, and return the content of the photos."""
    from listwise.search import open_index

    rng = np.random.default_rng(0)
    (place / "photos").mkdir()
    paths = [place / "photos" / f"{number}.jpg" for number in range(photos)]
    for path in paths:
        pixels = rng.integers(0, 255, (12, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((side, side * 3 // 4)).save(path)
    RetrievalNet("tf_efficientnet_lite0", weights="random").save(place / "model")
    with open_index(place / "index", place / "model") as index:
        index.add(place / "photos")
    return [path.read_bytes() for path in paths]


@contextmanager
def serving(index: Path) -> Iterator[str]:
    """Run a server of an index for the `with` block, and yield its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "listwise", "serve", str(index), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while not _answers(address):
            if time.monotonic() > end or server.poll() is not None:
                raise InputError("the server did not start: listwise serve shows why")
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def measure_clients(
    address: str, uploads: Sequence[bytes], count: int, seconds: float
) -> ServerMeasurement:
    """Run concurrent clients for some seconds, each with one photo after the other."""
    end = time.perf_counter() + seconds

    def search(number: int) -> tuple[list[float], int]:
        times, refused, turn = [], 0, number
        with httpx.Client(base_url=address, timeout=60) as client:
            while time.perf_counter() < end:
                files = {"photos": ("photo.jpg", uploads[turn % len(uploads)], "image/jpeg")}
                took, answer = timed(lambda: client.post("/api/search", files=files))  # noqa: B023
                if answer.status_code == 503:
                    refused += 1
                    time.sleep(0.05)
                else:
                    answer.raise_for_status()
                    times.append(took)
                turn += count
        return times, refused

    with ThreadPoolExecutor(count) as pool:
        took, found = timed(lambda: list(pool.map(search, range(count))))
    times = [one for each, _ in found for one in each]
    refused = sum(number for _, number in found)
    return ServerMeasurement(count, len(times) / took, *percentiles(times), refused)
