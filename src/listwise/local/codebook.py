"""The visual words of local descriptors: learned by k-means, and found again fast."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

from listwise.columns import FileHeader
from listwise.errors import InputError
from listwise.files import write_tensors
from listwise.local.storage import FeatureFile
from listwise.local.words import nearest_words, word_totals
from listwise.machine import Machine
from listwise.optional import requires

WORDS: Final = 65_536
PER_WORD: Final = 60
"""Descriptors a word that k-means sees at most."""
ITERATIONS: Final = 10

# Up to so many words are compared one by one: nothing is faster.
_FEW = 4096
# Nearest by 4-bit codes, which are then compared exactly. So many find the nearest of 65,536 words
# for RootSIFT descriptors as surely as comparing with all, at less than half the cost.
_CANDIDATES = 64
_CANDIDATES_EACH = 32
_CANDIDATES_LEARNING = 16  # a wrong word now and then does no harm to k-means
_ROWS = 1 << 14  # descriptors looked up at a time
_ROWS_GPU = 1 << 18
_APART = 1 / 1024  # by which the two parts of a divided word differ

Float32 = NDArray[np.float32]
Words = NDArray[np.int32]


class CodebookInfo(FileHeader):
    """Where a codebook comes from: `extractor` names what made the descriptors, and its settings.

    `learned_from` is the number of descriptors that k-means saw, drawn by `seed`.
    """

    extractor: str
    learned_from: int
    seed: int


@dataclass(frozen=True, eq=False)
class Codebook:
    """K visual words: float32 `centroids` [K, D].

    Words are looked up on `device`: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.
    """

    centroids: Float32
    info: CodebookInfo
    device: str = "auto"

    def __post_init__(self) -> None:
        rows = np.ascontiguousarray(self.centroids, dtype=np.float32)
        object.__setattr__(self, "centroids", rows)
        if rows.ndim != 2 or not len(rows) or rows.shape[1] % 8:
            raise InputError(
                "a codebook is centroids [K, D], D a multiple of 8 (a bit of each dimension is "
                f"kept), not {list(rows.shape)}"
            )
        if not np.isfinite(rows).all():
            raise InputError("the codebook has values that are not finite: learn it again")

    def __len__(self) -> int:
        return len(self.centroids)

    @property
    def dim(self) -> int:
        """Dimensions D of a descriptor."""
        return int(self.centroids.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the centroids and the extractor's name: equal if the words must be."""
        digest = hashlib.sha256(repr((self.info.extractor, self.centroids.shape)).encode())
        digest.update(self.centroids.tobytes())
        return digest.hexdigest()

    def require(self, extractor: str) -> None:
        """Refuse the descriptors of another extractor."""
        if extractor != self.info.extractor:
            raise InputError(
                f"the codebook is for descriptors of {self.info.extractor}, not of {extractor}: "
                "learn another, or extract again"
            )

    def assign(self, descriptors: NDArray[np.floating], count: int = 1) -> Words:
        """The `count` nearest words of each descriptor, nearest first: [n, D] -> int32 [n, count].

        Without a GPU larger codebooks are searched by compact codes first: a word that is not the
        nearest comes about once in ten thousand.
        """
        rows = checked(descriptors, self.dim)
        if not 1 <= count <= len(self):
            raise InputError(f"{count} words asked for of a codebook of {len(self)}")
        if self._on_gpu is not None:
            given = torch.from_numpy(rows).to(self._on_gpu.device)
            words: Words = nearest_words(given, self._on_gpu, count).int().cpu().numpy()
            return words
        found = np.empty((len(rows), count), np.int32)
        settings: Any = None
        if len(self) > _FEW:
            with requires("local", "a codebook"):
                import faiss

            settings = faiss.IndexRefineSearchParameters()
            settings.k_factor = max(_CANDIDATES / count, _CANDIDATES_EACH)
        for start in range(0, len(rows), _ROWS):
            part = rows[start : start + _ROWS]
            _, nearest = self._index.search(part, count, params=settings)
            found[start : start + _ROWS] = nearest
        return found

    @cached_property
    def _on_gpu(self) -> Tensor | None:
        """The centroids where a GPU can use them, None without one."""
        device = Machine.detect(self.device).device
        if not device.startswith("cuda"):
            return None
        return torch.from_numpy(self.centroids).to(device)

    @cached_property
    def _index(self) -> Any:
        with requires("local", "a codebook"):
            import faiss

        index: Any = faiss.IndexFlatL2(self.dim)
        if len(self) > _FEW:
            codes = faiss.IndexPQFastScan(self.dim, self.dim // 2, 4)
            codes.pq.cp.niter = 10
            index = faiss.IndexRefineFlat(codes)
            _train(index, self.centroids)
        index.add(self.centroids)
        return index

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, which says where the codebook comes from."""
        metadata = {"codebook": self.info.model_dump_json(), "fingerprint": self.fingerprint}
        write_tensors(Path(path), {"centroids": self.centroids}, metadata)

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> "Codebook":
        """Read a codebook, whose words are then looked up on a device; nothing in it is run.

        Raises:
            InputError: there is no such file, or it is damaged.
        """
        path = Path(path)
        if not path.is_file():
            raise InputError(f"no codebook {path}: listwise local codebook learns one")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                centroids = file.get_tensor("centroids")
            header, fingerprint = metadata["codebook"], metadata["fingerprint"]
        except (OSError, SafetensorError, KeyError) as error:
            raise InputError(f"{path} is damaged or not a codebook: learn it again") from error
        info = CodebookInfo.parse(header, path, "learn it again")
        codebook = cls(centroids, info, device)
        if codebook.fingerprint != fingerprint:
            raise InputError(f"{path} is damaged: learn it again, or copy it again")
        return codebook


def is_codebook(path: str | Path) -> bool:
    """Whether a file is a codebook, and not something else."""
    try:
        Codebook.load(path)
    except InputError:
        return False
    return True


def checked(descriptors: NDArray[np.floating], dim: int) -> Float32:
    """Local descriptors as float32 [n, dim], or an error that says what is wrong with them."""
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

    While they move, a descriptor's nearest word is looked for among those of similar words only;
    among all of them on a GPU.

    Args:
        batches: local descriptors [n, D] of photos, of any number.
        extractor: names what made them, and its settings.
        words: K.
        per_word: size of the sample, in descriptors a word.
        iterations: of k-means.
        seed: of the sample and of the words it begins with.
        on_iteration: told how many iterations are done.
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.
    """
    chosen = Machine.detect(device).device
    if words < 1 or per_word < 1 or iterations < 1:
        raise InputError("a codebook needs one word, one descriptor a word and one iteration")
    generator = np.random.default_rng(seed)
    sample = _sample(batches, words * per_word, generator)
    if len(sample) < words:
        raise InputError(
            f"{words} words cannot be learned from {len(sample)} descriptors: "
            "give more photos, or ask for fewer words"
        )
    centroids = sample[generator.choice(len(sample), words, replace=False)]
    for done in range(iterations):
        if chosen.startswith("cuda"):
            totals = _totals_by_products(sample, centroids, chosen)
        else:
            totals = _totals_by_index(sample, centroids)
        centroids = _moved(*totals, generator)
        on_iteration(done + 1)
    info = CodebookInfo(extractor=extractor, learned_from=len(sample), seed=seed)
    return Codebook(centroids, info, device)


def learn_from_files(
    features: Sequence[str | Path],
    out: str | Path,
    words: int = WORDS,
    per_word: int = PER_WORD,
    iterations: int = ITERATIONS,
    seed: int = 0,
    on_iteration: Callable[[int], object] = lambda done: None,
    device: str = "auto",
) -> Codebook:
    """Learn visual words from files of local features, and write the codebook.

    The other arguments are those of `learn_codebook`.
    """
    out = Path(out)
    if out.exists() and not is_codebook(out):
        raise InputError(f"{out} exists and is not a codebook: give another name")
    files = [FeatureFile.open(path) for path in features]
    for file in files[1:]:
        file.require(files[0].header.extractor)
    codebook = learn_codebook(
        (each.descriptors for file in files for each in file),
        files[0].header.extractor,
        words,
        per_word,
        iterations,
        seed,
        on_iteration,
        device,
    )
    codebook.save(out)
    return codebook


def _sample(
    batches: Iterable[NDArray[np.floating]], size: int, generator: np.random.Generator
) -> Float32:
    """At most `size` rows of all, each with the same chance: float32 [s, D]."""
    kept: Float32 | None = None
    seen = 0
    for batch in batches:
        if kept is None:
            kept = np.empty((size, batch.shape[-1]), np.float32)
        rows = checked(batch, kept.shape[1])
        # Row number i takes a random place below i, if that is one of the sample's.
        numbers = np.arange(seen, seen + len(rows))
        places = np.where(numbers < size, numbers, generator.integers(0, numbers + 1))
        taken = places < size
        kept[places[taken]] = rows[taken]
        seen += len(rows)
    if kept is None:
        raise InputError("there are no local descriptors to learn from")
    return kept[: min(seen, size)]


_Totals = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Sums [K, D] and counts [K] of the descriptors that are nearest to each word."""


def _totals_by_index(sample: Float32, centroids: Float32) -> _Totals:
    """By an index of the words that compares with few of them."""
    with requires("local", "a codebook"):
        import faiss

    words, dim = centroids.shape
    index: Any = faiss.IndexFlatL2(dim)
    if words > _FEW:
        lists = int(np.sqrt(words))
        near: Any = faiss.index_factory(dim, f"IVF{lists},PQ{dim // 2}x4fs")
        near.nprobe = max(1, lists // 8)
        index = faiss.IndexRefineFlat(near)
        index.k_factor = _CANDIDATES_LEARNING
        _train(index, centroids)
    index.add(centroids)
    sums = np.zeros((words, dim))
    counts = np.zeros(words, np.int64)
    # In parts: tables for all of a sample at once would take ten times its memory.
    for start in range(0, len(sample), _ROWS):
        rows = sample[start : start + _ROWS]
        nearest = index.search(rows, 1)[1][:, 0]
        order = np.argsort(nearest, kind="stable")
        found, first = np.unique(nearest[order], return_index=True)
        sums[found] += np.add.reduceat(rows[order], first, axis=0, dtype=np.float64)
        counts += np.bincount(nearest, minlength=words)
    return sums, counts


def _totals_by_products(sample: Float32, centroids: Float32, device: str) -> _Totals:
    """By comparing with all words, on a device of PyTorch's."""
    words = torch.from_numpy(centroids).to(device)
    sums = torch.zeros(words.shape, dtype=torch.float64, device=device)
    counts = torch.zeros(len(words), dtype=torch.int64, device=device)
    for start in range(0, len(sample), _ROWS_GPU):
        rows = torch.from_numpy(sample[start : start + _ROWS_GPU]).to(device)
        some, many = word_totals(rows, words)
        sums += some
        counts += many
    return sums.cpu().numpy(), counts.cpu().numpy()


def _moved(
    sums: NDArray[np.float64], counts: NDArray[np.int64], generator: np.random.Generator
) -> Float32:
    """The means, as new words; those that nothing is nearest to take a part of another's."""
    words, dim = sums.shape
    moved = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], 0.0)
    for word in np.flatnonzero(counts == 0):
        shares = np.maximum(counts - 1, 0)
        other = generator.choice(words, p=shares / shares.sum()) if shares.any() else 0
        apart = np.where(np.arange(dim) % 2, 1 + _APART, 1 - _APART)
        moved[word], moved[other] = moved[other] * apart, moved[other] / apart
        counts[word], counts[other] = counts[other] // 2, counts[other] - counts[other] // 2
    return moved.astype(np.float32)


def _train(index: Any, centroids: Float32) -> None:
    """Learn an index's codes, in one thread: many would only wait for each other."""
    with threadpool_limits(1):
        index.train(centroids)
