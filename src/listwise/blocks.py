"""Descriptors too many for memory, compared with queries one block after the other."""

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
# An array [N, C] (of `np.load(path, mmap_mode="r")`, say), or its parts [n, C] in order: a list,
# or an object that reads them anew each time it is iterated.
Database = NDArray[np.generic] | Iterable[NDArray[np.generic]]

_ROWS = 8192  # descriptors read at a time
_SCORES = 1 << 24  # scores of a block at most
_THREADS = 8  # each holds a block: half a gigabyte in all, at 2048 dimensions

Result = TypeVar("Result")


def as_queries(queries: ArrayLike) -> Vectors:
    """Queries as an array of float32 or, where they are more precise, float64: [Q, C]."""
    vectors = np.asarray(queries)
    if vectors.ndim != 2:
        raise InputError(f"queries should be [Q, C], found shape {vectors.shape}")
    return vectors.astype(np.result_type(vectors, np.float32), copy=False)


def blocks(database: Database, queries: int) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """The position of each block's first descriptor, and the block [n, C].

    Blocks are small enough to be compared with so many `queries` at once.
    """
    if isinstance(database, Iterator):
        raise InputError(
            "the database is read more than once: give an array, a list of blocks or an object "
            "that starts anew at every iteration, not a generator"
        )
    rows = max(256, min(_ROWS, _SCORES // max(1, queries)))
    start = 0
    for part in [database] if isinstance(database, np.ndarray) else database:
        if part.ndim != 2:
            raise InputError(f"database descriptors should be [n, C], found shape {part.shape}")
        for first in range(0, len(part), rows):
            block = _rows(part, first, min(rows, len(part) - first))
            yield start, block
            start += len(block)


def _rows(part: NDArray[np.generic], first: int, count: int) -> NDArray[np.generic]:
    """Some rows of an array; those of a mapped file are mapped alone.

    A file mapped whole would stay in memory as far as it was read.
    """
    owner: object = part.base
    if (
        isinstance(part, np.memmap)
        and isinstance(owner, mmap.mmap)  # not a view, whose place in the file is not known
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
    """Call `take(work(start, scores))` for every block, its scores [Q, n] from position `start`.

    Blocks are scored and worked on in several threads, and taken in order in this one.
    """

    def score(start: int, block: NDArray[np.generic]) -> Result:
        return work(start, inner_products(queries, start, block))

    # A thread for each block, not several for one product, so that `work` has all cores too.
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
    """A context in which equal products round equally, whoever computes them."""
    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="blas")
    return limits


def inner_products(queries: Vectors, start: int, block: NDArray[np.generic]) -> Vectors:
    """Scores of a block that begins at position `start`: [Q, C], [n, C] -> [Q, n]."""
    if block.shape[1] != queries.shape[1]:
        raise InputError(
            f"queries have {queries.shape[1]} dimensions but the database descriptors from "
            f"position {start} have {block.shape[1]}; extract both with one model"
        )
    # The long side first: products of this shape are the faster ones.
    products = block.astype(queries.dtype, copy=False) @ queries.T
    scores: Vectors = np.ascontiguousarray(products.T)
    if np.isnan(scores).any():
        column = int(np.isnan(scores).any(axis=0).argmax())
        raise InputError(
            f"scores of database position {start + column} hold NaN, which has no rank; "
            "look for broken descriptors"
        )
    return scores
