"""Re-ranking by global descriptors against plain loops in float64."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.errors import InputError
from listwise.search import diffusion_scores, refined_search, refinement, superglobal_scores
from listwise.search.exact import ExactIndex, exact_search
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


def test_diffusion_follows_a_chain_of_neighbors() -> None:
    # From the first to the last along the circle: the last is no neighbor of the query, and less
    # similar to it than the one that stands alone.
    angles = np.radians([5, 20, 35, 50, 65, 80])
    chain = np.stack([np.cos(angles), np.sin(angles), np.zeros(6)], axis=1)
    alone = np.array([[0.5, -np.sqrt(0.375), np.sqrt(0.375)]])
    scores = diffusion_scores([1, 0, 0], np.concatenate([chain, alone]), k=2, query_k=2)
    assert scores[6] == 0
    assert scores[:6].min() > 0


class Found(ExactIndex):
    """An index that finds only some of the nearest, as an approximate index may."""

    def search(self, queries, k):
        scores, positions = exact_search(queries, self.database, 3)
        empty = np.full((len(scores), 2), -1)
        return np.hstack([scores, empty.astype(float)]), np.hstack([positions, empty])


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


def test_an_empty_short_list_has_no_scores() -> None:
    for method in (superglobal_scores, diffusion_scores):
        assert method(np.ones(3), np.empty((0, 3))).shape == (0,)


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


def test_the_graph_does_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    query, rows = clustered(3, 100)
    whole = diffusion_scores(query, rows, k=5)
    monkeypatch.setattr(refinement, "_BLOCK", 7)
    np.testing.assert_allclose(diffusion_scores(query, rows, k=5), whole, atol=1e-12)


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
