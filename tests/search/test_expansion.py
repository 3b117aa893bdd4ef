from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, DTypeLike, NDArray

from listwise import blocks
from listwise.errors import InputError
from listwise.search import (
    ExactIndex,
    VectorIndex,
    alpha_query_expansion,
    database_augmentation,
    exact_search,
    expansion,
)


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


seeds = st.integers(0, 2**32 - 1)
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
        patch.setattr(expansion, "_ROWS", 7)
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


class FewFound:
    """An index that finds one neighbor and leaves the other places empty."""

    def __init__(self, database: np.ndarray) -> None:
        self.database = database

    def search(self, queries: ArrayLike, k: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        scores, positions = exact_search(queries, self.database, 1)
        empty = np.full((len(scores), k - 1), -1)
        return np.hstack([scores, empty.astype(float)]), np.hstack([positions, empty])

    def vectors(self, positions: ArrayLike) -> NDArray[np.float64]:
        places = np.asarray(positions)
        assert places.min() >= 0
        return self.database[places]


def test_any_index_will_do_even_one_that_finds_fewer() -> None:
    rng = np.random.default_rng(0)
    queries, database = unit(rng, 4), unit(rng, 30)
    index = FewFound(database)
    assert isinstance(index, VectorIndex)
    found = alpha_query_expansion(queries, index, k=10)
    np.testing.assert_allclose(found, alpha_query_expansion(queries, database, k=1))


def test_neighbors_that_point_away_leave_the_query_as_it_is() -> None:
    query = np.array([[1.0, 0.0]])
    np.testing.assert_array_equal(alpha_query_expansion(query, np.array([[-1.0, 0.0]])), query)


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


def test_bad_settings_are_refused() -> None:
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
