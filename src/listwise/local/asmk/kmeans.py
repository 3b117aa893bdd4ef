"""Learn the visual words of a codebook by k-means."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from listwise.errors import InputError
from listwise.local.asmk.codebook import (
    EXACT_LIMIT,
    ROWS,
    WORDS,
    Codebook,
    CodebookInfo,
    Float32,
    check_descriptors,
    import_faiss,
    is_codebook,
    nearest_words,
    train_index,
)
from listwise.local.storage import FeatureFile
from listwise.machine import Machine

PER_WORD: Final = 60
"""Maximum number of descriptors per word in the sample of k-means."""
ITERATIONS: Final = 10

_CANDIDATES = 16  # k-means tolerates a wrong word now and then
_ROWS_GPU = 1 << 18
_APART = 1 / 1024  # relative difference of the two halves of a split word


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
        words: number of words K.
        per_word: number of sampled descriptors per word.
        iterations: number of k-means iterations.
        seed: seed of the sample and of the initial words.
        on_iteration: called with the number of finished iterations.
        device: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
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
        if chosen.startswith("cuda"):
            totals = _totals_by_products(sample, centroids, chosen)
        else:
            totals = _totals_by_index(sample, centroids)
        centroids = _update_words(*totals, generator)
        on_iteration(done + 1)
    info = CodebookInfo(extractor=extractor, learned_from=len(sample), seed=seed)
    return Codebook(centroids, info, device)


def learn_from_files(features: Sequence[str | Path], out: str | Path, **settings: Any) -> Codebook:
    """Learn a codebook from feature files with `learn_codebook`, and save it to `out`."""
    out = Path(out)
    if out.exists() and not is_codebook(out):
        raise InputError(f"{out} exists and is not a codebook: give another name")
    files = [FeatureFile.open(path) for path in features]
    for file in files[1:]:
        file.require(files[0].header.extractor)
    descriptors = (each.descriptors for file in files for each in file)
    codebook = learn_codebook(descriptors, files[0].header.extractor, **settings)
    codebook.save(out)
    return codebook


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


def _totals_by_index(sample: Float32, centroids: Float32) -> _Totals:
    """Sum descriptors by nearest word, found with a FAISS index of the words."""
    faiss = import_faiss()
    words, dim = centroids.shape
    index: Any = faiss.IndexFlatL2(dim)
    if words > EXACT_LIMIT:
        lists = int(np.sqrt(words))
        near: Any = faiss.index_factory(dim, f"IVF{lists},PQ{dim // 2}x4fs")
        near.nprobe = max(1, lists // 8)
        index = faiss.IndexRefineFlat(near)
        index.k_factor = _CANDIDATES
        train_index(index, centroids)
    index.add(centroids)
    sums = np.zeros((words, dim))
    counts = np.zeros(words, np.int64)
    # In parts: the tables for the whole sample would take ten times its memory.
    for start in range(0, len(sample), ROWS):
        rows = sample[start : start + ROWS]
        nearest = index.search(rows, 1)[1][:, 0]
        order = np.argsort(nearest, kind="stable")
        found, first = np.unique(nearest[order], return_index=True)
        sums[found] += np.add.reduceat(rows[order], first, axis=0, dtype=np.float64)
        counts += np.bincount(nearest, minlength=words)
    return sums, counts


def _totals_by_products(sample: Float32, centroids: Float32, device: str) -> _Totals:
    """Sum descriptors by nearest word, found by comparing with all words on a PyTorch device."""
    words = torch.from_numpy(centroids).to(device)
    sums = torch.zeros(words.shape, dtype=torch.float64, device=device)
    counts = torch.zeros(len(words), dtype=torch.int64, device=device)
    for start in range(0, len(sample), _ROWS_GPU):
        rows = torch.from_numpy(sample[start : start + _ROWS_GPU]).to(device)
        some, many = word_totals(rows, words)
        sums += some
        counts += many
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


def word_totals(rows: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums float32 [K, D] and counts int64 [K] of the rows [n, D] nearest to each word."""
    nearest = nearest_words(rows, centroids)[:, 0]
    counts = torch.bincount(nearest, minlength=len(centroids))
    # Sort rows by word, so that additions always happen in the same order.
    ordered = rows[nearest.argsort(stable=True)]
    return torch.segment_reduce(ordered, "sum", lengths=counts, initial=0), counts
