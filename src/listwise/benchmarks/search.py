"""Benchmark search in an index against other engines."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from listwise.benchmarks.measure import percentiles, run_alone, timed, unit_rows
from listwise.benchmarks.table import columns_of
from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError
from listwise.search import Entry, IndexHeader, NewEntries, create_store, exact_search, open_store
from listwise.search.entries import entry_key
from listwise.search.store import SearchIntent

K = 10
QUERIES = 256
ALONE = 100  # of them run one at a time
ROWS = 8192
EXACT_FROM = 200_000  # larger databases are compared with exact search alone

Vectors = NDArray[np.float32]
Ask = Callable[[Vectors], NDArray[np.int64]]


@dataclass(frozen=True)
class SearchMeasurement:
    """A method at a database size: recall@10, queries per second, and latency.

    `per_second` is measured with all queries in one call, and the percentiles with one query at a
    time. `ready` is the time in seconds from the descriptors on disk to the first search.
    """

    entries: Annotated[int, "entries", "{:,}"]
    method: Annotated[str, "method"]
    recall: Annotated[float, "recall@10", "{:.3f}"]
    per_second: Annotated[float, "queries/s", "{:.1f}"]
    p50: Annotated[float, "p50 ms", "{:.1f}"]
    p99: Annotated[float, "p99 ms", "{:.1f}"]
    ready: Annotated[float, "ready s", "{:.1f}"]
    note: Annotated[str, "how"] = ""


COLUMNS = columns_of(SearchMeasurement)


def write_descriptors(folder: Path, count: int, dim: int) -> None:
    """Write unit descriptors `database.npy` [count, dim] and `queries.npy`, and the ground truth.

    Descriptors form clusters of different sizes. Their variance decreases over the dimensions, as
    for learned descriptors. Queries are drawn from the same clusters.
    """
    rng = np.random.default_rng(0)
    spectrum = (1 + np.arange(dim, dtype=np.float32)) ** -0.5
    spectrum /= np.linalg.norm(spectrum)
    centers = rng.standard_normal((max(2, count // 50), dim), dtype=np.float32) * spectrum
    weights = rng.pareto(1.5, len(centers)) + 0.2
    shares = np.cumsum(weights / weights.sum())

    def draw(rows: int) -> Vectors:
        around = centers[np.minimum(np.searchsorted(shares, rng.random(rows)), len(centers) - 1)]
        spread = 0.8 * rng.standard_normal((rows, dim), dtype=np.float32) * spectrum
        return unit_rows(around + spread)

    database = np.lib.format.open_memmap(folder / "database.npy", "w+", np.float32, (count, dim))
    for start in range(0, count, ROWS):
        database[start : start + ROWS] = draw(min(ROWS, count - start))
    database.flush()
    queries = draw(QUERIES)
    np.save(folder / "queries.npy", queries)
    np.save(folder / "truth.npy", exact_search(queries, database, K)[1])


def write_index(folder: Path) -> None:
    """Add the descriptors to an index; the id of entry i is `i`."""
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
    """FAISS, called directly."""
    import faiss

    database = np.load(folder / "database.npy")
    index = faiss.IndexFlatIP(database.shape[1])
    index.add(database)
    return lambda queries: index.search(queries, K)[1], ""


def listwise_index(folder: Path, intent: SearchIntent) -> tuple[Ask, str]:
    """Our index, optimized for a target in advance; the measured search reopens it."""
    places = _places(folder)
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
    """Our index with an eighth of the memory of exact search."""
    shape = np.load(folder / "database.npy", mmap_mode="r").shape
    return listwise_index(folder, SearchIntent(memory=shape[0] * shape[1] // 2, recall=0.95))


def lancedb_index(folder: Path) -> tuple[Ask, str]:
    """The search of LanceDB in the table of our index, with an IVF-PQ index."""
    import lancedb
    from lancedb.index import IvfPq

    table = lancedb.connect(folder / "index").open_table("entries")
    table.create_index("descriptor", config=IvfPq(distance_type="dot"), replace=True)
    places = _places(folder)

    def ask(queries: Vectors) -> NDArray[np.int64]:
        found = []
        for query in queries:
            search = table.search(query, vector_column_name="descriptor").distance_type("dot")
            rows = search.select(["key", "_distance"]).limit(K).refine_factor(10).to_arrow()
            keys = rows.column("key").to_pylist()
            found.append([places[key] for key in keys] + [-1] * (K - len(keys)))
        return np.array(found)

    return ask, "IVF-PQ, refine factor 10"


def _places(folder: Path) -> dict[int, int]:
    """Return the row of each entry by its key."""
    count = len(np.load(folder / "database.npy", mmap_mode="r"))
    return {entry_key(str(row)): row for row in range(count)}


def hnswlib_index(folder: Path) -> tuple[Ask, str]:
    """The library hnswlib with 16 links, ef 100 for building and 200 for search."""
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


def measure_method(folder: Path, method: str) -> SearchMeasurement:
    """Measure one method; runs in a separate process."""
    queries = np.load(folder / "queries.npy")
    truth = np.load(folder / "truth.npy")
    opening, (ask, note) = timed(lambda: METHODS[method](folder))
    first, _ = timed(lambda: ask(queries[:1]))
    ask(queries[:16])
    whole, found = timed(lambda: ask(queries))
    seconds = [timed(partial(ask, query[None]))[0] for query in queries[:ALONE]]
    hits = [len(set(a) & set(b)) / K for a, b in zip(found.tolist(), truth.tolist(), strict=True)]
    entries = len(np.load(folder / "database.npy", mmap_mode="r"))
    recall, rate, ready = float(np.mean(hits)), len(queries) / whole, opening + first
    return SearchMeasurement(entries, method, recall, rate, *percentiles(seconds), ready, note)


def run(
    sizes: Sequence[int] = (100_000, 1_000_000),
    dim: int = 2048,
    folder: Path | None = None,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[SearchMeasurement]:
    """Measure each method on generated databases of each size.

    Databases of more than 200,000 descriptors are measured with exact and compressed search only.
    """
    if min(sizes) < 1000:
        raise InputError("`sizes` must be 1000 descriptors or more")
    for size in sorted(sizes):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            place = Path(name)
            on_start(f"generating {size:,} descriptors")
            write_descriptors(place, size, dim)
            on_start(f"adding {size:,} descriptors to an index")
            run_alone(write_index, place)
            for method in LARGE if size >= EXACT_FROM else METHODS:
                on_start(f"{method} among {size:,}")
                try:
                    yield run_alone(measure_method, place, method)
                except ModuleNotFoundError:
                    on_start(f"{method} is skipped: it is not installed")
