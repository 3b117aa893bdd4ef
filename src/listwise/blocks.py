"""Descriptors too many for memory, compared with queries one block after the other."""

import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.errors import InputError

Vectors = NDArray[np.floating]
# An array [N, C] (of `np.load(path, mmap_mode="r")`, say), or its parts [n, C] in order: a list,
# or an object that reads them anew each time it is iterated.
Database = NDArray[np.generic] | Iterable[NDArray[np.generic]]

_ROWS = 8192  # descriptors read at a time
_SCORES = 1 << 24  # scores held at a time


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


def score_blocks(queries: Vectors, database: Database) -> Iterator[tuple[int, Vectors]]:
    """The position of each block's first descriptor, and the block's scores [Q, n].

    The next block is read and multiplied while the caller works on this one.
    """
    parts = blocks(database, len(queries))

    def following() -> tuple[int, Vectors] | None:
        found = next(parts, None)
        return found and (found[0], inner_products(queries, *found))

    with ThreadPoolExecutor(1) as worker:
        ahead = worker.submit(following)
        while (scored := ahead.result()) is not None:
            ahead = worker.submit(following)
            yield scored


def inner_products(queries: Vectors, start: int, block: NDArray[np.generic]) -> Vectors:
    """Scores of a block that begins at position `start`: [Q, C], [n, C] -> [Q, n]."""
    if block.shape[1] != queries.shape[1]:
        raise InputError(
            f"queries have {queries.shape[1]} dimensions but the database descriptors from "
            f"position {start} have {block.shape[1]}; extract both with one model"
        )
    scores: Vectors = queries @ block.T.astype(queries.dtype, copy=False)
    if np.isnan(scores).any():
        column = int(np.isnan(scores).any(axis=0).argmax())
        raise InputError(
            f"scores of database position {start + column} hold NaN, which has no rank; "
            "look for broken descriptors"
        )
    return scores
