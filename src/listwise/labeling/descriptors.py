"""Short lists from global descriptors: the photos that look most similar to each photo."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data import Images
from listwise.descriptors import Model, extract
from listwise.labeling.candidates import Numbers
from listwise.search.exact import exact_search

MAX_SIDE = 512  # photos are reduced to this for the short list: verification decides, not the list
_QUERIES = 2048  # photos that are searched together
_ROWS = 4096  # descriptors of a class that are read at a time
Vectors = NDArray[np.float32]


def describe_photos(
    model: Model,
    images: Images,
    folder: Path,
    on_progress: Callable[[int], object],
) -> Vectors:
    """Return the descriptors of N photos [N, C] as a mapped file; zeros for unreadable photos."""
    path = folder / f"descriptors-{model.fingerprint[:16]}.npy"
    table = path.with_suffix(".parquet")
    if path.exists():
        on_progress(len(images))
    else:
        # Two photos of a table may have the same id.
        numbered = replace(images, ids=tuple(map(str, range(len(images)))), attributes=None)
        file = extract(model, numbered, table, max_side=MAX_SIDE, on_progress=on_progress)
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


def nearest(vectors: Vectors, queries: Numbers, k: int, allowed: NDArray[np.bool_]) -> Numbers:
    """Return the k photos nearest to each query, without itself: [N, C], [q] -> [q, k].

    Photos that are not `allowed` [N] are -1.
    """
    found = np.full((len(queries), k), -1, np.int64)
    for start in range(0, len(queries), _QUERIES):
        some = queries[start : start + _QUERIES]
        _, places = exact_search(np.asarray(vectors[some]), vectors, min(k + 1, len(vectors)))
        for row, (own, others) in enumerate(zip(some.tolist(), places, strict=True), start):
            others = others[others != own][:k]
            found[row, : len(others)] = np.where(allowed[others], others, -1)
    return found


def nearest_of_class(vectors: Vectors, labels: Numbers, usable: Numbers, k: int) -> Numbers:
    """Return the k nearest photos of the same class for each usable photo: [n] -> [n, k].

    Neighbors that do not exist are -1. Memory does not depend on the size of a class.
    """
    found = np.full((len(usable), k), -1, np.int64)
    order = np.argsort(labels[usable], kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(labels[usable][order])) + 1):
        members = usable[rows]
        width = min(k, len(members) - 1)
        if width < 1:
            continue
        for start in range(0, len(rows), _QUERIES):
            some = np.arange(start, min(start + _QUERIES, len(rows)))
            own = np.asarray(vectors[members[some]])
            _, places = exact_search(own, _ClassRows(vectors, members), width + 1)
            # A photo with many equal descriptors may not be among its own nearest.
            others = np.argsort(places == some[:, None], axis=1, kind="stable")[:, :width]
            found[rows[some]] = np.pad(
                members[np.take_along_axis(places, others, 1)],
                ((0, 0), (0, k - width)),
                constant_values=-1,
            )
    return found


class _ClassRows:
    """The descriptors of the photos of a class, read in blocks [n, C]."""

    def __init__(self, vectors: Vectors, members: Numbers) -> None:
        self._vectors, self._members = vectors, members

    def __iter__(self) -> Iterator[Vectors]:
        for start in range(0, len(self._members), _ROWS):
            yield np.asarray(self._vectors[self._members[start : start + _ROWS]])
