"""Local features of a benchmark: extraction, and a search of the best quality."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from listwise.data import Images, image_size
from listwise.data.catalog import Benchmark
from listwise.errors import InputError
from listwise.evaluation import Results, evaluate_scores
from listwise.local.extract import (
    Extractor,
    HessianAffine,
    extract_features,
)
from listwise.local.rerank import MINIMUM, TOP
from listwise.local.storage import FeatureFile
from listwise.local.workers import verify_pairs
from listwise.progress import counting
from listwise.results.describe import BenchmarkDescriptors
from listwise.search.refinement import DIFFUSED, diffuse

COUNT: Final = 1000
"""Maximum number of Hessian-affine features per photo; an index stores about as many."""


def describe_locally(
    benchmark: Benchmark,
    extractor: Extractor,
    folder: Path,
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    **settings: Any,
) -> tuple[FeatureFile, FeatureFile]:
    """Extract the local features of the queries, inside their boxes, and of the database.

    The files are kept in `folder` and used by the next call with the same extractor and photos. An
    unreadable photo is an error, since the metrics would not be comparable. `settings` are those of
    `extract_features`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for path, images in benchmark_files(benchmark, folder, "features").items():
        if path.exists():
            file = FeatureFile.open(path)
            file.require(extractor.name)
            sizes = [image_size(photo) for photo in images.paths]
            if file.ids != images.ids or sizes != [tuple(size) for size in file.sizes.tolist()]:
                raise InputError(
                    f"{path} does not hold the photos of {benchmark.name} at their current size: "
                    "give another folder"
                )
            on_progress(len(images))
        else:
            file = extract_features(
                images, path, extractor, strict=True, on_progress=on_progress, **settings
            )
        files.append(file)
    return files[0], files[1]


def benchmark_files(benchmark: Benchmark, folder: Path, ending: str) -> dict[Path, Images]:
    """Return the files of the queries and of the database in a folder, with their photos."""
    return {
        folder / f"queries.{ending}": benchmark.queries,
        folder / f"database.{ending}": benchmark.database,
    }


def evaluate_best(
    described: BenchmarkDescriptors, features: str | Path | None = None, workers: int | None = None
) -> tuple[Results, float]:
    """Verify the first 100 images of each query, and re-rank by diffusion from those that match.

    A search with `quality="best"` combines global descriptors and local features in this way.

    Args:
        described: global descriptors of a benchmark.
        features: folder for the Hessian-affine features of the benchmark, which later calls reuse;
            by default local-NAME-1000 in the current folder.
        workers: number of processes; one per core by default.

    Returns:
        The metrics of each protocol, and the time per query in milliseconds with all processes:
        search, verification and diffusion, without the description of the query.
    """
    benchmark = described.benchmark
    folder = Path(features or f"local-{benchmark.name}-{COUNT}")
    with counting("extracting local features", benchmark.photo_count) as advance:
        files = describe_locally(
            benchmark, HessianAffine(COUNT), folder, workers=workers, on_progress=advance
        )
    started = time.perf_counter()
    scores: NDArray[np.float64] = described.scores().astype(np.float64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :DIFFUSED]
    pairs = [(query, int(image)) for query, row in enumerate(order) for image in row[:TOP]]
    found = verify_pairs(*files, pairs, workers)
    verified = np.zeros(scores.shape, bool)
    for pair, each in found.items():
        verified[pair] = each.inliers >= MINIMUM
    for query, images in enumerate(order):
        near = diffuse(scores[query, images], described.database[images], verified[query, images])
        # Similarities are at most 1, so the short list stays ahead of all other images.
        scores[query, images] = 2 + near
    milliseconds = 1000 * (time.perf_counter() - started) / max(1, len(scores))
    return evaluate_scores(scores, benchmark.judged), milliseconds
