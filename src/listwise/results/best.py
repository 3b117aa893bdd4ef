"""Evaluate global descriptors and local features together, as a search with `quality="best"`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from listwise.data.catalog import Benchmark
from listwise.evaluation import Results, evaluate_scores
from listwise.local.extract import HessianAffine
from listwise.local.pairs import verify_pairs
from listwise.local.rerank import MINIMUM, TOP
from listwise.local.storage import FeatureFile
from listwise.machine import Machine
from listwise.progress import counting
from listwise.results.describe import BenchmarkDescriptors
from listwise.results.local import describe_locally
from listwise.search.refinement import diffuse
from listwise.search.reranking import DIFFUSED

COUNT: Final = 1000
"""Maximum number of Hessian-affine features per photo; an index stores about as many."""

FeatureFiles = tuple[FeatureFile, FeatureFile]
"""Local features of the queries and of the database."""


def benchmark_features(
    benchmark: Benchmark, folder: Path | None = None, workers: int | None = None
) -> FeatureFiles:
    """Extract the Hessian-affine features of a benchmark, or open those of an earlier call.

    They are kept in `folder`, by default local-NAME-1000 in the current folder.
    """
    place = folder or Path(f"local-{benchmark.name}-{COUNT}")
    with counting("extracting local features", benchmark.photo_count) as advance:
        return describe_locally(
            benchmark, HessianAffine(COUNT), place, workers=workers, on_progress=advance
        )


def evaluate_best(
    described: BenchmarkDescriptors,
    features: FeatureFiles,
    workers: int | None = None,
    on_pair: Callable[[int], object] = lambda count: None,
) -> tuple[Results, float]:
    """Verify the first 100 images of each query, and re-rank by diffusion from those that match.

    Args:
        described: global descriptors of a benchmark.
        features: local features of the same benchmark.
        workers: number of processes that verify; one per core by default.
        on_pair: called with the number of pairs of photos just verified.

    Returns:
        The metrics of each protocol, and the time per query in milliseconds with all processes:
        search, verification and diffusion, without the description of the query.
    """
    started = time.perf_counter()
    scores: NDArray[np.float64] = described.scores().astype(np.float64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :DIFFUSED]
    pairs = [(query, int(image)) for query, row in enumerate(order) for image in row[:TOP]]
    processes = Machine.detect("cpu").cores if workers is None else workers
    found = verify_pairs(*features, pairs, processes, on_pair)
    verified = np.zeros(scores.shape, bool)
    for pair, each in found.items():
        verified[pair] = each.inliers >= MINIMUM
    for query, images in enumerate(order):
        near = diffuse(scores[query, images], described.database[images], verified[query, images])
        # Similarities are at most 1, so the short list stays ahead of all other images.
        scores[query, images] = 2 + near
    milliseconds = 1000 * (time.perf_counter() - started) / max(1, len(scores))
    return evaluate_scores(scores, described.benchmark.judged), milliseconds
