"""Benchmark re-ranking with stored local features: accuracy and latency on judged queries."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import percentiles, timed
from listwise.data import Box, load_image
from listwise.data.catalog import Benchmark
from listwise.data.workers import worker_context
from listwise.descriptors import load_model
from listwise.errors import InputError
from listwise.evaluation import evaluate_scores
from listwise.local.compact import encode_features
from listwise.local.features import Features, photo_features
from listwise.local.rerank import TOP, Reranker
from listwise.machine import core_count
from listwise.results.describe import BenchmarkDescriptors, describe_benchmark
from listwise.results.evaluate import open_benchmark


@dataclass(frozen=True)
class RerankMeasurement:
    """A ranking of all queries: mAP of each protocol in percent, and latency of re-ranking.

    The latency includes the extraction of the query's local features. Features that are not
    stored have none, because they are computed before the time is measured.
    """

    method: Annotated[str, "first 100 results"]
    easy: Annotated[float | None, "Easy", "{:.1f}"]
    medium: Annotated[float | None, "Medium", "{:.1f}"]
    hard: Annotated[float | None, "Hard", "{:.1f}"]
    p50: Annotated[float | None, "p50 ms", "{:.0f}"] = None
    p99: Annotated[float | None, "p99 ms", "{:.0f}"] = None
    bytes_per_photo: Annotated[float | None, "bytes/photo", "{:,.0f}"] = None


@dataclass(frozen=True)
class _Photo:
    """A photo of the database, as a re-ranker takes it."""

    path: str
    box: Box | None = None


def run(
    model: str | Path,
    benchmark: Benchmark | str | Path,
    data: str | Path | None = None,
    max_side: int | None = None,
    queries: int | None = None,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[RerankMeasurement]:
    """Measure the first 100 results of each query: as found, and re-ranked in two ways.

    Args:
        model: the folder of a model, whose descriptors find the results.
        benchmark: the name or folder of a data set with Easy, Medium and Hard protocols.
        data: folder that holds the data sets; `data` by default.
        max_side: long side that larger photos are reduced to before they are described.
        queries: measure this number of queries, evenly spread; all by default.
        on_start: called with what is measured next.
    """
    opened = open_benchmark(benchmark, data)
    if opened.labelled:
        raise InputError(f"{benchmark} has no judged queries: give roxford5k or rparis6k")
    if queries is not None:
        chosen = np.linspace(0, len(opened.judged) - 1, min(queries, len(opened.judged)))
        opened = opened.subset(chosen.round().astype(int), np.arange(len(opened.database)))
    on_start(f"describing {opened.photo_count:,} photos")
    described = describe_benchmark(load_model(model), opened, max_side=max_side)
    order = np.argsort(-described.scores(), axis=1, kind="stable")
    yield _measurement("as found", described, order)
    wanted = np.unique(order[:, :TOP])
    on_start(f"extracting local features of {len(wanted):,} photos")
    paths = [str(opened.database.paths[place]) for place in wanted]
    with ProcessPoolExecutor(core_count(), mp_context=worker_context()) as pool:
        found = dict(
            zip(wanted.tolist(), pool.map(photo_features, paths, chunksize=8), strict=True)
        )
    stored = {place: encode_features(features) for place, features in found.items()}
    on_start("re-ranking with stored features")
    reranker = Reranker()
    try:
        size = float(np.mean([len(content) for content in stored.values()]))
        ranked, seconds = _rerank(reranker, described, order, stored)
        took = percentiles(seconds)
        yield _measurement("re-ranked, stored features", described, ranked, *took, size)
        on_start("re-ranking with fresh features")
        ranked, _ = _rerank(_Known(found, paths, wanted.tolist()), described, order, {})
        yield _measurement("re-ranked, fresh features", described, ranked)
    finally:
        reranker.close()


class _Known(Reranker):
    """A re-ranker that has the features of all photos."""

    def __init__(self, found: dict[int, Features], paths: list[str], places: list[int]) -> None:
        super().__init__()
        self._known = {path: found[place] for path, place in zip(paths, places, strict=True)}

    def features(self, entry: object) -> Features:
        return self._known[entry.path]  # type: ignore[attr-defined]


def _rerank(
    reranker: Reranker,
    described: BenchmarkDescriptors,
    order: NDArray[np.int64],
    stored: dict[int, bytes],
) -> tuple[NDArray[np.int64], list[float]]:
    """Re-rank the first results of each query: the new order [Q, N], and the seconds of each."""
    opened, ranked, seconds = described.benchmark, order.copy(), []
    for number, row in enumerate(order):
        photo = load_image(opened.queries.paths[number])
        box = None if opened.queries.boxes is None else opened.queries.boxes[number]
        first = row[:TOP].tolist()
        entries = [_Photo(str(opened.database.paths[place])) for place in first]
        codes = [stored[place] for place in first] if stored else []
        call = partial(reranker.rerank, [photo], entries, [box], stored=codes)
        took, found = timed(call)
        seconds.append(took)
        ranked[number, :TOP] = row[[each.position for each in found]]
    return ranked, seconds


def _measurement(
    method: str,
    described: BenchmarkDescriptors,
    order: NDArray[np.int64],
    p50: float | None = None,
    p99: float | None = None,
    size: float | None = None,
) -> RerankMeasurement:
    scores = np.empty(order.shape)
    np.put_along_axis(scores, order, -np.arange(order.shape[1], dtype=float)[None], axis=1)
    found = evaluate_scores(scores, described.benchmark.judged)
    easy, medium, hard = (
        100 * found[name].mAP if name in found else None for name in ("Easy", "Medium", "Hard")
    )
    return RerankMeasurement(method, easy, medium, hard, p50, p99, size)
