"""Search in an index beside other engines, and the server with many clients."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError
from listwise.search import Entry, IndexHeader, NewEntries, create_store, exact_search, open_store
from listwise.search.store import SearchIntent

SIZES = (100_000, 1_000_000)
K = 10
QUERIES = 256
ALONE = 100  # of them asked one at a time
ROWS = 8192
EXACT_FROM = 200_000  # larger databases are compared with exact search alone
CLIENTS = (1, 8, 64)

Vectors = NDArray[np.float32]
Ask = Callable[[Vectors], NDArray[np.int64]]


@dataclass(frozen=True)
class Row:
    """A way to search among so many descriptors: recall@10, queries a second, milliseconds.

    `per_second` is of all queries at once, the percentiles of one at a time. `ready` are the
    seconds from the descriptors on disk to the first search.
    """

    entries: int
    method: str
    recall: float
    per_second: float
    p50: float
    p99: float
    ready: float
    note: str = ""

    def as_json(self) -> dict[str, object]:
        """The row as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class ServerRow:
    """So many clients that search with photos at once: answers a second, milliseconds, refusals."""

    clients: int
    per_second: float
    p50: float
    p99: float
    refused: int

    def as_json(self) -> dict[str, object]:
        """The row as plain data."""
        return asdict(self)


def write_descriptors(folder: Path, count: int, dim: int) -> None:
    """Write unit descriptors `database.npy` [count, dim] and `queries.npy`, and the truth.

    Descriptors lie around centres of uneven size, their spread falls off over the dimensions as
    that of learned descriptors does, and queries are further photos of the same centres.
    """
    rng = np.random.default_rng(0)
    spectrum = (1 + np.arange(dim, dtype=np.float32)) ** -0.5
    spectrum /= np.linalg.norm(spectrum)
    centres = rng.standard_normal((max(2, count // 50), dim), dtype=np.float32) * spectrum
    weights = rng.pareto(1.5, len(centres)) + 0.2
    shares = np.cumsum(weights / weights.sum())

    def draw(rows: int) -> Vectors:
        around = centres[np.minimum(np.searchsorted(shares, rng.random(rows)), len(centres) - 1)]
        spread = 0.8 * rng.standard_normal((rows, dim), dtype=np.float32) * spectrum
        found: Vectors = around + spread
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        return found

    database = np.lib.format.open_memmap(folder / "database.npy", "w+", np.float32, (count, dim))
    for start in range(0, count, ROWS):
        database[start : start + ROWS] = draw(min(ROWS, count - start))
    database.flush()
    queries = draw(QUERIES)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "truth.npy", exact_search(queries, database, K)[1])


def write_index(folder: Path) -> None:
    """Put the descriptors into an index, entry i under the id `i`."""
    database = np.load(folder / "database.npy", mmap_mode="r")
    header = IndexHeader(
        model="made by code",
        model_folder="",
        whitened=False,
        dim=database.shape[1],
        settings=ExtractSettings(),
    )
    with create_store(folder / "index", header) as index:
        for start in range(0, len(database), ROWS):
            rows = np.array(database[start : start + ROWS])
            entries = [Entry(str(start + i), "", 0, 0) for i in range(len(rows))]
            index.put(NewEntries(entries, rows, [b""] * len(rows)))


def faiss_flat(folder: Path) -> tuple[Ask, str]:
    """FAISS as one would call it."""
    import faiss

    database = np.load(folder / "database.npy")
    index = faiss.IndexFlatIP(database.shape[1])
    index.add(database)
    return lambda queries: index.search(queries, K)[1], ""


def listwise_index(folder: Path, intent: SearchIntent) -> tuple[Ask, str]:
    """Our index, tuned for an intent beforehand; what is measured opens it anew."""
    from listwise.search.entries import entry_key

    count = len(np.load(folder / "database.npy", mmap_mode="r"))
    places = {entry_key(str(i)): i for i in range(count)}
    with open_store(folder / "index") as index:
        tuned = index.tune(intent)
    opened = open_store(folder / "index")

    def ask(queries: Vectors) -> NDArray[np.int64]:
        _, keys = opened.search(queries, K)
        return np.array([[places.get(int(key), -1) for key in row] for row in keys])

    return ask, tuned.method


def listwise_exact(folder: Path) -> tuple[Ask, str]:
    """Our index, exact."""
    return listwise_index(folder, SearchIntent(recall=1.0))


def listwise_compressed(folder: Path) -> tuple[Ask, str]:
    """Our index in an eighth of the memory that exact search takes."""
    shape = np.load(folder / "database.npy", mmap_mode="r").shape
    return listwise_index(folder, SearchIntent(memory=shape[0] * shape[1] // 2, recall=0.95))


def lancedb_index(folder: Path) -> tuple[Ask, str]:
    """LanceDB's own search in the table of our index, with its usual IVF-PQ index."""
    import lancedb

    from listwise.search.entries import entry_key

    table = lancedb.connect(folder / "index").open_table("entries")
    table.create_index(metric="dot", vector_column_name="descriptor", replace=True)
    count = len(np.load(folder / "database.npy", mmap_mode="r"))
    places = {entry_key(str(i)): i for i in range(count)}

    def ask(queries: Vectors) -> NDArray[np.int64]:
        found = []
        for query in queries:
            search = table.search(query, vector_column_name="descriptor").distance_type("dot")
            rows = search.select(["key"]).limit(K).refine_factor(10).to_arrow()
            keys = rows.column("key").to_pylist()
            found.append([places[key] for key in keys] + [-1] * (K - len(keys)))
        return np.array(found)

    return ask, "IVF-PQ, refine factor 10"


def hnswlib_index(folder: Path) -> tuple[Ask, str]:
    """The library hnswlib with 16 links, ef 100 when built and 200 when searched."""
    import hnswlib

    database = np.load(folder / "database.npy", mmap_mode="r")
    index = hnswlib.Index("ip", database.shape[1])
    index.init_index(len(database), M=16, ef_construction=100, random_seed=0)
    for start in range(0, len(database), ROWS):
        rows = np.array(database[start : start + ROWS])
        index.add_items(rows, np.arange(start, start + len(rows)))
    index.set_ef(200)
    return lambda queries: index.knn_query(queries, K)[0].astype(np.int64), "M 16, ef 200"


METHODS: dict[str, Callable[[Path], tuple[Ask, str]]] = {
    "FAISS flat": faiss_flat,
    "listwise, exact": listwise_exact,
    "listwise, compressed": listwise_compressed,
    "hnswlib": hnswlib_index,
    "LanceDB": lancedb_index,
}
LARGE = ("FAISS flat", "listwise, exact", "listwise, compressed")


def measure_method(folder: Path, method: str) -> Row:
    """Time one way to search; run in a process of its own."""
    queries = np.load(folder / "queries.npy")
    truth = np.load(folder / "truth.npy")
    start = time.perf_counter()
    ask, note = METHODS[method](folder)
    ask(queries[:1])
    ready = time.perf_counter() - start
    ask(queries[:16])
    started = time.perf_counter()
    found = ask(queries)
    whole = time.perf_counter() - started
    seconds = []
    for query in queries[:ALONE]:
        started = time.perf_counter()
        ask(query[None])
        seconds.append(time.perf_counter() - started)
    hits = [len(set(a) & set(b)) / K for a, b in zip(found.tolist(), truth.tolist(), strict=True)]
    count = len(np.load(folder / "database.npy", mmap_mode="r"))
    p50, p99 = (float(1000 * np.percentile(seconds, p)) for p in (50, 99))
    recall = float(np.mean(hits))
    return Row(count, method, recall, len(queries) / whole, p50, p99, ready, note)


def run(
    sizes: Sequence[int] = SIZES,
    dim: int = 2048,
    folder: Path | None = None,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[Row]:
    """Search descriptors made by code, in databases of each size, by each method.

    Args:
        sizes: descriptors in the database; from 200,000 up only exact and compressed search.
        dim: dimensions of a descriptor.
        folder: where they lie for a while (16 kB each at 2048 dimensions).
        on_start: told what begins.
    """
    if min(sizes) < 1000:
        raise InputError("give sizes of 1000 descriptors or more")
    for size in sorted(sizes):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            place = Path(name)
            on_start(f"making {size:,} descriptors")
            write_descriptors(place, size, dim)
            on_start(f"putting {size:,} descriptors into an index")
            _alone(write_index, place)
            for method in LARGE if size >= EXACT_FROM else METHODS:
                on_start(f"{method} among {size:,}")
                try:
                    yield _alone(measure_method, place, method)
                except ModuleNotFoundError:
                    on_start(f"{method} is left out: it is not installed")


def run_server(
    clients: Sequence[int] = CLIENTS, photos: int = 200, side: int = 256, seconds: float = 10.0
) -> Iterator[ServerRow]:
    """Search by photo through a server on this machine, with so many clients at once.

    The clients run on the same cores as the server. The network is tf_efficientnet_lite0 with
    random weights, the photos are JPEG files of noise, `side` pixels on the long side.
    """
    import io
    import subprocess
    import sys

    import httpx
    from PIL import Image

    from listwise.data import read_images
    from listwise.descriptors import load_model
    from listwise.models import RetrievalNet
    from listwise.search import add_photos, header_of

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "photos").mkdir()
        uploads = []
        for number in range(photos):
            pixels = rng.integers(0, 255, (12, 16, 3)).astype(np.uint8)
            photo = Image.fromarray(pixels).resize((side, side * 3 // 4))
            photo.save(place / "photos" / f"{number}.jpg")
            file = io.BytesIO()
            photo.save(file, "JPEG")
            uploads.append(file.getvalue())
        RetrievalNet("tf_efficientnet_lite0", weights="random").save(place / "model")
        model = load_model(place / "model")
        with create_store(place / "index", header_of(model, place / "model")) as index:
            add_photos(index, model, read_images(place / "photos"))
        port = _free_port()
        command = [sys.executable, "-m", "listwise", "serve", str(place / "index")]
        server = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        address = f"http://127.0.0.1:{port}"
        try:
            _wait(address, server)
            for count in clients:
                yield _clients(httpx, address, uploads, count, seconds)
        finally:
            server.terminate()
            server.wait()


def _clients(
    httpx: Any, address: str, uploads: list[bytes], count: int, seconds: float
) -> ServerRow:
    end = time.perf_counter() + seconds

    def one(number: int) -> tuple[list[float], int]:
        times, refused, turn = [], 0, number
        with httpx.Client(base_url=address, timeout=60) as client:
            while time.perf_counter() < end:
                files = {"photos": ("photo.jpg", uploads[turn % len(uploads)], "image/jpeg")}
                started = time.perf_counter()
                answer = client.post("/api/search", files=files)
                if answer.status_code == 503:
                    refused += 1
                    time.sleep(0.05)
                else:
                    answer.raise_for_status()
                    times.append(time.perf_counter() - started)
                turn += count
        return times, refused

    started = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(one, range(count)))
    took = time.perf_counter() - started
    times = [one for each, _ in found for one in each]
    p50, p99 = (float(1000 * np.percentile(times, p)) for p in (50, 99))
    return ServerRow(count, len(times) / took, p50, p99, sum(refused for _, refused in found))


def _wait(address: str, server: Any) -> None:
    import httpx

    end = time.monotonic() + 60
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(f"{address}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise InputError("the server did not start: listwise serve says why")


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _alone(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a function in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()
