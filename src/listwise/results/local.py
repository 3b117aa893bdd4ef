"""Local features of a benchmark: extraction, ASMK* scores, and a search of the best quality."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from listwise.data import Images, image_size
from listwise.data.catalog import Benchmark
from listwise.errors import InputError
from listwise.evaluation import Results, evaluate_scores
from listwise.local.asmk import AsmkIndex
from listwise.local.codebook import Codebook
from listwise.local.extract import (
    Extractor,
    HessianAffine,
    extract_features,
    open_extractor,
)
from listwise.local.rerank import MINIMUM, TOP
from listwise.local.storage import FeatureFile
from listwise.local.workers import verify_pairs
from listwise.progress import counting
from listwise.results.describe import BenchmarkDescriptors
from listwise.search.refinement import DIFFUSED, diffuse

COUNT: Final = 1000
"""Maximum number of Hessian-affine features per photo; an index stores about as many."""

Scores = NDArray[np.floating]

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Opens a progress bar with a title and a number of steps; yields a function that advances it."""


@dataclass(frozen=True, eq=False)
class LocalBenchmark:
    """The local features of a benchmark; `describe_local_features` returns one.

    Attributes:
        name: kind of the features, DELF or HesAff-rSIFT.
        folder: where features and index are stored.
        queries: features of the queries, inside their boxes.
        database: features of the database.
        scores: ASMK* scores [Q, N].
    """

    name: str
    folder: Path
    queries: FeatureFile
    database: FeatureFile
    scores: Scores


def describe_local_features(
    benchmark: Benchmark,
    codebook: str | Path,
    folder: Path | None = None,
    *,
    delf: str | Path | None = None,
    count: int | None = None,
    device: str = "auto",
    workers: int | None = None,
    progress: ProgressBar = counting,
    on_note: Callable[[str], object] = lambda note: None,
) -> LocalBenchmark:
    """Extract the local features of a benchmark, index its database, and search it with ASMK*.

    Args:
        benchmark: queries, database and ground truth.
        codebook: codebook file, learned from other photos.
        folder: where features and index are kept for the next call.
        delf: folder of a DELF network; Hessian-affine features by default.
        count: maximum number of features per photo.
        device: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
        workers: number of processes; by default it depends on the cores.
        progress: opens progress bars.
        on_note: called with sentences for the user.
    """
    if benchmark.labelled:
        raise InputError(
            f"{benchmark.name} is a labelled set: give a benchmark with judged queries, like "
            "roxford5k"
        )
    words = Codebook.load(codebook, device)
    extractor = open_extractor(delf, count, device)
    words.require(extractor.name)
    place = folder or Path(f"local-{benchmark.name}-{'delf' if delf else 'hesaff'}")
    with progress("extracting", benchmark.photo_count) as advance:
        queries, database = describe_locally(
            benchmark, extractor, place, workers=workers, on_progress=advance, on_note=on_note
        )
    with progress("indexing and searching", benchmark.photo_count) as advance:
        index = AsmkIndex.create(place / f"index-{words.fingerprint[:12]}", words)
        index.add_file(database, advance)
        scores = np.zeros((len(queries), len(database)))
        for row in range(len(queries)):
            found = index.search(queries.read(row).descriptors, len(index))
            for score, photo in zip(*found, strict=True):
                if photo in database.positions:
                    scores[row, database.positions[photo]] = score
            advance(1)
    size = index.info()["bytes_per_photo"]
    on_note(f"{len(index)} photos indexed, {size / 1000:.1f} kB each")
    name = "DELF" if delf else "HesAff-rSIFT"
    return LocalBenchmark(name, place, queries, database, scores)


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
