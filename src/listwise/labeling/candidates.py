"""Choose the pairs of photos to compare, in rounds: at random, and by global descriptors.

Each round compares every photo with one or two others. Pairs whose photos are in one group already
are left out of the next round, which saves most of the work in clean classes.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data import Images
from listwise.descriptors import Model, extract
from listwise.labeling.comparisons import Pairs
from listwise.labeling.result import Progress
from listwise.progress import counted
from listwise.search.exact import exact_search

Numbers = NDArray[np.int64]
MAX_SIDE = 512  # photos are reduced to this for the short list: verification decides, not the list
_QUERIES = 2048  # photos that are searched together
_ROWS = 4096  # descriptors that are read at a time
Vectors = NDArray[np.float32]
_MERGE_PAIRS = 20  # maximum number of pairs of classes compared without a model, per photo
_WINDOW = 8  # neighbors in the sorted list of looks that are compared
_DIFFERENT_BITS = 8  # maximum number of different bits in the looks of near-duplicates


def few_classes(classes: int, photos: int) -> bool:
    """Return whether all classes can be compared with each other, without a model."""
    return classes * (classes - 1) // 2 <= _MERGE_PAIRS * photos


def class_rounds(labels: Numbers, usable: Numbers, partners: int, seed: int) -> Iterator[Pairs]:
    """Yield rounds of pairs of photos of the same class: each photo gets `partners` partners.

    The photos of a class form a ring in random order. A round compares each photo with the photo
    a certain number of places further on, and each round has another number, so no pair is
    compared twice. Small classes are compared completely.

    Args:
        labels: class of each photo: [N].
        usable: numbers of the photos that can be read.
        partners: maximum number of partners per photo.
        seed: seed of the order and of the numbers.
    """
    order = usable[np.argsort(labels[usable], kind="stable")]
    rings = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    steps = []
    for place, ring in enumerate(rings):
        generator = np.random.default_rng([seed, int(labels[ring[0]]) if len(ring) else 0])
        rings[place] = generator.permutation(ring)
        every = np.arange(1, len(ring) // 2 + 1)
        steps.append(generator.permutation(every)[: max(1, partners // 2)])
    for number in range(max((len(each) for each in steps), default=0)):
        pairs = [
            _ring_pairs(ring, int(step[number]))
            for ring, step in zip(rings, steps, strict=True)
            if number < len(step)
        ]
        yield np.concatenate(pairs)


def _ring_pairs(ring: Numbers, step: int) -> Pairs:
    count = len(ring) // 2 if 2 * step == len(ring) else len(ring)
    first = np.arange(count)
    return np.stack([ring[first], ring[(first + step) % len(ring)]], 1)


def neighbor_rounds(photos: Numbers, neighbors: Numbers) -> Iterator[Pairs]:
    """Yield one round per neighbor: photos [n] with their neighbors [n, k], nearest first.

    Neighbors that do not exist are -1.
    """
    for column in neighbors.T:
        there = column >= 0
        yield np.stack([photos[there], column[there]], 1)


def similar_looks(looks: NDArray[np.uint64], photos: Numbers) -> Pairs:
    """Return pairs of photos that may be near-duplicates, by their looks: [N], [n] -> [m, 2].

    The looks are sorted four times, each time from another bit on, and compared with those that
    follow. Copies whose looks differ in a few bits are neighbors in at least one of the lists.
    """
    found = [np.zeros((0, 2), np.int64)]
    values = looks[photos]
    for turn in (0, 16, 32, 48):
        low, high = np.uint64(turn), np.uint64((64 - turn) % 64)
        turned = values if not turn else (values << low) | (values >> high)
        order = np.argsort(turned, kind="stable")
        for step in range(1, min(_WINDOW, len(order) - 1) + 1):
            one, two = order[:-step], order[step:]
            different = (values[one] ^ values[two]).view(np.uint8).reshape(-1, 8)
            near = np.unpackbits(different, axis=1).sum(axis=1) <= _DIFFERENT_BITS
            found.append(np.stack([photos[one[near]], photos[two[near]]], 1))
    return np.concatenate(found)


def describe_photos(model: Model, images: Images, folder: Path, on_progress: Progress) -> Vectors:
    """Return the descriptors of N photos [N, C] as a mapped file; zeros for unreadable photos."""
    path = folder / f"descriptors-{model.fingerprint[:16]}.npy"
    table = path.with_suffix(".parquet")
    advance = counted("computing descriptors", len(images), on_progress)
    if path.exists():
        advance(len(images))
    else:
        # Two photos of a table may have the same id.
        numbered = replace(images, ids=tuple(map(str, range(len(images)))), attributes=None)
        file = extract(model, numbered, table, max_side=MAX_SIDE, on_progress=advance)
        temporary = path.with_suffix(".tmp")
        rows: Any = np.lib.format.open_memmap(temporary, "w+", np.float32, (len(images), model.dim))
        start, numbers = 0, np.array(file.ids).astype(np.int64)
        for part in file.batches():
            rows[numbers[start : start + len(part)]] = part
            start += len(part)
        rows.flush()
        temporary.rename(path)
        table.unlink()
    vectors: Vectors = np.load(path, mmap_mode="r")
    return vectors


def nearest(vectors: Vectors, queries: Numbers, among: Numbers, k: int) -> Numbers:
    """Return the k photos of some photos that are nearest to each of them: [q], [n] -> [q, k].

    `queries` are photos of `among`, and are not their own neighbors. Neighbors that do not exist
    are -1. Memory does not depend on the number of photos.
    """
    found = np.full((len(queries), k), -1, np.int64)
    width = min(k, len(among) - 1)
    for start in range(0, len(queries) if width else 0, _QUERIES):
        some = queries[start : start + _QUERIES]
        _, places = exact_search(np.asarray(vectors[some]), _Rows(vectors, among), width + 1)
        photos = among[places]
        # A photo with many equal descriptors may not be among its own nearest.
        others = np.argsort(photos == some[:, None], axis=1, kind="stable")[:, :width]
        found[start : start + len(some), :width] = np.take_along_axis(photos, others, 1)
    return found


def nearest_of_class(vectors: Vectors, labels: Numbers, usable: Numbers, k: int) -> Numbers:
    """Return the k nearest photos of the same class for each usable photo: [n] -> [n, k].

    Neighbors that do not exist are -1.
    """
    found = np.full((len(usable), k), -1, np.int64)
    order = np.argsort(labels[usable], kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(labels[usable][order])) + 1):
        found[rows] = nearest(vectors, usable[rows], usable[rows], k)
    return found


class _Rows:
    """The descriptors of some photos, read in blocks [n, C]."""

    def __init__(self, vectors: Vectors, photos: Numbers) -> None:
        self._vectors, self._photos = vectors, photos

    def __iter__(self) -> Iterator[Vectors]:
        for start in range(0, len(self._photos), _ROWS):
            yield np.asarray(self._vectors[self._photos[start : start + _ROWS]])
