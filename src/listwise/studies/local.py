"""Evaluate local features on a benchmark (the first rows of Table 2), alone and as re-ranking."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data import image_size
from listwise.data.catalog import Benchmark, find_dataset
from listwise.descriptors import DescriptorFile, Model, extract, load_model
from listwise.errors import InputError
from listwise.evaluation import evaluate_scores
from listwise.local.pairs import Pair
from listwise.local.rerank import MINIMUM, TOP
from listwise.local.verification import Verification
from listwise.progress import counting
from listwise.results.local import (
    LocalBenchmark,
    ProgressBar,
    Scores,
    benchmark_files,
    describe_local_features,
)
from listwise.results.report import ModelSearch, TableRow, report_models, write_report
from listwise.results.table import figures_of


@dataclass(frozen=True, eq=False)
class LocalRow:
    """Result of one search method: scores [Q, N], and the verified pairs (query, image)."""

    name: str
    scores: Scores
    verified: Mapping[Pair, Verification]


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
) -> tuple[Benchmark, list[LocalRow]]:
    """Search a judged benchmark with ASMK* and with models, each without and with verification.

    Args:
        benchmark: name or folder of a judged data set.
        codebook: codebook file, learned from other photos.
        folder: where features, descriptors and index are kept for the next call.
        data: folder that holds the data sets.
        delf: folder of a DELF network; Hessian-affine features by default.
        count: maximum number of features per photo.
        models: folders of models whose global search is evaluated, too.
        descriptors: folders of descriptors that an earlier call kept; they need no model.
        verify: verify the first 100 results of each query.
        device: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
        workers: number of processes; by default it depends on the cores.
        progress: opens progress bars.
        on_note: called with sentences for the user.

    Returns:
        The benchmark, and one row per search method.
    """
    judged = find_dataset(benchmark, data).benchmark()
    kept = {str(path): global_scores(judged, path) for path in descriptors}
    local = describe_local_features(
        judged,
        codebook,
        folder,
        delf=delf,
        count=count,
        device=device,
        workers=workers,
        progress=progress,
        on_note=on_note,
    )
    tables = {f"{local.name}-ASMK*": local.scores, **kept}
    for path in models:
        network = load_model(path, device)
        own = local.folder / f"model-{network.fingerprint[:12]}"
        with progress(f"describing with {path}", judged.photo_count) as advance:
            describe_globally(
                judged, network, own, workers=workers, on_progress=advance, on_note=on_note
            )
        tables[str(path)] = global_scores(judged, own)
    if not verify:
        return judged, [LocalRow(name, table, {}) for name, table in tables.items()]
    return judged, _verify(tables, local, workers, progress)


def _verify(
    tables: Mapping[str, Scores], local: LocalBenchmark, workers: int | None, progress: ProgressBar
) -> list[LocalRow]:
    """Return two rows per table of scores [Q, N]: without and with verification."""
    pairs = {pair for table in tables.values() for pair in first_pairs(table)}
    with progress("verifying", len(pairs)) as advance:
        verified = local.verify(pairs, workers, advance)
    return [
        row
        for name, table in tables.items()
        for row in (LocalRow(name, table, {}), verified_row(f"{name} + SP", table, verified))
    ]


def first_pairs(table: Scores) -> list[Pair]:
    """Return the pairs of each query with its first 100 images, by scores [Q, N]."""
    return [
        (query, int(image))
        for query, row in enumerate(table)
        for image in np.argsort(-row, kind="stable")[:TOP]
    ]


def verified_row(name: str, table: Scores, verified: Mapping[Pair, Verification]) -> LocalRow:
    """Re-rank the first 100 images of each query by inliers, then by score.

    Shapes: `table` has scores [Q, N] from -1 to 1; `verified` has the results of its `first_pairs`.
    """
    reranked = np.array(table, dtype=np.float64)
    used = {pair: verified[pair] for pair in first_pairs(table)}
    for pair, found in used.items():
        if found.inliers >= MINIMUM:
            # Scores are from -1 to 1, so more inliers always rank first.
            reranked[pair] += 2 * found.inliers
    return LocalRow(name, reranked, used)


def describe_globally(
    benchmark: Benchmark,
    model: Model,
    folder: Path,
    *,
    on_progress: Callable[[int], object] = lambda count: None,
    **settings: Any,
) -> None:
    """Extract the global descriptors of a benchmark into a folder, for `global_scores`.

    Existing files of the same model are used. `settings` are those of `extract`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, images in benchmark_files(benchmark, folder, "parquet").items():
        if path.exists():
            DescriptorFile.open(path).require(model.fingerprint)
            on_progress(len(images))
        else:
            extract(model, images, path, strict=True, on_progress=on_progress, **settings)


def global_scores(benchmark: Benchmark, folder: Path) -> Scores:
    """Compute the scores of the descriptors that `describe_globally` wrote: [Q, N]."""
    files = []
    for path, images in benchmark_files(benchmark, folder, "parquet").items():
        file = DescriptorFile.open(path)
        sizes = [image_size(photo, images.box(row)) for row, photo in enumerate(images.paths)]
        if file.ids != images.ids or sizes != [tuple(size) for size in file.sizes.tolist()]:
            raise InputError(
                f"{path} does not hold the photos of {benchmark.name} at their current size: "
                "extract them again"
            )
        files.append(file)
    queries, database = files
    queries.require(database.model)
    if queries.settings != database.settings:
        raise InputError(
            f"queries and database in {folder} have different settings: extract them again"
        )
    return queries.read() @ database.read().T


def figures_of_row(benchmark: Benchmark, row: LocalRow) -> dict[str, dict[str, float]]:
    """Evaluate a row: protocol -> metric -> value from 0 to 1."""
    return figures_of(evaluate_scores(row.scores, benchmark.judged))


def write_local_report(
    path: str | Path,
    benchmark: Benchmark,
    rows: Sequence[LocalRow],
    *,
    command: str = "",
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Write an HTML report of the last two rows, with the points that were verified.

    The table of the report shows all rows. The other arguments are those of `write_report`.
    """

    def search(row: LocalRow) -> ModelSearch:
        def points(query: int, image: int) -> NDArray[np.floating] | None:
            found = row.verified.get((query, image))
            return None if found is None else np.hstack([found.query_points, found.points])

        matches = points if row.verified else None
        return ModelSearch.of_scores(row.name, row.scores, benchmark.judged, matches)

    others, shown = rows[:-2], rows[-2:]  # the last search, without and with verification
    paths = benchmark.queries.paths, benchmark.database.paths
    return write_report(
        path,
        f"{benchmark.name}: local features",
        report_models([search(row) for row in shown], benchmark.judged, *paths),
        benchmark=benchmark.name,
        command=command,
        table=[TableRow(row.name, figures_of_row(benchmark, row)) for row in others],
        on_progress=on_progress,
    )
