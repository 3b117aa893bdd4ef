"""A query that is moved by marks, and searches with marks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from listwise.errors import InputError
from listwise.losses import quantized_ap
from listwise.search.entries import Entry, NewEntries, NoEntryError
from listwise.search.hits import QueryError
from listwise.search.index import Index
from listwise.search.moved_query import BINS, KEEP, move_query, objective, start
from listwise.search.opening import create_store
from listwise.search.store import IndexHeader

DIM = 16


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def example(seed, same=5, different=7):
    """A query, and descriptors near it that are marked."""
    generator = np.random.default_rng(seed)
    query = unit(generator.normal(size=DIM))
    marked = unit(query + generator.normal(size=(same + different, DIM)) / 5)
    return query, marked[:same], marked[same:]


def value(point, begin, same, different):
    """The objective, written out for each bin in float64."""
    scores = np.concatenate([same, different]).astype(np.float64) @ point.astype(np.float64)
    width = 2 / (BINS - 1)
    found = ranked = total = 0.0
    for place in range(BINS):
        center = 1 - place * width
        shares = [max(0.0, 1 - abs(score - center) / width) for score in scores]
        new = sum(shares[: len(same)])
        found, ranked = found + new, ranked + sum(shares)
        total += new * (found / ranked if ranked else 1.0)
    return total / len(same) - KEEP * (1 - float(point.astype(np.float64) @ begin))


def numbers(query, same, different, point):
    marked = torch.from_numpy(np.concatenate([same, different])).double()
    relevant = torch.arange(len(marked)) < len(same)
    arguments = torch.from_numpy(point).double(), torch.from_numpy(query).double()
    return float(objective(*arguments, marked, relevant)), marked, relevant


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 6))
def test_the_objective_is_the_average_precision_less_the_distance(seed, same, different):
    query, near, far = example(seed, same, different)
    begin = start(query, near, far)
    found, marked, relevant = numbers(begin, near, far, query)
    assert found == pytest.approx(value(query, begin, near, far), abs=1e-9)
    scores = (marked @ torch.from_numpy(query).double())[None]
    precision = quantized_ap(scores, relevant[None], BINS).item()
    kept = KEEP * (1 - float(query.astype(float) @ begin.astype(float)))
    assert found == pytest.approx(precision - kept, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 6), st.integers(0, 6))
def test_a_moved_query_is_no_worse_than_its_start(seed, same, different):
    query, near, far = example(seed, same, different)
    begin, moved = start(query, near, far), move_query(query, near, far)
    assert np.linalg.norm(moved) == pytest.approx(1, abs=1e-5)
    if same and different:
        assert value(moved, begin, near, far) >= value(begin, begin, near, far) - 1e-6
    else:
        np.testing.assert_array_equal(moved, begin)
    if not same and not different:
        np.testing.assert_allclose(begin, query, atol=1e-6)


def test_a_query_is_moved_where_gradients_are_off():
    query, near, far = example(3, 20, 30)
    with torch.inference_mode():
        moved = move_query(query, near, far)
    np.testing.assert_array_equal(moved, move_query(query, near, far))
    begin = start(query, near, far)
    assert (
        value(moved, begin, near, far) > value(begin, begin, near, far) + 1e-3
    )  # steps were taken


def test_marks_that_cancel_the_query_leave_it():
    query = unit(np.ones(DIM))
    np.testing.assert_array_equal(start(query, query[:0, None], query[None] / 0.4), query)


@pytest.fixture(scope="module")
def small(embedded_places):
    """An index of two things that look alike: the first ten entries are one of them."""
    generator = np.random.default_rng(0)
    centers = unit(generator.normal(size=(2, DIM)) / 3 + generator.normal(size=DIM))
    rows = unit(np.repeat(centers, 10, axis=0) + generator.normal(size=(20, DIM)) / 4)
    header = IndexHeader(model="m", model_folder="m", whitened=False, dim=DIM)
    with create_store(embedded_places(), header) as store:
        made = [
            Entry(f"e{i}", "", 1, 1, digest=f"d{i}", attributes={"even": str(i % 2 == 0)})
            for i in range(20)
        ]
        store.put(NewEntries(made, rows, [b""] * 20))
        yield Index(store), rows, unit(centers.sum(0))


def names(hits):
    return [hit.id for hit in hits]


def test_marked_entries_come_first_and_last(small):
    index, _, query = small
    plain = names(index.search(query, k=20))
    same, different = ["e1", "e3"], ["e11", "e15"]
    found = names(index.search(query, k=20, same=same, different=different))
    assert sorted(found) == sorted(plain)
    assert set(found[:2]) == set(same)
    assert set(found[-2:]) == set(different)
    first = found[2:10]  # eight of the first thing are left
    assert len({f"e{i}" for i in range(10)} & set(first)) > len(
        {f"e{i}" for i in range(10)} & set([name for name in plain if name not in same][:8])
    )
    assert names(index.search(query, k=1, same=same)) in (["e1"], ["e3"])
    keys = [index.entry(name).key for name in same]
    assert names(index.search(query, k=20, same=keys, different=different)) == found
    assert not set(names(index.search(query, k=5, different=different))) & set(different)


def test_marks_work_with_filters_and_limits(small):
    index, rows, query = small
    marks = {"same": ["e1", "e2"], "different": ["e11", "e12"]}
    even = names(index.search(query, k=20, where="even = True", **marks))
    assert even[0] == "e2"
    assert even[-1] == "e12"
    assert set(even) == {f"e{i}" for i in range(0, 20, 2)}
    assert "e1" not in names(index.search(query, k=20, exclude="e1", **marks))
    high = index.search(query, k=20, min_score=0.9, **marks)
    assert {"e1", "e2"} <= set(names(high))
    assert all(hit.score >= 0.9 for hit in high if hit.id not in marks["same"])
    assert (
        names(index.search(like="e0", k=20, **marks))[:2]
        == names(index.search(rows[0], k=20, exclude="e0", **marks))[:2]
    )


@pytest.mark.parametrize("how", [{"expand": True}, {"refine": "diffusion"}])
def test_marks_work_with_expansion_and_refinement(small, how):
    index, _, query = small
    found = names(index.search(query, k=20, same=["e1"], different=["e11"], **how))
    assert found[0] == "e1"
    assert found[-1] == "e11"
    assert len(set(found)) == 20


def test_combinations_that_make_no_sense(small):
    index, _, query = small
    with pytest.raises(InputError, match="e1 is in `same` and in `different`"):
        index.search(query, same="e1", different=["e1", "e2"])
    with pytest.raises(NoEntryError, match="has no entry nothing"):
        index.search(query, same="nothing")
    with pytest.raises(QueryError, match="`min_probability` does not work with marked"):
        index.search(query, same="e1", min_probability=0.5)
    with pytest.raises(InputError, match="`marks` needs one photo or one entry"):
        index.search(query, like="e1", marks=True)


def test_stored_marks_move_the_query(small):
    index, _, _ = small
    made = index.marks.add("e0", same=["e1"], different=["e11"])
    try:
        found = names(index.search(like="e0", k=20, marks=True))
        assert found == names(index.search(like="e0", k=20, same="e1", different="e11"))
        assert found[0] == "e1"
        # A mark of this search takes precedence.
        other = names(index.search(like="e0", k=20, marks=True, different="e1"))
        assert other == names(index.search(like="e0", k=20, different=["e1", "e11"]))
    finally:
        index.marks.undo([mark.id for mark in made])
