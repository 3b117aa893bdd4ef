from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.search.exact import best_of
from listwise.search.folder import flat
from listwise.search.folder.flat import FlatSearch

steps = st.lists(
    st.tuples(st.booleans(), st.sets(st.integers(0, 30), min_size=1, max_size=12)), max_size=12
)


@given(st.integers(0, 2**32 - 1), steps, st.integers(1, 7), st.integers(1, 40))
def test_it_equals_a_dictionary_that_is_sorted(
    seed: int, changes: list[tuple[bool, set[int]]], queried: int, k: int
) -> None:
    rng = np.random.default_rng(seed)
    model: dict[int, np.ndarray] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "_BLOCK", 3 * 4 * 4)  # three rows
        patch.setattr(flat, "_QUERIES", 6)
        search = FlatSearch(4)
        for adds, chosen in changes:
            if adds:
                keys = np.array(sorted(chosen, key=lambda key: rng.random()), np.int64)
                rows = rng.integers(-9, 9, (len(keys), 4)).astype(np.float32)
                search.put(keys, rows, np.array([int(key) in model for key in keys]))
                model.update(zip(keys.tolist(), rows, strict=True))
            else:
                gone = [key for key in chosen if key in model]
                search.remove(np.array(gone, np.int64))
                for key in gone:
                    del model[key]
            assert len(search) == len(model)
            queries = rng.integers(-9, 9, (queried, 4)).astype(np.float32)
            scores, found = search.search(queries, k)
            assert found.shape == scores.shape == (queried, min(k, len(model)))
            for query, row, keys_found in zip(queries, scores, found.tolist(), strict=True):
                products = {key: float(query @ vector) for key, vector in model.items()}
                wanted = sorted(products.values(), reverse=True)[:k]
                assert row.tolist() == wanted
                assert [products[key] for key in keys_found] == wanted
                assert len(set(keys_found)) == len(keys_found)
                # Equal scores come by key.
                pairs = list(zip([-score for score in wanted], keys_found, strict=True))
                assert pairs == sorted(pairs)
        known, rows = search.vectors(np.arange(31))
        assert known.tolist() == [key in model for key in range(31)]
        assert rows.tolist() == [model[key].tolist() for key in sorted(model)]


def test_search_in_many_threads_while_rows_come_and_go() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, 16)).astype(np.float32)
    keys = np.arange(2000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "_BLOCK", 300 * 16 * 4)
        search = FlatSearch(16)
        search.put(keys[:1000], rows[:1000], np.zeros(1000, bool))

        def look(number: int) -> None:
            scores, found = search.search(rows[number : number + 1], 5)
            # Whatever moved: a score belongs to its key.
            np.testing.assert_allclose(scores[0], rows[found[0]] @ rows[number], rtol=1e-4)

        with ThreadPoolExecutor(4) as pool:
            looks = [pool.submit(look, number) for number in range(400)]
            for start in range(0, 1000, 50):
                search.put(keys[1000 + start :][:50], rows[1000 + start :][:50], np.zeros(50, bool))
                search.remove(keys[start : start + 50])
            for done in looks:
                done.result()
    assert len(search) == 1000


def test_the_best_of_candidates() -> None:
    scores = np.array([[1, 3, 3, 2], [0, 0, 0, 0]], np.float32)
    keys = np.array([[4, 9, 5, 6], [8, 2, 4, 6]])
    found_scores, found = best_of(scores, keys, 4)
    assert found_scores.tolist() == [[3, 3, 2, 1], [0, 0, 0, 0]]
    assert found.tolist() == [[5, 9, 6, 4], [2, 4, 6, 8]]
    assert best_of(scores, keys, 2)[1][0].tolist() == [5, 9]
