"""Compute the ranks of judged images without sorting whole lists."""

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
    """Rank the judged images of each query in the whole database, by dot product.

    The database is read twice, block by block, so it may be larger than memory: the first pass
    computes the scores of the judged images, the second counts the images that score higher.
    Images with equal scores rank in database order.

    Args:
        queries: [Q, C] descriptors.
        database: [N, C] descriptors, or blocks [n, C] that can be read twice.
        judged: for each query, the database positions of its judged images.

    Returns:
        For each query, the ranks of its judged images, counted from 0.

    Examples:
        >>> database = np.array([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])
        >>> rank_judged([[1.0, 0.0]], database, [[0, 2]])
        [array([2, 1])]
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
    """Rank the judged images of each query by a matrix of scores.

    The highest score ranks first; images with equal scores rank in database order.

    Args:
        scores: [Q, N], one row for each query and one column for each database image.
        judged: for each query, the database positions of its judged images.

    Returns:
        For each query, the ranks of its judged images, counted from 0.
    """
    table = np.asarray(scores)
    if table.ndim != 2:
        raise InputError(f"scores should have the shape [Q, N], found {table.shape}")
    if np.isnan(table).any():
        raise InputError("scores contain NaN, which cannot be ranked: check the descriptors")
    positions = _positions(judged, len(table))
    for places in positions:
        _check_positions(places, table.shape[1])
    return [_before(row, row[places], places) for row, places in zip(table, positions, strict=True)]


def _before_in_block(row: Vectors, start: int, wanted: Vectors, positions: Ranks) -> Ranks:
    places = positions - start
    inside = (places >= 0) & (places < len(row))
    row[places[inside]] = wanted[
        inside
    ]  # the product of the second pass may be rounded differently
    return _before(row, wanted, places)


def _before(row: Vectors, wanted: Vectors, places: Ranks) -> Ranks:
    """Count the scores of a row that rank before each wanted score, which has a place in the list.

    Places are relative to the row: one below 0 lies before it, one past its end after it.
    """
    if len(wanted) == 0:
        return np.zeros(0, np.int64)
    ordered = np.sort(row)  # sorting values is several times as fast as argsort
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
    with one_thread_products:
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
    _check_positions(everything, end)
    return wanted


def _positions(judged: Sequence[ArrayLike], queries: int) -> list[Ranks]:
    if len(judged) != queries:
        raise InputError(
            f"found {len(judged)} lists of judged images for {queries} queries: give one per query"
        )
    positions = []
    for query, places in enumerate(judged):
        found = np.asarray(places)
        if found.size == 0:
            found = np.zeros(0, np.int64)
        if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
            raise InputError(
                f"the judged images of query {query} should be a list of whole numbers, "
                "their positions in the database"
            )
        if len(found) and found.min() < 0:
            raise InputError(
                f"query {query} has a judged image at position {found.min()}: positions start at 0"
            )
        positions.append(found.astype(np.int64))
    return positions


def _check_positions(places: Ranks, size: int) -> None:
    if len(places) and places.max() >= size:
        raise InputError(
            f"a judged image has position {places.max()}, but the database has only {size} images"
        )
