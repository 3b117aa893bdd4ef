"""Where judged images stand in a ranked list, without sorting the list."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.blocks import (
    Database,
    Vectors,
    as_queries,
    blocks,
    each_block,
    inner_products,
    one_thread_products,
)
from listwise.errors import InputError

Ranks = NDArray[np.int64]


def rank_judged(
    queries: ArrayLike, database: Database, judged: Sequence[ArrayLike]
) -> list[NDArray[np.int64]]:
    """The ranks, from 0, of each query's judged images among the whole database.

    The database is streamed: a first pass takes the judged images' scores and ends at the last of
    them, a second counts how many images score higher. Equal scores rank in database order.

    Shapes: queries [Q, C]; database [N, C], or blocks [n, C] that can be read twice; `judged` has
    a list of positions for each query, and so has the answer a list of ranks.
    """
    vectors = as_queries(queries)
    positions = _positions(judged, len(vectors))
    wanted = _judged_scores(vectors, database, positions)
    ranks = [np.zeros(len(places), np.int64) for places in positions]

    def count(start: int, scores: Vectors) -> list[Ranks]:
        return [
            _before_in_block(row, start, own, places)
            for row, own, places in zip(scores, wanted, positions, strict=True)
        ]

    def add(counts: list[Ranks]) -> None:
        for rank, more in zip(ranks, counts, strict=True):
            rank += more

    each_block(vectors, database, count, add)
    return ranks


def rank_scores(scores: ArrayLike, judged: Sequence[ArrayLike]) -> list[NDArray[np.int64]]:
    """The ranks, from 0, of each query's judged images, from all scores.

    Equal scores rank in database order. Shapes: scores [Q, N]; `judged` has a list of positions
    for each query, and so has the answer a list of ranks.
    """
    table = np.asarray(scores)
    if table.ndim != 2:
        raise InputError(f"scores should be [Q, N], found shape {table.shape}")
    if np.isnan(table).any():
        raise InputError("scores hold NaN, which has no rank; look for broken descriptors")
    positions = _positions(judged, len(table))
    for places in positions:
        _refuse_outside(places, table.shape[1])
    return [_before(row, row[places], places) for row, places in zip(table, positions, strict=True)]


def _before_in_block(row: Vectors, start: int, wanted: Vectors, positions: Ranks) -> Ranks:
    places = positions - start
    inside = (places >= 0) & (places < len(row))
    row[places[inside]] = wanted[inside]  # a second product need not have rounded the same
    return _before(row, wanted, places)


def _before(row: Vectors, wanted: Vectors, places: Ranks) -> Ranks:
    """How many of a row's scores come before each wanted score, which stands at its place.

    A place below 0 is before the row and one past its end after it.
    """
    if len(wanted) == 0:
        return np.zeros(0, np.int64)
    ordered = np.sort(row)  # values alone: several times as fast as their order
    higher: Ranks = len(row) - np.searchsorted(ordered, wanted, "right")
    equal = len(row) - np.searchsorted(ordered, wanted, "left") - higher
    itself = (places >= 0) & (places < len(row))
    for i in np.flatnonzero((equal > itself) & (places > 0)):
        higher[i] += np.count_nonzero(row[: places[i]] == wanted[i])
    return higher


def _judged_scores(vectors: Vectors, database: Database, positions: list[Ranks]) -> list[Vectors]:
    wanted = [np.zeros(len(places), vectors.dtype) for places in positions]
    everything = np.unique(np.concatenate([np.zeros(0, np.int64), *positions]))
    end = 0
    with one_thread_products():
        for start, block in blocks(database, len(vectors)):
            end = start + len(block)
            first, past = np.searchsorted(everything, (start, end))
            if first < past:
                scores = inner_products(vectors, start, block)
                for row, own, places in zip(scores, wanted, positions, strict=True):
                    inside = (places >= start) & (places < end)
                    own[inside] = row[places[inside] - start]
            if past == len(everything):
                break
    _refuse_outside(everything, end)
    return wanted


def _positions(judged: Sequence[ArrayLike], queries: int) -> list[Ranks]:
    if len(judged) != queries:
        raise InputError(f"{queries} queries but {len(judged)} lists of judged images")
    positions = []
    for query, places in enumerate(judged):
        found = np.asarray(places)
        if found.size == 0:
            found = np.zeros(0, np.int64)
        if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
            raise InputError(f"the judged images of query {query} should be a list of positions")
        if len(found) and found.min() < 0:
            raise InputError(f"query {query} judges position {found.min()}; they start at 0")
        positions.append(found.astype(np.int64))
    return positions


def _refuse_outside(places: Ranks, size: int) -> None:
    if len(places) and places.max() >= size:
        raise InputError(f"position {places.max()} is judged, but the database has {size} images")
