"""Compare queries with a database larger than memory, block by block."""

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.errors import InputError
from listwise.machine import core_count

Vectors = NDArray[np.floating]
# An array [N, C], such as `np.load(path, mmap_mode="r")`, or its parts [n, C] in order: a list, or
# an object that reads the parts again at each iteration.
Database = NDArray[np.generic] | Iterable[NDArray[np.generic]]

_ROWS = 8192  # descriptors read at a time
_SCORES = 1 << 24  # maximum number of scores in a block
_THREADS = 8  # each holds a block: half a gigabyte in total at 2048 dimensions

Result = TypeVar("Result")


def as_queries(queries: ArrayLike) -> Vectors:
    """Return queries as a float32 array [Q, C], or float64 if they are more precise."""
    vectors = np.asarray(queries)
    if vectors.ndim != 2:
        raise InputError(f"`queries` must be [Q, C], not {list(vectors.shape)}")
    return vectors.astype(np.result_type(vectors, np.float32), copy=False)


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

    def score(start: int, block: NDArray[np.generic]) -> Result:
        return work(start, inner_products(queries, start, block))

    # One thread per block, rather than several per product, so that `work` uses all cores too.
    threads = min(core_count(), _THREADS)
    with one_thread_products(), ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[Result]] = deque()
        for start, block in blocks(database, len(queries)):
            pending.append(pool.submit(score, start, block))
            if len(pending) > threads:
                take(pending.popleft().result())
        while pending:
            take(pending.popleft().result())


def one_thread_products() -> AbstractContextManager[object]:
    """Compute matrix products in one thread, so that equal products round equally."""
    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="blas")
    return limits


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
