"""Evaluation among many distractors: counted ranks against a score matrix and its sort."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from listwise.benchmarks.measure import DoesNotFit, available_memory, measure
from listwise.blocks import each_block
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries, evaluate_descriptors
from listwise.search import alpha_query_expansion

SIZES = (100_000, 1_000_000)
QUERIES = 70
OWN = 5_000  # images of the benchmark itself; the others are distractors
PROTOCOLS = ("easy", "medium", "hard")
SCORES_ALONE = "scores alone"

Figures = dict[str, float]
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    """One line of the table: a method at a database size, or why it was skipped.

    `parts` are the seconds of the steps that the method can tell apart, and `figures` its mAPs.
    """

    images: int
    method: str
    seconds: float | None
    extra_bytes: int | None
    parts: dict[str, float]
    figures: Figures
    skipped: str | None

    def as_json(self) -> dict[str, object]:
        """The row as plain data."""
        return asdict(self)


def make_queries(dim: int) -> tuple[Vectors, JudgedQueries]:
    """Queries, and which of the first images show the same landmark: easy, hard and junk."""
    rng = np.random.default_rng(0)
    queries = _unit(rng.standard_normal((QUERIES, dim), dtype=np.float32))
    parts = [np.split(rng.permutation(OWN)[:220].astype(np.int64), [50, 120]) for _ in queries]
    easy, hard, junk = ([part[i] for part in parts] for i in range(3))
    names = [f"image{i}" for i in range(OWN)]
    asked = [f"query{i}" for i in range(QUERIES)]
    return queries, JudgedQueries.revisited(
        names, asked, [None] * QUERIES, easy=easy, hard=hard, junk=junk
    )


def write_database(file: Path, images: int, dim: int) -> None:
    """Write unit descriptors [images, dim] as .npy: the benchmark's own images, then distractors.

    Distractors lie in clusters, each turned towards some query, as look-alikes do.
    """
    queries, truth = make_queries(dim)
    rng = np.random.default_rng(images)
    own = 0.5 * rng.standard_normal((OWN, dim), dtype=np.float32) / np.sqrt(dim)
    for query, easy, hard, junk in zip(queries, *truth.grades.values(), strict=True):
        for found, least, most in ((easy, 0.2, 0.6), (hard, 0.0, 0.3), (junk, 0.0, 0.6)):
            own[found] += rng.uniform(least, most, (len(found), 1)).astype(np.float32) * query
    clusters = _unit(rng.standard_normal((1000, dim), dtype=np.float32))
    clusters += 0.3 * queries[rng.integers(0, QUERIES, len(clusters))]
    mapped = np.lib.format.open_memmap(file, "w+", np.float32, (images, dim))
    mapped[:OWN] = _unit(own)
    for start in range(OWN, images, 8192):
        count = min(8192, images - start)
        noise = rng.standard_normal((count, dim), dtype=np.float32) / np.float32(np.sqrt(dim))
        mapped[start : start + count] = _unit(clusters[rng.integers(0, 1000, count)] + noise)
    mapped.flush()


def _unit(vectors: Vectors) -> Vectors:
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


class Clock:
    """Seconds of each named step."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Count the time since the last mark as this part's."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self.last
        self.last = now


def listwise_method(file: Path, expand: bool, clock: Clock) -> Figures:
    """Stream the file and count the ranks of the judged images."""
    database = np.load(file, mmap_mode="r")
    queries, truth = make_queries(database.shape[1])
    if expand:
        queries = alpha_query_expansion(queries, database).astype(np.float32)
        clock.mark("expansion")
    result = evaluate_descriptors(queries, database, truth)
    clock.mark("ranks")
    return {name: result[name.capitalize()].mAP for name in PROTOCOLS}


def plain_method(file: Path, expand: bool, clock: Clock) -> Figures:
    """Load everything, multiply, sort every column and walk down the lists, as is usual."""
    database = np.load(file)
    clock.mark("load")
    queries, truth = make_queries(database.shape[1])
    scores = np.dot(database, queries.T)
    clock.mark("scores")
    order = np.argsort(-scores, axis=0)
    clock.mark("sort")
    if expand:
        for i in range(QUERIES):
            nearest = order[:10, i]
            weights = np.maximum(scores[nearest, i], 0) ** 2
            queries[i] += weights @ database[nearest]
        queries = _unit(queries)
        scores = np.dot(database, queries.T)
        clock.mark("scores")
        order = np.argsort(-scores, axis=0)
        clock.mark("sort")
    easy, hard, junk = truth.grades.values()
    none = [np.zeros(0, np.int64)] * QUERIES
    protocols = ((easy, none, junk, hard), (easy, hard, junk, none), (hard, none, junk, easy))
    figures = {}
    for name, (first, second, ignored, more) in zip(PROTOCOLS, protocols, strict=True):
        precisions = [
            _walk(order[:, i], np.append(first[i], second[i]), np.append(ignored[i], more[i]))
            for i in range(QUERIES)
        ]
        figures[name] = float(np.mean(precisions))
    clock.mark("walk")
    return figures


def _walk(order: NDArray[np.int64], positives: NDArray[np.int64], junk: NDArray[np.int64]) -> float:
    """The trapezoid AP of one ranked list, by looking for its positives and its junk."""
    ignored = np.flatnonzero(np.isin(order, junk))
    skipped, area = 0, 0.0
    for found, place in enumerate(np.flatnonzero(np.isin(order, positives))):
        while skipped < len(ignored) and ignored[skipped] < place:
            skipped += 1
        rank = int(place) - skipped
        before = found / rank if rank else 1.0
        area += (before + (found + 1) / (rank + 1)) / 2 / len(positives)
    return area


def scores_alone(file: Path, expand: bool, clock: Clock) -> Figures:
    """Read the file and multiply, nothing else: what no method can do without."""
    database = np.load(file, mmap_mode="r")
    queries, _ = make_queries(database.shape[1])
    each_block(queries, database, lambda start, scores: None, lambda nothing: None)
    clock.mark("scores")
    return {}


Method = Callable[[Path, bool, Clock], Figures]
METHODS: dict[str, tuple[Method, bool]] = {
    SCORES_ALONE: (scores_alone, False),
    "listwise": (listwise_method, False),
    "plain": (plain_method, False),
    "listwise + αQE": (listwise_method, True),
    "plain + αQE": (plain_method, True),
}


def evaluation_call(method: str, file: Path, answer: Path) -> Callable[[], object]:
    """A call that evaluates the database in a file, and leaves its figures in another."""
    function, expand = METHODS[method]

    def call() -> None:
        clock = Clock()
        figures = function(file, expand, clock)
        answer.write_text(json.dumps({"figures": figures, "parts": clock.parts}))

    return call


def run(
    sizes: Sequence[int] = SIZES,
    dim: int = 2048,
    folder: Path | None = None,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[Row]:
    """Evaluate a database of each size by each method, one process at a time.

    Args:
        sizes: images in the database, the benchmark's own included.
        dim: dimensions of a descriptor.
        folder: where the descriptors are written for a while; the system's temporary one if None.
        on_start: told what begins.
    """
    if any(size < OWN for size in sizes):
        raise InputError(f"the benchmark has {OWN} images of its own: give sizes from there up")
    for size in sorted(sizes):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            file, answer = Path(name) / "database.npy", Path(name) / "answer.json"
            on_start(f"making {size:,} descriptors")
            write_database(file, size, dim)
            for method in METHODS:
                on_start(f"{method} among {size:,}")
                limit = int(available_memory() * 0.9)
                try:
                    found = measure(evaluation_call, method, file, answer, memory_limit=limit)
                except DoesNotFit:
                    reason = f"does not fit in {limit / 1e9:.0f} GB"
                    yield Row(size, method, None, None, {}, {}, reason)
                    continue
                said = json.loads(answer.read_text())
                yield Row(
                    size,
                    method,
                    found.seconds,
                    found.extra_bytes,
                    said["parts"],
                    said["figures"],
                    None,
                )
