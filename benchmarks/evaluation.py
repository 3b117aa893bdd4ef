"""Benchmark evaluation among distractors: counting ranks, and sorting a score matrix."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import DoesNotFit, measure, unit_rows
from listwise.blocks import each_block
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries, evaluate_descriptors
from listwise.search import alpha_query_expansion

QUERIES = 70
OWN = 5_000  # images of the benchmark itself; the others are distractors
PROTOCOLS = ("easy", "medium", "hard")

Figures = dict[str, float]
Vectors = NDArray[np.float32]


def _figures_text(figures: Figures) -> str:
    return " / ".join(f"{100 * value:.2f}" for value in figures.values())


def _parts_text(parts: Figures) -> str:
    return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())


@dataclass(frozen=True)
class EvaluationMeasurement:
    """A method at a database size, or why it was skipped.

    `parts` are the seconds of the steps of a method, and `figures` its mAPs. `faster` is the speed
    relative to the plain method, `apart` the largest difference between the mAPs of the two.
    """

    images: Annotated[int, "images", "{:,}"]
    method: Annotated[str, "method"]
    seconds: Annotated[float | None, "s", "{:.2f}"] = None
    extra_bytes: Annotated[int | None, "MB", "{:,.0f}", 1e-6] = None
    figures: Annotated[Figures, "Easy / Medium / Hard", _figures_text] = field(default_factory=dict)
    faster: Annotated[float | None, "faster", "{:.1f} ×"] = None
    apart: Annotated[float | None, "mAPs apart", "{:.0e}"] = None
    parts: Annotated[Figures, "steps", _parts_text] = field(default_factory=dict)
    skipped: str | None = None


def make_queries(dim: int) -> tuple[Vectors, JudgedQueries]:
    """Generate queries [Q, dim] and their ground truth: easy, hard and junk images."""
    rng = np.random.default_rng(0)
    queries = unit_rows(rng.standard_normal((QUERIES, dim), dtype=np.float32))
    parts = [np.split(rng.permutation(OWN)[:220].astype(np.int64), [50, 120]) for _ in queries]
    easy, hard, junk = ([part[i] for part in parts] for i in range(3))
    names = [f"image{i}" for i in range(OWN)]
    asked, boxes = [f"query{i}" for i in range(QUERIES)], [None] * QUERIES
    truth = JudgedQueries.revisited(names, asked, boxes, easy=easy, hard=hard, junk=junk)
    return queries, truth


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
    clusters = unit_rows(rng.standard_normal((1000, dim), dtype=np.float32))
    clusters += 0.3 * queries[rng.integers(0, QUERIES, len(clusters))]
    mapped = np.lib.format.open_memmap(file, "w+", np.float32, (images, dim))
    mapped[:OWN] = unit_rows(own)
    for start in range(OWN, images, 8192):
        count = min(8192, images - start)
        noise = rng.standard_normal((count, dim), dtype=np.float32) / np.float32(np.sqrt(dim))
        mapped[start : start + count] = unit_rows(clusters[rng.integers(0, 1000, count)] + noise)
    mapped.flush()


class Clock:
    """A stopwatch for named steps."""

    def __init__(self) -> None:
        self.parts: Figures = defaultdict(float)
        self.last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Add the time since the last mark to this part."""
        now = time.perf_counter()
        self.parts[part] += now - self.last
        self.last = now


def listwise_method(file: Path, expand: bool, clock: Clock) -> Figures:
    """Read the file in blocks and count the ranks of the judged images."""
    database = np.load(file, mmap_mode="r")
    queries, truth = make_queries(database.shape[1])
    if expand:
        queries = alpha_query_expansion(queries, database).astype(np.float32)
        clock.mark("expansion")
    result = evaluate_descriptors(queries, database, truth)
    clock.mark("ranks")
    return {name: result[name.capitalize()].mAP for name in PROTOCOLS}


def plain_method(file: Path, expand: bool, clock: Clock) -> Figures:
    """Load everything, multiply, sort every column and scan the lists: the usual method."""
    database = np.load(file)
    clock.mark("load")
    queries, truth = make_queries(database.shape[1])
    scores, order = _sort(database, queries, clock)
    if expand:
        for i in range(QUERIES):
            nearest = order[:10, i]
            weights = np.maximum(scores[nearest, i], 0) ** 2
            queries[i] += weights @ database[nearest]
        _, order = _sort(database, unit_rows(queries), clock)
    figures = {}
    for name in PROTOCOLS:
        level = name.capitalize()
        precisions = [
            _walk(order[:, i], truth.positives(level, i), truth.junk(level, i))
            for i in range(QUERIES)
        ]
        figures[name] = float(np.mean(precisions))
    clock.mark("walk")
    return figures


def _sort(database: Vectors, queries: Vectors, clock: Clock) -> tuple[Vectors, NDArray[np.int64]]:
    """Return scores [N, Q], and the images of each column by descending score."""
    scores = np.dot(database, queries.T)
    clock.mark("scores")
    order = np.argsort(-scores, axis=0)
    clock.mark("sort")
    return scores, order


def _walk(order: NDArray[np.int64], positives: NDArray[np.int64], junk: NDArray[np.int64]) -> float:
    """Return the trapezoid AP of one ranked list, from its positives and junk."""
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
    """Read the file and compute the scores, which every method has to do."""
    database = np.load(file, mmap_mode="r")
    queries, _ = make_queries(database.shape[1])
    each_block(queries, database, lambda start, scores: None, lambda nothing: None)
    clock.mark("scores")
    return {}


Method = Callable[[Path, bool, Clock], Figures]
METHODS: dict[str, tuple[Method, bool]] = {
    "scores alone": (scores_alone, False),
    "plain": (plain_method, False),
    "listwise": (listwise_method, False),
    "plain + αQE": (plain_method, True),
    "listwise + αQE": (listwise_method, True),
}


def evaluation_call(method: str, file: Path) -> Callable[[], tuple[Figures, Figures]]:
    """Return a call that evaluates the database in a file: metrics, and seconds of its parts."""
    function, expand = METHODS[method]

    def call() -> tuple[Figures, Figures]:
        clock = Clock()
        return function(file, expand, clock), dict(clock.parts)

    return call


def run(
    sizes: Sequence[int] = (100_000, 1_000_000),
    dim: int = 2048,
    folder: Path | None = None,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[EvaluationMeasurement]:
    """Measure each method at each database size, one process at a time.

    Args:
        sizes: numbers of descriptors in the database.
        dim: dimensions of a descriptor.
        folder: folder for temporary files: up to 20 GB for a million descriptors.
        on_start: called with what is measured next.
    """
    if any(size < OWN for size in sizes):
        raise InputError(f"`sizes` must be {OWN} or more: the benchmark itself has {OWN} images")
    for size in sorted(sizes):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            file = Path(name) / "database.npy"
            on_start(f"generating {size:,} descriptors")
            write_database(file, size, dim)
            found: dict[str, EvaluationMeasurement] = {}
            for method in METHODS:
                on_start(f"{method} among {size:,}")
                plain = found.get(method.replace("listwise", "plain"))
                found[method] = measure_method(method, file, size, plain)
                yield found[method]


def measure_method(
    method: str, file: Path, size: int, plain: EvaluationMeasurement | None
) -> EvaluationMeasurement:
    """Measure a method on the database in a file, relative to the plain one if it was measured."""
    try:
        measured = measure(evaluation_call, method, file)
    except DoesNotFit as error:
        return EvaluationMeasurement(size, method, skipped=str(error))
    figures, parts = measured.result
    found = EvaluationMeasurement(
        size, method, measured.seconds, measured.extra_bytes, figures, parts=parts
    )
    if plain is None or plain.seconds is None:
        return found
    apart = max(abs(value - plain.figures[name]) for name, value in figures.items())
    return replace(found, faster=plain.seconds / measured.seconds, apart=apart)
