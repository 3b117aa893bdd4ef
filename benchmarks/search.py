"""Benchmark search in an index against other engines."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import (
    anonymous_bytes,
    percentiles,
    run_alone,
    timed,
    unit_rows,
)
from listwise.errors import InputError
from listwise.machine import core_count
from listwise.search import Entry, IndexHeader, NewEntries, create_store, exact_search, open_store
from listwise.search.entries import entry_key
from listwise.search.methods import SearchIntent
from listwise.settings import ExtractSettings

K = 10
LONG = 50  # results of a long list
QUERIES = 256
ALONE = 100  # of them run one at a time
ROWS = 8192
PUT = 65_536  # entries that are added to an index together
EXACT_FROM = 200_000  # larger databases are compared with exact search alone

Vectors = NDArray[np.float32]
Ask = Callable[[Vectors, int], NDArray[np.int64]]


@dataclass(frozen=True)
class SearchMeasurement:
    """A method at a database size: recall, queries per second, latency, and memory.

    `unlike` is the recall@10 of queries from clusters of which the database has no descriptor.
    `per_second` is measured with all queries in one call, and the percentiles with one query at a
    time. `build` is the time in seconds to build the search, `ready` the time from opening what
    was built to the first result in a new process. `memory` is
    what the process holds for each entry after the queries, in bytes, without the pages of files
    that are mapped into memory.
    """

    entries: Annotated[int, "entries", "{:,}"]
    method: Annotated[str, "method"]
    recall: Annotated[float, "recall@10", "{:.3f}"]
    long_recall: Annotated[float, "recall@50", "{:.3f}"]
    unlike: Annotated[float, "recall@10, unlike", "{:.3f}"]
    per_second: Annotated[float, "queries/s", "{:.1f}"]
    p50: Annotated[float, "p50 ms", "{:.1f}"]
    p99: Annotated[float, "p99 ms", "{:.1f}"]
    build: Annotated[float, "build s", "{:.0f}"]
    ready: Annotated[float, "ready s", "{:.1f}"]
    memory: Annotated[float, "bytes/entry", "{:,.0f}"]
    note: Annotated[str, "how"] = ""


def write_descriptors(folder: Path, count: int, dim: int) -> None:
    """Write unit descriptors `database.npy` [count, dim] and `queries.npy`, and the ground truth.

    Descriptors form clusters of different sizes. Their variance decreases over the dimensions, as
    for learned descriptors. Queries are drawn from the same clusters, those of `unlike.npy` from
    others.
    """
    rng = np.random.default_rng(0)
    starts = range(0, count, ROWS)
    spectrum = (1 + np.arange(dim, dtype=np.float32)) ** -0.5
    spectrum /= np.linalg.norm(spectrum)
    centers = rng.standard_normal((max(2, count // 50), dim), dtype=np.float32) * spectrum
    weights = rng.pareto(1.5, len(centers)) + 0.2
    shares = np.cumsum(weights / weights.sum())

    def draw(rows: int, rng: np.random.Generator) -> Vectors:
        around = centers[np.minimum(np.searchsorted(shares, rng.random(rows)), len(centers) - 1)]
        spread = rng.standard_normal((rows, dim), dtype=np.float32)
        spread *= 0.8 * spectrum
        spread += around
        return unit_rows(spread)

    database = np.lib.format.open_memmap(folder / "database.npy", "w+", np.float32, (count, dim))

    def fill(start: int) -> None:
        part = database[start : start + ROWS]
        part[:] = draw(len(part), np.random.default_rng((1, start)))

    with ThreadPoolExecutor(core_count()) as pool:
        list(pool.map(fill, starts))
    database.flush()
    queries = draw(QUERIES, rng)
    centers = rng.standard_normal(centers.shape, dtype=np.float32) * spectrum
    for name, rows in ("queries", queries), ("unlike", draw(QUERIES, rng)):
        np.save(folder / f"{name}.npy", rows)
        np.save(folder / f"{name}_truth.npy", exact_search(rows, database, LONG)[1])


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
        for start in range(0, len(database), PUT):
            rows = np.array(database[start : start + PUT])
            entries = [Entry(str(start + i), "", 0, 0) for i in range(len(rows))]
            index.put(NewEntries(entries, rows, [b""] * len(rows)))


class Method(ABC):
    """A way to search: `build` runs in a process of its own, then `open` in another."""

    @abstractmethod
    def build(self, folder: Path) -> str:
        """Build what is saved on disk, and describe it."""

    @abstractmethod
    def open(self, folder: Path) -> Ask:
        """Open what was built, and return a function that finds keys: [Q, C], k -> [Q, k]."""

    def places(self, folder: Path) -> dict[int, int] | None:
        """The row of each entry by its key; None if the keys are rows."""
        return None


class FaissFlat(Method):
    """FAISS, called directly."""

    def build(self, folder: Path) -> str:
        """FAISS reads the descriptors when it opens them."""
        return ""

    def open(self, folder: Path) -> Ask:
        """Read all descriptors."""
        import faiss

        database = np.load(folder / "database.npy")
        index = faiss.IndexFlatIP(database.shape[1])
        index.add(database)
        return lambda queries, k: index.search(queries, k)[1]


class ListwiseExact(Method):
    """Our index, exact."""

    def intent(self, shape: tuple[int, ...]) -> SearchIntent:
        """The target of a database of this shape."""
        return SearchIntent(recall=1.0)

    def build(self, folder: Path) -> str:
        """Choose the search method."""
        shape = np.load(folder / "database.npy", mmap_mode="r").shape
        with open_store(folder / "index") as index:
            return index.method.tune(self.intent(shape)).method

    def open(self, folder: Path) -> Ask:
        """Open the index."""
        opened = open_store(folder / "index")
        return lambda queries, k: opened.search(queries, k)[1]

    def places(self, folder: Path) -> dict[int, int]:
        """The row of each entry by its key."""
        count = len(np.load(folder / "database.npy", mmap_mode="r"))
        return {entry_key(str(row)): row for row in range(count)}


class ListwiseCompressed(ListwiseExact):
    """Our index with an eighth of the memory of exact search."""

    def intent(self, shape: tuple[int, ...]) -> SearchIntent:
        """The target of a database of this shape."""
        return SearchIntent(memory=shape[0] * shape[1] // 2)


class Hnswlib(Method):
    """The library hnswlib with 16 links, ef 100 for building and 200 for search."""

    def build(self, folder: Path) -> str:
        """Build the graph and save it."""
        import hnswlib

        database = np.load(folder / "database.npy", mmap_mode="r")
        index = hnswlib.Index("ip", database.shape[1])
        index.init_index(len(database), M=16, ef_construction=100, random_seed=0)
        for start in range(0, len(database), ROWS):
            rows = np.array(database[start : start + ROWS])
            index.add_items(rows, np.arange(start, start + len(rows)))
        index.save_index(str(folder / "hnswlib"))
        return "M 16, ef 200"

    def open(self, folder: Path) -> Ask:
        """Read the graph and the descriptors."""
        import hnswlib

        dim = np.load(folder / "database.npy", mmap_mode="r").shape[1]
        index = hnswlib.Index("ip", dim)
        index.load_index(str(folder / "hnswlib"))
        index.set_ef(200)
        return lambda queries, k: index.knn_query(queries, k)[0].astype(np.int64)


METHODS: dict[str, Method] = {
    "FAISS flat": FaissFlat(),
    "listwise, exact": ListwiseExact(),
    "listwise, compressed": ListwiseCompressed(),
    "hnswlib": Hnswlib(),
}
LARGE = ("FAISS flat", "listwise, exact", "listwise, compressed")


def build_method(folder: Path, method: str) -> tuple[float, str]:
    """Build a method, and return the seconds and its description; runs in a separate process."""
    return timed(lambda: METHODS[method].build(folder))


def measure_method(folder: Path, method: str, build: float, note: str) -> SearchMeasurement:
    """Measure a method that was built; runs in a separate process."""
    queries, unlike = (np.load(folder / f"{name}.npy") for name in ("queries", "unlike"))
    places = METHODS[method].places(folder)
    before = anonymous_bytes()
    opening, ask = timed(lambda: METHODS[method].open(folder))
    first, _ = timed(lambda: ask(queries[:1], K))
    ask(queries[:16], K)
    whole, keys = timed(lambda: ask(queries, K))
    seconds = [timed(partial(ask, query[None], K))[0] for query in queries[:ALONE]]
    entries = len(np.load(folder / "database.npy", mmap_mode="r"))
    memory = (anonymous_bytes() - before) / entries

    def recall(keys: NDArray[np.int64], name: str) -> float:
        truth = np.load(folder / f"{name}_truth.npy")[:, : keys.shape[1]]
        found = keys.tolist()
        if places is not None:
            found = [[places.get(key, -1) for key in row] for row in found]
        hits = [len(set(a) & set(b)) for a, b in zip(found, truth.tolist(), strict=True)]
        return float(np.mean(hits) / keys.shape[1])

    recalls = recall(keys, "queries"), recall(ask(queries, LONG), "queries")
    rates = *recalls, recall(ask(unlike, K), "unlike"), len(queries) / whole, *percentiles(seconds)
    return SearchMeasurement(entries, method, *rates, build, opening + first, memory, note)


def run(
    sizes: Sequence[int] = (100_000, 1_000_000),
    dim: int = 2048,
    folder: Path | None = None,
    methods: Sequence[str] | None = None,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[SearchMeasurement]:
    """Measure methods on generated databases of each size.

    Args:
        sizes: numbers of descriptors in the databases.
        dim: dimensions of a descriptor.
        folder: folder for temporary files: up to 20 GB for a million descriptors.
        methods: names of `METHODS`. By default all of them; for databases of 200,000 descriptors
            or more, only FAISS and exact and compressed search.
        on_start: called with what is measured next.
    """
    if min(sizes) < 1000:
        raise InputError("`sizes` must be 1000 descriptors or more")
    if unknown := set(methods or ()) - set(METHODS):
        known = "; ".join(METHODS)
        raise InputError(f"unknown {unknown.pop()!r} in `methods`: choose from {known}")
    for size in sorted(sizes):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            place = Path(name)
            on_start(f"generating {size:,} descriptors")
            write_descriptors(place, size, dim)
            on_start(f"adding {size:,} descriptors to an index")
            run_alone(write_index, place)
            for method in methods or (LARGE if size >= EXACT_FROM else METHODS):
                on_start(f"{method} among {size:,}")
                try:
                    built = run_alone(build_method, place, method)
                    yield run_alone(measure_method, place, method, *built)
                except ModuleNotFoundError:
                    on_start(f"{method} is skipped: it is not installed")
