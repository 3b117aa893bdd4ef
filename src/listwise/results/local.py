"""Local features of a benchmark: extraction, ASMK* scores, and spatial verification."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data import Images, image_size
from listwise.data.catalog import Benchmark
from listwise.errors import InputError
from listwise.local.asmk.codebook import Codebook
from listwise.local.asmk.index import AsmkIndex
from listwise.local.extract import Extractor, extract_features, open_extractor
from listwise.local.pairs import Pair, verify_pairs
from listwise.local.storage import FeatureFile
from listwise.local.verification import Verification
from listwise.machine import Machine
from listwise.progress import counting

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
        index_bytes: size of the ASMK* index per photo.
        milliseconds: time of an ASMK* search.
    """

    name: str
    folder: Path
    queries: FeatureFile
    database: FeatureFile
    scores: Scores
    index_bytes: float
    milliseconds: float

    def verify(
        self,
        pairs: Iterable[Pair],
        workers: int | None = None,
        on_pair: Callable[[int], object] = lambda count: None,
    ) -> dict[Pair, Verification]:
        """Verify pairs (query, image), by default on all cores."""
        processes = Machine.detect("cpu").cores if workers is None else workers
        return verify_pairs(self.queries, self.database, pairs, processes, on_pair)


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
        index = AsmkIndex.open_or_create(place / f"index-{words.fingerprint[:12]}", words)
        index.add_file(database, advance)
        started = time.perf_counter()
        scores = search_asmk(queries, database, index, advance)
        seconds = time.perf_counter() - started
    size = index.info()["bytes_per_photo"]
    on_note(f"{len(index)} photos indexed, {size / 1000:.1f} kB each")
    name = "DELF" if delf else "HesAff-rSIFT"
    each = 1000 * seconds / max(1, len(queries))
    return LocalBenchmark(name, place, queries, database, scores, size, each)


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
    for path, images in benchmark_files(benchmark, folder, "arrow").items():
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
    index: AsmkIndex,
    on_photo: Callable[[int], object] = lambda count: None,
) -> Scores:
    """Return the ASMK* scores [Q, N] of queries and a database that is in the index."""
    table = np.zeros((len(queries), len(database)))
    for number in range(len(queries)):
        found, names = index.search(queries.read(number).descriptors, len(index))
        for score, name in zip(found, names, strict=True):
            if name in database.positions:
                table[number, database.positions[name]] = score
        on_photo(1)
    return table


def benchmark_files(benchmark: Benchmark, folder: Path, ending: str) -> dict[Path, Images]:
    """Return the files of the queries and of the database in a folder, with their photos."""
    return {
        folder / f"queries.{ending}": benchmark.queries,
        folder / f"database.{ending}": benchmark.database,
    }
