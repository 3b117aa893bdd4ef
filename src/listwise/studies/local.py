"""Evaluate local features on a benchmark (the first rows of Table 2), alone and as re-ranking."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data import Images, image_size
from listwise.data.catalog import Benchmark, find_dataset
from listwise.descriptors import DescriptorFile, Model, extract, load_model
from listwise.errors import InputError
from listwise.evaluation import evaluate_scores
from listwise.local.asmk.codebook import Codebook
from listwise.local.asmk.index import AsmkIndex
from listwise.local.extract import Extractor, extract_features, open_extractor
from listwise.local.pairs import Pair, verify_pairs
from listwise.local.rerank import MINIMUM, TOP
from listwise.local.storage import FeatureFile
from listwise.local.verification import Verification
from listwise.machine import Machine
from listwise.progress import counting
from listwise.results.report import ModelSearch, TableRow, report_models, write_report
from listwise.results.table import figures_of

Scores = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class LocalRow:
    """Result of one search method: scores [Q, N], and the verified pairs (query, image)."""

    name: str
    scores: Scores
    verified: Mapping[Pair, Verification]


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
    if judged.labelled:
        raise InputError(
            f"{benchmark} is a labelled set: give a benchmark with judged queries, like roxford5k"
        )
    words = Codebook.load(codebook, device)
    extractor = open_extractor(delf, count, device)
    words.require(extractor.name)
    place = folder or Path(f"local-{judged.name}-{'delf' if delf else 'hesaff'}")
    kept = {str(path): global_scores(judged, path) for path in descriptors}
    with progress("extracting", judged.photo_count) as advance:
        files = describe_locally(
            judged, extractor, place, workers=workers, on_progress=advance, on_note=on_note
        )
    with progress("indexing and searching", judged.photo_count) as advance:
        index, scores = search_asmk(
            *files, words, place / f"index-{words.fingerprint[:12]}", advance
        )
    on_note(f"{len(index)} photos indexed, {index.info()['bytes_per_photo'] / 1000:.1f} kB each")
    tables = {f"{'DELF' if delf else 'HesAff-rSIFT'}-ASMK*": scores, **kept}
    for path in models:
        network = load_model(path, device)
        own = place / f"model-{network.fingerprint[:12]}"
        with progress(f"describing with {path}", judged.photo_count) as advance:
            describe_globally(
                judged, network, own, workers=workers, on_progress=advance, on_note=on_note
            )
        tables[str(path)] = global_scores(judged, own)
    if not verify:
        return judged, [LocalRow(name, table, {}) for name, table in tables.items()]
    return judged, _verify(tables, files, workers, progress)


def _verify(
    tables: Mapping[str, Scores],
    files: tuple[FeatureFile, FeatureFile],
    workers: int | None,
    progress: ProgressBar,
) -> list[LocalRow]:
    """Return two rows per table of scores [Q, N]: without and with verification."""
    pairs = {pair for table in tables.values() for pair in first_pairs(table)}
    processes = Machine.detect("cpu").cores if workers is None else workers
    with progress("verifying", len(pairs)) as advance:
        verified = verify_pairs(*files, pairs, processes, advance)
    return [
        row
        for name, table in tables.items()
        for row in (LocalRow(name, table, {}), verified_row(f"{name} + SP", table, verified))
    ]


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
    for path, images in _parts(benchmark, folder, "arrow").items():
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


def search_asmk(
    queries: FeatureFile,
    database: FeatureFile,
    codebook: Codebook,
    folder: Path,
    on_photo: Callable[[int], object] = lambda count: None,
) -> tuple[AsmkIndex, Scores]:
    """Index the database in a folder; returns the index and the ASMK* scores [Q, N]."""
    codebook.require(database.header.extractor)
    index = AsmkIndex.open_or_create(folder, codebook)
    index.add_file(database, on_photo)
    table = np.zeros((len(queries), len(database)))
    for number in range(len(queries)):
        found, names = index.search(queries.read(number).descriptors, len(index))
        for score, name in zip(found, names, strict=True):
            if name in database.positions:
                table[number, database.positions[name]] = score
        on_photo(1)
    return index, table


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
    for path, images in _parts(benchmark, folder, "parquet").items():
        if path.exists():
            DescriptorFile.open(path).require(model.fingerprint)
            on_progress(len(images))
        else:
            extract(model, images, path, strict=True, on_progress=on_progress, **settings)


def global_scores(benchmark: Benchmark, folder: Path) -> Scores:
    """Compute the scores of the descriptors that `describe_globally` wrote: [Q, N]."""
    files = []
    for path, images in _parts(benchmark, folder, "parquet").items():
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


def _parts(benchmark: Benchmark, folder: Path, ending: str) -> dict[Path, Images]:
    return {
        folder / f"queries.{ending}": benchmark.queries,
        folder / f"database.{ending}": benchmark.database,
    }


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
