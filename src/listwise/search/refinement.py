"""Search again with the descriptors that a search found: query expansion and refinement.

Query expansion and database-side augmentation add the nearest descriptors to each one. Refinement
by SuperGlobal or diffusion compares the descriptors of the short list, which are the first results
of a query, with each other. None of them needs local features or a stored graph, so entries that
are added or removed count immediately.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.blocks import Database, Vectors, as_queries
from listwise.errors import InputError
from listwise.search.exact import ExactIndex, without_itself
from listwise.search.options import RefineMethod

DIFFUSED = 5000
"""Number of first results that diffusion re-ranks after they were verified."""
_QUERIES = 32  # queries whose short lists are read together
_BLOCK = 512  # rows whose similarities to all others are in memory at a time
_ROWS = 1024  # descriptors that are augmented together
_TOLERANCE = 1e-12  # residual of the scores of diffusion, relative to the right-hand side


@runtime_checkable
class VectorIndex(Protocol):
    """An index that returns nearest neighbors and their descriptors, as expansion needs."""

    def search(
        self, queries: ArrayLike, k: int, /
    ) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
        """Find at most k neighbors per query, best first.

        Returns:
            Scores and positions, both [Q, k'] with k' <= k. A position is -1 if fewer
            neighbors were found.
        """

    def vectors(self, positions: ArrayLike, /) -> NDArray[np.generic]:
        """Return the descriptors at the given positions: [n] -> [n, C]."""


def alpha_query_expansion(
    queries: ArrayLike, database: Database | VectorIndex, alpha: float = 2.0, k: int = 10
) -> NDArray[np.floating]:
    """Expand queries with their nearest neighbors (αQE).

    Each query q becomes L2(q + Σ simᵅ · d) over its k nearest descriptors d. A neighbor with a
    similarity of 0 or less has no weight.

    Args:
        queries: unit descriptors [Q, C].
        database: descriptors [N, C], blocks [n, C] that can be read twice, or an index.
        alpha: the power of the similarities.
        k: the number of neighbors.

    Returns:
        Unit descriptors [Q, C].
    """
    _check_expansion(alpha, k)
    vectors = as_queries(queries)
    index = database if isinstance(database, VectorIndex) else ExactIndex(database)
    scores, positions = index.search(vectors, k)
    return _expanded(vectors, index, scores, positions, alpha)


def database_augmentation(
    database: ArrayLike, k: int = 10, alpha: float = 2.0, index: VectorIndex | None = None
) -> NDArray[np.floating]:
    """Replace each database descriptor by its αQE with its k nearest others (DBA).

    The descriptor itself has the weight 1.

    Args:
        database: unit descriptors [N, C].
        k: the number of neighbors.
        alpha: the power of the similarities.
        index: an index of the same descriptors in the same order; exact search by default.

    Returns:
        Unit descriptors [N, C].
    """
    _check_expansion(alpha, k)
    vectors = np.asarray(database)
    neighbors = ExactIndex(vectors) if index is None else index
    found = np.empty(vectors.shape, np.result_type(vectors, np.float32))
    for start in range(0, len(vectors), _ROWS):
        block = as_queries(vectors[start : start + _ROWS])
        scores, positions = neighbors.search(block, k + 1)
        own = np.arange(start, start + len(block))
        scores, positions = without_itself(scores, positions, own, k)
        found[start : start + _ROWS] = _expanded(block, neighbors, scores, positions, alpha)
    return found


def _expanded(
    vectors: Vectors,
    index: VectorIndex,
    scores: Vectors,
    positions: NDArray[np.int64],
    alpha: float,
) -> NDArray[np.floating]:
    positive = (positions >= 0) & (scores > 0)
    weights = np.where(positive, np.where(positive, scores, 1) ** alpha, 0).astype(vectors.dtype)
    total = vectors.copy()
    unique, inverse = np.unique(positions[positive], return_inverse=True)
    if len(unique):
        neighbors = index.vectors(unique)
        rows = np.zeros(positions.shape, np.int64)
        rows[positive] = inverse
        for weight, row in zip(weights.T, rows.T, strict=True):
            total += weight[:, None] * neighbors[row]
    norms = np.linalg.norm(total, axis=1, keepdims=True)
    total /= np.maximum(norms, np.finfo(total.dtype).tiny)
    return total


def _check_expansion(alpha: float, k: int) -> None:
    _check_neighbors(k=k)
    if not alpha >= 0:
        raise InputError(f"`alpha` must be 0 or more, not {alpha}")


def superglobal_scores(
    query: ArrayLike, short_list: ArrayLike, *, k: int = 9, beta: float = 1.0
) -> NDArray[np.floating]:
    """Score the short list of a query with refined descriptors, as SuperGlobal does.

    Each descriptor becomes the weighted mean of itself, with weight 1, and its k nearest neighbors
    in the short list, with weights β · similarity. The first score is its dot product with the
    query, the second its dot product with the expanded query: the maximum, in each dimension, over
    the k + 1 refined descriptors with the highest first score. The result is the mean of the two.
    A neighbor with a similarity of 0 or less has no weight.

    Reference: Shao et al., "Global Features are All You Need for Image Retrieval and Reranking",
    ICCV 2023.

    Args:
        query: unit descriptor [C].
        short_list: unit descriptors [n, C] of the first results.
        k: the number of neighbors.
        beta: the factor of the similarities. The paper uses 0.15; 1 has a higher mAP on the
            validation classes of landmarks.

    Returns:
        Scores [n]; higher is better.
    """
    _check_neighbors(k=k)
    vector, rows = _checked(query, short_list)
    if not beta >= 0:
        raise InputError(f"`beta` must be 0 or more, not {beta}")
    if not len(rows):
        return np.zeros(0, rows.dtype)
    similarities, near = _neighbors(rows, k)
    weights = np.where(near, beta * similarities.clip(0), 0)
    np.fill_diagonal(weights, 1)
    refined = weights @ rows / weights.sum(axis=1, keepdims=True)
    first: Vectors = refined @ vector
    expanded = refined[first >= _nth_largest(first, k + 1)].max(axis=0)
    scores: Vectors = (first + refined @ expanded) / 2
    return scores


def diffusion_scores(
    query: ArrayLike,
    short_list: ArrayLike,
    *,
    k: int = 50,
    query_k: int = 3,
    alpha: float = 0.9,
    gamma: float = 5.0,
) -> NDArray[np.floating]:
    """Score the short list of a query by diffusion on its graph of nearest neighbors.

    Two descriptors are linked if each is among the k nearest neighbors of the other; the weight of
    a link is similarity^γ. With S, the weights divided by the square roots of the degrees of both
    ends, the scores f solve (I - αS) f = y; conjugate gradients compute them to a relative residual
    of 1e-12. y is similarity^γ for the nearest descriptors of the query, and 0 for the others.

    References: Iscen et al., "Efficient Diffusion on Region Manifolds", CVPR 2017; Yang et al.,
    "Efficient Image Retrieval via Decoupling Diffusion into Online and Offline Processing",
    AAAI 2019.

    Args:
        query: unit descriptor [C].
        short_list: unit descriptors [n, C] of the first results.
        k: the number of neighbors of a descriptor in the graph.
        query_k: the number of neighbors of the query.
        alpha: the share of a score that neighbors pass on, from 0 to less than 1.
        gamma: the power of the similarities. The papers use α = 0.99, γ = 3 and ten neighbors of
            the query; the defaults have a higher mAP on the validation classes of landmarks.

    Returns:
        Scores [n]; higher is better, and 0 for descriptors that no path connects with the query.
    """
    vector, rows = _checked(query, short_list)
    return diffuse(rows @ vector, rows, k=k, query_k=query_k, alpha=alpha, gamma=gamma)


def diffuse(
    similarities: ArrayLike,
    short_list: ArrayLike,
    verified: ArrayLike | None = None,
    *,
    k: int = 50,
    query_k: int = 3,
    alpha: float = 0.9,
    gamma: float = 5.0,
) -> NDArray[np.float64]:
    """Score a short list by diffusion, as `diffusion_scores` does, given its similarities.

    Diffusion also starts from the results that another method, such as spatial verification, has
    matched with the query: y is 1 for each of them.

    Args:
        similarities: dot products of the query and the short list, [n].
        short_list: unit descriptors [n, C] of the first results.
        verified: whether a result is matched with the query, [n].
        k: the number of neighbors of a descriptor in the graph.
        query_k: the number of neighbors of the query.
        alpha: the share of a score that neighbors pass on, from 0 to less than 1.
        gamma: the power of the similarities.

    Returns:
        Scores [n]; higher is better, and 0 for descriptors that no path connects with the start.

    Example:
        >>> rows = np.eye(3)
        >>> diffuse([0.6, 0.5, 0.1], rows, [False, False, True], query_k=1).argmax()
        np.int64(2)
    """
    own, rows = np.asarray(similarities, np.float64), np.asarray(short_list)
    known = np.zeros(len(rows), bool) if verified is None else np.asarray(verified, bool)
    if rows.ndim != 2 or own.shape != (len(rows),) or known.shape != own.shape:
        raise InputError(
            f"`similarities`, `short_list` and `verified` must be [n], [n, C] and [n], not "
            f"{list(own.shape)}, {list(rows.shape)} and {list(known.shape)}"
        )
    _check_neighbors(k=k, query_k=query_k)
    if not 0 <= alpha < 1:
        raise InputError(f"`alpha` must be from 0 to less than 1, not {alpha}")
    if not gamma > 0:
        raise InputError(f"`gamma` must be more than 0, not {gamma}")
    if not len(rows):
        return np.zeros(0)
    one, other, similar = _links(rows, k)
    weights = similar.astype(np.float64) ** gamma
    degrees = np.bincount(one, weights, len(rows))
    weights *= alpha / np.sqrt(degrees[one] * degrees[other])
    start = np.where(own >= _nth_largest(own, query_k), own.clip(0) ** gamma, 0)
    start[known] = 1
    return _solve(start, lambda f: f - np.bincount(one, weights * f[other], len(rows)))


def _solve(
    target: NDArray[np.float64], product: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Solve a positive definite system, given its product with a vector: conjugate gradients."""
    found = np.zeros_like(target)
    residual = target.copy()
    direction = target.copy()
    size = float(residual @ residual)
    limit = size * _TOLERANCE**2
    # In exact arithmetic, as many steps as unknowns suffice; rounding can require a few more.
    for _ in range(2 * len(target)):
        if size <= limit:
            break
        image = product(direction)
        step = size / float(direction @ image)
        found += step * direction
        residual -= step * image
        last, size = size, float(residual @ residual)
        direction = residual + size / last * direction
    return found


@dataclass(frozen=True)
class Refinement:
    """A method of re-ranking by global descriptors.

    Attributes:
        label: its name in tables.
        size: the number of results in the short list.
        score: computes scores [n] from a query [C] and the short list [n, C].
    """

    label: str
    size: int
    score: Callable[[ArrayLike, ArrayLike], NDArray[np.floating]]


REFINEMENTS = {
    "superglobal": Refinement("SuperGlobal", 400, superglobal_scores),
    "diffusion": Refinement("diffusion", 2000, diffusion_scores),
}
"""The methods by name."""


def find_refinement(name: str) -> Refinement:
    """Return the method with a name; an `InputError` for an unknown name."""
    if name not in REFINEMENTS:
        raise InputError(f"`refine` must be {' or '.join(REFINEMENTS)}, not {name!r}")
    return REFINEMENTS[name]


def refined_search(
    queries: ArrayLike, database: Database | VectorIndex, method: RefineMethod
) -> tuple[NDArray[np.floating], NDArray[np.int64]]:
    """Find the first results of each query, and re-rank them by their global descriptors.

    Args:
        queries: unit descriptors [Q, C].
        database: descriptors [N, C], blocks [n, C] that can be read several times, or an index.
        method: "superglobal" (the first 400 results) or "diffusion" (the first 2000).

    Returns:
        Scores of the method and positions in the database, best first, both [Q, n]. A position
        is -1, with the score -inf, if an index found fewer results.

    Example:
        >>> scores, positions = refined_search([[1.0, 0.0]], np.eye(2), "diffusion")
        >>> positions
        array([[0, 1]])
    """
    chosen = find_refinement(method)
    vectors = as_queries(queries)
    index = database if isinstance(database, VectorIndex) else ExactIndex(database)
    _, positions = index.search(vectors, chosen.size)
    positions = np.array(positions)
    scores = np.full(positions.shape, -np.inf, vectors.dtype)
    for start in range(0, len(vectors), _QUERIES):
        part = positions[start : start + _QUERIES]
        unique, inverse = np.unique(part[part >= 0], return_inverse=True)
        if not len(unique):
            continue
        rows = index.vectors(unique)
        ends = np.cumsum((part >= 0).sum(axis=1))
        for number, places in enumerate(np.split(inverse, ends[:-1]), start):
            found = positions[number] >= 0
            values = chosen.score(vectors[number], rows[places])
            # The sort is stable: equal scores stay in the order of the search.
            order = np.argsort(-values, kind="stable")
            positions[number, : len(order)] = positions[number][found][order]
            positions[number, len(order) :] = -1
            scores[number, : len(order)] = values[order]
    return scores, positions


def _check_neighbors(**numbers: int) -> None:
    for name, number in numbers.items():
        if not number >= 1:
            raise InputError(f"`{name}` must be 1 or more, not {number}")


def _checked(query: ArrayLike, short_list: ArrayLike) -> tuple[Vectors, Vectors]:
    """The query [C] and the short list [n, C] with the same type."""
    vector = as_queries(np.atleast_2d(np.asarray(query)))[0]
    rows = np.asarray(short_list)
    if rows.ndim != 2 or rows.shape[1] != len(vector):
        raise InputError(
            f"`short_list` must be [n, {len(vector)}] as the query has {len(vector)} dimensions, "
            f"not {list(rows.shape)}"
        )
    return vector, rows.astype(vector.dtype, copy=False)


def _neighbors(rows: Vectors, k: int) -> tuple[Vectors, NDArray[np.bool_]]:
    """Similarities [n, n], and where a column is one of the k nearest neighbors of a row.

    Equally near neighbors are all included, so that the result does not depend on the order of
    the rows.
    """
    similarities: Vectors = rows @ rows.T
    np.fill_diagonal(similarities, -np.inf)
    near = _nearest(similarities, k) & ~np.eye(len(rows), dtype=bool)
    np.fill_diagonal(similarities, 0)
    return similarities, near


def _nearest(similarities: Vectors, k: int) -> NDArray[np.bool_]:
    """Where a column is one of the k highest of its row, or equal to them: [n, m] -> [n, m]."""
    place = max(0, similarities.shape[1] - k)
    lowest: Vectors = np.partition(similarities, place, axis=1)[:, place, None]
    return similarities >= lowest


def _links(
    rows: Vectors, k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.floating]]:
    """Pairs of rows that are among the k nearest neighbors of each other, with similarities > 0.

    Every pair occurs in both directions. The similarities are computed block by block, so memory
    grows with the number of rows, not with its square.
    """
    ones, others, values = [], [], []
    for start in range(0, len(rows), _BLOCK):
        similar: Vectors = rows[start : start + _BLOCK] @ rows.T
        own = np.arange(len(similar))
        similar[own, own + start] = -np.inf
        one, other = np.nonzero((similar > 0) & _nearest(similar, k))
        ones.append(one + start)
        others.append(other)
        values.append(similar[one, other])
    one, other, value = np.concatenate(ones), np.concatenate(others), np.concatenate(values)
    # The pairs are in the order of these codes, so the opposite direction is found by bisection.
    codes, opposite = one * len(rows) + other, other * len(rows) + one
    place = np.searchsorted(codes, opposite).clip(max=max(0, len(codes) - 1))
    both = codes[place] == opposite
    # Products of different blocks may differ in the last digit; the system must be symmetric.
    value = (value + value[place]) / 2
    return one[both], other[both], value[both]


def _nth_largest(values: Vectors, n: int) -> float:
    """The n-th largest value, or the smallest if there are fewer."""
    place = max(0, len(values) - n)
    return float(np.partition(values, place)[place])
