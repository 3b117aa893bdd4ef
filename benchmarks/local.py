"""Benchmark ASMK against the package `asmk`: words, inverted file, queries and scores."""

import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import timed, unit_rows
from listwise.demo.photo import draw_viewpoint, take_photo
from listwise.errors import InputError
from listwise.local.asmk import ALPHA, ASSIGNMENTS, PHOTOS, TAU, AsmkIndex
from listwise.local.codebook import WORDS, Codebook, CodebookInfo
from listwise.local.features import hessian_affine

DIM = 128
SAMPLE = 20  # photos for the steps that one of the two does slowly
QUERIES = 10
NOT_INSTALLED = "not installed (pip install asmk)"

Float32 = NDArray[np.float32]
Words = NDArray[np.int32]


def _figures_text(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in figures.items())


@dataclass(frozen=True)
class LocalMeasurement:
    """The cost of one step in Listwise and in the package; less is better.

    `ratio` is the cost of the package divided by that of Listwise. `figures` are shares
    and differences between the results of the two.
    """

    step: Annotated[str, "step"]
    unit: Annotated[str, "unit"]
    listwise: Annotated[float, "listwise", "{:,.4g}"]
    asmk: Annotated[float | None, "asmk", "{:,.4g}"]
    ratio: Annotated[float | None, "ratio", "{:.1f} ×"]
    figures: Annotated[dict[str, float], "found", _figures_text]
    skipped: str | None = None


class MadePhotos:
    """Random local descriptors that vary in fewer directions than they have dimensions."""

    def __init__(self, words: int, features: int) -> None:
        self.features = features
        self._turn = np.random.default_rng(0).standard_normal((24, DIM), dtype=np.float32)
        info = CodebookInfo(extractor="made for a benchmark", learned_from=words, seed=0)
        self.codebook = Codebook(self.unknown(0, words), info)

    def unknown(self, number: int, count: int) -> Float32:
        """Return descriptors of a photo that are not near words: [count, DIM]."""
        generator = np.random.default_rng([1, number])
        rows = generator.standard_normal((count, 24), dtype=np.float32) @ self._turn
        rows += generator.standard_normal((count, DIM), dtype=np.float32)
        return unit_rows(rows)

    def known(self, number: int) -> tuple[Float32, Words]:
        """Return descriptors of a photo [n, DIM] near words, and the words [n, 1]."""
        generator = np.random.default_rng([2, number])
        words = generator.integers(0, len(self.codebook), self.features, np.int32)
        noise = 0.03 * generator.standard_normal((len(words), DIM), dtype=np.float32)
        return unit_rows(self.codebook.centroids[words] + noise), words[:, None]

    def query(self, number: int) -> Float32:
        """Return descriptors of another photo of the same object: [n, DIM]."""
        rows, _ = self.known(number)
        generator = np.random.default_rng([3, number])
        return unit_rows(rows + 0.03 * generator.standard_normal(rows.shape, dtype=np.float32))


class KnownWords(Codebook):
    """A codebook with words given in advance, because assigning millions takes minutes."""

    words: Words

    def assign(self, descriptors: NDArray[np.floating], count: int = 1) -> Words:
        """Return the words given in advance."""
        return self.words


def build(folder: Path, photos: int, made: MadePhotos) -> float:
    """Index generated photos, and return the seconds to aggregate and write them."""
    codebook = KnownWords(made.codebook.centroids, made.codebook.info)
    making = 0.0

    def descriptors() -> Iterator[Float32]:
        nonlocal making
        for number in range(photos):
            start = time.perf_counter()
            rows, words = made.known(number)
            object.__setattr__(codebook, "words", words)
            making += time.perf_counter() - start
            yield rows

    index = AsmkIndex.create(folder, codebook)
    start = time.perf_counter()
    index.add([str(number) for number in range(photos)], descriptors())
    return time.perf_counter() - start - making


class Package:
    """The same words and photos as objects of the package."""

    def __init__(self, codebook: Codebook) -> None:
        import asmk

        self.asmk: Any = asmk
        self.codebook = asmk.codebook.Codebook(
            asmk.index.initialize_index(None), size=len(codebook)
        )
        self.codebook.index(codebook.centroids)
        self.exact = self.codebook.search_index
        self.kernel = asmk.kernel.ASMKKernel(self.codebook, binary=True)

    def words(self, rows: Float32, count: int) -> Words:
        """Return the nearest words by comparing with all: [n, DIM] -> [n, count]."""
        found: Words = self.exact.search(rows, count)[1].astype(np.int32)
        return found

    def build(self, photos: Sequence[tuple[Float32, Words]]) -> Any:
        """Build an inverted file of photos whose words are known."""
        file = self.asmk.inverted_file.IVF.initialize_empty(
            codebook_size=self.codebook.size, use_idf=False
        )
        rows, words = (np.concatenate(part) for part in zip(*photos, strict=True))
        numbers = np.repeat(np.arange(len(photos)), [len(own) for _, own in photos])
        file.add(*self.kernel.aggregate(rows, words, numbers))
        return file

    def take(self, index: AsmkIndex) -> Any:
        """Fill an inverted file from our lists; building it with the package takes long."""
        vectors: list[Any] = [None] * self.codebook.size
        photos: list[Any] = [None] * self.codebook.size
        counts = np.zeros(self.codebook.size, np.int32)
        posting = np.dtype([("photo", "<u4"), ("bits", "<u8", DIM // 64)])
        with closing(sqlite3.connect(index.folder / PHOTOS)) as database:
            lists = database.execute("SELECT word, photos FROM lists ORDER BY word, rowid")
            for word, parts in groupby(lists, itemgetter(0)):
                found = np.frombuffer(b"".join(content for _, content in parts), posting)
                # The package has the first dimension in the highest bit.
                vectors[word] = np.ascontiguousarray(found["bits"]).view(">u4").astype(np.uint32)
                photos[word] = found["photo"].astype(np.int64) - 1
                counts[word] = len(found)
            sizes = database.execute("SELECT words FROM photos ORDER BY number").fetchall()
        norms = np.array(sizes, np.float64)[:, 0]
        idf = np.ones(self.codebook.size, np.float32)
        return self.asmk.inverted_file.IVF(
            norms, len(norms), vectors, photos, counts, idf, 0, use_idf=False
        )

    def search(self, file: Any, rows: Float32, assign: Callable[..., Words] | None = None) -> Any:
        """Return the scores of all photos: [n, DIM] -> [N]."""
        self.codebook.search_index = self.exact
        if assign is not None:  # words computed elsewhere, as the package expects them
            self.codebook.search_index = SimpleNamespace(
                search=lambda rows, count: (None, assign(rows, count))
            )
        parameters = {
            "quantize": {"multiple_assignment": ASSIGNMENTS},
            "aggregate": {},
            "search": {"topk": None},
            "similarity": {"similarity_threshold": TAU, "alpha": ALPHA},
        }
        method = self.asmk.ASMKMethod(
            {}, {}, codebook=self.codebook, kernel=self.kernel, inverted_file=file
        )
        numbers = np.zeros(len(rows), np.int64)
        _, _, ranks, scores = method.query_ivf(rows, numbers, step_params=parameters)
        found = np.empty(scores.shape[1])
        found[ranks[0]] = scores[0]
        return found


def run(
    photos: int = 5_000,
    features: int = 2_000,
    words: int = WORDS,
    folder: Path | None = None,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[LocalMeasurement]:
    """Measure each step in Listwise and in the package, one after the other.

    Args:
        photos: number of photos in the index.
        features: local features per photo.
        words: number of visual words.
        folder: folder for temporary files.
        on_start: called with what is measured next.
    """
    if photos < SAMPLE or features < 1:
        raise InputError(f"`photos` must be {SAMPLE} or more, and `features` 1 or more")
    on_start("extracting features")
    yield measure_extraction()
    on_start("generating descriptors")
    made = MadePhotos(words, features)
    try:
        package = Package(made.codebook)
    except ModuleNotFoundError:
        package = None
    on_start("looking up words")
    yield measure_words(made, package)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name) / "index"
        on_start(f"indexing {photos:,} photos")
        yield measure_indexing(build(place, photos, made) / photos, made, package)
        on_start("searching")
        yield from measure_queries(AsmkIndex.open(place), made, package)


def measure_extraction() -> LocalMeasurement:
    """Measure the extraction of features, which the package does not have."""
    seconds, features = [], []
    for number in range(SAMPLE):
        generator = np.random.default_rng(number)
        photo, _ = take_photo(None, draw_viewpoint("easy", generator), generator)
        took, found = timed(partial(hessian_affine, photo))
        seconds.append(took)
        features.append(len(found))
    figures = {"features": float(np.mean(features))}
    typical = 1e3 * float(np.median(seconds))
    return LocalMeasurement("extraction", "ms a photo", typical, None, None, figures)


def measure_words(made: MadePhotos, package: Package | None) -> LocalMeasurement:
    """Measure the assignment of one word per descriptor, as for indexing."""
    made.codebook.assign(made.unknown(1, 1))  # the first call prepares the codebook
    ours, theirs, same = [], [], []
    for number in range(1, 1 + SAMPLE):
        rows = made.unknown(number, made.features)
        took, found = timed(partial(made.codebook.assign, rows))
        ours.append(took)
        if package is not None:
            took, exact = timed(partial(package.words, rows, 1))
            theirs.append(took)
            same.append((found == exact).mean())
    figures = {"same words": float(np.mean(same))} if same else {}
    return _compared("words", "ms a photo", _typical_ms(ours), _typical_ms(theirs), figures)


def measure_indexing(seconds: float, made: MadePhotos, package: Package | None) -> LocalMeasurement:
    """Measure the aggregation of a photo's residuals into the inverted file."""
    theirs = None
    if package is not None:
        some = [made.known(number) for number in range(SAMPLE)]
        theirs = 1e3 * timed(partial(package.build, some))[0] / SAMPLE
    return _compared("index", "ms a photo", 1e3 * seconds, theirs, {})


def measure_queries(
    index: AsmkIndex, made: MadePhotos, package: Package | None
) -> Iterator[LocalMeasurement]:
    """Measure a query from descriptors to scores, and the memory of the index."""
    file, held = None, None
    if package is not None:
        file = package.take(index)
        parts = (*file.ivf_vecs, *file.ivf_image_ids, file.norm_factor)
        held = sum(part.nbytes for part in parts if part is not None) / len(index)
    ours, theirs, apart, own = [], [], [], []
    for number in range(QUERIES):
        rows = made.query(number * len(index) // QUERIES)
        took, (scores, ids) = timed(partial(index.search, rows, len(index)))
        ours.append(took)
        if package is not None:
            took, found = timed(partial(package.search, file, rows))
            theirs.append(took)
            numbers = [int(name) for name in ids]
            own.append(np.abs(found[numbers] - scores).max())
            given = package.search(file, rows, made.codebook.assign)
            apart.append(np.abs(given[numbers] - scores).max())
    figures = {}
    if apart:
        figures = {
            "largest score difference, same words": float(max(apart)),
            "largest score difference, own words": float(max(own)),
        }
    yield _compared("query", "ms", _typical_ms(ours), _typical_ms(theirs), figures)
    yield _compared("memory", "bytes a photo", index.info()["bytes_per_photo"], held, {})


def _typical_ms(seconds: Sequence[float]) -> float | None:
    """Return the median in milliseconds; None without any."""
    return 1e3 * float(np.median(seconds)) if seconds else None


def _compared(
    step: str, unit: str, ours: float | None, theirs: float | None, figures: dict[str, float]
) -> LocalMeasurement:
    """Return the cost of a step in both, or only ours."""
    assert ours is not None
    if theirs is None:
        return LocalMeasurement(step, unit, ours, None, None, figures, NOT_INSTALLED)
    return LocalMeasurement(step, unit, ours, theirs, theirs / ours, figures)
