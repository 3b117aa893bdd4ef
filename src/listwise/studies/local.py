"""Local descriptors on a benchmark (the first rows of Table 2), alone and after global search."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

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
from listwise.local.verification import Verified
from listwise.machine import Machine
from listwise.progress import counting
from listwise.results.report import ModelSearch, TableRow, report_models, write_report
from listwise.results.table import figures_of

Scores = NDArray[np.floating]


@dataclass(frozen=True, eq=False)
class LocalRow:
    """A way to search a benchmark: scores [Q, N], and what was verified, by query and image."""

    name: str
    scores: Scores
    verified: Mapping[Pair, Verified]


ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Opens a progress bar of a number of steps; what it gives advances it."""


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
    """Search a judged benchmark with ASMK* and with models, each also with verification.

    Args:
        benchmark: its name or folder.
        codebook: learned from other photos.
        folder: where features, descriptors and index are kept for the next call.
        data: folder of the data sets.
        delf: as for `open_extractor`, like `count`.
        count: features of a photo at most.
        models: folders of models whose search is evaluated too.
        descriptors: folders of descriptors that were kept of a model, for the same.
        verify: also verify the first 100 of each list.
        device: of networks and words.
        workers: processes; from the cores by default.
        progress: opens a progress bar for each step.
        on_note: called with a sentence about what was found or used.
    """
    judged = find_dataset(benchmark, data).benchmark()
    if judged.labelled:
        raise InputError(f"{benchmark} is a labelled set: this takes a judged benchmark")
    words = Codebook.load(codebook, device)
    extractor = open_extractor(delf, count, device)
    words.require(extractor.name)
    place = folder or Path(f"local-{judged.name}-{'delf' if delf else 'hesaff'}")
    steps = _Steps(judged, place, workers, progress, on_note)
    tables = {str(path): global_scores(judged, path) for path in descriptors}
    files = steps.extract(extractor)
    tables = {f"{'DELF' if delf else 'HesAff-rSIFT'}-ASMK*": steps.search(*files, words)} | tables
    for path in models:
        tables[str(path)] = steps.describe(path, device)
    if not verify:
        return judged, [LocalRow(name, table, {}) for name, table in tables.items()]
    return judged, steps.verify(tables, *files)


@dataclass(frozen=True)
class _Steps:
    """The steps of an evaluation, each with a progress bar."""

    benchmark: Benchmark
    folder: Path
    workers: int | None
    progress: ProgressBar
    on_note: Callable[[str], object]

    def extract(self, extractor: Extractor) -> tuple[FeatureFile, FeatureFile]:
        """Features of queries and database."""
        with self.progress("extracting", self.benchmark.photo_count) as advance:
            return describe_locally(
                self.benchmark,
                extractor,
                self.folder,
                workers=self.workers,
                on_progress=advance,
                on_note=self.on_note,
            )

    def search(self, queries: FeatureFile, database: FeatureFile, words: Codebook) -> Scores:
        """ASMK* scores: [Q, N]."""
        place = self.folder / f"index-{words.fingerprint[:12]}"
        with self.progress("indexing and searching", self.benchmark.photo_count) as advance:
            index, table = search_asmk(queries, database, words, place, advance)
        size = index.info()["bytes_per_photo"] / 1000
        self.on_note(f"{len(index)} photos indexed, {size:.1f} kB each")
        return table

    def describe(self, model: Path, device: str) -> Scores:
        """Scores of a model's descriptors: [Q, N]."""
        network = load_model(model, device)
        kept = self.folder / f"model-{network.fingerprint[:12]}"
        with self.progress(f"describing with {model}", self.benchmark.photo_count) as advance:
            describe_globally(
                self.benchmark,
                network,
                kept,
                workers=self.workers,
                on_progress=advance,
                on_note=self.on_note,
            )
        return global_scores(self.benchmark, kept)

    def verify(
        self, tables: Mapping[str, Scores], queries: FeatureFile, database: FeatureFile
    ) -> list[LocalRow]:
        """Each table of scores [Q, N], before and after the first 100 of each list are verified."""
        pairs = {pair for table in tables.values() for pair in first_pairs(table)}
        processes = Machine.detect("cpu").cores if self.workers is None else self.workers
        with self.progress("verifying", len(pairs)) as advance:
            verified = verify_pairs(queries, database, pairs, processes, advance)
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
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
    on_note: Callable[[str], object] = lambda note: None,
) -> tuple[FeatureFile, FeatureFile]:
    """Features of a benchmark's queries, of their boxes alone, and of its database.

    They lie in `folder`, and are used by the next call with the same extractor and photos. An
    unreadable photo is an error, since the figures would mean something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, images in (("queries", benchmark.queries), ("database", benchmark.database)):
        path = folder / f"{name}.arrow"
        if path.exists():
            file = FeatureFile.open(path)
            file.require(extractor.name)
            _require_photos(file, images)
            on_progress(len(images))
        else:
            file = extract_features(
                images,
                path,
                extractor,
                strict=True,
                workers=workers,
                on_progress=on_progress,
                on_note=on_note,
            )
        files.append(file)
    return files[0], files[1]


def _require_photos(file: FeatureFile, images: Images) -> None:
    """Refuse features of other photos, such as those of a smaller copy of the benchmark."""
    sizes = map(tuple, file.sizes.tolist())
    if file.ids != images.ids or any(
        image_size(path) != size for path, size in zip(images.paths, sizes, strict=True)
    ):
        raise InputError(
            f"{file.path} holds features of other photos, or of these at another size: "
            "give another folder"
        )


def search_asmk(
    queries: FeatureFile,
    database: FeatureFile,
    codebook: Codebook,
    folder: Path,
    on_photo: Callable[[int], object] = lambda count: None,
) -> tuple[AsmkIndex, Scores]:
    """An index of the database, in a folder, and the ASMK* scores of all queries: [Q, N]."""
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
    """The first 100 images of each query's list, by scores [Q, N]."""
    return [
        (query, int(image))
        for query, row in enumerate(table)
        for image in np.argsort(-row, kind="stable")[:TOP]
    ]


def verified_row(name: str, table: Scores, verified: Mapping[Pair, Verified]) -> LocalRow:
    """Scores after the first 100 of each list were verified: inliers count before scores.

    Shapes: scores [Q, N], from -1 to 1 each, before; `verified` has the `first_pairs` of them.
    """
    reranked = np.array(table, dtype=np.float64)
    used = {pair: verified[pair] for pair in first_pairs(table)}
    for pair, found in used.items():
        if found.inliers >= MINIMUM:
            # Scores reach from -1 to 1, so that more inliers always come first.
            reranked[pair] += 2 * found.inliers
    return LocalRow(name, reranked, used)


def describe_globally(
    benchmark: Benchmark,
    model: Model,
    folder: Path,
    *,
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
    on_note: Callable[[str], object] = lambda note: None,
) -> None:
    """Put a network's descriptors of a benchmark into a folder, for `global_scores`.

    Files that are there already are used if the same network made them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, images in _parts(benchmark, folder).items():
        if path.exists():
            DescriptorFile.open(path).require(model.fingerprint)
            on_progress(len(images))
            continue
        extract(
            model,
            images,
            path,
            strict=True,
            workers=workers,
            on_progress=on_progress,
            on_note=on_note,
        )


def global_scores(benchmark: Benchmark, folder: Path) -> Scores:
    """Scores of the descriptors that `describe_globally` put into a folder: [Q, N].

    Raises:
        InputError: they are of other photos, or of two networks.
    """
    files = []
    for path, images in _parts(benchmark, folder).items():
        file = DescriptorFile.open(path)
        if file.ids != images.ids or any(
            image_size(photo, images.box(row)) != tuple(file.sizes[row].tolist())
            for row, photo in enumerate(images.paths)
        ):
            raise InputError(
                f"{path} holds descriptors of other photos than those of {benchmark.name}, or of "
                "these at another size: extract them again"
            )
        files.append(file)
    queries, database = files
    queries.require(database.model)
    if queries.settings != database.settings:
        raise InputError(f"the descriptors in {folder} were made in two ways: extract them again")
    return queries.read() @ database.read().T


def _parts(benchmark: Benchmark, folder: Path) -> dict[Path, Images]:
    return {
        folder / "queries.parquet": benchmark.queries,
        folder / "database.parquet": benchmark.database,
    }


def figures_of_row(benchmark: Benchmark, row: LocalRow) -> dict[str, dict[str, float]]:
    """Protocol -> metric -> value from 0 to 1 of one way to search a benchmark."""
    return figures_of(evaluate_scores(row.scores, benchmark.judged))


def write_local_report(
    path: str | Path,
    benchmark: Benchmark,
    rows: Sequence[LocalRow],
    *,
    command: str = "",
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Write a report on the last two rows, with the points that were verified; see `write_report`.

    The figures of the other rows are in its table.
    """

    def search(row: LocalRow) -> ModelSearch:
        def points(query: int, image: int) -> NDArray[np.floating] | None:
            found = row.verified.get((query, image))
            return None if found is None else np.hstack([found.query_points, found.points])

        matches = points if row.verified else None
        return ModelSearch.of_scores(row.name, row.scores, benchmark.judged, matches)

    others, shown = rows[:-2], rows[-2:]  # the last search, and how verification changed it
    paths = benchmark.queries.paths, benchmark.database.paths
    return write_report(
        path,
        f"{benchmark.name}: local descriptors",
        report_models([search(row) for row in shown], benchmark.judged, *paths),
        benchmark=benchmark.name,
        command=command,
        table=[TableRow(row.name, figures_of_row(benchmark, row)) for row in others],
        on_progress=on_progress,
    )
