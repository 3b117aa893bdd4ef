"""Compare queries with a database larger than memory, block by block."""

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ContextDecorator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.errors import InputError
from listwise.machine import core_count, submit_ahead

Vectors = NDArray[np.floating]
# An array [N, C], such as `np.load(path, mmap_mode="r")`, or its parts [n, C] in order: a list, or
# an object that reads the parts again at each iteration.
Database = NDArray[np.generic] | Iterable[NDArray[np.generic]]

_ROWS = 8192  # descriptors read at a time
_SCORES = 1 << 24  # maximum number of scores in a block
_THREADS = 8  # each holds a block: half a gigabyte in total at 2048 dimensions

Result = TypeVar("Result")


class _OneThreadProducts(ContextDecorator):
    """Makes NumPy compute products in one thread while at least one thread is in its block.

    Equal products then round equally, and threads that compute products do not wait for the
    threads of each other's products. The limit of the process is restored after the last block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._limits: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._limits = threadpool_limits(1, "blas")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._limits.restore_original_limits()


one_thread_products = _OneThreadProducts()


def as_queries(queries: ArrayLike) -> Vectors:
    """Return queries as a float32 array [Q, C], or float64 if they are more precise."""
    vectors = np.asarray(queries)
    if vectors.ndim != 2:
        raise InputError(f"`queries` must be [Q, C], not {list(vectors.shape)}")
    return vectors.astype(np.result_type(vectors, np.float32), copy=False)


def plain_array(value: Any) -> Any:
    """Return a tensor of PyTorch, on any device, as an array; any other value as it is."""
    if not hasattr(value, "requires_grad"):
        return value
    plain = value.detach().cpu()
    return (plain.float() if plain.is_floating_point() else plain).numpy()


def unit_rows(vectors: Any) -> NDArray[np.float32]:
    """Return descriptors [n, C] or [C], arrays or tensors, as float32 unit rows [n, C]."""
    rows = np.asarray(plain_array(vectors))
    if rows.dtype.kind not in "fiu" or not 1 <= rows.ndim <= 2:
        raise InputError("descriptors must be numbers [n, C], such as those that `encode` returns")
    rows = np.atleast_2d(rows).astype(np.float32)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not (np.isfinite(lengths) & (lengths > 0)).all():
        raise InputError("a descriptor is zero or not finite, so it has no direction to compare")
    found: NDArray[np.float32] = rows / lengths
    return found


def blocks(database: Database, queries: int) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """Iterate over a database: the position of a block's first descriptor, and the block [n, C].

    Blocks are small enough to be compared with `queries` queries in memory.
    """
    if isinstance(database, Iterator):
        raise InputError(
            "the database is read more than once: give an array, a list of blocks, or an object "
            "that can be iterated again, not a generator"
        )
    rows = max(256, min(_ROWS, _SCORES // max(1, queries)))
    start = 0
    for part in [database] if isinstance(database, np.ndarray) else database:
        if part.ndim != 2:
            raise InputError(f"the database must be [n, C], not {list(part.shape)}")
        for first in range(0, len(part), rows):
            block = _rows(part, first, min(rows, len(part) - first))
            yield start, block
            start += len(block)


def _rows(part: NDArray[np.generic], first: int, count: int) -> NDArray[np.generic]:
    """Return `count` rows of an array, mapping only these if the array is a mapped file.

    With the whole file mapped, every row that was read would stay in memory.
    """
    owner: object = part.base
    if (
        isinstance(part, np.memmap)
        and isinstance(owner, mmap.mmap)  # the position of a view in the file is unknown
        and part.filename is not None
        and part.flags.c_contiguous
    ):
        offset = part.offset + first * part.strides[0]
        return np.memmap(part.filename, part.dtype, "r", offset, (count, part.shape[1]))
    return part[first : first + count]


def each_block(
    queries: Vectors,
    database: Database,
    work: Callable[[int, Vectors], Result],
    take: Callable[[Result], object],
) -> None:
    """Call `take(work(start, scores))` for every block of the database, in order.

    `scores` [Q, n] are the inner products with the n descriptors from position `start`. Several
    threads compute the scores and call `work`; this thread calls `take`.
    """

    def score(block: tuple[int, NDArray[np.generic]]) -> Result:
        return work(block[0], inner_products(queries, *block))

    # One thread per block, rather than several per product, so that `work` uses all cores too.
    threads = min(core_count(), _THREADS)
    with one_thread_products, ThreadPoolExecutor(threads) as pool:
        for found in submit_ahead(pool, score, blocks(database, len(queries)), threads):
            take(found)


def inner_products(queries: Vectors, start: int, block: NDArray[np.generic]) -> Vectors:
    """Return the scores of a block that begins at position `start`: [Q, C], [n, C] -> [Q, n]."""
    if block.shape[1] != queries.shape[1]:
        raise InputError(
            f"queries have {queries.shape[1]} dimensions but the database descriptors from "
            f"position {start} have {block.shape[1]}; extract both with one model"
        )
    # Products with the long side first are faster.
    products = block.astype(queries.dtype, copy=False) @ queries.T
    scores: Vectors = np.ascontiguousarray(products.T)
    if np.isnan(scores).any():
        column = int(np.isnan(scores).any(axis=0).argmax())
        raise InputError(
            f"scores of database position {start + column} contain NaN, which cannot be ranked: "
            "check the descriptors"
        )
    return scores
