"""Expansion, exact search and refinement against plain loops in float64."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import DTypeLike

from listwise import blocks
from listwise.errors import InputError
from listwise.search import (
    ExactIndex,
    VectorIndex,
    alpha_query_expansion,
    database_augmentation,
    diffusion_scores,
    exact_search,
    refined_search,
    refinement,
    superglobal_scores,
)
from listwise.search.refinement import REFINEMENTS, diffuse

seeds = st.integers(0, 2**32 - 1)
methods = st.sampled_from(sorted(REFINEMENTS))


def clustered(seed: int, size: int, dim: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """A query and descriptors around a few centers, float64 unit rows."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(4, dim))
    rows = centers[rng.integers(4, size=size + 1)] + rng.normal(size=(size + 1, dim))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[0], rows[1:]


def plain_superglobal(query: np.ndarray, rows: np.ndarray, k: int, beta: float) -> list[float]:
    refined = []
    for i, own in enumerate(rows):
        others = sorted(
            (j for j in range(len(rows)) if j != i), key=lambda j: -float(own @ rows[j])
        )
        total, weight = own.copy(), 1.0
        for j in others[:k]:
            share = beta * max(0.0, float(own @ rows[j]))
            total, weight = total + share * rows[j], weight + share
        refined.append(total / weight)
    first = [float(query @ each) for each in refined]
    best = sorted(range(len(rows)), key=lambda i: -first[i])[: k + 1]
    expanded = [max(float(refined[i][c]) for i in best) for c in range(rows.shape[1])]
    second = [sum(x * y for x, y in zip(expanded, each, strict=True)) for each in refined]
    return [(a + b) / 2 for a, b in zip(first, second, strict=True)]


def plain_diffusion(
    query: np.ndarray, rows: np.ndarray, k: int, query_k: int, alpha: float, gamma: float
) -> np.ndarray:
    size = len(rows)
    nearest = [
        set(sorted((j for j in range(size) if j != i), key=lambda j: -float(rows[i] @ rows[j]))[:k])
        for i in range(size)
    ]
    affinity = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(size):
            similarity = float(rows[i] @ rows[j])
            if j in nearest[i] and i in nearest[j] and similarity > 0:
                affinity[i][j] = similarity**gamma
    degree = [sum(row) for row in affinity]
    system = np.eye(size)
    for i in range(size):
        for j in range(size):
            if affinity[i][j]:
                system[i, j] -= alpha * affinity[i][j] / (degree[i] * degree[j]) ** 0.5
    start = np.zeros(size)
    for i in sorted(range(size), key=lambda i: -float(query @ rows[i]))[:query_k]:
        start[i] = max(0.0, float(query @ rows[i])) ** gamma
    return np.linalg.inv(system) @ start


@given(seeds, st.integers(1, 40), st.integers(1, 45), st.sampled_from([0.0, 0.15, 1.0]))
def test_superglobal_equals_its_formula(seed: int, size: int, k: int, beta: float) -> None:
    query, rows = clustered(seed, size)
    expected = plain_superglobal(query, rows, k, beta)
    found = superglobal_scores(query, rows, k=k, beta=beta)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@given(
    seeds,
    st.integers(1, 40),
    st.integers(1, 45),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.5, 0.99]),
    st.sampled_from([1.0, 3.0]),
)
def test_diffusion_equals_a_dense_solve(
    seed: int, size: int, k: int, query_k: int, alpha: float, gamma: float
) -> None:
    query, rows = clustered(seed, size)
    expected = plain_diffusion(query, rows, k, query_k, alpha, gamma)
    found = diffusion_scores(query, rows, k=k, query_k=query_k, alpha=alpha, gamma=gamma)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@given(seeds, st.integers(30, 80))
def test_float32_is_close_to_float64(seed: int, size: int) -> None:
    query, rows = clustered(seed, size, dim=64)
    small = query.astype(np.float32), rows.astype(np.float32)
    for method in (superglobal_scores, diffusion_scores):
        exact = method(query, rows)
        np.testing.assert_allclose(method(*small), exact, atol=1e-4 * np.abs(exact).max())


@given(seeds, st.integers(1, 120), methods)
def test_the_order_of_the_database_does_not_matter(seed: int, size: int, method: str) -> None:
    query, rows = clustered(seed, size)
    order = np.random.default_rng(seed).permutation(size)
    score = REFINEMENTS[method].score
    np.testing.assert_allclose(score(query, rows[order]), score(query, rows)[order], atol=1e-10)


@given(seeds, st.integers(0, 30), methods)
def test_copies_in_the_database_get_equal_scores(seed: int, copies: int, method: str) -> None:
    # More copies than neighbors: all of them are equally near.
    query, rows = clustered(seed, 20)
    # Values that products of copies keep exactly equal, whatever the order of the sums is.
    query, rows = np.round(query * 64) / 64, np.round(rows * 64) / 64
    database = np.concatenate([rows, np.repeat(rows[:1], copies, axis=0)])
    scores = REFINEMENTS[method].score(query, database)
    np.testing.assert_allclose(scores[20:], scores[0], rtol=1e-9)


class Found(ExactIndex):
    """An index that finds only some of the nearest, as an approximate index may."""

    def search(self, queries, k):
        scores, positions = exact_search(queries, self.database, 3)
        empty = np.full((len(scores), 2), -1)
        return np.hstack([scores, empty.astype(float)]), np.hstack([positions, empty])

    def vectors(self, positions):
        assert np.min(positions) >= 0
        return super().vectors(positions)


@given(seeds, st.integers(1, 60), methods)
def test_search_scores_the_short_list_of_each_query(seed: int, size: int, method: str) -> None:
    _, rows = clustered(seed, size + 40)
    queries, database = rows[:40], rows[40:]
    parts = np.array_split(database, 3)
    for given_as in (database, parts):
        scores, positions = refined_search(queries, given_as, method)
        assert scores.shape == positions.shape == (40, size)
        for query, values, places in zip(queries, scores, positions, strict=True):
            assert sorted(places) == list(range(size))
            assert (np.diff(values) <= 0).all()
            expected = REFINEMENTS[method].score(query, database)[places]
            np.testing.assert_allclose(values, expected, atol=1e-10)


@pytest.mark.parametrize("method", sorted(REFINEMENTS))
def test_an_index_may_find_fewer(method: str) -> None:
    query, rows = clustered(0, 30)
    scores, positions = refined_search(query[None], Found(rows), method)
    nearest = np.argsort(-rows @ query)[:3]
    expected = REFINEMENTS[method].score(query, rows[nearest])
    assert positions[0].tolist() == [*nearest[np.argsort(-expected)], -1, -1]
    np.testing.assert_allclose(scores[0, :3], np.sort(expected)[::-1])
    assert (scores[0, 3:] == -np.inf).all()


@pytest.mark.parametrize("method", sorted(REFINEMENTS))
def test_only_the_short_list_is_returned(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, rows = clustered(1, 30)
    monkeypatch.setitem(REFINEMENTS, method, replace(REFINEMENTS[method], size=7))
    _, positions = refined_search(query[None], rows, method)
    assert sorted(positions[0]) == sorted(np.argsort(-rows @ query)[:7])


def test_bad_settings_are_refused() -> None:
    query, rows = np.eye(3)[0], np.eye(3)
    for method in (superglobal_scores, diffusion_scores):
        with pytest.raises(InputError, match="1 or more, not 0"):
            method(query, rows, k=0)
        with pytest.raises(InputError, match=r"\[n, 3\].*not \[3, 2\]"):
            method(query, rows[:, :2])
    with pytest.raises(InputError, match="1 or more, not 0"):
        diffusion_scores(query, rows, query_k=0)
    for name in ("k", "query_k"):
        with pytest.raises(InputError, match=f"`{name}` must be 1 or more, not 0"):
            diffuse(rows @ query, rows, **{name: 0})
    for alpha in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match="`alpha` must be from 0 to less than 1"):
            diffusion_scores(query, rows, alpha=alpha)
    with pytest.raises(InputError, match="`gamma` must be more than 0"):
        diffusion_scores(query, rows, gamma=0)
    with pytest.raises(InputError, match="`beta` must be 0 or more"):
        superglobal_scores(query, rows, beta=-1)
    with pytest.raises(InputError, match="`refine` must be superglobal or diffusion, not 'magic'"):
        refined_search(query[None], rows, "magic")


def test_diffusion_also_starts_from_verified_results() -> None:
    # Two chains along circles; the query is near the first, and verification matched an end of the
    # second.
    angles = np.radians([5, 20, 35, 50])
    zeros = np.zeros(4)
    near = np.stack([np.cos(angles), np.sin(angles), zeros, zeros], axis=1)
    far = np.stack([zeros, zeros, np.cos(angles), np.sin(angles)], axis=1)
    rows, query = np.concatenate([near, far]), np.array([1.0, 0, 0, 0])
    options = {"k": 2, "query_k": 2}
    np.testing.assert_allclose(
        diffuse(rows @ query, rows, **options), diffusion_scores(query, rows, **options)
    )
    assert (diffuse(rows @ query, rows, **options)[4:] == 0).all()
    verified = np.arange(8) == 4
    scores = diffuse(rows @ query, rows, verified, **options)
    assert (scores[4:] > 0).all()
    # The system is linear: what the verified result adds does not depend on the query.
    alone = diffuse(np.zeros(8), rows, verified, **options)
    np.testing.assert_allclose(scores - diffusion_scores(query, rows, **options), alone, atol=1e-12)
    with pytest.raises(InputError, match=r"\[n\], \[n, C\] and \[n\], not \[8\].*\[7\]"):
        diffuse(rows @ query, rows, verified[:7])


def unit(rng: np.random.Generator, size: int, dtype: DTypeLike = np.float64) -> np.ndarray:
    vectors = rng.normal(size=(size, 5))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(dtype)


def plain_expansion(
    query: np.ndarray, others: list[np.ndarray], alpha: float, k: int
) -> np.ndarray:
    total = query.astype(np.float64)
    nearest = sorted(others, key=lambda d: -float(query.astype(np.float64) @ d))[:k]
    for neighbor in nearest:
        similarity = float(query.astype(np.float64) @ neighbor)
        if similarity > 0:
            total = total + similarity**alpha * neighbor
    return total / np.sqrt((total**2).sum())


class Parts:
    def __init__(self, whole: np.ndarray) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(np.array_split(self.whole, 3))


dtypes = st.sampled_from([(np.float32, 1e-5), (np.float64, 1e-12)])


@given(seeds, st.integers(1, 40), st.sampled_from([0.0, 1.0, 2.0, 3.5]), st.integers(1, 50), dtypes)
def test_query_expansion_equals_its_formula(
    seed: int, size: int, alpha: float, k: int, kind: tuple[DTypeLike, float]
) -> None:
    rng = np.random.default_rng(seed)
    dtype, tolerance = kind
    queries, database = unit(rng, 3, dtype), unit(rng, size, dtype)
    expected = [plain_expansion(query, list(database), alpha, k) for query in queries]
    for given_as in (database, Parts(database), ExactIndex(database)):
        found = alpha_query_expansion(queries, given_as, alpha=alpha, k=k)
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, atol=tolerance)


@pytest.mark.slow
@given(seeds, st.integers(1, 40), st.sampled_from([0.0, 2.0]), st.integers(1, 50), dtypes)
def test_augmentation_equals_its_formula(
    seed: int, size: int, alpha: float, k: int, kind: tuple[DTypeLike, float]
) -> None:
    dtype, tolerance = kind
    database = unit(np.random.default_rng(seed), size, dtype)
    expected = [
        plain_expansion(own, [other for j, other in enumerate(database) if j != i], alpha, k)
        for i, own in enumerate(database)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refinement, "_ROWS", 7)
        found = database_augmentation(database, k=k, alpha=alpha)
        through_index = database_augmentation(
            database, k=k, alpha=alpha, index=ExactIndex(database)
        )
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, atol=tolerance)
    np.testing.assert_array_equal(found, through_index)


def test_copies_do_not_make_a_descriptor_its_own_neighbor() -> None:
    # Six copies and one other: with k = 3 only copies are neighbors, though the last copy is not
    # among the first four of its own list.
    database = np.array([[1.0, 0.0]] * 6 + [[0.6, 0.8]])
    found = database_augmentation(database, k=3)
    np.testing.assert_allclose(found[:6], database[:6])
    # The other one's three nearest are copies at 0.6, each with weight 0.36.
    total = np.array([0.6, 0.8]) + 3 * 0.36 * np.array([1.0, 0.0])
    np.testing.assert_allclose(found[6], total / np.linalg.norm(total))


def test_any_index_will_do_even_one_that_finds_fewer() -> None:
    rng = np.random.default_rng(0)
    queries, database = unit(rng, 4), unit(rng, 30)
    index = Found(database)
    assert isinstance(index, VectorIndex)
    found = alpha_query_expansion(queries, index, k=10)
    np.testing.assert_allclose(found, alpha_query_expansion(queries, database, k=3))


@given(seeds, st.integers(1, 900), st.integers(1, 40), st.sampled_from([2, 1000]))
def test_exact_search_equals_a_stable_sort(seed: int, size: int, k: int, level: int) -> None:
    rng = np.random.default_rng(seed)
    queries = rng.integers(-level, level, (3, 4)).astype(np.float32)
    database = rng.integers(-level, level, (size, 4)).astype(np.float32)
    table = queries @ database.T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_ROWS", 256)
        answers = [exact_search(queries, given_as, k) for given_as in (database, Parts(database))]
    for scores, positions in answers:
        for row, found_scores, found in zip(table, scores, positions, strict=True):
            expected = sorted(range(size), key=lambda i: (-row[i], i))[:k]
            assert found.tolist() == expected
            assert found_scores.tolist() == row[expected].tolist()


def test_the_descriptors_of_a_stream() -> None:
    database = unit(np.random.default_rng(0), 30)
    wanted = [29, 3, 3, 0, 11]
    np.testing.assert_array_equal(ExactIndex(Parts(database)).vectors(wanted), database[wanted])


def test_bad_settings_of_expansion_are_refused() -> None:
    vectors = np.eye(3)
    for call in (alpha_query_expansion, exact_search):
        with pytest.raises(InputError, match=r"at least 1|1 or more"):
            call(vectors, vectors, k=0)
    with pytest.raises(InputError, match="0 or more"):
        alpha_query_expansion(vectors, vectors, alpha=-1)
    with pytest.raises(InputError, match=r"at least 1|1 or more"):
        database_augmentation(vectors, k=0)
    with pytest.raises(InputError, match="3 dimensions"):
        alpha_query_expansion(vectors, np.eye(4))
