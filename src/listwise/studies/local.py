"""Evaluate local features on a benchmark (the first rows of Table 2), alone and as re-ranking."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data import image_size
from listwise.data.catalog import Benchmark, find_dataset
from listwise.descriptors import DescriptorFile, Model, extract, load_model
from listwise.errors import InputError
from listwise.local.asmk import AsmkIndex
from listwise.local.codebook import Codebook
from listwise.local.extract import open_extractor
from listwise.local.rerank import MINIMUM, TOP
from listwise.local.storage import FeatureFile
from listwise.local.verification import Verification
from listwise.local.workers import Pair, verify_pairs
from listwise.progress import counting
from listwise.results.local import benchmark_files, describe_locally
from listwise.results.report import ModelSearch

Scores = NDArray[np.floating]
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Opens a progress bar with a title and a number of steps; yields a function that advances it."""


def evaluate_local(
    benchmark: str,
    codebook: str | Path,
    folder: Path | None = None,
    *,
    data: Path | None = None,
    delf: Path | None = None,
    count: int | None = None,
    models: Sequence[Path] = (),
    descriptors: Sequence[Path] = (),
    verify: bool = True,
    device: str = "auto",
    workers: int | None = None,
    progress: ProgressBar = counting,
    on_note: Callable[[str], object] = lambda note: None,
) -> tuple[Benchmark, list[ModelSearch]]:
    """Search a judged benchmark with ASMK* and with models, each without and with verification.

    Args:
        benchmark: name or folder of a benchmark.
        codebook: codebook learned from other photos.
        folder: folder for features, descriptors and index; by default local-BENCHMARK-FEATURES.
        data: folder that contains the data sets; by default data.
        delf: folder of deep local features (DELF) that `listwise local train` wrote; by default
            HesAff-rSIFT is used instead.
        count: maximum number of local features per photo; by default 2000, or 1000 with `delf`.
        models: also evaluate this model, without and with verification; several can be given.
        descriptors: also evaluate the model whose descriptors are stored in this folder; several
            can be given.
        verify: also re-rank the first 100 photos by verification.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        workers: number of processes that decode photos; by default from the number of CPU cores.
        progress: opens progress bars.
        on_note: called with sentences for the user.

    Returns:
        The benchmark, and its results with each search method.
    """
    judged = find_dataset(benchmark, data).benchmark()
    if judged.labelled:
        raise InputError(
            f"{judged.name} is a labelled set: give a benchmark with judged queries, like roxford5k"
        )
    kept = {str(path): global_scores(judged, path) for path in descriptors}
    words = Codebook.load(codebook, device)
    extractor = open_extractor(delf, count, device)
    words.require(extractor.name)
    place = folder or Path(f"local-{judged.name}-{'delf' if delf else 'hesaff'}")
    with progress("extracting", judged.photo_count) as advance:
        queries, images = describe_locally(
            judged, extractor, place, workers=workers, on_progress=advance, on_note=on_note
        )
    index = AsmkIndex.create(place / f"index-{words.fingerprint[:12]}", words)
    with progress("indexing and searching", judged.photo_count) as advance:
        found = _asmk_scores(index, queries, images, advance)
    size = index.info()["bytes_per_photo"]
    on_note(f"{len(index)} photos indexed, {size / 1000:.1f} kB each")
    tables = {f"{'DELF' if delf else 'HesAff-rSIFT'}-ASMK*": found, **kept}
    for path in models:
        network = load_model(path, device)
        own = place / f"model-{network.fingerprint[:12]}"
        with progress(f"describing with {path}", judged.photo_count) as advance:
            tables[str(path)] = global_scores(
                judged, own, network, workers=workers, on_progress=advance, on_note=on_note
            )
    verified: dict[Pair, Verification] = {}
    if verify:
        pairs = {pair for table in tables.values() for pair in first_pairs(table)}
        with progress("verifying", len(pairs)) as advance:
            verified = verify_pairs(queries, images, pairs, workers, advance)
    searches = []
    for name, table in tables.items():
        searches.append(ModelSearch.of_scores(name, table, judged.judged))
        if verify:
            used = {pair: verified[pair] for pair in first_pairs(table)}
            reranked, points = rerank_scores(table, used), partial(_points, used)
            searches.append(ModelSearch.of_scores(f"{name} + SP", reranked, judged.judged, points))
    return judged, searches


def _asmk_scores(
    index: AsmkIndex,
    queries: FeatureFile,
    database: FeatureFile,
    on_progress: Callable[[int], object],
) -> Scores:
    """Add the database to an index, and return the ASMK* scores of the queries: [Q, N]."""
    index.add_file(database, on_progress)
    scores = np.zeros((len(queries), len(database)))
    for row, query in enumerate(queries):
        for score, photo in zip(*index.search(query.descriptors, len(index)), strict=True):
            if photo in database.positions:
                scores[row, database.positions[photo]] = score
        on_progress(1)
    return scores


def first_pairs(table: Scores) -> list[Pair]:
    """Return the pairs of each query with its first 100 images, by scores [Q, N]."""
    return [
        (query, int(image))
        for query, row in enumerate(table)
        for image in np.argsort(-row, kind="stable")[:TOP]
    ]


def rerank_scores(table: Scores, verified: Mapping[Pair, Verification]) -> Scores:
    """Re-rank the verified images of each query by inliers, then by score: [Q, N] -> [Q, N].

    Scores are from -1 to 1 before, so more inliers always rank first.
    """
    reranked = np.array(table, dtype=np.float64)
    for pair, found in verified.items():
        if found.inliers >= MINIMUM:
            reranked[pair] += 2 * found.inliers
    return reranked


def _points(
    verified: Mapping[Pair, Verification], query: int, image: int
) -> NDArray[np.floating] | None:
    """Return the points of a query and an image that match, if they were verified."""
    found = verified.get((query, image))
    return None if found is None else np.hstack([found.query_points, found.points])


def global_scores(
    benchmark: Benchmark,
    folder: Path,
    model: Model | None = None,
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    **settings: Any,
) -> Scores:
    """Compute the scores of the global descriptors in a folder: [Q, N].

    A model extracts those that are missing; `settings` are those of `extract`.
    """
    files = []
    for path, images in benchmark_files(benchmark, folder, "parquet").items():
        if model is None or path.exists():
            file = DescriptorFile.open(path)
            on_progress(len(images))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            file = extract(model, images, path, strict=True, on_progress=on_progress, **settings)
        sizes = [image_size(photo, images.box(row)) for row, photo in enumerate(images.paths)]
        if file.ids != images.ids or sizes != [tuple(size) for size in file.sizes.tolist()]:
            raise InputError(
                f"{path} does not hold the photos of {benchmark.name} at their current size: "
                "extract them again"
            )
        files.append(file)
    queries, database = files
    database.require(queries.model if model is None else model.fingerprint)
    queries.require(database.model)
    if queries.settings != database.settings:
        raise InputError(
            f"queries and database in {folder} have different settings: extract them again"
        )
    return queries.read() @ database.read().T
