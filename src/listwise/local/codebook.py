"""Visual words: learned from local descriptors by k-means, and found again quickly."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from listwise.errors import InputError
from listwise.files import FileHeader
from listwise.local.storage import FeatureFile
from listwise.machine import Machine
from listwise.models.storage import read_parts, write_parts
from listwise.optional import requires

WORDS: Final = 65_536
PER_WORD: Final = 60
"""Maximum number of descriptors per word in the sample of k-means."""
ITERATIONS: Final = 10

# Codebooks up to this size are searched exactly: nothing is faster.
EXACT_LIMIT = 4096
# Words that are nearest by 4-bit codes, and are then compared exactly. This number finds the
# nearest of 65,536 words for RootSIFT as reliably as a full comparison, at less than half the cost.
_CANDIDATES = 64
_CANDIDATES_EACH = 32
_CANDIDATES_LEARNING = 16  # k-means tolerates a wrong word now and then
_ROWS = 1 << 14  # descriptors per lookup
_ROWS_GPU = 1 << 18
_PRODUCTS = 1 << 28  # products of descriptors and words on a GPU at a time: 1 GB
_APART = 1 / 1024  # relative difference of the two halves of a split word

Float32 = NDArray[np.float32]
Words = NDArray[np.int32]


class CodebookInfo(FileHeader):
    """Origin of a codebook.

    `extractor` is the name of the extractor of the descriptors, with its settings. `learned_from`
    is the number of descriptors that k-means used, drawn with `seed`.
    """

    extractor: str
    learned_from: int
    seed: int


@dataclass(frozen=True, eq=False)
class Codebook:
    """K visual words: float32 `centroids` [K, D].

    Words are looked up on `device`: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
    """

    centroids: Float32
    info: CodebookInfo
    device: str = "auto"

    def __post_init__(self) -> None:
        check_descriptors(self.centroids, self.dim)
        if not len(self) or self.dim % 8:
            raise InputError(
                "the centroids of a codebook should be [K, D] with D a multiple of 8 (one bit per "
                f"dimension is stored), found {list(self.centroids.shape)}"
            )

    def __len__(self) -> int:
        return len(self.centroids)

    @property
    def dim(self) -> int:
        """Dimensions D of a descriptor."""
        return int(self.centroids.shape[-1])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the centroids and the name of the extractor; equal for equal words."""
        digest = hashlib.sha256(repr((self.info.extractor, self.centroids.shape)).encode())
        digest.update(self.centroids.tobytes())
        return digest.hexdigest()

    def require(self, extractor: str) -> None:
        """Raise an error for the descriptors of another extractor."""
        if extractor != self.info.extractor:
            raise InputError(
                f"the codebook is for descriptors of {self.info.extractor}, not of {extractor}: "
                "extract the features with the same `count` and `delf`, or learn another codebook"
            )

    def assign(self, descriptors: NDArray[np.floating], count: int = 1) -> Words:
        """Return the `count` nearest words of each descriptor: [n, D] -> int32 [n, count].

        Without a GPU, large codebooks are searched by compact codes first. About one word in ten
        thousand is then not the nearest.
        """
        rows = check_descriptors(descriptors, self.dim)
        if not 1 <= count <= len(self):
            raise InputError(
                f"`count` must be from 1 to {len(self)}, the number of words, not {count}"
            )
        if self._on_gpu is not None:
            given = torch.from_numpy(rows).to(self._on_gpu.device)
            words: Words = nearest_words(given, self._on_gpu, count).int().cpu().numpy()
            return words
        found = np.empty((len(rows), count), np.int32)
        settings: Any = None
        if len(self) > EXACT_LIMIT:
            settings = _faiss().IndexRefineSearchParameters()
            settings.k_factor = max(_CANDIDATES / count, _CANDIDATES_EACH)
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            found[start : start + _ROWS] = self._index.search(part, count, params=settings)[1]
        return found

    @cached_property
    def _on_gpu(self) -> Tensor | None:
        """The centroids on the GPU; None without a GPU."""
        device = Machine.detect(self.device).device
        if not device.startswith("cuda"):
            return None
        return torch.from_numpy(self.centroids).to(device)

    @cached_property
    def _index(self) -> Any:
        return _word_index(self.centroids)

    def save(self, path: str | Path) -> None:
        """Write the codebook and its origin to a safetensors file."""
        write_parts(Path(path), self.info, {"centroids": torch.from_numpy(self.centroids)})

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> "Codebook":
        """Read a codebook; its words are looked up on `device`. No code in the file is executed."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no codebook at {path}: learn one with listwise local codebook")
        info, tensors = read_parts(path, CodebookInfo, "codebook")
        return cls(tensors["centroids"].numpy(), info, device)


def check_descriptors(descriptors: NDArray[np.floating], dim: int) -> Float32:
    """Return local descriptors as float32 [n, dim]; raise an error if shape or values are wrong."""
    rows = np.ascontiguousarray(descriptors, dtype=np.float32)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise InputError(f"local descriptors should be [n, {dim}], found shape {list(rows.shape)}")
    if not np.isfinite(rows).all():
        raise InputError("local descriptors have values that are not finite: extract them again")
    return rows


def learn_codebook(
    batches: Iterable[NDArray[np.floating]],
    extractor: str,
    words: int = WORDS,
    per_word: int = PER_WORD,
    iterations: int = ITERATIONS,
    seed: int = 0,
    on_iteration: Callable[[int], object] = lambda done: None,
    device: str = "auto",
) -> Codebook:
    """Learn visual words by k-means, on a sample drawn in one pass over the batches.

    Without a GPU, the nearest word of a descriptor is searched approximately; on a GPU, each
    descriptor is compared with all words.

    Args:
        batches: local descriptors [n, D].
        extractor: name of their extractor with its settings.
        words: number of visual words.
        per_word: maximum number of features per word to learn from.
        iterations: number of k-means iterations.
        seed: seed of the sample and of the initial words.
        on_iteration: called with the number of finished iterations.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
    """
    chosen = Machine.detect(device).device
    if words < 1 or per_word < 1 or iterations < 1:
        raise InputError("`words`, `per_word` and `iterations` should be 1 or more")
    generator = np.random.default_rng(seed)
    sample = _sample(batches, words * per_word, generator)
    if len(sample) < words:
        raise InputError(
            f"{words} words cannot be learned from {len(sample)} descriptors: "
            "give more photos, or fewer `words`"
        )
    centroids = sample[generator.choice(len(sample), words, replace=False)]
    for done in range(iterations):
        centroids = _update_words(*_sum_by_word(sample, centroids, chosen), generator)
        on_iteration(done + 1)
    info = CodebookInfo(extractor=extractor, learned_from=len(sample), seed=seed)
    return Codebook(centroids, info, device)


def learn_from_files(features: Sequence[str | Path], out: str | Path, **settings: Any) -> Codebook:
    """Learn a codebook from feature files with `learn_codebook`, and save it to `out`."""
    out = Path(out)
    if out.exists():
        try:
            Codebook.load(out)
        except InputError as error:
            raise InputError(f"{out} exists and is not a codebook: give another name") from error
    files = [FeatureFile.open(path) for path in features]
    for file in files[1:]:
        file.require(files[0].header.extractor)
    descriptors = (each.descriptors for file in files for each in file)
    codebook = learn_codebook(descriptors, files[0].header.extractor, **settings)
    codebook.save(out)
    return codebook


def nearest_words(rows: Tensor, centroids: Tensor, count: int = 1) -> Tensor:
    """Return the `count` nearest words, nearest first: [n, D], [K, D] -> int64 [n, count]."""
    # The nearest word has the largest product minus half of its squared length.
    halves = -centroids.square().sum(dim=1) / 2
    found = torch.empty(len(rows), count, dtype=torch.int64, device=rows.device)
    step = max(1, _PRODUCTS // len(centroids))
    for start in range(0, len(rows), step):
        scores = torch.addmm(halves, rows[start : start + step], centroids.T)
        if count == 1:
            found[start : start + step, 0] = scores.argmax(dim=1)
        else:
            found[start : start + step] = scores.topk(count, dim=1).indices
    return found


def _faiss() -> Any:
    """Import FAISS, which searches codebooks without a GPU."""
    with requires("local", "a codebook"):
        import faiss
    return faiss


def _word_index(centroids: Float32, learning: bool = False) -> Any:
    """Return a FAISS index of words: exact if there are few, else by codes and then exact.

    For `learning`, which needs millions of lookups, it looks at an eighth of many words only.
    """
    faiss = _faiss()
    words, dim = centroids.shape
    index: Any = faiss.IndexFlatL2(dim)
    if words > EXACT_LIMIT:
        lists = int(np.sqrt(words))
        kind = f"IVF{lists},PQ{dim // 2}x4fs" if learning else f"PQ{dim // 2}x4fs"
        codes: Any = faiss.index_factory(dim, kind)
        codes.pq.cp.niter = 10
        if learning:
            codes.nprobe = max(1, lists // 8)
        index = faiss.IndexRefineFlat(codes)
        index.k_factor = _CANDIDATES_LEARNING
        with threadpool_limits(1):  # more threads would wait for each other
            index.train(centroids)
    index.add(centroids)
    return index


def _sample(
    batches: Iterable[NDArray[np.floating]], size: int, generator: np.random.Generator
) -> Float32:
    """Draw at most `size` rows of all batches uniformly: float32 [s, D]."""
    kept: Float32 | None = None
    seen = 0
    for batch in batches:
        if kept is None:
            kept = np.empty((size, batch.shape[-1]), np.float32)
        rows = check_descriptors(batch, kept.shape[1])
        # Reservoir sampling: row i takes a random place up to i, if that is inside the sample.
        numbers = np.arange(seen, seen + len(rows))
        places = np.where(numbers < size, numbers, generator.integers(0, numbers + 1))
        taken = places < size
        kept[places[taken]] = rows[taken]
        seen += len(rows)
    if kept is None:
        raise InputError("the files contain no local descriptors: extract features of more photos")
    return kept[: min(seen, size)]


_Totals = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Sums [K, D] and counts [K] of the descriptors nearest to each word."""


def _sum_by_word(sample: Float32, centroids: Float32, device: str) -> _Totals:
    """Sum descriptors by nearest word."""
    words = torch.from_numpy(centroids).to(device)
    on_gpu = words.device.type == "cuda"
    index = None if on_gpu else _word_index(centroids, learning=True)
    sums = torch.zeros(words.shape, dtype=torch.float64, device=device)
    counts = torch.zeros(len(words), dtype=torch.int64, device=device)
    # In parts: the tables of FAISS for the whole sample would take ten times its memory.
    step = _ROWS_GPU if on_gpu else _ROWS
    for start in range(0, len(sample), step):
        rows = torch.from_numpy(sample[start : start + step]).to(device)
        if index is None:
            nearest = nearest_words(rows, words)[:, 0]
        else:
            nearest = torch.from_numpy(index.search(rows.numpy(), 1)[1][:, 0])
        some = torch.bincount(nearest, minlength=len(words))
        # Sort rows by word, so that additions always happen in the same order.
        ordered = rows[nearest.argsort(stable=True)]
        sums += torch.segment_reduce(ordered, "sum", lengths=some, initial=0)
        counts += some
    return sums.cpu().numpy(), counts.cpu().numpy()


def _update_words(
    sums: NDArray[np.float64], counts: NDArray[np.int64], generator: np.random.Generator
) -> Float32:
    """Return the means as new words; a word without descriptors splits a random larger one."""
    words, dim = sums.shape
    moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], 0.0)
    for word in np.flatnonzero(counts == 0):
        shares = np.maximum(counts - 1, 0)
        other = generator.choice(words, p=shares / shares.sum()) if shares.any() else 0
        apart = np.where(np.arange(dim) % 2, 1 + _APART, 1 - _APART)
        moved[word], moved[other] = moved[other] * apart, moved[other] / apart
        counts[word], counts[other] = counts[other] // 2, counts[other] - counts[other] // 2
    return moved.astype(np.float32)
